//! What would die.

use std::collections::BTreeSet;

use crate::ir::{Function, OpId, Use, ValueId};
use crate::opset::effect_of;

/// The ops that nothing would read any more if nothing read `v`: its producer, then their operands' producers, up to
/// `root`, which stays. Constants are not listed.
pub fn dying(f: &Function, v: ValueId, root: ValueId) -> Vec<OpId> {
    let mut dying: Vec<OpId> = Vec::new();
    let mut work = vec![v];
    while let Some(at) = work.pop() {
        let Some(op) = f.producer(at).filter(|_| at != root) else { continue };
        let unread =
            |&w: &ValueId| w == v || f.value(w).uses().iter().all(|u| u.op().is_some_and(|user| dying.contains(&user)));
        if dying.contains(&op) || f.op(op).kind() == "const" || !f.op(op).results().iter().all(unread) {
            continue;
        }
        dying.push(op);
        work.extend(f.op(op).operands().iter().filter_map(|o| o.as_value()));
    }
    dying
}

/// [`dying`] when only `reader` stops reading `v`: nothing, if something else reads it too.
pub fn dying_without(f: &Function, reader: OpId, v: ValueId, root: ValueId) -> Vec<OpId> {
    match f.value(v).uses().iter().all(|u| u.op() == Some(reader)) {
        true => dying(f, v, root),
        false => Vec::new(),
    }
}

/// Whether a value, or something computed from it, is written to a state (or read by an op that may do so).
pub fn is_written(f: &Function, v: ValueId) -> bool {
    let mut seen = BTreeSet::from([v]);
    let mut work = vec![v];
    while let Some(at) = work.pop() {
        for u in f.value(at).uses() {
            let reader = match *u {
                Use::Op { op, .. } => Some(op),
                Use::Output { block, .. } => f.block(block).parent(),
            };
            let Some(reader) = reader else { continue };
            if effect_of(f, reader).may_write() {
                return true;
            }
            work.extend(f.op(reader).results().iter().filter(|&&r| seen.insert(r)));
        }
    }
    false
}
