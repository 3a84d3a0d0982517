//! What certificates and lists of the authority contain.

use std::io;

use farpool_kernel::fill_random;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, PublicKeyData,
    RevocationReason, RevokedCertParams, SanType, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, UnixTime};
use time::OffsetDateTime;
use x509_parser::prelude::{CertificateRevocationList, FromDer, X509Certificate};

use super::register::Register;
use super::{AuthorityError, Host};
use crate::certificate::Serial;
use crate::identity::{Identity, RackName};
use crate::revoked::Reason;

/// A certificate begins this long before it is made, in seconds: hosts whose clocks are behind by
/// less accept it at once.
const CLOCK_SKEW_S: u64 = 300;
/// Random bytes of a serial number: too many for two to be equal or for one to be guessed.
const SERIAL_BYTES: usize = 16;
/// Longest common name of a subject, in bytes (RFC 5280, ub-common-name).
const COMMON_NAME_BYTES: usize = 64;

/// Begin and end of a certificate's time, in seconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) begin_s: u64,
    pub(super) end_s: u64,
    begin: OffsetDateTime,
    end: OffsetDateTime,
}

impl Times {
    /// A time from a little before now, for some seconds.
    pub(super) fn from(now: UnixTime, life_s: u64) -> Result<Self, AuthorityError> {
        let begin_s = now.as_secs().saturating_sub(CLOCK_SKEW_S);
        let end_s = now.as_secs().saturating_add(life_s);
        Ok(Self { begin_s, end_s, begin: date(begin_s)?, end: date(end_s)? })
    }
}

fn date(unix_s: u64) -> Result<OffsetDateTime, AuthorityError> {
    let seconds = i64::try_from(unix_s).ok();
    let date = seconds.and_then(|it| OffsetDateTime::from_unix_timestamp(it).ok());
    date.ok_or(AuthorityError::Signing(rcgen::Error::Time))
}

/// A new serial number: positive, and as long as its DER form.
pub(super) fn serial() -> Result<Serial, AuthorityError> {
    let mut bytes = [0; SERIAL_BYTES];
    fill_random(&mut bytes).map_err(|errno| AuthorityError::Random(io::Error::from(errno)))?;
    // Neither negative nor with a leading zero, which DER would drop.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Serial::from_bytes(&bytes)
        .map_err(|error| AuthorityError::Random(io::Error::new(io::ErrorKind::InvalidData, error)))
}

/// The authority's own certificate.
pub(super) fn authority(
    rack: &RackName,
    times: Times,
) -> Result<CertificateParams, AuthorityError> {
    let mut params = common(&format!("{rack} farpool authority"), &serial()?, times);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.subject_alt_names = vec![SanType::URI(format!("spiffe://{rack}").try_into()?)];
    Ok(params)
}

/// The certificate of an identity.
pub(super) fn leaf(
    identity: &Identity,
    hosts: &[Host],
    serial: &Serial,
    times: Times,
) -> Result<CertificateParams, AuthorityError> {
    let mut params = common(&identity.role.label(), serial, times);
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if identity.role.may_serve() {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
    for host in hosts {
        params.subject_alt_names.push(match host {
            Host::Name(name) => SanType::DnsName(name.as_str().try_into()?),
            Host::Address(address) => SanType::IpAddress(*address),
        });
    }
    Ok(params)
}

fn common(name: &str, serial: &Serial, times: Times) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    // Names are ASCII. The whole one is in the URI.
    let name = &name[..name.len().min(COMMON_NAME_BYTES)];
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from_slice(serial.as_bytes()));
    (params.not_before, params.not_after) = (times.begin, times.end);
    params
}

/// The list of what the register says is revoked.
pub(super) fn list(
    register: &Register,
    now: UnixTime,
) -> Result<CertificateRevocationListParams, AuthorityError> {
    let revoked = register.revoked(now).map(|(serial, revoked)| {
        Ok(RevokedCertParams {
            serial_number: SerialNumber::from_slice(serial.as_bytes()),
            revocation_time: date(revoked.at_s)?,
            reason_code: code(revoked.reason),
            invalidity_date: None,
        })
    });
    Ok(CertificateRevocationListParams {
        this_update: date(now.as_secs())?,
        // The next one is made when there is something to revoke, and this one is true until then.
        next_update: date(register.not_after_s.max(now.as_secs().saturating_add(1)))?,
        crl_number: SerialNumber::from(register.list_number),
        issuing_distribution_point: None,
        revoked_certs: revoked.collect::<Result<_, AuthorityError>>()?,
        key_identifier_method: KeyIdMethod::Sha256,
    })
}

const fn code(reason: Reason) -> Option<RevocationReason> {
    match reason {
        // RFC 5280: the absence of a reason says so.
        Reason::Unspecified | Reason::Other => None,
        Reason::KeyCompromise => Some(RevocationReason::KeyCompromise),
        Reason::Superseded => Some(RevocationReason::Superseded),
        Reason::CessationOfOperation => Some(RevocationReason::CessationOfOperation),
        Reason::PrivilegeWithdrawn => Some(RevocationReason::PrivilegeWithdrawn),
    }
}

/// The number of a list in PEM form, if it is one.
pub(super) fn list_number(pem: &[u8]) -> Option<u64> {
    let der = CertificateRevocationListDer::from_pem_slice(pem).ok()?;
    let (_, list) = CertificateRevocationList::from_der(&der).ok()?;
    u64::try_from(list.crl_number()?).ok()
}

/// Checks that a certificate in PEM form is that of a key.
pub(super) fn check_pair(pem: &str, key: &KeyPair) -> Result<(), String> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| error.to_string())?;
    let (_, certificate) = X509Certificate::from_der(&der).map_err(|error| error.to_string())?;
    if certificate.public_key().raw == key.subject_public_key_info() {
        Ok(())
    } else {
        Err("it is not the certificate of ca.key".into())
    }
}
