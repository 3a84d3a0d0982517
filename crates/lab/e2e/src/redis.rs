//! redis-server, driven by redis-cli.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::jobs::{PATIENCE, scratch};
use crate::run::{Door, Run, Running};
use crate::tree::Peak;
use crate::wait_until;

/// redis-server as a child process that ends with this guard.
struct Redis {
    running: Running,
    socket: String,
}

impl Redis {
    fn start(run: Option<Run>, directory: &Path) -> Redis {
        let socket = directory.join("redis.sock").to_string_lossy().into_owned();
        let run = match run {
            Some(run) => run.program("redis-server"),
            None => Run::local("redis-server"),
        };
        let running = run
            .args([
                "--port",
                "0",
                "--unixsocket",
                &socket,
                "--save",
                "",
                "--dbfilename",
                "dump.rdb",
            ])
            .args(["--enable-debug-command", "yes"])
            .directory(directory)
            .patience(PATIENCE)
            .start();
        let redis = Redis { running, socket };
        wait_until("redis to answer", Duration::from_secs(30), || {
            (redis.ask(&["PING"]) == "PONG").then_some(())
        });
        redis
    }

    fn ask(&self, words: &[&str]) -> String {
        let output = Command::new("redis-cli").args(["-s", &self.socket]).args(words).output();
        output.map_or_else(
            |_| String::new(),
            |out| String::from_utf8_lossy(&out.stdout).trim().into(),
        )
    }

    /// Writes while a child saves, and checks every value. The save must succeed.
    fn save_while_writing(&self) {
        self.ask(&["BGSAVE"]);
        let change = "for i = 1, 90000, 9 do redis.call('SET', 'k' .. i, 'new' .. i) end";
        self.ask(&["EVAL", change, "0"]);
        let check = "for i = 1, 90000 do local v = redis.call('GET', 'k' .. i) local e = i % 9 == \
                     1 and 'new' .. i or string.rep(i .. '-', 1024 / (#tostring(i) + 1)) if v ~= e \
                     then return i end end return 0";
        assert_eq!(self.ask(&["EVAL", check, "0"]), "0", "every value is what was set");
        wait_until("the save to end", Duration::from_secs(60), || {
            self.ask(&["INFO", "persistence"]).contains("rdb_bgsave_in_progress:0").then_some(())
        });
        assert!(self.ask(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:ok"));
    }
}

/// Fills redis beyond its limit, writes while a child saves, and loads the dump into another redis.
/// Returns the peak of the tree's resident memory in bytes.
///
/// # Panics
/// If a value or the dump is wrong.
pub fn save_in_the_background(door: Door, limit_mib: u64) -> u64 {
    let directory = scratch();
    let run = Run::through(door, &format!("{limit_mib}MiB"));
    let redis = Redis::start(Some(run), directory.path());
    let peak = Peak::watch(redis.running.pid());
    let fill = "for i = 1, 90000 do redis.call('SET', 'k' .. i, string.rep(i .. '-', 1024 / \
        (#tostring(i) + 1))) end";
    redis.ask(&["EVAL", fill, "0"]);
    let digest = redis.ask(&["DEBUG", "DIGEST"]);
    assert_eq!(digest.len(), 40, "{digest}");
    redis.save_while_writing();
    redis.ask(&["SHUTDOWN", "NOSAVE"]);
    let outcome = redis.running.finish();
    let (peak_bytes, looks) = peak.end();
    outcome.require_far();
    println!("redis: peak {} MiB at a limit of {limit_mib} MiB, {looks} looks", peak_bytes >> 20);
    // The dump holds the state at the time of the fork.
    let plain = Redis::start(None, directory.path());
    assert_eq!(plain.ask(&["DEBUG", "DIGEST"]), digest, "the dump is the data");
    peak_bytes
}
