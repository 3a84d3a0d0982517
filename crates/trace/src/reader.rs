//! Reads a trace, one row group at a time, only the columns that are wanted, and checks the digest of
//! each column that was read to its end.

use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::column::reader::{ColumnReaderImpl, get_typed_column_reader};
use parquet::data_type::{DataType, Int32Type, Int64Type};
use parquet::file::reader::{FileReader, RowGroupReader};
use parquet::file::serialized_reader::SerializedFileReader;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::error::TraceError;
use crate::record::{Access, Batch, TraceInfo};

/// Footer key of the format's version.
pub const VERSION_KEY: &str = "farpool.trace.version";
/// The version this room writes and reads.
pub const VERSION: &str = "1";
/// Footer key of [`TraceInfo`], as JSON.
pub const INFO_KEY: &str = "farpool.trace.info";
/// Footer key of the columns' digests, as JSON.
pub const DIGESTS_KEY: &str = "farpool.trace.xxh3-64";
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
    /// Which blocks, and nothing else.
    pub const BLOCKS: Self = Self { ticks: false, accesses: false, threads: false };
    /// Everything.
    pub const ALL: Self = Self { ticks: true, accesses: true, threads: true };
}

/// Running digests of the columns: XXH3-64 over the little-endian values.
#[derive(Debug, Default)]
pub(crate) struct Digests {
    blocks: Digest,
    ticks: Digest,
    accesses: Digest,
    threads: Digest,
}

struct Digest(XxHash3_64);

impl Default for Digest {
    fn default() -> Self {
        Self(XxHash3_64::with_seed(0))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.value())
    }
}

impl Digest {
    fn add<const N: usize>(&mut self, values: impl Iterator<Item = [u8; N]>) {
        let mut bytes = Vec::with_capacity(DIGEST_BUFFER_BYTES + N);
        for value in values {
            bytes.extend_from_slice(&value);
            if bytes.len() >= DIGEST_BUFFER_BYTES {
                std::hash::Hasher::write(&mut self.0, &bytes);
                bytes.clear();
            }
        }
        std::hash::Hasher::write(&mut self.0, &bytes);
    }

    fn value(&self) -> u64 {
        std::hash::Hasher::finish(&self.0)
    }
}

/// Values are hashed in pieces that stay in the first-level cache.
const DIGEST_BUFFER_BYTES: usize = 8192;

/// The digests as the footer has them, in hexadecimal.
#[derive(Debug, Serialize, Deserialize)]
struct StoredDigests {
    block: String,
    ticks: String,
    access: String,
    thread: String,
}

impl Digests {
    pub(crate) fn add(&mut self, batch: &Batch) {
        self.blocks.add(batch.blocks.iter().map(|v| v.to_le_bytes()));
        self.ticks.add(batch.ticks.iter().map(|v| v.to_le_bytes()));
        self.accesses.add(batch.accesses.iter().map(|&v| [v as u8]));
        self.threads.add(batch.threads.iter().map(|v| v.to_le_bytes()));
    }

    pub(crate) fn to_text(&self) -> String {
        let hex = |digest: &Digest| format!("{:016x}", digest.value());
        let stored = StoredDigests {
            block: hex(&self.blocks),
            ticks: hex(&self.ticks),
            access: hex(&self.accesses),
            thread: hex(&self.threads),
        };
        serde_json::to_string(&stored).unwrap_or_default()
    }
}

/// An open trace.
pub struct TraceReader {
    path: PathBuf,
    file: SerializedFileReader<File>,
    info: TraceInfo,
    records: u64,
    columns: Columns,
    next_group: usize,
    digests: Digests,
    stored: StoredDigests,
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
    /// Opens a trace and reads its footer.
    ///
    /// # Errors
    /// It is missing, truncated, not Parquet, not a Farpool trace, or of another version.
    pub fn open(path: &Path, columns: Columns) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(TraceError::io(path))?;
        let file = SerializedFileReader::new(file).map_err(TraceError::parquet(path))?;
        let footer = file.metadata().file_metadata();
        let value = |key: &str| {
            let pairs = footer.key_value_metadata()?;
            pairs.iter().find(|pair| pair.key == key)?.value.as_deref()
        };
        let Some(version) = value(VERSION_KEY) else {
            let reason = "a Parquet file, but not a trace of Farpool (its footer has no \
                          farpool.trace.version); `farpool trace import` makes one of other formats";
            return Err(TraceError::foreign(path, reason));
        };
        if version != VERSION {
            let reason = format!("a trace of version {version}; this farpool reads {VERSION}");
            return Err(TraceError::foreign(path, reason));
        }
        check_schema(path, footer.schema_descr())?;
        let info: TraceInfo = from_footer(path, INFO_KEY, value(INFO_KEY))?;
        if !info.block_bytes.is_power_of_two() {
            let reason = format!("its blocks have {} bytes, no power of two", info.block_bytes);
            return Err(TraceError::foreign(path, reason));
        }
        let stored = from_footer(path, DIGESTS_KEY, value(DIGESTS_KEY))?;
        let records = u64::try_from(footer.num_rows())
            .map_err(|_| TraceError::foreign(path, "a negative number of rows"))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            info,
            records,
            columns,
            next_group: 0,
            digests: Digests::default(),
            stored,
        })
    }

    /// What the footer says.
    #[must_use]
    pub fn info(&self) -> &TraceInfo {
        &self.info
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records in the whole trace.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The next records into `batch`, in the order of the program; false at the end.
    ///
    /// # Errors
    /// The file is damaged; with the last batch also when a column's digest is not the footer's.
    pub fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, TraceError> {
        batch.clear();
        if self.next_group == self.file.num_row_groups() {
            return self.check_digests().map(|()| false);
        }
        let group =
            self.file.get_row_group(self.next_group).map_err(TraceError::parquet(&self.path))?;
        self.next_group += 1;
        self.read_group(&*group, batch)?;
        self.digests.add(batch);
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

    fn check_digests(&self) -> Result<(), TraceError> {
        let Columns { ticks, accesses, threads } = self.columns;
        let read = [
            ("block", true, &self.digests.blocks, &self.stored.block),
            ("ticks", ticks, &self.digests.ticks, &self.stored.ticks),
            ("access", accesses, &self.digests.accesses, &self.stored.access),
            ("thread", threads, &self.digests.threads, &self.stored.thread),
        ];
        for (name, was_read, digest, stored) in read {
            if was_read && format!("{:016x}", digest.value()) != *stored {
                let reason = format!("column {name} is damaged: its digest is not the footer's");
                return Err(TraceError::foreign(&self.path, reason));
            }
        }
        Ok(())
    }
}

/// A foreign writer's row groups may be larger than ours; beyond this a file asks for too much memory.
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
