//! Certificates and keys in files of PEM form, for every server and client that speaks TLS.

use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, ServerConfig};

/// The one implementation of ciphers and signatures that Farpool uses.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Reads the certificates of a file, of which there is at least one.
///
/// # Errors
/// The reason, which does not name the file.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = |error: pem::Error| error.to_string();
    let found = CertificateDer::pem_file_iter(path).map_err(read)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(read)?;
    if found.is_empty() { Err("no certificate in PEM form".into()) } else { Ok(found) }
}

/// Reads the private key of a file.
///
/// # Errors
/// The reason, which does not name the file and shows nothing of it.
pub fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| error.to_string())
}

/// Reads the roots of a file, of which there is at least one.
///
/// # Errors
/// The reason, which does not name the file.
pub fn roots(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for root in certificates(path)? {
        roots.add(root).map_err(|error| error.to_string())?;
    }
    Ok(roots)
}

/// Makes every session of a server begin with a whole handshake: one that is resumed brings the
/// client's certificate from before, unverified.
pub fn resume_nothing(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
}
