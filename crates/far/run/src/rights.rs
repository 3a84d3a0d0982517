//! CAP_SYS_PTRACE that the file of farpool's binary brings (`setcap cap_sys_ptrace=p`), and that
//! its user does not have.
//!
//! The kernel reports forks only on a userfaultfd whose handshake was made with that capability. It
//! also allows inspecting the processes of all users, which no user must gain through Farpool. So:
//! - one thread keeps it, permitted but not effective; it is effective only for that one call, on a
//!   userfaultfd and nothing else. All other threads gave it up for good before they were started:
//!   they trace, open and signal with the user's own rights.
//! - the process is not dumpable: its memory, and with it that thread, is closed to its user. The
//!   kernel sets this at exec, and it stays.
//!
//! A capability that the user has anyway (root, ambient capabilities of a service) is left as it
//! is.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Error, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use farpool_uffd::{OpenError, Uffd};
use rustix::process::{DumpableBehavior, Pid, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// The kernel's name for an open userfaultfd.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";

/// A handshake for the thread with the capability to make.
struct Order {
    userfaultfd: OwnedFd,
    features: u64,
    answer: Sender<Result<Uffd, OpenError>>,
}

/// The thread with the capability, if there is one.
static GUARD: OnceLock<Sender<Order>> = OnceLock::new();
/// See [`lost_variables`].
static LOST: OnceLock<Vec<(OsString, OsString)>> = OnceLock::new();

/// Gives up what the binary's file has brought, except for a thread that makes handshakes if
/// `keeps`. To be called first, while the process has one thread.
pub fn confine(keeps: bool) -> Result<(), Error> {
    if !has_rights_of_file() {
        return Ok(());
    }
    let _ = LOST.set(read_lost_variables());
    // 2, which the kernel may have chosen, closes it as well, but allows a core that only root can
    // read.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let permitted = capabilities(None)?.permitted;
    if keeps && permitted.contains(CapabilitySet::SYS_PTRACE) {
        start_guard()?;
    }
    set_capabilities(None, with(CapabilitySet::empty(), CapabilitySet::empty()))?;
    Ok(())
}

/// True if exec gave this process rights that its user does not have.
fn has_rights_of_file() -> bool {
    // SAFETY: reads a number that the kernel has put beside the environment.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

fn with(effective: CapabilitySet, permitted: CapabilitySet) -> CapabilitySets {
    CapabilitySets { effective, permitted, inheritable: CapabilitySet::empty() }
}

fn start_guard() -> Result<(), Error> {
    let (orders, receiver) = channel::<Order>();
    let (ready, begun) = channel();
    let body = move || {
        let alone = with(CapabilitySet::empty(), CapabilitySet::SYS_PTRACE);
        let _ = ready.send(set_capabilities(None, alone));
        for Order { userfaultfd, features, answer } in receiver {
            let _ = answer.send(shake_hands_here(userfaultfd, features));
        }
    };
    std::thread::Builder::new().name("farpool-rights".into()).spawn(body)?;
    begun.recv().map_err(Error::other)??;
    let _ = GUARD.set(orders);
    Ok(())
}

/// Makes a handshake in the thread with the capability. A sidecar shares its memory with the
/// program, so the descriptor that it sends can be any file.
fn shake_hands_here(userfaultfd: OwnedFd, features: u64) -> Result<Uffd, OpenError> {
    let refused = OpenError::Handshake;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", userfaultfd.as_raw_fd()));
    if link.map_err(refused)?.as_os_str() != OsStr::new(USERFAULTFD) {
        return Err(refused(Error::from_raw_os_error(libc::EINVAL)));
    }
    let only = CapabilitySet::SYS_PTRACE;
    set_capabilities(None, with(only, only)).map_err(|errno| refused(errno.into()))?;
    let shaken = Uffd::shake_hands(userfaultfd, features);
    set_capabilities(None, with(CapabilitySet::empty(), only))
        .map_err(|errno| refused(errno.into()))?;
    shaken
}

/// As [`Uffd::shake_hands`], with the capability of the binary's file if there is one.
pub(crate) fn shake_hands(userfaultfd: OwnedFd, features: u64) -> Result<Uffd, OpenError> {
    let Some(guard) = GUARD.get() else { return Uffd::shake_hands(userfaultfd, features) };
    let (answer, answered) = channel();
    let order = Order { userfaultfd, features, answer };
    let ended = || OpenError::Handshake(Error::other("the thread that makes it has ended"));
    guard.send(order).map_err(|_| ended())?;
    answered.recv().map_err(|_| ended())?
}

/// Opens a file of a process in /proc with only the capability that this takes: what the kernel
/// shows of physical memory only with other capabilities stays hidden from the receiver.
pub(crate) fn open_of(process: Pid, name: &str) -> Result<File, Error> {
    let path = format!("/proc/{}/{name}", process.as_raw_nonzero());
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("farpool-rights".into());
        let open = || {
            let only = capabilities(None)?.permitted & CapabilitySet::SYS_PTRACE;
            set_capabilities(None, with(only, only))?;
            File::open(&path)
        };
        let opened = builder.spawn_scoped(scope, open)?.join();
        opened.unwrap_or_else(|_| Err(Error::other("the thread that opens it panicked")))
    })
}

/// Variables that the loader removed from the environment, as it does for every program whose file
/// brings rights (LD_LIBRARY_PATH, TMPDIR and others). They are meant for the program, which has no
/// such rights.
pub(crate) fn lost_variables() -> &'static [(OsString, OsString)] {
    LOST.get().map_or(&[], Vec::as_slice)
}

/// A variable of the environment that farpool was started with.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    let lost = || lost_variables().iter().find(|(lost, _)| lost == name);
    std::env::var_os(name).or_else(|| lost().map(|(_, value)| value.clone()))
}

/// Reads them from /proc, whose file is closed to the user while the process is not dumpable. With
/// the capability in its only thread, opening it does not let the user in by another way.
fn read_lost_variables() -> Vec<(OsString, OsString)> {
    let mut bytes = Vec::new();
    let opened = set_dumpable_behavior(DumpableBehavior::Dumpable).map_err(Error::from);
    let read = opened.and_then(|()| File::open("/proc/self/environ")?.read_to_end(&mut bytes));
    // The program goes without them, as under any other such program.
    if read.is_err() {
        return Vec::new();
    }
    missing(&bytes, |name| std::env::var_os(name).is_some())
}

/// The variables of an environment, in the kernel's form, that are missing now. Pure.
fn missing(environment: &[u8], is_there: impl Fn(&OsStr) -> bool) -> Vec<(OsString, OsString)> {
    let entries = environment.split(|byte| *byte == 0);
    let pairs = entries.filter_map(|entry| {
        let end = entry.iter().position(|byte| *byte == b'=').filter(|end| *end > 0)?;
        Some((OsStr::from_bytes(&entry[..end]), &entry[end + 1..]))
    });
    pairs
        .filter(|(name, _)| !is_there(name))
        .map(|(name, value)| (name.to_owned(), OsString::from_vec(value.to_vec())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_loader_took_is_found_in_the_kernels_copy() {
        let bytes = b"PATH=/bin\0LD_LIBRARY_PATH=/a=b\0=odd\0word\0TMPDIR=\0";
        let found = missing(bytes, |name| name == "PATH");
        let words: Vec<(&str, &str)> = found
            .iter()
            .map(|(name, value)| (name.to_str().expect("text"), value.to_str().expect("text")))
            .collect();
        assert_eq!(words, [("LD_LIBRARY_PATH", "/a=b"), ("TMPDIR", "")]);
    }

    /// A sidecar can send any file: only a userfaultfd meets the raised capability.
    #[test]
    fn no_other_file_meets_the_capability() {
        let file = OwnedFd::from(File::open("/dev/null").expect("/dev/null"));
        let error = shake_hands_here(file, 0).expect_err("no userfaultfd");
        assert!(error.to_string().contains("handshake"), "{error}");
    }

    /// The receiver must not learn where in physical memory the pages are.
    #[test]
    fn a_page_map_that_is_handed_over_has_no_frame_numbers() {
        use std::os::unix::fs::FileExt;
        const FRAME_BITS: u64 = (1 << 55) - 1;
        const PRESENT: u64 = 1 << 63;
        let word = std::hint::black_box(7_u64);
        let at = (&raw const word).addr() as u64 / 4096 * 8;
        let map = open_of(rustix::process::getpid(), "pagemap").expect("its own page map");
        let mut entry = [0; 8];
        map.read_exact_at(&mut entry, at).expect("an entry");
        let entry = u64::from_le_bytes(entry);
        assert!(entry & PRESENT != 0 && entry & FRAME_BITS == 0, "{entry:x}");
        assert_eq!(word, 7);
    }

    #[test]
    fn a_process_without_rights_of_its_file_is_left_alone() {
        let before = capabilities(None).expect("capabilities");
        confine(true).expect("nothing to do");
        let after = capabilities(None).expect("capabilities");
        assert_eq!((before.effective, before.permitted), (after.effective, after.permitted));
        assert!(GUARD.get().is_none() && lost_variables().is_empty());
    }
}
