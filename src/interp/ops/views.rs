//! Ops that rearrange the elements of one tensor, or of several into one.

use super::super::call::{Axes, Call, axis};
use super::super::error::Fault;
use super::super::tensor::{Dims, Tensor, volume, with_element};
use super::super::view::View;

pub(super) fn identity(call: &Call<'_>) -> Result<Tensor, Fault> {
    call.tensor("x")
}

/// The tensor under another shape of the same volume, elements shared.
fn reshaped(x: &Tensor, shape: &[usize]) -> Result<Tensor, Fault> {
    x.reshaped(shape).ok_or_else(|| Fault::Shape(format!("shape {:?} cannot become {shape:?}", x.shape())))
}

/// A zero copies a size of x: at its own position up to CoreML6, counted from the right (and 1 beyond x's rank) after.
/// −1 takes what remains.
pub(super) fn reshape(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let wanted = call.ints("shape")?;
    let from_right = call.opset() >= 7;
    if !from_right && wanted.contains(&0) && wanted.len() != x.rank() {
        return Err(Fault::Shape(format!("a zero in shape {wanted:?} needs the rank {} of x", x.rank())));
    }
    let mut shape = Dims::new();
    let mut open = None;
    for (i, &n) in wanted.iter().enumerate() {
        shape.push(match n {
            0 if from_right => {
                let at = (x.rank() + i).checked_sub(wanted.len());
                at.map_or(1, |at| x.shape()[at])
            }
            0 => x.shape()[i],
            -1 if open.is_none() => {
                open = Some(i);
                1
            }
            n => usize::try_from(n).map_err(|_| Fault::Shape(format!("{wanted:?} is no shape")))?,
        });
    }
    if let Some(i) = open {
        let rest = volume(&shape)?;
        if rest == 0 || x.len() % rest != 0 {
            return Err(Fault::Shape(format!("shape {:?} cannot become {wanted:?}", x.shape())));
        }
        shape[i] = x.len() / rest;
    }
    reshaped(&x, &shape)
}

/// The shape joins pieces of the shapes of `ref_tensors`.
pub(super) fn reshape_like(call: &Call<'_>) -> Result<Tensor, Fault> {
    let one = |name| -> Result<Vec<i64>, Fault> { Ok(call.tensors(name)?.iter().flat_map(|t| t.to_i64s()).collect()) };
    let (refs, begins, ends, to_end) = (call.tensors("ref_tensors")?, one("begins")?, one("ends")?, one("end_masks")?);
    if [begins.len(), ends.len(), to_end.len()] != [refs.len(); 3] {
        return Err(Fault::Shape("ref_tensors, begins, ends and end_masks differ in length".into()));
    }
    let mut shape = Dims::new();
    for (i, t) in refs.iter().enumerate() {
        let bound = |n: i64| {
            let n = if n < 0 { n.saturating_add(t.rank() as i64) } else { n };
            n.clamp(0, t.rank() as i64) as usize
        };
        let end = if to_end[i] != 0 { t.rank() } else { bound(ends[i]) };
        shape.extend_from_slice(t.shape().get(bound(begins[i])..end).unwrap_or_default());
    }
    reshaped(&call.tensor("x")?, &shape)
}

/// Axes refer to the result.
pub(super) fn expand_dims(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let rank = x.rank() + call.ints("axes")?.len();
    let mut axes = call.axes("axes", rank)?.unwrap_or_default();
    axes.sort_unstable();
    let mut shape = x.dims();
    axes.iter().for_each(|&a| shape.insert(a, 1));
    reshaped(&x, &shape)
}

/// Without axes every 1 goes; a listed axis of another size stays.
pub(super) fn squeeze(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let axes = call.axes("axes", x.rank())?;
    let goes = |i: usize| x.shape()[i] == 1 && axes.as_ref().is_none_or(|a| a.contains(&i));
    let shape: Dims = (0..x.rank()).filter(|&i| !goes(i)).map(|i| x.shape()[i]).collect();
    reshaped(&x, &shape)
}

pub(super) fn flatten2d(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let number = call.int_or("axis", 1)?;
    let at = if number == x.rank() as i64 { x.rank() } else { axis(number, x.rank())? };
    reshaped(&x, &[volume(&x.shape()[..at])?, volume(&x.shape()[at..])?])
}

pub(super) fn transpose(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let perm = call.axes("perm", x.rank())?.unwrap_or_default();
    if perm.len() != x.rank() {
        return Err(Fault::Shape(format!("perm has {} entries for rank {}", perm.len(), x.rank())));
    }
    x.viewed(x.view().permuted(&perm))
}

/// Flips the listed axes, all of them without a list.
pub(super) fn reverse(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let axes = call.axes("axes", x.rank())?.unwrap_or_else(|| (0..x.rank()).collect());
    let view = axes.iter().fold(x.view(), |v, &a| {
        let n = x.shape()[a];
        v.sliced(a, n.saturating_sub(1), n, -1)
    });
    x.viewed(view)
}

pub(super) fn tile(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let reps = call.ints("reps")?;
    let reps: Option<Axes> = reps.iter().map(|&r| usize::try_from(r).ok().filter(|&r| r > 0)).collect();
    let reps = reps.filter(|r| r.len() == x.rank());
    let reps = reps.ok_or_else(|| Fault::Value(format!("reps are not {} positive numbers", x.rank())))?;
    let shape: Option<Dims> = x.shape().iter().zip(&reps).map(|(&n, &r)| n.checked_mul(r)).collect();
    let shape = shape.ok_or_else(|| Fault::TooLarge(x.shape().to_vec()))?;
    volume(&shape)?;
    if shape == x.dims() {
        return Ok(x);
    }
    let view = (0..x.rank()).rev().fold(View::of(x.shape()), |v, a| v.with_axis(a, reps[a], 0));
    with_element!(x, T => Ok(x.like(shape, view.read(x.elements::<T>()?)?)))
}

/// Windows of `size` along an axis, `stride` apart; the window is a new axis after it.
pub(super) fn sliding_windows(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let at = axis(call.int("axis")?, x.rank())?;
    let positive = |name, n: i64| {
        usize::try_from(n).ok().filter(|&n| n > 0).ok_or_else(|| Fault::Value(format!("{name} {n} is not positive")))
    };
    let (size, step) = (positive("size", call.int("size")?)?, positive("stride", call.int_or("stride", 1)?)?);
    let count = x.shape()[at].checked_sub(size);
    let count = count.ok_or_else(|| Fault::Range(format!("windows of {size} do not fit {:?}", x.shape())))? / step + 1;
    let view = x.view();
    let stride = view.stride(at);
    x.viewed(view.sliced(at, 0, count, step as isize).with_axis(at + 1, size, stride))
}

/// Tensors of one element type and rank that agree on every axis but `except`.
fn agreeing(call: &Call<'_>, except: impl Fn(usize) -> Option<usize>) -> Result<Vec<Tensor>, Fault> {
    let values = call.tensors("values")?;
    let Some(first) = values.first() else { return Err(Fault::Missing("parameter `values`".into())) };
    let except = except(first.rank());
    for t in &values {
        let same =
            t.rank() == first.rank() && (0..t.rank()).all(|i| Some(i) == except || t.shape()[i] == first.shape()[i]);
        if !same {
            return Err(Fault::Shape(format!("shapes {:?} and {:?} do not join", first.shape(), t.shape())));
        }
        if t.dtype() != first.dtype() {
            return Err(Fault::dtype("one of values", t.dtype(), first.dtype()));
        }
    }
    Ok(values)
}

/// Joins along an axis; scalars form a vector. Interleaved: element k of every operand before element k+1 of any.
pub(super) fn concat(call: &Call<'_>) -> Result<Tensor, Fault> {
    let number = call.int("axis")?;
    let interleave = call.bool_or("interleave", false)?;
    let values = agreeing(call, |rank| if interleave { None } else { axis(number, rank.max(1)).ok() })?;
    let values: Vec<Tensor> = match values[0].rank() {
        0 => values.iter().map(|t| reshaped(t, &[1])).collect::<Result<_, _>>()?,
        _ => values,
    };
    let at = axis(number, values[0].rank())?;
    if !interleave {
        return join(&values, at);
    }
    let mut shape = values[0].dims();
    shape[at] = shape[at].checked_mul(values.len()).ok_or_else(|| Fault::TooLarge(shape.to_vec()))?;
    reshaped(&stacked(&values, at + 1)?, &shape)
}

pub(super) fn stack(call: &Call<'_>) -> Result<Tensor, Fault> {
    let values = agreeing(call, |_| None)?;
    let at = axis(call.int("axis")?, values[0].rank() + 1)?;
    stacked(&values, at)
}

fn stacked(values: &[Tensor], at: usize) -> Result<Tensor, Fault> {
    let with_axis = |t: &Tensor| {
        let mut shape = t.dims();
        shape.insert(at, 1);
        reshaped(t, &shape)
    };
    join(&values.iter().map(with_axis).collect::<Result<Vec<_>, _>>()?, at)
}

/// Agreeing tensors joined along an axis.
fn join(values: &[Tensor], at: usize) -> Result<Tensor, Fault> {
    let first = &values[0];
    let mut shape = first.dims();
    let total = values.iter().try_fold(0usize, |sum, t| sum.checked_add(t.shape()[at]));
    shape[at] = total.ok_or_else(|| Fault::TooLarge(first.shape().to_vec()))?;
    let len = volume(&shape)?;
    let outer = if len == 0 { 0 } else { volume(&shape[..at])? };
    with_element!(first, T => {
        let mut out: Vec<T> = Vec::with_capacity(len);
        let parts = values.iter().map(|t| t.elements::<T>()).collect::<Result<Vec<_>, _>>()?;
        for i in 0..outer {
            for part in &parts {
                let run = part.len() / outer;
                out.extend_from_slice(&part[i * run..(i + 1) * run]);
            }
        }
        Ok(first.like(shape, out))
    })
}

/// Equal parts, or the sizes of `split_sizes` where it is given.
pub(super) fn split(call: &Call<'_>) -> Result<Vec<Tensor>, Fault> {
    let x = call.tensor("x")?;
    let at = axis(call.int("axis")?, x.rank())?;
    let n = x.shape()[at];
    let parts = call.optional_int("num_splits")?.map(|p| usize::try_from(p).unwrap_or(0));
    let sizes: Vec<usize> = match (call.optional_ints("split_sizes")?, parts) {
        (Some(sizes), parts) => {
            let sizes: Option<Vec<usize>> = sizes.iter().map(|&s| usize::try_from(s).ok()).collect();
            sizes.filter(|s| parts.is_none_or(|p| p == s.len())).unwrap_or_default()
        }
        (None, Some(parts)) if parts > 0 && n % parts == 0 && parts <= call.result_count() => vec![n / parts; parts],
        _ => Vec::new(),
    };
    if sizes.iter().try_fold(0usize, |sum, &s| sum.checked_add(s)) != Some(n) {
        return Err(Fault::Shape(format!("axis of {n} cannot be split into {sizes:?}")));
    }
    let mut start = 0;
    let mut out = Vec::with_capacity(sizes.len());
    for size in sizes {
        out.push(x.viewed(x.view().sliced(at, start, size, 1))?);
        start += size;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, i32s, iota};

    fn reshaped_to<const N: usize>(opset: &'static str, x: &[usize], shape: [i64; N]) -> Option<Vec<usize>> {
        let op = Op::new("reshape").opset(opset).with("x", iota(x)).with("shape", shape);
        op.try_all().ok().map(|out| out[0].shape().to_vec())
    }

    #[test]
    fn zeros_of_reshape_depend_on_the_opset() {
        assert_eq!(reshaped_to("CoreML6", &[2, 3, 4], [0, -1, 2]), Some(vec![2, 6, 2]));
        assert_eq!(reshaped_to("CoreML7", &[2, 3, 4], [0, -1, 2]), Some(vec![2, 6, 2]));
        assert_eq!(reshaped_to("CoreML6", &[2, 3, 4], [0, -1]), None);
        assert_eq!(reshaped_to("CoreML7", &[2, 3, 4], [0, -1]), Some(vec![3, 8]));
        assert_eq!(reshaped_to("CoreML8", &[2, 50], [1, 0, -1, 0]), Some(vec![1, 1, 2, 50]));
        assert_eq!(reshaped_to("CoreML8", &[2, 3], [4, -1]), None);
        assert_eq!(reshaped_to("CoreML8", &[2, 3], [-1, -1]), None);
        assert_eq!(reshaped_to("CoreML8", &[2, 3], [-2, 3]), None);
        assert_eq!(reshaped_to("CoreML8", &[2, 3], [i64::MAX, i64::MAX]), None);
    }

    #[test]
    fn axes_of_expand_dims_refer_to_the_result() {
        let out = Op::new("expand_dims").with("x", iota(&[3, 4])).with("axes", [-1, 0]).one();
        assert_eq!(out.shape(), [1, 3, 4, 1]);
    }

    #[test]
    fn squeeze_ignores_other_sizes() {
        let x = iota(&[1, 2, 1, 3]);
        assert_eq!(Op::new("squeeze").with("x", x.clone()).one().shape(), [2, 3]);
        assert_eq!(Op::new("squeeze").with("x", x).with("axes", [-2, 1]).one().shape(), [1, 2, 3]);
        assert!(Op::new("squeeze").with("x", iota(&[1, 1])).one().shape().is_empty());
    }

    #[test]
    fn transpose_and_reverse_move_elements() {
        let out = Op::new("transpose").with("x", iota(&[2, 3])).with("perm", [-1, 0]).one();
        assert_close(&out, &[3, 2], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0], 0.0);
        let out = Op::new("reverse").with("x", iota(&[2, 2])).with("axes", [1]).one();
        assert_close(&out, &[2, 2], &[1.0, 0.0, 3.0, 2.0], 0.0);
        assert!(Op::new("transpose").with("x", iota(&[2, 3])).with("perm", [0, 0]).fault().contains("repeat"));
    }

    #[test]
    fn tile_repeats_whole_axes() {
        let out = Op::new("tile").with("x", iota(&[2, 2])).with("reps", [2, 2]).one();
        let row = [0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 2.0, 3.0];
        assert_close(&out, &[4, 4], &[row, row].concat(), 0.0);
        assert!(Op::new("tile").with("x", iota(&[2])).with("reps", [1 << 30]).fault().contains("too large"));
        assert!(Op::new("tile").with("x", iota(&[2])).with("reps", [0]).fault().contains("positive"));
    }

    #[test]
    fn concat_joins_or_interleaves() {
        let (a, b) = (f32s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]), f32s(&[2, 1], &[8.0, 9.0]));
        let out = Op::new("concat").with("values", vec![a.clone(), b]).with("axis", -1).one();
        assert_close(&out, &[2, 3], &[1.0, 2.0, 8.0, 3.0, 4.0, 9.0], 0.0);
        let c = f32s(&[2, 2], &[5.0, 6.0, 7.0, 8.0]);
        let out =
            Op::new("concat").with("values", vec![a.clone(), c.clone()]).with("axis", 0).with("interleave", true).one();
        assert_close(&out, &[4, 2], &[1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0], 0.0);
        let out = Op::new("stack").with("values", vec![a, c]).with("axis", -1).one();
        assert_close(&out, &[2, 2, 2], &[1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0, 8.0], 0.0);
        let scalars = vec![i32s(&[], &[4]), i32s(&[], &[5])];
        let out = Op::new("concat").with("values", scalars).with("axis", 0).one();
        assert_eq!((out.shape(), out.to_i64s()), (&[2][..], vec![4, 5]));
    }

    #[test]
    fn split_prefers_its_sizes() {
        let split = || Op::new("split").with("x", iota(&[2, 4])).with("axis", 1).results(2);
        let out = split().with("num_splits", 2).with("split_sizes", [1, 3]).all();
        assert_close(&out[0], &[2, 1], &[0.0, 4.0], 0.0);
        assert_close(&out[1], &[2, 3], &[1.0, 2.0, 3.0, 5.0, 6.0, 7.0], 0.0);
        assert_close(&split().with("num_splits", 2).all()[1], &[2, 2], &[2.0, 3.0, 6.0, 7.0], 0.0);
        assert!(split().with("split_sizes", [1, 2]).fault().contains("cannot be split"));
    }

    #[test]
    fn windows_slide() {
        let out =
            Op::new("sliding_windows").with("x", iota(&[5])).with("axis", 0).with("size", 3).with("stride", 2).one();
        assert_close(&out, &[2, 3], &[0.0, 1.0, 2.0, 2.0, 3.0, 4.0], 0.0);
    }

    #[test]
    fn views_share_their_elements() {
        let x = iota(&[2, 3]);
        let y = x.reshaped(&[6]).unwrap();
        assert!(std::ptr::eq(x.elements::<f32>().unwrap(), y.elements::<f32>().unwrap()));
    }
}
