//! Graphs that look like repeated KV heads and are not, or not wholly: the answer stays right, and the report says why
//! nothing more was done.

mod support;

use milopt::analysis::traffic::Traffic;
use milopt::passes::Report;
use milopt::text;
use support::{DEFAULT, count, declined, main, optimize, program};

/// Inputs that every graph may use: 8 query heads, 2 KV heads, 32 keys.
const SIGNATURE: &str = "tensor<fp16, [1, 8, 1, 16]> query, tensor<fp16, [1, 2, 32, 16]> keys, \
                         tensor<fp16, [1, 2, 32, 16]> values, tensor<fp16, [1, 1, 1, 32]> mask, \
                         tensor<fp16, [1, 8, 32, 16]> full, tensor<fp16, [1, 8, 1, 32]> per_head";

/// What becomes of a graph.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fate {
    /// No op changes.
    Stays,
    /// No product reads copies any more.
    Folds {
        /// Whether what lies between the products computes in the folded shape, too.
        moved: bool,
        /// How many ops make copies for other readers.
        copies: usize,
    },
}

const MOVED: Fate = Fate::Folds { moved: true, copies: 0 };
const FOLDED: Fate = Fate::Folds { moved: false, copies: 0 };

/// A graph and what is expected of it.
struct Case {
    /// What it is.
    name: &'static str,
    /// Inputs besides those of [`SIGNATURE`], each after a comma.
    inputs: &'static str,
    body: String,
    outputs: &'static str,
    fate: Fate,
    /// An op and why nothing, or nothing more, was done there.
    refusals: &'static [(&'static str, &'static str)],
}

/// A case that returns `out`.
fn case(name: &'static str, body: impl Into<String>, fate: Fate, refusals: &'static [(&str, &str)]) -> Case {
    Case { name, inputs: "", body: body.into(), outputs: "out", fate, refusals }
}

impl Case {
    fn with(self, inputs: &'static str) -> Case {
        Case { inputs, ..self }
    }

    fn returning(self, outputs: &'static str) -> Case {
        Case { outputs, ..self }
    }

    /// Runs the pipeline, which keeps every bit, and checks what it did.
    #[track_caller]
    fn check(&self) {
        let before = program(&format!("{SIGNATURE}{}", self.inputs), &self.body, self.outputs);
        let (after, report) = optimize(&before, DEFAULT);
        let told = format!("{}\n{}{}", self.name, report.explain(), text::print_program(&after));
        match self.fate {
            Fate::Stays => {
                assert!(!report.changed(), "{told}");
                assert_eq!(text::print_program(&before), text::print_program(&after), "{told}");
            }
            Fate::Folds { moved, copies } => {
                assert_eq!(Traffic::of(main(&after)).repeats.count, 0, "{told}");
                assert_eq!((has_moved(&report), count_copies(&after)), (moved, copies), "{told}");
            }
        }
        for (op, reason) in self.refusals {
            assert!(declined(&report, op, reason), "{op}: {reason}\n{told}");
        }
        assert_eq!(self.refusals.is_empty(), report.explain().is_empty(), "{told}");
    }
}

fn count_copies(p: &milopt::ir::Program) -> usize {
    ["tile", "stack", "gather"].iter().map(|kind| count(p, kind)).sum()
}

/// Whether reshapes moved out of the way of other ops.
fn has_moved(report: &Report) -> bool {
    let mut fired = report.functions.iter().flat_map(|f| &f.passes).flat_map(|p| &p.fired);
    fired.any(|fired| fired.form.starts_with("sunk") || fired.form.starts_with("hoisted"))
}

/// `to` [1, 8, 32, 16]: `from` with each head four times in a row.
fn repeat(from: &str, to: &str) -> String {
    format!(
        "tensor<fp16, [1, 2, 1, 32, 16]> {to}_e = expand_dims(x = {from}, axes = [2]);
         tensor<fp16, [1, 2, 4, 32, 16]> {to}_t = tile(x = {to}_e, reps = [1, 1, 4, 1, 1]);
         tensor<fp16, [1, 8, 32, 16]> {to} = reshape(x = {to}_t, shape = [1, 8, 32, 16]);\n"
    )
}

fn repeats() -> String {
    repeat("keys", "k") + &repeat("values", "v")
}

/// Scores of `query` and `k`.
const SCORES: &str =
    "tensor<fp16, [1, 8, 1, 32]> scores = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
     tensor<fp16, [1, 8, 1, 32]> scaled = mul(x = scores, y = fp16(0.25));\n";
/// The end of attention, from `masked` on.
const SOFTMAX: &str = "tensor<fp16, [1, 8, 1, 32]> p = softmax(x = masked, axis = -1);
     tensor<fp16, [1, 8, 1, 16]> out = matmul(x = p, y = v, transpose_x = false, transpose_y = false);\n";
const MASK: &str = "tensor<fp16, [1, 8, 1, 32]> masked = add(x = scaled, y = mask);\n";

/// Attention with this between the scaled scores and the softmax.
fn between(ops: &str) -> String {
    format!("{}{SCORES}{ops}{SOFTMAX}", repeats())
}

/// Attention over `k` and `v`, which `ops` make.
fn over(ops: impl AsRef<str>) -> String {
    format!("{}{SCORES}{MASK}{SOFTMAX}", ops.as_ref())
}

const NO_VIEW: &str = "neither operand is a repeated view";
const APART: &str = "tells the heads of a group apart";
const UNREAD: &str = "no matmul reads the repeated value";
const MIXES: &str = "works along the head or the row axis";

#[test]
fn repeats_in_another_order_or_of_another_axis() {
    let interleaved = "tensor<fp16, [1, 8, 32, 16]> k = tile(x = keys, reps = [1, 4, 1, 1]);
                       tensor<fp16, [1, 8, 32, 16]> v = tile(x = values, reps = [1, 4, 1, 1]);";
    let in_front = |from: &str, to: &str| {
        format!(
            "tensor<fp16, [1, 1, 2, 32, 16]> {to}_e = expand_dims(x = {from}, axes = [1]);
             tensor<fp16, [1, 4, 2, 32, 16]> {to}_t = tile(x = {to}_e, reps = [1, 4, 1, 1, 1]);
             tensor<fp16, [1, 8, 32, 16]> {to} = reshape(x = {to}_t, shape = [1, 8, 32, 16]);\n"
        )
    };
    let order = |indices: &str| {
        format!(
            "tensor<fp16, [1, 8, 32, 16]> k = gather(x = keys, indices = {indices}, axis = 1, batch_dims = 0);
             tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);"
        )
    };
    let unequal = "
        tensor<fp16, [1, 1, 32, 16]> a, tensor<fp16, [1, 1, 32, 16]> b = split(x = keys, axis = 1, num_splits = 2);
        tensor<fp16, [1, 8, 32, 16]> k = concat(values = (a, a, a, a, a, b, b, b), axis = 1, interleave = false);
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let along_keys = "
        tensor<fp16, [1, 8, 128, 16]> k = tile(x = full, reps = [1, 1, 4, 1]);
        tensor<fp16, [1, 8, 1, 128]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    for case in [
        case("tile on the head axis: head h reads h mod 2", over(interleaved), MOVED, &[]),
        case("copies in front of the heads", over(in_front("keys", "k") + &in_front("values", "v")), MOVED, &[]),
        case(
            "an irregular gather",
            order("[0, 0, 0, 1, 0, 1, 1, 1]"),
            Fate::Stays,
            &[("matmul `out`", "gather `k` copies the heads in no regular order")],
        ),
        case(
            "copies in unequal numbers",
            unequal,
            Fate::Stays,
            &[("matmul `out`", "concat `k` copies the heads in no regular order")],
        ),
        case("a repeat along the keys", along_keys, Fate::Stays, &[("matmul `out`", "not on a batch axis")]),
    ] {
        case.check();
    }
}

#[test]
fn what_mixes_heads_keeps_them_in_one_axis() {
    let by_convolution = format!(
        "tensor<fp16, [8, 8, 1, 1]> w = const(val = tensor<fp16, [8, 8, 1, 1]>([{}]));
         tensor<fp16, [1, 8, 1, 32]> masked = conv(x = scaled, weight = w, strides = [1, 1], pad_type = \"valid\",
             pad = [0, 0, 0, 0], dilations = [1, 1], groups = 1);",
        numbers(64)
    );
    let by_product = format!(
        "tensor<fp16, [8, 32]> flat = reshape(x = scaled, shape = [8, 32]);
         tensor<fp16, [8, 8]> w = const(val = tensor<fp16, [8, 8]>([{}]));
         tensor<fp16, [8, 32]> mixed = matmul(x = w, y = flat, transpose_x = false, transpose_y = false);
         tensor<fp16, [1, 8, 1, 32]> masked = reshape(x = mixed, shape = [1, 8, 1, 32]);",
        numbers(64)
    );
    let mean = "tensor<fp16, [1, 1, 1, 32]> mean = reduce_mean(x = scaled, axes = [1], keep_dims = true);
                tensor<fp16, [1, 8, 1, 32]> masked = sub(x = scaled, y = mean);";
    let shuffled = "
        tensor<fp16, [1, 8, 1, 32]> masked =
            gather(x = scaled, indices = [7, 0, 1, 2, 3, 4, 5, 6], axis = 1, batch_dims = 0);";
    // Each key head meets all queries before it, and what it learns is summed up over the positions.
    let linear = repeats()
        + "tensor<fp16, [1, 8, 32, 32]> w = matmul(x = full, y = k, transpose_x = false, transpose_y = true);
           tensor<fp16, [1, 8, 32, 32]> scaled = mul(x = w, y = fp16(0.25));
           tensor<fp16, [1, 8, 32, 32]> decay = cumsum(x = scaled, axis = 2, exclusive = false, reverse = false);
           tensor<fp16, [1, 8, 32, 16]> out = matmul(x = decay, y = v, transpose_x = false, transpose_y = false);";
    for case in [
        case(
            "softmax over the heads",
            over(repeats()).replace("axis = -1", "axis = 1"),
            FOLDED,
            &[("scores", MIXES), ("scores", "softmax `p`")],
        ),
        case(
            "heads mixed by a convolution",
            between(&by_convolution),
            FOLDED,
            &[("scores", "conv `masked` (conv) is not an op that the reshape can pass")],
        ),
        case(
            "heads mixed by a product with a matrix",
            between(&by_product),
            MOVED,
            &[("scores", "reshape `flat` (reshape) is not an op that the reshape can pass")],
        ),
        case(
            "heads in another order",
            between(shuffled),
            Fate::Folds { moved: false, copies: 1 },
            &[("scores", "gather `masked` (gather) is not an op that the reshape can pass")],
        ),
        // Only the mean itself has to see the heads in one axis.
        case("the mean over the heads taken off", between(mean), MOVED, &[]),
        case(
            "linear attention",
            linear,
            FOLDED,
            &[("reshape `w`", "cumsum `decay` (cumsum) works along the head or the row axis")],
        ),
    ] {
        case.check();
    }
}

#[test]
fn what_differs_from_head_to_head() {
    let bias =
        |x: &str| format!("{}tensor<fp16, [1, 8, 32, 16]> k = {x};{}", repeat("keys", "r"), repeat("values", "v"));
    let turned = |angles: &str| {
        format!(
            "{}
             tensor<fp16, [1, 8, 32, 8]> a = slice_by_index(x = r, begin = [0, 0, 0, 0], end = [1, 8, 32, 8]);
             tensor<fp16, [1, 8, 32, 8]> b = slice_by_index(x = r, begin = [0, 0, 0, 8], end = [1, 8, 32, 16]);
             tensor<fp16, [1, 8, 32, 8]> n = mul(x = b, y = fp16(-1.0));
             tensor<fp16, [1, 8, 32, 16]> h = concat(values = (n, a), axis = 3, interleave = false);
             tensor<fp16, [1, 8, 32, 16]> sine = mul(x = h, y = {angles});
             tensor<fp16, [1, 8, 32, 16]> cosine = mul(x = r, y = {angles});
             tensor<fp16, [1, 8, 32, 16]> k = add(x = sine, y = cosine);
             {}",
            repeat("keys", "r"),
            repeat("values", "v"),
        )
    };
    let only_values = format!("tensor<fp16, [1, 8, 32, 16]> k = relu(x = full);{}", repeat("values", "v"));
    let slopes = "
        tensor<fp16, [8, 1, 1]> slopes = const(val = tensor<fp16, [8, 1, 1]>([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]));
        tensor<fp16, [8, 1, 32]> bias = mul(x = slopes, y = distance);
        tensor<fp16, [1, 8, 1, 32]> masked = add(x = scaled, y = bias);";
    let sinks = "
        tensor<fp16, [1, 8, 1, 33]> joined = concat(values = (scaled, sink), axis = 3, interleave = false);
        tensor<fp16, [1, 8, 1, 33]> w = softmax(x = joined, axis = -1);
        tensor<fp16, [1, 8, 1, 32]> p = slice_by_index(x = w, begin = [0, 0, 0, 0], end = [1, 8, 1, 32],
            end_mask = [true, true, true, false]);
        tensor<fp16, [1, 8, 1, 16]> out = matmul(x = p, y = v, transpose_x = false, transpose_y = false);";
    for case in [
        case(
            "a mask per query head",
            between("tensor<fp16, [1, 8, 1, 32]> masked = add(x = scaled, y = per_head);"),
            MOVED,
            &[],
        ),
        case("a slope per query head", between(slopes), MOVED, &[]).with(", tensor<fp16, [32]> distance"),
        case("a sink per query head", repeats() + SCORES + sinks, MOVED, &[]).with(", tensor<fp16, [1, 8, 1, 1]> sink"),
        case(
            "a bias per query head on the copies of the keys",
            bias("add(x = r, y = bias)") + SCORES + MASK + SOFTMAX,
            Fate::Folds { moved: false, copies: 1 },
            &[("scores", APART)],
        )
        .with(", tensor<fp16, [8, 1, 1]> bias"),
        case(
            "a norm's weight per query head on the copies of the keys",
            bias("mul(x = r, y = weight)") + SCORES + MASK + SOFTMAX,
            Fate::Folds { moved: false, copies: 1 },
            &[("scores", APART)],
        )
        .with(", tensor<fp16, [1, 8, 1, 16]> weight"),
        case("a rotary embedding of the copies", over(turned("angles")), MOVED, &[])
            .with(", tensor<fp16, [32, 16]> angles"),
        case(
            "a rotary embedding with angles per query head",
            over(turned("full")),
            Fate::Folds { moved: false, copies: 1 },
            &[("scores", APART)],
        ),
        case("values repeated, keys whole", over(only_values), FOLDED, &[("scores", "multi-head attention")]),
    ] {
        case.check();
    }
}

#[test]
fn keys_and_values_in_different_groups() {
    let other_group = "
        tensor<fp16, [1, 4, 1, 32, 16]> v_e = expand_dims(x = four, axes = [2]);
        tensor<fp16, [1, 4, 2, 32, 16]> v_t = tile(x = v_e, reps = [1, 1, 2, 1, 1]);
        tensor<fp16, [1, 8, 32, 16]> v = reshape(x = v_t, shape = [1, 8, 32, 16]);";
    let other_order = "tensor<fp16, [1, 8, 32, 16]> v = tile(x = values, reps = [1, 4, 1, 1]);";
    let fused = "tensor<fp16, [1, 8, 1, 16]> out = scaled_dot_product_attention(query = query, key = k, value = v);";
    let keys = repeat("keys", "k");
    const DIFFERENT: &str = "key and value are repeated in different ways";
    const ONE: &str = "only one of key and value is a repeated view";
    let four = ", tensor<fp16, [1, 4, 32, 16]> four";
    let cases = [
        case("groups of 4 and of 2", over(keys.clone() + other_group), MOVED, &[]).with(four),
        case("groups of 4 and of 2, fused", keys.clone() + other_group + fused, Fate::Stays, &[("out", DIFFERENT)])
            .with(four),
        case("grouped and interleaved, fused", keys.clone() + other_order + fused, Fate::Stays, &[("out", DIFFERENT)]),
        case(
            "keys repeated, values whole, fused",
            format!("{keys}{}", fused.replace("value = v", "value = full")),
            Fate::Stays,
            &[("out", ONE)],
        ),
        case(
            "values repeated, keys whole, fused",
            repeat("values", "v") + &fused.replace("key = k", "key = full"),
            Fate::Stays,
            &[("out", ONE)],
        ),
    ];
    cases.iter().for_each(Case::check);
}

#[test]
fn copies_that_are_needed_elsewhere() {
    let residual = over(repeats()) + "tensor<fp16, [1, 8, 32, 16]> sum = add(x = k, y = full);";
    let overwritten = format!(
        "tensor<fp16, [1, 2, 32, 16]> old = read_state(input = cache);
         {}
         write_state(input = cache, data = values);
         tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);",
        repeat("old", "k")
    );
    let cases = [
        case(
            "what they are copies of is overwritten before they are read",
            overwritten,
            Fate::Stays,
            &[("out", "after the state is written")],
        )
        .with(", state<tensor<fp16, [1, 2, 32, 16]>> cache"),
        case(
            "the copies are returned",
            over(repeats()),
            Fate::Folds { moved: true, copies: 1 },
            &[("tile `k_t`", UNREAD)],
        )
        .returning("out, k"),
        case(
            "the copies before their last reshape are returned",
            over(repeats()),
            Fate::Folds { moved: true, copies: 1 },
            &[("tile `v_t`", UNREAD)],
        )
        .returning("out, v_t"),
        case(
            "the copies are added to something",
            residual,
            Fate::Folds { moved: true, copies: 1 },
            &[("tile `k_t`", UNREAD)],
        )
        .returning("out, sum"),
    ];
    cases.iter().for_each(Case::check);
}

#[test]
fn copies_that_no_product_of_heads_reads() {
    let whole = "tensor<fp16, [1, 8, 32, 16]> k = relu(x = full); tensor<fp16, [1, 8, 32, 16]> v = square(x = full);\n";
    let masked_by = |mask: &str| format!("{whole}{SCORES}{mask}{SOFTMAX}");
    let added = "
        tensor<fp16, [1, 8, 1, 32]> wide = tile(x = mask, reps = [1, 8, 1, 1]);
        tensor<fp16, [1, 8, 1, 32]> masked = add(x = scaled, y = wide);";
    let selected = "
        tensor<bool, [1, 1, 1, 32]> open = greater(x = mask, y = fp16(-1.0));
        tensor<bool, [1, 8, 1, 32]> wide = tile(x = open, reps = [1, 8, 1, 1]);
        tensor<fp16, [1, 8, 1, 32]> masked = select(cond = wide, a = scaled, b = fp16(-10000.0));";
    let stacked = "
        tensor<fp16, [1, 2, 4, 32, 16]> t = stack(values = (keys, keys, keys, keys), axis = 2);
        tensor<fp16, [1, 8, 32, 16]> k = reshape(x = t, shape = [1, 8, 32, 16]);
        tensor<fp16, [1, 8, 32, 16]> out = mul(x = k, y = full);";
    let joined = "
        tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
        tensor<fp16, [1, 2, 4, 32, 16]> t = concat(values = (e, e, e, e), axis = 2, interleave = false);
        tensor<fp16, [1, 8, 32, 16]> k = reshape(x = t, shape = [1, 8, 32, 16]);
        tensor<fp16, [1, 8, 32, 16]> out = mul(x = k, y = full);";
    let pooled = "
        tensor<fp16, [1, 2, 1, 16]> mean = reduce_mean(x = keys, axes = [2], keep_dims = true);
        tensor<fp16, [1, 2, 32, 16]> wide = tile(x = mean, reps = [1, 1, 32, 1]);
        tensor<fp16, [1, 2, 32, 16]> out = sub(x = keys, y = wide);";
    let group_norm = "
        tensor<fp16, [1, 2, 1, 1]> mean = reduce_mean(x = keys, axes = [2, 3], keep_dims = true);
        tensor<fp16, [1, 2, 1, 1, 1]> one = expand_dims(x = mean, axes = [2]);
        tensor<fp16, [1, 2, 4, 1, 1]> wide = tile(x = one, reps = [1, 1, 4, 1, 1]);
        tensor<fp16, [1, 8, 1, 1]> means = reshape(x = wide, shape = [1, 8, 1, 1]);
        tensor<fp16, [1, 8, 32, 16]> out = sub(x = full, y = means);";
    let positions = "
        tensor<fp16, [1, 2, 32, 16]> wide = tile(x = table, reps = [1, 2, 1, 1]);
        tensor<fp16, [1, 2, 32, 16]> out = add(x = keys, y = wide);";
    let blended = "
        tensor<fp16, [1, 8, 32, 16]> wide = tile(x = fresh, reps = [1, 1, 32, 1]);
        tensor<fp16, [1, 8, 32, 16]> new = mul(x = wide, y = here);
        tensor<fp16, [32, 1]> elsewhere = sub(x = fp16(1.0), y = here);
        tensor<fp16, [1, 8, 32, 16]> old = mul(x = full, y = elsewhere);
        tensor<fp16, [1, 8, 32, 16]> k = add(x = old, y = new);
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let replaced = "
        tensor<bool, [32, 1]> now = greater(x = here, y = fp16(0.0));
        tensor<bool, [1, 1, 32, 1]> now4 = reshape(x = now, shape = [1, 1, 32, 1]);
        tensor<bool, [1, 8, 32, 16]> wide = tile(x = now4, reps = [1, 8, 1, 16]);
        tensor<fp16, [1, 8, 32, 16]> k = select(cond = wide, a = full, b = fresh);
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let scattered = "
        tensor<int32, [1, 8, 1, 16]> wide = tile(x = at, reps = [1, 8, 1, 16]);
        tensor<fp16, [1, 8, 32, 16]> k =
            scatter_along_axis(data = full, indices = wide, updates = fresh, axis = 2, mode = \"update\",
                validate_indices = false);
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let rotary = "
        tensor<fp16, [32, 8, 1]> one = expand_dims(x = angles, axes = [2]);
        tensor<fp16, [32, 8, 2]> wide = tile(x = one, reps = [1, 1, 2]);
        tensor<fp16, [32, 16]> pairs = reshape(x = wide, shape = [32, 16]);
        tensor<fp16, [32, 16]> turn = cos(x = pairs);
        tensor<fp16, [1, 2, 32, 16]> out = mul(x = keys, y = turn);";
    let rotary_whole = "
        tensor<fp16, [2, 32, 8]> wide = tile(x = angles3, reps = [2, 1, 1]);
        tensor<fp16, [2, 32, 8]> turn = sin(x = wide);
        tensor<fp16, [1, 2, 32, 8]> half = slice_by_size(x = keys, begin = [0, 0, 0, 8], size = [1, 2, 32, 8]);
        tensor<fp16, [1, 2, 32, 8]> out = mul(x = half, y = turn);";
    let frequencies = "
        tensor<fp16, [1, 8, 1]> f =
            const(val = tensor<fp16, [1, 8, 1]>([1.0, 0.5, 0.25, 0.125, 0.1, 0.05, 0.02, 0.01]));
        tensor<fp16, [1, 8, 32]> angles = matmul(x = f, y = positions, transpose_x = false, transpose_y = false);
        tensor<fp16, [1, 8, 32]> out = cos(x = angles);";
    for case in [
        case(
            "an added mask tiled over the heads",
            masked_by(added),
            Fate::Stays,
            &[("tile `wide`", UNREAD), ("scores", NO_VIEW)],
        ),
        case(
            "a selecting mask tiled over the heads",
            masked_by(selected),
            Fate::Stays,
            &[("tile `wide`", UNREAD), ("scores", NO_VIEW)],
        ),
        case("copies stacked and multiplied with", stacked, Fate::Stays, &[("stack `t`", UNREAD)]),
        case("copies joined and multiplied with", joined, Fate::Stays, &[("concat `t`", UNREAD)]),
        case("a mean spread over the positions", pooled, Fate::Stays, &[("tile `wide`", UNREAD)]),
        case("a norm of groups of channels", group_norm, Fate::Stays, &[("tile `wide`", UNREAD)]),
        case("a table of positions per head", positions, Fate::Stays, &[("tile `wide`", UNREAD)])
            .with(", tensor<fp16, [1, 1, 32, 16]> table"),
        case(
            "a new token spread over the cache and blended in",
            blended,
            Fate::Stays,
            &[("tile `wide`", UNREAD), ("out", NO_VIEW)],
        )
        .with(", tensor<fp16, [1, 8, 1, 16]> fresh, tensor<fp16, [32, 1]> here"),
        case(
            "a mask spread over the cache for a new token",
            replaced,
            Fate::Stays,
            &[("tile `wide`", UNREAD), ("out", NO_VIEW)],
        )
        .with(", tensor<fp16, [1, 8, 1, 16]> fresh, tensor<fp16, [32, 1]> here"),
        case("an index spread over the cache", scattered, Fate::Stays, &[("tile `wide`", UNREAD), ("out", NO_VIEW)])
            .with(", tensor<fp16, [1, 8, 1, 16]> fresh, tensor<int32, [1, 1, 1, 1]> at"),
        case("angles repeated in pairs", rotary, Fate::Stays, &[("tile `wide`", UNREAD)])
            .with(", tensor<fp16, [32, 8]> angles"),
        case("angles repeated per head", rotary_whole, Fate::Stays, &[("tile `wide`", UNREAD)])
            .with(", tensor<fp16, [1, 32, 8]> angles3"),
        case("frequencies times positions", frequencies, Fate::Stays, &[]).with(", tensor<fp16, [1, 1, 32]> positions"),
    ] {
        case.check();
    }
}

#[test]
fn repetitions_that_are_unknown_or_none() {
    // Both rows are alike, which nothing but the values says.
    let at_run_time = "
        tensor<int32, [2, 5]> table = const(val = [[1, 1, 4, 1, 1], [1, 1, 4, 1, 1]]);
        tensor<int32, [5]> reps = gather(x = table, indices = row, axis = 0, batch_dims = 0);
        tensor<fp16, [1, 2, 1, 32, 16]> e = expand_dims(x = keys, axes = [2]);
        tensor<fp16, [s0, s1, s2, s3, s4]> t = tile(x = e, reps = reps);
        tensor<fp16, [1, 8, 32, 16]> k = reshape(x = t, shape = [1, 8, 32, 16]);
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let many = "
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = full, transpose_x = false, transpose_y = true);";
    let once = "
        tensor<fp16, [1, 8, 32, 16]> k = tile(x = full, reps = [1, 1, 1, 1]);
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = k, transpose_x = false, transpose_y = true);";
    let named = "
        tensor<fp16, [1, 8, 32, 16]> tile_0 = const(val = tensor<fp16, [1, 8, 32, 16]>(bytes(\"?\")));
        tensor<fp16, [1, 8, 32, 16]> repeat_kv = add(x = full, y = tile_0);
        tensor<fp16, [1, 8, 1, 32]> out = matmul(x = query, y = repeat_kv, transpose_x = false, transpose_y = true);"
        .replace('?', &"003c".repeat(8 * 32 * 16));
    for case in [
        case(
            "repetitions read from a table",
            at_run_time,
            Fate::Stays,
            &[("tile `t`", "cannot be resolved"), ("out", NO_VIEW)],
        )
        .with(", int32 row"),
        case("a tile that repeats nothing", once, Fate::Stays, &[("tile `k`", "repeats nothing"), ("out", NO_VIEW)]),
        case("as many KV heads as query heads", many, Fate::Stays, &[("out", "multi-head attention")]),
        case("values that are only called like copies", named, Fate::Stays, &[("out", "multi-head attention")]),
    ] {
        case.check();
    }
}

#[test]
fn attention_of_unusual_extent() {
    let crossed = |from: &str, to: &str| repeat(from, to).replace(", 32, 16]", ", 7, 16]");
    let body = crossed("other_keys", "k")
        + &crossed("other_values", "v")
        + SCORES
        + &MASK.replace("add(x = scaled, y = mask)", "relu(x = scaled)")
        + SOFTMAX;
    let body = body.replace("[1, 8, 1, 32]", "[1, 8, 1, 7]");
    let nested = |made: &str, used: &str| {
        format!(
            "{made}
             tensor<fp16, [1, 8, 1, 32]> out = cond(pred = pred) block() {{
                 {used}
                 tensor<fp16, [1, 8, 1, 32]> a = matmul(x = query, y = k, transpose_x = false, transpose_y = true);
             }} -> (a), block() {{
                 tensor<fp16, [1, 8, 1, 32]> b = square(x = per_head);
             }} -> (b);"
        )
    };
    for case in [
        case("keys and values of another text, without a mask", body, MOVED, &[])
            .with(", tensor<fp16, [1, 2, 7, 16]> other_keys, tensor<fp16, [1, 2, 7, 16]> other_values"),
        case("copies made outside the block that reads them", nested(&repeat("keys", "k"), ""), FOLDED, &[])
            .with(", bool pred"),
        case("copies made inside a block", nested("", &repeat("keys", "k")), FOLDED, &[]).with(", bool pred"),
    ] {
        case.check();
    }
}

#[test]
fn attention_that_is_grouped_already_stays() {
    let fold = "tensor<fp16, [1, 8, 1, 16]> out = reshape(x = attended, shape = [1, 8, 1, 16]);";
    let three_axes = "
        tensor<fp16, [2, 4, 16]> q = reshape(x = query, shape = [2, 4, 16]);
        tensor<fp16, [2, 32, 16]> k = reshape(x = keys, shape = [2, 32, 16]);
        tensor<fp16, [2, 4, 32]> scores = matmul(x = q, y = k, transpose_x = false, transpose_y = true);
        tensor<fp16, [1, 2, 4, 1, 32]> wide = reshape(x = scores, shape = [1, 2, 4, 1, 32]);
        tensor<fp16, [1, 2, 4, 1, 32]> masked = add(x = wide, y = mask);
        tensor<fp16, [1, 2, 4, 1, 32]> p = softmax(x = masked, axis = -1);
        tensor<fp16, [2, 4, 32]> narrow = reshape(x = p, shape = [2, 4, 32]);
        tensor<fp16, [2, 32, 16]> v = reshape(x = values, shape = [2, 32, 16]);
        tensor<fp16, [2, 4, 16]> attended = matmul(x = narrow, y = v, transpose_x = false, transpose_y = false);";
    let batch_axes = "
        tensor<fp16, [2, 4, 1, 16]> q = reshape(x = query, shape = [2, 4, 1, 16]);
        tensor<fp16, [2, 1, 32, 16]> k = reshape(x = keys, shape = [2, 1, 32, 16]);
        tensor<fp16, [2, 4, 1, 32]> scores = matmul(x = q, y = k, transpose_x = false, transpose_y = true);
        tensor<fp16, [1, 8, 1, 32]> flat = reshape(x = scores, shape = [1, 8, 1, 32]);
        tensor<fp16, [1, 8, 1, 32]> masked = add(x = flat, y = per_head);
        tensor<fp16, [1, 8, 1, 32]> p = softmax(x = masked, axis = -1);
        tensor<fp16, [2, 4, 1, 32]> split = reshape(x = p, shape = [2, 4, 1, 32]);
        tensor<fp16, [2, 1, 32, 16]> v = reshape(x = values, shape = [2, 1, 32, 16]);
        tensor<fp16, [2, 4, 1, 16]> attended = matmul(x = split, y = v, transpose_x = false, transpose_y = false);";
    let five_axes = "
        tensor<fp16, [1, 2, 4, 1, 16]> q = reshape(x = query, shape = [1, 2, 4, 1, 16]);
        tensor<fp16, [1, 2, 1, 32, 16]> k = expand_dims(x = keys, axes = [2]);
        tensor<fp16, [1, 2, 4, 1, 32]> scores = matmul(x = q, y = k, transpose_x = false, transpose_y = true);
        tensor<fp16, [1, 2, 4, 1, 32]> masked = add(x = scores, y = mask);
        tensor<fp16, [1, 2, 4, 1, 32]> p = softmax(x = masked, axis = -1);
        tensor<fp16, [1, 2, 1, 32, 16]> v = expand_dims(x = values, axes = [2]);
        tensor<fp16, [1, 2, 4, 1, 16]> attended = matmul(x = p, y = v, transpose_x = false, transpose_y = false);";
    let rows = "
        tensor<fp16, [1, 2, 4, 16]> q = reshape(x = query, shape = [1, 2, 4, 16]);
        tensor<fp16, [1, 2, 4, 32]> scores = matmul(x = q, y = keys, transpose_x = false, transpose_y = true);
        tensor<fp16, [1, 2, 4, 32]> masked = add(x = scores, y = mask);
        tensor<fp16, [1, 2, 4, 32]> p = softmax(x = masked, axis = -1);
        tensor<fp16, [1, 2, 4, 16]> attended = matmul(x = p, y = values, transpose_x = false, transpose_y = false);";
    let one_head = "
        tensor<fp16, [1, 8, 1, 32]> scores = matmul(x = query, y = single, transpose_x = false, transpose_y = true);
        tensor<fp16, [1, 8, 1, 32]> masked = add(x = scores, y = mask);
        tensor<fp16, [1, 8, 1, 32]> p = softmax(x = masked, axis = -1);
        tensor<fp16, [1, 8, 1, 16]> out = matmul(x = p, y = single, transpose_x = false, transpose_y = false);";
    let stay = |name, body: String| case(name, body, Fate::Stays, &[("scores", NO_VIEW)]);
    for case in [
        stay("a batch of KV heads", format!("{three_axes}{fold}")),
        stay("KV heads and groups as batch axes", format!("{batch_axes}{fold}")),
        stay("KV heads and groups as axes of five", format!("{five_axes}{fold}")),
        stay("groups as rows", format!("{rows}{fold}")),
        stay("one KV head, by broadcasting", one_head.into()).with(", tensor<fp16, [1, 1, 32, 16]> single"),
        case("a KV head at a time", head_at_a_time(), Fate::Stays, &[("s0", NO_VIEW), ("s1", NO_VIEW)]),
        case("a query head at a time, by einsum", einsum_per_head(), Fate::Stays, &[("s0", NO_VIEW), ("s7", NO_VIEW)])
            .with(", tensor<fp16, [1, 32, 1, 32]> rows, tensor<fp16, [1, 32, 1, 32]> columns"),
    ] {
        case.check();
    }
}

/// Queries cut in chunks of a group, each of which meets its KV head.
fn head_at_a_time() -> String {
    let cut = |from: &str, to: &str| {
        let one = "tensor<fp16, [1, 1, 32, 16]>";
        format!("{one} {to}0, {one} {to}1 = split(x = {from}, axis = 1, num_splits = 2);")
    };
    let chunk = |i: usize| {
        format!(
            "tensor<fp16, [1, 4, 1, 16]> q{i} =
                 slice_by_size(x = query, begin = [0, {}, 0, 0], size = [1, 4, 1, 16]);
             tensor<fp16, [1, 4, 1, 32]> s{i} = matmul(x = q{i}, y = k{i}, transpose_x = false, transpose_y = true);
             tensor<fp16, [1, 4, 1, 32]> m{i} = add(x = s{i}, y = mask);
             tensor<fp16, [1, 4, 1, 32]> p{i} = softmax(x = m{i}, axis = -1);
             tensor<fp16, [1, 4, 1, 16]> o{i} = matmul(x = p{i}, y = v{i}, transpose_x = false, transpose_y = false);",
            4 * i
        )
    };
    let all: String = (0..2).map(chunk).collect();
    format!(
        "{}{}{all}
         tensor<fp16, [1, 8, 1, 16]> out = concat(values = (o0, o1), axis = 1, interleave = false);",
        cut("keys", "k"),
        cut("values", "v")
    )
}

/// Every query head [1, 16, 1, 1] by itself, with keys [1, 32, 1, 16] and values [1, 16, 1, 32] of its KV head.
fn einsum_per_head() -> String {
    let head = |i: usize| {
        let group = i / 4;
        format!(
            "tensor<fp16, [1, 1, 1, 16]> c{i} = slice_by_size(x = query, begin = [0, {i}, 0, 0], size = [1, 1, 1, 16]);
             tensor<fp16, [1, 16, 1, 1]> q{i} = reshape(x = c{i}, shape = [1, 16, 1, 1]);
             tensor<fp16, [1, 32, 1, 1]> s{i} = einsum(values = (k{group}, q{i}), equation = \"bkhc,bchq->bkhq\");
             tensor<fp16, [1, 32, 1, 1]> p{i} = softmax(x = s{i}, axis = 1);
             tensor<fp16, [1, 16, 1, 1]> o{i} = einsum(values = (v{group}, p{i}), equation = \"bchk,bkhq->bchq\");"
        )
    };
    let (key, value) = ("tensor<fp16, [1, 32, 1, 16]>", "tensor<fp16, [1, 16, 1, 32]>");
    let all: String = (0..8).map(head).collect();
    format!(
        "{key} k0, {key} k1 = split(x = rows, axis = 3, num_splits = 2);
         {value} v0, {value} v1 = split(x = columns, axis = 1, num_splits = 2);
         {all}
         tensor<fp16, [1, 128, 1, 1]> out =
             concat(values = (o0, o1, o2, o3, o4, o5, o6, o7), axis = 1, interleave = false);"
    )
}

/// Numbers for a constant.
fn numbers(count: usize) -> String {
    (0..count).map(|i| format!("{}.5", i % 7)).collect::<Vec<_>>().join(", ")
}
