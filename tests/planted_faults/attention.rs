//! Attention that adds, scales or normalises something else.

use milopt::ir::{Function, Literal, OpId, ValueId};
use milopt::rewrite::{Input, Transaction};

use super::edit::*;
use super::heads::{score_products, value_products};

pub const FAULTS: &[Fault] = &[
    Fault { name: "a scale that is missing", sites: scales, plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()) },
    Fault {
        name: "a scale that is applied twice",
        sites: scales,
        plant: |f, op| {
            let scale = Input::like(f, &f.op(op).param("y")[0]);
            after(f, op, |c| c.op("mul", vec![("y", scale)]));
        },
    },
    Fault {
        name: "a scale behind the mask",
        sites: |f| {
            let scaled = |op: &OpId| f.producer(scores_of(f, *op).unwrap()).is_some_and(|s| scales(f).contains(&s));
            masks(f).into_iter().filter(scaled).collect()
        },
        plant: |f, op| {
            let scale = f.producer(scores_of(f, op).unwrap()).unwrap();
            let (unscaled, by) = (read(f, scale, "x").unwrap(), Input::like(f, &f.op(scale).param("y")[0]));
            let mask = mask_param(f, op).unwrap();
            rebound(f, op, if mask == "y" { "x" } else { "y" }, unscaled);
            after(f, op, |c| c.op("mul", vec![("y", by)]));
        },
    },
    Fault {
        name: "a mask that is omitted",
        sites: |f| masks(f).into_iter().filter(|&op| f.ty(scores_of(f, op).unwrap()) == f.ty(result(f, op))).collect(),
        plant: |f, op| bypassed(f, op, scores_of(f, op).unwrap()),
    },
    Fault {
        name: "a mask that is added twice",
        sites: masks,
        plant: |f, op| {
            let (param, mask) = (mask_param(f, op).unwrap(), mask_of(f, op).unwrap());
            operand(f, op, param, |c| c.op("add", vec![("y", mask.into())]));
        },
    },
    Fault {
        name: "a mask that is subtracted",
        sites: |f| masks(f).into_iter().filter(|&op| mask_param(f, op) == Some("y")).collect(),
        plant: |f, op| turned_into(f, op, "sub", &[]),
    },
    Fault {
        name: "rows of the mask reversed",
        sites: |f| masks(f).into_iter().filter(|&op| rows(f, op) > 1).collect(),
        plant: |f, op| {
            operand(f, op, mask_param(f, op).unwrap(), |c| {
                let axis = c.ty().rank() - 2;
                c.reversed(axis)
            })
        },
    },
    Fault {
        name: "one row of the mask for all rows",
        sites: |f| masks(f).into_iter().filter(|&op| rows(f, op) > 1).collect(),
        plant: |f, op| {
            operand(f, op, mask_param(f, op).unwrap(), |c| {
                let axis = c.ty().rank() - 2;
                c.cut(axis, 0, 1)
            })
        },
    },
    Fault {
        name: "columns of the mask one off",
        sites: |f| masks(f).into_iter().filter(|&op| columns(f, op) > 1).collect(),
        plant: |f, op| {
            operand(f, op, mask_param(f, op).unwrap(), |c| {
                let axis = c.ty().rank() - 1;
                c.rolled(axis)
            })
        },
    },
    Fault {
        name: "rows of the mask repeated one by one",
        sites: |f| {
            sites(f, "tile", |op| {
                let reps = f.ints(op, "reps")?;
                let tall =
                    reps.len() > 1 && reps[reps.len() - 2] > 1 && shape(f, read(f, op, "x")?)?[reps.len() - 2] > 1;
                Some(tall && shape(f, result(f, op)).is_some())
            })
        },
        plant: |f, op| {
            let reps = f.ints(op, "reps").unwrap();
            after(f, op, |c| c.recounted(reps.len() - 2, reps[reps.len() - 2] as u64));
        },
    },
    Fault {
        name: "softmax over another axis",
        sites: |f| sites(f, "softmax", |op| Some(other_axis(f, op)? > 1)),
        plant: |f, op| constant(f, op, "axis", Literal::int(-2)),
    },
    Fault {
        name: "no softmax",
        sites: |f| of_kind(f, "softmax"),
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "a mask behind the softmax",
        sites: |f| {
            let direct = |op: &OpId| f.users(result(f, *op)).iter().all(|&u| f.op(u).kind() == "softmax");
            let same = |op: &OpId| f.ty(scores_of(f, *op).unwrap()) == f.ty(result(f, *op));
            masks(f).into_iter().filter(direct).filter(same).collect()
        },
        plant: |f, op| {
            let (mask, scores, softmax) =
                (mask_of(f, op).unwrap(), scores_of(f, op).unwrap(), f.users(result(f, op))[0]);
            after(f, softmax, |c| c.op("add", vec![("y", mask.into())]));
            bypassed(f, op, scores);
        },
    },
    Fault {
        name: "keys for values",
        sites: |f| value_products(f).into_iter().filter(|&op| keys_before(f, op).is_some()).collect(),
        plant: |f, op| rebound(f, op, "y", keys_before(f, op).unwrap()),
    },
    Fault {
        name: "values for keys",
        sites: |f| score_products(f).into_iter().filter(|&op| values_before(f, op).is_some()).collect(),
        plant: |f, op| rebound(f, op, "y", values_before(f, op).unwrap()),
    },
    Fault {
        name: "keys of another layer",
        sites: |f| score_products(f).into_iter().filter(|&op| other_keys(f, op).is_some()).collect(),
        plant: |f, op| rebound(f, op, "y", other_keys(f, op).unwrap()),
    },
    Fault {
        name: "a softcap without its tanh",
        sites: |f| sites(f, "tanh", |op| Some(leads_to(f, result(f, op), MIDDLE, "softmax"))),
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "the window one column on",
        sites: |f| {
            sites(f, "slice_by_index", |op| {
                let (x, y) = (shape(f, read(f, op, "x")?)?, shape(f, result(f, op))?);
                let cut =
                    x.len() == y.len() && x.last()? == &(y.last()? + 1) && f.ints(op, "begin")?.last() == Some(&0);
                Some(cut && comes_from(f, read(f, op, "x")?, &[], "softmax"))
            })
        },
        plant: |f, op| {
            let last = f.tensor(result(f, op)).unwrap().rank() - 1;
            let whole = read(f, op, "x").unwrap();
            let size = shape(f, result(f, op)).unwrap()[last];
            replaced(f, op, whole, |c| c.cut(last, 1, size));
        },
    },
    Fault {
        name: "fused attention without its mask",
        sites: |f| sites(f, ATTENTION, |op| Some(f.has_param(op, "attn_mask"))),
        plant: |f, op| {
            let mut t = Transaction::begin(f);
            t.set_param(op, "attn_mask", vec![]).unwrap();
            t.commit().unwrap();
        },
    },
    Fault {
        name: "fused attention with keys for values",
        sites: |f| sites(f, ATTENTION, |op| Some(alike(f, read(f, op, "key")?, read(f, op, "value")?))),
        plant: |f, op| exchanged(f, op, "key", "value"),
    },
    Fault {
        name: "fused attention of queries that are scaled",
        sites: |f| sites(f, ATTENTION, |op| Some(shape(f, read(f, op, "query")?).is_some())),
        plant: |f, op| {
            operand(f, op, "query", |c| {
                let scale = Literal::floats(c.ty().dtype, &[], &[0.25]);
                c.op("mul", vec![("y", scale.into())])
            })
        },
    },
    Fault {
        name: "fused attention with heads of values reversed",
        sites: |f| sites(f, ATTENTION, |op| Some(shape(f, read(f, op, "value")?)?[1] > 1)),
        plant: |f, op| operand(f, op, "value", |c| c.reversed(1)),
    },
];

const ATTENTION: &str = "scaled_dot_product_attention";

/// Multiplications of scores by a number.
fn scales(f: &Function) -> Vec<OpId> {
    sites(f, "mul", |op| {
        let scores = comes_from(f, read(f, op, "x")?, MIDDLE, "matmul");
        let number = f.tensor(f.op(op).value("y")?)?.rank() == 0;
        Some(scores && number && f.const_param(op, "y").is_some() && leads_to(f, result(f, op), MIDDLE, "softmax"))
    })
}

/// Where a mask is added to scores.
pub fn masks(f: &Function) -> Vec<OpId> {
    sites(f, "add", |op| Some(mask_param(f, op).is_some() && leads_to(f, result(f, op), MIDDLE, "softmax")))
}

/// The operand of an `add` that is no scores, when the other one is.
pub fn mask_param(f: &Function, op: OpId) -> Option<&'static str> {
    let [x, y] = [read(f, op, "x")?, read(f, op, "y")?].map(|v| comes_from(f, v, MIDDLE, "matmul"));
    match (x, y) {
        (true, false) => Some("y"),
        (false, true) => Some("x"),
        _ => None,
    }
}

fn mask_of(f: &Function, op: OpId) -> Option<ValueId> {
    read(f, op, mask_param(f, op)?)
}

fn scores_of(f: &Function, op: OpId) -> Option<ValueId> {
    read(f, op, if mask_param(f, op)? == "y" { "x" } else { "y" })
}

/// Rows of the mask, 0 when a size is unknown.
fn rows(f: &Function, op: OpId) -> u64 {
    let shape = mask_of(f, op).and_then(|v| shape(f, v)).unwrap_or_default();
    if let [.., rows, _] = shape[..] { rows } else { 0 }
}

/// Columns of the mask, 0 when a size is unknown.
fn columns(f: &Function, op: OpId) -> u64 {
    mask_of(f, op).and_then(|v| shape(f, v)?.last().copied()).unwrap_or(0)
}

/// The size of the last axis but one, where softmax goes over the last.
fn other_axis(f: &Function, op: OpId) -> Option<u64> {
    let rank = f.tensor(result(f, op))?.rank() as i64;
    let last = f.int(op, "axis")?.rem_euclid(rank) == rank - 1;
    f.tensor(result(f, op))?.shape.iter().rev().nth(1)?.as_known().filter(|_| last)
}

fn same_type<'f>(f: &'f Function, y: ValueId) -> impl Fn(&ValueId) -> bool + 'f {
    move |v| *v != y && alike(f, *v, y)
}

/// The keys of the last product before this one that are of the type of its values.
fn keys_before(f: &Function, op: OpId) -> Option<ValueId> {
    let y = read(f, op, "y")?;
    let before = score_products(f).into_iter().filter(|&s| f.comes_before(s, op));
    before.filter_map(|s| read(f, s, "y")).rfind(same_type(f, y))
}

/// Values of a later product that are there before this one and of the type of its keys.
fn values_before(f: &Function, op: OpId) -> Option<ValueId> {
    let y = read(f, op, "y")?;
    let there = |v: &ValueId| f.producer(*v).is_some_and(|p| f.comes_before(p, op));
    let after = value_products(f).into_iter().filter(|&s| f.comes_before(op, s));
    after.filter_map(|s| read(f, s, "y")).filter(there).find(same_type(f, y))
}

fn other_keys(f: &Function, op: OpId) -> Option<ValueId> {
    let y = read(f, op, "y")?;
    let before = score_products(f).into_iter().filter(|&s| f.comes_before(s, op));
    let other_queries = |s: &OpId| read(f, *s, "x") != read(f, op, "x");
    before.filter(other_queries).filter_map(|s| read(f, s, "y")).find(same_type(f, y))
}
