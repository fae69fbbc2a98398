//! The `milopt` command: arguments, printing and side files. No logic of its own.

mod npy;
mod npz;
