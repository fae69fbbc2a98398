//! The spellings of an update: which rows of what become what.

use crate::analysis::layout::normalise;
use crate::ir::{Function, OpId, Operand, Use, ValueId};
use crate::opset::views;
use crate::rewrite::{Context, Keeps, NoMatch};

use super::runs::{Hot, Run, Start, hot, number, result, rows, run};

/// An update of a box of a cache.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Found {
    pub(super) op: OpId,
    /// The updated cache.
    pub(super) result: ValueId,
    /// The cache before.
    pub(super) old: ValueId,
    pub(super) new: New,
    pub(super) place: Place,
    pub(super) form: &'static str,
    /// What differs although it is called bitwise.
    pub(super) hazard: Option<&'static str>,
}

/// What is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum New {
    /// A value with an element per row, or one for all.
    Rows(ValueId),
    /// The rows of a value as long as the cache that are at the place.
    Among(ValueId),
}

/// Where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// `count` rows from `start` on.
    Rows { axis: usize, start: Start, count: u64 },
    /// The box of this `slice_by_index`.
    BoxOf(OpId),
}

/// Bytes of the largest constant of element numbers that is read.
const MAX_NUMBERS: u64 = 1 << 24;

const SIGNS: &str = "the sign of zero and what is not finite are kept as they are, which arithmetic does not (A13)";

/// The update that an op is; `Err` with a reason when it writes a cache in a way that is not provable.
pub(super) fn find(cx: &Context<'_>, op: OpId) -> Result<Found, NoMatch> {
    let f = cx.f;
    let found = match &**f.op(op).kind() {
        "select" => select(cx, op),
        "add" => blend(cx, op),
        "scatter" => scatter(cx, op, "data"),
        "scatter_along_axis" => scatter_along_axis(cx, op),
        "scatter_nd" => scatter_nd(cx, op),
        "reshape" => flattened(cx, op),
        _ => Err(NoMatch::UNRELATED),
    }
    .map_err(|no| no.keeping(Keeps::StateOps))?;
    check(f, &found).map_err(|no| no.keeping(Keeps::StateOps))?;
    Ok(found)
}

/// What holds of every form.
fn check(f: &Function, found: &Found) -> Result<(), NoMatch> {
    if f.op(found.op).block() != f.body() {
        return Err(NoMatch::because("the update is in a nested block")
            .remedy("the cache is updated in the function's own block"));
    }
    if f.opset_version() < 8 {
        return Err(NoMatch::because(format!("{} has no slice_update", f.opset()))
            .remedy("the model is converted for iOS 18 or macOS 15 (CoreML8)"));
    }
    if let Place::Rows { axis, start, count } = found.place {
        let size = f.tensor(found.result).and_then(|t| t.shape.get(axis)?.as_known());
        let size = size.and_then(|n| i64::try_from(n).ok()).unwrap_or(i64::MAX);
        let end = i64::try_from(count).ok().and_then(|n| start.plus.checked_add(n));
        let inside = start.plus >= 0 && end.is_some_and(|end| end <= size);
        if start.at.is_none() && !inside || end.is_none() {
            return Err(NoMatch::because("the position is outside of the cache"));
        }
    }
    Ok(())
}

/// Whether an op makes a cache from one: `old` comes from a state or an input, and the result goes to a state or is returned.
fn updates(f: &Function, old: ValueId, result: ValueId) -> bool {
    f.ty(old) == f.ty(result) && comes_from_outside(f, old) && is_kept(f, result)
}

/// The parameter through which an op shows what it is given, in part or in another order.
fn shown(f: &Function, op: OpId) -> Option<ValueId> {
    match &**f.op(op).kind() {
        "identity" | "cast" | "reshape" | "expand_dims" | "squeeze" | "transpose" | "slice_by_index"
        | "slice_by_size" | "split" | "slice_update" => f.op(op).value("x"),
        "gather" => f.op(op).value("x").filter(|_| f.ints(op, "indices").is_some()),
        "scatter" | "scatter_nd" | "scatter_along_axis" => f.op(op).value("data"),
        _ => None,
    }
}

/// Whether a value is a view or part of what a state or an input holds, updated or not.
fn comes_from_outside(f: &Function, v: ValueId) -> bool {
    let steps = std::iter::successors(Some(v), |&v| shown(f, f.producer(v)?));
    let last = steps.last().unwrap_or(v);
    f.producer(last).is_none_or(|op| f.op(op).kind() == "read_state")
}

/// Whether a value becomes part of a state's content or of an output.
fn is_kept(f: &Function, v: ValueId) -> bool {
    let mut reached = vec![v];
    let mut at = 0;
    while at < reached.len() {
        let value = reached[at];
        for u in f.value(value).uses() {
            let Use::Op { op, .. } = *u else { return true };
            let further = match &**f.op(op).kind() {
                "write_state" => return true,
                "slice_update" | "concat" | "stack" | "select" | "add" | "mul" => true,
                _ => shown(f, op) == Some(value),
            };
            if further {
                reached.extend(f.op(op).results().iter().filter(|r| !reached.contains(r)).copied().collect::<Vec<_>>());
            }
        }
        at += 1;
    }
    false
}

/// `select(rows are at the position, new, old)`.
fn select(cx: &Context<'_>, op: OpId) -> Result<Found, NoMatch> {
    let f = cx.f;
    let (view, out) = both(views::Select::of(f, op), result(f, op))?;
    let pairs = [(&view.a, &view.b, true), (&view.b, &view.a, false)];
    let candidates: Vec<_> = pairs
        .into_iter()
        .filter_map(|(new, old, inside)| Some((new.as_value()?, old.as_value()?, inside)))
        .filter(|&(_, old, _)| updates(f, old, out))
        .collect();
    if candidates.is_empty() {
        return Err(NoMatch::UNRELATED);
    }
    let at = hot(cx, &view.cond).ok_or_else(|| unknown_rows(f, &view.cond))?;
    let place = place(f, &view.cond, &at, out)?;
    let found = candidates.into_iter().find(|&(.., inside)| inside == at.inside);
    let (new, old, _) = found.ok_or_else(|| NoMatch::because("the rows at the position keep what they hold"))?;
    Ok(Found { op, result: out, old, new: source(f, new, out, &place), place, form: "selected rows", hazard: None })
}

/// `old · (1 − m) + new · m`, or `old · (1 − row sums of P) + P · new`.
fn blend(cx: &Context<'_>, op: OpId) -> Result<Found, NoMatch> {
    let f = cx.f;
    let (view, out) = both(views::Binary::of(f, op), result(f, op))?;
    let (x, y) = both(view.x.as_value(), view.y.as_value())?;
    let mut refusal = NoMatch::UNRELATED;
    for (kept, added) in [(x, y), (y, x)] {
        for (old, mask, inverse) in kept_rows(f, kept) {
            if !updates(f, old, out) {
                continue;
            }
            match blended(cx, op, out, (old, &mask, inverse), added) {
                Ok(found) => return Ok(found),
                Err(no) => refusal = if refusal.reason().is_some() { refusal } else { no },
            }
        }
    }
    Err(refusal)
}

/// What `kept` keeps of a cache, with the mask that does so and whether its rows go: `old · m` or `old − old · m`.
fn kept_rows(f: &Function, kept: ValueId) -> Vec<(ValueId, Operand, bool)> {
    let Some(op) = f.producer(kept) else { return vec![] };
    let Some(view) = views::Binary::of(f, op) else { return vec![] };
    let (product, whole) = match &**f.op(op).kind() {
        "mul" => (Some(op), None),
        "sub" => (view.y.as_value().and_then(|v| f.producer(v)), view.x.as_value()),
        _ => (None, None),
    };
    factors(f, product)
        .into_iter()
        .filter_map(|(old, mask)| Some((old.as_value()?, mask)))
        .filter(|(old, _)| whole.is_none_or(|w| w == *old))
        .map(|(old, mask)| (old, mask, whole.is_some()))
        .collect()
}

/// Both ways to see a product.
fn factors(f: &Function, op: Option<OpId>) -> Vec<(Operand, Operand)> {
    let product = op.filter(|&op| f.op(op).kind() == "mul").and_then(|op| views::Binary::of(f, op));
    product.map_or(vec![], |p| vec![(p.x.clone(), p.y.clone()), (p.y, p.x)])
}

fn blended(
    cx: &Context<'_>,
    op: OpId,
    out: ValueId,
    (old, mask, inverse): (ValueId, &Operand, bool),
    added: ValueId,
) -> Result<Found, NoMatch> {
    let f = cx.f;
    let kept = hot(cx, mask).ok_or_else(|| unknown_rows(f, mask))?;
    let goes = place(f, mask, &kept, out)?;
    if kept.inside != inverse {
        return Err(NoMatch::because("the rows that are kept are those at the position"));
    }
    let apart = || {
        NoMatch::because("the rows that are cleared are not provably those that are added")
            .remedy("both masks come from the same position")
    };
    let producer = f.producer(added).ok_or_else(apart)?;
    if let Some(product) = views::Matmul::of(f, producer) {
        let matrix = Operand::Value(product.x);
        let rank = f.tensor(product.x).map_or(0, |t| t.rank());
        let at = hot(cx, &matrix).filter(|h| h.inside).ok_or_else(|| unknown_rows(f, &matrix))?;
        let (rows, columns) = if product.transpose_x { (1, 2) } else { (2, 1) };
        let single =
            || rank.checked_sub(columns).and_then(|i| f.tensor(product.x)?.shape.get(i)?.as_known()) == Some(1);
        let is_matrix = at.axis + rows == rank && at.across.map_or_else(single, |a| a + columns == rank);
        let axis = f.tensor(out).and_then(|t| t.rank().checked_sub(2));
        let here = axis.map(|axis| Place::Rows { axis, start: at.start, count: at.count });
        if !is_matrix || product.transpose_y || here != Some(goes) {
            return Err(apart());
        }
        let new = New::Rows(product.y);
        return Ok(Found {
            op,
            result: out,
            old,
            new,
            place: goes,
            form: "rows by a one-hot matrix",
            hazard: Some(SIGNS),
        });
    }
    let new = factors(f, Some(producer)).into_iter().find_map(|(new, mask)| {
        let at = hot(cx, &mask).filter(|h| h.inside)?;
        (place(f, &mask, &at, out).ok()? == goes).then(|| new.as_value())?
    });
    let new = source(f, new.ok_or_else(apart)?, out, &goes);
    Ok(Found { op, result: out, old, new, place: goes, form: "rows by a one-hot mask", hazard: Some(SIGNS) })
}

/// The rows of the cache that a mask, which is broadcast to it, is about.
fn place(f: &Function, mask: &Operand, at: &Hot, out: ValueId) -> Result<Place, NoMatch> {
    let ranks = f.operand_type(mask).as_tensor().zip(f.tensor(out)).map(|(m, o)| (m.rank(), o.rank()));
    let axis = ranks.and_then(|(m, o)| (at.axis + o).checked_sub(m));
    match (axis, at.across) {
        (Some(axis), None) => Ok(Place::Rows { axis, start: at.start, count: at.count }),
        _ => Err(unknown_rows(f, mask)),
    }
}

/// What is written, given what is selected or masked.
fn source(f: &Function, new: ValueId, out: ValueId, place: &Place) -> New {
    let Place::Rows { axis, .. } = *place else { return New::Rows(new) };
    let rank = |v: ValueId| f.tensor(v).map_or(0, |t| t.rank());
    let long = (axis + rank(new)).checked_sub(rank(out)).and_then(|a| f.tensor(new)?.shape.get(a));
    match long.is_some_and(|d| !d.is_one()) {
        true => New::Among(new),
        false => New::Rows(new),
    }
}

/// `scatter(data = old, indices = positions, updates = new, axis)`.
fn scatter(cx: &Context<'_>, op: OpId, data: &str) -> Result<Found, NoMatch> {
    let (old, out, indices) = scattered(cx.f, op, data)?;
    let rank = cx.f.tensor(old).map_or(0, |t| t.rank());
    let axis = normalise(cx.f.int(op, "axis").unwrap_or(0), rank).ok_or(NoMatch::UNRELATED)?;
    in_rows(cx, op, (old, out), &indices, axis, None)
}

/// As `scatter` along the first axis, where coordinates are of one number.
fn scatter_nd(cx: &Context<'_>, op: OpId) -> Result<Found, NoMatch> {
    let (old, out, indices) = scattered(cx.f, op, "data")?;
    let coordinates = cx.f.operand_type(&indices).as_tensor().and_then(|t| t.shape.last()?.as_known());
    if coordinates != Some(1) {
        return Err(NoMatch::because("the coordinates name more than one axis").remedy("rows are named by one number"));
    }
    in_rows(cx, op, (old, out), &indices, 0, None)
}

/// `scatter_along_axis`, where the index does not depend on the other axes.
fn scatter_along_axis(cx: &Context<'_>, op: OpId) -> Result<Found, NoMatch> {
    let (old, out, indices) = scattered(cx.f, op, "data")?;
    let rank = cx.f.tensor(old).map_or(0, |t| t.rank());
    let axis = normalise(cx.f.int(op, "axis").unwrap_or(0), rank).ok_or(NoMatch::UNRELATED)?;
    let shapes = cx.f.tensor(old).zip(cx.f.operand_type(&indices).as_tensor());
    let whole = |i: usize| shapes.is_some_and(|(d, x)| i == axis || d.shape.get(i) == x.shape.get(i));
    if !(0..rank).all(whole) {
        return Err(NoMatch::because("only a part of each row is written"));
    }
    in_rows(cx, op, (old, out), &indices, axis, Some(axis))
}

/// The operands of a scatter that replaces what is there.
fn scattered(f: &Function, op: OpId, data: &str) -> Result<(ValueId, ValueId, Operand), NoMatch> {
    let (old, out) = both(f.op(op).value(data), result(f, op))?;
    // A flattened cache is looked at where it gets its shape back.
    let is_flat =
        f.tensor(old).is_some_and(|t| t.rank() == 1) && f.users(out).iter().all(|&u| f.op(u).kind() == "reshape");
    if !updates(f, old, out) || is_flat && !f.is_output(out) {
        return Err(NoMatch::UNRELATED);
    }
    if f.str(op, "mode").unwrap_or("add") != "update" {
        return Err(NoMatch::because("the scatter does not replace what is there").remedy("its mode is `update`"));
    }
    let indices = f.op(op).param("indices").first().cloned().ok_or(NoMatch::UNRELATED)?;
    Ok((old, out, indices))
}

/// A scatter of rows; their positions count along axis `along` of the indices, or along the only one they have.
fn in_rows(
    cx: &Context<'_>,
    op: OpId,
    (old, out): (ValueId, ValueId),
    indices: &Operand,
    axis: usize,
    along: Option<usize>,
) -> Result<Found, NoMatch> {
    let f = cx.f;
    let places = run(cx, indices).ok_or_else(|| unknown_rows(f, indices))?;
    let new = f.op(op).value("updates").ok_or(NoMatch::UNRELATED)?;
    let shape = &f.operand_type(indices).as_tensor().ok_or(NoMatch::UNRELATED)?.shape;
    let long = |i: &usize| !shape[*i].is_one() && along.is_none_or(|a| a == *i);
    let counts: Vec<usize> = (0..shape.len()).filter(long).collect();
    let count = match (&counts[..], places) {
        ([], Run { axis: None, .. }) => Some(1),
        ([only], Run { axis: Some(axis), .. }) if axis == *only => rows(f, indices, axis),
        _ => None,
    };
    let size = f.tensor(old).and_then(|t| t.shape.get(axis)?.as_known());
    let count = count.filter(|_| size.is_some_and(|n| places.exact >= n)).ok_or_else(|| unknown_rows(f, indices))?;
    let place = Place::Rows { axis, start: places.start, count };
    Ok(Found { op, result: out, old, new: New::Rows(new), place, form: "scattered rows", hazard: None })
}

/// `reshape(scatter(reshape(old), reshape(slice(0 … n − 1)), reshape(new)))`: elements by their positions in the flat cache.
fn flattened(cx: &Context<'_>, op: OpId) -> Result<Found, NoMatch> {
    let f = cx.f;
    let (flat, out) = both(f.op(op).value("x"), result(f, op))?;
    let scatter =
        f.producer(flat).filter(|&p| matches!(&**f.op(p).kind(), "scatter" | "scatter_along_axis" | "scatter_nd"));
    let scatter = scatter.ok_or(NoMatch::UNRELATED)?;
    let behind = |name: &str| {
        let v = f.op(scatter).value(name)?;
        let view = f.producer(v).filter(|&p| f.op(p).kind() == "reshape")?;
        f.op(view).value("x")
    };
    let old = behind("data").filter(|&old| updates(f, old, out)).ok_or(NoMatch::UNRELATED)?;
    let unknown = || f.op(scatter).param("indices").first().map_or(NoMatch::UNRELATED, |i| unknown_rows(f, i));
    if f.str(scatter, "mode") != Some("update") || f.tensor(flat).is_none_or(|t| t.rank() != 1) {
        return Err(unknown());
    }
    let slice = behind("indices")
        .and_then(|v| f.producer(v))
        .filter(|&p| f.op(p).kind() == "slice_by_index")
        .ok_or_else(unknown)?;
    let numbers = f.op(slice).param("x").first().ok_or_else(unknown)?;
    if !counts_elements(cx, numbers, old) {
        return Err(unknown());
    }
    let new = behind("updates").or(f.op(scatter).value("updates")).ok_or_else(unknown)?;
    let place = Place::BoxOf(slice);
    Ok(Found { op, result: out, old, new: New::Rows(new), place, form: "scattered elements", hazard: None })
}

/// Whether an operand holds 0, 1, 2, … in the shape of a value.
fn counts_elements(cx: &Context<'_>, numbers: &Operand, old: ValueId) -> bool {
    let f = cx.f;
    let shape = |o: &Operand| f.operand_type(o).as_tensor().map(|t| t.shape.clone());
    let counted = element_numbers(f, numbers).is_some_and(|all| all.iter().enumerate().all(|(i, &n)| i as i64 == n));
    let viewed = || {
        let layouts = numbers.as_value().map(|v| cx.layouts.of(v));
        layouts.is_some_and(|layouts| {
            layouts.iter().any(|l| {
                let source = run(cx, &Operand::Value(l.source));
                let zero = Start { at: None, plus: 0 };
                l.is_row_major() && source.is_some_and(|r| r.start == zero && r.axis == Some(0))
            })
        })
    };
    shape(numbers).as_deref() == f.tensor(old).map(|t| &t.shape[..]) && (counted || viewed())
}

/// The elements of a small constant, which may be viewed.
fn element_numbers(f: &Function, numbers: &Operand) -> Option<Vec<i64>> {
    let viewed = || {
        let op = f.producer(numbers.as_value()?).filter(|&p| f.op(p).kind() == "reshape")?;
        f.operand_ints(f.op(op).param("x").first()?)
    };
    f.operand_type(numbers).as_tensor()?.byte_len().filter(|&n| n <= MAX_NUMBERS)?;
    f.operand_ints(numbers).or_else(viewed)
}

/// Why rows are not known.
fn unknown_rows(f: &Function, mask: &Operand) -> NoMatch {
    let from = |v: ValueId| std::iter::successors(Some(v), |&v| seen_through(f, v)).last();
    let source = mask.as_value().and_then(from);
    match source.filter(|&v| f.producer(v).is_none()) {
        Some(v) => {
            NoMatch::because(format!("what says which rows are written comes from the input `{}`", f.value(v).name()))
                .remedy("the mask, one-hot or indices are built in the graph from the position")
        }
        None => NoMatch::because("which rows are written is not provable")
            .remedy("they are compared with, or counted from, one position that is an integer"),
    }
}

/// What a mask is made from, where it is only viewed, cast or turned over.
fn seen_through(f: &Function, v: ValueId) -> Option<ValueId> {
    let op = f.producer(v)?;
    match &**f.op(op).kind() {
        "tile" | "logical_not" | "reduce_sum" => f.op(op).value("x"),
        "sub" if number(f, f.op(op).param("x").first()?) == Some(1.0) => f.op(op).value("y"),
        _ => shown(f, op),
    }
}

fn both<A, B>(a: Option<A>, b: Option<B>) -> Result<(A, B), NoMatch> {
    a.zip(b).ok_or(NoMatch::UNRELATED)
}
