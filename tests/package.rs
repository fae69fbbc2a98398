//! Packages on disk: opening, refusing and saving, through the public interface only.

mod support;

use std::error::Error;
use std::fs;
use std::path::Path;

use milopt::ir::{Function, Literal};
use milopt::package::{OpenOptions, Overwrite, Package, PackageError, SaveOptions};
use milopt::verify;
use support::files::{MODEL, WEIGHTS, copy_of, fixture, fixtures, listing};
use support::save;

/// An error with its causes on one line.
fn text(error: &dyn Error) -> String {
    let mut out = error.to_string();
    let mut source = error.source();
    while let Some(e) = source {
        out += &format!(": {e}");
        source = e.source();
    }
    out
}

/// The constants that attributes name.
fn literals(f: &Function) -> Vec<&Literal> {
    f.all_ops().into_iter().flat_map(|op| f.op(op).attributes().map(|(_, l)| f.literal(l))).collect()
}

/// The first of them that lies in a weight file.
fn first_blob(f: &Function) -> &Literal {
    literals(f).into_iter().find(|l| l.is_blob()).unwrap()
}

#[track_caller]
fn refused(path: &Path, want: &str) {
    let error = text(&Package::open(path).unwrap_err());
    assert!(error.contains(want), "{error}");
}

#[test]
fn every_fixture_is_saved_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    for path in fixtures() {
        let package = Package::open(&path).unwrap();
        let out = dir.path().join(path.file_name().unwrap());
        save(&package, &out, &SaveOptions::default()).unwrap();
        assert!(listing(&path) == listing(&out), "{}", path.display());
        assert_eq!(package.bytes_read(), 0);
        let bare = dir.path().join(path.file_stem().unwrap());
        fs::create_dir(&bare).unwrap();
        let bare = bare.join("model.mlmodel");
        save(&package, &bare, &SaveOptions::default()).unwrap();
        assert_eq!(fs::read(&bare).unwrap(), fs::read(path.join(MODEL)).unwrap());
        let weights = fs::read(bare.with_file_name("weights").join("weight.bin"));
        assert_eq!(weights.ok(), fs::read(path.join(WEIGHTS)).ok());
    }
}

#[test]
fn a_bare_model_finds_its_weights_and_becomes_a_package_again() {
    let dir = tempfile::tempdir().unwrap();
    let bare = dir.path().join("model.mlmodel");
    save(&Package::open(fixture("softcap_q4")).unwrap(), &bare, &SaveOptions::default()).unwrap();
    let package = Package::open(&bare).unwrap();
    let f = package.program().main().unwrap();
    let blob = first_blob(f);
    assert!(!blob.packed(&**f.weights()).unwrap().is_empty());
    let out = dir.path().join("again.mlpackage");
    save(&package, &out, &SaveOptions::default()).unwrap();
    let again = Package::open(&out).unwrap();
    assert_eq!(again.model_bytes().unwrap(), fs::read(&bare).unwrap());
    assert_eq!(fs::read(out.join(WEIGHTS)).unwrap(), fs::read(dir.path().join("weights/weight.bin")).unwrap());
    save(&package, &bare, &SaveOptions::overwrite(Overwrite::InPlace)).unwrap();
    let other = dir.path().join("other.mlmodel");
    save(&package, &other, &SaveOptions::default()).unwrap();
    let names = ["again.mlpackage", "model.mlmodel", "other.mlmodel", "weights"];
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), names.len());
}

#[test]
fn what_is_not_a_package_is_refused() {
    let (dir, path) = copy_of("rep_stack");
    refused(&dir.path().join("missing.mlpackage"), "cannot open");
    fs::rename(path.join("Manifest.json"), dir.path().join("manifest")).unwrap();
    refused(&path, "it has no Manifest.json");
    fs::write(path.join("model.mil"), "program(1.0)").unwrap();
    refused(&path, "it is a compiled model (.mlmodelc)");
    let file = dir.path().join("file.mlpackage");
    fs::write(&file, "PK").unwrap();
    refused(&file, "a package is a directory");
    let folder = dir.path().join("folder.mlmodel");
    fs::create_dir(&folder).unwrap();
    refused(&folder, "it has no Manifest.json");
    let garbage = dir.path().join("garbage.mlmodel");
    for bytes in [&b"PK\x03\x04 garbage"[..], b"", &[0xff; 4096], b"{}"] {
        fs::write(&garbage, bytes).unwrap();
        refused(&garbage, "cannot be read as a model: not a model, or a damaged one");
    }
    // Field 403, neuralNetworkClassifier.
    fs::write(&garbage, [0x08, 4, 0x9a, 0x19, 0]).unwrap();
    refused(&garbage, "holds a neural network (neuralNetworkClassifier), not an ML Program");
    assert!(matches!(Package::open(&garbage), Err(PackageError::NotMlProgram { .. })));
}

#[test]
fn manifests_are_followed_but_not_out_of_the_package() {
    let (_dir, path) = copy_of("rep_stack");
    let manifest = path.join("Manifest.json");
    let original = fs::read_to_string(&manifest).unwrap();
    let put = |text: String| fs::write(&manifest, text).unwrap();
    fs::rename(path.join(MODEL), path.join("Data/com.apple.CoreML/yolo.mlmodel")).unwrap();
    refused(&path, "cannot read");
    put(format!("\u{feff}{}", original.replace("com.apple.CoreML/model.mlmodel", "com.apple.CoreML/yolo.mlmodel")));
    Package::open(&path).unwrap();
    for bad in ["../../x.mlmodel", "/etc/passwd", "com.apple.CoreML/../../../x"] {
        put(original.replace("com.apple.CoreML/model.mlmodel", bad));
        refused(&path, "leads out of the package");
    }
    put(original.replace("com.apple.CoreML/weights", "../weights"));
    refused(&path, "../weights leads out of the package");
    put(original.replace("com.apple.CoreML/model.mlmodel", "com.apple.CoreML"));
    refused(&path, "is a directory");
    put("{".into());
    refused(&path, "its Manifest.json is not JSON");
}

#[test]
fn a_missing_weight_file_matters_only_when_it_is_read() {
    let (dir, path) = copy_of("rep_stack");
    fs::remove_file(path.join(WEIGHTS)).unwrap();
    let package = Package::open(&path).unwrap();
    let f = package.program().main().unwrap();
    let blob = first_blob(f);
    let error = blob.packed(&**f.weights()).unwrap_err().to_string();
    assert!(error.starts_with("weight @model_path/weights/weight.bin:") && error.contains("cannot open"), "{error}");
    for name in ["out.mlpackage", "bare.mlmodel"] {
        save(&package, dir.path().join(name), &SaveOptions::default()).unwrap();
    }
    assert_eq!(Package::open(dir.path().join("bare.mlmodel")).unwrap().program().functions().len(), 1);
}

#[test]
fn a_truncated_weight_file_is_reported_when_its_bytes_are_needed() {
    let (_dir, path) = copy_of("rep_stack");
    fs::File::options().write(true).open(path.join(WEIGHTS)).unwrap().set_len(200).unwrap();
    let package = Package::open(&path).unwrap();
    let f = package.program().main().unwrap();
    let errors: Vec<String> = literals(f)
        .into_iter()
        .filter(|l| l.is_blob())
        .filter_map(|l| l.packed(&**f.weights()).err())
        .map(|e| e.to_string())
        .collect();
    assert!(errors.iter().any(|e| e.ends_with("runs past the end of the file (200 bytes)")), "{errors:?}");
    assert_eq!(package.bytes_read(), 0);
}

#[test]
fn output_paths_are_not_overwritten_unasked() {
    let (dir, path) = copy_of("rep_stack");
    let package = Package::open(&path).unwrap();
    let other = dir.path().join("other.mlpackage");
    save(&Package::open(fixture("sdpa")).unwrap(), &other, &SaveOptions::default()).unwrap();
    let before = listing(dir.path());
    for (target, overwrite) in [(&path, Overwrite::Refuse), (&other, Overwrite::Refuse), (&other, Overwrite::InPlace)] {
        let error = save(&package, target, &SaveOptions::overwrite(overwrite)).unwrap_err();
        assert!(matches!(error, PackageError::Exists(_)), "{error}");
    }
    assert!(listing(dir.path()) == before);
    save(&package, &path, &SaveOptions::overwrite(Overwrite::InPlace)).unwrap();
    assert!(listing(dir.path()) == before, "an unedited package in place changes nothing");
    save(&package, &other, &SaveOptions::overwrite(Overwrite::Force)).unwrap();
    assert!(listing(&other) == listing(&path));

    let folder = dir.path().join("documents");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("letter"), "dear").unwrap();
    let force = SaveOptions::overwrite(Overwrite::Force);
    let error = save(&package, &folder, &force).unwrap_err().to_string();
    assert!(error.ends_with("what is there is not a package"), "{error}");
    let error = save(&package, path.join("Data/inner.mlpackage"), &force).unwrap_err().to_string();
    assert!(error.ends_with("it lies in the package that is being saved"), "{error}");
    let error = save(&package, dir.path().join("no/such/dir.mlpackage"), &force).unwrap_err().to_string();
    assert!(error.starts_with("cannot find"), "{error}");
    assert_eq!(fs::read(folder.join("letter")).unwrap(), b"dear");

    let bare = dir.path().join("model.mlmodel");
    save(&package, &bare, &SaveOptions::default()).unwrap();
    for target in [bare.clone(), dir.path().join("second.mlmodel")] {
        let error = save(&package, &target, &SaveOptions::default()).unwrap_err();
        assert!(matches!(error, PackageError::Exists(_)), "{error}");
    }
    fs::write(dir.path().join("weights/other.bin"), "kept").unwrap();
    save(&package, &bare, &force).unwrap();
    assert_eq!(fs::read(dir.path().join("weights/other.bin")).unwrap(), b"kept");
}

#[test]
fn forcing_a_bare_model_keeps_the_weights_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (a, b) = (Package::open(fixture("exaone4_q1")).unwrap(), Package::open(fixture("mha")).unwrap());
    let force = SaveOptions::overwrite(Overwrite::Force);
    save(&a, path("a.mlmodel"), &force).unwrap();

    let refused = |name: &str| {
        let before = listing(dir.path());
        let error = save(&b, path(name), &force).unwrap_err().to_string();
        assert!(error.contains("weight.bin: what is there may be the weights of another model"), "{error}");
        assert!(listing(dir.path()) == before);
    };
    refused("b.mlmodel");
    fs::write(path("b.mlmodel"), "no model").unwrap();
    refused("b.mlmodel");
    refused("a.mlmodel");
    fs::remove_file(path("b.mlmodel")).unwrap();

    save(&a, path("twin.mlmodel"), &force).unwrap();
    let weights = fs::read(path("weights/weight.bin")).unwrap();
    refused("twin.mlmodel");
    fs::remove_file(path("twin.mlmodel")).unwrap();
    save(&b, path("a.mlmodel"), &force).unwrap();
    assert_ne!(fs::read(path("weights/weight.bin")).unwrap(), weights, "nobody else needed them");
}

#[test]
fn what_a_save_would_refuse_is_told_without_saving() {
    let (dir, path) = copy_of("rep_stack");
    let package = Package::open(&path).unwrap();
    fs::create_dir(dir.path().join("folder.mlmodel")).unwrap();
    fs::write(dir.path().join("file"), "dear").unwrap();
    let before = listing(dir.path());
    for (name, overwrite, want) in [
        ("copy.mlpackage", Overwrite::Refuse, "exists already"),
        ("file", Overwrite::InPlace, "exists already"),
        ("file", Overwrite::Force, "what is there is not a package"),
        ("file/out.mlpackage", Overwrite::Force, "what it should lie in is not a directory"),
        ("folder.mlmodel", Overwrite::Force, "what is there is not a file"),
        ("no/out.mlpackage", Overwrite::Refuse, "cannot find"),
    ] {
        let (target, options) = (dir.path().join(name), SaveOptions::overwrite(overwrite));
        let told = text(&package.check_target(&target, &options).unwrap_err());
        assert!(told.contains(want), "{told}");
        assert_eq!(told, text(&save(&package, &target, &options).unwrap_err()));
    }
    package.check_target(dir.path().join("new.mlmodel"), &SaveOptions::default()).unwrap();
    assert!(listing(dir.path()) == before);
}

/// Opening a pipe that nobody writes to would never return.
#[cfg(unix)]
#[test]
fn pipes_are_refused() {
    let pipe = |path: &Path| {
        fs::remove_file(path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let (_dir, path) = copy_of("rep_stack");
    pipe(&path.join(WEIGHTS));
    let package = Package::open(&path).unwrap();
    let f = package.program().main().unwrap();
    let consts = f.all_ops().into_iter().filter_map(|op| f.const_value(*f.op(op).results().first()?));
    let errors: Vec<String> = consts.filter_map(|l| l.packed(&**f.weights()).err()).map(|e| e.to_string()).collect();
    assert!(errors.iter().any(|e| e.ends_with("weight.bin: it is not a regular file")), "{errors:?}");
    pipe(&path.join(MODEL));
    refused(&path, "model.mlmodel: it is not a regular file");
    refused(&path.join(MODEL), "it is neither a file nor a directory");
    pipe(&path.join("Manifest.json"));
    refused(&path, "it has no Manifest.json");
}

#[test]
fn the_witness_of_another_program_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let package = Package::open(fixture("sdpa")).unwrap();
    let twin = package.program().clone();
    let out = dir.path().join("out.mlpackage");
    let error = package.save(&out, verify::structure(&twin).unwrap(), &SaveOptions::default()).unwrap_err();
    assert!(matches!(error, PackageError::OtherWitness), "{error}");
    assert!(!out.exists());
    package.save(&out, verify::typed(package.program()).unwrap(), &SaveOptions::default()).unwrap();
}

#[test]
fn stray_files_come_along() {
    let (dir, path) = copy_of("rep_stack");
    fs::write(path.join("executorch_debug_handle_mapping.json"), "{}").unwrap();
    fs::create_dir_all(path.join("Data/com.example/empty")).unwrap();
    fs::write(path.join("Data/com.example/Metadata.json"), "{}").unwrap();
    let out = dir.path().join("out.mlpackage");
    save(&Package::open(&path).unwrap(), &out, &SaveOptions::default()).unwrap();
    assert!(listing(&path) == listing(&out));
}

#[cfg(unix)]
mod links {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_out_of_the_package_are_refused_or_followed() {
        let (dir, path) = copy_of("rep_stack");
        let cache = dir.path().join("blobs");
        fs::create_dir(&cache).unwrap();
        let before = listing(&path);
        for (name, file) in [("m", MODEL), ("w", WEIGHTS)] {
            fs::rename(path.join(file), cache.join(name)).unwrap();
            symlink(cache.join(name), path.join(file)).unwrap();
        }
        refused(&path, "leads out of the package");
        let package = OpenOptions::new().follow_symlinks(true).open(&path).unwrap();
        let out = dir.path().join("out.mlpackage");
        save(&package, &out, &SaveOptions::default()).unwrap();
        assert!(listing(&out) == before, "links became what they lead to");

        fs::remove_file(path.join(MODEL)).unwrap();
        fs::rename(cache.join("m"), path.join(MODEL)).unwrap();
        let package = Package::open(&path).unwrap();
        let f = package.program().main().unwrap();
        let blob = first_blob(f);
        let error = blob.packed(&**f.weights()).unwrap_err().to_string();
        assert!(error.contains("leads out of the package"), "{error}");
        let error = save(&package, dir.path().join("second.mlpackage"), &SaveOptions::default()).unwrap_err();
        assert!(matches!(error, PackageError::Escapes { .. }), "{error}");
        assert!(!dir.path().join("second.mlpackage").exists());
    }

    #[test]
    fn links_inside_the_package_stay_links() {
        let (dir, path) = copy_of("rep_stack");
        fs::rename(path.join(WEIGHTS), path.join("shared.bin")).unwrap();
        symlink("../../../shared.bin", path.join(WEIGHTS)).unwrap();
        let out = dir.path().join("out.mlpackage");
        save(&Package::open(&path).unwrap(), &out, &SaveOptions::default()).unwrap();
        assert!(listing(&path) == listing(&out));
        assert!(out.join(WEIGHTS).symlink_metadata().unwrap().is_symlink());
    }

    #[test]
    fn a_link_to_a_package_stays_a_link() {
        let (dir, path) = copy_of("rep_stack");
        let link = dir.path().join("link.mlpackage");
        symlink("copy.mlpackage", &link).unwrap();
        let package = Package::open(&link).unwrap();
        save(&package, &link, &SaveOptions::overwrite(Overwrite::InPlace)).unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert!(listing(&path) == listing(&fixture("rep_stack")));
    }
}

/// Saves under a file-size limit, as a process of its own; does nothing unless it is told where.
#[test]
fn save_under_a_limit_helper() {
    let Ok(target) = std::env::var("MILOPT_TEST_SAVE_TO") else { return };
    let saved = save(&Package::open(fixture("softcap_q4")).unwrap(), target, &SaveOptions::overwrite(Overwrite::Force));
    assert!(saved.is_ok(), "{}", text(&saved.unwrap_err()));
}

#[cfg(unix)]
#[test]
fn a_file_size_limit_leaves_the_target_as_it_was() {
    let save_with_limit = |target: &Path, prefix: &str, blocks: u32| {
        let program = std::env::current_exe().unwrap();
        let script = format!("{prefix} ulimit -f {blocks}; exec \"$0\" --exact save_under_a_limit_helper");
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .arg(program)
            .env("MILOPT_TEST_SAVE_TO", target)
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out.mlpackage");
    let (saved, out) = save_with_limit(&target, "", 1 << 20);
    assert!(saved, "{out}");
    for exists in [true, false] {
        if !exists {
            fs::remove_dir_all(&target).unwrap();
        }
        let before = listing(dir.path());
        for prefix in ["", "trap '' XFSZ;"] {
            for blocks in [1, 8, 32, 64] {
                let (saved, out) = save_with_limit(&target, prefix, blocks);
                assert!(!saved, "{out}");
                assert!(out.contains("file too large"), "{out}");
                assert!(listing(dir.path()) == before);
            }
        }
    }
}
