//! Matrix products and attention.

use std::borrow::Cow;

use super::super::call::{Call, with_num, with_real};
use super::super::error::Fault;
use super::super::lanes::{dot, dot_columns, softmax};
use super::super::num::{Num, Real};
use super::super::tensor::{Dims, Tensor, volume};
use super::super::view::{View, broadcast_shapes};
use super::elementwise::expand;
use crate::ir::DType;

/// Rows of x that are multiplied with one row of y while that is in the cache.
const ROW_BLOCK: usize = 16;

/// Sizes of a product of matrices.
#[derive(Clone, Copy)]
struct Sizes {
    m: usize,
    k: usize,
    n: usize,
}

/// out [m, n] = x [m, k] · y, where y is [n, k] if `transposed`, else [k, n].
fn multiply<T: Num>(x: &[T], y: &[T], out: &mut [T], Sizes { m, k, n }: Sizes, transposed: bool) {
    if !transposed {
        for (i, row) in out.chunks_mut(n.max(1)).enumerate() {
            dot_columns(&x[i * k..(i + 1) * k], y, row);
        }
        return;
    }
    for block in (0..m).step_by(ROW_BLOCK) {
        for j in 0..n {
            let y_row = &y[j * k..(j + 1) * k];
            for i in block..m.min(block + ROW_BLOCK) {
                out[i * n + j] = dot(&x[i * k..(i + 1) * k], y_row);
            }
        }
    }
}

/// The last two axes swapped, as a copy.
fn swapped<T: Num>(elements: &[T], shape: &[usize]) -> Result<Vec<T>, Fault> {
    let mut perm: Vec<usize> = (0..shape.len()).collect();
    let rank = shape.len();
    perm.swap(rank - 2, rank - 1);
    View::of(shape).permuted(&perm).read(elements)
}

/// A stack of matrices: elements and shape, rank 2 at least.
type Stack<'a, T> = (Cow<'a, [T]>, Dims);

/// The product of stacks of matrices whose leading axes broadcast; `y` is transposed if told so.
fn product<T: Num>(
    (x, x_shape): Stack<'_, T>,
    (y, y_shape): Stack<'_, T>,
    transposed: bool,
) -> Result<(Vec<T>, Dims), Fault> {
    let (x_batch, &[m, k]) = split_matrix(&x_shape)?;
    let (y_batch, &[rows, columns]) = split_matrix(&y_shape)?;
    let (y_k, n) = if transposed { (columns, rows) } else { (rows, columns) };
    if k != y_k {
        return Err(Fault::Shape(format!("shapes {x_shape:?} and {y_shape:?} do not multiply")));
    }
    let mut shape = broadcast_shapes([x_batch, y_batch])?;
    let places = |batch: &[usize]| {
        let view = View::of(batch).broadcast(&shape);
        view.ok_or_else(|| Fault::Shape("batch axes do not broadcast".into()))?.offsets()
    };
    let (x_at, y_at) = (places(x_batch)?, places(y_batch)?);
    shape.extend([m, n]);
    let mut out = vec![T::ZERO; volume(&shape)?];
    if !out.is_empty() {
        for (out, (i, j)) in out.chunks_mut(m * n).zip(x_at.into_iter().zip(y_at)) {
            multiply(&x[i * m * k..][..m * k], &y[j * k * n..][..k * n], out, Sizes { m, k, n }, transposed);
        }
    }
    Ok((out, shape))
}

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
    with_num!([x, y], T => {
        let (mut x_shape, mut y_shape) = (x.dims(), y.dims());
        if x.rank() == 1 {
            x_shape.insert(0, 1);
        }
        if y.rank() == 1 {
            y_shape.push(1);
        }
        let mut left: Stack<'_, T> = (x.numbers::<T>()?, x_shape);
        if transpose_x {
            left = transposed(left)?;
        }
        let (out, mut shape) = product(left, (y.numbers::<T>()?, y_shape), transpose_y)?;
        if y.rank() == 1 {
            shape.pop();
        }
        if x.rank() == 1 {
            shape.remove(shape.len() - if y.rank() == 1 { 1 } else { 2 });
        }
        Ok(call.result(product_dtype(call, &x, &y), &shape, out))
    })
}

fn transposed<T: Num>((elements, mut shape): Stack<'_, T>) -> Result<Stack<'static, T>, Fault> {
    let rank = shape.len();
    let copy = swapped(&elements, &shape)?;
    shape.swap(rank - 2, rank - 1);
    Ok((Cow::Owned(copy), shape))
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
    with_num!([x, weight], T => {
        let m = volume(&x.shape()[..last])?;
        let mut out = vec![T::ZERO; volume(&shape)?];
        multiply(&x.numbers::<T>()?, &weight.numbers::<T>()?, &mut out, Sizes { m, k: *d_in, n: *d_out }, true);
        if let Some(bias) = &bias {
            let bias = bias.numbers::<T>()?;
            for row in out.chunks_mut((*d_out).max(1)) {
                row.iter_mut().zip(bias.iter()).for_each(|(o, &b)| *o = o.plus(b));
            }
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
    let arranged = |shape: &[usize]| -> Dims { perm.iter().map(|&p| shape[p]).collect() };
    with_num!([x, y], T => {
        let stack = |t: &Tensor| -> Result<Stack<'static, T>, Fault> {
            let copy = View::of(t.shape()).permuted(&perm).read(&t.numbers::<T>()?)?;
            Ok((Cow::Owned(copy), arranged(t.shape())))
        };
        let (out, shape) = product(stack(x)?, stack(y)?, false)?;
        let out = View::of(&shape).permuted(&perm).read(&out)?;
        Ok(call.result(x.dtype(), &arranged(&shape), out))
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
        let (mut scores, shape) = product((q.reals::<R>()?, q.dims()), (k.reals::<R>()?, k.dims()), true)?;
        let root = R::from_f64(e as f64).sqrt();
        scores.iter_mut().for_each(|x| *x = x.over(root));
        if let Some(mask) = &mask {
            let terms = expand_mask::<R>(mask, &shape)?;
            scores.iter_mut().zip(terms.iter()).for_each(|(x, &m)| *x = x.plus(m));
        }
        scores.chunks_mut(s.max(1)).for_each(softmax);
        let (out, shape) = product((Cow::Owned(scores), shape), (v.reals::<R>()?, v.dims()), false)?;
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
