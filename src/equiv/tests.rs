use DType::{F16, I32};

use super::graph::{Graph, ty};
use super::*;
use crate::ir::{DType, Literal};
use crate::rewrite::{HostWrite, Position, Source, Term};

fn program(g: Graph) -> Program {
    let mut p = Program::new(9);
    p.add_function(g.f);
    p
}

fn compare(a: Graph, b: Graph) -> Result<Report, EquivError> {
    check(&program(a), &program(b), None, &Options::default())
}

fn half(x: f64) -> Literal {
    Literal::floats(F16, &[], &[x])
}

/// `y = kind(x, constant)` over 64 halves.
fn binary(kind: &str, constant: f64) -> Graph {
    let mut g = Graph::new();
    let t = ty(F16, &[8, 8]);
    let x = g.input("x", t.clone());
    let y = g.op(kind, "y", t, vec![("x", x.into()), ("y", half(constant).into())]);
    g.output(y);
    g
}

/// Writes a row into a cache at `position + offset` and gives the whole cache.
fn cache(offset: i64) -> Graph {
    let mut g = Graph::new();
    let position = g.input("position", ty(I32, &[1]));
    let row = g.input("row", ty(F16, &[1, 4]));
    let t = ty(F16, &[6, 4]);
    let state = g.state("cache", t.clone());
    let old = g.op("read_state", "old", t.clone(), vec![("input", state.into())]);
    let at = g.op("add", "at", ty(I32, &[1]), vec![("x", position.into()), ("y", [offset][..].into())]);
    let end = g.op("add", "end", ty(I32, &[1]), vec![("x", at.into()), ("y", [1][..].into())]);
    let mut args = vec![("x", old.into()), ("update", row.into())];
    for (param, v) in [("begin", at), ("end", end)] {
        let values = vec![("values", vec![v.into(), [0][..].into()]), ("axis", vec![0.into()])];
        let vector = g.variadic("concat", &format!("{param}_at"), ty(I32, &[2]), values);
        args.push((param, vector.into()));
    }
    args.push(("end_mask", Literal::bools(&[false, true]).into()));
    let new = g.op("slice_update", "new", t.clone(), args);
    g.write_state(state, new);
    let y = g.op("read_state", "y", t, vec![("input", state.into())]);
    g.output(y);
    g
}

#[test]
fn a_program_equals_itself() {
    for make in [|| binary("add", 0.5), || cache(0)] {
        let report = compare(make(), make()).unwrap();
        assert!(report.verdict == Verdict::Bitwise && report.satisfies(Exactness::Bitwise), "{report}");
        let main = &report.functions[0];
        assert_eq!(
            (main.steps, main.outputs[0].storage.elements),
            (4, 4 * if main.states.is_empty() { 64 } else { 24 })
        );
        assert!(main.outputs[0].storage.finite == main.outputs[0].storage.elements && main.notes.is_empty());
    }
}

#[test]
fn another_constant_is_different_and_located() {
    let after = |constant| {
        let mut g = binary("add", constant);
        let t = ty(F16, &[8, 8]);
        let y = g.f.find_value("y").unwrap();
        let z = g.op("relu", "z", t, vec![("x", y.into())]);
        g.output(z);
        g
    };
    let report = compare(after(0.5), after(1.0)).unwrap();
    assert_eq!(report.verdict, Verdict::Different);
    let main = &report.functions[0];
    let y = &main.outputs[0];
    assert_eq!((y.name.as_str(), y.storage.differing, y.storage.elements), ("y", 256, 256));
    assert!((y.storage.max_abs - 0.5).abs() < 4e-3, "half, rounded to fp16");
    let first = y.storage.first.as_ref().unwrap();
    assert_eq!((first.at.step, &first.index[..]), (0, &[0, 0][..]));
    assert!((first.b - first.a - 0.5).abs() < 4e-3);
    let d = main.first_divergence.as_ref().unwrap();
    assert_eq!((d.at.step, d.a.as_str(), d.b.as_str()), (0, "add `y`", "add `y`"));
}

#[test]
fn another_order_of_summation_is_reassociated() {
    let sum = |left: bool| {
        let mut g = Graph::new();
        let t = ty(F16, &[500]);
        let [x, y, z] = ["x", "y", "z"].map(|n| g.input(n, t.clone()));
        let (p, q, r) = if left { (x, y, z) } else { (z, y, x) };
        let part = g.op("add", "part", t.clone(), vec![("x", p.into()), ("y", q.into())]);
        let all = g.op("add", "all", t, vec![("x", part.into()), ("y", r.into())]);
        g.output(all);
        g
    };
    let report = compare(sum(true), sum(false)).unwrap();
    assert_eq!(report.verdict, Verdict::Reassociated);
    assert!(!report.satisfies(Exactness::Bitwise) && report.satisfies(Exactness::Reassociated));
    let all = &report.functions[0].outputs[0];
    assert!(all.storage.differing > 0 && all.storage.max_ulp > 0 && all.storage.max_abs > 1e-4);
    assert!(all.exact.as_ref().unwrap().max_abs < 1e-14);
}

#[test]
fn rounding_that_storage_mode_forgives_is_not_reassociation() {
    let report = compare(binary("mul", 1.0), binary("mul", 1.001)).unwrap();
    let y = &report.functions[0].outputs[0];
    assert!(y.storage.is_within_bound() && !y.exact.as_ref().unwrap().is_within_bound());
    assert_eq!(report.verdict, Verdict::Different);
}

#[test]
fn the_sign_of_zero_counts() {
    let report = compare(binary("mul", 0.0), binary("mul", -0.0)).unwrap();
    let y = &report.functions[0].outputs[0];
    assert_eq!((report.verdict, y.storage.differing, y.storage.max_abs), (Verdict::Reassociated, 256, 0.0));
}

#[test]
fn states_are_compared() {
    let options = Options { ranges: [("position".into(), 0..5)].into(), ..Options::default() };
    let report = check(&program(cache(0)), &program(cache(1)), None, &options).unwrap();
    let main = &report.functions[0];
    assert_eq!((main.states[0].name.as_str(), main.states[0].verdict), ("cache", Verdict::Different));
    assert!(main.states[0].storage.differing > main.outputs[0].storage.differing / 2);
    assert_eq!(main.first_divergence.as_ref().unwrap().b, "add `at`");
}

#[test]
fn positions_fill_the_cache_of_the_first_program() {
    let many = Options { steps: 64, ..Options::default() };
    let [here, next] = [0, 1].map(|offset| program(cache(offset)));
    assert_eq!(check(&here, &here, None, &many).unwrap().verdict, Verdict::Bitwise);
    let e = check(&here, &next, None, &many).unwrap_err();
    assert!(matches!(e, EquivError::Run { program: Side::Second, .. }), "the last position is drawn, one more fails");
}

#[test]
fn poisoned_states_are_drawn_anew() {
    let poison = || {
        let mut g = Graph::new();
        let t = ty(F16, &[4]);
        let state = g.state("s", t.clone());
        let old = g.op("read_state", "old", t.clone(), vec![("input", state.into())]);
        let zero = g.op("mul", "zero", t.clone(), vec![("x", old.into()), ("y", half(0.0).into())]);
        let nan = g.op("real_div", "nan", t, vec![("x", zero.into()), ("y", zero.into())]);
        g.write_state(state, nan);
        g.output(old);
        g.output(nan);
        g
    };
    let report = compare(poison(), poison()).unwrap();
    let main = &report.functions[0];
    assert_eq!(main.outputs[0].storage.finite, 16, "every step starts from finite content");
    assert_eq!((report.verdict, main.states[0].storage.finite), (Verdict::Bitwise, 0));
    assert_eq!(main.notes, ["`nan` never held a finite number"]);
}

#[test]
fn interfaces_must_pair_up() {
    let with = |name: &str, t: crate::ir::TensorType| {
        let mut g = Graph::new();
        let x = g.input(name, t.clone());
        let y = g.op("relu", "y", t, vec![("x", x.into())]);
        g.output(y);
        g
    };
    let message = |a, b| compare(a, b).unwrap_err().to_string();
    let t = || ty(F16, &[4]);
    assert_eq!(
        message(with("x", t()), with("z", t())),
        "could not compare: main: only the second program has the input `z`"
    );
    assert_eq!(
        message(with("x", t()), with("x", ty(F16, &[5]))),
        "could not compare: main: the input `x` is tensor<fp16, [4]> in one program, tensor<fp16, [5]> in the other"
    );
    let (mut more, less) = (with("x", t()), with("x", t()));
    let x = more.f.find_value("x").unwrap();
    let z = more.op("relu", "z", t(), vec![("x", x.into())]);
    more.output(z);
    assert_eq!(message(more, less), "could not compare: main: only the first program has the output `z`");
}

#[test]
fn functions_and_inputs_must_exist() {
    let (a, b) = (program(binary("add", 1.0)), program(binary("add", 1.0)));
    let e = check(&a, &b, Some("prefill"), &Options::default()).unwrap_err();
    assert_eq!(e.to_string(), "could not compare: the first program has no function `prefill`");
    let e = check(&a, &Program::new(9), None, &Options::default()).unwrap_err();
    assert_eq!(e.to_string(), "could not compare: the second program has no function `main`");
    let options = Options { ranges: [("nobody".into(), 0..1)].into(), ..Options::default() };
    assert!(matches!(check(&a, &b, None, &options), Err(EquivError::NoInput(n)) if n == "nobody"));
}

#[test]
fn an_op_that_cannot_be_evaluated_is_no_verdict() {
    let e = compare(binary("add", 1.0), binary("no_such_op", 1.0)).unwrap_err();
    assert!(matches!(e, EquivError::Run { program: Side::Second, step: 0, .. }), "{e}");
}

#[test]
fn free_sizes_are_tried_and_given_up() {
    // One symbol a row axis: unequal rows do not broadcast, so only shapes with equal rows can be run.
    let make = || {
        let mut g = Graph::new();
        let sizes = [(); 2].map(|()| g.dim(1, 9));
        let mut inputs = sizes
            .clone()
            .into_iter()
            .zip(["x", "mask"])
            .map(|(n, name)| g.input(name, crate::ir::TensorType::new(F16, [Dim::known(1), Dim::known(1), n])));
        let (x, mask) = (inputs.next().unwrap(), inputs.next().unwrap());
        drop(inputs);
        let t = crate::ir::TensorType::new(F16, [Dim::known(1), Dim::known(1), sizes[1].clone()]);
        let y = g.op("add", "y", t.clone(), vec![("x", x.into()), ("y", mask.into())]);
        let p = g.op("softmax", "p", t, vec![("x", y.into()), ("axis", (-1).into())]);
        g.output(p);
        g
    };
    let report = compare(make(), make()).unwrap();
    let main = &report.functions[0];
    assert_eq!(report.verdict, Verdict::Bitwise);
    assert_eq!(main.notes, ["not run with the shapes mask [1, 1, 7], x [1, 1, 3]"]);
    assert!(main.outputs[0].storage.elements > 4, "other shapes than the default ran");
}

#[test]
fn the_report_fits_a_screen_and_json() {
    let report = compare(binary("add", 0.5), binary("real_div", 0.0)).unwrap();
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["verdict"], "different");
    assert_eq!(json["functions"][0]["outputs"][0]["storage"]["max_abs"], "inf");
    assert_eq!(json["functions"][0]["first_divergence"]["a"], "add `y`");
    let text = report.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "main: different over 4 steps");
    assert!(
        lines[1].starts_with("  output  y  different      256 of 256 elements (0 finite), max |a-b| inf"),
        "{text}"
    );
    assert_eq!(lines[2], "  first divergence: real_div `y` at step 0, add `y` before");
}

/// A cache that is a state: a row is written at a position, and all of it is summed before that.
const STATEFUL: &str = "tensor<int32, [1]> position, tensor<fp16, [1, 4]> row, state<tensor<fp16, [6, 4]>> cache";
/// The same where the caller keeps the cache.
const READ_ONLY: &str = "tensor<int32, [1]> position, tensor<fp16, [1, 4]> row, tensor<fp16, [6, 4]> cache";

fn parsed(signature: &str, body: &str, outputs: &str) -> Program {
    let text = format!(
        "program(1.3) [specificationVersion = 9] {{ func main<CoreML8>({signature}) {{ {body} }} -> ({outputs}); }}"
    );
    crate::text::parse(&text).unwrap()
}

fn stateful() -> Program {
    let body = "tensor<fp16, [1, 4]> new = mul(x = row, y = row);
                tensor<fp16, [6, 4]> old = read_state(input = cache);
                tensor<int32, [1]> past = add(x = position, y = [1]);
                tensor<int32, [2]> b = concat(values = (position, [0]), axis = 0, interleave = false);
                tensor<int32, [2]> e = concat(values = (past, [4]), axis = 0, interleave = false);
                tensor<fp16, [6, 4]> all = slice_update(x = old, update = new, begin = b, end = e);
                write_state(input = cache, data = all);
                tensor<fp16, [4]> y = reduce_sum(x = old, axes = [0], keep_dims = false);";
    parsed(STATEFUL, body, "y")
}

fn read_only(factor: &str) -> Program {
    let body = format!(
        "tensor<fp16, [1, 4]> new = mul(x = row, y = {factor});
         tensor<fp16, [4]> y = reduce_sum(x = cache, axes = [0], keep_dims = false);"
    );
    parsed(READ_ONLY, &body, "y, new")
}

fn host_write() -> HostWrite {
    let element = Source::Element { input: "position".into(), index: 0 };
    let at = Position { constant: 0, terms: vec![Term { coefficient: 1, source: element }] };
    HostWrite {
        cache: "cache".into(),
        dtype: F16,
        cache_shape: vec![6, 4],
        output: "new".into(),
        output_shape: vec![Some(1), Some(4)],
        begin: vec![at, Position::default()],
    }
}

fn across(a: &Program, b: &Program, changes: Vec<InterfaceChange>) -> Result<Report, EquivError> {
    let options = Options { steps: 8, interface: [("main".into(), changes)].into(), ..Options::default() };
    check(a, b, None, &options)
}

#[test]
fn the_caller_writes_what_a_read_only_cache_needs() {
    let check = |b: &Program, write| across(&stateful(), b, vec![InterfaceChange::ReadOnly(write)]).unwrap();
    let report = check(&read_only("row"), host_write());
    assert_eq!(report.verdict, Verdict::Bitwise, "{report}");
    let main = &report.functions[0];
    assert_eq!((main.outputs.len(), main.states.len(), main.states[0].storage.elements), (1, 1, 8 * 24));
    let open = HostWrite { output_shape: vec![None, Some(4)], ..host_write() };
    assert_eq!(check(&read_only("row"), open).verdict, Verdict::Bitwise, "the output says how large the box is");
    let report = check(&read_only("fp16(1.0)"), host_write());
    assert_eq!((report.verdict, report.functions[0].states[0].verdict), (Verdict::Different, Verdict::Different));
    let mut other = host_write();
    other.begin.swap(0, 1);
    other.begin[0].constant = 2;
    other.begin[1].terms.clear();
    assert_eq!(check(&read_only("row"), other).verdict, Verdict::Different, "always at row 2");
}

#[test]
fn a_size_of_an_input_can_be_the_position() {
    let signature = |cache: &str| format!("tensor<fp16, [s0, 4]> mask, tensor<fp16, [1, 4]> row, {cache} cache");
    let a = "tensor<int32, [2]> s = shape(x = mask);
             tensor<int32, [1]> n = slice_by_size(x = s, begin = [0], size = [1]);
             tensor<int32, [1]> p = sub(x = n, y = [1]);
             tensor<int32, [2]> b = concat(values = (p, [0]), axis = 0, interleave = false);
             tensor<int32, [2]> e = concat(values = (n, [4]), axis = 0, interleave = false);
             tensor<fp16, [6, 4]> old = read_state(input = cache);
             tensor<fp16, [6, 4]> all = slice_update(x = old, update = row, begin = b, end = e);
             write_state(input = cache, data = all);
             tensor<fp16, [6, 4]> y = relu(x = old);";
    let b = "tensor<fp16, [6, 4]> y = relu(x = cache); tensor<fp16, [1, 4]> new = identity(x = row);";
    let flexible = |cache: &str, body: &str, outputs: &str| {
        let text = format!(
            "program(1.3) [specificationVersion = 9] {{ func main<CoreML8>({}) where 1 <= s0 <= 6 {{ {body} }} -> ({outputs}); }}",
            signature(cache)
        );
        crate::text::parse(&text).unwrap()
    };
    let (a, b) = (flexible("state<tensor<fp16, [6, 4]>>", a, "y"), flexible("tensor<fp16, [6, 4]>", b, "y, new"));
    let at = |constant| {
        let size = Source::Size { input: "mask".into(), axis: 0 };
        let at = Position { constant, terms: vec![Term { coefficient: 1, source: size }] };
        InterfaceChange::ReadOnly(HostWrite { begin: vec![at, Position::default()], ..host_write() })
    };
    assert_eq!(across(&a, &b, vec![at(-1)]).unwrap().verdict, Verdict::Bitwise);
    let e = across(&a, &b, vec![at(-2)]).unwrap_err().to_string();
    assert!(e.contains("`new`: ") && e.contains("1 elements from -1 leave an axis of 6"), "{e}");
}

#[test]
fn changes_follow_one_another() {
    // Two states are joined, and the joined one is read only.
    let state = "state<tensor<fp16, [3, 4]>>";
    let a = parsed(
        &format!("tensor<fp16, [3, 4]> row, {state} k, {state} v"),
        "tensor<fp16, [3, 4]> old = read_state(input = v); write_state(input = v, data = row); \
         tensor<fp16, [3, 4]> y = relu(x = old);",
        "y",
    );
    let b = parsed(
        "tensor<fp16, [3, 4]> row, tensor<fp16, [6, 4]> cache",
        "tensor<fp16, [3, 4]> old = slice_by_index(x = cache, begin = [3, 0], end = [6, 4]); \
         tensor<fp16, [3, 4]> y = relu(x = old); tensor<fp16, [3, 4]> new = identity(x = row);",
        "y, new",
    );
    let change = |first: &str, second: &str, row| {
        let begin = vec![Position { constant: row, terms: vec![] }, Position::default()];
        vec![
            InterfaceChange::Joined { states: vec![first.into(), second.into()], into: "cache".into() },
            InterfaceChange::ReadOnly(HostWrite { begin, output_shape: vec![Some(3), Some(4)], ..host_write() }),
        ]
    };
    let report = across(&a, &b, change("k", "v", 3)).unwrap();
    let states: Vec<_> = report.functions[0].states.iter().map(|s| (s.name.as_str(), s.verdict)).collect();
    assert_eq!(states, [("k", Verdict::Bitwise), ("v", Verdict::Bitwise)]);
    assert_eq!(across(&a, &b, change("k", "v", 0)).unwrap().verdict, Verdict::Different);
    assert_eq!(across(&a, &b, change("v", "k", 3)).unwrap().verdict, Verdict::Different);
}

#[test]
fn changes_that_do_not_fit_are_no_verdict() {
    let (a, b) = (stateful(), read_only("row"));
    let message = |changes| across(&a, &b, changes).unwrap_err().to_string();
    let joined = |states: &[&str], into: &str| InterfaceChange::Joined {
        states: states.iter().map(|&n| n.into()).collect(),
        into: into.into(),
    };
    let read_only = InterfaceChange::ReadOnly;
    let elsewhere = Source::Element { input: "position".into(), index: 5 };
    for (changes, want) in [
        (vec![], "the input `cache` is state<tensor<fp16, [6, 4]>> in one program"),
        (vec![joined(&["cache", "nobody"], "kv")], "there is no state `nobody` to join"),
        (vec![joined(&[], "kv")], "no states become `kv`"),
        (vec![joined(&["cache"], "row")], "`row` exists twice"),
        (vec![joined(&["cache"], "kv")], "only the second program has the"),
        (vec![read_only(host_write()), read_only(host_write())], "there is no state `cache` to become an input"),
        (vec![read_only(HostWrite { output: "y2".into(), ..host_write() })], "has no output `y2`"),
        (vec![read_only(HostWrite { output: "y".into(), ..host_write() })], "the output `y` is tensor<fp16, [4]>"),
        (vec![read_only(HostWrite { begin: vec![], ..host_write() })], "begins at 2 numbers, not 0"),
        (vec![read_only(HostWrite { cache_shape: vec![6, 5], ..host_write() })], "is tensor<fp16, [6, 4]>, not"),
        (
            vec![read_only(HostWrite {
                begin: vec![
                    Position { constant: 0, terms: vec![Term { coefficient: 1, source: elsewhere }] },
                    Position::default(),
                ],
                ..host_write()
            })],
            "the inputs do not tell where `new` goes in `cache`",
        ),
    ] {
        let message = message(changes);
        assert!(message.starts_with("could not compare: main: ") && message.contains(want), "{message}");
    }
    let options = Options { interface: [("decode".into(), vec![])].into(), ..Options::default() };
    assert!(matches!(check(&a, &a, None, &options), Err(EquivError::Function { .. })));
}

#[test]
fn the_first_value_beyond_the_bound_is_located_behind_a_harmless_one() {
    let sum = |swapped: bool, factor: f64| {
        let mut g = Graph::new();
        let t = ty(F16, &[500]);
        let [x, y, z] = ["x", "y", "z"].map(|n| g.input(n, t.clone()));
        let (p, q, r) = if swapped { (z, y, x) } else { (x, y, z) };
        let name = if swapped { "other" } else { "part" };
        let part = g.op("add", name, t.clone(), vec![("x", p.into()), ("y", q.into())]);
        let all = g.op("add", "all", t.clone(), vec![("x", part.into()), ("y", r.into())]);
        let scaled = g.op("mul", "scaled", t.clone(), vec![("x", all.into()), ("y", half(factor).into())]);
        let out = g.op("relu", "out", t, vec![("x", scaled.into())]);
        g.output(out);
        g
    };
    let harmless = compare(sum(false, 2.0), sum(true, 2.0)).unwrap();
    let at = |report: &Report| report.functions[0].first_divergence.clone().unwrap().b;
    assert_eq!((harmless.verdict, at(&harmless)), (Verdict::Reassociated, "add `all`".to_owned()));
    let wrong = compare(sum(false, 2.0), sum(true, 3.0)).unwrap();
    assert_eq!((wrong.verdict, at(&wrong)), (Verdict::Different, "mul `scaled`".to_owned()));
}

#[test]
fn a_lost_write_is_located_at_the_state() {
    let mut lost = cache(0);
    let write = lost.f.all_ops().into_iter().find(|&op| *lost.f.op(op).kind() == "write_state").unwrap();
    lost.f.erase_op(write);
    let options = Options { steps: 1, ranges: [("position".into(), 0..5)].into(), ..Options::default() };
    let report = check(&program(cache(0)), &program(lost), None, &options).unwrap();
    let d = report.functions[0].first_divergence.as_ref().unwrap();
    assert_eq!((report.verdict, d.a.as_str()), (Verdict::Different, "read_state `y`"), "{report}");
}

#[test]
fn every_seed_and_every_kind_of_content_runs_all_steps() {
    let options = Options { seed: 5, seeds: 3, draws: Draw::ALL.to_vec(), ..Options::default() };
    let same = || program(binary("mul", 0.5));
    let report = check(&same(), &same(), None, &options).unwrap();
    assert_eq!(report.functions[0].outputs[0].storage.elements, 3 * 5 * 4 * 64);
    assert!(
        report.to_string().starts_with("for 3 seeds from 5, normal, large, ties, zeros, masked inputs\n"),
        "{report}"
    );
    for options in [Options { seeds: 0, ..options.clone() }, Options { draws: vec![], ..options }] {
        assert!(matches!(check(&same(), &same(), None, &options), Err(EquivError::NoStep)));
    }
}

/// Each kind of content shows what the others hide.
#[test]
fn content_of_a_kind_finds_faults_of_its_kind() {
    let compare = |b: Graph, draw| {
        let mut a = Graph::new();
        let t = ty(F16, &[8, 8]);
        let x = a.input("x", t.clone());
        let y = a.op("identity", "y", t, vec![("x", x.into())]);
        a.output(y);
        let options = Options { draws: vec![draw], ..Options::default() };
        check(&program(a), &program(b), None, &options).unwrap().verdict
    };
    let through = |kind: &str, args: Vec<(&str, f64)>| {
        let mut g = Graph::new();
        let t = ty(F16, &[8, 8]);
        let x = g.input("x", t.clone());
        let args = args.into_iter().map(|(p, v)| (p, half(v).into()));
        let y = g.op(kind, "y", t, std::iter::once(("x", x.into())).chain(args).collect());
        g.output(y);
        g
    };
    let clip = || through("clip", vec![("alpha", -64.0), ("beta", 64.0)]);
    assert_eq!(compare(clip(), Draw::Normal), Verdict::Bitwise);
    assert_eq!(compare(clip(), Draw::Large), Verdict::Different);
    let plus = || through("add", vec![("y", 0.0)]);
    assert_eq!(compare(plus(), Draw::Normal), Verdict::Bitwise);
    assert_ne!(compare(plus(), Draw::Zeros), Verdict::Bitwise, "−0 + 0 is +0");
}

#[test]
fn given_inputs_take_the_place_of_drawn_ones() {
    let given = |x: f64| {
        let tensor = crate::interp::Tensor::floats(F16, &[8, 8], &[x; 64]);
        Options { steps: 2, given: vec![[("x".into(), tensor)].into()], ..Options::default() }
    };
    let report = |x: f64| check(&program(binary("mul", 0.0)), &program(binary("mul", -0.0)), None, &given(x)).unwrap();
    let first = |x: f64| report(x).functions[0].outputs[0].storage.first.clone().unwrap();
    assert_eq!((first(3.0).a.to_bits(), first(-3.0).a.to_bits()), (0f64.to_bits(), (-0f64).to_bits()));
    let nobody = Options {
        given: vec![[("z".into(), crate::interp::Tensor::ints(crate::ir::DType::I32, &[], &[1]))].into()],
        ..Options::default()
    };
    assert!(matches!(check(&program(cache(0)), &program(cache(0)), None, &nobody), Err(EquivError::NoInput(_))));
}

#[test]
fn tolerances_are_judged_tensor_by_tensor() {
    let report = compare(binary("add", 0.5), binary("add", 0.5 + 2f64.powi(-9))).unwrap();
    let y = &report.functions[0].outputs[0].storage;
    assert!(!report.satisfies(Exactness::Reassociated));
    assert!(report.satisfies(Exactness::Ulps(y.max_ulp)) && !report.satisfies(Exactness::Ulps(y.max_ulp - 1)));
    assert!(report.satisfies(Exactness::Tolerance(y.of_scale)) && y.of_scale > 0.0);
    assert!(!report.satisfies(Exactness::Tolerance(y.of_scale / 2.0)));
    let lost = compare(binary("add", 0.5), binary("real_div", 0.0)).unwrap();
    assert!(!lost.satisfies(Exactness::Ulps(u64::MAX - 1)) && !lost.satisfies(Exactness::Tolerance(1e300)));
}
