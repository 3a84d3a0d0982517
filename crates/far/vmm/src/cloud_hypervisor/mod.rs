//! Takes snapshots that Cloud Hypervisor hands off, and restores guests from them: the part of its
//! offload daemon, with the guest's memory in the pool.
//!
//! `snapshot` listens, `restore` connects to a monitor that waits for a migration, `faults` answers
//! what the restored guest lacks.

mod faults;
mod restore;
mod snapshot;

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use farpool_kernel::lock;
use rustix::io::Errno;

use crate::socket::{Listening, SocketError, Stop, wait};
use crate::store::{Image, Store, StoreError};
use crate::wire::cloud_hypervisor::MigrationError;
use crate::wire::hand_off::Parts;

/// How often it is looked whether a monitor waits for a guest. People start one, and wait.
const LOOK_STEP: Duration = Duration::from_millis(100);

/// Why a hand-off or a restore has failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error(transparent)]
    Migration(#[from] MigrationError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the process there cannot be held: {0}; Linux 6.5 or newer can")]
    NoPeer(Errno),
    #[error("{0} descriptors came with a request that must have {1}")]
    Descriptors(usize, usize),
    #[error("it has given the snapshot up")]
    Abandoned,
    #[error("memory of the guest cannot be made or written: {0}")]
    Memory(io::Error),
    #[error("the connection for its page faults cannot be made: {0}")]
    FaultConnection(Errno),
    #[error("farpool stops, and the guest's memory is still here only")]
    Stopped,
}

/// How guests are restored.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A guest that was handed off paused runs at once.
    pub resume: bool,
    /// Writes all pages into a guest's memory, also those that it does not ask for.
    pub beforehand: bool,
}

/// A snapshot: what Cloud Hypervisor handed over, its memory in the pool.
#[derive(Debug)]
struct Snapshot {
    parts: Parts,
    image: Arc<Image>,
}

/// Takes hand-offs from `listening`, and restores a guest whenever a monitor waits at `target`,
/// each from the newest snapshot, until it is time to stop. `tell` is called with what the user
/// should know, `watch` with the bytes of a snapshot that are stored.
///
/// # Errors
/// No connection can be accepted any more.
pub fn serve(
    listening: &Listening,
    target: &Path,
    store: &Arc<Store>,
    options: Options,
    stop: &Stop,
    tell: &(dyn Fn(&str) + Sync),
    watch: &(dyn Fn(u64) + Sync),
) -> Result<(), SocketError> {
    let newest: Mutex<Option<Arc<Snapshot>>> = Mutex::new(None);
    std::thread::scope(|scope| {
        scope.spawn(|| restore::all(target, &newest, options, stop, tell));
        while let Some(socket) = listening.accept(stop)? {
            match snapshot::take(&socket, store, stop, watch) {
                Ok(snapshot) => {
                    let Snapshot { image, parts } = &snapshot;
                    let state = if parts.runs { "runs" } else { "is paused" };
                    tell(&format!(
                        "a snapshot is stored: {} pages, {} of them not zeros; its guest {state}",
                        image.pages(),
                        image.stored_pages(),
                    ));
                    *lock(&newest) = Some(Arc::new(snapshot));
                }
                Err(GuestError::Abandoned) => tell("a snapshot was given up by its sender"),
                Err(error) => tell(&format!("a snapshot was not taken: {error}")),
            }
        }
        Ok(())
    })
}

/// Sleeps for a step, or until it is time to stop.
fn pause(stop: &Stop) {
    wait(&[stop.as_fd()], Some(LOOK_STEP));
}
