//! `farpool vm migrate`: a guest goes on at another host with every byte of its memory, once,
//! whoever dies in between.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::guest::{Guest, Image, QEMU, WORK_MIB};
use farpool_e2e::run::Run;
use farpool_e2e::{PATIENCE, binaries, tree, turn, wait_until};

const LOCAL: &str = "160MiB";
const BLADE: &str = "2GiB";
/// Migrations of one guest to and fro.
const TRIPS: usize = 6;

/// One of the two hosts' VMs.
struct Host<'a> {
    image: &'a Image,
    blade: &'a Blade,
    name: String,
}

impl<'a> Host<'a> {
    fn new(image: &'a Image, blade: &'a Blade, name: &str) -> Host<'a> {
        Host { image, blade, name: format!("{name}-{}", std::process::id()) }
    }

    fn run(&self) -> Run {
        Run::vm(&self.name, LOCAL).blade(&self.blade.address(Transport::Tcp))
    }

    /// Where this host waits for a guest.
    fn address(&self) -> String {
        format!("unix://{}", self.image.directory().join(&self.name).display())
    }

    fn guest(&self, run: Run, memory: &str) -> Guest {
        Guest::start(self.image, run, &["-m", memory], &format!("work={WORK_MIB}"))
    }

    /// The folder of the VM, beside its run's.
    fn folder(&self) -> PathBuf {
        let base = match rustix::process::geteuid().is_root() {
            true => PathBuf::from("/run/farpool"),
            false => PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").expect("a folder"))
                .join("farpool"),
        };
        base.join(format!("vm-{}", self.name))
    }

    /// Starts a guest here.
    fn start(&self) -> Guest {
        let mut guest = self.guest(self.run().arg("--migratable"), "256");
        guest.running.wait_for_output("GUEST filled", 1);
        guest
    }

    /// Has this host wait for one.
    fn wait(&self) -> Guest {
        self.wait_with("256")
    }

    fn wait_with(&self, memory: &str) -> Guest {
        let guest = self.guest(self.run().arg("--incoming").arg(self.address()), memory);
        guest.running.wait_for_line("is waited for at");
        guest
    }

    /// The command that moves the guest of this host to another one.
    fn migrate(&self, to: &Host<'_>) -> Command {
        let mut farpool = Command::new(binaries::program("farpool"));
        farpool.args(["vm", "migrate", &self.name, "--to", &to.address(), "--json"]);
        farpool.stdout(Stdio::piped()).stderr(Stdio::piped());
        farpool
    }

    fn farpool(&self, words: &[&str]) -> Output {
        let mut farpool = Command::new(binaries::program("farpool"));
        farpool.arg("vm").args(words).arg(&self.name).output().expect("farpool vm")
    }

    /// What `farpool vm stat` tells, while there is such a VM.
    fn stat(&self) -> Option<serde_json::Value> {
        serde_json::from_slice(&self.farpool(&["stat", "--json"]).stdout).ok()
    }

    fn is_stopped(&self) -> bool {
        self.stat().is_some_and(|stat| stat["state"] != "running")
    }
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

/// Moves the guest to a host that waits there, and returns it with the figures.
fn moved(guest: Guest, from: &Host<'_>, to: &Host<'_>) -> (Guest, serde_json::Value) {
    let mut there = to.wait();
    let output = from.migrate(to).output().expect("farpool vm migrate");
    assert!(output.status.success(), "{} {}", said(&output), there.running.stderr());
    guest.running.finish().require_success();
    there.require_rounds();
    (there, serde_json::from_slice(&output.stdout).expect("figures"))
}

#[test]
fn a_guest_goes_to_and_fro_with_all_its_memory() {
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let blade = Blade::start(BLADE);
    let hosts = [Host::new(&image, &blade, "one"), Host::new(&image, &blade, "other")];
    let mut guest = hosts[0].start();
    guest.require_rounds();
    let trips = std::env::var("FARPOOL_TRIPS").ok().and_then(|it| it.parse().ok());
    for trip in 0..trips.unwrap_or(TRIPS) {
        let (from, to) = (&hosts[trip % 2], &hosts[(trip + 1) % 2]);
        let (there, told) = moved(guest, from, to);
        println!("{told}");
        // What is sent is the state of the devices, and where the pages are and what opens them.
        assert!(told["sent_bytes"].as_u64() < Some((WORK_MIB << 20) / 50), "{told}");
        guest = there;
    }
    guest.end();
    let is_empty = || (blade.stat()["blades"][0]["used_bytes"] == 0).then_some(());
    wait_until("the blade to have nothing left", PATIENCE, is_empty);
}

/// Whatever is wrong with the other host, the guest goes on here.
#[test]
fn a_guest_that_cannot_go_stays() {
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let (blade, other_blade) = (Blade::start(BLADE), Blade::start(BLADE));
    let here = Host::new(&image, &blade, "stays");
    let mut guest = here.start();
    let refused = |guest: &mut Guest, to: &Host<'_>, reason: &str| {
        let output = here.migrate(to).output().expect("farpool vm migrate");
        let told = said(&output);
        assert!(!output.status.success() && told.contains(reason), "{told}");
        assert_eq!(here.stat().expect("it is there")["is_suspended"], false, "{told}");
        guest.require_rounds();
    };
    let nobody = Host::new(&image, &blade, "nobody");
    refused(&mut guest, &nobody, "cannot be reached");
    let small = Host::new(&image, &blade, "small");
    let waiting = small.wait_with("128");
    refused(&mut guest, &small, "give the same -m");
    tree::signal(waiting.running.program_pid(), libc::SIGKILL);
    waiting.running.finish();
    let strange = Host::new(&image, &other_blade, "strange");
    let waiting = strange.wait();
    refused(&mut guest, &strange, "on a blade that this program does not use");
    let ended = waiting.running.finish();
    assert!(ended.code == 1 && ended.stderr.contains("no guest has come"), "{}", ended.stderr);
    // And it still can go.
    let to = Host::new(&image, &blade, "there");
    moved(guest, &here, &to).0.end();
    let fixed = Run::vm(&here.name, LOCAL).program(QEMU);
    let fixed = fixed.args(["-accel", "tcg", "-m", "64", "-display", "none", "-nodefaults"]);
    let running = fixed.start();
    wait_until("it to run", PATIENCE, || here.stat());
    let output = here.migrate(&nobody).output().expect("farpool vm migrate");
    assert!(said(&output).contains("--migratable"), "{}", said(&output));
    tree::signal(running.program_pid(), libc::SIGTERM);
    running.finish();
}

/// What the pager of this host's VM answers to an order, with what comes with either.
fn ordered(host: &Host<'_>, order: &str, bytes: &[u8]) -> (String, Vec<u8>) {
    let folder = host.folder();
    let mut desk = UnixStream::connect(folder.join("guest.sock")).expect("a desk");
    desk.write_all(format!("{order} {}\n", bytes.len()).as_bytes()).expect("an order");
    desk.write_all(bytes).expect("an order");
    let mut answer = Vec::new();
    desk.read_to_end(&mut answer).expect("an answer");
    let end = answer.iter().position(|byte| *byte == b'\n').expect("a line");
    let line = String::from_utf8_lossy(&answer[..end]).into_owned();
    let word = line.split(' ').next().unwrap_or_default().to_owned();
    (word, answer[end + 1..].to_vec())
}

/// Both pagers are told to have the guest, in every order: a giver that keeps it is never robbed of
/// it, however long the receiver has it at hand, and a receiver that has taken it keeps it.
#[test]
fn never_do_two_hosts_have_the_guest() {
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let blade = Blade::start(BLADE);
    let from = Host::new(&image, &blade, "giver");
    let mut guest = from.start();
    let word = |host: &Host<'_>, order: &str| ordered(host, order, &[]).0;
    for (number, orders) in [
        &[("giver", "KEEP", "KEPT"), ("receiver", "TAKE", "HELD")][..],
        &[("giver", "FORCE", "KEPT"), ("receiver", "TAKE", "HELD")],
        &[("giver", "LET-GO", "GONE"), ("giver", "KEEP", "KEPT"), ("receiver", "TAKE", "HELD")],
        &[("giver", "LET-GO", "GONE"), ("giver", "FORCE", "KEPT"), ("receiver", "TAKE", "HELD")],
        &[("receiver", "TAKE", "HELD"), ("giver", "LET-GO", "GONE"), ("receiver", "TAKE", "TAKEN")],
    ]
    .into_iter()
    .enumerate()
    {
        let to = Host::new(&image, &blade, &format!("receiver{number}"));
        let there = to.wait();
        guest.monitor.command("stop");
        wait_until("the other desk", PATIENCE, || {
            to.folder().join("guest.sock").exists().then_some(())
        });
        let (given, memory) = ordered(&from, "GIVE", &[]);
        assert_eq!(given, "GIVEN", "{number}: {}", String::from_utf8_lossy(&memory));
        let (bound, reason) = ordered(&to, "BIND", &memory);
        assert_eq!(bound, "BOUND", "{number}: {}", String::from_utf8_lossy(&reason));
        for (who, order, answer) in orders {
            let host = if *who == "giver" { &from } else { &to };
            assert_eq!(word(host, order), *answer, "{number}: {who} {order} of {orders:?}");
        }
        if orders.iter().any(|(.., answer)| *answer == "TAKEN") {
            assert_eq!(word(&from, "KEEP"), "TAKEN", "{number}");
        } else {
            guest.monitor.command("cont");
            guest.require_rounds();
        }
        tree::end(there.running.pid());
        there.running.finish();
    }
    tree::end(guest.running.pid());
    guest.running.finish();
}

/// Whom a trial kills.
#[derive(Clone, Copy, Debug)]
enum Victim {
    /// The QEMU that gives.
    Giver,
    /// The QEMU that gets.
    Receiver,
    /// The command.
    Command,
}

/// Kills one of them at some moment of a migration: the guest runs at one of the hosts, unless its
/// own died, and never at both.
#[test]
fn a_guest_runs_once_whoever_is_killed() {
    let Some(image) = Image::make() else { return };
    let _turn = turn();
    let blade = Blade::start(BLADE);
    let mut seed: u64 =
        std::env::var("FARPOOL_SEED").ok().and_then(|it| it.parse().ok()).unwrap_or(7);
    let trials: usize =
        std::env::var("FARPOOL_TRIALS").ok().and_then(|it| it.parse().ok()).unwrap_or(6);
    for trial in 0..trials {
        let victim = [Victim::Giver, Victim::Receiver, Victim::Command][trial % 3];
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The guest stands still for some 100 ms after its memory has left.
        let delay = Duration::from_micros((seed >> 33) % 250_000);
        let mut outcome = String::new();
        one_trial(&image, &blade, (trial, victim, delay), &mut outcome);
        println!("{trial}: {victim:?} after {delay:?}: {outcome}");
    }
}

fn one_trial(
    image: &Image,
    blade: &Blade,
    (trial, victim, delay): (usize, Victim, Duration),
    outcome: &mut String,
) {
    let from = Host::new(image, blade, &format!("from{trial}"));
    let to = Host::new(image, blade, &format!("to{trial}"));
    let mut guest = from.start();
    let mut there = to.wait();
    let (giver, receiver) = (guest.running.program_pid(), there.running.program_pid());
    let mut command = from.migrate(&to).spawn().expect("farpool vm migrate");
    let has_ended = |command: &mut std::process::Child| matches!(command.try_wait(), Ok(Some(_)));
    wait_until("the guest to stop", PATIENCE, || {
        (from.is_stopped() || has_ended(&mut command)).then_some(())
    });
    std::thread::sleep(delay);
    match victim {
        Victim::Giver => tree::signal(giver, libc::SIGKILL),
        Victim::Receiver => tree::signal(receiver, libc::SIGKILL),
        Victim::Command => drop(command.kill()),
    }
    let told = said(&command.wait_with_output().expect("its end"));
    if matches!(victim, Victim::Command) && guest.running.is_running() {
        // Who has it back here, or learns that it is the other host's.
        let _ = from.farpool(&["resume"]);
    }
    if matches!(victim, Victim::Receiver) && told.contains("--force") {
        // It was killed when it could take the guest, and nobody can tell whether it did.
        let _ = from.farpool(&["resume", "--force"]);
    }
    let runs = |guest: &mut Guest, host: &Host<'_>| {
        guest.running.is_running() && host.stat().is_some_and(|stat| stat["state"] == "running")
    };
    let mut where_it_is = None;
    wait_until("the guest to run, or nobody to wait for it", PATIENCE, || {
        let (here, other) = (runs(&mut guest, &from), runs(&mut there, &to));
        assert!(!(here && other), "it runs twice: {told}");
        where_it_is = if here { Some(true) } else { other.then_some(false) };
        let is_over = !guest.running.is_running() && !there.running.is_running();
        (where_it_is.is_some() || is_over).then_some(())
    });
    match where_it_is {
        Some(true) => guest.require_rounds(),
        Some(false) => there.require_rounds(),
        // Its own host has died: the giver before it let go, or the receiver after it took it.
        None => match victim {
            Victim::Giver => assert!(!told.contains("downtime_ms"), "it had moved: {told}"),
            Victim::Receiver => assert!(told.contains("downtime_ms"), "it had not: {told}"),
            Victim::Command => panic!("it runs nowhere: {told}"),
        },
    }
    let is_twice = runs(&mut guest, &from) && runs(&mut there, &to);
    assert!(!is_twice, "it runs twice: {told}");
    outcome.push_str(match where_it_is {
        Some(true) => "it stays",
        Some(false) => "it has moved",
        None => "it died with its host",
    });
    for guest in [guest, there] {
        tree::end(guest.running.pid());
        guest.running.finish();
    }
}
