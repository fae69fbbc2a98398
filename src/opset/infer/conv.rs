//! Convolutions over one to three spatial axes.

use crate::ir::Dim;

use super::context::{Tensor, one};
use super::{Context, Dims, Inferred, Problem, Stop, dims};

/// What both convolutions read besides `x`.
struct Window {
    weight: Tensor,
    strides: Vec<i64>,
    dilations: Vec<i64>,
    /// (before, after) of each spatial axis.
    pads: Vec<(i64, i64)>,
    pad_type: String,
    groups: i64,
}

fn window(c: &Context<'_>, x: &Tensor) -> Result<Window, Stop> {
    x.rank_in("x", 3, 5)?;
    let spatial = x.rank() - 2;
    let weight = c.tensor("weight")?;
    weight.rank_in("weight", x.rank(), x.rank())?;
    let positive = |name: &'static str| -> Result<Vec<i64>, Stop> {
        match c.has(name) {
            false => Ok(vec![1; spatial]),
            true => {
                c.expect_length(name, spatial)?;
                let values = c.ints(name).ok_or(Stop::Unknown)?;
                match values.iter().all(|n| *n > 0) && values.len() == spatial {
                    true => Ok(values),
                    false => Err(Problem::value(name, "needs one positive entry per spatial axis").into()),
                }
            }
        }
    };
    let pad_type = c.str("pad_type")?.to_owned();
    if !matches!(pad_type.as_str(), "valid" | "same" | "same_lower" | "custom") {
        return Err(Problem::value("pad_type", format!("`{pad_type}` is no pad type")).into());
    }
    let pads = match (c.has("pad"), pad_type.as_str()) {
        (true, "custom") => {
            c.expect_length("pad", 2 * spatial)?;
            c.ints("pad").ok_or(Stop::Unknown)?.chunks_exact(2).map(|p| (p[0], p[1])).collect()
        }
        _ => vec![(0, 0); spatial],
    };
    let groups = c.int("groups")?;
    if groups <= 0 {
        return Err(Problem::value("groups", format!("is {groups}")).into());
    }
    Ok(Window { weight, strides: positive("strides")?, dilations: positive("dilations")?, pads, pad_type, groups })
}

/// The axis `x` and `weight` share, in channels.
fn channels(x: &Option<Dim>, per_group: &Option<Dim>, groups: i64) -> Result<(), Stop> {
    let Some(groups) = u64::try_from(groups).ok().map(Dim::known) else { return Ok(()) };
    let need = dims::product([per_group, &Some(groups)])?;
    if dims::may_equal(x, &need) {
        return Ok(());
    }
    let (have, need) = (dims::show(&[x.clone()]), dims::show(&[need]));
    Err(Problem::value("weight", format!("takes {need} channels, there are {have}")).into())
}

/// The extent of a dilated kernel.
fn kernel(k: &Option<Dim>, dilation: i64) -> Result<Option<i64>, Stop> {
    let Some(k) = dims::number(k) else { return Ok(None) };
    let k = i64::try_from(k).ok().and_then(|k| k.checked_sub(1)).and_then(|k| k.checked_mul(dilation));
    Ok(Some(k.and_then(|k| k.checked_add(1)).ok_or(Problem::Overflow)?))
}

/// Cross-correlation.
pub(in crate::opset) fn conv(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let w = window(c, &x)?;
    channels(&x.dims[1], &w.weight.dims[1], w.groups)?;
    let mut out = Dims::from_iter([x.dims[0].clone(), w.weight.dims[0].clone()]);
    for i in 0..x.rank() - 2 {
        let d = &x.dims[i + 2];
        let stride = w.strides[i];
        out.push(match w.pad_type.as_str() {
            "same" | "same_lower" => ceil_div(d, stride),
            _ => match kernel(&w.weight.dims[i + 2], w.dilations[i])? {
                Some(k) => valid(d, stride, k, w.pads.get(i).copied().unwrap_or_default())?,
                None => None,
            },
        });
    }
    one(x.dtype, out)
}

fn ceil_div(d: &Option<Dim>, stride: i64) -> Option<Dim> {
    match (dims::number(d), u64::try_from(stride)) {
        (Some(n), Ok(s)) if s > 0 => dims::known(n.div_ceil(s)),
        (None, Ok(1)) => d.clone(),
        _ => None,
    }
}

fn valid(d: &Option<Dim>, stride: i64, kernel: i64, (before, after): (i64, i64)) -> Result<Option<Dim>, Stop> {
    let slack = before.checked_add(after).and_then(|p| p.checked_sub(kernel)).ok_or(Problem::Overflow)?;
    let Some(n) = dims::number(d) else {
        return Ok(if stride == 1 && slack == -1 { d.clone() } else { None });
    };
    let room = i128::from(n) + i128::from(slack);
    if room < 0 {
        return Err(Problem::sizes(format!("a window of {kernel} does not fit an axis of {n}")).into());
    }
    let count = room / i128::from(stride) + 1;
    Ok(dims::known(u64::try_from(count).map_err(|_| Problem::Overflow)?))
}

/// The gradient of a convolution.
pub(in crate::opset) fn conv_transpose(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let w = window(c, &x)?;
    channels(&x.dims[1], &w.weight.dims[0], 1)?;
    if c.has("output_shape") {
        c.expect_length("output_shape", x.rank())?;
        let sizes = c.ints("output_shape").ok_or(Stop::Unknown)?;
        let known = |&n: &i64| u64::try_from(n).ok().map(|n| dims::known(n));
        let out = sizes.iter().map(known).collect::<Option<Dims>>();
        return one(x.dtype, out.ok_or_else(|| Problem::value("output_shape", "has a negative entry"))?);
    }
    let groups = u64::try_from(w.groups).map_err(|_| Problem::Overflow)?;
    let mut out = Dims::from_iter([x.dims[0].clone(), dims::product([&w.weight.dims[1], &dims::known(groups)])?]);
    for i in 0..x.rank() - 2 {
        let kernel = kernel(&w.weight.dims[i + 2], w.dilations[i])?;
        let (before, after) = w.pads.get(i).copied().unwrap_or_default();
        out.push(match (dims::number(&x.dims[i + 2]), kernel, w.pad_type.as_str()) {
            (Some(n), _, "same" | "same_lower") => upsampled(n, w.strides[i], 0, 0, 0)?,
            (Some(n), Some(k), _) => upsampled(n, w.strides[i], k - w.strides[i], before, after)?,
            _ => None,
        });
    }
    one(x.dtype, out)
}

fn upsampled(n: u64, stride: i64, extra: i64, before: i64, after: i64) -> Result<Option<Dim>, Stop> {
    let size = i128::from(n) * i128::from(stride) + i128::from(extra) - i128::from(before) - i128::from(after);
    Ok(dims::known(u64::try_from(size).map_err(|_| Problem::sizes(format!("an axis would have {size} elements")))?))
}
