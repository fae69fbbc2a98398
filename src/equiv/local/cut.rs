//! A region as two functions of its own.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write;

use super::diff::{Diff, Half, is_float_weight, reads};
use super::region::Region;
use crate::equiv::Options;
use crate::ir::{
    BlockId, Function, Literal, LiteralData, LiteralId, Name, OpId, OpSpec, Operand, Place, Symbol, ValueId, ValueType,
};

/// Both sides of a region.
pub(super) struct Halves {
    pub(super) a: Function,
    pub(super) b: Function,
}

impl Halves {
    pub(super) fn of(diff: &Diff<'_>, region: &Region) -> Halves {
        let used = |half: &Half<'_>, side: usize| -> HashMap<usize, Literal> {
            let literals = region.ops[side].iter().flat_map(|&op| literals(half.f, op));
            literals.filter(is_float_weight).map(|l| (half.constant(&l), l)).collect()
        };
        let (ours, theirs) = (used(&diff.a, 0), used(&diff.b, 1));
        let shared: HashSet<usize> = ours.keys().filter(|n| theirs.contains_key(n)).copied().collect();
        let order = order(diff, region);
        let cut = |side: usize| Cut::new(diff, region, side, &shared).finish(&order);
        Halves { a: cut(0), b: cut(1) }
    }

    /// What is the same for two regions that differ in names alone.
    pub(super) fn form(&self, options: &Options) -> String {
        let mut form = Form { text: String::new(), numbers: HashMap::new() };
        for f in [&self.a, &self.b] {
            form.block(f, f.body());
            for &v in f.inputs() {
                let name = f.value(v).name();
                let mut given = options.given.iter().chain([&options.given_states]);
                let told = options.ranges.contains_key(name) || given.any(|g| g.contains_key(name));
                let role = if told {
                    name.as_str()
                } else if name.contains("mask") {
                    "mask"
                } else {
                    ""
                };
                form.value(f, v);
                _ = write!(form.text, "{role};");
            }
        }
        form.text
    }
}

/// Inputs and weights in the order in which the region reads them, the first side first.
fn order(diff: &Diff<'_>, region: &Region) -> Vec<Name> {
    let mut seen = HashSet::new();
    let mut order = Vec::new();
    for (half, ops) in diff.halves().into_iter().zip(&region.ops) {
        for &op in ops {
            for v in reads(half.f, op) {
                let name = half.f.value(v).name();
                if region.inputs.contains(name) && seen.insert(name.clone()) {
                    order.push(name.clone());
                }
            }
        }
    }
    order.extend(region.inputs.iter().filter(|n| !seen.contains(*n)).cloned());
    order
}

/// The constants that an op and its blocks read.
fn literals(f: &Function, op: OpId) -> Vec<Literal> {
    let own = f.op(op).operands().iter().filter_map(|o| f.operand_literal(o)).cloned();
    let inner = f.op(op).blocks().iter().flat_map(|&b| f.ops(b)).flat_map(|op| literals(f, op));
    own.chain(inner.collect::<Vec<_>>()).collect()
}

/// One side in the making.
struct Cut<'d, 'f> {
    diff: &'d Diff<'f>,
    half: &'d Half<'f>,
    region: &'d Region,
    side: usize,
    new: Function,
    values: HashMap<ValueId, ValueId>,
    /// Weights that both sides read, by the number of the constant; `None` until it is read.
    weights: HashMap<usize, Option<ValueId>>,
}

impl<'d, 'f> Cut<'d, 'f> {
    fn new(diff: &'d Diff<'f>, region: &'d Region, side: usize, shared: &HashSet<usize>) -> Self {
        let half = diff.halves()[side];
        let mut new = Function::new(half.f.name().clone(), half.f.opset().clone());
        new.set_weights(half.f.weights().clone());
        for i in 0..half.f.symbol_count() {
            new.add_symbol(half.f.symbol_range(Symbol(i as u32)).clone());
        }
        let weights = shared.iter().map(|&n| (n, None)).collect();
        Cut { diff, half, region, side, new, values: HashMap::new(), weights }
    }

    fn finish(mut self, inputs: &[Name]) -> Function {
        self.add_inputs(inputs);
        self.add_states();
        self.add_weights();
        for op in &self.region.ops[self.side] {
            self.copy(*op, self.new.body());
        }
        for name in &self.region.outputs[self.side] {
            let value = self.half.value(name).and_then(|v| self.values.get(&v).copied());
            if let Some(v) = value {
                self.new.add_output(self.new.body(), v);
            }
        }
        self.new
    }

    /// Both sides take all inputs, whether they read them or not.
    fn add_inputs(&mut self, inputs: &[Name]) {
        for name in inputs {
            let types = self.diff.halves().map(|h| h.value(name).map(|v| h.f.ty(v).clone()));
            let is_known = |ty: &&ValueType| ty.as_tensor().is_some_and(|t| t.known_shape().is_some());
            let known = types.iter().flatten().find(is_known).or_else(|| types.iter().flatten().next());
            let Some(ty) = known else { continue };
            let new = self.new.add_input(name.clone(), ty.clone());
            self.values.extend(self.half.value(name).map(|v| (v, new)));
        }
    }

    /// States, and caches that are inputs on this side.
    fn add_states(&mut self) {
        let f = self.half.f;
        for &v in f.inputs().iter().filter(|&&v| self.region.states.contains(f.value(v).name())) {
            let new = self.new.add_input(f.value(v).name().clone(), f.ty(v).clone());
            self.values.insert(v, new);
        }
    }

    /// An input for each weight that both sides read, in the order of the first side.
    fn add_weights(&mut self) {
        let first = self.diff.halves()[0];
        for literal in self.region.ops[0].iter().flat_map(|&op| literals(first.f, op)) {
            let number = first.constant(&literal);
            if let Some(slot @ None) = self.weights.get_mut(&number) {
                *slot = Some(self.new.add_input(format!("weight {number}").into(), literal.ty.clone()));
            }
        }
    }

    fn copy(&mut self, op: OpId, block: BlockId) {
        let f = self.half.f;
        let data = f.op(op);
        let params: Vec<(Name, Vec<Operand>)> =
            data.params().map(|(n, o)| (n.clone(), o.iter().map(|o| self.operand(o)).collect())).collect();
        let attributes = data.attributes().map(|(n, l)| (n.clone(), self.intern(l))).collect();
        let results = data.results().iter().map(|&v| (f.value(v).name().clone(), f.ty(v).clone())).collect();
        let spec = OpSpec { kind: data.kind().clone(), inputs: params, attributes, results };
        let new = self.new.insert_op(Place::End(block), spec);
        let results = self.new.op(new).results().to_vec();
        self.values.extend(data.results().iter().copied().zip(results));
        for &inner in data.blocks() {
            self.copy_block(inner, new);
        }
    }

    fn copy_block(&mut self, block: BlockId, parent: OpId) {
        let f = self.half.f;
        let new = self.new.add_block(parent);
        for &v in f.block(block).inputs() {
            let input = self.new.add_block_input(new, f.value(v).name().clone(), f.ty(v).clone());
            self.values.insert(v, input);
        }
        for op in f.ops(block) {
            self.copy(op, new);
        }
        for &v in f.block(block).outputs() {
            // A constant of the body, which the block gives back.
            let constant = f.producer(v).filter(|_| !self.values.contains_key(&v));
            constant.into_iter().for_each(|op| self.copy(op, new));
            if let Some(&output) = self.values.get(&v) {
                self.new.add_output(new, output);
            }
            if constant.is_some() {
                self.values.remove(&v);
            }
        }
    }

    fn operand(&mut self, operand: &Operand) -> Operand {
        let f = self.half.f;
        let own = operand.as_value().and_then(|v| self.values.get(&v));
        match (own, f.operand_literal(operand)) {
            (Some(&v), None) => Operand::Value(v),
            (_, Some(literal)) => match self.weights.get(&self.half.constant(literal)) {
                Some(Some(input)) => Operand::Value(*input),
                _ => Operand::Literal(self.new.intern(literal.clone())),
            },
            // Nothing that could be read is left out of a region; if it were, the interpreter would refuse this.
            (None, None) => {
                let ty = f.operand_type(operand).clone();
                Operand::Literal(self.new.intern(Literal { ty, data: LiteralData::Absent }))
            }
        }
    }

    fn intern(&mut self, literal: LiteralId) -> LiteralId {
        self.new.intern(self.half.f.literal(literal).clone())
    }
}

/// Text of functions with values by number.
struct Form {
    text: String,
    numbers: HashMap<Name, usize>,
}

impl Form {
    fn value(&mut self, f: &Function, v: ValueId) {
        let next = self.numbers.len();
        let n = *self.numbers.entry(f.value(v).name().clone()).or_insert(next);
        _ = write!(self.text, "%{n}:{} ", f.ty(v));
    }

    fn block(&mut self, f: &Function, b: BlockId) {
        for op in f.ops(b) {
            let data = f.op(op);
            _ = write!(self.text, "{}(", data.kind());
            for (name, operands) in data.params() {
                _ = write!(self.text, "{name}=");
                for operand in operands {
                    match operand {
                        Operand::Value(v) => self.value(f, *v),
                        Operand::Literal(l) => _ = write!(self.text, "{:?} ", f.literal(*l)),
                    }
                }
            }
            for (name, l) in data.attributes().filter(|(name, _)| *name != "name") {
                _ = write!(self.text, "{name}={:?} ", f.literal(l));
            }
            self.text.push_str(")->");
            data.results().iter().for_each(|&v| self.value(f, v));
            for &inner in data.blocks() {
                self.text.push('{');
                f.block(inner).inputs().iter().for_each(|&v| self.value(f, v));
                self.block(f, inner);
                self.text.push('}');
            }
            self.text.push('\n');
        }
        // Outputs are in the order of their names; their numbers are what counts.
        let before = self.text.len();
        let outputs: BTreeSet<usize> = f
            .block(b)
            .outputs()
            .iter()
            .map(|&v| {
                self.value(f, v);
                self.numbers[f.value(v).name()]
            })
            .collect();
        if f.block(b).parent().is_none() {
            self.text.truncate(before);
            _ = write!(self.text, "{outputs:?}");
        }
    }
}
