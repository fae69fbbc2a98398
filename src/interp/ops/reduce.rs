//! Reductions, softmax and running sums.

use std::borrow::Cow;

use super::super::call::{Axes, Call, with_num, with_real};
use super::super::error::Fault;
use super::super::lanes;
use super::super::num::{Element, Num, Real};
use super::super::par;
use super::super::tensor::{Dims, Tensor, volume};
use super::super::view::View;

/// A tensor seen as rows: some axes, in ascending order, form the row, the others number the rows.
pub(super) struct Rows {
    /// Kept axes, then row axes.
    perm: Axes,
    shape: Dims,
    /// Elements of a row.
    pub n: usize,
    /// Number of rows.
    pub count: usize,
}

impl Rows {
    /// Rows over `axes` of a tensor of this shape.
    pub fn over(shape: &[usize], axes: &[usize]) -> Result<Rows, Fault> {
        let (mut perm, row): (Axes, Axes) = (0..shape.len()).partition(|a| !axes.contains(a));
        let size = |axes: &[usize]| volume(&axes.iter().map(|&a| shape[a]).collect::<Dims>());
        let (count, n) = (size(&perm)?, size(&row)?);
        perm.extend(row);
        Ok(Rows { perm, shape: shape.into(), n, count })
    }

    fn in_place(&self) -> bool {
        self.perm.is_sorted()
    }

    /// The rows one after the other.
    pub fn gather<'a, T: Element>(&self, elements: Cow<'a, [T]>) -> Result<Cow<'a, [T]>, Fault> {
        if self.in_place() {
            return Ok(elements);
        }
        Ok(Cow::Owned(View::of(&self.shape).permuted(&self.perm).read(&elements)?))
    }

    /// The inverse of [`Rows::gather`].
    pub fn scatter<T: Num>(&self, rows: Vec<T>) -> Vec<T> {
        if self.in_place() {
            return rows;
        }
        let mut out = vec![T::ZERO; rows.len()];
        View::of(&self.shape).permuted(&self.perm).write(&mut out, &rows);
        out
    }

    /// f of every row; rows may be empty.
    pub fn fold<T: Element, U: Send>(&self, rows: &[T], f: impl Fn(&[T]) -> U + Sync) -> Vec<U> {
        par::fold(rows, self.n, self.count, f)
    }
}

/// The reduced axes of an op, all of them when none are named, and the shape of its result.
fn reduced(call: &Call<'_>, x: &Tensor) -> Result<(Axes, Dims), Fault> {
    let axes = call.axes("axes", x.rank())?.unwrap_or_else(|| (0..x.rank()).collect());
    let keep = call.bool_or("keep_dims", false)?;
    let shape = (0..x.rank()).filter_map(|a| match axes.contains(&a) {
        true => keep.then_some(1),
        false => Some(x.shape()[a]),
    });
    let shape = shape.collect();
    Ok((axes, shape))
}

/// A row of floats to one. The maximum of nothing is −∞, the minimum +∞.
pub(super) fn real_fn<R: Real>(kind: &str) -> Option<fn(&[R]) -> R> {
    Some(match kind {
        "reduce_sum" => |x| lanes::sum(x, |v| v),
        "reduce_mean" => mean,
        "reduce_max" => |x| lanes::max(x).unwrap_or(R::ZERO.minus(R::INFINITY)),
        "reduce_min" => |x| lanes::min(x).unwrap_or(R::INFINITY),
        "reduce_prod" => lanes::product,
        "reduce_l1_norm" => |x| lanes::sum(x, R::abs),
        "reduce_l2_norm" => |x| lanes::sum(x, |v| v.times(v)).libm_sqrt(),
        "reduce_sum_square" => |x| lanes::sum(x, |v| v.times(v)),
        "reduce_log_sum" => |x| lanes::sum(x, |v| v).libm_ln(),
        "reduce_log_sum_exp" => |x| {
            let max = lanes::max(x).unwrap_or(R::ZERO.minus(R::INFINITY));
            max.plus(lanes::sum(x, |v| v.minus(max).libm_exp()).libm_ln())
        },
        _ => return None,
    })
}

type IntFold = fn(&[i64]) -> Option<i64>;

/// A row of integers to one; `None` when it is undefined for an empty row.
fn int_fn(kind: &str) -> Option<IntFold> {
    Some(match kind {
        "reduce_sum" => |x| Some(lanes::sum(x, |v| v)),
        "reduce_mean" => |x| lanes::sum(x, |v| v).divided(x.len() as i64),
        "reduce_max" => lanes::max,
        "reduce_min" => lanes::min,
        "reduce_prod" => |x| Some(lanes::product(x)),
        "reduce_l1_norm" => |x| Some(lanes::sum(x, Num::abs)),
        "reduce_sum_square" => |x| Some(lanes::sum(x, |v| v.times(v))),
        _ => return None,
    })
}

pub(super) fn reduce(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let (axes, shape) = reduced(call, &x)?;
    let rows = Rows::over(x.shape(), &axes)?;
    if !x.dtype().is_int() {
        return with_real!([x], R => {
            let f = real_fn::<R>(call.kind()).ok_or(Fault::NotInterpreted)?;
            let elements = rows.gather(x.reals::<R>()?)?;
            Ok(call.real_result::<R>(x.dtype(), &shape, rows.fold(&elements, f)))
        });
    }
    let elements = rows.gather(x.numbers::<i64>()?)?;
    let out: Option<Vec<i64>> = match (int_fn(call.kind()), real_fn::<f64>(call.kind())) {
        (Some(f), _) => rows.fold(&elements, f).into_iter().collect(),
        (None, Some(f)) => {
            let floats: Vec<f64> = elements.iter().map(|&v| v as f64).collect();
            Some(rows.fold(&floats, |row| f(row) as i64))
        }
        (None, None) => return Err(Fault::NotInterpreted),
    };
    let out = out.ok_or_else(|| Fault::Range("nothing is reduced".into()))?;
    Ok(call.result(x.dtype(), &shape, out))
}

/// Σx / n.
pub(super) fn mean<R: Real>(x: &[R]) -> R {
    lanes::sum(x, |v| v).over(R::from_f64(x.len() as f64))
}

pub(super) fn softmax(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let rows = Rows::over(x.shape(), &[call.axis("axis", -1, x.rank())?])?;
    with_real!([x], R => {
        let mut elements = rows.gather(x.reals::<R>()?)?.into_owned();
        par::rows(&mut elements, rows.n, |_, row| lanes::softmax(row));
        Ok(call.real_result::<R>(x.dtype(), x.shape(), rows.scatter(elements)))
    })
}

/// Running sums along an axis, one term after the other; `exclusive` leaves out the term itself.
pub(super) fn cumsum(call: &Call<'_>) -> Result<Tensor, Fault> {
    let x = call.tensor("x")?;
    let rows = Rows::over(x.shape(), &[call.axis("axis", 0, x.rank())?])?;
    let (exclusive, reverse) = (call.bool_or("exclusive", false)?, call.bool_or("reverse", false)?);
    with_num!([x], T => {
        let mut elements = rows.gather(x.numbers::<T>()?)?.into_owned();
        par::rows(&mut elements, rows.n, |_, row| match reverse {
            true => running_sum(row.iter_mut().rev(), exclusive),
            false => running_sum(row.iter_mut(), exclusive),
        });
        Ok(call.result(x.dtype(), x.shape(), rows.scatter(elements)))
    })
}

fn running_sum<'a, T: Num>(terms: impl Iterator<Item = &'a mut T>, exclusive: bool) {
    let mut sum = T::ZERO;
    for term in terms {
        let next = sum.plus(*term);
        *term = if exclusive { sum } else { next };
        sum = next;
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::tensor::same_bits;
    use super::super::super::testing::{Op, assert_close, f32s, i32s, iota, noise, ramp};

    #[test]
    fn axes_default_to_all_and_empty_means_none() {
        let sum = || Op::new("reduce_sum").with("x", iota(&[2, 3]));
        assert_close(&sum().one(), &[], &[15.0], 0.0);
        assert_close(&sum().with("axes", [-1]).with("keep_dims", true).one(), &[2, 1], &[3.0, 12.0], 0.0);
        assert_close(&sum().with("axes", [0]).one(), &[3], &[3.0, 5.0, 7.0], 0.0);
        assert_close(&sum().with("axes", i32s(&[0], &[])).one(), &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0.0);
        assert!(sum().with("axes", [2]).fault().contains("no axis 2"));
    }

    #[test]
    fn every_reduction() {
        let x = f32s(&[4], &[1.0, -2.0, 3.0, 4.0]);
        for (kind, want) in [
            ("reduce_mean", 1.5),
            ("reduce_max", 4.0),
            ("reduce_min", -2.0),
            ("reduce_prod", -24.0),
            ("reduce_l1_norm", 10.0),
            ("reduce_l2_norm", 30f64.sqrt()),
            ("reduce_sum_square", 30.0),
            ("reduce_log_sum", 6f64.ln()),
            ("reduce_log_sum_exp", 4.350759),
        ] {
            assert_close(&Op::new(kind).with("x", x.clone()).one(), &[], &[want], 1e-6);
            assert_close(&Op::new(kind).with("x", x.clone()).exact().one(), &[], &[want], 1e-6);
        }
        let mean = Op::new("reduce_mean").with("x", i32s(&[2], &[-3, -4])).one();
        assert_eq!(mean.to_i64s(), [-3]);
    }

    /// torch.softmax(x, 1)
    #[test]
    fn softmax_along_any_axis() {
        let out = Op::new("softmax").with("x", ramp(&[2, 3, 4])).with("axis", 1).one();
        let want = [
            0.147804, 0.3890248, 0.147804, 0.7306791, 0.6624118, 0.1114575, 0.6624118, 0.2093431, 0.1897842, 0.4995177,
            0.1897842, 0.0599778, 0.3890248, 0.147804, 0.7306791, 0.3890248, 0.1114575, 0.6624118, 0.2093431,
            0.1114575, 0.4995177, 0.1897842, 0.0599778, 0.4995177,
        ];
        assert_close(&out, &[2, 3, 4], &want, 1e-6);
    }

    #[test]
    fn running_sums_are_inclusive_unless_told() {
        let run = |exclusive: bool, reverse: bool| {
            let op = Op::new("cumsum").with("x", f32s(&[3], &[1.0, 2.0, 4.0]));
            op.with("exclusive", exclusive).with("reverse", reverse).one().to_f64s()
        };
        assert_eq!(run(false, false), [1.0, 3.0, 7.0]);
        assert_eq!(run(true, false), [0.0, 1.0, 3.0]);
        assert_eq!(run(false, true), [7.0, 6.0, 4.0]);
        assert_eq!(run(true, true), [6.0, 4.0, 0.0]);
    }

    #[test]
    fn the_order_of_sums_depends_on_the_extent_alone() {
        let x = noise(&[3, 77], 1);
        let transposed = Op::new("transpose").with("x", x.clone()).with("perm", [1, 0]).one();
        for kind in ["reduce_sum", "reduce_mean", "reduce_l2_norm", "reduce_log_sum_exp", "reduce_prod"] {
            let rows = Op::new(kind).with("x", x.clone()).with("axes", [1]).one();
            let columns = Op::new(kind).with("x", transposed.clone()).with("axes", [0]).one();
            assert!(same_bits(&rows, &columns), "{kind}");
            let split = Op::new(kind).with("x", x.reshaped(&[3, 7, 11]).unwrap()).with("axes", [1, 2]).one();
            assert!(same_bits(&rows, &split), "{kind}");
        }
        let rows = Op::new("softmax").with("x", x).one();
        let columns = Op::new("softmax").with("x", transposed).with("axis", 0).one();
        assert!(same_bits(&rows, &Op::new("transpose").with("x", columns).with("perm", [1, 0]).one()));
    }
}
