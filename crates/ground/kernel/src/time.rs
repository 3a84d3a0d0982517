//! The time that a program lives in: the kernel's, or that of a simulator, which decides how long a
//! wait takes and what happens meanwhile.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use farpool_units::at_most;

/// Tells the time, and waits. [`Time::default`] is the kernel's.
#[derive(Clone, Copy)]
pub struct Time {
    now: fn() -> Instant,
    wait: fn(&mut [PollFd<'_>], Duration) -> Result<usize, Errno>,
    is_kernel: bool,
}

impl Time {
    /// The kernel's clock, and its `poll`.
    pub const KERNEL: Time = Time { now: Instant::now, wait: wait_for_kernel, is_kernel: true };

    /// A simulator's: `wait` returns the number of descriptors that are ready, 0 once the time is
    /// over by its own clock.
    pub fn simulated(
        now: fn() -> Instant,
        wait: fn(&mut [PollFd<'_>], Duration) -> Result<usize, Errno>,
    ) -> Time {
        Time { now, wait, is_kernel: false }
    }

    /// True if waits may also be left to the kernel, in a system call that moves data.
    pub fn is_kernel(self) -> bool {
        self.is_kernel
    }

    /// Returns the present time.
    #[inline]
    pub fn now(self) -> Instant {
        (self.now)()
    }

    /// Waits until a descriptor is ready, but no longer than `most`. Returns how many are.
    ///
    /// # Errors
    /// The kernel's, among them an interruption by a signal.
    pub fn wait(self, set: &mut [PollFd<'_>], most: Duration) -> Result<usize, Errno> {
        (self.wait)(set, most)
    }

    /// Waits until the descriptor is ready or the time is over. True if it is ready.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait_until(
        self,
        fd: BorrowedFd<'_>,
        what: PollFlags,
        until: Instant,
    ) -> Result<bool, Errno> {
        let mut set = [PollFd::from_borrowed_fd(fd, what)];
        loop {
            match self.wait(&mut set, until.saturating_duration_since(self.now())) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for about as long: a signal may end the pause.
    pub fn pause(self, time: Duration) {
        // An interrupted pause is just a shorter one.
        let _ = self.wait(&mut [], time);
    }
}

impl Default for Time {
    fn default() -> Self {
        Time::KERNEL
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(if self.is_kernel { "Time::KERNEL" } else { "Time::simulated" })
    }
}

fn wait_for_kernel(set: &mut [PollFd<'_>], most: Duration) -> Result<usize, Errno> {
    let most =
        Timespec { tv_sec: at_most(most.as_secs()), tv_nsec: i64::from(most.subsec_nanos()) };
    poll(set, Some(&most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn the_kernels_time_waits_for_a_descriptor_or_until_the_time_is_over() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let time = Time::KERNEL;
        let begun = time.now();
        let until = begun + Duration::from_millis(5);
        assert_eq!(time.wait_until(reader.as_fd(), PollFlags::IN, until), Ok(false));
        time.pause(Duration::from_millis(5));
        assert!(time.now() >= begun + Duration::from_millis(10));
        rustix::io::write(&writer, b"x").expect("room");
        let long = time.now() + Duration::from_secs(600);
        assert_eq!(time.wait_until(reader.as_fd(), PollFlags::IN, long), Ok(true));
    }
}
