//! Rewriting and comparing in one go: a rewrite that makes the result wrong is found, and can be left out.

use std::fmt;

use serde::Serialize;

use super::{Divergence, EquivError, Exactness, Options, Report, Side, check};
use crate::ir::Program;
use crate::passes::{self, Fired, Pipeline, PipelineError, RunOptions};
use crate::rewrite::Site;

/// What to do about a rewrite with which the result is not equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnFailure {
    /// Name the first one, and leave the program as it was.
    #[default]
    Stop,
    /// Leave out that one alone, and do all others.
    Revert,
}

/// A pipeline's result and what a comparison with the original found.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct Proof {
    /// What the pipeline did.
    pub rewrites: passes::Report,
    /// What the comparison found.
    pub verification: Report,
    /// Rewrites to blame, in the order in which they were found.
    pub culprits: Vec<Culprit>,
}

/// The first rewrite with which a result was not equal.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[non_exhaustive]
pub struct Culprit {
    /// Where it was done.
    #[serde(flatten)]
    pub site: Site,
    /// How it was done.
    pub form: String,
    /// How many rewrites led up to it, itself included.
    pub number: usize,
    /// What the comparison says: where the programs part, or why the result could not be run.
    pub finding: String,
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}), rewrite {}: {}", self.site, self.form, self.number, self.finding)
    }
}

impl Proof {
    /// Whether the result is as equal as its passes promise.
    pub fn holds(&self) -> bool {
        self.verification.satisfies(wanted(&self.rewrites))
    }
}

/// Why there is no proof.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProofError {
    /// The pipeline could not be run.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// The programs could not be compared.
    #[error(transparent)]
    Compare(#[from] EquivError),
    /// The result of a rewrite cannot be run.
    #[error("{culprit}")]
    Unrunnable {
        /// The rewrite.
        culprit: Box<Culprit>,
        /// What went wrong.
        #[source]
        source: EquivError,
    },
}

/// Runs a pipeline on a program and compares the result with the program as it was: to the bit if the passes that did
/// something promise that, else up to the order of sums.
///
/// Where the result is not equal, the pipeline is run again up to fewer rewrites, to find by bisection the first with
/// which it is not. With [`OnFailure::Revert`] that one is left out and all is done again, until the result is equal. The
/// program is changed only when it is.
///
/// # Errors
/// [`ProofError`]; the program is as it was.
pub fn prove(
    program: &mut Program,
    pipeline: &Pipeline,
    run: &RunOptions,
    options: &Options,
    on_failure: OnFailure,
) -> Result<Proof, ProofError> {
    let original = program.clone();
    let mut trial = Trial { original: &original, pipeline, run: run.clone(), options };
    let mut culprits: Vec<Culprit> = Vec::new();
    loop {
        let attempt = trial.attempt(trial.run.stop_after)?;
        let culprit = match attempt.holds() {
            true => None,
            false => trial.culprit(&attempt)?,
        };
        let known = culprit.as_ref().is_some_and(|c| culprits.iter().any(|d| d.site == c.site));
        match (culprit, on_failure) {
            (Some(culprit), OnFailure::Revert) if !known => {
                trial.run = trial.run.without(culprit.site.clone());
                culprits.push(culprit);
            }
            (culprit, _) => {
                culprits.extend(culprit);
                return attempt.finish(program, culprits);
            }
        }
    }
}

struct Trial<'p> {
    original: &'p Program,
    pipeline: &'p Pipeline,
    run: RunOptions,
    options: &'p Options,
}

/// A run of the pipeline, and what came of it.
struct Attempt {
    program: Program,
    rewrites: passes::Report,
    verification: Result<Report, EquivError>,
}

impl Attempt {
    fn holds(&self) -> bool {
        self.verification.as_ref().is_ok_and(|report| report.satisfies(wanted(&self.rewrites)))
    }

    fn finding(&self) -> String {
        match &self.verification {
            Ok(report) => report.first_divergence().map_or_else(|| "not equal".into(), Divergence::to_string),
            Err(e) => std::iter::successors(Some(e as &dyn std::error::Error), |e| e.source())
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(": "),
        }
    }

    fn finish(self, program: &mut Program, mut culprits: Vec<Culprit>) -> Result<Proof, ProofError> {
        let holds = self.holds();
        match (self.verification, culprits.pop()) {
            (Err(source), Some(culprit)) => Err(ProofError::Unrunnable { culprit: Box::new(culprit), source }),
            (Err(e), None) => Err(e.into()),
            (Ok(verification), last) => {
                culprits.extend(last);
                if holds {
                    *program = self.program;
                }
                Ok(Proof { rewrites: self.rewrites, verification, culprits })
            }
        }
    }
}

impl Trial<'_> {
    /// Runs the pipeline up to so many rewrites, and compares.
    fn attempt(&self, stop_after: Option<usize>) -> Result<Attempt, ProofError> {
        let mut program = self.original.clone();
        let rewrites = self.pipeline.run(&mut program, &RunOptions { stop_after, ..self.run.clone() })?;
        let options = Options { interface: rewrites.interfaces(), ..self.options.clone() };
        let verification = check(self.original, &program, self.run.function.as_deref(), &options);
        match verification {
            // What cannot be compared at all is nobody's fault; what runs no longer is.
            Err(e) if !matches!(e, EquivError::Run { program: Side::Second, .. }) => Err(e.into()),
            verification => Ok(Attempt { program, rewrites, verification }),
        }
    }

    /// The rewrite that is the first with which the result is not equal; `None` when the original is not equal to itself.
    fn culprit(&self, failed: &Attempt) -> Result<Option<Culprit>, ProofError> {
        let total = count(&failed.rewrites);
        // A rewrite may be counted that was not done in the end.
        let limit = self.run.stop_after.unwrap_or(usize::MAX);
        let mut bad = (total.min(limit), self.attempt(Some(total.min(limit)))?);
        while bad.1.holds() && bad.0 < limit && count(&bad.1.rewrites) < total {
            let next = bad.0.saturating_mul(2).min(limit);
            bad = (next, self.attempt(Some(next))?);
        }
        let mut good = (0, self.attempt(Some(0))?);
        if bad.1.holds() || !good.1.holds() {
            return Ok(None);
        }
        while bad.0 - good.0 > 1 {
            let middle = good.0 + (bad.0 - good.0) / 2;
            let attempt = self.attempt(Some(middle))?;
            match attempt.holds() {
                true => good = (middle, attempt),
                false => bad = (middle, attempt),
            }
        }
        Ok(added(&good.1.rewrites, &bad.1.rewrites).map(|(site, fired)| Culprit {
            site,
            form: fired.form.clone(),
            number: bad.0,
            finding: bad.1.finding(),
        }))
    }
}

fn count(report: &passes::Report) -> usize {
    report.functions.iter().flat_map(|f| &f.passes).map(|p| p.fired.len()).sum()
}

/// The rewrite that the second report has and the first lacks.
fn added<'r>(before: &passes::Report, after: &'r passes::Report) -> Option<(Site, &'r Fired)> {
    before.functions.iter().zip(&after.functions).find_map(|(f, g)| {
        f.passes.iter().zip(&g.passes).find_map(|(p, q)| {
            let fired = q.fired.get(p.fired.len())?;
            let site = Site { function: g.function.as_str().into(), pass: q.pass.clone(), op: fired.op.clone() };
            Some((site, fired))
        })
    })
}

/// How equal a result has to be.
fn wanted(rewrites: &passes::Report) -> Exactness {
    match rewrites.exactness() {
        passes::Exactness::Bitwise => Exactness::Bitwise,
        passes::Exactness::Reassociated => Exactness::Reassociated,
    }
}
