//! Ops on the plane of the last two axes: resampling, crops, and blocks that become channels or batch entries.

use crate::ir::Dim;

use super::context::{Tensor, one, size};
use super::entries::Entry;
use super::{Context, Inferred, Problem, Stop, dims};

/// `x`, with at least one axis before the plane, and the number of that axis.
fn plane(c: &Context<'_>) -> Result<(Tensor, usize), Stop> {
    let x = c.tensor("x")?;
    match x.rank() {
        rank @ 0..3 => Err(Problem::rank("x", rank, "at least 3 is needed").into()),
        rank => Ok((x, rank - 2)),
    }
}

/// The plane times the scale factors, rounded down. coremltools multiplies in fp32.
pub(in crate::opset) fn upsample(c: &Context<'_>) -> Inferred {
    let (mut x, at) = plane(c)?;
    for (i, name) in ["scale_factor_height", "scale_factor_width"].into_iter().enumerate() {
        let d = &mut x.dims[at + i];
        *d = match (c.int(name), float(c, name)) {
            (Ok(n), _) => dims::product([&*d, &factor(name, n)?])?,
            (_, Some(x)) => scaled(d, name, x)?,
            _ => None,
        };
    }
    x.result()
}

fn float(c: &Context<'_>, name: &str) -> Option<f64> {
    match c.f.const_param(c.op, name)?.to_floats(&**c.f.weights()).ok()?[..] {
        [x] => Some(x),
        _ => None,
    }
}

fn factor(name: &'static str, n: i64) -> Result<Option<Dim>, Stop> {
    match n > 0 {
        true => Ok(size(n)),
        false => Err(Problem::value(name, format!("is {n}")).into()),
    }
}

/// ⌊d·x⌋.
fn scaled(d: &Option<Dim>, name: &'static str, x: f64) -> Result<Option<Dim>, Stop> {
    if !(x.is_finite() && x > 0.0) {
        return Err(Problem::value(name, format!("is {x}")).into());
    }
    Ok(dims::number(d).and_then(|n| dims::known(libm::floorf(x as f32 * n as f32) as u64)))
}

/// The plane of the target sizes.
pub(in crate::opset) fn resize_to(c: &Context<'_>) -> Inferred {
    let (mut x, at) = plane(c)?;
    for (i, name) in ["target_size_height", "target_size_width"].into_iter().enumerate() {
        x.dims[at + i] = factor(name, c.int(name)?)?;
    }
    x.result()
}

/// The last `resized_dims` sizes are those at the end of `shape`; 0 keeps one.
pub(in crate::opset) fn resize(c: &Context<'_>) -> Inferred {
    let mut x = c.tensor("x")?;
    let (entries, rank) = (c.entries("shape")?, x.rank());
    let count = usize::try_from(c.int("resized_dims")?).ok().filter(|&n| n <= entries.len() && entries.len() <= rank);
    let reason = || format!("does not go with {} sizes and rank {rank}", entries.len());
    let count = count.ok_or_else(|| Problem::value("resized_dims", reason()))?;
    for (d, entry) in x.dims[rank - count..].iter_mut().zip(&entries[entries.len() - count..]) {
        match entry {
            Entry::Int(0) => {}
            Entry::Int(n) => *d = Some(size(*n).ok_or_else(|| Problem::value("shape", "has a negative size"))?),
            Entry::Size(n) => *d = Some(n.clone()),
            Entry::Unknown => *d = None,
        }
    }
    x.result()
}

/// The plane without its margins.
pub(in crate::opset) fn crop(c: &Context<'_>) -> Inferred {
    let (mut x, at) = plane(c)?;
    for (i, name) in ["crop_height", "crop_width"].into_iter().enumerate() {
        x.dims[at + i] = cropped(&x.dims[at + i], name, &ints::<2>(c, name)?)?;
    }
    x.result()
}

fn cropped(d: &Option<Dim>, name: &'static str, margins: &[i64]) -> Result<Option<Dim>, Stop> {
    let less = margins.iter().try_fold(0i64, |sum, &m| if m < 0 { None } else { sum.checked_sub(m) });
    dims::grow(d, less.ok_or_else(|| Problem::value(name, "has a negative margin"))?)
}

/// N integers.
fn ints<const N: usize>(c: &Context<'_>, name: &'static str) -> Result<[i64; N], Stop> {
    let given = c.ints(name).ok_or(Stop::Unknown)?;
    let count = given.len();
    given.try_into().map_err(|_| Problem::value(name, format!("has {count} elements, {N} are needed")).into())
}

/// `x` of rank 4 and the factor of a block, which is at least 1.
fn blocks(c: &Context<'_>) -> Result<(Tensor, &'static str, u64), Stop> {
    let x = c.tensor("x")?;
    x.rank_in("x", 4, 4)?;
    let names = ["upscale_factor", "downscale_factor", "block_size"];
    let name = names.into_iter().find(|n| c.takes(n)).ok_or(Stop::Unknown)?;
    let n = c.int(name)?;
    match u64::try_from(n) {
        Ok(f @ 1..0x1_0000) => Ok((x, name, f)),
        _ => Err(Problem::value(name, format!("is {n}")).into()),
    }
}

/// An axis divided; unknown when it is.
fn divided(d: &Option<Dim>, name: &'static str, by: u64) -> Result<Option<Dim>, Stop> {
    match (d, dims::number(d)) {
        (_, Some(n)) if n % by != 0 => {
            Err(Problem::value(name, format!("an axis of {n} is no multiple of {by}")).into())
        }
        (Some(d), _) => Ok(d.checked_div(&Dim::known(by))),
        (None, _) => Ok(None),
    }
}

/// f² channels become a block of f × f.
pub(in crate::opset) fn to_space(c: &Context<'_>) -> Inferred {
    let (mut x, name, f) = blocks(c)?;
    x.dims[1] = divided(&x.dims[1], name, f * f)?;
    for d in &mut x.dims[2..] {
        *d = dims::product([&*d, &dims::known(f)])?;
    }
    x.result()
}

/// The inverse of [`to_space`].
pub(in crate::opset) fn to_depth(c: &Context<'_>) -> Inferred {
    let (mut x, name, f) = blocks(c)?;
    x.dims[1] = dims::product([&x.dims[1], &dims::known(f * f)])?;
    for d in &mut x.dims[2..] {
        *d = divided(d, name, f)?;
    }
    x.result()
}

/// `x` of rank 4, the block, and pairs of one parameter.
fn batches(c: &Context<'_>, pairs: &'static str) -> Result<(Tensor, [u64; 2], [i64; 4]), Stop> {
    let x = c.tensor("x")?;
    x.rank_in("x", 4, 4)?;
    let block = ints::<2>(c, "block_shape")?;
    let sizes = block.map(|n| u64::try_from(n).ok().filter(|&n| n > 0 && n < 1 << 16));
    match sizes {
        [Some(a), Some(b)] => Ok((x, [a, b], ints(c, pairs)?)),
        _ => Err(Problem::value("block_shape", format!("is {block:?}")).into()),
    }
}

/// Positions in the blocks of the padded plane become batch entries.
pub(in crate::opset) fn space_to_batch(c: &Context<'_>) -> Inferred {
    let (mut x, block, pads) = batches(c, "paddings")?;
    x.dims[0] = dims::product([&x.dims[0], &dims::known(block[0] * block[1])])?;
    for (i, d) in x.dims[2..].iter_mut().enumerate() {
        let more = pads[2 * i].checked_add(pads[2 * i + 1]).filter(|_| pads[2 * i] >= 0 && pads[2 * i + 1] >= 0);
        let more = more.ok_or_else(|| Problem::value("paddings", "has an impossible amount"))?;
        *d = divided(&dims::grow(d, more)?, "block_shape", block[i])?;
    }
    one(x.dtype, x.dims)
}

/// The inverse of [`space_to_batch`], cropped.
pub(in crate::opset) fn batch_to_space(c: &Context<'_>) -> Inferred {
    let (mut x, block, crops) = batches(c, "crops")?;
    x.dims[0] = divided(&x.dims[0], "block_shape", block[0] * block[1])?;
    for (i, d) in x.dims[2..].iter_mut().enumerate() {
        *d = cropped(&dims::product([&*d, &dims::known(block[i])])?, "crops", &crops[2 * i..][..2])?;
    }
    x.result()
}
