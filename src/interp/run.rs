//! Runs the ops of a function in order: values, states and control flow.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::Mode;
use super::call::Call;
use super::error::{Fault, InterpError};
use super::ops::{self, Kernel};
use super::tensor::{Tensor, Values};
use crate::ir::{BlockId, Def, Function, Id, LiteralId, OpId, Operand, TensorType, Use, ValueId, ValueType};
use crate::opset;

/// The most iterations of one `while_loop`.
const MAX_ITERATIONS: usize = 1 << 20;

/// The deepest nesting of `cond` and `while_loop`.
const MAX_DEPTH: usize = 64;

/// Evaluates one function. Constants are read when an op first needs them and kept for later runs.
#[derive(Debug)]
pub struct Interpreter<'f> {
    f: &'f Function,
    mode: Mode,
    blocks: HashMap<BlockId, Vec<Step>>,
    literals: Mutex<HashMap<LiteralId, Tensor>>,
    folded: Mutex<HashMap<OpId, Vec<Tensor>>>,
}

/// An op, how it is evaluated, and the values that nothing reads after it.
#[derive(Debug)]
struct Step {
    op: OpId,
    action: Action,
    drops: Vec<ValueId>,
    reuse: Option<Reuse>,
}

/// An operand that may be overwritten with the result, because nothing else reads it.
#[derive(Clone, Copy, Debug)]
struct Reuse {
    x: ValueId,
    /// A state that the result is written to before anything else accesses it. If `x` is its content, it may go too.
    state: Option<ValueId>,
}

#[derive(Debug)]
enum Action {
    /// A constant: looked up where it is used.
    Skip,
    Compute(Kernel),
    /// Computed once per interpreter.
    Fold(Kernel),
    ReadState,
    WriteState,
    Cond,
    While,
    Opaque,
    /// Bound to something that the opset does not define for its kind.
    Foreign(String),
}

/// What one run holds.
struct Frame<'r> {
    values: Vec<Option<Tensor>>,
    states: HashMap<ValueId, Tensor>,
    observe: &'r mut dyn FnMut(ValueId, &Tensor),
}

impl Frame<'_> {
    /// Takes a value out, and with it the state that shares its elements. Views of it get elements of their own.
    fn take(&mut self, Reuse { x, state }: Reuse) -> Option<(ValueId, Tensor)> {
        let taken = self.values[x.index()].take()?;
        for part in self.values.iter_mut().filter(|v| v.as_ref().is_some_and(|t| t.shares(&taken) && t.is_part())) {
            *part = part.take().map(Tensor::settled);
        }
        if let Some(state) = state.filter(|s| self.states.get(s).is_some_and(|content| content.shares(&taken))) {
            self.states.remove(&state);
        }
        Some((x, taken))
    }
}

impl<'f> Interpreter<'f> {
    /// Prepares a function. No constant is read yet, and ops that cannot be interpreted fail only when a run reaches
    /// them.
    ///
    /// # Errors
    /// [`InterpError::Op`] when `cond` or `while_loop` lacks its two blocks or nests deeper than 64 levels.
    pub fn new(f: &'f Function, mode: Mode) -> Result<Self, InterpError> {
        let mut this =
            Interpreter { f, mode, blocks: HashMap::new(), literals: Mutex::default(), folded: Mutex::default() };
        let mut constant = vec![false; f.value_capacity()];
        this.plan(f.body(), 0, &mut constant)?;
        Ok(this)
    }

    /// The function.
    pub fn function(&self) -> &'f Function {
        self.f
    }

    /// The mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Evaluates the function once and returns its outputs by name.
    ///
    /// `inputs` holds a tensor for every input that is not a state, of its element type and a shape that fits; a scalar
    /// and a tensor of shape `[1]` are interchangeable, other names are ignored. A state missing from `states` starts as
    /// zeros. States are replaced only when the whole run succeeds.
    ///
    /// # Errors
    /// [`InterpError`] when an input or state does not fit or an op cannot be evaluated.
    pub fn run(&self, inputs: &Values, states: &mut Values) -> Result<Values, InterpError> {
        self.run_observed(inputs, states, &mut |_, _| {})
    }

    /// [`Interpreter::run`] from states that are given away, to new ones. What nothing else holds of them is updated in
    /// place, where `run` has to copy it first.
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn advance(&self, inputs: &Values, states: Values) -> Result<(Values, Values), InterpError> {
        self.evaluate(inputs, states, &mut |_, _| {})
    }

    /// [`Interpreter::run`] that calls back with every value an op computes, in order. Results of `const` and
    /// `constexpr_*` ops are not computed by a run and not reported; values of a loop's blocks are, once per iteration.
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn run_observed(
        &self,
        inputs: &Values,
        states: &mut Values,
        observe: &mut dyn FnMut(ValueId, &Tensor),
    ) -> Result<Values, InterpError> {
        let (outputs, new) = self.evaluate(inputs, states.clone(), observe)?;
        *states = new;
        Ok(outputs)
    }

    fn evaluate(
        &self,
        inputs: &Values,
        mut states: Values,
        observe: &mut dyn FnMut(ValueId, &Tensor),
    ) -> Result<(Values, Values), InterpError> {
        let mut frame = Frame { values: vec![None; self.f.value_capacity()], states: HashMap::new(), observe };
        for &v in self.f.inputs() {
            let name = self.f.value(v).name();
            let located = |fault| InterpError::Input { function: self.f.name().clone(), input: name.clone(), fault };
            match self.f.ty(v) {
                ValueType::State(ty) => {
                    let content = match states.remove(name) {
                        Some(t) => self.admit(&t, ty).map_err(located)?,
                        None => self.mode.admit(
                            &Tensor::zeros(ty)
                                .ok_or_else(|| Fault::Shape(format!("a state of type {ty} cannot be made")))
                                .map_err(located)?,
                        ),
                    };
                    frame.states.insert(v, content);
                }
                ty => {
                    let given = inputs.get(name).ok_or_else(|| Fault::Missing("its value".into())).map_err(located)?;
                    let given = match ty {
                        ValueType::Tensor(ty) => self.admit(given, ty).map_err(located)?,
                        _ => self.mode.admit(given),
                    };
                    frame.values[v.index()] = Some(given);
                }
            }
        }
        self.run_block(self.f.body(), &mut frame)?;
        let mut outputs = Values::new();
        for &v in self.f.outputs() {
            let output = self.f.value(v).name().clone();
            match self.lookup(&frame.values, v) {
                Ok(t) => outputs.insert(output, t.settled()),
                Err(_) => return Err(InterpError::Output { function: self.f.name().clone(), output }),
            };
        }
        for (v, content) in frame.states {
            states.insert(self.f.value(v).name().clone(), content);
        }
        Ok((outputs, states))
    }

    /// A tensor from outside as this mode stores it, if it fits the type.
    fn admit(&self, given: &Tensor, ty: &TensorType) -> Result<Tensor, Fault> {
        if given.dtype() != ty.dtype {
            return Err(Fault::dtype("the given tensor", given.dtype(), ty.dtype));
        }
        let given = match (given.shape(), ty.rank()) {
            ([1], 0) => given.reshaped(&[]),
            ([], 1) => given.reshaped(&[1]),
            _ => None,
        }
        .unwrap_or_else(|| given.clone());
        if !self.fits(&given, ty) {
            return Err(Fault::Shape(format!("shape {:?} does not fit {ty}", given.shape())));
        }
        Ok(self.mode.admit(&given))
    }

    /// Whether the shape is one of the type's, unknown sizes within their bounds.
    fn fits(&self, t: &Tensor, ty: &TensorType) -> bool {
        t.rank() == ty.rank()
            && t.shape().iter().zip(&ty.shape).all(|(&n, dim)| match (dim.as_known(), dim.symbols()) {
                (Some(known), _) => known == n as u64,
                (None, [s]) if dim.coef() == 1 => {
                    let range = self.f.symbol_range(*s);
                    range.lo <= n as u64 && range.hi.is_none_or(|hi| n as u64 <= hi)
                }
                _ => true,
            })
    }

    fn run_block(&self, block: BlockId, frame: &mut Frame<'_>) -> Result<(), InterpError> {
        for step in self.blocks.get(&block).into_iter().flatten() {
            self.step(step, frame)?;
            for &v in &step.drops {
                frame.values[v.index()] = None;
            }
        }
        Ok(())
    }

    fn step(&self, step: &Step, frame: &mut Frame<'_>) -> Result<(), InterpError> {
        let op = step.op;
        let data = self.f.op(op);
        let located = |fault| self.located(op, fault);
        let results = match &step.action {
            Action::Skip => return Ok(()),
            Action::Opaque => return Err(located(Fault::NotInterpreted)),
            Action::Foreign(what) => return Err(located(Fault::Foreign(what.clone()))),
            Action::Compute(kernel) => {
                let dying = step.reuse.and_then(|reuse| frame.take(reuse));
                self.compute(kernel, self.call(op, frame).with_dying(dying)).map_err(located)?
            }
            Action::Fold(kernel) => {
                let known = self.folded.lock().unwrap_or_else(PoisonError::into_inner).get(&op).cloned();
                let results = match known {
                    Some(results) => results,
                    None => {
                        let results = self.compute(kernel, self.call(op, frame)).map_err(located)?;
                        self.folded.lock().unwrap_or_else(PoisonError::into_inner).insert(op, results.clone());
                        results
                    }
                };
                for (&v, t) in data.results().iter().zip(results) {
                    frame.values[v.index()] = Some(t);
                }
                return Ok(());
            }
            Action::ReadState => {
                let content = self.state(op).ok().and_then(|(v, _)| frame.states.get(&v)).cloned();
                vec![content.ok_or_else(|| located(Fault::Missing("a state to read".into())))?]
            }
            Action::WriteState => {
                let (state, ty) = self.state(op).map_err(located)?;
                let new = self.call(op, frame).tensor("data").map_err(located)?;
                if new.dtype() != ty.dtype || !self.fits(&new, ty) {
                    let message = format!("data {}{:?} is not of the state's type {ty}", new.dtype(), new.shape());
                    return Err(located(Fault::Shape(message)));
                }
                frame.states.insert(state, new.settled());
                return Ok(());
            }
            Action::Cond => {
                let pred = self.call(op, frame).scalar_bool("pred").map_err(located)?;
                let block = data.blocks()[usize::from(!pred)];
                self.run_block(block, frame)?;
                self.block_outputs(block, frame).map_err(located)?
            }
            Action::While => self.run_while(op, frame)?,
        };
        if results.len() < data.results().len() {
            let message = format!("{} results are declared, {} are computed", data.results().len(), results.len());
            return Err(located(Fault::Shape(message)));
        }
        for (&v, t) in data.results().iter().zip(results) {
            let t = self.conform(v, t).map_err(located)?;
            (frame.observe)(v, &t);
            frame.values[v.index()] = Some(t);
        }
        Ok(())
    }

    fn run_while(&self, op: OpId, frame: &mut Frame<'_>) -> Result<Vec<Tensor>, InterpError> {
        let located = |fault| self.located(op, fault);
        let [cond, body] = self.f.op(op).blocks()[..] else { return Err(located(Fault::Missing("a block".into()))) };
        let mut vars = self.call(op, frame).tensors("loop_vars").map_err(located)?;
        for _ in 0..MAX_ITERATIONS {
            self.bind(cond, &vars, frame).map_err(located)?;
            self.run_block(cond, frame)?;
            let go = self.block_outputs(cond, frame).map_err(located)?;
            match go.first().map(|t| t.to_bools()).as_deref() {
                Some([true]) => {}
                Some([false]) => return Ok(vars),
                _ => return Err(located(Fault::Shape("the condition is no scalar".into()))),
            }
            self.bind(body, &vars, frame).map_err(located)?;
            self.run_block(body, frame)?;
            vars = self.block_outputs(body, frame).map_err(located)?;
        }
        Err(located(Fault::Endless(MAX_ITERATIONS)))
    }

    fn bind(&self, block: BlockId, vars: &[Tensor], frame: &mut Frame<'_>) -> Result<(), Fault> {
        let inputs = self.f.block(block).inputs();
        if inputs.len() != vars.len() {
            return Err(Fault::Shape(format!("{} loop variables for {} block inputs", vars.len(), inputs.len())));
        }
        for (&v, t) in inputs.iter().zip(vars) {
            frame.values[v.index()] = Some(t.clone());
        }
        Ok(())
    }

    fn block_outputs(&self, block: BlockId, frame: &Frame<'_>) -> Result<Vec<Tensor>, Fault> {
        self.f.block(block).outputs().iter().map(|&v| self.lookup(&frame.values, v)).collect()
    }

    fn compute(&self, kernel: &Kernel, call: Call<'_>) -> Result<Vec<Tensor>, Fault> {
        match kernel {
            Kernel::One(kernel) => kernel(&call).map(|t| vec![t]),
            Kernel::Many(kernel) => kernel(&call),
        }
    }

    /// A result as the declared type of its value stores it.
    fn conform(&self, v: ValueId, t: Tensor) -> Result<Tensor, Fault> {
        let declared = match self.f.ty(v) {
            ValueType::Tensor(ty) => ty.dtype,
            ValueType::Unranked(dtype) => *dtype,
            _ => return Ok(t),
        };
        match t.dtype() {
            found if found == declared => Ok(t),
            found if found.is_float() && declared.is_float() => {
                t.cast_in(declared, self.mode).ok_or_else(|| Fault::dtype("the result", found, declared))
            }
            found => Err(Fault::dtype("the result", found, declared)),
        }
    }

    /// The state that an op accesses, and its wrapped type.
    fn state(&self, op: OpId) -> Result<(ValueId, &'f TensorType), Fault> {
        let state = self.f.op(op).value("input").and_then(|v| Some((v, self.f.ty(v).as_state()?)));
        state.ok_or_else(|| Fault::Missing("a state to access".into()))
    }

    fn call<'a>(&'a self, op: OpId, frame: &'a Frame<'_>) -> Call<'a> {
        Call::new(self, &frame.values, op)
    }

    /// The tensor of a value that has been computed or is a constant.
    pub(super) fn lookup(&self, values: &[Option<Tensor>], v: ValueId) -> Result<Tensor, Fault> {
        if let Some(t) = &values[v.index()] {
            return Ok(t.clone());
        }
        match self.f.const_literal(v) {
            Some(literal) => self.literal(literal),
            None => Err(Fault::Undefined(self.f.value(v).name().clone())),
        }
    }

    /// The tensor of a constant, read once.
    pub(super) fn literal(&self, id: LiteralId) -> Result<Tensor, Fault> {
        let mut known = self.literals.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(t) = known.get(&id) {
            return Ok(t.clone());
        }
        let t = self.mode.admit(&Tensor::from_literal(self.f.literal(id), &**self.f.weights())?);
        known.insert(id, t.clone());
        Ok(t)
    }

    fn located(&self, op: OpId, fault: Fault) -> InterpError {
        InterpError::Op { function: self.f.name().clone(), op: self.f.describe(op), fault }
    }

    /// Plans a block and the blocks inside it. `constant` tells which values do not depend on a run.
    fn plan(&mut self, block: BlockId, depth: usize, constant: &mut [bool]) -> Result<(), InterpError> {
        let ops: Vec<OpId> = self.f.ops(block).collect();
        let position: HashMap<OpId, usize> = ops.iter().enumerate().map(|(i, &op)| (op, i)).collect();
        let mut steps = Vec::with_capacity(ops.len());
        for &op in &ops {
            let action = self.action(op, constant);
            let data = self.f.op(op);
            if matches!(action, Action::Cond | Action::While) {
                if data.blocks().len() != 2 {
                    return Err(self.located(op, Fault::Missing("one of its two blocks".into())));
                }
                if depth >= MAX_DEPTH {
                    return Err(self.located(op, Fault::Value("blocks are nested too deeply".into())));
                }
                for &inner in data.blocks() {
                    self.plan(inner, depth + 1, constant)?;
                }
            }
            steps.push(Step { op, action, drops: Vec::new(), reuse: None });
        }
        let inputs = if depth == 0 { self.f.inputs() } else { self.f.block(block).inputs() };
        let results = ops.iter().flat_map(|&op| self.f.op(op).results());
        for &v in inputs.iter().chain(results) {
            if let Some(last) = self.last_use(v, block, &position) {
                steps[last].drops.push(v);
            }
        }
        for i in 0..steps.len() {
            steps[i].reuse = self.reuse(&steps, i);
        }
        self.blocks.insert(block, steps);
        Ok(())
    }

    /// What a `slice_update` may overwrite: its x, if that is not read again.
    fn reuse(&self, steps: &[Step], at: usize) -> Option<Reuse> {
        let data = self.f.op(steps[at].op);
        if data.kind() != "slice_update" {
            return None;
        }
        let x = data.value("x").filter(|x| steps[at].drops.contains(x) && data.value("update") != Some(*x))?;
        let result = data.results().first().copied();
        let state = steps[at + 1..].iter().find_map(|step| {
            let next = self.f.op(step.op);
            let writes = next.kind() == "write_state" && next.value("data") == result && result.is_some();
            (writes || !next.blocks().is_empty()).then(|| if writes { next.value("input") } else { None })
        });
        let state = state.flatten().filter(|s| {
            let access = steps[at + 1..].iter().map(|step| self.f.op(step.op)).find(|op| op.value("input") == Some(*s));
            access.is_some_and(|op| op.kind() == "write_state" && op.value("data") == result)
        });
        Some(Reuse { x, state })
    }

    fn action(&self, op: OpId, constant: &mut [bool]) -> Action {
        let data = self.f.op(op);
        if let Some(what) = self.foreign(op) {
            return Action::Foreign(what);
        }
        let depends = data.operands().iter().any(|o| matches!(o, Operand::Value(v) if !constant[v.index()]));
        let action = match data.kind().as_str() {
            "const" => Action::Skip,
            "read_state" => Action::ReadState,
            "write_state" => Action::WriteState,
            "cond" => Action::Cond,
            "while_loop" => Action::While,
            kind => match ops::kernel(kind) {
                Some(_)
                    if kind.starts_with("constexpr_")
                        && data.results().iter().all(|&v| self.f.value(v).uses().is_empty()) =>
                {
                    Action::Skip
                }
                Some(kernel) if kind.starts_with("constexpr_") && !depends => Action::Fold(kernel),
                Some(kernel) => Action::Compute(kernel),
                None => Action::Opaque,
            },
        };
        if matches!(action, Action::Skip | Action::Fold(_)) {
            data.results().iter().for_each(|v| constant[v.index()] = true);
        }
        action
    }

    /// A parameter or attribute that the opset does not define for the op's kind. Its meaning is unknown, and with it
    /// that of the op.
    fn foreign(&self, op: OpId) -> Option<String> {
        let data = self.f.op(op);
        let version = opset::row(data.kind())?.version(self.f.opset_version())?;
        let param = data.params().map(|(name, _)| name).find(|name| version.param(name).is_none());
        if let Some(name) = param {
            return Some(format!("parameter `{name}`"));
        }
        let constant = data.kind() == "const" || data.kind().starts_with("constexpr_");
        let known = |name: &str| name == "name" || (constant && version.param(name).is_some());
        data.attributes().find(|(name, _)| !known(name)).map(|(name, _)| format!("attribute `{name}`"))
    }

    /// The position in `block` after which a value defined there is not read any more; `None` when the block returns
    /// it or nothing in it ever holds it.
    fn last_use(&self, v: ValueId, block: BlockId, position: &HashMap<OpId, usize>) -> Option<usize> {
        let data = self.f.value(v);
        let mut last = match data.def() {
            Def::Result(op, _) => position.get(&op).copied(),
            _ => None,
        };
        for &u in data.uses() {
            let user = match u {
                Use::Op { op, .. } => Some(op),
                Use::Output { block: b, .. } if b == block => return None,
                Use::Output { block: b, .. } => self.f.block(b).parent(),
            };
            let at = user.and_then(|op| self.f.ancestor_in(op, block)).and_then(|op| position.get(&op).copied());
            last = last.max(at);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Net, f16s, f32s, i32s, values};
    use super::*;
    use crate::ir::{DType, Dim, Literal, Place, SymbolRange};

    fn v(v: ValueId) -> [Operand; 1] {
        [Operand::Value(v)]
    }

    /// state += x; y = state · 2
    fn accumulator() -> Net {
        let mut net = Net::new();
        let x = net.input("x", DType::F16, &[2]);
        let s = net.state("s", DType::F16, &[2]);
        let end = net.end();
        let old = net.op(end, "read_state", &[("input", &v(s))], &["old"])[0];
        let new = net.op(end, "add", &[("x", &v(old)), ("y", &v(x))], &["new"])[0];
        net.op(end, "write_state", &[("input", &v(s)), ("data", &v(new))], &[]);
        let read = net.op(end, "read_state", &[("input", &v(s))], &["read"])[0];
        let two = net.literal(Literal::floats(DType::F16, &[], &[2.0]));
        let y = net.op(end, "mul", &[("x", &v(read)), ("y", &[two])], &["y"])[0];
        let body = net.f.body();
        net.f.add_output(body, y);
        net
    }

    #[test]
    fn states_start_at_zero_and_carry_over() {
        let net = accumulator();
        let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
        let mut states = Values::new();
        let mut seen = Vec::new();
        for step in 1..=3 {
            let inputs = values([("x", f16s(&[2], &[1.0, 10.0]))]);
            let out = interp
                .run_observed(&inputs, &mut states, &mut |v, _| seen.push(net.f.value(v).name().to_string()))
                .unwrap();
            assert_eq!(out["y"].to_f64s(), [2.0 * f64::from(step), 20.0 * f64::from(step)]);
        }
        assert_eq!(states["s"].to_f64s(), [3.0, 30.0]);
        assert_eq!(seen[..4], ["old", "new", "read", "y"]);
    }

    /// Two updates of one state in a row, the value read between them used again after the second when `again`.
    #[test]
    fn updates_in_place_are_not_seen_by_earlier_reads() {
        for again in [false, true] {
            let mut net = Net::new();
            let x = net.input("x", DType::F16, &[1]);
            let s = net.state("s", DType::F16, &[3]);
            let end = net.end();
            let mut reads = vec![net.op(end, "read_state", &[("input", &v(s))], &["r0"])[0]];
            for i in 0..2i64 {
                let (begin, stop) = (net.literal(Literal::ints(&[i])), net.literal(Literal::ints(&[i + 1])));
                let operands: [(&str, &[Operand]); 4] =
                    [("x", &v(reads[i as usize])), ("update", &v(x)), ("begin", &[begin]), ("end", &[stop])];
                let new = net.op(end, "slice_update", &operands, &["new"])[0];
                net.op(end, "write_state", &[("input", &v(s)), ("data", &v(new))], &[]);
                reads.push(net.op(end, "read_state", &[("input", &v(s))], &["read"])[0]);
            }
            let y = net.op(end, "identity", &[("x", &v(reads[if again { 1 } else { 2 }]))], &["y"])[0];
            let body = net.f.body();
            net.f.add_output(body, y);
            let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
            let start = f16s(&[3], &[7.0, 8.0, 9.0]);
            let mut states = values([("s", start.clone())]);
            let out = interp.run(&values([("x", f16s(&[1], &[1.0]))]), &mut states).unwrap();
            assert_eq!(out["y"].to_f64s(), [1.0, if again { 8.0 } else { 1.0 }, 9.0]);
            assert_eq!(states["s"].to_f64s(), [1.0, 1.0, 9.0]);
            assert_eq!(start.to_f64s(), [7.0, 8.0, 9.0]);
        }
    }

    /// y = state[1:2]; state[0:1] = x, the slice taken before the write and returned after it.
    fn writer() -> Net {
        let mut net = Net::new();
        let x = net.input("x", DType::F16, &[1]);
        let s = net.state("s", DType::F16, &[3]);
        let end = net.end();
        let [zero, one, two] = [0, 1, 2].map(|i| net.literal(Literal::ints(&[i])));
        let old = net.op(end, "read_state", &[("input", &v(s))], &["old"])[0];
        let part = [("x", &v(old)[..]), ("begin", std::slice::from_ref(&one)), ("end", std::slice::from_ref(&two))];
        let y = net.op(end, "slice_by_index", &part, &["y"])[0];
        let head =
            net.op(end, "slice_by_index", &[("x", &v(old)), ("begin", &[zero.clone()]), ("end", &[two])], &["h"])[0];
        let operands: [(&str, &[Operand]); 4] =
            [("x", &v(old)), ("update", &v(x)), ("begin", &[zero]), ("end", &[one])];
        let new = net.op(end, "slice_update", &operands, &["new"])[0];
        net.op(end, "write_state", &[("input", &v(s)), ("data", &v(new))], &[]);
        let body = net.f.body();
        net.f.add_output(body, y);
        net.f.add_output(body, head);
        net
    }

    #[test]
    fn states_given_away_are_updated_in_place() {
        let net = writer();
        let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
        let place = |states: &Values| states["s"].elements::<half::f16>().unwrap().as_ptr();
        let mut states = values([("s", f16s(&[3], &[7.0, 8.0, 9.0]))]);
        let (before, kept) = (place(&states), states.clone());
        let inputs = values([("x", f16s(&[1], &[1.0]))]);
        interp.run(&inputs, &mut states).unwrap();
        assert_eq!(kept["s"].to_f64s(), [7.0, 8.0, 9.0]);
        assert_ne!(place(&states), before, "what somebody holds is copied");
        let before = place(&states);
        let (out, states) = interp.advance(&values([("x", f16s(&[1], &[2.0]))]), states).unwrap();
        assert_eq!(place(&states), before);
        assert_eq!(states["s"].to_f64s(), [2.0, 8.0, 9.0]);
        assert_eq!((out["y"].to_f64s(), out["h"].to_f64s()), (vec![8.0], vec![1.0, 8.0]));
    }

    #[test]
    fn a_failed_run_leaves_states_alone() {
        let mut net = accumulator();
        let end = net.end();
        net.op(end, "mystery", &[], &["z"]);
        let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
        let mut states = Values::new();
        let error = interp.run(&values([("x", f16s(&[2], &[1.0, 1.0]))]), &mut states).unwrap_err();
        assert_eq!(error.to_string(), "main: mystery `z`");
        assert!(matches!(error.fault(), Some(Fault::NotInterpreted)));
        assert!(states.is_empty());
    }

    #[test]
    fn inputs_that_do_not_fit_are_refused() {
        let net = accumulator();
        let interp = Interpreter::new(&net.f, Mode::Exact).unwrap();
        let message = |inputs: Values, mut states: Values| {
            interp.run(&inputs, &mut states).unwrap_err().fault().map(ToString::to_string)
        };
        let good = || values([("x", f16s(&[2], &[1.0, 1.0]))]);
        assert_eq!(message(Values::new(), Values::new()).unwrap(), "its value is missing");
        assert_eq!(
            message(values([("x", f32s(&[2], &[1.0, 1.0]))]), Values::new()).unwrap(),
            "the given tensor is fp32, fp16 is needed"
        );
        let wrong = values([("x", f16s(&[3], &[1.0; 3]))]);
        assert!(message(wrong, Values::new()).unwrap().contains("does not fit"));
        assert!(message(good(), values([("s", f16s(&[1, 2], &[0.0; 2]))])).unwrap().contains("does not fit"));
        assert!(interp.run(&good(), &mut Values::new()).is_ok());
    }

    #[test]
    fn scalars_and_unknown_sizes_are_admitted() {
        let mut net = Net::new();
        let s = net.f.add_symbol(SymbolRange { lo: 1, hi: Some(3) });
        let x = net.f.add_input("x".into(), TensorType::new(DType::F32, [Dim::unknown(s)]).into());
        let p = net.input("p", DType::I32, &[]);
        let body = net.f.body();
        net.f.add_output(body, x);
        net.f.add_output(body, p);
        let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
        let run = |x, p| interp.run(&values([("x", x), ("p", p)]), &mut Values::new());
        let out = run(f32s(&[], &[7.0]), i32s(&[1], &[5])).unwrap();
        assert_eq!((out["x"].shape(), out["p"].shape()), (&[1][..], &[][..]));
        assert!(run(f32s(&[4], &[0.0; 4]), i32s(&[], &[5])).is_err());
    }

    /// while i < n { i += 1; t *= 2 }
    fn doubling() -> Net {
        let mut net = Net::new();
        let n = net.input("n", DType::I32, &[]);
        let end = net.end();
        let (zero, one) = (net.literal(Literal::int(0)), net.literal(Literal::int(1)));
        let vars = [zero.clone(), one.clone()];
        let results = net.op(end, "while_loop", &[("loop_vars", &vars)], &["i_end", "t_end"]);
        let op = net.f.producer(results[0]).unwrap();
        let (cond, body) = (net.f.add_block(op), net.f.add_block(op));
        let mut inputs = Vec::new();
        for block in [cond, body] {
            for name in ["i", "t"] {
                inputs.push(net.f.add_block_input(block, name.into(), TensorType::fixed(DType::I32, &[]).into()));
            }
        }
        let go = net.op(Place::End(cond), "less", &[("x", &v(inputs[0])), ("y", &v(n))], &["go"])[0];
        net.f.add_output(cond, go);
        let i = net.op(Place::End(body), "add", &[("x", &v(inputs[2])), ("y", &[one])], &["i_next"])[0];
        let t = net.op(Place::End(body), "add", &[("x", &v(inputs[3])), ("y", &v(inputs[3]))], &["t_next"])[0];
        net.f.add_output(body, i);
        net.f.add_output(body, t);
        let body = net.f.body();
        net.f.add_output(body, results[1]);
        net
    }

    #[test]
    fn loops_run_until_their_condition_fails() {
        let net = doubling();
        let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
        for (n, want) in [(0, 1), (1, 2), (10, 1024)] {
            let out = interp.run(&values([("n", i32s(&[], &[n]))]), &mut Values::new()).unwrap();
            assert_eq!(out["t_end"].to_i64s(), [want]);
        }
    }

    #[test]
    fn a_loop_without_end_is_stopped() {
        let net = doubling();
        let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
        let error = interp.run(&values([("n", i32s(&[], &[i32::MAX.into()]))]), &mut Values::new()).unwrap_err();
        assert!(matches!(error.fault(), Some(Fault::Endless(_))));
    }

    #[test]
    fn cond_takes_one_branch_and_sees_outer_values() {
        let mut net = Net::new();
        let (p, x) = (net.input("p", DType::Bool, &[]), net.input("x", DType::F32, &[2]));
        let end = net.end();
        let y = net.op(end, "cond", &[("pred", &v(p))], &["y"])[0];
        let op = net.f.producer(y).unwrap();
        for (kind, name) in [("exp", "a"), ("square", "b")] {
            let block = net.f.add_block(op);
            let out = net.op(Place::End(block), kind, &[("x", &v(x))], &[name])[0];
            net.f.add_output(block, out);
        }
        let body = net.f.body();
        net.f.add_output(body, y);
        let interp = Interpreter::new(&net.f, Mode::Storage).unwrap();
        let run = |p: bool| {
            let inputs = values([("p", Tensor::bools(&[], &[p])), ("x", f32s(&[2], &[0.0, 3.0]))]);
            interp.run(&inputs, &mut Values::new()).unwrap()["y"].to_f64s()
        };
        assert_eq!(run(true)[0], 1.0);
        assert_eq!(run(false), [0.0, 9.0]);
    }

    #[test]
    fn storage_mode_rounds_at_every_op_and_exact_mode_never() {
        let mut net = Net::new();
        let x = net.input("x", DType::F16, &[]);
        let end = net.end();
        let big = net.literal(Literal::floats(DType::F16, &[], &[2048.0]));
        let a = net.op(end, "add", &[("x", &v(x)), ("y", std::slice::from_ref(&big))], &["a"])[0];
        let b = net.op(end, "sub", &[("x", &v(a)), ("y", &[big])], &["b"])[0];
        let body = net.f.body();
        net.f.add_output(body, b);
        let run = |mode| {
            let out =
                Interpreter::new(&net.f, mode).unwrap().run(&values([("x", f16s(&[], &[1.0]))]), &mut Values::new());
            out.unwrap()["b"].to_f64s()
        };
        assert_eq!(run(Mode::Storage), [0.0]);
        assert_eq!(run(Mode::Exact), [1.0]);
    }
}
