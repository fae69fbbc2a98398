//! The `.npy` format: a header that is a Python dictionary, then the elements.

use std::io::{self, Read, Write};

use crate::ir::{DType, Literal, TensorType};

/// Bytes that one array may hold.
const MAX_BYTES: u64 = 1 << 33;

/// Bytes that a header may hold; numpy's own limit is far lower.
const MAX_HEADER: usize = 1 << 16;

/// Axes that an array may have, as in numpy.
const MAX_RANK: usize = 64;

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// Why bytes are not an array that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NpyError {
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes are no `.npy` file.
    #[error("not an .npy file: {0}")]
    Format(&'static str),
    /// The element type is not one of b1, i1 to i8, u1 to u8, f2, f4 and f8.
    #[error("arrays of type {0:?} are not supported")]
    Type(String),
    /// The header and the data do not go together.
    #[error("the header declares {declared} bytes, {found} are there")]
    Length {
        /// Bytes of the shape.
        declared: u64,
        /// Bytes there.
        found: u64,
    },
    /// The array is larger than 8 GiB.
    #[error("shape {0:?} is too large")]
    TooLarge(Vec<u64>),
    /// The constant is no tensor of a type that numpy has.
    #[error("a tensor of type {0} cannot be written as an array")]
    NoArray(String),
}

/// What the header of an array says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Element type and shape.
    pub ty: TensorType,
    /// Bytes of the elements.
    pub byte_len: u64,
    /// Bytes before the elements.
    pub header_len: u64,
    big_endian: bool,
    fortran_order: bool,
}

/// Types by the letter and size of numpy's type string.
const TYPES: &[(&str, DType)] = &[
    ("b1", DType::Bool),
    ("i1", DType::I8),
    ("i2", DType::I16),
    ("i4", DType::I32),
    ("i8", DType::I64),
    ("u1", DType::U8),
    ("u2", DType::U16),
    ("u4", DType::U32),
    ("u8", DType::U64),
    ("f2", DType::F16),
    ("f4", DType::F32),
    ("f8", DType::F64),
];

/// Reads a header of version 1, 2 or 3.
///
/// # Errors
/// [`NpyError`] when there is none, the type is not supported or the array would be too large.
pub fn read_header(from: &mut impl Read) -> Result<Header, NpyError> {
    let mut prefix = [0; 8];
    from.read_exact(&mut prefix).map_err(|_| NpyError::Format("it is too short"))?;
    let [magic @ .., major, _minor] = prefix;
    if &magic != MAGIC {
        return Err(NpyError::Format("the first bytes are others"));
    }
    let (width, len) = match major {
        1 => {
            let mut len = [0; 2];
            from.read_exact(&mut len)?;
            (2, usize::from(u16::from_le_bytes(len)))
        }
        2 | 3 => {
            let mut len = [0; 4];
            from.read_exact(&mut len)?;
            (4, u32::from_le_bytes(len) as usize)
        }
        _ => return Err(NpyError::Format("unknown version")),
    };
    if len > MAX_HEADER {
        return Err(NpyError::Format("the header is too long"));
    }
    let mut text = vec![0; len];
    from.read_exact(&mut text).map_err(|_| NpyError::Format("the header is cut off"))?;
    let text = String::from_utf8(text).map_err(|_| NpyError::Format("the header is no text"))?;
    let (descr, fortran_order, shape) =
        Dictionary(&text).read().ok_or(NpyError::Format("the header is not a dictionary of the three entries"))?;
    let unsupported = || NpyError::Type(descr.to_owned());
    let order = descr.chars().next().filter(|c| "<>=|".contains(*c)).ok_or_else(unsupported)?;
    let &(_, dtype) = TYPES.iter().find(|(name, _)| *name == &descr[1..]).ok_or_else(unsupported)?;
    let ty = TensorType::fixed(dtype, &shape);
    let byte_len = ty.byte_len().filter(|&n| n <= MAX_BYTES).ok_or(NpyError::TooLarge(shape))?;
    let header_len = (prefix.len() + width + len) as u64;
    Ok(Header { ty, byte_len, header_len, big_endian: order == '>', fortran_order })
}

/// Reads the elements that follow a header, up to the end of `from`, as little-endian row-major bytes.
///
/// # Errors
/// When the bytes are fewer or more than the header declares, or reading fails.
pub fn read_elements(header: &Header, from: &mut impl Read) -> Result<Literal, NpyError> {
    let mut bytes = Vec::new();
    from.take(header.byte_len + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != header.byte_len {
        return Err(NpyError::Length { declared: header.byte_len, found: bytes.len() as u64 });
    }
    let width = (header.ty.dtype.bits().unwrap_or(8) / 8) as usize;
    if header.big_endian {
        bytes.chunks_exact_mut(width).for_each(<[u8]>::reverse);
    }
    if header.ty.dtype == DType::Bool {
        bytes.iter_mut().for_each(|b| *b = u8::from(*b != 0));
    }
    if header.fortran_order {
        let shape = header.ty.known_shape().unwrap_or_default();
        bytes = to_row_major(&bytes, &shape, width);
    }
    Ok(Literal::bytes(header.ty.clone(), bytes))
}

/// Reorders elements whose first axis runs fastest.
fn to_row_major(bytes: &[u8], shape: &[u64], width: usize) -> Vec<u8> {
    let mut strides = Vec::with_capacity(shape.len());
    let mut stride = 1u64;
    for &n in shape {
        strides.push(stride);
        stride = stride.saturating_mul(n);
    }
    let mut index = vec![0u64; shape.len()];
    let mut out = Vec::with_capacity(bytes.len());
    while out.len() < bytes.len() {
        let at = index.iter().zip(&strides).map(|(i, s)| i * s).sum::<u64>() as usize * width;
        out.extend_from_slice(&bytes[at..at + width]);
        for (i, &n) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < n {
                break;
            }
            *i = 0;
        }
    }
    out
}

/// Writes an array as numpy does, header version 1.
///
/// # Errors
/// [`NpyError::NoArray`] when the constant is not a tensor of a numpy type with its bytes inline, and when writing fails.
pub fn write(array: &Literal, to: &mut impl Write) -> Result<(), NpyError> {
    let no_array = || NpyError::NoArray(array.ty.to_string());
    let ty = array.ty.as_tensor().ok_or_else(no_array)?;
    let (code, _) = TYPES.iter().find(|(_, d)| *d == ty.dtype).ok_or_else(no_array)?;
    let shape = ty.known_shape().ok_or_else(no_array)?;
    let bytes = array.packed(&crate::ir::NoWeights).map_err(|_| no_array())?;
    let order = if code.ends_with('1') { '|' } else { '<' };
    let sizes: Vec<String> = shape.iter().map(u64::to_string).collect();
    let comma = if sizes.len() == 1 { "," } else { "" };
    let mut header =
        format!("{{'descr': '{order}{code}', 'fortran_order': False, 'shape': ({}{comma}), }}", sizes.join(", "));
    let used = MAGIC.len() + 4 + header.len() + 1;
    header.extend(std::iter::repeat_n(' ', used.next_multiple_of(64) - used));
    header.push('\n');
    let len = u16::try_from(header.len()).map_err(|_| no_array())?;
    to.write_all(MAGIC)?;
    to.write_all(&[1, 0])?;
    to.write_all(&len.to_le_bytes())?;
    to.write_all(header.as_bytes())?;
    to.write_all(&bytes)?;
    Ok(())
}

/// The rest of a header's text.
struct Dictionary<'t>(&'t str);

impl<'t> Dictionary<'t> {
    /// The entries `descr`, `fortran_order` and `shape`, in any order.
    fn read(mut self) -> Option<(&'t str, bool, Vec<u64>)> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        self.expect("{")?;
        while self.expect("}").is_none() {
            let key = self.string()?;
            self.expect(":")?;
            match key {
                "descr" => descr = Some(self.string()?),
                "fortran_order" => fortran = Some(self.truth()?),
                "shape" => shape = Some(self.tuple()?),
                _ => return None,
            }
            if self.expect(",").is_none() {
                self.expect("}")?;
                break;
            }
        }
        (self.0.trim().is_empty()).then_some((descr?, fortran?, shape?))
    }

    fn expect(&mut self, token: &str) -> Option<()> {
        self.0 = self.0.trim_start().strip_prefix(token)?;
        Some(())
    }

    fn string(&mut self) -> Option<&'t str> {
        let text = self.0.trim_start();
        let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (string, rest) = text[1..].split_once(quote)?;
        self.0 = rest;
        Some(string)
    }

    fn truth(&mut self) -> Option<bool> {
        match self.expect("True") {
            Some(()) => Some(true),
            None => self.expect("False").map(|()| false),
        }
    }

    fn tuple(&mut self) -> Option<Vec<u64>> {
        self.expect("(")?;
        let mut out = Vec::new();
        while self.expect(")").is_none() {
            let text = self.0.trim_start();
            let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
            out.push(text[..end].parse().ok().filter(|_| out.len() < MAX_RANK)?);
            self.0 = text[end..].strip_prefix('L').unwrap_or(&text[end..]);
            if self.expect(",").is_none() {
                self.expect(")")?;
                break;
            }
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, dictionary: &str, data: &[u8]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([version, 0]);
        match version {
            1 => out.extend((dictionary.len() as u16).to_le_bytes()),
            _ => out.extend((dictionary.len() as u32).to_le_bytes()),
        }
        out.extend(dictionary.as_bytes());
        out.extend(data);
        out
    }

    fn read(mut bytes: &[u8]) -> Result<Literal, NpyError> {
        let header = read_header(&mut bytes)?;
        read_elements(&header, &mut bytes)
    }

    #[test]
    fn headers_of_all_versions_orders_and_types() {
        let one = Literal::floats(DType::F32, &[1], &[1.0]);
        for version in 1..=3 {
            let text = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }   \n";
            assert_eq!(read(&file(version, text, &[0, 0, 0x80, 0x3f])).unwrap(), one);
        }
        let text = "{ \"shape\":(1L,),\"fortran_order\": False ,\"descr\":\">f4\"}";
        assert_eq!(read(&file(1, text, &[0x3f, 0x80, 0, 0])).unwrap(), one);
        let text = "{'descr': '|b1', 'fortran_order': False, 'shape': (), }";
        assert_eq!(read(&file(1, text, &[7])).unwrap(), Literal::bool(true));
        let text = "{'descr': '<i4', 'fortran_order': False, 'shape': (0, 3), }";
        assert_eq!(read(&file(1, text, &[])).unwrap().ty, TensorType::fixed(DType::I32, &[0, 3]).into());
    }

    #[test]
    fn fortran_order_is_reordered() {
        // numpy.asfortranarray([[0, 1, 2], [3, 4, 5]]) lies as 0 3 1 4 2 5.
        let text = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3), }";
        let got = read(&file(1, text, &[0, 3, 1, 4, 2, 5])).unwrap();
        assert_eq!(got, Literal::bytes(TensorType::fixed(DType::U8, &[2, 3]), vec![0, 1, 2, 3, 4, 5]));
    }

    #[test]
    fn garbage_is_refused() {
        let refused = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        assert_eq!(refused(b""), "not an .npy file: it is too short");
        assert_eq!(refused(b"PK\x03\x04PK\x03\x04"), "not an .npy file: the first bytes are others");
        assert_eq!(refused(b"\x93NUMPY\x02\x00\xff\xff\xff\xff"), "not an .npy file: the header is too long");
        assert_eq!(refused(b"\x93NUMPY\x01\x00\xff\xff{"), "not an .npy file: the header is cut off");
        let header = |descr: &str, shape: &str| {
            file(1, &format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"), &[0; 9])
        };
        assert_eq!(refused(&header("<c8", "(1,)")), "arrays of type \"<c8\" are not supported");
        assert_eq!(refused(&header("é", "(1,)")), "arrays of type \"é\" are not supported");
        assert_eq!(refused(&header("<f4", "(2,)")), "the header declares 8 bytes, 9 are there");
        assert_eq!(refused(&header("<f4", "(3,)")), "the header declares 12 bytes, 9 are there");
        assert_eq!(refused(&header("<f8", "(4000000000, 4)")), "shape [4000000000, 4] is too large");
        let huge = "(18446744073709551615, 18446744073709551615)";
        assert_eq!(refused(&header("<f8", huge)), "shape [18446744073709551615, 18446744073709551615] is too large");
        for shape in ["(-1,)", "(1", "1", "(99999999999999999999,)", "(1,),,"] {
            assert!(refused(&header("<f4", shape)).contains("dictionary"), "{shape}");
        }
    }

    #[test]
    fn written_bytes_are_those_of_numpy() {
        // numpy.save of numpy.array([[1, -2]], dtype=numpy.float16)
        let mut out = Vec::new();
        write(&Literal::floats(DType::F16, &[1, 2], &[1.0, -2.0]), &mut out).unwrap();
        let mut want = b"\x93NUMPY\x01\x00v\x00{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2), }".to_vec();
        want.resize(127, b' ');
        want.extend(b"\n\x00\x3c\x00\xc0");
        assert_eq!(out, want);
        assert!(matches!(write(&Literal::string("x"), &mut out), Err(NpyError::NoArray(_))));
    }
}
