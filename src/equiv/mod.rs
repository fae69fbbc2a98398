//! Whether two programs compute the same: both run on the same random inputs, for several steps, and every output and
//! state is compared after every step.
//!
//! * **Steps.** States start at random content, the same for both programs, and carry over from step to step, for each
//!   program its own. Content that is no longer finite would blind all later steps (a NaN equals any NaN), so it is drawn
//!   anew.
//! * **Inputs** are drawn once and given to both. Integers come from the range that their uses imply (a gather stays
//!   within its axis, a `slice_update` within its state), else from 0..8, or from where [`Options::ranges`] says. A single
//!   integer that says where something is written is the first, a middle and the last position in every five steps. Floats
//!   are N(0, 1), except that the masks of attention go through patterns: open, causal, windowed and with fully masked
//!   rows, hiding by −1e4 or by −∞; eight steps see them all. Other kinds of content are a matter of [`Options::draws`];
//!   all steps are run for each [`Draw`] and each seed. Everything depends on [`Options::seed`] alone, but for inputs that
//!   are [given](Options::given).
//! * **Bitwise** equality is asked of the interpreter's storage mode: equal bit patterns, any NaN equal to any NaN, −0
//!   different from +0.
//! * **Reassociated** equality is |a−b| ≤ 1e-9·max(1, max|a|) in exact mode and |a−b| ≤ 1e-2·max|a| in storage mode, or
//!   1e-5·max|a| for functions without 16-bit floats; integers are equal. The exact mode runs only when storage
//!   mode found a difference.
//!
//! Where the programs are not as equal as that, the first value that both name alike and compute differently is located:
//! for a bitwise difference the first that has other bits; for one beyond the bounds the first that exceeds them.
//!
//! A pass may [change the interface](Options::interface): joined states are compared by their parts, and for a cache that
//! became an input the comparison keeps and writes the content, as a caller does.
//!
//! Unknown input sizes take the default of the description; further steps try others, as far as the first program accepts
//! them.

mod compare;
mod inputs;
mod interface;
mod local;
mod proof;
mod report;
mod rng;
mod run;
mod shapes;
mod uses;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use compare::{Difference, First, Moment};
pub use inputs::Draw;
use interface::Changes;
pub use proof::{Culprit, OnFailure, Proof, ProofError, prove};
pub use report::{Divergence, Exactness, FunctionReport, RegionReport, Report, TensorReport, Verdict};

use crate::interp::{InterpError, Values};
use crate::ir::{Dim, Function, LiteralError, Name, Program, TensorType, ValueType};
use crate::rewrite::InterfaceChange;

/// How to compare.
#[derive(Clone, Debug)]
pub struct Options {
    /// Steps to run each function for, at least one; 4 by default.
    pub steps: usize,
    /// Seed of inputs and initial states; 0 by default.
    pub seed: u64,
    /// How many seeds to run all steps for, counted up from the first; 1 by default.
    pub seeds: u64,
    /// The kinds of content to run all steps for, at least one; [`Draw::Normal`] by default.
    pub draws: Vec<Draw>,
    /// Inputs of the first, the second, … step that are not to be drawn, by name; none by default. Where there is one step,
    /// it holds for all. Shapes are those of the first.
    pub given: Vec<Values>,
    /// Content that states of the first program start with, by name; what is not given is drawn.
    pub given_states: Values,
    /// What is run; [`Scope::Auto`] by default.
    pub scope: Scope,
    /// Ranges of integer inputs by name, for when their uses do not tell.
    pub ranges: BTreeMap<Name, Range<i64>>,
    /// Shapes of inputs by name, for when the description's defaults are not those to run with.
    pub shapes: BTreeMap<Name, Vec<usize>>,
    /// How the interface of the second program's functions differs from that of the first's, by the name of the function;
    /// one change is done after the other.
    pub interface: BTreeMap<Name, Vec<InterfaceChange>>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            steps: 4,
            seed: 0,
            seeds: 1,
            draws: vec![Draw::Normal],
            given: Vec::new(),
            given_states: Values::new(),
            scope: Scope::Auto,
            ranges: BTreeMap::new(),
            shapes: BTreeMap::new(),
            interface: BTreeMap::new(),
        }
    }
}

/// What is run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Scope {
    /// As [`Scope::Local`] where a function has more than [`LOCAL_ABOVE`] bytes of weights, else as [`Scope::Whole`].
    #[default]
    Auto,
    /// Whole functions, weights included.
    Whole,
    /// What differs, each rewritten neighbourhood on its own with inputs of the right types. Weights that both programs
    /// share are not read, but for integers; where the programs have weight files of their own, those are compared byte by
    /// byte.
    Local,
}

/// Bytes of weights beyond which [`Scope::Auto`] compares region by region: 256 MiB.
pub const LOCAL_ABOVE: u64 = 1 << 28;

/// Why two programs could not be compared. It says nothing about whether they are equal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EquivError {
    /// A function is in one program only.
    #[error("could not compare: the {program} program has no function `{function}`")]
    Function {
        /// The function.
        function: Name,
        /// The program that lacks it.
        program: Side,
    },
    /// Neither program has a function.
    #[error("could not compare: there are no functions")]
    NoFunction,
    /// The two functions do not take or give the same.
    #[error("could not compare: {function}: {reason}")]
    Interface {
        /// The function.
        function: Name,
        /// What differs.
        reason: String,
    },
    /// No value can be drawn for an input.
    #[error("could not compare: {function}: input `{input}`: {reason}")]
    Input {
        /// The function.
        function: Name,
        /// The input.
        input: Name,
        /// What stands in the way.
        reason: String,
    },
    /// An option names an input that no compared function has.
    #[error("could not compare: there is no input `{0}`")]
    NoInput(Name),
    /// No step, no seed or no kind of content was asked for, which would prove nothing.
    #[error("could not compare: no step was asked for")]
    NoStep,
    /// Weights of the two programs could not be compared.
    #[error("could not compare: {function}")]
    Weights {
        /// The function.
        function: Name,
        /// What went wrong.
        #[source]
        source: LiteralError,
    },
    /// A program could not be evaluated.
    #[error("could not compare: the {program} program could not be evaluated at step {step}")]
    Run {
        /// The program.
        program: Side,
        /// Step, from 0.
        step: usize,
        /// What the interpreter says.
        #[source]
        source: Box<InterpError>,
    },
}

/// One of the two programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// `a`.
    First,
    /// `b`.
    Second,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::First => "first",
            Side::Second => "second",
        })
    }
}

/// Compares one function of two programs, or every function when none is named. See the [module
/// documentation](self) for how.
///
/// # Errors
/// [`EquivError`] when the programs do not have the same functions, inputs, outputs and states, an input cannot be
/// drawn, or one of the programs cannot be evaluated.
pub fn check(a: &Program, b: &Program, function: Option<&str>, options: &Options) -> Result<Report, EquivError> {
    let names: BTreeSet<Name> = match function {
        Some(name) => BTreeSet::from([name.into()]),
        None => a.functions().iter().chain(b.functions()).map(|f| f.name().clone()).collect(),
    };
    if names.is_empty() {
        return Err(EquivError::NoFunction);
    }
    let find = |p, program, name: &Name| {
        Program::function(p, name).ok_or_else(|| EquivError::Function { function: name.clone(), program })
    };
    let pairs = names
        .iter()
        .map(|name| Ok((find(a, Side::First, name)?, find(b, Side::Second, name)?)))
        .collect::<Result<Vec<_>, EquivError>>()?;
    let given = options.given.iter().chain([&options.given_states]).flat_map(Values::keys);
    let mut told = options.ranges.keys().chain(options.shapes.keys()).chain(given);
    if let Some(unknown) = told.find(|n| pairs.iter().all(|(f, _)| f.input(n).is_none())) {
        return Err(EquivError::NoInput(unknown.clone()));
    }
    if let Some(name) = options.interface.keys().find(|n| function.is_none() && !names.contains(n.as_str())) {
        return Err(EquivError::Function { function: name.clone(), program: Side::First });
    }
    let reports = pairs.iter().map(|(a, b)| check_functions(a, b, options)).collect::<Result<_, _>>()?;
    Ok(Report::new(options, reports))
}

/// Compares two functions.
///
/// # Errors
/// As [`check`].
pub fn check_functions(a: &Function, b: &Function, options: &Options) -> Result<FunctionReport, EquivError> {
    if options.steps == 0 || options.seeds == 0 || options.draws.is_empty() {
        return Err(EquivError::NoStep);
    }
    let changes = Changes::between(a, b, options.interface.get(a.name()).map_or(&[], Vec::as_slice))?;
    let heavy = || local::weight_bytes(a).max(local::weight_bytes(b)) > LOCAL_ABOVE;
    match options.scope {
        Scope::Local => local::compare(a, b, options),
        Scope::Auto if heavy() => local::compare(a, b, options),
        Scope::Auto | Scope::Whole => run::compare(a, b, &changes, options),
    }
}

/// Equal types, where an unknown size may be anything.
fn same_type(a: &ValueType, b: &ValueType) -> bool {
    let tensors = |s: &TensorType, t: &TensorType| {
        let fits = |(x, y): (&Dim, &Dim)| x == y || x.as_known().is_none() || y.as_known().is_none();
        s.dtype == t.dtype && s.rank() == t.rank() && s.shape.iter().zip(&t.shape).all(fits)
    };
    match (a, b) {
        (ValueType::Tensor(s), ValueType::Tensor(t)) | (ValueType::State(s), ValueType::State(t)) => tensors(s, t),
        (x, y) => x == y,
    }
}

#[cfg(test)]
mod graph;
#[cfg(test)]
mod tests;
