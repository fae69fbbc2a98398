//! Decoders with a cache, from parameters: what the caches look like, how they are written, what attention does.

use milopt::ir::Program;
use milopt::text;

/// Slots of a cache.
pub const SLOTS: u64 = 8;
/// Size of a head.
const D: u64 = 4;

/// How keys and values are kept. `W` is the number of layers that write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// K and V each `[W, B, H, S, D]`.
    Stacked,
    /// One `[2W, H, S, D]`: K of layer i in row i, V in row W + i.
    Unified,
    /// K and V of each layer `[B, H, S, D]`.
    PerLayer,
    /// K and V of each layer `[H, S, D]`.
    PerLayerRank3,
    /// K and V each `[S, W·H·D]`, a range of columns a layer.
    Columns,
    /// K and V each `[W, B, S, H, D]`.
    RowsFirstStacked,
    /// K and V of each layer `[B, S, H, D]`.
    RowsFirst,
    /// K `[W, B, H, D, S]`, V `[W, B, H, S, D]`.
    KeysTransposed,
    /// K `[B, H, D, S]`, V `[B, H, S, D]` of each layer.
    KeysTransposedPerLayer,
}

/// Where the position of the new rows comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position {
    /// An input without axes.
    Scalar,
    /// An input of one element.
    Vector,
    /// It is always the same.
    Constant(u64),
    /// The mask has as many columns as there are rows in use, and attention reads so many.
    MaskShape,
}

/// How the bounds of updates and of slices of layers are spelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// Whether whole axes are marked in `begin_mask` and `end_mask`.
    pub masks: bool,
    /// What stands in `end` where it does not count.
    pub garbage: u64,
    /// Whether the axis of layers is squeezed.
    pub squeeze: bool,
    /// Whether vectors are made of scalars.
    pub scalars: bool,
}

/// What hides keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mask {
    /// `[1, 1, q, S]`.
    Rows,
    /// `[1, 1, 1, S]`.
    Row,
    /// `[S]`.
    Flat,
    /// `[1, heads, q, S]`.
    PerHead,
    /// `[B, 1, q, S]`.
    PerBatch,
    /// `[1, 1, q, S]` of booleans, through `select`.
    Select,
    /// Nothing.
    None,
}

/// What stands between the products.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Middle {
    Softmax,
    Softcap,
    /// A softcap of masked scores.
    CapBehind,
    /// A column that takes part in the softmax and is cut off.
    Sinks,
    /// Maximum, exponential, sum, quotient.
    Manual,
    /// Exponential, sum, quotient.
    ManualWithoutMax,
    /// The quotient is taken behind the second product.
    DividedLate,
    ScaleBehind,
    /// The softmax in 32 bits.
    Wide,
}

/// How the products are spelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Products {
    /// `x · Kᵀ` and `w · V`.
    Matmul,
    /// `K · xᵀ` and `wᵀ · V`, with a softmax on axis −2.
    KeysFirst,
    /// `einsum` with the keys on axis 1.
    Einsum,
    /// `scaled_dot_product_attention`.
    Fused,
}

/// How heads are repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeat {
    Tile,
    Gather,
    Stack,
}

/// A decoder.
#[derive(Clone, Debug)]
pub struct Model {
    pub form: Form,
    /// Whether everything but the content of the cache is in 32 bits.
    pub wide: bool,
    pub batch: u64,
    pub kv_heads: u64,
    /// Query heads a KV head.
    pub groups: u64,
    pub repeat: Repeat,
    /// New rows.
    pub rows: u64,
    /// Layers that write.
    pub layers: u64,
    /// Whether another layer reads the cache of the first.
    pub shared: bool,
    pub position: Position,
    pub bounds: Bounds,
    pub mask: Mask,
    pub middle: Middle,
    pub products: Products,
    /// Whether all layers write before the first attends.
    pub writes_first: bool,
    /// Whether a snapshot is read once for all that looks at it.
    pub one_read: bool,
    /// Whether an update of one row is spelled without the axis of rows.
    pub squeeze_row: bool,
}

/// An axis of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Axis {
    /// Layers, so many.
    Layers(u64),
    Batch,
    Heads,
    Slots,
    Dim,
    /// Heads and their elements, of so many layers.
    Columns(u64),
}

/// Where K or V of a layer is kept.
struct Place {
    state: String,
    axes: Vec<Axis>,
    /// The layer, on the axis of layers or columns.
    index: u64,
}

/// Rows of a cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows<'a> {
    All,
    UpTo(&'a str),
    Between(&'a [String; 2]),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Keys,
    Values,
}

/// MIL text under construction.
#[derive(Default)]
struct Text {
    body: String,
    count: usize,
    /// The last state that was looked at and its snapshot, if nothing was written since.
    snapshot: Option<(String, V)>,
}

/// Stands for the number of rows in use.
const UNKNOWN: u64 = u64::MAX;

impl Text {
    fn ty(dtype: &str, shape: &[u64]) -> String {
        let dims = shape.iter().map(|&n| if n == UNKNOWN { "s0".into() } else { n.to_string() });
        format!("tensor<{dtype}, [{}]>", dims.collect::<Vec<_>>().join(", "))
    }

    /// Adds an op and returns the name of its value.
    fn op(&mut self, dtype: &str, shape: &[u64], call: impl AsRef<str>) -> String {
        let name = format!("t{}", self.count);
        self.count += 1;
        self.body += &format!("    {} {name} = {};\n", Text::ty(dtype, shape), call.as_ref());
        name
    }

    fn transpose(&mut self, x: V, perm: &[usize]) -> V {
        if perm.is_sorted() {
            return x;
        }
        let shape: Vec<u64> = perm.iter().map(|&p| x.shape[p]).collect();
        let name = self.op(x.dtype, &shape, format!("transpose(x = {}, perm = {perm:?})", x.name));
        V { name, shape, ..x }
    }

    fn reshape(&mut self, x: V, shape: &[u64]) -> V {
        if x.shape == shape {
            return x;
        }
        let sizes: Vec<i64> = shape.iter().map(|&n| if n == UNKNOWN { -1 } else { n as i64 }).collect();
        let name = self.op(x.dtype, shape, format!("reshape(x = {}, shape = {sizes:?})", x.name));
        V { name, shape: shape.to_vec(), ..x }
    }

    fn cast(&mut self, x: V, dtype: &'static str) -> V {
        if x.dtype == dtype {
            return x;
        }
        let name = self.op(dtype, &x.shape, format!("cast(x = {}, dtype = \"{dtype}\")", x.name));
        V { name, dtype, ..x }
    }

    /// An elementwise op with the type of `x`.
    fn map(&mut self, x: &V, call: impl AsRef<str>) -> V {
        V { name: self.op(x.dtype, &x.shape, call), ..x.clone() }
    }
}

/// A value.
#[derive(Clone)]
struct V {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
}

impl Model {
    /// The number of states.
    pub fn states(&self) -> usize {
        match self.form {
            Form::Unified => 1,
            Form::Stacked | Form::Columns | Form::RowsFirstStacked | Form::KeysTransposed => 2,
            _ => 2 * self.layers as usize,
        }
    }

    /// Whether the cache has an axis for the batch.
    pub fn has_batch(form: Form) -> bool {
        !matches!(form, Form::Unified | Form::PerLayerRank3 | Form::Columns)
    }

    fn heads(&self) -> u64 {
        self.kv_heads * self.groups
    }

    fn dtype(&self) -> &'static str {
        if self.wide { "fp32" } else { "fp16" }
    }

    /// The rows that attention sees.
    fn seen(&self) -> u64 {
        if self.position == Position::MaskShape { UNKNOWN } else { SLOTS }
    }

    fn place(&self, part: Part, layer: u64) -> Place {
        use Axis::{Batch, Columns, Dim, Heads, Layers, Slots};
        let keys = part == Part::Keys;
        let name = if keys { "k" } else { "v" };
        let all = format!("{name}_cache");
        let own = format!("{name}_cache_{layer}");
        let w = self.layers;
        let (state, axes, index) = match self.form {
            Form::Stacked => (all, vec![Layers(w), Batch, Heads, Slots, Dim], layer),
            Form::Unified => {
                let row = if keys { layer } else { w + layer };
                ("cache".into(), vec![Layers(2 * w), Heads, Slots, Dim], row)
            }
            Form::PerLayer => (own, vec![Batch, Heads, Slots, Dim], 0),
            Form::PerLayerRank3 => (own, vec![Heads, Slots, Dim], 0),
            Form::Columns => (all, vec![Slots, Columns(w)], layer),
            Form::RowsFirstStacked => (all, vec![Layers(w), Batch, Slots, Heads, Dim], layer),
            Form::RowsFirst => (own, vec![Batch, Slots, Heads, Dim], 0),
            Form::KeysTransposed if keys => (all, vec![Layers(w), Batch, Heads, Dim, Slots], layer),
            Form::KeysTransposed => (all, vec![Layers(w), Batch, Heads, Slots, Dim], layer),
            Form::KeysTransposedPerLayer if keys => (own, vec![Batch, Heads, Dim, Slots], 0),
            Form::KeysTransposedPerLayer => (own, vec![Batch, Heads, Slots, Dim], 0),
        };
        Place { state, axes, index }
    }

    /// The size of an axis with so many rows.
    fn size(&self, axis: Axis, rows: u64) -> u64 {
        match axis {
            Axis::Layers(n) => n,
            Axis::Batch => self.batch,
            Axis::Heads => self.kv_heads,
            Axis::Slots => rows,
            Axis::Dim => D,
            Axis::Columns(n) => n * self.kv_heads * D,
        }
    }

    fn drops_row(&self) -> bool {
        self.squeeze_row && self.rows == 1
    }

    /// The part of a layer on each axis, with so many rows, as an update or as it is read.
    fn layer_shape(&self, place: &Place, rows: u64, update: bool) -> Vec<u64> {
        let one = |axis: &Axis| match axis {
            Axis::Slots if update && self.drops_row() => None,
            Axis::Layers(_) => (!self.bounds.squeeze).then_some(1),
            Axis::Columns(_) => Some(self.kv_heads * D),
            other => Some(self.size(*other, rows)),
        };
        place.axes.iter().filter_map(one).collect()
    }

    /// The order of the axes of `[B, H, rows, D]` in the cache, those that it lacks in front, and the sizes then.
    fn order(&self, place: &Place, rows: u64) -> (Vec<usize>, Vec<u64>) {
        let of = |axis: &Axis| match axis {
            Axis::Layers(_) => vec![],
            Axis::Batch => vec![0],
            Axis::Heads => vec![1],
            Axis::Slots => vec![2],
            Axis::Dim => vec![3],
            Axis::Columns(_) => vec![1, 3],
        };
        let mut order: Vec<usize> = place.axes.iter().flat_map(of).collect();
        if !order.contains(&0) {
            order.insert(0, 0);
        }
        let natural = [self.batch, self.kv_heads, rows, D];
        let sizes = order.iter().map(|&i| natural[i]).collect();
        (order, sizes)
    }

    /// `begin`, `end` and masks for rows of a layer's part.
    fn bounds(&self, t: &mut Text, place: &Place, rows: Rows<'_>) -> String {
        let mut begin = Vec::new();
        let mut end = Vec::new();
        let (mut open, mut open_end, mut squeeze) = (vec![], vec![], vec![]);
        let Bounds { masks, garbage, squeeze: drop, scalars } = self.bounds;
        for &axis in &place.axes {
            let (b, e, whole, dropped) = match axis {
                Axis::Slots if rows != Rows::All => match rows {
                    Rows::Between([from, to]) => (from.clone(), to.clone(), false, self.drops_row()),
                    Rows::UpTo(end) => ("0".into(), end.into(), false, false),
                    Rows::All => continue,
                },
                Axis::Layers(_) if drop => (place.index.to_string(), garbage.to_string(), false, true),
                Axis::Layers(_) => (place.index.to_string(), (place.index + 1).to_string(), false, false),
                Axis::Columns(_) => {
                    let width = self.kv_heads * D;
                    ((place.index * width).to_string(), ((place.index + 1) * width).to_string(), false, false)
                }
                _ if masks => ("0".into(), garbage.to_string(), true, false),
                other => ("0".into(), self.size(other, SLOTS).to_string(), false, false),
            };
            begin.push(b);
            end.push(e);
            // Reads from the first row on may say so by a mask or by a zero.
            open.push(whole || (masks && axis == Axis::Slots && matches!(rows, Rows::UpTo(_))));
            open_end.push(whole);
            squeeze.push(dropped);
        }
        let mut vector = |parts: Vec<String>| {
            let constant = |p: &String| p.parse::<u64>().is_ok();
            if parts.iter().all(constant) {
                return format!("[{}]", parts.join(", "));
            }
            let spelled = parts.iter().map(|p| match (constant(p), scalars) {
                (true, false) => format!("[{p}]"),
                _ => p.clone(),
            });
            let spelled = spelled.collect::<Vec<_>>().join(", ");
            t.op("int32", &[parts.len() as u64], format!("concat(values = ({spelled}), axis = 0, interleave = false)"))
        };
        let (begin, end) = (vector(begin), vector(end));
        let mut all = format!("begin = {begin}, end = {end}");
        for (name, mask) in [("begin_mask", open), ("end_mask", open_end), ("squeeze_mask", squeeze)] {
            if mask.contains(&true) {
                all += &format!(", {name} = {mask:?}");
            }
        }
        all
    }

    /// The position and the row behind the new ones, as `bounds` wants them.
    fn positions(&self, t: &mut Text) -> [String; 2] {
        let q = self.rows;
        let scalars = self.bounds.scalars;
        let (shape, as_wanted): (&[u64], _) = match (self.position, scalars) {
            (Position::Constant(p), _) => return [p.to_string(), (p + q).to_string()],
            (Position::Scalar, true) => (&[], "p".to_string()),
            (Position::Scalar, false) => (&[1], t.op("int32", &[1], "expand_dims(x = p, axes = [0])")),
            (Position::Vector, true) => (&[], t.op("int32", &[], "squeeze(x = p, axes = [0])")),
            (Position::Vector, false) => (&[1], "p".to_string()),
            (Position::MaskShape, _) => {
                let rank = self.mask_shape().len();
                let sizes = t.op("int32", &[rank as u64], "shape(x = mask)");
                let call = format!("slice_by_size(x = {sizes}, begin = [{}], size = [1])", rank - 1);
                let mut end = t.op("int32", &[1], call);
                if scalars {
                    end = t.op("int32", &[], format!("squeeze(x = {end}, axes = [0])"));
                }
                let shape: &[u64] = if scalars { &[] } else { &[1] };
                let call =
                    if scalars { format!("sub(x = {end}, y = {q})") } else { format!("sub(x = {end}, y = [{q}])") };
                return [t.op("int32", shape, call), end];
            }
        };
        let q = if scalars { q.to_string() } else { format!("[{q}]") };
        let end = t.op("int32", shape, format!("add(x = {as_wanted}, y = {q})"));
        [as_wanted, end]
    }

    /// Reads a state, in the type that is computed in.
    fn read(&self, t: &mut Text, place: &Place) -> V {
        let shape: Vec<u64> = place.axes.iter().map(|a| self.size(*a, SLOTS)).collect();
        let name = t.op("fp16", &shape, format!("read_state(input = {})", place.state));
        t.cast(V { name, dtype: "fp16", shape }, self.dtype())
    }

    /// Writes `[B, H, q, D]` into a layer's part of a cache.
    fn write(&self, t: &mut Text, place: &Place, rows: V, position: &[String; 2]) {
        let (order, _) = self.order(place, self.rows);
        let moved = t.transpose(rows, &order);
        let update = t.reshape(moved, &self.layer_shape(place, self.rows, true));
        let whole = self.read(t, place);
        let bounds = self.bounds(t, place, Rows::Between(position));
        let updated = t.map(&whole, format!("slice_update(x = {}, update = {}, {bounds})", whole.name, update.name));
        let data = t.cast(updated, "fp16");
        t.snapshot = None;
        t.body += &format!("    write_state(input = {}, data = {});\n", place.state, data.name);
    }

    /// A layer's part of a cache as `[B, H, n, D]`.
    fn look(&self, t: &mut Text, place: &Place, end: &str) -> V {
        let n = self.seen();
        let whole = match &t.snapshot {
            Some((state, snapshot)) if self.one_read && *state == place.state => snapshot.clone(),
            _ => self.read(t, place),
        };
        t.snapshot = Some((place.state.clone(), whole.clone()));
        let shape = self.layer_shape(place, n, false);
        let sliced = match shape == whole.shape {
            true => whole,
            false => {
                let rows = if n == UNKNOWN { Rows::UpTo(end) } else { Rows::All };
                let bounds = self.bounds(t, place, rows);
                let name = t.op(whole.dtype, &shape, format!("slice_by_index(x = {}, {bounds})", whole.name));
                V { name, shape, ..whole }
            }
        };
        let (order, sizes) = self.order(place, n);
        let split = t.reshape(sliced, &sizes);
        let back: Vec<usize> = (0..4).filter_map(|i| order.iter().position(|&o| o == i)).collect();
        t.transpose(split, &back)
    }

    /// `[B, H, n, D]` with its heads repeated.
    fn repeated(&self, t: &mut Text, x: V) -> V {
        let (g, h) = (self.groups, self.kv_heads);
        if g == 1 {
            return x;
        }
        let mut shape = x.shape.clone();
        let mut wide = shape.clone();
        wide.insert(2, g);
        shape[1] = h * g;
        let name = &x.name;
        match self.repeat {
            Repeat::Gather => {
                let indices: Vec<u64> = (0..h * g).map(|i| i / g).collect();
                let name = t.op(
                    x.dtype,
                    &shape,
                    format!("gather(x = {name}, indices = {indices:?}, axis = 1, batch_dims = 0)"),
                );
                V { name, shape, ..x }
            }
            Repeat::Stack => {
                let parts = vec![name.as_str(); g as usize].join(", ");
                let name = t.op(x.dtype, &wide, format!("stack(values = ({parts}), axis = 2)"));
                t.reshape(V { name, shape: wide, ..x }, &shape)
            }
            Repeat::Tile => {
                let mut one = wide.clone();
                one[2] = 1;
                let name = t.op(x.dtype, &one, format!("expand_dims(x = {name}, axes = [2])"));
                let name = t.op(x.dtype, &wide, format!("tile(x = {name}, reps = [1, 1, {g}, 1, 1])"));
                t.reshape(V { name, shape: wide, ..x }, &shape)
            }
        }
    }

    fn mask_shape(&self) -> Vec<u64> {
        let n = self.seen();
        match self.mask {
            Mask::Rows | Mask::Select => vec![1, 1, self.rows, n],
            Mask::Row => vec![1, 1, 1, n],
            Mask::Flat => vec![n],
            Mask::PerHead => vec![1, self.heads(), self.rows, n],
            Mask::PerBatch => vec![self.batch, 1, self.rows, n],
            Mask::None => vec![],
        }
    }

    fn mask_type(&self) -> String {
        Text::ty(if self.mask == Mask::Select { "bool" } else { self.dtype() }, &self.mask_shape())
    }

    /// Attention of `x` [B, heads, q, D] over repeated keys and values.
    fn attention(&self, t: &mut Text, x: &V, k: &V, v: &V) -> V {
        let (b, h, q, n) = (self.batch, self.heads(), self.rows, self.seen());
        // The order of the axes [B, heads, q, n] of the scores.
        let order: [usize; 4] = match self.products {
            Products::Fused => {
                let mask = if self.mask == Mask::None { "" } else { ", attn_mask = mask" };
                let call = format!(
                    "scaled_dot_product_attention(query = {}, key = {}, value = {}{mask})",
                    x.name, k.name, v.name
                );
                return t.map(x, call);
            }
            Products::Matmul => [0, 1, 2, 3],
            Products::KeysFirst => [0, 1, 3, 2],
            Products::Einsum => [0, 3, 1, 2],
        };
        let shape: Vec<u64> = order.iter().map(|&i| [b, h, q, n][i]).collect();
        let einsum =
            |a: &str, c: &str, equation: &str| format!("einsum(values = ({a}, {c}), equation = \"{equation}\")");
        let call = match self.products {
            Products::KeysFirst => {
                format!("matmul(x = {}, y = {}, transpose_x = false, transpose_y = true)", k.name, x.name)
            }
            Products::Einsum => {
                // [B, D, heads, q] and [B, n, heads, D].
                let x = t.transpose(x.clone(), &[0, 3, 1, 2]);
                let k = t.transpose(k.clone(), &[0, 2, 1, 3]);
                einsum(&k.name, &x.name, "bkhc,bchq->bkhq")
            }
            _ => format!("matmul(x = {}, y = {}, transpose_x = false, transpose_y = true)", x.name, k.name),
        };
        let name = t.op(x.dtype, &shape, call);
        let scores = V { name, dtype: x.dtype, shape };
        let axis = order.iter().position(|&i| i == 3).unwrap_or(3);
        let mask = self.ordered_mask(t, &order);
        let (weights, sum) = self.middle(t, scores, mask.as_ref(), axis);
        let (w, y) = (&weights.name, &v.name);
        let out = match self.products {
            Products::KeysFirst => {
                t.map(x, format!("matmul(x = {w}, y = {y}, transpose_x = true, transpose_y = false)"))
            }
            Products::Einsum => {
                // [B, D, heads, n].
                let v = t.transpose(v.clone(), &[0, 3, 1, 2]);
                let shape = [b, D, h, q];
                let name = t.op(x.dtype, &shape, einsum(&v.name, &weights.name, "bchk,bkhq->bchq"));
                t.transpose(V { name, dtype: x.dtype, shape: shape.to_vec() }, &[0, 2, 3, 1])
            }
            _ => t.map(x, format!("matmul(x = {w}, y = {y}, transpose_x = false, transpose_y = false)")),
        };
        let Some(sum) = sum else { return out };
        // The sums [.., 1] in the order of the scores, next to [B, heads, q, D].
        let back: Vec<usize> = (0..4).filter_map(|i| order.iter().position(|&o| o == i)).collect();
        let sum = t.transpose(sum, &back);
        t.map(&out, format!("real_div(x = {}, y = {})", out.name, sum.name))
    }

    /// The mask with its axes in the order of the scores.
    fn ordered_mask(&self, t: &mut Text, order: &[usize; 4]) -> Option<V> {
        let dtype = if self.mask == Mask::Select { "bool" } else { self.dtype() };
        let mask = V { name: "mask".into(), dtype, shape: self.mask_shape() };
        match self.mask {
            Mask::None => None,
            _ if order.is_sorted() => Some(mask),
            Mask::Flat => {
                let behind = 3 - order.iter().position(|&i| i == 3).unwrap_or(3);
                let mut shape = mask.shape.clone();
                shape.extend(vec![1; behind]);
                let axes: Vec<usize> = (1..=behind).collect();
                let name = t.op(dtype, &shape, format!("expand_dims(x = mask, axes = {axes:?})"));
                Some(V { name, shape, ..mask })
            }
            _ => Some(t.transpose(mask, order)),
        }
    }

    fn masked(&self, t: &mut Text, s: V, mask: Option<&V>) -> V {
        match mask {
            None => s,
            Some(m) if m.dtype == "bool" => {
                t.map(&s, format!("select(cond = {}, a = {}, b = {}(-10000.0))", m.name, s.name, s.dtype))
            }
            Some(m) => t.map(&s, format!("add(x = {}, y = {})", s.name, m.name)),
        }
    }

    /// From scores to weights, and what the second product is to be divided by.
    fn middle(&self, t: &mut Text, s: V, mask: Option<&V>, axis: usize) -> (V, Option<V>) {
        let dtype = s.dtype;
        let c = |x: &str| format!("{dtype}({x})");
        let softmax = |t: &mut Text, s: &V| t.map(s, format!("softmax(x = {}, axis = {})", s.name, axis as i64 - 4));
        let mut reduced = s.shape.clone();
        reduced[axis] = 1;
        let reduce = |t: &mut Text, kind: &str, s: &V| {
            let call = format!("{kind}(x = {}, axes = [{axis}], keep_dims = true)", s.name);
            V { name: t.op(dtype, &reduced, call), dtype, shape: reduced.clone() }
        };
        let cap = |t: &mut Text, s: &V| {
            let a = t.map(s, format!("mul(x = {}, y = {})", s.name, c("0.125")));
            let a = t.map(s, format!("tanh(x = {})", a.name));
            t.map(s, format!("mul(x = {}, y = {})", a.name, c("8.0")))
        };
        match self.middle {
            Middle::Softmax => {
                let a = t.map(&s, format!("mul(x = {}, y = {})", s.name, c("0.5")));
                let a = self.masked(t, a, mask);
                (softmax(t, &a), None)
            }
            Middle::Softcap => {
                let a = cap(t, &s);
                let a = self.masked(t, a, mask);
                (softmax(t, &a), None)
            }
            Middle::CapBehind => {
                let a = self.masked(t, s, mask);
                let a = cap(t, &a);
                (softmax(t, &a), None)
            }
            Middle::ScaleBehind => {
                let a = self.masked(t, s.clone(), mask);
                let a = t.map(&s, format!("mul(x = {}, y = {})", a.name, c("1.5")));
                (softmax(t, &a), None)
            }
            Middle::Wide => {
                let a = self.masked(t, s, mask);
                let a = t.cast(a, "fp32");
                let a = softmax(t, &a);
                (t.cast(a, dtype), None)
            }
            Middle::Sinks => {
                let a = self.masked(t, s.clone(), mask);
                let volume: u64 = reduced.iter().product();
                let numbers: Vec<String> = (0..volume).map(|i| format!("{}.5", i % 3)).collect();
                let sink = format!("{}([{}])", Text::ty(dtype, &reduced), numbers.join(", "));
                let mut more = s.shape.clone();
                let unknown = more[axis] == UNKNOWN;
                more[axis] = if unknown { UNKNOWN } else { SLOTS + 1 };
                let call = format!("concat(values = ({}, {sink}), axis = {axis}, interleave = false)", a.name);
                let name = t.op(dtype, &more, call);
                let a = softmax(t, &V { name, dtype, shape: more });
                let (mut end, mut open) = (vec![0; 4], vec![true; 4]);
                end[axis] = if unknown { -1 } else { SLOTS as i64 };
                open[axis] = false;
                let call =
                    format!("slice_by_index(x = {}, begin = [0, 0, 0, 0], end = {end:?}, end_mask = {open:?})", a.name);
                (t.map(&s, call), None)
            }
            Middle::Manual => {
                let a = self.masked(t, s, mask);
                let max = reduce(t, "reduce_max", &a);
                let a = t.map(&a, format!("sub(x = {}, y = {})", a.name, max.name));
                let a = t.map(&a, format!("exp(x = {})", a.name));
                let sum = reduce(t, "reduce_sum", &a);
                (t.map(&a, format!("real_div(x = {}, y = {})", a.name, sum.name)), None)
            }
            Middle::ManualWithoutMax => {
                let a = self.masked(t, s, mask);
                let a = t.map(&a, format!("exp(x = {})", a.name));
                let sum = reduce(t, "reduce_sum", &a);
                (t.map(&a, format!("real_div(x = {}, y = {})", a.name, sum.name)), None)
            }
            Middle::DividedLate => {
                let a = self.masked(t, s, mask);
                let max = reduce(t, "reduce_max", &a);
                let a = t.map(&a, format!("sub(x = {}, y = {})", a.name, max.name));
                let a = t.map(&a, format!("exp(x = {})", a.name));
                let sum = reduce(t, "reduce_sum", &a);
                (a, Some(sum))
            }
        }
    }

    /// The new keys and values of a layer, [B, H, q, D].
    fn entries(&self, t: &mut Text, x: &V) -> [V; 2] {
        let shape = [self.batch, self.kv_heads, self.rows, D];
        let call = format!("slice_by_size(x = {}, begin = [0, 0, 0, 0], size = {shape:?})", x.name);
        let half = V { name: t.op(x.dtype, &shape, call), dtype: x.dtype, shape: shape.to_vec() };
        ["0.5", "0.75"].map(|c| t.map(&half, format!("mul(x = {}, y = {}({c}))", half.name, half.dtype)))
    }

    /// The MIL text.
    pub fn text(&self) -> String {
        let mut t = Text::default();
        let dtype = self.dtype();
        let shape = vec![self.batch, self.heads(), self.rows, D];
        let mut x = V { name: "x".into(), dtype, shape };
        let mut inputs = vec![format!("{} x", Text::ty(dtype, &x.shape))];
        match self.position {
            Position::Scalar => inputs.push("tensor<int32, []> p".into()),
            Position::Vector => inputs.push("tensor<int32, [1]> p".into()),
            _ => {}
        }
        if self.mask != Mask::None {
            inputs.push(format!("{} mask", self.mask_type()));
        }
        for layer in 0..self.layers {
            for part in [Part::Keys, Part::Values] {
                let place = self.place(part, layer);
                let shape: Vec<u64> = place.axes.iter().map(|a| self.size(*a, SLOTS)).collect();
                let input = format!("state<{}> {}", Text::ty("fp16", &shape), place.state);
                if !inputs.contains(&input) {
                    inputs.push(input);
                }
            }
        }
        let position = self.positions(&mut t);
        let places = |layer| [Part::Keys, Part::Values].map(|part| self.place(part, layer));
        if self.writes_first {
            for layer in 0..self.layers {
                let scaled = t.map(&x, format!("mul(x = x, y = {dtype}(0.{}))", 9 - layer));
                let entries = self.entries(&mut t, &scaled);
                for (place, rows) in places(layer).iter().zip(entries) {
                    self.write(&mut t, place, rows, &position);
                }
            }
        }
        for layer in 0..self.layers + u64::from(self.shared) {
            let of = layer % self.layers;
            if layer < self.layers && !self.writes_first {
                let entries = self.entries(&mut t, &x);
                for (place, rows) in places(of).iter().zip(entries) {
                    self.write(&mut t, place, rows, &position);
                }
            }
            let [k, v] = places(of).map(|place| {
                let part = self.look(&mut t, &place, &position[1]);
                self.repeated(&mut t, part)
            });
            x = self.attention(&mut t, &x, &k, &v);
        }
        let range = match self.position {
            Position::MaskShape => format!(" where {} <= s0 <= {SLOTS}", self.rows),
            _ => String::new(),
        };
        format!(
            "program(1.3) [specificationVersion = 9] {{\n  func main<CoreML8>({}){range} {{\n{}  }} -> ({});\n}}\n",
            inputs.join(", "),
            t.body,
            x.name
        )
    }

    /// The program.
    pub fn program(&self) -> Program {
        let text = self.text();
        text::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }
}
