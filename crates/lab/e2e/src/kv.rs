//! A key-value server and a client that knows what every value must be.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::rack::Daemon;

/// How long a reply may take, so that a server that hangs fails the test.
const REPLY_WAIT: Duration = Duration::from_secs(20);
/// Requests sent before their replies are read.
const BATCH: usize = 100;

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A client with one connection, for memcached's text protocol.
pub struct Client {
    stream: BufReader<Box<dyn Stream>>,
    /// The longest time that a batch of reads took.
    pub longest: Duration,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("longest", &self.longest).finish_non_exhaustive()
    }
}

/// The value of a key in a version: it contains both, and its length depends on both.
pub fn value(key: usize, version: u32) -> Vec<u8> {
    let mut value = format!("{key}.{version}.").into_bytes();
    value.resize(600 + (key * 131 + version as usize * 17) % 800, b'v');
    value
}

impl Client {
    /// Connects to a server that listens on TCP.
    ///
    /// # Panics
    /// If the connection fails.
    pub fn of(server: &Daemon) -> Client {
        let stream = TcpStream::connect(&server.address).expect("the server listens");
        stream.set_read_timeout(Some(REPLY_WAIT)).expect("sockets have timeouts");
        Client::over(Box::new(stream))
    }

    /// Connects to a server on a Unix socket.
    ///
    /// # Panics
    /// If the connection fails.
    pub fn at(socket: &Path) -> Client {
        let stream = UnixStream::connect(socket).expect("the server listens");
        stream.set_read_timeout(Some(REPLY_WAIT)).expect("sockets have timeouts");
        Client::over(Box::new(stream))
    }

    fn over(stream: Box<dyn Stream>) -> Client {
        Client { stream: BufReader::new(stream), longest: Duration::ZERO }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).expect("the server takes requests");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("the server answers in time");
        line.trim_end().to_owned()
    }

    /// Stores these keys in this version.
    ///
    /// # Panics
    /// If a key is not stored, or the connection fails.
    pub fn store(&mut self, keys: std::ops::Range<usize>, version: u32) {
        for first in keys.clone().step_by(BATCH) {
            let batch = first..keys.end.min(first + BATCH);
            let mut requests = Vec::new();
            for key in batch.clone() {
                let value = value(key, version);
                requests
                    .extend_from_slice(format!("set key{key} 0 0 {}\r\n", value.len()).as_bytes());
                requests.extend_from_slice(&value);
                requests.extend_from_slice(b"\r\n");
            }
            self.send(&requests);
            for key in batch {
                assert_eq!(self.line(), "STORED", "key{key}");
            }
        }
    }

    /// Reads these keys. Returns how many were found; each value must be the one of this version,
    /// to the byte.
    ///
    /// # Panics
    /// If a value is wrong, or the connection fails.
    pub fn check(&mut self, keys: std::ops::Range<usize>, version: u32) -> usize {
        let mut found = 0;
        for first in keys.clone().step_by(BATCH) {
            let names: Vec<String> =
                (first..keys.end.min(first + BATCH)).map(|key| format!("key{key}")).collect();
            let start = Instant::now();
            self.send(format!("get {}\r\n", names.join(" ")).as_bytes());
            loop {
                let line = self.line();
                if line == "END" {
                    break;
                }
                let words: Vec<&str> = line.split(' ').collect();
                assert_eq!(words[0], "VALUE", "{line}");
                let key: usize = words[1].trim_start_matches("key").parse().expect("a key");
                let mut bytes = vec![0; words[3].parse::<usize>().expect("a length") + 2];
                self.stream.read_exact(&mut bytes).expect("a value");
                bytes.truncate(bytes.len() - 2);
                assert!(bytes == value(key, version), "key{key} is not what was stored last");
                found += 1;
            }
            self.longest = self.longest.max(start.elapsed());
        }
        found
    }

    /// Returns one figure of `stats`, or 0 if there is none of this name.
    ///
    /// # Panics
    /// If it is not a number, or the connection fails.
    pub fn figure(&mut self, name: &str) -> u64 {
        self.send(b"stats\r\n");
        let mut found = 0;
        loop {
            let line = self.line();
            if line == "END" {
                return found;
            }
            if let Some(value) = line.strip_prefix(&format!("STAT {name} ")) {
                found = value.parse().expect("a number");
            }
        }
    }
}
