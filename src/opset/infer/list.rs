//! Lists of tensors.

use crate::ir::{DType, Dim, TensorType, ValueType};

use super::context::{one, size};
use super::{Context, Dims, Guess, Inferred, Problem, Stop, dims};

/// A list of elements of the given shape; nothing is inferred when a size is given as a string.
pub(in crate::opset) fn make_list(c: &Context<'_>) -> Inferred {
    let operands = c.f.op(c.op).param("elem_shape").iter();
    let shape: Option<Vec<Dim>> = operands.map(|o| c.f.operand_ints(o)?.first().and_then(|&n| size(n))).collect();
    let element = Box::new(TensorType::new(c.dtype("dtype")?, shape.ok_or(Stop::Unknown)?).into());
    let length = c.int("init_length").ok().and_then(size);
    Ok(vec![Guess::Exact(ValueType::List { element, length })])
}

/// The element type of `ls`.
fn element(c: &Context<'_>) -> Result<TensorType, Stop> {
    match c.types("ls").pop() {
        Some(ValueType::List { element, .. }) => element.as_tensor().cloned().ok_or(Stop::Unknown),
        Some(ty) => Err(Problem::value("ls", format!("{ty} is not a list")).into()),
        None => Err(Problem::MissingParam("ls").into()),
    }
}

/// The list, which takes values of its element type.
fn written(c: &Context<'_>, value: &[Option<Dim>], dtype: DType) -> Inferred {
    let element = element(c)?;
    let of_list = dims::of(&element);
    let fits = value.len() == of_list.len() && value.iter().zip(&of_list).all(|(a, b)| dims::may_equal(a, b));
    if dtype != element.dtype || !fits {
        let reason = format!("{dtype} {} is not the element {element}", dims::show(value));
        return Err(Problem::value("value", reason).into());
    }
    Ok(vec![Guess::Exact(c.types("ls").pop().ok_or(Stop::Unknown)?)])
}

/// One element replaced.
pub(in crate::opset) fn list_write(c: &Context<'_>) -> Inferred {
    let value = c.tensor("value")?;
    written(c, &value.dims, value.dtype)
}

/// Several elements replaced, stacked in `value`.
pub(in crate::opset) fn list_scatter(c: &Context<'_>) -> Inferred {
    let value = c.tensor("value")?;
    match value.dims.split_first() {
        Some((_, rest)) => written(c, rest, value.dtype),
        None => Err(Problem::rank("value", 0, "at least 1 is needed").into()),
    }
}

/// One element.
pub(in crate::opset) fn list_read(c: &Context<'_>) -> Inferred {
    let element = element(c)?;
    one(element.dtype, dims::of(&element))
}

/// Elements stacked.
pub(in crate::opset) fn list_gather(c: &Context<'_>) -> Inferred {
    let (element, indices) = (element(c)?, c.tensor("indices")?);
    indices.rank_in("indices", 1, 1)?;
    let all: Dims = indices.dims.iter().cloned().chain(dims::of(&element)).collect();
    one(element.dtype, all)
}

/// How many elements there are at run time.
pub(in crate::opset) fn list_length(c: &Context<'_>) -> Inferred {
    element(c)?;
    one(DType::I32, Dims::new())
}
