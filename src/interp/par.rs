//! Work spread over the threads of the current rayon pool. What a closure gets never depends on their number.

use rayon::prelude::*;

use super::num::Element;

/// Elements that one thread takes at a time. What has no more is done where it is.
pub(crate) const GRAIN: usize = 1 << 14;

/// `n` elements: `f` fills the run that begins at the position it is given.
pub(crate) fn filled<T: Element>(n: usize, f: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    let mut out = vec![T::default(); n];
    runs(&mut out, GRAIN, |i, run| f(i * GRAIN, run));
    out
}

/// `f` of every element.
pub(crate) fn map<S: Sync, T: Element>(source: &[S], f: impl Fn(&S) -> T + Sync) -> Vec<T> {
    if source.len() <= GRAIN {
        return source.iter().map(f).collect();
    }
    filled(source.len(), |at, out| out.iter_mut().zip(&source[at..]).for_each(|(o, x)| *o = f(x)))
}

/// `f` of every pair of elements.
pub(crate) fn zip<A: Sync, B: Sync, T: Element>(x: &[A], y: &[B], f: impl Fn(&A, &B) -> T + Sync) -> Vec<T> {
    filled(x.len().min(y.len()), |at, out| {
        out.iter_mut().zip(x[at..].iter().zip(&y[at..])).for_each(|(o, (a, b))| *o = f(a, b));
    })
}

/// Calls back with every row of `n` elements and its number.
pub(crate) fn rows<T: Send>(elements: &mut [T], n: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let n = n.max(1);
    let together = (GRAIN / n).max(1);
    runs(elements, n * together, |i, run| {
        run.chunks_mut(n).enumerate().for_each(|(j, row)| f(i * together + j, row));
    });
}

/// `f` of every run of `n` elements, of which there are `count`; runs may be empty.
pub(crate) fn fold<T: Sync, U: Send>(elements: &[T], n: usize, count: usize, f: impl Fn(&[T]) -> U + Sync) -> Vec<U> {
    let one = |i: usize| f(&elements[i * n..(i + 1) * n]);
    if elements.len() <= GRAIN {
        return (0..count).map(one).collect();
    }
    (0..count).into_par_iter().with_min_len((GRAIN / n.max(1)).max(1)).map(one).collect()
}

/// Calls back with every run of `n` elements, the last one possibly shorter, and its number.
fn runs<T: Send>(elements: &mut [T], n: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if elements.len() <= GRAIN {
        elements.chunks_mut(n).enumerate().for_each(|(i, run)| f(i, run));
    } else {
        elements.par_chunks_mut(n).enumerate().for_each(|(i, run)| f(i, run));
    }
}

/// Calls back with every item, in no order, on several threads if there is `work` for them: a number of multiplications.
pub(crate) fn each<T: Send>(items: Vec<T>, work: usize, f: impl Fn(T) + Send + Sync) {
    if work <= 4 * GRAIN {
        items.into_iter().for_each(f);
    } else {
        items.into_par_iter().for_each(f);
    }
}
