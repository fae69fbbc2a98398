//! Normalisations. All divide by √(variance + ε) with the biased variance.

use super::super::call::{Call, with_real};
use super::super::error::Fault;
use super::super::lanes;
use super::super::num::{Num, Real};
use super::super::tensor::{Tensor, volume};
use super::reduce::{Rows, mean};

/// (x − mean) / √(variance + ε), in place.
fn standardise<R: Real>(row: &mut [R], epsilon: R) {
    let center = mean(row);
    row.iter_mut().for_each(|x| *x = x.minus(center));
    let variance = lanes::sum(row, |x| x.times(x)).over(R::from_f64(row.len() as f64));
    let scale = variance.plus(epsilon).sqrt();
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
        for row in elements.chunks_mut(rows.n.max(1)) {
            standardise(row, epsilon);
            scale_shift(row, |i| gamma.as_ref().map(|g| g[i]), |i| beta.as_ref().map(|b| b[i]));
        }
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
        for (i, channel) in elements.chunks_mut(inner.max(1)).enumerate() {
            let i = i % c;
            let scale = variance[i].plus(epsilon).sqrt();
            channel.iter_mut().for_each(|v| *v = v.minus(center[i]).over(scale));
            scale_shift(channel, |_| gamma.as_ref().map(|g| g[i]), |_| beta.as_ref().map(|b| b[i]));
        }
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
        for (i, channel) in elements.chunks_mut(inner.max(1)).enumerate() {
            standardise(channel, epsilon);
            scale_shift(channel, |_| gamma.as_ref().map(|g| g[i % c]), |_| beta.as_ref().map(|b| b[i % c]));
        }
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
        for row in elements.chunks_mut(n.max(1)) {
            let length = lanes::sum(row, |v| v.times(v)).plus(epsilon).sqrt();
            row.iter_mut().for_each(|v| *v = v.over(length));
        }
        Ok(call.real_result::<R>(x.dtype(), x.shape(), elements))
    })
}
