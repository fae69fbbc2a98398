//! Small functions for the unit tests.

use std::collections::BTreeMap;

use super::{InterpError, Interpreter, Mode, Tensor, Values};
use crate::ir::{DType, Function, Literal, Name, OpSpec, Operand, Place, TensorType, ValueId, ValueType};

/// One op whose parameters are constants, in a function of its own.
#[derive(Clone)]
pub(crate) struct Op {
    kind: &'static str,
    opset: &'static str,
    mode: Mode,
    results: usize,
    operands: Vec<(Name, Vec<Literal>)>,
    attributes: Vec<(Name, Literal)>,
    declared: ValueType,
}

/// What a parameter is given as.
pub(crate) struct Given(Vec<Literal>);

impl From<Tensor> for Given {
    fn from(t: Tensor) -> Given {
        Given(vec![t.to_literal().expect("a numeric tensor")])
    }
}
impl From<Vec<Tensor>> for Given {
    fn from(t: Vec<Tensor>) -> Given {
        Given(t.iter().map(|t| t.to_literal().expect("a numeric tensor")).collect())
    }
}
impl From<i64> for Given {
    fn from(n: i64) -> Given {
        Given(vec![Literal::int(n)])
    }
}
impl<const N: usize> From<[i64; N]> for Given {
    fn from(v: [i64; N]) -> Given {
        Given(vec![Literal::ints(&v)])
    }
}
impl From<bool> for Given {
    fn from(b: bool) -> Given {
        Given(vec![Literal::bool(b)])
    }
}
impl<const N: usize> From<[bool; N]> for Given {
    fn from(v: [bool; N]) -> Given {
        Given(vec![Literal::bools(&v)])
    }
}
impl From<f64> for Given {
    fn from(x: f64) -> Given {
        Given(vec![Literal::floats(DType::F32, &[], &[x])])
    }
}
impl From<&str> for Given {
    fn from(s: &str) -> Given {
        Given(vec![Literal::string(s)])
    }
}

impl Op {
    pub fn new(kind: &'static str) -> Op {
        let (operands, attributes) = (Vec::new(), Vec::new());
        Op {
            kind,
            opset: "CoreML8",
            mode: Mode::Storage,
            results: 1,
            operands,
            attributes,
            declared: ValueType::Missing,
        }
    }
    pub fn with(mut self, name: &str, given: impl Into<Given>) -> Op {
        self.operands.push((name.into(), given.into().0));
        self
    }
    pub fn attribute(mut self, name: &str, given: impl Into<Given>) -> Op {
        self.attributes.extend(given.into().0.into_iter().map(|l| (name.into(), l)));
        self
    }
    pub fn opset(mut self, opset: &'static str) -> Op {
        self.opset = opset;
        self
    }
    pub fn exact(mut self) -> Op {
        self.mode = Mode::Exact;
        self
    }
    pub fn results(mut self, n: usize) -> Op {
        self.results = n;
        self
    }
    pub fn declared(mut self, ty: TensorType) -> Op {
        self.declared = ty.into();
        self
    }

    pub fn try_all(self) -> Result<Vec<Tensor>, InterpError> {
        let mut f = Function::new("main", self.opset);
        let inputs = self.operands.into_iter();
        let inputs = inputs.map(|(n, l)| (n, l.into_iter().map(|l| Operand::Literal(f.intern(l))).collect())).collect();
        let attributes = self.attributes.into_iter().map(|(n, l)| (n, f.intern(l))).collect();
        let names: Vec<Name> = (0..self.results).map(|i| Name::from(format!("out{i:02}"))).collect();
        let results = names.iter().map(|n| (n.clone(), self.declared.clone())).collect();
        let body = f.body();
        let op = f.insert_op(Place::End(body), OpSpec { kind: self.kind.into(), inputs, attributes, results });
        for v in f.op(op).results().to_vec() {
            f.add_output(body, v);
        }
        let out = Interpreter::new(&f, self.mode)?.run(&Values::new(), &mut Values::new())?;
        Ok(names.iter().map(|n| out[n].clone()).collect())
    }
    pub fn all(self) -> Vec<Tensor> {
        self.try_all().unwrap_or_else(|e| panic!("{e}: {}", e.fault().expect("a fault")))
    }
    pub fn one(self) -> Tensor {
        self.all().remove(0)
    }
    /// The message of the fault.
    pub fn fault(self) -> String {
        let error = self.try_all().expect_err("the op fails");
        error.fault().expect("a fault").to_string()
    }
}

pub(crate) fn f32s(shape: &[usize], values: &[f64]) -> Tensor {
    Tensor::floats(DType::F32, shape, values)
}
pub(crate) fn f16s(shape: &[usize], values: &[f64]) -> Tensor {
    Tensor::floats(DType::F16, shape, values)
}
pub(crate) fn i32s(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::ints(DType::I32, shape, values)
}
/// 0, 1, 2, …
pub(crate) fn iota(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    f32s(shape, &(0..n).map(|i| i as f64).collect::<Vec<_>>())
}
/// ((7i mod 11) − 5) / 4
pub(crate) fn ramp(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    f32s(shape, &(0..n).map(|i| ((i * 7 % 11) as f64 - 5.0) / 4.0).collect::<Vec<_>>())
}
/// Reproducible numbers of mixed magnitude, whose sums depend on their order.
pub(crate) fn noise(shape: &[usize], seed: u64) -> Tensor {
    let n: usize = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5
    };
    f32s(shape, &(0..n).map(|_| next() * if next() > 0.3 { 1e3 } else { 1.0 }).collect::<Vec<_>>())
}

/// Asserts that shape and values agree to within `tolerance`.
pub(crate) fn assert_close(t: &Tensor, shape: &[usize], values: &[f64], tolerance: f64) {
    assert_eq!(t.shape(), shape);
    for (i, (a, b)) in t.to_f64s().iter().zip(values).enumerate() {
        assert!((a - b).abs() <= tolerance || a == b || (a.is_nan() && b.is_nan()), "element {i}: {a}, not {b}; {t}");
    }
    assert_eq!(t.len(), values.len());
}

/// A function built op by op.
pub(crate) struct Net {
    pub f: Function,
}

impl Net {
    pub fn new() -> Net {
        Net { f: Function::new("main", "CoreML8") }
    }
    pub fn input(&mut self, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
        self.f.add_input(name.into(), TensorType::fixed(dtype, shape).into())
    }
    pub fn state(&mut self, name: &str, dtype: DType, shape: &[u64]) -> ValueId {
        self.f.add_input(name.into(), ValueType::State(TensorType::fixed(dtype, shape)))
    }
    pub fn literal(&mut self, literal: Literal) -> Operand {
        Operand::Literal(self.f.intern(literal))
    }
    /// An op at `place` with results named as given, of no declared type.
    pub fn op(&mut self, place: Place, kind: &str, operands: &[(&str, &[Operand])], results: &[&str]) -> Vec<ValueId> {
        let spec = OpSpec {
            kind: kind.into(),
            inputs: operands.iter().map(|&(n, o)| (n.into(), o.to_vec())).collect(),
            attributes: Vec::new(),
            results: results.iter().map(|&n| (n.into(), ValueType::Missing)).collect(),
        };
        let op = self.f.insert_op(place, spec);
        self.f.op(op).results().to_vec()
    }
    pub fn end(&self) -> Place {
        Place::End(self.f.body())
    }
}

pub(crate) fn values<const N: usize>(items: [(&str, Tensor); N]) -> Values {
    items.into_iter().map(|(n, t)| (n.into(), t)).collect::<BTreeMap<_, _>>()
}
