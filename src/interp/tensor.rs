//! Tensors: the values of the interpreter.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use smallvec::SmallVec;

use super::Mode;
use super::error::Fault;
use super::num::{Element, Num, Real, wrap};
use super::par;
use super::view::View;
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

/// Elements in memory.
///
/// Storage mode keeps `fp16` and `bf16` in two bytes and floats of every other type but `fp64` as `f32`, which represents
/// them exactly; exact mode keeps all floats as `f64`. Integers are `i64`, reduced to their type (`uint64` as its bit
/// pattern).
#[derive(Clone)]
pub(crate) enum Data {
    F16(Arc<Vec<f16>>),
    BF16(Arc<Vec<bf16>>),
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
    /// Which of `data` the elements are; all of it without a part.
    part: Option<Arc<Part>>,
}

/// The elements of a tensor among those of another one.
struct Part {
    view: View,
    /// The elements one behind the other, where they are no run of the other's: made when a kernel asks for them.
    copy: OnceLock<Data>,
}

/// Runs the body with `$T` standing for the type of the tensor's elements.
macro_rules! with_element {
    ($tensor:expr, $T:ident => $body:expr) => {
        with_element!(@arms $tensor, $T => $body, F16: half::f16, BF16: half::bf16, F32: f32, F64: f64, Int: i64, Bool: bool, Text: std::sync::Arc<str>)
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
            DType::F16 => f16::data(vec![f16::ZERO; n]),
            DType::BF16 => bf16::data(vec![bf16::ZERO; n]),
            DType::F64 => f64::data(vec![0.0; n]),
            d if d.is_float() => f32::data(vec![0.0; n]),
            DType::Bool => bool::data(vec![false; n]),
            DType::String => return None,
            _ => i64::data(vec![0; n]),
        };
        Some(Tensor::new(ty.dtype, shape, data))
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
            return if strings.len() == n { Ok(Tensor::new(ty.dtype, shape, data)) } else { Err(kind()) };
        }
        let bytes = literal.packed(weights)?;
        let data = match ty.dtype {
            DType::F16 => f16::data(bytes.as_chunks().0.iter().map(|&c| f16::from_le_bytes(c)).collect()),
            DType::BF16 => bf16::data(bytes.as_chunks().0.iter().map(|&c| bf16::from_le_bytes(c)).collect()),
            DType::F32 => f32::data(bytes.as_chunks().0.iter().map(|&c| f32::from_le_bytes(c)).collect()),
            d if d.is_float() => f64::narrowed(unpack_floats(d, &bytes), d),
            DType::Bool => bool::data(bytes.iter().map(|&b| b != 0).collect()),
            d => i64::data(unpack_ints(d, n, &bytes)),
        };
        Ok(Tensor::new(ty.dtype, shape, data))
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
        if self.is_empty() { 0 } else { self.shape.iter().product() }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The elements as `f64`, row-major; bools as 0 and 1, strings as NaN.
    pub fn to_f64s(&self) -> Vec<f64> {
        match self.data {
            Data::Int(_) => self.all::<i64>().iter().map(|&x| x as f64).collect(),
            Data::Bool(_) => self.all::<bool>().iter().map(|&x| f64::from(u8::from(x))).collect(),
            Data::Text(_) => vec![f64::NAN; self.len()],
            _ => self.floats_as().into_owned(),
        }
    }

    /// The elements as `i64`, row-major; floats truncate toward zero, bools become 0 and 1, strings 0.
    pub fn to_i64s(&self) -> Vec<i64> {
        match self.data {
            Data::Int(_) => self.all::<i64>().to_vec(),
            Data::Bool(_) => self.all::<bool>().iter().map(|&x| i64::from(x)).collect(),
            Data::Text(_) => vec![0; self.len()],
            _ => self.floats_as::<f64>().iter().map(|&x| x as i64).collect(),
        }
    }

    /// The elements as truth values, row-major: whether they differ from zero.
    pub fn to_bools(&self) -> Vec<bool> {
        match self.data {
            Data::Int(_) => self.all::<i64>().iter().map(|&x| x != 0).collect(),
            Data::Bool(_) => self.all::<bool>().to_vec(),
            Data::Text(_) => vec![false; self.len()],
            _ => self.floats_as::<f64>().iter().map(|&x| x != 0.0).collect(),
        }
    }

    /// The string of a string scalar.
    pub fn as_str(&self) -> Option<&str> {
        self.all::<Arc<str>>().first().map(|s| &**s)
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
        let data = match self.data {
            _ if dtype == DType::Bool => bool::data(self.to_bools()),
            _ if dtype.is_int() => i64::data(self.to_i64s().into_iter().map(|v| wrap(dtype, v)).collect()),
            Data::F16(_) | Data::BF16(_) | Data::F32(_) => mode.store(self.floats_as::<f32>().into_owned(), dtype),
            _ => mode.store(self.to_f64s(), dtype),
        };
        Some(Tensor::new(dtype, self.dims(), data))
    }

    /// The same elements under another shape; `None` when the volume differs.
    pub fn reshaped(&self, shape: &[usize]) -> Option<Tensor> {
        if volume(shape).ok()? != self.len() {
            return None;
        }
        let tensor = |data: &Data, part| Tensor { dtype: self.dtype, shape: shape.into(), data: data.clone(), part };
        let Some(part) = &self.part else { return Some(tensor(&self.data, None)) };
        Some(match part.view.reshaped(shape) {
            Some(view) => tensor(&self.data, Some(Arc::new(Part { view, copy: OnceLock::new() }))),
            None => tensor(self.copied(part), None),
        })
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
        assert_eq!(volume(shape).ok(), Some(data.len()), "values fill the shape {shape:?}");
        Tensor::new(dtype, shape, data)
    }

    /// A tensor from its parts, whose volume the caller has made sure of.
    pub(crate) fn new(dtype: DType, shape: impl Into<Dims>, data: Data) -> Tensor {
        let tensor = Tensor { dtype, shape: shape.into(), data, part: None };
        debug_assert_eq!(volume(&tensor.shape).ok(), Some(tensor.data.len()), "elements fill {:?}", tensor.shape);
        debug_assert!(tensor.data.holds(dtype), "{dtype} is stored as such");
        tensor
    }

    /// The elements that a view of [`Tensor::data`] consists of. They are not copied unless a kernel needs them side by
    /// side.
    pub(crate) fn viewed(&self, view: View) -> Result<Tensor, Fault> {
        let all = volume(view.shape())? == self.data.len() && view.run() == Some(0);
        let shape = view.shape().into();
        let part = (!all).then(|| Arc::new(Part { view, copy: OnceLock::new() }));
        Ok(Tensor { dtype: self.dtype, shape, data: self.data.clone(), part })
    }

    /// Where the elements lie in [`Tensor::data`].
    pub(crate) fn view(&self) -> View {
        self.part.as_ref().map_or_else(|| View::of(&self.shape), |part| part.view.clone())
    }

    /// Whether the elements are some of those that another tensor may hold, too.
    pub(crate) fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// The same tensor, holding on to nothing but its own elements.
    pub(crate) fn settled(self) -> Tensor {
        let Some(part) = &self.part else { return self };
        let data = with_element!(self, T => T::data(self.all::<T>().to_vec()));
        let data = part.copy.get().cloned().unwrap_or(data);
        Tensor { data, part: None, ..self }
    }

    /// The elements of a part side by side.
    fn copied<'a>(&'a self, part: &'a Part) -> &'a Data {
        part.copy.get_or_init(|| {
            // A view has no more elements than a tensor may have.
            with_element!(self, T => T::data(
                T::of(&self.data).and_then(|source| part.view.read(source).ok()).unwrap_or_default()
            ))
        })
    }

    /// The elements, if they are stored as `T`; none otherwise.
    fn all<T: Element>(&self) -> &[T] {
        let Some(part) = &self.part else { return T::of(&self.data).unwrap_or_default() };
        match part.view.run() {
            _ if self.is_empty() => &[],
            Some(start) => T::of(&self.data).map(|all| &all[start..start + self.len()]).unwrap_or_default(),
            None => T::of(self.copied(part)).unwrap_or_default(),
        }
    }

    /// The elements of a float tensor in another width.
    fn floats_as<T: Num>(&self) -> Cow<'_, [T]> {
        if T::of(&self.data).is_some() {
            return Cow::Borrowed(self.all());
        }
        let (data, start) = match &self.part {
            None => (&self.data, 0),
            Some(part) => match part.view.run() {
                Some(start) => (&self.data, start),
                None => (self.copied(part), 0),
            },
        };
        Cow::Owned(par::filled(self.len(), |at, out| T::fetch(data, start + at, 1, out)))
    }

    /// What the elements are a view of.
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
        match T::of(&self.data) {
            Some(_) => Ok(self.all()),
            None => Err(Fault::dtype("an operand", self.dtype, "another element type")),
        }
    }

    /// The elements, copied only when another tensor shares them.
    pub(crate) fn into_elements<T: Element>(self) -> Result<Vec<T>, Fault> {
        match self.part {
            Some(_) => self.elements().map(<[T]>::to_vec),
            None => {
                T::into_vec(self.data).ok_or_else(|| Fault::dtype("an operand", self.dtype, "another element type"))
            }
        }
    }

    /// Whether one tensor holds elements in memory that the other holds, too.
    pub(crate) fn shares(&self, other: &Tensor) -> bool {
        match (&self.data, &other.data) {
            (Data::F16(a), Data::F16(b)) => Arc::ptr_eq(a, b),
            (Data::BF16(a), Data::BF16(b)) => Arc::ptr_eq(a, b),
            (Data::F32(a), Data::F32(b)) => Arc::ptr_eq(a, b),
            (Data::F64(a), Data::F64(b)) => Arc::ptr_eq(a, b),
            (Data::Int(a), Data::Int(b)) => Arc::ptr_eq(a, b),
            (Data::Bool(a), Data::Bool(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// The elements of a float tensor as `R`.
    pub(crate) fn reals<R: Real>(&self) -> Result<Cow<'_, [R]>, Fault> {
        match self.dtype.is_float() {
            true => Ok(self.floats_as()),
            false => Err(Fault::dtype("an operand", self.dtype, "a float type")),
        }
    }

    /// The elements as numbers of kind `T`; conversion happens only among floats.
    pub(crate) fn numbers<T: Num>(&self) -> Result<Cow<'_, [T]>, Fault> {
        match T::reads(&self.data) {
            true => Ok(self.floats_as()),
            false => Err(Fault::dtype("an operand", self.dtype, "a type of the same kind as the other operand")),
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
        let data = match self {
            Mode::Exact if tensor.dtype.is_float() && !tensor.is_wide() => f64::data(tensor.to_f64s()),
            Mode::Storage if tensor.dtype != DType::F64 && tensor.is_wide() => {
                f64::narrowed(tensor.to_f64s(), tensor.dtype)
            }
            _ => return tensor.clone(),
        };
        Tensor::new(tensor.dtype, tensor.dims(), data)
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
    let f32_bits = |x: f32| if x.is_nan() { u64::MAX } else { x.to_bits().into() };
    let f16_bits = |x: f16| if x.is_nan() { u64::MAX } else { x.to_bits().into() };
    a.dtype == b.dtype
        && a.shape == b.shape
        && match (&a.data, &b.data) {
            (Data::F16(_), Data::F16(_)) => same(a.all(), b.all(), f16_bits),
            (Data::F32(_), Data::F32(_)) => same(a.all(), b.all(), f32_bits),
            (Data::Int(_), Data::Int(_)) => a.all::<i64>() == b.all::<i64>(),
            (Data::Bool(_), Data::Bool(_)) => a.all::<bool>() == b.all::<bool>(),
            (Data::Text(_), Data::Text(_)) => a.all::<Arc<str>>() == b.all::<Arc<str>>(),
            _ => a.dtype.is_float() && same(&a.floats_as::<f64>(), &b.floats_as(), f64_bits),
        }
}

impl Data {
    /// Number of elements.
    fn len(&self) -> usize {
        match self {
            Data::F16(v) => v.len(),
            Data::BF16(v) => v.len(),
            Data::F32(v) => v.len(),
            Data::F64(v) => v.len(),
            Data::Int(v) => v.len(),
            Data::Bool(v) => v.len(),
            Data::Text(v) => v.len(),
        }
    }

    /// Whether elements of `dtype` are stored like this, in one of the modes.
    fn holds(&self, dtype: DType) -> bool {
        match self {
            Data::F16(_) => dtype == DType::F16,
            Data::BF16(_) => dtype == DType::BF16,
            Data::F32(_) => dtype.is_float() && !matches!(dtype, DType::F16 | DType::BF16 | DType::F64),
            Data::F64(_) => dtype.is_float(),
            Data::Int(_) => dtype.is_int(),
            Data::Bool(_) => dtype == DType::Bool,
            Data::Text(_) => dtype == DType::String,
        }
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
                Data::Text(_) => write!(f, "{:?}", self.all::<Arc<str>>()[at])?,
                _ => with_element!(self, T => write!(f, "{}", self.all::<T>()[at]))?,
            }
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
