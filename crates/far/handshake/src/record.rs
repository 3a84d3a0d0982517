//! One record of a handshake, as it arrives in pieces.

use farpool_record::{BODY_LIMIT_BYTES, HEADER_BYTES};

/// The types of records (RFC 8446, 5.1): change of cipher, alert, handshake, data.
const TYPES: std::ops::RangeInclusive<u8> = 20..=23;
/// The first byte of a version of TLS.
const MAJOR: u8 = 3;

/// What arrived is no record of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRecord;

/// The record that is arriving.
#[derive(Debug, Default)]
pub(crate) struct Record {
    bytes: Vec<u8>,
}

impl Record {
    /// How many bytes of it are still missing, as far as that is known; 0 once it is complete.
    pub(crate) fn missing_bytes(&self) -> Result<usize, NoRecord> {
        if self.bytes.first().is_some_and(|kind| !TYPES.contains(kind))
            || self.bytes.get(1).is_some_and(|major| *major != MAJOR)
        {
            return Err(NoRecord);
        }
        let Some(header) = self.bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(HEADER_BYTES - self.bytes.len());
        };
        let body_bytes = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if body_bytes > BODY_LIMIT_BYTES {
            return Err(NoRecord);
        }
        Ok(HEADER_BYTES + body_bytes - self.bytes.len())
    }

    /// Adds what arrived, of which nothing belongs to the next record.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Gives the complete record away; the next one begins.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_ends_where_it_says() {
        let mut record = Record::default();
        assert_eq!(record.missing_bytes(), Ok(HEADER_BYTES));
        record.add(&[22, 3, 1, 0]);
        assert_eq!(record.missing_bytes(), Ok(1));
        record.add(&[2]);
        assert_eq!(record.missing_bytes(), Ok(2));
        record.add(b"ab");
        assert_eq!(record.missing_bytes(), Ok(0));
        assert_eq!(record.take(), [22, 3, 1, 0, 2, b'a', b'b']);
        assert_eq!(record.missing_bytes(), Ok(HEADER_BYTES));
    }

    #[test]
    fn what_is_no_record_is_known_by_its_first_bytes() {
        for bytes in [&b"F"[..], b"GET /", &[22, 2], &[19], &[24], &[22, 3, 3, 0xff, 0xff]] {
            let mut record = Record::default();
            record.add(bytes);
            assert_eq!(record.missing_bytes(), Err(NoRecord), "{bytes:?}");
        }
    }
}
