//! Opt-in: coremltools' own loader over every fixture as each pipeline leaves it.
//!
//! ```sh
//! MILOPT_PYTHON=path/to/python cargo test --test external -- --ignored
//! ```
//! The interpreter needs coremltools 9 (it loads packages on Linux too). The last result is in docs/verification.md.

use std::fs;
use std::path::Path;
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
    let mut written = Vec::new();
    for entry in fs::read_dir(root.join("tests/models")).unwrap() {
        let fixture = entry.unwrap().path();
        if fixture.extension().is_none_or(|e| e != "mlpackage") {
            continue;
        }
        let mut package = Package::open(&fixture).unwrap();
        Pipeline::default().run(package.program_mut(), &RunOptions::default()).unwrap();
        let out = dir.path().join(fixture.file_name().unwrap());
        package.save(&out, verify::structure(package.program()).unwrap(), &Default::default()).unwrap();
        written.push(out);
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
