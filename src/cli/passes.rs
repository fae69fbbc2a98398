//! `milopt passes`.

use std::io::Write;

use clap::Args;

use super::Failure;
use crate::passes::{self, PassInfo, Preset};

/// List the passes, or say what one of them does
#[derive(Debug, Args)]
pub(super) struct Passes {
    /// The pass
    name: Option<String>,
}

impl Passes {
    pub(super) fn execute(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let Some(name) = &self.name else {
            for pass in passes::all() {
                let promise = promise(pass);
                writeln!(out, "{:16} {promise:27} {:13}  {}", pass.name, preset_of(pass), pass.summary)?;
            }
            return Ok(());
        };
        let Some(pass) = passes::all().iter().find(|p| p.name == name) else {
            let known: Vec<_> = passes::all().iter().map(|p| p.name).collect();
            return Err(Failure::Usage(format!("there is no pass `{name}`; there are {}", known.join(", "))));
        };
        writeln!(out, "{} ({}, {})\n", pass.name, promise(pass), preset_of(pass))?;
        out.write_all(plain(&pass.documentation()).as_bytes())?;
        for (i, option) in pass.options.iter().enumerate() {
            let heading = if i == 0 { "\nOptions, as in --passes" } else { "           or --passes" };
            writeln!(out, "{heading} {}:{option}: {}", pass.name, option.summary)?;
        }
        Ok(())
    }
}

/// The least option that runs the pass.
fn preset_of(pass: &PassInfo) -> &'static str {
    let presets = [(Preset::O1, "default"), (Preset::O2, "-O2"), (Preset::ReadOnly, "--readonly-kv")];
    let runs = |preset: Preset| preset.passes().iter().any(|p| p.name == pass.name);
    presets.into_iter().find(|(preset, _)| runs(*preset)).map_or("on request", |(_, option)| option)
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
