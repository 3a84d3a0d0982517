//! What one process has to show and whom it trusts, read again when a file changes.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use farpool_kernel::{lock, read_lock, write_lock};
use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};

use crate::certificate::Certificate;
use crate::files::{FileError, Files, Stamp, stamp};
use crate::identity::{Identity, RackName};
use crate::pem::{certificates, private_key, provider, resume_nothing};
use crate::refusal::Refusal;
use crate::trust::{Peer, Side, Trust};
use crate::verifier::{Expect, OfClients, OfServers, Own};

/// How often files are read anew if they change meanwhile. A third change says that someone writes
/// them all the time.
const READS: usize = 3;

/// What [`Credentials::reload`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reloaded {
    /// No file has changed.
    Unchanged,
    /// What has changed is in force for handshakes to come.
    Changed,
}

/// The certificate that this process shows.
struct Shown {
    key: Arc<CertifiedKey>,
    certificate: Certificate,
}

/// What was read from files, and how these looked then.
struct Part<T> {
    value: RwLock<Arc<T>>,
    stamps: Mutex<Vec<Stamp>>,
}

impl<T> Part<T> {
    fn get(&self) -> Arc<T> {
        Arc::clone(&read_lock(&self.value))
    }
}

/// A process's certificate and key, and the authorities and revoked certificates that it knows.
/// Shared by all its connections; the configurations made from it follow every [`Self::reload`].
pub struct Credentials {
    files: Files,
    rack: RackName,
    shown: Part<Shown>,
    trust: Part<Trust>,
    /// Grows whenever `trust` changes.
    generation: AtomicU64,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let identity = self.identity();
        f.debug_struct("Credentials").field("identity", &identity).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads the files of a process.
    ///
    /// # Errors
    /// See [`FileError`]; also if peers would refuse the certificate now.
    pub fn load(files: Files, now: UnixTime) -> Result<Arc<Self>, FileError> {
        let (trust, trust_stamps) = steady(&trust_files(&files), || Trust::read(&files))?;
        let (shown, shown_stamps) = steady(&shown_files(&files), || read_shown(&files))?;
        let path = &files.certificate;
        check_shown(path, &shown, &trust, now)?;
        let rack = shown.certificate.identity.rack.clone();
        let part = |stamps| Mutex::new(stamps);
        Ok(Arc::new(Self {
            shown: Part { value: RwLock::new(Arc::new(shown)), stamps: part(shown_stamps) },
            trust: Part { value: RwLock::new(Arc::new(trust)), stamps: part(trust_stamps) },
            generation: AtomicU64::new(0),
            files,
            rack,
        }))
    }

    /// Reads what has changed since it was read last. To be called several times a second: it costs
    /// a few system calls if nothing has changed.
    ///
    /// Authorities with lists, and certificate with key, are two parts: each is in force as soon as
    /// it can be used, even if the other cannot.
    ///
    /// # Errors
    /// See [`FileError`]. What was read before stays in force, and the next call tries again. Two
    /// files that are replaced one after the other are an error for a moment.
    pub fn reload(&self, now: UnixTime) -> Result<Reloaded, FileError> {
        let trust = self.reload_trust();
        let shown = self.reload_shown(now);
        let (trust, shown) = (trust?, shown?);
        Ok(if trust || shown { Reloaded::Changed } else { Reloaded::Unchanged })
    }

    fn reload_trust(&self) -> Result<bool, FileError> {
        // Held to the end: of two calls, the later one must not install what the earlier one read.
        let mut stamps = lock(&self.trust.stamps);
        let paths = trust_files(&self.files);
        if *stamps == stamps_of(&paths)? {
            return Ok(false);
        }
        let (trust, new) = steady(&paths, || Trust::read(&self.files))?;
        if !trust.keeps_lists_of(&self.trust.get()) {
            return Err(FileError::ListWithdrawn { path: self.files.revoked.clone() });
        }
        *write_lock(&self.trust.value) = Arc::new(trust);
        self.generation.fetch_add(1, Ordering::Release);
        *stamps = new;
        Ok(true)
    }

    fn reload_shown(&self, now: UnixTime) -> Result<bool, FileError> {
        let mut stamps = lock(&self.shown.stamps);
        let paths = shown_files(&self.files);
        if *stamps == stamps_of(&paths)? {
            return Ok(false);
        }
        let (shown, new) = steady(&paths, || read_shown(&self.files))?;
        let path = &self.files.certificate;
        let theirs = &shown.certificate.identity.rack;
        if *theirs != self.rack {
            let (theirs, ours) = (theirs.clone(), self.rack.clone());
            return Err(FileError::OtherRack { path: path.clone(), theirs, ours });
        }
        check_shown(path, &shown, &self.trust.get(), now)?;
        *write_lock(&self.shown.value) = Arc::new(shown);
        *stamps = new;
        Ok(true)
    }

    /// Whose credentials these are.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.shown.get().certificate.identity.clone()
    }

    /// The certificate that peers are shown.
    #[must_use]
    pub fn certificate(&self) -> Certificate {
        self.shown.get().certificate.clone()
    }

    /// Authorities and lists as they were read last.
    #[must_use]
    pub fn trust(&self) -> Arc<Trust> {
        self.trust.get()
    }

    /// Grows whenever [`Self::trust`] has changed.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn own(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.shown.get().key)
    }

    pub(crate) fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        side: Side,
        now: UnixTime,
    ) -> Result<Certificate, Refusal> {
        let certificate = self.trust.get().verify(leaf, between, side, now)?;
        let theirs = &certificate.identity.rack;
        if *theirs == self.rack {
            Ok(certificate)
        } else {
            Err(Refusal::OtherRack { theirs: theirs.clone(), ours: self.rack.clone() })
        }
    }

    /// Verifies again the peer of a connection that is open, with what was read last.
    ///
    /// # Errors
    /// The reason to close the connection.
    pub fn verify_peer(&self, peer: &Peer, now: UnixTime) -> Result<(), Refusal> {
        let (leaf, between) = peer.chain.split_first().ok_or(Refusal::NoCertificate)?;
        self.verify(leaf, between, peer.side, now).map(drop)
    }

    /// A configuration for a server: TLS 1.3, a client's certificate required. It follows every
    /// later [`Self::reload`].
    ///
    /// # Errors
    /// [`Refusal::NoServer`]: this certificate is a person's or a program's.
    pub fn server(self: &Arc<Self>) -> Result<ServerConfig, Refusal> {
        let role = self.identity().role;
        if !role.may_serve() {
            return Err(Refusal::NoServer(role));
        }
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13]).map_err(other)?;
        let builder = builder.with_client_cert_verifier(Arc::new(OfClients(Arc::clone(self))));
        let mut config = builder.with_cert_resolver(Arc::new(Own(Arc::clone(self))));
        resume_nothing(&mut config);
        Ok(config)
    }

    /// A configuration for a client: TLS 1.3, this certificate shown, and the server's verified. It
    /// follows every later [`Self::reload`].
    ///
    /// A client learns with its first read that the server has refused it: in TLS 1.3 the client's
    /// handshake is complete before the server has seen its certificate.
    ///
    /// # Errors
    /// None that is known: rustls speaks TLS 1.3.
    pub fn client(self: &Arc<Self>, expect: Expect) -> Result<ClientConfig, Refusal> {
        let verifier = OfServers { credentials: Arc::clone(self), expect };
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13]).map_err(other)?;
        let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = builder.with_client_cert_resolver(Arc::new(Own(Arc::clone(self))));
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

fn other(error: rustls::Error) -> Refusal {
    Refusal::Other(error.to_string())
}

fn trust_files(files: &Files) -> [&Path; 2] {
    [&files.authorities, &files.revoked]
}

fn shown_files(files: &Files) -> [&Path; 2] {
    [&files.certificate, &files.key]
}

fn stamps_of(paths: &[&Path]) -> Result<Vec<Stamp>, FileError> {
    paths.iter().map(|path| stamp(path)).collect()
}

/// Reads files of which none changes meanwhile, and returns how they looked.
fn steady<T>(
    paths: &[&Path],
    read: impl Fn() -> Result<T, FileError>,
) -> Result<(T, Vec<Stamp>), FileError> {
    for _ in 0..READS {
        let before = stamps_of(paths)?;
        let value = read();
        if before == stamps_of(paths)? {
            return Ok((value?, before));
        }
    }
    Err(FileError::Changing { path: paths[0].to_owned() })
}

fn read_shown(files: &Files) -> Result<Shown, FileError> {
    let (path, key_path) = (&files.certificate, &files.key);
    let chain = certificates(path).map_err(|reason| FileError::unusable(path, reason))?;
    let leaf = chain.first().ok_or_else(|| FileError::unusable(path, "no certificate"))?;
    let certificate = Certificate::read(leaf)
        .map_err(|refusal| FileError::Refused { path: path.clone(), refusal })?;
    let key = private_key(key_path).map_err(|reason| FileError::unusable(key_path, reason))?;
    let key = CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            FileError::Mismatch { certificate: path.clone(), key: key_path.clone() }
        }
        other => FileError::unusable(key_path, other.to_string()),
    })?;
    Ok(Shown { key: Arc::new(key), certificate })
}

/// Refuses a certificate that peers with the same authorities would refuse.
fn check_shown(path: &Path, shown: &Shown, trust: &Trust, now: UnixTime) -> Result<(), FileError> {
    let (leaf, between) = shown.key.cert.split_first().unwrap_or_else(|| unreachable!("read"));
    let verified = trust.verify(leaf, between, Side::Client, now);
    verified.map(drop).map_err(|refusal| FileError::Refused { path: path.to_owned(), refusal })
}
