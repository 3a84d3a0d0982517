//! A blade that misbehaves on request. It may inject faults, one per data request, in the order of
//! the script: close in the middle of an answer, send garbage, damage a page, damage a head, answer
//! twice, answer the wrong request, hold an answer until the next one is sent (wrong order),
//! refuse, keep silent. Answers may also be cut into pieces of any size. It otherwise serves pages
//! correctly, over several connections. As with a real blade, nothing that an older connection
//! still sends takes effect once a newer one has been accepted.

#![allow(dead_code, reason = "each test binary uses its part of this")]

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farpool_fabric::{
    Address, ClientId, DescriptorSet, Link, LinkPage, PageDone, Session, Spare, Time,
};
use farpool_units::PAGE_BYTES;
use farpool_wire::{
    ErrorCode, Extent, Header, HelloOk, Opcode, PageNumber, PagesChecksum, Priority, Purpose,
    Request, RequestId, Response, SegmentId, split_head,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    CloseMidAnswer,
    Garbage,
    DamagePage,
    DamageHead,
    AnswerTwice,
    WrongId,
    Hold,
    Refuse,
    Silent,
}

#[derive(Default)]
pub(crate) struct Inner {
    pub pages: HashMap<u32, Vec<u8>>,
    pub script: VecDeque<Fault>,
    pub connections: usize,
    pub requests: usize,
    /// How urgent reads and writes were.
    pub priorities: Vec<Priority>,
    pub credits: u16,
    pub piece_bytes: usize,
    pub blade_id: u64,
    pub lease_ms: u32,
    /// How long a greeting takes.
    pub greeting: Duration,
    /// True if the newest connection leaves its client waiting for bytes that may never arrive: an
    /// answer is held back, or a damaged head promised more than was sent.
    pub is_owing: bool,
    live: Vec<Stream>,
}

impl Inner {
    fn hello(&self) -> HelloOk {
        HelloOk {
            blade_id: self.blade_id,
            capacity_bytes: 1 << 30,
            quota_bytes: 1 << 30,
            lease_ms: self.lease_ms,
            pages_per_request_limit: 64,
            outlives_process: false,
        }
    }
}

pub(crate) struct FakeBlade {
    pub address: Address,
    pub inner: Arc<Mutex<Inner>>,
    threads: Arc<Mutex<Vec<JoinHandle<()>>>>,
    stop: Box<dyn Fn() + Send>,
    _folder: Option<tempfile::TempDir>,
}

pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn shutdown(&self) {
        let _ = match self {
            Stream::Unix(it) => it.shutdown(Shutdown::Both),
            Stream::Tcp(it) => it.shutdown(Shutdown::Both),
        };
    }

    fn twin(&self) -> Stream {
        match self {
            Stream::Unix(it) => Stream::Unix(it.try_clone().expect("clone")),
            Stream::Tcp(it) => Stream::Tcp(it.try_clone().expect("clone")),
        }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> bool {
        match self {
            Stream::Unix(it) => it.read_exact(bytes).is_ok(),
            Stream::Tcp(it) => it.read_exact(bytes).is_ok(),
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        let _ = match self {
            Stream::Unix(it) => it.write_all(bytes),
            Stream::Tcp(it) => it.write_all(bytes),
        };
    }
}

pub(crate) fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().expect("no panic in the fake blade")
}

impl FakeBlade {
    pub(crate) fn unix() -> FakeBlade {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("blade.sock");
        let listener = UnixListener::bind(&path).expect("bind");
        let to = path.clone();
        let mut blade = FakeBlade::start(Address::Unix(path), move || {
            Some(Stream::Unix(listener.accept().ok()?.0))
        });
        blade.stop = Box::new(move || drop(UnixStream::connect(&to)));
        blade._folder = Some(folder);
        blade
    }

    /// At an address that stays free when it has ended, for what comes after it.
    pub(crate) fn tcp() -> FakeBlade {
        Self::tcp_at(farpool_testkit::ports::free_address())
    }

    pub(crate) fn tcp_at(address: SocketAddr) -> FakeBlade {
        let listener = TcpListener::bind(address).expect("bind");
        let at = listener.local_addr().expect("address");
        let mut blade = FakeBlade::start(Address::Tcp(at), move || {
            let stream = listener.accept().ok()?.0;
            stream.set_nodelay(true).ok()?;
            Some(Stream::Tcp(stream))
        });
        blade.stop = Box::new(move || drop(TcpStream::connect(at)));
        blade
    }

    fn start(address: Address, accept: impl Fn() -> Option<Stream> + Send + 'static) -> FakeBlade {
        let inner = Inner {
            credits: 8,
            piece_bytes: usize::MAX,
            blade_id: 7,
            lease_ms: 60_000,
            ..Inner::default()
        };
        let inner = Arc::new(Mutex::new(inner));
        let threads = Arc::new(Mutex::new(Vec::new()));
        let (state, workers) = (Arc::clone(&inner), Arc::clone(&threads));
        let acceptor = std::thread::spawn(move || {
            while let Some(stream) = accept() {
                let mut guard = lock(&state);
                if guard.credits == 0 {
                    return;
                }
                guard.connections += 1;
                guard.is_owing = false;
                let own = guard.connections;
                guard.live.drain(..).for_each(|old| old.shutdown());
                guard.live.push(stream.twin());
                drop(guard);
                let state = Arc::clone(&state);
                let worker = std::thread::spawn(move || serve(stream, own, &state));
                workers.lock().expect("workers").push(worker);
            }
        });
        threads.lock().expect("workers").push(acceptor);
        FakeBlade { address, inner, threads, stop: Box::new(|| ()), _folder: None }
    }

    pub(crate) fn script(&self, faults: &[Fault]) {
        lock(&self.inner).script = faults.iter().copied().collect();
    }

    /// Closes everything: the address is not served any more.
    pub(crate) fn kill(&self) {
        let mut guard = lock(&self.inner);
        guard.credits = 0;
        guard.live.drain(..).for_each(|old| old.shutdown());
        drop(guard);
        (self.stop)();
        let threads: Vec<_> = self.threads.lock().expect("workers").drain(..).collect();
        threads.into_iter().for_each(|it| it.join().expect("fake blade's thread"));
    }

    /// Cuts the connections that are open now.
    pub(crate) fn cut(&self) {
        lock(&self.inner).live.drain(..).for_each(|old| old.shutdown());
    }

    pub(crate) fn session(&self, deadline: Duration) -> Arc<Session> {
        Arc::new(Session {
            address: self.address.clone(),
            client: ClientId(42),
            grant: None,
            limits: None,
            client_name: "a test with a name that is too long for the wire".into(),
            purpose: Purpose::Client,
            quota_bytes: 1 << 30,
            sharing_group: None,
            deadline,
            spare: Spare::default(),
            allow_remote_tcp: false,
            secures_tcp: false,
            asks: None,
            time: time(),
            descriptors: Arc::new(DescriptorSet::default()),
            met: farpool_fabric::Met::default(),
        })
    }
}

impl Drop for FakeBlade {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The content of a page that was never written.
pub(crate) fn fresh_page(page: u32) -> Vec<u8> {
    page.to_le_bytes().repeat(PAGE_BYTES / 4)
}

/// Serves the connection that was accepted as number `own`.
fn serve(mut stream: Stream, own: usize, state: &Mutex<Inner>) {
    let mut held: Option<Vec<u8>> = None;
    let mut is_head_damaged = false;
    let mut buffer = Vec::new();
    loop {
        note_owing(held.is_some() || is_head_damaged, own, state);
        let Some((request_id, opcode, pages)) = next_request(&mut stream, own, &mut buffer, state)
        else {
            if let Some(late) = held {
                stream.put(&late);
            }
            stream.shutdown();
            return;
        };
        let mut guard = lock(state);
        let is_data = matches!(opcode, Opcode::Read | Opcode::Write);
        let scripted = if is_data { guard.script.pop_front() } else { None };
        let fault = scripted.unwrap_or(Fault::None);
        let (credits, piece) = (guard.credits, guard.piece_bytes);
        let hello = guard.hello();
        guard.requests += usize::from(is_data);
        let greeting = if opcode == Opcode::Hello { guard.greeting } else { Duration::ZERO };
        drop(guard);
        let id = RequestId(request_id.0 + if fault == Fault::WrongId { 1000 } else { 0 });
        let mut out = answer(opcode, id, credits, &pages, fault, hello);
        let half = out.len() / 2;
        std::thread::sleep(greeting);
        match fault {
            Fault::Silent => continue,
            Fault::Hold => {
                let Some(old) = held.replace(out) else {
                    continue;
                };
                out = old;
            }
            Fault::Garbage => {
                out = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".to_vec()
            }
            Fault::DamagePage => *out.last_mut().expect("frame") ^= 0x10,
            Fault::DamageHead => out[17] ^= 0x01,
            Fault::AnswerTwice => out.extend_from_within(..),
            Fault::CloseMidAnswer => out.truncate(half),
            _ => {}
        }
        out.chunks(piece).for_each(|piece| stream.put(piece));
        if fault == Fault::CloseMidAnswer {
            stream.shutdown();
            return;
        }
        if let Some(old) = held.take_if(|_| fault != Fault::Hold) {
            stream.put(&old);
        }
        is_head_damaged |= fault == Fault::DamageHead;
    }
}

fn note_owing(is_owing: bool, own: usize, state: &Mutex<Inner>) {
    let mut guard = lock(state);
    if guard.connections == own {
        guard.is_owing = is_owing;
    }
}

type Asked = (RequestId, Opcode, Vec<u8>);

/// Reads one request and carries it out, unless a newer connection was accepted meanwhile. Returns
/// the pages of the answer.
fn next_request(
    stream: &mut Stream,
    own: usize,
    buffer: &mut Vec<u8>,
    state: &Mutex<Inner>,
) -> Option<Asked> {
    buffer.resize(32, 0);
    stream.fill(buffer).then_some(())?;
    let header = Header::decode(buffer.first_chunk().expect("32 bytes")).expect("a good header");
    buffer.resize(header.head_bytes(), 0);
    stream.fill(&mut buffer[32..]).then_some(())?;
    let head = split_head(buffer).expect("a good request").expect("a whole request");
    let mut pages = vec![0; head.header.pages_bytes()];
    stream.fill(&mut pages).then_some(())?;
    assert_eq!(PagesChecksum::of(&pages), head.header.pages_checksum, "pages of a write");
    let each = |extents: &[Extent]| -> Vec<u32> {
        extents.iter().flat_map(|it| it.first().0..it.first().0 + it.count_pages()).collect()
    };
    let mut guard = lock(state);
    if guard.connections != own {
        return None;
    }
    if matches!(head.header.opcode, Opcode::Read | Opcode::Write) {
        guard.priorities.push(head.header.priority());
    }
    let mut answer = Vec::new();
    match Request::decode(&head).expect("a request") {
        Request::Read { extents, .. } => {
            for page in each(extents) {
                let kept = guard.pages.get(&page).cloned();
                answer.extend(kept.unwrap_or_else(|| fresh_page(page)));
            }
        }
        Request::Write { extents, .. } => {
            for (page, bytes) in each(extents).into_iter().zip(pages.chunks(PAGE_BYTES)) {
                guard.pages.insert(page, bytes.to_vec());
            }
        }
        _ => {}
    }
    Some((head.header.request_id, head.header.opcode, answer))
}

fn answer(
    opcode: Opcode,
    id: RequestId,
    credits: u16,
    pages: &[u8],
    fault: Fault,
    hello: HelloOk,
) -> Vec<u8> {
    let count = u16::try_from(pages.len() / PAGE_BYTES).expect("few pages");
    let response = match opcode {
        _ if fault == Fault::Refuse => {
            Response::Error { code: ErrorCode::UnknownSegment, detail: 9 }
        }
        Opcode::Hello => Response::HelloOk(hello),
        Opcode::Read => Response::Pages { page_count: count },
        _ => Response::Done,
    };
    let refused = fault == Fault::Refuse;
    let sum = if refused { 0 } else { PagesChecksum::of(pages) };
    let mut out = Vec::new();
    response.encode(opcode, id, credits, sum, &mut out).expect("encodes");
    if !refused {
        out.extend_from_slice(pages);
    }
    out
}

/// Local pages to read into and write from.
pub(crate) struct Buffers(Vec<Box<[u8; PAGE_BYTES]>>);

impl Buffers {
    pub(crate) fn new(count: usize) -> Self {
        Buffers((0..count).map(|_| Box::new([0xEE; PAGE_BYTES])).collect())
    }

    pub(crate) fn bytes(&mut self, at: usize) -> &mut [u8; PAGE_BYTES] {
        &mut self.0[at]
    }

    /// Page `page` of the blade into or from buffer `at`, whose number is also the token.
    pub(crate) fn page(&mut self, page: u32, at: usize) -> LinkPage {
        LinkPage {
            segment: SegmentId(3),
            page: PageNumber(page),
            file: -1,
            file_page: 0,
            memory: self.0[at].as_mut_ptr(),
            token: at as u64,
        }
    }
}

/// The clock of a thread's links.
#[derive(Clone, Copy)]
struct Clock {
    begun: Instant,
    ahead: Duration,
}

thread_local! {
    /// None is the kernel's.
    static CLOCK: Cell<Option<Clock>> = const { Cell::new(None) };
}

/// The present time of this thread's links.
pub(crate) fn now() -> Instant {
    CLOCK
        .get()
        .map_or_else(Instant::now, |it| it.begun + it.ahead + it.begun.elapsed() / SlowTime::TIMES)
}

fn time() -> Time {
    match CLOCK.get() {
        None => Time::KERNEL,
        Some(_) => Time::simulated(now, |set, most| Time::KERNEL.wait(set, most)),
    }
}

/// While it lives, the time of the links that this thread makes passes slowly: a silence after
/// which a link tries another connection is one of seconds. For tests that count connections, or in
/// which an answer must come in time: on a busy machine a thread may wait for a processor for
/// longer than a link waits.
pub(crate) struct SlowTime(());

impl SlowTime {
    const TIMES: u32 = 40;

    pub(crate) fn begin() -> Self {
        CLOCK.set(Some(Clock { begun: Instant::now(), ahead: Duration::ZERO }));
        SlowTime(())
    }

    /// Lets this much time pass at once.
    pub(crate) fn pass(&self, time: Duration) {
        CLOCK.set(CLOCK.get().map(|it| Clock { ahead: it.ahead + time, ..it }));
    }
}

impl Drop for SlowTime {
    fn drop(&mut self) {
        CLOCK.set(None);
    }
}

/// Drives the link until nothing is in flight.
pub(crate) fn finish(link: &mut dyn Link) -> Vec<PageDone> {
    let mut done = Vec::new();
    while link.in_flight() > 0 {
        link.wait(&mut done);
        link.expire(now(), &mut done);
    }
    done.sort_by_key(|it| it.token);
    done
}
