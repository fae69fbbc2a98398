//! `kv-unify`: make one state of several states of equal type.
//!
//! With: state<tensor<fp16, [2, 8, 4]>> k_cache, state<tensor<fp16, [2, 8, 4]>> v_cache, tensor<fp16, [1, 1, 4]> row
//!
//! Given:
//! ```text
//! tensor<fp16, [2, 8, 4]> r = read_state(input = v_cache);
//! tensor<fp16, [2, 8, 4]> u = slice_update(x = r, update = row, begin = [1, 3, 0], end = [2, 4, 4]);
//! write_state(input = v_cache, data = u);
//! tensor<fp16, [2, 8, 4]> k = read_state(input = k_cache);
//! tensor<fp16, [1, 8, 4]> layer = slice_by_index(x = k, begin = [1, 0, 0], end = [2, 8, 4]);
//! ```
//! With then: tensor<fp16, [1, 1, 4]> row, state<tensor<fp16, [4, 8, 4]>> kv_cache
//!
//! Return:
//! ```text
//! tensor<fp16, [4, 8, 4]> r = read_state(input = kv_cache);
//! tensor<fp16, [4, 8, 4]> u = slice_update(x = r, update = row, begin = [3, 3, 0], end = [4, 4, 4]);
//! write_state(input = kv_cache, data = u);
//! tensor<fp16, [4, 8, 4]> k = read_state(input = kv_cache);
//! tensor<fp16, [1, 8, 4]> layer = slice_by_index(x = k, begin = [1, 0, 0], end = [2, 8, 4]);
//! ```
//!
//! The contents lie one behind the other along axis 0, in the order of the inputs. Every read and write stays where it
//! is among the ops. A write that changes one box is a `slice_update` of that box in the joined state, with a
//! `read_state` of its own in front; any other write replaces the rows of the state. What slices a read is a slice of the
//! joined read; everything else reads the rows of the state (see `kv_unify/rebase.rs`).
//!
//! The interface changes: the states go, the joined one comes. A state that several functions have under one name is
//! joined in all of them, with the same others, or in none.
//!
//! Exactness: bitwise, of the parts of the joined state. Assumes: A4, A10 (docs/assumptions.md).
//! Declines: no other state of this type in the same functions; a state shared with a function that is not rewritten, or of
//! another type there; a state used in a nested block; a state of unknown size or an unusual description; an opaque op in
//! the function; an op that may not be edited.

mod bounds;
mod rebase;

use std::collections::BTreeSet;

use crate::analysis::state::{Chain, States};
use crate::ir::{Dim, FeatureKind, Flexibility, Function, Name, TensorType};
use crate::opset::effect_of;
use crate::rewrite::{Budget, Fired, InterfaceChange, Keeps, NoMatch, Outcome};

use super::report::describe_state;
use super::{Exactness, Pass};

/// Joins states of equal type along axis 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KvUnify;

impl Pass for KvUnify {
    fn name(&self) -> &'static str {
        "kv-unify"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn changes_interface(&self) -> bool {
        true
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        self.run_all(&mut [f], &[], budget).pop().unwrap_or_default()
    }

    fn run_all(&self, functions: &mut [&mut Function], others: &[&Function], budget: &mut Budget) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::default(); functions.len()];
        let (groups, refused) = groups(survey(functions, others));
        for (state, no) in refused {
            decline(&mut outcomes, &state, no);
        }
        for states in groups {
            if budget.is_spent() {
                break;
            }
            let users = states[0].users.clone();
            let joined = match Joined::of(&states, functions, others) {
                Some(joined) => joined,
                None => {
                    let no = || NoMatch::because("the joined state would be too large").keeping(Keeps::StateOps);
                    states.iter().for_each(|s| decline(&mut outcomes, s, no()));
                    continue;
                }
            };
            let site = describe_state(&joined.name);
            if let Some(no) = users.iter().find_map(|&i| budget.refusal(functions[i], &site)) {
                states.iter().for_each(|s| decline(&mut outcomes, s, no.clone()));
                continue;
            }
            match joined.apply(functions, &users) {
                Ok(()) => {
                    budget.take();
                    users.iter().for_each(|&i| joined.record(&mut outcomes[i]));
                }
                Err(reason) => {
                    states.iter().for_each(|s| decline(&mut outcomes, s, NoMatch::because(reason.clone())));
                }
            }
        }
        outcomes
    }
}

/// A state of one or several functions.
struct State {
    name: Name,
    ty: TensorType,
    /// The functions that have it, by their number.
    users: BTreeSet<usize>,
    /// Why it cannot be joined with any.
    problem: Option<NoMatch>,
}

fn decline(outcomes: &mut [Outcome], state: &State, no: NoMatch) {
    for &i in &state.users {
        outcomes[i].decline(no.clone().keeping(Keeps::StateOps).declined(describe_state(&state.name)));
    }
}

/// The states of all functions, in the order of their inputs.
fn survey(functions: &[&mut Function], others: &[&Function]) -> Vec<State> {
    let mut found: Vec<State> = Vec::new();
    for (i, f) in functions.iter().enumerate() {
        for chain in States::of(f).chains() {
            let (name, Some(ty)) = (f.value(chain.state).name(), f.ty(chain.state).as_state()) else { continue };
            let problem = problem(f, chain, ty).err();
            match found.iter_mut().find(|s| s.name == *name) {
                None => {
                    let problem = problem.or_else(|| shared(name, others).err());
                    found.push(State { name: name.clone(), ty: ty.clone(), users: [i].into(), problem });
                }
                Some(known) => {
                    let differs = || NoMatch::because("functions that share the state give it different types");
                    let problem = problem.or_else(|| (known.ty != *ty).then(differs));
                    known.users.insert(i);
                    known.problem = known.problem.take().or(problem);
                }
            }
        }
    }
    found
}

/// Whether a function that stays as it is has the state.
fn shared(name: &Name, others: &[&Function]) -> Result<(), NoMatch> {
    match others.iter().find(|f| f.input(name).is_some_and(|v| f.ty(v).as_state().is_some())) {
        None => Ok(()),
        Some(f) => Err(NoMatch::because(format!("function `{}` shares the state and is not rewritten", f.name()))
            .remedy("all functions are rewritten")),
    }
}

/// What keeps a state of one function from being joined with others.
fn problem(f: &Function, chain: &Chain, ty: &TensorType) -> Result<(), NoMatch> {
    if let Some(op) = chain.elsewhere {
        return Err(NoMatch::because(format!("{} uses the state in a way that is not followed", f.describe(op))));
    }
    if let Some(op) = f.all_ops().into_iter().find(|&op| effect_of(f, op).is_unknown()) {
        return Err(NoMatch::because(format!("{} may use any state", f.describe(op))));
    }
    if let Some(e) = chain.accesses.iter().find_map(|a| f.check_editable(a.op()).err()) {
        return Err(NoMatch::because(e.to_string()));
    }
    if ty.rank() == 0 || ty.known_shape().is_none() {
        return Err(NoMatch::because("the state has no first axis of known size"));
    }
    match f.interface().input(f.value(chain.state).name()) {
        None => Ok(()),
        Some(feature) => match &feature.kind {
            FeatureKind::State(a)
                if a.flexibility == Flexibility::Fixed && a.default.is_none() && !feature.optional =>
            {
                Ok(())
            }
            _ => Err(NoMatch::because("the description says more of the state than its type and shape")),
        },
    }
}

/// States that can be joined, and why the others are not. States are joined when they have one type and the same functions
/// have them.
fn groups(found: Vec<State>) -> (Vec<Vec<State>>, Vec<(State, NoMatch)>) {
    let mut groups: Vec<Vec<State>> = Vec::new();
    let mut refused = Vec::new();
    for mut state in found {
        if let Some(no) = state.problem.take() {
            refused.push((state, no));
            continue;
        }
        match groups.iter_mut().find(|g| g[0].ty == state.ty && g[0].users == state.users) {
            Some(group) => group.push(state),
            None => groups.push(vec![state]),
        }
    }
    let (groups, alone): (Vec<_>, Vec<_>) = groups.into_iter().partition(|g| g.len() > 1);
    let no = || NoMatch::because("no other state has this type and can be joined with it");
    refused.extend(alone.into_iter().flatten().map(|state| (state, no())));
    (groups, refused)
}

/// The state that takes the place of others.
struct Joined {
    name: Name,
    /// Its type.
    whole: TensorType,
    /// The states, in the order in which their contents lie along axis 0.
    parts: Vec<Name>,
    /// How many rows of axis 0 each has.
    rows: i64,
}

impl Joined {
    /// `None` when a size does not fit.
    fn of(states: &[State], functions: &[&mut Function], others: &[&Function]) -> Option<Joined> {
        let part = &states[0].ty;
        let rows = part.shape.first()?.as_known()?;
        let mut whole = part.clone();
        whole.shape[0] = Dim::known(rows.checked_mul(states.len() as u64)?);
        i64::try_from(whole.volume()?).ok()?;
        let parts: Vec<Name> = states.iter().map(|s| s.name.clone()).collect();
        let taken = |name: &str| functions.iter().any(|f| f.has_name(name)) || others.iter().any(|f| f.has_name(name));
        let stem = stem(&parts);
        let names = std::iter::once(stem.clone()).chain((1..).map(|i| format!("{stem}_{i}")));
        let name = names.into_iter().find(|n| !taken(n))?.into();
        Some(Joined { name, whole, parts, rows: i64::try_from(rows).ok()? })
    }

    /// Rewrites all functions, or none.
    fn apply(&self, functions: &mut [&mut Function], users: &BTreeSet<usize>) -> Result<(), String> {
        let mut copies = Vec::new();
        for &i in users {
            let mut copy = functions[i].clone();
            rebase::rebase(&mut copy, self).map_err(|e| format!("function `{}`: {e}", copy.name()))?;
            copies.push((i, copy));
        }
        for (i, copy) in copies {
            *functions[i] = copy;
        }
        Ok(())
    }

    fn record(&self, outcome: &mut Outcome) {
        let form = format!("{} states joined along axis 0", self.parts.len());
        outcome.fired.push(Fired::plain(describe_state(&self.name), form));
        outcome.interface.push(InterfaceChange::Joined { states: self.parts.clone(), into: self.name.clone() });
    }
}

/// A name for what these states have in common: the words that all names contain, where `k` and `v` make `kv`.
fn stem(names: &[Name]) -> String {
    let mut all: Vec<Vec<String>> = names.iter().map(|n| words(n)).collect();
    let is = |kind: &[&str], w: &String| kind.contains(&w.as_str());
    let (keys, values) = (["k", "key", "keys"], ["v", "value", "values"]);
    let has = |kind: &[&str]| all.iter().any(|words| words.iter().any(|w| is(kind, w)));
    if has(&keys) && has(&values) {
        for w in all.iter_mut().flatten().filter(|w| is(&keys, w) || is(&values, w)) {
            *w = "kv".into();
        }
    }
    let common = all[0].iter().filter(|w| all.iter().all(|words| words.contains(w)));
    let stem: Vec<&str> = common.map(String::as_str).collect();
    if stem.is_empty() { "joined_state".into() } else { stem.join("_") }
}

/// The words of a name in lower case, without numbers: `keyCache_3` is `key`, `cache`.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut lower = false;
    for c in name.chars() {
        if !c.is_ascii_alphabetic() || (lower && c.is_ascii_uppercase()) {
            words.push(String::new());
        }
        if c.is_ascii_alphabetic() {
            words.last_mut().expect("there is a word").push(c.to_ascii_lowercase());
        }
        lower = c.is_ascii_lowercase();
    }
    words.retain(|w| !w.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_joined_state_is_called_by_the_words_its_parts_share() {
        let stem = |names: &[&str]| stem(&names.iter().map(|&n| n.into()).collect::<Vec<_>>());
        assert_eq!(stem(&["k_cache", "v_cache"]), "kv_cache");
        assert_eq!(stem(&["keyCache", "valueCache"]), "kv_cache");
        assert_eq!(stem(&["k_0", "v_0", "k_1", "v_1"]), "kv");
        assert_eq!(stem(&["past_key_0", "past_key_1"]), "past_key");
        assert_eq!(stem(&["layer3.k", "layer3.v"]), "layer_kv");
        assert_eq!(stem(&["a", "b"]), "joined_state");
        assert_eq!(stem(&["3", "4"]), "joined_state");
    }
}
