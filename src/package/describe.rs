//! The model description of a program.

use std::ops::Range;

use prost::Message;

use super::error::EncodeError;
use super::interface::{decode_feature, derive, encode_feature};
use super::source::ModelFile;
use crate::ir::{Feature, Function, Interface, Metadata, Program};
use crate::proto::model::{self, FeatureDescription};
use crate::proto::schema;
use crate::proto::wire::{self, Splice};

/// Field numbers of inputs, outputs and states.
type Numbers = [u32; 3];
/// In `ModelDescription`.
const MODEL: Numbers = [1, 10, 13];
/// In `FunctionDescription`.
const FUNCTION: Numbers = [2, 3, 6];
/// `functions`, `defaultFunctionName` and `metadata` of `ModelDescription`.
const FUNCTIONS: u32 = 20;
const DEFAULT_FUNCTION: u32 = 21;
const METADATA: u32 = 100;

/// The `ModelDescription` message. What the source says of functions whose interface was not edited is kept.
pub(super) fn encode(program: &Program, source: Option<&ModelFile>) -> Result<Vec<u8>, EncodeError> {
    let from = source.and_then(|s| s.description.clone().map(|range| (s, range)));
    let known = Described::read(from.as_ref().map(|(s, range)| (&s.bytes[..], range.clone())))?;
    let multi = known.multi || program.default_function.is_some() || program.functions.len() > 1;
    let mut new = Vec::new();
    let mut replaced: Vec<u32> = Vec::new();
    if multi {
        replaced.extend([FUNCTIONS, DEFAULT_FUNCTION]);
        if !known.multi {
            replaced.extend(MODEL);
        }
        for f in &program.functions {
            wire::put(&mut new, FUNCTIONS, &known.function(f, FUNCTION)?);
        }
        let main =
            program.main().ok_or_else(|| EncodeError::Program("it has several functions and no default".into()))?;
        wire::put(&mut new, DEFAULT_FUNCTION, main.name().as_bytes());
    } else {
        replaced.extend([FUNCTIONS, DEFAULT_FUNCTION]);
        replaced.extend(MODEL);
        if let [f] = &program.functions[..] {
            new.extend(known.features(f, MODEL)?);
        }
    }
    if source.is_none_or(|s| s.metadata != program.metadata) {
        replaced.push(METADATA);
        let metadata = encode_metadata(&program.metadata);
        if !metadata.is_empty() {
            wire::put(&mut new, METADATA, &metadata);
        }
    }
    match from {
        None => Ok(new),
        Some((s, range)) if program.functions.iter().all(|f| known.is_as_read(f)) && known.fits(program, multi, s) => {
            Ok(s.bytes[range].to_vec())
        }
        Some((s, range)) => splice(&s.bytes, range, &replaced, new),
    }
}

/// The message at `range` with the `replaced` fields gone and `new` where the first of them was.
fn splice(bytes: &[u8], range: Range<usize>, replaced: &[u32], new: Vec<u8>) -> Result<Vec<u8>, EncodeError> {
    let mut new = Some(new);
    let mut out = wire::splice(bytes, range, |field| {
        Ok::<_, EncodeError>(match replaced.contains(&field.number) {
            true => Splice::With(new.take().unwrap_or_default()),
            false => Splice::Keep,
        })
    })?;
    out.extend(new.unwrap_or_default());
    Ok(out)
}

fn encode_metadata(m: &Metadata) -> Vec<u8> {
    model::Metadata {
        short_description: m.short_description.clone(),
        version_string: m.version.clone(),
        author: m.author.clone(),
        license: m.license.clone(),
        user_defined: m.user_defined.clone(),
    }
    .encode_to_vec()
}

/// The features that the file describes, and where.
struct Described<'a> {
    bytes: &'a [u8],
    multi: bool,
    functions: Vec<DescribedFunction>,
}

struct DescribedFunction {
    /// Empty in the single-function form.
    name: String,
    /// The function's own description, in the multi-function form.
    range: Option<Range<usize>>,
    /// Payloads of the inputs, outputs and states.
    features: [Vec<Range<usize>>; 3],
}

impl<'a> Described<'a> {
    fn read(from: Option<(&'a [u8], Range<usize>)>) -> Result<Described<'a>, EncodeError> {
        let Some((bytes, range)) = from else { return Ok(Described { bytes: &[], multi: false, functions: vec![] }) };
        let own = wire::payloads(bytes, range.clone(), FUNCTIONS)?;
        let read = |name: String, range: Range<usize>, own: bool, numbers: Numbers| {
            let [inputs, outputs, states] = numbers.map(|n| wire::payloads(bytes, range.clone(), n));
            let features = [inputs?, outputs?, states?];
            Ok::<_, EncodeError>(DescribedFunction { name, range: own.then_some(range), features })
        };
        let functions = match own.is_empty() {
            true => vec![read(String::new(), range, false, MODEL)?],
            false => own
                .into_iter()
                .map(|range| {
                    let name = wire::payloads(bytes, range.clone(), 1)?.pop().unwrap_or(0..0);
                    read(String::from_utf8_lossy(&bytes[name]).into_owned(), range, true, FUNCTION)
                })
                .collect::<Result<_, _>>()?,
        };
        let multi = functions.iter().any(|f| f.range.is_some());
        Ok(Described { bytes, multi, functions })
    }

    fn of(&self, f: &Function) -> Option<&DescribedFunction> {
        self.functions.iter().find(|d| !self.multi || d.name == **f.name())
    }

    /// Whether the file describes the function as the program does.
    fn is_as_read(&self, f: &Function) -> bool {
        !f.interface_edited() && self.of(f).is_some()
    }

    /// Whether the rest of the description holds for the program too.
    fn fits(&self, program: &Program, multi: bool, source: &ModelFile) -> bool {
        self.multi == multi
            && source.default_function == program.default_function
            && source.metadata == program.metadata
            && source.functions.keys().eq(program.functions.iter().map(|f| f.name()))
    }

    /// The `FunctionDescription` of a function.
    fn function(&self, f: &Function, numbers: Numbers) -> Result<Vec<u8>, EncodeError> {
        let range = self.of(f).and_then(|d| d.range.clone());
        match range {
            Some(range) if !f.interface_edited() => Ok(self.bytes[range].to_vec()),
            Some(range) => splice(self.bytes, range, &numbers, self.features(f, numbers)?),
            None => {
                let mut out = Vec::new();
                wire::put(&mut out, 1, f.name().as_bytes());
                out.extend(self.features(f, numbers)?);
                Ok(out)
            }
        }
    }

    /// The feature fields of a function, those that did not change as they are in the file.
    fn features(&self, f: &Function, numbers: Numbers) -> Result<Vec<u8>, EncodeError> {
        let derived;
        let interface = match *f.interface() == Interface::default() {
            true => {
                derived = derive(f);
                &derived
            }
            false => f.interface(),
        };
        let known = self.of(f);
        let mut out = Vec::new();
        for (i, features) in [&interface.inputs, &interface.outputs, &interface.states].into_iter().enumerate() {
            // A state may have become an input.
            let known = known.map_or(Vec::new(), |d| [&d.features[i][..], &d.features[2]].concat());
            for feature in features {
                wire::put(&mut out, numbers[i], &self.feature(f, feature, &known)?);
            }
        }
        Ok(out)
    }

    fn feature(&self, f: &Function, feature: &Feature, known: &[Range<usize>]) -> Result<Vec<u8>, EncodeError> {
        let fail =
            |reason| EncodeError::Feature { function: f.name().to_string(), feature: feature.name.to_string(), reason };
        let decode = |range: &Range<usize>| FeatureDescription::decode(&self.bytes[range.clone()]).ok();
        let base = known.iter().filter_map(|r| Some((r, decode(r)?))).find(|(_, d)| d.name == *feature.name);
        if let Some((range, description)) = &base {
            if decode_feature(description) == *feature {
                return Ok(self.bytes[(*range).clone()].to_vec());
            }
            if let Some(what) = schema::FEATURE.unknown_field(self.bytes, (*range).clone())? {
                return Err(EncodeError::Unmodelled {
                    function: f.name().to_string(),
                    item: format!("feature `{}`", feature.name),
                    what,
                });
            }
        }
        Ok(encode_feature(feature, base.as_ref().map(|(_, d)| d)).map_err(fail)?.encode_to_vec())
    }
}
