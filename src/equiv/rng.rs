//! Pseudo-random numbers that depend on the seed alone.

/// SplitMix64 (Steele, Lea, Flood: *Fast splittable pseudorandom number generators*, 2014).
#[derive(Clone, Debug)]
pub(super) struct Rng {
    state: u64,
}

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        Rng { state: seed }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `lo..hi`; `lo` when that is empty.
    pub(super) fn between(&mut self, lo: i64, hi: i64) -> i64 {
        lo.wrapping_add_unsigned(self.below(if hi > lo { hi.abs_diff(lo) } else { 0 }))
    }

    pub(super) fn bool(&mut self) -> bool {
        self.next() >> 63 == 1
    }

    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// `count` draws from N(0, 1), in pairs by the method of Box and Muller.
    pub(super) fn normals(&mut self, count: usize) -> Vec<f64> {
        let mut out = Vec::with_capacity(count.saturating_add(1));
        while out.len() < count {
            let radius = (-2.0 * libm::log(self.unit())).sqrt();
            let (sin, cos) = libm::sincos(std::f64::consts::TAU * self.unit());
            out.extend([radius * cos, radius * sin]);
        }
        out.truncate(count);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_reference_values() {
        let mut rng = Rng::new(1_234_567);
        let want = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(want.map(|_| rng.next()), want);
    }

    #[test]
    fn draws_stay_in_range_and_reach_both_ends() {
        let mut rng = Rng::new(1);
        let draws: Vec<i64> = (0..1000).map(|_| rng.between(-2, 3)).collect();
        assert_eq!((draws.iter().min(), draws.iter().max()), (Some(&-2), Some(&2)));
        assert_eq!((rng.between(5, 5), rng.between(7, -7)), (5, 7));
        assert!((i64::MIN..i64::MAX).contains(&rng.between(i64::MIN, i64::MAX)));
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let x = Rng::new(7).normals(20_001);
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
        assert!(x.len() == 20_001 && mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
