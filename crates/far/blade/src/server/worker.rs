//! One serving thread: an epoll loop over its own connections. The first thread also accepts,
//! distributes new connections, and drives the blade's clock.
//!
//! Who is ready waits for a turn ([`Turns`]), the urgent before the others; after a turn of one
//! that is not urgent the worker looks who has become ready meanwhile. What a connection is up to
//! is known from what it is in the middle of, or left in its input; else it is taken for urgent
//! until its next request has been seen.
//!
//! epoll is level-triggered: a connection that has had its turn and holds more is simply reported
//! again. Measured and left out, with figures in docs/contributors/decisions.md: io_uring (one-page
//! reads over TCP 20.4 us against 18.3, 32 KiB reads +9 %; `throughput -- 8 32 1`, `lane_latency`),
//! and spinning for the next request (nothing gained while others want the processor).

use super::connection::{Close, Connection, Tools};
use super::follow::{Follow, Move};
use super::listener::Listener;
use super::shared::{Arrival, Shared};
use super::turns::Turns;
use crate::sources::Source;
use farpool_units::exactly;
use farpool_wire::Priority;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::thread::CpuSet;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often leases and silent connections are checked; they may last this much longer.
const TICK: Duration = Duration::from_millis(250);
/// Events taken from the kernel at once.
const EVENTS_LIMIT: usize = 128;
/// Connections accepted before others have their turn.
const ACCEPTS_LIMIT: usize = 64;

const TOKEN_WAKE: u64 = u64::MAX;
const TOKEN_FLASH: u64 = u64::MAX - 1;
/// Tokens from here on are listeners; lower ones are connections.
const TOKEN_LISTENER: u64 = 1 << 32;

#[derive(Debug)]
pub(super) struct Worker {
    shared: Arc<Shared>,
    thread: usize,
    epoll: OwnedFd,
    listeners: Vec<Listener>,
    connections: Vec<Option<Watched>>,
    free: Vec<usize>,
    tools: Tools,
    follow: Follow,
    /// Connections that have something to do.
    turns: Turns,
    /// Connections that are held to their rate: when each is to work again, earliest first.
    paused: BinaryHeap<Reverse<(u64, usize)>>,
    /// Connections whose next request waits for pages on flash. A number may stand for a later
    /// connection, which then merely has a turn.
    away: Vec<usize>,
    /// Where the worker may run.
    cpus: Option<CpuSet>,
    next_thread: usize,
    last_tick: Duration,
    /// Connections without a hello may be among ours.
    has_silent: bool,
    /// Closed for a moment when descriptors run out, so that a waiting peer can be turned away.
    spare: Option<OwnedFd>,
}

#[derive(Debug)]
struct Watched {
    connection: Connection,
    interest: epoll::EventFlags,
    /// When it is to wake, as in `paused`; 0 if it is not paused.
    wakes_ns: u64,
    /// It is among those that wait for a turn.
    waits: bool,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        thread: usize,
        listeners: Vec<Listener>,
    ) -> io::Result<Worker> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |fd: BorrowedFd<'_>, token: u64| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
        };
        watch(shared.mailbox(thread).wake.as_fd(), TOKEN_WAKE)?;
        let caller = shared.blade.caller(thread)?;
        if let Some(bell) = caller.bell() {
            watch(bell, TOKEN_FLASH)?;
        }
        for (token, listener) in (TOKEN_LISTENER..).zip(&listeners) {
            watch(listener.socket.as_fd(), token)?;
        }
        Ok(Worker {
            shared,
            thread,
            epoll,
            listeners,
            connections: Vec::new(),
            free: Vec::new(),
            tools: Tools::with(caller),
            follow: Follow::default(),
            turns: Turns::default(),
            paused: BinaryHeap::new(),
            away: Vec::new(),
            cpus: rustix::thread::sched_getaffinity(None).ok(),
            next_thread: 0,
            last_tick: Duration::ZERO,
            has_silent: false,
            spare: spare_descriptor(),
        })
    }

    /// Serves until the server stops.
    pub(super) fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS_LIMIT);
        while !self.shared.is_stopping() {
            let timeout = self.timeout();
            if let Err(error) = self.turn(&mut events, timeout.as_ref()) {
                tracing::error!(%error, "a blade thread cannot wait for events and ends");
                break;
            }
            self.find_place(&events);
        }
        self.close_all();
    }

    /// Does all that can be done without waiting.
    ///
    /// # Errors
    /// The kernel's, of its list of events.
    pub(super) fn step(&mut self) -> io::Result<()> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS_LIMIT);
        loop {
            self.turn(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
            if events.is_empty() && self.turns.is_empty() {
                return Ok(());
            }
        }
    }

    /// Waits for events, but no longer than `timeout`, and does what they and the time demand.
    pub(super) fn turn(
        &mut self,
        events: &mut Vec<epoll::Event>,
        timeout: Option<&Timespec>,
    ) -> io::Result<()> {
        events.clear();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match &**events {
            // Nobody to choose from, as usual.
            [only] if self.turns.is_empty() && only.data.u64() < TOKEN_LISTENER => {
                let index = exactly(only.data.u64());
                if !self.close_if_gone(index, only) {
                    self.work(index, Priority::Background);
                }
                self.wake_paused();
            }
            several => {
                for event in several {
                    self.handle(event);
                }
                self.wake_paused();
                self.give_turns();
            }
        }
        self.tick();
        Ok(())
    }

    /// Gives turns to those that wait, until one has had a turn that was not urgent; then it is
    /// time to see who has become ready.
    fn give_turns(&mut self) {
        for _ in 0..self.turns.count() {
            let Some((index, priority)) = self.turns.pop(self.shared.now_ns()) else {
                return;
            };
            let least = if self.turns.is_empty() { Priority::Background } else { priority };
            self.work(index, least);
            if least > Priority::Demand {
                return;
            }
        }
    }

    /// Has a connection wait for a turn.
    fn wait_for_turn(&mut self, index: usize) {
        if let Some(Some(watched)) = self.connections.get_mut(index)
            && !std::mem::replace(&mut watched.waits, true)
        {
            self.turns.push(index, watched.connection.priority(), self.shared.now_ns());
        }
    }

    /// Closes every connection.
    pub(super) fn close_all(&mut self) {
        for index in 0..self.connections.len() {
            self.close(index, None);
        }
    }

    /// Time until the next tick or until a paused connection may go on. The kernel rounds up to
    /// whole milliseconds; a bucket's burst covers that.
    fn timeout(&self) -> Option<Timespec> {
        if !self.turns.is_empty() {
            return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let tick_ns =
            (self.thread == 0 || self.has_silent).then_some(u64::from(TICK.subsec_nanos()));
        let paused_ns = self.paused.peek().map(|Reverse((wakes_ns, _))| {
            // No longer than the tick, which keeps the number within a second.
            let left_ns = wakes_ns.saturating_sub(self.shared.now_ns());
            left_ns.min(u64::from(TICK.subsec_nanos()))
        });
        let nanoseconds = match (tick_ns, paused_ns) {
            (Some(one), Some(other)) => one.min(other),
            (one, other) => one.or(other)?,
        };
        Some(Timespec { tv_sec: 0, tv_nsec: exactly(nanoseconds) })
    }

    /// Runs the connections whose pause is over.
    fn wake_paused(&mut self) {
        if self.paused.is_empty() {
            return;
        }
        let now_ns = self.shared.now_ns();
        while let Some(Reverse((wakes_ns, index))) = self.paused.peek().copied()
            && wakes_ns <= now_ns
        {
            self.paused.pop();
            // Another connection may have this index by now; extra work does no harm.
            if let Some(Some(watched)) = self.connections.get_mut(index) {
                watched.wakes_ns = 0;
                self.wait_for_turn(index);
            }
        }
    }

    fn find_place(&mut self, events: &[epoll::Event]) {
        let place = match events {
            [] => return,
            [only] if self.turns.is_empty() => {
                let Ok(index) = usize::try_from(only.data.u64()) else { return };
                let Some(Some(watched)) = self.connections.get_mut(index) else { return };
                if watched.connection.take_turn().is_quick() {
                    self.follow.woke_for(index, || watched.connection.incoming_cpu())
                } else {
                    self.follow.woke_for_others()
                }
            }
            _ => self.follow.woke_for_others(),
        };
        let cpus = match (place, self.cpus) {
            (Move::To(cpu), Some(allowed)) if allowed.is_set(cpu) => {
                let mut one = CpuSet::new();
                one.set(cpu);
                one
            }
            (Move::Anywhere, Some(allowed)) => allowed,
            _ => return,
        };
        // If this fails, the worker stays where it is.
        let _ = rustix::thread::sched_setaffinity(None, &cpus);
    }

    fn handle(&mut self, event: &epoll::Event) {
        match event.data.u64() {
            TOKEN_WAKE => {
                for arrival in self.shared.mailbox(self.thread).empty() {
                    self.add(arrival);
                }
                self.try_again();
            }
            TOKEN_FLASH => {
                self.tools.caller.poll();
                self.try_again();
            }
            token @ TOKEN_LISTENER.. => self.accept(exactly(token - TOKEN_LISTENER)),
            index => {
                let index = exactly(index);
                if !self.close_if_gone(index, event) {
                    self.wait_for_turn(index);
                }
            }
        }
    }

    /// Has connections that wait for pages on flash work again.
    fn try_again(&mut self) {
        for index in std::mem::take(&mut self.away) {
            self.wait_for_turn(index);
        }
    }

    /// Closes a connection that waits for flash if its peer is gone, which it would not see before
    /// flash has answered, and the kernel would report again and again. True if it was closed.
    fn close_if_gone(&mut self, index: usize, event: &epoll::Event) -> bool {
        let flags = event.flags;
        let is_gone = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR)
            && matches!(self.connections.get(index), Some(Some(it)) if it.connection.is_away());
        if is_gone {
            self.close(index, Some(Close::Gone(io::ErrorKind::ConnectionReset.into())));
        }
        is_gone
    }

    fn tick(&mut self) {
        let now = self.shared.now();
        if now.saturating_sub(self.last_tick) < TICK {
            return;
        }
        self.last_tick = now;
        self.close_silent(now);
        if self.thread == 0 {
            self.shared.blade.tick(now);
            self.shared.tell_hidden_lines(now);
        }
    }

    /// Closes the connections that have been without a hello for too long.
    fn close_silent(&mut self, now: Duration) {
        if !std::mem::take(&mut self.has_silent) {
            return;
        }
        let limit = self.shared.blade.config().hello_limit;
        for index in 0..self.connections.len() {
            let Some(Some(Watched { connection, .. })) = self.connections.get(index) else {
                continue;
            };
            match connection.greets_until(limit) {
                None => {}
                Some(until) if now < until => self.has_silent = true,
                Some(_) => {
                    let source_of = connection.source();
                    self.close(index, Some(Close::Silent { source_of, limit }));
                }
            }
        }
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..ACCEPTS_LIMIT {
            let Some(listener) = self.listeners.get(listener) else {
                return;
            };
            match listener.accept() {
                Ok(None) => return,
                Ok(Some(arrived)) => {
                    let (socket, from) = arrived;
                    self.hand_on(socket, from);
                }
                Err(error) => {
                    if self.shared.lost_log.may_write(self.shared.now()) {
                        tracing::warn!(%error, address = %listener.address, "a connection was \
                            lost");
                    }
                    self.turn_away(&error);
                    return;
                }
            }
        }
    }

    /// Turns a waiting peer away when out of descriptors, else it would be reported again and
    /// again: the spare descriptor is used to accept and close it.
    fn turn_away(&mut self, error: &io::Error) {
        let full = [Errno::MFILE, Errno::NFILE];
        if error.raw_os_error().is_some_and(|n| full.iter().any(|e| e.raw_os_error() == n)) {
            self.spare = None;
            for listener in &self.listeners {
                // Closed when dropped; an error is the one being handled.
                let _ = listener.accept();
            }
            self.spare = spare_descriptor();
        }
    }

    fn hand_on(&mut self, socket: OwnedFd, from: Source) {
        match self.shared.blade.sources.arrive(from) {
            Ok(presence) => {
                self.next_thread = (self.next_thread + 1) % self.shared.threads();
                let arrival = Arrival { socket, presence };
                self.shared.mailbox(self.next_thread).deliver(arrival);
            }
            Err(reason) => {
                if self.shared.turned_away_log.may_write(self.shared.now()) {
                    tracing::warn!(%reason, "a connection was turned away");
                }
            }
        }
    }

    fn add(&mut self, arrival: Arrival) {
        let connection = Connection::new(arrival, &self.shared);
        self.has_silent = true;
        let index = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let interest = epoll::EventFlags::IN;
        let data = epoll::EventData::new_u64(index as u64);
        let watched = epoll::add(&self.epoll, connection.socket(), data, interest);
        self.connections[index] = Some(Watched { connection, interest, wakes_ns: 0, waits: false });
        if let Err(error) = watched {
            self.close(index, Some(Close::Gone(error.into())));
        }
    }

    fn work(&mut self, index: usize, least: Priority) {
        let Some(Some(watched)) = self.connections.get_mut(index) else {
            return; // closed since it was ready
        };
        watched.waits = false;
        let worked = watched.connection.work(&self.shared, &mut self.tools, least);
        let watching = worked.and_then(|has_more| {
            watched.update(&self.epoll, index)?;
            Ok(has_more)
        });
        if watched.connection.is_away() && !self.away.contains(&index) {
            self.away.push(index);
        }
        if let Some(wakes_ns) = watched.connection.wakes_ns()
            && watched.wakes_ns != wakes_ns
        {
            watched.wakes_ns = wakes_ns;
            self.paused.push(Reverse((wakes_ns, index)));
        }
        match watching {
            Ok(true) => self.wait_for_turn(index),
            Ok(false) => {}
            Err(reason) => self.close(index, Some(reason)),
        }
    }

    fn close(&mut self, index: usize, reason: Option<Close>) {
        let Some(mut watched) = self.connections[index].take() else {
            return;
        };
        let counters = &self.shared.blade.counters;
        if let Some(error) = reason.as_ref().filter(|reason| reason.is_for_what_it_sent()) {
            counters.bad_frames.fetch_add(1, Ordering::Relaxed);
            if self.shared.bad_frames_log.may_write(self.shared.now()) {
                tracing::warn!(%error, "a connection was closed for what it sent");
            }
        } else if let Some(reason @ Close::Silent { .. }) = &reason {
            if self.shared.lost_log.may_write(self.shared.now()) {
                tracing::warn!(%reason, "a connection was closed");
            }
        } else if let Some(reason) = &reason {
            tracing::debug!(%reason, "a connection was closed");
        }
        watched.connection.close(&self.shared);
        self.free.push(index);
    }
}

impl Watched {
    /// Updates the kernel if the connection waits for something else than before.
    fn update(&mut self, epoll: &OwnedFd, index: usize) -> Result<(), Close> {
        let mut interest = epoll::EventFlags::empty();
        interest.set(epoll::EventFlags::IN, self.connection.wants_to_receive());
        interest.set(epoll::EventFlags::OUT, self.connection.wants_to_send());
        if interest != self.interest {
            let data = epoll::EventData::new_u64(index as u64);
            epoll::modify(epoll, self.connection.socket(), data, interest)
                .map_err(io::Error::from)?;
            self.interest = interest;
        }
        Ok(())
    }
}

fn spare_descriptor() -> Option<OwnedFd> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty()).ok()
}
