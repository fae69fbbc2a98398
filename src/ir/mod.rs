//! The in-memory form of an ML Program.
//!
//! A [`Program`] holds [`Function`]s; a function owns arenas of values, ops, blocks and constants and hands out ids.
//!
//! * **Values** are function inputs, inputs of nested blocks, or results of ops. Each has one name, one type and an
//!   exact list of uses. A use in a nested block counts like any other.
//! * **Ops** have an open kind (a string): what is known about a kind is a row of [`crate::opset`]. Parameters are
//!   kept sorted by name; a parameter holds one binding, or several for MIL's tuple parameters (`values`).
//! * **Constants** are [`Literal`]s. A constant parameter may sit in a `const` op, in the binding itself or, for old
//!   `constexpr_*` ops, in an attribute; [`Function::const_param`] hides which. Weights stay on disk.
//! * **Blocks** are lists of ops. The body of a function is a block; `cond` and `while_loop` own nested ones, which see
//!   the values of the blocks around them.
//! * **Unknown sizes** are [`Symbol`]s and a [`Dim`] is a monomial over them.
//!
//! This layer neither infers types nor touches files. It is changed only through [`crate::rewrite`] and built through
//! [`crate::opset::Builder`].

mod arena;
mod edit;
mod float;
mod function;
mod interface;
mod literal;
mod name;
mod program;
mod types;

pub use arena::{BlockId, Id, LiteralId, OpId, ValueId};
pub(crate) use edit::{EditError, OpSpec, Place};
pub use float::{float_bits, round_float, unpack_floats};
pub use function::{BlockData, Def, Function, OpData, Operand, Ops, SymbolRange, Use, ValueData};
pub use interface::{ArrayFeature, Feature, FeatureKind, Flexibility, Interface};
pub use literal::{BlobRef, Literal, LiteralData, LiteralError, NoWeights, Weights, pack_ints, unpack_ints};
pub use name::Name;
pub use program::{Metadata, Origin, Program};
pub use types::{DType, Dim, Shape, Symbol, TensorType, ValueType};
