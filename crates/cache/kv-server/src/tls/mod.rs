//! TLS (`-Z`): certificates, which can be loaded anew while the server runs, and the sessions of
//! clients.

mod receive;
pub(crate) mod session;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use farpool_identity::pem::{certificates, private_key, provider, resume_nothing, roots};
use farpool_kernel::lock;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use rustls::{ServerConnection, SupportedProtocolVersion, version};

/// Whether clients have to show a certificate; memcached's `ssl_verify_mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ClientCertificates {
    #[default]
    Unasked,
    /// A client may have none; one that it shows must be good.
    Asked,
    Required,
}

/// How TLS is set up.
#[derive(Debug, Clone, Default)]
pub struct TlsSettings {
    /// PEM file of the server's certificate and those between it and a root.
    pub chain: PathBuf,
    /// PEM file of the private key.
    pub key: PathBuf,
    pub client_certificates: ClientCertificates,
    /// PEM file of the roots that clients' certificates may have.
    pub client_roots: Option<PathBuf>,
    /// Whether TLS 1.2 is refused.
    pub only_newest: bool,
    /// Whether clients may resume sessions.
    pub keeps_sessions: bool,
}

/// Why TLS cannot be set up; the texts begin as memcached's.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("Error loading the certificate chain: {path} : {reason}")]
    Chain { path: String, reason: String },
    #[error("Error loading the key: {path} : {reason}")]
    Key { path: String, reason: String },
    #[error("Error loading the CA certificate: {path} : {reason}")]
    Roots { path: String, reason: String },
    #[error("Error validating the certificate: {0}")]
    Mismatch(#[from] rustls::Error),
}

/// What all threads need to speak TLS.
#[derive(Debug)]
pub struct Tls {
    pub settings: TlsSettings,
    /// For new sessions, with the time since which it applies. Sessions under way keep theirs.
    current: Mutex<(Arc<ServerConfig>, Instant)>,
}

impl Tls {
    /// Loads certificates and key.
    pub fn load(settings: TlsSettings) -> Result<Self, TlsError> {
        let config = load(&settings)?;
        let current = Mutex::new((config, Instant::now()));
        Ok(Self { settings, current })
    }

    /// Loads certificates and key anew, for sessions to come. If that fails, nothing changes.
    pub fn refresh(&self) -> Result<(), TlsError> {
        let config = load(&self.settings)?;
        *lock(&self.current) = (config, Instant::now());
        Ok(())
    }

    /// A session for a new client.
    pub(crate) fn begin(&self) -> Result<session::Session, rustls::Error> {
        let config = Arc::clone(&lock(&self.current).0);
        ServerConnection::new(config).map(session::Session::new)
    }

    /// How long the present certificates have been in use.
    pub(crate) fn age_s(&self) -> u64 {
        lock(&self.current).1.elapsed().as_secs()
    }
}

fn load(settings: &TlsSettings) -> Result<Arc<ServerConfig>, TlsError> {
    let shown = |path: &Path| path.display().to_string();
    let chain = certificates(&settings.chain)
        .map_err(|reason| TlsError::Chain { path: shown(&settings.chain), reason })?;
    let key = private_key(&settings.key)
        .map_err(|reason| TlsError::Key { path: shown(&settings.key), reason })?;
    let versions: &[&SupportedProtocolVersion] =
        if settings.only_newest { &[&version::TLS13] } else { &[&version::TLS13, &version::TLS12] };
    let builder =
        ServerConfig::builder_with_provider(provider()).with_protocol_versions(versions)?;
    let builder = match verifier(settings)? {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(chain, key)?;
    if !settings.keeps_sessions {
        resume_nothing(&mut config);
    }
    Ok(Arc::new(config))
}

/// What checks clients' certificates, if they are asked for any.
fn verifier(settings: &TlsSettings) -> Result<Option<Arc<dyn ClientCertVerifier>>, TlsError> {
    if settings.client_certificates == ClientCertificates::Unasked {
        return Ok(None);
    }
    let path = settings.client_roots.clone().unwrap_or_default();
    let failed = |reason| TlsError::Roots { path: path.display().to_string(), reason };
    let roots = Arc::new(roots(&path).map_err(failed)?);
    let builder = WebPkiClientVerifier::builder_with_provider(roots, provider());
    let builder = match settings.client_certificates {
        ClientCertificates::Required => builder,
        _ => builder.allow_unauthenticated(),
    };
    builder.build().map(Some).map_err(|error| failed(error.to_string()))
}
