//! Ramulator's and similar memory traces: a line `0x1234 R`, `0x1234 W`, `LD 0x1234`, `ST 0x1234`,
//! or
//! an address alone, which is read. Addresses are bytes, hexadecimal with `0x`, else decimal. Lines
//! that begin with `#` are comments.

use std::io::BufRead;

use super::csv::{is_write, number};
use super::{Opened, Wrong, read_line};
use crate::record::{Access, Clock, Record};

/// The longest line accepted.
const MAX_LINE_BYTES: usize = 4096;

pub(super) fn open(input: &mut dyn BufRead, block_bytes: u64) -> Result<Opened<'_>, Wrong> {
    let shift = block_bytes.trailing_zeros();
    let mut line = Vec::new();
    let mut row = 0;
    let next = move || {
        loop {
            row += 1;
            if !read_line(input, &mut line, row, MAX_LINE_BYTES)? {
                return Ok(None);
            }
            let parsed = parse(&line).map_err(|reason| Wrong::At(row, reason))?;
            if let Some((address, access)) = parsed {
                let block = address >> shift;
                return Ok(Some(Record { block, ticks: 1, access, thread: 0 }));
            }
        }
    };
    Ok(Opened { clock: Clock::Requests, next: Box::new(next) })
}

/// Parses a line. None for an empty one and for comments.
fn parse(line: &[u8]) -> Result<Option<(u64, Access)>, String> {
    let line = std::str::from_utf8(line).map_err(|_| "not text".to_owned())?.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let unreadable = || format!("\"{line}\" is none of: 0x1234 R, LD 0x1234, 0x1234");
    let (address, kind) = match words.as_slice() {
        [address] => (*address, "read"),
        [first, second] if first.starts_with(|letter: char| letter.is_ascii_digit()) => {
            (*first, *second)
        }
        [kind, address] => (*address, *kind),
        _ => return Err(unreadable()),
    };
    let address = number(address).map_err(|_| unreadable())?;
    let access = match is_write(kind).map_err(|_| unreadable())? {
        true => Access::Write,
        false => Access::Read,
    };
    Ok(Some((address, access)))
}
