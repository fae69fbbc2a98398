//! Laws, on random programs.

mod support;

use std::collections::BTreeMap;

use milopt::analysis::layout::{Layout, Layouts};
use milopt::interp::{Interpreter, Mode, Tensor};
use milopt::ir::{DType, Function, ValueId};
use proptest::prelude::*;
use support::{DEFAULT, count, main, optimize, program};

fn ty(dtype: &str, shape: &[u64]) -> String {
    format!("tensor<{dtype}, {shape:?}>")
}

/// One view op, chosen by numbers that fit any shape.
#[derive(Clone, Debug)]
enum View {
    Transpose(usize),
    Split { axis: usize, by: usize },
    Join { axis: usize },
    Tile { axis: usize, reps: u64 },
    Slice { axis: usize, begin: u64, step: u64 },
    Reverse { axis: usize },
    ExpandDims { axis: usize },
    Gather { axis: usize, indices: Vec<u64> },
    Stack { axis: usize, parts: usize },
    Pieces { axis: usize, order: Vec<u64> },
}

fn view() -> impl Strategy<Value = View> {
    let axis = 0usize..5;
    prop_oneof![
        (0usize..120).prop_map(View::Transpose),
        (axis.clone(), 0usize..4).prop_map(|(axis, by)| View::Split { axis, by }),
        axis.clone().prop_map(|axis| View::Join { axis }),
        (axis.clone(), 2u64..4).prop_map(|(axis, reps)| View::Tile { axis, reps }),
        (axis.clone(), 0u64..4, 1u64..3).prop_map(|(axis, begin, step)| View::Slice { axis, begin, step }),
        axis.clone().prop_map(|axis| View::Reverse { axis }),
        axis.clone().prop_map(|axis| View::ExpandDims { axis }),
        (axis.clone(), prop::collection::vec(0u64..8, 1..7)).prop_map(|(axis, indices)| View::Gather { axis, indices }),
        (axis.clone(), 2usize..4).prop_map(|(axis, parts)| View::Stack { axis, parts }),
        (axis, prop::collection::vec(0u64..3, 2..6)).prop_map(|(axis, order)| View::Pieces { axis, order }),
    ]
}

/// The text of a view of `x` with this shape, named `name`, and its shape; `None` where it does not fit.
fn spell(view: &View, x: &str, name: &str, shape: &[u64]) -> Option<(String, Vec<u64>)> {
    let rank = shape.len();
    let volume: u64 = shape.iter().product();
    let mut to = shape.to_vec();
    let op = |to: &[u64], call: String| Some((format!("    {} {name} = {call};\n", ty("fp32", to)), to.to_vec()));
    match view {
        View::Transpose(seed) => {
            let mut left: Vec<usize> = (0..rank).collect();
            let mut seed = *seed;
            let perm: Vec<usize> = (0..rank)
                .map(|i| {
                    let n = rank - i;
                    let p = left.remove(seed % n);
                    seed /= n;
                    p
                })
                .collect();
            let to: Vec<u64> = perm.iter().map(|&p| shape[p]).collect();
            op(&to, format!("transpose(x = {x}, perm = {perm:?})"))
        }
        View::Split { axis, by } => {
            let axis = axis % rank;
            let factors: Vec<u64> = (2..shape[axis]).filter(|n| shape[axis].is_multiple_of(*n)).collect();
            let n = *factors.get(by % factors.len().max(1))?;
            (rank < 5).then_some(())?;
            to.splice(axis..=axis, [n, shape[axis] / n]);
            op(&to, format!("reshape(x = {x}, shape = {to:?})"))
        }
        View::Join { axis } => {
            let axis = axis % rank;
            (axis + 1 < rank).then_some(())?;
            to.splice(axis..axis + 2, [shape[axis] * shape[axis + 1]]);
            op(&to, format!("reshape(x = {x}, shape = {to:?})"))
        }
        View::Tile { axis, reps } => {
            let axis = axis % rank;
            (volume * reps <= 2000).then_some(())?;
            to[axis] *= reps;
            let mut all = vec![1; rank];
            all[axis] = *reps;
            op(&to, format!("tile(x = {x}, reps = {all:?})"))
        }
        View::Slice { axis, begin, step } => {
            let axis = axis % rank;
            let begin = begin % shape[axis];
            to[axis] = (shape[axis] - begin).div_ceil(*step);
            let (mut b, mut s) = (vec![0; rank], vec![1; rank]);
            b[axis] = begin;
            s[axis] = *step;
            op(&to, format!("slice_by_index(x = {x}, begin = {b:?}, end = {shape:?}, stride = {s:?})"))
        }
        View::Reverse { axis } => op(&to, format!("reverse(x = {x}, axes = [{}])", axis % rank)),
        View::ExpandDims { axis } => {
            (rank < 5).then_some(())?;
            let axis = axis % (rank + 1);
            to.insert(axis, 1);
            op(&to, format!("expand_dims(x = {x}, axes = [{axis}])"))
        }
        View::Gather { axis, indices } => {
            let axis = axis % rank;
            let indices: Vec<u64> = indices.iter().map(|i| i % shape[axis]).collect();
            (volume * indices.len() as u64 <= 2000).then_some(())?;
            to[axis] = indices.len() as u64;
            op(&to, format!("gather(x = {x}, indices = {indices:?}, axis = {axis}, batch_dims = 0)"))
        }
        View::Stack { axis, parts } => {
            (rank < 5 && volume * *parts as u64 <= 2000).then_some(())?;
            let axis = axis % (rank + 1);
            to.insert(axis, *parts as u64);
            op(&to, format!("stack(values = ({}), axis = {axis})", vec![x; *parts].join(", ")))
        }
        View::Pieces { axis, order } => {
            let axis = axis % rank;
            let n = shape[axis];
            (n > 1 && volume * order.len() as u64 <= 2000).then_some(())?;
            let mut piece = shape.to_vec();
            piece[axis] = 1;
            let mut text = String::new();
            let names: Vec<String> = order
                .iter()
                .enumerate()
                .map(|(i, at)| {
                    let mut begin = vec![0; rank];
                    begin[axis] = at % n;
                    let piece_name = format!("{name}_{i}");
                    text += &format!(
                        "    {} {piece_name} = slice_by_size(x = {x}, begin = {begin:?}, size = {piece:?});\n",
                        ty("fp32", &piece)
                    );
                    piece_name
                })
                .collect();
            to[axis] = order.len() as u64;
            text += &format!(
                "    {} {name} = concat(values = ({}), axis = {axis}, interleave = false);\n",
                ty("fp32", &to),
                names.join(", ")
            );
            Some((text, to))
        }
    }
}

/// The index map that a layout says, in row-major order.
fn index_map(layout: &Layout) -> Vec<i64> {
    let mut map = vec![layout.offset.as_known().unwrap()];
    for d in layout.axes.iter().flatten() {
        let (n, stride) = (d.extent.as_known().unwrap() as i64, d.stride.as_known().unwrap());
        map = map.iter().flat_map(|&base| (0..n).map(move |i| base + i * stride)).collect();
    }
    map
}

/// The index map that the interpreter finds by moving the numbers 0, 1, 2, …
fn brute_force(f: &Function, shape: &[u64], out: ValueId) -> Vec<i64> {
    let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
    let numbers: Vec<f64> = (0..shape.iter().product::<usize>()).map(|i| i as f64).collect();
    let inputs = BTreeMap::from([("x".into(), Tensor::floats(DType::F32, &shape, &numbers))]);
    let outputs = Interpreter::new(f, Mode::Storage).unwrap().run(&inputs, &mut BTreeMap::new()).unwrap();
    outputs[f.value(out).name()].to_f64s().into_iter().map(|v| v as i64).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// A layout is the index map of the ops it describes.
    #[test]
    fn layouts_are_index_maps(shape in prop::collection::vec(1u64..7, 1..4), views in prop::collection::vec(view(), 1..6)) {
        let (mut body, mut x, mut at) = (String::new(), "x".to_string(), shape.clone());
        for (i, view) in views.iter().enumerate() {
            if let Some((text, to)) = spell(view, &x, &format!("v{i}"), &at) {
                body += &text;
                x = format!("v{i}");
                at = to;
            }
        }
        prop_assume!(x != "x");
        let p = program(&format!("{} x", ty("fp32", &shape)), &body, &x);
        let f = main(&p);
        let (input, out) = (f.inputs()[0], f.outputs()[0]);
        let layouts = Layouts::new(f);
        // Irregular index lists have no digits; everything else must be found, and found right.
        if let Some(layout) = layouts.over(out, input) {
            prop_assert_eq!(index_map(&layout), brute_force(f, &shape, out), "{:?}\n{}", layout, body);
        } else {
            let irregular = views.iter().any(|v| matches!(v, View::Gather { .. } | View::Pieces { .. } | View::Slice { .. } | View::Split { .. } | View::Join { .. }));
            prop_assert!(irregular, "{body}");
        }
        optimize(&p, DEFAULT);
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Spelling {
    Expand,
    Interleave,
    Stack,
    Gather,
    HeadTile,
    CopiesFirst,
}

/// The value `to`: `from` [b, h, p, q] with its heads repeated.
fn repeat(spelling: Spelling, g: u64, [b, h, p, q]: [u64; 4], from: &str, to: &str) -> String {
    let t = |shape: &[u64]| ty("fp16", shape);
    let out = t(&[b, h * g, p, q]);
    match spelling {
        Spelling::Expand => format!(
            "{} {to}0 = expand_dims(x = {from}, axes = [2]);
             {} {to}1 = tile(x = {to}0, reps = [1, 1, {g}, 1, 1]);
             {out} {to} = reshape(x = {to}1, shape = [{b}, {}, {p}, -1]);",
            t(&[b, h, 1, p, q]),
            t(&[b, h, g, p, q]),
            h * g,
        ),
        Spelling::Interleave => format!(
            "{} {to}0 = transpose(x = {from}, perm = [1, 0, 2, 3]);
             {} {to}1 = tile(x = {to}0, reps = [{g}, 1, 1, 1]);
             {} {to}2 = reshape(x = {to}1, shape = [{g}, {h}, {b}, {p}, {q}]);
             {} {to}3 = transpose(x = {to}2, perm = [1, 0, 2, 3, 4]);
             {} {to}4 = reshape(x = {to}3, shape = [-1, {b}, {p}, {q}]);
             {out} {to} = transpose(x = {to}4, perm = [1, 0, -2, -1]);",
            t(&[h, b, p, q]),
            t(&[g * h, b, p, q]),
            t(&[g, h, b, p, q]),
            t(&[h, g, b, p, q]),
            t(&[h * g, b, p, q]),
        ),
        Spelling::Stack => format!(
            "{} {to}0 = stack(values = ({}), axis = 2);
             {out} {to} = reshape(x = {to}0, shape = [{b}, {}, {p}, {q}]);",
            t(&[b, h, g, p, q]),
            vec![from; g as usize].join(", "),
            h * g,
        ),
        Spelling::Gather => {
            let indices: Vec<u64> = (0..h * g).map(|i| i / g).collect();
            format!("{out} {to} = gather(x = {from}, indices = {indices:?}, axis = 1, batch_dims = 0);")
        }
        Spelling::HeadTile => format!("{out} {to} = tile(x = {from}, reps = [1, {g}, 1, 1]);"),
        Spelling::CopiesFirst => format!(
            "{} {to}0 = expand_dims(x = {from}, axes = [1]);
             {} {to}1 = tile(x = {to}0, reps = [1, {g}, 1, 1, 1]);
             {out} {to} = reshape(x = {to}1, shape = [{b}, {}, {p}, {q}]);",
            t(&[b, 1, h, p, q]),
            t(&[b, g, h, p, q]),
            h * g,
        ),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, ..ProptestConfig::default() })]

    /// `gqa-fold` keeps every bit, whatever it does, and leaves no copy where it can fold.
    #[test]
    fn folding_is_exact(
        [b, h, g, m, n, k] in [1u64..4, 1u64..4, 1u64..5, 1u64..4, 1u64..9, 1u64..40],
        [transpose_x, transpose_y, left] in [any::<bool>(), any::<bool>(), any::<bool>()],
        spelling in prop::sample::select(vec![
            Spelling::Expand, Spelling::Interleave, Spelling::Stack, Spelling::Gather, Spelling::HeadTile,
            Spelling::CopiesFirst,
        ]),
    ) {
        let pair = |flag: bool, rows: u64, columns: u64| if flag { [columns, rows] } else { [rows, columns] };
        let ([xr, xc], [yr, yc]) = (pair(transpose_x, m, k), pair(transpose_y, k, n));
        let ([p, q], [r, c]) = if left { ([xr, xc], [yr, yc]) } else { ([yr, yc], [xr, xc]) };
        let signature =
            format!("{} keys, {} query", ty("fp16", &[b, h, p, q]), ty("fp16", &[b, h * g, r, c]));
        let (x, y) = if left { ("r", "query") } else { ("query", "r") };
        let body = format!(
            "{}\n{} out = matmul(x = {x}, y = {y}, transpose_x = {transpose_x}, transpose_y = {transpose_y});",
            repeat(spelling, g, [b, h, p, q], "keys", "r"),
            ty("fp16", &[b, h * g, m, n]),
        );
        let before = program(&signature, &body, "out");
        let (after, report) = optimize(&before, DEFAULT);
        let grouped = !matches!(spelling, Spelling::HeadTile | Spelling::CopiesFirst) || h == 1;
        let views_only = if left { n == 1 } else { m == 1 || !transpose_x };
        if grouped && views_only && g > 1 {
            let copies = count(&after, "tile") + count(&after, "stack") + count(&after, "gather");
            prop_assert_eq!(copies, 0, "{}\n{}", body, report.explain());
        }
    }
}

/// What stands between the two products.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Middle {
    Softmax,
    Softcap,
    Sinks,
    Manual,
    Where,
    Alibi,
    SinglePrecision,
    OverHeads,
    Fused,
}

/// The shape of the mask, against `[b, h, m, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum MaskShape {
    Rows,
    OneRow,
    Heads,
    Matrix,
}

/// `p` from the scores `s` [b, h, m, n] and `mask`.
fn middle(kind: Middle, [b, h, m, n]: [u64; 4]) -> String {
    let (t, wide) = (ty("fp16", &[b, h, m, n]), ty("fp16", &[b, h, m, n + 1]));
    let column = ty("fp16", &[b, h, m, 1]);
    let numbers = |count: u64| (0..count).map(|i| format!("{}.5", i % 7)).collect::<Vec<_>>().join(", ");
    let softmax = |x: &str| format!("{t} p = softmax(x = {x}, axis = -1);");
    let added = format!("{t} scaled = mul(x = s, y = fp16(0.25)); {t} a = add(x = scaled, y = mask);");
    match kind {
        Middle::Softmax | Middle::Fused => added + &softmax("a"),
        Middle::Softcap => {
            format!(
                "{t} c0 = mul(x = s, y = fp16(0.1)); {t} c1 = tanh(x = c0); {t} c2 = mul(x = c1, y = fp16(10.0));
             {t} a = add(x = c2, y = mask);"
            ) + &softmax("a")
        }
        Middle::Sinks => {
            added
                + &format!(
                    "{column} sink = const(val = {column}([{}]));
                     {wide} j = concat(values = (a, sink), axis = 3, interleave = false);
                     {wide} w = softmax(x = j, axis = -1);
                     {t} p = slice_by_index(x = w, begin = [0, 0, 0, 0], end = [{b}, {h}, {m}, {n}],
                         end_mask = [true, true, true, false]);",
                    numbers(b * h * m)
                )
        }
        Middle::Manual => {
            added
                + &format!(
                    "{column} top = reduce_max(x = a, axes = [-1], keep_dims = true);
                     {t} low = sub(x = a, y = top); {t} e = exp(x = low);
                     {column} sum = reduce_sum(x = e, axes = [-1], keep_dims = true);
                     {t} p = real_div(x = e, y = sum);"
                )
        }
        Middle::Where => {
            let open = ty("bool", &[b, h, m, n]);
            format!(
                "{t} zero = mul(x = s, y = fp16(0.0)); {t} spread = add(x = zero, y = mask);
                 {open} open = greater(x = spread, y = fp16(-1.0));
                 {t} a = select(cond = open, a = s, b = spread);"
            ) + &softmax("a")
        }
        Middle::Alibi => {
            let slopes = ty("fp16", &[1, h, 1, n]);
            added
                + &format!(
                    "{slopes} slope = const(val = {slopes}([{}])); {t} biased = add(x = a, y = slope);",
                    numbers(h * n)
                )
                + &softmax("biased")
        }
        Middle::SinglePrecision => {
            let single = ty("fp32", &[b, h, m, n]);
            added
                + &format!(
                    "{single} f = cast(x = a, dtype = \"fp32\"); {single} g = softmax(x = f, axis = -1);
                     {t} p = cast(x = g, dtype = \"fp16\");"
                )
        }
        Middle::OverHeads => added + &format!("{t} p = softmax(x = a, axis = 1);"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whole attention blocks keep every bit, and no copy is left.
    #[test]
    fn attention_is_folded_exactly(
        [b, h, g, m, n, d] in [1u64..3, 1u64..4, 2u64..5, 1u64..5, 1u64..12, 1u64..20],
        orders in prop::sample::select(vec![
            [Spelling::Expand, Spelling::Expand], [Spelling::Interleave, Spelling::Expand],
            [Spelling::Stack, Spelling::Gather], [Spelling::Gather, Spelling::Interleave],
            [Spelling::HeadTile, Spelling::CopiesFirst],
        ]),
        kind in prop::sample::select(vec![
            Middle::Softmax, Middle::Softcap, Middle::Sinks, Middle::Manual, Middle::Where, Middle::Alibi,
            Middle::SinglePrecision, Middle::OverHeads, Middle::Fused,
        ]),
        mask in prop::sample::select(vec![MaskShape::Rows, MaskShape::OneRow, MaskShape::Heads, MaskShape::Matrix]),
    ) {
        let heads = h * g;
        let mask = match mask {
            MaskShape::Rows => vec![b, 1, m, n],
            MaskShape::OneRow => vec![1, 1, 1, n],
            MaskShape::Heads => vec![1, heads, m, n],
            MaskShape::Matrix => vec![m, n],
        };
        let signature = format!(
            "{} query, {} k_once, {} v_once, {} mask",
            ty("fp16", &[b, heads, m, d]), ty("fp16", &[b, h, n, d]), ty("fp16", &[b, h, n, d]), ty("fp16", &mask),
        );
        let copies = |spelling, from, to| repeat(spelling, g, [b, h, n, d], from, to);
        let out = ty("fp16", &[b, heads, m, d]);
        let body = copies(orders[0], "k_once", "k") + &copies(orders[1], "v_once", "v") + &match kind {
            Middle::Fused => format!(
                "{out} out = scaled_dot_product_attention(query = query, key = k, value = v, attn_mask = mask);"
            ),
            _ => format!(
                "{} s = matmul(x = query, y = k, transpose_x = false, transpose_y = true);\n{}
                 {out} out = matmul(x = p, y = v, transpose_x = false, transpose_y = false);",
                ty("fp16", &[b, heads, m, n]), middle(kind, [b, heads, m, n]),
            ),
        };
        let (after, report) = optimize(&program(&signature, &body, "out"), DEFAULT);
        let traffic = milopt::analysis::traffic::Traffic::of(main(&after));
        let by_cost = report.explain().contains("no bytes gained");
        prop_assert!(traffic.repeats.count == 0 || by_cost, "{body}\n{}", report.explain());
    }
}
