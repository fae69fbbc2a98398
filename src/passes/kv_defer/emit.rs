//! Carrying out a plan.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::ir::{Dim, Function, Literal, OpId, Operand, TensorType, Use, ValueId, ValueType};
use crate::opset::views;
use crate::rewrite::{Input, Patch, PatchError, Ref, Transaction};

use super::plan::{Kind, Plan, Root, Track, within};
use super::stale::{Masks, Place};
use super::track::{Action, dropped_as_spelled};

/// Ops and values that are made while a plan is carried out.
pub(super) struct Emit<'t, 'f> {
    pub(super) t: &'t mut Transaction<'f>,
    pub(super) plan: &'t Plan,
    /// Tracked values for the new entries alone.
    twins: HashMap<ValueId, ValueId>,
    /// Parts of a cache as it was before.
    old: HashMap<ValueId, ValueId>,
    /// Tracked values by the values that took their place.
    stands_for: HashMap<ValueId, ValueId>,
    pub(super) masks: Masks,
    /// Sizes of grown axes that are not known, by window and columns of others.
    totals: BTreeMap<(usize, u64), Dim>,
}

/// Carries out a plan; `infinite` hides stale keys by −∞.
pub(super) fn emit(f: &mut Function, plan: &Plan, infinite: bool) -> Result<(), PatchError> {
    let mut t = Transaction::begin(f);
    let mut emit = Emit {
        t: &mut t,
        plan,
        twins: HashMap::new(),
        old: HashMap::new(),
        stands_for: HashMap::new(),
        masks: Masks::new(infinite),
        totals: BTreeMap::new(),
    };
    emit.read_old_content()?;
    for (op, action) in &plan.actions {
        emit.act(*op, action)?;
    }
    let looked: Vec<ValueId> = plan.roots.iter().map(|r| r.look.value).collect();
    t.erase_dead(looked);
    t.commit()
}

pub(super) fn missing(what: &str) -> PatchError {
    PatchError::Stale(what.into())
}

impl Emit<'_, '_> {
    fn act(&mut self, op: OpId, action: &Action) -> Result<(), PatchError> {
        match action {
            Action::Keep => Ok(()),
            Action::Twin => self.twin_op(op),
            Action::Scores { right, axis } => self.scores(op, *right, *axis),
            Action::Grow => self.grow(op),
            Action::Sum { right } => self.sum(op, *right),
        }
    }

    /// What is known of a tracked value, or of one that took its place.
    fn track(&self, v: ValueId) -> Option<Track> {
        self.plan.tracked.get(self.stands_for.get(&v).unwrap_or(&v)).copied()
    }

    pub(super) fn old_value(&self, v: ValueId) -> ValueId {
        self.old.get(&v).copied().unwrap_or(v)
    }

    pub(super) fn shape(&self, v: ValueId) -> Vec<Dim> {
        self.t.tensor(v).map(|t| t.shape.to_vec()).unwrap_or_default()
    }

    pub(super) fn name(&self, v: ValueId) -> String {
        self.t.value(v).name().to_string()
    }

    fn result(&self, op: OpId) -> Result<ValueId, PatchError> {
        self.t.op(op).results().first().copied().ok_or_else(|| missing("the result of an op"))
    }

    /// The size of a grown axis: the old keys, the new ones and columns of others.
    pub(super) fn total(&mut self, window: usize, others: u64) -> Dim {
        let w = &self.plan.windows[window];
        if let (Some(n), Some(q)) = (w.n.as_known(), w.q.as_known()) {
            return Dim::known(n + q + others);
        }
        if let Some(total) = self.totals.get(&(window, others)) {
            return total.clone();
        }
        let total = self.t.fresh_dim();
        self.totals.insert((window, others), total.clone());
        total
    }

    fn grown_type(&mut self, v: ValueId, track: Track) -> Option<TensorType> {
        let Kind::Grown { before, after, .. } = track.kind else { return None };
        let total = self.total(track.window, before + after);
        let mut ty = self.t.tensor(v)?.clone();
        *ty.shape.get_mut(track.axis)? = total;
        Some(ty)
    }

    /// Adds the ops of a patch and returns the value of the last one.
    pub(super) fn add(&mut self, patch: &Patch, at: Option<Ref>, what: &str) -> Result<ValueId, PatchError> {
        self.t.insert(patch, &at.ok_or_else(|| missing(what))?)
    }

    // The old content.

    /// Makes every root look at the cache as it was before any write of this run.
    fn read_old_content(&mut self) -> Result<(), PatchError> {
        let acting: HashSet<OpId> = self.plan.actions.iter().map(|(op, _)| *op).collect();
        let mut snapshots: HashMap<ValueId, ValueId> = HashMap::new();
        for root in &self.plan.roots {
            let snapshot = match snapshots.get(&root.state) {
                Some(&v) => v,
                None => {
                    let v = self.read(root)?;
                    snapshots.insert(root.state, v);
                    v
                }
            };
            self.old.insert(root.snapshot, snapshot);
            let part = self.old_part(root.look.value)?;
            self.stands_for.insert(part, root.look.value);
            for u in self.t.value(root.look.value).uses().to_vec() {
                if u.op().is_some_and(|op| acting.contains(&op)) {
                    self.t.set_use(u, part)?;
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, root: &Root) -> Result<ValueId, PatchError> {
        let ty = self.t.ty(root.state).as_state().cloned().ok_or_else(|| missing("the type of a state"))?;
        let mut patch = Patch::before(root.first);
        let read = patch.op("read_state", format!("{}_old", self.name(root.state)), [("input", root.state)], ty);
        self.t.insert(&patch, &read)
    }

    /// A part of a snapshot, taken from the old content.
    fn old_part(&mut self, v: ValueId) -> Result<ValueId, PatchError> {
        if let Some(&old) = self.old.get(&v) {
            return Ok(old);
        }
        let op = self.t.producer(v).ok_or_else(|| missing("a part of a state"))?;
        let x = self.t.op(op).value("x").ok_or_else(|| missing("a part of a state"))?;
        let from = self.old_part(x)?;
        let mut patch = Patch::before(op);
        let ty = self.t.tensor(v).cloned().ok_or_else(|| missing("the type of a part"))?;
        let kind = self.t.op(op).kind().clone();
        let part = patch.op(
            &kind,
            format!("{}_old", self.name(v)),
            self.inputs(op, |_, o| (o.as_value() == Some(x)).then(|| from.into())),
            ty,
        );
        let old = self.t.insert(&patch, &part)?;
        self.old.insert(v, old);
        Ok(old)
    }

    /// The inputs of an op, some of them replaced.
    fn inputs(&self, op: OpId, replace: impl Fn(usize, &Operand) -> Option<Input>) -> Vec<(String, Input)> {
        let mut at = 0;
        let params = self.t.op(op).params();
        params
            .map(|(param, operands)| {
                let mut parts: Vec<Input> = Vec::new();
                for operand in operands {
                    parts.push(replace(at, operand).unwrap_or_else(|| Input::like(self.t, operand)));
                    at += 1;
                }
                let input = if parts.len() == 1 { parts.remove(0) } else { Input::Many(parts) };
                (param.to_string(), input)
            })
            .collect()
    }

    // Twins.

    /// The new entries alone, as a tracked value has them.
    pub(super) fn twin(&mut self, v: ValueId, before: OpId) -> Result<ValueId, PatchError> {
        let v = self.stands_for.get(&v).copied().unwrap_or(v);
        if let Some(&twin) = self.twins.get(&v) {
            return Ok(twin);
        }
        let root = self.plan.roots.iter().find(|r| r.look.value == v).ok_or_else(|| missing("new entries"))?;
        let mut patch = Patch::before(before);
        let at = self.entries(root, &mut patch);
        let twin = self.add(&patch, at, "a view of the new entries")?;
        self.twins.insert(v, twin);
        Ok(twin)
    }

    /// The new entries of a root in the axes of the part that attention looks at.
    fn entries(&self, root: &Root, patch: &mut Patch) -> Option<Ref> {
        let f: &Function = self.t;
        let (look, update) = (&root.look, &root.update);
        let name = format!("{}_new", self.name(update.value));
        let mut present: Vec<usize> = look.axes.iter().flatten().copied().collect();
        let order = present.clone();
        present.sort_unstable();
        let mut x = self.cut(root, patch, &name)?;
        let sizes = patch.type_of(f, &x)?.shape;
        let size = |a: &usize| match update.axis_of_value(*a) {
            Some(axis) => sizes.get(axis).cloned(),
            None => Some(Dim::known(1)),
        };
        let in_order: Vec<Dim> = present.iter().map(size).collect::<Option<_>>()?;
        if order != present {
            x = patch.reshape(f, x, &name, &in_order)?;
            let perm: Vec<usize> = order.iter().map(|a| present.iter().position(|p| p == a)).collect::<Option<_>>()?;
            x = patch.transpose(f, x, &name, &perm)?;
        }
        let shape: Vec<Dim> =
            look.axes.iter().map(|a| a.map_or(Some(Dim::known(1)), |a| size(&a))).collect::<Option<_>>()?;
        if patch.type_of(f, &x)?.shape[..] != shape[..] {
            x = patch.reshape(f, x, &name, &shape)?;
        }
        let dtype = f.tensor(look.value)?.dtype;
        let mut ty = patch.type_of(f, &x)?;
        if ty.dtype != dtype {
            ty.dtype = dtype;
            let to = Input::Const(Literal::string(&dtype.to_string()));
            x = patch.op("cast", name, [("x", Input::One(x)), ("dtype", to)], ty);
        }
        Some(x)
    }

    /// What an update writes, cut to what is looked at on the axes other than that of the window.
    fn cut(&self, root: &Root, patch: &mut Patch, name: &str) -> Option<Ref> {
        let update = &root.update;
        let mut ty = self.t.tensor(update.value)?.clone();
        let (mut begin, mut end, mut stride) = (vec![0i64; ty.rank()], vec![0i64; ty.rank()], vec![1i64; ty.rank()]);
        let mut whole = vec![true; ty.rank()];
        let window_axis = root.look.axes.get(root.axis).copied().flatten()?;
        for (a, (seen, written)) in root.look.region.0.iter().zip(&update.region.0).enumerate() {
            let Some(i) = update.axis_of_value(a) else { continue };
            if a == window_axis || seen == written || seen.whole && written.whole {
                continue;
            }
            let (offset, extent) = within(seen, written)?;
            (begin[i], stride[i], whole[i]) = (offset, seen.stride, false);
            end[i] = offset + (extent - 1) * seen.stride + 1;
            ty.shape[i] = Dim::known(u64::try_from(extent).ok()?);
        }
        if whole.iter().all(|&w| w) {
            return Some(update.value.into());
        }
        let inputs = [
            ("x", Input::One(update.value.into())),
            ("begin", Input::Const(Literal::ints(&begin))),
            ("end", Input::Const(Literal::ints(&end))),
            ("stride", Input::Const(Literal::ints(&stride))),
            ("begin_mask", Input::Const(Literal::bools(&whole))),
            ("end_mask", Input::Const(Literal::bools(&whole))),
        ];
        Some(patch.op("slice_by_index", name, inputs, ty))
    }

    fn twin_op(&mut self, op: OpId) -> Result<(), PatchError> {
        let result = self.result(op)?;
        let track = self.track(result).ok_or_else(|| missing("a tracked result"))?;
        let mut ty = self.t.tensor(result).cloned().ok_or_else(|| missing("a tracked result"))?;
        ty.shape[track.axis] = self.plan.windows[track.window].q.clone();
        let mut replaced: HashMap<usize, Input> = HashMap::new();
        for (i, operand) in self.t.op(op).operands().to_vec().into_iter().enumerate() {
            if let Some(v) = operand.as_value().filter(|&v| self.track(v).is_some()) {
                replaced.insert(i, self.twin(v, op)?.into());
            } else if let Some(axis) = self.per_key(op, i, &operand, track, ty.rank()) {
                replaced.insert(i, self.window(&operand, axis, track.window, op)?);
            }
        }
        let name = format!("{}_new", self.name(result));
        let mut patch = Patch::before(op);
        let kind = self.t.op(op).kind().clone();
        let at = match &*kind {
            "reshape" => {
                let x = self.t.op(op).value("x").ok_or_else(|| missing("an operand"))?;
                let x = self.twin(x, op)?;
                patch.reshape(self.t, x, &name, &ty.shape)
            }
            _ => {
                let mut inputs = self.inputs(op, |i, _| replaced.get(&i).cloned());
                if &*kind == "slice_by_index" {
                    self.open_masks(op, &mut inputs);
                }
                Some(patch.op(&kind, name, inputs, ty))
            }
        };
        let twin = self.add(&patch, at, "a twin")?;
        self.twins.insert(result, twin);
        Ok(())
    }

    /// The axis along which an operand from outside has an element per key.
    fn per_key(&self, op: OpId, operand: usize, value: &Operand, track: Track, rank: usize) -> Option<usize> {
        if !crate::opset::is_elementwise(self.t.op(op).kind()) || self.t.op(op).param_of(operand).is_none() {
            return None;
        }
        let shape = &self.t.operand_type(value).as_tensor()?.shape;
        let axis = (track.axis + shape.len()).checked_sub(rank)?;
        (shape.get(axis) == Some(&self.plan.windows[track.window].n)).then_some(axis)
    }

    /// Makes a slice say that it takes the key axis whole by masks, whatever its size.
    fn open_masks(&self, op: OpId, inputs: &mut Vec<(String, Input)>) {
        let x = self.t.op(op).value("x").and_then(|x| self.track(x));
        let (Some(Track { axis, .. }), Some(slice)) = (x, views::Slice::of(self.t, op)) else { return };
        for name in ["begin_mask", "end_mask"] {
            let mut mask: Vec<bool> = match self.t.ints(op, name) {
                Some(mask) => mask.into_iter().map(|b| b != 0).collect(),
                None => vec![false; slice.axes.len()],
            };
            mask[axis] = true;
            inputs.retain(|(n, _)| n != name);
            inputs.push((name.into(), Input::Const(Literal::bools(&mask))));
        }
    }

    // Grown values.

    fn scores(&mut self, op: OpId, right: bool, axis: usize) -> Result<(), PatchError> {
        let result = self.result(op)?;
        let track = self.track(result).ok_or_else(|| missing("a tracked result"))?;
        let keys = self.product_operand(op, right)?;
        let twin = self.twin(keys, op)?;
        let mut ty = self.t.tensor(result).cloned().ok_or_else(|| missing("a tracked result"))?;
        ty.shape[axis] = self.plan.windows[track.window].q.clone();
        let joined = self.grown_type(result, track).ok_or_else(|| missing("the type of scores"))?;
        let name = self.name(result);
        let mut patch = Patch::before(op);
        let kind = self.t.op(op).kind().clone();
        let inputs = self.inputs(op, |_, o| (o.as_value() == Some(keys)).then(|| twin.into()));
        let fresh = patch.op(&kind, format!("{name}_new"), inputs, ty);
        let all = patch.concat(format!("{name}_all"), vec![Input::One(result.into()), Input::One(fresh)], axis, joined);
        self.replace_behind(op, result, &patch, &all)?;
        Ok(())
    }

    /// Adds a patch behind an op; everything that read the op's result reads the value it makes.
    fn replace_behind(&mut self, op: OpId, result: ValueId, patch: &Patch, at: &Ref) -> Result<ValueId, PatchError> {
        let uses: Vec<Use> = self.t.value(result).uses().to_vec();
        let value = self.t.insert_behind(op, patch, at)?;
        for u in uses {
            self.t.set_use(u, value)?;
        }
        self.stands_for.insert(value, result);
        self.hide(result, value)?;
        Ok(value)
    }

    /// Hides stale keys in a grown value, where that is to be done in the value itself.
    fn hide(&mut self, original: ValueId, value: ValueId) -> Result<(), PatchError> {
        let Some(scale) = self.plan.places.iter().find(|(p, _)| *p == Place::Value(original)).map(|(_, scale)| *scale)
        else {
            return Ok(());
        };
        let (Some(track), Some(op)) = (self.track(original), self.t.producer(value)) else { return Ok(()) };
        let uses: Vec<Use> = self.t.value(value).uses().to_vec();
        let ty = self.t.tensor(value).cloned().ok_or_else(|| missing("the type of scores"))?;
        let term = self.stale_columns(track, scale, &ty, op)?;
        let mut patch = Patch::before(op);
        let name = format!("{}_hidden", self.name(original));
        let hidden = patch.op("add", name, [("x", Input::One(value.into())), ("y", Input::One(term.into()))], ty);
        let hidden = self.t.insert_behind(op, &patch, &hidden)?;
        for u in uses {
            self.t.set_use(u, hidden)?;
        }
        self.stands_for.insert(hidden, original);
        Ok(())
    }

    fn grow(&mut self, op: OpId) -> Result<(), PatchError> {
        let result = self.result(op)?;
        let track = self.track(result);
        let rank = self.shape(result).len();
        if let Some(track) = track {
            for (i, operand) in self.t.op(op).operands().to_vec().into_iter().enumerate() {
                if operand.as_value().is_some_and(|v| self.track(v).is_some()) {
                    continue;
                }
                let Some(axis) = self.per_key(op, i, &operand, track, rank) else { continue };
                let place = self.plan.places.iter().find(|(p, _)| *p == Place::Mask(op, i)).map(|(_, scale)| *scale);
                let extended = self.extended(&operand, axis, track.window, place, op)?;
                self.t.set_use(Use::Op { op, operand: i as u32 }, extended)?;
            }
        }
        match &*self.t.op(op).kind().clone() {
            "reshape" => return self.grow_reshape(op, result, track),
            "slice_by_index" => self.grow_slice(op)?,
            _ => {}
        }
        if let Some(ty) = track.and_then(|track| self.grown_type(result, track)) {
            self.t.declare(result, ValueType::Tensor(ty));
        }
        self.t.retype(op)?;
        self.hide(result, result)
    }

    fn grow_reshape(&mut self, op: OpId, result: ValueId, track: Option<Track>) -> Result<(), PatchError> {
        let ty = track.and_then(|t| self.grown_type(result, t)).ok_or_else(|| missing("the type of a reshape"))?;
        let x = self.t.op(op).value("x").ok_or_else(|| missing("an operand"))?;
        let mut patch = Patch::before(op);
        let name = self.name(result);
        let at = patch.reshape(self.t, x, &name, &ty.shape);
        let value = self.add(&patch, at, "the shape of a reshape")?;
        for u in self.t.value(result).uses().to_vec() {
            self.t.set_use(u, value)?;
        }
        self.stands_for.insert(value, result);
        self.t.erase_dead([result]);
        self.hide(result, value)
    }

    fn grow_slice(&mut self, op: OpId) -> Result<(), PatchError> {
        let slice = views::Slice::of(self.t, op).ok_or_else(|| missing("the bounds of a slice"))?;
        let result = self.result(op)?;
        let track = self.track(result).ok_or_else(|| missing("a tracked result"))?;
        // The result's axis is the slice's, less the axes that are dropped before it.
        let axis = (0..slice.axes.len())
            .filter(|&i| !slice.axes[i].squeeze)
            .nth(track.axis)
            .ok_or_else(|| missing("an axis"))?;
        let n = self.shape(result).get(track.axis).cloned();
        let own = &slice.axes[axis];
        let bounds = |name: &str| self.t.ints(op, name).ok_or_else(|| missing("the bounds of a slice"));
        let (mut begin, mut end) = (bounds("begin")?, bounds("end")?);
        let q = self.plan.windows[track.window].q.as_known();
        let known = own.begin.zip(n.and_then(|n| n.as_known())).zip(q);
        let mask = |name: &str, open: bool| {
            let mut mask = self.t.ints(op, name).unwrap_or(vec![0; slice.axes.len()]);
            mask[axis] = i64::from(open);
            Literal::bools(&mask.iter().map(|&b| b != 0).collect::<Vec<_>>())
        };
        if known.is_none() && dropped_as_spelled(self.t, op, axis, own).is_some() {
            return Ok(());
        }
        let others = matches!(track.kind, Kind::Grown { before: 0, after: 0, .. });
        let (open, begin_mask, end_mask) = match known {
            Some(((first, n), q)) => {
                begin[axis] = first as i64;
                end[axis] = (first + n + q) as i64;
                (false, mask("begin_mask", false), mask("end_mask", false))
            }
            None if others => (true, mask("begin_mask", true), mask("end_mask", true)),
            None => return Err(missing("the bounds of a slice")),
        };
        if !open {
            self.t.set_const(op, "begin", Literal::ints(&begin))?;
            self.t.set_const(op, "end", Literal::ints(&end))?;
        }
        self.t.set_const(op, "begin_mask", begin_mask)?;
        self.t.set_const(op, "end_mask", end_mask)
    }

    fn product_operand(&self, op: OpId, right: bool) -> Result<ValueId, PatchError> {
        let data = self.t.op(op);
        let value = match &**data.kind() {
            "matmul" => data.value(if right { "y" } else { "x" }),
            _ => data.param("values").get(usize::from(right)).and_then(Operand::as_value),
        };
        value.ok_or_else(|| missing("an operand of a product"))
    }

    /// `weights · values` over the old keys plus over the new ones.
    fn sum(&mut self, op: OpId, right: bool) -> Result<(), PatchError> {
        let result = self.result(op)?;
        let (values, weights) = (self.product_operand(op, right)?, self.product_operand(op, !right)?);
        let twin = self.twin(values, op)?;
        let track = self.track(weights).ok_or_else(|| missing("weights"))?;
        let [old, fresh] = self.parted(weights, track, op)?;
        let ty = self.t.tensor(result).cloned().ok_or_else(|| missing("the type of a product"))?;
        let name = self.name(result);
        let kind = self.t.op(op).kind().clone();
        let inputs = self.inputs(op, |_, o| match o.as_value() {
            Some(v) if v == values => Some(twin.into()),
            Some(v) if v == weights => Some(fresh.into()),
            _ => None,
        });
        for (i, operand) in self.t.op(op).operands().to_vec().into_iter().enumerate() {
            if operand.as_value() == Some(weights) {
                self.t.set_use(Use::Op { op, operand: i as u32 }, old)?;
            }
        }
        let mut patch = Patch::before(op);
        let new = patch.op(&kind, format!("{name}_new"), inputs, ty.clone());
        let both =
            patch.op("add", format!("{name}_sum"), [("x", Input::One(result.into())), ("y", Input::One(new))], ty);
        let both = self.replace_behind(op, result, &patch, &both)?;
        self.t.move_name(result, both);
        Ok(())
    }

    /// Weights of the old keys and of the new ones; the same ops for all products that read them.
    fn parted(&mut self, weights: ValueId, track: Track, before: OpId) -> Result<[ValueId; 2], PatchError> {
        if let Some(&parts) = self.masks.parted.get(&weights) {
            return Ok(parts);
        }
        let w = self.plan.windows[track.window].clone();
        let ty = self.t.tensor(weights).cloned().ok_or_else(|| missing("weights"))?;
        let part = |size: &Dim| {
            let mut ty = ty.clone();
            ty.shape[track.axis] = size.clone();
            ty
        };
        let types = [part(&w.n), part(&w.q)];
        let parts = match (w.n.as_known(), w.q.as_known()) {
            (Some(n), Some(q)) => self.split_weights(weights, track.axis, [n, q], types, before)?,
            _ => self.cut_weights(weights, track, types, before)?,
        };
        self.masks.parted.insert(weights, parts);
        Ok(parts)
    }

    fn split_weights(
        &mut self,
        weights: ValueId,
        axis: usize,
        sizes: [u64; 2],
        types: [TensorType; 2],
        before: OpId,
    ) -> Result<[ValueId; 2], PatchError> {
        let mut patch = Patch::before(before);
        let inputs = [
            ("x", Input::One(weights.into())),
            ("split_sizes", Input::Const(Literal::ints(&sizes.map(|n| n as i64)))),
            ("axis", Input::Const(Literal::int(axis as i64))),
        ];
        let op = patch.op_many("split", format!("{}_part", self.name(weights)), inputs, types);
        let parts = self.t.insert_many(&patch, &[Ref::New(op, 0), Ref::New(op, 1)])?;
        <[ValueId; 2]>::try_from(parts).map_err(|_| missing("the parts of a split"))
    }
}
