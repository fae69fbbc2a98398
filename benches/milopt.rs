//! Open, passes, save and one interpreted step on a synthetic EXAONE 4.0 1.2B decode graph.

#[path = "support/exaone.rs"]
mod exaone;

use std::hint::black_box;
use std::mem;

use criterion::{BatchSize, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use exaone::Config;
use milopt::interp::{Interpreter, Mode, Tensor, Values};
use milopt::ir::{DType, Function, Program};
use milopt::opset::Builder;
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

/// One decode step of the attention of all layers, as coremltools writes it and after `gqa-fold`: what one takes longer than
/// the other is what the copies of the heads cost.
fn decode_attention(c: &mut Criterion) {
    let before = exaone::attention(&Config::exaone_1_2b()).expect("the sizes fit each other");
    let mut after = before.clone();
    let fold = Pipeline::parse("gqa-fold,dce").expect("the passes exist");
    fold.run(&mut after, &RunOptions::default()).expect("the passes run");
    let mut group = c.benchmark_group("decode attention");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for (name, program) in [("before gqa-fold", &before), ("after gqa-fold", &after)] {
        let main = program.main().expect("there is a main function");
        let interpreter = Interpreter::new(main, Mode::Storage).expect("every op is known");
        let inputs = zeros(main);
        let mut states = Values::new();
        group.bench_function(name, |b| {
            b.iter(|| (_, states) = interpreter.advance(&inputs, mem::take(&mut states)).expect("the step runs"));
        });
    }
    group.finish();
}

/// Products of the shapes of prefill and decode, with the weight or cache in fp16; the throughput is in multiplications.
fn products(c: &mut Criterion) {
    let mut group = c.benchmark_group("matmul");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    let shapes: [(&str, &[u64], &[u64], bool); 5] = [
        ("linear prefill", &[256, 2048], &[2048, 2048], true),
        ("linear decode", &[1, 2048], &[2048, 2048], true),
        ("linear decode untransposed", &[1, 2048], &[2048, 2048], false),
        ("query by key", &[32, 1, 64], &[32, 4096, 64], true),
        ("weights by value", &[32, 1, 4096], &[32, 4096, 64], false),
    ];
    for (name, x, y, transposed) in shapes {
        let mut b = Builder::new("main", "CoreML8");
        let built = b.input("x", DType::F16, x).and_then(|x_value| {
            let y_value = b.input("y", DType::F16, y)?;
            let out = b.matmul(x_value, y_value, false, transposed)?;
            b.finish(&[("out", out)])
        });
        let f = built.expect("the shapes multiply");
        let interpreter = Interpreter::new(&f, Mode::Storage).expect("matmul is known");
        let inputs = zeros(&f);
        group.throughput(Throughput::Elements(x[x.len() - 2] * y.iter().product::<u64>()));
        group.bench_function(name, |b| b.iter(|| interpreter.run(&inputs, &mut Values::new()).expect("it runs")));
    }
    group.finish();
}

criterion_group!(benches, open, passes, save, interpreter, products, decode_attention);
criterion_main!(benches);
