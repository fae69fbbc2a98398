//! One op on the way from a cache to the products of attention.

use crate::analysis::layout::{normalise, takes_all};
use crate::ir::{Dim, Function, OpId, Operand, ValueId};
use crate::opset::is_elementwise;
use crate::opset::views::{self, AxisSlice};
use crate::rewrite::NoMatch;

use super::plan::{Kind, Phase, Plan, Track};

/// What becomes of an op.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Action {
    /// It is also done for the new entries alone.
    Twin,
    /// A product with a row or column per key: also taken with the new entries, and both joined along `axis`.
    Scores {
        /// Whether the keys are the right operand of the op.
        right: bool,
        axis: usize,
    },
    /// It works on more keys as it is.
    Grow,
    /// A product that sums over keys: over the old ones plus over the new ones.
    Sum {
        /// Whether the values are the right operand of the op.
        right: bool,
    },
    /// It says something of the cache's shape, which stays.
    Keep,
}

type Visited = Result<Vec<(ValueId, Track)>, NoMatch>;

/// Decides what becomes of an op that reads tracked values, and which of its results are tracked.
pub(super) fn visit(f: &Function, plan: &mut Plan, op: OpId) -> Visited {
    let kind = f.op(op).kind().clone();
    let site = Site { f, plan, op };
    let (action, results) = match &*kind {
        "matmul" | "einsum" => site.product()?,
        "softmax" => site.softmax()?,
        "concat" => site.concat()?,
        "shape" if !site.any_grown() => (Action::Keep, None),
        kind if kind.starts_with("reduce_") => site.reduce()?,
        kind if is_elementwise(kind) => site.elementwise()?,
        _ => site.view()?,
    };
    if let Some(v) = normaliser_input(f, plan, op) {
        plan.normalised.push(v);
    }
    plan.actions.push((op, action));
    let result = f.op(op).results().first().copied();
    Ok(results.into_iter().filter_map(|track| Some((result?, track))).collect())
}

/// The value in which stale keys must be hidden before `op` reads it.
fn normaliser_input(f: &Function, plan: &Plan, op: OpId) -> Option<ValueId> {
    let reads = matches!(&**f.op(op).kind(), "softmax" | "exp" | "reduce_max");
    let x = f.op(op).value("x").filter(|_| reads)?;
    let track = plan.tracked.get(&x)?;
    matches!(track.kind, Kind::Grown { phase: Phase::Scores, .. }).then_some(x)
}

/// An op and what is known of its operands.
struct Site<'p> {
    f: &'p Function,
    plan: &'p Plan,
    op: OpId,
}

type Verdict = Result<(Action, Option<Track>), NoMatch>;

impl Site<'_> {
    fn track(&self, operand: &Operand) -> Option<Track> {
        self.plan.tracked.get(&operand.as_value()?).copied()
    }

    fn tracked(&self) -> Vec<(usize, Track)> {
        let operands = self.f.op(self.op).operands().iter().enumerate();
        operands.filter_map(|(i, o)| Some((i, self.track(o)?))).collect()
    }

    fn any_grown(&self) -> bool {
        self.tracked().iter().any(|(_, t)| matches!(t.kind, Kind::Grown { .. }))
    }

    /// The only tracked operand, when it is `x`.
    fn x(&self) -> Result<(ValueId, Track), NoMatch> {
        let x = self.f.op(self.op).value("x").ok_or_else(|| self.no("does not read it as data"))?;
        match self.tracked()[..] {
            [(_, track)] if self.plan.tracked.contains_key(&x) => Ok((x, track)),
            _ => Err(self.no("does not read it as data")),
        }
    }

    fn shape(&self, v: ValueId) -> &[Dim] {
        self.f.tensor(v).map_or(&[], |t| &t.shape)
    }

    fn rank(&self, operand: &Operand) -> usize {
        self.f.operand_type(operand).as_tensor().map_or(0, |t| t.rank())
    }

    fn result(&self) -> Result<ValueId, NoMatch> {
        match *self.f.op(self.op).results() {
            [result] => Ok(result),
            _ => Err(self.no("has several results")),
        }
    }

    fn no(&self, what: &str) -> NoMatch {
        NoMatch::because(format!("{} {what}", self.f.describe(self.op)))
            .remedy("between the cache and the products stand only ops that treat each key by itself, and one softmax over keys")
    }

    /// Twins stay twins; grown values keep their phase.
    fn passes(track: Track, axis: usize) -> (Action, Option<Track>) {
        let action = if track.kind == Kind::Twin { Action::Twin } else { Action::Grow };
        (action, Some(Track { axis, ..track }))
    }

    fn elementwise(&self) -> Verdict {
        let f = self.f;
        let result = self.result()?;
        let rank = self.shape(result).len();
        let mut found: Option<Track> = None;
        for (i, track) in self.tracked() {
            let missing =
                rank.checked_sub(self.rank(&f.op(self.op).operands()[i])).ok_or_else(|| self.no("reads it oddly"))?;
            let here = Track { axis: track.axis + missing, ..track };
            match found {
                Some(other) if !other.is_like(&here) => {
                    return Err(self.no("brings together values of the cache that are not alike"));
                }
                _ => found = Some(found.unwrap_or(here)),
            }
        }
        let track = found.ok_or_else(|| self.no("does not read it as data"))?;
        self.check_others(track, rank)?;
        let Kind::Grown { before, after, phase } = track.kind else { return Ok(Site::passes(track, track.axis)) };
        let kind = &**f.op(self.op).kind();
        let phase = match (phase, kind) {
            (Phase::Scores, "exp") => Phase::Weights,
            (Phase::Scores, _) => Phase::Scores,
            (Phase::Weights, "cast" | "identity" | "mul") => Phase::Weights,
            (Phase::Weights, "real_div") if self.track_of("y").is_none() => Phase::Weights,
            _ => return Err(self.no("comes between the softmax and the product and does not keep zeros")),
        };
        Ok((Action::Grow, Some(Track { kind: Kind::Grown { before, after, phase }, ..track })))
    }

    fn track_of(&self, param: &str) -> Option<Track> {
        self.plan.tracked.get(&self.f.op(self.op).value(param)?).copied()
    }

    /// Operands from outside have one element along the key axis, or one per key.
    fn check_others(&self, track: Track, rank: usize) -> Result<(), NoMatch> {
        let n = &self.plan.windows[track.window].n;
        for operand in self.f.op(self.op).operands() {
            let Some(size) = self.size_along(operand, track.axis, rank) else { continue };
            let plain = matches!(track.kind, Kind::Twin | Kind::Grown { before: 0, after: 0, .. });
            if self.track(operand).is_none() && !size.is_one() && !(size == *n && plain) {
                return Err(self.no("has an operand of another extent along the keys"));
            }
        }
        Ok(())
    }

    /// An operand's size along an axis of the result it is broadcast to; `None` when it does not reach it.
    fn size_along(&self, operand: &Operand, axis: usize, rank: usize) -> Option<Dim> {
        let shape = &self.f.operand_type(operand).as_tensor()?.shape;
        shape.get((axis + shape.len()).checked_sub(rank)?).cloned()
    }

    fn softmax(&self) -> Verdict {
        let (_, track) = self.x()?;
        let axis = views::Softmax::of(self.f, self.op)
            .map(|s| s.axis)
            .ok_or_else(|| self.no("has an axis that is not constant"))?;
        match track.kind {
            Kind::Twin if axis != track.axis => Ok(Site::passes(track, track.axis)),
            Kind::Grown { before, after, phase: Phase::Scores } if axis == track.axis => {
                let kind = Kind::Grown { before, after, phase: Phase::Weights };
                Ok((Action::Grow, Some(Track { kind, ..track })))
            }
            Kind::Grown { phase: Phase::Weights, .. } => Err(self.no("is a second softmax")),
            _ => Err(self.no("works along another axis than the keys")),
        }
    }

    fn reduce(&self) -> Verdict {
        let f = self.f;
        let (_, track) = self.x()?;
        let reduce = views::Reduce::of(f, self.op).ok_or_else(|| self.no("has axes that are not constant"))?;
        let over_keys = reduce.axes.contains(&track.axis);
        match (track.kind, &**f.op(self.op).kind()) {
            (Kind::Twin, _) if !over_keys && reduce.keep_dims => Ok(Site::passes(track, track.axis)),
            (Kind::Grown { phase: Phase::Scores, .. }, "reduce_max") if reduce.axes == [track.axis] => {
                Ok((Action::Grow, None))
            }
            (Kind::Grown { phase: Phase::Weights, .. }, "reduce_sum") if reduce.axes == [track.axis] => {
                Ok((Action::Grow, None))
            }
            _ => Err(self.no("reduces what it reads")),
        }
    }

    fn concat(&self) -> Verdict {
        let f = self.f;
        let values = f.op(self.op).param("values");
        let rank = values.first().map_or(0, |v| self.rank(v));
        let axis = f.int(self.op, "axis").and_then(|axis| normalise(axis, rank));
        let axis = axis.filter(|_| f.bool(self.op, "interleave") != Some(true));
        let axis = axis.ok_or_else(|| self.no("joins along an axis that is not constant, or interleaves"))?;
        let tracked: Vec<Option<Track>> = values.iter().map(|v| self.track(v)).collect();
        let Some(track) = tracked.iter().flatten().next().copied() else {
            return Err(self.no("does not read it as data"));
        };
        if axis != track.axis {
            return match tracked.iter().all(|t| t.is_some_and(|t| t.is_like(&track))) {
                true => Ok(Site::passes(track, track.axis)),
                false => Err(self.no("joins it with values that are not of the cache")),
            };
        }
        let (Kind::Grown { before, after, phase: Phase::Scores }, 1) = (track.kind, tracked.iter().flatten().count())
        else {
            return Err(self.no("joins other keys to those of the cache"));
        };
        let width = |v: &Operand| f.operand_type(v).as_tensor()?.shape.get(axis)?.as_known();
        let sizes = |values: &[Operand]| values.iter().map(width).sum::<Option<u64>>();
        let at = tracked.iter().position(Option::is_some).unwrap_or(0);
        let widths = sizes(&values[..at]).zip(sizes(&values[at + 1..]));
        let (left, right) = widths.ok_or_else(|| self.no("joins columns of a number that is not known"))?;
        let kind = Kind::Grown { before: before + left, after: after + right, phase: Phase::Scores };
        Ok((Action::Grow, Some(Track { kind, ..track })))
    }

    fn product(&self) -> Verdict {
        let roles = Roles::of(self.f, self.op).ok_or_else(|| self.no("is a product whose axes are not known"))?;
        let [left, right] = [self.plan.tracked.get(&roles.x).copied(), self.plan.tracked.get(&roles.y).copied()];
        let role =
            |track: Option<Track>, roles: &[Role]| track.map(|t| roles.get(t.axis).copied().unwrap_or(Role::Batch));
        match (role(left, &roles.of_x), role(right, &roles.of_y)) {
            (Some(Role::Out(axis)), None) if is_twin(left) => self.scores(left, false, axis),
            (None, Some(Role::Out(axis))) if is_twin(right) => self.scores(right, true, axis),
            (Some(Role::Summed), Some(Role::Summed)) => match (left, right) {
                (Some(weights), Some(values)) if values.kind == Kind::Twin => self.sum(weights, values, true),
                (Some(values), Some(weights)) if values.kind == Kind::Twin => self.sum(weights, values, false),
                _ => Err(self.no("multiplies scores by scores")),
            },
            (Some(Role::Summed), None) | (None, Some(Role::Summed)) => {
                Err(self.no("sums over keys with an operand that cannot be deferred"))
            }
            _ => Err(self.no("is no product of attention")),
        }
    }

    fn scores(&self, track: Option<Track>, right: bool, axis: usize) -> Verdict {
        let kind = Kind::Grown { before: 0, after: 0, phase: Phase::Scores };
        Ok((Action::Scores { right, axis }, track.map(|t| Track { axis, kind, ..t })))
    }

    fn sum(&self, weights: Track, values: Track, right: bool) -> Verdict {
        if weights.window != values.window {
            return Err(NoMatch::because(format!(
                "{} multiplies keys and values of different positions",
                self.f.describe(self.op)
            ))
            .remedy("keys and values of a layer are written at the same position"));
        }
        match weights.kind {
            Kind::Grown { before: 0, after: 0, phase: Phase::Weights } => Ok((Action::Sum { right }, None)),
            Kind::Grown { phase: Phase::Scores, .. } => {
                Err(self.no("multiplies scores that no softmax over keys has normalised"))
            }
            _ => Err(self.no("multiplies weights of more than the keys")),
        }
    }

    /// Views: the key axis stays an axis of its own.
    fn view(&self) -> Verdict {
        let f = self.f;
        if f.op(self.op).kind() == "stack" {
            return self.stack();
        }
        let (x, track) = self.x()?;
        let result = self.result()?;
        let axis = match &**f.op(self.op).kind() {
            "transpose" => {
                let perm = views::Transpose::of(f, self.op).map(|t| t.perm).unwrap_or_default();
                perm.iter().position(|&p| p == track.axis)
            }
            "expand_dims" => {
                let added = views::ExpandDims::of(f, self.op).map(|e| e.axes).unwrap_or_default();
                (0..self.shape(result).len()).filter(|i| !added.contains(i)).nth(track.axis)
            }
            "squeeze" => {
                let dropped = views::Squeeze::of(f, self.op).map(|s| s.axes).unwrap_or_default();
                (!dropped.contains(&track.axis))
                    .then(|| track.axis - dropped.iter().filter(|&&d| d < track.axis).count())
            }
            "reshape" => reshaped_axis(self.shape(x), self.shape(result), track.axis),
            "tile" => {
                let reps = views::Tile::of(f, self.op).and_then(|t| t.reps);
                reps.filter(|r| r.get(track.axis) == Some(&1)).map(|_| track.axis)
            }
            "gather" => {
                let gather = views::Gather::of(f, self.op);
                let flat = |g: &views::Gather| self.rank(&g.indices) == 1 && g.batch_dims == 0 && g.axis != track.axis;
                let outside = |g: &views::Gather| self.track(&g.indices).is_none();
                gather.filter(|g| flat(g) && outside(g)).map(|_| track.axis)
            }
            "slice_by_index" => return self.slice(track),
            _ => None,
        };
        axis.map(|axis| Site::passes(track, axis)).ok_or_else(|| self.no("is not an op that keys can pass"))
    }

    fn stack(&self) -> Verdict {
        let stack = views::Stack::of(self.f, self.op).ok_or_else(|| self.no("has an axis that is not constant"))?;
        let tracks: Vec<Option<Track>> = stack.values.iter().map(|v| self.plan.tracked.get(v).copied()).collect();
        match tracks[..] {
            [Some(track), ..]
                if track.kind == Kind::Twin && tracks.iter().all(|t| t.is_some_and(|t| t.is_like(&track))) =>
            {
                Ok(Site::passes(track, track.axis + usize::from(stack.axis <= track.axis)))
            }
            _ => Err(self.no("stacks it with values that are not of the cache")),
        }
    }

    /// A slice that leaves the keys whole; of grown values, one that drops columns before or behind them.
    fn slice(&self, track: Track) -> Verdict {
        let f = self.f;
        let slice = views::Slice::of(f, self.op).ok_or_else(|| self.no("has bounds that are not constant"))?;
        let own = &slice.axes[track.axis];
        let computed = slice.axes.iter().any(|a| a.begin.is_none());
        if own.squeeze || computed || ["begin", "end"].iter().any(|p| f.ints(self.op, p).is_none()) {
            return Err(self.no("takes keys apart"));
        }
        let axis = track.axis - slice.axes[..track.axis].iter().filter(|a| a.squeeze).count();
        let size = &self.shape(slice.x)[track.axis];
        if takes_all(own, size) {
            return Ok(Site::passes(track, axis));
        }
        let Kind::Grown { before, after, phase } = track.kind else { return Err(self.no("takes keys apart")) };
        let dropped = match self.plan.windows[track.window].n.as_known() {
            Some(n) => dropped_of(own, before + n + after),
            None => dropped_as_spelled(f, self.op, track.axis, own),
        };
        let (first, last) = dropped.ok_or_else(|| self.no("takes keys apart"))?;
        let (Some(before), Some(after)) = (before.checked_sub(first), after.checked_sub(last)) else {
            return Err(self.no("takes keys apart"));
        };
        Ok((Action::Grow, Some(Track { axis, kind: Kind::Grown { before, after, phase }, ..track })))
    }
}

/// How many of so many columns a slice drops before and behind what it takes.
fn dropped_of(axis: &AxisSlice, columns: u64) -> Option<(u64, u64)> {
    let begin = axis.begin.filter(|_| axis.stride == 1)?;
    Some((begin, columns.checked_sub(begin + axis.extent.as_ref()?.as_known()?)?))
}

/// How many columns a slice drops before and behind what it takes, where it says so whatever their number.
pub(super) fn dropped_as_spelled(f: &Function, op: OpId, axis: usize, slice: &AxisSlice) -> Option<(u64, u64)> {
    let begin = slice.begin.filter(|_| slice.stride == 1)?;
    let open = f.ints(op, "end_mask").is_some_and(|mask| mask.get(axis) == Some(&1));
    let end = *f.ints(op, "end")?.get(axis)?;
    (open || end < 0).then(|| (begin, if open { 0 } else { end.unsigned_abs() }))
}

fn is_twin(track: Option<Track>) -> bool {
    track.is_some_and(|t| t.kind == Kind::Twin)
}

/// Where an axis is after a reshape that keeps it an axis of its own.
fn reshaped_axis(from: &[Dim], to: &[Dim], axis: usize) -> Option<usize> {
    let size = from.get(axis).filter(|s| !s.is_one())?;
    let before = Dim::product(&from[..axis])?;
    let behind = Dim::product(&from[axis + 1..])?;
    (0..to.len()).find(|&i| {
        to[i] == *size
            && Dim::product(&to[..i]).as_ref() == Some(&before)
            && Dim::product(&to[i + 1..]).as_ref() == Some(&behind)
    })
}

/// What an axis of a product's operand is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    Batch,
    Summed,
    /// This axis of the result, which the other operand does not have.
    Out(usize),
}

/// The operands of a product and what their axes are.
pub(super) struct Roles {
    pub(super) x: ValueId,
    pub(super) y: ValueId,
    of_x: Vec<Role>,
    of_y: Vec<Role>,
}

impl Roles {
    fn of(f: &Function, op: OpId) -> Option<Roles> {
        match &**f.op(op).kind() {
            "matmul" => Roles::of_matmul(f, op),
            _ => Roles::of_einsum(f, op),
        }
    }

    fn of_matmul(f: &Function, op: OpId) -> Option<Roles> {
        let m = views::Matmul::of(f, op)?;
        let rank = f.tensor(*f.op(op).results().first()?)?.rank();
        let roles = |v: ValueId, own_last: bool, out: usize| {
            let own = f.tensor(v)?.rank();
            let mut roles = vec![Role::Batch; own.checked_sub(2)?];
            roles.extend(if own_last { [Role::Summed, Role::Out(out)] } else { [Role::Out(out), Role::Summed] });
            Some(roles)
        };
        let (row, column) = (rank.checked_sub(2)?, rank - 1);
        Some(Roles { x: m.x, y: m.y, of_x: roles(m.x, m.transpose_x, row)?, of_y: roles(m.y, !m.transpose_y, column)? })
    }

    fn of_einsum(f: &Function, op: OpId) -> Option<Roles> {
        let equation: String = f.str(op, "equation")?.chars().filter(|c| !c.is_whitespace()).collect();
        let (operands, out) = equation.split_once("->")?;
        let (a, b) = operands.split_once(',')?;
        let [x, y] = f.op(op).param("values") else { return None };
        let roles = |own: &str, other: &str| {
            let role = |c: char| match (out.chars().position(|o| o == c), other.contains(c)) {
                (Some(_), true) => Role::Batch,
                (Some(axis), false) => Role::Out(axis),
                (None, _) => Role::Summed,
            };
            own.chars().map(role).collect()
        };
        Some(Roles { x: x.as_value()?, y: y.as_value()?, of_x: roles(a, b), of_y: roles(b, a) })
    }
}
