//! `kv-readonly`: let the caller write the cache, and hand out what it is to write.
//!
//! With: tensor<int32, [1]> pos, tensor<fp16, [1, 1, 4]> rows, state<tensor<fp16, [2, 8, 4]>> cache
//!
//! Given:
//! ```text
//! tensor<fp16, [2, 8, 4]> old = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> out = relu(x = old);
//! tensor<fp16, [1, 1, 4]> row = exp(x = rows);
//! tensor<int32, [1]> next = add(x = pos, y = 1);
//! tensor<int32, [3]> begin = concat(values = ([0], pos, [0]), axis = 0, interleave = false);
//! tensor<int32, [3]> end = concat(values = ([1], next, [4]), axis = 0, interleave = false);
//! tensor<fp16, [2, 8, 4]> rest = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> full = slice_update(x = rest, update = row, begin = begin, end = end);
//! write_state(input = cache, data = full);
//! -> (out)
//! ```
//! With then: tensor<int32, [1]> pos, tensor<fp16, [1, 1, 4]> rows, tensor<fp16, [2, 8, 4]> cache
//!
//! Return:
//! ```text
//! tensor<fp16, [2, 8, 4]> out = relu(x = cache);
//! tensor<fp16, [1, 1, 4]> cache_new = exp(x = rows);
//! -> (out, cache_new)
//! ```
//!
//! A state that is read before anything is written to it, and written once, at a box of known place, becomes an input of the
//! same name and type. What was put into the box becomes an output, in the shape of the box; after each run the caller writes
//! `cache[box] = cache_new`. The side file (`kv_readonly/side_file.rs`, docs/readonly-kv.md) says where the box begins. A
//! state that is only read becomes an input and no output. Functions that share a state all lose it, or none does.
//!
//! Exactness: bitwise, given a caller that writes: every output and the content of every cache. Changes the interface.
//! Assumes: A1, A4, A5, A10, A11 (docs/assumptions.md).
//! Declines: several writes, or reads behind one (`kv-forward`, `kv-defer` and `kv-merge` come first); a write of the whole
//! state, or of what is no update of its own content; a box that is strided, or whose place follows from what the function
//! computes; a state that a nested block uses; an unknown op, which may use any state (A4); content that the function returns; an op that carries what an
//! edit would lose; a function that shares the state and must stay as it is, or declines.

mod plan;
mod side_file;

use std::collections::BTreeSet;

use crate::analysis::state::States;
use crate::ir::{Dim, Function, Name, TensorType, ValueId};
use crate::rewrite::{
    Budget, Declined, Fired, HostWrite, InterfaceChange, Keeps, NoMatch, Outcome, Patch, PatchError, Transaction,
    may_be_returned,
};

use super::{Exactness, Pass};
use plan::{Plan, Refusal, Write};
pub use side_file::{SideFile, SideFileCache, SideFileWrite};

/// Turns states into inputs that the caller writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvReadonly;

impl Pass for KvReadonly {
    fn name(&self) -> &'static str {
        "kv-readonly"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn changes_interface(&self) -> bool {
        true
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        self.run_all(&mut [f], &[], budget).pop().unwrap_or_default()
    }

    fn run_all(&self, functions: &mut [&mut Function], others: &[&Function], budget: &mut Budget) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::default(); functions.len()];
        let mut plans: Vec<Vec<Plan>> = vec![Vec::new(); functions.len()];
        let found: Vec<Found> = functions.iter().map(|f| Found::in_function(f)).collect();
        let mut seen = BTreeSet::new();
        for name in found.iter().flat_map(Found::names).filter(|name| seen.insert(*name)) {
            match agree(&found, others, name) {
                Err(refusals) => outcomes.iter_mut().zip(refusals).for_each(|(o, refusal)| o.decline(refusal)),
                Ok(group) => match withheld(functions, &group, budget) {
                    Some(no) => {
                        for (outcome, plan) in outcomes.iter_mut().zip(&group) {
                            outcome.decline(plan.as_ref().and_then(|plan| no.clone().declined(&plan.at)));
                        }
                    }
                    None if group.iter().flatten().any(|plan| !plan.is_unused()) && budget.take() => {
                        plans.iter_mut().zip(group).for_each(|(plans, plan)| plans.extend(plan));
                    }
                    None => {}
                },
            }
        }
        match convert_all(functions, &plans) {
            Ok(changes) => {
                for ((outcome, plans), changes) in outcomes.iter_mut().zip(&plans).zip(changes) {
                    outcome.fired.extend(plans.iter().zip(&changes).map(|(plan, change)| fired(plan, change)));
                    outcome.interface.extend(changes);
                }
            }
            Err(e) => {
                for (outcome, plans) in outcomes.iter_mut().zip(&plans) {
                    outcome.decline(plans.iter().filter_map(|p| refuse(e.to_string()).declined(&p.at)));
                }
            }
        }
        outcomes
    }
}

/// Why the plans for one state may not be followed, if they may not in one function.
fn withheld(functions: &[&mut Function], group: &[Option<Plan>], budget: &Budget) -> Option<NoMatch> {
    let mut plans = functions.iter().zip(group).filter_map(|(f, plan)| Some((f, plan.as_ref()?)));
    plans.find_map(|(f, plan)| budget.refusal(f, &plan.at)).map(|no| no.keeping(Keeps::StateOps))
}

/// A refusal; state ops stay because of it.
fn refuse(reason: impl Into<String>) -> NoMatch {
    NoMatch::because(reason.into()).keeping(Keeps::StateOps)
}

/// The states of one function, each with a plan or the refusal.
struct Found {
    function: Name,
    states: Vec<(Name, Result<Plan, Refusal>)>,
}

impl Found {
    fn in_function(f: &Function) -> Found {
        let states = States::of(f);
        let plans = states.chains().iter().map(|c| (f.value(c.state).name().clone(), plan::plan(f, c)));
        Found { function: f.name().clone(), states: plans.collect() }
    }

    fn names(&self) -> impl Iterator<Item = &Name> {
        self.states.iter().map(|(name, _)| name)
    }

    fn get(&self, name: &Name) -> Option<&Result<Plan, Refusal>> {
        self.states.iter().find(|(n, _)| n == name).map(|(_, plan)| plan)
    }
}

/// What each function does about a state, `None` where it has none of the name; or what each refuses.
fn agree(found: &[Found], others: &[&Function], name: &Name) -> Result<Vec<Option<Plan>>, Vec<Option<Declined>>> {
    let has = |f: &&&Function| f.input(name).is_some_and(|v| f.ty(v).as_state().is_some());
    let declines = |f: &&Found| matches!(f.get(name), Some(Err(_)));
    let why = if let Some(other) = others.iter().find(has) {
        refuse(format!("function `{}` has the state too and is not to be changed", other.name()))
            .remedy("the functions that share it are rewritten together")
    } else if let Some(other) = found.iter().find(declines) {
        refuse(format!("function `{}` has the state too and keeps it", other.function))
            .remedy("it can be converted there as well")
    } else {
        return Ok(found.iter().map(|f| f.get(name)?.as_ref().ok().cloned()).collect());
    };
    let declined = |plan: &Result<Plan, Refusal>| match plan {
        Ok(plan) => why.clone().declined(&plan.at),
        Err(own) => own.why.clone().declined(&own.at),
    };
    Err(found.iter().map(|f| declined(f.get(name)?)).collect())
}

fn fired(plan: &Plan, change: &InterfaceChange) -> Fired {
    let form = match change {
        InterfaceChange::ReadOnly(write) => format!("an input, and an output to write to it: {write}"),
        _ => "an input that nothing is written to".into(),
    };
    Fired::plain(&plan.at, form)
}

/// Converts states in all functions, or leaves all as they were.
fn convert_all(functions: &mut [&mut Function], plans: &[Vec<Plan>]) -> Result<Vec<Vec<InterfaceChange>>, PatchError> {
    let before: Vec<Function> = functions.iter().map(|f| (**f).clone()).collect();
    let converted: Result<_, PatchError> =
        functions.iter_mut().zip(plans).map(|(f, plans)| convert(f, plans)).collect();
    if converted.is_err() {
        functions.iter_mut().zip(before).for_each(|(f, before)| **f = before);
    }
    converted
}

fn convert(f: &mut Function, plans: &[Plan]) -> Result<Vec<InterfaceChange>, PatchError> {
    if plans.is_empty() {
        return Ok(Vec::new());
    }
    let mut t = Transaction::begin(f);
    // First every write goes: a value that feeds one may not be returned.
    for plan in plans {
        detach(&mut t, plan)?;
    }
    let changes = plans.iter().map(|plan| expose(&mut t, plan)).collect::<Result<_, _>>()?;
    t.commit()?;
    Ok(changes)
}

/// Takes the state ops away: what was read is the input.
fn detach(t: &mut Transaction<'_>, plan: &Plan) -> Result<(), PatchError> {
    if let Some(write) = &plan.write {
        t.remove(write.op)?;
    }
    for &(op, content) in &plan.reads {
        for u in t.value(content).uses().to_vec() {
            t.set_use(u, plan.state)?;
        }
        t.remove(op)?;
    }
    t.turn_into_input(plan.state);
    Ok(())
}

/// Returns what is put into the box.
fn expose(t: &mut Transaction<'_>, plan: &Plan) -> Result<InterfaceChange, PatchError> {
    let cache = t.value(plan.state).name().clone();
    let Some(write) = &plan.write else {
        return Ok(InterfaceChange::Input { cache, dtype: plan.dtype, cache_shape: plan.shape.clone() });
    };
    let output = boxed(t, write, &format!("{cache}_new"))?;
    t.add_output(output)?;
    let updated = t.op(write.update.op).results().to_vec();
    t.erase_dead(updated);
    let output_shape = write.extents.iter().map(Dim::as_known).collect();
    Ok(InterfaceChange::ReadOnly(HostWrite {
        cache,
        dtype: plan.dtype,
        cache_shape: plan.shape.clone(),
        output: t.value(output).name().clone(),
        output_shape,
        begin: write.begin.clone(),
    }))
}

/// What is put into the box, in the shape of the box, as a value that may be returned.
fn boxed(t: &mut Transaction<'_>, write: &Write, name: &str) -> Result<ValueId, PatchError> {
    let at = write.update.op;
    let stale = || PatchError::Stale(format!("the update of `{name}`"));
    // Not that of the plan: it may be a read that is gone.
    let value = t.op(at).value("update").ok_or_else(stale)?;
    let mut patch = Patch::before(at);
    let new = match write.update.squeezed.is_empty() {
        true if is_result(t, value) && may_be_returned(t, value) => {
            t.rename(value, name)?;
            return Ok(value);
        }
        true => {
            let dtype = t.tensor(value).ok_or_else(stale)?.dtype;
            patch.op("identity", name, [("x", value)], TensorType::new(dtype, write.extents.iter().cloned()))
        }
        false => patch.reshape(t, value, name, &write.extents).ok_or_else(stale)?,
    };
    t.insert(&patch, &new)
}

/// Whether a value is computed, not a constant, and may have another name.
fn is_result(f: &Function, v: ValueId) -> bool {
    let Some(op) = f.producer(v).filter(|&op| f.op(op).kind() != "const") else { return false };
    let users = f.value(v).uses().iter().filter_map(|&u| f.user(u));
    users.chain([op]).all(|op| f.check_editable(op).is_ok())
}
