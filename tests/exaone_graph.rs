//! The synthetic decode graph of the benches has the ops of the real one.

#[path = "../benches/support/exaone.rs"]
mod exaone;

use std::collections::BTreeMap;

use exaone::{Config, attention, program};
use milopt::equiv::{Options, Verdict, check};
use milopt::interp::{Interpreter, Mode, Tensor, Values, same_bits};
use milopt::ir::{DType, Program};
use milopt::passes::{Pipeline, Preset, RunOptions};

fn histogram(program: &Program) -> BTreeMap<&str, usize> {
    let f = program.main().unwrap();
    let mut counts = BTreeMap::new();
    for op in f.all_ops() {
        *counts.entry(f.op(op).kind().as_str()).or_default() += 1;
    }
    counts.remove("const");
    counts
}

/// Ops per kind that coremltools 9 writes for 30 layers, of 4,780 with constants.
const REAL: [(&str, usize); 24] = [
    ("add", 273),
    ("cast", 4),
    ("concat", 92),
    ("cos", 1),
    ("expand_dims", 65),
    ("gather", 1),
    ("greater_equal", 1),
    ("linear", 211),
    ("matmul", 61),
    ("mul", 361),
    ("pow", 121),
    ("read_state", 62),
    ("reduce_mean", 121),
    ("reshape", 180),
    ("rsqrt", 121),
    ("select", 1),
    ("silu", 30),
    ("sin", 1),
    ("slice_by_index", 181),
    ("slice_update", 60),
    ("softmax", 30),
    ("tile", 60),
    ("transpose", 121),
    ("write_state", 60),
];

#[test]
fn thirty_layers_have_the_ops_of_the_real_graph() {
    let program = program(&Config::exaone_1_2b()).unwrap();
    let counts = histogram(&program);
    assert_eq!(counts, REAL.into_iter().collect());
    assert_eq!(counts.values().sum::<usize>(), 2219);
}

/// What the bench of the attention compares: nothing is copied after the fold.
#[test]
fn the_attention_alone_folds_in_every_layer() {
    let mut program = attention(&Config { layers: 3, ..Config::small() }).unwrap();
    assert_eq!(histogram(&program)["tile"], 6);
    let before = program.clone();
    Pipeline::parse("gqa-fold,dce").unwrap().run(&mut program, &RunOptions::default()).unwrap();
    assert!(!histogram(&program).contains_key("tile"));
    let found = check(&before, &program, None, &Options::default()).unwrap();
    assert_eq!(found.verdict, Verdict::Bitwise, "{found}");
}

/// Long enough for work to be spread over threads.
#[test]
fn steps_do_not_depend_on_the_number_of_threads() {
    let program = program(&Config { ctx: 2048, head_dim: 32, ..Config::small() }).unwrap();
    let f = program.main().unwrap();
    let interpreter = Interpreter::new(f, Mode::Storage).unwrap();
    let runs = [1, 2, 5].map(|n| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
        pool.install(|| {
            let (mut states, mut all) = (Values::new(), Vec::new());
            for step in 0..3 {
                let inputs = f.inputs().iter().filter_map(|&v| Some((f.value(v).name().clone(), f.tensor(v)?)));
                let inputs: Values = inputs
                    .map(|(name, ty)| {
                        let zeros = Tensor::zeros(ty).unwrap();
                        let ids = ty.dtype == DType::I32;
                        (name, if ids { Tensor::ints(ty.dtype, zeros.shape(), &[step]) } else { zeros })
                    })
                    .collect();
                let (outputs, new) = interpreter.advance(&inputs, states).unwrap();
                all.extend(outputs.into_values());
                states = new;
            }
            all.extend(states.into_values());
            all
        })
    });
    for other in &runs[1..] {
        assert!(runs[0].iter().zip(other).all(|(a, b)| same_bits(a, b)));
    }
    assert!(runs[0].iter().all(|t| t.to_f64s().iter().any(|&x| x != 0.0)));
}

#[test]
fn prefill_adds_the_positions_of_its_rows() {
    let decode = program(&Config::small()).unwrap();
    let prefill = program(&Config { q_len: 8, ..Config::small() }).unwrap();
    let (mut decode, prefill) = (histogram(&decode), histogram(&prefill));
    *decode.get_mut("add").unwrap() += 1;
    assert_eq!(decode, prefill);
}

#[test]
fn it_computes_finite_numbers_at_every_position() {
    for q_len in [1, 4] {
        let program = program(&Config { q_len, ..Config::small() }).unwrap();
        let report = check(&program, &program, None, &Options { steps: 7, ..Options::default() }).unwrap();
        assert_eq!(report.verdict, Verdict::Bitwise, "{report}");
        let main = &report.functions[0];
        assert!(main.outputs.iter().chain(&main.states).all(|t| t.storage.finite == t.storage.elements), "{report}");
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn thirty_layers_are_folded_whole() {
    let mut program = program(&Config::exaone_1_2b()).unwrap();
    let report = Pipeline::default().run(&mut program, &RunOptions::default()).unwrap();
    let [counts] = &report.functions[..] else { panic!("one function") };
    let (before, after) = (&counts.before.traffic, &counts.after.traffic);
    assert_eq!((before.repeats.count, before.repeats.written, before.repeats.total()), (60, 960 * MIB, 1920 * MIB));
    assert_eq!((before.states, before.state_updates), (240 * MIB, 60 << 10));
    assert_eq!((after.repeats.count, after.states, after.state_updates), (0, 240 * MIB, 60 << 10));
    assert_eq!((counts.after.count("tile"), counts.after.count("transpose")), (0, 0));
    assert_eq!(counts.before.ops, 2219);
    assert!(counts.after.ops <= 1920, "{}", counts.after.ops);

    let f = program.main().unwrap();
    let caches = f.all_ops().into_iter().filter(|&op| f.op(op).kind() == "matmul").filter(|&op| {
        let y = f.op(op).value("y").and_then(|y| f.tensor(y)).and_then(|t| t.known_shape());
        y.is_some_and(|shape| shape[..] == [1, 8, 4096, 64])
    });
    assert_eq!(caches.count(), 60, "keys and values are read as the cache holds them");
    let scores = |v| f.tensor(v).is_some_and(|t| t.known_shape().is_some_and(|s| s.last() == Some(&4096)));
    let views = f.all_ops().into_iter().filter(|&op| f.op(op).kind() == "reshape");
    assert_eq!(views.filter(|&op| f.op(op).value("x").is_some_and(scores)).count(), 0, "no scores are reshaped");
}

#[test]
fn thirty_layers_share_one_state() {
    let mut program = program(&Config::exaone_1_2b()).unwrap();
    Pipeline::parse("kv-unify").unwrap().run(&mut program, &RunOptions::default()).unwrap();
    let f = program.main().unwrap();
    let cache = f.ty(f.input("kv_cache").unwrap()).as_state().unwrap();
    assert_eq!(cache.known_shape().unwrap()[..], [60, 1, 8, 4096, 64]);
    let counts = histogram(&program);
    // Each update takes a read of its own; the begin of each value's box is another vector, nothing else is computed.
    let changed: Vec<_> = REAL.into_iter().filter(|(kind, n)| counts[kind] != *n).map(|(kind, _)| kind).collect();
    assert_eq!(changed, ["concat", "read_state"]);
    assert_eq!((counts["concat"], counts["read_state"]), (92 + 30, 120));
}

#[test]
fn joined_caches_compute_the_same() {
    for q_len in [1, 4] {
        let before = program(&Config { q_len, ..Config::small() }).unwrap();
        for passes in ["kv-unify", "gqa-fold,view-simplify,kv-unify,dce"] {
            let mut after = before.clone();
            let report = Pipeline::parse(passes).unwrap().run(&mut after, &RunOptions::default()).unwrap();
            let options = Options { steps: 8, interface: report.interfaces(), ..Options::default() };
            let found = check(&before, &after, None, &options).unwrap();
            assert_eq!(found.verdict, Verdict::Bitwise, "{found}");
        }
    }
}

/// How many ops there are after a pipeline, and reads, writes and updates of states.
fn after(pipeline: &Pipeline) -> (usize, [usize; 3], Program, milopt::passes::Report) {
    let mut program = program(&Config::exaone_1_2b()).unwrap();
    let report = pipeline.run(&mut program, &RunOptions::default()).unwrap();
    let counts = &report.functions[0].after;
    let states = ["slice_update", "write_state", "read_state"].map(|kind| counts.count(kind));
    (counts.ops, states, program, report)
}

#[test]
fn thirty_layers_write_their_caches_once() {
    let (ops, states, program, report) = after(&Pipeline::preset(Preset::O2));
    assert_eq!((ops, states), (1876, [2, 2, 4]));
    let (before, after) = (&report.functions[0].before.traffic, &report.functions[0].after.traffic);
    assert_eq!((before.state_updates, after.state_updates), (60 << 10, 60 << 10));
    // 62 reads and 60 writes of 120 MiB, then four and two.
    assert_eq!((before.states_handed_over, after.states_handed_over), (122 * 120 * MIB, 6 * 120 * MIB));
    let f = program.main().unwrap();
    let views = ["const", "read_state", "slice_update", "slice_by_index"];
    let computes = |op: &milopt::ir::OpId| !views.contains(&f.op(*op).kind().as_str());
    let results = f.all_ops().into_iter().filter(computes).flat_map(|op| f.op(op).results().to_vec());
    let largest = results.filter_map(|v| f.tensor(v)?.byte_len()).max();
    assert!(largest < Some(4 * MIB), "nothing as large as one layer's cache is computed: {largest:?}");
}

#[test]
fn merging_alone_finds_nothing_and_says_what_would_help() {
    let (_, states, _, report) = after(&Pipeline::parse("kv-merge").unwrap());
    assert_eq!(states, [60, 60, 62]);
    assert_eq!(report.explain().matches("(kv-defer)").count(), 2, "{}", report.explain());
}

#[test]
fn thirty_layers_share_one_write_when_their_caches_are_joined() {
    let passes = "gqa-fold,view-simplify,kv-unify,kv-defer,kv-forward,kv-merge,dce";
    let (_, states, ..) = after(&Pipeline::parse(passes).unwrap());
    assert_eq!(states, [1, 1, 2]);
}

#[test]
fn thirty_layers_without_states_hand_out_their_new_entries() {
    let (_, states, program, _) = after(&Pipeline::preset(Preset::ReadOnly));
    assert_eq!(states, [0, 0, 0]);
    let f = program.main().unwrap();
    let new = f.outputs().iter().filter(|&&v| f.value(v).name().ends_with("_new"));
    let bytes: u64 = new.map(|&v| f.tensor(v).unwrap().byte_len().unwrap()).sum();
    assert_eq!(bytes, 60 << 10);
}
