//! Sinking repeats: an op that treats all heads alike can work on each KV head once.
//!
//! RoPE, a norm's scale, a cast or a slice after the repeat stands between the copies and the matmul. Where its other
//! operands do not differ within a group, it computes the same for every copy, so it is done before the repeat. Op by op
//! the repeat reaches the matmul, where it is folded.

use crate::analysis::spelling::{MAX_RANK, Order};
use crate::analysis::traffic::{batched_operands, value_bytes};
use crate::ir::{Dim, Function, Literal, OpId, Operand, TensorType, ValueId};
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref, is_returned};

use super::regroup::{Fold, is_data, member};
use super::shared::{Heads, Shared, shared, tensor, tile};

pub(super) fn sink_repeat(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
    // Layouts see through views already.
    if matches!(f.op(op).kind().as_str(), "expand_dims" | "squeeze" | "identity") {
        return Err(NoMatch::UNRELATED);
    }
    let (axis, first) = repeated_operand(cx, op).ok_or(NoMatch::UNRELATED)?;
    let heads = first.heads.clone();
    let shape = &tensor(f, result)?.shape;
    let all_heads = heads.kv_heads.checked_mul(&heads.group).ok_or(NoMatch::UNRELATED)?;
    let fold = Fold { axis, head: vec![all_heads.clone()], folded: vec![heads.kv_heads.clone()] };
    member(f, &fold, op, f.op(op).block()).map_err(|_| NoMatch::UNRELATED)?;
    if !lands_in_products(f, result) {
        return Err(NoMatch::UNRELATED);
    }

    let mut patch = Patch::before(op);
    let mut inputs: Vec<(&str, Input)> = Vec::new();
    for (param, bindings) in f.op(op).params() {
        let mut parts = Vec::new();
        for operand in bindings {
            parts.push(match is_data(f.op(op).kind(), param) {
                true => data(cx, &mut patch, op, operand, &fold, &heads, shape.len())?,
                false => parameter(f, op, param, operand, &fold),
            });
        }
        let input = if parts.len() == 1 { parts.remove(0) } else { Input::Many(parts) };
        inputs.push((param, input));
    }
    let mut small = shape.to_vec();
    small[axis] = heads.kv_heads.clone();
    let name = f.value(result).name().as_str();
    let ty = TensorType::new(tensor(f, result)?.dtype, small.iter().cloned());
    let once = patch.op(f.op(op).kind(), format!("{name}_once"), inputs, ty);
    let again = repeat(f, &mut patch, once, name, &small, axis, &heads).ok_or(NoMatch::UNRELATED)?;
    patch.replace(result, again);
    patch.bytes_saved = value_bytes(f, result) - value_bytes(f, result) / heads.group.as_known().unwrap_or(1).max(1);
    patch.form = format!("done once per KV head: {}", heads.describe());
    Ok(patch)
}

/// The head axis and the shared side of the first operand that is repeated.
fn repeated_operand(cx: &Context<'_>, op: OpId) -> Option<(usize, Shared)> {
    let f = cx.f;
    let rank = f.tensor(*f.op(op).results().first()?)?.rank();
    for (i, operand) in f.op(op).operands().iter().enumerate() {
        let param = f.op(op).param_of(i).map_or("", |n| n.as_str());
        let Some(v) = operand.as_value().filter(|_| is_data(f.op(op).kind(), param)) else { continue };
        let layouts = cx.layouts.of(v);
        if f.tensor(v).is_none_or(|t| t.rank() > rank) || !layouts.iter().any(|l| l.repeats()) {
            continue;
        }
        let missing = rank - f.tensor(v)?.rank();
        for axis in 0..f.tensor(v)?.rank() {
            if let (0, Ok(shared)) = (missing, shared(cx, op, v, axis, false)) {
                return Some((axis, shared));
            }
        }
    }
    None
}

/// A data operand of the op that works once per KV head.
fn data(
    cx: &Context<'_>,
    patch: &mut Patch,
    op: OpId,
    operand: &Operand,
    fold: &Fold,
    heads: &Heads,
    rank: usize,
) -> Result<Input, NoMatch> {
    let f = cx.f;
    let ty = f.operand_type(operand).as_tensor().ok_or(NoMatch::UNRELATED)?;
    let missing = rank.saturating_sub(ty.rank());
    let alike = fold.axis < missing || ty.shape[fold.axis - missing].is_one();
    match operand {
        _ if alike && f.op(op).kind() != "concat" => Ok(Input::like(f, operand)),
        Operand::Value(v) if missing == 0 => {
            let own = shared(cx, op, *v, fold.axis, false).map_err(|_| NoMatch::UNRELATED)?;
            if own.heads != *heads {
                return Err(NoMatch::UNRELATED);
            }
            let mut small = ty.shape.to_vec();
            small[fold.axis] = heads.kv_heads.clone();
            Ok(Input::One(own.operand(f, patch, *v, small)?.0))
        }
        _ => Err(NoMatch::UNRELATED),
    }
}

/// A parameter as it is, but for bounds and sizes of the head axis.
fn parameter(f: &Function, op: OpId, name: &str, operand: &Operand, fold: &Fold) -> Input {
    let resized = || {
        matches!((f.op(op).kind().as_str(), name), ("slice_by_index", "end") | ("slice_by_size", "size"))
            .then_some(())?;
        let mut sizes = f.operand_ints(operand)?;
        let n = sizes.get_mut(fold.axis)?;
        (*n == i64::try_from(fold.head[0].as_known()?).ok()?).then_some(())?;
        *n = i64::try_from(fold.folded[0].as_known()?).ok()?;
        Some(Input::Const(Literal::ints(&sizes)))
    };
    resized().unwrap_or_else(|| Input::like(f, operand))
}

/// The heads of `once` repeated as `heads` says; `None` where that takes more axes than there can be.
pub(super) fn repeat(
    f: &Function,
    patch: &mut Patch,
    once: Ref,
    name: &str,
    small: &[Dim],
    axis: usize,
    heads: &Heads,
) -> Option<Ref> {
    let group = heads.group.as_known()?;
    let again = format!("{name}_again");
    if heads.order == Order::Interleaved {
        return tile(f, patch, once, axis, group, &again);
    }
    if small.len() >= MAX_RANK {
        return None;
    }
    let mut wide = small.to_vec();
    wide.insert(axis + 1, Dim::known(1));
    let x = patch.reshape(f, once, &format!("{name}_wide"), &wide)?;
    let tiled = tile(f, patch, x, axis + 1, group, &again)?;
    let mut to = small.to_vec();
    to[axis] = to[axis].checked_mul(&heads.group)?;
    patch.reshape(f, tiled, name, &to)
}

/// Ops besides elementwise ones and reductions that a repeat may be sunk through, or that are views.
const PASSES: &[&str] = &[
    "concat",
    "cumsum",
    "expand_dims",
    "flatten2d",
    "gather",
    "pad",
    "reshape",
    "reverse",
    "slice_by_index",
    "slice_by_size",
    "softmax",
    "split",
    "squeeze",
    "stack",
    "transpose",
];

/// Whether everything computed from a value by further views and ops of this kind ends in products.
fn lands_in_products(f: &Function, v: ValueId) -> bool {
    let mut seen = vec![v];
    let mut at = 0;
    while let Some(&v) = seen.get(at) {
        at += 1;
        if is_returned(f, v) || f.value(v).uses().is_empty() {
            return false;
        }
        for u in f.value(v).uses() {
            let Some(user) = u.op() else { return false };
            if batched_operands(f, user).iter().any(|(w, _)| *w == v) {
                continue;
            }
            let kind = f.op(user).kind().as_str();
            let passes =
                super::regroup::ELEMENTWISE.contains(&kind) || kind.starts_with("reduce_") || PASSES.contains(&kind);
            if !passes || seen.len() > 256 {
                return false;
            }
            for &r in f.op(user).results() {
                if !seen.contains(&r) {
                    seen.push(r);
                }
            }
        }
    }
    true
}
