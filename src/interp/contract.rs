//! The contract on the order of sums, for every op that adds: further rows, other axes, broadcasting, sides, views and
//! threads leave the bits of a result alone.

use rayon::ThreadPoolBuilder;

use super::tensor::{Tensor, Values, same_bits};
use super::testing::{Net, Op, i32s, noise, values};
use super::{Interpreter, Mode};
use crate::ir::{DType, Literal, Operand};

fn f16(t: Tensor) -> Tensor {
    let scaled = Op::new("mul").with("x", t).with("y", 1e-3).one();
    scaled.cast(DType::F16).unwrap()
}

fn permuted(x: &Tensor, perm: &[i64]) -> Tensor {
    Op::new("transpose").with("x", x.clone()).with("perm", i32s(&[perm.len()], perm)).one()
}

/// Positions `from..to` of an axis.
fn cut(x: &Tensor, axis: usize, from: usize, to: usize) -> Tensor {
    let (mut begin, mut size) = (vec![0; x.rank()], vec![-1; x.rank()]);
    (begin[axis], size[axis]) = (from as i64, (to - from) as i64);
    let index = |v: &[i64]| i32s(&[v.len()], v);
    Op::new("slice_by_size").with("x", x.clone()).with("begin", index(&begin)).with("size", index(&size)).one()
}

fn same(what: &str, a: &Tensor, b: &Tensor) {
    assert!(same_bits(a, b), "{what}: {a} is not {b}");
}

/// Lengths around the sixteen partial sums, and one beyond all blocks.
const LENGTHS: [usize; 6] = [1, 15, 16, 33, 200, 4100];

const REDUCTIONS: [&str; 10] = [
    "reduce_sum",
    "reduce_mean",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_l1_norm",
    "reduce_l2_norm",
    "reduce_sum_square",
    "reduce_log_sum",
    "reduce_log_sum_exp",
];

/// The ops that work on one axis, each as a function of x and the axis.
fn along_axis() -> Vec<(String, Box<dyn Fn(&Tensor, i64) -> Tensor>)> {
    let mut ops: Vec<(String, Box<dyn Fn(&Tensor, i64) -> Tensor>)> = Vec::new();
    for kind in REDUCTIONS {
        let op = move |x: &Tensor, axis: i64| {
            Op::new(kind).with("x", x.clone()).with("axes", [axis]).with("keep_dims", true).one()
        };
        ops.push((kind.into(), Box::new(op)));
    }
    let softmax = |x: &Tensor, axis: i64| Op::new("softmax").with("x", x.clone()).with("axis", axis).one();
    ops.push(("softmax".into(), Box::new(softmax)));
    let layer_norm = |x: &Tensor, axis: i64| Op::new("layer_norm").with("x", x.clone()).with("axes", [axis]).one();
    ops.push(("layer_norm".into(), Box::new(layer_norm)));
    for (exclusive, reverse) in [(false, false), (true, false), (false, true)] {
        let cumsum = move |x: &Tensor, axis: i64| {
            let op = Op::new("cumsum").with("x", x.clone()).with("axis", axis);
            op.with("exclusive", exclusive).with("reverse", reverse).one()
        };
        ops.push((format!("cumsum {exclusive} {reverse}"), Box::new(cumsum)));
    }
    ops
}

#[test]
fn rows_and_axes_leave_reductions_alone() {
    for n in LENGTHS {
        let wide = noise(&[5, n], n as u64);
        for x in [wide.clone(), f16(wide)] {
            for (name, op) in along_axis() {
                let rows = op(&x, 1);
                same(&name, &rows, &permuted(&op(&permuted(&x, &[1, 0]), 0), &[1, 0]));
                let middle = permuted(&x.reshaped(&[1, 5, n, 1]).unwrap(), &[0, 2, 3, 1]);
                let middle = permuted(&op(&middle, 1), &[0, 3, 1, 2]);
                same(&name, &rows, &middle.reshaped(rows.shape()).unwrap());
                for i in 0..5 {
                    same(&name, &cut(&rows, 0, i, i + 1), &op(&cut(&x, 0, i, i + 1), 1));
                }
            }
        }
    }
}

#[test]
fn reductions_are_sums_in_the_order_of_a_product() {
    for n in LENGTHS {
        let x = noise(&[3, n], 7 * n as u64);
        let reduce = |kind| Op::new(kind).with("x", x.clone()).with("axes", [1]).with("keep_dims", true).one();
        let ones = Op::new("fill").with("shape", [n as i64, 1]).with("value", 1.0).one();
        let sums = Op::new("matmul").with("x", x.clone()).with("y", ones).one();
        same("sum", &sums, &reduce("reduce_sum"));
        let square = Op::new("square").with("x", x.clone()).one();
        let squares = Op::new("reduce_sum").with("x", square).with("axes", [1]).with("keep_dims", true).one();
        same("sum of squares", &squares, &reduce("reduce_sum_square"));
        same("l2 norm", &Op::new("sqrt").with("x", squares).one(), &reduce("reduce_l2_norm"));
        let abs = Op::new("abs").with("x", x.clone()).one();
        let l1 = Op::new("reduce_sum").with("x", abs).with("axes", [1]).with("keep_dims", true).one();
        same("l1 norm", &l1, &reduce("reduce_l1_norm"));
        same("mean", &Op::new("real_div").with("x", sums).with("y", n as f64).one(), &reduce("reduce_mean"));
    }
}

fn matmul(x: &Tensor, y: &Tensor, transpose_x: bool, transpose_y: bool) -> Tensor {
    let op = Op::new("matmul").with("x", x.clone()).with("y", y.clone());
    op.with("transpose_x", transpose_x).with("transpose_y", transpose_y).one()
}

fn swapped(x: &Tensor) -> Tensor {
    let rank = x.rank() as i64;
    let perm: Vec<i64> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
    permuted(x, &perm)
}

#[test]
fn rows_columns_sides_and_transposition_leave_products_alone() {
    for (k, m, n) in [(1, 3, 20), (15, 2, 5), (16, 40, 17), (77, 33, 130), (300, 1, 140), (4100, 5, 3)] {
        let (x, y) = (noise(&[2, m, k], 1), noise(&[2, k, n], 2));
        for (x, y) in [(x.clone(), y.clone()), (f16(x), f16(y))] {
            let plain = matmul(&x, &y, false, false);
            same("x transposed", &plain, &matmul(&swapped(&x), &y, true, false));
            same("y transposed", &plain, &matmul(&x, &swapped(&y), false, true));
            same("sides swapped", &plain, &swapped(&matmul(&y, &x, true, true)));
            same("sides swapped", &plain, &swapped(&matmul(&swapped(&y), &swapped(&x), false, false)));
            for i in [0, m - 1] {
                same("a row", &cut(&plain, 1, i, i + 1), &matmul(&cut(&x, 1, i, i + 1), &y, false, false));
            }
            for j in [0, n - 1] {
                same("a column", &cut(&plain, 2, j, j + 1), &matmul(&x, &cut(&y, 2, j, j + 1), false, false));
            }
            let tiled = Op::new("tile").with("x", cut(&y, 0, 0, 1)).with("reps", [2, 1, 1]).one();
            let broadcast = cut(&y, 0, 0, 1).reshaped(&[k, n]).unwrap();
            same("broadcast", &matmul(&x, &tiled, false, false), &matmul(&x, &broadcast, false, false));
            let first = cut(&x, 0, 0, 1).reshaped(&[m, k]).unwrap();
            let linear = Op::new("linear").with("x", first).with("weight", swapped(&broadcast)).one();
            same("linear", &cut(&plain, 0, 0, 1).reshaped(&[m, n]).unwrap(), &linear);
        }
    }
}

#[test]
fn einsum_is_a_product_of_each_head() {
    let (x, y) = (noise(&[1, 3, 2, 77], 3), noise(&[1, 77, 2, 20], 4));
    let op = Op::new("einsum").with("values", vec![x.clone(), y.clone()]).with("equation", "bchw,bwhu->bchu");
    let product = matmul(&permuted(&x, &[0, 2, 1, 3]), &permuted(&y, &[0, 2, 1, 3]), false, false);
    same("einsum", &op.one(), &permuted(&product, &[0, 2, 1, 3]));
}

#[test]
fn attention_is_a_chain_of_products_and_a_softmax() {
    let (q, k, v) = (noise(&[2, 3, 64], 5), noise(&[2, 300, 64], 6), noise(&[2, 300, 40], 7));
    let (q, mask) = (Op::new("mul").with("x", q).with("y", 1e-5).one(), noise(&[3, 300], 8));
    let attend = |q: &Tensor, mask: &Tensor| {
        let op = Op::new("scaled_dot_product_attention").with("query", q.clone()).with("key", k.clone());
        op.with("value", v.clone()).with("attn_mask", mask.clone()).one()
    };
    let scores = Op::new("real_div").with("x", matmul(&q, &k, false, true)).with("y", 8.0).one();
    let masked = Op::new("add").with("x", scores).with("y", mask.clone()).one();
    let weights = Op::new("softmax").with("x", masked).one();
    let all = attend(&q, &mask);
    same("attention", &all, &matmul(&weights, &v, false, false));
    same("a row", &cut(&all, 1, 2, 3), &attend(&cut(&q, 1, 2, 3), &cut(&mask, 0, 2, 3)));
}

#[test]
fn convolutions_of_every_rank_are_products_of_patches() {
    for spatial in [&[33][..], &[5, 7], &[3, 4, 5]] {
        let taps: usize = spatial.iter().product();
        let (x, w) = (noise(&[&[3, 6], spatial].concat(), 1), noise(&[&[4, 3], spatial].concat(), 2));
        let conv = |x: &Tensor| Op::new("conv").with("x", x.clone()).with("weight", w.clone()).with("groups", 2).one();
        let out = conv(&x);
        for g in 0..2 {
            let rows = cut(&x, 1, 3 * g, 3 * g + 3).reshaped(&[3, 3 * taps]).unwrap();
            let kernels = cut(&w, 0, 2 * g, 2 * g + 2).reshaped(&[2, 3 * taps]).unwrap();
            let part = cut(&out, 1, 2 * g, 2 * g + 2).reshaped(&[3, 2]).unwrap();
            same("conv", &part, &matmul(&rows, &kernels, false, true));
        }
        same("an entry of the batch", &cut(&out, 0, 1, 2), &conv(&cut(&x, 0, 1, 2)));
        // With one output position the transpose of a convolution spreads every kernel once.
        let axes = i32s(&[spatial.len()], &(2..2 + spatial.len() as i64).collect::<Vec<_>>());
        let turned = Op::new("reverse").with("x", w.clone()).with("axes", axes).one();
        let perm: Vec<i64> = [1, 0].into_iter().chain(2..2 + spatial.len() as i64).collect();
        let pads: Vec<i64> = spatial.iter().flat_map(|&s| [s as i64 - 1; 2]).collect();
        let point = noise(&[&[2, 4], &vec![1; spatial.len()][..]].concat(), 3);
        let spread = Op::new("conv_transpose").with("x", point.clone()).with("weight", w.clone()).one();
        let padded = Op::new("conv").with("x", point).with("weight", permuted(&turned, &perm));
        let padded = padded.with("pad_type", "custom").with("pad", i32s(&[pads.len()], &pads));
        same("conv_transpose", &spread, &padded.one());
    }
}

#[test]
fn norms_over_several_axes_sum_like_one() {
    let x = noise(&[3, 4, 5, 7], 9);
    let flat = x.reshaped(&[12, 35]).unwrap();
    let layer = |x: &Tensor, axes: Tensor| Op::new("layer_norm").with("x", x.clone()).with("axes", axes).one();
    let rows = layer(&flat, i32s(&[1], &[1])).reshaped(x.shape()).unwrap();
    same("layer_norm", &rows, &layer(&x, i32s(&[2], &[2, 3])));
    same("instance_norm", &rows, &Op::new("instance_norm").with("x", x.clone()).one());
    let l2 = |x: &Tensor| Op::new("l2_norm").with("x", x.clone()).one();
    same("l2_norm", &cut(&l2(&x), 0, 1, 2), &l2(&cut(&x, 0, 1, 2)));
    let statistics = |seed| Op::new("abs").with("x", noise(&[4], seed)).one();
    let batch = |x: &Tensor| {
        let op = Op::new("batch_norm").with("x", x.clone()).with("mean", noise(&[4], 1));
        op.with("variance", statistics(2)).with("gamma", noise(&[4], 3)).with("beta", noise(&[4], 4)).one()
    };
    same("batch_norm", &cut(&batch(&x), 0, 2, 3), &batch(&cut(&x, 0, 2, 3)));
}

/// Every op that is spread over threads, on operands that are large enough for it.
fn parallel() -> Vec<(&'static str, Op)> {
    let x = || f16(noise(&[4, 40, 300], 1));
    let unary = |kind| (kind, Op::new(kind).with("x", x()));
    let product = |transposed, n: usize| {
        let y = if transposed { noise(&[n, 300], 2) } else { noise(&[300, n], 2) };
        ("matmul", Op::new("matmul").with("x", x()).with("y", f16(y)).with("transpose_y", transposed))
    };
    let (q, k) = (noise(&[2, 40, 64], 3), noise(&[2, 600, 64], 4));
    let attention = Op::new("scaled_dot_product_attention").with("query", q).with("key", k.clone()).with("value", k);
    let values = vec![f16(noise(&[1, 30, 4, 100], 5)), f16(noise(&[1, 100, 4, 70], 6))];
    let mut ops = vec![
        product(false, 1),
        product(false, 140),
        product(true, 1),
        product(true, 140),
        ("linear", Op::new("linear").with("x", x()).with("weight", f16(noise(&[50, 300], 7)))),
        ("attention", attention),
        ("einsum", Op::new("einsum").with("values", values).with("equation", "bchw,bwhu->bchu")),
        ("conv", Op::new("conv").with("x", x()).with("weight", f16(noise(&[30, 20, 5], 8))).with("groups", 2)),
        ("conv_transpose", Op::new("conv_transpose").with("x", x()).with("weight", f16(noise(&[40, 3, 5], 9)))),
        ("add", Op::new("add").with("x", x()).with("y", f16(noise(&[40, 1], 10)))),
        ("greater", Op::new("greater").with("x", x()).with("y", f16(noise(&[300], 11)))),
        ("tile", Op::new("tile").with("x", x()).with("reps", [1, 2, 1])),
        ("cast", Op::new("cast").with("x", x()).with("dtype", "fp32")),
        ("l2_norm", Op::new("l2_norm").with("x", x())),
        ("instance_norm", Op::new("instance_norm").with("x", x())),
    ];
    ops.extend(["exp", "gelu", "square", "rsqrt"].map(unary));
    for axis in [0, 1, 2] {
        let with = |kind, name: &str| (kind, Op::new(kind).with("x", x()).with(name, axis));
        ops.extend([with("softmax", "axis"), with("cumsum", "axis")]);
        ops.extend(
            REDUCTIONS
                .into_iter()
                .chain(["layer_norm"])
                .map(|kind| (kind, Op::new(kind).with("x", x()).with("axes", [axis]))),
        );
    }
    ops
}

#[test]
fn threads_leave_the_bits_alone() {
    let pools = [1, 2, 5].map(|n| ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    for (name, op) in parallel() {
        let [one, two, five] = [0, 1, 2].map(|i| pools[i].install(|| op.clone().one()));
        same(name, &one, &two);
        same(name, &one, &five);
        let [one, two, five] = [0, 1, 2].map(|i| pools[i].install(|| op.clone().exact().one()));
        same(name, &one, &two);
        same(name, &one, &five);
    }
}

/// Numbers below `n` that look random.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// A random op that moves elements, on an operand of this shape.
fn mover(dice: &mut Dice, shape: &[usize]) -> (&'static str, Vec<(&'static str, Literal)>) {
    let rank = shape.len();
    let ints = |v: Vec<usize>| Literal::ints(&v.into_iter().map(|n| n as i64).collect::<Vec<_>>());
    match dice.roll(6) {
        0 => {
            let mut perm: Vec<usize> = (0..rank).collect();
            (1..rank).for_each(|i| perm.swap(i, dice.roll(i + 1)));
            ("transpose", vec![("perm", ints(perm))])
        }
        1 => {
            let begin: Vec<usize> = shape.iter().map(|&n| dice.roll(n)).collect();
            let stride = begin.iter().map(|_| dice.roll(2) + 1).collect();
            ("slice_by_index", vec![("begin", ints(begin)), ("end", ints(shape.to_vec())), ("stride", ints(stride))])
        }
        2 => ("reverse", vec![("axes", ints((0..rank).filter(|_| dice.roll(2) == 0).collect()))]),
        3 if rank < 5 => ("expand_dims", vec![("axes", ints(vec![dice.roll(rank + 1)]))]),
        4 if rank > 1 => {
            let at = dice.roll(rank - 1);
            let mut merged = shape.to_vec();
            merged[at] *= merged.remove(at + 1);
            ("reshape", vec![("shape", ints(merged))])
        }
        _ => {
            let at = dice.roll(rank);
            let parts = (1..=shape[at]).find(|p| shape[at] % p == 0 && *p > 1).unwrap_or(1);
            let mut split = shape.to_vec();
            split[at] /= parts;
            split.insert(at, parts);
            ("reshape", vec![("shape", ints(split))])
        }
    }
}

/// Views of views against copies of copies, read by an op that adds and by one that takes strided operands.
#[test]
fn views_hold_the_elements_that_copies_would() {
    for seed in 0..200 {
        let mut dice = Dice(seed);
        let x = f16(noise(&[3, 4, 6], seed + 1));
        let (mut net, mut copy) = (Net::new(), x.clone());
        let mut view = net.input("x", DType::F16, &[3, 4, 6]);
        for _ in 0..4 {
            let (kind, params) = mover(&mut dice, copy.shape());
            let end = net.end();
            let params: Vec<(&str, [Operand; 1])> =
                params.into_iter().map(|(name, literal)| (name, [net.literal(literal)])).collect();
            let mut operands: Vec<(&str, &[Operand])> = params.iter().map(|(name, o)| (*name, &o[..])).collect();
            let of_view = [Operand::Value(view)];
            operands.push(("x", &of_view));
            view = net.op(end, kind, &operands, &["v"])[0];
            let mut alone = Net::new();
            let input = alone.input("x", DType::F16, &copy.shape().iter().map(|&n| n as u64).collect::<Vec<_>>());
            let end = alone.end();
            let params: Vec<(&str, [Operand; 1])> = params
                .iter()
                .map(|(name, o)| match o {
                    [Operand::Literal(l)] => (*name, [alone.literal(net.f.literal(*l).clone())]),
                    _ => unreachable!("parameters are literals"),
                })
                .collect();
            let mut operands: Vec<(&str, &[Operand])> = params.iter().map(|(name, o)| (*name, &o[..])).collect();
            let of_input = [Operand::Value(input)];
            operands.push(("x", &of_input));
            let out = alone.op(end, kind, &operands, &["v"])[0];
            copy = run(alone, [out], &copy).remove(0);
        }
        let (end, operand) = (net.end(), [Operand::Value(view)]);
        let sum = net.op(end, "reduce_sum", &[("x", &operand)], &["sum"])[0];
        let mut want = vec![copy.clone(), Op::new("reduce_sum").with("x", copy.clone()).one()];
        let mut outputs = vec![view, sum];
        if copy.rank() > 1 {
            let yes = [net.literal(Literal::bool(true))];
            let params: [(&str, &[Operand]); 3] = [("x", &operand), ("y", &operand), ("transpose_y", &yes)];
            outputs.push(net.op(end, "matmul", &params, &["product"])[0]);
            want.push(matmul(&copy, &copy, false, true));
        }
        let found = run(net, outputs, &x);
        found.iter().zip(&want).for_each(|(a, b)| same(&format!("seed {seed}"), a, b));
    }
}

/// Runs a net on `x`.
fn run(mut net: Net, outputs: impl IntoIterator<Item = crate::ir::ValueId>, x: &Tensor) -> Vec<Tensor> {
    let body = net.f.body();
    let outputs: Vec<_> = outputs.into_iter().collect();
    outputs.iter().for_each(|&v| net.f.add_output(body, v));
    let interpreter = Interpreter::new(&net.f, Mode::Storage).unwrap();
    let out = interpreter.run(&values([("x", x.clone())]), &mut Values::new()).unwrap();
    outputs.iter().map(|&v| out[net.f.value(v).name()].clone()).collect()
}
