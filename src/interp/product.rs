//! Products of matrices: in blocks of rows and columns, over operands as they lie in memory.

use smallvec::SmallVec;

use super::error::Fault;
use super::lanes::{self, LANES, dot};
use super::num::Num;
use super::par;
use super::tensor::{Data, Dims, Tensor, volume};
use super::view::{View, broadcast_shapes};
use crate::ir::DType;

/// A stack of matrices, rank 2 at least: a view of elements in memory.
#[derive(Clone)]
pub(super) struct Stack<'a> {
    pub dtype: DType,
    pub data: &'a Data,
    pub view: View,
}

/// One matrix: element (i, j) lies at `start + i·row + j·step`.
#[derive(Clone, Copy)]
struct Matrix<'a, T> {
    data: &'a Data,
    /// The elements, where they need no conversion.
    plain: Option<&'a [T]>,
    start: usize,
    row: isize,
    step: isize,
}

/// Part of the rows and columns of one product.
struct Block<'o, T> {
    matrix: usize,
    row: usize,
    column: usize,
    out: SmallVec<[&'o mut [T]; 1]>,
}

/// Most rows of a block.
const ROWS: usize = 32;

/// Elements of an operand that are multiplied while they are in the first-level cache.
const CACHED: usize = 1 << 12;

/// Columns that [`by_rows`] treats at a time, and rows of y that it multiplies with them: both together fit the
/// first-level cache.
const COLUMNS: usize = 8 * LANES;
const CHUNK: usize = 4 * LANES;

impl<'a> Stack<'a> {
    pub fn of(t: &'a Tensor) -> Stack<'a> {
        Stack { dtype: t.dtype(), data: t.data(), view: t.view() }
    }

    /// The last two axes swapped.
    pub fn transposed(self) -> Stack<'a> {
        let rank = self.view.shape().len();
        let mut perm: SmallVec<[usize; 5]> = (0..rank).collect();
        if let [.., a, b] = &mut perm[..] {
            std::mem::swap(a, b);
        }
        Stack { view: self.view.permuted(&perm), ..self }
    }

    /// The matrices of the stack when its leading axes are broadcast to `batch`.
    fn matrices<T: Num>(&self, batch: &[usize], [m, n]: [usize; 2]) -> Result<Vec<Matrix<'a, T>>, Fault> {
        if !T::reads(self.data) {
            return Err(Fault::dtype("an operand", self.dtype, "a type of the same kind as the other operand"));
        }
        let shape: Dims = batch.iter().copied().chain([m, n]).collect();
        let view = self.view.broadcast(&shape).ok_or_else(|| Fault::Shape("batch axes do not broadcast".into()))?;
        let (data, plain) = (self.data, T::of(self.data));
        let (row, step) = (view.stride(batch.len()), view.stride(batch.len() + 1));
        let starts = view.leading(batch.len()).offsets()?;
        Ok(starts.into_iter().map(|start| Matrix { data, plain, start, row, step }).collect())
    }
}

impl<'a, T: Num> Matrix<'a, T> {
    fn transposed(self) -> Matrix<'a, T> {
        Matrix { row: self.step, step: self.row, ..self }
    }

    /// Where element (i, j) lies.
    fn at(&self, i: usize, j: usize) -> usize {
        (self.start as isize + i as isize * self.row + j as isize * self.step) as usize
    }

    /// `count` whole rows of k elements from row i on, one behind the other. Where they do not lie so, `buffer` is filled
    /// with them.
    fn rows(&self, i: usize, count: usize, k: usize, buffer: &mut Vec<T>) -> Option<&'a [T]> {
        let adjacent = self.step == 1 && (count == 1 || self.row == k as isize);
        if let Some(plain) = self.plain.filter(|_| adjacent) {
            return Some(&plain[self.at(i, 0)..][..count * k]);
        }
        buffer.resize(count * k, T::ZERO);
        if adjacent {
            T::fetch(self.data, self.at(i, 0), 1, buffer);
        } else {
            let rows = buffer.chunks_exact_mut(k).enumerate();
            rows.for_each(|(r, out)| T::fetch(self.data, self.at(i + r, 0), self.step, out));
        }
        None
    }
}

/// The product of stacks of matrices whose leading axes broadcast.
pub(super) fn product<T: Num>(x: &Stack<'_>, y: &Stack<'_>) -> Result<(Vec<T>, Dims), Fault> {
    let (x_shape, y_shape) = (x.view.shape(), y.view.shape());
    let no_product = || Fault::Shape(format!("shapes {x_shape:?} and {y_shape:?} do not multiply"));
    let (Some((x_batch, &[m, k])), Some((y_batch, &[y_k, n]))) =
        (x_shape.split_last_chunk::<2>(), y_shape.split_last_chunk::<2>())
    else {
        return Err(no_product());
    };
    if k != y_k {
        return Err(no_product());
    }
    let mut shape = broadcast_shapes([x_batch, y_batch])?;
    let (xs, ys) = (x.matrices::<T>(&shape, [m, k])?, y.matrices::<T>(&shape, [k, n])?);
    shape.extend([m, n]);
    let mut out = vec![T::ZERO; volume(&shape)?];
    if k == 0 {
        return Ok((out, shape));
    }
    let work = out.len().saturating_mul(k);
    let rows = (16 * CACHED / k).clamp(1, ROWS);
    par::each(blocks(&mut out, [m, n], rows, k), work, |block| {
        let (x, y) = (&xs[block.matrix], &ys[block.matrix]);
        if y.step == 1 && n > 1 {
            by_rows(x, y, block, k);
        } else {
            let (mut buffer, y) = (Vec::new(), y.transposed());
            let xs = x.rows(block.row, block.out.len(), k, &mut buffer).unwrap_or(&buffer);
            by_dots(xs, |first, count, buffer| y.rows(first, count, k, buffer), block, k);
        }
    });
    Ok((out, shape))
}

/// The products of matrices `x` [m, k] with others whose columns `y` makes, in stacks of equal size: it gets the number of
/// the product and of its first column and fills whole columns of k elements.
pub(super) fn product_with<'a, T: Num>(
    out: &mut [T],
    [m, k, n]: [usize; 3],
    x: impl Fn(usize) -> &'a [T] + Send + Sync,
    y: impl Fn(usize, usize, &mut [T]) + Send + Sync,
) {
    if k == 0 {
        return;
    }
    let work = out.len().saturating_mul(k);
    par::each(blocks(out, [m, n], m, k), work, |block| {
        let matrix = block.matrix;
        let columns = |first, count, buffer: &mut Vec<T>| {
            buffer.resize(count * k, T::ZERO);
            y(matrix, first, buffer);
            None
        };
        by_dots(x(matrix), columns, block, k);
    });
}

/// The results [.., m, n], cut into blocks of up to `rows` rows.
fn blocks<T>(out: &mut [T], [m, n]: [usize; 2], rows: usize, k: usize) -> Vec<Block<'_, T>> {
    let mut blocks = Vec::new();
    if out.is_empty() {
        return blocks;
    }
    let rows = rows.min(m);
    let columns = (4 * par::GRAIN / (rows * k).max(1)).next_multiple_of(COLUMNS).max(COLUMNS);
    for (matrix, out) in out.chunks_mut(m * n).enumerate() {
        for (i, out) in out.chunks_mut(rows * n).enumerate() {
            let first = blocks.len();
            for row in out.chunks_mut(n) {
                for (j, part) in row.chunks_mut(columns).enumerate() {
                    if first + j == blocks.len() {
                        blocks.push(Block { matrix, row: i * rows, column: j * columns, out: SmallVec::new() });
                    }
                    blocks[first + j].out.push(part);
                }
            }
        }
    }
    blocks
}

/// Every element as the dot product of a row of `x` and a column, of which `y` gives some one behind the other, in the
/// buffer if not elsewhere.
fn by_dots<'y, T: Num>(
    x: &[T],
    y: impl Fn(usize, usize, &mut Vec<T>) -> Option<&'y [T]>,
    mut block: Block<'_, T>,
    k: usize,
) {
    let mut buffer = Vec::new();
    let (width, together) = (block.out[0].len(), (CACHED / k).max(1));
    for j in (0..width).step_by(together) {
        let count = together.min(width - j);
        let ys = y(block.column + j, count, &mut buffer).unwrap_or(&buffer);
        for (x, out) in x.chunks_exact(k).zip(&mut block.out) {
            out[j..j + count].iter_mut().zip(ys.chunks_exact(k)).for_each(|(o, y)| *o = dot(x, y));
        }
    }
}

/// Rows of `y`, scaled by elements of `x`, added to the partial sums of all columns.
fn by_rows<T: Num>(x: &Matrix<'_, T>, y: &Matrix<'_, T>, mut block: Block<'_, T>, k: usize) {
    let (mut x_buffer, mut y_buffer) = (Vec::new(), vec![[T::ZERO; COLUMNS]; CHUNK.min(k)]);
    let xs = x.rows(block.row, block.out.len(), k, &mut x_buffer).unwrap_or(&x_buffer);
    let mut sums = vec![[[T::ZERO; COLUMNS]; LANES]; block.out.len()];
    let width = block.out[0].len();
    for j in (0..width).step_by(COLUMNS) {
        let count = COLUMNS.min(width - j);
        sums.fill([[T::ZERO; COLUMNS]; LANES]);
        for first in (0..k).step_by(CHUNK) {
            let ys = &mut y_buffer[..CHUNK.min(k - first)];
            for (r, row) in ys.iter_mut().enumerate() {
                T::fetch(y.data, y.at(first + r, block.column + j), 1, &mut row[..count]);
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                lanes::add_columns(sums, &xs[i * k + first..][..ys.len()], ys, count);
            }
        }
        for (sums, out) in sums.iter_mut().zip(&mut block.out) {
            out[j..j + count].copy_from_slice(&lanes::combine_columns(sums)[..count]);
        }
    }
}
