//! How `optimize` and `verify` compare.

use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{Failure, run};
use crate::equiv::{Draw, Options, Scope};
use crate::ir::Function;

/// Options of a comparison.
#[derive(Debug, Args)]
#[command(next_help_heading = "Comparison")]
pub(super) struct Checking {
    /// Seed of inputs and initial states
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// How many seeds to run all steps for, counted up from the first
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Kinds of content to run all steps for, or `all`: normal is N(0, 1); in large some elements are 1024 times as large;
    /// ties are halves from -1 to 1; zeros are +0 and -0; in masked no mask lets anything through
    #[arg(long, value_name = "KIND,..", value_parser = parse_draws, default_value = "normal")]
    draw: Draws,
    /// Draw an integer input from LO..HI, HI excluded; may be given once for each input
    #[arg(long = "range", value_name = "NAME=LO..HI", value_parser = parse_range)]
    ranges: Vec<(String, Range<i64>)>,
    /// The shape of an input of free size; may be given once for each input. By default several are tried
    #[arg(long = "shape", value_name = "NAME=N,N,..", value_parser = parse_shape)]
    shapes: Vec<(String, Vec<usize>)>,
    /// Take inputs, and starting states as state_<name>, from an .npz file; what it lacks is drawn
    #[arg(long, value_name = "IN.npz")]
    inputs: Option<PathBuf>,
    /// The leading axis of the arrays of --inputs counts steps
    #[arg(long, requires = "inputs")]
    stepped: bool,
    /// Run only what differs, each rewritten neighbourhood on its own, and read no weights; by default for functions
    /// with more than 256 MiB of them
    #[arg(long, conflicts_with = "full")]
    local: bool,
    /// Run whole functions, whatever the size of their weights
    #[arg(long)]
    full: bool,
}

/// Kinds of content.
#[derive(Clone, PartialEq, Debug)]
struct Draws(Vec<Draw>);

impl Checking {
    /// What the comparison is to do. `package` and `f` are what the arrays of --inputs are for.
    pub(super) fn options(&self, steps: usize, package: &Path, f: Option<&Function>) -> Result<Options, Failure> {
        let (given, given_states) = match (&self.inputs, f) {
            (Some(path), Some(f)) => run::given(package, path, f, self.stepped)?,
            (Some(_), None) => {
                return Err(Failure::Usage("--inputs is for one function; name it by --function".into()));
            }
            (None, _) => Default::default(),
        };
        Ok(Options {
            steps,
            seed: self.seed,
            seeds: self.seeds,
            draws: self.draw.0.clone(),
            given,
            given_states,
            scope: match (self.local, self.full) {
                (true, _) => Scope::Local,
                (_, true) => Scope::Whole,
                _ => Scope::Auto,
            },
            ranges: self.ranges.iter().map(|(n, r)| (n.as_str().into(), r.clone())).collect(),
            shapes: self.shapes.iter().map(|(n, s)| (n.as_str().into(), s.clone())).collect(),
            ..Options::default()
        })
    }

    /// The option that says something else than the default, if one does.
    pub(super) fn first_used(&self) -> Option<&'static str> {
        let used = [
            ("--seed", self.seed != 0),
            ("--seeds", self.seeds != 1),
            ("--draw", self.draw.0 != [Draw::Normal]),
            ("--range", !self.ranges.is_empty()),
            ("--shape", !self.shapes.is_empty()),
            ("--inputs", self.inputs.is_some()),
            ("--local", self.local),
            ("--full", self.full),
        ];
        used.into_iter().find(|(_, used)| *used).map(|(option, _)| option)
    }
}

/// A number of steps.
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

/// Kinds by name, each once.
fn parse_draws(text: &str) -> Result<Draws, String> {
    let mut draws: Vec<Draw> = Vec::new();
    for name in text.split(',').map(str::trim) {
        let named = Draw::ALL.into_iter().filter(|kind| name == "all" || name == kind.to_string());
        let named: Vec<Draw> = named.collect();
        if named.is_empty() {
            let known = Draw::ALL.map(|kind| kind.to_string()).join(", ");
            return Err(format!("there is no kind `{name}`; there are all, {known}"));
        }
        draws.extend(named.into_iter().filter(|kind| !draws.contains(kind)).collect::<Vec<_>>());
    }
    Ok(Draws(draws))
}

fn parse_shape(text: &str) -> Result<(String, Vec<usize>), String> {
    let parse = || {
        let (name, sizes) = text.rsplit_once('=')?;
        let sizes = sizes.split(',').map(|n| n.trim().parse().ok()).collect::<Option<Vec<usize>>>()?;
        (!name.is_empty()).then(|| (name.to_owned(), sizes))
    };
    parse().ok_or_else(|| "NAME=N,N,.. with a size for each axis is needed".into())
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

    #[test]
    fn draws() {
        let parsed = |text: &str| parse_draws(text).map(|d| d.0);
        assert_eq!(parsed("ties,all"), Ok(vec![Draw::Ties, Draw::Normal, Draw::Large, Draw::Zeros, Draw::Masked]));
        assert_eq!(parsed("zeros,zeros"), Ok(vec![Draw::Zeros]));
        for bad in ["", "tie", "normal,"] {
            assert!(parse_draws(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shapes() {
        assert_eq!(parse_shape("ids=1,16"), Ok(("ids".into(), vec![1, 16])));
        for bad in ["", "ids", "ids=", "ids=1,", "=1", "ids=-1", "ids=1x2"] {
            assert!(parse_shape(bad).is_err(), "{bad}");
        }
    }
}
