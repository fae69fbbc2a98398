//! Sizes for inputs whose shape is flexible.

use std::collections::BTreeMap;

use super::Options;
use super::uses::{Sizes, is_mask};
use crate::ir::{Dim, Flexibility, Function, Name, ValueId};

/// Shapes of all tensor inputs by name.
pub(super) type Shapes = BTreeMap<Name, Vec<usize>>;

/// Row and key lengths to try on inputs of free size, besides the default shapes: several rows over a longer past, rows
/// only, one row over a past.
const PROBES: &[(u64, u64)] = &[(3, 7), (5, 5), (1, 6)];

/// One row in the last slot of a state, where the size of a mask says how much of it is in use.
const FULL: (u64, u64) = (1, u64::MAX);

/// The sets of input shapes to run `f` with. The first holds `told` and otherwise the defaults of the description; the
/// others, present only when nothing is told, are guesses that the function may refuse.
///
/// # Errors
/// A reason, when a told shape does not fit the input's type or a default cannot be found.
pub(super) fn cases(f: &Function, told: &BTreeMap<Name, Vec<usize>>) -> Result<Vec<Shapes>, (Name, String)> {
    if let Some(name) = told.keys().find(|n| f.input(n).is_none_or(|v| f.tensor(v).is_none())) {
        return Err((name.clone(), "is no tensor input".into()));
    }
    let mut cases = vec![told_or_default(f, told)?];
    if told.is_empty() && cases[0].keys().any(|n| f.input(n).is_some_and(|v| is_flexible(f, v))) {
        let full = Some(FULL).filter(|_| f.inputs().iter().any(|&v| f.ty(v).as_state().is_some()));
        let probes = PROBES.iter().copied().chain(full).map(|p| assign(f, |v| probe(f, v, p)));
        for shapes in enumerated(f).into_iter().chain(probes).flatten() {
            if !cases.contains(&shapes) {
                cases.push(shapes);
            }
        }
    }
    Ok(cases)
}

/// The shapes that the options tell, for inputs that `f` has.
pub(super) fn told(f: &Function, options: &Options) -> BTreeMap<Name, Vec<usize>> {
    let given = options.given.iter().take(1).flatten().map(|(n, t)| (n, t.shape().to_vec()));
    let told = options.shapes.iter().map(|(n, s)| (n, s.clone()));
    given.chain(told).filter(|(n, _)| f.input(n).is_some()).map(|(n, s)| (n.clone(), s)).collect()
}

/// What sets shapes apart from the default ones.
pub(super) fn unusual(shapes: &Shapes, default: &Shapes) -> String {
    let unusual = shapes.iter().filter(|(name, s)| default.get(*name) != Some(*s));
    let list: Vec<String> = unusual.map(|(name, shape)| format!("{name} {shape:?}")).collect();
    format!("the shapes {}", list.join(", "))
}

/// The sizes that `shapes` gives to the unknown dimensions of `f`.
pub(super) fn sizes(f: &Function, shapes: &Shapes) -> Sizes {
    let mut sizes = Sizes::default();
    for (name, shape) in shapes {
        let Some(ty) = f.input(name).and_then(|v| f.tensor(v)) else { continue };
        for (dim, &n) in ty.shape.iter().zip(shape) {
            sizes.bind(dim, n as u64);
        }
    }
    sizes
}

/// The told shapes; for the other inputs the defaults, but where a told shape fixes a size.
fn told_or_default(f: &Function, told: &BTreeMap<Name, Vec<usize>>) -> Result<Shapes, (Name, String)> {
    let mut fixed = Sizes::default();
    for (name, shape) in told {
        let Some(ty) = f.input(name).and_then(|v| f.tensor(v)) else { continue };
        ty.shape.iter().zip(shape).for_each(|(dim, &n)| _ = fixed.bind(dim, n as u64));
    }
    assign(f, |v| match (told.get(f.value(v).name()), f.tensor(v)) {
        (Some(shape), _) => widen(shape),
        (None, Some(ty)) => {
            let sizes = ty.shape.iter().zip(default(f, v));
            sizes.map(|(dim, n)| fixed.of(dim).and_then(|n| u64::try_from(n).ok()).unwrap_or(n)).collect()
        }
        (None, None) => Vec::new(),
    })
}

fn widen(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|&n| n as u64).collect()
}

fn tensor_inputs(f: &Function) -> impl Iterator<Item = ValueId> {
    f.inputs().iter().copied().filter(|&v| f.tensor(v).is_some())
}

fn is_flexible(f: &Function, v: ValueId) -> bool {
    f.tensor(v).is_some_and(|t| t.known_shape().is_none())
}

/// The largest size to try on an axis without a bound.
const MAX_KEYS: u64 = 1 << 10;

/// Shapes of all inputs by `choose`, if they fit the types and agree on every unknown size.
fn assign(f: &Function, choose: impl Fn(ValueId) -> Vec<u64>) -> Result<Shapes, (Name, String)> {
    let mut sizes = Sizes::default();
    let mut shapes = Shapes::new();
    for v in tensor_inputs(f) {
        let Some(ty) = f.tensor(v) else { continue };
        let shape = choose(v);
        let fits = shape.len() == ty.rank() && ty.shape.iter().zip(&shape).all(|(d, &n)| sizes.bind(d, n));
        let narrow = shape.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<Vec<usize>>>();
        match narrow.filter(|_| fits) {
            Some(s) => shapes.insert(f.value(v).name().clone(), s),
            None => return Err((f.value(v).name().clone(), format!("shape {shape:?} does not fit {ty}"))),
        };
    }
    Ok(shapes)
}

/// The known sizes of the type; for the others the described default, or the smallest that is allowed.
fn default(f: &Function, v: ValueId) -> Vec<u64> {
    let described = described(f, v).unwrap_or_default();
    fill(f, v, |axis, (lo, _)| described.get(axis).copied().unwrap_or(lo))
}

fn described(f: &Function, v: ValueId) -> Option<Vec<u64>> {
    let array = f.interface().input(f.value(v).name())?.array()?;
    match &array.flexibility {
        _ if Some(array.shape.len()) == f.tensor(v).map(|t| t.rank()) => Some(array.shape.clone()),
        Flexibility::Enumerated(shapes) => shapes.first().cloned(),
        Flexibility::Ranges(ranges) => Some(ranges.iter().map(|r| r.0.max(1)).collect()),
        Flexibility::Fixed => None,
    }
}

/// The shape with every unknown axis chosen from its number and bounds.
fn fill(f: &Function, v: ValueId, choose: impl Fn(usize, (u64, Option<u64>)) -> u64) -> Vec<u64> {
    let Some(ty) = f.tensor(v) else { return Vec::new() };
    ty.shape
        .iter()
        .enumerate()
        .map(|(axis, d)| d.as_known().unwrap_or_else(|| choose(axis, bounds(f, v, axis, d))))
        .collect()
}

fn bounds(f: &Function, v: ValueId, axis: usize, dim: &Dim) -> (u64, Option<u64>) {
    let array = f.interface().input(f.value(v).name()).and_then(|feature| feature.array());
    let (lo, hi) = match (array.map(|a| &a.flexibility), dim.symbols()) {
        (Some(Flexibility::Ranges(ranges)), _) if ranges.len() > axis => ranges[axis],
        (_, [symbol, ..]) => (f.symbol_range(*symbol).lo, f.symbol_range(*symbol).hi),
        _ => (1, None),
    };
    (lo.max(1), hi)
}

/// Every unknown axis has `rows` elements, or `keys` if it is the last of a mask, as far as its bounds allow. Without a
/// bound, no more than [`MAX_KEYS`].
fn probe(f: &Function, v: ValueId, (rows, keys): (u64, u64)) -> Vec<u64> {
    let last = f.tensor(v).map_or(0, |t| t.rank()).saturating_sub(1);
    let mask = is_mask(f, v);
    fill(f, v, |axis, (lo, hi)| {
        let n = if mask && axis == last { keys } else { rows };
        n.min(hi.unwrap_or(MAX_KEYS)).max(lo)
    })
}

/// The i-th enumerated shape of every input that has one, for each i.
fn enumerated(f: &Function) -> Vec<Result<Shapes, (Name, String)>> {
    let listed = |v| match &f.interface().input(f.value(v).name())?.array()?.flexibility {
        Flexibility::Enumerated(shapes) => Some(shapes),
        _ => None,
    };
    let count = tensor_inputs(f).filter_map(|v| listed(v).map(Vec::len)).max().unwrap_or(0);
    (0..count)
        .map(|i| assign(f, |v| listed(v).and_then(|l| l.get(i).cloned()).unwrap_or_else(|| default(f, v))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::equiv::graph::{Graph, ty};
    use crate::ir::{ArrayFeature, DType, Feature, FeatureKind, Interface, TensorType};

    /// Token ids [1, s0] and a mask [1, 1, s1, s2], every size in 1..=32.
    fn flexible(features: &[(&str, &[u64], Flexibility)]) -> Graph {
        let mut g = Graph::new();
        let [s0, s1, s2] = [(); 3].map(|()| g.dim(1, 32));
        let one = || Dim::known(1);
        g.input("ids", TensorType::new(DType::I32, [one(), s0]));
        let mask = g.input("mask", TensorType::new(DType::F16, [one(), one(), s1, s2]));
        g.input("fixed", ty(DType::I32, &[3]));
        let t = ty(DType::F16, &[1, 1, 1, 1]);
        let sum = g.op("add", "sum", t.clone(), vec![("x", mask.into()), ("y", 1.into())]);
        g.op("softmax", "p", t, vec![("x", sum.into())]);
        let inputs = features
            .iter()
            .map(|(name, shape, flexibility)| Feature {
                name: (*name).into(),
                short_description: String::new(),
                kind: FeatureKind::Array(ArrayFeature {
                    dtype: None,
                    shape: shape.to_vec(),
                    flexibility: flexibility.clone(),
                    default: None,
                }),
                optional: false,
            })
            .collect();
        g.f.set_interface(Interface { inputs, ..Interface::default() });
        g
    }

    fn shapes(ids: &[usize], mask: &[usize]) -> Shapes {
        [("ids", ids), ("mask", mask), ("fixed", &[3])].map(|(n, s)| (n.into(), s.to_vec())).into()
    }

    #[test]
    fn defaults_come_first_then_longer_pasts() {
        let g = flexible(&[
            ("ids", &[1, 2], Flexibility::Ranges(vec![(1, Some(1)), (1, Some(32))])),
            ("mask", &[1, 1, 2, 2], Flexibility::Ranges(vec![(1, Some(1)), (1, Some(1)), (1, Some(4)), (1, Some(6))])),
        ]);
        let want = [
            shapes(&[1, 2], &[1, 1, 2, 2]),
            shapes(&[1, 3], &[1, 1, 3, 6]),
            shapes(&[1, 5], &[1, 1, 4, 5]),
            shapes(&[1, 1], &[1, 1, 1, 6]),
        ];
        assert_eq!(cases(&g.f, &BTreeMap::new()).unwrap(), want);
    }

    #[test]
    fn a_state_is_filled_to_its_last_slot() {
        let mut g = flexible(&[]);
        g.state("cache", ty(DType::F16, &[32, 4]));
        let all = cases(&g.f, &BTreeMap::new()).unwrap();
        assert_eq!(all.last(), Some(&shapes(&[1, 1], &[1, 1, 1, 32])));
        assert!(all.contains(&shapes(&[1, 5], &[1, 1, 5, 5])), "from slot 0 on");
    }

    #[test]
    fn without_a_description_the_bounds_of_the_symbols_hold() {
        assert_eq!(cases(&flexible(&[]).f, &BTreeMap::new()).unwrap()[0], shapes(&[1, 1], &[1, 1, 1, 1]));
    }

    #[test]
    fn every_enumerated_shape_is_tried() {
        let ids = Flexibility::Enumerated(vec![vec![1, 4], vec![1, 16]]);
        let mask = Flexibility::Enumerated(vec![vec![1, 1, 4, 4], vec![1, 1, 16, 16]]);
        let g = flexible(&[("ids", &[], ids), ("mask", &[], mask)]);
        let cases = cases(&g.f, &BTreeMap::new()).unwrap();
        assert_eq!(cases[..2], [shapes(&[1, 4], &[1, 1, 4, 4]), shapes(&[1, 16], &[1, 1, 16, 16])]);
    }

    #[test]
    fn told_shapes_are_the_only_ones_and_must_fit() {
        let g = flexible(&[]);
        let told = |name: &str, shape: &[usize]| BTreeMap::from([(name.into(), shape.to_vec())]);
        assert_eq!(cases(&g.f, &told("ids", &[1, 9])).unwrap(), [shapes(&[1, 9], &[1, 1, 1, 1])]);
        for (name, shape) in [("ids", &[2, 9][..]), ("ids", &[9]), ("fixed", &[4]), ("nobody", &[1])] {
            assert_eq!(cases(&g.f, &told(name, shape)).unwrap_err().0, name);
        }
    }
}
