//! Runs two functions side by side.

use std::collections::{BTreeMap, HashMap};

use super::compare::{Bound, Difference, fingerprint};
use super::inputs::Generator;
use super::interface::{Changes, Held};
use super::report::{Divergence, FunctionReport, TensorReport, Verdict};
use super::rng::Rng;
use super::shapes::{self, Shapes};
use super::{EquivError, Options, Side};
use crate::interp::{InterpError, Interpreter, Mode, Values};
use crate::ir::{Function, Name};

/// Storage mode decides on bitwise equality; when it fails, exact mode decides on reassociated equality.
pub(super) fn compare(
    a: &Function,
    b: &Function,
    changes: &Changes<'_>,
    options: &Options,
) -> Result<FunctionReport, EquivError> {
    let mut storage = Trial::new(a, b, Mode::Storage, changes, options)?.run()?;
    let exact = match storage.is_bitwise() {
        true => None,
        false => Some(Trial::new(a, b, Mode::Exact, changes, options)?.run()?),
    };
    let report = |names: Vec<Name>, pick: fn(&Outcome) -> &Differences| -> Vec<TensorReport> {
        names
            .into_iter()
            .map(|name| {
                let exact = exact.as_ref().map(|e| pick(e).get(&name).cloned().unwrap_or_default());
                let storage = pick(&storage).get(&name).cloned().unwrap_or_default();
                TensorReport::new(name, storage, exact)
            })
            .collect()
    };
    let outputs = report(output_names(a), |o| &o.outputs);
    let states = report(state_names(a), |o| &o.states);
    let verdict = outputs.iter().chain(&states).map(|t| t.verdict).max().unwrap_or(Verdict::Bitwise);
    let blind = outputs.iter().filter(|t| t.storage.elements > 0 && t.storage.finite == 0);
    storage.notes.extend(blind.map(|t| format!("`{}` never held a finite number", t.name)));
    Ok(FunctionReport {
        name: a.name().clone(),
        verdict,
        steps: options.steps.max(1),
        outputs,
        states,
        first_divergence: storage.divergence,
        notes: storage.notes,
    })
}

fn output_names(f: &Function) -> Vec<Name> {
    f.outputs().iter().map(|&v| f.value(v).name().clone()).collect()
}

fn state_names(f: &Function) -> Vec<Name> {
    let states = f.inputs().iter().filter(|&&v| f.ty(v).as_state().is_some());
    states.map(|&v| f.value(v).name().clone()).collect()
}

type Differences = BTreeMap<Name, Difference>;

#[derive(Default)]
struct Outcome {
    outputs: Differences,
    states: Differences,
    divergence: Option<Divergence>,
    notes: Vec<String>,
}

impl Outcome {
    fn is_bitwise(&self) -> bool {
        self.outputs.values().chain(self.states.values()).all(Difference::is_bitwise)
    }
}

/// Both functions over all steps in one mode of the interpreter.
struct Trial<'f> {
    a: Runner<'f>,
    b: Runner<'f>,
    changes: &'f Changes<'f>,
    bound: Bound,
    options: &'f Options,
    /// Input shapes that are still worth trying, each with its generator; the first is the default.
    cases: Vec<(Shapes, Generator<'f>)>,
    rng: Rng,
}

impl<'f> Trial<'f> {
    fn new(
        a: &'f Function,
        b: &'f Function,
        mode: Mode,
        changes: &'f Changes<'f>,
        options: &'f Options,
    ) -> Result<Trial<'f>, EquivError> {
        let bound = match mode {
            Mode::Exact => Bound::EXACT,
            _ => Bound::storage(a),
        };
        let told = options.shapes.iter().filter(|(n, _)| a.input(n).is_some());
        let told: BTreeMap<_, _> = told.map(|(n, s)| (n.clone(), s.clone())).collect();
        let cases = shapes::cases(a, &told)
            .map_err(|(input, reason)| EquivError::Input { function: a.name().clone(), input, reason })?
            .into_iter()
            .map(|shapes| Ok((shapes.clone(), Generator::new(a, &shapes::sizes(a, &shapes), options)?)))
            .collect::<Result<Vec<_>, EquivError>>()?;
        Ok(Trial {
            a: Runner::new(a, mode, Side::First)?,
            b: Runner::new(b, mode, Side::Second)?,
            changes,
            bound,
            options,
            cases,
            rng: Rng::new(options.seed),
        })
    }

    fn run(mut self) -> Result<Outcome, EquivError> {
        let mut outcome = Outcome::default();
        let mut states = self.draw_states()?;
        for step in 0..self.options.steps.max(1) {
            let before = states.clone();
            let (inputs, out_a) = self.step_of_first(step, &mut states.0, &mut outcome)?;
            let out_b = self.step_of_second(step, &inputs, &mut states.1)?;
            let was_bitwise = outcome.is_bitwise();
            tally(&mut outcome.outputs, step, &out_a, &out_b, self.bound);
            let finite =
                tally(&mut outcome.states, step, &states.0, &self.changes.states_of_first(&states.1)?, self.bound);
            if was_bitwise && !outcome.is_bitwise() {
                outcome.divergence = self.divergence(step, &inputs, before)?;
            }
            if !finite {
                states = self.draw_states()?;
            }
        }
        Ok(outcome)
    }

    fn draw_states(&mut self) -> Result<(Values, Held), EquivError> {
        let states = self.cases[0].1.states(&mut self.rng)?;
        let held = self.changes.begin(&states)?;
        Ok((states, held))
    }

    /// Runs the second function, and does what its caller has to do.
    fn step_of_second(&self, step: usize, inputs: &Values, held: &mut Held) -> Result<Values, EquivError> {
        let all = with_caches(inputs, held);
        let outputs = self.b.run(step, &all, &mut held.states)?;
        self.changes.write(inputs, &outputs, held)?;
        Ok(outputs)
    }

    /// Draws inputs and runs the first function. Shapes that it does not take are given up for the default ones.
    fn step_of_first(
        &mut self,
        step: usize,
        states: &mut Values,
        outcome: &mut Outcome,
    ) -> Result<(Values, Values), EquivError> {
        loop {
            let case = step % self.cases.len();
            let (shapes, generator) = &self.cases[case];
            let inputs = generator.inputs(shapes, step, &mut self.rng)?;
            match self.a.run(step, &inputs, states) {
                Ok(outputs) => return Ok((inputs, outputs)),
                Err(e) if case == 0 => return Err(e),
                Err(_) => {
                    let (shapes, _) = self.cases.remove(case);
                    let unusual = shapes.iter().filter(|(name, s)| self.cases[0].0.get(*name) != Some(*s));
                    let list: Vec<String> = unusual.map(|(name, shape)| format!("{name} {shape:?}")).collect();
                    outcome.notes.push(format!("not run with the shapes {}", list.join(", ")));
                }
            }
        }
    }

    /// Repeats a step whose results differ and compares the values inside.
    fn divergence(
        &self,
        step: usize,
        inputs: &Values,
        (mut states_a, mut held): (Values, Held),
    ) -> Result<Option<Divergence>, EquivError> {
        let mut seen = HashMap::new();
        self.a.observe(step, inputs, &mut states_a, |name, op, print| {
            seen.entry(name).or_insert((op, print));
        })?;
        let mut first = None;
        self.b.observe(step, &with_caches(inputs, &held), &mut held.states, |name, op, print| {
            if let (None, Some((theirs, old))) = (&first, seen.remove(&name))
                && old != print
            {
                first = Some(Divergence { step, a: theirs, b: op });
            }
        })?;
        Ok(first)
    }
}

/// The inputs of the second function.
fn with_caches(inputs: &Values, held: &Held) -> Values {
    inputs.iter().chain(&held.caches).map(|(name, t)| (name.clone(), t.clone())).collect()
}

/// Counts in the values of a step. Returns whether all are finite.
fn tally(differences: &mut Differences, step: usize, a: &Values, b: &Values, bound: Bound) -> bool {
    let mut finite = true;
    for (name, x) in a {
        if let Some(y) = b.get(name) {
            finite &= differences.entry(name.clone()).or_default().add(step, x, y, bound);
        }
    }
    finite
}

/// One function, ready to run.
struct Runner<'f> {
    f: &'f Function,
    interpreter: Interpreter<'f>,
    side: Side,
}

impl<'f> Runner<'f> {
    fn new(f: &'f Function, mode: Mode, side: Side) -> Result<Runner<'f>, EquivError> {
        let interpreter = Interpreter::new(f, mode).map_err(|e| failed(side, 0, e))?;
        Ok(Runner { f, interpreter, side })
    }

    fn run(&self, step: usize, inputs: &Values, states: &mut Values) -> Result<Values, EquivError> {
        self.interpreter.run(inputs, states).map_err(|e| failed(self.side, step, e))
    }

    /// Runs and reports, for every value, its name, the op that computes it and a fingerprint of its content.
    fn observe(
        &self,
        step: usize,
        inputs: &Values,
        states: &mut Values,
        mut report: impl FnMut(Name, String, u64),
    ) -> Result<(), EquivError> {
        let mut observer = |v, tensor: &crate::interp::Tensor| {
            if let Some(op) = self.f.producer(v) {
                report(self.f.value(v).name().clone(), self.f.describe(op), fingerprint(tensor));
            }
        };
        let run = self.interpreter.run_observed(inputs, states, &mut observer);
        run.map(drop).map_err(|e| failed(self.side, step, e))
    }
}

fn failed(program: Side, step: usize, source: InterpError) -> EquivError {
    EquivError::Run { program, step, source: Box::new(source) }
}
