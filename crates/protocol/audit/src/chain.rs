//! Lines of the log. A line is one JSON object; its hash is SHA-256 over the bytes before
//! `,"hash":`, which include the hash of the line before.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io::BufRead;
use std::str::FromStr;

use farpool_units::utc_text;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes of a hash.
const HASH_BYTES: usize = 32;
/// What comes before the hash at a line's end.
const HASH_KEY: &str = ",\"hash\":\"";
/// Longest line in bytes. A longer one is not read.
pub const LINE_LIMIT_BYTES: u64 = 64 << 10;
/// Most bytes of each text of an entry; who asks for longer paths names nothing that there is. The
/// rest is cut off, and its length told.
const TEXT_LIMIT_BYTES: usize = 2 << 10;
/// Three texts, of which JSON makes at most six bytes of each byte, and all else.
const _: () = assert!(3 * 6 * (TEXT_LIMIT_BYTES as u64 + 64) + 1024 < LINE_LIMIT_BYTES);

/// The hash of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hash([u8; HASH_BYTES]);

impl Hash {
    /// That before the first line.
    pub const NONE: Hash = Hash([0; HASH_BYTES]);

    fn of(bytes: &[u8]) -> Hash {
        let digest = digest(&SHA256, bytes);
        Hash(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A text is no hash.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no hash: it has 64 hexadecimal digits")]
pub struct NoHash(String);

impl FromStr for Hash {
    type Err = NoHash;

    fn from_str(text: &str) -> Result<Hash, NoHash> {
        let no_hash = || NoHash(text.to_owned());
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        // It is written in one way only: another one shows that somebody else has written it.
        let is_other = text.bytes().any(|digit| digit.is_ascii_uppercase());
        if pairs.len() != HASH_BYTES || !rest.is_empty() || is_other {
            return Err(no_hash());
        }
        let mut bytes = [0; HASH_BYTES];
        for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
            let digit = |digit: u8| char::from(digit).to_digit(16).ok_or_else(no_hash);
            *byte = farpool_units::exactly(digit(*high)? << 4 | digit(*low)?);
        }
        Ok(Hash(bytes))
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
        let text = Cow::<'de, str>::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Who asked: the role of a certificate, or what else is known.
    pub who: String,
    /// The address that it was asked from, if it was asked.
    pub from: Option<String>,
    /// What was asked, such as `DELETE /v1/nodes/a`.
    pub what: String,
    /// The status of the answer; 0 for what nobody asked.
    pub outcome: u16,
}

/// What a line tells of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Stage {
    /// Something that was done, or refused.
    #[default]
    Done,
    /// Something that is going to be done now.
    Intent,
    /// What became of the intent in the line of this number.
    OutcomeOf(u64),
}

/// A line without its hash. Its fields stand in this order.
#[derive(Serialize)]
struct Body<'a> {
    number: u64,
    time: String,
    /// True or left out.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    intent: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome_of: Option<u64>,
    who: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<Cow<'a, str>>,
    what: Cow<'a, str>,
    outcome: u16,
    previous: Hash,
}

/// What is read of a line.
#[derive(Deserialize)]
struct Read<'a> {
    number: u64,
    #[serde(default)]
    intent: bool,
    outcome_of: Option<u64>,
    #[serde(borrow, default)]
    what: Cow<'a, str>,
    previous: Hash,
    hash: Hash,
}

/// Where a log ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The number of the last line; 0 if there is none.
    pub number: u64,
    /// Its hash.
    pub hash: Hash,
}

impl Default for Chain {
    fn default() -> Self {
        Chain { number: 0, hash: Hash::NONE }
    }
}

impl Chain {
    /// Returns the next line, with its end, and where the log ends then.
    ///
    /// # Panics
    /// 2^64 lines were written.
    #[must_use]
    pub fn line(self, entry: &Entry, stage: Stage) -> (String, Chain) {
        let Entry { unix_ms, who, from, what, outcome } = entry;
        let number = self.number.checked_add(1).expect("fewer lines than 2^64");
        let body = Body {
            number,
            time: utc_text(*unix_ms),
            intent: stage == Stage::Intent,
            outcome_of: match stage {
                Stage::OutcomeOf(number) => Some(number),
                Stage::Done | Stage::Intent => None,
            },
            who: cut(who),
            from: from.as_deref().map(cut),
            what: cut(what),
            outcome: *outcome,
            previous: self.hash,
        };
        // Texts and numbers always serialise.
        let mut line = serde_json::to_string(&body).expect("plain data");
        line.pop(); // the closing brace comes after the hash
        let hash = Hash::of(line.as_bytes());
        line.push_str(&format!("{HASH_KEY}{hash}\"}}\n"));
        (line, Chain { number, hash })
    }

    /// Checks a line, without its end, that comes next. Returns where the log ends with it, and
    /// what it says. A first line may continue a log that is not there: what it is to continue is
    /// then unknown.
    fn check(self, line: &str, is_first: bool) -> Result<(Chain, Read<'_>), &'static str> {
        let read: Read<'_> = serde_json::from_str(line).map_err(|_| "it is no entry")?;
        let Read { number, previous, hash, .. } = read;
        let (body, end) = line.rsplit_once(HASH_KEY).ok_or("it is no entry")?;
        if end.len() != 2 * HASH_BYTES + "\"}".len() {
            return Err("it goes on after its hash");
        }
        if Hash::of(body.as_bytes()) != hash {
            return Err("its hash does not fit it: it was changed");
        }
        let begins = is_first && number > 0 && (number > 1 || previous == Hash::NONE);
        if !begins && self.number.checked_add(1) != Some(number) {
            return Err("its number is not the next one: lines were removed or inserted");
        }
        if !begins && previous != self.hash {
            return Err("it does not continue the line before it, which was changed");
        }
        Ok((Chain { number, hash }, read))
    }
}

/// Returns a text within its limit.
fn cut(text: &str) -> Cow<'_, str> {
    let kept = &text[..text.floor_char_boundary(TEXT_LIMIT_BYTES)];
    match text.len() - kept.len() {
        0 => Cow::Borrowed(text),
        bytes => Cow::Owned(format!("{kept}... ({bytes} bytes more)")),
    }
}

/// A log that is what was written, as far as hashes tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The number of its first line; more than 1 if lines before it are elsewhere. 0: it is empty.
    pub first: u64,
    /// Where it ends.
    pub end: Chain,
    /// Whether one of its lines has the hash that was looked for.
    pub contains: bool,
    /// Intents of which no line tells what became: their numbers and what they say. The process
    /// ended, or was ended, in between; or the outcome could not be written.
    pub open: BTreeMap<u64, String>,
}

impl Verified {
    /// Takes in a line.
    fn take(&mut self, read: Read<'_>) -> Result<(), &'static str> {
        let Read { number, intent, outcome_of, what, .. } = read;
        match (intent, outcome_of) {
            (true, Some(_)) => return Err("it is an intent and an outcome"),
            (true, None) => {
                self.open.insert(number, what.into_owned());
            }
            // The intent may be in a file before these.
            (false, Some(of)) if of >= self.first && self.open.remove(&of).is_none() => {
                return Err("it is the outcome of what was no intent, or has one already");
            }
            (false, _) => {}
        }
        Ok(())
    }
}

/// Where a log is not what was written.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The line is not what was written there.
    #[error("line {line} is broken: {reason}")]
    Line {
        /// Counted from 1, over all files.
        line: u64,
        /// What is wrong.
        reason: &'static str,
    },
    /// The last line has no end.
    #[error("line {line} is unfinished: {bytes} bytes of it were written")]
    Unfinished {
        /// Counted from 1, over all files.
        line: u64,
        /// Bytes of it.
        bytes: u64,
    },
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] std::io::Error),
}

/// Verifies all lines, and looks for a hash among them.
///
/// # Errors
/// A line is not what was written, or they cannot be read.
pub fn verify(mut lines: impl BufRead, wanted: Option<Hash>) -> Result<Verified, Broken> {
    let (end, open) = (Chain::default(), BTreeMap::new());
    let mut verified = Verified { first: 0, end, contains: false, open };
    let (mut line, mut count) = (Vec::new(), 0);
    loop {
        line.clear();
        let limited = &mut std::io::Read::take(&mut lines, LINE_LIMIT_BYTES);
        let bytes = limited.read_until(b'\n', &mut line)?;
        if bytes == 0 {
            return Ok(verified);
        }
        count += 1;
        let broken = |reason| Broken::Line { line: count, reason };
        if line.pop_if(|last| *last == b'\n').is_none() {
            let bytes = bytes as u64;
            return Err(match bytes < LINE_LIMIT_BYTES {
                true => Broken::Unfinished { line: count, bytes },
                false => broken("it is longer than any entry"),
            });
        }
        let text = std::str::from_utf8(&line).map_err(|_| broken("it is no text"))?;
        let (end, read) = verified.end.check(text, count == 1).map_err(broken)?;
        verified.end = end;
        if count == 1 {
            verified.first = verified.end.number;
        }
        verified.take(read).map_err(broken)?;
        verified.contains |= wanted == Some(verified.end.hash);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(number: u64) -> Entry {
        let from = number.is_multiple_of(2).then(|| "192.0.2.7".to_owned());
        let what = format!("DELETE /v1/nodes/\"n{number}\",\"hash\":\"");
        Entry { unix_ms: 1000 * number, who: "operator ann".into(), from, what, outcome: 200 }
    }

    fn log_of(count: u64) -> Vec<String> {
        let mut chain = Chain::default();
        let lines = (1..=count).map(|number| {
            let (line, next) = chain.line(&entry(number), Stage::Done);
            chain = next;
            line
        });
        lines.collect()
    }

    fn verified(lines: &[String]) -> Result<Verified, Broken> {
        verify(lines.concat().as_bytes(), None)
    }

    fn broken_at(lines: &[String]) -> Option<u64> {
        match verified(lines) {
            Err(Broken::Line { line, .. } | Broken::Unfinished { line, .. }) => Some(line),
            Ok(_) => None,
            Err(Broken::Unreadable(error)) => panic!("{error}"),
        }
    }

    #[test]
    fn a_line_is_what_its_readers_expect() {
        let (line, chain) = Chain::default().line(&entry(2), Stage::Done);
        let value: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(value["number"], 1);
        assert_eq!(value["time"], "1970-01-01T00:00:02.000Z");
        assert_eq!((&value["who"], &value["from"]), (&"operator ann".into(), &"192.0.2.7".into()));
        assert_eq!(value["hash"], chain.hash.to_string());
        assert_eq!(value["previous"], "0".repeat(64));
    }

    #[test]
    fn what_was_written_is_verified_and_can_be_found_in_it() {
        let lines = log_of(5);
        let all = verified(&lines).expect("as written");
        assert_eq!((all.first, all.end.number), (1, 5));
        let third = verified(&lines[..3]).expect("a part").end.hash;
        let looked_for = |lines: &[String]| verify(lines.concat().as_bytes(), Some(third));
        assert!(looked_for(&lines).expect("all").contains);
        assert!(!looked_for(&lines[..2]).expect("too few").contains, "lines were cut off");
        let later = verified(&lines[2..]).expect("lines before it are elsewhere");
        assert_eq!((later.first, later.end), (3, all.end));
        assert_eq!(verified(&[]).expect("empty").first, 0);
    }

    #[test]
    fn lines_that_are_removed_inserted_or_moved_are_noticed() {
        let lines = log_of(5);
        let mut removed = lines.clone();
        removed.remove(2);
        assert_eq!(broken_at(&removed), Some(3));
        let mut moved = lines.clone();
        moved.swap(1, 2);
        assert_eq!(broken_at(&moved), Some(2));
        let mut twice = lines.clone();
        twice.insert(3, lines[2].clone());
        assert_eq!(broken_at(&twice), Some(4));
        let mut forged = lines.clone();
        forged[2] = Chain { number: 2, hash: Hash::NONE }.line(&entry(3), Stage::Done).0;
        assert_eq!(broken_at(&forged), Some(3));
        let mut torn = lines;
        torn[4].truncate(50);
        assert!(matches!(verified(&torn), Err(Broken::Unfinished { line: 5, bytes: 50 })));
    }

    #[test]
    fn a_log_that_begins_at_one_begins_with_nothing_before_it() {
        let begins =
            Chain { number: 0, hash: Hash([7; HASH_BYTES]) }.line(&entry(1), Stage::Done).0;
        assert_eq!(broken_at(&[begins]), Some(1));
    }

    /// A server's paths have up to 64 KiB, and a stranger chooses them.
    #[test]
    fn no_entry_makes_a_line_that_is_not_read() {
        let long = "\u{1}".repeat(70_000);
        let entry = Entry {
            unix_ms: u64::MAX,
            who: long.clone(),
            from: Some(long.clone()),
            what: long,
            outcome: u16::MAX,
        };
        let (line, chain) = Chain::default().line(&entry, Stage::Done);
        assert!(line.contains("... (67952 bytes more)"), "what was cut is told");
        assert_eq!(verified(&[line]).expect("it is read").end, chain);
    }

    #[test]
    fn a_line_without_an_end_is_not_read_for_ever() {
        let long = "x".repeat(10 * usize::try_from(LINE_LIMIT_BYTES).expect("small"));
        assert_eq!(broken_at(&[long]), Some(1));
    }

    /// The last line's hash is bound by no line after it: 32 is what makes a digit a capital.
    #[test]
    fn a_hash_in_capitals_is_a_change() {
        let log = log_of(5).concat();
        let hash = log.trim_end().rsplit('"').nth(1).expect("a hash");
        let changed = log.replace(hash, &hash.to_uppercase());
        assert_ne!(changed, log);
        assert!(verify(changed.as_bytes(), None).is_err());
    }

    proptest! {
        #[test]
        fn every_changed_byte_is_noticed(at in 0usize..1500, flip in 1u8..=255) {
            let mut bytes = log_of(5).concat().into_bytes();
            let at = at % bytes.len();
            bytes[at] ^= flip;
            let changed = verify(&bytes[..], None);
            prop_assert!(changed.is_err(), "byte {at}: {changed:?}");
        }

        #[test]
        fn any_bytes_are_refused_or_verified(bytes: Vec<u8>) {
            let _either = verify(&bytes[..], None);
        }

        #[test]
        fn hashes_read_as_they_are_written(bytes: [u8; HASH_BYTES]) {
            prop_assert_eq!(Hash(bytes).to_string().parse(), Ok(Hash(bytes)));
        }
    }

    fn staged(stages: &[Stage]) -> Result<Verified, Broken> {
        let mut chain = Chain::default();
        let lines = (1..).zip(stages).map(|(number, stage)| {
            let (line, next) = chain.line(&entry(number), *stage);
            chain = next;
            line
        });
        verified(&lines.collect::<Vec<_>>())
    }

    #[test]
    fn an_intent_without_an_outcome_is_named() {
        let (done, intent) = (Stage::Done, Stage::Intent);
        let open = |stages: &[Stage]| -> Vec<u64> {
            staged(stages).expect("as written").open.into_keys().collect()
        };
        assert_eq!(open(&[done, intent, done]), [2]);
        assert_eq!(open(&[intent, intent, Stage::OutcomeOf(1), done]), [2]);
        assert_eq!(open(&[intent, Stage::OutcomeOf(1), intent, Stage::OutcomeOf(3)]), [0; 0]);
        let what = staged(&[intent]).expect("as written").open.remove(&1);
        assert_eq!(what, Some(entry(1).what));
        for wrong in [1, 2, 3, u64::MAX] {
            let stages = [done, Stage::OutcomeOf(wrong)];
            assert!(matches!(staged(&stages), Err(Broken::Line { line: 2, .. })), "{wrong}");
        }
        let twice = [intent, Stage::OutcomeOf(1), Stage::OutcomeOf(1)];
        assert!(matches!(staged(&twice), Err(Broken::Line { line: 3, .. })));
    }

    #[test]
    fn the_intent_of_an_outcome_may_be_in_an_earlier_file() {
        let (first, chain) = Chain::default().line(&entry(1), Stage::Intent);
        let (second, chain) = chain.line(&entry(2), Stage::Done);
        let (third, _) = chain.line(&entry(3), Stage::OutcomeOf(1));
        assert!(verified(&[second.clone(), third.clone()]).expect("as written").open.is_empty());
        assert!(verified(&[first, second, third]).expect("as written").open.is_empty());
    }
}
