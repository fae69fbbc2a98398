//! Comparing across changes of the interface: what the second program takes and gives in the place of what the first does.
//!
//! A joined state starts as its parts one behind the other, and is compared by its parts. For a cache that became an input,
//! the comparison plays the caller: it keeps the content, hands it in, writes into it what the step gave for it, and
//! compares it with the state of the first program.

use std::collections::BTreeMap;

use super::{EquivError, same_type};
use crate::interp::{Fault, Tensor, Values};
use crate::ir::{DType, Dim, Function, Name, TensorType, ValueId, ValueType};
use crate::rewrite::{HostWrite, InterfaceChange, Source};

/// What the second program works on between steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// Its states.
    pub(super) states: Values,
    /// What the caller keeps for it.
    pub(super) caches: Values,
}

/// Inputs and states by name, with their types.
type Features = BTreeMap<Name, ValueType>;

/// The changes between two functions, which fit them.
#[derive(Clone, Debug)]
pub(super) struct Changes<'o> {
    function: &'o Name,
    list: &'o [InterfaceChange],
    /// For each change that joins states, how many rows each has.
    rows: Vec<Vec<usize>>,
}

impl<'o> Changes<'o> {
    /// Checks that the second function takes and gives what the first does, after these changes. The order of inputs and of
    /// outputs does not matter.
    ///
    /// # Errors
    /// [`EquivError::Interface`].
    pub(super) fn between(
        a: &'o Function,
        b: &Function,
        list: &'o [InterfaceChange],
    ) -> Result<Changes<'o>, EquivError> {
        let fail = |reason| EquivError::Interface { function: a.name().clone(), reason };
        let mut inputs = features(a, a.inputs());
        let mut theirs = features(b, b.outputs());
        let mut rows = Vec::new();
        for change in list {
            match change {
                InterfaceChange::Joined { states, into } => {
                    rows.push(join(&mut inputs, states, into).map_err(fail)?);
                }
                InterfaceChange::ReadOnly(write) => {
                    rows.push(Vec::new());
                    become_input(&mut inputs, &write.cache, write.dtype, &write.cache_shape).map_err(fail)?;
                    take_output(&mut theirs, write).map_err(fail)?;
                }
                InterfaceChange::Input { cache, dtype, cache_shape } => {
                    rows.push(Vec::new());
                    become_input(&mut inputs, cache, *dtype, cache_shape).map_err(fail)?;
                }
            }
        }
        alike("input", &inputs, &features(b, b.inputs())).map_err(fail)?;
        alike("output", &features(a, a.outputs()), &theirs).map_err(fail)?;
        Ok(Changes { function: a.name(), list, rows })
    }

    /// What the second program starts from when the first starts from these states.
    pub(super) fn begin(&self, states: &Values) -> Result<Held, EquivError> {
        let mut held = Held { states: states.clone(), caches: Values::new() };
        for change in self.list {
            match change {
                InterfaceChange::Joined { states, into } => {
                    let parts: Vec<Tensor> = states.iter().filter_map(|name| held.states.remove(name)).collect();
                    let whole = Tensor::joined(&parts).map_err(|e| self.fault(into, &e))?;
                    held.states.insert(into.clone(), whole);
                }
                InterfaceChange::ReadOnly(HostWrite { cache, .. }) | InterfaceChange::Input { cache, .. } => {
                    let content = held.states.remove_entry(cache);
                    held.caches.extend(content);
                }
            }
        }
        Ok(held)
    }

    /// The states of the first program as the second has them.
    pub(super) fn states_of_first(&self, held: &Held) -> Result<Values, EquivError> {
        let mut states = held.states.clone();
        for (change, rows) in self.list.iter().zip(&self.rows).rev() {
            match change {
                InterfaceChange::ReadOnly(HostWrite { cache, .. }) | InterfaceChange::Input { cache, .. } => {
                    let content = held.caches.get_key_value(cache);
                    states.extend(content.map(|(name, t)| (name.clone(), t.clone())));
                }
                InterfaceChange::Joined { states: parts, into } => {
                    let Some(whole) = states.remove(into) else { continue };
                    let mut first = 0;
                    for (part, &count) in parts.iter().zip(rows) {
                        let content = whole.rows(first, count).map_err(|e| self.fault(into, &e))?;
                        states.insert(part.clone(), content);
                        first += count;
                    }
                }
            }
        }
        Ok(states)
    }

    /// Writes what a step gave into the caches that the caller keeps.
    pub(super) fn write(&self, inputs: &Values, outputs: &Values, held: &mut Held) -> Result<(), EquivError> {
        for change in self.list {
            let InterfaceChange::ReadOnly(write) = change else { continue };
            let (Some(cache), Some(content)) = (held.caches.get(&write.cache), outputs.get(&write.output)) else {
                return Err(self.fail(format!("`{}` was not given", write.output)));
            };
            let begin: Option<Vec<i64>> = write.begin.iter().map(|p| p.evaluate(|s| known(inputs, s))).collect();
            let begin = begin.ok_or_else(|| {
                self.fail(format!("the inputs do not tell where `{}` goes in `{}`", write.output, write.cache))
            })?;
            let cache = cache.with_box(&begin, content).map_err(|e| self.fault(&write.output, &e))?;
            held.caches.insert(write.cache.clone(), cache);
        }
        Ok(())
    }

    fn fault(&self, name: &Name, fault: &Fault) -> EquivError {
        self.fail(format!("`{name}`: {fault}"))
    }

    fn fail(&self, reason: String) -> EquivError {
        EquivError::Interface { function: self.function.clone(), reason }
    }
}

/// An element or a size of an input of this step.
fn known(inputs: &Values, source: &Source) -> Option<i64> {
    match source {
        Source::Element { input, index } => inputs.get(input)?.to_i64s().get(*index as usize).copied(),
        Source::Size { input, axis } => i64::try_from(*inputs.get(input)?.shape().get(*axis)?).ok(),
    }
}

fn features(f: &Function, values: &[ValueId]) -> Features {
    values.iter().map(|&v| (f.value(v).name().clone(), f.ty(v).clone())).collect()
}

/// Joins states along axis 0; returns how many rows each has.
fn join(inputs: &mut Features, states: &[Name], into: &Name) -> Result<Vec<usize>, String> {
    let mut rows = Vec::new();
    let mut whole: Option<TensorType> = None;
    for name in states {
        let ty = inputs.remove(name);
        let ty =
            ty.as_ref().and_then(ValueType::as_state).ok_or_else(|| format!("there is no state `{name}` to join"))?;
        let count = ty.shape.first().and_then(Dim::as_known).ok_or_else(|| format!("`{name}` has no rows"))?;
        rows.push(usize::try_from(count).map_err(|e| e.to_string())?);
        let whole = whole.get_or_insert_with(|| {
            let mut none = ty.clone();
            none.shape[0] = Dim::known(0);
            none
        });
        if (whole.dtype, &whole.shape[1..]) != (ty.dtype, &ty.shape[1..]) {
            return Err(format!("`{name}` cannot be joined with the states before it"));
        }
        let sum = whole.shape[0].as_known().and_then(|n| n.checked_add(count));
        whole.shape[0] = Dim::known(sum.ok_or_else(|| format!("`{into}` is too large"))?);
    }
    let whole = whole.ok_or_else(|| format!("no states become `{into}`"))?;
    match inputs.insert(into.clone(), ValueType::State(whole)) {
        None => Ok(rows),
        Some(_) => Err(format!("`{into}` exists twice")),
    }
}

/// Makes a state an input.
fn become_input(inputs: &mut Features, cache: &Name, dtype: DType, shape: &[u64]) -> Result<(), String> {
    let state = inputs.get(cache).and_then(ValueType::as_state).cloned();
    let state = state.ok_or_else(|| format!("there is no state `{cache}` to become an input"))?;
    let said = TensorType::fixed(dtype, shape);
    if state != said {
        return Err(format!("the state `{cache}` is {state}, not {said}"));
    }
    inputs.insert(cache.clone(), ValueType::Tensor(state));
    Ok(())
}

/// Takes out the output that holds what the caller writes.
fn take_output(outputs: &mut Features, write: &HostWrite) -> Result<(), String> {
    let (name, rank) = (&write.output, write.cache_shape.len());
    if write.begin.len() != rank {
        return Err(format!("a box of `{}` begins at {rank} numbers, not {}", write.cache, write.begin.len()));
    }
    let ty = outputs.remove(name).ok_or_else(|| format!("the second program has no output `{name}`"))?;
    let fits = ty.as_tensor().is_some_and(|t| {
        let said = |(d, n): (&Dim, &Option<u64>)| n.is_none() || d.as_known().is_none() || d.as_known() == *n;
        t.dtype == write.dtype
            && t.rank() == write.output_shape.len()
            && t.shape.iter().zip(&write.output_shape).all(said)
    });
    if fits { Ok(()) } else { Err(format!("the output `{name}` is {ty}, not what is said of it")) }
}

/// Features pair up by name and type.
fn alike(what: &str, ours: &Features, theirs: &Features) -> Result<(), String> {
    if let Some(name) = theirs.keys().find(|n| !ours.contains_key(*n)) {
        return Err(format!("only the second program has the {what} `{name}`"));
    }
    for (name, ty) in ours {
        let Some(other) = theirs.get(name) else {
            return Err(format!("only the first program has the {what} `{name}`"));
        };
        if !same_type(ty, other) {
            return Err(format!("the {what} `{name}` is {ty} in one program, {other} in the other"));
        }
    }
    Ok(())
}
