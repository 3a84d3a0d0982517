//! Programs that drop root's privileges. Run by another user, they drop nothing and test nothing.

use crate::memory::*;

/// Any user but root.
const SOMEBODY: libc::uid_t = 65534;
/// `struct __user_cap_header_struct` of the calling thread.
const CAPABILITY_HEADER: [u32; 2] = [0x2008_0522, 0];

/// Only the thread that asked to keep its capabilities keeps them. The C library then makes all
/// threads do a call that needs one, and aborts unless it succeeds in all.
pub fn rights_kept() {
    let (far, _ballast) = (Filled::new(16 << 20, 1), ballast());
    // SAFETY: plain calls; the structs have the kernel's layout.
    unsafe {
        let mut words = [0_u32; 6];
        require(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0, "PR_SET_KEEPCAPS");
        require(libc::setresuid(SOMEBODY, SOMEBODY, SOMEBODY) == 0, "setresuid");
        let header = CAPABILITY_HEADER.as_ptr();
        require(libc::syscall(libc::SYS_capget, header, words.as_mut_ptr()) == 0, "capget");
        // Makes the permitted capabilities effective.
        (words[0], words[3]) = (words[1], words[4]);
        require(libc::syscall(libc::SYS_capset, header, words.as_ptr()) == 0, "capset");
        require(libc::setgroups(0, std::ptr::null()) == 0, "setgroups");
    }
    require_like_threads();
    far.check();
}

/// A process that is too small for a pager drops root's privileges, then grows and needs a pager.
pub fn rights_early() {
    // SAFETY: plain calls.
    let changed = unsafe {
        libc::setgroups(0, std::ptr::null()) == 0
            && libc::setgid(SOMEBODY) == 0
            && libc::setuid(SOMEBODY) == 0
    };
    require(changed, "the user is changed");
    let far = Filled::new(440 << 20, 2);
    require_like_threads();
    far.check();
}

/// Checks that all threads of the process have the same user, groups and capabilities, and that
/// there are threads of the pager.
fn require_like_threads() {
    let rights = |status: String| -> Vec<String> {
        let names = ["Uid:", "Gid:", "Groups:", "CapInh:", "CapPrm:", "CapEff:"];
        let is_right = |line: &&str| names.iter().any(|name| line.starts_with(name));
        status.lines().filter(is_right).map(str::to_owned).collect()
    };
    let Ok(own) = std::fs::read_to_string("/proc/thread-self/status") else {
        different("the own status");
    };
    let (own, mut threads) = (rights(own), 0);
    for thread in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let theirs = rights(status);
        require(theirs == own, &format!("{theirs:?} is not {own:?}"));
        threads += 1;
    }
    require(threads > 1, "there are threads of the pager");
}
