//! Products of matrices.

use crate::ir::{DType, Dim};

use super::context::{Tensor, one};
use super::{Context, Dims, Inferred, Problem, Stop, dims};

/// Rows, columns and batch axes of one side of a product. A vector lacks one of rows and columns.
struct Matrix {
    batch: Dims,
    rows: Option<Dim>,
    columns: Option<Dim>,
}

fn matrix(t: &Tensor, param: &'static str, transposed: bool) -> Result<Matrix, Stop> {
    let batch = t.dims.iter().take(t.rank().saturating_sub(2)).cloned().collect();
    match &t.dims[..] {
        [] => Err(Problem::rank(param, 0, "at least 1 is needed").into()),
        [_] if transposed => Err(Problem::rank(param, 1, "a transposed operand needs at least 2").into()),
        [k] if param == "x" => Ok(Matrix { batch, rows: dims::known(1), columns: k.clone() }),
        [k] => Ok(Matrix { batch, rows: k.clone(), columns: dims::known(1) }),
        [.., a, b] if transposed => Ok(Matrix { batch, rows: b.clone(), columns: a.clone() }),
        [.., a, b] => Ok(Matrix { batch, rows: a.clone(), columns: b.clone() }),
    }
}

fn contract(a: &Option<Dim>, b: &Option<Dim>, x: &Tensor, y: &Tensor) -> Result<(), Stop> {
    if dims::may_equal(a, b) {
        return Ok(());
    }
    let (x, y) = (dims::show(&x.dims), dims::show(&y.dims));
    Err(Problem::sizes(format!("the contracted sizes of {x} and {y} differ")).into())
}

/// Numpy's matmul after the optional swap of the last two axes of either side.
pub(in crate::opset) fn matmul(c: &Context<'_>) -> Inferred {
    let (x, y) = (c.tensor("x")?, c.tensor("y")?);
    let dtype = matmul_dtype(c, &x, &y)?;
    let a = matrix(&x, "x", c.bool("transpose_x")?)?;
    let b = matrix(&y, "y", c.bool("transpose_y")?)?;
    contract(&a.columns, &b.rows, &x, &y)?;
    let mut out = dims::broadcast(&a.batch, &b.batch)?;
    if x.rank() > 1 {
        out.push(a.rows);
    }
    if y.rank() > 1 {
        out.push(b.columns);
    }
    one(dtype, out)
}

/// Element types may differ from CoreML7 on when exactly one side is a constant; the other side's is the result's.
fn matmul_dtype(c: &Context<'_>, x: &Tensor, y: &Tensor) -> Result<DType, Stop> {
    if x.dtype == y.dtype {
        return Ok(x.dtype);
    }
    let constant = |name| c.f.const_param(c.op, name).is_some();
    match (constant("x"), constant("y")) {
        (true, false) => Ok(y.dtype),
        (false, true) => Ok(x.dtype),
        _ => Err(Problem::Group { param: "y", dtype: y.dtype, other: "x", other_dtype: x.dtype }.into()),
    }
}

/// `x` times the transposed weight, plus a bias.
pub(in crate::opset) fn linear(c: &Context<'_>) -> Inferred {
    let (x, weight) = (c.tensor("x")?, c.tensor("weight")?);
    weight.rank_in("weight", 2, 2)?;
    let mut out = x.dims.clone();
    let last = out.last_mut().ok_or_else(|| Problem::rank("x", 0, "at least 1 is needed"))?;
    contract(last, &weight.dims[1], &x, &weight)?;
    *last = weight.dims[0].clone();
    if let Some(bias) = c.optional("bias")? {
        bias.rank_in("bias", 1, 1)?;
        if !dims::may_equal(&bias.dims[0], &weight.dims[0]) {
            return Err(Problem::value("bias", "does not have one entry per output").into());
        }
    }
    one(x.dtype, out)
}

/// The two equations that MIL knows, with letters numbered in order of appearance.
const EQUATIONS: [&str; 2] = ["0123,0324->0124", "012,213->013"];

/// Contraction of two tensors; axes of size one broadcast.
pub(in crate::opset) fn einsum(c: &Context<'_>) -> Inferred {
    let text: String = c.str("equation")?.chars().filter(|ch| !ch.is_whitespace()).collect();
    let canonical = numbered(&text);
    if !EQUATIONS.contains(&canonical.as_str()) {
        return Err(Problem::value("equation", format!("`{text}` is not supported")).into());
    }
    let values = c.tensors("values")?;
    let [x, y] = &values[..] else {
        return Err(Problem::Bindings { param: "values", count: values.len() }.into());
    };
    if x.dtype != y.dtype {
        return Err(Problem::value("values", format!("element types {} and {} differ", x.dtype, y.dtype)).into());
    }
    let (inputs, output) = canonical.split_once("->").ok_or(Stop::Unknown)?;
    let (left, right) = inputs.split_once(',').ok_or(Stop::Unknown)?;
    let mut sizes: Vec<(char, Option<Dim>)> = Vec::new();
    for (label, t) in [(left, x), (right, y)] {
        if label.len() != t.rank() {
            return Err(Problem::rank("values", t.rank(), format!("{} is needed", label.len())).into());
        }
        for (ch, d) in label.chars().zip(&t.dims) {
            match sizes.iter_mut().find(|(seen, _)| *seen == ch) {
                Some((_, size)) => *size = dims::broadcast(&[size.clone()], &[d.clone()])?.pop().flatten(),
                None => sizes.push((ch, d.clone())),
            }
        }
    }
    let size = |ch| sizes.iter().find(|(seen, _)| *seen == ch).and_then(|(_, d)| d.clone());
    one(x.dtype, output.chars().map(size).collect())
}

fn numbered(equation: &str) -> String {
    let mut letters: Vec<char> = Vec::new();
    let number = |ch: char| {
        if !ch.is_ascii_alphabetic() {
            return ch;
        }
        let at = letters.iter().position(|l| *l == ch).unwrap_or_else(|| {
            letters.push(ch);
            letters.len() - 1
        });
        u32::try_from(at).ok().and_then(|n| char::from_digit(n, 36)).unwrap_or('?')
    };
    equation.chars().map(number).collect()
}

/// `softmax(q kᵀ / sqrt(E) + mask) v`; leading axes are equal, they do not broadcast.
pub(in crate::opset) fn attention(c: &Context<'_>) -> Inferred {
    let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
    let rank = q.rank();
    for (t, name) in [(&q, "query"), (&k, "key"), (&v, "value")] {
        if rank < 3 || t.rank() != rank {
            return Err(Problem::rank(name, t.rank(), "equal ranks of at least 3 are needed").into());
        }
    }
    let lead = |a: &Tensor, b: &Tensor, n: usize| a.dims.iter().zip(&b.dims).take(n).all(|(a, b)| dims::may_equal(a, b));
    if !lead(&q, &k, rank - 2) || !dims::may_equal(&q.dims[rank - 1], &k.dims[rank - 1]) {
        return Err(mismatch("key", &k, &q));
    }
    if !lead(&k, &v, rank - 1) {
        return Err(mismatch("value", &v, &k));
    }
    let mut out = q.dims.clone();
    if let Some(mask) = c.optional("attn_mask")? {
        let mut scores = q.dims.clone();
        scores[rank - 1] = k.dims[rank - 2].clone();
        let whole = dims::broadcast(&mask.dims, &scores)?;
        let fits = whole.len() == rank && whole.iter().zip(&scores).all(|(a, b)| dims::may_equal(a, b));
        let last = mask.dims.last().is_some_and(|d| dims::may_equal(d, &scores[rank - 1]));
        if !fits || !last {
            let (mask, scores) = (dims::show(&mask.dims), dims::show(&scores));
            return Err(Problem::value("attn_mask", format!("{mask} does not fit scores {scores}")).into());
        }
    }
    out[rank - 1] = v.dims[rank - 1].clone();
    one(q.dtype, out)
}

fn mismatch(param: &'static str, a: &Tensor, b: &Tensor) -> Stop {
    Problem::value(param, format!("{} does not go with {}", dims::show(&a.dims), dims::show(&b.dims))).into()
}
