//! Text with a header line and named columns.
//!
//! | column | meaning | default |
//! |---|---|---|
//! | `block` or `address` | the block's number, or an address in bytes (divided by the block's bytes) | one of the three is needed |
//! | an object's name | any text; objects are numbered as they appear | none |
//! | a size | bytes; an object is as many blocks as that takes, and an address is accessed in every block from it to its last byte | one block |
//! | `time` | absolute time in `time_unit`; must not go back | one tick a row |
//! | `write` | 0/1, r/w, read/write, ld/st, load/store, true/false | read |
//! | `thread` | number of the thread | 0 |
//!
//! Fields are separated by comma, semicolon, tab or bar, whichever splits the first line into most,
//! and may be quoted within a line. Numbers are decimal, or hexadecimal with `0x`. Columns of a
//! file
//! without a header are named by their place, from 1.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::BufRead;

use super::objects::Objects;
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
    /// The column of names of objects, which may be any text.
    pub object: Option<String>,
    /// The column of sizes in bytes, of objects or of what is accessed at an address.
    pub size: Option<String>,
    /// The first line names the columns; without, their names are 1, 2, 3 and so on.
    pub has_header: bool,
    /// Times are in seconds with decimals.
    pub has_decimal_seconds: bool,
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
            object: None,
            size: None,
            has_header: true,
            has_decimal_seconds: false,
        }
    }
}

/// The longest line accepted: a longer one is not a row of numbers.
const MAX_LINE_BYTES: usize = 1 << 16;

/// What names a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Block,
    Address,
    Object,
}

/// Indices of the columns.
struct Layout {
    separator: char,
    place: usize,
    kind: Place,
    size: Option<usize>,
    has_decimal_seconds: bool,
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
    let clock = match (layout.time, columns.has_decimal_seconds) {
        (None, _) => Clock::Requests,
        (Some(_), true) => Clock::Nanoseconds,
        (Some(_), false) => columns.time_unit,
    };
    // Ticks count per thread, but times must not go back over all threads.
    let mut last: HashMap<u32, u64> = HashMap::new();
    let mut latest = 0;
    let mut objects = Objects::new(block_bytes);
    let mut is_read = columns.has_header;
    let next = move || {
        loop {
            if let Some(record) = objects.waiting() {
                return Ok(Some(record));
            }
            // Without a header the first line is the first row.
            if is_read {
                row += 1;
                if !read_text(input, &mut line, row)? {
                    return Ok(None);
                }
            }
            is_read = true;
            if line.trim().is_empty() {
                continue;
            }
            let wrong = |reason| Wrong::At(row, reason);
            let (mut record, time) = layout.parse(&line, &mut objects).map_err(wrong)?;
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
    if row == 1 {
        farpool_text::strip_byte_order_mark(&mut bytes);
    }
    *line = String::from_utf8(bytes).map_err(|_| Wrong::At(row, "not text".to_owned()))?;
    Ok(is_there)
}

/// Splits a line into its fields; quotes keep separators together.
fn fields(line: &str, separator: char) -> Result<Vec<Cow<'_, str>>, String> {
    let line = line.trim_end_matches(['\n', '\r']);
    if !line.contains('"') {
        return Ok(line.split(separator).map(|field| field.trim().into()).collect());
    }
    let (mut found, mut field, mut is_quoted) = (Vec::new(), String::new(), false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if is_quoted && letters.peek() == Some(&'"') => {
                letters.next();
                field.push('"');
            }
            '"' => is_quoted = !is_quoted,
            other if other == separator && !is_quoted => {
                found.push(std::mem::take(&mut field).trim().to_owned().into());
            }
            other => field.push(other),
        }
    }
    found.push(field.trim().to_owned().into());
    if is_quoted { Err("a quote is not closed".to_owned()) } else { Ok(found) }
}

impl Layout {
    fn from_header(line: &str, columns: &CsvColumns) -> Result<Self, String> {
        let separator = farpool_text::separator(line.as_bytes()).into();
        let first = fields(line, separator)?;
        let names: Vec<String> = match columns.has_header {
            true => first.into_iter().map(Cow::into_owned).collect(),
            false => (1..=first.len()).map(|place| place.to_string()).collect(),
        };
        let place = |name: &str| names.iter().position(|known| known == name);
        let find = |asked: &Option<String>, usual: &str| match asked {
            None => Ok(place(usual)),
            Some(name) => place(name).map(Some).ok_or_else(|| {
                format!("there is no column \"{name}\"; the header has {}", names.join(", "))
            }),
        };
        let (block, address) = (find(&columns.block, "block")?, find(&columns.address, "address")?);
        let object = columns.object.as_ref().map(|_| find(&columns.object, "")).transpose()?;
        let (at, kind) = match (object.flatten(), block, address) {
            (Some(at), _, _) if columns.block.is_none() && columns.address.is_none() => {
                (at, Place::Object)
            }
            (None, Some(at), None) => (at, Place::Block),
            (None, None, Some(at)) => (at, Place::Address),
            (None, Some(at), Some(_)) if columns.address.is_none() => (at, Place::Block),
            (None, Some(_), Some(at)) if columns.block.is_none() => (at, Place::Address),
            (None, None, None) => {
                let header = names.join(", ");
                return Err(format!(
                    "no column \"block\" or \"address\"; the header has {header}; name a column of \
                     numbers or of objects' names"
                ));
            }
            _ => return Err("more than one of a block, an address and an object column".to_owned()),
        };
        let size = columns.size.as_ref().map(|_| find(&columns.size, "")).transpose()?.flatten();
        Ok(Self {
            separator,
            place: at,
            kind,
            size,
            has_decimal_seconds: columns.has_decimal_seconds,
            time: find(&columns.time, "time")?,
            write: find(&columns.write, "write")?,
            thread: find(&columns.thread, "thread")?,
        })
    }

    /// Parses a line into its first record and its time; `objects` holds the records that follow.
    fn parse(&self, line: &str, objects: &mut Objects) -> Result<(Record, Option<u64>), String> {
        let cells = fields(line, self.separator)?;
        let cell = |at: usize| {
            cells.get(at).map(|cell| &**cell).ok_or_else(|| format!("only {} columns", cells.len()))
        };
        let time = self.time.map(|at| self.time(cell(at)?)).transpose()?;
        let is_write = self.write.map(|at| is_write(cell(at)?)).transpose()?.unwrap_or(false);
        let thread = self.thread.map(|at| number(cell(at)?)).transpose()?.unwrap_or(0);
        let thread = u32::try_from(thread).map_err(|_| format!("thread {thread} is above 2^32"))?;
        let access = if is_write { Access::Write } else { Access::Read };
        let record = Record { block: 0, ticks: 1, access, thread };
        let place = cell(self.place)?;
        let size = self.size.map(|at| number(cell(at)?)).transpose()?;
        let block = match (self.kind, size) {
            (Place::Block, None) => number(place)?,
            (Place::Address, size) => objects.range(number(place)?, size.unwrap_or(0), record)?,
            (Place::Block | Place::Object, size) => {
                objects.add(place, size.unwrap_or(0), record)?
            }
        };
        Ok((Record { block, ..record }, time))
    }

    fn time(&self, cell: &str) -> Result<u64, String> {
        if self.has_decimal_seconds {
            return nanoseconds(cell)
                .ok_or_else(|| format!("\"{cell}\" is no time in seconds, such as 12.5"));
        }
        number(cell).map_err(|reason| match cell.contains('.') {
            true => format!("{reason}; for seconds with decimals give --time-unit decimal-s"),
            false => reason,
        })
    }
}

/// Nanoseconds of a decimal number of seconds, exactly; further digits are cut off.
fn nanoseconds(cell: &str) -> Option<u64> {
    let (whole, part) = cell.split_once('.').unwrap_or((cell, ""));
    let digits: String = part.chars().chain("000000000".chars()).take(9).collect();
    if part.chars().any(|digit| !digit.is_ascii_digit()) {
        return None;
    }
    whole.parse::<u64>().ok()?.checked_mul(1_000_000_000)?.checked_add(digits.parse().ok()?)
}

pub(super) fn number(cell: &str) -> Result<u64, String> {
    let parsed = match cell.strip_prefix("0x").or_else(|| cell.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => cell.parse(),
    };
    parsed.map_err(|_| format!("\"{cell}\" is not a whole number from 0 to 2^64 - 1"))
}

pub(super) fn is_write(cell: &str) -> Result<bool, String> {
    match cell.to_ascii_lowercase().as_str() {
        "1" | "w" | "write" | "st" | "store" | "true" => Ok(true),
        "0" | "r" | "read" | "ld" | "load" | "false" | "" => Ok(false),
        _ => Err(format!("\"{cell}\" is neither read nor write")),
    }
}
