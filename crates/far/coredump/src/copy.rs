//! Copies the memory of one mapping: far pages as they arrive, zeros as holes. Pure.

use std::ops::Range;

use farpool_units::{PAGE_BYTES, PAGE_BYTES_U64, at_most};

use crate::error::CoreError;

/// Pages read at once. The kernel pins what it reads, and pinned pages cannot be moved out: this
/// must be few, even for the smallest limit.
pub const CHUNK_PAGES: usize = 64;

/// The source of memory.
pub trait Source {
    /// Reads whole pages. Returns how many were read before an unreadable one.
    fn read(&mut self, address: u64, pages: &mut [u8]) -> Result<usize, CoreError>;
    /// The pages that the kernel has for the process: bit n stands for page n.
    fn present(&mut self, address: u64, pages: usize) -> Result<u64, CoreError>;
}

/// The destination of memory.
pub trait Sink {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CoreError>;
}

/// Which pages of a mapping are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Pages that the kernel has.
    Present,
    /// Also pages that a pager brings.
    All,
}

/// Copies chunk by chunk.
#[derive(Debug)]
pub struct Copier<'a, S, T> {
    pub source: &'a mut S,
    pub sink: &'a mut T,
    /// Pages that could not be read, and are zeros in the copy.
    pub unreadable_pages: u64,
}

impl<S: Source, T: Sink> Copier<'_, S, T> {
    /// Copies the memory of a range to `offset` of the sink. After each chunk `step` gets the bytes
    /// done.
    pub fn copy(
        &mut self,
        range: Range<u64>,
        offset: u64,
        pages: Pages,
        mut step: impl FnMut(u64) -> Result<(), CoreError>,
    ) -> Result<(), CoreError> {
        let mut buffer = vec![0; CHUNK_PAGES * PAGE_BYTES];
        let mut at = range.start;
        while at < range.end {
            let left: usize = at_most((range.end - at) / PAGE_BYTES_U64);
            let count = left.clamp(1, CHUNK_PAGES);
            let chunk = &mut buffer[..count * PAGE_BYTES];
            chunk.fill(0);
            match pages {
                Pages::Present => {
                    let present = self.source.present(at, count)?;
                    self.read(at, chunk, |page| present >> page & 1 == 1)?;
                }
                Pages::All => self.read(at, chunk, |_| true)?,
            }
            self.write(offset + (at - range.start), chunk)?;
            at += chunk.len() as u64;
            step(chunk.len() as u64)?;
        }
        Ok(())
    }

    /// Reads the wanted pages of a chunk, in runs.
    fn read(
        &mut self,
        at: u64,
        chunk: &mut [u8],
        wanted: impl Fn(usize) -> bool,
    ) -> Result<(), CoreError> {
        let count = chunk.len() / PAGE_BYTES;
        let mut page = 0;
        while page < count {
            if !wanted(page) {
                page += 1;
                continue;
            }
            let end = (page..count).find(|page| !wanted(*page)).unwrap_or(count);
            let done = self.source.read(
                at + (page * PAGE_BYTES) as u64,
                &mut chunk[page * PAGE_BYTES..end * PAGE_BYTES],
            )?;
            page += done;
            if page < end {
                self.unreadable_pages += 1;
                chunk[page * PAGE_BYTES..(page + 1) * PAGE_BYTES].fill(0);
                page += 1;
            }
        }
        Ok(())
    }

    /// Writes the pages that are not zero.
    fn write(&mut self, offset: u64, chunk: &[u8]) -> Result<(), CoreError> {
        let is_empty = |page: &[u8]| page.iter().all(|byte| *byte == 0);
        let full: Vec<bool> = chunk.chunks(PAGE_BYTES).map(|page| !is_empty(page)).collect();
        let mut page = 0;
        while let Some(first) = (page..full.len()).find(|page| full[*page]) {
            let end = (first..full.len()).find(|page| !full[*page]).unwrap_or(full.len());
            self.sink.write(
                offset + (first * PAGE_BYTES) as u64,
                &chunk[first * PAGE_BYTES..end * PAGE_BYTES],
            )?;
            page = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: u64 = 0x7000_0000;

    /// Each page is filled with one byte; 0 is a missing page, or zeros.
    struct Model {
        pages: Vec<u8>,
        absent: Vec<bool>,
        lost: Vec<bool>,
        brought: Vec<usize>,
    }

    impl Source for Model {
        fn read(&mut self, address: u64, pages: &mut [u8]) -> Result<usize, CoreError> {
            let first = usize::try_from((address - BASE) / PAGE_BYTES_U64).expect("an index");
            for (index, page) in pages.chunks_mut(PAGE_BYTES).enumerate() {
                if self.lost[first + index] {
                    return Ok(index);
                }
                if self.absent[first + index] {
                    self.brought.push(first + index);
                }
                page.fill(self.pages[first + index]);
            }
            Ok(pages.len() / PAGE_BYTES)
        }

        fn present(&mut self, address: u64, pages: usize) -> Result<u64, CoreError> {
            let first = usize::try_from((address - BASE) / PAGE_BYTES_U64).expect("an index");
            let bit = |page: usize| u64::from(!self.absent[first + page]) << page;
            Ok((0..pages).fold(0, |bits, page| bits | bit(page)))
        }
    }

    #[derive(Default)]
    struct Sparse {
        bytes: Vec<u8>,
        written_bytes: usize,
    }

    impl Sink for Sparse {
        fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CoreError> {
            let at = usize::try_from(offset).expect("an offset");
            self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
            self.written_bytes += bytes.len();
            Ok(())
        }
    }

    fn copied(model: &mut Model, pages: Pages) -> (Sparse, u64, u64) {
        let bytes = model.pages.len() * PAGE_BYTES;
        let mut sink = Sparse { bytes: vec![0; bytes], written_bytes: 0 };
        let mut done = 0;
        let mut copier = Copier { source: model, sink: &mut sink, unreadable_pages: 0 };
        let step = |bytes| {
            done += bytes;
            Ok(())
        };
        copier.copy(BASE..BASE + bytes as u64, 0, pages, step).expect("a copy");
        let unreadable = copier.unreadable_pages;
        (sink, unreadable, done)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_copy_is_the_memory(
            pages in prop::collection::vec((0_u8..4, any::<bool>(), 0_u8..9), 1..300),
            all in any::<bool>(),
        ) {
            let mut model = Model {
                pages: pages.iter().map(|page| page.0).collect(),
                absent: pages.iter().map(|page| page.1).collect(),
                lost: pages.iter().map(|page| page.2 == 0).collect(),
                brought: Vec::new(),
            };
            let (sink, unreadable, done) = copied(&mut model, if all { Pages::All } else { Pages::Present });
            prop_assert_eq!(done, (pages.len() * PAGE_BYTES) as u64);
            let is_read = |page: usize| all || !model.absent[page];
            let has_come = |page: usize| is_read(page) && !model.lost[page];
            for (page, bytes) in sink.bytes.chunks(PAGE_BYTES).enumerate() {
                let expected = if has_come(page) { model.pages[page] } else { 0 };
                prop_assert!(bytes.iter().all(|byte| *byte == expected));
            }
            let full = (0..pages.len()).filter(|page| has_come(*page) && model.pages[*page] != 0);
            prop_assert_eq!(sink.written_bytes, full.count() * PAGE_BYTES);
            let lost = (0..pages.len()).filter(|page| is_read(*page) && model.lost[*page]);
            prop_assert_eq!(unreadable, lost.count() as u64);
            prop_assert!(all || model.brought.is_empty());
        }
    }
}
