//! The files of one process's credentials, and how it is noticed that they changed.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::identity::RackName;
use crate::refusal::Refusal;

/// Where certificate, key, authorities and revoked certificates are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// PEM file of the certificate and those between it and an authority.
    pub certificate: PathBuf,
    /// PEM file of its private key.
    pub key: PathBuf,
    /// PEM file of the authorities whose certificates are accepted.
    pub authorities: PathBuf,
    /// PEM file of lists of revoked certificates. It may be missing, until it was there once.
    pub revoked: PathBuf,
}

impl Files {
    /// The names that `farpool pki` and cert-manager give them: tls.crt, tls.key and ca.crt, and
    /// revoked.crl beside them.
    #[must_use]
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            certificate: folder.join("tls.crt"),
            key: folder.join("tls.key"),
            authorities: folder.join("ca.crt"),
            revoked: folder.join("revoked.crl"),
        }
    }
}

/// Why files give no credentials.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A file has not what it should have, or cannot be read.
    #[error("{path}: {reason}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Key and certificate are not of one pair. Between two files that are replaced one after the
    /// other, this is so for a moment.
    #[error("{key} is not the key of {certificate}; copy both from one issue or renewal")]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// Peers would refuse the certificate.
    #[error("{path} is of no use: {refusal}")]
    Refused {
        /// The certificate's file.
        path: PathBuf,
        /// Why.
        refusal: Refusal,
    },
    /// The certificate was replaced by one of another rack, which needs a restart.
    #[error("{path} is of rack {theirs} now, and was of {ours}; restart to change racks")]
    OtherRack {
        /// The certificate's file.
        path: PathBuf,
        /// Its rack.
        theirs: RackName,
        /// The rack before.
        ours: RackName,
    },
    /// The lists of revoked certificates are older than those in force, or are missing. Those in
    /// force stay.
    #[error("{path} is missing, or older than the list in force; copy the newest one there")]
    ListWithdrawn {
        /// The file of lists.
        path: PathBuf,
    },
    /// The files were replaced while they were read, several times.
    #[error("{path} changes all the time")]
    Changing {
        /// One of the files.
        path: PathBuf,
    },
}

impl FileError {
    pub(crate) fn unusable(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unusable { path: path.to_owned(), reason: reason.into() }
    }
}

/// What tells one content of a file from the next: inode, size, and times of change. None if there
/// is no file.
pub(crate) type Stamp = Option<(u64, u64, i64, i64, i64, i64)>;

/// The stamp of what is at `path`, where a link leads.
pub(crate) fn stamp(path: &Path) -> Result<Stamp, FileError> {
    match path.metadata() {
        Ok(it) => Ok(Some((
            it.ino(),
            it.size(),
            it.mtime(),
            it.mtime_nsec(),
            it.ctime(),
            it.ctime_nsec(),
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::unusable(path, error.to_string())),
    }
}
