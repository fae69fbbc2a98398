//! Element types, dimensions and the types of values.

use std::fmt;

use serde::{Serialize, Serializer};
use smallvec::{SmallVec, smallvec};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $bits:literal;)*) => {
        /// An element type of MIL. The discriminant is the `DataType` number of the schema.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum DType { $($(#[$doc])* $name = $number,)* }

        impl DType {
            /// Every element type, in the order of the schema numbers.
            pub const ALL: &'static [DType] = &[$(DType::$name,)*];

            /// The type with this schema number.
            pub fn from_number(number: i32) -> Option<DType> {
                match number { $($number => Some(DType::$name),)* _ => None }
            }

            /// The name in MIL text (`fp16`, `int32`, …).
            pub fn name(self) -> &'static str {
                match self { $(DType::$name => $text,)* }
            }

            /// Bits of one element in a weight blob or a packed immediate; `None` for strings.
            pub fn bits(self) -> Option<u32> {
                match self { $(DType::$name => if $bits == 0 { None } else { Some($bits) },)* }
            }
        }
    };
}

dtypes! {
    /// Truth values; one byte each in memory.
    Bool = 1, "bool", 8;
    /// UTF-8 strings.
    String = 2, "string", 0;
    /// IEEE half.
    F16 = 10, "fp16", 16;
    /// IEEE single.
    F32 = 11, "fp32", 32;
    /// IEEE double.
    F64 = 12, "fp64", 64;
    /// bfloat16.
    BF16 = 13, "bf16", 16;
    /// Signed 8 bit.
    I8 = 21, "int8", 8;
    /// Signed 16 bit.
    I16 = 22, "int16", 16;
    /// Signed 32 bit.
    I32 = 23, "int32", 32;
    /// Signed 64 bit.
    I64 = 24, "int64", 64;
    /// Signed 4 bit, two's complement.
    I4 = 25, "int4", 4;
    /// Unsigned 8 bit.
    U8 = 31, "uint8", 8;
    /// Unsigned 16 bit.
    U16 = 32, "uint16", 16;
    /// Unsigned 32 bit.
    U32 = 33, "uint32", 32;
    /// Unsigned 64 bit.
    U64 = 34, "uint64", 64;
    /// Unsigned 4 bit.
    U4 = 35, "uint4", 4;
    /// Unsigned 2 bit.
    U2 = 36, "uint2", 2;
    /// Unsigned 1 bit.
    U1 = 37, "uint1", 1;
    /// Unsigned 6 bit.
    U6 = 38, "uint6", 6;
    /// Unsigned 3 bit.
    U3 = 39, "uint3", 3;
    /// 8-bit float, 4 exponent bits, bias 7, no infinities.
    F8E4M3FN = 40, "fp8e4m3fn", 8;
    /// 8-bit float, 5 exponent bits, bias 15.
    F8E5M2 = 41, "fp8e5m2", 8;
}

impl DType {
    /// The schema number.
    pub fn number(self) -> i32 {
        self as i32
    }

    /// The type called `name` in MIL text or in a string parameter such as `cast`'s `dtype`.
    pub fn from_name(name: &str) -> Option<DType> {
        Self::ALL.iter().copied().find(|d| d.name() == name)
    }

    /// Whether this is one of the floating-point types.
    pub fn is_float(self) -> bool {
        use DType::*;
        matches!(self, F16 | F32 | F64 | BF16 | F8E4M3FN | F8E5M2)
    }

    /// Whether this is one of the integer types (bool is none).
    pub fn is_int(self) -> bool {
        !self.is_float() && !matches!(self, DType::Bool | DType::String)
    }

    /// Whether the integer type is signed.
    pub fn is_signed_int(self) -> bool {
        use DType::*;
        matches!(self, I4 | I8 | I16 | I32 | I64)
    }

    /// Bytes that `count` elements take when packed without gaps; `None` for strings and on overflow.
    pub fn packed_len(self, count: u64) -> Option<u64> {
        let bits = count.checked_mul(u64::from(self.bits()?))?;
        Some(bits.div_ceil(8))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An unknown size, distinct from every other one of its function. Prints as `s3`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Symbol(pub(crate) u32);

impl Symbol {
    /// The symbol's number, an index into [`super::Function::symbol_range`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}

/// The size of one axis: a monomial `c · ∏ symbols`.
///
/// Two dimensions are equal only when they are the same monomial. Zero has no symbols.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dim {
    coef: u64,
    symbols: SmallVec<[Symbol; 2]>,
}

impl Dim {
    /// A known size.
    pub fn known(size: u64) -> Dim {
        Dim { coef: size, symbols: SmallVec::new() }
    }

    /// An unknown size.
    pub fn unknown(symbol: Symbol) -> Dim {
        Dim { coef: 1, symbols: smallvec![symbol] }
    }

    /// The size, when it is known.
    pub fn as_known(&self) -> Option<u64> {
        self.symbols.is_empty().then_some(self.coef)
    }

    /// The known factor.
    pub fn coef(&self) -> u64 {
        self.coef
    }

    /// The unknown factors, sorted, repeated as often as they occur.
    pub fn symbols(&self) -> &[Symbol] {
        &self.symbols
    }

    /// Whether the size is known to be one.
    pub fn is_one(&self) -> bool {
        self.coef == 1 && self.symbols.is_empty()
    }

    /// The product; `None` when the known factor overflows.
    pub fn checked_mul(&self, other: &Dim) -> Option<Dim> {
        let coef = self.coef.checked_mul(other.coef)?;
        if coef == 0 {
            return Some(Dim::known(0));
        }
        let mut symbols = self.symbols.clone();
        symbols.extend_from_slice(&other.symbols);
        symbols.sort_unstable();
        Some(Dim { coef, symbols })
    }

    /// The quotient when `other` divides this monomial whatever the symbols are.
    pub fn checked_div(&self, other: &Dim) -> Option<Dim> {
        if other.coef == 0 || !self.coef.is_multiple_of(other.coef) {
            return None;
        }
        let mut symbols = self.symbols.clone();
        for s in &other.symbols {
            let at = symbols.iter().position(|t| t == s)?;
            symbols.remove(at);
        }
        Some(Dim { coef: self.coef / other.coef, symbols })
    }

    /// The product of sizes; `None` on overflow. The empty product is one.
    pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Option<Dim> {
        dims.into_iter().try_fold(Dim::known(1), |acc, d| acc.checked_mul(d))
    }
}

impl From<u64> for Dim {
    fn from(size: u64) -> Dim {
        Dim::known(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.coef != 1 || self.symbols.is_empty() {
            write!(f, "{}", self.coef)?;
            if !self.symbols.is_empty() {
                f.write_str("*")?;
            }
        }
        for (i, s) in self.symbols.iter().enumerate() {
            if i > 0 {
                f.write_str("*")?;
            }
            write!(f, "{s}")?;
        }
        Ok(())
    }
}

impl Serialize for Dim {
    /// A number, or text where it is not known.
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.as_known() {
            Some(n) => s.serialize_u64(n),
            None => s.collect_str(self),
        }
    }
}

impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The sizes of a tensor's axes, outermost first.
pub type Shape = SmallVec<[Dim; 5]>;

/// The type of a tensor of known rank. Rank 0 is a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost axis first.
    pub shape: Shape,
}

impl TensorType {
    /// A tensor type with these sizes.
    pub fn new(dtype: DType, shape: impl IntoIterator<Item = Dim>) -> TensorType {
        TensorType { dtype, shape: shape.into_iter().collect() }
    }

    /// A tensor type of known sizes.
    pub fn fixed(dtype: DType, shape: &[u64]) -> TensorType {
        TensorType::new(dtype, shape.iter().map(|&n| Dim::known(n)))
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The sizes, when all are known.
    pub fn known_shape(&self) -> Option<SmallVec<[u64; 5]>> {
        self.shape.iter().map(Dim::as_known).collect()
    }

    /// Number of elements; `None` when a size is unknown or the product overflows.
    pub fn volume(&self) -> Option<u64> {
        Dim::product(&self.shape)?.as_known()
    }

    /// Bytes of the packed tensor; `None` when unknown, for strings and on overflow.
    pub fn byte_len(&self) -> Option<u64> {
        self.dtype.packed_len(self.volume()?)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.shape.is_empty() {
            return write!(f, "{}", self.dtype);
        }
        write!(f, "tensor<{}, [", self.dtype)?;
        for (i, d) in self.shape.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]>")
    }
}

/// The type of a value.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ValueType {
    /// A tensor of known rank.
    Tensor(TensorType),
    /// A tensor whose rank the file does not say.
    Unranked(DType),
    /// A list (`make_list`, `classify`'s classes).
    List {
        /// Element type.
        element: Box<ValueType>,
        /// Number of elements; `None` when the file does not say.
        length: Option<Dim>,
    },
    /// A tuple.
    Tuple(Vec<ValueType>),
    /// A dictionary.
    Dictionary {
        /// Type of the keys.
        key: Box<ValueType>,
        /// Type of the values.
        value: Box<ValueType>,
    },
    /// A state that wraps a tensor; it exists only as a function input.
    State(TensorType),
    /// The file gives no type.
    Missing,
}

impl ValueType {
    /// The tensor type, if this is a tensor of known rank.
    pub fn as_tensor(&self) -> Option<&TensorType> {
        match self {
            ValueType::Tensor(t) => Some(t),
            _ => None,
        }
    }

    /// The wrapped tensor type, if this is a state.
    pub fn as_state(&self) -> Option<&TensorType> {
        match self {
            ValueType::State(t) => Some(t),
            _ => None,
        }
    }
}

impl From<TensorType> for ValueType {
    fn from(t: TensorType) -> ValueType {
        ValueType::Tensor(t)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueType::Tensor(t) => write!(f, "{t}"),
            ValueType::Unranked(d) => write!(f, "tensor<{d}, [*]>"),
            ValueType::List { element, length } => match length {
                Some(n) => write!(f, "list<{element}, {n}>"),
                None => write!(f, "list<{element}, ?>"),
            },
            ValueType::Tuple(types) => {
                f.write_str("tuple<")?;
                for (i, t) in types.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    write!(f, "{t}")?;
                }
                f.write_str(">")
            }
            ValueType::Dictionary { key, value } => write!(f, "dict<{key}, {value}>"),
            ValueType::State(t) => write!(f, "state<{t}>"),
            ValueType::Missing => f.write_str("?"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dims_are_monomials() {
        let s = Dim::unknown(Symbol(0));
        let t = Dim::unknown(Symbol(1));
        let st = s.checked_mul(&t).unwrap().checked_mul(&Dim::known(6)).unwrap();
        assert_eq!(st.to_string(), "6*s0*s1");
        assert_eq!(st, t.checked_mul(&Dim::known(6)).unwrap().checked_mul(&s).unwrap());
        assert_eq!(st.checked_div(&s.checked_mul(&Dim::known(3)).unwrap()).unwrap().to_string(), "2*s1");
        assert_eq!(st.checked_div(&Dim::known(4)), None);
        assert_eq!(s.checked_div(&t), None);
        assert_eq!(s.checked_mul(&Dim::known(0)).unwrap(), Dim::known(0));
        assert_eq!(Dim::known(u64::MAX).checked_mul(&Dim::known(2)), None);
    }

    #[test]
    fn dtype_names_and_numbers_invert() {
        for &d in DType::ALL {
            assert_eq!(DType::from_number(d.number()), Some(d));
            assert_eq!(DType::from_name(d.name()), Some(d));
        }
        assert_eq!(DType::I4.packed_len(5), Some(3));
        assert_eq!(DType::U3.packed_len(5), Some(2));
    }
}
