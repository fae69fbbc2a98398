//! What mistakes are made of: sites are found by what ops are for, and edits go through the public door.

use milopt::ir::{DType, Dim, Function, Literal, OpId, Operand, TensorType, Use, ValueId};
use milopt::rewrite::{Input, Patch, Ref, Transaction, is_returned};

/// A mistake that a pass could make.
#[derive(Clone, Copy)]
pub struct Fault {
    /// What goes wrong.
    pub name: &'static str,
    /// The ops at which it can.
    pub sites: fn(&Function) -> Vec<OpId>,
    /// Makes it at one of them.
    pub plant: fn(&mut Function, OpId),
}

/// Ops that move elements.
pub const VIEWS: &[&str] = &[
    "cast",
    "concat",
    "expand_dims",
    "gather",
    "identity",
    "reshape",
    "slice_by_index",
    "slice_by_size",
    "split",
    "squeeze",
    "stack",
    "tile",
    "transpose",
];

/// Ops between the products of attention and its softmax.
pub const MIDDLE: &[&str] = &[
    "add",
    "cast",
    "concat",
    "expand_dims",
    "mul",
    "real_div",
    "reshape",
    "slice_by_index",
    "slice_by_size",
    "split",
    "sub",
    "tanh",
    "tile",
    "transpose",
];

/// Ops of a kind, in order.
pub fn of_kind(f: &Function, kind: &str) -> Vec<OpId> {
    f.ops(f.body()).filter(|&op| f.op(op).kind() == kind).collect()
}

/// Ops of a kind that pass a test, in order.
pub fn sites(f: &Function, kind: &str, test: impl Fn(OpId) -> Option<bool>) -> Vec<OpId> {
    of_kind(f, kind).into_iter().filter(|&op| test(op) == Some(true)).collect()
}

/// The first result.
pub fn result(f: &Function, op: OpId) -> ValueId {
    f.op(op).results()[0]
}

/// The value bound to a parameter, unless it is constant.
pub fn read(f: &Function, op: OpId, param: &str) -> Option<ValueId> {
    f.op(op).value(param).filter(|&v| f.const_value(v).is_none())
}

/// The sizes of a value, when all are known.
pub fn shape(f: &Function, v: ValueId) -> Option<Vec<u64>> {
    f.tensor(v)?.known_shape().map(|s| s.to_vec())
}

/// Whether a value is the result of an op of kind `goal`, or comes from one through ops of the kinds `through`.
pub fn comes_from(f: &Function, v: ValueId, through: &[&str], goal: &str) -> bool {
    let mut seen = vec![];
    let mut queue = vec![v];
    while let Some(v) = queue.pop() {
        let Some(op) = f.producer(v).filter(|op| !seen.contains(op)) else { continue };
        seen.push(op);
        match f.op(op).kind().as_str() {
            kind if kind == goal => return true,
            kind if through.contains(&kind) => queue.extend(f.op(op).operands().iter().filter_map(Operand::as_value)),
            _ => {}
        }
    }
    false
}

/// Whether a value is read by an op of kind `goal`, or something that ops of the kinds `through` make of it is.
pub fn leads_to(f: &Function, v: ValueId, through: &[&str], goal: &str) -> bool {
    let mut seen = vec![];
    let mut queue = f.users(v).to_vec();
    while let Some(op) = queue.pop() {
        if seen.contains(&op) {
            continue;
        }
        seen.push(op);
        match f.op(op).kind().as_str() {
            kind if kind == goal => return true,
            kind if through.contains(&kind) => {
                queue.extend(f.op(op).results().iter().flat_map(|&r| f.users(r)));
            }
            _ => {}
        }
    }
    false
}

/// Whether both values are tensors of the same type, with no unknown size.
pub fn alike(f: &Function, a: ValueId, b: ValueId) -> bool {
    shape(f, a).is_some() && f.ty(a) == f.ty(b)
}

/// Whether the result of an op may be replaced: the function does not return it.
pub fn is_inside(f: &Function, op: OpId) -> bool {
    f.op(op).results().iter().all(|&v| !is_returned(f, v))
}

/// New ops on the way of a value.
pub struct Chain<'f> {
    f: &'f Function,
    patch: Patch,
    /// The value that the last one gives.
    pub at: Ref,
}

impl Chain<'_> {
    /// The type of the value.
    pub fn ty(&self) -> TensorType {
        self.patch.type_of(self.f, &self.at).unwrap()
    }

    /// The sizes of the value.
    pub fn shape(&self) -> Vec<u64> {
        self.ty().known_shape().unwrap().to_vec()
    }

    /// The value through an op that keeps its type; it is `x`.
    pub fn op(self, kind: &str, more: Vec<(&str, Input)>) -> Self {
        let ty = self.ty();
        self.op_of(kind, more, ty)
    }

    /// The value through an op; it is `x`.
    pub fn op_of(mut self, kind: &str, mut inputs: Vec<(&str, Input)>, ty: TensorType) -> Self {
        inputs.push(("x", self.at.into()));
        self.at = self.patch.op(kind, "planted", inputs, ty);
        self
    }

    /// Reshaped.
    pub fn reshape(mut self, shape: &[u64]) -> Self {
        let dims: Vec<Dim> = shape.iter().map(|&n| Dim::known(n)).collect();
        self.at = self.patch.reshape(self.f, self.at, "planted", &dims).unwrap();
        self
    }

    /// With two axes exchanged.
    pub fn exchange(mut self, a: usize, b: usize) -> Self {
        let mut perm: Vec<usize> = (0..self.ty().rank()).collect();
        perm.swap(a, b);
        self.at = self.patch.transpose(self.f, self.at, "planted", &perm).unwrap();
        self
    }

    /// In reversed order along an axis.
    pub fn reversed(self, axis: usize) -> Self {
        self.op("reverse", vec![("axes", Literal::ints(&[axis as i64]).into())])
    }

    /// The part of an axis.
    pub fn cut(self, axis: usize, begin: u64, size: u64) -> Self {
        let mut ty = self.ty();
        let mut from = vec![0; ty.rank()];
        from[axis] = begin as i64;
        ty.shape[axis] = Dim::known(size);
        let sizes: Vec<i64> = ty.known_shape().unwrap().iter().map(|&n| n as i64).collect();
        let inputs = vec![("begin", Literal::ints(&from).into()), ("size", Literal::ints(&sizes).into())];
        self.op_of("slice_by_size", inputs, ty)
    }

    /// The last entry of an axis before all others.
    pub fn rolled(mut self, axis: usize) -> Self {
        let (whole, n) = (self.at.clone(), self.shape()[axis]);
        let ty = self.ty();
        self = self.cut(axis, n - 1, 1);
        let last = std::mem::replace(&mut self.at, whole);
        self = self.cut(axis, 0, n - 1);
        let inputs = [
            ("values", Input::Many(vec![last.into(), self.at.clone().into()])),
            ("axis", Literal::int(axis as i64).into()),
            ("interleave", Literal::bool(false).into()),
        ];
        self.at = self.patch.op("concat", "planted", inputs, ty);
        self
    }

    /// Axis `axis`, of `outer` times `inner` entries, counted the other way round.
    pub fn recounted(self, axis: usize, outer: u64) -> Self {
        let shape = self.shape();
        let mut apart = shape.clone();
        apart.splice(axis..=axis, [outer, shape[axis] / outer]);
        self.reshape(&apart).exchange(axis, axis + 1).reshape(&shape)
    }

    /// In another type and back.
    pub fn through(self, dtype: DType) -> Self {
        let own = self.ty();
        let cast = |to: DType| vec![("dtype", Literal::string(to.name()).into())];
        let narrow = TensorType::new(dtype, own.shape.iter().cloned());
        self.op_of("cast", cast(dtype), narrow).op_of("cast", cast(own.dtype), own)
    }
}

/// The new ops before an op that `make` puts behind a value.
fn chain(f: &Function, before: OpId, v: ValueId, make: impl FnOnce(Chain) -> Chain) -> (Patch, Ref) {
    let made = make(Chain { f, patch: Patch::before(before), at: v.into() });
    (made.patch, made.at)
}

/// What an op reads through a parameter becomes something else.
pub fn operand(f: &mut Function, op: OpId, param: &str, make: impl FnOnce(Chain) -> Chain) {
    let (patch, at) = chain(f, op, f.op(op).value(param).unwrap(), make);
    let mut t = Transaction::begin(f);
    let new = t.insert(&patch, &at).unwrap();
    t.set_param(op, param, vec![Operand::Value(new)]).unwrap();
    t.commit().unwrap();
}

/// What all readers of an op's first result read becomes something else.
pub fn after(f: &mut Function, op: OpId, make: impl FnOnce(Chain) -> Chain) {
    replaced(f, op, result(f, op), make);
}

/// What all readers of an op's first result read becomes something made of another value.
pub fn replaced(f: &mut Function, op: OpId, by: ValueId, make: impl FnOnce(Chain) -> Chain) {
    let old = result(f, op);
    let readers = f.users(old);
    let first = f.ops(f.body()).find(|op| readers.contains(op)).unwrap();
    let uses: Vec<Use> = f.value(old).uses().to_vec();
    let (patch, at) = chain(f, first, by, make);
    let mut t = Transaction::begin(f);
    let new = t.insert(&patch, &at).unwrap();
    for u in uses {
        t.set_use(u, new).unwrap();
    }
    t.erase_dead([old]);
    t.commit().unwrap();
}

/// Readers of an op's first result read another value, and the op is gone.
pub fn bypassed(f: &mut Function, op: OpId, by: ValueId) {
    replaced(f, op, by, |c| c);
}

/// A parameter is another value.
pub fn rebound(f: &mut Function, op: OpId, param: &str, to: ValueId) {
    let mut t = Transaction::begin(f);
    t.set_param(op, param, vec![Operand::Value(to)]).unwrap();
    t.commit().unwrap();
}

/// A parameter is another constant.
pub fn constant(f: &mut Function, op: OpId, param: &str, literal: Literal) {
    let mut t = Transaction::begin(f);
    t.set_const(op, param, literal).unwrap();
    t.commit().unwrap();
}

/// Two parameters are each other's.
pub fn exchanged(f: &mut Function, op: OpId, a: &str, b: &str) {
    let [x, y] = [a, b].map(|p| f.op(op).param(p).to_vec());
    let mut t = Transaction::begin(f);
    t.set_param(op, a, y).unwrap();
    t.set_param(op, b, x).unwrap();
    t.commit().unwrap();
}

/// An op becomes one of another kind, which has the same operands but for some.
pub fn turned_into(f: &mut Function, op: OpId, kind: &str, without: &[&str]) {
    let kept = |name: &str| name != "x" && !without.contains(&name);
    let inputs: Vec<(String, Input)> = f
        .op(op)
        .params()
        .filter(|(name, _)| kept(name))
        .map(|(name, operands)| (name.to_string(), Input::like(f, &operands[0])))
        .collect();
    let (x, ty) = (f.op(op).value("x").unwrap(), f.tensor(result(f, op)).unwrap().clone());
    replaced(f, op, x, |c| c.op_of(kind, inputs.iter().map(|(n, i)| (n.as_str(), i.clone())).collect(), ty));
}
