//! A core file of a process whose memory is partly far.
//!
//! The kernel's own core dump, and readers of /proc/PID/mem, do not see far pages. process_vm_readv
//! does: it waits for the pager as the program itself would. So the program's threads are stopped,
//! their registers are read, and the memory is read page by page while the pager, which runs on,
//! brings pages in and moves others out.
//!
//! `elf`, `notes`, `mappings` and `copy` are pure; `process`, `sys`, [`file`] and
//! [`take`] do what touches the machine.
//!
//! Invariants: the process's memory is never written, and no missing page of the pager's own buffer
//! is touched: a page brought in there would be taken for one that was moved out.

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

mod copy;
mod elf;
mod error;
mod file;
mod mappings;
mod notes;
mod process;
mod sys;
mod take;

pub use error::CoreError;
pub use take::{Core, Progress, Wish, take};
