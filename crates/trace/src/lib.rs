//! Traces of memory references: the Parquet file they are kept in, and the formats they come from and go to.
