//! `kv-forward`: read a state no more often than its content changes for the reader.
//!
//! With: state<tensor<fp16, [2, 4, 8]>> cache, tensor<fp16, [4, 8]> a
//!
//! Given:
//! ```text
//! tensor<fp16, [2, 4, 8]> r0 = read_state(input = cache);
//! tensor<fp16, [2, 4, 8]> u0 = slice_update(x = r0, update = a, begin = [1, 0, 0], end = [2, 4, 8], squeeze_mask = [true, false, false]);
//! write_state(input = cache, data = u0);
//! tensor<fp16, [2, 4, 8]> r1 = read_state(input = cache);
//! tensor<fp16, [4, 8]> row = slice_by_index(x = r1, begin = [1, 0, 0], end = [2, 4, 8], squeeze_mask = [true, false, false]);
//! tensor<fp16, [4, 8]> out = relu(x = row);
//! -> (out)
//! ```
//! Return:
//! ```text
//! tensor<fp16, [2, 4, 8]> r0 = read_state(input = cache);
//! tensor<fp16, [2, 4, 8]> u0 = slice_update(x = r0, update = a, begin = [1, 0, 0], end = [2, 4, 8], squeeze_mask = [true, false, false]);
//! write_state(input = cache, data = u0);
//! tensor<fp16, [4, 8]> row = reshape(x = a, shape = [4, 8]);
//! tensor<fp16, [4, 8]> out = relu(x = row);
//! -> (out)
//! ```
//!
//! Three steps, each where it is provable from the boxes (`analysis/state`):
//!
//! * a part of a snapshot that is exactly what an update wrote is that update;
//! * a part that no write since an earlier snapshot touched is taken from that snapshot;
//! * `cast(slice_update(cast(cache), update))` to a wider type and back is a `slice_update` in the state's own type.
//!
//! The snapshot that a `slice_update` takes the rest from gets no second reader, and a written value gets none either.
//!
//! Exactness: bitwise. Assumes: A4, A8, A10 (docs/assumptions.md).
//! Declines: a part that a write may touch and does not write as a whole; a part that the function returns; a state that is
//! used in a nested block.

use crate::analysis::state::{Access, Chain, Look, States};
use crate::ir::{DType, Function, OpId, Use, ValueId};
use crate::opset::views;
use crate::rewrite::{
    Budget, Context, Fired, Input, Keeps, NoMatch, Outcome, Patch, PatchError, Rule, Transaction, drive, is_returned,
};

use super::{Exactness, Pass};

/// Reads a state no more often than its content changes for the reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvForward;

impl Pass for KvForward {
    fn name(&self) -> &'static str {
        "kv-forward"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        let mut outcome = drive(f, &[&OwnType], budget);
        while !budget.is_spent() {
            let Some(step) = next(f, budget, &mut outcome) else { break };
            let op = f.describe(step.op());
            match step.apply(f) {
                Ok(()) => {
                    budget.take();
                    outcome.fired.push(Fired::plain(op, step.form()));
                }
                Err(e) => {
                    outcome.decline(NoMatch::because(e.to_string()).keeping(Keeps::StateOps).declined(op));
                    break;
                }
            }
        }
        outcome
    }
}

/// A change of what readers of a state read.
enum Step {
    /// `part`, made by `op`, is the update with this value.
    Written { op: OpId, part: ValueId, update: ValueId },
    /// Uses of a snapshot, made by `op`, read an earlier one.
    Earlier { op: OpId, uses: Vec<Use>, snapshot: ValueId },
}

impl Step {
    fn op(&self) -> OpId {
        match self {
            Step::Written { op, .. } | Step::Earlier { op, .. } => *op,
        }
    }

    fn form(&self) -> &'static str {
        match self {
            Step::Written { .. } => "what was written, without reading it back",
            Step::Earlier { .. } => "read from an earlier snapshot",
        }
    }

    fn apply(&self, f: &mut Function) -> Result<(), PatchError> {
        match self {
            Step::Written { op, part, update } => {
                let shape = f.tensor(*part).map(|t| t.shape.clone()).unwrap_or_default();
                let mut patch = Patch::before(*op);
                let name = f.value(*part).name().to_string();
                let view = patch.reshape(f, *update, &name, &shape);
                patch.replace(*part, view.ok_or_else(|| PatchError::Stale(format!("the shape of `{name}`")))?);
                patch.apply(f)
            }
            Step::Earlier { op, uses, snapshot } => {
                let mut t = Transaction::begin(f);
                for &u in uses {
                    t.set_use(u, *snapshot)?;
                }
                let dead = t.op(*op).results().to_vec();
                t.erase_dead(dead);
                t.commit()
            }
        }
    }
}

/// The next change that the budget admits.
fn next(f: &Function, budget: &Budget, outcome: &mut Outcome) -> Option<Step> {
    let states = States::of(f);
    let mut admitted = |step: &Step| {
        let op = f.describe(step.op());
        let no = budget.refusal(f, &op);
        let is_admitted = no.is_none();
        outcome.decline(no.and_then(|no| no.keeping(Keeps::StateOps).declined(op)));
        is_admitted
    };
    for chain in states.chains().iter().filter(|c| c.out_of_sight().is_none()) {
        for (op, snapshot, version) in chain.reads() {
            let parts = states.parts(f, chain, snapshot);
            let step = written(f, chain, version, &parts).filter(&mut admitted);
            let step = step.or_else(|| earlier(f, chain, op, snapshot, version, &parts).filter(&mut admitted));
            if step.is_some() {
                return step;
            }
        }
    }
    None
}

/// A part of a snapshot that is exactly what the last update to touch it wrote.
fn written(f: &Function, chain: &Chain, version: usize, parts: &[Look]) -> Option<Step> {
    let writes: Vec<_> = chain.writes().take(version).collect();
    parts.iter().skip(1).find_map(|part| {
        let update = writes.iter().rev().find_map(|(_, _, update)| match update {
            Some(u) if u.region.is_apart(&part.region, f) => None,
            other => Some(*other),
        })??;
        let in_order = part.axes.iter().flatten().is_sorted() && !is_returned(f, part.value);
        let same_type = f.tensor(part.value)?.dtype == f.tensor(update.value)?.dtype;
        let whole = in_order && same_type && update.region.is(&part.region, f);
        whole.then(|| Some(Step::Written { op: f.producer(part.value)?, part: part.value, update: update.value }))?
    })
}

/// Readers of a snapshot that would see the same in an earlier one, if that leaves the later one without readers.
fn earlier(f: &Function, chain: &Chain, op: OpId, snapshot: ValueId, version: usize, parts: &[Look]) -> Option<Step> {
    let takes_rest = |u: &Use| u.op().is_some_and(|user| chain.takes_rest(f, user, snapshot));
    let uses: Vec<Use> = f.value(snapshot).uses().iter().copied().filter(|u| !takes_rest(u)).collect();
    if uses.is_empty() || is_returned(f, snapshot) {
        return None;
    }
    let looks: Vec<&Look> = parts.iter().filter(|p| p.ends).collect();
    let untouched = |since: usize| {
        let mut writes = chain.writes().take(version).skip(since);
        writes.all(|(_, _, u)| u.is_some_and(|u| looks.iter().all(|l| u.region.is_apart(&l.region, f))))
    };
    let candidates = chain.accesses.iter().take_while(|a| a.op() != op).filter_map(|a| match a {
        Access::Read { value, version, .. } => Some((*value, *version)),
        Access::Write { .. } => None,
    });
    let shared = |v: ValueId| {
        let uses = f.value(v).uses();
        !uses.is_empty() && !uses.iter().any(|u| u.op().is_some_and(|user| chain.takes_rest(f, user, v)))
    };
    let (to, _) = candidates.into_iter().find(|&(v, since)| shared(v) && untouched(since))?;
    Some(Step::Earlier { op, uses, snapshot: to })
}

/// A `slice_update` in a wider type than the state's, between two casts.
struct OwnType;

impl Rule for OwnType {
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
        let f = cx.f;
        own_type(f, op).ok_or(NoMatch::UNRELATED)
    }
}

fn own_type(f: &Function, op: OpId) -> Option<Patch> {
    let &[result] = f.op(op).results() else { return None };
    let own = f.tensor(result)?.clone();
    let narrowed = views::Cast::of(f, op)?;
    let update_op = f.producer(narrowed.x).filter(|&p| f.op(p).kind() == "slice_update")?;
    let slice = views::Slice::of(f, update_op)?;
    let widened = f.producer(slice.x).filter(|&p| f.op(p).kind() == "cast")?;
    let rest = f.op(widened).value("x")?;
    let read = f.producer(rest).filter(|&p| f.op(p).kind() == "read_state")?;
    let alone = |op: OpId| f.op(op).results().iter().all(|&v| f.value(v).uses().len() == 1);
    if ![update_op, widened, read].into_iter().all(alone) {
        return None;
    }
    let exact = own.dtype == DType::F16 && f.tensor(slice.x)?.dtype == DType::F32;
    if !exact || *f.tensor(rest)? != own || f.op(read).block() != f.op(op).block() {
        return None;
    }
    let value = slice.update?;
    let mut patch = Patch::before(op);
    let name = f.value(result).name().to_string();
    let mut narrow = f.tensor(value)?.clone();
    narrow.dtype = own.dtype;
    let to = crate::ir::Literal::string("fp16");
    let cast = [("x", Input::One(value.into())), ("dtype", Input::Const(to))];
    let value = patch.op("cast", format!("{name}_update"), cast, narrow);
    let inputs: Vec<(&str, Input)> = f
        .op(update_op)
        .params()
        .filter_map(|(param, _)| {
            let input = match &**param {
                "x" => Input::One(rest.into()),
                "update" => Input::One(value.clone()),
                _ => Input::like(f, f.op(update_op).param(param).first()?),
            };
            Some((param.as_str(), input))
        })
        .collect();
    let updated = patch.op("slice_update", name, inputs, own.clone());
    patch.replace(result, updated);
    patch.bytes_saved = 2 * own.byte_len().unwrap_or(0);
    patch.form = "updated in the state's own type".into();
    Some(patch)
}
