//! Saved packages compute, element by element, the expressions of the original, whatever inputs and states hold: by brute
//! force, at chosen sizes and positions.

#[path = "planted_faults/attention.rs"]
mod attention;
#[path = "planted_faults/body.rs"]
mod body;
#[path = "planted_faults/caches.rs"]
mod caches;
#[path = "planted_faults/edit.rs"]
mod edit;
#[path = "planted_faults/heads.rs"]
mod heads;
mod support;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use milopt::analysis::layout::{Axis, Layout, Layouts, Stride};
use milopt::ir::{Dim, Function, OpId, Operand, Program, Symbol, ValueId};
use milopt::package::{Package, SaveOptions};
use milopt::passes::{Pipeline, Preset, Report, RunOptions};
use milopt::rewrite::{Certificate, Factor, HostWrite, InterfaceChange, Source};
use support::files::{fixtures, listing, packages};
use support::symbolic::{Arithmetic, Refusal, Tensor, Tensors, evaluate, values};
use support::{main, save};
use tempfile::TempDir;

/// Numbers of query rows and of keys to give to sizes that are not known.
const SIZES: [(u64, u64); 5] = [(3, 7), (1, 6), (5, 5), (4, 4), (1, 12)];

/// Where positions are: at the beginning, in the middle and at the end.
const PLACES: [u64; 3] = [0, 1, 2];

/// The size of an unknown axis of an input: rows of a mask and of what queries are made of, or keys.
fn size(f: &Function, v: ValueId, axis: usize, dim: &Dim, (rows, keys): (u64, u64)) -> u64 {
    let (name, rank) = (f.value(v).name().as_str(), f.tensor(v).map_or(0, |t| t.rank()));
    let wanted = match name {
        "mask" if axis + 1 == rank => keys,
        "mem" => keys,
        "k_past" | "v_past" => keys.saturating_sub(rows),
        _ => rows,
    };
    let range = f.symbol_range(dim.symbols()[0]);
    wanted.clamp(range.lo, range.hi.unwrap_or(u64::MAX))
}

fn shape(f: &Function, v: ValueId, sizes: (u64, u64)) -> Vec<usize> {
    let dims = &f.tensor(v).unwrap().shape;
    let known = |(axis, d): (usize, &Dim)| d.as_known().unwrap_or_else(|| size(f, v, axis, d, sizes)) as usize;
    dims.iter().enumerate().map(known).collect()
}

/// Symbols for floats and bools; positions and token ids for integers.
fn inputs(f: &Function, sizes: (u64, u64), place: u64) -> Tensors {
    let tensors = f.inputs().iter().copied().filter(|&v| f.tensor(v).is_some());
    let mask = tensors.clone().find(|&v| f.value(v).name().contains("mask")).map(|v| shape(f, v, sizes));
    let room = mask.map_or(0, |m| m[m.len() - 1].saturating_sub(m[m.len() - 2])) as u64;
    tensors
        .map(|v| {
            let (name, shape, dtype) = (f.value(v).name().as_str(), shape(f, v, sizes), f.tensor(v).unwrap().dtype);
            let tensor = match (name, dtype.is_int()) {
                ("pos" | "position", true) => Tensor::known(dtype, &shape, vec![(room * place / 2) as i64]),
                (_, true) => {
                    let count = shape.iter().product::<usize>() as i64;
                    Tensor::known(dtype, &shape, (0..count).map(|i| (i * 37 + 5) % 90).collect())
                }
                _ => Tensor::symbols(name, dtype, &shape),
            };
            (name.to_string(), tensor)
        })
        .collect()
}

fn states(f: &Function) -> Tensors {
    let states = f.inputs().iter().filter_map(|&v| Some((f.value(v).name().to_string(), f.ty(v).as_state()?)));
    states
        .map(|(name, ty)| {
            let shape: Vec<usize> = ty.known_shape().unwrap().iter().map(|&n| n as usize).collect();
            let tensor = Tensor::symbols(&name, ty.dtype, &shape);
            (name, tensor)
        })
        .collect()
}

/// Where a function was evaluated, and what came out: outputs and states by name.
struct Sample {
    arithmetic: Arithmetic,
    inputs: Tensors,
    states: Tensors,
    results: (Tensors, Tensors),
}

/// A function at all sizes and positions at which it can be evaluated.
fn samples(f: &Function, arithmetic: Arithmetic) -> Vec<Sample> {
    let is_flexible = f.inputs().iter().any(|&v| f.tensor(v).is_some_and(|t| t.known_shape().is_none()));
    let sizes = &SIZES[..if is_flexible { SIZES.len() } else { 1 }];
    let at = |&sizes: &(u64, u64)| PLACES.map(|place| (inputs(f, sizes, place), states(f)));
    let evaluated = sizes.iter().flat_map(at).filter_map(|(inputs, states)| {
        let results = evaluate(f, &inputs, &states, arithmetic);
        assert!(is_flexible || results.is_ok(), "{}: {results:?}", f.name());
        Some(Sample { arithmetic, results: results.ok()?, inputs, states })
    });
    let samples: Vec<Sample> = evaluated.collect();
    assert!(samples.len() >= if is_flexible { 2 * PLACES.len() } else { PLACES.len() }, "{}", f.name());
    samples
}

/// States as they are handed to the second function: joined ones are one, their rows one behind the other.
fn joined(mut states: Tensors, changes: &[&InterfaceChange]) -> Tensors {
    for change in changes {
        let InterfaceChange::Joined { states: parts, into } = change else { continue };
        let parts: Vec<Tensor> = parts.iter().map(|name| states.remove(name.as_str()).unwrap()).collect();
        states.insert(into.to_string(), Tensor::joined(&parts, 0).unwrap());
    }
    states
}

/// A cache into which the caller has written, as a change of the interface tells.
fn written(cache: &Tensor, write: &HostWrite, inputs: &Tensors, outputs: &Tensors) -> Tensor {
    let known = |source: &Source| match source {
        Source::Element { input, index } => inputs[input.as_str()].numbers.as_ref().map(|n| n[*index as usize]),
        Source::Size { input, axis } => Some(inputs[input.as_str()].shape[*axis] as i64),
    };
    let begin: Vec<usize> = write.begin.iter().map(|p| p.evaluate(known).unwrap() as usize).collect();
    cache.with_box(&begin, &outputs[write.output.as_str()]).unwrap()
}

/// Outputs and states of the second function, with the caches that became inputs as the caller keeps them.
fn results(sample: &Sample, other: &Function, changes: &[&InterfaceChange]) -> Result<(Tensors, Tensors), Refusal> {
    let mut states = joined(sample.states.clone(), changes);
    let mut inputs = sample.inputs.clone();
    let cache = |change: &&InterfaceChange| match change {
        InterfaceChange::ReadOnly(write) => Some(write.cache.to_string()),
        InterfaceChange::Input { cache, .. } => Some(cache.to_string()),
        _ => None,
    };
    for name in changes.iter().filter_map(cache) {
        inputs.insert(name.clone(), states.remove(&name).unwrap());
    }
    let (outputs, mut ends) = evaluate(other, &inputs, &states, sample.arithmetic)?;
    for name in changes.iter().filter_map(cache) {
        ends.insert(name.clone(), inputs[&name].clone());
    }
    for change in changes {
        if let InterfaceChange::ReadOnly(write) = change {
            let cache = written(&ends[write.cache.as_str()], write, &inputs, &outputs);
            ends.insert(write.cache.to_string(), cache);
        }
    }
    Ok((outputs, ends))
}

/// What differs in a sample: an output or a state, or what keeps the other function from being evaluated.
fn difference(sample: &Sample, other: &Function, changes: &[&InterfaceChange]) -> Option<String> {
    let theirs = match results(sample, other, changes) {
        Ok(theirs) => theirs,
        Err(refusal) => return Some(refusal),
    };
    let (outputs, ends) = (&sample.results.0, joined(sample.results.1.clone(), changes));
    let mut all = outputs.iter().map(|t| (t, &theirs.0)).chain(ends.iter().map(|t| (t, &theirs.1)));
    all.find(|((name, x), theirs)| theirs.get(*name) != Some(*x)).map(|((name, _), _)| name.clone())
}

/// Fixtures that have nested blocks or lists; the default pipeline changes no byte of them.
const NOT_EVALUATED: [&str; 2] = ["classify", "control_flow"];

fn is_evaluated(path: &Path) -> bool {
    !NOT_EVALUATED.contains(&path.file_stem().unwrap().to_str().unwrap())
}

/// A fixture, and what a pipeline made of it, read again from where it was saved.
struct Case {
    before: Program,
    after: Program,
    report: Report,
    /// Where the saved package is, for as long as its weights are read.
    _dir: TempDir,
}

impl Case {
    fn of(path: &Path, pipeline: &Pipeline) -> Case {
        let dir = tempfile::tempdir().unwrap();
        let mut package = Package::open(path).unwrap();
        let before = package.program().clone();
        let report = pipeline.run(package.program_mut(), &RunOptions::default()).unwrap();
        let out = dir.path().join("saved.mlpackage");
        save(&package, &out, &SaveOptions::default()).unwrap();
        assert!(is_evaluated(path) || listing(path) == listing(&out), "{}", path.display());
        Case { before, after: Package::open(&out).unwrap().into_program(), report, _dir: dir }
    }
}

/// Checks every function of every package, at all sizes and positions. Returns how many rewrites each pass did.
fn check_all(paths: Vec<PathBuf>, pipeline: &Pipeline, arithmetic: Arithmetic) -> BTreeMap<String, usize> {
    let mut fired = BTreeMap::new();
    for path in paths {
        let case = Case::of(&path, pipeline);
        for f in case.before.functions().iter().filter(|_| is_evaluated(&path)) {
            let other = case.after.function(f.name()).unwrap();
            for (number, sample) in samples(f, arithmetic).iter().enumerate() {
                let difference = difference(sample, other, &case.report.interface(f.name()));
                assert_eq!(difference, None, "{} {}, sample {number}", path.display(), f.name());
            }
        }
        for pass in case.report.functions.iter().flat_map(|f| &f.passes) {
            *fired.entry(pass.pass.clone()).or_default() += pass.fired.len();
        }
    }
    fired
}

fn check(pipeline: &Pipeline, arithmetic: Arithmetic) -> BTreeMap<String, usize> {
    check_all(fixtures(), pipeline, arithmetic)
}

#[test]
fn the_default_pipeline_keeps_every_expression() {
    let fired = check(&Pipeline::default(), Arithmetic::Ordered);
    assert!(fired["gqa-fold"] > 400, "{fired:?}");
}

#[test]
fn passes_on_caches_that_keep_bits_keep_every_expression() {
    let fired = check(&Pipeline::parse("view-simplify,kv-forward,kv-unify,kv-merge,dce").unwrap(), Arithmetic::Ordered);
    assert!(fired["kv-unify"] > 25 && fired["view-simplify"] > 200, "{fired:?}");
}

#[test]
fn the_second_preset_keeps_every_real_number() {
    let fired = check(&Pipeline::preset(Preset::O2), Arithmetic::Real);
    assert!(fired["kv-defer"] > 50 && fired["kv-merge"] > 40, "{fired:?}");
}

#[test]
fn so_does_a_caller_that_writes_the_caches() {
    let fired = check(&Pipeline::preset(Preset::ReadOnly), Arithmetic::Real);
    assert!(fired["kv-readonly"] > 50, "{fired:?}");
}

#[test]
#[ignore = "needs a directory of packages, MILOPT_PACKAGES"]
fn so_it_is_with_further_packages() {
    let all = packages(Path::new(&std::env::var_os("MILOPT_PACKAGES").unwrap()));
    check_all(all.clone(), &Pipeline::default(), Arithmetic::Ordered);
    for preset in [Preset::O2, Preset::ReadOnly] {
        check_all(all.clone(), &Pipeline::preset(preset), Arithmetic::Real);
    }
}

/// Mistakes that real numbers do not see.
const ROUNDING: [&str; 2] = ["products in fp16 for fp32", "masked scores in fp16 for fp32"];

/// Plants every mistake in every fixture, at one of the places where it can be, and returns how many were planted.
fn planted(preset: Preset, arithmetic: Arithmetic) -> usize {
    let faults = [heads::FAULTS, attention::FAULTS, caches::FAULTS, body::FAULTS].concat();
    let faults = || faults.iter().filter(|f| arithmetic == Arithmetic::Ordered || !ROUNDING.contains(&f.name));
    let mut count = 0;
    for path in fixtures().iter().filter(|path| is_evaluated(path)) {
        let case = Case::of(path, &Pipeline::preset(preset));
        let (samples, after) = (samples(main(&case.before), arithmetic), main(&case.after));
        for (turn, fault) in faults().enumerate() {
            let sites = (fault.sites)(after);
            let Some(&site) = sites.get(turn % sites.len().max(1)) else { continue };
            let mut wrong = after.clone();
            (fault.plant)(&mut wrong, site);
            let seen = samples.iter().any(|s| difference(s, &wrong, &[]).is_some());
            assert!(seen, "{} in {} under {preset:?}", fault.name, path.display());
            count += 1;
        }
    }
    count
}

#[test]
fn mistakes_make_other_expressions() {
    assert!(planted(Preset::O1, Arithmetic::Ordered) > 1200);
}

#[test]
fn mistakes_of_the_second_preset_make_other_real_numbers() {
    assert!(planted(Preset::O2, Arithmetic::Real) > 1400);
}

/// Products that read some element several times, but for constants.
fn repeating(f: &Function) -> Vec<String> {
    let sample = samples(f, Arithmetic::Ordered).remove(0);
    let values = values(f, &sample.inputs, &sample.states).unwrap();
    let repeats = |v: &ValueId| {
        let elements = &values[f.value(*v).name().as_str()].elements;
        f.const_value(*v).is_none() && elements.iter().collect::<HashSet<_>>().len() < elements.len()
    };
    let products = ["matmul", "einsum", "scaled_dot_product_attention"].map(|kind| edit::of_kind(f, kind)).concat();
    let read = |op: OpId| {
        f.op(op).params().filter(|(n, _)| *n != "attn_mask").flat_map(|(_, o)| o).filter_map(Operand::as_value)
    };
    products.into_iter().filter(|&op| read(op).any(|v| repeats(&v))).map(|op| f.describe(op)).collect()
}

#[test]
fn no_product_reads_an_element_twice() {
    let mut before = 0;
    for path in fixtures().iter().filter(|path| is_evaluated(path)) {
        let case = Case::of(path, &Pipeline::default());
        before += repeating(main(&case.before)).len();
        assert_eq!(repeating(main(&case.after)), [""; 0], "{}", path.display());
    }
    assert!(before > 120, "{before}");
}

/// Where the elements of a value are said to lie in another: for each axis, extents and strides, major to minor.
#[derive(Debug)]
struct IndexMap {
    offset: i64,
    axes: Vec<Vec<(u64, i64)>>,
}

impl IndexMap {
    /// The layout that the analysis finds, at these sizes.
    fn of(layout: &Layout, size: &impl Fn(&Dim) -> Option<u64>) -> Option<IndexMap> {
        let axis = |axis: &Axis| axis.iter().map(|d| digit(&d.extent, &d.stride, size)).collect();
        let axes = layout.axes.iter().map(axis).collect::<Option<_>>()?;
        Some(IndexMap { offset: stride(&layout.offset, size)?, axes })
    }

    /// What a certificate says, at these sizes.
    fn certified(c: &Certificate, size: &impl Fn(&Dim) -> Option<u64>) -> Option<IndexMap> {
        let axis = |axis: &Vec<Factor>| axis.iter().map(|d| digit(&d.extent, &d.stride, size)).collect();
        Some(IndexMap { offset: stride(&c.offset, size)?, axes: c.axes.iter().map(axis).collect::<Option<_>>()? })
    }

    /// The place in the source of each element, row-major.
    fn places(&self) -> Vec<i64> {
        self.axes.iter().flatten().fold(vec![self.offset], |places, &(extent, stride)| {
            places.iter().flat_map(|at| (0..extent as i64).map(move |i| at + i * stride)).collect()
        })
    }

    /// The map with the digits of each axis the other way round: `h mod n_kv_heads` for `h div group`.
    fn reversed(&self) -> IndexMap {
        let axes = self.axes.iter().map(|axis| axis.iter().rev().copied().collect()).collect();
        IndexMap { offset: self.offset, axes }
    }

    /// Whether the elements are found at these places, and the axes have the sizes of the value.
    fn holds(&self, value: &Tensor, source: &Tensor) -> bool {
        let found = self.places().into_iter().map(|at| source.elements.get(usize::try_from(at).ok()?));
        let sizes = self.axes.iter().map(|axis| axis.iter().map(|(extent, _)| *extent as usize).product::<usize>());
        sizes.eq(value.shape.iter().copied()) && found.eq(value.elements.iter().map(Some))
    }
}

fn stride(stride: &Stride, size: &impl Fn(&Dim) -> Option<u64>) -> Option<i64> {
    match stride.as_known() {
        Some(n) => Some(n),
        None => i64::try_from(size(stride.positive()?)?).ok(),
    }
}

fn digit(extent: &Dim, by: &Stride, size: &impl Fn(&Dim) -> Option<u64>) -> Option<(u64, i64)> {
    Some((size(extent)?, stride(by, size)?))
}

/// The unknown sizes of a function as they are when its values have these shapes.
fn sizes(f: &Function, values: &Tensors) -> HashMap<Symbol, u64> {
    let mut sizes = HashMap::new();
    for (name, tensor) in values {
        let dims = f.find_value(name).and_then(|v| f.tensor(v)).map_or(&[][..], |t| &t.shape);
        for (dim, &n) in dims.iter().zip(&tensor.shape) {
            if let ([symbol], 1) = (dim.symbols(), dim.coef()) {
                sizes.insert(*symbol, n as u64);
            }
        }
    }
    sizes
}

#[test]
fn layouts_are_what_is_found_by_looking() {
    let (mut views, mut orders) = (0, 0);
    for path in fixtures().iter().filter(|path| is_evaluated(path)) {
        let package = Package::open(path).unwrap();
        let f = main(package.program());
        let layouts = Layouts::new(f);
        for sample in samples(f, Arithmetic::Ordered) {
            let values = values(f, &sample.inputs, &sample.states).unwrap();
            let sizes = sizes(f, &values);
            let size = |d: &Dim| d.symbols().iter().try_fold(d.coef(), |n, s| Some(n * sizes.get(s)?));
            let named = |v: ValueId| &values[f.value(v).name().as_str()];
            for v in values.keys().filter_map(|name| f.find_value(name)) {
                for layout in layouts.of(v).iter().filter(|l| l.source != v) {
                    let Some(map) = IndexMap::of(layout, &size) else { continue };
                    let what = || format!("{}: `{}` is {layout:?}", path.display(), f.value(v).name());
                    assert!(map.holds(named(v), named(layout.source)), "{}", what());
                    let other = map.reversed();
                    let is_wrong = other.places() != map.places();
                    assert!(!is_wrong || !other.holds(named(v), named(layout.source)), "not {}", what());
                    views += 1;
                    orders += usize::from(is_wrong);
                }
            }
        }
    }
    assert!(views > 10_000 && orders > 2_000, "{views} {orders}");
}

/// Whether a product of this function reads the value.
fn is_multiplied(f: &Function, name: &str) -> bool {
    let products = ["matmul", "einsum", "scaled_dot_product_attention"];
    let readers = f.find_value(name).map(|v| f.users(v)).unwrap_or_default();
    readers.into_iter().any(|op| products.contains(&f.op(op).kind().as_str()))
}

/// Looks up every element that a certificate tells of, at the sizes of these values. Returns whether another order of digits
/// would have been another map, which is then not found.
fn look_up(f: &Function, values: &Tensors, c: &Certificate) -> bool {
    let sizes = sizes(f, values);
    let size = |d: &Dim| d.symbols().iter().try_fold(d.coef(), |n, s| Some(n * sizes.get(s)?));
    let [value, source] = [&c.value, &c.source].map(|name| &values[name.as_str()]);
    let map = IndexMap::certified(c, &size).unwrap();
    assert!(map.holds(value, source), "{c}");
    let other = map.reversed();
    let is_wrong = other.places() != map.places();
    assert!(!is_wrong || !other.holds(value, source), "not {c}");
    is_wrong
}

#[test]
fn certificates_are_what_is_found_by_looking() {
    let (mut certified, mut orders) = (0, 0);
    for path in fixtures().iter().filter(|path| is_evaluated(path)) {
        let case = Case::of(path, &Pipeline::default());
        for report in &case.report.functions {
            let [before, after] = [&case.before, &case.after].map(|p| p.function(&report.function).unwrap());
            let fired = report.passes.iter().flat_map(|p| &p.fired);
            let certificates: Vec<&Certificate> = fired.flat_map(|fired| &fired.certificates).collect();
            for sample in samples(before, Arithmetic::Ordered) {
                let values = values(before, &sample.inputs, &sample.states).unwrap();
                orders += certificates.iter().filter(|c| look_up(before, &values, c)).count();
            }
            for c in &certificates {
                assert!(!is_multiplied(after, &c.value), "{}: {c}", path.display());
            }
            certified += certificates.len();
        }
    }
    assert!(certified > 150 && orders > 700, "{certified} {orders}");
}
