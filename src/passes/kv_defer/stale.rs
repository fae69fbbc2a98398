//! Hiding the rows that this run replaces, and what masks look like with the new keys behind the old ones.

use std::collections::{BTreeSet, HashMap};

use crate::ir::{DType, Dim, Function, Literal, OpId, Operand, TensorType, ValueId};
use crate::rewrite::{Input, Patch, PatchError};

use super::emit::{Emit, missing};
use super::plan::{Kind, Plan, Track};

/// Where a term that hides stale keys is added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// To an operand of an op: a mask.
    Mask(OpId, usize),
    /// To a grown value.
    Value(ValueId),
}

/// How much smaller than its neighbours a hidden score is made, so that its weight is zero beside any score that is not
/// itself smaller by as much; finite, so that it is added to masks of −∞ without harm.
fn term(dtype: DType, infinite: bool) -> f64 {
    match dtype {
        _ if infinite => f64::INFINITY,
        DType::F16 => 3e4,
        _ => 3e38,
    }
}

/// The place for one normaliser: a mask that is added on the way to it, if nothing but additions, casts and products with
/// positive scalars follow, else the furthest value from which only such ops follow.
pub(super) fn place(f: &Function, plan: &Plan, normalised: ValueId) -> Option<(Place, f64)> {
    let (mut v, mut scale) = (normalised, 1.0);
    loop {
        let track = *plan.tracked.get(&v)?;
        let Some(op) = f.producer(v) else { break };
        let Some((place, next, factor)) = back(f, plan, op, track, scale) else { break };
        if let Some(operand) = place {
            return Some((Place::Mask(op, operand), scale));
        }
        (v, scale) = (next, scale * factor);
    }
    let track = plan.tracked.get(&v)?;
    let free = matches!(track.kind, Kind::Grown { before: 0, after: 0, .. }) && is_float(f, v);
    free.then_some((Place::Value(v), scale))
}

fn is_float(f: &Function, v: ValueId) -> bool {
    f.tensor(v).is_some_and(|t| t.dtype.is_float())
}

/// Whether a term is added on some way to a normaliser at another place than its own. On that way it may change its sign.
pub(super) fn hides_twice(f: &Function, plan: &Plan, normalised: ValueId, own: Place) -> bool {
    let mut seen = BTreeSet::from([normalised]);
    let mut work = vec![normalised];
    while let Some(v) = work.pop() {
        let op = f.producer(v).filter(|_| plan.tracked.contains_key(&v));
        let operands = op.map(|op| f.op(op).operands()).unwrap_or_default();
        let masks = (0..operands.len()).filter_map(|i| Some(Place::Mask(op?, i)));
        let mut here = masks.chain([Place::Value(v)]).filter(|place| *place != own);
        if here.any(|place| plan.places.iter().any(|(p, _)| *p == place)) {
            return true;
        }
        let grown = |v: &ValueId| matches!(plan.tracked.get(v), Some(Track { kind: Kind::Grown { .. }, .. }));
        work.extend(operands.iter().filter_map(|o| o.as_value()).filter(grown).filter(|&v| seen.insert(v)));
    }
    false
}

/// One op back: the operand that is a mask, the grown operand, and the factor on it.
fn back(f: &Function, plan: &Plan, op: OpId, track: Track, scale: f64) -> Option<(Option<usize>, ValueId, f64)> {
    let data = f.op(op);
    let grown = |operand: &Operand| {
        operand.as_value().filter(|v| matches!(plan.tracked.get(v), Some(Track { kind: Kind::Grown { .. }, .. })))
    };
    let mut inner = data.operands().iter().enumerate().filter_map(|(i, o)| Some((i, grown(o)?)));
    let ((at, v), None) = (inner.next()?, inner.next()) else { return None };
    let dtype = f.tensor(*data.results().first()?)?.dtype;
    match &**data.kind() {
        "add" => {
            let other = 1 - at;
            let ty = f.operand_type(data.operands().get(other)?).as_tensor()?;
            let rank = f.tensor(*data.results().first()?)?.rank();
            let size = (track.axis + ty.rank()).checked_sub(rank).and_then(|a| ty.shape.get(a));
            let mask = size.is_some_and(|s| *s == plan.windows[track.window].n);
            Some((mask.then_some(other), v, 1.0))
        }
        "sub" if data.value("x") == Some(v) => Some((None, v, 1.0)),
        "cast" if dtype.is_float() && is_float(f, v) => Some((None, v, 1.0)),
        "concat" => Some((None, v, 1.0)),
        "mul" | "real_div" => {
            let other = data.operands().get(1 - at)?;
            let c = scalar(f, other).filter(|c| *c > 0.0 && c.is_finite())?;
            let factor = match (&**data.kind(), at) {
                ("mul", _) => c,
                (_, 0) => 1.0 / c,
                _ => return None,
            };
            let largest = if dtype == DType::F16 { 65504.0 } else { f64::from(f32::MAX) };
            (term(dtype, false) / (scale * factor) <= largest).then_some((None, v, factor))
        }
        _ => None,
    }
}

fn scalar(f: &Function, operand: &Operand) -> Option<f64> {
    let literal = f.operand_literal(operand)?;
    match &literal.to_floats(&**f.weights()).ok()?[..] {
        [only] => Some(*only),
        _ => None,
    }
}

/// Values made for masks, each once.
#[derive(Debug)]
pub(super) struct Masks {
    infinite: bool,
    positions: HashMap<usize, Input>,
    windows: HashMap<(ValueId, usize, usize), ValueId>,
    extended: HashMap<(ValueId, usize, usize, Option<u64>), ValueId>,
    stale: HashMap<(usize, DType, u64, bool, usize), ValueId>,
    /// Weights of the old and the new keys.
    pub(super) parted: HashMap<ValueId, [ValueId; 2]>,
}

impl Masks {
    pub(super) fn new(infinite: bool) -> Masks {
        Masks {
            infinite,
            positions: HashMap::new(),
            windows: HashMap::new(),
            extended: HashMap::new(),
            stale: HashMap::new(),
            parted: HashMap::new(),
        }
    }
}

/// Adds one op and returns its value.
macro_rules! one_op {
    ($emit:expr, $before:expr, $kind:expr, $name:expr, $inputs:expr, $ty:expr) => {{
        let mut patch = Patch::before($before);
        let at = patch.op($kind, $name, $inputs, $ty);
        $emit.t.insert(&patch, &at)
    }};
}

fn ints(values: &[i64]) -> Input {
    Input::Const(Literal::ints(values))
}

fn vector(len: u64) -> TensorType {
    TensorType::fixed(DType::I32, &[len])
}

impl Emit<'_, '_> {
    /// What an operand holds for the new keys: its elements at the positions they are written to.
    pub(super) fn window(
        &mut self,
        operand: &Operand,
        axis: usize,
        window: usize,
        before: OpId,
    ) -> Result<Input, PatchError> {
        let key = operand.as_value().map(|v| (v, axis, window));
        if let Some(&made) = key.and_then(|key| self.masks.windows.get(&key)) {
            return Ok(made.into());
        }
        let ty = self.t.operand_type(operand).as_tensor().cloned().ok_or_else(|| missing("the type of a mask"))?;
        let w = self.plan.windows[window].clone();
        let position = self.position(window, before)?;
        let begin = self.along(ty.rank(), axis, position.clone(), before)?;
        let mut to = ty.clone();
        to.shape[axis] = w.q.clone();
        let name = format!("{}_new", self.operand_name(operand));
        let x = Input::like(self.t, operand);
        let sizes: Option<Vec<i64>> = to.shape.iter().map(|d| d.as_known().map(|n| n as i64)).collect();
        let made = match sizes {
            Some(sizes) => {
                one_op!(self, before, "slice_by_size", name, [("x", x), ("begin", begin), ("size", ints(&sizes))], to)?
            }
            None => {
                let to_the_end = w.ends_with_the_keys();
                let end =
                    if to_the_end { begin.clone() } else { self.end_of(window, ty.rank(), axis, position, before)? };
                let mut whole = vec![true; ty.rank()];
                whole[axis] = false;
                let begin_mask = Literal::bools(&whole);
                whole[axis] = to_the_end;
                let inputs = [
                    ("x", x),
                    ("begin", begin),
                    ("end", end),
                    ("begin_mask", Input::Const(begin_mask)),
                    ("end_mask", Input::Const(Literal::bools(&whole))),
                ];
                one_op!(self, before, "slice_by_index", name, inputs, to)?
            }
        };
        if let Some(key) = key {
            self.masks.windows.insert(key, made);
        }
        Ok(made.into())
    }

    fn operand_name(&self, operand: &Operand) -> String {
        operand.as_value().map_or("mask".into(), |v| self.name(v))
    }

    /// A vector with `part` at one place and zeros elsewhere.
    fn along(&mut self, rank: usize, at: usize, part: Input, before: OpId) -> Result<Input, PatchError> {
        if let Input::Const(l) = &part {
            let entry = l
                .to_ints(&**self.t.weights())
                .ok()
                .and_then(|v| v.first().copied())
                .ok_or_else(|| missing("a position"))?;
            let mut all = vec![0; rank];
            all[at] = entry;
            return Ok(ints(&all));
        }
        let Input::One(part) = part else { return Err(missing("a position")) };
        let mut patch = Patch::before(before);
        let placed = patch.placed("window_begin", part, at, rank);
        Ok(self.t.insert(&patch, &placed)?.into())
    }

    /// The vector with the index behind the window at one place.
    fn end_of(
        &mut self,
        window: usize,
        rank: usize,
        axis: usize,
        position: Input,
        before: OpId,
    ) -> Result<Input, PatchError> {
        let q = self.new_keys(window, before)?;
        let end = one_op!(self, before, "add", "window_end", [("x", position), ("y", q)], vector(1))?;
        self.along(rank, axis, end.into(), before)
    }

    /// The position of a window, a vector of one.
    fn position(&mut self, window: usize, before: OpId) -> Result<Input, PatchError> {
        if let Some(known) = self.masks.positions.get(&window) {
            return Ok(known.clone());
        }
        let position = match self.plan.windows[window].p.as_constant() {
            Some(p) => ints(&[p]),
            None => self.computed_position(window, before)?,
        };
        self.masks.positions.insert(window, position.clone());
        Ok(position)
    }

    fn computed_position(&mut self, window: usize, before: OpId) -> Result<Input, PatchError> {
        // The update that comes first: all that reads the window follows it.
        let roots = self.plan.roots.iter().filter(|r| r.window == window);
        let first = roots.reduce(|a, b| if self.t.comes_before(b.update.op, a.update.op) { b } else { a });
        let root = first.ok_or_else(|| missing("a window"))?;
        let at = root.look.axes.get(root.axis).copied().flatten().ok_or_else(|| missing("a window"))?;
        let begin = match self.t.op(root.update.op).param("begin") {
            [one] => one.clone(),
            _ => return Err(missing("a position")),
        };
        let mut value = match element(self.t, &begin, at) {
            Some(part) => part,
            None => {
                let inputs = [("x", Input::like(self.t, &begin)), ("begin", ints(&[at as i64])), ("size", ints(&[1]))];
                let dtype = self.t.operand_type(&begin).as_tensor().map_or(DType::I32, |t| t.dtype);
                one_op!(self, before, "slice_by_size", "position", inputs, TensorType::fixed(dtype, &[1]))?
            }
        };
        let ty = self.t.tensor(value).cloned().ok_or_else(|| missing("a position"))?;
        if ty.rank() == 0 {
            let inputs = [("x", Input::One(value.into())), ("axes", ints(&[0]))];
            value = one_op!(self, before, "expand_dims", "position", inputs, TensorType::fixed(ty.dtype, &[1]))?;
        }
        if ty.dtype != DType::I32 {
            let inputs = [("x", Input::One(value.into())), ("dtype", Input::Const(Literal::string("int32")))];
            value = one_op!(self, before, "cast", "position_to_int32", inputs, vector(1))?;
        }
        Ok(value.into())
    }

    /// The number of new keys, a vector of one.
    fn new_keys(&mut self, window: usize, before: OpId) -> Result<Input, PatchError> {
        if let Some(q) = self.plan.windows[window].q.as_known() {
            return Ok(ints(&[q as i64]));
        }
        let root = self.plan.roots.iter().find(|r| r.window == window).ok_or_else(|| missing("a window"))?;
        let (value, axis) = (root.look.value, root.axis);
        let twin = self.twin(value, before)?;
        Ok(self.size(twin, axis, before)?.into())
    }

    /// The number of old keys, a vector of one.
    fn old_keys(&mut self, window: usize, before: OpId) -> Result<Input, PatchError> {
        if let Some(n) = self.plan.windows[window].n.as_known() {
            return Ok(ints(&[n as i64]));
        }
        let root = self.plan.roots.iter().find(|r| r.window == window).ok_or_else(|| missing("a window"))?;
        let (value, axis) = (self.old_value(root.look.value), root.axis);
        Ok(self.size(value, axis, before)?.into())
    }

    fn size(&mut self, v: ValueId, axis: usize, before: OpId) -> Result<ValueId, PatchError> {
        let name = self.name(v);
        let rank = self.shape(v).len() as u64;
        let shape = one_op!(self, before, "shape", format!("{name}_shape"), [("x", v)], vector(rank))?;
        let inputs = [("x", Input::One(shape.into())), ("begin", ints(&[axis as i64])), ("size", ints(&[1]))];
        one_op!(self, before, "slice_by_size", format!("{name}_keys"), inputs, vector(1))
    }

    /// A mask with the new keys behind the old ones, stale ones hidden by a term for this scale.
    pub(super) fn extended(
        &mut self,
        operand: &Operand,
        axis: usize,
        window: usize,
        stale: Option<f64>,
        before: OpId,
    ) -> Result<ValueId, PatchError> {
        let key = operand.as_value().map(|v| (v, axis, window, stale.map(f64::to_bits)));
        if let Some(&made) = key.and_then(|key| self.masks.extended.get(&key)) {
            return Ok(made);
        }
        let ty = self.t.operand_type(operand).as_tensor().cloned().ok_or_else(|| missing("the type of a mask"))?;
        let fresh = self.window(operand, axis, window, before)?;
        let name = self.operand_name(operand);
        let old = match stale {
            None => Input::like(self.t, operand),
            Some(scale) => {
                let term = self.stale(window, ty.dtype, scale, false, ty.rank() - 1 - axis, before)?;
                let inputs = [("x", Input::like(self.t, operand)), ("y", Input::One(term.into()))];
                one_op!(self, before, "add", format!("{name}_hidden"), inputs, ty.clone())?.into()
            }
        };
        let mut all = ty;
        all.shape[axis] = self.total(window, 0);
        let mut patch = Patch::before(before);
        let at = patch.concat(format!("{name}_all"), vec![old, fresh], axis, all);
        let made = self.t.insert(&patch, &at)?;
        if let Some(key) = key {
            self.masks.extended.insert(key, made);
        }
        Ok(made)
    }

    /// The term for a grown value of this type: zero at the new keys.
    pub(super) fn stale_columns(
        &mut self,
        track: Track,
        scale: f64,
        ty: &TensorType,
        before: OpId,
    ) -> Result<ValueId, PatchError> {
        self.stale(track.window, ty.dtype, scale, true, ty.rank() - 1 - track.axis, before)
    }

    /// A vector over keys, with `behind` axes of extent one behind it, that is very negative at the stale ones.
    fn stale(
        &mut self,
        window: usize,
        dtype: DType,
        scale: f64,
        all: bool,
        behind: usize,
        before: OpId,
    ) -> Result<ValueId, PatchError> {
        let key = (window, dtype, scale.to_bits(), all, behind);
        if let Some(&made) = self.masks.stale.get(&key) {
            return Ok(made);
        }
        let made = match behind {
            0 => self.stale_vector(window, dtype, scale, all, before)?,
            _ => {
                let flat = self.stale(window, dtype, scale, all, 0, before)?;
                let axes: Vec<i64> = (1..=behind as i64).collect();
                let mut ty = self.t.tensor(flat).cloned().ok_or_else(|| missing("a vector"))?;
                ty.shape.extend(vec![Dim::known(1); behind]);
                one_op!(
                    self,
                    before,
                    "expand_dims",
                    "stale_keys_wide",
                    [("x", Input::One(flat.into())), ("axes", ints(&axes))],
                    ty
                )?
            }
        };
        self.masks.stale.insert(key, made);
        Ok(made)
    }

    fn stale_vector(
        &mut self,
        window: usize,
        dtype: DType,
        scale: f64,
        all: bool,
        before: OpId,
    ) -> Result<ValueId, PatchError> {
        let w = self.plan.windows[window].clone();
        let len = if all { self.total(window, 0) } else { w.n.clone() };
        let end = self.count(window, all, before)?;
        let of = |dtype: DType| TensorType::new(dtype, [len.clone()]);
        let scalar = |n: i64| Input::Const(Literal::int(n));
        let range = [("start", scalar(0)), ("end", end), ("step", scalar(1))];
        let keys = one_op!(self, before, "range_1d", "keys", range, of(DType::I32))?;
        let position = self.position(window, before)?;
        let is_stale = match w.q.is_one() {
            true => one_op!(self, before, "equal", "is_stale", [("x", keys.into()), ("y", position)], of(DType::Bool))?,
            false => {
                let q = self.new_keys(window, before)?;
                let offset =
                    one_op!(self, before, "sub", "keys_offset", [("x", keys.into()), ("y", position)], of(DType::I32))?;
                let run =
                    one_op!(self, before, "floor_div", "keys_run", [("x", offset.into()), ("y", q)], of(DType::I32))?;
                one_op!(self, before, "equal", "is_stale", [("x", run.into()), ("y", scalar(0))], of(DType::Bool))?
            }
        };
        let constant = |x: f64| Input::Const(Literal::floats(dtype, &[], &[x]));
        let to = Input::Const(Literal::string(dtype.name()));
        let flags = one_op!(self, before, "cast", "stale_flags", [("x", is_stale.into()), ("dtype", to)], of(dtype))?;
        if !self.masks.infinite {
            let hidden = constant(-term(dtype, false) / scale);
            return one_op!(self, before, "mul", "stale_keys", [("x", flags.into()), ("y", hidden)], of(dtype));
        }
        // `select` has the shape of its two values, whatever its condition's.
        let zeros = one_op!(self, before, "mul", "no_keys", [("x", flags.into()), ("y", constant(0.0))], of(dtype))?;
        let inputs = [("cond", is_stale.into()), ("a", constant(f64::NEG_INFINITY)), ("b", zeros.into())];
        one_op!(self, before, "select", "stale_keys", inputs, of(dtype))
    }

    /// How many keys there are, old ones or all, a scalar.
    fn count(&mut self, window: usize, all: bool, before: OpId) -> Result<Input, PatchError> {
        let w = self.plan.windows[window].clone();
        if let (Some(n), Some(q)) = (w.n.as_known(), w.q.as_known().or((!all).then_some(0))) {
            return Ok(Input::Const(Literal::int((n + if all { q } else { 0 }) as i64)));
        }
        let mut count = self.old_keys(window, before)?;
        if all {
            let q = self.new_keys(window, before)?;
            count = one_op!(self, before, "add", "keys_all", [("x", count), ("y", q)], vector(1))?.into();
        }
        let scalar = TensorType::new(DType::I32, []);
        Ok(one_op!(self, before, "squeeze", "keys_count", [("x", count), ("axes", ints(&[0]))], scalar)?.into())
    }

    /// Weights cut at the border between old and new keys, where sizes are not known.
    pub(super) fn cut_weights(
        &mut self,
        weights: ValueId,
        track: Track,
        [old, fresh]: [TensorType; 2],
        before: OpId,
    ) -> Result<[ValueId; 2], PatchError> {
        let rank = old.rank();
        let border = match self.plan.windows[track.window].q.as_known() {
            Some(q) => ints(&[-(q as i64)]),
            None => self.old_keys(track.window, before)?,
        };
        let border = self.along(rank, track.axis, border, before)?;
        let whole = vec![true; rank];
        let mut cut = whole.clone();
        cut[track.axis] = false;
        let name = self.name(weights);
        let mask = |m: &[bool]| Input::Const(Literal::bools(m));
        let zeros = ints(&vec![0; rank]);
        let inputs = [
            ("x", Input::One(weights.into())),
            ("begin", zeros.clone()),
            ("end", border.clone()),
            ("begin_mask", mask(&whole)),
            ("end_mask", mask(&cut)),
        ];
        let old = one_op!(self, before, "slice_by_index", format!("{name}_old"), inputs, old)?;
        let inputs = [
            ("x", Input::One(weights.into())),
            ("begin", border),
            ("end", zeros),
            ("begin_mask", mask(&cut)),
            ("end_mask", mask(&whole)),
        ];
        let fresh = one_op!(self, before, "slice_by_index", format!("{name}_new"), inputs, fresh)?;
        Ok([old, fresh])
    }
}

/// The value of one element of a vector that a `concat` puts together.
fn element(f: &Function, vector: &Operand, at: usize) -> Option<ValueId> {
    let op = f.producer(vector.as_value()?).filter(|&op| f.op(op).kind() == "concat")?;
    if f.bool(op, "interleave") == Some(true) {
        return None;
    }
    let mut first = 0;
    for part in f.op(op).param("values") {
        let len = usize::try_from(f.operand_type(part).as_tensor()?.volume()?).ok()?;
        if (first..first + len).contains(&at) {
            return part.as_value().filter(|_| len == 1);
        }
        first += len;
    }
    None
}
