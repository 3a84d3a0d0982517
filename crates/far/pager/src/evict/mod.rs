//! The evictor: one thread that keeps a reserve of free frames.
//!
//! It walks the program's chunks in the order of the victim policy. For each chunk:
//! 1. `claim`: the pages to move out go into phase Evicting; far and never-touched pages between
//!    them are claimed too, so that one UFFDIO_MOVE can take the whole stretch, holes and all;
//! 2. `move_out`: the kernel moves the pages out of the program, atomically, so no write can be
//!    lost;
//! 3. `settle`: the pages that arrived in the tray, by the page map, go into phase Victim;
//! 4. `write`: the victims go to the blade; when all are acknowledged the tray's frames are free.
//!
//! The registry's lock is held during 1 to 3, so nothing is unmapped or discarded meanwhile. It is
//! not held during waits for a blade.

mod aside;
mod chunk;
mod claim;
pub(crate) mod density;
pub(crate) mod effort;
mod evictor;
pub mod exits;
pub(crate) mod gauges;
mod in_place;
mod locked;
mod moving;
mod own;
pub mod resident_map;
mod room;
mod rounds;
mod shared;
mod still;
mod stubborn;
mod sweep;
pub(crate) mod thrash;
mod wanted;
mod writing;

pub use evictor::Evictor;
