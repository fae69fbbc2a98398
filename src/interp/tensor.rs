//! Tensors: the values of the interpreter.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::Mode;
use super::error::Fault;
use super::num::{Element, Num, Real, wrap};
use crate::ir::{
    DType, Literal, LiteralData, LiteralError, Name, TensorType, Weights, pack_ints, round_float, unpack_floats,
    unpack_ints,
};

/// Tensors by the name of the input, output or state they belong to.
pub type Values = BTreeMap<Name, Tensor>;

/// Sizes of a tensor's axes, outermost first.
pub(crate) type Dims = SmallVec<[usize; 5]>;

/// The most elements a tensor may have: 2³⁰.
const MAX_ELEMENTS: usize = 1 << 30;

/// The elements, row-major.
///
/// Storage mode keeps floats of every type but `fp64` as `f32`, which represents them exactly; exact mode keeps all
/// floats as `f64`. Integers are `i64`, reduced to their type (`uint64` as its bit pattern).
#[derive(Clone)]
pub(crate) enum Data {
    F32(Arc<Vec<f32>>),
    F64(Arc<Vec<f64>>),
    Int(Arc<Vec<i64>>),
    Bool(Arc<Vec<bool>>),
    Text(Arc<Vec<Arc<str>>>),
}

/// An element type, a shape and the elements in row-major order. Cloning is cheap: clones share the elements.
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Dims,
    data: Data,
}

/// Runs the body with `$T` standing for the type of the tensor's elements.
macro_rules! with_element {
    ($tensor:expr, $T:ident => $body:expr) => {
        with_element!(@arms $tensor, $T => $body, F32: f32, F64: f64, Int: i64, Bool: bool, Text: std::sync::Arc<str>)
    };
    (@arms $tensor:expr, $T:ident => $body:expr, $($variant:ident: $ty:ty),*) => {
        match $tensor.data() {
            $(
                // The body is written for every element type, most of which are `Copy`.
                #[allow(clippy::clone_on_copy)]
                $crate::interp::tensor::Data::$variant(_) => {
                    type $T = $ty;
                    $body
                }
            )*
        }
    };
}
pub(crate) use with_element;

impl Tensor {
    /// A floating-point tensor; each value is rounded to `dtype` (to nearest, ties to even).
    ///
    /// # Panics
    /// When `dtype` is not a float type or the number of values is not the volume of `shape`.
    pub fn floats(dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
        assert!(dtype.is_float(), "{dtype} is a float type");
        Tensor::checked(dtype, shape, f64::narrowed(values.to_vec(), dtype))
    }

    /// An integer tensor; each value is wrapped to `dtype`.
    ///
    /// # Panics
    /// When `dtype` is not an integer type or the number of values is not the volume of `shape`.
    pub fn ints(dtype: DType, shape: &[usize], values: &[i64]) -> Tensor {
        assert!(dtype.is_int(), "{dtype} is an integer type");
        Tensor::checked(dtype, shape, i64::data(values.iter().map(|&v| wrap(dtype, v)).collect()))
    }

    /// A bool tensor.
    ///
    /// # Panics
    /// When the number of values is not the volume of `shape`.
    pub fn bools(shape: &[usize], values: &[bool]) -> Tensor {
        Tensor::checked(DType::Bool, shape, bool::data(values.to_vec()))
    }

    /// A tensor of zeros (`false`); `None` for strings, when a size is unknown or the tensor is larger than the
    /// interpreter handles (2³⁰ elements).
    pub fn zeros(ty: &TensorType) -> Option<Tensor> {
        let shape: Dims = ty.known_shape()?.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<_>>()?;
        let n = volume(&shape).ok()?;
        let data = match ty.dtype {
            DType::F64 => f64::data(vec![0.0; n]),
            d if d.is_float() => f32::data(vec![0.0; n]),
            DType::Bool => bool::data(vec![false; n]),
            DType::String => return None,
            _ => i64::data(vec![0; n]),
        };
        Some(Tensor { dtype: ty.dtype, shape, data })
    }

    /// The tensor that a constant of tensor type holds.
    ///
    /// # Errors
    /// [`Fault::Literal`] when it is no tensor of known shape, its size does not fit its type, or it cannot be read;
    /// [`Fault::TooLarge`].
    pub fn from_literal(literal: &Literal, weights: &dyn Weights) -> Result<Tensor, Fault> {
        let kind =
            || Fault::from(LiteralError::Kind { ty: literal.ty.clone().into(), wanted: "a tensor of known shape" });
        let ty = literal.ty.as_tensor().ok_or_else(kind)?;
        let shape: Dims = ty
            .known_shape()
            .and_then(|s| s.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<_>>())
            .ok_or_else(kind)?;
        let n = volume(&shape)?;
        if let LiteralData::Strings(strings) = &literal.data {
            let data = Data::Text(Arc::new(strings.to_vec()));
            return (strings.len() == n).then_some(Tensor { dtype: ty.dtype, shape, data }).ok_or_else(kind);
        }
        let bytes = literal.packed(weights)?;
        let data = match ty.dtype {
            DType::F16 => {
                f32::data(bytes.chunks_exact(2).map(|c| half::f16::from_le_bytes([c[0], c[1]]).to_f32()).collect())
            }
            DType::F32 => {
                f32::data(bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
            }
            d if d.is_float() => f64::narrowed(unpack_floats(d, &bytes), d),
            DType::Bool => bool::data(bytes.iter().map(|&b| b != 0).collect()),
            d => i64::data(unpack_ints(d, n, &bytes)),
        };
        Ok(Tensor { dtype: ty.dtype, shape, data })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes, outermost axis first; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.len(),
            Data::F64(v) => v.len(),
            Data::Int(v) => v.len(),
            Data::Bool(v) => v.len(),
            Data::Text(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as `f64`, row-major; bools as 0 and 1, strings as NaN.
    pub fn to_f64s(&self) -> Vec<f64> {
        match &self.data {
            Data::F32(v) => v.iter().map(|&x| f64::from(x)).collect(),
            Data::F64(v) => v.to_vec(),
            Data::Int(v) => v.iter().map(|&x| x as f64).collect(),
            Data::Bool(v) => v.iter().map(|&x| f64::from(u8::from(x))).collect(),
            Data::Text(v) => vec![f64::NAN; v.len()],
        }
    }

    /// The elements as `i64`, row-major; floats truncate toward zero, bools become 0 and 1, strings 0.
    pub fn to_i64s(&self) -> Vec<i64> {
        match &self.data {
            Data::F32(v) => v.iter().map(|&x| x as i64).collect(),
            Data::F64(v) => v.iter().map(|&x| x as i64).collect(),
            Data::Int(v) => v.to_vec(),
            Data::Bool(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Data::Text(v) => vec![0; v.len()],
        }
    }

    /// The elements as truth values, row-major: whether they differ from zero.
    pub fn to_bools(&self) -> Vec<bool> {
        match &self.data {
            Data::F32(v) => v.iter().map(|&x| x != 0.0).collect(),
            Data::F64(v) => v.iter().map(|&x| x != 0.0).collect(),
            Data::Int(v) => v.iter().map(|&x| x != 0).collect(),
            Data::Bool(v) => v.to_vec(),
            Data::Text(v) => vec![false; v.len()],
        }
    }

    /// The string of a string scalar.
    pub fn as_str(&self) -> Option<&str> {
        match &self.data {
            Data::Text(v) => v.first().map(|s| &**s),
            _ => None,
        }
    }

    /// The tensor converted to another numeric type, by the rules of MIL's `cast`: float to integer truncates toward
    /// zero (saturating at 64 bits, then wrapping), anything to bool is `x != 0`. `None` from or to strings.
    pub fn cast(&self, dtype: DType) -> Option<Tensor> {
        self.cast_in(dtype, Mode::Storage)
    }

    pub(crate) fn cast_in(&self, dtype: DType, mode: Mode) -> Option<Tensor> {
        if self.dtype == DType::String || dtype == DType::String {
            return None;
        }
        let data = match &self.data {
            _ if dtype == DType::Bool => bool::data(self.to_bools()),
            _ if dtype.is_int() => i64::data(self.to_i64s().into_iter().map(|v| wrap(dtype, v)).collect()),
            Data::F32(v) => mode.store(v.to_vec(), dtype),
            _ => mode.store(self.to_f64s(), dtype),
        };
        Some(Tensor { dtype, shape: self.shape.clone(), data })
    }

    /// The same elements under another shape; `None` when the volume differs.
    pub fn reshaped(&self, shape: &[usize]) -> Option<Tensor> {
        let same = volume(shape).is_ok_and(|n| n == self.len());
        same.then(|| Tensor { dtype: self.dtype, shape: shape.into(), data: self.data.clone() })
    }

    /// The elements packed as a [`Literal`] of this type would hold them; `None` for strings and 8-bit floats.
    pub fn to_literal(&self) -> Option<Literal> {
        let shape: Vec<u64> = self.shape.iter().map(|&n| n as u64).collect();
        match self.dtype {
            DType::String | DType::F8E4M3FN | DType::F8E5M2 => None,
            d if d.is_float() => Some(Literal::floats(d, &shape, &self.to_f64s())),
            d => Some(Literal::bytes(TensorType::fixed(d, &shape), pack_ints(d, &self.to_i64s()))),
        }
    }

    fn checked(dtype: DType, shape: &[usize], data: Data) -> Tensor {
        let tensor = Tensor { dtype, shape: shape.into(), data };
        assert_eq!(volume(shape).ok(), Some(tensor.len()), "values fill the shape {shape:?}");
        tensor
    }

    /// A tensor from its parts, whose volume the caller has made sure of.
    pub(crate) fn new(dtype: DType, shape: impl Into<Dims>, data: Data) -> Tensor {
        let tensor = Tensor { dtype, shape: shape.into(), data };
        debug_assert_eq!(volume(&tensor.shape).ok(), Some(tensor.len()), "elements fill {:?}", tensor.shape);
        tensor
    }

    pub(crate) fn data(&self) -> &Data {
        &self.data
    }

    pub(crate) fn dims(&self) -> Dims {
        self.shape.clone()
    }

    /// A tensor of the same element type.
    pub(crate) fn like<T: Element>(&self, shape: impl Into<Dims>, elements: Vec<T>) -> Tensor {
        Tensor::new(self.dtype, shape, T::data(elements))
    }

    /// The elements, which must be stored as `T`.
    pub(crate) fn elements<T: Element>(&self) -> Result<&[T], Fault> {
        T::of(&self.data).ok_or_else(|| Fault::dtype("an operand", self.dtype, "another element type"))
    }

    /// The elements, copied only when another tensor shares them.
    pub(crate) fn into_elements<T: Element>(self) -> Result<Vec<T>, Fault> {
        T::into_vec(self.data).ok_or_else(|| Fault::dtype("an operand", self.dtype, "another element type"))
    }

    /// Whether two tensors hold the very same elements in memory.
    pub(crate) fn shares(&self, other: &Tensor) -> bool {
        match (&self.data, &other.data) {
            (Data::F32(a), Data::F32(b)) => Arc::ptr_eq(a, b),
            (Data::F64(a), Data::F64(b)) => Arc::ptr_eq(a, b),
            (Data::Int(a), Data::Int(b)) => Arc::ptr_eq(a, b),
            (Data::Bool(a), Data::Bool(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// The elements of a float tensor as `R`.
    pub(crate) fn reals<R: Real>(&self) -> Result<Cow<'_, [R]>, Fault> {
        match (R::of(&self.data), &self.data) {
            (Some(v), _) => Ok(Cow::Borrowed(v)),
            (None, Data::F32(v)) => Ok(Cow::Owned(v.iter().map(|&x| R::of_f32(x)).collect())),
            (None, Data::F64(v)) => Ok(Cow::Owned(v.iter().map(|&x| R::from_f64(x)).collect())),
            _ => Err(Fault::dtype("an operand", self.dtype, "a float type")),
        }
    }

    /// The elements as numbers of kind `T`; conversion happens only among floats.
    pub(crate) fn numbers<T: Num>(&self) -> Result<Cow<'_, [T]>, Fault> {
        match (T::of(&self.data), &self.data) {
            (Some(v), _) => Ok(Cow::Borrowed(v)),
            (None, Data::F32(v)) => Ok(Cow::Owned(v.iter().map(|&x| T::from_f64(f64::from(x))).collect())),
            (None, Data::F64(v)) => Ok(Cow::Owned(v.iter().map(|&x| T::from_f64(x)).collect())),
            _ => Err(Fault::dtype("an operand", self.dtype, "a type of the same kind as the other operand")),
        }
    }

    /// Whether the floats are stored as `f64`.
    pub(crate) fn is_wide(&self) -> bool {
        matches!(self.data, Data::F64(_))
    }
}

impl Mode {
    /// Data of the float type `dtype`, rounded as the mode says.
    pub(crate) fn store<R: Real>(self, elements: Vec<R>, dtype: DType) -> Data {
        match self {
            Mode::Storage => R::narrowed(elements, dtype),
            Mode::Exact => R::widened(elements),
        }
    }

    /// The tensor as this mode stores it.
    pub(crate) fn admit(self, tensor: &Tensor) -> Tensor {
        let data = match (&tensor.data, self) {
            (Data::F32(v), Mode::Exact) => f32::widened(v.to_vec()),
            (Data::F64(v), Mode::Storage) if tensor.dtype != DType::F64 => f64::narrowed(v.to_vec(), tensor.dtype),
            (data, _) => data.clone(),
        };
        Tensor { dtype: tensor.dtype, shape: tensor.shape.clone(), data }
    }
}

/// The number of elements of a shape, if the interpreter is willing to hold that many.
pub(crate) fn volume(shape: &[usize]) -> Result<usize, Fault> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let n = shape.iter().try_fold(1usize, |acc, &d| acc.checked_mul(d));
    n.filter(|&n| n <= MAX_ELEMENTS).ok_or_else(|| Fault::TooLarge(shape.to_vec()))
}

/// Whether two tensors have the same element type, shape and bit patterns. Any NaN equals any NaN; −0 differs from +0.
pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    fn same<T: Copy>(a: &[T], b: &[T], bits: impl Fn(T) -> u64) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(&x, &y)| bits(x) == bits(y))
    }
    let f64_bits = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
    a.dtype == b.dtype
        && a.shape == b.shape
        && match (&a.data, &b.data) {
            (Data::F32(x), Data::F32(y)) => same(x, y, |v| if v.is_nan() { u64::MAX } else { v.to_bits().into() }),
            (Data::F32(_) | Data::F64(_), Data::F32(_) | Data::F64(_)) => same(&a.to_f64s(), &b.to_f64s(), f64_bits),
            (Data::Int(x), Data::Int(y)) => x == y,
            (Data::Bool(x), Data::Bool(y)) => x == y,
            (Data::Text(x), Data::Text(y)) => x == y,
            _ => false,
        }
}

impl fmt::Display for Tensor {
    /// Type and, of long tensors, the first and last elements: `fp16[2, 3] {1, 2, 3, 4, 5, 6}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "{}{:?} {{", self.dtype, self.shape.as_slice())?;
        let n = self.len();
        for i in 0..n.min(SHOWN) {
            let at = if n > SHOWN && i >= SHOWN / 2 { n - SHOWN + i } else { i };
            let gap = if n > SHOWN && i == SHOWN / 2 { ", …, " } else { ", " };
            f.write_str(if i == 0 { "" } else { gap })?;
            match &self.data {
                Data::F32(v) => write!(f, "{}", v[at]),
                Data::F64(v) => write!(f, "{}", v[at]),
                Data::Int(v) => write!(f, "{}", v[at]),
                Data::Bool(v) => write!(f, "{}", v[at]),
                Data::Text(v) => write!(f, "{:?}", v[at]),
            }?;
        }
        f.write_str("}")
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The exact value of a float literal in a type, for callers that compare with declared types.
pub(crate) fn rounded(dtype: DType, mode: Mode, x: f64) -> f64 {
    match mode {
        Mode::Storage => round_float(dtype, x),
        Mode::Exact => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_rounded_and_shown() {
        let t = Tensor::floats(DType::F16, &[2, 2], &[0.1, 1.0, -0.0, 65536.0]);
        assert_eq!(t.to_f64s(), [0.0999755859375, 1.0, 0.0, f64::INFINITY]);
        assert_eq!(Tensor::ints(DType::I8, &[3], &[1, 2, 200]).to_string(), "int8[3] {1, 2, -56}");
        let long: Vec<i64> = (0..100).collect();
        assert_eq!(Tensor::ints(DType::I32, &[100], &long).to_string(), "int32[100] {0, 1, 2, 3, …, 96, 97, 98, 99}");
    }

    #[test]
    fn bits_tell_zeros_apart_and_nans_not() {
        let f = |v: f64| Tensor::floats(DType::F32, &[], &[v]);
        assert!(same_bits(&f(f64::NAN), &f(-f64::NAN)));
        assert!(!same_bits(&f(0.0), &f(-0.0)));
        assert!(!same_bits(&f(1.0), &Tensor::floats(DType::F16, &[], &[1.0])));
        assert!(!same_bits(&f(1.0), &Tensor::floats(DType::F32, &[1], &[1.0])));
    }

    #[test]
    fn casts_follow_mil() {
        let x = Tensor::floats(DType::F32, &[4], &[-1.7, 1.7, 0.0, 300.0]);
        assert_eq!(x.cast(DType::I32).unwrap().to_i64s(), [-1, 1, 0, 300]);
        assert_eq!(x.cast(DType::Bool).unwrap().to_bools(), [true, true, false, true]);
        assert_eq!(x.cast(DType::U8).unwrap().to_i64s(), [255, 1, 0, 44]);
    }

    #[test]
    fn huge_shapes_are_refused() {
        assert!(Tensor::zeros(&TensorType::fixed(DType::F16, &[1 << 40, 1 << 40])).is_none());
        assert!(volume(&[usize::MAX, 0]).is_ok());
        assert!(volume(&[usize::MAX, 2]).is_err());
    }

    #[test]
    fn literals_convert_both_ways() {
        for t in [
            Tensor::floats(DType::F16, &[3], &[1.5, -2.0, 0.1]),
            Tensor::ints(DType::I4, &[5], &[1, -2, 7, -8, 3]),
            Tensor::bools(&[2], &[true, false]),
        ] {
            let literal = t.to_literal().unwrap();
            assert!(same_bits(&t, &Tensor::from_literal(&literal, &crate::ir::NoWeights).unwrap()));
        }
    }
}
