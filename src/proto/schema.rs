//! Which fields the schema knows, so that nothing is lost unnoticed when a message is decoded.

use std::ops::Range;

use super::wire::{self, MAX_DEPTH, WireError, WireType};

/// A message type: what to call it and its fields.
#[derive(Debug)]
pub(crate) struct Schema {
    name: &'static str,
    fields: &'static [(u32, Content)],
}

#[derive(Debug)]
enum Content {
    /// A number, string or packed list; or a message that is looked at on its own.
    Leaf,
    Message(&'static Schema),
}

use Content::{Leaf, Message};

macro_rules! schemas {
    ($($(#[$doc:meta])* $id:ident $name:literal { $($number:literal: $content:expr),* $(,)? })*) => {
        $($(#[$doc])* pub(crate) static $id: Schema = Schema { name: $name, fields: &[$(($number, $content)),*] };)*
    };
}

schemas! {
    /// Its nested blocks count, the ops inside them do not.
    OPERATION "operation" { 1: Leaf, 2: Message(&ARGUMENT_ENTRY), 3: Message(&NAMED_VALUE_TYPE), 4: Message(&BLOCK), 5: Message(&VALUE_ENTRY) }
    BLOCK "block" { 1: Message(&NAMED_VALUE_TYPE), 2: Leaf, 3: Leaf, 4: Message(&VALUE_ENTRY) }
    ARGUMENT_ENTRY "argument entry" { 1: Leaf, 2: Message(&ARGUMENT) }
    ARGUMENT "argument" { 1: Message(&BINDING) }
    BINDING "binding" { 1: Leaf, 2: Message(&VALUE) }
    NAMED_VALUE_TYPE "named value" { 1: Leaf, 2: Message(&VALUE_TYPE) }
    VALUE_TYPE "type" { 1: Message(&TENSOR_TYPE), 2: Message(&LIST_TYPE), 3: Message(&TUPLE_TYPE), 4: Message(&DICTIONARY_TYPE), 5: Message(&STATE_TYPE) }
    TENSOR_TYPE "tensor type" { 1: Leaf, 2: Leaf, 3: Message(&DIMENSION), 4: Message(&VALUE_ENTRY) }
    TUPLE_TYPE "tuple type" { 1: Message(&VALUE_TYPE) }
    LIST_TYPE "list type" { 1: Message(&VALUE_TYPE), 2: Message(&DIMENSION) }
    DICTIONARY_TYPE "dictionary type" { 1: Message(&VALUE_TYPE), 2: Message(&VALUE_TYPE) }
    STATE_TYPE "state type" { 1: Message(&VALUE_TYPE) }
    DIMENSION "dimension" { 1: Message(&ONE_LEAF), 2: Message(&ONE_LEAF) }
    ONE_LEAF "leaf" { 1: Leaf }
    VALUE_ENTRY "attribute entry" { 1: Leaf, 2: Message(&VALUE) }
    VALUE "value" { 1: Leaf, 2: Message(&VALUE_TYPE), 3: Message(&IMMEDIATE), 5: Message(&BLOB) }
    BLOB "blob reference" { 1: Leaf, 2: Leaf }
    IMMEDIATE "immediate value" { 1: Message(&TENSOR_VALUE), 2: Message(&VALUES), 3: Message(&VALUES), 4: Message(&PAIRS) }
    TENSOR_VALUE "tensor value" {
        1: Message(&ONE_LEAF), 2: Message(&ONE_LEAF), 3: Message(&ONE_LEAF), 4: Message(&ONE_LEAF),
        5: Message(&ONE_LEAF), 6: Message(&ONE_LEAF), 7: Message(&ONE_LEAF),
    }
    VALUES "items" { 1: Message(&VALUE) }
    PAIRS "pairs" { 1: Message(&PAIR) }
    PAIR "pair" { 1: Message(&VALUE), 2: Message(&VALUE) }

    FEATURE "feature description" { 1: Leaf, 2: Leaf, 3: Message(&FEATURE_TYPE) }
    FEATURE_TYPE "feature type" {
        1: Message(&EMPTY), 2: Message(&EMPTY), 3: Message(&EMPTY), 4: Message(&IMAGE), 5: Message(&ARRAY),
        6: Message(&DICTIONARY), 7: Message(&SEQUENCE), 8: Message(&STATE), 1000: Leaf,
    }
    EMPTY "scalar feature" {}
    ARRAY "multi-array" { 1: Leaf, 2: Leaf, 21: Message(&SHAPES), 31: Message(&SHAPE_RANGE), 41: Leaf, 51: Leaf, 61: Leaf }
    SHAPES "enumerated shapes" { 1: Message(&ONE_LEAF) }
    SHAPE_RANGE "shape range" { 1: Message(&SIZE_RANGE) }
    SIZE_RANGE "size range" { 1: Leaf, 2: Leaf }
    STATE "state feature" { 1: Message(&ARRAY) }
    IMAGE "image" { 1: Leaf, 2: Leaf, 3: Leaf, 21: Message(&IMAGE_SIZES), 31: Message(&IMAGE_RANGE) }
    IMAGE_SIZES "enumerated sizes" { 1: Message(&SIZE_RANGE) }
    IMAGE_RANGE "image size range" { 1: Message(&SIZE_RANGE), 2: Message(&SIZE_RANGE) }
    DICTIONARY "dictionary feature" { 1: Message(&EMPTY), 2: Message(&EMPTY) }
    SEQUENCE "sequence feature" { 1: Message(&EMPTY), 3: Message(&EMPTY), 101: Message(&SIZE_RANGE) }
}

impl Schema {
    /// The first field of the message at `range` that this schema does not know, for people: `unknown field 77 in
    /// operation`.
    pub(crate) fn unknown_field(&'static self, bytes: &[u8], range: Range<usize>) -> Result<Option<String>, WireError> {
        self.search(bytes, range, MAX_DEPTH)
    }

    fn search(&'static self, bytes: &[u8], range: Range<usize>, depth: u32) -> Result<Option<String>, WireError> {
        let deeper = depth.checked_sub(1).ok_or(WireError { offset: range.start, what: "messages nest too deeply" })?;
        for field in wire::fields(bytes, range) {
            let field = field?;
            match self.fields.iter().find(|(number, _)| *number == field.number) {
                None => return Ok(Some(format!("unknown field {} in {}", field.number, self.name))),
                Some((_, Leaf)) => {}
                Some((_, Message(_))) if field.wire != WireType::Len => {
                    return Err(WireError { offset: field.whole.start, what: "a message is expected here" });
                }
                Some((_, Message(inner))) => {
                    if let Some(found) = inner.search(bytes, field.payload, deeper)? {
                        return Ok(Some(found));
                    }
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_unknown_fields_wherever_they_are() {
        let mut binding = Vec::new();
        wire::put(&mut binding, 1, b"x");
        wire::put(&mut binding, 9, b"?");
        let mut argument = Vec::new();
        wire::put(&mut argument, 1, &binding);
        let mut op = Vec::new();
        wire::put(&mut op, 1, b"relu");
        assert_eq!(OPERATION.unknown_field(&op, 0..op.len()).unwrap(), None);
        wire::put(&mut op, 2, &wire::entry("x", &argument));
        assert_eq!(OPERATION.unknown_field(&op, 0..op.len()).unwrap().unwrap(), "unknown field 9 in binding");
    }

    #[test]
    fn deep_nesting_is_an_error() {
        let mut bytes = Vec::new();
        for _ in 0..5000 {
            let mut outer = Vec::new();
            wire::put(&mut outer, 3, &bytes);
            bytes = Vec::new();
            wire::put(&mut bytes, 1, &outer);
        }
        let mut ty = Vec::new();
        wire::put(&mut ty, 3, &bytes);
        assert_eq!(VALUE_TYPE.unknown_field(&ty, 0..ty.len()).unwrap_err().what, "messages nest too deeply");
    }
}
