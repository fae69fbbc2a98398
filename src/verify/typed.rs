//! V9 to V13 of one function.

use crate::ir::{ArrayFeature, Feature, Flexibility, Function, OpId, TensorType, ValueId};
use crate::opset::{agrees, infer, slip};

use super::{Report, names};

pub(super) fn check(f: &Function, report: &mut Report) {
    names::scopes(f, true, report);
    for op in f.all_ops() {
        check_op(f, op, report);
    }
    // Edited functions were checked as part of the structure.
    if f.revision() == 0 {
        names::interface(f, 12, report);
    }
    described_types(f, report);
}

pub(super) fn check_op(f: &Function, op: OpId, report: &mut Report) {
    match infer(f, op) {
        Err(e) => report.op(10, f, op, e.problem.to_string()),
        Ok(None) => {}
        Ok(Some(types)) => {
            for (&v, inferred) in f.op(op).results().iter().zip(&types) {
                let stored = f.ty(v);
                if !agrees(stored, inferred) && slip(f, op, stored, inferred).is_none() {
                    let name = f.value(v).name();
                    report.op(11, f, op, format!("`{name}` has type {stored}, inferred is {inferred}"));
                }
            }
        }
    }
    if let ("while_loop", [condition, body]) = (f.op(op).kind().as_str(), f.op(op).blocks()) {
        let names = |b| f.block(b).inputs().iter().map(|&v| f.value(v).name());
        if !names(*condition).eq(names(*body)) {
            report.op(13, f, op, "the blocks name their inputs differently");
        }
    }
}

/// The second half of V12.
fn described_types(f: &Function, report: &mut Report) {
    let named = |values: &[ValueId], name: &str| values.iter().copied().find(|v| *f.value(*v).name() == *name);
    let i = f.interface();
    for (features, values) in [(&i.inputs, f.inputs()), (&i.states, f.inputs()), (&i.outputs, f.outputs())] {
        for feature in features {
            let Some(v) = named(values, &feature.name) else { continue };
            let Some(t) = f.ty(v).as_tensor().or(f.ty(v).as_state()) else { continue };
            if let Some(array) = feature.array().filter(|a| !admits(a, t)) {
                let shape = &array.shape;
                let message = format!("`{}` is described with shape {shape:?}, the program has {t}", feature.name);
                report.function(12, f.name(), message);
            }
            dtype(f, feature, t, report);
        }
    }
}

fn dtype(f: &Function, feature: &Feature, t: &TensorType, report: &mut Report) {
    if let Some(dtype) = feature.array().and_then(|a| a.dtype).filter(|d| *d != t.dtype) {
        let message = format!("`{}` is described as {dtype}, the program has {}", feature.name, t.dtype);
        report.function(12, f.name(), message);
    }
}

/// Whether a description admits the type: equal rank, and its default size on every known axis unless that is flexible.
fn admits(array: &ArrayFeature, t: &TensorType) -> bool {
    match (&array.shape[..], t.rank()) {
        ([], _) | ([1], 0) => true,
        (shape, rank) if shape.len() == rank => {
            let fixed = |(said, d): (&u64, &crate::ir::Dim)| d.as_known().is_none_or(|n| n == *said);
            array.flexibility != Flexibility::Fixed || shape.iter().zip(&t.shape).all(fixed)
        }
        _ => false,
    }
}
