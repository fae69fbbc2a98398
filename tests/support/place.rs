//! A directory to run the `milopt` command in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use milopt::package::{Package, SaveOptions};

use super::files::{MODEL, copy_tree, fixture};
use super::save;

/// A directory that goes with the test.
pub struct Place(tempfile::TempDir);

impl Place {
    /// An empty one.
    pub fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        self.0.path()
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// A package made from text.
    pub fn package(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        save(&Package::new(milopt::text::parse(text).unwrap()), &path, &SaveOptions::default()).unwrap();
        path
    }

    /// A copy of a fixture.
    pub fn copy(&self, name: &str, of: &str) -> PathBuf {
        let path = self.path(name);
        copy_tree(&fixture(of), &path);
        path
    }

    /// Runs the command.
    pub fn milopt(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// The command, to be run.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_milopt"));
        command.current_dir(&self.0).args(args);
        command
    }

    /// Standard output of a command that must exit with `code`.
    #[track_caller]
    pub fn says(&self, code: i32, args: &[&str]) -> String {
        let output = self.milopt(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Standard error of a command that must exit with `code`.
    #[track_caller]
    pub fn complains(&self, code: i32, args: &[&str]) -> String {
        let output = self.milopt(args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        error
    }
}

/// The bytes of a package's model file.
pub fn model_bytes(package: &Path) -> Vec<u8> {
    fs::read(package.join(MODEL)).unwrap()
}
