//! Comparing only what differs: each rewritten neighbourhood is cut out of both functions and compared on its own.
//!
//! 1. [`diff`] pairs the ops that are the same in both functions: same kind, same operands by name and type, same
//!    constants, same result names and types. What has no pair is *changed*.
//! 2. [`region`] groups changed ops that hang together into regions, and finds for each the values it reads from outside
//!    and those that the rest reads of it.
//! 3. [`cut`] makes a function of each side of a region. What is read from outside becomes an input; so do the weights
//!    that both sides share, whose content is never read.
//! 4. The two functions are compared as whole functions are.
//!
//! If every region gives equal results for equal inputs, the functions do: unpaired ops are all inside regions, and paired
//! ops compute the same from the same. What this cannot see is a rewrite that is right only for the values that the rest
//! of the function lets through: it is reported as a difference. Integers, bools, what follows from them alone, and
//! views of what else a region reads are computed from where they come from rather than drawn, so that positions, sizes and
//! masks keep the relations that rewrites rely on.
//!
//! A pass may leave a name to a value that it makes something else, where all that reads it is right again further on. A
//! region that differs is therefore made wider by what reads the values that differ, as long as those ops have no weights.
//!
//! Regions that are equal but for names, as those of the layers of a model, are compared once.

mod cut;
mod diff;
mod region;

use std::collections::{BTreeMap, HashMap};

use super::interface::Changes;
use super::report::{FunctionReport, RegionReport, Verdict};
use super::shapes::{self, Shapes};
use super::uses::Sizes;
use super::{EquivError, Options, run};
use crate::analysis::values;
use crate::ir::{Dim, Function, Id, LiteralData, Name, TensorType, ValueId, ValueType};
use crate::rewrite::InterfaceChange;
use cut::Halves;
use diff::Diff;
use region::Region;

/// Compares two functions region by region.
pub(super) fn compare(a: &Function, b: &Function, options: &Options) -> Result<FunctionReport, EquivError> {
    let told = shapes::told(a, options);
    let cases = shapes::cases(a, &told).map_err(|(input, reason)| EquivError::Input {
        function: a.name().clone(),
        input,
        reason,
    })?;
    let mut report = FunctionReport::of_regions(a.name().clone(), options.steps);
    for (i, shapes) in cases.iter().enumerate() {
        match compare_at(a, b, shapes, options) {
            Ok(found) => report.add_regions(found),
            Err(e) if i == 0 => return Err(e),
            Err(_) => report.notes.push(format!("not run with {}", shapes::unusual(shapes, &cases[0]))),
        }
    }
    Ok(report)
}

/// What was found for one set of input shapes.
pub(super) struct Found {
    pub(super) regions: Vec<RegionReport>,
    pub(super) unchanged: usize,
}

fn compare_at(a: &Function, b: &Function, shapes: &Shapes, options: &Options) -> Result<Found, EquivError> {
    let sizes = shapes::sizes(a, shapes);
    let (a, b) = (pinned(a, shapes, &sizes), pinned(b, shapes, &sizes));
    let list = options.interface.get(a.name()).map_or(&[][..], Vec::as_slice);
    let unread = |source| EquivError::Weights { function: a.name().clone(), source };
    let mut diff = Diff::of(&a, &b).map_err(unread)?;
    let mut known: HashMap<String, RegionReport> = HashMap::new();
    let mut regions = compare_all(&diff, list, options, &mut known)?;
    for _ in 0..MAX_WIDENINGS {
        let differing = regions.iter().filter(|r| r.verdict == Verdict::Different).flat_map(RegionReport::differing);
        if !diff.part_readers(&differing.cloned().collect()) {
            break;
        }
        regions = compare_all(&diff, list, options, &mut known)?;
    }
    Ok(Found { regions, unchanged: diff.paired() })
}

/// How often a region that differs is made wider.
const MAX_WIDENINGS: usize = 16;

/// Compares all regions, those of a known form no more.
fn compare_all(
    diff: &Diff<'_>,
    list: &[InterfaceChange],
    options: &Options,
    known: &mut HashMap<String, RegionReport>,
) -> Result<Vec<RegionReport>, EquivError> {
    let mut regions: Vec<RegionReport> = Vec::new();
    let mut listed: HashMap<String, usize> = HashMap::new();
    for region in Region::all(diff, list) {
        let halves = Halves::of(diff, &region);
        let changes: Vec<InterfaceChange> = list.iter().filter(|c| region.concerns(c)).cloned().collect();
        // What a change of the interface says is about these names.
        let form = halves.form(options) + &format!("{changes:?}");
        if let Some(&same) = listed.get(&form) {
            regions[same].count += 1;
            continue;
        }
        let report = match known.get(&form) {
            Some(report) => report.clone(),
            None => compare_region(&halves, &region, diff, changes, options)?,
        };
        known.insert(form.clone(), report.clone());
        listed.insert(form, regions.len());
        regions.push(report);
    }
    Ok(regions)
}

fn compare_region(
    halves: &Halves,
    region: &Region,
    diff: &Diff<'_>,
    changes: Vec<InterfaceChange>,
    options: &Options,
) -> Result<RegionReport, EquivError> {
    let own = Options {
        // Sizes are known by now.
        shapes: BTreeMap::new(),
        interface: BTreeMap::from([(halves.a.name().clone(), changes)]),
        ..options.clone()
    };
    let list = own.interface.get(halves.a.name()).map_or(&[][..], Vec::as_slice);
    let changes = Changes::between(&halves.a, &halves.b, list)?;
    let report = run::compare(&halves.a, &halves.b, &changes, &own)?;
    Ok(RegionReport {
        before: region.describe_first(diff),
        after: region.describe_second(diff),
        count: 1,
        verdict: report.verdict,
        outputs: report.outputs,
        states: report.states,
        first_divergence: report.first_divergence,
        notes: report.notes,
    })
}

/// The function for these input shapes: every size that follows from them is known.
fn pinned(f: &Function, shapes: &Shapes, sizes: &Sizes) -> Function {
    let mut f = f.clone();
    for i in 0..f.value_capacity() {
        let v = ValueId::new(i);
        let pin = |ty: &TensorType| {
            let dim = |d: &Dim| sizes.of(d).and_then(|n| u64::try_from(n).ok()).map_or_else(|| d.clone(), Dim::known);
            TensorType::new(ty.dtype, ty.shape.iter().map(dim))
        };
        let ty = match f.ty(v) {
            ValueType::Tensor(ty) if ty.known_shape().is_none() => pin(ty),
            _ => continue,
        };
        f.refine_type(v, ty.into());
    }
    for (name, shape) in shapes {
        let input = f.input(name).and_then(|v| Some((v, f.tensor(v)?.dtype)));
        if let Some((v, dtype)) = input {
            let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
            f.refine_type(v, TensorType::fixed(dtype, &shape).into());
        }
    }
    values::resolve(&mut f);
    f
}

/// Bytes of weights that a function refers to, each blob once.
pub(super) fn weight_bytes(f: &Function) -> u64 {
    let mut blobs: BTreeMap<(Name, u64), u64> = BTreeMap::new();
    diff::for_each_literal(f, |literal| {
        if let (LiteralData::Blob(blob), Some(ty)) = (&literal.data, literal.ty.as_tensor()) {
            blobs.insert((blob.file.as_ref().into(), blob.offset), ty.byte_len().unwrap_or(0));
        }
    });
    blobs.values().fold(0, |sum, n| sum.saturating_add(*n))
}

impl RegionReport {
    /// The values it gives to the rest that differ.
    fn differing(&self) -> impl Iterator<Item = &Name> {
        self.outputs.iter().filter(|t| t.verdict == Verdict::Different).map(|t| &t.name)
    }
}

impl FunctionReport {
    fn of_regions(name: Name, steps: usize) -> FunctionReport {
        FunctionReport {
            name,
            verdict: Verdict::Bitwise,
            steps,
            outputs: Vec::new(),
            states: Vec::new(),
            local: true,
            regions: Vec::new(),
            unchanged: 0,
            first_divergence: None,
            notes: Vec::new(),
        }
    }

    fn add_regions(&mut self, found: Found) {
        self.unchanged = found.unchanged;
        for region in found.regions {
            self.verdict = self.verdict.max(region.verdict);
            let worst = region.verdict == self.verdict;
            if let Some(d) = region.first_divergence.as_ref().filter(|_| worst && self.first_divergence.is_none()) {
                self.first_divergence = Some(d.clone());
            }
            self.regions.push(region);
        }
    }
}

#[cfg(test)]
mod tests;
