//! `kv-defer`: attention over the old content and the new entries.

mod support;

use milopt::ir::Program;
use support::{count, declined, program, reassociate};

const PASSES: &str = "gqa-fold,view-simplify,kv-defer,kv-forward,kv-merge,dce";

fn state_ops(p: &Program) -> [usize; 3] {
    ["slice_update", "write_state", "read_state"].map(|kind| count(p, kind))
}

/// A model of `layers` layers over two stacked caches [layers, 1, 2, 16, 8]: writes `q` rows at `p`, then attends.
struct Model {
    layers: u64,
    q: u64,
    /// The heads of the query, and how K and V are repeated for them.
    heads: u64,
    /// Ops from the scores `s` [1, heads, q, 16] to the weights `w`; `mask` is an input of this shape.
    middle: &'static str,
    mask: String,
}

const SOFTMAX: &str =
    "T scaled = mul(x = s, y = fp16(0.25)); T m0 = add(x = scaled, y = mask); T w = softmax(x = m0, axis = -1);";

impl Model {
    fn new(q: u64) -> Model {
        Model { layers: 3, q, heads: 2, middle: SOFTMAX, mask: format!("tensor<fp16, [1, 1, {q}, 16]>") }
    }

    fn program(&self) -> Program {
        let Model { layers, q, heads, .. } = self;
        let cache = format!("state<tensor<fp16, [{layers}, 1, 2, 16, 8]>>");
        let signature = format!(
            "tensor<fp16, [1, {heads}, {q}, 8]> x, tensor<int32, [1]> p, {} mask, {cache} k_cache, {cache} v_cache",
            self.mask
        );
        let mut body = format!("tensor<int32, [1]> e = add(x = p, y = [{q}]);\n");
        let mut x = "x".to_string();
        for layer in 0..*layers {
            body += &self.layer(layer, &x);
            x = format!("o{layer}");
        }
        program(&signature, &body, &x)
    }

    fn layer(&self, l: u64, x: &str) -> String {
        let Model { layers, q, heads, .. } = self;
        let entry = |name: &str, c: &str| {
            format!(
                "tensor<fp16, [1, 2, {q}, 8]> {name}{l}_half = slice_by_size(x = {x}, begin = [0, 0, 0, 0], size = [1, 2, {q}, 8]);
                 tensor<fp16, [1, 2, {q}, 8]> {name}{l} = mul(x = {name}{l}_half, y = fp16({c}));\n"
            )
        };
        let cache = |name: &str| {
            let t = format!("tensor<fp16, [{layers}, 1, 2, 16, 8]>");
            format!(
                "{t} {name}r{l} = read_state(input = {name}_cache);
                 tensor<int32, [5]> {name}b{l} = concat(values = ([{l}], [0], [0], p, [0]), axis = 0, interleave = false);
                 tensor<int32, [5]> {name}e{l} = concat(values = ([0], [0], [0], e, [0]), axis = 0, interleave = false);
                 {t} {name}u{l} = slice_update(x = {name}r{l}, update = {name}{l}, begin = {name}b{l}, end = {name}e{l},
                     end_mask = [false, true, true, false, true], squeeze_mask = [true, false, false, false, false]);
                 write_state(input = {name}_cache, data = {name}u{l});
                 {t} {name}n{l} = read_state(input = {name}_cache);
                 tensor<fp16, [1, 2, 16, 8]> {name}c{l} = slice_by_index(x = {name}n{l}, begin = [{l}, 0, 0, 0, 0],
                     end = [0, 1, 2, 16, 8], end_mask = [false, true, true, true, true],
                     squeeze_mask = [true, false, false, false, false]);\n"
            )
        };
        let repeat = |name: &str| match heads / 2 {
            1 => format!("tensor<fp16, [1, 2, 16, 8]> {name}h{l} = identity(x = {name}c{l});\n"),
            g => format!(
                "tensor<fp16, [1, 2, 1, 16, 8]> {name}x{l} = expand_dims(x = {name}c{l}, axes = [2]);
                 tensor<fp16, [1, 2, {g}, 16, 8]> {name}t{l} = tile(x = {name}x{l}, reps = [1, 1, {g}, 1, 1]);
                 tensor<fp16, [1, {heads}, 16, 8]> {name}h{l} = reshape(x = {name}t{l}, shape = [1, {heads}, 16, 8]);\n"
            ),
        };
        let t = format!("tensor<fp16, [1, {heads}, {q}, 16]>");
        let middle =
            self.middle.replace("T ", &format!("{t} ")).replace("C ", &format!("tensor<fp16, [1, {heads}, {q}, 1]> "));
        let middle = middle.replace("W ", &format!("tensor<fp16, [1, {heads}, {q}, 17]> "));
        let names = ["s", "scaled", "m0", "w", "m1", "m2", "m3", "m4", "m5", "open"];
        let middle = names.iter().fold(middle, |text, name| {
            let ends = [" ", ",", ")"];
            let numbered = |text: String, start: &str, end: &&str| {
                text.replace(&format!("{start}{name}{end}"), &format!("{start}{name}{l}{end}"))
            };
            ends.iter().fold(text, |text, end| numbered(numbered(text, " ", end), "(", end))
        });
        format!(
            "{}{}{}{}{}{}
             {t} s{l} = matmul(x = {x}, y = kh{l}, transpose_x = false, transpose_y = true);
             {middle}
             tensor<fp16, [1, {heads}, {q}, 8]> o{l} = matmul(x = w{l}, y = vh{l}, transpose_x = false, transpose_y = false);\n",
            entry("k", "0.5"),
            entry("v", "2.0"),
            cache("k"),
            cache("v"),
            repeat("k"),
            repeat("v"),
        )
    }
}

#[test]
fn writes_of_all_layers_become_one_for_each_state() {
    for q in [1, 3] {
        for heads in [2, 4] {
            let model = Model { heads, ..Model::new(q) };
            let (after, report) = reassociate(&model.program(), PASSES);
            assert_eq!(state_ops(&after), [2, 2, 4], "{q} {heads}\n{}", report.explain());
            assert_eq!(count(&after, "concat"), 4 + 3 + 2);
        }
    }
}

#[test]
fn whatever_stands_between_the_products() {
    for (name, middle) in [
        (
            "softcap",
            "T m1 = mul(x = s, y = fp16(0.1)); T m2 = tanh(x = m1); T m3 = mul(x = m2, y = fp16(10.0)); T m0 = add(x = m3, y = mask); T w = softmax(x = m0, axis = -1);",
        ),
        (
            "softcap behind the mask",
            "T m1 = add(x = s, y = mask); T m2 = tanh(x = m1); T m3 = mul(x = m2, y = fp16(10.0)); T w = softmax(x = m3, axis = -1);",
        ),
        ("no mask", "T w = softmax(x = s, axis = -1);"),
        (
            "scale behind the mask",
            "T m1 = add(x = s, y = mask); T m2 = mul(x = m1, y = fp16(2.0)); T w = softmax(x = m2, axis = -1);",
        ),
        (
            "manual softmax",
            "T m0 = add(x = s, y = mask); C m1 = reduce_max(x = m0, axes = [-1], keep_dims = true); T m2 = sub(x = m0, y = m1); T m3 = exp(x = m2); C m4 = reduce_sum(x = m3, axes = [-1], keep_dims = true); T w = real_div(x = m3, y = m4);",
        ),
        (
            "select",
            "B open = greater(x = mask, y = fp16(-5.0)); T m0 = select(cond = open, a = s, b = fp16(-10000.0)); T w = softmax(x = m0, axis = -1);",
        ),
        (
            "sinks",
            "T m0 = add(x = s, y = mask); W m1 = concat(values = (m0, sink), axis = 3, interleave = false); W m2 = softmax(x = m1, axis = -1); T w = slice_by_index(x = m2, begin = [0, 0, 0, 0], end = [0, 0, 0, 16], end_mask = [true, true, true, false]);",
        ),
    ] {
        for q in [1u64, 3] {
            let sink = format!("tensor<fp16, [1, 2, {q}, 1]>");
            let numbers = (0..2 * q).map(|i| format!("{i}.0")).collect::<Vec<_>>().join(", ");
            let middle = middle
                .replace("B ", &format!("tensor<bool, [1, 1, {q}, 16]> "))
                .replace("sink)", &format!("{sink}([{numbers}]))"));
            let model = Model { middle: Box::leak(middle.into_boxed_str()), ..Model::new(q) };
            let (after, report) = reassociate(&model.program(), PASSES);
            assert_eq!(state_ops(&after), [2, 2, 4], "{name} {q}\n{}", report.explain());
        }
    }
}

#[test]
fn scores_that_are_normalised_both_ways_are_left_alone() {
    for (name, middle) in [
        (
            "softmax of both signs",
            "T m1 = softmax(x = s, axis = -1); T m2 = mul(x = s, y = fp16(-1.0)); T m3 = softmax(x = m2, axis = -1); T w = mul(x = m1, y = m3);",
        ),
        (
            "a sum of the others",
            "T m1 = exp(x = s); T m2 = mul(x = s, y = fp16(-1.0)); T m3 = exp(x = m2); C m4 = reduce_sum(x = m3, axes = [-1], keep_dims = true); T w = real_div(x = m1, y = m4);",
        ),
    ] {
        let (after, report) = reassociate(&Model { middle, ..Model::new(1) }.program(), PASSES);
        assert_eq!(state_ops(&after), [6, 6, 12], "{name}");
        assert!(declined(&report, "", "normalised as they are, too"), "{name}\n{}", report.explain());
    }
}

#[test]
fn scores_that_become_integers_are_left_alone_where_nothing_can_be_added() {
    let middle = "I m1 = cast(x = s, dtype = \"int32\"); T m2 = cast(x = m1, dtype = \"fp16\"); T w = softmax(x = m2, axis = -1);";
    let middle = middle.replace("I ", "tensor<int32, [1, 2, 1, 16]> ");
    let model = Model { middle: Box::leak(middle.into_boxed_str()), ..Model::new(1) };
    let (after, _) = reassociate(&model.program(), PASSES);
    assert_eq!(state_ops(&after), [2, 2, 4], "the term is added behind the integers");
}
