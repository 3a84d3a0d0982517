//! The connection between two hosts over which a guest moves, and what is said on it. What arrives
//! is not trusted: messages have a largest length, and come in their order or not at all.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use farpool_wire::Address;

/// How long the other host may take for an answer. Its longest step, loading a guest's devices,
/// takes a second; more only where it has no processor for them, or a blade is lost.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(60);
/// Begins the first message; its last character is the version of what follows.
const MAGIC: [u8; 8] = *b"fpmove01";
/// The longest piece of QEMU's state in one message.
pub(super) const PIECE_BYTES: usize = 256 << 10;
/// The longest reason of a refusal.
const REASON_BYTES_MAX: usize = 4096;
/// What tells of a page of the guest, at most: its state, and its seal with what belongs to it.
const TOLD_BYTES_MAX: u64 = 64;
/// What is told of the memory beside its pages.
const TOKENS_BYTES_MAX: u64 = 1 << 20;
const HEAD_BYTES: usize = 5;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A guest with this much memory is to come, and to run or to stay paused.
    Hello { memory_bytes: u64, runs: bool },
    /// It may.
    Welcome,
    /// It does not come, or does not run: the giver has it.
    Refused(String),
    /// Where its memory is.
    Memory(Vec<u8>),
    /// The memory is bound.
    Bound,
    /// A piece of the state of QEMU's devices.
    State(Vec<u8>),
    /// That was the last piece.
    StateEnd,
    /// The guest is ready to run.
    Loaded,
    /// The giver has let go of it.
    Go,
    /// The guest is the receiver's, and runs or is paused as it was.
    Running,
}

/// Why a guest does not move on.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("{address} cannot be reached: {error}; farpool vm run --incoming has to wait there")]
    Unreachable { address: String, error: Error },
    #[error(
        "{0} is on another host, and what goes there is not encrypted, keys of pages among it: \
         give --allow-remote-tcp if the network is trusted, or forward a port of this host there \
         (ssh -L)"
    )]
    RemoteTcp(String),
    #[error("{0} moves pages; give a socket of unix:// or tcp:// for guests")]
    NotForGuests(String),
    #[error("{address} cannot be listened at: {error}")]
    NotBound { address: String, error: Error },
    #[error("the connection to the other host has ended: {0}")]
    Broken(Error),
    #[error("the other host gave no answer within {} s", ANSWER_TIME.as_secs())]
    Silent,
    #[error("the other host says what no farpool of this version says ({0})")]
    Nonsense(&'static str),
    #[error("the other host refuses it: {0}")]
    Refused(String),
}

impl From<Error> for LinkError {
    fn from(error: Error) -> LinkError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => LinkError::Silent,
            _ => LinkError::Broken(error),
        }
    }
}

impl Message {
    fn tag(&self) -> u8 {
        match self {
            Message::Hello { .. } => 1,
            Message::Welcome => 2,
            Message::Refused(_) => 3,
            Message::Memory(_) => 4,
            Message::Bound => 5,
            Message::State(_) => 6,
            Message::StateEnd => 7,
            Message::Loaded => 8,
            Message::Go => 9,
            Message::Running => 10,
        }
    }

    fn body(&self) -> Vec<u8> {
        match self {
            Message::Hello { memory_bytes, runs } => {
                [&MAGIC[..], &memory_bytes.to_le_bytes(), &[u8::from(*runs)]].concat()
            }
            Message::Refused(reason) => {
                reason.as_bytes()[..reason.len().min(REASON_BYTES_MAX)].to_vec()
            }
            Message::Memory(bytes) | Message::State(bytes) => bytes.clone(),
            _ => Vec::new(),
        }
    }

    /// The message of a tag and a body. None: there is no such message.
    fn of(tag: u8, body: Vec<u8>) -> Option<Message> {
        let empty = |message| body.is_empty().then_some(message);
        match tag {
            1 => {
                let (magic, rest) = body.split_first_chunk()?;
                let (bytes, rest) = rest.split_first_chunk()?;
                let runs = match rest {
                    [runs @ 0..=1] => *runs == 1,
                    _ => return None,
                };
                let memory_bytes = u64::from_le_bytes(*bytes);
                (*magic == MAGIC).then_some(Message::Hello { memory_bytes, runs })
            }
            2 => empty(Message::Welcome),
            3 => Some(Message::Refused(String::from_utf8_lossy(&body).into_owned())),
            4 => Some(Message::Memory(body)),
            5 => empty(Message::Bound),
            6 => Some(Message::State(body)),
            7 => empty(Message::StateEnd),
            8 => empty(Message::Loaded),
            9 => empty(Message::Go),
            10 => empty(Message::Running),
            _ => None,
        }
    }
}

/// The longest body of a message with this tag, for a guest with so much memory.
fn most_bytes(tag: u8, memory_bytes: u64) -> u64 {
    match tag {
        1 => 64,
        3 => REASON_BYTES_MAX as u64,
        4 => {
            TOKENS_BYTES_MAX + memory_bytes.div_ceil(farpool_units::PAGE_BYTES_U64) * TOLD_BYTES_MAX
        }
        6 => PIECE_BYTES as u64,
        _ => 0,
    }
}

/// A connection to the other host.
#[derive(Debug)]
pub(super) struct Link {
    stream: Stream,
    /// Of the guest that moves.
    memory_bytes: u64,
    /// What was sent.
    pub(super) sent_bytes: u64,
}

#[derive(Debug)]
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Link {
    /// Connects to the host that is to have the guest.
    pub(super) fn connect(
        to: &Address,
        may_be_remote: bool,
        memory_bytes: u64,
    ) -> Result<Link, LinkError> {
        check(to, may_be_remote)?;
        let unreachable = |error| LinkError::Unreachable { address: to.to_string(), error };
        let stream = match to {
            Address::Unix(path) | Address::Shm(path) => UnixStream::connect(path).map(Stream::Unix),
            Address::Tcp(at) => TcpStream::connect_timeout(at, ANSWER_TIME).map(Stream::Tcp),
        };
        Link::over(stream.map_err(unreachable)?, memory_bytes)
    }

    fn over(stream: Stream, memory_bytes: u64) -> Result<Link, LinkError> {
        if let Stream::Tcp(stream) = &stream {
            stream.set_nodelay(true)?;
        }
        let link = Link { stream, memory_bytes, sent_bytes: 0 };
        link.wait_at_most(ANSWER_TIME)?;
        Ok(link)
    }

    /// How long the other host may take from here on.
    pub(super) fn wait_at_most(&self, time: Duration) -> Result<(), LinkError> {
        match &self.stream {
            Stream::Unix(stream) => {
                stream.set_read_timeout(Some(time))?;
                stream.set_write_timeout(Some(time))?;
            }
            Stream::Tcp(stream) => {
                stream.set_read_timeout(Some(time))?;
                stream.set_write_timeout(Some(time))?;
            }
        }
        Ok(())
    }

    pub(super) fn send(&mut self, message: &Message) -> Result<(), LinkError> {
        let body = message.body();
        let length = u32::try_from(body.len()).map_err(|_| LinkError::Nonsense("too long"))?;
        let mut bytes = vec![message.tag()];
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend(body);
        self.sent_bytes += bytes.len() as u64;
        Ok(self.stream().write_all(&bytes)?)
    }

    pub(super) fn receive(&mut self) -> Result<Message, LinkError> {
        let memory_bytes = self.memory_bytes;
        let stream = self.stream();
        let mut head = [0; HEAD_BYTES];
        stream.read_exact(&mut head)?;
        let [tag, length @ ..] = head;
        let length = u32::from_le_bytes(length);
        if u64::from(length) > most_bytes(tag, memory_bytes) {
            return Err(LinkError::Nonsense("a message is too long"));
        }
        let length = usize::try_from(length).map_err(|_| LinkError::Nonsense("too long"))?;
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        match Message::of(tag, body) {
            Some(Message::Refused(reason)) => Err(LinkError::Refused(reason)),
            Some(message) => Ok(message),
            None => Err(LinkError::Nonsense("there is no such message")),
        }
    }

    /// Waits for this message.
    pub(super) fn expect(&mut self, wanted: &Message) -> Result<(), LinkError> {
        match self.receive()? {
            message if message == *wanted => Ok(()),
            _ => Err(LinkError::Nonsense("another message is due")),
        }
    }

    fn stream(&mut self) -> &mut dyn ReadWrite {
        match &mut self.stream {
            Stream::Unix(stream) => stream,
            Stream::Tcp(stream) => stream,
        }
    }
}

trait ReadWrite: Read + Write {}

impl<T: Read + Write> ReadWrite for T {}

/// Where a host waits for a guest.
#[derive(Debug)]
pub(super) struct Door {
    listener: Listener,
}

#[derive(Debug)]
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Door {
    pub(super) fn open(at: &Address, may_be_remote: bool) -> Result<Door, LinkError> {
        check(at, may_be_remote)?;
        let listener = match at {
            Address::Unix(path) | Address::Shm(path) => {
                UnixListener::bind(path).map(Listener::Unix)
            }
            Address::Tcp(address) => TcpListener::bind(address).map(Listener::Tcp),
        };
        let not_bound = |error| LinkError::NotBound { address: at.to_string(), error };
        Ok(Door { listener: listener.map_err(not_bound)? })
    }

    /// Waits for a host that has a guest for this one.
    pub(super) fn accept(&self, memory_bytes: u64) -> Result<Link, LinkError> {
        let stream = match &self.listener {
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
        };
        Link::over(stream?, memory_bytes)
    }

    /// Where it is, with the port that the kernel has chosen.
    pub(super) fn address(&self) -> Option<Address> {
        match &self.listener {
            Listener::Unix(listener) => {
                let address = listener.local_addr().ok()?;
                address.as_pathname().map(|path| Address::Unix(path.to_owned()))
            }
            Listener::Tcp(listener) => listener.local_addr().ok().map(Address::Tcp),
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(Address::Unix(path)) = self.address() {
            // It may be gone already.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn check(at: &Address, may_be_remote: bool) -> Result<(), LinkError> {
    match at {
        Address::Shm(_) => Err(LinkError::NotForGuests(at.to_string())),
        _ if at.is_local() || may_be_remote => Ok(()),
        _ => Err(LinkError::RemoteTcp(at.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MEMORY_BYTES: u64 = 1 << 20;

    fn pair() -> (Link, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        (Link::over(Stream::Unix(ours), MEMORY_BYTES).expect("a link"), theirs)
    }

    #[test]
    fn every_message_arrives() {
        let (mut sender, theirs) = pair();
        let mut receiver = Link::over(Stream::Unix(theirs), MEMORY_BYTES).expect("a link");
        for message in [
            Message::Hello { memory_bytes: 7 << 30, runs: true },
            Message::Welcome,
            Message::Memory(vec![3; 5000]),
            Message::Bound,
            Message::State(vec![1; PIECE_BYTES]),
            Message::StateEnd,
            Message::Loaded,
            Message::Go,
            Message::Running,
        ] {
            let sent = std::thread::scope(|scope| {
                let sent = scope.spawn(|| sender.send(&message));
                assert_eq!(receiver.receive().expect("a message"), message);
                sent.join().expect("the sender")
            });
            sent.expect("sent");
        }
        sender.send(&Message::Refused("no room".into())).expect("sent");
        let refused = receiver.receive().expect_err("refused").to_string();
        assert!(refused.contains("no room"), "{refused}");
        drop(sender);
        assert!(matches!(receiver.receive(), Err(LinkError::Broken(_))));
    }

    #[test]
    fn a_message_that_is_too_long_is_not_read() {
        for (tag, length) in [(2, 1), (4, 2 << 20), (6, 1 << 30), (99, 1), (1, 65)] {
            let (mut link, mut theirs) = pair();
            let head = [&[tag][..], &u32::to_le_bytes(length)].concat();
            theirs.write_all(&head).expect("sent");
            let error = link.receive().expect_err("too long");
            assert!(matches!(error, LinkError::Nonsense(_)), "{tag}: {error}");
        }
    }

    #[test]
    fn other_hosts_need_permission() {
        let remote: Address = "tcp://192.0.2.1:7".parse().expect("an address");
        let refused = Link::connect(&remote, false, 0).expect_err("remote").to_string();
        assert!(refused.contains("--allow-remote-tcp"), "{refused}");
        let shm: Address = "shm:///x".parse().expect("an address");
        assert!(matches!(Door::open(&shm, true), Err(LinkError::NotForGuests(_))));
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let (mut link, mut theirs) = pair();
            theirs.write_all(&bytes).expect("sent");
            drop(theirs);
            while link.receive().is_ok() {}
        }
    }
}
