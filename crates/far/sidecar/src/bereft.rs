//! The sidecar was killed, and its keeper has closed its end: the warden ends the program, and
//! those of its children that wait for a page that is no longer served.
//!
//! Nothing here allocates, see [`crate::warden`].

use std::ffi::CStr;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, RawFd};

use farpool_pager::life::children::elsewhere;
use farpool_uffd::Uffd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, RawDir, fcntl_setfl, open, readlinkat_raw};
use rustix::process::{Signal, pidfd_send_signal};

use crate::watch::{Host, Look};
use crate::{HOST_FD, raw};

/// Pause between two checks for waiting processes (5 ms).
const STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// The kernel's list of the descriptors of a process.
const LIST: &CStr = c"/proc/self/fd";
/// The kernel's name for a userfaultfd.
const KIND: &[u8] = b"anon_inode:[userfaultfd]";
/// Room for some entries of the list, each of 24 bytes or more.
const ENTRIES_BYTES: usize = 1024;

/// Ends processes until none is left that could wait for a page.
pub fn end_all(host: Host) {
    // The list is opened once: there may be no descriptor left later.
    let list = open(LIST, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    loop {
        let is_running = end_program(host);
        // Without the list no process can be ended, but none reads zeros as long as the table is
        // there.
        let is_waiting = list.as_ref().map_or(true, |list| end_waiting(list.as_fd()));
        if !is_running && !is_waiting {
            return;
        }
        let _ = poll(&mut [], Some(&STEP));
    }
}

/// Kills the program unless it runs another image. False if it has ended.
fn end_program(host: Host) -> bool {
    let process = raw::held_descriptor(HOST_FD);
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let has_ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&now));
    if has_ended.is_ok_and(|ended| ended > 0) || host.look() == Look::Other {
        return false;
    }
    let _ = pidfd_send_signal(process, Signal::KILL);
    true
}

/// Ends processes that wait for a page. True if some could do so later.
fn end_waiting(list: BorrowedFd<'_>) -> bool {
    let mut room = [MaybeUninit::uninit(); ENTRIES_BYTES];
    let mut is_waiting = rustix::fs::seek(list, rustix::fs::SeekFrom::Start(0)).is_err();
    let mut entries = RawDir::new(list, &mut room);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return true };
        if is_userfaultfd(list, entry.file_name())
            && let Some(number) = number(entry.file_name())
        {
            is_waiting |= end_waiting_for(number);
        }
    }
    is_waiting
}

/// The same for one userfaultfd.
fn end_waiting_for(number: RawFd) -> bool {
    // Another server of a child reads its events; the end of the table does not end that.
    if elsewhere::contains(number) {
        let uffd = borrowed(number);
        return !uffd.is_gone();
    }
    let uffd = borrowed(number);
    let _ = fcntl_setfl(uffd.as_fd(), OFlags::NONBLOCK);
    let mut has_born = false;
    uffd.end_waiting(|born| {
        // It stays in the table, and is found there by the next check.
        let _ = born.into_raw_fd();
        has_born = true;
    });
    // The program's memory exists as long as this task does.
    has_born || (uffd.is_of_caller() != Some(true) && !uffd.is_gone())
}

/// A userfaultfd of the table, which must not be closed.
fn borrowed(number: RawFd) -> ManuallyDrop<Uffd> {
    ManuallyDrop::new(Uffd::adopt(raw::placed_descriptor(number)))
}

fn is_userfaultfd(list: BorrowedFd<'_>, name: &CStr) -> bool {
    let mut room = [MaybeUninit::<u8>::uninit(); KIND.len() + 1];
    readlinkat_raw(list, name, &mut room).is_ok_and(|(kind, _)| *kind == *KIND)
}

/// The descriptor number of an entry in the list.
fn number(name: &CStr) -> Option<RawFd> {
    name.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_userfaultfd_is_known_by_its_kind() {
        let list = open(LIST, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("a list");
        assert!(!is_userfaultfd(list.as_fd(), c"0"), "a file, a pipe or a terminal");
        assert!(!is_userfaultfd(list.as_fd(), c"no number"));
        let Ok(uffd) = Uffd::open(farpool_uffd::features::PAGER, true) else { return };
        let name = std::ffi::CString::new(uffd.into_descriptor().into_raw_fd().to_string());
        assert!(is_userfaultfd(list.as_fd(), &name.expect("digits")));
    }

    #[test]
    fn entries_are_numbers() {
        assert_eq!(number(c"17"), Some(17));
        assert_eq!(number(c".."), None);
    }
}
