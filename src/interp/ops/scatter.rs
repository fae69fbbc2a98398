//! Writes through index tensors.

use super::super::call::{Call, Computed, with_num};
use super::super::error::Fault;
use super::super::tensor::{Dims, Tensor, volume};
use super::gather::{along_axis, coordinates, positions};

/// How an update joins what is there.
fn mode_fn<T: Computed>(mode: &str) -> Option<fn(T, T) -> Option<T>> {
    Some(match mode {
        "update" => |_, new| Some(new),
        "add" => |old, new| Some(old.plus(new)),
        "sub" => |old, new| Some(old.minus(new)),
        "mul" => |old, new| Some(old.times(new)),
        "div" => T::divided,
        "max" => |old, new| Some(old.larger(new)),
        "min" => |old, new| Some(old.smaller(new)),
        _ => return None,
    })
}

/// Joins blocks of `updates` into `data` at the given block numbers, in order: the last of equal ones wins an `update`.
/// The result is rounded once, after the last update.
fn apply(call: &Call<'_>, data: &Tensor, updates: &Tensor, places: &[usize], block: usize) -> Result<Tensor, Fault> {
    let mode = call.str_or("mode", "add")?;
    if updates.dtype() != data.dtype() {
        return Err(Fault::dtype("updates", updates.dtype(), data.dtype()));
    }
    with_num!([data, updates], T => {
        let f = mode_fn::<T>(&mode).ok_or_else(|| Fault::Value(format!("there is no scatter mode {mode}")))?;
        let mut out = data.numbers::<T>()?.into_owned();
        let updates = updates.numbers::<T>()?;
        for (&place, update) in places.iter().zip(updates.chunks(block.max(1))) {
            for (old, &new) in out[place * block..][..block].iter_mut().zip(update) {
                *old = f(*old, new).ok_or_else(|| Fault::Value("an integer is divided by zero".into()))?;
            }
        }
        Ok(call.result(data.dtype(), data.shape(), out))
    })
}

fn expect_shape(updates: &Tensor, shape: &[usize]) -> Result<(), Fault> {
    if updates.shape() == shape {
        return Ok(());
    }
    Err(Fault::Shape(format!("updates have shape {:?}, {shape:?} is needed", updates.shape())))
}

/// Slices along an axis.
pub(super) fn scatter(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (data, indices, updates) = (call.tensor("data")?, call.tensor("indices")?, call.tensor("updates")?);
    let at = call.axis("axis", 0, data.rank())?;
    let shape: Dims = [&data.shape()[..at], indices.shape(), &data.shape()[at + 1..]].concat().into();
    expect_shape(&updates, &shape)?;
    let n = data.shape()[at];
    let positions = positions(call, &indices, n)?;
    let outer = if updates.is_empty() { 0 } else { volume(&data.shape()[..at])? };
    let places: Vec<usize> = (0..outer).flat_map(|o| positions.iter().map(move |&p| o * n + p)).collect();
    apply(call, &data, &updates, &places, volume(&data.shape()[at + 1..])?)
}

/// Single elements along an axis.
pub(super) fn scatter_along_axis(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (data, indices, updates) = (call.tensor("data")?, call.tensor("indices")?, call.tensor("updates")?);
    let at = call.axis("axis", 0, data.rank())?;
    expect_shape(&updates, indices.shape())?;
    apply(call, &data, &updates, &along_axis(call, data.shape(), &indices, at)?, 1)
}

/// Blocks at coordinates.
pub(super) fn scatter_nd(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (data, indices, updates) = (call.tensor("data")?, call.tensor("indices")?, call.tensor("updates")?);
    let places = coordinates(call, data.shape(), &indices)?;
    let k = indices.shape().last().copied().unwrap_or(0);
    let shape: Dims = [&indices.shape()[..indices.rank() - 1], &data.shape()[k..]].concat().into();
    expect_shape(&updates, &shape)?;
    apply(call, &data, &updates, &places, volume(&data.shape()[k..])?)
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, i32s, iota};

    #[test]
    fn scatter_adds_by_default_and_knows_all_modes() {
        let scatter = || {
            let op = Op::new("scatter").with("data", f32s(&[3], &[4.0, 5.0, 6.0])).with("indices", i32s(&[2], &[2, 0]));
            op.with("updates", f32s(&[2], &[2.0, 8.0]))
        };
        assert_close(&scatter().one(), &[3], &[12.0, 5.0, 8.0], 0.0);
        for (mode, want) in [
            ("update", [8.0, 5.0, 2.0]),
            ("sub", [-4.0, 5.0, 4.0]),
            ("mul", [32.0, 5.0, 12.0]),
            ("div", [0.5, 5.0, 3.0]),
            ("max", [8.0, 5.0, 6.0]),
            ("min", [4.0, 5.0, 2.0]),
        ] {
            assert_close(&scatter().with("mode", mode).one(), &[3], &want, 0.0);
        }
    }

    #[test]
    fn scatter_writes_slices_along_any_axis() {
        let op = Op::new("scatter").with("data", iota(&[2, 3])).with("indices", i32s(&[1], &[1])).with("axis", 1);
        let out = op.with("updates", f32s(&[2, 1], &[10.0, 20.0])).with("mode", "update").one();
        assert_close(&out, &[2, 3], &[0.0, 10.0, 2.0, 3.0, 20.0, 5.0], 0.0);
    }

    #[test]
    fn scatter_along_axis_and_nd() {
        let op = Op::new("scatter_along_axis").with("data", iota(&[2, 2])).with("indices", i32s(&[1, 2], &[1, 0]));
        assert_close(&op.with("updates", f32s(&[1, 2], &[10.0, 20.0])).one(), &[2, 2], &[0.0, 21.0, 12.0, 3.0], 0.0);
        let op = Op::new("scatter_nd").with("data", iota(&[2, 2])).with("indices", i32s(&[2, 1], &[1, 1]));
        let out = op.with("updates", f32s(&[2, 2], &[10.0, 20.0, 1.0, 2.0])).one();
        assert_close(&out, &[2, 2], &[0.0, 1.0, 13.0, 25.0], 0.0);
    }
}
