//! The proof around a pipeline: only what differs is run, and a rewrite that is wrong is found and can be left out.

mod support;

use std::collections::BTreeMap;

use milopt::equiv::{self, Exactness, OnFailure, Options, ProofError, Scope, Verdict, prove};
use milopt::ir::{Function, OpId};
use milopt::package::{Package, SaveOptions};
use milopt::passes::{self, Pass, PassInfo, Pipeline, Preset, RunOptions};
use milopt::rewrite::{Budget, Context, Input, NoMatch, Outcome, Patch, Rule, drive};
use milopt::verify;
use support::files::fixtures;
use support::{program, save};

/// Ops that no interpreter runs.
const OPAQUE: &[&str] = &["classify"];

#[test]
fn every_fixture_is_equal_region_by_region() {
    for path in fixtures() {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        for preset in [Preset::O1, Preset::O2, Preset::ReadOnly] {
            let mut package = Package::open(&path).unwrap();
            let before = package.program().clone();
            let report = Pipeline::preset(preset).run(package.program_mut(), &RunOptions::default()).unwrap();
            let read = package.bytes_read();
            let options =
                Options { steps: 2, scope: Scope::Local, interface: report.interfaces(), ..Options::default() };
            let verdict = match equiv::check(&before, package.program(), None, &options) {
                Err(_) if OPAQUE.contains(&name.as_str()) => continue,
                verdict => verdict.unwrap_or_else(|e| panic!("{name} {preset:?}: {e:?}")),
            };
            let wanted = match report.exactness() {
                passes::Exactness::Bitwise => Exactness::Bitwise,
                _ => Exactness::Reassociated,
            };
            assert!(verdict.satisfies(wanted), "{name} {preset:?}: {verdict}");
            assert_eq!(report.changed(), verdict.functions.iter().any(|f| !f.regions.is_empty()), "{name} {preset:?}");
            let more = package.bytes_read() - read;
            assert!(more <= 4096, "{name} {preset:?}: {more} bytes of weights were read");
        }
    }
}

/// Two packages have weight files of their own, which are compared byte by byte.
#[test]
fn weights_of_another_package_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let fixture = fixtures().into_iter().find(|p| p.ends_with("exaone4_q1.mlpackage")).unwrap();
    let [same, other] = ["same", "other"].map(|name| dir.path().join(name).with_extension("mlpackage"));
    let a = Package::open(&fixture).unwrap();
    save(&a, &same, &SaveOptions::default()).unwrap();
    save(&a, &other, &SaveOptions::default()).unwrap();
    let weights = walk(&other).into_iter().find(|p| p.ends_with("weight.bin")).unwrap();
    let mut bytes = std::fs::read(&weights).unwrap();
    let middle = (bytes.len() / 2) | 1;
    bytes[middle] ^= 4;
    std::fs::write(&weights, bytes).unwrap();
    let options = Options { steps: 1, scope: Scope::Local, ..Options::default() };
    let compare = |path| {
        let b = Package::open(path).unwrap();
        equiv::check(a.program(), b.program(), None, &options).unwrap()
    };
    assert_eq!(compare(&same).verdict, Verdict::Bitwise);
    assert_ne!(compare(&other).verdict, Verdict::Bitwise, "an exponent of one weight");
}

fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    entries.flat_map(|p| if p.is_dir() { walk(&p) } else { vec![p] }).collect()
}

/// Makes `add(x, x)` a product with two, and in the `wrong` places one with three.
#[derive(Debug)]
struct Doubling {
    wrong: &'static [&'static str],
}

impl Rule for Doubling {
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
        let data = cx.f.op(op);
        let (Some(x), Some(y)) = (data.value("x"), data.value("y")) else { return Err(NoMatch::UNRELATED) };
        if *data.kind() != "add" || x != y {
            return Err(NoMatch::UNRELATED);
        }
        let result = data.results()[0];
        let name = cx.f.value(result).name().to_string();
        let ty = cx.f.tensor(result).ok_or(NoMatch::UNRELATED)?.clone();
        let factor = if self.wrong.contains(&name.as_str()) { 3.0 } else { 2.0 };
        let mut patch = Patch::before(op);
        let two = milopt::ir::Literal::floats(ty.dtype, &[], &[factor]);
        let product = patch.op("mul", format!("{name}_doubled"), vec![("x", x.into()), ("y", Input::from(two))], ty);
        patch.replace(result, product);
        Ok(patch)
    }
}

impl Pass for Doubling {
    fn name(&self) -> &'static str {
        "doubling"
    }
    fn exactness(&self) -> passes::Exactness {
        passes::Exactness::Bitwise
    }
    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        drive(f, &[self], budget)
    }
}

fn sums() -> milopt::ir::Program {
    let line = |n: usize| format!("tensor<fp16, [1, 8]> y{} = add(x = y{n}, y = y{n});", n + 1);
    let body: String = (0..9).map(line).collect();
    program("tensor<fp16, [1, 8]> x", &format!("tensor<fp16, [1, 8]> y0 = relu(x = x); {body}"), "y9")
}

fn pipeline(wrong: &'static [&'static str]) -> Pipeline {
    let dce = passes::all().iter().find(|p| p.name == "dce").map(PassInfo::build).unwrap();
    Pipeline::new(vec![Box::new(Doubling { wrong }), dce])
}

fn kinds(f: &Function) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for op in f.all_ops().into_iter().filter(|&op| *f.op(op).kind() != "const") {
        *counts.entry(f.op(op).kind().to_string()).or_default() += 1;
    }
    counts
}

#[test]
fn the_first_wrong_rewrite_is_named_and_nothing_is_changed() {
    for scope in [Scope::Whole, Scope::Local] {
        let mut program = sums();
        let before = milopt::text::print_program(&program);
        let options = Options { scope, ..Options::default() };
        let wrong = pipeline(&["y4", "y7"]);
        let proof = prove(&mut program, &wrong, &RunOptions::default(), &options, OnFailure::Stop).unwrap();
        assert!(!proof.holds());
        let [culprit] = &proof.culprits[..] else { panic!("{:?}", proof.culprits) };
        assert_eq!((culprit.site.op.as_str(), culprit.site.pass.as_str(), culprit.number), ("add `y4`", "doubling", 4));
        assert!(culprit.finding.starts_with("mul `y4` at step 0"), "{culprit}");
        assert_eq!(milopt::text::print_program(&program), before);
    }
}

#[test]
fn wrong_rewrites_are_left_out_alone() {
    let mut program = sums();
    let run = RunOptions::default();
    let wrong = pipeline(&["y4", "y7"]);
    let proof = prove(&mut program, &wrong, &run, &Options::default(), OnFailure::Revert).unwrap();
    assert!(proof.holds());
    let blamed: Vec<&str> = proof.culprits.iter().map(|c| c.site.op.as_str()).collect();
    assert_eq!(blamed, ["add `y4`", "add `y7`"]);
    let main = program.main().unwrap();
    assert_eq!(kinds(main), BTreeMap::from([("relu".into(), 1), ("mul".into(), 7), ("add".into(), 2)]));
    let declined = &proof.rewrites.functions[0].passes[0].declined;
    assert!(declined.iter().all(|d| d.reason.starts_with("left out")) && declined.len() == 2, "{declined:?}");
    verify::structure(&program).unwrap();
    let right = prove(&mut sums(), &pipeline(&[]), &run, &Options::default(), OnFailure::Revert).unwrap();
    assert!(right.holds() && right.culprits.is_empty());
}

/// Makes a product with two of every `relu`, which takes as many steps as it has elements to gather.
#[derive(Debug)]
struct OutOfRange;

impl Rule for OutOfRange {
    fn rewrite(&self, cx: &Context<'_>, op: OpId) -> Result<Patch, NoMatch> {
        let data = cx.f.op(op);
        let result = data.results()[0];
        let (Some(x), "relu") = (data.value("x"), data.kind().as_str()) else { return Err(NoMatch::UNRELATED) };
        let ty = cx.f.tensor(result).ok_or(NoMatch::UNRELATED)?.clone();
        let mut patch = Patch::before(op);
        let indices = Input::from(milopt::ir::Literal::ints(&[8; 8]));
        let inputs = vec![("x", x.into()), ("indices", indices), ("axis", Input::from(milopt::ir::Literal::int(1)))];
        let gathered = patch.op("gather", "beyond", inputs, ty);
        patch.replace(result, gathered);
        Ok(patch)
    }
}

impl Pass for OutOfRange {
    fn name(&self) -> &'static str {
        "out-of-range"
    }
    fn exactness(&self) -> passes::Exactness {
        passes::Exactness::Bitwise
    }
    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome {
        drive(f, &[self], budget)
    }
}

#[test]
fn a_rewrite_whose_result_does_not_run_is_to_blame_too() {
    let wrong = || Pipeline::new(vec![Box::new(Doubling { wrong: &[] }), Box::new(OutOfRange)]);
    let (run, options) = (RunOptions::default(), Options::default());
    match prove(&mut sums(), &wrong(), &run, &options, OnFailure::Stop) {
        Err(ProofError::Unrunnable { culprit, .. }) => {
            assert_eq!((culprit.site.op.as_str(), culprit.number), ("relu `y0`", 10), "{culprit}");
        }
        other => panic!("{other:?}"),
    }
    let mut program = sums();
    let proof = prove(&mut program, &wrong(), &run, &options, OnFailure::Revert).unwrap();
    assert!(proof.holds() && proof.culprits.len() == 1);
    assert_eq!(kinds(program.main().unwrap())["mul"], 9);
}

/// A site of any pass can be left out, and only that.
#[test]
fn every_pass_leaves_out_what_it_is_told_to() {
    for (preset, model) in [
        (Preset::O1, "exaone4_q1"),
        (Preset::O2, "exaone4_q1"),
        (Preset::O2, "cache_per_layer"),
        (Preset::ReadOnly, "cache_per_layer"),
    ] {
        let path = fixtures().into_iter().find(|p| p.file_stem().is_some_and(|s| s == model)).unwrap();
        let original = Package::open(&path).unwrap().program().clone();
        let pipeline = Pipeline::preset(preset);
        let all = pipeline.run(&mut original.clone(), &RunOptions::default()).unwrap();
        for function in &all.functions {
            for pass in &function.passes {
                let Some(fired) = pass.fired.first() else { continue };
                let (function, pass) = (function.function.as_str().into(), pass.pass.clone());
                let site = milopt::rewrite::Site { function, pass, op: fired.op.clone() };
                let mut program = original.clone();
                let report = pipeline.run(&mut program, &RunOptions::default().without(site.clone())).unwrap();
                let done = report.functions.iter().flat_map(|f| &f.passes).filter(|p| p.pass == site.pass);
                assert!(done.flat_map(|p| &p.fired).all(|f| f.op != site.op), "{model} {preset:?}: {site}");
                verify::structure(&program).unwrap_or_else(|e| panic!("{model} {preset:?}: {site}: {e}"));
                let options = Options { steps: 3, interface: report.interfaces(), ..Options::default() };
                let verdict = equiv::check(&original, &program, None, &options).unwrap();
                assert!(verdict.satisfies(Exactness::Reassociated), "{model} {preset:?}: {site}: {verdict}");
            }
        }
    }
}
