//! Element types of the kernels, and rounding to MIL's element types.

use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::par;
use super::tensor::Data;
use crate::ir::{DType, round_float};

/// What a tensor's data can be made of.
pub(crate) trait Element: Clone + Default + PartialEq + Send + Sync + 'static {
    /// The elements, if `data` holds this kind.
    fn of(data: &Data) -> Option<&[Self]>;
    /// The elements, copied only when they are shared.
    fn into_vec(data: Data) -> Option<Vec<Self>>;
    /// Data that holds `elements`.
    fn data(elements: Vec<Self>) -> Data;
}

macro_rules! element {
    ($($ty:ty => $variant:ident),*) => {$(
        impl Element for $ty {
            fn of(data: &Data) -> Option<&[Self]> {
                match data { Data::$variant(v) => Some(v), _ => None }
            }
            fn into_vec(data: Data) -> Option<Vec<Self>> {
                match data { Data::$variant(v) => Some(Arc::unwrap_or_clone(v)), _ => None }
            }
            fn data(elements: Vec<Self>) -> Data {
                Data::$variant(Arc::new(elements))
            }
        }
    )*};
}
element!(f16 => F16, bf16 => BF16, f32 => F32, f64 => F64, i64 => Int, bool => Bool, Arc<str> => Text);

/// Numbers: floats in either width, or integers that wrap.
pub(crate) trait Num: Element + Copy + PartialOrd {
    /// +0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn abs(self) -> Self;
    /// IEEE 754-2019 `maximum`: NaN wins, −0 < +0.
    fn larger(self, other: Self) -> Self;
    /// IEEE 754-2019 `minimum`: NaN wins, −0 < +0.
    fn smaller(self, other: Self) -> Self;
    /// `None` when an integer is divided by zero. Integers truncate.
    fn divided(self, other: Self) -> Option<Self>;
    /// ⌊x / y⌋; `None` when an integer is divided by zero.
    fn floor_divided(self, other: Self) -> Option<Self>;
    /// x − ⌊x / y⌋·y, which has the sign of y; `None` when an integer is divided by zero.
    fn modulo(self, other: Self) -> Option<Self>;
    /// xʸ; integers wrap, and truncate when the exponent is negative.
    fn power(self, other: Self) -> Self;
    fn is_nan(self) -> bool;
    fn to_f64(self) -> f64;
    /// Nearest value; truncates toward zero for integers.
    fn from_f64(x: f64) -> Self;
    /// Whether [`Num::fetch`] makes such numbers of `data`: floats of floats, integers of integers.
    fn reads(data: &Data) -> bool;
    /// Fills `out` with the numbers of `data` from `start` on, `stride` apart; leaves it as it is where they are no such
    /// numbers.
    fn fetch(data: &Data, start: usize, stride: isize, out: &mut [Self]);
}

/// Fills `out` with what `f` makes of the elements from `start` on, `stride` apart.
fn each<S: Copy, T>(source: &[S], start: usize, stride: isize, out: &mut [T], f: impl Fn(S) -> T) {
    if stride == 1 {
        out.iter_mut().zip(&source[start..]).for_each(|(o, &x)| *o = f(x));
    } else {
        let mut at = start as isize;
        for o in out {
            *o = f(source[at as usize]);
            at += stride;
        }
    }
}

impl Num for i64 {
    const ZERO: i64 = 0;
    const ONE: i64 = 1;
    fn plus(self, other: i64) -> i64 {
        self.wrapping_add(other)
    }
    fn minus(self, other: i64) -> i64 {
        self.wrapping_sub(other)
    }
    fn times(self, other: i64) -> i64 {
        self.wrapping_mul(other)
    }
    fn abs(self) -> i64 {
        self.wrapping_abs()
    }
    fn larger(self, other: i64) -> i64 {
        self.max(other)
    }
    fn smaller(self, other: i64) -> i64 {
        self.min(other)
    }
    fn divided(self, other: i64) -> Option<i64> {
        (other != 0).then(|| self.wrapping_div(other))
    }
    fn floor_divided(self, other: i64) -> Option<i64> {
        let quotient = self.divided(other)?;
        let inexact = self.wrapping_rem(other) != 0;
        Some(if inexact && (self < 0) != (other < 0) { quotient - 1 } else { quotient })
    }
    fn modulo(self, other: i64) -> Option<i64> {
        Some(self.wrapping_sub(self.floor_divided(other)?.wrapping_mul(other)))
    }
    fn power(self, other: i64) -> i64 {
        match u32::try_from(other) {
            Ok(exponent) => self.wrapping_pow(exponent),
            Err(_) => libm::pow(self as f64, other as f64) as i64,
        }
    }
    fn is_nan(self) -> bool {
        false
    }
    fn to_f64(self) -> f64 {
        self as f64
    }
    fn from_f64(x: f64) -> i64 {
        x as i64
    }
    fn reads(data: &Data) -> bool {
        matches!(data, Data::Int(_))
    }
    fn fetch(data: &Data, start: usize, stride: isize, out: &mut [i64]) {
        if let Data::Int(v) = data {
            each(v, start, stride, out, |x| x);
        }
    }
}

/// Floats. Transcendental functions come from `libm`, so that they depend on the value alone; their names keep them apart
/// from the methods of `f32` and `f64`, which may differ from machine to machine.
pub(crate) trait Real: Num {
    const INFINITY: Self;
    fn over(self, other: Self) -> Self;
    fn libm_sqrt(self) -> Self;
    fn libm_exp(self) -> Self;
    fn libm_exp2(self) -> Self;
    fn libm_ln(self) -> Self;
    fn libm_sin(self) -> Self;
    fn libm_cos(self) -> Self;
    fn libm_tan(self) -> Self;
    fn libm_asin(self) -> Self;
    fn libm_acos(self) -> Self;
    fn libm_atan(self) -> Self;
    fn libm_sinh(self) -> Self;
    fn libm_cosh(self) -> Self;
    fn libm_tanh(self) -> Self;
    fn libm_atanh(self) -> Self;
    fn libm_erf(self) -> Self;
    fn libm_floor(self) -> Self;
    fn libm_ceil(self) -> Self;
    /// Half to even.
    fn libm_round(self) -> Self;
    /// Rounds every element to `dtype` and stores it as storage mode does.
    fn narrowed(elements: Vec<Self>, dtype: DType) -> Data;
    /// Stores every element unrounded, as exact mode does.
    fn widened(elements: Vec<Self>) -> Data;
}

macro_rules! real {
    ($ty:ident; $($method:ident = $libm:path),*) => {
        impl Num for $ty {
            const ZERO: $ty = 0.0;
            const ONE: $ty = 1.0;
            fn plus(self, other: $ty) -> $ty { self + other }
            fn minus(self, other: $ty) -> $ty { self - other }
            fn times(self, other: $ty) -> $ty { self * other }
            fn abs(self) -> $ty { $ty::abs(self) }
            fn larger(self, other: $ty) -> $ty {
                if $ty::is_nan(self) || self > other || (self == other && other.is_sign_negative()) { self } else { other }
            }
            fn smaller(self, other: $ty) -> $ty {
                if $ty::is_nan(self) || self < other || (self == other && self.is_sign_negative()) { self } else { other }
            }
            fn divided(self, other: $ty) -> Option<$ty> { Some(self / other) }
            fn floor_divided(self, other: $ty) -> Option<$ty> { Some((self / other).libm_floor()) }
            fn modulo(self, other: $ty) -> Option<$ty> { Some(self - (self / other).libm_floor() * other) }
            fn power(self, other: $ty) -> $ty { pow::$ty(self, other) }
            fn is_nan(self) -> bool { $ty::is_nan(self) }
            fn to_f64(self) -> f64 { f64::from(self) }
            fn from_f64(x: f64) -> $ty { x as $ty }
            fn reads(data: &Data) -> bool { matches!(data, Data::F16(_) | Data::BF16(_) | Data::F32(_) | Data::F64(_)) }
            fn fetch(data: &Data, start: usize, stride: isize, out: &mut [$ty]) { fetch::$ty(data, start, stride, out) }
        }

        impl Real for $ty {
            const INFINITY: $ty = $ty::INFINITY;
            fn over(self, other: $ty) -> $ty { self / other }
            $(fn $method(self) -> $ty { $libm(self) })*
            fn narrowed(elements: Vec<$ty>, dtype: DType) -> Data { narrow::$ty(elements, dtype) }
            fn widened(elements: Vec<$ty>) -> Data { widen::$ty(elements) }
        }
    };
}

real!(f32; libm_sqrt = libm::sqrtf, libm_exp = libm::expf, libm_exp2 = libm::exp2f, libm_ln = libm::logf, libm_sin = libm::sinf, libm_cos = libm::cosf,
    libm_tan = libm::tanf, libm_asin = libm::asinf, libm_acos = libm::acosf, libm_atan = libm::atanf, libm_sinh = libm::sinhf, libm_cosh = libm::coshf,
    libm_tanh = libm::tanhf, libm_atanh = libm::atanhf, libm_erf = libm::erff, libm_floor = libm::floorf, libm_ceil = libm::ceilf,
    libm_round = libm::rintf);
real!(f64; libm_sqrt = libm::sqrt, libm_exp = libm::exp, libm_exp2 = libm::exp2, libm_ln = libm::log, libm_sin = libm::sin, libm_cos = libm::cos,
    libm_tan = libm::tan, libm_asin = libm::asin, libm_acos = libm::acos, libm_atan = libm::atan, libm_sinh = libm::sinh, libm_cosh = libm::cosh,
    libm_tanh = libm::tanh, libm_atanh = libm::atanh, libm_erf = libm::erf, libm_floor = libm::floor, libm_ceil = libm::ceil,
    libm_round = libm::rint);

mod pow {
    pub(super) fn f32(x: f32, y: f32) -> f32 {
        libm::powf(x, y)
    }
    pub(super) fn f64(x: f64, y: f64) -> f64 {
        libm::pow(x, y)
    }
}

mod fetch {
    use super::{Data, HalfFloatSliceExt, each};

    pub(super) fn f32(data: &Data, start: usize, stride: isize, out: &mut [f32]) {
        match data {
            Data::F16(v) if stride == 1 => v[start..][..out.len()].convert_to_f32_slice(out),
            Data::BF16(v) if stride == 1 => v[start..][..out.len()].convert_to_f32_slice(out),
            Data::F16(v) => each(v, start, stride, out, half::f16::to_f32),
            Data::BF16(v) => each(v, start, stride, out, half::bf16::to_f32),
            Data::F32(v) => each(v, start, stride, out, |x| x),
            Data::F64(v) => each(v, start, stride, out, |x| x as f32),
            _ => {}
        }
    }

    pub(super) fn f64(data: &Data, start: usize, stride: isize, out: &mut [f64]) {
        match data {
            Data::F16(v) => each(v, start, stride, out, half::f16::to_f64),
            Data::BF16(v) => each(v, start, stride, out, half::bf16::to_f64),
            Data::F32(v) => each(v, start, stride, out, f64::from),
            Data::F64(v) => each(v, start, stride, out, |x| x),
            _ => {}
        }
    }
}

mod narrow {
    use super::{DType, Data, Element, HalfFloatSliceExt, bf16, f16, par, round_float};

    pub(super) fn f32(elements: Vec<f32>, dtype: DType) -> Data {
        match dtype {
            DType::F32 => f32::data(elements),
            DType::F64 => super::widen::f32(elements),
            DType::F16 => f16::data(par::filled(elements.len(), |at, out: &mut [f16]| {
                out.convert_from_f32_slice(&elements[at..][..out.len()]);
            })),
            DType::BF16 => bf16::data(par::filled(elements.len(), |at, out: &mut [bf16]| {
                out.convert_from_f32_slice(&elements[at..][..out.len()]);
            })),
            _ => f32::data(par::map(&elements, |&x| round_float(dtype, f64::from(x)) as f32)),
        }
    }

    pub(super) fn f64(elements: Vec<f64>, dtype: DType) -> Data {
        let rounded = |&x: &f64| round_float(dtype, x) as f32;
        match dtype {
            DType::F64 => f64::data(elements),
            DType::F16 => f16::data(par::map(&elements, |x| f16::from_f32(rounded(x)))),
            DType::BF16 => bf16::data(par::map(&elements, |x| bf16::from_f32(rounded(x)))),
            _ => f32::data(par::map(&elements, rounded)),
        }
    }
}

mod widen {
    use super::{Data, Element};

    pub(super) fn f32(elements: Vec<f32>) -> Data {
        f64::data(elements.into_iter().map(f64::from).collect())
    }
    pub(super) fn f64(elements: Vec<f64>) -> Data {
        f64::data(elements)
    }
}

/// `x` reduced to the integer type `dtype`: two's complement wrap-around.
pub(crate) fn wrap(dtype: DType, x: i64) -> i64 {
    match dtype.bits() {
        Some(bits) if bits < 64 => {
            let spare = 64 - bits;
            if dtype.is_signed_int() { (x << spare) >> spare } else { ((x as u64) << spare >> spare) as i64 }
        }
        _ => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_wrap() {
        assert_eq!(wrap(DType::I8, 200), -56);
        assert_eq!(wrap(DType::U8, -1), 255);
        assert_eq!(wrap(DType::I32, 1 << 31), -(1 << 31));
        assert_eq!(wrap(DType::U3, 9), 1);
        assert_eq!(wrap(DType::I64, i64::MIN), i64::MIN);
    }

    #[test]
    fn maximum_and_minimum_are_those_of_ieee_754_2019() {
        assert!(1f32.larger(f32::NAN).is_nan() && f32::NAN.larger(1.0).is_nan());
        assert!(1f64.smaller(f64::NAN).is_nan() && f64::NAN.smaller(1.0).is_nan());
        assert_eq!(Num::larger(-0f32, 0.0).to_bits(), 0);
        assert_eq!(Num::larger(0f32, -0.0).to_bits(), 0);
        assert_eq!(Num::smaller(0f32, -0.0).to_bits(), (-0f32).to_bits());
        assert_eq!(Num::smaller(-0f32, 0.0).to_bits(), (-0f32).to_bits());
    }
}
