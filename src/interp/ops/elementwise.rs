//! Elementwise ops: arithmetic, comparison, logic, selection and casts, with numpy broadcasting.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::call::{Call, with_num, with_real};
use super::super::error::Fault;
use super::super::num::{Element, Num, Real};
use super::super::par;
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
        let undefined = AtomicBool::new(false);
        let out = par::zip(&xs, &ys, |&a, &b| {
            f(a, b).unwrap_or_else(|| {
                undefined.store(true, Ordering::Relaxed);
                T::ZERO
            })
        });
        if undefined.into_inner() {
            return Err(Fault::Value("an integer is divided by zero".into()));
        }
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
    let out = par::zip(&xs, &ys, |&a, &b| f(a, b));
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
        "exp2" => R::libm_exp2,
        "exp" => R::libm_exp,
        "sqrt" => R::libm_sqrt,
        "ceil" => R::libm_ceil,
        "floor" => R::libm_floor,
        "round" => R::libm_round,
        "sin" => R::libm_sin,
        "cos" => R::libm_cos,
        "tan" => R::libm_tan,
        "asin" => R::libm_asin,
        "acos" => R::libm_acos,
        "atan" => R::libm_atan,
        "sinh" => R::libm_sinh,
        "cosh" => R::libm_cosh,
        "tanh" => R::libm_tanh,
        "atanh" => R::libm_atanh,
        "erf" => R::libm_erf,
        "relu" => |x| x.larger(R::ZERO),
        "relu6" => |x| x.larger(R::ZERO).smaller(R::from_f64(6.0)),
        "sigmoid" => sigmoid,
        "silu" => |x| x.times(sigmoid(x)),
        "softplus" => |x| R::ONE.plus(R::ZERO.minus(x.abs()).libm_exp()).libm_ln().plus(x.larger(R::ZERO)),
        "softsign" => |x| x.over(R::ONE.plus(x.abs())),
        _ => return None,
    })
}

pub(super) fn sigmoid<R: Real>(x: R) -> R {
    R::ONE.over(R::ONE.plus(R::ZERO.minus(x).libm_exp()))
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
        Ok(call.real_result::<R>(x.dtype(), x.shape(), par::map(&x.reals::<R>()?, |&v| f(v))))
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
            "log" => R::libm_ln,
            "rsqrt" => |v| R::ONE.over(v.libm_sqrt()),
            _ => |v| R::ONE.over(v),
        };
        let epsilon: R = call.real_or("epsilon", default, x.dtype())?;
        Ok(call.real_result::<R>(x.dtype(), x.shape(), par::map(&x.reals::<R>()?, |&v| f(v.plus(epsilon)))))
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f16s, f32s, i32s};
    use super::*;

    #[test]
    fn integer_arithmetic_follows_coremltools() {
        let run = |kind, x: i64, y: i64| Op::new(kind).with("x", x).with("y", y).one().to_i64s()[0];
        assert_eq!(run("real_div", -7, 2), -3);
        assert_eq!(run("floor_div", -7, 2), -4);
        assert_eq!(run("mod", -7, 3), 2);
        assert_eq!(run("mod", 7, -3), -2);
        assert_eq!(run("pow", 3, 4), 81);
        assert_eq!(run("add", i64::from(i32::MAX), 1), i64::from(i32::MIN));
        assert!(Op::new("mod").with("x", 1).with("y", 0).fault().contains("divided by zero"));
    }

    #[test]
    fn operands_broadcast_but_do_not_mix_types() {
        let (x, y) = (f32s(&[2, 1], &[1.0, 2.0]), f32s(&[3], &[10.0, 20.0, 30.0]));
        let out = Op::new("add").with("x", x.clone()).with("y", y).one();
        assert_close(&out, &[2, 3], &[11.0, 21.0, 31.0, 12.0, 22.0, 32.0], 0.0);
        assert!(Op::new("add").with("x", x).with("y", f16s(&[], &[1.0])).fault().contains("fp16"));
    }

    #[test]
    fn rounding_is_half_to_even() {
        let x = f32s(&[4], &[0.5, 1.5, 2.5, -0.5]);
        assert_eq!(Op::new("round").with("x", x).one().to_f64s(), [0.0, 2.0, 2.0, 0.0]);
    }

    /// Values of torch 2 in double precision.
    #[test]
    fn unary_ops_agree_with_torch() {
        let x = f32s(&[5], &[-1.5, -0.3, 0.0, 0.7, 2.5]);
        for (kind, want) in [
            ("erf", [-0.9661051, -0.3286268, 0.0, 0.6778012, 0.999593]),
            ("sigmoid", [0.1824255, 0.4255575, 0.5, 0.6681878, 0.9241418]),
            ("silu", [-0.2736383, -0.1276672, 0.0, 0.4677314, 2.310355]),
            ("softplus", [0.2014133, 0.5543552, std::f64::consts::LN_2, 1.103186, 2.57889]),
            ("softsign", [-0.6, -0.2307692, 0.0, 0.4117647, 0.7142857]),
            ("tanh", [-0.9051483, -0.2913126, 0.0, 0.6043678, 0.9866143]),
            ("atan", [-0.9827937, -0.2914568, 0.0, 0.610726, 1.19029]),
            ("sinh", [-2.129279, -0.3045203, 0.0, 0.7585837, 6.050204]),
            ("cosh", [2.35241, 1.045339, 1.0, 1.255169, 6.132289]),
            ("exp2", [0.3535534, 0.8122524, 1.0, 1.624505, 5.656854]),
            ("relu6", [0.0, 0.0, 0.0, 0.7, 2.5]),
        ] {
            assert_close(&Op::new(kind).with("x", x.clone()).one(), &[5], &want, 1e-6);
            assert_close(&Op::new(kind).with("x", x.clone()).exact().one(), &[5], &want, 1e-6);
        }
    }

    #[test]
    fn default_epsilons_have_the_type_of_x() {
        let of = |kind, x: Tensor| Op::new(kind).with("x", x).one().to_f64s()[0];
        assert_eq!(of("rsqrt", f16s(&[], &[0.0])), f64::INFINITY);
        assert_eq!(of("rsqrt", f32s(&[], &[0.0])), 1e6);
        assert_eq!(of("log", f16s(&[], &[0.0])), f64::NEG_INFINITY);
        assert!((of("inverse", f32s(&[], &[0.0])) - 1e4).abs() < 1e-2);
        assert_eq!(of("inverse", f16s(&[], &[0.0])), 10000.0);
        let stored = Op::new("rsqrt").with("x", f16s(&[], &[0.0])).with("epsilon", 0.25).one();
        assert_eq!(stored.to_f64s(), [2.0]);
    }

    #[test]
    fn select_broadcasts_its_condition_too() {
        let cond = Tensor::bools(&[2, 1], &[true, false]);
        let out = Op::new("select").with("cond", cond).with("a", i32s(&[3], &[1, 2, 3])).with("b", 0).one();
        assert_eq!((out.shape(), out.to_i64s()), (&[2, 3][..], vec![1, 2, 3, 0, 0, 0]));
    }

    #[test]
    fn comparisons_with_nan_are_false() {
        let x = f32s(&[3], &[f64::NAN, 1.0, 2.0]);
        let run = |kind| Op::new(kind).with("x", x.clone()).with("y", f32s(&[], &[1.0])).one().to_bools();
        assert_eq!(run("greater_equal"), [false, true, true]);
        assert_eq!(run("less"), [false; 3]);
        assert_eq!(run("not_equal"), [true, false, true]);
        assert_eq!(run("equal"), [false, true, false]);
    }

    #[test]
    fn casts_name_their_target() {
        let x = f32s(&[3], &[-1.7, 0.0, 2.9]);
        let cast = |dtype| Op::new("cast").with("x", x.clone()).with("dtype", dtype);
        assert_eq!(cast("int32").one().to_i64s(), [-1, 0, 2]);
        assert_eq!(cast("bool").one().to_bools(), [true, false, true]);
        assert_eq!(cast("fp16").one().dtype(), DType::F16);
        assert!(cast("float16").fault().contains("unknown element type"));
    }

    #[test]
    fn negative_zero_survives() {
        let zero = f32s(&[], &[-0.0]);
        let bits = |t: Tensor| t.to_f64s()[0].is_sign_negative();
        assert!(bits(Op::new("mul").with("x", zero.clone()).with("y", 1.0).one()));
        assert!(!bits(Op::new("add").with("x", zero).with("y", 0.0).one()));
    }
}
