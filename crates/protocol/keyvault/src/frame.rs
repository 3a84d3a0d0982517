//! One frame: a header of 16 bytes and a body. Little-endian throughout.
//!
//! ```text
//!      0   u24  length of the frame in bytes, this header included
//!      3   u8   opcode; bit 7 is set in answers
//!      4   u16  shard (12 bits), status (4 bits, of answers)
//!      6   u16  connection: assigned in the server's answer to HELLO, 0 before
//!      8   u32  request: the sender's number, which the answer repeats
//!     12   u32  CRC-32C of the bytes before it and of the body, or 0 if both sides agreed on none
//! ```

use farpool_units::exactly;

use crate::checksum::checksum;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;
/// The longest frame that 24 bits can express. A longer value needs the text protocol.
pub const FRAME_BYTES_MAX: usize = (1 << 24) - 1;
/// The most shards that can be addressed; the highest number means all of them.
pub const SHARDS_MAX: u16 = 0xfff;
/// The shard number that means every shard.
pub const BROADCAST: u16 = 0xfff;
/// The version of the protocol, sent in HELLO.
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
            /// All values.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Returns the value of a code, or None if it is unknown.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

codes! {
    /// The kind of a request.
    Opcode {
        /// Introduces the client; the first frame of a connection.
        Hello = 0x01,
        /// Does nothing: its answer confirms that earlier requests have arrived.
        Noop = 0x02,
        /// Reads an item.
        Get = 0x10,
        /// Several keys of one shard at once.
        MultiGet = 0x11,
        /// Reads an item and sets its expiry.
        GetAndTouch = 0x12,
        /// As `Get`, but the answer may tell where the value is instead of carrying it.
        GetLease = 0x13,
        /// Ends leases, whose values are no longer read.
        Release = 0x14,
        /// Stores an item.
        Set = 0x20,
        /// Takes an item out.
        Delete = 0x21,
        /// Sets the expiry of an item.
        Touch = 0x22,
        /// Adds to or subtracts from a number.
        Change = 0x23,
        /// Deletes all items.
        Flush = 0x30,
        /// Moves the connection into shared memory; unix sockets only.
        Share = 0x40,
        /// Grants read access to the memory of the shard's items; unix sockets only, before
        /// `Share`.
        Leases = 0x41,
    }
}

codes! {
    /// The result of a request.
    Status {
        /// It was done.
        Ok = 0,
        /// There is no such item.
        NotFound = 1,
        /// The item has another CAS number.
        Exists = 2,
        /// The mode did not allow it (add to an existing item, append to none).
        NotStored = 3,
        /// The value is longer than the server allows.
        TooLarge = 4,
        /// There is no room for it.
        OutOfMemory = 5,
        /// The value is not a number.
        NotNumeric = 6,
        /// The checksum is wrong: retry.
        Damaged = 7,
        /// The frame is invalid; the connection is closed.
        Malformed = 8,
        /// The server does not know the opcode or the version.
        Unsupported = 9,
        /// Another shard owns the key and the frame asked not to be forwarded; the body holds its
        /// number.
        WrongShard = 10,
        /// The server is shutting down.
        Closing = 11,
    }
}

/// A frame's header, without its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the whole frame, header included.
    pub length: u32,
    /// What is asked or answered.
    pub opcode: Opcode,
    /// None in a request.
    pub status: Option<Status>,
    /// The shard that is asked, or that answers.
    pub shard: u16,
    /// The number of the connection in its shard.
    pub connection: u16,
    /// The number that the client gave the request.
    pub request: u32,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A length below that of a header.
    #[error("a frame of {length} bytes is shorter than its header")]
    TooShort {
        /// The length that the frame claims.
        length: u32,
    },
    /// An opcode that this version does not have.
    #[error("opcode {code:#04x} is unknown")]
    Opcode {
        /// What stood there.
        code: u8,
    },
    /// A status that this version does not have.
    #[error("status {code} is unknown")]
    Status {
        /// What stood there.
        code: u8,
    },
    /// Bytes that changed on the way.
    #[error("the checksum of request {request} is wrong")]
    Checksum {
        /// The number of the request.
        request: u32,
    },
    /// A body that does not fit its opcode.
    #[error("the body of {opcode:?} is malformed")]
    Body {
        /// The opcode of the frame.
        opcode: Opcode,
    },
}

/// Returns the length of the frame that begins with these bytes, or None if there are fewer than 4.
///
/// A length below [`HEADER_BYTES`] is an error: the rest of the stream cannot be parsed.
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
    /// Reads the header of a whole frame. The checksum is verified if `checked`.
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

    /// Returns the header as bytes, with a checksum of 0.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        with_sum(self.words(), 0)
    }
}

/// Appends a whole frame with this body; sets the header's `length`.
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

/// Begins a frame in `out`; append the body, then call [`finish`]. Returns where the frame starts.
///
/// The header's `length` is set by `finish`.
pub fn begin(out: &mut Vec<u8>, header: Header) -> usize {
    let start = out.len();
    out.extend_from_slice(&header.to_bytes());
    start
}

/// Completes the frame that began at `start`: its length, and its checksum if `checked`.
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

/// Returns a header's words, and its checksum.
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
            // Every single flipped bit is detected.
            if checked {
                let at = flip.0.index(frame.len());
                frame[at] ^= 1 << (flip.1 % 8);
                prop_assert!(Header::read(frame, true).is_err());
            }
        }
    }
}
