//! Objects with names and sizes, as blocks: each object has a range of block numbers of its own.
//! What is accessed at an address is the blocks that it lies in.

use std::collections::HashMap;

use crate::record::Record;

/// Blocks of the largest object: 64 GiB of 4 KiB. A larger size is damage.
const OBJECT_BLOCKS_MAX: u64 = 1 << 24;
/// Objects that have numbers of their own, a range of blocks each.
const OBJECTS_MAX: usize = 1 << 38;

/// Numbers objects as they appear, and holds the blocks of the last one that are not returned yet.
#[derive(Debug)]
pub(super) struct Objects {
    block_bytes: u64,
    numbers: HashMap<Box<str>, u64>,
    /// The next record, and how many follow it, itself included.
    rest: Option<(Record, u64)>,
}

impl Objects {
    pub(super) fn new(block_bytes: u64) -> Self {
        Self { block_bytes: block_bytes.max(1), numbers: HashMap::new(), rest: None }
    }

    /// Returns the next block of the last object.
    pub(super) fn waiting(&mut self) -> Option<Record> {
        let (record, count) = self.rest.take()?;
        if count > 1 {
            self.rest = Some((Record { block: record.block + 1, ..record }, count - 1));
        }
        Some(record)
    }

    /// Returns the first block of an object of this size in bytes; `record` is used for the others,
    /// which [`Objects::waiting`] returns, at the same time.
    ///
    /// # Errors
    /// An object larger than any.
    pub(super) fn add(
        &mut self,
        name: &str,
        size_bytes: u64,
        record: Record,
    ) -> Result<u64, String> {
        let blocks = size_bytes.div_ceil(self.block_bytes).max(1);
        let next = self.numbers.len();
        let number = match self.numbers.get(name) {
            Some(number) => *number,
            None if next >= OBJECTS_MAX => return Err("too many objects".to_owned()),
            None => *self.numbers.entry(name.into()).or_insert(next as u64),
        };
        let first = number * OBJECT_BLOCKS_MAX;
        self.follow(first, blocks, size_bytes, record)?;
        Ok(first)
    }

    /// Returns the block of an address, of which this many bytes are accessed, at least one; the
    /// others as for [`Objects::add`].
    ///
    /// # Errors
    /// An access larger than any, or beyond the last address.
    pub(super) fn range(
        &mut self,
        address: u64,
        size_bytes: u64,
        record: Record,
    ) -> Result<u64, String> {
        let last = address.checked_add(size_bytes.max(1) - 1).ok_or_else(|| {
            format!("{size_bytes} bytes at address {address} go beyond the last address")
        })?;
        let first = address / self.block_bytes;
        self.follow(first, last / self.block_bytes - first + 1, size_bytes, record)?;
        Ok(first)
    }

    /// Has [`Objects::waiting`] return the blocks after the first of `blocks`.
    fn follow(
        &mut self,
        first: u64,
        blocks: u64,
        size_bytes: u64,
        record: Record,
    ) -> Result<(), String> {
        if blocks > OBJECT_BLOCKS_MAX {
            return Err(format!("{size_bytes} bytes at once; at most {OBJECT_BLOCKS_MAX} blocks"));
        }
        self.rest =
            (blocks > 1).then(|| (Record { block: first + 1, ticks: 0, ..record }, blocks - 1));
        Ok(())
    }
}
