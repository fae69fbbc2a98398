//! Opt-in: coremltools' own loader over every fixture as each pipeline leaves it.
//!
//! ```sh
//! MILOPT_PYTHON=path/to/python cargo test --test external -- --ignored
//! ```
//! The interpreter needs coremltools 9 (it loads packages on Linux too). `MILOPT_PACKAGES` may name a directory of
//! further packages. The last result is in docs/verification.md.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use milopt::package::Package;
use milopt::passes::{Pipeline, RunOptions};
use milopt::verify;

#[test]
#[ignore = "needs Python with coremltools"]
fn coremltools_loads_every_optimized_fixture() {
    let python = std::env::var("MILOPT_PYTHON").unwrap_or_else(|_| "python3".into());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    let further = std::env::var_os("MILOPT_PACKAGES").map(PathBuf::from);
    let mut written = Vec::new();
    for (i, models) in [Some(root.join("tests/models")), further].into_iter().flatten().enumerate() {
        let to = dir.path().join(i.to_string());
        fs::create_dir(&to).unwrap();
        written.extend(packages(&models).iter().map(|path| optimize(path, &to)));
    }
    assert!(!written.is_empty());
    let output = Command::new(python)
        .arg(root.join("tests/external/load_check.py"))
        .args(&written)
        .output()
        .expect("Python starts");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.lines().filter(|l| l.starts_with("ok ")).count(), written.len());
}

fn packages(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "mlpackage")).collect()
}

/// Writes the package as the default pipeline leaves it, and says where.
fn optimize(package: &Path, dir: &Path) -> PathBuf {
    let out = dir.join(package.file_name().unwrap());
    let mut package = Package::open(package).unwrap();
    Pipeline::default().run(package.program_mut(), &RunOptions::default()).unwrap();
    package.save(&out, verify::structure(package.program()).unwrap(), &Default::default()).unwrap();
    out
}
