//! What `kv-defer` and `kv-merge` leave alone, bit for bit, and what they say of it.

mod support;

use milopt::ir::Program;
use milopt::passes::{Pipeline, Preset, RunOptions};
use milopt::text;
use support::{program, reassociate};

/// Keys and values of one layer, [1, 2, 8, 4], one new row each at position `p`.
const SIGNATURE: &str = "tensor<fp16, [1, 2, 1, 4]> x, tensor<int32, [1]> p, tensor<fp16, [1, 1, 1, 8]> mask, \
                         state<tensor<fp16, [1, 2, 8, 4]>> k, state<tensor<fp16, [1, 2, 8, 4]>> v";
const CACHE: &str = "tensor<fp16, [1, 2, 8, 4]>";

/// `start` and `next`, a row further, as bounds of the whole cache.
const BOUNDS: &str = "tensor<int32, [1]> p1 = add(x = p, y = [1]);
    tensor<int32, [4]> start = concat(values = ([0, 0], p, [0]), axis = 0, interleave = false);
    tensor<int32, [4]> next = concat(values = ([1, 2], p1, [4]), axis = 0, interleave = false);";

/// Writes `x` to a state between two bounds.
fn write(state: &str, n: usize, begin: &str, end: &str) -> String {
    format!(
        "{CACHE} {state}r{n} = read_state(input = {state});
         {CACHE} {state}u{n} = slice_update(x = {state}r{n}, update = x, begin = {begin}, end = {end});
         write_state(input = {state}, data = {state}u{n});\n"
    )
}

/// Reads a state as `{state}_all`.
fn read(state: &str) -> String {
    format!("{CACHE} {state}_all = read_state(input = {state});\n")
}

/// Attention over `k_all` and `v_all`.
const ATTENTION: &str =
    "tensor<fp16, [1, 2, 1, 8]> s = matmul(x = x, y = k_all, transpose_x = false, transpose_y = true);
    tensor<fp16, [1, 2, 1, 8]> a = add(x = s, y = mask);
    tensor<fp16, [1, 2, 1, 8]> w = softmax(x = a, axis = -1);
    tensor<fp16, [1, 2, 1, 4]> out = matmul(x = w, y = v_all, transpose_x = false, transpose_y = false);";

/// A decoder of one layer, which is deferred as it is.
fn layer() -> String {
    [BOUNDS, "\n", &write("k", 0, "start", "next"), &write("v", 0, "start", "next"), &read("k"), &read("v"), ATTENTION]
        .concat()
}

/// Replaces what must be there.
#[track_caller]
fn with(text: &str, part: &str, by: &str) -> String {
    assert!(text.contains(part), "{part:?} is not in {text}");
    text.replace(part, by)
}

/// A pass leaves a program as it is and says why, and what would help; the whole pipeline keeps what it computes.
#[track_caller]
fn declines(pass: &str, p: &Program, op: &str, reason: &str, remedy: &str) {
    let mut after = p.clone();
    let report = Pipeline::parse(pass).unwrap().run(&mut after, &RunOptions::default()).unwrap();
    assert_eq!(text::print_program(p), text::print_program(&after), "{}", report.explain());
    let said = report.functions.iter().flat_map(|f| &f.passes).flat_map(|p| &p.declined);
    let fits = |d: &milopt::rewrite::Declined| {
        d.op.contains(op) && d.reason.contains(reason) && d.remedy.as_deref().is_some_and(|r| r.contains(remedy))
    };
    assert!(said.into_iter().any(fits), "{}\n{}", report.explain(), text::print_program(p));
    let names: Vec<&str> = Preset::O2.passes().iter().map(|p| p.name).collect();
    reassociate(p, &names.join(","));
}

#[test]
fn the_layer_itself_is_deferred() {
    let (after, report) = reassociate(&program(SIGNATURE, &layer(), "out"), "kv-defer");
    assert!(report.changed() && support::count(&after, "split") == 1, "{}", report.explain());
}

#[test]
fn a_read_that_is_not_attention() {
    let body = layer() + "\ntensor<fp16, [1, 2, 1, 1]> sum = reduce_sum(x = k_all, axes = [2, 3], keep_dims = true);";
    declines(
        "kv-defer",
        &program(SIGNATURE, &body, "out, sum"),
        "k_all",
        "reduce_sum `sum` reduces what it reads",
        "softmax over keys",
    );
}

#[test]
fn writes_whose_order_matters() {
    let body = BOUNDS.to_string() + &write("k", 0, "start", "next") + &write("k", 1, "[0, 0, 3, 0]", "[1, 2, 4, 4]");
    let body = body + "tensor<fp16, [1, 2, 1, 4]> out = relu(x = x);";
    declines("kv-merge", &program(SIGNATURE, &body, "out"), "`k`", "may write the same elements", "provably apart");
}

#[test]
fn windows_that_overlap() {
    let second = write("k", 1, "[0, 0, 3, 0]", "[1, 2, 4, 4]") + &read("k");
    let body = with(&layer(), &read("k"), &second);
    declines("kv-defer", &program(SIGNATURE, &body, "out"), "k_all", "several pending writes touch", "written once");
}

#[test]
fn keys_and_values_at_different_positions() {
    let body = with(&layer(), &write("v", 0, "start", "next"), &write("v", 0, "[0, 0, 3, 0]", "[1, 2, 4, 4]"));
    declines(
        "kv-defer",
        &program(SIGNATURE, &body, "out"),
        "",
        "keys and values of different positions",
        "same position",
    );
}

#[test]
fn a_state_that_is_written_in_a_nested_block() {
    let body = with(&layer(), &write("v", 0, "start", "next"), "");
    let nested = format!(
        "tensor<fp16, [1, 2, 1, 4]> branch = cond(pred = true) block() {{ {} }} -> (x), block() {{ }} -> (x);\n",
        write("v", 0, "start", "next")
    );
    let body = with(&body, &read("k"), &(nested + &read("k")));
    declines("kv-defer", &program(SIGNATURE, &body, "out, branch"), "v_all", "out of sight", "own block");
}

#[test]
fn content_that_is_an_output() {
    declines("kv-defer", &program(SIGNATURE, &layer(), "out, k_all"), "k_all", "is an output", "something else");
    // What an output is computed from.
    let body = layer() + "\ntensor<fp16, [1, 2, 8, 4]> more = relu(x = k_all);";
    declines("kv-defer", &program(SIGNATURE, &body, "out, more"), "k_all", "is an output", "something else");
    let body = layer() + "\ntensor<fp16, [1, 2, 1, 8]> weights = identity(x = w);";
    declines("kv-defer", &program(SIGNATURE, &body, "out, weights"), "", "is an output", "something else");
}

#[test]
fn a_softmax_over_heads() {
    let body = with(&layer(), "axis = -1", "axis = 1");
    let reason = "softmax `w` works along another axis than the keys";
    declines("kv-defer", &program(SIGNATURE, &body, "out"), "", reason, "one softmax over keys");
}

/// The layer with another way to write its keys.
fn keys_by(ops: &str) -> Program {
    let write_k = write("k", 0, "start", "next");
    program(SIGNATURE, &with(&layer(), &write_k, &format!("{CACHE} old = read_state(input = k);\n{ops}")), "out")
}

const REST: &str =
    "tensor<fp16, [1, 2, 7, 4]> rest = slice_by_index(x = old, begin = [0, 0, 1, 0], end = [1, 2, 8, 4]);";

#[test]
fn a_cache_that_slides() {
    let whole = format!(
        "{REST} {CACHE} slid = concat(values = (rest, x), axis = 2, interleave = false);
         write_state(input = k, data = slid);"
    );
    declines("kv-defer", &keys_by(&whole), "k_all", "the cache slides", "rows stay");
    let update = format!(
        "{REST} {CACHE} slid = concat(values = (rest, x), axis = 2, interleave = false);
         {CACHE} again = read_state(input = k);
         {CACHE} updated = slice_update(x = again, update = slid, begin = [0, 0, 0, 0], end = [1, 2, 8, 4]);
         write_state(input = k, data = updated);"
    );
    declines("kv-defer", &keys_by(&update), "k_all", "the cache slides", "rows stay");
}

#[test]
fn a_cache_that_is_rolled() {
    let last = "begin = [0, 0, -1, 0], end = [0, 0, 0, 0], begin_mask = [true, true, false, true], \
                end_mask = [true, true, true, true]";
    let gathered = format!(
        "{CACHE} rolled = gather(x = old, indices = [1, 2, 3, 4, 5, 6, 7, 0], axis = 2, batch_dims = 0);
         {CACHE} updated = slice_update(x = rolled, update = x, {last});
         write_state(input = k, data = updated);"
    );
    declines("kv-defer", &keys_by(&gathered), "k_all", "the cache is rolled", "rows stay");
    let joined = format!(
        "{REST}
         tensor<fp16, [1, 2, 1, 4]> first = slice_by_index(x = old, begin = [0, 0, 0, 0], end = [1, 2, 1, 4]);
         {CACHE} rolled = concat(values = (rest, first), axis = 2, interleave = false);
         {CACHE} updated = slice_update(x = rolled, update = x, {last});
         write_state(input = k, data = updated);"
    );
    declines("kv-defer", &keys_by(&joined), "k_all", "the cache is rolled", "rows stay");
}

#[test]
fn a_cache_that_is_a_ring() {
    // Both keys and values, so that nothing else is in the way.
    let ring = with(BOUNDS, "p1 = add(x = p, ", "p1 = add(x = slot, ");
    let ring = with(&ring, "([0, 0], p, [0])", "([0, 0], slot, [0])");
    for slot in [
        "tensor<int32, [1]> slot = mod(x = p, y = [8]);",
        "tensor<int32, [1]> times = floor_div(x = p, y = [8]);
         tensor<int32, [1]> whole = mul(x = times, y = [8]);
         tensor<int32, [1]> slot = sub(x = p, y = whole);",
    ] {
        let body = with(&layer(), BOUNDS, &format!("{slot}{ring}"));
        let p = program(SIGNATURE, &body, "out");
        declines("kv-defer", &p, "k_all", "the cache is a ring", "a row for each position");
    }
}

#[test]
fn a_cache_that_is_overwritten_by_a_blend() {
    let select = format!(
        "tensor<int32, [8]> slots = range_1d(start = 0, end = 8, step = 1);
         tensor<bool, [8]> here = equal(x = slots, y = p);
         tensor<bool, [8, 1]> column = expand_dims(x = here, axes = [1]);
         {CACHE} tiled = tile(x = x, reps = [1, 1, 8, 1]);
         {CACHE} blend = select(cond = column, a = tiled, b = old);
         write_state(input = k, data = blend);"
    );
    declines("kv-defer", &keys_by(&select), "k_all", "by a blend", "slice_update");
    let covering = with(
        &select,
        "write_state(input = k, data = blend)",
        &format!(
            "{CACHE} again = read_state(input = k);
             {CACHE} updated = slice_update(x = again, update = blend, begin = [0, 0, 0, 0], end = [0, 0, 0, 0],
                 begin_mask = [true, true, true, true], end_mask = [true, true, true, true]);
             write_state(input = k, data = updated)"
        ),
    );
    declines("kv-defer", &keys_by(&covering), "k_all", "by a blend", "slice_update");
}

#[test]
fn a_cache_that_rows_are_scattered_to() {
    let scattered = format!(
        "{CACHE} new = scatter(data = old, indices = p, updates = x, axis = 2, mode = \"update\");
         write_state(input = k, data = new);"
    );
    declines("kv-defer", &keys_by(&scattered), "k_all", "by a scatter", "slice_update");
}

#[test]
fn a_state_that_is_replaced() {
    let replaced = format!("{CACHE} tiled = tile(x = x, reps = [1, 1, 8, 1]); write_state(input = k, data = tiled);");
    declines("kv-defer", &keys_by(&replaced), "k_all", "overwritten as a whole before it is read", "slice_update");
}
