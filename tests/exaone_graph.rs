//! The synthetic decode graph of the benches has the ops of the real one.

#[path = "../benches/support/exaone.rs"]
mod exaone;

use std::collections::BTreeMap;

use exaone::{Config, program};
use milopt::ir::Program;

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

#[test]
fn prefill_adds_the_positions_of_its_rows() {
    let decode = program(&Config::small()).unwrap();
    let prefill = program(&Config { q_len: 8, ..Config::small() }).unwrap();
    let (mut decode, prefill) = (histogram(&decode), histogram(&prefill));
    *decode.get_mut("add").unwrap() += 1;
    assert_eq!(decode, prefill);
}
