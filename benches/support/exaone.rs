//! The decode graph of EXAONE 4.0, op for op as coremltools 9 writes it for the public model definition with a stacked
//! KV cache, unit norm weights and no biases: `repeat_kv` as a `tile`, one `slice_update` a layer and cache. Only the
//! sizes of what is not attention are free, and all layers share their weights.

use milopt::ir::{DType, Literal, Program, ValueId};
use milopt::opset::{self, Arg, BuildError, Builder};

/// Sizes of the model.
#[derive(Clone, Debug)]
pub struct Config {
    /// Decoder layers.
    pub layers: u64,
    /// Query heads.
    pub n_heads: u64,
    /// Heads of the KV cache.
    pub n_kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Length of the KV cache.
    pub ctx: u64,
    /// Tokens a step.
    pub q_len: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Width inside the feed-forward network.
    pub intermediate: u64,
    /// Tokens of the vocabulary.
    pub vocab: u64,
}

impl Config {
    /// EXAONE 4.0 1.2B with a context of 4096: its attention and KV cache in full, the rest narrow.
    pub fn exaone_1_2b() -> Config {
        Config {
            layers: 30,
            n_heads: 32,
            n_kv_heads: 8,
            head_dim: 64,
            ctx: 4096,
            q_len: 1,
            hidden: 128,
            intermediate: 256,
            vocab: 512,
        }
    }

    /// The same ops a layer, small enough to evaluate in a moment.
    pub fn small() -> Config {
        Config {
            layers: 2,
            n_heads: 8,
            n_kv_heads: 2,
            head_dim: 16,
            ctx: 32,
            q_len: 1,
            hidden: 64,
            intermediate: 128,
            vocab: 96,
        }
    }
}

/// The program: one function `main` from `input_ids`, `position`, `causal_mask` and the states `k_cache` and `v_cache` to
/// `logits`.
///
/// # Errors
/// When the sizes do not fit each other.
pub fn program(config: &Config) -> Result<Program, BuildError> {
    let mut model = Model::new(config);
    let input_ids = model.b.input("input_ids", DType::I32, &[1, config.q_len])?;
    let position = model.b.input("position", DType::I32, &[1])?;
    let (mut caches, shared) = model.context(position)?;
    let mut x = model.embedding(input_ids)?;
    for layer in 0..config.layers {
        x = model.layer(layer, x, &mut caches, &shared)?;
    }
    let x = model.norm("hidden_states", x)?;
    let head = model.weights.embedding.clone();
    let logits = model.linear("logits", x, head)?;
    opset::program(vec![model.b.finish(&[("logits", logits)])?])
}

/// The attention of the layers alone, one behind the other: one function `main` from `position`, `causal_mask`, the heads
/// `query`, `key` and `value` and the states `k_cache` and `v_cache` to `attn_output`. All layers write the same rows, and
/// what one returns is the query of the next.
///
/// # Errors
/// When the sizes do not fit each other.
pub fn attention(config: &Config) -> Result<Program, BuildError> {
    let c = config;
    let mut model = Model::new(c);
    let position = model.b.input("position", DType::I32, &[1])?;
    let mut query = model.b.input("query", DType::F16, &[1, c.n_heads, c.q_len, c.head_dim])?;
    let key = model.b.input("key", DType::F16, &[1, c.n_kv_heads, c.q_len, c.head_dim])?;
    let value = model.b.input("value", DType::F16, &[1, c.n_kv_heads, c.q_len, c.head_dim])?;
    let (mut caches, shared) = model.context(position)?;
    for layer in 0..c.layers {
        query = model.attend(layer, [query, key, value], &mut caches, &shared)?;
    }
    opset::program(vec![model.b.finish(&[("attn_output", query)])?])
}

type Built<T> = Result<T, BuildError>;

struct Model<'c> {
    c: &'c Config,
    b: Builder,
    weights: Weights,
}

/// What every layer reads.
struct Shared {
    mask: ValueId,
    cos: ValueId,
    sin: ValueId,
    /// The position, as a vector of one.
    begin: ValueId,
    /// Where a write ends, as an index into a cache.
    end: ValueId,
}

/// A state and its content after the last write.
struct Cache {
    state: ValueId,
    content: ValueId,
}

struct Weights {
    embedding: Literal,
    query: Literal,
    key: Literal,
    value: Literal,
    output: Literal,
    gate: Literal,
    up: Literal,
    down: Literal,
}

impl Weights {
    fn new(c: &Config) -> Weights {
        let mut seed = 0;
        let mut matrix = |outputs, inputs| {
            seed += 1;
            pseudo_random(seed, outputs, inputs)
        };
        let (q_width, kv_width) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        Weights {
            embedding: matrix(c.vocab, c.hidden),
            query: matrix(q_width, c.hidden),
            key: matrix(kv_width, c.hidden),
            value: matrix(kv_width, c.hidden),
            output: matrix(c.hidden, q_width),
            gate: matrix(c.intermediate, c.hidden),
            up: matrix(c.intermediate, c.hidden),
            down: matrix(c.hidden, c.intermediate),
        }
    }
}

impl<'c> Model<'c> {
    fn new(c: &'c Config) -> Model<'c> {
        Model { c, b: Builder::new("main", "CoreML8"), weights: Weights::new(c) }
    }

    /// The mask and the caches, whose content is read, and what follows from the position.
    fn context(&mut self, position: ValueId) -> Built<([Cache; 2], Shared)> {
        let c = self.c;
        let mask = self.b.input("causal_mask", DType::F16, &[1, 1, c.q_len, c.ctx])?;
        let shape = [c.layers, 1, c.n_kv_heads, c.ctx, c.head_dim];
        let k_cache = self.b.state("k_cache", DType::F16, &shape)?;
        let v_cache = self.b.state("v_cache", DType::F16, &shape)?;
        let (begin, end) = self.window(position)?;
        let (cos, sin) = self.rotation(position)?;
        let mut caches = [k_cache, v_cache].map(|state| Cache { state, content: state });
        for cache in &mut caches {
            cache.content = self.b.named("read_state").read_state(cache.state)?;
        }
        Ok((caches, Shared { mask, cos, sin, begin, end }))
    }

    /// Begin and end of the rows that a step writes.
    fn window(&mut self, position: ValueId) -> Built<(ValueId, ValueId)> {
        let q_len = [self.c.q_len as i64];
        let first = slice(position, [0], [1]).into_iter();
        let masks = [("end_mask", [false].into()), ("squeeze_mask", [true].into())];
        let b = self.b.named("b").op("slice_by_index", first.chain(masks))?;
        let e = self.b.named("e").add(b, q_len)?;
        let begin = self.b.named("begin").expand_dims(b, [0])?;
        Ok((begin, self.index("end", 0, e)?))
    }

    /// The index [layer, 0, 0, position, 0].
    fn index(&mut self, name: &str, layer: u64, position: ValueId) -> Built<ValueId> {
        let [layer, zero] = [layer as i64, 0].map(|n| self.b.constant(Literal::ints(&[n])));
        self.b.named(name).concat(&[layer, zero, zero, position, zero], 0)
    }

    /// Rows of the embedding table; a negative id counts from its end.
    fn embedding(&mut self, ids: ValueId) -> Built<ValueId> {
        let narrow = self.b.named("input_ids_to_int16").cast(ids, DType::I16)?;
        let ids = self.b.cast(narrow, DType::I32)?;
        let cond = self.b.greater_equal(ids, 0)?;
        let wrapped = self.b.add(ids, self.c.vocab as i64)?;
        let index = self.b.select(cond, ids, wrapped)?;
        let index = self.b.named("select_to_int16").cast(index, DType::I16)?;
        let lookup = [("x", self.weights.embedding.clone().into()), ("indices", index.into()), ("axis", 0.into())];
        let checks = [("batch_dims", 0.into()), ("validate_indices", false.into())];
        self.b.named("hidden_states").op("gather", lookup.into_iter().chain(checks))
    }

    /// Cosine and sine of the rotary embedding, [1, 1, q_len, head_dim].
    fn rotation(&mut self, position: ValueId) -> Built<(ValueId, ValueId)> {
        let positions = match self.c.q_len {
            1 => position,
            q_len => self.b.named("pos").add(position, &(0..q_len as i64).collect::<Vec<_>>()[..])?,
        };
        let ids = self.b.named("position_ids").expand_dims(positions, [0])?;
        let ids = self.b.named("position_ids").expand_dims(ids, [1])?;
        let ids = self.b.named("position_ids_to_fp16").cast(ids, DType::F16)?;
        let half = self.c.head_dim / 2;
        let inverse: Vec<f64> = (0..half).map(|i| 1e6f64.powf(-(i as f64) / half as f64)).collect();
        let inverse = Literal::floats(DType::F16, &[1, half, 1], &inverse);
        let freqs = self.b.named("freqs").matmul(inverse, ids, false, false)?;
        let freqs = self.b.named("freqs").transpose(freqs, [0, 2, 1])?;
        let emb = self.b.named("emb").concat(&[freqs, freqs], -1)?;
        let (cos, sin) = (self.b.cos(emb)?, self.b.sin(emb)?);
        Ok((self.b.named("cos").expand_dims(cos, [1])?, self.b.named("sin").expand_dims(sin, [1])?))
    }

    /// Attention and feed-forward network, each with its norm behind it.
    fn layer(&mut self, layer: u64, x: ValueId, caches: &mut [Cache; 2], shared: &Shared) -> Built<ValueId> {
        let attention = self.attention(layer, x, caches, shared)?;
        let attention = self.norm("hidden_states", attention)?;
        let x = self.b.named("input").add(x, attention)?;
        let mlp = self.feed_forward(x)?;
        let mlp = self.norm("hidden_states", mlp)?;
        self.b.named("hidden_states").add(x, mlp)
    }

    fn attention(&mut self, layer: u64, x: ValueId, caches: &mut [Cache; 2], shared: &Shared) -> Built<ValueId> {
        let Weights { query, key, value, output, .. } = &self.weights;
        let [query, key, value, output] = [query, key, value, output].map(Literal::clone);
        let query = self.heads("query", x, query)?;
        let key = self.heads("key", x, key)?;
        let value = self.heads("value", x, value)?;
        let query = self.normed_and_rotated("query", query, self.c.n_heads, shared)?;
        let key = self.normed_and_rotated("key", key, self.c.n_kv_heads, shared)?;

        let out = self.attend(layer, [query, key, value], caches, shared)?;
        let out = self.b.named("attn_output").transpose(out, [0, 2, 1, 3])?;
        let out = self.b.named("attn_output").reshape(out, [1, self.c.q_len as i64, -1])?;
        self.linear("linear", out, output)
    }

    /// The part that a cache is read and written for: writes the new rows, reads all and attends to them.
    fn attend(
        &mut self,
        layer: u64,
        [query, key, value]: [ValueId; 3],
        caches: &mut [Cache; 2],
        shared: &Shared,
    ) -> Built<ValueId> {
        let begin = self.index("begin", layer, shared.begin)?;
        let [k_cache, v_cache] = caches;
        self.write(k_cache, key, begin, shared.end)?;
        self.write(v_cache, value, begin, shared.end)?;
        let key = self.repeated("key_states", layer, k_cache.content)?;
        let value = self.repeated("value_states", layer, v_cache.content)?;

        let scores = self.b.named("scores").matmul(query, key, false, true)?;
        let scaled = self.b.named("attn_weights").mul(scores, half((self.c.head_dim as f64).sqrt().recip()))?;
        let masked = self.b.named("masked").add(scaled, shared.mask)?;
        let weights = self.b.softmax(masked, -1)?;
        self.b.named("attn_output").matmul(weights, value, false, false)
    }

    /// A projection split into heads, [1, n, q_len, head_dim].
    fn heads(&mut self, name: &str, x: ValueId, weight: Literal) -> Built<ValueId> {
        let x = self.linear("linear", x, weight)?;
        let x = self.b.named(name).reshape(x, [1, self.c.q_len as i64, -1, self.c.head_dim as i64])?;
        self.b.named(name).transpose(x, [0, 2, 1, 3])
    }

    /// RMS norm over the last axis.
    fn norm(&mut self, name: &str, x: ValueId) -> Built<ValueId> {
        let square = self.b.pow(x, half(2.0))?;
        let variance = self.b.named("variance").reduce_mean(square, &[-1], true)?;
        let shifted = self.b.add(variance, half(1e-5))?;
        let epsilon = Literal::floats(DType::F32, &[], &[1e-12]);
        let scale = self.b.op("rsqrt", [("x", shifted.into()), ("epsilon", epsilon.into())])?;
        self.b.named(name).mul(x, scale)
    }

    /// `x · cos + rotate_half(x) · sin` of the normed heads.
    fn normed_and_rotated(&mut self, name: &str, x: ValueId, n: u64, shared: &Shared) -> Built<ValueId> {
        let (n, q_len, width) = (n as i64, self.c.q_len as i64, self.c.head_dim as i64);
        let x = self.norm("hidden_states", x)?;
        let straight = self.b.mul(x, shared.cos)?;
        let low = slice(x, [0; 4], [1, n, q_len, width / 2]).into_iter();
        let low =
            self.b.named("x1").op("slice_by_index", low.chain([("end_mask", [true, true, true, false].into())]))?;
        let high = slice(x, [0, 0, 0, width / 2], [1, n, q_len, width]).into_iter();
        let high = self.b.named("x2").op("slice_by_index", high.chain([("end_mask", [true; 4].into())]))?;
        let negated = self.b.mul(high, half(-1.0))?;
        let turned = self.b.concat(&[negated, low], -1)?;
        let turned = self.b.mul(turned, shared.sin)?;
        self.b.named(name).add(straight, turned)
    }

    /// Writes rows into a cache and reads it again.
    fn write(&mut self, cache: &mut Cache, update: ValueId, begin: ValueId, end: ValueId) -> Built<()> {
        let window = [("update", update.into()), ("stride", [1; 5].into()), ("begin_mask", [false; 5].into())];
        let masks = [
            ("end_mask", [false, true, true, false, true].into()),
            ("squeeze_mask", [true, false, false, false, false].into()),
        ];
        let params = slice(cache.content, begin, end).into_iter().chain(window).chain(masks);
        let written = self.b.named("internal_tensor_assign").op("slice_update", params)?;
        self.b.write_state(cache.state, written)?;
        cache.content = self.b.named("coreml_update_state").read_state(cache.state)?;
        Ok(())
    }

    /// A layer's part of a cache with every head copied for each of its query heads, [1, n_heads, ctx, head_dim].
    fn repeated(&mut self, name: &str, layer: u64, content: ValueId) -> Built<ValueId> {
        let [layer, n_heads, n_kv_heads, ctx, head_dim] =
            [layer, self.c.n_heads, self.c.n_kv_heads, self.c.ctx, self.c.head_dim].map(|n| n as i64);
        let part = slice(content, [layer, 0, 0, 0, 0], [layer + 1, 1, n_kv_heads, ctx, head_dim]);
        let masks = [
            ("end_mask", [false, true, true, true, true].into()),
            ("squeeze_mask", [true, false, false, false, false].into()),
        ];
        let part = self.b.op("slice_by_index", part.into_iter().chain(masks))?;
        let wide = self.b.expand_dims(part, [2])?;
        let tiled = self.b.named("hidden_states").tile(wide, [1, 1, n_heads / n_kv_heads, 1, 1])?;
        self.b.named(name).reshape(tiled, [1, n_heads, ctx, head_dim])
    }

    fn feed_forward(&mut self, x: ValueId) -> Built<ValueId> {
        let Weights { gate, up, down, .. } = &self.weights;
        let [gate, up, down] = [gate, up, down].map(Literal::clone);
        let gate = self.linear("linear", x, gate)?;
        let gate = self.b.silu(gate)?;
        let up = self.linear("linear", x, up)?;
        let product = self.b.named("input").mul(gate, up)?;
        self.linear("linear", product, down)
    }

    /// A projection with the zero bias that coremltools adds.
    fn linear(&mut self, name: &str, x: ValueId, weight: Literal) -> Built<ValueId> {
        let outputs = weight.ty.as_tensor().and_then(|t| t.shape[0].as_known()).unwrap_or(0);
        let bias = Literal::floats(DType::F16, &[outputs], &vec![0.0; outputs as usize]);
        self.b.named(name).linear(x, weight, Some(bias.into()))
    }
}

fn slice(x: ValueId, begin: impl Into<Arg>, end: impl Into<Arg>) -> [(&'static str, Arg); 3] {
    [("x", x.into()), ("begin", begin.into()), ("end", end.into())]
}

fn half(x: f64) -> Literal {
    Literal::floats(DType::F16, &[], &[x])
}

/// A matrix [outputs, inputs] of halves whose products keep the magnitude of what they multiply.
fn pseudo_random(seed: u64, outputs: u64, inputs: u64) -> Literal {
    let mut state = seed;
    let scale = (3.0 / inputs as f64).sqrt();
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale
    };
    let values: Vec<f64> = (0..outputs * inputs).map(|_| next()).collect();
    Literal::floats(DType::F16, &[outputs, inputs], &values)
}
