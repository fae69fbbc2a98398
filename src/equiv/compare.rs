//! Element by element comparison of two tensors.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Serialize, Serializer};

use super::Draw;

use crate::interp::{Tensor, same_bits};
use crate::ir::{DType, Function, Id, ValueId, float_bits};

/// How two runs of one output or state differ, over all steps.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Difference {
    /// Elements compared.
    pub elements: u64,
    /// Elements that are finite in both runs. Where none is, equality says little.
    pub finite: u64,
    /// Elements whose bits differ; any NaN equals any NaN, −0 is not +0.
    pub differing: u64,
    /// Largest |a − b|; infinite where a shape, a NaN or an infinity has no counterpart.
    #[serde(serialize_with = "number")]
    pub max_abs: f64,
    /// Largest number of steps between a and b among the values of a floating-point type; 2⁶⁴−1 where there is no such
    /// number: a NaN, an infinity or a shape without counterpart, integers that differ.
    pub max_ulp: u64,
    /// Largest |a − b| divided by the bound of reassociated equality; above 1 it is exceeded.
    #[serde(serialize_with = "number")]
    pub of_bound: f64,
    /// Largest |a − b| divided by max(1, max|a|), the maximum over the finite elements of the tensor.
    #[serde(serialize_with = "number")]
    pub of_scale: f64,
    /// The first element that differs.
    pub first: Option<First>,
}

/// The first element that differs.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct First {
    /// When.
    #[serde(flatten)]
    pub at: Moment,
    /// Index along each axis; empty for a scalar, and where the shapes differ.
    pub index: Vec<usize>,
    /// The value in the first program.
    #[serde(serialize_with = "number")]
    pub a: f64,
    /// The value in the second program.
    #[serde(serialize_with = "number")]
    pub b: f64,
}

/// A step of a comparison.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Moment {
    /// Seed of the inputs and of the states at step 0.
    pub seed: u64,
    /// Their kind.
    pub draw: Draw,
    /// Step, from 0.
    pub step: usize,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.step)?;
        if self.seed != 0 {
            write!(f, " of seed {}", self.seed)?;
        }
        if self.draw != Draw::Normal {
            write!(f, " of {} inputs", self.draw)?;
        }
        Ok(())
    }
}

/// JSON has no infinities and no NaN: those become strings.
fn number<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
    if x.is_finite() { s.serialize_f64(*x) } else { s.collect_str(x) }
}

/// What reassociated equality allows: |a − b| ≤ `factor` · max(`floor`, max|a|), the maximum over the tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    factor: f64,
    floor: f64,
}

impl Bound {
    /// For exact evaluation.
    pub(super) const EXACT: Bound = Bound { factor: 1e-9, floor: 1.0 };

    /// For evaluation in the storage types of `f`: by its narrowest floating-point type.
    pub(super) fn storage(f: &Function) -> Bound {
        let narrow = (0..f.value_capacity())
            .filter_map(|i| f.tensor(ValueId::new(i)))
            .any(|t| t.dtype.is_float() && t.dtype.bits().is_some_and(|b| b <= 16));
        Bound { factor: if narrow { 1e-2 } else { 1e-5 }, floor: 0.0 }
    }
}

impl Difference {
    /// Whether every bit was equal.
    pub fn is_bitwise(&self) -> bool {
        self.differing == 0
    }

    /// Whether the bound of reassociated equality holds.
    pub fn is_within_bound(&self) -> bool {
        self.of_bound <= 1.0
    }

    /// Counts in what a step gave. Returns whether everything was finite.
    pub(super) fn add(&mut self, at: Moment, a: &Tensor, b: &Tensor, bound: Bound) -> bool {
        let (count, finite) = (a.len() as u64, self.finite);
        self.elements += count;
        if a.shape() != b.shape() || a.dtype() != b.dtype() {
            self.differ(count.max(1), f64::INFINITY, f64::INFINITY, f64::INFINITY, u64::MAX);
            self.first.get_or_insert(First { at, index: Vec::new(), a: f64::NAN, b: f64::NAN });
        } else if same_bits(a, b) {
            self.finite += a.to_f64s().iter().filter(|x| x.is_finite()).count() as u64;
        } else if a.dtype().is_float() {
            self.add_floats(at, a, &b.to_f64s(), bound);
        } else {
            self.add_integers(at, a, &b.to_i64s());
        }
        self.finite - finite == count
    }

    fn differ(&mut self, count: u64, abs: f64, of_bound: f64, of_scale: f64, ulp: u64) {
        self.differing += count;
        self.max_abs = self.max_abs.max(abs);
        self.of_bound = self.of_bound.max(of_bound);
        self.of_scale = self.of_scale.max(of_scale);
        self.max_ulp = self.max_ulp.max(ulp);
    }

    fn add_floats(&mut self, at: Moment, a: &Tensor, b: &[f64], bound: Bound) {
        let values = a.to_f64s();
        let scale = values.iter().filter(|x| x.is_finite()).fold(0f64, |m, x| m.max(x.abs()));
        let allowed = bound.factor * scale.max(bound.floor);
        for (i, (&x, &y)) in values.iter().zip(b).enumerate() {
            self.finite += u64::from(x.is_finite() && y.is_finite());
            if x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan() {
                continue;
            }
            let abs = match (x - y).abs() {
                _ if x == y => 0.0,
                d if d.is_nan() => f64::INFINITY,
                d => d,
            };
            let of_bound = if abs == 0.0 { 0.0 } else { abs / allowed };
            self.differ(
                1,
                abs,
                of_bound,
                abs / scale.max(1.0),
                if abs.is_finite() { ulps(a.dtype(), x, y) } else { u64::MAX },
            );
            self.first.get_or_insert_with(|| First { at, index: unravel(i, a.shape()), a: x, b: y });
        }
    }

    /// Integers and bools: any difference exceeds every bound.
    fn add_integers(&mut self, at: Moment, a: &Tensor, b: &[i64]) {
        self.finite += b.len() as u64;
        for (i, (x, &y)) in a.to_i64s().into_iter().zip(b).enumerate() {
            if x != y {
                self.differ(1, x.abs_diff(y) as f64, f64::INFINITY, f64::INFINITY, u64::MAX);
                let first = || First { at, index: unravel(i, a.shape()), a: x as f64, b: y as f64 };
                self.first.get_or_insert_with(first);
            }
        }
    }
}

/// Whether two tensors have the same type, shape and bits, counting NaNs as equal.
pub(super) fn fingerprint(t: &Tensor) -> u64 {
    let mut hasher = DefaultHasher::new();
    (t.dtype(), t.shape()).hash(&mut hasher);
    if t.dtype().is_float() {
        for x in t.to_f64s() {
            (if x.is_nan() { f64::NAN } else { x }).to_bits().hash(&mut hasher);
        }
    } else {
        t.to_i64s().hash(&mut hasher);
    }
    hasher.finish()
}

fn unravel(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        (*i, flat) = (flat % n.max(1), flat / n.max(1));
    }
    index
}

/// Steps between two values of a type when all its values are put in order, −0 just below +0.
fn ulps(dtype: DType, x: f64, y: f64) -> u64 {
    if x.is_nan() || y.is_nan() {
        return u64::MAX;
    }
    // fp16 holds every 8-bit float.
    let dtype = if dtype.bits() == Some(8) { DType::F16 } else { dtype };
    let place = |v: f64| match (float_bits(dtype, v), dtype.bits()) {
        (Some(bits), Some(width)) => ordered(bits, width),
        _ => ordered(v.to_bits(), 64),
    };
    u64::try_from(place(x).abs_diff(place(y))).unwrap_or(u64::MAX)
}

fn ordered(bits: u64, width: u32) -> i128 {
    let sign = 1u64 << (width - 1);
    if bits & sign == 0 { i128::from(bits) } else { -1 - i128::from(bits & !sign) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Moment = Moment { seed: 0, draw: Draw::Normal, step: 3 };

    fn f16s(values: &[f64]) -> Tensor {
        Tensor::floats(DType::F16, &[values.len()], values)
    }

    fn difference(a: &Tensor, b: &Tensor) -> Difference {
        let mut d = Difference::default();
        d.add(AT, a, b, Bound { factor: 1e-2, floor: 0.0 });
        d
    }

    #[test]
    fn nan_equals_nan_and_the_zeros_differ() {
        let d = difference(&f16s(&[f64::NAN, 0.0, f64::INFINITY]), &f16s(&[-f64::NAN, -0.0, f64::INFINITY]));
        assert_eq!((d.elements, d.finite, d.differing, d.max_abs, d.max_ulp), (3, 1, 1, 0.0, 1));
        assert!(!d.is_bitwise() && d.is_within_bound());
        assert_eq!(d.first, Some(First { at: AT, index: vec![1], a: 0.0, b: -0.0 }));
    }

    #[test]
    fn a_nan_or_infinity_without_counterpart_exceeds_every_bound() {
        for (x, y) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::INFINITY, 1.0), (f64::INFINITY, f64::NEG_INFINITY)] {
            let d = difference(&f16s(&[1.0, x]), &f16s(&[1.0, y]));
            assert!(d.max_abs == f64::INFINITY && !d.is_within_bound(), "{x} {y}");
        }
    }

    #[test]
    fn the_bound_scales_with_the_largest_finite_magnitude() {
        let a = f16s(&[100.0, 0.5, f64::INFINITY]);
        assert!(difference(&a, &f16s(&[100.0, 1.25, f64::INFINITY])).is_within_bound());
        assert!(!difference(&a, &f16s(&[100.0, 2.0, f64::INFINITY])).is_within_bound());
        let zeros = f16s(&[0.0, 0.0]);
        assert!(!difference(&zeros, &f16s(&[0.0, 1e-3])).is_within_bound(), "nothing is near zero");
    }

    #[test]
    fn ulps_count_representable_values() {
        assert_eq!(ulps(DType::F16, 1.0, 1.0 + 2f64.powi(-10)), 1);
        assert_eq!(ulps(DType::F32, 1.0, 1.0 - 2f64.powi(-24)), 1);
        assert_eq!(ulps(DType::BF16, 1.0, 1.0 + 2f64.powi(-6)), 2);
        assert_eq!(ulps(DType::F64, 0.0, f64::from_bits(3)), 3);
        assert_eq!(ulps(DType::F16, -2f64.powi(-24), 2f64.powi(-24)), 3);
        assert_eq!(ulps(DType::F64, f64::NEG_INFINITY, f64::INFINITY), 0xffe0_0000_0000_0001);
    }

    #[test]
    fn integers_and_shapes_must_agree() {
        let a = Tensor::ints(DType::I32, &[2, 2], &[1, 2, 3, 4]);
        let d = difference(&a, &Tensor::ints(DType::I32, &[2, 2], &[1, 2, 3, 7]));
        assert_eq!((d.differing, d.max_abs, d.is_within_bound()), (1, 3.0, false));
        assert_eq!(d.first.map(|f| f.index), Some(vec![1, 1]));
        let d = difference(&a, &Tensor::ints(DType::I32, &[4], &[1, 2, 3, 4]));
        assert_eq!((d.differing, d.is_within_bound()), (4, false));
    }

    #[test]
    fn fingerprints_follow_bits() {
        assert_eq!(fingerprint(&f16s(&[f64::NAN])), fingerprint(&f16s(&[-f64::NAN])));
        assert_ne!(fingerprint(&f16s(&[0.0])), fingerprint(&f16s(&[-0.0])));
    }
}
