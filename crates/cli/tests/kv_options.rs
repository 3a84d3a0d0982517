//! Command lines written for memcached start `farpool kv`, or are refused with the reason.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/kv.rs"]
mod server;

use std::process::{Command, Output};

use common::farpool;
use farpool_testkit::skip;
use server::Kv;
use tempfile::TempDir;

/// Options of `-o` that ask for what would not hold here, so that they are refused.
const REFUSED: [&str; 1] = ["sock_cookie_id"];

/// What `memcached -h` says, or None, visibly, if it is not installed.
fn help() -> Option<String> {
    let output = Command::new("memcached").arg("-h").output().ok();
    if output.is_none() {
        skip("memcached is not installed (apt-get install memcached)");
    }
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A value for a flag that has one.
fn value_of(name: &str, line: &str) -> Option<&'static str> {
    let takes_one = line.contains(&format!("--{name}=<"));
    Some(match name {
        "udp-port" => "0",
        "listen" => "127.0.0.1",
        "unix-mask" => "700",
        "user" => "root",
        "protocol" => "auto",
        "max-item-size" => "1m",
        "slab-growth-factor" => "1.25",
        "unix-socket" | "pidfile" | "auth-file" | "memory-file" => "/nowhere",
        "napi_ids" | "max-reqs-per-event" => "512",
        "extended" => "no_modern",
        _ if takes_one => "64",
        _ => return None,
    })
}

fn run(home: &TempDir, flags: &[&str]) -> Output {
    farpool(home.path()).arg("kv").args(flags).output().expect("farpool starts")
}

#[test]
fn every_flag_of_memcacheds_help_is_understood() {
    let Some(help) = help() else { return };
    let home = tempfile::tempdir().expect("a home");
    let mut names = Vec::new();
    for line in help.lines().filter(|line| line.starts_with('-')) {
        let Some((_, rest)) = line.split_once("--") else { continue };
        let name: String = rest
            .chars()
            .take_while(|it| it.is_ascii_alphanumeric() || "-_".contains(*it))
            .collect();
        let long = match value_of(&name, line) {
            Some(value) => format!("--{name}={value}"),
            None => format!("--{name}"),
        };
        // The version is shown and nothing else happens, once all flags are understood.
        let output = run(&home, &[&long, "--version"]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{long}: {told}");
        names.push(name);
    }
    assert!(names.len() > 30, "{names:?}");
    let output = run(&home, &["-D", "/", "-i"]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("compatible with memcached 1.6.45"), "{told}");
}

#[test]
fn options_without_a_meaning_here_are_taken_and_named_once_in_the_log() {
    let Some(help) = help() else { return };
    let home = tempfile::tempdir().expect("a home");
    let flash = home.path().join("flash");
    let options: Vec<String> = help
        .lines()
        .filter_map(|line| line.strip_prefix("   - ")?.split_once(':').map(|(name, _)| name))
        .filter(|name| !name.starts_with("ssl_") && !REFUSED.contains(name))
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'))
        .map(|name| match name {
            "ext_path" => format!("ext_path={}:64m", flash.display()),
            "idle_timeout" => "idle_timeout=0".into(),
            _ => name.to_owned(),
        })
        .collect();
    assert!(options.len() > 35, "{options:?}");
    let more = "modern,no_slab_automove,drop_privileges,no_drop_privileges,inline_ascii_resp,\
        hashpower=16,relaxed_privileges,no_maxconns_fast,slab_sizes=8-16";
    let flags = ["-t", "4", "-C", "-f", "1.25", "-e", "/nowhere", "-o", more, "-o"];
    let mut kv = Kv::start(home.path(), &[&flags[..], &[&options.join(",")]].concat());
    assert_eq!(kv.client.ask("set a 0 0 1\r\nx"), "STORED");
    let log = kv.log();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("have no effect")).collect();
    let [told] = told[..] else { panic!("one line: {log}") };
    for name in ["-C", "-f", "-e", "-o no_modern", "-o ext_threads", "-o drop_privileges", "raised"]
    {
        assert!(told.contains(name), "{name}: {told}");
    }
    assert!(flash.exists());
}

#[test]
fn what_would_be_dangerous_to_ignore_is_refused_with_the_reason() {
    let home = tempfile::tempdir().expect("a home");
    for (flags, reason) in [
        (&["-o", "sock_cookie_id=1"][..], "sockets are not marked"),
        (&["-o", "proxy_config=routes.lua"], "no proxy"),
        (&["-U", "11211"], "UDP is not served"),
        (&["-S"], "needs names and passwords"),
        (&["-l", "mtls:127.0.0.1:11211"], "not understood"),
        (&["-l", "proto[binary]:127.0.0.1:11211"], "not understood"),
        (&["-o", "no_such_option"], "not an option that Farpool knows"),
        (&["--compat", "1.5"], "1.6.18 and 1.6.45"),
    ] {
        let output = run(&home, flags);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {told}");
        assert!(told.contains(reason), "{flags:?}: {told}");
    }
}

#[test]
fn the_ports_are_written_to_the_file_that_is_asked_for() {
    let home = tempfile::tempdir().expect("a home");
    let path = home.path().join("ports");
    let kv = Kv::start_with(home.path(), &["-t", "1"], |command| {
        command.env("MEMCACHED_PORT_FILENAME", &path);
    });
    let told = std::fs::read_to_string(&path).expect("it is there once the server is ready");
    assert_eq!(told, format!("TCP INET: {}\n", kv.address.port()));
    assert!(!home.path().join("ports.lck").exists());
}
