//! Connections that another process, or another thread, opens in this one's stead.
//!
//! A sidecar has the root directory, the namespaces and the user of its program, from which the
//! keeper's blade may be out of reach, or another one may be reached. So it asks its keeper, with a
//! socket on which the answer arrives: one message, and with it the blade's socket, which may still
//! be connecting. Only the asking process waits for the connection.
//!
//! Over TCP with certificates the answer is a connection whose handshake is complete, with its
//! keys. A pager inside any program, or in a sidecar that shares its program's memory, must hold no
//! certificate's key, which is good for years and for every blade; the keys of one connection are
//! worth no more than the connection. And the handshake allocates, reads files and takes a
//! millisecond of a processor, which no pager thread may.
//!
//! Who made a handshake also notices first that its blade is not to be trusted any more, and says
//! so on the socket on which it answered; so both keep that as long as the connection.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use farpool_kernel::{receive_with_descriptor, send_with_descriptors};
use farpool_record::{SECRETS_BYTES, Secrets};
use farpool_wire::Address;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use zeroize::Zeroizing;

use crate::channel::Keys;
use crate::opening::{self, DialError, Words};
use crate::peer::Stranger;

/// The longest answer in bytes: a reason in words.
const ANSWER_BYTES: usize = 16 + Words::LIMIT_BYTES;
/// What an answer with keys begins with. Keys, and two times in seconds, follow.
const SECURED: &[u8] = b"SECURED ";
const SECURED_BYTES: usize = SECURED.len() + SECRETS_BYTES + 16;

/// Why a connection with certificates could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenFailure {
    /// The kernel's reason.
    System(Errno),
    /// One end does not accept the other: the reason and the remedy.
    Untrusted(String),
}

/// Whoever opens connections in a pager's stead.
pub trait Opener: std::fmt::Debug + Send + Sync {
    /// Asks for a connection to an address; the answer arrives on the socket that is returned.
    /// None: the connection is opened here.
    ///
    /// # Errors
    /// Nobody can be asked now.
    fn ask(&self, address: &Address) -> Result<Option<OwnedFd>, Errno>;
}

/// An [`Opener`] without a state of its own.
pub type Ask = fn(&Address) -> Result<Option<OwnedFd>, Errno>;

impl Opener for Ask {
    fn ask(&self, address: &Address) -> Result<Option<OwnedFd>, Errno> {
        self(address)
    }
}

/// Hands over a connection whose handshake is complete, or says why there is none.
pub fn answer_secured(asker: &OwnedFd, opened: Result<(OwnedFd, Keys), OpenFailure>) {
    // A process that no longer listens has given up.
    let send = |bytes: &[u8], sockets: &[BorrowedFd<'_>]| {
        let _ = send_with_descriptors(asker, bytes, sockets, SendFlags::DONTWAIT);
    };
    match opened {
        Ok((socket, Keys { secrets, renew_within, valid_for })) => {
            let mut message = Zeroizing::new([0; SECURED_BYTES]);
            let (word, rest) = message.split_at_mut(SECURED.len());
            let (keys, times) = rest.split_at_mut(SECRETS_BYTES);
            word.copy_from_slice(SECURED);
            keys.copy_from_slice(&secrets.encode()[..]);
            let (renew, valid) = times.split_at_mut(8);
            renew.copy_from_slice(&renew_within.as_secs().to_le_bytes());
            valid.copy_from_slice(&valid_for.as_secs().to_le_bytes());
            send(&message[..], &[socket.as_fd()]);
        }
        Err(OpenFailure::System(errno)) => {
            send(format!("FAILED {}", errno.raw_os_error()).as_bytes(), &[]);
        }
        Err(OpenFailure::Untrusted(reason)) => tell_untrusted(asker, &reason),
    }
}

/// Tells a process that a blade is not to be trusted, also of a connection that it was handed.
pub fn tell_untrusted(asker: &OwnedFd, reason: &str) {
    let mut text = format!("UNTRUSTED {reason}");
    text.truncate(text.floor_char_boundary(ANSWER_BYTES));
    // A process that no longer listens has given up.
    let _ = send_with_descriptors(asker, text.as_bytes(), &[], SendFlags::DONTWAIT);
}

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

/// A socket that was asked for, and its keys if it has any.
pub(crate) type Taken = (OwnedFd, Option<Keys>);

/// The socket that was asked for. None if no answer has arrived yet.
pub(crate) fn take(asked: BorrowedFd<'_>) -> Result<Option<Taken>, DialError> {
    let mut bytes = Zeroizing::new([0; ANSWER_BYTES]);
    let received = receive_with_descriptor(asked, &mut bytes[..], RecvFlags::DONTWAIT);
    let (got, socket) = match received {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(errno) => return Err(DialError::Later(errno)),
    };
    let answer = &bytes[..got];
    let keys = match answer.strip_prefix(SECURED) {
        None => None,
        // Never taken for a connection without keys.
        Some(rest) => Some(keys_of(rest).ok_or(DialError::Later(Errno::PROTO))?),
    };
    match (understand(answer), socket) {
        (None, Some(socket)) => Ok(Some((socket, keys))),
        (Some(error), _) => Err(error),
        // The peer has ended, or its message was truncated: this process has no descriptor left.
        (None, None) if got == 0 => Err(DialError::Later(Errno::CONNRESET)),
        (None, None) => Err(DialError::Descriptors),
    }
}

/// What is said later of a connection that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Nothing.
    None,
    /// Its blade is not to be trusted any more. The next handshake tells why.
    Untrusted,
    /// Nobody watches its blade any more.
    Unwatched,
}

/// Looks for what is said later.
pub(crate) fn notice(asked: BorrowedFd<'_>) -> Notice {
    let mut bytes = [0; ANSWER_BYTES];
    match rustix::net::recv(asked, &mut bytes[..], RecvFlags::DONTWAIT) {
        Err(Errno::AGAIN | Errno::INTR) => Notice::None,
        Ok((got @ 1.., _)) => match understand(&bytes[..got]) {
            Some(DialError::Untrusted(_)) => Notice::Untrusted,
            // Nothing else is ever said: whoever says it is not to be relied on.
            _ => Notice::Unwatched,
        },
        Ok(_) | Err(_) => Notice::Unwatched,
    }
}

/// The keys in an answer, behind its first word. Pure.
fn keys_of(rest: &[u8]) -> Option<Keys> {
    let (secrets, times) = rest.split_first_chunk::<SECRETS_BYTES>()?;
    let (renew, valid) = times.split_first_chunk::<8>()?;
    let seconds = |bytes: [u8; 8]| Duration::from_secs(u64::from_le_bytes(bytes));
    Some(Keys {
        secrets: Secrets::decode(secrets)?,
        renew_within: seconds(*renew),
        valid_for: seconds(valid.try_into().ok()?),
    })
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
        "UNTRUSTED" => Some(DialError::Untrusted(Words::of(rest))),
        "FAILED" => Some(DialError::of_connect(Errno::from_raw_os_error(rest.parse().ok()?))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use farpool_record::{Cipher, TrafficKey};
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
        take(here.as_fd()).map(|taken| {
            taken.map(|(socket, keys)| {
                assert!(keys.is_none(), "it is plain");
                socket
            })
        })
    }

    fn keys() -> Keys {
        let key = |byte| {
            let key = TrafficKey::new(Cipher::Aes128Gcm, &[byte; 16], [byte; 12], 3);
            key.expect("a key")
        };
        Keys {
            secrets: Secrets { sending: key(1), receiving: key(2) },
            renew_within: Duration::from_secs(4),
            valid_for: Duration::from_secs(5),
        }
    }

    #[test]
    fn keys_arrive_with_their_socket_and_never_in_part() {
        let (here, there) = sockets();
        let (socket, _other) = sockets();
        answer_secured(&there, Ok((socket, keys())));
        let (_, taken) = take(here.as_fd()).expect("an answer").expect("a socket");
        let taken = taken.expect("keys");
        assert_eq!((taken.renew_within.as_secs(), taken.valid_for.as_secs()), (4, 5));
        assert_eq!(taken.secrets.encode(), keys().secrets.encode());
        let (socket, _other) = sockets();
        for part in [&b"SECURED "[..], b"SECURED x", &[SECURED, &[0; 122]].concat()] {
            send_with_descriptors(&there, part, &[socket.as_fd()], SendFlags::empty())
                .expect("it is sent");
            let error = take(here.as_fd()).expect_err("no keys");
            assert_eq!(error, DialError::Later(Errno::PROTO));
        }
    }

    #[test]
    fn what_is_said_later_arrives_too() {
        let (here, there) = sockets();
        let (socket, _other) = sockets();
        answer_secured(&there, Ok((socket, keys())));
        take(here.as_fd()).expect("an answer").expect("a socket");
        assert_eq!(notice(here.as_fd()), Notice::None);
        tell_untrusted(&there, "its certificate was revoked");
        assert_eq!(notice(here.as_fd()), Notice::Untrusted);
        assert_eq!(notice(here.as_fd()), Notice::None);
        send_with_descriptors(&there, b"nonsense", &[], SendFlags::empty()).expect("it is sent");
        assert_eq!(notice(here.as_fd()), Notice::Unwatched);
        drop(there);
        assert_eq!(notice(here.as_fd()), Notice::Unwatched);
    }

    #[test]
    fn a_reason_arrives_in_words() {
        let (here, there) = sockets();
        let long = "e\u{301}".repeat(400);
        for reason in ["its certificate was revoked", &long] {
            answer_secured(&there, Err(OpenFailure::Untrusted(reason.to_owned())));
            let error = take(here.as_fd()).expect_err("a reason").to_string();
            assert!(!error.is_empty() && reason.starts_with(&error), "{error}");
        }
        answer_secured(&there, Err(OpenFailure::System(Errno::CONNREFUSED)));
        let error = take(here.as_fd()).expect_err("a reason");
        assert_eq!(error, DialError::Gone(Errno::CONNREFUSED));
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
