//! Small functions for the tests of this module, written op by op with their types.

use crate::ir::{DType, Dim, Function, Literal, OpSpec, Operand, Place, SymbolRange, TensorType, ValueId, ValueType};

pub(super) struct Graph {
    pub(super) f: Function,
}

/// An operand: a value, or a constant that is written in the binding.
#[derive(Clone)]
pub(super) enum Arg {
    Value(ValueId),
    Constant(Box<Literal>),
}

impl From<ValueId> for Arg {
    fn from(v: ValueId) -> Arg {
        Arg::Value(v)
    }
}

impl From<Literal> for Arg {
    fn from(l: Literal) -> Arg {
        Arg::Constant(Box::new(l))
    }
}

impl From<i64> for Arg {
    fn from(n: i64) -> Arg {
        Literal::int(n).into()
    }
}

impl From<&[i64]> for Arg {
    fn from(n: &[i64]) -> Arg {
        Literal::ints(n).into()
    }
}

impl From<&str> for Arg {
    fn from(s: &str) -> Arg {
        Literal::string(s).into()
    }
}

pub(super) fn ty(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::fixed(dtype, shape)
}

impl Graph {
    pub(super) fn new() -> Graph {
        Graph { f: Function::new("main", "CoreML8") }
    }

    pub(super) fn input(&mut self, name: &str, ty: impl Into<ValueType>) -> ValueId {
        self.f.add_input(name.into(), ty.into())
    }

    pub(super) fn state(&mut self, name: &str, ty: TensorType) -> ValueId {
        self.input(name, ValueType::State(ty))
    }

    /// An unknown size.
    pub(super) fn dim(&mut self, lo: u64, hi: u64) -> Dim {
        Dim::unknown(self.f.add_symbol(SymbolRange { lo, hi: Some(hi) }))
    }

    /// Adds an op with one argument to each parameter.
    pub(super) fn op(&mut self, kind: &str, name: &str, ty: TensorType, args: Vec<(&str, Arg)>) -> ValueId {
        self.variadic(kind, name, ty, args.into_iter().map(|(p, a)| (p, vec![a])).collect())
    }

    pub(super) fn variadic(&mut self, kind: &str, name: &str, ty: TensorType, args: Vec<(&str, Vec<Arg>)>) -> ValueId {
        let inputs = args
            .into_iter()
            .map(|(param, args)| (param.into(), args.into_iter().map(|a| self.operand(a)).collect()))
            .collect();
        let results = vec![(name.into(), ty.into())];
        let op = self.f.insert_op(
            Place::End(self.f.body()),
            OpSpec { kind: kind.into(), inputs, attributes: Vec::new(), results },
        );
        self.f.op(op).results()[0]
    }

    pub(super) fn write_state(&mut self, state: ValueId, data: ValueId) {
        let inputs = [("input", state), ("data", data)].map(|(p, v)| (p.into(), vec![Operand::Value(v)])).to_vec();
        let spec = OpSpec { kind: "write_state".into(), inputs, attributes: Vec::new(), results: Vec::new() };
        self.f.insert_op(Place::End(self.f.body()), spec);
    }

    pub(super) fn output(&mut self, v: ValueId) {
        self.f.add_output(self.f.body(), v);
    }

    fn operand(&mut self, arg: Arg) -> Operand {
        match arg {
            Arg::Value(v) => Operand::Value(v),
            Arg::Constant(l) => Operand::Literal(self.f.intern(*l)),
        }
    }
}
