//! Creating, opening and mapping the board's file.
//!
//! The file usually lies on a small file system (/run). Touching a page of a mapped file that finds
//! no block there is a SIGBUS, so nothing is touched that has no block: what every run needs is
//! allocated when the file is made, and more slots and the log of faults before they are used.

use std::io::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use farpool_units::{PAGE_BYTES, at_most, exactly};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::copies::CopyTable;
use crate::fault_log::FaultLog;
use crate::layout::{self, Header, MAX_SLOTS, Settings, Slot};

const SLOTS_END_BYTES: usize = size_of::<Header>() + MAX_SLOTS * size_of::<Slot>();
const COPIES_END_BYTES: usize = SLOTS_END_BYTES + size_of::<CopyTable>();
const FAULT_LOG_BYTES: usize = COPIES_END_BYTES.next_multiple_of(align_of::<FaultLog>());
const FILE_BYTES: usize = FAULT_LOG_BYTES + size_of::<FaultLog>();
const _: () = assert!(SLOTS_END_BYTES.is_multiple_of(align_of::<CopyTable>()));
/// Slots that are allocated at the start: more processes than most trees have, in 0.8 MiB. All 1024
/// would take 6.4 MiB of memory for each run, and the log of faults 8 MiB more.
const FIRST_SLOTS: usize = 128;
const FIRST_SLOTS_END_BYTES: usize = size_of::<Header>() + FIRST_SLOTS * size_of::<Slot>();
/// Slots that are allocated together when the ones before are taken: 50 KiB.
const SLOTS_STEP: usize = 8;

/// Why a board cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    #[error("the board {path} cannot be {action}: {error}")]
    File { path: PathBuf, action: &'static str, error: Error },
    #[error("{path} is not a board of this version of farpool")]
    Foreign { path: PathBuf },
    #[error(
        "no room for the board of the run {path} ({} KiB): {error}; free some space on its file \
         system (df {})",
        bytes.div_ceil(1024), path.ancestors().nth(2).unwrap_or(path).display()
    )]
    NoRoom { path: PathBuf, bytes: usize, error: Error },
    #[error(
        "the board {path} belongs to user {owner}, neither to this user ({user}) nor to root: \
         somebody else could read this program's memory through it; start the program with \
         `farpool run` as the user it is to have"
    )]
    Stranger { path: PathBuf, owner: u32, user: u32 },
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
        let failed = |action| move |error: Errno| file_error(path, action, error);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        // Readable by the owner only: it names programs and addresses. Children that change their
        // user have opened it before.
        let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|error| {
            if error == Errno::NOSPC { no_room(path, error) } else { failed("created")(error) }
        })?;
        rustix::fs::ftruncate(&fd, FILE_BYTES as u64).map_err(failed("sized"))?;
        allocate_first(&fd).map_err(|error| no_room(path, error))?;
        let board = Board::map(&fd, true, 0).map_err(failed("mapped"))?;
        board.header().slots_backed.store(FIRST_SLOTS_NUMBER, Relaxed);
        board.header().store(settings);
        let keeper = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        board.header().keeper_pid.store(keeper, Relaxed);
        board.header().version.store(layout::VERSION, Relaxed);
        board.header().magic.store(layout::MAGIC, Release);
        Ok(board)
    }

    /// Opens an existing board, for a process of the tree that will [`claim`](Self::claim) a slot
    /// (`writable`) or for reading (`farpool stat`).
    pub fn open(path: &Path, writable: bool) -> Result<Board, BoardError> {
        let board = Board::attach(path, writable)?;
        if writable {
            board.back_a_free_slot().map_err(|error| no_room(path, error))?;
        }
        Ok(board)
    }

    /// Opens an existing board to change the run's settings: takes no slot.
    pub fn open_settings(path: &Path) -> Result<Board, BoardError> {
        Board::attach(path, true)
    }

    fn attach(path: &Path, writable: bool) -> Result<Board, BoardError> {
        let failed = |action| move |error: Errno| file_error(path, action, error);
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(failed("opened"))?;
        let status = rustix::fs::fstat(&fd).map_err(failed("examined"))?;
        check_owner(path, status.st_uid)?;
        Board::map_checked(&fd, writable, 0, path)
    }

    /// The length of a board in bytes.
    pub const BYTES: usize = FILE_BYTES;

    /// Maps a board that another process has opened and handed over, at the address `wish` if that
    /// is free.
    pub fn adopt(fd: &OwnedFd, wish: usize) -> Result<Board, BoardError> {
        Board::map_checked(fd, true, wish, Path::new("handed over"))
    }

    /// Maps a file if it is a board of this version.
    fn map_checked(
        fd: &OwnedFd,
        writable: bool,
        wish: usize,
        path: &Path,
    ) -> Result<Board, BoardError> {
        let failed = |action| move |error: Errno| file_error(path, action, error);
        let foreign = || BoardError::Foreign { path: path.to_owned() };
        let status = rustix::fs::fstat(fd).map_err(failed("examined"))?;
        if usize::try_from(status.st_size) != Ok(FILE_BYTES) {
            return Err(foreign());
        }
        let board = Board::map(fd, writable, wish).map_err(failed("mapped"))?;
        let header = board.header();
        let is_known = header.magic.load(Acquire) == layout::MAGIC
            && header.version.load(Relaxed) == layout::VERSION;
        if is_known { Ok(board) } else { Err(foreign()) }
    }

    /// The mapped addresses, as start and length.
    pub fn range(&self) -> (usize, usize) {
        (self.base as usize, FILE_BYTES)
    }

    pub fn header(&self) -> &Header {
        // SAFETY: the mapping is FILE_BYTES long, page-aligned, and starts with a Header of
        // atomics.
        unsafe { &*self.base.cast::<Header>() }
    }

    pub fn slots(&self) -> &[Slot] {
        // SAFETY: MAX_SLOTS slots of atomics follow the header; Header's size keeps them aligned.
        unsafe {
            let first = self.base.add(size_of::<Header>()).cast::<Slot>();
            std::slice::from_raw_parts(first, MAX_SLOTS)
        }
    }

    /// The table of copies of frozen memory.
    pub fn copies(&self) -> &CopyTable {
        // SAFETY: the table of atomics follows the slots; their end is aligned for it.
        unsafe { &*self.base.add(SLOTS_END_BYTES).cast::<CopyTable>() }
    }

    /// Turns the log of the run's faults on. The keeper does this before the program starts.
    pub fn switch_on_fault_log(&self, path: &Path) -> Result<(), BoardError> {
        self.back(FAULT_LOG_BYTES, FILE_BYTES).map_err(|error| BoardError::NoRoom {
            path: path.to_owned(),
            bytes: FILE_BYTES - FAULT_LOG_BYTES,
            error: error.into(),
        })?;
        self.fault_log().switch_on();
        Ok(())
    }

    /// The log of the run's faults, if it is on.
    pub fn fault_log(&self) -> &FaultLog {
        // SAFETY: the log of atomics follows the copies, at an offset that is aligned for it.
        unsafe { &*self.base.add(FAULT_LOG_BYTES).cast::<FaultLog>() }
    }

    /// Slots that belong to a process now.
    pub fn processes(&self) -> impl Iterator<Item = &Slot> {
        let used = self.header().slots_used.load(Acquire) as usize;
        self.slots()[..used.min(MAX_SLOTS)].iter().filter(|slot| slot.pid.load(Acquire) != 0)
    }

    /// Claims a slot for a process and clears it: the one it had before exec, or a free one. None
    /// if all are taken, or the file system has no room for another.
    pub fn claim(&self, pid: u32, start_ticks: u64) -> Option<&Slot> {
        let mine = self.processes().find(|slot| {
            slot.pid.load(Acquire) == pid && slot.start_ticks.load(Relaxed) == start_ticks
        });
        let free = || {
            let take = |slot: &Slot| slot.pid.compare_exchange(0, pid, AcqRel, Relaxed).is_ok();
            let (index, slot) = loop {
                let found = self.backed_slots().iter().enumerate().find(|(_, slot)| take(slot));
                if let Some(found) = found {
                    break found;
                }
                let more = self.back_more_slots().inspect_err(|_| {
                    self.header().processes_without_room.fetch_add(1, Relaxed);
                });
                more.ok().filter(|more| *more)?;
            };
            self.header().slots_used.fetch_max(exactly(index + 1), AcqRel);
            Some(slot)
        };
        let slot = mine.or_else(free)?;
        slot.clear();
        slot.start_ticks.store(start_ticks, Relaxed);
        Some(slot)
    }

    /// Why [`claim`](Self::claim) found no slot: true if the file system has no room for more,
    /// false if all are taken.
    pub fn lacks_room(&self) -> bool {
        self.backed_slots().len() < MAX_SLOTS
    }

    /// Frees a slot whose process is gone.
    pub fn release(&self, slot: &Slot) {
        slot.clear();
        slot.pid.store(0, Release);
    }

    /// Slots that are allocated and may be touched.
    fn backed_slots(&self) -> &[Slot] {
        let backed = self.header().slots_backed.load(Acquire) as usize;
        &self.slots()[..backed.min(MAX_SLOTS)]
    }

    /// Ensures that a process that opens the board finds a slot, or gets an error that says why
    /// there is none.
    fn back_a_free_slot(&self) -> Result<(), Errno> {
        let own = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        // Its own counts: it had one before exec.
        let is_free = |slot: &Slot| [0, own].contains(&slot.pid.load(Relaxed));
        while !self.backed_slots().iter().any(is_free) && self.back_more_slots()? {}
        Ok(())
    }

    /// Allocates some more slots. False if there are no more. Several processes may do so at once.
    fn back_more_slots(&self) -> Result<bool, Errno> {
        let backed = self.backed_slots().len();
        let next = (backed + SLOTS_STEP).min(MAX_SLOTS);
        let at = |slots: usize| size_of::<Header>() + slots * size_of::<Slot>();
        self.back(at(backed), at(next))?;
        self.header().slots_backed.fetch_max(exactly(next), AcqRel);
        Ok(next > backed)
    }

    /// Has the file system allocate the pages of a part of the file: an error instead of a SIGBUS.
    fn back(&self, from: usize, to: usize) -> Result<(), Errno> {
        let from = from / PAGE_BYTES * PAGE_BYTES;
        // SAFETY: inside the mapping, from a page on; its content is not changed.
        unsafe {
            let start = self.base.add(from).cast();
            rustix::mm::madvise(start, to - from, Advice::LinuxPopulateWrite)
        }
        .map_err(|error| match error {
            Errno::FAULT => Errno::NOSPC, // instead of the SIGBUS of a touch
            other => other,
        })
    }

    /// Maps the file at the address `wish`, if that is free.
    fn map(fd: &OwnedFd, writable: bool, wish: usize) -> Result<Board, Errno> {
        let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let (wish, protection) = (wish as *mut _, ProtFlags::READ | write);
        // SAFETY: a fresh shared mapping, over nothing; the file has FILE_BYTES bytes and never
        // shrinks.
        let base = unsafe {
            rustix::mm::mmap(wish, FILE_BYTES, protection, MapFlags::SHARED, fd.as_fd(), 0)?
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

#[allow(clippy::cast_possible_truncation, reason = "a small constant")]
const FIRST_SLOTS_NUMBER: u32 = FIRST_SLOTS as u32;

/// Allocates all that is touched in every run: the header, the first slots, the copies, and the
/// page of the fault log that says whether it is on.
fn allocate_first(fd: &OwnedFd) -> Result<(), Errno> {
    let copies_at = SLOTS_END_BYTES / PAGE_BYTES * PAGE_BYTES;
    let parts = [(0, FIRST_SLOTS_END_BYTES), (copies_at, FAULT_LOG_BYTES + PAGE_BYTES)];
    for (from, to) in parts {
        let (from, bytes) = (from as u64, (to - from) as u64);
        let allocate = || rustix::fs::fallocate(fd, FallocateFlags::empty(), from, bytes);
        match rustix::io::retry_on_intr(allocate) {
            // On a file system without the call blocks are allocated by writing zeros.
            Err(Errno::OPNOTSUPP) => write_zeros(fd, from, bytes)?,
            other => other?,
        }
    }
    Ok(())
}

fn write_zeros(fd: &OwnedFd, from: u64, bytes: u64) -> Result<(), Errno> {
    let zeros = [0_u8; PAGE_BYTES];
    let end = from + bytes;
    let mut at = from;
    while at < end {
        let part = at_most::<usize, _>(end - at).min(PAGE_BYTES);
        at += rustix::io::pwrite(fd, &zeros[..part], at)? as u64;
    }
    Ok(())
}

fn no_room(path: &Path, error: Errno) -> BoardError {
    let bytes = FIRST_SLOTS_END_BYTES + size_of::<CopyTable>() + PAGE_BYTES;
    BoardError::NoRoom { path: path.to_owned(), bytes, error: error.into() }
}

/// Checks the owner of the board, who names the blades that a program's pages go to: it must be
/// root or this user. (A program that root's run started may have become another user.)
fn check_owner(path: &Path, owner: u32) -> Result<(), BoardError> {
    let user = rustix::process::geteuid().as_raw();
    if owner == user || owner == 0 {
        return Ok(());
    }
    Err(BoardError::Stranger { path: path.to_owned(), owner, user })
}

fn file_error(path: &Path, action: &'static str, error: Errno) -> BoardError {
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
            sharing_group: std::num::NonZeroU64::new(7).map(farpool_wire::SharingGroup),
            blades: vec![
                BladeOffer::open("shm:///run/blade.sock"),
                BladeOffer::open("tcp://127.0.0.1:7070"),
            ],
            allow_remote_tcp: true,
            secures_tcp: true,
            sealing: crate::Sealing::PlainOnThisHost,
            redundancy: crate::Redundancy::NONE,
            when_full: WhenFull::Fail,
            victim_policy: "clock".into(),
            prefetch_policy: "none".into(),
            pager_threads: 2,
            threshold_bytes: 65_536,
            deadline_ms: 10_000,
            verify_every_ms: 86_400_000,
            program: "redis-server".into(),
        }
    }

    #[test]
    fn a_full_board_is_told_from_a_full_file_system() {
        let directory = tempfile::tempdir().expect("tempdir");
        let board = Board::create(&directory.path().join("board"), &settings()).expect("created");
        assert!(board.lacks_room(), "not all slots have their room from the start");
        let pids = 1..=u32::try_from(MAX_SLOTS).expect("few");
        pids.for_each(|pid| assert!(board.claim(pid, 1).is_some(), "slot {pid}"));
        assert!(board.claim(1 << 20, 1).is_none() && !board.lacks_room(), "all are taken");
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
    fn a_process_without_its_pager_keeps_what_was_counted() {
        let directory = tempfile::tempdir().expect("tempdir");
        let board = Board::create(&directory.path().join("board"), &settings()).expect("create");
        let slot = board.claim(7, 1).expect("a slot");
        slot.set_state(crate::ProcessState::Active);
        let counters = [Counter::Faults, Counter::ResidentPages, Counter::WithoutRoom];
        counters.iter().for_each(|counter| slot.add(*counter, 5));
        slot.lose_pager();
        assert_eq!(counters.map(|counter| slot.get(counter)), [5, 0, 0]);
        assert_eq!((slot.state(), board.processes().count()), (crate::ProcessState::Native, 1));
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
    fn a_board_of_somebody_else_or_behind_a_link_is_refused() {
        let directory = tempfile::tempdir().expect("tempdir");
        let (path, link) = (directory.path().join("board"), directory.path().join("link"));
        let _board = Board::create(&path, &settings()).expect("create");
        std::os::unix::fs::symlink(&path, &link).expect("link");
        assert!(matches!(Board::open(&link, false), Err(BoardError::File { .. })));
        if std::os::unix::fs::chown(&path, Some(4242), None).is_err() {
            println!("SKIPPED: only root can give a file away");
            return;
        }
        for open in [Board::open(&path, false), Board::open(&path, true)] {
            let error = open.expect_err("of a stranger").to_string();
            assert!(error.contains("user 4242"), "{error}");
        }
    }

    #[test]
    fn no_more_is_allocated_than_is_needed_and_slots_grow() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("board");
        let board = Board::create(&path, &settings()).expect("create");
        let allocated = || path.metadata().expect("metadata").blocks() * 512;
        assert!(allocated() >= FIRST_SLOTS_END_BYTES as u64);
        assert!(allocated() < 1 << 20, "{} bytes for a run", allocated());
        for pid in 1..=MAX_SLOTS {
            let pid = u32::try_from(pid).expect("small");
            board.claim(pid, 1).expect("a slot");
        }
        assert!(board.claim(u32::MAX, 1).is_none(), "all are taken");
        assert!(allocated() >= SLOTS_END_BYTES as u64);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let directory = tempfile::tempdir().expect("tempdir");
        let long = Settings { victim_policy: "x".repeat(100), ..settings() };
        let error = Board::create(&directory.path().join("board"), &long).expect_err("too long");
        assert!(error.to_string().contains("victim policy"));
    }
}
