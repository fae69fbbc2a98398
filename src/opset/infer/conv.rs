//! Convolutions and pools over one to three spatial axes.

use crate::ir::Dim;

use super::context::{Tensor, one};
use super::{Context, Dims, Inferred, Problem, Stop, dims};

/// How windows slide over the spatial axes of `x`.
struct Window {
    strides: Vec<i64>,
    dilations: Vec<i64>,
    /// (before, after) of each spatial axis.
    pads: Vec<(i64, i64)>,
    pad_type: String,
    ceil: bool,
}

impl Window {
    fn read(c: &Context<'_>, x: &Tensor) -> Result<Window, Stop> {
        x.rank_in("x", 3, 5)?;
        let spatial = x.rank() - 2;
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
        let (strides, dilations) = (positive(c, "strides", spatial)?, positive(c, "dilations", spatial)?);
        Ok(Window { strides, dilations, pads, pad_type, ceil: c.takes("ceil_mode") && c.bool("ceil_mode")? })
    }

    /// The number of windows of `kernel` elements along spatial axis `i` of extent `d`.
    fn count(&self, i: usize, d: &Option<Dim>, kernel: Option<i64>) -> Result<Option<Dim>, Stop> {
        match (self.pad_type.as_str(), kernel) {
            ("same" | "same_lower", _) => Ok(ceil_div(d, self.strides[i])),
            (_, Some(kernel)) => self.fitting(i, d, kernel),
            (_, None) => Ok(None),
        }
    }

    fn fitting(&self, i: usize, d: &Option<Dim>, kernel: i64) -> Result<Option<Dim>, Stop> {
        let (stride, (before, after)) = (self.strides[i], self.pads.get(i).copied().unwrap_or_default());
        let slack = before.checked_add(after).and_then(|p| p.checked_sub(kernel)).ok_or(Problem::Overflow)?;
        let Some(n) = dims::number(d) else {
            return Ok(if stride == 1 && slack == -1 { d.clone() } else { None });
        };
        let (n, stride, before) = (i128::from(n), i128::from(stride), i128::from(before));
        let room = n + i128::from(slack);
        if room < 0 {
            return Err(Problem::sizes(format!("a window of {kernel} does not fit an axis of {n}")).into());
        }
        let count = (if self.ceil { room + stride - 1 } else { room }) / stride + 1;
        let beyond = self.ceil && before > 0 && (count - 1) * stride >= n + before;
        Ok(dims::known(u64::try_from(count - i128::from(beyond)).map_err(|_| Problem::Overflow)?))
    }
}

/// One positive number per spatial axis; ones when the parameter is absent.
fn positive(c: &Context<'_>, name: &'static str, spatial: usize) -> Result<Vec<i64>, Stop> {
    if !c.has(name) {
        return Ok(vec![1; spatial]);
    }
    c.expect_length(name, spatial)?;
    let values = c.ints(name).ok_or(Stop::Unknown)?;
    match values.iter().all(|n| *n > 0) && values.len() == spatial {
        true => Ok(values),
        false => Err(Problem::value(name, "needs one positive entry per spatial axis").into()),
    }
}

/// The weight, of the rank of `x`, and the number of groups.
fn weight(c: &Context<'_>, x: &Tensor) -> Result<(Tensor, i64), Stop> {
    let weight = c.tensor("weight")?;
    weight.rank_in("weight", x.rank(), x.rank())?;
    match c.int("groups")? {
        groups if groups > 0 => Ok((weight, groups)),
        groups => Err(Problem::value("groups", format!("is {groups}")).into()),
    }
}

/// The axis `x` and `weight` share, in channels.
fn channels(x: &Option<Dim>, per_group: &Option<Dim>, groups: i64) -> Result<(), Stop> {
    let Some(groups) = u64::try_from(groups).ok().map(Dim::known) else { return Ok(()) };
    let need = dims::product([per_group, &Some(groups)])?;
    if dims::may_equal(x, &need) {
        return Ok(());
    }
    let (have, need) = (dims::show(std::slice::from_ref(x)), dims::show(&[need]));
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
    let windows = Window::read(c, &x)?;
    let (weight, groups) = weight(c, &x)?;
    channels(&x.dims[1], &weight.dims[1], groups)?;
    let mut out = Dims::from_iter([x.dims[0].clone(), weight.dims[0].clone()]);
    for i in 0..x.rank() - 2 {
        out.push(windows.count(i, &x.dims[i + 2], kernel(&weight.dims[i + 2], windows.dilations[i])?)?);
    }
    one(x.dtype, out)
}

/// One number for each window. `ceil_mode` takes at most two spatial axes and the same padding on both sides.
pub(in crate::opset) fn pool(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let windows = Window::read(c, &x)?;
    let spatial = x.rank() - 2;
    let uneven = windows.pads.iter().any(|(before, after)| before != after);
    if windows.ceil && (spatial > 2 || windows.pad_type.starts_with("same") || uneven) {
        let reason = "needs at most two spatial axes and even, explicit padding";
        return Err(Problem::value("ceil_mode", reason).into());
    }
    let sizes = positive(c, "kernel_sizes", spatial)?;
    let mut out = Dims::from_iter(x.dims[..2].iter().cloned());
    for (i, &size) in sizes.iter().enumerate() {
        out.push(windows.count(i, &x.dims[i + 2], Some(size))?);
    }
    one(x.dtype, out)
}

/// [`pool`] over at most two spatial axes.
pub(in crate::opset) fn l2_pool(c: &Context<'_>) -> Inferred {
    c.tensor("x")?.rank_in("x", 3, 4)?;
    pool(c)
}

fn ceil_div(d: &Option<Dim>, stride: i64) -> Option<Dim> {
    match (dims::number(d), u64::try_from(stride)) {
        (Some(n), Ok(s)) if s > 0 => dims::known(n.div_ceil(s)),
        (None, Ok(1)) => d.clone(),
        _ => None,
    }
}

/// The gradient of a convolution.
pub(in crate::opset) fn conv_transpose(c: &Context<'_>) -> Inferred {
    let x = c.tensor("x")?;
    let w = Window::read(c, &x)?;
    let (weight, groups) = weight(c, &x)?;
    channels(&x.dims[1], &weight.dims[0], 1)?;
    if c.has("output_shape") {
        c.expect_length("output_shape", x.rank())?;
        let sizes = c.ints("output_shape").ok_or(Stop::Unknown)?;
        let known = |&n: &i64| u64::try_from(n).ok().map(dims::known);
        let out = sizes.iter().map(known).collect::<Option<Dims>>();
        return one(x.dtype, out.ok_or_else(|| Problem::value("output_shape", "has a negative entry"))?);
    }
    let groups = u64::try_from(groups).map_err(|_| Problem::Overflow)?;
    let mut out = Dims::from_iter([x.dims[0].clone(), dims::product([&weight.dims[1], &dims::known(groups)])?]);
    for i in 0..x.rank() - 2 {
        let kernel = kernel(&weight.dims[i + 2], w.dilations[i])?;
        let (before, after) = w.pads.get(i).copied().unwrap_or_default();
        out.push(match (dims::number(&x.dims[i + 2]), kernel, w.pad_type.as_str()) {
            (Some(n), _, "same" | "same_lower") => upsampled(n, w.strides[i], w.strides[i], (0, 0))?,
            (Some(n), Some(k), _) => upsampled(n, w.strides[i], k, (before, after))?,
            _ => None,
        });
    }
    one(x.dtype, out)
}

/// `stride · (n - 1) + kernel`, less the padding.
fn upsampled(n: u64, stride: i64, kernel: i64, (before, after): (i64, i64)) -> Result<Option<Dim>, Stop> {
    let full = (i128::from(n) - 1) * i128::from(stride) + i128::from(kernel);
    let size = full - i128::from(before) - i128::from(after);
    Ok(dims::known(u64::try_from(size).map_err(|_| Problem::sizes(format!("an axis would have {size} elements")))?))
}
