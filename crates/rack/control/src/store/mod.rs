//! Where intent is kept: one trait, an embedded store and etcd.

pub mod backup;
mod commit;
mod etcd;
mod redb;
pub mod version;

pub use self::redb::RedbStore;
pub(crate) use commit::{CommitState, Committer};
pub(crate) use etcd::{Etcd, EtcdStore, KEEP_ALIVE_EVERY};

pub use crate::model::StoreOp;

/// Why the store failed. Nothing of the batch may count as stored then.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened.
    #[error("the store {path} cannot be opened: {reason}")]
    Open {
        /// The file.
        path: String,
        /// What happened.
        reason: String,
    },
    /// The file cannot be read or written.
    #[error("the store does not take it: {0}")]
    Io(String),
    /// None of the endpoints gives a valid answer.
    #[error("etcd does not answer: {0}")]
    Unreachable(String),
    /// What the store holds is of another time.
    #[error(
        "the store is of version {found}, and this farpool knows versions 1 to {known}; start the \
         farpool that wrote it, or a newer one"
    )]
    Version {
        /// The store's.
        found: u64,
        /// The newest one known.
        known: u64,
    },
    /// Another controller leads now.
    #[error("another controller leads")]
    Fenced,
}

/// A key-value store with atomic, durable batches.
pub trait Store: Send {
    /// Returns everything in the store.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn load(&mut self) -> Result<Vec<(String, Vec<u8>)>, StoreError>;

    /// Carries out a batch as a whole. When it returns, the batch survives any crash.
    ///
    /// # Errors
    /// See [`StoreError`]; the store is as before then, or its state is unknown.
    fn commit(&mut self, ops: &[StoreOp]) -> Result<(), StoreError>;
}
