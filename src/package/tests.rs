//! What needs to look inside: forced re-encoding, edits through the primitive door, and failing disks.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message;

use super::disk::{Disk, Os};
use super::encode::encode_all;
use super::source::ModelFile;
use super::*;
use crate::ir::{DType, Function, Literal, Name, OpId, OpSpec, Operand, Place, TensorType, ValueType};
use crate::proto::mil;
use crate::proto::model::{ML_PROGRAM, Model};
use crate::proto::wire;

pub(super) fn fixtures() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    let mut found: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    found.retain(|p| p.extension().is_some_and(|e| e == "mlpackage"));
    found.sort();
    assert!(found.len() >= 24);
    found
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(name).with_extension("mlpackage")
}

fn decoded(model: &[u8]) -> (Model, mil::Program) {
    let range = wire::payloads(model, 0..model.len(), ML_PROGRAM).unwrap().pop().unwrap();
    (Model::decode(model).unwrap(), mil::Program::decode(&model[range]).unwrap())
}

/// Payloads of the ops of a function's body, by the name of the first result.
fn op_bytes(model: &[u8], function: &str) -> Vec<(String, Vec<u8>)> {
    let program = wire::payloads(model, 0..model.len(), ML_PROGRAM).unwrap().pop().unwrap();
    let mut out = Vec::new();
    for entry in wire::payloads(model, program, 2).unwrap() {
        let (name, f) = decode::map_entry(model, entry).unwrap();
        if name != function {
            continue;
        }
        let block = wire::payloads(model, f, 3).unwrap().swap_remove(0);
        let (_, block) = decode::map_entry(model, block).unwrap();
        for range in wire::payloads(model, block, 3).unwrap() {
            let op = mil::Operation::decode(&model[range.clone()]).unwrap();
            let first = op.outputs.first().map_or(op.kind.clone(), |o| o.name.clone());
            out.push((first, model[range].to_vec()));
        }
    }
    out
}

#[test]
fn an_unedited_program_keeps_its_bytes() {
    for path in fixtures() {
        let package = Package::open(&path).unwrap();
        let file = fs::read(&package.home.as_ref().unwrap().model).unwrap();
        assert_eq!(package.model_bytes().unwrap(), file, "{}", path.display());
        assert_eq!(package.bytes_read(), 0);
        for f in package.program().functions() {
            f.assert_uses_exact();
        }
    }
}

/// Everything is encoded from the IR, nothing copied, and says the same as the file.
#[test]
fn encoding_from_the_ir_loses_nothing() {
    for path in fixtures() {
        let package = Package::open(&path).unwrap();
        let mut program = package.program().clone();
        let file = ModelFile::of(&program).unwrap().bytes.clone();
        let (model, mil) = decoded(&file);
        for f in &mut program.functions {
            for op in f.all_ops() {
                assert_eq!(f.op(op).unmodelled(), None, "{}", f.describe(op));
                f.set_source(op, None, None);
            }
            // Touches the revision, so that the function is spliced.
            let interface = f.interface().clone();
            f.edit_interface(interface);
        }
        let spliced = encode::encode(&program, true).unwrap().model;
        let (spliced_model, spliced_mil) = decoded(&spliced);
        assert!(spliced_mil == mil, "{}", path.display());
        assert_eq!(spliced_model, model);
        assert!(spliced.len() <= file.len() + 8);

        program.source = None;
        for f in &mut program.functions {
            // Blobs stay where they are: this encodes as if the weights came along.
            f.reset_revision();
        }
        let Err(EncodeError::Program(why)) = encode_all(&program, None) else { panic!("weights are elsewhere") };
        assert!(why.ends_with("refers to weights of another package"));
    }
}

/// A program without a source gets all its weights copied into a new file.
#[test]
fn a_program_from_elsewhere_becomes_a_whole_package() {
    for path in fixtures() {
        let package = Package::open(&path).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out.mlpackage");
        Package::new(package.program().clone()).save(&out, &SaveOptions::default()).unwrap();
        let copy = Package::open(&out).unwrap();
        let (a, b) = (package.program(), copy.program());
        assert_eq!(a.metadata(), b.metadata());
        assert_eq!(a.default_function(), b.default_function());
        assert_eq!(a.specification_version(), b.specification_version());
        for (f, g) in a.functions().iter().zip(b.functions()) {
            assert_eq!(f.interface(), g.interface());
            let (ops, copies) = (f.all_ops(), g.all_ops());
            assert_eq!(ops.len(), copies.len());
            for (&x, &y) in ops.iter().zip(&copies) {
                same_op(f, x, g, y);
            }
        }
    }
}

fn same_op(f: &Function, x: OpId, g: &Function, y: OpId) {
    let (a, b) = (f.op(x), g.op(y));
    assert_eq!(a.kind(), b.kind());
    let names = |f: &Function, op: OpId| -> Vec<Name> {
        f.op(op).results().iter().map(|&v| f.value(v).name().clone()).collect()
    };
    assert_eq!(names(f, x), names(g, y));
    let attributes: Vec<_> = b.attributes().map(|(n, l)| (n.clone(), g.literal(l))).collect();
    for ((name, l), (copied_name, copy)) in a.attributes().zip(attributes) {
        assert_eq!(*name, copied_name);
        let literal = f.literal(l);
        assert_eq!(literal.ty, copy.ty);
        if literal.ty.as_tensor().is_some_and(|t| t.dtype.bits().is_some()) {
            assert_eq!(literal.packed(&**f.weights()).unwrap(), copy.packed(&**g.weights()).unwrap());
        }
    }
}

fn first_op(f: &Function, kind: &str) -> OpId {
    f.all_ops().into_iter().find(|&op| f.op(op).kind() == kind).unwrap()
}

#[test]
fn an_edit_re_encodes_only_what_it_touches() {
    for name in ["exaone4_q1", "exaone4_decode_prefill", "mistral_flexible_stateful"] {
        let mut package = Package::open(fixture(name)).unwrap();
        let before = package.model_bytes().unwrap();
        let function = package.program().main().unwrap().name().clone();
        let f = package.program_mut().function_mut(&function).unwrap();
        let op = first_op(f, "matmul");
        let v = f.op(op).results()[0];
        let old = f.value(v).name().clone();
        let readers: Vec<String> =
            f.users(v).iter().map(|&u| f.value(f.op(u).results()[0]).name().to_string()).collect();
        f.rename(v, "renamed_scores".into());
        let after = package.model_bytes().unwrap();
        assert_eq!(after, package.model_bytes().unwrap(), "encoding is deterministic");
        let (a, b) = (op_bytes(&before, &function), op_bytes(&after, &function));
        assert_eq!(a.len(), b.len());
        for ((n, x), (m, y)) in a.iter().zip(&b) {
            match n == &*old {
                true => assert_eq!(m, "renamed_scores"),
                false if readers.contains(n) => assert_ne!(x, y, "{n} spells the new name"),
                false => assert_eq!(x, y, "{n} is as it was"),
            }
        }
        for other in package.program().functions().iter().filter(|f| *f.name() != function) {
            assert_eq!(op_bytes(&before, other.name()), op_bytes(&after, other.name()));
        }
        assert_eq!(package.bytes_read(), 0, "an edit reads no weights");
        let (mut model, mut program) = decoded(&after);
        let (want_model, want) = decoded(&before);
        assert_eq!(model, want_model);
        program.functions.clear();
        model.description = None;
        assert_eq!(program.attributes, want.attributes);
        let again = decode::decode(after.into(), Arc::new(crate::ir::NoWeights)).unwrap();
        assert!(again.function(&function).unwrap().has_name("renamed_scores"));
    }
}

/// A model around one op of field 502, with room for unknown fields.
fn model_with(ops: &[mil::Operation], extra_in_op: &[(usize, u32)]) -> Vec<u8> {
    let ty = encode_type(DType::F16, &[2]);
    let mut block = mil::Block {
        outputs: ops.last().and_then(|o| o.outputs.first()).map(|o| o.name.clone()).into_iter().collect(),
        ..Default::default()
    }
    .encode_to_vec();
    for (i, op) in ops.iter().enumerate() {
        let mut bytes = op.encode_to_vec();
        for (_, number) in extra_in_op.iter().filter(|(at, _)| *at == i) {
            wire::put(&mut bytes, *number, b"kept");
        }
        wire::put(&mut block, 3, &bytes);
    }
    wire::put(&mut block, 99, b"in the block");
    let mut function = mil::Function {
        inputs: vec![mil::NamedValueType { name: "x".into(), ty: Some(ty) }],
        opset: "CoreML8".into(),
        ..Default::default()
    }
    .encode_to_vec();
    wire::put(&mut function, 3, &wire::entry("CoreML8", &block));
    wire::put(&mut function, 3, &wire::entry("CoreML7", b""));
    wire::put(&mut function, 98, b"in the function");
    let mut program = mil::Program { version: 1, ..Default::default() }.encode_to_vec();
    wire::put(&mut program, 2, &wire::entry("main", &function));
    wire::put(&mut program, 97, b"in the program");
    let mut model = Model { specification_version: 9, ..Default::default() }.encode_to_vec();
    wire::put(&mut model, ML_PROGRAM, &program);
    wire::put(&mut model, 5000, b"in the model");
    model
}

fn encode_type(dtype: DType, shape: &[u64]) -> mil::ValueType {
    convert::encode_type(&ValueType::from(TensorType::fixed(dtype, shape))).unwrap()
}

fn op(kind: &str, inputs: &[(&str, &str)], output: &str) -> mil::Operation {
    let binding = |name: &str| mil::Argument {
        arguments: vec![mil::Binding { kind: Some(mil::BindingKind::Name(name.into())) }],
    };
    mil::Operation {
        kind: kind.into(),
        inputs: inputs.iter().map(|(p, v)| (p.to_string(), binding(v))).collect(),
        outputs: vec![mil::NamedValueType { name: output.into(), ty: Some(encode_type(DType::F16, &[2])) }],
        blocks: vec![],
        attributes: BTreeMap::new(),
    }
}

fn read(model: Vec<u8>) -> Result<Program, DecodeError> {
    decode::decode(model.into(), Arc::new(crate::ir::NoWeights))
}

fn refusal(ops: &[mil::Operation]) -> String {
    read(model_with(ops, &[])).unwrap_err().to_string()
}

#[test]
fn unknown_fields_survive_beside_an_edit_and_stop_one() {
    let ops =
        [op("relu", &[("x", "x")], "a"), op("exp", &[("x", "x")], "b"), op("add", &[("x", "a"), ("y", "b")], "c")];
    let model = model_with(&ops, &[(1, 77)]);
    let mut program = read(model.clone()).unwrap();
    assert_eq!(encode::encode(&program, true).unwrap().model, model);
    let f = &mut program.functions[0];
    let [a, b, _] = f.all_ops()[..] else { panic!() };
    assert_eq!(f.op(a).unmodelled(), None);
    assert_eq!(f.op(b).unmodelled(), Some("unknown field 77 in operation"));
    assert_eq!(
        f.check_editable(b).unwrap_err().to_string(),
        "exp `b` carries unknown field 77 in operation, which an edit would lose"
    );
    let v = f.op(a).results()[0];
    f.rename(v, "renamed".into());
    let after = encode::encode(&program, true).unwrap().model;
    for kept in ["kept", "in the block", "in the function", "in the program", "in the model", "CoreML7"] {
        assert!(after.windows(kept.len()).any(|w| w == kept.as_bytes()), "{kept}");
    }
    assert_eq!(op_bytes(&after, "main")[1], op_bytes(&model, "main")[1]);

    let f = &mut program.functions[0];
    let v = f.op(b).results()[0];
    f.rename(v, "lost".into());
    assert_eq!(
        encode::encode(&program, true).unwrap_err().to_string(),
        "function `main`: exp `lost` was edited but carries unknown field 77 in operation, which would be lost"
    );
}

#[test]
fn broken_structure_is_located() {
    assert_eq!(
        refusal(&[op("relu", &[("x", "y")], "a")]),
        "function `main`: relu `a` reads `y`, which nothing before it defines"
    );
    assert_eq!(
        refusal(&[op("relu", &[("x", "x")], "a"), op("exp", &[("x", "x")], "a")]),
        "function `main`: exp `a`: a value of this name is there already"
    );
    let mut cond = op("cond", &[("pred", "x")], "c");
    cond.blocks = vec![mil::Block { outputs: vec!["nowhere".into()], ..Default::default() }];
    assert_eq!(
        refusal(&[cond.clone()]),
        "function `main`: a block of cond `c` returns `nowhere`, which nothing defines"
    );
    let mut model = model_with(&[], &[]);
    assert!(read(model.clone()).is_ok());
    let text = b"CoreML8";
    let at = model.windows(text.len()).position(|w| w == text).unwrap();
    model[at + 6] = b'6';
    assert_eq!(read(model).unwrap_err().to_string(), "function `main`: it has no block for its opset `CoreML6`");
}

fn branch(ops: Vec<mil::Operation>, output: &str) -> mil::Block {
    mil::Block { operations: ops, outputs: vec![output.into()], ..Default::default() }
}

#[test]
fn nested_blocks_see_outer_values_and_splice_their_own_ops() {
    let mut cond = op("cond", &[("pred", "x")], "c");
    cond.blocks = vec![
        branch(vec![op("relu", &[("x", "x")], "t"), op("exp", &[("x", "t")], "u")], "u"),
        branch(vec![op("relu", &[("x", "x")], "t")], "t"),
    ];
    let escaped = refusal(&[cond.clone(), op("relu", &[("x", "t")], "d")]);
    assert_eq!(escaped, "function `main`: relu `d` reads `t`, which nothing before it defines");
    let model = model_with(&[cond], &[]);
    let mut program = read(model.clone()).unwrap();
    let f = &mut program.functions[0];
    f.assert_uses_exact();
    let [cond, first, second, third] = f.all_ops()[..] else { panic!() };
    assert!(f.all_ops().iter().all(|&op| f.op(op).source().is_some()));
    let v = f.op(second).results()[0];
    f.rename(v, "renamed".into());
    assert_eq!(f.op(cond).source(), None);
    assert!(f.op(first).source().is_some() && f.op(third).source().is_some());
    let (_, mut want) = decoded(&model);
    let body = want.functions.get_mut("main").unwrap().block_specializations.get_mut("CoreML8").unwrap();
    let block = &mut body.operations[0].blocks[0];
    block.operations[1].outputs[0].name = "renamed".into();
    block.outputs[0] = "renamed".into();
    let name = |text: &str| BTreeMap::from([("name".into(), convert::encode_literal(&Literal::string(text)).unwrap())]);
    block.operations[1].attributes = name("renamed");
    body.operations[0].attributes = name("c");
    let (_, got) = decoded(&encode::encode(&program, true).unwrap().model);
    assert_eq!(got, want);
}

#[test]
fn deep_nesting_is_an_error_not_an_overflow() {
    let mut inner = op("relu", &[("x", "x")], "v");
    for i in 0..3000 {
        let mut outer = op("cond", &[("pred", "x")], &format!("c{i}"));
        outer.blocks = vec![mil::Block { operations: vec![inner], ..Default::default() }];
        inner = outer;
        if i == 30 {
            assert!(read(model_with(&[inner.clone()], &[])).is_ok());
        }
    }
    let deep = std::thread::Builder::new().stack_size(256 << 20).spawn(move || {
        let bytes = model_with(&[inner.clone()], &[]);
        std::mem::forget(inner);
        bytes
    });
    let bytes = deep.unwrap().join().unwrap();
    assert!(matches!(read(bytes), Err(DecodeError::Format(_))));
}

#[test]
fn truncated_and_garbled_files_are_errors_or_programs_but_never_panics() {
    let file = fs::read(fixture("rep_stack").join("Data/com.apple.CoreML/model.mlmodel")).unwrap();
    for end in (0..file.len()).step_by(97) {
        assert!(read(file[..end].to_vec()).is_err(), "{end} bytes");
    }
    for at in (0..file.len()).step_by(31) {
        for flip in [0x01, 0x80, 0xff] {
            let mut bad = file.clone();
            bad[at] ^= flip;
            let _ = read(bad);
        }
    }
}

#[test]
fn other_models_are_named() {
    let kind = |number: u32, payload: &[u8]| {
        let mut model = Model { specification_version: 4, ..Default::default() }.encode_to_vec();
        wire::put(&mut model, number, payload);
        read(model).unwrap_err().to_string()
    };
    assert_eq!(kind(403, b""), "a neural network (neuralNetworkClassifier), not an ML Program");
    assert_eq!(kind(402, b""), "a tree ensemble (treeEnsembleClassifier), not an ML Program");
    let mut pipeline = Vec::new();
    for member in [500, ML_PROGRAM] {
        let mut model = Vec::new();
        wire::put(&mut model, member, b"");
        wire::put(&mut pipeline, 1, &model);
    }
    assert_eq!(kind(202, &pipeline), "a pipeline (pipeline) of 2 models (neuralNetwork, mlProgram), not an ML Program");
    let mut classifier = Vec::new();
    wire::put(&mut classifier, 1, &pipeline);
    assert!(kind(200, &classifier).starts_with("a pipeline (pipelineClassifier) of 2 models"));
    assert!(kind(9999, b"").contains("no model of a known kind"));
}

#[test]
fn an_edited_interface_rewrites_only_its_features() {
    for name in ["exaone4_q1", "exaone4_decode_prefill"] {
        let mut package = Package::open(fixture(name)).unwrap();
        let before = package.model_bytes().unwrap();
        let function = package.program().main().unwrap().name().clone();
        let f = package.program_mut().function_mut(&function).unwrap();
        let mut interface = f.interface().clone();
        let renamed = interface.inputs[0].name.clone();
        interface.inputs[0].name = "tokens".into();
        let v = f.input(&renamed).unwrap();
        f.rename(v, "tokens".into());
        f.edit_interface(interface);
        let after = package.model_bytes().unwrap();
        let (mut want, _) = decoded(&before);
        let (got, program) = decoded(&after);
        let d = want.description.as_mut().unwrap();
        let inputs = match d.functions.iter_mut().find(|f| f.name == *function) {
            Some(f) => &mut f.input,
            None => &mut d.input,
        };
        inputs[0].name = "tokens".into();
        assert_eq!(got, want);
        assert!(program.functions[&*function].inputs.iter().any(|i| i.name == "tokens"));
    }
}

#[test]
fn flexible_inputs_get_symbols_with_their_ranges() {
    let package = Package::open(fixture("mistral_flexible_stateful")).unwrap();
    let f = package.program().main().unwrap();
    let mut seen = 0;
    for &v in f.inputs() {
        let Some(t) = f.tensor(v) else { continue };
        let feature = f.interface().input(f.value(v).name()).unwrap();
        let crate::ir::Flexibility::Ranges(ranges) = &feature.array().unwrap().flexibility else { continue };
        for (d, &(lo, hi)) in t.shape.iter().zip(ranges) {
            match d.symbols() {
                [s] => {
                    let range = f.symbol_range(*s);
                    assert_eq!((range.lo, range.hi), (lo, hi));
                    assert!(hi != Some(lo));
                    seen += 1;
                }
                _ => assert_eq!(d.as_known(), Some(lo)),
            }
        }
    }
    assert!(seen > 0);
}

/// A program built from nothing: `y = x + w`, with a large and a small constant.
fn built() -> Program {
    let mut f = Function::new("main", "CoreML8");
    let ty: ValueType = TensorType::fixed(DType::F16, &[16]).into();
    let x = f.add_input("x".into(), ty.clone());
    let constant = |f: &mut Function, name: &str, literal: Literal| {
        let ty = literal.ty.clone();
        let val = f.intern(literal);
        let spec = OpSpec {
            kind: "const".into(),
            inputs: vec![],
            attributes: vec![("val".into(), val)],
            results: vec![(name.into(), ty)],
        };
        let op = f.insert_op(Place::End(f.body()), spec);
        f.op(op).results()[0]
    };
    let values: Vec<f64> = (0..16).map(f64::from).collect();
    let w = constant(&mut f, "w", Literal::floats(DType::F16, &[16], &values));
    let scale = constant(&mut f, "scale", Literal::floats(DType::F16, &[], &[2.0]));
    let mut last = x;
    for (kind, y, name) in [("add", w, "sum"), ("mul", scale, "y")] {
        let spec = OpSpec {
            kind: kind.into(),
            inputs: vec![("x".into(), vec![Operand::Value(last)]), ("y".into(), vec![Operand::Value(y)])],
            attributes: vec![],
            results: vec![(name.into(), ty.clone())],
        };
        let op = f.insert_op(Place::End(f.body()), spec);
        last = f.op(op).results()[0];
    }
    f.add_output(f.body(), last);
    let mut program = Program::new(9);
    program.add_function(f);
    program.metadata.author = "nobody".into();
    program
}

#[test]
fn a_program_from_nothing_becomes_a_package() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("built.mlpackage");
    Package::new(built()).save(&out, &SaveOptions::default()).unwrap();
    let package = Package::open(&out).unwrap();
    let f = package.program().main().unwrap();
    let w = f.const_value(f.find_value("w").unwrap()).unwrap();
    assert_eq!(w.to_floats(&**f.weights()).unwrap()[15], 15.0);
    assert!(w.is_blob());
    assert!(!f.const_value(f.find_value("scale").unwrap()).unwrap().is_blob());
    assert_eq!(package.bytes_read(), 32);
    let names: Vec<&str> = f.interface().inputs.iter().map(|i| i.name.as_str()).collect();
    assert_eq!(names, ["x"]);
    assert_eq!(f.str(f.producer(f.outputs()[0]).unwrap(), "name"), Some("y"));
    assert_eq!(package.program().metadata().author, "nobody");

    let second = dir.path().join("again.mlmodel");
    Package::new(built()).save(&second, &SaveOptions::default()).unwrap();
    let model = fs::read(out.join("Data/com.apple.CoreML/model.mlmodel")).unwrap();
    assert_eq!(fs::read(second).unwrap(), model, "equal programs give equal bytes");
    assert!(dir.path().join("weights/weight.bin").is_file());
}

/// A disk that fails once it has written a number of bytes, or at a numbered step.
struct Failing {
    bytes: Cell<u64>,
    steps: Cell<u64>,
    exchange: bool,
}

impl Failing {
    fn after_bytes(n: u64) -> Failing {
        Failing { bytes: Cell::new(n), steps: Cell::new(u64::MAX), exchange: true }
    }

    fn step(&self) -> io::Result<()> {
        match self.steps.get().checked_sub(1) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => Err(io::Error::other("step failed")),
        }
    }

    fn take(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let left = self.bytes.get();
        if (bytes.len() as u64) <= left {
            self.bytes.set(left - bytes.len() as u64);
            return Ok(());
        }
        self.bytes.set(0);
        fs::write(path, &bytes[..left as usize])?;
        Err(io::ErrorKind::StorageFull.into())
    }
}

impl Disk for Failing {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        Os.create_dir(path)
    }
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.step()?;
        self.take(path, bytes)?;
        Os.write(path, bytes)
    }
    fn copy(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        self.take(to, &fs::read(from)?)?;
        Os.copy(from, to)
    }
    fn link(&self, text: &Path, at: &Path) -> io::Result<()> {
        self.step()?;
        Os.link(text, at)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.step()?;
        Os.sync_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step()?;
        Os.rename(from, to)
    }
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        self.step()?;
        match self.exchange {
            true => Os.exchange(a, b),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

/// Every file and link under a directory with its content.
fn listing(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let kind = path.symlink_metadata().unwrap();
            let content = match (kind.is_symlink(), kind.is_dir()) {
                (true, _) => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                (_, true) => {
                    todo.push(path.clone());
                    Vec::new()
                }
                _ => fs::read(&path).unwrap(),
            };
            out.insert(path.strip_prefix(dir).unwrap().to_owned(), content);
        }
    }
    out
}

fn edited(name: &str) -> Package {
    let mut package = Package::open(fixture(name)).unwrap();
    let f = &mut package.program_mut().functions_mut()[0];
    let op = first_op(f, "matmul");
    let v = f.op(op).results()[0];
    f.rename(v, "renamed".into());
    package
}

/// Ends of the records in the files that a save writes, in the order it writes them.
fn boundaries(package: &Package) -> Vec<u64> {
    let home = package.home.as_ref().unwrap();
    let model = package.model_bytes().unwrap();
    let mut out = Vec::new();
    let mut at = 0;
    let weights = fs::read(home.place.root.join("Data/com.apple.CoreML/weights/weight.bin")).unwrap();
    out.extend(
        (0..weights.len() as u64).step_by(64).filter(|i| weights[*i as usize..].starts_with(&[0xef, 0xbe, 0xad, 0xde])),
    );
    at += weights.len() as u64;
    let manifest = fs::metadata(home.place.root.join(MANIFEST)).unwrap().len();
    out.extend([at, at + manifest - 1, at + manifest]);
    at += manifest;
    let mut end = 0;
    for op in op_bytes(&model, package.program().main().unwrap().name()) {
        let found = model[end..].windows(op.1.len()).position(|w| w == op.1).unwrap();
        end += found + op.1.len();
        out.push(at + end as u64);
    }
    out.push(at + model.len() as u64 - 1);
    out
}

#[test]
fn a_disk_that_fills_up_leaves_the_target_as_it_was() {
    let package = edited("rep_stack");
    let points = boundaries(&package);
    assert!(points.len() > 50);
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out.mlpackage");
    let options = SaveOptions::overwrite(Overwrite::Force);
    for &n in &points {
        save::save(&package, &target, &options, &Failing::after_bytes(n)).unwrap_err();
        assert!(listing(dir.path()).is_empty(), "after {n} bytes nothing is left");
    }
    Package::open(fixture("rep_stack")).unwrap().save(&target, &options).unwrap();
    let before = listing(dir.path());
    for &n in &points {
        save::save(&package, &target, &options, &Failing::after_bytes(n)).unwrap_err();
        assert!(listing(dir.path()) == before, "after {n} bytes the old package is there");
    }
    save::save(&package, &target, &options, &Failing::after_bytes(u64::MAX)).unwrap();
    assert!(listing(dir.path()) != before);
}

#[test]
fn any_step_that_fails_leaves_the_target_as_it_was() {
    let package = edited("rep_stack");
    let options = SaveOptions::overwrite(Overwrite::Force);
    for file in ["out.mlpackage", "out.mlmodel"] {
        for (exists, exchange) in [(false, true), (true, true), (true, false)] {
            let dir = tempfile::tempdir().unwrap();
            let target = dir.path().join(file);
            if exists {
                Package::open(fixture("rep_stack")).unwrap().save(&target, &options).unwrap();
            }
            let before = listing(dir.path());
            let mut steps = 0;
            loop {
                let disk = Failing { bytes: Cell::new(u64::MAX), steps: Cell::new(steps), exchange };
                match save::save(&package, &target, &options, &disk) {
                    Ok(()) => break,
                    Err(_) => assert!(listing(dir.path()) == before, "{file}: step {steps}, exists {exists}"),
                }
                steps += 1;
            }
            assert!(steps > 5);
            let saved = Package::open(&target).unwrap();
            assert!(saved.program().functions()[0].has_name("renamed"));
            let want = if file == "out.mlmodel" { 2 } else { 1 };
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), want, "no scratch directory is left");
        }
    }
}

#[test]
fn an_interrupted_replacement_is_completed_or_rolled_back() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out.mlpackage");
    let backup = dir.path().join(".out.mlpackage.milopt-backup");
    let save =
        |name: &str, path: &Path| Package::open(fixture(name)).unwrap().save(path, &SaveOptions::default()).unwrap();
    save("rep_stack", &backup.with_file_name("old.mlpackage"));
    fs::rename(dir.path().join("old.mlpackage"), &backup).unwrap();
    let old = Package::open(&target).unwrap();
    assert!(!backup.exists(), "the old package is back");
    save("sdpa", &dir.path().join("new.mlpackage"));
    fs::rename(&target, &backup).unwrap();
    fs::rename(dir.path().join("new.mlpackage"), &target).unwrap();
    let new = Package::open(&target).unwrap();
    assert!(!backup.exists(), "the new package stays");
    assert_ne!(old.model_bytes().unwrap(), new.model_bytes().unwrap());
}

#[test]
fn a_function_from_elsewhere_is_encoded_whole() {
    let mut package = Package::open(fixture("rep_stack")).unwrap();
    let mut extra = Function::new("extra", "CoreML8");
    let ty: ValueType = TensorType::fixed(DType::F16, &[16]).into();
    let x = extra.add_input("x".into(), ty.clone());
    let spec = OpSpec {
        kind: "relu".into(),
        inputs: vec![("x".into(), vec![Operand::Value(x)])],
        attributes: vec![],
        results: vec![("y".into(), ty)],
    };
    let op = extra.insert_op(Place::End(extra.body()), spec);
    let y = extra.op(op).results()[0];
    extra.add_output(extra.body(), y);
    package.program_mut().add_function(extra);
    package.program_mut().set_default_function(Some("main".into()));
    let program = read(package.model_bytes().unwrap()).unwrap();
    assert_eq!(program.default_function().unwrap(), &"main");
    assert_eq!(program.functions().len(), 2);
    let original = Package::open(fixture("rep_stack")).unwrap();
    let f = program.function("main").unwrap();
    assert_eq!(f.interface(), original.program().main().unwrap().interface());
    assert_eq!(program.function("extra").unwrap().interface().outputs[0].name, "y");
}
