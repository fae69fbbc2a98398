//! Shorthands for the ops that decoders are made of. All return [`BuildError`] as [`Builder::op`] does.

use crate::ir::{DType, ValueId};

use super::{Arg, BuildError, Builder};

macro_rules! unary {
    ($($name:ident)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of `x`.")]
            #[doc = "# Errors\nAs [`Builder::op`]."]
            pub fn $name(&mut self, x: impl Into<Arg>) -> Result<ValueId, BuildError> {
                self.op(stringify!($name), [("x", x.into())])
            }
        )*
    };
}

macro_rules! binary {
    ($($name:ident)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of `x` and `y`, which broadcast.")]
            #[doc = "# Errors\nAs [`Builder::op`]."]
            pub fn $name(&mut self, x: impl Into<Arg>, y: impl Into<Arg>) -> Result<ValueId, BuildError> {
                self.op(stringify!($name), [("x", x.into()), ("y", y.into())])
            }
        )*
    };
}

impl Builder {
    unary! { identity shape cos sin exp tanh sigmoid silu relu gelu rsqrt sqrt square }
    binary! { add sub mul real_div pow maximum minimum equal less greater_equal }

    /// `x · y` over the last two axes, either swapped first.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn matmul(
        &mut self,
        x: impl Into<Arg>,
        y: impl Into<Arg>,
        transpose_x: bool,
        transpose_y: bool,
    ) -> Result<ValueId, BuildError> {
        let flags = [("transpose_x", transpose_x.into()), ("transpose_y", transpose_y.into())];
        self.op("matmul", [("x", x.into()), ("y", y.into())].into_iter().chain(flags))
    }

    /// `x · weightᵀ`, plus a bias if there is one; `weight` is `[out, in]`.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn linear(
        &mut self,
        x: ValueId,
        weight: impl Into<Arg>,
        bias: Option<Arg>,
    ) -> Result<ValueId, BuildError> {
        let bias = bias.map(|b| ("bias", b));
        self.op("linear", [("x", x.into()), ("weight", weight.into())].into_iter().chain(bias))
    }

    /// Attention with scale `1/sqrt(head_dim)`; a float mask is added to the scores.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn attention(
        &mut self,
        query: ValueId,
        key: ValueId,
        value: ValueId,
        mask: Option<Arg>,
    ) -> Result<ValueId, BuildError> {
        let mask = mask.map(|m| ("attn_mask", m));
        let params = [("query", query.into()), ("key", key.into()), ("value", value.into())];
        self.op("scaled_dot_product_attention", params.into_iter().chain(mask))
    }

    /// `softmax` along an axis.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn softmax(&mut self, x: ValueId, axis: i64) -> Result<ValueId, BuildError> {
        self.op("softmax", [("x", x.into()), ("axis", axis.into())])
    }

    /// The mean over `axes`.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn reduce_mean(&mut self, x: ValueId, axes: &[i64], keep_dims: bool) -> Result<ValueId, BuildError> {
        self.op("reduce_mean", [("x", x.into()), ("axes", axes.into()), ("keep_dims", keep_dims.into())])
    }

    /// `x` with another shape; one entry may be -1.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn reshape(&mut self, x: ValueId, shape: impl Into<Arg>) -> Result<ValueId, BuildError> {
        self.op("reshape", [("x", x.into()), ("shape", shape.into())])
    }

    /// Axis `i` of the result is axis `perm[i]` of `x`.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn transpose(&mut self, x: ValueId, perm: impl Into<Arg>) -> Result<ValueId, BuildError> {
        self.op("transpose", [("x", x.into()), ("perm", perm.into())])
    }

    /// Each axis repeated `reps` times.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn tile(&mut self, x: ValueId, reps: impl Into<Arg>) -> Result<ValueId, BuildError> {
        self.op("tile", [("x", x.into()), ("reps", reps.into())])
    }

    /// Axes of size one inserted; they count in the result.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn expand_dims(&mut self, x: ValueId, axes: impl Into<Arg>) -> Result<ValueId, BuildError> {
        self.op("expand_dims", [("x", x.into()), ("axes", axes.into())])
    }

    /// Axes of size one removed.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn squeeze(&mut self, x: ValueId, axes: impl Into<Arg>) -> Result<ValueId, BuildError> {
        self.op("squeeze", [("x", x.into()), ("axes", axes.into())])
    }

    /// Tensors joined along an axis.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn concat(&mut self, values: &[ValueId], axis: i64) -> Result<ValueId, BuildError> {
        self.op("concat", [("values", values.into()), ("axis", axis.into()), ("interleave", false.into())])
    }

    /// Tensors joined along a new axis.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn stack(&mut self, values: &[ValueId], axis: i64) -> Result<ValueId, BuildError> {
        self.op("stack", [("values", values.into()), ("axis", axis.into())])
    }

    /// `count` equal parts of an axis.
    ///
    /// # Errors
    /// As [`Builder::op_results`].
    pub fn split(&mut self, x: ValueId, count: i64, axis: i64) -> Result<Vec<ValueId>, BuildError> {
        self.op_results("split", [("x", x.into()), ("num_splits", count.into()), ("axis", axis.into())])
    }

    /// The box between `begin` and `end`, which may be computed.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn slice_by_index(
        &mut self,
        x: ValueId,
        begin: impl Into<Arg>,
        end: impl Into<Arg>,
    ) -> Result<ValueId, BuildError> {
        self.op("slice_by_index", [("x", x.into()), ("begin", begin.into()), ("end", end.into())])
    }

    /// The box of `size` elements from `begin`, which may be computed.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn slice_by_size(
        &mut self,
        x: ValueId,
        begin: impl Into<Arg>,
        size: impl Into<Arg>,
    ) -> Result<ValueId, BuildError> {
        self.op("slice_by_size", [("x", x.into()), ("begin", begin.into()), ("size", size.into())])
    }

    /// `x` with the box between `begin` and `end` replaced by `update`.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn slice_update(
        &mut self,
        x: ValueId,
        update: ValueId,
        begin: impl Into<Arg>,
        end: impl Into<Arg>,
    ) -> Result<ValueId, BuildError> {
        let bounds = [("begin", begin.into()), ("end", end.into())];
        self.op("slice_update", [("x", x.into()), ("update", update.into())].into_iter().chain(bounds))
    }

    /// One axis of `x` looked up at `indices`, which must lie in range.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn gather(
        &mut self,
        x: impl Into<Arg>,
        indices: impl Into<Arg>,
        axis: i64,
    ) -> Result<ValueId, BuildError> {
        self.op("gather", [("x", x.into()), ("indices", indices.into()), ("axis", axis.into())])
    }

    /// `cond ? a : b`. Core ML types the result by `a` and `b` alone: broadcast these when the condition is wider.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn select(
        &mut self,
        cond: impl Into<Arg>,
        a: impl Into<Arg>,
        b: impl Into<Arg>,
    ) -> Result<ValueId, BuildError> {
        self.op("select", [("cond", cond.into()), ("a", a.into()), ("b", b.into())])
    }

    /// `x` with another element type.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn cast(&mut self, x: ValueId, dtype: DType) -> Result<ValueId, BuildError> {
        self.op("cast", [("x", x.into()), ("dtype", dtype.name().into())])
    }

    /// The content of a state at this point.
    ///
    /// # Errors
    /// As [`Builder::op`].
    pub fn read_state(&mut self, state: ValueId) -> Result<ValueId, BuildError> {
        self.op("read_state", [("input", state.into())])
    }

    /// Replaces the whole content of a state.
    ///
    /// # Errors
    /// As [`Builder::op_results`].
    pub fn write_state(&mut self, state: ValueId, data: ValueId) -> Result<(), BuildError> {
        self.op_results("write_state", [("input", state.into()), ("data", data.into())]).map(|_| ())
    }
}
