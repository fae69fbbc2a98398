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

use smallvec::SmallVec;

use crate::analysis::layout::{Digit, Layout};
use crate::analysis::liveness::dying_without;
use crate::analysis::spelling::{self, Step};
use crate::analysis::traffic::{op_bytes, value_bytes};
use crate::ir::{DType, Function, Id, Literal, OpId, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Budget, Context, Input, NoMatch, Outcome, Patch, Ref, Rule, drive};

use super::view_simplify::op_cost;
use super::{Exactness, Pass, sink};

/// Folds the query heads onto the KV heads, in rows form.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GqaFold;

impl Pass for GqaFold {
    fn name(&self) -> &'static str {
        "gqa-fold"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        let first_new = f.op_capacity();
        let mut outcome = drive(f, &[&Fold { first_new }], budget);
        outcome.extend(sink::run(f, |op| op.index() >= first_new, budget));
        outcome
    }
}

/// The rule: a matmul at a time.
struct Fold {
    /// Ops from this index on were made by this run: they say nothing about the model.
    first_new: usize,
}

impl Rule for Fold {
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
        match &**cx.f.op(op).kind() {
            "matmul" => match fold(cx, op) {
                Err(_) if op.index() >= self.first_new => Err(NoMatch::UNRELATED),
                answer => answer,
            },
            "tile" => Err(unconsumed(cx, op)),
            "scaled_dot_product_attention" => Err(fused(cx, op)),
            _ => Err(NoMatch::UNRELATED),
        }
    }
}

/// A matmul seen as `rows · columns` with the repeated operand on the column side.
struct Product {
    /// The operand that keeps its heads.
    rows: ValueId,
    /// The operand that may be repeated.
    columns: ValueId,
    /// Whether `columns` is stored `[…, n, k]` rather than `[…, k, n]`.
    columns_by_row: bool,
    /// `[…, heads]` of the operands.
    heads: u64,
    q_len: u64,
    k: u64,
    n: u64,
    dtype: DType,
}

fn fold(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let m = views::Matmul::of(f, op).ok_or(NoMatch::UNRELATED)?;
    let result = f.op(op).results()[0];
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
    let (Some(xs), Some(ys)) = (x.known_shape(), y.known_shape()) else {
        return Err(NoMatch::because("sizes are not known"));
    };
    let (heads_axis, r, c) = (rank - 3, rank - 2, rank - 1);
    let (q_len, k) = if m.transpose_x { (xs[c], xs[r]) } else { (xs[r], xs[c]) };
    let n = if m.transpose_y { ys[r] } else { ys[c] };
    if xs[heads_axis] != ys[heads_axis] {
        return Err(NoMatch::because("one operand has a single head: multiplying once is not supported yet"));
    }
    let heads = xs[heads_axis];
    if on_y {
        if m.transpose_x && q_len > 1 {
            return Err(NoMatch::because(
                "the queries are stored transposed with more than one row: their reshape would move data",
            ));
        }
        let product =
            Product { rows: m.x, columns: m.y, columns_by_row: m.transpose_y, heads, q_len, k, n, dtype: x.dtype };
        return product.fold(cx, op, result);
    }
    if n > 1 {
        return Err(NoMatch::because(
            "the repeated operand is on the left of more than one column: the product would have to be transposed",
        ));
    }
    let product = Product {
        rows: m.y,
        columns: m.x,
        columns_by_row: !m.transpose_x,
        heads,
        q_len: n,
        k,
        n: q_len,
        dtype: x.dtype,
    };
    product.fold(cx, op, result)
}

/// The value that exists once per KV head, and how the matmul reads it.
struct Shared {
    source: ValueId,
    steps: Vec<Step>,
    /// Whether the matrices are stored `[…, n, k]`.
    by_row: bool,
    kv_heads: u64,
}

impl Product {
    fn fold(&self, cx: &Context<'_>, op: OpId, result: ValueId) -> Result<Patch, NoMatch> {
        let f = cx.f;
        let shared = self.shared(cx, op)?;
        let (kv_heads, group) = (shared.kv_heads, self.heads / shared.kv_heads);
        let name = f.value(result).name().as_str();
        let batch: SmallVec<[u64; 5]> = known(f, self.rows)?[..known(f, self.rows)?.len() - 3].into();
        let out_shape = known(f, result)?;
        let out_batch = &out_shape[..out_shape.len() - 3];

        let mut patch = Patch::before(op);
        let rows_shape = [&batch[..], &[kv_heads, group * self.q_len, self.k]].concat();
        let rows = patch.reshape(self.rows, format!("{name}_rows"), self.dtype, &rows_shape);
        let mut at = Ref::Value(shared.source);
        let base = format!("{}_shared", f.value(self.columns).name());
        for step in &shared.steps {
            at = match step {
                Step::Reshape(shape) => patch.reshape(at, &*base, self.dtype, shape),
                Step::Transpose(perm, shape) => patch.transpose(at, &*base, self.dtype, perm, shape),
            };
        }
        let product_shape = [out_batch, &[kv_heads, group * self.q_len, self.n]].concat();
        let product = patch.op(
            "matmul",
            format!("{name}_grouped"),
            [
                ("x", Input::One(rows)),
                ("y", Input::One(at)),
                ("transpose_x", Input::Const(Literal::bool(false))),
                ("transpose_y", Input::Const(Literal::bool(shared.by_row))),
            ],
            TensorType::fixed(self.dtype, &product_shape),
        );
        let out = patch.reshape(product, name, self.dtype, &out_shape);
        patch.replace(result, out);

        let dying = dying_without(f, op, self.columns, shared.source);
        if let Some((op, what)) = dying.iter().find_map(|&op| Some((op, f.op(op).unmodelled()?))) {
            return Err(NoMatch::because(format!("{} carries {what}, which would be lost with it", f.describe(op))));
        }
        let dying: u64 = dying.iter().map(|&op| op_bytes(f, op)).sum();
        let small: u64 = value_bytes(f, self.columns) / group;
        patch.bytes_saved = (value_bytes(f, self.columns) - small) + dying;
        patch.bytes_added = if shared.steps.iter().any(|s| matches!(s, Step::Transpose(..))) { 2 * small } else { 0 };
        if patch.bytes_saved <= patch.bytes_added {
            return Err(NoMatch::because(format!(
                "no bytes gained: {} saved, {} moved instead",
                patch.bytes_saved, patch.bytes_added
            )));
        }
        patch.form = format!("rows: {} query heads x {} rows onto {kv_heads} KV heads", self.heads, self.q_len);
        Ok(patch)
    }

    /// The cheapest way to read the columns without their repeats.
    fn shared(&self, cx: &Context<'_>, reader: OpId) -> Result<Shared, NoMatch> {
        let f = cx.f;
        let shape = known(f, self.columns)?;
        let rank = shape.len();
        let axis = rank - 3;
        let mut best: Option<(i64, Shared)> = None;
        let mut refusal = NoMatch::because("the repeated operand is no view of a value that holds each head once");
        for layout in cx.layouts.of(self.columns).iter().skip(1) {
            if !layout.repeats() {
                continue;
            }
            let Some((once, group)) = spelling::without_minor_repeat(layout, axis) else {
                refusal = why_not_grouped(layout, axis, rank);
                continue;
            };
            let (Some(group), Some(from)) =
                (group.as_known(), f.tensor(layout.source).and_then(TensorType::known_shape))
            else {
                continue;
            };
            if group <= 1 {
                refusal = why_not_grouped(layout, axis, rank);
                continue;
            }
            let kv_heads = shape[axis] / group;
            let mut small = shape.to_vec();
            small[axis] = kv_heads;
            let mut flipped = small.clone();
            flipped.swap(rank - 1, rank - 2);
            let as_is = spelling::spell(&from, &once, &small).map(|steps| (steps, self.columns_by_row));
            let turned = spelling::matrix_transposed(&once)
                .and_then(|l| spelling::spell(&from, &l, &flipped))
                .map(|steps| (steps, !self.columns_by_row));
            for (steps, by_row) in [as_is, turned].into_iter().flatten() {
                // New ops less those that die; the nearest source wins a tie.
                let old: u32 =
                    dying_without(f, reader, self.columns, layout.source).iter().map(|&op| op_cost(f, op)).sum();
                let cost = i64::from(spelling::cost(&steps)) - i64::from(old);
                if best.as_ref().is_none_or(|(c, _)| cost < *c) {
                    best = Some((cost, Shared { source: layout.source, steps, by_row, kv_heads }));
                }
            }
        }
        best.map(|(_, shared)| shared).ok_or(refusal)
    }
}

fn why_not_grouped(layout: &Layout, axis: usize, rank: usize) -> NoMatch {
    let repeats = |i: usize| layout.axes[i].iter().any(Digit::repeats);
    if repeats(axis) && layout.axes[axis].last().is_some_and(|d| !d.repeats()) {
        return NoMatch::because(
            "interleaved order: query head h reads KV head h mod n_kv_heads, which the rows form cannot view",
        );
    }
    match (0..rank).find(|&i| i != axis && repeats(i)) {
        Some(i) if i + 2 >= rank => {
            NoMatch::because(format!("the repeat lies on axis {i} of the matrices, not on a batch axis"))
        }
        Some(i) => NoMatch::because(format!("the repeat lies on batch axis {i}, not on the one next to the rows")),
        None => NoMatch::because("the repeat and the heads do not separate into digits"),
    }
}

/// Whether some layout of the value repeats.
fn repeated(cx: &Context<'_>, v: ValueId) -> bool {
    cx.layouts.of(v).iter().any(Layout::repeats)
}

/// Why a `tile` stays, when no matmul is asked about it.
fn unconsumed(cx: &Context<'_>, op: OpId) -> NoMatch {
    let f = cx.f;
    let Some(tile) = views::Tile::of(f, op) else { return NoMatch::UNRELATED };
    let Some(reps) = tile.reps else {
        return NoMatch::because("the repetitions are computed at run time and not resolved yet");
    };
    if reps.iter().all(|&n| n == 1) {
        return NoMatch::because("the tile repeats nothing");
    }
    let Some(&out) = f.op(op).results().first() else { return NoMatch::UNRELATED };
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

fn known(f: &Function, v: ValueId) -> Result<SmallVec<[u64; 5]>, NoMatch> {
    f.tensor(v).and_then(TensorType::known_shape).ok_or_else(|| NoMatch::because("sizes are not known"))
}
