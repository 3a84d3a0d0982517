//! `valgrind --tool=lackey --trace-mem=yes`: a line ` L addr,size` (load), ` S addr,size` (store),
//! ` M addr,size` (load, then store) or `I  addr,size` (instruction); addresses in hexadecimal.
//!
//! Instruction fetches are left out: programs wait for data. Lines that begin with `==` are
//! valgrind's own. An access that crosses blocks gives a record for each.

use std::io::BufRead;

use super::{Opened, Wrong, read_line};
use crate::record::{Access, Clock, Record};

/// The longest line accepted; lackey's are shorter.
const MAX_LINE_BYTES: usize = 4096;
/// Most bytes of one access: the largest instruction, XSAVE, stays below 16 KiB. A line with more
/// would make records without end.
const MAX_ACCESS_BYTES: u64 = 1 << 16;

pub(super) fn open(input: &mut dyn BufRead, block_bytes: u64) -> Result<Opened<'_>, Wrong> {
    let shift = block_bytes.trailing_zeros();
    let mut line = Vec::new();
    let mut row = 0;
    // Blocks of the last line that are not returned yet: first, last, access.
    let mut waiting: Option<(u64, u64, Access)> = None;
    let next = move || {
        loop {
            if let Some((block, last, access)) = waiting.take() {
                if block < last {
                    waiting = Some((block + 1, last, access));
                }
                return Ok(Some(Record { block, ticks: 1, access, thread: 0 }));
            }
            row += 1;
            if !read_line(input, &mut line, row, MAX_LINE_BYTES)? {
                return Ok(None);
            }
            waiting = parse(&line).map_err(|reason| Wrong::At(row, reason))?.map(
                |(address, bytes, access)| {
                    (address >> shift, (address + (bytes - 1)) >> shift, access)
                },
            );
        }
    };
    Ok(Opened { clock: Clock::Accesses, next: Box::new(next) })
}

/// Parses the address, bytes and access of a data reference. None for other lines.
fn parse(line: &[u8]) -> Result<Option<(u64, u64, Access)>, String> {
    let line = std::str::from_utf8(line).map_err(|_| "not text".to_owned())?.trim();
    if line.is_empty() || line.starts_with("==") || line.starts_with('I') {
        return Ok(None);
    }
    let unreadable = || format!("\"{line}\" is none of lackey's lines (I, L, S, M addr,size)");
    let (kind, place) = line.split_once(' ').ok_or_else(unreadable)?;
    let access = match kind {
        "L" => Access::Read,
        "S" | "M" => Access::Write,
        _ => return Err(unreadable()),
    };
    let (address, bytes) = place.trim().split_once(',').ok_or_else(unreadable)?;
    let address = u64::from_str_radix(address, 16).map_err(|_| unreadable())?;
    let bytes: u64 = bytes.parse().map_err(|_| unreadable())?;
    if bytes == 0 {
        return Err(format!("\"{line}\" touches nothing"));
    }
    if bytes > MAX_ACCESS_BYTES {
        return Err(format!("\"{line}\" touches more than {MAX_ACCESS_BYTES} bytes at once"));
    }
    if address.checked_add(bytes - 1).is_none() {
        return Err(format!("\"{line}\" goes beyond the last address"));
    }
    Ok(Some((address, bytes, access)))
}
