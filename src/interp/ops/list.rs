//! Lists: tensors whose first axis numbers the elements. Every list grows with what is written to it, as the loader of
//! coremltools has it; an element that was never written holds zeros, which nothing documents.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::tensor::{Dims, Tensor, volume, with_element};
use super::gather::positions;
use crate::ir::{DType, TensorType};

/// A size that is given as a string is not known yet: the list has no elements in the tensor until one is written.
pub(super) fn make_list(call: &Call<'_>) -> Result<Tensor, Fault> {
    let length = call.int_or("init_length", 1)?;
    let sizes = call.tensors("elem_shape")?;
    let size = |t: &Tensor| if t.as_str().is_some() { Some(0) } else { u64::try_from(*t.to_i64s().first()?).ok() };
    let sizes: Option<Vec<u64>> = std::iter::once(u64::try_from(length).ok()).chain(sizes.iter().map(size)).collect();
    let dtype = call.dtype_or("dtype", DType::F32)?;
    let zeros = sizes.and_then(|sizes| Tensor::zeros(&TensorType::fixed(dtype, &sizes)));
    zeros.map(|t| call.mode().admit(&t)).ok_or_else(|| Fault::Shape("the list has no shape".into()))
}

pub(super) fn list_length(call: &Call<'_>) -> Result<Tensor, Fault> {
    Ok(Tensor::ints(DType::I32, &[], &[elements(&call.tensor("ls")?)? as i64]))
}

/// The number of elements.
fn elements(list: &Tensor) -> Result<usize, Fault> {
    list.shape().first().copied().ok_or_else(|| Fault::Shape("a scalar is no list".into()))
}

pub(super) fn list_write(call: &Call<'_>) -> Result<Tensor, Fault> {
    let value = call.tensor("value")?;
    write(&call.tensor("ls")?, &[call.int("index")?], &value, value.shape())
}

pub(super) fn list_scatter(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (indices, value) = (call.ints("indices")?, call.tensor("value")?);
    match value.shape() {
        [n, shape @ ..] if *n == indices.len() => write(&call.tensor("ls")?, &indices, &value, shape),
        shape => Err(Fault::Shape(format!("values of shape {shape:?} for {} indices", indices.len()))),
    }
}

/// The list with elements of `shape` replaced, the last of equal indices by the last value.
fn write(list: &Tensor, indices: &[i64], values: &Tensor, shape: &[usize]) -> Result<Tensor, Fault> {
    let length = elements(list)?;
    if values.dtype() != list.dtype() {
        return Err(Fault::dtype("value", values.dtype(), list.dtype()));
    }
    if list.rank() != shape.len() + 1 || !(list.is_empty() || &list.shape()[1..] == shape) {
        return Err(Fault::Shape(format!("an element of shape {shape:?} for a list of {:?}", &list.shape()[1..])));
    }
    let places: Option<Vec<usize>> = indices.iter().map(|&i| usize::try_from(i).ok()).collect();
    let places = places.ok_or_else(|| Fault::Range("a list has no element of a negative index".into()))?;
    let grown = places.iter().fold(length, |n, &p| n.max(p.saturating_add(1)));
    let mut dims: Dims = [grown].as_slice().into();
    dims.extend_from_slice(shape);
    let (len, block) = (volume(&dims)?, volume(shape)?);
    with_element!(list, T => {
        let mut out = list.elements::<T>()?.to_vec();
        out.resize(len, T::default());
        for (&place, value) in places.iter().zip(values.elements::<T>()?.chunks(block.max(1))) {
            out[place * block..][..block].clone_from_slice(value);
        }
        Ok(list.like(dims, out))
    })
}

pub(super) fn list_read(call: &Call<'_>) -> Result<Tensor, Fault> {
    let index = call.tensor("index")?;
    let read = read(call, &index)?;
    let element = read.reshaped(&read.shape()[1..]);
    element.ok_or_else(|| Fault::Shape(format!("index of shape {:?} is no scalar", index.shape())))
}

pub(super) fn list_gather(call: &Call<'_>) -> Result<Tensor, Fault> {
    read(call, &call.tensor("indices")?)
}

fn read(call: &Call<'_>, indices: &Tensor) -> Result<Tensor, Fault> {
    let list = call.tensor("ls")?;
    let positions = positions(call, indices, elements(&list)?)?;
    let mut dims = list.dims();
    dims[0] = positions.len();
    let (len, block) = (volume(&dims)?, volume(&dims[1..])?);
    with_element!(list, T => {
        let source = list.elements::<T>()?;
        let mut out: Vec<T> = Vec::with_capacity(len);
        positions.iter().for_each(|&p| out.extend_from_slice(&source[p * block..][..block]));
        Ok(list.like(dims, out))
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Op, assert_close, f32s, i32s, iota};
    use super::*;

    fn made() -> Op {
        Op::new("make_list").with("elem_shape", vec![i32s(&[], &[2]), i32s(&[], &[1])]).with("dtype", "fp32")
    }

    #[test]
    fn lists_start_as_zeros_and_grow() {
        let list = made().with("init_length", 2).one();
        assert_close(&list, &[2, 2, 1], &[0.0; 4], 0.0);
        let write = |index: i64| {
            let op = Op::new("list_write").with("ls", list.clone()).with("index", index);
            op.with("value", f32s(&[2, 1], &[1.0, 2.0]))
        };
        assert_close(&write(1).one(), &[2, 2, 1], &[0.0, 0.0, 1.0, 2.0], 0.0);
        let grown = write(3).one();
        assert_close(&grown, &[4, 2, 1], &[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0], 0.0);
        assert_eq!(Op::new("list_length").with("ls", grown).one().to_i64s(), [4]);
        assert!(write(-1).fault().contains("negative index"));
        assert!(write(1 << 30).fault().contains("too large"));
        assert_eq!(made().exact().one().shape(), [1, 2, 1]);
    }

    #[test]
    fn elements_are_read_alone_or_stacked() {
        let read = |index: i64| Op::new("list_read").with("ls", iota(&[3, 2])).with("index", index);
        assert_close(&read(2).one(), &[2], &[4.0, 5.0], 0.0);
        assert!(read(3).fault().contains("outside an axis of 3"));
        let gathered = Op::new("list_gather").with("ls", iota(&[3, 2])).with("indices", [2, 0]).one();
        assert_close(&gathered, &[2, 2], &[4.0, 5.0, 0.0, 1.0], 0.0);
    }

    #[test]
    fn scattered_values_must_fit() {
        let scatter = |values: Tensor| {
            Op::new("list_scatter").with("ls", iota(&[2, 2])).with("indices", [2, 0]).with("value", values)
        };
        assert_close(
            &scatter(f32s(&[2, 2], &[7.0, 8.0, 9.0, 6.0])).one(),
            &[3, 2],
            &[9.0, 6.0, 2.0, 3.0, 7.0, 8.0],
            0.0,
        );
        assert!(scatter(f32s(&[1, 2], &[0.0; 2])).fault().contains("for 2 indices"));
        assert!(scatter(f32s(&[2, 1], &[0.0; 2])).fault().contains("an element of shape [1]"));
        assert!(scatter(i32s(&[2, 2], &[0; 4])).try_all().is_err());
    }

    #[test]
    fn sizes_given_as_strings_are_those_of_the_first_element() {
        let unknown = f32s(&[1, 0], &[]);
        let op = Op::new("list_write").with("ls", unknown).with("index", 0).with("value", f32s(&[2], &[1.0, 2.0]));
        assert_close(&op.one(), &[1, 2], &[1.0, 2.0], 0.0);
    }
}
