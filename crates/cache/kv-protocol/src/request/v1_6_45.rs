//! Command lines as memcached 1.6.45 reads them.
//!
//! It differs from 1.6.18 in this: the first word decides alone, words too many are ignored, zero
//! bytes are characters like others, numbers are digits only, and the value of a command that is
//! refused is discarded, as soon as its length is known.

use super::{
    AdminRequest, BAD_EXPTIME, DATA_BYTES_MAX, KeyRequest, ParseLimits, Parsed, Request, admin,
    arithmetic, error, get, keys, meta_set, parse_store_data, refused, touch,
};
use crate::command::{MetaKind, MetaRequest, StoreMode, StoreRequest};
use crate::compat::Compat;
use crate::reply::BAD_FORMAT;
use crate::token::{
    Words, signed_32, strict_signed_32, strict_unsigned_32, strict_unsigned_64, unsigned_32,
    until_zero,
};
use farpool_kv_store::item::KEY_BYTES_MAX;
use farpool_units::exactly;

/// A shorter line, its end included, is not looked at.
const LINE_BYTES_MIN: usize = 4;

/// Parses a line, which ends with its end; `rest` is what follows it.
pub(super) fn parse_line<'a>(line: &'a [u8], rest: &'a [u8], limits: &ParseLimits) -> Parsed<'a> {
    if line.len() < LINE_BYTES_MIN {
        return refused(BAD_FORMAT, false);
    }
    let line = &line[..line.len() - 1];
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let words = Words::of(line);
    let store = |mode| parse_store(&words, rest, mode, limits);
    let meta = |kind| parse_meta(line, &words, kind);
    // A line that begins with a space has no command, except for those of the administrator.
    match line.split(|&byte| byte == b' ').next().unwrap_or_default() {
        b"get" => parse_get(line, &words, false, false),
        b"gets" => parse_get(line, &words, true, false),
        b"gat" => parse_get(line, &words, false, true),
        b"gats" => parse_get(line, &words, true, true),
        b"set" => store(StoreMode::Set),
        b"add" => store(StoreMode::Add),
        b"replace" => store(StoreMode::Replace),
        b"append" => store(StoreMode::Append),
        b"prepend" => store(StoreMode::Prepend),
        b"cas" => store(StoreMode::Cas),
        b"mg" => meta(MetaKind::Get),
        b"md" => meta(MetaKind::Delete),
        b"ma" => meta(MetaKind::Arithmetic),
        b"me" => meta(MetaKind::Debug),
        b"ms" => parse_meta_set(line, &words, rest, limits),
        b"mn" => admin(AdminRequest::MetaNoop),
        b"delete" => parse_delete(&words),
        b"incr" => parse_arithmetic(&words, true),
        b"decr" => parse_arithmetic(&words, false),
        b"touch" => parse_touch(&words),
        b"stats" => admin(AdminRequest::Stats { line }),
        b"version" => admin(AdminRequest::Version),
        b"quit" => admin(AdminRequest::Quit),
        b"watch" => admin(AdminRequest::Watch { line }),
        _ => parse_admin(line, &words),
    }
}

fn parse_get<'a>(line: &'a [u8], words: &Words<'a>, with_cas: bool, touches: bool) -> Parsed<'a> {
    if words.len() < if touches { 3 } else { 2 } {
        return refused(BAD_FORMAT, false);
    }
    get(line, words, (with_cas, touches), Compat::V1_6_45)
}

fn skipped<'a>(reply: &'static str, quiet: bool, data_bytes: usize) -> Parsed<'a> {
    Parsed::Request(Request::Skipped { reply, quiet, skip_bytes: data_bytes, drop: None })
}

/// The length of a data block, line end included, if the word gives one that is possible.
fn data_bytes(word: &[u8]) -> Option<usize> {
    let length = strict_signed_32(word).filter(|length| (0..=DATA_BYTES_MAX).contains(length))?;
    let value_bytes: usize = exactly(length);
    Some(value_bytes + 2)
}

fn parse_store<'a>(
    words: &Words<'a>,
    rest: &'a [u8],
    mode: StoreMode,
    limits: &ParseLimits,
) -> Parsed<'a> {
    let Some(data_bytes) = data_bytes(words.get(4)) else { return refused(BAD_FORMAT, false) };
    let quiet = words.asks_no_reply();
    let key = words.get(1);
    // These two are still read as C reads numbers.
    let numbers = (unsigned_32(until_zero(words.get(2))), signed_32(until_zero(words.get(3))));
    let cas = if mode == StoreMode::Cas { strict_unsigned_64(words.get(5)) } else { Some(0) };
    let ((Some(client_flags), Some(exptime)), Some(cas), true) =
        (numbers, cas, key.len() <= KEY_BYTES_MAX)
    else {
        return skipped(BAD_FORMAT, quiet, data_bytes);
    };
    let request = StoreRequest { mode, key, client_flags, exptime, cas, quiet, data: b"" };
    parse_store_data(request, data_bytes, rest, limits)
}

fn parse_delete<'a>(words: &Words<'a>) -> Parsed<'a> {
    let quiet = words.asks_no_reply();
    match words.get(1) {
        b"" => refused(BAD_FORMAT, false),
        key if key.len() > KEY_BYTES_MAX => refused(BAD_FORMAT, quiet),
        key => keys(KeyRequest::Delete { key, quiet }),
    }
}

fn parse_arithmetic<'a>(words: &Words<'a>, increments: bool) -> Parsed<'a> {
    if words.len() < 3 {
        return refused(BAD_FORMAT, false);
    }
    arithmetic(words, increments, Compat::V1_6_45)
}

fn parse_touch<'a>(words: &Words<'a>) -> Parsed<'a> {
    if words.len() < 3 {
        return refused(BAD_FORMAT, false);
    }
    touch(words, Compat::V1_6_45)
}

/// Whether all words from `first` on begin as flags of meta commands do. If not, memcached sees no
/// words at all.
fn begin_as_flags(words: &Words<'_>, first: usize) -> bool {
    words.from(first).iter().all(|word| matches!(word[0], b'A'..=b'z' | b'0'..=b'9'))
}

fn parse_meta<'a>(line: &'a [u8], words: &Words<'a>, kind: MetaKind) -> Parsed<'a> {
    if words.len() < 2 || !begin_as_flags(words, 2) {
        return refused(BAD_FORMAT, false);
    }
    if kind == MetaKind::Debug && words.get(1).len() > KEY_BYTES_MAX {
        return refused(BAD_FORMAT, false);
    }
    let compat = Compat::V1_6_45;
    keys(KeyRequest::Meta(MetaRequest { kind, line, data: b"", compat }))
}

fn parse_meta_set<'a>(
    line: &'a [u8],
    words: &Words<'a>,
    rest: &'a [u8],
    limits: &ParseLimits,
) -> Parsed<'a> {
    let Some(data_bytes) = data_bytes(words.get(2)).filter(|_| begin_as_flags(words, 3)) else {
        return refused(BAD_FORMAT, false);
    };
    meta_set(line, words, (data_bytes, rest), limits)
}

fn parse_admin<'a>(line: &'a [u8], words: &Words<'a>) -> Parsed<'a> {
    // Here even a first word counts.
    let quiet = words.from(words.len().saturating_sub(1)) == [b"noreply"];
    match words.get(0) {
        b"flush_all" if words.len() == if quiet { 2 } else { 1 } => {
            admin(AdminRequest::FlushAll { exptime: 0, quiet })
        }
        b"flush_all" => match strict_signed_32(words.get(1)) {
            Some(exptime) => admin(AdminRequest::FlushAll { exptime, quiet }),
            None => refused(BAD_EXPTIME, quiet),
        },
        b"verbosity" => match strict_unsigned_32(words.get(1)) {
            Some(level) => admin(AdminRequest::Verbosity { level, quiet }),
            None => refused(BAD_FORMAT, quiet),
        },
        b"cache_memlimit" => match strict_unsigned_32(words.get(1)) {
            Some(mebibytes) => admin(AdminRequest::MemoryLimit { mebibytes, quiet }),
            None => refused("ERROR", quiet),
        },
        b"refresh_certs" => admin(AdminRequest::RefreshCertificates { quiet }),
        b"shutdown" => admin(AdminRequest::Shutdown { line }),
        b"slabs" | b"lru" | b"lru_crawler" | b"extstore" => admin(AdminRequest::Tuning { line }),
        // A browser, or someone who makes one talk to us.
        _ if words.len() > 1 && words.get(words.len() - 1).starts_with(b"HTTP/") => {
            Parsed::Request(Request::Close)
        }
        b"" => error(),
        _ => refused("ERROR", quiet),
    }
}
