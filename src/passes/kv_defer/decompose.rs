//! `scaled_dot_product_attention` as the ops it is made of, so that scores of old and new keys can be joined.

use std::collections::HashMap;

use crate::ir::{DType, Function, Literal, OpId, Operand, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Input, Patch, PatchError, Ref, Transaction};

/// What several attentions share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    masks: HashMap<ValueId, ValueId>,
    roots: HashMap<u64, ValueId>,
}

/// Replaces a fused attention and returns the product of weights and values; `None` where its sizes do not tell how.
///
/// `softmax(q·kᵀ / √E + mask)·v`, in 32 bits between the products, as inside of the op.
pub(super) fn decompose(f: &mut Function, op: OpId, shared: &mut Shared) -> Result<Option<ValueId>, PatchError> {
    let Some(parts) = Parts::of(f, op) else { return Ok(None) };
    let mask = match &parts.mask {
        None => None,
        Some(Operand::Value(v)) => Some(term(f, op, *v, shared)?),
        Some(Operand::Literal(_)) => return Ok(None),
    };
    let divisor = parts.divisor(f, op, shared)?;
    let mut patch = Patch::before(op);
    let name = parts.name.as_str();
    let narrow = |dtype| TensorType::new(dtype, parts.scores.shape.iter().cloned());
    let wide = TensorType::new(DType::F32, parts.scores.shape.iter().cloned());
    let product = |patch: &mut Patch, name: String, x: Input, y: Input, transpose_y: bool, ty: TensorType| {
        let flag = |b: bool| Input::Const(Literal::bool(b));
        patch.op(
            "matmul",
            name,
            [("x", x), ("y", y), ("transpose_x", flag(false)), ("transpose_y", flag(transpose_y))],
            ty,
        )
    };
    let cast = |patch: &mut Patch, x: Input, to: TensorType| {
        let dtype = Input::Const(Literal::string(&to.dtype.to_string()));
        patch.op("cast", format!("{name}_cast"), [("x", x), ("dtype", dtype)], to)
    };
    let dtype = parts.scores.dtype;
    let mut x =
        product(&mut patch, format!("{name}_scores"), parts.query.into(), parts.key.into(), true, narrow(dtype));
    if dtype != DType::F32 {
        x = cast(&mut patch, x.into(), wide.clone());
    }
    x = patch.op("real_div", format!("{name}_scaled"), [("x", Input::One(x)), ("y", divisor.into())], wide.clone());
    if let Some(mask) = mask {
        x = patch.op("add", format!("{name}_masked"), [("x", Input::One(x)), ("y", mask.into())], wide.clone());
    }
    x = patch.op(
        "softmax",
        format!("{name}_weights"),
        [("x", Input::One(x)), ("axis", Input::Const(Literal::int(-1)))],
        wide,
    );
    if dtype != DType::F32 {
        x = cast(&mut patch, x.into(), narrow(dtype));
    }
    let out = f.tensor(parts.result).cloned().unwrap_or_else(|| parts.scores.clone());
    let x = product(&mut patch, name.to_string(), x.into(), parts.value.into(), false, out);
    patch.replace(parts.result, x);
    let name = f.value(parts.result).name().clone();
    patch.apply(f)?;
    Ok(f.find_value(&name))
}

struct Parts {
    query: ValueId,
    key: ValueId,
    value: ValueId,
    mask: Option<Operand>,
    result: ValueId,
    head_dim: u64,
    /// The type of the scores.
    scores: TensorType,
    name: String,
}

impl Parts {
    fn of(f: &Function, op: OpId) -> Option<Parts> {
        let a = views::Attention::of(f, op)?;
        let &[result] = f.op(op).results() else { return None };
        let (query, key) = (f.tensor(a.query)?, f.tensor(a.key)?);
        let rank = query.rank();
        let mut scores = query.clone();
        *scores.shape.last_mut()? = key.shape.get(rank.checked_sub(2)?)?.clone();
        let head_dim = query.shape.last()?.as_known()?;
        let float = matches!(query.dtype, DType::F16 | DType::F32);
        let name = f.value(result).name().to_string();
        let parts = Parts { query: a.query, key: a.key, value: a.value, mask: a.mask, result, head_dim, scores, name };
        float.then_some(parts)
    }

    /// The root of `head_dim`, computed once.
    fn divisor(&self, f: &mut Function, op: OpId, shared: &mut Shared) -> Result<ValueId, PatchError> {
        if let Some(&v) = shared.roots.get(&self.head_dim) {
            return Ok(v);
        }
        let mut patch = Patch::before(op);
        let size = Input::Const(Literal::floats(DType::F32, &[], &[self.head_dim as f64]));
        let root = patch.op("sqrt", "sqrt_head_dim", [("x", size)], TensorType::new(DType::F32, []));
        let v = add(f, &patch, &root)?;
        shared.roots.insert(self.head_dim, v);
        Ok(v)
    }
}

/// What a mask adds to the scores in 32 bits, made once for each mask.
fn term(f: &mut Function, op: OpId, mask: ValueId, shared: &mut Shared) -> Result<ValueId, PatchError> {
    if let Some(&made) = shared.masks.get(&mask) {
        return Ok(made);
    }
    let mut ty = f.tensor(mask).cloned().ok_or_else(|| PatchError::Stale("the type of a mask".into()))?;
    if ty.dtype == DType::F32 {
        return Ok(mask);
    }
    let was_bool = ty.dtype == DType::Bool;
    ty.dtype = DType::F32;
    let name = format!("{}_term", f.value(mask).name());
    let constant = |x: f64| Input::Const(Literal::floats(DType::F32, &[], &[x]));
    let mut patch = Patch::before(op);
    let to = Input::Const(Literal::string(ty.dtype.name()));
    let mut at = patch.op("cast", name.clone(), [("x", Input::One(mask.into())), ("dtype", to)], ty.clone());
    if was_bool {
        // `select` has the shape of its two values, whatever its condition's.
        let zeros = patch.op("mul", name.clone(), [("x", Input::One(at)), ("y", constant(0.0))], ty.clone());
        let inputs = [("cond", mask.into()), ("a", zeros.into()), ("b", constant(f64::NEG_INFINITY))];
        at = patch.op("select", name, inputs, ty);
    }
    let made = add(f, &patch, &at)?;
    shared.masks.insert(mask, made);
    Ok(made)
}

/// Adds the ops of a patch.
fn add(f: &mut Function, patch: &Patch, at: &Ref) -> Result<ValueId, PatchError> {
    let mut t = Transaction::begin(f);
    let v = t.insert(patch, at)?;
    t.commit()?;
    Ok(v)
}
