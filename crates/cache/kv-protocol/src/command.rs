//! Parts of requests that parsing and execution share: storage modes and kinds of meta command.

use super::compat::Compat;

/// How a value is to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreMode {
    Set,
    Add,
    Replace,
    Append,
    Prepend,
    Cas,
}

/// A classic storage command.
#[derive(Debug, Clone, Copy)]
pub struct StoreRequest<'a> {
    pub mode: StoreMode,
    pub key: &'a [u8],
    pub client_flags: u32,
    pub exptime: i32,
    /// The CAS number of `cas`, else 0.
    pub cas: u64,
    pub quiet: bool,
    /// The data block after the command line, line end included.
    pub data: &'a [u8],
}

/// The kind of a meta command on a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetaKind {
    Get,
    Set,
    Delete,
    Arithmetic,
    Debug,
}

/// A meta command whose flags are not parsed yet.
#[derive(Debug, Clone, Copy)]
pub struct MetaRequest<'a> {
    pub kind: MetaKind,
    pub line: &'a [u8],
    /// For `ms`: the data block after the command line, line end included.
    pub data: &'a [u8],
    /// The version of memcached whose flags and answers are those of the command.
    pub compat: Compat,
}

/// How the items of a `get` are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadFlags {
    pub with_cas: bool,
    /// The new expiry time, for `gat` and `gats`.
    pub touch: Option<i32>,
}
