//! Patches: rewrites as owned values.

use crate::ir::{
    DType, Dim, EditError, Function, Literal, Name, OpId, OpSpec, Operand, Place, TensorType, Use, ValueId, ValueType,
};

use crate::analysis::liveness::is_written;
use crate::analysis::spelling::{Step, share_among, unknowns};

use super::certificate::Certificate;
use super::dead::{erase_dead, loss};

/// What a new op reads.
#[derive(Clone, PartialEq, Debug)]
pub enum Ref {
    /// A value that exists.
    Value(ValueId),
    /// Result `.1` of new op `.0` of the same patch.
    New(usize, usize),
}

impl From<ValueId> for Ref {
    fn from(v: ValueId) -> Ref {
        Ref::Value(v)
    }
}

/// What is bound to a parameter of a new op.
#[derive(Clone, PartialEq, Debug)]
pub enum Input {
    /// One value.
    One(Ref),
    /// A constant; it becomes a `const` op of its own.
    Const(Literal),
    /// Several, for MIL's tuple parameters.
    Many(Vec<Input>),
}

impl Input {
    /// What an existing op reads: the same value, or a constant equal to one that is bound in place.
    pub fn like(f: &Function, operand: &Operand) -> Input {
        match operand {
            Operand::Value(v) => Input::One((*v).into()),
            Operand::Literal(l) => Input::Const(f.literal(*l).clone()),
        }
    }
}

impl<R: Into<Ref>> From<R> for Input {
    fn from(r: R) -> Input {
        Input::One(r.into())
    }
}

impl From<Literal> for Input {
    fn from(l: Literal) -> Input {
        Input::Const(l)
    }
}

/// A new op as a pure value.
#[derive(Clone, PartialEq, Debug)]
pub struct NewOp {
    kind: Name,
    inputs: Vec<(Name, Input)>,
    name: String,
    results: Vec<ValueType>,
}

/// Why a patch was refused. The function is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PatchError {
    /// An op in the way may not be edited.
    #[error(transparent)]
    Edit(#[from] crate::ir::EditError),
    /// A new value does not have the type of the value it replaces, or of what inference says.
    #[error("{what} would have type {have}, not {want}")]
    Type {
        /// Which value.
        what: String,
        /// Type it would have.
        have: Box<ValueType>,
        /// Type it must have.
        want: Box<ValueType>,
    },
    /// The new op is not well-formed.
    #[error(transparent)]
    Infer(#[from] crate::opset::InferError),
    /// The edited function is not well-formed.
    #[error(transparent)]
    Verify(#[from] crate::verify::Violations),
    /// The patch refers to something that is not there.
    #[error("the patch refers to {0}, which is not there")]
    Stale(String),
    /// An output's name cannot move to the value that would replace it.
    #[error("output `{0}` would have to be `{1}`, which is an input, an output or written to a state")]
    Output(Name, Name),
}

/// New ops, where they go, and which values they replace.
#[derive(Clone, PartialEq, Debug)]
pub struct Patch {
    before: OpId,
    ops: Vec<NewOp>,
    replace: Vec<(ValueId, Ref)>,
    /// How the rewrite was done, for the report (e.g. the lowering).
    pub form: String,
    /// Bytes per run that are no longer written or read.
    pub bytes_saved: u64,
    /// Bytes per run that are written or read anew.
    pub bytes_added: u64,
    /// What is known to go wrong with this form on some devices, for the report.
    pub hazards: Vec<&'static str>,
    /// How operands lie in what is read in their place, for the report.
    pub certificates: Vec<Certificate>,
}

impl Patch {
    /// An empty patch whose ops go before `before`.
    pub fn before(before: OpId) -> Patch {
        Patch {
            before,
            ops: vec![],
            replace: vec![],
            form: String::new(),
            bytes_saved: 0,
            bytes_added: 0,
            hazards: vec![],
            certificates: vec![],
        }
    }

    /// Adds an op with one result of type `ty`, to be called `name` (or a fresh variation of it).
    pub fn op<N: Into<Name>, I: Into<Input>>(
        &mut self,
        kind: &str,
        name: impl Into<String>,
        inputs: impl IntoIterator<Item = (N, I)>,
        ty: TensorType,
    ) -> Ref {
        Ref::New(self.op_many(kind, name, inputs, [ty]), 0)
    }

    /// Adds a `concat` of these along an axis.
    pub fn concat(&mut self, name: impl Into<String>, parts: Vec<Input>, axis: usize, ty: TensorType) -> Ref {
        let inputs = [
            ("values", Input::Many(parts)),
            ("axis", Input::Const(Literal::int(axis as i64))),
            ("interleave", Input::Const(Literal::bool(false))),
        ];
        self.op("concat", name, inputs, ty)
    }

    /// Adds a vector of 32-bit integers that has `part`, a vector of one, at one place and zeros elsewhere.
    pub fn placed(&mut self, name: impl Into<String>, part: Ref, at: usize, rank: usize) -> Ref {
        if rank == 1 {
            return part;
        }
        let zeros = |n: usize| (n > 0).then(|| Input::Const(Literal::ints(&vec![0; n])));
        let parts = [zeros(at), Some(Input::One(part)), zeros(rank.saturating_sub(at + 1))];
        let ty = TensorType::fixed(DType::I32, &[rank as u64]);
        self.concat(name, parts.into_iter().flatten().collect(), 0, ty)
    }

    /// Adds an op with a result for each type, called `name` and its number, and returns its number in the patch.
    pub fn op_many<N: Into<Name>, I: Into<Input>>(
        &mut self,
        kind: &str,
        name: impl Into<String>,
        inputs: impl IntoIterator<Item = (N, I)>,
        types: impl IntoIterator<Item = TensorType>,
    ) -> usize {
        self.ops.push(NewOp {
            kind: kind.into(),
            inputs: inputs.into_iter().map(|(n, i)| (n.into(), i.into())).collect(),
            name: name.into(),
            results: types.into_iter().map(ValueType::from).collect(),
        });
        self.ops.len() - 1
    }

    /// The type of a value, existing or new.
    pub fn type_of(&self, f: &Function, r: &Ref) -> Option<TensorType> {
        match r {
            Ref::Value(v) => f.tensor(*v).cloned(),
            Ref::New(op, result) => self.ops.get(*op)?.results.get(*result)?.as_tensor().cloned(),
        }
    }

    /// The element type of a value, existing or new.
    pub fn dtype(&self, f: &Function, r: &Ref) -> Option<DType> {
        self.type_of(f, r).map(|t| t.dtype)
    }

    /// Adds a `reshape` of `x`. One size that is not known is spelled −1; where there are more, the shape is computed from
    /// that of `x`. `None` when a size does not follow from those of `x`.
    pub fn reshape(&mut self, f: &Function, x: impl Into<Ref>, name: &str, shape: &[Dim]) -> Option<Ref> {
        let x = x.into();
        let ty = self.type_of(f, &x)?;
        let to = if unknowns(shape) > 1 {
            Input::One(self.computed_shape(&x, &ty, name, shape)?)
        } else {
            let sizes: Option<Vec<i64>> =
                shape.iter().map(|d| d.as_known().map_or(Some(-1), |n| i64::try_from(n).ok())).collect();
            Input::Const(Literal::ints(&sizes?))
        };
        let inputs = [("x", Input::One(x)), ("shape", to)];
        Some(self.op("reshape", name, inputs, TensorType::new(ty.dtype, shape.iter().cloned())))
    }

    /// Adds ops that compute a shape from that of `x`. `None` when an unknown size is no multiple or part of one of `x`.
    pub fn shape_from(&mut self, f: &Function, x: impl Into<Ref>, name: &str, shape: &[Dim]) -> Option<Ref> {
        let x = x.into();
        let ty = self.type_of(f, &x)?;
        self.computed_shape(&x, &ty, name, shape)
    }

    fn computed_shape(&mut self, x: &Ref, ty: &TensorType, name: &str, shape: &[Dim]) -> Option<Ref> {
        let vector = |n: u64| TensorType::fixed(DType::I32, &[n]);
        let own = self.op("shape", format!("{name}_of"), [("x", x.clone())], vector(ty.rank() as u64));
        let mut parts: Vec<Input> = Vec::new();
        for run in shape.chunk_by(|a, b| a.as_known().is_some() && b.as_known().is_some()) {
            let known: Option<Vec<i64>> = run.iter().map(|d| i64::try_from(d.as_known()?).ok()).collect();
            parts.push(match known {
                Some(sizes) => Input::Const(Literal::ints(&sizes)),
                None => self.computed_size(&own, ty, name, &run[0])?.into(),
            });
        }
        Some(self.concat(format!("{name}_shape"), parts, 0, vector(shape.len() as u64)))
    }

    /// One size as a vector, from the axis of `ty` that it is a multiple or a part of; `own` is the shape at run time.
    fn computed_size(&mut self, own: &Ref, ty: &TensorType, name: &str, size: &Dim) -> Option<Ref> {
        let one = TensorType::fixed(DType::I32, &[1]);
        let (axis, times, over) = share_among(&ty.shape, size)?;
        let inputs = [
            ("x", Input::One(own.clone())),
            ("begin", Input::Const(Literal::ints(&[axis as i64]))),
            ("size", Input::Const(Literal::ints(&[1]))),
        ];
        let at = self.op("slice_by_size", format!("{name}_size"), inputs, one.clone());
        let (kind, by) = match (times, over) {
            (1, 1) => return Some(at),
            (times, 1) => ("mul", times),
            (_, over) => ("floor_div", over),
        };
        let by = Input::Const(Literal::int(i64::try_from(by).ok()?));
        Some(self.op(kind, format!("{name}_size"), [("x", at.into()), ("y", by)], one))
    }

    /// Adds a `transpose` of `x`.
    pub fn transpose(&mut self, f: &Function, x: impl Into<Ref>, name: &str, perm: &[usize]) -> Option<Ref> {
        let x = x.into();
        let ty = self.type_of(f, &x)?;
        let shape: Vec<Dim> = perm.iter().map(|&p| ty.shape.get(p).cloned()).collect::<Option<_>>()?;
        let perm: Vec<i64> = perm.iter().map(|&p| p as i64).collect();
        let inputs = [("x", Input::One(x)), ("perm", Input::Const(Literal::ints(&perm)))];
        Some(self.op("transpose", name, inputs, TensorType::new(ty.dtype, shape)))
    }

    /// Adds the steps of a spelling of a view of `x`.
    pub fn steps(&mut self, f: &Function, x: impl Into<Ref>, name: &str, steps: &[Step]) -> Option<Ref> {
        steps.iter().try_fold(x.into(), |at, step| match step {
            Step::Reshape(shape) => self.reshape(f, at, name, shape),
            Step::Transpose(perm, _) => self.transpose(f, at, name, perm),
        })
    }

    /// Makes every use of `old` read `new`.
    pub fn replace(&mut self, old: ValueId, new: impl Into<Ref>) {
        self.replace.push((old, new.into()));
    }

    /// How many ops the patch adds, constants not counted.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether the patch adds no op.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Applies the patch and erases what it leaves dead.
    ///
    /// # Errors
    /// [`PatchError`]; the function is then as it was.
    pub fn apply(self, f: &mut Function) -> Result<(), PatchError> {
        if !f.is_live(self.before) {
            return Err(PatchError::Stale(self.before.to_string()));
        }
        self.check_replacements(f)?;
        let mut inserted = Vec::new();
        let new = match self.insert(f, &mut inserted) {
            Ok(new) => new,
            Err(e) => {
                for op in inserted.into_iter().rev() {
                    f.erase_op(op);
                }
                return Err(e);
            }
        };
        let resolve = |r: &Ref| match r {
            Ref::Value(v) => *v,
            Ref::New(op, result) => new[*op][*result],
        };
        for (old, r) in &self.replace {
            let to = resolve(r);
            match r {
                Ref::New(..) => f.replace_and_take_name(*old, to),
                Ref::Value(_) => redirect(f, *old, to),
            }
        }
        erase_dead(f, self.replace.iter().map(|(old, _)| *old));
        if cfg!(debug_assertions) {
            f.assert_uses_exact();
        }
        Ok(())
    }

    /// Everything that can be refused before anything is changed.
    fn check_replacements(&self, f: &Function) -> Result<(), PatchError> {
        for (old, r) in &self.replace {
            if let Some(op) = f.producer(*old) {
                f.check_editable(op)?;
                if let Some(what) = loss(f, op) {
                    return Err(EditError::Unmodelled { op: f.describe(op), what }.into());
                }
            }
            let have = match r {
                Ref::Value(v) => f.ty(*v),
                Ref::New(op, result) => self
                    .ops
                    .get(*op)
                    .and_then(|o| o.results.get(*result))
                    .ok_or_else(|| PatchError::Stale(format!("new op {op}")))?,
            };
            if have != f.ty(*old) {
                return Err(PatchError::Type {
                    what: format!("the replacement of `{}`", f.value(*old).name()),
                    have: have.clone().into(),
                    want: f.ty(*old).clone().into(),
                });
            }
            let Ref::Value(v) = r else { continue };
            for op in f.users(*old) {
                f.check_editable(op)?;
            }
            if is_returned(f, *old) {
                match f.producer(*v) {
                    Some(op) if may_be_returned(f, *v) => {
                        f.check_editable(op)?;
                        for op in f.users(*v) {
                            f.check_editable(op)?;
                        }
                    }
                    _ => return Err(PatchError::Output(f.value(*old).name().clone(), f.value(*v).name().clone())),
                }
            }
        }
        Ok(())
    }

    pub(super) fn insert(&self, f: &mut Function, inserted: &mut Vec<OpId>) -> Result<Vec<Vec<ValueId>>, PatchError> {
        let mut new: Vec<Vec<ValueId>> = Vec::new();
        for spec in &self.ops {
            let resolve = |r: &Ref| match r {
                Ref::Value(v) => Ok(Operand::Value(*v)),
                Ref::New(op, result) => new
                    .get(*op)
                    .and_then(|results| results.get(*result))
                    .map(|&v| Operand::Value(v))
                    .ok_or_else(|| PatchError::Stale(format!("new op {op}"))),
            };
            let mut inputs = Vec::new();
            let mut results = Vec::new();
            for (i, ty) in spec.results.iter().enumerate() {
                let numbered = || format!("{}_{i}", spec.name);
                let name = if spec.results.len() == 1 { spec.name.clone() } else { numbered() };
                results.push((f.fresh_name(&name), ty.clone()));
            }
            let base = results.first().map_or("const", |(n, _)| n.as_str()).to_string();
            for (param, input) in &spec.inputs {
                let parts = match input {
                    Input::Many(parts) => &parts[..],
                    one => std::slice::from_ref(one),
                };
                let mut bindings = Vec::new();
                for part in parts {
                    bindings.push(match part {
                        Input::One(r) => resolve(r)?,
                        Input::Const(l) => {
                            let place = Place::Before(self.before);
                            let (op, v) = insert_const(f, place, &format!("{base}_{param}"), l.clone());
                            inserted.push(op);
                            Operand::Value(v)
                        }
                        Input::Many(_) => return Err(PatchError::Stale(format!("a binding of `{param}`"))),
                    });
                }
                inputs.push((param.clone(), bindings));
            }
            let want: Vec<ValueType> = spec.results.clone();
            let op = f.insert_op(
                Place::Before(self.before),
                OpSpec { kind: spec.kind.clone(), inputs, attributes: vec![], results },
            );
            inserted.push(op);
            if let Some(types) = crate::opset::infer(f, op)? {
                for (have, want) in types.iter().zip(&want) {
                    if have != want {
                        return Err(PatchError::Type {
                            what: f.describe(op),
                            have: have.clone().into(),
                            want: want.clone().into(),
                        });
                    }
                }
            }
            new.push(f.op(op).results().to_vec());
        }
        Ok(new)
    }
}

/// Inserts a `const` op.
pub(super) fn insert_const(f: &mut Function, place: Place, name: &str, literal: Literal) -> (OpId, ValueId) {
    let ty = literal.ty.clone();
    let name = f.fresh_name(name);
    let val = f.intern(literal);
    let op = f.insert_op(
        place,
        OpSpec {
            kind: "const".into(),
            inputs: vec![],
            attributes: vec![("val".into(), val)],
            results: vec![(name, ty)],
        },
    );
    (op, f.op(op).results()[0])
}

/// Whether the function returns the value.
pub fn is_returned(f: &Function, v: ValueId) -> bool {
    f.value(v).uses().iter().any(|u| matches!(u, Use::Output { block, .. } if *block == f.body()))
}

/// Whether an existing value may become an output of the function: it is none yet, and no state is written from it.
pub fn may_be_returned(f: &Function, v: ValueId) -> bool {
    !is_returned(f, v) && f.producer(v).is_some() && !is_written(f, v)
}

/// Makes every use of `old` read an existing value, which takes the name where the function returns it.
fn redirect(f: &mut Function, old: ValueId, to: ValueId) {
    if is_returned(f, old) {
        let name = f.value(old).name().clone();
        let other = f.fresh_name(&name);
        f.rename(old, other);
        f.rename(to, name);
    }
    for u in f.value(old).uses().to_vec() {
        f.set_use(u, to);
    }
}
