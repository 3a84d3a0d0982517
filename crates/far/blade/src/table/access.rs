//! Access checks of the data path: may this client touch these pages, and where are they?

use super::segment::Segment;
use super::{ClientNumber, Refused, Table};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, exactly};
use farpool_wire::{ErrorCode, Extent, PageNumber, SegmentId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

const PAGE_BYTES_U32: u32 = 4096;
const _: () = assert!(PAGE_BYTES_U32 as usize == PAGE_BYTES);

/// What a client wants to do with pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// To read them.
    Read,
    /// To write them.
    Write,
}

/// Contiguous bytes within one superpage of a segment's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The superpage.
    pub rmma: u32,
    /// First byte in it.
    pub offset_bytes: u32,
    /// Number of bytes.
    pub bytes: u32,
}

/// Permission to touch pages.
#[derive(Debug)]
pub struct Permit<M> {
    /// The memory that the runs are in.
    pub memory: M,
    /// For a write: hold it until the last byte has arrived.
    pub guard: Option<WriteGuard>,
}

/// While this lives, the segment is not frozen and none of its superpages are freed.
#[derive(Debug)]
pub struct WriteGuard(Arc<AtomicU32>);

impl WriteGuard {
    fn new(writers: &Arc<AtomicU32>) -> Self {
        // Table operations that read the count hold the table alone, so none misses this.
        writers.fetch_add(1, Ordering::AcqRel);
        WriteGuard(Arc::clone(writers))
    }
}

impl Drop for WriteGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<M: Clone> Table<M> {
    /// Checks the access to all pages of `extents` and appends their places to `runs`, in order;
    /// neighbours are joined. After an error `runs` holds nothing useful.
    ///
    /// # Errors
    /// Not a segment of this client, not writable, or a page without memory.
    pub fn access(
        &self,
        client: ClientNumber,
        id: SegmentId,
        extents: &[Extent],
        access: Access,
        runs: &mut Vec<Run>,
    ) -> Result<Permit<M>, Refused> {
        let segment = self.segment_of(client, id)?;
        if access == Access::Write {
            segment.check_writable(id)?;
            assert_eq!(segment.users.len(), 1, "a writable segment has one user");
        }
        for extent in extents {
            segment.append_runs(*extent, runs)?;
        }
        let guard = (access == Access::Write).then(|| WriteGuard::new(&segment.writers));
        Ok(Permit { memory: segment.memory.clone(), guard })
    }
}

impl<M> Segment<M> {
    fn append_runs(&self, extent: Extent, runs: &mut Vec<Run>) -> Result<(), Refused> {
        let mut page = u64::from(extent.first().0);
        let end = page + u64::from(extent.count_pages());
        while page < end {
            let not_allocated = Refused::new(ErrorCode::NotAllocated, page);
            let number = PageNumber(u32::try_from(page).map_err(|_| not_allocated)?);
            let rmma = *self.map.get(&number.superpage().0).ok_or(not_allocated)?;
            let index = number.index_in_superpage();
            let left: u32 = exactly(end - page);
            let count = left.min(PAGES_PER_SUPERPAGE - index);
            let run =
                Run { rmma, offset_bytes: index * PAGE_BYTES_U32, bytes: count * PAGE_BYTES_U32 };
            append_joined(run, runs);
            page += u64::from(count);
        }
        Ok(())
    }
}

fn append_joined(run: Run, runs: &mut Vec<Run>) {
    match runs.last_mut() {
        Some(last)
            if last.rmma == run.rmma && last.offset_bytes + last.bytes == run.offset_bytes =>
        {
            last.bytes += run.bytes;
        }
        _ => runs.push(run),
    }
}
