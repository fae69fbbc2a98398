//! Folding one `matmul`.

use crate::analysis::spelling;
use crate::analysis::traffic::value_bytes;
use crate::ir::{DType, Dim, Function, Literal, OpId, TensorType, ValueId};
use crate::opset::views;
use crate::rewrite::{Context, Input, NoMatch, Patch, Ref};

use super::commute::repeat;
use super::reasons::unrepeated;
use super::shared::{Shared, gains, repeated, shared, tensor, tile};
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
            true => unrepeated(cx, &[m.x, m.y], "neither operand is a repeated view"),
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
    let side = |right: bool| Fold::new(cx, op, &m, right).and_then(|fold| fold.patch(lowering));
    match (on_y, on_x) {
        (true, false) => side(true),
        (false, true) => side(false),
        _ => side(true).or_else(|first| side(false).map_err(|_| first)),
    }
}

fn known(f: &Function, v: ValueId) -> bool {
    f.tensor(v).is_some_and(|t| spelling::unknowns(&t.shape) == 0)
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
        let shared = shared(cx, op, repeated, axis, Some(&tensor(f, other)?.shape))?;
        let &[result] = f.op(op).results() else { return Err(NoMatch::UNRELATED) };
        if tensor(f, result)?.rank() != axis + 3 {
            return Err(NoMatch::UNRELATED);
        }
        Ok(Fold { cx, op, result, right, repeated, repeated_transposed, other, other_transposed, shared, axis })
    }

    /// The operand on one side, with its parameter.
    fn operand(&self, right: bool) -> (&'static str, ValueId) {
        (if right { "y" } else { "x" }, if right == self.right { self.repeated } else { self.other })
    }

    fn shape(&self, v: ValueId) -> &'f [Dim] {
        self.cx.f.tensor(v).map_or(&[], |t| &t.shape)
    }

    fn patch(&self, lowering: Lowering) -> Result<Patch, NoMatch> {
        let alike = shared(self.cx, self.op, self.other, self.axis, Some(self.shape(self.repeated))).ok();
        let alike = alike.filter(|other| other.heads == self.shared.heads);
        let one_head = self.shape(self.other)[self.axis].is_one();
        if alike.is_some() || one_head || self.shared.heads.group.is_one() {
            return self.multiply_once(alike.as_ref());
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
                Ok(patch) if patch.bytes_added.saturating_mul(FEW) <= patch.bytes_saved && !self.has_open_lengths() => {
                    patch
                }
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

    /// Whether both lengths are unknown: reshapes to rows and back need shapes that are computed, and a mask of unknown rows
    /// keeps them.
    fn has_open_lengths(&self) -> bool {
        [self.other, self.result].iter().any(|&v| spelling::unknowns(self.shape(v)) > 1)
    }

    /// Copies times one head, or times what is copied alike: the product of each head once, then copies of the product. A
    /// repeat that fills batch axes in front of the heads (beams) is what `matmul` does by broadcasting.
    fn multiply_once(&self, alike: Option<&Shared>) -> Result<Patch, NoMatch> {
        let f = self.cx.f;
        let heads = &self.shared.heads;
        let mut patch = Patch::before(self.op);
        let once = self.one_each(&mut patch, self.repeated, self.repeated_transposed, &self.shared)?;
        let (other, other_shape) = match alike {
            Some(shared) => (self.one_each(&mut patch, self.other, self.other_transposed, shared)?, &shared.shape[..]),
            None => ((self.other.into(), self.other_transposed), self.shape(self.other)),
        };
        let all = self.shape(self.result);
        let mut out = all.to_vec();
        for (i, size) in out.iter_mut().enumerate().take(self.axis + 1) {
            let [a, b] = [&self.shared.shape[i], &other_shape[i]];
            *size = if a.is_one() { b.clone() } else { a.clone() };
        }
        let operands = if self.right { [other, once] } else { [once, other] };
        let mut at = self.matmul(&mut patch, operands, &out);
        if out[..] != *all {
            self.check_copies(&mut patch, &out)?;
            at = self.copied(&mut patch, at, &out)?;
        }
        patch.replace(self.result, at);
        self.shared.account(f, &mut patch, self.op, self.operand(self.right))?;
        if let Some(shared) = alike.filter(|_| self.other != self.repeated) {
            shared.account(f, &mut patch, self.op, self.operand(!self.right))?;
        }
        if self.is_known() {
            gains(&patch)?;
        }
        patch.form = match out[..] == *all {
            true => "the product broadcasts the copies of whole batches".into(),
            false => format!("multiplied once, the product repeated: {}", heads.describe()),
        };
        Ok(patch)
    }

    /// Counts the product of this shape, which is written and read besides its copies.
    fn check_copies(&self, patch: &mut Patch, once: &[Dim]) -> Result<(), NoMatch> {
        let unknown = || {
            NoMatch::because("the product of each head would be copied, and its size is not known")
                .remedy("the sizes are fixed")
        };
        let times = Dim::product(self.shape(self.result)).zip(Dim::product(once));
        let times = times.and_then(|(all, once)| all.checked_div(&once)?.as_known()).filter(|&n| n > 0);
        patch.bytes_added +=
            2 * value_bytes(self.cx.f, self.result) / times.filter(|_| self.is_known()).ok_or_else(unknown)?;
        Ok(())
    }

    /// The product of this shape with its heads and batches copied.
    fn copied(&self, patch: &mut Patch, product: Ref, once: &[Dim]) -> Result<Ref, NoMatch> {
        let (f, all) = (self.cx.f, self.shape(self.result));
        let name = f.value(self.result).name().as_str();
        let mut at = product;
        if once[self.axis] != all[self.axis] {
            at = repeat(f, patch, at, name, once, self.axis, &self.shared.heads)
                .ok_or_else(|| NoMatch::because("copies of the product would have more than five axes"))?;
        }
        for i in (0..self.axis).filter(|&i| once[i] != all[i]) {
            let times = all[i].as_known().ok_or(NoMatch::UNRELATED)?;
            at = tile(f, patch, at, i, times, &format!("{name}_again")).ok_or(NoMatch::UNRELATED)?;
        }
        Ok(at)
    }

    /// A repeated operand without its repeats, and whether it is read transposed.
    fn one_each(
        &self,
        patch: &mut Patch,
        repeated: ValueId,
        transposed: bool,
        shared: &Shared,
    ) -> Result<(Ref, bool), NoMatch> {
        let (once, moved) = shared.operand(self.cx.f, patch, repeated, &shared.shape)?;
        patch.bytes_added += moved;
        Ok((once, transposed != shared.flipped))
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
        let moves = !spelling::is_view(&rows.steps) || !spelling::is_view(&back.steps);
        if moves && !self.is_known() {
            return Err(NoMatch::because("rows would move data of a size that is not known")
                .remedy("the lowering is batch axes or the sizes are fixed"));
        }

        let mut patch = Patch::before(self.op);
        let name = f.value(self.result).name().as_str();
        let x = patch.steps(f, self.other, &format!("{name}_rows"), &rows.steps).ok_or(NoMatch::UNRELATED)?;
        let (columns, moved) = self.shared.operand(f, &mut patch, self.repeated, &self.shared.shape)?;
        // On the left, the repeated operand's rows become columns.
        let by_row = (self.repeated_transposed == self.right) != self.shared.flipped;
        let product = self.matmul(&mut patch, [(x, false), (columns, by_row)], &back.shape);
        let out = patch.steps(f, product, name, &back.steps).ok_or_else(|| {
            NoMatch::because("the rows and the keys both have a size that is not known")
                .remedy("the lowering is batch axes or one of the sizes is fixed")
        })?;
        patch.replace(self.result, out);
        for (v, spelled) in [(self.other, &rows), (self.result, &back)] {
            patch.bytes_added += if spelling::is_view(&spelled.steps) { 0 } else { 2 * value_bytes(f, v) };
        }
        patch.bytes_added += moved;
        patch.form = "rows".into();
        self.shared.account(f, &mut patch, self.op, self.operand(self.right))?;
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
        let (one_each, moved) = self.shared.operand(f, &mut patch, self.repeated, &once)?;
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
        self.shared.account(f, &mut patch, self.op, self.operand(self.right))?;
        Ok(patch)
    }

    fn matmul(&self, patch: &mut Patch, [(x, tx), (y, ty)]: [(Ref, bool); 2], shape: &[Dim]) -> Ref {
        let f = self.cx.f;
        let dtype = f.tensor(self.result).map_or(DType::F16, |t| t.dtype);
        patch.op(
            "matmul",
            format!("{}_grouped", f.value(self.result).name()),
            [
                ("x", Input::One(x)),
                ("y", Input::One(y)),
                ("transpose_x", Input::Const(Literal::bool(tx))),
                ("transpose_y", Input::Const(Literal::bool(ty))),
            ],
            TensorType::new(dtype, shape.iter().cloned()),
        )
    }
}
