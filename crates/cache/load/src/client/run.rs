//! The loops: closed (a new batch when the last is answered: the most requests per second) and open
//! (requests are sent by a schedule, whatever the server does: what users of a service experience).
//!
//! In the open loop a latency begins at the request's scheduled time. So a server that stalls is
//! charged for everything that had to wait meanwhile, and a client that is late reports it.

use std::time::{Duration, Instant};

use farpool_kernel::{pin_thread, thread_cpu_time};
use farpool_policy::Rng;
use farpool_units::at_most;
use rustix::event::{Timespec, epoll};

use super::asked::{LoadError, Server};
use super::link::Link;
use super::measured::Measured;
use super::reply::Reader;
use super::request::{Protocol, Writer};
use crate::workload::{Generator, KeyNumber, Operation, Workload, mix};

/// The most draws to find a key of a connection's shard; with few keys there may be none.
const DRAWS_MAX: u32 = 1000;
/// A run is given up if the server sends nothing for this long while requests are under way.
const SILENCE: Duration = Duration::from_secs(10);
/// The most events taken at a time.
const EVENTS_MAX: usize = 256;
/// When a request is due within this time the thread does not sleep any more: waking up takes
/// longer.
const SPIN: Duration = Duration::from_micros(200);
/// Requests of one fill batch.
const FILL_BATCH: u64 = 100;

/// The distribution of the gaps between requests in the open loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gaps {
    Exponential,
    Constant,
}

/// How requests are paced.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// `depth` requests in a batch, and a new batch when all are answered.
    Closed { depth: usize },
    /// `rate` requests per second over all threads.
    Open { rate: f64, gaps: Gaps },
}

/// The parameters of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub server: Server,
    pub workload: Workload,
    pub protocol: Protocol,
    pub pace: Pace,
    /// Over all threads.
    pub connections: usize,
    pub threads: usize,
    /// Processor of the first thread; further threads use the next ones.
    pub processor: Option<usize>,
    pub warm_up: Duration,
    pub duration: Duration,
    pub seed: u64,
    /// Bytes of an echo server's reply.
    pub echo_bytes: usize,
}

/// One thread of a run.
struct Runner<'a> {
    plan: &'a Plan,
    writer: Writer<'a>,
    reader: Reader<'a>,
    links: Vec<Link>,
    epoll: std::os::fd::OwnedFd,
    events: Vec<epoll::Event>,
    generator: Generator,
    start: Instant,
    last_heard: Instant,
    measured: Measured,
    /// Processor time of the thread when counting began.
    cpu_from: Duration,
    keys: Vec<KeyNumber>,
}

/// Runs a plan: warms up, measures, and adds up the threads.
pub fn run(plan: &Plan) -> Result<Measured, LoadError> {
    in_threads(plan, |runner, share| match plan.pace {
        Pace::Closed { depth } => runner.closed(depth),
        Pace::Open { rate, gaps } => runner.open(rate * share, gaps),
    })
}

/// Stores every key of the workload once.
pub fn fill(plan: &Plan) -> Result<Measured, LoadError> {
    let plan = Plan { threads: 1, ..plan.clone() };
    in_threads(&plan, |runner, _| runner.fill())
}

fn in_threads(
    plan: &Plan,
    work: impl Fn(&mut Runner<'_>, f64) -> Result<(), LoadError> + Sync,
) -> Result<Measured, LoadError> {
    let threads = plan.threads.clamp(1, plan.connections.max(1));
    let run_one = |number: usize| {
        if let Some(first) = plan.processor {
            pin_thread((first + number) % rustix::thread::CpuSet::MAX_CPU)?;
        }
        let connections = (plan.connections + threads - 1 - number) / threads;
        let mut runner = Runner::new(plan, connections.max(1), (number as u64, threads as u64))?;
        #[expect(clippy::cast_precision_loss, reason = "few threads")]
        let share = 1.0 / threads as f64;
        work(&mut runner, share)?;
        Ok(runner.measured)
    };
    std::thread::scope(|scope| {
        let handles = (0..threads)
            .map(|number| {
                let run_one = &run_one;
                let builder = std::thread::Builder::new().name("load".into());
                builder.spawn_scoped(scope, move || run_one(number)).map_err(LoadError::Thread)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut all = Measured::default();
        for handle in handles {
            let measured: Result<Measured, LoadError> =
                handle.join().map_err(|_| LoadError::Panicked)?;
            all.merge(&measured?);
        }
        Ok(all)
    })
}

impl<'a> Runner<'a> {
    fn new(
        plan: &'a Plan,
        connections: usize,
        (number, threads): (u64, u64),
    ) -> Result<Self, LoadError> {
        let Plan { workload, protocol, echo_bytes, .. } = plan;
        let links = (0..connections)
            .map(|at| Link::connect(&plan.server, *protocol, at))
            .collect::<Result<Vec<_>, _>>()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (at, link) in links.iter().enumerate() {
            let data = epoll::EventData::new_u64(at as u64);
            epoll::add(&epoll, link.as_fd(), data, epoll::EventFlags::IN)?;
        }
        let now = Instant::now();
        Ok(Self {
            plan,
            writer: Writer { workload, protocol: *protocol },
            reader: Reader { workload, protocol: *protocol, echo_bytes: *echo_bytes },
            links,
            epoll,
            events: Vec::with_capacity(EVENTS_MAX),
            generator: Generator::new(workload, plan.seed, (number, threads)),
            start: now,
            last_heard: now,
            measured: Measured::default(),
            cpu_from: thread_cpu_time(),
            keys: Vec::new(),
        })
    }

    fn now_ns(&self) -> u64 {
        at_most(self.start.elapsed().as_nanos())
    }

    /// Waits for replies, for at most `limit`.
    fn wait(&mut self, limit: Duration) -> Result<(), LoadError> {
        self.events.clear();
        let limit = Timespec::try_from(limit).ok();
        let room = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, room, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if !self.events.is_empty() {
            self.last_heard = Instant::now();
        } else if self.last_heard.elapsed() > SILENCE && self.links.iter().any(|it| !it.is_idle()) {
            return Err(LoadError::Silent(SILENCE));
        }
        Ok(())
    }

    fn ready(&self) -> Vec<usize> {
        let numbers = self.events.iter().map(|event| event.data.u64());
        numbers.filter_map(|number| usize::try_from(number).ok()).collect()
    }

    /// Sends output on a link, and has epoll wait for room if some is left.
    fn flush(&mut self, number: usize) -> Result<(), LoadError> {
        let link = &mut self.links[number];
        link.flush()?;
        let waits = link.has_unsent();
        if waits != std::mem::replace(&mut link.waits_for_room, waits) {
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, waits);
            let data = epoll::EventData::new_u64(number as u64);
            epoll::modify(&self.epoll, link.as_fd(), data, flags)?;
        }
        Ok(())
    }

    /// Sends the workload's next request on a link.
    fn ask(&mut self, number: usize, begin_ns: u64) {
        let mut draw = self.generator.draw();
        self.keys.clear();
        let workload = &self.plan.workload;
        if draw.operation != Operation::Get || workload.multi_get == 1 {
            let link = &mut self.links[number];
            let mut draws = 1;
            while !link.owns(workload, draw.key) && draws < DRAWS_MAX {
                draw.key = self.generator.key();
                draws += 1;
            }
        }
        self.keys.push(draw.key);
        if draw.operation == Operation::Get {
            for _ in 1..self.plan.workload.multi_get {
                self.keys.push(self.generator.key());
            }
        }
        self.links[number].ask(&self.writer, draw.operation, &self.keys, begin_ns);
    }

    /// Requests stores of the keys missed on a link. Returns how many.
    fn store_missed(&mut self, number: usize, begin_ns: u64) -> u64 {
        let keys = std::mem::take(&mut self.links[number].to_store);
        for key in &keys {
            self.links[number].ask(&self.writer, Operation::Set, &[*key], begin_ns);
        }
        keys.len() as u64
    }

    /// Takes replies on a link. In the open loop every reply has its own latency.
    fn receive(&mut self, number: usize, each_counts: bool) -> Result<(), LoadError> {
        let start = self.start;
        let look_aside = self.plan.workload.look_aside;
        let mut now_ns = None;
        let mut missed = std::mem::take(&mut self.links[number].to_store);
        let measured = &mut self.measured;
        let received = self.links[number].receive(&self.reader, |asked, said, keys| {
            measured.take(said, keys.len());
            if look_aside && said.missed != 0 {
                let positions = (0..keys.len().min(64)).filter(|at| said.missed & (1 << at) != 0);
                missed.extend(positions.map(|at| keys[at]));
            }
            if each_counts {
                let now_ns = *now_ns.get_or_insert_with(|| elapsed_ns(start));
                measured.latencies.record_ns(now_ns.saturating_sub(asked.begin_ns), 1);
            }
        });
        self.links[number].to_store = missed;
        received?;
        // Sends requests that waited for credits.
        self.flush(number)
    }

    /// Resets the figures after the warm-up.
    fn begin_to_count(&mut self) {
        self.measured = Measured::default();
        self.cpu_from = thread_cpu_time();
        for link in &mut self.links {
            (link.bytes_sent, link.bytes_received) = (0, 0);
        }
    }

    fn end(&mut self, counted_from: Instant) {
        self.measured.elapsed = counted_from.elapsed();
        self.measured.cpu = thread_cpu_time().saturating_sub(self.cpu_from);
        for link in &self.links {
            self.measured.bytes_sent += link.bytes_sent;
            self.measured.bytes_received += link.bytes_received;
            self.measured.unanswered += link.under_way() as u64;
        }
    }

    fn closed(&mut self, depth: usize) -> Result<(), LoadError> {
        for number in 0..self.links.len() {
            self.batch(number, depth)?;
        }
        let mut counted_from = self.start;
        let mut counts = self.plan.warm_up.is_zero();
        loop {
            self.wait(SILENCE)?;
            for number in self.ready() {
                self.flush(number)?;
                self.receive(number, false)?;
                if self.links[number].is_idle() {
                    let now_ns = self.now_ns();
                    let latency_ns = now_ns.saturating_sub(self.links[number].batch_begin_ns);
                    self.measured.latencies.record_ns(latency_ns, 1);
                    self.batch(number, depth)?;
                }
            }
            if !counts && self.start.elapsed() >= self.plan.warm_up {
                counts = true;
                counted_from = Instant::now();
                self.begin_to_count();
            }
            if counts && counted_from.elapsed() >= self.plan.duration {
                self.end(counted_from);
                return Ok(());
            }
        }
    }

    fn batch(&mut self, number: usize, depth: usize) -> Result<(), LoadError> {
        let now_ns = self.now_ns();
        self.links[number].batch_begin_ns = now_ns;
        self.measured.stored_after_miss += self.store_missed(number, now_ns);
        for _ in 0..depth {
            self.ask(number, now_ns);
        }
        self.flush(number)
    }

    fn open(&mut self, rate: f64, gaps: Gaps) -> Result<(), LoadError> {
        let mut gap_rng = Rng::new(mix(self.plan.seed, 99));
        let mut gap_ns = || match gaps {
            Gaps::Constant => 1e9 / rate,
            Gaps::Exponential => {
                -(1.0 - crate::workload::unit(gap_rng.next_u64())).ln() * 1e9 / rate
            }
        };
        let mut due_ns = gap_ns();
        let mut next_link = 0;
        let mut counted_from = self.start;
        let mut counts = self.plan.warm_up.is_zero();
        let end = self.plan.warm_up + self.plan.duration;
        loop {
            let now_ns = self.now_ns();
            let (first_link, mut asked) = (next_link, 0);
            #[expect(clippy::cast_precision_loss, reason = "a run is shorter than 2^53 ns")]
            while due_ns <= now_ns as f64 {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "moments of the run"
                )]
                let begin_ns = due_ns as u64;
                self.measured.late.record_ns(now_ns - begin_ns, 1);
                self.measured.stored_after_miss += self.store_missed(next_link, begin_ns);
                self.ask(next_link, begin_ns);
                asked += 1;
                next_link = (next_link + 1) % self.links.len();
                due_ns += gap_ns();
            }
            // Requests due on one connection are sent in one write: a client that is late should
            // not fall further behind through its own system calls.
            for number in 0..asked.min(self.links.len()) {
                self.flush((first_link + number) % self.links.len())?;
            }
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "moments of the run"
            )]
            let pause = Duration::from_nanos((due_ns - now_ns as f64) as u64);
            let sleep = if pause > SPIN { pause - SPIN } else { Duration::ZERO };
            self.wait(sleep.min(Duration::from_millis(100)))?;
            for number in self.ready() {
                self.flush(number)?;
                self.receive(number, true)?;
            }
            let elapsed = self.start.elapsed();
            if !counts && elapsed >= self.plan.warm_up {
                counts = true;
                counted_from = Instant::now();
                self.begin_to_count();
            }
            if elapsed >= end {
                self.end(counted_from);
                return Ok(());
            }
        }
    }

    fn fill(&mut self) -> Result<(), LoadError> {
        let keys = self.plan.workload.keys;
        let mut next = 0;
        let begin = Instant::now();
        let mut busy = 0;
        for number in 0..self.links.len() {
            busy += usize::from(self.fill_batch(number, &mut next, keys)?);
        }
        while busy > 0 {
            self.wait(SILENCE)?;
            for number in self.ready() {
                self.flush(number)?;
                self.receive(number, true)?;
                if self.links[number].is_idle() && !self.fill_batch(number, &mut next, keys)? {
                    busy -= 1;
                }
            }
        }
        self.end(begin);
        Ok(())
    }

    /// Sends the next batch of stores on a link. False if none were left.
    fn fill_batch(&mut self, number: usize, next: &mut u64, keys: u64) -> Result<bool, LoadError> {
        let now_ns = self.now_ns();
        let from = *next;
        *next = keys.min(from + FILL_BATCH);
        for key in from..*next {
            self.links[number].ask(&self.writer, Operation::Set, &[KeyNumber(key)], now_ns);
        }
        self.flush(number)?;
        Ok(from < keys)
    }
}

fn elapsed_ns(start: Instant) -> u64 {
    at_most(start.elapsed().as_nanos())
}
