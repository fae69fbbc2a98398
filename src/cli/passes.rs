//! `milopt passes`.

use std::io::Write;

use clap::Args;

use super::Failure;
use crate::passes;

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
                let exactness = pass.exactness.to_string();
                writeln!(out, "{:16} {exactness:18} {:10}  {}", pass.name, in_default(pass.default), pass.summary)?;
            }
            return Ok(());
        };
        let Some(pass) = passes::all().iter().find(|p| p.name == name) else {
            let known: Vec<_> = passes::all().iter().map(|p| p.name).collect();
            return Err(Failure::Usage(format!("there is no pass `{name}`; there are {}", known.join(", "))));
        };
        writeln!(out, "{} ({}, {})\n", pass.name, pass.exactness, in_default(pass.default))?;
        out.write_all(pass.documentation().as_bytes())?;
        Ok(())
    }
}
