//! What a function computes, by brute force: every element of every tensor is a hash of the expression that gives it.
//!
//! Each element of an input or a state is a symbol of its own and each element of a constant its value. Ops that move
//! elements move hashes; whatever else an op does is hashed with all that the element depends on, in the order in which the
//! interpreter adds it up. So equal hashes mean equal bits for all contents of inputs and states, at the sizes at hand. Integers
//! that are known (inputs, sizes, positions) are computed. Nothing here is shared with the interpreter or with the analysis.
//!
//! With [`Arithmetic::Real`], equal hashes mean equal real numbers instead: sums are sets of terms, zeros are none, types do
//! not round, and what is masked by a number as low as [`LOW`] has no part in a softmax.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::rc::Rc;

use milopt::ir::{DType, Function, Literal, LiteralData, OpId, Operand, ValueId, ValueType};

/// The hash of an expression.
pub type Hash = u128;

/// A tensor of expressions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub elements: Rc<Vec<Hash>>,
    /// The values, where they are integers or bools that are known.
    pub numbers: Option<Rc<Vec<i64>>>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// What counts as the same expression.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arithmetic {
    /// The same operations in the same order: equal bits.
    Ordered,
    /// The same real number.
    Real,
}

/// Numbers that hide scores when they are added to them.
const LOW: f64 = -1e4;

/// A number that is at most [`LOW`], and what it was added to.
const HIDDEN: Hash = 0x4849_4444_454e_4849_4444_454e_4849_4445;

impl Arithmetic {
    /// How a result is rounded to its type.
    fn rounded(self, dtype: DType, x: Hash) -> Hash {
        match self {
            Arithmetic::Ordered => mix(word(dtype.name()), x),
            Arithmetic::Real => x,
        }
    }

    /// What an operation is called where it is an expression of its own.
    fn named(self, what: &str, dtype: DType) -> Hash {
        self.rounded(dtype, word(what))
    }

    fn float(self, dtype: DType, x: f64) -> Hash {
        match self {
            Arithmetic::Real if x == 0.0 => ZERO,
            Arithmetic::Real if x <= LOW => HIDDEN,
            _ => self.rounded(dtype, mix(word("float"), x.to_bits().into())),
        }
    }

    fn plus(self, start: Hash, a: Hash, b: Hash) -> Hash {
        match self {
            Arithmetic::Ordered => pair(start, a, b),
            Arithmetic::Real if a == HIDDEN || b == HIDDEN => HIDDEN,
            Arithmetic::Real => a.wrapping_add(b),
        }
    }

    fn times(self, start: Hash, a: Hash, b: Hash) -> Hash {
        let one = || self.float(DType::F64, 1.0);
        match self {
            Arithmetic::Real if a == ZERO || b == ZERO => ZERO,
            Arithmetic::Real if a == one() => b,
            Arithmetic::Real if b == one() => a,
            Arithmetic::Real => pair(PRODUCT, a, b),
            Arithmetic::Ordered => pair(start, a, b),
        }
    }

    fn minus(self, start: Hash, a: Hash, b: Hash) -> Hash {
        match self {
            Arithmetic::Real if a == HIDDEN => HIDDEN,
            _ => mix(mix(start, a), b),
        }
    }

    fn over(self, start: Hash, a: Hash, b: Hash) -> Hash {
        match self {
            Arithmetic::Real if a == ZERO || a == HIDDEN => a,
            Arithmetic::Real => mix(mix(word("over"), a), b),
            Arithmetic::Ordered => mix(mix(start, a), b),
        }
    }

    /// The sum of all terms.
    fn sum(self, terms: impl Iterator<Item = Hash>) -> Hash {
        match self {
            Arithmetic::Ordered => all(SUM, terms),
            Arithmetic::Real => terms.fold(ZERO, Hash::wrapping_add),
        }
    }

    /// What a row says to a softmax or a maximum.
    fn row(self, start: Hash, row: impl Iterator<Item = Hash>) -> Hash {
        match self {
            Arithmetic::Ordered => all(start, row),
            Arithmetic::Real => {
                mix(start, row.filter(|&x| x != HIDDEN).map(|x| mix(start, x)).fold(ZERO, Hash::wrapping_add))
            }
        }
    }
}

const SUM: Hash = K1;
const PRODUCT: Hash = K2;
const ZERO: Hash = 0;

/// What keeps a function from being evaluated.
pub type Refusal = String;

// Two odd constants without structure: digits of π and of e.
const K1: u128 = 0x243f_6a88_85a3_08d3_1319_8a2e_0370_7345;
const K2: u128 = 0xb7e1_5162_8aed_2a6a_bf71_5880_9cf4_f3c7;

/// One more part of an expression.
pub fn mix(h: Hash, part: Hash) -> Hash {
    let z = (h ^ part.wrapping_mul(K1)).rotate_left(53).wrapping_mul(K2);
    z ^ (z >> 59)
}

/// A word of an expression.
pub fn word(text: &str) -> Hash {
    text.bytes().fold(K1, |h, b| mix(h, b.into()))
}

fn all(start: Hash, parts: impl IntoIterator<Item = Hash>) -> Hash {
    parts.into_iter().fold(start, mix)
}

/// Operands of a commutative operation.
fn pair(start: Hash, a: Hash, b: Hash) -> Hash {
    mix(mix(start, a.min(b)), a.max(b))
}

fn volume(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// The row-major index as one for each axis.
fn unravel(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        (*i, flat) = (flat % n, flat / n);
    }
    index
}

fn ravel(index: &[usize], shape: &[usize]) -> usize {
    index.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i)
}

/// The place of an element in an operand that is broadcast.
fn broadcast(index: &[usize], shape: &[usize]) -> usize {
    let own = &index[index.len() - shape.len()..];
    own.iter().zip(shape).fold(0, |flat, (&i, &n)| flat * n + if n == 1 { 0 } else { i })
}

fn broadcast_shape(shapes: &[&[usize]]) -> Result<Vec<usize>, Refusal> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = vec![1; rank];
    for shape in shapes {
        for (o, &n) in out[rank - shape.len()..].iter_mut().zip(*shape) {
            match (*o, n) {
                (a, b) if a == b || b == 1 => {}
                (1, b) => *o = b,
                _ => return Err(format!("{shapes:?} do not broadcast")),
            }
        }
    }
    Ok(out)
}

impl Tensor {
    /// Expressions that are nothing else.
    fn opaque(dtype: DType, shape: &[usize], element: impl FnMut(usize) -> Hash) -> Tensor {
        let elements = Rc::new((0..volume(shape)).map(element).collect());
        Tensor { dtype, shape: shape.to_vec(), elements, numbers: None }
    }

    /// Symbols of a name.
    pub fn symbols(name: &str, dtype: DType, shape: &[usize]) -> Tensor {
        let name = word(name);
        Tensor::opaque(dtype, shape, |i| mix(name, i as Hash))
    }

    /// Known integers.
    pub fn known(dtype: DType, shape: &[usize], numbers: Vec<i64>) -> Tensor {
        let of = mix(word("number"), word(dtype.name()));
        let elements = numbers.iter().map(|&n| mix(of, n as u64 as Hash)).collect();
        Tensor { dtype, shape: shape.to_vec(), elements: Rc::new(elements), numbers: Some(Rc::new(numbers)) }
    }

    /// Something made of each element.
    fn map(&self, f: impl Fn(Hash) -> Hash) -> Tensor {
        Tensor::opaque(self.dtype, &self.shape, |i| f(self.elements[i]))
    }

    /// One hash for all of it.
    pub fn digest(&self) -> Hash {
        let start = all(word(self.dtype.name()), self.shape.iter().map(|&n| n as Hash));
        all(start, self.elements.iter().copied())
    }

    /// The elements at these places, in this order.
    fn moved(&self, shape: Vec<usize>, from: impl Iterator<Item = usize> + Clone) -> Tensor {
        let elements = Rc::new(from.clone().map(|i| self.elements[i]).collect());
        let numbers = self.numbers.as_ref().map(|n| Rc::new(from.map(|i| n[i]).collect()));
        Tensor { dtype: self.dtype, shape, elements, numbers }
    }

    /// The element at each index, from the place that a function of the index tells.
    fn view(&self, shape: Vec<usize>, place: impl Fn(&[usize]) -> usize) -> Tensor {
        let from: Vec<usize> = (0..volume(&shape)).map(|i| place(&unravel(i, &shape))).collect();
        self.moved(shape, from.into_iter())
    }

    fn reshaped(&self, shape: Vec<usize>) -> Result<Tensor, Refusal> {
        match volume(&shape) == volume(&self.shape) {
            true => Ok(Tensor { shape, ..self.clone() }),
            false => Err(format!("{:?} is not {shape:?}", self.shape)),
        }
    }

    fn transposed(&self, perm: &[usize]) -> Tensor {
        let shape = perm.iter().map(|&p| self.shape[p]).collect();
        self.view(shape, |index| {
            let mut own = vec![0; perm.len()];
            perm.iter().zip(index).for_each(|(&p, &i)| own[p] = i);
            ravel(&own, &self.shape)
        })
    }

    /// With the elements of another tensor at the product of these indices.
    fn updated(&self, taken: &[Vec<usize>], update: &Tensor) -> Result<Tensor, Refusal> {
        let shape: Vec<usize> = taken.iter().map(Vec::len).collect();
        if volume(&shape) != update.elements.len() {
            return Err(format!("{:?} does not fill {shape:?}", update.shape));
        }
        let mut elements = self.elements.to_vec();
        for (i, &new) in update.elements.iter().enumerate() {
            let index: Vec<usize> = unravel(i, &shape).iter().zip(taken).map(|(&i, t)| t[i]).collect();
            elements[ravel(&index, &self.shape)] = new;
        }
        Ok(Tensor { elements: Rc::new(elements), numbers: None, ..self.clone() })
    }

    /// With a box of the shape of `content` in which `content` is, from `begin` on.
    pub fn with_box(&self, begin: &[usize], content: &Tensor) -> Result<Tensor, Refusal> {
        let taken: Vec<Vec<usize>> = begin.iter().zip(&content.shape).map(|(&b, &n)| (b..b + n).collect()).collect();
        self.updated(&taken, content)
    }

    /// Tensors one behind the other.
    pub fn joined(parts: &[Tensor], axis: usize) -> Result<Tensor, Refusal> {
        let first = parts.first().ok_or("nothing to join")?;
        let mut shape = first.shape.clone();
        shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
        let mut whole = Vec::with_capacity(volume(&shape));
        let mut numbers = parts.iter().all(|p| p.numbers.is_some()).then(Vec::new);
        for outer in 0..volume(&shape[..axis]) {
            for part in parts {
                let run = volume(&part.shape[axis..]);
                let range = outer * run..(outer + 1) * run;
                whole.extend_from_slice(part.elements.get(range.clone()).ok_or("parts do not fit")?);
                if let (Some(all), Some(own)) = (&mut numbers, &part.numbers) {
                    all.extend_from_slice(&own[range]);
                }
            }
        }
        Ok(Tensor { dtype: first.dtype, shape, elements: Rc::new(whole), numbers: numbers.map(Rc::new) })
    }
}

/// The outputs and the content of the states after a run, by name. Inputs and states that are not given are refused.
pub fn evaluate(
    f: &Function,
    inputs: &Tensors,
    states: &Tensors,
    arithmetic: Arithmetic,
) -> Result<(Tensors, Tensors), Refusal> {
    Evaluation::of(f, inputs, states, arithmetic)?.finish()
}

/// Every value of a run, by name.
pub fn values(f: &Function, inputs: &Tensors, states: &Tensors) -> Result<Tensors, Refusal> {
    let run = Evaluation::of(f, inputs, states, Arithmetic::Ordered)?;
    Ok(run.values.iter().map(|(&v, t)| (f.value(v).name().to_string(), t.clone())).collect())
}

struct Evaluation<'f> {
    f: &'f Function,
    values: BTreeMap<ValueId, Tensor>,
    states: Tensors,
    arithmetic: Arithmetic,
}

impl<'f> Evaluation<'f> {
    fn of(f: &'f Function, inputs: &Tensors, states: &Tensors, arithmetic: Arithmetic) -> Result<Self, Refusal> {
        let mut run = Evaluation { f, values: BTreeMap::new(), states: states.clone(), arithmetic };
        for &v in f.inputs() {
            let name = f.value(v).name().as_str();
            if f.ty(v).as_state().is_none() {
                run.values.insert(v, inputs.get(name).ok_or_else(|| format!("no input `{name}`"))?.clone());
            }
        }
        for op in f.ops(f.body()) {
            let call = Call { run: &run, f, op };
            let results = call.results().map_err(|e| format!("{}: {e}", f.describe(op)))?;
            if f.op(op).kind() == "write_state" {
                let state = f.op(op).value("input").ok_or("no state")?;
                run.states.insert(f.value(state).name().to_string(), call.tensor("data")?);
            }
            run.values.extend(f.op(op).results().iter().copied().zip(results));
        }
        Ok(run)
    }

    fn finish(self) -> Result<(Tensors, Tensors), Refusal> {
        let output = |&v: &ValueId| {
            let name = self.f.value(v).name().to_string();
            let value = self.values.get(&v).cloned().ok_or_else(|| format!("`{name}` has no value"));
            value.map(|t| (name, t))
        };
        Ok((self.f.outputs().iter().map(output).collect::<Result<_, _>>()?, self.states))
    }
}

/// One op with what it reads.
struct Call<'r> {
    run: &'r Evaluation<'r>,
    f: &'r Function,
    op: OpId,
}

impl Call<'_> {
    fn kind(&self) -> &str {
        self.f.op(self.op).kind()
    }

    fn arithmetic(&self) -> Arithmetic {
        self.run.arithmetic
    }

    fn literal(&self, literal: &Literal) -> Result<Tensor, Refusal> {
        let ty = literal.ty.as_tensor().ok_or("a constant that is no tensor")?;
        let shape: Vec<usize> =
            ty.known_shape().ok_or("a constant of unknown size")?.iter().map(|&n| n as usize).collect();
        let weights = &**self.f.weights();
        if let LiteralData::Strings(strings) = &literal.data {
            return Ok(Tensor::opaque(ty.dtype, &shape, |i| word(&strings[i])));
        }
        if ty.dtype.is_float() {
            let floats = literal.to_floats(weights).map_err(|e| e.to_string())?;
            return Ok(Tensor::opaque(ty.dtype, &shape, |i| self.arithmetic().float(ty.dtype, floats[i])));
        }
        Ok(Tensor::known(ty.dtype, &shape, literal.to_ints(weights).map_err(|e| e.to_string())?))
    }

    fn operand(&self, operand: &Operand) -> Result<Tensor, Refusal> {
        match operand {
            Operand::Literal(l) => self.literal(self.f.literal(*l)),
            Operand::Value(v) => match self.run.values.get(v) {
                Some(t) => Ok(t.clone()),
                None => Err(format!("`{}` has no value", self.f.value(*v).name())),
            },
        }
    }

    fn optional(&self, param: &str) -> Result<Option<Tensor>, Refusal> {
        match self.f.op(self.op).param(param) {
            [] => Ok(None),
            [one] => self.operand(one).map(Some),
            _ => Err(format!("several `{param}`")),
        }
    }

    fn tensor(&self, param: &str) -> Result<Tensor, Refusal> {
        self.optional(param)?.ok_or_else(|| format!("no `{param}`"))
    }

    fn many(&self, param: &str) -> Result<Vec<Tensor>, Refusal> {
        self.f.op(self.op).param(param).iter().map(|o| self.operand(o)).collect()
    }

    fn numbers(&self, param: &str) -> Result<Option<Vec<i64>>, Refusal> {
        let Some(t) = self.optional(param)? else { return Ok(None) };
        Ok(Some(t.numbers.ok_or_else(|| format!("`{param}` is not known"))?.to_vec()))
    }

    fn ints(&self, param: &str) -> Result<Vec<i64>, Refusal> {
        self.numbers(param)?.ok_or_else(|| format!("no `{param}`"))
    }

    fn int_or(&self, param: &str, default: i64) -> Result<i64, Refusal> {
        Ok(self.numbers(param)?.map_or(default, |n| n[0]))
    }

    /// The axis that a parameter tells.
    fn axis(&self, param: &str, default: i64, rank: usize) -> Result<usize, Refusal> {
        Ok(self.int_or(param, default)?.rem_euclid(rank.max(1) as i64) as usize)
    }

    /// The axes that a parameter tells, ascending.
    fn axes(&self, param: &str, rank: usize) -> Result<Option<Vec<usize>>, Refusal> {
        let axes = self.numbers(param)?.map(|axes| axes.iter().map(|a| a.rem_euclid(rank as i64) as usize).collect());
        Ok(axes.map(|mut axes: Vec<usize>| {
            axes.sort_unstable();
            axes
        }))
    }

    /// The element type that a result is declared to have.
    fn dtype(&self) -> Result<DType, Refusal> {
        let v = *self.f.op(self.op).results().first().ok_or("no result")?;
        match self.f.ty(v) {
            ValueType::Tensor(t) => Ok(t.dtype),
            ty => Err(format!("a result of type {ty}")),
        }
    }

    fn results(&self) -> Result<Vec<Tensor>, Refusal> {
        if !self.f.op(self.op).blocks().is_empty() {
            return Err("nested blocks".into());
        }
        let one = match self.kind() {
            "write_state" => return Ok(vec![]),
            "split" => return self.split(),
            "const" => self.literal(self.f.const_param(self.op, "val").ok_or("no value")?),
            "read_state" => self.state(),
            "identity" => self.tensor("x"),
            "reshape" => self.reshape(),
            "expand_dims" => self.expand_dims(),
            "squeeze" => self.squeeze(),
            "transpose" => self.transpose(),
            "tile" => self.tile(),
            "reverse" => self.reverse(),
            "concat" => self.concat(),
            "stack" => self.stack(),
            "slice_by_index" => self.slice_by_index(),
            "slice_by_size" => self.slice_by_size(),
            "slice_update" => self.slice_update(),
            "gather" => self.gather(),
            "shape" => self.shape(),
            "fill_like" => self.fill_like(),
            "range_1d" => self.range(),
            "cast" => self.cast(),
            "select" => self.select(),
            "matmul" => self.matmul(),
            "linear" => self.linear(),
            "einsum" => self.einsum(),
            "scaled_dot_product_attention" => self.attention(),
            "softmax" => self.softmax(),
            kind if kind.starts_with("reduce_") => self.reduce(),
            kind if ELEMENTWISE.contains(&kind) => self.elementwise(),
            _ => return self.opaque(),
        };
        Ok(vec![one?])
    }

    fn state(&self) -> Result<Tensor, Refusal> {
        let state = self.f.op(self.op).value("input").ok_or("no state")?;
        self.run
            .states
            .get(self.f.value(state).name().as_str())
            .cloned()
            .ok_or_else(|| "a state that is not given".into())
    }

    // Ops that move elements.

    fn reshape(&self) -> Result<Tensor, Refusal> {
        let (x, wanted) = (self.tensor("x")?, self.ints("shape")?);
        let known = |(i, &n): (usize, &i64)| if n == 0 { x.shape.get(i).copied().unwrap_or(0) } else { n as usize };
        let rest: usize = wanted.iter().enumerate().filter(|(_, n)| **n != -1).map(known).product();
        let free = volume(&x.shape) / rest.max(1);
        x.reshaped(wanted.iter().enumerate().map(|(i, n)| if *n == -1 { free } else { known((i, n)) }).collect())
    }

    fn expand_dims(&self) -> Result<Tensor, Refusal> {
        let x = self.tensor("x")?;
        let rank = x.shape.len() + self.ints("axes")?.len();
        let axes = self.axes("axes", rank)?.unwrap_or_default();
        let mut own = x.shape.iter();
        let shape =
            (0..rank).map(|i| if axes.contains(&i) { Some(1) } else { own.next().copied() }).collect::<Option<_>>();
        x.reshaped(shape.ok_or("axes that do not fit")?)
    }

    fn squeeze(&self) -> Result<Tensor, Refusal> {
        let x = self.tensor("x")?;
        let axes = self.axes("axes", x.shape.len())?;
        let gone = |i: usize, n: usize| n == 1 && axes.as_ref().is_none_or(|a| a.contains(&i));
        x.reshaped(x.shape.iter().enumerate().filter(|(i, n)| !gone(*i, **n)).map(|(_, &n)| n).collect())
    }

    fn transpose(&self) -> Result<Tensor, Refusal> {
        let x = self.tensor("x")?;
        let rank = x.shape.len() as i64;
        Ok(x.transposed(&self.ints("perm")?.iter().map(|p| p.rem_euclid(rank) as usize).collect::<Vec<_>>()))
    }

    fn tile(&self) -> Result<Tensor, Refusal> {
        let (x, reps) = (self.tensor("x")?, self.ints("reps")?);
        let shape = x.shape.iter().zip(&reps).map(|(n, &r)| n * r as usize).collect();
        Ok(x.view(shape, |index| {
            let own: Vec<usize> = index.iter().zip(&x.shape).map(|(i, n)| i % n).collect();
            ravel(&own, &x.shape)
        }))
    }

    fn reverse(&self) -> Result<Tensor, Refusal> {
        let x = self.tensor("x")?;
        let axes = self.axes("axes", x.shape.len())?.unwrap_or_else(|| (0..x.shape.len()).collect());
        Ok(x.view(x.shape.clone(), |index| {
            let flip = |(a, &i): (usize, &usize)| if axes.contains(&a) { x.shape[a] - 1 - i } else { i };
            ravel(&index.iter().enumerate().map(flip).collect::<Vec<_>>(), &x.shape)
        }))
    }

    fn concat(&self) -> Result<Tensor, Refusal> {
        let mut parts = self.many("values")?;
        // Scalars count as vectors.
        parts.iter_mut().filter(|p| p.shape.is_empty()).for_each(|p| p.shape = vec![1]);
        let rank = parts.first().map_or(0, |p| p.shape.len());
        let axis = self.axis("axis", 0, rank)?;
        if self.int_or("interleave", 0)? == 0 {
            return Tensor::joined(&parts, axis);
        }
        // Entry by entry in turn: a new axis behind the joined one.
        let stacked = stacked(&parts, axis + 1)?;
        let mut shape = parts[0].shape.clone();
        shape[axis] *= parts.len();
        stacked.reshaped(shape)
    }

    fn stack(&self) -> Result<Tensor, Refusal> {
        let parts = self.many("values")?;
        let axis = self.axis("axis", 0, parts.first().map_or(0, |p| p.shape.len()) + 1)?;
        stacked(&parts, axis)
    }

    fn split(&self) -> Result<Vec<Tensor>, Refusal> {
        let x = self.tensor("x")?;
        let axis = self.axis("axis", 0, x.shape.len())?;
        let count = self.f.op(self.op).results().len();
        let sizes = self.numbers("split_sizes")?.unwrap_or_else(|| vec![(x.shape[axis] / count) as i64; count]);
        let mut begin = 0;
        Ok(sizes
            .into_iter()
            .map(|size| {
                let mut shape = x.shape.clone();
                shape[axis] = size as usize;
                let part = x.view(shape, |index| {
                    let mut own = index.to_vec();
                    own[axis] += begin;
                    ravel(&own, &x.shape)
                });
                begin += size as usize;
                part
            })
            .collect())
    }

    /// The indices that a slice takes on each axis, and which axes it drops.
    fn window(&self, shape: &[usize]) -> Result<(Vec<Vec<usize>>, Vec<bool>), Refusal> {
        let (begin, end) = (self.ints("begin")?, self.ints("end")?);
        let mask = |param| -> Result<Vec<bool>, Refusal> {
            Ok(self.numbers(param)?.map_or(vec![false; shape.len()], |m| m.iter().map(|&b| b != 0).collect()))
        };
        let (begin_mask, end_mask, squeeze) = (mask("begin_mask")?, mask("end_mask")?, mask("squeeze_mask")?);
        let stride = self.numbers("stride")?.unwrap_or_else(|| vec![1; shape.len()]);
        let taken = shape.iter().enumerate().map(|(i, &n)| {
            let clamp = |at: i64| (if at < 0 { at + n as i64 } else { at }).clamp(0, n as i64) as usize;
            if stride[i] < 1 {
                return Err(format!("stride {}", stride[i]));
            }
            let from = if begin_mask[i] { 0 } else { clamp(begin[i]) };
            let to = if squeeze[i] {
                from + 1
            } else if end_mask[i] {
                n
            } else {
                clamp(end[i])
            };
            if to > n {
                Err(format!("{to} is beyond {n}"))
            } else {
                Ok((from..to).step_by(stride[i] as usize).collect())
            }
        });
        Ok((taken.collect::<Result<_, _>>()?, squeeze))
    }

    fn slice_by_index(&self) -> Result<Tensor, Refusal> {
        let x = self.tensor("x")?;
        let (taken, squeeze) = self.window(&x.shape)?;
        let kept = taken.iter().zip(&squeeze).filter(|(_, s)| !**s).map(|(t, _)| t.len()).collect();
        picked(&x, &taken).reshaped(kept)
    }

    fn slice_by_size(&self) -> Result<Tensor, Refusal> {
        let (x, begin, size) = (self.tensor("x")?, self.ints("begin")?, self.ints("size")?);
        let taken = x.shape.iter().zip(begin.iter().zip(&size)).map(|(&n, (&b, &s))| {
            let from = if b < 0 { b + n as i64 } else { b } as usize;
            let to = if s == -1 { n } else { from + s as usize };
            if to > n { Err(format!("{to} is beyond {n}")) } else { Ok((from..to).collect()) }
        });
        Ok(picked(&x, &taken.collect::<Result<Vec<_>, _>>()?))
    }

    fn slice_update(&self) -> Result<Tensor, Refusal> {
        let (x, update) = (self.tensor("x")?, self.tensor("update")?);
        let (taken, _) = self.window(&x.shape)?;
        x.updated(&taken, &update)
    }

    fn gather(&self) -> Result<Tensor, Refusal> {
        let (x, indices) = (self.tensor("x")?, self.tensor("indices")?);
        let at = indices.numbers.as_ref().ok_or("indices that are not known")?;
        let axis = self.axis("axis", 0, x.shape.len())?;
        if self.int_or("batch_dims", 0)? != 0 {
            return Err("batch_dims".into());
        }
        let n = x.shape[axis] as i64;
        let at: Vec<usize> = at.iter().map(|&i| if i < 0 { i + n } else { i } as usize).collect();
        if at.iter().any(|&i| i >= n as usize) {
            return Err("an index beyond its axis".into());
        }
        let shape = [&x.shape[..axis], &indices.shape, &x.shape[axis + 1..]].concat();
        let mut flat = x.shape.clone();
        flat[axis] = at.len();
        let whole: Vec<Vec<usize>> =
            x.shape.iter().enumerate().map(|(i, &n)| if i == axis { at.clone() } else { (0..n).collect() }).collect();
        picked(&x, &whole).reshaped(shape)
    }

    fn shape(&self) -> Result<Tensor, Refusal> {
        let sizes: Vec<i64> = self.tensor("x")?.shape.iter().map(|&n| n as i64).collect();
        Ok(Tensor::known(self.dtype()?, &[sizes.len()], sizes))
    }

    fn fill_like(&self) -> Result<Tensor, Refusal> {
        let value = self.tensor("value")?;
        Ok(Tensor { dtype: self.dtype()?, ..value.view(self.tensor("ref_tensor")?.shape, |_| 0) })
    }

    fn range(&self) -> Result<Tensor, Refusal> {
        let [start, end, step] = [self.ints("start")?[0], self.ints("end")?[0], self.ints("step")?[0]];
        let numbers: Vec<i64> = (start..end).step_by(usize::try_from(step).map_err(|e| e.to_string())?).collect();
        Ok(Tensor::known(self.dtype()?, &[numbers.len()], numbers))
    }

    /// A known condition chooses, another one is part of the expression.
    fn select(&self) -> Result<Tensor, Refusal> {
        let [cond, a, b] = [self.tensor("cond")?, self.tensor("a")?, self.tensor("b")?];
        let Some(known) = &cond.numbers else { return self.elementwise() };
        let shape = broadcast_shape(&[&cond.shape, &a.shape, &b.shape])?;
        let choose = |i: usize| {
            let index = unravel(i, &shape);
            let from = if known[broadcast(&index, &cond.shape)] != 0 { &a } else { &b };
            (
                from.elements[broadcast(&index, &from.shape)],
                from.numbers.as_ref().map(|n| n[broadcast(&index, &from.shape)]),
            )
        };
        let (elements, numbers): (Vec<Hash>, Vec<Option<i64>>) = (0..volume(&shape)).map(choose).unzip();
        let numbers = numbers.into_iter().collect::<Option<Vec<i64>>>().map(Rc::new);
        Ok(Tensor { dtype: self.dtype()?, shape, elements: Rc::new(elements), numbers })
    }

    // Ops that compute.

    fn cast(&self) -> Result<Tensor, Refusal> {
        let (x, to) = (self.tensor("x")?, self.dtype()?);
        match &x.numbers {
            _ if x.dtype == to => Ok(x),
            Some(n) if !to.is_float() => Ok(Tensor::known(to, &x.shape, n.iter().map(|&n| wrapped(to, n)).collect())),
            Some(n) if self.arithmetic() == Arithmetic::Real => {
                Ok(Tensor::opaque(to, &x.shape, |i| self.arithmetic().float(to, n[i] as f64)))
            }
            _ if self.arithmetic() == Arithmetic::Real && x.dtype.is_float() && to.is_float() => {
                Ok(Tensor { dtype: to, ..x })
            }
            _ => {
                let start = mix(word("cast"), word(to.name()));
                Ok(Tensor::opaque(to, &x.shape, |i| mix(start, x.elements[i])))
            }
        }
    }

    fn elementwise(&self) -> Result<Tensor, Refusal> {
        let data = self.f.op(self.op);
        let operands: Vec<Tensor> =
            data.params().flat_map(|(_, o)| o).map(|o| self.operand(o)).collect::<Result<_, _>>()?;
        let shapes: Vec<&[usize]> = operands.iter().map(|t| &t.shape[..]).collect();
        let (shape, dtype) = (broadcast_shape(&shapes)?, self.dtype()?);
        if let [x, y] = &operands[..]
            && let (Some(x_numbers), Some(y_numbers)) = (&x.numbers, &y.numbers)
        {
            let one = |i| {
                let index = unravel(i, &shape);
                let (a, b) = (x_numbers[broadcast(&index, &x.shape)], y_numbers[broadcast(&index, &y.shape)]);
                computed(self.kind(), a, b).map(|n| wrapped(dtype, n))
            };
            return Ok(Tensor::known(dtype, &shape, (0..volume(&shape)).map(one).collect::<Result<_, _>>()?));
        }
        let names = all(word(self.kind()), data.params().map(|(name, _)| word(name)));
        let (arithmetic, start) = (self.arithmetic(), self.arithmetic().rounded(dtype, names));
        Ok(Tensor::opaque(dtype, &shape, |i| {
            let index = unravel(i, &shape);
            let mut parts = operands.iter().map(|t| t.elements[broadcast(&index, &t.shape)]);
            let mut two = || (parts.next().unwrap_or(ZERO), parts.next().unwrap_or(ZERO));
            match self.kind() {
                "add" => two_to(two(), |a, b| arithmetic.plus(start, a, b)),
                "mul" => two_to(two(), |a, b| arithmetic.times(start, a, b)),
                "exp" if arithmetic == Arithmetic::Real && operands[0].elements[i] == HIDDEN => ZERO,
                "sub" => two_to(two(), |a, b| arithmetic.minus(start, a, b)),
                "real_div" => two_to(two(), |a, b| arithmetic.over(start, a, b)),
                _ => all(start, parts),
            }
        }))
    }

    fn matmul(&self) -> Result<Tensor, Refusal> {
        let flag = |param| self.int_or(param, 0).map(|n| n != 0);
        let x = if flag("transpose_x")? { swapped(&self.tensor("x")?)? } else { self.tensor("x")? };
        let y = if flag("transpose_y")? { self.tensor("y")? } else { swapped(&self.tensor("y")?)? };
        let (arithmetic, dtype) = (self.arithmetic(), self.dtype()?);
        Ok(product(&x, &y, dtype, arithmetic)?.map(|sum| arithmetic.rounded(dtype, sum)))
    }

    fn linear(&self) -> Result<Tensor, Refusal> {
        let (x, weight, bias) = (self.tensor("x")?, self.tensor("weight")?, self.optional("bias")?);
        let (arithmetic, dtype) = (self.arithmetic(), self.dtype()?);
        let sums = product(&x, &weight, dtype, arithmetic)?;
        let (n, start) = (weight.shape[0], word("bias"));
        Ok(Tensor::opaque(dtype, &sums.shape, |i| match &bias {
            Some(b) => arithmetic.rounded(dtype, arithmetic.plus(start, sums.elements[i], b.elements[i % n])),
            None => arithmetic.rounded(dtype, sums.elements[i]),
        }))
    }

    /// Two operands and one letter that is summed over.
    fn einsum(&self) -> Result<Tensor, Refusal> {
        let equation = self.f.str(self.op, "equation").ok_or("no equation")?.replace(' ', "");
        let (operands, result) = equation.split_once("->").ok_or("no result")?;
        let (left, right) = operands.split_once(',').ok_or("one operand")?;
        let [x, y] = &self.many("values")?[..] else { return Err("not two operands".into()) };
        let mut sizes = BTreeMap::new();
        for (letters, t) in [(left, x), (right, y)] {
            for (letter, &n) in letters.chars().zip(&t.shape) {
                let size = sizes.entry(letter).or_insert(n);
                *size = (*size).max(n);
            }
        }
        let summed: Vec<char> = sizes.keys().copied().filter(|&c| !result.contains(c)).collect();
        let [over] = summed[..] else { return Err(format!("a sum over {summed:?}")) };
        let shape: Vec<usize> = result.chars().map(|c| sizes[&c]).collect();
        let (arithmetic, dtype) = (self.arithmetic(), self.dtype()?);
        let at = |letters: &str, t: &Tensor, index: &[usize], k: usize| {
            let own = |c| if c == over { k } else { index[result.find(c).unwrap_or(0)] };
            t.elements[broadcast(&letters.chars().map(own).collect::<Vec<_>>(), &t.shape)]
        };
        Ok(Tensor::opaque(dtype, &shape, |i| {
            let index = unravel(i, &shape);
            let term = |k| arithmetic.times(PRODUCT, at(left, x, &index, k), at(right, y, &index, k));
            arithmetic.rounded(dtype, arithmetic.sum((0..sizes[&over]).map(term)))
        }))
    }

    /// Scaled scores with their mask, their softmax, then the sum of values; nothing inside is rounded.
    fn attention(&self) -> Result<Tensor, Refusal> {
        let [q, k, v] = [self.tensor("query")?, self.tensor("key")?, self.tensor("value")?];
        let (arithmetic, dtype) = (self.arithmetic(), self.dtype()?);
        let size = arithmetic.float(DType::F64, *q.shape.last().ok_or("a scalar")? as f64);
        let root = all(word("sqrt"), [word("x"), size]);
        let mut scores = product(&q, &k, dtype, arithmetic)?.map(|x| arithmetic.over(word("scaled"), x, root));
        if let Some(mask) = self.optional("attn_mask")? {
            let (plain, start) = (scores, word("masked"));
            let shape = broadcast_shape(&[&plain.shape, &mask.shape])?;
            scores = Tensor::opaque(dtype, &shape, |i| {
                let at = |t: &Tensor| t.elements[broadcast(&unravel(i, &shape), &t.shape)];
                arithmetic.plus(start, at(&plain), at(&mask))
            });
        }
        let weights = weights(&scores, scores.shape.len() - 1, word("softmax"), arithmetic);
        Ok(product(&weights, &swapped(&v)?, dtype, arithmetic)?.map(|sum| arithmetic.rounded(dtype, sum)))
    }

    fn softmax(&self) -> Result<Tensor, Refusal> {
        let x = self.tensor("x")?;
        let axis = self.axis("axis", -1, x.shape.len())?;
        Ok(weights(&x, axis, self.arithmetic().named("softmax", x.dtype), self.arithmetic()))
    }

    fn reduce(&self) -> Result<Tensor, Refusal> {
        let x = self.tensor("x")?;
        let param = if self.kind().contains("_arg") { "axis" } else { "axes" };
        let axes = self.axes(param, x.shape.len())?.unwrap_or_else(|| (0..x.shape.len()).collect());
        let kept: Vec<usize> = (0..x.shape.len()).filter(|i| !axes.contains(i)).collect();
        let rows = x.transposed(&[kept.clone(), axes.clone()].concat());
        let run = axes.iter().map(|&a| x.shape[a]).product::<usize>().max(1);
        let (arithmetic, dtype) = (self.arithmetic(), self.dtype()?);
        let start = arithmetic.named(self.kind(), dtype);
        let keeps = self.int_or("keep_dims", 0)? != 0;
        let shape: Vec<usize> = match keeps {
            true => (0..x.shape.len()).map(|i| if axes.contains(&i) { 1 } else { x.shape[i] }).collect(),
            false => kept.iter().map(|&i| x.shape[i]).collect(),
        };
        let is_sum = arithmetic == Arithmetic::Real && self.kind() == "reduce_sum";
        Ok(Tensor::opaque(dtype, &shape, |i| {
            let row = rows.elements[i * run..][..run].iter().copied();
            if is_sum { arithmetic.sum(row) } else { arithmetic.row(start, row) }
        }))
    }

    /// Every element depends on everything.
    fn opaque(&self) -> Result<Vec<Tensor>, Refusal> {
        let data = self.f.op(self.op);
        let mut whole = word(self.kind());
        for (name, operands) in data.params() {
            whole = mix(whole, word(name));
            for operand in operands {
                whole = mix(whole, self.operand(operand)?.digest());
            }
        }
        for (name, literal) in data.attributes().filter(|(name, _)| *name != "name") {
            whole = mix(mix(whole, word(name)), self.literal(self.f.literal(literal))?.digest());
        }
        let result = |(number, &v): (usize, &ValueId)| {
            let ty = self.f.tensor(v).ok_or("a result that is no tensor")?;
            let shape = ty.known_shape().ok_or("a result of unknown size")?;
            let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
            let start = mix(whole, number as Hash);
            Ok(Tensor::opaque(ty.dtype, &shape, |i| mix(start, i as Hash)))
        };
        data.results().iter().enumerate().map(result).collect()
    }
}

/// Ops that compute each element from the elements at its place.
const ELEMENTWISE: &[&str] = &[
    "abs",
    "add",
    "ceil",
    "clip",
    "cos",
    "equal",
    "erf",
    "exp",
    "floor",
    "floor_div",
    "gelu",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "not_equal",
    "pow",
    "real_div",
    "relu",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sqrt",
    "square",
    "sub",
    "tanh",
];

fn stacked(parts: &[Tensor], axis: usize) -> Result<Tensor, Refusal> {
    let parts = parts.iter().map(|p| {
        let mut shape = p.shape.clone();
        shape.insert(axis, 1);
        p.reshaped(shape)
    });
    Tensor::joined(&parts.collect::<Result<Vec<_>, _>>()?, axis)
}

/// The elements at the product of these indices.
fn picked(x: &Tensor, taken: &[Vec<usize>]) -> Tensor {
    x.view(taken.iter().map(Vec::len).collect(), |index| {
        let own: Vec<usize> = index.iter().zip(taken).map(|(&i, t)| t[i]).collect();
        ravel(&own, &x.shape)
    })
}

fn swapped(x: &Tensor) -> Result<Tensor, Refusal> {
    let rank = x.shape.len();
    let mut perm: Vec<usize> = (0..rank).collect();
    if rank < 2 {
        return Err("a vector is no matrix".into());
    }
    perm.swap(rank - 2, rank - 1);
    Ok(x.transposed(&perm))
}

/// Rows of `x` times rows of `y`: sums of products over the last axis of both, not rounded.
fn product(x: &Tensor, y: &Tensor, dtype: DType, arithmetic: Arithmetic) -> Result<Tensor, Refusal> {
    let ([x_batch @ .., m, k], [y_batch @ .., n, l]) = (&x.shape[..], &y.shape[..]) else {
        return Err("a vector is no matrix".into());
    };
    if k != l {
        return Err(format!("{:?} times {:?}", x.shape, y.shape));
    }
    let batch = broadcast_shape(&[x_batch, y_batch])?;
    let shape = [&batch[..], &[*m, *n]].concat();
    Ok(Tensor::opaque(dtype, &shape, |i| {
        let (at, row, column) = (unravel(i / (m * n), &batch), i / n % m, i % n);
        let a = &x.elements[(broadcast(&at, x_batch) * m + row) * k..][..*k];
        let b = &y.elements[(broadcast(&at, y_batch) * n + column) * k..][..*k];
        arithmetic.sum(a.iter().zip(b).map(|(&a, &b)| arithmetic.times(PRODUCT, a, b)))
    }))
}

/// Each element with the row that it is part of.
fn weights(x: &Tensor, axis: usize, start: Hash, arithmetic: Arithmetic) -> Tensor {
    let n = x.shape[axis];
    let inner = volume(&x.shape[axis + 1..]);
    Tensor::opaque(x.dtype, &x.shape, |i| {
        let first = i / (n * inner) * n * inner + i % inner;
        let row = (0..n).map(|k| x.elements[first + k * inner]);
        match (arithmetic, x.elements[i]) {
            (Arithmetic::Real, HIDDEN) => ZERO,
            (_, own) => mix(arithmetic.row(start, row), own),
        }
    })
}

fn two_to((a, b): (Hash, Hash), f: impl Fn(Hash, Hash) -> Hash) -> Hash {
    f(a, b)
}

/// An integer as its type holds it.
fn wrapped(dtype: DType, n: i64) -> i64 {
    match (dtype, dtype.bits()) {
        (DType::Bool, _) => i64::from(n != 0),
        (_, Some(bits @ ..=32)) => {
            let low = n & ((1 << bits) - 1);
            if dtype.is_signed_int() && low >> (bits - 1) & 1 == 1 { low - (1 << bits) } else { low }
        }
        _ => n,
    }
}

/// What an op makes of two integers.
fn computed(kind: &str, a: i64, b: i64) -> Result<i64, Refusal> {
    Ok(match kind {
        "add" => a + b,
        "sub" => a - b,
        "mul" => a * b,
        "floor_div" if b != 0 => (a as f64 / b as f64).floor() as i64,
        "real_div" if b != 0 && a % b == 0 => a / b,
        "mod" if b != 0 => a - b * (a as f64 / b as f64).floor() as i64,
        "maximum" => a.max(b),
        "minimum" => a.min(b),
        "equal" => i64::from(a == b),
        "not_equal" => i64::from(a != b),
        "greater" => i64::from(a > b),
        "greater_equal" => i64::from(a >= b),
        "less" => i64::from(a < b),
        "less_equal" => i64::from(a <= b),
        "logical_and" => i64::from(a != 0 && b != 0),
        "logical_or" => i64::from(a != 0 || b != 0),
        _ => return Err(format!("{kind} of {a} and {b}")),
    })
}
