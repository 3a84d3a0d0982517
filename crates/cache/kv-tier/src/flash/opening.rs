//! Which book-keeping is believed when a flash is opened: pure.
//!
//! Deleted or replaced items must not come back. So nothing is taken over unless the book-keeping
//! is known to be no older than the zones.

use super::layout::Use;

/// The state of the file in memory that a flash in use names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Absent,
    /// It is there and bears the name, but is not what this flash's server wrote.
    Damaged,
    /// A server holds it.
    Held,
    Whole,
}

/// What the flash says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    pub state: Use,
    /// The machine has not been started again since.
    pub is_same_boot: bool,
}

/// Where the book-keeping is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Nowhere: the flash is made anew. With the reason, if something was in it that could have
    /// been wanted.
    Nothing(Option<Dropped>),
    /// The flash, where it stands since a server closed it; each shard's if its closing sum is
    /// right.
    Closed,
    /// The flash's pages, as the kernel has them after a kill.
    Pages,
    /// The file in memory, which goes on being used.
    Memory,
}

/// Why nothing is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Dropped {
    #[error("the machine went down while the server ran")]
    MachineDown,
    #[error("the device failed when the server ended")]
    DeviceFailed,
    #[error("the server was killed, and its book-keeping in memory is gone")]
    MemoryGone,
    #[error("the server was killed, and its book-keeping in memory is damaged")]
    MemoryDamaged,
}

/// Another server uses the book-keeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held;

/// Which book-keeping is believed. `said` is None for an empty file, and where all that was is to
/// be dropped.
pub const fn decide(said: Option<Said>, side: Side) -> Result<Source, Held> {
    let Some(Said { state, is_same_boot }) = said else { return Ok(Source::Nothing(None)) };
    match (state, is_same_boot, side) {
        (Use::Clean, _, _) => Ok(Source::Closed),
        (Use::GivenUp, _, _) => Ok(Source::Nothing(Some(Dropped::DeviceFailed))),
        // A file of the same name was brought back from somewhere: memory does not outlive the
        // machine.
        (Use::InUse | Use::InMemory, false, _) => Ok(Source::Nothing(Some(Dropped::MachineDown))),
        (Use::InUse, true, _) => Ok(Source::Pages),
        (Use::InMemory, true, Side::Held) => Err(Held),
        (Use::InMemory, true, Side::Whole) => Ok(Source::Memory),
        (Use::InMemory, true, Side::Absent) => Ok(Source::Nothing(Some(Dropped::MemoryGone))),
        (Use::InMemory, true, Side::Damaged) => Ok(Source::Nothing(Some(Dropped::MemoryDamaged))),
    }
}
