//! The kernels, one file per group of ops, and the table that names them.

mod elementwise;
mod activation;
mod views;
mod slice;
mod gather;
mod scatter;
mod list;
mod generate;
mod sort;
mod pad;
mod rearrange;
mod resize;
mod reduce;
mod norm;
mod matmul;
mod window;
mod conv;
mod pool;
mod recurrent;
mod compress;

use super::call::Call;
use super::error::Fault;
use super::tensor::{Dims, Tensor, volume};

/// How an op is evaluated: to one result or to several.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kernel {
    One(fn(&Call<'_>) -> Result<Tensor, Fault>),
    Many(fn(&Call<'_>) -> Result<Vec<Tensor>, Fault>),
}

/// The kernel of an op kind; `None` when it is not interpreted.
pub(super) fn kernel(kind: &str) -> Option<Kernel> {
    use Kernel::{Many, One};
    Some(match kind {
        "identity" => One(views::identity),
        "reshape" => One(views::reshape),
        "reshape_like" => One(views::reshape_like),
        "expand_dims" => One(views::expand_dims),
        "squeeze" => One(views::squeeze),
        "flatten2d" => One(views::flatten2d),
        "transpose" => One(views::transpose),
        "reverse" => One(views::reverse),
        "tile" => One(views::tile),
        "sliding_windows" => One(views::sliding_windows),
        "concat" => One(views::concat),
        "stack" => One(views::stack),
        "split" => Many(views::split),

        "slice_by_index" => One(slice::slice_by_index),
        "slice_by_size" => One(slice::slice_by_size),
        "slice_update" => One(slice::slice_update),

        "gather" => One(gather::gather),
        "gather_along_axis" => One(gather::gather_along_axis),
        "gather_nd" => One(gather::gather_nd),
        "scatter" => One(scatter::scatter),
        "scatter_along_axis" => One(scatter::scatter_along_axis),
        "scatter_nd" => One(scatter::scatter_nd),

        "make_list" => One(list::make_list),
        "list_length" => One(list::list_length),
        "list_write" => One(list::list_write),
        "list_scatter" => One(list::list_scatter),
        "list_read" => One(list::list_read),
        "list_gather" => One(list::list_gather),

        "fill" => One(generate::fill),
        "fill_like" => One(generate::fill_like),
        "shape" => One(generate::shape),
        "range_1d" => One(generate::range_1d),
        "one_hot" => One(generate::one_hot),
        "non_zero" => One(generate::non_zero),
        "band_part" => One(generate::band_part),
        "topk" => Many(sort::topk),
        "argsort" => One(sort::argsort),
        "reduce_argmax" | "reduce_argmin" => One(sort::arg_extreme),
        "pad" => One(pad::pad),
        "reverse_sequence" => One(pad::reverse_sequence),

        "cast" => One(elementwise::cast),
        "select" => One(elementwise::select),
        "logical_not" => One(elementwise::logical_not),
        "log" | "rsqrt" | "inverse" => One(elementwise::with_epsilon),
        "threshold" => One(activation::threshold),
        "gelu" => One(activation::gelu),

        "pixel_shuffle" | "depth_to_space" => One(rearrange::to_space),
        "pixel_unshuffle" | "space_to_depth" => One(rearrange::to_depth),
        "space_to_batch" => One(rearrange::space_to_batch),
        "batch_to_space" => One(rearrange::batch_to_space),
        "crop" => One(rearrange::crop),
        "upsample_nearest_neighbor" => One(resize::upsample_nearest_neighbor),
        "upsample_bilinear" => One(resize::upsample_bilinear),
        "resize_nearest_neighbor" => One(resize::resize_nearest_neighbor),
        "resize_bilinear" => One(resize::resize_bilinear),
        "resize" => One(resize::resize),

        "softmax" => One(reduce::softmax),
        "cumsum" => One(reduce::cumsum),
        "layer_norm" => One(norm::layer_norm),
        "batch_norm" => One(norm::batch_norm),
        "instance_norm" => One(norm::instance_norm),
        "l2_norm" => One(norm::l2_norm),
        "local_response_norm" => One(norm::local_response_norm),

        "matmul" => One(matmul::matmul),
        "linear" => One(matmul::linear),
        "einsum" => One(matmul::einsum),
        "scaled_dot_product_attention" => One(matmul::attention),
        "conv" => One(conv::conv),
        "conv_transpose" => One(conv::conv_transpose),
        "max_pool" | "avg_pool" | "l2_pool" => One(pool::pool),
        "lstm" => Many(recurrent::lstm),
        "gru" => Many(recurrent::gru),
        "rnn" => Many(recurrent::rnn),

        "quantize" => One(compress::quantize),
        "dequantize" => One(compress::dequantize),
        "constexpr_affine_dequantize" => One(compress::affine_dequantize),
        "constexpr_blockwise_shift_scale" => One(compress::blockwise_shift_scale),
        "constexpr_lut_to_dense" => One(compress::lut_to_dense),
        "constexpr_sparse_to_dense" => One(compress::sparse_to_dense),
        "constexpr_lut_to_sparse" => Many(compress::lut_to_sparse),
        "constexpr_sparse_blockwise_shift_scale" => Many(compress::sparse_blockwise_shift_scale),
        "constexpr_cast" => One(compress::constexpr_cast),

        _ if elementwise::unary_fn::<f32>(kind).is_some() => One(elementwise::unary),
        _ if elementwise::binary_fn::<f32>(kind).is_some() => One(elementwise::binary),
        _ if elementwise::comparison_fn::<f32>(kind).is_some() => One(elementwise::comparison),
        _ if elementwise::logical_fn(kind).is_some() => One(elementwise::logical),
        _ if activation::parametric_fn::<f32>(kind).is_some() => One(activation::parametric),
        _ if reduce::real_fn::<f32>(kind).is_some() => One(reduce::reduce),
        _ => return None,
    })
}
