//! `dce`: erase ops that nothing reads.
//!
//! With: tensor<fp16, [2]> x
//!
//! Given:
//! ```text
//! tensor<fp16, [2]> a = relu(x = x);
//! tensor<fp16, [2]> b = exp(x = x);
//! -> (b)
//! ```
//! Return:
//! ```text
//! tensor<fp16, [2]> b = exp(x = x);
//! -> (b)
//! ```
//!
//! Exactness: bitwise. Assumes: A4 (docs/assumptions.md).
//! Keeps: `write_state`, ops without a row in the opset table, and ops that carry fields the IR cannot hold.

use crate::ir::{Function, ValueId};
use crate::rewrite::{Budget, Fired, Outcome, erase_dead, is_erasable};

use super::{Exactness, Pass};

/// Erases ops that nothing reads, constants included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Dce;

impl Pass for Dce {
    fn name(&self) -> &'static str {
        "dce"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Bitwise
    }

    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        let mut outcome = Outcome::default();
        let mut ops = f.all_ops();
        ops.reverse();
        for op in ops {
            if !f.is_live(op) || f.op(op).results().is_empty() || !is_erasable(f, op) {
                continue;
            }
            let is_const = f.op(op).kind() == "const";
            if !is_const && budget.is_spent() {
                break;
            }
            let name = f.describe(op);
            if let Some(no) = budget.refusal(f, &name) {
                outcome.decline(no.declined(name));
                continue;
            }
            let results: Vec<ValueId> = f.op(op).results().to_vec();
            if erase_dead(f, results) > 0 {
                budget.take();
                outcome.fired.push(Fired::plain(name, "nothing reads it"));
            }
        }
        outcome
    }
}
