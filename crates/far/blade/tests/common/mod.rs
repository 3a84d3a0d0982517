//! A plain blocking client for tests: one request, one answer.

#![allow(dead_code, reason = "each test binary uses its part of this")]

pub(crate) mod flash;
pub(crate) mod timing;

use farpool_blade::{BladeConfig, Server, Serving};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tempfile::TempDir;

/// Longer than anything takes; a test that waits this long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A blade on a unix socket and on loopback TCP.
pub(crate) struct TestBlade {
    pub serving: Serving,
    pub directory: TempDir,
}

impl TestBlade {
    pub(crate) fn start(config: BladeConfig) -> TestBlade {
        let directory = tempfile::tempdir().unwrap();
        let unix = Address::Unix(directory.path().join("blade.sock"));
        let tcp = "tcp://127.0.0.1:0".parse().unwrap();
        let serving = Server::bind(&[unix, tcp], config).unwrap().serve().unwrap();
        TestBlade { serving, directory }
    }

    pub(crate) fn of_superpages(count: u64) -> TestBlade {
        Self::start(config_of(count))
    }

    pub(crate) fn unix(&self) -> &Address {
        &self.serving.addresses()[0]
    }

    pub(crate) fn tcp(&self) -> &Address {
        &self.serving.addresses()[1]
    }

    pub(crate) fn client(&self, id: u128) -> Peer {
        Peer::hello(self.unix(), id)
    }
}

pub(crate) fn config_of(superpages: u64) -> BladeConfig {
    BladeConfig {
        memory_bytes: superpages * SUPERPAGE_BYTES,
        threads: 2,
        lease: Duration::from_millis(300),
        ..Default::default()
    }
}

/// Returns why a blade does not start.
pub(crate) fn refusal(config: BladeConfig) -> String {
    let address = "tcp://127.0.0.1:0".parse().unwrap();
    let error = Server::bind(&[address], config).unwrap_err();
    std::error::Error::source(&error).unwrap().to_string()
}

/// Waits until `condition` holds.
pub(crate) fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    farpool_testkit::wait_until(what, PATIENCE, condition);
}

pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub(crate) fn connect(address: &Address) -> Stream {
        match address {
            Address::Tcp(tcp) => {
                let stream = TcpStream::connect(tcp).unwrap();
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                Stream::Tcp(stream)
            }
            Address::Unix(path) | Address::Shm(path) => {
                let stream = UnixStream::connect(path).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                Stream::Unix(stream)
            }
        }
    }
}

impl Stream {
    pub(crate) fn try_clone(&self) -> Stream {
        match self {
            Stream::Unix(stream) => Stream::Unix(stream.try_clone().unwrap()),
            Stream::Tcp(stream) => Stream::Tcp(stream.try_clone().unwrap()),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(buffer),
            Stream::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One answer, with its own copy of the bytes.
#[derive(Debug)]
pub(crate) struct Answer {
    pub header: Header,
    meta: Vec<u8>,
    pub pages: Vec<u8>,
}

impl Answer {
    pub(crate) fn response(&self) -> Response<'_> {
        Response::decode(&Head { header: self.header, meta: &self.meta }).unwrap()
    }

    /// The error's code, if it is one.
    pub(crate) fn refused(&self) -> Option<ErrorCode> {
        match self.response() {
            Response::Error { code, .. } => Some(code),
            _ => None,
        }
    }

    #[track_caller]
    pub(crate) fn done(&self) {
        assert_eq!(self.response(), Response::Done);
    }
}

/// One connection.
pub(crate) struct Peer {
    pub stream: Stream,
    pub next_id: u64,
}

pub(crate) fn hello(id: u128) -> Hello<'static> {
    Hello { pid: 4711, ..Hello::first(ClientId(id), "test") }
}

impl Peer {
    pub(crate) fn connect(address: &Address) -> Peer {
        Peer { stream: Stream::connect(address), next_id: 1 }
    }

    pub(crate) fn hello(address: &Address, id: u128) -> Peer {
        let (peer, answer) = Peer::hello_with(address, &hello(id));
        assert!(matches!(answer.response(), Response::HelloOk(_)), "{:?}", answer.response());
        peer
    }

    pub(crate) fn hello_with(address: &Address, hello: &Hello<'_>) -> (Peer, Answer) {
        let mut peer = Peer::connect(address);
        let answer = peer.ask(&Request::Hello(*hello));
        (peer, answer)
    }

    pub(crate) fn ask(&mut self, request: &Request<'_>) -> Answer {
        self.ask_with(request, &[])
    }

    pub(crate) fn ask_with(&mut self, request: &Request<'_>, pages: &[u8]) -> Answer {
        let id = self.send(request, pages);
        let answer = self.receive().unwrap();
        assert_eq!(answer.header.request_id, id);
        assert_eq!(answer.header.opcode, request.opcode());
        answer
    }

    pub(crate) fn send(&mut self, request: &Request<'_>, pages: &[u8]) -> RequestId {
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let mut frame = Vec::new();
        request.encode(id, PagesChecksum::of(pages), &mut frame).unwrap();
        frame.extend_from_slice(pages);
        self.stream.write_all(&frame).unwrap();
        id
    }

    pub(crate) fn receive(&mut self) -> std::io::Result<Answer> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let mut bytes = header.to_vec();
        let header = Header::decode(&header).unwrap();
        bytes.resize(header.head_bytes(), 0);
        self.stream.read_exact(&mut bytes[HEADER_BYTES..])?;
        let head = split_head(&bytes).unwrap().unwrap();
        let mut pages = vec![0; header.pages_bytes()];
        self.stream.read_exact(&mut pages)?;
        assert_eq!(PagesChecksum::of(&pages), header.pages_checksum);
        Ok(Answer { header, meta: head.meta.to_vec(), pages })
    }

    /// The same connection, for sending from another thread.
    pub(crate) fn sender(&self) -> Peer {
        Peer { stream: self.stream.try_clone(), next_id: self.next_id }
    }

    /// Reads until the blade closes the connection.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub(crate) fn create(&mut self, span_superpages: u32) -> (SegmentId, SegmentToken) {
        match self.ask(&Request::CreateSegment { span_superpages }).response() {
            Response::SegmentCreated { segment, token } => (segment, token),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn allocate(&mut self, segment: SegmentId, first: u32, count: u32) -> Answer {
        let first = SuperpageNumber(first);
        self.ask(&Request::AllocateSuperpages { segment, first, count })
    }

    pub(crate) fn free(&mut self, segment: SegmentId, first: u32, count: u32) -> Answer {
        let first = SuperpageNumber(first);
        self.ask(&Request::FreeSuperpages { segment, first, count })
    }

    /// A segment with `count` superpages of memory.
    pub(crate) fn segment(&mut self, count: u32) -> (SegmentId, SegmentToken) {
        let (segment, token) = self.create(count);
        let answer = self.allocate(segment, 0, count);
        assert!(matches!(answer.response(), Response::Allocated { .. }), "{answer:?}");
        (segment, token)
    }

    pub(crate) fn write(&mut self, segment: SegmentId, page: u32, pages: &[u8]) -> Answer {
        let count = u32::try_from(pages.len() / PAGE_BYTES).unwrap();
        let extents = [Extent::new(PageNumber(page), count)];
        self.ask_with(&Request::Write { segment, extents: &extents }, pages)
    }

    pub(crate) fn read(&mut self, segment: SegmentId, page: u32, count: u32) -> Answer {
        let extents = [Extent::new(PageNumber(page), count)];
        self.ask(&Request::Read { segment, extents: &extents })
    }

    pub(crate) fn stat(&mut self) -> (BladeTotals, Vec<ClientUsage>) {
        match self.ask(&Request::Stat { skip_clients: 0 }).response() {
            Response::Stat { totals, clients } => (*totals, clients.to_vec()),
            other => panic!("{other:?}"),
        }
    }
}

/// Pages whose every byte differs from its neighbours' and from other seeds'.
pub(crate) fn pages(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(count * PAGE_BYTES);
    while bytes.len() < count * PAGE_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}
