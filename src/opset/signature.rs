//! Parameter lists of op kinds, written the way the table shows them:
//! `C7: (x:T, axis:i32!?=-1) with T=f16/f32`.
//!
//! `C7` is the first opset of the definition, `!` marks a parameter that must be constant, `?=` an optional one with
//! its default (`none`: absence has a meaning of its own), and parameters that share a group letter must have equal
//! element types.

use crate::ir::DType;

use super::Effect;
use super::infer::InferFn;

/// What is known about one op kind.
#[derive(Debug)]
pub struct OpDef {
    pub(super) kind: &'static str,
    pub(super) effect: Effect,
    pub(super) infer: InferFn,
    pub(super) versions: Vec<Version>,
}

impl OpDef {
    /// The kind.
    pub fn kind(&self) -> &'static str {
        self.kind
    }
    /// What an op of this kind does besides computing its results.
    pub fn effect(&self) -> Effect {
        self.effect
    }
    /// Definitions, oldest first.
    pub fn versions(&self) -> &[Version] {
        &self.versions
    }
    /// The first opset that has the kind: 5 for `CoreML5`.
    pub fn since(&self) -> u32 {
        self.versions.first().map_or(u32::MAX, |v| v.since)
    }
    /// The definition that holds in opset `CoreML<opset>`; the newest when the opset is not known (0).
    pub fn version(&self, opset: u32) -> Option<&Version> {
        match opset {
            0 => self.versions.last(),
            _ => self.versions.iter().rev().find(|v| v.since <= opset),
        }
    }
}

/// The parameters of a kind from one opset on.
#[derive(Debug)]
pub struct Version {
    pub(super) since: u32,
    pub(super) params: Vec<ParamDef>,
}

impl Version {
    /// The first opset with this definition.
    pub fn since(&self) -> u32 {
        self.since
    }
    /// Parameters, in declaration order.
    pub fn params(&self) -> &[ParamDef] {
        &self.params
    }
    /// One parameter.
    pub fn param(&self, name: &str) -> Option<&ParamDef> {
        self.params.iter().find(|p| p.name == name)
    }
}

/// One parameter.
#[derive(Debug, PartialEq)]
pub struct ParamDef {
    pub(super) name: &'static str,
    pub(super) constant: bool,
    pub(super) default: Option<Default>,
    pub(super) accepts: Accepts,
    pub(super) group: Option<&'static str>,
}

impl ParamDef {
    /// Name.
    pub fn name(&self) -> &'static str {
        self.name
    }
    /// Whether the operand must be a constant (`const`, a literal or a `constexpr_*` result).
    pub fn is_constant(&self) -> bool {
        self.constant
    }
    /// The default; `None` when the parameter is required.
    pub fn default(&self) -> Option<Default> {
        self.default
    }
    /// What may be bound.
    pub fn accepts(&self) -> &Accepts {
        &self.accepts
    }
    /// Parameters of one group have equal element types.
    pub fn group(&self) -> Option<&'static str> {
        self.group
    }
}

/// What a parameter takes when it is not bound.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Default {
    /// Nothing: being absent has a meaning of its own.
    Absent,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A number in the element type of the parameter's group (fp32 without one).
    Float(f64),
    /// A string.
    Str(&'static str),
    /// One per spatial dimension.
    Ones,
    /// Zero per spatial dimension (two each for `pad`), or per output channel.
    Zeros,
    /// Every axis.
    AllAxes,
}

/// What may be bound to a parameter.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Accepts {
    /// Anything.
    Any,
    /// A state.
    State,
    /// Several bindings of any type.
    Tuple,
    /// One tensor of one of these element types.
    Tensor(Vec<DType>),
}

/// Parses one definition; `None` when it is not of the documented form.
pub(super) fn parse(text: &'static str) -> Option<Version> {
    let (since, rest) = text.strip_prefix('C')?.split_once(": (")?;
    let (list, rest) = rest.split_once(')')?;
    let groups: Vec<(&str, &str)> = match rest.strip_prefix(" with ") {
        Some(groups) => groups.split("; ").map(|g| g.split_once('=')).collect::<Option<_>>()?,
        None => Vec::new(),
    };
    let params = list.split(", ").map(|p| param(p, &groups)).collect::<Option<_>>()?;
    Some(Version { since: since.parse().ok()?, params })
}

fn param(text: &'static str, groups: &[(&'static str, &'static str)]) -> Option<ParamDef> {
    let (name, rest) = text.split_once(':')?;
    let (ty, default) = match rest.split_once("?=") {
        Some((ty, default)) => (ty, Some(parse_default(default))),
        None => (rest, None),
    };
    let (ty, constant) = match ty.strip_suffix('!') {
        Some(ty) => (ty, true),
        None => (ty, false),
    };
    let group = groups.iter().find(|(g, _)| *g == ty);
    let accepts = match group.map_or(ty, |(_, types)| types) {
        "any" => Accepts::Any,
        "state" => Accepts::State,
        "tuple" => Accepts::Tuple,
        types => Accepts::Tensor(types.split('/').map(dtype).collect::<Option<_>>()?),
    };
    Some(ParamDef { name, constant, default, accepts, group: group.map(|(g, _)| *g) })
}

fn parse_default(text: &'static str) -> Default {
    match text {
        "none" => Default::Absent,
        "true" => Default::Bool(true),
        "false" => Default::Bool(false),
        "ones" => Default::Ones,
        "zeros" => Default::Zeros,
        "all axes" => Default::AllAxes,
        _ => match (text.parse(), text.parse()) {
            (Ok(n), _) => Default::Int(n),
            (_, Ok(x)) => Default::Float(x),
            _ => Default::Str(text),
        },
    }
}

fn dtype(text: &str) -> Option<DType> {
    use DType::*;
    Some(match text {
        "bool" => Bool,
        "str" => String,
        "f16" => F16,
        "f32" => F32,
        "i4" => I4,
        "i8" => I8,
        "i16" => I16,
        "i32" => I32,
        "u1" => U1,
        "u2" => U2,
        "u3" => U3,
        "u4" => U4,
        "u6" => U6,
        "u8" => U8,
        "u16" => U16,
        "u32" => U32,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_read_as_the_table_shows_them() {
        let v = parse("C7: (x:T, axis:i32!?=-1, epsilon:U!?=1e-05, axes:i32!?=all axes, m:M?=none) with T=f16/f32; U=f16; M=bool")
            .unwrap();
        assert_eq!(v.since, 7);
        let x = v.param("x").unwrap();
        assert_eq!((x.constant, x.default, x.group), (false, None, Some("T")));
        assert_eq!(x.accepts, Accepts::Tensor(vec![DType::F16, DType::F32]));
        let axis = v.param("axis").unwrap();
        assert_eq!((axis.constant, axis.default, axis.group), (true, Some(Default::Int(-1)), None));
        assert_eq!(v.param("epsilon").unwrap().default, Some(Default::Float(1e-5)));
        assert_eq!(v.param("axes").unwrap().default, Some(Default::AllAxes));
        assert_eq!(v.param("m").unwrap().default, Some(Default::Absent));
        assert!(parse("C7 (x:T)").is_none());
        assert!(parse("C7: (x:f17)").is_none());
    }
}
