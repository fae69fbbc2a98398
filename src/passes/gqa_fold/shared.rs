//! What both consumers need: the value that exists once per KV head, and rows.

use crate::analysis::layout::{Axis, Digit, Layout, Stride};
use crate::analysis::liveness::dying_without;
use crate::analysis::spelling::{self, Order, Repeat, Step};
use crate::analysis::traffic::{is_view, op_bytes, value_bytes};
use crate::ir::{Dim, Function, Id, Literal, OpId, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Certificate, Context, Input, NoMatch, Patch, Ref, loss};

use crate::passes::view_simplify::op_cost;

/// How query heads read KV heads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Heads {
    pub(super) kv_heads: Dim,
    pub(super) group: Dim,
    pub(super) order: Order,
}

/// Steps to a tensor and its shape.
pub(super) struct Spelled {
    pub(super) steps: Vec<Step>,
    pub(super) shape: Vec<Dim>,
}

impl Heads {
    /// For the report: the heads on both sides.
    pub(super) fn describe(&self) -> String {
        let heads = self.kv_heads.checked_mul(&self.group).unwrap_or_else(|| self.group.clone());
        let order = match self.order {
            Order::Grouped => "",
            Order::Interleaved => ", interleaved",
        };
        format!("{heads} query heads onto {} KV heads{order}", self.kv_heads)
    }

    /// The two as they follow each other in the head axis.
    pub(super) fn pair(&self, kv_heads: &Dim, group: &Dim) -> [Dim; 2] {
        match self.order {
            Order::Grouped => [kv_heads.clone(), group.clone()],
            Order::Interleaved => [group.clone(), kv_heads.clone()],
        }
    }

    /// The head axis of a layout as KV heads and groups.
    fn split(&self, axis: &[Digit]) -> Option<(Axis, Axis)> {
        let heads = Layout {
            source: ValueId::new(0),
            offset: Stride::zero(),
            axes: [axis.iter().cloned().collect()].into_iter().collect(),
        };
        let split = heads.reshape(&self.pair(&self.kv_heads, &self.group))?;
        let (first, second) = (split.axes[0].clone(), split.axes[1].clone());
        Some(if self.order == Order::Grouped { (first, second) } else { (second, first) })
    }

    /// KV heads and groups as one head axis.
    fn join(&self, kv_heads: Axis, group: Axis) -> Axis {
        let (first, second) = if self.order == Order::Grouped { (kv_heads, group) } else { (group, kv_heads) };
        first.into_iter().chain(second).collect()
    }

    /// A tensor with its groups moved from the head axis into another one, on the side where the heads are.
    pub(super) fn moved(&self, v: ValueId, shape: &[Dim], axis: usize, into: usize) -> Option<Spelled> {
        let mut layout = Layout::identity(v, shape)?;
        let (kv_heads, group) = self.split(&layout.axes[axis])?;
        layout.axes[axis] = kv_heads;
        let own = std::mem::take(&mut layout.axes[into]);
        let [first, second] = if into < axis { [own, group] } else { [group, own] };
        layout.axes[into] = first.into_iter().chain(second).collect();
        let to = self.moved_shape(shape, axis, into)?;
        Some(Spelled { steps: spelling::spell(shape, &layout, &to)?, shape: to })
    }

    /// The way back to a tensor of shape `out`; the shape is the one the steps start from.
    pub(super) fn moved_back(&self, v: ValueId, out: &[Dim], axis: usize, into: usize) -> Option<Spelled> {
        let from = self.moved_shape(out, axis, into)?;
        let mut layout = Layout::identity(v, &from)?;
        let mut wide = layout.clone();
        wide.axes = [layout.axes[into].clone()].into_iter().collect();
        let behind = into < axis;
        let sizes = if behind { [&out[into], &self.group] } else { [&self.group, &out[into]] };
        let wide = wide.reshape(&sizes.map(Dim::clone))?;
        let (group, own) = (wide.axes[usize::from(behind)].clone(), wide.axes[usize::from(!behind)].clone());
        layout.axes[axis] = self.join(layout.axes[axis].clone(), group);
        layout.axes[into] = own;
        Some(Spelled { steps: spelling::spell(&from, &layout, out)?, shape: from })
    }

    fn moved_shape(&self, shape: &[Dim], axis: usize, into: usize) -> Option<Vec<Dim>> {
        let mut to = shape.to_vec();
        to[axis] = self.kv_heads.clone();
        to[into] = self.group.checked_mul(&shape[into])?;
        Some(to)
    }

    /// A tensor `[…, heads, …]` whose matrices have these row and inner axes as `[…, kv_heads, group·rows, inner]`.
    pub(super) fn to_rows(&self, v: ValueId, shape: &[Dim], axis: usize, row: usize, inner: usize) -> Option<Spelled> {
        let own = Layout::identity(v, shape)?;
        let mut layout = own.clone();
        layout.axes[axis + 1] = own.axes[row].clone();
        layout.axes[axis + 2] = own.axes[inner].clone();
        let (kv_heads, group) = self.split(&own.axes[axis])?;
        layout.axes[axis] = kv_heads;
        layout.axes[axis + 1] = group.into_iter().chain(layout.axes[axis + 1].iter().cloned()).collect();
        let rows = self.group.checked_mul(&shape[row])?;
        let to = [&shape[..axis], &[self.kv_heads.clone(), rows, shape[inner].clone()]].concat();
        Some(Spelled { steps: spelling::spell(shape, &layout, &to)?, shape: to })
    }

    /// The way back: `[…, kv_heads, group·rows, inner]` as the tensor `[…, heads, …]` of this shape with these row and
    /// inner axes. The shape is the one the steps start from.
    pub(super) fn rows_back(&self, v: ValueId, out: &[Dim], axis: usize, row: usize, inner: usize) -> Option<Spelled> {
        let rows = self.group.checked_mul(&out[row])?;
        let from = [&out[..axis], &[self.kv_heads.clone(), rows, out[inner].clone()]].concat();
        let flat = Layout::identity(v, &from)?;
        let wide = [self.kv_heads.clone(), self.group.clone(), out[row].clone(), out[inner].clone()];
        let wide = flat.reshape(&[&out[..axis], &wide].concat())?;
        let mut layout = flat;
        layout.axes[axis] = self.join(wide.axes[axis].clone(), wide.axes[axis + 1].clone());
        layout.axes[row] = wide.axes[axis + 2].clone();
        layout.axes[inner] = wide.axes[axis + 3].clone();
        Some(Spelled { steps: spelling::spell(&from, &layout, out)?, shape: from })
    }
}

/// The value that exists once per KV head, and how its reader sees it.
pub(super) struct Shared {
    pub(super) source: ValueId,
    /// The layout of the operand as it is, repeats and all.
    copies: Layout,
    /// Its layout as the operand without repeats, in the operand's axes or with the matrices' axes exchanged.
    once: Layout,
    /// The shape of the operand without repeats, matrices as the operand stores them.
    pub(super) shape: Vec<Dim>,
    /// Whether the matrices' axes are exchanged.
    pub(super) flipped: bool,
    pub(super) heads: Heads,
}

impl Shared {
    /// Adds ops for the shared side in this shape (matrices as the operand stores them), and the bytes they move.
    pub(super) fn operand(
        &self,
        f: &Function,
        patch: &mut Patch,
        repeated: ValueId,
        to: &[Dim],
    ) -> Result<(Ref, u64), NoMatch> {
        let mut to = to.to_vec();
        if self.flipped {
            let rank = to.len();
            to.swap(rank - 1, rank - 2);
        }
        let layout = self.once.reshape(&to).ok_or(NoMatch::UNRELATED)?;
        let from = &tensor(f, self.source)?.shape;
        let steps = spelling::spell(from, &layout, &to).ok_or(NoMatch::UNRELATED)?;
        let name = format!("{}_shared", f.value(repeated).name());
        let moved = if spelling::is_view(&steps) { 0 } else { 2 * value_bytes(f, self.source) };
        Ok((patch.steps(f, self.source, &name, &steps).ok_or(NoMatch::UNRELATED)?, moved))
    }

    /// Puts into the patch's report what is saved when `reader` takes the shared side instead of the copies that it reads as
    /// `operand`, and how those lie in it.
    pub(super) fn account(
        &self,
        f: &Function,
        patch: &mut Patch,
        reader: OpId,
        (operand, repeated): (&str, ValueId),
    ) -> Result<(), NoMatch> {
        patch.bytes_saved += self.bytes_saved(f, reader, repeated)?;
        patch.certificates.push(Certificate::new(f, operand, repeated, &self.copies));
        Ok(())
    }

    /// Bytes per run that are neither written nor read when `reader` takes the shared side instead of the copies.
    fn bytes_saved(&self, f: &Function, reader: OpId, repeated: ValueId) -> Result<u64, NoMatch> {
        let dying = dying(f, reader, repeated, self.source)?;
        let read = value_bytes(f, repeated);
        let times = Dim::product(&tensor(f, repeated)?.shape).zip(Dim::product(&self.shape));
        let times = times.and_then(|(all, once)| all.checked_div(&once)?.as_known()).unwrap_or(1).max(1);
        Ok(read - read / times + dying.iter().map(|&op| op_bytes(f, op)).sum::<u64>())
    }
}

/// The ops that go when `reader` takes the source instead of the copies.
pub(super) fn dying(f: &Function, reader: OpId, copies: ValueId, source: ValueId) -> Result<Vec<OpId>, NoMatch> {
    let dying = dying_without(f, reader, copies, source);
    match dying.iter().find_map(|&op| Some((op, loss(f, op)?))) {
        None => Ok(dying),
        Some((op, what)) => {
            Err(NoMatch::because(format!("{} carries {what}, which would be lost with it", f.describe(op)))
                .remedy("the op carries nothing beyond the schema"))
        }
    }
}

/// Adds a `tile` of one axis, or finds the one that was made before `op`.
pub(super) fn tile_once(f: &Function, patch: &mut Patch, op: OpId, v: ValueId, axis: usize, times: u64) -> Option<Ref> {
    let size = f.tensor(v)?.shape.get(axis)?.checked_mul(&Dim::known(times))?;
    match tile_before(f, op, v, axis, &size) {
        Some(tile) => Some(tile.into()),
        None => tile(f, patch, v.into(), axis, times, &format!("{}_rows", f.value(v).name())),
    }
}

/// The value with one axis tiled to this size, where it exists before `op`.
pub(super) fn tile_before(f: &Function, op: OpId, v: ValueId, axis: usize, size: &Dim) -> Option<ValueId> {
    let mut tiled = f.tensor(v)?.clone();
    *tiled.shape.get_mut(axis)? = size.clone();
    f.users(v).into_iter().find_map(|user| {
        let data = f.op(user);
        let &[result] = data.results() else { return None };
        let same = data.kind() == "tile" && data.value("x") == Some(v) && f.tensor(result) == Some(&tiled);
        (same && data.block() == f.op(op).block() && f.comes_before(user, op)).then_some(result)
    })
}

/// Adds a `tile` of one axis.
pub(super) fn tile(f: &Function, patch: &mut Patch, x: Ref, axis: usize, times: u64, name: &str) -> Option<Ref> {
    let ty = patch.type_of(f, &x)?;
    let size = ty.shape.get(axis)?.checked_mul(&Dim::known(times))?;
    let reps = reps(ty.rank(), axis, times)?;
    tile_by(f, patch, x, axis, &size, reps.into(), name)
}

/// Adds a `tile` of one axis to this size by repetitions that give it.
pub(super) fn tile_by(
    f: &Function,
    patch: &mut Patch,
    x: Ref,
    axis: usize,
    size: &Dim,
    reps: Input,
    name: &str,
) -> Option<Ref> {
    let mut ty = patch.type_of(f, &x)?;
    *ty.shape.get_mut(axis)? = size.clone();
    Some(patch.op("tile", name, [("x", Input::One(x)), ("reps", reps)], ty))
}

/// Repetitions of one axis.
pub(super) fn reps(rank: usize, axis: usize, times: u64) -> Option<Literal> {
    let mut reps = vec![1; rank];
    *reps.get_mut(axis)? = i64::try_from(times).ok()?;
    Some(Literal::ints(&reps))
}

/// Refuses a patch that moves no fewer bytes than it saves.
pub(super) fn gains(patch: &Patch) -> Result<(), NoMatch> {
    if patch.bytes_saved > patch.bytes_added {
        return Ok(());
    }
    let (saved, added) = (patch.bytes_saved, patch.bytes_added);
    Err(NoMatch::because(format!("no bytes gained: {saved} saved, {added} moved instead"))
        .remedy("the operands are spelled in grouped order, in which the fold moves nothing"))
}

/// Whether some layout of the value repeats.
pub(super) fn repeated(cx: &Context<'_>, v: ValueId) -> bool {
    cx.layouts.of(v).iter().any(Layout::repeats)
}

pub(super) fn tensor(f: &Function, v: ValueId) -> Result<&TensorType, NoMatch> {
    f.tensor(v).ok_or(NoMatch::UNRELATED)
}

/// The cheapest way to read a repeated operand without its repeats along `axis`. Where the reader is a `matmul` by a tensor
/// of shape `other`, the matrices may come out transposed, and copies that fill a batch axis in front go, too: it broadcasts.
pub(super) fn shared(
    cx: &Context<'_>,
    reader: OpId,
    v: ValueId,
    axis: usize,
    other: Option<&[Dim]>,
) -> Result<Shared, NoMatch> {
    let f = cx.f;
    let shape: Vec<Dim> = tensor(f, v)?.shape.to_vec();
    let rank = shape.len();
    let mut best: Option<(i64, Shared)> = None;
    let mut refusal = NoMatch::because("the repeated operand is no view of a value that holds each head once")
        .remedy("what stands between the repeat and the product treats the heads of a group alike");
    for copies in cx.layouts.of(v).iter().skip(1).filter(|l| l.repeats()) {
        let (mut layout, mut small) = (copies.clone(), shape.clone());
        for i in (0..axis).filter(|&i| other.is_some_and(|o| o.get(i) == shape.get(i))) {
            if spelling::repeats_only(&layout.axes[i]) {
                layout.axes[i].clear();
                small[i] = Dim::known(1);
            }
        }
        let Some(repeat) = spelling::take_repeat(&layout, axis).or_else(|| not_repeated(&layout)) else {
            refusal = why_not_separable(&layout, axis, rank);
            continue;
        };
        let (Some(kv_heads), Some(from)) =
            (shape[axis].checked_div(&repeat.group), f.tensor(layout.source).map(|t| &t.shape[..]))
        else {
            continue;
        };
        if kv_heads.as_known().is_none() || repeat.group.as_known().is_none() {
            refusal = NoMatch::because("the number of heads is not known").remedy("the heads are of a fixed number");
            continue;
        }
        small[axis] = kv_heads.clone();
        let flipped = other.and_then(|_| spelling::matrix_transposed(&repeat.once)).map(|once| {
            let mut turned = small.clone();
            turned.swap(rank - 1, rank - 2);
            (once, turned, true)
        });
        let as_is = Some((repeat.once.clone(), small.clone(), false));
        for (once, to, flipped) in [as_is, flipped].into_iter().flatten() {
            let Some(steps) = spelling::spell(from, &once, &to) else { continue };
            // New ops less those that die; the nearest source wins a tie.
            let dying = dying_without(f, reader, v, layout.source);
            let old: u32 = dying.iter().map(|&op| op_cost(f, op)).sum();
            // Interleaved heads may have to be moved.
            let order = if repeat.order == Order::Interleaved { spelling::TRANSPOSE_COST } else { 0 };
            let cost = i64::from(spelling::cost(&steps) + order) - i64::from(old);
            if best.as_ref().is_none_or(|(c, _)| cost < *c) {
                let (kv_heads, group) = (kv_heads.clone(), repeat.group.clone());
                let heads = Heads { kv_heads, group, order: repeat.order };
                let (source, copies, shape) = (layout.source, copies.clone(), small.clone());
                best = Some((cost, Shared { source, copies, once, shape, flipped, heads }));
            }
        }
    }
    let (_, shared) = best.ok_or(refusal)?;
    still_there(f, reader, shared.source)?;
    Ok(shared)
}

/// A layout without repeats as one that repeats once.
fn not_repeated(layout: &Layout) -> Option<Repeat> {
    (!layout.repeats()).then(|| Repeat { once: layout.clone(), group: Dim::known(1), order: Order::Grouped })
}

fn why_not_separable(layout: &Layout, axis: usize, rank: usize) -> NoMatch {
    let repeats = |i: usize| layout.axes[i].iter().any(Digit::repeats);
    match (0..rank).find(|&i| i != axis && repeats(i)) {
        Some(i) if i + 2 >= rank => {
            NoMatch::because(format!("the repeat lies on axis {i} of the matrices, not on a batch axis"))
        }
        Some(i) => NoMatch::because(format!("the repeat lies on batch axis {i}, not on the one next to the rows"))
            .remedy(format!("axis {i} holds nothing but copies, which a matmul broadcasts")),
        None => NoMatch::because("repeats and heads alternate within the head axis")
            .remedy("each head's copies stand together, or each set of all heads"),
    }
}

/// Refuses a source that `reader` would find overwritten.
pub(super) fn still_there(f: &Function, reader: OpId, source: ValueId) -> Result<(), NoMatch> {
    match reads_overwritten_state(f, reader, source) {
        false => Ok(()),
        true => Err(NoMatch::because("it would read a state's old content after the state is written")
            .remedy("the state is read again after the write, or written after the product")),
    }
}

/// Whether a value is a view of a state as it was read before a write that comes before `reader`. Copies made in between
/// would be gone.
fn reads_overwritten_state(f: &Function, reader: OpId, v: ValueId) -> bool {
    let mut at = v;
    while let Some(op) = f.producer(at) {
        if let Some(read) = views::ReadState::of(f, op) {
            let (block, both) = (f.op(op).block(), f.op(op).block() == f.op(reader).block());
            let overwrites = |w: OpId| {
                f.op(w).kind() == "write_state" && f.op(w).value("input") == Some(read.state) && f.comes_before(op, w)
            };
            return !both || f.ops(block).take_while(|&w| w != reader).any(overwrites);
        }
        match f.op(op).value("x") {
            Some(x) if is_view(f, op) => at = x,
            _ => return false,
        }
    }
    false
}
