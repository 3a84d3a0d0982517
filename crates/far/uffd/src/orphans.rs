//! Processes that wait for pages which no pager brings any more.

use std::os::fd::{FromRawFd, OwnedFd};

use farpool_units::PAGE_BYTES;

use crate::handle::Uffd;
use crate::{Change, Message};

/// Messages taken with one read.
const MESSAGES: usize = 16;

impl Uffd {
    /// Ends the processes that wait for a page (SIGBUS); to be called now and then. `born` gets the
    /// userfaultfds of the children that they have had since, which lack pages as they do. The
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
                    // One that fails is reported again by the fault that follows.
                    let _ = self.poison(address, PAGE_BYTES);
                    let _ = self.wake(address, PAGE_BYTES);
                }
            }
        }
    }
}
