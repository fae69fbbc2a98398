//! Recurrent layers. Inside the layer nothing is rounded to the storage type; a gate is W·x + R·h, then the biases.

use super::super::call::{Call, with_real};
use super::super::error::Fault;
use super::super::lanes::dot;
use super::super::num::{Num, Real};
use super::super::tensor::{Tensor, volume};
use super::elementwise::sigmoid;

/// The parameters of one direction: gates of `hidden` rows each.
struct Cell<R> {
    inputs: usize,
    hidden: usize,
    weight_ih: Vec<R>,
    weight_hh: Vec<R>,
    bias: Option<Vec<R>>,
    input_bias: Option<Vec<R>>,
    peephole: Option<Vec<R>>,
}

/// What one sequence carries from step to step. `c` is of use to `lstm` only.
struct State<R> {
    h: Vec<R>,
    c: Vec<R>,
}

impl<R: Real> Cell<R> {
    fn read(call: &Call<'_>, suffix: &str, gates: usize, inputs: usize, hidden: usize) -> Result<Cell<R>, Fault> {
        let weight = |name: &str, columns| matrix(call, &format!("{name}{suffix}"), [gates * hidden, columns]);
        let vector = |name: &str, n: usize| -> Result<Option<Vec<R>>, Fault> {
            match call.optional(&format!("{name}{suffix}"))? {
                None => Ok(None),
                Some(t) if t.shape() == [n] => Ok(Some(t.reals::<R>()?.into_owned())),
                Some(t) => Err(Fault::Shape(format!("`{name}{suffix}` of shape {:?} is not [{n}]", t.shape()))),
            }
        };
        Ok(Cell {
            inputs,
            hidden,
            weight_ih: weight("weight_ih", inputs)?,
            weight_hh: weight("weight_hh", hidden)?,
            bias: vector("bias", gates * hidden)?,
            input_bias: vector("input_bias", gates * hidden)?,
            peephole: vector("peephole", 3 * hidden)?,
        })
    }

    fn of_input(&self, row: usize, x: &[R]) -> R {
        dot(&self.weight_ih[row * self.inputs..][..self.inputs], x)
    }

    fn of_hidden(&self, row: usize, h: &[R]) -> R {
        dot(&self.weight_hh[row * self.hidden..][..self.hidden], h)
    }

    /// Row `i` of a gate.
    fn gate(&self, gate: usize, i: usize, x: &[R], h: &[R]) -> R {
        let row = gate * self.hidden + i;
        let sum = self.of_input(row, x).plus(self.of_hidden(row, h));
        plus(plus(sum, &self.bias, row), &self.input_bias, row)
    }
}

fn plus<R: Real>(sum: R, bias: &Option<Vec<R>>, row: usize) -> R {
    bias.as_ref().map_or(sum, |b| sum.plus(b[row]))
}

/// A matrix of this shape.
fn matrix<R: Real>(call: &Call<'_>, name: &str, shape: [usize; 2]) -> Result<Vec<R>, Fault> {
    let t = call.tensor(name)?;
    match t.shape() == shape {
        true => Ok(t.reals::<R>()?.into_owned()),
        false => Err(Fault::Shape(format!("`{name}` of shape {:?} is not {shape:?}", t.shape()))),
    }
}

/// The activation that a parameter names. The parameters of two of them are nowhere documented; these are the ones that
/// coremltools' own tests take for Core ML's: 0.2·x + 0.5 and tanh x.
fn activation<R: Real>(call: &Call<'_>, param: &str, default: &str) -> Result<fn(R) -> R, Fault> {
    let name = call.str_or(param, default)?.to_lowercase();
    Ok(match name.as_str() {
        "tanh" | "scaled_tanh" => R::libm_tanh,
        "sigmoid" => sigmoid,
        "hard_sigmoid" | "sigmoid_hard" => {
            |x| R::from_f64(0.2).times(x).plus(R::from_f64(0.5)).larger(R::ZERO).smaller(R::ONE)
        }
        "relu" => |x| x.larger(R::ZERO),
        "linear" => |x| x,
        _ => return Err(Fault::Value(format!("there is no activation {name}"))),
    })
}

/// i, f, o and z in this order: c ← f·c + i·z, within ±`clip`; h = o·activation(c). The peepholes of i and f look at the
/// old c, that of o at the new one.
pub(super) fn lstm(call: &Call<'_>) -> Result<Vec<Tensor>, Fault> {
    let x = call.tensor("x")?;
    with_real!([x], R => {
        let gate: fn(R) -> R = activation(call, "recurrent_activation", "sigmoid")?;
        let cell_gate: fn(R) -> R = activation(call, "cell_activation", "tanh")?;
        let output: fn(R) -> R = activation(call, "activation", "tanh")?;
        let clip: Option<R> = if call.has("clip") { Some(call.real("clip", x.dtype())?) } else { None };
        recurrent::<R>(call, &x, 4, true, |cell, x, state| {
            let State { h, c } = state;
            let peep = |g: usize, i: usize, c: R| {
                cell.peephole.as_ref().map_or(R::ZERO, |p| p[g * cell.hidden + i].times(c))
            };
            let next: Vec<(R, R)> = (0..cell.hidden)
                .map(|i| {
                    let (input, forget) = (
                        gate(cell.gate(0, i, x, h).plus(peep(0, i, c[i]))),
                        gate(cell.gate(1, i, x, h).plus(peep(1, i, c[i]))),
                    );
                    let c = forget.times(c[i]).plus(input.times(cell_gate(cell.gate(3, i, x, h))));
                    let c = clip.map_or(c, |m| c.smaller(m).larger(R::ZERO.minus(m)));
                    (gate(cell.gate(2, i, x, h).plus(peep(2, i, c))).times(output(c)), c)
                })
                .collect();
            (*h, *c) = next.into_iter().unzip();
        })
    })
}

/// r, o and z in this order: o = activation(W·x + R·(r∘h) + b), h ← (1 − z)·o + z·h. `reset_after` makes it
/// o = activation(W·x + input bias + r∘(R·h + b)), as in PyTorch.
pub(super) fn gru(call: &Call<'_>) -> Result<Vec<Tensor>, Fault> {
    let x = call.tensor("x")?;
    let reset_after = call.bool_or("reset_after", false)?;
    with_real!([x], R => {
        let gate: fn(R) -> R = activation(call, "recurrent_activation", "sigmoid")?;
        let output: fn(R) -> R = activation(call, "activation", "tanh")?;
        recurrent::<R>(call, &x, 3, false, |cell, x, state| {
            let h = &state.h;
            let reset: Vec<R> = (0..cell.hidden).map(|i| gate(cell.gate(0, i, x, h))).collect();
            let masked: Vec<R> = reset.iter().zip(h).map(|(r, h)| r.times(*h)).collect();
            let candidate = |i: usize| {
                if !reset_after {
                    return output(cell.gate(1, i, x, &masked));
                }
                let row = cell.hidden + i;
                let of_hidden = plus(cell.of_hidden(row, h), &cell.bias, row);
                output(plus(cell.of_input(row, x), &cell.input_bias, row).plus(reset[i].times(of_hidden)))
            };
            let next = (0..cell.hidden).map(|i| {
                let update = gate(cell.gate(2, i, x, h));
                R::ONE.minus(update).times(candidate(i)).plus(update.times(h[i]))
            });
            state.h = next.collect();
        })
    })
}

pub(super) fn rnn(call: &Call<'_>) -> Result<Vec<Tensor>, Fault> {
    let x = call.tensor("x")?;
    with_real!([x], R => {
        let output: fn(R) -> R = activation(call, "activation", "tanh")?;
        recurrent::<R>(call, &x, 1, false, |cell, x, state| {
            state.h = (0..cell.hidden).map(|i| output(cell.gate(0, i, x, &state.h))).collect();
        })
    })
}

/// Parameter suffix of each direction, and whether it runs from the end.
fn directions(call: &Call<'_>) -> Result<&'static [(&'static str, bool)], Fault> {
    Ok(match call.str_or("direction", "forward")?.as_str() {
        "forward" => &[("", false)],
        "reverse" => &[("", true)],
        "bidirectional" if call.kind() == "lstm" => &[("", false), ("_back", true)],
        other => return Err(Fault::Value(format!("there is no direction {other}"))),
    })
}

/// Every direction over x [s, b, I], side by side: the outputs [s, b, D·H], or the last one as [1, b, D·H], then the final
/// h, then the final c.
///
/// What `reverse` puts out is in the order of its steps, the last element of x first; `bidirectional` puts both directions
/// in the order of x. coremltools' tests have it so.
fn recurrent<R: Real>(
    call: &Call<'_>,
    x: &Tensor,
    gates: usize,
    has_c: bool,
    step: impl Fn(&Cell<R>, &[R], &mut State<R>),
) -> Result<Vec<Tensor>, Fault> {
    let [length, batch, inputs] = x.shape()[..] else {
        return Err(Fault::Shape(format!("shape {:?} is no batch of sequences", x.shape())));
    };
    let &[_, hidden] = call.tensor("weight_hh")?.shape() else {
        return Err(Fault::Shape("`weight_hh` is no matrix".into()));
    };
    let directions = directions(call)?;
    let width = volume(&[directions.len(), hidden])?;
    let initial = |name| matrix::<R>(call, name, [batch, width]);
    let mut h = initial("initial_h")?;
    let mut c = if has_c { initial("initial_c")? } else { h.clone() };
    let sequence = [length, batch, width];
    let mut out = vec![R::ZERO; volume(&sequence)?];
    let x_elements = x.reals::<R>()?;
    for (d, &(suffix, backwards)) in directions.iter().enumerate() {
        let cell = Cell::read(call, suffix, gates, inputs, hidden)?;
        for b in 0..batch {
            let own = b * width + d * hidden..b * width + (d + 1) * hidden;
            let mut state = State { h: h[own.clone()].to_vec(), c: c[own.clone()].to_vec() };
            for t in 0..length {
                let at = if backwards { length - 1 - t } else { t };
                step(&cell, &x_elements[(at * batch + b) * inputs..][..inputs], &mut state);
                let place = if directions.len() == 2 { at } else { t };
                out[place * batch * width..][own.clone()].copy_from_slice(&state.h);
            }
            h[own.clone()].copy_from_slice(&state.h);
            c[own].copy_from_slice(&state.c);
        }
    }
    let last = [1, batch, width];
    let whole = call.bool_or("output_sequence", false)?;
    let (shape, out) = if whole { (sequence, out) } else { (last, h.clone()) };
    let finals = [h, c].into_iter().take(1 + usize::from(has_c));
    let results = std::iter::once(call.real_result::<R>(x.dtype(), &shape, out));
    Ok(results.chain(finals.map(|v| call.real_result::<R>(x.dtype(), &[batch, width], v))).collect())
}

/// Expected values are those of torch in double precision where it has the layer, else of numpy.
#[cfg(test)]
mod tests {
    use super::super::super::tensor::same_bits;
    use super::super::super::testing::{Op, assert_close, f32s, noise, ramp};
    use super::*;

    /// The numbers of [`ramp`] times a factor.
    fn scaled(shape: &[usize], by: f64) -> Tensor {
        f32s(shape, &ramp(shape).to_f64s().iter().map(|v| v * by).collect::<Vec<_>>())
    }

    fn lstm() -> Op {
        let op = Op::new("lstm").results(3).with("weight_ih", scaled(&[8, 2], 0.5)).with("bias", scaled(&[8], 0.25));
        op.with("weight_hh", scaled(&[8, 2], -0.5)).with("x", ramp(&[3, 1, 2]))
    }

    #[test]
    fn both_directions_side_by_side() {
        let op = lstm().with("weight_ih_back", scaled(&[8, 2], 0.5)).with("weight_hh_back", scaled(&[8, 2], -0.5));
        let op = op.with("bias_back", scaled(&[8], 0.25)).with("direction", "bidirectional");
        let op = op.with("initial_h", ramp(&[1, 4])).with("initial_c", ramp(&[1, 4]));
        let (h, c) = ([0.01335078, 0.07970808, -0.08756243, -0.10741], [0.03390846, 0.1422744, -0.1275013, -0.2549505]);
        let out = op.clone().with("output_sequence", true).all();
        let sequence = [
            [-0.231127, 0.1273583, -0.08756243, -0.10741],
            [-0.1439811, 0.04076448, -0.06013209, 0.1135867],
            [0.01335078, 0.07970808, -0.04489694, 0.5111264],
        ];
        assert_close(&out[0], &[3, 1, 4], &sequence.concat(), 1e-6);
        assert_close(&out[1], &[1, 4], &h, 1e-6);
        assert_close(&out[2], &[1, 4], &c, 1e-6);
        assert_close(&op.all()[0], &[1, 1, 4], &h, 1e-6);
    }

    #[test]
    fn peepholes_clip_and_activations() {
        let op = || lstm().with("initial_h", ramp(&[1, 2])).with("initial_c", ramp(&[1, 2]));
        let plain = op().all();
        assert_close(&op().with("peephole", scaled(&[6], 0.0)).all()[2], &[1, 2], &plain[2].to_f64s(), 0.0);
        assert_ne!(op().with("peephole", ramp(&[6])).all()[1].to_f64s(), plain[1].to_f64s());
        assert!(op().with("clip", 0.125).all()[2].to_f64s().iter().all(|c| c.abs() <= 0.125));
        assert!(op().with("activation", "softmax").try_all().is_err());
        let hard = activation_of(&op().with("activation", "hard_sigmoid").all());
        assert!(hard.iter().all(|h| (0.0..1.0).contains(h)), "{hard:?}");
    }

    fn activation_of(results: &[Tensor]) -> Vec<f64> {
        results[1].to_f64s()
    }

    #[test]
    fn the_reset_gate_comes_before_or_after_the_product() {
        let gru = || {
            let op = Op::new("gru").results(2).with("x", ramp(&[2, 1, 2])).with("initial_h", ramp(&[1, 2]));
            let op = op.with("weight_ih", ramp(&[6, 2])).with("weight_hh", scaled(&[6, 2], -1.0));
            op.with("output_sequence", true)
        };
        let before = gru().with("bias", ramp(&[6])).all();
        assert_close(&before[0], &[2, 1, 2], &[-1.012988, 0.3447402, -0.9536309, 0.6907942], 1e-6);
        assert_close(&before[1], &[1, 2], &[-0.9536309, 0.6907942], 1e-6);
        let op = gru().with("bias", scaled(&[6], 0.5)).with("input_bias", ramp(&[6])).with("reset_after", true);
        assert_close(&op.all()[0], &[2, 1, 2], &[-1.071095, 0.767793, -0.9958537, 0.9385608], 1e-6);
    }

    #[test]
    fn reverse_puts_out_the_last_element_first() {
        let rnn = |direction: &str| {
            let op = Op::new("rnn").results(2).with("x", ramp(&[3, 1, 2])).with("initial_h", ramp(&[1, 2]));
            let op = op.with("weight_ih", ramp(&[2, 2])).with("weight_hh", scaled(&[2, 2], -1.0));
            op.with("bias", ramp(&[2])).with("activation", "relu").with("direction", direction)
        };
        let out = rnn("reverse").with("output_sequence", true).all();
        assert_close(&out[0], &[3, 1, 2], &[0.0, 0.0, 0.0, 2.3125, 0.0, 0.0], 0.0);
        assert_close(&rnn("reverse").all()[0], &[1, 1, 2], &[0.0, 0.0], 0.0);
        let both = rnn("bidirectional").try_all().unwrap_err();
        assert!(both.fault().unwrap().to_string().contains("no direction bidirectional"));
    }

    #[test]
    fn a_step_without_a_past_is_a_linear_layer_to_the_bit() {
        let (x, weight, bias) = (noise(&[1, 2, 70], 1), noise(&[3, 70], 2), noise(&[3], 3));
        let op = Op::new("rnn").results(2).with("x", x.clone()).with("initial_h", scaled(&[2, 3], 0.0));
        let op =
            op.with("weight_ih", weight.clone()).with("weight_hh", scaled(&[3, 3], 0.0)).with("bias", bias.clone());
        let out = op.with("activation", "linear").all().remove(0);
        let linear = Op::new("linear").with("x", x).with("weight", weight).with("bias", bias).one();
        assert!(same_bits(&out, &linear));
    }
}
