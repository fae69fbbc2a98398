//! Types and constants: proto messages ⇄ IR.
//!
//! Decoding never fails: what the IR cannot hold is left out and noted, so that the op that carries it can be kept
//! as it is in the file and is not edited.

use std::collections::HashMap;
use std::sync::Arc;

use super::error::EncodeError;
use crate::ir::{
    BlobRef, DType, Dim, Function, Literal, LiteralData, Name, TensorType, ValueType, pack_ints, unpack_ints,
};
use crate::proto::mil::{self, Elements, Immediate, TypeKind, ValueKind};

/// Decodes the types and constants of one function.
#[derive(Debug, Default)]
pub(super) struct Reader {
    names: HashMap<String, Name>,
    note: Option<String>,
}

impl Reader {
    /// The shared form of a string.
    pub(super) fn name(&mut self, text: &str) -> Name {
        if let Some(name) = self.names.get(text) {
            return name.clone();
        }
        let name = Name::from(text);
        self.names.insert(text.to_owned(), name.clone());
        name
    }

    /// Notes that the IR cannot hold something; the first note counts.
    pub(super) fn note(&mut self, what: impl Into<String>) {
        self.note.get_or_insert_with(|| what.into());
    }

    /// What was noted since this was last asked.
    pub(super) fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    pub(super) fn ty(&mut self, f: &mut Function, ty: Option<&mil::ValueType>) -> ValueType {
        match ty.and_then(|t| t.kind.as_ref()) {
            None => {
                if ty.is_some() {
                    self.note("an empty type");
                }
                ValueType::Missing
            }
            Some(TypeKind::Tensor(t)) => self.tensor(f, t),
            Some(TypeKind::List(l)) => ValueType::List {
                element: Box::new(self.ty(f, l.element.as_ref())),
                length: l.length.as_ref().map(|d| self.dim(f, d)),
            },
            Some(TypeKind::Tuple(t)) => ValueType::Tuple(t.types.iter().map(|t| self.ty(f, Some(t))).collect()),
            Some(TypeKind::Dictionary(d)) => ValueType::Dictionary {
                key: Box::new(self.ty(f, d.key.as_ref())),
                value: Box::new(self.ty(f, d.value.as_ref())),
            },
            Some(TypeKind::State(s)) => match self.ty(f, s.wrapped.as_ref()) {
                ValueType::Tensor(t) => ValueType::State(t),
                other => {
                    self.note(format!("a state that wraps {other}"));
                    ValueType::Missing
                }
            },
        }
    }

    fn tensor(&mut self, f: &mut Function, t: &mil::TensorType) -> ValueType {
        if !t.attributes.is_empty() {
            self.note("attributes on a tensor type");
        }
        let Some(dtype) = DType::from_number(t.data_type) else {
            self.note(format!("unknown element type {}", t.data_type));
            return ValueType::Missing;
        };
        if t.rank == -1 && t.dimensions.is_empty() {
            return ValueType::Unranked(dtype);
        }
        if u64::try_from(t.rank) != Ok(t.dimensions.len() as u64) {
            self.note(format!("rank {} with {} dimensions", t.rank, t.dimensions.len()));
        }
        TensorType::new(dtype, t.dimensions.iter().map(|d| self.dim(f, d)).collect::<Vec<Dim>>()).into()
    }

    fn dim(&mut self, f: &mut Function, d: &mil::Dimension) -> Dim {
        match &d.kind {
            Some(mil::DimensionKind::Constant(c)) => return Dim::known(c.size),
            Some(mil::DimensionKind::Unknown(u)) if u.variadic => self.note("a variadic dimension"),
            Some(mil::DimensionKind::Unknown(_)) => {}
            None => self.note("an empty dimension"),
        }
        f.fresh_dim()
    }

    pub(super) fn literal(&mut self, f: &mut Function, value: &mil::Value) -> Literal {
        if !value.doc_string.is_empty() {
            self.note("a docString on a value");
        }
        let ty = self.ty(f, value.ty.as_ref());
        let data = match &value.kind {
            None => LiteralData::Absent,
            Some(ValueKind::Blob(b)) => {
                LiteralData::Blob(BlobRef { file: Arc::from(b.file_name.as_str()), offset: b.offset })
            }
            Some(ValueKind::Immediate(i)) => self.immediate(f, &ty, i.kind.as_ref()).unwrap_or_else(|| {
                self.note(format!("a constant whose content does not fit its type {ty}"));
                LiteralData::Absent
            }),
        };
        Literal { ty, data }
    }

    fn immediate(&mut self, f: &mut Function, ty: &ValueType, value: Option<&Immediate>) -> Option<LiteralData> {
        let items = |reader: &mut Reader, f: &mut Function, values: &[mil::Value]| {
            LiteralData::Items(values.iter().map(|v| reader.literal(f, v)).collect())
        };
        match (value?, ty) {
            (Immediate::Tensor(t), ValueType::Tensor(TensorType { dtype, .. }) | ValueType::Unranked(dtype)) => {
                elements(*dtype, t.elements.as_ref()?)
            }
            (Immediate::Tuple(t), ValueType::Tuple(_)) => Some(items(self, f, &t.values)),
            (Immediate::List(l), ValueType::List { .. }) => Some(items(self, f, &l.values)),
            (Immediate::Dictionary(d), ValueType::Dictionary { .. }) => {
                let mut pairs = Vec::with_capacity(d.values.len());
                for pair in &d.values {
                    pairs.push((self.literal(f, pair.key.as_ref()?), self.literal(f, pair.value.as_ref()?)));
                }
                Some(LiteralData::Pairs(pairs))
            }
            _ => None,
        }
    }
}

/// The elements of a tensor when they sit in the member that its type calls for.
fn elements(dtype: DType, elements: &Elements) -> Option<LiteralData> {
    let bytes: Vec<u8> = match (member(dtype), elements) {
        (Member::Floats, Elements::Floats(v)) => v.values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        (Member::Doubles, Elements::Doubles(v)) => v.values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        (Member::Bools, Elements::Bools(v)) => v.values.iter().map(|&v| u8::from(v)).collect(),
        (Member::Ints, Elements::Ints(v)) => {
            let wide: Vec<i64> = v.values.iter().map(|&v| i64::from(v)).collect();
            exact_ints(dtype, &wide)?
        }
        (Member::LongInts, Elements::LongInts(v)) => pack_ints(dtype, &v.values),
        (Member::Bytes, Elements::Bytes(v)) => v.values.clone(),
        (Member::Strings, Elements::Strings(v)) => {
            return Some(LiteralData::Strings(v.values.iter().map(|s| Arc::from(s.as_str())).collect()));
        }
        _ => return None,
    };
    Some(LiteralData::Bytes(bytes.into()))
}

fn exact_ints(dtype: DType, values: &[i64]) -> Option<Vec<u8>> {
    let bytes = pack_ints(dtype, values);
    (unpack_ints(dtype, values.len(), &bytes) == values).then_some(bytes)
}

/// The member of `TensorValue` that holds elements of a type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Member {
    Floats,
    Doubles,
    Ints,
    LongInts,
    Bools,
    Strings,
    Bytes,
}

fn member(dtype: DType) -> Member {
    match dtype {
        DType::F32 => Member::Floats,
        DType::F64 => Member::Doubles,
        DType::I32 | DType::I16 | DType::U16 => Member::Ints,
        DType::I64 | DType::U64 => Member::LongInts,
        DType::Bool => Member::Bools,
        DType::String => Member::Strings,
        _ => Member::Bytes,
    }
}

/// The message for a type; `None` for [`ValueType::Missing`].
pub(super) fn encode_type(ty: &ValueType) -> Option<mil::ValueType> {
    let kind = match ty {
        ValueType::Tensor(t) => TypeKind::Tensor(encode_tensor(t)),
        ValueType::Unranked(dtype) => {
            TypeKind::Tensor(mil::TensorType { data_type: dtype.number(), rank: -1, ..Default::default() })
        }
        ValueType::List { element, length } => TypeKind::List(Box::new(mil::ListType {
            element: encode_type(element),
            length: length.as_ref().map(encode_dim),
        })),
        ValueType::Tuple(types) => TypeKind::Tuple(mil::TupleType {
            types: types.iter().map(|t| encode_type(t).unwrap_or_default()).collect(),
        }),
        ValueType::Dictionary { key, value } => {
            TypeKind::Dictionary(Box::new(mil::DictionaryType { key: encode_type(key), value: encode_type(value) }))
        }
        ValueType::State(t) => TypeKind::State(Box::new(mil::StateType {
            wrapped: Some(mil::ValueType { kind: Some(TypeKind::Tensor(encode_tensor(t))) }),
        })),
        ValueType::Missing => return None,
    };
    Some(mil::ValueType { kind: Some(kind) })
}

fn encode_tensor(t: &TensorType) -> mil::TensorType {
    mil::TensorType {
        data_type: t.dtype.number(),
        rank: t.rank() as i64,
        dimensions: t.shape.iter().map(encode_dim).collect(),
        attributes: Default::default(),
    }
}

fn encode_dim(d: &Dim) -> mil::Dimension {
    mil::Dimension {
        kind: Some(match d.as_known() {
            Some(size) => mil::DimensionKind::Constant(mil::ConstantDimension { size }),
            None => mil::DimensionKind::Unknown(mil::UnknownDimension { variadic: false }),
        }),
    }
}

/// The message for a constant.
pub(super) fn encode_literal(literal: &Literal) -> Result<mil::Value, EncodeError> {
    let unfit = || EncodeError::Literal { ty: literal.ty.to_string() };
    let immediate = |kind| Some(ValueKind::Immediate(mil::ImmediateValue { kind: Some(kind) }));
    let items = |items: &[Literal]| items.iter().map(encode_literal).collect::<Result<Vec<_>, _>>();
    let kind = match (&literal.data, &literal.ty) {
        (LiteralData::Absent, _) => None,
        (LiteralData::Blob(b), _) => {
            Some(ValueKind::Blob(mil::BlobFileValue { file_name: b.file.to_string(), offset: b.offset }))
        }
        (LiteralData::Bytes(b), ValueType::Tensor(TensorType { dtype, .. }) | ValueType::Unranked(dtype)) => {
            let elements = encode_elements(*dtype, b).ok_or_else(unfit)?;
            immediate(Immediate::Tensor(mil::TensorValue { elements: Some(elements) }))
        }
        (LiteralData::Strings(s), _) => immediate(Immediate::Tensor(mil::TensorValue {
            elements: Some(Elements::Strings(mil::Strings { values: s.iter().map(|s| s.to_string()).collect() })),
        })),
        (LiteralData::Items(i), ValueType::List { .. }) => {
            immediate(Immediate::List(mil::ListValue { values: items(i)? }))
        }
        (LiteralData::Items(i), ValueType::Tuple(_)) => {
            immediate(Immediate::Tuple(mil::TupleValue { values: items(i)? }))
        }
        (LiteralData::Pairs(pairs), ValueType::Dictionary { .. }) => {
            let pair = |(key, value): &(Literal, Literal)| {
                Ok(mil::KeyValuePair { key: Some(encode_literal(key)?), value: Some(encode_literal(value)?) })
            };
            let values = pairs.iter().map(pair).collect::<Result<_, EncodeError>>()?;
            immediate(Immediate::Dictionary(mil::DictionaryValue { values }))
        }
        _ => return Err(unfit()),
    };
    Ok(mil::Value { doc_string: String::new(), ty: encode_type(&literal.ty), kind })
}

/// `None` when the bytes are not whole elements of the type.
fn encode_elements(dtype: DType, bytes: &[u8]) -> Option<Elements> {
    let width = dtype.bits()?.div_ceil(8) as usize;
    if !bytes.len().is_multiple_of(width) {
        return None;
    }
    let ints = || unpack_ints(dtype, bytes.len() / width, bytes);
    Some(match member(dtype) {
        Member::Floats => {
            let values = bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]]));
            Elements::Floats(mil::Floats { values: values.collect() })
        }
        Member::Doubles => {
            let values = bytes.chunks_exact(8).map(|c| f64::from_le_bytes(c.try_into().unwrap_or_default()));
            Elements::Doubles(mil::Doubles { values: values.collect() })
        }
        Member::Ints => Elements::Ints(mil::Ints { values: ints().into_iter().map(|v| v as i32).collect() }),
        Member::LongInts => Elements::LongInts(mil::LongInts { values: ints() }),
        Member::Bools => Elements::Bools(mil::Bools { values: bytes.iter().map(|&b| b != 0).collect() }),
        Member::Bytes => Elements::Bytes(mil::Bytes { values: bytes.to_vec() }),
        Member::Strings => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;

    fn round_trip(literal: &Literal) -> (Literal, Option<String>) {
        let message = encode_literal(literal).unwrap();
        let bytes = message.encode_to_vec();
        let mut f = Function::new("main", "CoreML8");
        let mut reader = Reader::default();
        let back = reader.literal(&mut f, &mil::Value::decode(&bytes[..]).unwrap());
        (back, reader.take_note())
    }

    #[test]
    fn a_member_that_does_not_fit_the_type_is_noted() {
        let mut f = Function::new("main", "CoreML8");
        let mut value = encode_literal(&Literal::floats(DType::F16, &[], &[1.5])).unwrap();
        value.kind = Some(ValueKind::Immediate(mil::ImmediateValue {
            kind: Some(Immediate::Tensor(mil::TensorValue {
                elements: Some(Elements::Floats(mil::Floats { values: vec![1.5] })),
            })),
        }));
        let mut reader = Reader::default();
        assert_eq!(reader.literal(&mut f, &value).data, LiteralData::Absent);
        assert_eq!(reader.take_note().unwrap(), "a constant whose content does not fit its type fp16");
        value.doc_string = "x".into();
        reader.literal(&mut f, &value);
        assert_eq!(reader.take_note().unwrap(), "a docString on a value");
    }

    #[test]
    fn types_that_the_ir_cannot_hold_are_noted() {
        let mut f = Function::new("main", "CoreML8");
        let tensor = encode_tensor(&TensorType::fixed(DType::F16, &[2, 3]));
        let mut seen = |edit: &dyn Fn(&mut mil::TensorType)| {
            let mut t = tensor.clone();
            edit(&mut t);
            let mut reader = Reader::default();
            reader.ty(&mut f, Some(&mil::ValueType { kind: Some(TypeKind::Tensor(t)) }));
            reader.take_note().unwrap_or_default()
        };
        assert_eq!(seen(&|_| {}), "");
        assert_eq!(seen(&|t| t.rank = 3), "rank 3 with 2 dimensions");
        assert_eq!(seen(&|t| t.data_type = 99), "unknown element type 99");
        assert_eq!(seen(&|t| t.dimensions[0].kind = None), "an empty dimension");
        let variadic = mil::DimensionKind::Unknown(mil::UnknownDimension { variadic: true });
        assert_eq!(seen(&|t| t.dimensions[0].kind = Some(variadic.clone())), "a variadic dimension");
        let note = ("a".to_string(), mil::Value::default());
        assert_eq!(seen(&|t| t.attributes.extend([note.clone()])), "attributes on a tensor type");
    }

    fn tensor_literal() -> impl Strategy<Value = Literal> {
        (proptest::sample::select(DType::ALL), proptest::collection::vec(0u64..4, 0..4))
            .prop_flat_map(|(dtype, shape)| {
                let ty = TensorType::fixed(dtype, &shape);
                let count = ty.volume().unwrap() as usize;
                match dtype.bits() {
                    None => proptest::collection::vec(".{0,4}", count)
                        .prop_map(move |s| Literal {
                            ty: ty.clone().into(),
                            data: LiteralData::Strings(s.iter().map(|s| Arc::from(s.as_str())).collect()),
                        })
                        .boxed(),
                    Some(_) => proptest::collection::vec(any::<u8>(), ty.byte_len().unwrap() as usize)
                        .prop_map(move |mut b| {
                            if dtype == DType::Bool {
                                b.iter_mut().for_each(|b| *b &= 1);
                            }
                            Literal::bytes(ty.clone(), b)
                        })
                        .boxed(),
                }
            })
            .boxed()
    }

    fn literal() -> impl Strategy<Value = Literal> {
        let leaf = prop_oneof![
            4 => tensor_literal(),
            1 => any::<u64>().prop_map(|at| Literal::blob(TensorType::fixed(DType::F16, &[4]), "@model_path/w", at)),
            1 => Just(Literal { ty: ValueType::Missing, data: LiteralData::Absent }),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            let items = proptest::collection::vec(inner.clone(), 0..4);
            let pairs = proptest::collection::vec((inner.clone(), inner), 0..3);
            prop_oneof![
                items.clone().prop_map(|items| Literal {
                    ty: ValueType::List {
                        element: Box::new(ValueType::Unranked(DType::String)),
                        length: Some(Dim::known(items.len() as u64)),
                    },
                    data: LiteralData::Items(items),
                }),
                items.prop_map(|items| Literal {
                    ty: ValueType::Tuple(vec![TensorType::fixed(DType::I4, &[]).into()]),
                    data: LiteralData::Items(items),
                }),
                pairs.prop_map(|pairs| Literal {
                    ty: ValueType::Dictionary {
                        key: Box::new(TensorType::fixed(DType::String, &[]).into()),
                        value: Box::new(ValueType::State(TensorType::fixed(DType::F16, &[0, 7]))),
                    },
                    data: LiteralData::Pairs(pairs),
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_constant_survives_encoding(literal in literal()) {
            prop_assert_eq!(round_trip(&literal), (literal, None));
        }
    }
}
