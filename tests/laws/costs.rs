//! What folding would cost, from the shapes alone.

use super::blocks::{Block, Consumer, MaskShape, Side, Spelling, to_front};

/// Bytes of a 16-bit tensor.
fn bytes(shape: &[u64]) -> u64 {
    2 * shape.iter().product::<u64>()
}

/// Bytes that change places when a tensor of this shape has its axes permuted: read and written, or none when only axes
/// of extent one move.
fn permuted(shape: &[u64], perm: &[usize]) -> u64 {
    let kept: Vec<usize> = perm.iter().copied().filter(|&p| shape[p] != 1).collect();
    if kept.is_sorted() { 0 } else { 2 * bytes(shape) }
}

/// Bytes saved and bytes moved instead by folding the first product, or the second; both at once where they are one op.
pub fn of_fold(block: &Block, second: bool) -> (u64, u64) {
    let sides: &[Side] = match (block.consumer, second) {
        (Consumer::Fused, _) => &[Side::Keys, Side::Values],
        (_, false) => &[Side::Keys],
        (_, true) => &[Side::Values],
    };
    let saved = sides.iter().map(|&side| copies(block, side)).sum();
    (saved, moved(block, second))
}

/// Bytes that go with the copies of keys or values: those of the ops that make them, and what their reader reads less.
fn copies(block: &Block, side: Side) -> u64 {
    let (shape, axis) = block.once(side);
    let (h, g) = (block.kv_heads, block.group);
    let (once, many) = (bytes(&shape), g * bytes(&shape));
    let made = match block.spellings[side as usize] {
        Spelling::Expand | Spelling::CopiesFirst | Spelling::HeadTile | Spelling::Stack => once + many,
        Spelling::Gather => many + many,
        Spelling::Interleave => {
            let perm = to_front(4, axis);
            let front: Vec<u64> = perm.iter().map(|&p| shape[p]).collect();
            let rest = &front[1..];
            let joined = [&[g * h], rest].concat();
            let swap = permuted(&[&[g, h], rest].concat(), &[1, 0, 2, 3, 4]);
            // Where axis `i` of the result is among the axes with the heads in front.
            let back: Vec<usize> = (0..4).map(|i| perm.iter().position(|&p| p == i).unwrap()).collect();
            permuted(&shape, &perm) + once + many + swap + permuted(&joined, &back)
        }
    };
    made + many - once
}

/// Bytes that are moved for rows: around the product, and for the mask.
fn moved(block: &Block, second: bool) -> u64 {
    let (b, h, g) = (block.batch, block.kv_heads, block.group);
    let (m, n, d) = (block.q_len, block.keys, block.head_dim);
    let grouped = block.spellings[usize::from(second)].is_grouped();
    // Heads split in two, then the axes of one matrix; by which permutation groups come in front of its rows.
    let heads = if grouped { [h, g] } else { [g, h] };
    let ([kv_heads, groups], [first, last]) = (if grouped { [1, 2] } else { [2, 1] }, [3, 4]);
    let by_row = |rows: u64, columns: u64| {
        permuted(&[b, heads[0], heads[1], rows, columns], &[0, kv_heads, groups, first, last])
    };
    let by_column = |columns: u64, rows: u64| {
        permuted(&[b, heads[0], heads[1], columns, rows], &[0, kv_heads, groups, last, first])
    };
    let behind = |columns: u64, rows: u64| {
        permuted(&[b, columns, heads[0], heads[1], rows], &[0, 1, kv_heads + 1, groups + 1, last])
    };
    match (block.consumer, second) {
        (Consumer::Queries, _) => by_row(m, d) + by_row(m, n),
        (Consumer::Keys | Consumer::KeysAndValues, false) => by_row(m, d) + by_column(n, m),
        (Consumer::Keys, true) => by_column(n, m) + by_row(m, d),
        (Consumer::KeysAndValues, true) => by_column(n, m) + by_column(d, m),
        (Consumer::Einsum, _) => behind(d, m) + behind(n, m),
        (Consumer::Fused, _) => by_row(m, d) + by_row(m, d) + mask(block, heads, [kv_heads, groups]),
    }
}

/// Bytes for a mask that fits folded rows.
fn mask(block: &Block, heads: [u64; 2], order: [usize; 2]) -> u64 {
    let Some(shape) = block.mask_shape() else { return 0 };
    let size = bytes(&shape) / if block.boolean { 2 } else { 1 };
    let per_head = matches!(block.mask, MaskShape::Heads | MaskShape::HeadsOneRow);
    let per_row = block.q_len > 1 && !matches!(block.mask, MaskShape::OneRow | MaskShape::HeadsOneRow);
    match (per_head, per_row) {
        (false, false) => 0,
        (false, true) => 2 * block.group * size,
        (true, _) => {
            let tiled = if per_row || block.q_len == 1 { 0 } else { 2 * block.q_len * size };
            let rows = [heads[0], heads[1], block.q_len, block.keys];
            let apart = permuted(&rows, &[order[0] - 1, order[1] - 1, 2, 3]) > 0;
            tiled + if apart { 2 * size } else { 0 }
        }
    }
}
