//! Arithmetic on sizes of which some are not known.

use smallvec::SmallVec;

use crate::ir::{Dim, TensorType};

use super::{Problem, Stop};

/// Sizes; `None` is unknown and related to nothing.
pub(crate) type Dims = SmallVec<[Option<Dim>; 5]>;

/// The sizes of a type.
pub(crate) fn of(t: &TensorType) -> Dims {
    t.shape.iter().cloned().map(Some).collect()
}

/// As many unknown sizes as `rank`.
pub(super) fn unknown(rank: usize) -> Dims {
    (0..rank).map(|_| None).collect()
}

/// A known size.
pub(super) fn known(n: u64) -> Option<Dim> {
    Some(Dim::known(n))
}

/// The size when it is a number.
pub(super) fn number(d: &Option<Dim>) -> Option<u64> {
    d.as_ref().and_then(Dim::as_known)
}

/// A product; unknown when a factor is.
pub(super) fn product<'a>(dims: impl IntoIterator<Item = &'a Option<Dim>>) -> Result<Option<Dim>, Stop> {
    let mut out = Some(Dim::known(1));
    for d in dims {
        out = match (out, d) {
            (Some(a), Some(b)) => Some(a.checked_mul(b).ok_or(Problem::Overflow)?),
            _ => None,
        };
    }
    Ok(out)
}

/// A sum; unknown unless the terms are multiples of one monomial.
pub(super) fn add(a: &Option<Dim>, b: &Option<Dim>) -> Result<Option<Dim>, Stop> {
    let (Some(a), Some(b)) = (a, b) else { return Ok(None) };
    if *a == Dim::known(0) || *b == Dim::known(0) {
        return Ok(Some(if *a == Dim::known(0) { b.clone() } else { a.clone() }));
    }
    if a.symbols() != b.symbols() {
        return Ok(None);
    }
    let coef = a.coef().checked_add(b.coef()).ok_or(Problem::Overflow)?;
    Ok(a.checked_div(&Dim::known(a.coef())).and_then(|unit| unit.checked_mul(&Dim::known(coef))))
}

/// The size of an axis after adding a known number of elements, which may be negative.
pub(super) fn grow(d: &Option<Dim>, by: i64) -> Result<Option<Dim>, Stop> {
    match number(d) {
        _ if by == 0 => Ok(d.clone()),
        Some(n) => {
            let grown = i128::from(n) + i128::from(by);
            Ok(known(u64::try_from(grown).map_err(|_| Problem::sizes(format!("size {n} cannot grow by {by}")))?))
        }
        None => Ok(None),
    }
}

/// Whether two sizes can be the same.
pub(super) fn may_equal(a: &Option<Dim>, b: &Option<Dim>) -> bool {
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a == b,
        _ => true,
    }
}

/// The size of two axes that the op requires to be equal; `None` when they are not.
pub(super) fn same(a: &Option<Dim>, b: &Option<Dim>) -> Option<Option<Dim>> {
    match (a, b) {
        (None, other) | (other, None) => Some(other.clone()),
        (Some(x), Some(y)) if x == y => Some(a.clone()),
        (Some(x), Some(y)) => match (x.as_known(), y.as_known()) {
            (Some(_), Some(_)) => None,
            (Some(_), None) => Some(a.clone()),
            (None, Some(_)) => Some(b.clone()),
            (None, None) => Some(a.clone()),
        },
    }
}

/// Numpy broadcasting, aligned at the right. A known size above one wins against an unknown one.
pub(crate) fn broadcast(a: &[Option<Dim>], b: &[Option<Dim>]) -> Result<Dims, Stop> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Option<Dim>], i: usize| match (i + dims.len()).checked_sub(rank) {
        Some(i) => dims[i].clone(),
        None => known(1),
    };
    (0..rank)
        .map(|i| {
            let (x, y) = (at(a, i), at(b, i));
            match (number(&x), number(&y)) {
                _ if x == y => Ok(x),
                (Some(1), _) => Ok(y),
                (_, Some(1)) => Ok(x),
                (Some(_), Some(_)) => {
                    Err(Problem::sizes(format!("shapes {} and {} do not broadcast", show(a), show(b))).into())
                }
                (Some(n), None) if n > 1 => Ok(x),
                (None, Some(n)) if n > 1 => Ok(y),
                _ => Ok(None),
            }
        })
        .collect()
}

/// A shape for messages.
pub(super) fn show(dims: &[Option<Dim>]) -> String {
    let items: Vec<String> = dims.iter().map(|d| d.as_ref().map_or("?".into(), Dim::to_string)).collect();
    format!("[{}]", items.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Function;

    fn symbols() -> (Option<Dim>, Option<Dim>) {
        let mut f = Function::new("main", "CoreML8");
        (Some(f.fresh_dim()), Some(f.fresh_dim()))
    }

    #[test]
    fn broadcasting_follows_numpy_and_lets_known_sizes_win() {
        let (s, t) = symbols();
        let b = |a: &[Option<Dim>], b: &[Option<Dim>]| broadcast(a, b).map(|d| d.to_vec()).ok();
        assert_eq!(b(&[known(2), known(1)], &[known(3)]), Some(vec![known(2), known(3)]));
        assert_eq!(b(&[s.clone()], &[known(8)]), Some(vec![known(8)]));
        assert_eq!(b(&[s.clone()], &[known(1)]), Some(vec![s.clone()]));
        assert_eq!(b(&[s.clone()], &[s.clone()]), Some(vec![s.clone()]));
        assert_eq!(b(&[s.clone()], &[t]), Some(vec![None]));
        assert_eq!(b(&[known(2)], &[known(3)]), None);
        assert_eq!(b(&[], &[s.clone()]), Some(vec![s]));
    }

    #[test]
    fn sums_keep_multiples_of_one_symbol() {
        let (s, t) = symbols();
        assert_eq!(add(&s, &s).unwrap().unwrap().to_string(), "2*s0");
        assert_eq!(add(&s, &t).unwrap(), None);
        assert_eq!(add(&s, &known(0)).unwrap(), s);
        assert_eq!(add(&known(2), &known(3)).unwrap(), known(5));
        assert!(add(&known(u64::MAX), &known(1)).is_err());
        assert!(product([&known(u64::MAX), &known(2)]).is_err());
    }
}
