//! Activations with parameters.

use super::super::call::{Call, with_num, with_real};
use super::super::error::Fault;
use super::super::num::{Num, Real};
use super::super::par;
use super::super::tensor::Tensor;
use super::super::view::View;
use super::elementwise::sigmoid;

/// x, alpha and beta to the result. Ops without a beta ignore it.
pub(super) fn parametric_fn<R: Real>(kind: &str) -> Option<fn(R, R, R) -> R> {
    Some(match kind {
        "clip" => |x, alpha, beta| x.larger(alpha).smaller(beta),
        "clamped_relu" => |x, alpha, beta| beta.smaller(if x >= R::ZERO { x } else { alpha.times(x) }),
        "linear_activation" => |x, alpha, beta| alpha.times(x).plus(beta),
        "scaled_tanh" => |x, alpha, beta| alpha.times(beta.times(x).libm_tanh()),
        "sigmoid_hard" => |x, alpha, beta| alpha.times(x).plus(beta).larger(R::ZERO).smaller(R::ONE),
        "softplus_parametric" => |x, alpha, beta| alpha.times(R::ONE.plus(beta.times(x).libm_exp()).libm_ln()),
        "leaky_relu" | "prelu" => |x, alpha, _| if x < R::ZERO { alpha.times(x) } else { x },
        "elu" => |x, alpha, _| if x < R::ZERO { alpha.times(x.libm_exp().minus(R::ONE)) } else { x },
        "thresholded_relu" => |x, alpha, _| if x >= alpha { x } else { R::ZERO },
        _ => return None,
    })
}

pub(super) fn parametric(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    with_real!([x], R => {
        let f = parametric_fn::<R>(call.kind()).ok_or(Fault::NotInterpreted)?;
        let alpha = parameter::<R>(call, "alpha", &x)?;
        let beta = if call.has("beta") { parameter::<R>(call, "beta", &x)? } else { alpha.clone() };
        let out = x.reals::<R>()?.iter().zip(alpha.iter().zip(beta)).map(|(&v, (&a, b))| f(v, a, b)).collect();
        Ok(call.real_result::<R>(x.dtype(), x.shape(), out))
    })
}

/// A scalar, or a vector over axis 1, spread over the elements of x.
fn parameter<R: Real>(call: &Call<'_>, name: &str, x: &Tensor) -> Result<Vec<R>, Fault> {
    let given = call.tensor(name)?;
    if given.len() == 1 {
        return Ok(vec![call.real::<R>(name, x.dtype())?; x.len()]);
    }
    if given.rank() != 1 || x.shape().get(1) != Some(&given.len()) {
        return Err(Fault::Shape(format!(
            "`{name}` of shape {:?} is not one per channel of {:?}",
            given.shape(),
            x.shape()
        )));
    }
    let mut per_channel = vec![1; x.rank() - 1];
    per_channel[0] = given.len();
    let view = View::of(&per_channel).broadcast(x.shape());
    view.ok_or_else(|| Fault::Shape(format!("`{name}` does not broadcast")))?.read(&given.reals::<R>()?)
}

/// max(x, alpha).
pub(super) fn threshold(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, alpha) = (call.tensor("x")?, call.tensor("alpha")?);
    with_num!([x, alpha], T => {
        let [alpha] = alpha.numbers::<T>()?[..] else { return Err(Fault::Shape("alpha is no scalar".into())) };
        Ok(call.result(x.dtype(), x.shape(), x.numbers::<T>()?.iter().map(|&v| v.larger(alpha)).collect()))
    })
}

pub(super) fn gelu(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let mode = call.str_or("mode", "EXACT")?;
    with_real!([x], R => {
        let f = gelu_fn::<R>(&mode).ok_or_else(|| Fault::Value(format!("there is no gelu mode {mode}")))?;
        Ok(call.real_result::<R>(x.dtype(), x.shape(), par::map(&x.reals::<R>()?, |&v| f(v))))
    })
}

fn gelu_fn<R: Real>(mode: &str) -> Option<fn(R) -> R> {
    Some(match mode {
        "EXACT" => |x| {
            half::<R>().times(x).times(R::ONE.plus(x.times(R::from_f64(std::f64::consts::FRAC_1_SQRT_2)).libm_erf()))
        },
        "TANH_APPROXIMATION" => |x| {
            let cube = x.times(x).times(x).times(R::from_f64(0.044715));
            let inner = R::from_f64((2.0 / std::f64::consts::PI).sqrt()).times(x.plus(cube));
            half::<R>().times(x).times(R::ONE.plus(inner.libm_tanh()))
        },
        "SIGMOID_APPROXIMATION" => |x| x.times(sigmoid(x.times(R::from_f64(1.702)))),
        _ => return None,
    })
}

fn half<R: Real>() -> R {
    R::from_f64(0.5)
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, i32s};
    use super::*;

    fn x() -> Tensor {
        f32s(&[5], &[-1.5, -0.3, 0.0, 0.7, 2.5])
    }

    /// Values of torch 2 in double precision, and of coremltools at 1.
    #[test]
    fn gelu_has_three_forms() {
        let gelu = |mode: &str, x| Op::new("gelu").with("x", x).with("mode", mode).one();
        let want = [-0.1002108, -0.1146266, 0.0, 0.5306254, 2.484476];
        assert_close(&gelu("EXACT", x()), &[5], &want, 1e-6);
        let want = [-0.1004284, -0.1146291, 0.0, 0.5305701, 2.484916];
        assert_close(&gelu("TANH_APPROXIMATION", x()), &[5], &want, 1e-6);
        for (mode, want) in
            [("EXACT", 0.8413448), ("TANH_APPROXIMATION", 0.841192), ("SIGMOID_APPROXIMATION", 0.8457958)]
        {
            assert_close(&gelu(mode, f32s(&[], &[1.0])), &[], &[want], 1e-6);
        }
        assert_close(&Op::new("gelu").with("x", f32s(&[], &[1.0])).one(), &[], &[0.8413448], 1e-6);
    }

    #[test]
    fn parametric_activations() {
        let run = |kind, alpha: f64, beta: Option<f64>| {
            let op = Op::new(kind).with("x", x()).with("alpha", alpha);
            match beta {
                Some(beta) => op.with("beta", beta),
                None => op,
            }
            .one()
        };
        assert_close(&run("elu", 1.0, None), &[5], &[-0.7768698, -0.2591818, 0.0, 0.7, 2.5], 1e-6);
        assert_close(&run("leaky_relu", 0.1, None), &[5], &[-0.15, -0.03, 0.0, 0.7, 2.5], 1e-6);
        assert_close(&run("clip", -1.0, Some(1.0)), &[5], &[-1.0, -0.3, 0.0, 0.7, 1.0], 1e-6);
        assert_close(&run("clamped_relu", 2.0, Some(1.0)), &[5], &[-3.0, -0.6, 0.0, 0.7, 1.0], 1e-6);
        assert_close(&run("sigmoid_hard", 0.5, Some(0.5)), &[5], &[0.0, 0.35, 0.5, 0.85, 1.0], 1e-6);
        assert_close(&run("linear_activation", 2.0, Some(1.0)), &[5], &[-2.0, 0.4, 1.0, 2.4, 6.0], 1e-6);
        assert_close(&run("thresholded_relu", 0.5, None), &[5], &[0.0, 0.0, 0.0, 0.7, 2.5], 1e-6);
    }

    #[test]
    fn alpha_may_differ_by_channel() {
        let x = f32s(&[1, 2, 2], &[-1.0, 1.0, -1.0, 1.0]);
        let out = Op::new("prelu").with("x", x).with("alpha", f32s(&[2], &[0.5, 0.25])).one();
        assert_close(&out, &[1, 2, 2], &[-0.5, 1.0, -0.25, 1.0], 0.0);
    }

    #[test]
    fn threshold_takes_integers() {
        let out = Op::new("threshold").with("x", i32s(&[3], &[-2, 0, 5])).with("alpha", 1).one();
        assert_eq!(out.to_i64s(), [1, 1, 5]);
    }
}
