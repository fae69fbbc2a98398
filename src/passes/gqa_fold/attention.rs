//! Folding one `scaled_dot_product_attention`.
//!
//! The op wants the leading axes of query, key and value alike, so only rows will do: the query becomes
//! `[…, n_kv_heads, group·q_len, head_dim]`, and a mask with one row per query has its rows tiled `group` times, once for
//! all attentions that read it. Where it is not known whether the mask has one row or one per query, the number of times
//! is computed from the two shapes.

use crate::analysis::spelling::{self, is_view};
use crate::analysis::traffic::value_bytes;
use crate::ir::{DType, Dim, Function, Literal, OpId, Operand, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref};

use super::shared::{Heads, repeated, shared, tensor};

pub(super) fn fold(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let attention = views::Attention::of(f, op).ok_or(NoMatch::UNRELATED)?;
    let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
    let (query, out) = (tensor(f, attention.query)?, tensor(f, result)?);
    match (repeated(cx, attention.key), repeated(cx, attention.value)) {
        (false, false) => return Err(NoMatch::because("neither key nor value is a repeated view")),
        (true, true) => {}
        _ => return Err(NoMatch::because("only one of key and value is a repeated view")),
    }
    let Some(axis) = query.rank().checked_sub(3).filter(|_| query.rank() == out.rank()) else {
        return Err(NoMatch::UNRELATED);
    };
    let key = shared(cx, op, attention.key, axis, false)?;
    let value = shared(cx, op, attention.value, axis, false)?;
    if key.heads != value.heads {
        return Err(NoMatch::because("key and value are repeated in different ways"));
    }
    let heads = &key.heads;
    let (row, inner) = (axis + 1, axis + 2);
    let rows = heads.to_rows(attention.query, &query.shape, axis, row, inner).ok_or(NoMatch::UNRELATED)?;
    let back = heads.rows_back(result, &out.shape, axis, row, inner).ok_or(NoMatch::UNRELATED)?;
    let is_known = |t: &TensorType| t.known_shape().is_some();
    let known = is_known(query) && is_known(out);
    let moves = !is_view(&rows.steps) || !is_view(&back.steps);
    if moves && !known {
        return Err(NoMatch::because("rows would move data of a size that is not known"));
    }

    let mut patch = Patch::before(op);
    let name = f.value(result).name().as_str();
    let mut inputs = vec![(
        "query",
        patch.steps(f, attention.query, &format!("{name}_rows"), &rows.steps).ok_or(NoMatch::UNRELATED)?.into(),
    )];
    for (param, v, shared) in [("key", attention.key, &key), ("value", attention.value, &value)] {
        let mut shape = tensor(f, v)?.shape.to_vec();
        shape[axis] = heads.kv_heads.clone();
        let (at, moved) = shared.operand(f, &mut patch, v, shape)?;
        inputs.push((param, at.into()));
        patch.bytes_added += moved;
        patch.bytes_saved += shared.bytes_saved(f, op, v)?;
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
    let compared = known && [attention.key, attention.value].iter().all(|&v| f.tensor(v).is_some_and(is_known));
    if compared && patch.bytes_saved <= patch.bytes_added {
        return Err(NoMatch::because(format!(
            "no bytes gained: {} saved, {} moved instead",
            patch.bytes_saved, patch.bytes_added
        )));
    }
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
        let mut shape = ty.shape.clone();
        shape[row] = rows.clone();
        let tiled = TensorType::new(ty.dtype, shape);
        if tiled == *ty {
            return Ok(mask.into());
        }
        if let Some(tile) = existing(f, reader, mask, &tiled) {
            return Ok(tile.into());
        }
        patch.bytes_added += 2 * tiled.byte_len().unwrap_or(0);
        let name = format!("{}_rows", f.value(mask).name());
        let reps = match rows.checked_div(&ty.shape[row]).and_then(|n| i64::try_from(n.as_known()?).ok()) {
            Some(times) => {
                let mut reps = vec![1; ty.rank()];
                reps[row] = times;
                Input::Const(Literal::ints(&reps))
            }
            None => Input::One(self.computed_reps(f, patch, mask, row, rows, &name)?),
        };
        Ok(patch.op("tile", name, [("x", Input::One(mask.into())), ("reps", reps)], tiled))
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
    ) -> Result<Ref, NoMatch> {
        let per_query = rows.checked_div(&self.query[self.axis + 1]).and_then(|n| i64::try_from(n.as_known()?).ok());
        let per_query = per_query.ok_or(NoMatch::UNRELATED)?;
        let rank = tensor(f, mask)?.rank();
        let vector = |n: usize| TensorType::fixed(DType::I32, &[n as u64]);
        let mut size = |v: ValueId, rank: usize, axis: usize| {
            let shape = patch.op("shape", format!("{name}_of"), [("x", v)], vector(rank));
            let inputs = [
                ("x", Input::One(shape)),
                ("begin", Input::Const(Literal::ints(&[axis as i64]))),
                ("size", Input::Const(Literal::ints(&[1]))),
            ];
            patch.op("slice_by_size", format!("{name}_size"), inputs, vector(1))
        };
        let queries = size(self.query_value, self.query.len(), self.axis + 1);
        let own = size(mask, rank, row);
        let all = [("x", Input::One(queries)), ("y", Input::Const(Literal::int(per_query)))];
        let all = patch.op("mul", format!("{name}_wanted"), all, vector(1));
        let times = patch.op("floor_div", format!("{name}_times"), [("x", all), ("y", own)], vector(1));
        let ones = |n: usize| (n > 0).then(|| Input::Const(Literal::ints(&vec![1; n])));
        let parts = [ones(row), Some(times.into()), ones(rank - row - 1)].into_iter().flatten().collect();
        let inputs = [
            ("values", Input::Many(parts)),
            ("axis", Input::Const(Literal::int(0))),
            ("interleave", Input::Const(Literal::bool(false))),
        ];
        Ok(patch.op("concat", format!("{name}_reps"), inputs, vector(rank)))
    }
}

/// A tile of the mask that has this type and comes before `reader`.
fn existing(f: &Function, reader: OpId, mask: ValueId, ty: &TensorType) -> Option<ValueId> {
    f.users(mask).into_iter().find_map(|op| {
        let data = f.op(op);
        let &[result] = data.results() else { return None };
        let before = data.block() == f.op(reader).block() && f.comes_before(op, reader);
        let same = data.kind() == "tile" && data.value("x") == Some(mask) && f.tensor(result) == Some(ty);
        (same && before).then_some(result)
    })
}
