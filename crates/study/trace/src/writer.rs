//! Writes a trace: columns are buffered for one row group, then encoded. The file gets its final
//! name only when it is complete; dropping a writer leaves nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::data_type::{DataType, Int32Type, Int64Type};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::ColumnPath;

use crate::digest;
use crate::error::TraceError;
use crate::output::Output;
use crate::reader::{COLUMN_NAMES, DIGEST_KEY, INFO_KEY, VERSION, VERSION_KEY};
use crate::record::{Batch, Record, TraceInfo};

/// Records in a row group, which a reader holds at once: 24 MiB of columns.
pub const ROW_GROUP_RECORDS: usize = 1 << 20;

/// Bytes of an encoded page before compression: small enough to stay in a second-level cache.
const PARQUET_PAGE_BYTES: usize = 1 << 18;

const SCHEMA: &str = "message farpool_trace {
    REQUIRED INT64 block (INTEGER(64,false));
    REQUIRED INT64 ticks (INTEGER(64,false));
    REQUIRED INT32 access (INTEGER(8,false));
    REQUIRED INT32 thread (INTEGER(32,false));
}";

/// Writes records to a trace file.
pub struct TraceWriter {
    path: PathBuf,
    writer: SerializedFileWriter<Output>,
    info: TraceInfo,
    pending: Batch,
    records: u64,
}

impl std::fmt::Debug for TraceWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceWriter")
            .field("path", &self.path)
            .field("records", &self.records)
            .finish_non_exhaustive()
    }
}

impl TraceWriter {
    /// Begins a trace at `path`; the file appears only at [`TraceWriter::finish`].
    ///
    /// # Errors
    /// The folder does not exist or cannot be written.
    pub fn create(path: &Path, info: TraceInfo) -> Result<Self, TraceError> {
        let output = Output::begin(path)?;
        let schema = parse_message_type(SCHEMA).map_err(TraceError::parquet(path))?;
        let writer = SerializedFileWriter::new(output, Arc::new(schema), Arc::new(properties()))
            .map_err(TraceError::parquet(path))?;
        Ok(Self { path: path.to_owned(), writer, info, pending: Batch::default(), records: 0 })
    }

    /// Adds one record.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn push(&mut self, record: Record) -> Result<(), TraceError> {
        self.pending.push(record);
        if self.pending.len() == ROW_GROUP_RECORDS { self.flush() } else { Ok(()) }
    }

    /// Records so far.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.records + self.pending.len() as u64
    }

    /// The footer's content; in a capture it is complete only at the end.
    pub fn info_mut(&mut self) -> &mut TraceInfo {
        &mut self.info
    }

    fn flush(&mut self) -> Result<(), TraceError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let written = write_group(&mut self.writer, &self.pending);
        written.map_err(write_error(&self.path))?;
        self.records += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// Writes the footer and gives the file its name, replacing any older file. Returns the number
    /// of records.
    ///
    /// # Errors
    /// The disk refuses; then nothing is left.
    pub fn finish(mut self) -> Result<u64, TraceError> {
        self.flush()?;
        let info = serde_json::to_string(&self.info)
            .map_err(|error| TraceError::foreign(&self.path, error.to_string()))?;
        let digest = digest::PLACEHOLDER;
        for (key, value) in [(VERSION_KEY, VERSION), (INFO_KEY, &info), (DIGEST_KEY, digest)] {
            let pair = KeyValue::new(key.to_owned(), value.to_owned());
            self.writer.append_key_value_metadata(pair);
        }
        let mut output = self.writer.into_inner().map_err(write_error(&self.path))?;
        digest::seal(output.file()).map_err(TraceError::io(&self.path))?;
        output.finish()?;
        Ok(self.records)
    }
}

fn write_error(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> TraceError + '_ {
    move |error| TraceError::foreign(path, format!("could not be written: {error}"))
}

/// Blocks and ticks as deltas; access and thread, which rarely change, as runs.
fn properties() -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_created_by(format!("farpool {}", env!("CARGO_PKG_VERSION")))
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_data_page_size_limit(PARQUET_PAGE_BYTES)
        .set_max_row_group_row_count(Some(ROW_GROUP_RECORDS));
    for name in ["block", "ticks"] {
        let path = ColumnPath::from(name);
        properties = properties
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
    }
    properties.build()
}

fn write_group(
    writer: &mut SerializedFileWriter<Output>,
    batch: &Batch,
) -> Result<(), parquet::errors::ParquetError> {
    debug_assert_eq!(COLUMN_NAMES.len(), 4, "four columns are written below");
    assert!(batch.is_whole(), "what is written has all columns");
    let signed = |values: &[u64]| values.iter().map(|&v| v.cast_signed()).collect::<Vec<i64>>();
    let mut group = writer.next_row_group()?;
    write_column::<Int64Type>(&mut group, &signed(&batch.blocks))?;
    write_column::<Int64Type>(&mut group, &signed(&batch.ticks))?;
    let accesses: Vec<i32> = batch.accesses.iter().map(|&access| access as i32).collect();
    write_column::<Int32Type>(&mut group, &accesses)?;
    let threads: Vec<i32> = batch.threads.iter().map(|&thread| thread.cast_signed()).collect();
    write_column::<Int32Type>(&mut group, &threads)?;
    group.close()?;
    Ok(())
}

fn write_column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, Output>,
    values: &[T::T],
) -> Result<(), parquet::errors::ParquetError> {
    let Some(mut column) = group.next_column()? else {
        return Err(parquet::errors::ParquetError::General("a column too many".to_owned()));
    };
    column.typed::<T>().write_batch(values, None, None)?;
    column.close()
}
