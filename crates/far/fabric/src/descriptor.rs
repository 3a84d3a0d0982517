//! The descriptors that one pool holds open inside another program.
//!
//! A program may close descriptors it does not know (daemons do, up to the limit) and may be copied
//! by fork. So every descriptor of ours is moved out of the low numbers that programs like to
//! choose, is closed on exec, and is listed in a [`DescriptorSet`] that answers "is it ours?"
//! without a lock and can close all of them in a forked child without reading any other state.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

/// Lowest number of our descriptors where the limit of the process allows: low enough for the usual
/// limit of 1024, high enough to be out of a program's way.
pub const DESCRIPTOR_FLOOR: RawFd = 700;
/// Highest number of a descriptor that can be ours, plus one; beyond it `adopt` fails as if the
/// process had no descriptor left. Each number takes one bit.
pub const DESCRIPTOR_LIMIT: RawFd = 65536;

const WORDS: usize = DESCRIPTOR_LIMIT as usize / 64;

/// The descriptors of one pool.
pub struct DescriptorSet {
    bits: Box<[AtomicU64; WORDS]>,
}

impl std::fmt::Debug for DescriptorSet {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_set().entries(self.numbers()).finish()
    }
}

impl Default for DescriptorSet {
    fn default() -> Self {
        DescriptorSet { bits: Box::new([const { AtomicU64::new(0) }; WORDS]) }
    }
}

impl DescriptorSet {
    /// Adds the descriptor: moves it up, marks it close-on-exec, records it.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn adopt(self: &Arc<Self>, fd: OwnedFd) -> Result<Descriptor, Errno> {
        let moved = match rustix::io::fcntl_dupfd_cloexec(&fd, DESCRIPTOR_FLOOR) {
            Ok(moved) => {
                close(fd.into_raw_fd());
                moved
            }
            // A small limit (EINVAL) or none left up there: a low number is better than none.
            Err(_) => fd,
        };
        let raw = moved.into_raw_fd();
        let Some((word, bit)) = self.place(raw) else {
            close(raw);
            return Err(Errno::MFILE);
        };
        word.fetch_or(bit, Ordering::AcqRel);
        Ok(Descriptor { raw, set: Arc::clone(self) })
    }

    /// True if the descriptor is in the set.
    pub fn holds(&self, fd: RawFd) -> bool {
        self.place(fd).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    /// Closes every descriptor of the set, for a forked child that gives up its copy of the pool.
    /// Afterwards dropping a [`Descriptor`] of the set closes nothing.
    pub fn close_all(&self) {
        for fd in self.numbers() {
            self.release(fd);
        }
    }

    /// The numbers in the set.
    pub fn numbers(&self) -> impl Iterator<Item = RawFd> {
        (0..DESCRIPTOR_LIMIT).filter(|&fd| self.holds(fd))
    }

    fn release(&self, fd: RawFd) {
        if let Some((word, bit)) = self.place(fd)
            && word.fetch_and(!bit, Ordering::AcqRel) & bit != 0
        {
            close(fd);
        }
    }

    fn place(&self, fd: RawFd) -> Option<(&AtomicU64, u64)> {
        let number = usize::try_from(fd).ok()?;
        Some((self.bits.get(number / 64)?, 1 << (number % 64)))
    }
}

/// One open descriptor of a set; closed when dropped.
pub struct Descriptor {
    raw: RawFd,
    set: Arc<DescriptorSet>,
}

impl std::fmt::Debug for Descriptor {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "Descriptor({})", self.raw)
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the number stays open as long as self lives; `close_all` is only for a child that
        // never uses its copies again.
        unsafe { BorrowedFd::borrow_raw(self.raw) }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.set.release(self.raw);
    }
}

/// Closes by a direct system call: libc's `close` may be interposed to protect our descriptors.
fn close(fd: RawFd) {
    // SAFETY: the caller owns the number and gives it up here.
    unsafe { rustix::io::close(fd) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_file() -> OwnedFd {
        rustix::fs::memfd_create("farpool-test", rustix::fs::MemfdFlags::empty()).expect("memfd")
    }

    #[test]
    fn a_descriptor_is_held_until_it_is_dropped() {
        let set = Arc::new(DescriptorSet::default());
        let one = set.adopt(a_file()).expect("adopt");
        let raw = one.raw;
        assert!(set.holds(raw) && raw >= DESCRIPTOR_FLOOR);
        drop(one);
        assert!(!set.holds(raw));
    }

    #[test]
    fn close_all_closes_what_it_holds() {
        let set = Arc::new(DescriptorSet::default());
        let (end, other_end) = rustix::pipe::pipe().expect("pipe");
        let _held = set.adopt(other_end).expect("adopt");
        let _other = set.adopt(a_file()).expect("adopt");
        set.close_all();
        assert_eq!(set.numbers().count(), 0);
        // Checked by the pipe and not by the number, which another test may have by now.
        assert_eq!(rustix::io::read(&end, &mut [0; 1]), Ok(0));
    }

    #[test]
    fn numbers_out_of_range_are_never_ours() {
        let set = DescriptorSet::default();
        assert!(!set.holds(-1) && !set.holds(DESCRIPTOR_LIMIT) && !set.holds(RawFd::MAX));
    }
}
