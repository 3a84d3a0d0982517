//! A TCP proxy between a program and its blade that damages the blade's answers as a bad network
//! could.

use std::io::{Read, Result, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::SeqCst};

use farpool_units::PAGE_BYTES;

const HEADER_BYTES: usize = 32;
/// Offsets of the meta's length (u16) and the number of pages (u16) in a header.
const META_AT: usize = 16;
const PAGES_AT: usize = 18;

/// The change to one answer that carries pages.
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
}

#[derive(Debug, Default)]
struct Orders {
    fault: AtomicU8,
    done: AtomicUsize,
}

/// The proxy. Its threads for a connection end with the connection.
#[derive(Debug)]
pub struct Proxy {
    address: String,
    orders: Arc<Orders>,
}

impl Proxy {
    /// Listens on a port of loopback and connects to `blade` (IP and port).
    pub fn start(blade: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("tcp://{}", listener.local_addr().expect("address"));
        let orders = Arc::new(Orders::default());
        let (blade, shared) = (blade.to_owned(), Arc::clone(&orders));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(&blade) else {
                    continue;
                };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let (Ok(from_client), Ok(to_server)) = (client.try_clone(), server.try_clone())
                else {
                    continue;
                };
                let orders = Arc::clone(&shared);
                std::thread::spawn(move || pass(from_client, to_server));
                std::thread::spawn(move || {
                    let _ = answer(&server, &client, &orders);
                    let _ = (server.shutdown(Shutdown::Both), client.shutdown(Shutdown::Both));
                });
            }
        });
        Proxy { address, orders }
    }

    /// Its address for a program.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Applies `fault` to the next answer that carries pages.
    pub fn order(&self, fault: Fault) {
        self.orders.fault.store(fault as u8, SeqCst);
    }

    /// Number of faults applied so far.
    pub fn done(&self) -> usize {
        self.orders.done.load(SeqCst)
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

fn answer(mut server: &TcpStream, mut client: &TcpStream, orders: &Orders) -> Result<()> {
    let (mut frame, mut held) = (Vec::new(), Vec::new());
    loop {
        let pages = read_frame(&mut server, &mut frame)?;
        let fault = if pages > 0 { orders.fault.swap(0, SeqCst) } else { 0 };
        if fault != 0 {
            orders.done.fetch_add(1, SeqCst);
        }
        match fault {
            fault if fault == Fault::CutMidPage as u8 => {
                return client.write_all(&frame[..frame.len() - PAGE_BYTES / 2]);
            }
            fault if fault == Fault::FlipBit as u8 => {
                let at = frame.len() - PAGE_BYTES / 2;
                frame[at] ^= 4;
            }
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
fn read_frame(server: &mut &TcpStream, frame: &mut Vec<u8>) -> Result<usize> {
    frame.resize(HEADER_BYTES, 0);
    server.read_exact(frame)?;
    let number = |at: usize| usize::from(u16::from_le_bytes([frame[at], frame[at + 1]]));
    let (meta, pages) = (number(META_AT), number(PAGES_AT));
    frame.resize(HEADER_BYTES + meta + pages * PAGE_BYTES, 0);
    server.read_exact(&mut frame[HEADER_BYTES..])?;
    Ok(pages)
}
