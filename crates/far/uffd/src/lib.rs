//! Thin bindings to the two kernel interfaces that the pager is built on: userfaultfd(2) and the
//! `PAGEMAP_SCAN` ioctl.
//!
//! Written by hand because no crate has `UFFDIO_MOVE`, `UFFDIO_POISON` and `PAGEMAP_SCAN`. Nothing
//! is decided here: each call is one system call, and each result keeps what the kernel reported
//! (bytes done so far *and* the errno), because a batch that stops half way is the normal case.
//!
//! Invariants:
//! * the sizes of the ABI structs are checked at compile time (`abi`);
//! * no call allocates unless it fails, so all of them are safe to use on the fault path.

mod abi;
mod handle;
mod orphans;
mod pagemap;

pub use abi::{Message, features, register_mode};
pub use handle::{Change, Event, OpenError, Outcome, Uffd, probe_features};
pub use pagemap::{PageRange, Pagemap, category};
