//! Sums in the order that storage mode promises (see [the contract](super#the-order-of-sums)).

use super::num::{Num, Real};

/// Number of partial sums. Element k of a reduced extent belongs to partial sum k mod 16.
pub(crate) const LANES: usize = 16;

/// Σ xₖ·yₖ.
pub(crate) fn dot<T: Num>(x: &[T], y: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (x_blocks, x_tail) = x.as_chunks::<LANES>();
    let (y_blocks, y_tail) = y.as_chunks::<LANES>();
    for (a, b) in x_blocks.iter().zip(y_blocks) {
        for l in 0..LANES {
            lanes[l] = lanes[l].plus(a[l].times(b[l]));
        }
    }
    for (lane, (&a, &b)) in lanes.iter_mut().zip(x_tail.iter().zip(y_tail)) {
        *lane = lane.plus(a.times(b));
    }
    combine(lanes)
}

/// Adds xₖ·yₖₙ to the partial sums of the first `count` columns n of N, a multiple of sixteen. k counts from a multiple of
/// sixteen.
pub(crate) fn add_columns<T: Num, const N: usize>(lanes: &mut [[T; N]; LANES], x: &[T], y: &[[T; N]], count: usize) {
    for tile in 0..count.div_ceil(LANES) {
        for (l, sums) in lanes.iter_mut().enumerate() {
            // Sixteen columns at a time stay in registers.
            let sums = &mut sums.as_chunks_mut::<LANES>().0[tile];
            let mut sum = *sums;
            for (&a, row) in x.iter().zip(y).skip(l).step_by(LANES) {
                let row = &row.as_chunks::<LANES>().0[tile];
                for i in 0..LANES {
                    sum[i] = sum[i].plus(a.times(row[i]));
                }
            }
            *sums = sum;
        }
    }
}

/// The sums of N columns from their partial sums, which it spoils.
pub(crate) fn combine_columns<T: Num, const N: usize>(lanes: &mut [[T; N]; LANES]) -> &[T; N] {
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            low.iter_mut().zip(high).for_each(|(l, h)| *l = l.plus(*h));
        }
        half /= 2;
    }
    &lanes[0]
}

/// Σ f(xₖ).
pub(crate) fn sum<T: Num>(x: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    for block in x.chunks(LANES) {
        for (lane, &v) in lanes.iter_mut().zip(block) {
            *lane = lane.plus(f(v));
        }
    }
    combine(lanes)
}

/// ∏ xₖ, in the order of the sums; partial products start at one.
pub(crate) fn product<T: Num>(x: &[T]) -> T {
    let mut lanes = [T::ONE; LANES];
    for block in x.chunks(LANES) {
        for (lane, &v) in lanes.iter_mut().zip(block) {
            *lane = lane.times(v);
        }
    }
    tree(lanes, T::times)
}

/// The largest element; any NaN makes it NaN. `None` of nothing.
pub(crate) fn max<T: Num>(x: &[T]) -> Option<T> {
    x.iter().copied().reduce(T::larger)
}

/// The smallest element; any NaN makes it NaN. `None` of nothing.
pub(crate) fn min<T: Num>(x: &[T]) -> Option<T> {
    x.iter().copied().reduce(T::smaller)
}

/// exp(x − max) / Σ exp(x − max), in place.
pub(crate) fn softmax<R: Real>(row: &mut [R]) {
    let Some(max) = max(row) else { return };
    row.iter_mut().for_each(|x| *x = x.minus(max).libm_exp());
    let total = sum(row, |x| x);
    row.iter_mut().for_each(|x| *x = x.over(total));
}

fn combine<T: Num>(lanes: [T; LANES]) -> T {
    tree(lanes, T::plus)
}

/// ((l₀∘l₈)∘(l₄∘l₁₂))∘… : halves are combined until one is left.
fn tree<T: Num>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = join(lanes[l], lanes[l + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| {
                let h = (i ^ seed).wrapping_mul(0x9e37_79b9).rotate_left(13).wrapping_mul(0x85eb_ca6b);
                (h as f32 / u32::MAX as f32 - 0.5) * if h & 7 == 0 { 1e4 } else { 1.0 }
            })
            .collect()
    }

    /// The contract spelled out: sixteen sums from +0, element k in sum k mod 16, then a tree of halves.
    fn by_definition(terms: &[f32]) -> f32 {
        let mut lanes = [0f32; 16];
        for (k, t) in terms.iter().enumerate() {
            lanes[k % 16] += t;
        }
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                lanes[l] += lanes[l + half];
            }
        }
        lanes[0]
    }

    #[test]
    fn every_kernel_sums_in_the_same_order() {
        for k in [0, 1, 7, 15, 16, 17, 64, 100, 257] {
            let (x, y) = (noise(k, 1), noise(k, 2));
            let terms: Vec<f32> = x.iter().zip(&y).map(|(a, b)| a * b).collect();
            let want = by_definition(&terms).to_bits();
            assert_eq!(dot(&x, &y).to_bits(), want);
            assert_eq!(dot(&y, &x).to_bits(), want);
            assert_eq!(sum(&terms, |t| t).to_bits(), want);
            let mut columns = [[0f32; 32]; LANES];
            for (x, y) in x.chunks(32).zip(y.chunks(32)) {
                let rows: Vec<[f32; 32]> =
                    y.iter().map(|&b| std::array::from_fn(|c| if c == 17 { b } else { -b })).collect();
                add_columns(&mut columns, x, &rows, 18);
            }
            assert_eq!(combine_columns(&mut columns)[17].to_bits(), want);
        }
    }

    #[test]
    fn sums_start_at_plus_zero() {
        assert_eq!(dot(&[-0f32], &[1.0]).to_bits(), 0);
        assert_eq!(sum(&[-0f32, -0.0], |x| x).to_bits(), 0);
    }

    #[test]
    fn softmax_of_a_masked_row_is_nan() {
        let mut row = [f32::NEG_INFINITY; 3];
        softmax(&mut row);
        assert!(row.iter().all(|x| x.is_nan()));
        let mut row = [0f32, f32::NEG_INFINITY];
        softmax(&mut row);
        assert_eq!(row, [1.0, 0.0]);
    }
}
