//! Programs: functions by name and what surrounds them.

use std::any::Any;
use std::sync::Arc;

use super::{Function, Name};

/// An ML Program with its description.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub(crate) functions: Vec<Function>,
    pub(crate) default_function: Option<Name>,
    pub(crate) specification_version: i32,
    pub(crate) metadata: Metadata,
    pub(crate) source: Option<Arc<dyn Origin>>,
}

/// What the program was read from; only the layer that read it looks inside.
pub trait Origin: Any + std::fmt::Debug + Send + Sync {
    /// For downcasting by the layer that made it.
    fn as_any(&self) -> &dyn Any;
}

/// Text that a model carries for people and tools.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Metadata {
    /// What the model does.
    pub short_description: String,
    /// Version of the model.
    pub version: String,
    /// Author.
    pub author: String,
    /// License.
    pub license: String,
    /// Further entries, sorted by key.
    pub user_defined: std::collections::BTreeMap<String, String>,
}

impl Program {
    /// An empty program for this `specificationVersion` (9 is iOS 18).
    pub fn new(specification_version: i32) -> Program {
        Program { specification_version, ..Program::default() }
    }

    /// Functions, sorted by name.
    pub fn functions(&self) -> &[Function] {
        &self.functions
    }
    /// The function with this name.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|f| f.name() == name)
    }
    /// For edits through the checked door.
    pub fn function_mut(&mut self, name: &str) -> Option<&mut Function> {
        self.functions.iter_mut().find(|f| f.name() == name)
    }
    /// Every function, for edits through the checked door.
    pub fn functions_mut(&mut self) -> &mut [Function] {
        &mut self.functions
    }
    /// Adds a function, replacing one of the same name.
    pub fn add_function(&mut self, function: Function) {
        self.functions.retain(|f| f.name() != function.name());
        let at = self.functions.partition_point(|f| f.name() < function.name());
        self.functions.insert(at, function);
    }
    /// The default function's name in a multi-function program; `None` in the single-function form.
    pub fn default_function(&self) -> Option<&Name> {
        self.default_function.as_ref()
    }
    /// Makes this a multi-function program with that default, or a single-function one.
    pub fn set_default_function(&mut self, name: Option<Name>) {
        self.default_function = name;
    }
    /// The function that runs when none is named: the default, `main`, or the only one.
    pub fn main(&self) -> Option<&Function> {
        match &self.default_function {
            Some(name) => self.function(name),
            None => self.function("main").or(match &self.functions[..] {
                [only] => Some(only),
                _ => None,
            }),
        }
    }
    /// `specificationVersion` of the model file.
    pub fn specification_version(&self) -> i32 {
        self.specification_version
    }
    /// Metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }
    /// Whether nothing was edited since the program was read.
    pub fn is_unedited(&self) -> bool {
        self.functions.iter().all(|f| f.revision() == 0)
    }
}
