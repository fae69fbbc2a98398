//! Model file → [`Program`].

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use prost::Message;

use super::convert::Reader;
use super::error::DecodeError;
use super::interface;
use super::source::{FunctionSource, InputSource, ModelFile};
use crate::ir::{
    BlockId, Dim, Function, Interface, Literal, LiteralData, LiteralId, Metadata, Name, OpSpec, Operand, Place,
    Program, TensorType, ValueId, ValueType, Weights,
};
use crate::proto::mil::{self, BindingKind};
use crate::proto::model::{self, ML_PROGRAM, MODEL_TYPES, Model, ModelDescription};
use crate::proto::schema::{self, Schema};
use crate::proto::wire;

/// Reads the program of a model file and keeps the file's bytes as its source.
pub(super) fn decode(bytes: Arc<[u8]>, weights: Arc<dyn Weights>) -> Result<Program, DecodeError> {
    if i32::try_from(bytes.len()).is_err() {
        return Err(DecodeError::Format("more than 2 GiB, the limit of protobuf".into()));
    }
    let program_range = program_range(&bytes)?;
    let description_range = at_most_one(&bytes, 0..bytes.len(), 2, "descriptions")?;
    let Model { specification_version, description, .. } = Model::decode(&bytes[..])?;
    let description = description.unwrap_or_default();

    let mut functions = Vec::new();
    let mut sources = BTreeMap::new();
    for entry in wire::payloads(&bytes, program_range.clone(), 2)? {
        let (name, range) = map_entry(&bytes, entry)?;
        let name = Name::from(name);
        let (mut f, source) = FunctionDecoder::decode(&bytes, range, &name, &description)?;
        f.set_weights(weights.clone());
        f.reset_revision();
        functions.push(f);
        if sources.insert(name.clone(), source).is_some() {
            return Err(DecodeError::Structure { function: name.to_string(), what: "is there twice".into() });
        }
    }
    functions.sort_by(|a, b| a.name().cmp(b.name()));

    let default_function =
        (!description.default_function_name.is_empty()).then(|| Name::from(description.default_function_name.as_str()));
    let metadata = decode_metadata(description.metadata.as_ref());
    let source = ModelFile {
        bytes,
        program: program_range,
        description: description_range,
        functions: sources,
        specification_version,
        default_function: default_function.clone(),
        metadata: metadata.clone(),
        weights,
    };
    Ok(Program { functions, default_function, specification_version, metadata, source: Some(Arc::new(source)) })
}

/// Where the ML Program lies; an error that says what the model is when it is of another kind.
fn program_range(bytes: &[u8]) -> Result<Range<usize>, DecodeError> {
    let mut kinds = Vec::new();
    for field in wire::fields(bytes, 0..bytes.len()) {
        let field = field?;
        if let Some(kind) = MODEL_TYPES.iter().find(|(number, ..)| *number == field.number) {
            if field.wire != wire::WireType::Len {
                return Err(DecodeError::Format(format!("its {} is not a message", kind.1)));
            }
            kinds.push((kind, field.payload));
        }
    }
    match &kinds[..] {
        [((ML_PROGRAM, ..), range)] => Ok(range.clone()),
        [] => Err(DecodeError::Format("it holds no model of a known kind".into())),
        [((number @ 200..=202, name, what), range)] => {
            let models = pipeline_models(bytes, range.clone(), *number)?;
            Err(DecodeError::Kind(format!("{what} ({name}) of {models}")))
        }
        [((_, name, what), _)] => Err(DecodeError::Kind(format!("{what} ({name})"))),
        _ => Err(DecodeError::Format(format!("it holds {} models", kinds.len()))),
    }
}

/// The kinds of the models in a pipeline, for people.
fn pipeline_models(bytes: &[u8], range: Range<usize>, number: u32) -> Result<String, DecodeError> {
    let pipeline = match number {
        202 => range,
        _ => at_most_one(bytes, range, 1, "pipelines")?.unwrap_or(0..0),
    };
    let models = model::Pipeline::decode(&bytes[pipeline])?.models;
    let mut kinds = Vec::new();
    for model in &models {
        for field in wire::fields(model, 0..model.len()) {
            let number = field?.number;
            kinds.extend(MODEL_TYPES.iter().filter(|(n, ..)| *n == number).map(|(_, name, _)| *name));
        }
    }
    Ok(match kinds.len() {
        1 => format!("1 model ({})", kinds[0]),
        n => format!("{n} models ({})", kinds.join(", ")),
    })
}

fn at_most_one(
    bytes: &[u8],
    range: Range<usize>,
    number: u32,
    what: &str,
) -> Result<Option<Range<usize>>, DecodeError> {
    match &wire::payloads(bytes, range, number)?[..] {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        many => Err(DecodeError::Format(format!("it holds {} {what}", many.len()))),
    }
}

/// Key and message range of a map entry.
pub(super) fn map_entry(bytes: &[u8], entry: Range<usize>) -> Result<(&str, Range<usize>), DecodeError> {
    let key = wire::payloads(bytes, entry.clone(), 1)?.pop().unwrap_or(0..0);
    let key = std::str::from_utf8(&bytes[key]).map_err(|_| DecodeError::Format("a name is not UTF-8".into()))?;
    let end = entry.end..entry.end;
    Ok((key, at_most_one(bytes, entry, 2, "values in one map entry")?.unwrap_or(end)))
}

fn decode_metadata(metadata: Option<&model::Metadata>) -> Metadata {
    let Some(m) = metadata else { return Metadata::default() };
    Metadata {
        short_description: m.short_description.clone(),
        version: m.version_string.clone(),
        author: m.author.clone(),
        license: m.license.clone(),
        user_defined: m.user_defined.clone(),
    }
}

/// The `Operation` messages of a block: its field 3.
const OPERATIONS: u32 = 3;
/// The nested blocks of an operation: its field 4.
const BLOCKS: u32 = 4;

struct FunctionDecoder<'a> {
    bytes: &'a [u8],
    f: Function,
    reader: Reader,
    /// Values that can be seen from where the decoder is.
    visible: HashMap<Name, ValueId>,
    /// Definitions in order, so that those of a block can be forgotten at its end.
    defined: Vec<Name>,
}

impl<'a> FunctionDecoder<'a> {
    fn decode(
        bytes: &'a [u8],
        range: Range<usize>,
        name: &Name,
        description: &ModelDescription,
    ) -> Result<(Function, FunctionSource), DecodeError> {
        let located = |what: String| DecodeError::Structure { function: name.to_string(), what };
        let opset = match wire::payloads(bytes, range.clone(), 2)?.pop() {
            Some(at) => std::str::from_utf8(&bytes[at]).map_err(|_| located("its opset is not UTF-8".into()))?,
            None => "",
        };
        let mut body = None;
        for entry in wire::payloads(bytes, range.clone(), 3)? {
            let (key, block) = map_entry(bytes, entry)?;
            if key == opset && body.replace(block).is_some() {
                return Err(located(format!("it has two blocks for opset `{opset}`")));
            }
        }
        let body = body.ok_or_else(|| located(format!("it has no block for its opset `{opset}`")))?;

        let mut d = FunctionDecoder {
            bytes,
            f: Function::new(name.clone(), opset),
            reader: Reader::default(),
            visible: HashMap::new(),
            defined: Vec::new(),
        };
        let interface = interface::decode(description, name);
        let inputs = d.inputs(range.clone(), &interface)?;
        d.f.set_interface(interface);
        let block = d.f.body();
        d.ops(block, body.clone())?;
        for output in wire::payloads(bytes, body.clone(), 2)? {
            let output = String::from_utf8_lossy(&bytes[output]).into_owned();
            d.output(block, &output, "it")?;
        }
        d.reader.take_note();
        Ok((d.f, FunctionSource { range, body, inputs }))
    }

    fn error(&self, what: String) -> DecodeError {
        DecodeError::Structure { function: self.f.name().to_string(), what }
    }

    fn inputs(&mut self, function: Range<usize>, interface: &Interface) -> Result<Vec<InputSource>, DecodeError> {
        let mut sources = Vec::new();
        for range in wire::payloads(self.bytes, function, 1)? {
            let input = mil::NamedValueType::decode(&self.bytes[range.clone()])?;
            let name = self.reader.name(&input.name);
            let mut ty = self.reader.ty(&mut self.f, input.ty.as_ref());
            if let ValueType::Tensor(t) = &mut ty {
                self.bound(t, &name, interface);
            }
            let unmodelled = self.unmodelled(&schema::NAMED_VALUE_TYPE, range.clone())?;
            sources.push(InputSource { name: name.clone(), ty: ty.clone(), range, unmodelled });
            let v = self.f.add_input(name.clone(), ty);
            self.define(name, v, "input")?;
        }
        Ok(sources)
    }

    /// Gives the unknown axes of an input the ranges of its description.
    fn bound(&mut self, t: &mut TensorType, name: &str, interface: &Interface) {
        let rank = t.rank();
        for (axis, dim) in t.shape.iter_mut().enumerate() {
            if dim.as_known().is_none() {
                let range = interface::axis_range(interface.input(name), rank, axis);
                *dim = Dim::unknown(self.f.add_symbol(range));
            }
        }
    }

    fn unmodelled(&mut self, schema: &'static Schema, range: Range<usize>) -> Result<Option<String>, DecodeError> {
        let note = self.reader.take_note();
        Ok(schema.unknown_field(self.bytes, range)?.or(note))
    }

    fn define(&mut self, name: Name, v: ValueId, by: &str) -> Result<(), DecodeError> {
        if self.visible.insert(name.clone(), v).is_some() {
            return Err(self.error(format!("{by} `{name}`: a value of this name is there already")));
        }
        self.defined.push(name);
        Ok(())
    }

    fn lookup(&self, name: &str, reader: &str) -> Result<ValueId, DecodeError> {
        let found = self.visible.get(name).copied();
        found.ok_or_else(|| self.error(format!("{reader} reads `{name}`, which nothing before it defines")))
    }

    fn output(&mut self, block: BlockId, name: &str, owner: &str) -> Result<(), DecodeError> {
        let v = *self
            .visible
            .get(name)
            .ok_or_else(|| self.error(format!("{owner} returns `{name}`, which nothing defines")))?;
        self.f.add_output(block, v);
        Ok(())
    }

    /// The ops of the function's body.
    fn ops(&mut self, block: BlockId, range: Range<usize>) -> Result<(), DecodeError> {
        for range in wire::payloads(self.bytes, range, OPERATIONS)? {
            let op = mil::Operation::decode(&self.bytes[range.clone()])?;
            self.op(block, &op, range)?;
        }
        Ok(())
    }

    fn op(&mut self, block: BlockId, op: &mil::Operation, range: Range<usize>) -> Result<(), DecodeError> {
        let label = match op.outputs.first() {
            Some(first) => format!("{} `{}`", op.kind, first.name),
            None => format!("{} without results", op.kind),
        };
        let mut inputs = Vec::with_capacity(op.inputs.len());
        for (param, argument) in &op.inputs {
            let bindings = argument.arguments.iter().map(|b| self.operand(b, &label)).collect::<Result<_, _>>()?;
            inputs.push((self.reader.name(param), bindings));
        }
        let attributes = op.attributes.iter().map(|(name, value)| (self.reader.name(name), self.literal(value)));
        let attributes = attributes.collect();
        let results: Vec<(Name, ValueType)> = op
            .outputs
            .iter()
            .map(|o| (Name::from(o.name.as_str()), self.reader.ty(&mut self.f, o.ty.as_ref())))
            .collect();
        let spec = OpSpec { kind: self.reader.name(&op.kind), inputs, attributes, results };
        let id = self.f.insert_op(Place::End(block), spec);
        let nested = wire::payloads(self.bytes, range.clone(), BLOCKS)?;
        let note = self.reader.take_note();
        let mut block_note = None;
        for (block, at) in op.blocks.iter().zip(nested) {
            let found = self.nested(id, block, at, &label)?;
            block_note = block_note.or(found);
        }
        let unmodelled = schema::OPERATION.unknown_field(self.bytes, range.clone())?.or(note).or(block_note);
        self.f.set_source(id, Some(range), unmodelled.map(String::into_boxed_str));
        for v in self.f.op(id).results().to_vec() {
            let name = self.f.value(v).name().clone();
            self.define(name, v, &op.kind)?;
        }
        Ok(())
    }

    /// A nested block; returns what the IR cannot hold of the block itself.
    fn nested(
        &mut self,
        owner: crate::ir::OpId,
        block: &mil::Block,
        range: Range<usize>,
        label: &str,
    ) -> Result<Option<String>, DecodeError> {
        let outer = self.defined.len();
        let id = self.f.add_block(owner);
        for input in &block.inputs {
            let name = self.reader.name(&input.name);
            let ty = self.reader.ty(&mut self.f, input.ty.as_ref());
            let v = self.f.add_block_input(id, name.clone(), ty);
            self.define(name, v, &format!("{label}: block input"))?;
        }
        if !block.attributes.is_empty() {
            self.reader.note("attributes on a block");
        }
        let note = self.reader.take_note();
        for (op, at) in block.operations.iter().zip(wire::payloads(self.bytes, range, OPERATIONS)?) {
            self.op(id, op, at)?;
        }
        for output in &block.outputs {
            self.output(id, output, &format!("a block of {label}"))?;
        }
        for name in self.defined.drain(outer..) {
            self.visible.remove(&name);
        }
        Ok(note)
    }

    fn operand(&mut self, binding: &mil::Binding, label: &str) -> Result<Operand, DecodeError> {
        Ok(match &binding.kind {
            Some(BindingKind::Name(name)) => Operand::Value(self.lookup(name, label)?),
            Some(BindingKind::Value(value)) => Operand::Literal(self.literal(value)),
            None => {
                self.reader.note("an empty binding");
                Operand::Literal(self.f.intern(Literal { ty: ValueType::Missing, data: LiteralData::Absent }))
            }
        })
    }

    fn literal(&mut self, value: &mil::Value) -> LiteralId {
        let literal = self.reader.literal(&mut self.f, value);
        self.f.intern(literal)
    }
}
