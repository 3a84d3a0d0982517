//! Why a plan cannot be made, always with the file, the place in it and the reason.

use std::io;
use std::path::{Path, PathBuf};

/// An input that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("{path} cannot be read")]
    Unreadable { path: PathBuf, source: io::Error },
    /// The file as a whole is not what it should be.
    #[error("{path}: {reason}")]
    Foreign { path: PathBuf, reason: String },
    /// One row of a table is wrong; rows count from 1, in CSV the header is line 1.
    #[error("{path}, row {row}: {reason}")]
    Row { path: PathBuf, row: usize, reason: String },
    /// A key of a TOML file is missing or has an invalid value.
    #[error("{path}: {key}: {reason}")]
    Key { path: PathBuf, key: String, reason: String },
    /// The question has no answer, whatever the data.
    #[error("{0}")]
    Question(String),
}

impl PlanError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> PlanError + '_ {
        move |source| PlanError::Unreadable { path: path.to_owned(), source }
    }

    pub(crate) fn foreign(path: &Path, reason: impl Into<String>) -> PlanError {
        PlanError::Foreign { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn row(path: &Path, row: usize, reason: impl Into<String>) -> PlanError {
        PlanError::Row { path: path.to_owned(), row, reason: reason.into() }
    }

    pub(crate) fn parquet(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> PlanError {
        let path = path.to_owned();
        move |error| PlanError::Foreign { path, reason: format!("not readable Parquet: {error}") }
    }
}
