//! Random attention blocks, as MIL text.

use milopt::ir::Program;
use proptest::prelude::*;

use super::support::program;
use super::ty;

/// A function that is being written.
#[derive(Default)]
pub struct Graph {
    inputs: Vec<String>,
    body: String,
    /// Names and shapes of what the ops compute, all of them 16-bit floats.
    pub values: Vec<(String, Vec<u64>)>,
    /// What is returned.
    pub outputs: Vec<String>,
}

impl Graph {
    /// A new input.
    pub fn input(&mut self, dtype: &str, name: &str, shape: &[u64]) {
        self.inputs.push(format!("{} {name}", ty(dtype, shape)));
    }

    /// A new state.
    pub fn state(&mut self, name: &str, shape: &[u64]) {
        self.inputs.push(format!("state<{}> {name}", ty("fp16", shape)));
    }

    /// Ops as they are.
    pub fn text(&mut self, text: &str) {
        self.body += text;
        self.body.push('\n');
    }

    /// An op with one result of another element type, or of no interest to others.
    pub fn typed(&mut self, dtype: &str, name: &str, shape: &[u64], call: &str) {
        self.text(&format!("{} {name} = {call};", ty(dtype, shape)));
    }

    /// An op with one result.
    pub fn op(&mut self, name: &str, shape: &[u64], call: &str) {
        self.typed("fp16", name, shape, call);
        self.values.push((name.into(), shape.to_vec()));
    }

    /// The whole as a program.
    pub fn program(&self) -> Program {
        program(&self.inputs.join(", "), &self.body, &self.outputs.join(", "))
    }
}

/// A shape with another size on one axis.
pub fn resized(shape: &[u64], axis: usize, size: u64) -> Vec<u64> {
    let mut out = shape.to_vec();
    out[axis] = size;
    out
}

/// How a repeat is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Spelling {
    Expand,
    Interleave,
    Stack,
    Gather,
    HeadTile,
    CopiesFirst,
}

impl Spelling {
    /// Every spelling.
    pub const ALL: [Spelling; 6] = [
        Spelling::Expand,
        Spelling::Interleave,
        Spelling::Stack,
        Spelling::Gather,
        Spelling::HeadTile,
        Spelling::CopiesFirst,
    ];

    /// Whether copies of one head are neighbours.
    pub fn is_grouped(self) -> bool {
        !matches!(self, Spelling::HeadTile | Spelling::CopiesFirst)
    }
}

/// The permutation of `rank` axes that brings one to the front.
pub fn to_front(rank: usize, axis: usize) -> Vec<usize> {
    std::iter::once(axis).chain((0..rank).filter(|&i| i != axis)).collect()
}

/// Computes `to`: `from` with the heads on `axis` repeated.
pub fn repeat(graph: &mut Graph, spelling: Spelling, g: u64, (shape, axis): (&[u64], usize), from: &str, to: &str) {
    let (rank, h) = (shape.len(), shape[axis]);
    let all = resized(shape, axis, h * g);
    let with = |at: usize, size: u64| [&shape[..at], &[size], &shape[at..]].concat();
    let reps = |rank: usize, at: usize| (0..rank).map(|i| if i == at { g } else { 1 }).collect::<Vec<u64>>();
    let mut tile_new_axis = |at: usize| {
        graph.op(&format!("{to}0"), &with(at, 1), &format!("expand_dims(x = {from}, axes = [{at}])"));
        graph.op(&format!("{to}1"), &with(at, g), &format!("tile(x = {to}0, reps = {:?})", reps(rank + 1, at)));
        graph.op(to, &all, &format!("reshape(x = {to}1, shape = {all:?})"));
    };
    match spelling {
        Spelling::Expand => tile_new_axis(axis + 1),
        Spelling::CopiesFirst => tile_new_axis(axis),
        Spelling::Interleave => {
            let perm = to_front(rank, axis);
            let front: Vec<u64> = perm.iter().map(|&p| shape[p]).collect();
            let rest = &front[1..];
            let back: Vec<i64> = (0..rank)
                .map(|i| perm.iter().position(|&p| p == i).unwrap() as i64)
                .map(|p| if p > 1 { p - rank as i64 } else { p })
                .collect();
            let many = [&[h * g], rest].concat();
            graph.op(&format!("{to}0"), &front, &format!("transpose(x = {from}, perm = {perm:?})"));
            graph.op(&format!("{to}1"), &many, &format!("tile(x = {to}0, reps = {:?})", reps(rank, 0)));
            let outer = [&[g, h], rest].concat();
            graph.op(&format!("{to}2"), &outer, &format!("reshape(x = {to}1, shape = {outer:?})"));
            let inner = [&[h, g], rest].concat();
            let swap = [&[1, 0][..], &(2..rank + 1).collect::<Vec<usize>>()].concat();
            graph.op(&format!("{to}3"), &inner, &format!("transpose(x = {to}2, perm = {swap:?})"));
            let list: Vec<String> = rest.iter().map(u64::to_string).collect();
            graph.op(&format!("{to}4"), &many, &format!("reshape(x = {to}3, shape = [-1, {}])", list.join(", ")));
            graph.op(to, &all, &format!("transpose(x = {to}4, perm = {back:?})"));
        }
        Spelling::Stack => {
            let copies = vec![from; g as usize].join(", ");
            graph.op(
                &format!("{to}0"),
                &with(axis + 1, g),
                &format!("stack(values = ({copies}), axis = {})", axis + 1),
            );
            graph.op(to, &all, &format!("reshape(x = {to}0, shape = {all:?})"));
        }
        Spelling::Gather => {
            let indices: Vec<u64> = (0..h * g).map(|i| i / g).collect();
            graph.op(to, &all, &format!("gather(x = {from}, indices = {indices:?}, axis = {axis}, batch_dims = 0)"));
        }
        Spelling::HeadTile => graph.op(to, &all, &format!("tile(x = {from}, reps = {:?})", reps(rank, axis))),
    }
}

/// What reads the copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Consumer {
    /// `query·keysᵀ`, `p·values`.
    Queries,
    /// `keys·queryᵀ`, `pᵀ·values`.
    Keys,
    /// `keys·queryᵀ`, `valuesᵀ·p`.
    KeysAndValues,
    /// `scaled_dot_product_attention`.
    Fused,
    /// `einsum`, with the heads between the axes of the matrices.
    Einsum,
}

/// What stands between the two products, besides the mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Middle {
    Softmax,
    Softcap,
    Sinks,
    Manual,
    Where,
    Alibi,
    SinglePrecision,
    OverHeads,
}

/// The mask's shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MaskShape {
    None,
    Rows,
    OneRow,
    Heads,
    HeadsOneRow,
    /// Axes in front of the first that matters are left out.
    Matrix,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Side {
    Keys,
    Values,
}

impl Side {
    /// What the copies are called.
    pub fn name(self) -> &'static str {
        match self {
            Side::Keys => "k",
            Side::Values => "v",
        }
    }
}

/// An attention block.
#[derive(Clone, Debug)]
pub struct Block {
    pub batch: u64,
    pub kv_heads: u64,
    pub group: u64,
    pub q_len: u64,
    pub keys: u64,
    pub head_dim: u64,
    /// Of keys and values.
    pub spellings: [Spelling; 2],
    pub consumer: Consumer,
    pub middle: Middle,
    pub mask: MaskShape,
    /// Whether the mask says which scores count, rather than being added.
    pub boolean: bool,
}

/// Blocks that can be folded.
pub fn block() -> impl Strategy<Value = Block> {
    let sizes = (1u64..3, 1u64..4, 2u64..5, 1u64..5, 1u64..12, 1u64..20);
    let spelling = || prop::sample::select(Spelling::ALL.to_vec());
    let consumer = prop::sample::select(vec![
        Consumer::Queries,
        Consumer::Keys,
        Consumer::KeysAndValues,
        Consumer::Fused,
        Consumer::Einsum,
    ]);
    let middle = prop::sample::select(vec![
        Middle::Softmax,
        Middle::Softcap,
        Middle::Sinks,
        Middle::Manual,
        Middle::Where,
        Middle::Alibi,
        Middle::SinglePrecision,
        Middle::OverHeads,
    ]);
    let mask = prop::sample::select(vec![
        MaskShape::None,
        MaskShape::Rows,
        MaskShape::OneRow,
        MaskShape::Heads,
        MaskShape::HeadsOneRow,
        MaskShape::Matrix,
    ]);
    (sizes, (spelling(), spelling()), consumer, middle, (mask, any::<bool>())).prop_map(
        |((batch, kv_heads, group, q_len, keys, head_dim), spellings, consumer, middle, (mask, boolean))| {
            // One op wants one order.
            let fits = consumer != Consumer::Fused || spellings.0.is_grouped() == spellings.1.is_grouped();
            let spellings = [spellings.0, if fits { spellings.1 } else { spellings.0 }];
            Block { batch, kv_heads, group, q_len, keys, head_dim, spellings, consumer, middle, mask, boolean }
        },
    )
}

impl Block {
    /// Query heads.
    pub fn heads(&self) -> u64 {
        self.kv_heads * self.group
    }

    /// Where batch, heads, rows and keys are in the scores.
    pub fn axes(&self) -> [usize; 4] {
        match self.consumer {
            Consumer::Queries | Consumer::Fused => [0, 1, 2, 3],
            Consumer::Keys | Consumer::KeysAndValues => [0, 1, 3, 2],
            Consumer::Einsum => [0, 2, 3, 1],
        }
    }

    /// Sizes for batch, heads, rows and keys in the order of the scores' axes.
    pub fn placed(&self, sizes: [u64; 4]) -> Vec<u64> {
        let mut shape = vec![0; 4];
        for (axis, size) in self.axes().into_iter().zip(sizes) {
            shape[axis] = size;
        }
        shape
    }

    /// The shape of the scores.
    pub fn scores(&self) -> Vec<u64> {
        self.placed([self.batch, self.heads(), self.q_len, self.keys])
    }

    /// The shape of the keys or values before they are repeated, and where the heads are.
    pub fn once(&self, side: Side) -> (Vec<u64>, usize) {
        let (b, h, n, d) = (self.batch, self.kv_heads, self.keys, self.head_dim);
        match (self.consumer, side) {
            (Consumer::Einsum, Side::Keys) => (vec![b, n, h, d], 2),
            (Consumer::Einsum, Side::Values) => (vec![b, d, h, n], 2),
            _ => (vec![b, h, n, d], 1),
        }
    }

    /// Where the positions are in keys or values.
    pub fn position_axis(&self, side: Side) -> usize {
        match (self.consumer, side) {
            (Consumer::Einsum, Side::Keys) => 1,
            (Consumer::Einsum, Side::Values) => 3,
            _ => 2,
        }
    }

    /// The repeat of keys or values.
    pub fn copies(&self, graph: &mut Graph, side: Side) {
        let (shape, axis) = self.once(side);
        let once = format!("{}_once", side.name());
        graph.input("fp16", &once, &shape);
        repeat(graph, self.spellings[side as usize], self.group, (&shape, axis), &once, side.name());
    }

    /// The block as it is.
    pub fn graph(&self) -> Graph {
        self.graph_with(Block::copies, |_, _, scores| scores.into())
    }

    /// The block with other copies, and with ops behind the scores: the function adds them and names the result, which
    /// has the same shape.
    pub fn graph_with(
        &self,
        copies: impl Fn(&Block, &mut Graph, Side),
        behind_scores: impl Fn(&Block, &mut Graph, &str) -> String,
    ) -> Graph {
        let (b, m, d, heads) = (self.batch, self.q_len, self.head_dim, self.heads());
        let mut graph = Graph::default();
        let einsum = self.consumer == Consumer::Einsum;
        graph.input("fp16", "query", &if einsum { [b, d, heads, m] } else { [b, heads, m, d] });
        copies(self, &mut graph, Side::Keys);
        copies(self, &mut graph, Side::Values);
        if let Some(shape) = self.mask_shape() {
            graph.input(if self.boolean { "bool" } else { "fp16" }, "mask", &shape);
        }
        let matmul = |x: &str, y: &str, tx: bool, ty: bool| {
            format!("matmul(x = {x}, y = {y}, transpose_x = {tx}, transpose_y = {ty})")
        };
        let by_row = [b, heads, m, d];
        let (first, last, out) = match self.consumer {
            Consumer::Queries => (matmul("query", "k", false, true), matmul("p", "v", false, false), by_row),
            Consumer::Keys => (matmul("k", "query", false, true), matmul("p", "v", true, false), by_row),
            Consumer::KeysAndValues => {
                (matmul("k", "query", false, true), matmul("v", "p", true, false), [b, heads, d, m])
            }
            Consumer::Einsum => (
                "einsum(values = (k, query), equation = \"bkhc,bchq->bkhq\")".into(),
                "einsum(values = (v, p), equation = \"bchk,bkhq->bchq\")".into(),
                [b, d, heads, m],
            ),
            Consumer::Fused => {
                let mask = if self.mask == MaskShape::None { "" } else { ", attn_mask = mask" };
                let call = format!("scaled_dot_product_attention(query = query, key = k, value = v{mask})");
                graph.op("out", &by_row, &call);
                graph.outputs.push("out".into());
                return graph;
            }
        };
        graph.op("s", &self.scores(), &first);
        let scores = behind_scores(self, &mut graph, "s");
        let masked = self.masked(&mut graph, &scores);
        self.probabilities(&mut graph, &masked);
        graph.op("out", &out, &last);
        graph.outputs.push("out".into());
        graph
    }

    /// The shape of the mask.
    pub fn mask_shape(&self) -> Option<Vec<u64>> {
        let (b, heads, m, n) = (self.batch, self.heads(), self.q_len, self.keys);
        Some(match self.mask {
            MaskShape::None => return None,
            MaskShape::Rows => self.placed([b, 1, m, n]),
            MaskShape::OneRow => self.placed([1, 1, 1, n]),
            MaskShape::Heads => self.placed([1, heads, m, n]),
            MaskShape::HeadsOneRow => self.placed([1, heads, 1, n]),
            MaskShape::Matrix => {
                let shape = self.placed([1, 1, m, n]);
                let lead = self.axes()[2].min(self.axes()[3]);
                shape[lead..].to_vec()
            }
        })
    }

    fn masked(&self, graph: &mut Graph, scores: &str) -> String {
        let shape = self.scores();
        graph.op("scaled", &shape, &format!("mul(x = {scores}, y = fp16(0.25))"));
        match (self.mask, self.boolean) {
            (MaskShape::None, _) => return "scaled".into(),
            (_, true) => graph.op("masked", &shape, "select(cond = mask, a = scaled, b = fp16(-10000.0))"),
            (_, false) => graph.op("masked", &shape, "add(x = scaled, y = mask)"),
        }
        "masked".into()
    }

    /// `p` from the masked scores.
    fn probabilities(&self, graph: &mut Graph, x: &str) {
        let (b, heads, m, n) = (self.batch, self.heads(), self.q_len, self.keys);
        let shape = self.scores();
        let [_, head_axis, _, axis] = self.axes();
        let one = self.placed([b, heads, m, 1]);
        let numbers = |count: u64| (0..count).map(|i| format!("{}.5", i % 7)).collect::<Vec<_>>().join(", ");
        let constant =
            |shape: &[u64]| format!("const(val = {}([{}]))", ty("fp16", shape), numbers(shape.iter().product()));
        let softmax = |x: &str| format!("softmax(x = {x}, axis = {})", axis as i64 - 4);
        match self.middle {
            Middle::Softmax => graph.op("p", &shape, &softmax(x)),
            Middle::Softcap => {
                graph.op("c0", &shape, &format!("mul(x = {x}, y = fp16(0.1))"));
                graph.op("c1", &shape, "tanh(x = c0)");
                graph.op("c2", &shape, "mul(x = c1, y = fp16(10.0))");
                graph.op("p", &shape, &softmax("c2"));
            }
            Middle::Sinks => {
                let wide = self.placed([b, heads, m, n + 1]);
                graph.typed("fp16", "sink", &one, &constant(&one));
                graph.op("joined", &wide, &format!("concat(values = ({x}, sink), axis = {axis}, interleave = false)"));
                graph.op("w", &wide, &softmax("joined"));
                let masks: Vec<bool> = (0..4).map(|i| i != axis).collect();
                graph.op(
                    "p",
                    &shape,
                    &format!("slice_by_index(x = w, begin = [0, 0, 0, 0], end = {shape:?}, end_mask = {masks:?})"),
                );
            }
            Middle::Manual => {
                graph.op("top", &one, &format!("reduce_max(x = {x}, axes = [{axis}], keep_dims = true)"));
                graph.op("low", &shape, &format!("sub(x = {x}, y = top)"));
                graph.op("e", &shape, "exp(x = low)");
                graph.op("sum", &one, &format!("reduce_sum(x = e, axes = [{axis}], keep_dims = true)"));
                graph.op("p", &shape, "real_div(x = e, y = sum)");
            }
            Middle::Where => {
                graph.typed("bool", "open", &shape, &format!("greater(x = {x}, y = fp16(-1.0))"));
                graph.op("chosen", &shape, &format!("select(cond = open, a = {x}, b = fp16(-10000.0))"));
                graph.op("p", &shape, &softmax("chosen"));
            }
            Middle::Alibi => {
                let slopes = self.placed([1, heads, 1, n]);
                graph.typed("fp16", "slopes", &slopes, &constant(&slopes));
                graph.op("biased", &shape, &format!("add(x = {x}, y = slopes)"));
                graph.op("p", &shape, &softmax("biased"));
            }
            Middle::SinglePrecision => {
                graph.typed("fp32", "wide", &shape, &format!("cast(x = {x}, dtype = \"fp32\")"));
                graph.typed("fp32", "exact", &shape, &softmax("wide"));
                graph.op("p", &shape, "cast(x = exact, dtype = \"fp16\")");
            }
            Middle::OverHeads => graph.op("p", &shape, &format!("softmax(x = {x}, axis = {head_axis})")),
        }
    }
}
