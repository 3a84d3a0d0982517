//! libCacheSim's `oracleGeneral`: records of 24 bytes, little endian: time in seconds (u32), object
//! (u64), size (u32), the number of the object's next request (i64).
//!
//! Sizes are ignored, a page is a page, unless they are asked for: then an object is as many blocks
//! as
//! its size takes. Next requests are computed where they are needed, so a file
//! with wrong ones does not make Belady wrong.

use std::io::BufRead;

use super::objects::Objects;
use super::{Opened, Ticker, Wrong, le, read_record};
use crate::record::{Access, Clock, Record};

/// Bytes of a record.
const RECORD_BYTES: usize = 24;

/// Encodes one record.
pub(crate) fn to_bytes(time: u32, object: u64, size: u32, next: i64) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[0..4].copy_from_slice(&time.to_le_bytes());
    record[4..12].copy_from_slice(&object.to_le_bytes());
    record[12..16].copy_from_slice(&size.to_le_bytes());
    record[16..24].copy_from_slice(&next.to_le_bytes());
    record
}

pub(super) fn open(input: &mut dyn BufRead, sized_bytes: Option<u64>) -> Result<Opened<'_>, Wrong> {
    let mut ticker = Ticker::default();
    let mut objects = sized_bytes.map(Objects::new);
    let next = move || {
        if let Some(record) = objects.as_mut().and_then(Objects::waiting) {
            return Ok(Some(record));
        }
        let mut record = [0; RECORD_BYTES];
        if !read_record(input, &mut record)? {
            return Ok(None);
        }
        let ticks = ticker.ticks(u32::from_le_bytes(le(&record, 0)).into())?;
        let object = u64::from_le_bytes(le(&record, 4));
        let size_bytes = u32::from_le_bytes(le(&record, 12));
        let read = Record { block: object, ticks, access: Access::Read, thread: 0 };
        let block = match &mut objects {
            None => object,
            Some(objects) => {
                objects.add(&object.to_string(), size_bytes.into(), read).map_err(Wrong::Row)?
            }
        };
        Ok(Some(Record { block, ..read }))
    };
    Ok(Opened { clock: Clock::Seconds, next: Box::new(next) })
}
