//! Commands that tune memcached's internals: `slabs`, `lru`, `lru_crawler`, `extstore`.
//!
//! Their words are checked as in memcached. They change nothing: memcached's internals have no
//! counterpart here. Only the lists of `lru_crawler` are served.

use farpool_kv_protocol::compat::Compat;
use farpool_kv_protocol::listing::SLAB_CLASSES;
use farpool_kv_protocol::reply::BAD_FORMAT;
use farpool_kv_protocol::token::{Words, decimal, until_zero};

use super::dump::List;

/// 1.6.45 reads no longer words as fractions.
const FRACTION_BYTES_MAX: usize = 31;
/// The windows of seconds that `slabs automove window` takes.
const WINDOW_S: std::ops::RangeInclusive<u32> = 3..=1800;
/// The longest pause that `lru_crawler sleep` takes, in microseconds.
const SLEEP_MAX_US: u32 = 1_000_000;

/// The list of items that is asked for, if it is one.
pub(super) fn list_of_items(words: &Words<'_>, compat: Compat) -> Option<List> {
    if words.get(0) != b"lru_crawler" || words.len() != 3 {
        return None;
    }
    let is = |name| compat.means(words.get(1), name);
    if is("metadump") {
        Some(List::Metadump(compat))
    } else {
        (!compat.is_old() && is("mgdump")).then_some(List::Mgdump)
    }
}

/// Whether a command asks for no reply; 1.6.18 checks that for some of them only.
pub(super) fn is_quiet(words: &Words<'_>, compat: Compat) -> bool {
    let looks = match (words.get(0), words.get(1)) {
        _ if !compat.is_old() => true,
        (b"lru" | b"extstore", _) => words.len() > 1,
        (b"slabs", b"automove") => words.len() > 2,
        _ => false,
    };
    looks && words.asks_no_reply()
}

/// The reply to a command.
pub(super) fn answer(words: &Words<'_>, compat: Compat) -> &'static str {
    match words.get(0) {
        b"slabs" => slabs(words, compat),
        b"lru" => lru(words, compat),
        b"lru_crawler" => lru_crawler(words, compat),
        b"extstore" => extstore(words, compat),
        _ => "ERROR",
    }
}

const fn ok_if(is_good: bool) -> &'static str {
    if is_good { "OK" } else { "ERROR" }
}

/// A word as a fraction.
fn fraction(words: &Words<'_>, at: usize, compat: Compat) -> Option<f64> {
    let word = words.get(at);
    if compat.is_old() {
        return decimal(word);
    }
    decimal(until_zero(word)).filter(|_| word.len() <= FRACTION_BYTES_MAX)
}

fn slabs(words: &Words<'_>, compat: Compat) -> &'static str {
    let is = |name| compat.means(words.get(1), name);
    match words.len() {
        4 if is("reassign") => "CLIENT_ERROR slab reassignment disabled",
        3.. if is("automove") => slabs_automove(words, compat),
        _ => "ERROR",
    }
}

fn slabs_automove(words: &Words<'_>, compat: Compat) -> &'static str {
    let is = |name| compat.means(words.get(2), name);
    let number = |at| compat.unsigned_32(words.get(at));
    if is("ratio") || !compat.is_old() && is("freeratio") {
        return ok_if(fraction(words, 3, compat).is_some());
    }
    if !compat.is_old() && is("window") {
        return match number(3) {
            Some(seconds) if WINDOW_S.contains(&seconds) => "OK",
            Some(_) => "CLIENT_ERROR automove window too low or too high",
            None => BAD_FORMAT,
        };
    }
    number(2).map_or(BAD_FORMAT, |level| ok_if(level <= 2))
}

fn lru(words: &Words<'_>, compat: Compat) -> &'static str {
    let is = |at, name| compat.means(words.get(at), name);
    match words.len() {
        6.. if is(1, "tune") => lru_tune(words, compat),
        3.. if is(1, "mode") => ok_if(is(2, "flat") || is(2, "segmented")),
        3.. if is(1, "temp_ttl") => ok_if(compat.signed_32(words.get(2)).is_some()),
        _ => "ERROR",
    }
}

/// `lru tune`: two shares of the memory in percent, and two factors of age.
fn lru_tune(words: &Words<'_>, compat: Compat) -> &'static str {
    let number = |at| compat.unsigned_32(words.get(at));
    let factors = (fraction(words, 4, compat), fraction(words, 5, compat));
    let ((Some(hot), Some(warm)), (Some(hot_factor), Some(factor))) =
        ((number(2), number(3)), factors)
    else {
        return "ERROR";
    };
    if hot.wrapping_add(warm) > 80 {
        "ERROR hot and warm pcts must not exceed 80"
    } else if factor <= 0.0 || hot_factor <= 0.0 {
        "ERROR hot/warm age factors must be greater than 0"
    } else {
        "OK"
    }
}

fn lru_crawler(words: &Words<'_>, compat: Compat) -> &'static str {
    let is = |name| compat.means(words.get(1), name);
    let number = compat.unsigned_32(words.get(2));
    match (words.len(), number) {
        (2, _) if is("enable") || is("disable") => "OK",
        (3, _) if is("crawl") => "OK",
        (3, None) if is("tocrawl") || is("sleep") => BAD_FORMAT,
        (3, Some(_)) if is("tocrawl") => "OK",
        (3, Some(0..=SLEEP_MAX_US)) if is("sleep") => "OK",
        (3, Some(_)) if is("sleep") => "CLIENT_ERROR sleep must be one second or less",
        _ => "ERROR",
    }
}

/// Settings of extstore that are whole numbers, in the order in which 1.6.45 compares names.
const EXTSTORE_NUMBERS: [&str; 7] = [
    "item_size",
    "item_age",
    "low_ttl",
    "recache_rate",
    "compact_under",
    "drop_under",
    "max_sleep",
];

fn extstore(words: &Words<'_>, compat: Compat) -> &'static str {
    let is = |name: &str| compat.means(words.get(1), name);
    let number = |at| compat.unsigned_32(words.get(at));
    ok_if(if words.len() < 3 {
        false
    } else if is("free_memchunks") && words.len() > 3 {
        number(2).is_some_and(|class| class < SLAB_CLASSES) && number(3).is_some()
    } else if EXTSTORE_NUMBERS.iter().any(|name| is(name)) {
        number(2).is_some()
    } else if is("max_frag") {
        fraction(words, 2, compat).is_some()
    } else {
        is("drop_unread") && number(2).is_some()
    })
}
