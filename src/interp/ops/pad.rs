//! Padding and reversal of sequences.

use super::super::call::{Call, axis};
use super::super::error::Fault;
use super::super::tensor::{Tensor, volume, with_element};
use crate::ir::DType;

/// Where the elements of a padded axis of n come from; `None` is the constant.
fn sources(mode: &str, n: usize, before: usize, after: usize) -> Result<Vec<Option<usize>>, Fault> {
    let total = n.checked_add(before).and_then(|t| t.checked_add(after)).unwrap_or(usize::MAX);
    volume(&[total])?;
    let most = match mode {
        "constant" => usize::MAX,
        "reflect" => n.saturating_sub(1),
        "replicate" if n == 0 => 0,
        "replicate" => usize::MAX,
        _ => return Err(Fault::Value(format!("there is no pad mode {mode}"))),
    };
    if before > most || after > most {
        return Err(Fault::Range(format!("{before} before and {after} after an axis of {n} in mode {mode}")));
    }
    let (n, before) = (n as i64, before as i64);
    let source = |at: i64| match mode {
        _ if (0..n).contains(&at) => Some(at as usize),
        "constant" => None,
        "replicate" => Some(at.clamp(0, n - 1) as usize),
        _ if at < 0 => Some(-at as usize),
        _ => Some((2 * (n - 1) - at) as usize),
    };
    Ok((0..total as i64).map(|i| source(i - before)).collect())
}

/// Pads the last axes, one after the other; pairs (before, after) in the order of the axes.
pub(super) fn pad(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let given = call.ints("pad")?;
    let amounts: Option<Vec<usize>> = given.iter().map(|&n| usize::try_from(n).ok()).collect();
    let pairs: Vec<(usize, usize)> = amounts
        .filter(|a| a.len() % 2 == 0 && a.len() / 2 <= x.rank())
        .map(|a| a.chunks_exact(2).map(|p| (p[0], p[1])).collect())
        .ok_or_else(|| Fault::Value(format!("`pad` is {given:?}, pairs of sizes for rank {} are needed", x.rank())))?;
    let constant = match call.optional("constant_val")? {
        Some(t) if t.len() == 1 => t.cast_in(x.dtype(), call.mode()),
        Some(_) => None,
        None => Some(zero(call, &x)?),
    };
    let constant = constant.ok_or_else(|| Fault::Value("constant_val is no number".into()))?;
    padded(&x, &pairs, &call.str_or("mode", "constant")?, &constant)
}

/// The last axes padded by pairs (before, after).
pub(super) fn padded(x: &Tensor, pairs: &[(usize, usize)], mode: &str, constant: &Tensor) -> Result<Tensor, Fault> {
    pairs.iter().zip(x.rank() - pairs.len()..).try_fold(x.clone(), |x, (&(before, after), at)| {
        remapped(&x, at, &sources(mode, x.shape()[at], before, after)?, constant)
    })
}

/// A zero that is stored as the elements of x are.
pub(super) fn zero(call: &Call<'_>, x: &Tensor) -> Result<Tensor, Fault> {
    let zero = Tensor::ints(DType::I32, &[], &[0]).cast_in(x.dtype(), call.mode());
    zero.ok_or_else(|| Fault::dtype("x", x.dtype(), "a numeric type"))
}

/// The tensor with the positions along an axis taken from elsewhere on that axis, or from a constant.
pub(super) fn remapped(x: &Tensor, at: usize, sources: &[Option<usize>], constant: &Tensor) -> Result<Tensor, Fault> {
    let mut shape = x.dims();
    let n = std::mem::replace(&mut shape[at], sources.len());
    let len = volume(&shape)?;
    let inner = volume(&shape[at + 1..])?;
    let outer = if len == 0 { 0 } else { volume(&shape[..at])? };
    with_element!(x, T => {
        let (from, [fill]) = (x.elements::<T>()?, constant.elements::<T>()?) else {
            return Err(Fault::Shape("constant_val is no scalar".into()));
        };
        let mut out: Vec<T> = Vec::with_capacity(len);
        for o in 0..outer {
            for source in sources {
                match source {
                    Some(s) => out.extend_from_slice(&from[(o * n + s) * inner..][..inner]),
                    None => out.extend(std::iter::repeat_n(fill, inner).cloned()),
                }
            }
        }
        Ok(x.like(shape, out))
    })
}

/// Reverses the first `lengths[b]` elements of sequence b.
pub(super) fn reverse_sequence(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, lengths) = (call.tensor("x")?, call.ints("lengths")?);
    let seq = axis(call.int_or("seq_axis", 0)?, x.rank())?;
    let batch = axis(call.int_or("batch_axis", 0)?, x.rank())?;
    let n = x.shape()[seq];
    if seq == batch || lengths.len() != x.shape()[batch] || lengths.iter().any(|&l| l < 0 || l > n as i64) {
        return Err(Fault::Shape(format!("lengths {lengths:?} do not fit shape {:?}", x.shape())));
    }
    if x.is_empty() {
        return Ok(x);
    }
    let (per_step, per_batch) = (volume(&x.shape()[seq + 1..])?, volume(&x.shape()[batch + 1..])?);
    let source = |i: usize| {
        let (step, len) = (i / per_step % n, lengths[i / per_batch % lengths.len()] as usize);
        if step < len { i - step * per_step + (len - 1 - step) * per_step } else { i }
    };
    with_element!(x, T => {
        let from = x.elements::<T>()?;
        Ok(x.like(x.dims(), (0..from.len()).map(|i| from[source(i)].clone()).collect()))
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, i32s, iota};

    /// Values of torch, whose pairs are in reverse order.
    #[test]
    fn modes_agree_with_torch() {
        let x = f32s(&[2, 3], &[-1.25, 0.5, -0.5, 1.25, 0.25, -0.75]);
        let pad = |mode: &str| Op::new("pad").with("x", x.clone()).with("pad", [1, 0, 2, 1]).with("mode", mode).one();
        let reflected = [
            [-0.75, 0.25, 1.25, 0.25, -0.75, 0.25],
            [-0.5, 0.5, -1.25, 0.5, -0.5, 0.5],
            [-0.75, 0.25, 1.25, 0.25, -0.75, 0.25],
        ];
        assert_close(&pad("reflect"), &[3, 6], &reflected.concat(), 0.0);
        let edge = [-1.25, -1.25, -1.25, 0.5, -0.5, -0.5];
        assert_close(&pad("replicate"), &[3, 6], &[edge, edge, [1.25, 1.25, 1.25, 0.25, -0.75, -0.75]].concat(), 0.0);
        let op = Op::new("pad").with("x", x.clone()).with("pad", [1, 0]).with("constant_val", 9.0);
        assert_close(&op.one(), &[2, 4], &[9.0, -1.25, 0.5, -0.5, 9.0, 1.25, 0.25, -0.75], 0.0);
        assert!(
            Op::new("pad").with("x", x).with("pad", [3, 0]).with("mode", "reflect").fault().contains("mode reflect")
        );
    }

    #[test]
    fn sequences_are_reversed_up_to_their_length() {
        let op = Op::new("reverse_sequence").with("x", iota(&[2, 3])).with("lengths", i32s(&[2], &[2, 3]));
        let out = op.with("seq_axis", 1).with("batch_axis", 0).one();
        assert_close(&out, &[2, 3], &[1.0, 0.0, 2.0, 5.0, 4.0, 3.0], 0.0);
    }
}
