//! Tiers of `farpool kv` under kill -9, and too slow: nothing older than what was acknowledged
//! comes back.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/home.rs"]
mod home;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use common::farpool;
use farpool_e2e::proxy::{Fault, Proxy};
use farpool_kernel::lock;
use farpool_testkit::ports::free_address;
use farpool_units::exactly;
use home::Home;
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
        let address = free_address();
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
        // A hang fails the test instead of blocking the whole run.
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

    /// The version of a key's value, if it is there. The value must be right to the byte.
    fn version(&mut self, key: usize) -> Option<u32> {
        self.send(format!("get key{key}\r\n").as_bytes());
        self.reply(key)
    }

    fn stat(&mut self, name: &str) -> u64 {
        self.send(b"stats\r\n");
        let mut found = None;
        loop {
            let line = self.line();
            if line == "END" {
                return found.unwrap_or_else(|| panic!("stats has no {name}"));
            }
            if let Some(value) = line.strip_prefix(&format!("STAT {name} ")) {
                found = value.parse().ok();
            }
        }
    }

    /// Reads the reply to a `get` of the key.
    fn reply(&mut self, key: usize) -> Option<u32> {
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
        // SIGKILL; it makes no difference if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn value(key: usize, version: u32) -> Vec<u8> {
    let mut value = format!("{key}.{version}.").into_bytes();
    value.resize(40 + (key * 131 + version as usize * 17) % 1500, b'v');
    value
}

/// What may be found of a key: nothing, or a version no older than the last acknowledged.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    acknowledged: u32,
    sent: u32,
}

/// A simple random sequence: the test only needs varying keys and moments.
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
            // A delete takes a version, too: nothing older may be found afterwards.
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

/// Runs one test at a time: what a busy device does not take in time is dropped, and these tests
/// count what is there.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    lock(&TURN)
}

#[test]
fn after_kill_9_flash_serves_again_and_nothing_older_comes_back() {
    let _turn = turn();
    let home = Home::new();
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
                // A version that was sent but not acknowledged may have arrived late; from now on
                // it counts as acknowledged.
                known.acknowledged = version;
            }
        }
        assert!(round == 0 || found > 5_000, "round {round}: {found} items came back");
        let batches = 200 + random.below(200);
        change(&mut kv, &mut known, &mut random, batches);
    }
}

/// A thread stops when it next returns to its own code.
const STOPS_WITHIN: Duration = Duration::from_secs(30);

/// A blade process that can be stopped and continued.
struct Blade(Child);

impl Blade {
    fn start(home: &Path, socket: &Path) -> Self {
        Self::start_at(home, &format!("unix://{}", socket.display()))
    }

    fn start_at(home: &Path, address: &str) -> Self {
        let mut command = farpool(home);
        command.args(["blade", "--memory", "256MiB", "--json", "--listen", address]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the blade starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("its output is piped");
        BufReader::new(output).read_line(&mut line).expect("it prints a line");
        Self(child)
    }

    /// Stops it, and waits until each of its threads has stopped: until then it answers.
    fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
        let tasks = format!("/proc/{}/task", self.0.id());
        let is_stopped = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).expect("it lives");
            stat.rsplit_once(") ").expect("a state").1.starts_with('T')
        };
        let start = Instant::now();
        while !std::fs::read_dir(&tasks).expect("it lives").flatten().all(is_stopped) {
            assert!(start.elapsed() < STOPS_WITHIN, "the blade does not stop");
            std::thread::yield_now();
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.0.id()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("a process id"), signal).expect("it lives");
    }
}

impl Drop for Blade {
    fn drop(&mut self) {
        // It makes no difference if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_is_deleted_while_a_tier_is_too_slow_stays_deleted() {
    let _turn = turn();
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
    blade.stop();
    kv.send(b"get key1\r\ndelete key0\r\n");
    assert_eq!(kv.line(), "END", "a miss, in bounded time");
    assert_eq!(kv.line(), "NOT_FOUND");
    blade.signal(rustix::process::Signal::CONT);
    assert_eq!(kv.version(0), None, "deleted is deleted");
    assert_eq!(kv.version(1), Some(1), "only late");
}

/// The deadline of a server that is told none.
const USUAL: &str = "500ms";

/// A server over the blade, with all keys stored; the first half of them are in far memory.
fn with_far(home: &Path, blade: &str, deadline: &str) -> Kv {
    let far = ["--far", "128MiB", "--far-deadline", deadline, "--blade", blade];
    let mut kv = Kv::start_with(home, &[&["-t", "2", "--memory", "16MiB"], &far[..]].concat());
    store_all(&mut kv, 1);
    assert!(kv.stat("far_items") > 5_000);
    kv
}

fn store_all(kv: &mut Kv, version: u32) {
    for keys in (0..KEYS).collect::<Vec<_>>().chunks(BATCH) {
        let mut requests = Vec::new();
        for &key in keys {
            let value = value(key, version);
            let line = format!("set key{key} 0 0 {}\r\n", value.len());
            requests.extend_from_slice(line.as_bytes());
            requests.extend_from_slice(&value);
            requests.extend_from_slice(b"\r\n");
        }
        kv.send(&requests);
        keys.iter().for_each(|_| assert_eq!(kv.line(), "STORED"));
    }
}

/// Counts the keys that are there; each must have this version or be missing.
fn count(kv: &mut Kv, keys: std::ops::Range<usize>, version: u32) -> usize {
    let is_there = |&key: &usize| {
        kv.version(key).is_some_and(|found| {
            assert_eq!(found, version, "key{key}");
            true
        })
    };
    keys.filter(is_there).count()
}

#[test]
fn a_blade_that_dies_in_a_get_or_while_it_is_written_costs_its_items() {
    let _turn = turn();
    // The longest time: the deadline of half a second, the pause while storing, and what a busy
    // machine adds. If each key waited for the blade, it would take minutes.
    const BOUND: Duration = Duration::from_secs(30);
    let home = tempfile::tempdir().expect("a home");
    for (number, while_storing) in [false, true, false, true].into_iter().enumerate() {
        let socket = home.path().join(format!("blade{number}.sock"));
        let mut blade = Blade::start(home.path(), &socket);
        let mut kv = with_far(home.path(), &format!("unix://{}", socket.display()), USUAL);
        let start = Instant::now();
        let version = if while_storing {
            let killer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30 * (number as u64 + 1)));
                blade.0.kill().expect("it is our child");
            });
            store_all(&mut kv, 2);
            killer.join().expect("it does not panic");
            2
        } else {
            let names: Vec<String> = (0..3_000).map(|key| format!("key{key}")).collect();
            let requests = format!("get {}\r\n", names.join("\r\nget "));
            kv.send(requests.as_bytes());
            blade.0.kill().expect("it is our child");
            for key in 0..names.len() {
                assert!(kv.reply(key).is_none_or(|found| found == 1), "key{key}");
            }
            1
        };
        count(&mut kv, 0..KEYS / 2, version);
        assert!(start.elapsed() < BOUND, "{:?} with a dead blade", start.elapsed());
        let in_memory = count(&mut kv, KEYS - 1_000..KEYS, version);
        assert!(in_memory > 500, "{in_memory} are still in memory");
        assert!(kv.stat("far_zones_lost") + kv.stat("far_reads_failed") > 0);
        store_all(&mut kv, 3);
        count(&mut kv, 0..KEYS, 3);
    }
}

#[test]
fn what_the_way_to_a_blade_garbles_is_read_again_or_a_miss() {
    let _turn = turn();
    let home = tempfile::tempdir().expect("a home");
    for fault in [Fault::FlipBit, Fault::CutMidPage, Fault::Repeat, Fault::Garbage, Fault::Reorder]
    {
        let address = free_address().to_string();
        let _blade = Blade::start_at(home.path(), &format!("tcp://{address}"));
        let proxy = Proxy::start(&address);
        let mut kv = with_far(home.path(), proxy.address(), USUAL);
        let before = proxy.done();
        let mut there = 0;
        for key in 0..KEYS / 3 {
            // Repeatedly, but not on every answer, so that others get through.
            if key % 5 == 0 {
                proxy.order(fault);
            }
            there += usize::from(kv.version(key).is_some_and(|found| found == 1));
        }
        proxy.order(Fault::None);
        let (spoiled, failed) = (proxy.done() - before, kv.stat("far_reads_failed"));
        let gone = kv.stat("far_reads_gone");
        eprintln!("{fault:?}: {spoiled} times; {there} right, {gone} gone, {failed} failed");
        assert!(spoiled > 0, "{fault:?}");
        // The server still works.
        store_all(&mut kv, 2);
        count(&mut kv, 0..KEYS, 2);
        assert!(count(&mut kv, KEYS - 1_000..KEYS, 2) > 500);
    }
}

/// Changes a byte in every seventh page of a process's large mappings, if it was written. Returns
/// how many pages.
fn garble_memory(pid: u32) -> std::io::Result<usize> {
    use std::os::unix::fs::FileExt;
    const PAGE: usize = 4096;
    const LARGE: u64 = 64 << 20;
    let memory =
        std::fs::File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut garbled = 0;
    for line in maps.lines().filter(|line| line.contains(" rw")) {
        let range = line.split(' ').next().and_then(|it| it.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).ok();
        let Some((first, last)) = range.and_then(|it| number(it.0).zip(number(it.1))) else {
            continue;
        };
        if last - first < LARGE {
            continue;
        }
        let mut page = vec![0; PAGE];
        for at in (first..last).step_by(7 * PAGE) {
            if memory.read_exact_at(&mut page, at).is_err() {
                continue;
            }
            if page.iter().any(|&byte| byte != 0) {
                let spot = exactly::<usize, _>(at / 4096 * 131) % PAGE;
                memory.write_all_at(&[page[spot] ^ 0x10], at + spot as u64)?;
                garbled += 1;
            }
        }
    }
    Ok(garbled)
}

#[test]
fn what_a_blade_garbles_is_a_miss_and_never_a_wrong_value() {
    let _turn = turn();
    let home = tempfile::tempdir().expect("a home");
    let socket = home.path().join("blade.sock");
    let blade = Blade::start(home.path(), &socket);
    // So long that a busy machine costs no blade: what is garbled has to be read.
    let mut kv = with_far(home.path(), &format!("unix://{}", socket.display()), "20s");
    let before = count(&mut kv, 0..1_000, 1);
    let garbled = match garble_memory(blade.0.id()) {
        Ok(pages) => pages,
        Err(error) => {
            farpool_testkit::skip(&format!("the blade's memory cannot be reached: {error}"));
            return;
        }
    };
    let there = count(&mut kv, 0..KEYS, 1);
    let gone = kv.stat("far_reads_gone");
    eprintln!("{garbled} pages garbled; {there} of {KEYS} right, {gone} gone; {before} before");
    assert!(garbled > 100 && gone > 50 && there > KEYS / 2);
    store_all(&mut kv, 2);
    count(&mut kv, 0..KEYS, 2);
}
