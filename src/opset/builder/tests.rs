use super::*;

fn shape(f: &Function, v: ValueId) -> String {
    f.ty(v).to_string()
}

#[test]
fn results_are_typed_and_the_interface_is_filled() {
    let mut b = Builder::new("main", "CoreML8");
    let x = b.input("x", DType::F16, &[1, 4, 8]).unwrap();
    let w = Literal::floats(DType::F16, &[6, 8], &[0.0; 48]);
    let y = b.linear(x, w, None).unwrap();
    let parts = b.split(y, 3, -1).unwrap();
    let f = b.finish(&[("part", parts[1]), ("copy", parts[1]), ("same", x)]).unwrap();
    assert_eq!(f.outputs().len(), 3);
    assert_eq!(f.value(f.outputs()[0]).name(), &"part");
    assert_eq!(shape(&f, f.outputs()[0]), "tensor<fp16, [1, 4, 2]>");
    assert_eq!(f.op(f.producer(f.outputs()[1]).unwrap()).kind(), &"identity");
    assert_eq!(f.interface().output("same").unwrap().array().unwrap().shape, [1, 4, 8]);
    assert_eq!(f.revision(), 0);
    f.assert_uses_exact();
}

#[test]
fn unknown_sizes_are_carried_by_symbols() {
    let mut b = Builder::new("main", "CoreML8");
    let q_len = Size::Range { default: 1, lo: 1, hi: Some(16) };
    let x = b.flexible_input("x", DType::F16, &[1.into(), q_len, 128.into()]).unwrap();
    let heads = b.reshape(x, [1, -1, 8, 16]).unwrap();
    let q = b.transpose(heads, [0, 2, 1, -1]).unwrap();
    assert_eq!(shape(b.function(), q), "tensor<fp16, [1, 8, s0, 16]>");
    let flat = b.reshape(q, [-1, 16]).unwrap();
    assert_eq!(shape(b.function(), flat), "tensor<fp16, [8*s0, 16]>");
    let scores = b.matmul(q, q, false, true).unwrap();
    assert_eq!(shape(b.function(), scores), "tensor<fp16, [1, 8, s0, s0]>");
    let f = b.finish(&[("scores", scores)]).unwrap();
    assert!(f.interface().output("scores").unwrap().array().unwrap().shape.is_empty(), "no shape when not static");
}

#[test]
fn wrong_ops_are_taken_back() {
    let mut b = Builder::new("main", "CoreML8");
    let x = b.input("x", DType::F16, &[2, 3]).unwrap();
    let y = b.input("y", DType::F32, &[2, 3]).unwrap();
    let error = b.add(x, y).unwrap_err().to_string();
    assert_eq!(
        error,
        "function `main`: add `add`: parameter `y` has element type fp32, `x` has fp16: they must be equal"
    );
    assert!(b.function().ops(b.function().body()).next().is_none());
    assert!(matches!(b.op("non_maximum_suppression", []), Err(BuildError::Opaque { .. })));
    assert!(matches!(b.input("x", DType::F16, &[1]), Err(BuildError::NameTaken { .. })));
    assert!(matches!(b.input("z", DType::I16, &[1]), Err(BuildError::Feature { .. })));
    assert!(matches!(b.relu(ValueId::new(99)), Err(BuildError::Invisible { .. })));
}

#[test]
fn nested_blocks_see_outer_values_and_type_their_op() {
    let mut b = Builder::new("main", "CoreML8");
    let x = b.input("x", DType::F32, &[4]).unwrap();
    let n = b.input("n", DType::I32, &[1]).unwrap();
    let n = b.squeeze(n, [0]).unwrap();
    let pred = b.less(n, 3).unwrap();
    let one = |b: &mut Builder| b.float(DType::F32, 1.0);
    let picked = b
        .cond(
            pred,
            |b| {
                let one = one(b);
                Ok(vec![b.add(x, one)?])
            },
            |b| Ok(vec![b.relu(x)?]),
        )
        .unwrap();
    assert_eq!(shape(b.function(), picked[0]), "tensor<fp32, [4]>");
    let looped = b
        .while_loop(
            &[n, picked[0]],
            |b, vars| b.less(vars[0], 10),
            |b, vars| {
                let next = b.add(vars[0], 1)?;
                let twice = b.add(vars[1], vars[1])?;
                Ok(vec![next, twice])
            },
        )
        .unwrap();
    let blocks = b.function().op(b.function().producer(looped[0]).unwrap()).blocks().to_vec();
    let names =
        |b: &Builder, block| b.f.block(block).inputs().iter().map(|&v| b.f.value(v).name().clone()).collect::<Vec<_>>();
    assert_eq!(names(&b, blocks[0]), names(&b, blocks[1]), "both blocks name their inputs alike");
    let inner = b.f.block(blocks[1]).outputs()[1];
    assert!(matches!(b.relu(inner), Err(BuildError::Invisible { .. })));
    let ragged = b.cond(pred, |_| Ok(vec![x]), |_| Ok(vec![]));
    assert!(matches!(ragged, Err(BuildError::Infer(_))));
    let f = b.finish(&[("y", looped[1])]).unwrap();
    f.assert_uses_exact();
}

#[test]
fn programs_take_their_form_from_their_functions() {
    let f = |name: &str, opset: &str| {
        let mut b = Builder::new(name, opset);
        let x = b.input("x", DType::F32, &[4]).unwrap();
        let y = b.relu(x).unwrap();
        b.finish(&[("y", y)]).unwrap()
    };
    let single = program(vec![f("main", "CoreML5")]).unwrap();
    assert_eq!((single.specification_version(), single.default_function()), (6, None));
    let two = program(vec![f("prefill", "CoreML8"), f("decode", "CoreML8")]).unwrap();
    assert_eq!((two.specification_version(), two.default_function().unwrap().as_str()), (9, "prefill"));
    assert!(program(vec![f("a", "CoreML8"), f("b", "CoreML7")]).is_err());
    assert!(program(vec![f("a", "CoreML7")]).is_err());
    assert!(program(vec![]).is_err());
}

#[test]
fn constexpr_parameters_take_the_form_of_their_opset() {
    let mut b = Builder::new("main", "CoreML8");
    let data = Literal::bytes(crate::ir::TensorType::fixed(DType::I8, &[2, 4]), vec![0u8; 8]);
    let scale = Literal::floats(DType::F16, &[2, 1], &[0.5, 2.0]);
    let w = b.op("constexpr_blockwise_shift_scale", [("data", data.clone().into()), ("scale", scale.into())]).unwrap();
    assert_eq!(shape(b.function(), w), "tensor<fp16, [2, 4]>");
    let op = b.f.producer(w).unwrap();
    assert!(matches!(b.f.op(op).param("data"), [Operand::Literal(_)]));
    let one = Literal::floats(DType::F16, &[], &[1.0]);
    let zero = Literal::bytes(crate::ir::TensorType::fixed(DType::I8, &[]), vec![0u8]);
    let params = [("quantized_data", data.into()), ("scale", one.into()), ("zero_point", zero.into())];
    let old = b.op("constexpr_affine_dequantize", params.into_iter().chain([("axis", 0.into())])).unwrap();
    let op = b.f.producer(old).unwrap();
    assert!(b.f.op(op).operands().is_empty() && b.f.has_param(op, "scale"));
}
