//! The rest of a decoder: norms, rotary embeddings, projections, types.

use milopt::ir::{DType, Function, Literal, OpId, ValueId};
use milopt::rewrite::{Input, Patch};

use super::attention::mask_param;
use super::edit::*;

pub const FAULTS: &[Fault] = &[
    Fault {
        name: "a norm with another epsilon",
        sites: |f| {
            sites(f, "add", |op| {
                let epsilon = *f.const_param(op, "y")?.to_floats(&**f.weights()).ok()?.first()?;
                Some(epsilon < 1e-3 && f.users(result(f, op)).iter().any(|&u| f.op(u).kind() == "rsqrt"))
            })
        },
        plant: |f, op| {
            let dtype = f.tensor(result(f, op)).unwrap().dtype;
            constant(f, op, "y", Literal::floats(dtype, &[], &[1e-3]));
        },
    },
    Fault {
        name: "a sum for a mean",
        sites: |f| of_kind(f, "reduce_mean"),
        plant: |f, op| turned_into(f, op, "reduce_sum", &[]),
    },
    Fault {
        name: "a mean without squares",
        sites: |f| sites(f, "pow", |op| Some(f.users(result(f, op)).iter().all(|&u| f.op(u).kind() == "reduce_mean"))),
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "a root for its reciprocal",
        sites: |f| of_kind(f, "rsqrt"),
        plant: |f, op| turned_into(f, op, "sqrt", &["epsilon"]),
    },
    Fault {
        name: "cosine for sine",
        sites: |f| sites(f, "mul", |op| Some(cosine(f, op).is_some())),
        plant: |f, op| rebound(f, op, "y", cosine(f, op).unwrap()),
    },
    Fault {
        name: "a rotated half without its sign",
        sites: |f| sites(f, "mul", |op| Some(f.const_param(op, "y")?.to_floats(&**f.weights()).ok()? == [-1.0])),
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "bounds of a half one off",
        sites: |f| {
            sites(f, "slice_by_index", |op| {
                let (x, y) = (shape(f, read(f, op, "x")?)?, shape(f, result(f, op))?);
                let halved = x.len() == y.len() && *x.last()? == 2 * y.last()? && *y.last()? > 1;
                Some(halved && f.ints(op, "begin").is_some() && leads_to(f, result(f, op), &["mul"], "concat"))
            })
        },
        plant: |f, op| {
            let size = shape(f, result(f, op)).unwrap();
            let last = size.len() - 1;
            let begin = f.ints(op, "begin").unwrap()[last] as u64;
            let begin = if begin == 0 { 1 } else { begin - 1 };
            replaced(f, op, read(f, op, "x").unwrap(), |c| c.cut(last, begin, size[last]));
        },
    },
    Fault {
        name: "the next position rotated to",
        sites: |f| {
            sites(f, "cast", |op| {
                let position = f.tensor(read(f, op, "x")?)?.dtype.is_int() && f.tensor(result(f, op))?.dtype.is_float();
                Some(
                    position && leads_to(f, result(f, op), &["matmul", "transpose", "concat", "reshape", "mul"], "cos"),
                )
            })
        },
        plant: |f, op| operand(f, op, "x", |c| c.op("add", vec![("y", Literal::int(1).into())])),
    },
    Fault {
        name: "frequencies that are doubled",
        sites: |f| {
            sites(f, "matmul", |op| Some(f.const_param(op, "x").is_some() && shape(f, f.op(op).value("x")?).is_some()))
        },
        plant: |f, op| {
            let old = f.const_param(op, "x").unwrap().to_floats(&**f.weights()).unwrap();
            let x = f.op(op).value("x").unwrap();
            let doubled: Vec<f64> = old.iter().map(|x| 2.0 * x).collect();
            let literal = Literal::floats(f.tensor(x).unwrap().dtype, &shape(f, x).unwrap(), &doubled);
            constant(f, op, "x", literal);
        },
    },
    Fault {
        name: "a branch that is not added",
        sites: |f| sites(f, "add", |op| Some(is_residual(f, op)? && is_inside(f, op))),
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "an output before the last addition",
        sites: |f| sites(f, "add", |op| Some(is_residual(f, op)? && !is_inside(f, op))),
        plant: |f, op| {
            let mut patch = Patch::before(op);
            let ty = f.tensor(result(f, op)).unwrap().clone();
            let early = patch.op("identity", "planted", [("x", read(f, op, "y").unwrap())], ty);
            patch.replace(result(f, op), early);
            patch.apply(f).unwrap();
        },
    },
    Fault {
        name: "the last norm skipped",
        sites: |f| sites(f, "linear", |op| Some(!is_inside(f, op) && unscaled(f, op).is_some())),
        plant: |f, op| rebound(f, op, "x", unscaled(f, op).unwrap()),
    },
    Fault {
        name: "no activation",
        sites: |f| [of_kind(f, "silu"), of_kind(f, "gelu")].concat(),
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "a gelu of another mode",
        sites: |f| of_kind(f, "gelu"),
        plant: |f, op| constant(f, op, "mode", Literal::string("SIGMOID_APPROXIMATION")),
    },
    Fault {
        name: "gates for what they let through",
        sites: |f| sites(f, "mul", |op| Some(gate(f, op).is_some())),
        plant: |f, op| {
            let activation = gate(f, op).unwrap();
            let (gate, up) = (read(f, activation, "x").unwrap(), read(f, op, "y").unwrap());
            // The other projection comes between.
            let inputs: Vec<(String, Input)> = f
                .op(activation)
                .params()
                .filter(|(n, _)| *n != "x")
                .map(|(n, o)| (n.to_string(), Input::like(f, &o[0])))
                .collect();
            let kind = f.op(activation).kind().clone();
            rebound(f, op, "x", gate);
            operand(f, op, "y", |c| {
                assert_eq!(c.at, up.into());
                c.op(&kind, inputs.iter().map(|(n, i)| (n.as_str(), i.clone())).collect())
            });
        },
    },
    Fault {
        name: "the weight of another layer",
        sites: |f| sites(f, "linear", |op| Some(weight_before(f, op).is_some())),
        plant: |f, op| rebound(f, op, "weight", weight_before(f, op).unwrap()),
    },
    Fault {
        name: "the weight of a norm lost",
        sites: |f| {
            sites(f, "mul", |op| Some(f.tensor(f.op(op).value("y")?)?.rank() > 0 && f.const_param(op, "y").is_some()))
        },
        plant: |f, op| bypassed(f, op, read(f, op, "x").unwrap()),
    },
    Fault {
        name: "products in fp16 for fp32",
        sites: |f| sites(f, "matmul", |op| Some(is_wide(f, result(f, op)))),
        plant: |f, op| after(f, op, |c| c.through(DType::F16)),
    },
    Fault {
        name: "masked scores in fp16 for fp32",
        sites: |f| sites(f, "softmax", |op| Some(is_wide(f, read(f, op, "x")?))),
        plant: |f, op| operand(f, op, "x", |c| c.through(DType::F16)),
    },
    Fault {
        name: "a mask that went through a bool",
        sites: |f| {
            sites(f, "add", |op| {
                Some(
                    leads_to(f, result(f, op), MIDDLE, "softmax")
                        && mask_param(f, op).is_some()
                        && shape(f, result(f, op)).is_some(),
                )
            })
        },
        plant: |f, op| operand(f, op, mask_param(f, op).unwrap(), |c| c.through(DType::Bool)),
    },
    Fault {
        name: "scores that went through integers",
        sites: |f| sites(f, "softmax", |op| Some(shape(f, read(f, op, "x")?).is_some())),
        plant: |f, op| operand(f, op, "x", |c| c.through(DType::I32)),
    },
];

fn is_wide(f: &Function, v: ValueId) -> bool {
    f.tensor(v).is_some_and(|t| t.dtype == DType::F32) && shape(f, v).is_some()
}

/// The cosine that an op could multiply by where it multiplies by a sine.
fn cosine(f: &Function, op: OpId) -> Option<ValueId> {
    let y = read(f, op, "y")?;
    let of = |v, goal| comes_from(f, v, &["expand_dims", "reshape", "transpose"], goal);
    let before = of_kind(f, "mul").into_iter().filter(|&m| f.comes_before(m, op));
    let mut cosines = before.filter_map(|m| read(f, m, "y")).filter(|&v| of(v, "cos") && f.ty(v) == f.ty(y));
    cosines.next_back().filter(|_| of(y, "sin"))
}

/// Whether a branch, the second operand, is added to what goes round it.
fn is_residual(f: &Function, op: OpId) -> Option<bool> {
    let (x, y) = (read(f, op, "x")?, read(f, op, "y")?);
    let branch = f.producer(y).is_some_and(|p| ["linear", "mul"].contains(&f.op(p).kind().as_str()));
    Some(branch && f.tensor(x)?.rank() == 3 && f.ty(x) == f.ty(result(f, op)) && f.ty(y) == f.ty(x))
}

/// What the norm before a projection scales.
fn unscaled(f: &Function, op: OpId) -> Option<ValueId> {
    let mul = f.producer(read(f, op, "x")?).filter(|&p| f.op(p).kind() == "mul")?;
    let x = read(f, mul, "x")?;
    (f.ty(x) == f.ty(result(f, mul))).then_some(x)
}

/// The activation that is multiplied by a projection.
fn gate(f: &Function, op: OpId) -> Option<OpId> {
    let activation = f.producer(read(f, op, "x")?).filter(|&p| ["silu", "gelu"].contains(&f.op(p).kind().as_str()))?;
    let up = f.producer(read(f, op, "y")?).filter(|&p| f.op(p).kind() == "linear")?;
    (f.ty(result(f, activation)) == f.ty(result(f, up))).then_some(activation)
}

/// Another weight of the same type.
fn weight_before(f: &Function, op: OpId) -> Option<ValueId> {
    let weight = f.op(op).value("weight")?;
    let before = of_kind(f, "linear").into_iter().filter(|&l| f.comes_before(l, op));
    before
        .filter_map(|l| f.op(l).value("weight"))
        .find(|&w| f.const_literal(w) != f.const_literal(weight) && f.ty(w) == f.ty(weight))
}
