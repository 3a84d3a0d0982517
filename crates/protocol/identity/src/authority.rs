//! The rack's authority: a folder with the key that signs certificates, the register of those it
//! has issued, and for each identity a folder to be copied to its host.
//!
//! The register is written before what it tells of: a crash leaves at most a certificate in it that
//! nobody has, never one outside it that could not be revoked by name. The list of revoked
//! certificates is made from the register, and made again if it lags behind. One process at a time
//! changes the folder. Keys are readable by their owner only, appear as a whole, and are never part
//! of a message.

mod making;
mod register;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use farpool_kernel::{sync_folder, write_atomically, write_secret};
use farpool_units::{plain, utc_text};
use rcgen::{Issuer, KeyPair};
use rustls::pki_types::{DnsName, UnixTime};
use serde::{Deserialize, Serialize};

use crate::certificate::Serial;
use crate::files::Files;
use crate::identity::{Identity, IdentityError, RackName, Role};
use crate::revoked::{Reason, Revoked};
use making::Times;
pub use register::{Record, Register, State};

/// Seconds of a day.
pub const DAY_S: u64 = 86_400;
/// Life of an authority, in days: about ten years. Nothing that it issues lives longer.
pub const AUTHORITY_DAYS: u64 = 3650;
/// Life of a certificate in days, unless another one is asked for: a quarter of a year, since
/// nothing renews them by itself yet.
pub const DEFAULT_DAYS: u64 = 90;
/// Folders and files with these modes: nobody but the owner has business in the authority's.
const FOLDER_MODE: u32 = 0o700;
const LOCK_MODE: u32 = 0o600;

/// Why the authority does not do as it is told.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The folder of `init` holds an authority, or a part of one.
    #[error(
        "{path} exists: the folder holds an authority already. Use another --dir; or remove the \
         folder to begin anew, after which nothing that it issued is accepted any more"
    )]
    Exists {
        /// What is there.
        path: PathBuf,
    },
    /// There is no authority in the folder.
    #[error("{folder} holds no authority; make one with farpool pki init --dir {folder}")]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// A file or folder cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file of the authority has not what it should have.
    #[error("{path} is damaged: {reason}; restore it from a backup of the folder")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Why; never a part of a key.
        reason: String,
    },
    /// Certificate or list cannot be made.
    #[error("it cannot be signed: {0}")]
    Signing(#[from] rcgen::Error),
    /// The kernel gave no random bytes.
    #[error("the kernel gives no random bytes: {0}")]
    Random(io::Error),
    /// A name is no name.
    #[error(transparent)]
    Name(#[from] IdentityError),
    /// The identity has a certificate that is valid.
    #[error(
        "{role} has certificate {serial} until {}; renew it (farpool pki renew {}), or revoke it \
         first", day(*not_after_s), role.label()
    )]
    Issued {
        /// Whose.
        role: Role,
        /// Its number.
        serial: Serial,
        /// Last second of its time, since 1970.
        not_after_s: u64,
    },
    /// The identity was revoked as a whole.
    #[error("the certificate of {0} was revoked; if it may come back, issue another")]
    Withdrawn(Role),
    /// A name or number that the register does not have.
    #[error("nothing was issued to \"{}\"; farpool pki show lists what was", plain(.0))]
    Unknown(String),
    /// A name that several identities have.
    #[error("\"{}\" may be {}; name one of them", plain(.name), .labels.join(" or "))]
    Ambiguous {
        /// The name.
        name: String,
        /// What it may mean.
        labels: Vec<String>,
    },
    /// A life of no day, or beyond the authority's own.
    #[error("a certificate lives for 1 to {limit_days} days here: the authority ends on {ends}")]
    Days {
        /// Whole days left to the authority.
        limit_days: u64,
        /// Its last day.
        ends: String,
    },
    /// People and programs answer no connections.
    #[error("{0} answers no connections, so it has no --host and no --ip")]
    Hosts(Role),
}

impl AuthorityError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    fn damaged(path: &Path, reason: impl ToString) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.to_string() }
    }
}

/// A host's name or address, by which clients may reach a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Host {
    /// A name of DNS.
    Name(String),
    /// An address.
    Address(IpAddr),
}

/// A text that is neither a host's name nor an address.
#[derive(Clone, Debug, thiserror::Error)]
#[error("\"{}\" is neither a name of a host nor an address", plain(.0))]
pub struct HostError(String);

impl FromStr for Host {
    type Err = HostError;

    fn from_str(text: &str) -> Result<Self, HostError> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        let name = DnsName::try_from(text).map_err(|_| HostError(text.to_owned()))?;
        Ok(Self::Name(name.as_ref().to_owned()))
    }
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(address) => address.fmt(f),
        }
    }
}

impl TryFrom<String> for Host {
    type Error = HostError;

    fn try_from(text: String) -> Result<Self, HostError> {
        text.parse()
    }
}

impl From<Host> for String {
    fn from(host: Host) -> Self {
        host.to_string()
    }
}

/// What to issue.
#[derive(Clone, Debug)]
pub struct Request {
    /// To whom.
    pub role: Role,
    /// Names and addresses of a server.
    pub hosts: Vec<Host>,
    /// Life in days.
    pub days: u64,
}

/// A certificate that was written, and where.
#[derive(Clone, Debug)]
pub struct Issued {
    /// What the register says of it.
    pub record: Record,
    /// The folder to copy to its host.
    pub folder: PathBuf,
}

/// The authority of a rack, open for changes. Others wait meanwhile.
#[derive(Debug)]
pub struct Authority {
    folder: PathBuf,
    register: Register,
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    /// Held as long as this lives.
    _lock: File,
}

impl Authority {
    /// Makes a new authority in a folder, which is made if it does not exist.
    ///
    /// # Errors
    /// The folder holds one already, or cannot be written.
    pub fn init(folder: &Path, rack: RackName, now: UnixTime) -> Result<Self, AuthorityError> {
        let mut builder = DirBuilder::new();
        builder
            .recursive(true)
            .mode(FOLDER_MODE)
            .create(folder)
            .map_err(AuthorityError::io(folder))?;
        let lock = locked(folder)?;
        for path in [key_path(folder), certificate_path(folder), Register::path(folder)] {
            if fs::exists(&path).map_err(AuthorityError::io(&path))? {
                return Err(AuthorityError::Exists { path });
            }
        }
        let key = KeyPair::generate()?;
        let times = Times::from(now, AUTHORITY_DAYS * DAY_S)?;
        let params = making::authority(&rack, times)?;
        let certificate = params.self_signed(&key)?.pem();
        write_private(&key_path(folder), key.serialize_pem().as_bytes())?;
        write_public(&certificate_path(folder), &certificate)?;
        let register = Register::new(rack, times.end_s);
        register.write(folder)?;
        let issuer = Issuer::new(params, key);
        let mut authority =
            Self { folder: folder.to_owned(), register, issuer, certificate, _lock: lock };
        authority.write_list(now)?;
        Ok(authority)
    }

    /// Opens the authority of a folder, and waits for another process that changes it.
    ///
    /// # Errors
    /// There is none, or one of its files is damaged.
    pub fn open(folder: &Path, now: UnixTime) -> Result<Self, AuthorityError> {
        let register_path = Register::path(folder);
        if !fs::exists(&register_path).map_err(AuthorityError::io(&register_path))? {
            return Err(AuthorityError::Missing { folder: folder.to_owned() });
        }
        let lock = locked(folder)?;
        let register = Register::read(folder)?;
        let path = key_path(folder);
        let key = fs::read_to_string(&path).map_err(AuthorityError::io(&path))?;
        // The reason of rcgen could show a part of the file.
        let key = KeyPair::from_pem(&key)
            .map_err(|_| AuthorityError::damaged(&path, "no private key in PEM form"))?;
        let path = certificate_path(folder);
        let certificate = fs::read_to_string(&path).map_err(AuthorityError::io(&path))?;
        making::check_pair(&certificate, &key)
            .map_err(|reason| AuthorityError::damaged(&path, reason))?;
        let issuer = Issuer::from_ca_cert_pem(&certificate, key)?;
        let mut authority =
            Self { folder: folder.to_owned(), register, issuer, certificate, _lock: lock };
        if !authority.list_is_current() {
            authority.write_list(now)?;
        }
        Ok(authority)
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What was issued.
    #[must_use]
    pub const fn register(&self) -> &Register {
        &self.register
    }

    /// Issues a certificate to an identity that has none that is valid, and writes it with a new
    /// key to the identity's folder.
    ///
    /// # Errors
    /// It has one, the life is too long, or files cannot be written.
    pub fn issue(&mut self, request: Request, now: UnixTime) -> Result<Issued, AuthorityError> {
        let Request { role, hosts, days } = request;
        if !hosts.is_empty() && !role.may_serve() {
            return Err(AuthorityError::Hosts(role));
        }
        if let Some(record) = self.register.valid(&role, now) {
            let (serial, not_after_s) = (record.serial.clone(), record.not_after_s);
            return Err(AuthorityError::Issued { role, serial, not_after_s });
        }
        self.make(role, hosts, days, now)
    }

    /// Issues the next certificate of an identity, with a new key, and the hosts and the life of
    /// its last one unless `days` says otherwise. The last one stays valid until its end, so that
    /// no connection fails meanwhile.
    ///
    /// # Errors
    /// It has none, or its last one was revoked; or as for [`Self::issue`].
    pub fn renew(
        &mut self,
        role: &Role,
        days: Option<u64>,
        now: UnixTime,
    ) -> Result<Issued, AuthorityError> {
        let last = self.register.last(role);
        let last = last.ok_or_else(|| AuthorityError::Unknown(role.label()))?;
        if last.revoked.is_some() {
            return Err(AuthorityError::Withdrawn(role.clone()));
        }
        let days = days.unwrap_or(last.days);
        let hosts = last.hosts.clone();
        self.make(role.clone(), hosts, days, now)
    }

    /// Revokes certificates, and writes the new list also to the folders of all identities. Those
    /// that are revoked already stay as they are. Returns those that were revoked now.
    ///
    /// # Errors
    /// Files cannot be written; what was asked for may then be done in part, and can be asked for
    /// again.
    pub fn revoke(
        &mut self,
        serials: &[Serial],
        reason: Reason,
        now: UnixTime,
    ) -> Result<Vec<Record>, AuthorityError> {
        let revoked = Revoked { at_s: now.as_secs(), reason };
        let done = self.register.revoke(serials, revoked);
        if !done.is_empty() {
            self.register.list_number += 1;
            self.register.write(&self.folder)?;
        }
        self.write_list(now)?;
        Ok(done)
    }

    fn make(
        &mut self,
        role: Role,
        hosts: Vec<Host>,
        days: u64,
        now: UnixTime,
    ) -> Result<Issued, AuthorityError> {
        let ends_s = self.register.not_after_s;
        let limit_days = ends_s.saturating_sub(now.as_secs()) / DAY_S;
        if !(1..=limit_days).contains(&days) {
            return Err(AuthorityError::Days { limit_days, ends: day(ends_s) });
        }
        let identity = Identity { rack: self.register.rack.clone(), role };
        let key = KeyPair::generate()?;
        let times = Times::from(now, days * DAY_S)?;
        let serial = making::serial()?;
        let params = making::leaf(&identity, &hosts, &serial, times)?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        let (not_before_s, not_after_s) = (times.begin_s, times.end_s);
        let record =
            Record { serial, identity, hosts, days, not_before_s, not_after_s, revoked: None };
        self.register.forget_old(now);
        self.register.issued.push(record.clone());
        self.register.write(&self.folder)?;
        let folder = self.folder_of(&record.identity.role);
        let mut builder = DirBuilder::new();
        let made = builder.recursive(true).mode(FOLDER_MODE).create(&folder);
        made.map_err(AuthorityError::io(&folder))?;
        let files = Files::in_folder(&folder);
        write_public(&files.authorities, &self.certificate)?;
        self.copy_list(&files.revoked)?;
        write_private(&files.key, key.serialize_pem().as_bytes())?;
        write_public(&files.certificate, &certificate)?;
        Ok(Issued { record, folder })
    }

    /// The folder to copy to an identity's host.
    #[must_use]
    pub fn folder_of(&self, role: &Role) -> PathBuf {
        self.folder.join(role.label())
    }

    fn list_is_current(&self) -> bool {
        let read = fs::read(list_path(&self.folder)).ok();
        let number = read.and_then(|pem| making::list_number(&pem));
        number.is_some_and(|number| number >= self.register.list_number)
    }

    fn write_list(&mut self, now: UnixTime) -> Result<(), AuthorityError> {
        let list = making::list(&self.register, now)?.signed_by(&self.issuer)?.pem()?;
        write_public(&list_path(&self.folder), &list)?;
        for role in self.register.roles() {
            let folder = self.folder_of(&role);
            // Its owner may have moved it to its host.
            if fs::exists(&folder).map_err(AuthorityError::io(&folder))? {
                write_public(&Files::in_folder(&folder).revoked, &list)?;
            }
        }
        Ok(())
    }

    fn copy_list(&self, to: &Path) -> Result<(), AuthorityError> {
        let path = list_path(&self.folder);
        let list = fs::read_to_string(&path).map_err(AuthorityError::io(&path))?;
        write_public(to, &list)
    }
}

fn key_path(folder: &Path) -> PathBuf {
    folder.join("ca.key")
}

fn certificate_path(folder: &Path) -> PathBuf {
    folder.join("ca.crt")
}

fn list_path(folder: &Path) -> PathBuf {
    folder.join("revoked.crl")
}

/// Waits until no other process changes the folder.
fn locked(folder: &Path) -> Result<File, AuthorityError> {
    let path = folder.join(".lock");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(LOCK_MODE);
    let file = options.open(&path).map_err(AuthorityError::io(&path))?;
    file.lock().map_err(AuthorityError::io(&path))?;
    Ok(file)
}

fn write_private(path: &Path, bytes: &[u8]) -> Result<(), AuthorityError> {
    write_secret(path, bytes).map_err(AuthorityError::io(path))
}

fn write_public(path: &Path, text: &str) -> Result<(), AuthorityError> {
    let written = write_atomically(path, text.as_bytes()).and_then(|()| sync_folder(path));
    written.map_err(AuthorityError::io(path))
}

/// The day of a time in seconds since 1970, such as 2026-11-28.
fn day(unix_s: u64) -> String {
    utc_text(unix_s.saturating_mul(1000)).chars().take(10).collect()
}
