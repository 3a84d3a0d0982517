//! Pages over a byte stream: unix socket or TCP.
//!
//! The life of a request: submitted (`Flight::submit`), launched when a credit is free, sent
//! together with others in one system call, answered in place (`Receiver`), handed out. When the
//! connection breaks, the link makes another one and resends what was not answered; reading and
//! writing whole pages may be repeated, and the connection's generation keeps the first copy from
//! taking effect late. That goes on until it works, the address is not served any more, the lease
//! has run out, for then the blade keeps nothing of this client any more, or a request is older
//! than the deadline: then the link is lost for good and every request ends with an error. After a
//! time in which the link was not driven, the deadline waits (see [`crate::attention`]).
//!
//! A connection on which nothing moves, though nothing has closed it, is not waited for until the
//! deadline: after a pause (see [`crate::stall`]) another one is made beside it, which takes over
//! once it is greeted.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_kernel::{Time, monotonic_ns};
use farpool_wire::Opcode;
use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::attention::Attention;
use crate::channel::{Channel, Trouble};
use crate::descriptor::Descriptor;
use crate::dial::{Dial, Dialer, Greeting};
use crate::flight::{Flight, REQUEST_LIMIT_PAGES};
use crate::link::{Link, LinkPage, PageDone, PageFault};
use crate::opening::DialError;
use crate::receive::{Break, Receiver};
use crate::session::{ConnectError, Session};
use crate::spare::{REFUSED_LIMIT, SILENCE_LIMIT};
use crate::stall::StallWatch;
use crate::sys::{self, Patience, Vector};

/// Parts gathered for one send before requests wait for the next one.
const SEND_LIMIT_PARTS: usize = 512;

/// Pages over a unix socket or TCP, driven by one thread.
#[derive(Debug)]
pub struct StreamLink {
    dialer: Dialer,
    time: Time,
    state: State,
    flight: Flight,
    output: Vector,
    sent_bytes: u64,
    receiver: Receiver,
    /// Times the connection broke and was made again.
    reconnects: u64,
    /// Another connection on its way, while this one is silent, or is to be replaced.
    second: Option<Dial>,
    /// The second one is there to replace the first, which answers meanwhile.
    replaces: bool,
    watch: StallWatch,
    attention: Attention,
    /// The bytes received when the session was last told of any.
    heard_bytes: u64,
    /// Since when there is no connection though one is wanted.
    unconnected: Option<Instant>,
    /// Why the last attempt to connect failed, if none has succeeded since.
    failure: Option<DialError>,
    /// Set if there are limits: readable when a request that they hold back may be sent.
    timer: Option<Timer>,
}

#[derive(Debug)]
struct Timer {
    descriptor: Descriptor,
    set_to_ns: u64,
}

#[derive(Debug)]
enum State {
    Up(Channel),
    Dialing(Dial),
    /// No attempt before this time.
    Pausing(Instant),
    Lost(String),
}

impl StreamLink {
    /// Connects, waiting at most as long as the session's deadline.
    ///
    /// `slot` distinguishes this connection from the client's others and is used by one link at a
    /// time.
    ///
    /// # Errors
    /// The blade cannot be reached or refuses.
    pub fn connect(session: Arc<Session>, slot: u32) -> Result<Self, ConnectError> {
        let until = session.time.now() + session.deadline;
        let mut link = Self::later(session, slot)?;
        let connected = link.dialer.connect(until);
        let (channel, greeting) = connected.map_err(|error| link.dialer.explain(error))?;
        link.state = State::Up(channel);
        link.greeted(&greeting);
        Ok(link)
    }

    /// A link that connects when it is first driven with something to do, without ever blocking for
    /// it. If it cannot, its requests fail.
    ///
    /// # Errors
    /// The session does not permit the address, or no descriptor is left.
    pub fn later(session: Arc<Session>, slot: u32) -> Result<Self, ConnectError> {
        let (limits, time) = (session.limits.clone(), session.time);
        let dialer = Dialer::new(session, slot)?;
        let timer = match &limits {
            None => None,
            Some(_) => Some(Timer::new(&dialer.session).map_err(|error| dialer.explain(error))?),
        };
        Ok(StreamLink {
            dialer,
            time,
            state: State::Pausing(time.now()),
            flight: Flight::new(limits, time),
            output: Vector::with_capacity(SEND_LIMIT_PARTS + REQUEST_LIMIT_PAGES + 2),
            sent_bytes: 0,
            receiver: Receiver::new(),
            reconnects: 0,
            second: None,
            replaces: false,
            watch: StallWatch::new(),
            attention: Attention::default(),
            heard_bytes: 0,
            unconnected: None,
            failure: None,
            timer,
        })
    }

    /// From now on nobody waits for its pages: the blade may serve others first.
    pub fn set_background(&mut self) {
        self.flight.is_background = true;
    }

    /// Times the connection broke and was made again.
    pub fn reconnects(&self) -> u64 {
        self.reconnects
    }

    fn greeted(&mut self, greeting: &Greeting) {
        self.dialer.met(greeting);
        let Session { deadline, met, .. } = &*self.dialer.session;
        self.watch.greeted(met.quickest_greeting(), *deadline);
        self.second = None;
        self.unconnected = None;
        self.failure = None;
        self.flight.credits = greeting.credits;
        let limit = usize::from(greeting.ok.pages_per_request_limit);
        self.flight.request_limit_pages = limit.clamp(1, REQUEST_LIMIT_PAGES);
        self.output.clear();
        self.sent_bytes = 0;
        self.receiver.reset();
        self.heard_bytes = 0;
    }

    /// Does what can be done now. With patience, waits a short while where the next step is an
    /// answer.
    fn drive(&mut self, patience: Patience) {
        if let State::Pausing(until) = self.state {
            if self.time.now() < until {
                return;
            }
            self.redial();
        }
        self.advance_dial();
        self.advance_second();
        self.renew();
        let patience = self.waited_for(patience);
        if let State::Up(channel) = &mut self.state
            && let Err(end) = exchange(
                channel,
                &mut self.flight,
                &mut self.output,
                &mut self.sent_bytes,
                &mut self.receiver,
                patience,
            )
        {
            self.broke(end);
        }
        self.set_timer();
        if let State::Lost(_) = self.state {
            self.flight.fail_all(PageFault::Lost);
        }
    }

    /// Does what a patient receive does, where the kernel cannot do it: the time is not its own.
    fn waited_for(&self, patience: Patience) -> Patience {
        if self.time.is_kernel() || patience == Patience::None {
            return patience;
        }
        if let State::Up(socket) = &self.state {
            let until = self.time.now() + sys::WAIT_STEP;
            // A failed wait only means that the next step is tried earlier.
            let _ = self.time.wait_until(socket.as_fd(), PollFlags::IN, until);
        }
        Patience::None
    }

    /// Sets the timer for callers that poll: see [`Link::descriptor`].
    fn set_timer(&mut self) {
        if let (Some(timer), Some(resumes_ns)) = (&mut self.timer, self.flight.resumes_ns())
            && timer.set_to_ns != resumes_ns
        {
            timer.set_to_ns = resumes_ns;
            // It can only fail for an impossible time; the link is then driven by its deadlines.
            let _ = sys::set_timer(timer.descriptor.as_fd(), resumes_ns);
        }
    }

    fn broke(&mut self, end: Break) {
        self.reconnects += 1;
        self.flight.ground(end.is_damage());
        self.output.clear();
        self.unconnected.get_or_insert(self.time.now());
        match self.second.take() {
            Some(dial) => self.state = State::Dialing(dial),
            None => self.redial(),
        }
        self.advance_dial();
    }

    fn redial(&mut self) {
        self.unconnected.get_or_insert(self.time.now());
        match self.dialer.dial() {
            Ok(dial) => self.state = State::Dialing(dial),
            Err(error) => self.dial_failed(error),
        }
    }

    fn advance_dial(&mut self) {
        let State::Dialing(dial) = &mut self.state else {
            return;
        };
        match dial.advance() {
            Ok(None) => {}
            Ok(Some(greeting)) => {
                let pausing = State::Pausing(self.time.now());
                if let State::Dialing(dial) = std::mem::replace(&mut self.state, pausing) {
                    self.state = State::Up(dial.into_channel());
                }
                self.greeted(&greeting);
            }
            Err(error) => self.dial_failed(error),
        }
    }

    /// Goes on with the second connection once it is greeted.
    fn advance_second(&mut self) {
        let Some(dial) = &mut self.second else { return };
        match dial.advance() {
            Ok(None) => {}
            Ok(Some(greeting)) => {
                // What the first one carried takes no effect any more.
                self.reconnects += 1;
                self.flight.ground(false);
                if let Some(dial) = self.second.take() {
                    self.state = State::Up(dial.into_channel());
                }
                self.greeted(&greeting);
            }
            // Nor may the first one go on then.
            Err(error) if error == DialError::Restarted || error.is_distrust() => {
                self.dial_failed(error);
            }
            // It says nothing about the first one, which may still answer.
            Err(_) => self.second = None,
        }
    }

    /// Tries another connection if nothing has moved on this one, or on the attempt to make it, for
    /// longer than is borne.
    fn watch_for_stall(&mut self, now: Instant) {
        let moved_bytes = match &self.state {
            State::Up(_) if self.flight.flying.is_empty() => return self.watch.rest(),
            State::Up(socket) => {
                let unacknowledged = sys::unacknowledged_bytes(socket.as_fd()).unwrap_or(0);
                self.receiver.received_bytes() + self.sent_bytes.saturating_sub(unacknowledged)
            }
            State::Dialing(_) => 0,
            State::Pausing(_) | State::Lost(_) => return,
        };
        if !self.watch.is_stalled(now, moved_bytes) {
            return;
        }
        self.watch.tried(now);
        if let State::Up(_) = self.state {
            // If there is no descriptor for it, the first one is all there is.
            self.second = self.dialer.dial().ok();
            self.replaces = false;
        } else {
            self.redial();
        }
    }

    fn dial_failed(&mut self, error: DialError) {
        self.second = None;
        self.state = if self.dialer.may_pass(&error) {
            State::Pausing(self.time.now() + error.pause())
        } else {
            State::Lost(error.to_string())
        };
        self.failure = Some(error);
    }

    /// Why the blade is lost by now, if it is. `is_fair` unless this side has not listened.
    fn end(&self, now: Instant, is_fair: bool) -> Option<(String, PageFault)> {
        let Session { deadline, met, .. } = &*self.dialer.session;
        let oldest = self.flight.oldest()?;
        let lapsed =
            self.unconnected.and_then(|since| met.lapse(since, now, self.failure.as_ref()));
        if let Some(reason) = lapsed {
            return Some((reason, PageFault::Lost));
        }
        if !is_fair || now.saturating_duration_since(oldest) < *deadline {
            return None;
        }
        let within = format!("no answer within {} ms", deadline.as_millis());
        Some(match &self.failure {
            Some(failure) => (format!("{within}, and no connection: {failure}"), PageFault::Lost),
            None => (within, PageFault::Deadline),
        })
    }

    /// Why a blade that can be spared is given up by now, if it is; see [`crate::spare`].
    fn spared(&self, now: Instant) -> Option<String> {
        let Session { spare, met, .. } = &*self.dialer.session;
        let waited = now.saturating_duration_since(self.flight.oldest()?);
        let refused = match self.failure {
            Some(DialError::Gone(_) | DialError::Forbidden(_)) if !met.may_come_back() => {
                self.unconnected
            }
            _ => None,
        };
        let refused = refused.map(|since| now.saturating_duration_since(since));
        let reason = match refused {
            // Who refuses is not silent: this says why, and is over soon.
            Some(time) if time < REFUSED_LIMIT => None,
            Some(_) => self.failure.as_ref().map(ToString::to_string),
            None if waited >= SILENCE_LIMIT => {
                Some(format!("no answer within {} ms", SILENCE_LIMIT.as_millis()))
            }
            None => None,
        };
        reason.filter(|_| spare.take()).map(|it| format!("{it}; it is spared, there are copies"))
    }

    /// Waits for answers, or until a request that the limits hold back may be sent.
    fn pause_within_limits(&self, resumes_ns: u64) {
        let left = Duration::from_nanos(resumes_ns.saturating_sub(monotonic_ns()));
        let left = left.min(sys::WAIT_STEP);
        match &self.state {
            State::Up(socket) if !self.flight.flying.is_empty() => {
                let until = self.time.now() + left;
                // A failed wait only means that the next step is tried earlier.
                let _ = self.time.wait_until(socket.as_fd(), PollFlags::IN, until);
            }
            _ => self.time.pause(left),
        }
    }

    /// Waits until the socket or the clock allows the next step.
    fn pause(&self) {
        let now = self.time.now();
        let until = now + sys::WAIT_STEP;
        // A failed wait only means that the next step is tried earlier.
        let _ = match &self.state {
            State::Up(socket) => self
                .time
                .wait_until(socket.as_fd(), PollFlags::IN | PollFlags::OUT, until)
                .map(drop),
            State::Dialing(dial) => self
                .time
                .wait_until(dial.descriptor(), PollFlags::IN, until.min(now + sys::CONNECT_PAUSE))
                .map(drop),
            State::Pausing(then) => {
                self.time.pause(then.saturating_duration_since(now));
                Ok(())
            }
            State::Lost(_) => Ok(()),
        };
    }

    /// True if bytes wait for the socket to take them.
    fn has_unsent(&self) -> bool {
        let is_sealed_left = match &self.state {
            State::Up(channel) => channel.has_unsent(),
            _ => false,
        };
        is_sealed_left || self.output.bytes() > 0
    }

    /// Has another connection take over from one whose key is worn or whose blade has to be
    /// verified again, and ends one whose blade's certificate has ended or is not trusted any more.
    fn renew(&mut self) {
        let State::Up(channel) = &mut self.state else { return };
        if !channel.is_sealed() {
            return;
        }
        let now = self.time.now();
        if channel.has_ended(now) {
            self.broke(Break::Ended);
        } else if channel.is_distrusted(now) {
            self.broke(Break::Distrusted);
        } else if self.second.is_none() && channel.take_renewal(now) {
            // If there is no descriptor for it, the first one goes on.
            self.second = self.dialer.dial().ok();
            self.replaces = true;
        }
    }

    fn lose(&mut self, reason: String, fault: PageFault) {
        self.state = State::Lost(reason);
        self.second = None;
        self.flight.fail_all(fault);
    }

    fn submit(&mut self, opcode: Opcode, pages: &[LinkPage]) {
        if !self.flight.is_busy() {
            // No connection was wanted until now.
            let now = self.time.now();
            self.unconnected = self.unconnected.map(|_| now);
            self.attention.begin(now);
            self.renew();
        }
        self.flight.submit(opcode, pages);
        if let State::Up(channel) = &mut self.state {
            let sent = send_all(channel, &mut self.flight, &mut self.output, &mut self.sent_bytes);
            if let Err(end) = sent {
                self.broke(end);
            }
            self.set_timer();
        }
        if let State::Lost(_) = self.state {
            self.flight.fail_all(PageFault::Lost);
        }
    }
}

impl Timer {
    fn new(session: &Session) -> Result<Self, DialError> {
        let descriptor = sys::timer().and_then(|timer| session.descriptors.adopt(timer));
        let descriptor = descriptor.map_err(|_| DialError::Descriptors)?;
        Ok(Timer { descriptor, set_to_ns: 0 })
    }
}

/// Receives and sends alternately as long as either moves something.
fn exchange(
    channel: &mut Channel,
    flight: &mut Flight,
    output: &mut Vector,
    sent_bytes: &mut u64,
    receiver: &mut Receiver,
    patience: Patience,
) -> Result<(), Break> {
    let mut patience = patience;
    loop {
        send_all(channel, flight, output, sent_bytes)?;
        if flight.flying.is_empty() {
            return Ok(());
        }
        if output.bytes() > 0 || channel.has_unsent() {
            patience = Patience::None; // a full socket needs us as soon as it empties
        }
        let more = receiver.receive(channel, flight, *sent_bytes, patience)?;
        patience = Patience::None;
        if !more {
            return send_all(channel, flight, output, sent_bytes);
        }
    }
}

/// Sends until nothing may be sent or the socket is full.
fn send_all(
    channel: &mut Channel,
    flight: &mut Flight,
    output: &mut Vector,
    sent_bytes: &mut u64,
) -> Result<(), Break> {
    loop {
        if output.bytes() == 0 {
            output.clear();
            flight.launch(output, SEND_LIMIT_PARTS);
        }
        if output.bytes() == 0 && !channel.has_unsent() {
            return Ok(());
        }
        // SAFETY: heads belong to flying requests, pages are lent to the link until their
        // completion.
        match unsafe { channel.send(output) } {
            Ok(bytes) => {
                output.advance(bytes);
                *sent_bytes += bytes as u64;
            }
            Err(Trouble::System(Errno::AGAIN)) => return Ok(()),
            Err(trouble) => return Err(trouble.into()),
        }
    }
}

impl Link for StreamLink {
    unsafe fn read(&mut self, pages: &[LinkPage]) {
        self.submit(Opcode::Read, pages);
    }

    unsafe fn write(&mut self, pages: &[LinkPage]) {
        self.submit(Opcode::Write, pages);
    }

    fn poll(&mut self, done: &mut Vec<PageDone>) {
        if self.flight.is_busy() {
            self.drive(Patience::None);
        }
        done.append(&mut self.flight.done);
    }

    fn wait(&mut self, done: &mut Vec<PageDone>) {
        if self.flight.is_busy() && self.flight.done.is_empty() {
            let stuck = !matches!(self.state, State::Up(_)) || self.has_unsent();
            if stuck {
                self.pause();
            }
            match self.flight.resumes_ns() {
                Some(resumes_ns) if !stuck => {
                    self.pause_within_limits(resumes_ns);
                    self.drive(Patience::None);
                }
                _ => self.drive(Patience::Step),
            }
        }
        done.append(&mut self.flight.done);
    }

    fn expire(&mut self, now: Instant, done: &mut Vec<PageDone>) {
        self.poll(done);
        if self.receiver.received_bytes() != self.heard_bytes {
            self.heard_bytes = self.receiver.received_bytes();
            self.dialer.session.met.heard(now);
            self.attention.answered();
        }
        let is_fair = self.attention.look(now);
        let end = self.end(now, is_fair);
        let spared = || Some((self.spared(now)?, PageFault::Lost));
        if let Some((reason, fault)) = end.or_else(|| spared().filter(|_| is_fair)) {
            self.lose(reason, fault);
            self.poll(done);
        } else {
            self.watch_for_stall(now);
        }
    }

    fn in_flight(&self) -> usize {
        self.flight.pages()
    }

    fn mark(&self) -> u64 {
        self.flight.submitted
    }

    fn is_finished_before(&self, mark: u64) -> bool {
        self.flight.is_finished_before(mark)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        if !self.flight.is_busy() {
            return None; // nobody drives it, and what is ready would stay so
        }
        match (&self.state, &self.timer) {
            (State::Up(_), Some(timer))
                if self.flight.flying.is_empty() && self.flight.resumes_ns().is_some() =>
            {
                Some(timer.descriptor.as_fd())
            }
            (State::Up(socket), _) => {
                let second = self.second.as_ref().filter(|_| !self.replaces);
                Some(second.map_or(socket.as_fd(), Dial::descriptor))
            }
            (State::Dialing(dial), _) => Some(dial.descriptor()),
            _ => None,
        }
    }

    fn is_sending(&self) -> bool {
        // A second connection's descriptor, which has room, would end every wait at once.
        let is_stuck = self.has_unsent() && (self.second.is_none() || self.replaces);
        matches!(self.state, State::Up(_)) && is_stuck
    }

    fn give_up(&mut self, reason: &str) {
        if !matches!(self.state, State::Lost(_)) {
            self.lose(reason.to_owned(), PageFault::Lost);
        }
    }

    fn loss(&self) -> Option<&str> {
        match &self.state {
            State::Lost(reason) => Some(reason),
            _ => None,
        }
    }
}
