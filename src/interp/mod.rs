//! The reference interpreter: what a [`Function`](crate::ir::Function) computes, defined op by op.
//!
//! It is the oracle that rewrites are checked against, so its results are reproducible to the bit on every machine. The
//! meaning of the ops is that of coremltools 9; where it leaves something open the choice is documented at the kernel.
//!
//! # Modes
//!
//! [`Mode::Storage`] rounds every tensor to its declared element type when an op returns it and computes inside an op in
//! `f32` (`f64` for `fp64` tensors). [`Mode::Exact`] computes floats in `f64` and rounds nothing. Integers are integers in
//! both and wrap to their declared type.
//!
//! # The order of sums
//!
//! Each element of a result is a pure function of the elements it depends on. Whatever sums (`matmul`, `linear`, `conv`,
//! `einsum`, `scaled_dot_product_attention`, `softmax`, `reduce_*`, the norms, pools, each product of a recurrent layer) adds
//! the n terms of one element like this:
//!
//! * sixteen partial sums start at +0; term k is added to partial sum k mod 16, k ascending; a product is rounded before
//!   it is added (no fused multiply-add);
//! * the partial sums are added in halves: l ← l + (l+8), then (l+4), (l+2), (l+1).
//!
//! Terms are numbered row-major over the reduced axes in ascending order (`conv`: input channel of the group, then kernel
//! position, padding included as zeros; pools likewise). So the order depends on n alone: not on the number of rows or columns, strides,
//! transposition, broadcasting, which operand is left, or threads. `cumsum` adds one term after the other to +0, `scatter`
//! in the order of its indices. A bias is added after the sum. Products of elements (`reduce_prod`) start at one and
//! combine in the same order. The inside of `scaled_dot_product_attention` is not rounded to the storage type.
//!
//! Transcendental functions come from the `libm` crate and depend on the value alone. `maximum`, `minimum` and whatever
//! is built on them (`clip`, `relu`, `reduce_max`, pooling) are those of IEEE 754-2019: NaN wins and −0 < +0.

mod error;
mod tensor;
mod boxes;
mod run;
mod call;
mod ops;
mod product;
mod lanes;
mod par;
mod view;
mod num;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod contract;

pub use error::{Fault, InterpError};
pub use run::Interpreter;
pub use tensor::{Tensor, Values, same_bits};

/// How floats are rounded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// Every tensor is rounded to its declared element type at the op boundary; `f32` inside an op.
    Storage,
    /// `f64`, nothing is rounded.
    Exact,
}
