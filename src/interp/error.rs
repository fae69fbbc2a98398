//! What can go wrong while a function is evaluated.

use crate::ir::{DType, LiteralError, Name};

/// Why a function could not be evaluated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterpError {
    /// An op could not be evaluated.
    #[error("{function}: {op}")]
    Op {
        /// The function.
        function: Name,
        /// Kind and first result of the op.
        op: String,
        /// What is wrong.
        #[source]
        fault: Fault,
    },
    /// An input or a state does not fit the function.
    #[error("{function}: input `{input}`")]
    Input {
        /// The function.
        function: Name,
        /// The input or state.
        input: Name,
        /// What is wrong.
        #[source]
        fault: Fault,
    },
    /// An output was never computed.
    #[error("{function}: output `{output}` has no value")]
    Output {
        /// The function.
        function: Name,
        /// The output.
        output: Name,
    },
}

impl InterpError {
    /// What is wrong, without its place.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            InterpError::Op { fault, .. } | InterpError::Input { fault, .. } => Some(fault),
            InterpError::Output { .. } => None,
        }
    }
}

/// What is wrong with an op's operands or a function's input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The interpreter does not know the op.
    #[error("not interpreted")]
    NotInterpreted,
    /// An op has a parameter or attribute that its opset does not define.
    #[error("{0} is unknown in this opset")]
    Foreign(String),
    /// A required parameter or input is absent.
    #[error("{0} is missing")]
    Missing(String),
    /// An operand's value has not been computed.
    #[error("`{0}` is used before it is computed")]
    Undefined(Name),
    /// A tensor has an element type that does not fit.
    #[error("{what} is {found}, {wanted} is needed")]
    DType {
        /// Which tensor.
        what: String,
        /// Its element type.
        found: DType,
        /// What fits.
        wanted: String,
    },
    /// Shapes, axes or lengths do not fit together.
    #[error("{0}")]
    Shape(String),
    /// An index or a slice reaches outside its tensor.
    #[error("{0}")]
    Range(String),
    /// A parameter has a value that the op does not define.
    #[error("{0}")]
    Value(String),
    /// A tensor would hold more elements than the interpreter is willing to.
    #[error("a tensor of shape {0:?} is too large to evaluate")]
    TooLarge(Vec<usize>),
    /// A `while_loop` did not end.
    #[error("no end after {0} iterations")]
    Endless(usize),
    /// A constant could not be read.
    #[error(transparent)]
    Literal(Box<LiteralError>),
}

impl From<LiteralError> for Fault {
    fn from(error: LiteralError) -> Fault {
        Fault::Literal(Box::new(error))
    }
}

impl Fault {
    pub(crate) fn dtype(what: impl Into<String>, found: DType, wanted: impl ToString) -> Fault {
        Fault::DType { what: what.into(), found, wanted: wanted.to_string() }
    }
}
