//! What Farpool reads in a certificate besides what the verifier checks: whose it is, its serial
//! number and its time.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;

use farpool_units::plain;
use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::time::ASN1Time;

use crate::identity::Identity;
use crate::refusal::Refusal;

/// Longest serial number in bytes; RFC 5280 allows 20. Longer ones name no certificate here.
const SERIAL_LIMIT_BYTES: usize = 32;

/// A certificate's number: unique among those of its authority. As text, hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Serial(Box<[u8]>);

/// A text or a number that is no serial number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{}\" is no serial number: it has 2 to 64 hexadecimal digits, two for each byte", plain(.0))]
pub struct SerialError(String);

impl Serial {
    /// The number as certificates and lists hold it: the bytes of an INTEGER, the highest first.
    ///
    /// # Errors
    /// There are none, or too many.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SerialError> {
        if (1..=SERIAL_LIMIT_BYTES).contains(&bytes.len()) {
            Ok(Self(bytes.into()))
        } else {
            Err(SerialError(format!("({} bytes)", bytes.len())))
        }
    }

    /// The bytes, the highest first.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Serial {
    type Err = SerialError;

    fn from_str(text: &str) -> Result<Self, SerialError> {
        let wrong = || SerialError(text.chars().take(2 * SERIAL_LIMIT_BYTES + 1).collect());
        // OpenSSL shows colons between the bytes.
        let digits: String = text.chars().filter(|&digit| digit != ':').collect();
        if !digits.len().is_multiple_of(2) || !digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        {
            return Err(wrong());
        }
        let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16);
        let bytes: Result<Vec<u8>, _> = (0..digits.len()).step_by(2).map(byte).collect();
        Self::from_bytes(&bytes.map_err(|_| wrong())?).map_err(|_| wrong())
    }
}

impl TryFrom<String> for Serial {
    type Error = SerialError;

    fn try_from(text: String) -> Result<Self, SerialError> {
        text.parse()
    }
}

impl From<Serial> for String {
    fn from(serial: Serial) -> Self {
        serial.to_string()
    }
}

/// What a certificate says of itself. Whether that is true is for [`crate::Trust::verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Whose it is.
    pub identity: Identity,
    /// Its number.
    pub serial: Serial,
    /// Begin of its time, in seconds since 1970.
    pub not_before_s: u64,
    /// Last second of its time, since 1970.
    pub not_after_s: u64,
}

impl Certificate {
    /// Reads a certificate in DER form.
    ///
    /// # Errors
    /// It is malformed, or names no identity or several.
    pub fn read(der: &[u8]) -> Result<Self, Refusal> {
        let (rest, parsed) = X509Certificate::from_der(der).map_err(|error| malformed(&error))?;
        if !rest.is_empty() {
            return Err(malformed(&"bytes follow it"));
        }
        Ok(Self {
            identity: identity_of(&parsed)?,
            serial: Serial::from_bytes(parsed.raw_serial()).map_err(|error| malformed(&error))?,
            not_before_s: seconds(parsed.validity().not_before)?,
            not_after_s: seconds(parsed.validity().not_after)?,
        })
    }

    /// Whether less than a third of its time is left, so that it should be renewed.
    #[must_use]
    pub const fn is_due(&self, now: UnixTime) -> bool {
        is_due(self.not_before_s, self.not_after_s, now)
    }
}

/// Whether less than a third of a certificate's time is left, so that it should be renewed.
#[must_use]
pub(crate) const fn is_due(not_before_s: u64, not_after_s: u64, now: UnixTime) -> bool {
    let third_s = not_after_s.saturating_sub(not_before_s) / 3;
    now.as_secs() >= not_after_s.saturating_sub(third_s)
}

fn identity_of(parsed: &X509Certificate<'_>) -> Result<Identity, Refusal> {
    let names = parsed.subject_alternative_name().map_err(|error| malformed(&error))?;
    let names = names.map(|names| &names.value.general_names[..]).unwrap_or_default();
    let mut uris = Vec::new();
    for name in names {
        match name {
            GeneralName::URI(uri) => uris.push(*uri),
            // It could be one more URI.
            GeneralName::Invalid(..) => return Err(malformed(&"one of its names")),
            _ => {}
        }
    }
    Ok(Identity::among(uris.into_iter())?)
}

/// Seconds since 1970.
pub(crate) fn seconds(time: ASN1Time) -> Result<u64, Refusal> {
    u64::try_from(time.timestamp()).map_err(|_| malformed(&"its time is before 1970"))
}

fn malformed(what: &dyn fmt::Display) -> Refusal {
    let mut text = String::new();
    // Writing to a text does not fail.
    let _ = write!(text, "{what}");
    Refusal::Malformed(plain(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials_are_hexadecimal_with_or_without_colons() {
        let serial: Serial = "00:Ab:cd".parse().expect("a serial number");
        assert_eq!(serial.as_bytes(), [0, 0xab, 0xcd]);
        assert_eq!(serial.to_string(), "00abcd");
        assert_eq!(serial.to_string().parse(), Ok(serial));
        for text in ["", ":", "a", "0g", "node-a", "+1", "\u{e4}a", &"ab".repeat(33)] {
            assert!(text.parse::<Serial>().is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_that_are_no_certificate_are_refused() {
        for bytes in [&[][..], b"0", &[0x30, 0x82, 0xff, 0xff], &[0xff; 100]] {
            assert!(matches!(Certificate::read(bytes), Err(Refusal::Malformed(_))));
        }
    }
}
