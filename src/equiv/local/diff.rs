//! Which ops of two functions are the same.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::ir::{
    BlockId, Function, Literal, LiteralData, LiteralError, Name, OpId, Operand, ValueId, ValueType, Weights,
};

/// The constants of both functions; equal ones have equal numbers.
#[derive(Default)]
struct Constants {
    numbers: HashMap<Literal, usize>,
    /// Those of the second function that are not those of the first although they look alike.
    second: HashMap<Literal, usize>,
    count: usize,
}

impl Constants {
    fn of_first(&mut self, literal: &Literal) -> usize {
        if let Some(&n) = self.numbers.get(literal) {
            return n;
        }
        self.count += 1;
        self.numbers.insert(literal.clone(), self.count);
        self.count
    }

    /// The number of a constant of the second function, whose weights are `b`. Weights in another file are equal when their
    /// bytes are.
    fn of_second(
        &mut self,
        literal: &Literal,
        a: &Arc<dyn Weights>,
        b: &Arc<dyn Weights>,
    ) -> Result<usize, LiteralError> {
        if Arc::ptr_eq(a, b) || !literal.is_blob() || !self.numbers.contains_key(literal) {
            return Ok(self.of_first(literal));
        }
        if let Some(&n) = self.second.get(literal) {
            return Ok(n);
        }
        let n = match same_bytes(literal, &**a, &**b)? {
            true => self.of_first(literal),
            false => {
                self.count += 1;
                self.count
            }
        };
        self.second.insert(literal.clone(), n);
        Ok(n)
    }
}

/// Bytes of a weight that are compared at a time.
const PART: u64 = 1 << 22;

fn same_bytes(literal: &Literal, a: &dyn Weights, b: &dyn Weights) -> Result<bool, LiteralError> {
    let (LiteralData::Blob(blob), Some(ty)) = (&literal.data, literal.ty.as_tensor()) else { return Ok(false) };
    let Some(len) = ty.byte_len() else { return Ok(false) };
    let mut at = 0;
    while at < len {
        let part = at..len.min(at.saturating_add(PART));
        at = part.end;
        if a.read_part(blob, ty, part.clone())? != b.read_part(blob, ty, part)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What an operand stands for, in terms that both functions share.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Source {
    Value(Name, ValueType),
    Constant(usize),
}

/// An op in terms that both functions share.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    kind: Name,
    params: Vec<(Name, Vec<Source>)>,
    attributes: Vec<(Name, usize)>,
    results: Vec<(Name, ValueType)>,
    blocks: Vec<BlockKey>,
    unmodelled: Option<String>,
}

#[derive(PartialEq, Eq, Hash)]
struct BlockKey {
    inputs: Vec<(Name, ValueType)>,
    ops: Vec<Key>,
    outputs: Vec<Source>,
}

/// One of the two functions.
pub(super) struct Half<'f> {
    pub(super) f: &'f Function,
    /// The number of each literal.
    constants: HashMap<Literal, usize>,
    /// Ops of the body, without constants, in order.
    pub(super) ops: Vec<OpId>,
    /// The same op of the other function, for those that it has.
    pairs: HashMap<OpId, OpId>,
    /// Results of these ops and inputs of the function.
    values: HashMap<Name, ValueId>,
}

impl<'f> Half<'f> {
    fn new(f: &'f Function, number: impl FnMut(&Literal) -> Result<usize, LiteralError>) -> Result<Self, LiteralError> {
        let constants = constants(f, number)?;
        let ops: Vec<OpId> = f.ops(f.body()).filter(|&op| *f.op(op).kind() != "const").collect();
        let results = ops.iter().flat_map(|&op| f.op(op).results());
        let values = f.inputs().iter().chain(results).map(|&v| (f.value(v).name().clone(), v)).collect();
        Ok(Half { f, constants, ops, pairs: HashMap::new(), values })
    }

    /// A value by its name.
    pub(super) fn value(&self, name: &str) -> Option<ValueId> {
        self.values.get(name).copied()
    }

    /// Whether the other function has this op too.
    pub(super) fn is_paired(&self, op: OpId) -> bool {
        self.pairs.contains_key(&op)
    }

    /// The states that an op reads or writes.
    pub(super) fn states(&self, op: OpId) -> impl Iterator<Item = &Name> {
        let states = reads(self.f, op).into_iter().filter(|&v| self.f.ty(v).as_state().is_some());
        states.map(|v| self.f.value(v).name())
    }

    /// The number of the constant that a value or literal is.
    pub(super) fn constant(&self, literal: &Literal) -> usize {
        self.constants.get(literal).copied().unwrap_or(0)
    }

    fn source(&self, operand: &Operand) -> Source {
        match (self.f.operand_literal(operand), operand) {
            (Some(literal), _) => Source::Constant(self.constant(literal)),
            (None, Operand::Value(v)) => Source::Value(self.f.value(*v).name().clone(), self.f.ty(*v).clone()),
            (None, Operand::Literal(_)) => Source::Constant(0),
        }
    }

    fn named(&self, values: &[ValueId]) -> Vec<(Name, ValueType)> {
        values.iter().map(|&v| (self.f.value(v).name().clone(), self.f.ty(v).clone())).collect()
    }

    fn key(&self, op: OpId) -> Key {
        let data = self.f.op(op);
        Key {
            kind: data.kind().clone(),
            params: data.params().map(|(n, o)| (n.clone(), o.iter().map(|o| self.source(o)).collect())).collect(),
            attributes: data
                .attributes()
                .filter(|(n, _)| *n != "name")
                .map(|(n, l)| (n.clone(), self.constant(self.f.literal(l))))
                .collect(),
            results: self.named(data.results()),
            blocks: data.blocks().iter().map(|&b| self.block_key(b)).collect(),
            unmodelled: data.unmodelled().map(str::to_owned),
        }
    }

    fn block_key(&self, b: BlockId) -> BlockKey {
        let block = self.f.block(b);
        let ops = self.f.ops(b).filter(|&op| *self.f.op(op).kind() != "const");
        BlockKey {
            inputs: self.named(block.inputs()),
            ops: ops.map(|op| self.key(op)).collect(),
            outputs: block.outputs().iter().map(|&v| self.source(&Operand::Value(v))).collect(),
        }
    }
}

/// The number of every literal of a function.
fn constants(
    f: &Function,
    mut number: impl FnMut(&Literal) -> Result<usize, LiteralError>,
) -> Result<HashMap<Literal, usize>, LiteralError> {
    let mut numbers = HashMap::new();
    let mut failed = None;
    for_each_literal(f, |literal| {
        if failed.is_none() && !numbers.contains_key(literal) {
            match number(literal) {
                Ok(n) => _ = numbers.insert(literal.clone(), n),
                Err(e) => failed = Some(e),
            }
        }
    });
    failed.map_or(Ok(numbers), Err)
}

/// Visits the constants that ops of a function bind, nested blocks included.
pub(super) fn for_each_literal(f: &Function, mut visit: impl FnMut(&Literal)) {
    for op in f.all_ops() {
        f.op(op).operands().iter().filter_map(|o| f.operand_literal(o)).for_each(&mut visit);
        f.op(op).attributes().for_each(|(_, l)| visit(f.literal(l)));
    }
}

/// Two functions, op by op.
pub(super) struct Diff<'f> {
    pub(super) a: Half<'f>,
    pub(super) b: Half<'f>,
}

impl<'f> Diff<'f> {
    /// # Errors
    /// When weights of two packages are to be compared and cannot be read.
    pub(super) fn of(a: &'f Function, b: &'f Function) -> Result<Diff<'f>, LiteralError> {
        let mut constants = Constants::default();
        let mut first = Half::new(a, |l| Ok(constants.of_first(l)))?;
        let mut second = Half::new(b, |l| constants.of_second(l, a.weights(), b.weights()))?;
        let mut theirs: HashMap<Key, Vec<OpId>> = HashMap::new();
        for &op in second.ops.iter().rev() {
            theirs.entry(second.key(op)).or_default().push(op);
        }
        for &op in &first.ops {
            if let Some(pair) = theirs.get_mut(&first.key(op)).and_then(Vec::pop) {
                first.pairs.insert(op, pair);
                second.pairs.insert(pair, op);
            }
        }
        let mut diff = Diff { a: first, b: second };
        diff.part_reordered();
        Ok(diff)
    }

    /// Takes apart the pairs of ops on a state that are not in the same order in both functions.
    fn part_reordered(&mut self) {
        let mut orders: HashMap<Name, [Vec<OpId>; 2]> = HashMap::new();
        for &op in self.a.ops.iter().filter(|op| self.a.is_paired(**op)) {
            self.a.states(op).for_each(|s| orders.entry(s.clone()).or_default()[0].push(op));
        }
        for &op in &self.b.ops {
            let Some(&pair) = self.b.pairs.get(&op) else { continue };
            self.b.states(op).for_each(|s| orders.entry(s.clone()).or_default()[1].push(pair));
        }
        for op in orders.into_values().filter(|[a, b]| a != b).flatten().flatten() {
            self.part(op);
        }
    }

    /// Takes a pair apart, by its op in the first function; `false` when it is none.
    fn part(&mut self, op: OpId) -> bool {
        let pair = self.a.pairs.remove(&op);
        pair.is_some_and(|pair| self.b.pairs.remove(&pair).is_some())
    }

    /// Takes apart the pairs that read one of these values and no weights; `false` when there are none.
    pub(super) fn part_readers(&mut self, names: &BTreeSet<Name>) -> bool {
        let f = self.a.f;
        let is_weight = |operand: &Operand| {
            let producer = operand.as_value().and_then(|v| f.producer(v));
            let compressed = producer.is_some_and(|op| f.op(op).kind().starts_with("constexpr_"));
            compressed || f.operand_literal(operand).is_some_and(is_float_weight)
        };
        let reads_any = |op: OpId| reads(f, op).into_iter().any(|v| names.contains(f.value(v).name()));
        let readers = self.a.ops.iter().copied();
        let readers = readers.filter(|&op| reads_any(op) && !f.op(op).operands().iter().any(is_weight));
        let readers: Vec<OpId> = readers.filter(|op| self.a.is_paired(*op)).collect();
        readers.into_iter().filter(|&op| self.part(op)).count() > 0
    }

    /// How many ops of the second function are those of the first.
    pub(super) fn paired(&self) -> usize {
        self.b.pairs.len()
    }

    /// The halves: the first function and the second.
    pub(super) fn halves(&self) -> [&Half<'f>; 2] {
        [&self.a, &self.b]
    }
}

/// Whether a constant is one of floats that lie in a weight file.
pub(super) fn is_float_weight(literal: &Literal) -> bool {
    literal.is_blob() && literal.ty.as_tensor().is_some_and(|ty| ty.dtype.is_float())
}

/// Values that an op and its blocks read from outside of it, each once.
pub(super) fn reads(f: &Function, op: OpId) -> Vec<ValueId> {
    let (mut read, mut inner) = (Vec::new(), HashSet::new());
    walk(f, op, &mut read, &mut inner);
    let mut seen = HashSet::new();
    read.retain(|v| !inner.contains(v) && seen.insert(*v));
    read
}

/// Notes what an op and its blocks read, and what is defined in its blocks.
fn walk(f: &Function, op: OpId, read: &mut Vec<ValueId>, inner: &mut HashSet<ValueId>) {
    read.extend(f.op(op).operands().iter().filter_map(Operand::as_value));
    for &b in f.op(op).blocks() {
        read.extend_from_slice(f.block(b).outputs());
        inner.extend(f.block(b).inputs());
        for op in f.ops(b) {
            inner.extend(f.op(op).results());
            walk(f, op, read, inner);
        }
    }
}
