//! What needs to look inside: forced re-encoding and edits through the primitive door.

mod by_hand;
mod disks;
#[path = "../../../tests/support/files.rs"]
mod files;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use prost::Message;

use super::encode::encode_all;
use super::source::ModelFile;
use super::*;
use crate::ir::{DType, Function, Literal, Name, OpId, OpSpec, Operand, Place, TensorType, ValueType};
use crate::proto::mil;
use crate::proto::model::{ML_PROGRAM, Model};
use crate::proto::wire;
use crate::verify;
use files::{fixture, fixtures, listing};

/// Checks the program and saves it.
fn save(package: &Package, path: impl AsRef<Path>, options: &SaveOptions) -> Result<(), PackageError> {
    package.save(path, verify::structure(package.program()).unwrap(), options)
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
        let has_blobs = program.functions.iter().any(|f| !f.all_ops().iter().all(|&op| blobs_of(f, op).is_empty()));
        match encode_all(&program, None, None) {
            Ok(_) => assert!(!has_blobs),
            Err(e) => assert!(has_blobs && e.to_string().ends_with("refers to weights of another package"), "{e}"),
        }
    }
}

fn blobs_of(f: &Function, op: OpId) -> Vec<&Literal> {
    let bound = f.op(op).operands().iter().filter_map(|o| f.operand_literal(o));
    bound.chain(f.op(op).attributes().map(|(_, l)| f.literal(l))).filter(|l| l.is_blob()).collect()
}

/// A program without a source gets all its weights copied into a new file.
#[test]
fn a_program_from_elsewhere_becomes_a_whole_package() {
    for path in fixtures() {
        let package = Package::open(&path).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out.mlpackage");
        save(&Package::new(package.program().clone()), &out, &SaveOptions::default()).unwrap();
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

fn read(model: Vec<u8>) -> Result<Program, DecodeError> {
    decode::decode(model.into(), Arc::new(crate::ir::NoWeights))
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
    save(&Package::new(built()), &out, &SaveOptions::default()).unwrap();
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
    save(&Package::new(built()), &second, &SaveOptions::default()).unwrap();
    let model = fs::read(out.join("Data/com.apple.CoreML/model.mlmodel")).unwrap();
    assert_eq!(fs::read(second).unwrap(), model, "equal programs give equal bytes");
    assert!(dir.path().join("weights/weight.bin").is_file());
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
