//! `milopt passes`.

use std::io::Write;

use clap::Args;

use super::Failure;
use crate::passes::{self, PassInfo};

/// List the passes, or say what one of them does
#[derive(Debug, Args)]
pub(super) struct Passes {
    /// The pass
    name: Option<String>,
}

impl Passes {
    pub(super) fn execute(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let in_default = |default| if default { "default" } else { "on request" };
        let Some(name) = &self.name else {
            for pass in passes::all() {
                let promise = promise(pass);
                writeln!(out, "{:16} {promise:27} {:10}  {}", pass.name, in_default(pass.default), pass.summary)?;
            }
            return Ok(());
        };
        let Some(pass) = passes::all().iter().find(|p| p.name == name) else {
            let known: Vec<_> = passes::all().iter().map(|p| p.name).collect();
            return Err(Failure::Usage(format!("there is no pass `{name}`; there are {}", known.join(", "))));
        };
        writeln!(out, "{} ({}, {})\n", pass.name, promise(pass), in_default(pass.default))?;
        out.write_all(plain(&pass.documentation()).as_bytes())?;
        for (i, option) in pass.options.iter().enumerate() {
            let heading = if i == 0 { "\nOptions, as in --passes" } else { "           or --passes" };
            writeln!(out, "{heading} {}:{option}: {}", pass.name, option.summary)?;
        }
        Ok(())
    }
}

/// What a pass keeps.
fn promise(pass: &PassInfo) -> String {
    let interface = if pass.changes_interface() { ", other interface" } else { "" };
    format!("{}{interface}", pass.exactness)
}

/// Documentation without its Markdown: fenced text is indented, and source files are not referred to.
fn plain(documentation: &str) -> String {
    let mut text = String::new();
    let mut fenced = false;
    for line in documentation.lines() {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            text += &format!("  {line}\n");
        } else {
            text += &format!("{}\n", without_source(line).replace("**", "").replace('`', ""));
        }
    }
    text
}

/// A line without the first `(see FILE.rs)` in it.
fn without_source(line: &str) -> String {
    let Some((before, rest)) = line.split_once(" (see `") else { return line.to_owned() };
    match rest.split_once(".rs`)") {
        Some((_, after)) => format!("{before}{after}"),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_is_taken_off() {
        let given = "Given:\n```text\nx = f()\n```\n* **rows**: a `b` (see `c/d.rs`).\n";
        assert_eq!(plain(given), "Given:\n  x = f()\n* rows: a b.\n");
    }
}
