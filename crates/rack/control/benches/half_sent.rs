//! How fast a controller serves others while thousands of requests are half sent to it:
//!
//!     cargo bench -p farpool-control --bench half_sent -- [HALVES] [ASKS]
//!
//! 10,000 half-sent requests and 1,000 asks by default. Both ends of each connection are in this
//! process, so fewer are sent if the limit on open files cannot be raised. The same asks are
//! measured with none half sent, with half-sent heads, and with half-sent bodies, and a raw
//! connection to a listener that answers nothing is the floor.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use farpool_control::{ControlOptions, StoreChoice, serve};

type Anything<T> = Result<T, Box<dyn std::error::Error>>;

const HALVES: usize = 10_000;
const ASKS: usize = 1_000;
const HEAD: &str = "PUT /v1/nodes/x HTTP/1.1\r\nHost: 127.0.0.1\r\n";
const BODY: &str = "PUT /v1/nodes/x HTTP/1.1\r\nHost: 127.0.0.1\r\n\
                    Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{";

fn main() -> Anything<()> {
    let mut args = farpool_benchargs::arguments();
    let halves: usize = args.next().map_or(Ok(HALVES), |text| text.parse())?;
    let asks: usize = args.next().map_or(Ok(ASKS), |text| text.parse())?;
    let descriptors = farpool_kernel::raise_descriptors(halves as u64 * 2 + 1_000);
    let halves = halves.min(usize::try_from(descriptors / 3)?);
    let folder = tempfile::tempdir()?;
    let (ready, address) = channel();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let store = StoreChoice::Redb(folder.path().join("control"));
    let options = ControlOptions::new(SocketAddr::from(([127, 0, 0, 1], 0)), store);
    let server = std::thread::spawn(move || -> Result<(), String> {
        let runtime = tokio::runtime::Runtime::new().map_err(|error| error.to_string())?;
        let on_ready = move |addresses: &[SocketAddr]| {
            let _ = ready.send(addresses[0]);
        };
        let served = serve(options, on_ready, async move { drop(ended.await) });
        runtime.block_on(served).map_err(|error| error.to_string())
    });
    let address = address.recv()?;
    floor(asks)?;
    report("none half sent", &mut measure(address, asks)?);
    for (what, text) in [("half-sent heads", HEAD), ("half-sent bodies", BODY)] {
        let sent: Vec<TcpStream> = send(address, halves, text)?;
        report(&format!("{} {what}", sent.len()), &mut measure(address, asks)?);
    }
    drop(end);
    server.join().map_err(|_| "the server panicked")??;
    Ok(())
}

fn send(address: SocketAddr, count: usize, text: &str) -> Anything<Vec<TcpStream>> {
    let one = |_| {
        let mut stream = TcpStream::connect(address)?;
        // It may have been closed already for those that follow.
        let _ = stream.write_all(text.as_bytes());
        Ok(stream)
    };
    (0..count).map(one).collect()
}

/// Asks, each time on a connection of its own. Returns how long each took.
fn measure(address: SocketAddr, asks: usize) -> Anything<Vec<Duration>> {
    let mut took = Vec::with_capacity(asks);
    for _ in 0..asks {
        let began = Instant::now();
        let mut stream = TcpStream::connect(address)?;
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        if !text.starts_with("HTTP/1.1 200") {
            return Err(format!("not served: {text:?}").into());
        }
        took.push(began.elapsed());
    }
    Ok(took)
}

/// A connection, a line each way, and the end, without HTTP.
fn floor(asks: usize) -> Anything<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let server = std::thread::spawn(move || -> std::io::Result<()> {
        for _ in 0..asks {
            let (mut stream, _) = listener.accept()?;
            let mut bytes = [0; 256];
            let read = stream.read(&mut bytes)?;
            stream.write_all(&bytes[..read])?;
        }
        Ok(())
    });
    let mut took = Vec::with_capacity(asks);
    for _ in 0..asks {
        let began = Instant::now();
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(b"hello")?;
        stream.read_to_end(&mut Vec::new())?;
        took.push(began.elapsed());
    }
    server.join().map_err(|_| "the server panicked")??;
    report("a bare connection", &mut took);
    Ok(())
}

fn report(what: &str, took: &mut [Duration]) {
    took.sort_unstable();
    let at = |share: usize| took[(took.len() * share / 1_000).min(took.len() - 1)];
    let [median, most, longest] = [at(500), at(990), at(1_000)];
    println!("{what:<24} median {median:>9.1?}  99 % {most:>9.1?}  longest {longest:>9.1?}");
}
