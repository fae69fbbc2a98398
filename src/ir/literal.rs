//! Constants: small ones inline, weights as references to bytes that stay on disk.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::{DType, TensorType, ValueType, float_bits, unpack_floats};

/// Where the bytes of a weight lie.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlobRef {
    /// The file as the program names it, e.g. `@model_path/weights/weight.bin`.
    pub file: Arc<str>,
    /// Offset of the blob's 64-byte metadata record, not of its data.
    pub offset: u64,
}

impl fmt::Display for BlobRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.offset)
    }
}

/// A constant: its type and its content.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Literal {
    /// Type as declared by the constant itself.
    pub ty: ValueType,
    /// Content.
    pub data: LiteralData,
}

/// The content of a [`Literal`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum LiteralData {
    /// Row-major elements of a tensor, little-endian, packed without gaps in [`DType::bits`] bits each
    /// (bit 0 of byte 0 first; bool takes a byte of 0 or 1).
    Bytes(Arc<[u8]>),
    /// Elements in a weight file.
    Blob(BlobRef),
    /// Elements of a string tensor.
    Strings(Arc<[Arc<str>]>),
    /// Items of a list or tuple.
    Items(Vec<Literal>),
    /// Pairs of a dictionary, in file order.
    Pairs(Vec<(Literal, Literal)>),
    /// The file names a type but no content.
    Absent,
}

/// Why the content of a constant could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LiteralError {
    /// The constant is not of the kind that was asked for.
    #[error("constant of type {ty} is not {wanted}")]
    Kind {
        /// What it is.
        ty: Box<ValueType>,
        /// What was asked for.
        wanted: &'static str,
    },
    /// The number of bytes does not fit the declared type.
    #[error("constant of type {ty} holds {len} bytes, its shape needs {need}")]
    Length {
        /// Declared type.
        ty: Box<ValueType>,
        /// Bytes there.
        len: u64,
        /// Bytes needed.
        need: u64,
    },
    /// A weight could not be read.
    #[error("weight {blob}: {reason}")]
    Weight {
        /// Which weight.
        blob: BlobRef,
        /// What went wrong.
        reason: String,
    },
}

/// Reads the bytes of weights on demand. Implementations decide where blobs live.
pub trait Weights: fmt::Debug + Send + Sync {
    /// The packed bytes of the blob at `blob`, which must hold a tensor of type `ty`.
    ///
    /// # Errors
    /// [`LiteralError::Weight`] when the file is missing, the record is damaged, or its element type or size
    /// differs from `ty`.
    fn read(&self, blob: &BlobRef, ty: &TensorType) -> Result<Vec<u8>, LiteralError>;

    /// These of the packed bytes.
    ///
    /// # Errors
    /// As [`Weights::read`], and when there are not as many.
    fn read_part(&self, blob: &BlobRef, ty: &TensorType, part: Range<u64>) -> Result<Vec<u8>, LiteralError> {
        let mut bytes = self.read(blob, ty)?;
        let range = usize::try_from(part.start).ok().zip(usize::try_from(part.end).ok());
        match range.filter(|&(start, end)| start <= end && end <= bytes.len()) {
            Some((start, end)) => {
                bytes.truncate(end);
                Ok(bytes.split_off(start))
            }
            None => Err(LiteralError::Weight {
                blob: blob.clone(),
                reason: format!("there are only {} bytes", bytes.len()),
            }),
        }
    }
}

/// Weights of a program that has none on disk: every read fails.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoWeights;

impl Weights for NoWeights {
    fn read(&self, blob: &BlobRef, _: &TensorType) -> Result<Vec<u8>, LiteralError> {
        Err(LiteralError::Weight { blob: blob.clone(), reason: "no weight file is attached to this program".into() })
    }
}

impl Literal {
    /// A scalar or tensor from packed bytes.
    pub fn bytes(ty: TensorType, bytes: impl Into<Arc<[u8]>>) -> Literal {
        Literal { ty: ty.into(), data: LiteralData::Bytes(bytes.into()) }
    }

    /// A tensor whose bytes lie in a weight file.
    pub fn blob(ty: TensorType, file: impl Into<Arc<str>>, offset: u64) -> Literal {
        Literal { ty: ty.into(), data: LiteralData::Blob(BlobRef { file: file.into(), offset }) }
    }

    /// An int32 vector.
    pub fn ints(values: &[i64]) -> Literal {
        Literal::bytes(TensorType::fixed(DType::I32, &[values.len() as u64]), pack_ints(DType::I32, values))
    }

    /// An int32 scalar.
    pub fn int(value: i64) -> Literal {
        Literal::bytes(TensorType::fixed(DType::I32, &[]), pack_ints(DType::I32, &[value]))
    }

    /// A bool vector.
    pub fn bools(values: &[bool]) -> Literal {
        Literal::bytes(
            TensorType::fixed(DType::Bool, &[values.len() as u64]),
            values.iter().map(|&b| u8::from(b)).collect::<Vec<u8>>(),
        )
    }

    /// A bool scalar.
    pub fn bool(value: bool) -> Literal {
        Literal::bytes(TensorType::fixed(DType::Bool, &[]), vec![u8::from(value)])
    }

    /// A string scalar.
    pub fn string(value: &str) -> Literal {
        Literal {
            ty: TensorType::fixed(DType::String, &[]).into(),
            data: LiteralData::Strings(Arc::from([Arc::<str>::from(value)])),
        }
    }

    /// A floating-point tensor of type `dtype` (`F16`, `BF16`, `F32` or `F64`), rounded to nearest even.
    ///
    /// # Panics
    /// When `dtype` is none of these or the count of `values` is not the volume of `shape`.
    pub fn floats(dtype: DType, shape: &[u64], values: &[f64]) -> Literal {
        assert_eq!(shape.iter().product::<u64>(), values.len() as u64, "values fill the shape");
        let mut out = Vec::new();
        for &v in values {
            let Some(bits) = float_bits(dtype, v) else { panic!("{dtype} is not a float type that can be written") };
            out.extend(pack_ints(dtype, &[bits as i64]));
        }
        Literal::bytes(TensorType::fixed(dtype, shape), out)
    }

    /// The packed bytes, read from `weights` when they are on disk.
    ///
    /// # Errors
    /// [`LiteralError`] when this is not a numeric tensor, its size does not fit its type, or a read fails.
    pub fn packed<'a>(&'a self, weights: &dyn Weights) -> Result<Cow<'a, [u8]>, LiteralError> {
        let kind = || LiteralError::Kind { ty: self.ty.clone().into(), wanted: "a numeric tensor" };
        let ty = self.ty.as_tensor().ok_or_else(kind)?;
        let need = ty.byte_len().ok_or_else(kind)?;
        let bytes = match &self.data {
            LiteralData::Bytes(b) => Cow::Borrowed(&b[..]),
            LiteralData::Blob(blob) => Cow::Owned(weights.read(blob, ty)?),
            _ => return Err(kind()),
        };
        if bytes.len() as u64 != need {
            return Err(LiteralError::Length { ty: self.ty.clone().into(), len: bytes.len() as u64, need });
        }
        Ok(bytes)
    }

    /// The elements of an integer or bool tensor, row-major.
    ///
    /// # Errors
    /// As [`Literal::packed`]; also for floats and strings.
    pub fn to_ints(&self, weights: &dyn Weights) -> Result<Vec<i64>, LiteralError> {
        let kind = || LiteralError::Kind { ty: self.ty.clone().into(), wanted: "an integer tensor" };
        let ty = self.ty.as_tensor().ok_or_else(kind)?;
        if !(ty.dtype.is_int() || ty.dtype == DType::Bool) {
            return Err(kind());
        }
        let count = ty.volume().ok_or_else(kind)?;
        Ok(unpack_ints(ty.dtype, count as usize, &self.packed(weights)?))
    }

    /// The elements of a floating-point tensor, row-major, exactly.
    ///
    /// # Errors
    /// As [`Literal::packed`]; also for integers, bools and strings.
    pub fn to_floats(&self, weights: &dyn Weights) -> Result<Vec<f64>, LiteralError> {
        let kind = || LiteralError::Kind { ty: self.ty.clone().into(), wanted: "a floating-point tensor" };
        let ty = self.ty.as_tensor().ok_or_else(kind)?;
        if !ty.dtype.is_float() {
            return Err(kind());
        }
        Ok(unpack_floats(ty.dtype, &self.packed(weights)?))
    }

    /// The string of a string scalar.
    pub fn as_str(&self) -> Option<&str> {
        match &self.data {
            LiteralData::Strings(s) if s.len() == 1 => Some(&s[0]),
            _ => None,
        }
    }

    /// Whether the content lies in a weight file.
    pub fn is_blob(&self) -> bool {
        matches!(self.data, LiteralData::Blob(_))
    }
}

/// Packs integers (or bools, as 0 and 1) of type `dtype`: low bits only, `DType::bits` each.
pub fn pack_ints(dtype: DType, values: &[i64]) -> Vec<u8> {
    let bits = dtype.bits().unwrap_or(8) as usize;
    if bits >= 8 {
        return values.iter().flat_map(|v| v.to_le_bytes().into_iter().take(bits / 8)).collect();
    }
    let mut out = vec![0u8; (values.len() * bits).div_ceil(8)];
    for (i, &v) in values.iter().enumerate() {
        for b in 0..bits {
            if v >> b & 1 == 1 {
                let at = i * bits + b;
                out[at / 8] |= 1 << (at % 8);
            }
        }
    }
    out
}

/// The first `count` integers packed in `bytes`; missing bytes read as nothing.
pub fn unpack_ints(dtype: DType, count: usize, bytes: &[u8]) -> Vec<i64> {
    let bits = dtype.bits().unwrap_or(8) as usize;
    if bits >= 8 {
        let width = bits / 8;
        return bytes
            .chunks_exact(width)
            .take(count)
            .map(|c| {
                let fill = if dtype.is_signed_int() && c[width - 1] & 0x80 != 0 { 0xff } else { 0 };
                let mut wide = [fill; 8];
                wide[..width].copy_from_slice(c);
                i64::from_le_bytes(wide)
            })
            .collect();
    }
    let count = count.min(bytes.len() * 8 / bits);
    (0..count)
        .map(|i| {
            let raw = (0..bits).fold(0i64, |acc, b| {
                let at = i * bits + b;
                acc | i64::from(bytes[at / 8] >> (at % 8) & 1) << b
            });
            if dtype.is_signed_int() && raw >> (bits - 1) & 1 == 1 { raw - (1 << bits) } else { raw }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_byte_packing_is_one_bit_stream() {
        // The byte patterns are those of coremltools' own blob writer.
        for (dtype, values, bytes) in [
            (DType::I4, &[1, -2, 7, -8, 3][..], &[0xe1u8, 0x87, 0x03][..]),
            (DType::U1, &[1, 0, 1, 1, 0, 0, 0, 1, 1, 1], &[0x8d, 0x03]),
            (DType::U2, &[0, 1, 2, 3, 3], &[0xe4, 0x03]),
            (DType::U3, &[1, 2, 3, 4, 5], &[0xd1, 0x58]),
            (DType::U4, &[1, 15, 7], &[0xf1, 0x07]),
            (DType::U6, &[1, 2, 63, 33, 5], &[0x81, 0xf0, 0x87, 0x05]),
            (DType::I32, &[-5, 6], &[0xfb, 0xff, 0xff, 0xff, 6, 0, 0, 0]),
        ] {
            assert_eq!(pack_ints(dtype, values), bytes, "{dtype}");
            assert_eq!(unpack_ints(dtype, values.len(), bytes), values, "{dtype}");
        }
    }
}
