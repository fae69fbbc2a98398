//! Folding one `scaled_dot_product_attention`.
//!
//! The op wants the leading axes of query, key and value alike, so only rows will do: the query becomes
//! `[…, n_kv_heads, group·q_len, head_dim]`, and a mask with one row per query has its rows tiled `group` times, once for
//! all attentions that read it. Where it is not known whether the mask has one row or one per query, the number of times
//! is computed from the two shapes.

use crate::analysis::spelling::{self, is_view};
use crate::analysis::traffic::value_bytes;
use crate::ir::{Dim, Function, OpId, Operand, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref};

use super::hazards;
use super::reasons::unrepeated;
use super::shared::{Heads, gains, repeated, reps, shared, tensor, tile_before, tile_by};

pub(super) fn fold(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let attention = views::Attention::of(f, op).ok_or(NoMatch::UNRELATED)?;
    let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
    let (query, out) = (tensor(f, attention.query)?, tensor(f, result)?);
    match (repeated(cx, attention.key), repeated(cx, attention.value)) {
        (false, false) => {
            let reason = "neither key nor value is a repeated view";
            return Err(unrepeated(cx, &[attention.key, attention.value], reason));
        }
        (true, true) => {}
        _ => {
            return Err(NoMatch::because("only one of key and value is a repeated view")
                .remedy("the attention is spelled with matmul"));
        }
    }
    let Some(axis) = query.rank().checked_sub(3).filter(|_| query.rank() == out.rank()) else {
        return Err(NoMatch::UNRELATED);
    };
    let key = shared(cx, op, attention.key, axis, None)?;
    let value = shared(cx, op, attention.value, axis, None)?;
    if key.heads != value.heads {
        return Err(NoMatch::because("key and value are repeated in different ways")
            .remedy("the attention is spelled with matmul"));
    }
    let heads = &key.heads;
    let (row, inner) = (axis + 1, axis + 2);
    let rows = heads.to_rows(attention.query, &query.shape, axis, row, inner).ok_or(NoMatch::UNRELATED)?;
    let back = heads.rows_back(result, &out.shape, axis, row, inner).ok_or(NoMatch::UNRELATED)?;
    let is_known = |t: &TensorType| t.known_shape().is_some();
    let known = is_known(query) && is_known(out);
    let moves = !is_view(&rows.steps) || !is_view(&back.steps);
    if moves && !known {
        return Err(NoMatch::because("rows would move data of a size that is not known").remedy("the sizes are fixed"));
    }

    let mut patch = Patch::before(op);
    let name = f.value(result).name().as_str();
    let mut inputs = vec![(
        "query",
        patch.steps(f, attention.query, &format!("{name}_rows"), &rows.steps).ok_or(NoMatch::UNRELATED)?.into(),
    )];
    for (param, v, shared) in [("key", attention.key, &key), ("value", attention.value, &value)] {
        let (at, moved) = shared.operand(f, &mut patch, v, &shared.shape)?;
        inputs.push((param, at.into()));
        patch.bytes_added += moved;
        shared.account(f, &mut patch, op, (param, v))?;
    }
    if let Some(mask) = &attention.mask {
        inputs.push((
            "attn_mask",
            Mask { heads, axis, query_value: attention.query, query: &query.shape, name }
                .folded(f, &mut patch, op, mask)?,
        ));
    }
    let ty = TensorType::new(out.dtype, back.shape.iter().cloned());
    let folded = patch.op("scaled_dot_product_attention", format!("{name}_grouped"), inputs, ty);
    let at = patch.steps(f, folded, name, &back.steps).ok_or(NoMatch::UNRELATED)?;
    patch.replace(result, at);

    for (v, spelled) in [(attention.query, &rows), (result, &back)] {
        if !is_view(&spelled.steps) {
            patch.bytes_added += 2 * value_bytes(f, v);
        }
    }
    // What is saved is not known when the number of keys is not.
    if known && [attention.key, attention.value].iter().all(|&v| f.tensor(v).is_some_and(is_known)) {
        gains(&patch)?;
    }
    patch.hazards = hazards::fused_rows(query.shape[row].as_known());
    patch.form = format!("rows of the fused attention: {}", heads.describe());
    Ok(patch)
}

/// What a mask has to fit.
struct Mask<'m> {
    heads: &'m Heads,
    /// The head axis of the query.
    axis: usize,
    query_value: ValueId,
    /// The query's shape.
    query: &'m [Dim],
    name: &'m str,
}

impl Mask<'_> {
    /// The mask for folded rows.
    fn folded(&self, f: &Function, patch: &mut Patch, reader: OpId, mask: &Operand) -> Result<Input, NoMatch> {
        let ty = f.operand_type(mask).as_tensor().ok_or(NoMatch::UNRELATED)?;
        let missing = self.query.len().checked_sub(ty.rank()).ok_or(NoMatch::UNRELATED)?;
        let at = |axis: usize| axis.checked_sub(missing).map_or(Dim::known(1), |a| ty.shape[a].clone());
        let (heads, rows) = (at(self.axis), at(self.axis + 1));
        let (all_heads, q_len) = (&self.query[self.axis], &self.query[self.axis + 1]);
        let v = match (mask, heads.is_one() && rows.is_one()) {
            (Operand::Value(v), true) => return Ok(Input::One((*v).into())),
            (Operand::Value(v), false) => *v,
            (Operand::Literal(_), _) => return Err(NoMatch::because("the mask is written out in the op")),
        };
        if !heads.is_one() && heads != *all_heads {
            return Err(NoMatch::because("the mask's heads are not provably those of the query"));
        }
        let row = self.axis + 1 - missing;
        if heads.is_one() {
            let all = self.heads.group.checked_mul(q_len).ok_or(NoMatch::UNRELATED)?;
            return self.tiled(f, patch, reader, v, row, &all).map(Input::One);
        }
        let full = self.tiled(f, patch, reader, v, row, q_len)?;
        let mut shape = ty.shape.to_vec();
        shape[row] = q_len.clone();
        let axis = self.axis - missing;
        let spelled = self.heads.to_rows(v, &shape, axis, row, row + 1).ok_or(NoMatch::UNRELATED)?;
        if !spelling::is_view(&spelled.steps) {
            patch.bytes_added += 2 * value_bytes(f, v);
        }
        let name = format!("{}_mask", self.name);
        patch.steps(f, full, &name, &spelled.steps).map(Input::One).ok_or(NoMatch::UNRELATED)
    }

    /// A mask with all of its rows repeated until there are `rows`, a multiple of the query's; the same tile that an
    /// earlier fold made, if there is one.
    fn tiled(
        &self,
        f: &Function,
        patch: &mut Patch,
        reader: OpId,
        mask: ValueId,
        row: usize,
        rows: &Dim,
    ) -> Result<Ref, NoMatch> {
        let ty = tensor(f, mask)?;
        if *rows == ty.shape[row] {
            return Ok(mask.into());
        }
        if let Some(tile) = tile_before(f, reader, mask, row, rows) {
            return Ok(tile.into());
        }
        let name = format!("{}_rows", f.value(mask).name());
        let reps = match rows.checked_div(&ty.shape[row]).and_then(|n| n.as_known()) {
            Some(times) => reps(ty.rank(), row, times).map(Input::Const),
            None => self.computed_reps(f, patch, mask, row, rows, &name).map(Input::One),
        };
        let tile = tile_by(f, patch, mask.into(), row, rows, reps.ok_or(NoMatch::UNRELATED)?, &name);
        let tile = tile.ok_or(NoMatch::UNRELATED)?;
        patch.bytes_added += 2 * patch.type_of(f, &tile).and_then(|t| t.byte_len()).unwrap_or(0);
        Ok(tile)
    }

    /// The repetitions that give a mask, of one row or one per query, this multiple of the query's rows.
    fn computed_reps(
        &self,
        f: &Function,
        patch: &mut Patch,
        mask: ValueId,
        row: usize,
        rows: &Dim,
        name: &str,
    ) -> Option<Ref> {
        let own = &f.tensor(mask)?.shape;
        let only = |size: &Dim| {
            let mut sizes = vec![Dim::known(1); own.len()];
            sizes[row] = size.clone();
            sizes
        };
        let wanted = patch.shape_from(f, self.query_value, &format!("{name}_wanted"), &only(rows))?;
        let there = patch.shape_from(f, mask, &format!("{name}_there"), &only(&own[row]))?;
        let ty = patch.type_of(f, &there)?;
        Some(patch.op("floor_div", format!("{name}_times"), [("x", wanted), ("y", there)], ty))
    }
}
