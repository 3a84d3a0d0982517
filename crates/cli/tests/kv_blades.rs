//! A blade that the server was told by name and that was lost for a while: its memory is used
//! again, and the figures and the log say what is the case.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/home.rs"]
mod home;
#[allow(dead_code)]
#[path = "common/kv.rs"]
mod server;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Instant;

use common::farpool;
use home::Home;
use rustix::process::{Pid, Signal, kill_process};
use server::{Known, Kv, PATIENCE};

const KEYS: usize = 60_000;
const FAR_BYTES: u64 = 192 << 20;

/// A blade, which is killed when dropped.
struct Blade(Child);

impl Blade {
    fn start(home: &Path, socket: &Path) -> Self {
        let mut command = farpool(home);
        let address = format!("unix://{}", socket.display());
        command.args(["blade", "--listen", &address, "--memory", "256MiB", "--json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the blade starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("its output is piped");
        BufReader::new(output).read_line(&mut line).expect("it says that it is ready");
        assert!(line.contains("ready"), "{line}");
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), signal).expect("the blade takes the signal");
    }
}

impl Drop for Blade {
    fn drop(&mut self) {
        // It makes no difference if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Stores all keys until far memory has nine tenths as many items as before.
fn fill_again(kv: &mut Kv, known: &mut Known, before: u64) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        known.store(&mut kv.client, 0..KEYS);
        // Threads report their figures once a second.
        let items = kv.client.stat("far_items");
        if items > before * 9 / 10 {
            return;
        }
        assert!(Instant::now() < deadline, "{items} items in far memory, {before} before");
    }
}

/// A blade stands still until it is lost; `bring_back` gets the home and the blade's socket, too.
fn is_lost_and_returns(bring_back: impl Fn(Blade, &Path, &Path) -> Blade) {
    let home = Home::new();
    let socket = home.path().join("blade.sock");
    let blade = Blade::start(home.path(), &socket);
    let address = format!("unix://{}", socket.display());
    // It is lost once, and not because the machine is busy.
    let far = ["--far", "192MiB", "--far-deadline", "5s", "--blade", &address];
    let flags = [&["-t", "2", "-m", "16"], &far[..]].concat();
    let mut kv = Kv::start(home.path(), &flags);
    let mut known = Known::new(KEYS);
    known.store(&mut kv.client, 0..KEYS);
    let before = kv.client.wait_for_stat("far_items", |items| items > KEYS as u64 / 2);
    assert_eq!(kv.client.stat("far_granted_bytes"), FAR_BYTES);
    blade.signal(Signal::STOP);
    // These wait for the blade, which is lost then.
    known.check(&mut kv.client, 0..100);
    kv.client.wait_for_stat("far_granted_bytes", |bytes| bytes == 0);
    kv.client.wait_for_stat("far_items", |items| items == 0);
    known.check(&mut kv.client, (0..KEYS).step_by(100));
    let _blade = bring_back(blade, home.path(), &socket);
    kv.client.wait_for_stat("far_granted_bytes", |bytes| bytes == FAR_BYTES);
    fill_again(&mut kv, &mut known, before);
    known.check(&mut kv.client, 0..KEYS);
    let log = kv.log();
    let lines = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    assert_eq!((lines("a blade is lost"), lines("a blade is back")), (1, 1), "{log}");
}

#[test]
fn a_blade_that_stood_still_is_used_again() {
    is_lost_and_returns(|blade, _, _| {
        blade.signal(Signal::CONT);
        blade
    });
}

#[test]
fn a_blade_that_was_killed_and_started_again_is_used_again() {
    is_lost_and_returns(|blade, home, socket| {
        drop(blade);
        Blade::start(home, socket)
    });
}
