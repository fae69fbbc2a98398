//! Regrouping regions: the reshapes that a fold leaves around softmax and its neighbours move out of the way.
//!
//! A fold leaves reshapes between the *head layout* and a *folded* one. Both lowerings change two neighbouring axes and
//! keep the rank: rows turn `[…, n_heads, q_len, …]` into `[…, n_kv_heads, group·q_len, …]`, batch axes turn
//! `[1, n_heads, …]` into `[n_kv_heads, group, …]`. Ops that work element by element, or along other axes, can therefore
//! compute in the folded shape as they are: axis numbers stay, only operands and sizes on the two axes change.
//!
//! *Sinking* starts from reshapes into head layout and follows their readers; *hoisting* starts from reshapes into the
//! folded shape and follows what they read, into the projection's own reshape.
//!
//! Members: elementwise ops, `select`, `cast`, softmax, cumsum and reductions along other axes, `concat`, `split`,
//! slices, `pad` and `tile` that leave both axes whole, `expand_dims` / `squeeze` behind them, `fill_like`.
//!
//! An operand from outside is free when it has extent one on both axes, when its layout only repeats there, when it is a
//! constant (its declared shape changes, its bytes do not), or when one reshape regroups it.
//!
//! A region moves whole or not at all, and only when more reshapes go than come: a member that is also read outside keeps
//! one reshape for that.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::analysis::layout::{Layouts, normalise};
use crate::analysis::spelling::{self, Step};
use crate::analysis::traffic::value_bytes;
use crate::ir::{BlockId, Dim, Function, Literal, OpId, Operand, TensorType, Use, ValueId};
use crate::opset::{is_elementwise, views};
use crate::rewrite::{Budget, Fired, Keeps, NoMatch, Outcome, Patch, PatchError, Ref, Transaction, is_returned};

use super::Masks;
use super::member::{is_data, member};
use super::shared::{tile_before, tile_once};

/// Sinks every reshape into head layout among those that `is_new` admits, as far as it pays.
pub(super) fn sink(f: &mut Function, is_new: impl Fn(OpId) -> bool, masks: Masks, budget: &mut Budget) -> Outcome {
    let mut outcome = Outcome::default();
    let mut done: BTreeSet<OpId> = BTreeSet::new();
    for op in f.all_ops() {
        if !is_new(op) || !f.is_live(op) || done.contains(&op) {
            continue;
        }
        let Some(fold) = Fold::undone_by(f, op) else { continue };
        let region = Region::below(f, fold, op, masks);
        done.extend(region.entries.iter().copied());
        if region.members.is_empty() {
            outcome.decline(region.stuck(f, &is_new).and_then(|no| no.declined(f.describe(op))));
        } else if !region.settle(f, op, "sunk", budget, &mut outcome) {
            break;
        }
    }
    outcome
}

/// Hoists every reshape into a folded shape among those that `is_new` admits, as far as it pays.
pub(super) fn hoist(f: &mut Function, is_new: impl Fn(OpId) -> bool, budget: &mut Budget) -> Outcome {
    let mut outcome = Outcome::default();
    for op in f.all_ops() {
        if !is_new(op) || !f.is_live(op) {
            continue;
        }
        let Some(fold) = Fold::done_by(f, op) else { continue };
        let region = Region::above(f, fold, op);
        let pays = !region.members.is_empty() && region.refusal(f).is_none();
        if pays && !region.settle(f, op, "hoisted", budget, &mut outcome) {
            break;
        }
    }
    outcome
}

/// Neighbouring axes in head layout and folded: two that are regrouped, or the head axis without its repeats.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Fold {
    /// The first of the axes, counted from the left.
    pub(super) axis: usize,
    /// Their sizes in head layout.
    pub(super) head: Vec<Dim>,
    /// Their sizes in the folded shape.
    pub(super) folded: Vec<Dim>,
}

impl Fold {
    /// The fold between two shapes of one rank that differ in two neighbouring axes.
    fn between(head: &[Dim], folded: &[Dim]) -> Option<Fold> {
        let axis = (0..head.len().min(folded.len())).find(|&i| head[i] != folded[i])?;
        let pair = |s: &[Dim]| s.get(axis..axis + 2).map(<[Dim]>::to_vec);
        let fold = Fold { axis, head: pair(head)?, folded: pair(folded)? };
        let same = fold.fold(head).as_deref() == Some(folded) && head.len() == folded.len();
        (same && Dim::product(&fold.head) == Dim::product(&fold.folded)).then_some(fold)
    }

    fn shapes(f: &Function, reshape: OpId) -> Option<(&[Dim], &[Dim])> {
        let view = views::Reshape::of(f, reshape)?;
        Some((&f.tensor(view.x)?.shape, &f.tensor(*f.op(reshape).results().first()?)?.shape))
    }

    /// The fold that a reshape into head layout undoes.
    fn undone_by(f: &Function, reshape: OpId) -> Option<Fold> {
        Fold::shapes(f, reshape).and_then(|(from, to)| Fold::between(to, from))
    }

    /// The fold that a reshape does.
    fn done_by(f: &Function, reshape: OpId) -> Option<Fold> {
        Fold::shapes(f, reshape).and_then(|(from, to)| Fold::between(from, to))
    }

    pub(super) fn is_head_layout(&self, shape: &[Dim]) -> bool {
        shape.get(self.axes()) == Some(&self.head[..])
    }

    pub(super) fn axes(&self) -> Range<usize> {
        self.axis..self.axis + self.head.len()
    }

    fn replaced(&self, shape: &[Dim], sizes: &[Dim]) -> Option<Vec<Dim>> {
        let mut out = shape.to_vec();
        out.get_mut(self.axes())?.clone_from_slice(sizes);
        Some(out)
    }

    /// The folded form of a shape in head layout.
    fn fold(&self, shape: &[Dim]) -> Option<Vec<Dim>> {
        self.replaced(shape, &self.folded)
    }

    /// The head layout of a folded shape.
    fn unfold(&self, shape: &[Dim]) -> Option<Vec<Dim>> {
        self.replaced(shape, &self.head)
    }

    /// How many heads share a KV head, where rows are folded: their rows follow each other.
    fn group(&self) -> Option<u64> {
        let ([heads, rows], [kv_heads, folded]) = (&self.head[..], &self.folded[..]) else { return None };
        let group = heads.checked_div(kv_heads)?;
        (group.checked_mul(rows).as_ref() == Some(folded)).then(|| group.as_known())?
    }

    pub(super) fn touches(&self, axis: usize) -> bool {
        self.axes().contains(&axis)
    }

    pub(super) fn is_behind(&self, axis: usize) -> bool {
        axis >= self.axes().end
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
    /// That value with an axis tiled.
    Tiled(ValueId, usize, u64),
}

#[derive(Debug)]
struct Region {
    fold: Fold,
    masks: Masks,
    /// Reshapes into head layout whose results members read.
    entries: Vec<OpId>,
    /// Ops that will compute in the folded shape, in block order.
    members: Vec<OpId>,
    /// Reshapes of members to the folded shape.
    exits: Vec<OpId>,
    /// Results of members that are read outside, or returned.
    leaks: Vec<ValueId>,
    /// `shape` ops that ask for single sizes, and of which value of that head layout; of the folded one otherwise.
    asked: BTreeMap<OpId, Option<ValueId>>,
    /// Operands from outside that change, by member and operand position.
    outside: BTreeMap<(OpId, usize), Outside>,
    /// Ops next to the region, and why they are not part of it.
    borders: Vec<(OpId, String)>,
    /// Why some operand cannot follow, and what would let it.
    blocked: Option<(String, &'static str)>,
}

impl Region {
    fn new(fold: Fold, masks: Masks) -> Region {
        Region {
            fold,
            masks,
            entries: vec![],
            members: vec![],
            exits: vec![],
            leaks: vec![],
            asked: BTreeMap::new(),
            outside: BTreeMap::new(),
            borders: vec![],
            blocked: None,
        }
    }

    /// What reads a reshape into head layout, as far down as it goes.
    fn below(f: &Function, fold: Fold, entry: OpId, masks: Masks) -> Region {
        let mut region = Region::new(fold, masks);
        region.entries.push(entry);
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
                if let Some(of) = region.asks(f, entry, user) {
                    region.asked.insert(user, of);
                    continue;
                }
                match member(f, &region.fold, user, f.op(entry).block()) {
                    Ok(()) => {
                        region.members.push(user);
                        work.extend(f.op(user).results());
                        work.extend(region.join_entries(f, user));
                    }
                    Err(reason) => {
                        region.borders.push((user, format!("{} {reason}", f.describe(user))));
                        leaks = true;
                    }
                }
            }
            if leaks && !is_entry {
                region.leaks.push(v);
            }
        }
        region.finish(f, f.op(entry).block())
    }

    /// What a reshape to the folded shape reads, as far up as nothing else reads it.
    fn above(f: &Function, fold: Fold, exit: OpId) -> Region {
        let block = f.op(exit).block();
        let mut region = Region::new(fold, Masks::Keep);
        region.exits.push(exit);
        let mut wanted: Vec<ValueId> = f.op(exit).value("x").into_iter().collect();
        let mut grown = true;
        while grown {
            grown = false;
            for v in wanted.clone() {
                let Some(op) = f.producer(v).filter(|op| !region.members.contains(op)) else { continue };
                if member(f, &region.fold, op, block).is_ok() && region.reads_all(f, op) {
                    region.members.push(op);
                    wanted.extend(f.op(op).operands().iter().filter_map(|o| o.as_value()));
                    grown = true;
                }
            }
        }
        region.finish(f, block)
    }

    /// Whether the region reads all results of an op; exits that it finds become its own.
    fn reads_all(&mut self, f: &Function, op: OpId) -> bool {
        let mut exits = Vec::new();
        let all = f.op(op).results().iter().all(|&v| {
            f.value(v).uses().iter().all(|u| match u.op() {
                Some(user) if self.members.contains(&user) || self.exits.contains(&user) => true,
                Some(user) if self.is_exit(f, v, user) => {
                    exits.push(user);
                    true
                }
                _ => false,
            })
        });
        if all {
            self.exits.extend(exits);
        }
        all
    }

    fn finish(mut self, f: &Function, block: BlockId) -> Region {
        let order: BTreeMap<OpId, usize> = f.ops(block).enumerate().map(|(i, op)| (op, i)).collect();
        self.members.sort_by_key(|op| order.get(op));
        self.look_outside(f);
        self
    }

    /// Of which value a `shape` op can ask for its sizes when its operand is folded: those of other axes of the folded
    /// value itself (`None`), those of the two axes of the operand of the product that has them.
    fn asks(&self, f: &Function, entry: OpId, op: OpId) -> Option<Option<ValueId>> {
        let axes = sizes_read(f, op)?;
        if !axes.iter().any(|&a| self.fold.touches(a)) {
            return Some(None);
        }
        let product = f.producer(f.op(entry).value("x")?)?;
        let operands = f.op(product).operands().iter().filter_map(|o| f.producer(o.as_value()?));
        let heads = operands.filter_map(|regrouped| f.op(regrouped).value("x").filter(|_| is_reshaping(f, regrouped)));
        let whole = |v: &ValueId| f.tensor(*v).is_some_and(|t| self.fold.is_head_layout(&t.shape));
        let all_touch = axes.iter().all(|&a| self.fold.touches(a));
        heads.into_iter().find(whole).filter(|_| all_touch).map(Some)
    }

    /// Further folds whose output a member reads join the region.
    fn join_entries(&mut self, f: &Function, member: OpId) -> Vec<ValueId> {
        let mut joined = Vec::new();
        for operand in f.op(member).operands() {
            let Some(v) = operand.as_value() else { continue };
            let Some(op) = f.producer(v) else { continue };
            let known = self.entries.contains(&op) || self.members.contains(&op);
            if !known && Fold::undone_by(f, op).as_ref() == Some(&self.fold) {
                self.entries.push(op);
                joined.push(v);
            }
        }
        joined
    }

    fn is_exit(&self, f: &Function, v: ValueId, user: OpId) -> bool {
        let folds = Fold::done_by(f, user).as_ref() == Some(&self.fold);
        folds && f.op(user).value("x") == Some(v) && !is_returned(f, f.op(user).results()[0])
    }

    fn is_inside(&self, f: &Function, v: ValueId) -> bool {
        f.producer(v).is_some_and(|op| self.members.contains(&op) || self.entries.contains(&op))
    }

    fn look_outside(&mut self, f: &Function) {
        let layouts = Layouts::new(f);
        for &op in &self.members {
            for (i, operand) in f.op(op).operands().iter().enumerate() {
                let param = f.op(op).param_of(i).map_or("", |n| n.as_str());
                if !is_data(f.op(op).kind(), param) {
                    continue;
                }
                if operand.as_value().is_some_and(|v| self.is_inside(f, v)) {
                    // Broadcasting aligns to the right, the two axes are counted from the left.
                    if is_elementwise(f.op(op).kind()) && rank(f, operand) != result_rank(f, op) {
                        self.blocked.get_or_insert((
                            format!("{} broadcasts over the rank", f.describe(op)),
                            "its operands have the rank of its result",
                        ));
                    }
                    continue;
                }
                match follow(f, &layouts, &self.fold, self.masks, op, operand) {
                    Ok(outside) => {
                        self.outside.insert((op, i), outside);
                    }
                    Err(no) => {
                        let what = match operand {
                            Operand::Value(v) => format!("operand `{}`", f.value(*v).name()),
                            Operand::Literal(_) => format!("the constant `{param}`"),
                        };
                        self.blocked.get_or_insert((format!("{what} of {} {}", f.describe(op), no.reason), no.remedy));
                    }
                }
            }
        }
    }

    /// Reshapes that go, less those that come.
    fn gain(&self, f: &Function) -> i64 {
        let read_by_members = |v: ValueId| {
            let inside = |user: OpId| self.members.contains(&user) || self.asked.contains_key(&user);
            f.value(v).uses().iter().all(|u| u.op().is_some_and(inside))
        };
        let added: BTreeSet<ValueId> = self
            .outside
            .values()
            .filter_map(|o| match o {
                Outside::Spelled(v, steps) if !steps.is_empty() => Some(*v),
                _ => None,
            })
            // A reshape of a view that only the region reads becomes one op with it.
            .filter(|&v| !(read_by_members(v) && f.producer(v).is_some_and(|op| is_reshaping(f, op))))
            .collect();
        // An entry that is also read outside stays.
        let gone = self.entries.iter().filter(|&&e| read_by_members(f.op(e).results()[0])).count() + self.exits.len();
        gone as i64 - (self.leaks.len() + added.len()) as i64
    }

    /// Bytes that are written and read to tile masks.
    fn bytes_added(&self, f: &Function) -> u64 {
        let mut tiled = BTreeMap::new();
        for (&(op, _), outside) in &self.outside {
            if let Outside::Tiled(v, axis, group) = *outside
                && tile_before(f, op, v, axis, &self.fold.folded[1]).is_none()
            {
                tiled.insert((v, axis), 2 * group * value_bytes(f, v));
            }
        }
        tiled.into_values().sum()
    }

    fn refusal(&self, f: &Function) -> Option<NoMatch> {
        match &self.blocked {
            Some((reason, remedy)) => Some(stay(reason).remedy(*remedy)),
            None if self.gain(f) > 0 => None,
            None => Some(match self.borders.first() {
                Some((_, border)) => stay(border).remedy(BORDER_REMEDY),
                None => stay("as many would have to be added as would go").remedy("another folded product reads them"),
            }),
        }
    }

    /// Why a reshape whose first readers are borders stays, if those are ops of the model. A further view becomes one with
    /// it.
    fn stuck(&self, f: &Function, is_new: &impl Fn(OpId) -> bool) -> Option<NoMatch> {
        let is_view = |op: OpId| f.op(op).kind() == "transpose" || is_reshaping(f, op);
        let (_, border) = self.borders.iter().find(|(op, _)| !is_view(*op) && !is_new(*op))?;
        Some(stay(border).remedy(BORDER_REMEDY))
    }

    /// Moves the region, or says why not; `false` when the budget is spent.
    fn settle(&self, f: &mut Function, seed: OpId, verb: &str, budget: &mut Budget, outcome: &mut Outcome) -> bool {
        let op = f.describe(seed);
        if let Some(no) = self.refusal(f).or_else(|| budget.refusal(f, &op)) {
            outcome.decline(no.declined(op));
            return true;
        }
        if !budget.take() {
            return false;
        }
        let form = format!("{verb}: through {} ops, {} reshapes fewer", self.members.len(), self.gain(f));
        let bytes_added = self.bytes_added(f);
        match self.apply(f) {
            Ok(()) => outcome.fired.push(Fired { bytes_added, ..Fired::plain(op, form) }),
            Err(e) => outcome.decline(NoMatch::because(e.to_string()).keeping(Keeps::Reshapes).declined(op)),
        }
        true
    }

    fn apply(&self, f: &mut Function) -> Result<(), PatchError> {
        let mut t = Transaction::begin(f);
        for &entry in &self.entries {
            let (folded, v) = (t.op(entry).value("x"), t.op(entry).results()[0]);
            let Some(folded) = folded else { continue };
            for u in t.value(v).uses().to_vec() {
                if u.op().is_some_and(|op| self.members.contains(&op) || self.asked.contains_key(&op)) {
                    t.set_use(u, folded)?;
                }
            }
        }
        for (&op, of) in &self.asked {
            if let Some(v) = *of {
                t.set_use(Use::Op { op, operand: 0 }, v)?;
            }
        }
        let mut made: Vec<(&Outside, ValueId)> = Vec::new();
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
                    _ => match made.iter().find(|(same, _)| *same == outside) {
                        Some(&(_, v)) => v,
                        None => {
                            let v = outside.make(&mut t, op)?;
                            made.push((outside, v));
                            v
                        }
                    },
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
        t.erase_dead(self.outside.values().filter_map(Outside::value));
        t.commit()
    }

    /// Sizes of the two axes that are written out in a member's parameters.
    fn resize(&self, t: &mut Transaction<'_>, op: OpId) -> Result<(), PatchError> {
        let param = match &**t.op(op).kind() {
            "slice_by_index" => "end",
            "slice_by_size" => "size",
            _ => return Ok(()),
        };
        let Some(mut sizes) = t.ints(op, param) else { return Ok(()) };
        let old = sizes.clone();
        for (i, (head, folded)) in self.fold.head.iter().zip(&self.fold.folded).enumerate() {
            if let (Some(n), Some(head), Some(folded)) =
                (sizes.get_mut(self.fold.axis + i), head.as_known(), folded.as_known())
                && *n == head as i64
            {
                *n = folded as i64;
            }
        }
        if sizes != old { t.set_const(op, param, Literal::ints(&sizes)) } else { Ok(()) }
    }

    /// Gives readers outside the region the head layout back.
    fn unfold(&self, t: &mut Transaction<'_>, v: ValueId) -> Result<(), PatchError> {
        let (Some(op), Some(ty)) = (t.producer(v), t.tensor(v)) else { return Ok(()) };
        let name = t.value(v).name().clone();
        let head = self.fold.unfold(&ty.shape).ok_or_else(|| unsized_value(&name))?;
        let inside =
            |user: OpId| self.members.contains(&user) || self.exits.contains(&user) || self.asked.contains_key(&user);
        let uses: Vec<Use> =
            t.value(v).uses().iter().copied().filter(|u| u.op().is_none_or(|user| !inside(user))).collect();
        let mut patch = Patch::before(op);
        let at = patch.reshape(t, v, &name, &head).ok_or_else(|| unsized_value(&name))?;
        let unfolded = t.insert_behind(op, &patch, &at)?;
        t.move_name(v, unfolded);
        for u in uses {
            t.set_use(u, unfolded)?;
        }
        Ok(())
    }
}

impl Outside {
    fn value(&self) -> Option<ValueId> {
        match self {
            Outside::Spelled(v, _) | Outside::Tiled(v, _, _) => Some(*v),
            _ => None,
        }
    }

    /// Adds the ops that make it, before `op`.
    fn make(&self, t: &mut Transaction<'_>, op: OpId) -> Result<ValueId, PatchError> {
        let mut patch = Patch::before(op);
        let base = self.value().map_or("c", |v| t.value(v).name().as_str());
        let at = match self {
            Outside::Spelled(v, steps) => patch.steps(t, *v, &format!("{base}_grouped"), steps),
            Outside::Tiled(v, axis, group) => tile_once(t, &mut patch, op, *v, *axis, *group),
            Outside::Free | Outside::Constant(_) => None,
        };
        match at.ok_or_else(|| unsized_value(base))? {
            Ref::Value(v) => Ok(v),
            at => t.insert(&patch, &at),
        }
    }
}

const BORDER_REMEDY: &str = "that op keeps heads and rows apart, or does not read the scores";

fn stay(reason: &str) -> NoMatch {
    NoMatch::because(format!("the reshapes stay: {reason}")).keeping(Keeps::Reshapes)
}

fn rank(f: &Function, operand: &Operand) -> Option<usize> {
    f.operand_type(operand).as_tensor().map(TensorType::rank)
}

fn result_rank(f: &Function, op: OpId) -> Option<usize> {
    f.op(op).results().first().and_then(|&v| f.tensor(v)).map(TensorType::rank)
}

fn unsized_value(name: &str) -> PatchError {
    PatchError::Stale(format!("a way to compute the shape of `{name}`"))
}

/// The axes whose sizes are read from a `shape` op, if single sizes are all that is read.
fn sizes_read(f: &Function, op: OpId) -> Option<Vec<usize>> {
    let &[sizes] = f.op(op).results() else { return None };
    let rank = f.op(op).value("x").and_then(|x| f.tensor(x)).map(TensorType::rank)?;
    if f.op(op).kind() != "shape" || is_returned(f, sizes) {
        return None;
    }
    let read = |user: OpId| match f.op(user).kind().as_str() {
        "gather" if f.op(user).value("x") == Some(sizes) => f.ints(user, "indices"),
        _ => None,
    };
    let axes: Vec<i64> = f.users(sizes).into_iter().map(read).collect::<Option<Vec<_>>>()?.concat();
    axes.into_iter().map(|axis| normalise(axis, rank)).collect()
}

/// Whether an op's result can be had by another `reshape` in its place.
fn is_reshaping(f: &Function, op: OpId) -> bool {
    matches!(&**f.op(op).kind(), "reshape" | "expand_dims" | "squeeze" | "flatten2d")
        || f.op(op).kind() == "transpose" && crate::analysis::traffic::is_view(f, op)
}

/// Why an operand from outside cannot follow, and what would let it.
#[derive(Clone, Copy, Debug)]
struct Stays {
    reason: &'static str,
    remedy: &'static str,
}

/// How an operand from outside follows a member into the folded shape.
fn follow(
    f: &Function,
    layouts: &Layouts<'_>,
    fold: &Fold,
    masks: Masks,
    op: OpId,
    operand: &Operand,
) -> Result<Outside, Stays> {
    let odd =
        Stays { reason: "is no tensor that fits the result", remedy: "it has the head axis, or broadcasts along it" };
    let ty = f.operand_type(operand).as_tensor().ok_or(odd)?;
    let rank = result_rank(f, op).ok_or(odd)?;
    let kind = f.op(op).kind().as_str();
    let broadcasts = is_elementwise(kind);
    let missing = if broadcasts { rank.checked_sub(ty.rank()).ok_or(odd)? } else { 0 };
    // The operand's shape with the axes that broadcasting adds in front.
    let aligned: Vec<Dim> = vec![Dim::known(1); missing].into_iter().chain(ty.shape.iter().cloned()).collect();
    let pair = aligned.get(fold.axes()).ok_or(odd)?;
    if broadcasts && pair.iter().all(Dim::is_one) {
        return Ok(Outside::Free);
    }
    if let (Some(v), true) = (operand.as_value(), broadcasts && fold.axis >= missing) {
        let axis = fold.axis - missing;
        for layout in layouts.of(v).iter().skip(1) {
            if !layout.axes[axis..axis + pair.len()].iter().all(|a| spelling::repeats_only(a)) {
                continue;
            }
            let (mut once, mut to) = (layout.clone(), ty.shape.to_vec());
            once.axes[axis..axis + pair.len()].iter_mut().for_each(|a| a.clear());
            to[axis..axis + pair.len()].fill(Dim::known(1));
            let from = f.tensor(layout.source).map(|t| &t.shape[..]);
            if let Some(steps) = from.and_then(|from| spelling::spell(from, &once, &to)) {
                return Ok(Outside::Spelled(layout.source, steps));
            }
        }
    }
    if pair == &fold.head[..] {
        let to = fold.fold(&aligned).ok_or(odd)?;
        return Ok(match (f.operand_literal(operand), operand) {
            (Some(l), _) => {
                Outside::Constant(Literal { ty: TensorType::new(ty.dtype, to).into(), data: l.data.clone() })
            }
            (None, Operand::Value(v)) => Outside::Spelled(*v, vec![Step::Reshape(to)]),
            (None, Operand::Literal(_)) => return Err(odd),
        });
    }
    let tiles = masks == Masks::Tile && pair[0].is_one() && pair.get(1) == fold.head.get(1);
    if let (true, Some(v), Some(group)) = (tiles, operand.as_value(), fold.group()) {
        return Ok(Outside::Tiled(v, fold.axis + 1 - missing, group));
    }
    Err(match pair[0].is_one() {
        true => Stays {
            reason: "differs from row to row and is the same for all heads, which folded rows cannot broadcast",
            remedy: "the masks are tiled (option masks=tile) or the lowering is batch axes (option lowering=batch-axes)",
        },
        false => Stays {
            reason: "differs from head to head and is the same for all rows, which folded rows cannot broadcast",
            remedy: "it is given for every row",
        },
    })
}
