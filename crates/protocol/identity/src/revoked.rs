//! Lists of revoked certificates: X.509 CRLs in PEM form, each signed by its authority.
//!
//! A certificate that a list names is refused from then on, however old the list is. Only a list
//! that one of the trusted authorities has signed is read, and no list is taken back for an older
//! one: see [`RevocationList::replaces`].

use std::collections::HashMap;
use std::fmt;

use farpool_units::utc_text;
use serde::{Deserialize, Serialize};
use webpki::OwnedCertRevocationList;
use x509_parser::prelude::{CertificateRevocationList, FromDer, ReasonCode, X509Certificate};

use crate::certificate::{Serial, seconds};

/// Why a certificate was revoked (RFC 5280, 5.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// None was given.
    Unspecified,
    /// Others may have its key.
    KeyCompromise,
    /// Another certificate takes its place.
    Superseded,
    /// Its owner is gone.
    CessationOfOperation,
    /// Its owner may no longer do what it says.
    PrivilegeWithdrawn,
    /// A reason of another authority that has no name here.
    Other,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unspecified => "no reason given",
            Self::KeyCompromise => "others may have its key",
            Self::Superseded => "superseded",
            Self::CessationOfOperation => "its owner is gone",
            Self::PrivilegeWithdrawn => "its right was withdrawn",
            Self::Other => "another reason",
        })
    }
}

impl From<ReasonCode> for Reason {
    fn from(code: ReasonCode) -> Self {
        match code {
            ReasonCode::Unspecified => Self::Unspecified,
            ReasonCode::KeyCompromise => Self::KeyCompromise,
            ReasonCode::Superseded => Self::Superseded,
            ReasonCode::CessationOfOperation => Self::CessationOfOperation,
            ReasonCode::PrivilegeWithdrawn => Self::PrivilegeWithdrawn,
            _ => Self::Other,
        }
    }
}

/// When and why a certificate was revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// When, in seconds since 1970.
    pub at_s: u64,
    /// Why.
    pub reason: Reason,
}

impl fmt::Display for Revoked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at_s, reason } = self;
        write!(f, "{reason}, {}", utc_text(at_s.saturating_mul(1000)))
    }
}

/// What one authority has revoked.
#[derive(Clone, Debug)]
pub struct RevocationList {
    /// The authority's name as certificates have it: DER without its outer SEQUENCE.
    issuer: Vec<u8>,
    /// Grows with every list, if the authority numbers them; the highest byte first.
    number: Option<Vec<u8>>,
    issued_at_s: u64,
    next_at_s: Option<u64>,
    entries: HashMap<Serial, Revoked>,
}

impl RevocationList {
    /// Reads a list in DER form that one of `authorities` has signed.
    ///
    /// # Errors
    /// It is malformed, has extensions that change its meaning, or none of them has signed it.
    pub fn read(der: &[u8], authorities: &[X509Certificate<'_>]) -> Result<Self, String> {
        // This one is strict: it refuses what is a difference only, or about other authorities.
        let strict = OwnedCertRevocationList::from_der(der).map_err(|error| error.to_string())?;
        let issuer = webpki::CertRevocationList::from(strict).issuer().to_vec();
        let (rest, list) =
            CertificateRevocationList::from_der(der).map_err(|error| error.to_string())?;
        if !rest.is_empty() {
            return Err("bytes follow the list".into());
        }
        let may_sign = |authority: &&X509Certificate<'_>| {
            let usage = authority.key_usage().ok().flatten();
            authority.subject().as_raw() == list.issuer().as_raw()
                && usage.is_none_or(|usage| usage.value.crl_sign())
                && list.verify_signature(authority.public_key()).is_ok()
        };
        if !authorities.iter().any(|authority| may_sign(&authority)) {
            return Err("it is signed by none of the authorities trusted here".into());
        }
        let text = |error: crate::Refusal| error.to_string();
        let mut entries = HashMap::new();
        for entry in list.iter_revoked_certificates() {
            let serial = Serial::from_bytes(entry.raw_serial()).map_err(|it| it.to_string())?;
            let at_s = seconds(entry.revocation_date).map_err(text)?;
            let reason = entry.reason_code().map_or(Reason::Unspecified, |(_, code)| code.into());
            entries.insert(serial, Revoked { at_s, reason });
        }
        Ok(Self {
            issuer,
            number: list.crl_number().map(|number| number.to_bytes_be()),
            issued_at_s: seconds(list.last_update()).map_err(text)?,
            next_at_s: list.next_update().map(seconds).transpose().map_err(text)?,
            entries,
        })
    }

    /// When and why its authority revoked a certificate; `issuer` is the certificate's.
    #[must_use]
    pub fn find(&self, issuer: &[u8], serial: &Serial) -> Option<Revoked> {
        if issuer == self.issuer { self.entries.get(serial).copied() } else { None }
    }

    /// All certificates of the list, in no order.
    pub fn entries(&self) -> impl Iterator<Item = (&Serial, &Revoked)> {
        self.entries.iter()
    }

    /// When the authority wanted to have issued the next list, in seconds since 1970. A later list
    /// may exist that did not arrive here.
    #[must_use]
    pub const fn next_at_s(&self) -> Option<u64> {
        self.next_at_s
    }

    /// The name of its authority: DER without its outer SEQUENCE.
    pub(crate) fn issuer(&self) -> &[u8] {
        &self.issuer
    }

    /// Whether it is of the same authority as `old`, and not older: by their numbers if both have
    /// one (the authority's clock may have been set back), else by their times.
    #[must_use]
    pub fn replaces(&self, old: &Self) -> bool {
        let order = |number: &Vec<u8>| (number.len(), number.clone());
        let is_newer = match (&self.number, &old.number) {
            // Without leading zeros, the longer number is the greater one.
            (Some(new), Some(old)) => order(new) >= order(old),
            _ => self.issued_at_s >= old.issued_at_s,
        };
        self.issuer == old.issuer && is_newer
    }
}
