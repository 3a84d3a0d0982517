//! Creating, opening and mapping the board's file.

use std::io::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::copies::CopyTable;
use crate::fault_log::FaultLog;
use crate::layout::{self, Header, MAX_SLOTS, Settings, Slot};

const SLOTS_END_BYTES: usize = size_of::<Header>() + MAX_SLOTS * size_of::<Slot>();
const COPIES_END_BYTES: usize = SLOTS_END_BYTES + size_of::<CopyTable>();
const FAULT_LOG_BYTES: usize = COPIES_END_BYTES.next_multiple_of(align_of::<FaultLog>());
const FILE_BYTES: usize = FAULT_LOG_BYTES + size_of::<FaultLog>();
const _: () = assert!(SLOTS_END_BYTES.is_multiple_of(align_of::<CopyTable>()));

/// Why a board cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    #[error("the board {path} cannot be {action}: {error}")]
    File { path: PathBuf, action: &'static str, error: Error },
    #[error("{path} is not a board of this version of farpool")]
    Foreign { path: PathBuf },
    #[error("{field} do not fit the board; shorten them")]
    TooLong { field: &'static str },
}

/// A mapped board. The mapping lives as long as the value; in a program it is never unmapped.
#[derive(Debug)]
pub struct Board {
    base: *mut u8,
}

// SAFETY: everything behind `base` is atomics in shared memory.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Board {
    /// Creates the file (which must not exist) and writes the settings. The keeper does this.
    pub fn create(path: &Path, settings: &Settings) -> Result<Board, BoardError> {
        layout::check(settings).map_err(|field| BoardError::TooLong { field })?;
        let failed = |action| move |error: rustix::io::Errno| file_error(path, action, error);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        // Readable by the owner only: it names programs and addresses. Children that change their
        // user opened it before they did.
        let fd =
            rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(failed("created"))?;
        rustix::fs::ftruncate(&fd, FILE_BYTES as u64).map_err(failed("sized"))?;
        let board = Board::map(&fd, true).map_err(failed("mapped"))?;
        board.header().store(settings);
        let keeper = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        board.header().keeper_pid.store(keeper, Relaxed);
        board.header().version.store(layout::VERSION, Relaxed);
        board.header().magic.store(layout::MAGIC, Release);
        Ok(board)
    }

    /// Opens an existing board, for writing (a process of the tree) or for reading (`farpool stat`).
    pub fn open(path: &Path, writable: bool) -> Result<Board, BoardError> {
        let failed = |action| move |error: rustix::io::Errno| file_error(path, action, error);
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let fd = rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())
            .map_err(failed("opened"))?;
        let status = rustix::fs::fstat(&fd).map_err(failed("examined"))?;
        if status.st_size != i64::try_from(FILE_BYTES).unwrap_or(i64::MAX) {
            return Err(BoardError::Foreign { path: path.to_owned() });
        }
        let board = Board::map(&fd, writable).map_err(failed("mapped"))?;
        let header = board.header();
        if header.magic.load(Acquire) != layout::MAGIC
            || header.version.load(Relaxed) != layout::VERSION
        {
            return Err(BoardError::Foreign { path: path.to_owned() });
        }
        Ok(board)
    }

    pub fn header(&self) -> &Header {
        // SAFETY: the mapping is FILE_BYTES long, page-aligned, and starts with a Header of atomics.
        unsafe { &*self.base.cast::<Header>() }
    }

    pub fn slots(&self) -> &[Slot] {
        // SAFETY: MAX_SLOTS slots of atomics follow the header; Header's size keeps them aligned.
        unsafe {
            let first = self.base.add(size_of::<Header>()).cast::<Slot>();
            std::slice::from_raw_parts(first, MAX_SLOTS)
        }
    }

    /// Frozen memory on its way.
    pub fn copies(&self) -> &CopyTable {
        // SAFETY: the table of atomics follows the slots; their end is aligned for it.
        unsafe { &*self.base.add(SLOTS_END_BYTES).cast::<CopyTable>() }
    }

    /// The faults of the run, if somebody wants them.
    pub fn fault_log(&self) -> &FaultLog {
        // SAFETY: the log of atomics follows the copies, at an offset that is aligned for it.
        unsafe { &*self.base.add(FAULT_LOG_BYTES).cast::<FaultLog>() }
    }

    /// Slots that belong to a process now.
    pub fn processes(&self) -> impl Iterator<Item = &Slot> {
        let used = self.header().slots_used.load(Acquire) as usize;
        self.slots()[..used.min(MAX_SLOTS)].iter().filter(|slot| slot.pid.load(Acquire) != 0)
    }

    /// Claims a slot for a process and clears it: the one it had before exec, or a free one. None when
    /// all are taken.
    pub fn claim(&self, pid: u32, start_ticks: u64) -> Option<&Slot> {
        let mine = self.processes().find(|slot| {
            slot.pid.load(Acquire) == pid && slot.start_ticks.load(Relaxed) == start_ticks
        });
        let free = || {
            let take = |slot: &Slot| slot.pid.compare_exchange(0, pid, AcqRel, Relaxed).is_ok();
            let (index, slot) = self.slots().iter().enumerate().find(|(_, slot)| take(slot))?;
            let used = u32::try_from(index + 1).unwrap_or(u32::MAX);
            self.header().slots_used.fetch_max(used, AcqRel);
            Some(slot)
        };
        let slot = mine.or_else(free)?;
        slot.clear();
        slot.start_ticks.store(start_ticks, Relaxed);
        Some(slot)
    }

    /// Gives a slot back: its process is gone.
    pub fn release(&self, slot: &Slot) {
        slot.clear();
        slot.pid.store(0, Release);
    }

    fn map(fd: &OwnedFd, writable: bool) -> Result<Board, rustix::io::Errno> {
        let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let (null, protection) = (std::ptr::null_mut(), ProtFlags::READ | write);
        // SAFETY: a fresh shared mapping at an address of the kernel's choice; the file has
        // FILE_BYTES bytes and never shrinks.
        let base = unsafe {
            rustix::mm::mmap(null, FILE_BYTES, protection, MapFlags::SHARED, fd.as_fd(), 0)?
        };
        Ok(Board { base: base.cast() })
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length and no reference outlives self.
        // Failure would mean that it is not mapped, which leaves nothing to do.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), FILE_BYTES) };
    }
}

fn file_error(path: &Path, action: &'static str, error: rustix::io::Errno) -> BoardError {
    BoardError::File { path: path.to_owned(), action, error: error.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blades::BladeOffer;
    use crate::layout::{Counter, WhenFull};

    fn settings() -> Settings {
        Settings {
            limit_bytes: 1 << 30,
            local_percent: 25,
            quota_bytes: 1 << 40,
            blades: vec![
                BladeOffer::open("shm:///run/blade.sock"),
                BladeOffer::open("tcp://127.0.0.1:7070"),
            ],
            allow_remote_tcp: true,
            when_full: WhenFull::Fail,
            victim_policy: "clock".into(),
            prefetch_policy: "none".into(),
            pager_threads: 2,
            threshold_bytes: 65_536,
            deadline_ms: 10_000,
            program: "redis-server".into(),
        }
    }

    #[test]
    fn settings_come_back_as_written() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("board");
        let board = Board::create(&path, &settings()).expect("create");
        assert_eq!(Board::open(&path, false).expect("open").header().settings(), settings());
        assert!(Board::create(&path, &settings()).is_err(), "never takes over a file");
        drop(board);
    }

    #[test]
    fn slots_are_claimed_once_and_seen_by_others() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("board");
        let board = Board::create(&path, &settings()).expect("create");
        let other = Board::open(&path, true).expect("open");
        let first = board.claim(10, 1).expect("slot");
        other.claim(11, 2).expect("slot").add(Counter::Faults, 5);
        first.add(Counter::Faults, 2);
        let total: u64 = board.processes().map(|slot| slot.get(Counter::Faults)).sum();
        assert_eq!(total, 7);
        other.release(&other.slots()[0]);
        assert_eq!(board.processes().count(), 1);
        assert_eq!(board.claim(12, 3).expect("slot").get(Counter::Faults), 0);
        board.claim(12, 3).expect("the same slot, as after exec");
        assert_eq!(board.processes().count(), 2);
    }

    #[test]
    fn a_foreign_file_is_refused() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("board");
        std::fs::write(&path, vec![0_u8; FILE_BYTES]).expect("write");
        assert!(matches!(Board::open(&path, false), Err(BoardError::Foreign { .. })));
        std::fs::write(&path, b"short").expect("write");
        assert!(matches!(Board::open(&path, false), Err(BoardError::Foreign { .. })));
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let directory = tempfile::tempdir().expect("tempdir");
        let long = Settings { victim_policy: "x".repeat(100), ..settings() };
        let error = Board::create(&directory.path().join("board"), &long).expect_err("too long");
        assert!(error.to_string().contains("victim policy"));
    }
}
