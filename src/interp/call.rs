//! What a kernel sees of the op it evaluates: parameters by name, whatever form they are bound in.

use std::cell::Cell;

use smallvec::SmallVec;

use super::Mode;
use super::error::Fault;
use super::num::{Num, Real};
use super::run::Interpreter;
use super::tensor::{Tensor, rounded};
use crate::ir::{DType, OpData, OpId, Operand, ValueId, ValueType, round_float};

/// One evaluation of one op.
pub(crate) struct Call<'a> {
    interp: &'a Interpreter<'a>,
    values: &'a [Option<Tensor>],
    op: &'a OpData,
    dying: Cell<Option<(ValueId, Tensor)>>,
}

/// Axes of one tensor.
pub(crate) type Axes = SmallVec<[usize; 5]>;

impl<'a> Call<'a> {
    pub(super) fn new(interp: &'a Interpreter<'a>, values: &'a [Option<Tensor>], op: OpId) -> Call<'a> {
        Call { interp, values, op: interp.function().op(op), dying: Cell::new(None) }
    }

    /// With an operand that nothing else reads, no longer among the values.
    pub(super) fn with_dying(self, operand: Option<(ValueId, Tensor)>) -> Call<'a> {
        self.dying.set(operand);
        self
    }

    pub fn kind(&self) -> &str {
        self.op.kind()
    }

    pub fn mode(&self) -> Mode {
        self.interp.mode()
    }

    /// The opset's number; the newest one when the opset string is not of Apple's form.
    pub fn opset(&self) -> u32 {
        match self.interp.function().opset_version() {
            0 => u32::MAX,
            n => n,
        }
    }

    /// Number of declared results.
    pub fn result_count(&self) -> usize {
        self.op.results().len()
    }

    /// Whether a parameter is bound by an attribute, as the constexpr ops of CoreML6 do.
    pub fn has(&self, name: &str) -> bool {
        !self.op.param(name).is_empty() || self.op.attributes().any(|(n, _)| n == name)
    }

    /// The element type that the result is declared to have when that is a float type, else `fallback`.
    pub fn float_result(&self, fallback: DType) -> DType {
        let declared = self.op.results().first().map(|&v| self.interp.function().ty(v));
        match declared {
            Some(ValueType::Tensor(t)) if t.dtype.is_float() => t.dtype,
            _ => fallback,
        }
    }

    /// Every tensor bound to a parameter.
    pub fn tensors(&self, name: &str) -> Result<Vec<Tensor>, Fault> {
        let bound = self.op.param(name);
        if bound.is_empty() {
            return Err(Fault::Missing(format!("parameter `{name}`")));
        }
        bound.iter().map(|operand| self.operand(operand)).collect()
    }

    /// The tensor bound to an optional parameter, as an operand or as an attribute.
    pub fn optional(&self, name: &str) -> Result<Option<Tensor>, Fault> {
        match self.op.param(name) {
            [one] => self.operand(one).map(Some),
            [] => match self.op.attributes().find(|(n, _)| *n == name) {
                Some((_, literal)) => self.interp.literal(literal).map(Some),
                None => Ok(None),
            },
            many => Err(Fault::Shape(format!("parameter `{name}` has {} bindings", many.len()))),
        }
    }

    /// The tensor bound to a required parameter.
    pub fn tensor(&self, name: &str) -> Result<Tensor, Fault> {
        self.optional(name)?.ok_or_else(|| Fault::Missing(format!("parameter `{name}`")))
    }

    /// [`Call::tensor`] for the kernel that writes its result over the operand where nothing else holds it. The parameter
    /// can be read only once.
    pub fn take(&self, name: &str) -> Result<Tensor, Fault> {
        match self.dying.take() {
            Some((v, t)) if self.op.value(name) == Some(v) => Ok(t),
            _ => self.tensor(name),
        }
    }

    fn operand(&self, operand: &Operand) -> Result<Tensor, Fault> {
        match operand {
            Operand::Value(v) => self.interp.lookup(self.values, *v),
            Operand::Literal(l) => self.interp.literal(*l),
        }
    }

    /// The integers of an optional parameter.
    pub fn optional_ints(&self, name: &str) -> Result<Option<Vec<i64>>, Fault> {
        self.optional(name)?.map(|t| ints(name, &t)).transpose()
    }

    /// The integers of a required parameter.
    pub fn ints(&self, name: &str) -> Result<Vec<i64>, Fault> {
        ints(name, &self.tensor(name)?)
    }

    /// The single integer of an optional parameter.
    pub fn optional_int(&self, name: &str) -> Result<Option<i64>, Fault> {
        match self.optional_ints(name)?.as_deref() {
            None => Ok(None),
            Some([n]) => Ok(Some(*n)),
            Some(many) => Err(Fault::Shape(format!("parameter `{name}` holds {} integers instead of one", many.len()))),
        }
    }

    /// The single integer of a parameter, or its default.
    pub fn int_or(&self, name: &str, default: i64) -> Result<i64, Fault> {
        Ok(self.optional_int(name)?.unwrap_or(default))
    }

    /// The single integer of a required parameter.
    pub fn int(&self, name: &str) -> Result<i64, Fault> {
        self.optional_int(name)?.ok_or_else(|| Fault::Missing(format!("parameter `{name}`")))
    }

    /// The single truth value of a parameter, or its default.
    pub fn bool_or(&self, name: &str, default: bool) -> Result<bool, Fault> {
        if self.has(name) { self.scalar_bool(name) } else { Ok(default) }
    }

    /// The single truth value of a required parameter.
    pub fn scalar_bool(&self, name: &str) -> Result<bool, Fault> {
        let t = self.tensor(name)?;
        match t.elements::<bool>()? {
            [b] => Ok(*b),
            _ => Err(Fault::Shape(format!("parameter `{name}` of shape {:?} is no scalar", t.shape()))),
        }
    }

    /// The truth values of a parameter, one for each of `n` axes; all false when it is absent.
    pub fn mask(&self, name: &str, n: usize) -> Result<Vec<bool>, Fault> {
        match self.optional(name)? {
            None => Ok(vec![false; n]),
            Some(t) if t.len() == n => Ok(t.elements::<bool>()?.to_vec()),
            Some(t) => Err(Fault::Shape(format!("`{name}` has {} entries for {n} axes", t.len()))),
        }
    }

    /// The string of a parameter, or its default.
    pub fn str_or(&self, name: &str, default: &str) -> Result<String, Fault> {
        match self.optional(name)? {
            None => Ok(default.into()),
            Some(t) => t
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| Fault::dtype(format!("parameter `{name}`"), t.dtype(), "a string")),
        }
    }

    /// The element type that a string parameter names, or its default.
    pub fn dtype_or(&self, name: &str, default: DType) -> Result<DType, Fault> {
        let text = self.str_or(name, default.name())?;
        DType::from_name(&text).ok_or_else(|| Fault::Value(format!("`{name}` names the unknown element type `{text}`")))
    }

    /// The single number of a parameter; in storage mode rounded to `dtype`, the type of `x`. The default is a constant
    /// of that type, rounded in both modes.
    pub fn real_or<R: Real>(&self, name: &str, default: f64, dtype: DType) -> Result<R, Fault> {
        let value = match self.optional(name)? {
            None => round_float(dtype, default),
            Some(t) => match t.to_f64s()[..] {
                [value] => value,
                _ => return Err(Fault::Shape(format!("parameter `{name}` of shape {:?} is no scalar", t.shape()))),
            },
        };
        Ok(R::from_f64(rounded(dtype, self.mode(), value)))
    }

    /// The single number of a required parameter, as [`Call::real_or`] gives it.
    pub fn real<R: Real>(&self, name: &str, dtype: DType) -> Result<R, Fault> {
        if !self.has(name) {
            return Err(Fault::Missing(format!("parameter `{name}`")));
        }
        self.real_or(name, 0.0, dtype)
    }

    /// The axis that an integer parameter names, from the end when negative.
    pub fn axis(&self, name: &str, default: i64, rank: usize) -> Result<usize, Fault> {
        axis(self.int_or(name, default)?, rank)
    }

    /// Distinct axes in the order given; `None` when the parameter is absent.
    pub fn axes(&self, name: &str, rank: usize) -> Result<Option<Axes>, Fault> {
        let Some(given) = self.optional_ints(name)? else { return Ok(None) };
        let axes: Axes = given.iter().map(|&a| axis(a, rank)).collect::<Result<_, _>>()?;
        let mut sorted = axes.clone();
        sorted.sort_unstable();
        if sorted.windows(2).any(|w| w[0] == w[1]) {
            return Err(Fault::Shape(format!("axes {given:?} repeat one")));
        }
        Ok(Some(axes))
    }

    /// A tensor of floats, rounded to its element type as the mode says.
    pub fn real_result<R: Real>(&self, dtype: DType, shape: &[usize], elements: Vec<R>) -> Tensor {
        Tensor::new(dtype, shape, self.mode().store(elements, dtype))
    }

    /// A tensor of numbers: floats rounded, integers wrapped to their element type.
    pub fn result<T: Computed>(&self, dtype: DType, shape: &[usize], elements: Vec<T>) -> Tensor {
        T::finish(self.mode(), dtype, shape, elements)
    }
}

/// Numbers that can be stored as the result of an op.
pub(crate) trait Computed: Num {
    /// A tensor of `dtype` that holds the elements, rounded or wrapped.
    fn finish(mode: Mode, dtype: DType, shape: &[usize], elements: Vec<Self>) -> Tensor;
}

impl Computed for f32 {
    fn finish(mode: Mode, dtype: DType, shape: &[usize], elements: Vec<f32>) -> Tensor {
        Tensor::new(dtype, shape, mode.store(elements, dtype))
    }
}

impl Computed for f64 {
    fn finish(mode: Mode, dtype: DType, shape: &[usize], elements: Vec<f64>) -> Tensor {
        Tensor::new(dtype, shape, mode.store(elements, dtype))
    }
}

impl Computed for i64 {
    fn finish(_: Mode, dtype: DType, shape: &[usize], elements: Vec<i64>) -> Tensor {
        Tensor::ints(dtype, shape, &elements)
    }
}

/// Runs the body with `$R` standing for `f64` when one of the tensors is stored so, else for `f32`.
macro_rules! with_real {
    ([$($tensor:expr),+], $R:ident => $body:expr) => {
        if $($tensor.is_wide())||+ { type $R = f64; $body } else { type $R = f32; $body }
    };
}
pub(crate) use with_real;

/// [`with_real`] that also takes integer tensors (all of them, decided by the first).
macro_rules! with_num {
    ([$first:expr $(, $tensor:expr)*], $T:ident => $body:expr) => {
        if $first.dtype().is_int() {
            type $T = i64;
            $body
        } else if $first.is_wide() $(|| $tensor.is_wide())* {
            type $T = f64;
            $body
        } else {
            type $T = f32;
            $body
        }
    };
}
pub(crate) use with_num;

fn ints(name: &str, t: &Tensor) -> Result<Vec<i64>, Fault> {
    match t.dtype() {
        d if d.is_int() => Ok(t.to_i64s()),
        d => Err(Fault::dtype(format!("parameter `{name}`"), d, "an integer type")),
    }
}

/// The axis with this number, from the end when negative.
pub(crate) fn axis(number: i64, rank: usize) -> Result<usize, Fault> {
    let from_start = if number < 0 { number.checked_add(rank as i64) } else { Some(number) };
    from_start
        .and_then(|a| usize::try_from(a).ok())
        .filter(|&a| a < rank)
        .ok_or_else(|| Fault::Range(format!("there is no axis {number} in rank {rank}")))
}
