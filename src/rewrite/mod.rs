//! Changing a function: the checked door.
//!
//! * A [`Rule`] looks at one op of a `&Function` and answers with an owned [`Patch`], or with [`NoMatch`] and the
//!   reason. It never changes anything.
//! * A [`Patch`] holds new ops as pure values and says which existing values they replace. [`Patch::apply`] checks it
//!   against the function (types by inference, ops that may not be edited, names of the interface) and either applies
//!   it whole or leaves the function as it was.
//! * A [`Transaction`] is for what one replacement cannot say: retyping a region, moving ops, editing the interface.
//!   It works on a copy that takes the function's place on commit.
//! * [`drive`] applies rules until none fires.
//!
//! When a value is replaced by a new one, the *name* moves to the new producer: readers and function outputs keep the
//! text they had.

mod certificate;
mod dead;
mod driver;
mod interface;
mod patch;
mod pattern;
mod transaction;

pub use certificate::{Certificate, Factor};
pub use dead::{erase_dead, is_erasable, loss};
pub use driver::{Budget, Context, Declined, Fired, Keeps, NoMatch, Outcome, Rule, Site, drive};
pub use interface::{HostWrite, InterfaceChange, Position, Source, Term};
pub use patch::{Input, NewOp, Patch, PatchError, Ref, is_returned, may_be_returned};
pub use pattern::{Match, Pattern, PatternError};
pub use transaction::Transaction;
