//! The outcome of a comparison, for people and as JSON.

use std::cmp::Reverse;
use std::fmt;

use serde::{Serialize, Serializer};

use super::compare::{Difference, Moment};
use super::{Draw, Options};
use crate::ir::Name;

/// How equal two programs have to be.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Exactness {
    /// Equal bit patterns when every tensor is rounded to its type; any NaN equals any NaN, −0 is not +0.
    Bitwise,
    /// Equal up to the order of summation, within the bounds of the [module documentation](super).
    Reassociated,
    /// No element is further off than this number of representable values, when every tensor is rounded to its type.
    Ulps(u64),
    /// No element is further off than this, times max(1, max|a|) of the tensor, when every tensor is rounded to its type;
    /// integers are equal.
    Tolerance(f64),
}

/// How equal two tensors, functions or programs were found to be. The order is from best to worst.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As [`Exactness::Bitwise`] asks.
    Bitwise,
    /// As [`Exactness::Reassociated`] asks, and no better.
    Reassociated,
    /// Neither.
    Different,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Bitwise => "bitwise equal",
            Verdict::Reassociated => "reassociated",
            Verdict::Different => "different",
        })
    }
}

/// What [`check`](super::check) found. `Display` gives a screen for people; JSON comes from `Serialize`.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The worst verdict of all functions.
    pub verdict: Verdict,
    /// The first seed that inputs came from.
    pub seed: u64,
    /// How many seeds there were, counted up from the first.
    pub seeds: u64,
    /// The kinds of content that were drawn.
    pub draws: Vec<Draw>,
    /// One entry a function, sorted by name.
    pub functions: Vec<FunctionReport>,
}

/// What was found of one function.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct FunctionReport {
    /// Name.
    #[serde(serialize_with = "name")]
    pub name: Name,
    /// The worst verdict of all outputs, states and regions.
    pub verdict: Verdict,
    /// Steps that were run for each seed and kind of content.
    pub steps: usize,
    /// Outputs in the order of the first program; empty where regions were compared.
    pub outputs: Vec<TensorReport>,
    /// States in the order of the first program, as they were after every step; empty where regions were compared.
    pub states: Vec<TensorReport>,
    /// Whether only what differs was run, region by region.
    pub local: bool,
    /// The regions, those that are alike but for names once, for each set of input shapes.
    pub regions: Vec<RegionReport>,
    /// Ops that are the same in both functions and not in any region; 0 where whole functions were compared.
    pub unchanged: usize,
    /// Where the two programs part, when they do and name some differing value alike.
    pub first_divergence: Option<Divergence>,
    /// What the comparison did not cover.
    pub notes: Vec<String>,
}

/// What was found of one rewritten neighbourhood.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct RegionReport {
    /// Kind and name of its ops in the first program, in order.
    pub before: Vec<String>,
    /// Kind and name of its ops in the second program, in order.
    pub after: Vec<String>,
    /// How many regions there are of this form.
    pub count: usize,
    /// The worst verdict of all outputs and states.
    pub verdict: Verdict,
    /// What it gives to the rest of the function.
    pub outputs: Vec<TensorReport>,
    /// States as they were after every step.
    pub states: Vec<TensorReport>,
    /// Where the two programs part.
    pub first_divergence: Option<Divergence>,
    /// What the comparison did not cover.
    pub notes: Vec<String>,
}

/// What was found of one output or state.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct TensorReport {
    /// Name.
    #[serde(serialize_with = "name")]
    pub name: Name,
    /// Verdict.
    pub verdict: Verdict,
    /// The difference when every tensor is rounded to its type.
    pub storage: Difference,
    /// The difference under exact evaluation, when the function was not bitwise equal.
    pub exact: Option<Difference>,
}

/// The first value, in the order of the second program, that both programs name alike and compute differently. Where there
/// is none but the result itself, what gives the result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[non_exhaustive]
pub struct Divergence {
    /// When.
    #[serde(flatten)]
    pub at: Moment,
    /// Kind and name of the op in the first program.
    pub a: String,
    /// Kind and name of the op in the second program.
    pub b: String,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.b, self.at)?;
        if self.a == self.b { Ok(()) } else { write!(f, ", {} before", self.a) }
    }
}

fn name<S: Serializer>(name: &Name, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(name)
}

impl Report {
    pub(super) fn new(options: &Options, functions: Vec<FunctionReport>) -> Report {
        let verdict = functions.iter().map(|f| f.verdict).max().unwrap_or(Verdict::Bitwise);
        Report { verdict, seed: options.seed, seeds: options.seeds, draws: options.draws.clone(), functions }
    }

    /// Whether the programs are as equal as asked, or more.
    pub fn satisfies(&self, exactness: Exactness) -> bool {
        self.functions.iter().all(|f| f.satisfies(exactness))
    }

    /// Where the worst of the functions parts from what it was.
    pub fn first_divergence(&self) -> Option<&Divergence> {
        let worst = self.functions.iter().filter(|f| f.verdict == self.verdict);
        worst.filter_map(|f| f.first_divergence.as_ref()).next()
    }
}

impl FunctionReport {
    /// Whether the functions are as equal as asked, or more.
    pub fn satisfies(&self, exactness: Exactness) -> bool {
        self.tensors().all(|t| t.satisfies(exactness))
    }

    /// What was found of every output and state.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorReport> {
        let regions = self.regions.iter().flat_map(|r| r.outputs.iter().chain(&r.states));
        self.outputs.iter().chain(&self.states).chain(regions)
    }

    /// The tables of the regions: all there is to say of those that differ, a line of the others.
    fn fmt_regions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count: usize = self.regions.iter().map(|r| r.count).sum();
        let forms = self.regions.len();
        writeln!(
            f,
            "  {count} rewritten regions of {forms} forms; {} ops are as they were, and not run",
            self.unchanged
        )?;
        let mut regions: Vec<&RegionReport> = self.regions.iter().collect();
        regions.sort_by_key(|r| Reverse(r.verdict));
        for region in regions.iter().take(MAX_REGIONS) {
            let name = |ops: &[String]| ops.last().cloned().unwrap_or_else(|| "nothing".into());
            let last = if region.after.is_empty() { name(&region.before) } else { name(&region.after) };
            writeln!(f, "  {} × region up to {last}: {}", region.count, region.verdict)?;
            if region.verdict > Verdict::Bitwise {
                fmt_rows(f, "    ", &region.outputs, &region.states)?;
            }
            region.notes.iter().try_for_each(|note| writeln!(f, "    note: {note}"))?;
        }
        match forms.checked_sub(MAX_REGIONS).filter(|&n| n > 0) {
            Some(rest) => writeln!(f, "  and {rest} more forms, none worse"),
            None => Ok(()),
        }
    }
}

/// Rows for outputs and states, the worst first when there are many.
fn fmt_rows(
    f: &mut fmt::Formatter<'_>,
    indent: &str,
    outputs: &[TensorReport],
    states: &[TensorReport],
) -> fmt::Result {
    let mut rows: Vec<(&str, &TensorReport)> = outputs.iter().map(|t| ("output", t)).collect();
    rows.extend(states.iter().map(|t| ("state", t)));
    if rows.len() > MAX_ROWS {
        rows.sort_by_key(|(_, t)| Reverse(t.verdict));
    }
    let width = rows.iter().take(MAX_ROWS).map(|(_, t)| t.name.chars().count()).max().unwrap_or(0);
    for (kind, t) in rows.iter().take(MAX_ROWS) {
        writeln!(f, "{indent}{kind:6}  {:width$}  {:13}  {t}", t.name.as_str(), t.verdict)?;
    }
    match rows.len().checked_sub(MAX_ROWS).filter(|&n| n > 0) {
        Some(rest) => writeln!(f, "{indent}and {rest} more, none worse"),
        None => Ok(()),
    }
}

impl TensorReport {
    pub(super) fn new(name: Name, storage: Difference, exact: Option<Difference>) -> TensorReport {
        let within = storage.is_within_bound() && exact.as_ref().is_some_and(Difference::is_within_bound);
        let verdict = match storage.is_bitwise() {
            true => Verdict::Bitwise,
            false if within => Verdict::Reassociated,
            false => Verdict::Different,
        };
        TensorReport { name, verdict, storage, exact }
    }

    /// Whether the tensors are as equal as asked, or more.
    pub fn satisfies(&self, exactness: Exactness) -> bool {
        match exactness {
            Exactness::Bitwise => self.verdict == Verdict::Bitwise,
            Exactness::Reassociated => self.verdict <= Verdict::Reassociated,
            Exactness::Ulps(most) => self.storage.max_ulp <= most,
            Exactness::Tolerance(most) => self.storage.of_scale <= most,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.seeds > 1 || self.draws != [Draw::Normal] {
            let s = if self.seeds == 1 { "" } else { "s" };
            let draws: Vec<String> = self.draws.iter().map(Draw::to_string).collect();
            writeln!(f, "for {} seed{s} from {}, {} inputs", self.seeds, self.seed, draws.join(", "))?;
        }
        self.functions.iter().try_for_each(|function| function.fmt(f))
    }
}

/// Rows of a table that are printed.
const MAX_ROWS: usize = 16;
/// Forms of regions that are printed.
const MAX_REGIONS: usize = 8;

impl fmt::Display for FunctionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.steps == 1 { "" } else { "s" };
        writeln!(f, "{}: {} over {} step{s}", self.name, self.verdict, self.steps)?;
        match self.local {
            true => self.fmt_regions(f)?,
            false => fmt_rows(f, "  ", &self.outputs, &self.states)?,
        }
        if let Some(d) = &self.first_divergence {
            writeln!(f, "  first divergence: {d}")?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "  note: {note}"))
    }
}

/// The numbers of one row: how much differs, by how much, and where first.
impl fmt::Display for TensorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &self.storage;
        if d.differing > 0 {
            write!(f, "{} of ", d.differing)?;
        }
        write!(f, "{} elements", d.elements)?;
        if d.finite < d.elements {
            write!(f, " ({} finite)", d.finite)?;
        }
        let Some(first) = &d.first else { return Ok(()) };
        write!(f, ", max |a-b| {:.3e}", d.max_abs)?;
        if d.max_ulp > 0 && d.max_ulp < u64::MAX {
            write!(f, " ({} ulp)", d.max_ulp)?;
        }
        if let Some(exact) = &self.exact {
            write!(f, ", exact {:.3e}", exact.max_abs)?;
        }
        write!(f, ", first at {} {:?}: {:?} and {:?}", first.at, first.index, first.a, first.b)
    }
}
