//! Captures the references of a running program, unmodified, under qemu-user with the plugin of the
//! package `farpool-capture-qemu`.
//!
//! The plugin writes records into a ring in shared memory (`ring`); this side drains it into a
//! [`crate::TraceWriter`] while the program runs. The two share no code: docs/researchers/trace.md
//! describes the ring.

mod native;
mod processes;
mod program;
mod qemu;
mod ring;

pub use native::{NativeRun, time_native};
pub use processes::Children;
pub use program::{Command, resolve};
pub use qemu::{Captured, LINE_BYTES, PAGE_WINDOW_ACCESSES, QemuCapture, QemuSettings, find_qemu};
