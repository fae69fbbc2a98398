//! What the `milopt` command refuses: the exit code, one line that names the file, and nothing written.

#![cfg(feature = "cli")]

mod support;

use std::fs;
use std::path::Path;

use support::files::{MODEL, copy_tree, listing};
use support::place::{Place, model_bytes};

/// A package that is spoiled somehow, and what is said of it.
struct Spoiled {
    spoil: fn(&Path),
    want: &'static str,
}

fn put_model(package: &Path, bytes: &[u8]) {
    fs::write(package.join(MODEL), bytes).unwrap();
}

fn edit_manifest(package: &Path, from: &str, to: &str) {
    let manifest = package.join("Manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    assert!(text.contains(from));
    fs::write(manifest, text.replace(from, to)).unwrap();
}

const SPOILED: &[Spoiled] = &[
    Spoiled {
        spoil: |p| fs::remove_file(p.join("Manifest.json")).unwrap(),
        want: "a.mlpackage is not a package: it has no Manifest.json",
    },
    Spoiled {
        spoil: |p| fs::write(p.join("Manifest.json"), "{").unwrap(),
        want: "a.mlpackage is not a package: its Manifest.json is not JSON",
    },
    Spoiled {
        spoil: |p| fs::remove_file(p.join(MODEL)).unwrap(),
        want: "cannot read a.mlpackage/Data/com.apple.CoreML/model.mlmodel: ",
    },
    Spoiled {
        spoil: |p| put_model(p, &model_bytes(p)[..9999]),
        want: "a.mlpackage/Data/com.apple.CoreML/model.mlmodel cannot be read as a model: not a model, or a damaged one: ",
    },
    Spoiled {
        spoil: |p| put_model(p, b"<!DOCTYPE html>"),
        want: "a.mlpackage/Data/com.apple.CoreML/model.mlmodel cannot be read as a model: not a model, or a damaged one: ",
    },
    Spoiled {
        spoil: |p| put_model(p, b""),
        want: "a.mlpackage/Data/com.apple.CoreML/model.mlmodel cannot be read as a model: not a model, or a damaged one: ",
    },
    Spoiled {
        // Specification version 4 and field 500, neuralNetwork.
        spoil: |p| put_model(p, &[0x08, 4, 0xa2, 0x1f, 0]),
        want: "a.mlpackage/Data/com.apple.CoreML/model.mlmodel holds a neural network (neuralNetwork), not an ML Program",
    },
    Spoiled {
        spoil: |p| edit_manifest(p, "com.apple.CoreML/model.mlmodel", "../../model.mlmodel"),
        want: "../../model.mlmodel leads out of the package at a.mlpackage",
    },
    #[cfg(unix)]
    Spoiled {
        spoil: |p| {
            fs::copy(p.join(MODEL), p.with_file_name("elsewhere")).unwrap();
            fs::remove_file(p.join(MODEL)).unwrap();
            std::os::unix::fs::symlink("../../../elsewhere", p.join(MODEL)).unwrap();
        },
        want: "a.mlpackage/Data/com.apple.CoreML/model.mlmodel leads out of the package at a.mlpackage",
    },
];

/// Runs a command that must fail with this code and one line that contains `want`, and change no file.
#[track_caller]
fn refuses(place: &Place, code: i32, args: &[&str], want: &str) {
    let before = listing(place.root());
    let output = place.milopt(args);
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {complaint}");
    assert!(complaint.starts_with("error: ") && complaint.contains(want), "{args:?}: {complaint}");
    assert_eq!(complaint.lines().count(), 1, "{args:?}: {complaint}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("wrote"), "{args:?}");
    assert!(listing(place.root()) == before, "{args:?} changed a file");
}

#[test]
fn spoiled_packages_are_refused_by_every_command() {
    for Spoiled { spoil, want } in SPOILED {
        let place = Place::new();
        place.copy("good.mlpackage", "rep_stack");
        let path = place.copy("a.mlpackage", "rep_stack");
        spoil(&path);
        for args in [
            &["inspect", "a.mlpackage"][..],
            &["inspect", "a.mlpackage", "--json"],
            &["print", "a.mlpackage"],
            &["optimize", "a.mlpackage", "-o", "out.mlpackage", "--report", "report.json"],
            &["optimize", "a.mlpackage", "-o", "good.mlpackage", "--force"],
            &["optimize", "a.mlpackage", "-o", "out.mlmodel", "--passes", ""],
            &["optimize", "a.mlpackage", "--in-place"],
            &["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz", "--states", "end.npz"],
        ] {
            refuses(&place, 1, args, want);
        }
        refuses(&place, 3, &["verify", "a.mlpackage", "good.mlpackage"], want);
        refuses(&place, 3, &["verify", "good.mlpackage", "a.mlpackage", "--json"], want);
    }
}

#[test]
fn models_cut_off_anywhere_are_refused() {
    let place = Place::new();
    let path = place.copy("a.mlpackage", "classify");
    let model = model_bytes(&path);
    for len in (0..model.len()).step_by(41) {
        put_model(&path, &model[..len]);
        refuses(&place, 1, &["optimize", "a.mlpackage", "-o", "out.mlpackage"], "model.mlmodel");
    }
}

#[test]
fn outputs_that_cannot_be_written_are_refused() {
    let place = Place::new();
    place.copy("a.mlpackage", "rep_stack");
    fs::create_dir(place.path("folder")).unwrap();
    fs::write(place.path("folder/letter"), "dear").unwrap();
    fs::write(place.path("file"), "dear").unwrap();
    for (out, more, want) in [
        ("a.mlpackage", &[][..], "a.mlpackage exists already; --force replaces it"),
        ("folder", &[], "folder exists already"),
        ("file", &[], "file exists already"),
        ("folder", &["--force"], "folder: what is there is not a package"),
        ("file", &["--force"], "file: what is there is not a package"),
        (".", &["--force"], "cannot save to .: what is there is not a package"),
        ("..", &[], ".. exists already"),
        ("file/out.mlmodel", &[], "file/out.mlmodel: what it should lie in is not a directory"),
        ("no/such/out.mlpackage", &[], "cannot find no/such"),
        ("a.mlpackage/Data/out.mlpackage", &[], "it lies in the package that is being saved"),
    ] {
        refuses(&place, 1, &[&["optimize", "a.mlpackage", "-o", out], more].concat(), want);
    }
}

#[test]
fn side_files_that_cannot_be_written_are_refused_before_any_work() {
    let place = Place::new();
    place.copy("a.mlpackage", "rep_stack");
    fs::create_dir(place.path("folder")).unwrap();
    // The input file does not exist: the outputs are looked at first.
    let run = ["run", "a.mlpackage", "--inputs", "in.npz", "--outputs"];
    for (file, want) in [
        ("no/such/file", "cannot write no/such/file: there is no directory no/such"),
        ("folder", "cannot write folder: it is a directory"),
        ("..", "cannot write ..: it names no file"),
    ] {
        refuses(&place, 1, &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--report", file], want);
        refuses(&place, 1, &[&run[..], &[file]].concat(), want);
        refuses(&place, 1, &[&run[..], &["out.npz", "--states", file]].concat(), want);
    }
}

#[test]
fn a_file_is_not_written_twice_nor_over_what_is_read() {
    let place = Place::new();
    place.copy("a.mlpackage", "rep_stack");
    fs::create_dir(place.path("folder")).unwrap();
    fs::write(place.path("in.npz"), "").unwrap();
    let run = ["run", "a.mlpackage", "--inputs", "in.npz", "--outputs"];
    let optimize = ["optimize", "a.mlpackage", "--report"];
    for (args, want) in [
        ([&run[..], &["x.npz", "--states", "folder/../x.npz"]].concat(), "--states and --outputs are both"),
        ([&run[..], &["./in.npz"]].concat(), "--outputs and --inputs are both ./in.npz"),
        ([&run[..], &["x.npz", "--states", "in.npz"]].concat(), "--states and --inputs are both in.npz"),
        ([&optimize[..], &["x.mlmodel", "-o", "x.mlmodel"]].concat(), "--report and --output are both x.mlmodel"),
        ([&optimize[..], &["a.mlpackage", "--in-place"]].concat(), "--report and PKG are both a.mlpackage"),
    ] {
        refuses(&place, 2, &args, want);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_report_that_cannot_be_written_does_not_hide_the_package() {
    let place = Place::new();
    place.copy("a.mlpackage", "rep_stack");
    let output = place.milopt(&["optimize", "a.mlpackage", "-o", "b.mlpackage", "--report", "/dev/full"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stderr.starts_with(b"error: cannot write /dev/full: "));
    assert!(output.stdout.ends_with(b"wrote b.mlpackage\n"));
    assert!(place.path("b.mlpackage").exists());
}

#[test]
fn wrong_arguments_change_no_file() {
    let place = Place::new();
    place.copy("a.mlpackage", "rep_stack");
    copy_tree(&place.path("a.mlpackage"), &place.path("b.mlpackage"));
    for (args, want) in [
        (&["optimize", "a.mlpackage"][..], "-o OUT, --in-place, or --dry-run"),
        (&["optimize", "a.mlpackage", "--in-place", "--passes", "dce,polish"], "there is no pass `polish`"),
        (&["optimize", "a.mlpackage", "--in-place", "--function", "decode"], "there is no function `decode`"),
        (&["print", "a.mlpackage", "--function", "decode"], "there is no function `decode`"),
        (
            &["verify", "a.mlpackage", "b.mlpackage", "--function", "decode"],
            "a.mlpackage: there is no function `decode`; there are main",
        ),
        (&["verify", "a.mlpackage", "b.mlpackage", "--range", "mood=0..4"], "there is no input `mood`"),
        (&["passes", "polish"], "polish"),
    ] {
        refuses(&place, 2, args, want);
    }
    let before = listing(place.root());
    for args in [
        &["optimize", "a.mlpackage", "-o", "c.mlpackage", "--in-place"][..],
        &["verify", "a.mlpackage", "b.mlpackage", "--range", "pos=4..0"],
        &["verify", "a.mlpackage", "b.mlpackage", "--range", "pos=low..high"],
    ] {
        let complaint = place.complains(2, args);
        assert!(complaint.starts_with("error: "), "{args:?}: {complaint}");
    }
    assert!(listing(place.root()) == before);
}

#[test]
fn a_run_without_its_inputs_writes_nothing() {
    let place = Place::new();
    place.copy("a.mlpackage", "rep_stack");
    let run = ["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz", "--states", "end.npz"];
    refuses(&place, 1, &run, "in.npz");
    support::npz::write_npz(&place.path("in.npz"), &[]);
    refuses(&place, 1, &run, "in.npz: there is no array for input `x`");
    refuses(&place, 2, &[&run[..], &["--function", "decode"]].concat(), "there is no function `decode`");
}

#[test]
fn a_package_without_functions_is_named() {
    let place = Place::new();
    place.package("a.mlpackage", "program(1.3) [specificationVersion = 9] {}");
    let want = "a.mlpackage: there are no functions";
    support::npz::write_npz(&place.path("in.npz"), &[]);
    refuses(&place, 1, &["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz"], want);
    refuses(&place, 1, &["print", "a.mlpackage", "--function", "main"], want);
    refuses(&place, 1, &["optimize", "a.mlpackage", "--in-place", "--function", "main"], want);
    refuses(&place, 3, &["verify", "a.mlpackage", "a.mlpackage", "--function", "main"], want);
    refuses(&place, 3, &["verify", "a.mlpackage", "a.mlpackage"], "there are no functions");
}

/// Opening a pipe that nobody writes to would never return.
#[cfg(unix)]
#[test]
fn pipes_are_not_waited_for() {
    let place = Place::new();
    let path = place.copy("a.mlpackage", "rep_stack");
    let pipe = |path: &Path| assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    pipe(&place.path("in.npz"));
    let run = ["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz"];
    let output = place.milopt(&run);
    assert_eq!(
        (output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()),
        (Some(1), "error: in.npz: it is not a regular file\n")
    );
    let weights = path.join(support::files::WEIGHTS);
    fs::remove_file(&weights).unwrap();
    pipe(&weights);
    let complaint = place.complains(3, &["verify", "a.mlpackage", "a.mlpackage"]);
    assert!(complaint.contains("weight.bin: it is not a regular file"), "{complaint}");
    let complaint = place.complains(1, &["optimize", "a.mlpackage", "-o", "b.mlpackage"]);
    assert!(complaint.ends_with("weight.bin: neither a file nor a directory\n"), "{complaint}");
}

/// Output that got lost is a failure, and for `verify` not that of being different.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_under_standard_output_is_told() {
    let place = Place::new();
    place.copy("a.mlpackage", "rep_stack");
    for (code, args) in [
        (3, &["verify", "a.mlpackage", "a.mlpackage"][..]),
        (3, &["verify", "a.mlpackage", "a.mlpackage", "--json"]),
        (1, &["inspect", "a.mlpackage"]),
        (1, &["print", "a.mlpackage", "--full"]),
        (1, &["optimize", "a.mlpackage", "--dry-run"]),
        (1, &["passes"]),
    ] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let output = place.command(args).stdout(full).output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {complaint}");
        assert!(complaint.starts_with("error: cannot write to standard output: "), "{complaint}");
    }
}
