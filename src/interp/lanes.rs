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

/// Columns treated at a time by [`dot_columns`], so that the partial sums stay in the first-level cache.
const COLUMNS: usize = 128;

/// outₙ = Σ xₖ·yₖₙ for every column n of the row-major `y` [K, N]: the same sums as [`dot`], without a transposed copy.
pub(crate) fn dot_columns<T: Num>(x: &[T], y: &[T], out: &mut [T]) {
    let n = out.len();
    let mut lanes = [T::ZERO; LANES * COLUMNS];
    for (block, out) in out.chunks_mut(COLUMNS).enumerate() {
        let (first, width) = (block * COLUMNS, out.len());
        lanes.fill(T::ZERO);
        for (k, &a) in x.iter().enumerate() {
            let row = &y[k * n + first..][..width];
            let lane = &mut lanes[k % LANES * COLUMNS..][..width];
            for (sum, &b) in lane.iter_mut().zip(row) {
                *sum = sum.plus(a.times(b));
            }
        }
        for (i, o) in out.iter_mut().enumerate() {
            *o = combine(std::array::from_fn(|l| lanes[l * COLUMNS + i]));
        }
    }
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
            for n in [1, 3, 127, 128, 300] {
                let x = noise(k, 1);
                let y = noise(k * n, 2);
                let mut columns = vec![0f32; n];
                dot_columns(&x, &y, &mut columns);
                for c in 0..n {
                    let column: Vec<f32> = (0..k).map(|i| y[i * n + c]).collect();
                    let terms: Vec<f32> = x.iter().zip(&column).map(|(a, b)| a * b).collect();
                    let want = by_definition(&terms).to_bits();
                    assert_eq!(columns[c].to_bits(), want);
                    assert_eq!(dot(&x, &column).to_bits(), want);
                    assert_eq!(dot(&column, &x).to_bits(), want);
                    assert_eq!(sum(&terms, |t| t).to_bits(), want);
                }
            }
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
