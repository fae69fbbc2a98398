//! Changes of what a function takes and gives, for whoever calls it and for the equivalence check.

use std::fmt;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::analysis::values::{Poly, Unknown};
use crate::ir::{DType, Function, Name};

/// A change of the interface that keeps what is computed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum InterfaceChange {
    /// States became one: their contents one behind the other along axis 0, in this order.
    Joined {
        /// The states as they were.
        states: Vec<Name>,
        /// The state that holds them all.
        into: Name,
    },
    /// A state became an input that the function only reads; the caller writes.
    ReadOnly(HostWrite),
    /// A state that the function never wrote became an input.
    Input {
        /// The input that was a state of this name.
        cache: Name,
        /// Element type.
        #[serde(serialize_with = "dtype_name", deserialize_with = "dtype_of_name")]
        dtype: DType,
        /// Shape.
        cache_shape: Vec<u64>,
    },
}

impl fmt::Display for InterfaceChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InterfaceChange::Joined { states, into } => {
                let list: Vec<String> = states.iter().map(|s| format!("`{s}`")).collect();
                write!(f, "state `{into}` holds {}, one behind the other", list.join(", "))
            }
            InterfaceChange::Input { cache, .. } => write!(f, "state `{cache}` is an input"),
            InterfaceChange::ReadOnly(w) => {
                write!(f, "state `{}` is an input, into which the caller writes output `{}`", w.cache, w.output)
            }
        }
    }
}

/// What the caller writes into a cache that the function only reads: after each run, `cache[box] = output`. The box has the
/// shape of the output.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostWrite {
    /// The input that was a state of this name.
    pub cache: Name,
    /// Element type of the cache and of the output.
    #[serde(serialize_with = "dtype_name", deserialize_with = "dtype_of_name")]
    pub dtype: DType,
    /// Shape of the cache.
    pub cache_shape: Vec<u64>,
    /// The output that holds what is to be written.
    pub output: Name,
    /// Shape of the output, and so of the box; `None` for a size that differs from run to run.
    pub output_shape: Vec<Option<u64>>,
    /// Where the box begins on each axis.
    pub begin: Vec<Position>,
}

fn dtype_name<S: serde::Serializer>(dtype: &DType, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(dtype)
}

fn dtype_of_name<'de, D: Deserializer<'de>>(d: D) -> Result<DType, D::Error> {
    let name = String::deserialize(d)?;
    DType::from_name(&name).ok_or_else(|| D::Error::custom(format!("there is no element type `{name}`")))
}

/// An index that follows from the inputs of the run: a constant plus terms.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Position {
    /// The constant part.
    pub constant: i64,
    /// What is added to it.
    pub terms: Vec<Term>,
}

/// A coefficient times something the caller knows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Term {
    /// The coefficient.
    pub coefficient: i64,
    /// What it multiplies.
    #[serde(flatten)]
    pub source: Source,
}

/// An integer that the caller knows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "source", rename_all = "kebab-case")]
pub enum Source {
    /// An element of an input, by its row-major position.
    Element {
        /// The input.
        input: Name,
        /// The position.
        index: u32,
    },
    /// A size of an input.
    Size {
        /// The input.
        input: Name,
        /// The axis.
        axis: usize,
    },
}

impl Position {
    /// A polynomial as the caller sees it; `None` when it is not linear, or depends on something that the function computes.
    pub fn of(f: &Function, poly: &Poly) -> Option<Position> {
        let mut position = Position::default();
        for (unknowns, coefficient) in poly.terms() {
            match unknowns {
                [] => position.constant = coefficient,
                [unknown] => position.terms.push(Term { coefficient, source: source(f, *unknown)? }),
                _ => return None,
            }
        }
        Some(position)
    }

    /// The index, given the elements and sizes of the inputs; `None` when one is not given or the sum is too large.
    pub fn evaluate(&self, known: impl Fn(&Source) -> Option<i64>) -> Option<i64> {
        self.terms
            .iter()
            .try_fold(self.constant, |sum, t| sum.checked_add(known(&t.source)?.checked_mul(t.coefficient)?))
    }
}

impl Position {
    /// The position so much further.
    fn plus(&self, distance: u64) -> Option<Position> {
        let constant = self.constant.checked_add_unsigned(distance)?;
        Some(Position { constant, terms: self.terms.clone() })
    }
}

impl fmt::Display for Source {
    /// `pos[0]` or `mask.shape[3]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Element { input, index } => write!(f, "{input}[{index}]"),
            Source::Size { input, axis } => write!(f, "{input}.shape[{axis}]"),
        }
    }
}

impl fmt::Display for Position {
    /// `2*pos[0] - mask.shape[3] + 1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, Term { coefficient, source }) in self.terms.iter().enumerate() {
            match (i, *coefficient < 0) {
                (0, true) => f.write_str("-")?,
                (0, false) => {}
                (_, true) => f.write_str(" - ")?,
                (_, false) => f.write_str(" + ")?,
            }
            match coefficient.unsigned_abs() {
                1 => write!(f, "{source}")?,
                n => write!(f, "{n}*{source}")?,
            }
        }
        match (self.terms.is_empty(), self.constant) {
            (true, c) => write!(f, "{c}"),
            (false, 0) => Ok(()),
            (false, c) if c < 0 => write!(f, " - {}", c.unsigned_abs()),
            (false, c) => write!(f, " + {c}"),
        }
    }
}

impl fmt::Display for HostWrite {
    /// `k[:, :, pos[0] : pos[0] + 1, :] = k_new`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.cache)?;
        for (i, (begin, size)) in self.begin.iter().zip(&self.output_shape).enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            match size.map(|n| (n, begin.plus(n))) {
                Some((n, _)) if *begin == Position::default() && self.cache_shape.get(i) == Some(&n) => {
                    f.write_str(":")?
                }
                Some((_, Some(end))) => write!(f, "{begin} : {end}")?,
                _ => write!(f, "{begin} : {begin} + {}.shape[{i}]", self.output)?,
            }
        }
        write!(f, "] = {}", self.output)
    }
}

fn source(f: &Function, unknown: Unknown) -> Option<Source> {
    let name = |v| f.value(v).name().clone();
    match unknown {
        Unknown::Element(v, index) => f.inputs().contains(&v).then(|| Source::Element { input: name(v), index }),
        Unknown::Size(s) => f.inputs().iter().find_map(|&v| {
            let axis = f.tensor(v)?.shape.iter().position(|d| d.coef() == 1 && d.symbols() == [s])?;
            Some(Source::Size { input: name(v), axis })
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_back_from_json() {
        let at = |source| Term { coefficient: -2, source };
        let changes = vec![
            InterfaceChange::Joined { states: vec!["k".into(), "v".into()], into: "kv".into() },
            InterfaceChange::Input { cache: "seen".into(), dtype: DType::F32, cache_shape: vec![2] },
            InterfaceChange::ReadOnly(HostWrite {
                cache: "kv".into(),
                dtype: DType::F16,
                cache_shape: vec![4, 8],
                output: "new".into(),
                output_shape: vec![Some(1), None],
                begin: vec![
                    Position { constant: 3, terms: vec![at(Source::Element { input: "p".into(), index: 1 })] },
                    Position { constant: 0, terms: vec![at(Source::Size { input: "mask".into(), axis: 3 })] },
                ],
            }),
        ];
        let text = serde_json::to_string(&changes).unwrap();
        assert_eq!(serde_json::from_str::<Vec<InterfaceChange>>(&text).unwrap(), changes, "{text}");
        let wrong = text.replace("fp16", "fp17");
        assert!(serde_json::from_str::<Vec<InterfaceChange>>(&wrong).unwrap_err().to_string().contains("`fp17`"));
    }
}
