//! The system calls of this crate that need `unsafe`.

use std::io::Error;

/// Reads another process's memory as the process itself would: far pages are fetched. Returns how
/// many bytes were read before an unreadable page.
pub fn read_memory(pid: i32, address: u64, bytes: &mut [u8]) -> Result<usize, Error> {
    let wanted = bytes.len();
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: wanted };
    let start = usize::try_from(address).map_err(Error::other)?;
    let remote = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: wanted };
    // SAFETY: `local` describes `bytes`, which is ours alone; the other address is only used in the
    // other process.
    let done = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(done).map_err(|_| Error::last_os_error())
}

/// Clock ticks of /proc per second.
pub fn ticks_per_second() -> i64 {
    // SAFETY: sysconf takes a number and touches no memory of ours.
    unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1)
}
