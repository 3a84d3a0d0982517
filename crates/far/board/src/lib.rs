//! The board: one small file of shared memory for each `farpool run`.
//!
//! It carries four things between the keeper, every process of the program's tree and `farpool
//! stat`: the settings of the run, the table of blades, the budget (each process publishes what it
//! holds in local memory, and all are held to one limit), and the statistics. Reading it costs its
//! writers nothing.
//!
//! Invariants:
//! * the file is created and sized by the keeper before the program starts and never shrinks;
//! * a slot belongs to the process whose pid it holds; only that process writes its counters; the
//!   keeper frees slots of processes that are gone;
//! * every field is an atomic or written once by the keeper before another process can open the
//!   file, so no reader needs a lock. Counters are relaxed: they are statistics, not
//!   synchronisation.

mod blades;
mod copies;
mod fault_log;
mod histogram;
mod layout;
mod map;
mod redundancy;
mod words;

pub use blades::{
    BladeDomain, BladeOffer, BladeRole, BladeSettings, BladeTable, Blades, CONNECTING, address_fits,
};
pub use copies::{COPY_ENTRIES, COPY_PARTS, CopyTable, CopyToken, Errand};
pub use farpool_policy::redundancy::{COPIES_LIMIT, PARITY_DOMAINS, Redundancy};
pub use fault_log::{FAULT_ENTRIES, Fault, FaultLog};
pub use histogram::{BUCKET_COUNT, Histogram, bucket_of, bucket_upper_ns, quantile_ns, total_ns};
pub use layout::{
    Counter, Header, MAX_SLOTS, ProcessState, Sealing, Settings, Slot, UNMOVABLE_KINDS, VERSION,
    WhenFull,
};
pub use map::{Board, BoardError};
pub use words::{BLADE_ENTRIES, GROUPS_CROWDED};

/// Environment variable by which a program's processes find their board.
pub const BOARD_VARIABLE: &str = "FARPOOL_BOARD";
/// Environment variable that tells a process of a guest's memory that can move to another host: its
/// length in bytes, a blank, and the path of the file that stands for it.
pub const GUEST_VARIABLE: &str = "FARPOOL_GUEST_MEMORY";
/// Name of the socket beside that file by which the memory is handed over.
pub const GUEST_SOCKET: &str = "guest.sock";
