//! What a rewrite was proved from, for whoever checks it.

use std::fmt;

use serde::Serialize;

use crate::analysis::layout::{Layout, Stride};
use crate::ir::{Dim, Function, Name, ValueId};

/// How the elements of an operand lie in the value that was read in its place: element (i₀, i₁, …) of `value` is element
/// `offset` + Σ digit · stride of the row-major `source`, where each axis index is written in digits of these extents, major
/// to minor. Stride 0 repeats.
///
/// Sizes, extents and strides are numbers, or products such as `4*s0` where they depend on unknown sizes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Certificate {
    /// The parameter it was bound to: `x`, `y`, `key`, `value` or `values`.
    pub operand: Name,
    /// The operand.
    pub value: Name,
    /// Its sizes.
    pub shape: Vec<Dim>,
    /// The value that was read in its place.
    pub source: Name,
    /// Its sizes.
    pub source_shape: Vec<Dim>,
    /// Position in the source of the element at the origin.
    pub offset: Stride,
    /// For each axis of the operand its digits; none for an axis of one element.
    pub axes: Vec<Vec<Factor>>,
}

/// One digit of an axis.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Factor {
    /// Number of values it takes.
    pub extent: Dim,
    /// Distance in the source between neighbouring values; 0 repeats.
    pub stride: Stride,
}

impl Certificate {
    /// For an operand that lies like this in the layout's source.
    pub fn new(f: &Function, operand: &str, value: ValueId, layout: &Layout) -> Certificate {
        let shape = |v: ValueId| f.tensor(v).map(|t| t.shape.to_vec()).unwrap_or_default();
        let axis = |axis: &[_]| axis.iter().map(Factor::of).collect();
        Certificate {
            operand: operand.into(),
            value: f.value(value).name().clone(),
            shape: shape(value),
            source: f.value(layout.source).name().clone(),
            source_shape: shape(layout.source),
            offset: layout.offset.clone(),
            axes: layout.axes.iter().map(|a| axis(a)).collect(),
        }
    }
}

impl Factor {
    fn of(digit: &crate::analysis::layout::Digit) -> Factor {
        Factor { extent: digit.extent.clone(), stride: digit.stride.clone() }
    }
}

impl fmt::Display for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is `{}` at {}", self.value, self.source, self.offset)?;
        for axis in &self.axes {
            let digits: Vec<String> = axis.iter().map(|d| format!("({}, {})", d.extent, d.stride)).collect();
            write!(f, " [{}]", digits.concat())?;
        }
        Ok(())
    }
}
