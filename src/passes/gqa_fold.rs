//! `gqa-fold`: multiply by the KV heads that exist instead of by copies of them.
//!
//! With: tensor<fp16, [1, 2, 32, 16]> keys, tensor<fp16, [1, 8, 1, 16]> query
//!
//! Given:
//! ```text
//! tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
//! tensor<fp16, [1, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
//! tensor<fp16, [1, 8, 32, 16]> k = reshape(x = t, shape = [1, 8, 32, 16]);
//! tensor<fp16, [1, 8, 1, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
//! ```
//! Return:
//! ```text
//! tensor<fp16, [1, 2, 4, 16]> q = reshape(x = query, shape = [1, 2, 4, 16]);
//! tensor<fp16, [1, 2, 4, 32]> s = matmul(x = q, y = keys, transpose_x = false, transpose_y = true);
//! tensor<fp16, [1, 8, 1, 32]> scores = reshape(x = s, shape = [1, 8, 1, 32]);
//! ```
//!
//! The rewrite is a local identity on one matmul: where `y` is repeated over `s` along the last batch axis in grouped
//! order, `matmul(x[…, n_kv_heads·group, q_len, k], y)` is the view `[…, n_kv_heads·group, q_len, n]` of
//! `matmul(x as […, n_kv_heads, group·q_len, k], s)`. Every element is the dot product of the same row and column. A
//! repeated *left* operand uses `A·B = (Bᵀ·Aᵀ)ᵀ`, which is views only for a single column. How the repeat is spelled does
//! not matter: the layout says what is repeated. Afterwards the output reshapes are sunk towards the next matmul.
//!
//! Exactness: bitwise. Assumes: A1, A2, A3 (docs/assumptions.md).
//! Declines: nothing is repeated; the repeat lies on another axis; interleaved order; sizes that are not known;
//! transposed queries with more than one row; the shared side is no view of a smaller value; no bytes gained; an op that
//! may not be edited; consumers other than `matmul`.

use crate::analysis::layout::{Axis, Digit, Layout};
use crate::analysis::liveness::dying_without;
use crate::analysis::spelling::{self, Order};
use crate::analysis::traffic::{is_view, op_bytes, value_bytes};
use crate::ir::{DType, Dim, Function, Id, Literal, OpId, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Budget, Context, Input, NoMatch, Outcome, Patch, Ref, Rule, drive, loss};

use super::view_simplify::{ViewSimplify, op_cost};
use super::{Exactness, Pass, sink};

/// Folds the query heads onto the KV heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GqaFold {
    /// How folds are expressed.
    pub lowering: Lowering,
}

impl Pass for GqaFold {
    fn name(&self) -> &'static str {
        "gqa-fold"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        let first_new = f.op_capacity();
        let mut outcome = drive(f, &[&FoldRule { lowering: self.lowering, first_new }], budget);
        let is_new = |op: OpId| op.index() >= first_new;
        outcome.extend(sink::sink(f, is_new, budget));
        // Each reshape that moves up meets another view, and the two become one that may move on.
        while !outcome.fired.is_empty() {
            outcome.extend(ViewSimplify.run(f, budget));
            let hoisted = sink::hoist(f, is_new, budget);
            if hoisted.fired.is_empty() {
                break;
            }
            outcome.extend(hoisted);
        }
        outcome
    }
}

/// The rule: a matmul at a time.
struct FoldRule {
    lowering: Lowering,
    /// Ops from this index on were made by this run: they say nothing about the model.
    first_new: usize,
}

impl Rule for FoldRule {
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
        match &**cx.f.op(op).kind() {
            "matmul" => match fold(cx, op, self.lowering) {
                Err(_) if op.index() >= self.first_new => Err(NoMatch::UNRELATED),
                answer => answer,
            },
            "shape" => shape_of_copies(cx, op),
            "tile" => Err(unconsumed(cx, op)),
            "scaled_dot_product_attention" => Err(fused(cx, op)),
            _ => Err(NoMatch::UNRELATED),
        }
    }
}

/// How a fold is expressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Lowering {
    /// Rows where that is views only or moves few bytes, batch axes for what remains.
    #[default]
    Auto,
    /// `[…, n_kv_heads, group·q_len, k] · […, n_kv_heads, k, n]`.
    Rows,
    /// `[n_kv_heads, group, q_len, k] · [n_kv_heads, 1, k, n]`, by broadcasting; for batch 1.
    BatchAxes,
}

/// Bytes that may move for each byte that is saved before rows give way to batch axes: one in this many.
const FEW: u64 = 16;

fn fold(cx: &Context<'_>, op: OpId, lowering: Lowering) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let m = views::Matmul::of(f, op).ok_or(NoMatch::UNRELATED)?;
    let (x, y) = (tensor(f, m.x)?, tensor(f, m.y)?);
    let rank = x.rank();
    let (on_y, on_x) = (repeated(cx, m.y), repeated(cx, m.x));
    if !on_y && !on_x {
        return Err(match rank >= 3 && f.const_value(m.y).is_none() && f.const_value(m.x).is_none() {
            true => NoMatch::because("neither operand is a repeated view: multi-head attention, or grouped already"),
            false => NoMatch::UNRELATED,
        });
    }
    if rank < 3 || y.rank() != rank {
        return Err(NoMatch::because("the operands have no batch axis in common"));
    }
    if x.dtype != y.dtype {
        return Err(NoMatch::because("the operands have different element types"));
    }
    let axis = rank - 3;
    if x.shape[axis] != y.shape[axis] {
        return Err(NoMatch::because("one operand has a single head: multiplying once is not supported"));
    }
    let side = |right: bool| Fold::new(cx, op, &m, right).and_then(|fold| fold.patch(lowering));
    match (on_y, on_x) {
        (true, false) => side(true),
        (false, true) => side(false),
        _ => side(true).or_else(|first| side(false).map_err(|_| first)),
    }
}

/// The value that exists once per KV head, and how the matmul reads it.
struct Shared {
    source: ValueId,
    /// Its layout as the operand without repeats, in the operand's axes or with the matrices' axes exchanged.
    once: Layout,
    /// Whether the matrices' axes are exchanged.
    flipped: bool,
    order: Order,
    kv_heads: Dim,
    group: Dim,
}

/// A matmul of which one operand is repeated.
struct Fold<'c, 'f> {
    cx: &'c Context<'f>,
    op: OpId,
    result: ValueId,
    /// Whether the repeated operand is `y`.
    right: bool,
    repeated: ValueId,
    repeated_transposed: bool,
    other: ValueId,
    other_transposed: bool,
    shared: Shared,
    /// The head axis.
    axis: usize,
}

impl<'c, 'f> Fold<'c, 'f> {
    fn new(cx: &'c Context<'f>, op: OpId, m: &views::Matmul, right: bool) -> Result<Self, NoMatch> {
        let f = cx.f;
        let ((repeated, repeated_transposed), (other, other_transposed)) = match right {
            true => ((m.y, m.transpose_y), (m.x, m.transpose_x)),
            false => ((m.x, m.transpose_x), (m.y, m.transpose_y)),
        };
        let axis = tensor(f, repeated)?.rank() - 3;
        let shared = shared(cx, op, repeated, axis, true)?;
        let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
        if tensor(f, result)?.rank() != axis + 3 {
            return Err(NoMatch::UNRELATED);
        }
        if reads_overwritten_state(f, op, shared.source) {
            return Err(NoMatch::because("it would read a state's old content after the state is written"));
        }
        Ok(Fold { cx, op, result, right, repeated, repeated_transposed, other, other_transposed, shared, axis })
    }

    fn shape(&self, v: ValueId) -> &'f [Dim] {
        self.cx.f.tensor(v).map_or(&[], |t| &t.shape)
    }

    fn patch(&self, lowering: Lowering) -> Result<Patch, NoMatch> {
        let rows = self.rows();
        let batch = || self.batch_axes();
        let mut patch = match lowering {
            Lowering::Rows => rows?,
            Lowering::BatchAxes => batch()?,
            Lowering::Auto => match rows {
                Ok(patch) if patch.bytes_added.saturating_mul(FEW) <= patch.bytes_saved => patch,
                Ok(patch) => batch().unwrap_or(patch),
                Err(no) => batch().map_err(|_| no)?,
            },
        };
        if patch.bytes_saved <= patch.bytes_added && self.is_known() {
            return Err(NoMatch::because(format!(
                "no bytes gained: {} saved, {} moved instead",
                patch.bytes_saved, patch.bytes_added
            )));
        }
        patch.form = format!("{}: {}", patch.form, self.describe());
        Ok(patch)
    }

    fn is_known(&self) -> bool {
        [self.repeated, self.other, self.result].iter().all(|&v| spelling::unknowns(self.shape(v)) == 0)
    }

    fn describe(&self) -> String {
        let order = match self.shared.order {
            Order::Grouped => "",
            Order::Interleaved => ", interleaved",
        };
        let heads = &self.shape(self.other)[self.axis];
        format!("{heads} query heads onto {} KV heads{order}", self.shared.kv_heads)
    }

    /// `y[…, heads, q, k]` as rows: `[…, kv_heads, group·q, k]`, times the shared columns `[…, kv_heads, k, n]`; for a
    /// repeated left operand by `A·B = (Bᵀ·Aᵀ)ᵀ`.
    fn rows(&self) -> Result<Patch, NoMatch> {
        let f = self.cx.f;
        let (axis, shared) = (self.axis, &self.shared);
        let (other, out) = (self.shape(self.other), self.shape(self.result));
        let rank = other.len();
        // The rows are those of `other` as it stands on the left.
        let stored_by_row = self.right != self.other_transposed;
        let (row, inner) = if stored_by_row { (rank - 2, rank - 1) } else { (rank - 1, rank - 2) };
        let many = shared.group.checked_mul(&other[row]).ok_or(NoMatch::UNRELATED)?;
        let with =
            |lead: &[Dim], last: &Dim| [&lead[..axis], &[shared.kv_heads.clone(), many.clone(), last.clone()]].concat();

        let own = Layout::identity(self.other, other).ok_or(NoMatch::UNRELATED)?;
        let (kv, group) = self.split_heads(&own, axis)?;
        let mut layout = own.clone();
        layout.axes[axis] = kv;
        layout.axes[axis + 1] = group.into_iter().chain(own.axes[row].iter().cloned()).collect();
        layout.axes[axis + 2] = own.axes[inner].clone();
        let rows_shape = with(other, &other[inner]);
        let rows_steps = spelling::spell(other, &layout, &rows_shape).ok_or(NoMatch::UNRELATED)?;

        let columns = if self.right { &out[rank - 1] } else { &out[rank - 2] };
        let product_shape = with(out, columns);
        let flat = Layout::identity(self.result, &product_shape).ok_or(NoMatch::UNRELATED)?;
        let wide =
            [&out[..axis], &[shared.kv_heads.clone(), shared.group.clone(), other[row].clone(), columns.clone()]];
        let wide = flat.reshape(&wide.concat()).ok_or(NoMatch::UNRELATED)?;
        let mut layout = flat;
        let (kv, group) = (wide.axes[axis].clone(), wide.axes[axis + 1].clone());
        layout.axes[axis] = self.join_heads(kv, group);
        let (row_axis, column_axis) = if self.right { (axis + 1, axis + 2) } else { (axis + 2, axis + 1) };
        layout.axes[row_axis] = wide.axes[axis + 2].clone();
        layout.axes[column_axis] = wide.axes[axis + 3].clone();
        let out_steps = spelling::spell(&product_shape, &layout, out).ok_or(NoMatch::UNRELATED)?;
        if [&rows_steps, &out_steps].iter().any(|s| spelling::cost(s) >= spelling::COMPUTED_RESHAPE_COST) {
            return Err(NoMatch::because("the rows and the keys both have a size that is not known"));
        }
        let moves = !spelling::is_view(&rows_steps) || !spelling::is_view(&out_steps);
        if moves && !self.is_known() {
            return Err(NoMatch::because("rows would move data of a size that is not known"));
        }

        let mut patch = Patch::before(self.op);
        let name = f.value(self.result).name().as_str();
        let rows = patch.steps(f, self.other, &format!("{name}_rows"), &rows_steps).ok_or(NoMatch::UNRELATED)?;
        let mut shared_shape = self.shape(self.repeated).to_vec();
        shared_shape[axis] = shared.kv_heads.clone();
        let (columns, moved) = self.shared_operand(&mut patch, shared_shape)?;
        // On the left, the repeated operand's rows become columns.
        let by_row = (self.repeated_transposed == self.right) != shared.flipped;
        let product = self.matmul(&mut patch, [(rows, false), (columns, by_row)], &product_shape);
        let out = patch.steps(f, product, name, &out_steps).ok_or(NoMatch::UNRELATED)?;
        patch.replace(self.result, out);
        for (v, steps) in [(self.other, &rows_steps), (self.result, &out_steps)] {
            patch.bytes_added += if spelling::is_view(steps) { 0 } else { 2 * value_bytes(f, v) };
        }
        patch.bytes_added += moved;
        patch.form = "rows".into();
        self.count_saved(&mut patch)?;
        Ok(patch)
    }

    /// Every digit of the heads an axis, the repeated one of extent one on the shared side.
    fn batch_axes(&self) -> Result<Patch, NoMatch> {
        let f = self.cx.f;
        let (axis, shared) = (self.axis, &self.shared);
        let lead = axis.saturating_sub(1);
        let unit_in_front = |v: ValueId| axis == 0 || self.shape(v)[lead].is_one();
        if ![self.other, self.repeated, self.result].into_iter().all(unit_in_front) {
            return Err(NoMatch::because("there is no batch axis of extent one for the groups"));
        }
        let one = Dim::known(1);
        let pair = |kv: &Dim, group: &Dim| match shared.order {
            Order::Grouped => [kv.clone(), group.clone()],
            Order::Interleaved => [group.clone(), kv.clone()],
        };
        let (split, once) = (pair(&shared.kv_heads, &shared.group), pair(&shared.kv_heads, &one));
        let with = |shape: &[Dim], heads: &[Dim; 2]| [&shape[..lead], &heads[..], &shape[axis + 1..]].concat();

        let mut patch = Patch::before(self.op);
        let name = f.value(self.result).name().as_str();
        let split_other = with(self.shape(self.other), &split);
        let other = patch.reshape(f, self.other, &format!("{name}_heads"), &split_other).ok_or(NoMatch::UNRELATED)?;
        let (one_each, moved) = self.shared_operand(&mut patch, with(self.shape(self.repeated), &once))?;
        let other = (other, self.other_transposed);
        let one_each = (one_each, self.repeated_transposed != shared.flipped);
        let operands = if self.right { [other, one_each] } else { [one_each, other] };
        let out = self.shape(self.result);
        let product = self.matmul(&mut patch, operands, &with(out, &split));
        let out = patch.reshape(f, product, name, out).ok_or(NoMatch::UNRELATED)?;
        patch.replace(self.result, out);
        patch.bytes_added = moved;
        patch.form = "batch axes".into();
        self.count_saved(&mut patch)?;
        Ok(patch)
    }

    /// The shared side in this shape (matrices as the operand stores them), and the bytes that have to move for it.
    fn shared_operand(&self, patch: &mut Patch, mut to: Vec<Dim>) -> Result<(Ref, u64), NoMatch> {
        let f = self.cx.f;
        let shared = &self.shared;
        if shared.flipped {
            let rank = to.len();
            to.swap(rank - 1, rank - 2);
        }
        let layout = shared.once.reshape(&to).ok_or(NoMatch::UNRELATED)?;
        let steps = spelling::spell(self.shape(shared.source), &layout, &to).ok_or(NoMatch::UNRELATED)?;
        let name = format!("{}_shared", f.value(self.repeated).name());
        let moved = if spelling::is_view(&steps) { 0 } else { 2 * value_bytes(f, shared.source) };
        Ok((patch.steps(f, shared.source, &name, &steps).ok_or(NoMatch::UNRELATED)?, moved))
    }

    fn matmul(&self, patch: &mut Patch, [(x, tx), (y, ty)]: [(Ref, bool); 2], shape: &[Dim]) -> Ref {
        let f = self.cx.f;
        let dtype = f.tensor(self.result).map_or(DType::F16, |t| t.dtype);
        patch.op(
            "matmul",
            format!("{}_grouped", f.value(self.result).name()),
            [
                ("x", Input::One(x)),
                ("y", Input::One(y)),
                ("transpose_x", Input::Const(Literal::bool(tx))),
                ("transpose_y", Input::Const(Literal::bool(ty))),
            ],
            TensorType::new(dtype, shape.iter().cloned()),
        )
    }

    /// The head axis of a layout as KV heads and groups.
    fn split_heads(&self, layout: &Layout, axis: usize) -> Result<(Axis, Axis), NoMatch> {
        let (kv, group) = (self.shared.kv_heads.clone(), self.shared.group.clone());
        let pair = match self.shared.order {
            Order::Grouped => [kv, group],
            Order::Interleaved => [group, kv],
        };
        let mut heads = layout.clone();
        heads.axes = [layout.axes[axis].clone()].into_iter().collect();
        let split = heads.reshape(&pair).ok_or(NoMatch::UNRELATED)?;
        let (first, second) = (split.axes[0].clone(), split.axes[1].clone());
        Ok(if self.shared.order == Order::Grouped { (first, second) } else { (second, first) })
    }

    /// KV heads and groups as one head axis.
    fn join_heads(&self, kv: Axis, group: Axis) -> Axis {
        let (first, second) = if self.shared.order == Order::Grouped { (kv, group) } else { (group, kv) };
        first.into_iter().chain(second).collect()
    }

    fn count_saved(&self, patch: &mut Patch) -> Result<(), NoMatch> {
        let saved = bytes_saved(self.cx.f, self.op, self.repeated, &self.shared)?;
        patch.bytes_saved = saved;
        Ok(())
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

/// Bytes per run that are neither written nor read when `reader` takes the shared side instead of the copies.
fn bytes_saved(f: &Function, reader: OpId, repeated: ValueId, shared: &Shared) -> Result<u64, NoMatch> {
    let dying = dying_without(f, reader, repeated, shared.source);
    if let Some((op, what)) = dying.iter().find_map(|&op| Some((op, loss(f, op)?))) {
        return Err(NoMatch::because(format!("{} carries {what}, which would be lost with it", f.describe(op))));
    }
    let read = value_bytes(f, repeated);
    let group = shared.group.as_known().unwrap_or(1).max(1);
    Ok(read - read / group + dying.iter().map(|&op| op_bytes(f, op)).sum::<u64>())
}

/// The cheapest way to read a repeated operand without its repeats along `axis`. Where `flip` is set, the matrices may
/// come out transposed.
fn shared(cx: &Context<'_>, reader: OpId, v: ValueId, axis: usize, flip: bool) -> Result<Shared, NoMatch> {
    let f = cx.f;
    let shape: Vec<Dim> = tensor(f, v)?.shape.to_vec();
    let rank = shape.len();
    let mut best: Option<(i64, Shared)> = None;
    let mut refusal = NoMatch::because("the repeated operand is no view of a value that holds each head once");
    for layout in cx.layouts.of(v).iter().skip(1).filter(|l| l.repeats()) {
        let Some(repeat) = spelling::take_repeat(layout, axis) else {
            refusal = why_not_separable(layout, axis, rank);
            continue;
        };
        let (Some(kv_heads), Some(from)) =
            (shape[axis].checked_div(&repeat.group), f.tensor(layout.source).map(|t| &t.shape[..]))
        else {
            continue;
        };
        if kv_heads.as_known().is_none() || repeat.group.as_known().is_none() {
            refusal = NoMatch::because("the number of heads is not known");
            continue;
        }
        let mut small = shape.clone();
        small[axis] = kv_heads.clone();
        let mut turned = small.clone();
        turned.swap(rank - 1, rank - 2);
        let as_is = Some((repeat.once.clone(), small, false));
        let flipped = spelling::matrix_transposed(&repeat.once).filter(|_| flip).map(|l| (l, turned, true));
        for (once, to, flipped) in [as_is, flipped].into_iter().flatten() {
            let Some(steps) = spelling::spell(from, &once, &to) else { continue };
            // New ops less those that die; the nearest source wins a tie.
            let dying = dying_without(f, reader, v, layout.source);
            let old: u32 = dying.iter().map(|&op| op_cost(f, op)).sum();
            let cost = i64::from(spelling::cost(&steps)) - i64::from(old);
            if best.as_ref().is_none_or(|(c, _)| cost < *c) {
                let (order, group) = (repeat.order, repeat.group.clone());
                let kv_heads = kv_heads.clone();
                best = Some((cost, Shared { source: layout.source, once, flipped, order, kv_heads, group }));
            }
        }
    }
    best.map(|(_, shared)| shared).ok_or(refusal)
}

fn why_not_separable(layout: &Layout, axis: usize, rank: usize) -> NoMatch {
    let repeats = |i: usize| layout.axes[i].iter().any(Digit::repeats);
    match (0..rank).find(|&i| i != axis && repeats(i)) {
        Some(i) if i + 2 >= rank => {
            NoMatch::because(format!("the repeat lies on axis {i} of the matrices, not on a batch axis"))
        }
        Some(i) => NoMatch::because(format!("the repeat lies on batch axis {i}, not on the one next to the rows")),
        None => NoMatch::because("repeats and heads alternate within the head axis"),
    }
}

/// Whether some layout of the value repeats.
fn repeated(cx: &Context<'_>, v: ValueId) -> bool {
    cx.layouts.of(v).iter().any(Layout::repeats)
}

/// A shape that is asked of copies can be asked of what they are copies of, so that it does not keep them alive.
fn shape_of_copies(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let x = f.op(op).value("x").ok_or(NoMatch::UNRELATED)?;
    let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
    let shape = tensor(f, x)?.shape.to_vec();
    let layouts = cx.layouts.of(x);
    let source = layouts.iter().find(|l| l.repeats()).map(|l| l.source).ok_or(NoMatch::UNRELATED)?;
    let name = f.value(result).name().as_str();
    let mut patch = Patch::before(op);
    let computed = patch
        .shape_from(f, source, name, &shape)
        .ok_or_else(|| NoMatch::because("the shape of the copies is not that of their source times a constant"))?;
    patch.replace(result, computed);
    patch.form = "asked of the value that is repeated".into();
    Ok(patch)
}

/// Why a `tile` stays, when no matmul is asked about it.
fn unconsumed(cx: &Context<'_>, op: OpId) -> NoMatch {
    let f = cx.f;
    let Some(tile) = views::Tile::of(f, op) else { return NoMatch::UNRELATED };
    let Some(&out) = f.op(op).results().first() else { return NoMatch::UNRELATED };
    if tile.reps.is_some_and(|reps| reps.iter().all(|&n| n == 1)) {
        return NoMatch::because("the tile repeats nothing");
    }
    if cx.layouts.over(out, tile.x).is_none() {
        return NoMatch::because("the repetitions are computed at run time and cannot be resolved");
    }
    let mut reached = vec![out];
    let mut at = 0;
    while at < reached.len() {
        for user in f.users(reached[at]) {
            match &**f.op(user).kind() {
                "matmul" | "scaled_dot_product_attention" => return NoMatch::UNRELATED,
                _ => {
                    for &r in f.op(user).results() {
                        if !reached.contains(&r) && cx.layouts.over(r, out).is_some() {
                            reached.push(r);
                        }
                    }
                }
            }
        }
        at += 1;
    }
    NoMatch::because("no matmul reads the repeated value")
}

/// Why an attention op keeps its repeated keys and values.
fn fused(cx: &Context<'_>, op: OpId) -> NoMatch {
    match ["key", "value"].into_iter().any(|p| cx.f.op(op).value(p).is_some_and(|v| repeated(cx, v))) {
        true => NoMatch::because("scaled_dot_product_attention reads the repeated value; only matmul is folded yet"),
        false => NoMatch::UNRELATED,
    }
}

fn tensor(f: &Function, v: ValueId) -> Result<&TensorType, NoMatch> {
    f.tensor(v).ok_or(NoMatch::UNRELATED)
}
