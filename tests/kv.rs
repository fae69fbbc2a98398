//! `kv-forward` and `kv-merge` as pairs of programs.

mod support;

use milopt::ir::Program;
use milopt::passes::{Pipeline, RunOptions};
use milopt::text;
use support::{count, declined, main, optimize, program};

const PASSES: &str = "kv-forward,kv-merge,dce";

/// `(slice_update, write_state, read_state)` of the main function.
fn state_ops(p: &Program) -> (usize, usize, usize) {
    (count(p, "slice_update"), count(p, "write_state"), count(p, "read_state"))
}

/// Writes of `updates` to the rows of `cache` [4, 2, 8, 4] at positions [p, p + 1), each from a snapshot of its own.
fn rows(updates: &[(u64, &str)]) -> String {
    let mut body = "tensor<int32, [1]> e = add(x = p, y = [1]);\n".to_string();
    for (i, (row, update)) in updates.iter().enumerate() {
        body += &format!(
            "tensor<fp16, [4, 2, 8, 4]> r{i} = read_state(input = cache);
             tensor<int32, [4]> b{i} = concat(values = ([{row}], [0], p, [0]), axis = 0, interleave = false);
             tensor<int32, [4]> e{i} = concat(values = ([0], [0], e, [0]), axis = 0, interleave = false);
             tensor<fp16, [4, 2, 8, 4]> u{i} = slice_update(x = r{i}, update = {update}, begin = b{i}, end = e{i},
                 end_mask = [false, true, false, true], squeeze_mask = [true, false, false, false]);
             write_state(input = cache, data = u{i});\n"
        );
    }
    body
}

const INPUTS: &str = "tensor<int32, [1]> p, tensor<fp16, [2, 1, 4]> x, tensor<fp16, [2, 1, 4]> y, \
                      tensor<fp16, [2, 1, 4]> z, state<tensor<fp16, [4, 2, 8, 4]>> cache";

#[test]
fn rows_of_layers_are_written_at_once() {
    let body = rows(&[(1, "x"), (2, "y"), (3, "z")]) + "tensor<fp16, [2, 1, 4]> out = add(x = x, y = y);";
    let (after, report) = optimize(&program(INPUTS, &body, "out"), PASSES);
    assert_eq!(state_ops(&after), (1, 1, 1), "{}", report.explain());
    assert_eq!(count(&after, "stack"), 1);
}

#[test]
fn the_order_of_rows_in_time_does_not_matter() {
    let body = rows(&[(3, "x"), (0, "y"), (2, "z"), (1, "x")]) + "tensor<fp16, [2, 1, 4]> out = add(x = x, y = y);";
    let (after, _) = optimize(&program(INPUTS, &body, "out"), PASSES);
    assert_eq!(state_ops(&after), (1, 1, 1));
}

#[test]
fn rows_with_a_gap_become_two_writes_or_one_strided_on_request() {
    let body = rows(&[(0, "x"), (2, "y")]) + "tensor<fp16, [2, 1, 4]> out = add(x = x, y = y);";
    let before = program(INPUTS, &body, "out");
    let (after, report) = optimize(&before, PASSES);
    assert_eq!(state_ops(&after), (2, 2, 2));
    assert!(declined(&report, "cache", "no two boxes that are written are neighbours"), "{}", report.explain());
    let (after, _) = optimize(&before, "kv-merge:boxes=strided,dce");
    assert_eq!(state_ops(&after), (1, 1, 1));
    let body = rows(&[(0, "x"), (1, "y"), (3, "z")]) + "tensor<fp16, [2, 1, 4]> out = add(x = x, y = y);";
    assert_eq!(state_ops(&optimize(&program(INPUTS, &body, "out"), PASSES).0), (2, 2, 2));
}

#[test]
fn writes_whose_order_matters_stay() {
    // The same row twice: the second wins.
    let body = rows(&[(1, "x"), (1, "y")]) + "tensor<fp16, [2, 1, 4]> out = add(x = x, y = y);";
    let (after, report) = optimize(&program(INPUTS, &body, "out"), PASSES);
    assert_eq!(state_ops(&after), (2, 2, 2));
    assert!(declined(&report, "cache", "may write the same elements"), "{}", report.explain());
}

#[test]
fn a_read_of_what_was_written_keeps_writes_apart() {
    let look = "tensor<fp16, [4, 2, 8, 4]> s = read_state(input = cache);
        tensor<fp16, [1, 2, 8, 4]> row = slice_by_index(x = s, begin = [ROW, 0, 0, 0], end = [END, 2, 8, 4]);
        tensor<fp16, [1, 2, 8, 4]> out = relu(x = row);";
    for (row, merged) in [(1, false), (3, true)] {
        let look = look.replace("ROW", &row.to_string()).replace("END", &(row + 1).to_string());
        let second = rows(&[(2, "y")]).replace("tensor<int32, [1]> e = add(x = p, y = [1]);\n", "");
        let second = ["r0", "b0", "e0", "u0"].iter().fold(second, |s, n| s.replace(n, &format!("second_{n}")));
        let body = format!("{}\n{look}\n{second}", rows(&[(1, "x")]));
        let (after, report) = optimize(&program(INPUTS, &body, "out"), PASSES);
        assert_eq!(state_ops(&after).0, if merged { 1 } else { 2 }, "row {row}\n{}", report.explain());
        assert_eq!(declined(&report, "cache", "looks at what"), !merged, "{}", report.explain());
    }
}

#[test]
fn what_was_written_as_a_whole_is_not_read_back() {
    // A prefill of a whole layer.
    let signature = "tensor<fp16, [2, 8, 4]> k, state<tensor<fp16, [4, 2, 8, 4]>> cache";
    let body = "
        tensor<fp16, [4, 2, 8, 4]> r = read_state(input = cache);
        tensor<fp16, [4, 2, 8, 4]> u = slice_update(x = r, update = k, begin = [1, 0, 0, 0], end = [0, 0, 0, 0],
            end_mask = [false, true, true, true], squeeze_mask = [true, false, false, false]);
        write_state(input = cache, data = u);
        tensor<fp16, [4, 2, 8, 4]> s = read_state(input = cache);
        tensor<fp16, [2, 8, 4]> row = slice_by_index(x = s, begin = [1, 0, 0, 0], end = [2, 2, 8, 4],
            squeeze_mask = [true, false, false, false]);
        tensor<fp16, [2, 8, 4]> out = relu(x = row);";
    let (after, _) = optimize(&program(signature, body, "out"), "kv-forward,view-simplify,dce");
    assert_eq!(state_ops(&after), (1, 1, 1));
    let relu = main(&after).producer(main(&after).outputs()[0]).unwrap();
    assert_eq!(main(&after).op(relu).value("x"), main(&after).input("k"));
    // Another layer was not written.
    let other = body.replace("begin = [1, 0, 0, 0], end = [2, 2", "begin = [2, 0, 0, 0], end = [3, 2");
    assert_eq!(state_ops(&optimize(&program(signature, &other, "out"), PASSES).0), (1, 1, 2));
}

#[test]
fn snapshots_between_which_nothing_changes_are_one() {
    let signature = "tensor<fp16, [2, 1, 4]> x, tensor<int32, [1]> p, state<tensor<fp16, [4, 2, 8, 4]>> cache";
    let body = "
        tensor<fp16, [4, 2, 8, 4]> a = read_state(input = cache);
        tensor<fp16, [4, 2, 8, 4]> b = read_state(input = cache);
        tensor<fp16, [4, 2, 8, 4]> sum = add(x = a, y = b);
        tensor<fp16, [1, 2, 8, 4]> out = slice_by_index(x = sum, begin = [0, 0, 0, 0], end = [1, 2, 8, 4]);";
    assert_eq!(state_ops(&optimize(&program(signature, body, "out"), PASSES).0), (0, 0, 1));
    // Across a write of another row.
    let body = format!(
        "tensor<fp16, [4, 2, 8, 4]> a = read_state(input = cache);
         tensor<fp16, [1, 2, 8, 4]> a0 = slice_by_index(x = a, begin = [0, 0, 0, 0], end = [1, 2, 8, 4]);
         {}
         tensor<fp16, [4, 2, 8, 4]> b = read_state(input = cache);
         tensor<fp16, [1, 2, 8, 4]> late = slice_by_index(x = b, begin = [2, 0, 0, 0], end = [3, 2, 8, 4]);
         tensor<fp16, [1, 2, 8, 4]> out = add(x = a0, y = late);",
        rows(&[(1, "x")])
    );
    // The snapshot that the update takes the rest from gets no second reader.
    assert_eq!(state_ops(&optimize(&program(signature, &body, "out"), PASSES).0), (1, 1, 2));
}

#[test]
fn a_snapshot_across_a_write_of_what_it_shows_stays() {
    let signature = "tensor<fp16, [2, 1, 4]> x, tensor<int32, [1]> p, state<tensor<fp16, [4, 2, 8, 4]>> cache";
    let body = format!(
        "tensor<fp16, [4, 2, 8, 4]> a = read_state(input = cache);
         tensor<fp16, [1, 2, 8, 4]> a0 = slice_by_index(x = a, begin = [0, 0, 0, 0], end = [1, 2, 8, 4]);
         {}
         tensor<fp16, [4, 2, 8, 4]> b = read_state(input = cache);
         tensor<fp16, [1, 2, 8, 4]> late = slice_by_index(x = b, begin = [1, 0, 0, 0], end = [2, 2, 8, 4]);
         tensor<fp16, [1, 2, 8, 4]> out = add(x = a0, y = late);",
        rows(&[(1, "x")])
    );
    assert_eq!(state_ops(&optimize(&program(signature, &body, "out"), PASSES).0), (1, 1, 3));
}

#[test]
fn an_update_in_another_type_is_done_in_the_states_own() {
    let signature = "tensor<fp32, [2, 1, 4]> x, state<tensor<fp16, [2, 8, 4]>> cache";
    let body = "
        tensor<fp16, [2, 8, 4]> r = read_state(input = cache);
        tensor<fp32, [2, 8, 4]> w = cast(x = r, dtype = \"fp32\");
        tensor<fp32, [2, 8, 4]> u = slice_update(x = w, update = x, begin = [0, 3, 0], end = [2, 4, 4]);
        tensor<fp16, [2, 8, 4]> n = cast(x = u, dtype = \"fp16\");
        write_state(input = cache, data = n);
        tensor<fp32, [2, 1, 4]> out = relu(x = x);";
    let (after, _) = optimize(&program(signature, body, "out"), PASSES);
    assert_eq!((count(&after, "cast"), count(&after, "slice_update")), (1, 1));
}

#[test]
fn an_interleaved_vector_of_positions_is_read_as_it_is() {
    let signature = "tensor<int32, [2]> p, tensor<fp16, [1, 1, 1, 4]> x, state<tensor<fp16, [4, 2, 8, 4]>> cache";
    let body = "
        tensor<int32, [4]> b = concat(values = (p, [0, 0]), axis = 0, interleave = true);
        tensor<int32, [4]> straight = concat(values = (p, [0, 0]), axis = 0, interleave = false);
        tensor<int32, [4]> e = add(x = b, y = [1, 1, 1, 4]);
        tensor<fp16, [4, 2, 8, 4]> r = read_state(input = cache);
        tensor<fp16, [4, 2, 8, 4]> u = slice_update(x = r, update = x, begin = b, end = e);
        write_state(input = cache, data = u);
        tensor<fp16, [4, 2, 8, 4]> s = read_state(input = cache);
        tensor<fp16, [1, 1, 1, 4]> row = slice_by_size(x = s, begin = straight, size = [1, 1, 1, 4]);
        tensor<fp16, [1, 1, 1, 4]> out = relu(x = row);";
    let before = program(signature, body, "out");
    let mut after = before.clone();
    Pipeline::parse(PASSES).unwrap().run(&mut after, &RunOptions::default()).unwrap();
    assert_eq!(text::print_program(&before), text::print_program(&after), "[p0, 0, p1, 0] is not [p0, p1, 0, 0]");
}

#[test]
fn nothing_passes_an_op_of_which_nothing_is_known() {
    let body = rows(&[(1, "x"), (2, "y")]).replace(
        "tensor<fp16, [4, 2, 8, 4]> r1 =",
        "tensor<fp16, [2, 1, 4]> odd = mystery(x = x);\ntensor<fp16, [4, 2, 8, 4]> r1 =",
    );
    let body = body + "tensor<fp16, [2, 1, 4]> out = add(x = x, y = odd);";
    let before = program(INPUTS, &body, "out");
    let mut after = before.clone();
    let report = Pipeline::parse(PASSES).unwrap().run(&mut after, &RunOptions::default()).unwrap();
    assert_eq!(text::print_program(&before), text::print_program(&after));
    assert!(declined(&report, "cache", "mystery `odd` may use the state out of sight"), "{}", report.explain());
}

#[test]
fn rows_that_depend_on_an_output_are_merged_as_before() {
    let body = rows(&[(1, "x"), (2, "y")]).replace("update = y", "update = later")
        + "tensor<fp16, [2, 1, 4]> out = add(x = x, y = y);";
    let body =
        format!("tensor<fp16, [2, 1, 4]> seen = relu(x = y); tensor<fp16, [2, 1, 4]> later = tanh(x = seen);\n{body}");
    let (after, _) = optimize(&program(INPUTS, &body, "out, seen"), PASSES);
    assert_eq!(state_ops(&after), (1, 1, 1));
}

#[test]
fn an_update_in_another_type_that_others_read_stays() {
    let signature = "tensor<fp32, [2, 1, 4]> x, state<tensor<fp16, [2, 8, 4]>> cache";
    let body = "
        tensor<fp16, [2, 8, 4]> r = read_state(input = cache);
        tensor<fp32, [2, 8, 4]> w = cast(x = r, dtype = \"fp32\");
        tensor<fp32, [2, 8, 4]> u = slice_update(x = w, update = x, begin = [0, 3, 0], end = [2, 4, 4]);
        tensor<fp16, [2, 8, 4]> n = cast(x = u, dtype = \"fp16\");
        write_state(input = cache, data = n);
        tensor<fp32, [2, 8, 4]> out = relu(x = u);";
    let (after, _) = optimize(&program(signature, body, "out"), PASSES);
    assert_eq!((count(&after, "cast"), count(&after, "slice_update")), (2, 1));
}
