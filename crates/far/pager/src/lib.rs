//! Page swapping inside a program: keeps the program's far memory within its part of the local
//! limit, moves cold pages to blades and brings them back when they are touched.
//!
//! The pager is threads of the program itself, because UFFDIO_MOVE works only within one address
//! space:
//! * a *steward* ([`life::steward`]) changes which memory is far;
//! * *fault threads* ([`fault`]), one for each CPU, answer page faults;
//! * an *evictor* ([`evict`]) keeps a reserve of free frames.
//!
//! They have their own descriptor table, so the program cannot close their descriptors, block all
//! signals, and use local memory only. The program's own threads call the methods of [`Pager`],
//! which hold no lock that a fault thread could need.
//!
//! A process starts *native*: everything is left to the kernel, and the registry only notes which
//! ranges could be far. When the tree comes near its limit the process becomes *active*, for good.
//!
//! Folders import only what is below them, and the files of a folder do not import each other in a
//! circle. From the bottom: [`sys`] (system calls), [`abort`], [`space`] (pages, the victim buffer,
//! the registry), [`shared`] and `core` (what all threads of a pager share), [`fault`] and
//! [`evict`] beside each other, [`life`] (how a pager begins, follows the program, forks, hands
//! over and leaves), `pager` (what the program's own threads call).

#![allow(unreachable_pub, reason = "many modules; the root says what leaves the crate")]

pub mod abort;
mod core;
mod error;
pub mod evict;
pub mod fault;
pub mod life;
mod pager;
pub mod shared;
pub mod space;
pub mod sys;

pub use crate::error::StartError;
pub use crate::life::process::Pager;
pub use crate::sys::is_internal_allocation;
