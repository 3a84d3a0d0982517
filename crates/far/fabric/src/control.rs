//! The control connection: one request at a time, awaited at most until the deadline.
//!
//! A broken connection is made again and the request repeated, as long as the deadline and the
//! blade's lease allow. The blade may then have carried it out already; [`Answer::repeated`] tells
//! the caller, for whom "already done" then means success. A connection that says nothing for a
//! while is broken, too, long before the deadline.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_wire::{
    ErrorCode, HEAD_LIMIT_BYTES, HelloOk, Request, RequestId, Response, WireError, split_head,
};
use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::channel::{Channel, Trouble};
use crate::descriptor::Descriptor;
use crate::dial::Dialer;
use crate::receive::Break;
use crate::session::{ConnectError, Session};
use crate::spare::SILENCE_LIMIT;
use crate::sys;

/// Time for an answer on the first connection; every further one gets twice as long. A blade
/// answers within milliseconds unless it is overloaded.
const STALL_TIME: Duration = Duration::from_millis(500);

/// A connection for requests that move no pages.
#[derive(Debug)]
pub struct Control {
    dialer: Dialer,
    channel: Option<Channel>,
    hello: HelloOk,
    next_id: u64,
    out: Vec<u8>,
    received: Vec<u8>,
    files: Vec<OwnedFd>,
    lost: Option<ConnectError>,
    /// Since when there is no connection.
    unconnected: Option<Instant>,
    reconnects: u64,
}

/// The blade's answer.
#[derive(Debug)]
pub struct Answer<'a> {
    /// The answer; never [`Response::Error`].
    pub response: Response<'a>,
    /// The descriptor that came with it.
    pub file: Option<Descriptor>,
    /// True if the request was sent more than once.
    pub repeated: bool,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// There is no connection, and none can be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The blade refused the request.
    #[error("blade {address} refused: {code} (detail {detail})")]
    Refused {
        /// The blade's address.
        address: String,
        /// The reason.
        code: ErrorCode,
        /// Details; see the code.
        detail: u64,
        /// True if the request was sent more than once.
        repeated: bool,
    },
}

impl Control {
    /// Connects, waiting at most as long as the session's deadline.
    ///
    /// # Errors
    /// The blade cannot be reached or refuses.
    pub fn connect(session: Arc<Session>, slot: u32) -> Result<Self, ConnectError> {
        let until = session.time.now() + session.deadline;
        let mut dialer = Dialer::new(session, slot)?;
        let (channel, greeting) = dialer.connect(until).map_err(|error| dialer.explain(error))?;
        Ok(Control {
            dialer,
            channel: Some(channel),
            hello: greeting.ok,
            next_id: 1,
            out: Vec::new(),
            received: Vec::new(),
            files: Vec::new(),
            lost: None,
            unconnected: None,
            reconnects: 0,
        })
    }

    /// The blade's answer to hello.
    pub fn hello(&self) -> &HelloOk {
        &self.hello
    }

    /// Why every further request will fail, once that is so.
    pub fn loss(&self) -> Option<&ConnectError> {
        self.lost.as_ref()
    }

    /// True if the blade is not used any more, for there are copies of what it has.
    pub fn is_given_up(&self) -> bool {
        self.dialer.session.met.is_given_up()
    }

    /// How often the connection was made again; the lease may have expired in between.
    pub fn reconnects(&self) -> u64 {
        self.reconnects
    }

    /// Carries out a request.
    ///
    /// # Errors
    /// The blade refuses, or is lost; once lost it stays lost.
    pub fn call(&mut self, request: &Request<'_>) -> Result<Answer<'_>, CallError> {
        self.leave_if_given_up();
        if let Some(lost) = &self.lost {
            return Err(lost.clone().into());
        }
        let repeated = self.exchange(request).inspect_err(|lost| self.lost = Some(lost.clone()))?;
        let address = &self.dialer.session.address;
        let lost = |reason: String| ConnectError::Lost { address: address.to_string(), reason };
        let head = split_head(&self.received).map_err(|error| lost(error.to_string()))?;
        let head = head.ok_or_else(|| lost(WireError::Length.to_string()))?;
        let file = match self.files.pop() {
            None => None,
            Some(file) => Some(
                self.dialer
                    .session
                    .descriptors
                    .adopt(file)
                    .map_err(|_| ConnectError::Descriptors { address: address.to_string() })?,
            ),
        };
        match Response::decode(&head).map_err(|error| lost(error.to_string()))? {
            Response::Error { code, detail } => {
                Err(CallError::Refused { address: address.to_string(), code, detail, repeated })
            }
            response => Ok(Answer { response, file, repeated }),
        }
    }

    /// Closes the connection to a blade that was given up, so that its lease runs out.
    fn leave_if_given_up(&mut self) {
        let Session { address, met, .. } = &*self.dialer.session;
        if met.is_given_up() && self.lost.is_none() {
            let reason = "it was given up, as there are copies".to_owned();
            self.lost = Some(ConnectError::Lost { address: address.to_string(), reason });
            self.channel = None;
        }
    }

    /// Gets one verified answer into `received`. True if the request was sent more than once.
    fn exchange(&mut self, request: &Request<'_>) -> Result<bool, ConnectError> {
        let Session { time, deadline, .. } = *self.dialer.session;
        let begun = time.now();
        let until = begun + deadline;
        let (mut attempts, mut patience) = (0u32, STALL_TIME);
        loop {
            let mut channel = match self.current() {
                Some(channel) => channel,
                None => self.reconnect(begun, until)?,
            };
            attempts += 1;
            let spared = self.spared_from(begun).unwrap_or(until);
            match self.attempt(&mut channel, request, until.min(spared).min(time.now() + patience))
            {
                Ok(()) => {
                    self.dialer.session.met.heard(time.now());
                    self.channel = Some(channel);
                    return Ok(attempts > 1);
                }
                Err(end) if time.now() >= until || self.has_ended(begun) => {
                    return Err(self.gave_up(end));
                }
                Err(_) => {
                    patience = patience.saturating_mul(2).min(self.dialer.session.deadline);
                    time.pause(sys::CONNECT_PAUSE * u32::from(attempts > 1));
                }
            }
        }
    }

    /// The connection, unless there is none or its blade is not to be trusted any more. One that
    /// should be replaced is, if that can be done at once: between two requests it costs no more.
    fn current(&mut self) -> Option<Channel> {
        let now = self.dialer.session.time.now();
        let mut channel = self.channel.take()?;
        if channel.has_ended(now) || channel.is_distrusted(now) {
            return None;
        }
        if !channel.take_renewal(now) {
            return Some(channel);
        }
        match self.dialer.connect(now + STALL_TIME) {
            Ok((renewed, _)) => Some(renewed),
            Err(error) if error.is_distrust() => None,
            Err(_) => Some(channel),
        }
    }

    /// When a blade that can be spared is given up, for a request of that time; see
    /// [`crate::spare`].
    fn spared_from(&self, begun: Instant) -> Option<Instant> {
        self.dialer.session.spare.is_set().then(|| begun + SILENCE_LIMIT)
    }

    /// True if the blade is given up by now: it can be spared, or another connection found out.
    fn has_ended(&self, begun: Instant) -> bool {
        let Session { time, spare, met, .. } = &*self.dialer.session;
        let is_over = self.spared_from(begun).is_some_and(|end| time.now() >= end);
        met.is_given_up() || is_over && spare.take()
    }

    /// Makes the connection again, until then or until the lease has run out.
    fn reconnect(&mut self, begun: Instant, until: Instant) -> Result<Channel, ConnectError> {
        let session = Arc::clone(&self.dialer.session);
        let (time, met) = (session.time, &session.met);
        let since = *self.unconnected.get_or_insert_with(|| time.now());
        loop {
            // Another connection may hold the lease meanwhile.
            let end = met.lease_end(since).map_or(until, |end| end.min(until));
            let end = self.spared_from(begun).map_or(end, |spared| end.min(spared));
            let error = match self.dialer.connect(end) {
                Ok((channel, _)) => {
                    self.unconnected = None;
                    self.reconnects += 1;
                    return Ok(channel);
                }
                Err(error) => error,
            };
            let now = time.now();
            if !self.dialer.may_pass(&error) || now >= until || self.has_ended(begun) {
                return Err(self.dialer.explain(error));
            }
            if let Some(reason) = met.lapse(since, now, Some(&error)) {
                return Err(ConnectError::Lost { address: session.address.to_string(), reason });
            }
        }
    }

    fn gave_up(&self, end: Break) -> ConnectError {
        let address = self.dialer.session.address.to_string();
        ConnectError::Lost { address, reason: end.to_string() }
    }

    fn attempt(
        &mut self,
        channel: &mut Channel,
        request: &Request<'_>,
        until: Instant,
    ) -> Result<(), Break> {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.out.clear();
        self.received.clear();
        self.files.clear();
        request.encode(id, 0, &mut self.out)?;
        self.send(channel, until)?;
        while !self.is_answer(id, request)? {
            self.receive(channel, until)?;
        }
        Ok(())
    }

    fn send(&self, channel: &mut Channel, until: Instant) -> Result<(), Break> {
        let mut left = self.out.as_slice();
        loop {
            let sent = match left {
                [] if channel.flush()? => return Ok(()),
                [] => Err(Trouble::System(Errno::AGAIN)),
                left => channel.send_bytes(left),
            };
            match sent {
                Ok(bytes) => left = &left[bytes..],
                Err(Trouble::System(Errno::AGAIN)) => self.wait(channel, PollFlags::OUT, until)?,
                Err(Trouble::System(Errno::INTR)) => {}
                Err(trouble) => return Err(trouble.into()),
            }
        }
    }

    fn receive(&mut self, channel: &mut Channel, until: Instant) -> Result<(), Break> {
        let have = self.received.len();
        self.received.resize(HEAD_LIMIT_BYTES, 0);
        let room = &mut self.received[have..];
        let got = channel.receive_bytes(room, &mut self.files);
        self.received.truncate(have + got.unwrap_or(0));
        match got {
            Ok(0) => Err(Break::Closed),
            Ok(_) => Ok(()),
            Err(Trouble::System(Errno::AGAIN)) => self.wait(channel, PollFlags::IN, until),
            Err(Trouble::System(Errno::INTR)) => Ok(()),
            Err(trouble) => Err(trouble.into()),
        }
    }

    /// True if the whole answer is there; anything but the answer is a break.
    fn is_answer(&self, id: RequestId, request: &Request<'_>) -> Result<bool, Break> {
        let Some(head) = split_head(&self.received)? else {
            return Ok(false);
        };
        let header = head.header;
        if header.request_id != id || self.received.len() != header.head_bytes() {
            return Err(Break::Unasked(header.request_id));
        }
        if header.opcode != request.opcode() || header.page_count > 0 {
            return Err(WireError::Direction.into());
        }
        Response::decode(&head)?;
        Ok(true)
    }

    fn wait(&self, channel: &Channel, what: PollFlags, until: Instant) -> Result<(), Break> {
        match self.dialer.session.time.wait_until(channel.as_fd(), what, until) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Break::Broken(Errno::TIMEDOUT)),
            Err(errno) => Err(Break::Broken(errno)),
        }
    }
}
