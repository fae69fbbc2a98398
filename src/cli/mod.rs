//! The `milopt` command: arguments, printing and side files. No logic of its own.
//!
//! Exit codes: 0 done, 1 failed (`verify`: not equal), 2 wrong usage, 3 `verify` could not compare.

mod inspect;
mod npy;
mod npz;
mod optimize;
mod passes;
mod print;
mod progress;
mod run;
mod verify;

use std::error::Error;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::ir::{Function, Program};
use crate::package::{OpenOptions, Package, PackageError};

/// Rewrites Core ML packages so that they run faster, and proves that they still compute the same thing.
#[derive(Debug, Parser)]
#[command(name = "milopt", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Inspect),
    Optimize(optimize::Optimize),
    Verify(verify::Verify),
    Run(run::Run),
    Print(print::Print),
    Passes(passes::Passes),
}

/// How packages are opened.
#[derive(Debug, Args)]
struct Opening {
    /// Read through symbolic links that leave the package, as in download caches
    #[arg(long)]
    follow_symlinks: bool,
}

impl Opening {
    fn open(&self, path: &PathBuf) -> Result<Package, PackageError> {
        OpenOptions::new().follow_symlinks(self.follow_symlinks).open(path)
    }
}

/// Why a command did not do what it was asked for.
enum Failure {
    /// The arguments do not make sense.
    Usage(String),
    /// Something failed.
    Failed(Box<dyn Error>),
    /// Two programs differ; the report is printed.
    Different,
    /// Two programs could not be compared.
    NotCompared(Box<dyn Error>),
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(e: E) -> Failure {
        Failure::Failed(Box::new(e))
    }
}

/// Runs the command that the arguments of the process name.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = BufWriter::new(io::stdout().lock());
    let done = match cli.command {
        Command::Inspect(c) => c.execute(&mut out),
        Command::Optimize(c) => c.execute(&mut out),
        Command::Verify(c) => c.execute(&mut out),
        Command::Run(c) => c.execute(),
        Command::Print(c) => c.execute(&mut out),
        Command::Passes(c) => c.execute(&mut out),
    };
    let flushed = out.flush().map_err(Failure::from);
    match done.and(flushed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Different) => ExitCode::FAILURE,
        Err(Failure::Failed(e)) if is_closed_pipe(&*e) => ExitCode::SUCCESS,
        Err(Failure::Failed(e)) => tell(&*e, 1),
        Err(Failure::Usage(message)) => tell(&*Box::<dyn Error>::from(message), 2),
        Err(Failure::NotCompared(e)) => tell(&*e, 3),
    }
}

/// Whether the reader of our output went away, which is its right.
fn is_closed_pipe(e: &(dyn Error + 'static)) -> bool {
    e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints an error with its causes.
fn tell(error: &dyn Error, code: u8) -> ExitCode {
    let mut text = format!("error: {error}");
    let mut cause = error.source();
    while let Some(e) = cause {
        text.push_str(&format!(": {e}"));
        cause = e.source();
    }
    // There is nowhere to tell that telling failed.
    let _ = writeln!(io::stderr(), "{text}");
    ExitCode::from(code)
}

/// A line on stderr that is no error.
fn note(text: &str) {
    let _ = writeln!(io::stderr(), "note: {text}");
}

/// The function that `--function` names, or the one that runs when none is named.
fn select<'p>(program: &'p Program, name: Option<&str>) -> Result<&'p Function, Failure> {
    let found = match name {
        Some(name) => program.function(name),
        None => program.main(),
    };
    found.ok_or_else(|| {
        let known: Vec<_> = program.functions().iter().map(|f| f.name().as_str()).collect();
        let what = name.map_or("no default function".to_owned(), |n| format!("no function `{n}`"));
        Failure::Usage(format!("there is {what}; there are {}", known.join(", ")))
    })
}
