//! Elements in the wrong place: heads, rows, batches and axes.

use milopt::ir::{DType, Function, Literal, OpId, Operand, ValueId};
use milopt::rewrite::Transaction;

use super::edit::*;

pub const FAULTS: &[Fault] = &[
    Fault {
        name: "queries h mod n_kv_heads, not h div group",
        sites: |f| score_products(f).into_iter().filter(|&op| has_groups(f, read(f, op, "x"))).collect(),
        plant: |f, op| operand(f, op, "x", interleaved),
    },
    Fault {
        name: "results h mod n_kv_heads, not h div group",
        sites: |f| value_products(f).into_iter().filter(|&op| has_groups(f, Some(result(f, op)))).collect(),
        plant: |f, op| after(f, op, interleaved),
    },
    Fault {
        name: "heads of keys reversed",
        sites: |f| score_products(f).into_iter().filter(|&op| axis(f, read(f, op, "y"), 1) > 1).collect(),
        plant: |f, op| operand(f, op, "y", |c| c.reversed(1)),
    },
    Fault {
        name: "heads of values reversed",
        sites: |f| value_products(f).into_iter().filter(|&op| axis(f, read(f, op, "y"), 1) > 1).collect(),
        plant: |f, op| operand(f, op, "y", |c| c.reversed(1)),
    },
    Fault {
        name: "batches exchanged",
        sites: |f| score_products(f).into_iter().filter(|&op| axis(f, read(f, op, "x"), 0) > 1).collect(),
        plant: |f, op| operand(f, op, "x", |c| c.reversed(0)),
    },
    Fault {
        name: "rows unfolded in the wrong order",
        sites: |f| sites(f, "reshape", |op| Some(unfolding(f, read(f, op, "x")?, result(f, op))? && is_inside(f, op))),
        plant: |f, op| {
            let group = axis(f, Some(result(f, op)), 1) / axis(f, read(f, op, "x"), 1);
            operand(f, op, "x", |c| c.recounted(2, group));
        },
    },
    Fault {
        name: "rows folded in the wrong order",
        sites: |f| sites(f, "reshape", |op| Some(unfolding(f, result(f, op), read(f, op, "x")?)? && is_inside(f, op))),
        plant: |f, op| {
            let group = axis(f, read(f, op, "x"), 1) / axis(f, Some(result(f, op)), 1);
            after(f, op, |c| c.recounted(2, group));
        },
    },
    Fault {
        name: "heads merged in the wrong order",
        sites: |f| {
            sites(f, "reshape", |op| {
                let (x, y) = (shape(f, read(f, op, "x")?)?, shape(f, result(f, op))?);
                let merged = x.len() > 2 && x[x.len() - 2] > 1 && y.last()?.is_multiple_of(x[x.len() - 2] * x.last()?);
                Some(merged && f.users(result(f, op)).iter().all(|&u| f.op(u).kind() == "linear"))
            })
        },
        plant: |f, op| {
            operand(f, op, "x", |c| {
                let shape = c.shape();
                c.exchange(shape.len() - 2, shape.len() - 1).reshape(&shape)
            })
        },
    },
    Fault {
        name: "a transpose done as a reshape",
        sites: |f| sites(f, "transpose", |op| Some(moves(f, op)? && is_inside(f, op))),
        plant: |f, op| {
            let shape = shape(f, result(f, op)).unwrap();
            replaced(f, op, read(f, op, "x").unwrap(), |c| c.reshape(&shape));
        },
    },
    Fault {
        name: "a transpose dropped where sizes are equal",
        sites: |f| {
            sites(f, "transpose", |op| {
                Some(moves(f, op)? && alike(f, read(f, op, "x")?, result(f, op)) && is_inside(f, op))
            })
        },
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "axes of equal size exchanged by a reshape",
        sites: |f| sites(f, "reshape", |op| Some(equal_axes(f, result(f, op)).is_some() && is_inside(f, op))),
        plant: |f, op| {
            let (a, b) = equal_axes(f, result(f, op)).unwrap();
            after(f, op, |c| c.exchange(a, b));
        },
    },
    Fault {
        name: "transpose_x flipped on a square operand",
        sites: |f| sites(f, "matmul", |op| square(f, read(f, op, "x")?)),
        plant: |f, op| {
            let flipped = !f.bool(op, "transpose_x").unwrap_or(false);
            constant(f, op, "transpose_x", Literal::bool(flipped));
        },
    },
    Fault {
        name: "halves interleaved, not one behind the other",
        sites: |f| sites(f, "concat", |op| halves(f, op)),
        plant: |f, op| constant(f, op, "interleave", Literal::bool(true)),
    },
    Fault {
        name: "parts joined in another order",
        sites: |f| {
            sites(f, "concat", |op| {
                Some(halves(f, op)? && f.op(op).param("values").first() != f.op(op).param("values").last())
            })
        },
        plant: reorder,
    },
    Fault { name: "layers stacked in another order", sites: |f| of_kind(f, "stack"), plant: reorder },
    Fault {
        name: "parts of a split exchanged",
        sites: |f| {
            sites(f, "split", |op| {
                let parts = f.op(op).results();
                Some(alike(f, *parts.first()?, *parts.last()?))
            })
        },
        plant: swap_ends,
    },
    Fault {
        name: "sum over another axis",
        sites: |f| {
            sites(f, "reduce_mean", |op| {
                let x = shape(f, read(f, op, "x")?)?;
                Some(f.bool(op, "keep_dims")? && f.ints(op, "axes")? == [-1] && x[x.len() - 2] > 1)
            })
        },
        plant: |f, op| {
            let mut t = Transaction::begin(f);
            t.set_const(op, "axes", Literal::ints(&[-2])).unwrap();
            retype(&mut t, op);
            t.commit().unwrap();
        },
    },
    Fault {
        name: "the row before it taken from a table",
        sites: indices,
        plant: |f, op| {
            operand(f, op, "x", |c| {
                c.op("sub", vec![("y", Literal::int(1).into())]).op("maximum", vec![("y", Literal::int(0).into())])
            })
        },
    },
    Fault {
        name: "an index that went through a bool",
        sites: indices,
        plant: |f, op| operand(f, op, "x", |c| c.through(DType::Bool)),
    },
];

/// Products of queries and keys.
pub fn score_products(f: &Function) -> Vec<OpId> {
    sites(f, "matmul", |op| {
        let (x, y) = (read(f, op, "x")?, read(f, op, "y")?);
        let scores = leads_to(f, result(f, op), MIDDLE, "softmax") && !comes_from(f, x, MIDDLE, "softmax");
        Some(scores && f.tensor(x).is_some() && f.tensor(y).is_some())
    })
}

/// Products of probabilities and values.
pub fn value_products(f: &Function) -> Vec<OpId> {
    sites(f, "matmul", |op| Some(comes_from(f, read(f, op, "x")?, VIEWS, "softmax") && read(f, op, "y").is_some()))
}

fn axis(f: &Function, v: Option<ValueId>, axis: usize) -> u64 {
    v.and_then(|v| shape(f, v)).and_then(|s| s.get(axis).copied()).unwrap_or(0)
}

fn has_groups(f: &Function, v: Option<ValueId>) -> bool {
    v.and_then(|v| shape(f, v)).is_some_and(|s| s.len() == 4 && s[1] > 1 && s[2] > 1)
}

fn interleaved(c: Chain) -> Chain {
    let [b, kv, rows, d] = c.shape()[..] else { panic!("four axes") };
    c.reshape(&[b, rows, kv, d]).exchange(1, 2)
}

/// Whether rows `[b, kv, g·q, n]` become heads `[b, kv·g, q, n]`.
fn unfolding(f: &Function, rows: ValueId, heads: ValueId) -> Option<bool> {
    let (rows, heads) = (shape(f, rows)?, shape(f, heads)?);
    let ([a, kv, r, n], [b, h, q, m]) = (four(&rows)?, four(&heads)?);
    Some(a == b && n == m && h > kv && q > 1 && kv * r == h * q)
}

fn four(shape: &[u64]) -> Option<[u64; 4]> {
    shape.try_into().ok()
}

/// Whether a transpose moves elements.
fn moves(f: &Function, op: OpId) -> Option<bool> {
    let x = shape(f, read(f, op, "x")?)?;
    let perm: Vec<usize> = f.ints(op, "perm")?.iter().map(|&p| p.rem_euclid(x.len() as i64) as usize).collect();
    let long: Vec<usize> = perm.into_iter().filter(|&p| x[p] > 1).collect();
    Some(!long.is_sorted())
}

fn equal_axes(f: &Function, v: ValueId) -> Option<(usize, usize)> {
    let shape = shape(f, v)?;
    (1..shape.len()).map(|i| (i - 1, i)).find(|&(a, b)| shape[a] == shape[b] && shape[a] > 1)
}

fn square(f: &Function, v: ValueId) -> Option<bool> {
    let shape = shape(f, v)?;
    let [.., a, b] = shape[..] else { return None };
    Some(a == b && a > 1)
}

/// Whether a concat joins parts of one type with more than one entry along its axis.
fn halves(f: &Function, op: OpId) -> Option<bool> {
    let parts: Option<Vec<ValueId>> = f.op(op).param("values").iter().map(Operand::as_value).collect();
    let parts = parts?;
    let shape = shape(f, parts[0]).filter(|s| !s.is_empty())?;
    let along = f.int(op, "axis")?.rem_euclid(shape.len() as i64) as usize;
    let float = f.tensor(parts[0])?.dtype.is_float();
    Some(float && parts.len() > 1 && shape[along] > 1 && parts.iter().all(|&v| alike(f, parts[0], v)))
}

/// The first part becomes the last and the other way round.
pub fn reorder(f: &mut Function, op: OpId) {
    let mut values = f.op(op).param("values").to_vec();
    values.reverse();
    let mut t = Transaction::begin(f);
    t.set_param(op, "values", values).unwrap();
    t.commit().unwrap();
}

/// Readers of the first result read the last, and the other way round.
fn swap_ends(f: &mut Function, op: OpId) {
    let (first, last) = (result(f, op), f.op(op).results()[f.op(op).results().len() - 1]);
    let uses = [first, last].map(|v| f.value(v).uses().to_vec());
    let mut t = Transaction::begin(f);
    uses[0].iter().for_each(|&u| t.set_use(u, last).unwrap());
    uses[1].iter().for_each(|&u| t.set_use(u, first).unwrap());
    t.commit().unwrap();
}

/// Infers types anew, from an op on as far as they change.
fn retype(t: &mut Transaction, op: OpId) {
    let mut todo = vec![op];
    while let Some(op) = todo.pop() {
        let before: Vec<_> = t.op(op).results().iter().map(|&v| t.ty(v).clone()).collect();
        t.retype(op).unwrap();
        let results = t.op(op).results().to_vec();
        for (v, ty) in results.into_iter().zip(before) {
            if *t.ty(v) != ty {
                todo.extend(t.users(v));
            }
        }
    }
}

/// Where indices into a table are made narrow.
fn indices(f: &Function) -> Vec<OpId> {
    sites(f, "cast", |op| {
        let wide = f.tensor(read(f, op, "x")?)?.dtype == DType::I32;
        let table = |u: &OpId| f.op(*u).kind() == "gather" && f.const_param(*u, "x").is_some();
        Some(wide && f.users(result(f, op)).iter().any(table))
    })
}
