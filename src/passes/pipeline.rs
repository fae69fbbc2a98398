//! Passes in order.

use std::fmt;

use crate::analysis::state::{Breach, EmissionRule, breaches};
use crate::ir::{Function, Program};
use crate::rewrite::{Budget, Keeps, NoMatch, Outcome, Site};
use crate::verify::{self, Violations};

use super::{
    Census, Dce, Exactness, FunctionReport, GqaFold, KvDefer, KvForward, KvMerge, KvReadonly, KvSlices, KvUnify,
    Lowering, Masks, PassReport, Report, ViewSimplify,
};

/// A transformation of one function.
pub trait Pass: std::fmt::Debug + Send + Sync {
    /// The word that names it in a pipeline.
    fn name(&self) -> &'static str;
    /// What it promises.
    fn exactness(&self) -> Exactness;
    /// Whether it may change inputs, outputs or states; each change is then in the [`Outcome`], and says how the results
    /// are found again.
    fn changes_interface(&self) -> bool {
        false
    }
    /// Changes the function through [`crate::rewrite`]; at most as many rewrites as the budget has left.
    fn run(&self, f: &mut Function, budget: &mut Budget) -> Outcome;
    /// Changes several functions of one program, an outcome for each; for passes that touch what functions share. `others`
    /// are the functions of the program that must stay as they are. By itself, it runs on one after the other.
    fn run_all(&self, functions: &mut [&mut Function], others: &[&Function], budget: &mut Budget) -> Vec<Outcome> {
        let _ = others;
        functions.iter_mut().map(|f| self.run(f, budget)).collect()
    }
}

/// A pass that comes with the crate.
#[derive(Debug)]
#[non_exhaustive]
pub struct PassInfo {
    /// The word that names it in a pipeline.
    pub name: &'static str,
    /// What it does, in a sentence.
    pub summary: &'static str,
    /// What it promises.
    pub exactness: Exactness,
    /// Whether it is in the default pipeline.
    pub default: bool,
    /// What can be chosen, as `name:option=value` in a pipeline.
    pub options: &'static [PassOption],
    /// Its documentation.
    pub help: &'static str,
    make: fn(&Choices) -> Box<dyn Pass>,
}

/// A choice that a pass offers.
#[derive(Debug)]
pub struct PassOption {
    /// Its name.
    pub name: &'static str,
    /// The values it can have; the first is the default.
    pub values: &'static [&'static str],
    /// What it decides, in a sentence.
    pub summary: &'static str,
}

/// The values chosen for the options of a pass.
struct Choices(Vec<(&'static str, &'static str)>);

impl Choices {
    fn defaults(options: &'static [PassOption]) -> Choices {
        Choices(options.iter().map(|o| (o.name, o.values[0])).collect())
    }

    fn is(&self, option: &str, value: &str) -> bool {
        self.0.contains(&(option, value))
    }
}

/// The passes of the crate. The default pipeline is those marked so, in this order.
pub fn all() -> &'static [PassInfo] {
    &[
        // First: it leaves views around each product for the next pass to shorten.
        PassInfo {
            name: "gqa-fold",
            summary: "multiply by the KV heads that exist instead of by copies of them",
            exactness: Exactness::Bitwise,
            default: true,
            options: &[
                PassOption {
                    name: "lowering",
                    values: &["auto", "rows", "batch-axes"],
                    summary: "how folds are expressed",
                },
                PassOption {
                    name: "masks",
                    values: &["keep", "tile"],
                    summary: "whether a mask with rows of its own stays in head layout or is tiled",
                },
            ],
            help: include_str!("gqa_fold.rs"),
            make: |choices| {
                Box::new(GqaFold {
                    lowering: match () {
                        _ if choices.is("lowering", "rows") => Lowering::Rows,
                        _ if choices.is("lowering", "batch-axes") => Lowering::BatchAxes,
                        _ => Lowering::Auto,
                    },
                    masks: if choices.is("masks", "tile") { Masks::Tile } else { Masks::Keep },
                })
            },
        },
        // After folding: its reshapes meet those of the model.
        PassInfo {
            name: "view-simplify",
            summary: "spell every chain of views in the shortest way",
            exactness: Exactness::Bitwise,
            default: true,
            options: &[],
            help: include_str!("view_simplify.rs"),
            make: |_| Box::new(ViewSimplify),
        },
        // Before the passes that look at `slice_update`s.
        PassInfo {
            name: "kv-slices",
            summary: "write rows of a cache as rows, where they are blended in or scattered",
            exactness: Exactness::Bitwise,
            default: false,
            options: &[],
            help: include_str!("kv_slices.rs"),
            make: |_| Box::new(KvSlices),
        },
        // After folding, so that there are no copies to make of new entries.
        PassInfo {
            name: "kv-defer",
            summary: "let attention read the cache as it was and the new entries from where they come from",
            exactness: Exactness::Reassociated,
            default: false,
            options: &[PassOption {
                name: "stale",
                values: &["finite", "infinite"],
                summary: "the term that hides rows which this run replaces",
            }],
            help: include_str!("kv_defer.rs"),
            make: |choices| Box::new(KvDefer { infinite: choices.is("stale", "infinite") }),
        },
        // Before merging: a read less may be what stands between two writes.
        PassInfo {
            name: "kv-forward",
            summary: "read a state no more often than its content changes for the reader",
            exactness: Exactness::Bitwise,
            default: true,
            options: &[],
            help: include_str!("kv_forward.rs"),
            make: |_| Box::new(KvForward),
        },
        // Before writes are merged: it makes one state of those that they go to.
        PassInfo {
            name: "kv-unify",
            summary: "make one state of several states of equal type",
            exactness: Exactness::Bitwise,
            default: false,
            options: &[],
            help: include_str!("kv_unify.rs"),
            make: |_| Box::new(KvUnify),
        },
        PassInfo {
            name: "kv-merge",
            summary: "write neighbouring boxes of a state at once",
            exactness: Exactness::Bitwise,
            default: true,
            options: &[PassOption {
                name: "boxes",
                values: &["adjacent", "strided"],
                summary: "whether boxes at equal distances become one strided box, too",
            }],
            help: include_str!("kv_merge.rs"),
            make: |choices| Box::new(KvMerge { strided: choices.is("boxes", "strided") }),
        },
        // After deferring and merging: it takes states that are written once, at the end.
        PassInfo {
            name: "kv-readonly",
            summary: "let the caller write the cache, and hand out what it is to write",
            exactness: Exactness::Bitwise,
            default: false,
            options: &[],
            help: include_str!("kv_readonly.rs"),
            make: |_| Box::new(KvReadonly),
        },
        // Last: what the others left unread, constants above all.
        PassInfo {
            name: "dce",
            summary: "erase ops that nothing reads",
            exactness: Exactness::Bitwise,
            default: true,
            options: &[],
            help: include_str!("dce.rs"),
            make: |_| Box::new(Dce),
        },
    ]
}

impl PassInfo {
    /// The pass with its default options.
    pub fn build(&self) -> Box<dyn Pass> {
        (self.make)(&Choices::defaults(self.options))
    }

    /// Whether it changes inputs, outputs or states.
    pub fn changes_interface(&self) -> bool {
        self.build().changes_interface()
    }

    /// The pass with options such as `lowering=rows`.
    fn with(&self, options: &[&str]) -> Result<Box<dyn Pass>, PipelineError> {
        let mut choices = Choices::defaults(self.options);
        for text in options {
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            let option = self.options.iter().zip(&mut choices.0).find(|(o, _)| o.name == name);
            let known = option.and_then(|(o, choice)| Some((choice, o.values.iter().find(|&&v| v == value)?)));
            let Some((choice, value)) = known else {
                return Err(PipelineError::UnknownOption {
                    pass: self.name,
                    option: text.to_string(),
                    known: self.options.iter().map(PassOption::to_string).collect::<Vec<_>>().join(", "),
                });
            };
            choice.1 = value;
        }
        Ok((self.make)(&choices))
    }

    /// The module documentation of the pass: pseudo-MIL before and after, exactness, refusals.
    pub fn documentation(&self) -> String {
        self.help
            .lines()
            .take_while(|l| l.starts_with("//!"))
            .map(|l| l.trim_start_matches("//!").strip_prefix(' ').unwrap_or("").to_string() + "\n")
            .collect()
    }
}

impl fmt::Display for PassOption {
    /// `name=value|value`, the default first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.values.join("|"))
    }
}

/// Why a pipeline could not be built or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// No pass has this name.
    #[error("there is no pass `{name}`; there are {known}")]
    UnknownPass {
        /// The name.
        name: String,
        /// The passes there are.
        known: String,
    },
    /// A pass has no such option, or the option no such value.
    #[error("pass `{pass}` has no option `{option}`{}", if known.is_empty() { String::new() } else { format!("; there are {known}") })]
    UnknownOption {
        /// The pass.
        pass: &'static str,
        /// What was asked for.
        option: String,
        /// The options there are.
        known: String,
    },
    /// The program has no such function.
    #[error("there is no function `{name}`; there are {known}")]
    UnknownFunction {
        /// The name.
        name: String,
        /// The functions there are.
        known: String,
    },
    /// A function is not well-formed to begin with, and is not rewritten.
    #[error("function `{function}` is not well-formed")]
    Malformed {
        /// The function.
        function: String,
        /// What is wrong.
        source: Violations,
    },
    /// A pass left a function that is not well-formed.
    #[error("after pass `{pass}`, function `{function}` is not well-formed")]
    Broken {
        /// The pass.
        pass: String,
        /// The function.
        function: String,
        /// What is wrong.
        source: Violations,
    },
}

/// How to run a pipeline.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RunOptions {
    /// Only this function; every one when `None`.
    pub function: Option<String>,
    /// Stop after this many rewrites, over all passes and functions.
    pub stop_after: Option<usize>,
    /// Do no rewrite at these sites.
    pub without: Vec<Site>,
}

impl RunOptions {
    /// Only this function.
    pub fn only(mut self, function: impl Into<String>) -> RunOptions {
        self.function = Some(function.into());
        self
    }
    /// Stop after this many rewrites.
    pub fn stop_after(mut self, rewrites: usize) -> RunOptions {
        self.stop_after = Some(rewrites);
        self
    }
    /// Do no rewrite at this site.
    pub fn without(mut self, site: Site) -> RunOptions {
        self.without.push(site);
        self
    }
}

/// A pipeline that comes with the crate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Preset {
    /// The default pipeline: every bit and the interface stay.
    #[default]
    O1,
    /// Attention also reads the cache as it was, and one write at the end takes the place of one a layer.
    O2,
    /// As [`Preset::O2`], and the caches become inputs that the caller writes.
    ReadOnly,
}

/// The passes of [`Preset::O2`].
const O2: &[&str] = &["gqa-fold", "view-simplify", "kv-defer", "kv-forward", "kv-merge", "dce"];
/// The passes of [`Preset::ReadOnly`].
const READ_ONLY: &[&str] = &["gqa-fold", "view-simplify", "kv-defer", "kv-forward", "kv-merge", "kv-readonly", "dce"];

impl Preset {
    /// Its passes, in order.
    pub fn passes(self) -> Vec<&'static PassInfo> {
        let named = |names: &[&str]| names.iter().filter_map(|n| all().iter().find(|p| p.name == *n)).collect();
        match self {
            Preset::O1 => all().iter().filter(|p| p.default).collect(),
            Preset::O2 => named(O2),
            Preset::ReadOnly => named(READ_ONLY),
        }
    }
}

/// How often the passes are run at most; each round but the last one did something.
const MAX_ROUNDS: usize = 8;

/// Passes in order, repeated until none of them finds anything to do: one may open what another can finish.
#[derive(Debug)]
pub struct Pipeline {
    passes: Vec<Box<dyn Pass>>,
}

impl Default for Pipeline {
    /// The passes that keep every bit and the interface.
    fn default() -> Pipeline {
        Pipeline::preset(Preset::default())
    }
}

impl Pipeline {
    /// Passes of one's own, or a mixture.
    pub fn new(passes: Vec<Box<dyn Pass>>) -> Pipeline {
        Pipeline { passes }
    }

    /// The passes of a preset, with their default options.
    pub fn preset(preset: Preset) -> Pipeline {
        Pipeline { passes: preset.passes().into_iter().map(PassInfo::build).collect() }
    }

    /// A pipeline from text: names separated by commas, each followed by the options that are not the default ones, as in
    /// `gqa-fold:lowering=rows:masks=tile,dce`. The empty text is the empty pipeline.
    ///
    /// # Errors
    /// [`PipelineError::UnknownPass`] and [`PipelineError::UnknownOption`].
    pub fn parse(text: &str) -> Result<Pipeline, PipelineError> {
        let names = text.split(',').map(str::trim).filter(|n| !n.is_empty());
        let passes = names
            .map(|text| {
                let mut parts = text.split(':').map(str::trim);
                let name = parts.next().unwrap_or(text);
                let info = all().iter().find(|p| p.name == name).ok_or_else(|| PipelineError::UnknownPass {
                    name: name.into(),
                    known: all().iter().map(|p| p.name).collect::<Vec<_>>().join(", "),
                })?;
                info.with(&parts.collect::<Vec<_>>())
            })
            .collect::<Result<_, _>>()?;
        Ok(Pipeline { passes })
    }

    /// The passes.
    pub fn passes(&self) -> &[Box<dyn Pass>] {
        &self.passes
    }

    /// Runs the passes on every function, or on the one the options name, and checks the function after each.
    ///
    /// # Errors
    /// [`PipelineError`]; after [`PipelineError::Broken`] the program is not to be used.
    pub fn run(&self, program: &mut Program, options: &RunOptions) -> Result<Report, PipelineError> {
        let mut budget = Budget::new(options.stop_after, &options.without);
        if let Some(name) = options.function.as_deref().filter(|n| program.function(n).is_none()) {
            return Err(PipelineError::UnknownFunction {
                name: name.into(),
                known: program.functions().iter().map(|f| f.name().as_str()).collect::<Vec<_>>().join(", "),
            });
        }
        let (selected, others): (Vec<&mut Function>, Vec<&mut Function>) = program
            .functions_mut()
            .iter_mut()
            .partition(|f| options.function.as_deref().is_none_or(|name| f.name() == name));
        self.run_on(selected, &others.into_iter().map(|f| &*f).collect::<Vec<_>>(), &mut budget)
    }

    fn run_on(
        &self,
        mut functions: Vec<&mut Function>,
        others: &[&Function],
        budget: &mut Budget,
    ) -> Result<Report, PipelineError> {
        let mut reports = functions.iter_mut().map(|f| self.begin(f)).collect::<Result<Vec<_>, _>>()?;
        for round in 0..MAX_ROUNDS {
            let mut fired = false;
            for (i, pass) in self.passes.iter().enumerate() {
                let outcomes = run_within_rules(&**pass, &mut functions, others, budget);
                for ((f, report), outcome) in functions.iter().zip(&mut reports).zip(outcomes) {
                    verify::function(f).map_err(|source| {
                        let (pass, function) = (pass.name().into(), f.name().to_string());
                        PipelineError::Broken { pass, function, source }
                    })?;
                    fired |= !outcome.fired.is_empty();
                    report.interface.extend(outcome.interface.iter().cloned());
                    report.passes[i].add(outcome, round == 0);
                }
            }
            if !fired || budget.is_spent() {
                break;
            }
        }
        for (f, report) in functions.iter().zip(&mut reports) {
            report.passes.iter_mut().for_each(|pass| pass.settle(f));
            report.after = Census::of(f);
        }
        Ok(Report { functions: reports })
    }

    /// Checks that a function can be rewritten and counts what it is made of.
    fn begin(&self, f: &mut Function) -> Result<FunctionReport, PipelineError> {
        if !self.passes.is_empty() {
            verify::rewritable(f)
                .map_err(|source| PipelineError::Malformed { function: f.name().to_string(), source })?;
        }
        crate::analysis::values::resolve(f);
        let before = Census::of(f);
        let passes = self.passes.iter().map(|pass| PassReport::of(&**pass)).collect();
        Ok(FunctionReport { function: f.name().to_string(), after: before.clone(), before, passes, interface: vec![] })
    }
}

/// Runs a pass. It may leave a rule for states broken and break none: else what it did is undone, and told as declined.
fn run_within_rules(
    pass: &dyn Pass,
    functions: &mut [&mut Function],
    others: &[&Function],
    budget: &mut Budget,
) -> Vec<Outcome> {
    let before: Vec<Function> = functions.iter().map(|f| (**f).clone()).collect();
    let unspent = budget.clone();
    let outcomes = pass.run_all(functions, others, budget.for_pass(pass.name()));
    let broken: Vec<Vec<Breach>> = functions
        .iter()
        .zip(&before)
        .zip(&outcomes)
        .map(|((f, before), outcome)| if outcome.fired.is_empty() { vec![] } else { new_breaches(f, before) })
        .collect();
    if broken.iter().all(Vec::is_empty) {
        return outcomes;
    }
    *budget = unspent;
    let undo = |((f, before), (outcome, broken)): ((&mut &mut Function, Function), (Outcome, Vec<Breach>))| {
        let mut left = Outcome { declined: outcome.declined, ..Outcome::default() };
        let why = broken.iter().map(|b| b.describe(f)).collect::<Vec<_>>().join("; ");
        **f = before;
        if !broken.is_empty() {
            let no = NoMatch::because(format!("the result would break a rule for states: {why}"));
            left.decline(no.keeping(Keeps::StateOps).declined(f.name().as_str()));
        }
        left
    };
    functions.iter_mut().zip(before).zip(outcomes.into_iter().zip(broken)).map(undo).collect()
}

/// The rules that a function breaks and did not before. Several writes that were outputs' descendants may become one.
fn new_breaches(f: &Function, before: &Function) -> Vec<Breach> {
    let (old, new) = (breaches(before), breaches(f));
    let returned = |all: &[Breach]| all.iter().filter(|b| b.rule == EmissionRule::NotReturned).count();
    let fewer = returned(&new) <= returned(&old);
    let excused = |b: &Breach| old.contains(b) || fewer && b.rule == EmissionRule::NotReturned;
    new.into_iter().filter(|b| !excused(b)).collect()
}
