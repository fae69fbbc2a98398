//! Slices: contiguous or strided boxes of a tensor.

use crate::ir::Dim;

use super::context::{Tensor, one, size};
use super::{Context, Dims, Inferred, Problem, Stop, dims};

/// What a slice takes of one axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AxisSlice {
    /// First index taken, counted from the front; `None` when it depends on run-time values or on an unknown size.
    pub begin: Option<u64>,
    /// Step between indices, not zero.
    pub stride: i64,
    /// Number of indices.
    pub extent: Option<Dim>,
    /// Whether the axis is dropped from the result.
    pub squeeze: bool,
}

/// The bounds of one axis as the op spells them; `None` is a run-time value.
#[derive(Clone, Copy)]
struct Bounds {
    begin: Option<i64>,
    end: Option<i64>,
    stride: i64,
    begin_mask: bool,
    end_mask: bool,
    squeeze: bool,
}

/// What `slice_by_index` or `slice_update` takes of each axis of a tensor of sizes `shape`.
pub(crate) fn axes(c: &Context<'_>, shape: &[Option<Dim>]) -> Result<Vec<AxisSlice>, Stop> {
    let rank = shape.len();
    for name in ["begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask"] {
        if c.has(name) {
            c.expect_length(name, rank)?;
        }
    }
    let (begin, end) = (c.ints("begin"), c.ints("end"));
    let constant = |name: &str| match (c.has(name), c.ints(name)) {
        (true, None) => Err(Stop::Unknown),
        (_, values) => Ok(values),
    };
    let stride = constant("stride")?;
    let masks = [constant("begin_mask")?, constant("end_mask")?, constant("squeeze_mask")?];
    let at = |v: &Option<Vec<i64>>, i: usize| v.as_ref().and_then(|v| v.get(i).copied());
    let set = |v: &Option<Vec<i64>>, i: usize| at(v, i).is_some_and(|n| n != 0);
    let axis = |(i, n)| {
        let bounds = Bounds {
            begin: at(&begin, i),
            end: at(&end, i),
            stride: at(&stride, i).unwrap_or(1),
            begin_mask: set(&masks[0], i),
            end_mask: set(&masks[1], i),
            squeeze: set(&masks[2], i),
        };
        match (dims::number(n), bounds.squeeze) {
            _ if bounds.stride == 0 => Err(Problem::value("stride", "has a zero").into()),
            (size, true) => one_index(size, bounds),
            (Some(size), false) => of_known(size, bounds),
            (None, false) => Ok(of_unknown(n, bounds)),
        }
    };
    shape.iter().enumerate().map(axis).collect()
}

fn one_index(n: Option<u64>, b: Bounds) -> Result<AxisSlice, Stop> {
    let begin = match (b.begin_mask, b.begin, n) {
        (true, _, _) => Some(0),
        (false, Some(at), Some(n)) => {
            let from_front = if at < 0 { i128::from(at) + i128::from(n) } else { i128::from(at) };
            let inside = (0..i128::from(n)).contains(&from_front);
            let outside = || Problem::value("begin", format!("index {at} is outside an axis of {n}"));
            Some(u64::try_from(from_front).ok().filter(|_| inside).ok_or_else(outside)?)
        }
        (false, Some(at), None) => u64::try_from(at).ok(),
        (false, None, _) => None,
    };
    Ok(AxisSlice { begin, stride: 1, extent: dims::known(1), squeeze: true })
}

/// Numpy's rule, except that bounds that cross are an error where coremltools refuses them.
fn of_known(n: u64, b: Bounds) -> Result<AxisSlice, Stop> {
    let stride = b.stride;
    let taken = |begin: i128, extent: u64| AxisSlice {
        begin: u64::try_from(begin).ok(),
        stride,
        extent: dims::known(extent),
        squeeze: false,
    };
    if (b.begin.is_none() && !b.begin_mask) || (b.end.is_none() && !b.end_mask) {
        // Run-time bounds: an axis of one element stays.
        let extent = if n == 1 { dims::known(1) } else { None };
        return Ok(AxisSlice { begin: runtime_begin(n, b), stride, extent, squeeze: false });
    }
    if let (Some(begin), Some(end), false, false) = (b.begin, b.end, b.begin_mask, b.end_mask) {
        crossing(begin, end, stride)?;
    }
    let (size, step) = (i128::from(n), i128::from(stride));
    let (lo, hi) = if step > 0 { (0, size) } else { (-1, size - 1) };
    let clamp = |at: Option<i64>| {
        let at = i128::from(at.unwrap_or(0));
        (if at < 0 { at + size } else { at }).clamp(lo, hi)
    };
    let (first, past) = if step > 0 { (lo, hi) } else { (hi, lo) };
    let begin = if b.begin_mask { first } else { clamp(b.begin) };
    let end = if b.end_mask { past } else { clamp(b.end) };
    let distance = if step > 0 { end - begin } else { begin - end };
    let step = step.unsigned_abs() as i128;
    let extent = if distance <= 0 { 0 } else { (distance + step - 1) / step };
    Ok(taken(begin, u64::try_from(extent).map_err(|_| Problem::Overflow)?))
}

fn runtime_begin(n: u64, b: Bounds) -> Option<u64> {
    match b.begin {
        _ if b.begin_mask => if b.stride > 0 { Some(0) } else { n.checked_sub(1) },
        Some(at) if at >= 0 => Some(u64::try_from(at).ok()?.min(n)),
        Some(at) => n.checked_sub(at.unsigned_abs()),
        None => None,
    }
}

fn crossing(begin: i64, end: i64, stride: i64) -> Result<(), Stop> {
    let forwards = stride > 0 && begin >= 0 && end >= 0 && end < begin;
    let backwards = stride < 0 && begin < 0 && end < 0 && begin < end;
    if forwards || backwards {
        return Err(Problem::value("end", format!("{end} lies on the wrong side of begin, {begin}")).into());
    }
    Ok(())
}

/// The few slices of an unknown size whose extent is known.
fn of_unknown(n: &Option<Dim>, b: Bounds) -> AxisSlice {
    let from_zero = b.begin_mask || b.begin == Some(0);
    let begin = match b.begin {
        _ if from_zero && b.stride > 0 => Some(0),
        Some(at) if !b.begin_mask => u64::try_from(at).ok(),
        _ => None,
    };
    let extent = match (b.begin, b.end) {
        _ if b.begin_mask && b.end_mask && b.stride.unsigned_abs() == 1 => n.clone(),
        _ if b.end_mask && b.stride == 1 && from_zero => n.clone(),
        (Some(-1), _) if b.end_mask && !b.begin_mask && b.stride > 0 => dims::known(1),
        (Some(0), _) if b.end_mask && !b.begin_mask && b.stride < 0 => dims::known(1),
        (Some(begin), Some(end)) if !b.begin_mask && !b.end_mask => short(begin, end, b.stride),
        _ => None,
    };
    AxisSlice { begin, stride: b.stride, extent, squeeze: false }
}

/// Bounds on one side that leave no element or one, whatever the size (which is taken to hold them).
fn short(begin: i64, end: i64, stride: i64) -> Option<Dim> {
    let one_side = (begin >= 0) == (end >= 0);
    let distance = if stride > 0 { end.checked_sub(begin)? } else { begin.checked_sub(end)? };
    match distance {
        0 if one_side => dims::known(0),
        n if one_side && n > 0 && n.unsigned_abs() <= stride.unsigned_abs() => dims::known(1),
        _ => None,
    }
}

fn kept(axes: Vec<AxisSlice>) -> Dims {
    axes.into_iter().filter(|a| !a.squeeze).map(|a| a.extent).collect()
}

/// The box between `begin` and `end`.
pub(in crate::opset) fn slice_by_index(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    one(x.dtype, kept(axes(c, &x.dims)?))
}

/// The type of `x`; `update` has the shape of the slice it replaces.
pub(in crate::opset) fn slice_update(c: &Context<'_>) -> Inferred {
    let (x, update) = (c.tensor("x")?, c.tensor("update")?);
    if update.rank() == 0 {
        return Err(Problem::rank("update", 0, "at least 1 is needed").into());
    }
    match axes(c, &x.dims) {
        Ok(axes) => fits(&update, &kept(axes))?,
        Err(Stop::Unknown) => {}
        Err(wrong) => return Err(wrong),
    }
    x.result()
}

fn fits(update: &Tensor, slice: &Dims) -> Result<(), Stop> {
    let fits = update.rank() == slice.len() && update.dims.iter().zip(slice).all(|(a, b)| dims::may_equal(a, b));
    if fits {
        return Ok(());
    }
    let reason = format!("has shape {}, the slice has {}", dims::show(&update.dims), dims::show(slice));
    Err(Problem::value("update", reason).into())
}

/// The box of `size` elements from `begin`; a size of -1 reaches to the end.
pub(in crate::opset) fn slice_by_size(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    c.expect_length("begin", x.rank())?;
    c.expect_length("size", x.rank())?;
    let Some(sizes) = c.ints("size") else {
        return one(x.dtype, dims::unknown(x.rank()));
    };
    let begin = c.ints("begin");
    let extent = |(i, (d, &n)): (usize, (&Option<Dim>, &i64))| match n {
        -1 => to_end(d, begin.as_ref().and_then(|b| b.get(i).copied())),
        _ => match (size(n), dims::number(d)) {
            (Some(s), Some(all)) if s.as_known() > Some(all) => {
                Err(Problem::value("size", format!("{n} exceeds an axis of {all}")).into())
            }
            (Some(s), _) => Ok(Some(s)),
            (None, _) => Err(Problem::value("size", format!("has the entry {n}")).into()),
        },
    };
    one(x.dtype, x.dims.iter().zip(&sizes).enumerate().map(extent).collect::<Result<_, _>>()?)
}

fn to_end(d: &Option<Dim>, begin: Option<i64>) -> Result<Option<Dim>, Stop> {
    match (begin, dims::number(d)) {
        (None, _) => Ok(None),
        (Some(0), _) => Ok(d.clone()),
        (Some(b), Some(_)) if b > 0 => dims::grow(d, -b),
        (Some(b), Some(n)) if b.unsigned_abs() <= n => Ok(dims::known(b.unsigned_abs())),
        (Some(b), Some(n)) => Err(Problem::value("begin", format!("{b} is outside an axis of {n}")).into()),
        (Some(_), None) => Ok(None),
    }
}
