//! The table of op kinds. A row names the kinds that share parameter lists, what they do, how their types are inferred,
//! and their definitions, oldest first; [`super::signature`] explains the notation.
//!
//! Source: the op registry of coremltools 9.0. A definition holds from its opset until a later one replaces it.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::Effect::{self, Control, Pure, Random, ReadsState, WritesState};
use super::infer::{
    InferFn, constexpr, control, conv, elementwise, gather, linear, list, movement, recurrent, reduce, reshape, slice,
    space,
};
use super::signature::{OpDef, parse};

struct Row {
    kinds: &'static str,
    effect: Effect,
    infer: InferFn,
    versions: &'static [&'static str],
}

/// What is known about an op kind; `None` for kinds that are opaque: kept as they are and never looked through.
pub fn row(kind: &str) -> Option<&'static OpDef> {
    static ROWS: LazyLock<HashMap<&'static str, OpDef>> = LazyLock::new(|| {
        TABLE
            .iter()
            .flat_map(|r| r.kinds.split(' ').map(move |kind| (kind, r)))
            .map(|(kind, r)| {
                let versions = r.versions.iter().copied().filter_map(parse).collect();
                (kind, OpDef { kind, effect: r.effect, infer: r.infer, versions })
            })
            .collect()
    });
    ROWS.get(kind)
}

/// Every kind that has a row.
pub fn kinds() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|r| r.kinds.split(' '))
}

#[rustfmt::skip]
const TABLE: &[Row] = &[
    // Constants and state
    Row { kinds: "const", effect: Pure, infer: control::constant, versions: &[
        "C5: (val:any!)",
    ] },
    Row { kinds: "read_state", effect: ReadsState, infer: control::read_state, versions: &[
        "C8: (input:state)",
    ] },
    Row { kinds: "write_state", effect: WritesState, infer: control::write_state, versions: &[
        "C8: (input:state, data:any)",
    ] },
    Row { kinds: "cond", effect: Control, infer: control::cond, versions: &[
        "C5: (pred:bool)",
    ] },
    Row { kinds: "while_loop", effect: Control, infer: control::while_loop, versions: &[
        "C5: (loop_vars:tuple)",
    ] },
    Row { kinds: "make_list", effect: Pure, infer: list::make_list, versions: &[
        "C5: (init_length:i32?=1, dynamic_length:bool!?=true, elem_shape:tuple, dtype:str!?=fp32)",
    ] },
    Row { kinds: "list_write", effect: Pure, infer: list::list_write, versions: &[
        "C5: (ls:any, index:i32, value:T) with T=f16/f32/bool/i32",
    ] },
    Row { kinds: "list_scatter", effect: Pure, infer: list::list_scatter, versions: &[
        "C5: (ls:any, indices:i32, value:T) with T=f16/f32/bool/i32",
    ] },
    Row { kinds: "list_read", effect: Pure, infer: list::list_read, versions: &[
        "C5: (ls:any, index:i32)",
    ] },
    Row { kinds: "list_gather", effect: Pure, infer: list::list_gather, versions: &[
        "C5: (ls:any, indices:i32)",
    ] },
    Row { kinds: "list_length", effect: Pure, infer: list::list_length, versions: &[
        "C5: (ls:any)",
    ] },
    // Shape and data movement
    Row { kinds: "identity", effect: Pure, infer: movement::identity, versions: &[
        "C5: (x:any)",
    ] },
    Row { kinds: "cast", effect: Pure, infer: movement::cast, versions: &[
        "C5: (x:T, dtype:str!) with T=f16/f32/i32/bool",
        "C7: (x:T, dtype:str!) with T=f16/f32/i8/u8/i16/u16/i32/bool",
    ] },
    Row { kinds: "reshape", effect: Pure, infer: reshape::reshape, versions: &[
        "C5: (x:T, shape:i32) with T=f16/f32/i32/bool",
        "C7: (x:T, shape:U) with T=f16/f32/i8/u8/i16/u16/i32/bool; U=i8/i16/i32",
    ] },
    Row { kinds: "reshape_like", effect: Pure, infer: reshape::reshape_like, versions: &[
        "C6: (x:T, ref_tensors:tuple, begins:tuple, ends:tuple, end_masks:tuple) with T=f16/f32/i32/bool",
        "C7: (x:T, ref_tensors:tuple, begins:tuple, ends:tuple, end_masks:tuple) with T=f16/f32/i8/i16/i32/u8/u16/bool",
    ] },
    Row { kinds: "expand_dims", effect: Pure, infer: reshape::expand_dims, versions: &[
        "C5: (x:T, axes:i32!) with T=f16/f32/i32/bool",
        "C7: (x:T, axes:i32!) with T=f16/f32/i8/i16/i32/u8/u16/bool",
    ] },
    Row { kinds: "squeeze", effect: Pure, infer: reshape::squeeze, versions: &[
        "C5: (x:T, axes:i32!?=none) with T=f16/f32/i32/bool",
        "C7: (x:T, axes:i32!?=none) with T=f16/f32/i8/i16/i32/u8/u16/bool",
    ] },
    Row { kinds: "flatten2d", effect: Pure, infer: reshape::flatten2d, versions: &[
        "C5: (x:T, axis:i32!?=1) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "transpose", effect: Pure, infer: movement::transpose, versions: &[
        "C5: (x:T, perm:i32!) with T=f16/f32/i32/bool",
        "C7: (x:T, perm:i32!) with T=f16/f32/i8/i16/i32/u8/u16/bool",
    ] },
    Row { kinds: "tile", effect: Pure, infer: movement::tile, versions: &[
        "C5: (x:T, reps:i32) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "concat", effect: Pure, infer: movement::concat, versions: &[
        "C5: (values:tuple, axis:i32!, interleave:bool!?=false)",
    ] },
    Row { kinds: "stack", effect: Pure, infer: movement::stack, versions: &[
        "C5: (values:tuple, axis:i32!)",
    ] },
    Row { kinds: "split", effect: Pure, infer: movement::split, versions: &[
        "C5: (x:T, num_splits:i32!?=none, split_sizes:i32!?=none, axis:i32!) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "slice_by_index", effect: Pure, infer: slice::slice_by_index, versions: &[
        "C5: (x:T, begin:i32, end:i32, stride:i32!?=none, begin_mask:bool!?=none, end_mask:bool!?=none, squeeze_mask:bool!?=none) with T=f16/f32/i32/bool",
        "C7: (x:T, begin:U, end:U, stride:U!?=none, begin_mask:bool!?=none, end_mask:bool!?=none, squeeze_mask:bool!?=none) with T=f16/f32/i8/i16/i32/u8/u16/bool; U=i8/i16/i32",
    ] },
    Row { kinds: "slice_by_size", effect: Pure, infer: slice::slice_by_size, versions: &[
        "C5: (x:T, begin:i32, size:i32) with T=f16/f32/i32/bool",
        "C7: (x:T, begin:U, size:U) with T=f16/f32/i8/i16/i32/u8/u16/bool; U=i8/i16/i32",
    ] },
    Row { kinds: "slice_update", effect: Pure, infer: slice::slice_update, versions: &[
        "C8: (x:T, update:T, begin:U, end:U, stride:U!?=none, begin_mask:bool!?=none, end_mask:bool!?=none, squeeze_mask:bool!?=none) with T=f16/f32/i8/i16/i32/u8/u16/bool; U=i8/i16/i32",
    ] },
    Row { kinds: "gather", effect: Pure, infer: gather::gather, versions: &[
        "C5: (x:T, indices:i32, axis:i32!?=0) with T=f16/f32/i32",
        "C6: (x:T, indices:I, axis:i32!?=0, batch_dims:i32!?=0) with T=f16/f32/i32; I=i32/u16/i16",
        "C7: (x:T, indices:I, axis:i32!?=0, batch_dims:i32!?=0, validate_indices:bool!?=false) with T=f16/f32/i32/i16/u16/i8/u8; I=i32/i16/u16/i8/u8",
    ] },
    Row { kinds: "gather_along_axis", effect: Pure, infer: gather::gather_along_axis, versions: &[
        "C5: (x:T, indices:i32, axis:i32!?=0) with T=f16/f32/i32",
        "C6: (x:T, indices:I, axis:i32!?=0) with T=f16/f32/i32; I=i32/u16/i16",
        "C7: (x:T, indices:I, axis:i32!?=0, validate_indices:bool!?=false) with T=f16/f32/i32/i16/u16/i8/u8; I=i32/i16/u16/i8/u8",
    ] },
    Row { kinds: "gather_nd", effect: Pure, infer: gather::gather_nd, versions: &[
        "C5: (x:T, indices:i32) with T=f16/f32/i32",
        "C6: (x:T, indices:I, batch_dims:i32!?=0) with T=f16/f32/i32; I=i32/u16/i16",
        "C7: (x:T, indices:I, batch_dims:i32!?=0, validate_indices:bool!?=false) with T=f16/f32/i32/i16/u16/i8/u8; I=i32/i16/u16/i8/u8",
    ] },
    Row { kinds: "scatter", effect: Pure, infer: gather::scatter, versions: &[
        "C5: (data:T, indices:i32, updates:T, axis:i32!?=0, mode:str!?=add) with T=f16/f32/i32",
        "C7: (data:T, indices:i32, updates:T, axis:i32!?=0, mode:str!?=add, validate_indices:bool!?=false) with T=f16/f32/i32",
    ] },
    Row { kinds: "scatter_along_axis", effect: Pure, infer: gather::scatter_along_axis, versions: &[
        "C5: (data:T, indices:i32, updates:T, axis:i32!?=0, mode:str!?=add) with T=f16/f32/i32",
        "C7: (data:T, indices:i32, updates:T, axis:i32!?=0, mode:str!?=add, validate_indices:bool!?=false) with T=f16/f32/i32",
    ] },
    Row { kinds: "scatter_nd", effect: Pure, infer: gather::scatter_nd, versions: &[
        "C5: (data:T, indices:i32, updates:T, mode:str!?=add) with T=f16/f32/i32",
        "C7: (data:T, indices:i32, updates:T, mode:str!?=add, validate_indices:bool!?=false) with T=f16/f32/i32",
    ] },
    Row { kinds: "pad", effect: Pure, infer: movement::pad, versions: &[
        "C5: (x:T, pad:i32, mode:str!?=constant, constant_val:T!?=0.0) with T=f16/f32",
    ] },
    Row { kinds: "reverse", effect: Pure, infer: reduce::along_axes, versions: &[
        "C5: (x:T, axes:i32!?=none) with T=f16/f32/i32/bool",
        "C7: (x:T, axes:i32!?=none) with T=f16/f32/i8/i16/i32/u8/u16/bool",
    ] },
    Row { kinds: "reverse_sequence", effect: Pure, infer: movement::reverse_sequence, versions: &[
        "C5: (x:T, lengths:i32, seq_axis:i32!?=0, batch_axis:i32!?=0) with T=f16/f32/i32/bool",
        "C7: (x:T, lengths:U, seq_axis:i32!?=0, batch_axis:i32!?=0) with T=f16/f32/i8/i16/i32/u8/u16/bool; U=i8/i16/i32",
    ] },
    Row { kinds: "sliding_windows", effect: Pure, infer: movement::sliding_windows, versions: &[
        "C5: (x:T, axis:i32!, size:i32!, stride:i32!?=1) with T=f16/f32/i32",
        "C7: (x:T, axis:i32!, size:i32!, stride:i32!?=1) with T=f16/f32/i8/i16/i32/u8/u16/bool",
    ] },
    Row { kinds: "band_part", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, lower:i32!?=-1, upper:i32!?=-1) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "fill", effect: Pure, infer: movement::fill, versions: &[
        "C5: (shape:i32, value:T!?=0.0) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "fill_like", effect: Pure, infer: movement::fill_like, versions: &[
        "C6: (ref_tensor:T, value:U!?=0.0) with T=f16/f32/i32/bool; U=f16/f32/i32/bool",
    ] },
    Row { kinds: "random_bernoulli", effect: Random, infer: movement::random, versions: &[
        "C5: (shape:i32, prob:T!?=0.5, seed:i32!?=-1) with T=f16/f32",
    ] },
    Row { kinds: "random_normal", effect: Random, infer: movement::random, versions: &[
        "C5: (shape:i32, mean:T!?=0.0, stddev:T!?=1.0, seed:i32!?=-1) with T=f16/f32",
    ] },
    Row { kinds: "random_uniform", effect: Random, infer: movement::random, versions: &[
        "C5: (shape:i32, low:T!?=0.0, high:T!?=1.0, seed:i32!?=-1) with T=f16/f32",
    ] },
    Row { kinds: "shape", effect: Pure, infer: movement::shape, versions: &[
        "C5: (x:T) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "range_1d", effect: Pure, infer: movement::range_1d, versions: &[
        "C5: (end:T, start:T, step:T) with T=f16/f32/i32",
    ] },
    Row { kinds: "one_hot", effect: Pure, infer: movement::one_hot, versions: &[
        "C5: (indices:i32, one_hot_vector_size:i32, axis:i32!?=-1, on_value:T!?=1, off_value:T!?=0) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "non_zero", effect: Pure, infer: movement::non_zero, versions: &[
        "C5: (x:T) with T=f16/f32/i32/bool",
    ] },
    Row { kinds: "select", effect: Pure, infer: elementwise::select, versions: &[
        "C5: (cond:bool, a:T, b:T) with T=f16/f32/bool/i32",
    ] },
    // Elementwise
    Row { kinds: "abs exp2 sign square", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T) with T=f16/f32/i32",
    ] },
    Row { kinds: "acos asin atan atanh ceil cos cosh erf exp floor relu relu6 round sigmoid silu sin sinh softplus softsign sqrt tan tanh", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T) with T=f16/f32",
    ] },
    Row { kinds: "add floor_div maximum minimum mod mul pow real_div sub", effect: Pure, infer: elementwise::binary, versions: &[
        "C5: (x:T, y:T) with T=f16/f32/i32",
    ] },
    Row { kinds: "equal greater greater_equal less less_equal not_equal", effect: Pure, infer: elementwise::compare, versions: &[
        "C5: (x:T, y:T) with T=f16/f32/i32",
    ] },
    Row { kinds: "logical_and logical_or logical_xor", effect: Pure, infer: elementwise::compare, versions: &[
        "C5: (x:T, y:T) with T=bool",
    ] },
    Row { kinds: "logical_not", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:bool)",
    ] },
    Row { kinds: "inverse", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, epsilon:T!?=1e-4) with T=f16/f32",
        "C7: (x:T, epsilon:U!?=1e-4) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "log", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, epsilon:T!?=1e-45) with T=f16/f32",
        "C7: (x:T, epsilon:U!?=1e-45) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "rsqrt", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, epsilon:T!?=1e-12) with T=f16/f32",
        "C7: (x:T, epsilon:U!?=1e-12) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "clip", effect: Pure, infer: elementwise::clip, versions: &[
        "C5: (x:T, alpha:T!, beta:T!) with T=f16/f32",
        "C7: (x:T, alpha:T!, beta:T!) with T=f16/f32",
    ] },
    Row { kinds: "threshold", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, alpha:T!) with T=f16/f32/i32",
    ] },
    Row { kinds: "elu leaky_relu thresholded_relu", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, alpha:T!) with T=f16/f32",
        "C7: (x:T, alpha:U!) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "prelu", effect: Pure, infer: reduce::prelu, versions: &[
        "C5: (x:T, alpha:T!) with T=f16/f32",
        "C7: (x:T, alpha:U!) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "clamped_relu linear_activation scaled_tanh sigmoid_hard", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, alpha:T!, beta:T!) with T=f16/f32",
        "C7: (x:T, alpha:U!, beta:U!) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "softplus_parametric", effect: Pure, infer: elementwise::same, versions: &[
        "C5: (x:T, alpha:T!, beta:T!) with T=f16/f32",
        "C7: (x:T, alpha:U!, beta:U!) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "gelu", effect: Pure, infer: elementwise::gelu, versions: &[
        "C5: (x:T, mode:str!?=EXACT) with T=f16/f32",
    ] },
    // Reduction and normalisation
    Row { kinds: "reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max reduce_mean reduce_min reduce_prod reduce_sum reduce_sum_square", effect: Pure, infer: reduce::reduce, versions: &[
        "C5: (x:T, axes:i32!?=none, keep_dims:bool!?=false) with T=f16/f32/i32",
    ] },
    Row { kinds: "reduce_argmax reduce_argmin", effect: Pure, infer: reduce::arg_reduce, versions: &[
        "C5: (x:T, axis:i32!?=-1, keep_dims:bool!?=false) with T=f16/f32/i32",
        "C7: (x:T, axis:i32!?=-1, keep_dims:bool!?=false, output_dtype:str!?=int32) with T=f16/f32/i32",
    ] },
    Row { kinds: "softmax", effect: Pure, infer: reduce::along_axis, versions: &[
        "C5: (x:T, axis:i32!?=-1) with T=f16/f32",
    ] },
    Row { kinds: "cumsum", effect: Pure, infer: reduce::cumsum, versions: &[
        "C5: (x:T, axis:i32!?=0, exclusive:bool!?=false, reverse:bool!?=false) with T=f16/f32/i32",
    ] },
    Row { kinds: "argsort", effect: Pure, infer: reduce::argsort, versions: &[
        "C5: (x:T, axis:i32!?=-1, ascending:bool!?=false) with T=f16/f32/i32",
    ] },
    Row { kinds: "topk", effect: Pure, infer: reduce::topk, versions: &[
        "C5: (x:T, k:i32!?=1, axis:i32!?=-1, ascending:bool!?=false) with T=f16/f32/i32",
        "C6: (x:T, k:i32!?=1, axis:i32!?=-1, ascending:bool!?=false, sort:bool!?=true, return_indices:bool!?=true) with T=f16/f32/i32",
        "C7: (x:T, k:K!?=1, axis:i32!?=-1, ascending:bool!?=false, sort:bool!?=true, return_indices:bool!?=true, output_indices_dtype:str!?=int32) with T=f16/f32/i8/i16/i32/u8/u16; K=i8/i16/i32",
    ] },
    Row { kinds: "layer_norm", effect: Pure, infer: reduce::layer_norm, versions: &[
        "C5: (x:T, axes:i32!?=all axes, gamma:T!?=none, beta:T!?=none, epsilon:T!?=1e-05) with T=f16/f32",
        "C7: (x:T, axes:i32!?=all axes, gamma:U!?=none, beta:U!?=none, epsilon:U!?=1e-05) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "batch_norm", effect: Pure, infer: reduce::batch_norm, versions: &[
        "C5: (x:T, mean:T!, variance:T!, gamma:T!?=none, beta:T!?=none, epsilon:T!?=1e-05) with T=f16/f32",
        "C7: (x:T, mean:U!, variance:U!, gamma:U!?=none, beta:U!?=none, epsilon:U!?=1e-05) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "instance_norm", effect: Pure, infer: reduce::instance_norm, versions: &[
        "C5: (x:T, gamma:T!?=none, beta:T!?=none, epsilon:T!?=1e-05) with T=f16/f32",
        "C7: (x:T, gamma:U!?=none, beta:U!?=none, epsilon:U!?=1e-05) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "l2_norm", effect: Pure, infer: reduce::l2_norm, versions: &[
        "C5: (x:T, epsilon:T!?=1e-06) with T=f16/f32",
        "C7: (x:T, epsilon:U!?=1e-06) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "local_response_norm", effect: Pure, infer: reduce::local_response_norm, versions: &[
        "C5: (x:T, size:i32!, alpha:T!?=0.0001, beta:T!?=0.75, k:T!?=1.0) with T=f16/f32",
        "C7: (x:T, size:i32!, alpha:U!?=0.0001, beta:U!?=0.75, k:U!?=1.0) with T=f16/f32; U=f16/f32",
    ] },
    // Linear algebra
    Row { kinds: "matmul", effect: Pure, infer: linear::matmul, versions: &[
        "C5: (x:T, y:T, transpose_x:bool!?=false, transpose_y:bool!?=false) with T=f16/f32/i32",
        "C7: (x:T, y:U, transpose_x:bool!?=false, transpose_y:bool!?=false) with T=f16/f32/i32; U=f16/f32/i32",
    ] },
    Row { kinds: "linear", effect: Pure, infer: linear::linear, versions: &[
        "C5: (x:T, weight:T!, bias:T!?=zeros) with T=f16/f32/i32",
        "C7: (x:T, weight:U!, bias:U!?=zeros) with T=f16/f32/i32; U=f16/f32/i32",
    ] },
    Row { kinds: "einsum", effect: Pure, infer: linear::einsum, versions: &[
        "C5: (values:tuple, equation:str!)",
    ] },
    Row { kinds: "scaled_dot_product_attention", effect: Pure, infer: linear::attention, versions: &[
        "C8: (query:T, key:T, value:T, attn_mask:M?=none) with T=f16/f32; M=bool/f16/f32",
    ] },
    Row { kinds: "conv", effect: Pure, infer: conv::conv, versions: &[
        "C5: (x:T, weight:T, bias:T!?=none, strides:i32!?=ones, pad_type:str!?=valid, pad:i32!?=zeros, dilations:i32!?=ones, groups:i32!?=1) with T=f16/f32",
        "C7: (x:T, weight:U, bias:U?=none, strides:i32!?=ones, pad_type:str!?=valid, pad:i32!?=zeros, dilations:i32!?=ones, groups:i32!?=1) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "conv_transpose", effect: Pure, infer: conv::conv_transpose, versions: &[
        "C5: (x:T, weight:T!, bias:T!?=none, pad:i32!?=zeros, output_shape:i32!?=none, pad_type:str!?=valid, strides:i32!?=ones, dilations:i32!?=ones, groups:i32!?=1) with T=f16/f32",
        "C7: (x:T, weight:U, bias:U?=none, pad:i32!?=zeros, output_shape:i32!?=none, pad_type:str!?=valid, strides:i32!?=ones, dilations:i32!?=ones, groups:i32!?=1) with T=f16/f32; U=f16/f32",
    ] },
    Row { kinds: "max_pool", effect: Pure, infer: conv::pool, versions: &[
        "C5: (x:T, kernel_sizes:i32!, strides:i32!?=ones, pad_type:str!, pad:i32!?=zeros, ceil_mode:bool!?=false) with T=f16/f32",
    ] },
    Row { kinds: "l2_pool", effect: Pure, infer: conv::l2_pool, versions: &[
        "C5: (x:T, kernel_sizes:i32!, strides:i32!?=ones, pad_type:str!, pad:i32!?=zeros, ceil_mode:bool!?=false) with T=f16/f32",
    ] },
    Row { kinds: "avg_pool", effect: Pure, infer: conv::pool, versions: &[
        "C5: (exclude_padding_from_average:bool!?=false, x:T, kernel_sizes:i32!, strides:i32!?=ones, pad_type:str!, pad:i32!?=zeros, ceil_mode:bool!?=false) with T=f16/f32",
    ] },
    Row { kinds: "lstm", effect: Pure, infer: recurrent::layer, versions: &[
        "C5: (x:T, initial_h:T, initial_c:T, weight_ih:T!, weight_hh:T!, bias:T!?=none, peephole:T!?=none, weight_ih_back:T!?=none, weight_hh_back:T!?=none, bias_back:T!?=none, peephole_back:T!?=none, direction:str!?=forward, output_sequence:bool!?=false, recurrent_activation:str!?=sigmoid, cell_activation:str!?=tanh, activation:str!?=tanh, clip:T!?=none) with T=f32",
        "C7: (x:T, initial_h:T, initial_c:T, weight_ih:T!, weight_hh:T!, bias:T!?=none, peephole:T!?=none, weight_ih_back:T!?=none, weight_hh_back:T!?=none, bias_back:T!?=none, peephole_back:T!?=none, direction:str!?=forward, output_sequence:bool!?=false, recurrent_activation:str!?=sigmoid, cell_activation:str!?=tanh, activation:str!?=tanh, clip:T!?=none) with T=f16/f32",
    ] },
    Row { kinds: "gru", effect: Pure, infer: recurrent::layer, versions: &[
        "C5: (x:T, initial_h:T, weight_ih:T!, weight_hh:T!, bias:T!?=none, direction:str!?=forward, output_sequence:bool!?=false, recurrent_activation:str!?=sigmoid, activation:str!?=tanh) with T=f32",
        "C7: (x:T, initial_h:T, weight_ih:T!, weight_hh:T!, bias:T!?=none, direction:str!?=forward, output_sequence:bool!?=false, recurrent_activation:str!?=sigmoid, activation:str!?=tanh) with T=f16/f32",
        "C8: (x:T, initial_h:T, weight_ih:T!, weight_hh:T!, bias:T!?=none, direction:str!?=forward, output_sequence:bool!?=false, recurrent_activation:str!?=sigmoid, activation:str!?=tanh, reset_after:bool!?=false, input_bias:T!?=none) with T=f16/f32",
    ] },
    Row { kinds: "rnn", effect: Pure, infer: recurrent::layer, versions: &[
        "C5: (x:T, initial_h:T, weight_ih:T!, weight_hh:T!, bias:T!?=none, direction:str!?=forward, output_sequence:bool!?=false, activation:str!?=tanh) with T=f32",
        "C7: (x:T, initial_h:T, weight_ih:T!, weight_hh:T!, bias:T!?=none, direction:str!?=forward, output_sequence:bool!?=false, activation:str!?=tanh) with T=f16/f32",
    ] },
    // Planes
    Row { kinds: "upsample_nearest_neighbor", effect: Pure, infer: space::upsample, versions: &[
        "C5: (x:T, scale_factor_height:U!?=1, scale_factor_width:U!?=1) with T=f16/f32; U=f32/i32",
    ] },
    Row { kinds: "upsample_bilinear", effect: Pure, infer: space::upsample, versions: &[
        "C5: (x:T, scale_factor_height:U!?=1, scale_factor_width:U!?=1, align_corners:bool!?=true) with T=f16/f32; U=i32/f32",
        "C6: (x:T, scale_factor_height:U!?=1, scale_factor_width:U!?=1, align_corners:bool!?=true, half_pixel_centers:bool!?=none) with T=f16/f32; U=i32/f32",
    ] },
    Row { kinds: "resize_nearest_neighbor", effect: Pure, infer: space::resize_to, versions: &[
        "C5: (x:T, target_size_height:i32!, target_size_width:i32!) with T=f16/f32",
    ] },
    Row { kinds: "resize_bilinear", effect: Pure, infer: space::resize_to, versions: &[
        "C5: (x:T, target_size_height:i32!?=1, target_size_width:i32!?=1, sampling_mode:str!?=DEFAULT) with T=f16/f32",
    ] },
    Row { kinds: "resize", effect: Pure, infer: space::resize, versions: &[
        "C7: (x:T, shape:U, resized_dims:u32!, interpolation_mode:str!?=LINEAR, sampling_mode:str!?=DEFAULT) with T=f16/f32/i32; U=i32/i16/u16/u32",
    ] },
    Row { kinds: "crop", effect: Pure, infer: space::crop, versions: &[
        "C5: (x:T, crop_height:i32!, crop_width:i32!) with T=f16/f32",
    ] },
    Row { kinds: "pixel_shuffle", effect: Pure, infer: space::to_space, versions: &[
        "C5: (x:T, upscale_factor:i32!) with T=f16/f32",
    ] },
    Row { kinds: "depth_to_space", effect: Pure, infer: space::to_space, versions: &[
        "C5: (x:T, block_size:i32!) with T=f16/f32",
    ] },
    Row { kinds: "pixel_unshuffle", effect: Pure, infer: space::to_depth, versions: &[
        "C6: (x:T, downscale_factor:u32!) with T=f16/f32",
    ] },
    Row { kinds: "space_to_depth", effect: Pure, infer: space::to_depth, versions: &[
        "C5: (x:T, block_size:i32!) with T=f16/f32",
    ] },
    Row { kinds: "space_to_batch", effect: Pure, infer: space::space_to_batch, versions: &[
        "C5: (x:T, block_shape:i32!, paddings:i32!) with T=f16/f32",
    ] },
    Row { kinds: "batch_to_space", effect: Pure, infer: space::batch_to_space, versions: &[
        "C5: (x:T, block_shape:i32!, crops:i32!) with T=f16/f32",
    ] },
    // Compression
    Row { kinds: "constexpr_affine_dequantize", effect: Pure, infer: constexpr::affine, versions: &[
        "C6: (quantized_data:SrcT!, zero_point:ZeroPointT!, scale:DstT!, axis:i32!) with SrcT=u8/i8; ZeroPointT=u8/i8/f32; DstT=f16/f32",
    ] },
    Row { kinds: "constexpr_blockwise_shift_scale", effect: Pure, infer: constexpr::blockwise, versions: &[
        "C8: (data:SrcT!, scale:DstT!, offset:OffsetT!?=none) with SrcT=i4/u4/i8/u8/f16/f32; DstT=f16/f32; OffsetT=i4/u4/i8/u8/f16/f32",
    ] },
    Row { kinds: "constexpr_cast", effect: Pure, infer: constexpr::cast, versions: &[
        "C6: (source_val:f16!, output_dtype:str!)",
        "C8: (source_val:f16!, output_dtype:str!)",
    ] },
    Row { kinds: "constexpr_lut_to_dense", effect: Pure, infer: constexpr::lut_to_dense, versions: &[
        "C6: (indices:u8!, lut:T!, shape:u32!) with T=i8/u8/f16/f32",
        "C8: (indices:IndicesT!, lut:T!, vector_axis:i32!?=none) with IndicesT=u1/u2/u3/u4/u6/u8; T=i8/u8/f16/f32",
    ] },
    Row { kinds: "constexpr_lut_to_sparse", effect: Pure, infer: constexpr::lut_to_sparse, versions: &[
        "C8: (indices_mask:u1!, indices_nonzero_data:IndicesT!, lut:T!, vector_axis:i32!?=none) with IndicesT=u1/u2/u3/u4/u6/u8; T=i8/u8/f16/f32",
    ] },
    Row { kinds: "constexpr_sparse_to_dense", effect: Pure, infer: constexpr::sparse_to_dense, versions: &[
        "C6: (nonzero_data:T!, mask:u8!, shape:u32!) with T=i8/u8/f16/f32",
        "C8: (nonzero_data:T!, mask:u1!) with T=i4/u4/i8/u8/f16/f32",
    ] },
    Row { kinds: "constexpr_sparse_blockwise_shift_scale", effect: Pure, infer: constexpr::sparse_blockwise, versions: &[
        "C8: (data_mask:u1!, nonzero_data:SrcT!, scale:DstT!, offset:OffsetT!?=none) with SrcT=i4/u4/i8/u8/f16/f32; DstT=f16/f32; OffsetT=i4/u4/i8/u8/f16/f32",
    ] },
    Row { kinds: "quantize", effect: Pure, infer: constexpr::quantize, versions: &[
        "C7: (input:SrcT, zero_point:DstT!?=none, scale:SrcT!, axis:i32!?=none, output_dtype:str!) with SrcT=f16/f32; DstT=u8/i8",
    ] },
    Row { kinds: "dequantize", effect: Pure, infer: constexpr::dequantize, versions: &[
        "C7: (input:SrcT, zero_point:SrcT!?=none, scale:DstT!, axis:i32!?=none) with DstT=f16/f32; SrcT=u8/i8",
    ] },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_definition_parses_and_kinds_are_unique() {
        for r in TABLE {
            for v in r.versions {
                assert!(parse(v).is_some(), "{}: {v}", r.kinds);
            }
        }
        let all: Vec<_> = kinds().collect();
        let unique: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(unique.len(), all.len());
        assert!(all.iter().all(|k| row(k).is_some_and(|r| r.kind() == *k)));
        assert!(row("non_maximum_suppression").is_none(), "kinds without a row are opaque");
    }

    #[test]
    fn definitions_follow_the_opset() {
        let reshape = row("reshape").unwrap();
        assert_eq!(reshape.version(6).unwrap().since(), 5);
        assert_eq!(reshape.version(9).unwrap().since(), 7);
        assert_eq!(row("slice_update").unwrap().since(), 8);
        assert!(row("slice_update").unwrap().version(7).is_none());
        assert!(row("gather").unwrap().version(5).unwrap().param("batch_dims").is_none());
    }
}
