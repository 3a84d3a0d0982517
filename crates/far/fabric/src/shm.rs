//! The blade's memory on the same host: pages are copied by the kernel from and to its descriptor.
//!
//! The memory is never mapped here, so it does not count as the program's own (resident memory) and
//! a wrong pointer of the program cannot reach it. A copy by `pread` costs one short system call
//! more than a copy through a mapping. Consecutive pages on the blade move in one call, wherever
//! their local places are. The blade's process takes no part, so this link works on after it has
//! died: the descriptor keeps the memory alive.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use farpool_units::PAGE_BYTES;
use rustix::io::Errno;

use crate::link::{Link, LinkPage, PageDone, PageFault};
use crate::sys::{self, VECTOR_LIMIT_PARTS, Vector};

/// The direct way to the memory of a blade on the same host.
#[derive(Debug)]
pub struct ShmLink {
    vector: Vector,
    done: Vec<PageDone>,
}

impl Default for ShmLink {
    fn default() -> Self {
        ShmLink {
            vector: Vector::with_capacity(VECTOR_LIMIT_PARTS),
            done: Vec::with_capacity(VECTOR_LIMIT_PARTS),
        }
    }
}

impl ShmLink {
    /// Moves the pages run by run with `copy`, which moves the whole vector from the given offset.
    ///
    /// # Safety
    /// Each page's `file` must be open.
    unsafe fn copy_runs(
        &mut self,
        pages: &[LinkPage],
        copy: impl Fn(BorrowedFd<'_>, &mut Vector, u64) -> Result<(), Errno>,
    ) {
        for run in runs(pages) {
            self.vector.clear();
            run.iter().for_each(|page| self.vector.push(page.memory, PAGE_BYTES));
            let offset = run[0].file_page * PAGE_BYTES as u64;
            // SAFETY: open, as promised by the caller.
            let file = unsafe { BorrowedFd::borrow_raw(run[0].file) };
            let result = copy(file, &mut self.vector, offset);
            let result = result.map_err(PageFault::Failed);
            self.done.extend(run.iter().map(|page| PageDone { token: page.token, result }));
        }
    }
}

/// Splits the pages where they are not consecutive on the blade.
fn runs(pages: &[LinkPage]) -> impl Iterator<Item = &[LinkPage]> {
    pages
        .chunk_by(|a, b| a.file == b.file && a.file_page.checked_add(1) == Some(b.file_page))
        .flat_map(|run| run.chunks(VECTOR_LIMIT_PARTS))
}

impl Link for ShmLink {
    unsafe fn read(&mut self, pages: &[LinkPage]) {
        // SAFETY: the caller lends each page's memory for writing, and its file is open.
        unsafe { self.copy_runs(pages, |fd, into, offset| sys::read_all_at(fd, into, offset)) };
    }

    unsafe fn write(&mut self, pages: &[LinkPage]) {
        // SAFETY: the caller lends each page's memory for reading, and its file is open.
        unsafe { self.copy_runs(pages, |fd, from, offset| sys::write_all_at(fd, from, offset)) };
    }

    fn poll(&mut self, done: &mut Vec<PageDone>) {
        done.append(&mut self.done);
    }

    fn wait(&mut self, done: &mut Vec<PageDone>) {
        self.poll(done);
    }

    fn expire(&mut self, _now: Instant, done: &mut Vec<PageDone>) {
        self.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn mark(&self) -> u64 {
        0 // the copy is over when read or write returns
    }

    fn is_finished_before(&self, _mark: u64) -> bool {
        true
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_sending(&self) -> bool {
        false
    }

    fn give_up(&mut self, _reason: &str) {
        // Nothing is ever under way.
    }

    fn loss(&self) -> Option<&str> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use farpool_wire::{PageNumber, SegmentId};

    use super::*;

    fn file_of_pages(pages: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("farpool-test", rustix::fs::MemfdFlags::CLOEXEC);
        let file = file.expect("memfd");
        rustix::fs::ftruncate(&file, pages * PAGE_BYTES as u64).expect("truncate");
        file
    }

    fn page(file: &OwnedFd, file_page: u64, memory: &mut [u8]) -> LinkPage {
        LinkPage {
            segment: SegmentId(0),
            page: PageNumber(0),
            file: file.as_raw_fd(),
            file_page,
            memory: memory.as_mut_ptr(),
            token: file_page,
        }
    }

    fn results(link: &mut ShmLink) -> Vec<(u64, bool)> {
        let mut done = Vec::new();
        link.poll(&mut done);
        assert_eq!(link.in_flight(), 0);
        done.iter().map(|it| (it.token, it.result.is_ok())).collect()
    }

    #[test]
    fn pages_come_back_from_where_they_were_put() {
        let (mut link, file) = (ShmLink::default(), file_of_pages(64));
        let order = [3u64, 4, 5, 9, 8, 40];
        let mut local: Vec<Vec<u8>> =
            order.iter().map(|&at| vec![u8::try_from(at).expect("small"); PAGE_BYTES]).collect();
        let pages: Vec<_> =
            order.iter().zip(&mut local).map(|(&at, it)| page(&file, at, it)).collect();
        // SAFETY: the buffers outlive the call, and shm completes at once.
        unsafe { link.write(&pages) };
        assert_eq!(results(&mut link), order.map(|at| (at, true)));
        for (&at, _) in order.iter().zip(&local).rev() {
            let mut back = vec![0u8; PAGE_BYTES];
            // SAFETY: as above.
            unsafe { link.read(&[page(&file, at, &mut back)]) };
            assert_eq!(results(&mut link), [(at, true)]);
            assert!(back.iter().all(|&byte| u64::from(byte) == at));
        }
    }

    #[test]
    fn more_neighbours_than_one_call_takes_still_move() {
        let count = VECTOR_LIMIT_PARTS + 5;
        let (mut link, file) = (ShmLink::default(), file_of_pages(count as u64));
        let mut local = vec![7u8; count * PAGE_BYTES];
        let pages: Vec<_> = (0u64..)
            .zip(local.chunks_mut(PAGE_BYTES))
            .map(|(at, it)| page(&file, at, it))
            .collect();
        // SAFETY: the buffers outlive the call.
        unsafe { link.write(&pages) };
        assert!(results(&mut link).iter().all(|it| it.1));
        let mut back = vec![0u8; PAGE_BYTES];
        // SAFETY: as above.
        unsafe { link.read(&[page(&file, count as u64 - 1, &mut back)]) };
        assert_eq!(back, vec![7u8; PAGE_BYTES]);
    }

    #[test]
    fn beyond_the_memory_is_an_error_for_that_page_only() {
        let (mut link, file) = (ShmLink::default(), file_of_pages(2));
        let (mut one, mut two) = (vec![0u8; PAGE_BYTES], vec![0u8; PAGE_BYTES]);
        // SAFETY: the buffers outlive the call.
        unsafe { link.read(&[page(&file, 1, &mut one), page(&file, 7, &mut two)]) };
        assert_eq!(results(&mut link), [(1, true), (7, false)]);
    }
}
