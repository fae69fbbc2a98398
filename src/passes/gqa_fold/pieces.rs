//! Pieces of copies: where heads are taken apart after the repeat, each piece can be cut from the value that is repeated.
//!
//! Attention head by head (as in the layout (B, C, 1, S) of the Neural Engine) splits the keys and values into one piece
//! per query head. Of repeated keys, the pieces of a group are the same piece of the keys themselves.

use crate::analysis::layout::Layout;
use crate::analysis::liveness::dying_without;
use crate::analysis::spelling::{self, Step};
use crate::analysis::traffic::{op_bytes, value_bytes};
use crate::ir::{Dim, Literal, OpId, TensorType, ValueId};
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref, is_returned, loss};

use super::shared::{reads_overwritten_state, tensor};

/// What is repeated, as the op that takes it apart sees it, and where its results begin.
struct Pieces {
    source: ValueId,
    axis: usize,
    /// From the source to the operand without repeats, of that shape.
    steps: Vec<Step>,
    shape: Vec<Dim>,
    begins: Vec<u64>,
}

/// Cuts the results of a `split` from the value that is repeated.
pub(super) fn split_once(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let x = f.op(op).value("x").ok_or(NoMatch::UNRELATED)?;
    let pieces = cx.layouts.of(x).iter().filter_map(|l| pieces(cx, op, x, l)).min_by_key(|p| spelling::cost(&p.steps));
    let pieces = pieces.ok_or(NoMatch::UNRELATED)?;
    // Only where the copies go.
    let dying = dying_without(f, op, x, pieces.source);
    if dying.is_empty() || dying.iter().any(|&d| loss(f, d).is_some()) || reads_overwritten_state(f, op, pieces.source)
    {
        return Err(NoMatch::UNRELATED);
    }
    let mut patch = Patch::before(op);
    let name = f.value(x).name().as_str();
    let once = patch.steps(f, pieces.source, &format!("{name}_once"), &pieces.steps).ok_or(NoMatch::UNRELATED)?;
    let mut cut: Vec<(u64, ValueId)> = Vec::new();
    for (&result, &begin) in f.op(op).results().iter().zip(&pieces.begins) {
        let same = |&&(at, first): &&(u64, ValueId)| at == begin && f.ty(first) == f.ty(result);
        match cut.iter().find(same) {
            Some(&(_, first)) => patch.replace(result, first),
            None => cut.push((begin, result)),
        }
    }
    // Last, so that every reader of such a piece goes with the first of its kind.
    for &(begin, first) in &cut {
        let piece = pieces.slice(&mut patch, f.value(first).name().as_str(), &once, begin, tensor(f, first)?)?;
        patch.replace(first, piece);
    }
    patch.bytes_saved = dying.iter().map(|&d| op_bytes(f, d)).sum();
    patch.bytes_added = if spelling::is_view(&pieces.steps) { 0 } else { 2 * value_bytes(f, pieces.source) };
    if patch.bytes_saved <= patch.bytes_added && tensor(f, x)?.known_shape().is_some() {
        return Err(NoMatch::because(format!(
            "no bytes gained: {} saved, {} moved instead",
            patch.bytes_saved, patch.bytes_added
        )));
    }
    patch.form = format!("{} pieces cut from the value that is repeated", cut.len());
    Ok(patch)
}

fn pieces(cx: &Context<'_>, op: OpId, x: ValueId, layout: &Layout) -> Option<Pieces> {
    let f = cx.f;
    let axis = (0..layout.axes.len()).find(|&i| layout.axes[i].iter().any(|d| d.repeats()))?;
    let once = layout.once(axis);
    if once.repeats() {
        return None;
    }
    let mut shape = f.tensor(x)?.shape.to_vec();
    shape[axis] = once.extent(axis)?;
    let steps = spelling::spell(&f.tensor(layout.source)?.shape, &once, &shape)?;
    let begin = |&r: &ValueId| {
        let piece = cx.layouts.over(r, layout.source).filter(|p| !p.repeats() && !is_returned(f, r))?;
        once.begin_of(&piece, axis)
    };
    let begins = f.op(op).results().iter().map(begin).collect::<Option<Vec<u64>>>()?;
    Some(Pieces { source: layout.source, axis, steps, shape, begins })
}

impl Pieces {
    fn slice(&self, patch: &mut Patch, name: &str, once: &Ref, begin: u64, ty: &TensorType) -> Result<Ref, NoMatch> {
        if ty.shape[..] == self.shape[..] {
            return Ok(once.clone());
        }
        let int = |n: u64| i64::try_from(n).map_err(|_| NoMatch::UNRELATED);
        let mut begins = vec![0i64; ty.rank()];
        begins[self.axis] = int(begin)?;
        // -1 takes what there is.
        let size = |(i, d): (usize, &Dim)| if i == self.axis { d.as_known().map(int) } else { Some(Ok(-1)) };
        let sizes =
            ty.shape.iter().enumerate().map(|d| size(d).ok_or(NoMatch::UNRELATED)?).collect::<Result<Vec<_>, _>>()?;
        let inputs = [
            ("x", Input::One(once.clone())),
            ("begin", Input::Const(Literal::ints(&begins))),
            ("size", Input::Const(Literal::ints(&sizes))),
        ];
        Ok(patch.op("slice_by_size", name, inputs, ty.clone()))
    }
}
