//! `milopt verify`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Deserialize;

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
    /// Seed of inputs and initial states
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Draw an integer input from LO..HI, HI excluded; may be given once for each input
    #[arg(long = "range", value_name = "NAME=LO..HI", value_parser = parse_range)]
    ranges: Vec<(String, Range<i64>)>,
    /// Ask for equal bits; otherwise sums may be taken in another order
    #[arg(long)]
    bitwise: bool,
    /// How the interface of B differs from that of A, as the --report of `optimize` says: joined states are compared by
    /// their parts, caches that became inputs are kept and written as a caller does
    #[arg(long, value_name = "REPORT.json")]
    interface: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    opening: Opening,
}

pub(super) fn parse_steps(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("a number of steps, at least 1, is needed".into()),
    }
}

fn parse_range(text: &str) -> Result<(String, Range<i64>), String> {
    let parse = || {
        let (name, range) = text.rsplit_once('=')?;
        let (lo, hi) = range.split_once("..")?;
        let range = lo.parse().ok()?..hi.parse().ok()?;
        (!name.is_empty() && !range.is_empty()).then(|| (name.to_owned(), range))
    };
    parse().ok_or_else(|| "NAME=LO..HI with LO < HI is needed".into())
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
        let options = Options {
            steps: self.steps,
            seed: self.seed,
            ranges: self.ranges.iter().map(|(n, r)| (n.as_str().into(), r.clone())).collect(),
            interface: self.interface.as_deref().map_or(Ok(BTreeMap::new()), read_interface)?,
            ..Options::default()
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
        let wanted = if self.bitwise { Exactness::Bitwise } else { Exactness::Reassociated };
        if report.satisfies(wanted) { Ok(()) } else { Err(Failure::Different) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        assert_eq!(parse_range("pos=-3..12"), Ok(("pos".into(), -3..12)));
        assert_eq!(parse_range("a=b=0..1"), Ok(("a=b".into(), 0..1)));
        for bad in ["", "pos", "pos=1", "pos=1..", "pos=2..2", "=0..1", "pos=0..=1"] {
            assert!(parse_range(bad).is_err(), "{bad}");
        }
        assert!(parse_steps("0").is_err());
    }
}
