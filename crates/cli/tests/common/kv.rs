//! The real server with values that identify their key and version, and a model of the versions
//! that may be found for each key.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use farpool_testkit::ports::free_address;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::farpool;

/// How long to wait for a reply or condition, so that a hang fails the test instead of blocking the
/// whole run.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Requests sent before their replies are read.
const BATCH: usize = 200;

/// A server, which is killed when dropped.
pub(crate) struct Kv {
    pub child: Child,
    pub address: SocketAddr,
    pub client: Client,
    log: PathBuf,
    _output: BufReader<ChildStdout>,
    /// Called after the kill, so that the process can end: it releases a disk that hangs.
    pub release: Option<Box<dyn FnOnce()>>,
}

impl Kv {
    pub(crate) fn start(home: &Path, flags: &[&str]) -> Self {
        Self::start_with(home, flags, |_| ())
    }

    /// Like [`Self::start`], with changes to the command, such as its environment.
    pub(crate) fn start_with(
        home: &Path,
        flags: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let address = free_address();
        let log = home.join(format!("log-{}", address.port()));
        let mut command = farpool(home);
        command.args(["kv", "--json", "-p", &address.port().to_string()]).args(flags);
        command.stdout(Stdio::piped()).stderr(File::create(&log).expect("a file for its log"));
        change(&mut command);
        let mut child = command.spawn().expect("the server starts");
        let mut output = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("it prints a line");
        let told = || std::fs::read_to_string(&log).unwrap_or_default();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{}", told()));
        assert_eq!(ready["event"], "ready");
        let client = Client::connect(address);
        Self { child, address, client, log, _output: output, release: None }
    }

    /// Its standard error so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).expect("its log is there")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), signal).expect("the server takes the signal");
    }

    /// Waits until it ends, for at most `limit`. Returns its exit code.
    pub(crate) fn ends_within(&mut self, limit: Duration) -> Option<i32> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status.code();
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A number from the process's `status`, given there in kB.
    pub(crate) fn status_bytes(&self, name: &str) -> usize {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(path).expect("the server lives");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kibibytes = line.and_then(|it| it.trim().strip_suffix(" kB")?.parse::<usize>().ok());
        kibibytes.unwrap_or_else(|| panic!("status has {name} in kB")) << 10
    }
}

impl Drop for Kv {
    fn drop(&mut self) {
        // SIGKILL; it makes no difference if it has ended already.
        let _ = self.child.kill();
        if let Some(release) = self.release.take() {
            release();
        }
        let _ = self.child.wait();
    }
}

/// A client of the text protocol.
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        stream.set_write_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        stream.set_nodelay(true).expect("it is TCP");
        Self(BufReader::new(stream))
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).expect("the server takes requests");
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        let bytes = self.0.read_line(&mut line).expect("the server answers");
        assert!(bytes > 0, "the server left");
        line.trim_end().to_owned()
    }

    pub(crate) fn ask(&mut self, request: &str) -> String {
        self.send(format!("{request}\r\n").as_bytes());
        self.line()
    }

    pub(crate) fn stat(&mut self, name: &str) -> u64 {
        self.send(b"stats\r\n");
        let mut found = None;
        loop {
            let line = self.line();
            if line == "END" {
                return found.unwrap_or_else(|| panic!("stats has no {name}"));
            }
            if let Some(value) = line.strip_prefix("STAT ").and_then(|it| it.strip_prefix(name)) {
                found = value.trim().parse().ok().or(found);
            }
        }
    }

    /// Waits until a figure of `stats` satisfies `is_it`: threads report their figures once a
    /// second.
    pub(crate) fn wait_for_stat(&mut self, name: &str, is_it: impl Fn(u64) -> bool) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.stat(name);
            if is_it(value) {
                return value;
            }
            assert!(Instant::now() < deadline, "waited in vain: {name} is {value}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Reads a key. Returns the version of its value, which must be right to the byte, or None on a
    /// miss.
    pub(crate) fn version(&mut self, key: usize) -> Option<u32> {
        self.send(format!("get key{key}\r\n").as_bytes());
        self.reply(key)
    }

    /// Reads the reply to a `get` of the key.
    pub(crate) fn reply(&mut self, key: usize) -> Option<u32> {
        let line = self.line();
        if line == "END" {
            return None;
        }
        let bytes = line.rsplit(' ').next().and_then(|it| it.parse::<usize>().ok());
        let bytes = bytes.unwrap_or_else(|| panic!("key{key}: {line}"));
        let mut found = vec![0; bytes + 2];
        self.0.read_exact(&mut found).expect("a value");
        assert_eq!(self.line(), "END");
        let text = String::from_utf8_lossy(&found[..bytes]);
        let version = text.split('.').nth(1).and_then(|it| it.parse().ok()).expect("a version");
        assert!(found[..bytes] == value(key, version), "key{key} has bytes that nobody stored");
        Some(version)
    }
}

/// Values of keys from this one on are all of [`EVEN_BYTES`].
pub(crate) const EVEN_FROM: usize = 1_000_000;
/// Their records on flash take 1 KiB each: every page of a zone has records at the same offsets.
const EVEN_BYTES: usize = 940;

/// The bytes of a version of a key.
pub(crate) fn value(key: usize, version: u32) -> Vec<u8> {
    let mut value = format!("{key}.{version}.").into_bytes();
    let odd_bytes = 40 + (key * 131 + version as usize * 17) % 1500;
    value.resize(if key < EVEN_FROM { odd_bytes } else { EVEN_BYTES }, b'v');
    value
}

/// The newest version of each key; 0 is none. Deleting takes a version, too: nothing older may be
/// found afterwards.
pub(crate) struct Known(pub Vec<u32>);

impl Known {
    pub(crate) fn new(keys: usize) -> Self {
        Self(vec![0; keys])
    }

    /// Stores a new version of keys, and reads the replies.
    pub(crate) fn store(&mut self, client: &mut Client, keys: impl Iterator<Item = usize>) {
        let keys: Vec<usize> = keys.collect();
        for batch in keys.chunks(BATCH) {
            let mut requests = Vec::new();
            for &key in batch {
                self.0[key] += 1;
                let value = value(key, self.0[key]);
                requests
                    .extend_from_slice(format!("set key{key} 0 0 {}\r\n", value.len()).as_bytes());
                requests.extend_from_slice(&value);
                requests.extend_from_slice(b"\r\n");
            }
            client.send(&requests);
            batch.iter().for_each(|_| assert_eq!(client.line(), "STORED"));
        }
    }

    /// Deletes keys, and reads the replies.
    pub(crate) fn delete(&mut self, client: &mut Client, keys: impl Iterator<Item = usize>) {
        for key in keys {
            self.0[key] += 1;
            let reply = client.ask(&format!("delete key{key}"));
            assert!(["DELETED", "NOT_FOUND"].contains(&reply.as_str()), "{reply}");
        }
    }

    /// How many of the keys are there: each has its newest version, or is missing.
    pub(crate) fn check(&self, client: &mut Client, keys: impl Iterator<Item = usize>) -> usize {
        let is_there = |&key: &usize| match client.version(key) {
            None => false,
            Some(version) => {
                assert_eq!(version, self.0[key], "key{key} has an old value");
                true
            }
        };
        keys.filter(is_there).count()
    }
}
