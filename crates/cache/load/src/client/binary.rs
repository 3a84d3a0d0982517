//! memcached's binary protocol, as far as a load needs it: GET, SET and DELETE of single keys.

use farpool_units::exactly;

use super::reply::{Said, Wrong, miss};
use super::value::{self, push_key, push_value};
use crate::workload::{KeyNumber, Operation, Workload};

const REQUEST_MAGIC: u8 = 0x80;
const REPLY_MAGIC: u8 = 0x81;
const HEADER_BYTES: usize = 24;
/// Status codes: stored or found; not found; not stored; no memory.
const SUCCESS: u16 = 0;
const NOT_FOUND: u16 = 1;
const NOT_STORED: u16 = 0x05;
const OUT_OF_MEMORY: u16 = 0x82;
/// A reply is no longer than the value and this: a server that sends more does not speak the
/// protocol.
const TEXT_BYTES_MAX: usize = 1024;
/// A GET's reply has the flags in front of its value.
const FLAGS_BYTES: usize = 4;

const fn opcode(operation: Operation) -> u8 {
    match operation {
        Operation::Get => 0x00,
        Operation::Set => 0x01,
        Operation::Delete => 0x04,
    }
}

/// What marks a request, and returns with its reply: from the number of its key.
const fn opaque(key: KeyNumber) -> [u8; 4] {
    let [a, b, c, d, ..] = key.0.to_le_bytes();
    [a, b, c, d]
}

/// Appends a request for each key.
pub(super) fn push(
    out: &mut Vec<u8>,
    workload: &Workload,
    operation: Operation,
    keys: &[KeyNumber],
) {
    for &key in keys {
        let key_bytes = workload.key_bytes(key);
        // Flags and lifetime.
        let mut extras = [0; 8];
        extras[4..].copy_from_slice(&workload.lifetime_s(key).to_be_bytes());
        let (extras, value_bytes) = match operation {
            Operation::Set => (&extras[..], workload.value_bytes(key)),
            Operation::Get | Operation::Delete => (&[][..], 0),
        };
        let mut header = [0; HEADER_BYTES];
        header[0] = REQUEST_MAGIC;
        header[1] = opcode(operation);
        header[2..4].copy_from_slice(&exactly::<u16, _>(key_bytes).to_be_bytes());
        header[4] = exactly(extras.len());
        let body_bytes: u32 = exactly(extras.len() + key_bytes + value_bytes);
        header[8..12].copy_from_slice(&body_bytes.to_be_bytes());
        header[12..16].copy_from_slice(&opaque(key));
        out.extend_from_slice(&header);
        out.extend_from_slice(extras);
        push_key(out, key, key_bytes);
        if operation == Operation::Set {
            push_value(out, key, value_bytes);
        }
    }
}

/// Reads a reply for each key. Returns their length and content, or None if they are incomplete.
pub(super) fn read(
    workload: &Workload,
    bytes: &[u8],
    operation: Operation,
    keys: &[KeyNumber],
    name: impl Fn(KeyNumber) -> String,
) -> Result<Option<(usize, Said)>, Wrong> {
    let mut said = Said::default();
    let mut at = 0;
    for (position, &key) in keys.iter().enumerate() {
        let Some(header) = bytes[at..].first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [magic, code, _, _, extras, _, s0, s1, b0, b1, b2, b3, rest @ ..] = *header;
        let status = u16::from_be_bytes([s0, s1]);
        if (magic, code) != (REPLY_MAGIC, opcode(operation)) {
            let line = format!("a header that begins with {magic:#04x} {code:#04x}");
            return Err(Wrong::Line { operation, key: name(key), line });
        }
        if !rest.starts_with(&opaque(key)) {
            let answered = format!("a reply to the request marked {:?}", &rest[..4]);
            return Err(Wrong::Key { asked: name(key), answered });
        }
        let body_bytes = u32::from_be_bytes([b0, b1, b2, b3]) as usize;
        let expected = workload.value_bytes(key);
        if body_bytes > expected + TEXT_BYTES_MAX {
            return Err(Wrong::Value { key: name(key), expected, found: body_bytes });
        }
        let Some(body) = bytes[at + HEADER_BYTES..].get(..body_bytes) else { return Ok(None) };
        at += HEADER_BYTES + body_bytes;
        match (status, operation) {
            (SUCCESS, Operation::Get) => {
                check(workload, (usize::from(extras), body), key, &name)?;
                said.hits += 1;
            }
            (SUCCESS, _) if body.is_empty() => said.hits += 1,
            (NOT_FOUND, Operation::Get) => miss(&mut said, position),
            (NOT_FOUND, Operation::Delete) => said.misses += 1,
            (NOT_STORED, Operation::Set) | (OUT_OF_MEMORY, _) => said.refused += 1,
            _ => {
                let line = format!("status {status:#04x} with {body_bytes} bytes");
                return Err(Wrong::Line { operation, key: name(key), line });
            }
        }
    }
    Ok(Some((at, said)))
}

/// Checks the flags and the value of an item.
fn check(
    workload: &Workload,
    (extras_bytes, body): (usize, &[u8]),
    key: KeyNumber,
    name: &impl Fn(KeyNumber) -> String,
) -> Result<(), Wrong> {
    let expected = workload.value_bytes(key);
    let (flags, value) = body.split_at(extras_bytes.min(body.len()));
    if flags != [0; FLAGS_BYTES] {
        return Err(Wrong::Flags { key: name(key), flags: format!("{flags:?}") });
    }
    if !value::is_right(value, key, expected) {
        return Err(Wrong::Value { key: name(key), expected, found: value.len() });
    }
    Ok(())
}
