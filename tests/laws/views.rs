//! Layouts of random views.

use std::collections::BTreeMap;

use milopt::analysis::layout::{Layout, Layouts};
use milopt::interp::{Interpreter, Mode, Tensor};
use milopt::ir::{DType, Function, ValueId};
use proptest::prelude::*;

use super::support::{DEFAULT, main, optimize, program};
use super::{cases, ty};

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
    #![proptest_config(cases(400))]

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
