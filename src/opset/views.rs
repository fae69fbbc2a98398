//! Typed readers of the ops that analyses and rewrites look at.
//!
//! `View::of(f, op)` answers `None` when the op is of another kind, when a parameter it shows is not constant or cannot
//! be read, or when a data operand is a literal where a value is shown. Defaults are filled in and axes count from the
//! front.

use crate::ir::{DType, Function, OpId, Operand, ValueId};

use super::context;
use super::infer::{Context, slice_axes};

pub use super::infer::AxisSlice;

/// The context of an op when it is of one of these kinds.
fn reader<'f>(f: &'f Function, op: OpId, kinds: &[&str]) -> Option<Context<'f>> {
    kinds.contains(&f.op(op).kind().as_str()).then(|| context(f, op)).flatten()
}

fn rank(f: &Function, v: ValueId) -> Option<usize> {
    f.tensor(v).map(|t| t.rank())
}

fn operand(f: &Function, op: OpId, name: &str) -> Option<Operand> {
    match f.op(op).param(name) {
        [one] => Some(one.clone()),
        _ => None,
    }
}

fn values(f: &Function, op: OpId) -> Option<Vec<ValueId>> {
    f.op(op).param("values").iter().map(Operand::as_value).collect()
}

/// `matmul`.
#[derive(Clone, PartialEq, Debug)]
pub struct Matmul {
    /// Left side.
    pub x: ValueId,
    /// Right side.
    pub y: ValueId,
    /// Whether the last two axes of `x` are swapped first.
    pub transpose_x: bool,
    /// Whether the last two axes of `y` are swapped first.
    pub transpose_y: bool,
}

impl Matmul {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Matmul> {
        let c = reader(f, op, &["matmul"])?;
        Some(Matmul {
            x: f.op(op).value("x")?,
            y: f.op(op).value("y")?,
            transpose_x: c.bool("transpose_x").ok()?,
            transpose_y: c.bool("transpose_y").ok()?,
        })
    }
}

/// `linear`: `x · weightᵀ + bias`.
#[derive(Clone, PartialEq, Debug)]
pub struct Linear {
    /// Input.
    pub x: ValueId,
    /// `[out, in]`.
    pub weight: Operand,
    /// `[out]`; zero when absent.
    pub bias: Option<Operand>,
}

impl Linear {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Linear> {
        reader(f, op, &["linear"])?;
        let (weight, bias) = (operand(f, op, "weight")?, operand(f, op, "bias"));
        Some(Linear { x: f.op(op).value("x")?, weight, bias })
    }
}

/// `scaled_dot_product_attention`.
#[derive(Clone, PartialEq, Debug)]
pub struct Attention {
    /// `[…, q_len, head_dim]`.
    pub query: ValueId,
    /// `[…, ctx, head_dim]`.
    pub key: ValueId,
    /// `[…, ctx, value_dim]`.
    pub value: ValueId,
    /// Added to the scores, or bool: true keeps.
    pub mask: Option<Operand>,
}

impl Attention {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Attention> {
        reader(f, op, &["scaled_dot_product_attention"])?;
        let value = |name| f.op(op).value(name);
        let mask = operand(f, op, "attn_mask");
        Some(Attention { query: value("query")?, key: value("key")?, value: value("value")?, mask })
    }
}

/// `reshape`.
#[derive(Clone, PartialEq, Debug)]
pub struct Reshape {
    /// Input.
    pub x: ValueId,
    /// Sizes, constant or computed. What they come to is the type of the result.
    pub shape: Operand,
}

impl Reshape {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Reshape> {
        reader(f, op, &["reshape"])?;
        Some(Reshape { x: f.op(op).value("x")?, shape: operand(f, op, "shape")? })
    }
}

/// `transpose`.
#[derive(Clone, PartialEq, Debug)]
pub struct Transpose {
    /// Input.
    pub x: ValueId,
    /// Axis `i` of the result is axis `perm[i]` of `x`.
    pub perm: Vec<usize>,
}

impl Transpose {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Transpose> {
        let c = reader(f, op, &["transpose"])?;
        let x = f.op(op).value("x")?;
        let perm = c.axes("perm", rank(f, x)?).ok()??;
        let mut sorted = perm.clone();
        sorted.sort_unstable();
        sorted.into_iter().eq(0..rank(f, x)?).then_some(Transpose { x, perm })
    }
}

/// `tile`.
#[derive(Clone, PartialEq, Debug)]
pub struct Tile {
    /// Input.
    pub x: ValueId,
    /// Repetitions of each axis, all positive; `None` when they are computed.
    pub reps: Option<Vec<u64>>,
}

impl Tile {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Tile> {
        let c = reader(f, op, &["tile"])?;
        let x = f.op(op).value("x")?;
        let reps = match c.ints("reps") {
            None => None,
            Some(reps) => {
                let reps = reps.into_iter().map(|n| u64::try_from(n).ok().filter(|n| *n > 0)).collect::<Option<_>>();
                Some(reps.filter(|reps: &Vec<u64>| Some(reps.len()) == rank(f, x))?)
            }
        };
        Some(Tile { x, reps })
    }
}

/// `softmax`.
#[derive(Clone, PartialEq, Debug)]
pub struct Softmax {
    /// Input.
    pub x: ValueId,
    /// Axis that sums to one.
    pub axis: usize,
}

impl Softmax {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Softmax> {
        let c = reader(f, op, &["softmax"])?;
        let x = f.op(op).value("x")?;
        Some(Softmax { x, axis: c.axis("axis", rank(f, x)?).ok()? })
    }
}

/// `slice_by_index`, or what `slice_update` replaces.
#[derive(Clone, PartialEq, Debug)]
pub struct Slice {
    /// Sliced tensor.
    pub x: ValueId,
    /// What replaces the slice, for `slice_update`.
    pub update: Option<ValueId>,
    /// What is taken of each axis of `x`.
    pub axes: Vec<AxisSlice>,
}

impl Slice {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Slice> {
        let c = reader(f, op, &["slice_by_index", "slice_update"])?;
        let x = f.op(op).value("x")?;
        let update = match f.op(op).kind().as_str() {
            "slice_update" => Some(f.op(op).value("update")?),
            _ => None,
        };
        let shape: Vec<_> = f.tensor(x)?.shape.iter().cloned().map(Some).collect();
        Some(Slice { x, update, axes: slice_axes(&c, &shape).ok()? })
    }
}

/// `slice_by_size`.
#[derive(Clone, PartialEq, Debug)]
pub struct SliceBySize {
    /// Sliced tensor.
    pub x: ValueId,
    /// First index on each axis, constant or computed.
    pub begin: Operand,
    /// Sizes as spelled, -1 up to the end; `None` when they are computed.
    pub size: Option<Vec<i64>>,
}

impl SliceBySize {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<SliceBySize> {
        let c = reader(f, op, &["slice_by_size"])?;
        Some(SliceBySize { x: f.op(op).value("x")?, begin: operand(f, op, "begin")?, size: c.ints("size") })
    }
}

/// `concat` without interleaving.
#[derive(Clone, PartialEq, Debug)]
pub struct Concat {
    /// Joined tensors.
    pub values: Vec<ValueId>,
    /// Axis along which they are joined.
    pub axis: usize,
}

impl Concat {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Concat> {
        let c = reader(f, op, &["concat"])?;
        if c.bool("interleave").ok()? {
            return None;
        }
        let values = values(f, op)?;
        let axis = c.axis("axis", rank(f, *values.first()?)?).ok()?;
        Some(Concat { values, axis })
    }
}

/// `stack`.
#[derive(Clone, PartialEq, Debug)]
pub struct Stack {
    /// Stacked tensors.
    pub values: Vec<ValueId>,
    /// The new axis, counted in the result.
    pub axis: usize,
}

impl Stack {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Stack> {
        let c = reader(f, op, &["stack"])?;
        let values = values(f, op)?;
        let axis = c.axis("axis", rank(f, *values.first()?)? + 1).ok()?;
        Some(Stack { values, axis })
    }
}

/// `split`.
#[derive(Clone, PartialEq, Debug)]
pub struct Split {
    /// Input.
    pub x: ValueId,
    /// Axis that is cut.
    pub axis: usize,
    /// Size of each part; `None` for equal parts of an unknown size.
    pub sizes: Option<Vec<u64>>,
}

impl Split {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Split> {
        let c = reader(f, op, &["split"])?;
        let x = f.op(op).value("x")?;
        let axis = c.axis("axis", rank(f, x)?).ok()?;
        let sizes = f.op(op).results().iter().map(|&v| f.tensor(v)?.shape.get(axis)?.as_known()).collect();
        Some(Split { x, axis, sizes })
    }
}

/// `expand_dims`.
#[derive(Clone, PartialEq, Debug)]
pub struct ExpandDims {
    /// Input.
    pub x: ValueId,
    /// New axes, ascending, counted in the result.
    pub axes: Vec<usize>,
}

impl ExpandDims {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<ExpandDims> {
        let c = reader(f, op, &["expand_dims"])?;
        let x = f.op(op).value("x")?;
        let result = rank(f, x)?.checked_add(c.ints("axes")?.len())?;
        let mut axes = c.axes("axes", result).ok()??;
        axes.sort_unstable();
        Some(ExpandDims { x, axes })
    }
}

/// `squeeze`.
#[derive(Clone, PartialEq, Debug)]
pub struct Squeeze {
    /// Input.
    pub x: ValueId,
    /// Axes that go, ascending: the listed ones of size one, or all of size one.
    pub axes: Vec<usize>,
}

impl Squeeze {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Squeeze> {
        let c = reader(f, op, &["squeeze"])?;
        let x = f.op(op).value("x")?;
        let t = f.tensor(x)?;
        let listed = c.axes("axes", t.rank()).ok()?;
        let goes = |i: &usize| t.shape[*i].is_one() && listed.as_ref().is_none_or(|l| l.contains(i));
        Some(Squeeze { x, axes: (0..t.rank()).filter(goes).collect() })
    }
}

/// `reduce_*` with a list of axes.
#[derive(Clone, PartialEq, Debug)]
pub struct Reduce {
    /// Input.
    pub x: ValueId,
    /// Reduced axes, ascending.
    pub axes: Vec<usize>,
    /// Whether they stay with size one.
    pub keep_dims: bool,
}

impl Reduce {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Reduce> {
        let c = context(f, op).filter(|c| {
            f.op(op).kind().starts_with("reduce_") && c.takes("axes")
        })?;
        let x = f.op(op).value("x")?;
        let rank = rank(f, x)?;
        let mut axes = c.axes("axes", rank).ok()?.unwrap_or_else(|| (0..rank).collect());
        axes.sort_unstable();
        axes.dedup();
        Some(Reduce { x, axes, keep_dims: c.bool("keep_dims").ok()? })
    }
}

/// The kinds that [`Binary`] reads.
pub const BINARY: &[&str] = &[
    "add", "sub", "mul", "real_div", "floor_div", "mod", "pow", "maximum", "minimum", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
];

/// An elementwise op of two operands that broadcast: one of [`BINARY`].
#[derive(Clone, PartialEq, Debug)]
pub struct Binary {
    /// Left operand.
    pub x: Operand,
    /// Right operand.
    pub y: Operand,
}

impl Binary {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Binary> {
        reader(f, op, BINARY)?;
        Some(Binary { x: operand(f, op, "x")?, y: operand(f, op, "y")? })
    }
}

/// `select`.
#[derive(Clone, PartialEq, Debug)]
pub struct Select {
    /// Condition.
    pub cond: Operand,
    /// Where it holds.
    pub a: Operand,
    /// Elsewhere.
    pub b: Operand,
}

impl Select {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Select> {
        reader(f, op, &["select"])?;
        Some(Select { cond: operand(f, op, "cond")?, a: operand(f, op, "a")?, b: operand(f, op, "b")? })
    }
}

/// `cast`.
#[derive(Clone, PartialEq, Debug)]
pub struct Cast {
    /// Input.
    pub x: ValueId,
    /// Element type of the result.
    pub dtype: DType,
}

impl Cast {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Cast> {
        reader(f, op, &["cast"])?;
        Some(Cast { x: f.op(op).value("x")?, dtype: DType::from_name(f.str(op, "dtype")?)? })
    }
}

/// `pad` with constant amounts.
#[derive(Clone, PartialEq, Debug)]
pub struct Pad<'f> {
    /// Input.
    pub x: ValueId,
    /// Elements before and after, for every axis of `x`.
    pub pads: Vec<(i64, i64)>,
    /// `constant`, `reflect` or `replicate`.
    pub mode: &'f str,
}

impl<'f> Pad<'f> {
    /// Reads the op.
    pub fn of(f: &'f Function, op: OpId) -> Option<Pad<'f>> {
        let c = reader(f, op, &["pad"])?;
        let x = f.op(op).value("x")?;
        let amounts = c.ints("pad")?;
        let mut pads = vec![(0, 0); rank(f, x)?.checked_sub(amounts.len() / 2)?];
        pads.extend(amounts.chunks_exact(2).map(|p| (p[0], p[1])));
        Some(Pad { x, pads, mode: c.str("mode").ok()? })
    }
}

/// `gather`.
#[derive(Clone, PartialEq, Debug)]
pub struct Gather {
    /// Input.
    pub x: Operand,
    /// Indices into `axis`.
    pub indices: Operand,
    /// Axis of `x` that is indexed.
    pub axis: usize,
    /// Leading axes that `x` and `indices` share.
    pub batch_dims: usize,
}

impl Gather {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<Gather> {
        let c = reader(f, op, &["gather"])?;
        let (x, indices) = (operand(f, op, "x")?, operand(f, op, "indices")?);
        let axis = c.axis("axis", f.operand_type(&x).as_tensor()?.rank()).ok()?;
        let batch_dims = if c.takes("batch_dims") { usize::try_from(c.int("batch_dims").ok()?).ok()? } else { 0 };
        Some(Gather { x, indices, axis, batch_dims })
    }
}

/// `read_state`.
#[derive(Clone, PartialEq, Debug)]
pub struct ReadState {
    /// The state.
    pub state: ValueId,
    /// Its content.
    pub result: ValueId,
}

impl ReadState {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<ReadState> {
        reader(f, op, &["read_state"])?;
        Some(ReadState { state: f.op(op).value("input")?, result: *f.op(op).results().first()? })
    }
}

/// `write_state`.
#[derive(Clone, PartialEq, Debug)]
pub struct WriteState {
    /// The state.
    pub state: ValueId,
    /// Its new content.
    pub data: ValueId,
}

impl WriteState {
    /// Reads the op.
    pub fn of(f: &Function, op: OpId) -> Option<WriteState> {
        reader(f, op, &["write_state"])?;
        Some(WriteState { state: f.op(op).value("input")?, data: f.op(op).value("data")? })
    }
}
