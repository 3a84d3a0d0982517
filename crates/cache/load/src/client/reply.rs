//! Parsing replies. Pure; values are checked to the byte.

use super::binary;
use super::request::{Expected, Protocol};
use super::value::{self, push_key};
use crate::workload::{KeyNumber, Operation, Workload};

/// The longest line of a reply; a server that sends more does not speak the protocol.
const LINE_BYTES_MAX: usize = 1024;

/// The content of a reply.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    pub hits: usize,
    pub misses: usize,
    /// Stores or deletes that the server refused, and error lines.
    pub refused: usize,
    /// The positions of a read's missed keys, as bits, for the first 64.
    pub missed: u64,
}

/// A reply that is wrong. It ends the run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    #[error(
        "the value of key {key} is wrong: {found} bytes where {expected} of another content were \
         expected"
    )]
    Value { key: String, expected: usize, found: usize },
    #[error("asked for key {asked}, the server answered with {answered:?}")]
    Key { asked: String, answered: String },
    #[error("the value of key {key} came with flags {flags}, it was stored with 0")]
    Flags { key: String, flags: String },
    #[error("{line:?} is no reply to a {operation:?} of key {key}")]
    Line { operation: Operation, key: String, line: String },
}

/// Reads replies of one workload in one protocol.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    pub workload: &'a Workload,
    pub protocol: Protocol,
    /// Bytes of an echo server's reply.
    pub echo_bytes: usize,
}

impl Reader<'_> {
    /// Parses the reply at the start of `bytes` to a request on `keys`. Returns its length and
    /// content, or None if it is incomplete.
    pub fn read(
        &self,
        bytes: &[u8],
        expected: Expected,
        keys: &[KeyNumber],
    ) -> Result<Option<(usize, Said)>, Wrong> {
        let mut said = Said::default();
        let mut at = 0;
        match (expected.operation, self.protocol) {
            (_, Protocol::Echo) => {
                said.hits = 1;
                return Ok((bytes.len() >= self.echo_bytes).then_some((self.echo_bytes, said)));
            }
            (operation, Protocol::Binary) => {
                let name = |key| self.name(key);
                return binary::read(self.workload, bytes, operation, keys, name);
            }
            (Operation::Get, Protocol::Text) => return self.read_values(bytes, keys),
            (operation, protocol) => {
                if protocol == Protocol::Redis && operation == Operation::Get && keys.len() > 1 {
                    // The number of values that follow, which is the number of keys requested.
                    let Some(line) = self.line(bytes, operation, keys[0])? else {
                        return Ok(None);
                    };
                    at += line.len() + 2;
                }
                for (position, &key) in keys.iter().enumerate() {
                    let Some(line) = self.line(&bytes[at..], operation, key)? else {
                        return Ok(None);
                    };
                    at += line.len() + 2;
                    let announced = match protocol {
                        Protocol::Redis => line.strip_prefix(b"$").filter(|it| *it != b"-1"),
                        _ => line.strip_prefix(b"VA "),
                    };
                    if let Some(value) = announced {
                        let Some(length) = self.value(&bytes[at..], value, key)? else {
                            return Ok(None);
                        };
                        at += length;
                        said.hits += 1;
                    } else {
                        self.take_line(line, operation, (key, position), &mut said)?;
                    }
                }
            }
        }
        Ok(Some((at, said)))
    }

    /// `VALUE` lines in the order of the keys, then `END`.
    fn read_values(
        &self,
        bytes: &[u8],
        keys: &[KeyNumber],
    ) -> Result<Option<(usize, Said)>, Wrong> {
        let mut said = Said::default();
        let mut at = 0;
        let mut next = 0;
        let mut name = Vec::with_capacity(250);
        loop {
            let asked = keys.get(next).or(keys.last()).copied().unwrap_or(KeyNumber(0));
            let Some(line) = self.line(&bytes[at..], Operation::Get, asked)? else {
                return Ok(None);
            };
            at += line.len() + 2;
            if line == b"END" {
                (next..keys.len()).for_each(|position| miss(&mut said, position));
                return Ok(Some((at, said)));
            }
            let Some(rest) = line.strip_prefix(b"VALUE ") else {
                if is_refusal(line) {
                    said.refused += 1;
                    return Ok(Some((at, said)));
                }
                return Err(self.wrong_line(line, Operation::Get, asked));
            };
            // The keys before the one found here were missed.
            let found = (next..keys.len()).find(|&position| {
                name.clear();
                push_key(&mut name, keys[position], self.workload.key_bytes(keys[position]));
                rest.starts_with(&name) && rest.get(name.len()) == Some(&b' ')
            });
            let Some(position) = found else {
                let answered = String::from_utf8_lossy(rest).into_owned();
                return Err(Wrong::Key { asked: self.name(asked), answered });
            };
            (next..position).for_each(|position| miss(&mut said, position));
            let Some(length) = rest[name.len() + 1..].strip_prefix(b"0 ") else {
                let flags = String::from_utf8_lossy(&rest[name.len() + 1..]).into_owned();
                return Err(Wrong::Flags { key: self.name(keys[position]), flags });
            };
            let Some(length) = self.value(&bytes[at..], length, keys[position])? else {
                return Ok(None);
            };
            at += length;
            said.hits += 1;
            next = position + 1;
        }
    }

    /// Checks a value and its line end, announced as `length` bytes.
    fn value(&self, bytes: &[u8], length: &[u8], key: KeyNumber) -> Result<Option<usize>, Wrong> {
        let announced = std::str::from_utf8(length).ok().and_then(|text| text.parse().ok());
        let expected = self.workload.value_bytes(key);
        let found: usize = announced.unwrap_or(usize::MAX);
        let wrong = || Wrong::Value { key: self.name(key), expected, found };
        if found != expected {
            return Err(wrong());
        }
        let Some(value) = bytes.get(..expected + 2) else { return Ok(None) };
        let (value, end) = value.split_at(expected);
        if end != b"\r\n" || !value::is_right(value, key, expected) {
            return Err(wrong());
        }
        Ok(Some(expected + 2))
    }

    /// The line at the start of `bytes`, without its end.
    fn line<'b>(
        &self,
        bytes: &'b [u8],
        operation: Operation,
        key: KeyNumber,
    ) -> Result<Option<&'b [u8]>, Wrong> {
        match memchr::memchr(b'\n', bytes) {
            Some(end) if end > 0 && bytes[end - 1] == b'\r' => Ok(Some(&bytes[..end - 1])),
            None if bytes.len() <= LINE_BYTES_MAX => Ok(None),
            _ => Err(self.wrong_line(&bytes[..bytes.len().min(80)], operation, key)),
        }
    }

    fn take_line(
        &self,
        line: &[u8],
        operation: Operation,
        (key, position): (KeyNumber, usize),
        said: &mut Said,
    ) -> Result<(), Wrong> {
        match (operation, line) {
            (Operation::Get, b"EN" | b"$-1") => miss(said, position),
            (Operation::Set, b"STORED" | b"HD" | b"+OK")
            | (Operation::Delete, b"DELETED" | b"HD" | b":1") => {
                said.hits += 1;
            }
            (Operation::Delete, b"NOT_FOUND" | b"NF" | b":0") => said.misses += 1,
            (_, line) if is_refusal(line) => said.refused += 1,
            _ => return Err(self.wrong_line(line, operation, key)),
        }
        Ok(())
    }

    fn wrong_line(&self, line: &[u8], operation: Operation, key: KeyNumber) -> Wrong {
        let line = String::from_utf8_lossy(line).into_owned();
        Wrong::Line { operation, key: self.name(key), line }
    }

    fn name(&self, key: KeyNumber) -> String {
        let mut name = Vec::new();
        push_key(&mut name, key, self.workload.key_bytes(key));
        String::from_utf8_lossy(&name).into_owned()
    }
}

/// Notes a miss of the key at this position.
pub(super) fn miss(said: &mut Said, position: usize) {
    said.misses += 1;
    said.missed |= if position < 64 { 1 << position } else { 0 };
}

fn is_refusal(line: &[u8]) -> bool {
    line == b"NOT_STORED"
        || line == b"NS"
        || line.starts_with(b"-OOM")
        || line.starts_with(b"SERVER_ERROR")
}
