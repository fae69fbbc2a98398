//! Runs two functions side by side.

use std::collections::{BTreeMap, HashMap};

use super::compare::{Bound, Difference, Moment, fingerprint};
use super::inputs::Generator;
use super::interface::{Changes, Held};
use super::report::{Divergence, FunctionReport, TensorReport, Verdict};
use super::rng::Rng;
use super::shapes::{self, Shapes};
use super::{EquivError, Options, Side};
use crate::interp::{InterpError, Interpreter, Mode, Tensor, Values};
use crate::ir::{Function, Name};

/// Storage mode decides on bitwise equality; when it fails, exact mode decides on reassociated equality.
pub(super) fn compare(
    a: &Function,
    b: &Function,
    changes: &Changes<'_>,
    options: &Options,
) -> Result<FunctionReport, EquivError> {
    let storage = Trial::new(a, b, Mode::Storage, changes, options)?;
    let mut rounded = storage.run()?;
    let exact = match rounded.is_bitwise() {
        true => None,
        false => Some(Trial::new(a, b, Mode::Exact, changes, options)?),
    };
    let unrounded = exact.as_ref().map(Trial::run).transpose()?;
    let report = |names: Vec<Name>, pick: fn(&Outcome) -> &Differences| -> Vec<TensorReport> {
        names
            .into_iter()
            .map(|name| {
                let exact = unrounded.as_ref().map(|e| pick(e).get(&name).cloned().unwrap_or_default());
                let storage = pick(&rounded).get(&name).cloned().unwrap_or_default();
                TensorReport::new(name, storage, exact)
            })
            .collect()
    };
    let outputs = report(output_names(a), |o| &o.outputs);
    let states = report(state_names(a), |o| &o.states);
    let verdict = outputs.iter().chain(&states).map(|t| t.verdict).max().unwrap_or(Verdict::Bitwise);
    let blind = outputs.iter().filter(|t| t.storage.elements > 0 && t.storage.finite == 0);
    rounded.notes.extend(blind.map(|t| format!("`{}` never held a finite number", t.name)));
    let first_divergence = match (verdict, exact.zip(unrounded)) {
        (Verdict::Bitwise, _) => None,
        (Verdict::Different, Some((exact, Outcome { first_beyond: Some(snapshot), .. }))) => {
            exact.locate(&snapshot, Criterion::Bound)?
        }
        (Verdict::Different, _) if rounded.first_beyond.is_some() => {
            rounded.first_beyond.map(|snapshot| storage.locate(&snapshot, Criterion::Bound)).transpose()?.flatten()
        }
        _ => rounded.first_bits.map(|snapshot| storage.locate(&snapshot, Criterion::Bits)).transpose()?.flatten(),
    };
    Ok(FunctionReport {
        name: a.name().clone(),
        verdict,
        steps: options.steps,
        outputs,
        states,
        local: false,
        regions: Vec::new(),
        unchanged: 0,
        first_divergence,
        notes: rounded.notes,
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
    /// The first step after which some bit differs.
    first_bits: Option<Snapshot>,
    /// The first step after which something differs by more than the bound.
    first_beyond: Option<Snapshot>,
    notes: Vec<String>,
}

impl Outcome {
    fn all(&self) -> impl Iterator<Item = (&Name, &Difference)> {
        self.outputs.iter().chain(&self.states)
    }

    fn is_bitwise(&self) -> bool {
        self.all().all(|(_, d)| d.is_bitwise())
    }

    /// Remembers the first step that shows a difference.
    fn note_first(&mut self, at: Moment, open: &[usize]) {
        let snapshot = |criterion: Criterion| {
            let (result, _) = self.all().find(|(_, d)| criterion.holds(d))?;
            Some(Snapshot { at, open: open.to_vec(), result: result.clone() })
        };
        let bits = self.first_bits.is_none().then(|| snapshot(Criterion::Bits)).flatten();
        let beyond = self.first_beyond.is_none().then(|| snapshot(Criterion::Bound)).flatten();
        self.first_bits = self.first_bits.take().or(bits);
        self.first_beyond = self.first_beyond.take().or(beyond);
    }
}

/// A step, and a result that shows a difference after it.
struct Snapshot {
    at: Moment,
    /// The cases that were worth trying when the steps of its seed began.
    open: Vec<usize>,
    result: Name,
}

/// What a step starts from.
struct Start {
    inputs: Values,
    states: (Values, Held),
}

/// What counts as a difference.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Criterion {
    /// Other bits.
    Bits,
    /// More than the bound of the mode.
    Bound,
}

impl Criterion {
    fn holds(self, d: &Difference) -> bool {
        match self {
            Criterion::Bits => !d.is_bitwise(),
            Criterion::Bound => !d.is_within_bound(),
        }
    }
}

/// Both functions over all steps in one mode of the interpreter.
struct Trial<'f> {
    a: Runner<'f>,
    b: Runner<'f>,
    changes: &'f Changes<'f>,
    bound: Bound,
    options: &'f Options,
    /// Input shapes to try, each with its generator; the first is the default.
    cases: Vec<(Shapes, Generator<'f>)>,
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
        let cases = shapes::cases(a, &shapes::told(a, options))
            .map_err(|(input, reason)| EquivError::Input { function: a.name().clone(), input, reason })?
            .into_iter()
            .map(|shapes| Ok((shapes.clone(), Generator::new(a, &shapes::sizes(a, &shapes), options)?)))
            .collect::<Result<Vec<_>, EquivError>>()?;
        let (a, b) = (Runner::new(a, mode, Side::First)?, Runner::new(b, mode, Side::Second)?);
        Ok(Trial { a, b, changes, bound, options, cases })
    }

    fn run(&self) -> Result<Outcome, EquivError> {
        let mut outcome = Outcome::default();
        let mut open: Vec<usize> = (0..self.cases.len()).collect();
        for seed in 0..self.options.seeds {
            for &draw in &self.options.draws {
                let at = Moment { seed: self.options.seed.wrapping_add(seed), draw, step: 0 };
                self.run_steps(at, &mut open, &mut outcome)?;
            }
        }
        Ok(outcome)
    }

    /// All steps from one seed. `open` are the cases that are still worth trying.
    fn run_steps(&self, start: Moment, open: &mut Vec<usize>, outcome: &mut Outcome) -> Result<(), EquivError> {
        let opened = open.clone();
        let mut rng = Rng::new(start.seed);
        let mut states = self.draw_states(start, &mut rng)?;
        for step in 0..self.options.steps {
            let at = Moment { step, ..start };
            self.step(at, &mut states, open, &mut rng, outcome)?;
            outcome.note_first(at, &opened);
        }
        Ok(())
    }

    /// One step of both functions; content of states that is no longer finite is drawn anew.
    fn step(
        &self,
        at: Moment,
        states: &mut (Values, Held),
        open: &mut Vec<usize>,
        rng: &mut Rng,
        outcome: &mut Outcome,
    ) -> Result<(), EquivError> {
        let (inputs, out_a) = self.step_of_first(at, &mut states.0, open, rng, &mut outcome.notes)?;
        let out_b = self.step_of_second(at.step, &inputs, &mut states.1)?;
        tally(&mut outcome.outputs, at, &out_a, &out_b, self.bound);
        let theirs = self.changes.states_of_first(&states.1)?;
        let finite = tally(&mut outcome.states, at, &states.0, &theirs, self.bound);
        if !finite {
            *states = self.draw_states(at, rng)?;
        }
        Ok(())
    }

    /// Goes through the steps before a step again.
    fn replay(&self, snapshot: &Snapshot) -> Result<Start, EquivError> {
        let (mut rng, mut open) = (Rng::new(snapshot.at.seed), snapshot.open.clone());
        let mut states = self.draw_states(snapshot.at, &mut rng)?;
        for step in 0..snapshot.at.step {
            let at = Moment { step, ..snapshot.at };
            self.step(at, &mut states, &mut open, &mut rng, &mut Outcome::default())?;
        }
        let mut ours = states.0.clone();
        let (inputs, _) = self.step_of_first(snapshot.at, &mut ours, &mut open, &mut rng, &mut Vec::new())?;
        Ok(Start { inputs, states })
    }

    fn draw_states(&self, at: Moment, rng: &mut Rng) -> Result<(Values, Held), EquivError> {
        let mut states = self.cases[0].1.states(at.draw, rng)?;
        for (name, content) in &self.options.given_states {
            states.entry(name.clone()).and_modify(|drawn| *drawn = content.clone());
        }
        let held = self.changes.begin(&states)?;
        Ok((states, held))
    }

    /// Runs the second function, and does what its caller has to do.
    fn step_of_second(&self, step: usize, inputs: &Values, held: &mut Held) -> Result<Values, EquivError> {
        let all = with_caches(inputs, held);
        let outputs = self.b.advance(step, &all, &mut held.states)?;
        self.changes.write(inputs, &outputs, held)?;
        Ok(outputs)
    }

    /// Draws inputs and runs the first function. Shapes that it does not take are given up for the default ones.
    fn step_of_first(
        &self,
        at: Moment,
        states: &mut Values,
        open: &mut Vec<usize>,
        rng: &mut Rng,
        notes: &mut Vec<String>,
    ) -> Result<(Values, Values), EquivError> {
        let none = Values::new();
        loop {
            let turn = at.step % open.len();
            let (shapes, generator) = &self.cases[open[turn]];
            let given = match &self.options.given[..] {
                [all] => all,
                steps => steps.get(at.step).unwrap_or(&none),
            };
            let inputs = generator.inputs(at.draw, given, shapes, at.step, rng)?;
            let run = match turn {
                0 => self.a.advance(at.step, &inputs, states),
                _ => self.a.run(at.step, &inputs, states),
            };
            match run {
                Ok(outputs) => return Ok((inputs, outputs)),
                Err(e) if turn == 0 => return Err(e),
                Err(_) => {
                    open.remove(turn);
                    notes.push(format!("not run with {}", shapes::unusual(shapes, &self.cases[0].0)));
                }
            }
        }
    }

    /// Repeats a step and finds the first value that differs.
    fn locate(&self, snapshot: &Snapshot, criterion: Criterion) -> Result<Option<Divergence>, EquivError> {
        let (at, start) = (snapshot.at, self.replay(snapshot)?);
        let suspects = self.suspects(at, &start)?;
        for group in groups(&suspects) {
            let mut kept = Values::new();
            self.observe_first(at, &start, |name, _, t| {
                if group.iter().any(|s| s.name == name) {
                    kept.entry(name).or_insert_with(|| t.clone());
                }
            })?;
            let mut first = None;
            self.observe_second(at, &start, |name, b, t| {
                let Some(x) = kept.remove(&name).filter(|_| first.is_none()) else { return };
                let mut difference = Difference::default();
                difference.add(at, &x, t, self.bound);
                if let (true, Some(s)) = (criterion.holds(&difference), group.iter().find(|s| s.name == name)) {
                    first = Some(Divergence { at, a: s.op.clone(), b });
                }
            })?;
            if first.is_some() {
                return Ok(first);
            }
        }
        Ok(self.source_of(snapshot))
    }

    /// Values that both functions name alike and compute in one shape and with other bits, in the order of the second. A
    /// value of another shape is one that a pass computes in another layout.
    fn suspects(&self, at: Moment, start: &Start) -> Result<Vec<Suspect>, EquivError> {
        let mut ours: HashMap<Name, (String, Vec<usize>, u64)> = HashMap::new();
        self.observe_first(at, start, |name, op, t| {
            ours.entry(name).or_insert_with(|| (op, t.shape().to_vec(), fingerprint(t)));
        })?;
        let mut suspects = Vec::new();
        self.observe_second(at, start, |name, _, t| {
            let Some((op, shape, bits)) = ours.remove(&name) else { return };
            if shape == t.shape() && bits != fingerprint(t) {
                suspects.push(Suspect { name, op, elements: t.len() });
            }
        })?;
        Ok(suspects)
    }

    fn observe_first(
        &self,
        at: Moment,
        start: &Start,
        report: impl FnMut(Name, String, &Tensor),
    ) -> Result<(), EquivError> {
        self.a.observe(at.step, &start.inputs, &mut start.states.0.clone(), report)
    }

    fn observe_second(
        &self,
        at: Moment,
        start: &Start,
        report: impl FnMut(Name, String, &Tensor),
    ) -> Result<(), EquivError> {
        let held = &start.states.1;
        self.b.observe(at.step, &with_caches(&start.inputs, held), &mut held.states.clone(), report)
    }

    /// What gives the result that differs.
    fn source_of(&self, snapshot: &Snapshot) -> Option<Divergence> {
        let name = &snapshot.result;
        let a = self.a.source_of(name)?;
        let b = self.b.source_of(name).unwrap_or_else(|| format!("`{name}`"));
        Some(Divergence { at: snapshot.at, a, b })
    }
}

/// A value that both functions name alike and compute differently.
struct Suspect {
    name: Name,
    /// The op in the first function.
    op: String,
    elements: usize,
}

/// Elements of one function that are held at a time to find a difference.
const HELD: usize = 1 << 25;

/// Neighbours that together have no more than [`HELD`] elements, or are alone.
fn groups(suspects: &[Suspect]) -> impl Iterator<Item = &[Suspect]> {
    let mut total = 0usize;
    suspects.chunk_by(move |a, b| {
        total = if total == 0 { a.elements } else { total }.saturating_add(b.elements);
        let fits = total <= HELD;
        total = if fits { total } else { 0 };
        fits
    })
}

/// The inputs of the second function.
fn with_caches(inputs: &Values, held: &Held) -> Values {
    inputs.iter().chain(&held.caches).map(|(name, t)| (name.clone(), t.clone())).collect()
}

/// Counts in the values of a step. Returns whether all are finite.
fn tally(differences: &mut Differences, at: Moment, a: &Values, b: &Values, bound: Bound) -> bool {
    let mut finite = true;
    for (name, x) in a {
        if let Some(y) = b.get(name) {
            finite &= differences.entry(name.clone()).or_default().add(at, x, y, bound);
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

    /// [`Runner::run`] that updates states in place; they are lost when it fails.
    fn advance(&self, step: usize, inputs: &Values, states: &mut Values) -> Result<Values, EquivError> {
        let advanced = self.interpreter.advance(inputs, std::mem::take(states));
        let (outputs, new) = advanced.map_err(|e| failed(self.side, step, e))?;
        *states = new;
        Ok(outputs)
    }

    /// Runs and reports every value with its name and the op that computes it.
    fn observe(
        &self,
        step: usize,
        inputs: &Values,
        states: &mut Values,
        mut report: impl FnMut(Name, String, &Tensor),
    ) -> Result<(), EquivError> {
        let mut observer = |v, tensor: &Tensor| {
            if let Some(op) = self.f.producer(v) {
                report(self.f.value(v).name().clone(), self.f.describe(op), tensor);
            }
        };
        let run = self.interpreter.run_observed(inputs, states, &mut observer);
        run.map(drop).map_err(|e| failed(self.side, step, e))
    }

    /// The op that computes an output, or the last one that writes a state.
    fn source_of(&self, name: &str) -> Option<String> {
        let v = self.f.find_value(name)?;
        let op = match self.f.ty(v).as_state() {
            None => self.f.producer(v),
            Some(_) => self.f.users(v).into_iter().rfind(|&op| *self.f.op(op).kind() == "write_state"),
        };
        op.map(|op| self.f.describe(op))
    }
}

fn failed(program: Side, step: usize, source: InterpError) -> EquivError {
    EquivError::Run { program, step, source: Box::new(source) }
}
