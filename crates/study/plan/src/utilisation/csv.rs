//! Utilisation as text with a header, `vm,time_s,cpu,memory_bytes` or other names in any order.
//!
//! Fields are separated by comma, semicolon, tab or bar, whichever splits the header into most
//! fields, and may be quoted. A byte-order mark is skipped; gzip and zstd are unpacked.

use std::collections::HashMap;
use std::io::{BufRead, Cursor, Read};
use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Trim};
use farpool_text::{Allowance, Bounded, Line, ToldBy};
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
/// What the reader of records asks for at once; it may ask for so much beyond the end of a record.
const BUFFER_BYTES: usize = 1 << 13;

/// The rows of a table after its header.
struct Lines<'a> {
    path: &'a Path,
    reader: csv::Reader<Bounded<Box<dyn Read>>>,
    allowance: Allowance,
    fields: StringRecord,
    separator: char,
    width: usize,
    rows: usize,
}

impl<'a> Lines<'a> {
    fn open(path: &'a Path) -> Result<(Lines<'a>, Vec<String>), PlanError> {
        let mut input = farpool_text::open(path, ToldBy::Content).map_err(PlanError::io(path))?;
        let header = first_line(path, &mut *input)?;
        let separator = farpool_text::separator(&header);
        let whole: Box<dyn Read> = Box::new(Cursor::new(header).chain(input));
        let (whole, allowance) = Bounded::new(whole);
        let mut options = ReaderBuilder::new();
        options.delimiter(separator).trim(Trim::All).has_headers(false).flexible(true);
        let reader = options.buffer_capacity(BUFFER_BYTES).from_reader(whole);
        let (fields, separator) = (StringRecord::new(), separator.into());
        let mut lines = Lines { path, reader, allowance, fields, separator, width: 0, rows: 0 };
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
        self.allowance.renew((LINE_BYTES_MAX + BUFFER_BYTES) as u64);
        let is_there = self.reader.read_record(&mut self.fields);
        let begins = self.fields.position().unwrap_or(&before).clone();
        let row = at_most(begins.line());
        let wrong = |reason: String| Err(PlanError::row(self.path, row, reason));
        match is_there {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(_) if self.allowance.is_spent() => {
                return Err(PlanError::row(self.path, at_most(before.line()), too_long()));
            }
            Err(error) => return Err(unreadable(self.path, at_most(before.line()), error)),
        }
        let bytes = self.reader.position().byte().saturating_sub(begins.byte());
        if bytes > LINE_BYTES_MAX as u64 {
            return wrong(too_long());
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

fn too_long() -> String {
    format!("a line of more than {LINE_BYTES_MAX} bytes, or a quote that is not closed")
}

fn first_line(path: &Path, input: &mut dyn BufRead) -> Result<Vec<u8>, PlanError> {
    let mut line = Vec::new();
    match farpool_text::read_line(input, &mut line, LINE_BYTES_MAX).map_err(PlanError::io(path))? {
        Line::TooLong => Err(PlanError::row(path, 1, too_long())),
        Line::Whole | Line::End => {
            farpool_text::strip_byte_order_mark(&mut line);
            Ok(line)
        }
    }
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
