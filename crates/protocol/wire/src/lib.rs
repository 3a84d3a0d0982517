//! Farpool's wire protocol: encodes and decodes frames, without I/O or a clock.
//!
//! A frame is a 32-byte header, then *meta* (the fixed fields and lists of one request or
//! response), then whole pages. docs/contributors/protocol.md describes every byte; tests/vectors
//! pins it.
//!
//! Invariants:
//! - All numbers are little-endian; nothing here depends on the host's byte order or alignment.
//! - The header's checksum is verified before any length is used, and the meta's, which covers the
//!   header too, before any page byte is received. So a damaged length is never waited for, and
//!   pages may be received straight into the place that the meta names.
//! - The pages' checksum is in the header (so the header's checksum covers it too) and is computed
//!   over scattered slices.
//! - Encoding appends to a caller's `Vec`; decoding borrows from the caller's buffer. Neither
//!   allocates once the `Vec` has grown, so both may run on a pager thread.
//! - Decoding never panics and accepts nothing that encoding could not have produced.
//!
//! A reader usually calls [`split_head`] on the bytes received, then [`Request::decode`] or
//! [`Response::decode`], then `header.page_count` pages checked with [`PagesChecksum`].
//!
//! Rejected: one checksum at the end of the frame (pages would have to be staged until it is
//! known); a checksum per page (4 bytes a page for no gain, as a bad frame ends the connection
//! anyway); variable-length integers (branches per field).

#![warn(missing_docs)]

mod address;
mod checksum;
mod codec;
mod error;
mod header;
mod ids;
mod request;
mod response;
mod stat;

pub use address::{Address, AddressError, FailureDomain, SOCKET_PATH_LIMIT_BYTES};
pub use checksum::PagesChecksum;
pub use error::{ErrorCode, WireError};
pub use header::{Head, Header, Kind, Opcode, Priority, split_head};
pub use ids::{
    ClientId, Grant, GrantKey, PageNumber, RequestId, SegmentId, SegmentToken, SharingGroup,
    SuperpageNumber,
};
pub use request::{Extent, Hello, Purpose, Request, pages_in};
pub use response::{Attached, HelloOk, Response, SegmentState, SuperpagePair};
pub use stat::{BladeTotals, ClientUsage};

/// The protocol's version, in every header. A blade refuses another one with
/// [`ErrorCode::VersionMismatch`].
pub const PROTOCOL_VERSION: u8 = 3;
/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 32;
/// The most meta bytes of a frame: bounds every receiver's head buffer. A longer list is sent in
/// several requests.
pub const META_LIMIT_BYTES: usize = 32 << 10;
/// Bytes of the checksum that follows a meta.
pub const META_CHECKSUM_BYTES: usize = 4;
/// The most bytes of header and meta together: a buffer of this size holds any head.
pub const HEAD_LIMIT_BYTES: usize = HEADER_BYTES + META_LIMIT_BYTES + META_CHECKSUM_BYTES;
/// The most pages of a frame (4 MiB): bounds how long one request occupies a connection. A blade
/// may advertise less.
pub const PAGES_PER_FRAME_LIMIT: u16 = 1024;
/// The most extents of a read or write: one per page.
pub const EXTENTS_LIMIT: usize = PAGES_PER_FRAME_LIMIT as usize;
/// The most extents of a discard, which carries no pages.
pub const DISCARD_EXTENTS_LIMIT: usize = 4000;
/// The most superpages of one allocate or free request (64 GiB), so that the answer fits a meta.
pub const SUPERPAGES_PER_REQUEST_LIMIT: u32 = 4000;
/// The most superpages that a segment can span: 2^20 of them hold the 2^32 pages that page numbers
/// can address.
pub const SPAN_LIMIT_SUPERPAGES: u32 = 1 << 20;
/// The most bytes of a client's name; a longer one is refused. Enough for a program's name (the
/// kernel keeps 15).
pub const NAME_LIMIT_BYTES: usize = 32;

const _: () = assert!(META_LIMIT_BYTES <= u16::MAX as usize);
const _: () = assert!(16 + 8 * DISCARD_EXTENTS_LIMIT <= META_LIMIT_BYTES);
const _: () = assert!(16 + 8 * SUPERPAGES_PER_REQUEST_LIMIT as usize <= META_LIMIT_BYTES);
