//! `-Y`: clients authenticate with a `set` before anything else, as in memcached.

use std::path::Path;

use subtle::{Choice, ConstantTimeEq};

use farpool_kv_protocol::compat::Compat;
use farpool_kv_protocol::token::{Words, split, strict_unsigned_32, unsigned_32, until_zero};

/// A longer line from an unauthenticated client ends the connection.
const LINE_BYTES_MAX: usize = 2048;
/// A shorter line of 1.6.45 ends the connection, too.
const LINE_BYTES_MIN: usize = 6;
/// The longest name and password together: what memcached's read buffer takes.
const TOKEN_BYTES_MAX: usize = 16 << 10;
/// The most entries of a credentials file; memcached takes 8.
const ENTRIES_MAX: usize = 8;

/// The names and passwords that the server accepts.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// `name:password`, one for each line.
    entries: Vec<Vec<u8>>,
}

/// Why a credentials file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    #[error("cannot read the credentials file {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("line {line} of the credentials file {path} is not NAME:PASSWORD")]
    Line { path: String, line: usize },
    #[error("the credentials file {path} has no entry, or more than {ENTRIES_MAX}")]
    Count { path: String },
}

impl Credentials {
    /// Reads lines of `name:password`.
    pub fn read(path: &Path) -> Result<Self, CredentialsError> {
        let shown = path.display().to_string();
        let text = std::fs::read(path)
            .map_err(|source| CredentialsError::Read { path: shown.clone(), source })?;
        let mut entries = Vec::new();
        for (number, line) in text.split(|&byte| byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            let at = line
                .iter()
                .position(|&byte| byte == b':')
                .filter(|&at| at > 0 && at + 1 < line.len());
            if at.is_none() {
                return Err(CredentialsError::Line { path: shown, line: number + 1 });
            }
            entries.push(line.to_vec());
        }
        if entries.is_empty() || entries.len() > ENTRIES_MAX {
            return Err(CredentialsError::Count { path: shown });
        }
        Ok(Self { entries })
    }

    /// Whether name and password are known. Takes the same time for every guess of the same length.
    #[must_use]
    pub fn accept(&self, name: &[u8], password: &[u8]) -> bool {
        let given = [name, b":", password].concat();
        // All entries are compared, so that the time does not reveal which one matched.
        let none = Choice::from(0);
        self.entries.iter().fold(none, |accepted, entry| accepted | entry.ct_eq(&given)).into()
    }
}

/// What an unauthenticated client has sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Attempt<'a> {
    /// More input is needed.
    Incomplete,
    /// The first `bytes` bytes are answered with this line.
    Refused {
        bytes: usize,
        reply: &'static str,
    },
    /// The first `bytes` bytes give a name and a password.
    Token {
        bytes: usize,
        name: &'a [u8],
        password: &'a [u8],
    },
    Close,
}

/// Parses what an unauthenticated client sent: `set KEY FLAGS EXPTIME LENGTH`, then `NAME
/// PASSWORD`.
#[must_use]
pub fn attempt(buffer: &[u8], compat: Compat) -> Attempt<'_> {
    let Some(end) = memchr::memchr(b'\n', buffer) else {
        return if buffer.len() > LINE_BYTES_MAX { Attempt::Close } else { Attempt::Incomplete };
    };
    let line = &buffer[..end];
    if !compat.is_old() && line.len() < LINE_BYTES_MIN {
        return Attempt::Close;
    }
    let length = if compat.is_old() { token_length(line) } else { strict_token_length(line) };
    let length = match length {
        Some(length @ 0..=TOKEN_BYTES_MAX) => length,
        Some(_) if !compat.is_old() => {
            return Attempt::Refused { bytes: end + 1, reply: "CLIENT_ERROR auth token too long" };
        }
        _ => return Attempt::Refused { bytes: end + 1, reply: "CLIENT_ERROR unauthenticated" },
    };
    let bytes = end + 1 + length + 2;
    let Some(data) = buffer.get(end + 1..bytes) else { return Attempt::Incomplete };
    let Some(token) = data.strip_suffix(b"\r\n") else {
        return Attempt::Refused { bytes, reply: "CLIENT_ERROR bad command line termination" };
    };
    let parts = if compat.is_old() { first_two_words(token) } else { split_at_space(token) };
    match parts {
        Some((name, password)) => Attempt::Token { bytes, name, password },
        None => Attempt::Refused { bytes, reply: "CLIENT_ERROR bad authentication token format" },
    }
}

/// The length of name and password that a `set` gives, as 1.6.18 reads it.
fn token_length(line: &[u8]) -> Option<usize> {
    let words = Words::of(until_zero(line));
    let is_set = words.len() >= 5 && words.get(0) == b"set";
    unsigned_32(words.get(4)).filter(|_| is_set).map(|length| length as usize)
}

/// The same, as 1.6.45 reads it: the last byte of the line is taken for a carriage return, and the
/// one before it is ignored if it is one.
fn strict_token_length(line: &[u8]) -> Option<usize> {
    let line = line.get(..line.len().checked_sub(1)?)?;
    let words = Words::of(line.strip_suffix(b"\r").unwrap_or(line));
    let is_set = words.len() >= 5 && line.starts_with(b"set");
    strict_unsigned_32(words.get(4)).filter(|_| is_set).map(|length| length as usize)
}

fn first_two_words(token: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut words = split(until_zero(token));
    Some((words.next()?, words.next()?))
}

fn split_at_space(token: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = memchr::memchr(b' ', token)?;
    Some((&token[..space], &token[space + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_memcacheds() {
        assert_eq!(attempt(b"get a", Compat::V1_6_18), Attempt::Incomplete);
        let refused = Attempt::Refused { bytes: 7, reply: "CLIENT_ERROR unauthenticated" };
        assert_eq!(attempt(b"get a\r\nget b\r\n", Compat::V1_6_18), refused);
        assert_eq!(attempt(b"set a 0 0 9\r\nfoo", Compat::V1_6_18), Attempt::Incomplete);
        let token = Attempt::Token { bytes: 22, name: b"foo", password: b"bar" };
        assert_eq!(attempt(b"set a 0 0 7\r\nfoo bar\r\nget", Compat::V1_6_18), token);
        let format = "CLIENT_ERROR bad authentication token format";
        assert_eq!(
            attempt(b"set a 0 0 3\r\nfoo\r\n", Compat::V1_6_18),
            Attempt::Refused { bytes: 18, reply: format }
        );
        assert_eq!(attempt(&[b'x'; 3000], Compat::V1_6_18), Attempt::Close);
    }

    #[test]
    fn a_password_of_1_6_45_may_have_spaces() {
        let compat = Compat::V1_6_45;
        let token = Attempt::Token { bytes: 27, name: b"foo", password: b"bar baz" };
        assert_eq!(attempt(b"set a 0 0 11\r\nfoo bar baz\r\n", compat), token);
        assert_eq!(
            attempt(b"get a\r\n", compat),
            Attempt::Refused { bytes: 7, reply: "CLIENT_ERROR unauthenticated" }
        );
        let long = Attempt::Refused { bytes: 17, reply: "CLIENT_ERROR auth token too long" };
        assert_eq!(attempt(b"set a 0 0 16385\r\n", compat), long);
        assert_eq!(attempt(b"set\r\n", compat), Attempt::Close);
    }

    #[test]
    fn a_file_opens_for_who_is_in_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "foo:bar\nbaz:qu:ux\n").unwrap();
        let credentials = Credentials::read(file.path()).unwrap();
        assert!(credentials.accept(b"foo", b"bar") && credentials.accept(b"baz", b"qu:ux"));
        assert!(
            !credentials.accept(b"foo", b"barr")
                && !credentials.accept(b"foo", b"ba")
                && !credentials.accept(b"", b"")
        );
        std::fs::write(file.path(), "foo\n").unwrap();
        assert!(matches!(
            Credentials::read(file.path()),
            Err(CredentialsError::Line { line: 1, .. })
        ));
    }
}
