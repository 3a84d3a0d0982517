//! VMware's vscsiStats traces, as CloudPhysics published them: binary records of version 1 (32
//! bytes) or 2 (40 bytes), little endian.
//!
//! | version | fields |
//! |---|---|
//! | 1 | serial u32, length u32, segments u32, command u16, version u16, block u64, time u64 |
//! | 2 | command u16, version u16, serial u32, length u32, segments u32, block u64, time u64, response u64 |
//!
//! The version is the high byte of the version field; both first records must agree. Time is in
//! microseconds. Requests are recorded by their first block, as libCacheSim does, whatever their
//! length.

use std::io::{BufRead, Cursor, Read};

use super::{Opened, Ticker, Wrong, le, read_record};
use crate::record::{Access, Clock, Record};

/// Byte offsets of a version's fields.
#[derive(Debug, Clone, Copy)]
struct Layout {
    version: u8,
    bytes: usize,
    command_at: usize,
    version_at: usize,
    block_at: usize,
    time_at: usize,
}

const LAYOUTS: [Layout; 2] = [
    Layout { version: 2, bytes: 40, command_at: 0, version_at: 2, block_at: 16, time_at: 24 },
    Layout { version: 1, bytes: 32, command_at: 12, version_at: 14, block_at: 16, time_at: 24 },
];

/// Two records of the longer version.
const BEGINNING_BYTES: u64 = 80;

/// SCSI's WRITE commands of 6, 10, 12 and 16 bytes.
const WRITE_COMMANDS: [u16; 4] = [0x0A, 0x2A, 0xAA, 0x8A];

pub(super) fn open(input: &mut dyn BufRead) -> Result<Opened<'_>, Wrong> {
    // The buffer may hold less than the two records that tell the versions apart.
    let mut beginning = Vec::new();
    Read::take(&mut *input, BEGINNING_BYTES).read_to_end(&mut beginning)?;
    let layout = LAYOUTS
        .into_iter()
        .find(|layout| layout.fits(&beginning))
        .ok_or_else(|| Wrong::Row("neither version 1 nor version 2 of a vscsi trace".to_owned()))?;
    let mut input = Cursor::new(beginning).chain(input);
    let mut ticker = Ticker::default();
    let next = move || {
        let mut record = [0; 40];
        let record = &mut record[..layout.bytes];
        if !read_record(&mut input, record)? {
            return Ok(None);
        }
        if record[layout.version_at + 1] != layout.version {
            return Err(Wrong::Row(format!("not of version {}", layout.version)));
        }
        let ticks = ticker.ticks(u64::from_le_bytes(le(record, layout.time_at)))?;
        let block = u64::from_le_bytes(le(record, layout.block_at));
        let command = u16::from_le_bytes(le(record, layout.command_at));
        let is_write = WRITE_COMMANDS.contains(&command);
        let access = if is_write { Access::Write } else { Access::Read };
        Ok(Some(Record { block, ticks, access, thread: 0 }))
    };
    Ok(Opened { clock: Clock::Microseconds, next: Box::new(next) })
}

impl Layout {
    fn fits(&self, beginning: &[u8]) -> bool {
        let version = |at: usize| beginning.get(at * self.bytes + self.version_at + 1);
        version(0) == Some(&self.version) && version(1).is_none_or(|v| *v == self.version)
    }
}
