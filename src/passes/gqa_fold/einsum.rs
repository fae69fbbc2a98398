//! Folding one `einsum`.
//!
//! MIL knows `bchw,bwhu->bchu` and `chw,whr->chr`, up to renaming: a product per head `h` with the heads between the
//! matrices' axes. The group moves into the axis that only the other operand has: into `u` for a repeated left operand,
//! which is a view in grouped order, into `c` for a repeated right one, which is a view in interleaved order.

use crate::analysis::spelling::is_view;
use crate::analysis::traffic::value_bytes;
use crate::ir::{Function, Literal, OpId, TensorType, ValueId};
use crate::rewrite::{Context, Input, NoMatch, Patch};

use super::reasons::unrepeated;
use super::shared::{gains, repeated, shared, tensor};

pub(super) fn fold(cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let (x, y) = operands(f, op).ok_or(NoMatch::UNRELATED)?;
    let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
    let out = tensor(f, result)?;
    let equation = f.str(op, "equation").ok_or(NoMatch::UNRELATED)?;
    // The equations have the same axes but for the batch in front.
    let heads_axis = out.rank().checked_sub(2).filter(|_| is_product_per_head(equation)).ok_or(NoMatch::UNRELATED)?;
    let (repeats, other, into) = match (repeated(cx, x), repeated(cx, y)) {
        (false, false) => return Err(unrepeated(cx, &[x, y], "neither operand is a repeated view")),
        (true, _) => (x, y, heads_axis + 1),
        (false, true) => (y, x, heads_axis - 1),
    };
    if tensor(f, x)?.shape[heads_axis] != tensor(f, y)?.shape[heads_axis] {
        return Err(NoMatch::because("one operand has a single head").remedy("the product is spelled with matmul"));
    }
    let once = shared(cx, op, repeats, heads_axis, None)?;
    let heads = &once.heads;
    let rows = heads.moved(other, &tensor(f, other)?.shape, heads_axis, into).ok_or(NoMatch::UNRELATED)?;
    let back = heads.moved_back(result, &out.shape, heads_axis, into).ok_or(NoMatch::UNRELATED)?;

    let mut patch = Patch::before(op);
    let name = f.value(result).name().as_str();
    let (single, moved) = once.operand(f, &mut patch, repeats, &once.shape)?;
    let grouped = patch.steps(f, other, &format!("{name}_rows"), &rows.steps).ok_or(NoMatch::UNRELATED)?;
    let values = if repeats == x { [single, grouped] } else { [grouped, single] };
    let inputs = [
        ("values", Input::Many(values.into_iter().map(Input::One).collect())),
        ("equation", Input::Const(Literal::string(equation))),
    ];
    let ty = TensorType::new(out.dtype, back.shape.iter().cloned());
    let product = patch.op("einsum", format!("{name}_grouped"), inputs, ty);
    let at = patch
        .steps(f, product, name, &back.steps)
        .ok_or_else(|| NoMatch::because("the rows and the keys both have a size that is not known"))?;
    patch.replace(result, at);

    once.account(f, &mut patch, op, ("values", repeats))?;
    patch.bytes_added = moved;
    for (v, spelled) in [(other, &rows), (result, &back)] {
        if !is_view(&spelled.steps) {
            tensor(f, v)?.volume().ok_or_else(|| NoMatch::because("it would move data of a size that is not known"))?;
            patch.bytes_added += 2 * value_bytes(f, v);
        }
    }
    if [out, tensor(f, repeats)?].iter().all(|t| t.known_shape().is_some()) {
        gains(&patch)?;
    }
    patch.form = format!("einsum: {}", heads.describe());
    Ok(patch)
}

fn operands(f: &Function, op: OpId) -> Option<(ValueId, ValueId)> {
    match f.op(op).param("values") {
        [x, y] => Some((x.as_value()?, y.as_value()?)),
        _ => None,
    }
}

/// Whether an equation is `bchw,bwhu->bchu` or `chw,whr->chr` with other letters.
fn is_product_per_head(equation: &str) -> bool {
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let Some((operands, out)) = text.split_once("->") else { return false };
    let Some((x, y)) = operands.split_once(',') else { return false };
    let letters = |s: &str| s.chars().collect::<Vec<char>>();
    let (x, y, out) = (letters(x), letters(y), letters(out));
    let tail = |s: &[char]| match s {
        [a, b, c] | [_, a, b, c] => Some((*a, *b, *c)),
        _ => None,
    };
    let (Some((c, h, w)), Some((w2, h2, u)), Some((c3, h3, u3))) = (tail(&x), tail(&y), tail(&out)) else {
        return false;
    };
    let mut distinct = vec![c, h, w, u];
    distinct.sort_unstable();
    distinct.dedup();
    let batch = match (&x[..], &y[..], &out[..]) {
        ([a, ..], [b, ..], [d, ..]) if x.len() == 4 && y.len() == 4 && out.len() == 4 => a == b && b == d,
        _ => x.len() == 3 && y.len() == 3 && out.len() == 3,
    };
    batch && distinct.len() == 4 && (w, h, h, c, u) == (w2, h2, h3, c3, u3)
}

#[cfg(test)]
mod tests {
    use super::is_product_per_head;

    #[test]
    fn equations_are_told_apart_whatever_their_letters() {
        for equation in ["bchw,bwhu->bchu", "nkhq,nqhc->nkhc", "chw,whr->chr", "b c h w, b w h u -> b c h u"] {
            assert!(is_product_per_head(equation), "{equation}");
        }
        for equation in
            ["bchw,bwhu->bchw", "bchw,bhwu->bchu", "bchw,awhu->bchu", "chw,bwhu->chu", "bchw->bchw", "", "->"]
        {
            assert!(!is_product_per_head(equation), "{equation}");
        }
    }
}
