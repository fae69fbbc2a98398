//! The shortest way to spell a bijective layout: nothing, one reshape, or `reshape? transpose reshape?`.

use crate::ir::Dim;

use super::layout::{Digit, Layout, stride_order};

/// Highest rank of an intermediate tensor; Core ML refuses more.
pub const MAX_RANK: usize = 5;

/// One op of a spelling.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// `reshape` to this shape.
    Reshape(Vec<Dim>),
    /// `transpose` by this permutation, which gives this shape.
    Transpose(Vec<usize>, Vec<Dim>),
}

impl Step {
    /// The shape after this step.
    pub fn shape(&self) -> &[Dim] {
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
/// Relative cost of a `reshape` whose shape has to be computed at run time.
pub const COMPUTED_RESHAPE_COST: u32 = 20;

/// The relative cost of a spelling.
pub fn cost(steps: &[Step]) -> u32 {
    let one = |s: &Step| match s {
        Step::Reshape(shape) if unknowns(shape) > 1 => COMPUTED_RESHAPE_COST,
        Step::Reshape(_) => VIEW_COST,
        Step::Transpose(..) => TRANSPOSE_COST,
    };
    steps.iter().map(one).sum()
}

/// The axis of unknown size that a size is a multiple or a part of: the axis, by what it is multiplied and divided.
pub fn share_among(from: &[Dim], size: &Dim) -> Option<(usize, u64, u64)> {
    let unknown = || from.iter().enumerate().filter(|(_, d)| d.as_known().is_none());
    let multiple = unknown().find_map(|(i, d)| Some((i, size.checked_div(d)?.as_known()?, 1)));
    multiple.or_else(|| unknown().find_map(|(i, d)| Some((i, 1, d.checked_div(size)?.as_known()?))))
}

/// Whether a spelling moves no data.
pub fn is_view(steps: &[Step]) -> bool {
    steps.iter().all(|s| matches!(s, Step::Reshape(_)))
}

/// How many sizes are not known.
pub fn unknowns(shape: &[Dim]) -> usize {
    shape.iter().filter(|d| d.as_known().is_none()).count()
}

/// Whether a transposition of this shape leaves the elements in place.
pub fn moves_only_unit_axes(shape: &[Dim], perm: &[usize]) -> bool {
    let kept: Vec<usize> = perm.iter().copied().filter(|&p| shape.get(p).is_some_and(|d| !d.is_one())).collect();
    kept.is_sorted()
}

/// The cheapest steps from a tensor of shape `from` to one of shape `to` whose elements lie as `layout` says; `None`
/// when the layout is not provably a bijection.
pub fn spell(from: &[Dim], layout: &Layout, to: &[Dim]) -> Option<Vec<Step>> {
    if !layout.is_bijection(&Dim::product(from)?) {
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
fn by_source_axes(from: &[Dim], layout: &Layout, to: &[Dim]) -> Option<Vec<Step>> {
    // The stride of each source axis times its size.
    let mut spans = vec![Dim::known(1); from.len()];
    let mut span = Dim::known(1);
    for i in (0..from.len()).rev() {
        span = span.checked_mul(&from[i])?;
        spans[i] = span.clone();
    }
    // Each target axis as a run of whole source axes.
    let mut axes: Vec<Vec<usize>> = Vec::new();
    for axis in &layout.axes {
        let mut runs = Vec::new();
        for d in axis {
            let mut extent = d.extent.clone();
            while !extent.is_one() {
                let span = d.stride.positive()?.checked_mul(&extent)?;
                let i = (0..from.len()).find(|&i| !from[i].is_one() && spans[i] == span)?;
                extent = extent.checked_div(&from[i])?;
                runs.push(i);
            }
        }
        axes.push(runs);
    }
    let mut units = (0..from.len()).filter(|&i| from[i].is_one());
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
    let shape: Vec<Dim> = perm.iter().map(|&p| from[p].clone()).collect();
    let mut steps = vec![Step::Transpose(perm, shape.clone())];
    if shape != to {
        steps.push(Step::Reshape(to.to_vec()));
    }
    Some(steps)
}

/// `reshape?` to the target's axes in the source's order, then `transpose`.
fn by_target_axes(from: &[Dim], layout: &Layout, to: &[Dim]) -> Option<Vec<Step>> {
    if layout.axes.iter().any(|axis| axis.len() > 1) {
        return None;
    }
    let filled: Vec<usize> = (0..to.len()).filter(|&i| !layout.axes[i].is_empty()).collect();
    let digits: Vec<Digit> = filled.iter().map(|&i| layout.axes[i][0].clone()).collect();
    let units = (0..to.len()).filter(|&i| layout.axes[i].is_empty());
    let order: Vec<usize> = units.chain(stride_order(&digits)?.into_iter().map(|i| filled[i])).collect();
    let middle: Vec<Dim> = order.iter().map(|&i| to[i].clone()).collect();
    let mut perm = vec![0; to.len()];
    for (position, &i) in order.iter().enumerate() {
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
fn by_digits(from: &[Dim], layout: &Layout, to: &[Dim]) -> Option<Vec<Step>> {
    let digits = layout.digits();
    let order = stride_order(&digits)?;
    let middle: Vec<Dim> = order.iter().map(|&i| digits[i].extent.clone()).collect();
    let shape: Vec<Dim> = digits.iter().map(|d| d.extent.clone()).collect();
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

/// In which order the heads of a repeated axis come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Query head h reads KV head h div group: the digits `(n_kv_heads, t)(group, 0)`.
    Grouped,
    /// Query head h reads KV head h mod n_kv_heads: the digits `(group, 0)(n_kv_heads, t)`.
    Interleaved,
}

/// A layout that repeats along one axis, taken apart.
#[derive(Clone, PartialEq, Debug)]
pub struct Repeat {
    /// The layout without the repeated digits.
    pub once: Layout,
    /// How often each head occurs.
    pub group: Dim,
    /// Where the repeated digits were.
    pub order: Order,
}

/// Takes the repeat of one axis out of a layout; `None` when that axis repeats in the middle or not at all, or another
/// axis repeats too.
pub fn take_repeat(layout: &Layout, axis: usize) -> Option<Repeat> {
    let digits = layout.axes.get(axis)?;
    let (repeats, once): (Vec<&Digit>, Vec<&Digit>) = digits.iter().partition(|d| d.repeats());
    let (first, last) = (digits.first()?, digits.last()?);
    let middle = digits.windows(2).filter(|w| w[0].repeats() != w[1].repeats()).count();
    if repeats.is_empty() || middle > 1 {
        return None;
    }
    let order = if last.repeats() || !first.repeats() { Order::Grouped } else { Order::Interleaved };
    let group = Dim::product(repeats.iter().map(|d| &d.extent))?;
    let mut layout = layout.clone();
    layout.axes[axis] = once.into_iter().cloned().collect();
    (!layout.repeats()).then_some(Repeat { once: layout, group, order })
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
    axis.iter().all(Digit::repeats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Id, ValueId};

    fn dims(sizes: &[u64]) -> Vec<Dim> {
        sizes.iter().map(|&n| Dim::known(n)).collect()
    }

    fn layout(from: &[u64], perm: &[usize], to: &[u64]) -> Layout {
        let l = Layout::identity(ValueId::new(0), &dims(from)).unwrap();
        l.transpose(perm).unwrap().reshape(&dims(to)).unwrap()
    }

    fn spelled(from: &[u64], perm: &[usize], to: &[u64], start: &[u64]) -> Vec<Step> {
        spell(&dims(start), &layout(from, perm, to), &dims(to)).unwrap()
    }

    #[test]
    fn unit_transposes_are_reshapes() {
        let steps = spelled(&[1, 1, 8, 16], &[0, 2, 1, 3], &[1, 8, 1, 16], &[1, 1, 8, 16]);
        assert_eq!(steps, [Step::Reshape(dims(&[1, 8, 1, 16]))]);
        assert_eq!(spelled(&[2, 3], &[0, 1], &[2, 3], &[2, 3]), []);
    }

    #[test]
    fn one_transpose_where_it_suffices() {
        let steps = spelled(&[1, 4, 8, 16], &[0, 2, 1, 3], &[1, 8, 4, 16], &[1, 4, 8, 16]);
        assert_eq!(steps, [Step::Transpose(vec![0, 2, 1, 3], dims(&[1, 8, 4, 16]))]);
        assert_eq!(spelled(&[1, 8, 4, 16], &[0, 2, 1, 3], &[1, 4, 128], &[1, 8, 4, 16]).len(), 2);
        assert_eq!(spelled(&[4, 8, 16], &[1, 0, 2], &[8, 4, 16], &[4, 128]).len(), 2);
    }

    #[test]
    fn sizes_are_multiples_or_parts_of_others() {
        let f = crate::text::parse("program(1) { func main<CoreML8>(tensor<fp16, [s0, s1]> x) {} -> (x); }").unwrap();
        let [q, n] = &f.main().unwrap().tensor(ValueId::new(0)).unwrap().shape[..] else { unreachable!() };
        let rows = Dim::known(4).checked_mul(q).unwrap();
        assert_eq!(share_among(&[n.clone(), q.clone()], &rows), Some((1, 4, 1)));
        assert_eq!(share_among(&[n.clone(), rows], q), Some((1, 1, 4)));
        assert_eq!(share_among(&[n.clone(), Dim::known(4)], q), None);
    }

    #[test]
    fn repeats_come_apart_by_order() {
        let kv = Layout::identity(ValueId::new(0), &dims(&[1, 2, 5])).unwrap();
        let tiled = kv.tile(&dims(&[1, 4, 1])).unwrap();
        let repeat = take_repeat(&tiled, 1).unwrap();
        assert_eq!((repeat.order, repeat.group, repeat.once), (Order::Interleaved, Dim::known(4), kv.clone()));
        let wide = kv.reshape(&dims(&[1, 2, 1, 5])).unwrap().tile(&dims(&[1, 1, 4, 1])).unwrap();
        let grouped = wide.reshape(&dims(&[1, 8, 5])).unwrap();
        let repeat = take_repeat(&grouped, 1).unwrap();
        assert_eq!((repeat.order, repeat.group, repeat.once), (Order::Grouped, Dim::known(4), kv));
        assert_eq!(take_repeat(&grouped, 2), None);
    }
}
