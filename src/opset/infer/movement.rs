//! Ops that copy, repeat, join or make elements.

use smallvec::smallvec;

use crate::ir::{DType, Dim};

use super::context::{Tensor, normalise, one, size};
use super::{Context, Dims, Guess, Inferred, Problem, Stop, dims};

/// Bounds what a file can make `split` allocate.
const MOST_PARTS: usize = 1 << 16;

/// The type of `x`, whatever it is.
pub(in crate::opset) fn identity(c: &Context<'_>) -> Inferred {
    Ok(vec![Guess::Exact(c.types("x").pop().ok_or(Stop::Unknown)?)])
}

/// `x` with the named element type.
pub(in crate::opset) fn cast(c: &Context<'_>) -> Inferred {
    use DType::{Bool, F16, F32, I8, I16, I32, U8, U16};
    let dtype = c.dtype("dtype")?;
    let since_7 = matches!(dtype, I8 | I16 | U8 | U16) && c.version.since() >= 7;
    if !(matches!(dtype, Bool | F16 | F32 | I32) || since_7) {
        return Err(Problem::value("dtype", format!("no cast to {dtype} in this opset")).into());
    }
    one(dtype, c.tensor("x")?.dims)
}

/// Axes permuted.
pub(in crate::opset) fn transpose(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let perm = c.axes("perm", x.rank())?.ok_or(Stop::Unknown)?;
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..x.rank()) {
        let reason = format!("{perm:?} is no permutation of {} axes", x.rank());
        return Err(Problem::value("perm", reason).into());
    }
    one(x.dtype, perm.into_iter().map(|p| x.dims[p].clone()).collect())
}

/// Each axis repeated as often as `reps` says.
pub(in crate::opset) fn tile(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    c.expect_length("reps", x.rank())?;
    let Some(reps) = c.ints("reps") else {
        return one(x.dtype, dims::unknown(x.rank()));
    };
    let times = |(d, &n): (&Option<Dim>, &i64)| match size(n) {
        Some(n) if n != Dim::known(0) => dims::product([d, &Some(n)]),
        _ => Err(Problem::value("reps", format!("{n} is not positive")).into()),
    };
    one(x.dtype, x.dims.iter().zip(&reps).map(times).collect::<Result<_, _>>()?)
}

/// The common rank and element type of a tuple of tensors.
fn alike(values: &[Tensor]) -> Result<&Tensor, Stop> {
    let first = values.first().ok_or(Problem::MissingParam("values"))?;
    for v in values {
        if v.dtype != first.dtype {
            let reason = format!("element types {} and {} differ", first.dtype, v.dtype);
            return Err(Problem::value("values", reason).into());
        }
        if v.rank() != first.rank() {
            let reason = format!("ranks {} and {} differ", first.rank(), v.rank());
            return Err(Problem::value("values", reason).into());
        }
    }
    Ok(first)
}

/// `a` and `b` must be equal on every axis but `except`; what both say together.
fn merged(a: &Dims, b: &Dims, except: Option<usize>) -> Result<Dims, Stop> {
    let same = |(i, (x, y))| match Some(i) == except {
        true => Some(None),
        false => dims::same(x, y),
    };
    a.iter().zip(b).enumerate().map(same).collect::<Option<_>>().ok_or_else(|| {
        let reason = format!("shapes {} and {} do not go together", dims::show(a), dims::show(b));
        Problem::value("values", reason).into()
    })
}

/// Tensors joined along an existing axis.
pub(in crate::opset) fn concat(c: &Context<'_>) -> Inferred {
    let values = c.tensors("values")?;
    let first = alike(&values)?;
    let (dtype, rank) = (first.dtype, first.rank());
    if rank == 0 {
        return one(dtype, smallvec![dims::known(values.len() as u64)]);
    }
    let axis = c.axis("axis", rank)?;
    let except = (!c.bool("interleave")?).then_some(axis);
    let mut out = first.dims.clone();
    let mut extent = dims::known(0);
    for v in &values {
        extent = dims::add(&extent, &v.dims[axis])?;
        out = merged(&out, &v.dims, except)?;
    }
    out[axis] = extent;
    one(dtype, out)
}

/// Tensors joined along a new axis.
pub(in crate::opset) fn stack(c: &Context<'_>) -> Inferred {
    let values = c.tensors("values")?;
    let first = alike(&values)?;
    let axis = c.axis("axis", first.rank() + 1)?;
    let mut out = values.iter().try_fold(first.dims.clone(), |out, v| merged(&out, &v.dims, None))?;
    out.insert(axis, dims::known(values.len() as u64));
    one(first.dtype, out)
}

/// Parts of one axis.
pub(in crate::opset) fn split(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let axis = c.axis("axis", x.rank())?;
    let part = |d: Option<Dim>| {
        let mut out = x.dims.clone();
        out[axis] = d;
        Guess::Tensor(x.dtype, out)
    };
    match (c.has("split_sizes"), c.has("num_splits")) {
        (false, false) => Err(Problem::MissingParam("num_splits").into()),
        (false, true) => {
            let (d, n) = equal_parts(&x.dims[axis], c.int("num_splits")?)?;
            if n > MOST_PARTS {
                return Err(Problem::value("num_splits", format!("{n} is more than {MOST_PARTS}")).into());
            }
            Ok((0..n).map(|_| part(d.clone())).collect())
        }
        (true, counted) => {
            let sizes = c.ints("split_sizes").ok_or(Stop::Unknown)?;
            if counted && usize::try_from(c.int("num_splits")?) != Ok(sizes.len()) {
                return Err(Problem::value("split_sizes", "disagrees with num_splits").into());
            }
            let parts = sizes.iter().map(|&n| size(n).map(Some)).collect::<Option<Vec<_>>>();
            let parts = parts.ok_or_else(|| Problem::value("split_sizes", "has a negative entry"))?;
            let sum = parts.iter().try_fold(dims::known(0), |sum, d| dims::add(&sum, d))?;
            if !dims::may_equal(&sum, &x.dims[axis]) {
                return Err(Problem::value("split_sizes", "do not add up to the size of the axis").into());
            }
            Ok(parts.into_iter().map(part).collect())
        }
    }
}

fn equal_parts(d: &Option<Dim>, n: i64) -> Result<(Option<Dim>, usize), Stop> {
    let wrong = |reason: String| Stop::from(Problem::value("num_splits", reason));
    let count = usize::try_from(n).ok().filter(|n| *n > 0).ok_or_else(|| wrong(format!("{n} is not positive")))?;
    let part = d.as_ref().and_then(|d| d.checked_div(&Dim::known(count as u64)));
    match (&part, dims::number(d)) {
        (None, Some(size)) => Err(wrong(format!("{n} does not divide {size}"))),
        _ => Ok((part, count)),
    }
}

/// The last axes grow by pairs of (before, after).
pub(in crate::opset) fn pad(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let mut out = x.dims.clone();
    let rank = x.rank();
    let first = |n: usize| match rank.checked_sub(n / 2) {
        Some(first) if n % 2 == 0 => Ok(first),
        _ => Err(Stop::from(Problem::value("pad", format!("{n} entries do not pair with {rank} axes")))),
    };
    match c.ints("pad") {
        None => {
            let n = c.length("pad")?;
            if n != 2 * rank {
                return Err(Problem::value("pad", format!("has {n} run-time entries, {} are needed", 2 * rank)).into());
            }
            out = dims::unknown(rank);
        }
        Some(pads) => {
            let first = first(pads.len())?;
            for (d, pair) in out.iter_mut().skip(first).zip(pads.chunks_exact(2)) {
                *d = dims::grow(d, pair[0].checked_add(pair[1]).ok_or(Problem::Overflow)?)?;
            }
        }
    }
    match c.str("mode")? {
        "constant" | "reflect" | "replicate" => one(x.dtype, out),
        mode => Err(Problem::value("mode", format!("`{mode}` is no mode")).into()),
    }
}

/// The type of `x`; two of its axes are named.
pub(in crate::opset) fn reverse_sequence(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    c.axis("seq_axis", x.rank())?;
    let batch = c.axis("batch_axis", x.rank())?;
    let lengths = c.tensor("lengths")?;
    lengths.rank_in("lengths", 1, 1)?;
    if !dims::may_equal(&lengths.dims[0], &x.dims[batch]) {
        return Err(Problem::value("lengths", "does not have one entry per batch").into());
    }
    x.result()
}

/// Windows along one axis: their number, then a new axis of their size.
pub(in crate::opset) fn sliding_windows(c: &Context<'_>) -> Inferred {
    let mut x = c.tensor("x")?;
    let axis = c.axis("axis", x.rank())?;
    let (length, stride) = (c.int("size")?, c.int("stride")?);
    let length = u64::try_from(length).ok().filter(|n| *n > 0);
    let length = length.ok_or_else(|| Problem::value("size", "is not positive"))?;
    let stride = u64::try_from(stride).ok().filter(|n| *n > 0);
    let stride = stride.ok_or_else(|| Problem::value("stride", "is not positive"))?;
    x.dims[axis] = match dims::number(&x.dims[axis]) {
        Some(n) if n < length => return Err(Problem::value("size", format!("exceeds the axis, {n}")).into()),
        Some(n) => dims::known((n - length) / stride + 1),
        None => None,
    };
    x.dims.insert(axis + 1, dims::known(length));
    x.result()
}

/// Sizes from a vector of integers, run-time or constant.
fn sizes(c: &Context<'_>, name: &'static str) -> Result<Dims, Stop> {
    let Some(values) = c.ints(name) else {
        return Ok(dims::unknown(c.length(name)?));
    };
    let one = |&n: &i64| size(n).map(Some).ok_or_else(|| Problem::value(name, format!("has the entry {n}")).into());
    values.iter().map(one).collect()
}

/// The element type of an optional parameter, or that of its default.
fn dtype_or(c: &Context<'_>, name: &str, default: DType) -> Result<DType, Stop> {
    Ok(c.optional(name)?.map_or(default, |t| t.dtype))
}

/// One value everywhere.
pub(in crate::opset) fn fill(c: &Context<'_>) -> Inferred {
    one(dtype_or(c, "value", DType::F32)?, sizes(c, "shape")?)
}

/// One value in the shape of another tensor.
pub(in crate::opset) fn fill_like(c: &Context<'_>) -> Inferred {
    one(dtype_or(c, "value", DType::F32)?, c.tensor("ref_tensor")?.dims)
}

/// Random values; the element type is that of the distribution's parameters.
pub(in crate::opset) fn random(c: &Context<'_>) -> Inferred {
    let mut dtype = DType::F32;
    for name in ["prob", "mean", "stddev", "low", "high"] {
        dtype = dtype_or(c, name, dtype)?;
    }
    one(dtype, sizes(c, "shape")?)
}

/// The sizes of `x` as int32.
pub(in crate::opset) fn shape(c: &Context<'_>) -> Inferred {
    one(DType::I32, smallvec![dims::known(c.tensor("x")?.rank() as u64)])
}

/// `start`, `start + step`, … below `end`.
pub(in crate::opset) fn range_1d(c: &Context<'_>) -> Inferred {
    let (x, rank) = (c.tensor("start")?, 0);
    for name in ["start", "end", "step"] {
        c.tensor(name)?.rank_in(name, rank, rank)?;
    }
    let count = match (scalar(c, "start"), scalar(c, "end"), scalar(c, "step")) {
        (_, _, Some(0.0)) => return Err(Problem::value("step", "is zero").into()),
        (Some(start), Some(end), Some(step)) => {
            let count = ((end - start) / step).ceil().max(0.0);
            if !(count < 2f64.powi(53)) {
                return Err(Problem::Overflow.into());
            }
            dims::known(count as u64)
        }
        _ => None,
    };
    one(x.dtype, smallvec![count])
}

/// A constant scalar, integer or float.
fn scalar(c: &Context<'_>, name: &str) -> Option<f64> {
    let literal = c.f.const_param(c.op, name).filter(|l| !l.is_blob())?;
    match literal.to_floats(&**c.f.weights()) {
        Ok(v) => v.first().copied(),
        Err(_) => c.ints(name)?.first().map(|&n| n as f64),
    }
}

/// A new axis that holds one value at the index and another elsewhere.
pub(in crate::opset) fn one_hot(c: &Context<'_>) -> Inferred {
    let mut out = c.tensor("indices")?.dims;
    let axis = normalise("axis", c.int("axis")?, out.len() + 1)?;
    let extent = match c.ints("one_hot_vector_size").as_deref() {
        Some(&[n]) => Some(size(n).ok_or_else(|| Problem::value("one_hot_vector_size", "is negative"))?),
        _ => None,
    };
    out.insert(axis, extent);
    let dtype = dtype_or(c, "off_value", dtype_or(c, "on_value", DType::I32)?)?;
    one(dtype, out)
}

/// Coordinates of what is not zero.
pub(in crate::opset) fn non_zero(c: &Context<'_>) -> Inferred {
    one(DType::I32, smallvec![None, dims::known(c.tensor("x")?.rank() as u64)])
}
