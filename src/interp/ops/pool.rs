//! Pools over one to three spatial axes.

use super::super::call::{Call, with_real};
use super::super::error::Fault;
use super::super::lanes;
use super::super::num::{Num, Real};
use super::super::tensor::{Dims, Tensor, volume};
use super::window::{Windows, positives};

/// A window to one number: the elements, with zeros for the padding, and what the sum is divided by.
type Fold<R> = fn(&[R], usize) -> R;

/// `max_pool`, `avg_pool` and `l2_pool` (√Σx²).
///
/// The padding takes part in no maximum; a window in the padding alone has the maximum −∞. It adds nothing to a sum,
/// and counts in an average unless `exclude_padding_from_average` is set. Positions beyond the padding, which `ceil_mode`
/// lets windows reach, never count. All as in PyTorch.
pub(super) fn pool(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let [batch, channels, spatial @ ..] = x.shape() else {
        return Err(Fault::Shape(format!("shape {:?} has no spatial axes", x.shape())));
    };
    if !(1..=3).contains(&spatial.len()) {
        return Err(Fault::Shape(format!("a pool over {} spatial axes", spatial.len())));
    }
    let windows = Windows::new(call, spatial, &positives(call, "kernel_sizes", spatial.len())?)?;
    let exclude = call.bool_or("exclude_padding_from_average", false)?;
    let mut shape: Dims = [*batch, *channels].as_slice().into();
    shape.extend_from_slice(&windows.output);
    let (len, inputs, taps) = (volume(&shape)?, volume(spatial)?, volume(&windows.kernel)?);
    let sources = windows.sources()?;
    with_real!([x], R => {
        let fold = fold_fn::<R>(call.kind()).ok_or(Fault::NotInterpreted)?;
        // Whether a tap in the padding is left out of the window or is a zero in it.
        let skip = call.kind() == "max_pool";
        let mut out = Vec::with_capacity(len);
        let mut window = Vec::with_capacity(taps);
        let elements = x.reals::<R>()?;
        for plane in 0..volume(&shape[..2])? {
            let plane = &elements[plane * inputs..][..inputs];
            for (o, places) in sources.chunks_exact(taps).enumerate() {
                window.clear();
                let element = |p: &Option<usize>| p.map(|p| plane[p]).or((!skip).then_some(R::ZERO));
                window.extend(places.iter().filter_map(element));
                let inside = || places.iter().flatten().count();
                out.push(fold(&window, if exclude { inside() } else { windows.extent(o) }));
            }
        }
        Ok(call.real_result::<R>(x.dtype(), &shape, out))
    })
}

fn fold_fn<R: Real>(kind: &str) -> Option<Fold<R>> {
    Some(match kind {
        "max_pool" => |x, _| lanes::max(x).unwrap_or(R::ZERO.minus(R::INFINITY)),
        "avg_pool" => |x, count| lanes::sum(x, |v| v).over(R::from_f64(count as f64)),
        "l2_pool" => |x, _| lanes::sum(x, |v| v.times(v)).libm_sqrt(),
        _ => return None,
    })
}

/// Expected values are those of torch in double precision.
#[cfg(test)]
mod tests {
    use super::super::super::tensor::same_bits;
    use super::super::super::testing::{Op, assert_close, f32s, noise, ramp};
    use super::*;

    fn pool(kind: &'static str, x: Tensor, pad_type: &str) -> Op {
        Op::new(kind).with("x", x).with("pad_type", pad_type)
    }

    #[test]
    fn the_padding_takes_part_in_no_maximum() {
        let op = pool("max_pool", ramp(&[1, 2, 3, 4]), "custom").with("kernel_sizes", [2, 2]).with("strides", [2, 3]);
        let out = op.with("pad", [1, 1, 0, 0]).with("ceil_mode", true).one();
        assert_close(&out, &[1, 2, 2, 2], &[0.5, 1.25, 0.75, 0.0, 0.5, 0.25, 1.0, 0.5], 0.0);
        let out = pool("max_pool", ramp(&[1, 1, 2, 2, 3]), "valid").with("kernel_sizes", [2, 2, 2]).one();
        assert_close(&out, &[1, 1, 1, 1, 2], &[1.25, 0.5], 0.0);
        let padding = pool("max_pool", ramp(&[1, 1, 1]), "custom").with("kernel_sizes", [1]).with("pad", [1, 0]).one();
        assert_close(&padding, &[1, 1, 2], &[f64::NEG_INFINITY, -1.25], 0.0);
    }

    #[test]
    fn an_odd_element_of_padding_goes_after_or_before() {
        let same = |pad_type: &str| {
            pool("max_pool", ramp(&[1, 1, 5]), pad_type).with("kernel_sizes", [2]).with("strides", [2]).one()
        };
        assert_close(&same("same"), &[1, 1, 3], &[0.5, 1.25, 0.25], 0.0);
        assert_close(&same("same_lower"), &[1, 1, 3], &[-1.25, 0.5, 1.25], 0.0);
    }

    #[test]
    fn averages_count_the_padding_unless_told_otherwise() {
        let average = |exclude: bool| {
            let op =
                pool("avg_pool", ramp(&[1, 2, 3, 4]), "custom").with("kernel_sizes", [2, 3]).with("strides", [1, 2]);
            op.with("pad", [1, 1, 1, 1]).with("exclude_padding_from_average", exclude).one()
        };
        let counted = [
            -0.125,
            0.2083333,
            -0.2083333,
            0.25,
            -0.125,
            -0.08333333,
            -0.04166667,
            -0.125,
            0.0,
            0.1666667,
            0.04166667,
            0.1666667,
            0.125,
            -0.1666667,
            0.08333333,
            -0.1666667,
        ];
        assert_close(&average(false), &[1, 2, 4, 2], &counted, 1e-6);
        let left_out = [
            -0.375,
            0.4166667,
            -0.3125,
            0.25,
            -0.1875,
            -0.08333333,
            -0.125,
            -0.25,
            0.0,
            0.3333333,
            0.0625,
            0.1666667,
            0.1875,
            -0.1666667,
            0.25,
            -0.3333333,
        ];
        assert_close(&average(true), &[1, 2, 4, 2], &left_out, 1e-6);
    }

    #[test]
    fn positions_beyond_the_padding_never_count() {
        let op = pool("avg_pool", ramp(&[1, 1, 6]), "custom").with("kernel_sizes", [3]).with("strides", [2]);
        let out = op.with("pad", [1, 1]).with("ceil_mode", true).one();
        assert_close(&out, &[1, 1, 4], &[-0.25, 0.4166667, 0.25, -0.375], 1e-6);
        // coremltools keeps a last window outside an axis without padding, where PyTorch drops it. It has no average.
        let op = pool("avg_pool", f32s(&[1, 1, 5], &[1.0; 5]), "valid").with("kernel_sizes", [1]).with("strides", [3]);
        assert_close(&op.with("ceil_mode", true).one(), &[1, 1, 3], &[1.0, 1.0, f64::NAN], 0.0);
    }

    #[test]
    fn lengths_of_windows() {
        let op = pool("l2_pool", ramp(&[1, 1, 6]), "valid").with("kernel_sizes", [2]).with("strides", [2]);
        assert_close(&op.one(), &[1, 1, 3], &[1.346291, 1.346291, 0.7905694], 1e-6);
        assert!(pool("avg_pool", ramp(&[1, 2]), "valid").with("kernel_sizes", [2]).fault().contains("spatial axes"));
        let wide = pool("avg_pool", ramp(&[1, 1, 2]), "valid").with("kernel_sizes", [3]);
        assert!(wide.fault().contains("does not fit"));
    }

    #[test]
    fn an_average_over_everything_is_a_mean_to_the_bit() {
        let x = noise(&[1, 3, 7, 11], 4);
        let average = pool("avg_pool", x.clone(), "valid").with("kernel_sizes", [7, 11]).one();
        let mean = Op::new("reduce_mean").with("x", x).with("axes", [2, 3]).with("keep_dims", true).one();
        assert!(same_bits(&average, &mean));
    }
}
