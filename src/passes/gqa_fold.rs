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
//! The rewrite is a local identity on one matmul: where `y` is repeated over `s` along the last batch axis,
//! `matmul(x[…, n_heads, q_len, k], y)` is a view of a product with `s` itself. Every element is the dot product of
//! the same row and column. How the repeat is spelled does not matter: the layout says what is repeated, in which
//! order, and which value holds each head once. Two lowerings:
//!
//! * **rows**: `[…, n_kv_heads, group·q_len, k] · […, n_kv_heads, k, n]`; a repeated left operand by `A·B = (Bᵀ·Aᵀ)ᵀ`.
//!   Taken where it is views only, or moves few bytes, and one of the lengths is known.
//! * **batch axes**: `[n_kv_heads, group, q_len, k] · [n_kv_heads, 1, k, n]`, for batch 1; interleaved heads the other way
//!   round. Views only, whatever is known of the sizes.
//!
//! * Copies times one head, or times what is copied alike: multiplied once, the product is repeated. A repeat that fills
//!   a batch axis in front of the heads (beams) goes: the product broadcasts.
//!
//! `scaled_dot_product_attention` folds by rows, keys and values together; the two `einsum` equations that MIL knows
//! move the group into the other operand's own axis. An op between the repeat and its consumer that treats all heads
//! of a group alike (RoPE, a scale, a cast) is done before the repeat, and a single head picked out of the copies is
//! picked out of what is repeated. Afterwards the reshapes sink towards the next
//! matmul, and the query's is hoisted into its projection (see `gqa_fold/regroup.rs`).
//!
//! Exactness: bitwise. Assumes: A1, A2, A3, A6, A7, A9 (docs/assumptions.md).
//! Declines: nothing is repeated; the repeat lies on another axis, or repeats and heads alternate; the shared side is no
//! view of a smaller value; no bytes gained; an op that may not be edited; a state that is
//! overwritten before the reader; keys and values repeated in different ways in one attention op.

mod attention;
mod commute;
mod einsum;
mod hazards;
mod matmul;
mod member;
mod pick;
mod reasons;
mod regroup;
mod shared;

use crate::analysis::layout::Digit;
use crate::analysis::traffic::batched_operands;
use crate::ir::{Function, Id, OpId};
use crate::opset::views;
use crate::rewrite::{Budget, Context, Keeps, NoMatch, Outcome, Patch, Rule, drive};

use super::view_simplify::ViewSimplify;
use super::{Exactness, Pass};
use shared::tensor;

/// Folds the query heads onto the KV heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GqaFold {
    /// How folds are expressed.
    pub lowering: Lowering,
    /// What becomes of a mask with rows of its own.
    pub masks: Masks,
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
        outcome.extend(regroup::sink(f, is_new, self.masks, budget));
        // Each reshape that moves up meets another view, and the two become one that may move on.
        while !outcome.fired.is_empty() {
            outcome.extend(ViewSimplify.run(f, budget));
            let hoisted = regroup::hoist(f, is_new, budget);
            if hoisted.fired.is_empty() {
                break;
            }
            outcome.extend(hoisted);
        }
        outcome
    }
}

/// The rule: a consumer at a time.
struct FoldRule {
    lowering: Lowering,
    /// Ops from this index on were made by this run: those that read no copies say nothing about the model.
    first_new: usize,
}

impl Rule for FoldRule {
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
        let answer = match &**cx.f.op(op).kind() {
            "matmul" => matmul::fold(cx, op, self.lowering),
            "scaled_dot_product_attention" => attention::fold(cx, op),
            "einsum" => einsum::fold(cx, op),
            "shape" => shape_of_copies(cx, op),
            "split" | "slice_by_index" | "slice_by_size" => pick::pick(cx, op).or_else(|no| match no.reason() {
                Some(_) => Err(no),
                None => before_the_repeat(cx, op),
            }),
            _ => before_the_repeat(cx, op),
        };
        answer.map_err(|no| match reads_copies(cx, op) {
            true => no.keeping(Keeps::Copies),
            false if op.index() >= self.first_new => NoMatch::UNRELATED,
            false => no,
        })
    }
}

fn before_the_repeat(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    commute::sink_repeat(cx, op).map_err(|_| unconsumed(cx, op))
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

/// What becomes of a mask `[…, 1, q_len, ctx]` between two folded products, whose rows folded rows cannot broadcast.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Masks {
    /// It stays: the scores return to head layout around it, by views.
    #[default]
    Keep,
    /// Its rows are tiled once per group, so that everything between the products computes in the folded shape.
    Tile,
}

/// Whether an op multiplies by a value that repeats heads.
fn reads_copies(cx: &Context<'_>, op: OpId) -> bool {
    batched_operands(cx.f, op)
        .into_iter()
        .any(|(v, batch)| cx.layouts.of(v).iter().any(|l| l.axes[batch.clone()].iter().flatten().any(Digit::repeats)))
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

/// Why copies stay, when no product is asked about them.
fn unconsumed(cx: &Context<'_>, op: OpId) -> NoMatch {
    let f = cx.f;
    let &[out] = f.op(op).results() else { return NoMatch::UNRELATED };
    let tile = views::Tile::of(f, op);
    if tile.as_ref().and_then(|t| t.reps.as_ref()).is_some_and(|reps| reps.iter().all(|&n| n == 1)) {
        return NoMatch::because("the tile repeats nothing");
    }
    if tile.is_some_and(|t| cx.layouts.over(out, t.x).is_none()) {
        return NoMatch::because("the repetitions are computed at run time and cannot be resolved")
            .remedy("they follow from the shapes of the inputs, or are constant");
    }
    // Copies are made here if an operand does not repeat yet.
    let operands = f.op(op).operands().iter().filter_map(|o| o.as_value());
    if !operands.into_iter().any(|v| cx.layouts.over(out, v).is_some_and(|l| l.repeats())) {
        return NoMatch::UNRELATED;
    }
    let mut reached = vec![out];
    let mut at = 0;
    while at < reached.len() {
        for user in f.users(reached[at]) {
            match &**f.op(user).kind() {
                "matmul" | "scaled_dot_product_attention" | "einsum" => return NoMatch::UNRELATED,
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
    NoMatch::because("no matmul reads the repeated value").remedy("a product reads it through views")
}
