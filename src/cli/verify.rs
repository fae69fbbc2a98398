//! `milopt verify`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;

use super::checking::{Checking, parse_steps};
use super::progress::Spinner;
use super::{Failure, Opening, about, select};
use crate::equiv::{self, EquivError, Exactness, Options};
use crate::ir::Name;
use crate::rewrite::InterfaceChange;

/// Compare two packages on random inputs
///
/// Exit codes: 0 equal, 1 not equal, 2 wrong usage, 3 could not compare.
#[derive(Debug, Args)]
pub(super) struct Verify {
    /// The first package
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The second package
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Only this function
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// Steps to run; states carry over from one to the next, and 8 steps see every pattern of masks
    #[arg(long, value_name = "N", default_value_t = Options::default().steps, value_parser = parse_steps)]
    steps: usize,
    /// Ask for equal bits; otherwise sums may be taken in another order
    #[arg(long)]
    bitwise: bool,
    /// Ask that no float is further off than N representable values of its type
    #[arg(long, value_name = "N", conflicts_with = "bitwise")]
    ulps: Option<u64>,
    /// Ask that nothing is further off than X times the larger of 1 and the largest magnitude of its tensor
    #[arg(long, value_name = "X", conflicts_with_all = ["bitwise", "ulps"], value_parser = parse_tolerance)]
    tolerance: Option<f64>,
    /// How the interface of B differs from that of A, as the --report of `optimize` says: joined states are compared by
    /// their parts, caches that became inputs are kept and written as a caller does
    #[arg(long, value_name = "REPORT.json")]
    interface: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    checking: Checking,
    #[command(flatten)]
    opening: Opening,
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(x) if x >= 0.0 && f64::is_finite(x) => Ok(x),
        _ => Err("a number that is not negative is needed".into()),
    }
}

/// What matters here of the report of `optimize`.
#[derive(Deserialize)]
struct Changes {
    functions: Vec<FunctionChanges>,
}

#[derive(Deserialize)]
struct FunctionChanges {
    function: Name,
    interface: Vec<InterfaceChange>,
}

/// The changes that a report tells of, by function.
fn read_interface(path: &Path) -> Result<BTreeMap<Name, Vec<InterfaceChange>>, Failure> {
    let text = fs::read_to_string(path).map_err(|e| about(path, e))?;
    let report: Changes = serde_json::from_str(&text).map_err(|e| about(path, e))?;
    Ok(report.functions.into_iter().map(|f| (f.function, f.interface)).collect())
}

impl Verify {
    pub(super) fn execute(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let a = self.opening.open(&self.a)?;
        let b = self.opening.open(&self.b)?;
        if let Some(name) = &self.function {
            // A function of one program only is a difference, not a mistake.
            select(&a, Some(name)).or_else(|mistake| select(&b, Some(name)).map_err(|_| mistake))?;
        }
        let one = |f: &Option<String>| match f {
            Some(name) => a.program().function(name),
            None => a.program().functions().first().filter(|_| a.program().functions().len() == 1),
        };
        let options = Options {
            interface: self.interface.as_deref().map_or(Ok(BTreeMap::new()), read_interface)?,
            ..self.checking.options(self.steps, &self.a, one(&self.function))?
        };
        let spinner = Spinner::new(format!("comparing over {} steps", self.steps));
        let report = equiv::check(a.program(), b.program(), self.function.as_deref(), &options);
        drop(spinner);
        let report = report.map_err(|e| match e {
            EquivError::NoInput(_) => Failure::Usage(e.to_string()),
            e => e.into(),
        })?;
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &report)?;
            writeln!(out)?;
        } else {
            write!(out, "{report}")?;
        }
        let wanted = match (self.bitwise, self.ulps, self.tolerance) {
            (true, ..) => Exactness::Bitwise,
            (_, Some(n), _) => Exactness::Ulps(n),
            (.., Some(x)) => Exactness::Tolerance(x),
            _ => Exactness::Reassociated,
        };
        if report.satisfies(wanted) { Ok(()) } else { Err(Failure::Different) }
    }
}
