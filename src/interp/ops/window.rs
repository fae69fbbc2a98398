//! Windows that slide over one to three spatial axes: what convolutions and pools share.

use super::super::call::Call;
use super::super::error::Fault;
use super::super::tensor::{Dims, volume};

/// Where windows lie, one entry per spatial axis.
pub(super) struct Windows {
    pub input: Dims,
    pub kernel: Dims,
    pub strides: Dims,
    pub dilations: Dims,
    pub before: Dims,
    pub after: Dims,
    pub output: Dims,
}

/// Positive numbers, one per spatial axis; ones when absent.
pub(super) fn positives(call: &Call<'_>, name: &str, n: usize) -> Result<Dims, Fault> {
    let given = call.optional_ints(name)?.unwrap_or_else(|| vec![1; n]);
    let sizes: Option<Dims> =
        given.iter().map(|&v| usize::try_from(v).ok().filter(|&v| v > 0 && v < 1 << 31)).collect();
    sizes
        .filter(|s| s.len() == n)
        .ok_or_else(|| Fault::Value(format!("`{name}` is {given:?}, {n} positive numbers are needed")))
}

/// (before, after) of every spatial axis, as given in `pad` for the type `custom`.
pub(super) fn custom_pads(call: &Call<'_>, n: usize) -> Result<Vec<(usize, usize)>, Fault> {
    let given = call.optional_ints("pad")?.unwrap_or_else(|| vec![0; 2 * n]);
    let sizes: Option<Vec<usize>> = given.iter().map(|&v| usize::try_from(v).ok().filter(|&v| v < 1 << 31)).collect();
    let sizes = sizes.filter(|s| s.len() == 2 * n);
    let sizes = sizes.ok_or_else(|| Fault::Value(format!("`pad` is {given:?}, {n} pairs are needed")))?;
    Ok(sizes.chunks_exact(2).map(|p| (p[0], p[1])).collect())
}

/// The extent of a dilated kernel.
pub(super) fn effective(kernel: usize, dilation: usize) -> Result<usize, Fault> {
    let span = kernel.checked_sub(1).and_then(|k| k.checked_mul(dilation)).and_then(|s| s.checked_add(1));
    span.ok_or_else(|| Fault::Shape("the kernel is empty or too large".into()))
}

/// The total padding split in two; an odd element goes after, for `same_lower` before.
pub(super) fn halves(total: usize, pad_type: &str) -> (usize, usize) {
    let (less, more) = (total / 2, total - total / 2);
    if pad_type == "same_lower" { (more, less) } else { (less, more) }
}

impl Windows {
    /// The windows of a kernel, by the parameters `strides`, `dilations`, `pad_type`, `pad` and `ceil_mode`.
    ///
    /// With `ceil_mode` a last window that only begins inside the axis or the padding before it counts, as in PyTorch.
    pub fn new(call: &Call<'_>, input: &[usize], kernel: &[usize]) -> Result<Windows, Fault> {
        let n = input.len();
        let (strides, dilations) = (positives(call, "strides", n)?, positives(call, "dilations", n)?);
        let pad_type = call.str_or("pad_type", "valid")?;
        let custom = custom_pads(call, n)?;
        let ceil = call.bool_or("ceil_mode", false)?;
        let (mut before, mut after, mut output) = (Dims::new(), Dims::new(), Dims::new());
        for i in 0..n {
            let (span, stride) = (effective(kernel[i], dilations[i])?, strides[i]);
            let (pad_before, pad_after) = match pad_type.as_str() {
                "valid" => (0, 0),
                "custom" => custom[i],
                "same" | "same_lower" => {
                    let wanted = stride * input[i].div_ceil(stride);
                    halves((wanted + span).saturating_sub(input[i] + stride), &pad_type)
                }
                _ => return Err(Fault::Value(format!("there is no pad type {pad_type}"))),
            };
            let room = (input[i] + pad_before + pad_after).checked_sub(span);
            let room =
                room.ok_or_else(|| Fault::Shape(format!("a kernel of {span} does not fit an axis of {}", input[i])))?;
            let count = if ceil { room.div_ceil(stride) + 1 } else { room / stride + 1 };
            let beyond = ceil && pad_before + pad_after > 0 && (count - 1) * stride >= input[i] + pad_before;
            before.push(pad_before);
            after.push(pad_after);
            output.push(count - usize::from(beyond));
        }
        Ok(Windows { input: input.into(), kernel: kernel.into(), strides, dilations, before, after, output })
    }

    /// For each output position and kernel position, in that order: the input position, or `None` in the padding.
    pub fn sources(&self) -> Result<Vec<Option<usize>>, Fault> {
        let (outputs, taps) = (volume(&self.output)?, volume(&self.kernel)?);
        volume(&[outputs, taps])?;
        let mut out = Vec::with_capacity(outputs * taps);
        for o in 0..outputs {
            for t in 0..taps {
                out.push(self.source(o, t));
            }
        }
        Ok(out)
    }

    fn source(&self, mut output: usize, mut tap: usize) -> Option<usize> {
        let (mut at, mut step) = (0, 1);
        for i in (0..self.input.len()).rev() {
            let (o, t) = (output % self.output[i], tap % self.kernel[i]);
            (output, tap) = (output / self.output[i], tap / self.kernel[i]);
            let padded = o * self.strides[i] + t * self.dilations[i];
            let place = padded.checked_sub(self.before[i]).filter(|&p| p < self.input[i])?;
            at += place * step;
            step *= self.input[i];
        }
        Some(at)
    }

    /// The number of positions of an undilated window that lie in the input or its padding.
    pub fn extent(&self, mut output: usize) -> usize {
        let mut count = 1;
        for i in (0..self.input.len()).rev() {
            let start = output % self.output[i] * self.strides[i];
            output /= self.output[i];
            let end = (start + self.kernel[i]).min(self.before[i] + self.input[i] + self.after[i]);
            count *= end.saturating_sub(start);
        }
        count
    }
}
