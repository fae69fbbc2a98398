//! `milopt run`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};

use super::npz::{self, Npz};
use super::progress::Spinner;
use super::{Failure, Opening, about, check_distinct, check_output, note, select};
use crate::interp::{Interpreter, Mode, Tensor, Values};
use crate::ir::{DType, Dim, Flexibility, Function, Literal, LiteralData, NoWeights, TensorType, ValueId};

/// Evaluate a function on arrays from an .npz file
///
/// Arrays are named as the features, or so with the prefix `in_`; `state_<name>` sets what a state starts with.
/// Arrays are cast to the type of the feature, of which they must hold values where that is an integer type, and may have any
/// shape that the input takes; [] and [1] are interchangeable. Other arrays are ignored, with
/// a note. Outputs are written under their own names, without a prefix. The input file may be compressed, as
/// numpy.savez_compressed does it.
#[derive(Debug, Args)]
pub(super) struct Run {
    /// The package
    #[arg(value_name = "PKG")]
    package: PathBuf,
    /// Inputs and starting states
    #[arg(long, value_name = "IN.npz")]
    inputs: PathBuf,
    /// Where to write the outputs
    #[arg(long, value_name = "OUT.npz")]
    outputs: PathBuf,
    /// Where to write the final states, as state_<name>
    #[arg(long, value_name = "OUT_STATES.npz")]
    states: Option<PathBuf>,
    /// The function, if not the default one
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// The leading axis of inputs and outputs counts steps; states carry over
    #[arg(long)]
    steps: bool,
    /// How floats are rounded; `exact` writes float64
    #[arg(long, value_enum, default_value = "storage")]
    mode: Rounding,
    #[command(flatten)]
    opening: Opening,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rounding {
    /// Every tensor to its declared type
    Storage,
    /// Not at all
    Exact,
}

impl Run {
    pub(super) fn execute(&self) -> Result<(), Failure> {
        let mode = match self.mode {
            Rounding::Storage => Mode::Storage,
            Rounding::Exact => Mode::Exact,
        };
        self.check_outputs()?;
        let package = self.opening.open(&self.package)?;
        let f = select(&package, self.function.as_deref())?;
        let mut arrays = Arrays { package: &self.package, npz: Npz::open(&self.inputs)?, used: BTreeSet::new() };
        let feeds = arrays.inputs(f, self.steps)?;
        let mut states = arrays.states(f)?;
        arrays.tell_unused();
        let steps = if self.steps { arrays.steps(&feeds)? } else { 1 };

        let interpreter = Interpreter::new(f, mode).map_err(|e| about(&self.package, e))?;
        let spinner = Spinner::new("running");
        let mut outputs: BTreeMap<String, Vec<Literal>> = BTreeMap::new();
        for step in 0..steps {
            spinner.say(format!("step {} of {steps}", step + 1));
            let inputs = at_step(&feeds, step).map_err(|e| about(&self.inputs, e))?;
            let (computed, new) = interpreter.advance(&inputs, states).map_err(|e| about(&self.package, e))?;
            states = new;
            for (name, tensor) in computed {
                match array(&tensor, mode) {
                    Some(array) => outputs.entry(name.to_string()).or_default().push(array),
                    None if step == 0 => spinner.note(&format!("output `{name}` is no array and is left out")),
                    None => {}
                }
            }
        }
        drop(spinner);
        let outputs = outputs.into_iter().map(|(name, steps)| {
            let array =
                if self.steps { stack(&name, &steps)? } else { steps.into_iter().next().unwrap_or(Literal::int(0)) };
            Ok((name, array))
        });
        let outputs = outputs.collect::<Result<_, String>>().map_err(|e| about(&self.package, e))?;
        npz::write(&self.outputs, &outputs)?;
        if let Some(path) = &self.states {
            let finals = states.iter().filter_map(|(name, t)| Some((format!("state_{name}"), array(t, mode)?)));
            npz::write(path, &finals.collect())?;
        }
        Ok(())
    }
}

impl Run {
    fn check_outputs(&self) -> Result<(), Failure> {
        let sources = [("PKG", Some(self.package.as_path())), ("--inputs", Some(self.inputs.as_path()))];
        check_distinct("--outputs", &self.outputs, &sources)?;
        check_output(&self.outputs)?;
        let Some(states) = &self.states else { return Ok(()) };
        check_distinct("--states", states, &sources)?;
        check_distinct("--states", states, &[("--outputs", Some(&self.outputs))])?;
        check_output(states)
    }
}

/// The arrays of the input file, and which of them a feature took.
struct Arrays<'r> {
    package: &'r Path,
    npz: Npz,
    used: BTreeSet<String>,
}

/// The inputs of each step and the starting states that an archive holds for a function; the same inputs for every step
/// unless they are `stepped`.
pub(super) fn given(
    package: &Path,
    inputs: &Path,
    f: &Function,
    stepped: bool,
) -> Result<(Vec<Values>, Values), Failure> {
    let mut arrays = Arrays { package, npz: Npz::open(inputs)?, used: BTreeSet::new() };
    let feeds = arrays.some_inputs(f, stepped)?;
    let states = arrays.states(f)?;
    arrays.tell_unused();
    let steps = if stepped { arrays.steps(&feeds)? } else { 1 };
    let given = (0..steps).map(|step| at_step(&feeds, step)).collect::<Result<_, _>>();
    Ok((given.map_err(|e| about(inputs, e))?, states))
}

/// What the inputs get at a step.
fn at_step(feeds: &[Feed], step: usize) -> Result<Values, String> {
    feeds.iter().map(|feed| Ok((feed.name.as_str().into(), feed.tensor(step)?))).collect()
}

/// What one input gets: the elements of every step, one after the other.
struct Feed {
    name: String,
    /// The array's name.
    array: String,
    /// Type that the function declares.
    dtype: DType,
    /// Type and shape of one step in the file.
    ty: TensorType,
    /// Number of steps; `None` when every step gets the same.
    steps: Option<usize>,
    bytes: Arc<[u8]>,
}

impl Arrays<'_> {
    fn inputs(&mut self, f: &Function, stepped: bool) -> Result<Vec<Feed>, Failure> {
        let inputs = f.inputs().iter().filter(|&&v| f.ty(v).as_state().is_none());
        inputs
            .map(|&v| {
                let name = f.value(v).name().as_str();
                let ty = f
                    .tensor(v)
                    .ok_or_else(|| about(self.package, format!("input `{name}` is not a tensor of known rank")))?;
                match self.feed(name, &[name.to_owned(), format!("in_{name}")], ty, stepped)? {
                    Some(feed) => match inadmissible(f, v, &feed.ty) {
                        Some(allowed) => Err(self.wrong(format!(
                            "array `{}` has shape {}, input `{name}` takes {allowed}",
                            feed.array,
                            shown(&feed.ty.known_shape().unwrap_or_default())
                        ))),
                        None => Ok(feed),
                    },
                    None => {
                        default_of(f, v, ty).ok_or_else(|| self.wrong(format!("there is no array for input `{name}`")))
                    }
                }
            })
            .collect()
    }

    /// The inputs that the file gives.
    fn some_inputs(&mut self, f: &Function, stepped: bool) -> Result<Vec<Feed>, Failure> {
        let mut feeds = Vec::new();
        for &v in f.inputs() {
            let (name, Some(ty), None) = (f.value(v).name(), f.tensor(v), f.ty(v).as_state()) else { continue };
            feeds.extend(self.feed(name, &[name.to_string(), format!("in_{name}")], ty, stepped)?);
        }
        Ok(feeds)
    }

    /// The starting states that the file gives; the others start at zero.
    fn states(&mut self, f: &Function) -> Result<Values, Failure> {
        let mut states = Values::new();
        for &v in f.inputs() {
            let (name, Some(ty)) = (f.value(v).name(), f.ty(v).as_state()) else { continue };
            if let Some(feed) = self.feed(name, &[format!("state_{name}")], ty, false)? {
                states.insert(name.clone(), feed.tensor(0).map_err(|e| self.wrong(e))?);
            }
        }
        Ok(states)
    }

    /// The first of the arrays called `candidates`, if its shape fits `ty`.
    fn feed(
        &mut self,
        name: &str,
        candidates: &[String],
        ty: &TensorType,
        stepped: bool,
    ) -> Result<Option<Feed>, Failure> {
        for candidate in candidates {
            let Some(header) = self.npz.header(candidate)? else { continue };
            let found = header.ty.known_shape().unwrap_or_default();
            let (steps, one) = match found.split_first() {
                Some((&steps, rest)) if stepped => (Some(steps as usize), rest),
                None if stepped => return Err(self.wrong(format!("array `{candidate}` has no axis of steps"))),
                _ => (None, &found[..]),
            };
            let shape = fit(one, ty).ok_or_else(|| {
                self.wrong(format!(
                    "array `{candidate}` of shape {found:?} does not fit {ty}{}",
                    match found.split_first() {
                        _ if stepped => " behind an axis of steps",
                        Some((_, rest)) if fit(rest, ty).is_some() => "; does its first axis count --steps?",
                        _ => "",
                    }
                ))
            })?;
            let Some(Literal { data: LiteralData::Bytes(bytes), .. }) = self.npz.read(candidate)? else { continue };
            self.used.insert(candidate.clone());
            let ty_of_step = TensorType::fixed(header.ty.dtype, &shape);
            let array = candidate.clone();
            return Ok(Some(Feed { name: name.into(), array, dtype: ty.dtype, ty: ty_of_step, steps, bytes }));
        }
        Ok(None)
    }

    /// The number of steps that all arrays agree on.
    fn steps(&self, feeds: &[Feed]) -> Result<usize, Failure> {
        let mut counts = feeds.iter().filter_map(|feed| Some((feed.array.as_str(), feed.steps?)));
        let Some((first, steps)) = counts.next() else {
            return Err(Failure::Usage("--steps needs an input array to count them by".into()));
        };
        match counts.find(|(_, n)| *n != steps) {
            Some((other, n)) => Err(self.wrong(format!("array `{first}` has {steps} steps, `{other}` has {n}"))),
            None if steps == 0 => Err(self.wrong(format!("array `{first}` has no steps"))),
            None => Ok(steps),
        }
    }

    fn wrong(&self, what: String) -> Failure {
        about(self.npz.path(), what)
    }

    fn tell_unused(&self) {
        let mut unused: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for name in self.npz.names().filter(|n| !self.used.contains(*n)) {
            unused.entry(self.why_unused(name)).or_default().push(name);
        }
        for (why, names) in unused {
            note(&format!("arrays {why} are ignored: {}", names.join(", ")));
        }
    }

    fn why_unused(&self, name: &str) -> &'static str {
        match name.strip_prefix("in_") {
            Some(input) if self.used.contains(input) => "that are there without `in_` as well",
            None if name.starts_with("state_") => "for states that do not exist",
            _ => "that are not inputs",
        }
    }
}

impl Feed {
    fn tensor(&self, step: usize) -> Result<Tensor, String> {
        let wrong = || format!("array `{}` of {} cannot become {}", self.array, self.ty, self.dtype);
        let len = self.ty.byte_len().and_then(|n| usize::try_from(n).ok()).ok_or_else(wrong)?;
        let start = self.steps.map_or(Some(0), |_| step.checked_mul(len)).ok_or_else(wrong)?;
        let bytes = self.bytes.get(start..).and_then(|b| b.get(..len)).ok_or_else(wrong)?;
        let given = Tensor::from_literal(&Literal::bytes(self.ty.clone(), bytes), &NoWeights).map_err(|_| wrong())?;
        let cast = given.cast(self.dtype).ok_or_else(wrong)?;
        match misfit(&given, &cast) {
            Some(value) => Err(format!("array `{}` holds {value}, which is no {}", self.array, self.dtype)),
            None => Ok(cast),
        }
    }
}

/// A number that an integer type does not hold, of those that were cast to it: too large, or no integer.
fn misfit(given: &Tensor, cast: &Tensor) -> Option<String> {
    let unsigned = |t: &Tensor| t.dtype() == DType::U64;
    if !cast.dtype().is_int() {
        return None;
    }
    if given.dtype().is_float() {
        let fits = |x: f64, y: f64| x == y && (y >= 0.0 || !unsigned(cast));
        let mut pairs = given.to_f64s().into_iter().zip(cast.to_f64s());
        return pairs.find(|&(x, y)| !fits(x, y)).map(|(x, _)| x.to_string());
    }
    // The sign bit of a uint64 is part of its value.
    let fits = |x: i64, y: i64| x == y && (x >= 0 || unsigned(given) == unsigned(cast));
    let mut pairs = given.to_i64s().into_iter().zip(cast.to_i64s());
    let (x, _) = pairs.find(|&(x, y)| !fits(x, y))?;
    Some(if unsigned(given) { (x as u64).to_string() } else { x.to_string() })
}

/// What an optional input takes when it is left out.
fn default_of(f: &Function, v: ValueId, ty: &TensorType) -> Option<Feed> {
    let name = f.value(v).name();
    let feature = f.interface().input(name).filter(|x| x.optional)?;
    let array = feature.array()?;
    let shape = fit(&array.shape, ty)?;
    let ty_of_step = TensorType::fixed(DType::F64, &shape);
    let count = usize::try_from(ty_of_step.volume()?).ok().filter(|&n| n <= 1 << 26)?;
    let bytes = array.default?.to_le_bytes().repeat(count).into();
    Some(Feed { name: name.to_string(), array: name.to_string(), dtype: ty.dtype, ty: ty_of_step, steps: None, bytes })
}

/// `shape` as the type wants it, where [] and [1] are the same; `None` when it does not fit.
fn fit(shape: &[u64], ty: &TensorType) -> Option<Vec<u64>> {
    let shape = match (shape, ty.rank()) {
        ([], 1) => &[1][..],
        ([1], 0) => &[],
        _ => shape,
    };
    let fits =
        shape.len() == ty.rank() && shape.iter().zip(&ty.shape).all(|(n, d)| d.as_known().is_none_or(|k| k == *n));
    fits.then(|| shape.to_vec())
}

/// What an input takes, in words, when that excludes a shape which fits its type.
fn inadmissible(f: &Function, v: ValueId, given: &TensorType) -> Option<String> {
    let given = given.known_shape()?.to_vec();
    let described = f.interface().input(f.value(v).name()).and_then(|x| x.array()).map(|array| &array.flexibility);
    if let Some(Flexibility::Enumerated(shapes)) = described {
        let listed = || shapes.iter().map(|s| shown(s)).collect::<Vec<_>>().join(" or ");
        return (!shapes.contains(&given)).then(listed);
    }
    let of_type = |d: &Dim| match (d.as_known(), d.symbols()) {
        (Some(n), _) => (n, Some(n)),
        (None, [one]) if d.coef() == 1 => (f.symbol_range(*one).lo, f.symbol_range(*one).hi),
        _ => (0, None),
    };
    let ranges: Vec<(u64, Option<u64>)> = match described {
        Some(Flexibility::Ranges(ranges)) if ranges.len() == given.len() => ranges.clone(),
        _ => f.tensor(v)?.shape.iter().map(of_type).collect(),
    };
    let fits = |(&n, &(lo, hi)): (&u64, &(u64, Option<u64>))| lo <= n && hi.is_none_or(|hi| n <= hi);
    let axis = |&(lo, hi): &(u64, Option<u64>)| match hi {
        Some(hi) if hi == lo => lo.to_string(),
        Some(hi) => format!("{lo} to {hi}"),
        None => format!("{lo} or more"),
    };
    let axes = || format!("[{}]", ranges.iter().map(axis).collect::<Vec<_>>().join(", "));
    (!given.iter().zip(&ranges).all(fits)).then(axes)
}

fn shown(shape: &[u64]) -> String {
    format!("{shape:?}")
}

/// The tensor in a type that numpy has; `None` for strings.
fn array(tensor: &Tensor, mode: Mode) -> Option<Literal> {
    let dtype = match tensor.dtype() {
        d if d.is_float() && mode == Mode::Exact => DType::F64,
        DType::BF16 | DType::F8E4M3FN | DType::F8E5M2 => DType::F32,
        DType::I4 => DType::I8,
        DType::U1 | DType::U2 | DType::U3 | DType::U4 | DType::U6 => DType::U8,
        d => d,
    };
    tensor.cast(dtype)?.to_literal()
}

/// The arrays of all steps behind an axis of steps.
fn stack(name: &str, steps: &[Literal]) -> Result<Literal, String> {
    let first = steps.first().and_then(|l| l.ty.as_tensor()).ok_or("no steps")?;
    let mut bytes = Vec::new();
    for step in steps {
        match &step.data {
            LiteralData::Bytes(b) if step.ty.as_tensor() == Some(first) => bytes.extend_from_slice(b),
            _ => return Err(format!("output `{name}` has shapes that differ between steps")),
        }
    }
    let shape = std::iter::once((steps.len() as u64).into()).chain(first.shape.iter().cloned());
    Ok(Literal::bytes(TensorType::new(first.dtype, shape), bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_fit_up_to_scalars() {
        let ty = |shape: &[u64]| TensorType::fixed(DType::F16, shape);
        assert_eq!(fit(&[2, 3], &ty(&[2, 3])), Some(vec![2, 3]));
        assert_eq!(fit(&[], &ty(&[1])), Some(vec![1]));
        assert_eq!(fit(&[1], &ty(&[])), Some(vec![]));
        assert_eq!(fit(&[], &ty(&[2])), None);
        assert_eq!(fit(&[1, 1], &ty(&[])), None);
        assert_eq!(fit(&[3, 2], &ty(&[2, 3])), None);
    }
}
