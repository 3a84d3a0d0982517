//! Migration: a guest goes on at another host. Its devices' state moves; its memory stays on the
//! blades and changes its owner.
//!
//! Both hosts run `farpool vm run`, with QEMUs of equal machines: the giver's runs the guest, the
//! receiver's waits (`-incoming defer -S`). The order, and who has the guest:
//! 1. its local memory leaves while it runs; then it stops (giver);
//! 2. the giver's pager writes the rest and hands the memory over, the receiver's binds it: both
//!    can read it, and neither changes what the other reads (giver);
//! 3. QEMU's own migration brings the devices' state, without memory (giver);
//! 4. the receiver is ready; the giver lets go (nobody, for the time of two messages);
//! 5. the receiver takes it, which a blade allows once, lets it go on, and says so (receiver).
//!
//! Whatever fails before 4, or is killed, the guest goes on at the giver's. After 4 the giver asks
//! the blade: it has it back, or never again. A receiver that hears nothing asks the blade, too:
//! the guest of a giver that has ended becomes its own.

mod desk;
mod give;
mod link;
mod receive;

use std::path::Path;
use std::time::Duration;

use farpool_wire::Address;

use crate::registry::Entry;

pub use desk::DeskError;
pub use give::{GiveError, Migrated, Progress};
pub use link::LinkError;
pub use receive::ReceiveError;

pub(crate) use give::{keep, migrate};
pub(crate) use receive::Receiver;

/// Whether a VM's guest can move, and where it comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Mobility {
    /// It stays where it is.
    #[default]
    Fixed,
    /// It can go to another host.
    Movable,
    /// It comes from another host, and can go on to a further one.
    Incoming {
        /// Where to wait for it.
        at: Address,
    },
}

/// The file that stands for the guest's memory, and the one with its length.
const MEMORY_FILE: &str = "guest.memory";
const LENGTH_FILE: &str = "guest.bytes";
/// How long QEMU may take for an answer: its guest may have much to fetch before it stops.
const QMP_TIME: Duration = Duration::from_secs(30);
/// How often QEMU is asked how far it is.
const LOOK_STEP: Duration = Duration::from_millis(2);
/// How long QEMU may take to save or load the state of its devices.
const DEVICES_TIME: Duration = Duration::from_secs(30);

/// Makes the files of a movable guest's memory. Returns the path of the one that QEMU is given.
pub(crate) fn prepare(folder: &Path, bytes: u64) -> Result<std::path::PathBuf, std::io::Error> {
    let path = folder.join(MEMORY_FILE);
    std::fs::File::create_new(&path)?;
    std::fs::write(folder.join(LENGTH_FILE), bytes.to_string())?;
    Ok(path)
}

/// The length of a VM's movable memory. None: it has none.
fn memory_bytes(folder: &Path) -> Option<u64> {
    std::fs::read_to_string(folder.join(LENGTH_FILE)).ok()?.trim().parse().ok()
}

/// Whether a VM's guest can move to another host.
pub(crate) fn is_movable(entry: &Entry) -> bool {
    desk::socket(entry.folder()).exists()
}

/// How far QEMU's migration is, by its answer to `query-migrate`: done, or why it never will be.
fn migration_state(answer: &serde_json::Value) -> Option<Result<(), String>> {
    match answer["status"].as_str() {
        Some("completed") => Some(Ok(())),
        Some("failed" | "cancelled") => {
            let reason = answer["error-desc"].as_str().unwrap_or("QEMU does not say why");
            Some(Err(reason.to_owned()))
        }
        _ => None,
    }
}
