//! Small integer tensors as polynomials over unknown sizes.
//!
//! Converters compute shapes in the graph: with a flexible input, the repetitions of `tile` are
//! `real_div(select(equal(concat(1, n_kv_heads, group, s, head_dim), -1), shape, concat), shape)`, and every size of the
//! result is declared unknown. [`resolve`] walks a function once, evaluates such arithmetic to polynomials over the symbols of
//! the input sizes, and replaces unknown sizes in types by what it proved. A size is a monomial or stays unknown.
//!
//! Three facts need the bounds of sizes: a slice `[0:e)` has extent `e` only where `e` cannot exceed the axis, a cast to a
//! narrow type keeps a value only where the type holds it, and a size can be divided by only where it is not zero. Bounds
//! follow from those of the inputs also for sizes that are no monomials, such as the length of a cache and new keys.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use smallvec::SmallVec;

use crate::ir::{DType, Dim, Function, OpId, Operand, Symbol, TensorType, ValueId, ValueType};
use crate::opset::{infer, views};

/// Longest tensor that is evaluated.
const MAX_ELEMENTS: usize = 64;

/// An unknown integer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Unknown {
    /// A size.
    Size(Symbol),
    /// An element of a value that only running the program tells, by row-major position.
    Element(ValueId, u32),
}

/// A polynomial with integer coefficients; the empty one is zero.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Poly {
    terms: BTreeMap<SmallVec<[Unknown; 2]>, i64>,
}

impl Poly {
    /// A constant.
    pub fn constant(c: i64) -> Poly {
        let mut p = Poly::default();
        p.push(SmallVec::new(), c);
        p
    }

    /// An unknown.
    pub fn unknown(u: Unknown) -> Poly {
        let mut p = Poly::default();
        p.push(SmallVec::from_slice(&[u]), 1);
        p
    }

    /// A size; `None` when its factor does not fit.
    pub fn of_dim(d: &Dim) -> Option<Poly> {
        let mut p = Poly::default();
        p.push(d.symbols().iter().map(|&s| Unknown::Size(s)).collect(), i64::try_from(d.coef()).ok()?);
        Some(p)
    }

    fn push(&mut self, unknowns: SmallVec<[Unknown; 2]>, c: i64) -> Option<()> {
        let sum = self.terms.get(&unknowns).copied().unwrap_or(0).checked_add(c)?;
        if sum == 0 {
            self.terms.remove(&unknowns);
        } else {
            self.terms.insert(unknowns, sum);
        }
        Some(())
    }

    /// The value, when it is known.
    pub fn as_constant(&self) -> Option<i64> {
        match self.terms.len() {
            0 => Some(0),
            1 => self.terms.get(&SmallVec::new()).copied(),
            _ => None,
        }
    }

    /// The size this is, when it is a monomial of sizes that is not negative.
    pub fn as_dim(&self) -> Option<Dim> {
        if self.terms.is_empty() {
            return Some(Dim::known(0));
        }
        let (unknowns, &c) = self.terms.first_key_value().filter(|_| self.terms.len() == 1)?;
        unknowns.iter().try_fold(Dim::known(u64::try_from(c).ok()?), |d, u| match u {
            Unknown::Size(s) => d.checked_mul(&Dim::unknown(*s)),
            Unknown::Element(..) => None,
        })
    }

    /// The sum; `None` on overflow.
    pub fn add(&self, other: &Poly) -> Option<Poly> {
        let mut p = self.clone();
        for (u, &c) in &other.terms {
            p.push(u.clone(), c)?;
        }
        Some(p)
    }

    /// The difference; `None` on overflow.
    pub fn sub(&self, other: &Poly) -> Option<Poly> {
        self.add(&other.mul(&Poly::constant(-1))?)
    }

    /// The product; `None` on overflow.
    pub fn mul(&self, other: &Poly) -> Option<Poly> {
        let mut p = Poly::default();
        for (u, &c) in &self.terms {
            for (v, &d) in &other.terms {
                let mut unknowns = u.clone();
                unknowns.extend_from_slice(v);
                unknowns.sort_unstable();
                p.push(unknowns, c.checked_mul(d)?)?;
            }
        }
        Some(p)
    }

    /// The quotient by a monomial that divides every term.
    pub fn div_exact(&self, by: &Poly) -> Option<Poly> {
        let (divisor, &c) = by.terms.first_key_value().filter(|_| by.terms.len() == 1)?;
        let mut p = Poly::default();
        for (u, &d) in &self.terms {
            let mut unknowns = u.clone();
            for v in divisor {
                let at = unknowns.iter().position(|w| w == v)?;
                unknowns.remove(at);
            }
            p.push(unknowns, d.checked_rem(c).filter(|&r| r == 0).and_then(|_| d.checked_div(c))?)?;
        }
        Some(p)
    }

    /// Whether this is at least the other, provably.
    pub fn is_at_least(&self, other: &Poly, f: &Function) -> bool {
        at_least(f, self, other) == Some(true)
    }

    /// The unknowns it depends on, each term's product apart, with their coefficients.
    pub fn terms(&self) -> impl Iterator<Item = (&[Unknown], i64)> {
        self.terms.iter().map(|(u, &c)| (&u[..], c))
    }

    /// The largest value that the bounds of the sizes admit; `None` when there is none or it is not known.
    pub fn upper(&self, f: &Function) -> Option<i64> {
        self.bound(f, true)
    }

    /// The smallest value that the bounds of the sizes admit.
    pub fn lower(&self, f: &Function) -> Option<i64> {
        self.bound(f, false)
    }

    fn bound(&self, f: &Function, upper: bool) -> Option<i64> {
        let mut total = 0i64;
        for (unknowns, &c) in &self.terms {
            let mut term = c;
            for u in unknowns {
                let Unknown::Size(s) = u else { return None };
                let range = f.symbol_range(*s);
                // Sizes are not negative, so a positive coefficient grows with them.
                let at = if (c > 0) == upper { range.hi? } else { range.lo };
                term = term.checked_mul(i64::try_from(at).ok()?)?;
            }
            total = total.checked_add(term)?;
        }
        Some(total)
    }
}

impl fmt::Display for Poly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.terms.is_empty() {
            return f.write_str("0");
        }
        for (i, (unknowns, c)) in self.terms.iter().enumerate() {
            if i > 0 {
                f.write_str(" + ")?;
            }
            write!(f, "{c}")?;
            for u in unknowns {
                match u {
                    Unknown::Size(s) => write!(f, "*{s}")?,
                    Unknown::Element(v, at) => write!(f, "*{v}[{at}]")?,
                }
            }
        }
        Ok(())
    }
}

/// The elements of small integer and bool tensors, row-major; a bool is 0 or 1.
#[derive(Clone, Debug, Default)]
pub struct Values {
    known: HashMap<ValueId, Vec<Option<Poly>>>,
}

impl Values {
    /// The elements of a value; `None` where nothing is known of it.
    pub fn of(&self, v: ValueId) -> Option<&[Option<Poly>]> {
        self.known.get(&v).map(|e| &e[..])
    }

    /// Evaluates a function without changing it. Sizes are taken as its types have them.
    pub fn compute(f: &Function) -> Values {
        let mut values = Values::default();
        values.seed(f);
        for op in f.all_ops() {
            values.evaluate(f, op);
        }
        values
    }

    fn seed(&mut self, f: &Function) {
        for &v in f.inputs() {
            if let Some(n) = small(f, v) {
                self.known.insert(v, (0..n as u32).map(|i| Some(Poly::unknown(Unknown::Element(v, i)))).collect());
            }
        }
    }

    fn operand(&self, f: &Function, operand: &Operand) -> Option<Vec<Option<Poly>>> {
        if let Some(l) = f.operand_literal(operand) {
            let t = l.ty.as_tensor()?;
            let integral = t.dtype.is_int() || t.dtype == DType::Bool;
            if !integral || t.volume()? as usize > MAX_ELEMENTS {
                return None;
            }
            return Some(l.to_ints(&**f.weights()).ok()?.into_iter().map(|n| Some(Poly::constant(n))).collect());
        }
        self.known.get(&operand.as_value()?).cloned()
    }

    /// The elements of a parameter.
    pub fn param(&self, f: &Function, op: OpId, name: &str) -> Option<Vec<Option<Poly>>> {
        match f.op(op).param(name) {
            [one] => self.operand(f, one),
            _ => None,
        }
    }

    fn evaluate(&mut self, f: &Function, op: OpId) {
        let &[result] = f.op(op).results() else { return };
        let Some(n) = small(f, result) else { return };
        let elements = self.eval(f, op, result).filter(|e| e.len() == n).unwrap_or_else(|| {
            // Not evaluated, but the same element wherever it is used.
            (0..n as u32).map(|i| Some(Poly::unknown(Unknown::Element(result, i)))).collect()
        });
        self.known.insert(result, elements);
    }

    fn eval(&self, f: &Function, op: OpId, result: ValueId) -> Option<Vec<Option<Poly>>> {
        let x = || self.param(f, op, "x");
        match &**f.op(op).kind() {
            "const" => self.operand(f, &Operand::Value(result)),
            "identity" | "expand_dims" | "squeeze" | "reshape" => x(),
            "cast" => {
                let to = f.tensor(result)?.dtype;
                x()?.into_iter().map(|e| Some(e.filter(|e| holds(f, to, e)))).collect()
            }
            "shape" => {
                let v = f.op(op).value("x")?;
                Some(f.tensor(v)?.shape.iter().map(Poly::of_dim).collect())
            }
            "concat" if f.tensor(result)?.rank() == 1 && f.bool(op, "interleave") != Some(true) => {
                let mut out = Vec::new();
                for operand in f.op(op).param("values") {
                    out.extend(self.operand(f, operand)?);
                }
                Some(out)
            }
            "stack" if f.tensor(result)?.rank() == 1 => {
                let mut out = Vec::new();
                for operand in f.op(op).param("values") {
                    out.extend(self.operand(f, operand)?);
                }
                Some(out)
            }
            "gather" if f.operand_type(f.op(op).param("x").first()?).as_tensor()?.rank() == 1 => {
                let items = x()?;
                let indices = self.param(f, op, "indices")?;
                indices
                    .into_iter()
                    .map(|i| {
                        let i = i?.as_constant()?;
                        let i = if i < 0 { i + items.len() as i64 } else { i };
                        items.get(usize::try_from(i).ok()?).cloned()
                    })
                    .collect()
            }
            "slice_by_size" if f.op(op).value("x").and_then(|v| f.tensor(v))?.rank() == 1 => {
                let items = x()?;
                let begin = f.int(op, "begin").filter(|&b| b >= 0)?;
                let n = f.tensor(result)?.volume()?;
                let begin = usize::try_from(begin).ok()?;
                items.get(begin..begin.checked_add(usize::try_from(n).ok()?)?).map(<[_]>::to_vec)
            }
            "slice_by_index" if f.op(op).value("x").and_then(|v| f.tensor(v))?.rank() == 1 => {
                let items = x()?;
                let slice = views::Slice::of(f, op)?;
                let axis = slice.axes.first()?;
                let (begin, n) = (axis.begin? as i64, axis.extent.as_ref()?.as_known()? as i64);
                (0..n).map(|i| items.get(usize::try_from(begin + i * axis.stride).ok()?).cloned()).collect()
            }
            "select" => {
                let (cond, a, b) = (self.param(f, op, "cond")?, self.param(f, op, "a")?, self.param(f, op, "b")?);
                broadcast3(&cond, &a, &b, |c, a, b| match c.as_ref()?.as_constant()? {
                    0 => b.clone(),
                    _ => a.clone(),
                })
            }
            kind => {
                let rule: fn(&Function, &Poly, &Poly) -> Option<Poly> = match kind {
                    "add" => |_, a, b| a.add(b),
                    "sub" => |_, a, b| a.sub(b),
                    "mul" => |_, a, b| a.mul(b),
                    "real_div" | "floor_div" => divide,
                    "equal" => |f, a, b| equal(f, a, b).map(|e| Poly::constant(i64::from(e))),
                    "not_equal" => |f, a, b| equal(f, a, b).map(|e| Poly::constant(i64::from(!e))),
                    "greater_equal" => |f, a, b| at_least(f, a, b).map(|e| Poly::constant(i64::from(e))),
                    "less" => |f, a, b| at_least(f, a, b).map(|e| Poly::constant(i64::from(!e))),
                    "less_equal" => |f, a, b| at_least(f, b, a).map(|e| Poly::constant(i64::from(e))),
                    "greater" => |f, a, b| at_least(f, b, a).map(|e| Poly::constant(i64::from(!e))),
                    "maximum" => |f, a, b| at_least(f, a, b).map(|first| if first { a.clone() } else { b.clone() }),
                    "minimum" => |f, a, b| at_least(f, a, b).map(|first| if first { b.clone() } else { a.clone() }),
                    _ => return None,
                };
                let (a, b) = (x()?, self.param(f, op, "y")?);
                broadcast3(&a, &b, &a, |a, b, _| rule(f, a.as_ref()?, b.as_ref()?))
            }
        }
    }
}

/// Element by element; one-element operands are widened.
fn broadcast3(
    a: &[Option<Poly>],
    b: &[Option<Poly>],
    c: &[Option<Poly>],
    rule: impl Fn(&Option<Poly>, &Option<Poly>, &Option<Poly>) -> Option<Poly>,
) -> Option<Vec<Option<Poly>>> {
    let n = a.len().max(b.len()).max(c.len());
    let at = |e: &[Option<Poly>], i: usize| match e.len() {
        1 => e.first().cloned(),
        len if len == n => e.get(i).cloned(),
        _ => None,
    };
    (0..n).map(|i| Some(rule(&at(a, i)?, &at(b, i)?, &at(c, i)?))).collect()
}

/// The quotient where it is exact and the divisor is known not to be zero.
fn divide(f: &Function, a: &Poly, b: &Poly) -> Option<Poly> {
    b.lower(f).filter(|&lo| lo > 0)?;
    a.div_exact(b)
}

fn equal(f: &Function, a: &Poly, b: &Poly) -> Option<bool> {
    let d = a.sub(b)?;
    match d.as_constant() {
        Some(c) => Some(c == 0),
        None => (d.lower(f)? > 0 || d.upper(f)? < 0).then_some(false),
    }
}

fn at_least(f: &Function, a: &Poly, b: &Poly) -> Option<bool> {
    let d = a.sub(b)?;
    if d.lower(f).is_some_and(|lo| lo >= 0) {
        return Some(true);
    }
    d.upper(f).filter(|&hi| hi < 0).map(|_| false)
}

/// Whether a value survives a cast to an integer type.
fn holds(f: &Function, to: DType, e: &Poly) -> bool {
    let bits = match to {
        DType::I32 | DType::I64 => return true,
        DType::I8 | DType::I16 | DType::U8 | DType::U16 | DType::U32 => to.bits().unwrap_or(0),
        DType::Bool => 1,
        _ => return false,
    };
    let (lo, hi) = match to.is_signed_int() {
        true => (-(1i64 << (bits - 1)), (1i64 << (bits - 1)) - 1),
        false => (0, (1i64 << bits) - 1),
    };
    e.lower(f).is_some_and(|n| n >= lo) && e.upper(f).is_some_and(|n| n <= hi)
}

/// The number of elements of an integer or bool tensor that is small enough to evaluate.
fn small(f: &Function, v: ValueId) -> Option<usize> {
    let t = f.tensor(v)?;
    let integral = t.dtype.is_int() || t.dtype == DType::Bool;
    let n = usize::try_from(t.volume()?).ok()?;
    (integral && n <= MAX_ELEMENTS).then_some(n)
}

/// Replaces unknown sizes in the types of a function by what arithmetic on shapes proves, and returns the values found.
pub fn resolve(f: &mut Function) -> Values {
    let mut values = Values::default();
    values.seed(f);
    for op in f.all_ops() {
        refine(f, &values, op);
        values.evaluate(f, op);
    }
    values
}

/// Refines the result types of one op.
fn refine(f: &mut Function, values: &Values, op: OpId) {
    if f.op(op).results().iter().all(|&v| f.tensor(v).is_none_or(|t| t.known_shape().is_some())) {
        return;
    }
    if let Ok(Some(inferred)) = infer(f, op) {
        for (v, ty) in f.op(op).results().to_vec().into_iter().zip(inferred) {
            if let Some(t) = ty.as_tensor() {
                sharpen(f, v, t.shape.iter().map(|d| Some(d.clone())));
            }
        }
    }
    if let &[result] = f.op(op).results()
        && let Some(sizes) = f.tensor(result).and_then(|ty| sizes(f, values, op, ty))
    {
        sharpen(f, result, sizes);
    }
    bound(f, values, op);
}

/// Bounds the sizes that an op gives rise to, where they are no monomials: the larger of two that broadcast, the sum of
/// those that are joined, what a slice leaves.
fn bound(f: &mut Function, values: &Values, op: OpId) {
    let &[result] = f.op(op).results() else { return };
    let Some(ty) = f.tensor(result).cloned() else { return };
    for (i, dim) in ty.shape.iter().enumerate() {
        let ([symbol], 1) = (dim.symbols(), dim.coef()) else { continue };
        let range = match &**f.op(op).kind() {
            "concat" => joined(f, op, i),
            "slice_by_index" => sliced(f, values, op, i),
            kind if is_elementwise(kind) => widened(f, op, i, ty.rank()),
            _ => None,
        };
        if let Some((lo, hi)) = range {
            let size = |n: i64| u64::try_from(n).ok();
            f.narrow_symbol(*symbol, size(lo).unwrap_or(0), hi.and_then(size));
        }
    }
}

/// The least and, if there is one, the largest value.
type Range = (i64, Option<i64>);

fn range(f: &Function, dim: &Dim) -> Option<Range> {
    let p = Poly::of_dim(dim)?;
    Some((p.lower(f).unwrap_or(0), p.upper(f)))
}

/// The larger of the sizes that the operands of an op have on axis `i` of its `rank`.
fn widened(f: &Function, op: OpId, i: usize, rank: usize) -> Option<Range> {
    let shapes = f.op(op).operands().iter().filter_map(|o| Some(&f.operand_type(o).as_tensor()?.shape));
    let sizes = shapes.filter_map(|s| s.get((i + s.len()).checked_sub(rank)?));
    sizes.map(|d| range(f, d)).reduce(|a, b| {
        let (a, b) = (a?, b?);
        Some((a.0.max(b.0), a.1.zip(b.1).map(|(a, b)| a.max(b))))
    })?
}

/// The sum of the sizes that the operands of a `concat` have on axis `i`, if it joins along that.
fn joined(f: &Function, op: OpId, i: usize) -> Option<Range> {
    if views::Concat::of(f, op)?.axis != i {
        return None;
    }
    f.op(op).param("values").iter().try_fold((0i64, Some(0i64)), |sum, operand| {
        let (lo, hi) = range(f, f.operand_type(operand).as_tensor()?.shape.get(i)?)?;
        Some((sum.0.checked_add(lo)?, sum.1.zip(hi).and_then(|(a, b)| a.checked_add(b))))
    })
}

/// What a slice leaves of the axis that becomes axis `i`.
fn sliced(f: &Function, values: &Values, op: OpId, i: usize) -> Option<Range> {
    let slice = views::Slice::of(f, op)?;
    let (from, axis) = slice.axes.iter().enumerate().filter(|(_, a)| !a.squeeze).nth(i)?;
    let n = f.tensor(f.op(op).value("x")?)?.shape.get(from)?;
    let (shortest, longest) = range(f, n)?;
    let least = || {
        let (begin, end) = span(f, values, op, from, n)?;
        let inside = axis.stride == 1 && begin.lower(f)? >= 0;
        shortest.min(end.lower(f)?).checked_sub(begin.upper(f)?).filter(|_| inside)
    };
    Some((least().unwrap_or(0), longest))
}

/// Where a `slice_by_index` begins and ends on an axis of size `n`.
fn span(f: &Function, values: &Values, op: OpId, axis: usize, n: &Dim) -> Option<(Poly, Poly)> {
    let masked = |name: &str| f.ints(op, name).is_some_and(|m| m.get(axis) == Some(&1));
    let at = |name: &str| values.param(f, op, name)?.get(axis)?.clone();
    let begin = if masked("begin_mask") { Poly::constant(0) } else { at("begin")? };
    let end = if masked("end_mask") { Poly::of_dim(n)? } else { at("end")? };
    Some((begin, end))
}

/// Whether an op broadcasts its operands against each other.
fn is_elementwise(kind: &str) -> bool {
    matches!(
        kind,
        "add"
            | "sub"
            | "mul"
            | "real_div"
            | "floor_div"
            | "mod"
            | "pow"
            | "maximum"
            | "minimum"
            | "equal"
            | "not_equal"
            | "greater"
            | "greater_equal"
            | "less"
            | "less_equal"
            | "logical_and"
            | "logical_or"
            | "logical_xor"
            | "select"
    )
}

/// Replaces the unknown sizes of a value's type; known ones stay.
fn sharpen(f: &mut Function, v: ValueId, sizes: impl IntoIterator<Item = Option<Dim>>) {
    let Some(ty) = f.tensor(v) else { return };
    let mut better = ty.clone();
    for (dim, size) in better.shape.iter_mut().zip(sizes) {
        if let (None, Some(size)) = (dim.as_known(), size) {
            *dim = size;
        }
    }
    if better != *ty {
        f.refine_type(v, ValueType::Tensor(better));
    }
}

/// The sizes of an op's result as far as arithmetic tells.
fn sizes(f: &Function, values: &Values, op: OpId, ty: &TensorType) -> Option<Vec<Option<Dim>>> {
    let x = || f.op(op).value("x").and_then(|v| f.tensor(v));
    match &**f.op(op).kind() {
        "tile" => {
            let reps = values.param(f, op, "reps")?;
            let x = x()?;
            let size = |d: &Dim, r: &Option<Poly>| d.checked_mul(&r.as_ref()?.as_dim()?);
            Some(x.shape.iter().zip(&reps).map(|(d, r)| size(d, r)).collect())
        }
        "reshape" => {
            let shape = values.param(f, op, "shape")?;
            let volume = Dim::product(&x()?.shape)?;
            let mut sizes: Vec<Option<Dim>> = shape
                .iter()
                .map(|s| s.as_ref().filter(|s| s.as_constant() != Some(0)).and_then(Poly::as_dim))
                .collect();
            // One size that is -1, or not known, is what the others leave.
            let open: Vec<usize> = (0..sizes.len()).filter(|&i| sizes[i].is_none()).collect();
            if let [only] = open[..] {
                let rest = Dim::product(sizes.iter().flatten())?;
                sizes[only] = volume.checked_div(&rest);
            }
            Some(sizes)
        }
        "fill" => Some(values.param(f, op, "shape")?.iter().map(|s| s.as_ref()?.as_dim()).collect()),
        "range_1d" => {
            let one = |name: &str| values.param(f, op, name)?.into_iter().next().flatten();
            let length = one("end")?.sub(&one("start")?)?;
            (one("step")?.as_constant()? == 1).then(|| vec![length.as_dim()])
        }
        "slice_by_size" => Some(values.param(f, op, "size")?.iter().map(|s| s.as_ref()?.as_dim()).collect()),
        "slice_by_index" => {
            let slice = views::Slice::of(f, op)?;
            let x = x()?;
            let mut out = Vec::new();
            for (i, axis) in slice.axes.iter().enumerate() {
                if axis.squeeze {
                    continue;
                }
                let computed = || {
                    let n = Poly::of_dim(&x.shape[i])?;
                    let (begin, end) = span(f, values, op, i, &x.shape[i])?;
                    let inside = at_least(f, &begin, &Poly::constant(0))? && at_least(f, &n, &end)?;
                    let length = end.sub(&begin)?;
                    (axis.stride == 1 && inside && length.lower(f)? >= 0).then(|| length.as_dim())?
                };
                out.push(axis.extent.clone().or_else(computed));
            }
            (out.len() == ty.rank()).then_some(out)
        }
        _ => None,
    }
}
