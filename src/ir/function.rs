//! Functions, blocks, ops and values, and the readers of all of them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::arena::Arena;
use super::{
    BlockId, DType, Id, Interface, Literal, LiteralError, LiteralId, Name, NoWeights, OpId, Symbol, TensorType,
    ValueId, ValueType, Weights,
};

/// What an op reads through one binding of a parameter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Operand {
    /// A value.
    Value(ValueId),
    /// A constant written in the binding itself.
    Literal(LiteralId),
}

impl Operand {
    /// The value, unless this is a literal.
    pub fn as_value(&self) -> Option<ValueId> {
        match self {
            Operand::Value(v) => Some(*v),
            Operand::Literal(_) => None,
        }
    }
}

/// Who reads a value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Use {
    /// An op, through the operand at this position of [`OpData::operands`].
    Op {
        /// The reader.
        op: OpId,
        /// Position among its operands.
        operand: u32,
    },
    /// A block returns the value.
    Output {
        /// The block.
        block: BlockId,
        /// Position among its outputs.
        index: u32,
    },
}

impl Use {
    /// The reading op, unless a block returns the value.
    pub fn op(self) -> Option<OpId> {
        match self {
            Use::Op { op, .. } => Some(op),
            Use::Output { .. } => None,
        }
    }
}

/// Where a value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Def {
    /// The function's input at this position.
    Input(u32),
    /// The input of a nested block at this position.
    BlockInput(BlockId, u32),
    /// Result of an op at this position.
    Result(OpId, u32),
}

/// A value.
#[derive(Clone, Debug)]
pub struct ValueData {
    pub(super) name: Name,
    pub(super) ty: ValueType,
    pub(super) def: Def,
    pub(super) uses: Vec<Use>,
}

impl ValueData {
    /// Name, unique among the values that are visible together.
    pub fn name(&self) -> &Name {
        &self.name
    }
    /// Type.
    pub fn ty(&self) -> &ValueType {
        &self.ty
    }
    /// Where it comes from.
    pub fn def(&self) -> Def {
        self.def
    }
    /// Every use, in no particular order. A use inside a nested block counts.
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }
}

/// An operation.
#[derive(Clone, Debug)]
pub struct OpData {
    pub(super) kind: Name,
    /// Parameter names, sorted, each with the range of its bindings in `operands`.
    pub(super) params: SmallVec<[(Name, Range<u32>); 4]>,
    pub(super) operands: SmallVec<[Operand; 4]>,
    /// For each operand that is a value: its position in that value's use list.
    pub(super) use_at: SmallVec<[u32; 4]>,
    pub(super) results: SmallVec<[ValueId; 1]>,
    /// Attribute names, sorted.
    pub(super) attributes: SmallVec<[(Name, LiteralId); 2]>,
    pub(super) blocks: SmallVec<[BlockId; 0]>,
    pub(super) block: BlockId,
    pub(super) prev: Option<OpId>,
    pub(super) next: Option<OpId>,
    pub(super) order: u64,
    pub(super) live: bool,
    pub(super) source: Option<Range<usize>>,
    pub(super) unmodelled: Option<Box<str>>,
}

impl OpData {
    /// Op type (`matmul`, `reshape`, …).
    pub fn kind(&self) -> &Name {
        &self.kind
    }
    /// Every operand, parameter by parameter in name order.
    pub fn operands(&self) -> &[Operand] {
        &self.operands
    }
    /// Bound parameters in name order, each with its bindings.
    pub fn params(&self) -> impl Iterator<Item = (&Name, &[Operand])> {
        self.params.iter().map(|(n, r)| (n, &self.operands[r.start as usize..r.end as usize]))
    }
    /// The bindings of one parameter; empty when it is not bound.
    pub fn param(&self, name: &str) -> &[Operand] {
        self.params
            .iter()
            .find(|(n, _)| n == name)
            .map_or(&[], |(_, r)| &self.operands[r.start as usize..r.end as usize])
    }
    /// Name of the parameter that the operand at this position belongs to.
    pub fn param_of(&self, operand: usize) -> Option<&Name> {
        self.params.iter().find(|(_, r)| r.contains(&(operand as u32))).map(|(n, _)| n)
    }
    /// The single value bound to a parameter.
    pub fn value(&self, name: &str) -> Option<ValueId> {
        match self.param(name) {
            [Operand::Value(v)] => Some(*v),
            _ => None,
        }
    }
    /// Results.
    pub fn results(&self) -> &[ValueId] {
        &self.results
    }
    /// Attributes in name order.
    pub fn attributes(&self) -> impl Iterator<Item = (&Name, LiteralId)> {
        self.attributes.iter().map(|(n, l)| (n, *l))
    }
    /// Nested blocks.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
    /// The block that holds this op.
    pub fn block(&self) -> BlockId {
        self.block
    }
    /// Bytes of the model file that still spell exactly this op, nested blocks included.
    pub fn source(&self) -> Option<Range<usize>> {
        self.source.clone()
    }
    /// What the file says of this op that the IR cannot hold. Such an op may be kept or erased, never edited.
    pub fn unmodelled(&self) -> Option<&str> {
        self.unmodelled.as_deref()
    }
}

/// A list of ops with inputs (nested blocks of loops) and outputs.
#[derive(Clone, Debug)]
pub struct BlockData {
    pub(super) inputs: Vec<ValueId>,
    pub(super) outputs: Vec<ValueId>,
    pub(super) output_use_at: Vec<u32>,
    pub(super) parent: Option<OpId>,
    pub(super) first: Option<OpId>,
    pub(super) last: Option<OpId>,
    pub(super) len: usize,
}

impl BlockData {
    /// Inputs; empty for a function body.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }
    /// Returned values.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }
    /// The op that owns this block; `None` for a function body.
    pub fn parent(&self) -> Option<OpId> {
        self.parent
    }
    /// Number of ops, nested ones not counted.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether the block holds no op.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Bounds of an unknown size and what gave rise to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SymbolRange {
    /// Smallest value.
    pub lo: u64,
    /// Largest value; `None` when unbounded.
    pub hi: Option<u64>,
}

/// One function of a program. See the [module documentation](super) for what holds of it.
#[derive(Clone, Debug)]
pub struct Function {
    pub(super) name: Name,
    pub(super) opset: Name,
    pub(super) inputs: Vec<ValueId>,
    pub(super) body: BlockId,
    pub(super) values: Arena<ValueId, ValueData>,
    pub(super) ops: Arena<OpId, OpData>,
    pub(super) blocks: Arena<BlockId, BlockData>,
    pub(super) literals: Arena<LiteralId, Literal>,
    pub(super) interned: HashMap<Literal, LiteralId>,
    pub(super) names: HashMap<Name, u32>,
    pub(super) symbols: Vec<SymbolRange>,
    pub(super) interface: Interface,
    pub(super) interface_edited: bool,
    pub(super) revision: u64,
    pub(super) fresh: u64,
    pub(super) weights: Arc<dyn Weights>,
}

impl Function {
    /// An empty function. `opset` is the opset string, e.g. `CoreML8`.
    pub fn new(name: impl Into<Name>, opset: impl Into<Name>) -> Function {
        let mut blocks = Arena::new();
        let body = blocks.push(BlockData {
            inputs: Vec::new(),
            outputs: Vec::new(),
            output_use_at: Vec::new(),
            parent: None,
            first: None,
            last: None,
            len: 0,
        });
        Function {
            name: name.into(),
            opset: opset.into(),
            inputs: Vec::new(),
            body,
            values: Arena::new(),
            ops: Arena::new(),
            blocks,
            literals: Arena::new(),
            interned: HashMap::new(),
            names: HashMap::new(),
            symbols: Vec::new(),
            interface: Interface::default(),
            interface_edited: false,
            revision: 0,
            fresh: 0,
            weights: Arc::new(NoWeights),
        }
    }

    /// Name.
    pub fn name(&self) -> &Name {
        &self.name
    }
    /// Opset string, e.g. `CoreML8`.
    pub fn opset(&self) -> &Name {
        &self.opset
    }
    /// The opset's number: 8 for `CoreML8`, 0 when the string is not of that form.
    pub fn opset_version(&self) -> u32 {
        self.opset.strip_prefix("CoreML").and_then(|n| n.parse().ok()).unwrap_or(0)
    }
    /// Function inputs in signature order, states included.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }
    /// The body.
    pub fn body(&self) -> BlockId {
        self.body
    }
    /// Values that the function returns.
    pub fn outputs(&self) -> &[ValueId] {
        &self.blocks[self.body].outputs
    }
    /// What the description says of this function.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }
    /// Whether the interface was edited since the function was read.
    pub fn interface_edited(&self) -> bool {
        self.interface_edited
    }
    /// A number that grows with every edit. Zero means untouched since the function was read or built.
    pub fn revision(&self) -> u64 {
        self.revision
    }
    /// Where the bytes of weights come from.
    pub fn weights(&self) -> &Arc<dyn Weights> {
        &self.weights
    }

    /// A value.
    pub fn value(&self, v: ValueId) -> &ValueData {
        &self.values[v]
    }
    /// An op.
    pub fn op(&self, op: OpId) -> &OpData {
        &self.ops[op]
    }
    /// A block.
    pub fn block(&self, b: BlockId) -> &BlockData {
        &self.blocks[b]
    }
    /// An interned constant.
    pub fn literal(&self, l: LiteralId) -> &Literal {
        &self.literals[l]
    }
    /// Bounds of an unknown size.
    pub fn symbol_range(&self, s: Symbol) -> &SymbolRange {
        &self.symbols[s.index()]
    }
    /// How many unknown sizes there are.
    pub fn symbol_count(&self) -> usize {
        self.symbols.len()
    }
    /// Upper bound (exclusive) of [`Id::index`] over all values, dead ones included: the length of a side table.
    pub fn value_capacity(&self) -> usize {
        self.values.len()
    }
    /// Upper bound (exclusive) of [`Id::index`] over all ops, erased ones included.
    pub fn op_capacity(&self) -> usize {
        self.ops.len()
    }
    /// Whether the op is still part of the function.
    pub fn is_live(&self, op: OpId) -> bool {
        op.index() < self.ops.len() && self.ops[op].live
    }

    /// The type of a value.
    pub fn ty(&self, v: ValueId) -> &ValueType {
        &self.values[v].ty
    }
    /// The tensor type of a value, if it is a tensor of known rank.
    pub fn tensor(&self, v: ValueId) -> Option<&TensorType> {
        self.values[v].ty.as_tensor()
    }
    /// The op that computes a value; `None` for inputs.
    pub fn producer(&self, v: ValueId) -> Option<OpId> {
        match self.values[v].def {
            Def::Result(op, _) => Some(op),
            _ => None,
        }
    }
    /// Whether some block returns the value.
    pub fn is_output(&self, v: ValueId) -> bool {
        self.values[v].uses.iter().any(|u| matches!(u, Use::Output { .. }))
    }
    /// Ops that read the value, sorted, each once.
    pub fn users(&self, v: ValueId) -> SmallVec<[OpId; 4]> {
        let mut users: SmallVec<[OpId; 4]> = self.values[v].uses.iter().filter_map(|u| u.op()).collect();
        users.sort_unstable();
        users.dedup();
        users
    }
    /// The op that a use belongs to: the reader, or the one whose block returns the value. `None` where the function does.
    pub fn user(&self, u: Use) -> Option<OpId> {
        match u {
            Use::Op { op, .. } => Some(op),
            Use::Output { block, .. } => self.block(block).parent(),
        }
    }
    /// The input with this name.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.inputs.iter().copied().find(|&v| self.values[v].name == *name)
    }

    /// The ops of a block in order, nested ones not included.
    pub fn ops(&self, b: BlockId) -> Ops<'_> {
        Ops { f: self, next: self.blocks[b].first }
    }
    /// Every op of the function in order; an op comes before those of its nested blocks.
    pub fn all_ops(&self) -> Vec<OpId> {
        fn walk(f: &Function, b: BlockId, out: &mut Vec<OpId>) {
            for op in f.ops(b) {
                out.push(op);
                for &inner in f.op(op).blocks() {
                    walk(f, inner, out);
                }
            }
        }
        let mut out = Vec::new();
        walk(self, self.body, &mut out);
        out
    }
    /// Whether op `a` comes before op `b`; both must lie in one block.
    pub fn comes_before(&self, a: OpId, b: OpId) -> bool {
        debug_assert_eq!(self.ops[a].block, self.ops[b].block, "ops of one block");
        self.ops[a].order < self.ops[b].order
    }
    /// The op of block `b` that is `op` or owns the nested block in which `op` lies.
    pub fn ancestor_in(&self, op: OpId, b: BlockId) -> Option<OpId> {
        let mut at = op;
        loop {
            let block = self.ops[at].block;
            if block == b {
                return Some(at);
            }
            at = self.blocks[block].parent?;
        }
    }
    /// Whether a value, function input or block input with this name exists anywhere in the function.
    pub fn has_name(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }
    /// The first value with this name, in order of definition, among those that are live.
    pub fn find_value(&self, name: &str) -> Option<ValueId> {
        self.names.get(name)?;
        self.values.ids().find(|&v| {
            self.values[v].name == *name
                && match self.values[v].def {
                    Def::Result(op, _) => self.ops[op].live,
                    _ => true,
                }
        })
    }

    /// The constant behind a value: the `val` of the `const` op that produces it.
    pub fn const_value(&self, v: ValueId) -> Option<&Literal> {
        self.const_literal(v).map(|l| &self.literals[l])
    }
    /// The id of the constant behind a value.
    pub fn const_literal(&self, v: ValueId) -> Option<LiteralId> {
        let op = &self.ops[self.producer(v)?];
        if op.kind != "const" {
            return None;
        }
        op.attributes.iter().find(|(n, _)| n == "val").map(|(_, l)| *l)
    }
    /// The constant an operand stands for: a literal binding or the value of a `const` op.
    pub fn operand_literal(&self, operand: &Operand) -> Option<&Literal> {
        match operand {
            Operand::Literal(l) => Some(&self.literals[*l]),
            Operand::Value(v) => self.const_value(*v),
        }
    }
    /// The type of an operand.
    pub fn operand_type(&self, operand: &Operand) -> &ValueType {
        match operand {
            Operand::Literal(l) => &self.literals[*l].ty,
            Operand::Value(v) => &self.values[*v].ty,
        }
    }
    /// The constant bound to a parameter, whether by a `const` op, a literal binding or an attribute.
    pub fn const_param(&self, op: OpId, name: &str) -> Option<&Literal> {
        let data = &self.ops[op];
        match data.param(name) {
            [one] => self.operand_literal(one),
            [] => data.attributes.iter().find(|(n, _)| n == name).map(|(_, l)| &self.literals[*l]),
            _ => None,
        }
    }
    /// Whether a parameter is bound in any form.
    pub fn has_param(&self, op: OpId, name: &str) -> bool {
        let data = &self.ops[op];
        !data.param(name).is_empty() || data.attributes.iter().any(|(n, _)| n == name)
    }
    /// The integers (or bools) of a constant parameter; `None` when it is absent, not constant or not integral.
    ///
    /// # Errors
    /// When the constant is there but its bytes cannot be read.
    pub fn try_ints(&self, op: OpId, name: &str) -> Result<Option<Vec<i64>>, LiteralError> {
        match self.const_param(op, name) {
            Some(l) => match l.ty.as_tensor() {
                Some(t) if t.dtype.is_int() || t.dtype == DType::Bool => l.to_ints(&*self.weights).map(Some),
                _ => Ok(None),
            },
            None => Ok(None),
        }
    }
    /// [`Function::try_ints`] with an unreadable constant taken as unknown.
    pub fn ints(&self, op: OpId, name: &str) -> Option<Vec<i64>> {
        self.try_ints(op, name).ok().flatten()
    }
    /// The single integer of a constant parameter.
    pub fn int(&self, op: OpId, name: &str) -> Option<i64> {
        match self.ints(op, name)?[..] {
            [n] => Some(n),
            _ => None,
        }
    }
    /// The single truth value of a constant parameter.
    pub fn bool(&self, op: OpId, name: &str) -> Option<bool> {
        self.int(op, name).map(|n| n != 0)
    }
    /// The string of a constant parameter.
    pub fn str(&self, op: OpId, name: &str) -> Option<&str> {
        self.const_param(op, name)?.as_str()
    }
    /// The integers of a constant operand or value.
    pub fn operand_ints(&self, operand: &Operand) -> Option<Vec<i64>> {
        self.operand_literal(operand)?.to_ints(&*self.weights).ok()
    }

    /// A line that says which op this is, for messages: kind and first result, e.g. ``matmul `scores` ``.
    pub fn describe(&self, op: OpId) -> String {
        let data = &self.ops[op];
        match data.results.first() {
            Some(&v) => format!("{} `{}`", data.kind, self.values[v].name),
            None => match data.param("input") {
                [Operand::Value(v)] => format!("{} of `{}`", data.kind, self.values[*v].name),
                _ => format!("{} {op}", data.kind),
            },
        }
    }
}

/// Iterates over the ops of one block.
#[derive(Clone, Debug)]
pub struct Ops<'f> {
    f: &'f Function,
    next: Option<OpId>,
}

impl Iterator for Ops<'_> {
    type Item = OpId;
    fn next(&mut self) -> Option<OpId> {
        let op = self.next?;
        self.next = self.f.ops[op].next;
        Some(op)
    }
}
