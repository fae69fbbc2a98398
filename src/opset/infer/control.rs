//! Constants, states and nested blocks.

use crate::ir::{BlockId, TensorType, ValueId, ValueType};

use super::context::one;
use super::{Context, Guess, Inferred, Problem, Stop, dims};

/// The type of `val`.
pub(in crate::opset) fn constant(c: &Context<'_>) -> Inferred {
    let val = c.f.const_param(c.op, "val").ok_or(Problem::MissingParam("val"))?;
    Ok(vec![Guess::Exact(val.ty.clone())])
}

fn state(c: &Context<'_>) -> Result<TensorType, Stop> {
    match c.types("input").pop() {
        Some(ValueType::State(t)) => Ok(t),
        Some(ty) => Err(Problem::value("input", format!("{ty} is not a state")).into()),
        None => Err(Problem::MissingParam("input").into()),
    }
}

/// The content of a state.
pub(in crate::opset) fn read_state(c: &Context<'_>) -> Inferred {
    let t = state(c)?;
    one(t.dtype, dims::of(&t))
}

/// No result; `data` has the type that the state wraps.
pub(in crate::opset) fn write_state(c: &Context<'_>) -> Inferred {
    let (t, data) = (state(c)?, c.tensor("data")?);
    let fits = t.dtype == data.dtype
        && t.rank() == data.rank()
        && dims::of(&t).iter().zip(&data.dims).all(|(a, b)| dims::may_equal(a, b));
    if !fits {
        let reason = format!("{} {} is not the state's {t}", data.dtype, dims::show(&data.dims));
        return Err(Problem::value("data", reason).into());
    }
    Ok(Vec::new())
}

/// Sizes that both types prove; nothing when they are of different kinds.
fn common(a: &ValueType, b: &ValueType) -> Option<Guess> {
    match (a, b) {
        (ValueType::Tensor(x), ValueType::Tensor(y)) if x.dtype == y.dtype && x.rank() == y.rank() => {
            let both = x.shape.iter().zip(&y.shape).map(|(m, n)| (m == n).then(|| m.clone()));
            Some(Guess::Tensor(x.dtype, both.collect()))
        }
        (ValueType::Tensor(x), ValueType::Tensor(y)) if x.dtype == y.dtype => Some(Guess::Unknown),
        (ValueType::Tensor(_), ValueType::Tensor(_)) => None,
        _ => Some(Guess::Unknown),
    }
}

fn outputs<'c>(c: &Context<'c>, b: BlockId) -> &'c [ValueId] {
    c.f.block(b).outputs()
}

/// What the two blocks return has compatible types, pair by pair.
pub(in crate::opset) fn cond(c: &Context<'_>) -> Inferred {
    c.tensor("pred")?.rank_in("pred", 0, 0)?;
    let [yes, no] = c.blocks(2)? else { return Err(Stop::Unknown) };
    let (yes, no) = (outputs(c, *yes), outputs(c, *no));
    if yes.len() != no.len() {
        return Err(Problem::sizes(format!("the blocks return {} and {} values", yes.len(), no.len())).into());
    }
    let pair = |(&a, &b): (&ValueId, &ValueId)| {
        let (a, b) = (c.f.ty(a), c.f.ty(b));
        common(a, b).ok_or_else(|| Problem::sizes(format!("the blocks return {a} and {b}")).into())
    };
    yes.iter().zip(no).map(pair).collect()
}

/// The body maps the loop variables to their next values. A size proven of the start and of what the body returns holds
/// of the result, unless it is unknown inside one iteration.
pub(in crate::opset) fn while_loop(c: &Context<'_>) -> Inferred {
    let [condition, body] = c.blocks(2)? else { return Err(Stop::Unknown) };
    let start = c.types("loop_vars");
    for b in [condition, body] {
        let have = c.f.block(*b).inputs().len();
        if have != start.len() {
            return Err(Problem::sizes(format!("a block has {have} inputs for {} loop variables", start.len())).into());
        }
    }
    match outputs(c, *condition) {
        [one] => bool_scalar(c.f.ty(*one))?,
        many => return Err(Problem::sizes(format!("the condition returns {} values", many.len())).into()),
    }
    let next = outputs(c, *body);
    if next.len() != start.len() {
        let reason = format!("the body returns {} values for {} loop variables", next.len(), start.len());
        return Err(Problem::sizes(reason).into());
    }
    let result = |(a, &b): (&ValueType, &ValueId)| {
        let b = c.f.ty(b);
        match common(a, b) {
            Some(guess) => Ok(guess),
            None => Err(Problem::value("loop_vars", format!("{a} becomes {b} in the body")).into()),
        }
    };
    start.iter().zip(next).map(result).collect()
}

/// coremltools itself writes conditions of shape [1] where it converts a GRU.
fn bool_scalar(ty: &ValueType) -> Result<(), Stop> {
    match ty.as_tensor() {
        Some(t) if t.dtype != crate::ir::DType::Bool || t.rank() > 1 || t.volume().is_some_and(|n| n != 1) => {
            Err(Problem::sizes(format!("the condition returns {ty}, not a bool scalar")).into())
        }
        _ => Ok(()),
    }
}
