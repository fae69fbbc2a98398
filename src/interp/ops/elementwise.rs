//! Elementwise ops: arithmetic, comparison, logic, selection and casts, with numpy broadcasting.

use std::borrow::Cow;

use super::super::call::{Call, with_num, with_real};
use super::super::error::Fault;
use super::super::num::{Element, Num, Real};
use super::super::tensor::{Tensor, with_element};
use super::super::view::{View, broadcast_shapes};
use crate::ir::DType;

/// The elements of `t` broadcast to `shape`.
pub(super) fn expand<'a, T: Element>(
    elements: &'a [T],
    from: &[usize],
    shape: &[usize],
) -> Result<Cow<'a, [T]>, Fault> {
    if from == shape {
        return Ok(Cow::Borrowed(elements));
    }
    let view = View::of(from).broadcast(shape);
    let view = view.ok_or_else(|| Fault::Shape(format!("shape {from:?} does not broadcast to {shape:?}")))?;
    Ok(Cow::Owned(view.read(elements)?))
}

type Binary<T> = fn(T, T) -> Option<T>;

/// Two numbers to one; `None` from the function is an integer division by zero.
pub(super) fn binary_fn<T: Num>(kind: &str) -> Option<Binary<T>> {
    Some(match kind {
        "add" => |x, y| Some(x.plus(y)),
        "sub" => |x, y| Some(x.minus(y)),
        "mul" => |x, y| Some(x.times(y)),
        "maximum" => |x, y| Some(x.larger(y)),
        "minimum" => |x, y| Some(x.smaller(y)),
        "real_div" => T::divided,
        "floor_div" => T::floor_divided,
        "mod" => T::modulo,
        "pow" => |x, y| Some(x.power(y)),
        _ => return None,
    })
}

pub(super) fn binary(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, y, shape) = operands(call)?;
    with_num!([x, y], T => {
        let f = binary_fn::<T>(call.kind()).ok_or(Fault::NotInterpreted)?;
        let (xs, ys) = (x.numbers::<T>()?, y.numbers::<T>()?);
        let (xs, ys) = (expand(&xs, x.shape(), &shape)?, expand(&ys, y.shape(), &shape)?);
        let out: Option<Vec<T>> = xs.iter().zip(ys.iter()).map(|(&a, &b)| f(a, b)).collect();
        let out = out.ok_or_else(|| Fault::Value("an integer is divided by zero".into()))?;
        Ok(call.result(x.dtype(), &shape, out))
    })
}

/// Two numbers to a truth value. Comparisons with NaN are false, except `not_equal`.
pub(super) fn comparison_fn<T: Num>(kind: &str) -> Option<fn(T, T) -> bool> {
    Some(match kind {
        "equal" => |x, y| x == y,
        "not_equal" => |x, y| x != y,
        "less" => |x, y| x < y,
        "less_equal" => |x, y| x <= y,
        "greater" => |x, y| x > y,
        "greater_equal" => |x, y| x >= y,
        _ => return None,
    })
}

pub(super) fn comparison(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, y, shape) = operands(call)?;
    with_num!([x, y], T => {
        let f = comparison_fn::<T>(call.kind()).ok_or(Fault::NotInterpreted)?;
        let (xs, ys) = (x.numbers::<T>()?, y.numbers::<T>()?);
        zip(&xs, &ys, &x, &y, &shape, f)
    })
}

/// Two truth values to one.
pub(super) fn logical_fn(kind: &str) -> Option<fn(bool, bool) -> bool> {
    Some(match kind {
        "logical_and" => |x, y| x & y,
        "logical_or" => |x, y| x | y,
        "logical_xor" => |x, y| x ^ y,
        _ => return None,
    })
}

pub(super) fn logical(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, y, shape) = operands(call)?;
    let f = logical_fn(call.kind()).ok_or(Fault::NotInterpreted)?;
    zip(x.elements::<bool>()?, y.elements::<bool>()?, &x, &y, &shape, f)
}

fn zip<T: Element + Copy>(
    xs: &[T],
    ys: &[T],
    x: &Tensor,
    y: &Tensor,
    shape: &[usize],
    f: fn(T, T) -> bool,
) -> Result<Tensor, Fault> {
    let (xs, ys) = (expand(xs, x.shape(), shape)?, expand(ys, y.shape(), shape)?);
    let out = xs.iter().zip(ys.iter()).map(|(&a, &b)| f(a, b)).collect();
    Ok(Tensor::new(DType::Bool, shape, bool::data(out)))
}

/// The operands of a binary op, of one element type, and the shape they broadcast to.
fn operands(call: &Call<'_>) -> Result<(Tensor, Tensor, super::Dims), Fault> {
    let (x, y) = (call.tensor("x")?, call.tensor("y")?);
    if x.dtype() != y.dtype() {
        return Err(Fault::dtype("y", y.dtype(), format!("{}, as x is,", x.dtype())));
    }
    let shape = broadcast_shapes([x.shape(), y.shape()])?;
    super::volume(&shape)?;
    Ok((x, y, shape))
}

pub(super) fn logical_not(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    Ok(x.like(x.dims(), x.elements::<bool>()?.iter().map(|b| !b).collect()))
}

/// `cond ? a : b`, all three broadcast.
pub(super) fn select(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (cond, a, b) = (call.tensor("cond")?, call.tensor("a")?, call.tensor("b")?);
    if a.dtype() != b.dtype() {
        return Err(Fault::dtype("b", b.dtype(), format!("{}, as a is,", a.dtype())));
    }
    let shape = broadcast_shapes([cond.shape(), a.shape(), b.shape()])?;
    super::volume(&shape)?;
    with_element!(a, T => {
        let cs = expand(cond.elements::<bool>()?, cond.shape(), &shape)?;
        let xs = expand(a.elements::<T>()?, a.shape(), &shape)?;
        let ys = expand(b.elements::<T>()?, b.shape(), &shape)?;
        let out = cs.iter().zip(xs.iter().zip(ys.iter())).map(|(&c, (x, y))| if c { x } else { y }.clone());
        Ok(a.like(shape, out.collect()))
    })
}

/// Truncates toward zero from float to integer; `x != 0` to bool.
pub(super) fn cast(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let dtype = call.dtype_or("dtype", x.dtype())?;
    if dtype == x.dtype() {
        return Ok(x);
    }
    x.cast_in(dtype, call.mode()).ok_or_else(|| Fault::dtype("x", x.dtype(), "a number"))
}

/// One number to one.
pub(super) fn unary_fn<R: Real>(kind: &str) -> Option<fn(R) -> R> {
    Some(match kind {
        "abs" => R::abs,
        "sign" => |x| match x {
            x if x > R::ZERO => R::ONE,
            x if x < R::ZERO => R::ZERO.minus(R::ONE),
            x if x.is_nan() => x,
            _ => R::ZERO,
        },
        "square" => |x| x.times(x),
        "exp2" => R::exp2,
        "exp" => R::exp,
        "sqrt" => R::sqrt,
        "ceil" => R::ceil,
        "floor" => R::floor,
        "round" => R::round,
        "sin" => R::sin,
        "cos" => R::cos,
        "tan" => R::tan,
        "asin" => R::asin,
        "acos" => R::acos,
        "atan" => R::atan,
        "sinh" => R::sinh,
        "cosh" => R::cosh,
        "tanh" => R::tanh,
        "atanh" => R::atanh,
        "erf" => R::erf,
        "relu" => |x| x.larger(R::ZERO),
        "relu6" => |x| x.larger(R::ZERO).smaller(R::from_f64(6.0)),
        "sigmoid" => sigmoid,
        "silu" => |x| x.times(sigmoid(x)),
        "softplus" => |x| R::ONE.plus(R::ZERO.minus(x.abs()).exp()).ln().plus(x.larger(R::ZERO)),
        "softsign" => |x| x.over(R::ONE.plus(x.abs())),
        _ => return None,
    })
}

pub(super) fn sigmoid<R: Real>(x: R) -> R {
    R::ONE.over(R::ONE.plus(R::ZERO.minus(x).exp()))
}

/// The ops of [`unary_fn`] that also take integers.
fn int_unary_fn(kind: &str) -> Option<fn(i64) -> i64> {
    Some(match kind {
        "abs" => Num::abs,
        "sign" => i64::signum,
        "square" => |x| x.times(x),
        "exp2" => |x| 2.power(x),
        _ => return None,
    })
}

pub(super) fn unary(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    if x.dtype().is_int() {
        let f = int_unary_fn(call.kind()).ok_or_else(|| Fault::dtype("x", x.dtype(), "a float type"))?;
        return Ok(call.result(x.dtype(), x.shape(), x.elements::<i64>()?.iter().map(|&v| f(v)).collect()));
    }
    with_real!([x], R => {
        let f = unary_fn::<R>(call.kind()).ok_or(Fault::NotInterpreted)?;
        Ok(call.real_result::<R>(x.dtype(), x.shape(), x.reals::<R>()?.iter().map(|&v| f(v)).collect()))
    })
}

/// `log`, `rsqrt` and `inverse`: an epsilon in the type of x is added first. Its default vanishes in fp16 for the first
/// two.
pub(super) fn with_epsilon(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let default = match call.kind() {
        "log" => 1e-45,
        "rsqrt" => 1e-12,
        _ => 1e-4,
    };
    with_real!([x], R => {
        let f: fn(R) -> R = match call.kind() {
            "log" => R::ln,
            "rsqrt" => |v| R::ONE.over(v.sqrt()),
            _ => |v| R::ONE.over(v),
        };
        let epsilon: R = call.real_or("epsilon", default, x.dtype())?;
        Ok(call.real_result::<R>(x.dtype(), x.shape(), x.reals::<R>()?.iter().map(|&v| f(v.plus(epsilon))).collect()))
    })
}
