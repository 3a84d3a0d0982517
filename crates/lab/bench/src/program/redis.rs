//! redis-server (unmodified) with values of 1 KiB, requested by Zipf's law over a unix socket.
//!
//! Each GET is checked against what was SET. There are several connections, each with `pipeline`
//! requests in flight; redis-benchmark has one by default.

use super::resp::{Client, talk};
use super::zipf::Zipf;
use super::{Measured, checksum};
use crate::BenchError;
use crate::stage::{Peak, Place, Running, Stage};
use crate::workload::{Shuffle, mix};
use farpool_policy::Rng;
use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Bytes of a value.
const VALUE_BYTES: usize = 1024;
/// Approximate bytes that redis needs for a key and its value, with its own overhead.
const PAIR_BYTES: u64 = 1200;
const ZIPF_EXPONENT: f64 = 0.99;
/// An answer that takes longer means that the server is stuck.
const ANSWER_PATIENCE: Duration = Duration::from_secs(60);
/// Number of keys drawn: about ten seconds of work.
const DRAWS: usize = 1 << 20;
/// Requests in flight while keys are loaded.
const LOAD_BATCH: usize = 64;

/// The load that redis is measured under.
#[derive(Debug, Clone)]
pub(crate) struct Redis {
    pub keys: usize,
    pub connections: usize,
    /// Requests in flight on each connection.
    pub pipeline: usize,
    /// Time before requests are counted.
    pub warm_up: Duration,
    /// Time in which requests are counted.
    pub measure: Duration,
}

impl Redis {
    pub(crate) fn guess_bytes(&self) -> u64 {
        self.keys as u64 * PAIR_BYTES
    }

    pub(crate) fn run(
        &self,
        stage: &Stage,
        place: Place,
        need_bytes: u64,
    ) -> Result<Measured, BenchError> {
        let start = Instant::now();
        let socket = stage.folder.join("redis.sock");
        let _ = std::fs::remove_file(&socket);
        let mut launch = stage.launch(place, &command(&stage.folder, &socket), need_bytes)?;
        let mut server = Running::start("redis-server", launch.command.stdout(Stdio::null()))?;
        let peak = Peak::watch(server.id());
        let result = self.ask(&mut server, &socket, stage.patience);
        // The server's exit and messages say more than a broken connection does.
        if result.is_err() {
            server.check_alive().map_err(|error| launch.explained(error))?;
        }
        server.end();
        let (ops_s, busy) = result?;
        // Every answer was checked: the same keys mean the same result.
        let checksum = checksum(&self.keys.to_le_bytes());
        Ok(Measured { ops_s, checksum, peak_bytes: peak.stop(), took: start.elapsed(), busy })
    }

    fn ask(
        &self,
        server: &mut Running,
        socket: &Path,
        patience: Duration,
    ) -> Result<(f64, Option<f64>), BenchError> {
        let mut first = connect_when_ready(server, socket, patience)?;
        self.load(&mut first, server, patience)?;
        let others =
            (1..self.connections).map(|_| Client::connect(socket, ANSWER_PATIENCE)).collect();
        let mut clients: Vec<Client> = Result::map_err(others, talk)?;
        clients.push(first);
        self.measure(&mut clients, server)
    }

    fn load(
        &self,
        client: &mut Client,
        server: &mut Running,
        patience: Duration,
    ) -> Result<(), BenchError> {
        let (start, mut answer) = (Instant::now(), Vec::new());
        for batch in (0..self.keys).step_by(LOAD_BATCH) {
            let batch = batch..self.keys.min(batch + LOAD_BATCH);
            for key in batch.clone() {
                client.queue(&[b"SET", name_of(key).as_bytes(), &value_of(key)]);
            }
            client.send().map_err(talk)?;
            for _ in batch {
                client.answer(&mut answer).map_err(talk)?;
            }
            server.check_alive()?;
            if start.elapsed() > patience {
                let (program, seconds) = ("loading redis".to_owned(), patience.as_secs_f64());
                return Err(BenchError::TooSlow { program, seconds });
            }
        }
        Ok(())
    }

    /// Returns GETs a second, and how busy the server was.
    fn measure(
        &self,
        clients: &mut [Client],
        server: &mut Running,
    ) -> Result<(f64, Option<f64>), BenchError> {
        let mut keys = Keys::draw(self.keys);
        let mut asked: Vec<Vec<usize>> = vec![Vec::new(); clients.len()];
        for (client, asked) in clients.iter_mut().zip(&mut asked) {
            request(client, asked, &mut keys, self.pipeline).map_err(talk)?;
        }
        let start = Instant::now();
        let (mut counted_from, mut count, mut busy_from) = (start, 0u64, None);
        let mut value = Vec::with_capacity(VALUE_BYTES + 2);
        while start.elapsed() < self.warm_up + self.measure {
            if counted_from == start && start.elapsed() >= self.warm_up {
                (counted_from, count, busy_from) = (Instant::now(), 0, busy_time(server.id()));
            }
            server.check_alive()?;
            for (client, asked) in clients.iter_mut().zip(&mut asked) {
                for key in asked.iter() {
                    client.answer(&mut value).map_err(talk)?;
                    check(*key, &value)?;
                }
                count += asked.len() as u64;
                request(client, asked, &mut keys, self.pipeline).map_err(talk)?;
            }
        }
        let seconds = counted_from.elapsed().as_secs_f64();
        let busy = busy_time(server.id()).zip(busy_from);
        let busy = busy.map(|(now, then)| now.saturating_sub(then).as_secs_f64() / seconds);
        Ok((count as f64 / seconds, busy))
    }
}

/// Returns the processor time of a process so far. Returns None for Farpool's keeper, whose time is
/// not the server's.
fn busy_time(id: u32) -> Option<Duration> {
    let name = std::fs::read_to_string(format!("/proc/{id}/comm")).ok()?;
    let times = std::fs::read_to_string(format!("/proc/{id}/schedstat")).ok()?;
    let ns = times.split_whitespace().next()?.parse().ok()?;
    name.starts_with("redis").then_some(Duration::from_nanos(ns))
}

/// The keys in the order in which they are requested, with popular ones spread over memory. They
/// are drawn before anything is measured, since drawing a key costs the client as much as a
/// request, and are reused in turn.
struct Keys {
    drawn: Vec<usize>,
    next: usize,
}

impl Keys {
    fn draw(keys: usize) -> Self {
        let (zipf, spread) = (Zipf::new(keys, ZIPF_EXPONENT), Shuffle::new(keys, 17));
        let mut rng = Rng::new(23);
        Self { drawn: (0..DRAWS).map(|_| spread.at(zipf.draw(&mut rng))).collect(), next: 0 }
    }

    fn next(&mut self) -> usize {
        let key = self.drawn[self.next];
        self.next = (self.next + 1) % self.drawn.len();
        key
    }
}

fn request(
    client: &mut Client,
    asked: &mut Vec<usize>,
    keys: &mut Keys,
    pipeline: usize,
) -> std::io::Result<()> {
    asked.clear();
    for _ in 0..pipeline {
        let key = keys.next();
        client.queue(&[b"GET", name_of(key).as_bytes()]);
        asked.push(key);
    }
    client.send()
}

/// Checks the ends of every value, and all bytes for one key in eight: the client's own work must
/// not dominate the measurement.
fn check(key: usize, value: &[u8]) -> Result<(), BenchError> {
    let is_right = if key.is_multiple_of(8) {
        value == value_of(key)
    } else {
        value.len() == VALUE_BYTES
            && value[..8] == word_of(key, 0)
            && value[1016..] == word_of(key, 127)
    };
    if is_right {
        return Ok(());
    }
    let detail = format!("the {} bytes of key {key} are not what was set", value.len());
    Err(BenchError::WrongData { workload: "redis", detail })
}

fn name_of(key: usize) -> String {
    format!("key:{key:012}")
}

/// Returns bytes that follow from the key and do not compress.
fn value_of(key: usize) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    for (i, word) in value.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&word_of(key, i as u64));
    }
    value
}

fn word_of(key: usize, word: u64) -> [u8; 8] {
    mix(key as u64 * 128 + word).to_le_bytes()
}

/// Returns a command without a TCP port and without files: only memory is measured.
fn command(folder: &Path, socket: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["redis-server".into(), "--unixsocket".into()];
    words.push(socket.into());
    words.extend(["--port", "0", "--save", "", "--appendonly", "no", "--dir"].map(OsString::from));
    words.push(folder.into());
    words
}

fn connect_when_ready(
    server: &mut Running,
    socket: &Path,
    patience: Duration,
) -> Result<Client, BenchError> {
    let deadline = Instant::now() + patience;
    loop {
        server.check_alive()?;
        match ping(socket) {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > deadline => return Err(talk(error)),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn ping(socket: &Path) -> std::io::Result<Client> {
    let mut client = Client::connect(socket, ANSWER_PATIENCE)?;
    client.call(&[b"PING"], &mut Vec::new())?;
    Ok(client)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::Door;

    #[test]
    fn redis_serves_what_was_set_or_the_row_is_skipped() {
        let folder = tempfile::tempdir().expect("a folder for the socket");
        let stage = Stage {
            farpool: "farpool".into(),
            folder: folder.path().to_owned(),
            patience: Duration::from_secs(20),
            door: Door::default(),
        };
        let redis = Redis {
            keys: 500,
            connections: 3,
            pipeline: 2,
            warm_up: Duration::from_millis(50),
            measure: Duration::from_millis(100),
        };
        match redis.run(&stage, Place::Local, 0) {
            Ok(measured) => assert!(measured.ops_s > 100.0 && measured.peak_bytes > 0),
            Err(BenchError::Lacking(reason)) => eprintln!("skipped: {reason}"),
            Err(error) => panic!("{error}"),
        }
    }
}
