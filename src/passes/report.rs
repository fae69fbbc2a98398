//! What a pipeline did: counts before and after, rewrites and refusals.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use crate::analysis::state::{FunctionalCache, functional};
use crate::analysis::traffic::{DISCLAIMER, Traffic};
use crate::ir::{Function, Name};
use crate::rewrite::{Declined, Fired, InterfaceChange, Keeps, NoMatch, Outcome};

/// How far a pass keeps results: those of outputs and states as they were, or as their parts are found in what a pass that
/// [changes the interface](super::Pass::changes_interface) made of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Exactness {
    /// Every output and state has the same bits, under any evaluation whose dot products do not depend on the number of
    /// rows, columns or batches.
    Bitwise,
    /// Sums are taken in another order.
    Reassociated,
}

impl fmt::Display for Exactness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Exactness::Bitwise => "bitwise",
            Exactness::Reassociated => "reassociated",
        })
    }
}

/// Counts of one function.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Census {
    /// Ops that are not `const`, nested ones included.
    pub ops: usize,
    /// `const` ops.
    pub constants: usize,
    /// Ops by kind, `const` not included.
    pub kinds: BTreeMap<String, usize>,
    /// Bytes per run.
    pub traffic: Traffic,
}

impl Census {
    /// Counts a function.
    pub fn of(f: &Function) -> Census {
        let mut census = Census { ops: 0, constants: 0, kinds: BTreeMap::new(), traffic: Traffic::of(f) };
        for op in f.all_ops() {
            if f.op(op).kind() == "const" {
                census.constants += 1;
            } else {
                census.ops += 1;
                *census.kinds.entry(f.op(op).kind().to_string()).or_insert(0) += 1;
            }
        }
        census
    }

    /// How many ops of a kind there are.
    pub fn count(&self, kind: &str) -> usize {
        self.kinds.get(kind).copied().unwrap_or(0)
    }
}

/// What one pass did to one function.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PassReport {
    /// The pass.
    pub pass: String,
    /// What it promises.
    pub exactness: Exactness,
    /// Whether it changes inputs, outputs or states.
    pub changes_interface: bool,
    /// Rewrites that were done.
    pub fired: Vec<Fired>,
    /// Rewrites that were considered and not done.
    pub declined: Vec<Declined>,
    /// How the interface changed.
    pub interface: Vec<InterfaceChange>,
}

impl PassReport {
    /// A pass that did nothing yet.
    pub(super) fn of(pass: &dyn super::Pass) -> PassReport {
        PassReport {
            pass: pass.name().into(),
            exactness: pass.exactness(),
            changes_interface: pass.changes_interface(),
            fired: vec![],
            declined: vec![],
            interface: vec![],
        }
    }

    /// Adds a run of the pass. Refusals are those of the first: later ones are about what the pipeline made itself.
    pub(super) fn add(&mut self, outcome: Outcome, first: bool) {
        self.fired.extend(outcome.fired);
        self.interface.extend(outcome.interface);
        if first {
            self.declined = outcome.declined;
        }
    }

    /// Drops refusals of ops and states that were rewritten after all, or are gone.
    pub(super) fn settle(&mut self, f: &Function) {
        let states =
            f.inputs().iter().filter(|&&v| f.ty(v).as_state().is_some()).map(|&v| describe_state(f.value(v).name()));
        let there: BTreeSet<String> =
            f.all_ops().into_iter().map(|op| f.describe(op)).chain(states).chain([f.name().to_string()]).collect();
        let fired: BTreeSet<&String> = self.fired.iter().map(|fired| &fired.op).collect();
        self.declined.retain(|d| there.contains(&d.op) && !fired.contains(&d.op));
    }
}

impl fmt::Display for PassReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "  {}: {} done, {} declined", self.pass, self.fired.len(), self.declined.len())?;
        for (form, n) in tally(self.fired.iter().map(|fired| form(&fired.form))) {
            writeln!(out, "    {n} × {form}")?;
        }
        for change in &self.interface {
            writeln!(out, "    interface: {change}")?;
        }
        for (keeps, what) in
            [(Keeps::Copies, "copies stay"), (Keeps::Reshapes, "reshapes stay"), (Keeps::StateOps, "state ops stay")]
        {
            let n = self.declined.iter().filter(|d| d.keeps == keeps).count();
            if n > 0 {
                writeln!(out, "    {n} × {what} (--explain says why)")?;
            }
        }
        for (hazard, n) in tally(self.fired.iter().flat_map(|fired| fired.hazards.iter().copied())) {
            writeln!(out, "    hazard of {n}: {hazard}")?;
        }
        Ok(())
    }
}

/// What a state is called in a report.
pub(super) fn describe_state(name: &str) -> String {
    format!("state `{name}`")
}

/// Why a pass for states has nothing to do where caches are handed in and out.
pub(super) fn passed_through(f: &Function) -> Vec<Declined> {
    if f.inputs().iter().any(|&v| f.ty(v).as_state().is_some()) {
        return vec![];
    }
    let refusal = |cache: FunctionalCache| {
        let name = f.value(cache.input).name();
        NoMatch::because(format!(
            "the cache `{name}` is an input and an output ({}), not a state; nothing to defer or merge",
            cache.kind
        ))
        .remedy("the model is converted with the cache as a state")
        .declined(f.describe(f.producer(cache.output)?))
    };
    functional(f).into_iter().filter_map(refusal).collect()
}

/// The part of a form that many rewrites have in common.
fn form(text: &str) -> &str {
    text.split(':').next().unwrap_or(text)
}

fn tally<'a>(items: impl Iterator<Item = &'a str>) -> BTreeMap<&'a str, usize> {
    items.fold(BTreeMap::new(), |mut counts, item| {
        *counts.entry(item).or_default() += 1;
        counts
    })
}

/// What a pipeline did to one function.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FunctionReport {
    /// The function.
    pub function: String,
    /// Counts before.
    pub before: Census,
    /// Counts after.
    pub after: Census,
    /// Passes in the order in which they ran.
    pub passes: Vec<PassReport>,
    /// How the interface changed, over all passes and rounds, in the order in which it did.
    pub interface: Vec<InterfaceChange>,
}

/// What a pipeline did to a program.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Report {
    /// One entry per function, in name order.
    pub functions: Vec<FunctionReport>,
}

impl Report {
    /// Whether any rewrite was done.
    pub fn changed(&self) -> bool {
        self.functions.iter().flat_map(|f| &f.passes).any(|p| !p.fired.is_empty())
    }

    /// How the interface of a function changed, in order.
    pub fn interface(&self, function: &str) -> Vec<&InterfaceChange> {
        self.functions.iter().filter(|f| f.function == function).flat_map(|f| &f.interface).collect()
    }

    /// How the interfaces changed, by the name of the function; for [`equiv::Options`](crate::equiv::Options).
    pub fn interfaces(&self) -> BTreeMap<Name, Vec<InterfaceChange>> {
        let changes = |f: &FunctionReport| self.interface(&f.function).into_iter().cloned().collect();
        self.functions.iter().map(|f| (f.function.as_str().into(), changes(f))).collect()
    }

    /// The weakest promise among the passes that did something.
    pub fn exactness(&self) -> Exactness {
        self.functions
            .iter()
            .flat_map(|f| &f.passes)
            .filter(|p| !p.fired.is_empty())
            .map(|p| p.exactness)
            .max()
            .unwrap_or(Exactness::Bitwise)
    }

    /// The refusals, a line each, with the pass that made them.
    pub fn explain(&self) -> String {
        let mut out = String::new();
        for function in &self.functions {
            for pass in &function.passes {
                for d in &pass.declined {
                    out.push_str(&format!("{}: {}: {d}\n", function.function, pass.pass));
                }
            }
        }
        out
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for f in &self.functions {
            writeln!(out, "{}", f.function)?;
            writeln!(out, "  {:<24} {:>14} {:>14}", "", "before", "after")?;
            let mut row = |name: &str, a: String, b: String| writeln!(out, "  {name:<24} {a:>14} {b:>14}");
            let (a, b) = (&f.before, &f.after);
            row("ops (no constants)", a.ops.to_string(), b.ops.to_string())?;
            let kinds: BTreeSet<&String> = a.kinds.keys().chain(b.kinds.keys()).collect();
            for kind in kinds {
                if a.count(kind) != b.count(kind) {
                    row(&format!("  {kind}"), a.count(kind).to_string(), b.count(kind).to_string())?;
                }
            }
            let repeats = |t: &Traffic| format!("{} ({})", t.repeats.count, bytes(t.repeats.total()));
            row("repeated copies", repeats(&a.traffic), repeats(&b.traffic))?;
            if a.traffic.states > 0 {
                for kind in
                    ["read_state", "write_state", "slice_update"].into_iter().filter(|k| a.count(k) == b.count(k))
                {
                    row(&format!("  {kind}"), a.count(kind).to_string(), b.count(kind).to_string())?;
                }
                row("states updated by", bytes(a.traffic.state_updates), bytes(b.traffic.state_updates))?;
                let handed = |t: &Traffic| bytes(t.states_handed_over);
                row("states handed over", handed(&a.traffic), handed(&b.traffic))?;
            }
            row("bytes per run", bytes(a.traffic.total()), bytes(b.traffic.total()))?;
            if a.traffic.unknown > 0 {
                row("  values of unknown size", a.traffic.unknown.to_string(), b.traffic.unknown.to_string())?;
            }
            for p in &f.passes {
                p.fmt(out)?;
            }
        }
        writeln!(out, "({DISCLAIMER})")
    }
}

/// A number of bytes for people.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = n as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{size:.1} {}", UNITS[unit]) }
}
