//! Reads a trace, one row group at a time, only the requested columns. Its digest is checked first.

use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::column::reader::{ColumnReaderImpl, get_typed_column_reader};
use parquet::data_type::{DataType, Int32Type, Int64Type};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, RowGroupReader};
use parquet::file::serialized_reader::SerializedFileReader;
use serde::Deserialize;

use crate::digest::{self, Verdict};
use crate::error::TraceError;
use crate::record::{Access, Batch, TraceInfo};

/// Footer key of the format's version.
pub const VERSION_KEY: &str = "farpool.trace.version";
/// The version that this crate writes and reads.
pub const VERSION: &str = "1";
/// Footer key of [`TraceInfo`], as JSON.
pub const INFO_KEY: &str = "farpool.trace.info";
/// Footer key of the file's digest.
pub const DIGEST_KEY: &str = "farpool.trace.digest";
/// The columns, in their order in the file.
pub const COLUMN_NAMES: [&str; 4] = ["block", "ticks", "access", "thread"];

/// Which columns a reader decodes; blocks are always read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Columns {
    /// Read [`Batch::ticks`].
    pub ticks: bool,
    /// Read [`Batch::accesses`].
    pub accesses: bool,
    /// Read [`Batch::threads`].
    pub threads: bool,
}

impl Columns {
    /// Blocks only.
    pub const BLOCKS: Self = Self { ticks: false, accesses: false, threads: false };
    /// Everything.
    pub const ALL: Self = Self { ticks: true, accesses: true, threads: true };
}

/// An open trace.
pub struct TraceReader {
    path: PathBuf,
    file: SerializedFileReader<File>,
    info: TraceInfo,
    records: u64,
    columns: Columns,
    next_group: usize,
}

impl std::fmt::Debug for TraceReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceReader")
            .field("path", &self.path)
            .field("info", &self.info)
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl TraceReader {
    /// Opens a trace and checks its digest, which reads the file once from end to end.
    ///
    /// # Errors
    /// It is missing, cut short, damaged, not Parquet, not a Farpool trace, or of another version.
    pub fn open(path: &Path, columns: Columns) -> Result<Self, TraceError> {
        let mut file = File::open(path).map_err(TraceError::io(path))?;
        let reason = match digest::check(&mut file).map_err(TraceError::io(path))? {
            Verdict::Whole => None,
            Verdict::Damaged => {
                Some("damaged: the file's bytes do not match the digest in its footer")
            }
            Verdict::NoDigest => Some(NO_TRACE),
            Verdict::NoParquet => Some("cut short, or not a Parquet file"),
        };
        if let Some(reason) = reason {
            return Err(TraceError::foreign(path, reason));
        }
        let length = file.metadata().map_err(TraceError::io(path))?.len();
        let file = SerializedFileReader::new(file).map_err(TraceError::parquet(path))?;
        let footer = file.metadata().file_metadata();
        let value = |key: &str| {
            let pairs = footer.key_value_metadata()?;
            pairs.iter().find(|pair| pair.key == key)?.value.as_deref()
        };
        let Some(version) = value(VERSION_KEY) else {
            return Err(TraceError::foreign(path, NO_TRACE));
        };
        if version != VERSION {
            let reason = format!("a trace of version {version}; this farpool reads {VERSION}");
            return Err(TraceError::foreign(path, reason));
        }
        check_schema(path, footer.schema_descr())?;
        check_places(path, file.metadata(), length)?;
        let info: TraceInfo = from_footer(path, INFO_KEY, value(INFO_KEY))?;
        if !info.block_bytes.is_power_of_two() {
            let reason = format!("its blocks have {} bytes, not a power of two", info.block_bytes);
            return Err(TraceError::foreign(path, reason));
        }
        let records = u64::try_from(footer.num_rows())
            .map_err(|_| TraceError::foreign(path, "a negative number of rows"))?;
        let in_groups = file.metadata().row_groups().iter().map(|group| group.num_rows());
        let in_groups = in_groups.fold(0i64, i64::saturating_add);
        if u64::try_from(in_groups) != Ok(records) {
            let reason = format!("{records} rows in all, {in_groups} in its row groups");
            return Err(TraceError::foreign(path, reason));
        }
        Ok(Self { path: path.to_owned(), file, info, records, columns, next_group: 0 })
    }

    /// Returns the same trace with other columns, for callers that choose them from the footer.
    #[must_use]
    pub fn with_columns(mut self, columns: Columns) -> Self {
        self.columns = columns;
        self
    }

    /// The footer's description of the trace.
    #[must_use]
    pub fn info(&self) -> &TraceInfo {
        &self.info
    }

    /// The trace's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records in the whole trace.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Reads the next records into `batch`, in the order of the program. False at the end.
    ///
    /// # Errors
    /// The file cannot be read, or has content that Farpool's writer never makes.
    pub fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, TraceError> {
        batch.clear();
        if self.next_group == self.file.num_row_groups() {
            return Ok(false);
        }
        let group =
            self.file.get_row_group(self.next_group).map_err(TraceError::parquet(&self.path))?;
        self.next_group += 1;
        self.read_group(&*group, batch)?;
        Ok(true)
    }

    fn read_group(&self, group: &dyn RowGroupReader, batch: &mut Batch) -> Result<(), TraceError> {
        let rows = usize::try_from(group.metadata().num_rows())
            .map_err(|_| TraceError::foreign(&self.path, "a row group of impossible length"))?;
        if rows > MAX_ROW_GROUP_RECORDS {
            let reason = format!("a row group of {rows} rows; at most {MAX_ROW_GROUP_RECORDS}");
            return Err(TraceError::foreign(&self.path, reason));
        }
        let path = &self.path;
        batch.blocks = unsigned(read_column::<Int64Type>(path, group, 0, rows)?);
        if self.columns.ticks {
            batch.ticks = unsigned(read_column::<Int64Type>(path, group, 1, rows)?);
        }
        if self.columns.accesses {
            let codes = read_column::<Int32Type>(path, group, 2, rows)?;
            let access = |&code: &i32| u8::try_from(code).ok().and_then(Access::from_code);
            let accesses: Option<Vec<Access>> = codes.iter().map(access).collect();
            batch.accesses = accesses
                .ok_or_else(|| TraceError::foreign(path, "an access that is none of 0, 1, 2"))?;
        }
        if self.columns.threads {
            let threads = read_column::<Int32Type>(path, group, 3, rows)?;
            batch.threads = threads.into_iter().map(i32::cast_unsigned).collect();
        }
        Ok(())
    }
}

/// Message for Parquet files that are something else.
const NO_TRACE: &str = "a Parquet file, but not a Farpool trace; `farpool trace import` converts \
                        other formats";

/// Largest row group accepted: a foreign writer's may be larger than ours, but a file beyond this
/// needs too much memory.
const MAX_ROW_GROUP_RECORDS: usize = 1 << 26;

fn check_schema(
    path: &Path,
    schema: &parquet::schema::types::SchemaDescriptor,
) -> Result<(), TraceError> {
    let names: Vec<&str> = schema.columns().iter().map(|column| column.name()).collect();
    let is_flat = schema.columns().iter().all(|column| column.max_def_level() == 0);
    if names != COLUMN_NAMES || !is_flat {
        let reason = format!("columns {names:?}; a trace has {COLUMN_NAMES:?}, none optional");
        return Err(TraceError::foreign(path, reason));
    }
    Ok(())
}

/// Checks that the columns lie inside the file: the Parquet reader aborts the program where they do
/// not.
fn check_places(path: &Path, footer: &ParquetMetaData, length: u64) -> Result<(), TraceError> {
    for (number, group) in footer.row_groups().iter().enumerate() {
        for (column, name) in group.columns().iter().zip(COLUMN_NAMES) {
            let first = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
            let place = u64::try_from(first).ok().zip(u64::try_from(column.compressed_size()).ok());
            let end = place.and_then(|(first, bytes)| first.checked_add(bytes));
            if end.is_none_or(|end| end > length) {
                let reason = format!("row group {number}: column {name} lies outside the file");
                return Err(TraceError::foreign(path, reason));
            }
        }
    }
    Ok(())
}

fn from_footer<T: for<'a> Deserialize<'a>>(
    path: &Path,
    key: &str,
    value: Option<&str>,
) -> Result<T, TraceError> {
    let value =
        value.ok_or_else(|| TraceError::foreign(path, format!("no {key} in its footer")))?;
    serde_json::from_str(value)
        .map_err(|error| TraceError::foreign(path, format!("{key} in its footer: {error}")))
}

fn unsigned(values: Vec<i64>) -> Vec<u64> {
    values.into_iter().map(i64::cast_unsigned).collect()
}

fn read_column<T: DataType>(
    path: &Path,
    group: &dyn RowGroupReader,
    column: usize,
    rows: usize,
) -> Result<Vec<T::T>, TraceError> {
    if group.metadata().column(column).column_type() != T::get_physical_type() {
        let reason = format!("column {} has another type", COLUMN_NAMES[column]);
        return Err(TraceError::foreign(path, reason));
    }
    let reader = group.get_column_reader(column).map_err(TraceError::parquet(path))?;
    let mut reader: ColumnReaderImpl<T> = get_typed_column_reader(reader);
    let mut values = Vec::with_capacity(rows);
    while values.len() < rows {
        let wanted = rows - values.len();
        let (records, _, _) = reader
            .read_records(wanted, None, None, &mut values)
            .map_err(TraceError::parquet(path))?;
        if records == 0 {
            let reason = format!("column {} ends early", COLUMN_NAMES[column]);
            return Err(TraceError::foreign(path, reason));
        }
    }
    Ok(values)
}
