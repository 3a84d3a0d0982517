//! System calls that several crates make alike, files that appear as a whole, locks, and how often
//! a peer may cause a log line.
//!
//! But for files, the calls go straight to the kernel, so nothing that a program interposes gets in
//! between, and nothing allocates. Memory that a program under test shall map as any program does
//! must not come from here.

mod clock;
mod descriptors;
mod file;
mod limits;
mod listen;
mod lock;
mod log_rate;
mod memory;
mod peer;
mod random;
mod time;

pub use clock::{monotonic_ns, process_cpu_time, thread_cpu_time, unix_ms};
pub use descriptors::{
    MOST_DESCRIPTORS, receive_with_descriptor, receive_with_descriptors, send_with_descriptors,
};
pub use file::{replace_secret, sync_folder, write_atomically, write_secret};
pub use limits::{raise_descriptors, raise_to_maximum};
pub use listen::listen_unix;
pub use lock::{lock, read_lock, write_lock};
pub use log_rate::LogRate;
pub use memory::{MappedMemory, is_in_memory, memfd_of};
pub use peer::peer_user;
pub use random::fill_random;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
pub use time::Time;

/// Has the calling thread run on this CPU only.
///
/// # Panics
/// The kernel's sets have no such number: it is [`CpuSet::MAX_CPU`] or more.
pub fn pin_thread(cpu: usize) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
}
