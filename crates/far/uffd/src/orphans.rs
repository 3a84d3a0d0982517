//! Processes that wait for pages that no pager will bring any more.

use std::os::fd::{FromRawFd, OwnedFd};

use farpool_units::PAGE_BYTES;

use crate::handle::Uffd;
use crate::{Change, Message};

/// Messages read at a time.
const MESSAGES: usize = 16;

impl Uffd {
    /// Ends the threads that wait for a page (SIGBUS), as long as this is called now and then.
    /// `born` gets the userfaultfds of children born since, which lack the same pages. The
    /// descriptor must be non-blocking, and no other thread may serve it.
    pub fn end_waiting(&self, mut born: impl FnMut(OwnedFd)) {
        let mut messages = [Message::default(); MESSAGES];
        while let Ok(waiting) = self.read(&mut messages) {
            if waiting.is_empty() {
                return;
            }
            for message in waiting {
                if let Some(Change::Forked { descriptor }) = message.change() {
                    // SAFETY: the kernel made the descriptor for this process when the event was
                    // read.
                    born(unsafe { OwnedFd::from_raw_fd(descriptor) });
                }
                if let Some(address) = message.event().page_address {
                    // If it fails, the fault that follows reports the page again.
                    let _ = self.poison(address, PAGE_BYTES);
                    let _ = self.wake(address, PAGE_BYTES);
                }
            }
        }
    }
}
