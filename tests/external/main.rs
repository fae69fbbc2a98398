//! Opt-in: coremltools' own loader over every fixture and every spelling of repeated heads as the pipeline leaves them.
//!
//! ```sh
//! MILOPT_PYTHON=path/to/python cargo test --test external -- --ignored
//! ```
//! The interpreter needs coremltools 9 (it loads packages on Linux too). `MILOPT_PACKAGES` may name a directory of
//! further packages. The last result is in docs/verification.md.

#[path = "../support/mod.rs"]
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use milopt::package::Package;
use milopt::passes::{Pipeline, RunOptions};
use support::matrix::{self, Case};
use support::save;

#[test]
#[ignore = "needs Python with coremltools"]
fn coremltools_loads_every_optimized_fixture() {
    let dir = tempfile::tempdir().unwrap();
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    let further = std::env::var_os("MILOPT_PACKAGES").map(PathBuf::from);
    let mut written = Vec::new();
    for (i, models) in [Some(models), further].into_iter().flatten().enumerate() {
        let to = dir.path().join(i.to_string());
        fs::create_dir(&to).unwrap();
        for path in packages(&models) {
            let mut package = Package::open(&path).unwrap();
            optimize(&mut package);
            written.push(to.join(path.file_name().unwrap()));
            save(&package, &written[written.len() - 1], &Default::default()).unwrap();
        }
    }
    check(&written);
}

#[test]
#[ignore = "needs Python with coremltools"]
fn coremltools_loads_every_optimized_spelling() {
    let dir = tempfile::tempdir().unwrap();
    let cases: Vec<Case> = matrix::LENGTHS.iter().flat_map(|&lengths| matrix::cases(lengths)).collect();
    let mut written = Vec::new();
    for case in cases {
        let mut package = Package::new(case.build().program);
        optimize(&mut package);
        written.push(dir.path().join(case.name).with_extension("mlpackage"));
        save(&package, &written[written.len() - 1], &Default::default()).unwrap();
    }
    check(&written);
}

/// Asks the loader about these packages.
fn check(packages: &[PathBuf]) {
    assert!(!packages.is_empty());
    let python = std::env::var("MILOPT_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/external/load_check.py");
    let output = Command::new(python).arg(script).args(packages).output().expect("Python starts");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.lines().filter(|l| l.starts_with("ok ")).count(), packages.len());
}

fn packages(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "mlpackage")).collect()
}

/// Runs the default pipeline.
fn optimize(package: &mut Package) {
    Pipeline::default().run(package.program_mut(), &RunOptions::default()).unwrap();
}
