//! A child of the program: it has what was resident at the fork, and gets the rest before the program goes on.
//!
//! The event of the fork brings the child's userfaultfd. Until the change is applied no page moves, so the page states
//! are those of the fork. The child runs meanwhile; where it touches a page that is not there it waits. What it does to
//! its own address space comes as events of its own, and is heeded: a page that it has dropped stays dropped, one that
//! it has moved arrives at the new place, and its children get what it gets. In the end its userfaultfd is closed, and
//! it goes on as if there had never been a pager.
//!
//! A child that execs, as most do, needs nothing: it is given a moment for that.

use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use farpool_uffd::{Change, Message, PAGE_BYTES, Uffd};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::{CARRY_PAGES, Steward};
use crate::attached::Attached;
use crate::maps;
use crate::page::Phase;
use crate::space::Page;
use crate::sys;

/// A child has so long to exec before its pages are brought in, unless it needs one of them earlier.
const EXEC_TIME: Duration = Duration::from_millis(3);
const EXEC_STEP: Duration = Duration::from_micros(200);
/// No program has memory here (below vm.mmap_min_addr's default): ESRCH tells that the address space is gone.
const PROBED_ADDRESS: usize = 0x8000;
/// A child may take so long to change its address space, until the event of it is there.
const SETTLE_TIME: Duration = Duration::from_secs(10);

/// A child of the program, or a child of its own.
struct Child {
    uffd: Uffd,
    /// Whom to tell of a child of its own.
    tell: fn(&OwnedFd),
    /// What it did to the address space since the fork, in order.
    changes: Vec<Change>,
    is_gone: bool,
}

impl Steward {
    /// Gives the child what was far at the fork. The change is not applied yet, so nothing moves.
    pub(super) fn bring_in_child(&mut self, attached: &Attached, uffd: Uffd) {
        if let Err(error) = rustix::fs::fcntl_setfl(&uffd, rustix::fs::OFlags::NONBLOCK) {
            crate::serve::fail_closed(&format!("a child's userfaultfd cannot be used: {error}"));
        }
        let tell = attached.teller();
        let mut children = vec![Child { uffd, tell, changes: Vec::new(), is_gone: false }];
        if !children[0].may_need_pages() {
            return;
        }
        // The kernel leaves such memory empty in a child, and registered.
        let wiped = match sys::read_file("/proc/self/smaps") {
            Ok(details) => maps::wiped_on_fork(&details),
            Err(error) => crate::serve::fail_closed(&format!("/proc/self/smaps: {error}")),
        };
        let wiped = wiped.into_iter().map(|(start, end)| Change::Unmapped { start, end });
        children[0].changes.extend(wiped);
        // Nothing is being moved out while the lock is held.
        let registry = self.pager.lock_registry();
        for id in 0..self.core.space.count() {
            self.bring_in_childs_superpage(id, &mut children);
            if children.iter().all(|child| child.is_gone) {
                break;
            }
        }
        drop(registry);
    }

    fn bring_in_childs_superpage(&mut self, id: usize, children: &mut Vec<Child>) {
        let Some(superpage) = self.core.space.by_id(id) else { return };
        let mut batch = Vec::with_capacity(CARRY_PAGES);
        for index in 0..superpage.pages.len() {
            let page = Page { superpage, index };
            loop {
                match page.cell().load().phase() {
                    Phase::Far => batch.push(page),
                    Phase::Victim => {
                        // It stays a victim: who could take it back waits for this change to be applied.
                        if let Some((slot, _)) = self.core.frames.locate(page) {
                            let source = self.core.frames.address(slot);
                            give(children, page.address(), source);
                        }
                    }
                    Phase::Lost => poison(children, page.address()),
                    // Whoever owns it lets it go soon.
                    Phase::Fetching | Phase::Evicting => {
                        sys::pause();
                        continue;
                    }
                    Phase::Untouched | Phase::Resident | Phase::Dropped => {}
                }
                break;
            }
            if batch.len() == CARRY_PAGES {
                self.give_batch(&batch, children);
                batch.clear();
            }
        }
        self.give_batch(&batch, children);
    }

    fn give_batch(&mut self, batch: &[Page], children: &mut Vec<Child>) {
        if batch.is_empty() {
            return;
        }
        let fetched = self.fetch_to_carry(batch);
        for (number, page) in batch.iter().enumerate() {
            if fetched & (1 << number) == 0 {
                sys::say(&format!("page {:#x} of a child was lost with its blade", page.address()));
                poison(children, page.address());
            } else {
                give(children, page.address(), self.carry + number * PAGE_BYTES);
            }
        }
    }
}

/// Copies a page to every child that still wants it.
fn give(children: &mut Vec<Child>, address: usize, source: usize) {
    let mut number = 0;
    while let Some(child) = children.get_mut(number) {
        let born = child.give(address, source);
        children.extend(born);
        number += 1;
    }
}

fn poison(children: &mut Vec<Child>, address: usize) {
    for child in children {
        if let Some(place) = child.place(address) {
            let _ = child.uffd.poison(place, PAGE_BYTES);
            let _ = child.uffd.wake(place, PAGE_BYTES);
        }
    }
}

impl Child {
    /// Waits a moment whether the child execs or ends; says whether it has not.
    fn may_need_pages(&mut self) -> bool {
        let until = Instant::now() + EXEC_TIME;
        let step = Timespec { tv_sec: 0, tv_nsec: EXEC_STEP.subsec_nanos().into() };
        while Instant::now() < until {
            if self.uffd.zero(PROBED_ADDRESS, PAGE_BYTES, false).errno == Some(libc::ESRCH) {
                return false;
            }
            let mut fds = [PollFd::new(&self.uffd, PollFlags::IN)];
            if rustix::event::poll(&mut fds, Some(&step)).is_ok_and(|ready| ready > 0) {
                return true;
            }
        }
        true
    }

    /// Copies a page of the parent's to where the child has it now; returns children that were born meanwhile, which
    /// lack this page and all that come after.
    fn give(&mut self, address: usize, source: usize) -> Vec<Child> {
        let (mut born, mut is_absent) = (Vec::new(), false);
        let until = Instant::now() + SETTLE_TIME;
        while Instant::now() < until {
            if self.is_gone {
                return born;
            }
            let Some(place) = self.place(address) else { return born };
            match self.uffd.copy(place, source, PAGE_BYTES, true).errno {
                Some(libc::EAGAIN) => {
                    is_absent = false;
                    born.extend(self.take_in());
                    std::thread::yield_now();
                }
                Some(libc::ESRCH) => self.is_gone = true,
                // The child has no such memory (MADV_DONTFORK), or was just moving it: then the same call says EAGAIN.
                Some(libc::ENOENT) if !is_absent => is_absent = true,
                None | Some(libc::EEXIST | libc::ENOENT) => return born,
                Some(errno) => crate::serve::fail_closed(&format!(
                    "a child does not get its page {place:#x}: {}",
                    std::io::Error::from_raw_os_error(errno)
                )),
            }
        }
        crate::serve::fail_closed("a child's address space does not settle");
    }

    /// Reads what the child did. Its faults need no answer: the page they wait for comes, or the end does.
    fn take_in(&mut self) -> Vec<Child> {
        let mut born = Vec::new();
        let mut messages = [Message::default(); 8];
        while let Ok(read) = self.uffd.read(&mut messages) {
            for change in read.iter().filter_map(Message::change) {
                if let Change::Forked { descriptor } = change {
                    // SAFETY: the kernel made the descriptor for this process when the event was read.
                    let uffd = unsafe { OwnedFd::from_raw_fd(descriptor) };
                    let _ = rustix::fs::fcntl_setfl(&uffd, rustix::fs::OFlags::NONBLOCK);
                    (self.tell)(&uffd);
                    let (uffd, changes) = (Uffd::adopt(uffd), self.changes.clone());
                    born.push(Child { uffd, tell: self.tell, changes, is_gone: false });
                } else {
                    self.changes.push(change);
                }
            }
        }
        born
    }

    /// Where a page of the parent's is in the child; None: it has dropped it.
    fn place(&self, address: usize) -> Option<usize> {
        place(&self.changes, address)
    }
}

fn place(changes: &[Change], address: usize) -> Option<usize> {
    changes.iter().try_fold(address, |at, change| match *change {
        Change::Removed { start, end } | Change::Unmapped { start, end } => {
            (!(start..end).contains(&at)).then_some(at)
        }
        Change::Moved { from, to, bytes } if (from..from + bytes).contains(&at) => {
            Some(at - from + to)
        }
        Change::Moved { .. } | Change::Forked { .. } => Some(at),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_follows_what_the_child_did() {
        let changes = [
            Change::Moved { from: 0x1000, to: 0x9000, bytes: 0x2000 },
            Change::Removed { start: 0xa000, end: 0xb000 },
            Change::Moved { from: 0x9000, to: 0x5000, bytes: 0x1000 },
        ];
        assert_eq!(place(&changes, 0x1000), Some(0x5000));
        assert_eq!(place(&changes, 0x2000), None);
        assert_eq!(place(&changes, 0x3000), Some(0x3000));
    }
}
