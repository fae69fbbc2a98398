//! The fixtures, and directories as values. Unit tests use this file too.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models")
}

/// The fixture package of this name.
pub fn fixture(name: &str) -> PathBuf {
    models().join(name).with_extension("mlpackage")
}

/// Every fixture package, by name.
pub fn fixtures() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(models()).unwrap().map(|e| e.unwrap().path()).collect();
    found.retain(|p| p.extension().is_some_and(|e| e == "mlpackage"));
    found.sort();
    assert!(found.len() >= 28);
    found
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
