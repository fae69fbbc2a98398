//! What the documentation of a pass shows is what the pass does.
//!
//! `With:` names the inputs, and `With then:` those afterwards where they change; `Given:` and `Return:` hold ops. The outputs are those of a line `-> (…)`, or else the last
//! result.

mod support;

use milopt::ir::{Program, ValueId};
use milopt::passes::{self, PassInfo, Pipeline, RunOptions};
use milopt::rewrite::Transaction;
use milopt::{text, verify};

/// The rest of the line that starts with `label`.
fn line<'d>(doc: &'d str, label: &str) -> Option<&'d str> {
    doc.lines().find_map(|l| l.strip_prefix(label)).map(str::trim)
}

/// The fenced text below the line `label`.
fn fenced(doc: &str, label: &str) -> Option<Vec<String>> {
    let mut lines = doc.lines().skip_while(|l| *l != label).skip(1);
    lines.next().filter(|l| *l == "```text")?;
    Some(lines.take_while(|l| *l != "```").map(String::from).collect())
}

/// The program that one fenced text shows.
fn shown(pass: &PassInfo, label: &str) -> Program {
    let doc = pass.documentation();
    let after = line(&doc, "With then:").filter(|_| label == "Return:");
    let with = after.or(line(&doc, "With:")).unwrap_or_else(|| panic!("{} does not name its inputs", pass.name));
    let mut body = fenced(&doc, label).unwrap_or_else(|| panic!("{} has no text below {label}", pass.name));
    let returned = body.last().and_then(|l| Some(l.strip_prefix("-> (")?.strip_suffix(')')?.to_string()));
    let outputs = match returned {
        Some(names) => body.pop().map(|_| names),
        None => last_result(&body),
    };
    let outputs = outputs.unwrap_or_else(|| panic!("{} {label} shows no output", pass.name));
    let program = support::program(with, &body.join("\n"), &outputs);
    verify::typed(&program).unwrap_or_else(|e| panic!("{} {label} {e}", pass.name));
    program
}

/// The name of the last result: `TYPE NAME = …`.
fn last_result(body: &[String]) -> Option<String> {
    let (defined, _) = body.last()?.split_once(" = ")?;
    defined.rsplit(' ').next().map(String::from)
}

/// A program as text, with every intermediate value called by its position.
fn canonical(mut program: Program) -> String {
    let f = &mut program.functions_mut()[0];
    let ops = f.all_ops().into_iter().filter(|&op| f.op(op).kind() != "const");
    let results: Vec<ValueId> = ops.flat_map(|op| f.op(op).results().to_vec()).collect();
    let inner: Vec<ValueId> = results.into_iter().filter(|v| !f.outputs().contains(v)).collect();
    let mut renaming = Transaction::begin(f);
    for (i, v) in inner.into_iter().enumerate() {
        renaming.rename(v, &format!("v{i}")).unwrap();
    }
    renaming.commit().unwrap();
    text::print_program(&program)
}

#[test]
fn every_pass_does_what_its_documentation_shows() {
    for pass in passes::all() {
        let mut given = shown(pass, "Given:");
        let wanted = shown(pass, "Return:");
        Pipeline::parse(pass.name).unwrap().run(&mut given, &RunOptions::default()).unwrap();
        assert_eq!(canonical(given), canonical(wanted), "{}", pass.name);
    }
}
