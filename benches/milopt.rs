//! Open, passes, save and one interpreted step on a synthetic EXAONE 4.0 1.2B decode graph.

#[path = "support/exaone.rs"]
mod exaone;

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use exaone::Config;
use milopt::interp::{Interpreter, Mode, Tensor, Values};
use milopt::ir::{Function, Program};
use milopt::package::{Overwrite, Package, SaveOptions};
use milopt::passes::{Pipeline, Preset, RunOptions};
use milopt::verify::{self, Verified};

fn decoder(config: &Config) -> Program {
    exaone::program(config).expect("the sizes fit each other")
}

fn checked(package: &Package) -> Verified<'_> {
    verify::structure(package.program()).expect("the program is well-formed")
}

fn open(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("exaone.mlpackage");
    let package = Package::new(decoder(&Config::exaone_1_2b()));
    package.save(&path, checked(&package), &SaveOptions::default()).expect("the disk has room");
    c.bench_function("open", |b| b.iter(|| Package::open(black_box(&path)).expect("the package opens")));
}

fn passes(c: &mut Criterion) {
    let program = decoder(&Config::exaone_1_2b());
    for (name, preset) in [("passes", Preset::O1), ("passes O2", Preset::O2), ("passes readonly", Preset::ReadOnly)] {
        let pipeline = Pipeline::preset(preset);
        c.bench_function(name, |b| {
            b.iter_batched(
                || program.clone(),
                |mut program| pipeline.run(&mut program, &RunOptions::default()).expect("the passes run"),
                BatchSize::LargeInput,
            );
        });
    }
}

fn save(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("exaone.mlpackage");
    let package = Package::new(decoder(&Config::exaone_1_2b()));
    let options = SaveOptions::overwrite(Overwrite::Force);
    let save = || package.save(black_box(&path), checked(&package), &options).expect("the disk has room");
    c.bench_function("save", |b| b.iter(save));
}

/// Zeros for every input: what a step costs does not depend on the values.
fn zeros(f: &Function) -> Values {
    let tensors = f.inputs().iter().filter_map(|&v| Some((f.value(v).name().clone(), f.tensor(v)?)));
    tensors.map(|(name, ty)| (name, Tensor::zeros(ty).expect("sizes are known"))).collect()
}

fn interpreter(c: &mut Criterion) {
    let program = decoder(&Config::small());
    let main = program.main().expect("there is a main function");
    let inputs = zeros(main);
    for (name, mode) in [("interpreter/storage", Mode::Storage), ("interpreter/exact", Mode::Exact)] {
        let interpreter = Interpreter::new(main, mode).expect("every op is known");
        let mut states = Values::new();
        c.bench_function(name, |b| b.iter(|| interpreter.run(&inputs, &mut states).expect("the step runs")));
    }
}

criterion_group!(benches, open, passes, save, interpreter);
criterion_main!(benches);
