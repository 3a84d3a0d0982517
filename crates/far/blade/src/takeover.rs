//! Going on with what another process lends that still serves ([`Predecessor`]): it is found by its
//! lock on the memory's file, asked to end, and waited for. Then the blade starts as after any
//! other end of its process.
//!
//! Invariant: nobody is asked to end unless it keeps the table that this process has read and can
//! go on with. What only the end of the other sets free, its addresses, cannot be tried before.

use crate::blade::check_successor;
use crate::config::{BackingKind, BladeConfig};
use crate::journal::path_of;
use crate::server::check_certificate;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use thiserror::Error;

/// The kernel's list of locks on files, with the processes that took them.
const LOCKS: &str = "/proc/locks";
/// What a blade's process is called, perhaps with a version behind: `farpool-1.2`.
const NAME: &str = "farpool";
/// Why nothing of it can be gone on with.
pub(crate) const KEEPS_NO_TABLE: &str = "it keeps no table: it was started without --persist";

/// Why a blade cannot be taken over; nothing was changed, unless it says so.
#[derive(Debug, Error)]
pub enum TakeoverError {
    /// The memory is in no file.
    #[error("only a blade with memory in a file, and --persist, can be taken over")]
    NoFile,
    /// The file cannot be looked at.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The process that has the file locked is not to be seen.
    #[error(
        "another process has {path} locked, and it cannot be seen from here: it may be another \
         user's, or in another container; end it there, then start the blade without --takeover"
    )]
    Unseen {
        /// The file.
        path: PathBuf,
    },
    /// The file is used by something else.
    #[error("process {pid} ({name}) uses {path} and is no farpool blade; it is left alone")]
    Stranger {
        /// The process.
        pid: u32,
        /// Its name.
        name: String,
        /// The file.
        path: PathBuf,
    },
    /// What the process lends would be lost.
    #[error(
        "this blade could not go on with what process {pid} lends: {reason}. That process still \
         serves"
    )]
    Unfit {
        /// The process.
        pid: u32,
        /// What does not fit.
        reason: String,
    },
    /// It cannot be asked to end, or waited for.
    #[error("process {pid}, which serves the memory, cannot be told to end: {source}")]
    Signal {
        /// The process.
        pid: u32,
        /// The system's reason.
        source: io::Error,
    },
}

/// The process that serves the memory now.
#[derive(Debug)]
pub struct Predecessor {
    pid: u32,
    process: OwnedFd,
}

impl Predecessor {
    /// Finds the process that serves the memory of this configuration, and checks that a blade with
    /// this configuration could go on with what it lends. None if nobody serves it.
    ///
    /// # Errors
    /// See [`TakeoverError`].
    pub fn find(config: &BladeConfig) -> Result<Option<Predecessor>, TakeoverError> {
        let (BackingKind::File(path), Some(_)) = (&config.backing, config.persist) else {
            return Err(TakeoverError::NoFile);
        };
        let failed = |source: io::Error| TakeoverError::File { path: path.clone(), source };
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(failed)?,
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(None), // unlocked when it is closed
            Err(Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        let unseen = || TakeoverError::Unseen { path: path.clone() };
        let pid = holder(&file).map_err(failed)?.ok_or_else(unseen)?;
        let signal = |errno: Errno| TakeoverError::Signal { pid, source: errno.into() };
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(unseen)?;
        let process = pidfd_open(number, PidfdFlags::empty()).map_err(signal)?;
        // The number may have become another process's before the descriptor was open.
        if holder(&file).map_err(failed)? != Some(pid) {
            return Err(unseen());
        }
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).map_err(failed)?;
        let name = name.trim_end().to_owned();
        if !is_ours(&name) {
            return Err(TakeoverError::Stranger { pid, name, path: path.clone() });
        }
        let unfit = |reason: String| TakeoverError::Unfit { pid, reason };
        check_certificate(config).map_err(|refusal| unfit(refusal.to_string()))?;
        check_successor(config, path).map_err(unfit)?;
        // A table that an earlier process has left is not what this one lends.
        let table = std::fs::metadata(path_of(path)).map_err(failed)?;
        if !has_open(pid, table.dev(), table.ino()) {
            return Err(unfit(KEEPS_NO_TABLE.to_owned()));
        }
        Ok(Some(Predecessor { pid, process }))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Asks it to end in good order.
    ///
    /// # Errors
    /// Another user's process.
    pub fn ask_to_end(&self) -> Result<(), TakeoverError> {
        match pidfd_send_signal(&self.process, Signal::TERM) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(self.signal_error(errno)),
        }
    }

    /// Waits for its end at most so long. True if it has ended.
    ///
    /// # Errors
    /// The system's.
    pub fn has_ended(&self, wait: Duration) -> Result<bool, TakeoverError> {
        let mut wanted = [PollFd::new(&self.process, PollFlags::IN)];
        let wait = Timespec::try_from(wait).ok();
        match poll(&mut wanted, wait.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(self.signal_error(errno)),
        }
    }

    fn signal_error(&self, errno: Errno) -> TakeoverError {
        TakeoverError::Signal { pid: self.pid, source: errno.into() }
    }
}

fn is_ours(name: &str) -> bool {
    name.strip_prefix(NAME).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// The process that has locked the file and still has it open.
fn holder(file: &File) -> io::Result<Option<u32>> {
    let wanted = file.metadata()?;
    let locks = std::fs::read_to_string(LOCKS)?;
    let has_it = |pid: &u32| has_open(*pid, wanted.dev(), wanted.ino());
    Ok(lockers(&locks, wanted.ino()).find(has_it))
}

/// The processes that have locked a whole file of this number, of whatever file system: the list
/// names these otherwise than `stat` on some.
fn lockers(locks: &str, inode: u64) -> impl Iterator<Item = u32> + '_ {
    locks.lines().filter_map(move |line| {
        let mut words = line.split_whitespace().skip(1);
        let (kind, _, access) = (words.next()?, words.next()?, words.next()?);
        let (pid, file) = (words.next()?, words.next()?);
        let number: u64 = file.rsplit(':').next()?.parse().ok()?;
        let is_it = kind == "FLOCK" && access == "WRITE" && number == inode;
        is_it.then(|| pid.parse().ok()).flatten()
    })
}

fn has_open(pid: u32, device: u64, inode: u64) -> bool {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    let is_it = |path: &Path| {
        std::fs::metadata(path).is_ok_and(|file| (file.dev(), file.ino()) == (device, inode))
    };
    entries.flatten().any(|entry| is_it(&entry.path()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Persist;
    use farpool_units::SUPERPAGE_BYTES;

    #[test]
    fn the_kernels_list_of_locks_is_read() {
        let locks = "1: POSIX  ADVISORY  READ  11 fe:00:77 128 128\n\
                     2: FLOCK  ADVISORY  WRITE 12 fe:00:77 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 13 fe:00:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 14 00:19:78 0 EOF\n\
                     4: OFDLCK ADVISORY  READ  -1 fe:00:77 0 EOF\n\
                     5: FLOCK  ADVISORY  READ  15 fe:00:77 0 EOF\n\
                     6: FLOCK  ADVISORY  WRITE 16 00:2a:77 0 EOF\n\
                     7: FLOCK\n";
        assert_eq!(lockers(locks, 77).collect::<Vec<_>>(), [12, 16], "none that only waits");
        assert_eq!(lockers("", 77).next(), None);
        assert!(is_ours("farpool") && is_ours("farpool-1.2") && !is_ours("farpooled"));
    }

    fn config(path: &Path) -> BladeConfig {
        BladeConfig {
            memory_bytes: 2 * SUPERPAGE_BYTES,
            backing: BackingKind::File(path.to_owned()),
            persist: Some(Persist::Restart),
            ..BladeConfig::default()
        }
    }

    #[test]
    fn only_a_blades_process_is_asked_to_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("memory");
        let config = config(&path);
        assert!(Predecessor::find(&config).expect("no file").is_none());
        let file = File::create(&path).expect("a file");
        assert!(Predecessor::find(&config).expect("not locked").is_none());
        rustix::fs::flock(&file, FlockOperation::LockExclusive).expect("locked");
        let stranger = Predecessor::find(&config);
        let Err(TakeoverError::Stranger { pid, .. }) = stranger else { panic!("{stranger:?}") };
        assert_eq!(pid, std::process::id());
        let memfd = BladeConfig { backing: BackingKind::Memfd, ..config };
        assert!(matches!(Predecessor::find(&memfd), Err(TakeoverError::NoFile)));
    }
}
