//! Recurrent layers.

use super::{Context, Guess, Inferred, Problem, dims};

/// The sequence of hidden states, or the last one, then the final states of a layer over x [s, b, I].
pub(in crate::opset) fn layer(c: &Context<'_>) -> Inferred {
    let (x, weight) = (c.tensor("x")?, c.tensor("weight_hh")?);
    x.rank_in("x", 3, 3)?;
    weight.rank_in("weight_hh", 2, 2)?;
    let is_lstm = c.takes("initial_c");
    let directions = match c.str("direction")? {
        "forward" | "reverse" => 1,
        "bidirectional" if is_lstm => 2,
        other => return Err(Problem::value("direction", format!("`{other}` is no direction")).into()),
    };
    let width = dims::product([&weight.dims[1], &dims::known(directions)])?;
    let length = if c.bool("output_sequence")? { x.dims[0].clone() } else { dims::known(1) };
    let batch = x.dims[1].clone();
    let state = Guess::Tensor(x.dtype, [batch.clone(), width.clone()].into_iter().collect());
    let states = std::iter::repeat_n(state, if is_lstm { 2 } else { 1 });
    let sequence = Guess::Tensor(x.dtype, [length, batch, width].into_iter().collect());
    Ok(std::iter::once(sequence).chain(states).collect())
}
