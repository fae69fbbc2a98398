//! Snapshots of both spellings, Apple's own spelling, errors, and the round trip as a law.

use insta::assert_snapshot;
use proptest::prelude::*;

use super::*;
use crate::ir::*;

fn full(p: &Program) -> String {
    PrintOptions { full: true, elide_above: None }.program(p)
}

/// An op, its name attribute included.
fn op(
    f: &mut Function,
    place: Place,
    kind: &str,
    inputs: &[(&str, Vec<Operand>)],
    result: &str,
    ty: ValueType,
) -> OpId {
    let name = f.intern(Literal::string(result));
    let inputs = inputs.iter().map(|(n, o)| (Name::from(*n), o.clone())).collect();
    let attributes = vec![("name".into(), name)];
    f.insert_op(place, OpSpec { kind: kind.into(), inputs, attributes, results: vec![(result.into(), ty)] })
}

fn constant(f: &mut Function, name: &str, literal: Literal) -> Operand {
    let (ty, val) = (literal.ty.clone(), f.intern(literal));
    let attributes = vec![("name".into(), f.intern(Literal::string(name))), ("val".into(), val)];
    let results = vec![(name.into(), ty)];
    let op = f.insert_op(Place::End(f.body()), OpSpec { kind: "const".into(), inputs: vec![], attributes, results });
    Operand::Value(f.op(op).results()[0])
}

fn f16(shape: &[u64]) -> ValueType {
    TensorType::fixed(DType::F16, shape).into()
}

/// A state, a weight, a nested block, an unknown size, an odd name and constants of several types.
fn sample() -> Program {
    let mut f = Function::new("main", "CoreML8");
    let n = Dim::unknown(f.add_symbol(SymbolRange { lo: 1, hi: Some(512) }));
    let rows = ValueType::from(TensorType::new(DType::F16, [1.into(), n, 4.into()]));
    let x = f.add_input("x".into(), rows.clone());
    let cache = f.add_input("3:cache".into(), ValueType::State(TensorType::fixed(DType::F16, &[2, 4])));
    let body = f.body();
    let end = Place::End(body);
    let w = constant(
        &mut f,
        "w",
        Literal::blob(TensorType::fixed(DType::F16, &[4, 4]), "@model_path/weights/weight.bin", 64),
    );
    let no = constant(&mut f, "no", Literal::bool(false));
    let half = constant(&mut f, "half", Literal::floats(DType::F16, &[], &[0.5]));
    let mm =
        [("x", vec![Operand::Value(x)]), ("y", vec![w]), ("transpose_x", vec![no.clone()]), ("transpose_y", vec![no])];
    let y = op(&mut f, end, "matmul", &mm, "y", rows.clone());
    let y = f.op(y).results()[0];
    let r = op(&mut f, end, "read_state", &[("input", vec![Operand::Value(cache)])], "r", f16(&[2, 4]));
    let r = f.op(r).results()[0];
    let axis = Operand::Literal(f.intern(Literal::int(0)));
    let cat = op(
        &mut f,
        end,
        "concat",
        &[("values", vec![Operand::Value(r), Operand::Value(r)]), ("axis", vec![axis])],
        "true",
        f16(&[4, 4]),
    );
    let cat = f.op(cat).results()[0];
    f.insert_op(
        end,
        OpSpec {
            kind: "write_state".into(),
            inputs: vec![("input".into(), vec![Operand::Value(cache)]), ("data".into(), vec![Operand::Value(r)])],
            attributes: vec![],
            results: vec![],
        },
    );
    let pred = constant(&mut f, "pred", Literal::bool(true));
    let branch = op(&mut f, end, "cond", &[("pred", vec![pred])], "z", rows.clone());
    for scaled in [true, false] {
        let b = f.add_block(branch);
        let out = if scaled {
            let inputs = [("x", vec![Operand::Value(y)]), ("y", vec![half.clone()])];
            let scaled = op(&mut f, Place::End(b), "mul", &inputs, "scaled", rows.clone());
            f.op(scaled).results()[0]
        } else {
            y
        };
        f.add_output(b, out);
    }
    let z = f.op(branch).results()[0];
    f.add_output(body, z);
    f.add_output(body, cat);
    let mut p = Program::new(9);
    p.add_function(f);
    p
}

#[test]
fn short_spelling() {
    assert_snapshot!(print_program(&sample()), @r#"
    program(1.3) [specificationVersion = 9] {
      func main<CoreML8>(tensor<fp16, [1, s0, 4]> x, state<tensor<fp16, [2, 4]>> `3:cache`) where 1 <= s0 <= 512 {
        tensor<fp16, [4, 4]> w = const(val = BLOBFILE("@model_path/weights/weight.bin", 64));
        tensor<fp16, [1, s0, 4]> y = matmul(x = x, y = w, transpose_x = false, transpose_y = false);
        tensor<fp16, [2, 4]> r = read_state(input = `3:cache`);
        tensor<fp16, [4, 4]> `true` = concat(values = (r, r), axis = 0);
        write_state(data = r, input = `3:cache`);
        tensor<fp16, [1, s0, 4]> z = cond(pred = true) block() {
          tensor<fp16, [1, s0, 4]> scaled = mul(x = y, y = fp16(0.5));
        } -> (scaled), block() {
        } -> (y);
      } -> (z, `true`);
    }
    "#);
}

#[test]
fn full_spelling() {
    assert_snapshot!(full(&sample()), @r#"
    program(1.3) [specificationVersion = 9] {
      func main<CoreML8>(tensor<fp16, [1, s0, 4]> x, state<tensor<fp16, [2, 4]>> `3:cache`) where 1 <= s0 <= 512 {
        tensor<fp16, [4, 4]> w = const(val = BLOBFILE("@model_path/weights/weight.bin", 64))[name = "w"];
        bool no = const(val = false)[name = "no"];
        fp16 half = const(val = 0.5)[name = "half"];
        tensor<fp16, [1, s0, 4]> y = matmul(transpose_x = no, transpose_y = no, x = x, y = w)[name = "y"];
        tensor<fp16, [2, 4]> r = read_state(input = `3:cache`)[name = "r"];
        tensor<fp16, [4, 4]> `true` = concat(values = (r, r), axis = 0)[name = "true"];
        write_state(data = r, input = `3:cache`);
        bool pred = const(val = true)[name = "pred"];
        tensor<fp16, [1, s0, 4]> z = cond(pred = pred)[name = "z"] block() {
          tensor<fp16, [1, s0, 4]> scaled = mul(x = y, y = half)[name = "scaled"];
        } -> (scaled), block() {
        } -> (y);
      } -> (z, `true`);
    }
    "#);
}

#[test]
fn one_op() {
    let p = sample();
    let f = &p.functions()[0];
    let y = f.producer(f.find_value("y").unwrap()).unwrap();
    assert_snapshot!(print_op(f, y), @"tensor<fp16, [1, s0, 4]> y = matmul(x = x, y = w, transpose_x = false, transpose_y = false)");
}

#[test]
fn full_round_trip_is_exact_and_short_is_stable() {
    let p = sample();
    let q = parse(&full(&p)).unwrap();
    assert_same(&p, &q);
    let short = print_program(&p);
    let q = parse(&short).unwrap();
    assert_eq!(print_program(&q), short);
    let f = &q.functions()[0];
    let y = f.producer(f.find_value("y").unwrap()).unwrap();
    assert_eq!(f.bool(y, "transpose_x"), Some(false), "the constant came back as a binding");
    assert!(q.is_unedited());
    let x = f.interface().input("x").unwrap().array().unwrap();
    assert_eq!(
        (x.shape.as_slice(), &x.flexibility),
        (&[1, 1, 4][..], &Flexibility::Ranges(vec![(1, Some(1)), (1, Some(512)), (4, Some(4))]))
    );
    assert_eq!(f.interface().states[0].name, "3:cache");
}

#[test]
fn text_of_compiled_models() {
    let text = r#"
program(1.0)
[buildInfo = dict<tensor<string, []>, tensor<string, []>>({{"coremlc-version", "1877.40.3"}, {"coremltools-version", "7.1"}})]
{
    func main<ios16>(tensor<fp16, [1, ?]> x) [FlexibleShapeInformation = tuple<tuple<tensor<string, []>, dict<tensor<string, []>, tensor<int32, [?]>>>>((("DefaultShapes", {{"x", bytes("")}})))] {
            tensor<fp16, [2, 2]> w = const()[name = tensor<string, []>("w"), val = tensor<fp16, [2, 2]>(BLOBFILE(path = tensor<string, []>("@model_path/weights/weight.bin"), offset = tensor<uint64, []>(64)))];
            tensor<fp16, []> c = const()[name = tensor<string, []>("c"), val = tensor<fp16, []>(0x1.8p+1)];
            tensor<int32, [2, 1]> m = const()[val = tensor<int32, [2, 1]>([[1], [-2]])];
            tensor<fp16, [1, ?]> a = mul(x = x, y = c)[name = tensor<string, []>("a")];
            tensor<fp16, [1, ?]> b, tensor<fp16, [1, ?]> d = two(values = (a, x), at = m)[name = string("b")];
        } -> (b, d);
}"#;
    let p = parse(text).unwrap();
    assert_snapshot!(print_program(&p), @r#"
    program(1.0) [specificationVersion = 7] {
      func main<CoreML6>(tensor<fp16, [1, s0]> x) {
        tensor<fp16, [2, 2]> w = const(val = BLOBFILE("@model_path/weights/weight.bin", 64));
        tensor<int32, [2, 1]> m = const(val = [[1], [-2]]);
        tensor<fp16, [1, s2]> a = mul(x = x, y = fp16(3.0));
        tensor<fp16, [1, s3]> b, tensor<fp16, [1, s4]> d = two(at = m, values = (a, x));
      } -> (b, d);
    }
    "#);
    assert_same(&p, &parse(&full(&p)).unwrap());
}

#[test]
fn odd_literals() {
    let text = r#"program(1.3) {
      func main<CoreML8>() {
        list<string, 2> l = const(val = ["a\n\"", "b"]);
        dict<int64, fp32> d = const(val = {{1, 1.5}, {-2, nan(0x7fc00001)}});
        tuple<int32, ?> t = const(val = (7, string("x")));
        tensor<int4, [5]> q = const(val = [1, -2, 7, -8, 3]);
        tensor<fp8e4m3fn, [3]> e = const(val = [448.0, -0.0, nan]);
        tensor<fp16, [3]> bad = const(val = bytes("003c"));
        tensor<string, []> s = const(val = strings("a", "b"));
        tensor<fp32, [0, 3]> z = const(val = []);
        ? missing = odd(a = ?(absent), b = fp32(inf), c = [true, false], d = tensor<uint64, [1]>([18446744073709551615]));
      } -> (l);
    }"#;
    let p = parse(text).unwrap();
    assert_snapshot!(print_program(&p), @r#"
    program(1.3) [specificationVersion = 9] {
      func main<CoreML8>() {
        list<string, 2> l = const(val = ["a\n\"", "b"]);
        dict<int64, fp32> d = const(val = {{1, 1.5}, {-2, nan(0x7fc00001)}});
        tuple<int32, ?> t = const(val = (7, string("x")));
        tensor<int4, [5]> q = const(val = [1, -2, 7, -8, 3]);
        tensor<fp8e4m3fn, [3]> e = const(val = [448.0, -0.0, nan]);
        tensor<fp16, [3]> bad = const(val = bytes("003c"));
        string s = const(val = strings("a", "b"));
        tensor<fp32, [0, 3]> z = const(val = []);
        ? missing = odd(a = ?(absent), b = fp32(inf), c = [true, false], d = tensor<uint64, [1]>([18446744073709551615]));
      } -> (l);
    }
    "#);
    let q = parse(&full(&p)).unwrap();
    assert_same(&p, &q);
}

#[test]
fn elided_text_says_so() {
    let p = parse("program(1.3) { func f<o>() { tensor<int32, [3]> a = const(val = [1, 2, 3]); } -> (a); }").unwrap();
    let text = PrintOptions { full: false, elide_above: Some(2) }.program(&p);
    assert_snapshot!(text, @r"
    program(1.0) [specificationVersion = 1] {
      func f<o>() {
        tensor<int32, [3]> a = const(val = ...);
      } -> (a);
    }
    ");
    assert_snapshot!(parse(&text).unwrap_err(), @"line 3, column 40: this constant was left out when the text was printed");
}

#[test]
fn errors_have_a_place() {
    let body = |body: &str| format!("program(1.3) {{ func f<o>(fp16 x) {{\n  {body} }} -> (x); }}");
    let errors: Vec<String> = [
        "",
        "program(1.3) { func f<o>() { } -> (y); }",
        "program(1.3) { func f<o>() { } -> (); func f<o>() { } -> (); }",
        "program(1.3) [specificationVersion = true, specificationVersion = 1] { }",
        &body("fp16 y = relu(x = z);"),
        &body("fp16 y = relu(x = x, x = x);"),
        &body("tensor<int8, [2]> y = const(val = [1, 200]);"),
        &body("tensor<int8, [4000000000, 4000000000, 4000000000]> y = const(val = [1]);"),
        &body("tensor<int8, [s4000000000]> y = f();"),
        &body("tensor<int8, [?, s0]> y = f();"),
        &body("fp16 y = f(a = \"open"),
        &body("fp16 y = f(a = \"\\q\");"),
        &body("fp16 y = f(a = [])"),
        &body("fp16 y = f(a = 1);"),
        &body("fp16 y = f(a = 99999999999);"),
        &body("state<list<fp16, ?>> y = f();"),
    ]
    .iter()
    .map(|text| parse(text).map_or_else(|e| e.to_string(), |_| "fine".into()))
    .collect();
    assert_snapshot!(errors.join("\n"), @r#"
    line 1, column 1: expected `program`, found the end
    line 1, column 36: no value `y` is visible here
    line 1, column 39: function `f` is there already
    line 1, column 65: attribute `specificationVersion` is there already
    line 2, column 21: no value `z` is visible here
    line 2, column 26: parameter `x` is there already
    line 2, column 45: `200` is not an element of type int8
    line 2, column 73: the number of elements, 1, does not fill tensor<int8, [4000000000, 4000000000, 4000000000]>
    line 2, column 17: too many unknown sizes
    line 2, column 20: `?` and named unknown sizes do not mix in one function
    line 2, column 18: no closing "
    line 2, column 19: unknown escape
    line 2, column 20: an empty constant needs a type
    fine
    line 2, column 29: `99999999999` is not an element of type int32
    line 2, column 22: a state wraps a tensor, not list<fp16, ?>
    "#);
}

#[test]
fn depth_is_limited() {
    for (open, close) in [("list<", ", 1>"), ("tuple<", ">")] {
        let ty = format!("{}fp16{}", open.repeat(100_000), close.repeat(100_000));
        let error = parse(&format!("program(1.3) {{ func f<o>({ty} x) {{ }} -> (x); }}")).unwrap_err();
        assert_eq!(error.message, "nested too deeply");
    }
    let blocks = "f() block() { ".repeat(100_000);
    let error = parse(&format!("program(1.3) {{ func f<o>() {{ {blocks}")).unwrap_err();
    assert_eq!(error.message, "nested too deeply");
    let value = "[".repeat(100_000);
    let error = parse(&format!("program(1.3) {{ func f<o>() {{ f(a = {value}")).unwrap_err();
    assert_eq!(error.message, "nested too deeply");
}

/// Fails unless both programs have the same structure; ids may differ.
fn assert_same(p: &Program, q: &Program) {
    assert_eq!(p.specification_version(), q.specification_version());
    assert_eq!(p.default_function(), q.default_function());
    assert_eq!(p.functions().len(), q.functions().len());
    for (f, g) in p.functions().iter().zip(q.functions()) {
        assert_eq!((f.name(), f.opset()), (g.name(), g.opset()));
        let ranges = |f: &Function| (0..f.symbol_count()).map(|i| f.symbol_range(Symbol(i as u32)).clone()).collect();
        let (a, b): (Vec<_>, Vec<_>) = (ranges(f), ranges(g));
        assert_eq!(a, b);
        let mut pairs = std::collections::HashMap::new();
        same_values(f, g, f.inputs(), g.inputs(), &mut pairs);
        same_block(f, g, f.body(), g.body(), &mut pairs);
        g.assert_uses_exact();
    }
}

type Pairs = std::collections::HashMap<ValueId, ValueId>;

fn same_values(f: &Function, g: &Function, a: &[ValueId], b: &[ValueId], pairs: &mut Pairs) {
    let show = |f: &Function, v: &[ValueId]| {
        v.iter().map(|&v| (f.value(v).name().clone(), f.ty(v).clone())).collect::<Vec<_>>()
    };
    assert_eq!(show(f, a), show(g, b));
    pairs.extend(a.iter().copied().zip(b.iter().copied()));
}

fn same_block(f: &Function, g: &Function, a: BlockId, b: BlockId, pairs: &mut Pairs) {
    same_values(f, g, f.block(a).inputs(), g.block(b).inputs(), pairs);
    assert_eq!(f.block(a).len(), g.block(b).len());
    for (x, y) in f.ops(a).zip(g.ops(b)) {
        let (x, y) = (f.op(x), g.op(y));
        assert_eq!(x.kind(), y.kind());
        let params = |f: &Function, op: &OpData, map: &dyn Fn(ValueId) -> ValueId| -> Vec<_> {
            op.params()
                .map(|(n, o)| {
                    let show = |o: &Operand| match o {
                        Operand::Value(v) => (Some(map(*v)), None),
                        Operand::Literal(l) => (None, Some(f.literal(*l).clone())),
                    };
                    (n.clone(), o.iter().map(show).collect::<Vec<_>>())
                })
                .collect()
        };
        assert_eq!(params(f, x, &|v| pairs[&v]), params(g, y, &|v| v));
        let attributes =
            |f: &Function, op: &OpData| op.attributes().map(|(n, l)| (n.clone(), f.literal(l).clone())).collect();
        let (want, have): (Vec<_>, Vec<_>) = (attributes(f, x), attributes(g, y));
        assert_eq!(want, have);
        assert_eq!(x.blocks().len(), y.blocks().len());
        for (&inner, &other) in x.blocks().iter().zip(y.blocks()) {
            same_block(f, g, inner, other, pairs);
        }
        same_values(f, g, x.results(), y.results(), pairs);
    }
    let mapped: Vec<_> = f.block(a).outputs().iter().map(|v| pairs[v]).collect();
    assert_eq!(mapped, g.block(b).outputs());
}

fn any_dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(DType::ALL)
}

fn any_literal() -> impl Strategy<Value = Literal> {
    let numbers = (any_dtype(), prop::collection::vec(0u64..4, 0..4), any::<u64>()).prop_map(|(dtype, shape, seed)| {
        let ty = TensorType::fixed(dtype, &shape);
        let count = ty.volume().unwrap();
        let random = |i: u64| (seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        match dtype {
            DType::String => Literal {
                ty: ty.into(),
                data: LiteralData::Strings((0..count).map(|i| format!("\\\"{}\u{7}\n", random(i)).into()).collect()),
            },
            DType::Bool => Literal::bytes(ty, (0..count).map(|i| random(i) as u8 & 1).collect::<Vec<_>>()),
            _ => {
                let raw: Vec<i64> = (0..count).map(|i| random(i) as i64).collect();
                Literal::bytes(ty, pack_ints(dtype, &raw))
            }
        }
    });
    let leaf = prop_oneof![
        4 => numbers,
        1 => (any_dtype(), any::<Vec<u8>>()).prop_map(|(d, bytes)| Literal::bytes(TensorType::fixed(d, &[3]), bytes)),
        1 => (".*", any::<u64>()).prop_map(|(file, at)| Literal::blob(TensorType::fixed(DType::F16, &[3]), file, at)),
        1 => Just(Literal { ty: ValueType::Missing, data: LiteralData::Absent }),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let items = prop::collection::vec(inner.clone(), 0..3);
        let pairs = prop::collection::vec((inner.clone(), inner), 0..3);
        prop_oneof![
            items.clone().prop_map(|items| Literal {
                ty: ValueType::Tuple(items.iter().map(|i| i.ty.clone()).collect()),
                data: LiteralData::Items(items),
            }),
            items.prop_map(|items| Literal {
                ty: ValueType::List { element: Box::new(f16(&[])), length: items.first().map(|_| Dim::known(2)) },
                data: LiteralData::Items(items),
            }),
            pairs.prop_map(|pairs| Literal {
                ty: ValueType::Dictionary { key: Box::new(f16(&[])), value: Box::new(ValueType::Missing) },
                data: LiteralData::Pairs(pairs),
            }),
        ]
    })
}

fn any_type() -> impl Strategy<Value = ValueType> {
    let dim = prop_oneof![any::<u64>().prop_map(Dim::known), (0u32..3).prop_map(|s| Dim::unknown(Symbol(s)))];
    prop_oneof![
        4 => (any_dtype(), prop::collection::vec(dim, 0..4)).prop_map(|(d, s)| TensorType::new(d, s).into()),
        1 => any_dtype().prop_map(ValueType::Unranked),
        1 => Just(ValueType::Missing),
    ]
}

/// Names of every kind: plain, reserved, odd.
fn any_name() -> impl Strategy<Value = String> {
    prop_oneof![4 => "[a-d]", 1 => "true|fp16|const|where|block|s0|", 1 => ".{0,3}"]
}

#[derive(Clone, Debug)]
struct Step {
    kind: String,
    params: Vec<(String, Vec<Result<prop::sample::Index, Literal>>)>,
    attributes: Vec<(String, Literal)>,
    results: Vec<(String, ValueType)>,
    nested: bool,
    close: bool,
}

fn any_step() -> impl Strategy<Value = Step> {
    let operand = prop_oneof![3 => any::<prop::sample::Index>().prop_map(Ok), 1 => any_literal().prop_map(Err)];
    let params = prop::collection::btree_map(any_name(), prop::collection::vec(operand, 0..3), 0..3);
    let attributes = prop::collection::btree_map("val|name|odd|`", any_literal(), 0..3);
    let results = prop::collection::vec((any_name(), any_type()), 0..3);
    (prop_oneof![any_name(), Just("const".into())], params, attributes, results, any::<bool>(), any::<bool>()).prop_map(
        |(kind, params, attributes, results, nested, close)| Step {
            kind,
            params: params.into_iter().collect(),
            attributes: attributes.into_iter().collect(),
            results,
            nested,
            close,
        },
    )
}

/// A function made of the steps; names are made unique, since text tells values apart by name.
fn build(steps: &[Step], opset: &str) -> Program {
    let mut f = Function::new("main", opset);
    for i in 0..3 {
        f.add_symbol(SymbolRange { lo: i, hi: (i > 0).then_some(7 * i) });
    }
    let x = f.add_input("x".into(), ValueType::State(TensorType::fixed(DType::F16, &[1])));
    let mut open = vec![(f.body(), vec![x])];
    for (i, step) in steps.iter().enumerate() {
        let visible: Vec<ValueId> = open.iter().flat_map(|(_, v)| v.iter().copied()).collect();
        let spec = OpSpec {
            kind: step.kind.as_str().into(),
            inputs: step
                .params
                .iter()
                .map(|(n, o)| {
                    let operands = o.iter().map(|o| match o {
                        Ok(index) => Operand::Value(visible[index.index(visible.len())]),
                        Err(l) => Operand::Literal(f.intern(l.clone())),
                    });
                    (n.as_str().into(), operands.collect())
                })
                .collect(),
            attributes: step.attributes.iter().map(|(n, l)| (n.as_str().into(), f.intern(l.clone()))).collect(),
            results: step
                .results
                .iter()
                .enumerate()
                .map(|(j, (n, ty))| (format!("{n}{i}_{j}").into(), ty.clone()))
                .collect(),
        };
        let block = open.last().unwrap().0;
        let op = f.insert_op(Place::End(block), spec);
        let results = f.op(op).results().to_vec();
        if step.nested && open.len() < 4 {
            let inner = f.add_block(op);
            let input = f.add_block_input(inner, format!("in{i}").into(), f16(&[1]));
            f.add_output(inner, input);
            open.push((inner, vec![input]));
        } else {
            open.last_mut().unwrap().1.extend(results);
            if step.close && open.len() > 1 {
                open.pop();
            }
        }
    }
    for &v in &open[0].1.clone() {
        f.add_output(f.body(), v);
    }
    let mut p = Program::new(steps.len() as i32);
    p.add_function(f);
    p.set_default_function(steps.first().map(|s| s.kind.as_str().into()));
    p
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Law: parsing the full text of a program gives the same program.
    #[test]
    fn full_text_re_reads_exactly(steps in prop::collection::vec(any_step(), 0..8), opset in "CoreML8|ios18|.*") {
        let p = build(&steps, &opset);
        assert_same(&p, &parse(&full(&p)).unwrap());
    }

    /// Law: printing what was parsed from the short text gives that text.
    #[test]
    fn short_text_is_stable(steps in prop::collection::vec(any_step(), 0..8)) {
        let text = print_program(&build(&steps, "CoreML8"));
        prop_assert_eq!(print_program(&parse(&text).unwrap()), text);
    }

    /// Law: no text makes the parser panic.
    #[test]
    fn any_text_is_read_or_refused(text in "(program\\(1.3\\) \\{ func f<o>\\(\\) \\{|[ -~]|[a-z]{1,7}|[0-9x.p<>(){}\\[\\]=,;`\"\\\\-]|tensor<|const\\(val = ){0,40}") {
        let _ = parse(&text);
    }
}
