//! `milopt inspect`.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{Failure, Opening, with_causes};
use crate::analysis::state::{FunctionalCache, breaches, functional};
use crate::analysis::traffic::DISCLAIMER;
use crate::ir::{ArrayFeature, Flexibility, Function, Program, ValueId};
use crate::passes::{Census, Pipeline, PipelineError, RunOptions, bytes};

/// Show functions, features, op counts, bytes per run and what the passes would find
#[derive(Debug, Args)]
pub(super) struct Inspect {
    /// The package
    #[arg(value_name = "PKG")]
    package: PathBuf,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    opening: Opening,
}

#[derive(Serialize)]
struct ProgramView {
    specification_version: i32,
    default_function: Option<String>,
    functions: Vec<FunctionView>,
    /// Rewrites that each pass of the default pipeline would do, over all functions; `null` when it cannot run.
    rewrites: Option<Vec<(String, usize)>>,
    /// Why it cannot run.
    refusal: Option<String>,
}

#[derive(Serialize)]
struct FunctionView {
    name: String,
    opset: String,
    inputs: Vec<FeatureView>,
    outputs: Vec<FeatureView>,
    states: Vec<FeatureView>,
    /// Caches that are inputs and outputs instead of states.
    passed_through: Vec<CacheView>,
    /// Rules for ops on states that the function breaks.
    breaches: Vec<String>,
    #[serde(flatten)]
    census: Census,
}

#[derive(Serialize)]
struct CacheView {
    input: String,
    output: String,
    by: String,
}

#[derive(Serialize)]
struct FeatureView {
    name: String,
    r#type: String,
    optional: bool,
    shapes: Option<String>,
}

impl Inspect {
    pub(super) fn execute(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let package = self.opening.open(&self.package)?;
        let view = ProgramView::of(package.program());
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &view)?;
            writeln!(out)?;
        } else {
            view.print(out)?;
        }
        Ok(())
    }
}

impl ProgramView {
    fn of(program: &Program) -> ProgramView {
        let (rewrites, refusal) = match would_do(program) {
            Ok(rewrites) => (Some(rewrites), None),
            Err(e) => (None, Some(with_causes(&e))),
        };
        ProgramView {
            specification_version: program.specification_version(),
            default_function: program.default_function().map(|n| n.to_string()),
            functions: program.functions().iter().map(FunctionView::of).collect(),
            rewrites,
            refusal,
        }
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "specification version {}", self.specification_version)?;
        for f in &self.functions {
            let default = if self.default_function.as_ref() == Some(&f.name) { ", default" } else { "" };
            writeln!(out, "\nfunction {} ({}{default})", f.name, f.opset)?;
            f.print(out)?;
        }
        if let Some(rewrites) = &self.rewrites {
            let counts: Vec<_> = rewrites.iter().map(|(pass, n)| format!("{pass} {n}")).collect();
            writeln!(out, "\nrewrites that the default passes would do: {}", counts.join(", "))?;
        }
        if let Some(refusal) = &self.refusal {
            let line = refusal.lines().collect::<Vec<_>>().join("; ");
            writeln!(out, "\nthe default passes cannot run on this program: {line}")?;
        }
        writeln!(out, "({DISCLAIMER})")
    }
}

fn would_do(program: &Program) -> Result<Vec<(String, usize)>, PipelineError> {
    let report = Pipeline::default().run(&mut program.clone(), &RunOptions::default())?;
    let mut counts: Vec<(String, usize)> = Vec::new();
    for pass in report.functions.iter().flat_map(|f| &f.passes) {
        match counts.iter_mut().find(|(name, _)| *name == pass.pass) {
            Some((_, n)) => *n += pass.fired.len(),
            None => counts.push((pass.pass.clone(), pass.fired.len())),
        }
    }
    Ok(counts)
}

impl FunctionView {
    fn of(f: &Function) -> FunctionView {
        let (states, inputs): (Vec<_>, Vec<_>) = f.inputs().iter().partition(|&&v| f.ty(v).as_state().is_some());
        let views = |values: &[ValueId]| values.iter().map(|&v| FeatureView::of(f, v)).collect();
        // As the passes see it: sizes that the graph computes are resolved.
        let mut resolved = f.clone();
        crate::analysis::values::resolve(&mut resolved);
        FunctionView {
            name: f.name().to_string(),
            opset: f.opset().to_string(),
            inputs: views(&inputs),
            outputs: views(f.outputs()),
            states: views(&states),
            passed_through: functional(f).into_iter().map(|cache| CacheView::of(f, cache)).collect(),
            breaches: breaches(f).iter().map(|breach| breach.describe(f)).collect(),
            census: Census::of(&resolved),
        }
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        for (what, features) in [("input", &self.inputs), ("output", &self.outputs), ("state", &self.states)] {
            for feature in features {
                writeln!(out, "  {what:6}  {feature}")?;
            }
        }
        if !self.passed_through.is_empty() {
            let caches = self.passed_through.iter().map(|c| format!("{} → {} ({})", c.input, c.output, c.by));
            writeln!(out, "  caches passed through: {}", caches.collect::<Vec<_>>().join(", "))?;
        }
        let (census, traffic) = (&self.census, &self.census.traffic);
        writeln!(out, "  {} ops, {} constants of {}", census.ops, census.constants, bytes(traffic.constants))?;
        writeln!(out)?;
        let mut kinds: Vec<_> = traffic.kinds.iter().collect();
        kinds.sort_by_key(|(_, k)| std::cmp::Reverse((k.written + k.read, k.ops)));
        let width = kinds.iter().map(|(kind, _)| kind.len()).fold(28, usize::max);
        let mut row = |name: &str, ops: String, written: String, read: String| {
            writeln!(out, "  {name:width$} {ops:>6} {written:>12} {read:>12}")
        };
        row("per run", "ops".into(), "written".into(), "read".into())?;
        for (kind, k) in kinds {
            row(kind, k.ops.to_string(), bytes(k.written), bytes(k.read))?;
        }
        row("all", census.ops.to_string(), bytes(traffic.written), bytes(traffic.read))?;
        if !self.states.is_empty() {
            let (size, updated) = (bytes(traffic.states), bytes(traffic.state_updates));
            let handed = bytes(traffic.states_handed_over);
            writeln!(out, "  states {size}, updated by {updated}; read_state and write_state hand over {handed}")?;
            for breach in &self.breaches {
                writeln!(out, "  note: {breach}")?;
            }
        }
        if traffic.unknown > 0 {
            writeln!(out, "  values of unknown size, not counted: {}", traffic.unknown)?;
        }
        let repeats = &traffic.repeats;
        writeln!(
            out,
            "  repeated copies: {}, {} written and {} read",
            repeats.count,
            bytes(repeats.written),
            bytes(repeats.read)
        )
    }
}

impl CacheView {
    fn of(f: &Function, cache: FunctionalCache) -> CacheView {
        let name = |v: ValueId| f.value(v).name().to_string();
        CacheView { input: name(cache.input), output: name(cache.output), by: cache.kind.to_string() }
    }
}

impl FeatureView {
    fn of(f: &Function, v: ValueId) -> FeatureView {
        let name = f.value(v).name();
        let feature = f.interface().input(name).or_else(|| f.interface().output(name));
        FeatureView {
            name: name.to_string(),
            r#type: f.ty(v).to_string(),
            optional: feature.is_some_and(|x| x.optional),
            shapes: feature.and_then(|x| x.array()).and_then(shapes),
        }
    }
}

impl std::fmt::Display for FeatureView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.name, self.r#type)?;
        if let Some(shapes) = &self.shapes {
            write!(f, ", {shapes}")?;
        }
        if self.optional {
            f.write_str(", optional")?;
        }
        Ok(())
    }
}

/// The shapes that a flexible feature admits.
fn shapes(array: &ArrayFeature) -> Option<String> {
    match &array.flexibility {
        Flexibility::Fixed => None,
        Flexibility::Enumerated(shapes) => Some(format!("one of {shapes:?}")),
        Flexibility::Ranges(ranges) => {
            let axes = ranges.iter().map(|range| match range {
                (lo, Some(hi)) if lo == hi => lo.to_string(),
                (lo, Some(hi)) => format!("{lo}..={hi}"),
                (lo, None) => format!("{lo}.."),
            });
            Some(format!("within [{}]", axes.collect::<Vec<_>>().join(", ")))
        }
    }
}
