//! Utilisation as text with a header, `vm,time_s,cpu,memory_bytes` or other names in any order.
//!
//! Fields are separated by comma, semicolon, tab or bar, whichever splits the header into most
//! fields, and may be quoted. A byte-order mark is skipped; gzip and zstd are unpacked.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Trim};
use farpool_units::at_most;

use super::columns::{Columns, PromisedColumns, SeriesColumns, TimeUnit};
use super::times::Times;
use super::{ProvisionTable, Rows};
use crate::PlanError;

/// The header is line 1.
const FIRST_ROW: usize = 2;
/// The longest line accepted as a row: longer ones are no table, or a quote that is not closed.
const LINE_BYTES_MAX: usize = 1 << 16;
/// As for Parquet: beyond this the columns take more than 2 GiB.
const ROWS_MAX: usize = 1 << 26;
const SEPARATORS: [u8; 4] = *b",;\t|";
const GZIP: &[u8] = &[0x1F, 0x8B];
const ZSTD: &[u8] = &[0x28, 0xB5, 0x2F, 0xFD];
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The rows of a table after its header.
struct Lines<'a> {
    path: &'a Path,
    reader: csv::Reader<Box<dyn Read>>,
    fields: StringRecord,
    separator: char,
    width: usize,
    rows: usize,
}

impl<'a> Lines<'a> {
    fn open(path: &'a Path) -> Result<(Lines<'a>, Vec<String>), PlanError> {
        let mut input = unpacked(path)?;
        let header = first_line(path, &mut input)?;
        let separator = separator(&header);
        let whole: Box<dyn Read> = Box::new(Cursor::new(header).chain(input));
        let mut options = ReaderBuilder::new();
        options.delimiter(separator).trim(Trim::All).has_headers(false).flexible(true);
        let reader = options.from_reader(whole);
        let fields = StringRecord::new();
        let mut lines =
            Lines { path, reader, fields, separator: separator.into(), width: 0, rows: 0 };
        let header = match lines.next()? {
            Some(_) => lines.fields.iter().map(str::to_owned).collect::<Vec<_>>(),
            None => return Err(PlanError::foreign(path, "it is empty")),
        };
        lines.width = header.len();
        Ok((lines, header))
    }

    /// Moves to the next row. Returns the number of its line, or None at the end.
    fn next(&mut self) -> Result<Option<usize>, PlanError> {
        let before = self.reader.position().clone();
        let is_there = self.reader.read_record(&mut self.fields);
        let begins = self.fields.position().unwrap_or(&before).clone();
        let row = at_most(begins.line());
        let wrong = |reason: String| Err(PlanError::row(self.path, row, reason));
        match is_there {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return Err(unreadable(self.path, at_most(before.line()), error)),
        }
        let bytes = self.reader.position().byte().saturating_sub(begins.byte());
        if bytes > LINE_BYTES_MAX as u64 {
            return wrong(format!("a line of {bytes} bytes, or a quote that is not closed"));
        }
        if self.width > 0 && self.fields.len() != self.width {
            let (found, wanted) = (self.fields.len(), self.width);
            let is_quoted = self.fields.iter().any(|field| field.contains(self.separator));
            let hint = if is_quoted { "; a quote may not be closed" } else { "" };
            return wrong(format!("{found} fields where the header has {wanted}{hint}"));
        }
        self.rows += 1;
        match self.rows > ROWS_MAX {
            true => wrong(format!("more than {ROWS_MAX} rows")),
            false => Ok(Some(row)),
        }
    }
}

fn unreadable(path: &Path, row: usize, error: csv::Error) -> PlanError {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => PlanError::io(path)(error),
        csv::ErrorKind::Utf8 { pos, .. } => {
            PlanError::row(path, pos.map_or(row, |at| at_most(at.line())), "no UTF-8 text")
        }
        _ => PlanError::row(path, row, "not a row of a table"),
    }
}

/// Opens a file, unpacking it by what it begins with, whatever its name.
fn unpacked(path: &Path) -> Result<BufReader<Box<dyn Read>>, PlanError> {
    const BUFFER_BYTES: usize = 1 << 20;
    let file = File::open(path).map_err(PlanError::io(path))?;
    let mut file = BufReader::with_capacity(BUFFER_BYTES, file);
    let begins = file.fill_buf().map_err(PlanError::io(path))?;
    let plain: Box<dyn Read> = if begins.starts_with(GZIP) {
        Box::new(flate2::bufread::MultiGzDecoder::new(file))
    } else if begins.starts_with(ZSTD) {
        Box::new(zstd::Decoder::with_buffer(file).map_err(PlanError::io(path))?)
    } else {
        Box::new(file)
    };
    let mut text = BufReader::with_capacity(BUFFER_BYTES, plain);
    let begins = text.fill_buf().map_err(PlanError::io(path))?;
    if begins.starts_with(BYTE_ORDER_MARK) {
        text.consume(BYTE_ORDER_MARK.len());
    }
    Ok(text)
}

fn first_line(path: &Path, input: &mut dyn BufRead) -> Result<Vec<u8>, PlanError> {
    let mut line = Vec::new();
    let most = LINE_BYTES_MAX as u64 + 1;
    input.take(most).read_until(b'\n', &mut line).map_err(PlanError::io(path))?;
    match line.len() > LINE_BYTES_MAX {
        true => Err(PlanError::row(path, 1, format!("a line of more than {LINE_BYTES_MAX} bytes"))),
        false => Ok(line),
    }
}

/// Returns the separator that splits the header into most fields; a comma if none does.
fn separator(header: &[u8]) -> u8 {
    let count = |separator: u8| {
        let mut is_quoted = false;
        let counted = header.iter().filter(|byte| {
            is_quoted ^= **byte == b'"';
            **byte == separator && !is_quoted
        });
        counted.count()
    };
    // Of equal ones the first: `max_by_key` would return the last.
    SEPARATORS.into_iter().rev().max_by_key(|separator| count(*separator)).unwrap_or(b',')
}

fn number(path: &Path, row: usize, name: &str, field: &str) -> Result<f64, PlanError> {
    let parsed = field.parse::<f64>();
    parsed.map_err(|_| {
        let remedy = match field.contains(',') {
            true => "; write decimals with a point and thousands without a comma",
            false => "",
        };
        PlanError::row(path, row, format!("{name} is {field:?}, not a number{remedy}"))
    })
}

pub(super) fn read_rows(path: &Path, columns: &Columns) -> Result<Rows, PlanError> {
    let (mut lines, header) = Lines::open(path)?;
    let at = SeriesColumns::find(path, &header, columns)?;
    let mut rows = Rows { first_row: FIRST_ROW, ..at.rows(path) };
    let mut times = Times::new(at.time.map_or(TimeUnit::Steps, |time| time.unit));
    let mut known: HashMap<String, u32> = HashMap::new();
    while let Some(row) = lines.next()? {
        let fields = &lines.fields;
        let value = |column: usize| number(path, row, &header[column], &fields[column]);
        match at.time {
            Some(time) => times
                .text(&fields[time.at])
                .map_err(|why| PlanError::row(path, row, format!("{}: {why}", header[time.at])))?,
            None => times.whole(at_most(times.len())),
        }
        if let Some(cpu) = at.cpu {
            rows.cpu.push(value(cpu.at)? * cpu.factor);
        }
        if let Some(memory) = at.memory {
            rows.memory.push(value(memory.at)? * memory.factor);
        }
        let Some(vm) = at.vm else {
            rows.vm.push(0);
            continue;
        };
        let name = &fields[vm];
        let vm = match known.get(name) {
            Some(vm) => *vm,
            None => {
                let next = super::build::next_vm(path, rows.names.len())?;
                rows.names.push(name.to_owned());
                known.insert(name.to_owned(), next);
                next
            }
        };
        rows.vm.push(vm);
    }
    at.finish(path, &header, rows, times)
}

pub(super) fn read_table(path: &Path, columns: &Columns) -> Result<ProvisionTable, PlanError> {
    let (mut lines, header) = Lines::open(path)?;
    let at = PromisedColumns::find(path, &header, columns)?;
    let mut table = ProvisionTable {
        cpu: at.cpu.map(|found| (found.unit, Vec::new())),
        memory: at.memory.map(|found| (found.unit, Vec::new())),
        first_row: FIRST_ROW,
        ..ProvisionTable::default()
    };
    while let Some(row) = lines.next()? {
        let fields = &lines.fields;
        let value = |column: usize| number(path, row, &header[column], &fields[column]);
        table.names.push(fields[at.vm].to_owned());
        if let (Some(found), Some((_, values))) = (at.cpu, &mut table.cpu) {
            values.push(value(found.at)? * found.factor);
        }
        if let (Some(found), Some((_, values))) = (at.memory, &mut table.memory) {
            values.push(value(found.at)? * found.factor);
        }
    }
    Ok(table)
}
