//! Text with a header line and named columns, separated by commas.
//!
//! | column | meaning | default |
//! |---|---|---|
//! | `block` or `address` | the block's number, or an address in bytes (divided by the block's bytes) | one is needed |
//! | `time` | absolute time in `time_unit`; must not go back | one tick a row |
//! | `write` | 0/1, r/w, read/write, true/false | read |
//! | `thread` | number of the thread | 0 |
//!
//! Numbers are decimal, or hexadecimal with `0x`. Quotes are not read: no value here needs them.

use std::collections::HashMap;
use std::io::BufRead;

use super::{Opened, Wrong, read_line};
use crate::record::{Access, Clock, Record};

/// The names of the file's columns; a column that is `None` is found by its default name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvColumns {
    /// The column of block numbers.
    pub block: Option<String>,
    /// The column of addresses in bytes.
    pub address: Option<String>,
    /// The column of times.
    pub time: Option<String>,
    /// The unit of time.
    pub time_unit: Clock,
    /// The column that tells reads from writes.
    pub write: Option<String>,
    /// The column of threads.
    pub thread: Option<String>,
}

impl Default for CsvColumns {
    fn default() -> Self {
        Self {
            block: None,
            address: None,
            time: None,
            time_unit: Clock::Nanoseconds,
            write: None,
            thread: None,
        }
    }
}

/// The longest line accepted: a longer one is not a row of numbers.
const MAX_LINE_BYTES: usize = 1 << 16;

/// Indices of the columns.
struct Layout {
    place: usize,
    /// The column at `place` holds addresses, not block numbers.
    is_address: bool,
    time: Option<usize>,
    write: Option<usize>,
    thread: Option<usize>,
}

pub(super) fn open<'a>(
    input: &'a mut dyn BufRead,
    columns: &CsvColumns,
    block_bytes: u64,
) -> Result<Opened<'a>, Wrong> {
    let mut line = String::new();
    let mut row = 1;
    if !read_text(input, &mut line, row)? {
        return Err(Wrong::At(1, "the file is empty".to_owned()));
    }
    let layout = Layout::from_header(&line, columns).map_err(|reason| Wrong::At(1, reason))?;
    let clock = if layout.time.is_some() { columns.time_unit } else { Clock::Requests };
    let shift = if layout.is_address { block_bytes.trailing_zeros() } else { 0 };
    // Ticks count per thread, but times must not go back over all threads.
    let mut last: HashMap<u32, u64> = HashMap::new();
    let mut latest = 0;
    let next = move || {
        loop {
            row += 1;
            if !read_text(input, &mut line, row)? {
                return Ok(None);
            }
            if line.trim().is_empty() {
                continue;
            }
            let (mut record, time) =
                layout.parse(&line).map_err(|reason| Wrong::At(row, reason))?;
            record.block >>= shift;
            if let Some(now) = time {
                if now < latest {
                    let reason = format!("time goes back, from {latest} to {now}");
                    return Err(Wrong::At(row, reason));
                }
                latest = now;
                record.ticks = now - last.insert(record.thread, now).unwrap_or(now);
            }
            return Ok(Some(record));
        }
    };
    Ok(Opened { clock, next: Box::new(next) })
}

fn read_text(input: &mut dyn BufRead, line: &mut String, row: u64) -> Result<bool, Wrong> {
    let mut bytes = std::mem::take(line).into_bytes();
    let is_there = read_line(input, &mut bytes, row, MAX_LINE_BYTES)?;
    *line = String::from_utf8(bytes).map_err(|_| Wrong::At(row, "not text".to_owned()))?;
    Ok(is_there)
}

impl Layout {
    fn from_header(line: &str, columns: &CsvColumns) -> Result<Self, String> {
        let names: Vec<&str> = line.trim().split(',').map(str::trim).collect();
        let place = |name: &str| names.iter().position(|known| *known == name);
        let find = |asked: &Option<String>, usual: &str| match asked {
            None => Ok(place(usual)),
            Some(name) => place(name).map(Some).ok_or_else(|| {
                format!("there is no column \"{name}\"; the header has {}", names.join(", "))
            }),
        };
        let (block, address) = (find(&columns.block, "block")?, find(&columns.address, "address")?);
        let (at, is_address) = match (block, address) {
            (Some(at), None) => (at, false),
            (None, Some(at)) => (at, true),
            (Some(at), Some(_)) if columns.address.is_none() => (at, false),
            (Some(_), Some(at)) if columns.block.is_none() => (at, true),
            (Some(_), Some(_)) => return Err("both a block and an address column".to_owned()),
            (None, None) => {
                let header = names.join(", ");
                return Err(format!("no column \"block\" or \"address\"; the header has {header}"));
            }
        };
        Ok(Self {
            place: at,
            is_address,
            time: find(&columns.time, "time")?,
            write: find(&columns.write, "write")?,
            thread: find(&columns.thread, "thread")?,
        })
    }

    /// Parses a line into its record, with the block not yet divided, and its time.
    fn parse(&self, line: &str) -> Result<(Record, Option<u64>), String> {
        let cells: Vec<&str> =
            line.trim_end_matches(['\n', '\r']).split(',').map(str::trim).collect();
        let cell = |at: usize| {
            cells.get(at).copied().ok_or_else(|| format!("only {} columns", cells.len()))
        };
        let block = number(cell(self.place)?)?;
        let time = self.time.map(|at| number(cell(at)?)).transpose()?;
        let is_write = self.write.map(|at| is_write(cell(at)?)).transpose()?.unwrap_or(false);
        let thread = self.thread.map(|at| number(cell(at)?)).transpose()?.unwrap_or(0);
        let thread = u32::try_from(thread).map_err(|_| format!("thread {thread} is above 2^32"))?;
        let access = if is_write { Access::Write } else { Access::Read };
        Ok((Record { block, ticks: 1, access, thread }, time))
    }
}

fn number(cell: &str) -> Result<u64, String> {
    let parsed = match cell.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => cell.parse(),
    };
    parsed.map_err(|_| format!("\"{cell}\" is not a whole number from 0 to 2^64 - 1"))
}

fn is_write(cell: &str) -> Result<bool, String> {
    match cell.to_ascii_lowercase().as_str() {
        "1" | "w" | "write" | "true" => Ok(true),
        "0" | "r" | "read" | "false" | "" => Ok(false),
        _ => Err(format!("\"{cell}\" is neither read nor write")),
    }
}
