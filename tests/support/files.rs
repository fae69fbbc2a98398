//! Packages on disk. Unit tests use this file too, and each user needs its own part of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The model file of a package.
pub const MODEL: &str = "Data/com.apple.CoreML/model.mlmodel";
/// The weight file of a package.
pub const WEIGHTS: &str = "Data/com.apple.CoreML/weights/weight.bin";

/// Where the fixtures are.
pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models")
}

/// A fixture by name.
pub fn fixture(name: &str) -> PathBuf {
    models().join(name).with_extension("mlpackage")
}

/// Every fixture, in name order.
pub fn fixtures() -> Vec<PathBuf> {
    packages(&models())
}

/// Every package in a directory, in name order.
pub fn packages(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "mlpackage"))
        .collect();
    all.sort();
    assert!(!all.is_empty());
    all
}

/// A copy of a fixture to be spoiled.
pub fn copy_of(name: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("copy.mlpackage");
    copy_tree(&fixture(name), &to);
    (dir, to)
}

/// Copies a directory.
pub fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_tree(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// Every file, directory and link below a path with its content.
pub fn listing(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.symlink_metadata().unwrap();
            let content = match (kind.is_symlink(), kind.is_dir()) {
                (true, _) => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                (_, true) => {
                    todo.push(path.clone());
                    Vec::new()
                }
                _ => fs::read(&path).unwrap(),
            };
            out.insert(path.strip_prefix(dir).unwrap().to_owned(), content);
        }
    }
    out
}
