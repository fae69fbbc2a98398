//! Sinking: the reshapes that a fold leaves around softmax and its neighbours move out of the way.
//!
//! Between a fold's output reshape `[…, n_kv_heads, group·q_len, …] → […, n_heads, q_len, …]` and the next fold's input
//! reshape lies a region of ops that work element by element or along the key axis. Both reshapes keep the rank and the
//! positions of all axes, so the region can compute in the folded shape: axis numbers stay what they are, and only
//! operands and sizes on the head and row axes change.
//!
//! Members: elementwise ops, `select`, `cast`, softmax, cumsum and reductions along other axes, `concat`, `split`,
//! slices and `pad` that leave head and row axes whole, `expand_dims` / `squeeze` behind the row axis, `fill_like`.
//!
//! An operand from outside is free when it has extent one on the head and row axes, when its layout only repeats there,
//! when it is a constant (its declared shape changes, its bytes do not), or when one reshape regroups it.
//!
//! A region moves whole or not at all, and only when more reshapes go than come: a member that is also read outside keeps
//! one reshape for that.

use std::collections::{BTreeMap, BTreeSet};

use crate::analysis::layout::{Layouts, takes_all};
use crate::analysis::spelling::{self, Step};
use crate::ir::{Function, Literal, OpId, Operand, TensorType, Use, ValueId};
use crate::opset::views;
use crate::rewrite::{Budget, Declined, Fired, Outcome, PatchError, Transaction, is_returned};

/// Sinks every reshape among those that `is_entry` admits, as far as it pays.
pub(super) fn run(f: &mut Function, is_entry: impl Fn(OpId) -> bool, budget: &mut Budget) -> Outcome {
    let mut outcome = Outcome::default();
    let mut done: BTreeSet<OpId> = BTreeSet::new();
    for op in f.all_ops() {
        if !is_entry(op) || !f.is_live(op) || done.contains(&op) {
            continue;
        }
        let Some(fold) = Fold::of(f, op) else { continue };
        let region = Region::grow(f, fold, op);
        done.extend(region.entries.iter().copied());
        if region.members.is_empty() {
            continue;
        }
        let name = f.describe(op);
        if let Some(reason) = region.refusal(f) {
            outcome.declined.push(Declined { op: name, reason });
            continue;
        }
        if !budget.take() {
            break;
        }
        let form = format!("sunk through {} ops, {} reshapes fewer", region.members.len(), region.gain(f));
        match region.apply(f) {
            Ok(()) => outcome.fired.push(Fired { op: name, form, bytes_saved: 0, bytes_added: 0 }),
            Err(e) => outcome.declined.push(Declined { op: name, reason: e.to_string() }),
        }
    }
    outcome
}

/// How a folded shape relates to the head layout: `[…, heads, rows, …]` is `[…, kv_heads, group·rows, …]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fold {
    /// The head axis, counted from the left; the row axis is the next.
    axis: usize,
    kv_heads: u64,
    heads: u64,
    q_len: u64,
}

impl Fold {
    /// The fold that a reshape undoes, if it does.
    fn of(f: &Function, op: OpId) -> Option<Fold> {
        let view = views::Reshape::of(f, op)?;
        let from = f.tensor(view.x)?.known_shape()?;
        let to = f.tensor(f.op(op).results()[0])?.known_shape()?;
        if from.len() != to.len() {
            return None;
        }
        let axis = (0..from.len()).find(|&i| from[i] != to[i])?;
        let fold = Fold { axis, kv_heads: from[axis], heads: to[axis], q_len: *to.get(axis + 1)? };
        (fold.heads.is_multiple_of(fold.kv_heads.max(1)) && fold.folded(&to).as_deref() == Some(&from[..]))
            .then_some(fold)
    }

    /// Whether a shape in head layout has this fold's heads and rows where they belong.
    fn is_head_layout(&self, shape: &[u64]) -> bool {
        shape.get(self.axis) == Some(&self.heads) && shape.get(self.axis + 1) == Some(&self.q_len)
    }

    /// The folded form of a shape in head layout.
    fn folded(&self, shape: &[u64]) -> Option<Vec<u64>> {
        let mut out = shape.to_vec();
        *out.get_mut(self.axis)? = self.kv_heads;
        *out.get_mut(self.axis + 1)? = (self.heads / self.kv_heads).checked_mul(self.q_len)?;
        Some(out)
    }
}

/// What happens to an operand from outside.
#[derive(Clone, PartialEq, Debug)]
enum Outside {
    /// It broadcasts as it is.
    Free,
    /// A constant takes another declared shape.
    Constant(Literal),
    /// These steps from that value.
    Spelled(ValueId, Vec<Step>),
}

#[derive(Debug)]
struct Region {
    fold: Fold,
    /// Reshapes into head layout whose results members read.
    entries: Vec<OpId>,
    /// Ops that will compute in the folded shape, in block order.
    members: Vec<OpId>,
    /// Reshapes of members back to the folded shape.
    exits: Vec<OpId>,
    /// Results of members that are read outside, or returned.
    leaks: Vec<ValueId>,
    /// Operands from outside that change, by member and operand position.
    outside: BTreeMap<(OpId, usize), Outside>,
    /// Why ops next to the region are not part of it.
    borders: Vec<String>,
    /// Why some operand cannot follow.
    blocked: Option<String>,
}

impl Region {
    fn grow(f: &Function, fold: Fold, entry: OpId) -> Region {
        let mut region = Region {
            fold,
            entries: vec![entry],
            members: vec![],
            exits: vec![],
            leaks: vec![],
            outside: BTreeMap::new(),
            borders: vec![],
            blocked: None,
        };
        let mut work: Vec<ValueId> = f.op(entry).results().to_vec();
        while let Some(v) = work.pop() {
            let is_entry = f.producer(v).is_some_and(|p| region.entries.contains(&p));
            let mut leaks = is_returned(f, v);
            for u in f.value(v).uses().to_vec() {
                let Some(user) = u.op() else {
                    leaks = true;
                    continue;
                };
                if region.members.contains(&user) || region.exits.contains(&user) {
                    continue;
                }
                if !is_entry && region.is_exit(f, v, user) {
                    region.exits.push(user);
                    continue;
                }
                match member(f, &fold, user, f.op(entry).block()) {
                    Ok(()) => {
                        region.members.push(user);
                        work.extend(f.op(user).results());
                        work.extend(region.join_entries(f, user));
                    }
                    Err(reason) => {
                        region.borders.push(format!("{} {reason}", f.describe(user)));
                        leaks = true;
                    }
                }
            }
            if leaks && !is_entry {
                region.leaks.push(v);
            }
        }
        let order: BTreeMap<OpId, usize> = f.ops(f.op(entry).block()).enumerate().map(|(i, op)| (op, i)).collect();
        region.members.sort_by_key(|op| order[op]);
        region.look_outside(f);
        region
    }

    /// Further folds whose output a member reads join the region.
    fn join_entries(&mut self, f: &Function, member: OpId) -> Vec<ValueId> {
        let mut joined = Vec::new();
        for operand in f.op(member).operands() {
            let Some(v) = operand.as_value() else { continue };
            let Some(op) = f.producer(v) else { continue };
            if !self.entries.contains(&op) && !self.members.contains(&op) && Fold::of(f, op) == Some(self.fold) {
                self.entries.push(op);
                joined.push(v);
            }
        }
        joined
    }

    fn is_exit(&self, f: &Function, v: ValueId, user: OpId) -> bool {
        let shapes = || {
            let view = views::Reshape::of(f, user)?;
            let from = f.tensor(view.x)?.known_shape()?;
            let to = f.tensor(f.op(user).results()[0])?.known_shape()?;
            Some(view.x == v && self.fold.folded(&from)? == to[..])
        };
        shapes() == Some(true) && !is_returned(f, f.op(user).results()[0])
    }

    fn is_inside(&self, f: &Function, v: ValueId) -> bool {
        f.producer(v).is_some_and(|op| self.members.contains(&op) || self.entries.contains(&op))
    }

    fn look_outside(&mut self, f: &Function) {
        let layouts = Layouts::new(f);
        for &op in &self.members {
            for (i, operand) in f.op(op).operands().iter().enumerate() {
                let param = f.op(op).param_of(i).map_or("", |n| n.as_str());
                if operand.as_value().is_some_and(|v| self.is_inside(f, v)) || !is_data(f.op(op).kind(), param) {
                    continue;
                }
                match follow(f, &layouts, &self.fold, op, operand) {
                    Ok(outside) => {
                        self.outside.insert((op, i), outside);
                    }
                    Err(reason) => {
                        let what = match operand {
                            Operand::Value(v) => format!("operand `{}`", f.value(*v).name()),
                            Operand::Literal(_) => format!("the constant `{param}`"),
                        };
                        self.blocked.get_or_insert(format!("{what} of {} {reason}", f.describe(op)));
                    }
                }
            }
        }
    }

    /// Reshapes that go, less those that come.
    fn gain(&self, f: &Function) -> i64 {
        let added: BTreeSet<ValueId> = self
            .outside
            .values()
            .filter_map(|o| match o {
                Outside::Spelled(v, steps) if !steps.is_empty() => Some(*v),
                _ => None,
            })
            .collect();
        // An entry that is also read outside stays.
        let only_members_read = |entry: &&OpId| {
            f.op(**entry)
                .results()
                .iter()
                .all(|&v| f.value(v).uses().iter().all(|u| u.op().is_some_and(|user| self.members.contains(&user))))
        };
        let gone = self.entries.iter().filter(only_members_read).count() + self.exits.len();
        gone as i64 - (self.leaks.len() + added.len()) as i64
    }

    fn refusal(&self, f: &Function) -> Option<String> {
        if let Some(reason) = &self.blocked {
            return Some(format!("the reshapes stay: {reason}"));
        }
        if self.gain(f) > 0 {
            return None;
        }
        Some(match self.borders.first() {
            Some(border) => format!("the reshapes stay: {border}"),
            None => "the reshapes stay: as many would have to be added as would go".into(),
        })
    }

    fn apply(&self, f: &mut Function) -> Result<(), PatchError> {
        let mut t = Transaction::begin(f);
        for &entry in &self.entries {
            let (folded, v) = (t.op(entry).value("x"), t.op(entry).results()[0]);
            let Some(folded) = folded else { continue };
            for u in t.value(v).uses().to_vec() {
                if u.op().is_some_and(|op| self.members.contains(&op)) {
                    t.set_use(u, folded)?;
                }
            }
        }
        let mut spelled: BTreeMap<(ValueId, Vec<u64>), ValueId> = BTreeMap::new();
        for &op in &self.members {
            for ((_, operand), outside) in self.outside.range((op, 0)..=(op, usize::MAX)) {
                let to = match outside {
                    Outside::Free => continue,
                    Outside::Constant(literal) => {
                        let base = t.op(op).results().first().map(|&v| t.value(v).name().clone());
                        let param = t.op(op).param_of(*operand).cloned();
                        let name = format!("{}_{}", base.as_deref().unwrap_or("c"), param.as_deref().unwrap_or("c"));
                        t.insert_const(op, &name, literal.clone())
                    }
                    Outside::Spelled(v, steps) => {
                        let shape = steps.last().map(|s| s.shape().to_vec()).unwrap_or_default();
                        match spelled.get(&(*v, shape.clone())) {
                            Some(&done) => done,
                            None => {
                                let made = self.spell(&mut t, op, *v, steps)?;
                                spelled.insert((*v, shape), made);
                                made
                            }
                        }
                    }
                };
                t.set_use(Use::Op { op, operand: *operand as u32 }, to)?;
            }
            self.resize(&mut t, op)?;
            t.retype(op)?;
        }
        for &v in &self.leaks {
            self.unfold(&mut t, v)?;
        }
        for &exit in &self.exits {
            let v = t.op(exit).results()[0];
            let Some(member) = t.op(exit).value("x") else { continue };
            for u in t.value(v).uses().to_vec() {
                t.set_use(u, member)?;
            }
        }
        let gone: Vec<ValueId> =
            self.entries.iter().chain(&self.exits).flat_map(|&op| t.op(op).results().to_vec()).collect();
        t.erase_dead(gone);
        t.commit()
    }

    fn spell(&self, t: &mut Transaction<'_>, before: OpId, v: ValueId, steps: &[Step]) -> Result<ValueId, PatchError> {
        let name = format!("{}_grouped", t.value(v).name());
        let mut at = v;
        for step in steps {
            at = match step {
                Step::Reshape(shape) => t.insert_reshape(before, &name, at, shape)?,
                Step::Transpose(perm, _) => {
                    let perm: Vec<i64> = perm.iter().map(|&p| p as i64).collect();
                    let perm = t.insert_const(before, &format!("{name}_perm"), Literal::ints(&perm));
                    let inputs =
                        vec![("x".into(), vec![Operand::Value(at)]), ("perm".into(), vec![Operand::Value(perm)])];
                    t.insert(before, "transpose", &name, inputs)?
                }
            };
        }
        Ok(at)
    }

    /// Sizes of the head and row axes that are written out in a member's parameters.
    fn resize(&self, t: &mut Transaction<'_>, op: OpId) -> Result<(), PatchError> {
        let param = match &**t.op(op).kind() {
            "slice_by_index" => "end",
            "slice_by_size" => "size",
            _ => return Ok(()),
        };
        let Some(mut sizes) = t.ints(op, param) else { return Ok(()) };
        let old = sizes.clone();
        for (axis, head, folded) in [
            (self.fold.axis, self.fold.heads, self.fold.kv_heads),
            (self.fold.axis + 1, self.fold.q_len, self.fold.heads / self.fold.kv_heads * self.fold.q_len),
        ] {
            if let Some(n) = sizes.get_mut(axis)
                && *n == head as i64
            {
                *n = folded as i64;
            }
        }
        if sizes != old { t.set_const(op, param, Literal::ints(&sizes)) } else { Ok(()) }
    }

    /// Gives readers outside the region the head layout back.
    fn unfold(&self, t: &mut Transaction<'_>, v: ValueId) -> Result<(), PatchError> {
        let Some(op) = t.producer(v) else { return Ok(()) };
        let Some(shape) = t.tensor(v).and_then(TensorType::known_shape) else { return Ok(()) };
        let mut head = shape.to_vec();
        head[self.fold.axis] = self.fold.heads;
        head[self.fold.axis + 1] = self.fold.q_len;
        let uses: Vec<Use> = t
            .value(v)
            .uses()
            .iter()
            .copied()
            .filter(|u| u.op().is_none_or(|user| !self.members.contains(&user) && !self.exits.contains(&user)))
            .collect();
        let name = t.value(v).name().clone();
        let at = match t.ops(t.op(op).block()).skip_while(|&o| o != op).nth(1) {
            Some(next) => next,
            None => return self.unfold_at_end(t, op, v, &head, uses),
        };
        let unfolded = t.insert_reshape(at, &name, v, &head)?;
        t.move_name(v, unfolded);
        for u in uses {
            t.set_use(u, unfolded)?;
        }
        Ok(())
    }

    /// As [`Region::unfold`] where the member is the last op of its block: the reshape goes before it, then behind.
    fn unfold_at_end(
        &self,
        t: &mut Transaction<'_>,
        op: OpId,
        v: ValueId,
        head: &[u64],
        uses: Vec<Use>,
    ) -> Result<(), PatchError> {
        let name = t.value(v).name().clone();
        let unfolded = t.insert_reshape(op, &name, v, head)?;
        if let Some(reshape) = t.producer(unfolded) {
            t.move_before(op, reshape);
        }
        t.move_name(v, unfolded);
        for u in uses {
            t.set_use(u, unfolded)?;
        }
        Ok(())
    }
}

/// Element by element, operands aligned to the right.
const ELEMENTWISE: &[&str] = &[
    "abs",
    "acos",
    "add",
    "asin",
    "atan",
    "atanh",
    "cast",
    "ceil",
    "clamped_relu",
    "clip",
    "cos",
    "cosh",
    "elu",
    "equal",
    "erf",
    "exp",
    "exp2",
    "floor",
    "floor_div",
    "gelu",
    "greater",
    "greater_equal",
    "identity",
    "inverse",
    "leaky_relu",
    "less",
    "less_equal",
    "linear_activation",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "not_equal",
    "pow",
    "real_div",
    "relu",
    "relu6",
    "round",
    "rsqrt",
    "scaled_tanh",
    "select",
    "sigmoid",
    "sigmoid_hard",
    "sign",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "softsign",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
    "threshold",
];

/// Whether a parameter's elements belong to the elements of the result, rather than saying how it is computed.
fn is_data(kind: &str, param: &str) -> bool {
    match kind {
        "select" => true,
        "concat" => param == "values",
        "fill_like" => param == "ref_tensor",
        _ => matches!(param, "x" | "y"),
    }
}

/// Whether an op can compute in the folded shape, or why not.
fn member(f: &Function, fold: &Fold, op: OpId, block: crate::ir::BlockId) -> Result<(), String> {
    let data = f.op(op);
    if data.block() != block {
        return Err("lies in a nested block".into());
    }
    if let Some(what) = data.unmodelled() {
        return Err(format!("carries {what}, which an edit would lose"));
    }
    let rank = data.value("x").and_then(|x| f.tensor(x)).map_or(0, TensorType::rank);
    let mixes = || Err(format!("({}) works along the head or the row axis", data.kind()));
    let touches = |axis: usize| axis == fold.axis || axis == fold.axis + 1;
    let behind = |axes: &[usize]| axes.iter().all(|&a| a > fold.axis + 1);
    match &**data.kind() {
        kind if ELEMENTWISE.contains(&kind) => {}
        "fill_like" => {}
        "softmax" => {
            let axis = views::Softmax::of(f, op).map(|s| s.axis);
            if axis.is_none_or(touches) {
                return mixes();
            }
        }
        "cumsum" => {
            let axis = f.int(op, "axis").unwrap_or(0);
            if touches(usize::try_from(if axis < 0 { axis + rank as i64 } else { axis }).unwrap_or(fold.axis)) {
                return mixes();
            }
        }
        kind if kind.starts_with("reduce_") && !kind.starts_with("reduce_arg") => {
            let Some(reduce) = views::Reduce::of(f, op) else { return Err("has axes that are not constant".into()) };
            if !(reduce.axes.iter().all(|&a| !touches(a)) && (reduce.keep_dims || behind(&reduce.axes))) {
                return mixes();
            }
        }
        "concat" => {
            let Some(concat) = views::Concat::of(f, op) else { return Err("has an axis that is not constant".into()) };
            if touches(concat.axis) {
                return mixes();
            }
        }
        "split" => {
            let Some(axis) = f.int(op, "axis") else { return Err("has an axis that is not constant".into()) };
            if touches(usize::try_from(if axis < 0 { axis + rank as i64 } else { axis }).unwrap_or(fold.axis)) {
                return mixes();
            }
        }
        "slice_by_index" => {
            let Some(slice) = views::Slice::of(f, op) else { return Err("has bounds that are not constant".into()) };
            let whole = |a: usize| {
                let size = data.value("x").and_then(|x| f.tensor(x)?.shape.get(a));
                size.is_some_and(|d| slice.axes.get(a).is_some_and(|s| takes_all(s, d) && !s.squeeze))
            };
            if !(whole(fold.axis) && whole(fold.axis + 1)) {
                return mixes();
            }
            if slice.axes[..fold.axis].iter().any(|a| a.squeeze) {
                return Err("drops an axis in front of the heads".into());
            }
            if !resizable(f, fold, op, "end") {
                return Err("has an end that is computed at run time".into());
            }
        }
        "slice_by_size" => {
            let begin = f.ints(op, "begin").unwrap_or_default();
            if begin.get(fold.axis) != Some(&0) || begin.get(fold.axis + 1) != Some(&0) {
                return mixes();
            }
            if f.ints(op, "size").is_none() {
                return Err("has a size that is computed at run time".into());
            }
        }
        "pad" => {
            let Some(pad) = f.ints(op, "pad") else { return Err("pads by amounts computed at run time".into()) };
            let first = rank.saturating_sub(pad.len() / 2);
            let padded = |a: usize| a >= first && pad.iter().skip(2 * (a - first)).take(2).any(|&n| n != 0);
            if padded(fold.axis) || padded(fold.axis + 1) {
                return mixes();
            }
        }
        "expand_dims" => {
            let axes = views::ExpandDims::of(f, op).map(|e| e.axes);
            if !axes.is_some_and(|a| behind(&a)) {
                return Err("inserts an axis in front of or between heads and rows".into());
            }
        }
        "squeeze" => {
            let axes = views::Squeeze::of(f, op).map(|s| s.axes);
            if !f.has_param(op, "axes") || !axes.is_some_and(|a| behind(&a)) {
                return Err("drops an axis in front of or between heads and rows".into());
            }
        }
        _ => return Err(format!("({}) is not an op that the reshape can pass", data.kind())),
    }
    let head_layout =
        |v: &ValueId| f.tensor(*v).and_then(TensorType::known_shape).is_some_and(|s| fold.is_head_layout(&s));
    if data.results().iter().all(head_layout) {
        Ok(())
    } else {
        Err("does not keep heads and rows where they were".into())
    }
}

/// Whether the sizes of the head and row axes in a slice's `end` are masked or constant.
fn resizable(f: &Function, fold: &Fold, op: OpId, end: &str) -> bool {
    let masked = |axis: usize| f.ints(op, "end_mask").is_some_and(|m| m.get(axis) == Some(&1));
    f.ints(op, end).is_some() || (masked(fold.axis) && masked(fold.axis + 1))
}

/// How an operand from outside follows a member into the folded shape.
fn follow(
    f: &Function,
    layouts: &Layouts<'_>,
    fold: &Fold,
    op: OpId,
    operand: &Operand,
) -> Result<Outside, &'static str> {
    let unknown = "has a size that is not known";
    let ty = f.operand_type(operand).as_tensor().ok_or(unknown)?;
    let shape = ty.known_shape().ok_or(unknown)?;
    let rank = f.tensor(f.op(op).results()[0]).ok_or(unknown)?.rank();
    let missing = rank.checked_sub(shape.len()).ok_or(unknown)?;
    let at = |axis: usize| axis.checked_sub(missing).map_or(1, |a| shape[a]);
    let (heads, rows) = (at(fold.axis), at(fold.axis + 1));
    let broadcasts = f.op(op).kind() != "concat";
    if heads == 1 && rows == 1 && broadcasts {
        return Ok(Outside::Free);
    }
    if let (Some(v), true) = (operand.as_value(), broadcasts && fold.axis >= missing) {
        let axis = fold.axis - missing;
        for layout in layouts.of(v).iter().skip(1) {
            if !layout.axes[axis..axis + 2].iter().all(|a| spelling::repeats_only(a)) {
                continue;
            }
            let mut once = layout.clone();
            once.axes[axis].clear();
            once.axes[axis + 1].clear();
            let mut to = shape.to_vec();
            to[axis] = 1;
            to[axis + 1] = 1;
            let from = f.tensor(layout.source).and_then(TensorType::known_shape);
            if let Some(steps) = from.and_then(|from| spelling::spell(&from, &once, &to)) {
                return Ok(Outside::Spelled(layout.source, steps));
            }
        }
    }
    if heads == fold.heads && rows == fold.q_len {
        let mut to = shape.to_vec();
        to[fold.axis - missing] = fold.kv_heads;
        to[fold.axis + 1 - missing] = fold.heads / fold.kv_heads * fold.q_len;
        return Ok(match (f.operand_literal(operand), operand) {
            (Some(l), _) => {
                Outside::Constant(Literal { ty: TensorType::fixed(ty.dtype, &to).into(), data: l.data.clone() })
            }
            (None, Operand::Value(v)) => Outside::Spelled(*v, vec![Step::Reshape(to)]),
            (None, Operand::Literal(_)) => return Err(unknown),
        });
    }
    Err(match heads {
        1 => "differs from row to row and is the same for all heads, which folded rows cannot broadcast",
        _ => "differs from head to head and is the same for all rows, which folded rows cannot broadcast",
    })
}
