//! `CoreML.Specification`: models, their descriptions and feature types.

use std::collections::BTreeMap;

use prost::{Message, Oneof};

/// A model without its `Type` member, which is scanned instead of decoded.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Model {
    #[prost(int32, tag = "1")]
    pub specification_version: i32,
    #[prost(message, optional, tag = "2")]
    pub description: Option<ModelDescription>,
    #[prost(bool, tag = "10")]
    pub is_updatable: bool,
}

/// Number of `Model.mlProgram`.
pub(crate) const ML_PROGRAM: u32 = 502;

/// Members of the `Model.Type` oneof: number, name and what to call such a model.
pub(crate) const MODEL_TYPES: &[(u32, &str, &str)] = &[
    (200, "pipelineClassifier", "a pipeline"),
    (201, "pipelineRegressor", "a pipeline"),
    (202, "pipeline", "a pipeline"),
    (300, "glmRegressor", "a generalized linear model"),
    (301, "supportVectorRegressor", "a support vector machine"),
    (302, "treeEnsembleRegressor", "a tree ensemble"),
    (303, "neuralNetworkRegressor", "a neural network"),
    (304, "bayesianProbitRegressor", "a Bayesian probit regressor"),
    (400, "glmClassifier", "a generalized linear model"),
    (401, "supportVectorClassifier", "a support vector machine"),
    (402, "treeEnsembleClassifier", "a tree ensemble"),
    (403, "neuralNetworkClassifier", "a neural network"),
    (404, "kNearestNeighborsClassifier", "a nearest-neighbor classifier"),
    (500, "neuralNetwork", "a neural network"),
    (501, "itemSimilarityRecommender", "a recommender"),
    (ML_PROGRAM, "mlProgram", "an ML Program"),
    (555, "customModel", "a custom model"),
    (556, "linkedModel", "a linked model"),
    (560, "classConfidenceThresholding", "a confidence threshold"),
    (600, "oneHotEncoder", "a feature transformer"),
    (601, "imputer", "a feature transformer"),
    (602, "featureVectorizer", "a feature transformer"),
    (603, "dictVectorizer", "a feature transformer"),
    (604, "scaler", "a feature transformer"),
    (606, "categoricalMapping", "a feature transformer"),
    (607, "normalizer", "a feature transformer"),
    (609, "arrayFeatureExtractor", "a feature transformer"),
    (610, "nonMaximumSuppression", "a non-maximum suppression"),
    (900, "identity", "an identity"),
    (2000, "textClassifier", "a text classifier"),
    (2001, "wordTagger", "a word tagger"),
    (2002, "visionFeaturePrint", "a vision feature print"),
    (2003, "soundAnalysisPreprocessing", "a sound preprocessor"),
    (2004, "gazetteer", "a gazetteer"),
    (2005, "wordEmbedding", "a word embedding"),
    (2006, "audioFeaturePrint", "an audio feature print"),
    (3000, "serializedModel", "a serialized model"),
];

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ModelDescription {
    #[prost(message, repeated, tag = "1")]
    pub input: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "10")]
    pub output: Vec<FeatureDescription>,
    #[prost(string, tag = "11")]
    pub predicted_feature_name: String,
    #[prost(string, tag = "12")]
    pub predicted_probabilities_name: String,
    #[prost(message, repeated, tag = "13")]
    pub state: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "20")]
    pub functions: Vec<FunctionDescription>,
    #[prost(string, tag = "21")]
    pub default_function_name: String,
    #[prost(message, repeated, tag = "50")]
    pub training_input: Vec<FeatureDescription>,
    #[prost(message, optional, tag = "100")]
    pub metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FunctionDescription {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub input: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "3")]
    pub output: Vec<FeatureDescription>,
    #[prost(string, tag = "4")]
    pub predicted_feature_name: String,
    #[prost(string, tag = "5")]
    pub predicted_probabilities_name: String,
    #[prost(message, repeated, tag = "6")]
    pub state: Vec<FeatureDescription>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FeatureDescription {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub short_description: String,
    #[prost(message, optional, tag = "3")]
    pub ty: Option<FeatureType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Metadata {
    #[prost(string, tag = "1")]
    pub short_description: String,
    #[prost(string, tag = "2")]
    pub version_string: String,
    #[prost(string, tag = "3")]
    pub author: String,
    #[prost(string, tag = "4")]
    pub license: String,
    #[prost(btree_map = "string, string", tag = "100")]
    pub user_defined: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FeatureType {
    #[prost(oneof = "FeatureKind", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub kind: Option<FeatureKind>,
    #[prost(bool, tag = "1000")]
    pub is_optional: bool,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum FeatureKind {
    #[prost(message, tag = "1")]
    Int64(Empty),
    #[prost(message, tag = "2")]
    Double(Empty),
    #[prost(message, tag = "3")]
    String(Empty),
    #[prost(message, tag = "4")]
    Image(ImageFeatureType),
    #[prost(message, tag = "5")]
    MultiArray(ArrayFeatureType),
    #[prost(message, tag = "6")]
    Dictionary(DictionaryFeatureType),
    #[prost(message, tag = "7")]
    Sequence(SequenceFeatureType),
    #[prost(message, tag = "8")]
    State(StateFeatureType),
}

/// `Int64FeatureType`, `DoubleFeatureType` and `StringFeatureType`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ArrayFeatureType {
    #[prost(int64, repeated, tag = "1")]
    pub shape: Vec<i64>,
    /// `ArrayDataType` number.
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    #[prost(oneof = "ShapeFlexibility", tags = "21, 31")]
    pub flexibility: Option<ShapeFlexibility>,
    #[prost(oneof = "DefaultValue", tags = "41, 51, 61")]
    pub default: Option<DefaultValue>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ShapeFlexibility {
    #[prost(message, tag = "21")]
    Enumerated(EnumeratedShapes),
    #[prost(message, tag = "31")]
    Range(ShapeRange),
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum DefaultValue {
    #[prost(int32, tag = "41")]
    Int(i32),
    #[prost(float, tag = "51")]
    Float(f32),
    #[prost(double, tag = "61")]
    Double(f64),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EnumeratedShapes {
    #[prost(message, repeated, tag = "1")]
    pub shapes: Vec<ArrayShape>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ArrayShape {
    #[prost(int64, repeated, tag = "1")]
    pub shape: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ShapeRange {
    #[prost(message, repeated, tag = "1")]
    pub size_ranges: Vec<SizeRange>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SizeRange {
    #[prost(uint64, tag = "1")]
    pub lower: u64,
    /// Inclusive; negative when unbounded.
    #[prost(int64, tag = "2")]
    pub upper: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StateFeatureType {
    #[prost(oneof = "StateKind", tags = "1")]
    pub kind: Option<StateKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum StateKind {
    #[prost(message, tag = "1")]
    Array(ArrayFeatureType),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImageFeatureType {
    #[prost(int64, tag = "1")]
    pub width: i64,
    #[prost(int64, tag = "2")]
    pub height: i64,
    #[prost(int32, tag = "3")]
    pub color_space: i32,
    #[prost(oneof = "SizeFlexibility", tags = "21, 31")]
    pub flexibility: Option<SizeFlexibility>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum SizeFlexibility {
    #[prost(message, tag = "21")]
    Enumerated(EnumeratedImageSizes),
    #[prost(message, tag = "31")]
    Range(ImageSizeRange),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EnumeratedImageSizes {
    #[prost(message, repeated, tag = "1")]
    pub sizes: Vec<ImageSize>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImageSize {
    #[prost(uint64, tag = "1")]
    pub width: u64,
    #[prost(uint64, tag = "2")]
    pub height: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImageSizeRange {
    #[prost(message, optional, tag = "1")]
    pub width: Option<SizeRange>,
    #[prost(message, optional, tag = "2")]
    pub height: Option<SizeRange>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DictionaryFeatureType {
    #[prost(oneof = "KeyKind", tags = "1, 2")]
    pub key: Option<KeyKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum KeyKind {
    #[prost(message, tag = "1")]
    Int64(Empty),
    #[prost(message, tag = "2")]
    String(Empty),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SequenceFeatureType {
    #[prost(oneof = "ItemKind", tags = "1, 3")]
    pub item: Option<ItemKind>,
    #[prost(message, optional, tag = "101")]
    pub size: Option<SizeRange>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ItemKind {
    #[prost(message, tag = "1")]
    Int64(Empty),
    #[prost(message, tag = "3")]
    String(Empty),
}

/// The models of a pipeline; each is scanned like a model of its own.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Pipeline {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub models: Vec<Vec<u8>>,
    #[prost(string, repeated, tag = "2")]
    pub names: Vec<String>,
}
