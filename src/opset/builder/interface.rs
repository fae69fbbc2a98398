//! Inputs, states and outputs with their descriptions.

use crate::ir::{
    ArrayFeature, DType, Def, Dim, Feature, FeatureKind, Flexibility, Function, SymbolRange, TensorType, ValueId,
    ValueType,
};

use super::{BuildError, Builder};

/// The size of one axis of an input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// Always this.
    Fixed(u64),
    /// Any within inclusive bounds; each such axis gets a symbol of its own.
    Range {
        /// Size in the default shape.
        default: u64,
        /// Smallest size.
        lo: u64,
        /// Largest size; `None` is unbounded.
        hi: Option<u64>,
    },
}

impl From<u64> for Size {
    fn from(n: u64) -> Size {
        Size::Fixed(n)
    }
}

impl Builder {
    /// Adds a tensor input of a fixed shape.
    ///
    /// # Errors
    /// [`BuildError::NameTaken`]; [`BuildError::Feature`] for rank 0 and for element types that an interface cannot
    /// have in this opset (fp32, int32, from CoreML6 fp16, from CoreML9 int8 are allowed).
    pub fn input(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Result<ValueId, BuildError> {
        let sizes: Vec<Size> = shape.iter().copied().map(Size::Fixed).collect();
        self.flexible_input(name, dtype, &sizes)
    }

    /// Adds a tensor input some of whose sizes vary from run to run.
    ///
    /// # Errors
    /// As [`Builder::input`]; also when a default lies outside its bounds.
    pub fn flexible_input(&mut self, name: &str, dtype: DType, shape: &[Size]) -> Result<ValueId, BuildError> {
        self.check_feature(name, dtype)?;
        if shape.is_empty() {
            return Err(self.feature_error(name, "is a scalar, which an input cannot be"));
        }
        let mut dims = Vec::with_capacity(shape.len());
        let mut defaults = Vec::with_capacity(shape.len());
        let mut ranges = Vec::with_capacity(shape.len());
        for &size in shape {
            let (default, lo, hi) = match size {
                Size::Fixed(n) => (n, n, Some(n)),
                Size::Range { default, lo, hi } => (default, lo, hi),
            };
            if default < lo || hi.is_some_and(|hi| default > hi) {
                return Err(self.feature_error(name, "has a default outside its bounds"));
            }
            dims.push(match size {
                Size::Fixed(n) => Dim::known(n),
                Size::Range { .. } => Dim::unknown(self.f.add_symbol(SymbolRange { lo, hi })),
            });
            defaults.push(default);
            ranges.push((lo, hi));
        }
        let fixed = shape.iter().all(|s| matches!(s, Size::Fixed(_)));
        let flexibility = if fixed { Flexibility::Fixed } else { Flexibility::Ranges(ranges) };
        let array = ArrayFeature { dtype: Some(dtype), shape: defaults, flexibility, default: None };
        self.interface.inputs.push(feature(name, FeatureKind::Array(array)));
        Ok(self.f.add_input(name.into(), TensorType::new(dtype, dims).into()))
    }

    /// Adds a state. It starts at zero and keeps its content from run to run.
    ///
    /// # Errors
    /// [`BuildError::NameTaken`]; [`BuildError::Feature`] before CoreML8 and for element types other than fp16 and int8.
    pub fn state(&mut self, name: &str, dtype: DType, shape: &[u64]) -> Result<ValueId, BuildError> {
        self.check_name(name)?;
        if self.f.opset_version() < 8 || !matches!(dtype, DType::F16 | DType::I8) || shape.is_empty() {
            let reason = format!("cannot be a state of {dtype} {shape:?} in {}", self.f.opset());
            return Err(self.feature_error(name, reason));
        }
        let array = fixed(dtype, shape.to_vec());
        self.interface.states.push(feature(name, FeatureKind::State(array)));
        Ok(self.f.add_input(name.into(), ValueType::State(TensorType::fixed(dtype, shape))))
    }

    /// Ends the function: it returns these values under these names.
    ///
    /// A value that is an input or already has an output name is returned through an `identity`.
    ///
    /// # Errors
    /// [`BuildError::NameTaken`] when an input or another output has the name; [`BuildError::Invisible`];
    /// [`BuildError::Feature`] for types that an interface cannot have.
    pub fn finish(mut self, outputs: &[(&str, ValueId)]) -> Result<Function, BuildError> {
        for &(name, v) in outputs {
            self.check_visible(v)?;
            let Some(t) = self.f.tensor(v).cloned() else {
                return Err(self.feature_error(name, format!("has type {}", self.f.ty(v))));
            };
            self.check_dtype(name, t.dtype)?;
            let v = self.output(name, v)?;
            self.f.add_output(self.f.body(), v);
            let shape = t.known_shape().map_or(Vec::new(), |s| s.to_vec());
            self.interface.outputs.push(feature(name, FeatureKind::Array(fixed(t.dtype, shape))));
        }
        self.f.set_interface(self.interface);
        self.f.reset_revision();
        Ok(self.f)
    }

    /// The value to return under a name.
    fn output(&mut self, name: &str, v: ValueId) -> Result<ValueId, BuildError> {
        if self.interface.input(name).is_some() || self.interface.output(name).is_some() {
            return Err(self.taken(name));
        }
        if let Some(other) = self.f.find_value(name).filter(|other| *other != v) {
            let fresh = self.f.fresh_name(name);
            self.f.rename(other, fresh);
        }
        if matches!(self.f.value(v).def(), Def::Input(_)) || self.f.is_output(v) {
            return self.named(name).op("identity", [("x", v.into())]);
        }
        if *self.f.value(v).name() != *name {
            self.f.rename(v, name.into());
        }
        Ok(v)
    }

    fn check_name(&self, name: &str) -> Result<(), BuildError> {
        match self.f.has_name(name) {
            true => Err(self.taken(name)),
            false if name.is_empty() => Err(self.feature_error(name, "has no name")),
            false => Ok(()),
        }
    }

    fn check_feature(&self, name: &str, dtype: DType) -> Result<(), BuildError> {
        self.check_name(name)?;
        self.check_dtype(name, dtype)
    }

    fn check_dtype(&self, name: &str, dtype: DType) -> Result<(), BuildError> {
        let since = match dtype {
            DType::F32 | DType::I32 => 5,
            DType::F16 => 6,
            DType::I8 => 9,
            _ => u32::MAX,
        };
        match self.f.opset_version() >= since {
            true => Ok(()),
            false => {
                Err(self.feature_error(name, format!("cannot have element type {dtype} in {}", self.f.opset())))
            }
        }
    }

    fn taken(&self, name: &str) -> BuildError {
        BuildError::NameTaken { function: self.f.name().clone(), name: name.into() }
    }

    fn feature_error(&self, name: &str, reason: impl Into<String>) -> BuildError {
        BuildError::Feature { function: self.f.name().clone(), name: name.into(), reason: reason.into() }
    }
}

fn feature(name: &str, kind: FeatureKind) -> Feature {
    Feature { name: name.into(), short_description: String::new(), kind, optional: false }
}

fn fixed(dtype: DType, shape: Vec<u64>) -> ArrayFeature {
    ArrayFeature { dtype: Some(dtype), shape, flexibility: Flexibility::Fixed, default: None }
}
