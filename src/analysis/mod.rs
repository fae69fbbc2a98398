//! What can be known of a function without changing it.

pub mod dataflow;
pub mod layout;
pub mod liveness;
pub mod spelling;
pub mod state;
pub mod traffic;
pub mod values;
