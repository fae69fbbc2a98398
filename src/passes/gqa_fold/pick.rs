//! Picking heads out of copies: a slice of a repeated value that takes each element once is a slice of what is repeated.
//!
//! Attention that works on a head at a time splits the copies again, and no product sees that they repeat.

use crate::analysis::layout::{Digit, Layout, Stride};
use crate::analysis::spelling::{self, Step, TRANSPOSE_COST};
use crate::analysis::traffic::{op_bytes, value_bytes};
use crate::ir::{Dim, Function, Literal, OpId, TensorType, ValueId};
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref, is_returned};

use crate::passes::view_simplify::op_cost;

use super::shared::{dying, still_there};

pub(super) fn pick(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let x = f.op(op).value("x").ok_or(NoMatch::UNRELATED)?;
    let repeated = cx.layouts.of(x);
    let picks = repeated.iter().filter(|l| l.repeats()).filter_map(|l| Some((l.source, picks(cx, op, l.source)?)));
    let cost = |(_, picks): &(ValueId, Vec<Pick>)| picks.iter().map(|p| spelling::cost(&p.steps)).sum::<u32>();
    let (source, picks) = picks.min_by_key(cost).ok_or(NoMatch::UNRELATED)?;
    still_there(f, op, source)?;
    let dying = dying(f, op, x, source)?;
    // What is picked may be transposed where the copies were: there is less of it.
    let transposes = dying.iter().any(|&op| op_cost(f, op) >= TRANSPOSE_COST);
    if !transposes && picks.iter().any(|p| !spelling::is_view(&p.steps)) {
        return Err(NoMatch::UNRELATED);
    }

    let mut patch = Patch::before(op);
    let (from, picks) = turned_once(f, &mut patch, source, picks)?;
    let mut made: Vec<(&Pick, Ref)> = Vec::new();
    for (&result, pick) in f.op(op).results().iter().zip(&picks) {
        let name = f.value(result).name().as_str();
        let at = match made.iter().find(|(p, _)| *p == pick && !is_returned(f, result)) {
            Some((_, at)) => at.clone(),
            None => pick.add(f, &mut patch, &from, name)?,
        };
        made.push((pick, at.clone()));
        patch.replace(result, at);
    }
    patch.bytes_saved = dying.iter().map(|&op| op_bytes(f, op)).sum();
    patch.bytes_added = if transposes { 2 * value_bytes(f, source) } else { 0 };
    patch.form = "picked from the value that is repeated".into();
    Ok(patch)
}

/// A range of one axis of a value, and the views that bring it into shape.
#[derive(Clone, PartialEq)]
struct Pick {
    axis: usize,
    begin: u64,
    len: u64,
    steps: Vec<Step>,
}

/// How every result of `op` is picked from `source`, if they all are.
fn picks(cx: &Context<'_>, op: OpId, source: ValueId) -> Option<Vec<Pick>> {
    let from = &cx.f.tensor(source)?.shape;
    let pick = |&r: &ValueId| {
        let layout = cx.layouts.over(r, source)?;
        let to = &cx.f.tensor(r)?.shape;
        (0..from.len()).find_map(|axis| Pick::along(from, axis, &layout, to))
    };
    cx.f.op(op).results().iter().map(pick).collect()
}

/// Where several picks are transposed alike, the source is transposed as a whole, once, and they are picked from that.
fn turned_once(
    f: &Function,
    patch: &mut Patch,
    source: ValueId,
    picks: Vec<Pick>,
) -> Result<(Ref, Vec<Pick>), NoMatch> {
    let first = picks.first().and_then(turn).map(<[_]>::to_vec);
    let alike = |perm: &Vec<usize>| picks.len() > 1 && picks.iter().all(|p| turn(p) == Some(perm));
    let Some(perm) = first.filter(alike) else { return Ok((source.into(), picks)) };
    let turned = |mut pick: Pick| {
        pick.axis = perm.iter().position(|&p| p == pick.axis).unwrap_or(pick.axis);
        pick.steps.remove(0);
        pick
    };
    let name = format!("{}_turned", f.value(source).name());
    let at = patch.transpose(f, source, &name, &perm).ok_or(NoMatch::UNRELATED)?;
    Ok((at, picks.iter().cloned().map(turned).collect()))
}

/// The transposition that a pick begins with.
fn turn(pick: &Pick) -> Option<&[usize]> {
    match pick.steps.first() {
        Some(Step::Transpose(perm, _)) => Some(perm),
        _ => None,
    }
}

impl Pick {
    /// The layout over a tensor of shape `from` as a range of this axis.
    fn along(from: &[Dim], axis: usize, layout: &Layout, to: &[Dim]) -> Option<Pick> {
        let n = from[axis].as_known()?;
        let inner = Dim::product(&from[axis + 1..])?;
        let begin = layout.offset.positive().map_or(Some(0), |o| o.checked_div(&inner)?.as_known())?;
        let len = Dim::product(to)?.checked_mul(&from[axis])?.checked_div(&Dim::product(from)?)?.as_known()?;
        if begin.checked_add(len)? > n {
            return None;
        }
        // The same digits over the range alone.
        let (whole, range) = (inner.checked_mul(&from[axis])?, inner.checked_mul(&Dim::known(len))?);
        let mut over = layout.clone();
        over.offset = Stride::zero();
        for d in over.axes.iter_mut().flatten() {
            let stride = d.stride.positive()?;
            match stride.checked_div(&whole) {
                Some(times) => *d = Digit { stride: Stride::of(times.checked_mul(&range)?), extent: d.extent.clone() },
                None => drop(range.checked_div(&stride.checked_mul(&d.extent)?)?),
            }
        }
        let steps = spelling::spell(&Self::shape(from, axis, len), &over, to)?;
        Some(Pick { axis, begin, len, steps })
    }

    fn shape(from: &[Dim], axis: usize, len: u64) -> Vec<Dim> {
        let mut shape = from.to_vec();
        shape[axis] = Dim::known(len);
        shape
    }

    fn add(&self, f: &Function, patch: &mut Patch, from: &Ref, name: &str) -> Result<Ref, NoMatch> {
        let ty = patch.type_of(f, from).ok_or(NoMatch::UNRELATED)?;
        let rank = ty.rank();
        let shape = Self::shape(&ty.shape, self.axis, self.len);
        let mut at = from.clone();
        if shape[..] != ty.shape[..] {
            let only = |n: u64| {
                let n = i64::try_from(n).map_err(|_| NoMatch::UNRELATED)?;
                Ok((0..rank).map(|i| if i == self.axis { n } else { 0 }).collect::<Vec<i64>>())
            };
            let whole: Vec<bool> = (0..rank).map(|i| i != self.axis).collect();
            let inputs = [
                ("x", Input::One(at)),
                ("begin", Input::Const(Literal::ints(&only(self.begin)?))),
                ("end", Input::Const(Literal::ints(&only(self.begin + self.len)?))),
                ("end_mask", Input::Const(Literal::bools(&whole))),
            ];
            at = patch.op("slice_by_index", name, inputs, TensorType::new(ty.dtype, shape));
        }
        patch.steps(f, at, name, &self.steps).ok_or(NoMatch::UNRELATED)
    }
}
