//! What the integration tests share.
#![allow(dead_code)]

pub mod files;
pub mod matrix;
#[cfg(feature = "cli")]
pub mod npz;
#[cfg(feature = "cli")]
pub mod place;
pub mod symbolic;
pub mod wire;

use std::path::Path;

use milopt::equiv;
use milopt::ir::{Function, Program};
use milopt::package::{Package, PackageError, SaveOptions};
use milopt::passes::{Pipeline, Report, RunOptions};
use milopt::{text, verify};

/// Checks the program and saves it.
pub fn save(package: &Package, path: impl AsRef<Path>, options: &SaveOptions) -> Result<(), PackageError> {
    package.save(path, verify::structure(package.program()).unwrap(), options)
}

/// A program with one function, from its signature and body in MIL text.
pub fn program(signature: &str, body: &str, outputs: &str) -> Program {
    let source = format!(
        "program(1.3) [specificationVersion = 9] {{\n  func main<CoreML8>({signature}) {{\n{body}\n  }} -> ({outputs});\n}}"
    );
    text::parse(&source).unwrap_or_else(|e| panic!("{e}\n{source}"))
}

/// Runs a pipeline on a copy, checks types, equivalence in every bit and that a second run changes nothing, and returns
/// the copy with the report.
pub fn optimize(before: &Program, passes: &str) -> (Program, Report) {
    optimize_at(before, passes, &[equiv::Options::default()])
}

/// [`optimize`], compared in each of these ways.
pub fn optimize_at(before: &Program, passes: &str, comparisons: &[equiv::Options]) -> (Program, Report) {
    verify::typed(before).unwrap_or_else(|e| panic!("before: {e}"));
    let pipeline = Pipeline::parse(passes).unwrap();
    let mut after = before.clone();
    let report = pipeline.run(&mut after, &RunOptions::default()).unwrap();
    verify::typed(&after).unwrap_or_else(|e| panic!("after: {e}\n{}", text::print_program(&after)));
    for options in comparisons {
        let options = equiv::Options { interface: report.interfaces(), ..options.clone() };
        let verdict = equiv::check(before, &after, None, &options).unwrap();
        assert!(
            verdict.satisfies(equiv::Exactness::Bitwise),
            "{verdict}
{}
{}",
            text::print_program(before),
            text::print_program(&after)
        );
    }
    let once = text::print_program(&after);
    let again = pipeline.run(&mut after, &RunOptions::default()).unwrap();
    assert!(!again.changed(), "a second run changes something:\n{again}\n{once}\n{}", text::print_program(&after));
    assert_eq!(once, text::print_program(&after));
    (after, report)
}

/// Runs a pipeline on a copy and checks types, that eight steps are equal up to the order of sums and that a second run
/// changes nothing; returns the copy with the report.
pub fn reassociate(before: &Program, passes: &str) -> (Program, Report) {
    verify::typed(before).unwrap_or_else(|e| panic!("before: {e}"));
    let pipeline = Pipeline::parse(passes).unwrap();
    let mut after = before.clone();
    let report = pipeline.run(&mut after, &RunOptions::default()).unwrap();
    verify::typed(&after).unwrap_or_else(|e| panic!("after: {e}\n{}", text::print_program(&after)));
    let options = equiv::Options { steps: 8, interface: report.interfaces(), ..equiv::Options::default() };
    let verdict = equiv::check(before, &after, None, &options).unwrap_or_else(|e| {
        let mut source: Option<&dyn std::error::Error> = Some(&e);
        while let Some(e) = source {
            eprintln!("{e}");
            source = e.source();
        }
        panic!("{}\n{}", text::print_program(before), text::print_program(&after))
    });
    assert!(
        verdict.satisfies(equiv::Exactness::Reassociated),
        "{verdict}\n{}\n{}",
        text::print_program(before),
        text::print_program(&after)
    );
    let again = pipeline.run(&mut after.clone(), &RunOptions::default()).unwrap();
    assert!(!again.changed(), "a second run changes something:\n{again}\n{}", text::print_program(&after));
    (after, report)
}

/// The default pipeline.
pub const DEFAULT: &str = "gqa-fold,view-simplify,dce";

/// How many ops of a kind the main function has.
pub fn count(p: &Program, kind: &str) -> usize {
    let f = main(p);
    f.all_ops().into_iter().filter(|&op| f.op(op).kind() == kind).count()
}

/// The function that runs.
pub fn main(p: &Program) -> &Function {
    p.main().expect("there is a main function")
}

/// Whether some refusal names this op and gives this reason.
pub fn declined(report: &Report, op: &str, reason: &str) -> bool {
    report
        .functions
        .iter()
        .flat_map(|f| &f.passes)
        .flat_map(|p| &p.declined)
        .any(|d| d.op.contains(op) && d.reason.contains(reason))
}
