//! The pager of a sidecar: a separate process that shares only the program's address space with it.
//!
//! It learns of memory calls from userfaultfd's events ([`crate::space::layout`]) and of new memory
//! from the kernel's list of mappings ([`crate::space::maps`]). Its own memory is in the same
//! address space: it is known, never registered, and not inherited by the program's children.

mod serve;
mod state;

pub(crate) use state::Sizes;
pub use state::{Attached, Attachment};
