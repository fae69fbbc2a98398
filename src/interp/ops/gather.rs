//! Reads through index tensors.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::tensor::{Dims, Tensor, volume, with_element};

/// Positions along an axis of n. A negative index counts from the end up to CoreML6 and is out of range after; any other
/// index outside the axis is an error, whether `validate_indices` asks for it or not.
pub(super) fn positions(call: &Call<'_>, indices: &Tensor, n: usize) -> Result<Vec<usize>, Fault> {
    if !indices.dtype().is_int() {
        return Err(Fault::dtype("indices", indices.dtype(), "an integer type"));
    }
    indices.elements::<i64>()?.iter().map(|&i| position(call, i, n)).collect()
}

fn position(call: &Call<'_>, index: i64, n: usize) -> Result<usize, Fault> {
    let from_start = if index < 0 && call.opset() < 7 { index.saturating_add(n as i64) } else { index };
    usize::try_from(from_start)
        .ok()
        .filter(|&i| i < n)
        .ok_or_else(|| Fault::Range(format!("index {index} is outside an axis of {n}")))
}

/// The number of leading axes that x and the indices share.
fn batch_dims(call: &Call<'_>, x: &Tensor, indices: &Tensor, most: usize) -> Result<usize, Fault> {
    let number = call.int_or("batch_dims", 0)?;
    let b = usize::try_from(number).ok().filter(|&b| b <= most && b <= x.rank() && b <= indices.rank());
    b.filter(|&b| x.shape()[..b] == indices.shape()[..b])
        .ok_or_else(|| Fault::Shape(format!("{:?} and {:?} do not share {number} axes", x.shape(), indices.shape())))
}

pub(super) fn gather(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, indices) = (call.tensor("x")?, call.tensor("indices")?);
    let at = call.axis("axis", 0, x.rank())?;
    let b = batch_dims(call, &x, &indices, at)?;
    let n = x.shape()[at];
    let shape: Dims = [&x.shape()[..at], &indices.shape()[b..], &x.shape()[at + 1..]].concat().into();
    let out_len = volume(&shape)?;
    let (batch, before, inner) = (volume(&x.shape()[..b])?, volume(&x.shape()[b..at])?, volume(&x.shape()[at + 1..])?);
    let positions = positions(call, &indices, n)?;
    with_element!(x, T => {
        let source = x.elements::<T>()?;
        let mut out: Vec<T> = Vec::with_capacity(out_len);
        if out_len > 0 {
            let per_batch = positions.len() / batch;
            for (i, chosen) in positions.chunks(per_batch).enumerate() {
                for outer in i * before..(i + 1) * before {
                    for &p in chosen {
                        out.extend_from_slice(&source[(outer * n + p) * inner..][..inner]);
                    }
                }
            }
        }
        Ok(x.like(shape, out))
    })
}

/// Where each element of a tensor of indices points to in a tensor that differs from it on one axis only.
pub(super) fn along_axis(call: &Call<'_>, shape: &[usize], indices: &Tensor, at: usize) -> Result<Vec<usize>, Fault> {
    let fits = indices.rank() == shape.len() && (0..shape.len()).all(|i| i == at || indices.shape()[i] == shape[i]);
    if !fits {
        let message = format!("indices of shape {:?} do not fit {shape:?} along axis {at}", indices.shape());
        return Err(Fault::Shape(message));
    }
    let (m, n) = (indices.shape()[at], shape[at]);
    let inner = if indices.is_empty() { 1 } else { volume(&shape[at + 1..])? };
    let positions = positions(call, indices, n)?;
    Ok(positions.iter().enumerate().map(|(i, &p)| (i / inner / m.max(1) * n + p) * inner + i % inner).collect())
}

pub(super) fn gather_along_axis(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, indices) = (call.tensor("x")?, call.tensor("indices")?);
    let at = call.axis("axis", 0, x.rank())?;
    let places = along_axis(call, x.shape(), &indices, at)?;
    with_element!(x, T => {
        let source = x.elements::<T>()?;
        Ok(x.like(indices.dims(), places.iter().map(|&p| source[p].clone()).collect()))
    })
}

/// Where each row of coordinates points to: the flat position of a block of the axes after those it covers.
pub(super) fn coordinates(call: &Call<'_>, dims: &[usize], indices: &Tensor) -> Result<Vec<usize>, Fault> {
    let k = indices.shape().last().copied().unwrap_or(0);
    let (rows, covered) = match (volume(&indices.shape()[..indices.rank().saturating_sub(1)]), dims.get(..k)) {
        (Ok(rows), Some(covered)) if indices.rank() > 0 => (rows, covered),
        _ => return Err(Fault::Shape(format!("indices of shape {:?} address {dims:?}", indices.shape()))),
    };
    if !indices.dtype().is_int() {
        return Err(Fault::dtype("indices", indices.dtype(), "an integer type"));
    }
    let all = indices.elements::<i64>()?;
    (0..rows)
        .map(|r| {
            let row = &all[r * k..(r + 1) * k];
            row.iter().zip(covered).try_fold(0usize, |at, (&i, &n)| Ok(at * n + position(call, i, n)?))
        })
        .collect()
}

pub(super) fn gather_nd(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, indices) = (call.tensor("x")?, call.tensor("indices")?);
    let b = batch_dims(call, &x, &indices, indices.rank().saturating_sub(1))?;
    let k = indices.shape().last().copied().unwrap_or(0);
    let places = coordinates(call, &x.shape()[b..], &indices)?;
    let shape: Dims = [&indices.shape()[..indices.rank() - 1], &x.shape()[b + k..]].concat().into();
    let out_len = volume(&shape)?;
    let inner = volume(&x.shape()[b + k..])?;
    let (batch, block) = (volume(&x.shape()[..b])?, volume(&x.shape()[b..])?);
    with_element!(x, T => {
        let source = x.elements::<T>()?;
        let mut out: Vec<T> = Vec::with_capacity(out_len);
        if out_len > 0 {
            let per_batch = places.len() / batch;
            for (i, &p) in places.iter().enumerate() {
                out.extend_from_slice(&source[i / per_batch * block + p * inner..][..inner]);
            }
        }
        Ok(x.like(shape, out))
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, i32s, iota};

    #[test]
    fn gather_is_numpy_take() {
        let gather = |indices| Op::new("gather").with("x", iota(&[2, 3])).with("indices", indices).with("axis", 1);
        assert_close(&gather(i32s(&[2], &[2, 0])).one(), &[2, 2], &[2.0, 0.0, 5.0, 3.0], 0.0);
        assert_close(&gather(i32s(&[], &[1])).one(), &[2], &[1.0, 4.0], 0.0);
        assert!(gather(i32s(&[1], &[3])).fault().contains("outside an axis of 3"));
        assert!(gather(i32s(&[1], &[-1])).fault().contains("outside"));
        assert_close(&gather(i32s(&[1], &[-1])).opset("CoreML6").one(), &[2, 1], &[2.0, 5.0], 0.0);
    }

    #[test]
    fn batch_axes_are_aligned() {
        let op = Op::new("gather").with("x", iota(&[2, 2, 3])).with("indices", i32s(&[2, 1], &[2, 0]));
        let out = op.with("axis", 2).with("batch_dims", 1).one();
        assert_close(&out, &[2, 2, 1], &[2.0, 5.0, 6.0, 9.0], 0.0);
    }

    #[test]
    fn gather_along_axis_is_numpy_take_along_axis() {
        let op = Op::new("gather_along_axis").with("x", iota(&[2, 3])).with("axis", 1);
        let out = op.with("indices", i32s(&[2, 2], &[2, 1, 0, 0])).one();
        assert_close(&out, &[2, 2], &[2.0, 1.0, 3.0, 3.0], 0.0);
    }

    #[test]
    fn gather_nd_takes_coordinates() {
        let out = Op::new("gather_nd").with("x", iota(&[2, 3, 2])).with("indices", i32s(&[2, 2], &[1, 2, 0, 1])).one();
        assert_close(&out, &[2, 2], &[10.0, 11.0, 2.0, 3.0], 0.0);
        let op = Op::new("gather_nd").with("x", iota(&[2, 3, 2])).with("indices", i32s(&[2, 1], &[2, 0]));
        assert_close(&op.with("batch_dims", 1).one(), &[2, 2], &[4.0, 5.0, 6.0, 7.0], 0.0);
    }
}
