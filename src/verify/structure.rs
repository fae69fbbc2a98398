//! V1 to V7 of one function.

use std::collections::HashSet;

use crate::ir::{BlockId, Def, Function, Id, OpId, Use, ValueId, ValueType};
use crate::opset::row;

use super::{Report, names};

pub(super) fn check(f: &Function, report: &mut Report) {
    if f.name().is_empty() {
        report.function(1, f.name(), "the function has no name");
    }
    let before = report.list.len();
    links(f, report);
    if report.list.len() > before {
        return;
    }
    for &v in f.inputs() {
        value(f, v, None, report);
    }
    if !f.block(f.body()).inputs().is_empty() {
        report.function(6, f.name(), "the body has inputs");
    }
    outputs(f, f.body(), None, report);
    for op in f.all_ops() {
        check_op(f, op, report);
    }
    names::scopes(f, false, report);
}

fn check_op(f: &Function, op: OpId, report: &mut Report) {
    let data = f.op(op);
    if data.kind().is_empty() {
        report.op(2, f, op, "the op has no kind");
    }
    for &v in data.results() {
        value(f, v, Some(op), report);
    }
    for &b in data.blocks() {
        for &v in f.block(b).inputs() {
            value(f, v, Some(op), report);
        }
        outputs(f, b, Some(op), report);
    }
    if let Some(want) = row(data.kind()).map(|_| if is_control(data.kind()) { 2 } else { 0 })
        && data.blocks().len() != want
    {
        report.op(6, f, op, format!("has {} blocks, {want} are needed", data.blocks().len()));
    }
    states(f, op, report);
}

fn is_control(kind: &str) -> bool {
    matches!(kind, "cond" | "while_loop")
}

/// V2, V5 and half of V7 of one value.
fn value(f: &Function, v: ValueId, op: Option<OpId>, report: &mut Report) {
    let data = f.value(v);
    let mut say = |rule, message: String| match op {
        Some(op) => report.op(rule, f, op, message),
        None => report.function(rule, f.name(), message),
    };
    if data.name().is_empty() {
        say(2, format!("value {v} has no name"));
    }
    match data.ty() {
        ValueType::Missing => say(5, format!("`{}` has no type", data.name())),
        ValueType::State(_) if op.is_some() => say(7, format!("`{}` is a state but no function input", data.name())),
        _ => {}
    }
}

/// V7 of the operands of one op.
fn states(f: &Function, op: OpId, report: &mut Report) {
    let data = f.op(op);
    let accessor = matches!(data.kind().as_str(), "read_state" | "write_state");
    for (param, bindings) in data.params() {
        for v in bindings.iter().filter_map(|o| o.as_value()) {
            let state = f.ty(v).as_state().is_some();
            let place = accessor && *param == "input";
            if state && !place && row(data.kind()).is_some() {
                report.op(7, f, op, format!("takes the state `{}` as `{param}`", f.value(v).name()));
            }
            if !state && place {
                report.op(7, f, op, format!("`{}` is not a state", f.value(v).name()));
            }
        }
    }
}

fn outputs(f: &Function, b: BlockId, op: Option<OpId>, report: &mut Report) {
    for &v in f.block(b).outputs().iter().filter(|v| f.ty(**v).as_state().is_some()) {
        let message = format!("returns the state `{}`", f.value(v).name());
        match op {
            Some(op) => report.op(7, f, op, message),
            None => report.function(7, f.name(), message),
        }
    }
}

/// V4.
fn links(f: &Function, report: &mut Report) {
    let mut uses = HashSet::new();
    let mut defined = Vec::new();
    for (i, &v) in f.inputs().iter().enumerate() {
        defined.push((v, Def::Input(i as u32)));
    }
    block(f, f.body(), None, &mut uses, &mut defined, report);
    let mut listed = 0;
    for (v, def) in defined {
        if f.value(v).def() != def {
            report.function(4, f.name(), format!("`{}` does not know where it is defined", f.value(v).name()));
        }
        listed += f.value(v).uses().len();
        if !f.value(v).uses().iter().all(|u| uses.contains(&(v, *u))) {
            report.function(4, f.name(), format!("`{}` lists a use that does not exist", f.value(v).name()));
        }
    }
    if listed != uses.len() {
        report.function(4, f.name(), format!("{listed} uses are listed, there are {}", uses.len()));
    }
}

fn block(
    f: &Function,
    b: BlockId,
    owner: Option<OpId>,
    uses: &mut HashSet<(ValueId, Use)>,
    defined: &mut Vec<(ValueId, Def)>,
    report: &mut Report,
) {
    let data = f.block(b);
    if data.parent() != owner {
        report.function(4, f.name(), format!("block {b} does not know its op"));
    }
    defined.extend(data.inputs().iter().enumerate().map(|(i, &v)| (v, Def::BlockInput(b, i as u32))));
    let mut last: Option<OpId> = None;
    let mut count = 0;
    for op in f.ops(b) {
        count += 1;
        if f.op(op).block() != b || !f.is_live(op) || count > data.len() {
            report.op(4, f, op, "does not know its block");
            return;
        }
        if last.is_some_and(|last| !f.comes_before(last, op)) {
            report.op(4, f, op, "is out of order");
        }
        last = Some(op);
        for (i, o) in f.op(op).operands().iter().enumerate() {
            match o.as_value() {
                Some(v) if v.index() >= f.value_capacity() => report.op(4, f, op, format!("{v} does not exist")),
                Some(v) => {
                    uses.insert((v, Use::Op { op, operand: i as u32 }));
                }
                None => {}
            }
        }
        defined.extend(f.op(op).results().iter().enumerate().map(|(i, &v)| (v, Def::Result(op, i as u32))));
        for &inner in f.op(op).blocks() {
            block(f, inner, Some(op), uses, defined, report);
        }
    }
    if count != data.len() {
        report.function(4, f.name(), format!("block {b} counts {} ops, there are {count}", data.len()));
    }
    uses.extend(data.outputs().iter().enumerate().map(|(i, &v)| (v, Use::Output { block: b, index: i as u32 })));
}
