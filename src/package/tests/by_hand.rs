//! Models written by hand, field by field: what is odd about them is kept or refused.

use super::*;

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
