//! `farpool kv bench` against a real server, and against one that lies.

#[allow(dead_code)]
mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Stdio};

use common::{ended, farpool};
use farpool_testkit::ports::free_address;
use serde_json::Value;

/// Runs after which a server that never meets five seconds is taken to be broken.
const TRIES: usize = 10;

/// A time in which a client sends many requests, though a busy machine may stop it for a second.
const MANY_WITHIN: &str = "4s";

struct Kv {
    child: Child,
    address: SocketAddr,
    home: tempfile::TempDir,
}

impl Kv {
    fn start() -> Self {
        Self::start_with(&["-t", "1"])
    }

    fn start_with(flags: &[&str]) -> Self {
        let home = tempfile::tempdir().expect("a home");
        let address = free_address();
        let mut command = farpool(home.path());
        command.args(["kv", "--json", "-p", &address.port().to_string()]).args(flags);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the server starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("its output is piped");
        BufReader::new(output).read_line(&mut line).expect("it prints a line");
        assert!(line.contains("ready"), "{line}");
        Self { child, address, home }
    }

    fn bench(&self, flags: &[&str]) -> Value {
        let mut command = farpool(self.home.path());
        command.args(["kv", "bench", "--json"]);
        if !flags.contains(&"--server") {
            command.args(["--server", &self.address.to_string()]);
        }
        command.args(["--keys", "5000", "--warm-up", "100ms"]).args(flags);
        if !flags.contains(&"--duration") {
            command.args(["--duration", "300ms"]);
        }
        let (code, output, errors) = ended(&mut command);
        let figures: Value = serde_json::from_str(&output).unwrap_or_else(|error| {
            panic!("{flags:?}: {error}, exit code {code}: {errors}");
        });
        let is_missed = figures["promises_kept"] == false;
        assert_eq!(code, i32::from(is_missed), "{flags:?}: {errors}{figures}");
        figures
    }

    /// Measures until the targets are met: a busy machine may stop the client just before the end.
    fn bench_that_meets(&self, flags: &[&str]) -> Value {
        let mut figures = Value::Null;
        for _ in 0..TRIES {
            figures = self.bench(flags);
            if figures["promises_kept"] == true {
                return figures;
            }
        }
        panic!("{flags:?} met its targets in none of {TRIES} runs: {figures}");
    }
}

impl Drop for Kv {
    fn drop(&mut self) {
        // It makes no difference if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn every_mode_measures_a_real_server() {
    let kv = Kv::start();
    let many = ["--closed", "--connections", "4", "--depth", "16", "--duration", MANY_WITHIN];
    let closed = kv.bench(&many);
    assert!(closed["requests"].as_u64() > Some(1000), "{closed}");
    assert_eq!(closed["hits"], closed["keys"], "every key is there: {closed}");
    let meta = kv.bench(&["--closed", "--depth", "8", "--protocol", "meta", "--multi-get", "10"]);
    assert_eq!(meta["hits"], meta["keys"], "{meta}");
    assert_eq!(meta["keys"].as_u64(), meta["requests"].as_u64().map(|it| it * 10), "{meta}");
    let sets = kv.bench(&["--closed", "--depth", "8", "--operation", "set", "--threads", "2"]);
    assert_eq!((&sets["hits"], &sets["refused"]), (&sets["requests"], &0.into()), "{sets}");
    for workload in ["microblog", "friendfeed", "twitter:cluster19"] {
        let open =
            kv.bench_that_meets(&["--workload", workload, "--rate", "2000", "--slo", "p50=5s"]);
        let reached = open["requests_per_s"].as_f64().expect("a rate");
        assert!(reached > 1000.0, "{workload}: {open}");
        assert!(open["stored_after_miss"].as_u64() > Some(0) || workload != "twitter:cluster19");
    }
    let sweep = ["--sweep", "--rate", "500", "--slo", "p50=2s", "--connections", "2"];
    // A busy machine may stop the client just before the end.
    let swept = kv.bench(&[&sweep[..], &["--tries", "3"]].concat());
    assert!(swept["asked_per_s"].as_f64() >= Some(500.0), "{swept}");
}

/// Three shards: answers arrive in any order, reads of several keys are split, and there are more
/// requests than credits.
#[test]
fn keyvault_is_measured_with_every_value_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("kv.sock");
    let address = format!("unix://{}", socket.display());
    let kv = Kv::start_with(&["-t", "3", "--keyvault", &address]);
    let at = format!("unix:{}", socket.display());
    let with = |flags: &[&'static str]| {
        [&["--protocol", "keyvault", "--server", at.as_str()], flags].concat()
    };
    let keyvault = |flags: &[&'static str]| kv.bench(&with(flags));
    let deep = ["--closed", "--connections", "4", "--depth", "2000", "--duration", MANY_WITHIN];
    let closed = keyvault(&deep);
    assert!(closed["requests"].as_u64() > Some(10_000), "{closed}");
    assert_eq!(closed["hits"], closed["keys"], "every key is there: {closed}");
    let many = keyvault(&["--closed", "--depth", "4", "--multi-get", "100", "--no-fill"]);
    assert_eq!(many["hits"], many["keys"], "{many}");
    assert_eq!(many["keys"].as_u64(), many["requests"].as_u64().map(|it| it * 100), "{many}");
    let sets = keyvault(&["--closed", "--depth", "8", "--operation", "set", "--no-fill"]);
    assert_eq!((&sets["hits"], &sets["refused"]), (&sets["requests"], &0.into()), "{sets}");
    kv.bench_that_meets(&with(&["--workload", "friendfeed", "--rate", "2000", "--slo", "p50=5s"]));
    // The text port does not speak KeyVault.
    let mut command = farpool(kv.home.path());
    command.args(["kv", "bench", "--closed", "--protocol", "keyvault", "--no-fill"]);
    command.args(["--server", &kv.address.to_string(), "--duration", "1s"]);
    let (code, _, errors) = ended(&mut command);
    assert!(code != 0 && errors.contains("--keyvault"), "{code}: {errors}");
}

#[test]
fn the_floor_is_measured_and_latencies_are_written() {
    let home = tempfile::tempdir().expect("a home");
    let histogram = home.path().join("latencies");
    let mut command = farpool(home.path());
    command.args(["kv", "bench", "--echo", "--closed", "--depth", "8", "--json"]);
    command.args(["--duration", MANY_WITHIN, "--warm-up", "100ms", "--histogram"]).arg(&histogram);
    let (code, output, errors) = ended(&mut command);
    assert_eq!(code, 0, "{errors}");
    let floor: Value = serde_json::from_str(&output).expect("figures are JSON");
    assert!(floor["requests"].as_u64() > Some(1000), "{floor}");
    let text = std::fs::read_to_string(&histogram).expect("it was written");
    assert!(text.starts_with("# ") && text.lines().count() > 5, "{text}");
}

#[test]
fn a_wrong_value_ends_the_run_and_names_the_key() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    // A server that answers every request with a wrong value.
    let liar = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the client comes");
        let mut buffer = [0; 4096];
        while let Ok(bytes) = stream.read(&mut buffer) {
            if bytes == 0 {
                return;
            }
            let text = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
            let key = text.split_whitespace().nth(1).unwrap_or_default();
            let reply = format!("VALUE {key} 0 64\r\n{}\r\nEND\r\n", "x".repeat(64));
            if stream.write_all(reply.as_bytes()).is_err() {
                return;
            }
        }
    });
    let home = tempfile::tempdir().expect("a home");
    let mut command = farpool(home.path());
    command.args(["kv", "bench", "--server", &address.to_string(), "--closed", "--no-fill"]);
    command.args(["--connections", "1"]);
    let (code, _, errors) = ended(&mut command);
    assert_eq!(code, 1, "{errors}");
    assert!(errors.contains("the value of key k0"), "{errors}");
    liar.join().expect("the server ends");
}

#[test]
fn wrong_uses_name_the_remedy() {
    let home = tempfile::tempdir().expect("a home");
    for (flags, remedy) in [
        (&["--closed", "--workload", "nothing"][..], "friendfeed"),
        (&["--closed", "--operation", "look"], "mixed:0.9"),
        (&["--rate", "100", "--slo", "fast"], "p95=10ms"),
        (&["--closed", "--server", "127.0.0.1:1"], "is the server running"),
        (&[], "--closed"),
    ] {
        let mut command = farpool(home.path());
        let (code, _, errors) = ended(command.args(["kv", "bench"]).args(flags));
        assert_ne!(code, 0, "{flags:?}");
        assert!(errors.contains(remedy), "{flags:?}: {errors}");
    }
}
