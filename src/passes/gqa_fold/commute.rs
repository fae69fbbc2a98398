//! Sinking repeats: an op that treats all heads alike can work on each KV head once.
//!
//! RoPE, a norm's scale, a cast or a slice after the repeat stands between the copies and the matmul. Where its other
//! operands do not differ within a group, it computes the same for every copy, so it is done before the repeat. Op by op
//! the repeat reaches the matmul, where it is folded.

use crate::analysis::spelling::{MAX_RANK, Order};
use crate::analysis::traffic::{batched_operands, value_bytes};
use crate::ir::{Dim, Function, Literal, OpId, Operand, TensorType, ValueId};
use crate::opset::{is_elementwise, views};
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref, is_returned};

use super::member::{is_data, member};
use super::regroup::Fold;
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
    if !lands_in_products(cx, result, axis, &heads) {
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
            if let (0, Ok(shared)) = (missing, shared(cx, op, v, axis, None)) {
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
            let own = shared(cx, op, *v, fold.axis, None).map_err(|_| NoMatch::UNRELATED)?;
            if own.heads != *heads {
                return Err(NoMatch::UNRELATED);
            }
            Ok(Input::One(own.operand(f, patch, *v, &own.shape)?.0))
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
    "tile",
    "transpose",
];

/// Whether everything computed from a value by further views and ops of this kind ends in products, and none of them tells
/// the heads of a group apart.
fn lands_in_products(cx: &Context<'_>, v: ValueId, axis: usize, heads: &Heads) -> bool {
    let f = cx.f;
    // With the head axis, where it is known.
    let mut seen = vec![(v, Some(axis))];
    let mut at = 0;
    while let Some(&(v, axis)) = seen.get(at) {
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
            let passes = is_elementwise(kind) || kind.starts_with("reduce_") || PASSES.contains(&kind);
            if !passes || seen.len() > 256 || !axis.is_none_or(|a| Alike::new(cx, user, heads).treats(user, a)) {
                return false;
            }
            for &r in f.op(user).results() {
                if !seen.iter().any(|(w, _)| *w == r) {
                    seen.push((r, axis.and_then(|a| axis_behind(f, user, v, r, a))));
                }
            }
        }
    }
    true
}

/// Where an axis of an operand is in a result; `None` where that is not known.
fn axis_behind(f: &Function, op: OpId, operand: ValueId, result: ValueId, axis: usize) -> Option<usize> {
    let (from, to) = (f.tensor(operand)?, f.tensor(result)?);
    let axis = match f.op(op).kind().as_str() {
        "transpose" => views::Transpose::of(f, op)?.perm.iter().position(|&p| p == axis)?,
        "reshape" | "flatten2d" | "expand_dims" | "squeeze" | "stack" => return None,
        _ if from.rank() == to.rank() => axis,
        _ => return None,
    };
    (from.shape.get(axis)? == to.shape.get(axis)? || f.op(op).kind() == "transpose").then_some(axis)
}

/// Whether values are the same for all heads of a group, as far as can be seen.
struct Alike<'c, 'f> {
    cx: &'c Context<'f>,
    reader: OpId,
    heads: &'c Heads,
    seen: Vec<ValueId>,
}

impl<'c, 'f> Alike<'c, 'f> {
    fn new(cx: &'c Context<'f>, reader: OpId, heads: &'c Heads) -> Self {
        Alike { cx, reader, heads, seen: Vec::new() }
    }

    /// Whether an op whose result has the heads on this axis treats them alike.
    fn treats(&mut self, op: OpId, axis: usize) -> bool {
        let f = self.cx.f;
        let kind = f.op(op).kind().as_str();
        let Some(rank) = f.op(op).results().first().and_then(|&r| f.tensor(r)).map(TensorType::rank) else {
            return true;
        };
        let mixes = is_elementwise(kind) || kind == "concat";
        !mixes
            || f.op(op).operands().iter().enumerate().all(|(i, operand)| {
                let is_data = f.op(op).param_of(i).is_some_and(|p| is_data(kind, p));
                !is_data || self.is(operand, axis, rank)
            })
    }

    /// Whether an operand of an op of this rank is.
    fn is(&mut self, operand: &Operand, axis: usize, rank: usize) -> bool {
        let f = self.cx.f;
        let Some(ty) = f.operand_type(operand).as_tensor() else { return true };
        let missing = rank.saturating_sub(ty.rank());
        let Some(axis) = axis.checked_sub(missing).filter(|&a| ty.shape.get(a).is_some_and(|d| !d.is_one())) else {
            return true;
        };
        let Some(v) = operand.as_value() else { return false };
        if self.seen.contains(&v) || shared(self.cx, self.reader, v, axis, None).is_ok_and(|s| s.heads == *self.heads) {
            return true;
        }
        self.seen.push(v);
        let Some(op) = f.producer(v).filter(|_| self.seen.len() < 64) else { return false };
        match f.op(op).kind().as_str() {
            kind if is_elementwise(kind) || kind == "concat" => self.treats(op, axis),
            kind if kind.starts_with("reduce_") || PASSES.contains(&kind) => {
                let Some(x) = f.op(op).param("x").first() else { return true };
                let axis = match views::Transpose::of(f, op) {
                    Some(transpose) => transpose.perm.get(axis).copied(),
                    None => x.as_value().and_then(|x| axis_behind(f, op, x, v, axis)),
                };
                axis.is_none_or(|axis| self.is(x, axis, ty.rank()))
            }
            _ => false,
        }
    }
}
