//! Laws of the presets that rewrite caches, on random decoders.

mod model;
mod mutations;
#[path = "../support/mod.rs"]
mod support;

use milopt::ir::{OpId, Program, ValueId};
use milopt::passes::Preset;
use proptest::prelude::*;

use model::{Bounds, Form, Mask, Middle, Model, Position, Products, Repeat, SLOTS};
use support::{count, declined, main, reassociate};

fn form() -> impl Strategy<Value = Form> {
    prop::sample::select(vec![
        Form::Stacked,
        Form::Unified,
        Form::PerLayer,
        Form::PerLayerRank3,
        Form::Columns,
        Form::RowsFirstStacked,
        Form::RowsFirst,
        Form::KeysTransposed,
        Form::KeysTransposedPerLayer,
    ])
}

fn position() -> impl Strategy<Value = Position> {
    prop_oneof![
        Just(Position::Scalar),
        Just(Position::Vector),
        (0..SLOTS).prop_map(Position::Constant),
        Just(Position::MaskShape)
    ]
}

fn bounds() -> impl Strategy<Value = Bounds> {
    (any::<bool>(), 0u64..10, any::<bool>(), any::<bool>()).prop_map(|(masks, garbage, squeeze, scalars)| Bounds {
        masks,
        garbage,
        squeeze,
        scalars,
    })
}

fn attention() -> impl Strategy<Value = (Mask, Middle, Products)> {
    use Middle::*;
    let mask = prop::sample::select(vec![
        Mask::Rows,
        Mask::Row,
        Mask::Flat,
        Mask::PerHead,
        Mask::PerBatch,
        Mask::Select,
        Mask::None,
    ]);
    let middle = prop::sample::select(vec![
        Softmax,
        Softcap,
        CapBehind,
        Sinks,
        Manual,
        ManualWithoutMax,
        DividedLate,
        ScaleBehind,
        Wide,
    ]);
    let products = prop::sample::select(vec![Products::Matmul, Products::KeysFirst, Products::Einsum, Products::Fused]);
    (mask, middle, products)
}

fn model() -> impl Strategy<Value = Model> {
    let sizes = (1u64..3, 1u64..3, 1u64..3, 1u64..5, 1u64..4);
    let rarely = || prop::bool::weighted(0.25);
    let switches = (any::<bool>(), rarely(), rarely(), any::<bool>(), rarely());
    let repeat = prop::sample::select(vec![Repeat::Tile, Repeat::Gather, Repeat::Stack]);
    (form(), position(), bounds(), attention(), sizes, switches, repeat).prop_map(
        |(
            form,
            position,
            bounds,
            (mask, middle, products),
            sizes,
            (wide, shared, writes_first, one_read, squeeze_row),
            repeat,
        )| {
            let (batch, kv_heads, groups, rows, layers) = sizes;
            Model {
                form,
                wide,
                batch: if Model::has_batch(form) { batch } else { 1 },
                kv_heads,
                groups,
                repeat,
                rows,
                layers,
                shared,
                position: match position {
                    Position::Constant(p) => Position::Constant(p.min(SLOTS - rows)),
                    other => other,
                },
                bounds,
                mask: if position == Position::MaskShape && mask == Mask::None { Mask::Rows } else { mask },
                middle,
                products,
                writes_first,
                one_read,
                squeeze_row,
            }
        },
    )
}

/// The passes of a preset; gqa-fold before or behind the deferral.
fn passes(preset: Preset, fold_first: bool) -> String {
    let mut names: Vec<&str> = preset.passes().iter().map(|p| p.name).collect();
    if !fold_first {
        names.retain(|n| *n != "gqa-fold");
        let at = names.iter().position(|n| *n == "kv-defer").unwrap() + 1;
        names.insert(at, "gqa-fold");
    }
    names.join(",")
}

/// With stale keys hidden by −∞.
fn infinite(passes: &str) -> String {
    passes.replace("kv-defer", "kv-defer:stale=infinite")
}

fn state_ops(p: &Program) -> [usize; 3] {
    ["slice_update", "write_state", "read_state"].map(|kind| count(p, kind))
}

/// Whether all that attention reads of a state is read before it is written.
fn reads_old_content(p: &Program) -> bool {
    let f = main(p);
    let mut written: Vec<ValueId> = Vec::new();
    let ops: Vec<OpId> = f.ops(f.body()).collect();
    ops.into_iter().all(|op| {
        let Some(state) = f.op(op).value("input") else { return true };
        if f.op(op).kind() == "write_state" {
            written.push(state);
        }
        let rest = |v: &ValueId| {
            let uses = f.value(*v).uses();
            uses.iter().all(|u| u.op().is_some_and(|user| f.op(user).kind() == "slice_update"))
        };
        f.op(op).kind() != "read_state" || !written.contains(&state) || f.op(op).results().iter().all(rest)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    /// Attention reads the caches as they were, and each state is written once.
    #[test]
    fn caches_are_read_once_and_written_once(m in model(), fold_first in any::<bool>(), infinitely in any::<bool>()) {
        let passes = passes(Preset::O2, fold_first);
        let passes = if infinitely { infinite(&passes) } else { passes };
        let (after, report) = reassociate(&m.program(), &passes);
        let n = m.states();
        prop_assert_eq!(state_ops(&after), [n, n, 2 * n], "{}\n{}", m.text(), report.explain());
        prop_assert!(reads_old_content(&after), "{}\n{}", m.text(), report.explain());
    }

    /// The caller writes the caches, and no state is left.
    #[test]
    fn caches_become_inputs(m in model(), fold_first in any::<bool>()) {
        let (after, report) = reassociate(&m.program(), &passes(Preset::ReadOnly, fold_first));
        prop_assert_eq!(state_ops(&after), [0, 0, 0], "{}\n{}", m.text(), report.explain());
        prop_assert!(main(&after).inputs().iter().all(|&v| main(&after).ty(v).as_state().is_none()));
        prop_assert_eq!(main(&after).outputs().len(), 1 + m.states());
    }

    /// Caches of equal type become one state, written once.
    #[test]
    fn caches_become_one(m in model(), fold_first in any::<bool>(), unify_first in any::<bool>()) {
        let o2 = passes(Preset::O2, fold_first);
        // An update in another type than the state's is one of the whole state, until kv-forward has been there.
        let unify_first = unify_first && !m.wide;
        let passes = if unify_first { format!("kv-unify,{o2}") } else { o2.replace("kv-merge", "kv-unify,kv-merge") };
        let (after, report) = reassociate(&m.program(), &passes);
        if m.form == Form::Columns {
            // The rows of V stand behind those of K, which a position that is not known may reach as far as anything says.
            let reasons = ["does not start at its first row", "looks at what write_state of `kv_cache` writes", "no two boxes"];
            prop_assert!(reasons.iter().any(|r| declined(&report, "", r)), "{}\n{}", m.text(), report.explain());
            return Ok(());
        }
        // Transposed, K has another type than V.
        let n = if matches!(m.form, Form::KeysTransposed | Form::KeysTransposedPerLayer) { 2 } else { 1 };
        prop_assert_eq!(state_ops(&after), [n, n, 2 * n], "{}\n{}", m.text(), report.explain());
        prop_assert!(reads_old_content(&after), "{}\n{}", m.text(), report.explain());
    }
}

#[test]
fn attention_over_every_second_head_takes_the_new_entries_of_those_heads() {
    let signature = "tensor<fp16, [1, 2, 1, 4]> x, tensor<fp16, [1, 4, 1, 4]> new, tensor<int32, [1]> p, state<tensor<fp16, [1, 4, 8, 4]>> k, state<tensor<fp16, [1, 4, 8, 4]>> v";
    let mut body = "tensor<int32, [1]> e = add(x = p, y = [1]);
        tensor<int32, [4]> b4 = concat(values = ([0, 0], p, [0]), axis = 0, interleave = false);
        tensor<int32, [4]> e4 = concat(values = ([1, 4], e, [4]), axis = 0, interleave = false);"
        .to_string();
    for s in ["k", "v"] {
        body += &format!("tensor<fp16, [1, 4, 8, 4]> {s}0 = read_state(input = {s});
            tensor<fp16, [1, 4, 8, 4]> {s}1 = slice_update(x = {s}0, update = new, begin = b4, end = e4);
            write_state(input = {s}, data = {s}1);
            tensor<fp16, [1, 4, 8, 4]> {s}2 = read_state(input = {s});
            tensor<fp16, [1, 2, 8, 4]> {s}3 = slice_by_index(x = {s}2, begin = [0, 0, 0, 0], end = [1, 4, 8, 4], stride = [1, 2, 1, 1]);");
    }
    body += "tensor<fp16, [1, 2, 1, 8]> s = matmul(x = x, y = k3, transpose_x = false, transpose_y = true);
        tensor<fp16, [1, 2, 1, 8]> w = softmax(x = s, axis = -1);
        tensor<fp16, [1, 2, 1, 4]> out = matmul(x = w, y = v3, transpose_x = false, transpose_y = false);";
    let (after, report) = reassociate(&support::program(signature, &body, "out"), "kv-defer");
    assert!(reads_old_content(&after), "{}", report.explain());
}
