//! Utilisation as comma-separated values with a header, `vm,time_s,cpu,memory_bytes` or other names
//! in any order.
//!
//! Fields are separated by commas alone: there are no quotes, and no field holds a comma.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::columns::{Columns, PromisedColumns, SeriesColumns};
use super::{ProvisionTable, Rows};
use crate::PlanError;

/// The header is line 1.
const FIRST_ROW: usize = 2;
/// The longest line accepted as a row.
const LINE_BYTES_MAX: usize = 1 << 16;

struct Lines<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    line: Vec<u8>,
    number: usize,
    width: usize,
}

impl<'a> Lines<'a> {
    fn open(path: &'a Path) -> Result<(Lines<'a>, Vec<String>), PlanError> {
        let reader =
            BufReader::with_capacity(1 << 20, File::open(path).map_err(PlanError::io(path))?);
        let mut lines = Lines { path, reader, line: Vec::new(), number: 0, width: 0 };
        let header = lines.next()?.ok_or_else(|| PlanError::foreign(path, "it is empty"))?;
        let header: Vec<String> = header.iter().map(|name| (*name).to_owned()).collect();
        lines.width = header.len();
        Ok((lines, header))
    }

    /// Returns the fields of the next line, or None at the end.
    fn next(&mut self) -> Result<Option<Vec<&str>>, PlanError> {
        self.line.clear();
        self.number += 1;
        let read =
            self.reader.read_until(b'\n', &mut self.line).map_err(PlanError::io(self.path))?;
        if read == 0 {
            return Ok(None);
        }
        let wrong = |reason: String| PlanError::row(self.path, self.number, reason);
        if read > LINE_BYTES_MAX {
            return Err(wrong(format!("a line of {read} bytes")));
        }
        let text = std::str::from_utf8(&self.line).map_err(|_| wrong("no UTF-8 text".into()))?;
        if text.contains('"') {
            return Err(wrong("quotes are not understood; leave them out".into()));
        }
        let fields: Vec<&str> =
            text.trim_end_matches(['\n', '\r']).split(',').map(str::trim).collect();
        if self.width > 0 && fields.len() != self.width {
            let (found, wanted) = (fields.len(), self.width);
            return Err(wrong(format!("{found} fields where the header has {wanted}")));
        }
        Ok(Some(fields))
    }
}

fn number(path: &Path, row: usize, name: &str, field: &str) -> Result<f64, PlanError> {
    let parsed = field.parse::<f64>();
    parsed.map_err(|_| PlanError::row(path, row, format!("{name} is {field:?}, not a number")))
}

pub(super) fn read_rows(path: &Path, columns: &Columns) -> Result<Rows, PlanError> {
    let (mut lines, header) = Lines::open(path)?;
    let at = SeriesColumns::find(path, &header, columns)?;
    let units = (at.time.unit, at.cpu.unit, at.memory.unit);
    let mut rows = Rows { units, first_row: FIRST_ROW, ..Rows::default() };
    let mut known: HashMap<String, u32> = HashMap::new();
    loop {
        let row = lines.number + 1;
        let Some(fields) = lines.next()? else { return Ok(rows) };
        let value = |column: usize| number(path, row, &header[column], fields[column]);
        rows.time.push(value(at.time.at)? * at.time.factor);
        rows.cpu.push(value(at.cpu.at)? * at.cpu.factor);
        rows.memory.push(value(at.memory.at)? * at.memory.factor);
        let name = fields[at.vm];
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
    loop {
        let row = lines.number + 1;
        let Some(fields) = lines.next()? else { return Ok(table) };
        let value = |column: usize| number(path, row, &header[column], fields[column]);
        table.names.push(fields[at.vm].to_owned());
        if let (Some(found), Some((_, values))) = (at.cpu, &mut table.cpu) {
            values.push(value(found.at)? * found.factor);
        }
        if let (Some(found), Some((_, values))) = (at.memory, &mut table.memory) {
            values.push(value(found.at)? * found.factor);
        }
    }
}
