//! The recorder's end of the capture file (docs/researchers/trace.md, "The capture file"): created
//! here, filled by the plugin, drained here. The header's layout is in both packages, which share
//! no code on purpose.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_kernel::MappedMemory;
use tempfile::NamedTempFile;

use crate::error::TraceError;
use crate::record::{Access, Record};

/// The first eight bytes of a capture file.
const MAGIC: u64 = u64::from_le_bytes(*b"FPCAPT01");
/// The header's bytes; records of 16 bytes follow.
const HEADER_BYTES: usize = 4096;
/// Bytes of a record.
const RECORD_BYTES: usize = 16;
/// Records in the ring: 4 MiB, some milliseconds of a program that misses all its caches.
const CAPACITY: usize = 1 << 18;
/// Bits of a record's second word that count ticks; the thread is in the bits above.
const TICK_BITS: u32 = 48;

/// Fields of the header, as words of eight bytes.
const MAGIC_WORD: usize = 0;
const CAPACITY_WORD: usize = 1;
const RECORDER_WORD: usize = 2;
const WRITTEN_WORD: usize = 8;
const READ_WORD: usize = 16;
const STOPPED_WORD: usize = 24;
const FORKS_WORD: usize = 32;
const EXECS_WORD: usize = 33;
const THREADS_WORD: usize = 34;

/// What the plugin counts beside the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    /// Children that ran unrecorded.
    pub forks: u64,
    /// Programs started by `exec`, unrecorded.
    pub execs: u64,
    /// Threads that started.
    pub threads: u64,
}

/// The recorder's mapping of a capture file; dropping it deletes the file.
#[derive(Debug)]
pub(super) struct Ring {
    file: NamedTempFile,
    memory: MappedMemory,
    read: u64,
}

impl Ring {
    /// Makes an empty ring in shared memory.
    pub(super) fn create() -> Result<Self, TraceError> {
        let folder = Path::new("/dev/shm");
        let file = tempfile::Builder::new()
            .prefix("farpool-capture-")
            .tempfile_in(folder)
            .map_err(TraceError::io(folder))?;
        let bytes = HEADER_BYTES + CAPACITY * RECORD_BYTES;
        // Allocates all of it: a page that memory has no room for would be a SIGBUS in the recorded
        // program.
        rustix::fs::fallocate(file.as_file(), rustix::fs::FallocateFlags::empty(), 0, bytes as u64)
            .map_err(|errno| TraceError::io(file.path())(errno.into()))?;
        let memory = MappedMemory::shared(file.as_file(), 0, bytes)
            .map_err(|errno| TraceError::io(file.path())(errno.into()))?;
        let ring = Self { file, memory, read: 0 };
        ring.word(CAPACITY_WORD).store(CAPACITY as u64, Ordering::Relaxed);
        ring.word(RECORDER_WORD).store(std::process::id().into(), Ordering::Relaxed);
        ring.word(MAGIC_WORD).store(MAGIC, Ordering::Release);
        Ok(ring)
    }

    pub(super) fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        let words = self.memory.bytes() / 8;
        assert!(at < words, "word {at} of {words}");
        // SAFETY: inside the mapping, which lives as long as `self`; aligned to its page. All
        // shared words are atomics.
        unsafe { self.memory.start().cast::<AtomicU64>().add(at).as_ref() }
    }

    /// Passes every available record to `take`. Returns their number.
    pub(super) fn drain(
        &mut self,
        mut take: impl FnMut(Record) -> Result<(), TraceError>,
    ) -> Result<u64, TraceError> {
        let written = self.word(WRITTEN_WORD).load(Ordering::Acquire);
        let count = written.wrapping_sub(self.read);
        if count > CAPACITY as u64 {
            let reason = format!("{written} records written, {} read: impossible", self.read);
            return Err(TraceError::foreign(self.file.path(), reason));
        }
        for number in self.read..written {
            let at = HEADER_BYTES / 8 + place_of(number) * 2;
            let (place, time) = (self.word(at), self.word(at + 1));
            take(self.decode(place.load(Ordering::Relaxed), time.load(Ordering::Relaxed))?)?;
            if number % RELEASE_RECORDS == 0 {
                self.word(READ_WORD).store(number, Ordering::Release);
            }
        }
        self.read = written;
        self.word(READ_WORD).store(written, Ordering::Release);
        Ok(count)
    }

    #[allow(clippy::cast_possible_truncation, reason = "masked to 6 bits, shifted to 16")]
    fn decode(&self, place: u64, time: u64) -> Result<Record, TraceError> {
        let code = (place & 63) as u8;
        let access = Access::from_code(code).ok_or_else(|| {
            TraceError::foreign(self.file.path(), format!("a record with the access {code}"))
        })?;
        let thread = (time >> TICK_BITS) as u32;
        Ok(Record { block: place >> 6, ticks: time & ((1 << TICK_BITS) - 1), access, thread })
    }

    /// Tells the plugin to write no more; the program goes on.
    pub(super) fn stop(&self) {
        self.word(STOPPED_WORD).store(1, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> Counts {
        let count = |word| self.word(word).load(Ordering::Relaxed);
        Counts { forks: count(FORKS_WORD), execs: count(EXECS_WORD), threads: count(THREADS_WORD) }
    }
}

/// Returns the index in the ring of the record with this number.
#[allow(clippy::cast_possible_truncation, reason = "masked to below the capacity")]
fn place_of(number: u64) -> usize {
    number as usize & (CAPACITY - 1)
}

/// After how many records a waiting writer gets room.
const RELEASE_RECORDS: u64 = 4096;
