//! Bare TCP over loopback, blocking sockets without delay: the asking end pinned to core 0, where a
//! pager serves a fault, the answering end to core 1, where a blade would be; and both on core 0,
//! as it may come on a busy machine. The better of the two arrangements is the floor.

use crate::BenchError;
use crate::sys::{self, PAGE_BYTES};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

use crate::latency::Latencies;

/// Bytes of a request for one page.
const REQUEST_BYTES: usize = 40;
/// Bytes of its answer: header and page.
const RESPONSE_BYTES: usize = 32 + PAGE_BYTES;
/// Bytes of a block of the stream.
const BLOCK_BYTES: usize = 32 << 10;

/// Median round trip of one page.
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

/// Bytes a second of blocks sent without waiting.
pub(super) fn stream_bytes_s(bytes: usize) -> Result<f64, BenchError> {
    let blocks = bytes.div_ceil(BLOCK_BYTES);
    let send = move |mut stream: TcpStream| {
        let block = vec![1u8; BLOCK_BYTES];
        (0..blocks).try_for_each(|_| stream.write_all(&block))
    };
    let receive = move |mut stream: TcpStream| {
        let mut block = vec![0u8; BLOCK_BYTES];
        let start = Instant::now();
        for _ in 0..blocks {
            stream.read_exact(&mut block)?;
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
