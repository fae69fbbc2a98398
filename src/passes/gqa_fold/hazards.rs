//! What is known to go wrong with a form on some devices. Reports, not measurements of ours.

const LARGE_BATCH: &str = "matmul with ten or more in its leading axis was reported to give wrong numbers on the GPU (apple/coremltools#2650)";
const BROADCAST: &str =
    "a product that broadcasts KV heads was reported to run slower than copies on the Neural Engine";
const FUSED_ROWS: &str = "fused attention in fp16 whose query has more than one row and is computed by another op was \
                          reported to crash on the CPU (kasper0406/stablehlo-coreml#89)";

/// Of the batch-axes form, whose leading axis was one and now has this extent.
pub(super) fn batch_axes(leading: Option<u64>) -> Vec<&'static str> {
    let large = leading.is_none_or(|n| n >= 10);
    [Some(BROADCAST), large.then_some(LARGE_BATCH)].into_iter().flatten().collect()
}

/// Of fused attention whose query had this many rows and now has `group` times as many.
pub(super) fn fused_rows(q_len: Option<u64>) -> Vec<&'static str> {
    if q_len == Some(1) { vec![FUSED_ROWS] } else { vec![] }
}
