//! Convolutions of one to three spatial axes.

use super::super::call::{Call, with_real};
use super::super::error::Fault;
use super::super::num::Real;
use super::super::product::product_with;
use super::super::tensor::{Dims, Tensor, volume};
use super::super::view::View;
use super::window::{Windows, custom_pads, effective, halves, positives};

/// x [n, C_in, …] and weight [C_out, C_in / groups, …], with the number of groups.
fn operands(call: &Call<'_>, x: &Tensor, weight: &Tensor) -> Result<usize, Fault> {
    let groups = call.int_or("groups", 1)?;
    let groups = usize::try_from(groups).ok().filter(|&g| g > 0);
    let groups = groups.ok_or_else(|| Fault::Value("groups is not positive".into()))?;
    if x.rank() != weight.rank() || !(3..=5).contains(&x.rank()) {
        return Err(Fault::Shape(format!("x {:?} and weight {:?} are no convolution", x.shape(), weight.shape())));
    }
    Ok(groups)
}

fn bias<R: Real>(call: &Call<'_>, channels: usize) -> Result<Option<Vec<R>>, Fault> {
    match call.optional("bias")? {
        None => Ok(None),
        Some(b) if b.shape() == [channels] => Ok(Some(b.reals::<R>()?.into_owned())),
        Some(b) => Err(Fault::Shape(format!("bias of shape {:?} for {channels} channels", b.shape()))),
    }
}

/// Cross-correlation.
pub(super) fn conv(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, weight) = (call.tensor("x")?, call.tensor("weight")?);
    let groups = operands(call, &x, &weight)?;
    let windows = Windows::new(call, &x.shape()[2..], &weight.shape()[2..])?;
    with_real!([x, weight], R => {
        let bias = bias::<R>(call, weight.shape()[0])?;
        let (out, shape) = correlate(&x.reals::<R>()?, x.shape(), &weight.reals::<R>()?, weight.shape(), groups, &windows)?;
        Ok(call.real_result::<R>(x.dtype(), &shape, biased(out, &shape, bias.as_deref())?))
    })
}

/// Adds a number to each channel.
fn biased<R: Real>(mut out: Vec<R>, shape: &[usize], bias: Option<&[R]>) -> Result<Vec<R>, Fault> {
    if let Some(bias) = bias {
        let inner = volume(&shape[2..])?.max(1);
        for (i, channel) in out.chunks_mut(inner).enumerate() {
            channel.iter_mut().for_each(|v| *v = v.plus(bias[i % bias.len()]));
        }
    }
    Ok(out)
}

fn correlate<R: Real>(
    x: &[R],
    x_shape: &[usize],
    weight: &[R],
    w_shape: &[usize],
    groups: usize,
    windows: &Windows,
) -> Result<(Vec<R>, Dims), Fault> {
    let (batch, c_in, c_out, c_group) = (x_shape[0], x_shape[1], w_shape[0], w_shape[1]);
    if c_group.checked_mul(groups) != Some(c_in) || c_out % groups != 0 {
        return Err(Fault::Shape(format!("x {x_shape:?} and weight {w_shape:?} do not form {groups} groups")));
    }
    let mut shape: Dims = [batch, c_out].as_slice().into();
    shape.extend_from_slice(&windows.output);
    let mut out = vec![R::ZERO; volume(&shape)?];
    if out.is_empty() {
        return Ok((out, shape));
    }
    let (outputs, inputs, taps) = (volume(&windows.output)?, volume(&windows.input)?, volume(&windows.kernel)?);
    let sources = windows.sources()?;
    let (k, per_group) = (c_group * taps, c_out / groups);
    let kernels = |i: usize| &weight[i % groups * per_group * k..][..per_group * k];
    product_with(&mut out, [per_group, k, outputs], kernels, |i, first, patches| {
        let channels = &x[i * c_group * inputs..][..c_group * inputs];
        for (o, patch) in patches.chunks_exact_mut(k).enumerate() {
            let taps_at = &sources[(first + o) * taps..][..taps];
            for (patch, channel) in patch.chunks_exact_mut(taps).zip(channels.chunks_exact(inputs.max(1))) {
                patch.iter_mut().zip(taps_at).for_each(|(p, source)| *p = source.map_or(R::ZERO, |s| channel[s]));
            }
        }
    });
    Ok((out, shape))
}

/// The transpose of [`conv`]: each input spreads its kernel over the output. Evaluated as the correlation of the input,
/// spaced out by the stride, with the flipped kernel.
pub(super) fn conv_transpose(call: &Call<'_>) -> Result<Tensor, Fault> {
    let (x, weight) = (call.tensor("x")?, call.tensor("weight")?);
    let groups = operands(call, &x, &weight)?;
    let n = x.rank() - 2;
    let (input, kernel) = (&x.shape()[2..], &weight.shape()[2..]);
    let (strides, dilations) = (positives(call, "strides", n)?, positives(call, "dilations", n)?);
    let pad_type = call.str_or("pad_type", "valid")?;
    let custom = custom_pads(call, n)?;
    let wanted = call.optional_ints("output_shape")?;
    let mut windows = Windows {
        input: Dims::new(),
        kernel: kernel.into(),
        strides: Dims::from_elem(1, n),
        dilations: dilations.clone(),
        before: Dims::new(),
        after: Dims::from_elem(0, n),
        output: Dims::new(),
    };
    for i in 0..n {
        let span = effective(kernel[i], dilations[i])?;
        let spaced = input[i].checked_sub(1).and_then(|v| v.checked_mul(strides[i])).and_then(|v| v.checked_add(1));
        let spaced = spaced.ok_or_else(|| Fault::Shape("the input is empty or too large".into()))?;
        let full = spaced.checked_add(span - 1).ok_or_else(|| Fault::TooLarge(x.shape().to_vec()))?;
        let given =
            wanted.as_ref().and_then(|w| w.get(i + w.len().checked_sub(n)?)).and_then(|&v| usize::try_from(v).ok());
        let (cut_before, natural) = match pad_type.as_str() {
            "valid" => (0, full),
            "custom" => (custom[i].0, full.saturating_sub(custom[i].0).saturating_sub(custom[i].1)),
            "same" | "same_lower" => {
                let size = given.unwrap_or(strides[i] * input[i]);
                (halves(full.saturating_sub(size), &pad_type).0, size)
            }
            _ => return Err(Fault::Value(format!("there is no pad type {pad_type}"))),
        };
        // Cutting more than the kernel's reach would ask for a negative padding of the spaced input.
        let before = (span - 1).checked_sub(cut_before);
        windows
            .before
            .push(before.ok_or_else(|| Fault::Value(format!("pad {cut_before} exceeds the kernel's reach")))?);
        windows.input.push(spaced);
        windows.output.push(given.unwrap_or(natural));
    }
    with_real!([x, weight], R => {
        let c_out = weight.shape()[1].checked_mul(groups).ok_or_else(|| Fault::TooLarge(weight.shape().to_vec()))?;
        let bias = bias::<R>(call, c_out)?;
        let (spaced, x_shape) = spaced_out(&x.reals::<R>()?, x.shape(), &strides, &windows.input)?;
        let (flipped, w_shape) = flipped(&weight.reals::<R>()?, weight.shape(), groups)?;
        let (out, shape) = correlate(&spaced, &x_shape, &flipped, &w_shape, groups, &windows)?;
        Ok(call.real_result::<R>(x.dtype(), &shape, biased(out, &shape, bias.as_deref())?))
    })
}

/// The input with `stride − 1` zeros between neighbours.
fn spaced_out<R: Real>(x: &[R], shape: &[usize], strides: &[usize], spaced: &[usize]) -> Result<(Vec<R>, Dims), Fault> {
    let mut out_shape: Dims = shape[..2].into();
    out_shape.extend_from_slice(spaced);
    let mut out = vec![R::ZERO; volume(&out_shape)?];
    let view =
        (0..spaced.len()).fold(View::of(&out_shape), |v, i| v.sliced(i + 2, 0, shape[i + 2], strides[i] as isize));
    view.write(&mut out, x);
    Ok((out, out_shape))
}

/// The kernel [C_in, C_out / groups, …] as [C_out, C_in / groups, …] with its spatial axes reversed.
fn flipped<R: Real>(weight: &[R], shape: &[usize], groups: usize) -> Result<(Vec<R>, Dims), Fault> {
    let (c_in, per_group) = (shape[0], shape[1]);
    if c_in % groups != 0 {
        return Err(Fault::Shape(format!("weight {shape:?} does not form {groups} groups")));
    }
    let mut grouped: Dims = [groups, c_in / groups, per_group].as_slice().into();
    grouped.extend_from_slice(&shape[2..]);
    let mut perm: Vec<usize> = (0..grouped.len()).collect();
    perm.swap(1, 2);
    let view = View::of(&grouped).permuted(&perm);
    let view = (3..grouped.len()).fold(view, |v, i| v.sliced(i, grouped[i].saturating_sub(1), grouped[i], -1));
    let mut out_shape: Dims = [groups * per_group, c_in / groups].as_slice().into();
    out_shape.extend_from_slice(&shape[2..]);
    Ok((view.read(weight)?, out_shape))
}

/// Expected values are those of torch in double precision.
#[cfg(test)]
mod tests {
    use super::super::super::tensor::same_bits;
    use super::super::super::testing::{Op, assert_close, noise, ramp};

    #[test]
    fn groups_strides_pads_and_dilations() {
        let op =
            Op::new("conv").with("x", ramp(&[1, 4, 5, 4])).with("weight", ramp(&[6, 2, 3, 2])).with("bias", ramp(&[6]));
        let op =
            op.with("strides", [2, 1]).with("pad_type", "custom").with("pad", [1, 1, 0, 0]).with("dilations", [1, 2]);
        let want = [
            -3.8125, 1.125, -4.5, 0.1875, -2.9375, -3.0, 1.25, -0.25, 1.0, 3.25, -0.1875, 1.5625, 0.8125, -1.625,
            2.375, -2.625, 1.875, 0.625, 1.5, -0.5, 0.5, 2.6875, 2.375, 3.625, 1.375, 0.5, 3.375, -2.375, 1.3125,
            -0.4375, -0.8125, -2.625, -2.0, -0.5625, -2.5, -2.4375,
        ];
        assert_close(&op.with("groups", 2).one(), &[1, 6, 3, 2], &want, 0.0);
    }

    #[test]
    fn one_axis_and_same_padding() {
        let op = Op::new("conv").with("x", ramp(&[1, 2, 7])).with("weight", ramp(&[3, 2, 3]));
        let want = [
            1.25, -2.375, 2.9375, -2.0625, -2.25, -1.4375, -1.375, 1.4375, 1.5, -1.1875, 0.0, 1.0, -1.4375, 0.9375,
            0.5625,
        ];
        assert_close(&op.one(), &[1, 3, 5], &want, 0.0);
        let op = Op::new("conv").with("x", ramp(&[1, 2, 7])).with("weight", ramp(&[1, 2, 4])).with("strides", [2]);
        assert_close(&op.with("pad_type", "same").one(), &[1, 1, 4], &[-2.5, -2.25, 1.5625, 1.9375], 0.0);
        let op = Op::new("conv").with("x", ramp(&[1, 2, 2])).with("weight", ramp(&[1, 2, 3]));
        assert!(op.fault().contains("does not fit"));
    }

    #[test]
    fn a_convolution_of_points_is_a_linear_layer_to_the_bit() {
        let (x, w, b) = (noise(&[1, 70, 1, 5], 1), noise(&[6, 70, 1, 1], 2), noise(&[6], 3));
        let conv = Op::new("conv").with("x", x.clone()).with("weight", w.clone()).with("bias", b.clone()).one();
        let rows = Op::new("transpose").with("x", x.reshaped(&[70, 5]).unwrap()).with("perm", [1, 0]).one();
        let linear =
            Op::new("linear").with("x", rows).with("weight", w.reshaped(&[6, 70]).unwrap()).with("bias", b).one();
        let columns = Op::new("transpose").with("x", linear).with("perm", [1, 0]).one();
        assert!(same_bits(&conv, &columns.reshaped(&[1, 6, 1, 5]).unwrap()));
    }

    #[test]
    fn transposed_convolution() {
        let op = Op::new("conv_transpose").with("x", ramp(&[1, 4, 3, 2])).with("weight", ramp(&[4, 3, 2, 3]));
        let op = op.with("strides", [2, 2]).with("pad_type", "custom").with("pad", [0, 0, 1, 1]).with("groups", 2);
        let out = op.one();
        let want = [-1.625, 0.75, 0.25, -1.5625, 2.0625, 0.125, 0.75, -2.0625, -0.125, 1.125, 1.25, -0.625, 0.375];
        assert_eq!(out.shape(), [1, 6, 6, 3]);
        assert_eq!(out.to_f64s()[..13], want);
        assert_eq!(out.to_f64s()[105..], [0.4375, 1.0, -0.875]);
    }
}
