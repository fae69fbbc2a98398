//! What an inference function sees of its op: operand types, and constant parameters with their defaults filled in.

use crate::ir::{BlockId, DType, Dim, Function, OpId, Operand, TensorType, ValueType};
use crate::opset::signature::{Default, Version};

use super::dims::{self, Dims};
use super::{Guess, Inferred, Problem, Stop};

/// Longer constants are data, not parameters, and are not read.
const MOST_INTS: u64 = 8192;

/// One op, read through its definition.
#[derive(Clone, Copy)]
pub(crate) struct Context<'f> {
    pub(super) f: &'f Function,
    pub(super) op: OpId,
    pub(super) version: &'static Version,
}

/// The type of one tensor operand.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(super) dtype: DType,
    pub(super) dims: Dims,
}

impl Tensor {
    pub(super) fn rank(&self) -> usize {
        self.dims.len()
    }
    /// A single result of this type.
    pub(super) fn result(self) -> Inferred {
        one(self.dtype, self.dims)
    }
    /// An error unless the rank is within the range.
    pub(super) fn rank_in(&self, param: &'static str, lo: usize, hi: usize) -> Result<(), Stop> {
        if (lo..=hi).contains(&self.rank()) {
            return Ok(());
        }
        let want = if lo == hi { format!("{lo} is needed") } else { format!("{lo} to {hi} are needed") };
        Err(Problem::rank(param, self.rank(), want).into())
    }
}

/// A single result.
pub(super) fn one(dtype: DType, dims: Dims) -> Inferred {
    Ok(vec![Guess::Tensor(dtype, dims)])
}

impl<'f> Context<'f> {
    pub(crate) fn new(f: &'f Function, op: OpId, version: &'static Version) -> Context<'f> {
        Context { f, op, version }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.f.has_param(self.op, name)
    }

    /// Whether the definition has a parameter.
    pub(crate) fn takes(&self, name: &str) -> bool {
        self.version.param(name).is_some()
    }

    /// The type of an operand as a loader sees it: 64-bit constants are narrowed when they are read.
    pub(super) fn operand_type(&self, operand: &Operand) -> ValueType {
        let constant = self.f.operand_literal(operand).is_some();
        match self.f.operand_type(operand) {
            ValueType::Tensor(t) if constant => {
                TensorType { dtype: narrowed(t.dtype), shape: t.shape.clone() }.into()
            }
            ty => ty.clone(),
        }
    }

    /// Types of everything bound to a parameter.
    pub(super) fn types(&self, name: &str) -> Vec<ValueType> {
        match self.f.op(self.op).param(name) {
            [] => self.f.const_param(self.op, name).map(|l| l.ty.clone()).into_iter().collect(),
            bound => bound.iter().map(|o| self.operand_type(o)).collect(),
        }
    }

    /// Every tensor of a tuple parameter.
    pub(super) fn tensors(&self, name: &str) -> Result<Vec<Tensor>, Stop> {
        self.types(name).iter().map(|ty| tensor(ty).ok_or(Stop::Unknown)).collect()
    }

    /// The tensor of a parameter, when it is bound.
    pub(super) fn optional(&self, name: &str) -> Result<Option<Tensor>, Stop> {
        Ok(self.tensors(name)?.pop())
    }

    /// The tensor of a required parameter.
    pub(super) fn tensor(&self, name: &'static str) -> Result<Tensor, Stop> {
        self.optional(name)?.ok_or(Stop::Wrong(Problem::MissingParam(name)))
    }

    fn default(&self, name: &str) -> Option<Default> {
        self.version.param(name)?.default()
    }

    /// The integers of a parameter; `None` when it is absent, run-time or unreadable.
    pub(crate) fn ints(&self, name: &str) -> Option<Vec<i64>> {
        let volume = self.f.const_param(self.op, name)?.ty.as_tensor()?.volume()?;
        if volume > MOST_INTS { None } else { self.f.ints(self.op, name) }
    }

    /// One integer, or its default.
    pub(crate) fn int(&self, name: &str) -> Result<i64, Stop> {
        match (self.has(name), self.default(name)) {
            (true, _) => self.f.int(self.op, name).ok_or(Stop::Unknown),
            (false, Some(Default::Int(n))) => Ok(n),
            _ => Err(Stop::Unknown),
        }
    }

    /// One truth value, or its default.
    pub(crate) fn bool(&self, name: &str) -> Result<bool, Stop> {
        match (self.has(name), self.default(name)) {
            (true, _) => self.f.bool(self.op, name).ok_or(Stop::Unknown),
            (false, Some(Default::Bool(b))) => Ok(b),
            (false, _) => Ok(false),
        }
    }

    /// A string, or its default.
    pub(crate) fn str(&self, name: &str) -> Result<&'f str, Stop> {
        match (self.has(name), self.default(name)) {
            (true, _) => self.f.str(self.op, name).ok_or(Stop::Unknown),
            (false, Some(Default::Str(s))) => Ok(s),
            _ => Err(Stop::Unknown),
        }
    }

    /// The element type that a string parameter names.
    pub(super) fn dtype(&self, name: &'static str) -> Result<DType, Stop> {
        let text = self.str(name)?;
        DType::from_name(text).ok_or_else(|| Problem::value(name, format!("`{text}` is no element type")).into())
    }

    /// Axis parameter, counted from the front.
    pub(crate) fn axis(&self, name: &'static str, rank: usize) -> Result<usize, Stop> {
        normalise(name, self.int(name)?, rank)
    }

    /// Axis list, counted from the front; `None` when it is absent.
    pub(crate) fn axes(&self, name: &'static str, rank: usize) -> Result<Option<Vec<usize>>, Stop> {
        if !self.has(name) {
            return Ok(None);
        }
        let axes = self.ints(name).ok_or(Stop::Unknown)?;
        axes.into_iter().map(|a| normalise(name, a, rank)).collect::<Result<_, _>>().map(Some)
    }

    /// The number of elements of a vector parameter, read from its type; an error when it is no vector.
    pub(super) fn length(&self, name: &'static str) -> Result<usize, Stop> {
        let t = self.tensor(name)?;
        t.rank_in(name, 1, 1)?;
        t.dims.first().and_then(dims::number).and_then(|n| usize::try_from(n).ok()).ok_or(Stop::Unknown)
    }

    /// Checks that a vector parameter has `want` elements, as far as its type says.
    pub(super) fn expect_length(&self, name: &'static str, want: usize) -> Result<(), Stop> {
        match self.length(name) {
            Ok(n) if n != want => Err(Problem::value(name, format!("has {n} elements, {want} are needed")).into()),
            Ok(_) | Err(Stop::Unknown) => Ok(()),
            Err(wrong) => Err(wrong),
        }
    }

    /// Nested blocks, which must be `want` in number.
    pub(super) fn blocks(&self, want: usize) -> Result<&'f [BlockId], Stop> {
        let blocks = self.f.op(self.op).blocks();
        match blocks.len() {
            have if have == want => Ok(blocks),
            have => Err(Problem::Blocks { have, want }.into()),
        }
    }
}

fn tensor(ty: &ValueType) -> Option<Tensor> {
    ty.as_tensor().map(|t| Tensor { dtype: t.dtype, dims: dims::of(t) })
}

fn narrowed(dtype: DType) -> DType {
    match dtype {
        DType::I64 => DType::I32,
        DType::F64 => DType::F32,
        other => other,
    }
}

/// An axis counted from the front.
pub(super) fn normalise(param: &'static str, axis: i64, rank: usize) -> Result<usize, Stop> {
    let wrong = || Stop::Wrong(Problem::Axis { param, axis, rank });
    let signed = i64::try_from(rank).map_err(|_| wrong())?;
    let from_front = if axis < 0 { axis.checked_add(signed) } else { Some(axis) };
    match from_front.and_then(|a| usize::try_from(a).ok()) {
        Some(a) if a < rank => Ok(a),
        _ => Err(wrong()),
    }
}

/// An integer as a size; `None` when it is negative.
pub(super) fn size(n: i64) -> Option<Dim> {
    u64::try_from(n).ok().map(Dim::known)
}
