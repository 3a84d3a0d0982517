//! The keeper holds a duplicate of every userfaultfd of the tree.
//!
//! When the last reference to a userfaultfd goes, missing pages silently read as zeros. The pager's
//! own reference lives as long as its process; but a child of vfork shares the process's memory and
//! can outlive it (a kill between vfork and exec). With the duplicate the faults of such a child go
//! unanswered instead of wrong, and the keeper ends it: its missing pages are poisoned (SIGBUS).

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use farpool_kernel::{lock, receive_with_descriptor};
use farpool_uffd::Uffd;
use rustix::fs::OFlags;
use rustix::net::RecvFlags;

/// Name of the socket in a run's directory, where processes hand over their duplicates.
pub const UFFD_GUARDIAN_SOCKET: &str = "keeper.sock";
/// What the pager calls its fault threads.
const FAULT_THREAD: &str = "farpool-fault";

/// A connected process hands over its duplicate at once: one that was stopped in between holds up
/// all others.
const HAND_OVER_TIME: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Held {
    pid: u32,
    uffd: Uffd,
}

/// See the module's description.
#[derive(Clone, Debug, Default)]
pub struct UffdGuardian {
    held: Arc<Mutex<Vec<Held>>>,
}

impl UffdGuardian {
    /// Starts to accept duplicates.
    pub fn start(directory_socket: &Path) -> Result<UffdGuardian, std::io::Error> {
        let listener = UnixListener::bind(directory_socket)?;
        let uffd_guardian = UffdGuardian::default();
        let held = Arc::clone(&uffd_guardian.held);
        let accept = move || {
            for stream in listener.incoming().flatten() {
                let is_bounded = stream.set_read_timeout(Some(HAND_OVER_TIME)).is_ok();
                if !is_bounded || !is_of_the_run(&stream) {
                    continue;
                }
                // A process that sends nonsense has no duplicate here; others are not affected.
                if let Some(entry) = receive(&stream) {
                    lock(&held).push(entry);
                }
            }
        };
        std::thread::Builder::new().name("farpool-guard".into()).spawn(accept)?;
        Ok(uffd_guardian)
    }

    /// Drops what is no longer needed, and ends orphans. `alive` says whether a process still
    /// lives.
    pub fn sweep(&self, alive: impl Fn(u32) -> bool) {
        let mut held = lock(&self.held);
        // The preloaded library is not told of forks by the kernel: nobody is born here.
        let end_all = |uffd: &Uffd| drop(end_orphans(uffd));
        held.retain(|entry| {
            if alive(entry.pid) {
                // Killed, but a thread of it waits in the kernel for a page that will not come
                // (io_uring's do).
                if has_no_pager(entry.pid) {
                    end_all(&entry.uffd);
                }
                return true;
            }
            let memory_is_gone = entry.uffd.is_gone();
            if !memory_is_gone {
                end_all(&entry.uffd);
            }
            !memory_is_gone
        });
    }
}

/// True if all fault threads of a process have ended: they live as long as it does. False in doubt.
fn has_no_pager(pid: u32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    let names: Option<Vec<String>> = tasks.map(|task| name(task.ok()?)).collect();
    names.is_some_and(|names| !names.iter().any(|name| name.trim() == FAULT_THREAD))
}

/// Poisons the missing pages of a dead process that others, who still use its memory, wait for.
/// Returns the userfaultfds of their children since, which lack pages as well.
#[must_use]
pub(crate) fn end_orphans(uffd: &Uffd) -> Vec<Uffd> {
    let mut born = Vec::new();
    // The flag belongs to the open file; the dead process's threads no longer read it.
    if rustix::fs::fcntl_setfl(uffd, OFlags::NONBLOCK).is_err() {
        return born;
    }
    uffd.end_waiting(|descriptor| born.push(Uffd::adopt(descriptor)));
    born
}

/// True if a process may be one of the run's: it has the keeper's user, or root gave it another
/// one. For that, root's socket is open to all that know its random name.
pub(crate) fn is_of_the_run(stream: &UnixStream) -> bool {
    let user = rustix::process::geteuid();
    let peer = rustix::net::sockopt::socket_peercred(stream);
    user.is_root() || peer.is_ok_and(|peer| peer.uid == user || peer.uid.is_root())
}

fn receive(stream: &UnixStream) -> Option<Held> {
    let mut pid = [0_u8; 4];
    let (got, descriptor) = receive_with_descriptor(stream, &mut pid, RecvFlags::WAITALL).ok()?;
    let uffd = Uffd::adopt(descriptor?);
    // The answer lets the process go on: the duplicate is held now.
    (got == pid.len()).then_some(())?;
    rustix::io::write(stream, &[1]).ok()?;
    Some(Held { pid: u32::from_le_bytes(pid), uffd })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use farpool_uffd::{features, register_mode};
    use farpool_units::PAGE_BYTES;

    use super::*;

    const SIZE: usize = 16 * PAGE_BYTES;

    /// Forks a child that exits with 0 if the memory reads as zeros. libc's fork would hold the
    /// locks of its allocator until the event is read, for which the other thread may need them.
    fn fork_that_reads(memory: usize) -> libc::c_long {
        // SAFETY: the child makes no call but _exit, and reads memory that is mapped.
        unsafe {
            let pid = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
            if pid == 0 {
                let word = std::ptr::with_exposed_provenance::<u8>(memory).read_volatile();
                libc::_exit(word.into());
            }
            pid
        }
    }

    /// A child that an orphan has had waits for pages as well, and only the orphan's events tell of
    /// it.
    #[test]
    fn children_of_orphans_are_ended_too() {
        let Ok(uffd) = Uffd::open(features::PAGER | features::EVENTS, true) else {
            println!("SKIPPED: events of userfaultfd need CAP_SYS_PTRACE");
            return;
        };
        // SAFETY: a mapping of this test's own.
        let memory = unsafe {
            let (rights, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(std::ptr::null_mut(), SIZE, rights, flags, -1, 0)
        };
        assert_ne!(memory, libc::MAP_FAILED);
        let memory = memory.expose_provenance();
        uffd.register(memory, SIZE, register_mode::MISSING).expect("registered");
        // A fork waits until its event is read.
        let forks = std::thread::spawn(move || fork_that_reads(memory));
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut orphans = vec![uffd];
        let mut end = move || {
            let born: Vec<Uffd> = orphans.iter().flat_map(end_orphans).collect();
            orphans.extend(born);
            std::thread::yield_now();
        };
        while !forks.is_finished() {
            end();
            assert!(Instant::now() < deadline, "the fork waits for ever");
        }
        let forked = forks.join().expect("no panic");
        let (pid, mut status) = (i32::try_from(forked).expect("a process id"), 0);
        assert!(pid > 0, "a child");
        // SAFETY: waits for the child of this test.
        while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
            end();
            if Instant::now() > deadline {
                // SAFETY: ends the child of this test.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status:x}");
    }
}
