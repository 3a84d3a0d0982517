//! One frame: a header of 16 bytes and a body. Little-endian throughout.
//!
//! ```text
//!      0   u24  length of the frame in bytes, this header included
//!      3   u8   opcode; bit 7 says that it is an answer
//!      4   u16  shard (12 bits), status (4 bits, of answers)
//!      6   u16  connection: given by the server in its answer to HELLO, 0 before
//!      8   u32  request: the sender's number, which the answer repeats
//!     12   u32  CRC-32C of the bytes before it and of the body, or 0 where both sides agreed on none
//! ```

use farpool_units::exactly;

use crate::checksum::checksum;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;
/// The longest frame: what 24 bits can say. A longer value needs the text protocol.
pub const FRAME_BYTES_MAX: usize = (1 << 24) - 1;
/// The most shards that can be told apart; the highest number means all of them.
pub const SHARDS_MAX: u16 = 0xfff;
/// The shard number that means every shard.
pub const BROADCAST: u16 = 0xfff;
/// The version of the protocol, told in HELLO.
pub const VERSION: u16 = 1;

const ANSWER: u8 = 0x80;
/// The length in the first word of a header.
const LENGTH_MASK: u64 = 0xff_ffff;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $code:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$variant_doc])* $variant = $code,)+ }

        impl $name {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// None for a code nobody knows.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

codes! {
    /// What is asked.
    Opcode {
        /// Says who one is; the first frame of a connection.
        Hello = 0x01,
        /// Does nothing: its answer says that what was sent before has arrived.
        Noop = 0x02,
        Get = 0x10,
        /// Several keys of one shard at once.
        MultiGet = 0x11,
        /// Reads and sets the expiry.
        GetAndTouch = 0x12,
        /// As `Get`, but the answer may say where the value lies instead of carrying it.
        GetLease = 0x13,
        /// Values that were leased are not read any more.
        Release = 0x14,
        Set = 0x20,
        Delete = 0x21,
        Touch = 0x22,
        /// Adds to or subtracts from a number.
        Change = 0x23,
        /// Everything that is there is gone.
        Flush = 0x30,
        /// Moves the connection into shared memory; unix sockets only.
        Share = 0x40,
        /// Hands out the memory of the shard's items, to be read; unix sockets only, before
        /// `Share`.
        Leases = 0x41,
    }
}

codes! {
    /// How it went.
    Status {
        Ok = 0,
        /// There is no such item.
        NotFound = 1,
        /// The item has another CAS number.
        Exists = 2,
        /// The mode did not allow it (add over an item, append to none).
        NotStored = 3,
        /// Longer than the server allows.
        TooLarge = 4,
        OutOfMemory = 5,
        /// The value is no number.
        NotNumeric = 6,
        /// The checksum is wrong: ask again.
        Damaged = 7,
        /// The frame makes no sense; the connection ends.
        Malformed = 8,
        /// An opcode or a version that the server does not know.
        Unsupported = 9,
        /// Another shard owns the key and the frame asked not to be passed on; its number is in the
        /// body.
        WrongShard = 10,
        /// The server ends.
        Closing = 11,
    }
}

/// A frame's header, without its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Of the whole frame, header included.
    pub length: u32,
    pub opcode: Opcode,
    /// None in a request.
    pub status: Option<Status>,
    pub shard: u16,
    pub connection: u16,
    pub request: u32,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {length} bytes is shorter than its header")]
    TooShort { length: u32 },
    #[error("opcode {code:#04x} is unknown")]
    Opcode { code: u8 },
    #[error("status {code} is unknown")]
    Status { code: u8 },
    #[error("the checksum of request {request} is wrong")]
    Checksum { request: u32 },
    #[error("the body of {opcode:?} is malformed")]
    Body { opcode: Opcode },
}

/// The length of the frame that begins with these bytes; None while fewer than 4 are there.
///
/// A length below [`HEADER_BYTES`] is wrong: the stream cannot be followed any more.
#[must_use]
pub fn frame_length(bytes: &[u8]) -> Option<Result<usize, FrameError>> {
    let first: &[u8; 4] = bytes.first_chunk()?;
    let length = u32::from_le_bytes(*first) & 0xff_ffff;
    if (length as usize) < HEADER_BYTES {
        return Some(Err(FrameError::TooShort { length }));
    }
    Some(Ok(length as usize))
}

/// A frame's header as two little-endian words: its first 8 bytes, and the request's number.
type Words = (u64, u32);

impl Header {
    /// Reads the header of a whole frame. `checked` says whether its checksum counts.
    #[inline(always)]
    pub fn read(frame: &[u8], checked: bool) -> Result<Self, FrameError> {
        let (head, body) = frame
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(FrameError::TooShort { length: exactly(frame.len()) })?;
        let (first, request, sum) = words_of(head);
        if checked && checksum(first, request, [body, b""]) != sum {
            return Err(FrameError::Checksum { request });
        }
        Self::of_words((first, request))
    }

    #[inline(always)]
    fn of_words((first, request): Words) -> Result<Self, FrameError> {
        let [_, _, _, code, _, status, connection, above] = first.to_le_bytes();
        let is_answer = code & ANSWER != 0;
        let code = code & !ANSWER;
        let opcode = Opcode::from_code(code).ok_or(FrameError::Opcode { code })?;
        let status_code = status >> 4;
        let status = if is_answer {
            Some(Status::from_code(status_code).ok_or(FrameError::Status { code: status_code })?)
        } else {
            None
        };
        Ok(Self {
            length: (first & LENGTH_MASK) as u32,
            opcode,
            status,
            shard: (first >> 32 & 0xfff) as u16,
            connection: u16::from_le_bytes([connection, above]),
            request,
        })
    }

    #[inline]
    const fn words(self) -> Words {
        let (answer, status) = match self.status {
            Some(status) => (ANSWER, status as u64),
            None => (0, 0),
        };
        let first = self.length as u64 & LENGTH_MASK
            | ((self.opcode as u8 | answer) as u64) << 24
            | (self.shard as u64 & 0xfff | status << 12) << 32
            | (self.connection as u64) << 48;
        (first, self.request)
    }

    /// The header as bytes, its checksum still 0.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        with_sum(self.words(), 0)
    }
}

/// Appends a whole frame with this body; `length` of the header is set here.
#[inline]
pub fn push(out: &mut Vec<u8>, header: Header, body: [&[u8]; 2], checked: bool) {
    let bytes = HEADER_BYTES + body[0].len() + body[1].len();
    assert!(bytes <= FRAME_BYTES_MAX, "the caller bounds the body");
    let header = Header { length: exactly(bytes), ..header };
    let (first, request) = header.words();
    let sum = if checked { checksum(first, request, body) } else { 0 };
    out.reserve(bytes);
    out.extend_from_slice(&with_sum((first, request), sum));
    out.extend_from_slice(body[0]);
    out.extend_from_slice(body[1]);
}

/// Appends frames to a buffer, each in two steps: [`begin`], the body, [`finish`].
///
/// `begin` returns where the frame starts. `length` of the header is set by `finish`.
pub fn begin(out: &mut Vec<u8>, header: Header) -> usize {
    let start = out.len();
    out.extend_from_slice(&header.to_bytes());
    start
}

/// Completes the frame that began at `start`: its length, and its checksum if both sides want one.
pub fn finish(out: &mut [u8], start: usize, checked: bool) {
    let frame = &mut out[start..];
    assert!(frame.len() <= FRAME_BYTES_MAX, "the caller bounds the body");
    let length: u32 = exactly(frame.len());
    let Some((head, body)) = frame.split_first_chunk_mut::<HEADER_BYTES>() else {
        panic!("a frame begins with its header");
    };
    let (first, request, _) = words_of(head);
    let first = first & !LENGTH_MASK | u64::from(length) & LENGTH_MASK;
    let sum = if checked { checksum(first, request, [body, b""]) } else { 0 };
    *head = with_sum((first, request), sum);
}

/// A header's words, and its checksum.
#[inline(always)]
const fn words_of(head: &[u8; HEADER_BYTES]) -> (u64, u32, u32) {
    let head = u128::from_le_bytes(*head);
    ((head & 0xffff_ffff_ffff_ffff) as u64, (head >> 64 & 0xffff_ffff) as u32, (head >> 96) as u32)
}

#[inline(always)]
fn with_sum((first, request): Words, sum: u32) -> [u8; HEADER_BYTES] {
    (u128::from(first) | u128::from(request) << 64 | u128::from(sum) << 96).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_vector_of_the_documentation() {
        let header = Header {
            length: 0,
            opcode: Opcode::Get,
            status: None,
            shard: 3,
            connection: 7,
            request: 0x0102_0304,
        };
        let mut out = Vec::new();
        let start = begin(&mut out, header);
        out.extend_from_slice(b"key");
        finish(&mut out, start, true);
        assert_eq!(out[..12], [0x13, 0, 0, 0x10, 3, 0, 7, 0, 4, 3, 2, 1]);
        assert_eq!(&out[16..], b"key");
        assert_eq!(out[12..16], crc32c::crc32c(&[&out[..12], b"key"].concat()).to_le_bytes());
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(
            opcode in 0..Opcode::ALL.len(), status in prop::option::of(0..Status::ALL.len()), shard in 0u16..0x1000,
            connection: u16, request: u32, body in prop::collection::vec(any::<u8>(), 0..200), checked: bool, flip: (prop::sample::Index, u8),
        ) {
            let header = Header {
                length: 0, opcode: Opcode::ALL[opcode], status: status.map(|at| Status::ALL[at]), shard, connection, request,
            };
            let mut out = vec![9; 5];
            let start = begin(&mut out, header);
            out.extend_from_slice(&body);
            finish(&mut out, start, checked);
            let frame = &mut out[5..];
            let mut at_once = Vec::new();
            push(&mut at_once, header, [&body[..body.len() / 3], &body[body.len() / 3..]], checked);
            prop_assert_eq!(&*frame, &at_once);
            let length = HEADER_BYTES + body.len();
            prop_assert_eq!(frame_length(frame), Some(Ok(length)));
            let read = Header::read(frame, checked).unwrap();
            prop_assert_eq!(read, Header { length: u32::try_from(length).unwrap(), ..header });
            // Every single flipped bit is found.
            if checked {
                let at = flip.0.index(frame.len());
                frame[at] ^= 1 << (flip.1 % 8);
                prop_assert!(Header::read(frame, true).is_err());
            }
        }
    }
}
