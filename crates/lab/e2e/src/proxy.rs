//! A TCP proxy between a program and its blade that damages what passes as a bad network could: it
//! cuts, repeats and changes answers, changes a length, lets flows die without a word, refuses.

use std::io::{Read, Result, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use farpool_units::PAGE_BYTES;

const HEADER_BYTES: usize = 32;
/// Offsets of the meta's length (u16) and the number of pages (u16) in a header.
const META_AT: usize = 16;
/// Bytes after a meta.
const META_CHECKSUM_BYTES: usize = 4;
const PAGES_AT: usize = 18;

/// The change to one answer that carries pages, or to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    None = 0,
    /// Half of a page arrives, then the connection closes.
    CutMidPage = 1,
    /// One bit of a page is flipped.
    FlipBit = 2,
    /// The answer arrives twice.
    Repeat = 3,
    /// Bytes that are no frame come before the answer.
    Garbage = 4,
    /// The answer is held back until after the next answer.
    Reorder = 5,
    /// One bit of the number of pages is flipped, so that more seem to follow.
    FlipLength = 6,
    /// One bit of the meta's length is flipped in a request, so that more seems to follow.
    FlipRequestLength = 7,
}

impl Fault {
    const fn is_of_request(number: u8) -> bool {
        number == Fault::FlipRequestLength as u8
    }
}

#[derive(Debug, Default)]
struct Orders {
    fault: AtomicU8,
    done: AtomicUsize,
    /// The number of connections accepted.
    accepted: AtomicUsize,
    /// What earlier connections carry is swallowed.
    alive_from: AtomicUsize,
    open: Mutex<Open>,
}

/// What can be closed.
#[derive(Debug, Default)]
struct Open {
    /// Both ends of all connections, with the connections' numbers.
    ends: Vec<(usize, TcpStream)>,
    listener: Option<TcpListener>,
}

impl Orders {
    /// Takes the fault that is to be applied to the next request, or to the next answer.
    fn take(&self, is_request: bool) -> u8 {
        let is_due = |fault: u8| fault != 0 && Fault::is_of_request(fault) == is_request;
        let taken = self.fault.fetch_update(SeqCst, SeqCst, |fault| is_due(fault).then_some(0));
        let Ok(fault) = taken else { return 0 };
        self.done.fetch_add(1, SeqCst);
        fault
    }
}

/// The proxy. Its threads for a connection end with the connection.
#[derive(Debug)]
pub struct Proxy {
    at: SocketAddr,
    address: String,
    blade: String,
    orders: Arc<Orders>,
}

impl Proxy {
    /// Listens on a port of loopback and connects to `blade` (IP and port).
    pub fn start(blade: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let at = listener.local_addr().expect("address");
        let (address, blade) = (format!("tcp://{at}"), blade.to_owned());
        let proxy = Proxy { at, address, blade, orders: Arc::new(Orders::default()) };
        proxy.listen(listener);
        proxy
    }

    fn listen(&self, listener: TcpListener) {
        let own = listener.try_clone().expect("a descriptor");
        self.orders.open.lock().expect("no panic").listener = Some(own);
        let (blade, orders) = (self.blade.clone(), Arc::clone(&self.orders));
        std::thread::spawn(move || {
            // Ends when the listener is shut down.
            while let Ok((client, _)) = listener.accept() {
                let _ = connect(client, &blade, &orders);
            }
        });
    }

    /// From now on nothing passes on the connections that are open, and nothing closes them; new
    /// ones work.
    pub fn let_flows_die(&self) {
        self.orders.alive_from.store(self.orders.accepted.load(SeqCst), SeqCst);
    }

    /// Closes all connections, and refuses new ones until [`Proxy::serve_again`].
    pub fn refuse(&self) {
        self.refuse_more();
        let mut open = self.orders.open.lock().expect("no panic");
        for (_, stream) in open.ends.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Refuses new connections until [`Proxy::serve_again`]; those that are open work.
    pub fn refuse_more(&self) {
        let mut open = self.orders.open.lock().expect("no panic");
        if let Some(listener) = open.listener.take() {
            rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).expect("a listener");
        }
    }

    /// Listens again, at the same address.
    pub fn serve_again(&self) {
        self.listen(TcpListener::bind(self.at).expect("the same port"));
    }

    /// The number of connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.orders.accepted.load(SeqCst)
    }

    /// Its address for a program.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Applies `fault` to the next answer that carries pages, or to the next request.
    pub fn order(&self, fault: Fault) {
        self.orders.fault.store(fault as u8, SeqCst);
    }

    /// Number of faults applied so far.
    pub fn done(&self) -> usize {
        self.orders.done.load(SeqCst)
    }
}

/// Connects one client with the blade.
fn connect(client: TcpStream, blade: &str, shared: &Arc<Orders>) -> Result<()> {
    let number = shared.accepted.fetch_add(1, SeqCst);
    let server = TcpStream::connect(blade)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_server) = (client.try_clone()?, server.try_clone()?);
    let ends = [(number, client.try_clone()?), (number, server.try_clone()?)];
    shared.open.lock().expect("no panic").ends.extend(ends);
    let orders = Arc::clone(shared);
    std::thread::spawn(move || {
        let _ = pass(&from_client, &to_server, number, &orders);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let orders = Arc::clone(shared);
    std::thread::spawn(move || {
        let _ = answer(&server, &client, number, &orders);
        let _ = (server.shutdown(Shutdown::Both), client.shutdown(Shutdown::Both));
        orders.open.lock().expect("no panic").ends.retain(|(other, _)| *other != number);
    });
    Ok(())
}

fn pass(
    mut client: &TcpStream,
    mut server: &TcpStream,
    number: usize,
    orders: &Orders,
) -> Result<()> {
    let mut frame = Vec::new();
    loop {
        read_frame(&mut client, &mut frame)?;
        if number < orders.alive_from.load(SeqCst) {
            continue;
        }
        if orders.take(true) == Fault::FlipRequestLength as u8 {
            frame[META_AT + 1] ^= 1;
        }
        server.write_all(&frame)?;
    }
}

fn answer(
    mut server: &TcpStream,
    mut client: &TcpStream,
    number: usize,
    orders: &Orders,
) -> Result<()> {
    let (mut frame, mut held) = (Vec::new(), Vec::new());
    loop {
        let pages = read_frame(&mut server, &mut frame)?;
        if number < orders.alive_from.load(SeqCst) {
            continue;
        }
        let fault = if pages > 0 { orders.take(false) } else { 0 };
        match fault {
            fault if fault == Fault::CutMidPage as u8 => {
                return client.write_all(&frame[..frame.len() - PAGE_BYTES / 2]);
            }
            fault if fault == Fault::FlipBit as u8 => {
                let at = frame.len() - PAGE_BYTES / 2;
                frame[at] ^= 4;
            }
            fault if fault == Fault::FlipLength as u8 => frame[PAGES_AT + 1] ^= 1,
            fault if fault == Fault::Repeat as u8 => client.write_all(&frame)?,
            fault if fault == Fault::Garbage as u8 => client.write_all(&[0xa5; 77])?,
            fault if fault == Fault::Reorder as u8 => {
                held.append(&mut frame);
                continue;
            }
            _ => {}
        }
        client.write_all(&frame)?;
        client.write_all(&held)?;
        held.clear();
    }
}

/// Reads one complete frame. Returns the number of pages it carries.
fn read_frame(from: &mut &TcpStream, frame: &mut Vec<u8>) -> Result<usize> {
    frame.resize(HEADER_BYTES, 0);
    from.read_exact(frame)?;
    let number = |at: usize| usize::from(u16::from_le_bytes([frame[at], frame[at + 1]]));
    let (meta, pages) = (number(META_AT), number(PAGES_AT));
    let checksum_bytes = if meta > 0 { META_CHECKSUM_BYTES } else { 0 };
    frame.resize(HEADER_BYTES + meta + checksum_bytes + pages * PAGE_BYTES, 0);
    from.read_exact(&mut frame[HEADER_BYTES..])?;
    Ok(pages)
}
