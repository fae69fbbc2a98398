//! The passes, one a file, and the pipeline that runs them.

mod dce;
mod gqa_fold;
mod kv_defer;
mod kv_forward;
mod kv_merge;
mod kv_readonly;
mod kv_slices;
mod kv_unify;
mod pipeline;
mod report;
mod view_simplify;

pub use dce::Dce;
pub use gqa_fold::{GqaFold, Lowering, Masks};
pub use kv_defer::KvDefer;
pub use kv_forward::KvForward;
pub use kv_merge::KvMerge;
pub use kv_readonly::{KvReadonly, SideFile, SideFileCache, SideFileWrite};
pub use kv_slices::KvSlices;
pub use kv_unify::KvUnify;
pub use pipeline::{Pass, PassInfo, PassOption, Pipeline, PipelineError, Preset, RunOptions, all};
pub use report::{Census, Exactness, FunctionReport, PassReport, Report, bytes};
pub use view_simplify::ViewSimplify;

pub use crate::rewrite::{Declined, Fired};
