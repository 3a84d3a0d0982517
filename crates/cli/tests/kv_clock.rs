//! Unix time jumps under the real server: relative expiry times follow a clock that does not jump,
//! absolute ones behave as in memcached, and nothing expired comes back, not even after restarts.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/home.rs"]
mod home;
#[allow(dead_code)]
#[path = "common/kv.rs"]
mod server;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use farpool_testkit::ports::free_address;
use home::Home;
use rustix::process::Signal;
use server::{Client, Kv, PATIENCE};

const HOUR_S: i64 = 3600;
/// A short lifetime: long enough for a busy machine to store an item and find it.
const SHORT_S: i64 = 8;
/// The same, and what the server's clock may lag behind.
const SHORT_OVER_S: u64 = 10;

/// The library that gives a process another time. None, after printing the reason, if it is not
/// installed.
fn faketime() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let found = folders
        .map(|folder| folder.path().join("faketime/libfaketime.so.1"))
        .find(|path| path.exists());
    if found.is_none() {
        farpool_testkit::skip("libfaketime is not installed (apt-get install faketime)");
    }
    found
}

/// Unix time as one process sees it: at an offset in seconds from the real one.
struct World {
    library: PathBuf,
    file: PathBuf,
    offset_s: i64,
}

impl World {
    fn new(home: &Path) -> Option<Self> {
        let world = Self { library: faketime()?, file: home.join("offset"), offset_s: 0 };
        world.write();
        // memcached drops root's privileges.
        let everybody = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(home, everybody).expect("it is ours");
        Some(world)
    }

    fn write(&self) {
        let text = format!("{:+}\n", self.offset_s);
        // In one step, so that a half-written file is never read.
        let next = self.file.with_extension("next");
        std::fs::write(&next, text).expect("a file");
        std::fs::rename(next, &self.file).expect("a file");
    }

    fn jump_to(&mut self, offset_s: i64) {
        self.offset_s = offset_s;
        self.write();
    }

    fn unix_s(&self) -> i64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is past 1970");
        i64::try_from(now.as_secs()).expect("the clock is right") + self.offset_s
    }

    fn enter(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.library)
            .env("FAKETIME_TIMESTAMP_FILE", &self.file)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1");
    }
}

struct Memcached {
    child: Child,
    address: SocketAddr,
}

impl Memcached {
    fn start(world: &World) -> Option<Self> {
        let address = free_address();
        let mut command = Command::new("memcached");
        command.args(["-U", "0", "-l", "127.0.0.1", "-p", &address.port().to_string()]);
        if rustix::process::geteuid().is_root() {
            command.args(["-u", "root"]);
        }
        world.enter(&mut command);
        let Ok(child) = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn() else {
            farpool_testkit::skip("memcached is not installed (apt-get install memcached)");
            return None;
        };
        let memcached = Self { child, address };
        let deadline = Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(address).is_err() {
            assert!(Instant::now() < deadline, "memcached does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(memcached)
    }
}

impl Drop for Memcached {
    fn drop(&mut self) {
        // It makes no difference if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether the server's clock is the world's.
fn sees(world: &World, client: &mut Client) -> bool {
    let before = world.unix_s();
    let told = i64::try_from(client.stat("time")).expect("a time");
    (before - 3..=world.unix_s() + 3).contains(&told)
}

/// Waits until the server has seen this many seconds pass: it checks its clock once a second.
fn pass(client: &mut Client, seconds: u64) {
    let start = client.stat("uptime");
    client.wait_for_stat("uptime", |now| now >= start + seconds);
}

fn set(client: &mut Client, key: &str, exptime: i64) {
    set_long(client, key, exptime, 1);
}

fn set_long(client: &mut Client, key: &str, exptime: i64, bytes: usize) {
    let set = format!("set {key} 0 {exptime} {bytes}\r\n{}", "x".repeat(bytes));
    assert_eq!(client.ask(&set), "STORED");
}

fn has(client: &mut Client, key: &str) -> bool {
    match client.ask(&format!("mg {key}")).as_str() {
        "HD" => true,
        "EN" => false,
        other => panic!("{other}"),
    }
}

/// Which of a few items are found while the clock jumps: name and presence, step by step.
fn jumps(world: &mut World, client: &mut Client) -> Vec<(&'static str, bool)> {
    world.jump_to(0);
    assert!(sees(world, client), "it sees another clock");
    let now = world.unix_s();
    set(client, "forever", 0);
    set(client, "relative", HOUR_S);
    set(client, "absolute", now + HOUR_S);
    set(client, "short", SHORT_S);
    set(client, "short_absolute", now + SHORT_S);
    set(client, "long", 30 * 24 * HOUR_S);
    let names = ["forever", "relative", "absolute", "short", "short_absolute", "long"];
    let mut seen = Vec::new();
    let look = |client: &mut Client, seen: &mut Vec<_>, names: &[&'static str]| {
        seen.extend(names.iter().map(|&name| (name, has(client, name))));
    };
    look(client, &mut seen, &names);
    world.jump_to(5 * HOUR_S);
    pass(client, 1);
    look(client, &mut seen, &["forever", "relative", "absolute", "long"]);
    pass(client, SHORT_OVER_S - 1);
    look(client, &mut seen, &names);
    // A moment ago and soon by Unix time, both later than the server's present time.
    set(client, "ago", world.unix_s() - 60);
    set(client, "soon", world.unix_s() + 60);
    set(client, "past", world.unix_s() - 6 * HOUR_S);
    set(client, "next", SHORT_S);
    look(client, &mut seen, &["ago", "soon", "past", "next"]);
    world.jump_to(-5 * HOUR_S);
    pass(client, SHORT_OVER_S);
    look(client, &mut seen, &["next", "ago", "soon", "forever", "relative", "absolute"]);
    set(client, "again", SHORT_S);
    set(client, "early", world.unix_s() + HOUR_S);
    look(client, &mut seen, &["again", "early"]);
    assert_eq!(client.ask(&format!("flush_all {SHORT_S}")), "OK");
    world.jump_to(HOUR_S);
    pass(client, 1);
    look(client, &mut seen, &["forever", "relative"]);
    pass(client, SHORT_OVER_S);
    look(client, &mut seen, &["forever", "relative", "again"]);
    set(client, "new", 0);
    world.jump_to(0);
    pass(client, 1);
    look(client, &mut seen, &["new"]);
    seen
}

#[test]
fn jumps_of_the_clock_mean_what_they_mean_to_memcached() {
    let home = tempfile::tempdir().expect("a home");
    let Some(mut world) = World::new(home.path()) else { return };
    // In a world of its own, at the same time: most of it is waiting.
    let theirs = std::thread::spawn(|| {
        let home = tempfile::tempdir().expect("a home");
        let mut world = World::new(home.path())?;
        let memcached = Memcached::start(&world)?;
        Some(jumps(&mut world, &mut Client::connect(memcached.address)))
    });
    let ours = {
        let mut kv = Kv::start_with(home.path(), &["-t", "2"], |it| world.enter(it));
        jumps(&mut world, &mut kv.client)
    };
    let is = |name: &str, seen: &[(&str, bool)]| {
        seen.iter().filter(|it| it.0 == name).map(|it| it.1).collect::<Vec<_>>()
    };
    assert_eq!(is("relative", &ours), [true, true, true, true, true, false], "{ours:?}");
    assert_eq!(is("short", &ours), [true, false], "{ours:?}");
    assert_eq!(is("next", &ours), [true, false], "{ours:?}");
    assert_eq!(is("forever", &ours), [true, true, true, true, true, false], "{ours:?}");
    assert_eq!(is("new", &ours), [true], "{ours:?}");
    let Some(theirs) = theirs.join().expect("memcached serves") else { return };
    assert_eq!(ours, theirs, "memcached's on the right");
}

const FILLERS: usize = 30_000;
const OF_A_KIND: usize = 1_200;
/// Items of one lifetime fill segments of their own, and only full segments leave memory.
const ITEM_BYTES: usize = 600;
/// Items that are read are promoted, and memory does not outlive the server: each look reads
/// different ones.
const LOOKS: usize = 6;
/// How many of a look's items must be there: a busy device may have refused some.
const MOST: usize = OF_A_KIND / LOOKS * 8 / 10;

struct Restarting<'a> {
    home: &'a Path,
    world: World,
    fillers: usize,
}

impl Restarting<'_> {
    fn start(&mut self, offset_s: i64) -> Kv {
        self.world.jump_to(offset_s);
        let part = format!("{}:192MiB", self.home.join("flash").display());
        let flags = ["-t", "1", "--memory", "16MiB", "--flash", &part];
        Kv::start_with(self.home, &flags, |it| self.world.enter(it))
    }

    /// Stores items of a kind, then enough others to move them out of memory.
    fn store(&mut self, kv: &mut Kv, kind: &str, exptime: i64) {
        for number in 0..OF_A_KIND {
            set_long(&mut kv.client, &format!("{kind}{number}"), exptime, ITEM_BYTES);
        }
        let value = "f".repeat(1_000);
        for _ in 0..FILLERS {
            self.fillers += 1;
            let set = format!("set filler{} 0 0 1000 noreply\r\n{value}\r\n", self.fillers);
            kv.client.send(set.as_bytes());
        }
        assert_eq!(kv.client.ask("mn"), "MN");
    }

    fn end(&self, mut kv: Kv) {
        kv.signal(Signal::TERM);
        assert_eq!(kv.ends_within(PATIENCE), Some(0));
    }
}

/// Counts the items of a kind that are there, among those of this look.
fn count(kv: &mut Kv, kind: &str, look: usize) -> usize {
    let numbers = (look..OF_A_KIND).step_by(LOOKS);
    numbers.filter(|number| has(&mut kv.client, &format!("{kind}{number}"))).count()
}

#[test]
fn a_restart_across_a_jump_revives_nothing_and_goes_on_by_the_new_clock() {
    let home = Home::new();
    let Some(world) = World::new(home.path()) else { return };
    let now = world.unix_s();
    let mut run = Restarting { home: home.path(), world, fillers: 0 };
    let mut kv = run.start(0);
    run.store(&mut kv, "forever", 0);
    run.store(&mut kv, "relative", HOUR_S);
    run.store(&mut kv, "absolute", now + 3 * HOUR_S);
    let there = ["forever", "relative", "absolute"].map(|kind| count(&mut kv, kind, 0));
    assert!(there.iter().all(|&it| it > MOST), "{there:?}");
    assert!(kv.client.stat("flash_items") > 0);
    run.end(kv);
    // Two hours later.
    let mut kv = run.start(2 * HOUR_S);
    assert_eq!(count(&mut kv, "relative", 1), 0);
    let there = count(&mut kv, "absolute", 1);
    assert!(there > MOST, "{there}: {}", kv.log());
    run.end(kv);
    // The clock is set right, or wrong: nothing comes back.
    let mut kv = run.start(0);
    assert_eq!(count(&mut kv, "relative", 2), 0, "expired is expired");
    assert!(count(&mut kv, "absolute", 2) > MOST);
    run.end(kv);
    let mut kv = run.start(10 * HOUR_S);
    assert_eq!(count(&mut kv, "absolute", 3), 0);
    run.end(kv);
    let mut kv = run.start(-5 * HOUR_S);
    let there = ["forever", "relative", "absolute"].map(|kind| count(&mut kv, kind, 4));
    assert!(there[0] > MOST && there[1..] == [0, 0], "{there:?}");
    by_a_clock_that_was_set_back(&mut run, kv);
}

/// Items stored now live by the clock's present time, though it is behind its earlier one.
fn by_a_clock_that_was_set_back(run: &mut Restarting<'_>, mut kv: Kv) {
    let back_s = run.world.offset_s;
    assert!(sees(&run.world, &mut kv.client), "it sees another clock");
    let now = run.world.unix_s();
    run.store(&mut kv, "later", now + HOUR_S);
    run.store(&mut kv, "soon", 1_200);
    assert!(count(&mut kv, "later", 0) > MOST && count(&mut kv, "soon", 0) > MOST);
    set(&mut kv.client, "short", SHORT_S);
    set(&mut kv.client, "short_absolute", run.world.unix_s() + SHORT_S);
    assert!(has(&mut kv.client, "short") && has(&mut kv.client, "short_absolute"));
    pass(&mut kv.client, SHORT_OVER_S);
    assert!(!has(&mut kv.client, "short") && !has(&mut kv.client, "short_absolute"));
    assert_eq!(kv.client.ask(&format!("flush_all {}", 2 * HOUR_S)), "OK");
    run.end(kv);
    // The time in between passes again.
    let mut kv = run.start(back_s + 1_800);
    assert_eq!(count(&mut kv, "soon", 1), 0, "20 minutes have passed");
    assert!(count(&mut kv, "later", 1) > MOST);
    run.end(kv);
    let mut kv = run.start(back_s + 3 * HOUR_S);
    let there = ["forever", "later"].map(|kind| count(&mut kv, kind, 5));
    assert_eq!(there, [0, 0], "flushed meanwhile");
}
