//! How fast a running server answers: one request at a time, and with many in flight.
//!
//! `keyvault_speed ADDR [DEPTH [SECONDS [SHARD [BYTES]]]]` with ADDR as `tcp:IP:PORT`, `unix:PATH`
//! or `shared:PATH` for KeyVault, as `lease:PATH` for leased values, read where they lie (the
//! server needs `--keyvault-leases`), and as `text:IP:PORT` for memcached's text protocol, with the
//! same requests. 100,000 keys of 12 bytes with values of BYTES (64), or as many as take 256 MiB
//! together, drawn uniformly; one connection, with SHARD (a number, or `any`) to that shard and for
//! its keys only. Each round prints its rate, its round trips if DEPTH is 1, and the processor time
//! of this client for each request.
//!
//! A value, copied or leased, is read from front to back once it has arrived: one byte of every
//! 64-byte line.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use farpool_kernel::thread_cpu_time;
use farpool_keyvault::client::{Address, Connection};
use farpool_keyvault::frame::Status;
use farpool_keyvault::lease::Leases;
use farpool_keyvault::message::{Request, SetMode};
use farpool_keyvault::owner::{hash_key, shard_of};
use farpool_units::exactly;

const KEYS: u64 = 100_000;
/// Size of all values together: they must fit into the server's memory.
const VALUES_BYTES: u64 = 256 << 20;
const FILL: u8 = b'x';
const VALUE_BYTES: usize = 64;
const LINE_BYTES: usize = 64;
const ROUNDS: usize = 3;
/// Requests in one batch while the keys are stored.
const FILL_BATCH: usize = 256;

type Error = Box<dyn std::error::Error>;

fn key(number: u64) -> [u8; 12] {
    let mut key = *b"key000000000";
    let mut rest = number;
    for digit in key[3..].iter_mut().rev() {
        *digit = b'0' + exactly::<u8, _>(rest % 10);
        rest /= 10;
    }
    key
}

/// A client of either protocol. It checks every reply.
struct Client {
    value: Vec<u8>,
    link: Link,
}

enum Link {
    KeyVault { connection: Connection, leases: Option<Leases> },
    Text { stream: TcpStream, out: Vec<u8>, input: Vec<u8>, unanswered: usize, reply: Vec<u8> },
}

/// Whether a value is what was stored; checks one byte of every line.
fn is_right(value: &[u8], bytes: usize) -> bool {
    value.len() == bytes && value.iter().step_by(LINE_BYTES).all(|&byte| byte == FILL)
}

impl Client {
    fn connect(address: &str, shard: u16, value_bytes: usize) -> Result<Self, Error> {
        let value = vec![FILL; value_bytes];
        let (keyvault, is_leasing) = match address.split_once(':') {
            Some(("text", at)) => {
                let stream = TcpStream::connect(at)?;
                stream.set_nodelay(true)?;
                let (out, input, reply) = (Vec::new(), Vec::new(), b"STORED\r\n".to_vec());
                let link = Link::Text { stream, out, input, unanswered: 0, reply };
                return Ok(Self { value, link });
            }
            Some(("tcp", at)) => (Address::Tcp(at.parse()?), false),
            Some(("unix", path)) => (Address::Unix(path.into()), false),
            Some(("shared", path)) => (Address::Shared(path.into()), false),
            Some(("lease", path)) => (Address::Shared(path.into()), true),
            _ => {
                return Err(
                    "give text:IP:PORT, tcp:IP:PORT, or unix:, shared: or lease:PATH".into()
                );
            }
        };
        // Shared memory needs no checksums; over sockets KeyVault has them here, the text protocol
        // never.
        let unchecked = matches!(keyvault, Address::Shared(_));
        let connection = if is_leasing {
            Connection::connect_leasing(&keyvault, shard, 1024, unchecked, 0)?
        } else {
            Connection::connect(&keyvault, shard, 1024, unchecked)?
        };
        let leases = connection.leases().cloned();
        if is_leasing && leases.is_none() {
            return Err("the server gives no leases: start it with --keyvault-leases".into());
        }
        Ok(Self { value, link: Link::KeyVault { connection, leases } })
    }

    fn set(&mut self, key: &[u8]) -> Result<(), Error> {
        let value = &self.value[..];
        match &mut self.link {
            Link::KeyVault { connection, .. } => {
                let mode = SetMode::Set;
                connection.send(&Request::Set {
                    mode,
                    key,
                    value,
                    client_flags: 0,
                    exptime: 0,
                    cas: 0,
                })?;
            }
            Link::Text { out, unanswered, .. } => {
                out.extend_from_slice(b"set ");
                out.extend_from_slice(key);
                out.extend_from_slice(format!(" 0 0 {}\r\n", value.len()).as_bytes());
                out.extend_from_slice(value);
                out.extend_from_slice(b"\r\n");
                *unanswered += 1;
            }
        }
        Ok(())
    }

    fn get(&mut self, key: &[u8]) -> Result<(), Error> {
        match &mut self.link {
            Link::KeyVault { connection, leases: None } => {
                connection.send(&Request::Get { key })?;
            }
            Link::KeyVault { connection, leases: Some(_) } => {
                connection.send(&Request::GetLease { key })?;
            }
            Link::Text { out, unanswered, .. } => {
                out.extend_from_slice(b"get ");
                out.extend_from_slice(key);
                out.extend_from_slice(b"\r\n");
                *unanswered += 1;
            }
        }
        Ok(())
    }

    fn shards(&self) -> usize {
        match &self.link {
            Link::KeyVault { connection, .. } => usize::from(connection.granted().shard),
            Link::Text { .. } => 1,
        }
    }

    fn unanswered(&self) -> usize {
        match &self.link {
            Link::KeyVault { connection, .. } => connection.unanswered() as usize,
            Link::Text { unanswered, .. } => *unanswered,
        }
    }

    /// Whether one more request may be sent. RELEASEs take credits, too.
    fn has_credit(&self) -> bool {
        match &self.link {
            Link::KeyVault { connection, .. } => connection.has_credit(),
            Link::Text { .. } => true,
        }
    }

    /// Expects replies to gets from now on.
    fn expect_values(&mut self) {
        if let Link::Text { reply, .. } = &mut self.link {
            let head = format!("VALUE key000000000 0 {}\r\n", self.value.len());
            *reply = [head.as_bytes(), &self.value, b"\r\nEND\r\n"].concat();
        }
    }

    /// Sends pending requests and waits for at least one reply, with values if those are `gets`.
    /// Returns how many replies arrived, and how many of them were leases.
    fn exchange(&mut self, gets: bool) -> Result<(usize, usize), Error> {
        let value_bytes = self.value.len();
        match &mut self.link {
            Link::KeyVault { connection, leases } => {
                let (mut answered, mut leased) = (0, 0);
                connection.flush()?;
                connection.receive(|answer| {
                    assert!(answer.status == Status::Ok, "{:?}", answer.status);
                    answered += 1;
                    if !gets {
                        return;
                    }
                    if let Some(leases) = leases {
                        let value = leases.read(answer.body).expect("an answer to GETLEASE");
                        assert!(is_right(&value, value_bytes));
                        leased += usize::from(value.is_leased());
                    } else {
                        assert!(is_right(&answer.body[16..], value_bytes));
                    }
                })?;
                Ok((answered, leased))
            }
            Link::Text { stream, out, input, unanswered, reply } => {
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
                Ok((answered, 0))
            }
        }
    }
}

fn main() -> Result<(), Error> {
    let mut arguments = farpool_benchargs::arguments();
    let address = arguments.next().ok_or("give text:, tcp:, unix: or shared: and an address")?;
    let depth: usize = arguments.next().map_or(Ok(1), |depth| depth.parse())?;
    let seconds: f64 = arguments.next().map_or(Ok(2.0), |seconds| seconds.parse())?;
    let shard: Option<u16> =
        arguments.next().filter(|it| it != "any").map(|shard| shard.parse()).transpose()?;
    let value_bytes: usize = arguments.next().map_or(Ok(VALUE_BYTES), |bytes| bytes.parse())?;
    let mut client = Client::connect(&address, shard.unwrap_or(0), value_bytes)?;
    let shards = client.shards();
    let is_asked = |key: &[u8]| {
        shard.is_none_or(|shard| shard_of(hash_key(key), shards) == usize::from(shard))
    };
    let count = KEYS.min(VALUES_BYTES / value_bytes.max(1) as u64).max(1);
    let keys: Vec<_> = (0..count).map(key).filter(|key| is_asked(key)).collect();
    let batch = (FILL_BATCH * VALUE_BYTES / value_bytes.max(1)).clamp(1, FILL_BATCH);
    for batch in keys.chunks(batch) {
        for key in batch {
            client.set(key)?;
        }
        while client.unanswered() > 0 {
            client.exchange(false)?;
        }
    }
    client.expect_values();
    let mut state = 88_172_645_463_325_252u64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        keys[exactly::<usize, _>(state % keys.len() as u64)]
    };
    for _ in 0..ROUNDS {
        let (start, cpu) = (Instant::now(), thread_cpu_time());
        let (mut answered, mut leased) = (0, 0);
        let mut round_trips_ns = Vec::with_capacity(4_000_000);
        let mut sent = Instant::now();
        while start.elapsed() < Duration::from_secs_f64(seconds) {
            while client.unanswered() < depth && client.has_credit() {
                client.get(&draw())?;
            }
            let came = client.exchange(true)?;
            (answered, leased) = (answered + came.0, leased + came.1);
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
        let each_ns = (thread_cpu_time() - cpu).as_nanos() / answered.max(1) as u128;
        println!(
            "{address} depth {depth}, {value_bytes} bytes: {rate:.0} requests/s, p50 {} ns, p99 {} \
             ns, client {each_ns} ns/request{}",
            at(50),
            at(99),
            if leased > 0 { format!(", {leased} of {answered} leased") } else { String::new() }
        );
        while client.unanswered() > 0 {
            client.exchange(true)?;
        }
    }
    Ok(())
}
