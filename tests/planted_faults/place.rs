//! Where a mistake is, and how far from it the place that a report names.

use std::collections::{HashMap, VecDeque};

use milopt::equiv::Divergence;
use milopt::ir::{Function, OpId, Operand, ValueId};

/// What differs between a program and the one with a mistake in it.
#[derive(Debug)]
pub struct Change {
    /// Ops that are new, of another kind, or read something else.
    ops: Vec<OpId>,
    /// States with a write that is gone.
    unwritten: Vec<ValueId>,
}

impl Change {
    pub fn between(before: &Function, after: &Function) -> Change {
        let same = |op: OpId| before.is_live(op) && spelled(before, op) == spelled(after, op);
        let computes = |op: &OpId| after.op(*op).kind() != "const";
        let gone =
            before.all_ops().into_iter().filter(|&op| before.op(op).kind() == "write_state" && !after.is_live(op));
        Change {
            ops: after.all_ops().into_iter().filter(computes).filter(|&op| !same(op)).collect(),
            unwritten: gone.filter_map(|op| before.op(op).value("input")).collect(),
        }
    }

    /// How many ops lie between the mistake and the place, when the place depends on the mistake.
    pub fn distance(&self, f: &Function, place: Option<&Divergence>) -> Option<usize> {
        let (kind, name) = place?.b.strip_suffix('`')?.split_once('`')?;
        let value = f.find_value(name)?;
        if kind.is_empty() {
            return self.unwritten.contains(&value).then_some(0);
        }
        let distances = self.distances(f);
        let writes = f.users(value).into_iter().filter(|&op| f.op(op).kind() == "write_state");
        match f.producer(value) {
            Some(op) => distances.get(&op).copied(),
            None => writes.filter_map(|op| distances.get(&op).copied()).min(),
        }
    }

    /// Every op that depends on the mistake, also through states.
    fn distances(&self, f: &Function) -> HashMap<OpId, usize> {
        let mut found: HashMap<OpId, usize> = self.ops.iter().map(|&op| (op, 0)).collect();
        let readers = self.unwritten.iter().flat_map(|&state| f.users(state));
        for op in readers {
            found.entry(op).or_insert(1);
        }
        let mut queue: VecDeque<OpId> = found.keys().copied().collect();
        queue.make_contiguous().sort_by_key(|op| found[op]);
        while let Some(op) = queue.pop_front() {
            let next = found[&op] + 1;
            let state = f.op(op).value("input").filter(|_| f.op(op).kind() == "write_state");
            for user in f.op(op).results().iter().copied().chain(state).flat_map(|v| f.users(v)) {
                found.entry(user).or_insert_with(|| {
                    queue.push_back(user);
                    next
                });
            }
        }
        found
    }
}

/// An op and what it reads; a constant stays the same one in the copies of a function.
fn spelled(f: &Function, op: OpId) -> (String, Vec<(String, Vec<Operand>)>) {
    let params = f.op(op).params().map(|(name, operands)| (name.to_string(), operands.to_vec()));
    (f.op(op).kind().to_string(), params.collect())
}
