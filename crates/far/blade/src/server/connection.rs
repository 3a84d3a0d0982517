//! One connection: receives bytes, carries out requests, sends answers. Never blocks.
//!
//! The life of a read: 1 its head is split off the input; 2 the table says where the pages are; 3
//! their checksum is computed; 4 head and pages' slices go to the output; 5 one sendmsg sends many
//! answers, pages straight from the segments' memory. The life of a write: 1 head; 2 table, which
//! also holds off freezing and freeing; 3 the bytes behind the head are copied, all others received
//! straight into place; 4 checksum verified; 5 answered. A write that breaks off leaves its pages
//! undefined, and the client, unanswered, still has them.
//!
//! Invariants:
//! - All complete requests in the input are carried out before the connection waits for more,
//!   unless the output is full; then it goes on when the output has drained. (Or see the last.)
//! - Over TCP with certificates nothing is read as a frame before the peer is known ([`Way`]).
//! - A fenced connection carries nothing out: [`Gate`] is held while a connection works.
//! - A request that its grant's rate holds back stays in the input, and nothing is received behind
//!   it. So does one whose pages are on flash, until they are in memory.
//! - Its requests are carried out in the order in which they came. It stops before one that is less
//!   urgent than what the worker wants done now, and when it has had its share of a turn; then
//!   [`Connection::work`] says so, since no event would report again what is in the input.

mod pages;

use super::arriving::Arriving;
use super::input::{Input, Received};
use super::output::Output;
use super::pace::Pace;
use super::requests::{self, Greeting, Scratch, Session};
use super::shared::{Arrival, Shared};
use super::toll::{self, Payers};
use super::turns::Turn;
use super::way::{self, Opened, Way};
use crate::audit::Asker;
use crate::gate::{Gate, Ticket};
use crate::memory::{Caller, Keep};
use crate::sources::{Presence, Source};
use crate::sys::{Iovecs, Slice};
use crate::table::{Origin, Refused};
use farpool_kernel::lock;
use farpool_wire::{
    ErrorCode, Header, Hello, Opcode, Priority, Purpose, Request, RequestId, Response, WireError,
    split_head,
};
use pages::Carried;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use thiserror::Error;

/// Receive calls in one go before other connections have their turn.
const ROUNDS: usize = 16;

/// Why a connection is to be closed.
#[derive(Debug, Error)]
pub(super) enum Close {
    /// The peer closed it or is gone.
    #[error("the peer is gone ({0})")]
    Gone(#[from] io::Error),
    /// The peer sent something other than a frame.
    #[error(transparent)]
    Bad(#[from] WireError),
    /// It has not said whose it is.
    #[error("{source_of} sent no hello on it within {} s", .limit.as_secs_f64())]
    Silent { source_of: Source, limit: Duration },
    /// It said goodbye, or a newer connection took its place.
    #[error("the connection was ended")]
    Ended,
}

impl Close {
    /// True if the peer has sent what it never should.
    pub(super) fn is_for_what_it_sent(&self) -> bool {
        match self {
            Close::Bad(_) => true,
            // A record that does not fit.
            Close::Gone(error) => error.kind() == io::ErrorKind::InvalidData,
            Close::Silent { .. } | Close::Ended => false,
        }
    }
}

/// What each thread has once, for all its connections.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) caller: Caller,
    pub(super) iovecs: Iovecs,
    scratch: Scratch,
    slices: Vec<Slice>,
    keeps: Vec<Keep>,
}

impl Tools {
    pub(super) fn with(caller: Caller) -> Tools {
        Tools {
            caller,
            iovecs: Iovecs::default(),
            scratch: Scratch::default(),
            slices: Vec::new(),
            keeps: Vec::new(),
        }
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    input: Input,
    talk: Talk,
}

/// A connection without its input, from which requests borrow.
#[derive(Debug)]
struct Talk {
    gate: Arc<Gate>,
    presence: Presence,
    /// When it arrived.
    arrived: Duration,
    session: Session,
    /// Slot and generation of its hello.
    slot: Option<(u32, u32)>,
    /// Its key among the connections under its grant.
    ticket: Option<Ticket>,
    pace: Pace,
    way: Way,
    output: Output,
    arriving: Arriving,
    /// Close once everything has been sent.
    is_ending: bool,
    turn: Turn,
    /// How urgent its last request was.
    last: Priority,
    /// How urgent the next one is, which is in the input and was left there.
    next: Option<Priority>,
    /// The next one waits for flash; it has passed all rates.
    is_away: bool,
}

impl Connection {
    pub(super) fn new(arrival: Arrival, shared: &Shared) -> Self {
        let Arrival { socket, presence } = arrival;
        let way = Way::new(shared.certified.as_ref(), presence.source().is_unix());
        let talk = Talk {
            gate: Arc::new(Gate::new(socket)),
            presence,
            arrived: shared.now(),
            session: Session::Fresh,
            slot: None,
            ticket: None,
            pace: Pace::default(),
            way,
            output: Output::default(),
            arriving: Arriving::default(),
            is_ending: false,
            turn: Turn::default(),
            last: Priority::Demand,
            next: None,
            is_away: false,
        };
        Connection { input: Input::new(), talk }
    }

    /// The CPU where the kernel received the last packet; a unix socket has none.
    pub(super) fn incoming_cpu(&self) -> Option<usize> {
        let cpu = rustix::net::sockopt::socket_incoming_cpu(self.socket()).ok()?;
        usize::try_from(cpu).ok().filter(|cpu| *cpu < rustix::thread::CpuSet::MAX_CPU)
    }

    /// How urgent what it has to do is, as far as that is known.
    pub(super) fn priority(&self) -> Priority {
        let is_amid = self.talk.arriving.missing_bytes > 0 || !self.talk.output.is_empty();
        let known = self.talk.next.or(is_amid.then_some(self.talk.last));
        known.unwrap_or(Priority::Demand)
    }

    /// What was requested in its last turn.
    pub(super) fn take_turn(&mut self) -> Turn {
        std::mem::take(&mut self.talk.turn)
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.talk.gate.socket.as_fd()
    }

    /// True if it waits for the socket to accept bytes again.
    pub(super) fn wants_to_send(&self) -> bool {
        !self.talk.output.is_empty() || self.talk.way.wants_to_send()
    }

    /// True if it takes further requests.
    pub(super) fn wants_to_receive(&self) -> bool {
        let waits = self.talk.is_away || self.wakes_ns().is_some();
        !self.talk.output.is_full() && !self.talk.is_ending && !waits
    }

    /// True if its next request waits for pages on flash; then it is to work once its thread is
    /// woken for that.
    pub(super) fn is_away(&self) -> bool {
        self.talk.is_away
    }

    /// When it is closed unless it has greeted by then; `None` once it has.
    pub(super) fn greets_until(&self, limit: Duration) -> Option<Duration> {
        self.talk.presence.is_silent().then(|| self.talk.arrived.saturating_add(limit))
    }

    /// Where it comes from.
    pub(super) fn source(&self) -> Source {
        self.talk.presence.source()
    }

    /// When it is to work again, if it is held to its rate now.
    pub(super) fn wakes_ns(&self) -> Option<u64> {
        self.talk.pace.wakes_ns()
    }

    /// Does what can be done in one turn without waiting, up to the first request that is less
    /// urgent than `least`. To be called on any readiness of the socket. True if it has more to do.
    pub(super) fn work(
        &mut self,
        shared: &Shared,
        tools: &mut Tools,
        least: Priority,
    ) -> Result<bool, Close> {
        let gate = Arc::clone(&self.talk.gate);
        let is_fenced = lock(&gate.is_fenced);
        if *is_fenced {
            return Err(Close::Ended);
        }
        if !self.talk.open_way(shared, tools)? {
            return Ok(false);
        }
        self.talk.turn = Turn::default();
        self.talk.next = None;
        let result = self.work_inside(shared, tools, least);
        if let Err(Close::Bad(error)) = &result {
            self.talk.answer_bad(*error, tools);
        }
        result.map(|()| self.talk.next.is_some())
    }

    fn work_inside(
        &mut self,
        shared: &Shared,
        tools: &mut Tools,
        least: Priority,
    ) -> Result<(), Close> {
        self.drain(shared, tools, least)?;
        for round in 0.. {
            if !self.wants_to_receive() || self.talk.next.is_some() {
                break;
            }
            let may_read_socket = round < ROUNDS;
            let Some(received) = self.receive(tools, may_read_socket)? else {
                break;
            };
            self.talk.arriving.received(received.direct_bytes);
            self.drain(shared, tools, least)?;
            if !received.was_full {
                break;
            }
        }
        let is_over = self.talk.is_ending && !self.wants_to_send();
        if is_over { Err(Close::Ended) } else { Ok(()) }
    }

    /// Receives what there is. Of a sealed connection, what was received before is taken even if
    /// the socket may not be read: no event would report it again.
    fn receive(
        &mut self,
        tools: &mut Tools,
        may_read_socket: bool,
    ) -> Result<Option<Received>, Close> {
        let Talk { way, gate, arriving, .. } = &mut self.talk;
        let (socket, missing) = (gate.socket.as_fd(), arriving.missing_slices());
        Ok(match way {
            Way::Sealed(sealed) => {
                let incoming = &mut sealed.incoming;
                self.input.receive_sealed(socket, missing, incoming, may_read_socket)?
            }
            _ if !may_read_socket => None,
            _ => self.input.receive(socket, missing, &mut tools.iovecs)?,
        })
    }

    /// Carries out all input and sends what the socket takes, unless that leaves the output full.
    fn drain(&mut self, shared: &Shared, tools: &mut Tools, least: Priority) -> Result<(), Close> {
        loop {
            let is_understood = self.understand(shared, tools, least)?;
            self.talk.flush(tools)?;
            if is_understood || self.talk.output.is_full() {
                return Ok(());
            }
        }
    }

    /// Carries out requests. True if more input is needed or the next one is left for another turn,
    /// false if the output is full.
    fn understand(
        &mut self,
        shared: &Shared,
        tools: &mut Tools,
        least: Priority,
    ) -> Result<bool, Close> {
        loop {
            let taken = self.talk.arriving.fill_from(self.input.bytes());
            self.input.take(taken);
            if self.talk.arriving.missing_bytes > 0 || self.talk.is_ending {
                return Ok(true);
            }
            self.talk.end_write(shared)?;
            if self.talk.pace.is_pausing(|| shared.now_ns()) {
                return Ok(true);
            }
            if self.talk.output.is_full() {
                return Ok(false);
            }
            let Some(head) = split_head(self.input.bytes())? else {
                return Ok(true);
            };
            let header = head.header;
            if header.priority() > least || self.talk.turn.is_over() {
                self.talk.next = Some(header.priority());
                return Ok(true);
            }
            let request = Request::decode(&head)?;
            if !self.talk.is_away && !self.talk.may_pass(&request, shared) {
                return Ok(true);
            }
            self.talk.is_away =
                self.talk.carry_out(header, &request, shared, tools) == Carried::NotYet;
            if self.talk.is_away {
                let ahead = self.input.bytes().get(header.head_bytes()..).unwrap_or_default();
                self.talk.look_ahead(ahead, shared, tools);
                return Ok(true);
            }
            self.talk.turn.requests += 1;
            self.talk.last = header.priority();
            self.input.expect_pages(self.talk.arriving.write.is_some());
            self.input.take(header.head_bytes());
        }
    }

    /// To be called once, before it is dropped.
    pub(super) fn close(&mut self, shared: &Shared) {
        self.talk.arriving = Arriving::default();
        let payers = payers(&self.talk.session, &self.talk.presence, shared);
        self.talk.pace.give_back(&payers, &shared.control_rates);
        if let Some(ticket) = self.talk.ticket.take() {
            shared.blade.leave_grant(ticket);
        }
        if let Some(client) = self.talk.session.number() {
            if let Some((slot, generation)) = self.talk.slot {
                shared.leave_slot(client, slot, generation);
            }
            shared.blade.disconnect(client, shared.now());
        }
    }
}

impl Talk {
    fn is_unix(&self) -> bool {
        self.presence.source().is_unix()
    }

    /// True if the rates of the connection's grant, if any, of control requests and of the blade
    /// let the request pass now.
    fn may_pass(&mut self, request: &Request<'_>, shared: &Shared) -> bool {
        if let Some(units) = toll::units_of(request) {
            let payers = payers(&self.session, &self.presence, shared);
            return self.pace.may_ask(units, &payers, &shared.control_rates, || shared.now_ns());
        }
        let donor_protection = (!self.is_unix()).then_some(&shared.blade.donor_protection);
        let traffic = self.session.traffic();
        self.pace.may_pass(request, traffic, donor_protection, || shared.now_ns())
    }

    fn flush(&mut self, tools: &mut Tools) -> io::Result<()> {
        let socket = self.gate.socket.as_fd();
        match &mut self.way {
            Way::Sealed(sealed) => self.output.flush_sealed(socket, &mut sealed.outgoing),
            _ => self.output.flush(socket, &mut tools.iovecs),
        }
    }

    /// Goes on with the handshake, if there is one. True if frames may be read.
    fn open_way(&mut self, shared: &Shared, tools: &mut Tools) -> Result<bool, Close> {
        if matches!(self.way, Way::Refused) {
            let is_there = way::hear_out(self.gate.socket.as_fd());
            return if is_there { Ok(false) } else { Err(Close::Ended) };
        }
        let source_of = self.presence.source();
        match self.way.open(shared.certified.as_ref(), &self.gate)? {
            Opened::Ready => return Ok(true),
            Opened::Waits => return Ok(false),
            Opened::Clear => {
                self.answer_at_last(ErrorCode::CertificateNeeded, 0, tools);
                shared.say_refused(source_of, "it does not speak TLS; give it --pki DIR");
            }
            Opened::Refused(why) => shared.say_refused(source_of, &why),
        }
        way::end_words(self.gate.socket.as_fd());
        Ok(false)
    }

    /// Carries out one request and answers it; a write is answered once its pages have arrived.
    fn carry_out(
        &mut self,
        header: Header,
        request: &Request<'_>,
        shared: &Shared,
        tools: &mut Tools,
    ) -> Carried {
        let outcome = match *request {
            Request::Read { segment, extents } => {
                self.read(header, segment, extents, shared, tools)
            }
            Request::Write { segment, extents } => {
                self.begin_write(header, segment, extents, shared, tools)
            }
            Request::Hello(hello) => self.greet(header, &hello, shared).map(|()| Carried::Out),
            Request::ShmMap { .. } if !self.is_unix() => {
                Err(Refused::new(ErrorCode::Unsupported, 0))
            }
            _ => self.control(header, request, shared, tools).map(|()| Carried::Out),
        };
        if outcome == Ok(Carried::NotYet) {
            return Carried::NotYet;
        }
        let counters = &shared.blade.counters;
        counters.requests.fetch_add(1, Ordering::Relaxed);
        if let Err(refused) = outcome {
            counters.requests_refused.fetch_add(1, Ordering::Relaxed);
            let response = Response::Error { code: refused.code, detail: refused.detail };
            let _always_fits = self.answer(header, &response, shared);
        }
        Carried::Out
    }

    fn answer(
        &mut self,
        header: Header,
        response: &Response<'_>,
        shared: &Shared,
    ) -> Result<(), Refused> {
        answer(&mut self.output, header, response, shared)
    }

    /// Makes this the client's connection, after ending older ones of its slot.
    fn greet(&mut self, header: Header, hello: &Hello<'_>, shared: &Shared) -> Result<(), Refused> {
        let greeted = self.try_greet(header, hello, shared);
        // Of a client's connections the first one tells; monitors change nothing.
        let is_first = hello.purpose == Purpose::Client && hello.slot == 0;
        if greeted.is_err() || is_first {
            self.note(&greeted, shared, || {
                format!("hello of {:?} {:?}", hello.purpose, hello.name)
            });
        }
        greeted
    }

    /// Notes in the audit log what was done, or why it was refused.
    fn note(&self, done: &Result<(), Refused>, shared: &Shared, what: impl FnOnce() -> String) {
        let refused = done.as_ref().err().map(|refused| refused.code);
        shared.blade.audit.note(refused, || {
            let reason = refused.map_or_else(String::new, |code| format!(": {code}"));
            (self.asker(), what() + &reason)
        });
    }

    /// Who is at the other end, for the audit log.
    fn asker(&self) -> Asker {
        let source = self.presence.source();
        let who = match self.way.origin(source.origin()) {
            Origin::Certified { identity, .. } => identity.to_string(),
            Origin::User(user) => format!("user {user}"),
            Origin::Loopback => "somebody of this host".into(),
            Origin::Network => "somebody of another host".into(),
        };
        Asker { who, from: Some(source.to_string()) }
    }

    fn try_greet(
        &mut self,
        header: Header,
        hello: &Hello<'_>,
        shared: &Shared,
    ) -> Result<(), Refused> {
        if !matches!(self.session, Session::Fresh) {
            return Err(Refused::new(ErrorCode::HelloExpected, 0));
        }
        self.is_ending = true; // unless all goes well
        if hello.purpose != Purpose::Monitor && !self.way.may_borrow() {
            return Err(Refused::new(ErrorCode::RoleNotPermitted, 0));
        }
        let origin = self.way.origin(self.presence.source().origin());
        let Greeting { session, ok } = requests::greet(&shared.blade, hello, origin)?;
        if let Ok((client, _)) = session.client() {
            let taken = shared.take_slot(client, hello.slot, hello.generation, &self.gate);
            if let Err(refused) = taken {
                shared.blade.disconnect(client, shared.now());
                return Err(refused);
            }
            self.slot = Some((hello.slot, hello.generation));
        }
        if let Some(pass) = session.grant() {
            match shared.blade.enter_grant(pass, &self.gate) {
                Ok(ticket) => self.ticket = Some(ticket),
                Err(refused) => {
                    self.session = session; // closing it undoes the rest
                    return Err(refused);
                }
            }
        }
        self.is_ending = false;
        self.session = session;
        self.presence.greeted();
        self.answer(header, &Response::HelloOk(ok), shared)
    }

    fn control(
        &mut self,
        header: Header,
        request: &Request<'_>,
        shared: &Shared,
        tools: &mut Tools,
    ) -> Result<(), Refused> {
        let done = self.try_control(header, request, shared, tools);
        match *request {
            Request::Attach { .. } => {
                self.note(&done, shared, || "attach memory of another client".into());
            }
            Request::AllocateSuperpages { count, .. } if done.is_err() => {
                self.note(&done, shared, || format!("allocate {count} x 16 MiB"));
            }
            _ => {}
        }
        done
    }

    fn try_control(
        &mut self,
        header: Header,
        request: &Request<'_>,
        shared: &Shared,
        tools: &mut Tools,
    ) -> Result<(), Refused> {
        self.is_ending = matches!(request, Request::Goodbye);
        let Talk { session, output, .. } = self;
        let (blade, scratch, now) = (&shared.blade, &mut tools.scratch, shared.now());
        requests::control(blade, session, request, scratch, now, |response, descriptor| {
            answer(output, header, response, shared)?;
            if let Some(descriptor) = descriptor {
                output.attach_descriptor(descriptor);
            }
            Ok(())
        })?
    }

    /// Sends a last answer to a peer whose bytes could not be parsed, if the socket takes it at
    /// once.
    fn answer_bad(&mut self, error: WireError, tools: &mut Tools) {
        let (code, detail) = match error {
            WireError::Version { .. } => {
                (ErrorCode::VersionMismatch, u64::from(farpool_wire::PROTOCOL_VERSION))
            }
            _ => (ErrorCode::BadFrame, 0),
        };
        self.answer_at_last(code, detail, tools);
    }

    /// Sends a last refusal to a peer, if the socket takes it at once.
    fn answer_at_last(&mut self, code: ErrorCode, detail: u64, tools: &mut Tools) {
        let response = Response::Error { code, detail };
        let encode = |out: &mut Vec<u8>| response.encode(Opcode::Hello, RequestId(0), 0, 0, out);
        if self.output.push_head(encode).is_ok() {
            let _best_effort = self.flush(tools);
        }
    }
}

/// Who pays for control requests. Until a hello is carried out, it is those that come from the same
/// place: what it says of a grant may not be true.
fn payers<'a>(session: &'a Session, presence: &'a Presence, shared: &'a Shared) -> Payers<'a> {
    let traffic = session.traffic();
    Payers {
        client: session.counters().map(|counters| &counters.control),
        group: traffic.map_or(presence.control(), |traffic| &traffic.control),
        throttled_ns: [
            traffic.map(|traffic| &traffic.control_throttled_ns),
            Some(&shared.blade.counters.control_throttled_ns),
        ],
    }
}

fn answer(
    output: &mut Output,
    header: Header,
    response: &Response<'_>,
    shared: &Shared,
) -> Result<(), Refused> {
    let credits = shared.blade.config().credits;
    output
        .push_head(|out| response.encode(header.opcode, header.request_id, credits, 0, out))
        .map_err(|_| Refused::new(ErrorCode::TooLarge, 0))
}
