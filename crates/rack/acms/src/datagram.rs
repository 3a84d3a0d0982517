//! A datagram's size, version and the places in its header that its MAC needs, and why a datagram
//! is refused.

use thiserror::Error;

/// Bytes of the largest datagram: it fits an Ethernet frame with room for tunnels, so nothing is
/// fragmented. A larger one is refused; the encoder never makes one.
pub const DATAGRAM_BYTES_MAX: usize = 1_400;

/// Version of the layout; a datagram of another version is refused.
pub const VERSION: u8 = 2;

/// Bytes before the body.
pub const HEADER_BYTES: usize = 68;
/// Where the number of the key stands in the header.
pub(crate) const KEY_AT: usize = MAC_AT - 4;
/// Where the MAC stands: last in the header.
pub(crate) const MAC_AT: usize = HEADER_BYTES - MAC_BYTES;
/// Bytes of the MAC: the first 128 bits of HMAC-SHA-256.
pub const MAC_BYTES: usize = 16;

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
    #[error(
        "it has version {0} of the datagrams, this node has {VERSION}: \
         all nodes of a cluster need the same release of farpool"
    )]
    Version(u8),
    /// Damaged.
    #[error("checksum is wrong")]
    Checksum,
    /// Not signed, but this node has a rack key.
    #[error("its sender has no rack key: all nodes of a cluster need the same one")]
    Unsigned,
    /// Signed, but this node has no rack key.
    #[error("its sender has a rack key and this node has none: start it with --rack-key-file")]
    Signed,
    /// Signed with a key of this number, which this node does not have.
    #[error("it is signed with rack key {0:08x}, which is not one of this node's keys")]
    UnknownKey(u32),
    /// The number of the key is known, but the MAC is not that of the datagram.
    #[error("its MAC is wrong: it was forged or damaged")]
    Forged,
    /// Its sender's life is so many seconds later than any that began until now.
    #[error(
        "its sender's life begins {0} s in the future: \
         the sender's clock or this node's is wrong"
    )]
    Ahead(u64),
    /// Unknown kind.
    #[error("kind {0} is not known")]
    Kind(u8),
    /// A field outside its range.
    #[error("{0} is out of range")]
    Field(&'static str),
}
