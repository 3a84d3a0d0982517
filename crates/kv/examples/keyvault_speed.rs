//! How fast a running server answers KeyVault: one at a time, and with many in flight.
//!
//! `keyvault_speed ADDR [DEPTH [SECONDS]]` with ADDR as `tcp:127.0.0.1:PORT`, `unix:PATH` or `shared:PATH`. 100,000 keys of
//! 12 bytes with values of 64 bytes, drawn uniformly; one connection to shard 0.

use std::time::{Duration, Instant};

use farpool_keyvault::client::{Address, Connection};
use farpool_keyvault::frame::Status;
use farpool_keyvault::message::{Request, SetMode};

const KEYS: u64 = 100_000;

fn key(number: u64) -> [u8; 12] {
    let mut key = *b"key000000000";
    let mut rest = number;
    for digit in key[3..].iter_mut().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
    }
    key
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("give tcp:IP:PORT, unix:PATH or shared:PATH")?;
    let depth: usize = arguments.next().map_or(Ok(1), |depth| depth.parse())?;
    let seconds: f64 = arguments.next().map_or(Ok(2.0), |seconds| seconds.parse())?;
    let address = match address.split_once(':') {
        Some(("tcp", at)) => Address::Tcp(at.parse()?),
        Some(("unix", path)) => Address::Unix(path.into()),
        Some(("shared", path)) => Address::Shared(path.into()),
        _ => return Err("give tcp:IP:PORT, unix:PATH or shared:PATH".into()),
    };
    let unchecked = matches!(address, Address::Shared(_));
    let mut connection = Connection::connect(&address, 0, 1024, unchecked)?;
    let value = [b'x'; 64];
    for number in 0..KEYS {
        let key = key(number);
        let set = Request::Set {
            mode: SetMode::Set,
            key: &key,
            value: &value,
            client_flags: 0,
            exptime: 0,
            cas: 0,
        };
        connection.send(&set)?;
        if !connection.has_credit() {
            connection.flush()?;
            while connection.unanswered() > 0 {
                connection.receive(|answer| assert_eq!(answer.status, Status::Ok))?;
            }
        }
    }
    connection.flush()?;
    while connection.unanswered() > 0 {
        connection.receive(|_| {})?;
    }
    let mut state = 88_172_645_463_325_252u64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        key(state % KEYS)
    };
    for _ in 0..3 {
        let start = Instant::now();
        let mut answered = 0u64;
        let mut rounds = Vec::with_capacity(4_000_000);
        let mut sent = Instant::now();
        while start.elapsed() < Duration::from_secs_f64(seconds) {
            while (connection.unanswered() as usize) < depth {
                connection.send(&Request::Get { key: &draw() })?;
            }
            connection.flush()?;
            connection.receive(|answer| {
                assert!(answer.status == Status::Ok && answer.body.len() == 80);
                answered += 1;
            })?;
            if depth == 1 {
                let now = Instant::now();
                rounds.push((now - sent).as_nanos());
                sent = now;
            }
        }
        let rate = answered as f64 / start.elapsed().as_secs_f64();
        rounds.sort_unstable();
        let at = |share: usize| rounds.get(rounds.len() * share / 100).copied().unwrap_or(0);
        println!("depth {depth}: {rate:.0} requests/s, p50 {} ns, p99 {} ns", at(50), at(99));
    }
    Ok(())
}
