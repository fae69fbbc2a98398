//! Building functions and programs from nothing.

mod control;
mod helpers;
mod interface;

use crate::ir::{
    BlockId, DType, Def, Function, Id, Interface, Literal, Name, OpId, OpSpec, Operand, Place, Program, ValueId,
    ValueType,
};

use super::infer::{InferError, Stop, guess_any};
use super::{fresh_type, row};

pub use interface::Size;

/// Builds a function op by op, with inferred types and fresh names, and its interface with it.
///
/// Constants given as literals become `const` ops, one for each use, as coremltools writes them (for `constexpr_*` they
/// become literal bindings or attributes, whichever the opset has). Optional parameters may be left out.
///
/// ```
/// use milopt::ir::{DType, Literal};
/// use milopt::opset::{Builder, program};
///
/// // One step of attention over a cache of 16 entries: write the new row, attend to the old ones.
/// let mut b = Builder::new("main", "CoreML8");
/// let q = b.input("q", DType::F16, &[8, 1, 64])?;
/// let k = b.input("k", DType::F16, &[8, 1, 64])?;
/// let cache = b.state("k_cache", DType::F16, &[8, 16, 64])?;
///
/// let old = b.read_state(cache)?;
/// let new = b.slice_update(old, k, [0, 3, 0], [8, 4, 64])?;
/// b.write_state(cache, new)?;
/// let scores = b.named("scores").matmul(q, new, false, true)?;
/// let scale = Literal::floats(DType::F16, &[], &[0.125]);
/// let scaled = b.mul(scores, scale)?;
/// let weights = b.softmax(scaled, -1)?;
///
/// let function = b.finish(&[("weights", weights)])?;
/// let program = program(vec![function])?;
/// assert_eq!(program.specification_version(), 9);
/// let weights = program.main().unwrap().outputs()[0];
/// assert_eq!(program.main().unwrap().ty(weights).to_string(), "tensor<fp16, [8, 1, 16]>");
/// # Ok::<(), milopt::opset::BuildError>(())
/// ```
#[derive(Debug)]
pub struct Builder {
    f: Function,
    /// Open blocks, the innermost last.
    blocks: Vec<BlockId>,
    interface: Interface,
    next_name: Option<String>,
}

/// What is bound to a parameter.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Arg {
    /// A value.
    Value(ValueId),
    /// Values of a tuple parameter.
    Values(Vec<ValueId>),
    /// A constant.
    Literal(Literal),
}

macro_rules! arg_from {
    ($($ty:ty => |$x:ident| $arg:expr;)*) => {
        $(impl From<$ty> for Arg {
            fn from($x: $ty) -> Arg {
                $arg
            }
        })*
    };
}

arg_from! {
    ValueId => |v| Arg::Value(v);
    Vec<ValueId> => |v| Arg::Values(v);
    &[ValueId] => |v| Arg::Values(v.to_vec());
    Literal => |l| Arg::Literal(l);
    i64 => |n| Arg::Literal(Literal::int(n));
    bool => |b| Arg::Literal(Literal::bool(b));
    &str => |s| Arg::Literal(Literal::string(s));
    &[i64] => |n| Arg::Literal(Literal::ints(n));
    &[bool] => |b| Arg::Literal(Literal::bools(b));
}

impl<const N: usize> From<[i64; N]> for Arg {
    fn from(n: [i64; N]) -> Arg {
        Arg::Literal(Literal::ints(&n))
    }
}

impl<const N: usize> From<[bool; N]> for Arg {
    fn from(b: [bool; N]) -> Arg {
        Arg::Literal(Literal::bools(&b))
    }
}

/// Why something could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The op is wrong.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// The kind has no row, so its results cannot be typed; [`Builder::opaque`] takes their types.
    #[error("function `{function}`: nothing is known of the op kind `{kind}`")]
    Opaque {
        /// Function.
        function: Name,
        /// The kind.
        kind: String,
    },
    /// An operand type or constant that typing needs is not known.
    #[error("function `{function}`: the results of `{kind}` cannot be typed from its operands")]
    Untyped {
        /// Function.
        function: Name,
        /// The kind.
        kind: String,
    },
    /// The op has several results or none where one is asked for.
    #[error("function `{function}`: `{kind}` has {count} results, not one")]
    Results {
        /// Function.
        function: Name,
        /// The kind.
        kind: String,
        /// Results.
        count: usize,
    },
    /// A value of another function, or of a block that is closed.
    #[error("function `{function}`: value {value} is not visible here")]
    Invisible {
        /// Function.
        function: Name,
        /// The value.
        value: ValueId,
    },
    /// A name that is taken already.
    #[error("function `{function}`: the name `{name}` is taken")]
    NameTaken {
        /// Function.
        function: Name,
        /// The name.
        name: Name,
    },
    /// An input, output or state that Core ML does not allow.
    #[error("function `{function}`: feature `{name}` {reason}")]
    Feature {
        /// Function.
        function: Name,
        /// The feature.
        name: Name,
        /// What is wrong.
        reason: String,
    },
    /// Functions that do not make a program.
    #[error("{0}")]
    Program(String),
}

impl Builder {
    /// Starts a function. `opset` is the opset string, e.g. `CoreML8`.
    pub fn new(name: impl Into<Name>, opset: impl Into<Name>) -> Builder {
        let f = Function::new(name, opset);
        let blocks = vec![f.body()];
        Builder { f, blocks, interface: Interface::default(), next_name: None }
    }

    /// The function as it is so far.
    pub fn function(&self) -> &Function {
        &self.f
    }

    /// Names the result of the next op; a number is appended when the name is taken.
    pub fn named(&mut self, name: &str) -> &mut Builder {
        self.next_name = Some(name.to_owned());
        self
    }

    /// A constant as a value.
    pub fn constant(&mut self, literal: Literal) -> ValueId {
        let base = self.next_name.take();
        self.add_const(base.as_deref().unwrap_or("const"), literal)
    }

    /// A floating-point scalar as a value, rounded to `dtype`.
    ///
    /// # Panics
    /// When `dtype` is not one of `F16`, `BF16`, `F32` and `F64`.
    pub fn float(&mut self, dtype: DType, x: f64) -> ValueId {
        self.constant(Literal::floats(dtype, &[], &[x]))
    }

    /// Adds an op with one result and returns it.
    ///
    /// # Errors
    /// [`BuildError`] when the op is wrong, opaque, or has another number of results.
    pub fn op<'a>(
        &mut self,
        kind: &str,
        params: impl IntoIterator<Item = (&'a str, Arg)>,
    ) -> Result<ValueId, BuildError> {
        match self.op_results(kind, params)?[..] {
            [one] => Ok(one),
            ref many => {
                let function = self.f.name().clone();
                Err(BuildError::Results { function, kind: kind.into(), count: many.len() })
            }
        }
    }

    /// Adds an op and returns its results.
    ///
    /// # Errors
    /// [`BuildError`] when the op is wrong or opaque.
    pub fn op_results<'a>(
        &mut self,
        kind: &str,
        params: impl IntoIterator<Item = (&'a str, Arg)>,
    ) -> Result<Vec<ValueId>, BuildError> {
        let name = self.next_name.take().unwrap_or_else(|| kind.to_owned());
        let op = self.insert(kind, &name, params)?;
        self.type_results(op, &name)
    }

    /// Adds an op of a kind that has no row, with the types of its results.
    ///
    /// # Errors
    /// [`BuildError::Invisible`].
    pub fn opaque<'a>(
        &mut self,
        kind: &str,
        params: impl IntoIterator<Item = (&'a str, Arg)>,
        results: Vec<ValueType>,
    ) -> Result<Vec<ValueId>, BuildError> {
        let name = self.next_name.take().unwrap_or_else(|| kind.to_owned());
        let op = self.insert(kind, &name, params)?;
        Ok(results.into_iter().map(|ty| self.add_result(op, &name, ty)).collect())
    }

    fn block(&self) -> BlockId {
        self.blocks.last().copied().unwrap_or_else(|| self.f.body())
    }

    /// Inserts an op that has no results yet.
    fn insert<'a>(
        &mut self,
        kind: &str,
        name: &str,
        params: impl IntoIterator<Item = (&'a str, Arg)>,
    ) -> Result<OpId, BuildError> {
        let params: Vec<(&str, Arg)> = params.into_iter().collect();
        for (_, arg) in &params {
            match arg {
                Arg::Value(v) => self.check_visible(*v)?,
                Arg::Values(values) => values.iter().try_for_each(|v| self.check_visible(*v))?,
                Arg::Literal(_) => {}
            }
        }
        let version = row(kind).and_then(|r| r.version(self.f.opset_version())).map_or(0, |v| v.since());
        let mut inputs = Vec::new();
        let mut attributes = Vec::new();
        for (param, arg) in params {
            let operands = match arg {
                Arg::Value(v) => vec![Operand::Value(v)],
                Arg::Values(values) => values.into_iter().map(Operand::Value).collect(),
                Arg::Literal(l) if kind.starts_with("constexpr_") && version < 8 => {
                    attributes.push((param.into(), self.f.intern(l)));
                    continue;
                }
                Arg::Literal(l) if kind.starts_with("constexpr_") => vec![Operand::Literal(self.f.intern(l))],
                Arg::Literal(l) => vec![Operand::Value(self.add_const(&format!("{name}_{param}"), l))],
            };
            inputs.push((param.into(), operands));
        }
        let spec = OpSpec { kind: kind.into(), inputs, attributes, results: Vec::new() };
        Ok(self.f.insert_op(Place::End(self.block()), spec))
    }

    fn add_const(&mut self, base: &str, literal: Literal) -> ValueId {
        let (name, ty) = (self.f.fresh_name(base), literal.ty.clone());
        let attributes = vec![("val".into(), self.f.intern(literal))];
        let spec = OpSpec { kind: "const".into(), inputs: Vec::new(), attributes, results: Vec::new() };
        let op = self.f.insert_op(Place::End(self.block()), spec);
        self.f.add_result(op, name, ty)
    }

    fn add_result(&mut self, op: OpId, base: &str, ty: ValueType) -> ValueId {
        let name = self.f.fresh_name(base);
        self.f.add_result(op, name, ty)
    }

    /// Infers the results of an op and adds them; a wrong op is taken back.
    fn type_results(&mut self, op: OpId, name: &str) -> Result<Vec<ValueId>, BuildError> {
        let function = || self.f.name().clone();
        let kind = || self.f.op(op).kind().to_string();
        let guesses = match guess_any(&self.f, op) {
            Ok(Some(guesses)) => Ok(guesses),
            Ok(None) => Err(BuildError::Opaque { function: function(), kind: kind() }),
            Err(Stop::Unknown) => Err(BuildError::Untyped { function: function(), kind: kind() }),
            Err(Stop::Wrong(problem)) => {
                Err(InferError { function: function(), op: format!("{} `{name}`", kind()), problem }.into())
            }
        };
        let guesses = guesses.inspect_err(|_| self.f.erase_op(op))?;
        let mut results = Vec::with_capacity(guesses.len());
        for guess in guesses {
            let ty = fresh_type(&mut self.f, guess).unwrap_or(ValueType::Missing);
            results.push(self.add_result(op, name, ty));
        }
        Ok(results)
    }

    fn check_visible(&self, v: ValueId) -> Result<(), BuildError> {
        let visible = v.index() < self.f.value_capacity()
            && match self.f.value(v).def() {
                Def::Input(_) => true,
                Def::BlockInput(b, _) => self.blocks.contains(&b),
                Def::Result(op, _) => self.f.is_live(op) && self.blocks.contains(&self.f.op(op).block()),
            };
        match visible {
            true => Ok(()),
            false => Err(BuildError::Invisible { function: self.f.name().clone(), value: v }),
        }
    }
}

/// Joins functions to a program: the single-function form for one that is called `main`, else the multi-function form
/// with the first as the default.
///
/// # Errors
/// When there is no function, names repeat, opsets differ or are unknown, or the form needs a newer opset.
pub fn program(functions: Vec<Function>) -> Result<Program, BuildError> {
    let fail = |reason: String| Err(BuildError::Program(reason));
    let Some(first) = functions.first() else { return fail("a program needs a function".into()) };
    let (name, opset) = (first.name().clone(), first.opset_version());
    if let Some(other) = functions.iter().find(|f| f.opset_version() != opset) {
        return fail(format!("functions `{name}` and `{}` have different opsets", other.name()));
    }
    let Some(spec) = i32::try_from(opset).ok().filter(|n| *n >= 5).and_then(|n| n.checked_add(1)) else {
        return fail(format!("function `{name}` has the unknown opset `{}`", first.opset()));
    };
    let single = functions.len() == 1 && name == "main";
    if !single && opset < 8 {
        return fail("several functions, or one not called main, need opset CoreML8".into());
    }
    let mut out = Program::new(spec);
    for f in functions {
        if out.function(f.name()).is_some() {
            return fail(format!("two functions are called `{}`", f.name()));
        }
        out.add_function(f);
    }
    out.set_default_function((!single).then_some(name));
    Ok(out)
}

#[cfg(test)]
mod tests;
