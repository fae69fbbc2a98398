//! `kv-merge`: write neighbouring boxes of a state at once.
//!
//! With: state<tensor<fp16, [2, 4, 8]>> cache, tensor<fp16, [1, 4, 8]> a, tensor<fp16, [1, 4, 8]> b
//!
//! Given:
//! ```text
//! tensor<fp16, [2, 4, 8]> r0 = read_state(input = cache);
//! tensor<fp16, [2, 4, 8]> u0 = slice_update(x = r0, update = a, begin = [0, 0, 0], end = [1, 4, 8]);
//! write_state(input = cache, data = u0);
//! tensor<fp16, [2, 4, 8]> r1 = read_state(input = cache);
//! tensor<fp16, [2, 4, 8]> u1 = slice_update(x = r1, update = b, begin = [1, 0, 0], end = [2, 4, 8]);
//! write_state(input = cache, data = u1);
//! tensor<fp16, [1, 4, 8]> out = add(x = a, y = b);
//! -> (out)
//! ```
//! Return:
//! ```text
//! tensor<fp16, [2, 4, 8]> both = concat(values = (a, b), axis = 0, interleave = false);
//! tensor<fp16, [2, 4, 8]> r = read_state(input = cache);
//! tensor<fp16, [2, 4, 8]> u = slice_update(x = r, update = both, begin = [0, 0, 0], end = [2, 4, 8], begin_mask = [false, false, false], end_mask = [false, false, false], squeeze_mask = [false, false, false], stride = [1, 1, 1]);
//! write_state(input = cache, data = u);
//! tensor<fp16, [1, 4, 8]> out = add(x = a, y = b);
//! -> (out)
//! ```
//!
//! Updates of one state become one where nothing reads what they write before the last of them, their boxes are provably
//! apart, and the boxes are equal but for one axis along which they follow each other. The hazards between the state's
//! reads and writes (`analysis/state`) say what may move. With `boxes=strided`, boxes of extent one at equal distances (K in
//! row i, V in row i + n_layers) become one strided box too.
//!
//! Exactness: bitwise. Assumes: A4, A8, A10 (docs/assumptions.md).
//! Declines: a read, or a write that is no update, between the writes looks at what they write; boxes that may overlap; no
//! neighbour; a written value that something else reads; a state that is used in a nested block.

use std::collections::BTreeSet;

use petgraph::visit::EdgeRef;

use crate::analysis::state::{Chain, States, Update};
use crate::analysis::values::Poly;
use crate::ir::{Dim, Function, Literal, OpId, Operand, TensorType};
use crate::rewrite::{Budget, Fired, Input, Keeps, NoMatch, Outcome, Patch, PatchError, Ref, Transaction, loss};

use super::report::{describe_state, passed_through};
use super::{Exactness, Pass};

/// Writes neighbouring boxes of a state at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvMerge {
    /// Whether boxes at equal distances become one strided box.
    pub strided: bool,
}

impl Pass for KvMerge {
    fn name(&self) -> &'static str {
        "kv-merge"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        let mut outcome = Outcome::default();
        while !budget.is_spent() {
            outcome.declined.clear();
            let Some(merge) = self.next(f, budget, &mut outcome) else { break };
            let name = merge.name(f);
            match merge.apply(f) {
                Ok(()) => {
                    budget.take();
                    let form = format!("{}: {} boxes", merge.form(), merge.updates.len());
                    outcome.fired.push(Fired { bytes_added: merge.bytes, ..Fired::plain(name, form) });
                }
                Err(e) => {
                    outcome.decline(NoMatch::because(e.to_string()).keeping(Keeps::StateOps).declined(name));
                    break;
                }
            }
        }
        outcome.decline(passed_through(f));
        outcome
    }
}

impl KvMerge {
    /// The next merge, and why writes that remain stay apart.
    fn next(&self, f: &Function, budget: &Budget, outcome: &mut Outcome) -> Option<Merge> {
        let states = States::of(f);
        for chain in states.chains().iter().filter(|c| c.writes().count() > 1) {
            let admitted = |merge: Merge| budget.refusal(f, &merge.name(f)).map_or(Ok(merge), Err);
            match self.find(f, &states, chain).and_then(admitted) {
                Ok(merge) => return Some(merge),
                Err(no) => {
                    outcome.decline(no.keeping(Keeps::StateOps).declined(describe_state(f.value(chain.state).name())));
                }
            }
        }
        None
    }

    fn find(&self, f: &Function, states: &States, chain: &Chain) -> Result<Merge, NoMatch> {
        if let Some(op) = chain.out_of_sight() {
            return Err(NoMatch::because(format!("{} may use the state out of sight", f.describe(op)))
                .remedy("the state is read and written in the function's own block, and every op is known"));
        }
        let movable = Movable::of(f, states, chain);
        let mut refusal = None;
        for last in (0..movable.writes.len()).rev() {
            let group = movable.up_to(last);
            if let Some(merge) = self.boxes(f, chain, &group) {
                return Ok(merge);
            }
            refusal = refusal.or_else(|| movable.refusal(f, last));
        }
        Err(refusal.unwrap_or_else(|| {
            NoMatch::because("no two boxes that are written are neighbours").remedy("rows of layers follow each other")
        }))
    }

    /// The largest run of neighbouring boxes among updates.
    fn boxes(&self, f: &Function, chain: &Chain, group: &[(OpId, &Update)]) -> Option<Merge> {
        let rank = group.first()?.1.region.0.len();
        let mut best: Option<Merge> = None;
        for axis in 0..rank {
            for step in Step::kinds(self.strided) {
                for run in runs(group, axis, step) {
                    if run.len() > best.as_ref().map_or(1, |m| m.updates.len()) {
                        best = Merge::new(f, chain, axis, &run).or(best);
                    }
                }
            }
        }
        best
    }
}

/// How boxes follow each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Adjacent,
    Apart,
}

impl Step {
    fn kinds(strided: bool) -> &'static [Step] {
        if strided { &[Step::Adjacent, Step::Apart] } else { &[Step::Adjacent] }
    }
}

type Member<'u> = (OpId, &'u Update, i64, i64);

/// Runs of boxes that are equal but for `axis`, along which they follow each other from constant positions on.
fn runs<'u>(group: &[(OpId, &'u Update)], axis: usize, step: &Step) -> Vec<Vec<Member<'u>>> {
    let mut left: Vec<Member<'u>> = group
        .iter()
        .filter_map(|&(write, u)| {
            let span = u.region.0.get(axis).filter(|s| s.stride == 1)?;
            Some((write, u, span.begin.as_constant()?, span.extent.as_constant()?))
        })
        .collect();
    left.sort_by_key(|&(_, _, begin, _)| begin);
    let mut runs: Vec<Vec<Member<'u>>> = Vec::new();
    for member in left {
        let (_, u, begin, extent) = member;
        let fits = runs.iter_mut().find(|run| {
            let (_, prev, at, len) = run[run.len() - 1];
            let distance = begin - at;
            let follows = match step {
                Step::Adjacent => distance == len,
                Step::Apart => {
                    distance > 1 && len == 1 && extent == 1 && run.get(1).is_none_or(|s| s.2 - run[0].2 == distance)
                }
            };
            follows && alike(prev, u, axis)
        });
        match fits {
            Some(run) => run.push(member),
            None => runs.push(vec![member]),
        }
    }
    runs
}

/// Whether two boxes are equal but for one axis, and their updates have the same axes.
fn alike(a: &Update, b: &Update, axis: usize) -> bool {
    let mut spans = a.region.0.iter().zip(&b.region.0).enumerate().filter(|(i, _)| *i != axis);
    a.squeezed == b.squeezed && spans.all(|(_, (a, b))| a == b)
}

/// Updates of one state that may move down to later ones.
struct Movable<'c> {
    /// Writes that are updates which nothing but their write reads, with their place among the accesses.
    writes: Vec<(usize, OpId, &'c Update)>,
    /// For each access, the earlier accesses that must stay before it.
    before: Vec<BTreeSet<usize>>,
    ops: Vec<OpId>,
}

impl<'c> Movable<'c> {
    fn of(f: &Function, states: &States, chain: &'c Chain) -> Movable<'c> {
        let ops: Vec<OpId> = chain.accesses.iter().map(|a| a.op()).collect();
        let mut before = vec![BTreeSet::new(); ops.len()];
        let graph = states.hazards(f, chain);
        for edge in graph.edge_references() {
            // Nodes are added in the order of the accesses.
            before[edge.target().index()].insert(edge.source().index());
        }
        let writes = chain.accesses.iter().enumerate().filter_map(|(i, access)| {
            let update = access.update()?;
            let only_written = f.op(update.op).results().iter().all(|&v| f.value(v).uses().len() == 1);
            let editable =
                [access.op(), update.op].iter().all(|&op| loss(f, op).is_none() && f.check_editable(op).is_ok());
            (only_written && editable).then(|| (i, access.op(), update))
        });
        Movable { writes: writes.collect(), before, ops }
    }

    /// The updates that may be done where number `last` is done, that one included.
    fn up_to(&self, last: usize) -> Vec<(OpId, &'c Update)> {
        let (end, ..) = self.writes[last];
        let free = |&&(i, ..): &&(usize, OpId, &Update)| (i + 1..=end).all(|later| !self.before[later].contains(&i));
        self.writes[..=last].iter().filter(free).map(|&(_, op, u)| (op, u)).collect()
    }

    /// What keeps the write before number `last` from moving there.
    fn refusal(&self, f: &Function, last: usize) -> Option<NoMatch> {
        let (end, ..) = self.writes[last];
        let (i, write, _) = *self.writes[..last].last()?;
        let later = (i + 1..=end).find(|later| self.before[*later].contains(&i))?;
        let (write, reader) = (f.describe(write), f.describe(self.ops[later]));
        Some(match f.op(self.ops[later]).kind() == "read_state" {
            true => NoMatch::because(format!("{reader} looks at what {write} writes before all is written"))
                .remedy("attention takes the new entries from where they come from (kv-defer)"),
            false => NoMatch::because(format!("{write} and {reader} may write the same elements"))
                .remedy("the boxes are provably apart"),
        })
    }
}

/// Updates that become one.
struct Merge {
    writes: Vec<OpId>,
    updates: Vec<Update>,
    state: crate::ir::ValueId,
    /// The axis along which the boxes follow each other.
    axis: usize,
    /// Where the last box ends on the axis.
    end: i64,
    stride: i64,
    /// Bytes written and read to join the updates.
    bytes: u64,
}

impl Merge {
    /// What the merge is called in a report: the write that stays.
    fn name(&self, f: &Function) -> String {
        f.describe(self.writes[self.writes.len() - 1])
    }

    /// A merge of a run of members, sorted by position; `None` when their parameters cannot be joined.
    fn new(f: &Function, chain: &Chain, axis: usize, run: &[Member<'_>]) -> Option<Merge> {
        let (_, _, first, extent) = *run.first()?;
        let (_, _, last, len) = *run.last()?;
        let stride = if extent == 1 { run.get(1).map_or(1, |second| second.2 - first) } else { 1 };
        let updates: Vec<Update> = run.iter().map(|(_, u, ..)| (*u).clone()).collect();
        let mut writes: Vec<OpId> = run.iter().map(|(write, ..)| *write).collect();
        writes.sort_by(|&a, &b| f.comes_before(b, a).cmp(&f.comes_before(a, b)));
        let bytes = updates.iter().map(|u| 2 * crate::analysis::traffic::value_bytes(f, u.value)).sum();
        Some(Merge { writes, updates, state: chain.state, axis, end: last + len, stride, bytes })
    }

    fn form(&self) -> &'static str {
        if self.stride == 1 { "one box" } else { "one strided box" }
    }

    fn apply(&self, f: &mut Function) -> Result<(), PatchError> {
        let last = self.writes[self.writes.len() - 1];
        let mut t = Transaction::begin(f);
        let (patch, written) =
            self.patch(&t, last).ok_or_else(|| PatchError::Stale("a spelling of the joined box".into()))?;
        let written = t.insert(&patch, &written)?;
        t.set_param(last, "data", vec![Operand::Value(written)])?;
        for &write in &self.writes[..self.writes.len() - 1] {
            t.remove(write)?;
        }
        let dead: Vec<_> = self.updates.iter().flat_map(|u| t.op(u.op).results().to_vec()).collect();
        t.erase_dead(dead);
        t.commit()
    }

    /// The joined update before the last write.
    fn patch(&self, f: &Function, last: OpId) -> Option<(Patch, Ref)> {
        let (first, tail) = (self.updates.first()?, self.updates.last()?);
        let mut patch = Patch::before(last);
        let name = f.value(*f.op(tail.op).results().first()?).name().to_string();
        let joined = self.join(f, &mut patch, &name)?;
        let begin = operand(f, first.op, "begin")?;
        let end = self.end_operand(f, &mut patch, tail.op, &name)?;
        if f.operand_type(&begin).as_tensor()?.dtype != patch_dtype(f, &patch, &end)? {
            return None;
        }
        let rank = first.region.0.len();
        let mask =
            |op: OpId, name: &str| f.ints(op, name).map_or(vec![false; rank], |m| m.iter().map(|&b| b != 0).collect());
        let mut squeeze = mask(first.op, "squeeze_mask");
        squeeze[self.axis] = false;
        let mut stride = f.ints(first.op, "stride").unwrap_or(vec![1; rank]);
        stride[self.axis] = self.stride;
        let state = f.ty(self.state).as_state()?.clone();
        let read = patch.op("read_state", format!("{name}_rest"), [("input", self.state)], state.clone());
        let inputs = [
            ("x", Input::One(read)),
            ("update", Input::One(joined)),
            ("begin", Input::like(f, &begin)),
            ("end", end),
            ("begin_mask", Input::Const(Literal::bools(&mask(first.op, "begin_mask")))),
            ("end_mask", Input::Const(Literal::bools(&mask(tail.op, "end_mask")))),
            ("squeeze_mask", Input::Const(Literal::bools(&squeeze))),
            ("stride", Input::Const(Literal::ints(&stride))),
        ];
        let updated = patch.op("slice_update", name, inputs, state);
        Some((patch, updated))
    }

    /// The updates one behind the other.
    fn join(&self, f: &Function, patch: &mut Patch, name: &str) -> Option<Ref> {
        let first = self.updates.first()?;
        let ty = f.tensor(first.value)?;
        let axis = self.axis - first.squeezed.iter().filter(|&&s| s < self.axis).count();
        let stacks = first.squeezed.contains(&self.axis);
        let mut shape = ty.shape.to_vec();
        if stacks {
            shape.insert(axis, Dim::known(self.updates.len() as u64));
        } else {
            let sizes = self.updates.iter().map(|u| f.tensor(u.value)?.shape[axis].as_known());
            shape[axis] = Dim::known(sizes.sum::<Option<u64>>()?);
        }
        let values: Vec<Input> = self.updates.iter().map(|u| Input::One(u.value.into())).collect();
        let (name, to) = (format!("{name}_rows"), TensorType::new(ty.dtype, shape));
        if !stacks {
            return Some(patch.concat(name, values, axis, to));
        }
        let axis = Input::Const(Literal::int(axis as i64));
        Some(patch.op("stack", name, [("values", Input::Many(values)), ("axis", axis)], to))
    }

    /// The `end` of the last box, whose entry on the axis may mean nothing there because the axis is squeezed.
    fn end_operand(&self, f: &Function, patch: &mut Patch, op: OpId, name: &str) -> Option<Input> {
        let end = operand(f, op, "end")?;
        let values = crate::analysis::values::Values::compute(f);
        let stated = values.param(f, op, "end")?.get(self.axis)?.as_ref().and_then(Poly::as_constant);
        if stated == Some(self.end) {
            return Some(Input::like(f, &end));
        }
        if let Some(mut constant) = f.operand_ints(&end) {
            *constant.get_mut(self.axis)? = self.end;
            return Some(Input::Const(Literal::ints(&constant)));
        }
        let ty = f.operand_type(&end).as_tensor()?.clone();
        let mut offset = vec![0; self.updates.first()?.region.0.len()];
        *offset.get_mut(self.axis)? = self.end - stated?;
        if ty.dtype != crate::ir::DType::I32 {
            return None;
        }
        let inputs = [("x", Input::like(f, &end)), ("y", Input::Const(Literal::ints(&offset)))];
        Some(patch.op("add", format!("{name}_end"), inputs, ty).into())
    }
}

fn operand(f: &Function, op: OpId, name: &str) -> Option<Operand> {
    match f.op(op).param(name) {
        [one] => Some(one.clone()),
        _ => None,
    }
}

fn patch_dtype(f: &Function, patch: &Patch, input: &Input) -> Option<crate::ir::DType> {
    match input {
        Input::One(r) => patch.dtype(f, r),
        Input::Const(l) => Some(l.ty.as_tensor()?.dtype),
        Input::Many(_) => None,
    }
}
