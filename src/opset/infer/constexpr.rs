//! Compressed weights, and quantisation at run time.

use smallvec::smallvec;

use crate::ir::{DType, Dim};

use super::context::{Tensor, one, size};
use super::{Context, Dims, Guess, Inferred, Problem, Stop, dims};

/// Data with one scale and zero point, or one per index along `axis`.
pub(in crate::opset) fn affine(c: &Context<'_>) -> Inferred {
    let (data, scale) = (c.tensor("quantized_data")?, c.tensor("scale")?);
    let axis = c.axis("axis", data.rank())?;
    for name in ["scale", "zero_point"] {
        per_index(&c.tensor(name)?, name, &data.dims[axis])?;
    }
    one(scale.dtype, data.dims)
}

fn per_index(t: &Tensor, name: &'static str, extent: &Option<Dim>) -> Result<(), Stop> {
    t.rank_in(name, 0, 1)?;
    match t.dims.first() {
        Some(d) if !dims::may_equal(d, extent) => {
            Err(Problem::value(name, "does not have one entry per index of the axis").into())
        }
        _ => Ok(()),
    }
}

/// Every size of `part` must divide that of `whole`.
fn blocks(whole: &Tensor, part: &Tensor, param: &'static str) -> Result<(), Stop> {
    let rank = whole.rank();
    part.rank_in(param, rank, rank)?;
    let divides = |(w, p): (&Option<Dim>, &Option<Dim>)| match (dims::number(w), dims::number(p)) {
        (Some(w), Some(p)) => p != 0 && w % p == 0,
        _ => true,
    };
    if whole.dims.iter().zip(&part.dims).all(divides) {
        return Ok(());
    }
    let (whole, part) = (dims::show(&whole.dims), dims::show(&part.dims));
    Err(Problem::value(param, format!("{part} does not divide {whole} into blocks")).into())
}

/// Data with one scale and offset per block.
pub(in crate::opset) fn blockwise(c: &Context<'_>) -> Inferred {
    let (data, scale) = (c.tensor("data")?, c.tensor("scale")?);
    blocks(&data, &scale, "scale")?;
    if let Some(offset) = c.optional("offset")? {
        offset.rank_in("offset", scale.rank(), scale.rank())?;
        if !offset.dims.iter().zip(&scale.dims).all(|(a, b)| dims::may_equal(a, b)) {
            return Err(Problem::value("offset", "does not have the shape of `scale`").into());
        }
    }
    one(scale.dtype, data.dims)
}

/// fp16 to fp32.
pub(in crate::opset) fn cast(c: &Context<'_>) -> Inferred {
    let source = c.tensor("source_val")?;
    match c.dtype("output_dtype")? {
        DType::F32 => one(DType::F32, source.dims),
        d => Err(Problem::value("output_dtype", format!("no cast to {d}")).into()),
    }
}

/// The sizes in the `shape` parameter of the older definitions.
fn shape(c: &Context<'_>) -> Result<Dims, Stop> {
    match c.ints("shape") {
        None => Ok(dims::unknown(c.length("shape")?)),
        Some(sizes) => {
            let out = sizes.into_iter().map(|n| size(n).map(Some)).collect::<Option<_>>();
            out.ok_or_else(|| Problem::value("shape", "has a negative entry").into())
        }
    }
}

/// Indices into lookup tables.
pub(in crate::opset) fn lut_to_dense(c: &Context<'_>) -> Inferred {
    let lut = c.tensor("lut")?;
    if c.version.since() < 8 {
        return one(lut.dtype, shape(c)?);
    }
    let indices = c.tensor("indices")?;
    one(lut.dtype, looked_up(c, indices, &lut)?)
}

/// The shape after each index became a vector of table entries.
fn looked_up(c: &Context<'_>, indices: Tensor, lut: &Tensor) -> Result<Dims, Stop> {
    let groups = Tensor { dtype: lut.dtype, dims: lut.dims.iter().take(indices.rank()).cloned().collect() };
    if lut.rank() != indices.rank() + 2 {
        return Err(Problem::rank("lut", lut.rank(), format!("{} is needed", indices.rank() + 2)).into());
    }
    blocks(&indices, &groups, "lut")?;
    if let (Some(entries), Some(bits)) = (dims::number(&lut.dims[lut.rank() - 2]), indices.dtype.bits())
        && entries.checked_ilog2() != Some(bits).filter(|b| entries.checked_shr(*b) == Some(1))
    {
        return Err(Problem::value("lut", format!("has {entries} entries for {bits}-bit indices")).into());
    }
    let vector = &lut.dims[lut.rank() - 1];
    let mut out = indices.dims;
    match (c.has("vector_axis"), dims::number(vector)) {
        (false, Some(1)) => {}
        (false, _) => return Err(Problem::MissingParam("vector_axis").into()),
        (true, _) => {
            let axis = c.axis("vector_axis", out.len())?;
            out[axis] = dims::product([&out[axis], vector])?;
        }
    }
    Ok(out)
}

/// A mask, and the values looked up for its set bits.
pub(in crate::opset) fn lut_to_sparse(c: &Context<'_>) -> Inferred {
    let (mask, data, lut) = (c.tensor("indices_mask")?, c.tensor("indices_nonzero_data")?, c.tensor("lut")?);
    let mask = Tensor { dtype: data.dtype, dims: mask.dims };
    let out = looked_up(c, mask, &lut)?;
    let vector = lut.dims.last().cloned().flatten();
    let values = dims::product([data.dims.first().unwrap_or(&None), &vector])?;
    Ok(vec![Guess::Tensor(DType::U1, out), Guess::Tensor(lut.dtype, smallvec![values])])
}

/// A mask and the values of its set bits.
pub(in crate::opset) fn sparse_to_dense(c: &Context<'_>) -> Inferred {
    let data = c.tensor("nonzero_data")?;
    data.rank_in("nonzero_data", 1, 1)?;
    one(data.dtype, if c.version.since() < 8 { shape(c)? } else { c.tensor("mask")?.dims })
}

/// A mask, unchanged, and the values of its set bits with block-wise scales applied.
pub(in crate::opset) fn sparse_blockwise(c: &Context<'_>) -> Inferred {
    let (mask, data, scale) = (c.tensor("data_mask")?, c.tensor("nonzero_data")?, c.tensor("scale")?);
    blocks(&mask, &scale, "scale")?;
    Ok(vec![Guess::Tensor(mask.dtype, mask.dims), Guess::Tensor(scale.dtype, data.dims)])
}

/// `axis` goes with a vector of scales and only with one.
fn quantised(c: &Context<'_>) -> Result<Tensor, Stop> {
    let (input, scale) = (c.tensor("input")?, c.tensor("scale")?);
    scale.rank_in("scale", 0, 1)?;
    match (scale.rank(), c.has("axis")) {
        (0, true) => return Err(Problem::value("axis", "is given for a scalar scale").into()),
        (0, false) => {}
        (_, false) => return Err(Problem::MissingParam("axis").into()),
        (_, true) => {
            let axis = c.axis("axis", input.rank())?;
            per_index(&scale, "scale", &input.dims[axis])?;
        }
    }
    if let Some(zero) = c.optional("zero_point")? {
        zero.rank_in("zero_point", scale.rank(), scale.rank())?;
        if zero.dims.iter().zip(&scale.dims).any(|(a, b)| !dims::may_equal(a, b)) {
            return Err(Problem::value("zero_point", "does not have the shape of `scale`").into());
        }
    }
    Ok(input)
}

/// To int8 or uint8.
pub(in crate::opset) fn quantize(c: &Context<'_>) -> Inferred {
    let input = quantised(c)?;
    let dtype = c.dtype("output_dtype")?;
    if !matches!(dtype, DType::I8 | DType::U8) {
        return Err(Problem::value("output_dtype", format!("{dtype} is no quantised type")).into());
    }
    match c.optional("zero_point")? {
        Some(zero) if zero.dtype != dtype => {
            Err(Problem::value("output_dtype", format!("{dtype} is not that of the zero point, {}", zero.dtype)).into())
        }
        _ => one(dtype, input.dims),
    }
}

/// Back to the element type of the scale.
pub(in crate::opset) fn dequantize(c: &Context<'_>) -> Inferred {
    let input = quantised(c)?;
    one(c.tensor("scale")?.dtype, input.dims)
}
