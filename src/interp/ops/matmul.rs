//! Matrix products and attention.

use super::super::call::{Call, with_num, with_real};
use super::super::error::Fault;
use super::super::lanes::softmax;
use super::super::num::{Element, Num, Real};
use super::super::par;
use super::super::product::{Stack, product};
use super::super::tensor::{Tensor, volume};
use super::super::view::View;
use super::elementwise::expand;
use crate::ir::DType;

/// The shape of a stack of matrices, taken apart.
fn split_matrix(shape: &[usize]) -> Result<(&[usize], &[usize; 2]), Fault> {
    shape.split_last_chunk::<2>().ok_or_else(|| Fault::Shape(format!("shape {shape:?} is no matrix")))
}

/// The element type of a product: that of both operands, else (a constant of another float type) the declared one.
fn product_dtype(call: &Call<'_>, x: &Tensor, y: &Tensor) -> DType {
    if x.dtype() == y.dtype() { x.dtype() } else { call.float_result(x.dtype()) }
}

/// A rank-1 x is a row, a rank-1 y a column; the axis it lacks is dropped from the result.
pub(super) fn matmul(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, y) = (call.tensor("x")?, call.tensor("y")?);
    let (transpose_x, transpose_y) = (call.bool_or("transpose_x", false)?, call.bool_or("transpose_y", false)?);
    if (x.rank() < 2 && transpose_x) || (y.rank() < 2 && transpose_y) {
        return Err(Fault::Shape("a vector cannot be transposed".into()));
    }
    let (mut left, mut right) = (Stack::of(&x), Stack::of(&y));
    if x.rank() == 1 {
        left.view = left.view.with_axis(0, 1, 0);
    }
    if y.rank() == 1 {
        right.view = right.view.with_axis(1, 1, 0);
    }
    if transpose_x {
        left = left.transposed();
    }
    if transpose_y {
        right = right.transposed();
    }
    with_num!([x, y], T => {
        let (out, mut shape) = product::<T>(&left, &right)?;
        if y.rank() == 1 {
            shape.pop();
        }
        if x.rank() == 1 {
            shape.remove(shape.len() - if y.rank() == 1 { 1 } else { 2 });
        }
        Ok(call.result(product_dtype(call, &x, &y), &shape, out))
    })
}

/// x · weightᵀ + bias.
pub(super) fn linear(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, weight, bias) = (call.tensor("x")?, call.tensor("weight")?, call.optional("bias")?);
    let ([.., d_in], [d_out, w_in]) = (x.shape(), weight.shape()) else {
        return Err(Fault::Shape(format!("x {:?} and weight {:?} are no linear layer", x.shape(), weight.shape())));
    };
    if d_in != w_in || bias.as_ref().is_some_and(|b| b.shape() != [*d_out]) {
        return Err(Fault::Shape(format!("x {:?}, weight {:?} and bias do not fit", x.shape(), weight.shape())));
    }
    let mut shape = x.dims();
    let last = shape.len() - 1;
    shape[last] = *d_out;
    volume(&shape)?;
    let rows = x.reshaped(&[volume(&x.shape()[..last])?, *d_in]);
    let rows = rows.ok_or_else(|| Fault::TooLarge(x.shape().to_vec()))?;
    with_num!([x, weight], T => {
        let (mut out, _) = product::<T>(&Stack::of(&rows), &Stack::of(&weight).transposed())?;
        if let Some(bias) = &bias {
            let bias = bias.numbers::<T>()?;
            par::rows(&mut out, *d_out, |_, row| row.iter_mut().zip(bias.iter()).for_each(|(o, &b)| *o = o.plus(b)));
        }
        Ok(call.result(x.dtype(), &shape, out))
    })
}

/// The two equations that MIL defines, up to the letters: `bchw,bwhu->bchu` and `chw,whr->chr`.
fn is_known_equation(equation: &str) -> Option<usize> {
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    ["bchw,bwhu->bchu", "chw,whr->chr"].into_iter().find_map(|known| {
        let mut pairs: Vec<(char, char)> = text.chars().zip(known.chars()).collect();
        pairs.sort_unstable();
        pairs.dedup();
        let renames =
            pairs.iter().all(|&(a, k)| a.is_alphabetic() == k.is_alphabetic() && (a.is_alphabetic() || a == k));
        let mut to: Vec<char> = pairs.iter().map(|p| p.1).collect();
        let from = pairs.iter().map(|p| p.0).collect::<Vec<_>>();
        to.sort_unstable();
        let distinct = from.windows(2).all(|w| w[0] != w[1]) && to.windows(2).all(|w| w[0] != w[1]);
        (text.len() == known.len() && renames && distinct).then(|| known.find(',').unwrap_or(0))
    })
}

pub(super) fn einsum(call: &Call<'_>) -> Result<Tensor, Fault> {
    let equation = call.str_or("equation", "")?;
    let rank = is_known_equation(&equation)
        .ok_or_else(|| Fault::Value(format!("equation `{equation}` is not interpreted")))?;
    let values = call.tensors("values")?;
    let [x, y] = &values[..] else { return Err(Fault::Shape(format!("{} operands instead of two", values.len()))) };
    if x.rank() != rank || y.rank() != rank {
        return Err(Fault::Shape(format!("shapes {:?} and {:?} for `{equation}`", x.shape(), y.shape())));
    }
    // Both operands and the result bring h before the matrix axes: the second axis from the right swaps with the third.
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank - 3, rank - 2);
    let stack = |t| {
        let stack = Stack::of(t);
        Stack { view: stack.view.permuted(&perm), ..stack }
    };
    with_num!([x, y], T => {
        let (out, shape) = product::<T>(&stack(x), &stack(y))?;
        let view = View::of(&shape).permuted(&perm);
        Ok(call.result(x.dtype(), view.shape(), view.read(&out)?))
    })
}

/// softmax(q·kᵀ / √E + mask)·v. A bool mask adds −∞ where it is false; a row masked everywhere is NaN. Nothing inside is
/// rounded to the storage type.
pub(super) fn attention(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (q, k, v) = (call.tensor("query")?, call.tensor("key")?, call.tensor("value")?);
    let mask = call.optional("attn_mask")?;
    let (q_batch, &[_, e]) = split_matrix(q.shape())?;
    let (k_batch, &[s, _]) = split_matrix(k.shape())?;
    if q_batch != k_batch || q_batch != split_matrix(v.shape())?.0 || v.dtype() != q.dtype() || k.dtype() != q.dtype() {
        let message = format!("query {:?}, key {:?} and value {:?} do not fit", q.shape(), k.shape(), v.shape());
        return Err(Fault::Shape(message));
    }
    with_real!([q, k, v], R => {
        let (mut scores, shape) = product::<R>(&Stack::of(&q), &Stack::of(&k).transposed())?;
        let root = R::from_f64(e as f64).libm_sqrt();
        let terms = mask.map(|mask| expand_mask::<R>(&mask, &shape)).transpose()?;
        par::rows(&mut scores, s, |i, row| {
            row.iter_mut().for_each(|x| *x = x.over(root));
            if let Some(terms) = &terms {
                row.iter_mut().zip(&terms[i * s..]).for_each(|(x, &m)| *x = x.plus(m));
            }
            softmax(row);
        });
        let scores = R::data(scores);
        let (out, shape) = product::<R>(&Stack { dtype: q.dtype(), data: &scores, view: View::of(&shape) }, &Stack::of(&v))?;
        Ok(call.real_result::<R>(q.dtype(), &shape, out))
    })
}

/// What a mask adds to the scores.
fn expand_mask<R: Real>(mask: &Tensor, shape: &[usize]) -> Result<Vec<R>, Fault> {
    if mask.dtype() != DType::Bool {
        return Ok(expand(&mask.reals::<R>()?, mask.shape(), shape)?.into_owned());
    }
    let hidden = R::ZERO.minus(R::INFINITY);
    let keep = expand(mask.elements::<bool>()?, mask.shape(), shape)?;
    Ok(keep.iter().map(|&k| if k { R::ZERO } else { hidden }).collect())
}

#[cfg(test)]
mod tests {
    use super::super::super::tensor::same_bits;
    use super::super::super::testing::{Op, assert_close, f16s, f32s, i32s, noise, ramp};
    use super::*;
    use crate::ir::TensorType;

    fn mul(x: Tensor, y: Tensor, transpose_x: bool, transpose_y: bool) -> Tensor {
        Op::new("matmul")
            .with("x", x)
            .with("y", y)
            .with("transpose_x", transpose_x)
            .with("transpose_y", transpose_y)
            .one()
    }
    fn swap(x: &Tensor) -> Tensor {
        let rank = x.rank() as i64;
        let perm: Vec<i64> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
        Op::new("transpose").with("x", x.clone()).with("perm", i32s(&[perm.len()], &perm)).one()
    }

    /// torch.matmul
    #[test]
    fn batch_axes_broadcast_and_flags_transpose() {
        let out = mul(ramp(&[2, 1, 3, 2]), ramp(&[3, 4, 3]), true, true);
        let want = [
            1.1875, -1.875, -1.5, -1.125, 0.375, 1.5, 1.25, 1.0, -0.0625, 0.3125, 0.6875, 1.0625, -1.3125, -1.5625,
            -1.8125, -2.0625, 0.0625, 0.4375, 0.8125, 1.1875, 1.125, 0.875, 0.625, 0.375, -1.625, 1.1875, 1.25, 1.3125,
            1.0, 1.125, 1.25, 1.375, 0.6875, 0.75, 0.8125, 0.875, -1.9375, -1.8125, -1.6875, -1.5625, -1.8125, -1.75,
            -1.6875, -1.625, 0.625, 0.75, 0.875, 1.0,
        ];
        assert_close(&out, &[2, 3, 2, 4], &want, 0.0);
    }

    #[test]
    fn vectors_lose_their_extra_axis() {
        let (v, m) = (f32s(&[2], &[1.0, 2.0]), f32s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]));
        assert_close(&mul(v.clone(), m.clone(), false, false), &[2], &[7.0, 10.0], 0.0);
        assert_close(&mul(m, v.clone(), false, false), &[2], &[5.0, 11.0], 0.0);
        assert_close(&mul(v.clone(), v.clone(), false, false), &[], &[5.0], 0.0);
        assert!(
            Op::new("matmul").with("x", v.clone()).with("y", v).with("transpose_x", true).fault().contains("vector")
        );
    }

    #[test]
    fn integers_multiply_and_shapes_are_checked() {
        let out = mul(i32s(&[1, 2], &[3, 4]), i32s(&[2, 1], &[5, 6]), false, false);
        assert_eq!((out.dtype(), out.to_i64s()), (DType::I32, vec![39]));
        let op = Op::new("matmul").with("x", ramp(&[2, 3])).with("y", ramp(&[2, 3]));
        assert!(op.fault().contains("do not multiply"));
    }

    #[test]
    fn a_product_of_mixed_types_is_rounded_to_the_declared_one() {
        let x = f32s(&[1, 1], &[1.0 + 2f64.powi(-12)]);
        let op = Op::new("matmul").with("x", f16s(&[1, 1], &[1.0])).with("y", x);
        let of = |dtype| op.clone().declared(TensorType::fixed(dtype, &[1, 1])).one();
        assert_eq!((of(DType::F32).dtype(), of(DType::F32).to_f64s()), (DType::F32, vec![1.0 + 2f64.powi(-12)]));
        assert_eq!((of(DType::F16).dtype(), of(DType::F16).to_f64s()), (DType::F16, vec![1.0]));
        assert!(op.declared(TensorType::fixed(DType::I32, &[1, 1])).fault().contains("int32 is needed"));
    }

    #[test]
    fn operand_side_and_transposition_leave_the_bits_alone() {
        for k in [1, 16, 64, 77, 200] {
            let (x, y) = (noise(&[2, 3, k], 1), noise(&[2, k, 5], 2));
            let plain = mul(x.clone(), y.clone(), false, false);
            assert!(same_bits(&plain, &mul(swap(&x), y.clone(), true, false)));
            assert!(same_bits(&plain, &mul(x.clone(), swap(&y), false, true)));
            assert!(same_bits(&plain, &swap(&mul(y.clone(), x.clone(), true, true))));
            assert!(same_bits(&plain, &swap(&mul(swap(&y), swap(&x), false, false))));
        }
    }

    #[test]
    fn further_rows_and_broadcasting_leave_the_bits_alone() {
        let (x, y) = (noise(&[8, 4, 64], 3), noise(&[2, 64, 40], 4));
        // Grouped heads: the right side repeated four times, against rows folded into it.
        let view = View::of(&[2, 64, 40]).with_axis(1, 4, 0);
        let repeated = y.like([8, 64, 40].as_slice(), view.read(y.elements::<f32>().unwrap()).unwrap());
        let copied = mul(x.clone(), repeated, false, false);
        let folded = mul(x.reshaped(&[2, 16, 64]).unwrap(), y.clone(), false, false);
        assert!(same_bits(&copied, &folded.reshaped(&[8, 4, 40]).unwrap()));
        let five = mul(x.reshaped(&[2, 4, 4, 64]).unwrap(), y.reshaped(&[2, 1, 64, 40]).unwrap(), false, false);
        assert!(same_bits(&copied, &five.reshaped(&[8, 4, 40]).unwrap()));
        let row = f32s(&[1, 64], &x.to_f64s()[..64]);
        let first = mul(row, f32s(&[64, 40], &y.to_f64s()[..64 * 40]), false, false);
        assert_eq!(first.to_f64s(), copied.to_f64s()[..40]);
    }

    #[test]
    fn linear_is_a_product_with_a_bias_after_it() {
        let (x, w) = (noise(&[2, 3, 70], 5), noise(&[6, 70], 6));
        let out = Op::new("linear").with("x", x.clone()).with("weight", w.clone()).one();
        assert!(same_bits(&out, &mul(x, w, false, true)));
        let op = Op::new("linear")
            .with("x", f32s(&[1, 2], &[1.0, 2.0]))
            .with("weight", f32s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]));
        assert_close(&op.with("bias", f32s(&[2], &[10.0, 20.0])).one(), &[1, 2], &[15.0, 31.0], 0.0);
    }

    /// torch.einsum
    #[test]
    fn einsum_knows_two_equations_by_any_letters() {
        let run = |equation: &str, x, y| Op::new("einsum").with("values", vec![x, y]).with("equation", equation);
        let want = [2.1875, -1.375, -0.1875, 2.5, -0.25, -0.25, -0.3125, 2.5];
        for equation in ["bchw,bwhu->bchu", "nhqd , ndqk -> nhqk"] {
            assert_close(&run(equation, ramp(&[1, 2, 2, 3]), ramp(&[1, 3, 2, 2])).one(), &[1, 2, 2, 2], &want, 0.0);
        }
        assert_close(&run("chw,whr->chr", ramp(&[2, 2, 3]), ramp(&[3, 2, 2])).one(), &[2, 2, 2], &want, 0.0);
        for equation in ["bchw,bwhu->bcuh", "bchw,bwhc->bchc", "chw,whr", ""] {
            assert!(run(equation, ramp(&[1, 2, 2, 3]), ramp(&[1, 3, 2, 2])).fault().contains("not interpreted"));
        }
    }

    /// torch.nn.functional.scaled_dot_product_attention
    #[test]
    fn attention_takes_bool_and_float_masks() {
        let half = |t: Tensor| f32s(t.shape(), &t.to_f64s().iter().map(|v| v * 0.5).collect::<Vec<_>>());
        let op = || {
            let op = Op::new("scaled_dot_product_attention").with("query", ramp(&[1, 2, 2, 4]));
            op.with("key", half(ramp(&[1, 2, 3, 4]))).with("value", ramp(&[1, 2, 3, 2]))
        };
        let out = op().with("attn_mask", Tensor::bools(&[2, 3], &[true, false, true, true, true, true])).one();
        let want = [-0.8037951, 0.1281626, -0.4941242, 0.5556203, 0.3554751, -0.6445249, 0.2305082, -0.1301837];
        assert_close(&out, &[1, 2, 2, 2], &want, 1e-6);
        let out = op().with("attn_mask", f32s(&[1, 3], &[0.0, -1.0, 2.0])).one();
        let want = [-0.1233842, -0.4030191, 0.03035569, -0.4578736, -0.2045192, -0.9097227, -0.004849045, -0.9072455];
        assert_close(&out, &[1, 2, 2, 2], &want, 1e-6);
        let hidden = op().with("attn_mask", Tensor::bools(&[1, 3], &[false; 3])).one();
        assert!(hidden.to_f64s().iter().all(|v| v.is_nan()));
    }
}
