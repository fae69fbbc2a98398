//! What would die.

use crate::ir::{Function, OpId, ValueId};

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
