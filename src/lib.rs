//! milopt reads a Core ML ML Program, rewrites its graph and proves that it still computes the same thing.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod ir;
pub mod opset;
pub mod analysis;
pub mod verify;
pub mod text;
pub mod proto;
pub mod package;
pub mod interp;
pub mod rewrite;
pub mod passes;
pub mod equiv;
#[cfg(feature = "cli")]
pub mod cli;
