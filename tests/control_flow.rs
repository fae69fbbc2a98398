//! `cond` and `while_loop`: what they compute, and that a rewrite around them changes nothing.

mod support;

use milopt::interp::{Interpreter, Mode, Tensor, Values};
use milopt::ir::{DType, Program};
use milopt::verify;
use support::{main, optimize, program};

fn int(n: i64) -> Tensor {
    Tensor::ints(DType::I32, &[], &[n])
}

fn floats(values: &[f64]) -> Tensor {
    Tensor::floats(DType::F32, &[values.len()], values)
}

fn run_with(p: &Program, inputs: &[(&str, Tensor)], states: &mut Values) -> Values {
    verify::typed(p).unwrap();
    let inputs: Values = inputs.iter().map(|(n, t)| ((*n).into(), t.clone())).collect();
    Interpreter::new(main(p), Mode::Storage).unwrap().run(&inputs, states).unwrap()
}

fn run(p: &Program, inputs: &[(&str, Tensor)]) -> Values {
    run_with(p, inputs, &mut Values::new())
}

#[test]
fn variables_take_their_new_values_at_once() {
    let p = program(
        "int32 n",
        "int32 i, int32 a, int32 b = while_loop(loop_vars = (0, 0, 1)) block(int32 j, int32 x, int32 y) {
             bool go = less(x = j, y = n);
         } -> (go), block(int32 j, int32 x, int32 y) {
             int32 k = add(x = j, y = 1);
             int32 sum = add(x = x, y = y);
         } -> (k, y, sum);",
        "i, a, b",
    );
    for (n, a, b) in [(-3, 0, 1), (0, 0, 1), (1, 1, 1), (10, 55, 89)] {
        let out = run(&p, &[("n", int(n))]);
        assert_eq!([&out["i"], &out["a"], &out["b"]].map(|t| t.to_i64s()[0]), [n.max(0), a, b]);
    }
}

#[test]
fn a_condition_is_one_truth_value() {
    let at = |limit: &str, shape: &str| {
        program(
            "int32 n",
            &format!(
                "int32 i = while_loop(loop_vars = (n)) block(int32 j) {{
                     tensor<bool, [{shape}]> go = less(x = j, y = {limit});
                 }} -> (go), block(int32 j) {{
                     int32 k = add(x = j, y = 2);
                 }} -> (k);"
            ),
            "i",
        )
    };
    assert_eq!(run(&at("[5]", "1"), &[("n", int(0))])["i"].to_i64s(), [6]);
    let error = verify::typed(&at("[5, 6]", "2")).unwrap_err().to_string();
    assert!(error.contains("the condition returns tensor<bool, [2]>, not a bool scalar"), "{error}");
}

#[test]
fn a_body_may_return_its_variables_in_another_order() {
    let p = program(
        "int32 n, tensor<fp32, [2]> x, tensor<fp32, [2]> y",
        "int32 i, tensor<fp32, [2]> a, tensor<fp32, [2]> b = while_loop(loop_vars = (0, x, y)) block(int32 j, tensor<fp32, [2]> s, tensor<fp32, [2]> t) {
             bool go = less(x = j, y = n);
         } -> (go), block(int32 j, tensor<fp32, [2]> s, tensor<fp32, [2]> t) {
             int32 k = add(x = j, y = 1);
         } -> (k, t, s);",
        "a, b",
    );
    for n in 0..4 {
        let out = run(&p, &[("n", int(n)), ("x", floats(&[1.0, 2.0])), ("y", floats(&[3.0, 4.0]))]);
        let (even, odd) = (vec![1.0, 2.0], vec![3.0, 4.0]);
        let want = if n % 2 == 0 { [even, odd] } else { [odd, even] };
        assert_eq!([out["a"].to_f64s(), out["b"].to_f64s()], want);
    }
}

#[test]
fn shapes_may_change_from_iteration_to_iteration() {
    let p = program(
        "int32 n, tensor<fp32, [1]> x",
        "int32 i, tensor<fp32, [?]> all = while_loop(loop_vars = (0, x)) block(int32 j, tensor<fp32, [?]> t) {
             bool go = less(x = j, y = n);
         } -> (go), block(int32 j, tensor<fp32, [?]> t) {
             int32 k = add(x = j, y = 1);
             tensor<fp32, [?]> twice = mul(x = t, y = fp32(2.0));
             tensor<fp32, [?]> longer = concat(values = (twice, t), axis = 0);
         } -> (k, longer);
         tensor<int32, [1]> size = shape(x = all);",
        "all, size",
    );
    let out = run(&p, &[("n", int(3)), ("x", floats(&[1.0]))]);
    assert_eq!(out["all"].to_f64s(), [8.0, 4.0, 4.0, 2.0, 4.0, 2.0, 2.0, 1.0]);
    assert_eq!(out["size"].to_i64s(), [8]);
    let out = run(&p, &[("n", int(0)), ("x", floats(&[1.0]))]);
    assert_eq!((out["all"].to_f64s(), out["size"].to_i64s()), (vec![1.0], vec![1]));
}

/// Σ over i < n of Σ over j < i of x, doubled where j is odd; `x` and `scale` are read in the innermost block alone.
fn nested() -> Program {
    program(
        "int32 n, tensor<fp32, [2]> x, tensor<fp32, [2]> start",
        "tensor<fp32, [2]> scale = add(x = x, y = x);
         int32 i, tensor<fp32, [2]> total = while_loop(loop_vars = (0, start)) block(int32 i0, tensor<fp32, [2]> t0) {
             bool go = less(x = i0, y = n);
         } -> (go), block(int32 i0, tensor<fp32, [2]> t0) {
             int32 j, tensor<fp32, [2]> inner = while_loop(loop_vars = (0, t0)) block(int32 j1, tensor<fp32, [2]> t1) {
                 bool again = less(x = j1, y = i0);
             } -> (again), block(int32 j1, tensor<fp32, [2]> t1) {
                 int32 rest = mod(x = j1, y = 2);
                 bool odd = equal(x = rest, y = 1);
                 tensor<fp32, [2]> part = cond(pred = odd) block() {
                     tensor<fp32, [2]> yes = add(x = scale, y = t1);
                 } -> (yes), block() {
                     tensor<fp32, [2]> no = add(x = x, y = t1);
                 } -> (no);
                 int32 j2 = add(x = j1, y = 1);
             } -> (j2, part);
             int32 i1 = add(x = i0, y = 1);
         } -> (i1, inner);",
        "total",
    )
}

#[test]
fn inner_blocks_see_outer_values_in_every_iteration() {
    for n in 0..6i64 {
        let out = run(&nested(), &[("n", int(n)), ("x", floats(&[1.0, -3.0])), ("start", floats(&[10.0, 20.0]))]);
        let count: i64 = (0..n).flat_map(|i| (0..i).map(|j| 1 + j % 2)).sum();
        assert_eq!(out["total"].to_f64s(), [10.0 + count as f64, 20.0 - 3.0 * count as f64], "{n}");
    }
}

#[test]
fn a_branch_that_is_not_taken_is_not_computed() {
    let p = program(
        "bool p, tensor<int32, [2]> x, int32 d",
        "tensor<int32, [2]> y = cond(pred = p) block() {
             tensor<int32, [2]> quotient = floor_div(x = x, y = d);
         } -> (quotient), block() {
             tensor<int32, [2]> same = identity(x = x);
         } -> (same);",
        "y",
    );
    let x = Tensor::ints(DType::I32, &[2], &[7, -7]);
    let at = |p: bool, d: i64| [("p", Tensor::bools(&[], &[p])), ("x", x.clone()), ("d", int(d))];
    assert_eq!(run(&p, &at(true, 2))["y"].to_i64s(), [3, -4]);
    assert_eq!(run(&p, &at(false, 0))["y"].to_i64s(), [7, -7]);
    let inputs: Values = at(true, 0).into_iter().map(|(n, t)| (n.into(), t)).collect();
    let error = Interpreter::new(main(&p), Mode::Storage).unwrap().run(&inputs, &mut Values::new()).unwrap_err();
    assert!(error.to_string().contains("floor_div `quotient`"), "{error}");
}

#[test]
fn blocks_read_and_write_states() {
    let p = program(
        "int32 n, tensor<fp16, [2]> x, state<tensor<fp16, [2]>> sum",
        "int32 i = while_loop(loop_vars = (0)) block(int32 j) {
             bool go = less(x = j, y = n);
         } -> (go), block(int32 j) {
             tensor<fp16, [2]> old = read_state(input = sum);
             int32 rest = mod(x = j, y = 2);
             bool even = equal(x = rest, y = 0);
             tensor<fp16, [2]> new = cond(pred = even) block() {
                 tensor<fp16, [2]> more = add(x = old, y = x);
             } -> (more), block() {
                 tensor<fp16, [2]> double = add(x = old, y = old);
             } -> (double);
             write_state(input = sum, data = new);
             int32 k = add(x = j, y = 1);
         } -> (k);
         tensor<fp16, [2]> last = read_state(input = sum);
         tensor<fp16, [2]> y = mul(x = last, y = fp16(0.5));",
        "y, i",
    );
    let halfs = |values: &[f64]| Tensor::floats(DType::F16, &[2], values);
    let mut states = Values::from([("sum".into(), halfs(&[1.0, 0.0]))]);
    let out = run_with(&p, &[("n", int(3)), ("x", halfs(&[1.0, 0.25]))], &mut states);
    // (1 + 1)·2 + 1 and (0 + 1/4)·2 + 1/4
    assert_eq!((states["sum"].to_f64s(), out["y"].to_f64s()), (vec![5.0, 0.75], vec![2.5, 0.375]));
    run_with(&p, &[("n", int(1)), ("x", halfs(&[1.0, 0.25]))], &mut states);
    assert_eq!(states["sum"].to_f64s(), [6.0, 1.0], "a state carries over from run to run");
}

#[test]
fn passes_rewrite_around_blocks_and_inside() {
    optimize(&nested(), "gqa-fold,view-simplify,dce");
    let p = program(
        "int32 n, tensor<fp32, [1, 4, 2, 8]> q, tensor<fp32, [1, 2, 3, 8]> keys",
        "int32 i, int32 one = while_loop(loop_vars = (0, 1)) block(int32 j, int32 unused) {
             bool go = less(x = j, y = n);
         } -> (go), block(int32 j, int32 unused) {
             int32 k = add(x = j, y = 1);
         } -> (k, unused);
         tensor<fp32, [1, 2, 1, 3, 8]> e = expand_dims(x = keys, axes = [2]);
         tensor<fp32, [1, 2, 2, 3, 8]> t = tile(x = e, reps = [1, 1, 2, 1, 1]);
         tensor<fp32, [1, 4, 3, 8]> r = reshape(x = t, shape = [1, 4, 3, 8]);
         tensor<fp32, [1, 4, 2, 3]> s = matmul(x = q, y = r, transpose_x = false, transpose_y = true);",
        "s, i",
    );
    let (after, report) = optimize(&p, "gqa-fold,view-simplify,dce");
    assert!(report.changed());
    let count =
        |kind: &str| main(&after).all_ops().into_iter().filter(|&op| main(&after).op(op).kind() == kind).count();
    assert_eq!((count("tile"), count("while_loop")), (0, 1));
}

#[test]
fn loops_collect_in_lists() {
    let collect = |value: &str| {
        program(
            "int32 n, tensor<fp32, [2]> x",
            &format!(
                "list<tensor<fp32, [2]>, 1> made = make_list(init_length = 1, elem_shape = (2), dtype = \"fp32\");
                 int32 i, list<tensor<fp32, [2]>, 1> all = while_loop(loop_vars = (0, made)) block(int32 j, list<tensor<fp32, [2]>, 1> l) {{
                     bool go = less(x = j, y = n);
                 }} -> (go), block(int32 j, list<tensor<fp32, [2]>, 1> l) {{
                     fp32 factor = cast(x = j, dtype = \"fp32\");
                     tensor<fp32, [2]> scaled = mul(x = x, y = factor);
                     list<tensor<fp32, [2]>, 1> more = list_write(ls = l, index = j, value = {value});
                     int32 k = add(x = j, y = 1);
                 }} -> (k, more);
                 int32 length = list_length(ls = all);
                 int32 step = identity(x = 2);
                 tensor<int32, [?]> chosen = range_1d(start = 0, end = length, step = step);
                 tensor<fp32, [?, 2]> stacked = list_gather(ls = all, indices = chosen);
                 tensor<fp32, [2]> first = list_read(ls = all, index = 0);"
            ),
            "stacked, length, first",
        )
    };
    let p = collect("scaled");
    for (n, stacked) in [(0, vec![0.0, 0.0]), (2, vec![0.0, 0.0]), (5, vec![0.0, 0.0, 2.0, -6.0, 4.0, -12.0])] {
        let out = run(&p, &[("n", int(n)), ("x", floats(&[1.0, -3.0]))]);
        assert_eq!((out["stacked"].to_f64s(), out["length"].to_i64s()[0]), (stacked, n.max(1)));
    }
    let error = verify::typed(&collect("factor")).unwrap_err().to_string();
    assert!(error.contains("is not the element tensor<fp32, [2]>"), "{error}");
}
