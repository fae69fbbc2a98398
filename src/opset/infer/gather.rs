//! Reads and writes at computed indices.

use super::context::{Tensor, one};
use super::{Context, Dims, Inferred, Problem, Stop, dims};

/// The number of leading axes that `x` and `indices` share.
fn batch_dims(c: &Context<'_>, x: &Tensor, indices: &Tensor) -> Result<usize, Stop> {
    let b = if c.takes("batch_dims") { c.int("batch_dims")? } else { 0 };
    let within = |n: &usize| *n < x.rank() && *n <= indices.rank();
    let b = usize::try_from(b).ok().filter(within).ok_or_else(|| {
        let (x, i) = (x.rank(), indices.rank());
        Problem::value("batch_dims", format!("{b} does not fit ranks {x} and {i}"))
    })?;
    agree(&x.dims[..b], &indices.dims[..b], "indices")?;
    Ok(b)
}

fn agree(a: &[Option<crate::ir::Dim>], b: &[Option<crate::ir::Dim>], param: &'static str) -> Result<(), Stop> {
    if a.len() == b.len() && a.iter().zip(b).all(|(a, b)| dims::may_equal(a, b)) {
        return Ok(());
    }
    Err(Problem::value(param, format!("shapes {} and {} do not go together", dims::show(a), dims::show(b))).into())
}

/// One axis replaced by the axes of `indices`.
pub(in crate::opset) fn gather(c: &Context<'_>) -> Inferred {
    let (x, indices) = (c.tensor("x")?, c.tensor("indices")?);
    let axis = c.axis("axis", x.rank())?;
    let b = batch_dims(c, &x, &indices)?;
    let rest = x.dims.iter().skip(axis + 1);
    one(x.dtype, x.dims.iter().take(axis).chain(indices.dims.iter().skip(b)).chain(rest).cloned().collect())
}

/// `indices` in another shape on one axis only.
fn along(x: &Tensor, indices: &Tensor, axis: usize) -> Result<(), Stop> {
    let others = |t: &Tensor| -> Dims {
        t.dims.iter().enumerate().filter(|(i, _)| *i != axis).map(|(_, d)| d.clone()).collect()
    };
    if x.rank() != indices.rank() {
        return Err(Problem::rank("indices", indices.rank(), format!("{} is needed", x.rank())).into());
    }
    agree(&others(x), &others(indices), "indices")
}

/// The shape of `indices`.
pub(in crate::opset) fn gather_along_axis(c: &Context<'_>) -> Inferred {
    let (x, indices) = (c.tensor("x")?, c.tensor("indices")?);
    along(&x, &indices, c.axis("axis", x.rank())?)?;
    one(x.dtype, indices.dims)
}

/// The last axis of `indices` holds coordinates: how many.
fn coordinates(indices: &Tensor) -> Result<usize, Stop> {
    let last = indices.dims.last().ok_or_else(|| Problem::rank("indices", 0, "at least 1 is needed"))?;
    dims::number(last).and_then(|n| usize::try_from(n).ok()).ok_or(Stop::Unknown)
}

/// Slices at coordinates.
pub(in crate::opset) fn gather_nd(c: &Context<'_>) -> Inferred {
    let (x, indices) = (c.tensor("x")?, c.tensor("indices")?);
    let b = batch_dims(c, &x, &indices)?;
    let first = b.saturating_add(coordinates(&indices)?);
    if first > x.rank() {
        return Err(Problem::value("indices", format!("has more coordinates than `x` has axes, {}", x.rank())).into());
    }
    let outer = indices.dims.iter().take(indices.rank() - 1);
    one(x.dtype, outer.chain(x.dims.iter().skip(first)).cloned().collect())
}

fn mode(c: &Context<'_>) -> Result<(), Stop> {
    match c.str("mode")? {
        "update" | "add" | "sub" | "mul" | "div" | "max" | "min" => Ok(()),
        mode => Err(Problem::value("mode", format!("`{mode}` is no mode")).into()),
    }
}

/// The type of `data`; `updates` replaces its axis by the axes of `indices`.
pub(in crate::opset) fn scatter(c: &Context<'_>) -> Inferred {
    let (data, indices, updates) = (c.tensor("data")?, c.tensor("indices")?, c.tensor("updates")?);
    mode(c)?;
    let axis = c.axis("axis", data.rank())?;
    let rest = data.dims.iter().skip(axis + 1);
    let want: Dims = data.dims.iter().take(axis).chain(&indices.dims).chain(rest).cloned().collect();
    agree(&updates.dims, &want, "updates")?;
    data.result()
}

/// The type of `data`; `indices` and `updates` have one shape.
pub(in crate::opset) fn scatter_along_axis(c: &Context<'_>) -> Inferred {
    let (data, indices, updates) = (c.tensor("data")?, c.tensor("indices")?, c.tensor("updates")?);
    mode(c)?;
    along(&data, &indices, c.axis("axis", data.rank())?)?;
    agree(&updates.dims, &indices.dims, "updates")?;
    data.result()
}

/// The type of `data`.
pub(in crate::opset) fn scatter_nd(c: &Context<'_>) -> Inferred {
    let (data, indices, updates) = (c.tensor("data")?, c.tensor("indices")?, c.tensor("updates")?);
    mode(c)?;
    let n = coordinates(&indices)?;
    if n > data.rank() {
        return Err(Problem::value("indices", format!("has more coordinates than `data` has axes, {}", data.rank())).into());
    }
    let outer = indices.dims.iter().take(indices.rank() - 1);
    let want: Dims = outer.chain(data.dims.iter().skip(n)).cloned().collect();
    agree(&updates.dims, &want, "updates")?;
    data.result()
}
