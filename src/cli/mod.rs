//! The `milopt` command: arguments, printing and side files. No logic of its own.
//!
//! Exit codes: 0 done, 1 failed (`verify`: not equal), 2 wrong usage, 3 `verify` could not compare.

mod checking;
mod inspect;
mod npy;
mod npz;
mod optimize;
mod passes;
mod print;
mod progress;
mod run;
mod staged;
mod verify;

use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::ir::Function;
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
    /// Something failed; in `verify`, so that nothing was compared.
    Failed(Box<dyn Error>),
    /// Two programs differ; the report is printed.
    Different,
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(e: E) -> Failure {
        Failure::Failed(Box::new(e))
    }
}

/// An error and the file that it is about.
#[derive(Debug, thiserror::Error)]
#[error("{}", path.display())]
struct About {
    path: PathBuf,
    source: Box<dyn Error>,
}

fn about(path: &Path, error: impl Into<Box<dyn Error>>) -> Failure {
    Failure::from(About { path: path.to_owned(), source: error.into() })
}

/// Runs the command that the arguments of the process name.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let failed = if matches!(cli.command, Command::Verify(_)) { 3 } else { 1 };
    let mut out = Vec::new();
    let done = match cli.command {
        Command::Inspect(c) => c.execute(&mut out),
        Command::Optimize(c) => c.execute(&mut out),
        Command::Verify(c) => c.execute(&mut out),
        Command::Run(c) => c.execute(),
        Command::Print(c) => c.execute(&mut out),
        Command::Passes(c) => c.execute(&mut out),
    };
    match (done, print(&out)) {
        (Err(Failure::Usage(message)), _) => tell(&*Box::<dyn Error>::from(message), 2),
        (Err(Failure::Failed(e)), _) => tell(&*e, failed),
        (_, Err(e)) => tell(&*Box::<dyn Error>::from(format!("cannot write to standard output: {e}")), failed),
        (Err(Failure::Different), Ok(())) => ExitCode::FAILURE,
        (Ok(()), Ok(())) => ExitCode::SUCCESS,
    }
}

/// Writes to standard output. That nobody reads it to its end is the reader's right.
fn print(text: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// Prints an error with its causes.
fn tell(error: &dyn Error, code: u8) -> ExitCode {
    // There is nowhere to tell that telling failed.
    let _ = writeln!(io::stderr(), "error: {}", with_causes(error));
    ExitCode::from(code)
}

fn with_causes(error: &dyn Error) -> String {
    let causes = std::iter::successors(Some(error), |e| Error::source(*e));
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// A line on stderr that is no error.
fn note(text: &str) {
    let _ = writeln!(io::stderr(), "note: {text}");
}

/// The function that `--function` names, or the one that runs when none is named.
fn select<'p>(package: &'p Package, name: Option<&str>) -> Result<&'p Function, Failure> {
    let program = package.program();
    let found = match name {
        Some(name) => program.function(name),
        None => program.main(),
    };
    found.ok_or_else(|| {
        let path = package.path().unwrap_or(Path::new(""));
        let known: Vec<_> = program.functions().iter().map(|f| f.name().as_str()).collect();
        if known.is_empty() {
            return about(path, "there are no functions");
        }
        let what = name.map_or("no default function".to_owned(), |n| format!("no function `{n}`"));
        Failure::Usage(format!("{}: there is {what}; there are {}", path.display(), known.join(", ")))
    })
}

/// Refuses a file to write where no file can be, before any work is done.
fn check_output(path: &Path) -> Result<(), Failure> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let reason = match path.file_name() {
        None => "it names no file".to_owned(),
        Some(_) if path.is_dir() => "it is a directory".to_owned(),
        Some(_) if !parent.is_dir() => format!("there is no directory {}", parent.display()),
        Some(_) => return Ok(()),
    };
    Err(Failure::Failed(format!("cannot write {}: {reason}", path.display()).into()))
}

/// Refuses an output that is one of the other files.
fn check_distinct(option: &str, path: &Path, others: &[(&str, Option<&Path>)]) -> Result<(), Failure> {
    let same = others.iter().find(|(_, other)| other.is_some_and(|other| real(other) == real(path)));
    same.map_or(Ok(()), |(other, _)| Err(Failure::Usage(format!("{option} and {other} are both {}", path.display()))))
}

/// Refuses an output that is one of these packages or lies in it.
fn check_outside(option: &str, path: &Path, packages: &[(&str, Option<&Path>)]) -> Result<(), Failure> {
    let within = |package: &Path| real(path).starts_with(real(package));
    let found = packages.iter().find(|(_, package)| package.is_some_and(within));
    found.map_or(Ok(()), |(package, _)| {
        Err(Failure::Usage(format!("{option}: {} lies in the package of {package}", path.display())))
    })
}

/// A path without links, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let in_parent = || Some(absolute.parent()?.canonicalize().ok()?.join(absolute.file_name()?));
    absolute.canonicalize().ok().or_else(in_parent).unwrap_or_else(|| absolute.clone())
}
