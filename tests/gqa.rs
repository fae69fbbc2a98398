//! `gqa-fold` and the passes around it, as pairs of programs.

mod support;

use milopt::analysis::traffic::Traffic;
use milopt::ir::Program;
use milopt::text;
use support::{DEFAULT, count, declined, main, optimize, optimize_at, program};

const SIGNATURE: &str = "tensor<fp16, [1, 8, 1, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                         tensor<fp16, [1, 2, 32, 16]> values, tensor<fp16, [1, 1, 1, 32]> mask";

const REPEATS: &str = "
    tensor<fp16, [1, 2, 1, 32, 16]> ke = expand_dims(x = keys, axes = [2]);
    tensor<fp16, [1, 2, 4, 32, 16]> kt = tile(x = ke, reps = [1, 1, 4, 1, 1]);
    tensor<fp16, [1, 8, 32, 16]> k = reshape(x = kt, shape = [1, 8, 32, 16]);
    tensor<fp16, [1, 2, 1, 32, 16]> ve = expand_dims(x = values, axes = [2]);
    tensor<fp16, [1, 2, 4, 32, 16]> vt = tile(x = ve, reps = [1, 1, 4, 1, 1]);
    tensor<fp16, [1, 8, 32, 16]> v = reshape(x = vt, shape = [1, 8, 32, 16]);
";

const ATTENTION: &str = "
    tensor<fp16, [1, 8, 1, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
    tensor<fp16, [1, 8, 1, 32]> scaled = mul(x = scores, y = fp16(0.25));
    tensor<fp16, [1, 8, 1, 32]> masked = add(x = scaled, y = mask);
    tensor<fp16, [1, 8, 1, 32]> p = softmax(x = masked, axis = -1);
    tensor<fp16, [1, 8, 1, 16]> out = matmul(x = p, y = v, transpose_x = false, transpose_y = false);
";

#[test]
fn decode_attention_runs_folded() {
    let before = program(SIGNATURE, &format!("{REPEATS}{ATTENTION}"), "out");
    let (after, report) = optimize(&before, DEFAULT);
    insta::assert_snapshot!(text::print_function(main(&after)), @r"
    func main<CoreML8>(
        tensor<fp16, [1, 8, 1, 16]> query,
        tensor<fp16, [1, 2, 32, 16]> keys,
        tensor<fp16, [1, 2, 32, 16]> values,
        tensor<fp16, [1, 1, 1, 32]> mask) {
      tensor<fp16, [1, 2, 4, 16]> scores_rows = reshape(x = query, shape = [1, 2, 4, 16]);
      tensor<fp16, [1, 2, 4, 32]> scores_grouped = matmul(x = scores_rows, y = keys, transpose_x = false, transpose_y = true);
      tensor<fp16, [1, 2, 4, 32]> scaled = mul(x = scores_grouped, y = fp16(0.25));
      tensor<fp16, [1, 2, 4, 32]> masked = add(x = scaled, y = mask);
      tensor<fp16, [1, 2, 4, 32]> p = softmax(x = masked, axis = -1);
      tensor<fp16, [1, 2, 4, 16]> out_grouped = matmul(x = p, y = values, transpose_x = false, transpose_y = false);
      tensor<fp16, [1, 8, 1, 16]> out = reshape(x = out_grouped, shape = [1, 8, 1, 16]);
    } -> (out);
    ");
    assert_eq!(count(&after, "tile"), 0);
    let repeats = &report.functions[0].before.traffic.repeats;
    assert_eq!((repeats.count, repeats.written, repeats.read), (2, 2 * 8192, 2 * 8192));
    assert_eq!(Traffic::of(main(&after)).repeats.count, 0);
}

#[test]
fn prefill_folds_and_keeps_the_mask_in_head_layout() {
    let signature = SIGNATURE.replace("[1, 8, 1, 16]", "[1, 8, 5, 16]").replace("[1, 1, 1, 32]", "[1, 1, 5, 32]");
    let attention = ATTENTION.replace("[1, 8, 1,", "[1, 8, 5,");
    let before = program(&signature, &format!("{REPEATS}{attention}"), "out");
    let (after, report) = optimize(&before, DEFAULT);
    assert_eq!(count(&after, "tile"), 0);
    assert!(
        declined(&report, "scores", "operand `mask` of add `masked` differs from row to row"),
        "{}",
        report.explain()
    );
}

/// Spellings of the repeat of `keys` [1, 2, 32, 16] as `k` [1, 8, 32, 16].
const SPELLINGS: &[(&str, &str)] = &[
    (
        "repeat_interleave",
        "tensor<fp16, [2, 1, 32, 16]> a = transpose(x = keys, perm = [1, 0, 2, 3]);
         tensor<fp16, [8, 1, 32, 16]> b = tile(x = a, reps = [4, 1, 1, 1]);
         tensor<fp16, [4, 2, 1, 32, 16]> c = reshape(x = b, shape = [4, 2, 1, 32, 16]);
         tensor<fp16, [2, 4, 1, 32, 16]> d = transpose(x = c, perm = [1, 0, 2, 3, 4]);
         tensor<fp16, [8, 1, 32, 16]> e = reshape(x = d, shape = [-1, 1, 32, 16]);
         tensor<fp16, [1, 8, 32, 16]> k = transpose(x = e, perm = [1, 0, -2, -1]);",
    ),
    (
        "stack",
        "tensor<fp16, [1, 2, 4, 32, 16]> a = stack(values = (keys, keys, keys, keys), axis = 2);
         tensor<fp16, [1, 8, 32, 16]> k = reshape(x = a, shape = [1, 8, 32, 16]);",
    ),
    (
        "concat of one value",
        "tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
         tensor<fp16, [1, 2, 4, 32, 16]> a = concat(values = (e, e, e, e), axis = 2, interleave = false);
         tensor<fp16, [1, 8, 32, 16]> k = reshape(x = a, shape = [1, 8, 32, 16]);",
    ),
    (
        "concat of repeated slices",
        "tensor<fp16, [1, 1, 32, 16]> h0 = slice_by_size(x = keys, begin = [0, 0, 0, 0], size = [1, 1, 32, 16]);
         tensor<fp16, [1, 1, 32, 16]> h1 = slice_by_index(x = keys, begin = [0, 1, 0, 0], end = [1, 2, 32, 16],
             end_mask = [true, true, true, true]);
         tensor<fp16, [1, 8, 32, 16]> k = concat(values = (h0, h0, h0, h0, h1, h1, h1, h1), axis = 1, interleave = false);",
    ),
    (
        "split and concat",
        "tensor<fp16, [1, 1, 32, 16]> h0, tensor<fp16, [1, 1, 32, 16]> h1 = split(x = keys, axis = 1, num_splits = 2);
         tensor<fp16, [1, 8, 32, 16]> k = concat(values = (h0, h0, h0, h0, h1, h1, h1, h1), axis = 1, interleave = false);",
    ),
    (
        "gather",
        "tensor<fp16, [1, 8, 32, 16]> k = gather(x = keys, indices = [0, 0, 0, 0, 1, 1, 1, 1], axis = 1, batch_dims = 0);",
    ),
    (
        "multiplication by ones",
        "tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
         tensor<fp16, [1, 2, 4, 32, 16]> a = mul(x = e, y = tensor<fp16, [1, 1, 4, 1, 1]>([1.0, 1.0, 1.0, 1.0]));
         tensor<fp16, [1, 8, 32, 16]> k = reshape(x = a, shape = [1, 8, 32, 16]);",
    ),
    (
        "two repeats in a row",
        "tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
         tensor<fp16, [1, 2, 2, 32, 16]> a = tile(x = e, reps = [1, 1, 2, 1, 1]);
         tensor<fp16, [1, 4, 1, 32, 16]> b = reshape(x = a, shape = [1, 4, 1, 32, 16]);
         tensor<fp16, [1, 4, 2, 32, 16]> c = tile(x = b, reps = [1, 1, 2, 1, 1]);
         tensor<fp16, [1, 8, 32, 16]> k = reshape(x = c, shape = [1, 8, 32, 16]);",
    ),
];

#[test]
fn the_spelling_of_the_repeat_does_not_matter() {
    let signature = "tensor<fp16, [1, 8, 3, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys";
    for (name, spelling) in SPELLINGS {
        let body = format!(
            "{spelling}
             tensor<fp16, [1, 8, 3, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);"
        );
        let (after, report) = optimize(&program(signature, &body, "scores"), DEFAULT);
        let kinds = &report.functions[0].after.kinds;
        assert_eq!(kinds.get("matmul"), Some(&1), "{name}");
        assert_eq!(kinds.values().sum::<usize>(), 3, "{name}: {kinds:?}");
        assert_eq!(main(&after).outputs().len(), 1);
        let f = main(&after);
        let matmul = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "matmul").unwrap();
        assert_eq!(f.op(matmul).value("y"), f.input("keys"), "{name}");
    }
}

#[test]
fn the_spelling_does_not_matter_for_an_unknown_length_either() {
    for (name, spelling) in SPELLINGS {
        let spelling =
            spelling.replace("32, 16]>", "s0, 16]>").replace("[-1, 1, 32", "[8, 1, 32").replace("32, 16]", "-1, 16]");
        let before = bounded(
            "tensor<fp16, [1, 8, 3, 16]> query, tensor<fp16, [1, 2, s0, 16]> keys",
            "1 <= s0 <= 64",
            &format!(
                "{spelling}
                 tensor<fp16, [1, 8, 3, s0]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);"
            ),
        );
        let (after, report) = optimize(&before, DEFAULT);
        let f = main(&after);
        let matmul = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "matmul").unwrap();
        assert_eq!(f.op(matmul).value("y"), f.input("keys"), "{name}: {}", report.explain());
        assert_eq!(report.functions[0].after.kinds.values().sum::<usize>(), 3, "{name}");
    }
}

#[test]
fn keys_transposed_before_or_after_the_repeat_cost_no_transpose() {
    let signature = "tensor<fp16, [1, 8, 3, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys";
    let after_repeat = "
        tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
        tensor<fp16, [1, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
        tensor<fp16, [1, 8, 32, 16]> r = reshape(x = t, shape = [1, 8, 32, 16]);
        tensor<fp16, [1, 8, 16, 32]> k = transpose(x = r, perm = [0, 1, -1, -2]);";
    let before_repeat = "
        tensor<fp16, [1, 2, 16, 32]> r = transpose(x = keys, perm = [0, 1, 3, 2]);
        tensor<fp16, [1, 2, 1, 16, 32]> e = expand_dims(x = r, axes = [2]);
        tensor<fp16, [1, 2, 4, 16, 32]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
        tensor<fp16, [1, 8, 16, 32]> k = reshape(x = t, shape = [1, 8, 16, 32]);";
    for spelling in [after_repeat, before_repeat] {
        let body = format!(
            "{spelling}
             tensor<fp16, [1, 8, 3, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = false);"
        );
        let (after, _) = optimize(&program(signature, &body, "scores"), DEFAULT);
        assert_eq!((count(&after, "tile"), count(&after, "transpose")), (0, 0));
    }
}

#[test]
fn a_repeat_on_the_left_of_one_column_is_folded() {
    let signature = "tensor<fp16, [1, 8, 16, 1]> query, tensor<fp16, [1, 2, 32, 16]> keys";
    let body = "
        tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
        tensor<fp16, [1, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
        tensor<fp16, [1, 8, 32, 16]> k = reshape(x = t, shape = [1, 8, 32, 16]);
        tensor<fp16, [1, 8, 32, 1]> scores = matmul(x = k, y = query, transpose_x = false, transpose_y = false);";
    let (after, _) = optimize(&program(signature, body, "scores"), DEFAULT);
    assert_eq!((count(&after, "tile"), count(&after, "transpose")), (0, 0));
}

#[test]
fn outputs_inside_the_region_keep_name_and_shape() {
    let before = program(SIGNATURE, &format!("{REPEATS}{ATTENTION}"), "p, out, scores");
    let (after, _) = optimize(&before, DEFAULT);
    assert_eq!(count(&after, "tile"), 0);
}

#[test]
fn an_output_named_by_a_reshape_that_goes_keeps_its_name() {
    let before = program(
        "tensor<fp16, [1, 8, 1, 16]> x",
        "tensor<fp16, [1, 8, 1, 16]> a = relu(x = x);
         tensor<fp16, [8, 16]> b = reshape(x = a, shape = [8, 16]);
         tensor<fp16, [1, 8, 1, 16]> y = reshape(x = b, shape = [1, 8, 1, 16]);",
        "y",
    );
    let (after, _) = optimize(&before, DEFAULT);
    assert_eq!(count(&after, "reshape"), 0);
    assert_eq!(main(&after).value(main(&after).outputs()[0]).name(), &"y");
}

#[test]
fn views_between_an_input_and_an_output_keep_one_op() {
    let before = program(
        "tensor<fp16, [2, 3]> x",
        "tensor<fp16, [6]> a = reshape(x = x, shape = [6]);
         tensor<fp16, [2, 3]> y = reshape(x = a, shape = [2, 3]);",
        "y",
    );
    let (after, _) = optimize(&before, DEFAULT);
    assert_eq!(main(&after).value(main(&after).outputs()[0]).name(), &"y");
}

#[test]
fn an_op_without_a_row_beside_a_fold_stays() {
    let body = format!(
        "{REPEATS}{ATTENTION}
         tensor<fp16, [1, 8, 1, 16]> strange = custom_thing(x = out);"
    );
    let before = program(SIGNATURE, &body, "out");
    let mut after = before.clone();
    milopt::passes::Pipeline::default().run(&mut after, &Default::default()).unwrap();
    assert_eq!((count(&after, "tile"), count(&after, "custom_thing")), (0, 1));
}

#[test]
fn sinks_are_regrouped_as_constants() {
    let body = REPEATS.to_string()
        + "
    tensor<fp16, [1, 8, 1, 1]> sink = const(val = tensor<fp16, [1, 8, 1, 1]>([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]));
    tensor<fp16, [1, 8, 1, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
    tensor<fp16, [1, 8, 1, 32]> masked = add(x = scores, y = mask);
    tensor<fp16, [1, 8, 1, 33]> joined = concat(values = (masked, sink), axis = 3, interleave = false);
    tensor<fp16, [1, 8, 1, 1]> top = reduce_max(x = joined, axes = [-1], keep_dims = true);
    tensor<fp16, [1, 8, 1, 33]> low = sub(x = joined, y = top);
    tensor<fp16, [1, 8, 1, 33]> p = softmax(x = low, axis = -1);
    tensor<fp16, [1, 8, 1, 32]> cut = slice_by_index(x = p, begin = [0, 0, 0, 0], end = [1, 8, 1, 32],
        end_mask = [true, true, true, false]);
    tensor<fp16, [1, 8, 1, 16]> out = matmul(x = cut, y = v, transpose_x = false, transpose_y = false);
    ";
    let (after, report) = optimize(&program(SIGNATURE, &body, "out"), DEFAULT);
    assert_eq!(count(&after, "tile"), 0);
    assert_eq!(count(&after, "reshape"), 2, "the query's and the output's\n{}", report.explain());
}

#[test]
fn batches_are_views_too() {
    let signature = "tensor<fp16, [3, 8, 4, 16]> query, tensor<fp16, [3, 2, 32, 16]> keys";
    let body = "
        tensor<fp16, [3, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
        tensor<fp16, [3, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
        tensor<fp16, [3, 8, 32, 16]> k = reshape(x = t, shape = [3, 8, 32, 16]);
        tensor<fp16, [3, 8, 4, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let (after, _) = optimize(&program(signature, body, "scores"), DEFAULT);
    assert_eq!((count(&after, "tile"), count(&after, "transpose"), count(&after, "reshape")), (0, 0, 2));
}

#[test]
fn stopping_after_a_rewrite_leaves_the_rest() {
    let before = program(SIGNATURE, &format!("{REPEATS}{ATTENTION}"), "out");
    let mut after = before.clone();
    let pipeline = milopt::passes::Pipeline::default();
    pipeline.run(&mut after, &milopt::passes::RunOptions::default().stop_after(1)).unwrap();
    assert_eq!(count(&after, "tile"), 1);
}

/// `query` [1, 8, q, 16] times `k`, the interleaved repeat of `keys`.
fn interleaved(q: u64, n: u64) -> milopt::ir::Program {
    program(
        &format!("tensor<fp16, [1, 8, {q}, 16]> query, tensor<fp16, [1, 2, {n}, 16]> keys"),
        &format!(
            "tensor<fp16, [1, 8, {n}, 16]> k = tile(x = keys, reps = [1, 4, 1, 1]);
             tensor<fp16, [1, 8, {q}, {n}]> y = matmul(x = query, y = k, transpose_x = false, transpose_y = true);"
        ),
        "y",
    )
}

#[test]
fn interleaved_heads_are_folded_by_batch_axes() {
    for q in [1, 5] {
        let (after, report) = optimize(&interleaved(q, 32), DEFAULT);
        assert_eq!((count(&after, "tile"), count(&after, "transpose")), (0, 0), "{}", report.explain());
        assert!(report.functions[0].passes[0].fired[0].form.contains("interleaved"));
    }
}

#[test]
fn either_lowering_can_be_asked_for() {
    let grouped = program(SIGNATURE, &format!("{REPEATS}{ATTENTION}"), "out");
    for before in [grouped, interleaved(3, 32)] {
        for (lowering, form) in [("rows", "rows"), ("batch-axes", "batch axes")] {
            let (after, report) = optimize(&before, &format!("gqa-fold:lowering={lowering},view-simplify,dce"));
            assert!(report.functions[0].passes[0].fired[0].form.starts_with(form));
            assert_eq!(count(&after, "tile"), 0, "{form}");
        }
    }
}

#[test]
fn a_form_is_reported_with_its_hazards() {
    let signature = "tensor<fp16, [1, 24, 1, 8]> query, tensor<fp16, [1, 12, 8, 8]> keys";
    let body = "tensor<fp16, [1, 24, 8, 8]> k = tile(x = keys, reps = [1, 2, 1, 1]);
         tensor<fp16, [1, 24, 1, 8]> y = scaled_dot_product_attention(query = query, key = k, value = k);";
    let hazards = |before: &milopt::ir::Program, passes: &str| {
        let (_, report) = optimize(before, passes);
        report.functions[0].passes[0].fired.iter().flat_map(|f| f.hazards.clone()).collect::<Vec<_>>()
    };
    let fused = hazards(&program(signature, body, "y"), DEFAULT);
    assert!(fused.iter().any(|h| h.contains("more than one row")), "{fused:?}");
    let few = program(SIGNATURE, &format!("{REPEATS}{ATTENTION}"), "out");
    assert!(hazards(&few, DEFAULT).is_empty());
    let broadcast = hazards(&few, "gqa-fold:lowering=batch-axes");
    assert!(broadcast.iter().all(|h| h.contains("slower than copies")), "{broadcast:?}");
    let product = "tensor<fp16, [1, 24, 1, 8]> y = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    for (copies, reported) in [
        // Two copies of all heads lead, or twelve heads.
        ("tile(x = keys, reps = [1, 2, 1, 1])".to_string(), false),
        (
            format!(
                "gather(x = keys, indices = {:?}, axis = 1, batch_dims = 0)",
                (0..24).map(|h| h / 2).collect::<Vec<_>>()
            ),
            true,
        ),
    ] {
        let body = format!("tensor<fp16, [1, 24, 8, 8]> k = {copies};\n{product}");
        let found = hazards(&program(signature, &body, "y"), "gqa-fold:lowering=batch-axes");
        assert_eq!(found.iter().any(|h| h.contains("coremltools#2650")), reported, "{copies}");
    }
}

#[test]
fn masks_with_rows_of_their_own_are_tiled_on_request() {
    let layer = |n: u64, query: &str| {
        ATTENTION
            .replace("scores", &format!("s{n}"))
            .replace("scaled", &format!("c{n}"))
            .replace("masked", &format!("m{n}"))
            .replace(" p ", &format!(" p{n} "))
            .replace("x = p,", &format!("x = p{n},"))
            .replace("out", &format!("o{n}"))
            .replace("query", query)
            .replace("[1, 8, 1,", "[1, 8, 5,")
    };
    let signature = SIGNATURE.replace("[1, 8, 1, 16]", "[1, 8, 5, 16]").replace("[1, 1, 1, 32]", "[1, 1, 5, 32]");
    let body = format!("{REPEATS}{}{}", layer(0, "query"), layer(1, "o0"));
    let before = program(&signature, &body, "o1");
    let (kept, report) = optimize(&before, DEFAULT);
    assert_eq!((count(&kept, "tile"), count(&kept, "reshape")), (0, 6));
    let stays = &report.functions[0].passes[0].declined;
    assert!(stays.iter().any(|d| d.remedy.as_deref()
        == Some("the masks are tiled (option masks=tile) or the lowering is batch axes (option lowering=batch-axes)")));
    // The mask is tiled once, and everything between the first product and the last computes in the folded shape.
    let (tiled, report) = optimize(&before, "gqa-fold:masks=tile,view-simplify,dce");
    assert_eq!((count(&tiled, "tile"), count(&tiled, "reshape")), (1, 2), "{}", text::print_program(&tiled));
    let added: u64 = report.functions[0].passes[0].fired.iter().map(|f| f.bytes_added).sum();
    assert_eq!(added, 2 * 4 * 5 * 32 * 2);
}

#[test]
fn one_head_is_multiplied_once_and_its_product_repeated() {
    for (repeat, order) in [
        ("gather(x = keys, indices = [0, 0, 0, 0, 1, 1, 1, 1], axis = 1, batch_dims = 0)", "grouped"),
        ("tile(x = keys, reps = [1, 4, 1, 1])", "interleaved"),
    ] {
        for (x, y, shape, transposed) in
            [("query", "k", "[1, 8, 3, 32]", [false, true]), ("k", "query", "[1, 8, 32, 3]", [false, true])]
        {
            let body = format!(
                "tensor<fp16, [1, 8, 32, 16]> k = {repeat};
                 tensor<fp16, {shape}> y = matmul(x = {x}, y = {y}, transpose_x = {}, transpose_y = {});",
                transposed[0], transposed[1]
            );
            let signature = "tensor<fp16, [1, 1, 3, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys";
            let (after, report) = optimize(&program(signature, &body, "y"), DEFAULT);
            let f = main(&after);
            let matmul = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "matmul").unwrap();
            assert_eq!(f.op(matmul).value(if x == "k" { "x" } else { "y" }), f.input("keys"), "{order}");
            assert_eq!(report.functions[0].passes[0].fired.len(), 1);
            // Longer queries would make the product larger than the copies.
            let long = body.replace("[1, 8, 3, 32]", "[1, 8, 90, 32]").replace("[1, 8, 32, 3]", "[1, 8, 32, 90]");
            let (_, report) = optimize(&program(&signature.replace("1, 3", "1, 90"), &long, "y"), DEFAULT);
            assert!(declined(&report, "y", "no bytes gained"), "{order}\n{}", report.explain());
        }
    }
}

#[test]
fn beams_are_left_to_broadcasting() {
    let signature =
        "tensor<fp16, [3, 8, 1, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, tensor<fp16, [1, 8, 32, 16]> all";
    let product = "tensor<fp16, [3, 8, 1, 32]> y = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let heads =
        "tensor<fp16, [3, 8, 32, 16]> k = gather(x = b, indices = [0, 0, 0, 0, 1, 1, 1, 1], axis = 1, batch_dims = 0);";
    let wide = "tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);";
    for (copies, source) in [
        (format!("tensor<fp16, [3, 2, 32, 16]> b = tile(x = keys, reps = [3, 1, 1, 1]);\n{heads}"), "keys"),
        (
            format!(
                "tensor<fp16, [3, 2, 32, 16]> b = concat(values = (keys, keys, keys), axis = 0, interleave = false);\n{heads}"
            ),
            "keys",
        ),
        // Heads first.
        (
            format!(
                "{wide}
                 tensor<fp16, [1, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
                 tensor<fp16, [1, 8, 32, 16]> r = reshape(x = t, shape = [1, 8, 32, 16]);
                 tensor<fp16, [3, 8, 32, 16]> k = tile(x = r, reps = [3, 1, 1, 1]);"
            ),
            "keys",
        ),
        // Both at once.
        (
            format!(
                "{wide}
                 tensor<fp16, [3, 2, 4, 32, 16]> t = tile(x = e, reps = [3, 1, 4, 1, 1]);
                 tensor<fp16, [3, 8, 32, 16]> k = reshape(x = t, shape = [3, 8, 32, 16]);"
            ),
            "keys",
        ),
        ("tensor<fp16, [3, 8, 32, 16]> k = tile(x = keys, reps = [3, 4, 1, 1]);".into(), "keys"),
        // No groups.
        ("tensor<fp16, [3, 8, 32, 16]> k = tile(x = all, reps = [3, 1, 1, 1]);".into(), "all"),
    ] {
        let flipped = copies.replace("> k = ", "> j = ")
            + "\ntensor<fp16, [3, 8, 16, 32]> k = transpose(x = j, perm = [0, 1, 3, 2]);";
        for body in [
            format!("{copies}\n{product}"),
            format!("{flipped}\n{}", product.replace("transpose_y = true", "transpose_y = false")),
        ] {
            let (after, report) = optimize(&program(signature, &body, "y"), DEFAULT);
            let f = main(&after);
            let matmul = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "matmul").unwrap();
            assert_eq!(
                f.op(matmul).value("y"),
                f.input(source),
                "{body}\n{}{}",
                report.explain(),
                text::print_program(&after)
            );
        }
    }
}

#[test]
fn beams_of_fused_attention_stay_and_its_heads_fold() {
    let signature = "tensor<fp16, [3, 8, 1, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys";
    let body = "
        tensor<fp16, [1, 8, 32, 16]> r = gather(x = keys, indices = [0, 0, 0, 0, 1, 1, 1, 1], axis = 1, batch_dims = 0);
        tensor<fp16, [3, 8, 32, 16]> k = tile(x = r, reps = [3, 1, 1, 1]);
        tensor<fp16, [3, 8, 1, 16]> y = scaled_dot_product_attention(query = query, key = k, value = k);";
    let (after, report) = optimize(&program(signature, body, "y"), DEFAULT);
    assert_eq!(
        (count(&after, "gather"), count(&after, "tile")),
        (0, 1),
        "{}\n{}",
        report.explain(),
        text::print_program(&after)
    );
}

#[test]
fn copies_times_copies_are_multiplied_once() {
    let repeat = |x: &str, order: &str| {
        format!("tensor<fp16, [1, 8, 32, 16]> {x}k = gather(x = {x}, indices = {order}, axis = 1, batch_dims = 0);\n")
    };
    let (grouped, interleaved) = ("[0, 0, 0, 0, 1, 1, 1, 1]", "[0, 1, 0, 1, 0, 1, 0, 1]");
    let signature = "tensor<fp16, [1, 2, 32, 16]> a, tensor<fp16, [1, 2, 32, 16]> b";
    let product = |x: &str, y: &str, n: u64, flags: [bool; 2]| {
        let [tx, ty] = flags;
        format!(
            "tensor<fp16, [1, 8, {n}, {n}]> y = matmul(x = {x}k, y = {y}k, transpose_x = {tx}, transpose_y = {ty});"
        )
    };
    // With the columns.
    let small = [true, false];
    for (body, x, y) in [
        (repeat("a", grouped) + &product("a", "a", 16, small), "a", "a"),
        (repeat("a", interleaved) + &product("a", "a", 16, small), "a", "a"),
        (repeat("a", grouped) + &repeat("b", grouped) + &product("a", "b", 16, small), "a", "b"),
    ] {
        let (after, report) = optimize(&program(signature, &body, "y"), DEFAULT);
        let f = main(&after);
        let matmul = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "matmul").unwrap();
        let operands = [f.op(matmul).value("x"), f.op(matmul).value("y")];
        assert_eq!(operands, [f.input(x), f.input(y)], "{body}\n{}", report.explain());
        assert_eq!(Traffic::of(f).repeats.count, 0);
    }
    // Of beams.
    for (copies, shape) in
        [("tile(x = a, reps = [3, 1, 1, 1])", "[3, 2"), ("tile(x = a, reps = [3, 4, 1, 1])", "[3, 8")]
    {
        let body = format!(
            "tensor<fp16, {shape}, 32, 16]> k = {copies};
             tensor<fp16, {shape}, 16, 16]> y = matmul(x = k, y = k, transpose_x = true, transpose_y = false);"
        );
        let (after, report) = optimize(&program(signature, &body, "y"), DEFAULT);
        let f = main(&after);
        let matmul = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "matmul").unwrap();
        let operands = [f.op(matmul).value("x"), f.op(matmul).value("y")];
        assert_eq!(operands, [f.input("a"); 2], "{body}\n{}", report.explain());
    }
    // What is repeated in two orders is folded on one side; the other is explained.
    let body = repeat("a", grouped) + &repeat("b", interleaved) + &product("a", "b", 16, small);
    let (after, report) = optimize(&program(signature, &body, "y"), DEFAULT);
    assert_eq!(Traffic::of(main(&after)).repeats.count, 1);
    assert!(!report.explain().is_empty());
}

#[test]
fn a_repeat_is_not_sunk_towards_an_op_that_tells_heads_apart() {
    let signature = "tensor<fp16, [1, 8, 1, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                     tensor<fp16, [1, HEADS, 32, 16]> cos, tensor<fp16, [1, HEADS, 32, 16]> sin";
    let body = "
        tensor<fp16, [1, 8, 32, 16]> k = gather(x = keys, indices = [0, 0, 0, 0, 1, 1, 1, 1], axis = 1, batch_dims = 0);
        tensor<fp16, [1, 8, 32, 8]> a = slice_by_index(x = k, begin = [0, 0, 0, 0], end = [1, 8, 32, 8]);
        tensor<fp16, [1, 8, 32, 8]> b = slice_by_index(x = k, begin = [0, 0, 0, 8], end = [1, 8, 32, 16]);
        tensor<fp16, [1, 8, 32, 8]> n = mul(x = b, y = fp16(-1));
        tensor<fp16, [1, 8, 32, 16]> turned = concat(values = (n, a), axis = -1, interleave = false);
        tensor<fp16, [1, 8, 32, 16]> s = mul(x = turned, y = sin);
        tensor<fp16, [1, 8, 32, 16]> c = mul(x = k, y = cos);
        tensor<fp16, [1, 8, 32, 16]> rotated = add(x = c, y = s);
        tensor<fp16, [1, 8, 1, 32]> y = matmul(x = query, y = rotated, transpose_x = false, transpose_y = true);";
    let (_, report) = optimize(&program(&signature.replace("HEADS", "1"), body, "y"), DEFAULT);
    assert_eq!(report.functions[0].after.traffic.repeats.count, 0, "{}", report.explain());
    let before = program(&signature.replace("HEADS", "8"), body, "y");
    let (after, report) = optimize(&before, DEFAULT);
    assert_eq!(text::print_program(&before), text::print_program(&after));
    assert!(declined(&report, "matmul `y`", "mul `c` tells the heads of a group apart"), "{}", report.explain());
}

#[test]
fn a_reshape_whose_first_reader_cannot_follow_is_reported() {
    let attention = ATTENTION.replace("mul(x = scores, y = fp16(0.25))", "softmax(x = scores, axis = 1)");
    assert_ne!(attention, ATTENTION);
    let (_, report) = optimize(&program(SIGNATURE, &format!("{REPEATS}{attention}"), "out"), DEFAULT);
    let reason = "the reshapes stay: softmax";
    assert!(declined(&report, "reshape `scores`", reason), "{}", report.explain());
}

#[test]
fn sizes_that_are_asked_of_scores_do_not_keep_them_in_head_layout() {
    let signature = "tensor<fp16, [1, 8, s0, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                     tensor<fp16, [1, 2, 32, 16]> values, tensor<fp16, [1, 8, 1, 1]> sinks";
    let body = format!(
        "{REPEATS}
         tensor<fp16, [1, 8, s0, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
         tensor<int32, [4]> sizes = shape(x = scores);
         tensor<int32, [1]> rows = gather(x = sizes, indices = [2], axis = 0, batch_dims = 0);
         tensor<int32, [4]> reps = concat(values = ([1, 1], rows, [1]), axis = 0, interleave = false);
         tensor<fp16, [1, 8, s0, 1]> sink = tile(x = sinks, reps = reps);
         tensor<fp16, [1, 8, s0, 33]> all = concat(values = (scores, sink), axis = -1, interleave = false);
         tensor<fp16, [1, 8, s0, 33]> p = softmax(x = all, axis = -1);
         tensor<fp16, [1, 8, s0, 32]> w = slice_by_index(x = p, begin = [0, 0, 0, 0], end = [1, 8, 0, 32], end_mask = [true, true, true, false]);
         tensor<fp16, [1, 8, s0, 16]> out = matmul(x = w, y = v, transpose_x = false, transpose_y = false);"
    );
    let (after, report) = optimize(&bounded(signature, "1 <= s0 <= 4", &body), DEFAULT);
    assert!(
        report.functions[0].passes[0].fired.iter().any(|f| f.form.starts_with("sunk")),
        "{}\n{}",
        report.explain(),
        text::print_program(&after)
    );
}

#[test]
fn refusals_say_what_stays_and_what_would_help() {
    let attention = ATTENTION.replace("axis = -1", "axis = 1");
    let (_, report) = optimize(&program(SIGNATURE, &format!("{REPEATS}{attention}"), "out"), DEFAULT);
    let fold = &report.functions[0].passes[0];
    let stays = fold.declined.iter().filter(|d| d.keeps == milopt::rewrite::Keeps::Reshapes).count();
    assert!(stays > 0 && fold.declined.iter().all(|d| d.remedy.is_some()), "{}", report.explain());
    assert!(report.to_string().contains(&format!("{stays} × reshapes stay")), "{report}");
    assert!(report.explain().contains("; possible if that op keeps heads and rows apart"), "{}", report.explain());
}

#[test]
fn keys_times_queries_are_folded_for_many_queries() {
    let signature = "tensor<fp16, [1, 8, 5, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys";
    let body = "
        tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
        tensor<fp16, [1, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
        tensor<fp16, [1, 8, 32, 16]> k = reshape(x = t, shape = [1, 8, 32, 16]);
        tensor<fp16, [1, 8, 32, 5]> scores = matmul(x = k, y = query, transpose_x = false, transpose_y = true);";
    let (after, _) = optimize(&program(signature, body, "scores"), DEFAULT);
    assert_eq!((count(&after, "tile"), count(&after, "transpose")), (0, 0));
}

/// A program with bounds of its symbols that returns `out`. Each `?` is a symbol of its own, as in a file.
fn bounded(signature: &str, bounds: &str, body: &str) -> Program {
    let mut symbols = 2..;
    let body: String =
        body.chars().map(|c| if c == '?' { format!("s{}", symbols.next().unwrap()) } else { c.to_string() }).collect();
    let text = format!(
        "program(1.3) [specificationVersion = 9] {{ func main<CoreML8>({signature}) where {bounds} {{ {body} }} -> (out); }}"
    );
    text::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// The repeat of `x` [1, 2, `n`, 16] as `{x}k` [1, 8, ?, 16] with computed repetitions, as converters write it.
fn computed_repeat(x: &str, n: &str) -> String {
    format!(
        "tensor<fp16, [1, 2, 1, {n}, 16]> {x}e = expand_dims(x = {x}, axes = [2]);
         tensor<int32, [5]> {x}h = shape(x = {x}e);
         tensor<uint16, [5]> {x}u = cast(x = {x}h, dtype = \"uint16\");
         uint16 {x}g = gather(x = {x}u, axis = 0, batch_dims = 0, indices = 3);
         int32 {x}s = cast(x = {x}g, dtype = \"int32\");
         tensor<int32, [5]> {x}w = concat(values = (1, 2, 4, {x}s, 16), axis = 0, interleave = false);
         tensor<bool, [5]> {x}m = equal(x = {x}w, y = -1);
         tensor<int32, [5]> {x}c = select(a = {x}h, b = {x}w, cond = {x}m);
         tensor<int32, [5]> {x}r = real_div(x = {x}c, y = {x}h);
         tensor<fp16, [?, ?, ?, ?, ?]> {x}t = tile(x = {x}e, reps = {x}r);
         tensor<fp16, [1, 8, ?, 16]> {x}k = reshape(x = {x}t, shape = [1, 8, -1, 16]);\n"
    )
}

/// Lengths that are no products of input sizes: their bounds suffice to resolve the repetitions.
#[test]
fn repetitions_of_joined_and_cut_keys_are_resolved() {
    let query = "tensor<fp16, [1, 8, 1, 16]> query";
    let product =
        "tensor<fp16, [1, 8, 1, ?]> out = matmul(x = query, y = keysk, transpose_x = false, transpose_y = true);";
    let joined = "tensor<fp16, [1, 2, s1, 16]> keys = concat(values = (past, new), axis = 2, interleave = false);";
    let cut = "tensor<int32, [4]> sizes = shape(x = mask);
               tensor<int32, [1]> length = slice_by_size(x = sizes, begin = [3], size = [1]);
               tensor<int32, [4]> end = concat(values = ([1, 2], length, [16]), axis = 0, interleave = false);
               tensor<fp16, [1, 2, s1, 16]> keys = slice_by_index(x = cache, begin = [0, 0, 0, 0], end = end);";
    let new = "tensor<fp16, [1, 2, s0, 16]> past, tensor<fp16, [1, 2, 1, 16]> new";
    let cache = "tensor<fp16, [1, 2, 32, 16]> cache, tensor<fp16, [1, 1, 1, s0]> mask";
    // A size of 65536 fits no `uint16`; the mask may be longer than the cache, but an empty one leaves nothing to divide by.
    for (inputs, bounds, keys, resolved) in [
        (new, "1 <= s0 <= 64", joined, true),
        (new, "1 <= s0 <= 65535", joined, false),
        (cache, "1 <= s0 <= 32", cut, true),
        (cache, "1 <= s0 <= 64", cut, true),
        (cache, "0 <= s0 <= 64", cut, false),
    ] {
        let body = format!("{keys}\n{}{product}", computed_repeat("keys", "s1"));
        let before = bounded(&format!("{query}, {inputs}"), bounds, &body);
        let mut after = before.clone();
        let report = milopt::passes::Pipeline::default().run(&mut after, &Default::default()).unwrap();
        assert_eq!(count(&after, "tile"), usize::from(!resolved), "{keys} {bounds}\n{}", report.explain());
        assert_eq!(declined(&report, "keyst", "computed at run time"), !resolved, "{bounds}\n{}", report.explain());
        if resolved {
            let verdict = milopt::equiv::check(&before, &after, None, &Default::default()).unwrap();
            assert!(verdict.satisfies(milopt::equiv::Exactness::Bitwise), "{bounds}: {verdict}");
        }
    }
}

#[test]
fn unknown_lengths_are_folded_and_their_repetitions_resolved() {
    let signature = "tensor<fp16, [1, 8, s0, 16]> query, tensor<fp16, [1, 2, s1, 16]> keys, \
                     tensor<fp16, [1, 2, s1, 16]> values, tensor<fp16, [1, 1, s0, s1]> mask";
    let body = computed_repeat("keys", "s1")
        + &computed_repeat("values", "s1")
        + "tensor<fp16, [1, 8, s0, ?]> scores = matmul(x = query, y = keysk, transpose_x = false, transpose_y = true);
           tensor<fp16, [1, 8, s0, ?]> masked = add(x = scores, y = mask);
           tensor<fp16, [1, 8, s0, ?]> p = softmax(x = masked, axis = -1);
           tensor<fp16, [1, 8, s0, 16]> out = matmul(x = p, y = valuesk, transpose_x = false, transpose_y = false);";
    let before = bounded(signature, "1 <= s0 <= 16, 1 <= s1 <= 64", &body);
    let mut after = before.clone();
    let report = milopt::passes::Pipeline::default().run(&mut after, &Default::default()).unwrap();
    for kind in ["tile", "shape", "real_div", "select"] {
        assert_eq!(count(&after, kind), 0, "{kind}\n{}\n{}", report.explain(), text::print_program(&after));
    }
    let shapes = |q: usize, n: usize| {
        let shapes = [
            ("query", vec![1, 8, q, 16]),
            ("keys", vec![1, 2, n, 16]),
            ("values", vec![1, 2, n, 16]),
            ("mask", vec![1, 1, q, n]),
        ];
        shapes.into_iter().map(|(name, shape)| (name.into(), shape)).collect()
    };
    for (q, n) in [(1, 1), (1, 64), (7, 33), (16, 64)] {
        let options = milopt::equiv::Options { shapes: shapes(q, n), ..Default::default() };
        let verdict = milopt::equiv::check(&before, &after, None, &options).unwrap();
        assert!(verdict.satisfies(milopt::equiv::Exactness::Bitwise), "{q} x {n}: {verdict}");
    }
}

#[test]
fn the_query_reshape_moves_up_to_the_projection() {
    let body = format!(
        "tensor<fp16, [1, 1, 8, 16]> h = reshape(x = hidden, shape = [1, 1, 8, 16]);
         tensor<fp16, [1, 8, 1, 16]> r = transpose(x = h, perm = [0, 2, 1, 3]);
         tensor<fp16, [1, 8, 1, 16]> squared = mul(x = r, y = r);
         tensor<fp16, [1, 8, 1, 1]> mean = reduce_mean(x = squared, axes = [-1], keep_dims = true);
         tensor<fp16, [1, 8, 1, 1]> scale = rsqrt(x = mean, epsilon = fp16(0.001));
         tensor<fp16, [1, 8, 1, 16]> query = mul(x = r, y = scale);
         {REPEATS}{ATTENTION}"
    );
    let signature = SIGNATURE.replace("tensor<fp16, [1, 8, 1, 16]> query", "tensor<fp16, [1, 1, 128]> hidden");
    let (after, report) = optimize(&program(&signature, &body, "out"), DEFAULT);
    assert_eq!((count(&after, "reshape"), count(&after, "transpose")), (2, 0), "{}", report.explain());
}

#[test]
fn an_operand_of_lower_rank_inside_the_region_keeps_it_in_head_layout() {
    // The maximum has rank 3 and broadcasts from the right: over other axes than those it was reduced from.
    let signature = "tensor<fp16, [1, 2, 2, 16]> query, tensor<fp16, [1, 1, 2, 16]> keys";
    let body = "
        tensor<fp16, [1, 2, 2, 16]> k = tile(x = keys, reps = [1, 2, 1, 1]);
        tensor<fp16, [1, 2, 2, 2]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
        tensor<fp16, [1, 2, 2]> top = reduce_max(x = scores, axes = [-1], keep_dims = false);
        tensor<fp16, [1, 2, 2, 2]> low = sub(x = scores, y = top);
        tensor<fp16, [1, 2, 2, 2]> e = exp(x = low);";
    let (after, _) = optimize(&program(signature, body, "e"), DEFAULT);
    assert_eq!(count(&after, "tile"), 0);
}

#[test]
fn slices_whose_bounds_are_whole_by_accident_are_not_sunk() {
    let signature = SIGNATURE.replace("[1, 8, 1, 16]", "[1, 8, 4, 16]");
    for (begin, end) in [("[0, 0, 0, 0]", "[1, 8, 5, 32]"), ("[0, 0, -4, 0]", "[1, 8, 4, 32]")] {
        let body = format!(
            "{REPEATS}
             tensor<fp16, [1, 8, 4, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
             tensor<fp16, [1, 8, 4, 32]> scaled = mul(x = scores, y = fp16(0.25));
             tensor<fp16, [1, 8, 4, 32]> cut = slice_by_index(x = scaled, begin = {begin}, end = {end});
             tensor<fp16, [1, 8, 4, 32]> p = softmax(x = cut, axis = -1);
             tensor<fp16, [1, 8, 4, 16]> out = matmul(x = p, y = v, transpose_x = false, transpose_y = false);"
        );
        let (after, report) = optimize(&program(&signature, &body, "out"), DEFAULT);
        assert_eq!(count(&after, "tile"), 0);
        assert!(declined(&report, "scores", "bounds that hold for its size only"), "{}", report.explain());
    }
}

#[test]
fn a_value_written_to_a_state_does_not_become_an_output() {
    let before = program(
        "tensor<fp16, [2, 3]> x, state<tensor<fp16, [2, 3]>> cache",
        "tensor<fp16, [2, 3]> old = read_state(input = cache);
         tensor<fp16, [2, 3]> new = add(x = old, y = x);
         write_state(input = cache, data = new);
         tensor<fp16, [6]> flat = reshape(x = new, shape = [6]);
         tensor<fp16, [2, 3]> out = reshape(x = flat, shape = [2, 3]);",
        "out",
    );
    let (after, _) = optimize(&before, DEFAULT);
    let f = main(&after);
    let written = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "write_state").unwrap();
    assert_ne!(f.op(written).value("data"), Some(f.outputs()[0]));
}

#[test]
fn fused_attention_is_folded_with_every_kind_of_mask() {
    for q in [1u64, 5] {
        for (mask, ty) in [
            ("", "fp16".to_string()),
            ("[1, 1, 1, 32]", "fp16".into()),
            (&*format!("[1, 1, {q}, 32]"), "fp16".into()),
            (&*format!("[1, 8, {q}, 32]"), "fp16".into()),
            ("[1, 8, 1, 32]", "fp16".into()),
            (&*format!("[{q}, 32]"), "bool".into()),
            (&*format!("[8, {q}, 32]"), "bool".into()),
        ] {
            let input = if mask.is_empty() { String::new() } else { format!(", tensor<{ty}, {mask}> mask") };
            let signature = format!(
                "tensor<fp16, [1, 8, {q}, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                 tensor<fp16, [1, 2, 32, 16]> values{input}"
            );
            let bound = if mask.is_empty() { "" } else { ", attn_mask = mask" };
            for (repeats, order) in [
                (REPEATS.to_string(), "grouped"),
                (
                    "tensor<fp16, [1, 8, 32, 16]> k = tile(x = keys, reps = [1, 4, 1, 1]);
                     tensor<fp16, [1, 8, 32, 16]> v = tile(x = values, reps = [1, 4, 1, 1]);"
                        .to_string(),
                    "interleaved",
                ),
            ] {
                let body = format!(
                    "{repeats}
                     tensor<fp16, [1, 8, {q}, 16]> out =
                         scaled_dot_product_attention(query = query, key = k, value = v{bound});"
                );
                let (after, report) = optimize(&program(&signature, &body, "out"), DEFAULT);
                let copies = Traffic::of(main(&after)).repeats.count;
                assert_eq!(copies, 0, "{q} {mask} {order}\n{}", report.explain());
            }
        }
    }
}

#[test]
fn two_attentions_share_the_tiled_mask() {
    let signature = "tensor<fp16, [1, 8, 5, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                     tensor<fp16, [1, 2, 32, 16]> values, tensor<fp16, [1, 1, 5, 32]> mask";
    let body = format!(
        "{REPEATS}
         tensor<fp16, [1, 8, 5, 16]> a =
             scaled_dot_product_attention(query = query, key = k, value = v, attn_mask = mask);
         tensor<fp16, [1, 8, 5, 16]> out = scaled_dot_product_attention(query = a, key = k, value = v, attn_mask = mask);"
    );
    let (after, _) = optimize(&program(signature, &body, "out"), DEFAULT);
    assert_eq!(count(&after, "tile"), 1);
}

#[test]
fn what_treats_all_heads_alike_is_done_before_the_repeat() {
    let repeats = [
        "tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
         tensor<fp16, [1, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
         tensor<fp16, [1, 8, 32, 16]> r = reshape(x = t, shape = [1, 8, 32, 16]);",
        "tensor<fp16, [1, 8, 32, 16]> r = tile(x = keys, reps = [1, 4, 1, 1]);",
    ];
    let between = [
        // Rotary embedding.
        "tensor<fp16, [1, 8, 32, 8]> a = slice_by_index(x = r, begin = [0, 0, 0, 0], end = [1, 8, 32, 8]);
         tensor<fp16, [1, 8, 32, 8]> b = slice_by_size(x = r, begin = [0, 0, 0, 8], size = [1, 8, 32, 8]);
         tensor<fp16, [1, 8, 32, 8]> n = mul(x = b, y = fp16(-1.0));
         tensor<fp16, [1, 8, 32, 16]> h = concat(values = (n, a), axis = -1, interleave = false);
         tensor<fp16, [1, 8, 32, 16]> hs = mul(x = h, y = angles);
         tensor<fp16, [1, 8, 32, 16]> rc = mul(x = r, y = angles);
         tensor<fp16, [1, 8, 32, 16]> k = add(x = rc, y = hs);",
        // A norm with a weight per element of the head.
        "tensor<fp16, [1, 8, 32, 16]> s = mul(x = r, y = r);
         tensor<fp16, [1, 8, 32, 1]> m = reduce_mean(x = s, axes = [-1], keep_dims = true);
         tensor<fp16, [1, 8, 32, 1]> i = rsqrt(x = m, epsilon = fp16(0.001));
         tensor<fp16, [1, 8, 32, 16]> u = mul(x = r, y = i);
         tensor<fp16, [1, 8, 32, 16]> k = mul(x = u, y = weight);",
        // A detour through another element type.
        "tensor<fp32, [1, 8, 32, 16]> w = cast(x = r, dtype = \"fp32\");
         tensor<fp32, [1, 8, 32, 16]> c = tanh(x = w);
         tensor<fp16, [1, 8, 32, 16]> k = cast(x = c, dtype = \"fp16\");",
    ];
    let signature = "tensor<fp16, [1, 8, 3, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                     tensor<fp16, [32, 16]> angles, tensor<fp16, [16]> weight";
    for repeat in repeats {
        for op in between {
            let body = format!(
                "{repeat}\n{op}
                 tensor<fp16, [1, 8, 3, 32]> y = matmul(x = query, y = k, transpose_x = false, transpose_y = true);"
            );
            let (after, report) = optimize(&program(signature, &body, "y"), DEFAULT);
            assert_eq!(count(&after, "tile"), 0, "{}\n{}", report.explain(), text::print_program(&after));
        }
    }
}

#[test]
fn both_equations_of_einsum_are_folded_on_either_side() {
    for (batch, axes, equation) in
        [("1, ", 1, "bchw,bwhu->bchu"), ("3, ", 1, "nkhq,nqhc->nkhc"), ("", 0, "chw,whr->chr")]
    {
        for rows in [1u64, 5] {
            for interleaved in [false, true] {
                // Queries [rows, 8, 16] times keys [16, 8, 32], and the other way round.
                for (once, many, x, y, out) in [
                    ("[*16, 2, 32]", "[*16, 8, 32]", format!("[*{rows}, 8, 16]"), "r", format!("[*{rows}, 8, 32]")),
                    ("[*32, 2, 16]", "[*32, 8, 16]", format!("[*16, 8, {rows}]"), "q", format!("[*32, 8, {rows}]")),
                ] {
                    let full = |s: &str| s.replace('*', batch);
                    let repeat = match interleaved {
                        true => {
                            let mut reps = vec![1; 3 + axes];
                            reps[1 + axes] = 4;
                            format!("tensor<fp16, {}> r = tile(x = keys, reps = {reps:?});", full(many))
                        }
                        false => format!(
                            "tensor<fp16, {}> r = gather(x = keys, indices = [0, 0, 0, 0, 1, 1, 1, 1], axis = {}, batch_dims = 0);",
                            full(many),
                            1 + axes
                        ),
                    };
                    let values = if y == "r" { "q, r" } else { "r, q" };
                    let body = format!(
                        "{repeat}
                         tensor<fp16, {}> y = einsum(values = ({values}), equation = \"{equation}\");",
                        full(&out)
                    );
                    let signature = format!("tensor<fp16, {}> q, tensor<fp16, {}> keys", full(&x), full(once));
                    let (after, report) = optimize(&program(&signature, &body, "y"), DEFAULT);
                    let copies = count(&after, "tile") + count(&after, "gather");
                    assert_eq!(copies, 0, "{body}\n{}", report.explain());
                }
            }
        }
    }
}

#[test]
fn gathers_of_other_kinds_are_read_too() {
    let signature = "tensor<fp16, [8, 3, 4]> query, tensor<fp16, [2, 6, 4]> keys";
    let along: Vec<u64> = (0..8 * 6 * 4).map(|i| i / (4 * 6 * 4)).collect();
    for gather in [
        "gather_nd(x = keys, indices = tensor<int32, [8, 1]>([0, 0, 0, 0, 1, 1, 1, 1]), batch_dims = 0)".to_string(),
        format!("gather_along_axis(x = keys, indices = tensor<int32, [8, 6, 4]>({along:?}), axis = 0)"),
    ] {
        let body = format!(
            "tensor<fp16, [8, 6, 4]> k = {gather};
             tensor<fp16, [8, 3, 6]> y = matmul(x = query, y = k, transpose_x = false, transpose_y = true);"
        );
        let (after, report) = optimize(&program(signature, &body, "y"), DEFAULT);
        assert_eq!(count(&after, "gather_nd") + count(&after, "gather_along_axis"), 0, "{}", report.explain());
    }
}

#[test]
fn a_repeat_of_a_repeat_is_folded_over_the_value_at_its_root() {
    let signature = "tensor<fp16, [2, 4, 2, 8]> q, tensor<fp16, [2, 1, 16, 8]> k";
    let body = "
        tensor<fp16, [2, 1, 2, 16, 8]> x = stack(values = (k, k), axis = 2);
        tensor<fp16, [2, 2, 16, 8]> a = reshape(x = x, shape = [2, 2, 16, 8]);
        tensor<fp16, [2, 1, 2, 16, 8]> b = expand_dims(x = a, axes = [1]);
        tensor<fp16, [2, 2, 2, 16, 8]> c = tile(x = b, reps = [1, 2, 1, 1, 1]);
        tensor<fp16, [2, 4, 16, 8]> d = reshape(x = c, shape = [2, 4, 16, 8]);
        tensor<fp16, [2, 4, 2, 16]> s = matmul(x = q, y = d, transpose_x = false, transpose_y = true);";
    let (after, _) = optimize(&program(signature, body, "d, s"), DEFAULT);
    let f = main(&after);
    let matmul = f.all_ops().into_iter().find(|&op| f.op(op).kind() == "matmul").unwrap();
    assert_eq!(f.op(matmul).value("y"), f.input("k"));
}

#[test]
fn one_pass_opens_what_another_finishes() {
    let chained = "
        tensor<fp16, [1, 2, 16, 4]> a = gather(x = v, indices = [0, 0], axis = 1);
        tensor<fp16, [1, 2, 16, 4]> b = mul(x = a, y = fp16(0.5));
        tensor<fp16, [1, 2, 16, 4]> c = gather(x = b, indices = [0, 1], axis = 1);
        tensor<fp16, [1, 2, 64]> d = reshape(x = c, shape = [1, 2, 64]);
        tensor<fp16, [1, 2, 16, 4]> e = reshape(x = d, shape = [1, 2, 16, 4]);
        tensor<fp16, [1, 2, 1, 4]> s = matmul(x = q, y = e, transpose_x = false, transpose_y = false);";
    let signature = "tensor<fp16, [1, 2, 1, 16]> q, tensor<fp16, [1, 1, 16, 4]> v";
    let (after, report) = optimize(&program(signature, chained, "s"), DEFAULT);
    assert_eq!(Traffic::of(main(&after)).repeats.count, 0, "{}", report.explain());

    let shaped = "
        tensor<fp16, [1, 2, 8]> t2 = slice_by_index(x = k, begin = [0, 0, 0], end = [1, 2, 8]);
        tensor<fp16, [2, 2, 8]> r = tile(x = t2, reps = [2, 1, 1]);
        tensor<int32, [3]> sh = shape(x = r);
        tensor<fp16, [2, 2, 2]> s = matmul(x = r, y = q, transpose_x = false, transpose_y = true);";
    optimize(&program("tensor<fp16, [2, 2, 8]> q, tensor<fp16, [1, 2, 8]> k", shaped, "sh, s"), DEFAULT);
}

/// Copies of `keys` [1, 16, 1, n], two heads of 8, as `turned` [1, n, 1, 32].
fn channels_first_copies(n: &str) -> String {
    let size = if n.starts_with('s') { "-1" } else { n };
    format!(
        "tensor<fp16, [1, 2, 1, 8, {n}]> wide = reshape(x = keys, shape = [1, 2, 1, 8, {size}]);
         tensor<fp16, [1, 2, 2, 8, {n}]> tiled = tile(x = wide, reps = [1, 1, 2, 1, 1]);
         tensor<fp16, [1, 32, 1, {n}]> all = reshape(x = tiled, shape = [1, 32, 1, {size}]);
         tensor<fp16, [1, {n}, 1, 32]> turned = transpose(x = all, perm = [0, 3, 2, 1]);"
    )
}

#[test]
fn pieces_of_copies_are_cut_from_what_is_repeated() {
    for (n, bounds) in [("6", "1 <= s0 <= 2"), ("s0", "1 <= s0 <= 6")] {
        let products: String = (0..4)
            .map(|i| {
                let ty = format!("tensor<fp16, [1, {n}, 1, 3]>");
                format!("{ty} p{i} = einsum(values = (k{i}, query), equation = \"bkhc,bchq->bkhq\");\n")
            })
            .collect();
        let results: Vec<String> = (0..4).map(|i| format!("tensor<fp16, [1, {n}, 1, 8]> k{i}")).collect();
        let body = format!(
            "{}\n{} = split(x = turned, axis = 3, num_splits = 4);\n{products}
             tensor<fp16, [1, {n}, 4, 3]> out = concat(values = (p0, p1, p2, p3), axis = 2, interleave = false);",
            channels_first_copies(n),
            results.join(", ")
        );
        let signature =
            format!("tensor<fp16, [1, 8, 1, 3]> query, tensor<fp16, [1, 16, 1, {n}]> keys, tensor<fp16, [s0]> l");
        let (after, report) = optimize(&bounded(&signature, bounds, &body), DEFAULT);
        let kinds = ["tile", "reshape", "split", "transpose", "slice_by_index"].map(|kind| count(&after, kind));
        assert_eq!(kinds, [0, 0, 0, 1, 2], "{n}: {}", report.explain());
        let f = main(&after);
        let keys: Vec<_> = f.all_ops().into_iter().filter(|&op| f.op(op).kind() == "einsum").collect();
        let key = |i: usize| f.op(keys[i]).param("values")[0].as_value();
        assert!(key(0) == key(1) && key(2) == key(3) && key(0) != key(2), "{n}");
    }
}

#[test]
fn pieces_that_hold_copies_or_leave_some_stay() {
    let copies = channels_first_copies("6");
    for rest in [
        // Pieces of one head and a half.
        "tensor<fp16, [1, 6, 1, 12]> a, tensor<fp16, [1, 6, 1, 20]> b = split(x = turned, axis = 3, split_sizes = [12, 20]);
         tensor<fp16, [1, 6, 1, 20]> out = relu(x = b);",
        // Halves of every head, with their copies.
        "tensor<fp16, [1, 3, 1, 32]> a, tensor<fp16, [1, 3, 1, 32]> b = split(x = turned, axis = 1, num_splits = 2);
         tensor<fp16, [1, 3, 1, 32]> out = relu(x = b);",
        // The copies are read elsewhere.
        "tensor<fp16, [1, 6, 1, 8]> a, tensor<fp16, [1, 6, 1, 8]> b, tensor<fp16, [1, 6, 1, 8]> c,
             tensor<fp16, [1, 6, 1, 8]> d = split(x = turned, axis = 3, num_splits = 4);
         tensor<fp16, [1, 6, 1, 32]> r = relu(x = turned);
         tensor<fp16, [1, 6, 1, 40]> out = concat(values = (r, d), axis = 3, interleave = false);",
    ] {
        let signature = "tensor<fp16, [1, 16, 1, 6]> keys";
        let (after, report) = optimize(&program(signature, &format!("{copies}\n{rest}"), "out"), DEFAULT);
        assert_eq!((count(&after, "tile"), count(&after, "split")), (1, 1), "{rest}\n{}", report.explain());
    }
}

#[test]
fn a_mask_of_one_row_or_one_per_query_is_repeated_by_computed_times() {
    let text = format!(
        "program(1.3) [specificationVersion = 9] {{
         func main<CoreML8>(tensor<fp16, [1, 8, s0, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys,
             tensor<fp16, [1, 2, 32, 16]> values, tensor<fp16, [1, 1, s1, 32]> mask) where 1 <= s0 <= 8, 1 <= s1 <= 8 {{
           {REPEATS}
           tensor<fp16, [1, 8, s0, 16]> a =
               scaled_dot_product_attention(query = query, key = k, value = v, attn_mask = mask);
           tensor<fp16, [1, 8, s0, 16]> out =
               scaled_dot_product_attention(query = a, key = k, value = v, attn_mask = mask);
         }} -> (out); }}"
    );
    let before = text::parse(&text).unwrap();
    let comparisons = [(1, 1), (5, 1), (5, 5)].map(|(rows, mask)| milopt::equiv::Options {
        shapes: [("query".into(), vec![1, 8, rows, 16]), ("mask".into(), vec![1, 1, mask, 32])].into(),
        ..Default::default()
    });
    let (after, report) = optimize_at(&before, DEFAULT, &comparisons);
    assert_eq!(Traffic::of(main(&after)).repeats.count, 0, "{}", report.explain());
    assert_eq!(count(&after, "tile"), 1, "both attentions read one mask");
}

#[test]
fn heads_are_picked_out_of_what_is_repeated_where_each_is_taken_once() {
    let signature = "tensor<fp16, [1, 8, 1, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                     state<tensor<fp16, [1, 2, 32, 16]>> cache";
    let repeat = |x: &str| {
        format!(
            "tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = {x}, axes = [2]);
             tensor<fp16, [1, 2, 4, 32, 16]> t = tile(x = e, reps = [1, 1, 4, 1, 1]);
             tensor<fp16, [1, 8, 32, 16]> k = reshape(x = t, shape = [1, 8, 32, 16]);"
        )
    };
    let part = |ty: &str, begin: &str, end: &str| {
        format!(
            "{ty} p = slice_by_index(x = k, begin = {begin}, end = {end}, stride = [1, 4, 1, 1]);
             {ty} y = relu(x = p);"
        )
    };
    let old = format!(
        "tensor<fp16, [1, 2, 32, 16]> old = read_state(input = cache);
         {} write_state(input = cache, data = keys);",
        repeat("old")
    );
    for (repeat, pick, copies) in [
        // One head of the second group; both heads once; part of one head.
        (repeat("keys"), part("tensor<fp16, [1, 1, 32, 16]>", "[0, 6, 0, 0]", "[1, 7, 32, 16]"), 0),
        (repeat("keys"), part("tensor<fp16, [1, 2, 32, 16]>", "[0, 1, 0, 0]", "[1, 8, 32, 16]"), 0),
        (repeat("keys"), part("tensor<fp16, [1, 1, 8, 16]>", "[0, 6, 4, 0]", "[1, 7, 12, 16]"), 1),
        // A head of a state that has been overwritten.
        (old, part("tensor<fp16, [1, 1, 32, 16]>", "[0, 6, 0, 0]", "[1, 7, 32, 16]"), 1),
    ] {
        let (after, report) = optimize(&program(signature, &format!("{repeat}\n{pick}"), "y"), DEFAULT);
        assert_eq!(count(&after, "tile"), copies, "{pick}\n{}", report.explain());
    }
}
