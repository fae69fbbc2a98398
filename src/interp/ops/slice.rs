//! Slices and their inverse.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::num::Element;
use super::super::tensor::{Dims, Tensor, with_element};
use super::super::view::View;

/// The bounds of one axis as the op states them.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    begin: i64,
    end: i64,
    step: i64,
    from_edge: bool,
    to_edge: bool,
}

impl Bounds {
    /// First position, number of positions and step, by numpy's rules for an axis of size n.
    fn resolve(self, n: usize) -> Result<(usize, usize, isize), Fault> {
        let Bounds { begin, end, step, from_edge, to_edge } = self;
        let size = n as i64;
        if step == 0 {
            return Err(Fault::Value("a stride is zero".into()));
        }
        let crossed = match (begin >= 0, end >= 0) {
            (true, true) => step > 0 && end < begin,
            (false, false) => step < 0 && begin < end,
            _ => false,
        };
        if crossed && !from_edge && !to_edge {
            return Err(Fault::Range(format!("slice {begin}:{end}:{step} ends before it begins")));
        }
        let (lowest, highest) = if step > 0 { (0, size) } else { (-1, size - 1) };
        let place = |at: i64| if at < 0 { at.saturating_add(size) } else { at }.clamp(lowest, highest);
        let begin = match (from_edge, step > 0) {
            (false, _) => place(begin),
            (true, true) => 0,
            (true, false) => size - 1,
        };
        let end = match (to_edge, step > 0) {
            (false, _) => place(end),
            (true, true) => size,
            (true, false) => -1,
        };
        let distance = if step > 0 { end - begin } else { begin - end };
        let len = if distance <= 0 { 0 } else { (distance as u64).div_ceil(step.unsigned_abs()) };
        Ok((if len == 0 { 0 } else { begin as usize }, len as usize, step as isize))
    }

    /// The one position that a squeezed axis keeps.
    fn squeeze(self, n: usize) -> Result<usize, Fault> {
        let begin = if self.from_edge { 0 } else { self.begin };
        let at = if begin < 0 { begin.saturating_add(n as i64) } else { begin };
        usize::try_from(at)
            .ok()
            .filter(|&at| at < n)
            .ok_or_else(|| Fault::Range(format!("index {begin} is outside an axis of {n}")))
    }
}

/// What the slicing parameters select of a view.
fn selection(call: &Call<'_>, mut view: View) -> Result<View, Fault> {
    let shape = Dims::from(view.shape());
    let rank = shape.len();
    let (begin, end) = (call.ints("begin")?, call.ints("end")?);
    let step = call.optional_ints("stride")?.unwrap_or_else(|| vec![1; rank]);
    for (name, v) in [("begin", &begin), ("end", &end), ("stride", &step)] {
        if v.len() != rank {
            return Err(Fault::Shape(format!("`{name}` has {} entries for rank {rank}", v.len())));
        }
    }
    let (from_edge, to_edge) = (call.mask("begin_mask", rank)?, call.mask("end_mask", rank)?);
    let squeezed = call.mask("squeeze_mask", rank)?;
    for i in (0..rank).rev() {
        let bounds =
            Bounds { begin: begin[i], end: end[i], step: step[i], from_edge: from_edge[i], to_edge: to_edge[i] };
        view = if squeezed[i] {
            view.sliced(i, bounds.squeeze(shape[i])?, 1, 1).without_axis(i)
        } else {
            let (start, len, step) = bounds.resolve(shape[i])?;
            view.sliced(i, start, len, step)
        };
    }
    Ok(view)
}

pub(super) fn slice_by_index(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    x.viewed(selection(call, x.view())?)
}

pub(super) fn slice_update(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, update) = (call.take("x")?, call.tensor("update")?);
    let view = selection(call, View::of(x.shape()))?;
    if update.dtype() != x.dtype() {
        return Err(Fault::dtype("update", update.dtype(), x.dtype()));
    }
    if update.shape() != view.shape() || update.rank() == 0 {
        let message = format!("update of shape {:?} for a slice of shape {:?}", update.shape(), view.shape());
        return Err(Fault::Shape(message));
    }
    with_element!(x, T => {
        let (dtype, shape) = (x.dtype(), x.dims());
        let mut out = x.into_elements::<T>()?;
        view.write(&mut out, update.elements::<T>()?);
        Ok(Tensor::new(dtype, shape, T::data(out)))
    })
}

/// `size` elements from `begin`; −1 takes all that follow.
pub(super) fn slice_by_size(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let (begin, size) = (call.ints("begin")?, call.ints("size")?);
    if begin.len() != x.rank() || size.len() != x.rank() {
        return Err(Fault::Shape(format!("begin {begin:?} and size {size:?} for rank {}", x.rank())));
    }
    let mut view = x.view();
    for (i, &n) in x.shape().iter().enumerate() {
        let start = if begin[i] < 0 { begin[i].saturating_add(n as i64) } else { begin[i] };
        let len = if size[i] == -1 { n as i64 - start } else { size[i] };
        let inside = start >= 0 && len >= 0 && start.checked_add(len).is_some_and(|end| end <= n as i64);
        if !inside {
            return Err(Fault::Range(format!("{len} elements from {start} leave an axis of {n}")));
        }
        view = view.sliced(i, if len == 0 { 0 } else { start as usize }, len as usize, 1);
    }
    x.viewed(view)
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, iota};
    use super::*;

    #[test]
    fn bounds_resolve_as_in_numpy() {
        let at =
            |begin, end, step, from_edge, to_edge| Bounds { begin, end, step, from_edge, to_edge }.resolve(5).unwrap();
        assert_eq!(at(1, 4, 1, false, false), (1, 3, 1));
        assert_eq!(at(-3, -1, 1, false, false), (2, 2, 1));
        assert_eq!(at(0, 100, 2, false, false), (0, 3, 2));
        assert_eq!(at(-100, 3, 1, false, false), (0, 3, 1));
        assert_eq!(at(7, 7, -2, true, true), (4, 3, -2));
        assert_eq!(at(3, 0, -1, false, false), (3, 3, -1));
        assert_eq!(at(-1, -4, -1, false, false), (4, 3, -1));
        assert_eq!(at(2, 2, 1, false, false).1, 0);
        assert_eq!(at(3, 0, 1, false, true), (3, 2, 1));
        for (begin, end, step) in [(3, 1, 1), (-4, -2, -1), (0, 1, 0)] {
            assert!(Bounds { begin, end, step, from_edge: false, to_edge: false }.resolve(5).is_err());
        }
        assert!(Bounds { begin: 5, end: 0, step: 1, from_edge: false, to_edge: false }.squeeze(5).is_err());
    }

    #[test]
    fn masks_override_bounds_and_squeeze_drops_axes() {
        let slice = || Op::new("slice_by_index").with("x", iota(&[3, 4]));
        let out = slice()
            .with("begin", [9, 1])
            .with("end", [9, 9])
            .with("begin_mask", [true, false])
            .with("end_mask", [true, true])
            .one();
        assert_close(&out, &[3, 3], &[1.0, 2.0, 3.0, 5.0, 6.0, 7.0, 9.0, 10.0, 11.0], 0.0);
        let out = slice().with("begin", [-1, 0]).with("end", [0, 4]).with("squeeze_mask", [true, false]).one();
        assert_close(&out, &[4], &[8.0, 9.0, 10.0, 11.0], 0.0);
        let all = slice().with("begin", [1, 2]).with("end", [0, 0]).with("squeeze_mask", [true, true]).one();
        assert_close(&all, &[], &[6.0], 0.0);
        let back = slice().with("begin", [0, 0]).with("end", [1, 0]).with("stride", [1, -2]);
        let back = back.with("begin_mask", [false, true]).with("end_mask", [false, true]).one();
        assert_close(&back, &[1, 2], &[3.0, 1.0], 0.0);
        assert!(slice().with("begin", [0]).with("end", [1]).fault().contains("rank 2"));
    }

    #[test]
    fn an_update_is_shaped_like_the_slice() {
        let update = |u: Tensor| {
            Op::new("slice_update").with("x", iota(&[2, 3])).with("update", u).with("begin", [1, 2]).with("end", [2, 0])
        };
        let op = update(f32s(&[2], &[-1.0, -2.0])).with("stride", [1, -2]).with("squeeze_mask", [true, false]);
        let out = op.with("end_mask", [false, true]).one();
        assert_close(&out, &[2, 3], &[0.0, 1.0, 2.0, -2.0, 4.0, -1.0], 0.0);
        let op = update(f32s(&[], &[-1.0])).with("squeeze_mask", [true, true]);
        assert!(op.fault().contains("update of shape"));
    }

    #[test]
    fn slices_by_size() {
        let slice = |b: [i64; 2], s: [i64; 2]| {
            Op::new("slice_by_size").with("x", iota(&[3, 4])).with("begin", b).with("size", s)
        };
        assert_close(&slice([1, -2], [1, -1]).one(), &[1, 2], &[6.0, 7.0], 0.0);
        assert_eq!(slice([0, 0], [0, 4]).one().shape(), [0, 4]);
        assert!(slice([2, 0], [2, 1]).fault().contains("leave an axis of 3"));
    }
}
