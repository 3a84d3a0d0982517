//! Unix sockets on which monitors are met: listening, reading within a time, and who is there.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use farpool_kernel::{listen_unix, receive_with_descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, accept_with, connect, sendmsg, socket_with,
};
use rustix::process::{Signal, pidfd_send_signal};

use crate::sys::peer_process;

/// Only this user and root may connect: whoever does gets a guest's memory.
const MODE: u32 = 0o600;
/// Connections that wait to be accepted; beyond that they wait in connect(2).
const BACKLOG: i32 = 64;

/// Why a conversation has ended.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("it closed the connection in the middle of a message")]
    Closed,
    #[error("it sent nothing for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("farpool was told to stop")]
    Stopped,
    #[error("the connection failed: {0}")]
    Failed(#[from] Errno),
}

/// Why nothing can listen at a path.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(
        "{path} is in use: another process listens there, or it is no socket; give another path"
    )]
    InUse { path: PathBuf },
    #[error("nothing can listen at {path}: {error}; give a shorter path in a folder of your own")]
    Failed { path: PathBuf, error: Errno },
}

/// Ends servers: readable once they are to stop.
#[derive(Debug)]
pub struct Stop(OwnedFd);

impl Stop {
    /// Stops when the descriptor becomes readable or its other end is closed; it is never read.
    pub fn when_readable(descriptor: impl Into<OwnedFd>) -> Stop {
        Stop(descriptor.into())
    }

    /// True once it is time.
    pub fn is_now(&self) -> bool {
        is_ready(self.as_fd())
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// True if a descriptor can be read, or its other end is gone.
fn is_ready(descriptor: BorrowedFd<'_>) -> bool {
    let mut set = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    poll(&mut set, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// Waits until one of the descriptors is ready, and no longer than `limit`.
pub(crate) fn wait(descriptors: &[BorrowedFd<'_>], limit: Option<Duration>) {
    let all = descriptors.iter().copied();
    let mut set: Vec<_> = all.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)).collect();
    let limit = limit.and_then(|it| Timespec::try_from(it).ok());
    // Interrupted or failed, the caller looks again.
    let _ = poll(&mut set, limit.as_ref());
}

/// A socket that listens at a path, where nothing is left when it is dropped.
#[derive(Debug)]
pub struct Listening {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of its file.
    file: (u64, u64),
}

impl Listening {
    /// Listens at a path. A socket file that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// Something else is there, or the kernel refuses.
    pub fn bind(path: &Path) -> Result<Listening, ListenError> {
        let failed = |error| match error {
            Errno::ADDRINUSE => ListenError::InUse { path: path.to_owned() },
            error => ListenError::Failed { path: path.to_owned(), error },
        };
        let socket = match listen_unix(path, MODE, BACKLOG) {
            Err(Errno::ADDRINUSE) => {
                remove_if_stale(path).map_err(failed)?;
                listen_unix(path, MODE, BACKLOG)
            }
            listening => listening,
        };
        let socket = socket.map_err(failed)?;
        let status = rustix::fs::stat(path).map_err(failed)?;
        Ok(Listening { socket, path: path.to_owned(), file: (status.st_dev, status.st_ino) })
    }

    /// The next connection; none once it is time to stop.
    ///
    /// # Errors
    /// Those of accept(2) that waiting does not end.
    pub(crate) fn accept(&self, stop: &Stop) -> Result<Option<OwnedFd>, Errno> {
        loop {
            wait(&[self.socket.as_fd(), stop.as_fd()], None);
            if stop.is_now() {
                return Ok(None);
            }
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Some(socket)),
                // Who connected has gone again.
                Err(Errno::WOULDBLOCK | Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let status = rustix::fs::stat(&self.path);
        if status.is_ok_and(|it| (it.st_dev, it.st_ino) == self.file) {
            // If it cannot be removed, the next bind finds it stale.
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

/// Removes a socket file that nobody listens at.
fn remove_if_stale(path: &Path) -> Result<(), Errno> {
    let status = rustix::fs::lstat(path)?;
    let kind = rustix::fs::FileType::from_raw_mode(status.st_mode);
    match connect_to(path) {
        Err(Errno::CONNREFUSED) if kind == rustix::fs::FileType::Socket => rustix::fs::unlink(path),
        _ => Err(Errno::ADDRINUSE),
    }
}

/// Connects to a path, without waiting.
pub(crate) fn connect_to(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// How long the other side may be silent, and what ends the conversation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Talk<'a> {
    pub(crate) stop: &'a Stop,
    pub(crate) patience: Option<Duration>,
}

impl Talk<'_> {
    /// Reads some bytes, at least one, and appends the descriptors that come with them. None at the
    /// end.
    ///
    /// # Errors
    /// It is time to stop, the other side is silent for too long, or the connection failed.
    pub(crate) fn read_some(
        &self,
        socket: impl AsFd,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<Option<usize>, SocketError> {
        let deadline = self.patience.map(|patience| Instant::now() + patience);
        loop {
            let take = |it| descriptors.push(it);
            match receive_with_descriptors(&socket, bytes, RecvFlags::DONTWAIT, take) {
                Ok(0) => return Ok(None),
                Ok(count) => return Ok(Some(count)),
                Err(Errno::WOULDBLOCK | Errno::INTR) => self.pause(socket.as_fd(), deadline)?,
                Err(Errno::CONNRESET) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until there is something to read.
    fn pause(&self, socket: BorrowedFd<'_>, until: Option<Instant>) -> Result<(), SocketError> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if let Some(patience) = self.patience.filter(|_| left.is_some_and(|it| it.is_zero())) {
            return Err(SocketError::Silent(patience));
        }
        wait(&[socket, self.stop.as_fd()], left);
        if self.stop.is_now() { Err(SocketError::Stopped) } else { Ok(()) }
    }

    /// Fills `bytes`. False if the connection was closed before the first of them.
    ///
    /// # Errors
    /// As for [`Talk::read_some`]; it was closed after the first.
    pub(crate) fn read_all(
        &self,
        socket: impl AsFd,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<bool, SocketError> {
        let mut done = 0;
        while done < bytes.len() {
            match self.read_some(&socket, &mut bytes[done..], descriptors)? {
                Some(count) => done += count,
                None if done == 0 => return Ok(false),
                None => return Err(SocketError::Closed),
            }
        }
        Ok(true)
    }

    /// Sends all bytes, and a descriptor with the first of them if there is one.
    ///
    /// # Errors
    /// The other side takes nothing for too long, it is time to stop, or the connection failed.
    pub(crate) fn send(
        &self,
        socket: impl AsFd,
        bytes: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), SocketError> {
        let deadline = self.patience.map(|patience| Instant::now() + patience);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let (mut done, mut descriptor) = (0, descriptor);
        while done < bytes.len() {
            let rest = &bytes[done..];
            let sent = match descriptor {
                Some(it) => farpool_kernel::send_with_descriptors(&socket, rest, &[it], flags),
                None => {
                    let mut none = SendAncillaryBuffer::new(&mut []);
                    sendmsg(&socket, &[IoSlice::new(rest)], &mut none, flags)
                }
            };
            match sent {
                Ok(count) => (done, descriptor) = (done + count, None),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => self.pause_to_send(socket.as_fd(), deadline)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn pause_to_send(
        &self,
        socket: BorrowedFd<'_>,
        until: Option<Instant>,
    ) -> Result<(), SocketError> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if let Some(patience) = self.patience.filter(|_| left.is_some_and(|it| it.is_zero())) {
            return Err(SocketError::Silent(patience));
        }
        let mut set = [
            PollFd::from_borrowed_fd(socket, PollFlags::OUT),
            PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
        ];
        let left = left.and_then(|it| Timespec::try_from(it).ok());
        // Interrupted or failed, the caller tries again.
        let _ = poll(&mut set, left.as_ref());
        if self.stop.is_now() { Err(SocketError::Stopped) } else { Ok(()) }
    }
}

/// The process at the other end of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    handle: OwnedFd,
    /// Its process id while it lived; none in another namespace of process ids.
    pid: Option<u32>,
}

impl Peer {
    /// Finds it. Its process id may be somebody else's by the time it is used; this handle not.
    ///
    /// # Errors
    /// It has ended, or the kernel is older than Linux 6.5.
    pub(crate) fn of(socket: impl AsFd) -> Result<Peer, Errno> {
        let handle = peer_process(socket)?;
        let path = format!("/proc/self/fdinfo/{}", handle.as_raw_fd());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"));
        let pid = pid.and_then(|pid| pid.trim().parse().ok()).filter(|pid| *pid != 0);
        Ok(Peer { handle, pid })
    }

    /// True once it has ended.
    pub(crate) fn is_gone(&self) -> bool {
        is_ready(self.handle.as_fd())
    }

    /// Ends it, so that it cannot read what is not there.
    ///
    /// # Errors
    /// It is of another user, and this process is not root. It has ended: no error.
    pub(crate) fn kill(&self) -> Result<(), Errno> {
        match pidfd_send_signal(&self.handle, Signal::KILL) {
            Err(Errno::SRCH) | Ok(()) => Ok(()),
            refused => refused,
        }
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.pid {
            Some(pid) => write!(to, "process {pid}"),
            None => to.write_str("a process of another namespace"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn stop() -> (Stop, UnixStream) {
        let (near, far) = UnixStream::pair().expect("sockets");
        (Stop::when_readable(near), far)
    }

    #[test]
    fn a_stale_socket_is_replaced_and_nothing_is_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vm.sock");
        let forgotten = listen_unix(&path, MODE, 1).expect("a socket");
        assert!(matches!(Listening::bind(&path), Err(ListenError::InUse { .. })));
        drop(forgotten);
        drop(Listening::bind(&path).expect("nobody listens there"));
        assert!(!path.exists());
        std::fs::write(&path, "a file").expect("written");
        assert!(matches!(Listening::bind(&path), Err(ListenError::InUse { .. })));
        assert!(path.exists(), "what is no socket stays");
        let nowhere = folder.path().join("none/vm.sock");
        assert!(matches!(Listening::bind(&nowhere), Err(ListenError::Failed { .. })));
    }

    #[test]
    fn a_silent_or_broken_conversation_ends() {
        let (stop, ender) = stop();
        let (mut near, far) = UnixStream::pair().expect("sockets");
        let patience = Some(Duration::from_millis(1));
        let talk = Talk { stop: &stop, patience };
        let (mut bytes, mut none) = ([0; 4], Vec::new());
        let silent = talk.read_all(&far, &mut bytes, &mut none);
        assert!(matches!(silent, Err(SocketError::Silent(_))), "{silent:?}");
        near.write_all(b"ab").expect("written");
        drop(near);
        let broken = talk.read_all(&far, &mut bytes, &mut none);
        assert!(matches!(broken, Err(SocketError::Closed)), "{broken:?}");
        assert!(matches!(talk.read_all(&far, &mut bytes, &mut none), Ok(false)));
        let (_near, far) = UnixStream::pair().expect("sockets");
        drop(ender);
        let talk = Talk { stop: &stop, patience: None };
        let stopped = talk.read_all(&far, &mut bytes, &mut none);
        assert!(matches!(stopped, Err(SocketError::Stopped)), "{stopped:?}");
    }

    #[test]
    fn a_peer_is_known_by_its_process() {
        let (near, _far) = UnixStream::pair().expect("sockets");
        let peer = Peer::of(&near).expect("this process");
        assert!(!peer.is_gone());
        assert_eq!(peer.to_string(), format!("process {}", std::process::id()));
    }
}
