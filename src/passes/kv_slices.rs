//! `kv-slices`: write rows of a cache as rows, where they are blended in or scattered.
//!
//! With: state<tensor<fp16, [2, 8, 4]>> cache, tensor<fp16, [2, 1, 4]> row, tensor<int32, [1]> p
//!
//! Given:
//! ```text
//! tensor<int32, [8]> rows = range_1d(start = 0, end = 8, step = 1);
//! tensor<bool, [8]> here = equal(x = rows, y = p);
//! tensor<bool, [8, 1]> column = expand_dims(x = here, axes = [1]);
//! tensor<fp16, [2, 8, 4]> old = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> all = select(cond = column, a = row, b = old);
//! write_state(input = cache, data = all);
//! tensor<fp16, [2, 8, 4]> out = relu(x = all);
//! -> (out)
//! ```
//! Return:
//! ```text
//! tensor<int32, [1]> e = add(x = p, y = [1]);
//! tensor<int32, [3]> b3 = concat(values = ([0], p, [0]), axis = 0, interleave = false);
//! tensor<int32, [3]> e3 = concat(values = ([0], e, [0]), axis = 0, interleave = false);
//! tensor<fp16, [2, 8, 4]> rest = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> u = slice_update(x = rest, update = row, begin = b3, end = e3, begin_mask = [true, false, true], end_mask = [true, false, true]);
//! write_state(input = cache, data = u);
//! tensor<fp16, [2, 8, 4]> now = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> out = relu(x = now);
//! -> (out)
//! ```
//!
//! A cache is what comes from a state or an input and goes to a state or is returned. Forms, whatever views and casts lie
//! between:
//!
//! * `select(rows = position, new, old)`, and with `not_equal` the other way round;
//! * `old · (1 − m) + new · m`, where `m` is one at the position; `old · (1 − row sums of P) + P · new` for a one-hot matrix;
//! * `scatter`, `scatter_nd` and `scatter_along_axis` of rows that follow each other from a position on, and scatters of a
//!   flattened cache at a slice of its element numbers.
//!
//! That exactly one row is written at each position is proved from the arithmetic: a mask that comes from the caller stays. A
//! state that is overwritten with the updated cache is read, updated and written without anything in between, and what else
//! reads the updated cache reads the state again, as the other passes expect.
//!
//! Blends by arithmetic turn −0 into 0 and spread what is not finite; the report says where that ends.
//!
//! Exactness: bitwise. Assumes: A4, A8, A10, A13 (docs/assumptions.md).
//! Declines: a mask, one-hot or indices from the caller, or that are not provably rows from one position on; a function older
//! than CoreML8; a scatter that adds; what is written is not the state's content but for the rows; a read of the state between
//! the update and its write; a nested block.

mod emit;
mod forms;
mod runs;

use std::collections::BTreeSet;

use crate::analysis::state::States;
use crate::ir::{Function, OpId};
use crate::rewrite::{Budget, Context, Fired, Keeps, NoMatch, Outcome, loss};

use super::{Exactness, Pass};
use emit::{Bounds, Written};
use forms::Found;

/// Writes rows of a cache as rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvSlices;

impl Pass for KvSlices {
    fn name(&self) -> &'static str {
        "kv-slices"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        let mut outcome = Outcome::default();
        let mut bounds = Bounds::default();
        let mut done = BTreeSet::new();
        while !budget.is_spent() {
            let Some((found, written)) = next(f, &mut done, &mut outcome) else { break };
            let op = f.describe(found.op);
            if let Some(no) = budget.refusal(f, &op) {
                outcome.decline(no.keeping(Keeps::StateOps).declined(op));
                continue;
            }
            match emit::emit(f, &found, written.as_ref(), &mut bounds) {
                Ok(()) => {
                    budget.take();
                    let hazards = found.hazard.into_iter().collect();
                    outcome.fired.push(Fired { hazards, ..Fired::plain(op, found.form) });
                }
                Err(e) => outcome.decline(NoMatch::because(e.to_string()).keeping(Keeps::StateOps).declined(op)),
            }
        }
        outcome
    }
}

/// The next update, in block order; ops that were looked at are not looked at again.
fn next(f: &Function, done: &mut BTreeSet<OpId>, outcome: &mut Outcome) -> Option<(Found, Option<Written>)> {
    let cx = Context::new(f);
    let states = States::of(f);
    for op in f.all_ops() {
        if !done.insert(op) {
            continue;
        }
        let answer = forms::find(&cx, op).and_then(|found| {
            editable(f, &found)?;
            let written = emit::written(f, &states, &found).map_err(|no| no.keeping(Keeps::StateOps))?;
            Ok((found, written))
        });
        match answer {
            Ok(found) => return Some(found),
            Err(no) => outcome.decline(no.declined(f.describe(op))),
        }
    }
    None
}

/// Nothing is lost with the op.
fn editable(f: &Function, found: &Found) -> Result<(), NoMatch> {
    match loss(f, found.op) {
        Some(what) => Err(NoMatch::because(format!("{} has {what}", f.describe(found.op)))),
        None => Ok(()),
    }
}
