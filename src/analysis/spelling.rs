//! The shortest way to spell a bijective layout: nothing, one reshape, or `reshape? transpose reshape?`.

use crate::ir::Dim;

use super::layout::{Digit, Layout, Stride, stride_order};

/// Highest rank of an intermediate tensor; Core ML refuses more.
pub const MAX_RANK: usize = 5;

/// One op of a spelling.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// `reshape` to this shape.
    Reshape(Vec<u64>),
    /// `transpose` by this permutation, which gives this shape.
    Transpose(Vec<usize>, Vec<u64>),
}

impl Step {
    /// The shape after this step.
    pub fn shape(&self) -> &[u64] {
        match self {
            Step::Reshape(s) | Step::Transpose(_, s) => s,
        }
    }
}

/// Relative cost of a `reshape` or another view.
pub const VIEW_COST: u32 = 2;
/// Relative cost of a `transpose` that only moves axes of extent one: a view in disguise.
pub const UNIT_TRANSPOSE_COST: u32 = 3;
/// Relative cost of a `transpose` that moves data: more than a reshape before and after it can save.
pub const TRANSPOSE_COST: u32 = 7;

/// The relative cost of a spelling.
pub fn cost(steps: &[Step]) -> u32 {
    steps.iter().map(|s| if matches!(s, Step::Reshape(_)) { VIEW_COST } else { TRANSPOSE_COST }).sum()
}

/// Whether a transposition of this shape leaves the elements in place.
pub fn moves_only_unit_axes(shape: &[u64], perm: &[usize]) -> bool {
    let kept: Vec<usize> = perm.iter().copied().filter(|&p| shape.get(p).is_some_and(|&n| n != 1)).collect();
    kept.is_sorted()
}

/// The cheapest steps from a tensor of shape `from` to one of shape `to` whose elements lie as `layout` says; `None`
/// when the layout is not a bijection of known sizes.
pub fn spell(from: &[u64], layout: &Layout, to: &[u64]) -> Option<Vec<Step>> {
    let volume = from.iter().try_fold(1u64, |a, &n| a.checked_mul(n))?;
    if !layout.is_bijection(&Dim::known(volume)) {
        return None;
    }
    if layout.is_row_major() {
        return Some(if from == to { vec![] } else { vec![Step::Reshape(to.to_vec())] });
    }
    [by_source_axes(from, layout, to), by_target_axes(from, layout, to), by_digits(from, layout, to)]
        .into_iter()
        .flatten()
        .filter(|steps| steps.iter().all(|s| s.shape().len() <= MAX_RANK))
        .min_by_key(|steps| cost(steps))
}

/// `transpose` of the source's own axes, then `reshape?`.
fn by_source_axes(from: &[u64], layout: &Layout, to: &[u64]) -> Option<Vec<Step>> {
    let mut strides = vec![1u64; from.len()];
    for i in (0..from.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].checked_mul(from[i + 1])?;
    }
    // Each target axis as a run of whole source axes.
    let mut axes: Vec<Vec<usize>> = Vec::new();
    for axis in &layout.axes {
        let mut runs = Vec::new();
        for d in axis {
            let (mut extent, stride) = (d.extent.as_known()?, d.stride.positive()?.as_known()?);
            while extent > 1 {
                let span = stride.checked_mul(extent)?;
                let i = (0..from.len()).find(|&i| from[i] > 1 && strides[i].checked_mul(from[i]) == Some(span))?;
                extent = extent.checked_div(from[i]).filter(|&rest| rest * from[i] == extent)?;
                runs.push(i);
            }
        }
        axes.push(runs);
    }
    let mut units = (0..from.len()).filter(|&i| from[i] == 1);
    let mut perm = Vec::new();
    for run in &axes {
        if run.is_empty() {
            perm.extend(units.next());
        }
        perm.extend(run);
    }
    perm.extend(units);
    let mut sorted = perm.clone();
    sorted.sort_unstable();
    if sorted != (0..from.len()).collect::<Vec<_>>() {
        return None;
    }
    let shape: Vec<u64> = perm.iter().map(|&p| from[p]).collect();
    let mut steps = vec![Step::Transpose(perm, shape.clone())];
    if shape != to {
        steps.push(Step::Reshape(to.to_vec()));
    }
    Some(steps)
}

/// `reshape?` to the target's axes in the source's order, then `transpose`.
fn by_target_axes(from: &[u64], layout: &Layout, to: &[u64]) -> Option<Vec<Step>> {
    let mut order: Vec<(u64, usize)> = Vec::new();
    for (i, axis) in layout.axes.iter().enumerate() {
        match &axis[..] {
            [] => order.push((u64::MAX, i)),
            [d] => order.push((d.stride.positive()?.as_known()?, i)),
            _ => return None,
        }
    }
    order.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
    let middle: Vec<u64> = order.iter().map(|&(_, i)| to[i]).collect();
    let mut perm = vec![0; to.len()];
    for (position, &(_, i)) in order.iter().enumerate() {
        perm[i] = position;
    }
    let mut steps = Vec::new();
    if middle != from {
        steps.push(Step::Reshape(middle));
    }
    steps.push(Step::Transpose(perm, to.to_vec()));
    Some(steps)
}

/// `reshape?` to the digits, `transpose`, `reshape?`.
fn by_digits(from: &[u64], layout: &Layout, to: &[u64]) -> Option<Vec<Step>> {
    let digits = layout.digits();
    let order = stride_order(&digits)?;
    let extent = |i: usize| digits[i].extent.as_known();
    let middle: Vec<u64> = order.iter().map(|&i| extent(i)).collect::<Option<_>>()?;
    let shape: Vec<u64> = (0..digits.len()).map(extent).collect::<Option<_>>()?;
    let perm: Vec<usize> = (0..digits.len()).map(|i| order.iter().position(|&o| o == i)).collect::<Option<_>>()?;
    let mut steps = Vec::new();
    if middle != from {
        steps.push(Step::Reshape(middle));
    }
    steps.push(Step::Transpose(perm, shape.clone()));
    if shape != to {
        steps.push(Step::Reshape(to.to_vec()));
    }
    Some(steps)
}

/// The layout with the repeated digits of one axis dropped, together with their extents' product; `None` when a
/// repeated digit is not at the minor end of that axis or another axis repeats.
pub fn without_minor_repeat(layout: &Layout, axis: usize) -> Option<(Layout, Dim)> {
    let mut out = layout.clone();
    let mut group = Dim::known(1);
    while out.axes.get(axis)?.last().is_some_and(Digit::repeats) {
        let d = out.axes[axis].pop()?;
        group = group.checked_mul(&d.extent)?;
    }
    (!out.repeats()).then_some((out, group))
}

/// The strides of a layout's last two axes exchanged: the layout of the transposed matrices.
pub fn matrix_transposed(layout: &Layout) -> Option<Layout> {
    let rank = layout.axes.len();
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank.checked_sub(1)?, rank.checked_sub(2)?);
    layout.transpose(&perm)
}

/// The layout of axes that are all widened from one element.
pub fn repeats_only(axis: &[Digit]) -> bool {
    axis.iter().all(|d| d.stride == Stride::zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Id, ValueId};

    fn layout(from: &[u64], perm: &[usize], to: &[u64]) -> Layout {
        let dims = |s: &[u64]| s.iter().map(|&n| Dim::known(n)).collect::<Vec<_>>();
        let l = Layout::identity(ValueId::new(0), &dims(from)).unwrap();
        l.transpose(perm).unwrap().reshape(&dims(to)).unwrap()
    }

    #[test]
    fn unit_transposes_are_reshapes() {
        let l = layout(&[1, 1, 8, 16], &[0, 2, 1, 3], &[1, 8, 1, 16]);
        assert_eq!(spell(&[1, 1, 8, 16], &l, &[1, 8, 1, 16]), Some(vec![Step::Reshape(vec![1, 8, 1, 16])]));
        let same = layout(&[2, 3], &[0, 1], &[2, 3]);
        assert_eq!(spell(&[2, 3], &same, &[2, 3]), Some(vec![]));
    }

    #[test]
    fn one_transpose_where_it_suffices() {
        let l = layout(&[1, 4, 8, 16], &[0, 2, 1, 3], &[1, 8, 4, 16]);
        assert_eq!(
            spell(&[1, 4, 8, 16], &l, &[1, 8, 4, 16]),
            Some(vec![Step::Transpose(vec![0, 2, 1, 3], vec![1, 8, 4, 16])])
        );
        let l = layout(&[1, 8, 4, 16], &[0, 2, 1, 3], &[1, 4, 128]);
        assert_eq!(spell(&[1, 8, 4, 16], &l, &[1, 4, 128]).unwrap().len(), 2);
        let l = layout(&[4, 8, 16], &[1, 0, 2], &[8, 4, 16]);
        assert_eq!(spell(&[4, 128], &l, &[8, 4, 16]).unwrap().len(), 2);
    }
}
