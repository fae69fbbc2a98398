//! Every package in `tests/models`, end to end: as it is and as the default pipeline leaves it. Its README tells what they are.

#![cfg(feature = "cli")]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use milopt::equiv::{self, Exactness};
use milopt::ir::Function;
use milopt::package::{Package, SaveOptions};
use milopt::passes::{Census, FunctionReport, Pipeline, Report, RunOptions};
use milopt::{text, verify};
use support::files::{fixtures, listing};
use support::npz::{floats, read_npz};
use support::place::Place;
use support::save;

fn optimized(path: &Path) -> (Package, Report) {
    let mut package = Package::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let report = Pipeline::default().run(package.program_mut(), &RunOptions::default()).unwrap();
    (package, report)
}

/// Fixtures with an op that the interpreter does not have, and the op.
const NOT_INTERPRETED: [(&str, &str); 1] = [("classify", "classify `classLabel`")];

fn not_interpreted(path: &Path) -> Option<&'static str> {
    NOT_INTERPRETED.into_iter().find(|(name, _)| *name == stem(path)).map(|(_, op)| op)
}

fn stem(path: &Path) -> &str {
    path.file_stem().unwrap().to_str().unwrap()
}

/// What a run of the pipeline changed in the counts of a function, on one line.
fn changes(f: &FunctionReport) -> String {
    let (a, b) = (&f.before, &f.after);
    let kinds: BTreeSet<&String> = a.kinds.keys().chain(b.kinds.keys()).collect();
    let changed = kinds.into_iter().filter(|k| a.count(k) != b.count(k));
    let kinds: String = changed.map(|k| format!(", {k} {} -> {}", a.count(k), b.count(k))).collect();
    let copies = |c: &Census| c.traffic.repeats.count;
    format!("{} ops -> {}, {} copies -> {}{kinds}", a.ops, b.ops, copies(a), copies(b))
}

#[test]
fn the_default_pipeline_leaves_these_ops() {
    let mut table = String::new();
    for path in fixtures() {
        for f in &optimized(&path).1.functions {
            table += &format!("{} {}: {}\n", stem(&path), f.function, changes(f));
        }
    }
    insta::assert_snapshot!(table, @r"
    ane_einsum main: 24 ops -> 22, 4 copies -> 0, expand_dims 2 -> 0, reshape 6 -> 8, tile 2 -> 0
    ane_keys_first main: 20 ops -> 15, 2 copies -> 0, concat 2 -> 0, split 2 -> 0, transpose 2 -> 1
    ane_per_head main: 50 ops -> 50, 0 copies -> 0
    ane_rank3_decode main: 45 ops -> 27, 2 copies -> 0, concat 4 -> 3, expand_dims 4 -> 0, read_state 3 -> 2, slice_update 2 -> 1, squeeze 3 -> 0, tile 2 -> 0, transpose 5 -> 0, write_state 2 -> 1
    ane_rank3_prefill main: 47 ops -> 37, 2 copies -> 0, concat 4 -> 3, expand_dims 4 -> 1, read_state 3 -> 2, slice_update 2 -> 1, squeeze 3 -> 2, tile 2 -> 0, write_state 2 -> 1
    ane_split_copies main: 56 ops -> 52, 0 copies -> 0, reshape 4 -> 0, slice_by_index 0 -> 4, split 3 -> 1, tile 2 -> 0
    batch2_interleave main: 45 ops -> 36, 6 copies -> 0, expand_dims 1 -> 0, tile 2 -> 0, transpose 10 -> 4
    batch3 main: 72 ops -> 51, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 8, tile 4 -> 0, transpose 8 -> 0
    beams main: 26 ops -> 16, 4 copies -> 0, expand_dims 2 -> 0, reshape 6 -> 4, tile 4 -> 0, transpose 4 -> 2
    beams_q6 main: 24 ops -> 22, 2 copies -> 0, expand_dims 2 -> 0, reshape 6 -> 8, tile 2 -> 0
    cache_per_layer main: 69 ops -> 48, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 8, tile 4 -> 0, transpose 8 -> 0
    cache_unified main: 76 ops -> 55, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 8, tile 4 -> 0, transpose 8 -> 0
    classify main: 2 ops -> 2, 0 copies -> 0
    constexpr_types main: 12 ops -> 12, 0 copies -> 0
    control_flow main: 12 ops -> 12, 0 copies -> 0
    enumerated main: 42 ops -> 25, 2 copies -> 0, cast 4 -> 0, concat 2 -> 1, equal 2 -> 0, expand_dims 2 -> 0, gather 2 -> 0, real_div 2 -> 0, reshape 6 -> 7, select 2 -> 0, shape 4 -> 1, slice_by_size 0 -> 2, tile 2 -> 0
    exaone4_decode_prefill decode: 175 ops -> 153, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_decode_prefill prefill: 176 ops -> 170, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 17, tile 4 -> 0
    exaone4_q1 main: 175 ops -> 153, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q1_grouped_palettes main: 194 ops -> 172, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q1_int4_block main: 194 ops -> 172, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q1_int8_channels main: 194 ops -> 172, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q1_mixed_palettes main: 194 ops -> 172, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q1_palettized main: 194 ops -> 172, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q1_sparse main: 194 ops -> 172, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q1_sparse_palettes main: 212 ops -> 190, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    exaone4_q8 main: 176 ops -> 170, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 17, tile 4 -> 0
    flex_context main: 42 ops -> 16, 2 copies -> 0, cast 4 -> 0, concat 2 -> 0, equal 2 -> 0, expand_dims 2 -> 0, gather 2 -> 0, real_div 2 -> 0, reshape 6 -> 4, select 2 -> 0, shape 4 -> 0, tile 2 -> 0, transpose 4 -> 2
    flex_interleave main: 28 ops -> 18, 5 copies -> 0, reshape 8 -> 4, tile 2 -> 0, transpose 8 -> 4
    flex_query_slices main: 24 ops -> 22, 2 copies -> 0, concat 2 -> 0, reshape 4 -> 8, slice_by_index 4 -> 0
    fp32_ios15 main: 49 ops -> 44, 4 copies -> 0, expand_dims 4 -> 0, identity 1 -> 0, reshape 12 -> 16, tile 4 -> 0
    gemma2_q1 main: 194 ops -> 172, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    image main: 6 ops -> 6, 0 copies -> 0
    ios16_mixed main: 26 ops -> 14, 3 copies -> 0, expand_dims 1 -> 0, reshape 7 -> 4, tile 2 -> 0, transpose 6 -> 0
    llama_q1 main: 155 ops -> 133, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 10, tile 4 -> 0, transpose 9 -> 0
    mha main: 60 ops -> 51, 0 copies -> 0, expand_dims 1 -> 0, transpose 8 -> 0
    mistral_flexible_stateful main: 232 ops -> 197, 4 copies -> 0, cast 26 -> 18, concat 17 -> 15, equal 4 -> 0, expand_dims 10 -> 6, gather 13 -> 9, real_div 4 -> 0, reshape 12 -> 17, select 4 -> 0, shape 16 -> 8, slice_by_size 0 -> 2, tile 4 -> 0
    mixed_spellings main: 37 ops -> 36, 2 copies -> 0, concat 3 -> 2, expand_dims 1 -> 0, gather 1 -> 0, reshape 4 -> 8, slice_by_index 5 -> 3
    mqa_q6 main: 39 ops -> 34, 2 copies -> 0, expand_dims 3 -> 0, reshape 6 -> 8, tile 2 -> 0, transpose 4 -> 2
    past_flexible main: 44 ops -> 22, 2 copies -> 0, cast 4 -> 0, concat 4 -> 2, equal 2 -> 0, expand_dims 2 -> 0, gather 2 -> 0, real_div 2 -> 0, select 2 -> 0, shape 4 -> 0, tile 2 -> 0
    qwen3_q8 main: 176 ops -> 170, 4 copies -> 0, expand_dims 9 -> 2, reshape 12 -> 17, tile 4 -> 0
    recipe_decode main: 63 ops -> 35, 2 copies -> 0, cast 6 -> 2, concat 5 -> 3, equal 2 -> 0, expand_dims 3 -> 1, gather 3 -> 1, real_div 2 -> 0, reshape 6 -> 4, select 2 -> 0, shape 5 -> 1, tile 2 -> 0, transpose 4 -> 0
    recipe_flexible main: 68 ops -> 46, 2 copies -> 0, cast 8 -> 4, concat 5 -> 3, equal 2 -> 0, expand_dims 4 -> 2, gather 4 -> 2, real_div 2 -> 0, select 2 -> 0, shape 6 -> 2, tile 2 -> 0
    recipe_gather main: 41 ops -> 35, 2 copies -> 0, gather 3 -> 1, transpose 4 -> 0
    recipe_slices main: 45 ops -> 43, 2 copies -> 0, concat 5 -> 3, reshape 4 -> 8, slice_by_index 8 -> 4
    rep_expand main: 72 ops -> 51, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 8, tile 4 -> 0, transpose 8 -> 0
    rep_expand_q8 main: 72 ops -> 67, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 16, tile 4 -> 0
    rep_interleave main: 84 ops -> 51, 10 copies -> 0, expand_dims 1 -> 0, reshape 16 -> 8, tile 4 -> 0, transpose 20 -> 0
    rep_stack main: 68 ops -> 51, 4 copies -> 0, expand_dims 1 -> 0, reshape 12 -> 8, stack 4 -> 0, transpose 8 -> 0
    sdpa main: 64 ops -> 43, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 8, tile 4 -> 0, transpose 8 -> 0
    sdpa_q8 main: 64 ops -> 56, 4 copies -> 0, expand_dims 5 -> 0, tile 4 -> 1
    shared_layers main: 36 ops -> 24, 2 copies -> 0, expand_dims 2 -> 0, reshape 8 -> 6, tile 2 -> 0, transpose 6 -> 0
    sinks_fp32_ios16 main: 28 ops -> 26, 2 copies -> 0, expand_dims 2 -> 0, reshape 6 -> 8, tile 2 -> 0
    sinks_q1 main: 43 ops -> 32, 2 copies -> 0, expand_dims 3 -> 0, reshape 6 -> 4, tile 2 -> 0, transpose 4 -> 0
    sinks_q4 main: 76 ops -> 71, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 16, tile 4 -> 0
    softcap_q4 main: 78 ops -> 73, 4 copies -> 0, expand_dims 5 -> 0, reshape 12 -> 16, tile 4 -> 0
    stateless_flexible main: 85 ops -> 36, 4 copies -> 0, cast 8 -> 0, concat 4 -> 0, equal 4 -> 0, expand_dims 4 -> 0, gather 4 -> 0, identity 1 -> 0, real_div 4 -> 0, reshape 12 -> 8, select 4 -> 0, shape 8 -> 0, tile 4 -> 0
    stateless_q8 main: 49 ops -> 44, 4 copies -> 0, expand_dims 4 -> 0, identity 1 -> 0, reshape 12 -> 16, tile 4 -> 0
    ");
}

/// Whether every size is known and `matmul` alone reads the keys and values.
fn is_static_and_multiplies(f: &Function) -> bool {
    let sized = |op| f.op(op).results().iter().all(|&v| f.tensor(v).is_none_or(|t| t.known_shape().is_some()));
    f.all_ops().into_iter().all(|op| sized(op) && f.op(op).kind() != "scaled_dot_product_attention")
}

#[test]
fn no_repeated_heads_reach_a_matmul() {
    let mut folded = 0;
    for path in fixtures() {
        let (package, report) = optimized(&path);
        for (f, counts) in package.program().functions().iter().zip(&report.functions) {
            if !is_static_and_multiplies(f) {
                continue;
            }
            let name = format!("{} {}", stem(&path), f.name());
            assert_eq!(counts.after.traffic.repeats.count, 0, "{name}");
            assert_eq!(counts.after.count("tile"), 0, "{name}");
            assert!(counts.after.count("transpose") <= counts.before.count("transpose"), "{name}");
            folded += usize::from(counts.before.traffic.repeats.count > 0);
        }
    }
    assert_eq!(folded, 38);
}

#[test]
fn rewriting_reads_no_float_weights() {
    for path in fixtures() {
        let (package, _) = optimized(&path);
        package.model_bytes().unwrap();
        let dir = tempfile::tempdir().unwrap();
        save(&package, dir.path().join("out.mlpackage"), &SaveOptions::default()).unwrap();
        // Integers that tell shapes and indices may be read: here those of a `gather`, 11 elements of 16 bits.
        let integers = if stem(&path) == "constexpr_types" { 22 } else { 0 };
        assert_eq!(package.bytes_read(), integers, "{}", path.display());
    }
}

#[test]
fn outputs_and_states_keep_every_bit() {
    let options = equiv::Options { steps: 8, ..equiv::Options::default() };
    let dir = tempfile::tempdir().unwrap();
    for path in fixtures() {
        let before = Package::open(&path).unwrap();
        let out = dir.path().join(path.file_name().unwrap());
        save(&optimized(&path).0, &out, &SaveOptions::default()).unwrap();
        let after = Package::open(&out).unwrap();
        verify::typed(after.program()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let verdict = match (equiv::check(before.program(), after.program(), None, &options), not_interpreted(&path)) {
            (Ok(verdict), None) => verdict,
            (Err(_), Some(_)) => {
                assert!(listing(&path) == listing(&out), "{}: nothing to do", path.display());
                continue;
            }
            (other, _) => panic!("{}: {other:?}", path.display()),
        };
        assert!(verdict.satisfies(Exactness::Bitwise), "{}: {verdict}", path.display());
        assert_eq!(verdict.functions.len(), before.program().functions().len());
        assert!(verdict.functions.iter().all(|f| f.steps == 8), "{}: {verdict}", path.display());
    }
}

#[test]
fn optimizing_again_changes_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    for path in fixtures() {
        let [once, twice, repeated] =
            ["once", "twice", "repeated"].map(|n| dir.path().join(stem(&path).to_owned() + n));
        for (from, to) in [(&path, &once), (&once, &twice), (&path, &repeated)] {
            save(&optimized(from).0, to, &SaveOptions::default()).unwrap();
        }
        assert!(listing(&once) == listing(&twice), "{}: a second run", path.display());
        assert!(listing(&once) == listing(&repeated), "{}: the same run again", path.display());
    }
}

#[test]
fn every_function_of_a_package_is_rewritten() {
    let (mut functions, path) = (0, support::files::fixture("exaone4_decode_prefill"));
    for f in &optimized(&path).1.functions {
        assert_eq!((f.before.count("tile"), f.after.count("tile")), (4, 0), "{}", f.function);
        functions += 1;
    }
    assert_eq!(functions, 2);
    let mut package = Package::open(&path).unwrap();
    let prefill = |p: &Package| text::print_function(p.program().function("prefill").unwrap());
    let before = prefill(&package);
    let report = Pipeline::default().run(package.program_mut(), &RunOptions::default().only("decode")).unwrap();
    assert_eq!(report.functions.len(), 1);
    assert_eq!(prefill(&package), before, "a function that was not asked for stays");
}

#[test]
fn the_printed_text_reads_back() {
    let full = text::PrintOptions { full: true, ..Default::default() };
    for path in fixtures() {
        for package in [Package::open(&path).unwrap(), optimized(&path).0] {
            let printed = full.program(package.program());
            let again = text::parse(&printed).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert_eq!(full.program(&again), printed, "{}", path.display());
        }
    }
}

#[test]
fn the_command_line_takes_every_fixture() {
    let place = Place::new();
    for path in fixtures() {
        let from = path.to_str().unwrap();
        let inspected = place.says(0, &["inspect", from]);
        let printed = place.says(0, &["print", from]);
        for f in Package::open(&path).unwrap().program().functions() {
            assert!(inspected.contains(&format!("function {} ", f.name())), "{from}: {inspected}");
            assert!(printed.contains(&format!("func {}<", f.name())), "{from}");
        }
        place.says(0, &["optimize", from, "-o", "same.mlpackage", "--passes", "", "--force"]);
        assert!(listing(&place.path("same.mlpackage")) == listing(&path), "{from}");
        let optimize = ["optimize", from, "-o", "fast.mlpackage", "--verify", "1", "--force"];
        match not_interpreted(&path) {
            Some(op) => assert!(place.complains(1, &optimize).ends_with(&format!("{op}: not interpreted\n"))),
            None => assert!(place.says(0, &optimize).contains("bitwise equal over 1 step\n"), "{from}"),
        }
    }
}

/// The fixtures that PyTorch's answers lie beside.
fn answered() -> Vec<(PathBuf, PathBuf)> {
    let pairs = fixtures().into_iter().map(|p| (p.with_extension("npz"), p));
    pairs.filter(|(answers, _)| answers.exists()).collect()
}

/// How far outputs may be from PyTorch's, relative to max(1, max|b|).
fn tolerance(path: &Path) -> f64 {
    let package = Package::open(path).unwrap();
    let f = package.program().main().unwrap();
    let half = |&v: &_| f.tensor(v).is_some_and(|t| t.dtype == milopt::ir::DType::F16);
    if f.outputs().iter().any(half) { 5e-3 } else { 1e-5 }
}

#[test]
fn pytorch_gives_the_same_answers() {
    let place = Place::new();
    let answered = answered();
    assert_eq!(answered.len(), 49);
    for (answers, path) in answered {
        let (from, inputs) = (path.to_str().unwrap(), answers.to_str().unwrap());
        place.says(0, &["optimize", from, "-o", "fast.mlpackage", "--force"]);
        let tolerance = tolerance(&path);
        for package in [from, "fast.mlpackage"] {
            place.says(0, &["run", package, "--inputs", inputs, "--outputs", "out.npz", "--steps"]);
            agree(&place.path("out.npz"), &answers, tolerance, package);
        }
    }
}

/// Every output is as near to PyTorch's as the tolerance says.
fn agree(outputs: &Path, answers: &Path, tolerance: f64, package: &str) {
    let (found, answers) = (read_npz(outputs), read_npz(answers));
    assert!(!found.is_empty());
    for (name, a) in &found {
        let a = floats(a);
        let b = floats(&answers[&format!("out_{name}")]);
        assert_eq!(a.len(), b.len(), "{package}: {name}");
        assert!(a.iter().all(|a| a.is_finite()), "{package}: {name}");
        let scale = b.iter().fold(1f64, |m, b| m.max(b.abs()));
        let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f64, f64::max);
        assert!(
            worst <= tolerance * scale,
            "{package}: {name} is {worst} off, at most {tolerance} * {scale} is allowed"
        );
    }
}
