//! Changed ops that hang together, and what goes in and out of them.

use std::collections::{BTreeSet, HashMap, HashSet};

use petgraph::unionfind::UnionFind;

use super::diff::{Diff, Half, is_float_weight, reads};
use crate::ir::{DType, Name, OpId, Operand, ValueId};
use crate::opset::effect_of;
use crate::rewrite::{HostWrite, InterfaceChange};

/// One rewritten neighbourhood, on both sides: first the side of the first function, then that of the second.
pub(super) struct Region {
    /// The ops that are compared.
    own: [HashSet<OpId>; 2],
    /// These and ops of the rest that are computed again, in the order of the function.
    pub(super) ops: [Vec<OpId>; 2],
    /// Values from outside, states not included.
    pub(super) inputs: BTreeSet<Name>,
    /// What the rest reads of it, or the caller.
    pub(super) outputs: [BTreeSet<Name>; 2],
    /// States by their names in either function.
    pub(super) states: BTreeSet<Name>,
}

impl Region {
    /// All regions of two functions, the interface of one of which `changes` make that of the other.
    pub(super) fn all(diff: &Diff<'_>, changes: &[InterfaceChange]) -> Vec<Region> {
        let mut plan = Plan::new(diff, changes);
        loop {
            match plan.regions() {
                Ok(regions) => return regions.into_iter().filter(|r| !r.is_idle()).collect(),
                Err((x, y)) => plan.join(x, y),
            }
        }
    }

    /// Whether nothing comes out of it.
    fn is_idle(&self) -> bool {
        self.outputs.iter().all(BTreeSet::is_empty) && self.states.is_empty()
    }

    /// Whether a change of the interface is about its states.
    pub(super) fn concerns(&self, change: &InterfaceChange) -> bool {
        names_of(change).iter().any(|name| self.states.contains(*name))
    }

    pub(super) fn describe_first(&self, diff: &Diff<'_>) -> Vec<String> {
        self.describe(&diff.a, 0)
    }

    pub(super) fn describe_second(&self, diff: &Diff<'_>) -> Vec<String> {
        self.describe(&diff.b, 1)
    }

    fn describe(&self, half: &Half<'_>, side: usize) -> Vec<String> {
        let own = self.ops[side].iter().filter(|op| self.own[side].contains(*op));
        own.map(|&op| half.f.describe(op)).collect()
    }
}

/// Ops that move elements and compute nothing.
const MOVES: &[&str] = &[
    "cast",
    "concat",
    "expand_dims",
    "flatten2d",
    "gather",
    "identity",
    "reshape",
    "reverse",
    "scatter",
    "scatter_along_axis",
    "scatter_nd",
    "select",
    "slice_by_index",
    "slice_by_size",
    "slice_update",
    "split",
    "squeeze",
    "stack",
    "tile",
    "transpose",
];

/// Values that are looked at to find where elements come from.
const MAX_MOVES: usize = 64;

/// The states that a change is about, by all their names.
fn names_of(change: &InterfaceChange) -> Vec<&Name> {
    match change {
        InterfaceChange::Joined { states, into } => states.iter().chain([into]).collect(),
        InterfaceChange::ReadOnly(HostWrite { cache, .. }) | InterfaceChange::Input { cache, .. } => vec![cache],
    }
}

/// An op of one side.
type Node = (usize, OpId);

/// Which ops are in regions, and which of them in the same.
struct Plan<'d, 'f> {
    halves: [&'d Half<'f>; 2],
    changes: &'d [InterfaceChange],
    /// A number for every op.
    numbers: HashMap<Node, usize>,
    groups: UnionFind<usize>,
    members: HashSet<Node>,
    /// Values that follow from integers and small constants alone.
    from_integers: [HashSet<ValueId>; 2],
}

impl<'d, 'f> Plan<'d, 'f> {
    fn new(diff: &'d Diff<'f>, changes: &'d [InterfaceChange]) -> Self {
        let halves = diff.halves();
        let nodes: Vec<Node> = (0..2).flat_map(|side| halves[side].ops.iter().map(move |&op| (side, op))).collect();
        let numbers: HashMap<Node, usize> = nodes.iter().enumerate().map(|(i, &n)| (n, i)).collect();
        let groups = UnionFind::new(nodes.len());
        let members = nodes.iter().copied().filter(|&(side, op)| !halves[side].is_paired(op)).collect();
        let from_integers = halves.map(from_integers);
        let mut plan = Plan { halves, changes, numbers, groups, members, from_integers };
        plan.take_in_states(&nodes);
        plan.link();
        plan
    }

    fn join(&mut self, x: Node, y: Node) {
        self.groups.union(self.numbers[&x], self.numbers[&y]);
    }

    /// The states that an op touches, and caches that the caller keeps: those that it reads, and those that it gives
    /// new content for. Each goes by one name for all that were joined.
    fn classes(&self, (side, op): Node) -> Vec<Name> {
        let half = self.halves[side];
        let kept = |name: &Name| side == 1 && self.changes.iter().any(|c| names_of(c).contains(&name));
        let touched = reads(half.f, op).into_iter().filter_map(|v| {
            let name = half.f.value(v).name();
            (half.f.ty(v).as_state().is_some() || half.f.inputs().contains(&v) && kept(name)).then_some(name)
        });
        let given = half.f.op(op).results().iter().filter(|_| side == 1).filter_map(|&v| {
            self.changes.iter().find_map(|change| match change {
                InterfaceChange::ReadOnly(write) if write.output == *half.f.value(v).name() => Some(&write.cache),
                _ => None,
            })
        });
        touched.chain(given).map(|name| self.class(name)).collect()
    }

    fn class(&self, name: &Name) -> Name {
        let joined = self.changes.iter().find_map(|change| match change {
            InterfaceChange::Joined { states, into } if states.contains(name) => Some(into),
            _ => None,
        });
        // What was joined may be joined again under another name.
        joined.filter(|into| *into != name).map_or_else(|| name.clone(), |into| self.class(into))
    }

    /// Where a changed op touches a state, all ops on it belong together: their order counts.
    fn take_in_states(&mut self, nodes: &[Node]) {
        let touching: Vec<(Node, Vec<Name>)> = nodes.iter().map(|&n| (n, self.classes(n))).collect();
        let mut of_class: HashMap<&Name, Vec<Node>> = HashMap::new();
        for (node, classes) in &touching {
            classes.iter().for_each(|c| of_class.entry(c).or_default().push(*node));
        }
        let mut open: Vec<Node> = self.members.iter().copied().collect();
        let at: HashMap<Node, &Vec<Name>> = touching.iter().map(|(n, c)| (*n, c)).collect();
        let mut done: HashSet<&Name> = HashSet::new();
        while let Some(node) = open.pop() {
            for class in at[&node].iter().filter(|c| done.insert(*c)) {
                for &other in &of_class[class] {
                    if self.members.insert(other) {
                        open.push(other);
                    }
                    self.join(node, other);
                }
            }
        }
    }

    /// Puts producers and readers, and what both sides call alike, into one group.
    fn link(&mut self) {
        let mut producers: HashMap<&Name, Node> = HashMap::new();
        let all = (0..2).flat_map(|side| self.halves[side].ops.iter().map(move |&op| (side, op)));
        let members: Vec<Node> = all.filter(|n| self.members.contains(n)).collect();
        for node in members {
            let (half, op) = (self.halves[node.0], node.1);
            for &v in half.f.op(op).results() {
                let first = *producers.entry(half.f.value(v).name()).or_insert(node);
                self.join(first, node);
            }
            for v in reads(half.f, op) {
                let producer = half.f.producer(v).map(|p| (node.0, p));
                if let Some(p) = producer.filter(|p| self.members.contains(p)) {
                    self.join(p, node);
                }
            }
        }
    }

    /// # Errors
    /// Two ops that belong into one region.
    fn regions(&self) -> Result<Vec<Region>, (Node, Node)> {
        let mut order: Vec<usize> = Vec::new();
        let mut groups: HashMap<usize, [HashSet<OpId>; 2]> = HashMap::new();
        for (side, half) in self.halves.iter().enumerate() {
            for &op in half.ops.iter().filter(|&&op| self.members.contains(&(side, op))) {
                let root = self.groups.find(self.numbers[&(side, op)]);
                let own = groups.entry(root).or_insert_with(|| {
                    order.push(root);
                    Default::default()
                });
                own[side].insert(op);
            }
        }
        order.into_iter().filter_map(|root| groups.remove(&root)).map(|own| self.region(own)).collect()
    }

    fn region(&self, own: [HashSet<OpId>; 2]) -> Result<Region, (Node, Node)> {
        let mut ops = own.clone();
        let mut inputs = [self.inputs(&ops, 0), self.inputs(&ops, 1)];
        while let Some((side, more)) = (0..2).find_map(|side| Some((side, self.wanted(&ops, &inputs, side)?))) {
            if let Some(&x) = own.iter().flatten().next()
                && let Some(&stranger) = more.iter().find(|&&op| self.members.contains(&(side, op)))
            {
                let x = (usize::from(!own[0].contains(&x)), x);
                return Err((x, (side, stranger)));
            }
            ops[side].extend(more);
            inputs[side] = self.inputs(&ops, side);
        }
        let states = (0..2).flat_map(|side| ops[side].iter().flat_map(move |&op| self.halves[side].states(op)));
        let mut states: BTreeSet<Name> = states.cloned().collect();
        let mut outputs = self.outputs(&own);
        let mut inputs: BTreeSet<Name> = inputs.into_iter().flatten().collect();
        let kept = |change: &&InterfaceChange| self.is_about(change, &states);
        for change in self.changes.iter().filter(kept).collect::<Vec<_>>() {
            states.extend(names_of(change).into_iter().cloned());
            let InterfaceChange::ReadOnly(write) = change else { continue };
            outputs[1].insert(write.output.clone());
            let made = self.halves[1].value(&write.output).and_then(|v| self.halves[1].f.producer(v));
            if !made.is_some_and(|op| ops[1].contains(&op)) {
                inputs.insert(write.output.clone());
            }
        }
        inputs.retain(|name| !states.contains(name));
        let ordered = |side: usize| self.halves[side].ops.iter().copied().filter(|op| ops[side].contains(op)).collect();
        Ok(Region { ops: [ordered(0), ordered(1)], own, inputs, outputs, states })
    }

    fn is_about(&self, change: &InterfaceChange, states: &BTreeSet<Name>) -> bool {
        let classes: Vec<Name> = states.iter().map(|s| self.class(s)).collect();
        names_of(change).into_iter().any(|name| classes.contains(&self.class(name)))
    }

    /// Names of values that ops of a side read from outside, constants and states not included.
    fn inputs(&self, ops: &[HashSet<OpId>; 2], side: usize) -> BTreeSet<Name> {
        let f = self.halves[side].f;
        let outside = |v: &ValueId| match f.producer(*v) {
            Some(op) => !ops[side].contains(&op) && *f.op(op).kind() != "const",
            None => f.ty(*v).as_state().is_none(),
        };
        let read = ops[side].iter().flat_map(|&op| reads(f, op));
        read.filter(outside).map(|v| f.value(v).name().clone()).collect()
    }

    /// Ops outside that have to be computed again on a side: those of values that only this side reads, that are made
    /// inside on the other, of unknown size, or that follow from integers or from what else is read.
    fn wanted(&self, ops: &[HashSet<OpId>; 2], inputs: &[BTreeSet<Name>; 2], side: usize) -> Option<Vec<OpId>> {
        let (half, other) = (self.halves[side], self.halves[1 - side]);
        let want = |name: &Name| {
            let v = half.value(name)?;
            let op = half.f.producer(v).filter(|&op| self.can_repeat(side, op))?;
            let ty = half.f.tensor(v)?;
            let theirs = other.value(name).and_then(|v| other.f.producer(v));
            let made = theirs.is_some_and(|op| ops[1 - side].contains(&op));
            let wanted = !inputs[1 - side].contains(name)
                || made
                || ty.dtype.is_int()
                || ty.dtype == DType::Bool
                || ty.known_shape().is_none()
                || self.from_integers[side].contains(&v)
                || self.is_moved_from(v, ops, inputs, side);
            wanted.then_some(op)
        };
        let found: Vec<OpId> = inputs[side].iter().filter_map(want).collect();
        (!found.is_empty()).then_some(found)
    }

    /// Whether a value holds elements of another input, or of a value made inside, that ops between have only moved.
    fn is_moved_from(&self, v: ValueId, ops: &[HashSet<OpId>; 2], inputs: &[BTreeSet<Name>; 2], side: usize) -> bool {
        let f = self.halves[side].f;
        let mut open = vec![v];
        let mut seen = HashSet::new();
        while let Some(at) = open.pop().filter(|_| seen.len() < MAX_MOVES) {
            if !seen.insert(at) {
                continue;
            }
            let op = f.producer(at);
            let made = op.is_some_and(|op| ops[side].contains(&op));
            if at != v && (made || inputs.iter().any(|i| i.contains(f.value(at).name()))) {
                return true;
            }
            let Some(op) = op else { continue };
            if MOVES.contains(&f.op(op).kind().as_str()) {
                open.extend(f.op(op).operands().iter().filter_map(Operand::as_value));
            }
        }
        false
    }

    /// Whether computing an op once more changes nothing.
    fn can_repeat(&self, side: usize, op: OpId) -> bool {
        let f = self.halves[side].f;
        effect_of(f, op).is_pure() && !f.op(op).kind().starts_with("constexpr_")
    }

    /// What own ops of both sides give to other ops, or the caller.
    fn outputs(&self, own: &[HashSet<OpId>; 2]) -> [BTreeSet<Name>; 2] {
        let made = |side: usize| -> HashMap<Name, bool> {
            let f = self.halves[side].f;
            let results = own[side].iter().flat_map(|&op| f.op(op).results());
            let is_read = |v: ValueId| {
                let outside = |&op: &OpId| f.ancestor_in(op, f.body()).is_none_or(|op| !own[side].contains(&op));
                f.outputs().contains(&v) || f.users(v).iter().any(outside)
            };
            results.map(|&v| (f.value(v).name().clone(), is_read(v))).collect()
        };
        let (ours, theirs) = (made(0), made(1));
        let read = |name: &&Name| ours.get(*name) == Some(&true) || theirs.get(*name) == Some(&true);
        let common: BTreeSet<Name> = ours.keys().filter(|n| theirs.contains_key(*n)).filter(read).cloned().collect();
        [common.clone(), common]
    }
}

/// Values that follow from integers, bools and constants in the program alone, by ops that both functions have.
fn from_integers(half: &Half<'_>) -> HashSet<ValueId> {
    let f = half.f;
    let is_discrete =
        |v: ValueId| f.tensor(v).is_some_and(|t| t.dtype.is_int() || matches!(t.dtype, DType::Bool | DType::String));
    let mut known: HashSet<ValueId> = f.inputs().iter().copied().filter(|&v| is_discrete(v)).collect();
    for &op in half.ops.iter().filter(|op| half.is_paired(**op)) {
        let follows = |v: &ValueId| match f.const_value(*v) {
            Some(literal) => !is_float_weight(literal),
            None => known.contains(v),
        };
        let is_shape = *f.op(op).kind() == "shape";
        if effect_of(f, op).is_pure() && (is_shape || reads(f, op).iter().all(follows)) {
            known.extend(f.op(op).results());
        }
    }
    known
}
