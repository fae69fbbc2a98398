//! Writing the updates.

use std::collections::BTreeMap;

use crate::analysis::layout::Layouts;
use crate::analysis::spelling::{self, repeats_only, spell};
use crate::analysis::state::{Access, States, Update};
use crate::ir::{DType, Dim, Function, Literal, OpId, Operand, TensorType, Use, ValueId};
use crate::opset::effect_of;
use crate::rewrite::{Input, NoMatch, Patch, PatchError, Ref, Transaction};

use super::forms::{Found, New, Place};
use super::runs::Start;

/// Where boxes begin and end, which updates at one position share.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    known: BTreeMap<(Start, u64, usize, usize), (ValueId, ValueId)>,
}

/// How a state is written with the result of an update.
pub(super) struct Written {
    write: OpId,
    state: ValueId,
    /// What else reads the result: it reads the state instead.
    others: Vec<Use>,
    /// Whether some of that comes before the write, which therefore moves up to the update.
    moves: bool,
}

/// How the result of an update is written to a state; `None` when it is not.
pub(super) fn written(f: &Function, states: &States, found: &Found) -> Result<Option<Written>, NoMatch> {
    let Some((write, whole)) = write_of(f, states, found.result) else { return Ok(None) };
    let chain = states.chain_of(write).ok_or(NoMatch::UNRELATED)?;
    if chain.elsewhere.is_some() {
        return Err(NoMatch::because("the state is used in a nested block")
            .remedy("the state is read and written in the function's own block"));
    }
    let version = chain.accesses.iter().find_map(|a| match a {
        Access::Write { op, version, .. } if *op == write => version.checked_sub(1),
        _ => None,
    });
    let Some((read, _)) = chain.read_of(found.old).filter(|&(_, of)| Some(of) == version) else {
        return Err(NoMatch::because("what is written does not keep the rest of what the state holds")
            .remedy("the state is read after the write before, and updated"));
    };
    let within = |from: OpId, op: OpId| f.comes_before(from, op) && f.comes_before(op, write);
    if let Some(op) = f.ops(f.body()).find(|&op| within(read, op) && effect_of(f, op).is_unknown()) {
        return Err(NoMatch::because(format!("{} may write the state in between", f.describe(op)))
            .remedy("every op between the read and the write is known"));
    }
    let is_write = |u: &Use| u.op() == Some(write) || u.op().is_some() && u.op() == whole.map(|u| u.op);
    let others: Vec<Use> = f.value(found.result).uses().iter().copied().filter(|u| !is_write(u)).collect();
    let early = |u: &Use| {
        let user = u.op().and_then(|op| f.ancestor_in(op, f.body()));
        user.is_some_and(|user| f.comes_before(user, write))
    };
    let moves = others.iter().any(early);
    // The read of an update of everything goes with it.
    let goes = |op: OpId| whole.is_some_and(|u| u.read == op) && f.users(f.op(op).results()[0]).len() == 1;
    let in_the_way = chain.accesses.iter().map(Access::op).find(|&op| within(found.op, op) && !goes(op));
    match in_the_way.filter(|_| moves) {
        Some(op) => Err(NoMatch::because(format!("{} stands between the update and its write", f.describe(op)))
            .remedy("the updated cache is written before it is read again")),
        None => Ok(Some(Written { write, state: chain.state, others, moves })),
    }
}

/// The write of a value, directly or by an update of all of the state.
fn write_of<'s>(f: &Function, states: &'s States, v: ValueId) -> Option<(OpId, Option<&'s Update>)> {
    states.chains().iter().flat_map(|c| c.writes()).find_map(|(write, data, update)| {
        if data == v {
            return Some((write, None));
        }
        let update = update.filter(|u| u.value == v && u.region.0.iter().all(|s| s.whole))?;
        (f.value(data).uses().len() == 1 && f.ty(data) == f.ty(v)).then_some((write, Some(update)))
    })
}

/// Puts a `slice_update` in the place of what was found.
pub(super) fn emit(
    f: &mut Function,
    found: &Found,
    written: Option<&Written>,
    bounds: &mut Bounds,
) -> Result<(), PatchError> {
    let new = repeated_once(f, found);
    let mut t = Transaction::begin(f);
    let mut known = bounds.known.clone();
    let limits = match found.place {
        Place::BoxOf(_) => None,
        Place::Rows { axis, start, count } => {
            let rank = t.tensor(found.result).map_or(0, TensorType::rank);
            let key = (start, count, axis, rank);
            let shared = known.get(&key).copied().filter(|(b, e)| is_there(&t, *b) && is_there(&t, *e));
            let limits = match (start.at, shared) {
                (None, _) | (_, Some(_)) => shared,
                (Some(at), None) => Some(run_time_bounds(&mut t, found.op, at, key)?),
            };
            limits.map(|l| known.insert(key, l));
            limits
        }
    };
    match written {
        None => plain(&mut t, found, &new, limits)?,
        Some(w) => to_state(&mut t, found, &new, limits, w)?,
    }
    t.erase_dead([found.result]);
    t.commit()?;
    bounds.known = known;
    Ok(())
}

fn is_there(f: &Function, v: ValueId) -> bool {
    f.producer(v).is_some_and(|op| f.is_live(op))
}

fn stale(what: &str) -> PatchError {
    PatchError::Stale(what.into())
}

/// The result becomes a `slice_update` of the old content.
fn plain(t: &mut Transaction<'_>, found: &Found, new: &Source, limits: Limits) -> Result<(), PatchError> {
    let mut patch = Patch::before(found.op);
    let name = t.value(found.result).name().to_string();
    let old = Ref::Value(found.old);
    let updated = slice_update(t, &mut patch, found, new, limits, old, &name).ok_or_else(|| stale("the update"))?;
    let updated = t.insert(&patch, &updated)?;
    let uses = t.value(found.result).uses().to_vec();
    redirect(t, found.result, uses, updated)
}

/// The state is read, updated and written without anything in between, and what else reads the result reads it back.
fn to_state(
    t: &mut Transaction<'_>,
    found: &Found,
    new: &Source,
    limits: Limits,
    w: &Written,
) -> Result<(), PatchError> {
    let anchor = if w.moves { found.op } else { w.write };
    let ty = t.tensor(found.result).cloned().ok_or_else(|| stale("the cache"))?;
    let name = t.value(found.result).name().to_string();
    let mut patch = Patch::before(anchor);
    let rest = patch.op("read_state", format!("{name}_rest"), [("input", w.state)], ty.clone());
    let updated = slice_update(t, &mut patch, found, new, limits, rest, &format!("{name}_written"))
        .ok_or_else(|| stale("the update"))?;
    let updated = t.insert(&patch, &updated)?;
    let overwritten = t.op(w.write).value("data");
    t.set_param(w.write, "data", vec![Operand::Value(updated)])?;
    t.erase_dead(overwritten.filter(|&v| v != found.result));
    let mut patch = Patch::before(anchor);
    let now = patch.op("read_state", name.clone(), [("input", w.state)], ty);
    if !w.others.is_empty() {
        let now = t.insert_behind(w.write, &patch, &now)?;
        redirect(t, found.result, w.others.clone(), now)?;
    } else if w.moves {
        return Err(stale("a reader"));
    }
    Ok(())
}

/// Makes these uses of a value read another, which takes the name.
fn redirect(t: &mut Transaction<'_>, from: ValueId, uses: Vec<Use>, to: ValueId) -> Result<(), PatchError> {
    t.move_name(from, to);
    uses.into_iter().try_for_each(|u| t.set_use(u, to))
}

type Limits = Option<(ValueId, ValueId)>;

/// `begin` and `end` of rows at a position that only running the program tells.
fn run_time_bounds(
    t: &mut Transaction<'_>,
    before: OpId,
    at: ValueId,
    (start, count, axis, rank): (Start, u64, usize, usize),
) -> Result<(ValueId, ValueId), PatchError> {
    let mut patch = Patch::before(before);
    let name = t.value(at).name().to_string();
    let one = TensorType::fixed(DType::I32, &[1]);
    let mut p = patch.reshape(t, at, &format!("{name}_row"), &[Dim::known(1)]).ok_or_else(|| stale("the position"))?;
    if *t.ty(at) == one.clone().into() {
        (patch, p) = (Patch::before(before), Ref::Value(at));
    }
    if patch.dtype(t, &p) != Some(DType::I32) {
        let to = Input::Const(Literal::string("int32"));
        p = patch.op("cast", format!("{name}_row"), [("x", p.into()), ("dtype", to)], one.clone());
    }
    let plus = |patch: &mut Patch, p: Ref, by: i64, what: &str| match by {
        0 => p,
        by => {
            let by = Input::Const(Literal::ints(&[by]));
            patch.op("add", format!("{name}_{what}"), [("x", p.into()), ("y", by)], one.clone())
        }
    };
    let count = i64::try_from(count).map_err(|_| stale("the number of rows"))?;
    let begin = plus(&mut patch, p, start.plus, "row");
    let end = plus(&mut patch, begin.clone(), count, "end");
    let refs = [
        patch.placed(format!("{name}_begin"), begin, axis, rank),
        patch.placed(format!("{name}_until"), end, axis, rank),
    ];
    match t.insert_many(&patch, &refs)?[..] {
        [begin, end] => Ok((begin, end)),
        _ => Err(stale("the bounds")),
    }
}

/// What is written, made out before anything is changed.
enum Source {
    /// A value, or a view of it, of the update's size but for broadcasting.
    View(ValueId, Vec<spelling::Step>),
    /// The rows of a longer value at the place.
    Among(ValueId),
}

/// A value that repeats its only row along the rows, taken once.
fn repeated_once(f: &Function, found: &Found) -> Source {
    let (v, axis) = match (found.new, found.place) {
        (New::Among(v), Place::Rows { axis, .. }) => (v, axis),
        (New::Rows(v) | New::Among(v), _) => return Source::View(v, vec![]),
    };
    let rank = |v: ValueId| f.tensor(v).map_or(0, TensorType::rank);
    let once = || {
        let axis = (axis + rank(v)).checked_sub(rank(found.result))?;
        let mut to = f.tensor(v)?.shape.to_vec();
        to[axis] = Dim::known(1);
        let layouts = Layouts::new(f).of(v);
        let views = layouts.iter().filter(|l| repeats_only(&l.axes[axis])).filter_map(|l| {
            let mut once = l.clone();
            once.axes[axis].clear();
            let steps = spell(&f.tensor(l.source)?.shape, &once, &to)?;
            Some((l.source, steps))
        });
        views.min_by_key(|(_, steps)| spelling::cost(steps))
    };
    once().map_or(Source::Among(v), |(source, steps)| Source::View(source, steps))
}

fn slice_update(
    f: &Function,
    patch: &mut Patch,
    found: &Found,
    new: &Source,
    limits: Limits,
    old: Ref,
    name: &str,
) -> Option<Ref> {
    let ty = f.tensor(found.result)?.clone();
    let bounds = match found.place {
        Place::BoxOf(slice) => f
            .op(slice)
            .params()
            .filter(|(param, _)| **param != *"x")
            .filter_map(|(param, bound)| Some((param.to_string(), Input::like(f, bound.first()?))))
            .collect(),
        Place::Rows { axis, start, count } => rows_bounds(ty.rank(), axis, start, count, limits)?,
    };
    let update = match found.place {
        Place::BoxOf(slice) => {
            let Source::View(v, _) = new else { return None };
            let shape = f.tensor(*f.op(slice).results().first()?)?.shape.to_vec();
            match f.tensor(*v)?.shape[..] == *shape {
                true => Ref::Value(*v),
                false => patch.reshape(f, *v, &format!("{name}_rows"), &shape)?,
            }
        }
        Place::Rows { axis, count, .. } => {
            let mut shape = ty.shape.to_vec();
            shape[axis] = Dim::known(count);
            match new {
                Source::Among(v) => among(f, patch, *v, &bounds, axis, ty.rank(), &shape, name)?,
                _ => fitted(f, patch, new, &shape, name)?,
            }
        }
    };
    let inputs = [("x".to_string(), Input::One(old)), ("update".to_string(), Input::One(update))];
    Some(patch.op("slice_update", name, inputs.into_iter().chain(bounds), ty))
}

type Params = Vec<(String, Input)>;

/// Bounds of rows: all of every other axis.
fn rows_bounds(rank: usize, axis: usize, start: Start, count: u64, limits: Limits) -> Option<Params> {
    let at = |n: i64| {
        let mut v = vec![0; rank];
        v[axis] = n;
        Input::Const(Literal::ints(&v))
    };
    let (begin, end) = match limits {
        Some((begin, end)) => (begin.into(), end.into()),
        None => (at(start.plus), at(start.plus.checked_add(i64::try_from(count).ok()?)?)),
    };
    let others: Vec<bool> = (0..rank).map(|i| i != axis).collect();
    let mask = Input::Const(Literal::bools(&others));
    let params = [("begin", begin), ("end", end), ("begin_mask", mask.clone()), ("end_mask", mask)];
    Some(params.into_iter().map(|(name, input)| (name.to_string(), input)).collect())
}

/// A value as an update of this shape.
fn fitted(f: &Function, patch: &mut Patch, new: &Source, shape: &[Dim], name: &str) -> Option<Ref> {
    let Source::View(v, steps) = new else { return None };
    let name = format!("{name}_rows");
    let r = patch.steps(f, *v, &name, steps)?;
    let ty = patch.type_of(f, &r)?;
    let of_one_size = Dim::product(&ty.shape).is_some() && Dim::product(&ty.shape) == Dim::product(shape);
    if *ty.shape == *shape {
        return Some(r);
    }
    // Only axes of size one differ where nothing is broadcast.
    let long = |s: &[Dim]| s.iter().filter(|d| !d.is_one()).cloned().collect::<Vec<_>>();
    if of_one_size && long(&ty.shape) == long(shape) {
        return patch.reshape(f, r, &name, shape);
    }
    widened(f, patch, r, &ty, shape, &name)
}

/// A value broadcast to a shape.
fn widened(f: &Function, patch: &mut Patch, r: Ref, ty: &TensorType, shape: &[Dim], name: &str) -> Option<Ref> {
    let mut own = vec![Dim::known(1); shape.len().checked_sub(ty.rank())?];
    own.extend(ty.shape.iter().cloned());
    let reps: Vec<i64> = own
        .iter()
        .zip(shape)
        .map(|(from, to)| match from == to {
            true => Some(1),
            false => from.is_one().then(|| i64::try_from(to.as_known()?).ok())?,
        })
        .collect::<Option<_>>()?;
    let r = if own.len() == ty.rank() { r } else { patch.reshape(f, r, name, &own)? };
    let inputs = [("x", Input::One(r)), ("reps", Input::Const(Literal::ints(&reps)))];
    Some(patch.op("tile", name, inputs, TensorType::new(ty.dtype, shape.iter().cloned())))
}

/// The rows of a value as long as the cache that are at the place.
#[allow(clippy::too_many_arguments)]
fn among(
    f: &Function,
    patch: &mut Patch,
    v: ValueId,
    bounds: &Params,
    axis: usize,
    rank: usize,
    shape: &[Dim],
    name: &str,
) -> Option<Ref> {
    let ty = f.tensor(v)?.clone();
    let mut whole = vec![Dim::known(1); rank.checked_sub(ty.rank())?];
    whole.extend(ty.shape.iter().cloned());
    let full =
        if whole.len() == ty.rank() { Ref::Value(v) } else { patch.reshape(f, v, &format!("{name}_all"), &whole)? };
    whole[axis] = shape[axis].clone();
    let taken = TensorType::new(ty.dtype, whole);
    let begin = bounds.iter().find(|(p, _)| p == "begin")?.1.clone();
    // Bounds of other axes are open.
    let size: Vec<i64> =
        taken.shape.iter().map(|d| d.as_known().map_or(Some(-1), |n| i64::try_from(n).ok())).collect::<Option<_>>()?;
    let inputs = [("x", Input::One(full)), ("begin", begin), ("size", Input::Const(Literal::ints(&size)))];
    let rows = patch.op("slice_by_size", format!("{name}_rows"), inputs, taken.clone());
    match *taken.shape == *shape {
        true => Some(rows),
        false => widened(f, patch, rows, &taken, shape, &format!("{name}_rows")),
    }
}
