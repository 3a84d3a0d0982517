//! Streams that random generation does not find, and servers with flags.

use super::commands;
use super::common::talk::{ask, exchange};
use super::common::{Memcached, Ours, PATIENCE};
use super::{QUIET, compare, judge, settings};
use farpool_kv_server::auth::Credentials;
use farpool_kv_server::{Compat, Settings};
use proptest::test_runner::TestCaseError;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Compares the replies of two fresh servers to one stream. A comparison that took too long to be
/// judged is made anew.
fn same(flags: &[&str], settings: &Settings, stream: &[u8]) {
    all_same(flags, settings, &[stream.to_vec()]);
}

/// The same for several requests.
fn all_same(flags: &[&str], settings: &Settings, requests: &[Vec<u8>]) {
    let judged = || match compare(flags, settings.clone(), requests, &[]) {
        Ok(()) => true,
        Err(TestCaseError::Reject(_)) => false,
        Err(error) => panic!("{error}"),
    };
    farpool_testkit::wait_until("a comparison in time", PATIENCE, judged);
}

#[test]
fn keys_of_every_length_are_taken_or_refused() {
    for compat in Memcached::versions() {
        for bytes in [1, 249, 250, 251, 300] {
            let key = "k".repeat(bytes);
            for command in
                ["get", "gets", "gat 0", "delete", "mg", "md", "ma", "me", "touch", "incr"]
            {
                let rest = match command {
                    "touch" | "incr" => " 1",
                    "mg" => " v k",
                    _ => "",
                };
                let stream = format!("{command} {key}{rest}\r\n");
                same(&[], &settings(compat), stream.as_bytes());
            }
            same(
                &[],
                &settings(compat),
                format!("set {key} 0 0 1\r\nx\r\nmg {key} v k s\r\n").as_bytes(),
            );
            same(
                &[],
                &settings(compat),
                format!("ms {key} 1\r\nx\r\nmg {key} v k s\r\n").as_bytes(),
            );
        }
    }
}

#[test]
fn lines_of_every_length_are_taken_or_end_the_connection() {
    for compat in Memcached::versions() {
        for bytes in [1023, 1024, 2046, 2047, 2048, 2049, 3000, 9000] {
            for start in ["get ", "gets ", "set ", "", "mg a O", " get ", "incr a "] {
                let line = start.to_owned() + &"x".repeat(bytes - start.len());
                same(&[], &settings(compat), line.as_bytes());
            }
            let keys = format!("get {}", "abc ".repeat(bytes / 4));
            same(&[], &settings(compat), format!("set abc 0 0 1\r\nx\r\n{keys}\r\n").as_bytes());
        }
    }
}

#[test]
fn tuning_is_checked_as_memcached_checks_it() {
    for compat in Memcached::versions() {
        let lines = [
            "lru mode flat",
            "lru mode segmented noreply",
            "lru mode x",
            "lru mode y",
            "lru m f",
            "lru temp_ttl y",
            "lru temp_ttl 0",
            "lru temp_ttl -1",
            "lru temp_ttl x",
            "lru tune 10 20 0.1 2.0",
            "lru tune 10 20 0.1 2.0 noreply",
            "slabs automove 1",
            "slabs automove 1 noreply",
            "slabs automove ratio 0.8 noreply",
            "extstore max_sleep 5 noreply",
        ];
        same(&[], &settings(compat), lines.join("\r\n").as_bytes());
    }
}

#[test]
fn ma_sets_the_expiry_of_a_number_that_keeps_its_length() {
    for compat in Memcached::versions() {
        let requests = [
            "set a 0 0 2\r\n41\r\n",
            "ma a T100 t v\r\n",
            "mg a t v\r\n",
            "ma a T-1\r\n",
            "mg a v\r\n",
            "ma b N60 J5 T70 t v\r\n",
            "mg b t v\r\n",
        ];
        let requests = requests.map(|request| request.as_bytes().to_vec());
        all_same(&QUIET, &settings(compat), &requests);
    }
}

#[test]
fn what_browsers_send_ends_the_connection() {
    for compat in Memcached::versions() {
        for stream in [
            "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\n\r\nset a 0 0 1\r\nx\r\n",
            "OPTIONS HTTP/\r\n",
            "get HTTP/1.1\r\n",
            "quit\r\nget a\r\n",
            "\r\n\r\n",
            "\n",
            " \r\n",
            "quit\n",
        ] {
            same(&[], &settings(compat), stream.as_bytes());
        }
    }
}

#[test]
fn values_around_the_limit_are_taken_or_refused() {
    for compat in Memcached::versions() {
        for (flag, limit) in [("1m", 1 << 20), ("2m", 2 << 20)] {
            let settings = Settings { item_bytes_max: limit, ..settings(compat) };
            for bytes in [limit - 200, limit - 100, limit - 1, limit, limit + 1] {
                let value = "v".repeat(bytes);
                for command in ["set a 0 0", "set a 7 0", "add a 0 0", "append a 0 0", "ms a"] {
                    let meta = if command.starts_with("ms") { " T0 F3" } else { "" };
                    let stream = format!(
                        "set a 0 0 3\r\nold\r\n{command} {bytes}{meta}\r\n{value}\r\nmg a s f v\r\n"
                    );
                    same(&["-I", flag], &settings, stream.as_bytes());
                }
            }
        }
    }
}

#[test]
fn authentication_says_what_memcached_says() {
    for compat in Memcached::versions() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "foo:bar\nname:with:colon\n").expect("it can be written");
        let path = file.path().to_str().expect("a plain path");
        let credentials = Credentials::read(file.path()).expect("the file is good");
        let settings = Settings { credentials: Some(Arc::new(credentials)), ..settings(compat) };
        let long = format!("set a 0 0 3000\r\n{}\r\n", "x".repeat(3000));
        let good = "set x 0 0 7\r\nfoo bar\r\n";
        // To the newer one this is no name with a password but two requests.
        let bare_line_end = match compat {
            Compat::V1_6_18 => &["set x 0 0 7\nfoo bar\r\n", "version\r\n"][..],
            Compat::V1_6_45 => &["set x 0 0 7\n", "foo bar\r\n", "version\r\n"],
        };
        let large = ["set x 0 0 16385\r\n", good, "get a\r\n"];
        // Step by step: memcached answers only the last of several requests sent before the name.
        for steps in [
            &["get a\r\n"][..],
            &[
                "mn\r\n",
                "quit\r\n",
                "\r\n",
                "set\r\n",
                "set x 0 0\r\n",
                "version\r\n",
                good,
                "get a\r\n",
            ],
            &[good, "set a 0 0 1\r\nb\r\n", "get a\r\n"],
            &["set x 0 0 15\r\nname with:colon\r\n", "version\r\n"],
            &["set x 0 0 7\r\nfoo baz\r\n", "get a\r\n", good, "version\r\n"],
            bare_line_end,
            &["set x 0 0 7\r\nfoo barxx", "version\r\n", good, "version\r\n"],
            &["set x 0 0 3\r\nfoo\r\n", "set x 0 0 4\r\nfoo \r\n", "set x 0 0 0\r\n\r\n"],
            &["set x 0 0 9\r\n foo  bar\r\n", "version\r\n"],
            &["set x 0 0 11\r\nfoo bar baz\r\n", "version\r\n"],
            &["set x 0 0 7 noreply\r\nfoo bar\r\n", "version\r\n"],
            &["set x a b 7\r\nfoo bar\r\n", "version\r\n"],
            &["set x 0 0 x\r\n", "SET x 0 0 7\r\n", "foo bar\r\n", "add x 0 0 7\r\n"],
            &["set x 0 0 7\r\nfoo\0bar\r\n", "set x 0 0 8\r\nfoo bar\0\r\n", "version\r\n"],
            &[&long, good, "version\r\n"],
            &[&"x".repeat(5000)],
            // The older one reads the value before it refuses.
            if compat.is_old() { &large[..0] } else { &large },
            &["version\r\n", if compat.is_old() { "version\r\n" } else { "mn\r\n" }],
        ] {
            // A line that is too short ends the connection of the newer one.
            let is_short = |step: &&str| step.len() < 7 && !compat.is_old();
            let steps: Vec<&str> = steps.iter().copied().filter(|it| !is_short(it)).collect();
            let steps = &steps[..];
            let theirs = Memcached::start_for(compat, &["-Y", path]);
            let ours = Ours::local(settings.clone());
            let expected = conversation(theirs.connect(), steps);
            let given = conversation(ours.connect(), steps);
            assert_eq!(given, expected, "{steps:?}");
        }
    }
}

/// Runs steps, each answered before the next is sent; a request left open by the last step ends
/// with the connection.
fn conversation(mut stream: UnixStream, steps: &[&str]) -> String {
    let Some((last, steps)) = steps.split_last() else { return String::new() };
    stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    let mut replies = Vec::new();
    for step in steps {
        replies.extend(ask(&mut stream, step.as_bytes(), b"\r\n"));
    }
    replies.extend(exchange(stream, &[last.as_bytes()]));
    String::from_utf8(replies).expect("replies are text")
}

#[test]
fn small_items_are_bounded_as_memcached_bounds_them() {
    for compat in Memcached::versions() {
        // The newer one takes kilobytes.
        let chunk = if compat.is_old() { "slab_chunk_max=4096" } else { "slab_chunk_max=4" };
        let flags = ["-I", "8k", "-o", chunk];
        let settings = Settings { item_bytes_max: 8 << 10, ..settings(compat) };
        judge(40, &commands::large_stream(), |stream| {
            compare(&flags, settings.clone(), &stream, &[])
        });
    }
}

#[test]
fn flags_that_forbid_are_heeded() {
    for compat in Memcached::versions() {
        let stream =
            b"set a 0 0 1\r\nx\r\nflush_all\r\nflush_all 10\r\nflush_all noreply\r\nget a\r\n";
        same(&["-F"], &Settings { allows_flush: false, ..settings(compat) }, stream);
        for stream in [&b"shutdown x\r\n"[..], b"shutdown graceful x\r\n", b"shutdown  x\r\n"] {
            same(&["-A"], &Settings { allows_shutdown: true, ..settings(compat) }, stream);
        }
    }
}
