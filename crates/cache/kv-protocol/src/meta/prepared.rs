//! Parsing of a meta command: its flags and its key, checked before it is executed.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::GeneralPurpose;
use base64::engine::general_purpose::STANDARD;

use farpool_kv_store::item::KEY_BYTES_MAX;
use farpool_kv_store::key::HashSeed;

use crate::command::{MetaKind, MetaRequest, StoreMode};
use crate::compat::Compat;
use crate::reply::{BAD_FORMAT, OPAQUE_TOO_LONG};
use crate::token::Words;

/// The most words of a meta command of 1.6.18, including command and key.
pub const WORDS_MAX: usize = 19;
/// The same of 1.6.45.
const WORDS_MAX_1_6_45: usize = 20;
/// The longest opaque token, its letter included.
pub(super) const OPAQUE_BYTES_MAX: usize = 32;
const BAD_TOKEN: &str = "CLIENT_ERROR bad token in command line format";

pub(super) const BASE64: GeneralPurpose = STANDARD;

/// The flags of a command line.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Flags {
    pub(super) vivify: Option<i32>,
    pub(super) ttl: Option<i32>,
    pub(super) recache: Option<i32>,
    pub(super) wants_value: bool,
    pub(super) marks_stale: bool,
    pub(super) quiet: bool,
    pub(super) no_update: bool,
    pub(super) key_binary: bool,
    pub(super) drops_value: bool,
    pub(super) cas: Option<u64>,
    pub(super) new_cas: Option<u64>,
    pub(super) mode: u8,
    pub(super) client_flags: u32,
    pub(super) initial: u64,
    pub(super) delta: u64,
}

impl Flags {
    /// Parses the key, and the flags from word `first`.
    fn parse<'a>(
        words: &Words<'a>,
        first: usize,
        compat: Compat,
    ) -> Result<(Self, Cow<'a, [u8]>), &'static str> {
        let mut flags = Self { delta: 1, ..Self::default() };
        let mut key = Cow::from(words.get(1));
        let mut seen = [false; 127];
        let mut error = None;
        for word in words.from(first) {
            let letter = word[0];
            match seen.get_mut(usize::from(letter)) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err("CLIENT_ERROR duplicate flag"),
            }
            match flags.take(letter, &word[1..], compat) {
                Ok(true) => {}
                Ok(false) => return Err("CLIENT_ERROR invalid flag"),
                // A bad `F` is reported only if nothing else is wrong.
                Err(BAD_FORMAT) => error = error.or(Some(BAD_FORMAT)),
                Err(reason) => error = Some(reason),
            }
            if letter == b'b' {
                match decode_key(words.get(1)) {
                    Some(decoded) => key = decoded.into(),
                    None => error = Some("CLIENT_ERROR error decoding key"),
                }
            }
        }
        error.map_or(Ok((flags, key)), Err)
    }

    /// Parses one flag. False if the letter is unknown.
    fn take(&mut self, letter: u8, token: &[u8], compat: Compat) -> Result<bool, &'static str> {
        let seconds = || compat.signed_32(token).ok_or(BAD_TOKEN);
        let number = || compat.unsigned_64(token);
        match letter {
            b'b' => self.key_binary = true,
            b'N' => self.vivify = Some(seconds()?),
            b'T' => self.ttl = Some(seconds()?),
            b'R' => self.recache = Some(seconds()?),
            b'v' => self.wants_value = true,
            b'u' => self.no_update = true,
            b'q' => self.quiet = true,
            b'I' => self.marks_stale = true,
            b'x' => self.drops_value = true,
            b'F' => self.client_flags = compat.unsigned_32(token).ok_or(BAD_FORMAT)?,
            b'C' => self.cas = Some(number().ok_or(BAD_TOKEN)?),
            b'E' => self.new_cas = Some(number().ok_or(BAD_TOKEN)?),
            b'M' => match token {
                [mode] => self.mode = *mode,
                _ if compat.is_old() => return Err("CLIENT_ERROR incorrect length for M token"),
                // Without a mode this is the space or line end that follows, and no mode.
                _ => self.mode = token.first().copied().unwrap_or(b' '),
            },
            b'J' => self.initial = number().ok_or("CLIENT_ERROR invalid numeric initial value")?,
            b'D' => self.delta = number().ok_or("CLIENT_ERROR invalid numeric delta value")?,
            // Handled when the reply is made, or meant for proxies.
            b'O' | b'P' | b'L' | b'k' | b's' | b't' | b'c' | b'f' | b'l' | b'h' => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn store_mode(&self) -> Result<StoreMode, &'static str> {
        let mode = match self.mode {
            0 | b'S' | b's' => StoreMode::Set,
            b'E' | b'e' => StoreMode::Add,
            b'A' | b'a' => StoreMode::Append,
            b'P' | b'p' => StoreMode::Prepend,
            b'R' | b'r' => StoreMode::Replace,
            _ => return Err("CLIENT_ERROR invalid mode for ms M token"),
        };
        let compares =
            self.cas.is_some_and(|_| matches!(mode, StoreMode::Set | StoreMode::Replace));
        Ok(if compares { StoreMode::Cas } else { mode })
    }
}

/// A meta command whose flags and key are valid.
#[derive(Debug)]
pub struct Prepared<'a> {
    pub(super) kind: MetaKind,
    pub(super) compat: Compat,
    pub(super) words: Words<'a>,
    pub(super) flags: Flags,
    pub key: Cow<'a, [u8]>,
    pub hash: u64,
    pub(super) data: &'a [u8],
}

impl Prepared<'_> {
    /// The words that may be returned with the answer.
    pub(super) fn return_words(&self) -> &[&[u8]] {
        self.words.from(if self.kind == MetaKind::Set { 3 } else { 2 })
    }
}

/// Decodes a key from base64, as memcached does: characters that are not base64 are ignored, and
/// the key ends with the first group of four that is padded.
#[must_use]
pub fn decode_key(word: &[u8]) -> Option<Vec<u8>> {
    const GROUP: usize = 4;
    const PADDING_MAX: usize = 2;
    let is_read = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
    let mut digits: Vec<u8> = word.iter().copied().filter(is_read).collect();
    if digits.is_empty() || !digits.len().is_multiple_of(GROUP) {
        return None;
    }
    if let Some(first) = digits.iter().position(|&digit| digit == b'=') {
        digits.truncate((first / GROUP + 1) * GROUP);
    }
    let mut padding = 0;
    // It counts as the digit 0, wherever in its group it is.
    for digit in digits.iter_mut().filter(|digit| **digit == b'=') {
        *digit = b'A';
        padding += 1;
    }
    if padding > PADDING_MAX {
        return None;
    }
    let mut key = BASE64.decode(digits).ok()?;
    // Four digits are three bytes.
    key.truncate(key.len() - padding);
    Some(key)
}

/// Checks `ms` before its data arrives, except for the length of an opaque token. Returns the
/// client flags, and whether the key is in base64.
pub fn check_set(words: &Words<'_>, compat: Compat) -> Result<(u32, bool), &'static str> {
    check_lengths(words, MetaKind::Set, compat)?;
    let (flags, _) = Flags::parse(words, 3, compat)?;
    flags.store_mode()?;
    Ok((flags.client_flags, flags.key_binary))
}

/// Whether a flag `O` is too long.
#[must_use]
pub fn has_opaque_too_long(words: &Words<'_>) -> bool {
    words.from(2).iter().any(|word| word[0] == b'O' && word.len() > OPAQUE_BYTES_MAX)
}

/// Checks the lengths of key and line.
fn check_lengths(words: &Words<'_>, kind: MetaKind, compat: Compat) -> Result<(), &'static str> {
    if words.get(1).len() > KEY_BYTES_MAX {
        return Err(BAD_FORMAT);
    }
    let words_max = if compat.is_old() { WORDS_MAX } else { WORDS_MAX_1_6_45 };
    if words.len() <= words_max {
        return Ok(());
    }
    Err(match (kind, compat) {
        (MetaKind::Get, _) | (_, Compat::V1_6_45) => "CLIENT_ERROR options flags are too long",
        (_, Compat::V1_6_18) => "CLIENT_ERROR options flags too long",
    })
}

/// Parses flags and key, or returns the error to answer with. `seed` is that of the store's hashes.
pub fn prepare<'a>(
    request: &MetaRequest<'a>,
    seed: HashSeed,
) -> Result<Prepared<'a>, &'static str> {
    let words = Words::of(request.line);
    let MetaRequest { kind, data, compat, .. } = *request;
    let prepared = |flags: Flags, key: Cow<'a, [u8]>| {
        let hash = seed.hash_of(&key);
        Prepared { kind, compat, words, flags, key, hash, data }
    };
    if kind == MetaKind::Debug {
        let (flags, key) = debugged(&words, compat)?;
        return Ok(prepared(flags, key));
    }
    let any_flag = "CLIENT_ERROR invalid or duplicate flag";
    let first_flag = if kind == MetaKind::Set { 3 } else { 2 };
    let checked = check_lengths(&words, kind, compat);
    let parsed = checked.and_then(|()| Flags::parse(&words, first_flag, compat));
    let (flags, key) = match (parsed, kind, compat) {
        (Ok(parsed), ..) => parsed,
        (Err(_), MetaKind::Arithmetic, Compat::V1_6_45) => return Err(any_flag),
        (Err(_), MetaKind::Arithmetic | MetaKind::Delete, Compat::V1_6_18) if checked.is_ok() => {
            return Err(any_flag);
        }
        (Err(reason), ..) => return Err(reason),
    };
    if kind == MetaKind::Arithmetic
        && !matches!(flags.mode, 0 | b'I' | b'i' | b'+' | b'D' | b'd' | b'-')
    {
        return Err("CLIENT_ERROR invalid mode for ma M token");
    }
    // The other commands notice it when they reach that flag, and keep what they have done by then.
    if kind == MetaKind::Delete && has_opaque_too_long(&words) {
        return Err(OPAQUE_TOO_LONG);
    }
    Ok(prepared(flags, key))
}

/// The flags and the key of `me`. 1.6.45 reads the key as base64 only if another word follows.
fn debugged<'a>(words: &Words<'a>, compat: Compat) -> Result<(Flags, Cow<'a, [u8]>), &'static str> {
    let key_binary = words.get(2) == b"b" && (compat.is_old() || words.len() > 3);
    let key = words.get(1);
    let key = if key_binary { decode_key(key).ok_or(BAD_FORMAT)?.into() } else { key.into() };
    Ok((Flags { key_binary, ..Flags::default() }, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_decoded_as_memcached_decodes_them() {
        let decoded = |word: &str| decode_key(word.as_bytes());
        assert_eq!(decoded("Zm9v").as_deref(), Some(&b"foo"[..]));
        assert_eq!(decoded("Zm9\0v\t!").as_deref(), Some(&b"foo"[..]));
        assert_eq!(decoded("Zm8=").as_deref(), Some(&b"fo"[..]));
        assert_eq!(decoded("Zg==Zm9v").as_deref(), Some(&b"f"[..]), "the rest is not looked at");
        assert_eq!(decoded("Zm=v").as_deref(), Some(&b"f`"[..]));
        assert_eq!(decoded("Zm9").or(decoded("Zm9v=")).or(decoded("!!!!")).or(decoded("")), None);
        assert_eq!(decoded("====").or(decoded("Z===")), None);
    }
}
