//! Suspended VMs: a guest that stands still needs hardly any local memory, and its pages stay on
//! the blades, packed where the blade packs.
//!
//! QEMU's process stays, with what of it cannot be far. What is to be restored is in a file of the
//! VM's folder before anything changes, and until all of it is restored: whoever is killed in
//! between leaves a VM that can be suspended or resumed again. One command at a time changes it.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use farpool_kernel::write_atomically;
use farpool_run::{LocalLimit, RunStatistics, UnmovableKind, read_statistics};
use farpool_units::PAGE_BYTES_U64;
use serde_json::{Value, json};

use crate::ask::{AskError, Asked};
use crate::registry::Entry;
use crate::{VmError, qmp, registry};

const FILE: &str = "suspended.json";
/// Held while a VM is suspended or resumed.
const LOCK: &str = "suspension.lock";
/// What a suspended QEMU keeps besides what cannot be far (16 MiB): it still answers, its timers go
/// on, and the pager keeps a buffer. With 8 MiB the last pages did not leave.
const SPARE_BYTES: u64 = 16 << 20;
/// What cannot be far of a QEMU (32 MiB), if that is not known.
const FIXED_BYTES: u64 = 32 << 20;
/// By which part of it a limit may be passed.
const PASSED_PART: u64 = 10;
/// How long less than this may leave, until no more is expected to: the blades are full, or are not
/// reached.
const STILL_TIME: Duration = Duration::from_secs(3);
const STILL_BYTES: u64 = 1 << 20;
/// How often it is looked at.
const LOOK_STEP: Duration = Duration::from_millis(50);

/// What a suspended VM was, and is again once it is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Before {
    local: LocalLimit,
    /// The guest ran; otherwise somebody had paused it.
    pub(crate) ran: bool,
}

impl Before {
    fn to_json(self) -> Value {
        let (bytes, percent) = match self.local {
            LocalLimit::Bytes(bytes) => (Some(bytes), None),
            LocalLimit::Percent(percent) => (None, Some(percent)),
        };
        json!({"local_bytes": bytes, "local_percent": percent, "ran": self.ran})
    }

    fn from_json(text: &[u8]) -> Option<Before> {
        let value: Value = serde_json::from_slice(text).ok()?;
        let bytes = value["local_bytes"].as_u64().map(LocalLimit::Bytes);
        let percent = || value["local_percent"].as_u64().and_then(|it| u32::try_from(it).ok());
        let local = bytes.or_else(|| percent().map(LocalLimit::Percent))?;
        Some(Before { local, ran: value["ran"].as_bool()? })
    }
}

/// Where the memory of a suspended VM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suspended {
    pub local_bytes: u64,
    pub far_bytes: u64,
    /// The local memory that it is to have at most.
    pub limit_bytes: u64,
}

impl Suspended {
    fn of(run: &RunStatistics, limit_bytes: u64) -> Suspended {
        Suspended { local_bytes: run.local_bytes(), far_bytes: run.far_bytes(), limit_bytes }
    }

    /// True if all is far that can be.
    pub fn is_complete(&self) -> bool {
        self.local_bytes <= self.limit_bytes + self.limit_bytes / PASSED_PART
    }
}

/// Whether a VM is suspended.
pub(crate) fn is_suspended(entry: &Entry) -> bool {
    path(entry, FILE).exists()
}

/// Stops the guest, and moves what can be far to the blades. `watch` is called while it leaves.
/// Where a VM is suspended already, this goes on with it.
pub(crate) fn suspend(entry: &Entry, watch: impl FnMut(&Suspended)) -> Result<Suspended, VmError> {
    let _turn = turn(entry)?;
    let before = note_before(entry)?;
    if before.ran {
        tell(entry, "stop")?;
    }
    shrink(entry, SPARE_BYTES, watch)
}

/// Waits until this process alone changes the VM.
pub(crate) fn turn(entry: &Entry) -> Result<File, VmError> {
    registry::lock(&path(entry, LOCK))
}

/// Writes down what the VM is now, unless that was done before: from here on [`restore`] makes it
/// that again.
pub(crate) fn note_before(entry: &Entry) -> Result<Before, VmError> {
    let no_run = || VmError::NoRun { name: entry.name.clone() };
    let board = farpool_run::run_of_keeper(entry.keeper_pid).ok_or_else(no_run)?;
    let run = read_statistics(&board).map_err(|_| no_run())?;
    let state = ask(entry, "query-status").and_then(|answer| Ok(qmp::state(&answer)?));
    let state = state.map_err(|error| VmError::Ask { name: entry.name.clone(), error })?;
    if let Some(before) = read(entry)? {
        return Ok(before);
    }
    let local = match run.local_percent {
        0 => LocalLimit::Bytes(run.limit_bytes),
        percent => LocalLimit::Percent(percent),
    };
    let before = Before { local, ran: state == "running" };
    write(entry, before)?;
    Ok(before)
}

/// Gives a VM the local memory back that it had.
pub(crate) fn give_back_limit(entry: &Entry, before: Before) -> Result<(), VmError> {
    let board = farpool_run::run_of_keeper(entry.keeper_pid);
    let board = board.ok_or_else(|| VmError::NoRun { name: entry.name.clone() })?;
    farpool_run::set_limit(&board, before.local)?;
    Ok(())
}

/// Lets a VM have no more local memory than what cannot be far and this much. Returns when that is
/// so, or no more leaves.
pub(crate) fn shrink(
    entry: &Entry,
    spare_bytes: u64,
    mut watch: impl FnMut(&Suspended),
) -> Result<Suspended, VmError> {
    let no_run = || VmError::NoRun { name: entry.name.clone() };
    let board = farpool_run::run_of_keeper(entry.keeper_pid).ok_or_else(no_run)?;
    let run = read_statistics(&board).map_err(|_| no_run())?;
    let before_bytes = run.limit_now_bytes();
    let mut limit_bytes = 0;
    let mut least_bytes = u64::MAX;
    let mut since = Instant::now();
    loop {
        let run = read_statistics(&board).map_err(|_| no_run())?;
        let wanted_bytes = (staying_bytes(&run) + spare_bytes).min(before_bytes);
        // What is pinned is known once it is in the way.
        if wanted_bytes > limit_bytes {
            farpool_run::set_limit(&board, LocalLimit::Bytes(wanted_bytes))?;
            limit_bytes = wanted_bytes;
        }
        let now = Suspended::of(&run, limit_bytes);
        watch(&now);
        if now.local_bytes + STILL_BYTES <= least_bytes {
            (least_bytes, since) = (now.local_bytes, Instant::now());
        }
        if now.is_complete() || since.elapsed() >= STILL_TIME {
            return Ok(now);
        }
        std::thread::sleep(LOOK_STEP);
    }
}

/// What of a QEMU cannot be far.
fn staying_bytes(run: &RunStatistics) -> u64 {
    let fixed_bytes = run.total.fixed_pages().map_or(FIXED_BYTES, |pages| pages * PAGE_BYTES_U64);
    // A code buffer of QEMU's translator, and what it has locked.
    let pinned = [UnmovableKind::Executable, UnmovableKind::Locked];
    fixed_bytes + pinned.map(|kind| run.unmovable.get(kind)).iter().sum::<u64>()
}

/// Gives a suspended VM its limit back, and lets the guest go on if it ran before. The caller has
/// the turn.
pub(crate) fn restore(entry: &Entry, _turn: &File) -> Result<(), VmError> {
    let before = read(entry)?.ok_or_else(|| VmError::NotSuspended { name: entry.name.clone() })?;
    give_back_limit(entry, before)?;
    if before.ran {
        tell(entry, "cont")?;
    }
    let path = path(entry, FILE);
    std::fs::remove_file(&path).map_err(|error| VmError::Registry { path, error })
}

pub(crate) fn ask(entry: &Entry, command: &'static str) -> Result<Value, AskError> {
    Asked::connect(&entry.socket)?.command(command)
}

pub(crate) fn tell(entry: &Entry, command: &'static str) -> Result<(), VmError> {
    let failed = |error| VmError::Halfway { name: entry.name.clone(), error };
    ask(entry, command).map(drop).map_err(failed)
}

fn path(entry: &Entry, name: &str) -> PathBuf {
    entry.socket.with_file_name(name)
}

fn read(entry: &Entry) -> Result<Option<Before>, VmError> {
    let path = path(entry, FILE);
    let failed = |error| VmError::Registry { path: path.clone(), error };
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let before = Before::from_json(&text);
    before.map(Some).ok_or_else(|| failed(Error::new(ErrorKind::InvalidData, "not as written")))
}

fn write(entry: &Entry, before: Before) -> Result<(), VmError> {
    let path = path(entry, FILE);
    let written = write_atomically(&path, before.to_json().to_string().as_bytes());
    written.map_err(|error| VmError::Registry { path, error })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn entry(folder: &Path) -> Entry {
        let name = "web1".parse().expect("a name");
        Entry { name, keeper_pid: std::process::id(), socket: folder.join("qmp.sock") }
    }

    #[test]
    fn what_was_before_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let entry = entry(folder.path());
        assert_eq!(read(&entry).expect("nothing"), None);
        for (local, ran) in [(LocalLimit::Bytes(1 << 30), true), (LocalLimit::Percent(25), false)] {
            let before = Before { local, ran };
            write(&entry, before).expect("written");
            assert_eq!(read(&entry).expect("there"), Some(before));
        }
        assert!(is_suspended(&entry));
    }

    #[test]
    fn a_file_of_another_kind_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let entry = entry(folder.path());
        for text in ["", "{}", "{\"ran\": true}", "{\"local_bytes\": -1, \"ran\": true}", "[7]"] {
            std::fs::write(folder.path().join(FILE), text).expect("a file");
            let told = read(&entry).expect_err(text).to_string();
            assert!(told.contains(FILE), "{told}");
        }
    }

    #[test]
    fn who_is_not_suspended_is_not_resumed() {
        let folder = tempfile::tempdir().expect("a folder");
        let entry = entry(folder.path());
        let told = restore(&entry, &turn(&entry).expect("the turn"))
            .expect_err("not suspended")
            .to_string();
        assert_eq!(told, "VM web1 is not suspended");
    }
}
