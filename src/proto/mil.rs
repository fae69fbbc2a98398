//! `CoreML.Specification.MILSpec`: programs.

use std::collections::BTreeMap;

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Program {
    #[prost(int64, tag = "1")]
    pub version: i64,
    #[prost(btree_map = "string, message", tag = "2")]
    pub functions: BTreeMap<String, Function>,
    #[prost(string, tag = "3")]
    pub doc_string: String,
    #[prost(btree_map = "string, message", tag = "4")]
    pub attributes: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Function {
    #[prost(message, repeated, tag = "1")]
    pub inputs: Vec<NamedValueType>,
    #[prost(string, tag = "2")]
    pub opset: String,
    #[prost(btree_map = "string, message", tag = "3")]
    pub block_specializations: BTreeMap<String, Block>,
    #[prost(btree_map = "string, message", tag = "4")]
    pub attributes: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Block {
    #[prost(message, repeated, tag = "1")]
    pub inputs: Vec<NamedValueType>,
    #[prost(string, repeated, tag = "2")]
    pub outputs: Vec<String>,
    #[prost(message, repeated, tag = "3")]
    pub operations: Vec<Operation>,
    #[prost(btree_map = "string, message", tag = "4")]
    pub attributes: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Operation {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(btree_map = "string, message", tag = "2")]
    pub inputs: BTreeMap<String, Argument>,
    #[prost(message, repeated, tag = "3")]
    pub outputs: Vec<NamedValueType>,
    #[prost(message, repeated, tag = "4")]
    pub blocks: Vec<Block>,
    #[prost(btree_map = "string, message", tag = "5")]
    pub attributes: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Argument {
    #[prost(message, repeated, tag = "1")]
    pub arguments: Vec<Binding>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Binding {
    #[prost(oneof = "BindingKind", tags = "1, 2")]
    pub kind: Option<BindingKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum BindingKind {
    #[prost(string, tag = "1")]
    Name(String),
    #[prost(message, tag = "2")]
    Value(Value),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct NamedValueType {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub ty: Option<ValueType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ValueType {
    #[prost(oneof = "TypeKind", tags = "1, 2, 3, 4, 5")]
    pub kind: Option<TypeKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum TypeKind {
    #[prost(message, tag = "1")]
    Tensor(TensorType),
    #[prost(message, tag = "2")]
    List(Box<ListType>),
    #[prost(message, tag = "3")]
    Tuple(TupleType),
    #[prost(message, tag = "4")]
    Dictionary(Box<DictionaryType>),
    #[prost(message, tag = "5")]
    State(Box<StateType>),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TensorType {
    /// `DataType` number.
    #[prost(int32, tag = "1")]
    pub data_type: i32,
    /// −1 when unknown.
    #[prost(int64, tag = "2")]
    pub rank: i64,
    #[prost(message, repeated, tag = "3")]
    pub dimensions: Vec<Dimension>,
    #[prost(btree_map = "string, message", tag = "4")]
    pub attributes: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TupleType {
    #[prost(message, repeated, tag = "1")]
    pub types: Vec<ValueType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListType {
    #[prost(message, optional, tag = "1")]
    pub element: Option<ValueType>,
    #[prost(message, optional, tag = "2")]
    pub length: Option<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DictionaryType {
    #[prost(message, optional, tag = "1")]
    pub key: Option<ValueType>,
    #[prost(message, optional, tag = "2")]
    pub value: Option<ValueType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StateType {
    #[prost(message, optional, tag = "1")]
    pub wrapped: Option<ValueType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Dimension {
    #[prost(oneof = "DimensionKind", tags = "1, 2")]
    pub kind: Option<DimensionKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum DimensionKind {
    #[prost(message, tag = "1")]
    Constant(ConstantDimension),
    #[prost(message, tag = "2")]
    Unknown(UnknownDimension),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ConstantDimension {
    #[prost(uint64, tag = "1")]
    pub size: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UnknownDimension {
    /// Stands for any number of dimensions.
    #[prost(bool, tag = "1")]
    pub variadic: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Value {
    #[prost(string, tag = "1")]
    pub doc_string: String,
    #[prost(message, optional, tag = "2")]
    pub ty: Option<ValueType>,
    #[prost(oneof = "ValueKind", tags = "3, 5")]
    pub kind: Option<ValueKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ValueKind {
    #[prost(message, tag = "3")]
    Immediate(ImmediateValue),
    #[prost(message, tag = "5")]
    Blob(BlobFileValue),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImmediateValue {
    #[prost(oneof = "Immediate", tags = "1, 2, 3, 4")]
    pub kind: Option<Immediate>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Immediate {
    #[prost(message, tag = "1")]
    Tensor(TensorValue),
    #[prost(message, tag = "2")]
    Tuple(TupleValue),
    #[prost(message, tag = "3")]
    List(ListValue),
    #[prost(message, tag = "4")]
    Dictionary(DictionaryValue),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct BlobFileValue {
    #[prost(string, tag = "1")]
    pub file_name: String,
    /// Of the metadata record.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TensorValue {
    #[prost(oneof = "Elements", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub elements: Option<Elements>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Elements {
    #[prost(message, tag = "1")]
    Floats(Floats),
    #[prost(message, tag = "2")]
    Ints(Ints),
    #[prost(message, tag = "3")]
    Bools(Bools),
    #[prost(message, tag = "4")]
    Strings(Strings),
    #[prost(message, tag = "5")]
    LongInts(LongInts),
    #[prost(message, tag = "6")]
    Doubles(Doubles),
    #[prost(message, tag = "7")]
    Bytes(Bytes),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Floats {
    #[prost(float, repeated, tag = "1")]
    pub values: Vec<f32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Ints {
    #[prost(int32, repeated, tag = "1")]
    pub values: Vec<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Bools {
    #[prost(bool, repeated, tag = "1")]
    pub values: Vec<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Strings {
    #[prost(string, repeated, tag = "1")]
    pub values: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LongInts {
    #[prost(int64, repeated, tag = "1")]
    pub values: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Doubles {
    #[prost(double, repeated, tag = "1")]
    pub values: Vec<f64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Bytes {
    #[prost(bytes = "vec", tag = "1")]
    pub values: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TupleValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DictionaryValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<KeyValuePair>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValuePair {
    #[prost(message, optional, tag = "1")]
    pub key: Option<Value>,
    #[prost(message, optional, tag = "2")]
    pub value: Option<Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
    }

    /// Serialized by protobuf's own Python runtime from the same values.
    #[test]
    fn bytes_are_those_of_protobuf() {
        for (text, want) in [
            ("12040a02080a1a080a063a040a02003e", "fp16 1.5"),
            ("12040a02080b1a0a0a080a060a040000c03f", "fp32 1.5"),
            ("12040a0208171a070a0512030a0107", "int32 7"),
            ("12040a0208011a070a051a030a0101", "bool true"),
            ("12040a0208021a080a0622040a026869", "string hi"),
            ("120c0a0a081510011a040a0208021a080a063a040a02ff02", "int8 [-1, 2]"),
            ("12100a0e080b10021a020a001a040a0208031a040a020a00", "fp32 of shape (0, 3)"),
        ] {
            let bytes = hex(text);
            assert_eq!(Value::decode(&bytes[..]).unwrap().encode_to_vec(), bytes, "{want}");
        }
        for text in ["0a0308ac02", "0a00", "1200", "12020801"] {
            let bytes = hex(text);
            assert_eq!(Dimension::decode(&bytes[..]).unwrap().encode_to_vec(), bytes);
        }
    }
}
