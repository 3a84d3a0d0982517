//! Parsing one request out of a stream of bytes.
//!
//! The parser gets a buffer that begins with a request and returns the request and its length, or
//! how many bytes it needs. It keeps nothing between calls, so bytes may arrive in any pieces. A
//! request is refused as soon as the bytes that decide it are there: nobody makes the server
//! buffer a value that it will not store.

use super::reply::{Head, Refusal, Status};
use crate::command::StoreMode;
use crate::request::ParseLimits;
use farpool_kv_store::item::KEY_BYTES_MAX;

/// The first byte of every request.
pub const MAGIC: u8 = 0x80;
/// The bytes of a header.
pub const HEADER_BYTES: usize = 24;
/// The longest body, memcached's own limit: a longer one is refused, and the connection closed.
const BODY_BYTES_MAX: usize = 1 << 30;
/// The longest name of a SASL mechanism, memcached's own limit: a longer one is refused.
const MECHANISM_BYTES_MAX: usize = 32;
/// The longest SASL message: a name and a password are far shorter. A longer one is refused.
const SASL_BYTES_MAX: usize = 16 << 10;
/// An expiry that forbids INCREMENT and DECREMENT to make an item.
const NEVER_MADE: u32 = u32::MAX;

/// What decides whether a request is taken.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub limits: ParseLimits,
    /// Whether clients authenticate at all.
    pub has_sasl: bool,
    /// Whether this client need not, or has done so.
    pub is_authenticated: bool,
}

/// A read: GET, GETK, TOUCH, GAT, GATK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read<'a> {
    pub key: &'a [u8],
    pub returns_key: bool,
    pub returns_value: bool,
    /// The new expiry time.
    pub exptime: Option<u32>,
}

/// A value to be stored: SET, ADD, REPLACE, APPEND, PREPEND.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store<'a> {
    pub mode: StoreMode,
    pub key: &'a [u8],
    pub value: &'a [u8],
    pub client_flags: u32,
    pub exptime: u32,
    /// The CAS number that the present item must have; 0 = any.
    pub cas: u64,
}

/// A request on one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRequest<'a> {
    Read(Read<'a>),
    Store(Store<'a>),
    Delete {
        key: &'a [u8],
        cas: u64,
    },
    Change {
        key: &'a [u8],
        delta: u64,
        increments: bool,
        cas: u64,
        /// The number and expiry time of the item to make if there is none.
        initial: Option<(u64, u32)>,
    },
}

impl<'a> KeyRequest<'a> {
    #[inline]
    #[must_use]
    pub const fn key(&self) -> &'a [u8] {
        match *self {
            Self::Read(Read { key, .. })
            | Self::Store(Store { key, .. })
            | Self::Delete { key, .. }
            | Self::Change { key, .. } => key,
        }
    }

    /// Whether it replaces the value whatever that is.
    #[must_use]
    pub const fn replaces(&self) -> bool {
        matches!(self, Self::Store(Store { mode: StoreMode::Set, .. }))
    }

    /// Whether it reads and changes nothing.
    #[must_use]
    pub const fn is_plain_read(&self) -> bool {
        matches!(self, Self::Read(Read { exptime: None, .. }))
    }
}

/// A request to the server as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerRequest<'a> {
    Noop,
    Version,
    Quit,
    /// With the delay as given.
    Flush {
        exptime: u32,
    },
    Stat {
        what: &'a [u8],
    },
    Verbosity {
        level: u32,
    },
    ListMechanisms,
    Sasl(SaslStep<'a>),
}

/// A step of authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaslStep<'a> {
    /// Whether it begins an exchange (AUTH), or goes on with one (STEP).
    pub begins: bool,
    pub mechanism: &'a [u8],
    pub message: &'a [u8],
}

/// A parsed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    Key(KeyRequest<'a>),
    Server(ServerRequest<'a>),
    /// Not carried out. The next `skip_bytes` of the stream are its value, to be discarded. `drop`
    /// is the key whose old item must not outlive the refused new one.
    Refused {
        refusal: Refusal,
        skip_bytes: usize,
        drop: Option<&'a [u8]>,
    },
    /// As `Refused`, and the connection ends: where the next request begins is unknown, or none may
    /// follow.
    RefusedForGood(Refusal),
    /// The stream is not of this protocol: the connection ends without a word.
    NoRequest,
}

/// The beginning of the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scan<'a> {
    /// At least this many bytes are needed in all.
    Incomplete {
        want_bytes: usize,
        /// If only the value is not complete: the length of what is before it, and the request as
        /// it is refused if there is no memory to wait for the rest.
        refused: Option<(usize, Head, Request<'a>)>,
    },
    /// A request of this length.
    Request { bytes: usize, head: Head, request: Request<'a> },
}

/// A header's fields.
#[derive(Debug, Clone, Copy)]
struct Header {
    head: Head,
    /// The opcode of the command that is not quiet.
    command: u8,
    key_bytes: usize,
    extras_bytes: usize,
    body_bytes: usize,
    cas: u64,
}

impl Header {
    #[inline]
    fn read(bytes: &[u8; HEADER_BYTES]) -> Self {
        let [_, opcode, key_0, key_1, extras, _, _, _, body @ .., _, _, _, _, _, _, _, _] = *bytes;
        let [body_0, body_1, body_2, body_3, opaque @ ..] = body;
        let [.., c0, c1, c2, c3, c4, c5, c6, c7] = *bytes;
        let (command, is_quiet) = command_of(opcode);
        Self {
            head: Head { opcode, opaque, is_quiet },
            command,
            key_bytes: usize::from(u16::from_be_bytes([key_0, key_1])),
            extras_bytes: usize::from(extras),
            body_bytes: u32::from_be_bytes([body_0, body_1, body_2, body_3]) as usize,
            cas: u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]),
        }
    }

    /// The bytes up to the value.
    const fn value_at(&self) -> usize {
        HEADER_BYTES + self.extras_bytes + self.key_bytes
    }

    const fn value_bytes(&self) -> usize {
        self.body_bytes - self.extras_bytes - self.key_bytes
    }

    /// Whether extras and value have these lengths, and there is a key if one is needed.
    const fn has(&self, extras_bytes: usize, has_key: bool, value_bytes: usize) -> bool {
        self.extras_bytes == extras_bytes
            && (self.key_bytes > 0) == has_key
            && self.value_bytes() == value_bytes
    }
}

mod opcode {
    pub(super) const GET: u8 = 0x00;
    pub(super) const SET: u8 = 0x01;
    pub(super) const ADD: u8 = 0x02;
    pub(super) const REPLACE: u8 = 0x03;
    pub(super) const DELETE: u8 = 0x04;
    pub(super) const INCREMENT: u8 = 0x05;
    pub(super) const DECREMENT: u8 = 0x06;
    pub(super) const QUIT: u8 = 0x07;
    pub(super) const FLUSH: u8 = 0x08;
    pub(super) const GETQ: u8 = 0x09;
    pub(super) const NOOP: u8 = 0x0a;
    pub(super) const VERSION: u8 = 0x0b;
    pub(super) const GETK: u8 = 0x0c;
    pub(super) const GETKQ: u8 = 0x0d;
    pub(super) const APPEND: u8 = 0x0e;
    pub(super) const PREPEND: u8 = 0x0f;
    pub(super) const STAT: u8 = 0x10;
    pub(super) const SETQ: u8 = 0x11;
    pub(super) const FLUSHQ: u8 = 0x18;
    pub(super) const APPENDQ: u8 = 0x19;
    pub(super) const PREPENDQ: u8 = 0x1a;
    pub(super) const VERBOSITY: u8 = 0x1b;
    pub(super) const TOUCH: u8 = 0x1c;
    pub(super) const GAT: u8 = 0x1d;
    pub(super) const GATQ: u8 = 0x1e;
    pub(super) const SASL_LIST: u8 = 0x20;
    pub(super) const SASL_AUTH: u8 = 0x21;
    pub(super) const SASL_STEP: u8 = 0x22;
    pub(super) const GATK: u8 = 0x23;
    pub(super) const GATKQ: u8 = 0x24;
}

/// The command of an opcode, and whether it is the quiet form.
#[inline]
const fn command_of(code: u8) -> (u8, bool) {
    match code {
        opcode::GETQ => (opcode::GET, true),
        opcode::GETKQ => (opcode::GETK, true),
        opcode::GATQ => (opcode::GAT, true),
        opcode::GATKQ => (opcode::GATK, true),
        // SET to FLUSH have their quiet forms in the same order.
        opcode::SETQ..=opcode::FLUSHQ => (code - opcode::SETQ + opcode::SET, true),
        opcode::APPENDQ => (opcode::APPEND, true),
        opcode::PREPENDQ => (opcode::PREPEND, true),
        _ => (code, false),
    }
}

/// Parses the request at the start of `buffer`.
#[inline]
#[must_use]
pub fn scan<'a>(buffer: &'a [u8], rules: &Rules) -> Scan<'a> {
    if buffer.first().is_some_and(|&magic| magic != MAGIC) {
        let head = Head { opcode: 0, opaque: [0; 4], is_quiet: false };
        return Scan::Request { bytes: buffer.len(), head, request: Request::NoRequest };
    }
    let Some(bytes) = buffer.first_chunk() else {
        return Scan::Incomplete { want_bytes: HEADER_BYTES, refused: None };
    };
    let header = Header::read(bytes);
    let head = header.head;
    if let Some(status) = refusal_by_header(&header, rules) {
        let request = Request::RefusedForGood(status.into());
        return Scan::Request { bytes: HEADER_BYTES, head, request };
    }
    let value_at = header.value_at();
    let Some(front) = buffer.get(HEADER_BYTES..value_at) else {
        return Scan::Incomplete { want_bytes: value_at, refused: None };
    };
    let (extras, key) = front.split_at(header.extras_bytes);
    match parse(&header, extras, key, rules) {
        Parsed::Whole(request) => Scan::Request { bytes: value_at, head, request },
        Parsed::WithValue(make) => {
            let bytes = HEADER_BYTES + header.body_bytes;
            match buffer.get(value_at..bytes) {
                Some(value) => Scan::Request { bytes, head, request: make.with(value) },
                None => {
                    let drop = (header.command == opcode::SET).then_some(key);
                    let refused = matches!(make, Unvalued::Store(_))
                        .then(|| (value_at, head, refusal(&header, Status::OutOfMemory, drop)));
                    Scan::Incomplete { want_bytes: bytes, refused }
                }
            }
        }
    }
}

/// Why a request is refused and the connection closed, if its header suffices to say so.
#[inline]
fn refusal_by_header(header: &Header, rules: &Rules) -> Option<Status> {
    if header.key_bytes + header.extras_bytes > header.body_bytes {
        return Some(Status::UnknownCommand);
    }
    if header.body_bytes > BODY_BYTES_MAX {
        return Some(Status::InvalidArguments);
    }
    let is_open = matches!(
        header.command,
        opcode::SASL_LIST | opcode::SASL_AUTH | opcode::SASL_STEP | opcode::VERSION
    );
    if rules.has_sasl && !rules.is_authenticated && !is_open {
        return Some(Status::AuthError);
    }
    (header.key_bytes > KEY_BYTES_MAX).then_some(Status::InvalidArguments)
}

/// A request up to its value.
enum Parsed<'a> {
    Whole(Request<'a>),
    /// Complete with a value.
    WithValue(Unvalued<'a>),
}

/// A request that lacks its value.
enum Unvalued<'a> {
    Store(Store<'a>),
    Sasl(SaslStep<'a>),
}

impl<'a> Unvalued<'a> {
    #[inline]
    const fn with(self, value: &'a [u8]) -> Request<'a> {
        match self {
            Self::Store(store) => Request::Key(KeyRequest::Store(Store { value, ..store })),
            Self::Sasl(step) => {
                Request::Server(ServerRequest::Sasl(SaslStep { message: value, ..step }))
            }
        }
    }
}

const fn key<'a>(request: KeyRequest<'a>) -> Parsed<'a> {
    Parsed::Whole(Request::Key(request))
}

const fn server<'a>(request: ServerRequest<'a>) -> Parsed<'a> {
    Parsed::Whole(Request::Server(request))
}

fn refusal<'a>(header: &Header, status: Status, drop: Option<&'a [u8]>) -> Request<'a> {
    Request::Refused { refusal: status.into(), skip_bytes: header.value_bytes(), drop }
}

fn refused<'a>(header: &Header, status: Status, drop: Option<&'a [u8]>) -> Parsed<'a> {
    Parsed::Whole(refusal(header, status, drop))
}

/// The answer to lengths that do not fit the command.
fn malformed<'a>() -> Parsed<'a> {
    Parsed::Whole(Request::RefusedForGood(Status::InvalidArguments.into()))
}

/// The big-endian number at this offset; 0 beyond the end.
#[inline]
fn number_32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|it| it.first_chunk()).map_or(0, |it| u32::from_be_bytes(*it))
}

#[inline]
fn number_64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|it| it.first_chunk()).map_or(0, |it| u64::from_be_bytes(*it))
}

#[inline]
fn parse<'a>(header: &Header, extras: &'a [u8], name: &'a [u8], rules: &Rules) -> Parsed<'a> {
    match header.command {
        opcode::GET | opcode::GETK if header.has(0, true, 0) => key(KeyRequest::Read(Read {
            key: name,
            returns_key: header.command == opcode::GETK,
            returns_value: true,
            exptime: None,
        })),
        opcode::SET | opcode::ADD | opcode::REPLACE
            if header.extras_bytes == 8 && header.key_bytes > 0 =>
        {
            parse_set(header, extras, name, &rules.limits)
        }
        opcode::APPEND | opcode::PREPEND if header.extras_bytes == 0 && header.key_bytes > 0 => {
            let is_append = header.command == opcode::APPEND;
            let mode = if is_append { StoreMode::Append } else { StoreMode::Prepend };
            parse_store(header, (mode, mode), name, (0, 0), &rules.limits)
        }
        opcode::TOUCH | opcode::GAT | opcode::GATK if header.has(4, true, 0) => {
            key(KeyRequest::Read(Read {
                key: name,
                returns_key: header.command == opcode::GATK,
                returns_value: header.command != opcode::TOUCH,
                exptime: Some(number_32(extras, 0)),
            }))
        }
        opcode::DELETE if header.has(0, true, 0) => {
            key(KeyRequest::Delete { key: name, cas: header.cas })
        }
        opcode::INCREMENT | opcode::DECREMENT if header.has(20, true, 0) => {
            let exptime = number_32(extras, 16);
            let initial = (exptime != NEVER_MADE).then(|| (number_64(extras, 8), exptime));
            key(KeyRequest::Change {
                key: name,
                delta: number_64(extras, 0),
                increments: header.command == opcode::INCREMENT,
                cas: header.cas,
                initial,
            })
        }
        _ => parse_server(header, extras, name, rules),
    }
}

/// SET, ADD, REPLACE: with a CAS number, each of them stores over an item with that number only.
fn parse_set<'a>(
    header: &Header,
    extras: &[u8],
    name: &'a [u8],
    limits: &ParseLimits,
) -> Parsed<'a> {
    let command = match header.command {
        opcode::SET => StoreMode::Set,
        opcode::ADD => StoreMode::Add,
        _ => StoreMode::Replace,
    };
    let mode = if header.cas == 0 { command } else { StoreMode::Cas };
    parse_store(header, (command, mode), name, (number_32(extras, 0), number_32(extras, 4)), limits)
}

fn parse_store<'a>(
    header: &Header,
    (command, mode): (StoreMode, StoreMode),
    name: &'a [u8],
    (client_flags, exptime): (u32, u32),
    limits: &ParseLimits,
) -> Parsed<'a> {
    // memcached counts the line end that its items have.
    if !limits.fits(name.len(), client_flags, header.value_bytes()) {
        let drop = (command == StoreMode::Set).then_some(name);
        return refused(header, Status::TooLarge, drop);
    }
    let (key, value, cas) = (name, &b""[..], header.cas);
    let store = Store { mode, key, value, client_flags, exptime, cas };
    Parsed::WithValue(Unvalued::Store(store))
}

fn parse_server<'a>(
    header: &Header,
    extras: &'a [u8],
    name: &'a [u8],
    rules: &Rules,
) -> Parsed<'a> {
    let is_bare = header.body_bytes == 0;
    match header.command {
        opcode::NOOP if is_bare => server(ServerRequest::Noop),
        opcode::VERSION if is_bare => server(ServerRequest::Version),
        opcode::QUIT if is_bare => server(ServerRequest::Quit),
        opcode::FLUSH if is_bare || header.has(4, false, 0) => {
            server(ServerRequest::Flush { exptime: number_32(extras, 0) })
        }
        opcode::STAT if header.extras_bytes == 0 && header.value_bytes() == 0 => {
            server(ServerRequest::Stat { what: name })
        }
        opcode::VERBOSITY if header.has(4, false, 0) => {
            server(ServerRequest::Verbosity { level: number_32(extras, 0) })
        }
        opcode::SASL_LIST if is_bare && rules.has_sasl => server(ServerRequest::ListMechanisms),
        opcode::SASL_LIST if is_bare => refused(header, Status::UnknownCommand, None),
        opcode::SASL_AUTH | opcode::SASL_STEP
            if header.extras_bytes == 0 && header.key_bytes > 0 =>
        {
            parse_sasl(header, name, rules)
        }
        command if is_known(command) => malformed(),
        _ => refused(header, Status::UnknownCommand, None),
    }
}

/// Whether this is the opcode of a command.
const fn is_known(command: u8) -> bool {
    matches!(
        command,
        opcode::GET..=opcode::FLUSH
            | opcode::NOOP..=opcode::GETK
            | opcode::APPEND..=opcode::STAT
            | opcode::VERBOSITY..=opcode::GAT
            | opcode::SASL_LIST..=opcode::GATK
    )
}

fn parse_sasl<'a>(header: &Header, mechanism: &'a [u8], rules: &Rules) -> Parsed<'a> {
    if !rules.has_sasl {
        return refused(header, Status::UnknownCommand, None);
    }
    if mechanism.len() > MECHANISM_BYTES_MAX {
        return refused(header, Status::InvalidArguments, None);
    }
    if header.value_bytes() > SASL_BYTES_MAX {
        return refused(header, Status::OutOfMemory, None);
    }
    let begins = header.command == opcode::SASL_AUTH;
    Parsed::WithValue(Unvalued::Sasl(SaslStep { begins, mechanism, message: b"" }))
}
