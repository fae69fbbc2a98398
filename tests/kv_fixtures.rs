//! Every package in `tests/models` with a state, under the pipelines that change how caches are read and written: 8 steps that
//! start from random old content and go through the first, a middle and the last position and every pattern of masks.

mod support;

use std::path::{Path, PathBuf};

use milopt::equiv::{self, Exactness};
use milopt::package::{Package, SaveOptions};
use milopt::passes::{Pipeline, Preset, RunOptions};
use milopt::verify;
use support::files::{fixtures, listing};
use support::save;

const UNIFIED: &str = "gqa-fold,view-simplify,kv-unify,kv-defer,kv-forward,kv-merge,dce";

/// Fixtures with a state that attention reads.
fn stateful() -> Vec<(PathBuf, Package)> {
    let open = |path: PathBuf| (path.clone(), Package::open(path).unwrap());
    let reads = |p: &Package| {
        let functions = p.program().functions().iter();
        functions.flat_map(|f| f.all_ops().into_iter().map(move |op| f.op(op).kind())).any(|k| *k == "read_state")
    };
    let others = ["control_flow", "classify"];
    let all = fixtures().into_iter().map(open).filter(|(path, _)| !others.contains(&name(path).as_str()));
    all.filter(|(_, package)| reads(package)).collect()
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap().to_str().unwrap().into()
}

/// What is left of `slice_update`, `write_state` and `read_state` in each function.
fn check(pipeline: &Pipeline) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut table = String::new();
    for (path, mut package) in stateful() {
        let before = package.program().clone();
        let report = pipeline.run(package.program_mut(), &RunOptions::default()).unwrap();
        let [once, twice] = ["once", "twice"].map(|n| dir.path().join(name(&path) + n));
        save(&package, &once, &SaveOptions::default()).unwrap();
        let mut again = Package::open(&once).unwrap();
        verify::typed(again.program()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let options = equiv::Options { steps: 8, interface: report.interfaces(), ..equiv::Options::default() };
        let verdict = equiv::check(&before, again.program(), None, &options);
        let verdict = verdict.unwrap_or_else(|e| panic!("{}: {e:?}", path.display()));
        assert!(verdict.satisfies(Exactness::Reassociated), "{}: {verdict}", path.display());
        for f in &report.functions {
            let counts = |census: &milopt::passes::Census| {
                ["slice_update", "write_state", "read_state"].map(|kind| census.count(kind))
            };
            table += &format!("{} {}: {:?} -> {:?}\n", name(&path), f.function, counts(&f.before), counts(&f.after));
        }
        pipeline.run(again.program_mut(), &RunOptions::default()).unwrap();
        save(&again, &twice, &SaveOptions::default()).unwrap();
        assert!(listing(&once) == listing(&twice), "{}: a second run", path.display());
    }
    table
}

#[test]
fn one_write_is_left_for_each_state() {
    insta::assert_snapshot!(check(&Pipeline::preset(Preset::O2)), @r"
    ane_rank3_decode main: [2, 2, 3] -> [1, 1, 2]
    ane_rank3_prefill main: [2, 2, 3] -> [1, 1, 2]
    batch2_interleave main: [2, 2, 4] -> [2, 2, 4]
    batch3 main: [4, 4, 6] -> [2, 2, 4]
    cache_per_layer main: [4, 4, 8] -> [4, 4, 8]
    cache_unified main: [4, 4, 5] -> [1, 1, 2]
    exaone4_decode_prefill decode: [4, 4, 6] -> [2, 2, 4]
    exaone4_decode_prefill prefill: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1 main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1_grouped_palettes main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1_int4_block main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1_int8_channels main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1_mixed_palettes main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1_palettized main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1_sparse main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q1_sparse_palettes main: [4, 4, 6] -> [2, 2, 4]
    exaone4_q8 main: [4, 4, 6] -> [2, 2, 4]
    gemma2_q1 main: [4, 4, 6] -> [2, 2, 4]
    llama_q1 main: [4, 4, 6] -> [2, 2, 4]
    mha main: [4, 4, 6] -> [2, 2, 4]
    mistral_flexible_stateful main: [4, 4, 6] -> [2, 2, 4]
    mixed_spellings main: [2, 2, 4] -> [2, 2, 4]
    mqa_q6 main: [2, 2, 4] -> [2, 2, 4]
    qwen3_q8 main: [4, 4, 6] -> [2, 2, 4]
    recipe_decode main: [2, 2, 4] -> [2, 2, 4]
    recipe_flexible main: [2, 2, 4] -> [2, 2, 4]
    recipe_gather main: [2, 2, 4] -> [2, 2, 4]
    recipe_slices main: [2, 2, 4] -> [2, 2, 4]
    rep_expand main: [4, 4, 6] -> [2, 2, 4]
    rep_expand_q8 main: [4, 4, 6] -> [2, 2, 4]
    rep_interleave main: [4, 4, 6] -> [2, 2, 4]
    rep_stack main: [4, 4, 6] -> [2, 2, 4]
    sdpa main: [4, 4, 6] -> [2, 2, 4]
    sdpa_q8 main: [4, 4, 6] -> [2, 2, 4]
    sinks_q1 main: [2, 2, 4] -> [2, 2, 4]
    sinks_q4 main: [4, 4, 6] -> [2, 2, 4]
    softcap_q4 main: [4, 4, 6] -> [2, 2, 4]
    ");
}

#[test]
fn one_write_is_left_where_caches_are_joined() {
    insta::assert_snapshot!(check(&Pipeline::parse(UNIFIED).unwrap()), @r"
    ane_rank3_decode main: [2, 2, 3] -> [1, 1, 2]
    ane_rank3_prefill main: [2, 2, 3] -> [1, 1, 2]
    batch2_interleave main: [2, 2, 4] -> [1, 1, 2]
    batch3 main: [4, 4, 6] -> [1, 1, 2]
    cache_per_layer main: [4, 4, 8] -> [1, 1, 2]
    cache_unified main: [4, 4, 5] -> [1, 1, 2]
    exaone4_decode_prefill decode: [4, 4, 6] -> [1, 1, 2]
    exaone4_decode_prefill prefill: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1 main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1_grouped_palettes main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1_int4_block main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1_int8_channels main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1_mixed_palettes main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1_palettized main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1_sparse main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q1_sparse_palettes main: [4, 4, 6] -> [1, 1, 2]
    exaone4_q8 main: [4, 4, 6] -> [1, 1, 2]
    gemma2_q1 main: [4, 4, 6] -> [1, 1, 2]
    llama_q1 main: [4, 4, 6] -> [1, 1, 2]
    mha main: [4, 4, 6] -> [1, 1, 2]
    mistral_flexible_stateful main: [4, 4, 6] -> [1, 1, 2]
    mixed_spellings main: [2, 2, 4] -> [1, 1, 2]
    mqa_q6 main: [2, 2, 4] -> [1, 1, 2]
    qwen3_q8 main: [4, 4, 6] -> [1, 1, 2]
    recipe_decode main: [2, 2, 4] -> [1, 1, 2]
    recipe_flexible main: [2, 2, 4] -> [1, 1, 2]
    recipe_gather main: [2, 2, 4] -> [2, 2, 4]
    recipe_slices main: [2, 2, 4] -> [1, 1, 2]
    rep_expand main: [4, 4, 6] -> [1, 1, 2]
    rep_expand_q8 main: [4, 4, 6] -> [1, 1, 2]
    rep_interleave main: [4, 4, 6] -> [1, 1, 2]
    rep_stack main: [4, 4, 6] -> [1, 1, 2]
    sdpa main: [4, 4, 6] -> [1, 1, 2]
    sdpa_q8 main: [4, 4, 6] -> [1, 1, 2]
    sinks_q1 main: [2, 2, 4] -> [1, 1, 2]
    sinks_q4 main: [4, 4, 6] -> [1, 1, 2]
    softcap_q4 main: [4, 4, 6] -> [1, 1, 2]
    ");
}

#[test]
fn no_state_is_left_where_the_caller_writes() {
    insta::assert_snapshot!(check(&Pipeline::preset(Preset::ReadOnly)), @r"
    ane_rank3_decode main: [2, 2, 3] -> [0, 0, 0]
    ane_rank3_prefill main: [2, 2, 3] -> [0, 0, 0]
    batch2_interleave main: [2, 2, 4] -> [0, 0, 0]
    batch3 main: [4, 4, 6] -> [0, 0, 0]
    cache_per_layer main: [4, 4, 8] -> [0, 0, 0]
    cache_unified main: [4, 4, 5] -> [0, 0, 0]
    exaone4_decode_prefill decode: [4, 4, 6] -> [0, 0, 0]
    exaone4_decode_prefill prefill: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1 main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1_grouped_palettes main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1_int4_block main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1_int8_channels main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1_mixed_palettes main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1_palettized main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1_sparse main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q1_sparse_palettes main: [4, 4, 6] -> [0, 0, 0]
    exaone4_q8 main: [4, 4, 6] -> [0, 0, 0]
    gemma2_q1 main: [4, 4, 6] -> [0, 0, 0]
    llama_q1 main: [4, 4, 6] -> [0, 0, 0]
    mha main: [4, 4, 6] -> [0, 0, 0]
    mistral_flexible_stateful main: [4, 4, 6] -> [0, 0, 0]
    mixed_spellings main: [2, 2, 4] -> [0, 0, 0]
    mqa_q6 main: [2, 2, 4] -> [0, 0, 0]
    qwen3_q8 main: [4, 4, 6] -> [0, 0, 0]
    recipe_decode main: [2, 2, 4] -> [0, 0, 0]
    recipe_flexible main: [2, 2, 4] -> [0, 0, 0]
    recipe_gather main: [2, 2, 4] -> [2, 2, 4]
    recipe_slices main: [2, 2, 4] -> [0, 0, 0]
    rep_expand main: [4, 4, 6] -> [0, 0, 0]
    rep_expand_q8 main: [4, 4, 6] -> [0, 0, 0]
    rep_interleave main: [4, 4, 6] -> [0, 0, 0]
    rep_stack main: [4, 4, 6] -> [0, 0, 0]
    sdpa main: [4, 4, 6] -> [0, 0, 0]
    sdpa_q8 main: [4, 4, 6] -> [0, 0, 0]
    sinks_q1 main: [2, 2, 4] -> [0, 0, 0]
    sinks_q4 main: [4, 4, 6] -> [0, 0, 0]
    softcap_q4 main: [4, 4, 6] -> [0, 0, 0]
    ");
}
