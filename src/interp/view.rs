//! Strided views: every op that only moves data reads or writes through one.

use smallvec::SmallVec;

use super::error::Fault;
use super::num::Element;
use super::par;
use super::tensor::{Dims, volume};

/// Which elements of a row-major buffer an array consists of: element (i₀, i₁, …) lies at `offset + Σ iₖ·strideₖ`.
#[derive(Clone, Debug)]
pub(crate) struct View {
    shape: Dims,
    strides: SmallVec<[isize; 5]>,
    offset: isize,
}

impl View {
    /// The whole of a row-major buffer.
    pub fn of(shape: &[usize]) -> View {
        let mut strides: SmallVec<[isize; 5]> = SmallVec::from_elem(1, shape.len());
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i].wrapping_mul(shape[i] as isize);
        }
        View { shape: shape.into(), strides, offset: 0 }
    }

    /// Sizes, outermost axis first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The offset of the first element, where the elements lie one behind the other.
    pub fn run(&self) -> Option<usize> {
        let axes = self.merged_axes();
        let one_run = self.shape.contains(&0) || matches!(axes[..], [] | [(_, 1)]);
        one_run.then_some(self.offset as usize)
    }

    /// The same elements in the same order under another shape of the same volume; `None` where that is no view.
    pub fn reshaped(&self, shape: &[usize]) -> Option<View> {
        let mut view = View { offset: self.offset, ..View::of(shape) };
        if shape.contains(&0) {
            return Some(view);
        }
        let mut axes = self.merged_axes().into_iter();
        // What is left of the axis that the sizes are taken from, outermost first.
        let (mut left, mut stride) = (1, 1);
        for (i, &n) in shape.iter().enumerate().filter(|&(_, &n)| n != 1) {
            if left == 1 {
                (left, stride) = axes.next()?;
            }
            if left % n != 0 {
                return None;
            }
            left /= n;
            view.strides[i] = stride * left as isize;
        }
        (left == 1 && axes.next().is_none()).then_some(view)
    }

    /// Only the first `n` axes, at position 0 of the others.
    pub fn leading(&self, n: usize) -> View {
        View { shape: self.shape[..n].into(), strides: self.strides[..n].into(), offset: self.offset }
    }

    /// Axis i of the result is axis `perm[i]`; `perm` is a permutation.
    pub fn permuted(&self, perm: &[usize]) -> View {
        View {
            shape: perm.iter().map(|&p| self.shape[p]).collect(),
            strides: perm.iter().map(|&p| self.strides[p]).collect(),
            offset: self.offset,
        }
    }

    /// `len` positions of an axis, from `start` in steps of `step`, all of which exist.
    pub fn sliced(mut self, axis: usize, start: usize, len: usize, step: isize) -> View {
        self.offset = self.offset.wrapping_add(self.strides[axis].wrapping_mul(start as isize));
        self.shape[axis] = len;
        self.strides[axis] = self.strides[axis].wrapping_mul(step);
        self
    }

    /// A new axis at `axis`.
    pub fn with_axis(mut self, axis: usize, len: usize, stride: isize) -> View {
        self.shape.insert(axis, len);
        self.strides.insert(axis, stride);
        self
    }

    /// Without an axis, at its position 0.
    pub fn without_axis(mut self, axis: usize) -> View {
        self.shape.remove(axis);
        self.strides.remove(axis);
        self
    }

    /// The distance between neighbours along an axis.
    pub fn stride(&self, axis: usize) -> isize {
        self.strides[axis]
    }

    /// Broadcast to `shape` by numpy's rule, right-aligned; `None` when it does not fit.
    pub fn broadcast(&self, shape: &[usize]) -> Option<View> {
        let lead = shape.len().checked_sub(self.shape.len())?;
        let mut strides: SmallVec<[isize; 5]> = SmallVec::from_elem(0, shape.len());
        for (i, (&n, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            match shape[lead + i] {
                m if m == n => strides[lead + i] = stride,
                _ if n == 1 => {}
                _ => return None,
            }
        }
        Some(View { shape: shape.into(), strides, offset: self.offset })
    }

    /// The viewed elements in row-major order.
    pub fn read<T: Element>(&self, source: &[T]) -> Result<Vec<T>, Fault> {
        let mut out = vec![T::default(); volume(&self.shape)?];
        match self.shape.iter().position(|&n| n != 1) {
            Some(axis) if !out.is_empty() => {
                let inner = out.len() / self.shape[axis];
                par::rows(&mut out, inner, |i, part| self.clone().sliced(axis, i, 1, 1).copy(source, part));
            }
            _ => self.copy(source, &mut out),
        }
        Ok(out)
    }

    /// [`View::read`] into a buffer of as many elements.
    fn copy<T: Clone>(&self, source: &[T], out: &mut [T]) {
        let mut at = 0;
        self.runs(|start, len, stride| {
            let run = &mut out[at..at + len];
            at += len;
            match stride {
                1 => run.clone_from_slice(&source[start as usize..start as usize + len]),
                0 => run.fill(source[start as usize].clone()),
                _ => {
                    let mut place = start;
                    for o in run {
                        *o = source[place as usize].clone();
                        place += stride;
                    }
                }
            }
        });
    }

    /// Replaces the viewed elements by `source`, which holds as many in row-major order.
    pub fn write<T: Clone>(&self, target: &mut [T], source: &[T]) {
        let mut at = 0;
        self.runs(|start, len, stride| {
            let run = &source[at..at + len];
            at += len;
            if stride == 1 {
                target[start as usize..start as usize + len].clone_from_slice(run);
            } else {
                for (i, v) in run.iter().enumerate() {
                    target[(start + i as isize * stride) as usize] = v.clone();
                }
            }
        });
    }

    /// The offset of every element in row-major order.
    pub fn offsets(&self) -> Result<Vec<usize>, Fault> {
        let mut out = Vec::with_capacity(volume(&self.shape)?);
        self.runs(|start, len, stride| out.extend((0..len as isize).map(|i| (start + i * stride) as usize)));
        Ok(out)
    }

    /// Calls back with (start, length, stride) of runs that together are the elements in row-major order.
    fn runs(&self, mut f: impl FnMut(isize, usize, isize)) {
        if self.shape.contains(&0) {
            return;
        }
        let axes = self.merged_axes();
        let Some((&(len, stride), outer)) = axes.split_last() else {
            return f(self.offset, 1, 1);
        };
        let mut index: SmallVec<[usize; 5]> = SmallVec::from_elem(0, outer.len());
        let mut start = self.offset;
        loop {
            f(start, len, stride);
            let mut axis = outer.len();
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                let (n, s) = outer[axis];
                index[axis] += 1;
                start += s;
                if index[axis] < n {
                    break;
                }
                start -= s * n as isize;
                index[axis] = 0;
            }
        }
    }

    /// The axes with those of size one dropped and neighbours that form one stride merged.
    fn merged_axes(&self) -> SmallVec<[(usize, isize); 5]> {
        let mut axes: SmallVec<[(usize, isize); 5]> = SmallVec::new();
        for (&n, &stride) in self.shape.iter().zip(&self.strides).filter(|&(&n, _)| n != 1) {
            match axes.last_mut() {
                Some(last) if last.1 == stride * n as isize => *last = (last.0 * n, stride),
                _ => axes.push((n, stride)),
            }
        }
        axes
    }
}

/// The broadcast of shapes by numpy's rule.
pub(crate) fn broadcast_shapes<'a>(shapes: impl IntoIterator<Item = &'a [usize]> + Clone) -> Result<Dims, Fault> {
    let mut out = Dims::new();
    for shape in shapes.clone() {
        while out.len() < shape.len() {
            out.insert(0, 1);
        }
        let lead = out.len() - shape.len();
        for (o, &n) in out[lead..].iter_mut().zip(shape) {
            match (*o, n) {
                (1, n) => *o = n,
                (a, b) if a == b || b == 1 => {}
                _ => {
                    let all: Vec<_> = shapes.into_iter().collect();
                    return Err(Fault::Shape(format!("shapes {all:?} do not broadcast")));
                }
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_read_and_write_what_numpy_does() {
        let a: Vec<i64> = (0..24).collect();
        let view = View::of(&[2, 3, 4]);
        // a.reshape(2,3,4).transpose(2,0,1)[:, 1, ::-2]
        let v = view.permuted(&[2, 0, 1]).sliced(1, 1, 1, 1).sliced(2, 2, 2, -2);
        assert_eq!(v.read(&a).unwrap(), [20, 12, 21, 13, 22, 14, 23, 15]);
        assert_eq!(
            View::of(&[3, 1]).broadcast(&[2, 3, 2]).unwrap().read(&[7, 8, 9]).unwrap(),
            [7, 7, 8, 8, 9, 9, 7, 7, 8, 8, 9, 9]
        );
        let mut b = vec![0i64; 6];
        View::of(&[2, 3]).sliced(1, 2, 2, -2).write(&mut b, &[1, 2, 3, 4]);
        assert_eq!(b, [2, 0, 1, 4, 0, 3]);
        assert_eq!(View::of(&[]).read(&[5]).unwrap(), [5]);
        assert!(View::of(&[usize::MAX, 0, usize::MAX]).read(&a).unwrap().is_empty());
    }

    #[test]
    fn shapes_broadcast() {
        assert_eq!(broadcast_shapes([&[2, 1][..], &[3], &[]]).unwrap().as_slice(), [2, 3]);
        assert!(broadcast_shapes([&[2][..], &[3]]).is_err());
        assert_eq!(broadcast_shapes([&[0][..], &[1]]).unwrap().as_slice(), [0]);
    }
}
