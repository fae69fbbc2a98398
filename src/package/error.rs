//! Errors of opening and saving.

use std::io;
use std::path::{Path, PathBuf};

use crate::proto::wire::WireError;

/// Why a package could not be opened or saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackageError {
    /// The operating system refused something.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The path does not hold a package or model file.
    #[error("{} is not a package: {reason}", path.display())]
    NotAPackage {
        /// The path.
        path: PathBuf,
        /// What it is, or what it lacks.
        reason: String,
    },
    /// A path in the package leads out of it.
    #[error("{} leads out of the package at {}", path.display(), package.display())]
    Escapes {
        /// The path, as the package spells it.
        path: PathBuf,
        /// The package.
        package: PathBuf,
    },
    /// The model is of another kind.
    #[error("{} holds {what}, not an ML Program", path.display())]
    NotMlProgram {
        /// The model file.
        path: PathBuf,
        /// What the model is.
        what: String,
    },
    /// The model file cannot be understood.
    #[error("{} cannot be read as a model", path.display())]
    Decode {
        /// The model file.
        path: PathBuf,
        /// The cause.
        source: DecodeError,
    },
    /// The program cannot be written as a model file.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The witness that came with the save is that of another program.
    #[error("the program that was verified is not the one to be saved")]
    OtherWitness,
    /// The output path exists and overwriting was not asked for.
    #[error("{} exists already", .0.display())]
    Exists(PathBuf),
    /// The output path cannot be written to, whatever is asked for.
    #[error("cannot save to {}: {reason}", path.display())]
    Target {
        /// The path.
        path: PathBuf,
        /// Why not.
        reason: &'static str,
    },
}

impl PackageError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PackageError {
        let path = path.to_owned();
        move |source| PackageError::Io { action, path, source }
    }
}

/// Why the bytes of a model file make no program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes are not a protobuf message of this schema.
    #[error("not a model, or a damaged one: {0}")]
    Format(String),
    /// The model is of another kind.
    #[error("{0}, not an ML Program")]
    Kind(String),
    /// The program refers to something that is not there, or names something twice.
    #[error("function `{function}`: {what}")]
    Structure {
        /// The function.
        function: String,
        /// What is wrong, naming the op.
        what: String,
    },
}

impl From<WireError> for DecodeError {
    fn from(e: WireError) -> DecodeError {
        DecodeError::Format(e.to_string())
    }
}

impl From<prost::DecodeError> for DecodeError {
    fn from(e: prost::DecodeError) -> DecodeError {
        DecodeError::Format(e.to_string())
    }
}

/// Why a program cannot be written as a model file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// Something was edited that carries fields the IR cannot hold.
    #[error("function `{function}`: {item} was edited but carries {what}, which would be lost")]
    Unmodelled {
        /// The function.
        function: String,
        /// The op, input or feature.
        item: String,
        /// What it carries.
        what: String,
    },
    /// The content of a constant does not fit its type.
    #[error("a constant of type {ty} has content of another kind")]
    Literal {
        /// Its type.
        ty: String,
    },
    /// A weight could not be copied into the new package.
    #[error("function `{function}`: a weight cannot be copied")]
    Weight {
        /// The function.
        function: String,
        /// The cause.
        source: Box<crate::ir::LiteralError>,
    },
    /// A feature cannot be described.
    #[error("function `{function}`: feature `{feature}` cannot be described: {reason}")]
    Feature {
        /// The function.
        function: String,
        /// The feature.
        feature: String,
        /// Why not.
        reason: String,
    },
    /// The program as a whole cannot be written.
    #[error("the program cannot be written: {0}")]
    Program(String),
    /// The source of the program is damaged; it was read before, so this does not happen.
    #[error("the program's source is damaged: {0}")]
    Source(String),
}

impl From<WireError> for EncodeError {
    fn from(e: WireError) -> EncodeError {
        EncodeError::Source(e.to_string())
    }
}
