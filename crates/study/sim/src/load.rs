//! A trace as dense references: the input of every configuration of an experiment.

use std::path::{Path, PathBuf};

use farpool_trace::dense::{Densifier, MAX_PAGES, PageLimitReached};
use farpool_trace::export::page_shift;
use farpool_trace::{Access, Batch, Columns, TraceError, TraceInfo, TraceReader};
use farpool_units::{at_most, exactly};

/// One reference, 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reference {
    /// Clock ticks since the previous reference of the same thread.
    pub ticks: u64,
    /// Dense number of the page.
    pub page: u32,
    /// The thread; numbers above 65,535 count as 65,535.
    pub thread: u16,
    /// Which line of 64 bytes in the page, up to 255; 0 when the trace has pages only.
    pub line: u8,
    /// Read, write or write-back.
    pub access: Access,
}

const _: () = assert!(size_of::<Reference>() == 16);

/// A trace in memory.
#[derive(Debug, Clone)]
pub struct References {
    /// In the order of the trace.
    pub references: Vec<Reference>,
    /// The page behind each dense number: its address divided by [`References::page_bytes`].
    pub page_numbers: Vec<u64>,
    /// Dense numbers in the order of their pages.
    by_page_number: Vec<u32>,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Number of threads.
    pub thread_count: usize,
    /// Sum of the ticks of all references.
    pub ticks: u64,
    /// The trace's footer.
    pub info: TraceInfo,
}

/// Bytes of a line.
const LINE_BYTES: u64 = 64;

impl References {
    /// Builds a trace from references to dense pages; `page_numbers` maps each back to its page.
    #[must_use]
    pub fn new(
        references: Vec<Reference>,
        page_numbers: Vec<u64>,
        page_bytes: u64,
        info: TraceInfo,
    ) -> Self {
        let mut by_page_number: Vec<u32> =
            (0..).zip(&page_numbers).map(|(dense, _)| dense).collect();
        by_page_number.sort_unstable_by_key(|&dense| page_numbers[dense as usize]);
        let threads = references.iter().map(|reference| usize::from(reference.thread) + 1).max();
        let ticks = references.iter().map(|reference| reference.ticks).fold(0, u64::saturating_add);
        let thread_count = threads.unwrap_or(0);
        Self { references, page_numbers, by_page_number, page_bytes, thread_count, ticks, info }
    }

    /// Distinct pages: the footprint.
    #[must_use]
    pub fn page_count(&self) -> usize {
        self.page_numbers.len()
    }

    /// Returns the dense number of a page if the trace touches it.
    #[must_use]
    pub fn dense(&self, page_number: u64) -> Option<u32> {
        let number_of = |dense: &u32| self.page_numbers[*dense as usize];
        let at = self.by_page_number.binary_search_by_key(&page_number, number_of).ok()?;
        Some(self.by_page_number[at])
    }

    /// Returns the numbers of all its pages, ascending.
    pub fn rising_page_numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.by_page_number.iter().map(|dense| self.page_numbers[*dense as usize])
    }

    /// Returns the length of a tick: that of the trace's clock, or one cycle of Lim's 2.2 GHz
    /// processors if the clock counts no time.
    #[must_use]
    pub fn tick_ps(&self) -> u64 {
        self.info.clock.tick_ps().unwrap_or(CYCLE_PS)
    }
}

/// One cycle at 2.2 GHz (thesis 4.1.2: the Opterons its model was checked on), in picoseconds.
const CYCLE_PS: u64 = 455;

/// How a trace is loaded.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// The most memory that the loaded trace may take, in bytes.
    pub memory_limit_bytes: u64,
}

/// Why a trace was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// It would take too much memory.
    #[error(
        "{path}: {records} records take {needed_bytes} bytes and {limit_bytes} may be used; raise \
         --memory, or capture less"
    )]
    TooLarge {
        /// The trace's path.
        path: String,
        /// Records in the trace.
        records: u64,
        /// Bytes that they take.
        needed_bytes: u64,
        /// Bytes that may be used.
        limit_bytes: u64,
    },
}

/// Returns the bytes that `records` take, without the table of pages; known before anything is
/// read.
#[must_use]
pub fn memory_bytes(records: u64) -> u64 {
    records.saturating_mul(size_of::<Reference>() as u64)
}

/// Loads an opened trace; `progress` is called with the number of records read.
///
/// # Errors
/// The trace is damaged, has blocks larger than the pages asked for, or takes more memory than
/// allowed.
pub fn load(
    reader: TraceReader,
    options: LoadOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<References, LoadError> {
    let mut reader = reader.with_columns(Columns::ALL);
    let info = reader.info().clone();
    let shift = page_shift(reader.path(), info.block_bytes, options.page_bytes)?;
    let room = Room::new(&reader, options, memory_bytes)?;
    let mut loading = Loading::new(room.records, shift, info.block_bytes);
    let mut batch = Batch::default();
    while reader.next_batch(&mut batch)? {
        let read = loading.references.len() as u64;
        loading.add(&batch).map_err(too_many_pages(&room.path, read))?;
        room.check(&loading.densifier)?;
        progress(loading.references.len() as u64);
    }
    Ok(loading.finish(options.page_bytes, info))
}

/// The pages a trace refers to and nothing else: all that miss counts need.
#[derive(Debug, Clone)]
pub struct Pages {
    /// The dense number of each reference's page.
    pub pages: Vec<u32>,
    /// Distinct pages.
    pub page_count: usize,
    /// The trace's footer.
    pub info: TraceInfo,
}

/// Returns the bytes that the pages of `records` take, without the table of pages.
#[must_use]
pub fn pages_memory_bytes(records: u64) -> u64 {
    records.saturating_mul(size_of::<u32>() as u64)
}

/// Loads only the pages of a trace. Write-backs count as references, since a cache of pages sees
/// them too.
///
/// # Errors
/// As [`load`].
pub fn load_pages(
    reader: TraceReader,
    options: LoadOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<Pages, LoadError> {
    let mut reader = reader.with_columns(Columns::BLOCKS);
    let info = reader.info().clone();
    let shift = page_shift(reader.path(), info.block_bytes, options.page_bytes)?;
    let room = Room::new(&reader, options, pages_memory_bytes)?;
    let mut pages = Vec::with_capacity(exactly(room.records));
    let densifier = number_pages(&mut reader, shift, &mut pages, |pages, densifier| {
        room.check(densifier)?;
        progress(pages.len() as u64);
        Ok::<_, LoadError>(())
    })?;
    Ok(Pages { pages, page_count: densifier.page_count(), info })
}

/// Counts the distinct pages of a trace, holding a table of them (96 bytes for each at most, see
/// [`Densifier::memory_bytes`]) and one batch of references. `progress` is told the references read so
/// far.
///
/// # Errors
/// The trace is damaged, has blocks larger than the pages, or more pages than have numbers.
pub fn count_pages(
    reader: TraceReader,
    page_bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, TraceError> {
    let mut reader = reader.with_columns(Columns::BLOCKS);
    let shift = page_shift(reader.path(), reader.info().block_bytes, page_bytes)?;
    let (mut numbers, mut read) = (Vec::new(), 0);
    let densifier = number_pages(&mut reader, shift, &mut numbers, |numbers, _| {
        read += numbers.len() as u64;
        progress(read);
        numbers.clear();
        Ok::<_, TraceError>(())
    })?;
    Ok(densifier.page_count() as u64)
}

/// Appends the dense number of each reference's page to `numbers`, a batch at a time. After each
/// batch `after` is called with them, and may end the reading or take them away.
fn number_pages<E: From<TraceError>>(
    reader: &mut TraceReader,
    shift: u32,
    numbers: &mut Vec<u32>,
    mut after: impl FnMut(&mut Vec<u32>, &Densifier) -> Result<(), E>,
) -> Result<Densifier, E> {
    let path = reader.path().to_owned();
    let mut densifier = Densifier::new(MAX_PAGES);
    let (mut batch, mut read) = (Batch::default(), 0);
    while reader.next_batch(&mut batch)? {
        densifier
            .number(batch.blocks.iter().map(|block| block >> shift), numbers)
            .map_err(too_many_pages(&path, read))?;
        read += batch.blocks.len() as u64;
        after(numbers, &densifier)?;
    }
    Ok(densifier)
}

/// The memory that a trace may take while it is loaded.
struct Room {
    path: PathBuf,
    records: u64,
    /// Bytes that the records alone take.
    records_bytes: u64,
    limit_bytes: u64,
}

impl Room {
    /// Checks the limit. Refuses a trace whose records alone exceed it.
    fn new(
        trace: &TraceReader,
        options: LoadOptions,
        bytes_of: fn(u64) -> u64,
    ) -> Result<Self, LoadError> {
        let (path, records) = (trace.path().to_owned(), trace.records());
        let (records_bytes, limit_bytes) = (bytes_of(records), options.memory_limit_bytes);
        let room = Self { path, records, records_bytes, limit_bytes };
        room.allow(records_bytes)?;
        Ok(room)
    }

    /// Checks the limit with the table of pages at its present size.
    fn check(&self, pages: &Densifier) -> Result<(), LoadError> {
        self.allow(self.records_bytes + Densifier::memory_bytes(pages.page_count() as u64))
    }

    fn allow(&self, needed_bytes: u64) -> Result<(), LoadError> {
        if needed_bytes <= self.limit_bytes {
            return Ok(());
        }
        let (path, records) = (self.path.display().to_string(), self.records);
        Err(LoadError::TooLarge { path, records, needed_bytes, limit_bytes: self.limit_bytes })
    }
}

fn too_many_pages(path: &Path, read: u64) -> impl FnOnce(PageLimitReached) -> TraceError + '_ {
    move |reached| TraceError::TooManyPages {
        path: path.to_owned(),
        row: read + reached.at as u64 + 1,
        limit: reached.limit,
        remedy: "use larger pages (--page)",
    }
}

struct Loading {
    references: Vec<Reference>,
    densifier: Densifier,
    numbers: Vec<u32>,
    shift: u32,
    /// Shift from a block's number to a line's.
    line_shift: Option<u32>,
}

impl Loading {
    fn new(records: u64, shift: u32, block_bytes: u64) -> Self {
        let line_shift = (block_bytes <= LINE_BYTES)
            .then(|| LINE_BYTES.trailing_zeros() - block_bytes.trailing_zeros());
        Self {
            references: Vec::with_capacity(exactly(records)),
            densifier: Densifier::new(MAX_PAGES),
            numbers: Vec::new(),
            shift,
            line_shift,
        }
    }

    fn add(&mut self, batch: &Batch) -> Result<(), PageLimitReached> {
        self.numbers.clear();
        let shift = self.shift;
        self.densifier
            .number(batch.blocks.iter().map(|block| block >> shift), &mut self.numbers)?;
        for (record, &page) in batch.records().zip(&self.numbers) {
            // Numbers beyond the fields' ranges are clamped to the largest thread or line.
            let thread = at_most(record.thread);
            let line = self.line_shift.map_or(0, |line_shift| {
                record.block >> line_shift & ((1 << (shift - line_shift.min(shift))) - 1)
            });
            self.references.push(Reference {
                ticks: record.ticks,
                page,
                thread,
                line: at_most(line),
                access: record.access,
            });
        }
        Ok(())
    }

    fn finish(self, page_bytes: u64, info: TraceInfo) -> References {
        References::new(self.references, self.densifier.pages(), page_bytes, info)
    }
}
