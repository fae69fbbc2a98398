//! Type inference: from operand types and constant parameters to the types of the results.
//!
//! Sizes are monomials over unknown sizes and are carried through wherever an op keeps or multiplies them. A size that
//! depends on run-time values, or on a constant whose bytes cannot be read, is not guessed: [`infer`] answers with the
//! size stored in the op's result.
//!
//! Source of the rules: the type inference of coremltools 9.0. Where that is known to be wrong the truth is inferred
//! here and [`super::Slip`] names the difference.

pub(super) mod constexpr;
pub(super) mod control;
pub(super) mod conv;
pub(super) mod elementwise;
pub(super) mod gather;
pub(super) mod linear;
pub(super) mod list;
pub(super) mod movement;
pub(super) mod recurrent;
pub(super) mod reduce;
pub(super) mod reshape;
pub(super) mod slice;
pub(super) mod space;

mod check;
mod context;
mod dims;
mod entries;

use crate::ir::{DType, Dim, Function, Name, OpId, TensorType, ValueType};

use super::row;

pub(crate) use context::Context;
pub(crate) use dims::{Dims, broadcast as broadcast_dims, of as dims_of};
pub use slice::AxisSlice;
pub(crate) use slice::axes as slice_axes;

/// Infers the types of one op's results.
pub(super) type InferFn = fn(&Context<'_>) -> Inferred;
pub(super) type Inferred = Result<Vec<Guess>, Stop>;

/// What is known about the type of a result.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Guess {
    /// A tensor; unknown sizes are `None`.
    Tensor(DType, Dims),
    /// Exactly this type.
    Exact(ValueType),
    /// Nothing.
    Unknown,
}

/// Why inference ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// An operand type or constant that the answer needs is not known.
    Unknown,
    /// The op is wrong.
    Wrong(Problem),
}

impl From<Problem> for Stop {
    fn from(p: Problem) -> Stop {
        Stop::Wrong(p)
    }
}

/// An op that is wrong whatever its inputs hold.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("function `{function}`: {op}: {problem}")]
#[non_exhaustive]
pub struct InferError {
    /// Function.
    pub function: Name,
    /// Kind and first result of the op.
    pub op: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What is wrong with an op.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The function's opset is older than the kind.
    #[error("opset CoreML{opset} does not have it, CoreML{since} is the first that does")]
    Opset {
        /// Opset of the function.
        opset: u32,
        /// First opset with the kind.
        since: u32,
    },
    /// A parameter that the kind does not have in this opset.
    #[error("there is no parameter `{0}`")]
    UnknownParam(Name),
    /// A required parameter is not bound.
    #[error("parameter `{0}` is missing")]
    MissingParam(&'static str),
    /// Several bindings where one belongs.
    #[error("parameter `{param}` has {count} bindings, one is needed")]
    Bindings {
        /// Parameter.
        param: &'static str,
        /// Bindings there.
        count: usize,
    },
    /// A run-time value where a constant belongs.
    #[error("parameter `{0}` must be constant")]
    NotConstant(&'static str),
    /// Not an element type that the parameter takes.
    #[error("parameter `{param}` has element type {dtype}, which is not among {allowed}")]
    DType {
        /// Parameter.
        param: &'static str,
        /// Element type there.
        dtype: DType,
        /// Element types that the parameter takes.
        allowed: String,
    },
    /// Element types that must be equal are not.
    #[error("parameter `{param}` has element type {dtype}, `{other}` has {other_dtype}: they must be equal")]
    Group {
        /// Parameter.
        param: &'static str,
        /// Its element type.
        dtype: DType,
        /// Parameter that it must agree with.
        other: &'static str,
        /// The other's element type.
        other_dtype: DType,
    },
    /// A tensor has the wrong number of axes.
    #[error("parameter `{param}` has rank {rank}, {want}")]
    Rank {
        /// Parameter.
        param: &'static str,
        /// Its rank.
        rank: usize,
        /// What the op needs.
        want: String,
    },
    /// An axis that the tensor does not have.
    #[error("parameter `{param}`: axis {axis} does not exist at rank {rank}")]
    Axis {
        /// Parameter.
        param: &'static str,
        /// The axis.
        axis: i64,
        /// Rank that it counts in.
        rank: usize,
    },
    /// A value or size that the op does not allow.
    #[error("parameter `{param}`: {reason}")]
    Value {
        /// Parameter.
        param: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// Sizes that do not go together.
    #[error("{0}")]
    Sizes(String),
    /// A size beyond what 64 bits hold.
    #[error("a size overflows")]
    Overflow,
    /// The op has another number of results than its kind.
    #[error("has {have} results, {want} are computed")]
    Results {
        /// Results of the op.
        have: usize,
        /// Results of the kind.
        want: usize,
    },
    /// The op has another number of nested blocks than its kind.
    #[error("has {have} blocks, {want} are needed")]
    Blocks {
        /// Blocks of the op.
        have: usize,
        /// Blocks of the kind.
        want: usize,
    },
}

impl Problem {
    fn value(param: &'static str, reason: impl Into<String>) -> Problem {
        Problem::Value { param, reason: reason.into() }
    }
    fn sizes(reason: impl Into<String>) -> Problem {
        Problem::Sizes(reason.into())
    }
    fn rank(param: &'static str, rank: usize, want: impl Into<String>) -> Problem {
        Problem::Rank { param, rank, want: want.into() }
    }

    /// The parameter that is wrong, when it is a single one.
    pub fn param(&self) -> Option<&str> {
        match self {
            Problem::UnknownParam(p) => Some(p),
            Problem::MissingParam(p) | Problem::NotConstant(p) => Some(p),
            Problem::Bindings { param, .. }
            | Problem::DType { param, .. }
            | Problem::Group { param, .. }
            | Problem::Rank { param, .. }
            | Problem::Axis { param, .. }
            | Problem::Value { param, .. } => Some(param),
            _ => None,
        }
    }
}

/// The types of an op's results; `None` for opaque kinds.
///
/// Sizes that inference cannot prove are those stored in the op's results; so are whole types when an operand has no
/// tensor type. A stored type of another rank is not used: the result is then [`ValueType::Unranked`].
///
/// # Errors
/// [`InferError`] when the op breaks a rule of its kind, whatever its inputs hold.
pub fn infer(f: &Function, op: OpId) -> Result<Option<Vec<ValueType>>, InferError> {
    let Some(guesses) = guess(f, op)? else { return Ok(None) };
    let results = f.op(op).results();
    Ok(Some(guesses.into_iter().zip(results).map(|(g, &v)| complete(g, f.ty(v))).collect()))
}

/// What inference proves about an op's results, one guess each; `None` for opaque kinds.
pub(crate) fn guess(f: &Function, op: OpId) -> Result<Option<Vec<Guess>>, InferError> {
    let have = f.op(op).results().len();
    let guesses = match guess_any(f, op) {
        Ok(Some(guesses)) => guesses,
        Ok(None) => return Ok(None),
        Err(Stop::Unknown) => vec![Guess::Unknown; have],
        Err(Stop::Wrong(problem)) => return Err(located(f, op, problem)),
    };
    // Whatever a `write_state` lists as results is not computed by it.
    if guesses.len() != have && f.op(op).kind() != "write_state" {
        return Err(located(f, op, Problem::Results { have, want: guesses.len() }));
    }
    Ok(Some(guesses))
}

/// [`guess`], however many results the op has now.
pub(crate) fn guess_any(f: &Function, op: OpId) -> Result<Option<Vec<Guess>>, Stop> {
    let Some(def) = row(f.op(op).kind()) else { return Ok(None) };
    let opset = f.opset_version();
    let version = def.version(opset).ok_or(Problem::Opset { opset, since: def.since() })?;
    let c = Context::new(f, op, version);
    check::params(&c)?;
    (def.infer)(&c).map(Some)
}

fn located(f: &Function, op: OpId, problem: Problem) -> InferError {
    InferError { function: f.name().clone(), op: f.describe(op), problem }
}

/// Fills what a guess leaves open from the stored type.
fn complete(guess: Guess, stored: &ValueType) -> ValueType {
    match guess {
        Guess::Exact(ty) => ty,
        Guess::Unknown => stored.clone(),
        Guess::Tensor(dtype, dims) => {
            let fallback = stored.as_tensor().filter(|t| t.rank() == dims.len());
            let shape: Option<Vec<Dim>> =
                dims.into_iter().enumerate().map(|(i, d)| d.or_else(|| fallback.map(|t| t.shape[i].clone()))).collect();
            match shape {
                Some(shape) => TensorType::new(dtype, shape).into(),
                None => ValueType::Unranked(dtype),
            }
        }
    }
}

#[cfg(test)]
mod tests;
