//! Several threads: every shard counts its own CAS numbers, so requests are sent one by one, and a
//! CAS number is compared by the order in which it appeared for its key.

use std::collections::HashMap;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::common::talk::{read_until, shown};
use super::common::{Memcached, Ours, PATIENCE};
use super::{CASE_TIME_MAX, QUIET, judge, masked};
use farpool_kv_server::{Compat, Settings};
use proptest::prelude::*;
use proptest::sample::select;

/// Enough keys for three shards.
const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];

/// A request; if it has a CAS number, which of those seen for its key.
#[derive(Debug, Clone)]
struct Step {
    key: &'static str,
    before: String,
    cas: Option<usize>,
    after: String,
}

fn step() -> impl Strategy<Value = Step> {
    let value = select(vec!["", "5", "18446744073709551615", "abc", "10"]);
    let form = (0..22usize, select(vec!["0", "100", "-1"]), 0..7u32, value, any::<bool>());
    (select(&KEYS[..]), form, 0..4usize).prop_map(
        |(key, (form, exptime, flags, value, noreply), cas)| {
            let bytes = value.len();
            let silent = if noreply { " noreply" } else { "" };
            let store = |mode: &str| {
                format!("{mode} {key} {flags} {exptime} {bytes}{silent}\r\n{value}\r\n")
            };
            let all = KEYS.join(" ");
            let (before, after, has_cas) = match form {
                0 | 1 => (store("set"), String::new(), false),
                2 => (store("add"), String::new(), false),
                3 => (store("replace"), String::new(), false),
                4 => (store("append"), String::new(), false),
                5 => (store("prepend"), String::new(), false),
                6 | 7 => (
                    format!("cas {key} {flags} {exptime} {bytes} "),
                    format!("{silent}\r\n{value}\r\n"),
                    true,
                ),
                8 => (format!("get {all}\r\n"), String::new(), false),
                9 => (format!("gets {all} {all}\r\n"), String::new(), false),
                10 => (format!("gats {exptime} {all}\r\n"), String::new(), false),
                11 => (format!("delete {key}{silent}\r\n"), String::new(), false),
                12 => (format!("incr {key} {flags}{silent}\r\n"), String::new(), false),
                13 => (format!("decr {key} {flags}{silent}\r\n"), String::new(), false),
                14 => (format!("touch {key} {exptime}{silent}\r\n"), String::new(), false),
                15 => (format!("mg {key} s v t f c k h l Oq N100\r\n"), String::new(), false),
                16 => (
                    format!("ms {key} {bytes} c k T{exptime} F{flags} C"),
                    format!("\r\n{value}\r\n"),
                    true,
                ),
                17 => (
                    format!("ms {key} {bytes} c k I T{exptime} C"),
                    format!("\r\n{value}\r\n"),
                    true,
                ),
                18 => (format!("md {key} I T30 k C"), "\r\n".into(), true),
                19 => (format!("ma {key} N0 J5 D{flags} v c t\r\n"), String::new(), false),
                20 => (format!("me {key}\r\n"), String::new(), false),
                _ => (format!("flush_all{silent}\r\n"), String::new(), false),
            };
            Step { key, before, cas: has_cas.then_some(cas), after }
        },
    )
}

/// A client and the CAS numbers it has seen.
struct Side {
    stream: UnixStream,
    seen: HashMap<Vec<u8>, Vec<u64>>,
}

impl Side {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        Self { stream, seen: HashMap::new() }
    }

    /// Returns the reply, with CAS numbers replaced by their positions among those of the key.
    fn ask(&mut self, step: &Step) -> Vec<u8> {
        let mut request = step.before.clone();
        if let Some(place) = step.cas {
            let seen = self.seen.get(step.key.as_bytes()).map_or(&[][..], |seen| seen);
            // Newest first, so that many match.
            let number = seen.iter().rev().nth(place).copied().unwrap_or(999_999);
            request += &number.to_string();
        }
        request += &step.after;
        request += "mn\r\n";
        self.stream.write_all(request.as_bytes()).expect("the server takes requests");
        let reply = masked(&read_until(&mut self.stream, b"MN\r\n"), Compat::V1_6_18);
        reply
            .split_inclusive(|&byte| byte == b'\n')
            .flat_map(|line| self.placed(step, line))
            .collect()
    }

    fn placed(&mut self, step: &Step, line: &[u8]) -> Vec<u8> {
        let words: Vec<&[u8]> = line.trim_ascii_end().split(|&byte| byte == b' ').collect();
        let is_meta = matches!(words[0], b"HD" | b"VA");
        let mut placed = words.clone();
        let mut texts = Vec::new();
        for (number, word) in words.iter().enumerate() {
            let (key, start) = match (words[0], number) {
                (b"VALUE", 4) => (words[1], 0),
                (b"ME", _) if word.starts_with(b"cas=") => (words[1], 4),
                _ if is_meta && number > 0 && word.starts_with(b"c") => (step.key.as_bytes(), 1),
                _ => continue,
            };
            let Some(cas) = std::str::from_utf8(&word[start..]).ok().and_then(|it| it.parse().ok())
            else {
                continue;
            };
            // 0 means that nothing was stored.
            if cas == 0 {
                continue;
            }
            let seen = self.seen.entry(key.to_vec()).or_default();
            let place = seen.iter().position(|&it| it == cas).unwrap_or(seen.len());
            if place == seen.len() {
                seen.push(cas);
            }
            texts.push((number, format!("cas#{place}").into_bytes()));
        }
        texts.iter().for_each(|(number, text)| placed[*number] = text);
        [&placed.join(&b" "[..])[..], b"\r\n"].concat()
    }
}

#[test]
fn three_threads_answer_as_one_memcached() {
    Memcached::versions().into_iter().for_each(three_threads_answer_as);
}

fn three_threads_answer_as(compat: Compat) {
    judge(120, &prop::collection::vec(step(), 1..60), |steps| {
        let start = Instant::now();
        let theirs = Memcached::start_for(compat, &QUIET);
        let ours = Ours::local(Settings { threads: 3, compat, ..Settings::default() });
        let (mut them, mut us) = (Side::new(theirs.connect()), Side::new(ours.connect()));
        for (number, step) in steps.iter().enumerate() {
            let (expected, given) = (them.ask(step), us.ask(step));
            prop_assume!(start.elapsed() < CASE_TIME_MAX);
            prop_assert!(
                given == expected,
                "{:#?}\nmemcached {compat:?}:\n{}\nours:\n{}",
                &steps[..=number],
                shown(&expected),
                shown(&given)
            );
        }
        Ok(())
    });
}
