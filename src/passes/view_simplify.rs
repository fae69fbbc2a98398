//! `view-simplify`: spell every chain of views in the shortest way.
//!
//! With: tensor<fp16, [1, 1, 128]> q
//!
//! Given:
//! ```text
//! tensor<fp16, [1, 1, 8, 16]> h = reshape(x = q, shape = [1, 1, 8, 16]);
//! tensor<fp16, [1, 8, 1, 16]> t = transpose(x = h, perm = [0, 2, 1, 3]);
//! ```
//! Return:
//! ```text
//! tensor<fp16, [1, 8, 1, 16]> t = reshape(x = q, shape = [1, 8, 1, 16]);
//! ```
//!
//! A chain whose layout over an ancestor is a bijection becomes nothing, one `reshape`, or `reshape? transpose
//! reshape?`, whichever is cheapest; a `transpose` that only moves axes of extent one is a `reshape`. A chain is replaced
//! only when the ops that die cost more than the new ones.
//!
//! Exactness: bitwise. Assumes: A1 (docs/assumptions.md).
//! Declines: an output whose name cannot move.

use crate::analysis::liveness::dying;
use crate::analysis::spelling::{self, Step, TRANSPOSE_COST, UNIT_TRANSPOSE_COST, VIEW_COST, moves_only_unit_axes};
use crate::ir::{Function, OpId, ValueId};
use crate::opset::views;
use crate::rewrite::{Budget, Context, NoMatch, Outcome, Patch, Rule, drive, is_returned, loss, may_be_returned};

use super::{Exactness, Pass};

/// Replaces chains of views by their shortest spelling.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ViewSimplify;

impl Pass for ViewSimplify {
    fn name(&self) -> &'static str {
        "view-simplify"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        drive(f, &[self], budget)
    }
}

impl Rule for ViewSimplify {
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
        let f = cx.f;
        let &[v] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
        if !is_view(f, op) || !ends_chain(f, v) {
            return Err(NoMatch::UNRELATED);
        }
        let ty = f.tensor(v).ok_or(NoMatch::UNRELATED)?;
        let mut best: Option<(u32, ValueId, Vec<Step>)> = None;
        for layout in cx.layouts.of(v).iter().skip(1) {
            let root = layout.source;
            let Some(from) = f.tensor(root) else { continue };
            let Some(steps) = spelling::spell(&from.shape, layout, &ty.shape) else { continue };
            if steps.is_empty() && is_returned(f, v) && !may_be_returned(f, root) {
                continue;
            }
            let dying = dying(f, v, root);
            if dying.iter().any(|&op| loss(f, op).is_some()) {
                continue;
            }
            let old: u32 = dying.iter().map(|&op| op_cost(f, op)).sum();
            let new = spelling::cost(&steps);
            if new < old && best.as_ref().is_none_or(|(gain, ..)| old - new > *gain) {
                best = Some((old - new, root, steps));
            }
        }
        let (_, root, steps) = best.ok_or(NoMatch::UNRELATED)?;
        let name = f.value(v).name().as_str();
        let mut patch = Patch::before(op);
        let at = patch.steps(f, root, name, &steps).ok_or(NoMatch::UNRELATED)?;
        patch.replace(v, at);
        patch.form = match &steps[..] {
            [] => "nothing is left of the chain".into(),
            [Step::Reshape(_)] => "one reshape".into(),
            [Step::Transpose(..)] => "one transpose".into(),
            _ => format!("{} ops around one transpose", steps.len() - 1),
        };
        Ok(patch)
    }
}

/// Whether an op only gives its operand another shape or order of axes.
fn is_view(f: &Function, op: OpId) -> bool {
    match &**f.op(op).kind() {
        "reshape" | "expand_dims" | "squeeze" | "flatten2d" | "identity" | "transpose" => true,
        "cast" => match (f.op(op).value("x"), f.op(op).results()) {
            (Some(x), [y]) => f.ty(x) == f.ty(*y),
            _ => false,
        },
        _ => false,
    }
}

/// Whether something other than a further view reads the value.
fn ends_chain(f: &Function, v: ValueId) -> bool {
    f.value(v).uses().iter().any(|u| u.op().is_none_or(|user| !is_view(f, user)))
}

/// The relative cost of an op of a chain.
pub(super) fn op_cost(f: &Function, op: OpId) -> u32 {
    match &**f.op(op).kind() {
        "transpose" => {
            let unit = views::Transpose::of(f, op)
                .is_some_and(|t| f.tensor(t.x).is_some_and(|ty| moves_only_unit_axes(&ty.shape, &t.perm)));
            if unit { UNIT_TRANSPOSE_COST } else { TRANSPOSE_COST }
        }
        _ => VIEW_COST,
    }
}
