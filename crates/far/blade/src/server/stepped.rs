//! A blade without threads and addresses: its caller brings the connections and says when it works.
//! A simulator runs the blade's own code with it, in a time of its own
//! ([`BladeConfig::time`]).

use super::shared::{Arrival, Shared};
use super::worker::Worker;
use super::{ServeError, Server};
use crate::config::BladeConfig;
use crate::sources::Source;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A blade that works when it is told to. Dropping it ends it, with all its connections.
#[derive(Debug)]
pub struct SteppedServer {
    shared: Arc<Shared>,
    worker: Worker,
}

impl SteppedServer {
    /// Takes the memory.
    ///
    /// # Errors
    /// The memory or descriptors are not available.
    pub fn new(mut config: BladeConfig) -> Result<SteppedServer, ServeError> {
        config.backing = config.backing.resolve(&[], config.require_grants);
        let server = Server::of(Vec::new(), config)?;
        let shared = Arc::new(Shared::new(server.blade, None, 1).map_err(ServeError::Threads)?);
        let worker =
            Worker::new(Arc::clone(&shared), 0, Vec::new()).map_err(ServeError::Threads)?;
        Ok(SteppedServer { shared, worker })
    }

    /// Takes a connected stream socket as one that came over TCP from this host, or closes it if
    /// there are too many.
    pub fn arrive(&self, socket: OwnedFd) {
        let from = Source::host(Ipv4Addr::LOCALHOST.into());
        if let Ok(presence) = self.shared.blade.sources.arrive(from) {
            self.shared.mailbox(0).deliver(Arrival { socket, presence });
        }
    }

    /// Does all that can be done without waiting: answers, closes what is broken, ends leases,
    /// makes freed memory clean.
    ///
    /// # Errors
    /// The kernel's, of its list of events.
    pub fn step(&mut self) -> io::Result<()> {
        self.worker.step()?;
        self.shared.blade.run_scrubs();
        Ok(())
    }
}

impl Drop for SteppedServer {
    fn drop(&mut self) {
        self.worker.close_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::turns::PATIENCE_NS;
    use farpool_kernel::Time;
    use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};
    use farpool_wire::*;
    use rustix::event::Timespec;
    use std::cell::Cell;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    /// Pages of a large request, several of which are a turn.
    const LARGE: u32 = 16;

    thread_local! {
        static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    fn now() -> Instant {
        static START: OnceLock<Instant> = OnceLock::new();
        *START.get_or_init(Instant::now) + PASSED.get()
    }

    fn pass(time: Duration) {
        PASSED.set(PASSED.get() + time);
    }

    fn server() -> SteppedServer {
        let config = BladeConfig {
            memory_bytes: 16 * SUPERPAGE_BYTES,
            control_requests_per_s: u64::MAX,
            time: Time::simulated(now, |_, _| Ok(0)),
            ..Default::default()
        };
        SteppedServer::new(config).unwrap()
    }

    impl SteppedServer {
        /// One look at who is ready, and the turns that follow from it.
        fn turn(&mut self) {
            let mut events = Vec::with_capacity(64);
            self.worker.turn(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        }

        /// Pages read and written by all.
        fn moved(&self) -> (u64, u64) {
            let counters = &self.shared.blade.counters;
            let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            (count(&counters.pages_read), count(&counters.pages_written))
        }
    }

    struct Peer {
        stream: UnixStream,
        segment: SegmentId,
        /// Received, of an answer that has not arrived whole.
        received: Vec<u8>,
    }

    impl Peer {
        fn new(server: &mut SteppedServer, id: u128) -> Peer {
            let (stream, theirs) = UnixStream::pair().unwrap();
            stream.set_nonblocking(true).unwrap();
            theirs.set_nonblocking(true).unwrap();
            server.arrive(theirs.into());
            let mut peer = Peer { stream, segment: SegmentId(0), received: Vec::new() };
            peer.send(&Request::Hello(Hello::first(ClientId(id), "test")));
            server.step().unwrap();
            peer.send(&Request::CreateSegment { span_superpages: 1 });
            server.step().unwrap();
            peer.segment = SegmentId(u64::try_from(id).unwrap());
            let (segment, first) = (peer.segment, SuperpageNumber(0));
            peer.send(&Request::AllocateSuperpages { segment, first, count: 1 });
            server.step().unwrap();
            assert_eq!(
                peer.answers(),
                [Opcode::Hello, Opcode::CreateSegment, Opcode::AllocateSuperpages]
            );
            peer
        }

        fn send(&mut self, request: &Request<'_>) {
            let mut frame = Vec::new();
            request.encode(RequestId(1), 0, &mut frame).unwrap();
            self.stream.write_all(&frame).unwrap();
        }

        fn demand(&mut self) {
            let extents = [Extent::page(PageNumber(0))];
            self.send(&Request::Read { segment: self.segment, extents: &extents });
        }

        fn read_in_background(&mut self, count: usize) {
            let extents = [Extent::new(PageNumber(0), LARGE)];
            let read = Request::Read { segment: self.segment, extents: &extents };
            let mut frames = Vec::new();
            for _ in 0..count {
                read.encode_in_background(RequestId(1), 0, &mut frames).unwrap();
            }
            self.stream.write_all(&frames).unwrap();
        }

        fn evict(&mut self) {
            let extents = [Extent::new(PageNumber(0), LARGE)];
            let write = Request::Write { segment: self.segment, extents: &extents };
            let pages = vec![7; LARGE as usize * PAGE_BYTES];
            let mut frame = Vec::new();
            write.encode(RequestId(1), PagesChecksum::of(&pages), &mut frame).unwrap();
            frame.extend_from_slice(&pages);
            self.stream.write_all(&frame).unwrap();
        }

        fn ping(&mut self, count: usize) {
            let mut frames = Vec::new();
            for _ in 0..count {
                Request::Ping.encode(RequestId(1), 0, &mut frames).unwrap();
            }
            self.stream.write_all(&frames).unwrap();
        }

        /// What was answered since the last call.
        fn answers(&mut self) -> Vec<Opcode> {
            let _ends_when_there_is_no_more = self.stream.read_to_end(&mut self.received);
            let (mut taken, mut opcodes) = (0, Vec::new());
            while let Some(head) = split_head(&self.received[taken..]).unwrap() {
                assert_ne!(head.header.kind, Kind::Error, "{:?}", Response::decode(&head));
                let end = taken + head.header.head_bytes() + head.header.pages_bytes();
                if end > self.received.len() {
                    break;
                }
                opcodes.push(head.header.opcode);
                taken = end;
            }
            self.received.drain(..taken);
            opcodes
        }

        /// Goes on until so many more answers have come.
        fn wait_for(&mut self, count: usize, server: &mut SteppedServer) -> Vec<Opcode> {
            let mut answers = Vec::new();
            while answers.len() < count {
                server.step().unwrap();
                let more = self.answers();
                assert!(!more.is_empty(), "{} of {count}: {answers:?}", answers.len());
                answers.extend(more);
            }
            answers
        }
    }

    #[test]
    fn demand_goes_before_eviction_and_that_before_the_background() {
        let mut server = server();
        let mut movers = [1, 2].map(|id| Peer::new(&mut server, id));
        let mut evictor = Peer::new(&mut server, 3);
        let mut program = Peer::new(&mut server, 4);
        for mover in &mut movers {
            mover.read_in_background(4);
        }
        evictor.evict();
        program.demand();
        server.turn();
        assert_eq!(program.answers(), [Opcode::Read]);
        assert_eq!(server.moved(), (1, 0), "the last to come is the first to be served");
        server.turn();
        assert_eq!(server.moved(), (1, LARGE.into()));
        assert_eq!(evictor.answers(), [Opcode::Write]);
        for mover in &mut movers {
            assert_eq!(mover.wait_for(4, &mut server), [Opcode::Read; 4]);
        }
    }

    #[test]
    fn the_background_has_a_turn_after_its_patience_though_demand_never_ends() {
        let mut server = server();
        let mut mover = Peer::new(&mut server, 1);
        let mut programs = [2, 3].map(|id| Peer::new(&mut server, id));
        for program in &mut programs {
            program.ping(500);
        }
        let mut turn = || {
            server.turn();
            for program in &mut programs {
                let count = program.answers().len();
                program.ping(count);
            }
        };
        for _ in 0..3 {
            mover.read_in_background(1);
            for time_ms in 0..10 {
                turn();
                assert_eq!(mover.answers(), [], "{time_ms} ms after it was seen");
                pass(Duration::from_nanos(PATIENCE_NS) / 10);
            }
            turn();
            assert_eq!(mover.answers(), [Opcode::Read]);
        }
    }

    #[test]
    fn one_connection_does_not_keep_its_worker_for_itself() {
        let mut server = server();
        let mut flood = Peer::new(&mut server, 1);
        let mut program = Peer::new(&mut server, 2);
        flood.ping(1000);
        server.turn();
        let answers = flood.answers().len();
        assert!((1..500).contains(&answers), "{answers}");
        program.demand();
        server.turn();
        assert_eq!(program.answers(), [Opcode::Read]);
        let more = flood.answers().len();
        assert!(answers + more < 1000, "{answers} and {more}");
        flood.wait_for(1000 - answers - more, &mut server);
    }

    #[test]
    fn requests_of_one_connection_keep_their_order() {
        let mut server = server();
        let mut mixed = Peer::new(&mut server, 1);
        let mut others = [2, 3, 4].map(|id| Peer::new(&mut server, id));
        let (mut sent, mut answers) = (Vec::new(), Vec::new());
        for round in 0..400 {
            match round % 4 {
                0 => mixed.read_in_background(1),
                1 => mixed.demand(),
                2 => mixed.ping(1),
                _ => mixed.evict(),
            }
            sent.push([Opcode::Read, Opcode::Read, Opcode::Ping, Opcode::Write][round % 4]);
            others[round % 3].demand();
            others[(round + 1) % 3].read_in_background(1);
            for peer in &mut others {
                peer.answers();
            }
            // Now it has much to do, now little.
            for _ in 0..round % 3 {
                server.turn();
                answers.extend(mixed.answers());
            }
        }
        answers.extend(mixed.wait_for(sent.len() - answers.len(), &mut server));
        assert_eq!(answers, sent);
    }
}
