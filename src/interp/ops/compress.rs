//! Compressed weights (`constexpr_*`) and quantization of activations.
//!
//! The ops of CoreML6 carry a `shape` and bit streams, those of CoreML8 sub-byte tensors; a parameter may be an operand or
//! an attribute in either.

use super::super::call::{Axes, Call, axis, with_real};
use super::super::error::Fault;
use super::super::num::{Element, Num, Real, wrap};
use super::super::tensor::{Dims, Tensor, volume, with_element};
use super::super::view::View;
use crate::ir::{DType, unpack_ints};

/// One entry per block spread over the elements of `shape`: entry i·g/d for element i of an axis with g blocks.
fn spread<T: Element>(entries: &[T], groups: &[usize], shape: &[usize]) -> Result<Vec<T>, Fault> {
    let fits = groups.len() == shape.len() && groups.iter().zip(shape).all(|(&g, &d)| g > 0 && d % g == 0);
    if !fits {
        return Err(Fault::Shape(format!("blocks {groups:?} do not divide {shape:?}")));
    }
    let axes = (0..shape.len()).rev();
    axes.fold(View::of(groups), |v, a| v.with_axis(a + 1, shape[a] / groups[a], 0)).read(entries)
}

/// Any tensor of numbers as `R`.
fn numbers<R: Real>(t: &Tensor) -> Vec<R> {
    t.to_f64s().into_iter().map(R::from_f64).collect()
}

/// A scalar, or a vector along `axis`, spread over the elements of `shape`.
fn along<R: Real>(t: &Tensor, at: Option<usize>, shape: &[usize]) -> Result<Vec<R>, Fault> {
    let mut groups = vec![1; shape.len()];
    match at {
        _ if t.len() == 1 => {}
        Some(at) if t.shape() == [shape[at]] => groups[at] = shape[at],
        _ => return Err(Fault::Shape(format!("shape {:?} does not scale {shape:?}", t.shape()))),
    }
    if shape.contains(&0) {
        return Ok(Vec::new());
    }
    spread(&numbers(t), &groups, shape)
}

/// scale · (data − offset).
fn dequantized<R: Real>(
    call: &Call<'_>,
    data: &[R],
    scale: &[R],
    offset: Option<&[R]>,
    dtype: DType,
    shape: &[usize],
) -> Tensor {
    let shifted = data.iter().enumerate().map(|(i, &d)| offset.map_or(d, |o| d.minus(o[i])));
    call.real_result(dtype, shape, shifted.zip(scale).map(|(d, &s)| s.times(d)).collect())
}

/// `constexpr_affine_dequantize` and `dequantize`: (q − zero_point) · scale.
fn affine(call: &Call<'_>, q: &Tensor) -> Result<Tensor, Fault> {
    let (scale, zero) = (call.tensor("scale")?, call.optional("zero_point")?);
    let at = call.optional_int("axis")?.map(|a| axis(a, q.rank())).transpose()?;
    with_real!([scale], R => {
        let zero = zero.map(|z| along::<R>(&z, at, q.shape())).transpose()?;
        let scales = along::<R>(&scale, at, q.shape())?;
        Ok(dequantized(call, &numbers(q), &scales, zero.as_deref(), scale.dtype(), q.shape()))
    })
}

pub(super) fn affine_dequantize(call: &Call<'_>) -> Result<Tensor, Fault> {
    affine(call, &call.tensor("quantized_data")?)
}

pub(super) fn dequantize(call: &Call<'_>) -> Result<Tensor, Fault> {
    affine(call, &call.tensor("input")?)
}

/// clip(round(x / scale) + zero_point), rounding half to even; NaN becomes 0.
pub(super) fn quantize(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, scale, zero) = (call.tensor("input")?, call.tensor("scale")?, call.optional("zero_point")?);
    let dtype = call.dtype_or("output_dtype", DType::I8)?;
    let (low, high) = match dtype {
        DType::I8 => (-128, 127),
        DType::U8 => (0, 255),
        _ => return Err(Fault::dtype("output_dtype", dtype, "int8 or uint8")),
    };
    let at = call.optional_int("axis")?.map(|a| axis(a, x.rank())).transpose()?;
    with_real!([x, scale], R => {
        let scales = along::<R>(&scale, at, x.shape())?;
        let zeros = zero.map(|z| along::<R>(&z, at, x.shape())).transpose()?;
        let levels = x.reals::<R>()?.iter().zip(&scales).enumerate().map(|(i, (&v, &s))| {
            let level = v.over(s).libm_round().plus(zeros.as_ref().map_or(R::ZERO, |z| z[i]));
            (level.to_f64() as i64).clamp(low, high)
        }).collect();
        Ok(call.result(dtype, x.shape(), levels))
    })
}

/// scale · (data − offset) with one scale and offset per block; the difference is rounded to the type of the scale.
fn blockwise(call: &Call<'_>, data: &Tensor) -> Result<Tensor, Fault> {
    let (scale, offset) = (call.tensor("scale")?, call.optional("offset")?);
    if offset.as_ref().is_some_and(|o| o.shape() != scale.shape()) {
        return Err(Fault::Shape("offset and scale differ in shape".into()));
    }
    if data.is_empty() {
        return Ok(call.real_result::<f32>(scale.dtype(), data.shape(), Vec::new()));
    }
    with_real!([scale], R => {
        let mut shifted: Vec<R> = numbers(data);
        if let Some(offset) = offset {
            let offset = spread::<R>(&numbers(&offset), scale.shape(), data.shape())?;
            shifted.iter_mut().zip(offset).for_each(|(d, o)| *d = d.minus(o));
        }
        let shifted = call.real_result(scale.dtype(), data.shape(), shifted);
        let scales = spread(&scale.reals::<R>()?, scale.shape(), data.shape())?;
        Ok(dequantized(call, &shifted.reals::<R>()?, &scales, None, scale.dtype(), data.shape()))
    })
}

pub(super) fn blockwise_shift_scale(call: &Call<'_>) -> Result<Tensor, Fault> {
    blockwise(call, &call.tensor("data")?)
}

/// Entries of a lookup table. The table has shape [groups…, entries, V]; each index stands for V neighbours on
/// `vector_axis`.
fn looked_up(call: &Call<'_>, indices: &Tensor, lut: &Tensor) -> Result<Tensor, Fault> {
    let Some((groups, &[entries, v])) = lut.shape().split_last_chunk::<2>() else {
        return Err(Fault::Shape(format!("a lookup table of shape {:?}", lut.shape())));
    };
    let group_numbers: Vec<i64> = (0..volume(groups)? as i64).collect();
    let group = if indices.is_empty() { Vec::new() } else { spread(&group_numbers, groups, indices.shape())? };
    let mut shape = indices.dims();
    shape.push(v);
    let len = volume(&shape)?;
    let indices = indices.elements::<i64>()?;
    let found = with_element!(lut, T => {
        let table = lut.elements::<T>()?;
        let mut out: Vec<T> = Vec::with_capacity(len);
        for (&i, &g) in indices.iter().zip(&group) {
            let entry = usize::try_from(i).ok().filter(|&i| i < entries);
            let entry = entry.ok_or_else(|| Fault::Range(format!("index {i} is outside a table of {entries}")))?;
            out.extend_from_slice(&table[(g as usize * entries + entry) * v..][..v]);
        }
        lut.like(shape, out)
    });
    match v {
        1 => Ok(merged(&found, found.rank() - 1, None)?),
        _ => merged(&found, found.rank() - 1, Some(vector_axis(call, found.rank() - 1)?)),
    }
}

fn vector_axis(call: &Call<'_>, rank: usize) -> Result<usize, Fault> {
    axis(call.int("vector_axis")?, rank)
}

/// The last axis merged into axis `into`, where it varies fastest; or dropped, when it has size 1.
fn merged(t: &Tensor, last: usize, into: Option<usize>) -> Result<Tensor, Fault> {
    let mut shape = t.dims();
    let v = shape.remove(last);
    let Some(into) = into else {
        return t.reshaped(&shape).ok_or_else(|| Fault::Shape("a vector axis is missing".into()));
    };
    shape[into] *= v;
    let mut perm: Axes = (0..last).collect();
    perm.insert(into + 1, last);
    let view = View::of(t.shape()).permuted(&perm);
    with_element!(t, T => Ok(t.like(shape, view.read(t.elements::<T>()?)?)))
}

/// The shape that the ops of CoreML6 state.
fn stated_shape(call: &Call<'_>) -> Result<Dims, Fault> {
    let given = call.ints("shape")?;
    let shape: Option<Dims> = given.iter().map(|&n| usize::try_from(n).ok()).collect();
    shape.ok_or_else(|| Fault::Shape(format!("{given:?} is no shape")))
}

/// `count` integers of `bits` bits each from a vector of bytes.
fn unpacked(stream: &Tensor, bits: u32, shape: &[usize]) -> Result<Tensor, Fault> {
    let dtype = match bits {
        1 => DType::U1,
        2 => DType::U2,
        4 => DType::U4,
        6 => DType::U6,
        8 => DType::U8,
        _ => return Err(Fault::Value(format!("{bits} bits an index"))),
    };
    let bytes: Vec<u8> = stream.elements::<i64>()?.iter().map(|&b| wrap(DType::U8, b) as u8).collect();
    let count = volume(shape)?;
    let values = unpack_ints(dtype, count, &bytes);
    if values.len() != count {
        return Err(Fault::Shape(format!("{} bytes are too few for shape {shape:?}", bytes.len())));
    }
    Ok(Tensor::ints(dtype, shape, &values))
}

pub(super) fn lut_to_dense(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (indices, lut) = (call.tensor("indices")?, call.tensor("lut")?);
    if !call.has("shape") {
        return looked_up(call, &indices, &lut);
    }
    let shape = stated_shape(call)?;
    let bits = lut.len().checked_ilog2().unwrap_or(0);
    let indices = unpacked(&indices, bits, &shape)?;
    let table: Dims = std::iter::repeat_n(1, shape.len()).chain([lut.len(), 1]).collect();
    let lut = lut.reshaped(&table).ok_or_else(|| Fault::Shape("the lookup table is empty".into()))?;
    looked_up(call, &indices, &lut)
}

/// Data spread over the set bits of a mask in row-major order; zeros elsewhere.
fn densified(data: &Tensor, mask: &Tensor) -> Result<Tensor, Fault> {
    let bits = mask.to_bools();
    if bits.iter().filter(|b| **b).count() != data.len() {
        return Err(Fault::Shape(format!("{} data for a mask with another number of bits set", data.len())));
    }
    with_element!(data, T => {
        let mut rest = data.elements::<T>()?.iter();
        let out = bits.iter().map(|&b| if b { rest.next().cloned() } else { None }.unwrap_or_default()).collect();
        Ok(data.like(mask.dims(), out))
    })
}

/// The elements under the set bits of a mask, as a vector.
fn sparsified(dense: &Tensor, mask: &Tensor) -> Result<Tensor, Fault> {
    let bits = mask.to_bools();
    with_element!(dense, T => {
        let kept: Vec<T> = dense.elements::<T>()?.iter().zip(bits).filter(|(_, b)| *b).map(|(v, _)| v.clone()).collect();
        Ok(dense.like([kept.len()].as_slice(), kept))
    })
}

pub(super) fn sparse_to_dense(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (data, mask) = (call.tensor("nonzero_data")?, call.tensor("mask")?);
    match call.has("shape") {
        true => densified(&data, &unpacked(&mask, 1, &stated_shape(call)?)?),
        false => densified(&data, &mask),
    }
}

/// The mask repeated for the elements of each vector, and the values under it.
pub(super) fn lut_to_sparse(call: &Call<'_>) -> Result<Vec<Tensor>, Fault> {
    let (mask, lut) = (call.tensor("indices_mask")?, call.tensor("lut")?);
    let indices = densified(&call.tensor("indices_nonzero_data")?, &mask)?;
    let dense = looked_up(call, &indices, &lut)?;
    let mask = match lut.shape().last() {
        Some(&v) if v > 1 => {
            let at = vector_axis(call, mask.rank())?;
            let view = View::of(mask.shape()).with_axis(at + 1, v, 0);
            mask.like(dense.dims(), view.read(mask.elements::<i64>()?)?)
        }
        _ => mask,
    };
    let values = sparsified(&dense, &mask)?;
    Ok(vec![mask, values])
}

/// The mask and the dequantized values under it; blocks are those of the dense positions.
pub(super) fn sparse_blockwise_shift_scale(call: &Call<'_>) -> Result<Vec<Tensor>, Fault> {
    let mask = call.tensor("data_mask")?;
    let dense = blockwise(call, &densified(&call.tensor("nonzero_data")?, &mask)?)?;
    let values = sparsified(&dense, &mask)?;
    Ok(vec![mask, values])
}

pub(super) fn constexpr_cast(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("source_val")?;
    let dtype = call.dtype_or("output_dtype", DType::F32)?;
    x.cast_in(dtype, call.mode()).ok_or_else(|| Fault::dtype("source_val", x.dtype(), "a number"))
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f16s, f32s, i32s};
    use super::*;

    fn ints(dtype: DType, shape: &[usize], values: &[i64]) -> Tensor {
        Tensor::ints(dtype, shape, values)
    }

    /// The worked example of coremltools' documentation: groups on both axes.
    #[test]
    fn palettes_are_chosen_by_group() {
        let indices = ints(DType::U2, &[6, 2], &[2, 3, 3, 0, 1, 0, 3, 0, 2, 1, 0, 3]);
        let lut = f32s(&[2, 1, 4, 1], &[1.0, 5.0, 9.0, 13.0, 2.0, 10.0, 18.0, 26.0]);
        let out = Op::new("constexpr_lut_to_dense").with("indices", indices).with("lut", lut).one();
        let want = [9.0, 13.0, 13.0, 1.0, 5.0, 1.0, 26.0, 2.0, 18.0, 10.0, 2.0, 26.0];
        assert_close(&out, &[6, 2], &want, 0.0);
    }

    #[test]
    fn palette_entries_may_be_vectors() {
        let op = Op::new("constexpr_lut_to_dense").with("indices", ints(DType::U1, &[2, 2], &[0, 1, 1, 0]));
        let op = op.with("lut", f16s(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]));
        let out = op.clone().with("vector_axis", 0).one();
        assert_close(&out, &[4, 2], &[1.0, 3.0, 2.0, 4.0, 3.0, 1.0, 4.0, 2.0], 0.0);
        assert_close(&op.with("vector_axis", -1).one(), &[2, 4], &[1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 1.0, 2.0], 0.0);
    }

    #[test]
    fn the_older_forms_hold_bit_streams_in_attributes() {
        let op = Op::new("constexpr_lut_to_dense")
            .opset("CoreML6")
            .attribute("indices", ints(DType::U8, &[2], &[0xe4, 0x03]));
        let op =
            op.attribute("lut", f16s(&[4], &[0.5, 1.5, 2.5, 3.5])).attribute("shape", ints(DType::U32, &[1], &[5]));
        assert_close(&op.one(), &[5], &[0.5, 1.5, 2.5, 3.5, 3.5], 0.0);
        let op =
            Op::new("constexpr_sparse_to_dense").opset("CoreML6").attribute("mask", ints(DType::U8, &[1], &[0b1010]));
        let op =
            op.attribute("nonzero_data", f16s(&[2], &[7.0, 8.0])).attribute("shape", ints(DType::U32, &[2], &[2, 2]));
        assert_close(&op.one(), &[2, 2], &[0.0, 7.0, 0.0, 8.0], 0.0);
    }

    #[test]
    fn affine_weights_have_scalars_or_one_entry_a_channel() {
        let op = || {
            let q = ints(DType::U8, &[2, 2], &[1, 2, 3, 255]);
            Op::new("constexpr_affine_dequantize").opset("CoreML6").attribute("quantized_data", q).attribute("axis", 0)
        };
        let scalar = op().attribute("zero_point", ints(DType::U8, &[], &[1])).attribute("scale", f32s(&[], &[0.5]));
        assert_close(&scalar.one(), &[2, 2], &[0.0, 0.5, 1.0, 127.0], 0.0);
        let vector =
            op().attribute("zero_point", ints(DType::U8, &[], &[1])).attribute("scale", f16s(&[2], &[1.0, 2.0]));
        let out = vector.one();
        assert_eq!(out.dtype(), DType::F16);
        assert_close(&out, &[2, 2], &[0.0, 1.0, 4.0, 508.0], 0.0);
    }

    /// coremltools: [1,2,3,4], scale [.5,2], offset [1,0] → [0,.5,6,8].
    #[test]
    fn blocks_have_their_own_scale_and_offset() {
        let op = Op::new("constexpr_blockwise_shift_scale").with("data", ints(DType::I4, &[4], &[1, 2, 3, 4]));
        let op = op.with("scale", f32s(&[2], &[0.5, 2.0]));
        assert_close(
            &op.clone().with("offset", ints(DType::I4, &[2], &[1, 0])).one(),
            &[4],
            &[0.0, 0.5, 6.0, 8.0],
            0.0,
        );
        assert_close(&op.one(), &[4], &[0.5, 1.0, 6.0, 8.0], 0.0);
    }

    #[test]
    fn sparse_forms_keep_their_mask() {
        let mask = ints(DType::U1, &[2, 2], &[1, 0, 1, 1]);
        let op = Op::new("constexpr_sparse_to_dense").with("nonzero_data", f32s(&[3], &[1.0, 2.0, 3.0]));
        assert_close(&op.with("mask", mask.clone()).one(), &[2, 2], &[1.0, 0.0, 2.0, 3.0], 0.0);

        let op =
            Op::new("constexpr_lut_to_sparse").with("indices_mask", mask.clone()).results(2).with("vector_axis", 1);
        let op = op.with("indices_nonzero_data", ints(DType::U1, &[3], &[0, 1, 0]));
        let out = op.with("lut", f32s(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0])).all();
        assert_eq!((out[0].shape(), out[0].to_i64s()), (&[2, 4][..], vec![1, 1, 0, 0, 1, 1, 1, 1]));
        assert_close(&out[1], &[6], &[1.0, 2.0, 3.0, 4.0, 1.0, 2.0], 0.0);

        let op = Op::new("constexpr_sparse_blockwise_shift_scale").with("data_mask", mask.clone()).results(2);
        let op =
            op.with("nonzero_data", ints(DType::I8, &[3], &[10, 20, 30])).with("scale", f32s(&[2, 1], &[1.0, 0.5]));
        let out = op.with("offset", ints(DType::I8, &[2, 1], &[0, 10])).all();
        assert_eq!(out[0].to_i64s(), mask.to_i64s());
        assert_close(&out[1], &[3], &[10.0, 5.0, 10.0], 0.0);

        let op = Op::new("constexpr_sparse_to_dense").with("nonzero_data", f32s(&[1], &[1.0])).with("mask", mask);
        assert!(op.fault().contains("bits set"));
    }

    /// coremltools: 0.5, 1.5, −300 with scale 1 and zero point 1 → 1, 3, −128.
    #[test]
    fn activations_are_quantized_half_to_even() {
        let op = Op::new("quantize").with("input", f32s(&[3], &[0.5, 1.5, -300.0])).with("scale", 1.0);
        let out = op.with("zero_point", ints(DType::I8, &[], &[1])).with("output_dtype", "int8").one();
        assert_eq!((out.dtype(), out.to_i64s()), (DType::I8, vec![1, 3, -128]));
        let op = Op::new("dequantize").with("input", out.reshaped(&[1, 3]).unwrap()).with("axis", 1);
        assert_close(&op.with("scale", f32s(&[3], &[1.0, 2.0, 0.5])).one(), &[1, 3], &[1.0, 6.0, -64.0], 0.0);
    }

    #[test]
    fn cast_of_weights() {
        let out = Op::new("constexpr_cast").with("source_val", f16s(&[1], &[0.1])).with("output_dtype", "fp32").one();
        assert_eq!((out.dtype(), out.to_f64s()), (DType::F32, vec![0.0999755859375]));
        let out = Op::new("constexpr_cast").with("source_val", i32s(&[1], &[1])).with("output_dtype", "fp8");
        assert!(out.fault().contains("unknown element type"));
    }
}
