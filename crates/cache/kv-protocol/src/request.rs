//! Parsing one request out of a stream of bytes: its command line, and for storage commands the
//! data after it.
//!
//! The parser gets a buffer that begins with a request and returns the request and its length, or
//! that more input is needed. It keeps nothing between calls, so bytes may arrive in any pieces.

mod v1_6_45;

use farpool_units::exactly;

use super::command::{MetaKind, MetaRequest, ReadFlags, StoreMode, StoreRequest};
use super::compat::Compat;
use super::meta::{WORDS_MAX, check_set, has_opaque_too_long};
use super::reply::{BAD_FORMAT, OPAQUE_TOO_LONG, OUT_OF_MEMORY, TOO_LARGE};
use super::token::{Words, signed_32, split, unsigned_32, unsigned_64};
use farpool_kv_store::item::{KEY_BYTES_MAX, memcached_bytes};

/// A longer line without an end closes the connection, unless it is a `get` with many keys.
/// memcached's own limit.
pub const LINE_BYTES_MAX: usize = 2048;
const BAD_EXPTIME: &str = "CLIENT_ERROR invalid exptime argument";
/// The longest `get` line, about 4,000 of the longest keys; a longer one closes the connection.
pub const GET_LINE_BYTES_MAX: usize = 1 << 20;
/// The most spaces in front of a long `get`.
const LEADING_SPACES_MAX: usize = 100;
/// The largest data length that memcached's parser accepts: an `int` less the line end.
const DATA_BYTES_MAX: i32 = i32::MAX - 2;

/// A request on keys.
#[derive(Debug, Clone, Copy)]
pub enum KeyRequest<'a> {
    /// `get`, `gets`, `gat`, `gats`: `keys` is the rest of the line.
    Get {
        keys: &'a [u8],
        flags: ReadFlags,
    },
    Store(StoreRequest<'a>),
    Delete {
        key: &'a [u8],
        quiet: bool,
    },
    Arithmetic {
        key: &'a [u8],
        delta: u64,
        increments: bool,
        quiet: bool,
    },
    Touch {
        key: &'a [u8],
        exptime: i32,
        quiet: bool,
    },
    Meta(MetaRequest<'a>),
}

/// A request to the server as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminRequest<'a> {
    /// `flush_all`, with the delay as given.
    FlushAll {
        exptime: i32,
        quiet: bool,
    },
    /// `stats`, with the words after it.
    Stats {
        line: &'a [u8],
    },
    Verbosity {
        level: u32,
        quiet: bool,
    },
    /// `refresh_certs`.
    RefreshCertificates {
        quiet: bool,
    },
    MemoryLimit {
        mebibytes: u32,
        quiet: bool,
    },
    Version,
    MetaNoop,
    Quit,
    Shutdown {
        line: &'a [u8],
    },
    Watch {
        line: &'a [u8],
    },
    /// Commands that tune memcached's internals: their words are checked, and they change nothing.
    Tuning {
        line: &'a [u8],
    },
}

/// A key as it stands in a command line.
#[derive(Debug, Clone, Copy)]
pub struct KeyWord<'a> {
    pub word: &'a [u8],
    pub is_base64: bool,
}

/// A parsed request.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    Keys(KeyRequest<'a>),
    Admin(AdminRequest<'a>),
    /// Answered with this line, or not at all if `quiet`.
    Refused {
        reply: &'static str,
        quiet: bool,
    },
    /// As `Refused`, but the next `skip_bytes` of the stream are data to discard. `drop` is the key
    /// whose old item must not outlive the refused new one.
    Skipped {
        reply: &'static str,
        quiet: bool,
        skip_bytes: usize,
        drop: Option<KeyWord<'a>>,
    },
    /// The client does not speak the protocol: close the connection.
    Close,
}

/// The beginning of the buffer.
#[derive(Debug)]
pub enum Scan<'a> {
    /// More input is needed: at least this many bytes in all, if known.
    Incomplete {
        want_bytes: usize,
        /// If only the value is not complete: the length of the line before it, and the request as
        /// it is refused if there is no memory to wait for the rest.
        refused: Option<(usize, Request<'a>)>,
    },
    /// A request of this length.
    Request { bytes: usize, request: Request<'a> },
}

/// Limits on requests, and whose rules say what a request is.
#[derive(Debug, Clone, Copy)]
pub struct ParseLimits {
    /// The largest item, as memcached measures it.
    pub item_bytes_max: usize,
    /// The version of memcached whose text protocol is spoken.
    pub compat: Compat,
}

impl ParseLimits {
    /// Values of items up to `item_bytes_max` are taken.
    #[must_use]
    pub const fn new(item_bytes_max: usize, compat: Compat) -> Self {
        Self { item_bytes_max, compat }
    }

    /// Whether an item fits.
    #[must_use]
    pub const fn fits(&self, key_bytes: usize, client_flags: u32, value_bytes: usize) -> bool {
        memcached_bytes(key_bytes, client_flags, value_bytes) <= self.item_bytes_max
    }
}

/// Parses the request at the start of `buffer`.
#[must_use]
pub fn scan<'a>(buffer: &'a [u8], limits: &ParseLimits) -> Scan<'a> {
    let Some(end) = memchr::memchr(b'\n', buffer) else {
        let close = Scan::Request { bytes: buffer.len(), request: Request::Close };
        let is_long_get = || {
            let spaces = buffer.iter().position(|&byte| byte != b' ').unwrap_or(buffer.len());
            let words = &buffer[spaces..];
            spaces <= LEADING_SPACES_MAX
                && (words.starts_with(b"get ") || words.starts_with(b"gets "))
        };
        return match buffer.len() {
            ..=LINE_BYTES_MAX => Scan::Incomplete { want_bytes: buffer.len() + 1, refused: None },
            ..=GET_LINE_BYTES_MAX if is_long_get() => {
                Scan::Incomplete { want_bytes: buffer.len() + 1, refused: None }
            }
            _ => close,
        };
    };
    let line_bytes = end + 1;
    let (line, rest) = buffer.split_at(line_bytes);
    let parsed = match limits.compat {
        Compat::V1_6_18 => parse_line(line, rest, limits),
        Compat::V1_6_45 => v1_6_45::parse_line(line, rest, limits),
    };
    match parsed {
        Parsed::Request(request) => Scan::Request { bytes: line_bytes, request },
        Parsed::WithData { data_bytes, request } => {
            Scan::Request { bytes: line_bytes + data_bytes, request }
        }
        Parsed::WantsData { data_bytes, refused } => Scan::Incomplete {
            want_bytes: line_bytes + data_bytes,
            refused: Some((line_bytes, refused)),
        },
    }
}

enum Parsed<'a> {
    Request(Request<'a>),
    WithData {
        data_bytes: usize,
        request: Request<'a>,
    },
    /// The data is not complete; `refused` is the request without memory for it.
    WantsData {
        data_bytes: usize,
        refused: Request<'a>,
    },
}

const fn refused<'a>(reply: &'static str, quiet: bool) -> Parsed<'a> {
    Parsed::Request(Request::Refused { reply, quiet })
}

const fn error<'a>() -> Parsed<'a> {
    refused("ERROR", false)
}

const fn keys(request: KeyRequest<'_>) -> Parsed<'_> {
    Parsed::Request(Request::Keys(request))
}

const fn admin(request: AdminRequest<'_>) -> Parsed<'_> {
    Parsed::Request(Request::Admin(request))
}

/// Parses a line, which ends with its end, as memcached 1.6.18 does.
fn parse_line<'a>(line: &'a [u8], rest: &'a [u8], limits: &ParseLimits) -> Parsed<'a> {
    let end = line.len() - 1;
    // memcached treats a lone "\r" as a word.
    let line = if end > 1 && line[end - 1] == b'\r' { &line[..end - 1] } else { &line[..end] };
    let line = super::token::until_zero(line);
    let words = Words::of(line);
    let command = words.get(0);
    if command.len() < 2 {
        return error();
    }
    match command {
        b"get" | b"bget" => parse_get(line, &words, false, false),
        b"gets" => parse_get(line, &words, true, false),
        b"gat" => parse_get(line, &words, false, true),
        b"gats" => parse_get(line, &words, true, true),
        b"set" => parse_store(&words, rest, StoreMode::Set, limits),
        b"add" => parse_store(&words, rest, StoreMode::Add, limits),
        b"replace" => parse_store(&words, rest, StoreMode::Replace, limits),
        b"append" => parse_store(&words, rest, StoreMode::Append, limits),
        b"prepend" => parse_store(&words, rest, StoreMode::Prepend, limits),
        b"cas" => parse_store(&words, rest, StoreMode::Cas, limits),
        b"mg" => parse_meta(line, &words, MetaKind::Get),
        b"md" => parse_meta(line, &words, MetaKind::Delete),
        b"ma" => parse_meta(line, &words, MetaKind::Arithmetic),
        b"me" => parse_meta(line, &words, MetaKind::Debug),
        b"ms" => parse_meta_set(line, &words, rest, limits),
        b"mn" => admin(AdminRequest::MetaNoop),
        b"delete" => parse_delete(&words),
        b"incr" => parse_arithmetic(&words, true),
        b"decr" => parse_arithmetic(&words, false),
        b"touch" => parse_touch(&words),
        _ => parse_admin(line, &words),
    }
}

fn parse_get<'a>(line: &'a [u8], words: &Words<'a>, with_cas: bool, touches: bool) -> Parsed<'a> {
    if words.len() < 2 {
        return error();
    }
    get(line, words, (with_cas, touches), Compat::V1_6_18)
}

/// `get` and its variants with words enough; those that touch have an expiry in front of the keys.
fn get<'a>(
    line: &'a [u8],
    words: &Words<'a>,
    (with_cas, touches): (bool, bool),
    compat: Compat,
) -> Parsed<'a> {
    let touch = if touches { compat.signed_32(words.get(1)) } else { None };
    if touches && touch.is_none() {
        return refused(BAD_EXPTIME, false);
    }
    let before = words.get(usize::from(touches));
    let start = before.as_ptr() as usize - line.as_ptr() as usize + before.len();
    let keys_of_line = &line[start..];
    if split(keys_of_line).any(|key| key.len() > KEY_BYTES_MAX) {
        return refused(BAD_FORMAT, false);
    }
    keys(KeyRequest::Get { keys: keys_of_line, flags: ReadFlags { with_cas, touch } })
}

fn parse_store<'a>(
    words: &Words<'a>,
    rest: &'a [u8],
    mode: StoreMode,
    limits: &ParseLimits,
) -> Parsed<'a> {
    let least = if mode == StoreMode::Cas { 6 } else { 5 };
    if words.len() != least && words.len() != least + 1 {
        return error();
    }
    let quiet = words.asks_no_reply();
    let key = words.get(1);
    let numbers = (unsigned_32(words.get(2)), signed_32(words.get(3)), signed_32(words.get(4)));
    let (Some(client_flags), Some(exptime), Some(length)) = numbers else {
        return refused(BAD_FORMAT, quiet);
    };
    let cas = if mode == StoreMode::Cas { unsigned_64(words.get(5)) } else { Some(0) };
    let (Some(cas), true, 0..=DATA_BYTES_MAX) = (cas, key.len() <= KEY_BYTES_MAX, length) else {
        return refused(BAD_FORMAT, quiet);
    };
    let request = StoreRequest { mode, key, client_flags, exptime, cas, quiet, data: b"" };
    let value_bytes: usize = exactly(length);
    parse_store_data(request, value_bytes + 2, rest, limits)
}

/// Completes a storage command with its data block of `data_bytes`, line end included, unless the
/// item would be too large.
fn parse_store_data<'a>(
    request: StoreRequest<'a>,
    data_bytes: usize,
    rest: &'a [u8],
    limits: &ParseLimits,
) -> Parsed<'a> {
    let StoreRequest { mode, key, client_flags, quiet, .. } = request;
    let skipped = |reply| {
        // An old value must not outlive a set that failed.
        let drop = (mode == StoreMode::Set).then_some(KeyWord { word: key, is_base64: false });
        Request::Skipped { reply, quiet, skip_bytes: data_bytes, drop }
    };
    if !limits.fits(key.len(), client_flags, data_bytes - 2) {
        return Parsed::Request(skipped(TOO_LARGE));
    }
    let Some(data) = rest.get(..data_bytes) else {
        return Parsed::WantsData { data_bytes, refused: skipped(OUT_OF_MEMORY) };
    };
    let request = StoreRequest { data, ..request };
    Parsed::WithData { data_bytes, request: Request::Keys(KeyRequest::Store(request)) }
}

fn parse_delete<'a>(words: &Words<'a>) -> Parsed<'a> {
    if !(2..=4).contains(&words.len()) {
        return error();
    }
    let mut quiet = false;
    if words.len() > 2 {
        let hold_is_zero = words.get(2) == b"0";
        quiet = words.asks_no_reply();
        let valid = words.len() == 3 && (hold_is_zero || quiet)
            || words.len() == 4 && hold_is_zero && quiet;
        if !valid {
            let usage = "CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]";
            return refused(usage, quiet);
        }
    }
    let key = words.get(1);
    if key.len() > KEY_BYTES_MAX {
        return refused(BAD_FORMAT, quiet);
    }
    keys(KeyRequest::Delete { key, quiet })
}

fn parse_arithmetic<'a>(words: &Words<'a>, increments: bool) -> Parsed<'a> {
    match words.len() {
        3 | 4 => arithmetic(words, increments, Compat::V1_6_18),
        _ => error(),
    }
}

/// `incr` and `decr` with words enough.
fn arithmetic<'a>(words: &Words<'a>, increments: bool, compat: Compat) -> Parsed<'a> {
    let quiet = words.asks_no_reply();
    let key = words.get(1);
    if key.len() > KEY_BYTES_MAX {
        return refused(BAD_FORMAT, quiet);
    }
    match compat.unsigned_64(words.get(2)) {
        Some(delta) => keys(KeyRequest::Arithmetic { key, delta, increments, quiet }),
        None => refused("CLIENT_ERROR invalid numeric delta argument", quiet),
    }
}

fn parse_touch<'a>(words: &Words<'a>) -> Parsed<'a> {
    match words.len() {
        3 | 4 => touch(words, Compat::V1_6_18),
        _ => error(),
    }
}

/// `touch` with words enough.
fn touch<'a>(words: &Words<'a>, compat: Compat) -> Parsed<'a> {
    let quiet = words.asks_no_reply();
    let key = words.get(1);
    if key.len() > KEY_BYTES_MAX {
        return refused(BAD_FORMAT, quiet);
    }
    match compat.signed_32(words.get(2)) {
        Some(exptime) => keys(KeyRequest::Touch { key, exptime, quiet }),
        None => refused(BAD_EXPTIME, quiet),
    }
}

fn parse_meta<'a>(line: &'a [u8], words: &Words<'a>, kind: MetaKind) -> Parsed<'a> {
    if words.len() < 2 {
        return if kind == MetaKind::Debug { refused(BAD_FORMAT, false) } else { error() };
    }
    if words.get(1).len() > KEY_BYTES_MAX {
        return refused(BAD_FORMAT, false);
    }
    let compat = Compat::V1_6_18;
    keys(KeyRequest::Meta(MetaRequest { kind, line, data: b"", compat }))
}

fn parse_meta_set<'a>(
    line: &'a [u8],
    words: &Words<'a>,
    rest: &'a [u8],
    limits: &ParseLimits,
) -> Parsed<'a> {
    if words.len() < 2 {
        return error();
    }
    if words.get(1).len() > KEY_BYTES_MAX || words.len() == 2 {
        return refused(BAD_FORMAT, false);
    }
    if words.len() > WORDS_MAX {
        return refused("CLIENT_ERROR options flags too long", false);
    }
    let Some(length @ 0..=DATA_BYTES_MAX) = signed_32(words.get(2)) else {
        return refused(BAD_FORMAT, false);
    };
    let value_bytes: usize = exactly(length);
    meta_set(line, words, (value_bytes + 2, rest), limits)
}

/// `ms` with a length that is possible: its flags, and its data block of `data_bytes`, line end
/// included.
fn meta_set<'a>(
    line: &'a [u8],
    words: &Words<'a>,
    (data_bytes, rest): (usize, &'a [u8]),
    limits: &ParseLimits,
) -> Parsed<'a> {
    let compat = limits.compat;
    let skipped =
        |reply, drop| Request::Skipped { reply, quiet: false, skip_bytes: data_bytes, drop };
    let (client_flags, is_base64) = match check_set(words, compat) {
        Ok(checked) => checked,
        Err(reply) => return Parsed::Request(skipped(reply, None)),
    };
    let word = words.get(1);
    // An old value must not outlive a set that failed.
    let drop = Some(KeyWord { word, is_base64 });
    let is_opaque_too_long = has_opaque_too_long(words);
    let is_too_large = !limits.fits(word.len(), client_flags, data_bytes - 2);
    // The older version looks at the opaque token first.
    if is_too_large && !(is_opaque_too_long && compat.is_old()) {
        return Parsed::Request(skipped(TOO_LARGE, drop));
    }
    if is_opaque_too_long {
        return Parsed::Request(skipped(OPAQUE_TOO_LONG, None));
    }
    let Some(data) = rest.get(..data_bytes) else {
        return Parsed::WantsData { data_bytes, refused: skipped(OUT_OF_MEMORY, drop) };
    };
    let request = MetaRequest { kind: MetaKind::Set, line, data, compat };
    Parsed::WithData { data_bytes, request: Request::Keys(KeyRequest::Meta(request)) }
}

fn parse_admin<'a>(line: &'a [u8], words: &Words<'a>) -> Parsed<'a> {
    let quiet = words.asks_no_reply();
    let count = words.len();
    match words.get(0) {
        b"flush_all" => match count {
            1..=3 => parse_flush_all(words, quiet),
            _ => error(),
        },
        b"stats" => admin(AdminRequest::Stats { line }),
        b"verbosity" => match (count, unsigned_32(words.get(1))) {
            (2..=3, Some(level)) => admin(AdminRequest::Verbosity { level, quiet }),
            (2..=3, None) => refused(BAD_FORMAT, quiet),
            _ => error(),
        },
        b"cache_memlimit" => match (count, unsigned_32(words.get(1))) {
            (2..=3, Some(mebibytes)) => admin(AdminRequest::MemoryLimit { mebibytes, quiet }),
            (2..=3, None) => refused("ERROR", quiet),
            _ => error(),
        },
        b"refresh_certs" => admin(AdminRequest::RefreshCertificates { quiet }),
        b"version" => admin(AdminRequest::Version),
        b"quit" => admin(AdminRequest::Quit),
        b"shutdown" => admin(AdminRequest::Shutdown { line }),
        b"watch" => admin(AdminRequest::Watch { line }),
        b"slabs" | b"lru" | b"lru_crawler" | b"extstore" => admin(AdminRequest::Tuning { line }),
        // A browser, or someone who makes one talk to us.
        [first, ..]
            if !b"gsacidt".contains(first) && words.get(count - 1).starts_with(b"HTTP/") =>
        {
            Parsed::Request(Request::Close)
        }
        _ => error(),
    }
}

fn parse_flush_all<'a>(words: &Words<'a>, quiet: bool) -> Parsed<'a> {
    let without_delay = if quiet { 2 } else { 1 };
    if words.len() == without_delay {
        return admin(AdminRequest::FlushAll { exptime: 0, quiet });
    }
    match signed_32(words.get(1)) {
        Some(exptime) => admin(AdminRequest::FlushAll { exptime, quiet }),
        None => refused(BAD_EXPTIME, quiet),
    }
}
