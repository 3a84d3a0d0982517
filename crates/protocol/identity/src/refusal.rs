//! Why a peer's certificate is refused, each reason with a remedy.

use std::sync::Arc;
use std::time::Duration;

use farpool_units::utc_text;
use rustls::pki_types::UnixTime;
use rustls::{CertificateError, OtherError};

use crate::certificate::Serial;
use crate::identity::{IdentityError, RackName, Role};
use crate::revoked::Revoked;

/// Why a certificate is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No certificate was shown.
    #[error("it shows no certificate; give it one of this rack (farpool pki issue)")]
    NoCertificate,
    /// It cannot be read.
    #[error("its certificate is malformed: {0}")]
    Malformed(String),
    /// No authority that is trusted here has signed it.
    #[error(
        "its certificate is signed by none of the authorities trusted here; both sides need ca.crt \
         of the same rack"
    )]
    UnknownAuthority,
    /// Its time is over.
    #[error(
        "its certificate ended at {}; renew it (farpool pki renew), or check this host's clock",
        time(*not_after_s)
    )]
    Expired {
        /// Last second of its time, since 1970.
        not_after_s: u64,
    },
    /// Its time has not begun.
    #[error("its certificate begins at {}; check this host's clock", time(*not_before_s))]
    NotYetValid {
        /// Begin of its time, in seconds since 1970.
        not_before_s: u64,
    },
    /// Its authority has revoked it.
    #[error("its certificate {serial} was revoked: {revoked}; issue another (farpool pki issue)")]
    Revoked {
        /// The certificate's number, or that of one between it and an authority.
        serial: Serial,
        /// When and why.
        revoked: Revoked,
    },
    /// It is for the other side of a connection.
    #[error("its certificate is not for this side of a connection (extended key usage)")]
    Purpose,
    /// It names no identity, or several.
    #[error("its certificate does not say who it is: {0}")]
    Identity(#[from] IdentityError),
    /// It is of another rack, though of an authority that is trusted here.
    #[error("it is of rack {theirs}, not of {ours}")]
    OtherRack {
        /// Its rack.
        theirs: RackName,
        /// The rack of this process's own certificate.
        ours: RackName,
    },
    /// It answers connections, but people and programs do not.
    #[error("it answers connections as {0}; only controllers and nodes may")]
    NoServer(Role),
    /// It lends memory, but only nodes do.
    #[error("it lends memory as {0}; only nodes may (farpool pki issue --role node)")]
    NoBlade(Role),
    /// Another one was expected.
    #[error("it is {found}, not {expected}")]
    OtherRole {
        /// Who was meant.
        expected: Role,
        /// Who it is.
        found: Role,
    },
    /// The address by which it was reached is not among its names.
    #[error(
        "its certificate is not for the address {0}; issue one with --host or --ip, or use an \
         address that it names"
    )]
    OtherAddress(String),
    /// The verifier's reason, in its words.
    #[error("its certificate is refused: {0}")]
    Other(String),
}

fn time(unix_s: u64) -> String {
    utc_text(unix_s.saturating_mul(1000))
}

impl Refusal {
    /// The form in which rustls takes it, so that the peer is told by the right alert.
    pub(crate) fn into_tls(self, now: UnixTime) -> rustls::Error {
        let at = |unix_s| UnixTime::since_unix_epoch(Duration::from_secs(unix_s));
        match self {
            Self::NoCertificate => rustls::Error::NoCertificatesPresented,
            Self::Malformed(_) => CertificateError::BadEncoding.into(),
            Self::UnknownAuthority => CertificateError::UnknownIssuer.into(),
            Self::Expired { not_after_s } => {
                CertificateError::ExpiredContext { time: now, not_after: at(not_after_s) }.into()
            }
            Self::NotYetValid { not_before_s } => {
                let not_before = at(not_before_s);
                CertificateError::NotValidYetContext { time: now, not_before }.into()
            }
            Self::Revoked { .. } => CertificateError::Revoked.into(),
            other => CertificateError::Other(OtherError(Arc::new(other))).into(),
        }
    }

    /// The reason behind an error of rustls about a peer's certificate, as far as it is known.
    pub(crate) fn from_tls(error: &CertificateError) -> Self {
        match error {
            CertificateError::BadEncoding => Self::Malformed("it is not in DER form".into()),
            CertificateError::UnknownIssuer => Self::UnknownAuthority,
            CertificateError::ExpiredContext { not_after, .. } => {
                Self::Expired { not_after_s: not_after.as_secs() }
            }
            CertificateError::NotValidYetContext { not_before, .. } => {
                Self::NotYetValid { not_before_s: not_before.as_secs() }
            }
            CertificateError::Revoked => Self::Other("it was revoked".into()),
            CertificateError::Other(OtherError(inner)) => match inner.downcast_ref::<Self>() {
                Some(refusal) => refusal.clone(),
                None => Self::Other(inner.to_string()),
            },
            other => Self::Other(other.to_string()),
        }
    }
}
