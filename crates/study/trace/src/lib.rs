//! Traces of memory references: the Parquet file they are kept in, the formats they come from and
//! go to, and their capture from running programs.
//!
//! * [`record`]: one reference, and the metadata of a whole trace.
//! * [`writer`], [`reader`]: the file (docs/researchers/trace.md describes it column by column).
//!   Written under a temporary name and renamed when complete; read in blocks, only the requested
//!   columns.
//! * [`dense`]: addresses become dense numbers, once, for all computing.
//! * [`import`], [`export`]: lackey, oracleGeneral, vscsi, csv.
//! * [`capture`]: an unmodified program under qemu-user with Farpool's plugin.
//!
//! Invariant: a reader returns what was written, or an error that names the file and the row; the
//! file's digest is checked first.

pub mod capture;
pub mod dense;
mod digest;
pub mod error;
pub mod export;
pub mod import;
mod output;
pub mod reader;
pub mod record;
pub mod writer;

pub use dense::{DensePages, Densifier};
pub use error::TraceError;
pub use reader::{Columns, TraceReader};
pub use record::{
    Access, Batch, CacheFilter, Clock, Filter, PROCESS_SHIFT, PageFilter, Record, TraceInfo,
    TracedProcess,
};
pub use writer::TraceWriter;
