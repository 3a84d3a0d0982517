//! One reference, a batch of them, and the metadata of a whole trace.

use serde::{Deserialize, Serialize};

/// What a reference does to its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Access {
    /// The program waits for the block's content.
    #[default]
    Read = 0,
    /// The program stores into the block.
    Write = 1,
    /// A cache writes back a changed line; the program does not wait.
    WriteBack = 2,
}

impl Access {
    /// Returns the access of a stored code, if there is one.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::Read, Self::Write, Self::WriteBack].get(usize::from(code)).copied()
    }

    /// True if the content of memory changes.
    #[must_use]
    pub fn is_write(self) -> bool {
        self != Self::Read
    }
}

/// One reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Address divided by [`TraceInfo::block_bytes`], or the number a foreign trace gives the
    /// object.
    pub block: u64,
    /// Clock ticks since the previous record of the same thread ([`TraceInfo::clock`]).
    pub ticks: u64,
    /// Read, write or write-back.
    pub access: Access,
    /// The referencing thread, numbered from 0.
    pub thread: u32,
}

/// The unit of a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// One data access of the thread's instructions.
    Accesses,
    /// One record: the source had no time.
    Requests,
    /// A nanosecond.
    Nanoseconds,
    /// A microsecond.
    Microseconds,
    /// A second.
    Seconds,
}

impl Clock {
    /// Returns the picoseconds in a tick, for clocks that count time.
    #[must_use]
    pub fn tick_ps(self) -> Option<u64> {
        match self {
            Self::Accesses | Self::Requests => None,
            Self::Nanoseconds => Some(1_000),
            Self::Microseconds => Some(1_000_000),
            Self::Seconds => Some(1_000_000_000_000),
        }
    }
}

/// The caches that filtered a captured program's references.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheFilter {
    /// Capacity of each thread's own first level; 0 = none.
    pub l1_bytes: u64,
    /// Its ways.
    pub l1_ways: u32,
    /// Capacity of the level all threads share; 0 = none.
    pub llc_bytes: u64,
    /// Its ways.
    pub llc_ways: u32,
}

/// Which uses of pages were recorded: a thread's first in each window of its accesses, and the
/// first write after reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageFilter {
    /// A thread's page is recorded again after this many accesses of the thread.
    pub window_accesses: u64,
}

/// What filtered a captured program's references before they were recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Filter {
    /// Caches: lines that miss them were recorded.
    Caches(CacheFilter),
    /// Uses of pages, as a pager sees them.
    Pages(PageFilter),
}

/// The footer: what was captured, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceInfo {
    /// Bytes of the unit that [`Record::block`] counts; a power of two.
    pub block_bytes: u64,
    /// What [`Record::ticks`] counts.
    pub clock: Clock,
    /// Where the records come from: `qemu-user plugin`, `pager faults`, `import lackey`, …
    pub source: String,
    /// The filter, for captured programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<Filter>,
    /// The program and its arguments, where one ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub program: Vec<String>,
    /// The program's native time, if it was measured, in picoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native_ps: Option<u64>,
    /// Its peak memory of files (its code, its libraries) in the native run, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub native_file_bytes: Option<u64>,
    /// The processes in it, if children were followed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<TracedProcess>,
    /// What the trace does not contain, for people: processes that were not followed, …
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Bits of [`Record::block`] below the number of its process, in traces of several: each process
/// has its own addresses, and blocks of the largest that Linux gives take at most as many bits.
pub const PROCESS_SHIFT: u32 = 44;

/// A process of a trace of several. A program that replaces another by `exec` counts as a new one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedProcess {
    /// Its number, which its blocks carry above bit [`PROCESS_SHIFT`].
    pub number: u64,
    /// Its program and arguments, cut off where they are long.
    pub program: String,
}

impl TraceInfo {
    /// Describes an imported trace: blocks of `block_bytes`, no program known.
    #[must_use]
    pub fn new(source: &str, block_bytes: u64, clock: Clock) -> Self {
        Self {
            block_bytes,
            clock,
            source: source.to_owned(),
            filter: None,
            program: Vec::new(),
            native_ps: None,
            native_file_bytes: None,
            processes: Vec::new(),
            notes: Vec::new(),
        }
    }
}

/// Records by column. Columns that were not requested are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// [`Record::block`].
    pub blocks: Vec<u64>,
    /// [`Record::ticks`].
    pub ticks: Vec<u64>,
    /// [`Record::access`].
    pub accesses: Vec<Access>,
    /// [`Record::thread`].
    pub threads: Vec<u32>,
}

impl Batch {
    /// The number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True if it has no records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Adds one record to all columns.
    pub fn push(&mut self, record: Record) {
        self.blocks.push(record.block);
        self.ticks.push(record.ticks);
        self.accesses.push(record.access);
        self.threads.push(record.thread);
    }

    /// Removes the records, keeps the memory.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.ticks.clear();
        self.accesses.clear();
        self.threads.clear();
    }

    /// True if every column has a value for each record.
    pub(crate) fn is_whole(&self) -> bool {
        let columns = [self.ticks.len(), self.accesses.len(), self.threads.len()];
        columns.iter().all(|length| *length == self.blocks.len())
    }

    /// Returns the records of a batch that has all columns.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        assert!(self.is_whole(), "a batch of which records are asked has all columns");
        let rest = self.ticks.iter().zip(&self.accesses).zip(&self.threads);
        self.blocks.iter().zip(rest).map(|(&block, ((&ticks, &access), &thread))| Record {
            block,
            ticks,
            access,
            thread,
        })
    }
}
