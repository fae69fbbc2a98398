//! Ops that compute in the folded shape as they are.

use crate::analysis::layout::{normalise, takes_all};
use crate::ir::{BlockId, Function, OpId, TensorType, ValueId};
use crate::opset::{is_elementwise, views};

use super::regroup::Fold;

/// Whether a parameter's elements belong to the elements of the result, rather than saying how it is computed.
pub(super) fn is_data(kind: &str, param: &str) -> bool {
    match kind {
        "select" => true,
        "concat" => param == "values",
        "fill_like" => param == "ref_tensor",
        _ => matches!(param, "x" | "y"),
    }
}

/// Whether an op can compute in the folded shape, or why not.
pub(super) fn member(f: &Function, fold: &Fold, op: OpId, block: BlockId) -> Result<(), String> {
    let data = f.op(op);
    if data.block() != block {
        return Err("lies in a nested block".into());
    }
    if let Some(what) = data.unmodelled() {
        return Err(format!("carries {what}, which an edit would lose"));
    }
    let rank = data.value("x").and_then(|x| f.tensor(x)).map_or(0, TensorType::rank);
    let mixes = || Err(format!("({}) works along the head or the row axis", data.kind()));
    let touches = |axis: usize| fold.touches(axis);
    let behind = |axes: &[usize]| axes.iter().all(|&a| fold.is_behind(a));
    match &**data.kind() {
        kind if is_elementwise(kind) => {}
        "fill_like" => {}
        "softmax" => {
            let axis = views::Softmax::of(f, op).map(|s| s.axis);
            if axis.is_none_or(touches) {
                return mixes();
            }
        }
        "cumsum" => {
            if normalise(f.int(op, "axis").unwrap_or(0), rank).is_none_or(touches) {
                return mixes();
            }
        }
        kind if kind.starts_with("reduce_") && !kind.starts_with("reduce_arg") => {
            let Some(reduce) = views::Reduce::of(f, op) else { return Err("has axes that are not constant".into()) };
            if !(reduce.axes.iter().all(|&a| !touches(a)) && (reduce.keep_dims || behind(&reduce.axes))) {
                return mixes();
            }
        }
        "concat" => {
            let Some(concat) = views::Concat::of(f, op) else { return Err("has an axis that is not constant".into()) };
            if touches(concat.axis) {
                return mixes();
            }
        }
        "split" => {
            let Some(split) = views::Split::of(f, op) else { return Err("has an axis that is not constant".into()) };
            if touches(split.axis) {
                return mixes();
            }
        }
        "slice_by_index" => {
            let Some(slice) = views::Slice::of(f, op) else { return Err("has bounds that are not constant".into()) };
            let whole = |a: usize| {
                let size = data.value("x").and_then(|x| f.tensor(x)?.shape.get(a));
                size.is_some_and(|d| slice.axes.get(a).is_some_and(|s| takes_all(s, d) && !s.squeeze))
            };
            if !fold.axes().all(whole) {
                return mixes();
            }
            if slice.axes[..fold.axis].iter().any(|a| a.squeeze) {
                return Err("drops an axis in front of the heads".into());
            }
            if !spells_whole(f, fold, op) {
                return Err("spells the whole of an axis by bounds that hold for its size only".into());
            }
        }
        "slice_by_size" => {
            let begin = f.ints(op, "begin").unwrap_or_default();
            if !fold.axes().all(|a| begin.get(a) == Some(&0)) {
                return mixes();
            }
            if f.ints(op, "size").is_none() {
                return Err("has a size that is computed at run time".into());
            }
        }
        "pad" => {
            let Some(pad) = f.ints(op, "pad") else { return Err("pads by amounts computed at run time".into()) };
            let first = rank.saturating_sub(pad.len() / 2);
            let padded = |a: usize| a >= first && pad.iter().skip(2 * (a - first)).take(2).any(|&n| n != 0);
            if fold.axes().any(padded) {
                return mixes();
            }
        }
        "tile" => {
            let reps = views::Tile::of(f, op).and_then(|t| t.reps);
            if !reps.is_some_and(|reps| fold.axes().all(|a| reps.get(a) == Some(&1))) {
                return mixes();
            }
        }
        "expand_dims" => {
            let axes = views::ExpandDims::of(f, op).map(|e| e.axes);
            if !axes.is_some_and(|a| behind(&a)) {
                return Err("inserts an axis in front of or between heads and rows".into());
            }
        }
        "squeeze" => {
            let axes = views::Squeeze::of(f, op).map(|s| s.axes);
            if !f.has_param(op, "axes") || !axes.is_some_and(|a| behind(&a)) {
                return Err("drops an axis in front of or between heads and rows".into());
            }
        }
        _ => return Err(format!("({}) is not an op that the reshape can pass", data.kind())),
    }
    let head_layout = |v: &ValueId| f.tensor(*v).is_some_and(|t| fold.is_head_layout(&t.shape));
    if !data.results().is_empty() && data.results().iter().all(head_layout) {
        Ok(())
    } else {
        Err("does not keep heads and rows where they were".into())
    }
}

/// Whether a slice says that it takes the whole of the two axes by masks, or by bounds that can be resized: 0 and the size.
fn spells_whole(f: &Function, fold: &Fold, op: OpId) -> bool {
    let at = |name: &str, axis: usize| f.ints(op, name).and_then(|v| v.get(axis).copied());
    fold.head.iter().enumerate().all(|(i, size)| {
        let axis = fold.axis + i;
        let begins = at("begin_mask", axis) == Some(1) || at("begin", axis) == Some(0);
        let whole = at("end", axis).zip(size.as_known()).is_some_and(|(end, size)| end == size as i64);
        begins && (at("end_mask", axis) == Some(1) || whole)
    })
}
