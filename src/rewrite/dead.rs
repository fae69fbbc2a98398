//! Erasing what nothing reads.

use crate::ir::{Def, Function, OpId, ValueId};
use crate::opset::effect_of;

/// What would be lost if the op were erased or replaced: fields that the IR cannot hold, or attributes that nobody knows.
pub fn loss(f: &Function, op: OpId) -> Option<String> {
    let data = f.op(op);
    let constant = data.kind() == "const" || data.kind().starts_with("constexpr_");
    let attribute = || data.attributes().map(|(name, _)| name).find(|name| !constant && ***name != *"name");
    let unknown = || attribute().map(|name| format!("the attribute `{name}`"));
    data.unmodelled().map(str::to_string).or_else(unknown)
}

/// Whether an op may be erased: it has an effect on nothing, nothing reads it, and it carries nothing that would be
/// lost with it.
pub fn is_erasable(f: &Function, op: OpId) -> bool {
    let data = f.op(op);
    effect_of(f, op).is_erasable()
        && loss(f, op).is_none()
        && f.check_editable(op).is_ok()
        && data.results().iter().all(|&v| f.value(v).uses().is_empty())
}

/// Erases the producers of `values` that are dead, then whatever dies with them. Returns how many non-constant ops
/// went.
pub fn erase_dead(f: &mut Function, values: impl IntoIterator<Item = ValueId>) -> usize {
    let mut work: Vec<ValueId> = values.into_iter().collect();
    let mut erased = 0;
    while let Some(v) = work.pop() {
        let Def::Result(op, _) = f.value(v).def() else { continue };
        if !f.is_live(op) || !is_erasable(f, op) {
            continue;
        }
        let mut read: Vec<ValueId> = f.op(op).operands().iter().filter_map(|o| o.as_value()).collect();
        for b in f.op(op).blocks().to_vec() {
            read.extend(captured(f, b));
        }
        erased += usize::from(f.op(op).kind() != "const");
        f.erase_op(op);
        work.extend(read);
    }
    erased
}

fn captured(f: &Function, b: crate::ir::BlockId) -> Vec<ValueId> {
    let mut out = f.block(b).outputs().to_vec();
    for op in f.ops(b) {
        out.extend(f.op(op).operands().iter().filter_map(|o| o.as_value()));
        for &inner in f.op(op).blocks() {
            out.extend(captured(f, inner));
        }
    }
    out
}
