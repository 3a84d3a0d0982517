//! `/metrics` reports what was done.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use farpool_kv_server::{Server, Settings};

fn scrape(at: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream
        .write_all(
            format!("GET {path} HTTP/1.1\r\nHost: kv\r\nConnection: close\r\n\r\n").as_bytes(),
        )
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Every figure has to be right within this time, or the test fails.
const PATIENCE: Duration = Duration::from_secs(60);
const SETS: &str = "set user:1 0 0 1\r\nx\r\nset user:2 0 0 1\r\nx\r\ndelete user:9\r\n";

/// Sends the requests on a connection of their own, and waits until all are answered.
fn ask_all(server: SocketAddr, requests: &str) {
    let mut client = TcpStream::connect(server).unwrap();
    let mut sender = client.try_clone().unwrap();
    let requests = format!("{requests}quit\r\n");
    let writer = std::thread::spawn(move || sender.write_all(requests.as_bytes()).unwrap());
    client.read_to_string(&mut String::new()).unwrap();
    writer.join().unwrap();
}

#[test]
fn figures_follow_what_was_done() {
    let any = "127.0.0.1:0".parse().unwrap();
    let settings = Settings {
        addresses: vec![any],
        metrics_address: Some(any),
        threads: 2,
        counts_prefixes: true,
        policy: farpool_policy::CacheKind::Sieve,
        quotas: vec![(b"user:".to_vec(), 1 << 20)],
        ..Settings::default()
    };
    let server = Server::bind(settings, 1_700_000_000).unwrap();
    let (text, metrics) = (server.addresses()[0], server.metrics_address().unwrap());
    let shared = server.shared();
    let thread = std::thread::spawn(move || server.run());
    let mut client = TcpStream::connect(text).unwrap();
    client
        .write_all(b"set a 0 0 1\r\nx\r\nset b 0 0 1\r\nx\r\nget a b c\r\nversion\r\nquit\r\n")
        .unwrap();
    let mut replies = String::new();
    client.read_to_string(&mut replies).unwrap();
    assert!(replies.contains("VERSION"));
    // Threads publish their figures once a second.
    let start = Instant::now();
    let wanted = [
        "farpool_kv_commands_total{command=\"get\",result=\"hit\"} 2\n",
        "farpool_kv_commands_total{command=\"get\",result=\"miss\"} 1\n",
        "farpool_kv_commands_total{command=\"set\",result=\"asked\"} 2\n",
        "farpool_kv_items 2\n",
        "farpool_kv_limit_bytes 67108864\n",
        "farpool_kv_eviction_info{policy=\"sieve\"} 1\n",
        // Each key was read once: no size of memory would have held it.
        "farpool_kv_expected_miss_ratio{memory_times=\"1\"} 1.0\n",
    ];
    loop {
        let scraped = scrape(metrics, "/metrics");
        assert!(scraped.starts_with("HTTP/1.1 200") && scraped.ends_with("# EOF\n"), "{scraped}");
        if wanted.iter().all(|line| scraped.contains(line)) {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{scraped}");
        std::thread::yield_now();
    }
    assert!(!scrape(metrics, "/metrics").contains("prefix_commands"), "no key had a prefix");
    ask_all(text, &"get hot\r\n".repeat(20_000));
    let start = Instant::now();
    while !scrape(metrics, "/keys").contains("\"key\":\"hot\"") {
        assert!(start.elapsed() < PATIENCE, "{}", scrape(metrics, "/keys"));
        std::thread::yield_now();
    }
    // Enough for a curve of its own, on whichever shard.
    ask_all(text, &format!("{SETS}{}", "get user:1 user:2 user:3 user:4\r\n".repeat(3000)));
    let start = Instant::now();
    loop {
        let (scraped, keys) = (scrape(metrics, "/metrics"), scrape(metrics, "/keys"));
        let counted = [("get", 12_000), ("hit", 6000), ("set", 2), ("delete", 1)];
        let line = |(command, count)| {
            format!(
                "farpool_kv_prefix_commands_total{{prefix=\"user\",command=\"{command}\"}} \
                 {count}\n"
            )
        };
        let quota = "farpool_kv_quota_bytes{prefix=\"user:\",what=\"limit\"} 1048576\n";
        assert!(scraped.contains(quota), "{scraped}");
        let has_curve = keys.split_once("\"expected_misses_alone\":[{").is_some();
        if counted.into_iter().map(line).all(|line| scraped.contains(&line)) && has_curve {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{scraped}\n{keys}");
        std::thread::yield_now();
    }
    shared.ask_to_stop();
    thread.join().unwrap().unwrap();
}
