//! Rules and the loop that applies them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::analysis::layout::Layouts;
use crate::ir::{Function, Name, OpId};

use super::{Certificate, InterfaceChange, Patch};

/// What a rule may look at.
pub struct Context<'f> {
    /// The function.
    pub f: &'f Function,
    /// Its layouts, computed on demand.
    pub layouts: Layouts<'f>,
}

impl<'f> Context<'f> {
    /// A context for the function as it is now.
    pub fn new(f: &'f Function) -> Context<'f> {
        Context { f, layouts: Layouts::new(f) }
    }
}

/// Why a rule does not apply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoMatch {
    reason: Option<Cow<'static, str>>,
    remedy: Option<Cow<'static, str>>,
    keeps: Keeps,
}

impl NoMatch {
    /// The op is not what the rule is about: nothing to report.
    pub const UNRELATED: NoMatch = NoMatch { reason: None, remedy: None, keeps: Keeps::Nothing };

    /// The op is what the rule is about, but this condition fails.
    pub fn because(reason: impl Into<Cow<'static, str>>) -> NoMatch {
        NoMatch { reason: Some(reason.into()), ..NoMatch::UNRELATED }
    }

    /// What would make the rewrite possible.
    pub fn remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> NoMatch {
        self.remedy = Some(remedy.into());
        self
    }

    /// What stays in the graph because of it.
    pub fn keeping(mut self, keeps: Keeps) -> NoMatch {
        self.keeps = keeps;
        self
    }

    /// The reason, if there is one to report.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// The entry in the report for an op; `None` when there is no reason to report.
    pub fn declined(self, op: impl Into<String>) -> Option<Declined> {
        Some(Declined {
            op: op.into(),
            reason: self.reason?.into_owned(),
            remedy: self.remedy.map(Cow::into_owned),
            keeps: self.keeps,
        })
    }
}

/// A rewrite of one place.
pub trait Rule {
    /// The patch for `op`, or why there is none.
    ///
    /// # Errors
    /// [`NoMatch`] when the rule does not apply. This is an answer, not a failure.
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch>;
}

/// A rewrite that can be left out, by where it would be done.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Site {
    /// The function.
    pub function: Name,
    /// The pass.
    pub pass: String,
    /// The op, or the state, as [`Fired::op`] calls it.
    pub op: String,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.function, self.pass, self.op)
    }
}

/// Which rewrites may be done: how many more, and which not. Both are for finding one that is to blame.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Budget {
    left: Option<usize>,
    withheld: Arc<[Site]>,
    pass: &'static str,
}

impl Budget {
    /// At most so many rewrites, if there is a limit, and none at `withheld` sites.
    pub fn new(limit: Option<usize>, withheld: &[Site]) -> Budget {
        Budget { left: limit, withheld: withheld.into(), pass: "" }
    }

    /// The same for a pass of this name.
    pub fn for_pass(&mut self, pass: &'static str) -> &mut Budget {
        self.pass = pass;
        self
    }

    /// How many rewrites are left; `None` without a limit.
    pub fn left(&self) -> Option<usize> {
        self.left
    }

    /// Whether nothing is left.
    pub fn is_spent(&self) -> bool {
        self.left == Some(0)
    }

    /// Why the pass may not do a rewrite at this op or state of a function, called as in [`Fired::op`].
    pub fn refusal(&self, f: &Function, op: &str) -> Option<NoMatch> {
        let is_here = |s: &Site| s.function == *f.name() && s.pass == self.pass && s.op == op;
        self.withheld.iter().any(is_here).then(|| NoMatch::because("left out: with it the result was not equal"))
    }

    /// Takes one rewrite out; `false` when none is left.
    pub fn take(&mut self) -> bool {
        match &mut self.left {
            None => true,
            Some(0) => false,
            Some(n) => {
                *n -= 1;
                true
            }
        }
    }
}

/// A rewrite that was done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Fired {
    /// The op it was done to.
    pub op: String,
    /// How it was done.
    pub form: String,
    /// Bytes per run that are no longer written or read.
    pub bytes_saved: u64,
    /// Bytes per run that are written or read anew.
    pub bytes_added: u64,
    /// What is known to go wrong with this form on some devices.
    pub hazards: Vec<&'static str>,
    /// How the operands of a fold lie in what is read in their place.
    pub certificates: Vec<Certificate>,
}

impl Fired {
    /// A rewrite that moves no bytes.
    pub fn plain(op: impl Into<String>, form: impl Into<String>) -> Fired {
        Fired {
            op: op.into(),
            form: form.into(),
            bytes_saved: 0,
            bytes_added: 0,
            hazards: vec![],
            certificates: vec![],
        }
    }
}

/// What stays in a graph because a rewrite was not done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Keeps {
    /// Nothing that the rewrite is there to remove.
    #[default]
    Nothing,
    /// Copies of KV heads.
    Copies,
    /// Reshapes around a region that could compute in the folded shape.
    Reshapes,
    /// Reads or writes of a state.
    StateOps,
}

/// A rewrite that was considered and not done.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct Declined {
    /// The op it was about.
    pub op: String,
    /// The condition that failed.
    pub reason: String,
    /// What would make it possible.
    pub remedy: Option<String>,
    /// What stays because of it.
    pub keeps: Keeps,
}

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.op, self.reason)?;
        self.remedy.iter().try_for_each(|remedy| write!(f, "; possible if {remedy}"))
    }
}

/// What a pass did to a function.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Outcome {
    /// Rewrites that were done, in order.
    pub fired: Vec<Fired>,
    /// Rewrites that were considered and not done.
    pub declined: Vec<Declined>,
    /// How the interface changed.
    pub interface: Vec<InterfaceChange>,
}

impl Outcome {
    /// Adds what another step did.
    pub fn extend(&mut self, other: Outcome) {
        self.fired.extend(other.fired);
        self.interface.extend(other.interface);
        self.decline(other.declined);
    }

    /// Adds refusals, each once.
    pub fn decline(&mut self, declined: impl IntoIterator<Item = Declined>) {
        for d in declined {
            if !self.declined.contains(&d) {
                self.declined.push(d);
            }
        }
    }
}

/// Sweeps over a function until no rule fires; a rewrite must lower some cost, so that this ends.
const MAX_SWEEPS: usize = 32;

/// Applies rules to every op of a function, in order, until none fires or the budget is spent.
pub fn drive(f: &mut Function, rules: &[&dyn Rule], budget: &mut Budget) -> Outcome {
    let mut outcome = Outcome::default();
    for _ in 0..MAX_SWEEPS {
        let before = outcome.fired.len();
        outcome.declined.clear();
        sweep(f, rules, budget, &mut outcome);
        if outcome.fired.len() == before || budget.is_spent() {
            break;
        }
    }
    outcome
}

fn sweep(f: &mut Function, rules: &[&dyn Rule], budget: &mut Budget, outcome: &mut Outcome) {
    let ops = f.all_ops();
    let mut at = 0;
    while let Some((index, patch)) = next_match(f, &ops[at..], rules, outcome) {
        if budget.is_spent() {
            return;
        }
        let op = ops[at + index];
        at += index + 1;
        let name = f.describe(op);
        if let Some(no) = budget.refusal(f, &name) {
            outcome.decline(no.declined(name));
            continue;
        }
        let fired = Fired {
            op: name.clone(),
            form: patch.form.clone(),
            bytes_saved: patch.bytes_saved,
            bytes_added: patch.bytes_added,
            hazards: patch.hazards.clone(),
            certificates: patch.certificates.clone(),
        };
        match patch.apply(f) {
            Ok(()) => {
                budget.take();
                outcome.fired.push(fired);
            }
            Err(e) => outcome.declined.extend(NoMatch::because(e.to_string()).declined(name)),
        }
    }
}

fn next_match(f: &Function, ops: &[OpId], rules: &[&dyn Rule], outcome: &mut Outcome) -> Option<(usize, Patch)> {
    let cx = Context::new(f);
    for (index, &op) in ops.iter().enumerate() {
        if !f.is_live(op) {
            continue;
        }
        for rule in rules {
            match rule.rewrite(&cx, op) {
                Ok(patch) => return Some((index, patch)),
                Err(no) if no.reason().is_none() => {}
                Err(no) => outcome.decline(no.declined(f.describe(op))),
            }
        }
    }
    None
}
