//! Our server against real memcacheds: both get the same bytes and must return the same bytes. One
//! is Debian's, 1.6.18, and ours is then compatible with that; the other, if there is one, is named
//! by FARPOOL_MEMCACHED_NEW, is of version 1.6.30 or later, and ours is compatible with 1.6.45.
//!
//! Every case has two fresh servers, so that CAS numbers and clocks agree and a failing case
//! shrinks. The cases are the same in every run; KV_CASES (how many) and KV_SEED (which) select
//! others.

#[path = "../common/mod.rs"]
mod common;

mod binary;
mod commands;
mod fixed;
mod threads;

use std::time::{Duration, Instant};

use common::talk::{exchange, exchange_one_by_one, shown};
use common::{Memcached, Ours};
use farpool_kv_server::{Compat, Settings};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// Both clocks count whole seconds from their starts; in a case that took longer, its servers'
/// starts included, they may have advanced at different moments, so it is not judged.
const CASE_TIME_MAX: Duration = Duration::from_millis(900);

/// Turns background threads off: they hold items for a moment, and a number that becomes shorter
/// meanwhile is stored without the spaces that otherwise pad it.
const QUIET: [&str; 2] = ["-o", "no_lru_maintainer,no_lru_crawler"];

/// Reads a number from the environment, or returns `default`.
fn setting(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs a property on the same cases in every run.
fn judge<S: Strategy>(
    cases: u32,
    strategy: &S,
    property: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let config = Config {
        cases: setting("KV_CASES", cases),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        max_global_rejects: 10_000,
        ..Config::default()
    };
    let mut seed = [0; 32];
    seed[..4].copy_from_slice(&setting("KV_SEED", 1).to_le_bytes());
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    match runner.run(strategy, property) {
        Ok(()) => {}
        // The reason shows what was sent; the value would only repeat it as numbers.
        Err(TestError::Fail(reason, _)) => panic!("{reason}"),
        Err(error @ TestError::Abort(_)) => panic!("{error}"),
    }
}

/// The settings equivalent to [`Memcached::start_for`] without flags.
fn settings(compat: Compat) -> Settings {
    Settings { threads: 1, compat, ..Settings::default() }
}

/// CAS numbers below this are the servers' own; tests that name numbers name higher ones.
const OWN_CAS_MAX: u64 = 1_000_000;

/// Removes from replies what differs by design.
///
/// `me` shows an item's slab class and its size there: ours has no slabs. 1.6.45 spends CAS numbers
/// on stores that fail, too, so that only those that a client has given can be compared.
fn masked(replies: &[u8], compat: Compat) -> Vec<u8> {
    let mut masked = Vec::with_capacity(replies.len());
    let replies = &with_single_line_ends(replies, compat);
    for line in replies.split_inclusive(|&byte| byte == b'\n') {
        let slabs = line.windows(5).rposition(|window| window == b" cls=");
        match slabs {
            Some(at) if line.starts_with(b"ME ") => {
                masked.extend(without_cas(&line[..at], compat));
                masked.extend_from_slice(b" cls=* size=*\r\n");
            }
            _ if !compat.is_old() && line.starts_with(b"VERSION ") => {
                masked.extend_from_slice(b"VERSION *\r\n");
            }
            _ => masked.extend(without_cas(line, compat)),
        }
    }
    masked
}

/// 1.6.45 ends the line of its error twice if a `get` has a key that is too long.
fn with_single_line_ends(replies: &[u8], compat: Compat) -> Vec<u8> {
    const ERROR: &[u8] = b"CLIENT_ERROR bad command line format\r\n";
    let mut single = Vec::with_capacity(replies.len());
    for line in replies.split_inclusive(|&byte| byte == b'\n') {
        if compat.is_old() || line != b"\r\n" || !single.ends_with(ERROR) {
            single.extend_from_slice(line);
        }
    }
    single
}

/// A line of a reply without the CAS numbers that the server has drawn itself.
fn without_cas(line: &[u8], compat: Compat) -> Vec<u8> {
    let is_shown = compat.is_old()
        || ![&b"HD"[..], b"VA", b"ME", b"VALUE"].iter().any(|start| line.starts_with(start));
    if is_shown {
        return line.to_vec();
    }
    let words = line.split(|&byte| byte == b' ').enumerate().map(|(number, word)| {
        let cas = match (line.starts_with(b"VALUE"), number) {
            (true, 4) => Some(word),
            (false, 1..) => word.strip_prefix(b"cas=").or_else(|| word.strip_prefix(b"c")),
            _ => None,
        };
        let text = cas.and_then(|cas| std::str::from_utf8(cas.trim_ascii_end()).ok());
        let is_own = text.and_then(|it| it.parse().ok()).is_some_and(|it: u64| it < OWN_CAS_MAX);
        match word.strip_suffix(b"\r\n") {
            Some(_) if is_own => &b"CAS\r\n"[..],
            None if is_own => b"CAS",
            _ => word,
        }
    });
    words.collect::<Vec<_>>().join(&b' ')
}

/// Sent after every stream: ends a request that is still waiting for (not too much) data.
const TAIL: [&[u8]; 64] = [b"mn\r\n"; 64];
/// The last request, and its answer.
const LAST: (&[u8], &[u8]) = (b"mg nobody Olast\r\n", b"EN Olast\r\n");

/// Whether the replies are those memcached gives.
///
/// A client that shuts down its side while memcached waits for data, or discards data that is too
/// large, loses the replies that memcached has not sent yet; ours sends them. The last answer is
/// then missing, and what memcached did send must be a prefix of ours.
fn agree(expected: &[u8], given: &[u8]) -> bool {
    if expected.ends_with(LAST.1) { given == expected } else { given.starts_with(expected) }
}

/// Sends the requests to both: to ours in pieces that end at `cuts`, to memcached one by one.
///
/// Many requests in one read make memcached misbehave (see docs/users/kv-compatibility.md): it
/// loses earlier replies when a `get` has a key that is too long, and unsent replies change how
/// numbers are stored.
fn compare(
    flags: &[&str],
    settings: Settings,
    requests: &[Vec<u8>],
    cuts: &[usize],
) -> Result<(), TestCaseError> {
    let compat = settings.compat;
    let start = Instant::now();
    let theirs = Memcached::start_for(compat, flags);
    let ours = Ours::local(settings);
    let tail = [&TAIL.concat(), LAST.0].concat();
    let stepwise: Vec<&[u8]> =
        requests.iter().map(Vec::as_slice).chain([tail.as_slice()]).collect();
    let stream = stepwise.concat();
    let expected = exchange_one_by_one(theirs.connect(), &stepwise, || theirs.is_idle());
    let expected = masked(&expected, compat);
    let given = masked(&exchange(ours.connect(), &pieces(&stream, cuts)), compat);
    prop_assume!(start.elapsed() < CASE_TIME_MAX);
    prop_assert!(
        agree(&expected, &given),
        "sent:\n{}\nmemcached {compat:?}:\n{}\nours:\n{}\nfrom the first difference on:\n{}\nours:\n{}",
        shown(&requests.concat()),
        shown(without_tail(&expected)),
        shown(without_tail(&given)),
        shown(around_difference(&expected, &given)),
        shown(around_difference(&given, &expected))
    );
    Ok(())
}

/// The bytes around the first difference of `bytes` from `others`.
fn around_difference<'a>(bytes: &'a [u8], others: &[u8]) -> &'a [u8] {
    const SHOWN_BYTES: usize = 100;
    let at = bytes.iter().zip(others).position(|(a, b)| a != b).unwrap_or(others.len());
    let at = at.min(bytes.len());
    &bytes[at.saturating_sub(SHOWN_BYTES)..(at + SHOWN_BYTES).min(bytes.len())]
}

fn without_tail(replies: &[u8]) -> &[u8] {
    let mut replies = replies.strip_suffix(LAST.1).unwrap_or(replies);
    while let Some(rest) = replies.strip_suffix(b"MN\r\n") {
        replies = rest;
    }
    replies
}

fn pieces<'a>(stream: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
    ends.push(stream.len());
    ends.sort_unstable();
    ends.dedup();
    let mut start = 0;
    ends.into_iter().map(|end| &stream[std::mem::replace(&mut start, end)..end]).collect()
}

#[test]
fn any_stream_is_answered_as_memcached_does() {
    for compat in Memcached::versions() {
        let cuts = prop::collection::vec(any::<usize>(), 0..4);
        judge(400, &(commands::stream(compat), cuts), |(stream, cuts)| {
            compare(&QUIET, settings(compat), &stream, &cuts)
        });
    }
}
