//! Integers and masks that follow from one position.
//!
//! A *run* is a tensor of integers `start + i`, where `i` is the index along one axis; without an axis, all elements are the
//! start. A *hot* value is 1 (or true) at rows `start … start + count − 1` of an axis and 0 elsewhere, or the other way round.
//! Both are found where they are made and followed through views by their layouts.

use crate::analysis::layout::{Layout, Stride, normalise};
use crate::ir::{DType, Dim, Function, OpId, Operand, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::Context;

/// Largest constant that is looked at.
const MAX_CONSTANT: u64 = 1 << 16;

/// A position: an element that only running the program tells, plus a constant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct Start {
    /// An integer tensor of one element; zero when there is none.
    pub(super) at: Option<ValueId>,
    pub(super) plus: i64,
}

impl Start {
    fn shifted(self, by: i64) -> Option<Start> {
        Some(Start { plus: self.plus.checked_add(by)?, ..self })
    }
}

/// Integers that count up along one axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    pub(super) axis: Option<usize>,
    pub(super) start: Start,
    /// Every type on the way holds the integers up to this one exactly.
    pub(super) exact: u64,
}

/// What is 1 at some rows of an axis and 0 elsewhere, or the other way round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hot {
    pub(super) axis: usize,
    /// The axis along which the row moves on, one each: a one-hot matrix.
    pub(super) across: Option<usize>,
    pub(super) start: Start,
    pub(super) count: u64,
    /// Whether the rows are those that are 1.
    pub(super) inside: bool,
}

/// The integers of an operand, if they are a run.
pub(super) fn run(cx: &Context<'_>, operand: &Operand) -> Option<Run> {
    let f = cx.f;
    let Some(v) = operand.as_value() else { return constant_run(f, operand, f.operand_type(operand).as_tensor()?) };
    let layouts = cx.layouts.of(v);
    let found = layouts.iter().find_map(|l| {
        let made = made_run(cx, l.source)?;
        let axis = match made.axis {
            Some(axis) => Some(*through(f, l, &[axis])?.first()?),
            None => None,
        };
        Some(Run { axis, exact: made.exact.min(exact_below(f.tensor(v)?.dtype)?), ..made })
    });
    found.or_else(|| {
        // An element, under whatever view: the same wherever it is used.
        let single = |l: &&Layout| f.tensor(l.source).is_some_and(|t| t.dtype.is_int() && t.volume() == Some(1));
        let element = layouts.iter().rev().find(single)?.source;
        let exact = exact_below(f.tensor(element)?.dtype)?;
        Some(Run { axis: None, start: Start { at: Some(element), plus: 0 }, exact })
    })
}

/// The integers that an op makes.
fn made_run(cx: &Context<'_>, v: ValueId) -> Option<Run> {
    let f = cx.f;
    let op = f.producer(v)?;
    let ty = f.tensor(v)?;
    let made = match &**f.op(op).kind() {
        "const" => constant_run(f, &Operand::Value(v), ty)?,
        // A constant that is bound in place is no value, of which there would be layouts.
        "reshape" | "expand_dims" | "squeeze" => {
            constant_run(f, f.op(op).param("x").first().filter(|x| x.as_value().is_none())?, ty)?
        }
        "range_1d" => {
            let first = |name: &str| f.op(op).param(name).first();
            let start = run(cx, first("start")?).filter(|r| r.axis.is_none())?;
            (number(f, first("step")?)? == 1.0)
                .then_some(Run { axis: (!ty.shape[0].is_one()).then_some(0), ..start })?
        }
        "add" | "sub" => {
            let view = views::Binary::of(f, op)?;
            let (a, b) = (aligned(cx, &view.x, ty.rank())?, aligned(cx, &view.y, ty.rank())?);
            sum(a, b, f.op(op).kind() == "sub")?
        }
        "cast" => run(cx, &Operand::Value(views::Cast::of(f, op)?.x))?,
        _ => return None,
    };
    Some(Run { exact: made.exact.min(exact_below(ty.dtype)?), ..made })
}

fn sum(a: Run, b: Run, minus: bool) -> Option<Run> {
    let exact = a.exact.min(b.exact);
    let constant = |r: &Run| r.axis.is_none() && r.start.at.is_none();
    if minus {
        let start = a.start.shifted(b.start.plus.checked_neg()?)?;
        return constant(&b).then_some(Run { start, exact, ..a });
    }
    let (axis, at) = match (a.axis, b.axis, a.start.at, b.start.at) {
        (Some(_), Some(_), ..) | (_, _, Some(_), Some(_)) => return None,
        (axis, other, at, also) => (axis.or(other), at.or(also)),
    };
    Some(Run { axis, start: Start { at, plus: a.start.plus.checked_add(b.start.plus)? }, exact })
}

/// The run of an operand that is broadcast to `rank` axes.
fn aligned(cx: &Context<'_>, operand: &Operand, rank: usize) -> Option<Run> {
    let missing = rank.checked_sub(cx.f.operand_type(operand).as_tensor()?.rank())?;
    let run = run(cx, operand)?;
    Some(Run { axis: run.axis.map(|a| a + missing), ..run })
}

/// Constants that count up along their only axis, or are all equal, as a tensor of this type.
fn constant_run(f: &Function, operand: &Operand, ty: &TensorType) -> Option<Run> {
    ty.volume().filter(|n| (1..=MAX_CONSTANT).contains(n))?;
    let values = integers(f, operand)?;
    let start = Start { at: None, plus: *values.first()? };
    let exact = exact_below(ty.dtype)?;
    if values.iter().all(|&n| n == start.plus) {
        return Some(Run { axis: None, start, exact });
    }
    let long: Vec<usize> = (0..ty.rank()).filter(|&i| !ty.shape[i].is_one()).collect();
    let [axis] = long[..] else { return None };
    let counts = values.windows(2).all(|w| w[0].checked_add(1) == Some(w[1]));
    counts.then_some(Run { axis: Some(axis), start, exact })
}

/// The elements of a constant that are all integers.
fn integers(f: &Function, operand: &Operand) -> Option<Vec<i64>> {
    if f.operand_type(operand).as_tensor()?.dtype.is_int() {
        return f.operand_ints(operand);
    }
    let floats = f.operand_literal(operand)?.to_floats(&**f.weights()).ok()?;
    // Exact up to here in every type that holds them.
    let whole = |x: f64| (x.fract() == 0.0 && x.abs() < 1e9).then_some(x as i64);
    floats.into_iter().map(whole).collect()
}

/// A constant whose elements are all this number.
pub(super) fn number(f: &Function, operand: &Operand) -> Option<f64> {
    let ty = f.operand_type(operand).as_tensor()?;
    ty.volume().filter(|n| (1..=MAX_CONSTANT).contains(n))?;
    let literal = f.operand_literal(operand)?;
    let values = match ty.dtype.is_float() {
        true => literal.to_floats(&**f.weights()).ok()?,
        false => f.operand_ints(operand)?.into_iter().map(|n| n as f64).collect(),
    };
    let first = *values.first()?;
    values.iter().all(|&n| n == first).then_some(first)
}

/// A bound below which a type holds every integer that is not negative.
fn exact_below(dtype: DType) -> Option<u64> {
    Some(match dtype {
        DType::F16 => 1 << 11,
        DType::F32 => 1 << 24,
        DType::I8 => i8::MAX as u64,
        DType::U8 => u8::MAX as u64,
        DType::I16 => i16::MAX as u64,
        DType::U16 => u16::MAX as u64,
        DType::I32 => i32::MAX as u64,
        _ => return None,
    })
}

/// Where these axes of a layout's source are in the value that views it, if all that the value does besides is repeat.
fn through(f: &Function, layout: &Layout, axes: &[usize]) -> Option<Vec<usize>> {
    let shape = &f.tensor(layout.source)?.shape;
    let own = Layout::identity(layout.source, shape)?;
    if *layout == own {
        return Some(axes.to_vec());
    }
    let of_source: Vec<&Stride> =
        axes.iter().map(|&a| own.axes.get(a)?.first().map(|d| &d.stride)).collect::<Option<_>>()?;
    let mut places = vec![None; axes.len()];
    for (i, digits) in layout.axes.iter().enumerate() {
        let moving: Vec<&Stride> = digits.iter().filter(|d| !d.repeats()).map(|d| &d.stride).collect();
        match moving[..] {
            [] => {}
            [stride] if digits.len() == 1 => match of_source.iter().position(|s| *s == stride) {
                Some(at) => places[at] = Some(i),
                None => return None,
            },
            _ => return None,
        }
    }
    layout.offset.is_zero().then(|| places.into_iter().collect())?
}

/// What an operand is hot at.
pub(super) fn hot(cx: &Context<'_>, operand: &Operand) -> Option<Hot> {
    let layouts = cx.layouts.of(operand.as_value()?);
    layouts.iter().find_map(|l| {
        let made = made_hot(cx, l.source)?;
        let axes: Vec<usize> = [made.axis].into_iter().chain(made.across).collect();
        let places = through(cx.f, l, &axes)?;
        Some(Hot { axis: *places.first()?, across: places.get(1).copied(), ..made })
    })
}

fn made_hot(cx: &Context<'_>, v: ValueId) -> Option<Hot> {
    let f = cx.f;
    let op = f.producer(v)?;
    let first = |name: &str| f.op(op).param(name).first();
    match &**f.op(op).kind() {
        kind @ ("equal" | "not_equal") => {
            let view = views::Binary::of(f, op)?;
            let shape = &f.tensor(v)?.shape;
            let (a, b) = (aligned(cx, &view.x, shape.len())?, aligned(cx, &view.y, shape.len())?);
            equality(a, b, shape).or_else(|| equality(b, a, shape)).map(|h| Hot { inside: kind == "equal", ..h })
        }
        "one_hot" => {
            let at = run(cx, first("indices")?)?;
            let value = |name: &str, default: f64| first(name).map_or(Some(default), |o| number(f, o));
            let shape = &f.tensor(v)?.shape;
            let axis = normalise(f.int(op, "axis").unwrap_or(-1), shape.len())?;
            let ones = value("on_value", 1.0)? == 1.0 && value("off_value", 0.0)? == 0.0;
            let across = at.axis.map(|a| a + usize::from(a >= axis));
            let count = across.map_or(Some(1), |a| shape[a].as_known())?;
            let exact = ones && !shape[axis].is_one() && at.exact >= shape[axis].as_known()?;
            exact.then_some(Hot { axis, across, start: at.start, count, inside: true })
        }
        "cast" => hot(cx, first("x")?),
        "logical_not" => hot(cx, first("x")?).map(Hot::flipped),
        "sub" => {
            let (one, of) = (first("x")?, first("y")?);
            let same = f.operand_type(of).as_tensor()?.rank() == f.tensor(v)?.rank();
            (number(f, one)? == 1.0 && same).then(|| hot(cx, of).map(Hot::flipped))?
        }
        "reduce_sum" => {
            let view = views::Reduce::of(f, op)?;
            let matrix = hot(cx, &Operand::Value(view.x)).filter(|h| h.inside)?;
            let &[summed] = &view.axes[..] else { return None };
            let single = || summed != matrix.axis && f.tensor(view.x).is_some_and(|t| t.shape[summed].is_one());
            if !matrix.across.map_or_else(single, |a| a == summed) {
                return None;
            }
            let axis = matrix.axis - usize::from(!view.keep_dims && summed < matrix.axis);
            Some(Hot { axis, across: None, ..matrix })
        }
        _ => None,
    }
}

impl Hot {
    fn flipped(self) -> Hot {
        Hot { inside: !self.inside, ..self }
    }
}

/// Rows that count from zero are equal to one position, or to one each along another axis.
fn equality(rows: Run, position: Run, shape: &[Dim]) -> Option<Hot> {
    let axis = rows.axis.filter(|&a| rows.start.at.is_none() && Some(a) != position.axis)?;
    let size = shape[axis].as_known()?;
    let count = position.axis.map_or(Some(1), |a| shape[a].as_known())?;
    let exact = rows.exact.min(position.exact) >= size.max(count);
    let start = position.start.shifted(rows.start.plus.checked_neg()?)?;
    (exact && rows.start.plus >= 0).then_some(Hot { axis, across: position.axis, start, count, inside: true })
}

/// The number of rows of an op's operand along an axis.
pub(super) fn rows(f: &Function, operand: &Operand, axis: usize) -> Option<u64> {
    f.operand_type(operand).as_tensor()?.shape.get(axis)?.as_known()
}

/// The op and its only result.
pub(super) fn result(f: &Function, op: OpId) -> Option<ValueId> {
    match f.op(op).results() {
        [one] => Some(*one),
        _ => None,
    }
}
