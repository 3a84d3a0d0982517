//! What can be wrong with a trace; every message names the file and, if there is one, the row.

use std::path::{Path, PathBuf};

/// A trace that cannot be read, written or captured.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The system returned an error.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file as a whole is not what it should be.
    #[error("{}: {reason}", path.display())]
    Foreign {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// One row is invalid. Rows count from 1, as editors count lines.
    #[error("{}: row {row}: {reason}", path.display())]
    Row {
        /// Which file.
        path: PathBuf,
        /// Which row or record.
        row: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// There are more distinct pages than dense numbers, or than fit the memory allowed.
    #[error("{}: row {row}: more than {limit} distinct pages; {remedy}", path.display())]
    TooManyPages {
        /// Which file.
        path: PathBuf,
        /// The row with the first page over the limit.
        row: u64,
        /// The limit, in pages.
        limit: u64,
        /// What the user can do.
        remedy: &'static str,
    },
    /// A program could not be captured.
    #[error("{0}")]
    Capture(String),
}

impl TraceError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn foreign(path: &Path, reason: impl Into<String>) -> Self {
        Self::Foreign { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn row(path: &Path, row: u64, reason: impl Into<String>) -> Self {
        Self::Row { path: path.to_owned(), row, reason: reason.into() }
    }

    pub(crate) fn parquet(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> Self + '_ {
        move |error| Self::foreign(path, format!("not a readable Parquet file: {error}"))
    }
}
