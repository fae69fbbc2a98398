//! The primitive edits, each of which keeps use lists exact. [`crate::rewrite`] is the checked door in front of them.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::function::{BlockData, SymbolRange};
use super::{
    BlockId, Def, Dim, Function, Id, Interface, Literal, LiteralId, Name, OpData, OpId, Operand, Symbol, Use,
    ValueData, ValueId, ValueType, Weights,
};

/// Why an edit is not possible.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EditError {
    /// The op carries fields that the IR cannot hold, so that changing it would lose them.
    #[error("{op} carries {what}, which an edit would lose")]
    Unmodelled {
        /// The op.
        op: String,
        /// What it carries.
        what: String,
    },
    /// A name may not move, because the interface fixes it.
    #[error("`{0}` is fixed by the function's interface")]
    FixedName(Name),
    /// A new input cannot be called like another value.
    #[error("there already is a value `{0}`")]
    NameTaken(Name),
}

/// Where a new op goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// At the end of a block.
    End(BlockId),
    /// Before an op.
    Before(OpId),
}

/// A new op: pure data.
#[derive(Clone, Debug)]
pub(crate) struct OpSpec {
    pub kind: Name,
    pub inputs: Vec<(Name, Vec<Operand>)>,
    pub attributes: Vec<(Name, LiteralId)>,
    /// Names and types of the results. Names are taken as they are.
    pub results: Vec<(Name, ValueType)>,
}

impl Function {
    // ---- construction ------------------------------------------------------------------------------------------

    pub(crate) fn set_weights(&mut self, weights: Arc<dyn Weights>) {
        self.weights = weights;
    }

    pub(crate) fn set_interface(&mut self, interface: Interface) {
        self.interface = interface;
    }

    pub(crate) fn edit_interface(&mut self, interface: Interface) {
        self.interface = interface;
        self.interface_edited = true;
        self.revision += 1;
    }

    /// Marks the function as just read: revision zero.
    pub(crate) fn reset_revision(&mut self) {
        self.revision = 0;
        self.interface_edited = false;
    }

    pub(crate) fn add_symbol(&mut self, range: SymbolRange) -> Symbol {
        self.symbols.push(range);
        Symbol(self.symbols.len() as u32 - 1)
    }

    /// Narrows the bounds of an unknown size to what was proved besides.
    pub(crate) fn narrow_symbol(&mut self, s: Symbol, lo: u64, hi: Option<u64>) {
        let range = &mut self.symbols[s.index()];
        range.lo = range.lo.max(lo);
        range.hi = match (range.hi, hi) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }

    /// A fresh unknown dimension without bounds.
    pub(crate) fn fresh_dim(&mut self) -> Dim {
        Dim::unknown(self.add_symbol(SymbolRange { lo: 0, hi: None }))
    }

    pub(crate) fn intern(&mut self, literal: Literal) -> LiteralId {
        if let Some(&id) = self.interned.get(&literal) {
            return id;
        }
        let id = self.literals.push(literal.clone());
        self.interned.insert(literal, id);
        id
    }

    fn add_value(&mut self, name: Name, ty: ValueType, def: Def) -> ValueId {
        *self.names.entry(name.clone()).or_insert(0) += 1;
        self.values.push(ValueData { name, ty, def, uses: Vec::new() })
    }

    pub(crate) fn add_input(&mut self, name: Name, ty: ValueType) -> ValueId {
        let v = self.add_value(name, ty, Def::Input(self.inputs.len() as u32));
        self.inputs.push(v);
        self.revision += 1;
        v
    }

    /// Removes an input that nothing uses.
    pub(crate) fn remove_input(&mut self, v: ValueId) {
        debug_assert!(self.values[v].uses.is_empty(), "a removed input is unused");
        self.forget_name(v);
        self.values[v].name = "".into();
        self.values[v].ty = ValueType::Missing;
        self.inputs.retain(|&input| input != v);
        for (i, &input) in self.inputs.iter().enumerate() {
            self.values[input].def = Def::Input(i as u32);
        }
        self.revision += 1;
    }

    /// Adds an empty nested block to an op.
    pub(crate) fn add_block(&mut self, parent: OpId) -> BlockId {
        let b = self.blocks.push(BlockData {
            inputs: Vec::new(),
            outputs: Vec::new(),
            output_use_at: Vec::new(),
            parent: Some(parent),
            first: None,
            last: None,
            len: 0,
        });
        self.ops[parent].blocks.push(b);
        self.touch(parent);
        b
    }

    pub(crate) fn add_block_input(&mut self, b: BlockId, name: Name, ty: ValueType) -> ValueId {
        let v = self.add_value(name, ty, Def::BlockInput(b, self.blocks[b].inputs.len() as u32));
        self.blocks[b].inputs.push(v);
        self.touch_block(b);
        v
    }

    pub(crate) fn add_output(&mut self, b: BlockId, v: ValueId) {
        let index = self.blocks[b].outputs.len() as u32;
        let at = self.push_use(v, Use::Output { block: b, index });
        self.blocks[b].outputs.push(v);
        self.blocks[b].output_use_at.push(at);
        self.touch_block(b);
    }

    /// Records which bytes of the model file spell the op and what the IR could not hold of it.
    pub(crate) fn set_source(&mut self, op: OpId, source: Option<Range<usize>>, unmodelled: Option<Box<str>>) {
        self.ops[op].source = source;
        self.ops[op].unmodelled = unmodelled;
    }

    // ---- ops -----------------------------------------------------------------------------------------------------

    pub(crate) fn insert_op(&mut self, place: Place, spec: OpSpec) -> OpId {
        let OpSpec { kind, mut inputs, mut attributes, results } = spec;
        inputs.sort_by(|a, b| a.0.cmp(&b.0));
        attributes.sort_by(|a, b| a.0.cmp(&b.0));
        let block = match place {
            Place::End(b) => b,
            Place::Before(op) => self.ops[op].block,
        };
        let op = self.ops.push(OpData {
            kind,
            params: SmallVec::new(),
            operands: SmallVec::new(),
            use_at: SmallVec::new(),
            results: SmallVec::new(),
            attributes: attributes.into(),
            blocks: SmallVec::new(),
            block,
            prev: None,
            next: None,
            order: 0,
            live: true,
            source: None,
            unmodelled: None,
        });
        self.bind(op, inputs);
        for (i, (name, ty)) in results.into_iter().enumerate() {
            let v = self.add_value(name, ty, Def::Result(op, i as u32));
            self.ops[op].results.push(v);
        }
        self.link(op, place);
        self.touch_block(block);
        op
    }

    /// Adds a result to an op that was inserted without.
    pub(crate) fn add_result(&mut self, op: OpId, name: Name, ty: ValueType) -> ValueId {
        let v = self.add_value(name, ty, Def::Result(op, self.ops[op].results.len() as u32));
        self.ops[op].results.push(v);
        self.touch(op);
        v
    }

    /// Appends parameters with their bindings.
    fn bind(&mut self, op: OpId, params: Vec<(Name, Vec<Operand>)>) {
        for (name, operands) in params {
            let start = self.ops[op].operands.len() as u32;
            for operand in operands {
                self.push_operand(op, operand);
            }
            let end = self.ops[op].operands.len() as u32;
            self.ops[op].params.push((name, start..end));
        }
    }

    fn push_operand(&mut self, op: OpId, operand: Operand) {
        let position = self.ops[op].operands.len() as u32;
        let at = match operand {
            Operand::Value(v) => self.push_use(v, Use::Op { op, operand: position }),
            Operand::Literal(_) => u32::MAX,
        };
        self.ops[op].operands.push(operand);
        self.ops[op].use_at.push(at);
    }

    /// Moves an op to another place of its block; the caller keeps definitions before uses.
    pub(crate) fn move_op(&mut self, op: OpId, place: Place) {
        self.unlink(op);
        self.link(op, place);
        self.touch_block(self.ops[op].block);
    }

    /// Removes an op whose results have no uses, with its nested blocks.
    pub(crate) fn erase_op(&mut self, op: OpId) {
        debug_assert!(
            self.ops[op].results.iter().all(|&v| self.values[v].uses.is_empty()),
            "erased results are unused"
        );
        for b in self.ops[op].blocks.clone() {
            self.clear_block(b);
        }
        for i in 0..self.ops[op].operands.len() {
            self.drop_use(op, i);
        }
        self.ops[op].operands.clear();
        self.ops[op].use_at.clear();
        self.ops[op].params.clear();
        for v in self.ops[op].results.clone() {
            self.forget_name(v);
        }
        let block = self.ops[op].block;
        self.unlink(op);
        self.ops[op].live = false;
        self.touch_block(block);
    }

    fn clear_block(&mut self, b: BlockId) {
        for index in 0..self.blocks[b].outputs.len() {
            let (v, at) = (self.blocks[b].outputs[index], self.blocks[b].output_use_at[index]);
            self.remove_use(v, at);
        }
        self.blocks[b].outputs.clear();
        self.blocks[b].output_use_at.clear();
        let mut ops: Vec<OpId> = self.ops(b).collect();
        ops.reverse();
        for op in ops {
            self.erase_op(op);
        }
        for v in self.blocks[b].inputs.clone() {
            self.forget_name(v);
        }
    }

    fn link(&mut self, op: OpId, place: Place) {
        let block = self.ops[op].block;
        let (prev, next) = match place {
            Place::End(b) => (self.blocks[b].last, None),
            Place::Before(at) => (self.ops[at].prev, Some(at)),
        };
        self.ops[op].prev = prev;
        self.ops[op].next = next;
        match prev {
            Some(p) => self.ops[p].next = Some(op),
            None => self.blocks[block].first = Some(op),
        }
        match next {
            Some(n) => self.ops[n].prev = Some(op),
            None => self.blocks[block].last = Some(op),
        }
        self.blocks[block].len += 1;
        const STEP: u64 = 1 << 32;
        let lo = prev.map_or(0, |p| self.ops[p].order);
        let order = match next {
            Some(n) => lo + (self.ops[n].order - lo) / 2,
            None => lo.saturating_add(STEP),
        };
        self.ops[op].order = order;
        if order == lo || next.is_some_and(|n| self.ops[n].order == order) {
            let mut at = self.blocks[block].first;
            let mut order = 0;
            while let Some(o) = at {
                order += STEP;
                self.ops[o].order = order;
                at = self.ops[o].next;
            }
        }
    }

    fn unlink(&mut self, op: OpId) {
        let (block, prev, next) = (self.ops[op].block, self.ops[op].prev, self.ops[op].next);
        match prev {
            Some(p) => self.ops[p].next = next,
            None => self.blocks[block].first = next,
        }
        match next {
            Some(n) => self.ops[n].prev = prev,
            None => self.blocks[block].last = prev,
        }
        self.blocks[block].len -= 1;
    }

    // ---- uses ----------------------------------------------------------------------------------------------------

    fn push_use(&mut self, v: ValueId, u: Use) -> u32 {
        self.values[v].uses.push(u);
        self.values[v].uses.len() as u32 - 1
    }

    fn remove_use(&mut self, v: ValueId, at: u32) {
        let uses = &mut self.values[v].uses;
        uses.swap_remove(at as usize);
        if let Some(&moved) = uses.get(at as usize) {
            match moved {
                Use::Op { op, operand } => self.ops[op].use_at[operand as usize] = at,
                Use::Output { block, index } => self.blocks[block].output_use_at[index as usize] = at,
            }
        }
    }

    fn drop_use(&mut self, op: OpId, operand: usize) {
        if let Operand::Value(v) = self.ops[op].operands[operand] {
            let at = self.ops[op].use_at[operand];
            self.remove_use(v, at);
        }
    }

    /// Rebinds one operand.
    pub(crate) fn set_operand(&mut self, op: OpId, operand: usize, to: Operand) {
        self.drop_use(op, operand);
        let at = match to {
            Operand::Value(v) => self.push_use(v, Use::Op { op, operand: operand as u32 }),
            Operand::Literal(_) => u32::MAX,
        };
        self.ops[op].operands[operand] = to;
        self.ops[op].use_at[operand] = at;
        self.touch(op);
    }

    /// Replaces the bindings of a parameter; an empty list unbinds it.
    pub(crate) fn set_param(&mut self, op: OpId, name: &str, bindings: Vec<Operand>) {
        let mut inputs: Vec<(Name, Vec<Operand>)> =
            self.ops[op].params().map(|(n, o)| (n.clone(), o.to_vec())).filter(|(n, _)| n != name).collect();
        if !bindings.is_empty() {
            inputs.push((name.into(), bindings));
        }
        inputs.sort_by(|a, b| a.0.cmp(&b.0));
        for i in 0..self.ops[op].operands.len() {
            self.drop_use(op, i);
        }
        self.ops[op].operands.clear();
        self.ops[op].use_at.clear();
        self.ops[op].params.clear();
        self.bind(op, inputs);
        self.touch(op);
    }

    /// Makes a use read another value.
    pub(crate) fn set_use(&mut self, u: Use, to: ValueId) {
        match u {
            Use::Op { op, operand } => self.set_operand(op, operand as usize, Operand::Value(to)),
            Use::Output { block, index } => {
                let (old, at) =
                    (self.blocks[block].outputs[index as usize], self.blocks[block].output_use_at[index as usize]);
                self.remove_use(old, at);
                let at = self.push_use(to, u);
                self.blocks[block].outputs[index as usize] = to;
                self.blocks[block].output_use_at[index as usize] = at;
                self.touch_block(block);
            }
        }
    }

    /// Makes every use of `old` read `new`, and gives `new` the name of `old`, so that the text of the readers stays
    /// what it was. `old` gets the former name of `new`.
    pub(crate) fn replace_and_take_name(&mut self, old: ValueId, new: ValueId) {
        // Readers that `new` has already spell the name it loses.
        let others: Vec<OpId> =
            self.users(new).into_iter().flat_map(|op| [vec![op], self.owners(self.ops[op].block)].concat()).collect();
        others.into_iter().for_each(|op| self.touch(op));
        let sources: Vec<(OpId, Option<Range<usize>>)> =
            self.users(old).into_iter().map(|op| (op, self.ops[op].source.clone())).collect();
        // Readers in nested blocks: their owners hold them in their own source range.
        let owners: Vec<(OpId, Option<Range<usize>>)> = sources
            .iter()
            .flat_map(|&(op, _)| self.owners(self.ops[op].block))
            .chain(self.values[old].uses.iter().flat_map(|u| match *u {
                Use::Output { block, .. } => self.owners(block),
                Use::Op { .. } => Vec::new(),
            }))
            .map(|op| (op, self.ops[op].source.clone()))
            .collect();
        for u in self.values[old].uses.clone() {
            self.set_use(u, new);
        }
        for (op, source) in owners.into_iter().chain(sources) {
            self.ops[op].source = source;
        }
        let (a, b) = (self.values[old].name.clone(), self.values[new].name.clone());
        self.values[old].name = b;
        self.values[new].name = a;
        for v in [old, new] {
            if let Def::Result(op, _) = self.values[v].def {
                self.touch(op);
            }
        }
        self.revision += 1;
    }

    fn owners(&self, mut block: BlockId) -> Vec<OpId> {
        let mut out = Vec::new();
        while let Some(parent) = self.blocks[block].parent {
            out.push(parent);
            block = self.ops[parent].block;
        }
        out
    }

    /// Gives a value another name; its readers are re-encoded.
    pub(crate) fn rename(&mut self, v: ValueId, name: Name) {
        self.forget_name(v);
        *self.names.entry(name.clone()).or_insert(0) += 1;
        self.values[v].name = name;
        if let Def::Result(op, _) = self.values[v].def {
            self.touch(op);
        }
        for op in self.users(v) {
            self.touch(op);
        }
        for u in self.values[v].uses.clone() {
            if let Use::Output { block, .. } = u {
                self.touch_block(block);
            }
        }
        self.revision += 1;
    }

    /// Gives a value another type.
    pub(crate) fn set_type(&mut self, v: ValueId, ty: ValueType) {
        self.values[v].ty = ty;
        if let Def::Result(op, _) = self.values[v].def {
            self.touch(op);
        }
        self.revision += 1;
    }

    /// Refines the type of a value with what inference proved; the bytes in the file stay valid.
    pub(crate) fn refine_type(&mut self, v: ValueId, ty: ValueType) {
        self.values[v].ty = ty;
    }

    /// Whether the op may be edited at all.
    pub(crate) fn check_editable(&self, op: OpId) -> Result<(), EditError> {
        for op in std::iter::once(op).chain(self.owners(self.ops[op].block)) {
            if let Some(what) = &self.ops[op].unmodelled {
                return Err(EditError::Unmodelled { op: self.describe(op), what: what.to_string() });
            }
        }
        Ok(())
    }

    // ---- names and bookkeeping -----------------------------------------------------------------------------------

    fn forget_name(&mut self, v: ValueId) {
        let name = self.values[v].name.clone();
        if let Some(n) = self.names.get_mut(&name) {
            *n -= 1;
            if *n == 0 {
                self.names.remove(&name);
            }
        }
    }

    /// A name that no value of the function has: `base`, or `base` with a number.
    pub(crate) fn fresh_name(&mut self, base: &str) -> Name {
        let mut clean: String =
            base.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' }).collect();
        if clean.is_empty() || clean.starts_with(|c: char| c.is_ascii_digit()) {
            clean.insert(0, '_');
        }
        if !self.names.contains_key(clean.as_str()) {
            return clean.into();
        }
        loop {
            let name = format!("{clean}_{}", self.fresh);
            self.fresh += 1;
            if !self.names.contains_key(name.as_str()) {
                return name.into();
            }
        }
    }

    /// The op no longer reads as it does in the file, nor do those that own it.
    fn touch(&mut self, op: OpId) {
        self.ops[op].source = None;
        self.touch_block(self.ops[op].block);
    }

    fn touch_block(&mut self, mut block: BlockId) {
        self.revision += 1;
        while let Some(parent) = self.blocks[block].parent {
            self.ops[parent].source = None;
            block = self.ops[parent].block;
        }
    }

    /// Recomputes every use list and compares. For debug builds and tests.
    ///
    /// # Panics
    /// When a list differs.
    pub(crate) fn assert_uses_exact(&self) {
        let mut want: Vec<Vec<Use>> = vec![Vec::new(); self.values.len()];
        let mut blocks = vec![self.body];
        while let Some(b) = blocks.pop() {
            for (index, v) in self.blocks[b].outputs.iter().enumerate() {
                want[v.index()].push(Use::Output { block: b, index: index as u32 });
            }
            let mut last = None;
            let mut count = 0;
            for op in self.ops(b) {
                count += 1;
                assert!(self.ops[op].live && self.ops[op].block == b && self.ops[op].prev == last, "{op} is linked");
                if let Some(l) = last {
                    assert!(self.ops[l].order < self.ops[op].order, "{op} is in order");
                }
                last = Some(op);
                for (i, operand) in self.ops[op].operands.iter().enumerate() {
                    if let Operand::Value(v) = operand {
                        want[v.index()].push(Use::Op { op, operand: i as u32 });
                    }
                }
                blocks.extend(self.ops[op].blocks.iter().copied());
            }
            assert_eq!(count, self.blocks[b].len, "{b} counts its ops");
        }
        for v in self.values.ids() {
            let mut have = self.values[v].uses.clone();
            have.sort_unstable();
            want[v.index()].sort_unstable();
            assert_eq!(have, want[v.index()], "uses of {v} `{}`", self.values[v].name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{DType, TensorType};

    fn relu(x: ValueId, name: &str) -> OpSpec {
        OpSpec {
            kind: "relu".into(),
            inputs: vec![("x".into(), vec![Operand::Value(x)])],
            attributes: vec![],
            results: vec![(name.into(), TensorType::fixed(DType::F16, &[2]).into())],
        }
    }

    #[test]
    fn insert_replace_and_erase_keep_uses_exact() {
        let mut f = Function::new("main", "CoreML8");
        let x = f.add_input("x".into(), TensorType::fixed(DType::F16, &[2]).into());
        let a = f.insert_op(Place::End(f.body()), relu(x, "a"));
        let va = f.op(a).results()[0];
        let b = f.insert_op(Place::End(f.body()), relu(va, "b"));
        let vb = f.op(b).results()[0];
        f.add_output(f.body(), vb);
        for i in 0..100 {
            f.insert_op(Place::Before(b), relu(va, &format!("n{i}")));
        }
        f.assert_uses_exact();
        assert!(f.comes_before(a, b));
        let c = f.insert_op(Place::Before(b), relu(x, "c"));
        let vc = f.op(c).results()[0];
        f.set_source(b, Some(0..4), None);
        f.replace_and_take_name(va, vc);
        assert_eq!(f.value(vc).name(), &"a");
        assert_eq!(f.op(b).source(), Some(0..4), "readers spell the same name");
        // A value that takes a second name is read by ops that spell the first one.
        let d = f.insert_op(Place::Before(b), relu(x, "d"));
        let vd = f.op(d).results()[0];
        let e = f.insert_op(Place::End(f.body()), relu(vd, "e"));
        f.set_source(e, Some(4..8), None);
        f.replace_and_take_name(vd, vc);
        assert_eq!((f.op(b).source(), f.op(e).source()), (None, Some(4..8)));
        f.erase_op(a);
        f.assert_uses_exact();
        assert!(!f.is_live(a));
        assert!(!f.has_name("c"), "the erased value carried the name away");
    }

    #[test]
    fn fresh_names_are_identifiers_and_new() {
        let mut f = Function::new("main", "CoreML8");
        f.add_input("x".into(), TensorType::fixed(DType::F16, &[2]).into());
        assert_eq!(f.fresh_name("y"), "y");
        assert_ne!(f.fresh_name("x"), "x");
        assert_eq!(f.fresh_name("3:a"), "_3_a");
    }
}
