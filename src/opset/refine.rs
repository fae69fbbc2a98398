//! Stored types and inferred ones: when they agree, and how the first are made as sharp as the second.

use std::collections::HashSet;

use crate::ir::{BlockId, Dim, Function, OpId, TensorType, ValueId, ValueType};

use super::infer::{Context, Dims, Guess, broadcast_dims, dims_of, guess};
use super::row;

/// A known mistake of coremltools in a stored type. Files that have it load; files without it may not.
///
/// Three more are handled where they arise: a 0 stored below a dynamic `reshape` ([`refine`] makes it unknown), fp32
/// defaults such as `epsilon` in fp16 groups, and 64-bit constants, which loaders narrow to 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Slip {
    /// `select` is typed as if the condition did not broadcast.
    SelectCondition,
    /// `slice_by_size` with size -1 and a negative begin is typed `dim - begin`.
    SizeToEnd,
    /// A slice of an axis of one element is typed as one element although the bounds leave none.
    SliceOfOne,
    /// A slice that begins before the first element and walks backwards is typed as one element.
    SliceBeforeStart,
}

/// The compatibility rule of coremltools' loader: equal element types and ranks, and each size equal or unknown on one
/// side. A stored scalar passes for a tensor of any rank.
pub fn agrees(stored: &ValueType, inferred: &ValueType) -> bool {
    use ValueType::{List, Tensor, Unranked};
    match (stored, inferred) {
        (Tensor(a), Tensor(b)) => {
            let sizes = |(a, b): (&Dim, &Dim)| match (a.as_known(), b.as_known()) {
                (Some(a), Some(b)) => a == b,
                _ => true,
            };
            a.dtype == b.dtype && (a.rank() == 0 || a.rank() == b.rank() && a.shape.iter().zip(&b.shape).all(sizes))
        }
        (Tensor(TensorType { dtype, .. }) | Unranked(dtype), Unranked(other)) => dtype == other,
        (Unranked(dtype), Tensor(t)) => *dtype == t.dtype,
        (List { element: a, .. }, List { element: b, .. }) => agrees(a, b),
        _ => stored == inferred,
    }
}

/// The known mistake that explains why the type of an op's result does not agree with the inferred one.
pub fn slip(f: &Function, op: OpId, stored: &ValueType, inferred: &ValueType) -> Option<Slip> {
    let (stored, inferred) = (stored.as_tensor()?, inferred.as_tensor()?);
    if f.op(op).kind() == "select" {
        let part = |name| Some(dims_of(f.operand_type(f.op(op).param(name).first()?).as_tensor()?));
        let narrow = broadcast_dims(&part("a")?, &part("b")?).ok()?;
        return explained(stored, &narrow).then_some(Slip::SelectCondition);
    }
    let x = f.tensor(f.op(op).value("x")?)?;
    if stored.dtype != inferred.dtype || stored.rank() != inferred.rank() || stored.rank() != x.rank() {
        return None;
    }
    let differing: Vec<usize> = (0..x.rank())
        .filter(|&i| match (stored.shape[i].as_known(), inferred.shape[i].as_known()) {
            (Some(a), Some(b)) => a != b,
            _ => false,
        })
        .collect();
    match f.op(op).kind().as_str() {
        "slice_by_size" => {
            let (begin, size) = (f.ints(op, "begin")?, f.ints(op, "size")?);
            let wrong = |i: usize| {
                let (begin, n) = (*begin.get(i)?, x.shape[i].as_known()?);
                (*size.get(i)? == -1 && begin < 0).then(|| n.checked_add(begin.unsigned_abs())).flatten()
            };
            let to_end = |&i: &usize| stored.shape[i].as_known() == wrong(i);
            differing.iter().all(to_end).then_some(Slip::SizeToEnd)
        }
        "slice_by_index" => {
            let one = |&i: &usize| stored.shape[i].is_one() && inferred.shape[i] == Dim::known(0);
            let of_one = |&i: &usize| x.shape[i].is_one();
            let slip = if differing.iter().all(of_one) { Slip::SliceOfOne } else { Slip::SliceBeforeStart };
            differing.iter().all(one).then_some(slip)
        }
        _ => None,
    }
}

fn explained(stored: &TensorType, dims: &Dims) -> bool {
    let fits = |(s, d): (&Dim, &Option<Dim>)| match (s.as_known(), d.as_ref().and_then(Dim::as_known)) {
        (Some(s), Some(d)) => s == d,
        _ => true,
    };
    stored.rank() == dims.len() && stored.shape.iter().zip(dims).all(fits)
}

/// Replaces the unknown sizes of a function that was read from a file by what inference proves, op by op and in order.
///
/// A known size stays, except that of a value below a `reshape` that copies sizes (entry 0) from a tensor with unknown
/// ones: coremltools stores these copies as 0, and where inference does not confirm such a size it becomes unknown.
/// Constants take the type of their content. Ops that are wrong, or opaque, keep the types they have.
pub fn refine(f: &mut Function) {
    refine_block(f, f.body(), &mut HashSet::new());
}

fn refine_block(f: &mut Function, b: BlockId, doubtful: &mut HashSet<ValueId>) {
    let ops: Vec<OpId> = f.ops(b).collect();
    for op in ops {
        for inner in f.op(op).blocks().to_vec() {
            refine_block(f, inner, doubtful);
        }
        let Ok(Some(guesses)) = guess(f, op) else { continue };
        let kind = f.op(op).kind();
        let content_decides = kind == "const" || kind.starts_with("constexpr_");
        let doubt = copies_unknown(f, op) || f.op(op).operands().iter().any(|o| {
            o.as_value().is_some_and(|v| doubtful.contains(&v))
        });
        for (v, guess) in f.op(op).results().to_vec().into_iter().zip(guesses) {
            let (ty, doubted) = merge(f, v, guess, content_decides, doubt);
            if doubted {
                doubtful.insert(v);
            }
            if ty != *f.ty(v) {
                f.refine_type(v, ty);
            }
        }
    }
}

/// Whether the op is a `reshape` whose zeros coremltools does not replace.
fn copies_unknown(f: &Function, op: OpId) -> bool {
    let data = f.op(op);
    let unknown = |v| f.tensor(v).is_some_and(|t| t.known_shape().is_none());
    data.kind() == "reshape"
        && data.value("x").is_some_and(unknown)
        && f.ints(op, "shape").is_some_and(|shape| shape.contains(&0))
}

/// The stored type sharpened by a guess, and whether a stored size was dropped.
fn merge(f: &mut Function, v: ValueId, guess: Guess, content_decides: bool, doubt: bool) -> (ValueType, bool) {
    let stored = f.ty(v).clone();
    let (dtype, dims) = match guess {
        Guess::Unknown => return (stored, false),
        Guess::Exact(ty) if content_decides => return (ty, false),
        Guess::Exact(ValueType::Tensor(t)) => (t.dtype, dims_of(&t)),
        Guess::Exact(_) => return (stored, false),
        Guess::Tensor(dtype, dims) => (dtype, dims),
    };
    let known = match &stored {
        ValueType::Tensor(t) if t.dtype == dtype && t.rank() == dims.len() => Some(t),
        // A stored scalar, or no type, says nothing of the shape.
        ValueType::Tensor(t) if t.dtype == dtype && t.rank() == 0 => None,
        ValueType::Missing | ValueType::Unranked(_) => None,
        _ if content_decides => None,
        _ => return (stored, false),
    };
    let mut dropped = false;
    let shape: Vec<Dim> = dims
        .into_iter()
        .enumerate()
        .map(|(i, d)| match (known.map(|t| &t.shape[i]), d) {
            (None, Some(d)) => d,
            (None, None) => f.fresh_dim(),
            (Some(_), Some(d)) if content_decides => d,
            (Some(s), Some(d)) if s.as_known().is_none() || *s == d => d,
            (Some(s), None) if s.as_known().is_none() => s.clone(),
            (Some(_), _) if doubt => {
                dropped = true;
                f.fresh_dim()
            }
            (Some(s), _) => s.clone(),
        })
        .collect();
    (TensorType::new(dtype, shape).into(), dropped)
}

/// The type for a guess about a new value, with a fresh symbol for each unknown size; `None` when nothing is known.
pub(crate) fn fresh_type(f: &mut Function, guess: Guess) -> Option<ValueType> {
    match guess {
        Guess::Exact(ty) => Some(ty),
        Guess::Unknown => None,
        Guess::Tensor(dtype, dims) => {
            let shape: Vec<Dim> = dims.into_iter().map(|d| d.unwrap_or_else(|| f.fresh_dim())).collect();
            Some(TensorType::new(dtype, shape).into())
        }
    }
}

/// The context of an op of a kind that has a row in the function's opset.
pub(crate) fn context(f: &Function, op: OpId) -> Option<Context<'_>> {
    let version = row(f.op(op).kind())?.version(f.opset_version())?;
    Some(Context::new(f, op, version))
}
