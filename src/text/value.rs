//! Printing of literals.

use std::fmt::{self, Write};

use super::number;
use crate::ir::{DType, Literal, LiteralData, TensorType, ValueType};

/// Above how many elements a constant is left out.
#[derive(Clone, Copy)]
pub(super) struct Elide(pub(super) Option<u64>);

/// `text` in quotes, escaped.
pub(super) fn quoted(text: &str, quote: char) -> String {
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote || c == '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\u{{{:x}}}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// The literal with its type only where that is not implied.
pub(super) fn shortest(literal: &Literal, elide: Elide) -> impl fmt::Display {
    if implied(literal) { content(literal, elide) } else { typed(literal, elide) }
}

/// `type(content)`.
pub(super) fn typed(literal: &Literal, elide: Elide) -> String {
    format!("{}({})", literal.ty, content(literal, elide))
}

/// The content alone, for a place that gives the type.
pub(super) fn content(literal: &Literal, elide: Elide) -> String {
    let mut out = String::new();
    let _ = put(&mut out, literal, elide);
    out
}

/// Whether the content alone says the type: an int32, bool or string scalar, or a vector of them that is not empty.
pub(super) fn implied(literal: &Literal) -> bool {
    let Some(ty) = literal.ty.as_tensor() else { return false };
    let shape = match &ty.shape[..] {
        [] => true,
        [n] => n.as_known().is_some_and(|n| n > 0),
        _ => false,
    };
    let plain = match &literal.data {
        LiteralData::Bytes(bytes) => elements(ty, bytes).is_some(),
        LiteralData::Strings(s) => ty.volume() == Some(s.len() as u64),
        _ => false,
    };
    shape && plain && matches!(ty.dtype, DType::I32 | DType::Bool | DType::String)
}

/// The bit patterns of a well-formed tensor.
fn elements(ty: &TensorType, bytes: &[u8]) -> Option<Vec<i64>> {
    number::unpack(ty.dtype, ty.volume()?, bytes)
}

fn put(out: &mut String, literal: &Literal, elide: Elide) -> fmt::Result {
    let tensor = literal.ty.as_tensor();
    if let (Some(limit), Some(n)) = (elide.0, tensor.and_then(TensorType::volume))
        && n > limit
        && !literal.is_blob()
    {
        return out.write_str("...");
    }
    match &literal.data {
        LiteralData::Bytes(bytes) => match tensor.and_then(|t| Some((t, elements(t, bytes)?))) {
            Some((ty, raw)) => nest(out, ty, &raw, &mut |out, &raw| out.write_str(&number::spell(ty.dtype, raw))),
            None => {
                out.write_str("bytes(\"")?;
                bytes.iter().try_for_each(|b| write!(out, "{b:02x}"))?;
                out.write_str("\")")
            }
        },
        LiteralData::Strings(strings) => match tensor {
            Some(ty) if ty.dtype == DType::String && ty.volume() == Some(strings.len() as u64) => {
                nest(out, ty, strings, &mut |out, s| out.write_str(&quoted(s, '"')))
            }
            _ => {
                out.write_str("strings(")?;
                list(out, strings.iter(), &mut |out, s| out.write_str(&quoted(s, '"')))?;
                out.write_str(")")
            }
        },
        LiteralData::Blob(blob) => write!(out, "BLOBFILE({}, {})", quoted(&blob.file, '"'), blob.offset),
        LiteralData::Items(items) => {
            let (open, close) = if matches!(literal.ty, ValueType::List { .. }) { ('[', ']') } else { ('(', ')') };
            out.push(open);
            list(out, items.iter().enumerate(), &mut |out, (i, item)| {
                put_item(out, item, item_type(&literal.ty, i), elide)
            })?;
            out.push(close);
            Ok(())
        }
        LiteralData::Pairs(pairs) => {
            let types = match &literal.ty {
                ValueType::Dictionary { key, value } => (Some(&**key), Some(&**value)),
                _ => (None, None),
            };
            out.push('{');
            list(out, pairs.iter(), &mut |out, (key, value)| {
                out.push('{');
                put_item(out, key, types.0, elide)?;
                out.push_str(", ");
                put_item(out, value, types.1, elide)?;
                out.push('}');
                Ok(())
            })?;
            out.push('}');
            Ok(())
        }
        LiteralData::Absent => out.write_str("absent"),
    }
}

/// The type that a list or tuple type gives its item at this position.
pub(super) fn item_type(ty: &ValueType, i: usize) -> Option<&ValueType> {
    match ty {
        ValueType::List { element, .. } => Some(element),
        ValueType::Tuple(types) => types.get(i),
        _ => None,
    }
}

fn put_item(out: &mut String, item: &Literal, expected: Option<&ValueType>, elide: Elide) -> fmt::Result {
    match expected {
        Some(ty) if *ty == item.ty => put(out, item, elide),
        _ => out.write_str(&typed(item, elide)),
    }
}

fn list<T>(
    out: &mut String,
    items: impl Iterator<Item = T>,
    one: &mut dyn FnMut(&mut String, T) -> fmt::Result,
) -> fmt::Result {
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        one(out, item)?;
    }
    Ok(())
}

/// The items of a tensor in brackets, one pair a row.
fn nest<T>(
    out: &mut String,
    ty: &TensorType,
    items: &[T],
    one: &mut dyn FnMut(&mut String, &T) -> fmt::Result,
) -> fmt::Result {
    fn level<T>(
        out: &mut String,
        shape: &[u64],
        items: &[T],
        one: &mut dyn FnMut(&mut String, &T) -> fmt::Result,
    ) -> fmt::Result {
        let Some((_, inner)) = shape.split_first() else {
            return items.iter().try_for_each(|item| one(out, item));
        };
        out.push('[');
        if !items.is_empty() {
            let row = inner.iter().product::<u64>().max(1) as usize;
            list(out, items.chunks(row), &mut |out, chunk| level(out, inner, chunk, one))?;
        }
        out.push(']');
        Ok(())
    }
    let shape = ty.known_shape().unwrap_or_default();
    level(out, &shape, items, one)
}
