//! Connections that another process opens in this one's stead.
//!
//! A sidecar has the root directory, the namespaces and the user of its program, from which the
//! keeper's blade may be out of reach, or another one may be reached. So it asks its keeper, with a
//! socket on which the answer arrives: one message, and with it the blade's socket, which may still
//! be connecting. Only the asking process waits for the connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use farpool_kernel::{receive_with_descriptor, send_with_descriptors};
use farpool_wire::Address;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::opening::{self, DialError};
use crate::peer::Stranger;

/// The longest answer in bytes.
const ANSWER_BYTES: usize = 64;

/// Opens a connection on behalf of the asking process, and hands it over. `user` is the asking
/// process's own user, which may run the blade besides those that always may. With `address` None
/// it is none of the blades to be used.
pub fn answer(asker: &OwnedFd, address: Option<&Address>, user: Option<u32>) {
    let opened = address.ok_or(DialError::NotMeant).and_then(|address| {
        let may_serve = |stranger: &Stranger| user == Some(stranger.owner);
        opening::open(address, may_serve)
    });
    let text = match &opened {
        Ok(_) => "OPENED".to_owned(),
        Err(DialError::Stranger(Stranger { owner, user })) => format!("STRANGER {owner} {user}"),
        Err(DialError::NotMeant) => "NOT-MEANT".to_owned(),
        Err(error) => format!("FAILED {}", error.errno().raw_os_error()),
    };
    let sockets: Vec<BorrowedFd<'_>> = opened.iter().map(AsFd::as_fd).collect();
    // A process that no longer listens has given up.
    let _ = send_with_descriptors(asker, text.as_bytes(), &sockets, SendFlags::DONTWAIT);
}

/// The socket that was asked for. None if no answer has arrived yet.
pub(crate) fn take(asked: BorrowedFd<'_>) -> Result<Option<OwnedFd>, DialError> {
    let mut bytes = [0; ANSWER_BYTES];
    let (got, socket) = match receive_with_descriptor(asked, &mut bytes, RecvFlags::DONTWAIT) {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(errno) => return Err(DialError::Later(errno)),
    };
    match (understand(&bytes[..got]), socket) {
        (None, Some(socket)) => Ok(Some(socket)),
        (Some(error), _) => Err(error),
        // The peer has ended, or its message was truncated: this process has no descriptor left.
        (None, None) if got == 0 => Err(DialError::Later(Errno::CONNRESET)),
        (None, None) => Err(DialError::Descriptors),
    }
}

/// The refusal in an answer, if it is one. Pure.
fn understand(answer: &[u8]) -> Option<DialError> {
    let text = std::str::from_utf8(answer).ok()?;
    let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
    match word {
        "STRANGER" => {
            let (owner, user) = rest.split_once(' ')?;
            let (owner, user) = (owner.parse().ok()?, user.parse().ok()?);
            Some(DialError::Stranger(Stranger { owner, user }))
        }
        "NOT-MEANT" => Some(DialError::NotMeant),
        "FAILED" => Some(DialError::of_connect(Errno::from_raw_os_error(rest.parse().ok()?))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn sockets() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        pair.expect("sockets")
    }

    /// What a process that asks for `address` receives.
    fn asked_for(address: Option<&Address>) -> Result<Option<OwnedFd>, DialError> {
        let (here, there) = sockets();
        assert!(matches!(take(here.as_fd()), Ok(None)), "no answer yet");
        answer(&there, address, None);
        take(here.as_fd())
    }

    #[test]
    fn a_connection_is_opened_for_another_one() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("blade.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("bind");
        let address = Address::Unix(path);
        let socket = asked_for(Some(&address)).expect("an answer").expect("a socket");
        rustix::net::send(&socket, b"hello", SendFlags::empty()).expect("it is connected");
        let (mut there, _) = listener.accept().expect("a client");
        let mut bytes = [0; 5];
        std::io::Read::read_exact(&mut there, &mut bytes).expect("its bytes");
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn what_cannot_be_opened_is_told_as_to_who_opens_it_himself() {
        let nobody = Address::Unix("/nowhere/at/all".into());
        let gone = asked_for(Some(&nobody)).expect_err("nobody is there");
        assert_eq!(gone, DialError::Gone(Errno::NOENT));
        assert_eq!(asked_for(None).expect_err("not meant"), DialError::NotMeant);
        let stranger = Stranger { owner: 5, user: 0 };
        assert_eq!(understand(b"STRANGER 5 0"), Some(DialError::Stranger(stranger)));
        assert_eq!(understand(b"OPENED"), None);
    }

    #[test]
    fn who_has_ended_answers_no_more() {
        let (here, there) = sockets();
        drop(there);
        let error = take(here.as_fd()).expect_err("its end");
        assert!(error.may_pass(), "then it is asked again, or the connection opened here");
    }
}
