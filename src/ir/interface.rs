//! The interface of a function: what its description says of inputs, outputs and states.

use super::{DType, Name};

/// Features of one function, as the model description lists them.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Interface {
    /// Input features, in description order.
    pub inputs: Vec<Feature>,
    /// Output features, in description order.
    pub outputs: Vec<Feature>,
    /// State features, in description order.
    pub states: Vec<Feature>,
}

impl Interface {
    /// The input or state feature with this name.
    pub fn input(&self, name: &str) -> Option<&Feature> {
        self.inputs.iter().chain(&self.states).find(|f| f.name == *name)
    }

    /// The output feature with this name.
    pub fn output(&self, name: &str) -> Option<&Feature> {
        self.outputs.iter().find(|f| f.name == *name)
    }
}

/// One described input, output or state.
#[derive(Clone, PartialEq, Debug)]
pub struct Feature {
    /// Name; equal to the name of the function input or block output.
    pub name: Name,
    /// Text for people.
    pub short_description: String,
    /// What it holds.
    pub kind: FeatureKind,
    /// Whether a caller may leave it out.
    pub optional: bool,
}

/// What a feature holds.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum FeatureKind {
    /// A multi-array.
    Array(ArrayFeature),
    /// A state that wraps a multi-array.
    State(ArrayFeature),
    /// An image; as a tensor it is `[1, C, height, width]`.
    Image {
        /// Default width in pixels.
        width: u64,
        /// Default height in pixels.
        height: u64,
        /// `ColorSpace` number of the schema.
        color_space: i32,
    },
    /// A feature of a kind that ML Programs rarely have; kept as it is in the file.
    Other(&'static str),
}

/// A described multi-array.
#[derive(Clone, PartialEq, Debug)]
pub struct ArrayFeature {
    /// Element type; `None` when the description leaves it open.
    pub dtype: Option<DType>,
    /// Default shape; empty when the description gives none.
    pub shape: Vec<u64>,
    /// Admissible shapes.
    pub flexibility: Flexibility,
    /// Value that a missing optional input takes.
    pub default: Option<f64>,
}

/// The shapes an input may take besides its default.
#[derive(Clone, PartialEq, Debug)]
pub enum Flexibility {
    /// Only the default shape.
    Fixed,
    /// One of these; the first is the default.
    Enumerated(Vec<Vec<u64>>),
    /// Each axis within an inclusive range; `None` is unbounded.
    Ranges(Vec<(u64, Option<u64>)>),
}

impl Feature {
    /// The multi-array this feature is or wraps.
    pub fn array(&self) -> Option<&ArrayFeature> {
        match &self.kind {
            FeatureKind::Array(a) | FeatureKind::State(a) => Some(a),
            _ => None,
        }
    }
}
