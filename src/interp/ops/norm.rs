//! Normalisations. All divide by √(variance + ε) with the biased variance.

use super::super::call::{Call, with_real};
use super::super::error::Fault;
use super::super::lanes;
use super::super::num::{Num, Real};
use super::super::par;
use super::super::tensor::{Tensor, volume};
use super::reduce::{Rows, mean};

/// (x − mean) / √(variance + ε), in place.
fn standardise<R: Real>(row: &mut [R], epsilon: R) {
    let center = mean(row);
    row.iter_mut().for_each(|x| *x = x.minus(center));
    let variance = lanes::sum(row, |x| x.times(x)).over(R::from_f64(row.len() as f64));
    let scale = variance.plus(epsilon).libm_sqrt();
    row.iter_mut().for_each(|x| *x = x.over(scale));
}

/// `n` numbers of an optional parameter.
fn vector<R: Real>(call: &Call<'_>, name: &str, n: usize) -> Result<Option<Vec<R>>, Fault> {
    match call.optional(name)? {
        None => Ok(None),
        Some(t) if t.len() == n => Ok(Some(t.reals::<R>()?.into_owned())),
        Some(t) => Err(Fault::Shape(format!("`{name}` of shape {:?} does not hold {n} numbers", t.shape()))),
    }
}

/// x·gamma + beta, where they are given.
fn scale_shift<R: Real>(row: &mut [R], gamma: impl Fn(usize) -> Option<R>, beta: impl Fn(usize) -> Option<R>) {
    for (i, x) in row.iter_mut().enumerate() {
        let scaled = gamma(i).map_or(*x, |g| x.times(g));
        *x = beta(i).map_or(scaled, |b| scaled.plus(b));
    }
}

/// gamma and beta have the normalised sizes, in ascending order of the axes.
pub(super) fn layer_norm(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let axes = call.axes("axes", x.rank())?.unwrap_or_else(|| (0..x.rank()).collect());
    let rows = Rows::over(x.shape(), &axes)?;
    with_real!([x], R => {
        let epsilon: R = call.real_or("epsilon", 1e-5, x.dtype())?;
        let (gamma, beta) = (vector::<R>(call, "gamma", rows.n)?, vector::<R>(call, "beta", rows.n)?);
        let mut elements = rows.gather(x.reals::<R>()?)?.into_owned();
        par::rows(&mut elements, rows.n, |_, row| {
            standardise(row, epsilon);
            scale_shift(row, |i| gamma.as_ref().map(|g| g[i]), |i| beta.as_ref().map(|b| b[i]));
        });
        Ok(call.real_result::<R>(x.dtype(), x.shape(), rows.scatter(elements)))
    })
}

/// The channels and the elements of each, of a tensor [n, C, …].
fn channels(x: &Tensor) -> Result<(usize, usize), Fault> {
    match x.shape() {
        [_, c, spatial @ ..] => Ok((*c, volume(spatial)?)),
        shape => Err(Fault::Shape(format!("shape {shape:?} has no channel axis"))),
    }
}

/// gamma·(x − mean) / √(variance + ε) + beta with given statistics of each channel.
pub(super) fn batch_norm(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let (c, inner) = channels(&x)?;
    with_real!([x], R => {
        let epsilon: R = call.real_or("epsilon", 1e-5, x.dtype())?;
        let required = |name: &str| {
            vector::<R>(call, name, c)?.ok_or_else(|| Fault::Missing(format!("parameter `{name}`")))
        };
        let (center, variance) = (required("mean")?, required("variance")?);
        let (gamma, beta) = (vector::<R>(call, "gamma", c)?, vector::<R>(call, "beta", c)?);
        let mut elements = x.reals::<R>()?.into_owned();
        par::rows(&mut elements, inner, |i, channel| {
            let i = i % c;
            let scale = variance[i].plus(epsilon).libm_sqrt();
            channel.iter_mut().for_each(|v| *v = v.minus(center[i]).over(scale));
            scale_shift(channel, |_| gamma.as_ref().map(|g| g[i]), |_| beta.as_ref().map(|b| b[i]));
        });
        Ok(call.real_result::<R>(x.dtype(), x.shape(), elements))
    })
}

/// Each channel of each batch entry normalised over its spatial axes.
pub(super) fn instance_norm(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let (c, inner) = channels(&x)?;
    with_real!([x], R => {
        let epsilon: R = call.real_or("epsilon", 1e-5, x.dtype())?;
        let (gamma, beta) = (vector::<R>(call, "gamma", c)?, vector::<R>(call, "beta", c)?);
        let mut elements = x.reals::<R>()?.into_owned();
        par::rows(&mut elements, inner, |i, channel| {
            standardise(channel, epsilon);
            scale_shift(channel, |_| gamma.as_ref().map(|g| g[i % c]), |_| beta.as_ref().map(|b| b[i % c]));
        });
        Ok(call.real_result::<R>(x.dtype(), x.shape(), elements))
    })
}

/// x / √(Σx² + ε) over the last three axes.
pub(super) fn l2_norm(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let first = x.rank().checked_sub(3).ok_or_else(|| Fault::Shape(format!("rank {} is below 3", x.rank())))?;
    let n = volume(&x.shape()[first..])?;
    with_real!([x], R => {
        let epsilon: R = call.real_or("epsilon", 1e-6, x.dtype())?;
        let mut elements = x.reals::<R>()?.into_owned();
        par::rows(&mut elements, n, |_, row| {
            let length = lanes::sum(row, |v| v.times(v)).plus(epsilon).libm_sqrt();
            row.iter_mut().for_each(|v| *v = v.over(length));
        });
        Ok(call.real_result::<R>(x.dtype(), x.shape(), elements))
    })
}

/// x / (k + alpha·mean)^beta, where the mean is that of x² over `size` channels around each, zeros outside. An even
/// size reaches one further below, as in PyTorch.
pub(super) fn local_response_norm(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let (c, inner) = channels(&x)?;
    let size = call.int("size")?;
    let size = usize::try_from(size).ok().filter(|&n| n > 0 && n < 1 << 16);
    let size = size.ok_or_else(|| Fault::Value("`size` is no number of channels".into()))?;
    with_real!([x], R => {
        let (alpha, beta): (R, R) = (call.real_or("alpha", 1e-4, x.dtype())?, call.real_or("beta", 0.75, x.dtype())?);
        let k: R = call.real_or("k", 1.0, x.dtype())?;
        let elements = x.reals::<R>()?;
        let mut around = vec![R::ZERO; size];
        let normalised = |i: usize| {
            let channel = i / inner % c;
            for (j, v) in around.iter_mut().enumerate() {
                let other = (channel + j).checked_sub(size / 2).filter(|&o| o < c);
                *v = other.map_or(R::ZERO, |o| elements[i - channel * inner + o * inner]);
            }
            let mean = lanes::sum(&around, |v| v.times(v)).over(R::from_f64(size as f64));
            elements[i].over(k.plus(alpha.times(mean)).power(beta))
        };
        Ok(call.real_result::<R>(x.dtype(), x.shape(), (0..elements.len()).map(normalised).collect()))
    })
}

/// Expected values are those of torch in double precision.
#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, ramp};
    use super::*;

    fn shifted(n: usize, by: f64) -> Tensor {
        f32s(&[n], &ramp(&[n]).to_f64s().iter().map(|v| v + by).collect::<Vec<_>>())
    }

    #[test]
    fn layer_norm_over_the_last_or_other_axes() {
        let op = Op::new("layer_norm").with("x", ramp(&[2, 3, 4])).with("axes", [-1]);
        let out = op.with("gamma", ramp(&[4])).with("beta", shifted(4, 1.0)).with("epsilon", 1e-5).one();
        let want = [
            1.391321, 1.762611, 0.7626114, 3.891321, -0.4999968, 0.800009, -0.199991, 2.000003, 0.6536143, 2.263052,
            0.3795181, 0.9447794, -0.4999968, 0.800009, -0.199991, 2.000003, 0.6536143, 2.263052, 0.3795181, 0.9447794,
            -1.555221, 1.379518, 1.263052, 3.153614,
        ];
        assert_close(&out, &[2, 3, 4], &want, 2e-6);
        let out = Op::new("layer_norm").with("x", ramp(&[2, 3, 4])).with("axes", [2, 0]).with("epsilon", 1e-3).one();
        let want = [
            -1.737366, 0.3776883, -0.8309143, 1.28414, 0.3887321, -0.9934264, 1.425351, 0.04319245, -0.9363121,
            1.248416, 0.0, -1.248416, 0.3776883, -0.8309143, 1.28414, 0.07553766, -0.9934264, 1.425351, 0.04319245,
            -1.338966, 1.248416, 0.0, -1.248416, 0.9363121,
        ];
        assert_close(&out, &[2, 3, 4], &want, 2e-6);
    }

    #[test]
    fn batch_norm_uses_given_statistics() {
        let variance = ramp(&[3]).to_f64s().iter().map(|v| v.abs() + 0.5).collect::<Vec<_>>();
        let op = Op::new("batch_norm")
            .with("x", ramp(&[2, 3, 4]))
            .with("mean", ramp(&[3]))
            .with("variance", f32s(&[3], &variance));
        let out = op.with("gamma", shifted(3, 2.0)).with("beta", ramp(&[3])).one();
        let want = [
            -1.25, -0.2578461, -0.8247912, 0.1673627, -0.1249969, -2.624984, 1.749994, -0.7499938, -1.249996, 1.374991,
            -0.1250019, -1.624994, -0.2578461, -0.8247912, 0.1673627, -0.3995824, -2.624984, 1.749994, -0.7499938,
            -3.249981, 1.374991, -0.1250019, -1.624994, 0.9999925,
        ];
        assert_close(&out, &[2, 3, 4], &want, 2e-6);
    }

    #[test]
    fn instance_norm_is_per_channel_and_entry() {
        let op = Op::new("instance_norm").with("x", ramp(&[2, 3, 4]));
        let out = op.with("gamma", shifted(3, 2.0)).with("beta", ramp(&[3])).one();
        let want = [
            -2.234793,
            -0.8560829,
            -1.643917,
            -0.2652072,
            0.9999936,
            -2.999955,
            3.999955,
            6.399877e-06,
            -1.584337,
            1.789156,
            -0.1385543,
            -2.066265,
            -1.100002,
            -2.299987,
            -0.2000134,
            -1.399998,
            -1.307229,
            4.31526,
            1.10241,
            -2.110441,
            1.066265,
            -0.8614457,
            -2.789156,
            0.5843371,
        ];
        assert_close(&out, &[2, 3, 4], &want, 3e-6);
    }

    #[test]
    fn l2_norm_spans_three_axes() {
        let out = Op::new("l2_norm").with("x", ramp(&[2, 3, 4])).one();
        let want = [-0.3168621, 0.1267448, -0.1267448, 0.3168621, 0.06337242];
        assert_close(&f32s(&[5], &out.to_f64s()[..5]), &[5], &want, 1e-6);
    }

    #[test]
    fn local_response_looks_at_channels_around() {
        let op = Op::new("local_response_norm").with("x", ramp(&[1, 4, 2])).with("size", 2).with("alpha", 0.5);
        let want = [-0.7752753, 0.3577709, -0.3026373, 0.7565933, 0.1775554, -0.4407971, 0.6528692, 0.0];
        assert_close(&op.with("k", 1.5).one(), &[1, 4, 2], &want, 1e-6);
        let out = Op::new("local_response_norm").with("x", ramp(&[1, 4, 1])).with("size", 3).one();
        assert_close(&out, &[1, 4, 1], &[-1.249943, 0.4999742, -0.4999742, 1.249943], 1e-6);
    }
}
