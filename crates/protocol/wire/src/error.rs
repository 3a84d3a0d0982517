//! Errors in bytes ([`WireError`], ends the connection) and in a request ([`ErrorCode`], answered).

use thiserror::Error;

/// Bytes that are not a frame of this protocol. The rest of the stream cannot be parsed: close the
/// connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum WireError {
    /// The first four bytes are not the protocol's.
    #[error(
        "the bytes received are not Farpool frames (magic {found:#010x}); check the address and \
         the port"
    )]
    Magic {
        /// The four bytes received.
        found: u32,
    },
    /// The peer speaks another version.
    #[error(
        "the peer speaks protocol version {found}, this program version {}; use the same release \
         on both sides",
        crate::PROTOCOL_VERSION
    )]
    Version {
        /// The peer's version.
        found: u8,
    },
    /// An unknown opcode.
    #[error("a frame has the unknown opcode {found}")]
    Opcode {
        /// The opcode received.
        found: u8,
    },
    /// Unknown flag bits, or an invalid combination.
    #[error("a frame has unknown flags {found:#06x}")]
    Flags {
        /// All flag bits of the header.
        found: u16,
    },
    /// A reserved field is not zero.
    #[error("a reserved field of a frame is not zero")]
    Reserved,
    /// A length, count or list exceeds its limit.
    #[error("a frame's {what} is {found}, over the limit of {limit}")]
    TooLarge {
        /// The field.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The most allowed.
        limit: u64,
    },
    /// Meta too short or too long for its opcode, or a list that does not fill it.
    #[error("a frame's meta has the wrong length for its opcode")]
    Length,
    /// The number of pages in the frame differs from that in its meta.
    #[error("a frame carries {found} pages, but its meta asks for {expected}")]
    PageCount {
        /// Pages the meta names.
        expected: u64,
        /// Pages the header announces.
        found: u64,
    },
    /// A value outside its type's range (an unknown enum number, an empty extent, a name that is
    /// not UTF-8, ...).
    #[error("a frame's {what} has a value that the protocol does not know")]
    Value {
        /// The field.
        what: &'static str,
    },
    /// Header and meta do not match their checksum.
    #[error("a frame's head was damaged on the way (checksum)")]
    HeadChecksum,
    /// Pages do not match their checksum.
    #[error("a frame's pages were damaged on the way (checksum)")]
    PagesChecksum,
    /// A request in place of a response, or the reverse.
    #[error("a frame has the wrong direction (request in place of a response or the reverse)")]
    Direction,
}

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        /// Why a blade refused a request. `detail` identifies the object or limit; its meaning is
        /// in each code's text.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Error)]
        #[repr(u16)]
        pub enum ErrorCode { $($(#[$doc])* #[error($text)] $name = $number,)* }

        impl ErrorCode {
            /// Every code, for tests and tables.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name,)*];

            /// Returns the code of a number on the wire.
            pub fn from_number(number: u16) -> Option<Self> {
                match number { $($number => Some(ErrorCode::$name),)* _ => None }
            }

            /// Returns the number on the wire.
            pub fn number(self) -> u16 {
                match self { $(ErrorCode::$name => $number,)* }
            }
        }
    };
}

error_codes! {
    /// Detail: 0. The connection is closed afterwards.
    BadFrame = 1, "the blade could not read a frame";
    /// Detail: the blade's version. The connection is closed afterwards.
    VersionMismatch = 2, "the blade speaks another protocol version; use the same release on both \
        sides";
    /// Detail: 0. The first request of a connection must be hello, and only the first.
    HelloExpected = 3, "hello must be the first request of a connection, and only the first";
    /// Detail: the segment. Unknown to the blade or not one of this client's: a client cannot tell
    /// the two apart.
    UnknownSegment = 4, "the segment is unknown to the blade; it was freed, or its lease ran out";
    /// Detail: the segment. A frozen segment cannot be written, grown, shrunk or frozen again.
    Frozen = 5, "the segment is frozen and cannot be changed";
    /// Detail: the segment. Attach and thaw need a frozen segment.
    NotFrozen = 6, "the segment is not frozen";
    /// Detail: number of users. Thaw needs exactly one.
    InUse = 7, "the segment has other users";
    /// Detail: the first page (read, write, discard) or superpage (free) that has no memory.
    NotAllocated = 8, "no memory is allocated at that place of the segment";
    /// Detail: the first superpage that has memory already.
    AlreadyAllocated = 9, "memory is already allocated at that place of the segment";
    /// Detail: the client's quota in bytes.
    QuotaExceeded = 10, "the client's quota on the blade is used up; ask for a larger one";
    /// Detail: the blade's capacity in bytes.
    BladeFull = 11, "the blade's memory is used up; add a blade or a larger one";
    /// Detail: the segment, or 0. The client may not do this at all.
    NotPermitted = 12, "the client may not do that";
    /// Detail: the limit exceeded.
    TooLarge = 13, "the request is over a limit of the blade";
    /// Detail: the first page or superpage beyond the segment's span.
    OutOfRange = 14, "the request reaches beyond the end of the segment";
    /// Detail: 0. For example shared memory over TCP, or from a backing store that has no
    /// descriptor to pass.
    Unsupported = 15, "the blade or the transport does not have that";
    /// Detail: the limit on clients, connections or segments.
    TooMany = 16, "the blade serves as many clients, connections or segments as it is allowed to";
    /// Detail: the system's error number.
    Backing = 17, "the blade's backing store failed";
    // 18 was never sent: a blade that shuts down closes its connections, as a killed one does.
    /// Detail: the slot's current generation. The connection is closed afterwards.
    Stale = 19, "a newer connection of the client took this one's place";
    /// Detail: the blade's limit on open descriptors.
    NoDescriptors = 20, "the blade has no descriptor left for a segment; start it with a higher \
        limit (ulimit -n, LimitNOFILE=)";
    /// Detail: 0. Hello's grant is missing where one is needed, unknown, revoked, or not the one
    /// that the client used before: a client cannot tell these apart. The connection is closed
    /// afterwards.
    NotGranted = 21, "the client has no grant of memory there, or it was revoked; \
        whoever gave it may give a new one";
    /// Detail: the grant's epoch on the blade. Hello's is older: the grant has since gone to
    /// another client. The connection is closed afterwards.
    StaleEpoch = 22, "the grant was issued again since this client got it";
    /// Detail: 0. Over TCP the blade speaks TLS only. It says so in the clear to a peer that does
    /// not, and the connection is closed afterwards.
    CertificateNeeded = 23, "the blade serves over TCP only with certificates; \
        give the folder with yours: --pki DIR (farpool pki issue)";
    /// Detail: 0. Hello's purpose is not open to the role of the client's certificate. The
    /// connection is closed afterwards.
    RoleNotPermitted = 24, "a certificate of this role may look at the blade and borrow nothing; \
        use one of a program (farpool pki issue --role program)";
}
