//! Ops that make tensors from shapes, ranges and positions.

use super::super::call::{Call, axis, with_real};
use super::super::error::Fault;
use super::super::num::Num;
use super::super::tensor::{Dims, Tensor, volume, with_element};
use crate::ir::DType;

/// A shape given as a tensor of integers.
fn shape_of(sizes: &[i64]) -> Result<Dims, Fault> {
    let shape: Option<Dims> = sizes.iter().map(|&n| usize::try_from(n).ok()).collect();
    shape.ok_or_else(|| Fault::Shape(format!("{sizes:?} is no shape")))
}

/// A tensor full of `value`, by default of fp32 zeros.
fn filled(call: &Call<'_>, shape: &[usize]) -> Result<Tensor, Fault> {
    let value = call.optional("value")?.unwrap_or_else(|| call.mode().admit(&Tensor::floats(DType::F32, &[], &[0.0])));
    let n = volume(shape)?;
    with_element!(value, T => match value.elements::<T>()? {
        [one] => Ok(value.like(shape, vec![one.clone(); n])),
        _ => Err(Fault::Shape(format!("value of shape {:?} is no scalar", value.shape()))),
    })
}

pub(super) fn fill(call: &Call<'_>) -> Result<Tensor, Fault> {
    filled(call, &shape_of(&call.ints("shape")?)?)
}

pub(super) fn fill_like(call: &Call<'_>) -> Result<Tensor, Fault> {
    filled(call, call.tensor("ref_tensor")?.shape())
}

pub(super) fn shape(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let sizes: Vec<i64> = x.shape().iter().map(|&n| n as i64).collect();
    Ok(Tensor::ints(DType::I32, &[sizes.len()], &sizes))
}

/// start + i·step for i below ⌈(end − start) / step⌉.
pub(super) fn range_1d(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (start, end, step) = (call.tensor("start")?, call.tensor("end")?, call.tensor("step")?);
    for t in [&start, &end, &step] {
        if t.len() != 1 || t.dtype() != start.dtype() {
            return Err(Fault::Shape("start, end and step are not three scalars of one type".into()));
        }
    }
    let count = |from: f64, to: f64, step: f64| {
        let n = libm::ceil((to - from) / step);
        if step == 0.0 || n.is_nan() {
            return Err(Fault::Value(format!("a range from {from} to {to} in steps of {step}")));
        }
        volume(&[n.max(0.0) as usize])
    };
    let n = count(start.to_f64s()[0], end.to_f64s()[0], step.to_f64s()[0])?;
    if start.dtype().is_int() {
        let (first, step) = (start.to_i64s()[0], step.to_i64s()[0]);
        return Ok(call.result(
            start.dtype(),
            &[n],
            (0..n as i64).map(|i| first.wrapping_add(i.wrapping_mul(step))).collect(),
        ));
    }
    with_real!([start], R => {
        let (first, step) = (start.reals::<R>()?[0], step.reals::<R>()?[0]);
        let at = |i: usize| first.plus(step.times(R::from_f64(i as f64)));
        Ok(call.real_result::<R>(start.dtype(), &[n], (0..n).map(at).collect()))
    })
}

/// `on_value` where the new axis equals the index; an index outside it selects nothing.
pub(super) fn one_hot(call: &Call<'_>) -> Result<Tensor, Fault> {
    let indices = call.tensor("indices")?;
    let size = call.int("one_hot_vector_size")?;
    let size = usize::try_from(size).map_err(|_| Fault::Value(format!("a vector of {size}")))?;
    let at = axis(call.int_or("axis", -1)?, indices.rank() + 1)?;
    let scalar = |name, default: i64| -> Result<Tensor, Fault> {
        Ok(call.optional(name)?.unwrap_or_else(|| Tensor::ints(DType::I32, &[], &[default])))
    };
    let (on, off) = (scalar("on_value", 1)?, scalar("off_value", 0)?);
    let mut shape = indices.dims();
    shape.insert(at, size);
    let n = volume(&shape)?;
    let inner = volume(&shape[at + 1..])?;
    let indices = indices.to_i64s();
    with_element!(on, T => {
        let ([on_value], [off_value]) = (on.elements::<T>()?, off.elements::<T>()?) else {
            return Err(Fault::Shape("on_value and off_value are not scalars".into()));
        };
        let mut out = vec![off_value.clone(); n];
        for (i, &hot) in indices.iter().enumerate() {
            if let Some(hot) = usize::try_from(hot).ok().filter(|&h| h < size) {
                out[(i / inner * size + hot) * inner + i % inner] = on_value.clone();
            }
        }
        Ok(on.like(shape, out))
    })
}

/// Coordinates of the elements that are not zero, row-major.
pub(super) fn non_zero(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let places: Vec<usize> = x.to_bools().iter().enumerate().filter(|(_, b)| **b).map(|(i, _)| i).collect();
    volume(&[places.len(), x.rank()])?;
    let mut out = vec![0i64; places.len() * x.rank()];
    for (&place, row) in places.iter().zip(out.chunks_mut(x.rank().max(1))) {
        let mut rest = place;
        for (c, &n) in row.iter_mut().zip(x.shape()).rev() {
            *c = (rest % n) as i64;
            rest /= n;
        }
    }
    Ok(Tensor::ints(DType::I32, &[places.len(), x.rank()], &out))
}

/// Keeps the diagonals from `lower` below to `upper` above the main one; a negative bound keeps all on that side.
pub(super) fn band_part(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let (lower, upper) = (call.int_or("lower", -1)?, call.int_or("upper", -1)?);
    let [.., rows, columns] = x.shape()[..] else {
        return Err(Fault::Shape(format!("shape {:?} has no matrix", x.shape())));
    };
    let keeps = |i: usize| {
        let (m, n) = ((i / columns % rows) as i64, (i % columns) as i64);
        (lower < 0 || m - n <= lower) && (upper < 0 || n - m <= upper)
    };
    with_element!(x, T => {
        let kept = x.elements::<T>()?.iter().enumerate().map(|(i, v)| if keeps(i) { v.clone() } else { T::default() });
        Ok(x.like(x.dims(), kept.collect()))
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, i32s, iota};
    use super::*;

    #[test]
    fn fills_take_the_type_of_their_value() {
        let out = Op::new("fill").with("shape", [2, 2]).with("value", 7).one();
        assert_eq!((out.dtype(), out.to_i64s()), (DType::I32, vec![7; 4]));
        assert_close(&Op::new("fill").with("shape", [2]).one(), &[2], &[0.0, 0.0], 0.0);
        let out = Op::new("fill_like").with("ref_tensor", i32s(&[1, 2], &[1, 2])).with("value", true).one();
        assert_eq!((out.dtype(), out.shape()), (DType::Bool, &[1, 2][..]));
        assert!(Op::new("fill").with("shape", [1 << 20, 1 << 20]).fault().contains("too large"));
    }

    #[test]
    fn ranges_round_their_length_up() {
        let ints = |a: i64, b: i64, s: i64| Op::new("range_1d").with("start", a).with("end", b).with("step", s);
        assert_eq!(ints(1, 8, 3).one().to_i64s(), [1, 4, 7]);
        assert_eq!(ints(3, 0, -1).one().to_i64s(), [3, 2, 1]);
        assert!(ints(3, 0, 1).one().is_empty());
        assert!(ints(0, 1, 0).fault().contains("steps of 0"));
        assert!(ints(0, 1 << 40, 1).try_all().is_ok(), "the end wraps to int32");
        let out = Op::new("range_1d").with("start", 0.0).with("end", 1.0).with("step", 0.3).one();
        assert_close(&out, &[4], &[0.0, 0.3, 0.6, 0.9], 1e-6);
    }

    #[test]
    fn one_hot_puts_the_new_axis_anywhere() {
        let op = || Op::new("one_hot").with("indices", i32s(&[2], &[2, 5])).with("one_hot_vector_size", 3);
        let out = op().one();
        assert_eq!((out.shape(), out.to_i64s()), (&[2, 3][..], vec![0, 0, 1, 0, 0, 0]));
        let out = op().with("axis", 0).with("on_value", 5.0).with("off_value", -1.0).one();
        assert_close(&out, &[3, 2], &[-1.0, -1.0, -1.0, -1.0, 5.0, -1.0], 0.0);
    }

    #[test]
    fn shape_non_zero_and_bands() {
        assert_eq!(Op::new("shape").with("x", iota(&[2, 3])).one().to_i64s(), [2, 3]);
        let out = Op::new("non_zero").with("x", f32s(&[2, 2], &[0.0, 3.0, 4.0, 0.0])).one();
        assert_eq!((out.shape(), out.to_i64s()), (&[2, 2][..], vec![0, 1, 1, 0]));
        let band = |lower: i64, upper: i64| {
            let x = f32s(&[3, 3], &[1.0; 9]);
            Op::new("band_part").with("x", x).with("lower", lower).with("upper", upper).one()
        };
        assert_close(&band(-1, 0), &[3, 3], &[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0], 0.0);
        assert_close(&band(0, 1), &[3, 3], &[1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], 0.0);
    }
}
