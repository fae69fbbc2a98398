//! Ops that regroup axes and keep the row-major order of elements.

use crate::ir::Dim;

use super::context::{Tensor, normalise, one, size};
use super::{Context, Dims, Inferred, Problem, Stop, dims};

/// `x` with the sizes `shape`: 0 copies a size of `x` (aligned at the left before CoreML7, at the right since), one -1
/// takes what remains.
pub(in crate::opset) fn reshape(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let Some(target) = c.ints("shape") else {
        return one(x.dtype, dims::unknown(c.length("shape")?));
    };
    let out = solve(&x, &target, c.version.since() >= 7)?;
    one(x.dtype, out)
}

fn solve(x: &Tensor, target: &[i64], right_aligned: bool) -> Result<Dims, Stop> {
    if !right_aligned && target.contains(&0) && target.len() != x.rank() {
        let reason = format!("a 0 needs as many entries as `x` has axes ({}), there are {}", x.rank(), target.len());
        return Err(Problem::value("shape", reason).into());
    }
    let copied = |i: usize| match right_aligned {
        false => x.dims.get(i).cloned().flatten(),
        true => match (i + x.rank()).checked_sub(target.len()) {
            Some(i) => x.dims.get(i).cloned().flatten(),
            None => dims::known(1),
        },
    };
    let mut open = None;
    let mut out = Dims::new();
    for (i, &n) in target.iter().enumerate() {
        match n {
            0 => out.push(copied(i)),
            -1 if open.is_none() => {
                open = Some(i);
                out.push(dims::known(1));
            }
            _ => out.push(Some(size(n).ok_or_else(|| bad_entry(n))?)),
        }
    }
    let (total, rest) = (dims::product(&x.dims)?, dims::product(&out)?);
    match open {
        Some(i) => out[i] = remaining(&total, &rest)?,
        None if !dims::may_equal(&total, &rest) => return Err(volume(&total, &rest)),
        None => {}
    }
    Ok(out)
}

fn bad_entry(n: i64) -> Stop {
    let reason = if n == -1 { "has more than one -1".into() } else { format!("has the entry {n}") };
    Problem::value("shape", reason).into()
}

/// The size that makes `rest` times it `total`.
fn remaining(total: &Option<Dim>, rest: &Option<Dim>) -> Result<Option<Dim>, Stop> {
    let (Some(t), Some(r)) = (total, rest) else { return Ok(None) };
    if *r == Dim::known(0) {
        return Ok(None);
    }
    match t.checked_div(r) {
        None if t.as_known().is_some() && r.as_known().is_some() => Err(volume(total, rest)),
        quotient => Ok(quotient),
    }
}

fn volume(total: &Option<Dim>, rest: &Option<Dim>) -> Stop {
    let show = |d: &Option<Dim>| d.as_ref().map_or("?".into(), Dim::to_string);
    Problem::value("shape", format!("{} elements do not fill a shape of {}", show(total), show(rest))).into()
}

/// `x` with sizes copied from ranges of axes of other tensors.
pub(in crate::opset) fn reshape_like(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let refs = c.tensors("ref_tensors")?;
    let data = c.f.op(c.op);
    let scalars = |name: &str| -> Result<Vec<i64>, Stop> {
        let one = |o| c.f.operand_ints(o).and_then(|n| n.first().copied()).ok_or(Stop::Unknown);
        data.param(name).iter().map(one).collect()
    };
    let (begins, ends, masks) = (scalars("begins")?, scalars("ends")?, scalars("end_masks")?);
    for (param, n) in [("begins", begins.len()), ("ends", ends.len()), ("end_masks", masks.len())] {
        if n != refs.len() {
            let reason = format!("has {n} entries, there are {} tensors to copy from", refs.len());
            return Err(Problem::value(param, reason).into());
        }
    }
    let mut out = Dims::new();
    for (((r, &begin), &end), &mask) in refs.iter().zip(&begins).zip(&ends).zip(&masks) {
        let bound = |param, at: i64| match usize::try_from(if at < 0 { at + r.rank() as i64 } else { at }) {
            Ok(n) if n <= r.rank() => Ok(n),
            _ => Err(Stop::from(Problem::Axis { param, axis: at, rank: r.rank() })),
        };
        let begin = bound("begins", begin)?;
        let end = if mask != 0 { r.rank() } else { bound("ends", end)? };
        out.extend(r.dims.iter().take(end).skip(begin).cloned());
    }
    let (total, rest) = (dims::product(&x.dims)?, dims::product(&out)?);
    if !dims::may_equal(&total, &rest) {
        return Err(volume(&total, &rest));
    }
    one(x.dtype, out)
}

/// Axes of size one inserted; `axes` count in the result.
pub(in crate::opset) fn expand_dims(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axes = c.ints("axes").ok_or(Stop::Unknown)?;
    let rank = x.rank().saturating_add(axes.len());
    let mut axes = axes.into_iter().map(|a| normalise("axes", a, rank)).collect::<Result<Vec<_>, _>>()?;
    axes.sort_unstable();
    if axes.windows(2).any(|w| w[0] == w[1]) {
        return Err(Problem::value("axes", "names an axis twice").into());
    }
    let mut out = x.dims;
    for axis in axes {
        out.insert(axis, dims::known(1));
    }
    one(x.dtype, out)
}

/// Axes of size one removed: the listed ones, or all. A listed axis of another size stays.
pub(in crate::opset) fn squeeze(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axes = c.axes("axes", x.rank())?;
    let goes = |i: usize| axes.as_ref().is_none_or(|axes| axes.contains(&i));
    let stays = |(i, d): (usize, &Option<Dim>)| (dims::number(d) != Some(1) || !goes(i)).then(|| d.clone());
    one(x.dtype, x.dims.iter().enumerate().filter_map(stays).collect())
}

/// Two axes: the product of those before `axis` and of the rest.
pub(in crate::opset) fn flatten2d(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axis = match c.int("axis")? {
        n if usize::try_from(n) == Ok(x.rank()) => x.rank(),
        n => normalise("axis", n, x.rank())?,
    };
    let (rows, columns) = x.dims.split_at(axis);
    one(x.dtype, Dims::from_iter([dims::product(rows)?, dims::product(columns)?]))
}
