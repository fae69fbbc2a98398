//! Logical bytes per run of a function.
//!
//! A value counts once written and once per op that reads it. Views (reshape, expand_dims, squeeze, flatten2d, identity,
//! transposes of unit axes, slices of leading axes, read_state, write_state) move nothing: an op that reads a view reads
//! the viewed value's bytes in the view's extent. `slice_update` counts its update. Constants and states have columns of
//! their own. This is an estimate from the graph, not a DRAM counter.
//!
//! A value is *repeated* when it lies on the way to a batched operand of `matmul` or to the key or value of
//! `scaled_dot_product_attention` and its layout repeats some ancestor along a batch axis; each copy that is materialised
//! counts once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::Serialize;

use crate::ir::{Function, OpId, ValueId};
use crate::opset::views;

use super::layout::{Digit, Layout, Layouts, takes_all};
use super::spelling::moves_only_unit_axes;

/// The disclaimer that goes with every printed number.
pub const DISCLAIMER: &str = "logical bytes from the graph, not a DRAM counter";

/// Bytes per run of one function.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Traffic {
    /// By op kind, constants not included.
    pub kinds: BTreeMap<String, KindTraffic>,
    /// Bytes of tensors written, all kinds.
    pub written: u64,
    /// Bytes of tensors read, constants and states not included.
    pub read: u64,
    /// Bytes of constants that ops read, at their stored width, each constant once.
    pub constants: u64,
    /// Bytes of all states.
    pub states: u64,
    /// Bytes written into states by `slice_update`.
    pub state_updates: u64,
    /// Bytes of the states that each `read_state` returns and each `write_state` takes: what moves if they are copied.
    pub states_handed_over: u64,
    /// Repeated values.
    pub repeats: Repeats,
    /// Values whose size is not known and which are not counted.
    pub unknown: u64,
}

/// Bytes of one op kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct KindTraffic {
    /// Number of ops.
    pub ops: u64,
    /// Bytes written.
    pub written: u64,
    /// Bytes read.
    pub read: u64,
}

/// Copies that exist only because heads are repeated.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Repeats {
    /// Number of materialised copies.
    pub count: u64,
    /// Bytes written.
    pub written: u64,
    /// Bytes read by their consumers.
    pub read: u64,
    /// The ops that write them.
    pub ops: Vec<String>,
}

impl Repeats {
    /// Bytes written and read.
    pub fn total(&self) -> u64 {
        self.written + self.read
    }
}

impl Traffic {
    /// Counts a function.
    pub fn of(f: &Function) -> Traffic {
        let mut t = Traffic::default();
        let mut constants = BTreeSet::new();
        for op in f.all_ops() {
            let data = f.op(op);
            if data.kind() == "const" {
                continue;
            }
            let kind = t.kinds.entry(data.kind().to_string()).or_default();
            kind.ops += 1;
            let (written, read) = (written_bytes(f, op), read_bytes(f, op));
            kind.written += written;
            kind.read += read;
            t.written += written;
            t.read += read;
            t.unknown += data
                .results()
                .iter()
                .filter(|&&v| f.tensor(v).is_some_and(|ty| ty.byte_len().is_none() && ty.dtype.bits().is_some()))
                .count() as u64;
            if data.kind() == "slice_update" {
                t.state_updates += data.value("update").map_or(0, |v| value_bytes(f, v));
            }
            t.states_handed_over += handed_over(f, op);
            for operand in data.operands() {
                if let Some(l) = f.operand_literal(operand) {
                    let key = match operand {
                        crate::ir::Operand::Value(v) => (0, crate::ir::Id::index(*v)),
                        crate::ir::Operand::Literal(l) => (1, crate::ir::Id::index(*l)),
                    };
                    if constants.insert(key) {
                        t.constants += l.ty.as_tensor().and_then(|ty| ty.byte_len()).unwrap_or(0);
                    }
                }
            }
        }
        t.states = f.inputs().iter().filter_map(|&v| f.ty(v).as_state()?.byte_len()).sum();
        t.repeats = repeats(f);
        t
    }

    /// Bytes written and read, constants and states not included.
    pub fn total(&self) -> u64 {
        self.written + self.read
    }
}

/// Bytes of the state that an op takes or returns whole.
fn handed_over(f: &Function, op: OpId) -> u64 {
    match &**f.op(op).kind() {
        "read_state" => f.op(op).results().iter().map(|&v| value_bytes(f, v)).sum(),
        "write_state" => f.op(op).value("data").map_or(0, |v| value_bytes(f, v)),
        _ => 0,
    }
}

/// Bytes of a value; 0 when its size is not known.
pub fn value_bytes(f: &Function, v: ValueId) -> u64 {
    f.tensor(v).and_then(|t| t.byte_len()).unwrap_or(0)
}

/// Bytes an op writes and reads.
pub fn op_bytes(f: &Function, op: OpId) -> u64 {
    written_bytes(f, op) + read_bytes(f, op)
}

/// Whether an op's result is its operand's bytes, or a run of them, in place.
pub fn is_view(f: &Function, op: OpId) -> bool {
    match &**f.op(op).kind() {
        "reshape" | "expand_dims" | "squeeze" | "flatten2d" | "identity" | "read_state" | "write_state" => true,
        "transpose" => views::Transpose::of(f, op)
            .is_some_and(|t| f.tensor(t.x).is_some_and(|ty| moves_only_unit_axes(&ty.shape, &t.perm))),
        "slice_by_index" => slices_leading_axis(f, op),
        _ => false,
    }
}

/// Whether a slice is one run of memory: axes before the cut have extent one, axes after it are whole.
fn slices_leading_axis(f: &Function, op: OpId) -> bool {
    let Some(slice) = views::Slice::of(f, op) else { return false };
    let Some(shape) = f.op(op).value("x").and_then(|x| f.tensor(x)) else { return false };
    let whole = |i: usize| shape.shape.get(i).is_some_and(|d| takes_all(&slice.axes[i], d));
    let rank = slice.axes.len();
    (0..rank).find(|&i| !whole(i)).is_none_or(|cut| {
        let one_run = slice.axes[cut].stride == 1 || slice.axes[cut].extent.as_ref().is_some_and(|n| n.is_one());
        shape.shape[..cut].iter().all(|d| d.is_one()) && (cut + 1..rank).all(whole) && one_run
    })
}

fn written_bytes(f: &Function, op: OpId) -> u64 {
    let data = f.op(op);
    if is_view(f, op) {
        0
    } else if data.kind() == "slice_update" {
        data.value("update").map_or(0, |v| value_bytes(f, v))
    } else {
        data.results().iter().map(|&v| value_bytes(f, v)).sum()
    }
}

fn read_bytes(f: &Function, op: OpId) -> u64 {
    let data = f.op(op);
    if is_view(f, op) || !data.blocks().is_empty() {
        return 0;
    }
    if data.kind() == "slice_update" {
        return data.value("update").map_or(0, |v| value_bytes(f, v));
    }
    if matches!(&**data.kind(), "slice_by_index" | "slice_by_size" | "gather") {
        return data.results().iter().map(|&v| value_bytes(f, v)).sum();
    }
    let mut read: Vec<ValueId> =
        data.operands().iter().filter_map(|o| o.as_value()).filter(|&v| f.const_value(v).is_none()).collect();
    read.sort_unstable();
    read.dedup();
    read.into_iter().map(|v| value_bytes(f, v)).sum()
}

/// The value whose bytes `v` views.
fn viewed(f: &Function, mut v: ValueId) -> ValueId {
    while let Some(op) = f.producer(v) {
        match f.op(op).value("x") {
            Some(x) if is_view(f, op) => v = x,
            _ => break,
        }
    }
    v
}

/// Operands of an op whose repetition along a batch axis is waste, with those axes: the leading ones of `matmul` and of an
/// attention's key and value, the heads of `einsum`.
pub fn batched_operands(f: &Function, op: OpId) -> Vec<(ValueId, Range<usize>)> {
    let data = f.op(op);
    let named = |names: &[&str]| names.iter().filter_map(|p| data.value(p)).collect::<Vec<ValueId>>();
    let values = match &**data.kind() {
        "matmul" => named(&["x", "y"]),
        "scaled_dot_product_attention" => named(&["key", "value"]),
        "einsum" => data.param("values").iter().filter_map(|o| o.as_value()).collect(),
        _ => return Vec::new(),
    };
    let axes = |v: ValueId| {
        let batch = f.tensor(v)?.rank().checked_sub(2)?;
        Some((v, if data.kind() == "einsum" { batch..batch + 1 } else { 0..batch }))
    };
    values.into_iter().filter_map(axes).filter(|(_, axes)| !axes.is_empty()).collect()
}

fn repeats(f: &Function) -> Repeats {
    let layouts = Layouts::new(f);
    let mut copies: BTreeSet<ValueId> = BTreeSet::new();
    for op in f.all_ops() {
        for (v, batch) in batched_operands(f, op) {
            let all = layouts.of(v);
            let repeats = |l: &&Layout| l.axes[batch.clone()].iter().flatten().any(Digit::repeats);
            let Some(source) = all.iter().rfind(repeats).map(|l| l.source) else { continue };
            // Every value between the operand and the value it repeats that is itself a repetition.
            for l in all.iter().take_while(|l| l.source != source) {
                let copy = viewed(f, l.source);
                if layouts.over(copy, source).is_some_and(|l| l.repeats()) {
                    copies.insert(copy);
                }
            }
        }
    }
    let mut out = Repeats { count: copies.len() as u64, ..Repeats::default() };
    for &v in &copies {
        out.written += value_bytes(f, v);
        out.read += value_bytes(f, v) * readers(f, v);
        out.ops.extend(f.producer(v).map(|op| f.describe(op)));
    }
    out
}

/// How many ops read a value, through views or not.
fn readers(f: &Function, v: ValueId) -> u64 {
    f.users(v)
        .into_iter()
        .map(|user| match is_view(f, user) {
            true => f.op(user).results().iter().map(|&r| readers(f, r)).sum(),
            false => 1,
        })
        .sum()
}
