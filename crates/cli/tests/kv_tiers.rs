//! Tiers of `farpool kv` under kill -9 and too slow: whatever was acknowledged before, nothing older comes back.

#[allow(dead_code)]
mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::farpool;
use serde_json::Value;

const KEYS: usize = 30_000;
const ROUNDS: usize = 5;
/// Requests sent before their replies are read.
const BATCH: usize = 200;

struct Kv {
    child: Child,
    stream: BufReader<TcpStream>,
}

impl Kv {
    fn start(home: &Path, flash: &Path) -> Self {
        let part = format!("{}:192MiB", flash.display());
        Self::start_with(home, &["-t", "2", "--memory", "16MiB", "--flash", &part])
    }

    fn start_with(home: &Path, flags: &[&str]) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address: SocketAddr = listener.local_addr().expect("it is bound");
        drop(listener);
        let mut command: Command = farpool(home);
        command.args(["kv", "--json", "-p", &address.port().to_string()]).args(flags);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the server starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("its output is piped");
        BufReader::new(output).read_line(&mut line).expect("it prints a line");
        let ready: Value = serde_json::from_str(&line).expect("the line is JSON");
        assert_eq!(ready["event"], "ready");
        let stream = TcpStream::connect(address).expect("it listens");
        // A hang fails the test instead of the whole run.
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("sockets have timeouts");
        Self { child, stream: BufReader::new(stream) }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).expect("the server takes requests");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("the server answers");
        line.trim_end().to_owned()
    }

    /// The version of a key's value, if it is there; the value must be right to the byte.
    fn version(&mut self, key: usize) -> Option<u32> {
        self.send(format!("get key{key}\r\n").as_bytes());
        let line = self.line();
        if line == "END" {
            return None;
        }
        let bytes: usize =
            line.rsplit(' ').next().and_then(|it| it.parse().ok()).expect("a length");
        let mut found = vec![0; bytes + 2];
        self.stream.read_exact(&mut found).expect("a value");
        assert_eq!(self.line(), "END");
        let text = String::from_utf8_lossy(&found[..bytes]);
        let version = text.split('.').nth(1).and_then(|it| it.parse().ok()).expect("a version");
        assert_eq!(found[..bytes], value(key, version), "key{key}");
        Some(version)
    }
}

impl Drop for Kv {
    fn drop(&mut self) {
        // SIGKILL; gone already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn value(key: usize, version: u32) -> Vec<u8> {
    let mut value = format!("{key}.{version}.").into_bytes();
    value.resize(40 + (key * 131 + version as usize * 17) % 1500, b'v');
    value
}

/// What may be found of a key: nothing, or a version from the last acknowledged on.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    acknowledged: u32,
    sent: u32,
}

/// A plain random sequence: the test only needs keys and moments that differ.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).expect("below a usize")
    }
}

/// Stores and deletes at random; the replies to the last batch are left unread.
fn change(kv: &mut Kv, known: &mut [Known], random: &mut Random, batches: usize) {
    for batch in 0..batches {
        let mut requests = Vec::new();
        let mut keys = Vec::new();
        for _ in 0..BATCH {
            let key = random.below(KEYS);
            known[key].sent += 1;
            // Deleting takes a version, too: nothing older may be there afterwards.
            if random.below(5) == 0 {
                requests.extend_from_slice(format!("delete key{key}\r\n").as_bytes());
            } else {
                let value = value(key, known[key].sent);
                let line = format!("set key{key} 0 0 {}\r\n", value.len());
                requests.extend_from_slice(line.as_bytes());
                requests.extend_from_slice(&value);
                requests.extend_from_slice(b"\r\n");
            }
            keys.push((key, known[key].sent));
        }
        kv.send(&requests);
        if batch + 1 == batches {
            return;
        }
        for (key, version) in keys {
            let reply = kv.line();
            assert!(["STORED", "DELETED", "NOT_FOUND"].contains(&reply.as_str()), "{reply}");
            known[key].acknowledged = known[key].acknowledged.max(version);
        }
    }
}

#[test]
fn after_kill_9_flash_serves_again_and_nothing_older_comes_back() {
    let home = tempfile::tempdir().expect("a home");
    let flash = home.path().join("flash");
    let mut known = vec![Known::default(); KEYS];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for round in 0..ROUNDS {
        let mut kv = Kv::start(home.path(), &flash);
        let mut found = 0;
        for (key, known) in known.iter_mut().enumerate() {
            let version = kv.version(key);
            if let Some(version) = version {
                found += 1;
                let right = known.acknowledged..=known.sent;
                assert!(right.contains(&version), "round {round}: key{key} {version} {known:?}");
                // What was sent and not acknowledged may have come late, but from now on it is what it is.
                known.acknowledged = version;
            }
        }
        assert!(round == 0 || found > 5_000, "round {round}: {found} items came back");
        let batches = 200 + random.below(200);
        change(&mut kv, &mut known, &mut random, batches);
    }
}

/// A blade as a process that can be stopped and made to go on.
struct Blade(Child);

impl Blade {
    fn start(home: &Path, socket: &Path) -> Self {
        let mut command = farpool(home);
        let address = format!("unix://{}", socket.display());
        command.args(["blade", "--memory", "256MiB", "--json", "--listen", &address]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the blade starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("its output is piped");
        BufReader::new(output).read_line(&mut line).expect("it prints a line");
        Self(child)
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("a process id"), signal).expect("it lives");
    }
}

impl Drop for Blade {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_is_deleted_while_a_tier_is_too_slow_stays_deleted() {
    let home = tempfile::tempdir().expect("a home");
    let socket = home.path().join("blade.sock");
    let blade = Blade::start(home.path(), &socket);
    let address = format!("unix://{}", socket.display());
    // The blade may be silent for longer than a request waits.
    let mut kv = Kv::start_with(
        home.path(),
        &["--memory", "16MiB", "--far", "128MiB", "--blade", &address, "--far-deadline", "30s"],
    );
    let mut requests = Vec::new();
    for key in 0..KEYS {
        let value = value(key, 1);
        requests
            .extend_from_slice(format!("set key{key} 0 0 {} noreply\r\n", value.len()).as_bytes());
        requests.extend_from_slice(&value);
        requests.extend_from_slice(b"\r\n");
    }
    kv.send(&requests);
    // The oldest items have left memory.
    assert_eq!((kv.version(0), kv.version(1)), (Some(1), Some(1)));
    blade.signal(rustix::process::Signal::STOP);
    kv.send(b"get key1\r\ndelete key0\r\n");
    assert_eq!(kv.line(), "END", "a miss, in bounded time");
    assert_eq!(kv.line(), "NOT_FOUND");
    blade.signal(rustix::process::Signal::CONT);
    assert_eq!(kv.version(0), None, "deleted is deleted");
    assert_eq!(kv.version(1), Some(1), "only late");
}
