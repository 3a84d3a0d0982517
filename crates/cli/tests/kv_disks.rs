//! Flash on real devices that are slow, hang, fail, are full or return garbage: a read gives the
//! right value or a miss, other requests are served meanwhile, and the server can end.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/home.rs"]
mod home;
#[allow(dead_code)]
#[path = "common/kv.rs"]
mod server;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{ended, farpool};
use farpool_testkit::disk::{self, Disk, Fault, Loop, Mounted};
use home::Home;
use rustix::process::Signal;
use server::{Client, EVEN_FROM, Known, Kv};

const DISK_BYTES: u64 = 96 << 20;
/// Where zones begin; in front of them is the server's bookkeeping.
const ZONES_AT: u64 = 2 << 20;
const KEYS: usize = 30_000;
/// The keys stored last are in memory.
const IN_MEMORY: std::ops::Range<usize> = KEYS - 1_000..KEYS;
const ON_FLASH: std::ops::Range<usize> = 0..KEYS / 2;
/// The longest that a client should wait, with all that it asks for: the one second that a request
/// waits for a tier, plus what a busy machine adds. If each of a thousand keys waited for a tier,
/// it would take minutes, and behind a disk that hangs for ever.
const BOUND: Duration = Duration::from_secs(30);

fn flags(device: &Path) -> [String; 6] {
    let part = format!("{}:{}MiB", device.display(), DISK_BYTES >> 20);
    ["-t", "2", "--memory", "8MiB", "--flash", &part].map(str::to_owned)
}

fn start(home: &Path, disk: &Disk, more: &[&str]) -> Kv {
    let flags = flags(disk.device.path());
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let mut kv = Kv::start(home, &flags);
    let faults = Arc::clone(&disk.faults);
    kv.release = Some(Box::new(move || faults.set(Fault::None)));
    kv
}

/// A server on a new disk, with all keys stored once.
fn filled(home: &Path, disk: &Disk) -> (Kv, Known) {
    let mut kv = start(home, disk, &["--flash-reset"]);
    let mut known = Known::new(KEYS);
    known.store(&mut kv.client, 0..KEYS);
    let there = known.check(&mut kv.client, ON_FLASH);
    assert!(there > ON_FLASH.len() * 8 / 10, "{there} are there while all is well");
    (kv, known)
}

/// Checks that keys in memory are served without waiting for the disk.
fn memory_is_served(kv: &Kv, known: &Known) {
    let mut other = Client::connect(kv.address);
    let start = Instant::now();
    let there = known.check(&mut other, IN_MEMORY);
    assert!(there > IN_MEMORY.len() / 2, "{there} are in memory");
    assert!(start.elapsed() < BOUND, "{there} keys in memory took {:?}", start.elapsed());
}

#[test]
fn a_slow_disk_delays_nobody_else_and_loses_nothing() {
    let Some(disk) = Disk::start(DISK_BYTES) else { return };
    let home = Home::new();
    let (mut kv, mut known) = filled(home.path(), &disk);
    disk.faults.set(Fault::Slow(Duration::from_millis(300)));
    let start = Instant::now();
    for key in ON_FLASH.step_by(1_500) {
        let mut requests = Client::connect(kv.address);
        requests.send(format!("get key{key}\r\n").as_bytes());
        memory_is_served(&kv, &known);
    }
    eprintln!("ten times a thousand keys in memory in {:?}", start.elapsed());
    let start = Instant::now();
    let there = known.check(&mut kv.client, (1..KEYS / 2).step_by(500));
    eprintln!("{there} of 30 in {:?}, {} requests late", start.elapsed(), disk.faults.done());
    assert!(there > 20, "{there} of 30 came, late");
    assert!(start.elapsed() < 6 * BOUND);
    // Storing goes on; items that the disk does not take are lost.
    known.store(&mut kv.client, 0..10_000);
    memory_is_served_after(&kv, &known, 9_500..10_000);
    assert!(disk.faults.done() > 10);
    disk.faults.set(Fault::None);
    known.store(&mut kv.client, 0..KEYS);
    let there = known.check(&mut kv.client, ON_FLASH);
    assert!(there > ON_FLASH.len() / 2, "{there} are there when all is well again");
}

fn memory_is_served_after(kv: &Kv, known: &Known, keys: std::ops::Range<usize>) {
    let start = Instant::now();
    let there = known.check(&mut Client::connect(kv.address), keys.clone());
    assert!(there > keys.len() / 2, "{there} of {keys:?} are in memory");
    assert!(start.elapsed() < BOUND, "{keys:?} took {:?}", start.elapsed());
}

#[test]
fn a_disk_that_hangs_means_misses_in_time_and_an_end_in_time() {
    let Some(disk) = Disk::start(DISK_BYTES) else { return };
    let home = Home::new();
    let (mut kv, mut known) = filled(home.path(), &disk);
    disk.faults.set(Fault::Hang);
    // Many at a time: more than the device's queue can hold.
    let mut waiting: Vec<Client> = (0..300).map(|_| Client::connect(kv.address)).collect();
    let asked = Instant::now();
    for (client, key) in waiting.iter_mut().zip(ON_FLASH.step_by(50)) {
        client.send(format!("get key{key}\r\n").as_bytes());
    }
    memory_is_served(&kv, &known);
    let mut misses = 0;
    for (client, key) in waiting.iter_mut().zip(ON_FLASH.step_by(50)) {
        let found = client.reply(key);
        assert!(found.is_none_or(|version| version == known.0[key]), "key{key}");
        misses += u64::from(found.is_none());
    }
    eprintln!("{misses} misses in {:?}", asked.elapsed());
    assert!(misses > 50 && asked.elapsed() < BOUND, "{misses} took {:?}", asked.elapsed());
    let late = kv.client.wait_for_stat("lower_late", |late| late > 0);
    assert!(late <= misses, "{late} late, {misses} misses");
    let asked = Instant::now();
    known.store(&mut kv.client, 0..10_000);
    eprintln!("10,000 items stored in {:?} while the disk hangs", asked.elapsed());
    // Keys deleted meanwhile stay deleted.
    known.delete(&mut kv.client, (0..10_000).step_by(10));
    memory_is_served_after(&kv, &known, 9_500..10_000);
    disk.faults.set(Fault::None);
    kv.client.wait_for_stat("flash_broken_shards", |broken| broken == 0);
    known.store(&mut kv.client, 0..KEYS);
    let there = known.check(&mut kv.client, ON_FLASH);
    assert!(there > ON_FLASH.len() / 2, "{there} are there when all is well again");
    // The server ends while the disk hangs.
    disk.faults.set(Fault::Hang);
    kv.client.send(b"get key1\r\nget key2\r\nget key3\r\n");
    let asked = Instant::now();
    kv.signal(Signal::TERM);
    let ended = kv.ends_within(Duration::from_secs(40));
    eprintln!("ended after {:?}", asked.elapsed());
    assert_eq!(ended, Some(0), "{}", kv.log());
    disk.faults.set(Fault::None);
    drop(kv);
    let mut kv = start(home.path(), &disk, &[]);
    known.check(&mut kv.client, 0..KEYS);
}

#[test]
fn what_a_disk_garbles_is_a_miss_and_never_a_wrong_value() {
    let faults =
        [Fault::FlipBits, Fault::Zeros, Fault::Elsewhere, Fault::LoseWrites, Fault::TearWrites];
    for fault in faults {
        let Some(disk) = Disk::start(DISK_BYTES) else { return };
        let home = Home::new();
        let (mut kv, mut known) = filled(home.path(), &disk);
        let gone = kv.client.stat("flash_reads_gone");
        disk.faults.set_from(fault, ZONES_AT);
        known.store(&mut kv.client, (0..KEYS).step_by(2));
        known.delete(&mut kv.client, (0..KEYS).step_by(31));
        let there = known.check(&mut kv.client, 0..KEYS);
        let gone = kv.client.wait_for_stat("flash_reads_gone", |now| now > gone);
        eprintln!("{fault:?}: {there} right, {gone} gone, {} times", disk.faults.done());
        assert!(disk.faults.done() > 10 && there > IN_MEMORY.len());
        // After a kill on the garbled disk, its successor serves right values, too.
        drop(kv);
        disk.faults.set_from(fault, ZONES_AT);
        let mut kv = start(home.path(), &disk, &[]);
        let there = known.check(&mut kv.client, 0..KEYS);
        disk.faults.set(Fault::None);
        let healed = known.check(&mut kv.client, 0..KEYS);
        known.store(&mut kv.client, 0..KEYS);
        let again = known.check(&mut kv.client, ON_FLASH);
        eprintln!("{fault:?}: {there} after a kill, {healed} then, {again} stored anew");
        assert!(again > ON_FLASH.len() / 2, "{again} when all is well again");
    }
}

/// A disk that answers a read from another block of the same zone gives whole records of other
/// keys. A delete that meets one must not leave the deleted item where it is.
#[test]
fn a_delete_holds_though_the_disk_answers_with_another_keys_record() {
    let Some(disk) = Disk::start(DISK_BYTES) else { return };
    let home = Home::new();
    let mut kv = start(home.path(), &disk, &["--flash-reset"]);
    let keys = EVEN_FROM..EVEN_FROM + KEYS;
    let mut known = Known::new(keys.end);
    known.store(&mut kv.client, keys.clone());
    disk.faults.set_from(Fault::Elsewhere, ZONES_AT);
    known.delete(&mut kv.client, keys.clone().step_by(7));
    assert!(disk.faults.done() > 10, "deletes met records from elsewhere");
    disk.faults.set(Fault::None);
    let there = known.check(&mut kv.client, keys.clone());
    assert!(there > KEYS / 2, "{there} are there when all is well again");
    drop(kv);
    let mut kv = start(home.path(), &disk, &[]);
    let there = known.check(&mut kv.client, keys);
    assert!(there > KEYS / 2, "{there} are there after a kill");
}

#[test]
fn a_disk_that_fails_or_is_full_costs_what_is_on_it_until_the_next_start() {
    for fault in [Fault::FailReads, Fault::FailWrites, Fault::Full] {
        let Some(disk) = Disk::start(DISK_BYTES) else { return };
        let home = Home::new();
        let (mut kv, mut known) = filled(home.path(), &disk);
        disk.faults.set(fault);
        for _ in 0..2 {
            known.store(&mut kv.client, 0..KEYS);
            known.delete(&mut kv.client, (0..KEYS).step_by(37));
        }
        memory_is_served(&kv, &known);
        let there = known.check(&mut kv.client, 0..KEYS);
        assert!(there > IN_MEMORY.len() / 2 && disk.faults.done() > 10);
        let breaks = fault != Fault::FailReads;
        if breaks {
            kv.client.wait_for_stat("flash_broken_shards", |broken| broken == 2);
            assert!(kv.client.stat("flash_zones_lost") >= 16);
        } else {
            kv.client.wait_for_stat("flash_reads_failed", |failed| failed > 10);
        }
        disk.faults.set(Fault::None);
        let broken = kv.client.stat("flash_broken_shards");
        assert_eq!(broken, if breaks { 2 } else { 0 }, "broken until the next start");
        known.check(&mut kv.client, 0..KEYS);
        kv.signal(Signal::TERM);
        assert_eq!(kv.ends_within(Duration::from_secs(40)), Some(0));
        drop(kv);
        let mut kv = start(home.path(), &disk, &[]);
        known.check(&mut kv.client, 0..KEYS);
        known.store(&mut kv.client, 0..KEYS);
        let there = known.check(&mut kv.client, ON_FLASH);
        assert!(there > ON_FLASH.len() / 2, "{there} when all is well again");
    }
}

/// A start whose writes the disk only pretends to have taken would bring back deleted items after a
/// crash of the machine.
#[test]
fn a_disk_that_loses_what_it_took_at_the_start_is_refused() {
    let Some(disk) = Disk::start(DISK_BYTES) else { return };
    let home = Home::new();
    let (mut kv, known) = filled(home.path(), &disk);
    kv.signal(Signal::TERM);
    assert_eq!(kv.ends_within(Duration::from_secs(40)), Some(0));
    drop(kv);
    disk.faults.set(Fault::LoseWrites);
    let part = format!("{}:{}MiB", disk.device.path().display(), DISK_BYTES >> 20);
    let error = refusal(home.path(), &part, &[]);
    assert!(error.contains("something else than was written"), "{error}");
    disk.faults.set(Fault::None);
    let mut kv = start(home.path(), &disk, &[]);
    let there = known.check(&mut kv.client, ON_FLASH);
    assert!(there > ON_FLASH.len() / 2, "{there} are there when all is well again");
}

/// A loop device over a new file of this size, and the file.
fn plain_device(home: &Path, bytes: u64) -> Option<(Loop, PathBuf)> {
    let path = home.join("behind");
    File::create(&path).and_then(|file| file.set_len(bytes)).expect("a file");
    Some((Loop::over(&path, true)?, path))
}

/// The error of a server that does not start.
fn refusal(home: &Path, part: &str, more: &[&str]) -> String {
    let mut command = farpool(home);
    command.args(["kv", "-p", "0", "-s"]).arg(home.join("socket"));
    command.args(["-t", "2", "--memory", "8MiB", "--flash", part]).args(more);
    let (code, _, error) = ended(&mut command);
    assert!(code != 0, "{part} {more:?}: it ends well");
    error
}

#[test]
fn a_block_device_serves_and_serves_again_after_every_end() {
    let home = Home::new();
    let Some((device, behind)) = plain_device(home.path(), DISK_BYTES) else { return };
    let flags = flags(device.path());
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let part = flags[5];
    // A device that looks empty may not be.
    let error = refusal(home.path(), part, &[]);
    assert!(error.contains("--flash-reset"), "{error}");
    let larger = format!("{}:1GiB", device.path().display());
    let error = refusal(home.path(), &larger, &["--flash-reset"]);
    assert!(error.contains("the device has 100663296 bytes"), "{error}");
    let mut bytes = vec![1; 4 << 20];
    File::open(&behind).expect("a file").read_exact(&mut bytes).expect("it is longer");
    assert!(bytes.iter().all(|&byte| byte == 0), "a server that refused has written");
    flags.push("--flash-reset");
    let mut kv = Kv::start(home.path(), &flags);
    flags.pop();
    let error = refusal(home.path(), part, &["--flash-reset"]);
    assert!(error.contains("used by another"), "{error}");
    let mut known = Known::new(KEYS);
    known.store(&mut kv.client, 0..KEYS);
    known.delete(&mut kv.client, (0..KEYS).step_by(7));
    for signal in [Signal::TERM, Signal::KILL, Signal::TERM] {
        kv.signal(signal);
        kv.ends_within(BOUND);
        drop(kv);
        kv = Kv::start(home.path(), &flags);
        let there = known.check(&mut kv.client, 0..KEYS);
        eprintln!("{there} after {signal:?}");
        assert!(there > KEYS / 4, "{there} after {signal:?}");
    }
}

#[test]
fn a_device_that_holds_something_else_is_never_overwritten_unasked() {
    let home = Home::new();
    let Some((device, behind)) = plain_device(home.path(), DISK_BYTES) else { return };
    let part = format!("{}:{}MiB", device.path().display(), DISK_BYTES >> 20);
    let first = |bytes: usize| {
        let mut first = vec![0; bytes];
        File::open(device.path()).expect("a device").read_exact(&mut first).expect("it is longer");
        first
    };
    // A partition table of either kind, an XFS, a part of a volume group: each with its magic
    // number in its place.
    let marks: [(u64, &[u8]); 4] =
        [(510, b"\x55\xaa"), (512, b"EFI PART"), (0, b"XFSB"), (512, b"LABELONE")];
    for (at, mark) in marks {
        let file = File::options().write(true).open(device.path()).expect("a device");
        file.write_all_at(&vec![0; 1 << 20], 0).expect("it takes that");
        file.write_all_at(mark, at).expect("it takes that");
        drop(file);
        let before = first(1 << 20);
        let error = refusal(home.path(), &part, &[]);
        assert!(error.contains("--flash-reset"), "{error}");
        assert!(first(1 << 20) == before, "{mark:?} is gone");
    }
    let at = home.path().join("mounted");
    let Some(mounted) = Mounted::ext4(device.path(), &at) else { return };
    std::fs::write(at.join("letter"), "precious").expect("it takes a file");
    for more in [&[][..], &["--flash-reset"]] {
        let error = refusal(home.path(), &part, more);
        assert!(error.contains("mounted"), "{error}");
    }
    assert_eq!(std::fs::read(at.join("letter")).expect("it is there"), b"precious");
    drop(mounted);
    // Even unmounted it holds data.
    let error = refusal(home.path(), &part, &[]);
    assert!(error.contains("--flash-reset") || error.contains("mounted"), "{error}");
    assert!(behind.exists());
}

#[test]
fn a_file_system_without_room_is_found_out_at_the_start() {
    let home = Home::new();
    let Some((device, _)) = plain_device(home.path(), 64 << 20) else { return };
    let at = home.path().join("mounted");
    let Some(_mounted) = Mounted::ext4(device.path(), &at) else { return };
    let flash = at.join("flash");
    let error = refusal(home.path(), &format!("{}:96MiB", flash.display()), &[]);
    assert!(error.contains("room for it cannot be made") && error.contains("No space"), "{error}");
    let left: Vec<_> = std::fs::read_dir(&at).expect("a folder").collect();
    assert!(!left.iter().flatten().any(|it| it.path() == flash), "a file is left: {left:?}");
}

/// A file on a file system whose device has less space than it promised, and then on one that
/// fails.
#[test]
fn a_file_on_a_failing_file_system_costs_what_is_in_it() {
    for fault in [Fault::Full, Fault::FailWrites, Fault::FailReads] {
        let Some(disk) = Disk::start(2 * DISK_BYTES) else { return };
        let home = Home::new();
        let at = home.path().join("mounted");
        let Some(_mounted) = Mounted::ext4(disk.device.path(), &at) else { return };
        let flags = flags(&at.join("flash"));
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut kv = Kv::start(home.path(), &flags);
        let faults = Arc::clone(&disk.faults);
        kv.release = Some(Box::new(move || faults.set(Fault::None)));
        let mut known = Known::new(KEYS);
        known.store(&mut kv.client, 0..KEYS);
        disk.faults.set(fault);
        for _ in 0..2 {
            known.store(&mut kv.client, 0..KEYS);
            known.delete(&mut kv.client, (0..KEYS).step_by(37));
        }
        memory_is_served(&kv, &known);
        let there = known.check(&mut kv.client, 0..KEYS);
        assert!(there > IN_MEMORY.len() / 2 && disk.faults.done() > 10, "{fault:?} {there}");
        kv.signal(Signal::TERM);
        assert_eq!(kv.ends_within(Duration::from_secs(40)), Some(0), "{fault:?}");
    }
}

/// How long the file system hangs: it starts writing changes after 5 seconds, and later changes
/// wait behind that.
const HANG: Duration = Duration::from_secs(15);

/// A thread that syncs a file system; it ends before its disk does.
struct Syncing {
    thread: Option<std::thread::JoinHandle<rustix::io::Result<()>>>,
    faults: Arc<disk::Faults>,
}

impl Syncing {
    fn start(file_system: File, faults: Arc<disk::Faults>) -> Self {
        let sync = move || rustix::fs::syncfs(&file_system);
        Self { thread: Some(std::thread::spawn(sync)), faults }
    }

    fn hangs(&self) -> bool {
        self.thread.as_ref().is_some_and(|it| !it.is_finished())
    }

    /// Lets the disk answer again.
    fn end(&mut self) -> rustix::io::Result<()> {
        self.faults.set(Fault::None);
        self.thread.take().map_or(Ok(()), |it| it.join().expect("it does not panic"))
    }
}

impl Drop for Syncing {
    fn drop(&mut self) {
        // A failed test has already printed its failure.
        let _ = self.end();
    }
}

/// Ext4 makes a process that changes a file wait for its journal, which waits for the disk. Only
/// requests for items on flash may be affected, and keys deleted meanwhile stay deleted when the
/// server is killed.
#[test]
fn a_file_system_that_hangs_stops_nobody() {
    let Some(disk) = Disk::start(2 * DISK_BYTES) else { return };
    let home = Home::new();
    let at = home.path().join("mounted");
    let Some(_mounted) = Mounted::ext4(disk.device.path(), &at) else { return };
    let flags = flags(&at.join("flash"));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let start = |home: &Home| {
        let mut kv = Kv::start(home.path(), &flags);
        let faults = Arc::clone(&disk.faults);
        kv.release = Some(Box::new(move || faults.set(Fault::None)));
        kv
    };
    let mut kv = start(&home);
    let mut known = Known::new(KEYS);
    known.store(&mut kv.client, 0..KEYS);
    kv.client.wait_for_stat("flash_written", |written| written > KEYS as u64 / 2);
    // Only items on flash by then can be served after the kill, and what a zone has is there once
    // all of it is: after an end in order every zone is.
    kv.signal(Signal::TERM);
    assert_eq!(kv.ends_within(Duration::from_secs(40)), Some(0));
    drop(kv);
    let mut kv = start(&home);
    kv.client.wait_for_stat("flash_items", |items| items > KEYS as u64 / 2);
    let file_system = File::open(&at).expect("it is mounted");
    disk.faults.set(Fault::Hang);
    // Starts now the writes that would otherwise start within half a minute.
    let mut sync = Syncing::start(file_system, Arc::clone(&disk.faults));
    let hung = Instant::now();
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    while hung.elapsed() < HANG || rounds < 3 {
        let asked = Instant::now();
        let new = KEYS - 2_000..KEYS;
        known.store(&mut kv.client, new.clone());
        // Some of these are in memory, some on flash, where each must be forgotten before the
        // reply.
        let deleted: Vec<usize> = (rounds..KEYS).step_by(997).collect();
        let requests: String = deleted.iter().map(|key| format!("delete key{key}\r\n")).collect();
        kv.client.send(requests.as_bytes());
        for key in deleted {
            known.0[key] += 1;
            let reply = kv.client.line();
            assert!(["DELETED", "NOT_FOUND"].contains(&reply.as_str()), "{reply}");
        }
        let there = known.check(&mut kv.client, new);
        assert!(there > 1_000, "{there} are in memory");
        // Items on flash are not served, but every request gets a reply.
        kv.client.version(KEYS / 4 + rounds);
        longest = longest.max(asked.elapsed());
        assert!(longest < BOUND, "round {rounds} took {longest:?}");
        rounds += 1;
    }
    assert!(disk.faults.done() > 0 && sync.hangs(), "the disk hangs");
    eprintln!("{rounds} rounds, the longest {longest:?}, {} requests late", disk.faults.done());
    // Killed while the disk hangs. Its successor can begin only when the disk answers again.
    let before = kv.log();
    drop(kv);
    sync.end().expect("all is written");
    let mut kv = start(&home);
    let there = known.check(&mut kv.client, 0..KEYS);
    assert!(there > KEYS / 4, "{there} are served after a kill\n{before}\n{}", kv.log());
    known.store(&mut kv.client, 0..KEYS);
    kv.signal(Signal::TERM);
    assert_eq!(kv.ends_within(Duration::from_secs(40)), Some(0));
    assert_eq!(home.books(), 0, "nothing stays in memory after an end in order");
    drop(kv);
    let mut kv = start(&home);
    let there = known.check(&mut kv.client, ON_FLASH);
    assert!(there > ON_FLASH.len() / 2, "{there} are served after an end in order");
}

#[test]
fn memory_without_room_for_the_book_keeping_is_found_out_at_the_start() {
    if !rustix::process::geteuid().is_root() {
        farpool_testkit::skip("mounts need root");
        return;
    }
    let home = tempfile::tempdir().expect("a home");
    let at = home.path().join("small");
    let small = Mounted::tmpfs(&at, "256k");
    let part = format!("{}:96MiB", home.path().join("flash").display());
    let books = at.to_str().expect("a path");
    let error = refusal(home.path(), &part, &["--flash-books", books]);
    assert!(error.contains("twice the room"), "{error}");
    drop(small);
    let large = Mounted::tmpfs(&at, "4m");
    let flags = ["-t", "2", "--memory", "8MiB", "--flash", &part, "--flash-books", books];
    let mut kv = Kv::start(home.path(), &flags);
    // Filling the rest of the file system harms nothing: the server's space was allocated.
    let filled = std::fs::write(at.join("others"), vec![1; 4 << 20]);
    assert!(filled.is_err(), "it is full");
    let mut known = Known::new(KEYS);
    known.store(&mut kv.client, 0..KEYS);
    known.delete(&mut kv.client, (0..KEYS).step_by(3));
    let there = known.check(&mut kv.client, 0..KEYS);
    assert!(there > KEYS / 4, "{there}");
    kv.signal(Signal::TERM);
    assert_eq!(kv.ends_within(Duration::from_secs(40)), Some(0));
    drop(large);
}
