//! Small integer vectors that hold sizes, traced to the shapes and constants they are put together from.

use crate::ir::{Dim, Function, OpId, Operand};
use crate::opset::context;

use super::slice::axes;

/// One element of an integer vector.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Entry {
    /// This number.
    Int(i64),
    /// A size that is not a number.
    Size(Dim),
    /// Not known.
    Unknown,
}

impl Entry {
    fn of(d: &Dim) -> Entry {
        match d.as_known().map(i64::try_from) {
            Some(Ok(n)) => Entry::Int(n),
            Some(Err(_)) => Entry::Unknown,
            None => Entry::Size(d.clone()),
        }
    }

    fn times(&self, other: &Entry) -> Entry {
        let dim = |e: &Entry| match e {
            Entry::Int(n) => u64::try_from(*n).ok().map(Dim::known),
            Entry::Size(d) => Some(d.clone()),
            Entry::Unknown => None,
        };
        match (dim(self), dim(other)) {
            (Some(a), Some(b)) => a.checked_mul(&b).map_or(Entry::Unknown, |d| Entry::of(&d)),
            _ => Entry::Unknown,
        }
    }
}

/// Ops that one question may visit, and elements that one answer may have.
const BUDGET: usize = 256;

/// The elements of an operand in row-major order; `None` when nothing is known, not even how many there are.
pub(super) fn trace(f: &Function, operand: &Operand) -> Option<Vec<Entry>> {
    visit(f, operand, &mut BUDGET.clone())
}

fn visit(f: &Function, operand: &Operand, fuel: &mut usize) -> Option<Vec<Entry>> {
    *fuel = fuel.checked_sub(1)?;
    if let Some(literal) = f.operand_literal(operand) {
        let count = literal.ty.as_tensor()?.volume()?;
        let ints = (count <= BUDGET as u64).then(|| f.operand_ints(operand)).flatten()?;
        return Some(ints.into_iter().map(Entry::Int).collect());
    }
    let v = operand.as_value()?;
    let op = f.producer(v)?;
    let x = f.op(op).param("x").first();
    let entries = match f.op(op).kind().as_str() {
        "shape" => f.operand_type(x?).as_tensor()?.shape.iter().map(Entry::of).collect(),
        "cast" if f.tensor(v)?.dtype.is_int() && f.operand_type(x?).as_tensor()?.dtype.is_int() => visit(f, x?, fuel)?,
        "identity" | "expand_dims" | "squeeze" | "reshape" => visit(f, x?, fuel)?,
        "gather" => pick(visit(f, x?, fuel)?, f, op)?,
        "concat" if f.tensor(v)?.rank() == 1 && f.bool(op, "interleave") != Some(true) => {
            let parts = f.op(op).param("values").iter().map(|o| visit(f, o, fuel));
            parts.collect::<Option<Vec<_>>>()?.concat()
        }
        "slice_by_index" => cut(visit(f, x?, fuel)?, f, op)?,
        "mul" => product(visit(f, x?, fuel)?, visit(f, f.op(op).param("y").first()?, fuel)?)?,
        _ => return None,
    };
    (entries.len() <= BUDGET).then_some(entries)
}

/// Elements at constant indices of a vector.
fn pick(x: Vec<Entry>, f: &Function, op: OpId) -> Option<Vec<Entry>> {
    let vector = f.operand_type(f.op(op).param("x").first()?).as_tensor()?.rank() == 1;
    let indices = f.ints(op, "indices").filter(|_| vector)?;
    let at = |i: i64| usize::try_from(i).ok().and_then(|i| x.get(i)).cloned();
    indices.into_iter().map(at).collect()
}

/// A static slice of a vector.
fn cut(x: Vec<Entry>, f: &Function, op: OpId) -> Option<Vec<Entry>> {
    let [slice] = &axes(&context(f, op)?, &[Some(Dim::known(x.len() as u64))]).ok()?[..] else { return None };
    let extent = usize::try_from(slice.extent.as_ref()?.as_known()?).ok()?;
    let begin = i64::try_from(slice.begin?).ok()?;
    let at = |i: usize| {
        let i = i64::try_from(i).ok()?.checked_mul(slice.stride)?.checked_add(begin)?;
        x.get(usize::try_from(i).ok()?).cloned()
    };
    (0..extent).map(at).collect()
}

fn product(x: Vec<Entry>, y: Vec<Entry>) -> Option<Vec<Entry>> {
    match (&x[..], &y[..]) {
        (x, [one]) => Some(x.iter().map(|e| e.times(one)).collect()),
        ([one], y) => Some(y.iter().map(|e| e.times(one)).collect()),
        (x, y) if x.len() == y.len() => Some(x.iter().zip(y).map(|(a, b)| a.times(b)).collect()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::ir::{DType, Literal};
    use crate::opset::{Builder, Size};

    #[test]
    fn a_shape_put_together_from_another_keeps_its_symbols() {
        let mut b = Builder::new("main", "CoreML8");
        let q_len = Size::Range { default: 1, lo: 1, hi: None };
        let x = b.flexible_input("x", DType::F16, &[1.into(), q_len, 128.into()]).unwrap();
        let shape = b.shape(x).unwrap();
        let short = b.cast(shape, DType::I16).unwrap();
        let len = b.gather(short, 1, 0).unwrap();
        let len = b.cast(len, DType::I32).unwrap();
        let len = b.expand_dims(len, [0]).unwrap();
        let (one, heads) = (b.constant(Literal::ints(&[1])), b.constant(Literal::ints(&[8, -1])));
        let target = b.concat(&[one, len, heads], 0).unwrap();
        let y = b.reshape(x, target).unwrap();
        assert_eq!(b.function().ty(y).to_string(), "tensor<fp16, [1, s0, 8, 16]>");
        let tail = b.slice_by_index(target, [2], [0]);
        assert!(tail.is_err());
        let rows = b.slice_by_index(target, [1], [3]).unwrap();
        let twice = b.mul(rows, 2).unwrap();
        let filled = b.op("fill", [("shape", twice.into())]).unwrap();
        assert_eq!(b.function().ty(filled).to_string(), "tensor<fp32, [2*s0, 16]>");
        let sum = b.add(rows, rows).unwrap();
        let filled = b.op("fill", [("shape", sum.into())]).unwrap();
        assert_eq!(b.function().ty(filled).to_string(), "tensor<fp32, [s1, s2]>");
    }
}
