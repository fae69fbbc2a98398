//! `milopt optimize`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::checking::{Checking, parse_steps};
use super::progress::Spinner;
use super::staged::Staged;
use super::{Failure, Opening, about, check_distinct, check_output, check_outside, real, select};
use crate::equiv::{self, Culprit, EquivError, OnFailure, ProofError};
use crate::package::{Overwrite, Package, PackageError, SaveOptions};
use crate::passes::{self, Pipeline, Preset, Report, RunOptions, SideFile};

/// Rewrite a package with passes
#[derive(Debug, Args)]
pub(super) struct Optimize {
    /// The package
    #[arg(value_name = "PKG")]
    package: PathBuf,
    /// Where to write the result, unless --in-place or --dry-run is given; a path that ends in .mlmodel gets the bare model with its weights beside it
    #[arg(short, long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// Replace the package
    #[arg(long, conflicts_with = "output")]
    in_place: bool,
    /// Passes that go together: 1 keeps every bit and the interface (default), 2 also writes the KV cache once a run
    #[arg(short = 'O', value_name = "1|2", value_parser = parse_level, conflicts_with = "passes")]
    level: Option<Preset>,
    /// As -O2, and make the KV caches inputs that the caller writes; a side file, beside the output by default, says what
    /// to write where
    #[arg(long, value_name = "SIDECAR.json", num_args = 0..=1, require_equals = true, conflicts_with = "passes")]
    readonly_kv: Option<Option<PathBuf>>,
    #[arg(long, value_name = "A,B", help = passes_help())]
    passes: Option<String>,
    /// Only this function
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// Stop after this many rewrites, to find one that is to blame
    #[arg(long, value_name = "N")]
    stop_after: Option<usize>,
    /// Compare the result with the original over this many steps, and write only if they are equal; 8 see every pattern
    /// of masks
    #[arg(long, value_name = "STEPS", value_parser = parse_steps)]
    verify: Option<usize>,
    /// What to do if they are not: name the rewrite to blame and stop, or leave that one out and do the others
    #[arg(long, value_name = "WHAT", value_enum, default_value = "stop")]
    on_failure: Failing,
    /// Say what was left alone, and why
    #[arg(long)]
    explain: bool,
    /// Write what was done to a JSON file
    #[arg(long, value_name = "FILE.json")]
    report: Option<PathBuf>,
    /// Write no package
    #[arg(long)]
    dry_run: bool,
    /// Replace the output if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    checking: Checking,
    #[command(flatten)]
    opening: Opening,
}

/// See [`OnFailure`].
#[derive(Clone, Copy, PartialEq, Debug, ValueEnum)]
enum Failing {
    Stop,
    Revert,
}

fn passes_help() -> String {
    let known: Vec<_> = passes::all().iter().map(|p| p.name).collect();
    format!(
        "Passes to run instead of those of -O, in this order, out of {}; '' runs none. Options follow a name, as in gqa-fold:masks=tile (see `milopt passes NAME`)",
        known.join(", ")
    )
}

fn parse_level(text: &str) -> Result<Preset, String> {
    match text {
        "1" => Ok(Preset::O1),
        "2" => Ok(Preset::O2),
        _ => Err("the levels are 1 and 2".into()),
    }
}

/// What the passes did, and whether the result may be written.
struct Rewritten {
    rewrites: Report,
    verification: Option<equiv::Report>,
    culprits: Vec<Culprit>,
    equal: bool,
}

/// The content of the report file.
#[derive(Serialize)]
struct Summary<'r> {
    passes: Vec<&'static str>,
    #[serde(flatten)]
    rewrites: &'r Report,
    verification: Option<&'r equiv::Report>,
    culprits: &'r [Culprit],
    written: Option<&'r Path>,
}

impl Optimize {
    pub(super) fn execute(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let pipeline = self.pipeline()?;
        self.check_wanted()?;
        self.check_report()?;
        self.check_side_file()?;
        let spinner = Spinner::new("opening");
        let mut package = self.opening.open(&self.package)?;
        if let Some(name) = &self.function {
            select(&package, Some(name))?;
        }
        if let Some(path) = self.target() {
            package.check_target(path, &self.save_options()).map_err(with_hint)?;
        }
        let result = self.rewrite(&pipeline, &mut package, &spinner)?;
        let (rewrites, culprits) = (&result.rewrites, &result.culprits);
        spinner.say("writing");
        let target = self.target().filter(|_| result.equal);
        let saved = target.map(|path| self.save_all(&package, path, rewrites)).transpose();
        drop(spinner);

        write!(out, "{rewrites}")?;
        if self.explain {
            write!(out, "{}", rewrites.explain())?;
        }
        if let Some(report) = &result.verification {
            write!(out, "{report}")?;
        }
        for culprit in culprits {
            writeln!(out, "{}: {culprit}", if result.equal { "left out" } else { "to blame" })?;
        }
        let written = target.filter(|_| saved.is_ok());
        if let Some(path) = written {
            writeln!(out, "wrote {}", path.display())?;
        }
        if let Some(path) = self.side_file().filter(|_| written.is_some()) {
            match SideFile::of(rewrites).is_empty() {
                true => writeln!(out, "no side file is written: no state became an input")?,
                false => writeln!(out, "wrote {}", path.display())?,
            }
        }
        let passes = pipeline.passes().iter().map(|p| p.name()).collect();
        let verification = result.verification.as_ref();
        self.write_report(&Summary { passes, rewrites, verification, culprits, written })?;
        saved?;
        if !result.equal {
            return Err(Failure::Failed("the result is not equal to the original; nothing was written".into()));
        }
        if written.is_none() {
            writeln!(out, "nothing was written")?;
        }
        Ok(())
    }

    fn target(&self) -> Option<&Path> {
        match self.in_place {
            _ if self.dry_run => None,
            true => Some(&self.package),
            false => self.output.as_deref(),
        }
    }

    fn pipeline(&self) -> Result<Pipeline, Failure> {
        let preset = match (self.level, &self.readonly_kv) {
            (Some(Preset::O1), Some(_)) => {
                return Err(Failure::Usage("--readonly-kv runs the passes of -O2 and more; leave out -O1".into()));
            }
            (_, Some(_)) => Preset::ReadOnly,
            (level, None) => level.unwrap_or_default(),
        };
        match &self.passes {
            Some(text) => Pipeline::parse(text).map_err(|e| Failure::Usage(e.to_string())),
            None => Ok(Pipeline::preset(preset)),
        }
    }

    /// Where the side file goes, if a package and one are to be written.
    fn side_file(&self) -> Option<PathBuf> {
        let target = self.target()?;
        let beside = || match target.file_name() {
            Some(_) => target.with_extension("kv.json"),
            None => real(target).with_extension("kv.json"),
        };
        Some(self.readonly_kv.as_ref()?.clone().unwrap_or_else(beside))
    }

    fn check_side_file(&self) -> Result<(), Failure> {
        let Some(path) = self.side_file() else { return Ok(()) };
        let packages = [("PKG", Some(&*self.package)), ("--output", self.output.as_deref())];
        check_outside("--readonly-kv", &path, &packages)?;
        check_distinct("--readonly-kv", &path, &[("--report", self.report.as_deref())])?;
        check_output(&path)?;
        match path.symlink_metadata() {
            Ok(_) if !self.force => {
                Err(Failure::Failed(format!("{} exists already; --force replaces it", path.display()).into()))
            }
            _ => Ok(()),
        }
    }

    fn check_wanted(&self) -> Result<(), Failure> {
        let revert = (self.on_failure == Failing::Revert).then_some("--on-failure");
        if let (None, Some(option)) = (self.verify, revert.or(self.checking.first_used())) {
            return Err(Failure::Usage(format!("{option} is about a comparison; add --verify STEPS")));
        }
        if self.output.is_some() || self.in_place || self.dry_run {
            return Ok(());
        }
        let message = "say where the result goes: -o OUT, --in-place, or --dry-run to write no package";
        Err(Failure::Usage(message.into()))
    }

    fn check_report(&self) -> Result<(), Failure> {
        let Some(report) = &self.report else { return Ok(()) };
        let packages = [("PKG", Some(&*self.package)), ("--output", self.output.as_deref())];
        check_distinct("--report", report, &packages)?;
        check_outside("--report", report, &packages)?;
        check_output(report)
    }

    fn run_options(&self) -> RunOptions {
        let mut options = RunOptions::default();
        if let Some(function) = &self.function {
            options = options.only(function);
        }
        if let Some(rewrites) = self.stop_after {
            options = options.stop_after(rewrites);
        }
        options
    }

    /// Runs the passes, and compares if that is asked for.
    fn rewrite(&self, pipeline: &Pipeline, package: &mut Package, spinner: &Spinner) -> Result<Rewritten, Failure> {
        let Some(steps) = self.verify else {
            spinner.say("rewriting");
            let rewrites = pipeline.run(package.program_mut(), &self.run_options());
            let rewrites = rewrites.map_err(|e| about(&self.package, e))?;
            return Ok(Rewritten { rewrites, verification: None, culprits: vec![], equal: true });
        };
        spinner.say("rewriting and verifying");
        let program = package.program();
        let one = match (&self.function, program.functions()) {
            (Some(name), _) => program.function(name),
            (None, [f]) => Some(f),
            (None, _) => None,
        };
        let options = self.checking.options(steps, &self.package, one)?;
        let on_failure = match self.on_failure {
            Failing::Stop => OnFailure::Stop,
            Failing::Revert => OnFailure::Revert,
        };
        let proof = equiv::prove(package.program_mut(), pipeline, &self.run_options(), &options, on_failure);
        let proof = proof.map_err(|e| match e {
            ProofError::Compare(e @ EquivError::NoInput(_)) => Failure::Usage(e.to_string()),
            e => about(&self.package, e),
        })?;
        let equal = proof.holds();
        let equiv::Proof { rewrites, verification, culprits, .. } = proof;
        Ok(Rewritten { rewrites, verification: Some(verification), culprits, equal })
    }

    fn save_options(&self) -> SaveOptions {
        SaveOptions::overwrite(match (self.force, self.in_place) {
            (true, _) => Overwrite::Force,
            (false, true) => Overwrite::InPlace,
            (false, false) => Overwrite::Refuse,
        })
    }

    /// Saves the package and, when that is done, the side file.
    fn save_all(&self, package: &Package, path: &Path, rewrites: &Report) -> Result<(), Failure> {
        let file = SideFile::of(rewrites);
        let Some(side) = self.side_file().filter(|_| !file.is_empty()) else { return self.save(package, path) };
        let failed = |e: String| Failure::Failed(format!("cannot write {}: {e}", side.display()).into());
        let content = serde_json::to_string_pretty(&file)? + "\n";
        let staged = Staged::new(&side, content.as_bytes()).map_err(|e| failed(e.to_string()))?;
        self.save(package, path)?;
        staged.place(self.force).map_err(|e| failed(format!("{e}; the package is written")))
    }

    fn save(&self, package: &Package, path: &Path) -> Result<(), Failure> {
        let witness = crate::verify::structure(package.program()).map_err(|e| about(&self.package, e))?;
        package.save(path, witness, &self.save_options()).map_err(|e| match e {
            PackageError::Encode(e) => about(&self.package, e),
            e => with_hint(e),
        })
    }

    fn write_report(&self, summary: &Summary<'_>) -> Result<(), Failure> {
        let Some(path) = &self.report else { return Ok(()) };
        let text = serde_json::to_string_pretty(summary)? + "\n";
        fs::write(path, text).map_err(|e| Failure::Failed(format!("cannot write {}: {e}", path.display()).into()))
    }
}

/// The error, with the option that lifts it.
fn with_hint(error: PackageError) -> Failure {
    match error {
        PackageError::Exists(_) => Failure::Failed(format!("{error}; --force replaces it").into()),
        e => e.into(),
    }
}
