//! The wire format: prost messages declared by hand, and a scanner over raw bytes.
//!
//! Messages (`mil`, `model`) hold what the schema knows; map fields are sorted, so that encoding is deterministic.
//! prost drops the fields it does not know, so whoever must keep a file byte for byte works on ranges of the file that
//! the scanner (`wire`) finds, and asks `schema` what a message would lose.
//!
//! Source: `Model.proto`, `FeatureTypes.proto`, `DataStructures.proto` and `MIL.proto` of coremltools 9.0.

pub(crate) mod mil;
pub(crate) mod model;
pub(crate) mod schema;
pub(crate) mod wire;
