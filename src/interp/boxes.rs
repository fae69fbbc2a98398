//! Parts of tensors, for whoever keeps state outside of a function.

use super::Mode;
use super::error::Fault;
use super::tensor::{Tensor, volume, with_element};
use super::view::View;

impl Tensor {
    /// Tensors of one element type, one behind the other along axis 0.
    pub(crate) fn joined(parts: &[Tensor]) -> Result<Tensor, Fault> {
        let parts = alike(parts);
        let first = parts.first().filter(|t| t.rank() > 0).ok_or_else(|| Fault::Shape("nothing to join".into()))?;
        let mut shape = first.dims();
        shape[0] = 0;
        for t in &parts {
            if t.dtype() != first.dtype() || t.shape().get(1..) != first.shape().get(1..) {
                return Err(Fault::Shape(format!("{t} does not continue {first}")));
            }
            shape[0] = shape[0].saturating_add(t.shape()[0]);
        }
        let len = volume(&shape)?;
        with_element!(first, T => {
            let mut elements: Vec<T> = Vec::with_capacity(len);
            for t in &parts {
                elements.extend_from_slice(t.elements::<T>()?);
            }
            Ok(first.like(shape, elements))
        })
    }

    /// `count` rows of axis 0, from row `first` on.
    pub(crate) fn rows(&self, first: usize, count: usize) -> Result<Tensor, Fault> {
        let mut shape = self.dims();
        let have = shape.first().copied().unwrap_or(0);
        if first.checked_add(count).is_none_or(|end| end > have) {
            return Err(Fault::Range(format!("{count} rows from {first} leave an axis of {have}")));
        }
        let row = volume(&shape[1..])?;
        shape[0] = count;
        with_element!(self, T => {
            let elements = self.elements::<T>()?;
            Ok(self.like(shape, elements[first * row..(first + count) * row].to_vec()))
        })
    }

    /// The tensor with a box of it replaced, that begins at `begin` and has the shape of `content`.
    pub(crate) fn with_box(&self, begin: &[i64], content: &Tensor) -> Result<Tensor, Fault> {
        let [target, content] = &alike(&[self.clone(), content.clone()])[..] else { return Ok(self.clone()) };
        if content.dtype() != target.dtype() || content.rank() != target.rank() || begin.len() != target.rank() {
            return Err(Fault::Shape(format!("{content} is no box of {target}")));
        }
        let mut view = View::of(target.shape());
        for (axis, (&at, &len)) in begin.iter().zip(content.shape()).enumerate() {
            let have = target.shape()[axis];
            let inside = usize::try_from(at).ok().filter(|at| at.checked_add(len).is_some_and(|end| end <= have));
            let at = inside.ok_or_else(|| Fault::Range(format!("{len} elements from {at} leave an axis of {have}")))?;
            view = view.sliced(axis, at, len, 1);
        }
        with_element!(target, T => {
            let mut elements = target.elements::<T>()?.to_vec();
            view.write(&mut elements, content.elements::<T>()?);
            Ok(target.like(target.dims(), elements))
        })
    }
}

/// The tensors with floats in one width.
fn alike(tensors: &[Tensor]) -> Vec<Tensor> {
    match tensors.iter().any(Tensor::is_wide) {
        true => tensors.iter().map(|t| Mode::Exact.admit(t)).collect(),
        false => tensors.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, f32s, i32s, iota};
    use super::*;

    #[test]
    fn what_is_joined_comes_apart_again() {
        let (a, b) = (f32s(&[1, 2], &[1.0, 2.0]), f32s(&[2, 2], &[3.0, 4.0, 5.0, 6.0]));
        let whole = Tensor::joined(&[a, Mode::Exact.admit(&b)]).unwrap();
        assert_close(&whole, &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.0);
        assert_close(&whole.rows(1, 2).unwrap(), &[2, 2], &[3.0, 4.0, 5.0, 6.0], 0.0);
        assert!(whole.rows(2, 2).is_err() && f32s(&[], &[1.0]).rows(0, 1).is_err());
        for bad in [&[][..], &[f32s(&[], &[1.0])], &[iota(&[1, 2]), iota(&[1, 3])], &[iota(&[1]), i32s(&[1], &[1])]] {
            assert!(Tensor::joined(bad).is_err());
        }
    }

    #[test]
    fn boxes_are_replaced_only_inside() {
        let old = iota(&[2, 3]);
        let content = f32s(&[2, 1], &[8.0, 9.0]);
        assert_close(&old.with_box(&[0, 2], &content).unwrap(), &[2, 3], &[0.0, 1.0, 8.0, 3.0, 4.0, 9.0], 0.0);
        for begin in [&[0, 3][..], &[1, 0], &[-1, 0], &[0]] {
            assert!(old.with_box(begin, &content).is_err(), "{begin:?}");
        }
        assert!(old.with_box(&[0, 0], &i32s(&[1, 1], &[1])).is_err());
    }
}
