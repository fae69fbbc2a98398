//! [`Program`] → model file.
//!
//! What was not edited is copied from the program's source: the whole file, else every field around the functions,
//! else every op that still has its bytes. Only the rest is encoded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use prost::Message;

use super::convert::{encode_literal, encode_type};
use super::decode::map_entry;
use super::describe;
use super::error::EncodeError;
use super::source::{FunctionSource, InputSource, ModelFile};
use super::weights::BlobWriter;
use crate::ir::{BlobRef, BlockId, Function, Literal, LiteralData, LiteralId, OpData, OpId, Operand, Program, ValueId};
use crate::proto::mil::{self, BindingKind};
use crate::proto::model::{ML_PROGRAM, Model};
use crate::proto::wire::{self, Splice};

/// The name under which new weights are written.
pub(super) const WEIGHT_FILE: &str = "@model_path/weights/weight.bin";

/// An encoded program.
#[derive(Debug)]
pub(super) struct Encoded {
    /// The model file.
    pub(super) model: Vec<u8>,
    /// A weight file that goes with it, for a program that was read from nowhere.
    pub(super) weights: Option<Vec<u8>>,
}

/// Encodes a program; the same program gives the same bytes. Without `in_place`, where the weight files of its source do
/// not come along, everything is encoded anew and every weight copied.
pub(super) fn encode(program: &Program, in_place: bool) -> Result<Encoded, EncodeError> {
    match ModelFile::of(program).filter(|_| in_place) {
        Some(source) if source.says(program) => Ok(Encoded { model: source.bytes.to_vec(), weights: None }),
        Some(source) => Ok(Encoded { model: splice(program, source)?, weights: None }),
        None => {
            let mut blobs = BlobWriter::default();
            let model = encode_all(program, ModelFile::of(program), Some(&mut blobs))?;
            Ok(Encoded { model, weights: blobs.finish() })
        }
    }
}

/// Encodes every function from the IR, and the description as far as `source` does not say it. With a blob writer, large
/// constants go there.
pub(super) fn encode_all(
    program: &Program,
    source: Option<&ModelFile>,
    mut blobs: Option<&mut BlobWriter>,
) -> Result<Vec<u8>, EncodeError> {
    let model = Model { specification_version: program.specification_version, description: None, is_updatable: false };
    let mut out = model.encode_to_vec();
    wire::put(&mut out, 2, &describe::encode(program, source)?);
    let mut functions = mil::Program { version: 1, ..Default::default() }.encode_to_vec();
    for f in &program.functions {
        let encoded = FunctionEncoder::new(f, None, blobs.as_deref_mut(), program.specification_version).encode()?;
        wire::put(&mut functions, 2, &wire::entry(f.name(), &encoded));
    }
    wire::put(&mut out, ML_PROGRAM, &functions);
    Ok(out)
}

fn splice(program: &Program, source: &ModelFile) -> Result<Vec<u8>, EncodeError> {
    let description = describe::encode(program, Some(source))?;
    let functions = splice_functions(program, source)?;
    let new_version = program.specification_version != source.specification_version;
    let mut out = wire::splice(&source.bytes, 0..source.bytes.len(), |field| {
        let mut new = Vec::new();
        match field.number {
            1 if new_version => prost::encoding::int32::encode(1, &program.specification_version, &mut new),
            2 => wire::put(&mut new, 2, &description),
            ML_PROGRAM => wire::put(&mut new, ML_PROGRAM, &functions),
            _ => return Ok::<_, EncodeError>(Splice::Keep),
        }
        Ok(Splice::With(new))
    })?;
    if source.description.is_none() && !description.is_empty() {
        wire::put(&mut out, 2, &description);
    }
    Ok(out)
}

fn splice_functions(program: &Program, source: &ModelFile) -> Result<Vec<u8>, EncodeError> {
    let bytes = &source.bytes;
    let encode = |f: &Function| -> Result<Vec<u8>, EncodeError> {
        let from = source.functions.get(f.name()).filter(|_| Arc::ptr_eq(f.weights(), &source.weights));
        let encoder = FunctionEncoder::new(f, from.map(|s| (&bytes[..], s)), None, program.specification_version);
        let mut out = Vec::new();
        wire::put(&mut out, 2, &wire::entry(f.name(), &encoder.encode()?));
        Ok(out)
    };
    let mut out = wire::splice(bytes, source.program.clone(), |field| {
        if field.number != 2 {
            return Ok(Splice::Keep);
        }
        let (name, _) = map_entry(bytes, field.payload.clone()).map_err(|e| EncodeError::Source(e.to_string()))?;
        Ok::<_, EncodeError>(match program.function(name) {
            Some(f) if f.revision() == 0 && Arc::ptr_eq(f.weights(), &source.weights) => Splice::Keep,
            Some(f) => Splice::With(encode(f)?),
            None => Splice::With(Vec::new()),
        })
    })?;
    for f in program.functions.iter().filter(|f| !source.functions.contains_key(f.name())) {
        out.extend(encode(f)?);
    }
    Ok(out)
}

struct FunctionEncoder<'a> {
    f: &'a Function,
    /// The file the function was read from and where it lies there.
    source: Option<(&'a [u8], &'a FunctionSource)>,
    blobs: Option<&'a mut BlobWriter>,
    /// Blobs already copied, by where they were.
    copied: BTreeMap<BlobRef, u64>,
    specification_version: i32,
}

impl<'a> FunctionEncoder<'a> {
    fn new(
        f: &'a Function,
        source: Option<(&'a [u8], &'a FunctionSource)>,
        blobs: Option<&'a mut BlobWriter>,
        specification_version: i32,
    ) -> Self {
        FunctionEncoder { f, source, blobs, copied: BTreeMap::new(), specification_version }
    }

    /// The `Function` message.
    fn encode(mut self) -> Result<Vec<u8>, EncodeError> {
        let Some((bytes, source)) = self.source else { return self.encode_new() };
        let inputs = self.inputs(bytes, &source.inputs)?;
        let mut inputs = Some(inputs);
        let mut out = Vec::new();
        if source.inputs.is_empty() {
            out.extend(inputs.take().unwrap_or_default());
        }
        out.extend(wire::splice(bytes, source.range.clone(), |field| {
            Ok::<_, EncodeError>(match field.number {
                1 => Splice::With(inputs.take().unwrap_or_default()),
                3 if field.payload.end >= source.body.end && field.payload.start <= source.body.start => {
                    Splice::With(self.specialization(bytes, field.payload.clone(), source.body.clone())?)
                }
                _ => Splice::Keep,
            })
        })?);
        Ok(out)
    }

    fn encode_new(mut self) -> Result<Vec<u8>, EncodeError> {
        let inputs = self.f.inputs().iter().map(|&v| self.named(v)).collect();
        let shell = mil::Function { inputs, opset: self.f.opset().to_string(), ..Default::default() };
        let mut out = shell.encode_to_vec();
        let body = self.block(self.f.body())?;
        wire::put(&mut out, 3, &wire::entry(self.f.opset(), &body));
        Ok(out)
    }

    /// The `inputs` fields. An input that is as it was read keeps its bytes.
    fn inputs(&self, bytes: &[u8], sources: &[InputSource]) -> Result<Vec<u8>, EncodeError> {
        let mut out = Vec::new();
        for &v in self.f.inputs() {
            let value = self.f.value(v);
            match sources.iter().find(|s| s.name == *value.name()) {
                Some(s) if s.ty == *value.ty() => wire::put(&mut out, 1, &bytes[s.range.clone()]),
                Some(InputSource { unmodelled: Some(what), .. }) => {
                    return Err(self.unmodelled(format!("input `{}`", value.name()), what));
                }
                _ => wire::put(&mut out, 1, &self.named(v).encode_to_vec()),
            }
        }
        Ok(out)
    }

    /// The map entry at `entry` with the block in it rewritten.
    fn specialization(
        &mut self,
        bytes: &[u8],
        entry: Range<usize>,
        body: Range<usize>,
    ) -> Result<Vec<u8>, EncodeError> {
        let rewritten = wire::splice(bytes, entry, |field| {
            if field.payload != body || field.number != 2 {
                return Ok::<_, EncodeError>(Splice::Keep);
            }
            let mut new = Vec::new();
            wire::put(&mut new, 2, &self.body(bytes, body.clone())?);
            Ok(Splice::With(new))
        })?;
        let mut out = Vec::new();
        wire::put(&mut out, 3, &rewritten);
        Ok(out)
    }

    /// The body's `Block` message: outputs and operations from the IR, everything else from the file.
    fn body(&mut self, bytes: &[u8], range: Range<usize>) -> Result<Vec<u8>, EncodeError> {
        let mut new = Some(self.outputs_and_ops(self.f.body())?);
        let mut out = wire::splice(bytes, range, |field| {
            Ok::<_, EncodeError>(match field.number {
                2 | 3 => Splice::With(new.take().unwrap_or_default()),
                _ => Splice::Keep,
            })
        })?;
        out.extend(new.unwrap_or_default());
        Ok(out)
    }

    /// A `Block` message.
    fn block(&mut self, b: BlockId) -> Result<Vec<u8>, EncodeError> {
        let inputs = self.f.block(b).inputs().iter().map(|&v| self.named(v)).collect();
        let mut out = mil::Block { inputs, ..Default::default() }.encode_to_vec();
        out.extend(self.outputs_and_ops(b)?);
        Ok(out)
    }

    fn outputs_and_ops(&mut self, b: BlockId) -> Result<Vec<u8>, EncodeError> {
        let outputs = self.f.block(b).outputs().iter().map(|&v| self.f.value(v).name().to_string()).collect();
        let mut out = mil::Block { outputs, ..Default::default() }.encode_to_vec();
        for op in self.f.ops(b) {
            match (self.source, self.f.op(op).source()) {
                (Some((bytes, _)), Some(range)) => wire::put(&mut out, 3, &bytes[range]),
                _ => wire::put(&mut out, 3, &self.op(op)?),
            }
        }
        Ok(out)
    }

    /// An `Operation` message, in the order of its field numbers.
    fn op(&mut self, op: OpId) -> Result<Vec<u8>, EncodeError> {
        let data = self.f.op(op);
        if let Some(what) = data.unmodelled() {
            return Err(self.unmodelled(self.f.describe(op), what));
        }
        let mut inputs = BTreeMap::new();
        for (name, operands) in data.params() {
            let arguments = operands.iter().map(|o| self.binding(o)).collect::<Result<_, _>>()?;
            inputs.insert(name.to_string(), mil::Argument { arguments });
        }
        let outputs = data.results().iter().map(|&v| self.named(v)).collect();
        let head = mil::Operation { kind: data.kind().to_string(), inputs, outputs, ..Default::default() };
        let mut out = head.encode_to_vec();
        for &b in data.blocks() {
            wire::put(&mut out, 4, &self.block(b)?);
        }
        let attributes = self.attributes(data)?;
        out.extend(mil::Operation { attributes, ..Default::default() }.encode_to_vec());
        Ok(out)
    }

    /// The attributes; an op without a `name` is called after its first result.
    fn attributes(&mut self, data: &OpData) -> Result<BTreeMap<String, mil::Value>, EncodeError> {
        let mut attributes = BTreeMap::new();
        for (name, literal) in data.attributes() {
            attributes.insert(name.to_string(), self.literal(literal)?);
        }
        if !attributes.contains_key("name") {
            let named = data.results().first().map(|&v| self.f.value(v).name().to_string());
            let written = || data.value("data").map(|v| format!("{}_{}", self.f.value(v).name(), data.kind()));
            if let Some(name) = named.or_else(written) {
                attributes.insert("name".into(), encode_literal(&Literal::string(&name))?);
            }
        }
        Ok(attributes)
    }

    fn binding(&mut self, operand: &Operand) -> Result<mil::Binding, EncodeError> {
        let kind = match operand {
            Operand::Value(v) => BindingKind::Name(self.f.value(*v).name().to_string()),
            Operand::Literal(l) => BindingKind::Value(self.literal(*l)?),
        };
        Ok(mil::Binding { kind: Some(kind) })
    }

    fn literal(&mut self, id: LiteralId) -> Result<mil::Value, EncodeError> {
        let literal = self.f.literal(id);
        match self.as_blob(literal)? {
            Some(blob) => encode_literal(&blob),
            None => encode_literal(literal),
        }
    }

    /// The constant as a reference into the weight file that is being written, if it belongs there.
    fn as_blob(&mut self, literal: &Literal) -> Result<Option<Literal>, EncodeError> {
        let function = self.f.name().to_string();
        let Some(blobs) = self.blobs.as_deref_mut() else {
            return match self.source {
                None if literal.is_blob() => {
                    Err(EncodeError::Program(format!("function `{function}` refers to weights of another package")))
                }
                _ => Ok(None),
            };
        };
        let Some(ty) = literal.ty.as_tensor() else { return Ok(None) };
        let weight = |e| EncodeError::Weight { function, source: Box::new(e) };
        let offset = match &literal.data {
            LiteralData::Bytes(b) if BlobWriter::takes(ty, self.specification_version) => blobs.append(ty, b),
            LiteralData::Blob(blob) => match self.copied.get(blob) {
                Some(&offset) => Some(offset),
                None => {
                    let data = literal.packed(&**self.f.weights()).map_err(weight)?;
                    let offset = blobs.append(ty, &data);
                    self.copied.extend(offset.map(|offset| (blob.clone(), offset)));
                    offset
                }
            },
            _ => None,
        };
        Ok(offset.map(|offset| Literal::blob(ty.clone(), WEIGHT_FILE, offset)))
    }

    fn named(&self, v: ValueId) -> mil::NamedValueType {
        let value = self.f.value(v);
        mil::NamedValueType { name: value.name().to_string(), ty: encode_type(value.ty()) }
    }

    fn unmodelled(&self, item: String, what: &str) -> EncodeError {
        EncodeError::Unmodelled { function: self.f.name().to_string(), item, what: what.to_string() }
    }
}
