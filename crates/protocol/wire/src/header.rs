//! The 32-byte header that begins every frame, and the split of a byte stream into heads.
//!
//! ```text
//!  0 magic u32 | 4 version u8 | 5 opcode u8 | 6 flags u16 | 8 request id u64
//! 16 meta bytes u16 | 18 pages u16 | 20 credits u16 | 22 reserved u16 | 24 pages checksum u32 | 28
//! header checksum u32
//! ```
//!
//! The header has a checksum of its own, so that no length is used unverified: a receiver that
//! believed a damaged one would wait for bytes that never come. A meta is followed by its checksum,
//! which covers the header, too.

use farpool_units::{PAGE_BYTES, exactly};

use crate::checksum::{header_checksum, meta_checksum};
use crate::codec::{Append, within};
use crate::{
    HEADER_BYTES, META_CHECKSUM_BYTES, META_LIMIT_BYTES, PAGES_PER_FRAME_LIMIT, PROTOCOL_VERSION,
    RequestId, WireError,
};

/// "FPLW" in wire order.
const MAGIC: u32 = u32::from_le_bytes(*b"FPLW");
const FLAG_RESPONSE: u16 = 1;
const FLAG_ERROR: u16 = 2;
const FLAG_BACKGROUND: u16 = 4;
/// Where the header's checksum begins; it covers all bytes before it.
const CHECKSUM_OFFSET: usize = 28;

macro_rules! opcodes {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        /// The kind of a request; its response has the same.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum Opcode { $($(#[$doc])* $name = $number,)* }

        impl Opcode {
            /// Every opcode, for tests and tables.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$name,)*];

            /// Returns the opcode of a number on the wire.
            pub fn from_number(number: u8) -> Option<Self> {
                match number { $($number => Some(Opcode::$name),)* _ => None }
            }

            /// Returns the number on the wire.
            pub fn number(self) -> u8 {
                match self { $(Opcode::$name => $number,)* }
            }
        }
    };
}

opcodes! {
    /// Opens a connection.
    Hello = 1;
    /// Creates an empty segment.
    CreateSegment = 2;
    /// Allocates memory to superpages of a segment.
    AllocateSuperpages = 3;
    /// Frees the memory of superpages of a segment.
    FreeSuperpages = 4;
    /// Makes a segment immutable and shareable.
    Freeze = 5;
    /// Makes a frozen segment writable for its only user.
    Thaw = 6;
    /// Becomes a user of a frozen segment.
    Attach = 7;
    /// Stops being a user of a segment; the last one frees it.
    Detach = 8;
    /// Lists the superpages of a segment that have memory.
    ListSuperpages = 9;
    /// Discards the content of pages, keeping their superpages.
    Discard = 10;
    /// Reads pages.
    Read = 11;
    /// Writes pages.
    Write = 12;
    /// Asks for the segment's memory as a file descriptor.
    ShmMap = 13;
    /// Asks for the blade's counters.
    Stat = 14;
    /// Asks for an answer.
    Ping = 15;
    /// Ends the client: all its memory is freed at once.
    Goodbye = 16;
    /// Reports how many pages the client moved without the blade's help.
    Report = 17;
}

/// A frame's direction and outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// From client to blade.
    Request,
    /// From blade to client, the request was carried out.
    Response,
    /// From blade to client, the request was refused and changed nothing.
    Error,
}

/// How urgent a request is, the most urgent first: what a blade serves first when it has a choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(usize)]
pub enum Priority {
    /// A thread waits for the answer: reads, and control requests.
    Demand,
    /// Memory waits to be free again: writes.
    Eviction,
    /// Nobody waits: what moves and verifies memory.
    Background,
}

impl Priority {
    /// Every priority, the most urgent first.
    pub const ALL: &'static [Priority] =
        &[Priority::Demand, Priority::Eviction, Priority::Background];
}

/// A frame's header, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The request's kind.
    pub opcode: Opcode,
    /// Direction and outcome.
    pub kind: Kind,
    /// In requests: nobody waits for the answer. In responses: false.
    pub is_background: bool,
    /// Number of the request; the response has the same.
    pub request_id: RequestId,
    /// Bytes between header and pages, without their checksum.
    pub meta_bytes: u16,
    /// Pages after the meta.
    pub page_count: u16,
    /// In responses: how many requests the client may have in flight on this connection from now
    /// on. In requests: 0.
    pub credits: u16,
    /// Checksum over the pages; 0 when there are none.
    pub pages_checksum: u32,
}

/// A frame's header and meta, verified against their checksums. Pages follow in the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head<'a> {
    /// The header.
    pub header: Header,
    /// The fields of the request or response.
    pub meta: &'a [u8],
}

impl Header {
    /// Returns the bytes of the pages that follow the meta.
    pub fn pages_bytes(&self) -> usize {
        usize::from(self.page_count) * PAGE_BYTES
    }

    /// Returns the bytes of header and meta, with the checksums of both.
    pub fn head_bytes(&self) -> usize {
        let checksum_bytes = if self.meta_bytes > 0 { META_CHECKSUM_BYTES } else { 0 };
        HEADER_BYTES + usize::from(self.meta_bytes) + checksum_bytes
    }

    /// Returns how urgent the request is.
    pub fn priority(&self) -> Priority {
        match self.opcode {
            _ if self.is_background => Priority::Background,
            Opcode::Write => Priority::Eviction,
            _ => Priority::Demand,
        }
    }

    /// Decodes and validates a header.
    ///
    /// # Errors
    /// It is damaged, or a field is not allowed in this version. Magic and version are checked
    /// first, then the checksum.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        check_prefix(bytes)?;
        if header_checksum(&bytes[..CHECKSUM_OFFSET]) != u32_at(CHECKSUM_OFFSET) {
            return Err(WireError::HeadChecksum);
        }
        let opcode = Opcode::from_number(bytes[5]).ok_or(WireError::Opcode { found: bytes[5] })?;
        let (kind, is_background) = kind_of(u16_at(6))?;
        let request_id = RequestId(u64::from(u32_at(8)) | u64::from(u32_at(12)) << 32);
        let header = Header {
            opcode,
            kind,
            is_background,
            request_id,
            meta_bytes: u16_at(16),
            page_count: u16_at(18),
            credits: u16_at(20),
            pages_checksum: u32_at(24),
        };
        if u16_at(22) != 0 {
            return Err(WireError::Reserved);
        }
        header.validate()?;
        Ok(header)
    }

    fn validate(&self) -> Result<(), WireError> {
        within("meta length", u64::from(self.meta_bytes), META_LIMIT_BYTES as u64)?;
        within("page count", u64::from(self.page_count), u64::from(PAGES_PER_FRAME_LIMIT))?;
        let may_have_pages = matches!(
            (self.opcode, self.kind),
            (Opcode::Write, Kind::Request) | (Opcode::Read, Kind::Response)
        );
        if self.page_count > 0 && !may_have_pages {
            return Err(WireError::PageCount { expected: 0, found: u64::from(self.page_count) });
        }
        if self.page_count == 0 && self.pages_checksum != 0 {
            return Err(WireError::Value { what: "pages checksum" });
        }
        if self.kind == Kind::Request && self.credits != 0 {
            return Err(WireError::Value { what: "credits" });
        }
        Ok(())
    }

    /// Appends the header's first 28 bytes and space for its checksum; [`seal`] completes it.
    pub(crate) fn append(&self, out: &mut Vec<u8>) {
        out.put_u32(MAGIC);
        out.extend_from_slice(&[PROTOCOL_VERSION, self.opcode.number()]);
        out.put_u16(match self.kind {
            Kind::Request if self.is_background => FLAG_BACKGROUND,
            Kind::Request => 0,
            Kind::Response => FLAG_RESPONSE,
            Kind::Error => FLAG_RESPONSE | FLAG_ERROR,
        });
        out.put_u64(self.request_id.0);
        out.put_u16(self.meta_bytes);
        out.put_u16(self.page_count);
        out.put_u16(self.credits);
        out.put_u16(0);
        out.put_u32(self.pages_checksum);
        out.put_u32(0);
    }
}

/// Checks magic and version, if received: the bytes that no version ever changes.
fn check_prefix(bytes: &[u8]) -> Result<(), WireError> {
    let Some((magic, rest)) = bytes.split_first_chunk::<4>() else {
        return Ok(());
    };
    let magic = u32::from_le_bytes(*magic);
    if magic != MAGIC {
        return Err(WireError::Magic { found: magic });
    }
    match rest.first() {
        Some(&found) if found != PROTOCOL_VERSION => Err(WireError::Version { found }),
        _ => Ok(()),
    }
}

/// Returns the kind, and whether it is in the background.
fn kind_of(flags: u16) -> Result<(Kind, bool), WireError> {
    match flags {
        0 => Ok((Kind::Request, false)),
        FLAG_BACKGROUND => Ok((Kind::Request, true)),
        FLAG_RESPONSE => Ok((Kind::Response, false)),
        f if f == FLAG_RESPONSE | FLAG_ERROR => Ok((Kind::Error, false)),
        found => Err(WireError::Flags { found }),
    }
}

/// Appends one frame's head to `out`: header, then what `meta` appends, then fills in the checksum.
/// On an error `out` is unchanged.
pub(crate) fn append_head(
    out: &mut Vec<u8>,
    mut header: Header,
    meta: impl FnOnce(&mut Vec<u8>),
) -> Result<(), WireError> {
    let start = out.len();
    header.append(out);
    meta(out);
    let meta_bytes = out.len() - start - HEADER_BYTES;
    let checked = within("meta length", meta_bytes as u64, META_LIMIT_BYTES as u64);
    let checked = checked.and_then(|()| {
        header.meta_bytes = exactly(meta_bytes);
        header.validate()
    });
    if let Err(error) = checked {
        out.truncate(start);
        return Err(error);
    }
    if let Some(checksum) = seal(&mut out[start..], header.meta_bytes) {
        out.put_u32(checksum);
    }
    Ok(())
}

/// Fills in the meta length and the header's checksum in `head`, a header and its meta. Returns the
/// checksum of the meta, unless that is empty.
fn seal(head: &mut [u8], meta_bytes: u16) -> Option<u32> {
    let (header, meta) = head.split_at_mut(HEADER_BYTES);
    header[16..18].copy_from_slice(&meta_bytes.to_le_bytes());
    let checksum = header_checksum(&header[..CHECKSUM_OFFSET]);
    header[CHECKSUM_OFFSET..].copy_from_slice(&checksum.to_le_bytes());
    (!meta.is_empty()).then(|| meta_checksum(header, meta))
}

/// Splits the next head off the bytes received. `Ok(None)`: more bytes are needed (at most
/// [`crate::HEAD_LIMIT_BYTES`] in total). On success the head took `head.header.head_bytes()` bytes
/// of `received` and `head.header.pages_bytes()` bytes of pages follow.
///
/// # Errors
/// The rest of the stream cannot be parsed; close the connection. [`WireError::Version`] may be
/// answered first.
pub fn split_head(received: &[u8]) -> Result<Option<Head<'_>>, WireError> {
    let Some((header_bytes, rest)) = received.split_first_chunk::<HEADER_BYTES>() else {
        check_prefix(received)?; // a peer of another kind may be waiting for an answer
        return Ok(None);
    };
    let header = Header::decode(header_bytes)?;
    if header.meta_bytes == 0 {
        return Ok(Some(Head { header, meta: &[] }));
    }
    let Some((meta, checksum)) = rest
        .split_at_checked(usize::from(header.meta_bytes))
        .and_then(|(meta, rest)| Some((meta, rest.first_chunk::<META_CHECKSUM_BYTES>()?)))
    else {
        return Ok(None);
    };
    if meta_checksum(header_bytes, meta).to_le_bytes() != *checksum {
        return Err(WireError::HeadChecksum);
    }
    Ok(Some(Head { header, meta }))
}
