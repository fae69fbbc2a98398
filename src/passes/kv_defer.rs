//! `kv-defer`: let attention read the cache as it was and the new entries from where they come from.
//!
//! With: state<tensor<fp16, [2, 8, 4]>> cache, tensor<fp16, [2, 1, 4]> query, tensor<fp16, [2, 1, 4]> entry, tensor<int32, [1]> p, tensor<fp16, [1, 1, 8]> mask
//!
//! Given:
//! ```text
//! tensor<int32, [1]> e = add(x = p, y = [1]);
//! tensor<int32, [3]> b3 = concat(values = ([0], p, [0]), axis = 0, interleave = false);
//! tensor<int32, [3]> e3 = concat(values = ([2], e, [4]), axis = 0, interleave = false);
//! tensor<fp16, [2, 8, 4]> r = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> u = slice_update(x = r, update = entry, begin = b3, end = e3);
//! write_state(input = cache, data = u);
//! tensor<fp16, [2, 8, 4]> now = read_state(input = cache);
//! tensor<fp16, [2, 1, 8]> s = matmul(x = query, y = now, transpose_x = false, transpose_y = true);
//! tensor<fp16, [2, 1, 8]> a = add(x = s, y = mask);
//! tensor<fp16, [2, 1, 8]> w = softmax(x = a, axis = -1);
//! tensor<fp16, [2, 1, 4]> out = matmul(x = w, y = now, transpose_x = false, transpose_y = false);
//! -> (out)
//! ```
//! Return:
//! ```text
//! tensor<int32, [1]> e = add(x = p, y = [1]);
//! tensor<int32, [3]> b3 = concat(values = ([0], p, [0]), axis = 0, interleave = false);
//! tensor<int32, [3]> e3 = concat(values = ([2], e, [4]), axis = 0, interleave = false);
//! tensor<fp16, [2, 8, 4]> before = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> r = read_state(input = cache);
//! tensor<fp16, [2, 8, 4]> u = slice_update(x = r, update = entry, begin = b3, end = e3);
//! write_state(input = cache, data = u);
//! tensor<fp16, [2, 1, 8]> s = matmul(x = query, y = before, transpose_x = false, transpose_y = true);
//! tensor<fp16, [2, 1, 1]> s_new = matmul(x = query, y = entry, transpose_x = false, transpose_y = true);
//! tensor<fp16, [2, 1, 9]> scores = concat(values = (s, s_new), axis = 2, interleave = false);
//! tensor<int32, [3]> m3 = concat(values = ([0, 0], p), axis = 0, interleave = false);
//! tensor<fp16, [1, 1, 1]> m_new = slice_by_size(x = mask, begin = m3, size = [1, 1, 1]);
//! tensor<int32, [8]> keys = range_1d(start = 0, end = 8, step = 1);
//! tensor<bool, [8]> is_stale = equal(x = keys, y = p);
//! tensor<fp16, [8]> flags = cast(x = is_stale, dtype = "fp16");
//! tensor<fp16, [8]> stale = mul(x = flags, y = fp16(-3e4));
//! tensor<fp16, [1, 1, 8]> hidden = add(x = mask, y = stale);
//! tensor<fp16, [1, 1, 9]> masks = concat(values = (hidden, m_new), axis = 2, interleave = false);
//! tensor<fp16, [2, 1, 9]> a = add(x = scores, y = masks);
//! tensor<fp16, [2, 1, 9]> w = softmax(x = a, axis = -1);
//! tensor<fp16, [2, 1, 8]> w_old, tensor<fp16, [2, 1, 1]> w_new = split(x = w, split_sizes = [8, 1], axis = 2);
//! tensor<fp16, [2, 1, 4]> o_old = matmul(x = w_old, y = before, transpose_x = false, transpose_y = false);
//! tensor<fp16, [2, 1, 4]> o_new = matmul(x = w_new, y = entry, transpose_x = false, transpose_y = false);
//! tensor<fp16, [2, 1, 4]> out = add(x = o_old, y = o_new);
//! -> (out)
//! ```
//!
//! For `q` new rows at position `p` of a cache of which attention sees `n` rows: the scores are those of the old content and,
//! behind them, those of the new entries; `out = weights[:n] · V_old + weights[n:] · V_new`. The cache is only read, and its
//! writes may move to the end, where `kv-merge` joins them.
//!
//! * Rows p … p+q−1 of the old content are *stale*. They are hidden by a large negative term that is **added**: a row that is
//!   masked everywhere keeps equal scores at all of its keys. It goes into the mask, once for each mask, where only
//!   additions, casts and products with positive scalars follow up to the normaliser, else it is added to the scores
//!   themselves. 3·10⁴ in 16 bits, 3·10³⁸ in 32; `stale=infinite` takes −∞.
//! * Every operand that has an element per key gets its own elements at p … p+q−1 behind them.
//! * The normaliser is one softmax over the keys, or an exponential whose sum may be divided out; sinks may be joined before
//!   it and cut off behind it; anything that treats each key by itself may stand before it, only what keeps zeros behind it.
//! * Fused attention is taken apart, in 32 bits between the products, as inside of the op.
//!
//! Exactness: reassociated. Assumes: A4, A8, A10, A12 (docs/assumptions.md).
//! Declines: a cache that slides, is rolled, is a ring, is seen through a window or overwritten as a whole; keys and
//! values that are written at different positions; a read that does not end in the products of attention; a softmax over
//! another axis, or a second one; a position that is not provably within what is read; values of the cache that are outputs;
//! a state that is used in a nested block.

mod decompose;
mod emit;
mod habits;
mod plan;
mod stale;
mod track;

use std::collections::{BTreeMap, BTreeSet};

use crate::ir::{Function, OpId, ValueId};
use crate::rewrite::{Budget, Declined, Fired, Keeps, NoMatch, Outcome};

use super::report::passed_through;
use super::{Exactness, Pass};
use plan::Plan;

/// Attention reads the cache as it was, and the new entries from where they come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvDefer {
    /// Whether stale keys are hidden by −∞ instead of a finite term.
    pub infinite: bool,
}

impl Pass for KvDefer {
    fn name(&self) -> &'static str {
        "kv-defer"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Reassociated
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        let mut outcome = Outcome::default();
        if budget.is_spent() {
            return outcome;
        }
        let mut fused: BTreeSet<OpId> = BTreeSet::new();
        let mut kept: BTreeMap<OpId, NoMatch> = BTreeMap::new();
        let (work, plan) = loop {
            let (work, products) = match taken_apart(f, &fused) {
                Ok(taken) => taken,
                Err((op, no)) => {
                    fused.remove(&op);
                    kept.insert(op, no);
                    continue;
                }
            };
            let plan = Plan::of(&work, budget);
            let found: Vec<OpId> = plan.fused.iter().copied().filter(|op| !kept.contains_key(op)).collect();
            if !found.is_empty() {
                fused.extend(found);
                continue;
            }
            let summed = |v: &ValueId| plan.sums(&work).contains(v);
            match products.iter().find(|(_, v)| !summed(v)) {
                None => break (work, plan),
                Some((op, _)) => {
                    fused.remove(op);
                    let no = plan.refused.values().next().cloned();
                    kept.insert(*op, no.unwrap_or_else(|| NoMatch::because("the budget is spent")));
                }
            }
        };
        outcome.decline(refusals(&work, &plan, &kept));
        outcome.decline(passed_through(f));
        if plan.actions.is_empty() {
            return outcome;
        }
        let sites = sites(&work, &plan);
        let mut work = work;
        match emit::emit(&mut work, &plan, self.infinite) {
            Ok(()) => {
                *f = work;
                for site in sites {
                    budget.take();
                    outcome.fired.push(site);
                }
            }
            Err(e) => {
                let no = NoMatch::because(e.to_string()).keeping(Keeps::StateOps);
                outcome.decline(sites.into_iter().filter_map(|site| no.clone().declined(site.op)));
            }
        }
        outcome
    }
}

/// A copy with some fused attentions taken apart, each with the product of weights and values it became.
type TakenApart = (Function, Vec<(OpId, ValueId)>);

fn taken_apart(f: &Function, fused: &BTreeSet<OpId>) -> Result<TakenApart, (OpId, NoMatch)> {
    let mut work = f.clone();
    let mut shared = decompose::Shared::default();
    let mut products = Vec::new();
    let in_order: Vec<OpId> = f.ops(f.body()).filter(|op| fused.contains(op)).collect();
    for op in in_order {
        let refusal =
            |what: String| (op, NoMatch::because(what).remedy("the attention is spelled with matmul and softmax"));
        match decompose::decompose(&mut work, op, &mut shared) {
            Ok(Some(v)) => products.push((op, v)),
            Ok(None) => {
                return Err(refusal(format!("{} has sizes or a mask that cannot be taken apart", f.describe(op))));
            }
            Err(e) => return Err(refusal(e.to_string())),
        }
    }
    Ok((work, products))
}

/// One entry for each component that is deferred.
fn sites(f: &Function, plan: &Plan) -> Vec<Fired> {
    let site = |roots: Vec<usize>| {
        let sum = plan.sum_of(f, roots[0])?;
        let w = &plan.windows[plan.roots[roots[0]].window];
        let form = format!("old content and new entries: {} rows of {}", w.q, w.n);
        Some(Fired::plain(f.describe(sum), form))
    };
    plan.components().into_iter().filter_map(site).collect()
}

/// Why attention reads a cache after it is written.
fn refusals(f: &Function, plan: &Plan, kept: &BTreeMap<OpId, NoMatch>) -> Vec<Declined> {
    let parts = plan.refused.iter().filter_map(|(v, no)| Some((f.describe(f.producer(*v)?), no.clone())));
    let fused = kept.iter().filter(|(op, _)| f.is_live(**op)).map(|(op, no)| (f.describe(*op), no.clone()));
    parts.chain(fused).filter_map(|(op, no)| no.keeping(Keeps::StateOps).declined(op)).collect()
}
