//! What the uses of an input say about its values: the range of an integer, or that it masks attention scores.

use std::collections::{BTreeMap, HashSet};
use std::ops::RangeInclusive;

use crate::ir::{DType, Dim, Function, Id, OpId, Operand, Symbol, Use, ValueId};

/// Constants beyond this many elements are not read.
const SMALL: u64 = 1 << 16;

/// Sizes chosen for the unknown dimensions of a function's inputs.
#[derive(Clone, Debug, Default)]
pub(super) struct Sizes(BTreeMap<Symbol, u64>);

impl Sizes {
    /// Takes `size` for `dim`; false when `dim` is known or chosen to be something else, or is a product.
    pub(super) fn bind(&mut self, dim: &Dim, size: u64) -> bool {
        match (dim.as_known(), dim.symbols()) {
            (Some(known), _) => known == size,
            (None, &[symbol]) if dim.coef() == 1 => *self.0.entry(symbol).or_insert(size) == size,
            _ => false,
        }
    }

    pub(super) fn of(&self, dim: &Dim) -> Option<i64> {
        let size = dim.symbols().iter().try_fold(dim.coef(), |n, s| n.checked_mul(*self.0.get(s)?))?;
        i64::try_from(size).ok()
    }
}

/// The values an integer input may take.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Implied {
    /// Smallest and largest; empty when the uses contradict each other.
    pub(super) range: RangeInclusive<i64>,
    /// Whether it says where something is written or read along an axis, as a cache position does.
    pub(super) position: bool,
}

/// The values for which every gather, scatter, slice and `slice_update` that the integer input `v` reaches stays within
/// its axis; `None` when it reaches none. A `select` between an index and the index plus the axis size, which
/// converters write to admit negative indices, counts as the index.
pub(super) fn implied_range(f: &Function, v: ValueId, sizes: &Sizes) -> Option<Implied> {
    let mut search = Search { f, sizes, found: None, seen: HashSet::new(), queue: Vec::new() };
    search.push(Flow { value: v, lo: 0, hi: 0, at: None });
    while let Some(flow) = search.queue.pop() {
        for u in f.value(flow.value).uses() {
            if let Use::Op { op, operand } = *u {
                search.visit(flow, op, operand as usize);
            }
        }
    }
    search.found
}

/// A value whose elements are elements of the input plus something in `lo..=hi`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Flow {
    value: ValueId,
    lo: i64,
    hi: i64,
    /// First position and number of the elements this holds for, in a vector put together from parts; else all.
    at: Option<(usize, usize)>,
}

struct Search<'f> {
    f: &'f Function,
    sizes: &'f Sizes,
    found: Option<Implied>,
    seen: HashSet<Flow>,
    queue: Vec<Flow>,
}

impl Search<'_> {
    fn push(&mut self, flow: Flow) {
        if self.seen.insert(flow) {
            self.queue.push(flow);
        }
    }

    /// The results of `op` hold what `flow` says.
    fn pass(&mut self, op: OpId, flow: Flow) {
        for &value in self.f.op(op).results() {
            self.push(Flow { value, ..flow });
        }
    }

    /// Elements of `flow` lie in `range`.
    fn require(&mut self, flow: Flow, range: RangeInclusive<i64>, position: bool) {
        let (lo, hi) = (range.start().saturating_sub(flow.lo), range.end().saturating_sub(flow.hi));
        let old = self.found.take().unwrap_or(Implied { range: lo..=hi, position });
        let range = lo.max(*old.range.start())..=hi.min(*old.range.end());
        self.found = Some(Implied { range, position: position || old.position });
    }

    fn visit(&mut self, flow: Flow, op: OpId, operand: usize) {
        let data = self.f.op(op);
        let Some(param) = data.param_of(operand) else { return };
        match (data.kind().as_str(), param.as_str()) {
            ("cast" | "identity", "x") => self.pass(op, flow),
            ("select", "a") => self.pass(op, flow),
            ("select", "b") if !self.is_wrapped_index(op) => self.pass(op, flow),
            (
                "reshape" | "squeeze" | "expand_dims" | "transpose" | "tile" | "flatten2d" | "split" | "reverse"
                | "slice_by_index" | "slice_by_size" | "gather" | "gather_along_axis" | "gather_nd",
                "x",
            ) if flow.at.is_none() => self.pass(op, flow),
            ("concat" | "stack", "values") => self.join(flow, op, operand),
            ("add", "x") => self.shift(flow, op, "y", 1),
            ("add", "y") => self.shift(flow, op, "x", 1),
            ("sub", "x") => self.shift(flow, op, "y", -1),
            ("range_1d", "start") => self.pass(op, flow),
            ("range_1d", "end") => {
                self.pass(op, Flow { lo: flow.lo.saturating_sub(1), hi: flow.hi.saturating_sub(1), ..flow });
            }
            ("gather" | "gather_along_axis", "indices") => self.index(flow, op, "x"),
            ("scatter" | "scatter_along_axis", "indices") => self.index(flow, op, "data"),
            ("gather_nd", "indices") => self.nd_index(flow, op, "x"),
            ("scatter_nd", "indices") => self.nd_index(flow, op, "data"),
            ("one_hot", "indices") => {
                if let Some(n) = self.f.int(op, "one_hot_vector_size") {
                    self.require(flow, 0..=n.saturating_sub(1), false);
                }
            }
            ("slice_by_index" | "slice_by_size" | "slice_update", "begin" | "end") => self.window(flow, op, param),
            _ => {}
        }
    }

    /// `select(i >= 0, i, i + n)`.
    fn is_wrapped_index(&self, op: OpId) -> bool {
        let data = self.f.op(op);
        let Some(test) = data.value("cond").and_then(|c| self.f.producer(c)) else { return false };
        *self.f.op(test).kind() == "greater_equal"
            && self.f.op(test).value("x") == data.value("a")
            && self.f.int(test, "y") == Some(0)
    }

    fn shift(&mut self, flow: Flow, op: OpId, other: &str, sign: i64) {
        let [other] = self.f.op(op).param(other) else { return };
        let Some(values) = self.small_ints(other) else { return };
        let values = match flow.at {
            Some((start, len)) if values.len() > 1 => values.get(start..start.saturating_add(len)).unwrap_or(&[]),
            _ => &values[..],
        };
        let (Some(lo), Some(hi)) =
            (values.iter().map(|v| v.saturating_mul(sign)).min(), values.iter().map(|v| v.saturating_mul(sign)).max())
        else {
            return;
        };
        self.pass(op, Flow { lo: flow.lo.saturating_add(lo), hi: flow.hi.saturating_add(hi), ..flow });
    }

    fn small_ints(&self, operand: &Operand) -> Option<Vec<i64>> {
        let small = self.f.operand_literal(operand)?.ty.as_tensor()?.volume()? <= SMALL;
        small.then(|| self.f.operand_ints(operand))?
    }

    /// Follows the flow into a vector made of parts; into other tensors as a whole.
    fn join(&mut self, flow: Flow, op: OpId, operand: usize) {
        let data = self.f.op(op);
        let is_vector = data.results().first().and_then(|&v| self.f.tensor(v)).is_some_and(|t| t.rank() == 1);
        if !is_vector {
            if flow.at.is_none() {
                self.pass(op, flow);
            }
            return;
        }
        let first = data.params().take_while(|(name, _)| *name != "values").map(|(_, o)| o.len()).sum::<usize>();
        let mut start = 0usize;
        for (i, part) in data.param("values").iter().enumerate() {
            let Some(len) = self.f.operand_type(part).as_tensor().and_then(|t| self.volume(&t.shape)) else { return };
            if first + i == operand {
                let (skip, len) = flow.at.unwrap_or((0, len));
                self.pass(op, Flow { at: Some((start.saturating_add(skip), len)), ..flow });
            }
            start = start.saturating_add(len);
        }
    }

    fn volume(&self, shape: &[Dim]) -> Option<usize> {
        usize::try_from(self.sizes.of(&Dim::product(shape)?)?).ok()
    }

    fn index(&mut self, flow: Flow, op: OpId, data: &str) {
        let axis = self.f.int(op, "axis").unwrap_or(0);
        let Some(shape) = self.shape(op, data) else { return };
        let axis = if axis < 0 { axis.saturating_add(shape.len() as i64) } else { axis };
        if let Some(&Some(n)) = usize::try_from(axis).ok().and_then(|i| shape.get(i)) {
            self.require(flow, 0..=n.saturating_sub(1), false);
        }
    }

    /// An index into several axes at once: stays within the shortest.
    fn nd_index(&mut self, flow: Flow, op: OpId, data: &str) {
        let shortest = self.shape(op, data).and_then(|s| s.into_iter().flatten().min());
        if let Some(n) = shortest {
            self.require(flow, 0..=n.saturating_sub(1), false);
        }
    }

    /// `begin` or `end` of a window of `q` elements: `begin` within `0..=extent - q`, `end` within `q..=extent`.
    fn window(&mut self, flow: Flow, op: OpId, param: &str) {
        let Some(shape) = self.shape(op, "x") else { return };
        let masked = self.f.ints(op, &format!("{param}_mask")).unwrap_or_default();
        let squeezed = self.f.ints(op, "squeeze_mask").unwrap_or_default();
        let set = |mask: &[i64], axis: usize| mask.get(axis).is_some_and(|&m| m != 0);
        let (start, len) = flow.at.unwrap_or((0, shape.len()));
        for (axis, extent) in shape.into_iter().enumerate().skip(start).take(len) {
            let Some(extent) = extent else { continue };
            if set(&masked, axis) || param == "end" && set(&squeezed, axis) {
                continue;
            }
            let q = if set(&squeezed, axis) { 1 } else { self.window_len(op, axis, &squeezed).unwrap_or(1).max(1) };
            let range = if param == "begin" { 0..=extent.saturating_sub(q) } else { q..=extent };
            self.require(flow, range, true);
        }
    }

    /// How far a window reaches along an axis: from what is written into it or comes out of it.
    fn window_len(&self, op: OpId, axis: usize, squeezed: &[i64]) -> Option<i64> {
        let data = self.f.op(op);
        let content = match data.kind().as_str() {
            "slice_update" => data.value("update"),
            _ => data.results().first().copied(),
        };
        let kept = axis - squeezed.iter().take(axis).filter(|&&s| s != 0).count();
        let n = self.sizes.of(self.f.tensor(content?)?.shape.get(kept)?)?;
        let step = self.f.ints(op, "stride").and_then(|s| s.get(axis).copied()).unwrap_or(1).saturating_abs();
        Some(n.saturating_sub(1).saturating_mul(step).saturating_add(1))
    }

    fn shape(&self, op: OpId, param: &str) -> Option<Vec<Option<i64>>> {
        let [operand] = self.f.op(op).param(param) else { return None };
        let ty = self.f.operand_type(operand).as_tensor()?;
        Some(ty.shape.iter().map(|d| self.sizes.of(d)).collect())
    }
}

/// Ops that move, scale or retype a mask without making it something else; the mask is their `x` or `y`.
const CARRIERS: &[&str] = &[
    "cast",
    "identity",
    "expand_dims",
    "squeeze",
    "reshape",
    "transpose",
    "slice_by_index",
    "slice_by_size",
    "tile",
    "mul",
    "logical_and",
    "logical_or",
    "logical_not",
];

/// Ops between a matmul and a softmax that keep scores scores.
const SCORE_OPS: &[&str] = &[
    "add",
    "sub",
    "mul",
    "real_div",
    "maximum",
    "minimum",
    "clip",
    "tanh",
    "cast",
    "select",
    "reshape",
    "expand_dims",
    "squeeze",
    "transpose",
    "concat",
];

/// Whether input `v` masks attention scores: it is the mask of an sdpa, chooses in a `select`, or is added to (subtracted
/// from) scores, which are products of matrices or, if it is called a mask, anything, on their way to a softmax.
pub(super) fn is_mask(f: &Function, v: ValueId) -> bool {
    let named = f.value(v).name().contains("mask") && f.tensor(v).is_some_and(|t| t.rank() >= 3);
    let is_bool = f.tensor(v).is_some_and(|t| t.dtype == DType::Bool);
    forward(f, v, |op, operand| {
        let data = f.op(op);
        let Some(param) = data.param_of(operand) else { return Step::Stop };
        match (data.kind().as_str(), param.as_str()) {
            ("scaled_dot_product_attention", "attn_mask") => Step::Found,
            ("select", "cond") if is_bool => Step::Found,
            ("add" | "sub", _) if !is_bool => {
                let other = if param == "x" { "y" } else { "x" };
                let scores = named || data.value(other).is_some_and(|o| is_scores(f, o));
                if scores && data.results().iter().any(|&r| reaches_softmax(f, r)) { Step::Found } else { Step::Stop }
            }
            (kind, "x" | "y") if CARRIERS.contains(&kind) => Step::Follow,
            _ => Step::Stop,
        }
    })
}

fn reaches_softmax(f: &Function, v: ValueId) -> bool {
    forward(f, v, |op, _| match f.op(op).kind().as_str() {
        "softmax" | "exp" => Step::Found,
        kind if SCORE_OPS.contains(&kind) => Step::Follow,
        _ => Step::Stop,
    })
}

fn is_scores(f: &Function, v: ValueId) -> bool {
    let mut seen = HashSet::new();
    let mut queue = vec![v];
    while let Some(v) = queue.pop() {
        let Some(op) = f.producer(v).filter(|_| seen.insert(v)) else { continue };
        match f.op(op).kind().as_str() {
            "matmul" | "einsum" => return true,
            kind if SCORE_OPS.contains(&kind) => {
                queue.extend(f.op(op).operands().iter().filter_map(Operand::as_value));
            }
            _ => {}
        }
    }
    false
}

enum Step {
    Found,
    Follow,
    Stop,
}

/// Whether `step` finds what it looks for among the uses of `v` and of every result it says to follow.
fn forward(f: &Function, v: ValueId, step: impl Fn(OpId, usize) -> Step) -> bool {
    let mut seen = vec![false; f.value_capacity()];
    let mut queue = vec![v];
    while let Some(v) = queue.pop() {
        if std::mem::replace(&mut seen[v.index()], true) {
            continue;
        }
        for u in f.value(v).uses() {
            let Use::Op { op, operand } = *u else { continue };
            match step(op, operand as usize) {
                Step::Found => return true,
                Step::Follow => queue.extend_from_slice(f.op(op).results()),
                Step::Stop => {}
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use DType::{F16, I16, I32};

    use super::*;
    use crate::equiv::graph::{Graph, ty};
    use crate::ir::{Literal, TensorType};

    fn implied(g: &Graph, v: ValueId) -> Option<(i64, i64, bool)> {
        implied_range(&g.f, v, &Sizes::default()).map(|i| (*i.range.start(), *i.range.end(), i.position))
    }

    /// `position` reaches one `slice_update` of `q` rows the way exporters write it.
    fn cache_write(q: u64) -> (Graph, ValueId) {
        let mut g = Graph::new();
        let position = g.input("position", ty(I32, &[1]));
        let cache = g.input("cache", ty(F16, &[2, 1, 2, 32, 16]));
        let update = g.input("update", ty(F16, &[1, 2, q, 16]));
        let slice = vec![("x", position.into()), ("begin", [0][..].into()), ("end", [1][..].into())];
        let b = g.op("slice_by_index", "b", ty(I32, &[]), slice);
        let e = g.op("add", "e", ty(I32, &[1]), vec![("x", b.into()), ("y", [q as i64][..].into())]);
        let b1 = g.op("expand_dims", "b1", ty(I32, &[1]), vec![("x", b.into()), ("axes", [0][..].into())]);
        let mut window = vec![("x", cache.into()), ("update", update.into())];
        for (param, v) in [("begin", b1), ("end", e)] {
            let zero = || [0][..].into();
            let values = vec![zero(), [0, 0][..].into(), v.into(), zero()];
            let vector = g.variadic("concat", param, ty(I32, &[5]), vec![("values", values), ("axis", vec![0.into()])]);
            window.push((param, vector.into()));
        }
        window.push(("squeeze_mask", Literal::bools(&[true, false, false, false, false]).into()));
        window.push(("end_mask", Literal::bools(&[false, true, true, false, true]).into()));
        g.op("slice_update", "written", ty(F16, &[2, 1, 2, 32, 16]), window);
        (g, position)
    }

    #[test]
    fn a_cache_position_leaves_room_for_its_rows() {
        for q in [1, 8] {
            let (g, position) = cache_write(q);
            assert_eq!(implied(&g, position), Some((0, 32 - q as i64, true)));
        }
    }

    #[test]
    fn a_begin_vector_given_whole_fits_every_axis() {
        let mut g = Graph::new();
        let x = g.input("x", ty(F16, &[8, 32]));
        let begin = g.input("begin", ty(I32, &[2]));
        let args = vec![("x", x.into()), ("begin", begin.into()), ("size", [3, 4][..].into())];
        g.op("slice_by_size", "y", ty(F16, &[3, 4]), args);
        assert_eq!(implied(&g, begin), Some((0, 5, true)));
    }

    #[test]
    fn a_token_id_stays_within_the_table_and_is_not_negative() {
        let mut g = Graph::new();
        let ids = g.input("ids", ty(I32, &[1, 1]));
        let shape = |d| ty(d, &[1, 1]);
        let narrow = g.op("cast", "narrow", shape(I16), vec![("x", ids.into()), ("dtype", "int16".into())]);
        let test = vec![("x", narrow.into()), ("y", 0.into())];
        let cond = g.op("greater_equal", "cond", shape(DType::Bool), test);
        let wrapped = g.op("add", "wrapped", shape(I16), vec![("x", narrow.into()), ("y", 96.into())]);
        let choice = vec![("cond", cond.into()), ("a", narrow.into()), ("b", wrapped.into())];
        let index = g.op("select", "index", shape(I16), choice);
        let table = Literal::blob(ty(F16, &[96, 64]), "weights", 64);
        let args = vec![("x", table.into()), ("indices", index.into()), ("axis", 0.into())];
        g.op("gather", "y", ty(F16, &[1, 1, 64]), args);
        assert_eq!(implied(&g, ids), Some((0, 95, false)));
    }

    #[test]
    fn several_uses_intersect_and_constants_shift() {
        let mut g = Graph::new();
        let i = g.input("i", ty(I32, &[1]));
        let rows = g.op("add", "rows", ty(I32, &[4]), vec![("x", [0, 1, 2, 3][..].into()), ("y", i.into())]);
        let less = g.op("sub", "less", ty(I32, &[1]), vec![("x", i.into()), ("y", 2.into())]);
        for (name, index, n) in [("a", rows, 10), ("b", less, 100)] {
            let table = g.input(name, ty(F16, &[5, n]));
            let args = vec![("x", table.into()), ("indices", index.into()), ("axis", (-1).into())];
            g.op("gather", &format!("{name}_row"), ty(F16, &[5, 1]), args);
        }
        assert_eq!(implied(&g, i), Some((2, 6, false)), "0 ≤ i, i + 3 < 10 and 0 ≤ i - 2 < 100");
    }

    #[test]
    fn a_range_is_followed_from_both_ends() {
        let mut g = Graph::new();
        let p = g.input("p", ty(I32, &[]));
        let end = g.op("add", "end", ty(I32, &[]), vec![("x", p.into()), ("y", 4.into())]);
        let args = vec![("start", p.into()), ("end", end.into()), ("step", 1.into())];
        let positions = g.op("range_1d", "positions", ty(I32, &[4]), args);
        let table = g.input("cos", ty(F16, &[32, 16]));
        let args = vec![("x", table.into()), ("indices", positions.into()), ("axis", 0.into())];
        g.op("gather", "rope", ty(F16, &[4, 16]), args);
        assert_eq!(implied(&g, p), Some((0, 28, false)));
    }

    #[test]
    fn unknown_sizes_count_once_they_are_chosen() {
        let mut g = Graph::new();
        let n = g.dim(1, 64);
        let x = g.input("x", TensorType::new(F16, [n.clone()]));
        let i = g.input("i", ty(I32, &[1]));
        g.op("gather", "y", ty(F16, &[1]), vec![("x", x.into()), ("indices", i.into())]);
        assert_eq!(implied(&g, i), None);
        let mut sizes = Sizes::default();
        assert!(sizes.bind(&n, 12) && !sizes.bind(&n, 13));
        assert_eq!(implied_range(&g.f, i, &sizes).map(|i| i.range), Some(0..=11));
    }

    #[test]
    fn arithmetic_implies_nothing() {
        let mut g = Graph::new();
        let i = g.input("i", ty(I32, &[1]));
        g.op("cast", "x", ty(F16, &[1]), vec![("x", i.into()), ("dtype", "fp16".into())]);
        assert_eq!(implied(&g, i), None);
    }

    #[test]
    fn masks_are_what_is_added_to_scores() {
        let mut g = Graph::new();
        let t = |n| ty(F16, &[1, 2, 4, n]);
        let [q, k, bias, mask] = ["q", "k", "bias", "m"].map(|n| g.input(n, t(4)));
        let q = g.op("add", "q1", t(4), vec![("x", q.into()), ("y", bias.into())]);
        let scores = g.op("matmul", "scores", t(4), vec![("x", q.into()), ("y", k.into())]);
        let cut = g.op("slice_by_index", "cut", t(4), vec![("x", mask.into()), ("begin", [0, 0, 0, 0][..].into())]);
        let masked = g.op("add", "masked", t(4), vec![("x", cut.into()), ("y", scores.into())]);
        let wide = g.op("cast", "wide", ty(DType::F32, &[1, 2, 4, 4]), vec![("x", masked.into())]);
        g.op("softmax", "p", ty(DType::F32, &[1, 2, 4, 4]), vec![("x", wide.into()), ("axis", (-1).into())]);
        assert_eq!([k, bias, mask].map(|v| is_mask(&g.f, v)), [false, false, true]);
    }

    #[test]
    fn masks_of_sdpa_and_select_and_named_masks() {
        let mut g = Graph::new();
        let t = ty(F16, &[1, 2, 4, 4]);
        let [q, m] = ["q", "m"].map(|n| g.input(n, t.clone()));
        let args = ["query", "key", "value"].map(|p| (p, q.into()));
        g.op(
            "scaled_dot_product_attention",
            "o",
            t.clone(),
            args.into_iter().chain([("attn_mask", m.into())]).collect(),
        );
        let cond = g.input("cond", ty(DType::Bool, &[4, 4]));
        g.op("select", "s", t.clone(), vec![("cond", cond.into()), ("a", q.into()), ("b", q.into())]);
        let named = g.input("attention_mask", t.clone());
        let sum = g.op("add", "sum", t.clone(), vec![("x", q.into()), ("y", named.into())]);
        g.op("softmax", "p", t, vec![("x", sum.into()), ("axis", (-1).into())]);
        assert_eq!([q, m, cond, named].map(|v| is_mask(&g.f, v)), [false, true, true, true]);
    }
}
