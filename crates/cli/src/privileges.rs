//! Daemonizes and drops root, for servers that are started like memcached.
//!
//! Both must happen while the process has one thread.

use std::ffi::CString;
use std::io;
use std::path::Path;

/// Continues in a child process without a terminal; the parent exits with success.
pub fn become_daemon() -> io::Result<()> {
    // SAFETY: no thread was started yet, so the child has all of the program. The working directory
    // is kept, so that relative paths keep their meaning.
    if unsafe { libc::daemon(1, 0) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the user's name, id and primary group.
fn look_up(user: &str) -> io::Result<(CString, u32, u32)> {
    let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("there is no user {user:?}"));
    let name = CString::new(user).map_err(|_| unknown())?;
    // SAFETY: the name ends with a zero; the result is read before any other call of this kind, and
    // no other thread makes one.
    let entry = unsafe { libc::getpwnam(name.as_ptr()) };
    if entry.is_null() {
        return Err(unknown());
    }
    // SAFETY: not null, and valid until the next call of this kind.
    let (uid, gid) = unsafe { ((*entry).pw_uid, (*entry).pw_gid) };
    Ok((name, uid, gid))
}

/// Gives a file to the user and the user's group.
pub fn give_file_to(user: &str, path: &Path) -> io::Result<()> {
    let (_, uid, gid) = look_up(user)?;
    std::os::unix::fs::chown(path, Some(uid), Some(gid))
}

/// Becomes `user` permanently, with that user's groups.
pub fn become_user(user: &str) -> io::Result<()> {
    let (name, uid, gid) = look_up(user)?;
    // Groups first: without root they can no longer be changed. SAFETY: plain calls on this process
    // with values from the user database.
    let failed = unsafe {
        libc::initgroups(name.as_ptr(), gid) != 0
            || libc::setgid(gid) != 0
            || libc::setuid(uid) != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}
