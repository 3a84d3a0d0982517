//! Which certificates are accepted: the authorities and the lists of revoked certificates as they
//! were read last.

use std::fmt;
use std::path::Path;

use rustls::CommonState;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, TrustAnchor, UnixTime};
use webpki::{Cert, EndEntityCert, KeyUsage};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::certificate::{Certificate, Serial};
use crate::files::{FileError, Files};
use crate::pem::certificates;
use crate::refusal::Refusal;
use crate::revoked::{RevocationList, Revoked};

/// A side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that connects.
    Client,
    /// The one that is connected to.
    Server,
}

/// Who is at the other end of a connection, verified.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its certificate.
    pub certificate: Certificate,
    /// Which side of the connection it is.
    pub side: Side,
    /// Its certificate as it came, and those between it and an authority.
    pub(crate) chain: Vec<CertificateDer<'static>>,
}

impl Peer {
    /// Returns who is at the other end of a connection whose handshake is complete. The handshake
    /// has verified it if the configuration is one of [`crate::Credentials`].
    ///
    /// # Errors
    /// It has shown no certificate, or one that the handshake would have refused.
    pub fn of(connection: &CommonState, side: Side) -> Result<Self, Refusal> {
        let chain = connection.peer_certificates().unwrap_or_default();
        let leaf = chain.first().ok_or(Refusal::NoCertificate)?;
        let chain = chain.iter().map(|it| it.clone().into_owned()).collect();
        Ok(Self { certificate: Certificate::read(leaf)?, side, chain })
    }
}

/// Authorities, and what they have revoked.
pub struct Trust {
    anchors: Vec<TrustAnchor<'static>>,
    lists: Vec<RevocationList>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust")
            .field("authorities", &self.anchors.len())
            .field("lists", &self.lists)
            .finish()
    }
}

impl Trust {
    /// Reads authorities and lists.
    ///
    /// # Errors
    /// A file cannot be read, has a certificate that is no authority's, or a list that none of the
    /// authorities has signed. A missing file of lists is none.
    pub fn read(files: &Files) -> Result<Self, FileError> {
        let path = &files.authorities;
        let unusable = |reason: String| FileError::unusable(path, reason);
        let certificates = certificates(path).map_err(unusable)?;
        let (mut anchors, mut authorities) = (Vec::new(), Vec::new());
        for der in &certificates {
            let (_, parsed) =
                X509Certificate::from_der(der).map_err(|error| unusable(error.to_string()))?;
            // A certificate of a host here would be accepted for ever, and its key could sign.
            if !parsed.is_ca() {
                return Err(unusable("it has a certificate that is no authority's".into()));
            }
            let anchor = webpki::anchor_from_trusted_cert(der);
            anchors.push(anchor.map_err(|error| unusable(error.to_string()))?.to_owned());
            authorities.push(parsed);
        }
        let lists = read_lists(&files.revoked, &authorities)?;
        Ok(Self { anchors, lists })
    }

    /// Verifies a certificate with those between it and an authority: signatures, time, purpose,
    /// revocation, identity.
    ///
    /// # Errors
    /// The reason to refuse it.
    pub fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        side: Side,
        now: UnixTime,
    ) -> Result<Certificate, Refusal> {
        let usage = match side {
            Side::Client => KeyUsage::client_auth(),
            Side::Server => KeyUsage::server_auth(),
        };
        let parsed = EndEntityCert::try_from(leaf).map_err(refusal)?;
        let signatures = ring::default_provider().signature_verification_algorithms.all;
        let path = parsed
            .verify_for_usage(signatures, &self.anchors, between, now, usage, None, None)
            .map_err(refusal)?;
        let certificate = Certificate::read(leaf)?;
        self.refuse_revoked(path.end_entity())?;
        path.intermediate_certificates().try_for_each(|between| self.refuse_revoked(between))?;
        Ok(certificate)
    }

    /// What the authorities have revoked.
    #[must_use]
    pub fn lists(&self) -> &[RevocationList] {
        &self.lists
    }

    /// Whether the lists may be used instead of those of `old`: none is missing or older. The list
    /// of an authority that is no longer trusted may go.
    pub(crate) fn keeps_lists_of(&self, old: &Self) -> bool {
        let is_trusted = |list: &&RevocationList| {
            self.anchors.iter().any(|anchor| anchor.subject.as_ref() == list.issuer())
        };
        let is_kept = |old: &RevocationList| self.lists.iter().any(|list| list.replaces(old));
        old.lists.iter().filter(is_trusted).all(is_kept)
    }

    fn refuse_revoked(&self, certificate: &Cert<'_>) -> Result<(), Refusal> {
        let malformed = |error: crate::SerialError| Refusal::Malformed(error.to_string());
        let serial = Serial::from_bytes(certificate.serial()).map_err(malformed)?;
        let found: Option<Revoked> =
            self.lists.iter().find_map(|list| list.find(certificate.issuer(), &serial));
        found.map_or(Ok(()), |revoked| Err(Refusal::Revoked { serial, revoked }))
    }
}

fn read_lists(
    path: &Path,
    authorities: &[X509Certificate<'_>],
) -> Result<Vec<RevocationList>, FileError> {
    let unusable = |reason: String| FileError::unusable(path, reason);
    if crate::files::stamp(path)?.is_none() {
        return Ok(Vec::new());
    }
    let read = |error: pem::Error| unusable(error.to_string());
    let found = CertificateRevocationListDer::pem_file_iter(path).map_err(read)?;
    let lists: Vec<_> = found.collect::<Result<_, _>>().map_err(read)?;
    // An empty file may be one that is being written in place.
    if lists.is_empty() {
        return Err(unusable("no list of revoked certificates in PEM form".into()));
    }
    lists.iter().map(|der| RevocationList::read(der, authorities).map_err(unusable)).collect()
}

fn refusal(error: webpki::Error) -> Refusal {
    use webpki::Error;
    match error {
        Error::BadDer | Error::BadDerTime | Error::TrailingData(_) => {
            Refusal::Malformed(error.to_string())
        }
        Error::CertExpired { not_after, .. } => {
            Refusal::Expired { not_after_s: not_after.as_secs() }
        }
        Error::CertNotValidYet { not_before, .. } => {
            Refusal::NotYetValid { not_before_s: not_before.as_secs() }
        }
        // A signature that does not fit is one of another authority with the same name.
        Error::UnknownIssuer | Error::InvalidSignatureForPublicKey => Refusal::UnknownAuthority,
        Error::RequiredEkuNotFoundContext(_) => Refusal::Purpose,
        other => Refusal::Other(other.to_string()),
    }
}
