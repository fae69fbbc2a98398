//! Element by element.

use crate::ir::DType;

use super::context::one;
use super::{Context, Inferred, Problem, dims};

/// The type of `x`.
pub(in crate::opset) fn same(c: &Context<'_>) -> Inferred {
    c.tensor("x")?.result()
}

/// `x` and `y` broadcast.
pub(in crate::opset) fn binary(c: &Context<'_>) -> Inferred {
    let (x, y) = (c.tensor("x")?, c.tensor("y")?);
    one(x.dtype, dims::broadcast(&x.dims, &y.dims)?)
}

/// `x` and `y` broadcast, to bool.
pub(in crate::opset) fn compare(c: &Context<'_>) -> Inferred {
    let (x, y) = (c.tensor("x")?, c.tensor("y")?);
    one(DType::Bool, dims::broadcast(&x.dims, &y.dims)?)
}

/// `cond`, `a` and `b` broadcast.
pub(in crate::opset) fn select(c: &Context<'_>) -> Inferred {
    let (cond, a, b) = (c.tensor("cond")?, c.tensor("a")?, c.tensor("b")?);
    one(a.dtype, dims::broadcast(&cond.dims, &dims::broadcast(&a.dims, &b.dims)?)?)
}

/// The type of `x`; from CoreML7 on the bounds must be in order.
pub(in crate::opset) fn clip(c: &Context<'_>) -> Inferred {
    let bound = |name| {
        let literal = c.f.const_param(c.op, name).filter(|l| !l.is_blob())?;
        literal.to_floats(&**c.f.weights()).ok()?.first().copied()
    };
    if let (Some(alpha), Some(beta)) = (bound("alpha"), bound("beta"))
        && c.version.since() >= 7
        && alpha >= beta
    {
        return Err(Problem::value("alpha", format!("{alpha} is not below beta, {beta}")).into());
    }
    same(c)
}

/// The type of `x`; the mode must be one of three.
pub(in crate::opset) fn gelu(c: &Context<'_>) -> Inferred {
    match c.str("mode")? {
        "EXACT" | "TANH_APPROXIMATION" | "SIGMOID_APPROXIMATION" => same(c),
        mode => Err(Problem::value("mode", format!("`{mode}` is no mode")).into()),
    }
}
