//! Calls by which a program gives rights up: the pager first opens what it needs them for, and its
//! threads change their user with the program's. See [`farpool_pager::sys::rights`].

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use crate::exec::next;
use crate::{pager, set_errno, status};

/// Defines functions of the C library that change user or groups in all threads.
macro_rules! change_ids {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {$(
        /// # Safety
        /// As the C library's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> c_int {
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name"),
            };
            let Some(function) = next::<unsafe extern "C" fn($($kind),*) -> c_int>(NAME) else {
                set_errno(libc::ENOSYS);
                return -1;
            };
            // SAFETY: the program asked for this call.
            let change = || unsafe { function($($argument),*) };
            match pager() {
                Some(pager) => pager.change_ids(change),
                None => change(),
            }
        }
    )*};
}

change_ids! {
    setuid(user: libc::uid_t);
    setgid(group: libc::gid_t);
    seteuid(user: libc::uid_t);
    setegid(group: libc::gid_t);
    setreuid(real: libc::uid_t, effective: libc::uid_t);
    setregid(real: libc::gid_t, effective: libc::gid_t);
    setresuid(real: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t);
    setresgid(real: libc::gid_t, effective: libc::gid_t, saved: libc::gid_t);
    setgroups(count: libc::size_t, groups: *const libc::gid_t);
    initgroups(user: *const c_char, group: libc::gid_t);
}

/// # Safety
/// As capset(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capset(header: *mut c_void, data: *const c_void) -> c_int {
    open_before_rights_go();
    // SAFETY: the program asked for this call.
    status(unsafe { libc::syscall(libc::SYS_capset, header, data) })
}

/// # Safety
/// As chroot(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn chroot(path: *const c_char) -> c_int {
    open_before_rights_go();
    // SAFETY: the program asked for this call.
    status(unsafe { libc::syscall(libc::SYS_chroot, path) })
}

/// Variadic in C, but its arguments all come in registers, and the C library also passes on what it
/// finds there.
///
/// # Safety
/// As prctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    // The files in /proc of a process that cannot be dumped are root's.
    if option == libc::PR_SET_DUMPABLE {
        open_before_rights_go();
    }
    // SAFETY: the program asked for this call.
    status(unsafe { libc::syscall(libc::SYS_prctl, option, second, third, fourth, fifth) })
}

fn open_before_rights_go() {
    if let Some(pager) = pager() {
        pager.open_before_rights_go();
    }
}
