//! What ops do besides computing their results.

use std::fmt;
use std::ops::BitOr;

use crate::ir::{Function, OpId};

use super::row;

/// What an op of a kind does besides computing its results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Effect {
    /// Nothing: equal inputs give equal results.
    Pure,
    /// Reads a state.
    ReadsState,
    /// Writes a state.
    WritesState,
    /// Draws random numbers.
    Random,
    /// What its blocks do.
    Control,
}

/// A set of effects.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Effects(u8);

impl Effects {
    /// No effect.
    pub const NONE: Effects = Effects(0);
    /// Reads a state.
    pub const READS: Effects = Effects(1);
    /// Writes a state.
    pub const WRITES: Effects = Effects(2);
    /// Draws random numbers.
    pub const RANDOM: Effects = Effects(4);
    /// Not known: to be treated as reading and writing everything.
    pub const UNKNOWN: Effects = Effects(8);

    /// Whether there is none.
    pub fn is_pure(self) -> bool {
        self == Effects::NONE
    }
    /// Whether a state may be read.
    pub fn may_read(self) -> bool {
        self.has(Effects::READS) || self.is_unknown()
    }
    /// Whether a state may be written.
    pub fn may_write(self) -> bool {
        self.has(Effects::WRITES) || self.is_unknown()
    }
    /// Whether random numbers may be drawn.
    pub fn may_draw(self) -> bool {
        self.has(Effects::RANDOM) || self.is_unknown()
    }
    /// Whether some op involved is opaque.
    pub fn is_unknown(self) -> bool {
        self.has(Effects::UNKNOWN)
    }
    /// Whether an op with these effects may be erased when nothing uses its results.
    pub fn is_erasable(self) -> bool {
        !self.may_write()
    }

    fn has(self, other: Effects) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Effects {
    type Output = Effects;
    fn bitor(self, other: Effects) -> Effects {
        Effects(self.0 | other.0)
    }
}

impl fmt::Debug for Effects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(Effects::READS, "reads"), (Effects::WRITES, "writes"), (Effects::RANDOM, "random")];
        let names = names.into_iter().chain([(Effects::UNKNOWN, "unknown")]);
        f.debug_set().entries(names.filter(|(e, _)| self.has(*e)).map(|(_, n)| format_args!("{n}").to_string())).finish()
    }
}

/// The effects of an op, those of its nested blocks included. Opaque ops have unknown effects.
pub fn effect_of(f: &Function, op: OpId) -> Effects {
    let data = f.op(op);
    let own = match row(data.kind()).map(|r| r.effect()) {
        Some(Effect::Pure | Effect::Control) => Effects::NONE,
        Some(Effect::ReadsState) => Effects::READS,
        Some(Effect::WritesState) => Effects::WRITES,
        Some(Effect::Random) => Effects::RANDOM,
        None => Effects::UNKNOWN,
    };
    let inner = data.blocks().iter().flat_map(|&b| f.ops(b)).map(|op| effect_of(f, op));
    inner.fold(own, BitOr::bitor)
}
