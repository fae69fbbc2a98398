//! Feature descriptions ⇄ [`Interface`].

use crate::ir::{
    ArrayFeature, DType, Feature, FeatureKind, Flexibility, Function, Interface, Name, SymbolRange, TensorType,
    ValueId, ValueType,
};
use crate::proto::model::{
    self, ArrayFeatureType, ArrayShape, DefaultValue, EnumeratedShapes, FeatureDescription, FunctionDescription,
    ModelDescription, ShapeFlexibility, ShapeRange, SizeRange, StateFeatureType, StateKind,
};

/// `ArrayDataType` numbers.
const ARRAY_TYPES: &[(i32, DType)] =
    &[(65552, DType::F16), (65568, DType::F32), (65600, DType::F64), (131080, DType::I8), (131104, DType::I32)];

/// The interface of a function: from its own description, or from the model's when that is in the single-function form.
pub(super) fn decode(description: &ModelDescription, function: &str) -> Interface {
    let read = |features: &[FeatureDescription]| features.iter().map(decode_feature).collect();
    if description.functions.is_empty() {
        return Interface {
            inputs: read(&description.input),
            outputs: read(&description.output),
            states: read(&description.state),
        };
    }
    match description.functions.iter().find(|f| f.name == function) {
        Some(FunctionDescription { input, output, state, .. }) => {
            Interface { inputs: read(input), outputs: read(output), states: read(state) }
        }
        None => Interface::default(),
    }
}

/// The feature that a description describes.
pub(super) fn decode_feature(feature: &FeatureDescription) -> Feature {
    let ty = feature.ty.as_ref();
    Feature {
        name: Name::from(feature.name.as_str()),
        short_description: feature.short_description.clone(),
        kind: decode_kind(ty.and_then(|t| t.kind.as_ref())),
        optional: ty.is_some_and(|t| t.is_optional),
    }
}

fn decode_kind(kind: Option<&model::FeatureKind>) -> FeatureKind {
    use model::FeatureKind as F;
    let other = FeatureKind::Other;
    match kind {
        Some(F::MultiArray(a)) => decode_array(a).map_or(other("malformed multi-array"), FeatureKind::Array),
        Some(F::State(StateFeatureType { kind: Some(StateKind::Array(a)) })) => {
            decode_array(a).map_or(other("malformed state"), FeatureKind::State)
        }
        Some(F::State(_)) => other("malformed state"),
        Some(F::Image(i)) => match (u64::try_from(i.width), u64::try_from(i.height)) {
            (Ok(width), Ok(height)) => FeatureKind::Image { width, height, color_space: i.color_space },
            _ => other("malformed image"),
        },
        Some(F::Sequence(_)) => other("sequence"),
        Some(kind) => other(plain_kinds().find(|(_, k)| k == kind).map_or("dictionary", |(name, _)| name)),
        None => other("untyped"),
    }
}

/// The kinds of features that a name says all about; classifiers have them.
fn plain_kinds() -> impl Iterator<Item = (&'static str, model::FeatureKind)> {
    use model::{DictionaryFeatureType, Empty, FeatureKind, KeyKind};
    let dictionary = |key| FeatureKind::Dictionary(DictionaryFeatureType { key: Some(key) });
    [
        ("int64", FeatureKind::Int64(Empty {})),
        ("double", FeatureKind::Double(Empty {})),
        ("string", FeatureKind::String(Empty {})),
        ("dictionary by int64", dictionary(KeyKind::Int64(Empty {}))),
        ("dictionary by string", dictionary(KeyKind::String(Empty {}))),
    ]
    .into_iter()
}

/// `None` when a size is negative.
fn decode_array(a: &ArrayFeatureType) -> Option<ArrayFeature> {
    let sizes = |shape: &[i64]| shape.iter().map(|&n| u64::try_from(n).ok()).collect::<Option<Vec<u64>>>();
    let flexibility = match &a.flexibility {
        None => Flexibility::Fixed,
        Some(ShapeFlexibility::Enumerated(e)) => {
            Flexibility::Enumerated(e.shapes.iter().map(|s| sizes(&s.shape)).collect::<Option<_>>()?)
        }
        Some(ShapeFlexibility::Range(r)) => Flexibility::Ranges(
            r.size_ranges.iter().map(|r| (r.lower, u64::try_from(r.upper).ok())).collect::<Vec<_>>(),
        ),
    };
    Some(ArrayFeature {
        dtype: ARRAY_TYPES.iter().find(|(n, _)| *n == a.data_type).map(|(_, d)| *d),
        shape: sizes(&a.shape)?,
        flexibility,
        default: a.default.as_ref().map(|d| match *d {
            DefaultValue::Int(v) => f64::from(v),
            DefaultValue::Float(v) => f64::from(v),
            DefaultValue::Double(v) => v,
        }),
    })
}

/// The sizes that an axis of an input may take according to its description.
pub(super) fn axis_range(feature: Option<&Feature>, rank: usize, axis: usize) -> SymbolRange {
    let unbounded = SymbolRange { lo: 0, hi: None };
    match feature.and_then(Feature::array).map(|a| &a.flexibility) {
        Some(Flexibility::Ranges(ranges)) if ranges.len() == rank => {
            ranges.get(axis).map_or(unbounded, |&(lo, hi)| SymbolRange { lo, hi })
        }
        Some(Flexibility::Enumerated(shapes)) if shapes.iter().all(|s| s.len() == rank) => {
            let sizes = || shapes.iter().filter_map(|s| s.get(axis).copied());
            sizes().min().map_or(unbounded, |lo| SymbolRange { lo, hi: sizes().max() })
        }
        _ => unbounded,
    }
}

/// The description of a feature. What `base` (the description that the file has under this name) says beyond the
/// [`Feature`] is kept.
///
/// # Errors
/// Says why the feature cannot be described.
pub(super) fn encode_feature(
    feature: &Feature,
    base: Option<&FeatureDescription>,
) -> Result<FeatureDescription, String> {
    let mut out = base.cloned().unwrap_or_default();
    out.name = feature.name.to_string();
    out.short_description.clone_from(&feature.short_description);
    let ty = out.ty.get_or_insert_default();
    ty.is_optional = feature.optional;
    if decode_kind(ty.kind.as_ref()) != feature.kind {
        ty.kind = Some(encode_kind(&feature.kind)?);
    }
    Ok(out)
}

fn encode_kind(kind: &FeatureKind) -> Result<model::FeatureKind, String> {
    Ok(match kind {
        FeatureKind::Array(a) => model::FeatureKind::MultiArray(encode_array(a)?),
        FeatureKind::State(a) => {
            model::FeatureKind::State(StateFeatureType { kind: Some(StateKind::Array(encode_array(a)?)) })
        }
        &FeatureKind::Image { width, height, color_space } => model::FeatureKind::Image(model::ImageFeatureType {
            width: size(width)?,
            height: size(height)?,
            color_space,
            flexibility: None,
        }),
        FeatureKind::Other(what) => {
            let plain = plain_kinds().find(|(name, _)| name == what);
            plain.map(|(_, kind)| kind).ok_or_else(|| format!("it is of kind {what}"))?
        }
    })
}

fn encode_array(a: &ArrayFeature) -> Result<ArrayFeatureType, String> {
    let data_type = match a.dtype {
        None => 0,
        Some(dtype) => ARRAY_TYPES
            .iter()
            .find(|(_, d)| *d == dtype)
            .map(|(n, _)| *n)
            .ok_or_else(|| format!("multi-arrays of type {dtype} do not exist"))?,
    };
    let sizes = |shape: &[u64]| shape.iter().map(|&n| size(n)).collect::<Result<Vec<i64>, String>>();
    let flexibility = match &a.flexibility {
        Flexibility::Fixed => None,
        Flexibility::Enumerated(shapes) => {
            let shapes = shapes.iter().map(|s| Ok(ArrayShape { shape: sizes(s)? })).collect::<Result<_, String>>()?;
            Some(ShapeFlexibility::Enumerated(EnumeratedShapes { shapes }))
        }
        Flexibility::Ranges(ranges) => {
            let range = |&(lower, hi): &(u64, Option<u64>)| Ok(SizeRange { lower, upper: hi.map_or(Ok(-1), size)? });
            let size_ranges = ranges.iter().map(range).collect::<Result<_, String>>()?;
            Some(ShapeFlexibility::Range(ShapeRange { size_ranges }))
        }
    };
    let default = a.default.map(|v| match a.dtype {
        Some(DType::F64) => DefaultValue::Double(v),
        Some(DType::I32 | DType::I8) => DefaultValue::Int(v as i32),
        _ => DefaultValue::Float(v as f32),
    });
    Ok(ArrayFeatureType { shape: sizes(&a.shape)?, data_type, flexibility, default })
}

fn size(n: u64) -> Result<i64, String> {
    i64::try_from(n).map_err(|_| format!("size {n} is too large"))
}

/// The interface that the inputs and outputs of a function imply.
pub(super) fn derive(f: &Function) -> Interface {
    let array = |ty: &ValueType, flexible: bool| match ty {
        ValueType::Tensor(t) | ValueType::State(t) => array_of(f, t, flexible),
        _ => None,
    };
    let feature = |v: ValueId, array: Option<ArrayFeature>, wrap: fn(ArrayFeature) -> FeatureKind| Feature {
        name: f.value(v).name().clone(),
        short_description: String::new(),
        kind: array.map_or(FeatureKind::Other("not a tensor"), wrap),
        optional: false,
    };
    let (states, inputs): (Vec<ValueId>, Vec<ValueId>) =
        f.inputs().iter().partition(|&&v| f.ty(v).as_state().is_some());
    Interface {
        inputs: inputs.iter().map(|&v| feature(v, array(f.ty(v), true), FeatureKind::Array)).collect(),
        outputs: f.outputs().iter().map(|&v| feature(v, array(f.ty(v), false), FeatureKind::Array)).collect(),
        states: states.iter().map(|&v| feature(v, array(f.ty(v), false), FeatureKind::State)).collect(),
    }
}

/// An input of unknown size is described by the range of its symbol and starts at the lower bound; an output of unknown
/// size or of rank 0 has no shape; an input of rank 0 is described as `[1]`.
fn array_of(f: &Function, t: &TensorType, is_input: bool) -> Option<ArrayFeature> {
    let mut array =
        ArrayFeature { dtype: Some(t.dtype), shape: Vec::new(), flexibility: Flexibility::Fixed, default: None };
    match t.known_shape() {
        Some(shape) if shape.is_empty() && is_input => array.shape = vec![1],
        Some(shape) => array.shape = shape.to_vec(),
        None if is_input => {
            let range = |d: &crate::ir::Dim| match (d.as_known(), d.symbols()) {
                (Some(n), _) => Some((n, Some(n))),
                (None, &[s]) if d.coef() == 1 => {
                    let r = f.symbol_range(s);
                    Some((r.lo.max(1), r.hi))
                }
                _ => None,
            };
            let ranges = t.shape.iter().map(range).collect::<Option<Vec<_>>>()?;
            array.shape = ranges.iter().map(|r| r.0).collect();
            array.flexibility = Flexibility::Ranges(ranges);
        }
        None => {}
    }
    Some(array)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::model::FeatureType;

    fn array(shape: &[i64], flexibility: Option<ShapeFlexibility>) -> FeatureDescription {
        let array = ArrayFeatureType { shape: shape.to_vec(), data_type: 65552, flexibility, default: None };
        FeatureDescription {
            name: "x".into(),
            short_description: "a mask".into(),
            ty: Some(FeatureType { kind: Some(model::FeatureKind::MultiArray(array)), is_optional: false }),
        }
    }

    #[test]
    fn ranges_bound_the_axes_of_inputs() {
        let ranges = [SizeRange { lower: 1, upper: 1 }, SizeRange { lower: 2, upper: -1 }];
        let feature =
            decode_feature(&array(&[1, 2], Some(ShapeFlexibility::Range(ShapeRange { size_ranges: ranges.to_vec() }))));
        assert_eq!(axis_range(Some(&feature), 2, 1), SymbolRange { lo: 2, hi: None });
        assert_eq!(axis_range(Some(&feature), 3, 1), SymbolRange { lo: 0, hi: None });
        let shapes = [4, 1, 9].map(|n| ArrayShape { shape: vec![n] });
        let feature = decode_feature(&array(
            &[4],
            Some(ShapeFlexibility::Enumerated(EnumeratedShapes { shapes: shapes.to_vec() })),
        ));
        assert_eq!(axis_range(Some(&feature), 1, 0), SymbolRange { lo: 1, hi: Some(9) });
    }

    #[test]
    fn what_the_ir_does_not_hold_of_an_image_survives_a_rename() {
        let image = model::ImageFeatureType {
            width: 8,
            height: 4,
            color_space: 20,
            flexibility: Some(model::SizeFlexibility::Range(model::ImageSizeRange {
                width: Some(SizeRange { lower: 1, upper: 8 }),
                height: None,
            })),
        };
        let before = FeatureDescription {
            name: "image".into(),
            short_description: String::new(),
            ty: Some(FeatureType { kind: Some(model::FeatureKind::Image(image)), is_optional: true }),
        };
        let mut feature = decode_feature(&before);
        feature.short_description = "a cat".into();
        let after = encode_feature(&feature, Some(&before)).unwrap();
        assert_eq!(after.ty, before.ty);
        assert_eq!(after.short_description, "a cat");
    }

    #[test]
    fn features_without_arrays_are_refused() {
        let feature = Feature {
            name: "x".into(),
            short_description: String::new(),
            kind: FeatureKind::Other("sequence"),
            optional: false,
        };
        assert_eq!(encode_feature(&feature, None).unwrap_err(), "it is of kind sequence");
        for (name, kind) in plain_kinds() {
            assert_eq!(decode_kind(Some(&kind)), FeatureKind::Other(name));
            assert_eq!(encode_kind(&FeatureKind::Other(name)).unwrap(), kind);
        }
        let bools =
            ArrayFeature { dtype: Some(DType::Bool), shape: vec![1], flexibility: Flexibility::Fixed, default: None };
        assert_eq!(encode_array(&bools).unwrap_err(), "multi-arrays of type bool do not exist");
    }
}
