//! The side file: what the caller has to know of caches that are inputs. Its schema is in docs/readonly-kv.md.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::Report;
use crate::ir::Name;
use crate::rewrite::{HostWrite, InterfaceChange, Position};

/// What the caller writes into the caches after each run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SideFile {
    /// Version of the schema.
    pub version: u32,
    /// The caches of each function that was rewritten.
    pub functions: BTreeMap<String, Vec<SideFileCache>>,
}

/// An input that was a state.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SideFileCache {
    /// The input.
    pub input: Name,
    /// Its element type, and that of the output.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// What is written into it after a run; nothing where the function only reads.
    pub write: Option<SideFileWrite>,
}

/// A box of a cache that is overwritten after a run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SideFileWrite {
    /// The output that holds the new content of the box.
    pub output: Name,
    /// Its shape, and that of the box; `None` for a size that differs from run to run.
    pub shape: Vec<Option<u64>>,
    /// Where the box begins on each axis.
    pub begin: Vec<Position>,
    /// The assignment, for people.
    pub formula: String,
}

impl SideFile {
    /// The version of the schema.
    pub const VERSION: u32 = 1;

    /// What a report says of the caller's part.
    pub fn of(report: &Report) -> SideFile {
        let caches = |f: &str| report.interface(f).into_iter().filter_map(cache).collect();
        let functions = report.functions.iter().map(|f| (f.function.clone(), caches(&f.function)));
        SideFile { version: SideFile::VERSION, functions: functions.collect() }
    }

    /// Whether no state became an input.
    pub fn is_empty(&self) -> bool {
        self.functions.values().all(Vec::is_empty)
    }
}

fn cache(change: &InterfaceChange) -> Option<SideFileCache> {
    match change {
        InterfaceChange::ReadOnly(write) => Some(SideFileCache {
            input: write.cache.clone(),
            dtype: write.dtype.to_string(),
            shape: write.cache_shape.clone(),
            write: Some(write.into()),
        }),
        InterfaceChange::Input { cache, dtype, cache_shape } => Some(SideFileCache {
            input: cache.clone(),
            dtype: dtype.to_string(),
            shape: cache_shape.clone(),
            write: None,
        }),
        _ => None,
    }
}

impl From<&HostWrite> for SideFileWrite {
    fn from(write: &HostWrite) -> SideFileWrite {
        SideFileWrite {
            output: write.output.clone(),
            shape: write.output_shape.clone(),
            begin: write.begin.clone(),
            formula: write.to_string(),
        }
    }
}
