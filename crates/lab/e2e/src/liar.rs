//! A blade that lies: a TCP proxy before a real blade that answers reads with other pages than
//! those that were stored, under right checksums.

use std::collections::HashMap;
use std::io::{Read, Result, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use farpool_kernel::lock;
use farpool_units::PAGE_BYTES;
use farpool_wire::{
    Extent, HEADER_BYTES, Header, Kind, Opcode, PagesChecksum, Request, Response, SegmentId,
    split_head,
};

/// What a page is replaced by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Lie {
    None = 0,
    /// Itself, with one bit flipped.
    Flipped = 1,
    /// The first version of itself that differs from the present one.
    Stale = 2,
    /// Another page of the same segment.
    Swapped = 3,
    Zeroed = 4,
    /// The page of the same number in another segment.
    OfOtherSegment = 5,
}

impl Lie {
    /// All that are lies.
    pub const ALL: [Lie; 5] =
        [Lie::Flipped, Lie::Stale, Lie::Swapped, Lie::Zeroed, Lie::OfOtherSegment];

    fn of_number(number: u8) -> Lie {
        Lie::ALL.into_iter().find(|lie| *lie as u8 == number).unwrap_or(Lie::None)
    }
}

type Page = [u8; PAGE_BYTES];
type At = (SegmentId, u32);
/// The first version of a page, and the last.
type Versions = Box<(Page, Page)>;

/// What passed through all connections.
#[derive(Debug, Default)]
struct Past {
    lie: AtomicU8,
    told: AtomicUsize,
    stored: Mutex<HashMap<At, Versions>>,
}

/// The proxy. Its threads for a connection end with the connection.
#[derive(Debug)]
pub struct Liar {
    address: SocketAddr,
    past: Arc<Past>,
}

impl Liar {
    /// Listens on a port of loopback and connects to `blade` (IP and port). It is honest until told
    /// otherwise.
    ///
    /// # Panics
    /// If there is no port.
    pub fn start(blade: &str) -> Liar {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (past, blade) = (Arc::<Past>::default(), blade.to_owned());
        let shared = Arc::clone(&past);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let _ = connect(client, &blade, &shared);
            }
        });
        Liar { address, past }
    }

    /// Its address for a program.
    pub fn address(&self) -> String {
        format!("tcp://{}", self.address)
    }

    /// From now on every page that can be is replaced.
    pub fn tell(&self, lie: Lie) {
        self.past.lie.store(lie as u8, SeqCst);
    }

    /// The number of pages replaced so far.
    pub fn told(&self) -> usize {
        self.past.told.load(SeqCst)
    }

    /// True if a page was stored through it that holds these bytes.
    pub fn has_seen(&self, bytes: &[u8]) -> bool {
        let stored = lock(&self.past.stored);
        let holds = |page: &Page| page.windows(bytes.len()).any(|window| window == bytes);
        stored.values().any(|it| holds(&it.0) || holds(&it.1))
    }
}

/// The reads that one connection has under way, by their number: which pages.
type Asked = Arc<Mutex<HashMap<u64, Vec<At>>>>;

fn connect(client: TcpStream, blade: &str, past: &Arc<Past>) -> Result<()> {
    let server = TcpStream::connect(blade)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_server) = (client.try_clone()?, server.try_clone()?);
    let asked = Asked::default();
    let (of_requests, shared) = (Arc::clone(&asked), Arc::clone(past));
    std::thread::spawn(move || {
        let _ = pass_requests(&from_client, &to_server, &of_requests, &shared);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let past = Arc::clone(past);
    std::thread::spawn(move || {
        let _ = pass_answers(&server, &client, &asked, &past);
        let _ = client.shutdown(Shutdown::Both);
    });
    Ok(())
}

/// Reads one frame. Returns its header and all its bytes.
fn frame(mut from: &TcpStream) -> Result<(Header, Vec<u8>)> {
    let mut head = [0; HEADER_BYTES];
    from.read_exact(&mut head)?;
    let header = Header::decode(&head).expect("a frame");
    let mut frame = head.to_vec();
    frame.resize(header.head_bytes() + header.pages_bytes(), 0);
    from.read_exact(&mut frame[HEADER_BYTES..])?;
    Ok((header, frame))
}

fn numbers(segment: SegmentId, extents: &[Extent]) -> Vec<At> {
    let pages = |extent: &Extent| extent.first().0..extent.first().0 + extent.count_pages();
    extents.iter().flat_map(pages).map(|page| (segment, page)).collect()
}

fn pass_requests(
    client: &TcpStream,
    mut server: &TcpStream,
    asked: &Asked,
    past: &Past,
) -> Result<()> {
    loop {
        let (header, bytes) = frame(client)?;
        let (head, pages) = bytes.split_at(header.head_bytes());
        let head = split_head(head).expect("a frame").expect("a whole head");
        match Request::decode(&head).expect("a request") {
            Request::Read { segment, extents } => {
                lock(asked).insert(header.request_id.0, numbers(segment, extents));
            }
            Request::Write { segment, extents } => {
                let mut stored = lock(&past.stored);
                let (pages, _) = pages.as_chunks::<PAGE_BYTES>();
                for (at, page) in numbers(segment, extents).into_iter().zip(pages) {
                    stored.entry(at).or_insert_with(|| Box::new((*page, *page))).1 = *page;
                }
            }
            _ => {}
        }
        server.write_all(&bytes)?;
    }
}

fn pass_answers(
    server: &TcpStream,
    mut client: &TcpStream,
    asked: &Asked,
    past: &Past,
) -> Result<()> {
    loop {
        let (header, mut bytes) = frame(server)?;
        let lie = Lie::of_number(past.lie.load(SeqCst));
        let is_of_pages = header.opcode == Opcode::Read && header.kind == Kind::Response;
        if is_of_pages && let Some(places) = lock(asked).remove(&header.request_id.0) {
            let head = header.head_bytes();
            let (pages, _) = bytes[head..].as_chunks_mut::<PAGE_BYTES>();
            for (at, page) in places.into_iter().zip(pages) {
                if let Some(other) = other(lie, at, page, past) {
                    *page = other;
                    past.told.fetch_add(1, SeqCst);
                }
            }
            let (response, checksum) = (
                Response::Pages { page_count: header.page_count },
                PagesChecksum::of(&bytes[head..]),
            );
            let mut forged = Vec::new();
            let encoded = response.encode(
                Opcode::Read,
                header.request_id,
                header.credits,
                checksum,
                &mut forged,
            );
            encoded.expect("an answer");
            bytes.splice(..head, forged);
        }
        client.write_all(&bytes)?;
    }
}

/// What the page is replaced by; None if there is nothing of the kind.
fn other(lie: Lie, at: At, page: &Page, past: &Past) -> Option<Page> {
    let stored = lock(&past.stored);
    let last = |wanted: &dyn Fn(&At) -> bool| {
        let found = stored.iter().find(|(at, it)| wanted(at) && it.1 != *page);
        found.map(|(_, it)| it.1)
    };
    match lie {
        Lie::None => None,
        Lie::Flipped => {
            let mut flipped = *page;
            flipped[usize::try_from(at.1).expect("small") % PAGE_BYTES] ^= 1;
            Some(flipped)
        }
        Lie::Stale => stored.get(&at).map(|it| it.0).filter(|first| first != page),
        Lie::Swapped => last(&|it| it.0 == at.0 && it.1 != at.1),
        Lie::Zeroed => Some([0; PAGE_BYTES]).filter(|zeros| zeros != page),
        Lie::OfOtherSegment => last(&|it| it.0 != at.0 && it.1 == at.1),
    }
}
