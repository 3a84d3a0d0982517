//! Utilisation as Parquet: flat columns of whole numbers, floating-point numbers or, for the
//! machine, text.

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::path::Path;

use farpool_units::at_most;
use parquet::basic::{LogicalType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::file::reader::{FileReader, RowGroupReader};
use parquet::file::serialized_reader::SerializedFileReader;

use super::columns::{Columns, Found, PromisedColumns, SeriesColumns};
use super::{ProvisionTable, Rows};
use crate::PlanError;

const FIRST_ROW: usize = 1;
/// The most rows accepted: beyond this a damaged or hostile file takes too much memory; 4 columns
/// of 8 bytes are 2 GiB then.
const ROWS_MAX: usize = 1 << 26;

struct Table<'a> {
    path: &'a Path,
    file: SerializedFileReader<File>,
    header: Vec<String>,
    rows: usize,
}

impl<'a> Table<'a> {
    fn open(path: &'a Path) -> Result<Table<'a>, PlanError> {
        let file = File::open(path).map_err(PlanError::io(path))?;
        let file = SerializedFileReader::new(file).map_err(PlanError::parquet(path))?;
        let footer = file.metadata().file_metadata();
        let rows = usize::try_from(footer.num_rows()).ok().filter(|rows| *rows <= ROWS_MAX);
        let rows = rows.ok_or_else(|| {
            let reason = format!("{} rows; at most {ROWS_MAX} are read", footer.num_rows());
            PlanError::foreign(path, reason)
        })?;
        let columns = footer.schema_descr().columns();
        if let Some(nested) = columns.iter().find(|column| column.max_rep_level() > 0) {
            let reason = format!("column {} holds lists; only flat tables are read", nested.path());
            return Err(PlanError::foreign(path, reason));
        }
        let header = columns.iter().map(|column| column.path().string()).collect();
        Ok(Table { path, header, rows, file })
    }

    fn groups(&self) -> impl Iterator<Item = Result<Box<dyn RowGroupReader + '_>, PlanError>> {
        (0..self.file.num_row_groups())
            .map(|index| self.file.get_row_group(index).map_err(PlanError::parquet(self.path)))
    }

    /// Reads a column of numbers, times `factor`.
    fn numbers(&self, at: usize, factor: f64) -> Result<Vec<f64>, PlanError> {
        let column = self.file.metadata().file_metadata().schema_descr().column(at);
        let unsigned = matches!(
            column.logical_type_ref(),
            Some(LogicalType::Integer(integer)) if !integer.is_signed
        );
        let mut numbers = Vec::with_capacity(self.rows);
        for group in self.groups() {
            let group = group?;
            let reader = group.get_column_reader(at).map_err(PlanError::parquet(self.path))?;
            let mut take = |value: f64| numbers.push(value * factor);
            match reader {
                ColumnReader::Int32ColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| {
                        take(match unsigned {
                            true => f64::from(value.cast_unsigned()),
                            false => f64::from(*value),
                        });
                    })?;
                }
                // Beyond 2^53 such a figure is nonsense anyway.
                #[allow(clippy::cast_precision_loss)]
                ColumnReader::Int64ColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| take(*value as f64))?;
                }
                ColumnReader::FloatColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| take(f64::from(*value)))?;
                }
                ColumnReader::DoubleColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| take(*value))?;
                }
                _ => return Err(self.other_type(at, "numbers")),
            }
        }
        Ok(numbers)
    }

    /// Reads the machines in the order of appearance, and the machine of each row.
    fn machines(&self, at: usize) -> Result<(Vec<String>, Vec<u32>), PlanError> {
        let kind = self.file.metadata().file_metadata().schema_descr().column(at).physical_type();
        let (mut texts, mut wholes) = (Known::default(), Known::default());
        for group in self.groups() {
            let group = group?;
            match group.get_column_reader(at).map_err(PlanError::parquet(self.path))? {
                ColumnReader::ByteArrayColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| texts.add(value.data()))?;
                }
                ColumnReader::Int32ColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| wholes.add(&i64::from(*value)))?;
                }
                ColumnReader::Int64ColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| wholes.add(value))?;
                }
                _ => return Err(self.other_type(at, "names or whole numbers")),
            }
        }
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let (names, places): (Vec<String>, Vec<u32>) = match kind {
            Type::BYTE_ARRAY => (texts.names.into_iter().map(text).collect(), texts.places),
            _ => (wholes.names.iter().map(i64::to_string).collect(), wholes.places),
        };
        super::build::next_vm(self.path, names.len())?;
        Ok((names, places))
    }

    /// Calls `take` with every value of one column of one group. A missing value is an error.
    fn each<T: DataType>(
        &self,
        at: usize,
        group: &dyn RowGroupReader,
        mut reader: ColumnReaderImpl<T>,
        mut take: impl FnMut(&T::T),
    ) -> Result<(), PlanError> {
        let rows = usize::try_from(group.metadata().num_rows()).ok();
        let rows = rows.filter(|rows| *rows <= self.rows).ok_or_else(|| {
            PlanError::foreign(self.path, "a row group has more rows than the file")
        })?;
        let (mut values, mut levels, mut read) = (Vec::new(), Vec::new(), 0);
        while read < rows {
            values.clear();
            levels.clear();
            let wanted = (rows - read).min(1 << 16);
            let (records, filled, _) = reader
                .read_records(wanted, Some(&mut levels), None, &mut values)
                .map_err(PlanError::parquet(self.path))?;
            if records == 0 {
                let reason = format!("column {:?} ends after {read} rows", self.header[at]);
                return Err(PlanError::foreign(self.path, reason));
            }
            if filled < records {
                let column = group.metadata().column(at).column_descr();
                let full = column.max_def_level();
                let missing = levels.iter().position(|level| *level < full).unwrap_or(filled);
                let reason = format!("{} is missing", self.header[at]);
                return Err(PlanError::row(self.path, FIRST_ROW + read + missing, reason));
            }
            values.iter().for_each(&mut take);
            read += records;
        }
        Ok(())
    }

    fn other_type(&self, at: usize, wanted: &str) -> PlanError {
        let reason = format!("column {:?} holds no {wanted}", self.header[at]);
        PlanError::foreign(self.path, reason)
    }
}

/// Values in the order of their first appearance.
#[derive(Debug)]
struct Known<K> {
    by_value: HashMap<K, u32>,
    names: Vec<K>,
    places: Vec<u32>,
}

impl<K> Default for Known<K> {
    fn default() -> Known<K> {
        Known { by_value: HashMap::new(), names: Vec::new(), places: Vec::new() }
    }
}

impl<K: Eq + Hash + Clone> Known<K> {
    fn add<Q: ToOwned<Owned = K> + Eq + Hash + ?Sized>(&mut self, value: &Q)
    where
        K: std::borrow::Borrow<Q>,
    {
        let place = match self.by_value.get(value) {
            Some(place) => *place,
            None => {
                // Too many are refused after all are read; the last index is then never used.
                let place = at_most(self.names.len());
                self.names.push(value.to_owned());
                self.by_value.insert(value.to_owned(), place);
                place
            }
        };
        self.places.push(place);
    }
}

pub(super) fn read_rows(path: &Path, columns: &Columns) -> Result<Rows, PlanError> {
    let table = Table::open(path)?;
    let at = SeriesColumns::find(path, &table.header, columns)?;
    let (names, vm) = table.machines(at.vm)?;
    let rows = Rows {
        names,
        vm,
        time: table.numbers(at.time.at, at.time.factor)?,
        cpu: table.numbers(at.cpu.at, at.cpu.factor)?,
        memory: table.numbers(at.memory.at, at.memory.factor)?,
        units: (at.time.unit, at.cpu.unit, at.memory.unit),
        first_row: FIRST_ROW,
    };
    let lengths = [rows.vm.len(), rows.time.len(), rows.cpu.len(), rows.memory.len()];
    match lengths.iter().all(|length| *length == rows.vm.len()) {
        true => Ok(rows),
        false => Err(PlanError::foreign(path, format!("columns of {lengths:?} rows"))),
    }
}

pub(super) fn read_table(path: &Path, columns: &Columns) -> Result<ProvisionTable, PlanError> {
    let table = Table::open(path)?;
    let at = PromisedColumns::find(path, &table.header, columns)?;
    let (names, vm) = table.machines(at.vm)?;
    fn read<Unit: Copy>(
        table: &Table,
        found: Option<Found<Unit>>,
    ) -> Result<Option<(Unit, Vec<f64>)>, PlanError> {
        let read = |found: Found<Unit>| Ok((found.unit, table.numbers(found.at, found.factor)?));
        found.map(read).transpose()
    }
    let (cpu, memory) = (read(&table, at.cpu)?, read(&table, at.memory)?);
    // `build` refuses a machine that occurs twice; here each row keeps its own name.
    let names = vm.iter().map(|place| names[*place as usize].clone()).collect();
    Ok(ProvisionTable { names, cpu, memory, first_row: FIRST_ROW })
}
