//! Foreign traces, read record by record. Each reader is a plain function from bytes to records;
//! absolute times become ticks since the previous record.

mod csv;
mod lackey;
mod objects;
mod oracle_general;
mod ramulator;
mod vscsi;

pub use csv::CsvColumns;
pub(crate) use oracle_general::to_bytes as oracle_general_record;

use std::io::BufRead;
use std::path::Path;

use farpool_text::{Line, ToldBy};

use crate::error::TraceError;
use crate::record::{Clock, Record, TraceInfo};
use crate::writer::TraceWriter;

/// The formats that can be imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Format {
    /// `valgrind --tool=lackey --trace-mem=yes`; instruction fetches are left out.
    Lackey,
    /// libCacheSim's 24-byte records.
    OracleGeneral,
    /// VMware's vscsiStats traces, version 1 and 2.
    Vscsi,
    /// Text with named columns.
    Csv(CsvColumns),
    /// Text with an address and what was done a line, as Ramulator reads it.
    Ramulator,
}

impl Format {
    /// The names on the command line.
    pub const NAMES: [&str; 5] = ["lackey", "oracleGeneral", "vscsi", "csv", "ramulator"];

    /// True for text, in which a compressed file can be told by how it begins.
    fn is_text(&self) -> bool {
        matches!(self, Self::Lackey | Self::Csv(_) | Self::Ramulator)
    }
}

/// Options of an import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportOptions {
    /// The file's format.
    pub format: Format,
    /// Bytes of a block: the unit of an address (lackey: lines of 64) or of a foreign object
    /// number.
    pub block_bytes: u64,
    /// oracleGeneral: an object is as many blocks as its size takes, not one.
    pub sized: bool,
}

/// A foreign trace whose beginning has been read.
struct Opened<'a> {
    clock: Clock,
    /// Returns the next record, or None at the end; the caller counts rows.
    next: Box<dyn FnMut() -> Result<Option<Record>, Wrong> + 'a>,
}

/// The reason why a record cannot be read.
enum Wrong {
    /// The system's error.
    Io(std::io::Error),
    /// The row is invalid.
    Row(String),
    /// The row with this number is invalid, in formats that count rows themselves (lines that are
    /// not records).
    At(u64, String),
}

impl Wrong {
    /// Makes it an error of this file; `row` is the caller's row.
    fn at(self, path: &Path, row: u64) -> TraceError {
        match self {
            Self::Io(error) => TraceError::io(path)(error),
            Self::Row(reason) => TraceError::row(path, row, reason),
            Self::At(row, reason) => TraceError::row(path, row, reason),
        }
    }
}

impl From<std::io::Error> for Wrong {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads `from` and writes the trace `to`; `progress` is called with the number of records now and
/// then.
///
/// Text is decompressed if it begins as gzip or zstd does, other files if their name ends in `.gz`
/// or `.zst`. Nothing is left at `to` unless all of it was read.
///
/// # Errors
/// The first row that breaks the format, by file and row.
pub fn import(
    from: &Path,
    to: &Path,
    options: &ImportOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, TraceError> {
    check_block_bytes(from, options)?;
    let mut input = open(from, options.format.is_text())?;
    let opened = open_records(from, &mut *input, options)?;
    let name = match &options.format {
        Format::Lackey => "import lackey",
        Format::OracleGeneral => "import oracleGeneral",
        Format::Vscsi => "import vscsi",
        Format::Csv(_) => "import csv",
        Format::Ramulator => "import ramulator",
    };
    let mut writer =
        TraceWriter::create(to, TraceInfo::new(name, options.block_bytes, opened.clock))?;
    let count = take_all(from, opened, &mut |record| {
        writer.push(record)?;
        if writer.records() % PROGRESS_RECORDS == 0 {
            progress(writer.records());
        }
        Ok(())
    })?;
    if count == 0 {
        return Err(TraceError::foreign(from, "holds no record"));
    }
    writer.finish()
}

/// Passes every record of `input`, which is not compressed, to `take`. Returns their number; `from`
/// is the name for messages.
///
/// # Errors
/// The first row that breaks the format, or the error of `take`.
pub fn read_records(
    from: &Path,
    input: &mut dyn BufRead,
    options: &ImportOptions,
    take: &mut dyn FnMut(Record) -> Result<(), TraceError>,
) -> Result<u64, TraceError> {
    check_block_bytes(from, options)?;
    take_all(from, open_records(from, input, options)?, take)
}

fn check_block_bytes(from: &Path, options: &ImportOptions) -> Result<(), TraceError> {
    if options.block_bytes.is_power_of_two() {
        return Ok(());
    }
    let reason = format!("blocks of {} bytes: not a power of two", options.block_bytes);
    Err(TraceError::foreign(from, reason))
}

fn open_records<'a>(
    from: &Path,
    input: &'a mut dyn BufRead,
    options: &ImportOptions,
) -> Result<Opened<'a>, TraceError> {
    let opened = match &options.format {
        Format::Lackey => lackey::open(input, options.block_bytes),
        Format::OracleGeneral => {
            oracle_general::open(input, options.sized.then_some(options.block_bytes))
        }
        Format::Ramulator => ramulator::open(input, options.block_bytes),
        Format::Vscsi => vscsi::open(input),
        Format::Csv(columns) => csv::open(input, columns, options.block_bytes),
    };
    opened.map_err(|wrong| wrong.at(from, 1))
}

fn take_all(
    from: &Path,
    mut opened: Opened<'_>,
    take: &mut dyn FnMut(Record) -> Result<(), TraceError>,
) -> Result<u64, TraceError> {
    let mut count = 0;
    while let Some(record) = (opened.next)().map_err(|wrong| wrong.at(from, count + 1))? {
        take(record)?;
        count += 1;
    }
    Ok(count)
}

/// Records between two calls of `progress`.
const PROGRESS_RECORDS: u64 = 1 << 18;

fn open(path: &Path, is_text: bool) -> Result<Box<dyn BufRead>, TraceError> {
    let told_by = if is_text { ToldBy::Content } else { ToldBy::Name };
    farpool_text::open(path, told_by).map_err(TraceError::io(path))
}

/// Fills `record`. False at a clean end, an error inside a record.
fn read_record(input: &mut (impl BufRead + ?Sized), record: &mut [u8]) -> Result<bool, Wrong> {
    let mut filled = 0;
    while filled < record.len() {
        let count = input.read(&mut record[filled..])?;
        if count == 0 && filled == 0 {
            return Ok(false);
        }
        if count == 0 {
            let reason =
                format!("the file ends after {filled} of a record's {} bytes", record.len());
            return Err(Wrong::Row(reason));
        }
        filled += count;
    }
    Ok(true)
}

/// Reads a line with its end into `line`, of at most `bytes_max` bytes. False at the end.
fn read_line(
    input: &mut dyn BufRead,
    line: &mut Vec<u8>,
    row: u64,
    bytes_max: usize,
) -> Result<bool, Wrong> {
    match farpool_text::read_line(input, line, bytes_max)? {
        Line::Whole => Ok(true),
        Line::End => Ok(false),
        Line::TooLong => Err(Wrong::At(row, format!("longer than {bytes_max} bytes"))),
    }
}

/// Turns absolute times into ticks; time must not go back.
#[derive(Debug, Default)]
struct Ticker {
    last: Option<u64>,
}

impl Ticker {
    fn ticks(&mut self, now: u64) -> Result<u64, Wrong> {
        let last = self.last.replace(now).unwrap_or(now);
        now.checked_sub(last)
            .ok_or_else(|| Wrong::Row(format!("time goes back, from {last} to {now}")))
    }
}

fn le<const N: usize>(record: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&record[at..at + N]);
    bytes
}
