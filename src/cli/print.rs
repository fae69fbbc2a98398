//! `milopt print`.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::{Failure, Opening, select};
use crate::text::PrintOptions;

/// Print the program as MIL text
#[derive(Debug, Args)]
pub(super) struct Print {
    /// The package
    #[arg(value_name = "PKG")]
    package: PathBuf,
    /// Only this function
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// Every `const` op on its own and all attributes
    #[arg(long)]
    full: bool,
    /// Leave out constants of more than N elements
    #[arg(long, value_name = "N")]
    elide: Option<u64>,
    #[command(flatten)]
    opening: Opening,
}

impl Print {
    pub(super) fn execute(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let package = self.opening.open(&self.package)?;
        let options = PrintOptions { full: self.full, elide_above: self.elide };
        let text = match &self.function {
            Some(name) => options.function(select(&package, Some(name))?),
            None => options.program(package.program()),
        };
        out.write_all(text.as_bytes())?;
        Ok(())
    }
}
