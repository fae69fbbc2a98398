//! Blocks of the plane that become channels or batch entries, and back; crops.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::tensor::{Tensor, volume, with_element};
use super::super::view::View;
use super::pad::{padded, zero};

/// [n, C, H, W].
fn four(x: &Tensor) -> Result<[usize; 4], Fault> {
    <[usize; 4]>::try_from(x.shape()).map_err(|_| Fault::Shape(format!("shape {:?} is not of rank 4", x.shape())))
}

fn positive(name: &str, n: i64) -> Result<usize, Fault> {
    let n = usize::try_from(n).ok().filter(|&n| n > 0 && n < 1 << 15);
    n.ok_or_else(|| Fault::Value(format!("`{name}` is no size of a block")))
}

fn divided(n: usize, by: usize) -> Result<usize, Fault> {
    match n % by {
        0 => Ok(n / by),
        _ => Err(Fault::Shape(format!("{n} is no multiple of {by}"))),
    }
}

/// The elements under the shape `from`, its axes permuted, under the shape `to`.
fn rearranged(x: &Tensor, from: [usize; 6], perm: [usize; 6], to: [usize; 4]) -> Result<Tensor, Fault> {
    volume(&to)?;
    let view = View::of(&from).permuted(&perm);
    with_element!(x, T => Ok(x.like(to.as_slice(), view.read(x.elements::<T>()?)?)))
}

/// `pixel_shuffle` and `depth_to_space`: f² channels become a block of f × f. PyTorch's shuffle numbers them channel by
/// channel, TensorFlow's `depth_to_space` block position by block position.
pub(super) fn to_space(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let [n, c, h, w] = four(&x)?;
    let shuffle = call.kind() == "pixel_shuffle";
    let name = if shuffle { "upscale_factor" } else { "block_size" };
    let f = positive(name, call.int(name)?)?;
    let c = divided(c, f * f)?;
    let (from, perm) = match shuffle {
        true => ([n, c, f, f, h, w], [0, 1, 4, 2, 5, 3]),
        false => ([n, f, f, c, h, w], [0, 3, 4, 1, 5, 2]),
    };
    rearranged(&x, from, perm, [n, c, h * f, w * f])
}

/// `pixel_unshuffle` and `space_to_depth`, the inverses of [`to_space`].
pub(super) fn to_depth(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let [n, c, h, w] = four(&x)?;
    let unshuffle = call.kind() == "pixel_unshuffle";
    let name = if unshuffle { "downscale_factor" } else { "block_size" };
    let f = positive(name, call.int(name)?)?;
    let (h, w) = (divided(h, f)?, divided(w, f)?);
    let perm = if unshuffle { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
    rearranged(&x, [n, c, h, f, w, f], perm, [n, c * f * f, h, w])
}

/// Two blocks and two pairs of a parameter.
fn blocks(call: &Call<'_>, pairs: &str) -> Result<([usize; 2], [usize; 4]), Fault> {
    let (block, amounts) = (call.ints("block_shape")?, call.ints(pairs)?);
    let [a, b] = block[..] else { return Err(Fault::Shape("`block_shape` does not hold two sizes".into())) };
    Ok(([positive("block_shape", a)?, positive("block_shape", b)?], sizes(pairs, &amounts)?))
}

/// N sizes.
fn sizes<const N: usize>(name: &str, given: &[i64]) -> Result<[usize; N], Fault> {
    let sizes: Option<Vec<usize>> = given.iter().map(|&n| usize::try_from(n).ok()).collect();
    let sizes = sizes.and_then(|s| <[usize; N]>::try_from(s).ok());
    sizes.ok_or_else(|| Fault::Value(format!("`{name}` is {given:?}, {N} sizes are needed")))
}

/// The plane, padded with zeros, in blocks whose positions become batch entries, as in TensorFlow.
pub(super) fn space_to_batch(call: &Call<'_>) -> Result<Tensor, Fault> {
    let ([a, b], [top, bottom, left, right]) = blocks(call, "paddings")?;
    let x = call.tensor("x")?;
    four(&x)?;
    let x = padded(&x, &[(top, bottom), (left, right)], "constant", &zero(call, &x)?)?;
    let [n, c, h, w] = four(&x)?;
    let (h, w) = (divided(h, a)?, divided(w, b)?);
    rearranged(&x, [n, c, h, a, w, b], [3, 5, 0, 1, 2, 4], [a * b * n, c, h, w])
}

/// The inverse of [`space_to_batch`], cropped.
pub(super) fn batch_to_space(call: &Call<'_>) -> Result<Tensor, Fault> {
    let ([a, b], crops) = blocks(call, "crops")?;
    let x = call.tensor("x")?;
    let [n, c, h, w] = four(&x)?;
    let n = divided(n, a * b)?;
    cropped(&rearranged(&x, [a, b, n, c, h, w], [2, 3, 4, 0, 5, 1], [n, c, h * a, w * b])?, crops)
}

/// The plane of the last two axes without the margins (top, bottom, left, right).
pub(super) fn crop(call: &Call<'_>) -> Result<Tensor, Fault> {
    let [top, bottom] = sizes("crop_height", &call.ints("crop_height")?)?;
    let [left, right] = sizes("crop_width", &call.ints("crop_width")?)?;
    cropped(&call.tensor("x")?, [top, bottom, left, right])
}

fn cropped(x: &Tensor, [top, bottom, left, right]: [usize; 4]) -> Result<Tensor, Fault> {
    let kept = |n: usize, before: usize, after: usize| n.checked_sub(before)?.checked_sub(after);
    let [.., h, w] = x.shape()[..] else {
        return Err(Fault::Shape(format!("shape {:?} has no plane", x.shape())));
    };
    let (Some(rows), Some(columns)) = (kept(h, top, bottom), kept(w, left, right)) else {
        return Err(Fault::Range(format!("margins are wider than a plane of {h} by {w}")));
    };
    let at = x.rank() - 2;
    let view = View::of(x.shape()).sliced(at, top, rows, 1).sliced(at + 1, left, columns, 1);
    with_element!(x, T => Ok(x.like(view.shape(), view.read(x.elements::<T>()?)?)))
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, iota};

    /// Values of torch for the shuffles, of the documentation of TensorFlow for `depth_to_space`.
    #[test]
    fn blocks_become_channels_in_two_orders() {
        let shuffled = Op::new("pixel_shuffle").with("x", iota(&[1, 8, 1, 1])).with("upscale_factor", 2).one();
        assert_close(&shuffled, &[1, 2, 2, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 0.0);
        let spread = Op::new("depth_to_space").with("x", iota(&[1, 8, 1, 1])).with("block_size", 2).one();
        assert_close(&spread, &[1, 2, 2, 2], &[0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0], 0.0);
        let unshuffled = Op::new("pixel_unshuffle").with("x", iota(&[1, 1, 2, 4])).with("downscale_factor", 2).one();
        assert_close(&unshuffled, &[1, 4, 1, 2], &[0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0], 0.0);
        let back = Op::new("space_to_depth").with("x", spread).with("block_size", 2).one();
        assert_close(&back, &[1, 8, 1, 1], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 0.0);
        let odd = Op::new("space_to_depth").with("x", iota(&[1, 1, 2, 3])).with("block_size", 2);
        assert!(odd.fault().contains("3 is no multiple of 2"));
    }

    #[test]
    fn blocks_become_batch_entries_and_margins_come_and_go() {
        let given = |name, amounts: [i64; 4], x| {
            let kind = if name == "crops" { "batch_to_space" } else { "space_to_batch" };
            Op::new(kind).with("x", x).with("block_shape", [1, 2]).with(name, amounts).one()
        };
        let batches = given("paddings", [0, 0, 1, 0], iota(&[1, 1, 2, 3]));
        assert_close(&batches, &[2, 1, 2, 2], &[0.0, 1.0, 0.0, 4.0, 0.0, 2.0, 3.0, 5.0], 0.0);
        assert_close(&given("crops", [0, 0, 1, 0], batches), &[1, 1, 2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0.0);
        let crop =
            |h: [i64; 2]| Op::new("crop").with("x", iota(&[1, 3, 3])).with("crop_height", h).with("crop_width", [0, 1]);
        assert_close(&crop([1, 1]).one(), &[1, 1, 2], &[3.0, 4.0], 0.0);
        assert!(crop([2, 2]).fault().contains("wider than a plane of 3 by 3"));
    }
}
