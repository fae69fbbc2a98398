//! Caches that hold, or give, something else.

use milopt::ir::{DType, Dim, Function, Literal, OpId, Operand, TensorType, ValueId};
use milopt::rewrite::{Input, Patch, Transaction};

use super::attention::masks;
use super::edit::*;
use super::heads::{reorder, score_products};

pub const FAULTS: &[Fault] = &[
    Fault {
        name: "a read before the write",
        sites: |f| sites(f, "read_state", |op| Some(stale(f, op).is_some())),
        plant: |f, op| bypassed(f, op, stale(f, op).unwrap()),
    },
    Fault {
        name: "a write that is dropped",
        sites: |f| of_kind(f, "write_state"),
        plant: |f, op| {
            let mut t = Transaction::begin(f);
            t.remove(op).unwrap();
            t.commit().unwrap();
        },
    },
    Fault {
        name: "a write at the next position",
        sites: |f| sites(f, "slice_update", |op| Some(!unknown_entries(f, op)?.is_empty() && bounds(f, op).is_some())),
        plant: |f, op| {
            let step = unknown_entries(f, op).unwrap();
            let size = f.tensor(read(f, op, "begin").unwrap()).unwrap().shape[0].as_known().unwrap() as usize;
            shifted(f, op, (0..size).map(|i| i64::from(step.contains(&i))).collect());
        },
    },
    Fault {
        name: "a write into another layer",
        sites: |f| sites(f, "slice_update", |op| Some(layer(f, op)? < bounds(f, op)?[0])),
        plant: |f, op| {
            let size = bounds(f, op).unwrap().len();
            shifted(f, op, (0..size).map(|i| i64::from(i == 0)).collect());
        },
    },
    Fault {
        name: "keys written for values",
        sites: |f| sites(f, "slice_update", |op| Some(update_before(f, op).is_some())),
        plant: |f, op| rebound(f, op, "update", update_before(f, op).unwrap()),
    },
    Fault {
        name: "the rest of a cache lost in a write",
        sites: |f| sites(f, "slice_update", |op| Some(f.tensor(read(f, op, "x")?)?.dtype.is_float())),
        plant: |f, op| {
            operand(f, op, "x", |c| {
                let zero = Literal::floats(c.ty().dtype, &[], &[0.0]);
                c.op("mul", vec![("y", zero.into())])
            })
        },
    },
    Fault {
        name: "another state read",
        sites: |f| sites(f, "read_state", |op| Some(other_state(f, op).is_some())),
        plant: |f, op| rebound(f, op, "input", other_state(f, op).unwrap()),
    },
    Fault {
        name: "the rows of another layer read",
        sites: |f| sites(f, "slice_by_index", |op| Some(other_rows(f, op).is_some())),
        plant: |f, op| {
            let by = other_rows(f, op).unwrap();
            for param in ["begin", "end"] {
                let mut at = f.ints(op, param).unwrap();
                at[0] += by;
                constant(f, op, param, Literal::ints(&at));
            }
            let mut open = f.ints(op, "end_mask").unwrap_or_else(|| vec![0; f.ints(op, "end").unwrap().len()]);
            open[0] = 0;
            constant(f, op, "end_mask", Literal::bools(&open.iter().map(|&b| b != 0).collect::<Vec<_>>()));
        },
    },
    Fault {
        name: "stale keys that are not hidden",
        sites: |f| {
            sites(f, "add", |op| {
                Some(is_stale_mask(f, read(f, op, "y")?) && f.ty(read(f, op, "x")?) == f.ty(result(f, op)))
            })
        },
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "stale keys that are hidden weakly",
        sites: |f| sites(f, "mul", |op| Some(is_stale_mask(f, result(f, op)) && f.const_param(op, "y").is_some())),
        plant: |f, op| {
            let dtype = f.tensor(result(f, op)).unwrap().dtype;
            constant(f, op, "y", Literal::floats(dtype, &[], &[-1.0]));
        },
    },
    Fault {
        name: "the key beside the stale one hidden",
        sites: |f| sites(f, "equal", |op| Some(flags(f, op))),
        plant: |f, op| {
            operand(f, op, "x", |c| {
                let one = Literal::int(1).into();
                c.op("add", vec![("y", one)])
            })
        },
    },
    Fault {
        name: "too few stale keys hidden",
        sites: |f| {
            sites(f, "floor_div", |op| {
                Some(f.ints(op, "y")?[0] > 1 && f.users(result(f, op)).iter().any(|&u| flags(f, u)))
            })
        },
        plant: |f, op| {
            let n = f.ints(op, "y").unwrap()[0];
            constant(f, op, "y", Literal::ints(&[n - 1]));
        },
    },
    Fault {
        name: "the mask's first columns for the new keys",
        sites: |f| sites(f, "slice_by_size", |op| Some(is_window(f, op)? && f.tensor(result(f, op))?.rank() > 1)),
        plant: |f, op| {
            let rank = f.tensor(result(f, op)).unwrap().rank();
            constant(f, op, "begin", Literal::ints(&vec![0; rank]));
        },
    },
    Fault {
        name: "new values left out",
        sites: |f| sites(f, "add", |op| Some(both_products(f, op)? && f.ty(read(f, op, "x")?) == f.ty(result(f, op)))),
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "scores of new keys before those of old ones",
        sites: |f| sites(f, "concat", |op| Some(joins_scores(f, op))),
        plant: reorder,
    },
    Fault {
        name: "masks of new keys before those of old ones",
        sites: |f| {
            sites(f, "concat", |op| {
                let parts: Vec<ValueId> = f.op(op).param("values").iter().filter_map(Operand::as_value).collect();
                let joined = parts.len() == 2 && !comes_from(f, result(f, op), MIDDLE, "matmul");
                Some(joined && f.users(result(f, op)).iter().any(|u| masks(f).contains(u)))
            })
        },
        plant: reorder,
    },
];

/// What the state held before the write that this read comes after.
fn stale(f: &Function, op: OpId) -> Option<ValueId> {
    let state = f.op(op).value("input")?;
    let ops: Vec<OpId> =
        f.ops(f.body()).take_while(|&o| o != op).filter(|&o| f.op(o).value("input") == Some(state)).collect();
    let write = ops.iter().rposition(|&o| f.op(o).kind() == "write_state")?;
    let read = ops[..write].iter().rfind(|&&o| f.op(o).kind() == "read_state")?;
    (!f.users(result(f, op)).is_empty()).then(|| result(f, *read))
}

/// Entries of `begin` that are not constant.
fn unknown_entries(f: &Function, op: OpId) -> Option<Vec<usize>> {
    let concat = f.producer(read(f, op, "begin")?).filter(|&p| f.op(p).kind() == "concat")?;
    let (mut at, mut unknown) = (0, vec![]);
    for part in f.op(concat).param("values") {
        let n = f.operand_type(part).as_tensor()?.volume()? as usize;
        if f.operand_literal(part).is_none() {
            unknown.extend(at..at + n);
        }
        at += n;
    }
    Some(unknown)
}

/// The largest `begin` on each axis.
fn bounds(f: &Function, op: OpId) -> Option<Vec<i64>> {
    read(f, op, "end")?;
    let whole = shape(f, read(f, op, "x")?)?;
    let squeezed = f.ints(op, "squeeze_mask").unwrap_or_else(|| vec![0; whole.len()]);
    let mut update = shape(f, read(f, op, "update")?)?.into_iter();
    let size = |&s: &i64| if s != 0 { Some(1) } else { update.next() };
    let sizes: Vec<u64> = squeezed.iter().map(size).collect::<Option<_>>()?;
    Some(whole.iter().zip(sizes).map(|(n, q)| (n - q) as i64).collect())
}

/// The row of axis 0 that is written.
fn layer(f: &Function, op: OpId) -> Option<i64> {
    let concat = f.producer(read(f, op, "begin")?).filter(|&p| f.op(p).kind() == "concat")?;
    f.operand_ints(f.op(concat).param("values").first()?)?.first().copied()
}

/// Moves a box by so much, or as far as there is room.
fn shifted(f: &mut Function, op: OpId, by: Vec<i64>) {
    let bounds = bounds(f, op).unwrap();
    let (begin, end) = (read(f, op, "begin").unwrap(), read(f, op, "end").unwrap());
    let ty = TensorType::new(DType::I32, [Dim::known(by.len() as u64)]);
    let mut patch = Patch::before(op);
    let mut new = |kind: &str, x: Input, y: Input| patch.op(kind, "planted", [("x", x), ("y", y)], ty.clone());
    let next = new("add", begin.into(), Literal::ints(&by).into());
    let next = new("minimum", next.into(), Literal::ints(&bounds).into());
    let moved = new("sub", next.clone().into(), begin.into());
    let last = new("add", end.into(), moved.into());
    let mut t = Transaction::begin(f);
    let [next, last] = t.insert_many(&patch, &[next, last]).unwrap()[..] else { panic!("two values") };
    t.set_param(op, "begin", vec![Operand::Value(next)]).unwrap();
    t.set_param(op, "end", vec![Operand::Value(last)]).unwrap();
    t.commit().unwrap();
}

/// The update before this one, of the same type.
fn update_before(f: &Function, op: OpId) -> Option<ValueId> {
    let update = read(f, op, "update")?;
    let before = of_kind(f, "slice_update").into_iter().filter(|&u| f.comes_before(u, op));
    before.filter_map(|u| read(f, u, "update")).rfind(|&v| v != update && alike(f, v, update))
}

fn other_state(f: &Function, op: OpId) -> Option<ValueId> {
    let state = f.op(op).value("input")?;
    f.inputs().iter().copied().find(|&v| v != state && f.ty(v) == f.ty(state))
}

/// How far the rows of another layer are from those that a slice of a state takes.
fn other_rows(f: &Function, op: OpId) -> Option<i64> {
    let x = read(f, op, "x")?;
    let (begin, end) = (f.ints(op, "begin")?, f.ints(op, "end")?);
    let masked = |param| f.ints(op, param).is_some_and(|m| m[0] != 0);
    let n = *shape(f, x)?.first()? as i64;
    let (from, to) = (if masked("begin_mask") { 0 } else { begin[0] }, if masked("end_mask") { n } else { end[0] });
    let size = to - from;
    let by = if to + size <= n { size } else { -size };
    let is_layer = comes_from(f, x, &[], "read_state") && size < n && to == end[0];
    (is_layer && from + by >= 0).then_some(by)
}

fn is_stale_mask(f: &Function, v: ValueId) -> bool {
    comes_from(f, v, &["mul", "cast"], "equal")
}

/// Whether an `equal` says which keys are stale.
fn flags(f: &Function, op: OpId) -> bool {
    f.op(op).kind() == "equal" && leads_to(f, result(f, op), &["cast", "mul", "add", "concat"], "softmax")
}

/// Whether a slice takes what lies at a position out of a mask.
fn is_window(f: &Function, op: OpId) -> Option<bool> {
    let mask = f.tensor(read(f, op, "x")?)?.dtype.is_float();
    Some(mask && read(f, op, "begin").is_some() && leads_to(f, result(f, op), MIDDLE, "softmax"))
}

fn both_products(f: &Function, op: OpId) -> Option<bool> {
    let product = |v: ValueId| {
        f.producer(v).is_some_and(|p| {
            f.op(p).kind() == "matmul"
                && comes_from(f, v, &["matmul", "split", "reshape", "slice_by_index", "cast"], "softmax")
        })
    };
    Some(product(read(f, op, "x")?) && product(read(f, op, "y")?))
}

fn joins_scores(f: &Function, op: OpId) -> bool {
    let parts = f.op(op).param("values");
    let product =
        |o: &Operand| o.as_value().and_then(|v| f.producer(v)).is_some_and(|p| score_products(f).contains(&p));
    parts.len() == 2 && parts.iter().all(product)
}
