//! Talking to a server: sending bytes in arbitrary pieces and reading everything it returns.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use super::{PATIENCE, wait_until};

/// Sends `pieces`, each only once the server has read the earlier ones from the socket, then shuts
/// down the sending side. Returns everything received until the server ended the connection.
///
/// One read of the server may return the end of one piece and the next: see
/// [`exchange_one_by_one`].
pub(crate) fn exchange(stream: UnixStream, pieces: &[&[u8]]) -> Vec<u8> {
    exchange_one_by_one(stream, pieces, || true)
}

/// As [`exchange`], but a piece is sent only once `is_idle` also says that the server sleeps.
///
/// A read that empties the socket looks for more before it returns: a piece that is sent once the
/// earlier ones are read can still arrive in the same read.
pub(crate) fn exchange_one_by_one(
    mut stream: UnixStream,
    pieces: &[&[u8]],
    is_idle: impl Fn() -> bool + Send,
) -> Vec<u8> {
    stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    stream.set_write_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    let mut reader = stream.try_clone().expect("a socket can be cloned");
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            for (number, piece) in pieces.iter().enumerate() {
                // The server may have closed, as it does after `quit`: its replies still count.
                if stream.write_all(piece).is_err() {
                    return;
                }
                if number + 1 < pieces.len() {
                    wait_until_taken(&stream, &is_idle);
                }
            }
            let _ = stream.shutdown(Shutdown::Write);
        });
        let replies = read_to_end(&mut reader);
        sender.join().expect("the sender does not panic");
        replies
    })
}

/// Reads until the connection ends, in whatever way.
pub(crate) fn read_to_end(stream: &mut impl Read) -> Vec<u8> {
    let mut replies = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return replies,
            Ok(bytes) => replies.extend_from_slice(&buffer[..bytes]),
            // If a server closes with input unread, the close becomes a reset, after all its
            // replies.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return replies,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&replies)),
        }
    }
}

/// Waits until the peer has read everything and is idle, or has gone.
fn wait_until_taken(stream: &UnixStream, is_idle: &impl Fn() -> bool) {
    const LOOKS_WITHOUT_SLEEP: u32 = 1000;
    let is_taken = || match unread_bytes(stream) {
        None => true,
        Some(0) => is_idle(),
        Some(_) => false,
    };
    for _ in 0..LOOKS_WITHOUT_SLEEP {
        if is_taken() {
            return;
        }
        std::thread::yield_now();
    }
    wait_until("the server reads", || is_taken().then_some(()));
}

/// Bytes sent that the peer has not read yet.
fn unread_bytes(stream: &UnixStream) -> Option<i32> {
    use std::os::fd::AsRawFd;
    let mut bytes = 0i32;
    // SAFETY: TIOCOUTQ writes one int to where the pointer says, and the descriptor is open.
    let result = unsafe { libc::ioctl(stream.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    (result == 0).then_some(bytes)
}

/// Reads until the input ends with `end`.
pub(crate) fn read_until(stream: &mut impl Read, end: &[u8]) -> Vec<u8> {
    let mut replies = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    while !replies.ends_with(end) {
        let shown = || String::from_utf8_lossy(&replies[..replies.len().min(2000)]).into_owned();
        match stream.read(&mut buffer) {
            Ok(0) => panic!("the connection ended after {:?}", shown()),
            Ok(bytes) => replies.extend_from_slice(&buffer[..bytes]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("{error} after {:?}", shown()),
        }
    }
    replies
}

/// Sends a request and reads its reply up to `end`.
pub(crate) fn ask(stream: &mut (impl Read + Write), request: &[u8], end: &[u8]) -> Vec<u8> {
    stream.write_all(request).expect("the server takes requests");
    read_until(stream, end)
}

/// Bytes in readable form, shortened in the middle.
pub(crate) fn shown(bytes: &[u8]) -> String {
    const EDGE_BYTES: usize = 1500;
    if bytes.len() <= 2 * EDGE_BYTES {
        return bytes.escape_ascii().to_string().replace("\\r\\n", "\\r\\n\n");
    }
    let (head, tail) = (&bytes[..EDGE_BYTES], &bytes[bytes.len() - EDGE_BYTES..]);
    format!("{} … {}", head.escape_ascii(), tail.escape_ascii()).replace("\\r\\n", "\\r\\n\n")
}

/// A figure from the reply to `stats`, whose lines `line` returns one after the other.
pub(crate) fn read_statistic(mut line: impl FnMut() -> String, name: &str) -> u64 {
    let mut found = None;
    loop {
        let line = line();
        if line == "END" {
            return found.unwrap_or_else(|| panic!("stats has no {name}"));
        }
        if let Some(value) = line.strip_prefix(&format!("STAT {name} ")) {
            found = value.parse().ok();
        }
    }
}
