//! Orders along an axis. Equal elements keep their order, lowest index first; NaN counts as the largest value.

use std::cmp::Ordering;

use super::super::call::{Call, with_num};
use super::super::error::Fault;
use super::super::num::Num;
use super::super::tensor::{Tensor, volume};
use crate::ir::DType;

fn order<T: Num>(a: T, b: T) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// An axis of a row-major array: element i of lane l lies at `start(l) + i·inner`.
struct Lanes {
    n: usize,
    inner: usize,
    count: usize,
}

impl Lanes {
    fn of(shape: &[usize], at: usize) -> Result<Lanes, Fault> {
        let others = [&shape[..at], &shape[at + 1..]].concat();
        let count = if shape.contains(&0) { 0 } else { volume(&others)? };
        Ok(Lanes { n: shape[at], inner: volume(&shape[at + 1..])?, count })
    }

    fn start(&self, lane: usize, n: usize) -> usize {
        lane / self.inner * n * self.inner + lane % self.inner
    }
}

/// For each lane the positions of its elements in order, and the elements.
fn sorted<T: Num>(values: &[T], lanes: &Lanes, lane: usize, ascending: bool) -> Vec<(usize, T)> {
    let start = lanes.start(lane, lanes.n);
    let mut row: Vec<(usize, T)> = (0..lanes.n).map(|i| (i, values[start + i * lanes.inner])).collect();
    row.sort_by(|a, b| if ascending { order(a.1, b.1) } else { order(b.1, a.1) });
    row
}

/// The `k` largest (or smallest) along an axis, in order even if `sort` is false; −1 means all.
pub(super) fn topk(call: &Call<'_>) -> Result<Vec<Tensor>, Fault> {
    let x = call.tensor("x")?;
    let at = call.axis("axis", -1, x.rank())?;
    let ascending = call.bool_or("ascending", false)?;
    let indices_dtype = call.dtype_or("output_indices_dtype", DType::I32)?;
    let n = x.shape()[at];
    let k = match call.int_or("k", 1)? {
        -1 => n,
        k => usize::try_from(k).ok().filter(|&k| k <= n).ok_or_else(|| Fault::Range(format!("top {k} of {n}")))?,
    };
    let lanes = Lanes::of(x.shape(), at)?;
    let mut shape = x.dims();
    shape[at] = k;
    let len = volume(&shape)?;
    with_num!([x], T => {
        let source = x.numbers::<T>()?;
        let (mut values, mut indices) = (vec![T::ZERO; len], vec![0i64; len]);
        for lane in 0..if k == 0 { 0 } else { lanes.count } {
            for (j, (i, v)) in sorted(&source, &lanes, lane, ascending).into_iter().take(k).enumerate() {
                let place = lanes.start(lane, k) + j * lanes.inner;
                (values[place], indices[place]) = (v, i as i64);
            }
        }
        let mut out = vec![x.like(shape.clone(), values)];
        if call.bool_or("return_indices", true)? {
            out.push(call.result(indices_dtype, &shape, indices));
        }
        Ok(out)
    })
}

pub(super) fn argsort(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let at = call.axis("axis", -1, x.rank())?;
    let ascending = call.bool_or("ascending", false)?;
    let lanes = Lanes::of(x.shape(), at)?;
    with_num!([x], T => {
        let source = x.numbers::<T>()?;
        let mut out = vec![0i64; source.len()];
        for lane in 0..lanes.count {
            for (j, (i, _)) in sorted(&source, &lanes, lane, ascending).into_iter().enumerate() {
                out[lanes.start(lane, lanes.n) + j * lanes.inner] = i as i64;
            }
        }
        Ok(call.result(DType::I32, x.shape(), out))
    })
}

/// `reduce_argmax` and `reduce_argmin`: the first position of the extreme.
pub(super) fn arg_extreme(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let at = call.axis("axis", -1, x.rank())?;
    let dtype = call.dtype_or("output_dtype", DType::I32)?;
    if !dtype.is_int() {
        return Err(Fault::dtype("output_dtype", dtype, "an integer type"));
    }
    let wanted = if call.kind() == "reduce_argmax" { Ordering::Greater } else { Ordering::Less };
    let lanes = Lanes::of(x.shape(), at)?;
    let mut shape = x.dims();
    match call.bool_or("keep_dims", false)? {
        true => shape[at] = 1,
        false => _ = shape.remove(at),
    }
    if lanes.n == 0 {
        return Err(Fault::Range("an empty axis has no extreme".into()));
    }
    with_num!([x], T => {
        let source = x.numbers::<T>()?;
        let best = |lane| {
            let start = lanes.start(lane, lanes.n);
            let at = |i: usize| source[start + i * lanes.inner];
            (1..lanes.n).fold(0, |best, i| if order(at(i), at(best)) == wanted { i } else { best }) as i64
        };
        Ok(call.result(dtype, &shape, (0..lanes.count).map(best).collect()))
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, f32s};

    #[test]
    fn equal_elements_keep_their_order() {
        let x = f32s(&[2, 4], &[1.0, 3.0, 3.0, 2.0, 5.0, 0.0, 5.0, 7.0]);
        let out = Op::new("topk").with("x", x.clone()).with("k", 2).results(2).all();
        assert_eq!((out[0].to_f64s(), out[1].to_i64s()), (vec![3.0, 3.0, 7.0, 5.0], vec![1, 2, 3, 0]));
        let out =
            Op::new("topk").with("x", x.clone()).with("k", 1).with("axis", 0).with("ascending", true).results(2).all();
        assert_eq!((out[0].to_f64s(), out[1].to_i64s()), (vec![1.0, 0.0, 3.0, 2.0], vec![0, 1, 0, 0]));
        let out = Op::new("topk").with("x", x.clone()).with("k", -1).with("return_indices", false).all();
        assert_eq!(out[0].shape(), [2, 4]);
        assert_eq!(Op::new("argsort").with("x", x.clone()).one().to_i64s(), [1, 2, 3, 0, 3, 0, 2, 1]);
        assert_eq!(Op::new("reduce_argmax").with("x", x.clone()).one().to_i64s(), [1, 3]);
        let out = Op::new("reduce_argmin").with("x", x).with("axis", 0).with("keep_dims", true).one();
        assert_eq!((out.shape(), out.to_i64s()), (&[1, 4][..], vec![0, 1, 0, 0]));
    }
}
