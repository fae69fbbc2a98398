use super::*;
use crate::ir::{DType, Operand, OpSpec, Place, TensorType, ValueId, ValueType};
use crate::opset::{Builder, program};

fn spec(kind: &str, inputs: Vec<(&str, ValueId)>, results: Vec<(&str, ValueType)>) -> OpSpec {
    OpSpec {
        kind: kind.into(),
        inputs: inputs.into_iter().map(|(n, v)| (n.into(), vec![Operand::Value(v)])).collect(),
        attributes: vec![],
        results: results.into_iter().map(|(n, ty)| (n.into(), ty)).collect(),
    }
}

fn ty(shape: &[u64]) -> ValueType {
    TensorType::fixed(DType::F16, shape).into()
}

/// A function `y = relu(x)`, its parts and the block.
fn relu() -> Function {
    let mut b = Builder::new("main", "CoreML8");
    let x = b.input("x", DType::F16, &[4]).unwrap();
    let y = b.relu(x).unwrap();
    b.finish(&[("y", y)]).unwrap()
}

fn edited(edit: impl FnOnce(&mut Function)) -> Program {
    let mut f = relu();
    edit(&mut f);
    program(vec![f]).unwrap()
}

/// Numbers of the violated invariants.
fn broken(result: Result<Verified<'_>, Violations>) -> Vec<u8> {
    result.map_or_else(|v| v.list().iter().map(|v| v.rule).collect(), |_| Vec::new())
}

#[test]
fn a_built_program_has_both_grades() {
    let p = program(vec![relu()]).unwrap();
    assert_eq!(structure(&p).unwrap().grade(), Grade::Structure);
    let verified = typed(&p).unwrap();
    assert_eq!(verified.grade(), Grade::Typed);
    assert_eq!(verified.functions().len(), 1);
}

#[test]
fn names_must_mean_the_values_that_are_used() {
    // A name defined twice is odd but reads back as the same graph while the first is no longer used.
    let odd = edited(|f| {
        let x = f.inputs()[0];
        let body = f.body();
        let first = f.ops(body).next().unwrap();
        f.insert_op(Place::Before(first), spec("relu", vec![("x", x)], vec![("y", ty(&[4]))]));
    });
    assert!(structure(&odd).is_ok());
    assert_eq!(broken(typed(&odd)), [9]);
    let wrong = edited(|f| {
        let (x, y, body) = (f.inputs()[0], f.outputs()[0], f.body());
        f.insert_op(Place::End(body), spec("relu", vec![("x", x)], vec![("x", ty(&[4]))]));
        f.insert_op(Place::End(body), spec("add", vec![("x", x), ("y", y)], vec![("z", ty(&[4]))]));
    });
    let violations = structure(&wrong).unwrap_err();
    assert_eq!(violations.to_string(), "V3: function `main`: add `z`: `x` means another value here");
}

#[test]
fn values_must_be_defined_before_they_are_used() {
    let p = edited(|f| {
        let (y, body) = (f.outputs()[0], f.body());
        let first = f.ops(body).next().unwrap();
        f.insert_op(Place::Before(first), spec("relu", vec![("x", y)], vec![("early", ty(&[4]))]));
    });
    assert_eq!(broken(structure(&p)), [3]);
    let inner = edited(|f| {
        let (x, body) = (f.inputs()[0], f.body());
        let cond = f.insert_op(Place::End(body), spec("cond", vec![("pred", x)], vec![]));
        let (yes, _) = (f.add_block(cond), f.add_block(cond));
        let op = f.insert_op(Place::End(yes), spec("relu", vec![("x", x)], vec![("inner", ty(&[4]))]));
        let v = f.op(op).results()[0];
        f.insert_op(Place::End(body), spec("relu", vec![("x", v)], vec![("outer", ty(&[4]))]));
    });
    assert_eq!(broken(structure(&inner)), [3], "a nested value is not visible outside");
}

#[test]
fn types_blocks_and_names_must_be_there() {
    let p = edited(|f| {
        let (x, body) = (f.inputs()[0], f.body());
        f.insert_op(Place::End(body), spec("relu", vec![("x", x)], vec![("", ValueType::Missing)]));
        f.insert_op(Place::End(body), spec("cond", vec![("pred", x)], vec![]));
    });
    assert_eq!(broken(structure(&p)), [2, 5, 6]);
}

#[test]
fn states_go_to_their_accessors_only() {
    let build = |kind: &str| {
        let mut b = Builder::new("main", "CoreML8");
        let s = b.state("cache", DType::F16, &[4]).unwrap();
        let y = b.read_state(s).unwrap();
        let mut f = b.finish(&[("y", y)]).unwrap();
        let body = f.body();
        f.insert_op(Place::End(body), spec(kind, vec![("x", s)], vec![("z", ty(&[4]))]));
        program(vec![f]).unwrap()
    };
    assert_eq!(broken(structure(&build("relu"))), [7]);
    assert!(structure(&build("state_op_of_tomorrow")).is_ok(), "nothing is known of an opaque op");
}

#[test]
fn the_interface_is_held_against_edited_functions() {
    let rename = |f: &mut Function| {
        let y = f.outputs()[0];
        f.rename(y, "z".into());
    };
    let p = edited(rename);
    let violations = structure(&p).unwrap_err();
    assert_eq!(violations.list().len(), 2);
    assert_eq!(violations.list()[0].to_string(), "V8: function `main`: output `z` is not in the description");
    let read = edited(|f| {
        rename(f);
        f.reset_revision();
    });
    assert!(structure(&read).is_ok(), "a file whose description disagrees can be copied");
    assert_eq!(broken(typed(&read)), [12, 12]);
}

#[test]
fn stored_types_must_agree_with_inference() {
    let p = edited(|f| {
        let y = f.outputs()[0];
        f.set_type(y, ty(&[5]));
    });
    assert!(structure(&p).is_ok());
    let violations = typed(&p).unwrap_err();
    let want = "V11: function `main`: relu `y`: `y` has type tensor<fp16, [5]>, inferred is tensor<fp16, [4]>";
    assert_eq!(violations.list()[0].to_string(), want);
    let p = edited(|f| {
        let (x, body) = (f.inputs()[0], f.body());
        f.insert_op(Place::End(body), spec("softmax", vec![("x", x), ("y", x)], vec![("z", ty(&[4]))]));
    });
    assert_eq!(broken(typed(&p)), [10]);
}
