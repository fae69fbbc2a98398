//! Knowledge about op kinds: parameters, defaults, effects and types.
//!
//! [`row`] gives what is known of a kind; a kind without a row is *opaque*: it is kept as it is, and its effect is
//! unknown. [`infer`] computes result types, [`refine`] replaces unknown sizes of a function that was read from a file
//! by what inference proves, [`views`] read the ops that rewrites look at, and [`Builder`] makes functions from nothing.

mod builder;
mod effect;
mod elementwise;
mod infer;
mod signature;
mod table;
mod refine;
pub mod views;

pub use builder::{Arg, BuildError, Builder, Size, program};
pub use effect::{Effect, Effects, effect_of};
pub use elementwise::is_elementwise;
pub use infer::{InferError, Problem, infer};
pub use refine::{Slip, agrees, refine, slip};
pub(crate) use refine::{context, fresh_type};
pub use signature::{Accepts, Default, OpDef, ParamDef, Version};
pub use table::{kinds, row};
