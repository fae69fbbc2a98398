//! `kv-readonly`: states become inputs that the caller writes; the tests play the caller.

mod support;

use std::collections::BTreeMap;

use milopt::equiv;
use milopt::interp::{Interpreter, Mode, Tensor, Values, same_bits};
use milopt::ir::{ArrayFeature, DType, Dim, FeatureKind, Flexibility, Function, Program, ValueType};
use milopt::package::{Package, SaveOptions};
use milopt::passes::{Pipeline, Preset, Report, RunOptions, SideFile};
use milopt::rewrite::{HostWrite, InterfaceChange, Source, Transaction};
use milopt::{text, verify};
use support::{count, declined, main, program};

/// Layers.
const L: usize = 2;
/// KV heads.
const H: usize = 2;
/// Slots of a cache.
const S: usize = 8;
/// Size of a head.
const D: usize = 4;

/// How the caches of a small decoder are kept, in the form that deferring and merging leaves: every read comes before the
/// one write, which is the update of its own read.
struct Form {
    name: &'static str,
    /// New rows a run.
    rows: usize,
    /// Declarations of the inputs besides `q` and `mask`.
    inputs: String,
    /// Ops in front of the layers.
    head: String,
    /// Ops that give the old keys and values of a layer, `[1, H, S, D]`, as `k_old_I` and `v_old_I`.
    old: fn(usize) -> String,
    /// Ops behind the layers, which write `k_I` and `v_I`, `[1, H, rows, D]`.
    tail: String,
    /// How many states there are.
    states: usize,
}

fn layer(f: &Form, i: usize) -> String {
    let (r, q) = (f.rows, if i == 0 { "q".into() } else { format!("out_{}", i - 1) });
    let split = format!("axis = 3, split_sizes = [{S}, {r}]");
    format!(
        "{old}
    tensor<fp16, [1, {H}, {r}, {D}]> k_{i} = mul(x = {q}, y = fp16(0.5));
    tensor<fp16, [1, {H}, {r}, {D}]> v_{i} = add(x = {q}, y = fp16(0.25));
    tensor<fp16, [1, {H}, {r}, {S}]> so_{i} = matmul(x = {q}, y = k_old_{i}, transpose_x = false, transpose_y = true);
    tensor<fp16, [1, {H}, {r}, {r}]> sn_{i} = matmul(x = {q}, y = k_{i}, transpose_x = false, transpose_y = true);
    tensor<fp16, [1, {H}, {r}, {S}]> sm_{i} = add(x = so_{i}, y = m);
    tensor<fp16, [1, {H}, {r}, {all}]> s_{i} = concat(values = (sm_{i}, sn_{i}), axis = 3, interleave = false);
    tensor<fp16, [1, {H}, {r}, {all}]> p_{i} = softmax(x = s_{i}, axis = 3);
    tensor<fp16, [1, {H}, {r}, {S}]> po_{i}, tensor<fp16, [1, {H}, {r}, {r}]> pn_{i} = split(x = p_{i}, {split});
    tensor<fp16, [1, {H}, {r}, {D}]> oo_{i} = matmul(x = po_{i}, y = v_old_{i}, transpose_x = false, transpose_y = false);
    tensor<fp16, [1, {H}, {r}, {D}]> on_{i} = matmul(x = pn_{i}, y = v_{i}, transpose_x = false, transpose_y = false);
    tensor<fp16, [1, {H}, {r}, {D}]> out_{i} = add(x = oo_{i}, y = on_{i});
",
        old = (f.old)(i),
        all = S + r,
    )
}

impl Form {
    fn function(&self, name: &str) -> String {
        let layers: String = (0..L).map(|i| layer(self, i)).collect();
        let (rows, inputs, head, tail) = (self.rows, &self.inputs, &self.head, &self.tail);
        format!(
            "  func {name}<CoreML8>(tensor<fp16, [1, {H}, {rows}, {D}]> q, {inputs}) {{\n{head}\n{layers}\n{tail}\n  }} -> (out_1);\n"
        )
    }

    fn program(&self) -> Program {
        parse(&[self.function("main")])
    }
}

fn parse(functions: &[String]) -> Program {
    let source = format!("program(1.3) [specificationVersion = 9] {{\n{}}}", functions.concat());
    text::parse(&source).unwrap_or_else(|e| panic!("{e}\n{source}"))
}

const MASK: &str = "tensor<fp16, [1, 1, 1, 8]> mask";
const PLAIN_MASK: &str = "    tensor<fp16, [1, 1, 1, 8]> m = identity(x = mask);";

fn read(state: &str, into: &str, shape: &str) -> String {
    format!("    tensor<fp16, {shape}> {into} = read_state(input = {state});\n")
}

/// An update of `state` by `update` at `begin`, whose end is `end`.
fn write(state: &str, shape: &str, update: &str, begin: &str, end: &str) -> String {
    format!(
        "{}    tensor<fp16, {shape}> {state}_full = slice_update(x = {state}_rest, update = {update}, begin = {begin}, end = {end});
    write_state(input = {state}, data = {state}_full);\n",
        read(state, &format!("{state}_rest"), shape)
    )
}

/// `begin` and `end` for `rows` new rows at `pos`, a vector of one, on axis `axis` of `shape`.
fn bounds(axis: usize, shape: &[usize], rows: usize) -> String {
    let (front, back) = (vec![0; axis], vec![0; shape.len() - axis - 1]);
    let (ends, last) = (&shape[..axis], &shape[axis + 1..]);
    let rank = shape.len();
    format!(
        "    tensor<int32, [1]> next = add(x = at, y = {rows});
    tensor<int32, [{rank}]> begin = concat(values = ({front:?}, at, {back:?}), axis = 0, interleave = false);
    tensor<int32, [{rank}]> end = concat(values = ({ends:?}, next, {last:?}), axis = 0, interleave = false);\n"
    )
}

const STACKED: &str = "[2, 1, 2, 8, 4]";
const UNIFIED: &str = "[4, 2, 8, 4]";
const LAYER: &str = "[1, 2, 8, 4]";

fn stacked(rows: usize) -> Form {
    let stack =
        |x: &str| format!("    tensor<fp16, [2, 1, 2, {rows}, 4]> {x}s = stack(values = ({x}_0, {x}_1), axis = 0);\n");
    Form {
        name: "stacked",
        rows,
        inputs: format!(
            "{MASK}, tensor<int32, [1]> at, state<tensor<fp16, {STACKED}>> k_cache, state<tensor<fp16, {STACKED}>> v_cache"
        ),
        head: format!("{PLAIN_MASK}\n{}{}", read("k_cache", "k_all", STACKED), read("v_cache", "v_all", STACKED)),
        old: |i| {
            ["k", "v"].map(|x| format!("    tensor<fp16, [1, 2, 8, 4]> {x}_old_{i} = slice_by_index(x = {x}_all, begin = [{i}, 0, 0, 0, 0], end = [{}, 1, 2, 8, 4], squeeze_mask = [true, false, false, false, false]);\n", i + 1)).concat()
        },
        tail: [
            stack("k"),
            stack("v"),
            bounds(3, &[L, 1, H, S, D], rows),
            write("k_cache", STACKED, "ks", "begin", "end"),
            write("v_cache", STACKED, "vs", "begin", "end"),
        ]
        .concat(),
        states: 2,
    }
}

fn per_layer() -> Form {
    let states: Vec<String> = (0..L).flat_map(|i| ["k", "v"].map(|x| format!("{x}_cache_{i}"))).collect();
    let declared: String = states.iter().map(|s| format!(", state<tensor<fp16, {LAYER}>> {s}")).collect();
    let writes = (0..L)
        .flat_map(|i| ["k", "v"].map(|x| write(&format!("{x}_cache_{i}"), LAYER, &format!("{x}_{i}"), "begin", "end")));
    Form {
        name: "per layer",
        rows: 1,
        inputs: format!("{MASK}, tensor<int32, []> pos{declared}"),
        head: format!("{PLAIN_MASK}\n    tensor<int32, [1]> at = expand_dims(x = pos, axes = [0]);"),
        old: |i| ["k", "v"].map(|x| read(&format!("{x}_cache_{i}"), &format!("{x}_old_{i}"), LAYER)).concat(),
        tail: bounds(2, &[1, H, S, D], 1) + &writes.collect::<String>(),
        states: 4,
    }
}

fn unified(name: &'static str, inputs: &str, head: &str, tail: String) -> Form {
    Form {
        name,
        rows: 1,
        inputs: format!("{inputs}, state<tensor<fp16, {UNIFIED}>> cache"),
        head: format!("{head}\n{}", read("cache", "all", UNIFIED)),
        old: |i| {
            [("k", i), ("v", L + i)].map(|(x, at)| format!("    tensor<fp16, [1, 2, 8, 4]> {x}_old_{i} = slice_by_size(x = all, begin = [{at}, 0, 0, 0], size = [1, 2, 8, 4]);\n")).concat()
        },
        tail: "    tensor<fp16, [4, 2, 1, 4]> rows = concat(values = (k_0, k_1, v_0, v_1), axis = 0, interleave = false);\n"
            .to_string()
            + &tail,
        states: 1,
    }
}

fn from_the_masks_shape() -> Form {
    let head = "    tensor<fp16, [1, 1, 1, 1]> m = reduce_max(x = mask, axes = [3], keep_dims = true);
    tensor<int32, [4]> sizes = shape(x = mask);
    tensor<int32, [1]> length = slice_by_size(x = sizes, begin = [3], size = [1]);
    tensor<int32, [1]> at = sub(x = length, y = [1]);";
    let tail = bounds(2, &[4, H, S, D], 1) + &write("cache", UNIFIED, "rows", "begin", "end");
    unified("position from the mask's shape", "tensor<fp16, [1, 1, 1, s0]> mask", head, tail)
}

fn at_a_constant() -> Form {
    let squeeze = "squeeze_mask = [false, false, true, false]";
    let update = write("cache", UNIFIED, "flat", "[0, 0, 5, 0]", &format!("[4, 2, 6, 4], {squeeze}"));
    let tail = format!("    tensor<fp16, [4, 2, 4]> flat = squeeze(x = rows, axes = [2]);\n{update}");
    unified("constant position", MASK, PLAIN_MASK, tail)
}

fn forms() -> Vec<Form> {
    vec![stacked(1), stacked(2), per_layer(), from_the_masks_shape(), at_a_constant()]
}

fn convert(before: &Program, options: &RunOptions) -> (Program, Report) {
    verify::typed(before).unwrap_or_else(|e| panic!("before: {e}"));
    let pipeline = Pipeline::parse("kv-readonly,dce").unwrap();
    let mut after = before.clone();
    let report = pipeline.run(&mut after, options).unwrap();
    verify::typed(&after).unwrap_or_else(|e| panic!("after: {e}\n{}", text::print_program(&after)));
    let playing = equiv::Options { steps: 8, interface: report.interfaces(), ..Default::default() };
    let verdict = equiv::check(before, &after, None, &playing).unwrap();
    assert!(verdict.satisfies(equiv::Exactness::Bitwise), "{verdict}");
    let once = text::print_program(&after);
    assert!(!pipeline.run(&mut after, options).unwrap().changed(), "a second run changes something:\n{once}");
    (after, report)
}

fn converted(before: &Program) -> (Program, Report) {
    convert(before, &RunOptions::default())
}

fn state_ops(f: &Function) -> usize {
    let kinds = ["read_state", "write_state", "slice_update"];
    f.all_ops().into_iter().filter(|&op| kinds.contains(&f.op(op).kind().as_str())).count()
}

fn writes<'r>(report: &'r Report, function: &str) -> Vec<&'r HostWrite> {
    fn write(change: &InterfaceChange) -> Option<&HostWrite> {
        match change {
            InterfaceChange::ReadOnly(write) => Some(write),
            _ => None,
        }
    }
    report.interface(function).into_iter().filter_map(write).collect()
}

/// Numbers that differ from each other, in about −1 to 1.
struct Numbers(u64);

impl Numbers {
    fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let next = || {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 40) as f64 / (1 << 23) as f64 - 1.0
        };
        let values: Vec<f64> = std::iter::repeat_with(next).take(shape.iter().product()).collect();
        Tensor::floats(dtype, shape, &values)
    }
}

/// What the caller does after a run.
fn host_write(write: &HostWrite, inputs: &Values, caches: &mut Values, outputs: &Values) {
    let begin: Vec<usize> = write
        .begin
        .iter()
        .map(|position| {
            let known = |source: &Source| match source {
                Source::Element { input, index } => inputs[input].to_i64s().get(*index as usize).copied(),
                Source::Size { input, axis } => Some(inputs[input].shape()[*axis] as i64),
            };
            usize::try_from(position.evaluate(known).unwrap()).unwrap()
        })
        .collect();
    let (cache, new) = (&caches[&write.cache], &outputs[&write.output]);
    assert_eq!((cache.dtype(), new.dtype()), (write.dtype, write.dtype));
    let mut values = cache.to_f64s();
    for (i, value) in new.to_f64s().into_iter().enumerate() {
        let (mut at, mut rest, mut stride) = (0, i, 1);
        for axis in (0..new.rank()).rev() {
            let index = begin[axis] + rest % new.shape()[axis];
            assert!(index < cache.shape()[axis], "the box lies in the cache");
            at += index * stride;
            stride *= cache.shape()[axis];
            rest /= new.shape()[axis];
        }
        values[at] = value;
    }
    let written = Tensor::floats(cache.dtype(), cache.shape(), &values);
    caches.insert(write.cache.clone(), written);
}

/// Runs the function with states, and the one with caches and a caller, over the same steps; every output and every content
/// must have the same bits. Returns the final content.
fn play(before: &Function, after: &Function, writes: &[&HostWrite], rows: usize) -> Values {
    let mut numbers = Numbers(7);
    let mut states = Values::new();
    for &v in before.inputs() {
        if let Some(t) = before.ty(v).as_state() {
            let shape: Vec<usize> = t.known_shape().unwrap().iter().map(|&n| n as usize).collect();
            states.insert(before.value(v).name().clone(), numbers.tensor(t.dtype, &shape));
        }
    }
    let mut caches = states.clone();
    let runs = [before, after].map(|f| Interpreter::new(f, Mode::Storage).unwrap());
    for position in [0, 1, 4, S - rows, 2, 3, 5, 6, 0].map(|p| p.min(S - rows)) {
        let inputs = step_inputs(before, position, &mut numbers);
        let outputs = runs[0].run(&inputs, &mut states).unwrap();
        let with_caches: Values = inputs.clone().into_iter().chain(caches.clone()).collect();
        let new = runs[1].run(&with_caches, &mut Values::new()).unwrap();
        for (name, value) in &outputs {
            assert!(same_bits(value, &new[name]), "output {name} at {position}");
        }
        for write in writes {
            host_write(write, &inputs, &mut caches, &new);
        }
        for (name, value) in &states {
            assert!(same_bits(value, &caches[name]), "cache {name} at {position}");
        }
    }
    states
}

/// Random floats; integers are the position, unknown sizes are the length behind it.
fn step_inputs(f: &Function, position: usize, numbers: &mut Numbers) -> Values {
    let size = |d: &Dim| d.as_known().map_or(position + 1, |n| n as usize);
    let tensors = f.inputs().iter().filter_map(|&v| match f.ty(v) {
        ValueType::Tensor(t) => Some((f.value(v).name().clone(), t)),
        _ => None,
    });
    tensors
        .map(|(name, t)| {
            let shape: Vec<usize> = t.shape.iter().map(size).collect();
            let value = match t.dtype {
                DType::I32 => Tensor::ints(DType::I32, &shape, &[position as i64]),
                dtype => numbers.tensor(dtype, &shape),
            };
            (name, value)
        })
        .collect()
}

#[test]
fn with_a_caller_that_writes_every_bit_is_the_same() {
    for form in forms() {
        let before = form.program();
        let (after, report) = converted(&before);
        let f = main(&after);
        assert_eq!(state_ops(f), 0, "{}:\n{}{}", form.name, report.explain(), text::print_program(&after));
        assert!(f.inputs().iter().all(|&v| f.ty(v).as_state().is_none()), "{}", form.name);
        let writes = writes(&report, "main");
        assert_eq!(writes.len(), form.states, "{}", form.name);
        let last = play(main(&before), f, &writes, form.rows);
        assert_eq!(last.len(), form.states);
    }
}

#[test]
fn a_caller_that_writes_elsewhere_is_found_out() {
    let before = stacked(1).program();
    let (after, report) = converted(&before);
    let right = writes(&report, "main");
    let wrong = |edit: &dyn Fn(&mut [HostWrite])| {
        let mut writes: Vec<HostWrite> = right.iter().map(|&w| w.clone()).collect();
        edit(&mut writes);
        let play = || play(main(&before), main(&after), &writes.iter().collect::<Vec<_>>(), 1);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(play)).is_err()
    };
    assert!(!wrong(&|_| ()));
    assert!(wrong(&|w| w[0].begin[3].terms.clear()), "a dropped position");
    assert!(wrong(&|w| w[1].begin[3].constant = 1), "a position off by one");
    assert!(wrong(&|w| w[0].output = w[1].output.clone()), "keys instead of values");
    assert!(wrong(&|w| w[0].begin[2].constant = 1), "another head");
}

#[test]
fn the_rewritten_function_reads_the_inputs() {
    let body = format!(
        "{}    tensor<fp16, [1, 2, 8, 4]> out = relu(x = old);\n    tensor<fp16, [1, 2, 1, 4]> row = exp(x = x);\n{}{}",
        read("c", "old", LAYER),
        bounds(2, &[1, H, S, D], 1),
        write("c", LAYER, "row", "begin", "end")
    );
    let signature = format!("tensor<fp16, [1, 2, 1, 4]> x, tensor<int32, [1]> at, state<tensor<fp16, {LAYER}>> c");
    let (after, report) = converted(&program(&signature, &body, "out"));
    insta::assert_snapshot!(text::print_function(main(&after)), @r"
    func main<CoreML8>(tensor<fp16, [1, 2, 1, 4]> x, tensor<int32, [1]> at, tensor<fp16, [1, 2, 8, 4]> c) {
      tensor<fp16, [1, 2, 8, 4]> out = relu(x = c);
      tensor<fp16, [1, 2, 1, 4]> c_new = exp(x = x);
    } -> (out, c_new);
    ");
    insta::assert_snapshot!(serde_json::to_string_pretty(&SideFile::of(&report)).unwrap(), @r#"
    {
      "version": 1,
      "functions": {
        "main": [
          {
            "input": "c",
            "dtype": "fp16",
            "shape": [
              1,
              2,
              8,
              4
            ],
            "write": {
              "output": "c_new",
              "shape": [
                1,
                2,
                1,
                4
              ],
              "begin": [
                {
                  "constant": 0,
                  "terms": []
                },
                {
                  "constant": 0,
                  "terms": []
                },
                {
                  "constant": 0,
                  "terms": [
                    {
                      "coefficient": 1,
                      "source": "element",
                      "input": "at",
                      "index": 0
                    }
                  ]
                },
                {
                  "constant": 0,
                  "terms": []
                }
              ],
              "formula": "c[:, :, at[0] : at[0] + 1, :] = c_new"
            }
          }
        ]
      }
    }
    "#);
}

#[test]
fn what_may_not_be_returned_itself_is_returned_as_a_copy() {
    let signature = |inputs: &str| {
        format!(
            "tensor<fp16, [1, 2, 1, 4]> x, {inputs}, state<tensor<fp16, {LAYER}>> a, state<tensor<fp16, {LAYER}>> b"
        )
    };
    let at = |update: &str| {
        let end = "[1, 2, 4, 4]";
        write("a", LAYER, update, "[0, 0, 3, 0]", end) + &write("b", LAYER, update, "[0, 0, 3, 0]", end)
    };
    let constant = "tensor<fp16, [1, 2, 1, 4]>([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])";
    for (what, inputs, update, output, copies) in [
        ("an input", "tensor<fp16, [1]> y", "x", "row", 2),
        ("an output", "tensor<fp16, [1]> y", "row", "row", 2),
        ("the same value twice", "tensor<fp16, [1]> y", "other", "row", 1),
        ("a constant", "tensor<fp16, [1]> y", "fixed", "row", 2),
        ("a name that is taken", "tensor<fp16, [1]> a_new", "other", "row", 1),
    ] {
        let body = format!(
            "    tensor<fp16, [1, 2, 1, 4]> fixed = const(val = {constant});
    tensor<fp16, [1, 2, 1, 4]> row = relu(x = x);\n    tensor<fp16, [1, 2, 1, 4]> other = exp(x = x);\n{}",
            at(update)
        );
        let before = program(&signature(inputs), &body, output);
        let (after, report) = converted(&before);
        let f = main(&after);
        assert_eq!((state_ops(f), count(&after, "identity")), (0, copies), "{what}");
        let writes = writes(&report, "main");
        let outputs: Vec<&str> = f.outputs().iter().map(|&v| f.value(v).name().as_str()).collect();
        assert_eq!(outputs, [output, &writes[0].output, &writes[1].output], "{what}");
        assert_eq!(writes[0].output == "a_new", what != "a name that is taken");
        play(main(&before), f, &writes, 1);
    }
}

/// Refusals: the inputs besides the state `c`, the body, the output, the op and the reason.
#[test]
fn declines() {
    let update = |value: &str, begin: &str, end: &str| write("c", LAYER, value, begin, end);
    let row =
        "    tensor<fp16, [1, 2, 1, 4]> row = relu(x = x);\n    tensor<fp16, [1, 2, 8, 4]> out = relu(x = whole);\n";
    let fixed = update("row", "[0, 0, 3, 0]", "[1, 2, 4, 4]");
    let at = bounds(2, &[1, H, S, D], 1);
    for (body, output, op, reason) in [
        (format!("{row}{fixed}{}", fixed.replace("c_", "d_")), "out", "write_state", "the state is written 2 times"),
        (
            format!("{row}{fixed}{}", read("c", "late", LAYER)),
            "out",
            "write_state",
            "reads the state after it is written",
        ),
        (
            format!("{row}    write_state(input = c, data = out);\n"),
            "out",
            "write_state",
            "no slice_update of the state's own",
        ),
        (
            format!("{row}{}", update("out", "[0, 0, 0, 0]", "[1, 2, 8, 4]")),
            "out",
            "write_state",
            "replaces the whole state",
        ),
        (
            format!(
                "{row}    tensor<fp16, [1, 2, 8, 4]> f = slice_update(x = whole, update = row, begin = [0, 0, 3, 0], end = [1, 2, 4, 4]);\n    write_state(input = c, data = f);\n"
            ),
            "out",
            "write_state",
            "no slice_update of the state's own",
        ),
        (
            format!(
                "{row}    tensor<fp16, [1, 2, 4, 4]> even = relu(x = four);\n{}",
                update("even", "[0, 0, 0, 0]", "[1, 2, 8, 4], stride = [1, 1, 2, 1]")
            ),
            "out",
            "write_state",
            "the box is strided on axis 2",
        ),
        (
            format!(
                "{row}    tensor<int32, [1]> at = cast(x = y, dtype = \"int32\");\n{at}{}",
                update("row", "begin", "end")
            ),
            "out",
            "write_state",
            "where the box begins on axis 2 follows from what the function computes",
        ),
        (
            format!("{row}    tensor<int32, [1]> at = mul(x = n, y = n);\n{at}{}", update("row", "begin", "end")),
            "out",
            "write_state",
            "where the box begins on axis 2",
        ),
        (format!("{row}{fixed}"), "c_full", "write_state", "the function returns the updated content"),
        (
            format!("{row}{fixed}    tensor<fp16, [1, 2, 8, 4]> late = exp(x = c_full);\n"),
            "late",
            "write_state",
            "reads the updated content",
        ),
        (
            format!("{}{row}{fixed}", read("c", "old", LAYER)),
            "old",
            "write_state",
            "the function returns the content of the state",
        ),
        (
            format!(
                "{row}    tensor<fp16, [1, 2, 8, 4]> z = cond(pred = p) block() {{\n      {}    }} -> (inner), block() {{ }} -> (whole);\n{fixed}",
                read("c", "inner", LAYER)
            ),
            "z",
            "write_state",
            "uses the state in a nested block",
        ),
        (
            format!("{row}    tensor<fp16, [1, 2, 8, 4]> z = mystery(input = c);\n"),
            "z",
            "mystery",
            "uses the state in a nested block, or in a way that is not known",
        ),
        (
            format!("{row}{fixed}    tensor<fp16, [1]> z = mystery(x = y);\n"),
            "z",
            "write_state",
            "mystery `z` is not known, and may read or write the state",
        ),
    ] {
        let signature = format!(
            "tensor<fp16, [1, 2, 1, 4]> x, tensor<fp16, [1, 2, 4, 4]> four, tensor<fp16, {LAYER}> whole, tensor<fp16, [1]> y, \
             tensor<int32, [1]> n, tensor<bool, []> p, state<tensor<fp16, {LAYER}>> c"
        );
        let mut after = program(&signature, &body, output);
        let before = text::print_program(&after);
        let report = Pipeline::parse("kv-readonly").unwrap().run(&mut after, &RunOptions::default()).unwrap();
        assert!(declined(&report, op, reason), "{reason}:\n{}\n{before}", report.explain());
        assert_eq!(text::print_program(&after), before);
    }
}

/// Ops that an edit would rob of something: the update, the read of its rest, another read, the reader of that.
#[test]
fn ops_that_hold_what_the_ir_cannot_hold_stay() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.mlpackage");
    for (output, reason) in [
        ("c_full", "slice_update `c_full` carries"),
        ("c_rest", "read_state `c_rest` carries"),
        ("old", "read_state `old` carries"),
        ("out", "relu `out` carries"),
    ] {
        let options = SaveOptions::overwrite(milopt::package::Overwrite::Force);
        support::save(&Package::new(several(&[writer("decode", 1, "out")])), &path, &options).unwrap();
        let model = path.join(support::files::MODEL);
        let bytes = std::fs::read(&model).unwrap();
        std::fs::write(&model, support::wire::edit_op(&bytes, output, support::wire::with_unknown_field)).unwrap();
        let (_, report) = converted(Package::open(&path).unwrap().program());
        assert!(declined(&report, "write_state", reason), "{output}: {}", report.explain());
    }
}

/// A function that shares the state `c` and only reads it.
const READER: &str = "  func reader<CoreML8>(state<tensor<fp16, [1, 2, 8, 4]>> c) {
    tensor<fp16, [1, 2, 8, 4]> content = read_state(input = c);
    tensor<fp16, [1, 2, 8, 4]> seen = relu(x = content);
  } -> (seen);
";

fn writer(name: &str, rows: usize, returns: &str) -> String {
    format!(
        "  func {name}<CoreML8>(tensor<fp16, [1, 2, {rows}, 4]> x, tensor<int32, [1]> at, state<tensor<fp16, {LAYER}>> c) {{
{}    tensor<fp16, [1, 2, 8, 4]> out = relu(x = old);
    tensor<fp16, [1, 2, {rows}, 4]> row = exp(x = x);
{}{}  }} -> ({returns});
",
        read("c", "old", LAYER),
        bounds(2, &[1, H, S, D], rows),
        write("c", LAYER, "row", "begin", "end")
    )
}

fn several(functions: &[String]) -> Program {
    let mut program = parse(functions);
    program.set_default_function(Some("decode".into()));
    program
}

#[test]
fn functions_that_share_a_state_all_lose_it() {
    let before = several(&[writer("decode", 1, "out"), writer("prefill", 3, "out"), READER.into()]);
    let (after, report) = converted(&before);
    for (name, rows, written) in [("decode", 1, 1), ("prefill", 3, 1), ("reader", 1, 0)] {
        let (a, b) = (before.function(name).unwrap(), after.function(name).unwrap());
        assert_eq!(state_ops(b), 0, "{name}");
        let writes = writes(&report, name);
        assert_eq!(writes.len(), written);
        play(a, b, &writes, rows);
    }
    let side = SideFile::of(&report);
    let json = serde_json::to_string(&side).unwrap();
    assert_eq!(serde_json::from_str::<SideFile>(&json).unwrap(), side);
    assert_eq!(side.functions["prefill"][0].write.as_ref().unwrap().shape, [1, 2, 3, 4].map(Some));
    assert_eq!((&*side.functions["reader"][0].input, &side.functions["reader"][0].write), ("c", &None));
}

#[test]
fn functions_that_share_a_state_keep_it_together() {
    let mut program = several(&[writer("decode", 1, "out"), writer("prefill", 3, "c_full"), READER.into()]);
    let before = text::print_program(&program);
    let report = Pipeline::parse("kv-readonly").unwrap().run(&mut program, &RunOptions::default()).unwrap();
    assert_eq!(text::print_program(&program), before);
    let reasons: BTreeMap<&str, &str> =
        report.functions.iter().map(|f| (f.function.as_str(), f.passes[0].declined[0].reason.as_str())).collect();
    let shared = "function `prefill` has the state too and keeps it";
    assert_eq!(reasons["prefill"], "the function returns the updated content");
    assert_eq!((reasons["decode"], reasons["reader"]), (shared, shared));
}

#[test]
fn a_state_is_not_taken_from_a_function_that_is_not_selected() {
    let mut program = several(&[writer("decode", 1, "out"), READER.into()]);
    let before = text::print_program(&program);
    let pipeline = Pipeline::parse("kv-readonly").unwrap();
    let report = pipeline.run(&mut program, &RunOptions::default().only("decode")).unwrap();
    assert!(declined(&report, "write_state", "function `reader` has the state too and is not to be changed"));
    assert_eq!(text::print_program(&program), before);
    let (_, alone) = convert(&several(&[writer("decode", 1, "out")]), &RunOptions::default().only("decode"));
    assert_eq!(writes(&alone, "decode").len(), 1);
}

#[test]
fn stop_after_counts_states() {
    let mut program = stacked(1).program();
    let report =
        Pipeline::parse("kv-readonly").unwrap().run(&mut program, &RunOptions::default().stop_after(1)).unwrap();
    assert_eq!((writes(&report, "main").len(), state_ops(main(&program))), (1, 4));
}

#[test]
fn descriptions_follow_after_saving_and_opening() {
    let dir = tempfile::tempdir().unwrap();
    let [source, target] = ["a.mlpackage", "b.mlpackage"].map(|name| dir.path().join(name));
    let [decode, prefill] = [("decode", 1), ("prefill", 3)].map(|(name, rows)| writer(name, rows, "out"));
    let single = parse(std::slice::from_ref(&decode));
    for mut program in [single, several(std::slice::from_ref(&decode)), several(&[decode, prefill])] {
        for f in program.functions_mut() {
            let mut interface = f.interface().clone();
            interface.states[0].short_description = "what was said".into();
            let mut transaction = Transaction::begin(f);
            transaction.set_interface(interface);
            transaction.commit().unwrap();
        }
        let options = SaveOptions::overwrite(milopt::package::Overwrite::Force);
        support::save(&Package::new(program), &source, &options).unwrap();
        let mut package = Package::open(&source).unwrap();
        Pipeline::parse("kv-readonly").unwrap().run(package.program_mut(), &RunOptions::default()).unwrap();
        support::save(&package, &target, &options).unwrap();

        let package = Package::open(&target).unwrap();
        verify::typed(package.program()).unwrap();
        for f in package.program().functions() {
            assert!(f.interface().states.is_empty());
            let array = |shape: &[u64]| {
                FeatureKind::Array(ArrayFeature {
                    dtype: Some(DType::F16),
                    shape: shape.to_vec(),
                    flexibility: Flexibility::Fixed,
                    default: None,
                })
            };
            let rows = if f.name() == "decode" { 1 } else { 3 };
            let cache = f.interface().input("c").unwrap();
            assert_eq!((&cache.kind, &*cache.short_description), (&array(&[1, 2, 8, 4]), "what was said"));
            assert_eq!(f.interface().output("c_new").unwrap().kind, array(&[1, 2, rows, 4]));
            assert_eq!(f.interface().inputs.len(), f.inputs().len());
        }
    }
}

#[test]
fn formulas_say_where_the_box_begins() {
    let formulas = |form: &Form| {
        let (_, report) = converted(&form.program());
        writes(&report, "main").into_iter().map(HostWrite::to_string).collect::<Vec<_>>()
    };
    assert_eq!(
        formulas(&stacked(2)),
        ["k", "v"].map(|x| format!("{x}_cache[:, :, :, at[0] : at[0] + 2, :] = {x}_cache_new"))
    );
    assert_eq!(formulas(&per_layer())[1], "v_cache_0[:, :, pos[0] : pos[0] + 1, :] = v_cache_0_new");
    assert_eq!(formulas(&from_the_masks_shape()), ["cache[:, :, mask.shape[3] - 1 : mask.shape[3], :] = cache_new"]);
    assert_eq!(formulas(&at_a_constant()), ["cache[:, :, 5 : 6, :] = cache_new"]);
}

#[test]
fn what_a_description_says_besides_is_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let [source, target] = ["a.mlpackage", "b.mlpackage"].map(|name| dir.path().join(name));
    let package = Package::new(parse(&[writer("main", 1, "out")]));
    support::save(&package, &source, &SaveOptions::default()).unwrap();
    let model = source.join(support::files::MODEL);
    let bytes = support::wire::edit_states(&std::fs::read(&model).unwrap(), support::wire::with_unknown_field);
    std::fs::write(&model, bytes).unwrap();
    let mut package = Package::open(&source).unwrap();
    Pipeline::parse("kv-readonly").unwrap().run(package.program_mut(), &RunOptions::default()).unwrap();
    let refused = support::save(&package, &target, &SaveOptions::default()).unwrap_err();
    let cause = std::error::Error::source(&refused).map_or(refused.to_string(), ToString::to_string);
    assert!(cause.contains("feature `c`") && !target.exists(), "{cause}");
}

#[test]
fn outputs_have_names_of_their_own() {
    let signature = format!("tensor<fp16, [1]> x, state<tensor<fp16, {LAYER}>> c");
    let mut p =
        program(&signature, "    tensor<fp16, [1]> y = relu(x = x);\n    tensor<fp16, [1]> z = exp(x = y);", "z");
    let before = text::print_program(&p);
    let f = &mut p.functions_mut()[0];
    let [x, y, z, c] = ["x", "y", "z", "c"].map(|name| f.find_value(name).unwrap());
    let mut t = Transaction::begin(f);
    for refused in [x, z, c] {
        assert!(t.add_output(refused).is_err());
    }
    t.turn_into_input(x);
    t.commit().unwrap();
    assert_eq!(text::print_program(&p), before);
    let mut t = Transaction::begin(&mut p.functions_mut()[0]);
    t.add_output(y).unwrap();
    t.turn_into_input(c);
    t.commit().unwrap();
    verify::typed(&p).unwrap();
    let interface = main(&p).interface();
    let names = |features: &[milopt::ir::Feature]| features.iter().map(|f| f.name.to_string()).collect::<Vec<_>>();
    assert_eq!(
        (names(&interface.inputs), names(&interface.outputs)),
        (vec!["x".into(), "c".into()], vec!["z".into(), "y".into()])
    );
}

#[test]
fn presets_grow() {
    let names = |preset: Preset| preset.passes().into_iter().map(|p| p.name).collect::<Vec<_>>();
    let (o1, o2, readonly) = (names(Preset::O1), names(Preset::O2), names(Preset::ReadOnly));
    assert!(o1.iter().all(|pass| o2.contains(pass)) && o2.iter().all(|pass| readonly.contains(pass)));
    assert!(readonly.contains(&"kv-readonly") && !o2.contains(&"kv-readonly"));
    let built: Vec<_> = Pipeline::preset(Preset::ReadOnly).passes().iter().map(|p| p.name()).collect();
    assert_eq!(built, readonly);
}

/// Runs a pipeline and plays its caller.
fn run_all(before: &Program, pipeline: &Pipeline) -> (Program, Report) {
    let mut after = before.clone();
    let report = pipeline.run(&mut after, &RunOptions::default()).unwrap();
    verify::typed(&after).unwrap();
    let playing = equiv::Options { steps: 8, interface: report.interfaces(), ..Default::default() };
    let verdict = equiv::check(before, &after, None, &playing).unwrap();
    assert!(verdict.satisfies(equiv::Exactness::Bitwise), "{verdict}\n{}", text::print_program(&after));
    (after, report)
}

#[test]
fn writes_that_can_be_merged_are_handed_over_together() {
    let layers = (0..L).flat_map(|i| {
        ["k", "v"].map(|x| {
            let (cache, at) = (format!("{x}_cache"), format!("{x}_{i}"));
            let bounds = format!(
                "    tensor<int32, [5]> b_{at} = concat(values = ([{i}, 0, 0], at, [0]), axis = 0, interleave = false);
    tensor<int32, [5]> e_{at} = concat(values = ([{}, 1, 2], next, [4]), axis = 0, interleave = false);\n",
                i + 1
            );
            let update = format!("    tensor<fp16, [1, 1, 2, 1, 4]> u_{at} = expand_dims(x = {at}, axes = [0]);\n");
            let write = write(&cache, STACKED, &format!("u_{at}"), &format!("b_{at}"), &format!("e_{at}"));
            let write = write.replace("_full", &format!("_full_{i}")).replace("_rest", &format!("_rest_{i}"));
            bounds + &update + &write
        })
    });
    let tail = "    tensor<int32, [1]> next = add(x = at, y = 1);\n".to_string() + &layers.collect::<String>();
    let before = Form { tail, ..stacked(1) }.program();
    let (after, report) = run_all(&before, &Pipeline::preset(Preset::ReadOnly));
    let writes = writes(&report, "main");
    assert_eq!((writes.len(), state_ops(main(&after))), (2, 0), "{}", report.explain());
    assert_eq!(writes[0].output_shape, [2, 1, 2, 1, 4].map(Some));
}

#[test]
fn joined_states_are_handed_over_together() {
    let pipeline = Pipeline::parse("kv-unify,kv-forward,kv-merge,view-simplify,kv-readonly,dce").unwrap();
    let (after, report) = run_all(&per_layer().program(), &pipeline);
    let writes = writes(&report, "main");
    assert_eq!(
        (writes.len(), state_ops(main(&after))),
        (1, 0),
        "{}\n{}",
        report.explain(),
        text::print_program(&after)
    );
    assert_eq!(writes[0].output_shape, [4, 2, 1, 4].map(Some));
}
