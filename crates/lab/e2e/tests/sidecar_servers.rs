//! Servers through the sidecar door: they return the data that was stored, and the limit holds
//! meanwhile.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use farpool_e2e::jobs::{PATIENCE, allowed_bytes, require_limit, scratch};
use farpool_e2e::ports::free_port;
use farpool_e2e::postgres::Cluster;
use farpool_e2e::run::{Door, Outcome, Run, Running};
use farpool_e2e::tree::Peak;
use farpool_e2e::{have, redis, tree, turn, wait_until};

/// Sends a request over HTTP. Returns the body of the answer, or None unless its status is 200.
fn ask(port: u16, what: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let head = format!("{what} HTTP/1.0\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.contains(" 200 ").then(|| body.to_owned())
}

/// Ends a server by its usual signal. Also returns the peak of its resident memory in bytes.
fn end(running: Running, signal: i32, peak: Peak, limit_mib: u64) -> (Outcome, u64) {
    tree::signal(running.program_pid(), signal);
    let outcome = running.finish();
    let (peak_bytes, looks) = peak.end();
    println!(
        "peak {} MiB at a limit of {limit_mib} MiB, {looks} looks, {} fetches",
        peak_bytes >> 20,
        outcome.counter("demand_fetches")
    );
    (outcome, peak_bytes)
}

#[test]
fn redis_with_a_background_save() {
    if have("redis-server") && have("redis-cli") {
        let _turn = turn();
        redis::save_in_the_background(Door::Sidecar, 32);
    }
}

/// An etcd server, used over HTTP. Keys and values are valid base64 as they are.
struct Etcd {
    running: Running,
    port: u16,
}

impl Etcd {
    fn start(limit: &str, directory: &Path) -> Etcd {
        let (port, peer) = (free_port(), free_port());
        let (url, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer}"));
        let cluster = format!("default={peer}");
        let running = Run::through(Door::Sidecar, limit)
            .program("etcd")
            .args(["--data-dir", "data", "--listen-client-urls", &url, "--advertise-client-urls"])
            .args([&url, "--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &cluster, "--unsafe-no-fsync"])
            .directory(directory)
            .patience(PATIENCE)
            .start();
        let etcd = Etcd { running, port };
        wait_until("etcd to answer", Duration::from_secs(40), || {
            etcd.ask("maintenance/status", "{}").filter(|answer| answer.contains("leader"))
        });
        etcd
    }

    fn ask(&self, what: &str, body: &str) -> Option<String> {
        ask(self.port, &format!("POST /v3/{what}"), body)
    }
}

#[test]
fn etcd_gives_back_what_was_put() {
    const KEYS: usize = 1500;
    const LIMIT_MIB: u64 = 48;
    if !have("etcd") {
        return;
    }
    let _turn = turn();
    let directory = scratch();
    let etcd = Etcd::start(&format!("{LIMIT_MIB}MiB"), directory.path());
    let peak = Peak::watch(etcd.running.pid());
    let key = |number: usize| format!("key{number:05}");
    let value = |number: usize| format!("{number:08}").repeat(512);
    for number in 0..KEYS {
        let body = format!(r#"{{"key":"{}","value":"{}"}}"#, key(number), value(number));
        etcd.ask("kv/put", &body).expect("a put");
    }
    for number in 0..KEYS {
        let answer = etcd.ask("kv/range", &format!(r#"{{"key":"{}"}}"#, key(number)));
        let answer = answer.expect("a value");
        assert!(answer.contains(&format!(r#""value":"{}""#, value(number))), "{number}: {answer}");
    }
    let (outcome, peak_bytes) = end(etcd.running, libc::SIGINT, peak, LIMIT_MIB);
    assert!(outcome.stderr.lines().all(|line| !line.starts_with("farpool:")), "{}", outcome.stderr);
    assert!(peak_bytes <= allowed_bytes(LIMIT_MIB), "peak {peak_bytes} bytes: {}", outcome.stats);
}

/// Prometheus scrapes itself every second, and must return the samples.
#[test]
fn prometheus_measures_itself() {
    const LIMIT_MIB: u64 = 48;
    const SAMPLES: u32 = 5;
    if !have("prometheus") {
        return;
    }
    let _turn = turn();
    let (directory, port) = (scratch(), free_port());
    let settings = format!(
        "global:\n  scrape_interval: 1s\nscrape_configs:\n  - job_name: self\n    \
         static_configs:\n      - targets: ['127.0.0.1:{port}']\n"
    );
    std::fs::write(directory.path().join("prometheus.yml"), settings).expect("settings");
    let listens = format!("--web.listen-address=127.0.0.1:{port}");
    let run = Run::through(Door::Sidecar, &format!("{LIMIT_MIB}MiB")).program("prometheus");
    let run = run.args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", &listens]);
    let running = run.directory(directory.path()).patience(PATIENCE).start();
    let peak = Peak::watch(running.pid());
    let value = |query: &str| -> Option<f64> {
        let answer = ask(port, &format!("GET /api/v1/query?query={query}"), "")?;
        let answer: serde_json::Value = serde_json::from_str(&answer).ok()?;
        answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    };
    wait_until("measurements", PATIENCE, || {
        (value("count_over_time(up%5B1h%5D)")? >= f64::from(SAMPLES)).then_some(())
    });
    assert_eq!(value("min_over_time(up%5B1h%5D)"), Some(1.0), "it always answered itself");
    assert!(value("count(%7Bjob=%22self%22%7D)") > Some(100.0), "it measures many things");
    let (outcome, peak_bytes) = end(running, libc::SIGTERM, peak, LIMIT_MIB);
    require_limit(outcome.require_success(), peak_bytes, LIMIT_MIB);
}

/// The server runs as a user that may not even open /dev/userfaultfd, while the keeper is root.
#[test]
fn postgres_under_transactions_of_many_clients() {
    const LIMIT_MIB: u64 = 96;
    if !have("setpriv") {
        return;
    }
    let Some(cluster) = Cluster::make() else { return };
    let _turn = turn();
    let run = Run::through(Door::Sidecar, &format!("{LIMIT_MIB}MiB")).program("setpriv");
    let run = run.args(["--reuid", "postgres", "--regid", "postgres", "--init-groups"]);
    let running = run.args(cluster.server()).directory(cluster.path()).patience(PATIENCE).start();
    let peak = Peak::watch(running.pid());
    cluster.await_answer();
    cluster.client("pgbench", &["-i", "-s", "1", "-q", "postgres"]);
    cluster.client("pgbench", &["-n", "-c", "6", "-j", "2", "-t", "100", "postgres"]);
    let sums = "select (select count(*) from pgbench_history) = 600 and (select sum(delta) from \
                pgbench_history) = all (values ((select sum(abalance) from pgbench_accounts)), \
                ((select sum(bbalance) from pgbench_branches)), ((select sum(tbalance) from \
                pgbench_tellers)))";
    let told = cluster.psql(sums).output().expect("psql");
    assert_eq!(String::from_utf8_lossy(&told.stdout), "t\n", "{told:?}");
    cluster.sort_with(6);
    let (outcome, peak_bytes) = end(running, libc::SIGINT, peak, LIMIT_MIB);
    outcome.require_success().require_far();
    require_limit(&outcome, peak_bytes, LIMIT_MIB);
}
