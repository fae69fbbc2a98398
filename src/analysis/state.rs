//! What states hold: memory SSA over `read_state` and `write_state`.
//!
//! The reads and writes of one state form a chain in list order. Each write makes a new *version* of the content, version 0
//! being what the state holds when the function starts; a read is a snapshot of the version before it. A write whose data is
//! `slice_update(x = read of the version before, …)` changes one *region* of the content and keeps the rest; what reads look
//! at is followed through slices to a region as well. Positions that only running the program tells are polynomials over
//! the elements of inputs, so that the boxes of two layers, or of `[p, p+1)` and `[p+1, p+2)`, are provably apart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use petgraph::graph::{DiGraph, NodeIndex};

use crate::ir::{Dim, Function, OpId, Use, ValueId};
use crate::opset::{effect_of, views};

use super::values::{Poly, Values};

/// What is taken of one axis: `extent` indices from `begin` on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// First index.
    pub begin: Poly,
    /// Number of indices.
    pub extent: Poly,
    /// Step between indices.
    pub stride: i64,
    /// Whether this is provably all of the axis.
    pub whole: bool,
}

impl Span {
    /// All of an axis.
    fn all(size: &Dim) -> Option<Span> {
        Some(Span { begin: Poly::constant(0), extent: Poly::of_dim(size)?, stride: 1, whole: true })
    }

    /// The index behind the last one, for stride one.
    pub fn end(&self) -> Option<Poly> {
        self.begin.add(&self.extent)
    }

    /// The index behind the last one, whatever the stride.
    fn behind(&self) -> Option<Poly> {
        let steps = self.extent.sub(&Poly::constant(1))?.mul(&Poly::constant(self.stride))?;
        self.begin.add(&steps)?.add(&Poly::constant(1))
    }

    /// Whether no index is in both, provably.
    fn is_apart(&self, other: &Span, f: &Function) -> bool {
        let before = |a: &Span, b: &Span| a.behind().is_some_and(|end| b.begin.is_at_least(&end, f));
        if self.stride < 0 || other.stride < 0 {
            return false;
        }
        let offset = self.begin.sub(&other.begin).and_then(|d| d.as_constant());
        let interleaved = self.stride == other.stride && offset.is_some_and(|d| d % self.stride != 0);
        before(self, other) || before(other, self) || interleaved
    }

    /// Whether every index of the other is in this one, provably.
    pub fn covers(&self, other: &Span, f: &Function) -> bool {
        if self.whole || self == other {
            return true;
        }
        let ends = |a: &Span| a.end();
        let inside = |a: &Span, b: &Span| Some(ends(a)?.is_at_least(&ends(b)?, f));
        self.stride == 1
            && other.stride == 1
            // Positions count from the front, so that none is before the first row.
            && (self.begin.as_constant() == Some(0) || other.begin.is_at_least(&self.begin, f))
            && inside(self, other) == Some(true)
    }
}

/// A box of a state, a span per axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Region(pub Vec<Span>);

impl Region {
    /// All of a tensor; `None` when it is too large to count.
    pub fn all(shape: &[Dim]) -> Option<Region> {
        shape.iter().map(Span::all).collect::<Option<_>>().map(Region)
    }

    /// Whether no element is in both, provably.
    pub fn is_apart(&self, other: &Region, f: &Function) -> bool {
        self.0.iter().zip(&other.0).any(|(a, b)| a.is_apart(b, f))
    }

    /// Whether every element of the other is in this one, provably.
    pub fn covers(&self, other: &Region, f: &Function) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| a.covers(b, f))
    }

    /// Whether both are the same box, provably.
    pub fn is(&self, other: &Region, f: &Function) -> bool {
        self.covers(other, f) && other.covers(self, f)
    }
}

/// A change of one box of a state.
#[derive(Clone, PartialEq, Debug)]
pub struct Update {
    /// The `slice_update`.
    pub op: OpId,
    /// The `read_state` that it takes the rest from.
    pub read: OpId,
    /// What is put into the box, without the axes that are squeezed.
    pub value: ValueId,
    /// The box.
    pub region: Region,
    /// Axes of the state that `value` does not have.
    pub squeezed: Vec<usize>,
}

impl Update {
    /// The axis of `value` that an axis of the state is; `None` for one that is squeezed.
    pub fn axis_of_value(&self, state_axis: usize) -> Option<usize> {
        let dropped = self.squeezed.iter().filter(|&&s| s < state_axis).count();
        (!self.squeezed.contains(&state_axis)).then_some(state_axis - dropped)
    }
}

/// One op of a chain.
#[derive(Clone, PartialEq, Debug)]
pub enum Access {
    /// A `read_state` and the snapshot it makes.
    Read {
        /// The op.
        op: OpId,
        /// The snapshot.
        value: ValueId,
        /// The version it is of.
        version: usize,
    },
    /// A `write_state`; it makes the next version.
    Write {
        /// The op.
        op: OpId,
        /// The new content.
        data: ValueId,
        /// The version it makes.
        version: usize,
        /// The box it changes, where it keeps the rest of the version before.
        update: Option<Update>,
    },
}

impl Access {
    /// The op.
    pub fn op(&self) -> OpId {
        match self {
            Access::Read { op, .. } | Access::Write { op, .. } => *op,
        }
    }

    /// The update, for a write that is one.
    pub fn update(&self) -> Option<&Update> {
        match self {
            Access::Write { update, .. } => update.as_ref(),
            Access::Read { .. } => None,
        }
    }
}

/// The reads and writes of one state, in order.
#[derive(Clone, PartialEq, Debug)]
pub struct Chain {
    /// The state, an input of the function.
    pub state: ValueId,
    /// Its reads and writes in the body of the function.
    pub accesses: Vec<Access>,
    /// An op that uses the state from within a nested block, or in a way that is not known.
    pub elsewhere: Option<OpId>,
    /// An op of the function of which nothing is known, and which may use any state.
    pub unknown: Option<OpId>,
}

impl Chain {
    /// An op that uses the state out of sight, or may do so.
    pub fn out_of_sight(&self) -> Option<OpId> {
        self.elsewhere.or(self.unknown)
    }

    /// The reads.
    pub fn reads(&self) -> impl Iterator<Item = (OpId, ValueId, usize)> {
        self.accesses.iter().filter_map(|a| match a {
            Access::Read { op, value, version } => Some((*op, *value, *version)),
            Access::Write { .. } => None,
        })
    }

    /// The writes, in order; that of version n is number n − 1.
    pub fn writes(&self) -> impl Iterator<Item = (OpId, ValueId, Option<&Update>)> {
        self.accesses.iter().filter_map(|a| match a {
            Access::Write { op, data, update, .. } => Some((*op, *data, update.as_ref())),
            Access::Read { .. } => None,
        })
    }

    /// Whether an op is an update of this chain that keeps the rest of a snapshot.
    pub fn takes_rest(&self, f: &Function, op: OpId, snapshot: ValueId) -> bool {
        let updates = self.writes().any(|(_, _, u)| u.is_some_and(|u| u.op == op));
        updates && f.op(op).value("x") == Some(snapshot) && f.op(op).value("update") != Some(snapshot)
    }

    /// The read whose snapshot a value is.
    pub fn read_of(&self, v: ValueId) -> Option<(OpId, usize)> {
        self.reads().find(|&(_, value, _)| value == v).map(|(op, _, version)| (op, version))
    }
}

/// A part of a state that something looks at: the last value on the way from a read whose axes are axes of the state.
#[derive(Clone, PartialEq, Debug)]
pub struct Look {
    /// The value.
    pub value: ValueId,
    /// What it holds of the state.
    pub region: Region,
    /// The axis of the state that each of its axes is; `None` for one of extent one that was added.
    pub axes: Vec<Option<usize>>,
    /// Whether something reads it other than slices and views of it.
    pub ends: bool,
}

/// The chains of a function.
#[derive(Clone, Debug)]
pub struct States {
    chains: Vec<Chain>,
    values: Values,
}

impl States {
    /// Analyses a function.
    pub fn of(f: &Function) -> States {
        let values = Values::compute(f);
        let states = f.inputs().iter().copied().filter(|&v| f.ty(v).as_state().is_some());
        let chains = states.map(|state| chain(f, &values, state)).collect();
        States { chains, values }
    }

    /// A chain per state, in the order of the inputs.
    pub fn chains(&self) -> &[Chain] {
        &self.chains
    }

    /// The small integers of the function.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// The chain that an op belongs to.
    pub fn chain_of(&self, op: OpId) -> Option<&Chain> {
        self.chains.iter().find(|c| c.accesses.iter().any(|a| a.op() == op))
    }

    /// The value itself as a part of the state it is read from; `None` when its producer is no read, or no slice or view
    /// whose axes are axes of the state.
    pub fn look(&self, f: &Function, v: ValueId) -> Option<(&Chain, usize, Look)> {
        let op = f.producer(v)?;
        if let Some(chain) = self.chain_of(op) {
            let (_, version) = chain.read_of(v)?;
            let shape = &f.tensor(v)?.shape;
            let axes = (0..shape.len()).map(Some).collect();
            return Some((chain, version, Look { value: v, region: Region::all(shape)?, axes, ends: false }));
        }
        let (chain, version, from) = self.look(f, f.op(op).value("x")?)?;
        Some((chain, version, step(f, &self.values, op, v, from)?))
    }

    /// A snapshot and every part of it that slices and views make, from the snapshot on. A `slice_update` of the chain that
    /// takes the rest from the snapshot is no reader.
    pub fn parts(&self, f: &Function, chain: &Chain, read: ValueId) -> Vec<Look> {
        let mut out: Vec<Look> = self.look(f, read).into_iter().map(|(_, _, look)| look).collect();
        let mut at = 0;
        while at < out.len() {
            let look = out[at].clone();
            for u in f.value(look.value).uses() {
                if look.value == read && u.op().is_some_and(|op| chain.takes_rest(f, op, read)) {
                    continue;
                }
                let further = u.op().and_then(|op| {
                    let &[result] = f.op(op).results() else { return None };
                    (f.op(op).value("x") == Some(look.value))
                        .then(|| step(f, &self.values, op, result, look.clone()))?
                });
                match further {
                    Some(further) => out.push(further),
                    None => out[at].ends = true,
                }
            }
            at += 1;
        }
        out
    }

    /// What the readers of a snapshot look at: the parts that end in something else.
    pub fn looks(&self, f: &Function, chain: &Chain, read: ValueId) -> Vec<Look> {
        self.parts(f, chain, read).into_iter().filter(|look| look.ends).collect()
    }

    /// The reads and writes of a chain that must keep their order: an edge from the earlier to the later of each two that
    /// may touch the same element, of which one writes. The read that a `slice_update` takes the rest from does not count.
    pub fn hazards(&self, f: &Function, chain: &Chain) -> DiGraph<OpId, ()> {
        let mut graph = DiGraph::new();
        let nodes: BTreeMap<OpId, NodeIndex> =
            chain.accesses.iter().map(|a| (a.op(), graph.add_node(a.op()))).collect();
        let touched: Vec<(OpId, bool, Option<Vec<Region>>)> =
            chain.accesses.iter().map(|a| self.touches(f, chain, a)).collect();
        for (i, (first, writes, regions)) in touched.iter().enumerate() {
            for (second, also_writes, others) in &touched[i + 1..] {
                let apart = match (regions, others) {
                    (Some(a), Some(b)) => a.iter().all(|a| b.iter().all(|b| a.is_apart(b, f))),
                    _ => false,
                };
                if (*writes || *also_writes) && !apart {
                    graph.add_edge(nodes[first], nodes[second], ());
                }
            }
        }
        graph
    }

    /// The op, whether it writes, and what it touches of the state; `None` for all of it.
    fn touches(&self, f: &Function, chain: &Chain, access: &Access) -> (OpId, bool, Option<Vec<Region>>) {
        match access {
            Access::Write { op, update, .. } => (*op, true, update.as_ref().map(|u| vec![u.region.clone()])),
            Access::Read { op, value, .. } => {
                (*op, false, Some(self.looks(f, chain, *value).into_iter().map(|l| l.region).collect()))
            }
        }
    }
}

fn chain(f: &Function, values: &Values, state: ValueId) -> Chain {
    let mut chain = Chain { state, accesses: vec![], elsewhere: None, unknown: None };
    let mut version = 0;
    let mut reads: BTreeMap<ValueId, (OpId, usize)> = BTreeMap::new();
    for op in f.ops(f.body()) {
        if views::ReadState::of(f, op).is_some_and(|r| r.state == state) {
            let Some(&value) = f.op(op).results().first() else { continue };
            reads.insert(value, (op, version));
            chain.accesses.push(Access::Read { op, value, version });
        } else if let Some(write) = views::WriteState::of(f, op).filter(|w| w.state == state) {
            let update = update(f, values, &reads, version, write.data);
            version += 1;
            chain.accesses.push(Access::Write { op, data: write.data, version, update });
        } else if uses_state(f, op, state) {
            chain.elsewhere.get_or_insert(op);
        } else if effect_of(f, op).is_unknown() {
            chain.unknown.get_or_insert(op);
        }
    }
    chain
}

/// Whether an op, or one in its blocks, uses a state.
fn uses_state(f: &Function, op: OpId, state: ValueId) -> bool {
    f.value(state).uses().iter().any(|u| {
        let user = match *u {
            Use::Op { op, .. } => Some(op),
            Use::Output { block, .. } => f.block(block).parent(),
        };
        user.and_then(|user| f.ancestor_in(user, f.body())) == Some(op)
    })
}

fn update(
    f: &Function,
    values: &Values,
    reads: &BTreeMap<ValueId, (OpId, usize)>,
    version: usize,
    data: ValueId,
) -> Option<Update> {
    let op = f.producer(data).filter(|&op| f.op(op).kind() == "slice_update" && f.op(op).block() == f.body())?;
    let slice = views::Slice::of(f, op)?;
    let (read, of) = *reads.get(&slice.x)?;
    if of != version {
        return None;
    }
    let value = slice.update?;
    let region = region(f, values, op, &Region::all(&f.tensor(slice.x)?.shape)?, &f.tensor(value)?.shape)?;
    let squeezed = (0..slice.axes.len()).filter(|&i| slice.axes[i].squeeze).collect();
    Some(Update { op, read, value, region, squeezed })
}

/// What a slice op takes of a region that its `x` holds; `taken` is the shape of what it takes, without squeezed axes.
fn region(f: &Function, values: &Values, op: OpId, of: &Region, taken: &[Dim]) -> Option<Region> {
    let slice = views::Slice::of(f, op)?;
    let x = f.tensor(slice.x)?;
    let begins = values.param(f, op, "begin");
    let masked = f.ints(op, "begin_mask");
    let mut sizes = taken.iter();
    let mut spans = Vec::new();
    for (i, (axis, outer)) in slice.axes.iter().zip(&of.0).enumerate() {
        let extent = if axis.squeeze { Poly::constant(1) } else { Poly::of_dim(sizes.next()?)? };
        let open = masked.as_ref().and_then(|m| m.get(i)) == Some(&1) && axis.stride > 0 && !axis.squeeze;
        let begin = match axis.begin {
            Some(begin) => Poly::constant(i64::try_from(begin).ok()?),
            None if open => Poly::constant(0),
            None => begins.as_ref()?.get(i)?.clone()?,
        };
        let whole = axis.stride == 1 && begin.as_constant() == Some(0) && extent == Poly::of_dim(&x.shape[i])?;
        spans.push(within(outer, begin, extent, axis.stride, whole)?);
    }
    Some(Region(spans))
}

/// The span of a span.
fn within(outer: &Span, begin: Poly, extent: Poly, stride: i64, whole: bool) -> Option<Span> {
    if whole {
        return Some(outer.clone());
    }
    let begin = outer.begin.add(&begin.mul(&Poly::constant(outer.stride))?)?;
    Some(Span { begin, extent, stride: outer.stride.checked_mul(stride)?, whole: false })
}

/// What an op's result holds, when its `x` is a part of a state and the axes stay axes of the state.
fn step(f: &Function, values: &Values, op: OpId, result: ValueId, from: Look) -> Option<Look> {
    let inner = Region(
        from.axes.iter().map(|a| a.map_or_else(unit, |a| Some(from.region.0[a].clone()))).collect::<Option<_>>()?,
    );
    let keep = |axes: Vec<Option<usize>>, region: Region| Some(Look { value: result, region, axes, ends: false });
    match &**f.op(op).kind() {
        "identity" | "cast" => keep(from.axes, from.region),
        "slice_by_index" => {
            let slice = views::Slice::of(f, op)?;
            let taken = region(f, values, op, &inner, &f.tensor(result)?.shape)?;
            let mut whole = from.region;
            for (axis, span) in from.axes.iter().zip(taken.0) {
                axis.map(|a| whole.0[a] = span);
            }
            let axes = from.axes.iter().zip(&slice.axes).filter(|(_, s)| !s.squeeze).map(|(a, _)| *a).collect();
            keep(axes, whole)
        }
        "slice_by_size" => {
            let begins = values.param(f, op, "begin")?;
            let (x, out) = (f.tensor(f.op(op).value("x")?)?, f.tensor(result)?);
            let mut whole = from.region;
            for (i, axis) in from.axes.iter().enumerate() {
                let Some(a) = *axis else { continue };
                let begin = begins.get(i)?.clone()?;
                let all = begin.as_constant() == Some(0) && x.shape[i] == out.shape[i];
                whole.0[a] = within(&inner.0[i], begin, Poly::of_dim(&out.shape[i])?, 1, all)?;
            }
            keep(from.axes, whole)
        }
        "transpose" => {
            let perm = views::Transpose::of(f, op)?.perm;
            keep(perm.iter().map(|&p| from.axes.get(p).copied()).collect::<Option<_>>()?, from.region)
        }
        "squeeze" => {
            let dropped = views::Squeeze::of(f, op)?.axes;
            let kept = from.axes.iter().enumerate().filter(|(i, _)| !dropped.contains(i));
            keep(kept.map(|(_, a)| *a).collect(), from.region)
        }
        "expand_dims" => {
            let added = views::ExpandDims::of(f, op)?.axes;
            let mut left = from.axes.into_iter();
            let rank = f.tensor(result)?.rank();
            let axes = (0..rank).map(|i| if added.contains(&i) { Some(None) } else { left.next() });
            keep(axes.collect::<Option<_>>()?, from.region)
        }
        _ => None,
    }
}

fn unit() -> Option<Span> {
    Span::all(&Dim::known(1))
}

/// A cache that the caller hands in and gets back updated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FunctionalCache {
    /// The cache before.
    pub input: ValueId,
    /// The cache afterwards.
    pub output: ValueId,
    /// How the one becomes the other.
    pub kind: FunctionalKind,
}

/// How a cache that is an input becomes the output.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum FunctionalKind {
    /// By `slice_update`.
    Sliced,
    /// By a scatter.
    Scattered,
    /// By `select`, or by a sum of both under masks.
    Blended,
    /// New entries are appended: the output is longer.
    Appended,
    /// New entries are appended and as many dropped.
    Shifted,
}

impl fmt::Display for FunctionalKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FunctionalKind::Sliced => "slice_update",
            FunctionalKind::Scattered => "scatter",
            FunctionalKind::Blended => "blend",
            FunctionalKind::Appended => "concat",
            FunctionalKind::Shifted => "concat and slice",
        })
    }
}

/// The caches of a function that are inputs and outputs instead of states, in the order of the outputs.
pub fn functional(f: &Function) -> Vec<FunctionalCache> {
    f.outputs().iter().filter_map(|&output| passed_through(f, output)).collect()
}

/// The input that an output is an update of: everything on the way is an update or a view.
fn passed_through(f: &Function, output: ValueId) -> Option<FunctionalCache> {
    let mut seen = BTreeSet::from([output]);
    let mut work: Vec<(ValueId, Option<FunctionalKind>, bool)> = vec![(output, None, false)];
    while let Some((v, kind, cut)) = work.pop() {
        let Some(op) = f.producer(v) else {
            let kind = match kind {
                Some(FunctionalKind::Appended) if cut => Some(FunctionalKind::Shifted),
                kind => kind,
            };
            if let Some(kind) = kind.filter(|&kind| are_one_cache(f, v, output, kind)) {
                return Some(FunctionalCache { input: v, output, kind });
            }
            continue;
        };
        let (of, also) = updated(f, op);
        let (kind, cut) = (kind.or(also), cut || f.op(op).kind().starts_with("slice_by"));
        work.extend(of.into_iter().rev().filter(|v| seen.insert(*v)).map(|v| (v, kind, cut)));
    }
    None
}

/// What an op may be an update or a view of, and which update that is.
fn updated(f: &Function, op: OpId) -> (Vec<ValueId>, Option<FunctionalKind>) {
    let data = f.op(op);
    let all = |names: &[&str]| names.iter().filter_map(|n| data.value(n)).collect::<Vec<_>>();
    match &**data.kind() {
        "slice_update" => (all(&["x"]), Some(FunctionalKind::Sliced)),
        "scatter" | "scatter_nd" | "scatter_along_axis" => (all(&["data"]), Some(FunctionalKind::Scattered)),
        "select" => (all(&["b", "a"]), Some(FunctionalKind::Blended)),
        "add" => (masked(f, op), Some(FunctionalKind::Blended)),
        "concat" => {
            (data.param("values").iter().filter_map(|o| o.as_value()).collect(), Some(FunctionalKind::Appended))
        }
        "identity" | "cast" | "reshape" | "expand_dims" | "squeeze" | "transpose" | "slice_by_index"
        | "slice_by_size" | "split" => (all(&["x"]), None),
        _ => (vec![], None),
    }
}

/// What a sum keeps under the inverse of a mask that is no constant.
fn masked(f: &Function, op: OpId) -> Vec<ValueId> {
    let products = ["x", "y"].iter().filter_map(|n| f.producer(f.op(op).value(n)?));
    let products = products.filter(|&p| f.op(p).kind() == "mul");
    let sides = products.filter_map(|p| Some((f.op(p).value("x")?, f.op(p).value("y")?)));
    let ways = sides.flat_map(|(a, b)| [(a, b), (b, a)]);
    ways.filter(|&(_, mask)| is_inverse(f, mask)).map(|(kept, _)| kept).collect()
}

/// Whether a mask is made by turning another over, whatever views and casts follow.
fn is_inverse(f: &Function, mask: ValueId) -> bool {
    let made = std::iter::successors(f.producer(mask), |&op| match updated(f, op) {
        (of, None) => f.producer(*of.first()?),
        _ => None,
    });
    let turned = |op: OpId| match &**f.op(op).kind() {
        "sub" => f.op(op).value("y").is_some() && f.const_param(op, "x").is_some(),
        kind => matches!(kind, "logical_not" | "not_equal"),
    };
    made.into_iter().any(turned)
}

/// Whether an input and an output are of one type, but for the length where entries are appended.
fn are_one_cache(f: &Function, input: ValueId, output: ValueId, kind: FunctionalKind) -> bool {
    match (f.tensor(input), f.tensor(output), kind) {
        (Some(a), Some(b), FunctionalKind::Appended) => {
            let differ = a.shape.iter().zip(&b.shape).filter(|(a, b)| a != b).count();
            (a.dtype, a.rank(), 1) == (b.dtype, b.rank(), differ)
        }
        (Some(a), Some(b), _) => a == b,
        _ => false,
    }
}

/// A rule for ops on states that is broken. Core ML's compiler is known to refuse or to mistreat such graphs in places, though
/// many run.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Breach {
    /// The rule.
    pub rule: EmissionRule,
    /// The write.
    pub op: OpId,
}

/// How ops on states are to be laid out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum EmissionRule {
    /// A `slice_update` that is written takes the rest from a read of that state, with nothing else on the state, and no op
    /// that is not known, between the two and the write.
    OwnRead,
    /// That read has no other reader.
    SoleReader,
    /// What is written has no other reader.
    WrittenOnce,
    /// What a function returns is not written, and nothing that is written is computed from it.
    NotReturned,
}

impl Breach {
    /// The rule and the op, for people.
    pub fn describe(&self, f: &Function) -> String {
        let op = f.describe(self.op);
        match self.rule {
            EmissionRule::OwnRead => {
                format!("{op}: its slice_update does not take the rest from a read just before it")
            }
            EmissionRule::SoleReader => {
                format!("{op}: the read that its slice_update takes the rest from has other readers")
            }
            EmissionRule::WrittenOnce => format!("{op}: something else reads what it writes"),
            EmissionRule::NotReturned => {
                format!("{op}: what it writes, or something it is computed from, is an output")
            }
        }
    }
}

/// The rules that a function breaks.
pub fn breaches(f: &Function) -> Vec<Breach> {
    let states = States::of(f);
    let mut found = Vec::new();
    for chain in states.chains() {
        for (i, access) in chain.accesses.iter().enumerate() {
            let Access::Write { op, data, update, .. } = access else { continue };
            let mut breach = |rule, broken: bool| found.extend(broken.then_some(Breach { rule, op: *op }));
            breach(EmissionRule::WrittenOnce, f.value(*data).uses().len() > 1);
            breach(EmissionRule::NotReturned, leads_from_output(f, *data));
            let updates = f.producer(*data).is_some_and(|p| f.op(p).kind() == "slice_update");
            if !updates {
                continue;
            }
            let own = update.as_ref().filter(|u| i > 0 && chain.accesses[i - 1].op() == u.read);
            breach(EmissionRule::OwnRead, own.is_none_or(|u| unknown_between(f, u.read, *op)));
            let sole = |u: &Update| f.op(u.read).results().iter().all(|&v| f.value(v).uses().len() == 1);
            breach(EmissionRule::SoleReader, update.as_ref().is_some_and(|u| !sole(u)));
        }
    }
    found
}

/// Whether a function returns a value, or something that it is computed from.
fn leads_from_output(f: &Function, v: ValueId) -> bool {
    let mut seen = BTreeSet::from([v]);
    let mut work = vec![v];
    while let Some(at) = work.pop() {
        if f.is_output(at) {
            return true;
        }
        let operands = f.producer(at).map(|op| f.op(op).operands()).unwrap_or_default();
        work.extend(operands.iter().filter_map(|o| o.as_value()).filter(|&x| seen.insert(x)));
    }
    false
}

/// Whether an op of which nothing is known stands between two ops.
fn unknown_between(f: &Function, first: OpId, last: OpId) -> bool {
    let after = f.ops(f.body()).skip_while(|&op| op != first);
    after.take_while(|&op| op != last).any(|op| crate::opset::row(f.op(op).kind()).is_none())
}
