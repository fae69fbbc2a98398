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
    // Each line is one op, so that a shape put together at run time cannot be traced to its constant parts.
    assert_eq!(check(include_str!("../../../tests/data/stored_types.txt")), ["reshape"]);
}

#[test]
fn inference_agrees_with_coremltools() {
    assert!(check(include_str!("../../../tests/data/inferred_types.txt")).is_empty());
}

/// The error for a line without results' sizes mattering.
fn refusal(line: &str) -> String {
    let line = parse(line);
    infer(&line.f, line.op).unwrap_err().problem.to_string()
}

#[test]
fn wrong_ops_are_refused_with_the_parameter() {
    for (line, want) in [
        ("CoreML8 relu -> fp16[2]", "parameter `x` is missing"),
        ("CoreML8 relu x=fp16[2] y=fp16[2] -> fp16[2]", "there is no parameter `y`"),
        (
            "CoreML5 gather x=fp16[2] indices=int32[1] batch_dims=int32[]:0 -> fp16[1]",
            "there is no parameter `batch_dims`",
        ),
        (
            "CoreML7 read_state input=state:fp16[2] -> fp16[2]",
            "opset CoreML7 does not have it, CoreML8 is the first that does",
        ),
        ("CoreML8 relu x=fp16[2]|fp16[2] -> fp16[2]", "parameter `x` has 2 bindings, one is needed"),
        ("CoreML8 transpose x=fp16[2,3] perm=int32[2] -> fp16[3,2]", "parameter `perm` must be constant"),
        (
            "CoreML8 transpose x=fp16[2,3] perm=int32[2]:0,0 -> fp16[3,2]",
            "parameter `perm`: [0, 0] is no permutation of 2 axes",
        ),
        (
            "CoreML8 equal x=bool[2] y=bool[2] -> bool[2]",
            "parameter `x` has element type bool, which is not among fp16, fp32, int32",
        ),
        (
            "CoreML8 add x=fp16[2] y=fp32[2] -> fp16[2]",
            "parameter `y` has element type fp32, `x` has fp16: they must be equal",
        ),
        ("CoreML8 add x=fp16[2] y=fp16[3] -> fp16[2]", "shapes [2] and [3] do not broadcast"),
        (
            "CoreML8 max_pool x=fp16[1,1,5] kernel_sizes=int32[1]:2 pad_type=string[]:same ceil_mode=bool[]:1 -> fp16[1,1,5]",
            "parameter `ceil_mode`: needs at most two spatial axes and even, explicit padding",
        ),
        (
            "CoreML8 l2_pool x=fp16[1,1,2,2,2] kernel_sizes=int32[3]:1,1,1 pad_type=string[]:valid -> fp16[1,1,2,2,2]",
            "parameter `x` has rank 5, 3 to 4 are needed",
        ),
        (
            "CoreML8 avg_pool x=fp16[1,1,2] kernel_sizes=int32[1]:3 pad_type=string[]:valid -> fp16[1,1,1]",
            "a window of 3 does not fit an axis of 2",
        ),
        (
            "CoreML8 pixel_shuffle x=fp16[1,6,2,2] upscale_factor=int32[]:2 -> fp16[1,1,4,4]",
            "parameter `upscale_factor`: an axis of 6 is no multiple of 4",
        ),
        (
            "CoreML8 crop x=fp16[1,2,2] crop_height=int32[2]:1,2 crop_width=int32[2]:0,0 -> fp16[1,0,2]",
            "size 2 cannot grow by -3",
        ),
        (
            "CoreML8 resize x=fp16[2,2] shape=int32[1]:3 resized_dims=uint32[]:2 -> fp16[2,3]",
            "parameter `resized_dims`: does not go with 1 sizes and rank 2",
        ),
        (
            "CoreML8 rnn x=fp16[1,2,3] initial_h=fp16[2,5] weight_ih=fp16[5,3]:... weight_hh=fp16[5,5]:... direction=string[]:bidirectional -> fp16[1,2,5] fp16[2,5]",
            "parameter `direction`: `bidirectional` is no direction",
        ),
        (
            "CoreML8 softmax x=fp16[2,3] axis=int32[]:2 -> fp16[2,3]",
            "parameter `axis`: axis 2 does not exist at rank 2",
        ),
        (
            "CoreML8 cumsum x=fp16[2,3] axis=int32[]:-2 -> fp16[2,3]",
            "parameter `axis`: axis -2 does not exist at rank 2",
        ),
        (
            "CoreML8 reshape x=fp16[2,3] shape=int32[1]:5 -> fp16[5]",
            "parameter `shape`: 6 elements do not fill a shape of 5",
        ),
        (
            "CoreML8 reshape x=fp16[2,3] shape=int32[2]:-1,4 -> fp16[1,4]",
            "parameter `shape`: 6 elements do not fill a shape of 4",
        ),
        ("CoreML8 reshape x=fp16[2,3] shape=int32[2]:-1,-1 -> fp16[2,3]", "parameter `shape`: has more than one -1"),
        (
            "CoreML6 reshape x=fp16[2,3,4] shape=int32[2]:0,-1 -> fp16[2,12]",
            "parameter `shape`: a 0 needs as many entries as `x` has axes (3), there are 2",
        ),
        ("CoreML8 tile x=fp16[2] reps=int32[1]:0 -> fp16[0]", "parameter `reps`: 0 is not positive"),
        ("CoreML8 tile x=fp16[2] reps=int32[2]:1,1 -> fp16[2]", "parameter `reps`: has 2 elements, 1 are needed"),
        (
            "CoreML8 concat values=fp16[2,3]|fp16[3,3] axis=int32[]:1 -> fp16[2,6]",
            "parameter `values`: shapes [2, ?] and [3, 3] do not go together",
        ),
        (
            "CoreML8 concat values=fp16[2]|fp32[2] axis=int32[]:0 -> fp16[4]",
            "parameter `values`: element types fp16 and fp32 differ",
        ),
        (
            "CoreML8 split x=fp16[5] num_splits=int32[]:2 axis=int32[]:0 -> fp16[2] fp16[3]",
            "parameter `num_splits`: 2 does not divide 5",
        ),
        ("CoreML8 split x=fp16[4] num_splits=int32[]:2 axis=int32[]:0 -> fp16[2]", "has 1 results, 2 are computed"),
        (
            "CoreML8 slice_by_index x=fp16[6] begin=int32[1]:3 end=int32[1]:2 -> fp16[0]",
            "parameter `end`: 2 lies on the wrong side of begin, 3",
        ),
        (
            "CoreML8 slice_update x=fp16[6] update=fp16[3] begin=int32[1]:0 end=int32[1]:2 -> fp16[6]",
            "parameter `update`: has shape [3], the slice has [2]",
        ),
        ("CoreML8 matmul x=fp16[2,3] y=fp16[4,5] -> fp16[2,5]", "the contracted sizes of [2, 3] and [4, 5] differ"),
        (
            "CoreML8 scaled_dot_product_attention query=fp16[1,8,1,4] key=fp16[1,2,6,4] value=fp16[1,2,6,4] -> fp16[1,8,1,4]",
            "parameter `key`: [1, 2, 6, 4] does not go with [1, 8, 1, 4]",
        ),
        (
            "CoreML8 write_state input=state:fp16[2] data=fp16[3] ->",
            "parameter `data`: fp16 [3] is not the state's tensor<fp16, [2]>",
        ),
        (
            "CoreML8 constexpr_blockwise_shift_scale data=int4[6,4]:... scale=fp16[4,4]:... -> fp16[6,4]",
            "parameter `scale`: [4, 4] does not divide [6, 4] into blocks",
        ),
        ("CoreML8 tile x=fp16[18446744073709551615] reps=int32[1]:2 -> fp16[1]", "a size overflows"),
    ] {
        assert_eq!(refusal(line), want, "{line}");
    }
}

/// The inferred type of the first result.
fn inferred(line: &str) -> String {
    let line = parse(line);
    infer(&line.f, line.op).unwrap().unwrap()[0].to_string()
}

#[test]
fn worked_examples_of_slices_and_reshapes() {
    for (line, want) in [
        ("CoreML7 reshape x=fp16[2,3,4] shape=int32[2]:0,-1 -> fp16[3,8]", "tensor<fp16, [3, 8]>"),
        ("CoreML7 reshape x=fp16[2,50] shape=int32[4]:1,0,-1,0 -> fp16[1,1,2,50]", "tensor<fp16, [1, 1, 2, 50]>"),
        ("CoreML5 reshape x=fp16[2,3,4] shape=int32[3]:0,-1,2 -> fp16[2,6,2]", "tensor<fp16, [2, 6, 2]>"),
        ("CoreML8 expand_dims x=fp16[3,4] axes=int32[2]:-1,0 -> fp16[1,3,4,1]", "tensor<fp16, [1, 3, 4, 1]>"),
        // numpy: arange(6)[::-2] has 3 elements, [4:1:-1] has 3, [-1:] has 1, [1:100] has 5, [2:2] has none.
        (
            "CoreML8 slice_by_index x=fp16[6] begin=int32[1]:0 end=int32[1]:0 stride=int32[1]:-2 begin_mask=bool[1]:1 end_mask=bool[1]:1 -> fp16[3]",
            "tensor<fp16, [3]>",
        ),
        (
            "CoreML8 slice_by_index x=fp16[6] begin=int32[1]:4 end=int32[1]:1 stride=int32[1]:-1 -> fp16[3]",
            "tensor<fp16, [3]>",
        ),
        (
            "CoreML8 slice_by_index x=fp16[6] begin=int32[1]:-1 end=int32[1]:0 end_mask=bool[1]:1 -> fp16[1]",
            "tensor<fp16, [1]>",
        ),
        ("CoreML8 slice_by_index x=fp16[6] begin=int32[1]:1 end=int32[1]:100 -> fp16[5]", "tensor<fp16, [5]>"),
        ("CoreML8 slice_by_index x=fp16[6] begin=int32[1]:2 end=int32[1]:2 -> fp16[0]", "tensor<fp16, [0]>"),
        (
            "CoreML8 slice_by_index x=fp16[6,2] begin=int32[2]:-2,0 end=int32[2]:0,0 end_mask=bool[2]:0,1 squeeze_mask=bool[2]:1,0 -> fp16[2]",
            "tensor<fp16, [2]>",
        ),
        ("CoreML8 slice_by_size x=fp16[6] begin=int32[1]:2 size=int32[1]:-1 -> fp16[4]", "tensor<fp16, [4]>"),
        ("CoreML8 range_1d start=int32[]:1 end=int32[]:8 step=int32[]:3 -> int32[3]", "tensor<int32, [3]>"),
        ("CoreML8 reduce_sum x=fp16[2,3] axes=int32[0]: -> fp16[2,3]", "tensor<fp16, [2, 3]>"),
        ("CoreML8 matmul x=fp16[3] y=fp16[2,3,4] -> fp16[2,4]", "tensor<fp16, [2, 4]>"),
        ("CoreML8 non_maximum_suppression x=fp16[3] -> fp16[3]", "opaque"),
    ] {
        let have = match line.contains("non_maximum_suppression") {
            true => parse(line),
            false => {
                assert_eq!(inferred(line), want, "{line}");
                continue;
            }
        };
        assert_eq!(infer(&have.f, have.op).unwrap(), None);
    }
}

#[test]
fn run_time_and_unreadable_parameters_leave_sizes_to_the_stored_type() {
    // The bytes of `shape` are missing; the rank is known from its type.
    let line = parse("CoreML8 reshape x=fp16[2,3] shape=int32[2]:... -> fp16[?,6]");
    assert_eq!(guess(&line.f, line.op).unwrap().unwrap(), [Guess::Tensor(DType::F16, super::dims::unknown(2))]);
    assert_eq!(infer(&line.f, line.op).unwrap().unwrap()[0].to_string(), "tensor<fp16, [s0, 6]>");
    // A stored type of another rank is of no use.
    assert_eq!(inferred("CoreML8 reshape x=fp16[2,3] shape=int32[2] -> fp16[6]"), "tensor<fp16, [*]>");
    assert_eq!(inferred("CoreML8 tile x=fp16[2,3] reps=int32[2] -> fp16[?,?]"), "tensor<fp16, [s0, s1]>");
    let begin = "CoreML8 slice_by_index x=fp16[1,6,4] begin=int32[3] end=int32[3] begin_mask=bool[3]:0,0,1 end_mask=bool[3]:0,0,1";
    assert_eq!(inferred(&format!("{begin} -> fp16[1,?,4]")), "tensor<fp16, [1, s0, 4]>");
}
