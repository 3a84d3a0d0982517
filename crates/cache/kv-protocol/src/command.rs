//! The words of requests that parsing and executing share: how values are stored, which meta
//! command.

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

/// A classic command that stores.
#[derive(Debug, Clone, Copy)]
pub struct StoreRequest<'a> {
    pub mode: StoreMode,
    pub key: &'a [u8],
    pub client_flags: u32,
    pub exptime: i32,
    /// The CAS number of `cas`, else 0.
    pub cas: u64,
    pub quiet: bool,
    /// What followed the command line, line end included.
    pub data: &'a [u8],
}

/// Which of the meta commands on a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetaKind {
    Get,
    Set,
    Delete,
    Arithmetic,
    Debug,
}

/// A meta command, its flags still to be read.
#[derive(Debug, Clone, Copy)]
pub struct MetaRequest<'a> {
    pub kind: MetaKind,
    pub line: &'a [u8],
    /// Of `ms`: what followed the command line, line end included.
    pub data: &'a [u8],
}

/// How the items of a `get` are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadFlags {
    pub with_cas: bool,
    /// The new expiry time, of `gat` and `gats`.
    pub touch: Option<i32>,
}
