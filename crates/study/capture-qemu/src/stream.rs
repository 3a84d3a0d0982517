// SPDX-License-Identifier: GPL-2.0-or-later
//! The capture file: a ring of records in shared memory between the program under QEMU and the
//! recorder that drains it. docs/researchers/trace.md, "The capture file", describes it byte by
//! byte.
//!
//! It is memory, not a descriptor, because the program may close any descriptor and would then
//! write its own data over ours. Only one thread of a process at a time may push (the caller's
//! lock); if children are followed, a lock in the file keeps processes apart. It is a robust one:
//! a process that is killed in the middle of a record has not published it.

use std::cell::UnsafeCell;
use std::fs::OpenOptions;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The first eight bytes of a capture file: "FPCAPT02".
const MAGIC: u64 = u64::from_le_bytes(*b"FPCAPT02");
/// The header's bytes; records follow.
const HEADER_BYTES: usize = 4096;
/// Bits of a record's second word that count ticks; the thread is in the bits above.
const TICK_BITS: u32 = 48;
/// The largest thread number; threads that start later share it.
const LAST_THREAD: u64 = (1 << (64 - TICK_BITS)) - 1;
/// Length of a pause while waiting for the recorder, in nanoseconds.
const PAUSE_NS: i64 = 20_000;
/// The access of a record that tells of a process, and the records of text that may follow it.
const PROCESS: u64 = 3;
const RECORD_BYTES: usize = 16;
/// Set in the second word of such a record if the process is recorded.
const IS_RECORDED: u64 = 1 << 63;
/// Bits of that word above the text's length: the process ID of the kernel.
const PID_SHIFT: u32 = 16;
/// Bits of a block's number below the process's.
const PROCESS_SHIFT: u32 = 44;
/// The most processes that are recorded: their numbers have a place in a record's first word, above
/// the block's and the access. Later ones run on unrecorded, and the trace says how many.
const PROCESSES_MAX: u64 = 1 << (64 - 6 - PROCESS_SHIFT);
/// Pauses between two checks that the recorder is alive: one second.
const PAUSES_PER_LOOK: u32 = 50_000;

/// The header; every field is eight bytes, little endian. Fields that either side writes lie on
/// separate cache lines.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Header {
    magic: u64,
    /// Records the ring holds; a power of two.
    capacity: u64,
    /// Process ID of the recorder.
    recorder: u64,
    _reserved: [u64; 5],
    /// Records written so far.
    written: Line,
    /// Records read so far.
    read: Line,
    /// Set when the recorder wants no more records.
    stopped: Line,
    /// Forked children that are not recorded.
    forks: AtomicU64,
    /// Programs started by `exec` that are not recorded.
    execs: AtomicU64,
    /// Threads that ran.
    threads: AtomicU64,
    /// Processes that were followed: a program counts anew after `exec`.
    processes: AtomicU64,
    /// Those of them that were to be recorded, even above the limit.
    numbers: AtomicU64,
    /// Held by the process that pushes, if children are followed.
    lock: Lock,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Lock(UnsafeCell<MaybeUninit<libc::pthread_mutex_t>>);

const _: () = assert!(size_of::<libc::pthread_mutex_t>() <= 64);
const _: () = assert!(std::mem::offset_of!(Header, lock) == 320);

#[repr(C, align(64))]
#[derive(Debug)]
struct Line(AtomicU64);

const _: () = assert!(size_of::<Header>() == 384 && size_of::<Header>() <= HEADER_BYTES);
const _: () = assert!(std::mem::offset_of!(Header, written) == 64);
const _: () = assert!(std::mem::offset_of!(Header, forks) == 256);

/// The plugin's end of the capture file.
#[derive(Debug)]
pub struct Stream {
    header: NonNull<Header>,
    records: NonNull<u64>,
    capacity: u64,
    written: u64,
    /// `read` when it was last loaded; the ring has room at least up to there.
    read_seen: u64,
    /// This process's number among those that are followed; None if only one is recorded.
    process: Option<u64>,
}

// SAFETY: the mapping lives as long as the process; the caller's lock orders all pushes.
unsafe impl Send for Stream {}

impl Stream {
    /// Maps the recorder's capture file.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn open(path: &str) -> Result<Self, String> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|error| format!("{path}: {error}"))?;
        let bytes = file.metadata().map_err(|error| format!("{path}: {error}"))?.len();
        let bytes = usize::try_from(bytes)
            .map_err(|_| format!("{path}: {bytes} bytes are more than can be mapped"))?;
        if bytes < HEADER_BYTES {
            return Err(format!("{path}: too short for a capture file"));
        }
        // SAFETY: a new shared mapping of a file opened above; it overlaps no other memory.
        let base = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), bytes, rights, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        let base = if base == libc::MAP_FAILED { None } else { NonNull::new(base.cast::<u8>()) };
        let base = base.ok_or_else(|| format!("{path}: {}", std::io::Error::last_os_error()))?;
        let header = base.cast::<Header>();
        // SAFETY: the file has room for the header, and a mapping is aligned to a page.
        let (magic, capacity) = unsafe { (header.as_ref().magic, header.as_ref().capacity) };
        let room = (bytes - HEADER_BYTES) as u64 / 16;
        if magic != MAGIC || !capacity.is_power_of_two() || capacity > room {
            return Err(format!("{path}: not a capture file of this version"));
        }
        // SAFETY: the mapping is longer than the header.
        let records = unsafe { base.add(HEADER_BYTES) }.cast::<u64>();
        Ok(Self { header, records, capacity, written: 0, read_seen: 0, process: None })
    }

    /// Begins a process that is followed, and describes it to the recorder. False if as many as
    /// have numbers were recorded before: this one must not be.
    ///
    /// # Errors
    /// The lock between processes cannot be made.
    pub fn begin_process(&mut self, is_recorded: bool, text: &str) -> Result<bool, String> {
        if self.header().processes.fetch_add(1, Ordering::Relaxed) == 0 {
            // No other process has been started yet.
            self.make_lock()?;
        }
        let mut number = 0;
        if is_recorded {
            number = self.header().numbers.fetch_add(1, Ordering::Relaxed);
            if number >= PROCESSES_MAX {
                return Ok(false);
            }
            self.process = Some(number);
        }
        let mut records = vec![0; 2];
        records[0] = number << (PROCESS_SHIFT + 6) | PROCESS;
        let recorded = if is_recorded { IS_RECORDED } else { 0 };
        let pid = u64::from(std::process::id()) << PID_SHIFT;
        records[1] = recorded | pid | text.len() as u64;
        // Whole records, filled up with zeros.
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(RECORD_BYTES), 0);
        let (halves, _) = bytes.as_chunks();
        records.extend(halves.iter().map(|half| u64::from_le_bytes(*half)));
        // If the recorder is gone, the first record of the process will say so.
        self.push_all(&records);
        Ok(true)
    }

    fn make_lock(&self) -> Result<(), String> {
        let lock = self.header().lock.0.get().cast::<libc::pthread_mutex_t>();
        let mut kind = MaybeUninit::uninit();
        // SAFETY: memory for a mutex that no other process uses yet, and attributes that are
        // initialised by the first of these calls.
        let is_made = unsafe {
            libc::pthread_mutexattr_init(kind.as_mut_ptr()) == 0
                && libc::pthread_mutexattr_setpshared(
                    kind.as_mut_ptr(),
                    libc::PTHREAD_PROCESS_SHARED,
                ) == 0
                && libc::pthread_mutexattr_setrobust(kind.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST)
                    == 0
                && libc::pthread_mutex_init(lock, kind.as_ptr()) == 0
        };
        if is_made { Ok(()) } else { Err("a lock between processes cannot be made".to_owned()) }
    }

    fn header(&self) -> &Header {
        // SAFETY: mapped for the life of the process; shared fields are atomics.
        unsafe { self.header.as_ref() }
    }

    /// Records a reference to `line`; `access` is 0 read, 1 write, 2 write-back.
    ///
    /// Waits while the ring is full. False if the recorder no longer reads.
    pub fn push(&mut self, line: u64, access: u64, thread: u64, ticks: u64) -> bool {
        let ticks = ticks.min((1 << TICK_BITS) - 1);
        let thread = thread.min(LAST_THREAD);
        let Some(process) = self.process else {
            let has_room = self.has_room(1) || self.wait_for_room(1);
            if has_room {
                self.write(&[line << 6 | access, thread << TICK_BITS | ticks]);
            }
            return has_room;
        };
        if line >> PROCESS_SHIFT != 0 {
            // Such an address is given only to a program that asks for it.
            return false;
        }
        let line = process << PROCESS_SHIFT | line;
        self.push_all(&[line << 6 | access, thread << TICK_BITS | ticks])
    }

    /// Writes records while no other process does. False if the recorder no longer reads.
    fn push_all(&mut self, words: &[u64]) -> bool {
        let count = (words.len() / 2) as u64;
        let lock = self.header().lock.0.get().cast::<libc::pthread_mutex_t>();
        loop {
            // SAFETY: the first process made the lock before any other was started.
            unsafe {
                match libc::pthread_mutex_lock(lock) {
                    0 => {}
                    // What its owner had not published does not count.
                    libc::EOWNERDEAD if libc::pthread_mutex_consistent(lock) == 0 => {}
                    _ => return false,
                }
            }
            self.written = self.header().written.0.load(Ordering::Relaxed);
            let has_room = self.has_room(count);
            if has_room {
                self.write(words);
            }
            // SAFETY: locked above by this thread.
            unsafe { libc::pthread_mutex_unlock(lock) };
            // Waits without the lock: who stops a waiting process does not stop the others.
            if has_room || !self.wait_for_room(count) {
                return has_room;
            }
        }
    }

    /// True if the ring takes this many records more.
    fn has_room(&mut self, count: u64) -> bool {
        if self.written + count - self.read_seen > self.capacity {
            self.read_seen = self.header().read.0.load(Ordering::Acquire);
        }
        self.written + count - self.read_seen <= self.capacity
    }

    /// Writes whole records, of two words each, and publishes them together; they have room.
    fn write(&mut self, words: &[u64]) {
        for record in words.chunks_exact(2) {
            let place = usize::try_from(self.written & (self.capacity - 1));
            let at = place.expect("the ring lies in the address space") * 2;
            // SAFETY: `at` is below twice the capacity, which `open` checked against the file's
            // length; the recorder reads a record only after `written` covers it.
            unsafe {
                self.records.add(at).write(record[0]);
                self.records.add(at + 1).write(record[1]);
            }
            self.written += 1;
        }
        self.header().written.0.store(self.written, Ordering::Release);
    }

    fn wait_for_room(&mut self, count: u64) -> bool {
        for pauses in 1u32.. {
            if self.header().stopped.0.load(Ordering::Relaxed) != 0 {
                return false;
            }
            if self.has_room(count) {
                return true;
            }
            if pauses % PAUSES_PER_LOOK == 0 && !self.recorder_lives() {
                return false;
            }
            let pause = libc::timespec { tv_sec: 0, tv_nsec: PAUSE_NS };
            // SAFETY: a valid time; the remainder is not used.
            unsafe { libc::nanosleep(&raw const pause, std::ptr::null_mut()) };
        }
        false
    }

    fn recorder_lives(&self) -> bool {
        // 0 and below would address a process group: ours, which always exists.
        let recorder = i32::try_from(self.header().recorder).ok().filter(|process| *process > 0);
        let Some(recorder) = recorder else { return false };
        // SAFETY: signal 0 only checks that the process exists.
        unsafe { libc::kill(recorder, 0) == 0 }
    }

    /// True if the recorder wants no more records.
    pub fn is_stopped(&self) -> bool {
        self.header().stopped.0.load(Ordering::Relaxed) != 0
    }

    /// Returns the counters, which need no lock.
    pub fn counters(&self) -> Counters {
        Counters { header: self.header, records: self.records, capacity: self.capacity }
    }
}

/// The counters of a capture file. They need no lock: a forked child must not wait for one that a
/// thread of its parent holds.
#[derive(Debug, Clone, Copy)]
pub struct Counters {
    header: NonNull<Header>,
    records: NonNull<u64>,
    capacity: u64,
}

// SAFETY: the file is mapped for the life of the process; only its atomics are accessed here.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    fn header(&self) -> &Header {
        // SAFETY: mapped for the life of the process, and of its children: the mapping is shared.
        unsafe { self.header.as_ref() }
    }

    /// Returns a stream for a forked child: the mapping is its parent's, nothing else is.
    pub fn stream(&self) -> Stream {
        let Self { header, records, capacity } = *self;
        Stream { header, records, capacity, written: 0, read_seen: 0, process: None }
    }

    /// Counts a forked child.
    pub fn count_fork(&self) {
        self.header().forks.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a program about to be started by `exec`, here or in a child.
    pub fn count_exec(&self) {
        self.header().execs.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a new thread. Returns its number.
    pub fn next_thread(&self) -> u64 {
        self.header().threads.fetch_add(1, Ordering::Relaxed)
    }
}
