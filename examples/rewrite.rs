//! Rewrite a package with the default pipeline, prove it equal, save it:
//! `cargo run --release --example rewrite -- IN.mlpackage OUT.mlpackage [STEPS]`

use std::process::ExitCode;

use milopt::equiv;
use milopt::package::Package;
use milopt::passes::{Pipeline, RunOptions};
use milopt::verify;

fn rewrite(input: &str, output: &str, steps: usize) -> Result<bool, milopt::Error> {
    let original = Package::open(input)?;
    let mut package = Package::open(input)?;
    let report = Pipeline::default().run(package.program_mut(), &RunOptions::default())?;
    print!("{report}");

    let options = equiv::Options { steps, ..Default::default() };
    let proof = equiv::check(original.program(), package.program(), None, &options)?;
    print!("{proof}");
    if !proof.satisfies(equiv::Exactness::Bitwise) {
        return Ok(false);
    }
    println!("bit-exact over {steps} steps");

    package.save(output, verify::structure(package.program())?, &Default::default())?;
    println!("saved {output}");
    Ok(true)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (input, output, steps) = match &args[..] {
        [input, output] => (input, output, Some(8)),
        [input, output, steps] => (input, output, steps.parse().ok()),
        _ => {
            eprintln!("usage: rewrite IN.mlpackage OUT.mlpackage [STEPS]");
            return ExitCode::from(2);
        }
    };
    let Some(steps) = steps else {
        eprintln!("STEPS is a number");
        return ExitCode::from(2);
    };
    match rewrite(input, output, steps) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("not equal: nothing was saved");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("error: {e}");
            let mut source = std::error::Error::source(&e);
            while let Some(cause) = source {
                eprintln!("  because {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}
