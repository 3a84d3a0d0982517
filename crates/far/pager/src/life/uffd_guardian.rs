//! The keeper's duplicate of the userfaultfd.

use std::os::fd::AsFd;
use std::path::Path;

use farpool_kernel::send_with_descriptors;
use farpool_uffd::Uffd;

/// Name of the keeper's socket, in the board's directory.
const UFFD_GUARDIAN_SOCKET: &str = "keeper.sock";

/// Gives the keeper a duplicate of the userfaultfd, so that it outlives this process if its memory
/// does (a child of vfork). If there is no keeper (the board is used on its own) it does nothing.
pub(crate) fn give_duplicate(board: &Path, uffd: &Uffd, pid: u32) -> Result<(), std::io::Error> {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let path = board.with_file_name(UFFD_GUARDIAN_SOCKET);
    if !path.exists() {
        return Ok(());
    }
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(&path)?)?;
    // The holder of the userfaultfd can put pages into this program.
    let keeper = farpool_kernel::peer_user(socket.as_fd())?;
    if keeper != 0 && keeper != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::other(format!(
            "{} is served by user {}, neither this user nor root, and does not get this program's \
             userfaultfd",
            path.display(),
            keeper
        )));
    }
    let message = pid.to_le_bytes();
    send_with_descriptors(&socket, &message, &[uffd.as_fd()], SendFlags::empty())?;
    // The keeper answers with one byte when it has it.
    let mut answer = [0_u8; 1];
    if rustix::io::read(&socket, &mut answer)? != 1 {
        return Err(std::io::Error::other("the keeper did not take the userfaultfd"));
    }
    Ok(())
}
