//! Making a connection: connect, hello, hello's answer; step by step, so that a pager thread need
//! not wait for it.
//!
//! Each attempt takes the next generation of the connection's slot. Once the blade has answered
//! hello, nothing sent over an earlier connection of the slot can take effect any more; so requests
//! that were unanswered there may be repeated.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_kernel::Time;
use farpool_record::RecordError;
use farpool_wire::{
    Address, ErrorCode, HEADER_BYTES, Hello, HelloOk, NAME_LIMIT_BYTES, Opcode, Request, RequestId,
    Response, WireError, split_head,
};
use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::asked;
use crate::channel::{Channel, Trouble};
use crate::descriptor::DescriptorSet;
use crate::opening::{DialError, open};
use crate::peer::Stranger;
use crate::session::{ConnectError, Session};
use crate::sys;

/// Request id of hello, the first request of every connection.
const HELLO_ID: RequestId = RequestId(0);
/// Time of the first attempt to connect, where the caller waits for it; every further one gets
/// twice as long. What is lost on the way is seldom found by waiting.
const ATTEMPT_TIME: Duration = Duration::from_secs(1);
/// Most bytes of hello's answer, which has a fixed form.
const ANSWER_LIMIT_BYTES: usize = 128;

/// Makes the connections of one slot, one after the other.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) session: Arc<Session>,
    slot: u32,
    generation: u32,
    /// The blade process that has our memory, once known.
    blade_id: Option<u64>,
}

/// An attempt under way.
#[derive(Debug)]
pub(crate) struct Dial {
    /// The blade's socket, or the one for the answer if another process was asked to open it.
    channel: Channel,
    is_asked: bool,
    /// Without keys it is not used.
    needs_keys: bool,
    connected: bool,
    hello: Vec<u8>,
    sent: usize,
    answer: Vec<u8>,
    blade_id: Option<u64>,
    descriptors: Arc<DescriptorSet>,
    time: Time,
    begun: Instant,
}

/// The blade's answer to hello.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Greeting {
    pub(crate) ok: HelloOk,
    pub(crate) credits: u16,
    /// The time from the beginning of the attempt.
    pub(crate) took: Duration,
}

impl Dialer {
    pub(crate) fn new(session: Arc<Session>, slot: u32) -> Result<Self, ConnectError> {
        let is_allowed = session.allow_remote_tcp || session.secures_tcp;
        if !session.address.is_local() && !is_allowed {
            return Err(ConnectError::RemoteTcp { address: session.address.to_string() });
        }
        Ok(Dialer { session, slot, generation: 0, blade_id: None })
    }

    /// Starts the next attempt.
    pub(crate) fn dial(&mut self) -> Result<Dial, DialError> {
        self.generation += 1;
        let Session { address, descriptors, asks, time, .. } = &*self.session;
        let needs_keys = self.session.secures_tcp && matches!(address, Address::Tcp(_));
        let asked = asks.as_ref().map_or(Ok(None), |opener| opener.ask(address));
        let asked = asked.map_err(DialError::of_connect)?;
        let is_asked = asked.is_some();
        if needs_keys && !is_asked {
            return Err(DialError::Unsecured);
        }
        let socket = asked.map_or_else(|| open(address, |_| false), Ok)?;
        let socket = descriptors.adopt(socket).map_err(DialError::of_connect)?;
        Ok(Dial {
            channel: Channel::plain(socket),
            is_asked,
            needs_keys,
            connected: false,
            hello: self.hello().map_err(DialError::Wire)?,
            sent: 0,
            answer: Vec::with_capacity(ANSWER_LIMIT_BYTES),
            blade_id: self.blade_id,
            descriptors: Arc::clone(descriptors),
            time: *time,
            begun: time.now(),
        })
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
            sharing_group: session.sharing_group,
            name: &session.client_name[..name_bytes],
        };
        let mut out = Vec::with_capacity(ANSWER_LIMIT_BYTES);
        Request::Hello(hello).encode(HELLO_ID, 0, &mut out)?;
        Ok(out)
    }

    /// Records which blade process answered, to recognize another one later.
    pub(crate) fn met(&mut self, greeting: &Greeting) {
        self.blade_id = Some(greeting.ok.blade_id);
        let Session { met, time, .. } = &*self.session;
        met.greeted(time.now(), &greeting.ok, greeting.took);
    }

    /// True if another attempt may succeed. Of a blade that was met, more may pass: the network may
    /// refuse for a while to reach it (a proxy, a virtual address or a route that is set up anew),
    /// and another version, in its answer or read from our hello, or no frame at all is damage. On
    /// this host, a socket that refuses belongs to a process that has ended, which only matters if
    /// what it lent has ended with it.
    pub(crate) fn may_pass(&self, error: &DialError) -> bool {
        let Session { address, met, .. } = &*self.session;
        let may_come_back = matches!(address, Address::Tcp(_)) || met.may_come_back();
        let passes_once_met = match error {
            DialError::Gone(_) | DialError::Forbidden(_) => may_come_back,
            DialError::Wire(_) | DialError::Refused(ErrorCode::VersionMismatch) => true,
            // Certificates are renewed, and a blade that did not ask for one may do so later.
            DialError::Refused(ErrorCode::CertificateNeeded) => true,
            other => other.is_distrust(),
        };
        error.may_pass() || (passes_once_met && met.is_set())
    }

    /// Connects, waiting at most until the given time.
    pub(crate) fn connect(&mut self, until: Instant) -> Result<(Channel, Greeting), DialError> {
        let (time, mut patience) = (self.session.time, ATTEMPT_TIME);
        let timed_out = DialError::Later(Errno::TIMEDOUT);
        let mut distrust = None;
        loop {
            match self.connect_once(until.min(time.now() + patience)) {
                Err(error) if self.may_pass(&error) && time.now() < until => {
                    // Only what was waited for in vain is waited for longer: a refusal is at once.
                    if error == timed_out {
                        patience = patience.saturating_mul(2).min(self.session.deadline);
                    }
                    time.pause(error.pause());
                    distrust = Some(error).filter(DialError::is_distrust).or(distrust);
                }
                // That the last attempt had little time tells less than what was told before.
                Err(error) if error == timed_out => return Err(distrust.unwrap_or(error)),
                other => return other,
            }
        }
    }

    fn connect_once(&mut self, until: Instant) -> Result<(Channel, Greeting), DialError> {
        let mut dial = self.dial()?;
        loop {
            if let Some(greeting) = dial.advance()? {
                self.met(&greeting);
                return Ok((dial.channel, greeting));
            }
            let time = self.session.time;
            let is_ready = time.wait_until(dial.descriptor(), dial.awaits(), until);
            if !is_ready.map_err(DialError::Later)? {
                return Err(DialError::Later(Errno::TIMEDOUT));
            }
        }
    }

    /// The error, for display.
    pub(crate) fn explain(&self, error: DialError) -> ConnectError {
        let address = self.session.address.to_string();
        match error {
            DialError::Refused(code) => ConnectError::Refused { address, code },
            DialError::Stranger(Stranger { owner, user }) => {
                ConnectError::Stranger { address, owner, user }
            }
            DialError::Forbidden(errno) => {
                let user = rustix::process::geteuid().as_raw();
                ConnectError::Forbidden { address, user, reason: errno.to_string() }
            }
            DialError::NotMeant => ConnectError::NotMeant { address },
            DialError::Descriptors => ConnectError::Descriptors { address },
            DialError::Untrusted(reason) => {
                ConnectError::Untrusted { address, reason: reason.to_string() }
            }
            DialError::Record(RecordError::Alert(_)) => {
                ConnectError::Untrusted { address, reason: error.to_string() }
            }
            other => ConnectError::Lost { address, reason: other.to_string() },
        }
    }
}

impl Dial {
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    pub(crate) fn into_channel(self) -> Channel {
        self.channel
    }

    /// The events that the next step waits for on the descriptor.
    fn awaits(&self) -> PollFlags {
        if self.is_asked || self.connected { PollFlags::IN } else { PollFlags::OUT }
    }

    /// Takes the blade's socket from the process asked for it. False if it has not arrived yet.
    fn is_open(&mut self) -> Result<bool, DialError> {
        if self.is_asked
            && let Some((socket, keys)) = asked::take(self.channel.as_fd())?
        {
            let socket = self.descriptors.adopt(socket).map_err(DialError::of_connect)?;
            let asked = std::mem::replace(&mut self.channel, Channel::plain(socket)).into_socket();
            if let Some(keys) = keys {
                self.channel.seal(keys, asked, self.time.now());
            }
            self.is_asked = false;
        }
        if !self.is_asked && self.needs_keys && !self.channel.is_sealed() {
            return Err(DialError::Unsecured);
        }
        Ok(!self.is_asked)
    }

    /// Goes as far as it can without waiting. Returns the greeting once it has arrived.
    pub(crate) fn advance(&mut self) -> Result<Option<Greeting>, DialError> {
        if !self.is_open()? {
            return Ok(None);
        }
        if !self.connected {
            self.connected = sys::connected(self.channel.as_fd()).map_err(DialError::of_connect)?;
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
        if self.time.is_kernel() {
            sys::make_patient(self.channel.as_fd()).map_err(DialError::Later)?;
        }
        Ok(Some(greeting))
    }

    fn send_hello(&mut self) -> Result<bool, DialError> {
        while self.sent < self.hello.len() {
            match self.channel.send_bytes(&self.hello[self.sent..]) {
                Ok(bytes) => self.sent += bytes,
                Err(Trouble::System(Errno::AGAIN)) => return Ok(false),
                Err(Trouble::System(Errno::INTR)) => {}
                Err(trouble) => return Err(trouble.into()),
            }
        }
        Ok(self.channel.flush()?)
    }

    /// How many bytes the answer still lacks, as far as that is known. None when it is complete.
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
        // A greeting brings no descriptors; those of a blade that sends some are closed.
        match self.channel.receive_bytes(room, &mut Vec::new()) {
            Ok(0) => Err(DialError::Closed),
            Ok(got) => {
                self.answer.extend_from_slice(&buffer[..got]);
                Ok(true)
            }
            Err(Trouble::System(Errno::AGAIN)) => Ok(false),
            Err(Trouble::System(Errno::INTR)) => Ok(true),
            Err(trouble) => Err(trouble.into()),
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
                let took = self.time.now().saturating_duration_since(self.begun);
                Ok(Greeting { ok, credits: head.header.credits, took })
            }
            _ => Err(DialError::Wire(WireError::Direction)),
        }
    }
}
