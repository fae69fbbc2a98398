//! Packages: `.mlpackage` directories and bare `.mlmodel` files ⇄ [`Program`].
//!
//! This is the only layer of the library that touches files.
//!
//! * **Opening** follows the manifest to the root model, decodes its program and keeps the model file's bytes. Weight
//!   files are not opened before somebody asks for a weight. Paths and links that lead out of the package are refused.
//! * **Saving** copies every file of the package except the model file. An unedited program is written as the bytes it
//!   was read from; in an edited one every op, function and description that was not touched keeps its bytes, fields
//!   that the schema does not know included. Equal programs give equal bytes.
//! * A save **takes effect in one step**: the new package is made beside the target, made durable and then moved or
//!   exchanged. Whatever fails before leaves the target as it was.
//! * A program that was read from nowhere gets a new package, with its large constants in a weight file.

mod convert;
mod decode;
mod describe;
mod disk;
mod encode;
mod error;
mod files;
mod interface;
mod manifest;
mod save;
mod source;
mod tree;
mod weights;

#[cfg(test)]
mod tests;

#[cfg(feature = "cli")]
pub(crate) use files::open_file;

pub use error::{DecodeError, EncodeError, PackageError};
pub use save::{Overwrite, SaveOptions};

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::ir::{Program, Weights};
use crate::verify::Verified;
use files::read_file;
use manifest::{MANIFEST, ManifestError};
use source::ModelFile;
use weights::{FileWeights, ModelPlace, inside};

/// A program and the files around it.
#[derive(Debug)]
pub struct Package {
    program: Program,
    home: Option<Home>,
}

/// Where a package was opened.
#[derive(Debug)]
struct Home {
    place: ModelPlace,
    /// The model file.
    model: PathBuf,
    weights: Arc<FileWeights>,
    bare: bool,
}

impl Home {
    fn is_package(&self) -> bool {
        !self.bare
    }

    /// The model file relative to the package.
    fn relative_model(&self) -> Result<PathBuf, PackageError> {
        self.model
            .strip_prefix(&self.place.root)
            .map(Path::to_owned)
            .map_err(|_| PackageError::Escapes { path: self.model.clone(), package: self.place.root.clone() })
    }
}

/// How to open.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Read through symbolic links that leave the package (download caches are made of such links), and copy what they
    /// lead to when saving. Otherwise such links are refused.
    pub follow_symlinks: bool,
}

impl OpenOptions {
    /// The defaults.
    pub fn new() -> OpenOptions {
        OpenOptions::default()
    }

    /// Sets [`OpenOptions::follow_symlinks`].
    pub fn follow_symlinks(mut self, follow: bool) -> OpenOptions {
        self.follow_symlinks = follow;
        self
    }

    /// Opens a package directory or a bare model file.
    ///
    /// # Errors
    /// [`PackageError`] when the path does not hold a readable ML Program.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Package, PackageError> {
        let path = path.as_ref();
        save::recover(path);
        let kind = fs::metadata(path).map_err(PackageError::io("open", path))?;
        let home = match kind.is_dir() {
            true => self.find_in_package(path)?,
            false if kind.is_file() => self.find_bare(path)?,
            false => {
                let reason = "it is neither a file nor a directory".into();
                return Err(PackageError::NotAPackage { path: path.to_owned(), reason });
            }
        };
        let bytes = read_file(&home.model).map_err(PackageError::io("read", &home.model))?;
        let mut program = decode::decode(bytes.into(), home.weights.clone()).map_err(|e| match e {
            DecodeError::Kind(what) => PackageError::NotMlProgram { path: home.model.clone(), what },
            source => PackageError::Decode { path: home.model.clone(), source },
        })?;
        program.functions_mut().iter_mut().for_each(crate::opset::refine);
        Ok(Package { program, home: Some(home) })
    }

    fn find_in_package(&self, path: &Path) -> Result<Home, PackageError> {
        let not_a_package = |reason: String| PackageError::NotAPackage { path: path.to_owned(), reason };
        let manifest = path.join(MANIFEST);
        if !manifest.is_file() {
            let compiled = ["model.mil", "coremldata.bin"].iter().any(|f| path.join(f).exists());
            return Err(not_a_package(match compiled || path.extension().is_some_and(|e| e == "mlmodelc") {
                true => "it is a compiled model (.mlmodelc), which cannot be turned back into a package".into(),
                false => format!("it has no {MANIFEST}"),
            }));
        }
        inside(path, &manifest, self.follow_symlinks)?;
        let text = read_file(&manifest).map_err(PackageError::io("read", &manifest))?;
        let model = path.join(manifest::root_model(&text).map_err(|e| match e {
            ManifestError::Invalid(what) => not_a_package(what),
            ManifestError::Escapes(item) => PackageError::Escapes { path: item, package: path.to_owned() },
        })?);
        inside(path, &model, self.follow_symlinks)?;
        if model.is_dir() {
            return Err(not_a_package(format!("its root model {} is a directory", model.display())));
        }
        let model_dir = model.parent().unwrap_or(path).to_owned();
        Ok(self.home(
            model,
            ModelPlace { model_dir, root: path.to_owned(), follow_symlinks: self.follow_symlinks },
            false,
        ))
    }

    fn find_bare(&self, path: &Path) -> Result<Home, PackageError> {
        if path.extension().is_some_and(|e| e == "mlpackage") {
            let reason = "it is a file, and a package is a directory; a zipped one must be unpacked first".into();
            return Err(PackageError::NotAPackage { path: path.to_owned(), reason });
        }
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
            _ => PathBuf::from("."),
        };
        let place = ModelPlace { model_dir: dir.clone(), root: dir, follow_symlinks: self.follow_symlinks };
        Ok(self.home(path.to_owned(), place, true))
    }

    fn home(&self, model: PathBuf, place: ModelPlace, bare: bool) -> Home {
        Home { weights: Arc::new(FileWeights::new(place.clone())), place, model, bare }
    }
}

impl Package {
    /// Opens a package directory or a bare `.mlmodel` file whose weights lie beside it.
    ///
    /// # Errors
    /// [`PackageError`] when the path does not hold a readable ML Program.
    pub fn open(path: impl AsRef<Path>) -> Result<Package, PackageError> {
        OpenOptions::default().open(path)
    }

    /// A package that is on no disk yet.
    pub fn new(program: Program) -> Package {
        Package { program, home: None }
    }

    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The program, for edits.
    pub fn program_mut(&mut self) -> &mut Program {
        &mut self.program
    }

    /// The program alone; its weights stay readable.
    pub fn into_program(self) -> Program {
        self.program
    }

    /// The directory or bare model file that was opened.
    pub fn path(&self) -> Option<&Path> {
        let home = self.home.as_ref()?;
        Some(if home.is_package() { &home.place.root } else { &home.model })
    }

    /// How many bytes of weight data were read since the package was opened.
    pub fn bytes_read(&self) -> u64 {
        self.home.as_ref().map_or(0, |h| h.weights.bytes_read())
    }

    /// The bytes that [`Package::save`] would write as the model file.
    ///
    /// # Errors
    /// [`EncodeError`] when the program cannot be written.
    pub fn model_bytes(&self) -> Result<Vec<u8>, EncodeError> {
        Ok(encode::encode(&self.program, self.home().is_some())?.model)
    }

    /// Where the program's source and weight files are; `None` for a program that came from elsewhere.
    fn home(&self) -> Option<&Home> {
        let source = ModelFile::of(&self.program)?;
        let weights: Arc<dyn Weights> = self.home.as_ref()?.weights.clone();
        self.home.as_ref().filter(|_| Arc::ptr_eq(&weights, &source.weights))
    }

    /// Checks what [`Package::save`] asks of its path before it writes anything, to be told early.
    ///
    /// # Errors
    /// [`PackageError`] when the path cannot be saved to.
    pub fn check_target(&self, path: impl AsRef<Path>, options: &SaveOptions) -> Result<(), PackageError> {
        save::admit(self, path.as_ref(), options).map(drop)
    }

    /// Saves the package: as a directory, or as a bare model file with its weights beside it when `path` ends in
    /// `.mlmodel`. The witness is that of [`Package::program`], of any grade: what was not checked is not written.
    ///
    /// # Errors
    /// [`PackageError`]; the output path is then as it was before.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        witness: Verified<'_>,
        options: &SaveOptions,
    ) -> Result<(), PackageError> {
        if !std::ptr::eq(witness.program(), &self.program) {
            return Err(PackageError::OtherWitness);
        }
        save::save(self, path.as_ref(), options, &disk::Os)
    }
}
