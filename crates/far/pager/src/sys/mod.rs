//! The pager's own memory, futexes and threads: everything that must not go through the program's
//! interposed functions.
//!
//! Most of this crate's `unsafe` is here and in [`crate::space`].

pub mod apart;
mod clocks;
mod dialer;
mod futex;
mod memory;
mod program;
mod protection;
pub mod rights;
mod say;
mod stamp;
pub mod standstill;
mod threads;

pub use clocks::*;
pub use dialer::*;
pub use futex::*;
pub use memory::*;
pub use program::*;
pub use protection::*;
pub use say::*;
pub use stamp::*;
pub use threads::*;
