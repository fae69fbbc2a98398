//! Grouped-query attention as exporters write it: every spelling of the repeat, every consumer, every kind of length.
//!
//! A [`Case`] is one choice of each; [`cases`] lists those that are tested. Every axis has a meaning, so that a spelling
//! works in whichever order its source has and a consumer names the order that it wants.

use std::collections::BTreeMap;

use milopt::ir::{DType, Dim, Literal, Name, Program, TensorType, ValueId, pack_ints};
use milopt::opset::{self, Arg, BuildError, Builder, Size};

use Axis::{Batch, Dims, Heads, Keys, Rows};

type Built<T = ValueId> = Result<T, BuildError>;

/// What an axis counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Axis {
    /// Independent attentions.
    Batch,
    /// Query or KV heads.
    Heads,
    /// Queries.
    Rows,
    /// Keys and values.
    Keys,
    /// Elements of a head.
    Dims,
}

/// How the heads are copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// `expand_dims`, `tile`, `reshape`: `repeat_kv`.
    Tile,
    /// The same with repetitions that are computed from shapes at run time.
    ComputedTile,
    /// `repeat_interleave`: `transpose`, `tile`, `reshape`, `transpose`, `reshape`, `transpose`.
    Interleave,
    /// `stack`, `reshape`.
    Stack,
    /// `expand_dims`, `concat` of one value several times, `reshape`.
    Concat,
    /// A slice per KV head, `concat` with each several times.
    Slices,
    /// `split`, `concat` with each part several times.
    Split,
    /// `gather` with constant indices.
    Gather,
    /// `gather_along_axis` with constant indices.
    GatherAlong,
    /// `gather_nd` with constant indices of the first axis.
    GatherNd,
    /// `expand_dims`, `mul` by ones, `reshape`.
    Ones,
    /// `expand_dims`, `real_div` by ones, `reshape`.
    OverOnes,
    /// `repeat_kv` by two and then by the rest.
    Twice,
    /// `tile` on the head axis: whole copies one after the other.
    WholeTile,
    /// `concat` of the value with itself: whole copies one after the other.
    WholeConcat,
    /// `expand_dims` before the heads, `tile`, `reshape`: whole copies one after the other.
    LeadingTile,
}

/// What is repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// An input whose axes come in this order.
    Input(&'static [Axis]),
    /// A slice of heads that are padded.
    Padded,
    /// A `concat` of one value, as a rotary embedding of part of the head may leave it.
    OneConcat,
    /// A layer of a state, cut to the keys that are there.
    State,
}

/// One way to write a repeat.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spelling {
    /// What it is called.
    pub name: &'static str,
    /// How the heads are copied.
    pub copies: Copies,
    /// What is copied.
    pub source: Source,
    /// How many KV heads there are.
    pub kv_heads: u64,
}

impl Copies {
    /// Whether it is one `tile`.
    pub fn is_tile(self) -> bool {
        matches!(self, Copies::Tile | Copies::WholeTile)
    }
}

impl Spelling {
    /// Whether query head h reads KV head h mod the number of those.
    pub fn is_interleaved(&self) -> bool {
        let whole = matches!(self.copies, Copies::WholeTile | Copies::WholeConcat | Copies::LeadingTile);
        whole && self.kv_heads > 1
    }
}

const BHSD: &[Axis] = &[Batch, Heads, Keys, Dims];
const BSHD: &[Axis] = &[Batch, Keys, Heads, Dims];
const BHDS: &[Axis] = &[Batch, Heads, Dims, Keys];
const HSD: &[Axis] = &[Heads, Keys, Dims];

const fn spelling(name: &'static str, copies: Copies, source: Source) -> Spelling {
    Spelling { name, copies, source, kv_heads: 2 }
}

const fn single(name: &'static str, copies: Copies) -> Spelling {
    Spelling { name, copies, source: Source::Input(BHSD), kv_heads: 1 }
}

/// The usual one.
pub const REPEAT_KV: Spelling = spelling("repeat_kv", Copies::Tile, Source::Input(BHSD));
/// The one with transpositions.
pub const REPEAT_INTERLEAVE: Spelling = spelling("interleave", Copies::Interleave, Source::Input(BHSD));
/// Whole copies.
pub const INTERLEAVED: Spelling = spelling("interleaved", Copies::WholeTile, Source::Input(BHSD));

/// Every spelling.
pub const SPELLINGS: &[Spelling] = &[
    REPEAT_KV,
    spelling("repeat_kv_computed", Copies::ComputedTile, Source::Input(BHSD)),
    spelling("repeat_kv_rank_3", Copies::Tile, Source::Input(HSD)),
    spelling("repeat_kv_bshd", Copies::Tile, Source::Input(BSHD)),
    spelling("repeat_kv_pre_transposed", Copies::Tile, Source::Input(BHDS)),
    spelling("repeat_kv_padded", Copies::Tile, Source::Padded),
    spelling("repeat_kv_one_concat", Copies::Tile, Source::OneConcat),
    spelling("repeat_kv_state", Copies::Tile, Source::State),
    spelling("repeat_kv_computed_state", Copies::ComputedTile, Source::State),
    spelling("repeat_kv_twice", Copies::Twice, Source::Input(BHSD)),
    REPEAT_INTERLEAVE,
    spelling("interleave_bshd", Copies::Interleave, Source::Input(BSHD)),
    spelling("interleave_rank_3", Copies::Interleave, Source::Input(HSD)),
    spelling("interleave_state", Copies::Interleave, Source::State),
    spelling("stack", Copies::Stack, Source::Input(BHSD)),
    spelling("stack_pre_transposed", Copies::Stack, Source::Input(BHDS)),
    spelling("concat", Copies::Concat, Source::Input(BHSD)),
    spelling("slices", Copies::Slices, Source::Input(BHSD)),
    spelling("slices_rank_3", Copies::Slices, Source::Input(HSD)),
    spelling("split", Copies::Split, Source::Input(BHSD)),
    spelling("gather", Copies::Gather, Source::Input(BHSD)),
    spelling("gather_bshd", Copies::Gather, Source::Input(BSHD)),
    spelling("gather_along_axis", Copies::GatherAlong, Source::Input(BHSD)),
    spelling("gather_nd", Copies::GatherNd, Source::Input(BHSD)),
    spelling("ones", Copies::Ones, Source::Input(BHSD)),
    spelling("over_ones", Copies::OverOnes, Source::Input(BHSD)),
    single("one_head", Copies::WholeTile),
    single("one_head_repeat_kv", Copies::Tile),
    single("one_head_computed", Copies::ComputedTile),
    INTERLEAVED,
    spelling("interleaved_bshd", Copies::WholeTile, Source::Input(BSHD)),
    spelling("interleaved_concat", Copies::WholeConcat, Source::Input(BHSD)),
    spelling("interleaved_leading", Copies::LeadingTile, Source::Input(BHSD)),
];

/// What multiplies by the copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Consumer {
    /// Two `matmul`s with the copies on the left or the right, read through these flags.
    Matmul {
        /// Whether the copies are `x`.
        left: bool,
        /// The flag of `x` in the first product.
        transpose_x: bool,
        /// The flag of `y` in the first product.
        transpose_y: bool,
    },
    /// Two `matmul`s without a batch axis.
    Flat,
    /// `scaled_dot_product_attention`.
    Fused,
    /// Two `einsum`s with the copies on the left or the right, with a batch axis or without.
    Einsum {
        /// Whether the copies come first.
        left: bool,
        /// Whether there is a batch axis.
        batch: bool,
    },
    /// A pair of `matmul`s for each query head.
    PerHead,
    /// Two attentions, one after the other, that read the same copies.
    Layers,
    /// One attention whose values are its keys.
    KeysAsValues,
}

const fn matmul(left: bool, transpose_x: bool, transpose_y: bool) -> Consumer {
    Consumer::Matmul { left, transpose_x, transpose_y }
}

/// The usual one.
pub const MATMUL: Consumer = matmul(false, false, true);

/// Every consumer, with a name.
pub const CONSUMERS: &[(&str, Consumer)] = &[
    ("q_kt", MATMUL),
    ("q_k", matmul(false, false, false)),
    ("qt_kt", matmul(false, true, true)),
    ("qt_k", matmul(false, true, false)),
    ("k_q", matmul(true, false, false)),
    ("k_qt", matmul(true, false, true)),
    ("kt_q", matmul(true, true, false)),
    ("kt_qt", matmul(true, true, true)),
    ("flat", Consumer::Flat),
    ("fused", Consumer::Fused),
    ("einsum_q_k", Consumer::Einsum { left: false, batch: true }),
    ("einsum_k_q", Consumer::Einsum { left: true, batch: true }),
    ("einsum_flat_q_k", Consumer::Einsum { left: false, batch: false }),
    ("einsum_flat_k_q", Consumer::Einsum { left: true, batch: false }),
    ("per_head", Consumer::PerHead),
    ("layers", Consumer::Layers),
    ("keys_as_values", Consumer::KeysAsValues),
];

/// What is between the two products.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Middle {
    /// Scale, mask and `softmax`.
    Softmax,
    /// Scale on the query, and no mask.
    ScaledQuery,
    /// Scores bounded by `tanh`.
    Softcap,
    /// A further column per head.
    Sinks,
    /// `softmax` written out.
    Manual,
    /// A mask by `select`.
    Select,
    /// A bias per query head.
    Alibi,
    /// `softmax` in fp32.
    Single,
}

/// Every middle, with a name.
pub const MIDDLES: &[(&str, Middle)] = &[
    ("scaled_query", Middle::ScaledQuery),
    ("softcap", Middle::Softcap),
    ("sinks", Middle::Sinks),
    ("manual", Middle::Manual),
    ("select", Middle::Select),
    ("alibi", Middle::Alibi),
    ("single", Middle::Single),
];

/// What is between the repeat and the product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Between {
    /// Nothing.
    Nothing,
    /// Rotary embedding.
    Rotary,
    /// Multiplication by a scalar.
    Scale,
    /// A bias per element of the head.
    Bias,
    /// A norm over the head with a weight.
    Norm,
    /// A detour through fp32.
    Cast,
}

/// Everything that may be there, with a name.
pub const BETWEEN: &[(&str, Between)] = &[
    ("rotary", Between::Rotary),
    ("scale", Between::Scale),
    ("bias", Between::Bias),
    ("norm", Between::Norm),
    ("cast", Between::Cast),
];

/// The mask of a fused attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mask {
    /// None.
    None,
    /// Floats with these axes; the others are absent, or of extent one if they lie between.
    Floats(&'static [Axis]),
    /// Booleans with these axes.
    Bools(&'static [Axis]),
}

/// Every mask, with a name.
pub const MASKS: &[(&str, Mask)] = &[
    ("none", Mask::None),
    ("row", Mask::Floats(&[Keys])),
    ("matrix", Mask::Floats(&[Rows, Keys])),
    ("matrices", Mask::Floats(&[Batch, Rows, Keys])),
    ("row_per_head", Mask::Floats(&[Heads, Keys])),
    ("matrix_per_head", Mask::Floats(&[Heads, Rows, Keys])),
    ("full", Mask::Floats(&[Batch, Heads, Rows, Keys])),
    ("bools", Mask::Bools(&[Rows, Keys])),
    ("bools_row", Mask::Bools(&[Batch, Keys])),
    ("bools_per_head", Mask::Bools(&[Heads, Rows, Keys])),
];

/// What is known of the numbers of queries and keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lengths {
    /// One query.
    Decode,
    /// Several queries.
    Prefill,
    /// The number of queries is not known.
    UnknownRows,
    /// The number of keys is not known, and there is one query.
    UnknownKeys,
    /// Neither is known.
    Unknown,
}

/// All lengths.
pub const LENGTHS: &[Lengths] =
    &[Lengths::Decode, Lengths::Prefill, Lengths::UnknownRows, Lengths::UnknownKeys, Lengths::Unknown];

/// Query heads.
const HEADS: u64 = 8;
const DIMS: u64 = 4;
const KEYS: u64 = 8;
const MOST: u64 = 16;

impl Lengths {
    /// The size of an axis that is neither the batch nor the heads.
    pub fn size(self, axis: Axis) -> Size {
        let unknown = Size::Range { default: 1, lo: 1, hi: Some(MOST) };
        match (axis, self) {
            (Rows, Lengths::UnknownRows | Lengths::Unknown) | (Keys, Lengths::UnknownKeys | Lengths::Unknown) => {
                unknown
            }
            (Rows, Lengths::Prefill) => Size::Fixed(3),
            (Keys, _) => Size::Fixed(KEYS),
            (Dims, _) => Size::Fixed(DIMS),
            _ => Size::Fixed(1),
        }
    }
}

/// One attention.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    /// What it is called: an identifier.
    pub name: String,
    /// How keys and values are repeated.
    pub spellings: [Spelling; 2],
    /// What multiplies by them.
    pub consumer: Consumer,
    /// What is between the products.
    pub middle: Middle,
    /// What is between the repeats and the products.
    pub between: Between,
    /// The mask, if the attention is fused.
    pub mask: Mask,
    /// What is known of the lengths.
    pub lengths: Lengths,
    /// How many attentions there are.
    pub batch: u64,
}

/// A case as a program.
pub struct Attention {
    /// The program.
    pub program: Program,
    /// Shapes of its inputs to run it with.
    pub shapes: Vec<BTreeMap<Name, Vec<usize>>>,
}

impl Case {
    fn new(name: &str, spelling: Spelling, consumer: Consumer, lengths: Lengths) -> Case {
        Case {
            name: format!("{name}_{lengths:?}").to_lowercase(),
            spellings: [spelling; 2],
            consumer,
            middle: Middle::Softmax,
            between: Between::Nothing,
            mask: Mask::Floats(&[Rows, Keys]),
            lengths,
            batch: 1,
        }
    }

    /// Whether there is such a program.
    fn is_valid(&self) -> bool {
        let known = !matches!(self.lengths, Lengths::UnknownKeys | Lengths::Unknown);
        let batched = self.batch > 1;
        let flat = matches!(self.consumer, Consumer::Flat | Consumer::Einsum { batch: false, .. });
        !(batched && flat)
            && self.spellings.iter().all(|s| {
                let one = matches!(s.source, Source::State | Source::Input(HSD));
                (known || s.copies != Copies::GatherAlong) && !(batched && one)
            })
    }

    /// The program.
    pub fn build(&self) -> Attention {
        let mut block = Block { case: self, b: Builder::new("main", "CoreML8"), inputs: Vec::new(), length: None };
        let out = block.attention().unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let Block { b, inputs, .. } = block;
        let function = b.finish(&[("out", out)]).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let program = opset::program(vec![function]).unwrap();
        let f = program.main().unwrap();
        let shape = |name: &str, axes: &[Axis], rows: u64, keys: u64| {
            let dims = &f.tensor(f.input(name).unwrap()).unwrap().shape;
            let size = |(d, &a): (&Dim, &Axis)| d.as_known().unwrap_or(if a == Rows { rows } else { keys }) as usize;
            (Name::from(name), dims.iter().zip(axes).map(size).collect::<Vec<_>>())
        };
        let sizes: &[(u64, u64)] = match self.lengths {
            Lengths::Decode | Lengths::Prefill => &[(1, KEYS)],
            _ => &[(1, 1), (3, 7), (MOST, MOST)],
        };
        let shapes = sizes.iter().map(|&(rows, keys)| inputs.iter().map(|(n, a)| shape(n, a, rows, keys)).collect());
        Attention { shapes: shapes.collect(), program }
    }
}

/// Every case with these lengths.
pub fn cases(lengths: Lengths) -> Vec<Case> {
    let mut all = Vec::new();
    let mut add = |case: Case| all.extend(Some(case).filter(Case::is_valid));
    for &s in SPELLINGS {
        for &(name, consumer) in CONSUMERS {
            add(Case::new(&format!("{}_{name}", s.name), s, consumer, lengths));
        }
        add(Case { batch: 2, ..Case::new(&format!("{}_batch", s.name), s, MATMUL, lengths) });
        add(Case { batch: 2, ..Case::new(&format!("{}_fused_batch", s.name), s, Consumer::Fused, lengths) });
    }
    // Keys and values in different spellings and groups.
    for (i, &s) in SPELLINGS.iter().enumerate() {
        let spellings = [s, SPELLINGS[(i + 10) % SPELLINGS.len()]];
        for (name, consumer) in [("q_kt", MATMUL), ("kt_q", matmul(true, true, false))] {
            let name = format!("{}_{}_{name}", spellings[0].name, spellings[1].name);
            add(Case { spellings, ..Case::new(&name, s, consumer, lengths) });
        }
    }
    for s in [REPEAT_KV, REPEAT_INTERLEAVE, INTERLEAVED] {
        for &(name, middle) in MIDDLES {
            for (order, consumer) in [("q_kt", MATMUL), ("k_qt", matmul(true, false, true))] {
                let name = format!("{}_{name}_{order}", s.name);
                add(Case { middle, ..Case::new(&name, s, consumer, lengths) });
            }
        }
        for &(name, between) in BETWEEN {
            for (order, consumer) in
                [("q_kt", MATMUL), ("q_k", matmul(false, false, false)), ("fused", Consumer::Fused)]
            {
                let name = format!("{}_{name}_{order}", s.name);
                add(Case { between, ..Case::new(&name, s, consumer, lengths) });
            }
        }
        for &(name, mask) in MASKS {
            for batch in [1, 2] {
                let name = format!("{}_{name}_{batch}", s.name);
                add(Case { mask, batch, ..Case::new(&name, s, Consumer::Fused, lengths) });
            }
        }
    }
    all
}

/// A function in the making.
struct Block<'c> {
    case: &'c Case,
    b: Builder,
    /// Inputs with what their axes count.
    inputs: Vec<(&'static str, Vec<Axis>)>,
    /// An input and its axis that has as many elements as there are keys.
    length: Option<(ValueId, usize)>,
}

/// The permutation from one order of axes to another; the last two axes count from the end.
fn permutation(from: &[Axis], to: &[Axis]) -> Vec<i64> {
    let rank = from.len();
    let at = |a: &Axis| from.iter().position(|f| f == a).expect("the same axes");
    to.iter().map(|a| if at(a) + 2 < rank { at(a) as i64 } else { at(a) as i64 - rank as i64 }).collect()
}

fn find(axes: &[Axis], axis: Axis) -> usize {
    axes.iter().position(|&a| a == axis).expect("the axis is there")
}

fn ints(values: &[i64]) -> Arg {
    values.into()
}

/// Different floats, all of them exact.
fn weights(dtype: DType, shape: &[u64]) -> Literal {
    let n = shape.iter().product::<u64>();
    let values: Vec<f64> = (0..n).map(|i| (i % 7) as f64 * 0.25 - 0.5).collect();
    Literal::floats(dtype, shape, &values)
}

fn indices_of(shape: &[u64], values: &[i64]) -> Literal {
    Literal::bytes(TensorType::fixed(DType::I32, shape), pack_ints(DType::I32, values))
}

fn half(x: f64) -> Literal {
    Literal::floats(DType::F16, &[], &[x])
}

impl Block<'_> {
    fn ty(&self, v: ValueId) -> &TensorType {
        self.b.function().tensor(v).expect("a tensor")
    }

    /// The sizes as `reshape` wants them: an unknown one is -1.
    fn shape(&self, v: ValueId) -> Vec<i64> {
        self.ty(v).shape.iter().map(|d| d.as_known().map_or(-1, |n| n as i64)).collect()
    }

    fn size(&self, axis: Axis, heads: u64) -> Size {
        match axis {
            Batch => Size::Fixed(self.case.batch),
            Heads => Size::Fixed(heads),
            _ => self.case.lengths.size(axis),
        }
    }

    fn input(&mut self, name: &'static str, axes: &[Axis], sizes: &[Size]) -> Built {
        self.inputs.push((name, axes.to_vec()));
        self.b.flexible_input(name, DType::F16, sizes)
    }

    /// An input with these axes of the case's sizes.
    fn whole_input(&mut self, name: &'static str, axes: &[Axis], heads: u64) -> Built {
        let sizes: Vec<Size> = axes.iter().map(|&a| self.size(a, heads)).collect();
        self.input(name, axes, &sizes)
    }

    /// An input that broadcasts: axes that are not in `kept` have one element.
    fn narrow_input(&mut self, name: &'static str, axes: &[Axis], kept: &[Axis]) -> Built {
        let size = |a: &Axis| if kept.contains(a) { self.size(*a, HEADS) } else { Size::Fixed(1) };
        let sizes: Vec<Size> = axes.iter().map(size).collect();
        self.input(name, axes, &sizes)
    }

    /// What is repeated, and the order of its axes.
    fn source(&mut self, name: &'static str, s: &Spelling) -> Built<(ValueId, Vec<Axis>)> {
        let v = match s.source {
            Source::Input(axes) => return Ok((self.whole_input(name, axes, s.kv_heads)?, axes.to_vec())),
            Source::Padded => {
                let mut sizes: Vec<Size> = BHSD.iter().map(|&a| self.size(a, s.kv_heads)).collect();
                sizes[3] = Size::Fixed(2 * DIMS);
                let padded = self.input(name, BHSD, &sizes)?;
                self.cut(padded, 3, 0, Some(DIMS))?
            }
            Source::OneConcat => {
                let x = self.whole_input(name, BHSD, s.kv_heads)?;
                self.b.concat(&[x], 1)?
            }
            Source::State => {
                let state = self.b.state(name, DType::F16, &[2, 1, s.kv_heads, MOST, DIMS])?;
                let all = self.b.read_state(state)?;
                let layer = self.layer(all)?;
                self.keys_there(layer)?
            }
        };
        Ok((v, BHSD.to_vec()))
    }

    /// Elements `begin..end` of one axis.
    fn cut(&mut self, x: ValueId, axis: usize, begin: u64, end: Option<u64>) -> Built {
        let rank = self.ty(x).rank();
        let (mut from, mut to, mut whole) = (vec![0i64; rank], vec![0i64; rank], vec![true; rank]);
        from[axis] = begin as i64;
        to[axis] = end.map_or(0, |n| n as i64);
        whole[axis] = end.is_none();
        let params = [("x", x.into()), ("begin", ints(&from)), ("end", ints(&to)), ("end_mask", Arg::from(&whole[..]))];
        self.b.op("slice_by_index", params)
    }

    /// The second entry of the first axis, without that axis.
    fn layer(&mut self, x: ValueId) -> Built {
        let rank = self.ty(x).rank();
        let only = |i: usize| (0..rank).map(|at| at == i).collect::<Vec<bool>>();
        let rest: Vec<bool> = only(0).iter().map(|b| !b).collect();
        let begin: Vec<i64> = (0..rank).map(|i| i64::from(i == 0)).collect();
        let params = [
            ("x", x.into()),
            ("begin", ints(&begin)),
            ("end", ints(&vec![0; rank])),
            ("end_mask", Arg::from(&rest[..])),
            ("squeeze_mask", Arg::from(&only(0)[..])),
        ];
        self.b.op("slice_by_index", params)
    }

    /// As many keys as the mask has.
    fn keys_there(&mut self, x: ValueId) -> Built {
        let (mask, axis) = self.length.expect("a mask was made");
        if self.shape(mask)[axis] >= 0 {
            return self.cut(x, 2, 0, Some(KEYS));
        }
        let n = self.size_of(mask, axis)?;
        let zero = self.b.constant(Literal::ints(&[0]));
        let end = self.b.concat(&[zero, zero, n, zero], 0)?;
        let params = [
            ("x", x.into()),
            ("begin", [0, 0, 0, 0].into()),
            ("end", end.into()),
            ("end_mask", [true, true, false, true].into()),
        ];
        self.b.op("slice_by_index", params)
    }

    /// The size of an axis, computed as the converter does.
    fn size_of(&mut self, x: ValueId, axis: usize) -> Built {
        let shape = self.b.shape(x)?;
        let narrow = self.b.op("cast", [("x", shape.into()), ("dtype", "int16".into())])?;
        let n = self.b.gather(narrow, [axis as i64], 0)?;
        self.b.cast(n, DType::I32)
    }

    /// The value `name` repeated as the spelling says, with its axes in the order `want`, and what is between.
    fn repeated(&mut self, name: &'static str, s: &Spelling, want: &[Axis]) -> Built {
        let (x, have) = self.source(name, s)?;
        let r = self.copies(s, x, &have, want)?;
        self.between(name, r, want)
    }

    fn copies(&mut self, s: &Spelling, x: ValueId, have: &[Axis], want: &[Axis]) -> Built {
        let at = find(have, Heads);
        let (kv, group) = (s.kv_heads as i64, (HEADS / s.kv_heads) as i64);
        let times = |v: ValueId| vec![v; group as usize];
        if s.copies == Copies::Interleave {
            return self.interleave(x, have, want, kv);
        }
        let mut joined = self.shape(x);
        joined[at] *= group;
        let indices: Vec<i64> = (0..kv * group).map(|h| h / group).collect();
        let wide = match s.copies {
            Copies::Tile => {
                let e = self.b.expand_dims(x, [at as i64 + 1])?;
                self.tile(e, at + 1, group)?
            }
            Copies::ComputedTile => self.computed_tile(x, at, group)?,
            Copies::Stack => self.b.stack(&times(x), at as i64 + 1)?,
            Copies::Concat => {
                let e = self.b.expand_dims(x, [at as i64 + 1])?;
                self.b.concat(&times(e), at as i64 + 1)?
            }
            Copies::Slices => {
                let each: Vec<ValueId> =
                    (0..s.kv_heads).map(|h| self.cut(x, at, h, Some(h + 1))).collect::<Built<_>>()?;
                self.b.concat(&indices.iter().map(|&h| each[h as usize]).collect::<Vec<_>>(), at as i64)?
            }
            Copies::Split => {
                let each = self.b.split(x, kv, at as i64)?;
                self.b.concat(&indices.iter().map(|&h| each[h as usize]).collect::<Vec<_>>(), at as i64)?
            }
            Copies::Gather => self.b.gather(x, &indices[..], at as i64)?,
            Copies::GatherAlong => self.gather_along(x, at, &joined, group)?,
            Copies::GatherNd => self.gather_nd(x, at, &indices)?,
            Copies::Ones | Copies::OverOnes => {
                let e = self.b.expand_dims(x, [at as i64 + 1])?;
                let mut shape = vec![1; have.len() + 1];
                shape[at + 1] = group as u64;
                let ones = Literal::floats(DType::F16, &shape, &vec![1.0; group as usize]);
                if s.copies == Copies::Ones { self.b.mul(e, ones)? } else { self.b.real_div(e, ones)? }
            }
            Copies::Twice => {
                let e = self.b.expand_dims(x, [at as i64 + 1])?;
                let once = self.tile(e, at + 1, 2)?;
                let mut half_joined = self.shape(e);
                half_joined[at] *= 2;
                let e = self.b.reshape(once, &half_joined[..])?;
                self.tile(e, at + 1, group / 2)?
            }
            Copies::WholeTile => self.tile(x, at, group)?,
            Copies::WholeConcat => self.b.concat(&times(x), at as i64)?,
            Copies::LeadingTile => {
                let e = self.b.expand_dims(x, [at as i64])?;
                self.tile(e, at, group)?
            }
            Copies::Interleave => unreachable!("written out above"),
        };
        self.arranged(wide, joined, have, want)
    }

    /// The joined shape, the batch axis added or removed where needed, and the axes in order.
    fn arranged(&mut self, x: ValueId, mut joined: Vec<i64>, have: &[Axis], want: &[Axis]) -> Built {
        let mut axes = have.to_vec();
        match (have.contains(&Batch), want.contains(&Batch)) {
            (true, false) => {
                let at = find(have, Batch);
                joined.remove(at);
                axes.remove(at);
            }
            (false, true) => {
                joined.insert(0, 1);
                axes.insert(0, Batch);
            }
            _ => {}
        }
        let x = if self.shape(x) == joined { x } else { self.b.reshape(x, &joined[..])? };
        if axes == want { Ok(x) } else { self.b.transpose(x, &permutation(&axes, want)[..]) }
    }

    fn tile(&mut self, x: ValueId, axis: usize, times: i64) -> Built {
        let mut reps = vec![1; self.ty(x).rank()];
        reps[axis] = times;
        self.b.tile(x, &reps[..])
    }

    /// `real_div(select(equal(wanted, -1), shape, wanted), shape)`, from a `concat` of the wanted sizes.
    fn computed_tile(&mut self, x: ValueId, at: usize, group: i64) -> Built {
        let mut sizes = Vec::new();
        for (i, n) in self.shape(x).into_iter().enumerate() {
            sizes.push(if n < 0 { self.size_of(x, i)? } else { self.b.constant(Literal::ints(&[n])) });
        }
        sizes.insert(at + 1, self.b.constant(Literal::ints(&[group])));
        let e = self.b.expand_dims(x, [at as i64 + 1])?;
        let shape = self.b.shape(e)?;
        let wanted = self.b.concat(&sizes, 0)?;
        let free = self.b.equal(wanted, -1)?;
        let wanted = self.b.select(free, shape, wanted)?;
        let reps = self.b.real_div(wanted, shape)?;
        self.b.tile(e, reps)
    }

    /// `repeat_interleave`; the last transposition brings the axes in order.
    fn interleave(&mut self, x: ValueId, have: &[Axis], want: &[Axis], kv: i64) -> Built {
        let group = HEADS as i64 / kv;
        let mut front = vec![Heads];
        front.extend(have.iter().filter(|&&a| a != Heads));
        let a = if front == have { x } else { self.b.transpose(x, &permutation(have, &front)[..])? };
        let rest = self.shape(a)[1..].to_vec();
        let b = self.tile(a, 0, group)?;
        let c = self.b.reshape(b, &[&[group, kv], &rest[..]].concat()[..])?;
        let mut perm: Vec<i64> = (0..rest.len() as i64 + 2).collect();
        perm.swap(0, 1);
        let d = self.b.transpose(c, &perm[..])?;
        self.arranged(d, [&[kv * group], &rest[..]].concat(), &front, want)
    }

    fn gather_along(&mut self, x: ValueId, at: usize, joined: &[i64], group: i64) -> Built {
        let inner: i64 = joined[at + 1..].iter().product();
        let all: i64 = joined.iter().product();
        let values: Vec<i64> = (0..all).map(|i| i / inner % joined[at] / group).collect();
        let shape: Vec<u64> = joined.iter().map(|&n| n as u64).collect();
        let indices = indices_of(&shape, &values);
        let params = [("x", x.into()), ("indices", indices.into()), ("axis", (at as i64).into())];
        self.b.op("gather_along_axis", params)
    }

    /// `gather_nd` looks up the first axis, so the heads come to the front and go back.
    fn gather_nd(&mut self, x: ValueId, at: usize, indices: &[i64]) -> Built {
        let mut perm: Vec<i64> = (0..self.ty(x).rank() as i64).collect();
        perm.swap(0, at);
        let front = self.b.transpose(x, &perm[..])?;
        let indices = indices_of(&[indices.len() as u64, 1], indices);
        let many = self.b.op("gather_nd", [("x", front.into()), ("indices", indices.into())])?;
        self.b.transpose(many, &perm[..])
    }

    fn between(&mut self, name: &str, x: ValueId, axes: &[Axis]) -> Built {
        let at = find(axes, Dims);
        let mut narrow = vec![1; axes.len()];
        narrow[at] = DIMS;
        match self.case.between {
            Between::Nothing => Ok(x),
            Between::Rotary => {
                let angles = if name == "keys" { "key_angles" } else { "value_angles" };
                let angles = self.narrow_input(angles, axes, &[Keys, Dims])?;
                let (low, high) = (self.cut(x, at, 0, Some(DIMS / 2))?, self.cut(x, at, DIMS / 2, None)?);
                let negated = self.b.mul(high, half(-1.0))?;
                let turned = self.b.concat(&[negated, low], at as i64)?;
                let (a, b) = (self.b.mul(x, angles)?, self.b.mul(turned, angles)?);
                self.b.add(a, b)
            }
            Between::Scale => self.b.mul(x, half(0.5)),
            Between::Bias => self.b.add(x, weights(DType::F16, &narrow)),
            Between::Norm => {
                let squared = self.b.mul(x, x)?;
                let mean = self.b.reduce_mean(squared, &[at as i64], true)?;
                let epsilon = half(0.001).into();
                let scale = self.b.op("rsqrt", [("x", mean.into()), ("epsilon", epsilon)])?;
                let normed = self.b.mul(x, scale)?;
                self.b.mul(normed, weights(DType::F16, &narrow))
            }
            Between::Cast => {
                let wide = self.b.cast(x, DType::F32)?;
                let tanh = self.b.tanh(wide)?;
                self.b.cast(tanh, DType::F16)
            }
        }
    }

    /// The mask of the scores, unless the middle has none. States are as long as it says.
    fn mask(&mut self, scores: &[Axis]) -> Built {
        let mask = self.narrow_input("mask", scores, &[Rows, Keys])?;
        self.length = Some((mask, find(scores, Keys)));
        Ok(mask)
    }

    fn query(&mut self, axes: &[Axis]) -> Built {
        let q = self.whole_input("query", axes, HEADS)?;
        if self.case.middle == Middle::ScaledQuery { self.b.mul(q, half(0.5)) } else { Ok(q) }
    }

    fn keys_and_values(&mut self, keys: &[Axis], values: &[Axis]) -> Built<(ValueId, ValueId)> {
        let [k, v] = &self.case.spellings;
        Ok((self.repeated("keys", k, keys)?, self.repeated("values", v, values)?))
    }

    /// The whole attention.
    fn attention(&mut self) -> Built {
        match self.case.consumer {
            Consumer::Matmul { left: false, transpose_x, transpose_y } => {
                let scores = &[Batch, Heads, Rows, Keys];
                let mask = self.mask(scores)?;
                let q =
                    self.query(if transpose_x { &[Batch, Heads, Dims, Rows] } else { &[Batch, Heads, Rows, Dims] })?;
                // The values are stored as the keys are.
                let order = if transpose_y { BHSD } else { BHDS };
                let (k, v) = self.keys_and_values(order, order)?;
                let s = self.b.matmul(q, k, transpose_x, transpose_y)?;
                let p = self.middle(s, mask, scores)?;
                self.b.matmul(p, v, false, !transpose_y)
            }
            Consumer::Matmul { left: true, transpose_x, transpose_y } => {
                let scores = &[Batch, Heads, Keys, Rows];
                let mask = self.mask(scores)?;
                let q =
                    self.query(if transpose_y { &[Batch, Heads, Rows, Dims] } else { &[Batch, Heads, Dims, Rows] })?;
                let order = if transpose_x { BHDS } else { BHSD };
                let (k, v) = self.keys_and_values(order, order)?;
                let s = self.b.matmul(k, q, transpose_x, transpose_y)?;
                let p = self.middle(s, mask, scores)?;
                match transpose_y {
                    true => self.b.matmul(p, v, true, transpose_x),
                    false => self.b.matmul(v, p, !transpose_x, false),
                }
            }
            Consumer::Flat => {
                let scores = &[Heads, Rows, Keys];
                let mask = self.mask(scores)?;
                let q = self.query(&[Heads, Rows, Dims])?;
                let (k, v) = self.keys_and_values(HSD, HSD)?;
                let s = self.b.matmul(q, k, false, true)?;
                let p = self.middle(s, mask, scores)?;
                self.b.matmul(p, v, false, false)
            }
            Consumer::Fused => {
                let mask = self.fused_mask()?;
                let q = self.query(&[Batch, Heads, Rows, Dims])?;
                let (k, v) = self.keys_and_values(BHSD, BHSD)?;
                self.b.attention(q, k, v, mask.map(Arg::from))
            }
            Consumer::Einsum { left, batch } => self.einsum(left, if batch { 0 } else { 1 }),
            Consumer::PerHead => self.per_head(),
            Consumer::Layers => {
                let scores = &[Batch, Heads, Rows, Keys];
                let mask = self.mask(scores)?;
                let mut x = self.query(&[Batch, Heads, Rows, Dims])?;
                let (k, v) = self.keys_and_values(BHSD, BHSD)?;
                for _ in 0..2 {
                    let s = self.b.matmul(x, k, false, true)?;
                    let p = self.middle(s, mask, scores)?;
                    x = self.b.matmul(p, v, false, false)?;
                }
                Ok(x)
            }
            Consumer::KeysAsValues => {
                let scores = &[Batch, Heads, Rows, Keys];
                let mask = self.mask(scores)?;
                let q = self.query(&[Batch, Heads, Rows, Dims])?;
                let k = self.repeated("keys", &self.case.spellings[0], BHSD)?;
                let s = self.b.matmul(q, k, false, true)?;
                let p = self.middle(s, mask, scores)?;
                self.b.matmul(p, k, false, false)
            }
        }
    }

    /// Products per head with the heads between the matrices' axes.
    fn einsum(&mut self, left: bool, from: usize) -> Built {
        let order = |axes: [Axis; 4]| axes[from..].to_vec();
        let (scores, query) = match left {
            true => (order([Batch, Keys, Heads, Rows]), order([Batch, Dims, Heads, Rows])),
            false => (order([Batch, Rows, Heads, Keys]), order([Batch, Rows, Heads, Dims])),
        };
        let (by_key, by_dim) = (order([Batch, Keys, Heads, Dims]), order([Batch, Dims, Heads, Keys]));
        let equation = if from == 0 { "bchw,bwhu->bchu" } else { "chw,whr->chr" };
        let mask = self.mask(&scores)?;
        let q = self.query(&query)?;
        let (k, v) = match left {
            true => self.keys_and_values(&by_key, &by_dim)?,
            false => self.keys_and_values(&by_dim, &by_key)?,
        };
        let product = |block: &mut Self, one: ValueId, other: ValueId| {
            let values = if left { vec![other, one] } else { vec![one, other] };
            block.b.op("einsum", [("values", values.into()), ("equation", equation.into())])
        };
        let s = product(self, q, k)?;
        let p = self.middle(s, mask, &scores)?;
        product(self, p, v)
    }

    /// A head at a time.
    fn per_head(&mut self) -> Built {
        let scores = &[Batch, Heads, Rows, Keys];
        let mask = self.mask(scores)?;
        let q = self.query(&[Batch, Heads, Rows, Dims])?;
        let (k, v) = self.keys_and_values(BHSD, BHSD)?;
        let count = HEADS as i64;
        let mut each = [q, k, v].into_iter().map(|x| self.b.split(x, count, 1)).collect::<Built<Vec<_>>>()?.into_iter();
        let (q, k, v) = (each.next().unwrap(), each.next().unwrap(), each.next().unwrap());
        let mut outs = Vec::new();
        for i in 0..count as usize {
            let s = self.b.matmul(q[i], k[i], false, true)?;
            let p = self.middle(s, mask, scores)?;
            outs.push(self.b.matmul(p, v[i], false, false)?);
        }
        self.b.concat(&outs, 1)
    }

    fn fused_mask(&mut self) -> Built<Option<ValueId>> {
        let (axes, bools) = match self.case.mask {
            Mask::None => (&[Keys][..], false),
            Mask::Floats(axes) => (axes, false),
            Mask::Bools(axes) => (axes, true),
        };
        let all = [Batch, Heads, Rows, Keys];
        let mask = self.narrow_input("mask", &all[find(&all, axes[0])..], axes)?;
        self.length = Some((mask, self.ty(mask).rank() - 1));
        Ok(match self.case.mask {
            Mask::None => None,
            _ if bools => Some(self.b.op("greater", [("x", mask.into()), ("y", half(-1.0).into())])?),
            _ => Some(mask),
        })
    }

    /// The weights from the scores.
    fn middle(&mut self, s: ValueId, mask: ValueId, axes: &[Axis]) -> Built {
        let keys = find(axes, Keys) as i64;
        let softmax = |block: &mut Self, x: ValueId| block.b.softmax(x, keys - axes.len() as i64);
        if self.case.middle == Middle::ScaledQuery {
            return softmax(self, s);
        }
        let scaled = self.b.mul(s, half(0.5))?;
        let mut per_head = vec![1; axes.len()];
        per_head[find(axes, Heads)] = HEADS;
        let masked = match self.case.middle {
            Middle::Softcap => {
                let bounded = self.b.tanh(scaled)?;
                let capped = self.b.mul(bounded, half(8.0))?;
                self.b.add(capped, mask)?
            }
            Middle::Select => {
                let open = self.b.op("greater", [("x", mask.into()), ("y", half(-1.0).into())])?;
                self.b.select(open, scaled, half(-1e4))?
            }
            _ => self.b.add(scaled, mask)?,
        };
        match self.case.middle {
            Middle::Manual => {
                let keep = [("axes", ints(&[keys])), ("keep_dims", true.into())];
                let top = self.b.op("reduce_max", [("x", masked.into())].into_iter().chain(keep.clone()))?;
                let low = self.b.sub(masked, top)?;
                let e = self.b.exp(low)?;
                let sum = self.b.op("reduce_sum", [("x", e.into())].into_iter().chain(keep))?;
                self.b.real_div(e, sum)
            }
            Middle::Alibi => {
                let slopes = weights(DType::F16, &per_head);
                let biased = self.b.add(masked, slopes)?;
                softmax(self, biased)
            }
            Middle::Sinks => {
                // A column of the constant's value for however many rows there are.
                let first = self.cut(masked, keys as usize, 0, Some(1))?;
                let zero = self.b.mul(first, half(0.0))?;
                let column = self.b.add(zero, weights(DType::F16, &per_head))?;
                let joined = self.b.concat(&[masked, column], keys)?;
                let p = softmax(self, joined)?;
                let mut cut = vec![0; axes.len()];
                cut[keys as usize] = -1;
                let whole: Vec<bool> = cut.iter().map(|&n| n == 0).collect();
                let params = [
                    ("x", p.into()),
                    ("begin", ints(&vec![0; axes.len()])),
                    ("end", ints(&cut)),
                    ("end_mask", Arg::from(&whole[..])),
                ];
                self.b.op("slice_by_index", params)
            }
            Middle::Single => {
                let wide = self.b.cast(masked, DType::F32)?;
                let p = softmax(self, wide)?;
                self.b.cast(p, DType::F16)
            }
            _ => softmax(self, masked),
        }
    }
}
