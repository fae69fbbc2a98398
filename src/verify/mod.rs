//! Checks what every layer relies on, in two grades, and returns a witness of it.
//!
//! **Structure** ([`structure`]) is what printing and saving need: a program of this grade, written by name, reads back
//! as the same graph. It lets odd files pass that loaders accept. For every function:
//!
//! * **V1** The function has a name, and the default function exists.
//! * **V2** Values and op kinds have names: none is empty.
//! * **V3** Wherever a value is used, its name means that value: it is defined before, in the same block or one around
//!   it, and no other value of this name is defined in between.
//! * **V4** Ops, blocks and values point at each other: an op knows its block, a nested block its op, a value its
//!   definition, and its uses are exactly the operands and block outputs that are it.
//! * **V5** Every result has a type, and so has every input.
//! * **V6** `cond` and `while_loop` have two blocks, no op of another known kind has any, and a function body has no
//!   inputs.
//! * **V7** States are read and written only by `read_state` and `write_state`, are never returned, and exist only as
//!   function inputs. (An opaque op may take one.)
//! * **V8** The interface lists the function's inputs, states and outputs by name, and nothing else. Checked of
//!   functions that were edited, so that a file whose description disagrees with its program can still be copied; a
//!   function without any description is let through.
//!
//! **Typed** ([`typed`]) is what interpreting and rewriting need on top:
//!
//! * **V9** Names of values that are visible together are distinct.
//! * **V10** Inference ([`crate::opset::infer`]) finds no fault with any op.
//! * **V11** Stored result types agree with inferred ones ([`crate::opset::agrees`]), or differ by a known
//!   [`Slip`](crate::opset::Slip) of coremltools.
//! * **V12** V8 holds of every function, and described element types and shapes admit the program's.
//! * **V13** Both blocks of a `while_loop` give their inputs the same names.

mod names;
mod structure;
mod typed;

use std::fmt;
use std::ops::Deref;

use crate::ir::{Function, Name, OpId, Program};

/// A program together with the proof that it passed verification. It borrows the program, so nothing can change it
/// while the proof exists.
#[derive(Clone, Copy, Debug)]
pub struct Verified<'p> {
    program: &'p Program,
    grade: Grade,
}

impl<'p> Verified<'p> {
    /// The program.
    pub fn program(&self) -> &'p Program {
        self.program
    }
    /// What was checked.
    pub fn grade(&self) -> Grade {
        self.grade
    }
}

impl Deref for Verified<'_> {
    type Target = Program;
    fn deref(&self) -> &Program {
        self.program
    }
}

/// How much was checked; a higher grade includes the lower one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Grade {
    /// V1 to V8.
    Structure,
    /// All.
    Typed,
}

/// One broken invariant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Number of the invariant: 3 is V3.
    pub rule: u8,
    /// Function.
    pub function: Name,
    /// Kind and first result of the op, unless the function as a whole is meant.
    pub op: Option<String>,
    /// What is wrong.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "V{}: function `{}`: ", self.rule, self.function)?;
        if let Some(op) = &self.op {
            write!(f, "{op}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// Every broken invariant of a program; there is at least one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{}", .list.iter().map(Violation::to_string).collect::<Vec<_>>().join("\n"))]
pub struct Violations {
    list: Vec<Violation>,
}

impl Violations {
    /// The violations, function by function in order.
    pub fn list(&self) -> &[Violation] {
        &self.list
    }
}

/// Checks V1 to V8.
///
/// # Errors
/// Every violation.
pub fn structure(p: &Program) -> Result<Verified<'_>, Violations> {
    let mut report = Report::default();
    check_structure(p, &mut report);
    report.verdict(p, Grade::Structure)
}

/// Checks V1 to V13.
///
/// # Errors
/// Every violation; those of V9 on only of programs whose structure is right.
pub fn typed(p: &Program) -> Result<Verified<'_>, Violations> {
    let mut report = Report::default();
    check_structure(p, &mut report);
    if report.list.is_empty() {
        for f in p.functions() {
            typed::check(f, &mut report);
        }
    }
    report.verdict(p, Grade::Typed)
}

/// Checks V1 to V8 of one function, as after an edit.
///
/// # Errors
/// Every violation.
pub fn function(f: &Function) -> Result<(), Violations> {
    let mut report = Report::default();
    check_function(f, &mut report);
    report.conclude()
}

/// Checks of one function what rewriting relies on: V1 to V11, V8 whether or not it was edited yet.
///
/// # Errors
/// Every violation; those of V9 on only of functions whose structure is right.
pub fn rewritable(f: &Function) -> Result<(), Violations> {
    let mut report = Report::default();
    structure::check(f, &mut report);
    names::interface(f, 8, &mut report);
    if report.list.is_empty() {
        names::scopes(f, true, &mut report);
        f.all_ops().into_iter().for_each(|op| typed::check_op(f, op, &mut report));
    }
    report.conclude()
}

/// Checks V10 and V11 of these ops.
///
/// # Errors
/// Every violation.
pub fn ops(f: &Function, ops: impl IntoIterator<Item = OpId>) -> Result<(), Violations> {
    let mut report = Report::default();
    ops.into_iter().for_each(|op| typed::check_op(f, op, &mut report));
    report.conclude()
}

fn check_structure(p: &Program, report: &mut Report) {
    if let Some(name) = p.default_function().filter(|n| p.function(n).is_none()) {
        report.function(1, name, "is the default function but does not exist");
    }
    for f in p.functions() {
        check_function(f, report);
    }
}

fn check_function(f: &Function, report: &mut Report) {
    structure::check(f, report);
    if f.revision() > 0 {
        names::interface(f, 8, report);
    }
}

/// Collects violations.
#[derive(Default)]
struct Report {
    list: Vec<Violation>,
}

impl Report {
    fn function(&mut self, rule: u8, function: &Name, message: impl Into<String>) {
        self.list.push(Violation { rule, function: function.clone(), op: None, message: message.into() });
    }

    fn op(&mut self, rule: u8, f: &Function, op: OpId, message: impl Into<String>) {
        let at = Some(f.describe(op));
        self.list.push(Violation { rule, function: f.name().clone(), op: at, message: message.into() });
    }

    fn conclude(self) -> Result<(), Violations> {
        match self.list.is_empty() {
            true => Ok(()),
            false => Err(Violations { list: self.list }),
        }
    }

    fn verdict(self, program: &Program, grade: Grade) -> Result<Verified<'_>, Violations> {
        self.conclude().map(|()| Verified { program, grade })
    }
}

#[cfg(test)]
mod tests;
