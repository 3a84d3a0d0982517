//! A blade whose memory outlives its process: programs wait for the next process and lose nothing,
//! however often; or the blade says that it has begun anew, and nothing wrong is read.
//!
//! `FARPOOL_RESTARTS=1000 cargo test -p farpool-e2e --test restart` restarts as often as that.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::ports::free_address;
use farpool_e2e::rack::{Daemon, answer};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{PATIENCE, binaries, turn, wait_until};
use serde_json::Value;

const THREADS: usize = 2;
const MEMORY: &str = "512MiB";
/// Restarts of each test, unless more are asked for.
const RESTARTS: usize = 12;
/// Pages that a program fetches from one restart to the next.
const FETCHES: u64 = 300;
/// How long a controller may take to have a node back: well below the 5 s in which it would believe
/// in the one before.
const SOON: Duration = Duration::from_secs(4);
/// Longest time for all restarts that are asked for.
const LONG: Duration = Duration::from_secs(3600);

fn restarts() -> usize {
    let asked = std::env::var("FARPOOL_RESTARTS").ok();
    asked.map_or(RESTARTS, |number| number.parse().expect("a number of restarts"))
}

/// Starts a program of 64 MiB, part of it far, that checks every page it reads.
fn checker(door: Door, address: &str, seed: u32, operations: &str) -> (Running, tempfile::TempDir) {
    let end = tempfile::tempdir().expect("a directory");
    let mut running = Run::through(door, "16MiB")
        .blade(address)
        .patience(LONG)
        .own_program("farpool-stress")
        .args(["--mib", "64", "--threads", &THREADS.to_string(), "--progress"])
        .args(["--seconds", "7200", "--seed", &seed.to_string()])
        .args(["--ops", operations, "--until"])
        .arg(end.path().join("end"))
        .start();
    running.wait_for_output("filled", THREADS);
    running.wait_until_far();
    (running, end)
}

fn wait_for_fetches(running: &Running) {
    let before = running.fetched().unwrap_or(0);
    wait_until("pages to be fetched", PATIENCE, || {
        let said = running.stderr();
        assert!(!said.contains("far memory is lost"), "{said}");
        (running.fetched()? > before + FETCHES).then_some(())
    });
}

/// The blade is killed and told to end by turns, and each time the program goes on.
fn outlives(door: Door, transport: Transport, seed: u32, operations: &str) {
    let mut blade = Blade::start_persistent(MEMORY);
    let (running, end) = checker(door, &blade.address(transport), seed, operations);
    for number in 0..restarts() {
        wait_for_fetches(&running);
        blade.restart(if number % 3 == 2 { libc::SIGTERM } else { libc::SIGKILL });
    }
    wait_for_fetches(&running);
    std::fs::write(end.path().join("end"), "").expect("a file");
    let outcome = running.finish();
    outcome.require_success().require_far();
    assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
}

#[test]
fn a_preloaded_program_outlives_restarts_of_its_blade_on_a_unix_socket() {
    let _turn = turn();
    outlives(Door::Preload, Transport::Unix, 1, "discard,heap,pipe,protect");
}

#[test]
fn a_program_with_a_sidecar_outlives_restarts_of_its_blade_on_tcp() {
    let _turn = turn();
    outlives(Door::Sidecar, Transport::Tcp, 2, "discard,heap,pipe,protect");
}

#[test]
fn forking_programs_outlive_restarts_of_their_blade() {
    let _turn = turn();
    outlives(Door::Usual, Transport::Unix, 3, "fork,discard,heap");
}

/// Starts a blade that is to take over the one with this memory, and is refused. Returns what it
/// said.
fn refused_takeover(memory: &str, file: &Path) -> String {
    let backing = format!("file:{}", file.display());
    let mut command = Command::new(binaries::program("farpool"));
    command.args(["blade", "--memory", memory, "--listen", "tcp://127.0.0.1:0", "--takeover"]);
    let refused = command.args(["--persist", "--backing", &backing]).output().expect("farpool");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{said}");
    said
}

#[test]
fn a_blade_that_keeps_no_table_is_not_taken_over() {
    let _turn = turn();
    let mut kept = Blade::start_persistent("32MiB");
    let file = kept.memory_file();
    kept.kill();
    let table = std::fs::read(file.with_extension("table")).expect("a table");
    let backing = format!("--backing=file:{}", file.display());
    let other = Blade::start_with("32MiB", &[&backing]);
    // As if it had left the table there.
    std::fs::write(file.with_extension("table"), table).expect("a table");
    let said = refused_takeover("32MiB", &file);
    assert!(said.contains("keeps no table"), "{said}");
    assert!(other.stat().is_object(), "it still serves");
}

/// A successor is started beside the blade, ends it and goes on; it leaves alone what it could not
/// go on with.
#[test]
fn a_program_outlives_takeovers_of_its_blade() {
    let _turn = turn();
    let mut blade = Blade::start_persistent(MEMORY);
    let (running, end) =
        checker(Door::Usual, &blade.address(Transport::Tcp), 5, "discard,heap,pipe,protect");
    for _ in 0..restarts() / 2 {
        wait_for_fetches(&running);
        assert_eq!(blade.take_over(), Some(0), "the one before ends in good order");
    }
    let said = refused_takeover("16MiB", &blade.memory_file());
    let still = format!("process {} lends", blade.pid());
    assert!(said.contains(&still) && said.contains("give at least as much"), "{said}");
    wait_for_fetches(&running);
    std::fs::write(end.path().join("end"), "").expect("a file");
    let outcome = running.finish();
    outcome.require_success().require_far();
    assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
}

/// The same on a rack, until there is a file `end`.
fn pool_checker(control: &str, end: &Path) -> Running {
    let mut running = Run::far("16MiB")
        .args(["--pool", control, "--host", "n0", "--quota", "256MiB"])
        .patience(LONG)
        .own_program("farpool-stress")
        .args(["--mib", "64", "--threads", &THREADS.to_string(), "--progress"])
        .args(["--seconds", "7200", "--seed", "6", "--ops", "discard,heap,pipe,protect", "--until"])
        .arg(end)
        .start();
    running.wait_for_output("filled", THREADS);
    running.wait_until_far();
    running
}

/// Requires that a log is as written, by so many processes one after the other.
fn verify_audit(log: &Path, processes: usize) {
    let mut verify = Command::new(binaries::program("farpool"));
    let verified = verify.args(["audit", "verify"]).arg(log).output().expect("farpool");
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    let log = std::fs::read_to_string(log).expect("a log");
    let opened = log.lines().filter(|line| line.contains("the log is opened")).count();
    assert_eq!(opened, processes, "each process goes on with the same log");
}

/// A node of a rack is killed, told to end, and taken over by turns. What it has granted stays, the
/// controller has it back at once, and its audit log is one.
#[test]
fn a_program_outlives_restarts_of_its_node() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let memory = tempfile::Builder::new().tempdir_in("/dev/shm").expect("a folder");
    let memory = memory.path().join("memory");
    let store = folder.path().join("control.redb");
    let control = Daemon::control(&free_address().to_string(), &store);
    let listen = format!("tcp://{}", free_address());
    let audit = folder.path().join("audit.log");
    let start = |more: &[&str]| {
        let more = [&["--audit", audit.to_str().expect("text")], more].concat();
        Daemon::kept_node(&control.address, "n0", MEMORY, &listen, &memory, &more)
    };
    let mut node = start(&[]);
    wait_until("the node to lend", PATIENCE, || {
        let node = answer(&control.address, &["node", "show", "n0"]);
        (node["lendable_bytes"].as_u64() >= Some(256 << 20)).then_some(())
    });
    let end = folder.path().join("end");
    let running = pool_checker(&control.address, &end);
    let segments = || answer(&control.address, &["segment", "list"])["segments"].clone();
    let ids = |all: &Value| -> Vec<String> {
        all.as_array().into_iter().flatten().map(|it| it["id"].to_string()).collect()
    };
    let granted = ids(&segments());
    assert!(!granted.is_empty());
    for number in 0..restarts() {
        wait_for_fetches(&running);
        match number % 3 {
            0 => {
                node.kill();
                node = start(&[]);
            }
            1 => {
                assert!(node.end(), "it ends in good order, without a drain");
                node = start(&[]);
            }
            _ => {
                let before = std::mem::replace(&mut node, start(&["--takeover"]));
                assert_eq!(before.wait(), Some(0), "the one before ends in good order");
            }
        }
        let starts = number as u64 + 2;
        assert_eq!(node.ready["starts"], starts);
        assert!(node.ready["lent_bytes"].as_u64() > Some(0), "{}", node.ready);
        wait_until("the controller to have it back", SOON, || {
            let seen = answer(&control.address, &["node", "show", "n0"]);
            let is_back = seen["incarnation"] == node.ready["incarnation"];
            (is_back && seen["state"] == "up").then_some(())
        });
    }
    wait_for_fetches(&running);
    let after = segments();
    assert!(after.as_array().into_iter().flatten().all(|it| it["state"] == "ready"), "{after}");
    let kept = granted.iter().filter(|id| ids(&after).contains(id)).count();
    assert_eq!(kept, granted.len(), "nothing was moved or granted anew");
    std::fs::write(end, "").expect("a file");
    let outcome = running.finish();
    outcome.require_success().require_far();
    assert_eq!(outcome.counter("lost"), 0, "{}", outcome.stderr);
    assert!(node.end());
    verify_audit(&audit, restarts() + 1);
}

/// Memory that was made anew has zeros where the program had pages: it is told, and ends.
#[test]
fn a_blade_without_its_memory_is_another_blade() {
    let _turn = turn();
    let mut blade = Blade::start_persistent(MEMORY);
    let address = blade.address(Transport::Tcp);
    let (running, _end) = checker(Door::Usual, &address, 4, "discard,heap");
    std::fs::remove_file(blade.memory_file()).expect("its memory");
    blade.restart(libc::SIGKILL);
    running.finish().require_lost("it was started anew");
}
