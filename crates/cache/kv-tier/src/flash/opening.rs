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

/// What the file beside the flash says of the use that the superblock names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Testimony {
    /// It is the last one, or nothing is known of others.
    Last,
    /// Another one is the last.
    Older,
    /// Nothing: the file is gone.
    Gone,
}

/// What the flash's superblock says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    pub state: Use,
    pub testimony: Testimony,
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
    #[error(
        "it is an older copy: the file of the same name with .witness behind it names another use \
         as the last"
    )]
    OlderCopy,
    #[error(
        "it may be an older copy: the file of the same name with .witness behind it, which would \
         tell, is gone"
    )]
    WitnessGone,
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
    let Some(Said { state, testimony, is_same_boot }) = said else {
        return Ok(Source::Nothing(None));
    };
    // A file in memory is of one use, so it needs no other witness.
    if matches!(state, Use::Clean | Use::InUse) && !matches!(testimony, Testimony::Last) {
        let is_gone = matches!(testimony, Testimony::Gone);
        let dropped = if is_gone { Dropped::WitnessGone } else { Dropped::OlderCopy };
        return Ok(Source::Nothing(Some(dropped)));
    }
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
