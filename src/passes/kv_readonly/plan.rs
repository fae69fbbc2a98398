//! Whether one state of one function can be converted, and how.

use crate::analysis::state::{Chain, Region, Update};
use crate::analysis::values::Poly;
use crate::ir::{DType, Dim, Function, OpId, ValueId};
use crate::opset::effect_of;
use crate::rewrite::{NoMatch, Position, loss};

use super::super::report::describe_state;
use super::refuse;

/// How a state is converted.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// The state.
    pub state: ValueId,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The `read_state`s and what they read.
    pub reads: Vec<(OpId, ValueId)>,
    /// The write, if there is one.
    pub write: Option<Write>,
    /// The op that the report names.
    pub at: String,
}

/// The only write of a state.
#[derive(Clone, Debug)]
pub(super) struct Write {
    /// The `write_state`.
    pub op: OpId,
    /// What it changes.
    pub update: Update,
    /// Where the box begins.
    pub begin: Vec<Position>,
    /// The shape of the box.
    pub extents: Vec<Dim>,
}

impl Plan {
    /// Whether the function does nothing with the state.
    pub fn is_unused(&self) -> bool {
        self.reads.is_empty() && self.write.is_none()
    }
}

/// Why a state stays one.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    /// The op that the report names.
    pub at: String,
    /// The reason.
    pub why: NoMatch,
}

/// The plan for a state, or why there is none.
pub(super) fn plan(f: &Function, chain: &Chain) -> Result<Plan, Refusal> {
    let last = chain.writes().last().map(|(op, ..)| op);
    let op = last.or(chain.elsewhere).or_else(|| chain.accesses.first().map(|a| a.op()));
    let at = op.map_or_else(|| describe_state(f.value(chain.state).name()), |op| f.describe(op));
    plan_at(f, chain, &at).map_err(|why| Refusal { at, why })
}

fn plan_at(f: &Function, chain: &Chain, at: &str) -> Result<Plan, NoMatch> {
    check_order(f, chain)?;
    let write = chain.writes().next().map(|(op, data, update)| write(f, chain, op, data, update)).transpose()?;
    check_reads(f, chain)?;
    let unknown = || refuse("a size of the state is not known");
    let state = f.ty(chain.state).as_state().ok_or_else(unknown)?;
    Ok(Plan {
        state: chain.state,
        dtype: state.dtype,
        shape: state.known_shape().ok_or_else(unknown)?.to_vec(),
        reads: chain.reads().map(|(op, value, _)| (op, value)).collect(),
        write,
        at: at.to_owned(),
    })
}

/// Nothing but reads, and then one write.
fn check_order(f: &Function, chain: &Chain) -> Result<(), NoMatch> {
    if let Some(op) = chain.elsewhere {
        let why = format!("{} uses the state in a nested block, or in a way that is not known", f.describe(op));
        return Err(refuse(why));
    }
    if let Some(op) = f.ops(f.body()).find(|&op| effect_of(f, op).is_unknown()) {
        return Err(refuse(format!("{} is not known, and may read or write the state", f.describe(op))));
    }
    let writes = chain.writes().count();
    if writes > 1 {
        return Err(refuse(format!("the state is written {writes} times, so that what is new is not in one box"))
            .remedy(
                "kv-defer and kv-merge run before and join the writes; what they decline says what is in the way",
            ));
    }
    if let Some((op, ..)) = chain.reads().find(|(.., version)| *version > 0) {
        return Err(refuse(format!("{} reads the state after it is written", f.describe(op)))
            .remedy("kv-forward and kv-defer run before; what they decline says what is in the way"));
    }
    Ok(())
}

/// The write, if it is one of a box whose place the caller knows.
fn write(f: &Function, chain: &Chain, op: OpId, data: ValueId, update: Option<&Update>) -> Result<Write, NoMatch> {
    let update = update.ok_or_else(|| no_update(f, chain, data))?;
    check_kept(f, op)?;
    check_kept(f, update.op)?;
    if f.value(data).uses().len() > 1 {
        return Err(read_besides(f, op, data));
    }
    if update.region.0.iter().all(|span| span.whole) {
        return Err(refuse("the write replaces the whole state, so that the caller would copy all of it"));
    }
    if let Some(axis) = update.region.0.iter().position(|span| span.stride != 1) {
        return Err(refuse(format!("the box is strided on axis {axis}")));
    }
    let extents = extents(f, update).ok_or_else(|| refuse("the shape of the box is not known"))?;
    Ok(Write { op, begin: begin(f, &update.region)?, extents, update: update.clone() })
}

/// Why a write is no update of a known box.
fn no_update(f: &Function, chain: &Chain, data: ValueId) -> NoMatch {
    let producer = f.producer(data);
    let own = |op: &OpId| f.op(*op).value("x").is_some_and(|x| chain.read_of(x).is_some());
    match producer.filter(|&op| f.op(op).kind() == "slice_update").filter(own) {
        Some(op) => refuse(format!("where {} writes is not known", f.describe(op))),
        None => refuse("what is written is no slice_update of the state's own content"),
    }
}

/// Something besides the write uses the updated content.
fn read_besides(f: &Function, write: OpId, data: ValueId) -> NoMatch {
    match f.value(data).uses().iter().map(|&u| f.user(u)).find(|&user| user != Some(write)).flatten() {
        Some(user) => refuse(format!("{} reads the updated content", f.describe(user)))
            .remedy("kv-forward and kv-defer run before; what they decline says what is in the way"),
        None => refuse("the function returns the updated content"),
    }
}

fn begin(f: &Function, region: &Region) -> Result<Vec<Position>, NoMatch> {
    let place = |(axis, begin): (usize, &Poly)| {
        Position::of(f, begin).ok_or_else(|| {
            refuse(format!("where the box begins on axis {axis} follows from what the function computes"))
                .remedy("the position is a sum of elements and sizes of inputs")
        })
    };
    region.0.iter().map(|span| &span.begin).enumerate().map(place).collect()
}

/// The shape of the box: that of the update, with the squeezed axes.
fn extents(f: &Function, update: &Update) -> Option<Vec<Dim>> {
    let mut sizes = f.tensor(update.value)?.shape.iter();
    let size = |axis| match update.squeezed.contains(&axis) {
        true => Some(Dim::known(1)),
        false => sizes.next().cloned(),
    };
    (0..update.region.0.len()).map(size).collect()
}

/// Each read can be replaced by the input.
fn check_reads(f: &Function, chain: &Chain) -> Result<(), NoMatch> {
    let state = f.ty(chain.state).as_state();
    for (op, content, _) in chain.reads() {
        check_kept(f, op)?;
        if f.tensor(content) != state {
            return Err(refuse(format!("{} does not have the type of the state", f.describe(op))));
        }
        for u in f.value(content).uses() {
            let user = f.user(*u).ok_or_else(|| refuse("the function returns the content of the state"))?;
            f.check_editable(user).map_err(|e| refuse(e.to_string()))?;
        }
    }
    Ok(())
}

/// Nothing is lost when the op goes.
fn check_kept(f: &Function, op: OpId) -> Result<(), NoMatch> {
    match loss(f, op) {
        Some(what) => Err(refuse(format!("{} carries {what}, which would be lost", f.describe(op)))),
        None => Ok(()),
    }
}
