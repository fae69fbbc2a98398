//! Ops that work along axes: reductions, normalisation, sorting.

use crate::ir::DType;

use super::context::{Tensor, normalise, one, size};
use super::{Context, Guess, Inferred, Problem, Stop, dims};

/// The type of `x`; one axis is named.
pub(in crate::opset) fn along_axis(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    c.axis("axis", x.rank())?;
    x.result()
}

/// The type of `x`; some axes are named.
pub(in crate::opset) fn along_axes(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    c.axes("axes", x.rank())?;
    x.result()
}

/// The type of `x`; of the negative axes only -1 is allowed.
pub(in crate::opset) fn cumsum(c: &Context<'_>) -> Inferred {
    let rank = c.tensor("x")?.rank();
    match c.int("axis")? {
        axis if axis < -1 => Err(Problem::Axis { param: "axis", axis, rank }.into()),
        _ => along_axis(c),
    }
}

/// `axes` reduced, all when absent, none when empty.
pub(in crate::opset) fn reduce(c: &Context<'_>) -> Inferred {
    let mut x = c.tensor("x")?;
    let axes = c.axes("axes", x.rank())?.unwrap_or_else(|| (0..x.rank()).collect());
    reduce_axes(&mut x, &axes, c.bool("keep_dims")?);
    x.result()
}

fn reduce_axes(x: &mut Tensor, axes: &[usize], keep_dims: bool) {
    for (i, d) in x.dims.iter_mut().enumerate() {
        if axes.contains(&i) {
            *d = dims::known(1);
        }
    }
    if !keep_dims {
        let kept = x.dims.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, d)| d.clone());
        x.dims = kept.collect();
    }
}

/// Indices along one axis.
pub(in crate::opset) fn arg_reduce(c: &Context<'_>) -> Inferred {
    let mut x = c.tensor("x")?;
    let axis = c.axis("axis", x.rank())?;
    reduce_axes(&mut x, &[axis], c.bool("keep_dims")?);
    one(index_dtype(c, "output_dtype")?, x.dims)
}

fn index_dtype(c: &Context<'_>, param: &'static str) -> Result<DType, Stop> {
    match c.version.param(param) {
        None => Ok(DType::I32),
        Some(_) => match c.dtype(param)? {
            d @ (DType::I32 | DType::U16) => Ok(d),
            d => Err(Problem::value(param, format!("{d} is no index type")).into()),
        },
    }
}

/// Indices in the shape of `x`.
pub(in crate::opset) fn argsort(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    c.axis("axis", x.rank())?;
    one(DType::I32, x.dims)
}

/// The `k` largest along an axis, and where they were. All of them when `k` is -1.
pub(in crate::opset) fn topk(c: &Context<'_>) -> Inferred {
    let mut x = c.tensor("x")?;
    let axis = c.axis("axis", x.rank())?;
    match c.int("k")? {
        -1 if c.version.since() >= 7 => {}
        k => x.dims[axis] = Some(size(k).ok_or_else(|| Problem::value("k", format!("is {k}")))?),
    }
    let indices = Guess::Tensor(index_dtype(c, "output_indices_dtype")?, x.dims.clone());
    let with_indices = !c.takes("return_indices") || c.bool("return_indices")?;
    let values = Guess::Tensor(x.dtype, x.dims);
    Ok(if with_indices { vec![values, indices] } else { vec![values] })
}

/// The type of `x`; `gamma` and `beta` have the shape of the normalised axes.
pub(in crate::opset) fn layer_norm(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let mut axes = c.axes("axes", x.rank())?.unwrap_or_else(|| (0..x.rank()).collect());
    axes.sort_unstable();
    for name in ["gamma", "beta"] {
        let Some(t) = c.optional(name)? else { continue };
        if t.rank() != axes.len() || !t.dims.iter().zip(&axes).all(|(d, &a)| dims::may_equal(d, &x.dims[a])) {
            let reason = format!("has shape {}, which is not that of the normalised axes", dims::show(&t.dims));
            return Err(Problem::value(name, reason).into());
        }
    }
    x.result()
}

/// The type of `x`; parameters are per channel, axis 1.
fn per_channel(c: &Context<'_>, ranks: (usize, usize), params: &[&'static str]) -> Inferred {
    let x = c.tensor("x")?;
    x.rank_in("x", ranks.0, ranks.1)?;
    for &name in params {
        let Some(t) = c.optional(name)? else { continue };
        t.rank_in(name, 1, 1)?;
        if !dims::may_equal(&t.dims[0], &x.dims[1]) {
            let reason = format!("has shape {}, not one entry per channel", dims::show(&t.dims));
            return Err(Problem::value(name, reason).into());
        }
    }
    x.result()
}

/// The type of `x`, rank 3 to 5.
pub(in crate::opset) fn batch_norm(c: &Context<'_>) -> Inferred {
    per_channel(c, (3, 5), &["mean", "variance", "gamma", "beta"])
}

/// The type of `x`, rank 3 or 4.
pub(in crate::opset) fn instance_norm(c: &Context<'_>) -> Inferred {
    per_channel(c, (3, 4), &["gamma", "beta"])
}

/// The type of `x`, rank 3 to 5, with one slope per channel.
pub(in crate::opset) fn prelu(c: &Context<'_>) -> Inferred {
    per_channel(c, (3, 5), &["alpha"])
}

/// The type of `x`, rank 3 or more.
pub(in crate::opset) fn l2_norm(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    match x.rank() {
        rank @ 0..3 => Err(Problem::rank("x", rank, "at least 3 is needed").into()),
        _ => x.result(),
    }
}

/// The type of `x`, rank 3 or more.
pub(in crate::opset) fn local_response_norm(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    normalise("x", 1, x.rank())?;
    x.result()
}
