//! Typed indices and the arenas they point into.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// An index into an arena of one kind of thing.
pub trait Id: Copy + Eq + fmt::Debug {
    /// The id with this position.
    fn new(index: usize) -> Self;
    /// The position in its arena.
    fn index(self) -> usize;
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl Id for $name {
            fn new(index: usize) -> Self {
                $name(u32::try_from(index).expect("an arena holds fewer than 2^32 items"))
            }
            fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

id!(
    /// A value: a function input, a block input or a result of an op. Prints as `%v12`.
    ValueId, "%v"
);
id!(
    /// An operation. Prints as `@op3`.
    OpId, "@op"
);
id!(
    /// A block: a function body or a nested block. Prints as `^b0`.
    BlockId, "^b"
);
id!(
    /// An interned constant. Prints as `#lit7`.
    LiteralId, "#lit"
);

/// A growing vector indexed by a typed id. Items are never moved or reused.
#[derive(Clone, Debug)]
pub(crate) struct Arena<I, T> {
    items: Vec<T>,
    id: PhantomData<I>,
}

impl<I: Id, T> Arena<I, T> {
    pub(crate) fn new() -> Self {
        Arena { items: Vec::new(), id: PhantomData }
    }
    pub(crate) fn push(&mut self, item: T) -> I {
        let id = I::new(self.items.len());
        self.items.push(item);
        id
    }
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }
    pub(crate) fn ids(&self) -> impl Iterator<Item = I> + use<I, T> {
        (0..self.items.len()).map(I::new)
    }
}

impl<I: Id, T> Index<I> for Arena<I, T> {
    type Output = T;
    fn index(&self, id: I) -> &T {
        &self.items[id.index()]
    }
}

impl<I: Id, T> IndexMut<I> for Arena<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        &mut self.items[id.index()]
    }
}
