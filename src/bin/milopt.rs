//! The `milopt` command; see [`milopt::cli`].

fn main() -> std::process::ExitCode {
    milopt::cli::main()
}
