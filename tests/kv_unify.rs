//! `kv-unify`: states of equal type become one, in every bit.

mod support;

use proptest::prelude::*;

use milopt::equiv::{self, Exactness, Options};
use milopt::ir::{Function, OpId, Program};
use milopt::package::{Package, SaveOptions};
use milopt::passes::{Pipeline, Report, RunOptions};
use milopt::rewrite::InterfaceChange;
use milopt::{text, verify};
use support::files::fixture;
use support::{count, declined, main, optimize, program, save};

const PASS: &str = "kv-unify";

/// Two states [2, 1, 2, 8, 4], K and V of two layers.
const TWO: &str = "tensor<int32, [1]> position, tensor<fp16, [1, 2, 1, 4]> row, \
                   state<tensor<fp16, [2, 1, 2, 8, 4]>> k_cache, state<tensor<fp16, [2, 1, 2, 8, 4]>> v_cache";

/// Writes `row` at `position` of a layer and reads the layer, as exporters do.
fn layer(cache: &str, layer: i64) -> String {
    let ty = "tensor<fp16, [2, 1, 2, 8, 4]>";
    format!(
        "{ty} {cache}{layer}_old = read_state(input = {cache});
         tensor<int32, [1]> {cache}{layer}_end = add(x = position, y = [1]);
         tensor<int32, [5]> {cache}{layer}_b = concat(values = ([{layer}], [0], [0], position, [0]), axis = 0, interleave = false);
         tensor<int32, [5]> {cache}{layer}_e = concat(values = ([9], [0], [0], {cache}{layer}_end, [0]), axis = 0, interleave = false);
         {ty} {cache}{layer}_new = slice_update(x = {cache}{layer}_old, update = row, begin = {cache}{layer}_b, end = {cache}{layer}_e,
           begin_mask = [false, true, true, false, true], end_mask = [false, true, true, false, true],
           squeeze_mask = [true, false, false, false, false]);
         write_state(input = {cache}, data = {cache}{layer}_new);
         {ty} {cache}{layer}_all = read_state(input = {cache});
         tensor<fp16, [1, 2, 8, 4]> {cache}{layer} = slice_by_index(x = {cache}{layer}_all, begin = [{layer}, 0, 0, 0, 0],
           end = [0, 0, 0, 0, 0], end_mask = [false, true, true, true, true], squeeze_mask = [true, false, false, false, false]);
        "
    )
}

/// A program with these functions.
fn functions(list: &[(&str, &str, &str, &str)]) -> Program {
    let functions: String = list
        .iter()
        .map(|(name, signature, body, outputs)| {
            format!("func {name}<CoreML8>({signature}) {{\n{body}\n}} -> ({outputs});\n")
        })
        .collect();
    let mut p = text::parse(&format!("program(1.3) [specificationVersion = 9] {{\n{functions}}}")).unwrap();
    p.set_default_function(Some(list[0].0.into()));
    p
}

/// Names and types of the states of a function.
fn states(f: &Function) -> Vec<String> {
    let states = f.inputs().iter().filter(|&&v| f.ty(v).as_state().is_some());
    states.map(|&v| format!("{} {}", f.value(v).name(), f.ty(v))).collect()
}

fn joined(parts: &[&str], into: &str) -> InterfaceChange {
    InterfaceChange::Joined { states: parts.iter().map(|&n| n.into()).collect(), into: into.into() }
}

/// Compares over eight steps with the interface map of the report.
fn compare(a: &Program, b: &Program, report: &Report) -> equiv::Report {
    let options = Options { steps: 8, interface: report.interfaces(), ..Options::default() };
    equiv::check(a, b, None, &options).unwrap()
}

/// Rewrites and checks: every bit over eight steps, the rules for state code, and the states that are left.
fn unify(signature: &str, body: &str, outputs: &str, want: &[&str]) -> (Program, Report) {
    let before = program(signature, body, outputs);
    let (after, report) = optimize(&before, PASS);
    let verdict = compare(&before, &after, &report);
    assert!(verdict.satisfies(Exactness::Bitwise), "{verdict}\n{}", text::print_program(&after));
    assert_eq!(states(main(&after)), want, "{}", report.explain());
    check_state_code(main(&after));
    (after, report)
}

/// Every update that is written takes a read of its own, with no other op on the state in between.
fn check_state_code(f: &Function) {
    let ops: Vec<OpId> = f.ops(f.body()).collect();
    for (i, &write) in ops.iter().enumerate().filter(|(_, op)| f.op(**op).kind() == "write_state") {
        let update = f.producer(f.op(write).value("data").unwrap()).unwrap();
        assert_eq!(f.op(update).kind(), &"slice_update");
        let read = f.producer(f.op(update).value("x").unwrap()).unwrap();
        assert_eq!(f.op(read).kind(), &"read_state");
        assert_eq!(f.op(read).value("input"), f.op(write).value("input"));
        assert_eq!(f.value(f.op(read).results()[0]).uses().len(), 1, "{}", f.describe(read));
        let start = ops.iter().position(|&op| op == read).unwrap();
        let between = &ops[start + 1..i];
        assert!(between.iter().all(|&op| !f.op(op).kind().ends_with("_state")), "{}", f.describe(update));
    }
}

/// The begin vectors of the updates, where they are constant.
fn begins(p: &Program) -> Vec<Vec<i64>> {
    let f = main(p);
    f.all_ops()
        .into_iter()
        .filter(|&op| f.op(op).kind() == "slice_update")
        .filter_map(|op| f.ints(op, "begin"))
        .collect()
}

#[test]
fn stacked_keys_and_values_become_one_state() {
    let body: String =
        [("k_cache", 0), ("v_cache", 0), ("k_cache", 1), ("v_cache", 1)].map(|(c, l)| layer(c, l)).concat();
    let outputs = "k_cache0, v_cache0, k_cache1, v_cache1";
    let (after, report) = unify(TWO, &body, outputs, &["kv_cache state<tensor<fp16, [4, 1, 2, 8, 4]>>"]);
    assert_eq!(report.interface("main"), [&joined(&["k_cache", "v_cache"], "kv_cache")]);
    let op = |kind| count(&after, kind);
    assert_eq!([op("slice_update"), op("write_state"), op("read_state"), op("slice_by_index")], [4, 4, 8, 4]);
    assert_eq!((op("add"), op("concat")), (4, 8), "constant layers take no arithmetic");
}

#[test]
fn states_of_layers_are_stacked_in_the_order_of_the_inputs() {
    let ty = "tensor<fp16, [1, 2, 8, 4]>";
    let mut signature = format!("{ty} full, tensor<fp16, [1, 2, 1, 4]> row");
    let mut body = String::new();
    for (i, name) in ["k_0", "v_0", "k_1", "v_1"].iter().enumerate() {
        signature += &format!(", state<{ty}> {name}");
        body += &format!(
            "{ty} r{i} = read_state(input = {name});
             {ty} u{i} = slice_update(x = r{i}, update = row, begin = [0, 0, {i}, 0], end = [1, 2, {e}, 4],
               begin_mask = [true, false, false, false], end_mask = [true, true, false, true]);
             write_state(input = {name}, data = u{i});
             {ty} s{i} = read_state(input = {name});
             {ty} y{i} = mul(x = s{i}, y = full);\n",
            e = i + 1
        );
    }
    let (after, report) = unify(&signature, &body, "y0, y1, y2, y3", &["kv state<tensor<fp16, [4, 2, 8, 4]>>"]);
    assert_eq!(report.interface("main"), [&joined(&["k_0", "v_0", "k_1", "v_1"], "kv")]);
    assert_eq!(begins(&after), [[0, 0, 0, 0], [1, 0, 1, 0], [2, 0, 2, 0], [3, 0, 3, 0]]);
    assert_eq!(count(&after, "slice_by_index"), 4, "what is not sliced reads the rows of its state");
}

#[test]
fn rows_at_a_position_are_shifted() {
    let state = "tensor<fp16, [8, 4]>";
    for (bounds, q) in [
        ("begin = scalars, end = e", 2),
        ("begin = b, end = e", 2),
        ("begin = b, end = e, begin_mask = [false, true], end_mask = [false, true]", 2),
        ("begin = b, end = b, end_mask = [true, true]", 1),
        ("begin = [3, 0], end = [5, 4]", 2),
        ("begin = [-2, 0], end = [0, 4], end_mask = [true, false]", 2),
        ("begin = [2, 0], end = [7, 4], stride = [4, 1]", 2),
        ("begin = [5, 0], end = [0, 4], begin_mask = [false, false], squeeze_mask = [true, false]", 0),
        ("begin = [6, 0], end = [2, 4], begin_mask = [true, false]", 2),
        ("begin = b, end = e, squeeze_mask = [true, false]", 0),
    ] {
        let row = if q == 0 { "[4]".to_string() } else { format!("[{q}, 4]") };
        let signature =
            format!("tensor<int32, [1]> position, tensor<fp16, {row}> row, state<{state}> a, state<{state}> b_");
        let mut body = format!(
            "tensor<int32, [1]> past = add(x = position, y = [{}]);
             tensor<int32, [2]> b = concat(values = (position, [0]), axis = 0, interleave = false);
             tensor<int32, [2]> e = concat(values = (past, [4]), axis = 0, interleave = false);
             tensor<int32, []> first = squeeze(x = position, axes = [0]);
             tensor<int32, [2]> scalars = concat(values = (first, 0), axis = 0, interleave = false);",
            q.max(1)
        );
        for name in ["a", "b_"] {
            body += &format!(
                "{state} {name}r = read_state(input = {name});
                 {state} {name}u = slice_update(x = {name}r, update = row, {bounds});
                 write_state(input = {name}, data = {name}u);
                 {state} {name}s = read_state(input = {name});
                 {state} {name}y = exp(x = {name}s);"
            );
        }
        // A window that reaches to the end begins at the last row only.
        if bounds.contains("begin = b, end = b") {
            body = body.replace("values = (position, [0])", "values = (last, [0])");
            body = format!(
                "tensor<int32, [1]> zero = mul(x = position, y = [0]); tensor<int32, [1]> last = add(x = zero, y = [7]);{body}"
            );
        }
        let (after, _) = unify(&signature, &body, "ay, b_y", &["joined_state state<tensor<fp16, [16, 4]>>"]);
        let whole =
            main(&after).all_ops().into_iter().any(|op| main(&after).describe(op).contains("slice_update `au`"));
        assert!(!whole, "{bounds}");
        assert_eq!(count(&after, "slice_update"), 2, "{bounds}");
    }
}

#[test]
fn what_cannot_be_rebased_goes_by_the_rows() {
    // A position on axis 0 with a stride backwards, and a value that is no update at all.
    let signature = "tensor<fp16, [2, 4]> x, state<tensor<fp16, [6, 4]>> a, state<tensor<fp16, [6, 4]>> b";
    let body = "
        tensor<fp16, [6, 4]> r = read_state(input = a);
        tensor<fp16, [6, 4]> u = slice_update(x = r, update = x, begin = [4, 0], end = [0, 4], stride = [-2, 1]);
        write_state(input = a, data = u);
        tensor<fp16, [6, 4]> s = read_state(input = b);
        tensor<fp16, [6, 4]> t = relu(x = s);
        write_state(input = b, data = t);
        tensor<fp16, [6, 4]> v = read_state(input = b);
        tensor<fp16, [1, 4]> w = reduce_sum(x = v, axes = [0], keep_dims = true);
        tensor<fp16, [2, 4]> back = slice_by_index(x = v, begin = [3, 0], end = [0, 4], stride = [-2, 1], end_mask = [false, true]);";
    let (after, _) = unify(signature, body, "w, u, back", &["joined_state state<tensor<fp16, [12, 4]>>"]);
    assert_eq!(count(&after, "slice_update"), 3, "the old update stays, for the output");
    assert_eq!(begins(&after), [[4, 0], [0, 0], [6, 0]]);
}

#[test]
fn reads_are_sliced_in_one_step_where_the_bounds_are_known() {
    let state = "tensor<fp16, [6, 4]>";
    let signature = format!("tensor<int32, [1]> p, tensor<fp16, [6, 4]> x, state<{state}> a, state<{state}> b");
    for (op, ty, slices) in [
        ("slice_by_index(x = s, begin = [-3, 0], end = [-1, 4])", "[2, 4]", 1),
        ("slice_by_index(x = s, begin = [1, 1], end = [6, 3], stride = [3, 1])", "[2, 2]", 1),
        ("slice_by_index(x = s, begin = [0, 0], end = [9, 9], end_mask = [true, true])", "[6, 4]", 1),
        ("slice_by_index(x = s, begin = [-1, 0], end = [7, 4], squeeze_mask = [true, false])", "[4]", 1),
        ("slice_by_index(x = s, begin = [5, 0], end = [1, 4], stride = [-2, 1])", "[2, 4]", 2),
        ("slice_by_index(x = s, begin = c, end = d)", "[2, 1]", 1),
        ("slice_by_index(x = s, begin = g, end = h)", "[?, 4]", 2),
        ("slice_by_index(x = s, begin = i, end = d)", "[2, 1]", 1),
        ("slice_by_size(x = s, begin = [2, 0], size = [-1, 2])", "[4, 2]", 1),
        ("slice_by_size(x = s, begin = c, size = [2, 1])", "[2, 1]", 1),
        ("slice_by_size(x = s, begin = g, size = [1, 4])", "[1, 4]", 2),
        ("gather(x = s, indices = p, axis = 0)", "[1, 4]", 1),
    ] {
        let body = format!(
            "tensor<int32, [1]> p1 = add(x = p, y = [1]);
             tensor<int32, [2]> c = concat(values = ([1], p), axis = 0, interleave = false);
             tensor<int32, [2]> d = concat(values = ([3], p1), axis = 0, interleave = false);
             tensor<int32, [2]> g = concat(values = (p, [0]), axis = 0, interleave = false);
             tensor<int32, []> p0 = squeeze(x = p, axes = [0]);
             tensor<int32, [2]> i = concat(values = (1, p0), axis = 0, interleave = false);
             tensor<int32, [2]> h = concat(values = (p1, [4]), axis = 0, interleave = false);
             write_state(input = b, data = x);
             {state} s = read_state(input = b);
             tensor<fp16, {}> y = {op};
             {state} r = read_state(input = a);
             {state} z = exp(x = r);",
            ty.replace('?', "1")
        );
        let (after, _) = unify(&signature, &body, "y, z", &["joined_state state<tensor<fp16, [12, 4]>>"]);
        let sliced = count(&after, "slice_by_index") + count(&after, "slice_by_size");
        assert_eq!(sliced, slices + 1, "{op}\n{}", text::print_program(&after));
    }
}

#[test]
fn versions_are_kept_when_reads_and_writes_alternate() {
    let state = "tensor<fp16, [4, 2]>";
    let signature = format!("tensor<fp16, [1, 2]> x, state<{state}> k, state<{state}> v");
    let body = format!(
        "{state} k0 = read_state(input = k);
         {state} v0 = read_state(input = v);
         {state} k1 = slice_update(x = k0, update = x, begin = [1, 0], end = [2, 2]);
         {state} v1 = slice_update(x = v0, update = x, begin = [2, 0], end = [3, 2]);
         {state} between = mul(x = v0, y = k1);
         write_state(input = v, data = v1);
         write_state(input = k, data = k1);
         {state} k2 = read_state(input = k);
         write_state(input = k, data = v0);
         write_state(input = v, data = k2);
         {state} stale = slice_update(x = k0, update = x, begin = [3, 0], end = [4, 2]);
         write_state(input = k, data = stale);
         {state} last = read_state(input = v);
         {state} sum = add(x = last, y = k0);"
    );
    unify(&signature, &body, "between, k2, sum", &["kv state<tensor<fp16, [8, 2]>>"]);
}

#[test]
fn groups_are_by_type() {
    let signature = "tensor<fp16, [4]> x, state<tensor<fp16, [4]>> a, state<tensor<fp32, [4]>> w, state<tensor<fp16, [2, 2]>> m, \
                     state<tensor<fp16, [4]>> b, state<tensor<fp16, [2, 2]>> n";
    let body = "write_state(input = a, data = x);
                tensor<fp16, [4]> r = read_state(input = b);
                tensor<fp32, [4]> s = read_state(input = w);
                tensor<fp16, [2, 2]> t = read_state(input = n);";
    let before = program(signature, body, "r, s, t");
    let (after, report) = optimize(&before, PASS);
    let want = [
        "w state<tensor<fp32, [4]>>",
        "joined_state state<tensor<fp16, [8]>>",
        "joined_state_1 state<tensor<fp16, [4, 2]>>",
    ];
    assert_eq!(states(main(&after)), want);
    assert_eq!(
        report.interface("main"),
        [&joined(&["a", "b"], "joined_state"), &joined(&["m", "n"], "joined_state_1")]
    );
    assert!(declined(&report, "state `w`", "no other state has this type"), "{}", report.explain());
    assert!(compare(&before, &after, &report).satisfies(Exactness::Bitwise));
}

#[test]
fn what_is_not_followed_is_declined() {
    let signature = "tensor<bool, []> c, tensor<fp16, [4]> x, state<tensor<fp16, [4]>> a, state<tensor<fp16, [4]>> b";
    let nested = "tensor<fp16, [4]> y = cond(pred = c) block() {
                    tensor<fp16, [4]> r = read_state(input = a);
                  } -> (r), block() {
                  } -> (x);";
    let opaque = "tensor<fp16, [4]> y = custom_thing(x = x);";
    for (body, state, reason) in [
        (nested, "state `a`", "cond `y` uses the state in a way that is not followed"),
        (nested, "state `b`", "no other state has this type"),
        (opaque, "state `b`", "custom_thing `y` may use any state"),
    ] {
        let before = program(signature, body, "y");
        let mut after = before.clone();
        let report = Pipeline::parse(PASS).unwrap().run(&mut after, &RunOptions::default()).unwrap();
        assert!(declined(&report, state, reason), "{}", report.explain());
        assert!(!report.changed() && report.interface("main").is_empty());
        assert_eq!(text::print_program(&after), text::print_program(&before));
    }
}

/// Writes `x` into the second state and reads the first.
fn two_states(ty: &str, first: &str, second: &str) -> [String; 2] {
    [
        format!("{ty} x, state<{ty}> {first}, state<{ty}> {second}"),
        format!("write_state(input = {second}, data = x); {ty} y = read_state(input = {first});"),
    ]
}

#[test]
fn functions_that_share_states_are_rewritten_alike() {
    let [signature, body] = two_states("tensor<fp16, [4, 2]>", "k", "v");
    let [other, other_body] = two_states("tensor<fp16, [4, 2]>", "v", "k");
    let before = functions(&[("decode", &signature, &body, "y"), ("prefill", &other, &other_body, "y")]);
    let (after, report) = optimize(&before, PASS);
    for f in ["decode", "prefill"] {
        assert_eq!(states(after.function(f).unwrap()), ["kv state<tensor<fp16, [8, 2]>>"], "{f}");
        assert_eq!(report.interface(f), [&joined(&["k", "v"], "kv")], "{f}: the order is the same everywhere");
    }
    assert!(compare(&before, &after, &report).satisfies(Exactness::Bitwise));
}

#[test]
fn a_state_shared_with_a_function_left_out_stays() {
    let [signature, body] = two_states("tensor<fp16, [4, 2]>", "k", "v");
    let before = functions(&[("decode", &signature, &body, "y"), ("prefill", &signature, &body, "y")]);
    let mut after = before.clone();
    let only = RunOptions::default().only("decode");
    let report = Pipeline::parse(PASS).unwrap().run(&mut after, &only).unwrap();
    assert!(declined(&report, "state `k`", "function `prefill` shares the state"), "{}", report.explain());
    assert!(report.explain().contains("possible if all functions are rewritten"));
    assert_eq!(text::print_program(&after), text::print_program(&before));
}

#[test]
fn a_state_is_joined_in_all_functions_or_in_none() {
    let [signature, body] = two_states("tensor<fp16, [4, 2]>", "k", "v");
    let [wide, wide_body] = two_states("tensor<fp16, [5, 2]>", "k", "v");
    let [apart, apart_body] = two_states("tensor<fp16, [4, 2]>", "k", "w");
    let nested = "write_state(input = v, data = x);
                  tensor<bool, []> c = less(x = 1, y = 2);
                  tensor<fp16, [4, 2]> y = cond(pred = c) block() { tensor<fp16, [4, 2]> r = read_state(input = k); } -> (r), block() {} -> (x);";
    for (second, second_body, reason) in [
        (&wide[..], &wide_body[..], "different types"),
        (&apart, &apart_body, "no other state has this type"),
        (&signature, nested, "not followed"),
    ] {
        let mut p = functions(&[("decode", &signature, &body, "y"), ("prefill", second, second_body, "y")]);
        let before = text::print_program(&p);
        let report = Pipeline::parse(PASS).unwrap().run(&mut p, &RunOptions::default()).unwrap();
        assert!(declined(&report, "state `k`", reason), "{}", report.explain());
        assert_eq!(text::print_program(&p), before, "{reason}");
    }
}

#[test]
fn the_budget_counts_groups() {
    let [signature, body] = two_states("tensor<fp16, [4, 2]>", "k", "v");
    let mut p = program(&signature, &body, "y");
    let report = Pipeline::parse(PASS).unwrap().run(&mut p, &RunOptions::default().stop_after(0)).unwrap();
    assert!(!report.changed());
    assert_eq!(states(main(&p)).len(), 2);
}

#[test]
fn wrong_rows_and_swapped_states_are_caught() {
    let body: String = [("k_cache", 0), ("v_cache", 1)].map(|(c, l)| layer(c, l)).concat();
    let before = program(TWO, &body, "k_cache0, v_cache1");
    let (after, report) = optimize(&before, PASS);
    let printed = text::print_program(&after);
    let check = |b: &Program, changes: Vec<InterfaceChange>| {
        let options = Options { steps: 8, interface: [("main".into(), changes)].into(), ..Options::default() };
        equiv::check(&before, b, None, &options).unwrap().satisfies(Exactness::Reassociated)
    };
    assert!(check(&after, vec![joined(&["k_cache", "v_cache"], "kv_cache")]));
    assert!(!check(&after, vec![joined(&["v_cache", "k_cache"], "kv_cache")]), "swapped states");
    for (right, wrong) in [
        ("begin = [3, 0, 0, 0, 0]", "begin = [2, 0, 0, 0, 0]"),
        ("values = ([3], ", "values = ([2], "),
        ("values = ([0], ", "values = ([1], "),
    ] {
        assert!(printed.contains(right), "{right}\n{printed}");
        let mutant = text::parse(&printed.replacen(right, wrong, 1)).unwrap();
        assert!(!check(&mutant, report.interface("main").into_iter().cloned().collect()), "{wrong}");
    }
}

/// Fixtures with the states that the pass leaves.
const FIXTURES: [(&str, &str); 6] = [
    ("exaone4_q1", "kv_cache state<tensor<fp16, [4, 1, 2, 32, 16]>>"),
    ("exaone4_q8", "kv_cache state<tensor<fp16, [4, 1, 2, 32, 16]>>"),
    ("llama_q1", "kv_cache state<tensor<fp16, [4, 1, 2, 32, 16]>>"),
    ("cache_per_layer", "kv state<tensor<fp16, [4, 2, 24, 16]>>"),
    ("mistral_flexible_stateful", "kv_cache state<tensor<fp16, [4, 1, 2, 32, 16]>>"),
    ("exaone4_decode_prefill", "kv_cache state<tensor<fp16, [4, 1, 2, 32, 16]>>"),
];

#[test]
fn fixtures_compute_the_same_saved_and_opened_again() {
    for (name, state) in FIXTURES {
        let original = Package::open(fixture(name)).unwrap();
        let mut package = Package::open(fixture(name)).unwrap();
        let report = Pipeline::parse(PASS).unwrap().run(package.program_mut(), &RunOptions::default()).unwrap();
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("unified.mlpackage");
        save(&package, &path, &SaveOptions::default()).unwrap();
        let saved = Package::open(&path).unwrap();
        verify::typed(saved.program()).unwrap_or_else(|e| panic!("{name}: {e}"));
        for (f, old) in saved.program().functions().iter().zip(original.program().functions()) {
            assert_eq!(states(f), [state], "{name}");
            check_state_code(f);
            let described: Vec<_> =
                f.interface().states.iter().map(|s| (&*s.name, &s.array().unwrap().shape[..])).collect();
            let shape = f.ty(f.input(described[0].0).unwrap()).as_state().unwrap().known_shape().unwrap();
            assert_eq!(described, [(described[0].0, &shape[..])], "{name}");
            assert_eq!(f.interface().inputs, old.interface().inputs, "{name}");
            let kinds =
                |f: &Function, kind: &str| f.all_ops().into_iter().filter(|&op| f.op(op).kind() == kind).count();
            for kind in ["slice_update", "write_state"] {
                assert_eq!(kinds(f, kind), kinds(old, kind), "{name} {kind}");
            }
        }
        let verdict = compare(original.program(), saved.program(), &report);
        assert!(verdict.satisfies(Exactness::Bitwise), "{name}: {verdict}");
    }
}

#[test]
fn it_composes_with_the_other_passes() {
    for name in ["exaone4_q1", "cache_per_layer"] {
        let original = Package::open(fixture(name)).unwrap();
        for (passes, copies) in [("gqa-fold,view-simplify,kv-unify,dce", 0), ("kv-unify,gqa-fold,view-simplify,dce", 2)]
        {
            let (after, report) = optimize(original.program(), passes);
            // Joined, the values are written between the read of the keys and the product: folding leaves those copies.
            assert_eq!(count(&after, "tile"), copies, "{name} {passes}");
            assert_eq!(report.exactness(), milopt::passes::Exactness::Bitwise);
        }
    }
}

/// One thing that a random program does; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Act {
    /// Reads a state.
    Read(usize),
    /// Puts rows into a value; the position is constant or the input.
    Update { value: usize, constant: Option<usize>, squeeze: bool },
    /// Writes a value.
    Write { state: usize, value: usize },
    /// Returns rows of a value.
    Look { value: usize, begin: usize, end: usize },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..4usize).prop_map(Act::Read),
        (0..9usize, proptest::option::of(0..5usize), any::<bool>())
            .prop_map(|(value, constant, squeeze)| Act::Update { value, constant, squeeze }),
        (0..4usize, 0..9usize).prop_map(|(state, value)| Act::Write { state, value }),
        (0..9usize, 0..5usize, 0..5usize).prop_map(|(value, begin, end)| Act::Look { value, begin, end }),
    ]
}

/// Signature, body and outputs of what these acts do to `n` states of five rows.
fn random_program(n: usize, acts: &[Act]) -> (String, String, String) {
    let ty = "tensor<fp16, [5, 2]>";
    let mut signature = format!("tensor<int32, [1]> p, tensor<fp16, [1, 2]> row, tensor<fp16, [2]> flat, {ty} x");
    (0..n).for_each(|i| signature += &format!(", state<{ty}> s{i}_cache"));
    let mut body = "tensor<int32, [1]> p1 = add(x = p, y = [1]);
        tensor<int32, [2]> b = concat(values = (p, [0]), axis = 0, interleave = false);
        tensor<int32, [2]> e = concat(values = (p1, [2]), axis = 0, interleave = false);\n"
        .to_string();
    let mut values = vec!["x".to_string()];
    let mut outputs = vec![];
    for (i, act) in acts.iter().enumerate() {
        match act {
            Act::Read(state) => {
                body += &format!("{ty} r{i} = read_state(input = s{}_cache);\n", state % n);
                values.push(format!("r{i}"));
            }
            Act::Update { value, constant, squeeze } => {
                let (begin, end) = match constant {
                    Some(c) => (format!("[{c}, 0]"), format!("[{}, 2]", c + 1)),
                    None => ("b".into(), "e".into()),
                };
                let rest = if *squeeze { ", update = flat, squeeze_mask = [true, false]" } else { ", update = row" };
                let old = &values[value % values.len()];
                body += &format!("{ty} u{i} = slice_update(x = {old}, begin = {begin}, end = {end}{rest});\n");
                values.push(format!("u{i}"));
            }
            Act::Write { state, value } => {
                let data = &values[value % values.len()];
                body += &format!("write_state(input = s{}_cache, data = {data});\n", state % n);
            }
            Act::Look { value, begin, end } => {
                let (begin, end) = (begin.min(end), begin.max(end) + 1);
                let x = &values[value % values.len()];
                body += &format!(
                    "tensor<fp16, [{}, 2]> y{i} = slice_by_index(x = {x}, begin = [{begin}, 0], end = [{end}, 2]);\n",
                    end - begin
                );
                outputs.push(format!("y{i}"));
            }
        }
    }
    for (i, value) in values.iter().enumerate() {
        body += &format!("{ty} z{i} = mul(x = {value}, y = x);\n");
        outputs.push(format!("z{i}"));
    }
    (signature, body, outputs.join(", "))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_reads_and_writes_is_kept(n in 2..5usize, acts in proptest::collection::vec(act(), 1..14)) {
        let (signature, body, outputs) = random_program(n, &acts);
        unify(&signature, &body, &outputs, &[&format!("s_cache state<tensor<fp16, [{}, 2]>>", 5 * n)]);
    }
}
