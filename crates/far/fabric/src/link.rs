//! What every transport does with pages: take a batch, return completions.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Instant;

use farpool_wire::{ErrorCode, PageNumber, SegmentId};
use rustix::io::Errno;

/// One page to move between local memory and a blade.
#[derive(Clone, Copy, Debug)]
pub struct LinkPage {
    /// The segment on the blade.
    pub segment: SegmentId,
    /// The page in the segment.
    pub page: PageNumber,
    /// The segment's memory on the blade, for the transport that reaches it directly; else unused.
    pub file: RawFd,
    /// The page's number in that file; else unused.
    pub file_page: u64,
    /// 4096 bytes of local memory, aligned to 4096: filled by a read, only read by a write. Lent to
    /// the link until the completion.
    pub memory: *mut u8,
    /// Returned in the [`PageDone`].
    pub token: u64,
}

// SAFETY: the pointer is lent to the link, whichever thread drives it.
unsafe impl Send for LinkPage {}

/// The completion of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageDone {
    /// The token of the [`LinkPage`].
    pub token: u64,
    /// Ok if the page was read and verified, or stored and acknowledged.
    pub result: Result<(), PageFault>,
}

/// Why one page failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageFault {
    /// The connection is gone and could not be made again.
    Lost,
    /// The request got no answer within the deadline.
    Deadline,
    /// The blade refused the request.
    Refused(ErrorCode),
    /// Repeated answers were damaged on the way.
    Corrupt,
    /// The system call on the blade's memory failed.
    Failed(Errno),
}

/// The pages' way to one blade, driven by one thread. Every page given to `read` or `write` is
/// returned in exactly one [`PageDone`].
pub trait Link: Send + std::fmt::Debug {
    /// Fetches the pages; order is priority.
    ///
    /// # Safety
    /// Each `memory` must be writable and not used by others until the page's completion. Each
    /// `file` that the transport uses must be open during the call.
    unsafe fn read(&mut self, pages: &[LinkPage]);

    /// Stores the pages.
    ///
    /// # Safety
    /// Each `memory` must be readable and unchanged until the page's completion; `file` as for
    /// `read`.
    unsafe fn write(&mut self, pages: &[LinkPage]);

    /// Hands out what is complete and moves on what can move. Never blocks.
    fn poll(&mut self, done: &mut Vec<PageDone>);

    /// As `poll`, but waits a short while for something to happen if nothing is complete.
    fn wait(&mut self, done: &mut Vec<PageDone>);

    /// Turns overdue requests into errors, which ends the link.
    fn expire(&mut self, now: Instant, done: &mut Vec<PageDone>);

    /// Pages given and not yet handed out.
    fn in_flight(&self) -> usize;

    /// A mark in the order of pages given: everything given so far is before it.
    fn mark(&self) -> u64;

    /// True if everything given before the mark has taken effect or failed, so that nothing of it
    /// will reach the blade any more.
    fn is_finished_before(&self, mark: u64) -> bool;

    /// What to poll for readability while something is in flight.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// True if the descriptor is also to be polled for room to send.
    fn is_sending(&self) -> bool;

    /// Ends the link: its requests fail.
    fn give_up(&mut self, reason: &str);

    /// Why the link ended, once it has: every request then fails.
    fn loss(&self) -> Option<&str>;
}
