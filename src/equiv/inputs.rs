//! Random inputs and states that mean something to the function they are for.

use std::fmt;
use std::ops::Range;

use serde::Serialize;

use super::rng::Rng;
use super::shapes::Shapes;
use super::uses::{Sizes, implied_range, is_mask};
use super::{EquivError, Options};
use crate::interp::{Tensor, Values};
use crate::ir::{DType, Function, Name, ValueId};

/// Tensors beyond this many elements are refused rather than allocated.
const MAX_ELEMENTS: usize = 1 << 28;

/// What integers are drawn from when nothing says otherwise.
const DEFAULT_RANGE: Range<i64> = 0..8;

/// What floats are drawn from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Draw {
    /// N(0, 1).
    Normal,
    /// N(0, 1), and every eighth element, by chance, is 1024 times that: near-infinite scores, overflow in 16 bits.
    Large,
    /// −1, −½, 0, ½ and 1: equal scores, equal maxima, exact cancellation.
    Ties,
    /// +0 and −0.
    Zeros,
    /// N(0, 1), and no row of a mask lets anything through, by −∞ and by −1e4 in turn.
    Masked,
}

impl Draw {
    /// Every kind.
    pub const ALL: [Draw; 5] = [Draw::Normal, Draw::Large, Draw::Ties, Draw::Zeros, Draw::Masked];

    fn floats(self, count: usize, rng: &mut Rng) -> Vec<f64> {
        match self {
            Draw::Normal | Draw::Masked => rng.normals(count),
            Draw::Large => {
                let scale = |x: f64, rng: &mut Rng| if rng.below(8) == 0 { 1024.0 * x } else { x };
                rng.normals(count).into_iter().map(|x| scale(x, rng)).collect()
            }
            Draw::Ties => (0..count).map(|_| rng.between(-2, 3) as f64 / 2.0).collect(),
            Draw::Zeros => (0..count).map(|_| if rng.bool() { 0.0 } else { -0.0 }).collect(),
        }
    }
}

impl fmt::Display for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Draw::Normal => "normal",
            Draw::Large => "large",
            Draw::Ties => "ties",
            Draw::Zeros => "zeros",
            Draw::Masked => "masked",
        })
    }
}

/// How the inputs of a function are drawn.
#[derive(Debug)]
pub(super) struct Generator<'f> {
    f: &'f Function,
    plans: Vec<Plan>,
}

#[derive(Debug)]
struct Plan {
    name: Name,
    dtype: DType,
    role: Role,
}

#[derive(Debug, PartialEq)]
enum Role {
    /// N(0, 1), or fair coins.
    Noise,
    /// Integers of a range; a position also places the causal mask of its step.
    Integers { range: Range<i64>, position: bool },
    /// Attention mask over the last two axes.
    Mask,
}

impl<'f> Generator<'f> {
    /// Finds out what each input is for.
    ///
    /// # Errors
    /// [`EquivError::Input`] for an input that is no numeric tensor, or whose range is empty.
    pub(super) fn new(f: &'f Function, sizes: &Sizes, options: &Options) -> Result<Generator<'f>, EquivError> {
        let inputs = f.inputs().iter().copied().filter(|&v| f.ty(v).as_state().is_none());
        let plans = inputs.map(|v| plan(f, v, sizes, options)).collect::<Result<_, _>>()?;
        Ok(Generator { f, plans })
    }

    /// The inputs of step number `step`, some of which are given: positions go through the [`Place`]s in turn, masks through the [`Pattern`]s.
    ///
    /// # Errors
    /// [`EquivError::Input`] when a tensor is too large.
    pub(super) fn inputs(
        &self,
        draw: Draw,
        given: &Values,
        shapes: &Shapes,
        step: usize,
        rng: &mut Rng,
    ) -> Result<Values, EquivError> {
        let mut values = given.clone();
        let mut position = None;
        let place = Place::of(step, rng);
        for plan in &self.plans {
            let shape = shapes.get(&plan.name).map_or(&[][..], |s| s);
            let count = self.count(&plan.name, shape)?;
            let Role::Integers { range, position: is_position } = &plan.role else { continue };
            let drawn = match (given.get(&plan.name), is_position, count) {
                (Some(tensor), ..) => tensor.to_i64s(),
                (_, true, 1) => vec![place.within(range)],
                _ => integers(range, count, rng),
            };
            if let (true, None, &[p]) = (is_position, position, &drawn[..]) {
                position = Some(p);
            }
            values.entry(plan.name.clone()).or_insert_with(|| Tensor::ints(plan.dtype, shape, &drawn));
        }
        for plan in self.plans.iter().filter(|plan| !given.contains_key(&plan.name)) {
            let shape = shapes.get(&plan.name).map_or(&[][..], |s| s);
            let tensor = match (&plan.role, plan.dtype) {
                (Role::Integers { .. }, _) => continue,
                (Role::Noise, dtype) => noise(draw, dtype, shape, self.count(&plan.name, shape)?, rng),
                (Role::Mask, dtype) => {
                    let pattern = Pattern::of(draw, step);
                    mask(pattern, dtype, shape, self.count(&plan.name, shape)?, position, rng)
                }
            };
            values.insert(plan.name.clone(), tensor);
        }
        Ok(values)
    }

    /// Random content for every state.
    ///
    /// # Errors
    /// [`EquivError::Input`] when a state is too large or of unknown size.
    pub(super) fn states(&self, draw: Draw, rng: &mut Rng) -> Result<Values, EquivError> {
        let mut values = Values::new();
        for &v in self.f.inputs() {
            let Some(ty) = self.f.ty(v).as_state() else { continue };
            let name = self.f.value(v).name();
            let shape = ty.known_shape().and_then(|s| s.iter().map(|&n| usize::try_from(n).ok()).collect());
            let shape: Vec<usize> = shape.ok_or_else(|| self.refuse(name, "state of unknown size"))?;
            let count = self.count(name, &shape)?;
            values.insert(name.clone(), noise(draw, ty.dtype, &shape, count, rng));
        }
        Ok(values)
    }

    fn count(&self, name: &Name, shape: &[usize]) -> Result<usize, EquivError> {
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        count.filter(|&n| n <= MAX_ELEMENTS).ok_or_else(|| self.refuse(name, &format!("{shape:?} is too large")))
    }

    fn refuse(&self, input: &Name, reason: &str) -> EquivError {
        refuse(self.f, input, reason)
    }
}

fn refuse(f: &Function, input: &Name, reason: &str) -> EquivError {
    EquivError::Input { function: f.name().clone(), input: input.clone(), reason: reason.into() }
}

fn plan(f: &Function, v: ValueId, sizes: &Sizes, options: &Options) -> Result<Plan, EquivError> {
    let name = f.value(v).name().clone();
    let dtype = match f.tensor(v) {
        Some(t) if t.dtype != DType::String => t.dtype,
        _ => return Err(refuse(f, &name, &format!("cannot draw a {}", f.ty(v)))),
    };
    let role = match options.ranges.get(&name) {
        Some(told) if dtype.is_int() => {
            let implied = implied_range(f, v, sizes);
            Role::Integers { range: told.clone(), position: implied.is_some_and(|i| i.position) }
        }
        Some(_) => return Err(refuse(f, &name, "a range is for integer inputs")),
        None if dtype.is_int() => match implied_range(f, v, sizes) {
            Some(i) => {
                Role::Integers { range: *i.range.start()..i.range.end().saturating_add(1), position: i.position }
            }
            None => Role::Integers { range: DEFAULT_RANGE, position: false },
        },
        None if is_mask(f, v) => Role::Mask,
        None => Role::Noise,
    };
    match &role {
        Role::Integers { range, .. } if range.is_empty() => {
            Err(refuse(f, &name, &format!("no integer lies in {}..{}; give a range", range.start, range.end)))
        }
        _ => Ok(Plan { name, dtype, role }),
    }
}

/// Where a step puts positions in their ranges. Positions of equal width, such as the begin and the end of a window, agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    First,
    Middle,
    Last,
    Random(u64),
}

impl Place {
    /// All of them in five steps, and in forty each with every [`Pattern`].
    fn of(step: usize, rng: &mut Rng) -> Place {
        let random = Place::Random(rng.next());
        [Place::Middle, Place::First, random, Place::Last, random][step % 5]
    }

    /// The integer at this place of a range, which is not empty.
    fn within(self, range: &Range<i64>) -> i64 {
        let width = range.end.abs_diff(range.start).max(1);
        range.start.wrapping_add_unsigned(match self {
            Place::First => 0,
            Place::Middle => width / 2,
            Place::Last => width - 1,
            Place::Random(n) => n % width,
        })
    }
}

/// Uniform draws; a single integer is the smallest or the largest of its range half of the time.
fn integers(range: &Range<i64>, count: usize, rng: &mut Rng) -> Vec<i64> {
    match (count, rng.below(4)) {
        (1, 0) => vec![range.start],
        (1, 1) => vec![range.end - 1],
        _ => (0..count).map(|_| rng.between(range.start, range.end)).collect(),
    }
}

fn noise(draw: Draw, dtype: DType, shape: &[usize], count: usize, rng: &mut Rng) -> Tensor {
    if dtype == DType::Bool {
        return Tensor::bools(shape, &(0..count).map(|_| rng.bool()).collect::<Vec<_>>());
    }
    if dtype.is_int() {
        return Tensor::ints(dtype, shape, &integers(&DEFAULT_RANGE, count, rng));
    }
    Tensor::floats(dtype, shape, &draw.floats(count, rng))
}

/// What a mask lets through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pattern {
    /// N(0, 1): no mask at all, a bias.
    Noise,
    /// Everything.
    Open,
    /// For row i the columns up to position + i.
    Causal,
    /// The last quarter of those columns.
    Windowed,
    /// Causal, but every other row, from the first on, lets nothing through.
    Blanked,
    /// Nothing.
    Closed,
}

impl Pattern {
    /// The pattern of a step and what it adds to hidden columns. All of them in eight steps.
    fn of(draw: Draw, step: usize) -> (Pattern, f64) {
        use Pattern::*;
        const HIDE: f64 = -1e4;
        const BAR: f64 = f64::NEG_INFINITY;
        if draw == Draw::Masked {
            return (Closed, [BAR, HIDE][step % 2]);
        }
        const CYCLE: [(Pattern, f64); 8] = [
            (Causal, BAR),
            (Noise, HIDE),
            (Windowed, HIDE),
            (Blanked, HIDE),
            (Open, BAR),
            (Causal, HIDE),
            (Windowed, BAR),
            (Blanked, BAR),
        ];
        CYCLE[step % CYCLE.len()]
    }

    fn lets_through(self, row: i64, column: i64, position: i64, columns: i64) -> bool {
        let last = position.saturating_add(row);
        match self {
            Pattern::Noise | Pattern::Open => true,
            Pattern::Causal => column <= last,
            Pattern::Windowed => column <= last && column > last - (columns / 4).max(1),
            Pattern::Blanked => row % 2 == 1 && column <= last,
            Pattern::Closed => false,
        }
    }
}

/// A mask; true is let through where it is a bool. Without a position the last row sees every column.
fn mask(
    (pattern, hidden): (Pattern, f64),
    dtype: DType,
    shape: &[usize],
    count: usize,
    position: Option<i64>,
    rng: &mut Rng,
) -> Tensor {
    if pattern == Pattern::Noise {
        return noise(Draw::Normal, dtype, shape, count, rng);
    }
    let columns = shape.last().copied().unwrap_or(1).max(1);
    let rows = shape.iter().rev().nth(1).copied().unwrap_or(1).max(1);
    let position = position.unwrap_or(columns.saturating_sub(rows) as i64);
    let open = (0..count)
        .map(|i| pattern.lets_through((i / columns % rows) as i64, (i % columns) as i64, position, columns as i64));
    match dtype {
        DType::Bool => Tensor::bools(shape, &open.collect::<Vec<_>>()),
        _ => Tensor::floats(dtype, shape, &open.map(|o| if o { 0.0 } else { hidden }).collect::<Vec<_>>()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::equiv::graph::{Graph, ty};
    use crate::equiv::shapes::{cases, sizes};

    const BAR: f64 = f64::NEG_INFINITY;

    fn drawn(pattern: Pattern, shape: &[usize], position: Option<i64>) -> Vec<f64> {
        let count = shape.iter().product();
        mask((pattern, BAR), DType::F16, shape, count, position, &mut Rng::new(0)).to_f64s()
    }

    #[test]
    fn patterns() {
        assert_eq!(drawn(Pattern::Open, &[2, 2], None), [0.0; 4]);
        assert_eq!(drawn(Pattern::Causal, &[2, 4], Some(1)), [0.0, 0.0, BAR, BAR, 0.0, 0.0, 0.0, BAR]);
        assert_eq!(drawn(Pattern::Causal, &[1, 1, 2, 3], None), [0.0, 0.0, BAR, 0.0, 0.0, 0.0]);
        assert_eq!(drawn(Pattern::Windowed, &[1, 8], Some(4)), [BAR, BAR, BAR, 0.0, 0.0, BAR, BAR, BAR]);
        assert_eq!(drawn(Pattern::Blanked, &[2, 2], None), [BAR, BAR, 0.0, 0.0]);
        let bools = mask((Pattern::Causal, BAR), DType::Bool, &[2, 2], 4, None, &mut Rng::new(0));
        assert_eq!(bools.to_i64s(), [1, 0, 1, 1], "true is let through");
    }

    #[test]
    fn eight_steps_see_every_pattern_with_both_fills() {
        let seen: Vec<_> = (0..8).map(|step| Pattern::of(Draw::Normal, step)).collect();
        for pattern in [Pattern::Causal, Pattern::Windowed, Pattern::Blanked] {
            assert!(seen.contains(&(pattern, -1e4)) && seen.contains(&(pattern, BAR)), "{pattern:?}");
        }
        assert!([Pattern::Open, Pattern::Noise].iter().all(|p| seen.iter().any(|(q, _)| p == q)));
    }

    #[test]
    fn positions_are_first_middle_and_last_in_every_run_of_five_steps() {
        for shape in [&[][..], &[1]] {
            let mut g = Graph::new();
            let position = g.input("position", ty(DType::I32, shape));
            let at =
                g.op("reshape", "at", ty(DType::I32, &[1]), vec![("x", position.into()), ("shape", [1][..].into())]);
            let begin = vec![("values", vec![at.into(), [0][..].into()]), ("axis", vec![0.into()])];
            let begin = g.variadic("concat", "begin", ty(DType::I32, &[2]), begin);
            let [cache, row] = [("cache", [6, 4]), ("row", [2, 4])].map(|(n, s)| g.input(n, ty(DType::F16, &s)));
            let open = crate::ir::Literal::bools(&[true, true]);
            let args = vec![
                ("x", cache.into()),
                ("update", row.into()),
                ("begin", begin.into()),
                ("end", begin.into()),
                ("end_mask", open.into()),
            ];
            g.op("slice_update", "new", ty(DType::F16, &[6, 4]), args);
            let shapes = cases(&g.f, &BTreeMap::new()).unwrap().remove(0);
            let generator = Generator::new(&g.f, &sizes(&g.f, &shapes), &Options::default()).unwrap();
            let mut rng = Rng::new(7);
            let mut at = |step| {
                generator.inputs(Draw::Normal, &Values::new(), &shapes, step, &mut rng).unwrap()["position"].to_i64s()
                    [0]
            };
            let drawn: Vec<i64> = (0..45).map(&mut at).collect();
            for run in drawn.windows(5) {
                assert!([0, 2, 4].iter().all(|p| run.contains(p)), "{drawn:?}");
            }
            assert!(drawn.contains(&1) && drawn.contains(&3) && drawn.iter().all(|p| (0..5).contains(p)), "{drawn:?}");
        }
    }

    #[test]
    fn begin_and_end_of_a_window_agree() {
        let mut rng = Rng::new(0);
        for step in 0..20 {
            let place = Place::of(step, &mut rng);
            assert_eq!(place.within(&(0..30)) + 3, place.within(&(3..33)));
            assert_eq!(place.within(&(5..6)), 5);
        }
    }

    fn draw(g: &Graph, options: &Options, seed: u64) -> Result<Values, EquivError> {
        let shapes = cases(&g.f, &options.shapes).unwrap().remove(0);
        let generator = Generator::new(&g.f, &sizes(&g.f, &shapes), options)?;
        let mut rng = Rng::new(seed);
        let mut values = generator.inputs(options.draws[0], &Values::new(), &shapes, 0, &mut rng)?;
        values.extend(generator.states(options.draws[0], &mut rng)?);
        Ok(values)
    }

    #[test]
    fn every_input_and_state_is_drawn_in_its_type() {
        let mut g = Graph::new();
        g.input("x", ty(DType::F16, &[3, 500]));
        g.input("n", ty(DType::I32, &[100]));
        g.input("flag", ty(DType::Bool, &[64]));
        g.state("cache", ty(DType::F32, &[2, 500]));
        let values = draw(&g, &Options::default(), 1).unwrap();
        let types: Vec<_> = values.iter().map(|(n, t)| (n.as_str(), t.dtype(), t.shape().to_vec())).collect();
        let want = [
            ("cache", DType::F32, vec![2, 500]),
            ("flag", DType::Bool, vec![64]),
            ("n", DType::I32, vec![100]),
            ("x", DType::F16, vec![3, 500]),
        ];
        assert_eq!(types, want);
        assert!(values["n"].to_i64s().iter().all(|n| (0..8).contains(n)));
        assert!(values["x"].to_f64s().iter().any(|x| *x < -1.0) && values["cache"].to_f64s().iter().any(|x| *x > 1.0));
        assert_eq!(values["x"].to_f64s(), draw(&g, &Options::default(), 1).unwrap()["x"].to_f64s(), "same seed");
        assert_ne!(values["x"].to_f64s(), draw(&g, &Options::default(), 2).unwrap()["x"].to_f64s(), "other seed");
    }

    #[test]
    fn told_ranges_hold_and_senseless_ones_are_refused() {
        let mut g = Graph::new();
        g.input("n", ty(DType::I32, &[100]));
        g.input("x", ty(DType::F16, &[1]));
        let told = |name: &str, range| Options { ranges: [(name.into(), range)].into(), ..Options::default() };
        let values = draw(&g, &told("n", -3..-1), 0).unwrap();
        assert!(values["n"].to_i64s().iter().all(|n| (-3..-1).contains(n)));
        for options in [told("n", 4..4), told("x", 0..4)] {
            assert!(matches!(draw(&g, &options, 0), Err(EquivError::Input { .. })));
        }
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        let mut text = Graph::new();
        text.input("s", ty(DType::String, &[1]));
        let mut huge = Graph::new();
        huge.input("x", ty(DType::F16, &[1 << 40, 1 << 40]));
        let mut state = Graph::new();
        state.state("x", ty(DType::F16, &[1 << 40, 1 << 40]));
        for g in [text, huge, state] {
            assert!(matches!(draw(&g, &Options::default(), 0), Err(EquivError::Input { .. })));
        }
    }
}
