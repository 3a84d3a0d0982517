// SPDX-License-Identifier: GPL-2.0-or-later
//! The capture file: a ring of records in shared memory between the program under QEMU and the
//! recorder that drains it. docs/researchers/trace.md, "The capture file", describes it byte by
//! byte.
//!
//! It is memory, not a descriptor, because the program may close any descriptor and would then
//! write its own data over ours. Only one thread at a time may push (the caller's lock).

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The first eight bytes of a capture file: "FPCAPT01".
const MAGIC: u64 = u64::from_le_bytes(*b"FPCAPT01");
/// The header's bytes; records follow.
const HEADER_BYTES: usize = 4096;
/// Bits of a record's second word that count ticks; the thread is in the bits above.
const TICK_BITS: u32 = 48;
/// The largest thread number; threads that start later share it.
const LAST_THREAD: u64 = (1 << (64 - TICK_BITS)) - 1;
/// Length of a pause while waiting for the recorder, in nanoseconds.
const PAUSE_NS: i64 = 20_000;
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
    /// Forked children, which are not recorded.
    forks: AtomicU64,
    /// Programs started by `exec`, which are not recorded.
    execs: AtomicU64,
    /// Threads that ran.
    threads: AtomicU64,
}

#[repr(C, align(64))]
#[derive(Debug)]
struct Line(AtomicU64);

const _: () = assert!(size_of::<Header>() == 320 && size_of::<Header>() <= HEADER_BYTES);
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
        Ok(Self { header, records, capacity, written: 0, read_seen: 0 })
    }

    fn header(&self) -> &Header {
        // SAFETY: mapped for the life of the process; shared fields are atomics.
        unsafe { self.header.as_ref() }
    }

    /// Records a reference to `line`; `access` is 0 read, 1 write, 2 write-back.
    ///
    /// Waits while the ring is full. False if the recorder no longer reads.
    pub fn push(&mut self, line: u64, access: u64, thread: u64, ticks: u64) -> bool {
        if self.written - self.read_seen == self.capacity && !self.wait_for_room() {
            return false;
        }
        let place = usize::try_from(self.written & (self.capacity - 1));
        let at = place.expect("the ring lies in the address space") * 2;
        let ticks = ticks.min((1 << TICK_BITS) - 1);
        let thread = thread.min(LAST_THREAD);
        // SAFETY: `at` is below twice the capacity, which `open` checked against the file's length;
        // the recorder reads a record only after `written` covers it.
        unsafe {
            self.records.add(at).write(line << 6 | access);
            self.records.add(at + 1).write(thread << TICK_BITS | ticks);
        }
        self.written += 1;
        self.header().written.0.store(self.written, Ordering::Release);
        true
    }

    fn wait_for_room(&mut self) -> bool {
        for pauses in 1u32.. {
            if self.header().stopped.0.load(Ordering::Relaxed) != 0 {
                return false;
            }
            self.read_seen = self.header().read.0.load(Ordering::Acquire);
            if self.written - self.read_seen < self.capacity {
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
        Counters(self.header)
    }
}

/// The counters of a capture file. They need no lock: a forked child must not wait for one that a
/// thread of its parent holds.
#[derive(Debug, Clone, Copy)]
pub struct Counters(NonNull<Header>);

// SAFETY: the header is mapped for the life of the process; only its atomics are accessed here.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    fn header(&self) -> &Header {
        // SAFETY: mapped for the life of the process, and of its children: the mapping is shared.
        unsafe { self.0.as_ref() }
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
