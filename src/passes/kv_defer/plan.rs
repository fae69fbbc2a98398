//! What of a function can read the cache as it was before this run's writes.
//!
//! A *root* is a part of a cache that attention looks at after one update changed a window `[p, p + q)` of its rows. From the
//! roots on, values are followed to the products: a *twin* is a value of the cache that is computed for the new entries
//! alone as well; a *grown* value has the old keys and, behind them, the new ones along its key axis. A component, that is
//! everything that hangs together, is deferred whole or not at all.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::analysis::state::{Chain, Look, Region, Span, States, Update};
use crate::analysis::values::Poly;
use crate::ir::{Dim, Function, OpId, Use, ValueId};
use crate::rewrite::{Budget, Keeps, NoMatch};

use super::habits;
use super::stale::{Place, hides_twice, place};
use super::track::{Action, visit};

/// The rows that an update writes: `q` from position `p` on, of the `n` that attention sees.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Window {
    pub(super) p: Poly,
    pub(super) q: Dim,
    pub(super) n: Dim,
}

impl Window {
    /// Whether the rows that are written are the last ones that attention sees.
    pub(super) fn ends_with_the_keys(&self) -> bool {
        let end = Poly::of_dim(&self.q).and_then(|q| self.p.add(&q));
        end.is_some() && end == Poly::of_dim(&self.n)
    }
}

/// A part of a cache that attention looks at.
#[derive(Clone, Debug)]
pub(super) struct Root {
    pub(super) state: ValueId,
    /// The first op that uses the state: the old content is read before it.
    pub(super) first: OpId,
    /// The snapshot it comes from.
    pub(super) snapshot: ValueId,
    pub(super) look: Look,
    pub(super) update: Update,
    /// The key axis, in the part.
    pub(super) axis: usize,
    pub(super) window: usize,
}

/// How far a grown value is from its normaliser.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Before it.
    Scores,
    /// Behind it: zero where a key is hidden.
    Weights,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Twin,
    /// Columns of others stand before and behind those of the cache.
    Grown {
        before: u64,
        after: u64,
        phase: Phase,
    },
}

/// A value that has the keys of a cache along an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Track {
    pub(super) axis: usize,
    pub(super) kind: Kind,
    pub(super) window: usize,
    /// A root that it comes from.
    pub(super) root: usize,
}

impl Track {
    /// Whether two values have the same keys along the same axis, in the same way.
    pub(super) fn is_like(&self, other: &Track) -> bool {
        (self.axis, self.kind, self.window) == (other.axis, other.kind, other.window)
    }
}

/// What to do, in block order.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) windows: Vec<Window>,
    pub(super) roots: Vec<Root>,
    pub(super) tracked: HashMap<ValueId, Track>,
    pub(super) actions: Vec<(OpId, Action)>,
    /// Grown values that a softmax, an exponential or a maximum reads.
    pub(super) normalised: Vec<ValueId>,
    /// Where stale keys are hidden, each with the factor by which what stands there is multiplied on its way to the
    /// normaliser.
    pub(super) places: Vec<(Place, f64)>,
    /// Why roots are not deferred, by the value they would start from.
    pub(super) refused: BTreeMap<ValueId, NoMatch>,
    /// Fused attentions that stand in the way.
    pub(super) fused: BTreeSet<OpId>,
    /// Components: the representative of each root.
    joined: Vec<usize>,
}

impl Plan {
    /// Plans a function, as many components of it as the budget admits. Attention that cannot be deferred is left out, with
    /// the reason.
    pub(super) fn of(f: &Function, budget: &Budget) -> Plan {
        let limit = budget.left().unwrap_or(usize::MAX);
        let states = States::of(f);
        let mut refused = BTreeMap::new();
        let mut postponed = BTreeSet::new();
        let mut fused = BTreeSet::new();
        loop {
            let mut plan = Plan::default();
            plan.find_roots(f, &states, &postponed, &mut refused);
            match plan.follow(f).and_then(|()| plan.find_places(f)) {
                Ok(()) => {
                    let withheld = plan.withheld(f, budget);
                    if !withheld.is_empty() {
                        refused.extend(withheld);
                        continue;
                    }
                    let beyond: Vec<usize> = plan.components().into_iter().skip(limit).flatten().collect();
                    if beyond.is_empty() {
                        plan.refused = refused;
                        plan.fused = fused;
                        return plan;
                    }
                    postponed.extend(beyond.into_iter().map(|root| plan.roots[root].look.value));
                }
                Err((roots, no)) => {
                    fused.extend(plan.fused);
                    for root in roots {
                        refused.insert(plan.roots[root].look.value, no.clone());
                    }
                }
            }
        }
    }

    /// Roots that the budget does not admit, by the value they start from.
    fn withheld(&self, f: &Function, budget: &Budget) -> Vec<(ValueId, NoMatch)> {
        let no = |roots: &Vec<usize>| budget.refusal(f, &f.describe(self.sum_of(f, roots[0])?));
        let components = self.components();
        let withheld = components.iter().filter_map(|roots| Some((roots, no(roots)?)));
        withheld.flat_map(|(roots, no)| roots.iter().map(move |&r| (self.roots[r].look.value, no.clone()))).collect()
    }

    fn find_roots(
        &mut self,
        f: &Function,
        states: &States,
        postponed: &BTreeSet<ValueId>,
        refused: &mut BTreeMap<ValueId, NoMatch>,
    ) {
        for chain in states.chains() {
            if let Some(op) = chain.out_of_sight() {
                let no = NoMatch::because(format!("{} may use the state out of sight", f.describe(op)))
                    .remedy("the state is read and written in the function's own block, and every op is known");
                refused.extend(chain.reads().map(|(_, snapshot, _)| (snapshot, no.clone())));
                continue;
            }
            for (_, snapshot, version) in chain.reads() {
                let looks = states.looks(f, chain, snapshot);
                let values: Vec<ValueId> = looks.iter().map(|l| l.value).collect();
                for look in looks.into_iter().filter(|l| !is_part_of_any(f, l.value, &values)) {
                    if refused.contains_key(&look.value) || postponed.contains(&look.value) {
                        continue;
                    }
                    let value = look.value;
                    match self.root(f, chain, snapshot, version, look) {
                        Ok(Some(root)) => {
                            self.joined.push(self.roots.len());
                            self.roots.push(root);
                        }
                        Ok(None) => {}
                        Err(no) => {
                            refused.insert(value, no);
                        }
                    }
                }
            }
        }
    }

    /// The root that a part is; `None` when no write before the snapshot touches it.
    fn root(
        &mut self,
        f: &Function,
        chain: &Chain,
        snapshot: ValueId,
        version: usize,
        look: Look,
    ) -> Result<Option<Root>, NoMatch> {
        let touches = |(_, _, update): &(OpId, ValueId, Option<&Update>)| {
            update.is_none_or(|u| !u.region.is_apart(&look.region, f))
        };
        let pending: Vec<_> = chain.writes().take(version).filter(touches).collect();
        if let Some((_, data, _)) = pending.iter().find(|(_, _, update)| update.is_none()) {
            return Err(habits::refusal(f, chain, *data));
        }
        let update = match pending[..] {
            [] => return Ok(None),
            [(_, _, Some(update))] => update,
            _ => {
                return Err(NoMatch::because("several pending writes touch what is read")
                    .remedy("each layer's rows are written once"));
            }
        };
        let Some(state_axis) = window_axis(f, &update.region, &look.region)? else {
            return habits::refusal_of_rows(f, chain, update).map_or(Ok(None), Err);
        };
        if let Some(no) = habits::refusal_of_place(f, update) {
            return Err(no);
        }
        let axis = look.axes.iter().position(|a| *a == Some(state_axis)).ok_or_else(odd_axis)?;
        let window = window(f, update, &look, state_axis, axis).ok_or_else(odd_axis)?;
        let first = chain.accesses.first().map(|a| a.op()).ok_or_else(odd_axis)?;
        let update = update.clone();
        let window = self.window(window);
        Ok(Some(Root { state: chain.state, first, snapshot, look, update, axis, window }))
    }

    fn window(&mut self, window: Window) -> usize {
        let known = self.windows.iter().position(|w| *w == window);
        known.unwrap_or_else(|| {
            self.windows.push(window);
            self.windows.len() - 1
        })
    }

    /// Follows the roots to the products; on failure, the roots concerned and the reason.
    fn follow(&mut self, f: &Function) -> Result<(), (Vec<usize>, NoMatch)> {
        for (i, root) in self.roots.iter().enumerate() {
            let track = Track { axis: root.axis, kind: Kind::Twin, window: root.window, root: i };
            self.tracked.insert(root.look.value, track);
        }
        for i in 0..self.roots.len() {
            let value = self.roots[i].look.value;
            self.check_uses(f, value).map_err(|no| (self.component(i), no))?;
        }
        for op in f.ops(f.body()) {
            let mut roots: Vec<usize> =
                f.op(op).operands().iter().filter_map(|o| Some(self.tracked.get(&o.as_value()?)?.root)).collect();
            let Some(&first) = roots.first() else { continue };
            roots.drain(..).for_each(|root| self.join(first, root));
            if f.op(op).kind() == "scaled_dot_product_attention" {
                self.fused.insert(op);
            }
            let visited = visit(f, self, op).and_then(|results| {
                results.into_iter().try_for_each(|(v, track)| {
                    self.tracked.insert(v, track);
                    self.check_uses(f, v)
                })
            });
            visited.map_err(|no| (self.component(first), no))?;
        }
        let finished: BTreeSet<usize> = self
            .actions
            .iter()
            .filter(|(_, action)| matches!(action, Action::Sum { .. }))
            .flat_map(|(op, _)| {
                f.op(*op).operands().iter().filter_map(|o| Some(self.tracked.get(&o.as_value()?)?.root))
            })
            .map(|root| self.representative(root))
            .collect();
        match (0..self.roots.len()).find(|&i| !finished.contains(&self.representative(i))) {
            Some(i) => Err((
                self.component(i),
                NoMatch::because("what is read does not end in the two products of attention")
                    .remedy("keys and values are read from states that are written alike"),
            )),
            None => Ok(()),
        }
    }

    fn find_places(&mut self, f: &Function) -> Result<(), (Vec<usize>, NoMatch)> {
        for v in self.normalised.clone() {
            let (place, scale) = place(f, self, v).ok_or_else(|| {
                let why = format!("stale keys cannot be hidden before `{}`", f.value(v).name());
                let remedy = "other columns are joined right before the softmax, and only additions and scalar products lie between";
                let roots = self.tracked.get(&v).map(|t| self.component(t.root)).unwrap_or_default();
                (roots, NoMatch::because(why).remedy(remedy))
            })?;
            match self.places.iter_mut().find(|(p, _)| *p == place) {
                Some((_, known)) => *known = known.min(scale),
                None => self.places.push((place, scale)),
            }
        }
        for &v in &self.normalised {
            let own = place(f, self, v).map(|(own, _)| own);
            if own.is_some_and(|own| hides_twice(f, self, v, own)) {
                let why =
                    format!("`{}` is normalised behind scores that are normalised as they are, too", f.value(v).name());
                let remedy = "what the scores go through before each softmax keeps their order";
                let roots = self.tracked.get(&v).map(|t| self.component(t.root)).unwrap_or_default();
                return Err((roots, NoMatch::because(why).remedy(remedy)));
            }
        }
        Ok(())
    }

    /// A tracked value may not leave the block.
    fn check_uses(&self, f: &Function, v: ValueId) -> Result<(), NoMatch> {
        for u in f.value(v).uses() {
            match *u {
                Use::Output { .. } => {
                    return Err(NoMatch::because(format!(
                        "`{}`, which comes from the cache, is an output",
                        f.value(v).name()
                    ))
                    .remedy("the output is computed from something else"));
                }
                Use::Op { op, .. } if f.op(op).block() != f.body() => {
                    return Err(NoMatch::because(format!("{} reads it in a nested block", f.describe(op)))
                        .remedy("attention stands in the function's own block"));
                }
                Use::Op { .. } => {}
            }
        }
        Ok(())
    }

    fn representative(&self, mut i: usize) -> usize {
        while self.joined[i] != i {
            i = self.joined[i];
        }
        i
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.representative(a), self.representative(b));
        let (low, high) = (a.min(b), a.max(b));
        self.joined[high] = low;
    }

    /// The roots that hang together with one.
    fn component(&self, root: usize) -> Vec<usize> {
        let wanted = self.representative(root);
        (0..self.roots.len()).filter(|&i| self.representative(i) == wanted).collect()
    }

    /// The results of products that sum over keys.
    pub(super) fn sums(&self, f: &Function) -> BTreeSet<ValueId> {
        let sums = self.actions.iter().filter(|(_, action)| matches!(action, Action::Sum { .. }));
        sums.flat_map(|(op, _)| f.op(*op).results().to_vec()).collect()
    }

    /// The first product that sums over the keys of a root's component.
    pub(super) fn sum_of(&self, f: &Function, root: usize) -> Option<OpId> {
        let wanted = self.representative(root);
        let of = |op: OpId| f.op(op).operands().iter().find_map(|o| Some(self.tracked.get(&o.as_value()?)?.root));
        let sums = self.actions.iter().filter(|(_, action)| matches!(action, Action::Sum { .. })).map(|(op, _)| *op);
        sums.into_iter().find(|&op| of(op).is_some_and(|root| self.representative(root) == wanted))
    }

    /// The components, in the order of their first roots.
    pub(super) fn components(&self) -> Vec<Vec<usize>> {
        (0..self.roots.len()).filter(|&i| self.representative(i) == i).map(|i| self.component(i)).collect()
    }
}

/// Whether a value is a slice or view of one of these.
fn is_part_of_any(f: &Function, v: ValueId, of: &[ValueId]) -> bool {
    let whole = |v: ValueId| f.op(f.producer(v)?).value("x");
    std::iter::successors(whole(v), |&v| whole(v)).any(|v| of.contains(&v))
}

fn odd_axis() -> NoMatch {
    NoMatch::because("the rows of the cache are not an axis of their own")
        .remedy("the cache has an axis of positions")
        .keeping(Keeps::StateOps)
}

/// The axis of the state on which an update writes a window of what is looked at; `None` when it writes all of it.
fn window_axis(f: &Function, written: &Region, seen: &Region) -> Result<Option<usize>, NoMatch> {
    let inside = |i: &usize| !written.0[*i].covers(&seen.0[*i], f);
    let open: Vec<usize> = (0..seen.0.len()).filter(inside).collect();
    let axis = match open[..] {
        [] => return Ok(None),
        [axis] => axis,
        _ => {
            return Err(NoMatch::because("the write and the read differ along more than one axis")
                .remedy("a layer's rows are written for all of its heads"));
        }
    };
    let (w, s) = (&written.0[axis], &seen.0[axis]);
    let starts = s.begin.as_constant() == Some(0) && s.stride == 1;
    if !starts || w.stride != 1 {
        return Err(NoMatch::because("attention sees a window of the cache that does not start at its first row")
            .remedy("attention sees the cache from its first row on"));
    }
    match s.covers(w, f) {
        true => Ok(Some(axis)),
        false => Err(NoMatch::because("the rows that are written are not provably among those that are read")
            .remedy("the position follows from the inputs and their shapes")),
    }
}

/// The rows that an update writes, of those that a part shows.
fn window(f: &Function, u: &Update, look: &Look, state_axis: usize, axis: usize) -> Option<Window> {
    let p = u.region.0[state_axis].begin.clone();
    Some(Window { p, q: extent(f, u, state_axis)?, n: f.tensor(look.value)?.shape.get(axis)?.clone() })
}

/// The extent of an update's box along an axis of the state.
fn extent(f: &Function, u: &Update, state_axis: usize) -> Option<Dim> {
    match u.axis_of_value(state_axis) {
        Some(axis) => f.tensor(u.value)?.shape.get(axis).cloned(),
        None => Some(Dim::known(1)),
    }
}

/// Where a part begins within the box of an update along an axis, and of how many indices it is, where it is not all of it.
pub(super) fn within(seen: &Span, written: &Span) -> Option<(i64, i64)> {
    let forwards = written.stride == 1 && seen.stride >= 1;
    let offset = seen.begin.sub(&written.begin)?.as_constant().filter(|_| forwards)?;
    Some((offset, seen.extent.as_constant()?))
}
