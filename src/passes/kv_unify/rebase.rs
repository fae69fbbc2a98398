//! The edit of one function.

use crate::analysis::state::{Access, States, Update};
use crate::analysis::values::Values;
use crate::ir::{ArrayFeature, Feature, FeatureKind, Function, Interface, Literal, OpId, TensorType, ValueId};
use crate::ir::{Operand, ValueType};
use crate::rewrite::{Input, Patch, PatchError, Ref, Transaction, loss};

use super::Joined;
use super::bounds::{self, Rows};

/// Puts the joined state in the place of its parts.
///
/// # Errors
/// When an op may not be edited; the function is then as it was.
pub(super) fn rebase(f: &mut Function, joined: &Joined) -> Result<(), PatchError> {
    let states = States::of(f);
    let mut accesses = Vec::new();
    let mut parts = Vec::new();
    for (i, name) in joined.parts.iter().enumerate() {
        let chain = states.chains().iter().find(|c| f.value(c.state).name() == name);
        let chain = chain.ok_or_else(|| PatchError::Stale(format!("the state `{name}`")))?;
        let rows = Rows { offset: joined.rows * i as i64, count: joined.rows };
        accesses.extend(chain.accesses.iter().map(|a| (rows, a)));
        parts.push(chain.state);
    }
    accesses.sort_by(|(_, a), (_, b)| match f.comes_before(a.op(), b.op()) {
        true => std::cmp::Ordering::Less,
        false => std::cmp::Ordering::Greater,
    });
    let mut tx = Transaction::begin(f);
    let state = tx.add_input(&joined.name, ValueType::State(joined.whole.clone()))?;
    let mut edit = Edit { tx, state, joined, values: states.values() };
    // Writes first: what takes the rest from a read is gone when the other users of the read are looked at.
    for (rows, access) in &accesses {
        if let Access::Write { op, data, update, .. } = access {
            edit.write(*op, *data, update.as_ref(), *rows)?;
        }
    }
    for (rows, access) in &accesses {
        if let Access::Read { op, value, .. } = access {
            edit.read(*op, *value, *rows)?;
        }
    }
    let Edit { mut tx, .. } = edit;
    parts.into_iter().try_for_each(|v| tx.remove_input(v))?;
    let interface = described(tx.interface(), joined);
    tx.set_interface(interface);
    tx.commit()
}

struct Edit<'f, 'j> {
    tx: Transaction<'f>,
    state: ValueId,
    joined: &'j Joined,
    values: &'j Values,
}

impl Edit<'_, '_> {
    /// A read of the joined state.
    fn snapshot(&self, p: &mut Patch) -> Ref {
        let name = format!("{}_read", self.joined.name);
        p.op("read_state", name, [("input", self.state)], self.joined.whole.clone())
    }

    /// The write becomes an update of the joined state, in the same place.
    fn write(&mut self, write: OpId, data: ValueId, update: Option<&Update>, rows: Rows) -> Result<(), PatchError> {
        let mut p = Patch::before(write);
        let (value, params) = match update.and_then(|u| self.boxed(&mut p, u, rows)) {
            Some(boxed) => boxed,
            None => (data, self.bounds_of(rows)),
        };
        let read = self.snapshot(&mut p);
        let mut inputs = vec![("x", Input::One(read)), ("update", value.into())];
        inputs.extend(params);
        let new = p.op("slice_update", format!("{}_updated", self.joined.name), inputs, self.joined.whole.clone());
        let new = self.tx.insert(&p, &new)?;
        self.tx.set_param(write, "data", vec![Operand::Value(new)])?;
        self.tx.set_param(write, "input", vec![Operand::Value(self.state)])?;
        self.tx.erase_dead([data]);
        Ok(())
    }

    /// What an update puts where, in terms of the joined state.
    fn boxed(&self, p: &mut Patch, update: &Update, rows: Rows) -> Option<(ValueId, Vec<(&'static str, Input)>)> {
        let f = &*self.tx;
        if loss(f, update.op).is_some() {
            return None;
        }
        let mut with_bounds = p.clone();
        let params = bounds::by_index(f, self.values, &mut with_bounds, update.op, rows)?;
        *p = with_bounds;
        Some((update.value, params))
    }

    /// The read stays in its place; its users read their part of the joined snapshot.
    fn read(&mut self, read: OpId, value: ValueId, rows: Rows) -> Result<(), PatchError> {
        if !self.tx.is_live(read) {
            return Ok(());
        }
        if !self.tx.value(value).uses().is_empty() {
            let mut p = Patch::before(read);
            let snapshot = self.snapshot(&mut p);
            let snapshot = self.tx.insert(&p, &snapshot)?;
            let mut slices: Vec<OpId> = self.tx.users(value).to_vec();
            slices.retain(|&op| self.is_slice_of(op, value));
            for op in slices {
                self.slice(op, snapshot, rows)?;
            }
            self.take_rows(read, value, snapshot, rows)?;
        }
        self.tx.remove(read)
    }

    /// Whether the op does nothing with a value but slice it.
    fn is_slice_of(&self, op: OpId, value: ValueId) -> bool {
        let f = &*self.tx;
        let uses = f.value(value).uses().iter().filter(|u| u.op() == Some(op)).count();
        let sliced = matches!(f.op(op).kind().as_str(), "slice_by_index" | "slice_by_size");
        sliced
            && uses == 1
            && f.op(op).value("x") == Some(value)
            && f.op(op).block() == f.body()
            && loss(f, op).is_none()
    }

    /// A slice of a part becomes a slice of the joined snapshot, if its bounds can be told.
    fn slice(&mut self, op: OpId, snapshot: ValueId, rows: Rows) -> Result<(), PatchError> {
        let f = &*self.tx;
        let mut p = Patch::before(op);
        let kind = f.op(op).kind().to_string();
        let params = match kind.as_str() {
            "slice_by_index" => bounds::by_index(f, self.values, &mut p, op, rows),
            _ => bounds::by_size(f, self.values, &mut p, op, rows),
        };
        let (Some(params), &[result]) = (params, f.op(op).results()) else { return Ok(()) };
        let Some(ty) = f.tensor(result).cloned() else { return Ok(()) };
        let inputs = std::iter::once(("x", snapshot.into())).chain(params);
        let new = p.op(&kind, "rows", inputs, ty);
        let new = self.tx.insert(&p, &new)?;
        self.replace(result, new)?;
        self.tx.remove(op)
    }

    /// Every use that is left reads the rows of the part.
    fn take_rows(&mut self, read: OpId, value: ValueId, snapshot: ValueId, rows: Rows) -> Result<(), PatchError> {
        let Some(ty) = self.tx.tensor(value).cloned().filter(|_| !self.tx.value(value).uses().is_empty()) else {
            return Ok(());
        };
        let mut p = Patch::before(read);
        let inputs = std::iter::once(("x", snapshot.into())).chain(self.bounds_of(rows));
        let new = p.op("slice_by_index", "rows", inputs, ty);
        let new = self.tx.insert(&p, &new)?;
        self.replace(value, new)
    }

    /// Makes every use of a value read another, which takes the name.
    fn replace(&mut self, old: ValueId, new: ValueId) -> Result<(), PatchError> {
        for u in self.tx.value(old).uses().to_vec() {
            self.tx.set_use(u, new)?;
        }
        self.tx.move_name(old, new);
        Ok(())
    }

    /// The rows of a part.
    fn bounds_of(&self, rows: Rows) -> Vec<(&'static str, Input)> {
        let whole = self.joined.whole.known_shape().unwrap_or_default();
        let mut begin = vec![0; whole.len()];
        let mut end: Vec<i64> = whole.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect();
        if let (Some(first), Some(last)) = (begin.first_mut(), end.first_mut()) {
            (*first, *last) = (rows.offset, rows.offset + rows.count);
        }
        vec![("begin", Literal::ints(&begin).into()), ("end", Literal::ints(&end).into())]
    }
}

/// The description with the joined state where the first of its parts was; an empty one stays so.
fn described(interface: &Interface, joined: &Joined) -> Interface {
    let mut new = interface.clone();
    for features in [&mut new.inputs, &mut new.states] {
        let Some(at) = features.iter().position(|f| joined.parts.contains(&f.name)) else { continue };
        let feature = feature(&features[at], &joined.name, &joined.whole);
        features.retain(|f| !joined.parts.contains(&f.name));
        features.insert(at, feature);
    }
    new
}

/// The feature of the joined state, after that of one of its parts.
fn feature(part: &Feature, name: &str, whole: &TensorType) -> Feature {
    let kind = match &part.kind {
        FeatureKind::State(a) => FeatureKind::State(ArrayFeature {
            shape: whole.known_shape().map_or_else(Vec::new, |s| s.to_vec()),
            ..a.clone()
        }),
        other => other.clone(),
    };
    Feature { name: name.into(), short_description: String::new(), kind, optional: false }
}
