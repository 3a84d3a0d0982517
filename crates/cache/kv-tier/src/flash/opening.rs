//! Which bookkeeping is trusted when a flash is opened: pure.
//!
//! Deleted or replaced items must not come back. So nothing is recovered unless the bookkeeping is
//! known to be no older than the zones.

use super::layout::Use;

/// The state of the memory file that a flash in use names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Absent,
    /// It has the right name, but not the content that this flash's server wrote.
    Damaged,
    /// A server holds its lock.
    Held,
    Whole,
}

/// What the flash's superblock says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    pub state: Use,
    /// Whether the machine has not been rebooted since.
    pub is_same_boot: bool,
}

/// The source of the bookkeeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// None: the flash is created anew. With the reason, if it held items that could have been
    /// wanted.
    Nothing(Option<Dropped>),
    /// The flash itself, closed by its server; for each shard only if its closing sum is right.
    Closed,
    /// The flash's pages, as the kernel has them after a kill.
    Pages,
    /// The memory file, which stays in use.
    Memory,
}

/// Why nothing is recovered.
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

/// Another server holds the bookkeeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held;

/// Decides which bookkeeping is trusted. `said` is None for an empty file, or if all content is to
/// be dropped.
pub const fn decide(said: Option<Said>, side: Side) -> Result<Source, Held> {
    let Some(Said { state, is_same_boot }) = said else { return Ok(Source::Nothing(None)) };
    match (state, is_same_boot, side) {
        (Use::Clean, _, _) => Ok(Source::Closed),
        (Use::GivenUp, _, _) => Ok(Source::Nothing(Some(Dropped::DeviceFailed))),
        // Memory does not outlive the machine, so a file of the same name was restored from
        // elsewhere.
        (Use::InUse | Use::InMemory, false, _) => Ok(Source::Nothing(Some(Dropped::MachineDown))),
        (Use::InUse, true, _) => Ok(Source::Pages),
        (Use::InMemory, true, Side::Held) => Err(Held),
        (Use::InMemory, true, Side::Whole) => Ok(Source::Memory),
        (Use::InMemory, true, Side::Absent) => Ok(Source::Nothing(Some(Dropped::MemoryGone))),
        (Use::InMemory, true, Side::Damaged) => Ok(Source::Nothing(Some(Dropped::MemoryDamaged))),
    }
}
