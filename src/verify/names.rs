//! Names: what they mean where they are used, and which the interface lists.

use std::collections::HashMap;

use crate::ir::{BlockId, Function, Name, OpId, ValueId};

use super::Report;

/// What names mean at one point of a function.
#[derive(Default)]
struct Scope<'f> {
    meaning: HashMap<&'f str, ValueId>,
    /// What was shadowed, to be restored when the innermost block ends.
    shadowed: Vec<(&'f str, Option<ValueId>)>,
}

impl<'f> Scope<'f> {
    fn define(&mut self, f: &'f Function, v: ValueId) -> Option<ValueId> {
        let name = f.value(v).name().as_str();
        let old = self.meaning.insert(name, v);
        self.shadowed.push((name, old));
        old
    }

    fn leave(&mut self, depth: usize) {
        while self.shadowed.len() > depth {
            if let Some((name, old)) = self.shadowed.pop() {
                match old {
                    Some(v) => self.meaning.insert(name, v),
                    None => self.meaning.remove(name),
                };
            }
        }
    }

    fn means(&self, f: &Function, v: ValueId) -> bool {
        self.meaning.get(f.value(v).name().as_str()) == Some(&v)
    }
}

/// V3: names mean the values that are used. With `unique`, V9: no name is defined twice where both are visible.
pub(super) fn scopes(f: &Function, unique: bool, report: &mut Report) {
    let mut scope = Scope::default();
    let mut walk = Walk { f, unique, report };
    for &v in f.inputs() {
        walk.define(&mut scope, None, v);
    }
    walk.block(&mut scope, f.body(), None);
}

struct Walk<'f, 'r> {
    f: &'f Function,
    unique: bool,
    report: &'r mut Report,
}

impl<'f> Walk<'f, '_> {
    fn define(&mut self, scope: &mut Scope<'f>, op: Option<OpId>, v: ValueId) {
        let old = scope.define(self.f, v);
        if self.unique && old.is_some_and(|old| old != v) {
            self.say(9, op, format!("the name `{}` is defined twice", self.f.value(v).name()));
        }
    }

    fn resolve(&mut self, scope: &Scope<'f>, op: Option<OpId>, v: ValueId) {
        if !self.unique && !scope.means(self.f, v) {
            let name = self.f.value(v).name();
            let message = match scope.meaning.contains_key(name.as_str()) {
                true => format!("`{name}` means another value here"),
                false => format!("`{name}` is used where it is not defined"),
            };
            self.say(3, op, message);
        }
    }

    fn say(&mut self, rule: u8, op: Option<OpId>, message: String) {
        match op {
            Some(op) => self.report.op(rule, self.f, op, message),
            None => self.report.function(rule, self.f.name(), message),
        }
    }

    fn block(&mut self, scope: &mut Scope<'f>, b: BlockId, owner: Option<OpId>) {
        let depth = scope.shadowed.len();
        for &v in self.f.block(b).inputs() {
            self.define(scope, owner, v);
        }
        for op in self.f.ops(b) {
            for v in self.f.op(op).operands().iter().filter_map(|o| o.as_value()) {
                self.resolve(scope, Some(op), v);
            }
            for &inner in self.f.op(op).blocks() {
                self.block(scope, inner, Some(op));
            }
            for &v in self.f.op(op).results() {
                self.define(scope, Some(op), v);
            }
        }
        for &v in self.f.block(b).outputs() {
            self.resolve(scope, owner, v);
        }
        scope.leave(depth);
    }
}

/// V8 and the first half of V12: the interface lists inputs, states and outputs by name.
pub(super) fn interface(f: &Function, rule: u8, report: &mut Report) {
    let i = f.interface();
    if i.inputs.is_empty() && i.outputs.is_empty() && i.states.is_empty() {
        return;
    }
    let name = |v: &ValueId| f.value(*v).name().clone();
    let (states, inputs): (Vec<ValueId>, Vec<ValueId>) =
        f.inputs().iter().partition(|&&v| f.ty(v).as_state().is_some());
    let described = |features: &[crate::ir::Feature]| features.iter().map(|f| f.name.clone()).collect::<Vec<_>>();
    let mut compare = |what: &str, have: Vec<Name>, said: Vec<Name>| {
        for n in have.iter().filter(|n| !said.contains(n)) {
            report.function(rule, f.name(), format!("{what} `{n}` is not in the description"));
        }
        for n in said.iter().filter(|n| !have.contains(n)) {
            report.function(rule, f.name(), format!("the description lists {what} `{n}`, which does not exist"));
        }
    };
    // Old files list states among the inputs.
    let (mut said_states, mut said_inputs) = (described(&i.states), described(&i.inputs));
    let is_state = |n: &Name| i.inputs.iter().any(|f| f.name == *n && matches!(f.kind, crate::ir::FeatureKind::State(_)));
    said_states.extend(said_inputs.iter().filter(|n| is_state(n)).cloned());
    said_inputs.retain(|n| !is_state(n));
    compare("input", inputs.iter().map(name).collect(), said_inputs);
    compare("state", states.iter().map(name).collect(), said_states);
    compare("output", f.outputs().iter().map(name).collect(), described(&i.outputs));
}
