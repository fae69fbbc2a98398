//! Why a product sees no repeats: what spoils the copies behind its operands, if anything does.

use crate::analysis::traffic::batched_operands;
use crate::ir::{Dim, Function, OpId, ValueId};
use crate::opset::is_elementwise;
use crate::rewrite::{Context, NoMatch};

use super::member::is_data;
use super::shared::repeated;

/// How many values are looked at.
const FUEL: usize = 64;

/// `neither`, and what is behind the operands instead.
pub(super) fn unrepeated(cx: &Context<'_>, operands: &[ValueId], neither: &str) -> NoMatch {
    match operands.iter().find_map(|&v| spoiled(cx, v)) {
        Some((why, remedy)) => NoMatch::because(format!("{neither}: {why}")).remedy(remedy),
        None => NoMatch::because(format!("{neither}: multi-head attention, or grouped already")),
    }
}

/// The op behind a value, element by element and through views, that makes something else of copies.
fn spoiled(cx: &Context<'_>, v: ValueId) -> Option<(String, &'static str)> {
    let f = cx.f;
    let mut seen = vec![v];
    let mut found = None;
    let mut at = 0;
    while let Some(&v) = seen.get(at) {
        at += 1;
        let Some(op) = f.producer(v) else { continue };
        if at > FUEL || is_product(f, op) {
            return None;
        }
        let kind = f.op(op).kind().as_str();
        let operands: Vec<ValueId> = (f.op(op).operands().iter().enumerate())
            .filter(|(i, _)| f.op(op).param_of(*i).is_some_and(|p| is_data(kind, p)))
            .filter_map(|(_, o)| o.as_value())
            .collect();
        if is_elementwise(kind) && operands.iter().any(|&o| repeated(cx, o)) {
            let remedy = "its other operands are the same for all heads of a group";
            found.get_or_insert((format!("{} tells the heads of a group apart", f.describe(op)), remedy));
        } else if copies(cx, op, v) {
            let remedy = "every head is copied as often as the others, in one order";
            found.get_or_insert((format!("{} copies the heads in no regular order", f.describe(op)), remedy));
        } else if is_elementwise(kind) || VIEWS.contains(&kind) {
            let new: Vec<ValueId> = operands.into_iter().filter(|o| !seen.contains(o)).collect();
            seen.extend(new);
        }
    }
    found
}

const VIEWS: &[&str] = &["concat", "expand_dims", "reshape", "slice_by_index", "slice_by_size", "squeeze", "transpose"];

/// Whether an op works on values that are computed, heads against heads: what is behind it is no copy of keys or values.
fn is_product(f: &Function, op: OpId) -> bool {
    let operands = batched_operands(f, op);
    f.op(op).kind() == "softmax" || !operands.is_empty() && operands.iter().all(|(v, _)| f.const_value(*v).is_none())
}

/// Whether an op gives more elements than the one value has that all of its operands are views of.
fn copies(cx: &Context<'_>, op: OpId, v: ValueId) -> bool {
    let f = cx.f;
    let operands = match f.op(op).kind().as_str() {
        "gather" | "gather_along_axis" | "gather_nd" => f.op(op).param("x"),
        "concat" | "stack" => f.op(op).param("values"),
        _ => return false,
    };
    let operands: Option<Vec<ValueId>> = operands.iter().map(|o| o.as_value()).collect();
    let Some([first, rest @ ..]) = operands.as_deref() else { return false };
    let elements = |v: ValueId| f.tensor(v).and_then(|t| Dim::product(&t.shape)).map(|d| d.coef());
    cx.layouts.of(*first).iter().map(|l| l.source).any(|source| {
        let of_one = f.const_value(source).is_none() && rest.iter().all(|&o| cx.layouts.over(o, source).is_some());
        of_one && elements(v) > elements(source) && cx.layouts.over(v, source).is_none()
    })
}
