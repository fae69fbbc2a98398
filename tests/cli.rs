//! The `milopt` command: what it prints, writes and exits with.

#![cfg(feature = "cli")]

mod support;

use std::fs;

use milopt::passes::Preset;
use support::files::fixture;
use support::npz::{read_npz, write_npz};
use support::place::{Place, model_bytes};

/// Attention scores over keys that are repeated for the query heads.
const REPEATED: &str = "program(1.3) [specificationVersion = 9] {
  func main<CoreML8>(tensor<fp16, [1, 4, 1, 8]> query, tensor<fp16, [1, 2, 6, 8]> keys) {
    tensor<fp16, [1, 2, 1, 6, 8]> e = expand_dims(x = keys, axes = [2]);
    tensor<fp16, [1, 2, 2, 6, 8]> t = tile(x = e, reps = [1, 1, 2, 1, 1]);
    tensor<fp16, [1, 4, 6, 8]> r = reshape(x = t, shape = [1, 4, 6, 8]);
    tensor<fp16, [1, 4, 1, 6]> scores = matmul(x = query, y = r, transpose_x = false, transpose_y = true);
  } -> (scores);
}";

/// Adds its input to a state and returns the state times a scale.
const COUNTER: &str = "program(1.3) [specificationVersion = 9] {
  func main<CoreML8>(tensor<fp16, [2]> x, tensor<int32, [1]> n, state<tensor<fp16, [2]>> acc) {
    tensor<fp16, [2]> old = read_state(input = acc);
    tensor<fp16, [2]> sum = add(x = old, y = x);
    write_state(input = acc, data = sum);
    tensor<fp16, [2]> y = mul(x = sum, y = fp16(2.0));
    tensor<int32, [1]> m = add(x = n, y = 1);
  } -> (y, m);
}";

fn halfs(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect()
}

fn doubles(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn ints(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn wrong_usage_exits_with_2() {
    let place = Place::new();
    place.package("a.mlpackage", REPEATED);
    for args in [
        &[][..],
        &["polish"],
        &["optimize", "a.mlpackage"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--in-place"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--passes", "dce,polish"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--passes", "gqa-fold:lowering=columns"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--passes", "dce:lowering=rows"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--function", "decode"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "-O3"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "-O", "fast"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "-O2", "--passes", "dce"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "-O1", "--readonly-kv"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--readonly-kv", "--passes", "dce"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--readonly-kv=b.mlpackage"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--readonly-kv=a.mlpackage/kv.json"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--readonly-kv=r.json", "--report", "./r.json"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--readonly-kv", "--report", "b.kv.json"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--verify", "0"],
        &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--report", "a.mlpackage/Manifest.json"],
        &["verify", "a.mlpackage"],
        &["verify", "a.mlpackage", "a.mlpackage", "--range", "keys"],
        &["verify", "a.mlpackage", "a.mlpackage", "--range", "pos=0..4"],
        &["run", "a.mlpackage", "--inputs", "in.npz"],
        &["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz", "--mode", "fast"],
        &["print", "a.mlpackage", "--function", "decode"],
        &["passes", "polish"],
    ] {
        let complaint = place.complains(2, args);
        assert!(complaint.contains("Usage") || complaint.starts_with("error: "), "{args:?}: {complaint}");
    }
    assert!(!place.path("b.mlpackage").exists());
}

#[test]
fn failures_exit_with_1_and_say_why() {
    let place = Place::new();
    fs::create_dir(place.path("empty.mlpackage")).unwrap();
    for command in [
        &["inspect", "empty.mlpackage"][..],
        &["print", "empty.mlpackage"],
        &["optimize", "empty.mlpackage", "-o", "out.mlpackage"],
    ] {
        let complaint = place.complains(1, command);
        assert_eq!(complaint, "error: empty.mlpackage is not a package: it has no Manifest.json\n");
    }
    assert!(place.complains(1, &["inspect", "absent"]).starts_with("error: cannot open absent: "));
    assert!(place.complains(3, &["verify", "absent", "absent"]).starts_with("error: cannot open absent: "));
    assert!(!place.path("out.mlpackage").exists());
}

#[test]
fn inspect_shows_caches_that_are_no_states() {
    let place = Place::new();
    let cache = "tensor<fp16, [2, 8, 4]>";
    let text = format!(
        "program(1.3) [specificationVersion = 9] {{ func main<CoreML8>({cache} old, tensor<int32, [1]> p,
           tensor<fp16, [2, 1, 4]> row) {{
           {cache} all = scatter(data = old, indices = p, updates = row, axis = 1, mode = \"update\");
         }} -> (all); }}"
    );
    place.package("a.mlpackage", &text);
    let shown = place.says(0, &["inspect", "a.mlpackage"]);
    assert!(shown.contains("caches passed through: old → all (scatter)"), "{shown}");
    let json: serde_json::Value = serde_json::from_str(&place.says(0, &["inspect", "a.mlpackage", "--json"])).unwrap();
    assert_eq!(json["functions"][0]["passed_through"][0]["by"], "scatter");
}

#[test]
fn inspect_counts_repeats() {
    let place = Place::new();
    place.package("a.mlpackage", REPEATED);
    let text = place.says(0, &["inspect", "a.mlpackage"]);
    assert!(text.contains("input   query: tensor<fp16, [1, 4, 1, 8]>"), "{text}");
    // The copy holds 4 * 6 * 8 halfs; it is written once and read once.
    assert!(text.contains("repeated copies: 1, 384 B written and 384 B read"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&place.says(0, &["inspect", "a.mlpackage", "--json"])).unwrap();
    assert_eq!(json["functions"][0]["traffic"]["repeats"]["count"], 1);
    assert_eq!(json["functions"][0]["kinds"]["tile"], 1);
    assert_eq!(json["functions"][0]["inputs"][1]["type"], "tensor<fp16, [1, 2, 6, 8]>");
}

#[test]
fn optimize_folds_verifies_reports_and_refuses_to_overwrite() {
    let place = Place::new();
    let a = place.package("a.mlpackage", REPEATED);
    let base = ["optimize", "a.mlpackage", "-o", "b.mlpackage", "--verify", "3"];
    let text = place.says(0, &[&base[..], &["--report", "report.json"]].concat());
    assert!(text.contains("main: bitwise equal over 3 steps") && text.ends_with("wrote b.mlpackage\n"), "{text}");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(place.path("report.json")).unwrap()).unwrap();
    assert_eq!(json["functions"][0]["before"]["kinds"]["tile"], 1);
    assert_eq!(json["functions"][0]["after"]["kinds"]["tile"], serde_json::Value::Null);
    assert_eq!((&json["verification"]["verdict"], &json["written"]), (&"bitwise".into(), &"b.mlpackage".into()));
    assert!(!place.says(0, &["print", "b.mlpackage"]).contains("tile"));

    let before = model_bytes(&place.path("b.mlpackage"));
    assert_eq!(place.complains(1, &base), "error: b.mlpackage exists already; --force replaces it\n");
    assert_eq!(model_bytes(&place.path("b.mlpackage")), before);
    place.says(0, &[&base[..], &["--force"]].concat());
    assert_eq!(model_bytes(&place.path("b.mlpackage")), before, "the same input gives the same bytes");

    let original = model_bytes(&a);
    place.says(0, &["optimize", "a.mlpackage", "--in-place", "--dry-run"]);
    assert_eq!(model_bytes(&a), original);
    place.says(0, &["optimize", "a.mlpackage", "--in-place"]);
    assert_eq!(model_bytes(&a), before);
}

/// Overwrites the second of three slots with its input and returns the first.
const CACHE: &str = "program(1.3) [specificationVersion = 9] {
  func main<CoreML8>(tensor<fp16, [1, 2]> x, state<tensor<fp16, [3, 2]>> cache) {
    tensor<fp16, [3, 2]> old = read_state(input = cache);
    tensor<fp16, [1, 2]> y = slice_by_size(x = old, begin = [0, 0], size = [1, 2]);
    tensor<fp16, [1, 2]> row = relu(x = x);
    tensor<fp16, [3, 2]> rest = read_state(input = cache);
    tensor<fp16, [3, 2]> full = slice_update(x = rest, update = row, begin = [1, 0], end = [2, 2]);
    write_state(input = cache, data = full);
  } -> (y);
}";

#[test]
fn readonly_caches_come_with_a_side_file() {
    let place = Place::new();
    place.package("a.mlpackage", CACHE);
    let side =
        |name: &str| -> serde_json::Value { serde_json::from_slice(&fs::read(place.path(name)).unwrap()).unwrap() };
    let base = ["optimize", "a.mlpackage", "-o", "b.mlpackage", "--readonly-kv"];
    assert!(place.says(0, &["optimize", "a.mlpackage", "--dry-run", "--readonly-kv"]).contains("kv-readonly: 1 done"));
    assert!(place.says(0, &["optimize", "a.mlpackage", "--dry-run", "--readonly-kv=c.json"]).contains("nothing was"));
    assert!(!place.path("a.kv.json").exists() && !place.path("b.kv.json").exists() && !place.path("c.json").exists());

    let text = place.says(0, &[&base[..], &["--verify", "8"]].concat());
    assert!(text.contains("main: bitwise equal over 8 steps"), "{text}");
    assert!(text.ends_with("wrote b.mlpackage\nwrote b.kv.json\n"), "{text}");
    let cache = &side("b.kv.json")["functions"]["main"][0];
    assert_eq!((&cache["input"], &cache["write"]["output"]), (&"cache".into(), &"cache_new".into()));
    assert!(!place.says(0, &["print", "b.mlpackage"]).contains("state"));

    place.package("plain.mlpackage", COUNTER);
    let text = place.says(0, &["optimize", "plain.mlpackage", "-o", "p.mlpackage", "--readonly-kv"]);
    assert!(text.ends_with("no side file is written: no state became an input\n"), "{text}");
    assert!(!place.path("p.kv.json").exists());
    // Nor is a good one replaced when there is nothing left to convert.
    let again = ["optimize", "b.mlpackage", "--in-place", "--readonly-kv", "--force"];
    let before = fs::read(place.path("b.kv.json")).unwrap();
    assert!(place.says(0, &again).contains("no side file is written"));
    assert_eq!(fs::read(place.path("b.kv.json")).unwrap(), before);

    // Neither file is replaced without --force, and neither is written without the other.
    fs::write(place.path("b.kv.json"), "mine").unwrap();
    fs::rename(place.path("b.mlpackage"), place.path("c.mlpackage")).unwrap();
    assert_eq!(place.complains(1, &base), "error: b.kv.json exists already; --force replaces it\n");
    assert!(!place.path("b.mlpackage").exists());
    let other = ["optimize", "a.mlpackage", "-o", "c.mlpackage", "--readonly-kv=d.json"];
    assert_eq!(place.complains(1, &other), "error: c.mlpackage exists already; --force replaces it\n");
    assert!(!place.path("d.json").exists());
    place.says(0, &[&base[..], &["--force"]].concat());
    assert_eq!(side("b.kv.json")["version"], 1);
    place.says(0, &["optimize", "a.mlpackage", "--in-place", "--readonly-kv"]);
    assert_eq!(side("a.kv.json"), side("b.kv.json"));
    let left: Vec<_> = fs::read_dir(place.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{left:?}");
}

#[test]
fn levels_are_presets() {
    let place = Place::new();
    place.package("a.mlpackage", CACHE);
    let passes = |level: &str| {
        place.says(0, &["optimize", "a.mlpackage", "--dry-run", level, "--report", "r.json"]);
        let json: serde_json::Value = serde_json::from_slice(&fs::read(place.path("r.json")).unwrap()).unwrap();
        serde_json::from_value::<Vec<String>>(json["passes"].clone()).unwrap()
    };
    for (level, preset) in [("-O1", Preset::O1), ("-O2", Preset::O2), ("--readonly-kv", Preset::ReadOnly)] {
        assert_eq!(passes(level), preset.passes().into_iter().map(|p| p.name).collect::<Vec<_>>(), "{level}");
    }
}

#[test]
fn an_empty_pipeline_writes_the_package_unchanged() {
    let place = Place::new();
    let a = place.package("a.mlpackage", COUNTER);
    place.says(0, &["optimize", "a.mlpackage", "-o", "b.mlpackage", "--passes", ""]);
    assert_eq!(model_bytes(&a), model_bytes(&place.path("b.mlpackage")));
}

#[test]
fn explain_says_what_was_left_alone() {
    let place = Place::new();
    // A mask that differs from row to row keeps the scores in head layout.
    let masked = REPEATED
        .replace(
            "tensor<fp16, [1, 2, 6, 8]> keys)",
            "tensor<fp16, [1, 2, 6, 8]> keys, tensor<fp16, [1, 1, 3, 6]> mask)",
        )
        .replace("[1, 4, 1, ", "[1, 4, 3, ")
        .replace(
            "  } -> (scores)",
            "    tensor<fp16, [1, 4, 3, 6]> masked = add(x = scores, y = mask);
    tensor<fp16, [1, 4, 3, 6]> weights = softmax(x = masked, axis = -1);
    tensor<fp16, [1, 4, 3, 8]> out = matmul(x = weights, y = r, transpose_x = false, transpose_y = false);
  } -> (out)",
        );
    place.package("a.mlpackage", &masked);
    let quiet = place.says(0, &["optimize", "a.mlpackage", "--dry-run"]);
    let text = place.says(0, &["optimize", "a.mlpackage", "--dry-run", "--explain"]);
    assert!(text.ends_with("nothing was written\n"), "{text}");
    let reasons: Vec<&str> = text.lines().filter(|l| !quiet.contains(l)).collect();
    assert!(reasons.iter().any(|r| r.starts_with("main: gqa-fold: ") && r.contains("`mask`")), "{text}");
}

#[test]
fn verify_tells_equal_different_and_incomparable_apart() {
    let place = Place::new();
    place.package("a.mlpackage", COUNTER);
    place.package("b.mlpackage", &COUNTER.replace("fp16(2.0)", "fp16(2.002)"));
    place.package("c.mlpackage", &COUNTER.replace("-> (y, m)", "-> (y)"));
    let text = place.says(0, &["verify", "a.mlpackage", "a.mlpackage", "--steps", "2", "--bitwise"]);
    assert!(text.starts_with("main: bitwise equal over 2 steps"), "{text}");
    place.says(1, &["verify", "a.mlpackage", "b.mlpackage"]);
    let json = place.says(1, &["verify", "a.mlpackage", "b.mlpackage", "--json", "--range", "n=-2..7"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["verdict"], "different");
    let complaint = place.complains(3, &["verify", "a.mlpackage", "c.mlpackage"]);
    assert!(complaint.contains("only the first program has the output `m`"), "{complaint}");
}

/// A reader that stops reading gets the verdict all the same.
#[test]
fn a_closed_pipe_keeps_the_exit_code() {
    let place = Place::new();
    place.package("a.mlpackage", COUNTER);
    place.package("b.mlpackage", &COUNTER.replace("fp16(2.0)", "fp16(2.002)"));
    for (code, args) in [
        (1, &["verify", "a.mlpackage", "b.mlpackage"][..]),
        (0, &["verify", "a.mlpackage", "a.mlpackage"]),
        (0, &["inspect", "a.mlpackage", "--json"]),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = place.command(args).stdout(writer).output().unwrap();
        assert_eq!((output.status.code(), &*output.stderr), (Some(code), &b""[..]), "{args:?}");
    }
}

#[test]
fn run_carries_states_over_steps() {
    let place = Place::new();
    place.package("a.mlpackage", COUNTER);
    write_npz(
        &place.path("in.npz"),
        &[
            ("in_x", "<f8", "(3, 2)", doubles(&[1.0, 2.0, 3.0, 4.0, 5.0, 0.1])),
            ("n", "<i4", "(3,)", ints(&[7, 8, 9])),
            ("state_acc", "<f4", "(2,)", [0.5f32, 0.0].iter().flat_map(|v| v.to_le_bytes()).collect()),
            ("out_y", "<f4", "(1,)", vec![0; 4]),
            ("in_n", "<i4", "(3,)", ints(&[0, 0, 0])),
            ("state_nope", "<f4", "(1,)", vec![0; 4]),
        ],
    );
    let run = ["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz", "--states", "end.npz", "--steps"];
    let output = place.milopt(&run);
    let notes = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), notes.as_str()),
        (
            Some(0),
            "note: arrays for states that do not exist are ignored: state_nope\n\
             note: arrays that are not inputs are ignored: out_y\n\
             note: arrays that are there without `in_` as well are ignored: in_n\n"
        )
    );
    let out = read_npz(&place.path("out.npz"));
    let header =
        |descr: &str, shape: &str| format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // 6 + 0.1 is 6.1015625 in fp16, whose spacing there is 2^-8.
    assert_eq!(out["y.npy"], (header("<f2", "(3, 2)"), halfs(&[3.0, 4.0, 9.0, 12.0, 19.0, 12.203125])));
    assert_eq!(out["m.npy"], (header("<i4", "(3, 1)"), ints(&[8, 9, 10])), "n is a scalar a step, [1] in the model");
    assert_eq!(read_npz(&place.path("end.npz"))["state_acc.npy"].1, halfs(&[9.5, 6.1015625]));

    place.says(0, &[&run[..], &["--mode", "exact"]].concat());
    let (found, data) = &read_npz(&place.path("out.npz"))["y.npy"];
    assert_eq!(*found, header("<f8", "(3, 2)"));
    let tenth = f64::from(half::f16::from_f32(0.1));
    assert_eq!(data[40..], doubles(&[2.0 * (6.0 + tenth)]), "inputs are cast, nothing else is rounded");
}

#[test]
fn run_names_what_is_wrong_with_the_arrays() {
    let place = Place::new();
    place.package("a.mlpackage", COUNTER);
    let run = ["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz"];
    let x = ("x", "<f2", "(2,)", halfs(&[1.0, 2.0]));
    let n = ("n", "<i8", "()", 1i64.to_le_bytes().to_vec());
    let inputs = |arrays: &[(&str, &str, &str, Vec<u8>)]| write_npz(&place.path("in.npz"), arrays);
    let steps = [&run[..], &["--steps"]].concat();

    inputs(std::slice::from_ref(&x));
    assert_eq!(place.complains(1, &run), "error: in.npz: there is no array for input `n`\n");
    inputs(&[x.clone(), ("n", "<i4", "(2,)", ints(&[1, 2]))]);
    let want =
        "error: in.npz: array `n` of shape [2] does not fit tensor<int32, [1]>; does its first axis count --steps?\n";
    assert_eq!(place.complains(1, &run), want);
    inputs(&[x.clone(), ("n", "<i4", "(1, 1, 1)", ints(&[1]))]);
    assert_eq!(
        place.complains(1, &run),
        "error: in.npz: array `n` of shape [1, 1, 1] does not fit tensor<int32, [1]>\n"
    );
    inputs(&[("x", "<f2", "(1, 2)", halfs(&[1.0, 2.0])), ("n", "<i4", "(2, 1)", ints(&[1, 2]))]);
    assert_eq!(place.complains(1, &steps), "error: in.npz: array `x` has 1 steps, `n` has 2\n");
    inputs(&[("x", "<f2", "(1, 2)", halfs(&[1.0, 2.0])), n.clone()]);
    assert_eq!(place.complains(1, &steps), "error: in.npz: array `n` has no axis of steps\n");
    for (descr, data, value) in [
        ("<i8", (1i64 << 40).to_le_bytes(), "1099511627776"),
        ("<i8", (i64::from(i32::MIN) - 1).to_le_bytes(), "-2147483649"),
        ("<u8", u64::MAX.to_le_bytes(), "18446744073709551615"),
        ("<f8", 3e9f64.to_le_bytes(), "3000000000"),
        ("<f8", f64::NAN.to_le_bytes(), "NaN"),
        ("<f8", 2.5f64.to_le_bytes(), "2.5"),
        ("<f8", (-0.25f64).to_le_bytes(), "-0.25"),
    ] {
        inputs(&[x.clone(), ("n", descr, "()", data.to_vec())]);
        let want = format!("error: in.npz: array `n` holds {value}, which is no int32\n");
        assert_eq!(place.complains(1, &run), want);
    }
    fs::write(place.path("in.npz"), "garbage").unwrap();
    assert!(place.complains(1, &run).starts_with("error: in.npz is not an .npz file"));
    assert!(!place.path("out.npz").exists());

    for n in [n, ("n", "<f8", "()", doubles(&[1.0]))] {
        inputs(&[x.clone(), n]);
        place.says(0, &run);
        assert_eq!(read_npz(&place.path("out.npz"))["y.npy"].1, halfs(&[2.0, 4.0]));
    }
}

#[test]
fn run_takes_every_shape_that_the_description_allows_and_no_other() {
    let place = Place::new();
    let zeros = |name: &'static str, shape: &[usize]| {
        (
            name,
            "<f2",
            format!("{shape:?}").replace('[', "(").replace(']', ",)"),
            vec![0; 2 * shape.iter().product::<usize>()],
        )
    };
    let run = |package: &str, inputs: &[(&'static str, &[usize])], refusal: Option<&str>| {
        let arrays: Vec<_> = inputs.iter().map(|&(name, shape)| zeros(name, shape)).collect();
        let arrays: Vec<_> =
            arrays.iter().map(|(n, ty, shape, data)| (*n, *ty, shape.as_str(), data.clone())).collect();
        write_npz(&place.path("in.npz"), &arrays);
        let package = fixture(package);
        let run = ["run", package.to_str().unwrap(), "--inputs", "in.npz", "--outputs", "out.npz"];
        match refusal {
            None => _ = place.says(0, &run),
            Some(why) => assert_eq!(place.complains(1, &run), format!("error: in.npz: array {why}\n")),
        }
    };
    for rows in [1, 3, 8] {
        run("stateless_flexible", &[("x", &[1, rows, 64]), ("pos", &[1]), ("mask", &[1, 1, rows, rows])], None);
    }
    for (x, mask, why) in [
        (9, 9, "`x` has shape [1, 9, 64], input `x` takes [1, 1 to 8, 64]"),
        (0, 1, "`x` has shape [1, 0, 64], input `x` takes [1, 1 to 8, 64]"),
        (8, 9, "`mask` has shape [1, 1, 9, 9], input `mask` takes [1, 1, 1 to 8, 1 to 8]"),
    ] {
        let inputs = [("x", &[1, x, 64][..]), ("pos", &[1]), ("mask", &[1, 1, mask, mask])];
        run("stateless_flexible", &inputs, Some(why));
    }
    for rows in [1, 5] {
        run("enumerated", &[("x", &[1, rows, 32]), ("mem", &[1, 11, 32]), ("mask", &[1, 1, rows, 11])], None);
    }
    let between = [("x", &[1, 3, 32][..]), ("mem", &[1, 11, 32]), ("mask", &[1, 1, 3, 11])];
    let why = "`x` has shape [1, 3, 32], input `x` takes [1, 5, 32] or [1, 1, 32]";
    run("enumerated", &between, Some(why));
}

#[test]
fn run_names_the_package_that_cannot_be_run() {
    let place = Place::new();
    let foreign = REPEATED.replace("axes = [2])", "axes = [2], beta = fp16(2.0))");
    place.package("a.mlpackage", &foreign);
    let arrays = [("query", "<f2", "(1, 4, 1, 8)", vec![0; 64]), ("keys", "<f2", "(1, 2, 6, 8)", vec![0; 192])];
    write_npz(&place.path("in.npz"), &arrays);
    let complaint = place.complains(1, &["run", "a.mlpackage", "--inputs", "in.npz", "--outputs", "out.npz"]);
    assert!(complaint.starts_with("error: a.mlpackage: main: "), "{complaint}");
    assert!(complaint.ends_with("parameter `beta` is unknown in this opset\n"), "{complaint}");
    let complaint = place.complains(3, &["verify", "a.mlpackage", "a.mlpackage"]);
    assert!(complaint.contains("`e`") && complaint.contains("parameter `beta` is unknown"), "{complaint}");
}

#[test]
fn a_package_can_be_named_from_inside() {
    let place = Place::new();
    let a = place.package("a.mlpackage", REPEATED);
    place.says(0, &["optimize", "a.mlpackage", "-o", "b.mlpackage"]);
    let output = place.command(&["optimize", ".", "--in-place"]).current_dir(&a).output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(model_bytes(&a), model_bytes(&place.path("b.mlpackage")));
}

#[test]
fn print_re_reads() {
    let place = Place::new();
    place.package("a.mlpackage", COUNTER);
    let full = place.says(0, &["print", "a.mlpackage", "--full"]);
    let again = milopt::text::parse(&full).unwrap();
    let options = milopt::text::PrintOptions { full: true, ..Default::default() };
    assert_eq!(options.program(&again), full);
    let function = place.says(0, &["print", "a.mlpackage", "--function", "main"]);
    assert!(function.starts_with("func main<CoreML8>("), "{function}");
}

/// Writes a row into one of two states and returns the other.
const TWO_STATES: &str = "program(1.3) [specificationVersion = 9] {
  func main<CoreML8>(tensor<fp16, [2, 4]> x, state<tensor<fp16, [2, 4]>> k, state<tensor<fp16, [2, 4]>> v) {
    write_state(input = v, data = x);
    tensor<fp16, [2, 4]> y = read_state(input = k);
  } -> (y);
}";

#[test]
fn a_changed_interface_is_compared_by_the_report() {
    let place = Place::new();
    place.package("a.mlpackage", TWO_STATES);
    let run = ["optimize", "a.mlpackage", "-o", "b.mlpackage", "--passes", "kv-unify", "--verify", "8"];
    let said = place.says(0, &[&run[..], &["--report", "r.json"]].concat());
    assert!(said.contains("main: bitwise equal over 8 steps") && said.contains("state   v"), "{said}");
    assert!(said.contains("interface: state `kv` holds `k`, `v`, one behind the other"), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(place.path("r.json")).unwrap()).unwrap();
    let pass = &report["functions"][0]["passes"][0];
    assert_eq!((&pass["exactness"], &pass["changes_interface"]), (&"bitwise".into(), &true.into()));
    assert_eq!(pass["interface"][0], serde_json::json!({ "change": "joined", "states": ["k", "v"], "into": "kv" }));

    let verify = ["verify", "a.mlpackage", "b.mlpackage", "--bitwise"];
    assert!(place.complains(3, &verify).contains("only the second program has the input `kv`"));
    let with_report = [&verify[..], &["--interface", "r.json"]].concat();
    assert!(place.says(0, &with_report).contains("main: bitwise equal"));
    let swapped = fs::read_to_string(place.path("r.json")).unwrap().replace("\"k\"", "\"t\"").replace("\"v\"", "\"k\"");
    fs::write(place.path("r.json"), swapped.replace("\"t\"", "\"v\"")).unwrap();
    place.says(1, &with_report);
    fs::write(place.path("r.json"), "{}").unwrap();
    assert!(place.complains(3, &with_report).contains("r.json: missing field `functions`"));
}

#[test]
fn passes_are_listed() {
    let place = Place::new();
    let list = place.says(0, &["passes"]);
    assert!(
        list.lines().any(|l| l.starts_with("gqa-fold") && l.contains("bitwise") && l.contains("default")),
        "{list}"
    );
    assert!(list.lines().any(|l| l.starts_with("kv-unify") && l.contains("bitwise, other interface")), "{list}");
    let fold = place.says(0, &["passes", "gqa-fold"]);
    assert!(fold.starts_with("gqa-fold (bitwise, default)\n"));
    assert!(fold.contains("gqa-fold:lowering=auto|rows|batch-axes"), "{fold}");
}
