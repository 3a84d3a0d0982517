//! A datagram's size and version, and why a datagram is refused.

use thiserror::Error;

/// Bytes of the largest datagram: it fits an Ethernet frame with room for tunnels, so nothing is
/// fragmented. A larger one is refused; the encoder never makes one.
pub const DATAGRAM_BYTES_MAX: usize = 1_400;

/// Version of the layout; a datagram of another version is refused.
pub const VERSION: u8 = 1;

/// Why a datagram was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum DecodeError {
    /// Longer than [`DATAGRAM_BYTES_MAX`].
    #[error("datagram of {0} bytes is longer than {DATAGRAM_BYTES_MAX}")]
    Long(usize),
    /// Ends too early.
    #[error("datagram ends too early")]
    Short,
    /// Goes on after its end.
    #[error("datagram goes on after its end")]
    Trailing,
    /// Not a datagram of this protocol.
    #[error("not a collaboration datagram")]
    Magic,
    /// Another layout.
    #[error("version {0} is not spoken here, only {VERSION}")]
    Version(u8),
    /// Damaged.
    #[error("checksum is wrong")]
    Checksum,
    /// Unknown kind.
    #[error("kind {0} is not known")]
    Kind(u8),
    /// A field outside its range.
    #[error("{0} is out of range")]
    Field(&'static str),
}
