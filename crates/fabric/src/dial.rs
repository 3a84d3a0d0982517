//! Making a connection: connect, hello, hello's answer; step by step, so that a pager thread need not
//! wait for it.
//!
//! Each attempt takes the next generation of the connection's slot. When the blade has answered hello,
//! nothing sent over an earlier connection of the slot can take effect any more; so what was not
//! answered there may be repeated.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use farpool_wire::{
    Address, ErrorCode, HEADER_BYTES, Hello, HelloOk, NAME_LIMIT_BYTES, Opcode, Request, RequestId,
    Response, WireError, split_head,
};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::descriptor::Descriptor;
use crate::peer;
use crate::session::{ConnectError, Session};
use crate::sys;

/// Number of hello, the first request of every connection.
const HELLO_ID: RequestId = RequestId(0);
/// Most bytes of hello's answer, which has a fixed form.
const ANSWER_LIMIT_BYTES: usize = 128;

/// Makes the connections of one slot, one after the other.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) session: Arc<Session>,
    slot: u32,
    generation: u32,
    /// The blade process we have memory on, once known.
    blade_id: Option<u64>,
}

/// An attempt under way.
#[derive(Debug)]
pub(crate) struct Dial {
    socket: Descriptor,
    connected: bool,
    hello: Vec<u8>,
    sent: usize,
    answer: Vec<u8>,
    blade_id: Option<u64>,
}

/// What the blade said when it let us in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Greeting {
    pub(crate) ok: HelloOk,
    pub(crate) credits: u16,
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DialError {
    #[error("nobody serves there ({0})")]
    Gone(Errno),
    #[error("it cannot be reached ({0})")]
    Later(Errno),
    #[error("it closed the connection instead of greeting")]
    Closed,
    #[error("{0}")]
    Refused(ErrorCode),
    #[error("{0}")]
    Wire(WireError),
    #[error("it was started anew and no longer has what this client stored there")]
    Restarted,
    #[error("its process is of user {}", .0.owner)]
    Stranger(peer::Stranger),
    #[error("no descriptor is left in this process")]
    Descriptors,
}

impl DialError {
    /// True if another attempt may succeed.
    pub(crate) fn may_pass(self) -> bool {
        match self {
            DialError::Later(_) | DialError::Closed => true,
            DialError::Wire(error) => {
                !matches!(error, WireError::Version { .. } | WireError::Magic { .. })
            }
            _ => false,
        }
    }

    fn of_connect(errno: Errno) -> Self {
        match errno {
            Errno::CONNREFUSED | Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::NOTSOCK => {
                DialError::Gone(errno)
            }
            Errno::MFILE | Errno::NFILE => DialError::Descriptors,
            other => DialError::Later(other),
        }
    }
}

impl Dialer {
    pub(crate) fn new(session: Arc<Session>, slot: u32) -> Result<Self, ConnectError> {
        if !session.address.is_local() && !session.allow_remote_tcp {
            return Err(ConnectError::RemoteTcp { address: session.address.to_string() });
        }
        Ok(Dialer { session, slot, generation: 0, blade_id: None })
    }

    /// Starts the next attempt.
    pub(crate) fn dial(&mut self) -> Result<Dial, DialError> {
        self.generation += 1;
        let socket = match &self.session.address {
            Address::Unix(path) | Address::Shm(path) => sys::connect_unix(path),
            Address::Tcp(at) => sys::connect_tcp(at),
        };
        let socket = socket.map_err(DialError::of_connect)?;
        self.check_peer(&socket)?;
        let socket = self.session.descriptors.adopt(socket).map_err(DialError::of_connect)?;
        let hello = self.hello().map_err(DialError::Wire)?;
        let answer = Vec::with_capacity(ANSWER_LIMIT_BYTES);
        Ok(Dial { socket, connected: false, hello, sent: 0, answer, blade_id: self.blade_id })
    }

    /// Before anything is said to it: a unix socket's listener is known once it is connected.
    fn check_peer(&self, socket: impl AsFd) -> Result<(), DialError> {
        let (Address::Unix(path) | Address::Shm(path)) = &self.session.address else {
            return Ok(());
        };
        let stranger = peer::stranger(socket.as_fd(), path).map_err(DialError::Later)?;
        stranger.map_or(Ok(()), |stranger| Err(DialError::Stranger(stranger)))
    }

    fn hello(&self) -> Result<Vec<u8>, WireError> {
        let session = &self.session;
        let name_bytes = session.client_name.floor_char_boundary(NAME_LIMIT_BYTES);
        let hello = Hello {
            client: session.client,
            grant: session.grant,
            purpose: session.purpose,
            pid: rustix::process::getpid().as_raw_nonzero().get().unsigned_abs(),
            slot: self.slot,
            generation: self.generation,
            quota_wanted_bytes: session.quota_bytes,
            name: &session.client_name[..name_bytes],
        };
        let mut out = Vec::with_capacity(ANSWER_LIMIT_BYTES);
        Request::Hello(hello).encode(HELLO_ID, 0, &mut out)?;
        Ok(out)
    }

    /// Remembers which blade process answered, so that another one is told apart later.
    pub(crate) fn met(&mut self, greeting: &Greeting) {
        self.blade_id = Some(greeting.ok.blade_id);
    }

    /// Connects and waits for it, at most until the given time.
    pub(crate) fn connect(&mut self, until: Instant) -> Result<(Descriptor, Greeting), DialError> {
        loop {
            match self.connect_once(until) {
                Err(error) if error.may_pass() && Instant::now() < until => {
                    sys::pause(sys::CONNECT_PAUSE);
                }
                other => return other,
            }
        }
    }

    fn connect_once(&mut self, until: Instant) -> Result<(Descriptor, Greeting), DialError> {
        let mut dial = self.dial()?;
        loop {
            if let Some(greeting) = dial.advance()? {
                self.met(&greeting);
                return Ok((dial.socket, greeting));
            }
            let what = if dial.connected { PollFlags::IN } else { PollFlags::OUT };
            if !sys::wait_until(dial.socket.as_fd(), what, until).map_err(DialError::Later)? {
                return Err(DialError::Later(Errno::TIMEDOUT));
            }
        }
    }

    /// The error for people.
    pub(crate) fn explain(&self, error: DialError) -> ConnectError {
        let address = self.session.address.to_string();
        match error {
            DialError::Refused(code) => ConnectError::Refused { address, code },
            DialError::Stranger(peer::Stranger { owner, user }) => {
                ConnectError::Stranger { address, owner, user }
            }
            DialError::Descriptors => ConnectError::Descriptors { address },
            other => ConnectError::Lost { address, reason: other.to_string() },
        }
    }
}

impl Dial {
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn into_socket(self) -> Descriptor {
        self.socket
    }

    /// Goes as far as it can without waiting; the greeting once it is there.
    pub(crate) fn advance(&mut self) -> Result<Option<Greeting>, DialError> {
        if !self.connected {
            self.connected = sys::connected(self.socket.as_fd()).map_err(DialError::of_connect)?;
        }
        if !self.connected || !self.send_hello()? {
            return Ok(None);
        }
        while let Some(missing) = self.missing_bytes()? {
            if !self.receive(missing)? {
                return Ok(None);
            }
        }
        let greeting = self.greeting()?;
        if self.blade_id.is_some_and(|known| known != greeting.ok.blade_id) {
            return Err(DialError::Restarted);
        }
        sys::make_patient(self.socket.as_fd()).map_err(DialError::Later)?;
        Ok(Some(greeting))
    }

    fn send_hello(&mut self) -> Result<bool, DialError> {
        while self.sent < self.hello.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &self.hello[self.sent..], flags) {
                Ok(bytes) => self.sent += bytes,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(DialError::Later(errno)),
            }
        }
        Ok(true)
    }

    /// How many bytes the answer still lacks, as far as that can be said; none when it is complete.
    fn missing_bytes(&self) -> Result<Option<usize>, DialError> {
        let Some((header, _)) = self.answer.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(Some(HEADER_BYTES - self.answer.len()));
        };
        let header = farpool_wire::Header::decode(header).map_err(DialError::Wire)?;
        let total = header.head_bytes();
        if header.page_count > 0 || total > ANSWER_LIMIT_BYTES {
            return Err(DialError::Wire(WireError::Length));
        }
        Ok(total.checked_sub(self.answer.len()).filter(|&missing| missing > 0))
    }

    fn receive(&mut self, bytes: usize) -> Result<bool, DialError> {
        let mut buffer = [0; ANSWER_LIMIT_BYTES];
        let room = &mut buffer[..bytes.min(ANSWER_LIMIT_BYTES)];
        match rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(DialError::Closed),
            Ok((_, got)) => {
                self.answer.extend_from_slice(&buffer[..got]);
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(DialError::Later(errno)),
        }
    }

    fn greeting(&self) -> Result<Greeting, DialError> {
        let head = split_head(&self.answer).map_err(DialError::Wire)?;
        let head = head.ok_or(DialError::Wire(WireError::Length))?;
        match Response::decode(&head).map_err(DialError::Wire)? {
            Response::Error { code, .. } => Err(DialError::Refused(code)),
            Response::HelloOk(ok)
                if head.header.request_id == HELLO_ID && head.header.opcode == Opcode::Hello =>
            {
                Ok(Greeting { ok, credits: head.header.credits })
            }
            _ => Err(DialError::Wire(WireError::Direction)),
        }
    }
}
