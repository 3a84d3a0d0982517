//! Where in the program's address space far pages can be, and their states: a flat table from
//! address to superpage to page.
//!
//! The program's addresses are tiled in superpages of 16 MiB. Each superpage that ever held a far
//! page has a descriptor with a dense id, and the id is the superpage's number (SMA) in every
//! segment of the process: a far region maps linearly onto a segment, as in Lim's SMA and dReDBox's
//! MemPort table, and we have no page table of our own to walk.
//!
//! Invariants: a descriptor is never freed or moved; an id belongs to one address for good; a
//! forked child inherits table and ids by copy-on-write.

pub mod birth;
pub mod copies;
pub(crate) mod drain;
pub mod frames;
pub mod layout;
pub mod maps;
pub mod moves;
pub(crate) mod order;
pub mod page;
pub mod registry;
mod superpage;
mod table;
pub mod units;
pub mod way;

pub use superpage::{Page, Superpage};
pub use table::{Space, known_pages, known_superpages};
