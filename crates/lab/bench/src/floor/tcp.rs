//! Bare TCP over loopback, on blocking sockets without delay: the requesting end is pinned to core
//! 0, where a pager serves a fault, the answering end to core 1, where a blade would be. The round
//! trip is also measured with both on core 0, as may happen on a busy machine; the better of the
//! two arrangements is the floor.

use super::copy::filled;
use crate::BenchError;
use crate::sys::{self, Mapping};
use crate::workload::Shuffle;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

use farpool_units::PAGE_BYTES;

use crate::latency::Latencies;

/// Bytes of a request for one page.
const REQUEST_BYTES: usize = 40;
/// Bytes of the answer: header and page.
const RESPONSE_BYTES: usize = 32 + PAGE_BYTES;
/// Bytes of a block of the stream.
const BLOCK_BYTES: usize = 32 << 10;
/// Places into which blocks are received in turn: 1 MiB.
const PLACES: usize = 32;

/// Returns the median round trip of one page, in ns.
pub(super) fn ping_pong_p50_ns(round_trips: usize) -> Result<f64, BenchError> {
    let apart = ping_pong(round_trips, 1)?;
    let together = ping_pong(round_trips, 0)?;
    Ok(apart.min(together))
}

fn ping_pong(round_trips: usize, answering_core: usize) -> Result<f64, BenchError> {
    let answer = move |mut stream: TcpStream| {
        let mut request = [0u8; REQUEST_BYTES];
        let response = [1u8; RESPONSE_BYTES];
        for _ in 0..round_trips {
            stream.read_exact(&mut request)?;
            stream.write_all(&response)?;
        }
        Ok(())
    };
    let ask = move |mut stream: TcpStream| {
        let request = [2u8; REQUEST_BYTES];
        let mut response = [0u8; RESPONSE_BYTES];
        let mut latencies = Latencies::new();
        for _ in 0..round_trips {
            let start = Instant::now();
            stream.write_all(&request)?;
            stream.read_exact(&mut response)?;
            latencies.record(start.elapsed());
        }
        Ok(latencies.quantile_ns(0.5))
    };
    connected(answering_core, answer, ask)
}

/// Returns the bytes per second of blocks that are sent without waiting, in random order from
/// `memory_bytes`, into as many places as a client has blocks in flight: the bytes that a blade
/// moves do not come from a cache either.
pub(super) fn stream_bytes_s(bytes: usize, memory_bytes: usize) -> Result<f64, BenchError> {
    let blocks = bytes.div_ceil(BLOCK_BYTES);
    let (memory, mut places) = (filled(memory_bytes)?, Mapping::small_pages(PLACES * BLOCK_BYTES)?);
    let send = move |mut stream: TcpStream| {
        let order = Shuffle::new(memory.len() / BLOCK_BYTES, 5);
        (0..blocks).try_for_each(|block| {
            let at = order.at(block % (memory.len() / BLOCK_BYTES)) * BLOCK_BYTES;
            stream.write_all(&memory.bytes()[at..at + BLOCK_BYTES])
        })
    };
    let receive = move |mut stream: TcpStream| {
        let start = Instant::now();
        for block in 0..blocks {
            let at = block % PLACES * BLOCK_BYTES;
            stream.read_exact(&mut places.bytes_mut()[at..at + BLOCK_BYTES])?;
        }
        Ok((blocks * BLOCK_BYTES) as f64 / start.elapsed().as_secs_f64())
    };
    connected(1, send, receive)
}

/// Runs `far` on `far_core` and `near` on core 0, at the two ends of a connection.
fn connected(
    far_core: usize,
    far: impl FnOnce(TcpStream) -> io::Result<()> + Send,
    near: impl FnOnce(TcpStream) -> io::Result<f64> + Send,
) -> Result<f64, BenchError> {
    let failed = |error| BenchError::os("exchange bytes over TCP loopback")(error);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let result = std::thread::scope(|scope| {
        let far = scope.spawn(move || {
            sys::pin_to_core(far_core);
            far(prepared(listener.accept()?.0)?)
        });
        let near = scope.spawn(move || {
            sys::pin_to_core(0);
            near(prepared(TcpStream::connect(address)?)?)
        });
        let gone = |_| Err(io::Error::other("a measuring thread panicked"));
        let value = near.join().unwrap_or_else(gone)?;
        far.join().unwrap_or_else(|_| Err(io::Error::other("a measuring thread panicked")))?;
        Ok(value)
    });
    result.map_err(failed)
}

fn prepared(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}
