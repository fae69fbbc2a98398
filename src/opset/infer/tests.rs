//! Inference against types that coremltools computed.
//!
//! Lines of `tests/data/*.txt` are ops: opset, kind, parameters (`@` marks attributes, `|` separates the bindings of a
//! tuple, `:` introduces constant content, `...` content that is not given), `->`, result types. `stored_types.txt` has
//! the distinct ops of real decoder packages, `inferred_types.txt` has ops built with coremltools 9.0, one or more of
//! every group.

use crate::ir::{DType, Dim, Function, Literal, LiteralData, OpSpec, Operand, Place, TensorType, ValueType, pack_ints};
use crate::opset::{agrees, infer, slip};

use super::{Guess, guess};

struct Line {
    f: Function,
    op: crate::ir::OpId,
    stored: Vec<ValueType>,
}

fn parse_type(f: &mut Function, text: &str) -> ValueType {
    if let Some(wrapped) = text.strip_prefix("state:") {
        return ValueType::State(parse_type(f, wrapped).as_tensor().unwrap().clone());
    }
    let (dtype, dims) = text.strip_suffix(']').unwrap().split_once('[').unwrap();
    let dims = dims.split(',').filter(|d| !d.is_empty());
    let shape: Vec<Dim> = dims
        .map(|d| match d {
            "?" => f.fresh_dim(),
            n => Dim::known(n.parse().unwrap()),
        })
        .collect();
    TensorType::new(DType::from_name(dtype).unwrap(), shape).into()
}

fn parse_literal(f: &mut Function, ty: &str, content: &str) -> Literal {
    let ty = parse_type(f, ty);
    let t = ty.as_tensor().unwrap().clone();
    match (content, t.dtype) {
        ("...", _) => Literal::blob(t, "missing.bin", 64),
        (text, DType::String) => Literal { ty, data: LiteralData::Strings([text.into()].into()) },
        (ints, dtype) => {
            let ints: Vec<i64> = ints.split(',').filter(|n| !n.is_empty()).map(|n| n.parse().unwrap()).collect();
            Literal::bytes(t, pack_ints(dtype, &ints))
        }
    }
}

fn operand(f: &mut Function, text: &str) -> Operand {
    let (ty, content) = match text.strip_prefix("state:") {
        Some(_) => (text, None),
        None => text.split_once(':').map_or((text, None), |(ty, content)| (ty, Some(content))),
    };
    match content {
        Some(content) => {
            let literal = parse_literal(f, ty, content);
            let (ty, val) = (literal.ty.clone(), f.intern(literal));
            let name = f.fresh_name("c");
            let spec = OpSpec {
                kind: "const".into(),
                inputs: vec![],
                attributes: vec![("val".into(), val)],
                results: vec![(name, ty)],
            };
            let op = f.insert_op(Place::End(f.body()), spec);
            Operand::Value(f.op(op).results()[0])
        }
        None => {
            let (ty, name) = (parse_type(f, ty), f.fresh_name("x"));
            Operand::Value(f.add_input(name, ty))
        }
    }
}

fn parse(line: &str) -> Line {
    let (head, results) = line.split_once(" ->").unwrap();
    let mut words = head.split(' ');
    let mut f = Function::new("main", words.next().unwrap());
    let kind = words.next().unwrap();
    let (mut inputs, mut attributes) = (Vec::new(), Vec::new());
    for word in words {
        let (param, value) = word.split_once('=').unwrap();
        match param.strip_prefix('@') {
            Some(param) => {
                let (ty, content) = value.split_once(':').unwrap();
                let literal = parse_literal(&mut f, ty, content);
                attributes.push((param.into(), f.intern(literal)));
            }
            None => inputs.push((param.into(), value.split('|').map(|o| operand(&mut f, o)).collect())),
        }
    }
    let stored: Vec<ValueType> = results.split(' ').filter(|t| !t.is_empty()).map(|t| parse_type(&mut f, t)).collect();
    let names: Vec<_> = stored.iter().map(|_| f.fresh_name("r")).collect();
    let results = names.into_iter().zip(stored.iter().cloned()).collect();
    let spec = OpSpec { kind: kind.into(), inputs, attributes, results };
    let op = f.insert_op(Place::End(f.body()), spec);
    Line { f, op, stored }
}

/// How many known sizes of the results inference leaves open.
fn unproven(line: &Line) -> usize {
    let open = |(g, ty): (&Guess, &ValueType)| match (g, ty.as_tensor()) {
        (Guess::Tensor(_, dims), Some(t)) => {
            dims.iter().zip(&t.shape).filter(|(d, s)| d.is_none() && s.as_known().is_some()).count()
        }
        (Guess::Unknown, Some(_)) => 1,
        _ => 0,
    };
    guess(&line.f, line.op).unwrap().unwrap().iter().zip(&line.stored).map(open).sum()
}

/// Checks every line; answers the kinds of those with known sizes that inference does not prove.
fn check(text: &str) -> Vec<String> {
    let mut open = Vec::new();
    let mut wrong = Vec::new();
    for text in text.lines() {
        let line = parse(text);
        let inferred = match infer(&line.f, line.op) {
            Ok(Some(types)) => types,
            Ok(None) => panic!("no row: {text}"),
            Err(e) => {
                wrong.push(format!("{text}\n    {e}"));
                continue;
            }
        };
        assert_eq!(inferred.len(), line.stored.len(), "{text}");
        for (stored, inferred) in line.stored.iter().zip(&inferred) {
            if !agrees(stored, inferred) && slip(&line.f, line.op, stored, inferred).is_none() {
                wrong.push(format!("{text}\n    inferred {inferred}"));
            }
        }
        if unproven(&line) > 0 {
            open.push(line.f.op(line.op).kind().to_string());
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    open.sort();
    open.dedup();
    open
}

#[test]
fn inference_agrees_with_the_stored_types_of_real_packages() {
    // Shapes put together at run time have constant parts, which coremltools traces and inference does not.
    assert_eq!(check(include_str!("../../../tests/data/stored_types.txt")), ["reshape"]);
}

#[test]
fn inference_agrees_with_coremltools() {
    assert!(check(include_str!("../../../tests/data/inferred_types.txt")).is_empty());
}
