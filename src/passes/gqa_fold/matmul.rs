//! Folding one `matmul`.

use crate::analysis::layout::Layout;
use crate::analysis::spelling;
use crate::analysis::traffic::value_bytes;
use crate::ir::{DType, Dim, Function, Literal, OpId, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref};

use super::commute::repeat;
use super::shared::{Shared, dying, gains, repeated, shared, still_there, tensor};
use super::{Lowering, hazards};

/// Bytes that may move for each byte that is saved before rows give way to batch axes: one in this many.
const FEW: u64 = 16;

pub(super) fn fold(cx: &Context<'_>, op: OpId, lowering: Lowering) -> Result<Patch, NoMatch> {
    let f = cx.f;
    let m = views::Matmul::of(f, op).ok_or(NoMatch::UNRELATED)?;
    let (x, y) = (tensor(f, m.x)?, tensor(f, m.y)?);
    let rank = x.rank();
    let (on_y, on_x) = (repeated(cx, m.y), repeated(cx, m.x));
    if !on_y && !on_x {
        return Err(match rank >= 3 && f.const_value(m.y).is_none() && f.const_value(m.x).is_none() {
            true => NoMatch::because("neither operand is a repeated view: multi-head attention, or grouped already"),
            false => NoMatch::UNRELATED,
        });
    }
    if rank < 3 || y.rank() != rank {
        return Err(
            NoMatch::because("the operands have no batch axis in common").remedy("both have the rank of the product")
        );
    }
    if x.dtype != y.dtype {
        return Err(NoMatch::because("the operands have different element types").remedy("both are cast to one type"));
    }
    if let Some(patch) = broadcast(cx, op, &m) {
        return Ok(patch);
    }
    let side = |right: bool| Fold::new(cx, op, &m, right).and_then(|fold| fold.patch(lowering));
    match (on_y, on_x) {
        (true, false) => side(true),
        (false, true) => side(false),
        _ => side(true).or_else(|first| side(false).map_err(|_| first)),
    }
}

/// A repeat that fills a whole batch axis in front of the heads (beams) is what `matmul` does by broadcasting.
fn broadcast(cx: &Context<'_>, op: OpId, m: &views::Matmul) -> Option<Patch> {
    let f = cx.f;
    let &[result] = f.op(op).results() else { return None };
    let out = f.tensor(result)?;
    [(m.y, m.x, "y"), (m.x, m.y, "x")].into_iter().find_map(|(repeated, other, param)| {
        let (own, others) = (&f.tensor(repeated)?.shape, &f.tensor(other)?.shape);
        let (layout, axis) = (0..own.len().checked_sub(3)?).find_map(|axis| {
            let fills = |l: &&Layout| !own[axis].is_one() && spelling::repeats_only(&l.axes[axis]);
            let layouts = cx.layouts.of(repeated);
            (own[axis] == others[axis]).then(|| layouts.iter().skip(1).find(fills).cloned())?.map(|l| (l, axis))
        })?;
        let mut once = layout.clone();
        once.axes[axis].clear();
        let mut small = own.to_vec();
        small[axis] = Dim::known(1);
        let steps = spelling::spell(&f.tensor(layout.source)?.shape, &once, &small)?;
        still_there(f, op, layout.source).ok()?;
        dying(f, op, repeated, layout.source).ok()?;

        let mut patch = Patch::before(op);
        let shared = patch.steps(f, layout.source, &format!("{}_shared", f.value(repeated).name()), &steps)?;
        let (x, y) = if param == "x" { (shared, m.y.into()) } else { (m.x.into(), shared) };
        let name = f.value(result).name().as_str();
        let out = product(&mut patch, name, [(x, m.transpose_x), (y, m.transpose_y)], out.dtype, &out.shape);
        patch.replace(result, out);
        patch.bytes_saved = value_bytes(f, repeated);
        patch.bytes_added = if spelling::is_view(&steps) { 0 } else { 2 * value_bytes(f, layout.source) };
        patch.form = format!("the product broadcasts batch axis {axis}");
        (patch.bytes_saved > patch.bytes_added || !known(f, repeated)).then_some(patch)
    })
}

fn known(f: &Function, v: ValueId) -> bool {
    f.tensor(v).is_some_and(|t| spelling::unknowns(&t.shape) == 0)
}

/// Adds a `matmul`.
fn product(patch: &mut Patch, name: &str, [(x, tx), (y, ty)]: [(Ref, bool); 2], dtype: DType, shape: &[Dim]) -> Ref {
    patch.op(
        "matmul",
        format!("{name}_grouped"),
        [
            ("x", Input::One(x)),
            ("y", Input::One(y)),
            ("transpose_x", Input::Const(Literal::bool(tx))),
            ("transpose_y", Input::Const(Literal::bool(ty))),
        ],
        TensorType::new(dtype, shape.iter().cloned()),
    )
}

/// A matmul of which one operand is repeated.
struct Fold<'c, 'f> {
    cx: &'c Context<'f>,
    op: OpId,
    result: ValueId,
    /// Whether the repeated operand is `y`.
    right: bool,
    repeated: ValueId,
    repeated_transposed: bool,
    other: ValueId,
    other_transposed: bool,
    shared: Shared,
    /// The head axis.
    axis: usize,
}

impl<'c, 'f> Fold<'c, 'f> {
    fn new(cx: &'c Context<'f>, op: OpId, m: &views::Matmul, right: bool) -> Result<Self, NoMatch> {
        let f = cx.f;
        let ((repeated, repeated_transposed), (other, other_transposed)) = match right {
            true => ((m.y, m.transpose_y), (m.x, m.transpose_x)),
            false => ((m.x, m.transpose_x), (m.y, m.transpose_y)),
        };
        let axis = tensor(f, repeated)?.rank() - 3;
        let shared = shared(cx, op, repeated, axis, true)?;
        let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
        if tensor(f, result)?.rank() != axis + 3 {
            return Err(NoMatch::UNRELATED);
        }
        Ok(Fold { cx, op, result, right, repeated, repeated_transposed, other, other_transposed, shared, axis })
    }

    fn shape(&self, v: ValueId) -> &'f [Dim] {
        self.cx.f.tensor(v).map_or(&[], |t| &t.shape)
    }

    fn patch(&self, lowering: Lowering) -> Result<Patch, NoMatch> {
        if self.shape(self.other)[self.axis].is_one() {
            return self.multiply_once();
        }
        if self.shape(self.other)[self.axis] != self.shape(self.repeated)[self.axis] {
            return Err(NoMatch::because("the operands are not provably of as many heads"));
        }
        let rows = self.rows();
        let batch = || self.batch_axes();
        let mut patch = match lowering {
            Lowering::Rows => rows?,
            Lowering::BatchAxes => batch()?,
            Lowering::Auto => match rows {
                Ok(patch) if patch.bytes_added.saturating_mul(FEW) <= patch.bytes_saved => patch,
                Ok(patch) => batch().unwrap_or(patch),
                Err(no) => batch().map_err(|_| no)?,
            },
        };
        if self.is_known() {
            gains(&patch)?;
        }
        patch.form = format!("{}: {}", patch.form, self.shared.heads.describe());
        Ok(patch)
    }

    fn is_known(&self) -> bool {
        [self.repeated, self.other, self.result].iter().all(|&v| known(self.cx.f, v))
    }

    /// One head times copies of others: the product with each of the others once, then copies of the product.
    fn multiply_once(&self) -> Result<Patch, NoMatch> {
        let f = self.cx.f;
        let heads = &self.shared.heads;
        let mut patch = Patch::before(self.op);
        let mut small = self.shape(self.repeated).to_vec();
        small[self.axis] = heads.kv_heads.clone();
        let (once, moved) = self.shared.operand(f, &mut patch, self.repeated, small)?;
        let once = (once, self.repeated_transposed != self.shared.flipped);
        let other = (self.other.into(), self.other_transposed);
        let mut out = self.shape(self.result).to_vec();
        if out[self.axis] != self.shape(self.repeated)[self.axis] {
            return Err(NoMatch::UNRELATED);
        }
        out[self.axis] = heads.kv_heads.clone();
        let operands = if self.right { [other, once] } else { [once, other] };
        let each = self.matmul(&mut patch, operands, &out);
        let name = f.value(self.result).name().as_str();
        let copies = repeat(f, &mut patch, each, name, &out, self.axis, heads)
            .ok_or_else(|| NoMatch::because("copies of the product would have more than five axes"))?;
        patch.replace(self.result, copies);
        if !self.is_known() {
            return Err(NoMatch::because("one head is multiplied by copies of a size that is not known"));
        }
        let group = heads.group.as_known().unwrap_or(1).max(1);
        patch.bytes_added = moved + 2 * value_bytes(f, self.result) / group;
        patch.bytes_saved = self.shared.bytes_saved(f, self.op, self.repeated)?;
        gains(&patch)?;
        patch.form = format!("multiplied once, the product repeated: {}", heads.describe());
        Ok(patch)
    }

    /// `y[…, heads, q, k]` as rows: `[…, kv_heads, group·q, k]`, times the shared columns `[…, kv_heads, k, n]`; for a
    /// repeated left operand by `A·B = (Bᵀ·Aᵀ)ᵀ`.
    fn rows(&self) -> Result<Patch, NoMatch> {
        let f = self.cx.f;
        let (axis, heads) = (self.axis, &self.shared.heads);
        let (other, out) = (self.shape(self.other), self.shape(self.result));
        // The rows are those of `other` as it stands on the left.
        let stored_by_row = self.right != self.other_transposed;
        let (row, inner) = if stored_by_row { (axis + 1, axis + 2) } else { (axis + 2, axis + 1) };
        let rows = heads.to_rows(self.other, other, axis, row, inner).ok_or(NoMatch::UNRELATED)?;
        let (row, column) = if self.right { (axis + 1, axis + 2) } else { (axis + 2, axis + 1) };
        let back = heads.rows_back(self.result, out, axis, row, column).ok_or(NoMatch::UNRELATED)?;
        if [&rows, &back].iter().any(|s| spelling::cost(&s.steps) >= spelling::COMPUTED_RESHAPE_COST) {
            return Err(NoMatch::because("the rows and the keys both have a size that is not known")
                .remedy("the lowering is batch axes or one of the sizes is fixed"));
        }
        let moves = !spelling::is_view(&rows.steps) || !spelling::is_view(&back.steps);
        if moves && !self.is_known() {
            return Err(NoMatch::because("rows would move data of a size that is not known")
                .remedy("the lowering is batch axes or the sizes are fixed"));
        }

        let mut patch = Patch::before(self.op);
        let name = f.value(self.result).name().as_str();
        let x = patch.steps(f, self.other, &format!("{name}_rows"), &rows.steps).ok_or(NoMatch::UNRELATED)?;
        let mut shared_shape = self.shape(self.repeated).to_vec();
        shared_shape[axis] = heads.kv_heads.clone();
        let (columns, moved) = self.shared.operand(f, &mut patch, self.repeated, shared_shape)?;
        // On the left, the repeated operand's rows become columns.
        let by_row = (self.repeated_transposed == self.right) != self.shared.flipped;
        let product = self.matmul(&mut patch, [(x, false), (columns, by_row)], &back.shape);
        let out = patch.steps(f, product, name, &back.steps).ok_or(NoMatch::UNRELATED)?;
        patch.replace(self.result, out);
        for (v, spelled) in [(self.other, &rows), (self.result, &back)] {
            patch.bytes_added += if spelling::is_view(&spelled.steps) { 0 } else { 2 * value_bytes(f, v) };
        }
        patch.bytes_added += moved;
        patch.form = "rows".into();
        patch.bytes_saved = self.shared.bytes_saved(f, self.op, self.repeated)?;
        Ok(patch)
    }

    /// Every digit of the heads an axis, the repeated one of extent one on the shared side.
    fn batch_axes(&self) -> Result<Patch, NoMatch> {
        let f = self.cx.f;
        let (axis, heads) = (self.axis, &self.shared.heads);
        let lead = axis.saturating_sub(1);
        let unit_in_front = |v: ValueId| axis == 0 || self.shape(v)[lead].is_one();
        if ![self.other, self.repeated, self.result].into_iter().all(unit_in_front) {
            return Err(NoMatch::because("there is no batch axis of extent one for the groups")
                .remedy("the batch is 1 or the lowering is rows"));
        }
        let (split, once) = (heads.pair(&heads.kv_heads, &heads.group), heads.pair(&heads.kv_heads, &Dim::known(1)));
        let with = |shape: &[Dim], heads: &[Dim; 2]| [&shape[..lead], &heads[..], &shape[axis + 1..]].concat();

        let mut patch = Patch::before(self.op);
        let name = f.value(self.result).name().as_str();
        let split_other = with(self.shape(self.other), &split);
        let other = patch.reshape(f, self.other, &format!("{name}_heads"), &split_other).ok_or(NoMatch::UNRELATED)?;
        let once = with(self.shape(self.repeated), &once);
        let (one_each, moved) = self.shared.operand(f, &mut patch, self.repeated, once)?;
        let other = (other, self.other_transposed);
        let one_each = (one_each, self.repeated_transposed != self.shared.flipped);
        let operands = if self.right { [other, one_each] } else { [one_each, other] };
        let out = self.shape(self.result);
        let product = self.matmul(&mut patch, operands, &with(out, &split));
        let out = patch.reshape(f, product, name, out).ok_or(NoMatch::UNRELATED)?;
        patch.replace(self.result, out);
        patch.bytes_added = moved;
        patch.form = "batch axes".into();
        patch.hazards = hazards::batch_axes(split[0].as_known());
        patch.bytes_saved = self.shared.bytes_saved(f, self.op, self.repeated)?;
        Ok(patch)
    }

    fn matmul(&self, patch: &mut Patch, operands: [(Ref, bool); 2], shape: &[Dim]) -> Ref {
        let f = self.cx.f;
        let dtype = f.tensor(self.result).map_or(DType::F16, |t| t.dtype);
        product(patch, f.value(self.result).name().as_str(), operands, dtype, shape)
    }
}
