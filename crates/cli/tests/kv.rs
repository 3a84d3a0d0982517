//! `farpool kv` as a process: its costs, and how it ends.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::{ended, farpool};
use farpool_testkit::ports::free_address;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use serde_json::Value;
use tempfile::TempDir;

/// After this long without an event, a test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server that is killed if a test leaves it running.
struct Kv {
    child: Child,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
    _home: TempDir,
}

impl Kv {
    fn start(flags: &[&str]) -> Self {
        let home = tempfile::tempdir().expect("a home");
        let address = free_address();
        let mut command = farpool(home.path());
        command.args(["kv", "--json", "-p", &address.port().to_string()]).args(flags);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the server starts");
        let output = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut kv = Self { child, output, address, _home: home };
        let mut line = String::new();
        kv.output.read_line(&mut line).expect("it prints a line");
        let ready: Value = serde_json::from_str(&line).expect("the line is JSON");
        assert_eq!(ready["event"], "ready");
        kv
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        stream
    }

    /// Its resident memory without file pages, such as its own code, but with memory shared with
    /// clients.
    fn resident_bytes(&self) -> usize {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(path).expect("the server lives");
        let kibibytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let number =
                line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
            number.expect("status has it in kB")
        };
        (kibibytes("RssAnon:") + kibibytes("RssShmem:")) << 10
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), signal).expect("the server takes the signal");
    }

    /// Waits until it ends. Returns its exit code.
    fn ended(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Kv {
    fn drop(&mut self) {
        // It makes no difference if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(stream: &mut TcpStream, request: &[u8], end: &[u8]) -> Vec<u8> {
    stream.write_all(request).expect("the server takes requests");
    let mut reply = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    while !reply.ends_with(end) {
        let bytes = stream.read(&mut buffer).expect("the server answers");
        assert!(bytes > 0, "the server left after {:?}", String::from_utf8_lossy(&reply));
        reply.extend_from_slice(&buffer[..bytes]);
    }
    reply
}

fn set_big(stream: &mut TcpStream, bytes: usize) {
    let set = format!("set big 0 0 {bytes}\r\n{}\r\n", "v".repeat(bytes));
    assert_eq!(ask(stream, set.as_bytes(), b"\r\n"), b"STORED\r\n");
}

/// Permits this many descriptors in this process and its children. If that fails, prints why.
fn allow_descriptors(count: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < count) {
        let wider = Rlimit { current: Some(count), maximum: limit.maximum.map(|it| it.max(count)) };
        if setrlimit(Resource::Nofile, wider).is_err() {
            farpool_testkit::skip(&format!("this user may not open {count} files at a time"));
            return false;
        }
    }
    true
}

/// A figure of `stats`.
fn stat(stream: &mut TcpStream, name: &str) -> usize {
    let text = String::from_utf8(ask(stream, b"stats\r\n", b"END\r\n")).expect("stats are text");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("STAT ")?.split_once(' '));
    let value = lines.find(|(found, _)| *found == name).map(|(_, value)| value);
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
}

#[test]
fn ten_thousand_idle_clients_cost_little() {
    const CLIENTS: usize = 10_000;
    const BYTES_EACH_MAX: usize = 4 << 10;
    // Ports are counted per address: those of one address could run short beside other tests.
    const ADDRESSES: [&str; 4] = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"];
    if !allow_descriptors(CLIENTS as u64 + 200) {
        return;
    }
    let listen = ADDRESSES.iter().flat_map(|address| ["-l", address]);
    let flags = ["-t", "2", "-c", "11000", "-b", "4096"].into_iter().chain(listen);
    let kv = Kv::start(&flags.collect::<Vec<_>>());
    let mut first = kv.connect();
    ask(&mut first, b"mn\r\n", b"MN\r\n");
    let before = kv.resident_bytes();
    let connect = |number: usize| {
        let address = (ADDRESSES[number % ADDRESSES.len()], kv.address.port());
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        stream
    };
    let mut clients: Vec<TcpStream> = (0..CLIENTS).map(connect).collect();
    for client in &mut clients {
        assert_eq!(ask(client, b"get nobody\r\n", b"END\r\n"), b"END\r\n");
    }
    assert_eq!(stat(&mut first, "curr_connections"), CLIENTS + 1);
    let idle = kv.resident_bytes().saturating_sub(before) / CLIENTS;
    // Then each sends half a request: half a line, or half of its data.
    let read = stat(&mut first, "bytes_read");
    let halves = [&b"get half"[..], b"set half 0 0 1000\r\nabc"];
    let mut sent = 0;
    for (number, client) in clients.iter_mut().enumerate() {
        let half = halves[number % 2];
        client.write_all(half).expect("the server takes requests");
        sent += half.len();
    }
    let deadline = Instant::now() + PATIENCE;
    while stat(&mut first, "bytes_read") < read + sent {
        assert!(Instant::now() < deadline, "the server does not read");
    }
    let half = kv.resident_bytes().saturating_sub(before) / CLIENTS;
    println!("{idle} bytes for each idle client, {half} with half a request");
    assert!(idle <= BYTES_EACH_MAX && half <= BYTES_EACH_MAX, "{idle}, {half} bytes each");
    // They are still served.
    for client in clients.iter_mut().step_by(2) {
        assert_eq!(ask(client, b"\r\n", b"END\r\n"), b"END\r\n");
    }
}

#[test]
fn long_replies_cost_bounded_memory_read_or_not() {
    const MEMORY_MAX: usize = 16 << 20;
    let kv = Kv::start(&["-t", "1", "-m", "64", "-I", "2m"]);
    let mut reader = kv.connect();
    set_big(&mut reader, 1 << 20);
    let before = kv.resident_bytes();
    let keys = " big".repeat(1000);
    let mut deaf = kv.connect();
    deaf.write_all(format!("get{keys}\r\n").as_bytes()).expect("the server takes requests");
    reader.write_all(format!("get{keys}\r\n").as_bytes()).expect("the server takes requests");
    let each = b"VALUE big 0 1048576\r\n".len() + (1 << 20) + 2;
    let mut left = 1000 * each + b"END\r\n".len();
    let mut buffer = vec![0; 1 << 20];
    let mut most = 0;
    while left > 0 {
        let bytes = reader.read(&mut buffer).expect("the server answers");
        assert!(bytes > 0, "{left} bytes are missing");
        left = left.checked_sub(bytes).expect("no more than was asked for");
        most = most.max(kv.resident_bytes().saturating_sub(before));
    }
    println!("{most} bytes for replies of 1 GB to two clients, one of whom does not read");
    assert!(most <= MEMORY_MAX, "{most} bytes");
}

#[test]
fn the_memory_limit_holds_for_values_of_all_sizes() {
    the_memory_limit_holds(&[]);
}

#[test]
fn the_memory_limit_holds_for_memory_that_clients_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let address = format!("unix://{}/kv.sock", folder.path().display());
    the_memory_limit_holds(&["--keyvault", &address, "--keyvault-leases"]);
}

fn the_memory_limit_holds(flags: &[&str]) {
    const LIMIT: usize = 512 << 20;
    /// The whole process: the store, its index, and some 10 MB of buffers for requests.
    const RESIDENT_MAX: usize = LIMIT + LIMIT / 20;
    let kv = Kv::start(&[&["-t", "2", "-m", "512", "-I", "2m"], flags].concat());
    let mut stream = kv.connect();
    let value = vec![b'v'; 1 << 20];
    // A fixed sequence of sizes from 1 B to 1 MiB, all magnitudes equally likely.
    let mut random: u64 = 1;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let (mut sent, mut most) = (0, 0);
    while sent < 3 * LIMIT {
        for _ in 0..100 {
            let bits = next() % 21;
            let bytes = usize::try_from(next() % (1 << bits)).expect("below 1 MiB") + 1;
            let key = next() % 200_000;
            let head = format!("set key{key} 0 0 {bytes} noreply\r\n");
            stream.write_all(head.as_bytes()).expect("the server takes requests");
            stream.write_all(&value[..bytes]).expect("the server takes requests");
            stream.write_all(b"\r\n").expect("the server takes requests");
            sent += bytes;
        }
        assert_eq!(ask(&mut stream, b"mn\r\n", b"MN\r\n"), b"MN\r\n");
        let resident = kv.resident_bytes();
        most = most.max(resident);
        assert!(resident <= RESIDENT_MAX, "{resident} bytes resident after {sent} sent");
    }
    println!("{most} bytes resident at most with a limit of {LIMIT}");
}

/// A policy's tables are largest with small items; then larger items follow, and small ones again.
#[test]
fn the_memory_limit_holds_for_what_a_policy_knows() {
    const LIMIT: usize = 128 << 20;
    for policy in ["lru", "lirs", "w-tinylfu"] {
        let kv = Kv::start(&["-t", "1", "-m", "128", "--policy", policy]);
        let mut stream = kv.connect();
        ask(&mut stream, b"mn\r\n", b"MN\r\n");
        let before = kv.resident_bytes();
        let (mut number, mut most) = (0u64, 0);
        for bytes in [64, 4000, 64] {
            let value = "v".repeat(bytes);
            let mut sent = 0;
            while sent < LIMIT {
                let mut requests = String::new();
                for _ in 0..2000 {
                    number += 1;
                    requests += &format!("set key{number:09} 0 0 {bytes} noreply\r\n{value}\r\n");
                    // Some are read, to make it harder for every policy.
                    requests += &format!("mg key{:09} q\r\n", number - number % 7);
                    sent += bytes;
                }
                stream.write_all(requests.as_bytes()).expect("the server takes requests");
                ask(&mut stream, b"mn\r\n", b"MN\r\n");
                most = most.max(kv.resident_bytes().saturating_sub(before));
            }
        }
        println!("{policy}: {most} bytes resident at most with a limit of {LIMIT}");
        assert!(most <= LIMIT + LIMIT / 20, "{policy}: {most} bytes");
    }
}

#[test]
fn sigterm_ends_it_with_all_promised_replies_sent() {
    let mut kv = Kv::start(&["-t", "3"]);
    let mut stream = kv.connect();
    set_big(&mut stream, 1_000_000);
    // More than the sockets take: part of it is still in the server when the signal arrives.
    let requests = "get big\r\n".repeat(20);
    stream.write_all(requests.as_bytes()).expect("the server takes requests");
    let mut reply = vec![0; 1000];
    stream.read_exact(&mut reply).expect("the first reply has begun");
    kv.signal(Signal::TERM);
    stream.read_to_end(&mut reply).expect("the rest comes");
    let each = b"VALUE big 0 1000000\r\n".len() + 1_000_000 + b"\r\nEND\r\n".len();
    assert_eq!(reply.len(), 20 * each);
    assert_eq!(kv.ended(), Some(0));
    let mut rest = String::new();
    kv.output.read_line(&mut rest).expect("its output ends");
    assert_eq!(rest, "", "the ready line is all it prints on standard output");
}

#[test]
fn what_is_not_served_is_refused_with_what_to_write_instead() {
    let home = tempfile::tempdir().expect("a home");
    for (flags, hint) in [
        (["-U", "11211"], "use -U 0"),
        (["-I", "10g"], "write -I 4m"),
        // 2^44 + 1 MiB: without an overflow check this would become 1 MiB.
        (["-m", "17592186044417"], "no machine has that much memory"),
        (["-o", "ext_path=/nowhere/kv"], "write it as /data/flash:200GiB"),
        (["--quota", "1GiB"], "write it as user:=1GiB"),
        (["--policy", "mru"], "choose one of: lru, fifo, clock, sieve, lfu, s3-fifo"),
        (["-D", "é"], "write -D :"),
        (["--far", "1GiB"], "--blade ADDR or --pool URL"),
        (["-a", "rw"], "write -a 700"),
        (["-a", "4755"], "write -a 700"),
    ] {
        let (code, _, error) = ended(farpool(home.path()).arg("kv").args(flags));
        assert!(code == 2 && error.contains(hint), "{flags:?}: {code}, {error}");
    }
    let flags = ["--keyvault", "tcp://127.0.0.1:0", "--keyvault-leases"];
    let (code, _, error) = ended(farpool(home.path()).arg("kv").args(flags));
    assert!(code == 2 && error.contains("give --keyvault unix:///PATH"), "{code}, {error}");
}

#[test]
fn the_mode_is_that_of_both_unix_sockets() {
    let folder = tempfile::tempdir().expect("a folder");
    let (text, keyvault) = (folder.path().join("text"), folder.path().join("keyvault"));
    let mode =
        |path: &Path| std::fs::metadata(path).expect("a socket").permissions().mode() & 0o777;
    let flag = format!("unix://{}", keyvault.display());
    {
        let _kv = Kv::start(&["-a", "770", "--keyvault", &flag]);
        assert_eq!(mode(&keyvault), 0o770);
    }
    let path = text.to_str().expect("its name is UTF-8");
    let _kv = Kv::start(&["-a", "0660", "-s", path, "--keyvault", &flag]);
    assert_eq!((mode(&text), mode(&keyvault)), (0o660, 0o660));
}

#[test]
fn memccapable_finds_all_of_its_27_capabilities() {
    if Command::new("memccapable").arg("--version").output().is_err() {
        farpool_testkit::skip("memccapable is not installed (apt-get install libmemcached-tools)");
        return;
    }
    // Its 27 capabilities are those of the older version.
    let kv = Kv::start(&["-t", "2", "--compat", "1.6.18"]);
    let port = kv.address.port().to_string();
    let output = Command::new("memccapable")
        .args(["-a", "-h", "127.0.0.1", "-p", &port, "-t", "10"])
        .output()
        .expect("memccapable starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.matches("[pass]").count(), 27, "{text}");
    assert!(output.status.success() && !text.contains("[FAIL]"), "{text}");
}

#[test]
fn client_libraries_find_what_they_expect() {
    let Ok(python) = std::env::var("KV_CLIENTS_PYTHON") else {
        println!(
            "SKIPPED: memcached's client libraries are not installed (scripts/install-deps.sh test)"
        );
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/kv-clients.py");
    let output = Command::new(python)
        .args([script, "--farpool", env!("CARGO_BIN_EXE_farpool")])
        .output()
        .expect("Python starts");
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    assert!(output.status.success() && text.contains(": passed"), "{text}");
}

#[test]
fn names_of_keys_are_not_shown_where_they_are_forbidden() {
    let kv = Kv::start(&["-D", ":", "-W", "-X"]);
    let mut stream = kv.connect();
    for (request, refused) in [
        ("watch", "CLIENT_ERROR watch commands not allowed"),
        ("lru_crawler metadump all", "ERROR metadump not allowed"),
        ("stats detail dump", "CLIENT_ERROR stats detail not allowed"),
    ] {
        let answer = ask(&mut stream, format!("{request}\r\n").as_bytes(), b"\r\n");
        assert_eq!(String::from_utf8_lossy(&answer).trim_end(), refused, "{request}");
    }
    let home = tempfile::tempdir().expect("a home");
    let address = kv.address.to_string();
    let (code, text, errors) = ended(farpool(home.path()).args([
        "kv",
        "top",
        "--server",
        &address,
        "--interval",
        "20ms",
        "--count",
        "2",
    ]));
    assert!(code == 0 && text.contains("gets/s"), "{code}, {text}{errors}");
}

#[test]
fn top_shows_what_is_asked_of_any_memcached() {
    let kv = Kv::start(&["-t", "2", "-D", ":", "--quota", "user:=1MiB", "--policy", "lru"]);
    let mut stream = kv.connect();
    let settings = ask(&mut stream, b"stats settings\r\n", b"END\r\n");
    assert!(String::from_utf8_lossy(&settings).contains("STAT eviction_policy lru\r\n"));
    let quotas = ask(&mut stream, b"stats quotas\r\n", b"END\r\n");
    assert_eq!(quotas, b"QUOTA user: limit 1048576 used 0 items 0 evictions 0\r\nEND\r\n");
    let busy = std::thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut asked = 0u64;
        // Until the server is gone.
        while Instant::now() < deadline
            && stream.write_all(b"set user:1 0 0 1\r\nx\r\nget user:1 page:2\r\n").is_ok()
        {
            let mut reply = [0; 64];
            if !matches!(stream.read(&mut reply), Ok(bytes) if bytes > 0) {
                break;
            }
            asked += 1;
        }
        asked
    });
    let home = tempfile::tempdir().expect("a home");
    let address = kv.address.to_string();
    let top = |flags: &[&str]| {
        let mut command = farpool(home.path());
        command
            .args(["kv", "top", "--server", &address, "--interval", "2s", "--count", "2"])
            .args(flags);
        let (code, output, errors) = ended(&mut command);
        assert_eq!(code, 0, "{errors}");
        output
    };
    let text = top(&[]);
    assert!(text.contains("gets/s") && text.contains("user") && text.contains("page"), "{text}");
    let json = top(&["--json", "--prefixes", "1"]);
    let looks: Vec<Value> =
        json.lines().map(|it| serde_json::from_str(it).expect("JSON")).collect();
    assert_eq!(looks.len(), 2);
    assert!(looks[1]["gets_per_s"].as_f64() > Some(1.0), "{json}");
    assert_eq!(looks[1]["prefixes"][0]["prefix"], "user", "{json}");
    assert!(looks[1]["hit_ratio"].as_f64().is_some_and(|it| (0.3..0.7).contains(&it)), "{json}");
    drop(kv);
    assert!(busy.join().expect("it does not panic") > 10);
    let mut command = farpool(home.path());
    command.args(["kv", "top", "--server", &address]);
    let (code, _, errors) = ended(&mut command);
    assert!(code != 0 && errors.contains(&address), "{code}: {errors}");
}
