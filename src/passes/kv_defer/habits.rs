//! Ways to write a cache that leave no place where new rows are known to be: what to say of them.

use std::collections::BTreeSet;

use crate::analysis::state::{Chain, Update};
use crate::analysis::values::{Poly, Unknown};
use crate::ir::{Function, OpId, ValueId};
use crate::opset::is_elementwise;
use crate::rewrite::NoMatch;

/// What becomes of the rows of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Habit {
    Sliding,
    Rolled,
    Ring,
    Blended,
    Scattered,
    Overwritten,
}

impl Habit {
    fn refusal(self) -> NoMatch {
        let (reason, remedy) = match self {
            Habit::Sliding => (
                "the cache slides: each run drops rows at one end and adds rows at the other",
                "rows stay where they are",
            ),
            Habit::Rolled => ("the cache is rolled: each run moves all of its rows", "rows stay where they are"),
            Habit::Ring => {
                ("the cache is a ring: rows go to a position modulo its size", "there is a row for each position")
            }
            Habit::Blended => (
                "the state is overwritten as a whole, by a blend of its rows and new ones",
                "new rows are written by a slice_update of a fresh read_state",
            ),
            Habit::Scattered => (
                "rows are written by a scatter, to places that nothing is known of",
                "new rows are written by a slice_update of a fresh read_state",
            ),
            Habit::Overwritten => (
                "the state is overwritten as a whole before it is read",
                "new rows are written by a slice_update of a fresh read_state",
            ),
        };
        NoMatch::because(reason).remedy(remedy)
    }
}

/// Why a write that is no update of a known box stands in the way.
pub(super) fn refusal(f: &Function, chain: &Chain, data: ValueId) -> NoMatch {
    let content = Content { f, chain };
    let habit = content.habit(data).unwrap_or(Habit::Overwritten);
    habit.refusal()
}

/// Why an update of all that is read stands in the way, if it moves rows of the cache.
pub(super) fn refusal_of_rows(f: &Function, chain: &Chain, update: &Update) -> Option<NoMatch> {
    let moves = |habit: &Habit| matches!(habit, Habit::Sliding | Habit::Rolled | Habit::Blended);
    Content { f, chain }.habit(update.value).filter(moves).map(Habit::refusal)
}

/// Why an update of some rows stands in the way, if they go around the cache.
pub(super) fn refusal_of_place(f: &Function, update: &Update) -> Option<NoMatch> {
    update.region.0.iter().any(|span| is_remainder(f, &span.begin)).then(|| Habit::Ring.refusal())
}

/// Whether a position is computed from the remainder of a division.
fn is_remainder(f: &Function, position: &Poly) -> bool {
    let unknowns = position.terms().flat_map(|(unknowns, _)| unknowns);
    unknowns.into_iter().any(|u| matches!(u, Unknown::Element(v, _) if is_division(f, *v)))
}

fn is_division(f: &Function, v: ValueId) -> bool {
    f.producer(v).is_some_and(|op| matches!(&**f.op(op).kind(), "mod" | "floor_div"))
}

/// Values that are computed from the content of a state.
struct Content<'f> {
    f: &'f Function,
    chain: &'f Chain,
}

impl Content<'_> {
    /// What a new content does with the old one.
    fn habit(&self, mut v: ValueId) -> Option<Habit> {
        let f = self.f;
        loop {
            let op = f.producer(v)?;
            let data = f.op(op);
            match &**data.kind() {
                "slice_update" => {
                    let x = data.value("x")?;
                    if self.chain.read_of(uncast(f, x)).is_some() {
                        return self.divides(op).then_some(Habit::Ring);
                    }
                    v = x;
                }
                "concat" => {
                    let parts = data.param("values").iter().filter_map(|o| o.as_value());
                    let (old, new): (Vec<_>, Vec<_>) = parts.partition(|&v| self.is_part(v));
                    return match (old.len(), new.len()) {
                        (0, _) => None,
                        (_, 0) => Some(Habit::Rolled),
                        _ => Some(Habit::Sliding),
                    };
                }
                "gather" | "gather_along_axis" | "gather_nd" | "reverse" => {
                    return self.is_part(data.value("x")?).then_some(Habit::Rolled);
                }
                "scatter" | "scatter_along_axis" | "scatter_nd" => return Some(Habit::Scattered),
                "select" | "add" | "mul" | "sub" => {
                    return self.mixes(v).then_some(Habit::Blended);
                }
                _ => v = data.value("x")?,
            }
        }
    }

    /// Whether a value is taken from the content by slices and views.
    fn is_part(&self, v: ValueId) -> bool {
        let f = self.f;
        let views =
            ["slice_by_index", "slice_by_size", "reshape", "transpose", "squeeze", "expand_dims", "cast", "identity"];
        let whole = |v: &ValueId| {
            let op = f.op(f.producer(*v)?);
            views.contains(&&**op.kind()).then(|| op.value("x"))?
        };
        std::iter::successors(Some(v), whole).any(|v| self.chain.read_of(v).is_some())
    }

    /// Whether a value is computed element by element from the content, among others.
    fn mixes(&self, v: ValueId) -> bool {
        let elementwise = |op: OpId| is_elementwise(self.f.op(op).kind());
        ancestors(self.f, v, elementwise).into_iter().any(|v| self.is_part(v))
    }

    /// Whether the place of an update is computed by a division.
    fn divides(&self, update: OpId) -> bool {
        let begin = self.f.op(update).value("begin");
        begin.is_some_and(|v| ancestors(self.f, v, |_| true).into_iter().any(|v| is_division(self.f, v)))
    }
}

fn uncast(f: &Function, v: ValueId) -> ValueId {
    let cast = f.producer(v).filter(|&op| f.op(op).kind() == "cast");
    cast.and_then(|op| f.op(op).value("x")).unwrap_or(v)
}

/// A value and all that it is computed from by ops of some kind.
fn ancestors(f: &Function, v: ValueId, through: impl Fn(OpId) -> bool) -> BTreeSet<ValueId> {
    let mut seen = BTreeSet::new();
    let mut left = vec![v];
    while let Some(v) = left.pop() {
        if seen.insert(v) {
            let operands = f.producer(v).filter(|&op| through(op)).into_iter().flat_map(|op| f.op(op).operands());
            left.extend(operands.filter_map(|o| o.as_value()));
        }
    }
    seen
}
