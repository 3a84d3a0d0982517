//! The record layer of TLS 1.3 (RFC 8446, section 5) as it is after the handshake: what both ends
//! of a connection between a client and a blade do with bytes. The handshake is rustls's
//! (`farpool-handshake`), in a process that may hold a certificate's key; its [`Secrets`] are then
//! all that is needed, so that a pager inside any program can go on by itself.
//!
//! Pure: buffers in, buffers out, no I/O, no clock, and no allocation after a buffer was made.
//!
//! Invariants:
//! - A key seals each number once: numbers grow by one with each record and end at
//!   [`RECORDS_LIMIT`], where sealing fails. [`Secrets`] are neither cloned nor used twice.
//! - Nothing of a record is given out before its tag was verified. After the first record that
//!   does not fit, nothing is opened any more.
//! - Only data is spoken: there is no key update and no ticket (a connection that is worn is made
//!   anew), and an alert ends the connection.

#![warn(missing_docs)]

mod incoming;
mod key;
mod outgoing;

pub use incoming::Incoming;
pub use key::{Cipher, SECRETS_BYTES, Secrets, TrafficKey};
pub use outgoing::Outgoing;

/// A record's header in bytes: type, version, length.
pub const HEADER_BYTES: usize = 5;
/// The tag of every cipher of TLS 1.3, in bytes.
pub const TAG_BYTES: usize = 16;
/// Most content of one record, in bytes (RFC 8446, 5.1).
pub const CONTENT_LIMIT_BYTES: usize = 1 << 14;
/// Most bytes behind the header of a sealed record (RFC 8446, 5.2): content, its type, padding and
/// tag.
pub const BODY_LIMIT_BYTES: usize = CONTENT_LIMIT_BYTES + 256;
/// Most records under one key, below the bound that RFC 8446, 5.5 has for AES-GCM (2^24.5). The
/// connection is made anew before.
pub const RECORDS_LIMIT: u64 = 1 << 24;
/// Records after which a connection should be replaced, long before it has to.
pub const RECORDS_WORN: u64 = RECORDS_LIMIT / 2;

/// The type of a record with content, outside of all sealed ones and inside of those with data.
const TYPE_DATA: u8 = 23;
const TYPE_ALERT: u8 = 21;
/// The version that every record names (RFC 8446, 5.1).
const VERSION: [u8; 2] = [3, 3];
/// The alert by which a peer ends a connection in order.
const CLOSE_NOTIFY: u8 = 0;

/// Why a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// What was received was changed, repeated, left out, or never sealed with this key.
    #[error("a record does not fit its seal: it was damaged or forged on the way")]
    Seal,
    /// It is no sealed record, or one of an impossible length.
    #[error("the peer sent something other than a record of TLS 1.3")]
    Malformed,
    /// A message of the handshake, which neither end sends after it.
    #[error("the peer sent a record of type {0}, which is not expected after the handshake")]
    Unexpected(u8),
    /// The peer ended the connection in order.
    #[error("the peer ended the connection")]
    Closed,
    /// The peer ended the connection, with a reason of TLS.
    #[error("the peer ended the connection: {}", alert_text(*.0))]
    Alert(u8),
    /// The key has sealed as many records as it may.
    #[error("the connection's key is used up")]
    Worn,
}

/// What an alert says, for those that are about certificates (RFC 8446, 6).
fn alert_text(alert: u8) -> &'static str {
    match alert {
        42 | 43 | 46 => "this certificate may not do that; its own log says why",
        44 => "this certificate was revoked; issue another (farpool pki issue)",
        45 => "this certificate's time is not now; renew it (farpool pki renew)",
        48 => {
            "it does not trust the authority of this certificate; both sides need ca.crt of the \
             same rack"
        }
        116 => "it requires a certificate, and none was shown",
        _ => "an alert of TLS",
    }
}
