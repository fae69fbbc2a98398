//! The bytes a program was read from, and where its functions lie in them.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::ir::{Metadata, Name, Origin, Program, ValueType, Weights};

/// A model file and what was found in it.
pub(super) struct ModelFile {
    pub(super) bytes: Arc<[u8]>,
    /// Payload of the program.
    pub(super) program: Range<usize>,
    /// Payload of the description; absent in a model without one.
    pub(super) description: Option<Range<usize>>,
    pub(super) functions: BTreeMap<Name, FunctionSource>,
    pub(super) specification_version: i32,
    pub(super) default_function: Option<Name>,
    pub(super) metadata: Metadata,
    /// Identifies functions that were read from this file.
    pub(super) weights: Arc<dyn Weights>,
}

/// Where one function lies.
#[derive(Debug)]
pub(super) struct FunctionSource {
    /// Payload of the `Function` message.
    pub(super) range: Range<usize>,
    /// Payload of the body's `Block` message.
    pub(super) body: Range<usize>,
    pub(super) inputs: Vec<InputSource>,
}

/// One function input as it was read.
#[derive(Debug)]
pub(super) struct InputSource {
    pub(super) name: Name,
    pub(super) ty: ValueType,
    /// Payload of the `NamedValueType` message.
    pub(super) range: Range<usize>,
    pub(super) unmodelled: Option<String>,
}

impl ModelFile {
    /// The file a program was read from.
    pub(super) fn of(program: &Program) -> Option<&ModelFile> {
        program.source.as_deref()?.as_any().downcast_ref()
    }

    /// Whether the file still says exactly what the program says.
    pub(super) fn says(&self, program: &Program) -> bool {
        program.is_unedited()
            && program.specification_version == self.specification_version
            && program.default_function == self.default_function
            && program.metadata == self.metadata
            && program.functions.iter().map(|f| f.name()).eq(self.functions.keys())
            && program.functions.iter().all(|f| Arc::ptr_eq(f.weights(), &self.weights))
    }
}

impl Origin for ModelFile {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for ModelFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelFile({} bytes)", self.bytes.len())
    }
}
