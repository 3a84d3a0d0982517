//! The recorder's end of the capture file (docs/researchers/trace.md, "The capture file"): created
//! here, filled by the plugin, drained here. The header's layout is in both packages, which share
//! no code on purpose.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use farpool_kernel::MappedMemory;
use tempfile::NamedTempFile;

use crate::error::TraceError;
use crate::record::{Access, PROCESS_SHIFT, Record};

/// The first eight bytes of a capture file.
const MAGIC: u64 = u64::from_le_bytes(*b"FPCAPT02");
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
const PROCESSES_WORD: usize = 35;
const NUMBERS_WORD: usize = 36;

/// The access of a record that tells of a process. The plugin writes its number where a block's is,
/// and in the second word whether it is recorded, its process ID and the bytes of the text, which
/// follows in whole records.
const PROCESS: u64 = 3;
const IS_RECORDED: u64 = 1 << 63;
const PID_SHIFT: u32 = 16;
/// The most processes that are recorded: their numbers have a place above a block's.
pub(super) const PROCESSES_MAX: u64 = 1 << (64 - 6 - PROCESS_SHIFT);

/// What the plugin counts beside the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    /// Children that ran unrecorded.
    pub forks: u64,
    /// Programs started by `exec`, unrecorded.
    pub execs: u64,
    /// Threads that started.
    pub threads: u64,
    /// Processes that were followed; 0 if children are not.
    pub processes: u64,
    /// Those of them that were to be recorded, even above [`PROCESSES_MAX`].
    pub numbers: u64,
}

/// What the plugin sends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// A reference.
    Record(Record),
    /// A process that begins.
    Process(Begun),
}

/// A process that begins, by fork or by `exec`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Begun {
    /// Its number among those that are recorded; 0 for others.
    pub number: u64,
    /// The kernel's number for it, the same after `exec`.
    pub pid: u32,
    /// False if it is only followed.
    pub is_recorded: bool,
    /// Its program and arguments, cut off where they are long.
    pub program: String,
}

/// A process whose text is still to be read.
#[derive(Debug)]
struct Beginning {
    begun: Begun,
    text: Vec<u8>,
    text_bytes: usize,
}

/// The recorder's mapping of a capture file; dropping it deletes the file.
#[derive(Debug)]
pub(super) struct Ring {
    file: NamedTempFile,
    memory: MappedMemory,
    read: u64,
    beginning: Option<Beginning>,
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
        let ring = Self { file, memory, read: 0, beginning: None };
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

    /// Passes all news to `take`. Returns the number of records read.
    pub(super) fn drain(
        &mut self,
        mut take: impl FnMut(News) -> Result<(), TraceError>,
    ) -> Result<u64, TraceError> {
        let written = self.word(WRITTEN_WORD).load(Ordering::Acquire);
        let count = written.wrapping_sub(self.read);
        if count > CAPACITY as u64 {
            let reason = format!("{written} records written, {} read: impossible", self.read);
            return Err(TraceError::foreign(self.file.path(), reason));
        }
        for number in self.read..written {
            let at = HEADER_BYTES / 8 + place_of(number) * 2;
            let words = [at, at + 1].map(|at| self.word(at).load(Ordering::Relaxed));
            if let Some(news) = self.decode(words)? {
                take(news)?;
            }
            if number % RELEASE_RECORDS == 0 {
                self.word(READ_WORD).store(number, Ordering::Release);
            }
        }
        self.read = written;
        self.word(READ_WORD).store(written, Ordering::Release);
        Ok(count)
    }

    /// Reads a record; None if it is a part of what tells of a process.
    #[allow(clippy::cast_possible_truncation, reason = "masked to 6 bits, shifted to 16 or 32")]
    fn decode(&mut self, [place, time]: [u64; 2]) -> Result<Option<News>, TraceError> {
        if let Some(mut beginning) = self.beginning.take() {
            let text = [place, time].map(u64::to_le_bytes);
            beginning.text.extend(text.as_flattened());
            return Ok(self.read_on(beginning));
        }
        if place & 63 == PROCESS {
            let begun = Begun {
                number: place >> (6 + PROCESS_SHIFT),
                pid: (time >> PID_SHIFT) as u32,
                is_recorded: time & IS_RECORDED != 0,
                program: String::new(),
            };
            let text_bytes = time as usize & ((1 << PID_SHIFT) - 1);
            return Ok(self.read_on(Beginning { begun, text: Vec::new(), text_bytes }));
        }
        let code = (place & 63) as u8;
        let access = Access::from_code(code).ok_or_else(|| {
            TraceError::foreign(self.file.path(), format!("a record with the access {code}"))
        })?;
        let thread = (time >> TICK_BITS) as u32;
        let ticks = time & ((1 << TICK_BITS) - 1);
        Ok(Some(News::Record(Record { block: place >> 6, ticks, access, thread })))
    }

    fn read_on(&mut self, mut beginning: Beginning) -> Option<News> {
        if beginning.text.len() < beginning.text_bytes {
            self.beginning = Some(beginning);
            return None;
        }
        beginning.text.truncate(beginning.text_bytes);
        let program = String::from_utf8_lossy(&beginning.text).into_owned();
        Some(News::Process(Begun { program, ..beginning.begun }))
    }

    /// Tells the plugin to write no more; the program goes on.
    pub(super) fn stop(&self) {
        self.word(STOPPED_WORD).store(1, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> Counts {
        let count = |word| self.word(word).load(Ordering::Relaxed);
        Counts {
            forks: count(FORKS_WORD),
            execs: count(EXECS_WORD),
            threads: count(THREADS_WORD),
            processes: count(PROCESSES_WORD),
            numbers: count(NUMBERS_WORD),
        }
    }
}

/// Returns the index in the ring of the record with this number.
#[allow(clippy::cast_possible_truncation, reason = "masked to below the capacity")]
fn place_of(number: u64) -> usize {
    number as usize & (CAPACITY - 1)
}

/// After how many records a waiting writer gets room.
const RELEASE_RECORDS: u64 = 4096;
