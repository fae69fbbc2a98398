//! milopt reads a Core ML ML Program, rewrites its graph and proves that it still computes the same thing.
//!
//! ```no_run
//! use milopt::package::Package;
//! use milopt::passes::{Pipeline, RunOptions};
//! use milopt::verify;
//!
//! # fn main() -> Result<(), milopt::Error> {
//! let mut package = Package::open("model.mlpackage")?;
//! let report = Pipeline::default().run(package.program_mut(), &RunOptions::default())?;
//! println!("{report}");
//! package.save("faster.mlpackage", verify::structure(package.program())?, &Default::default())?;
//! # Ok(())
//! # }
//! ```
//!
//! The modules below are the layers in reading order; a lower one never imports a higher one.

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
mod error;

pub use error::Error;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/writing-a-pass.md")]
struct Documents;
