//! Utilisation as Parquet: flat columns of whole numbers, floating-point numbers, decimals,
//! timestamps or, for the machine and times, text.
//!
//! A column's own type is asked before its name: a timestamp has its unit, a decimal its scale.

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::path::Path;

use farpool_units::at_most;
use parquet::basic::{ConvertedType, LogicalType, TimeUnit as StampUnit, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::file::reader::{FileReader, RowGroupReader};
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::schema::types::{ColumnDescPtr, ColumnDescriptor};

use super::columns::{Columns, Found, PromisedColumns, SeriesColumns, TimeUnit};
use super::times::Times;
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

    fn column(&self, at: usize) -> ColumnDescPtr {
        self.file.metadata().file_metadata().schema_descr().column(at)
    }

    /// Reads a column of numbers, times `factor`.
    fn numbers(&self, at: usize, factor: f64) -> Result<Vec<f64>, PlanError> {
        let column = self.column(at);
        if !is_number(&column) {
            return Err(self.other_type(at, "numbers"));
        }
        let unsigned = is_unsigned(&column);
        let scale = 10_f64.powi(decimals(&column));
        let mut numbers = Vec::with_capacity(self.rows);
        for group in self.groups() {
            let group = group?;
            let reader = group.get_column_reader(at).map_err(PlanError::parquet(self.path))?;
            let mut take = |value: f64| numbers.push(value / scale * factor);
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
                    self.each(at, &*group, reader, |value| {
                        take(match unsigned {
                            true => value.cast_unsigned() as f64,
                            false => *value as f64,
                        });
                    })?;
                }
                // Only decimals get here.
                ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| take(big_endian(value.data())))?;
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

    /// Reads a column of times in the unit of its type, or in `named` if its type has none.
    fn times(&self, at: usize, named: TimeUnit) -> Result<Times, PlanError> {
        let column = self.column(at);
        let own = stamp_unit(&column);
        let is_text = column.physical_type() == Type::BYTE_ARRAY && !is_decimal(&column);
        if own.is_none() && !is_number(&column) && !is_text {
            return Err(self.other_type(at, "times"));
        }
        let unsigned = is_unsigned(&column);
        let unit = own.map_or(named, TimeUnit::PerSecond);
        let mut times = Times::decimals(unit, decimals(&column));
        let mut wrong = None;
        for group in self.groups() {
            let group = group?;
            match group.get_column_reader(at).map_err(PlanError::parquet(self.path))? {
                ColumnReader::Int32ColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| {
                        times.whole(match unsigned {
                            true => value.cast_unsigned().into(),
                            false => (*value).into(),
                        });
                    })?;
                }
                ColumnReader::Int64ColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| times.whole(*value))?;
                }
                ColumnReader::Int96ColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| times.whole(value.to_nanos()))?;
                }
                ColumnReader::FloatColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| times.real(f64::from(*value)))?;
                }
                ColumnReader::DoubleColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| times.real(*value))?;
                }
                // Only decimals get here.
                ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| {
                        let row = FIRST_ROW + times.len();
                        match whole(value.data()) {
                            Some(value) => times.whole(value),
                            None => {
                                let why = "its time has more than 18 digits";
                                wrong.get_or_insert(PlanError::row(self.path, row, why));
                            }
                        }
                    })?;
                }
                ColumnReader::ByteArrayColumnReader(reader) => {
                    self.each(at, &*group, reader, |value| {
                        let row = FIRST_ROW + times.len();
                        let text = String::from_utf8_lossy(value.data());
                        if let Err(why) = times.text(&text)
                            && wrong.is_none()
                        {
                            wrong = Some(PlanError::row(self.path, row, why));
                        }
                    })?;
                }
                _ => return Err(self.other_type(at, "times")),
            }
        }
        wrong.map_or(Ok(times), Err)
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

/// True for columns whose values mean themselves: neither dates nor times of day, for example.
fn is_number(column: &ColumnDescriptor) -> bool {
    let is_plain = matches!(
        column.logical_type_ref(),
        None | Some(LogicalType::Integer(_) | LogicalType::Decimal(_))
    );
    let is_date = matches!(
        column.converted_type(),
        ConvertedType::DATE
            | ConvertedType::TIME_MILLIS
            | ConvertedType::TIME_MICROS
            | ConvertedType::TIMESTAMP_MILLIS
            | ConvertedType::TIMESTAMP_MICROS
    );
    let is_bytes = matches!(column.physical_type(), Type::FIXED_LEN_BYTE_ARRAY | Type::BYTE_ARRAY);
    let is_fixed = column.physical_type() == Type::FIXED_LEN_BYTE_ARRAY;
    is_plain && !is_date && (!is_bytes || is_fixed && is_decimal(column))
}

fn is_decimal(column: &ColumnDescriptor) -> bool {
    matches!(column.logical_type_ref(), Some(LogicalType::Decimal(_)))
        || column.converted_type() == ConvertedType::DECIMAL
}

fn is_unsigned(column: &ColumnDescriptor) -> bool {
    let by_name = matches!(
        column.logical_type_ref(),
        Some(LogicalType::Integer(integer)) if !integer.is_signed
    );
    by_name
        || matches!(
            column.converted_type(),
            ConvertedType::UINT_8
                | ConvertedType::UINT_16
                | ConvertedType::UINT_32
                | ConvertedType::UINT_64
        )
}

/// Digits after the point that a decimal column's whole numbers have.
fn decimals(column: &ColumnDescriptor) -> i32 {
    match column.logical_type_ref() {
        Some(LogicalType::Decimal(decimal)) => decimal.scale,
        _ if column.converted_type() == ConvertedType::DECIMAL => column.type_scale(),
        _ => 0,
    }
}

/// Units to a second of a timestamp column; None for other columns.
fn stamp_unit(column: &ColumnDescriptor) -> Option<f64> {
    match (column.logical_type_ref(), column.converted_type()) {
        (Some(LogicalType::Timestamp(stamp)), _) => Some(match stamp.unit {
            StampUnit::MILLIS => 1e3,
            StampUnit::MICROS => 1e6,
            StampUnit::NANOS => 1e9,
        }),
        (_, ConvertedType::TIMESTAMP_MILLIS) => Some(1e3),
        (_, ConvertedType::TIMESTAMP_MICROS) => Some(1e6),
        // Spark's older type; the parquet crate turns it into nanoseconds.
        _ => (column.physical_type() == Type::INT96).then_some(1e9),
    }
}

/// A signed number of any length.
fn big_endian(bytes: &[u8]) -> f64 {
    let negative = bytes.first().is_some_and(|first| *first >= 0x80);
    let start = if negative { -1.0 } else { 0.0 };
    bytes.iter().fold(start, |value, byte| value * 256.0 + f64::from(*byte))
}

/// The same, if 64 bits hold it.
fn whole(bytes: &[u8]) -> Option<i64> {
    let sign = if bytes.first().is_some_and(|first| *first >= 0x80) { u8::MAX } else { 0 };
    let (rest, last) = bytes.split_at(bytes.len().saturating_sub(size_of::<i64>()));
    let mut value = [sign; size_of::<i64>()];
    value[size_of::<i64>() - last.len()..].copy_from_slice(last);
    let value = i64::from_be_bytes(value);
    let fits = rest.iter().all(|byte| *byte == sign) && (value < 0) == (sign != 0);
    fits.then_some(value)
}

pub(super) fn read_rows(path: &Path, columns: &Columns) -> Result<Rows, PlanError> {
    let table = Table::open(path)?;
    let at = SeriesColumns::find(path, &table.header, columns)?;
    let mut rows = Rows { first_row: FIRST_ROW, ..at.rows(path) };
    match at.vm {
        Some(vm) => (rows.names, rows.vm) = table.machines(vm)?,
        None => rows.vm = vec![0; table.rows],
    }
    let read = |found: Option<(usize, f64)>| {
        found.map_or_else(|| Ok(Vec::new()), |(at, factor)| table.numbers(at, factor))
    };
    rows.cpu = read(at.cpu.map(|cpu| (cpu.at, cpu.factor)))?;
    rows.memory = read(at.memory.map(|memory| (memory.at, memory.factor)))?;
    let times = match at.time {
        Some(time) => table.times(time.at, time.unit)?,
        None => {
            let mut steps = Times::new(TimeUnit::Steps);
            (0..table.rows).for_each(|step| steps.whole(at_most(step)));
            steps
        }
    };
    let rows = at.finish(path, &table.header, rows, times)?;
    let optional = |values: &Vec<f64>| if values.is_empty() { rows.vm.len() } else { values.len() };
    let lengths = [rows.vm.len(), rows.time.len(), optional(&rows.cpu), optional(&rows.memory)];
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
