//! `kv-slices`: blends and scatters of rows become `slice_update`s.

mod support;

use std::ops::Range;

use proptest::prelude::*;

use milopt::analysis::state::functional;
use milopt::equiv::{self, Exactness, Options};
use milopt::ir::Program;
use milopt::passes::{Pipeline, Report, RunOptions};
use milopt::{text, verify};
use support::{count, declined, main, program};

/// Runs a pipeline on a copy, compares over eight steps with positions from a range and at both of its ends, and runs it
/// again.
fn judge(before: &Program, passes: &str, positions: Range<i64>, exactness: Exactness) -> (Program, Report) {
    verify::typed(before).unwrap_or_else(|e| panic!("before: {e}"));
    let pipeline = Pipeline::parse(passes).unwrap();
    let mut after = before.clone();
    let report = pipeline.run(&mut after, &RunOptions::default()).unwrap();
    let shown = || format!("{}\n{}\n{}", report.explain(), text::print_program(before), text::print_program(&after));
    verify::typed(&after).unwrap_or_else(|e| panic!("after: {e}\n{}", shown()));
    let last = positions.end - 1;
    let has_position = main(before).input("p").is_some();
    for range in [positions.clone(), 0..1, last..last + 1] {
        let mut options = Options { steps: 8, ..Options::default() };
        if has_position {
            options.ranges.insert("p".into(), range);
        }
        let verdict = equiv::check(before, &after, None, &options).unwrap_or_else(|e| panic!("{e:?}\n{}", shown()));
        assert!(verdict.satisfies(exactness), "{verdict}\n{}", shown());
    }
    let again = pipeline.run(&mut after.clone(), &RunOptions::default()).unwrap();
    assert!(!again.changed(), "a second run changes something:\n{again}\n{}", shown());
    (after, report)
}

const PASS: &str = "kv-slices,dce";

/// Rewrites one update of `old` [2, 8, 4] in every bit, as an input that is returned and as a state, and leaves one
/// `slice_update` and none of these kinds.
#[track_caller]
fn becomes_a_slice(inputs: &str, update: &str, positions: Range<i64>, gone: &[&str]) {
    let cache = "tensor<fp16, [2, 8, 4]>";
    let plain = program(&format!("{cache} old, {inputs}"), update, "all");
    let body = format!(
        "{cache} old = read_state(input = cache);\n{update}
         write_state(input = cache, data = all);
         {cache} out = relu(x = all);"
    );
    let state = program(&format!("{inputs}, state<{cache}> cache"), &body, "out");
    for (before, reads) in [(plain, 0), (state, 2)] {
        let (after, report) = judge(&before, PASS, positions.clone(), Exactness::Bitwise);
        let shown = format!("{}\n{}", report.explain(), text::print_program(&after));
        assert_eq!((count(&after, "slice_update"), count(&after, "read_state")), (1, reads), "{shown}");
        for kind in gone {
            assert_eq!(count(&after, kind), 0, "{kind}: {shown}");
        }
    }
}

const ROW: &str = "tensor<int32, [1]> p, tensor<fp16, [2, 1, 4]> row";

const HERE: &str = "
    tensor<int32, [8]> rows = range_1d(start = 0, end = 8, step = 1);
    tensor<bool, [8]> here = equal(x = rows, y = p);
    tensor<bool, [8, 1]> column = expand_dims(x = here, axes = [1]);";

#[test]
fn selects() {
    for (what, update) in [
        ("broadcast", format!("{HERE} tensor<fp16, [2, 8, 4]> all = select(cond = column, a = row, b = old);")),
        (
            "turned over",
            "tensor<int32, [8, 1]> rows = reshape(x = [0, 1, 2, 3, 4, 5, 6, 7], shape = [8, 1]);
             tensor<bool, [8, 1]> other = not_equal(x = p, y = rows);
             tensor<fp16, [2, 8, 4]> all = select(cond = other, a = old, b = row);"
                .into(),
        ),
        (
            "tiled",
            format!(
                "{HERE} tensor<bool, [1, 8, 1]> wide = expand_dims(x = column, axes = [0]);
                 tensor<bool, [2, 8, 4]> cond = tile(x = wide, reps = [2, 1, 4]);
                 tensor<fp16, [2, 8, 4]> new = tile(x = row, reps = [1, 8, 1]);
                 tensor<fp16, [2, 8, 4]> all = select(cond = cond, a = new, b = old);"
            ),
        ),
        (
            "logical_not",
            format!(
                "{HERE} tensor<bool, [8, 1]> other = logical_not(x = column);
                 tensor<fp16, [2, 8, 4]> all = select(cond = other, a = old, b = row);"
            ),
        ),
        (
            "in floats",
            "tensor<int32, [8]> rows = range_1d(start = 0, end = 8, step = 1);
             tensor<fp16, [8]> floats = cast(x = rows, dtype = \"fp16\");
             tensor<fp16, [1]> at = cast(x = p, dtype = \"fp16\");
             tensor<fp16, [8, 1]> column = reshape(x = floats, shape = [8, 1]);
             tensor<bool, [8, 1]> here = equal(x = column, y = at);
             tensor<fp16, [2, 8, 4]> all = select(cond = here, a = row, b = old);"
                .into(),
        ),
    ] {
        println!("{what}");
        becomes_a_slice(ROW, &update, 0..8, &["select", "equal", "not_equal", "tile"]);
    }
}

#[test]
fn a_scalar_position_and_a_row_among_as_many() {
    let inputs = "tensor<int32, []> p, tensor<fp16, [2, 8, 4]> new";
    let update = "tensor<int32, [8]> rows = range_1d(start = 0, end = 8, step = 1);
        tensor<bool, [8]> here = equal(x = rows, y = p);
        tensor<bool, [8, 1]> column = expand_dims(x = here, axes = [1]);
        tensor<fp16, [2, 8, 4]> all = select(cond = column, a = new, b = old);";
    becomes_a_slice(inputs, update, 0..8, &["select"]);
}

#[test]
fn a_row_for_all_heads_and_a_shifted_position() {
    let inputs = "tensor<int32, [1]> p, tensor<fp16, [4]> new";
    let update = "tensor<int32, [1]> q = add(x = p, y = [2]);
        tensor<int32, [8, 1]> rows = reshape(x = [0, 1, 2, 3, 4, 5, 6, 7], shape = [8, 1]);
        tensor<bool, [8, 1]> here = equal(x = rows, y = q);
        tensor<fp16, [2, 8, 4]> all = select(cond = here, a = new, b = old);";
    becomes_a_slice(inputs, update, 0..6, &["select"]);
}

#[test]
fn constant_positions() {
    let inputs = "tensor<fp16, [2, 1, 4]> row";
    for p in [0, 3, 7] {
        let update = HERE.replace("y = p", &format!("y = [{p}]"))
            + "tensor<fp16, [2, 8, 4]> all = select(cond = column, a = row, b = old);";
        becomes_a_slice(inputs, &update, 0..8, &["select"]);
    }
}

#[test]
fn arithmetic() {
    for update in [
        format!(
            "{HERE} tensor<fp16, [8, 1]> m = cast(x = column, dtype = \"fp16\");
             tensor<fp16, [8, 1]> n = sub(x = fp16(1.0), y = m);
             tensor<fp16, [2, 8, 4]> kept = mul(x = old, y = n);
             tensor<fp16, [2, 8, 4]> added = mul(x = row, y = m);
             tensor<fp16, [2, 8, 4]> all = add(x = kept, y = added);"
        ),
        "tensor<fp16, [1, 8]> hot = one_hot(indices = p, one_hot_vector_size = 8, axis = -1, on_value = fp16(1.0), off_value = fp16(0.0));
         tensor<fp16, [8, 1]> m = reshape(x = hot, shape = [8, 1]);
         tensor<fp16, [2, 8, 4]> gone = mul(x = m, y = old);
         tensor<fp16, [2, 8, 4]> kept = sub(x = old, y = gone);
         tensor<fp16, [2, 8, 4]> new = tile(x = row, reps = [1, 8, 1]);
         tensor<fp16, [2, 8, 4]> added = mul(x = m, y = new);
         tensor<fp16, [2, 8, 4]> all = add(x = added, y = kept);"
            .into(),
    ] {
        becomes_a_slice(ROW, &update, 0..8, &["mul", "sub", "one_hot", "equal"]);
    }
}

#[test]
fn one_hot_matrices() {
    for q in [1, 3] {
        let inputs = format!("tensor<int32, [1]> p, tensor<fp16, [2, {q}, 4]> new");
        let positions = format!(
            "tensor<int32, [{q}]> count = range_1d(start = 0, end = {q}, step = 1);
             tensor<int32, [{q}]> at = add(x = count, y = p);
             tensor<int32, [8, 1]> rows = reshape(x = [0, 1, 2, 3, 4, 5, 6, 7], shape = [8, 1]);
             tensor<bool, [8, {q}]> hits = equal(x = rows, y = at);
             tensor<fp16, [8, {q}]> flat = cast(x = hits, dtype = \"fp16\");
             tensor<fp16, [1, 8, {q}]> one = expand_dims(x = flat, axes = [0]);
             tensor<fp16, [2, 8, {q}]> matrix = tile(x = one, reps = [2, 1, 1]);
             tensor<fp16, [8, 1]> m = reduce_sum(x = flat, axes = [-1], keep_dims = true);
             tensor<fp16, [8, 1]> n = sub(x = fp16(1.0), y = m);
             tensor<fp16, [2, 8, 4]> kept = mul(x = old, y = n);
             tensor<fp16, [2, 8, 4]> added = matmul(x = matrix, y = new, transpose_x = false, transpose_y = false);
             tensor<fp16, [2, 8, 4]> all = add(x = kept, y = added);"
        );
        becomes_a_slice(&inputs, &positions, 0..9 - q, &["matmul", "mul", "reduce_sum"]);
    }
}

#[test]
fn scatters() {
    for q in [1, 3] {
        let inputs = format!("tensor<int32, [1]> p, tensor<fp16, [2, {q}, 4]> new");
        let at = format!(
            "tensor<int32, [{q}]> count = range_1d(start = 0, end = {q}, step = 1);
             tensor<int32, [{q}]> at = add(x = p, y = count);"
        );
        let along = format!(
            "{at} tensor<int32, [1, {q}, 1]> wide = reshape(x = at, shape = [1, {q}, 1]);
             tensor<int32, [2, {q}, 4]> index = tile(x = wide, reps = [2, 1, 4]);
             tensor<fp16, [2, 8, 4]> all = scatter_along_axis(data = old, indices = index, updates = new, axis = 1,
                 mode = \"update\");"
        );
        let rows = format!(
            "{at} tensor<fp16, [2, 8, 4]> all = scatter(data = old, indices = at, updates = new, axis = 1, mode = \"update\");"
        );
        for update in [along, rows] {
            becomes_a_slice(&inputs, &update, 0..9 - q, &["scatter", "scatter_along_axis"]);
        }
    }
    let inputs = "tensor<int32, []> p, tensor<fp16, [2, 4]> new";
    let update =
        "tensor<fp16, [2, 8, 4]> all = scatter(data = old, indices = p, updates = new, axis = 1, mode = \"update\");";
    becomes_a_slice(inputs, update, 0..8, &["scatter"]);
}

#[test]
fn scatters_by_coordinates() {
    let signature = "tensor<fp16, [8, 4]> old, tensor<int32, [1]> p, tensor<fp16, [2, 4]> new";
    let body = "tensor<int32, [2]> at = add(x = [0, 1], y = p);
        tensor<int32, [2, 1]> index = expand_dims(x = at, axes = [1]);
        tensor<fp16, [8, 4]> all = scatter_nd(data = old, indices = index, updates = new, mode = \"update\");";
    let (after, report) = judge(&program(signature, body, "all"), PASS, 0..7, Exactness::Bitwise);
    assert_eq!((count(&after, "slice_update"), count(&after, "scatter_nd")), (1, 0), "{}", report.explain());
}

/// The numbers of the elements of [2, 8, 4], as text.
fn numbers() -> String {
    (0..64).map(|n| n.to_string()).collect::<Vec<_>>().join(", ")
}

fn flat_scatter() -> String {
    format!(
        "tensor<int32, [2, 8, 4]> every = reshape(x = [{}], shape = [2, 8, 4]);
         tensor<int32, [1]> e = add(x = p, y = [2]);
         tensor<int32, [3]> b3 = concat(values = ([0], p, [0]), axis = 0, interleave = false);
         tensor<int32, [3]> e3 = concat(values = ([0], e, [0]), axis = 0, interleave = false);
         tensor<int32, [2, 2, 4]> some = slice_by_index(x = every, begin = b3, end = e3, begin_mask = [true, false, true],
             end_mask = [true, false, true]);
         tensor<int32, [16]> index = reshape(x = some, shape = [-1]);
         tensor<fp16, [64]> flat = reshape(x = old, shape = [-1]);
         tensor<fp16, [16]> rows = reshape(x = new, shape = [-1]);
         tensor<fp16, [64]> done = scatter(data = flat, indices = index, updates = rows, axis = 0, mode = \"update\");
         tensor<fp16, [2, 8, 4]> all = reshape(x = done, shape = [2, 8, 4]);",
        numbers()
    )
}

#[test]
fn scatters_of_elements() {
    let inputs = "tensor<int32, [1]> p, tensor<fp16, [2, 2, 4]> new";
    becomes_a_slice(inputs, &flat_scatter(), 0..7, &["scatter"]);
}

#[test]
fn old_opsets_have_no_slice_update() {
    let body = flat_scatter();
    let source = format!(
        "program(1.3) [specificationVersion = 8] {{ func main<CoreML7>(tensor<fp16, [2, 8, 4]> old, tensor<int32, [1]> p, \
         tensor<fp16, [2, 2, 4]> new) {{ {body} }} -> (all); }}"
    );
    let (after, report) = judge(&text::parse(&source).unwrap(), PASS, 0..7, Exactness::Bitwise);
    assert_eq!(count(&after, "scatter"), 1);
    assert!(declined(&report, "all", "CoreML7 has no slice_update"), "{}", report.explain());
    assert!(report.explain().contains("converted for iOS 18"), "{}", report.explain());
}

/// What stays, and why.
#[track_caller]
fn stays(signature: &str, body: &str, outputs: &str, reason: &str) {
    let before = program(signature, body, outputs);
    let mut after = before.clone();
    verify::typed(&after).unwrap_or_else(|e| panic!("{e}"));
    let report = Pipeline::parse("kv-slices").unwrap().run(&mut after, &RunOptions::default()).unwrap();
    assert_eq!(text::print_program(&before), text::print_program(&after));
    assert!(declined(&report, "all", reason), "{}", report.explain());
}

#[test]
fn what_the_caller_says_is_not_proved() {
    let cache = "tensor<fp16, [2, 8, 4]> old, tensor<fp16, [2, 1, 4]> row";
    let reason = "comes from the input `m`";
    let mask = "tensor<fp16, [8, 1]> n = sub(x = fp16(1.0), y = m);
        tensor<fp16, [2, 8, 4]> kept = mul(x = old, y = n);
        tensor<fp16, [2, 8, 4]> added = mul(x = row, y = m);
        tensor<fp16, [2, 8, 4]> all = add(x = kept, y = added);";
    stays(&format!("{cache}, tensor<fp16, [8, 1]> m"), mask, "all", reason);
    let cond = "tensor<bool, [8, 1]> c = cast(x = m, dtype = \"bool\");
        tensor<fp16, [2, 8, 4]> all = select(cond = c, a = row, b = old);";
    stays(&format!("{cache}, tensor<int32, [8, 1]> m"), cond, "all", reason);
    let index =
        "tensor<fp16, [2, 8, 4]> all = scatter(data = old, indices = m, updates = new, axis = 1, mode = \"update\");";
    let inputs = "tensor<fp16, [2, 8, 4]> old, tensor<fp16, [2, 3, 4]> new, tensor<int32, [3]> m";
    stays(inputs, index, "all", reason);
}

#[test]
fn what_is_no_update_of_rows_stays() {
    let inputs = format!("tensor<fp16, [2, 8, 4]> old, {ROW}, tensor<fp32, [1]> x");
    let selected = "tensor<fp16, [2, 8, 4]> all = select(cond = column, a = row, b = old);";
    // A position that is no integer.
    stays(
        &inputs,
        &(HERE.replace("y = p", "y = x").replace(
            "tensor<int32, [8]> rows = range_1d(start = 0, end = 8, step = 1)",
            "tensor<fp32, [8]> rows = range_1d(start = fp32(0.0), end = fp32(8.0), step = fp32(1.0))",
        ) + selected),
        "all",
        "not provable",
    );
    // Rows behind the position, too.
    stays(&inputs, &(HERE.replace("equal", "greater_equal") + selected), "all", "not provable");
    // Every second row.
    stays(&inputs, &(HERE.replace("end = 8, step = 1", "end = 16, step = 2") + selected), "all", "not provable");
    // The other rows are replaced.
    let other = format!("{HERE} tensor<fp16, [2, 8, 4]> all = select(cond = column, a = old, b = row);");
    stays(&inputs, &other, "all", "the rows at the position keep");
    // Outside.
    stays(&inputs, &(HERE.replace("y = p", "y = [8]") + selected), "all", "outside of the cache");
    // Added to what is there.
    let add =
        "tensor<fp16, [2, 8, 4]> all = scatter(data = old, indices = p, updates = row, axis = 1, mode = \"add\");";
    stays(&inputs, add, "all", "does not replace");
    // Cleared at one position, added at the next.
    let shifted = format!(
        "{HERE} tensor<fp16, [8, 1]> m = cast(x = column, dtype = \"fp16\");
         tensor<fp16, [8, 1]> n = sub(x = fp16(1.0), y = m);
         tensor<int32, [1]> p1 = add(x = p, y = [1]);
         tensor<bool, [8]> next = equal(x = rows, y = p1);
         tensor<fp16, [8]> flat = cast(x = next, dtype = \"fp16\");
         tensor<fp16, [8, 1]> m1 = expand_dims(x = flat, axes = [1]);
         tensor<fp16, [2, 8, 4]> kept = mul(x = old, y = n);
         tensor<fp16, [2, 8, 4]> added = mul(x = row, y = m1);
         tensor<fp16, [2, 8, 4]> all = add(x = kept, y = added);"
    );
    stays(&inputs, &shifted, "all", "not provably those that are added");
    // Kept where it should be cleared.
    let inverse = shifted.replace("mul(x = old, y = n)", "mul(x = old, y = m)").replace("y = m1)", "y = m)");
    stays(&inputs, &inverse, "all", "are those at the position");
}

#[test]
fn positions_are_compared_exactly() {
    // Integers above 2048 have no 16-bit float of their own.
    let inputs = "tensor<fp16, [4096, 2]> old, tensor<int32, [1]> p, tensor<fp16, [1, 2]> row";
    let body = "tensor<int32, [4096]> rows = range_1d(start = 0, end = 4096, step = 1);
        tensor<fp16, [4096]> floats = cast(x = rows, dtype = \"fp16\");
        tensor<fp16, [1]> at = cast(x = p, dtype = \"fp16\");
        tensor<bool, [4096]> here = equal(x = floats, y = at);
        tensor<bool, [4096, 1]> column = expand_dims(x = here, axes = [1]);
        tensor<fp16, [4096, 2]> all = select(cond = column, a = row, b = old);";
    stays(inputs, body, "all", "not provable");
    let exact = body.replace("fp16, [4096]> floats", "fp32, [4096]> floats").replace("fp16, [1]> at", "fp32, [1]> at");
    let exact = exact.replace("dtype = \"fp16\"", "dtype = \"fp32\"");
    let (after, _) = judge(&program(inputs, &exact, "all"), PASS, 0..4096, Exactness::Bitwise);
    assert_eq!(count(&after, "slice_update"), 1);
}

#[test]
fn a_state_must_keep_its_own_content() {
    let cache = "tensor<fp16, [2, 8, 4]>";
    let signature = format!("{ROW}, state<{cache}> cache, state<{cache}> elsewhere");
    let body = format!(
        "{HERE} {cache} old = read_state(input = elsewhere);
         {cache} all = select(cond = column, a = row, b = old);
         write_state(input = cache, data = all);
         {cache} out = relu(x = row);"
    )
    .replace("out = relu(x = row)", "out = mul(x = row, y = old)");
    stays(&signature, &body, "out", "does not keep the rest");
    let signature = format!("{ROW}, state<{cache}> cache");
    let body = format!(
        "{HERE} {cache} old = read_state(input = cache);
         {cache} all = select(cond = column, a = row, b = old);
         {cache} early = relu(x = all);
         {cache} again = read_state(input = cache);
         write_state(input = cache, data = all);
         {cache} out = add(x = early, y = again);"
    );
    stays(&signature, &body, "out", "stands between");
    let body = format!(
        "{HERE} {cache} old = read_state(input = cache);
         tensor<fp16, [1]> o = mystery(x = p);
         {cache} all = select(cond = column, a = row, b = old);
         write_state(input = cache, data = all);
         {cache} out = relu(x = all);"
    );
    stays(&signature, &body, "out", "may write the state in between");
}

#[test]
fn a_write_moves_up_to_the_update_that_is_read() {
    let cache = "tensor<fp16, [2, 8, 4]>";
    let body = format!(
        "{HERE} {cache} old = read_state(input = cache);
         {cache} all = select(cond = column, a = row, b = old);
         {cache} early = relu(x = all);
         {cache} rest = read_state(input = cache);
         {cache} whole = slice_update(x = rest, update = all, begin = [0, 0, 0], end = [0, 0, 0],
             begin_mask = [false, true, true], end_mask = [true, true, true]);
         write_state(input = cache, data = whole);
         {cache} out = add(x = early, y = row);"
    );
    let before = program(&format!("{ROW}, state<{cache}> cache"), &body, "out");
    let (after, report) = judge(&before, PASS, 0..8, Exactness::Bitwise);
    let ops = ["slice_update", "write_state", "read_state"].map(|kind| count(&after, kind));
    assert_eq!(ops, [1, 1, 2], "{}", report.explain());
}

#[test]
fn updates_at_one_position_share_its_bounds() {
    let cache = "tensor<fp16, [2, 8, 4]>";
    let body = format!(
        "{HERE} {cache} k1 = select(cond = column, a = row, b = k);
         {cache} v1 = select(cond = column, a = row, b = v);"
    );
    let before = program(&format!("{ROW}, {cache} k, {cache} v"), &body, "k1, v1");
    let (after, _) = judge(&before, PASS, 0..8, Exactness::Bitwise);
    assert_eq!(["slice_update", "concat", "add"].map(|kind| count(&after, kind)), [2, 2, 1]);
}

/// Attention over caches that are blended and overwritten as a whole, as exporters without `slice_update` do. The mask is
/// finite: a row that is masked by infinities everywhere would make what is blended into the next layer's cache so.
fn blended_decoder(layers: usize, blend: usize, early: bool) -> Program {
    let cache = "tensor<fp16, [2, 8, 4]>";
    let mut signature = "tensor<int32, [1]> p, tensor<fp16, [2, 1, 4]> x, tensor<fp16, [1, 1, 8]> mask".to_string();
    let mut body = format!(
        "{HERE} tensor<fp16, [8, 1]> m = cast(x = column, dtype = \"fp16\");
         tensor<fp16, [8, 1]> n = sub(x = fp16(1.0), y = m);
         tensor<fp16, [1, 1, 8]> finite = maximum(x = mask, y = fp16(-1e4));
         tensor<fp16, [2, 1, 4]> h0 = identity(x = x);\n"
    );
    let mut late = String::new();
    for l in 0..layers {
        for kv in ["k", "v"] {
            signature += &format!(", state<{cache}> {kv}{l}");
            let scale = if kv == "k" { 0.5 } else { 1.5 };
            body += &format!(
                "{cache} {kv}{l}_old = read_state(input = {kv}{l});
                 tensor<fp16, [2, 1, 4]> {kv}{l}_row = mul(x = h{l}, y = fp16({scale}));\n"
            );
            body += &match blend {
                0 => format!("{cache} {kv}{l}_all = select(cond = column, a = {kv}{l}_row, b = {kv}{l}_old);\n"),
                1 => format!(
                    "{cache} {kv}{l}_kept = mul(x = {kv}{l}_old, y = n);
                     {cache} {kv}{l}_new = mul(x = {kv}{l}_row, y = m);
                     {cache} {kv}{l}_all = add(x = {kv}{l}_kept, y = {kv}{l}_new);\n"
                ),
                _ => format!(
                    "{cache} {kv}{l}_all = scatter(data = {kv}{l}_old, indices = p, updates = {kv}{l}_row, axis = 1, mode = \"update\");\n"
                ),
            };
            let write = format!("write_state(input = {kv}{l}, data = {kv}{l}_all);\n");
            (if early { &mut body } else { &mut late }).push_str(&write);
        }
        body += &format!(
            "tensor<fp16, [2, 1, 8]> s{l} = matmul(x = h{l}, y = k{l}_all, transpose_x = false, transpose_y = true);
             tensor<fp16, [2, 1, 8]> a{l} = add(x = s{l}, y = finite);
             tensor<fp16, [2, 1, 8]> w{l} = softmax(x = a{l}, axis = -1);
             tensor<fp16, [2, 1, 4]> h{} = matmul(x = w{l}, y = v{l}_all, transpose_x = false, transpose_y = false);\n",
            l + 1
        );
    }
    program(&signature, &(body + &late), &format!("h{layers}"))
}

const DEFERRED: &str = "gqa-fold,view-simplify,kv-slices,kv-defer,kv-forward,kv-merge,dce";

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blended_caches_are_deferred(layers in 1usize..3, blend in 0usize..3, early: bool) {
        let before = blended_decoder(layers, blend, early);
        let (after, report) = judge(&before, DEFERRED, 0..8, Exactness::Reassociated);
        let ops = ["slice_update", "write_state", "read_state", "split"].map(|kind| count(&after, kind));
        prop_assert_eq!(ops, [2 * layers, 2 * layers, 4 * layers, layers], "{}", report.explain());
        for kind in ["select", "scatter"] {
            prop_assert_eq!(count(&after, kind), 0);
        }
    }
}

/// The caches that a function passes through, as `input output kind`.
fn passed_through(p: &Program) -> Vec<String> {
    let name = |v| main(p).value(v).name();
    let caches = functional(main(p)).into_iter();
    caches.map(|c| format!("{} {} {}", name(c.input), name(c.output), c.kind)).collect()
}

#[test]
fn caches_that_are_inputs_and_outputs_are_recognised() {
    let cache = "tensor<fp16, [2, 8, 4]>";
    let signature = format!("{cache} old, {ROW}, tensor<fp16, [8, 1]> m");
    for (update, kind) in [
        (
            format!("{cache} all = slice_update(x = old, update = row, begin = [0, 2, 0], end = [2, 3, 4]);"),
            "slice_update",
        ),
        (
            format!("{cache} all = scatter(data = old, indices = p, updates = row, axis = 1, mode = \"update\");"),
            "scatter",
        ),
        (format!("{HERE} {cache} all = select(cond = column, a = row, b = old);"), "blend"),
        (
            format!(
                "tensor<fp16, [8, 1]> n = sub(x = fp16(1.0), y = m);
                 {cache} kept = mul(x = old, y = n);
                 {cache} added = mul(x = row, y = m);
                 {cache} all = add(x = kept, y = added);"
            ),
            "blend",
        ),
        ("tensor<fp16, [2, 9, 4]> all = concat(values = (old, row), axis = 1, interleave = false);".into(), "concat"),
        (
            format!(
                "tensor<fp16, [2, 7, 4]> later = slice_by_index(x = old, begin = [0, 1, 0], end = [2, 8, 4]);
                 {cache} all = concat(values = (later, row), axis = 1, interleave = false);"
            ),
            "concat and slice",
        ),
        (
            format!(
                "tensor<fp16, [2, 9, 4]> long = concat(values = (old, row), axis = 1, interleave = false);
                 {cache} all = slice_by_index(x = long, begin = [0, 1, 0], end = [2, 9, 4]);"
            ),
            "concat and slice",
        ),
    ] {
        let before = program(&signature, &update, "all");
        assert_eq!(passed_through(&before), [format!("old all {kind}")]);
        let report =
            Pipeline::parse("kv-defer,kv-merge").unwrap().run(&mut before.clone(), &RunOptions::default()).unwrap();
        let reasons = report.explain();
        let reason = format!("the cache `old` is an input and an output ({kind}), not a state");
        assert_eq!(reasons.matches(&reason).count(), 2, "{reasons}");
    }
}

#[test]
fn what_is_no_cache_is_not_taken_for_one() {
    let cache = "tensor<fp16, [2, 8, 4]>";
    for body in [
        format!("{cache} all = add(x = old, y = row);"),
        format!("{cache} all = mul(x = old, y = row);"),
        format!("{cache} all = relu(x = old);"),
        format!("{cache} all = identity(x = old);"),
        format!(
            "{cache} half = mul(x = old, y = fp16(0.5)); {cache} more = mul(x = row, y = old); {cache} all = add(x = half, y = more);"
        ),
    ] {
        assert_eq!(passed_through(&program(&format!("{cache} old, {ROW}"), &body, "all")), [] as [String; 0], "{body}");
    }
    // A state is none.
    let body = format!("{cache} old = read_state(input = cache); {cache} all = select(cond = c, a = row, b = old);");
    let signature = format!("{ROW}, tensor<bool, [8, 1]> c, state<{cache}> cache");
    assert_eq!(passed_through(&program(&signature, &body, "all")), [] as [String; 0]);
}
