//! Resampling of the last axes, on grids that the parameters of each op choose.

use super::super::call::{Call, with_real};
use super::super::error::Fault;
use super::super::num::Real;
use super::super::tensor::{Tensor, volume};
use super::pad::{remapped, zero};
use crate::ir::DType;

/// How the positions of the result lie on the axis that is sampled.
#[derive(Clone, Copy, PartialEq)]
enum Grid {
    /// Both ends are kept; a single position lies at the first element.
    StrictAlignCorners,
    /// Both ends are kept; a single position lies in the middle.
    AlignCorners,
    /// i·n/m.
    Default,
    /// (i + ½)·max(1, n − 1)/m.
    OffsetCorners,
    /// (i + ½)·n/m − ½: elements are intervals.
    UnalignCorners,
}

impl Grid {
    fn named(name: &str) -> Result<Grid, Fault> {
        Ok(match name {
            "STRICT_ALIGN_CORNERS" => Grid::StrictAlignCorners,
            "ALIGN_CORNERS" => Grid::AlignCorners,
            "DEFAULT" => Grid::Default,
            "OFFSET_CORNERS" => Grid::OffsetCorners,
            "UNALIGN_CORNERS" => Grid::UnalignCorners,
            _ => return Err(Fault::Value(format!("there is no sampling mode {name}"))),
        })
    }

    /// Where position i of m lies on an axis of n, both positive.
    fn at(self, i: usize, n: usize, m: usize) -> f64 {
        let (i, n, m) = (i as f64, n as f64, m as f64);
        let last = n - 1.0;
        let point = match self {
            Grid::AlignCorners if m == 1.0 => last / 2.0,
            Grid::StrictAlignCorners | Grid::AlignCorners if m == 1.0 => 0.0,
            Grid::StrictAlignCorners | Grid::AlignCorners => i * last / (m - 1.0),
            Grid::Default => i * n / m,
            Grid::OffsetCorners => (i + 0.5) * last.max(1.0) / m,
            Grid::UnalignCorners => (i + 0.5) * n / m - 0.5,
        };
        point.clamp(0.0, last)
    }

    /// The element that position i of m takes when it takes one: the nearest, the later of two as near. The default
    /// grid rounds down.
    fn nearest(self, i: usize, n: usize, m: usize) -> usize {
        let half = if self == Grid::Default { 0.0 } else { 0.5 };
        (libm::floor(self.at(i, n, m) + half) as usize).min(n - 1)
    }
}

/// A size to resample to, which needs at least one element on either side.
fn check(n: usize, m: usize) -> Result<(), Fault> {
    match n == 0 || m == 0 {
        true => Err(Fault::Shape(format!("an axis of {n} cannot be resized to {m}"))),
        false => volume(&[m]).map(|_| ()),
    }
}

/// An axis sampled at the nearest elements.
fn nearest(call: &Call<'_>, x: &Tensor, axis: usize, m: usize, grid: Grid) -> Result<Tensor, Fault> {
    let n = x.shape()[axis];
    check(n, m)?;
    let sources: Vec<_> = (0..m).map(|i| Some(grid.nearest(i, n, m))).collect();
    remapped(x, axis, &sources, &zero(call, x)?)
}

/// Rows (last axes) of `inner` elements along an axis of n become m, each between two neighbours: lo + t·(hi − lo) as
/// lo·(1 − t) + hi·t. A neighbour without weight takes no part, be it infinite.
fn linear<R: Real>(x: &[R], n: usize, inner: usize, m: usize, grid: Grid) -> Result<Vec<R>, Fault> {
    check(n, m)?;
    let mut out = Vec::with_capacity(volume(&[x.len() / n, m])?);
    for block in x.chunks_exact((n * inner).max(1)) {
        for i in 0..m {
            let point = grid.at(i, n, m);
            let (lo, t) = (libm::floor(point) as usize, point - libm::floor(point));
            let row = |at: usize| &block[at * inner..][..inner];
            if t == 0.0 {
                out.extend_from_slice(row(lo));
                continue;
            }
            let (keep, take) = (R::from_f64(1.0 - t), R::from_f64(t));
            out.extend(row(lo).iter().zip(row(lo + 1)).map(|(a, b)| a.times(keep).plus(b.times(take))));
        }
    }
    Ok(out)
}

/// The last axes resampled to the given sizes, the last one first.
fn resampled(call: &Call<'_>, x: &Tensor, sizes: &[usize], grid: Grid, interpolate: bool) -> Result<Tensor, Fault> {
    let first = x.rank().checked_sub(sizes.len());
    let first = first.ok_or_else(|| Fault::Shape(format!("shape {:?} has no {} axes", x.shape(), sizes.len())))?;
    if !interpolate {
        return sizes.iter().enumerate().try_fold(x.clone(), |x, (i, &m)| nearest(call, &x, first + i, m, grid));
    }
    with_real!([x], R => {
        let (mut elements, mut shape) = (x.reals::<R>()?.into_owned(), x.dims());
        for (i, &m) in sizes.iter().enumerate().rev() {
            let inner = volume(&shape[first + i + 1..])?;
            elements = linear(&elements, shape[first + i], inner, m, grid)?;
            shape[first + i] = m;
        }
        Ok(call.real_result::<R>(x.dtype(), &shape, elements))
    })
}

/// The last two sizes of x.
fn plane(x: &Tensor) -> Result<[usize; 2], Fault> {
    match x.shape() {
        [_, .., h, w] => Ok([*h, *w]),
        shape => Err(Fault::Shape(format!("shape {shape:?} has no plane behind another axis"))),
    }
}

/// The sizes of the plane times the scale factors, rounded down. A fractional product is one of fp32.
fn scaled(call: &Call<'_>, x: &Tensor) -> Result<[usize; 2], Fault> {
    let mut sizes = plane(x)?;
    for (size, name) in sizes.iter_mut().zip(["scale_factor_height", "scale_factor_width"]) {
        let factor: f64 = call.real_or(name, 1.0, DType::F32)?;
        *size = libm::floorf(factor as f32 * *size as f32) as usize;
    }
    Ok(sizes)
}

fn targets(call: &Call<'_>) -> Result<[usize; 2], Fault> {
    let size = |name| {
        let given = call.int_or(name, 1)?;
        usize::try_from(given).map_err(|_| Fault::Value(format!("`{name}` is {given}")))
    };
    Ok([size("target_size_height")?, size("target_size_width")?])
}

/// Each position takes the element in whose interval it begins: ⌊i·n/m⌋. The sizes decide, not the factors, as
/// `upsample_bilinear` documents it.
pub(super) fn upsample_nearest_neighbor(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    resampled(call, &x, &scaled(call, &x)?, Grid::Default, false)
}

/// Each position takes the element in whose interval its centre lies: ⌊(i + ½)·n/m⌋. The documentation does not say so;
/// it is what coremltools emits the op for.
pub(super) fn resize_nearest_neighbor(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    plane(&x)?;
    resampled(call, &x, &targets(call)?, Grid::UnalignCorners, false)
}

pub(super) fn upsample_bilinear(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let align = call.bool_or("align_corners", true)?;
    let grid = match (align, call.bool_or("half_pixel_centers", !align)?) {
        (true, false) => Grid::StrictAlignCorners,
        (false, true) => Grid::UnalignCorners,
        (false, false) => Grid::Default,
        (true, true) => return Err(Fault::Value("corners and centres of pixels cannot both be aligned".into())),
    };
    resampled(call, &x, &scaled(call, &x)?, grid, true)
}

pub(super) fn resize_bilinear(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    plane(&x)?;
    resampled(call, &x, &targets(call)?, Grid::named(&call.str_or("sampling_mode", "DEFAULT")?)?, true)
}

/// The last `resized_dims` sizes become those at the end of `shape`; 0 keeps one.
pub(super) fn resize(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, sizes, count) = (call.tensor("x")?, call.ints("shape")?, call.int("resized_dims")?);
    let grid = Grid::named(&call.str_or("sampling_mode", "DEFAULT")?)?;
    let interpolate = match call.str_or("interpolation_mode", "LINEAR")?.as_str() {
        "LINEAR" => true,
        "NEAREST_NEIGHBOR" => false,
        mode => return Err(Fault::Value(format!("there is no interpolation mode {mode}"))),
    };
    let skipped = usize::try_from(count).ok().and_then(|n| sizes.len().checked_sub(n));
    let first = skipped.and_then(|s| Some((s, x.rank().checked_sub(sizes.len() - s)?)));
    let (skipped, first) =
        first.ok_or_else(|| Fault::Value(format!("{count} of {} sizes for {:?}", sizes.len(), x.shape())))?;
    let size = |(&given, &own): (&i64, &usize)| if given == 0 { Ok(own) } else { usize::try_from(given) };
    let sizes = sizes[skipped..].iter().zip(&x.shape()[first..]).map(size).collect::<Result<Vec<_>, _>>();
    let sizes = sizes.map_err(|_| Fault::Value("`shape` has a negative size".into()))?;
    resampled(call, &x, &sizes, grid, interpolate)
}

/// Expected values are those of torch, and those of the documentation of `resize_bilinear`.
#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, iota, ramp};

    #[test]
    fn sampling_modes_are_grids() {
        let sampled = |mode: &str, m: i64| {
            let op = Op::new("resize_bilinear").with("x", f32s(&[1, 1, 2], &[0.0, 1.0])).with("sampling_mode", mode);
            op.with("target_size_width", m).one()
        };
        for (mode, five) in [
            ("UNALIGN_CORNERS", [0.0, 0.1, 0.5, 0.9, 1.0]),
            ("STRICT_ALIGN_CORNERS", [0.0, 0.25, 0.5, 0.75, 1.0]),
            ("ALIGN_CORNERS", [0.0, 0.25, 0.5, 0.75, 1.0]),
            ("DEFAULT", [0.0, 0.4, 0.8, 1.0, 1.0]),
            ("OFFSET_CORNERS", [0.1, 0.3, 0.5, 0.7, 0.9]),
        ] {
            assert_close(&sampled(mode, 5), &[1, 1, 5], &five, 1e-7);
        }
        assert_close(&sampled("ALIGN_CORNERS", 1), &[1, 1, 1], &[0.5], 0.0);
        assert_close(&sampled("STRICT_ALIGN_CORNERS", 1), &[1, 1, 1], &[0.0], 0.0);
    }

    #[test]
    fn bilinear_factors() {
        let upsampled = |align: bool| {
            let op = Op::new("upsample_bilinear").with("x", ramp(&[1, 2, 3])).with("scale_factor_height", 1.5);
            op.with("scale_factor_width", 1.5).with("align_corners", align)
        };
        let aligned =
            [-1.25, -0.08333333, 0.1666667, -0.5, 0.0, 0.25, 0.04166667, -0.625, 1.25, 0.5833333, -0.08333333, -0.75];
        assert_close(&upsampled(true).one(), &[1, 3, 4], &aligned, 1e-6);
        let centred = [-1.25, -0.15625, 0.125, -0.5, 0.0, 0.234375, 0.0, -0.625, 1.25, 0.625, -0.125, -0.75];
        assert_close(&upsampled(false).one(), &[1, 3, 4], &centred, 1e-6);
        assert!(upsampled(true).with("half_pixel_centers", true).fault().contains("cannot both be aligned"));
    }

    #[test]
    fn the_nearest_element_is_that_where_the_position_begins_or_has_its_centre() {
        let out = Op::new("upsample_nearest_neighbor").with("x", ramp(&[1, 2, 3])).with("scale_factor_height", 1.5);
        let (a, b) = ([-1.25, -1.25, 0.5, 0.5, -0.5], [1.25, 1.25, 0.25, 0.25, -0.75]);
        let out = out.with("scale_factor_width", 1.7).one();
        assert_close(&out, &[1, 3, 5], &[a, a, b].concat(), 0.0);
        let op = Op::new("resize_nearest_neighbor").with("x", ramp(&[1, 2, 3])).with("target_size_height", 3);
        let (a, b) = ([-1.25, -1.25, 0.5, -0.5, -0.5], [1.25, 1.25, 0.25, -0.75, -0.75]);
        assert_close(&op.with("target_size_width", 5).one(), &[1, 3, 5], &[a, b, b].concat(), 0.0);
    }

    #[test]
    fn resize_takes_sizes_from_the_end_and_keeps_zeros() {
        let resize = |sizes: [i64; 3], count: i64| {
            let op = Op::new("resize").with("x", iota(&[1, 2, 2])).with("shape", sizes).with("resized_dims", count);
            op.with("interpolation_mode", "NEAREST_NEIGHBOR")
        };
        assert_close(&resize([7, 0, 4], 2).one(), &[1, 2, 4], &[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0], 0.0);
        assert_close(&resize([7, 9, 1], 1).exact().one(), &[1, 2, 1], &[0.0, 2.0], 0.0);
        assert!(resize([1, 1, -1], 1).fault().contains("negative"));
        assert!(resize([1, 1, 1], 4).fault().contains("4 of 3 sizes"));
    }

    #[test]
    fn a_neighbour_without_weight_takes_no_part() {
        let op = Op::new("resize_bilinear").with("x", f32s(&[1, 1, 2], &[1.0, f64::INFINITY]));
        assert_close(&op.with("target_size_width", 2).one(), &[1, 1, 2], &[1.0, f64::INFINITY], 0.0);
    }
}
