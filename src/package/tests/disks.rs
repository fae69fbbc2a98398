//! Disks that fail.

use std::cell::Cell;
use std::io;

use super::super::disk::{Disk, Os};
use super::*;

/// A disk that fails once it has written a number of bytes, or at a numbered step.
struct Failing {
    bytes: Cell<u64>,
    steps: Cell<u64>,
    exchange: bool,
}

impl Failing {
    fn after_bytes(n: u64) -> Failing {
        Failing { bytes: Cell::new(n), steps: Cell::new(u64::MAX), exchange: true }
    }

    fn step(&self) -> io::Result<()> {
        match self.steps.get().checked_sub(1) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => Err(io::Error::other("step failed")),
        }
    }

    fn take(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let left = self.bytes.get();
        if (bytes.len() as u64) <= left {
            self.bytes.set(left - bytes.len() as u64);
            return Ok(());
        }
        self.bytes.set(0);
        fs::write(path, &bytes[..left as usize])?;
        Err(io::ErrorKind::StorageFull.into())
    }
}

impl Disk for Failing {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        Os.create_dir(path)
    }
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.step()?;
        self.take(path, bytes)?;
        Os.write(path, bytes)
    }
    fn copy(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        self.take(to, &fs::read(from)?)?;
        Os.copy(from, to)
    }
    fn link(&self, text: &Path, at: &Path) -> io::Result<()> {
        self.step()?;
        Os.link(text, at)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        Os.sync_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        Os.rename(from, to)
    }
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        self.step()?;
        match self.exchange {
            true => Os.exchange(a, b),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

fn edited(name: &str) -> Package {
    let mut package = Package::open(fixture(name)).unwrap();
    let f = &mut package.program_mut().functions_mut()[0];
    let op = first_op(f, "matmul");
    let v = f.op(op).results()[0];
    f.rename(v, "renamed".into());
    package
}

/// Ends of the records in the files that a save writes, in the order it writes them.
fn boundaries(package: &Package) -> Vec<u64> {
    let home = package.home.as_ref().unwrap();
    let model = package.model_bytes().unwrap();
    let mut out = Vec::new();
    let mut at = 0;
    let weights = fs::read(home.place.root.join("Data/com.apple.CoreML/weights/weight.bin")).unwrap();
    out.extend(
        (0..weights.len() as u64).step_by(64).filter(|i| weights[*i as usize..].starts_with(&[0xef, 0xbe, 0xad, 0xde])),
    );
    at += weights.len() as u64;
    let manifest = fs::metadata(home.place.root.join(MANIFEST)).unwrap().len();
    out.extend([at, at + manifest - 1, at + manifest]);
    at += manifest;
    let mut end = 0;
    for op in op_bytes(&model, package.program().main().unwrap().name()) {
        let found = model[end..].windows(op.1.len()).position(|w| w == op.1).unwrap();
        end += found + op.1.len();
        out.push(at + end as u64);
    }
    out.push(at + model.len() as u64 - 1);
    out
}

#[test]
fn a_disk_that_fills_up_leaves_the_target_as_it_was() {
    let package = edited("rep_stack");
    let points = boundaries(&package);
    assert!(points.len() > 50);
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out.mlpackage");
    let options = SaveOptions::overwrite(Overwrite::Force);
    for &n in &points {
        save::save(&package, &target, &options, &Failing::after_bytes(n)).unwrap_err();
        assert!(listing(dir.path()).is_empty(), "after {n} bytes nothing is left");
    }
    save(&Package::open(fixture("rep_stack")).unwrap(), &target, &options).unwrap();
    let before = listing(dir.path());
    for &n in &points {
        save::save(&package, &target, &options, &Failing::after_bytes(n)).unwrap_err();
        assert!(listing(dir.path()) == before, "after {n} bytes the old package is there");
    }
    save::save(&package, &target, &options, &Failing::after_bytes(u64::MAX)).unwrap();
    assert!(listing(dir.path()) != before);
}

#[test]
fn any_step_that_fails_leaves_the_target_as_it_was() {
    let package = edited("rep_stack");
    let options = SaveOptions::overwrite(Overwrite::Force);
    for file in ["out.mlpackage", "out.mlmodel"] {
        for (exists, exchange) in [(false, true), (true, true), (true, false)] {
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join(file);
            if exists {
                save(&Package::open(fixture("mha")).unwrap(), &target, &options).unwrap();
            }
            let before = listing(dir.path());
            let mut steps = 0;
            loop {
                let disk = Failing { bytes: Cell::new(u64::MAX), steps: Cell::new(steps), exchange };
                match save::save(&package, &target, &options, &disk) {
                    Ok(()) => break,
                    Err(_) => assert!(listing(dir.path()) == before, "{file}: step {steps}, exists {exists}"),
                }
                steps += 1;
            }
            assert!(steps > 5);
            let saved = Package::open(&target).unwrap();
            assert!(saved.program().functions()[0].has_name("renamed"));
            let want = if file == "out.mlmodel" { 2 } else { 1 };
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), want, "no scratch directory is left");
        }
    }
}

#[test]
fn an_interrupted_replacement_is_completed_or_rolled_back() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out.mlpackage");
    let backup = dir.path().join(".out.mlpackage.milopt-backup");
    let save =
        |name: &str, path: &Path| save(&Package::open(fixture(name)).unwrap(), path, &SaveOptions::default()).unwrap();
    save("rep_stack", &backup.with_file_name("old.mlpackage"));
    fs::rename(dir.path().join("old.mlpackage"), &backup).unwrap();
    let old = Package::open(&target).unwrap();
    assert!(!backup.exists(), "the old package is back");
    save("sdpa", &dir.path().join("new.mlpackage"));
    fs::rename(&target, &backup).unwrap();
    fs::rename(dir.path().join("new.mlpackage"), &target).unwrap();
    let new = Package::open(&target).unwrap();
    assert!(!backup.exists(), "the new package stays");
    assert_ne!(old.model_bytes().unwrap(), new.model_bytes().unwrap());
}
