//! Packages that no converter writes, or that lack something: what milopt does not know survives, what it cannot do is
//! said, and nothing is written by halves.

#![cfg(feature = "cli")]

mod support;

use std::fs;
use std::path::Path;

use milopt::package::{Package, SaveOptions};
use milopt::passes::{Pipeline, Report};
use milopt::{equiv, text, verify};
use support::files::{WEIGHTS, fixture, listing};
use support::place::{Place, model_bytes};
use support::{DEFAULT, count, declined, main, optimize, program, save, wire};

/// The fixture that the models below are made from: two layers of decode attention.
const BASE: &str = "rep_expand";

/// Overwrites the model file of a package.
fn put_model(package: &Path, bytes: &[u8]) {
    fs::write(package.join(support::files::MODEL), bytes).unwrap();
}

/// A program as it is after a trip through a package on disk, its weights in a file.
fn reopened(program: milopt::ir::Program) -> (tempfile::TempDir, Package) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.mlpackage");
    save(&Package::new(program), &path, &SaveOptions::default()).unwrap();
    let package = Package::open(&path).unwrap();
    (dir, package)
}

/// Optimizes the base model with an unknown field in the op that produces `output`; gives the report and how many tiles
/// are left. The op must come out as it went in, and the package must be valid and equal.
fn with_unknown_field_in(output: &str) -> (Report, usize) {
    let place = Place::new();
    let path = place.copy("a.mlpackage", BASE);
    let model = wire::edit_op(&model_bytes(&path), output, wire::with_unknown_field);
    put_model(&path, &model);

    let mut package = Package::open(&path).unwrap();
    let report = Pipeline::default().run(package.program_mut(), &Default::default()).unwrap();
    let out = place.path("out.mlpackage");
    save(&package, &out, &SaveOptions::default()).unwrap();
    assert_eq!(wire::op_bytes(&model_bytes(&out), output), wire::op_bytes(&model, output), "{output}");

    let after = Package::open(&out).unwrap();
    verify::typed(after.program()).unwrap();
    let original = Package::open(fixture(BASE)).unwrap();
    let verdict = equiv::check(original.program(), after.program(), None, &Default::default()).unwrap();
    assert!(verdict.satisfies(equiv::Exactness::Bitwise), "{verdict}");
    (report, count(after.program(), "tile"))
}

#[test]
fn unknown_fields_in_an_op_that_is_kept_survive() {
    for output in ["linear_0_cast_fp16", "coreml_update_state_4", "x_3_cast_fp16"] {
        let (report, tiles) = with_unknown_field_in(output);
        assert_eq!(tiles, 0, "{output}: {}", report.explain());
    }
}

#[test]
fn unknown_fields_stop_the_edit_that_would_lose_them() {
    let lost = "carries unknown field 777 in operation";
    for (output, op, tiles) in [
        ("sc_1_cast_fp16", "matmul `sc_1_cast_fp16`", 1),
        ("var_163_cast_fp16", "matmul `sc_1_cast_fp16`", 1),
        ("var_168_cast_fp16", "matmul `sc_1_cast_fp16`", 1),
        ("p_3_cast_fp16", "sc_1_cast_fp16", 0),
    ] {
        let (report, left) = with_unknown_field_in(output);
        assert!(declined(&report, op, lost), "{output}: {}", report.explain());
        assert_eq!(left, tiles, "{output}: the other repeats are folded\n{}", report.explain());
    }
}

const REPEATED: &str = "
    tensor<fp16, [1, 2, 1, 32, 16]> ke = expand_dims(x = keys, axes = [2]);
    tensor<fp16, [1, 2, 4, 32, 16]> kt = tile(x = ke, reps = [1, 1, 4, 1, 1]);
    tensor<fp16, [1, 8, 32, 16]> k = reshape(x = kt, shape = [1, 8, 32, 16]);
    tensor<fp16, [1, 8, 1, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";

const INPUTS: &str = "tensor<fp16, [1, 8, 1, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys";

#[test]
fn an_op_without_a_row_keeps_its_bytes_and_cannot_be_verified() {
    let place = Place::new();
    let body = format!(
        "{REPEATED}
         tensor<fp16, [1, 8, 1, 32]> strange = custom_thing(x = scores, mood = \"odd\");"
    );
    let path = place.package("a.mlpackage", &text::print_program(&program(INPUTS, &body, "strange")));
    let before = listing(place.root());
    let complaint = place.complains(1, &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--verify", "1"]);
    assert!(
        complaint.starts_with("error: a.mlpackage: could not compare: ") && complaint.contains("custom_thing"),
        "{complaint}"
    );
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
    assert!(listing(place.root()) == before, "nothing is written");

    place.says(0, &["optimize", "a.mlpackage", "-o", "b.mlpackage"]);
    let after = Package::open(place.path("b.mlpackage")).unwrap();
    assert_eq!(count(after.program(), "tile"), 0);
    let bytes = |p: &Path| wire::op_bytes(&model_bytes(p), "strange");
    assert_eq!(bytes(&path), bytes(&place.path("b.mlpackage")));
}

#[test]
fn a_constant_of_a_folded_and_an_unfolded_op_serves_both() {
    let bias: Vec<String> = (0..8 * 32).map(|i| format!("{:?}", f64::from(i) / 64.0)).collect();
    let body = format!(
        "tensor<fp16, [1, 8, 1, 32]> bias = const(val = tensor<fp16, [1, 8, 1, 32]>([{}]));
         tensor<int32, [5]> reps = const(val = tensor<int32, [5]>([1, 1, 4, 1, 1]));
         {}
         tensor<fp16, [1, 8, 1, 32]> biased = add(x = scores, y = bias);
         tensor<fp16, [1, 8, 1, 32]> p = softmax(x = biased, axis = -1);
         tensor<fp16, [1, 2, 1, 32, 16]> ve = expand_dims(x = values, axes = [2]);
         tensor<fp16, [1, 2, 4, 32, 16]> vt = tile(x = ve, reps = reps);
         tensor<fp16, [1, 8, 32, 16]> v = reshape(x = vt, shape = [1, 8, 32, 16]);
         tensor<fp16, [1, 8, 1, 16]> out = matmul(x = p, y = v, transpose_x = false, transpose_y = false);
         tensor<fp16, [1, 8, 1, 32]> beside = mul(x = other, y = bias);
         tensor<fp16, [1, 2, 4, 32, 16]> copies = tile(x = ke, reps = reps);",
        bias.join(", "),
        REPEATED.replace("reps = [1, 1, 4, 1, 1]", "reps = reps"),
    );
    let signature = format!("{INPUTS}, tensor<fp16, [1, 2, 32, 16]> values, tensor<fp16, [1, 8, 1, 32]> other");
    let written = program(&signature, &body, "out, beside, copies");
    // Once with the constant in the model file, once with it in the weight file.
    let (_dir, package) = reopened(written.clone());
    for before in [&written, package.program()] {
        let (after, report) = optimize(before, DEFAULT);
        assert_eq!(count(&after, "tile"), 1, "{}", report.explain());
        let (_dir, again) = reopened(after);
        let verdict = equiv::check(before, again.program(), None, &Default::default()).unwrap();
        assert!(verdict.satisfies(equiv::Exactness::Bitwise), "{verdict}");
    }
}

#[test]
fn outputs_are_named_as_before_in_the_file() {
    // `scores` is named by a reshape that goes, `k` is the repeated value itself.
    let body = REPEATED.replace("scores = matmul", "raw = matmul").to_owned()
        + "
         tensor<fp16, [8, 32]> flat = reshape(x = raw, shape = [8, 32]);
         tensor<fp16, [1, 8, 1, 32]> scores = reshape(x = flat, shape = [1, 8, 1, 32]);";
    for (outputs, tiles) in [("scores", 0), ("scores, k", 1)] {
        let place = Place::new();
        place.package("a.mlpackage", &text::print_program(&program(INPUTS, &body, outputs)));
        place.says(0, &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--verify", "2"]);
        let after = Package::open(place.path("b.mlpackage")).unwrap();
        let f = main(after.program());
        let names: Vec<_> = f.outputs().iter().map(|&v| f.value(v).name().as_str()).collect();
        assert_eq!(names.join(", "), outputs);
        let described: Vec<_> = f.interface().outputs.iter().map(|o| o.name.as_str()).collect();
        assert_eq!(described.join(", "), outputs);
        assert_eq!(count(after.program(), "tile"), tiles);
    }
}

/// What a command that needs weights says; it must write nothing.
#[track_caller]
fn needs_weights(place: &Place, code: i32, args: &[&str], want: &str) {
    let before = listing(place.root());
    let said = place.complains(code, args);
    let complaint: String = said.lines().filter(|l| !l.starts_with("note: ")).collect::<Vec<_>>().join("\n");
    assert!(complaint.starts_with("error: ") && complaint.contains(want), "{args:?}: {complaint}");
    assert!(complaint.contains("@model_path/weights/weight.bin"), "{args:?}: {complaint}");
    assert_eq!(complaint.lines().count(), 1, "{args:?}: {complaint}");
    assert!(listing(place.root()) == before, "{args:?}: nothing is written");
}

/// Everything that needs no weights works on `a.mlpackage`; what needs them fails, saying `want`.
#[track_caller]
fn only_weights_are_missed(place: &Place, want: &str) {
    place.says(0, &["inspect", "a.mlpackage"]);
    assert!(place.says(0, &["print", "a.mlpackage"]).contains("tile"));
    place.says(0, &["optimize", "a.mlpackage", "-o", "b.mlpackage"]);
    assert_eq!(count(Package::open(place.path("b.mlpackage")).unwrap().program(), "tile"), 0);

    fs::copy(fixture(BASE).with_extension("npz"), place.path("in.npz")).unwrap();
    needs_weights(place, 1, &["optimize", "a.mlpackage", "-o", "c.mlpackage", "--verify", "1"], want);
    needs_weights(place, 1, &["optimize", "a.mlpackage", "--in-place", "--verify", "1"], want);
    needs_weights(place, 1, &["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz", "--steps"], want);
    needs_weights(place, 3, &["verify", "a.mlpackage", "b.mlpackage"], want);
}

#[test]
fn a_missing_weight_file_stops_only_what_reads_it() {
    let place = Place::new();
    let path = place.copy("a.mlpackage", BASE);
    fs::remove_file(path.join(WEIGHTS)).unwrap();
    only_weights_are_missed(&place, "cannot open");
}

#[test]
fn a_blob_past_the_end_of_its_file_stops_only_what_reads_it() {
    for offset in [1 << 20, u64::MAX - 63] {
        let place = Place::new();
        let path = place.copy("a.mlpackage", BASE);
        let model = wire::edit_op(&model_bytes(&path), "ql_0_weight_to_fp16", |op| wire::with_blob_offset(op, offset));
        put_model(&path, &model);
        only_weights_are_missed(&place, "past the end of the file");
    }
}

/// One to three bytes of a model changed, in a way that `seed` tells.
fn garbled(model: &[u8], seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let mut out = model.to_vec();
    for _ in 0..=next() % 3 {
        let at = next() % out.len();
        out[at] = match next() % 3 {
            0 => next() as u8,
            1 => out[at].wrapping_add(1),
            _ => out[at] ^ 1 << (next() % 8),
        };
    }
    out
}

/// Opens, prints, optimizes, encodes and compares a package; says what broke a promise, and whether the package opened.
fn survives(path: &Path) -> Result<bool, String> {
    let Ok(mut package) = Package::open(path) else { return Ok(false) };
    let before = package.program().clone();
    text::print_program(&before);
    let typed = verify::typed(&before).is_ok();
    // The description of an edited function must fit, which nobody asked of the file.
    let Ok(report) = Pipeline::default().run(package.program_mut(), &Default::default()) else { return Ok(true) };
    package.model_bytes().map_err(|e| e.to_string())?;
    if typed {
        verify::typed(package.program()).map_err(|e| format!("{e}\n{report}"))?;
        let options = equiv::Options { steps: 1, ..Default::default() };
        match equiv::check(&before, package.program(), None, &options) {
            Ok(verdict) if !verdict.satisfies(equiv::Exactness::Bitwise) => return Err(verdict.to_string()),
            _ => {}
        }
    }
    Ok(true)
}

#[test]
fn garbled_models_are_refused_or_optimized() {
    for name in ["rep_expand", "sinks_q4", "control_flow", "constexpr_types", "stateless_flexible", "rep_interleave"] {
        let place = Place::new();
        let path = place.copy("a.mlpackage", name);
        let model = model_bytes(&path);
        let mut opened = 0;
        for seed in 0..60 {
            put_model(&path, &garbled(&model, seed));
            let survived = survives(&path).unwrap_or_else(|e| panic!("{name}: seed {seed}: {e}"));
            opened += usize::from(survived);
        }
        assert!(opened > 0, "{name}");
    }
}
