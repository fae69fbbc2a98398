//! Transactions: edits that one replacement cannot say.

use std::collections::BTreeSet;
use std::ops::Deref;

use crate::ir::{
    ArrayFeature, Dim, EditError, Feature, FeatureKind, Flexibility, Function, Id, Interface, Literal, OpId, Operand,
    Place, Use, ValueId, ValueType,
};
use crate::opset::infer;

use super::patch::{Patch, PatchError, Ref, insert_const, is_returned};

/// A set of edits on a copy of a function, which takes the function's place on [`Transaction::commit`]. Dropping a
/// transaction undoes it.
pub struct Transaction<'f> {
    target: &'f mut Function,
    work: Function,
    /// Ops whose operands, parameters or results changed.
    touched: BTreeSet<OpId>,
}

impl Deref for Transaction<'_> {
    type Target = Function;
    fn deref(&self) -> &Function {
        &self.work
    }
}

impl<'f> Transaction<'f> {
    /// Begins.
    pub fn begin(target: &'f mut Function) -> Transaction<'f> {
        let work = target.clone();
        Transaction { target, work, touched: BTreeSet::new() }
    }

    /// Makes one use read another value.
    ///
    /// # Errors
    /// When the reader may not be edited.
    pub fn set_use(&mut self, u: Use, to: ValueId) -> Result<(), PatchError> {
        if let Some(op) = u.op() {
            self.work.check_editable(op)?;
            self.touched.insert(op);
        }
        self.work.set_use(u, to);
        Ok(())
    }

    /// Binds a parameter anew; no bindings unbind it.
    ///
    /// # Errors
    /// When the op may not be edited.
    pub fn set_param(&mut self, op: OpId, name: &str, bindings: Vec<Operand>) -> Result<(), PatchError> {
        self.work.check_editable(op)?;
        self.touched.insert(op);
        self.work.set_param(op, name, bindings);
        Ok(())
    }

    /// Binds a parameter to a new constant.
    ///
    /// # Errors
    /// When the op may not be edited.
    pub fn set_const(&mut self, op: OpId, name: &str, literal: Literal) -> Result<(), PatchError> {
        self.work.check_editable(op)?;
        let base = self.work.op(op).results().first().map_or("const".into(), |&v| self.work.value(v).name().clone());
        let (_, v) = insert_const(&mut self.work, Place::Before(op), &format!("{base}_{name}"), literal);
        self.set_param(op, name, vec![Operand::Value(v)])
    }

    /// Inserts a constant before an op.
    pub fn insert_const(&mut self, before: OpId, name: &str, literal: Literal) -> ValueId {
        insert_const(&mut self.work, Place::Before(before), name, literal).1
    }

    /// Inserts the ops of a patch, whose replacements are not done, and returns the value that `at` stands for.
    ///
    /// # Errors
    /// When an op is not well-formed or not of the type that the patch says.
    pub fn insert(&mut self, patch: &Patch, at: &Ref) -> Result<ValueId, PatchError> {
        let values = self.insert_many(patch, std::slice::from_ref(at))?;
        values.first().copied().ok_or_else(|| PatchError::Stale("a value of the patch".into()))
    }

    /// [`Transaction::insert`] for several values.
    ///
    /// # Errors
    /// As [`Transaction::insert`].
    pub fn insert_many(&mut self, patch: &Patch, at: &[Ref]) -> Result<Vec<ValueId>, PatchError> {
        let new = patch.insert(&mut self.work, &mut Vec::new())?;
        at.iter()
            .map(|at| match at {
                Ref::Value(v) => Ok(*v),
                Ref::New(op, result) => {
                    let value = new.get(*op).and_then(|results| results.get(*result));
                    value.copied().ok_or_else(|| PatchError::Stale(format!("new op {op}")))
                }
            })
            .collect()
    }

    /// A size that is not known and like no other.
    pub fn fresh_dim(&mut self) -> Dim {
        self.work.fresh_dim()
    }

    /// States the type of a value whose sizes inference cannot tell; [`Transaction::commit`] refuses what it can tell
    /// better.
    pub fn declare(&mut self, v: ValueId, ty: ValueType) {
        self.touched.extend(self.work.producer(v));
        self.work.set_type(v, ty);
    }

    /// Inserts the ops of a patch that goes before `op` and reads its results, and moves `op` in front of them.
    ///
    /// # Errors
    /// As [`Transaction::insert`].
    pub fn insert_behind(&mut self, op: OpId, patch: &Patch, at: &Ref) -> Result<ValueId, PatchError> {
        let first_new = self.work.op_capacity();
        let value = self.insert(patch, at)?;
        if self.work.op_capacity() > first_new {
            self.work.move_op(op, Place::Before(OpId::new(first_new)));
        }
        Ok(value)
    }

    /// Infers the types of an op's results anew.
    ///
    /// # Errors
    /// When the op does not type any more.
    pub fn retype(&mut self, op: OpId) -> Result<(), PatchError> {
        self.work.check_editable(op)?;
        let types = infer(&self.work, op)?
            .ok_or_else(|| PatchError::Stale(format!("the type of {}", self.work.describe(op))))?;
        self.touched.insert(op);
        let results: Vec<ValueId> = self.work.op(op).results().to_vec();
        for (v, ty) in results.into_iter().zip(types) {
            if *self.work.ty(v) != ty {
                self.work.set_type(v, ty);
            }
        }
        Ok(())
    }

    /// Gives the name of `from` to `to`, and a fresh one to `from`. Readers are not rebound.
    pub fn move_name(&mut self, from: ValueId, to: ValueId) {
        let name = self.work.value(from).name().clone();
        let other = self.work.fresh_name(&name);
        self.work.rename(from, other);
        self.work.rename(to, name);
    }

    /// Gives a value another name, or a variation of it that is new.
    ///
    /// # Errors
    /// When the interface fixes the name.
    pub fn rename(&mut self, v: ValueId, name: &str) -> Result<(), PatchError> {
        if is_returned(&self.work, v) || self.work.inputs().contains(&v) {
            return Err(EditError::FixedName(self.work.value(v).name().clone()).into());
        }
        let name = self.work.fresh_name(name);
        self.work.rename(v, name);
        Ok(())
    }

    /// Removes an op that nothing reads, whatever its effect.
    ///
    /// # Errors
    /// When it carries something that would be lost, or is read.
    pub fn remove(&mut self, op: OpId) -> Result<(), PatchError> {
        self.work.check_editable(op)?;
        if let Some(v) = self.work.op(op).results().iter().find(|&&v| !self.work.value(v).uses().is_empty()) {
            return Err(PatchError::Stale(format!("a replacement for `{}`", self.work.value(*v).name())));
        }
        self.work.erase_op(op);
        Ok(())
    }

    /// Erases the producers of these values where dead, and what dies with them.
    pub fn erase_dead(&mut self, values: impl IntoIterator<Item = ValueId>) {
        super::erase_dead(&mut self.work, values);
    }

    /// Adds an input. The description is to be edited too.
    ///
    /// # Errors
    /// When another value has the name.
    pub fn add_input(&mut self, name: &str, ty: ValueType) -> Result<ValueId, PatchError> {
        if self.work.has_name(name) {
            return Err(EditError::NameTaken(name.into()).into());
        }
        Ok(self.work.add_input(name.into(), ty))
    }

    /// Removes an input that nothing uses. The description is to be edited too.
    ///
    /// # Errors
    /// When it is no input, or is used.
    pub fn remove_input(&mut self, v: ValueId) -> Result<(), PatchError> {
        let name = self.work.value(v).name();
        if !self.work.inputs().contains(&v) {
            return Err(PatchError::Stale(format!("the input `{name}`")));
        }
        if !self.work.value(v).uses().is_empty() {
            return Err(PatchError::Stale(format!("a replacement for `{name}`")));
        }
        self.work.remove_input(v);
        Ok(())
    }

    /// Replaces what the description says of the function.
    pub fn set_interface(&mut self, interface: Interface) {
        self.work.edit_interface(interface);
    }

    /// Makes a state an input of the same name and type, in the description too. No op may read or write it any more when
    /// the transaction is committed.
    pub fn turn_into_input(&mut self, state: ValueId) {
        let Some(ty) = self.work.ty(state).as_state().cloned() else { return };
        self.work.set_type(state, ty.into());
        let name = self.work.value(state).name().clone();
        let mut interface = self.work.interface().clone();
        // Old files list states among the inputs.
        let described = interface.states.extract_if(.., |f| f.name == name);
        interface.inputs.extend(described);
        for feature in interface.inputs.iter_mut().filter(|f| f.name == name) {
            if let FeatureKind::State(array) = &feature.kind {
                feature.kind = FeatureKind::Array(array.clone());
            }
        }
        self.work.edit_interface(interface);
    }

    /// Returns a value in addition, under the name it has, in the description too.
    ///
    /// # Errors
    /// When it is an input, or returned already: outputs have names of their own.
    pub fn add_output(&mut self, v: ValueId) -> Result<(), PatchError> {
        let name = self.work.value(v).name().clone();
        let Some(ty) = self.work.tensor(v).filter(|_| self.work.producer(v).is_some() && !is_returned(&self.work, v))
        else {
            return Err(PatchError::Output(name.clone(), name));
        };
        let array = ArrayFeature {
            dtype: Some(ty.dtype),
            shape: ty.known_shape().map(|s| s.to_vec()).unwrap_or_default(),
            flexibility: Flexibility::Fixed,
            default: None,
        };
        let body = self.work.body();
        self.work.add_output(body, v);
        let mut interface = self.work.interface().clone();
        // A function that is not described at all stays so.
        if interface != Interface::default() {
            let kind = FeatureKind::Array(array);
            interface.outputs.push(Feature { name, short_description: String::new(), kind, optional: false });
        }
        self.work.edit_interface(interface);
        Ok(())
    }

    /// Checks references, order and the types of all ops that were touched or read a result of one, and puts the edited
    /// copy in the function's place.
    ///
    /// # Errors
    /// When the edited function is not well-formed, or an output's type changed while the interface was not edited; the
    /// function is then as it was.
    pub fn commit(self) -> Result<(), PatchError> {
        if cfg!(debug_assertions) {
            self.work.assert_uses_exact();
        }
        let f = &self.work;
        let live: Vec<OpId> = self.touched.into_iter().filter(|&op| f.is_live(op)).collect();
        let readers = live.iter().flat_map(|&op| f.op(op).results()).flat_map(|&v| f.users(v));
        let checked: BTreeSet<OpId> = readers.chain(live.iter().copied()).collect();
        crate::verify::function(f)?;
        crate::verify::ops(f, checked)?;
        if !f.interface_edited() {
            for (&old, &new) in self.target.outputs().iter().zip(f.outputs()) {
                let (have, want) = (f.ty(new), self.target.ty(old));
                if have != want {
                    let what = format!("output `{}`", f.value(new).name());
                    return Err(PatchError::Type { what, have: have.clone().into(), want: want.clone().into() });
                }
            }
        }
        *self.target = self.work;
        Ok(())
    }
}
