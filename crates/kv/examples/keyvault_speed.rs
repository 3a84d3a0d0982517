//! How fast a running server answers: one request at a time, and with many in flight.
//!
//! `keyvault_speed ADDR [DEPTH [SECONDS [SHARD]]]` with ADDR as `tcp:IP:PORT`, `unix:PATH` or `shared:PATH` for KeyVault, and as
//! `text:IP:PORT` for memcached's text protocol, asked in the same way. 100,000 keys of 12 bytes with values of 64
//! bytes, drawn uniformly; one connection, with SHARD to that shard and for its keys only. Each round prints its rate, its round trips if DEPTH is 1, and the
//! processor time of this client for each request.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use farpool_keyvault::client::{Address, Connection};
use farpool_keyvault::frame::Status;
use farpool_keyvault::message::{Request, SetMode};
use farpool_keyvault::owner::{hash_key, shard_of};

const KEYS: u64 = 100_000;
const VALUE: [u8; 64] = [b'x'; 64];
const ROUNDS: usize = 3;
/// Requests of one batch while the keys are stored.
const FILL_BATCH: usize = 256;

type Error = Box<dyn std::error::Error>;

fn key(number: u64) -> [u8; 12] {
    let mut key = *b"key000000000";
    let mut rest = number;
    for digit in key[3..].iter_mut().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    key
}

/// A client of either protocol. Replies are checked for what they are.
enum Client {
    Light(Connection),
    Text { stream: TcpStream, out: Vec<u8>, input: Vec<u8>, unanswered: usize, reply: Vec<u8> },
}

impl Client {
    fn connect(address: &str, shard: u16) -> Result<Self, Error> {
        let light = match address.split_once(':') {
            Some(("text", at)) => {
                let stream = TcpStream::connect(at)?;
                stream.set_nodelay(true)?;
                let (out, input, reply) = (Vec::new(), Vec::new(), b"STORED\r\n".to_vec());
                return Ok(Self::Text { stream, out, input, unanswered: 0, reply });
            }
            Some(("tcp", at)) => Address::Tcp(at.parse()?),
            Some(("unix", path)) => Address::Unix(path.into()),
            Some(("shared", path)) => Address::Shared(path.into()),
            _ => return Err("give text:IP:PORT, tcp:IP:PORT, unix:PATH or shared:PATH".into()),
        };
        // Memory needs no checksums; sockets have them here, the text protocol never.
        let unchecked = matches!(light, Address::Shared(_));
        Ok(Self::Light(Connection::connect(&light, shard, 1024, unchecked)?))
    }

    fn set(&mut self, key: &[u8]) -> Result<(), Error> {
        match self {
            Self::Light(connection) => {
                let mode = SetMode::Set;
                let set =
                    Request::Set { mode, key, value: &VALUE, client_flags: 0, exptime: 0, cas: 0 };
                connection.send(&set)?;
            }
            Self::Text { out, unanswered, .. } => {
                out.extend_from_slice(b"set ");
                out.extend_from_slice(key);
                out.extend_from_slice(b" 0 0 64\r\n");
                out.extend_from_slice(&VALUE);
                out.extend_from_slice(b"\r\n");
                *unanswered += 1;
            }
        }
        Ok(())
    }

    fn get(&mut self, key: &[u8]) -> Result<(), Error> {
        match self {
            Self::Light(connection) => {
                connection.send(&Request::Get { key })?;
            }
            Self::Text { out, unanswered, .. } => {
                out.extend_from_slice(b"get ");
                out.extend_from_slice(key);
                out.extend_from_slice(b"\r\n");
                *unanswered += 1;
            }
        }
        Ok(())
    }

    fn shards(&self) -> usize {
        match self {
            Self::Light(connection) => usize::from(connection.granted().shard),
            Self::Text { .. } => 1,
        }
    }

    fn unanswered(&self) -> usize {
        match self {
            Self::Light(connection) => connection.unanswered() as usize,
            Self::Text { unanswered, .. } => *unanswered,
        }
    }

    /// From now on replies to gets are expected.
    fn expect_values(&mut self) {
        if let Self::Text { reply, .. } = self {
            *reply = [&b"VALUE key000000000 0 64\r\n"[..], &VALUE, b"\r\nEND\r\n"].concat();
        }
    }

    /// Sends what is to be sent and waits for at least one reply; how many came.
    fn exchange(&mut self, body_bytes: usize) -> Result<usize, Error> {
        match self {
            Self::Light(connection) => {
                let mut answered = 0;
                connection.flush()?;
                connection.receive(|answer| {
                    assert!(answer.status == Status::Ok && answer.body.len() == body_bytes);
                    answered += 1;
                })?;
                Ok(answered)
            }
            Self::Text { stream, out, input, unanswered, reply } => {
                stream.write_all(out)?;
                out.clear();
                let mut buffer = [0; 64 << 10];
                let bytes = stream.read(&mut buffer)?;
                assert!(bytes > 0, "the server left");
                input.extend_from_slice(&buffer[..bytes]);
                let whole = input.len() / reply.len() * reply.len();
                for answer in input[..whole].chunks(reply.len()) {
                    assert!(answer[..5] == reply[..5] && answer.ends_with(b"\r\n"));
                }
                input.drain(..whole);
                let answered = whole / reply.len();
                *unanswered -= answered;
                Ok(answered)
            }
        }
    }
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("give text:, tcp:, unix: or shared: and an address")?;
    let depth: usize = arguments.next().map_or(Ok(1), |depth| depth.parse())?;
    let seconds: f64 = arguments.next().map_or(Ok(2.0), |seconds| seconds.parse())?;
    let shard: Option<u16> = arguments.next().map(|shard| shard.parse()).transpose()?;
    let mut client = Client::connect(&address, shard.unwrap_or(0))?;
    let shards = client.shards();
    let is_asked = |key: &[u8]| {
        shard.is_none_or(|shard| shard_of(hash_key(key), shards) == usize::from(shard))
    };
    let keys: Vec<_> = (0..KEYS).map(key).filter(|key| is_asked(key)).collect();
    for batch in keys.chunks(FILL_BATCH) {
        for key in batch {
            client.set(key)?;
        }
        while client.unanswered() > 0 {
            // The CAS number of the new item.
            client.exchange(8)?;
        }
    }
    client.expect_values();
    let mut state = 88_172_645_463_325_252u64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        keys[usize::try_from(state % keys.len() as u64).unwrap_or(0)]
    };
    for _ in 0..ROUNDS {
        let (start, cpu) = (Instant::now(), processor_time());
        let mut answered = 0;
        let mut round_trips_ns = Vec::with_capacity(4_000_000);
        let mut sent = Instant::now();
        while start.elapsed() < Duration::from_secs_f64(seconds) {
            while client.unanswered() < depth {
                client.get(&draw())?;
            }
            // Client flags, CAS number and value of the item.
            answered += client.exchange(80)?;
            if depth == 1 {
                let now = Instant::now();
                round_trips_ns.push((now - sent).as_nanos());
                sent = now;
            }
        }
        round_trips_ns.sort_unstable();
        let at = |percent: usize| {
            round_trips_ns.get(round_trips_ns.len() * percent / 100).copied().unwrap_or(0)
        };
        let rate = answered as f64 / start.elapsed().as_secs_f64();
        let each_ns = (processor_time() - cpu).as_nanos() / answered.max(1) as u128;
        println!(
            "{address} depth {depth}: {rate:.0} requests/s, p50 {} ns, p99 {} ns, client {each_ns} ns/request",
            at(50),
            at(99)
        );
        while client.unanswered() > 0 {
            client.exchange(80)?;
        }
    }
    Ok(())
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
