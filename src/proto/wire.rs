//! A scanner over raw protobuf bytes: where each field of a message lies.

use std::ops::Range;

/// Why bytes are not a protobuf message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("byte {offset}: {what}")]
pub(crate) struct WireError {
    /// Offset in the scanned file.
    pub offset: usize,
    /// What is wrong there.
    pub what: &'static str,
}

/// How deep messages may nest; prost's own limit.
pub(crate) const MAX_DEPTH: u32 = 100;

/// How the payload of a field is delimited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WireType {
    Varint,
    Fixed64,
    Len,
    Fixed32,
}

/// One field occurrence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Field {
    pub number: u32,
    pub wire: WireType,
    /// Tag, length and payload.
    pub whole: Range<usize>,
    /// Payload only.
    pub payload: Range<usize>,
}

/// The fields of the message at `range` of `bytes`, in file order.
pub(crate) fn fields(bytes: &[u8], range: Range<usize>) -> Fields<'_> {
    Fields { bytes, at: range.start, end: range.end.min(bytes.len()) }
}

/// Payloads of the occurrences of one length-delimited field.
pub(crate) fn payloads(bytes: &[u8], range: Range<usize>, number: u32) -> Result<Vec<Range<usize>>, WireError> {
    let mut out = Vec::new();
    for field in fields(bytes, range) {
        let field = field?;
        if field.number == number && field.wire == WireType::Len {
            out.push(field.payload);
        }
    }
    Ok(out)
}

/// Iterates over fields; ends after the first error.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
    end: usize,
}

impl Fields<'_> {
    fn varint(&mut self) -> Result<u64, WireError> {
        let start = self.at;
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = match self.bytes.get(self.at) {
                Some(&b) if self.at < self.end => b,
                _ => return Err(WireError { offset: start, what: "a number is cut off" }),
            };
            self.at += 1;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(WireError { offset: start, what: "a number takes more than 64 bits" })
    }

    fn field(&mut self) -> Result<Field, WireError> {
        let start = self.at;
        let fail = |what| WireError { offset: start, what };
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|&n| n > 0).ok_or_else(|| fail("not a field tag"))?;
        let (wire, len) = match tag & 7 {
            0 => {
                let before = self.at;
                self.varint()?;
                let len = self.at - before;
                self.at = before;
                (WireType::Varint, len as u64)
            }
            1 => (WireType::Fixed64, 8),
            2 => (WireType::Len, self.varint()?),
            5 => (WireType::Fixed32, 4),
            _ => return Err(fail("a group, which proto3 does not have")),
        };
        let end = usize::try_from(len)
            .ok()
            .and_then(|len| self.at.checked_add(len))
            .filter(|&end| end <= self.end)
            .ok_or_else(|| fail("a field runs past the end of its message"))?;
        let payload = self.at..end;
        self.at = end;
        Ok(Field { number, wire, whole: start..end, payload })
    }
}

impl Iterator for Fields<'_> {
    type Item = Result<Field, WireError>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.at = self.end;
        }
        Some(field)
    }
}

/// Appends a length-delimited field.
pub(crate) fn put(out: &mut Vec<u8>, number: u32, payload: &[u8]) {
    prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, out);
    prost::encoding::encode_varint(payload.len() as u64, out);
    out.extend_from_slice(payload);
}

/// A map entry with a string key and a message value.
pub(crate) fn entry(key: &str, value: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(key.len() + value.len() + 16);
    if !key.is_empty() {
        put(&mut out, 1, key.as_bytes());
    }
    put(&mut out, 2, value);
    out
}

/// What becomes of one field of a spliced message.
#[derive(Debug)]
pub(crate) enum Splice {
    /// The field stays as it is in the file.
    Keep,
    /// These bytes (whole fields, or none) stand in its place.
    With(Vec<u8>),
}

/// The message at `range` with some of its fields replaced.
pub(crate) fn splice<E: From<WireError>>(
    bytes: &[u8],
    range: Range<usize>,
    mut edit: impl FnMut(&Field) -> Result<Splice, E>,
) -> Result<Vec<u8>, E> {
    let mut out = Vec::with_capacity(range.len());
    for field in fields(bytes, range) {
        let field = field?;
        match edit(&field)? {
            Splice::Keep => out.extend_from_slice(&bytes[field.whole]),
            Splice::With(new) => out.extend_from_slice(&new),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_fields_of_every_wire_type() {
        let bytes = [0x08, 0xac, 0x02, 0x12, 0x02, b'h', b'i', 0x1d, 0, 0, 0xc0, 0x3f, 0x21, 1, 2, 3, 4, 5, 6, 7, 8];
        let found: Vec<Field> = fields(&bytes, 0..bytes.len()).collect::<Result<_, _>>().unwrap();
        let seen: Vec<_> = found.iter().map(|f| (f.number, f.wire, f.whole.clone(), f.payload.clone())).collect();
        assert_eq!(
            seen,
            [
                (1, WireType::Varint, 0..3, 1..3),
                (2, WireType::Len, 3..7, 5..7),
                (3, WireType::Fixed32, 7..12, 8..12),
                (4, WireType::Fixed64, 12..21, 13..21),
            ]
        );
    }

    #[test]
    fn refuses_what_is_not_a_message() {
        let what = |bytes: &[u8]| fields(bytes, 0..bytes.len()).find_map(Result::err).map(|e| e.what);
        assert_eq!(what(&[0x12, 5, 1]), Some("a field runs past the end of its message"));
        assert_eq!(what(&[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]), what(&[0x12, 5, 1]));
        assert_eq!(what(&[0x08, 0x80]), Some("a number is cut off"));
        let long = [0x08, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1];
        assert_eq!(what(&long), Some("a number takes more than 64 bits"));
        assert_eq!(what(&[0x0b]), Some("a group, which proto3 does not have"));
        assert_eq!(what(&[0x00]), Some("not a field tag"));
        assert_eq!(what(&[0x21, 1, 2]), what(&[0x12, 5, 1]));
    }
}
