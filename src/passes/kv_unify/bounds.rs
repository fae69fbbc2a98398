//! The bounds of a slice of one part as bounds of the same slice of the joined state.

use crate::analysis::values::Values;
use crate::ir::{DType, Function, Literal, OpId, Operand, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Input, Patch, Ref};

/// Where a part lies in the joined state.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Its first row.
    pub offset: i64,
    /// How many it has.
    pub count: i64,
}

/// What element 0 of `begin` or `end` becomes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Bound {
    /// It does not matter.
    Any,
    /// This.
    At(i64),
    /// What it is, plus the first row.
    Shifted,
}

/// A slice on axis 0, of the joined state.
struct Leading {
    begin: Bound,
    end: Bound,
}

/// The parameters of `slice_by_index` or `slice_update` other than `x` and `update`, for the joined state; `None` when they
/// cannot be told.
pub(super) fn by_index(
    f: &Function,
    values: &Values,
    p: &mut Patch,
    op: OpId,
    rows: Rows,
) -> Option<Vec<(&'static str, Input)>> {
    let leading = leading(f, values, op, rows)?;
    let mut params = vec![
        ("begin", vector(f, values, p, op, "begin", leading.begin, rows)?),
        ("end", vector(f, values, p, op, "end", leading.end, rows)?),
    ];
    for name in ["begin_mask", "end_mask"] {
        if let Some(mut mask) = f.ints(op, name) {
            *mask.first_mut()? = 0;
            params.push((name, Literal::bools(&mask.iter().map(|&m| m != 0).collect::<Vec<_>>()).into()));
        }
    }
    for name in ["stride", "squeeze_mask"] {
        if let [one] = f.op(op).param(name) {
            params.push((name, carried(f, one)));
        }
    }
    Some(params)
}

/// The parameters of `slice_by_size` other than `x`.
pub(super) fn by_size(
    f: &Function,
    values: &Values,
    p: &mut Patch,
    op: OpId,
    rows: Rows,
) -> Option<Vec<(&'static str, Input)>> {
    let mut size = f.ints(op, "size")?;
    let begin = first(f, values, op, "begin", rows)?;
    let count = f.tensor(*f.op(op).results().first()?)?.shape.first()?.as_known()?;
    let count = i64::try_from(count).ok()?;
    let inside = begin >= 0 && begin.checked_add(count)? <= rows.count;
    *size.first_mut()? = count;
    let begin = inside.then_some(Bound::At(begin + rows.offset))?;
    Some(vec![("begin", vector(f, values, p, op, "begin", begin, rows)?), ("size", Literal::ints(&size).into())])
}

/// Element 0 of a bound, when it is known, counted from the front.
fn first(f: &Function, values: &Values, op: OpId, name: &str, rows: Rows) -> Option<i64> {
    let at = values.param(f, op, name)?.first()?.as_ref()?.as_constant()?;
    if at < 0 { at.checked_add(rows.count) } else { Some(at) }
}

fn leading(f: &Function, values: &Values, op: OpId, rows: Rows) -> Option<Leading> {
    let slice = views::Slice::of(f, op)?;
    let axis = slice.axes.first()?;
    let content = slice.update.or(f.op(op).results().first().copied())?;
    let extent = match (&axis.extent, axis.squeeze) {
        (_, true) => 1,
        (Some(known), _) if known.as_known().is_some() => known.as_known()?,
        _ => f.tensor(content)?.shape.first()?.as_known()?,
    };
    let reach = i64::try_from(extent).ok()?.checked_sub(1)?.checked_mul(axis.stride)?.checked_add(1)?;
    if extent == 0 || axis.stride < 1 {
        return None;
    }
    let begin = match axis.begin {
        Some(begin) => i64::try_from(begin).ok(),
        None => first(f, values, op, "begin", rows),
    };
    if let Some(begin) = begin {
        let end = begin.checked_add(reach).filter(|&end| begin >= 0 && end <= rows.count)?;
        let known = |at: i64| Bound::At(at + rows.offset);
        let end = if axis.squeeze && f.ints(op, "end").is_none() { Bound::Any } else { known(end) };
        return Some(Leading { begin: known(begin), end });
    }
    // A position that only running the program tells: what is written there says how far it reaches.
    slice.update?;
    let to_edge = f.ints(op, "end_mask").is_some_and(|m| m.first() != Some(&0));
    let end = match first(f, values, op, "end", rows) {
        _ if axis.squeeze => Bound::Any,
        _ if axis.stride != 1 => return None,
        _ if to_edge => Bound::At(rows.offset + rows.count),
        Some(end) => Bound::At(rows.offset + (1..=rows.count).contains(&end).then_some(end)?),
        None => Bound::Shifted,
    };
    Some(Leading { begin: Bound::Shifted, end })
}

/// A binding as it is.
fn carried(f: &Function, operand: &Operand) -> Input {
    match operand {
        Operand::Value(v) => (*v).into(),
        Operand::Literal(l) => f.literal(*l).clone().into(),
    }
}

/// A vector with another element 0.
fn vector(
    f: &Function,
    values: &Values,
    p: &mut Patch,
    op: OpId,
    name: &str,
    bound: Bound,
    rows: Rows,
) -> Option<Input> {
    let [operand] = f.op(op).param(name) else { return None };
    let ty = f.operand_type(operand).as_tensor().filter(|t| t.dtype == DType::I32)?.clone();
    let elements = values.param(f, op, name);
    let has = |at: i64| elements.as_ref().and_then(|e| e.first()?.as_ref()?.as_constant()) == Some(at);
    match bound {
        Bound::Any => Some(carried(f, operand)),
        Bound::At(at) if has(at) => Some(carried(f, operand)),
        Bound::Shifted if rows.offset == 0 => Some(carried(f, operand)),
        Bound::At(at) => match f.operand_ints(operand) {
            Some(mut known) => {
                *known.first_mut()? = at;
                Some(Literal::ints(&known).into())
            }
            None => replaced(f, p, operand.as_value()?, &ty, at).map(Input::One),
        },
        Bound::Shifted => {
            let mut by = vec![0; usize::try_from(ty.volume()?).ok()?];
            *by.first_mut()? = rows.offset;
            let inputs = [("x", carried(f, operand)), ("y", Literal::ints(&by).into())];
            Some(p.op("add", format!("{name}_shifted"), inputs, ty).into())
        }
    }
}

/// A computed vector with a known element 0, written by `concat` as it was.
fn replaced(f: &Function, p: &mut Patch, v: ValueId, ty: &TensorType, at: i64) -> Option<Ref> {
    let parts = match f.producer(v).and_then(|op| known_first(f, op, at)) {
        Some(parts) => parts,
        None => vec![Literal::ints(&[at]).into(), rest(p, v, ty)?.into()],
    };
    let inputs =
        [("values", Input::Many(parts)), ("axis", Literal::int(0).into()), ("interleave", Literal::bool(false).into())];
    Some(p.op("concat", "bounds", inputs, ty.clone()))
}

/// The parts of a `concat` of vectors, where the first is constant, with another element 0.
fn known_first(f: &Function, concat: OpId, at: i64) -> Option<Vec<Input>> {
    if f.op(concat).kind() != "concat" || f.bool(concat, "interleave") != Some(false) {
        return None;
    }
    let (first, others) = f.op(concat).param("values").split_first()?;
    let mut known = f.operand_ints(first)?;
    *known.first_mut()? = at;
    let known = if f.operand_type(first).as_tensor()?.rank() == 0 { Literal::int(at) } else { Literal::ints(&known) };
    Some(std::iter::once(known.into()).chain(others.iter().map(|o| carried(f, o))).collect())
}

/// All elements of a vector but the first.
fn rest(p: &mut Patch, v: ValueId, ty: &TensorType) -> Option<Ref> {
    let len = ty.volume()?.checked_sub(1).filter(|&n| n > 0)?;
    let inputs: [(&str, Input); 3] = [
        ("x", v.into()),
        ("begin", Literal::ints(&[1]).into()),
        ("size", Literal::ints(&[i64::try_from(len).ok()?]).into()),
    ];
    Some(p.op("slice_by_size", "bounds_rest", inputs, TensorType::fixed(DType::I32, &[len])))
}
