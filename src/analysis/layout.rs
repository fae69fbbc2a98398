//! Layouts: how the elements of one value lie in another.
//!
//! The layout of a value `v` over a source `s` writes each axis of `v` as a list of *digits* (extent, stride), major to
//! minor, so that element `(i₀ … iₙ)` of `v` is element `offset + Σ digit · stride` of the row-major `s`. A digit of
//! stride 0 repeats. Every spelling of `repeat_kv` ends in the same layout: a batch axis with the digits
//! `(n_kv_heads, t)(group, 0)`; tiling the head axis gives `(group, 0)(n_kv_heads, t)`, which is another mapping.
//!
//! | op | effect |
//! |---|---|
//! | reshape, expand_dims, squeeze, flatten2d, identity, cast to the same type | digits are regrouped |
//! | transpose | axes are permuted |
//! | tile | prepends `(reps, 0)` |
//! | concat, stack of views of one source | the operands' offsets are refitted to digits |
//! | slice_by_index, slice_by_size, split, reverse with static bounds | offset, extents, signs |
//! | gather, gather_along_axis, gather_nd with constant indices | the index list is refitted to digits |
//! | mul by ones, real_div by ones | `(n, 0)` on widened axes |
//! | anything else | the value is its own source |

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use serde::{Serialize, Serializer};
use smallvec::{SmallVec, smallvec};

use crate::ir::{DType, Def, Dim, Function, LiteralData, OpId, Operand, ValueId};
use crate::opset::views::{self, AxisSlice};

/// Longest index list that is tried for a fit.
const MAX_INDEX_LIST: usize = 65_536;
/// Largest constant of indices that is read.
const MAX_INDEX_BYTES: u64 = 65_536;
/// Longest chain of views that is followed.
const MAX_CHAIN: usize = 64;

/// A signed stride in elements of the source. Zero means repetition.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Stride {
    negative: bool,
    size: Dim,
}

impl Stride {
    /// The stride of a repeated digit.
    pub fn zero() -> Stride {
        Stride { negative: false, size: Dim::known(0) }
    }
    /// A positive stride.
    pub fn of(size: Dim) -> Stride {
        Stride { negative: false, size }
    }
    /// A known stride.
    pub fn known(stride: i64) -> Stride {
        Stride { negative: stride < 0, size: Dim::known(stride.unsigned_abs()) }
    }
    /// Whether the digit repeats.
    pub fn is_zero(&self) -> bool {
        self.size.as_known() == Some(0)
    }
    /// The stride, when it is positive.
    pub fn positive(&self) -> Option<&Dim> {
        (!self.negative && !self.is_zero()).then_some(&self.size)
    }
    /// The stride, when it is known.
    pub fn as_known(&self) -> Option<i64> {
        let size = i64::try_from(self.size.as_known()?).ok()?;
        Some(if self.negative { -size } else { size })
    }
    fn times(&self, factor: &Dim) -> Option<Stride> {
        Some(Stride { negative: self.negative, size: self.size.checked_mul(factor)? })
    }
    /// The unknown part of the size, one if there is none.
    fn unit(&self) -> Dim {
        self.size.checked_div(&Dim::known(self.size.coef().max(1))).unwrap_or_else(|| Dim::known(1))
    }
    /// How many times `unit` it is.
    fn count(&self, unit: &Dim) -> Option<i64> {
        match self.is_zero() {
            true => Some(0),
            false => Stride { negative: self.negative, size: self.size.checked_div(unit)? }.as_known(),
        }
    }
    fn plus(&self, other: &Stride) -> Option<Stride> {
        let unit = common_unit([self, other]);
        Stride::known(self.count(&unit)?.checked_add(other.count(&unit)?)?).times(&unit)
    }
}

impl fmt::Display for Stride {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.negative { "-" } else { "" }, self.size)
    }
}

impl Serialize for Stride {
    /// A number, or text where it is not known.
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.as_known() {
            Some(n) => s.serialize_i64(n),
            None => s.collect_str(self),
        }
    }
}

impl fmt::Debug for Stride {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One factor of an axis.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Digit {
    /// Number of values it takes; never one.
    pub extent: Dim,
    /// Distance in the source between neighbouring values.
    pub stride: Stride,
}

impl Digit {
    fn new(extent: Dim, stride: Stride) -> Digit {
        Digit { extent, stride }
    }
    /// Whether the digit repeats its source.
    pub fn repeats(&self) -> bool {
        self.stride.is_zero()
    }
}

impl fmt::Debug for Digit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.extent, self.stride)
    }
}

/// The digits of one axis, major to minor. An axis of extent one has none.
pub type Axis = SmallVec<[Digit; 2]>;

/// The layout of a value over a source. See the [module documentation](self).
#[derive(Clone, PartialEq, Eq)]
pub struct Layout {
    /// The value that is viewed.
    pub source: ValueId,
    /// Position in the source of the element at the origin.
    pub offset: Stride,
    /// Axes, outermost first.
    pub axes: SmallVec<[Axis; 5]>,
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} + {} over {:?}", self.source, self.offset, self.axes)
    }
}

impl Layout {
    /// The layout of a value over itself; `None` when a size is zero or the volume overflows.
    pub fn identity(source: ValueId, shape: &[Dim]) -> Option<Layout> {
        let mut stride = Dim::known(1);
        let mut axes: SmallVec<[Axis; 5]> = SmallVec::new();
        for dim in shape.iter().rev() {
            if dim.as_known() == Some(0) {
                return None;
            }
            axes.push(if dim.is_one() {
                Axis::new()
            } else {
                smallvec![Digit::new(dim.clone(), Stride::of(stride.clone()))]
            });
            stride = stride.checked_mul(dim)?;
        }
        axes.reverse();
        Some(Layout { source, offset: Stride::zero(), axes })
    }

    /// The size of an axis.
    pub fn extent(&self, axis: usize) -> Option<Dim> {
        Dim::product(self.axes[axis].iter().map(|d| &d.extent))
    }

    /// All digits, major to minor, merged where neighbours form one digit.
    pub fn digits(&self) -> SmallVec<[Digit; 8]> {
        let mut out: SmallVec<[Digit; 8]> = SmallVec::new();
        for d in self.axes.iter().flatten() {
            push_merged(&mut out, d.clone());
        }
        out
    }

    /// Whether some digit repeats.
    pub fn repeats(&self) -> bool {
        self.axes.iter().flatten().any(Digit::repeats)
    }

    /// The same elements in the same order under another shape.
    pub fn reshape(&self, shape: &[Dim]) -> Option<Layout> {
        let digits = self.digits();
        Some(Layout { source: self.source, offset: self.offset.clone(), axes: regroup(digits.into_vec(), shape)? })
    }

    /// Axis `i` of the result is axis `perm[i]`.
    pub fn transpose(&self, perm: &[usize]) -> Option<Layout> {
        let axes = perm.iter().map(|&p| self.axes.get(p).cloned()).collect::<Option<_>>()?;
        Some(Layout { source: self.source, offset: self.offset.clone(), axes })
    }

    /// Every axis repeated as a whole `reps[i]` times.
    pub fn tile(&self, reps: &[Dim]) -> Option<Layout> {
        if reps.len() != self.axes.len() {
            return None;
        }
        let mut out = self.clone();
        for (axis, n) in out.axes.iter_mut().zip(reps) {
            if n.as_known() == Some(0) {
                return None;
            }
            if !n.is_one() {
                axis.insert(0, Digit::new(n.clone(), Stride::zero()));
                *axis = merge(axis);
            }
        }
        Some(out)
    }

    /// Elements `begin`, `begin + step`, … of an axis, `len` of them.
    pub fn slice(&self, axis: usize, begin: i64, step: i64, len: u64) -> Option<Layout> {
        let extent = self.extent(axis)?;
        if begin == 0 && step == 1 && extent.as_known() == Some(len) {
            return Some(self.clone());
        }
        let mut out = self.clone();
        if let [d] = &self.axes[axis][..] {
            let n = i64::try_from(d.extent.as_known()?).ok()?;
            let last = begin.checked_add(step.checked_mul(i64::try_from(len).ok()?.checked_sub(1)?)?)?;
            if begin < 0 || begin >= n || last < 0 || last >= n {
                return None;
            }
            let unit = d.stride.unit();
            let by = |n: i64| Stride::known(d.stride.count(&unit)?.checked_mul(n)?).times(&unit);
            out.offset = self.offset.plus(&by(begin)?)?;
            out.axes[axis] = if len == 1 { Axis::new() } else { smallvec![Digit::new(Dim::known(len), by(step)?)] };
            return Some(out);
        }
        let unit = common_unit(self.axes[axis].iter().map(|d| &d.stride));
        let list = index_list(&self.axes[axis], &unit)?;
        let picked = (0..i64::try_from(len).ok()?)
            .map(|i| list.get(usize::try_from(begin.checked_add(i.checked_mul(step)?)?).ok()?).copied())
            .collect::<Option<Vec<i64>>>()?;
        out.set_axis_from_list(axis, &picked, &unit)?;
        Some(out)
    }

    /// The elements of an axis at these positions.
    pub fn gather(&self, axis: usize, indices: &[i64]) -> Option<Layout> {
        let unit = common_unit(self.axes[axis].iter().map(|d| &d.stride));
        let list = index_list(&self.axes[axis], &unit)?;
        let n = list.len() as i64;
        let picked = indices
            .iter()
            .map(|&i| list.get(usize::try_from(if i < 0 { i + n } else { i }).ok()?).copied())
            .collect::<Option<Vec<i64>>>()?;
        let mut out = self.clone();
        out.set_axis_from_list(axis, &picked, &unit)?;
        Some(out)
    }

    /// Axes of extent one (or missing in front) widened to `shape`.
    pub fn broadcast(&self, shape: &[Dim]) -> Option<Layout> {
        let missing = shape.len().checked_sub(self.axes.len())?;
        let mut axes: SmallVec<[Axis; 5]> = smallvec![Axis::new(); missing];
        axes.extend(self.axes.iter().cloned());
        let mut out = Layout { source: self.source, offset: self.offset.clone(), axes };
        for (i, dim) in shape.iter().enumerate() {
            if out.axes[i].is_empty() {
                if dim.as_known() == Some(0) {
                    return None;
                }
                if !dim.is_one() {
                    out.axes[i].push(Digit::new(dim.clone(), Stride::zero()));
                }
            } else if out.extent(i)? != *dim {
                return None;
            }
        }
        Some(out)
    }

    fn set_axis_from_list(&mut self, axis: usize, list: &[i64], unit: &Dim) -> Option<()> {
        let (&first, _) = list.split_first()?;
        self.offset = self.offset.plus(&Stride::known(first).times(unit)?)?;
        self.axes[axis] = fit(list, unit)?;
        Some(())
    }

    /// Views of one source joined along an axis.
    pub fn concat(parts: &[Layout], axis: usize) -> Option<Layout> {
        let first = parts.first()?;
        if let [only] = parts {
            return Some(only.clone());
        }
        let alike = |p: &Layout| {
            p.source == first.source
                && p.axes.len() == first.axes.len()
                && (0..p.axes.len()).all(|i| i == axis || p.axes[i] == first.axes[i])
        };
        if !parts.iter().all(alike) {
            return None;
        }
        let mut out = first.clone();
        if parts.iter().all(|p| p.axes[axis] == first.axes[axis]) {
            let unit = common_unit(parts.iter().map(|p| &p.offset));
            let offsets = parts.iter().map(|p| p.offset.count(&unit)).collect::<Option<Vec<i64>>>()?;
            let mut digits = fit(&offsets, &unit)?;
            digits.extend(first.axes[axis].iter().cloned());
            out.axes[axis] = merge(&digits);
            return Some(out);
        }
        let strides = parts.iter().flat_map(|p| p.axes[axis].iter().map(|d| &d.stride).chain([&p.offset]));
        let unit = common_unit(strides);
        let mut list = Vec::new();
        for p in parts {
            let shift = p.offset.count(&unit)?.checked_sub(first.offset.count(&unit)?)?;
            for i in index_list(&p.axes[axis], &unit)? {
                list.push(i.checked_add(shift)?);
            }
            if list.len() > MAX_INDEX_LIST {
                return None;
            }
        }
        let shift = *list.first()?;
        out.set_axis_from_list(axis, &list, &unit)?;
        debug_assert_eq!(shift, 0);
        Some(out)
    }

    /// The strides of a row-major tensor of this layout's shape, if the layout is exactly that.
    pub fn is_row_major(&self) -> bool {
        let digits = self.digits();
        self.offset.is_zero()
            && match &digits[..] {
                [] => true,
                [one] => one.stride.positive().is_some_and(Dim::is_one),
                _ => false,
            }
    }

    /// Whether every element of a source with `volume` elements occurs exactly once.
    pub fn is_bijection(&self, volume: &Dim) -> bool {
        if !self.offset.is_zero() {
            return false;
        }
        let digits = self.digits();
        stride_order(&digits).is_some_and(|order| {
            let mut covered = Dim::known(1);
            for &i in order.iter().rev() {
                if digits[i].stride.positive() != Some(&covered) {
                    return false;
                }
                match covered.checked_mul(&digits[i].extent) {
                    Some(c) => covered = c,
                    None => return false,
                }
            }
            covered == *volume
        })
    }
}

/// The positions of digits from the largest stride to the smallest; `None` when some stride is not positive or the
/// order is not provable.
pub(crate) fn stride_order(digits: &[Digit]) -> Option<SmallVec<[usize; 8]>> {
    let mut left: Vec<usize> = (0..digits.len()).collect();
    let mut out: SmallVec<[usize; 8]> = SmallVec::new();
    let mut next = Dim::known(1);
    while !left.is_empty() {
        let at = left.iter().position(|&i| digits[i].stride.positive() == Some(&next))?;
        let i = left.remove(at);
        next = next.checked_mul(&digits[i].extent)?;
        out.push(i);
    }
    out.reverse();
    Some(out)
}

/// Appends a digit, merging it into the last one where the two form one digit.
fn push_merged(out: &mut SmallVec<[Digit; 8]>, d: Digit) {
    if d.extent.is_one() {
        return;
    }
    if let Some(last) = out.last() {
        let joins = if d.repeats() {
            last.repeats()
        } else {
            !last.repeats() && d.stride.times(&d.extent).as_ref() == Some(&last.stride)
        };
        if joins && let Some(extent) = last.extent.checked_mul(&d.extent) {
            let stride = d.stride;
            let last = out.len() - 1;
            out[last] = Digit::new(extent, stride);
            return;
        }
    }
    out.push(d);
}

fn merge(digits: &[Digit]) -> Axis {
    let mut out: SmallVec<[Digit; 8]> = SmallVec::new();
    for d in digits {
        push_merged(&mut out, d.clone());
    }
    out.into_iter().collect()
}

/// Distributes digits over axes of these sizes, splitting `(n·m, t)` into `(n, m·t)(m, t)` where needed.
fn regroup(digits: Vec<Digit>, shape: &[Dim]) -> Option<SmallVec<[Axis; 5]>> {
    let mut rest: Vec<Digit> = digits.into_iter().rev().collect();
    let mut axes = SmallVec::new();
    for dim in shape {
        let mut need = dim.clone();
        let mut axis = Axis::new();
        while !need.is_one() {
            let d = rest.pop()?;
            if let Some(left) = need.checked_div(&d.extent) {
                need = left;
                axis.push(d);
            } else {
                let minor = d.extent.checked_div(&need)?;
                axis.push(Digit::new(need, d.stride.times(&minor)?));
                rest.push(Digit::new(minor, d.stride));
                need = Dim::known(1);
            }
        }
        axes.push(axis);
    }
    rest.is_empty().then_some(axes)
}

/// What sizes that are not zero are known multiples of, if they have such a thing in common.
fn common_unit<'s>(strides: impl IntoIterator<Item = &'s Stride>) -> Dim {
    strides.into_iter().find(|s| !s.is_zero()).map_or(Dim::known(1), Stride::unit)
}

/// Offsets of every position of an axis, in units.
fn index_list(axis: &[Digit], unit: &Dim) -> Option<Vec<i64>> {
    let mut list = vec![0i64];
    for d in axis {
        let n = usize::try_from(d.extent.as_known()?).ok()?;
        let stride = d.stride.count(unit)?;
        if list.len().checked_mul(n)? > MAX_INDEX_LIST {
            return None;
        }
        let mut next = Vec::with_capacity(list.len() * n);
        for &base in &list {
            for i in 0..n {
                next.push(base.checked_add(stride.checked_mul(i as i64)?)?);
            }
        }
        list = next;
    }
    Some(list)
}

/// Digits whose offsets are `list` in units, relative to its first entry.
fn fit(list: &[i64], unit: &Dim) -> Option<Axis> {
    let mut list = list.to_vec();
    let mut digits: Vec<Digit> = Vec::new();
    while list.len() > 1 {
        let step = list[1].checked_sub(list[0])?;
        let mut run = 2;
        while run < list.len() && list[run].checked_sub(list[run - 1])? == step {
            run += 1;
        }
        let fits = |n: usize| {
            list.len().is_multiple_of(n)
                && list.chunks_exact(n).all(|c| (1..n).all(|i| c[i].wrapping_sub(c[i - 1]) == step))
        };
        let n = (2..=run).rev().find(|&n| fits(n))?;
        digits.push(Digit::new(Dim::known(n as u64), Stride::known(step).times(unit)?));
        list = list.iter().step_by(n).copied().collect();
    }
    digits.reverse();
    Some(merge(&digits))
}

/// Computes layouts on demand and remembers them. Valid for one revision of the function.
pub struct Layouts<'f> {
    f: &'f Function,
    known: RefCell<HashMap<ValueId, Rc<Vec<Layout>>>>,
}

impl<'f> Layouts<'f> {
    /// An empty memory for `f`.
    pub fn new(f: &'f Function) -> Layouts<'f> {
        Layouts { f, known: RefCell::default() }
    }

    /// The layouts of `v` over every value it is a view of: over itself first, then over ever earlier ancestors.
    /// Empty when `v` is no tensor or has a zero size.
    pub fn of(&self, v: ValueId) -> Rc<Vec<Layout>> {
        // Operands come first, so that long chains do not recurse deeply.
        let mut stack = vec![v];
        while let Some(&top) = stack.last() {
            if self.known.borrow().contains_key(&top) {
                stack.pop();
                continue;
            }
            let missing: Vec<ValueId> =
                self.viewed(top).into_iter().filter(|o| !self.known.borrow().contains_key(o)).collect();
            if missing.is_empty() {
                let layouts = Rc::new(self.compute(top));
                self.known.borrow_mut().insert(top, layouts);
                stack.pop();
            } else {
                stack.extend(missing);
            }
        }
        Rc::clone(&self.known.borrow()[&v])
    }

    /// The layout of `v` over `source`, if `v` is a view of it.
    pub fn over(&self, v: ValueId, source: ValueId) -> Option<Layout> {
        self.of(v).iter().find(|l| l.source == source).cloned()
    }

    fn viewed(&self, v: ValueId) -> SmallVec<[ValueId; 4]> {
        let Def::Result(op, _) = self.f.value(v).def() else { return SmallVec::new() };
        view_operands(self.f, op)
    }

    fn compute(&self, v: ValueId) -> Vec<Layout> {
        let Some(ty) = self.f.tensor(v) else { return Vec::new() };
        let Some(own) = Layout::identity(v, &ty.shape) else { return Vec::new() };
        let mut out = vec![own];
        if let Def::Result(op, index) = self.f.value(v).def() {
            let operands = view_operands(self.f, op);
            if let Some(&first) = operands.first() {
                let known = self.known.borrow();
                for layout in known[&first].iter().take(MAX_CHAIN) {
                    let parts: Option<Vec<Layout>> =
                        operands.iter().map(|o| known[o].iter().find(|l| l.source == layout.source).cloned()).collect();
                    if let Some(l) = parts.and_then(|p| transfer(self.f, op, index as usize, &ty.shape, &p)) {
                        // A stored type may be wrong: such a value is its own source.
                        if l.axes.len() == ty.shape.len()
                            && (0..ty.shape.len()).all(|i| l.extent(i).as_ref() == Some(&ty.shape[i]))
                        {
                            out.push(l);
                        }
                    }
                }
            }
        }
        out
    }
}

/// The operands through which an op's results are views; empty when they are not.
fn view_operands(f: &Function, op: OpId) -> SmallVec<[ValueId; 4]> {
    let data = f.op(op);
    let all = |bindings: &[Operand]| bindings.iter().map(Operand::as_value).collect::<Option<_>>().unwrap_or_default();
    match &**data.kind() {
        "reshape" | "expand_dims" | "squeeze" | "flatten2d" | "identity" | "transpose" | "tile" | "slice_by_index"
        | "slice_by_size" | "split" | "reverse" | "gather" | "gather_nd" | "gather_along_axis" => all(data.param("x")),
        "cast" => match (data.value("x"), data.results()) {
            (Some(x), [y]) if f.ty(x) == f.ty(*y) => smallvec![x],
            _ => SmallVec::new(),
        },
        "concat" | "stack" => all(data.param("values")),
        "mul" => match (data.param("x"), data.param("y")) {
            ([Operand::Value(x)], [one]) if is_ones(f, one) => smallvec![*x],
            ([one], [Operand::Value(y)]) if is_ones(f, one) => smallvec![*y],
            _ => SmallVec::new(),
        },
        "real_div" => match (data.param("x"), data.param("y")) {
            ([Operand::Value(x)], [one]) if is_ones(f, one) => smallvec![*x],
            _ => SmallVec::new(),
        },
        _ => SmallVec::new(),
    }
}

/// Whether an operand is a constant of ones that is written in the program itself.
fn is_ones(f: &Function, operand: &Operand) -> bool {
    f.operand_literal(operand).is_some_and(|l| {
        matches!(l.data, LiteralData::Bytes(_))
            && match l.ty.as_tensor().map(|t| t.dtype) {
                Some(d) if d.is_float() => l.to_floats(&**f.weights()).is_ok_and(|v| v.iter().all(|&x| x == 1.0)),
                Some(DType::I32) => l.to_ints(&**f.weights()).is_ok_and(|v| v.iter().all(|&x| x == 1)),
                _ => false,
            }
    })
}

/// The layout of result `index` of `op` (of this shape), given those of its viewed operands over one source.
fn transfer(f: &Function, op: OpId, index: usize, shape: &[Dim], parts: &[Layout]) -> Option<Layout> {
    let x = parts.first()?;
    let known = |i: usize| shape.get(i).and_then(Dim::as_known);
    match &**f.op(op).kind() {
        "reshape" | "expand_dims" | "squeeze" | "flatten2d" => x.reshape(shape),
        "identity" | "cast" => Some(x.clone()),
        "mul" | "real_div" => x.broadcast(shape),
        "transpose" => x.transpose(&views::Transpose::of(f, op)?.perm),
        // Repetitions that are computed at run time follow from the sizes, where those are known.
        "tile" => {
            let reps: Option<Vec<Dim>> = match views::Tile::of(f, op)?.reps {
                Some(reps) => Some(reps.into_iter().map(Dim::known).collect()),
                None => shape.iter().enumerate().map(|(i, d)| d.checked_div(&x.extent(i)?)).collect(),
            };
            x.tile(&reps?)
        }
        "concat" => {
            let view = views::Concat::of(f, op)?;
            if f.bool(op, "interleave") == Some(true) { None } else { Layout::concat(parts, view.axis) }
        }
        "stack" => {
            let axis = views::Stack::of(f, op)?.axis;
            let widened: Vec<Layout> = parts
                .iter()
                .map(|p| {
                    let mut p = p.clone();
                    (axis <= p.axes.len()).then(|| p.axes.insert(axis, Axis::new()))?;
                    Some(p)
                })
                .collect::<Option<_>>()?;
            Layout::concat(&widened, axis)
        }
        "slice_by_index" => {
            let slice = views::Slice::of(f, op)?;
            let mut out = x.clone();
            for (i, axis) in slice.axes.iter().enumerate() {
                if !takes_all(axis, &x.extent(i)?) {
                    let (begin, step, len) = static_bounds(axis)?;
                    out = out.slice(i, begin, step, len)?;
                }
            }
            for (i, axis) in slice.axes.iter().enumerate().rev() {
                if axis.squeeze {
                    out.axes.remove(i);
                }
            }
            Some(out)
        }
        "slice_by_size" => {
            let begin = f.ints(op, "begin")?;
            let mut out = x.clone();
            for (i, &b) in begin.iter().enumerate() {
                let n = i64::try_from(x.extent(i)?.as_known().unwrap_or(0)).ok()?;
                let b = if b < 0 { b + n } else { b };
                if b == 0 && x.extent(i).as_ref() == shape.get(i) {
                    continue;
                }
                out = out.slice(i, b, 1, known(i)?)?;
            }
            Some(out)
        }
        "split" => {
            let axis = views::Split::of(f, op)?.axis;
            let mut begin = 0;
            for &r in &f.op(op).results()[..index] {
                begin += f.tensor(r)?.shape.get(axis)?.as_known()?;
            }
            x.slice(axis, i64::try_from(begin).ok()?, 1, known(axis)?)
        }
        "reverse" => {
            let axes = match f.has_param(op, "axes") {
                true => f.ints(op, "axes")?,
                false => (0..shape.len() as i64).collect(),
            };
            axes.into_iter().try_fold(x.clone(), |l, axis| {
                let axis = normalise(axis, shape.len())?;
                let n = known(axis)?;
                l.slice(axis, i64::try_from(n).ok()?.checked_sub(1)?, -1, n)
            })
        }
        "gather_nd" => {
            // Coordinates of one number are indices into the first axis.
            let indices = f.op(op).param("indices").first()?;
            let values = static_indices(f, indices)?;
            let dims = &f.operand_type(indices).as_tensor()?.shape;
            let (last, lead) = dims.split_last()?;
            if !last.is_one() || f.int(op, "batch_dims").unwrap_or(0) != 0 {
                return None;
            }
            spread(x.gather(0, &values)?, 0, lead)
        }
        "gather_along_axis" => {
            let indices = f.op(op).param("indices").first()?;
            let values = static_indices(f, indices)?;
            let sizes = f.operand_type(indices).as_tensor()?.known_shape()?;
            let axis = normalise(f.int(op, "axis").unwrap_or(0), sizes.len())?;
            let inner: usize = usize::try_from(sizes[axis + 1..].iter().product::<u64>()).ok()?;
            let n = usize::try_from(sizes[axis]).ok()?;
            // One index for each position of the axis, whatever the others are.
            let along: Vec<i64> = (0..n).map(|i| values.get(i * inner).copied()).collect::<Option<_>>()?;
            let alike = values.iter().enumerate().all(|(i, v)| *v == along[i / inner % n]);
            let same = (0..sizes.len()).all(|i| i == axis || x.extent(i) == Some(Dim::known(sizes[i])));
            if alike && same { x.gather(axis, &along) } else { None }
        }
        "gather" => {
            let indices = f.op(op).param("indices").first()?;
            let values = static_indices(f, indices)?;
            if f.int(op, "batch_dims").unwrap_or(0) != 0 {
                return None;
            }
            let axis = normalise(f.int(op, "axis").unwrap_or(0), x.axes.len())?;
            spread(x.gather(axis, &values)?, axis, &f.operand_type(indices).as_tensor()?.shape)
        }
        _ => None,
    }
}

/// Constant indices; from CoreML7 on, those that count from the end are out of range.
fn static_indices(f: &Function, indices: &Operand) -> Option<Vec<i64>> {
    f.operand_type(indices).as_tensor()?.byte_len().filter(|&n| n <= MAX_INDEX_BYTES)?;
    let values = f.operand_ints(indices)?;
    (f.opset_version() < 7 || values.iter().all(|&i| i >= 0)).then_some(values)
}

/// One axis of a layout as several of these sizes.
fn spread(mut layout: Layout, axis: usize, sizes: &[Dim]) -> Option<Layout> {
    let new = regroup(layout.axes.remove(axis).to_vec(), sizes)?;
    for (i, a) in new.into_iter().enumerate() {
        layout.axes.insert(axis + i, a);
    }
    Some(layout)
}

/// Whether a slice takes the whole of an axis of size `dim`, in order.
pub fn takes_all(axis: &AxisSlice, dim: &Dim) -> bool {
    axis.begin == Some(0) && axis.stride == 1 && axis.extent.as_ref() == Some(dim)
}

/// First index, step and number of indices of a slice whose bounds are known and which is not empty.
fn static_bounds(axis: &AxisSlice) -> Option<(i64, i64, u64)> {
    let len = axis.extent.as_ref()?.as_known().filter(|&n| n > 0)?;
    Some((i64::try_from(axis.begin?).ok()?, axis.stride, len))
}

/// An axis counted from the front.
pub(crate) fn normalise(axis: i64, rank: usize) -> Option<usize> {
    let rank = rank as i64;
    let axis = if axis < 0 { axis + rank } else { axis };
    (0..rank).contains(&axis).then_some(axis as usize)
}
