//! The one error at the top.

/// Any error of the crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A package could not be opened or saved.
    #[error(transparent)]
    Package(#[from] crate::package::PackageError),
    /// A pipeline could not be built or run.
    #[error(transparent)]
    Pipeline(#[from] crate::passes::PipelineError),
    /// A program is not well-formed.
    #[error(transparent)]
    Verify(#[from] crate::verify::Violations),
    /// Two programs could not be compared.
    #[error(transparent)]
    Equiv(#[from] crate::equiv::EquivError),
    /// A function could not be evaluated.
    #[error(transparent)]
    Interp(#[from] crate::interp::InterpError),
    /// Text is not MIL.
    #[error(transparent)]
    Parse(#[from] crate::text::ParseError),
    /// A patch or transaction was refused.
    #[error(transparent)]
    Patch(#[from] crate::rewrite::PatchError),
    /// An op does not type.
    #[error(transparent)]
    Infer(#[from] crate::opset::InferError),
}
