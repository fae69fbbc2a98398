//! Open, passes, save and one interpreted step on a synthetic EXAONE 4.0 1.2B decode graph.

#[path = "support/exaone.rs"]
mod exaone;

use std::hint::black_box;
use std::path::Path;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use exaone::Config;
use milopt::interp::{Interpreter, Mode, Tensor, Values};
use milopt::ir::{Function, Program};
use milopt::package::{Package, SaveOptions};
use milopt::passes::{Pipeline, RunOptions};
use milopt::verify;

/// Saves the decode graph as a package below `dir`.
fn save(program: &Program, path: &Path) {
    let verified = verify::structure(program).expect("the graph is well formed");
    Package::create(path, &verified, &SaveOptions { force: true, ..SaveOptions::default() })
        .expect("the disk has room");
}

fn open(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("exaone.mlpackage");
    save(&exaone::program(&Config::exaone_1_2b()).expect("the sizes fit"), &path);
    c.bench_function("open", |b| b.iter(|| Package::open(black_box(&path)).expect("the package opens")));
}

fn passes(c: &mut Criterion) {
    let program = exaone::program(&Config::exaone_1_2b()).expect("the sizes fit");
    let pipeline = Pipeline::default();
    c.bench_function("passes", |b| {
        b.iter_batched(
            || program.clone(),
            |mut program| pipeline.run(&mut program, &RunOptions::default()).expect("the passes run"),
            BatchSize::LargeInput,
        );
    });
}

fn saving(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("exaone.mlpackage");
    let program = exaone::program(&Config::exaone_1_2b()).expect("the sizes fit");
    c.bench_function("save", |b| b.iter(|| save(black_box(&program), &path)));
}

/// Zeros for every input: what a step costs does not depend on the values.
fn zeros(f: &Function) -> Values {
    let tensors = f.inputs().iter().filter_map(|&v| Some((f.value(v).name().clone(), f.tensor(v)?)));
    tensors.map(|(name, ty)| (name, Tensor::zeros(ty).expect("sizes are known"))).collect()
}

fn interpreter(c: &mut Criterion) {
    let program = exaone::program(&Config::small()).expect("the sizes fit");
    let main = program.main().expect("there is a main function");
    let inputs = zeros(main);
    for (name, mode) in [("interpreter/storage", Mode::Storage), ("interpreter/exact", Mode::Exact)] {
        let interpreter = Interpreter::new(main, mode).expect("every op is known");
        let mut states = Values::new();
        c.bench_function(name, |b| b.iter(|| interpreter.run(&inputs, &mut states).expect("the step runs")));
    }
}

criterion_group!(benches, open, passes, saving, interpreter);
criterion_main!(benches);
