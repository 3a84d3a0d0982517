//! Asks a VM by its QMP socket, within a time: QEMU serves one connection at a time, and its guest
//! or its disk can keep it busy.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde_json::Value;

use crate::qmp::{Conversation, QmpError, Step};

/// How long QEMU may take for its answer. It takes a millisecond when it has nothing else to do,
/// and some hundred while its own memory comes back from a blade; people wait for no longer. After
/// that the state is told as unknown, with the reason.
pub const ANSWER_TIME: Duration = Duration::from_secs(2);
const PIECE_BYTES: usize = 4096;

/// Why a VM could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("its QMP socket cannot be reached: {0}")]
    Unreachable(std::io::Error),
    #[error("its QMP socket gave no answer within {} s", .0.as_secs())]
    Silent(Duration),
    #[error("QEMU closed its QMP socket")]
    Closed,
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// A connection to a VM's QMP socket.
#[derive(Debug)]
pub struct Asked {
    stream: UnixStream,
    deadline: Instant,
    /// How long it may take.
    time: Duration,
}

impl Asked {
    /// Connects. Does not wait: where too many others do, the kernel says so.
    pub fn connect(path: &Path) -> Result<Asked, AskError> {
        let failed = |errno: rustix::io::Errno| match errno {
            rustix::io::Errno::AGAIN => AskError::Silent(ANSWER_TIME),
            other => AskError::Unreachable(other.into()),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        connect(&socket, &address).map_err(failed)?;
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false).map_err(AskError::Unreachable)?;
        Ok(Asked { stream, deadline: Instant::now() + ANSWER_TIME, time: ANSWER_TIME })
    }

    /// Waits for up to this time instead.
    #[must_use]
    pub fn patient(mut self, time: Duration) -> Asked {
        (self.deadline, self.time) = (Instant::now() + time, time);
        self
    }

    /// The process that made the socket, by the kernel's word.
    pub fn pid(&self) -> Option<u32> {
        let peer = rustix::net::sockopt::socket_peercred(&self.stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// Sends one command, which takes no arguments, and waits for its answer.
    pub fn command(self, command: &'static str) -> Result<Value, AskError> {
        self.command_with(command, Value::Null)
    }

    /// Sends one command with an object of arguments, and waits for its answer.
    pub fn command_with(
        mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<Value, AskError> {
        let mut talk = Conversation::new(command, arguments);
        let (mut piece, mut length) = ([0; PIECE_BYTES], 0);
        loop {
            match talk.take(&piece[..length])? {
                Step::Read => length = self.read(&mut piece)?,
                Step::Send(bytes) => {
                    self.write(&bytes)?;
                    length = 0;
                }
                Step::Answered(value) => return Ok(value),
            }
        }
    }

    fn read(&mut self, piece: &mut [u8]) -> Result<usize, AskError> {
        let left = self.left()?;
        self.stream.set_read_timeout(Some(left)).map_err(AskError::Unreachable)?;
        match self.stream.read(piece) {
            Ok(0) => Err(AskError::Closed),
            Ok(length) => Ok(length),
            Err(error) if error.kind() == ErrorKind::Interrupted => self.read(piece),
            Err(error) => Err(self.failure(error)),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), AskError> {
        let left = self.left()?;
        self.stream.set_write_timeout(Some(left)).map_err(AskError::Unreachable)?;
        self.stream.write_all(bytes).map_err(|error| self.failure(error))
    }

    /// The time that is left.
    fn left(&self) -> Result<Duration, AskError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(AskError::Silent(self.time)) } else { Ok(left) }
    }

    fn failure(&self, error: std::io::Error) -> AskError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => AskError::Silent(self.time),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => AskError::Closed,
            _ => AskError::Unreachable(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// What comes of asking a server that says this to each connection.
    fn asked(says: impl Fn(&mut UnixStream) + Send + 'static) -> Result<Value, AskError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("qmp.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            says(&mut stream);
        });
        let asked = Asked::connect(&path).expect("connected");
        assert_eq!(asked.pid(), Some(std::process::id()));
        let answer = asked.command("query-status");
        server.join().expect("the server");
        answer
    }

    #[test]
    fn a_socket_that_says_nothing_is_left_in_time() {
        let silent = asked(|stream| {
            // Until the other side is gone.
            let _ = stream.read(&mut [0; 1]);
        });
        assert!(matches!(silent, Err(AskError::Silent(_))), "{silent:?}");
    }

    #[test]
    fn a_socket_that_never_ends_a_line_is_left() {
        let endless = asked(|stream| while stream.write_all(&[b' '; 4096]).is_ok() {});
        assert!(matches!(endless, Err(AskError::Qmp(_))), "{endless:?}");
        let slow = asked(|stream| {
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        assert!(matches!(slow, Err(AskError::Silent(_))), "{slow:?}");
    }

    #[test]
    fn a_socket_that_is_closed_or_not_there_is_told() {
        let closed = asked(|_| {});
        assert!(matches!(closed, Err(AskError::Closed)), "{closed:?}");
        let missing = Asked::connect(Path::new("/nowhere/qmp.sock"));
        assert!(matches!(missing, Err(AskError::Unreachable(_))), "{missing:?}");
    }
}
