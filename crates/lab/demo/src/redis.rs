//! The work of redis: loading, a deterministic query mix, and a full scan that checks every value.
//!
//! The mix is Zipf 0.99 over the records, 95 % GET and 5 % SET, from four connections with one
//! request in flight each. Every connection has records of its own, so the end state and every
//! answer are the same in all rows, however the connections interleave.

use std::hash::Hasher;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use farpool_bench::stage::check_interrupted;
use farpool_bench::{RedisClient, Zipf};
use farpool_policy::Rng;
use farpool_units::exactly;
use twox_hash::XxHash3_64;

use crate::error::{During, Error};
use crate::latency::Latencies;
use crate::records::{Reader, Records};

/// Connections of the mix: more than cores, so that one waiting for a page does not stop all.
const CONNECTIONS: usize = 4;
/// Requests sent together when loading and scanning.
const BATCH: usize = 64;
/// Skew of the mix: what caches are commonly measured with.
const ZIPF_EXPONENT: f64 = 0.99;
/// One request in this many writes a new value.
const REQUESTS_PER_WRITE: u32 = 20;
/// Requests between two checks of the interruption flag.
const REQUESTS_PER_CHECK: u64 = 256;
/// Longest wait for one answer; disk swap at its worst stays far below.
pub const ANSWER_PATIENCE: Duration = Duration::from_secs(20);

/// When redis must have answered everything.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    patience: Duration,
    at: Instant,
}

impl Deadline {
    /// `patience` from now on.
    pub fn after(patience: Duration) -> Deadline {
        Deadline { patience, at: Instant::now() + patience }
    }

    /// Errors after the deadline, and once the user has interrupted. Called in every loop that
    /// takes long.
    fn check(self) -> Result<(), Error> {
        check_interrupted()?;
        match Instant::now() > self.at {
            true => Err(Error::TooSlow(self.patience.as_secs())),
            false => Ok(()),
        }
    }
}

/// True when a server answers on `socket`.
pub fn answers(socket: &Path) -> bool {
    let client = RedisClient::connect(socket, ANSWER_PATIENCE);
    client.and_then(|mut client| client.call(&[b"PING"], &mut Vec::new())).is_ok()
}

fn connect(socket: &Path) -> Result<RedisClient, Error> {
    RedisClient::connect(socket, ANSWER_PATIENCE).during("connecting to redis")
}

/// Sets every record.
pub fn load(socket: &Path, records: &Records, until: Deadline) -> Result<Duration, Error> {
    let started = Instant::now();
    let mut client = connect(socket)?;
    let mut reader = Reader::open(&records.path)?;
    let (mut key, mut value) = (Vec::new(), Vec::new());
    let mut waiting = 0;
    while reader.next(&mut key, &mut value).during("reading the records")? {
        client.queue(&[b"SET", &key, &value]);
        waiting += 1;
        if waiting == BATCH {
            until.check()?;
            settle(&mut client, waiting)?;
            waiting = 0;
        }
    }
    settle(&mut client, waiting)?;
    Ok(started.elapsed())
}

fn settle(client: &mut RedisClient, waiting: usize) -> Result<(), Error> {
    client.send().during("loading redis")?;
    let mut none = Vec::new();
    (0..waiting).try_for_each(|_| client.answer(&mut none)).during("loading redis")
}

/// What the client believes redis holds: the hash and length of each value.
#[derive(Clone, Debug)]
pub struct Beliefs(Vec<Belief>);

#[derive(Clone, Copy, Debug)]
struct Belief {
    hash: u64,
    bytes: u32,
}

impl Beliefs {
    /// What redis holds right after loading.
    pub fn of(records: &Records) -> Beliefs {
        let belief = |known: &crate::records::Known| Belief {
            hash: known.value_hash,
            bytes: known.value_bytes,
        };
        Beliefs(records.known.iter().map(belief).collect())
    }
}

/// What the mix measured.
#[derive(Clone, Debug)]
pub struct Mixed {
    pub requests: u64,
    pub took: Duration,
    pub gets: Latencies,
    pub digest: u64,
}

/// Sends `requests` requests and checks every value that comes back.
pub fn mix(
    socket: &Path,
    records: &Records,
    beliefs: &mut Beliefs,
    requests: u64,
    until: Deadline,
) -> Result<Mixed, Error> {
    let share = requests / CONNECTIONS as u64;
    let mut lanes: Vec<Lane> =
        (0..CONNECTIONS).map(|number| Lane::new(number, records, beliefs)).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        let drive = |lane| scope.spawn(move || Lane::drive(lane, socket, records, share, until));
        let running: Vec<_> = lanes.iter_mut().map(drive).collect();
        running.into_iter().try_for_each(|lane| {
            let died = |_| Error::Program("a thread of the mix panicked".into());
            lane.join().map_err(died)?
        })
    })?;
    let took = started.elapsed();
    let mut gets = Latencies::default();
    let mut digest = XxHash3_64::new();
    for lane in lanes {
        lane.slots.iter().for_each(|slot| beliefs.0[slot.record] = slot.belief);
        gets.merge(lane.gets);
        digest.write(&lane.digest.finish().to_le_bytes());
    }
    Ok(Mixed { requests: share * CONNECTIONS as u64, took, gets, digest: digest.finish() })
}

#[derive(Debug)]
struct Slot {
    record: usize,
    belief: Belief,
}

/// One connection with the records that are its own, the most popular first.
struct Lane {
    slots: Vec<Slot>,
    rng: Rng,
    gets: Latencies,
    digest: XxHash3_64,
}

impl Lane {
    fn new(number: usize, records: &Records, beliefs: &Beliefs) -> Lane {
        let mut rng = Rng::new(number as u64);
        let own = (number..records.known.len()).step_by(CONNECTIONS);
        let mut slots: Vec<Slot> =
            own.map(|record| Slot { record, belief: beliefs.0[record] }).collect();
        for at in (1..slots.len()).rev() {
            slots.swap(at, rng.below(exactly(at + 1)) as usize);
        }
        Lane { slots, rng, gets: Latencies::default(), digest: XxHash3_64::new() }
    }

    fn drive(
        &mut self,
        socket: &Path,
        records: &Records,
        requests: u64,
        until: Deadline,
    ) -> Result<(), Error> {
        let mut client = connect(socket)?;
        if self.slots.is_empty() {
            return Ok(());
        }
        let zipf = Zipf::new(self.slots.len(), ZIPF_EXPONENT);
        self.gets = Latencies::with_capacity(exactly(requests));
        let mut value = Vec::new();
        for number in 0..requests {
            if number % REQUESTS_PER_CHECK == 0 {
                until.check()?;
            }
            let slot = zipf.draw(&mut self.rng);
            let key = &records.known[self.slots[slot].record].key;
            match self.rng.below(REQUESTS_PER_WRITE) {
                0 => self.set(&mut client, slot, key, &mut value)?,
                _ => self.get(&mut client, slot, key, &mut value)?,
            }
        }
        Ok(())
    }

    fn get(
        &mut self,
        client: &mut RedisClient,
        slot: usize,
        key: &[u8],
        value: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let started = Instant::now();
        let answered = client.call(&[b"GET", key], value);
        self.gets.record(started.elapsed());
        let hash = check(key, answered, value, self.slots[slot].belief)?;
        self.digest.write(&hash.to_le_bytes());
        Ok(())
    }

    fn set(
        &mut self,
        client: &mut RedisClient,
        slot: usize,
        key: &[u8],
        value: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let belief = &mut self.slots[slot].belief;
        successor(belief, value);
        belief.hash = XxHash3_64::oneshot(value);
        client.queue(&[b"SET", key, value]);
        client.send().and_then(|()| client.answer(value)).during("a SET")
    }
}

/// Makes the value to be written after the believed one: of the same length, made from its hash.
fn successor(belief: &Belief, value: &mut Vec<u8>) {
    let mut rng = Rng::new(belief.hash);
    let bytes = belief.bytes as usize;
    value.clear();
    while value.len() < bytes {
        value.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    value.truncate(bytes);
}

/// Returns the hash of the value if it is the believed one.
fn check(key: &[u8], answered: io::Result<()>, value: &[u8], belief: Belief) -> Result<u64, Error> {
    let key = String::from_utf8_lossy(key);
    match answered {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::WrongData(format!("{key} is gone")));
        }
        other => other.during("a GET")?,
    }
    let hash = XxHash3_64::oneshot(value);
    if hash != belief.hash {
        let bytes = value.len();
        return Err(Error::WrongData(format!("{key} has {bytes} bytes that were never written")));
    }
    Ok(hash)
}

/// Reads every record back and checks it; the digest covers all of them in order.
pub fn scan(
    socket: &Path,
    records: &Records,
    beliefs: &Beliefs,
    until: Deadline,
) -> Result<(Duration, u64), Error> {
    let started = Instant::now();
    let mut client = connect(socket)?;
    let (mut value, mut digest) = (Vec::new(), XxHash3_64::new());
    let pairs: Vec<_> = records.known.iter().zip(&beliefs.0).collect();
    for batch in pairs.chunks(BATCH) {
        until.check()?;
        batch.iter().for_each(|(known, _)| client.queue(&[b"GET", &known.key]));
        client.send().during("the scan")?;
        for (known, belief) in batch {
            let answered = client.answer(&mut value);
            digest.write(&check(&known.key, answered, &value, **belief)?.to_le_bytes());
        }
    }
    Ok((started.elapsed(), digest.finish()))
}
