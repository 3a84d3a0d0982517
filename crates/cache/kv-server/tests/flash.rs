//! Flash under the server: items that do not fit into memory are still served, after a restart as
//! well; what was replaced, deleted or flushed never comes back.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use farpool_kv_server::{
    Bookkeeping, FlashError, FlashSettings, Server, ServerError, Settings, Shared,
};
use farpool_kv_tier::flash::layout::{Superblock, Use};

const MEMORY_BYTES: usize = 16 << 20;
const FLASH_BYTES: u64 = 192 << 20;
const KEYS: usize = 40_000;
const START_UNIX_S: i64 = 1_700_000_000;
/// Storing one of two keys whose hashes agree in the 32 bits that the index keeps costs the other's
/// item on flash. The seed is random: one run in five has such a pair among its keys in one shard.
const ALIKE_MAX: u64 = 3;

/// A folder for flash, and one in memory for its bookkeeping.
struct Folder {
    disk: tempfile::TempDir,
    _memory: tempfile::TempDir,
}

const BOOKS: &str = "books";

impl Folder {
    fn new() -> Self {
        let disk = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        std::os::unix::fs::symlink(memory.path(), disk.path().join(BOOKS)).unwrap();
        Self { disk, _memory: memory }
    }

    fn path(&self) -> &Path {
        self.disk.path()
    }
}

fn settings(path: &Path, threads: usize) -> Settings {
    Settings {
        addresses: vec!["127.0.0.1:0".parse().unwrap()],
        memory_bytes: MEMORY_BYTES,
        threads,
        flash: Some(FlashSettings {
            path: path.to_owned(),
            bytes: FLASH_BYTES,
            reset: false,
            write_bytes_per_s: None,
            books: Bookkeeping::Only(path.with_file_name(BOOKS)),
        }),
        ..Settings::default()
    }
}

struct Running {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), ServerError>>>,
    text: SocketAddr,
}

impl Running {
    fn start(settings: Settings, unix_s: i64) -> Self {
        let server = Server::bind(settings, unix_s).unwrap();
        let text = server.addresses()[0];
        let shared = server.shared();
        let thread = Some(std::thread::spawn(move || server.run()));
        Self { shared, thread, text }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.ask_to_stop();
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap().unwrap();
        }
    }
}

struct Text(BufReader<TcpStream>);

impl Text {
    fn connect(at: SocketAddr) -> Self {
        let stream = TcpStream::connect(at).unwrap();
        // A hang fails the test instead of blocking the whole run.
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, request: &str) -> String {
        self.send(format!("{request}\r\n").as_bytes());
        self.line()
    }

    /// Returns value and CAS number.
    fn gets(&mut self, key: &str) -> Option<(Vec<u8>, u64)> {
        let line = self.ask(&format!("gets {key}"));
        if line == "END" {
            return None;
        }
        let words: Vec<&str> = line.split(' ').collect();
        let mut value = vec![0; words[3].parse::<usize>().unwrap() + 2];
        self.0.read_exact(&mut value).unwrap();
        value.truncate(value.len() - 2);
        assert_eq!(self.line(), "END");
        Some((value, words[4].parse().unwrap()))
    }

    fn statistic(&mut self, name: &str) -> u64 {
        self.send(b"stats\r\n");
        common::talk::read_statistic(|| self.line(), name)
    }

    fn fill(&mut self, keys: impl Iterator<Item = usize>, round: usize, exptime: i64) {
        for key in keys {
            let value = value(key, round);
            let line = format!("set key{key} 3 {exptime} {} noreply\r\n", value.len());
            self.send(line.as_bytes());
            self.send(&value);
            self.send(b"\r\n");
        }
        assert!(self.ask("version").starts_with("VERSION"));
    }

    /// Whether every key is there. Panics if more are missing than the server reports as refused or
    /// late because its device was busy, beside some that look like others.
    fn is_whole(&mut self, wanted: usize, there: usize) -> bool {
        let lost = self.statistic("flash_refused") + self.statistic("lower_late");
        let accounted = there as u64 + lost + ALIKE_MAX;
        assert!(accounted >= wanted as u64, "{there} of {wanted} are there, {lost} were lost");
        lost == 0
    }

    /// Counts the keys that are there; those must have this round's value.
    fn count(&mut self, keys: impl Iterator<Item = usize>, round: usize) -> usize {
        keys.filter(|&key| match self.gets(&format!("key{key}")) {
            None => false,
            Some((found, _)) => {
                assert_eq!(found, value(key, round), "key{key}");
                true
            }
        })
        .count()
    }
}

fn value(key: usize, round: usize) -> Vec<u8> {
    let mut value = format!("{key}.{round}.").into_bytes();
    value.resize(40 + key * 131 % 2000, b'v');
    value
}

/// Repeats a run in which a busy device did not take or return everything in time: one run must
/// lose nothing.
fn without_loss<T>(path: &Path, mut run: impl FnMut() -> Option<T>) -> T {
    const ATTEMPTS: usize = 10;
    let whole = (0..ATTEMPTS).find_map(|_| {
        // It does not exist in the first run.
        let _ = std::fs::remove_file(path);
        run()
    });
    whole.expect("a run in which the device takes and gives everything in time")
}

/// Stores, replaces and deletes. Returns key0's CAS number, unless the device was too busy.
fn fill_replace_and_delete(path: &Path, threads: usize) -> Option<u64> {
    let running = Running::start(settings(path, threads), START_UNIX_S);
    let mut text = Text::connect(running.text);
    text.fill(0..KEYS, 0, 0);
    let there = text.count(0..KEYS, 0);
    let mut is_whole = text.is_whole(KEYS, there);
    let served = text.statistic("flash_served");
    assert!(!is_whole || served > 10_000, "{served} items were served from flash");
    text.fill((0..KEYS).step_by(3), 1, 0);
    for key in (1..KEYS).step_by(3) {
        text.send(format!("delete key{key} noreply\r\n").as_bytes());
    }
    let there = text.count((0..KEYS).step_by(3), 1);
    is_whole &= text.is_whole(KEYS.div_ceil(3), there);
    assert_eq!(text.count((1..KEYS).step_by(3), 9), 0, "deleted");
    let there = text.count((2..KEYS).step_by(3), 0);
    is_whole &= text.is_whole(KEYS / 3, there);
    is_whole.then(|| text.gets("key0").unwrap().1)
}

#[test]
fn what_memory_has_no_room_for_is_on_flash_and_survives_a_restart() {
    let folder = Folder::new();
    let path = folder.path().join("flash");
    for threads in [1, 2] {
        let cas = without_loss(&path, || fill_replace_and_delete(&path, threads));
        let running = Running::start(settings(&path, threads), START_UNIX_S + 60);
        let mut text = Text::connect(running.text);
        let there = text.statistic("flash_items");
        assert!(there > 10_000, "{there} items on flash are known again");
        let found = text.count((0..KEYS).step_by(3), 1) + text.count((2..KEYS).step_by(3), 0);
        assert!(found > 10_000, "{found} items are served");
        assert_eq!(text.count((1..KEYS).step_by(3), 9), 0, "what was deleted stays away");
        text.fill(0..1, 2, 0);
        assert!(text.gets("key0").unwrap().1 > cas, "CAS numbers never come twice");
    }
}

#[test]
fn what_was_flushed_or_has_expired_stays_away_after_a_restart() {
    let folder = Folder::new();
    let path = folder.path().join("flash");
    without_loss(&path, || {
        let running = Running::start(settings(&path, 1), START_UNIX_S);
        let mut text = Text::connect(running.text);
        text.fill(0..KEYS / 2, 0, 0);
        assert_eq!(text.ask("flush_all"), "OK");
        text.fill(KEYS / 2..KEYS, 0, 1000);
        let there = text.count(KEYS / 2..KEYS, 0);
        text.is_whole(KEYS / 2, there).then_some(())
    });
    {
        let running = Running::start(settings(&path, 1), START_UNIX_S + 900);
        let mut text = Text::connect(running.text);
        assert_eq!(text.count(0..KEYS / 2, 9), 0, "flushed before the restart");
        let found = text.count(KEYS / 2..KEYS, 0);
        assert!(found > 5_000, "{found} have not expired yet");
        assert_eq!(text.ask("flush_all 500"), "OK");
    }
    {
        let running = Running::start(settings(&path, 1), START_UNIX_S + 1001);
        let mut text = Text::connect(running.text);
        assert_eq!(text.count(0..KEYS, 9), 0, "expired between the restarts");
    }
}

#[test]
fn a_file_that_does_not_fit_is_refused_with_the_remedy() {
    let folder = Folder::new();
    let path = folder.path().join("flash");
    let refusal = |settings: Settings| Server::bind(settings, START_UNIX_S).unwrap_err();
    let first = Server::bind(settings(&path, 1), START_UNIX_S).unwrap();
    let error = refusal(settings(&path, 1));
    assert!(matches!(error, ServerError::Flash(FlashError::InUse { .. })), "{error}");
    drop(first);
    let error = refusal(settings(&path, 2));
    assert!(matches!(error, ServerError::Flash(FlashError::OtherShape { .. })), "{error}");
    assert!(error.to_string().contains("--flash-reset"), "{error}");
    let mut small = settings(&path, 1);
    small.flash.as_mut().unwrap().bytes = 1 << 20;
    let error = refusal(small);
    assert!(matches!(error, ServerError::Flash(FlashError::TooSmall { .. })), "{error}");
    let mut impossible = settings(&path, 1);
    impossible.flash.as_mut().unwrap().bytes = u64::MAX;
    let error = refusal(impossible);
    assert!(matches!(error, ServerError::Flash(FlashError::TooLarge { .. })), "{error}");
    // One thread can use 1 TiB.
    let mut large = settings(&folder.path().join("large"), 8);
    large.flash.as_mut().unwrap().bytes = 8 << 40;
    let error = refusal(large).to_string();
    assert!(error.contains("room for it cannot be made"), "{error}");
    // Another version, and damage, in the first page.
    let bytes = std::fs::read(&path).unwrap();
    for (at, what) in [(8, "version"), (3, "does not begin"), (30, "damaged")] {
        let mut other = bytes[..4096].to_vec();
        other[at] ^= 0x40;
        std::fs::write(&path, &other).unwrap();
        let error = refusal(settings(&path, 1));
        assert!(error.to_string().contains(what), "{error}");
    }
    // A mapping beyond the end of the file would kill the process.
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = refusal(settings(&path, 1));
    assert!(matches!(error, ServerError::Flash(FlashError::CutShort { .. })), "{error}");
    std::fs::write(&path, b"somebody's letter").unwrap();
    let error = refusal(settings(&path, 1)).to_string();
    assert!(error.contains("--flash-reset"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody's letter", "untouched");
    let mut reset = settings(&path, 1);
    reset.flash.as_mut().unwrap().reset = true;
    drop(Server::bind(reset, START_UNIX_S).unwrap());
}

#[test]
fn what_flash_garbles_is_a_miss_and_never_a_wrong_value() {
    let folder = Folder::new();
    let path = folder.path().join("flash");
    {
        let running = Running::start(settings(&path, 1), START_UNIX_S);
        Text::connect(running.text).fill(0..KEYS, 0, 0);
    }
    let mut bytes = std::fs::read(&path).unwrap();
    garble(&mut bytes);
    std::fs::write(&path, &bytes).unwrap();
    let running = Running::start(settings(&path, 1), START_UNIX_S + 1);
    let mut text = Text::connect(running.text);
    let found = text.count(0..KEYS, 0);
    assert!(found > KEYS / 10, "{found} of {KEYS} are still right");
    assert!(text.statistic("flash_reads_gone") > 10);
    drop((text, running));
    // An item missed once stays missing, even if the device returns the right bytes again:
    // meanwhile a newer value could have been stored and evicted.
    let mut bytes = std::fs::read(&path).unwrap();
    garble(&mut bytes);
    std::fs::write(&path, &bytes).unwrap();
    let running = Running::start(settings(&path, 1), START_UNIX_S + 2);
    let found_later = Text::connect(running.text).count(0..KEYS, 0);
    assert!(found_later <= found, "{found_later} after {found}");
}

/// Where the zones begin; the bookkeeping is in front of them, starting with the control page.
const ZONES_AT: usize = 2 << 20;
const CONTROL_AT: usize = 4096;

#[test]
fn book_keeping_that_the_device_lost_brings_nothing_back() {
    let folder = Folder::new();
    let path = folder.path().join("flash");
    {
        let running = Running::start(settings(&path, 1), START_UNIX_S);
        Text::connect(running.text).fill(0..KEYS, 0, 0);
    }
    let before = std::fs::read(&path).unwrap();
    {
        let running = Running::start(settings(&path, 1), START_UNIX_S + 1);
        let mut text = Text::connect(running.text);
        for key in 0..KEYS / 2 {
            text.send(format!("delete key{key} noreply\r\n").as_bytes());
        }
        assert_eq!(text.count(0..KEYS / 2, 9), 0, "deleted");
    }
    let closed = std::fs::read(&path).unwrap();
    // It is put back each time, too: the sums alone have to tell.
    let witness = path.with_file_name("flash.witness");
    let closed_witness = std::fs::read(&witness).unwrap();
    // Lost, and restored to an earlier state: all of it, or all but its first page.
    let behind = CONTROL_AT + 4096..ZONES_AT;
    let all = CONTROL_AT..ZONES_AT;
    let zeros = vec![0; before.len()];
    for (lost, other) in [
        (behind.clone(), &zeros),
        (all.clone(), &zeros),
        (all, &before),
        (behind, &before),
        (CONTROL_AT..CONTROL_AT + 4096, &before),
        (ZONES_AT - 4096 * 20..ZONES_AT, &zeros),
    ] {
        let mut bytes = closed.clone();
        bytes[lost.clone()].copy_from_slice(&other[lost.clone()]);
        let is_changed = bytes != closed;
        std::fs::write(&path, &bytes).unwrap();
        std::fs::write(&witness, &closed_witness).unwrap();
        let running = Running::start(settings(&path, 1), START_UNIX_S + 2);
        let mut text = Text::connect(running.text);
        assert_eq!(text.count(0..KEYS / 2, 9), 0, "{lost:?}");
        let there = text.count(KEYS / 2..KEYS, 0);
        assert_eq!(there == 0, is_changed, "{lost:?}: {there} are served");
        // The file is used again from the start.
        text.fill(0..KEYS, 1, 0);
        assert!(text.count(0..KEYS, 1) > KEYS / 2);
    }
}

/// Flips a bit in one byte of every 64 KiB of the zones, in records and a few summaries. A second
/// call restores the bytes.
fn garble(bytes: &mut [u8]) {
    for at in (4 << 20..bytes.len()).step_by(64 << 10) {
        bytes[at + at / 97 % 4096] ^= 0x10;
    }
}

#[test]
fn what_there_was_no_memory_to_point_at_stays_away() {
    let folder = Folder::new();
    let path = folder.path().join("flash");
    let small = 4 << 20;
    for (memory_bytes, keys, at_most) in
        [(8 << 20, 900_000, None), (small, 0, Some(220_000)), (8 << 20, 0, Some(220_000))]
    {
        let settings = Settings { memory_bytes, ..settings(&path, 1) };
        let running = Running::start(settings, START_UNIX_S);
        let mut text = Text::connect(running.text);
        for key in 0..keys {
            text.send(format!("set k{key} 0 0 1 noreply\r\nv\r\n").as_bytes());
        }
        assert!(text.ask("version").starts_with("VERSION"));
        let there = text.statistic("flash_items");
        assert!(there > 100_000, "{there}");
        assert!(at_most.is_none_or(|most| there <= most), "{there} items, {at_most:?} at most");
        assert!(at_most.is_some() || there > 300_000, "{there}");
    }
}

#[test]
fn no_more_is_written_than_the_budget_allows() {
    let folder = Folder::new();
    let mut limited = settings(&folder.path().join("flash"), 1);
    limited.flash.as_mut().unwrap().write_bytes_per_s = Some(1e6);
    let running = Running::start(limited, START_UNIX_S);
    let mut text = Text::connect(running.text);
    text.fill(0..KEYS, 0, 0);
    assert!(text.statistic("flash_over_budget") > 5_000);
    assert!(text.statistic("flash_bytes_written") < 8_000_000);
    assert!(text.count(0..KEYS, 0) > 5_000, "memory serves on");
}

#[test]
fn after_a_crash_of_the_machine_nothing_is_served() {
    let folder = Folder::new();
    let path = folder.path().join("flash");
    {
        let running = Running::start(settings(&path, 1), START_UNIX_S);
        Text::connect(running.text).fill(0..KEYS, 0, 0);
    }
    for (state, is_served) in [(Use::Clean, true), (Use::InUse, false), (Use::InMemory, false)] {
        let mut bytes = std::fs::read(&path).unwrap();
        let superblock = Superblock::decode(&bytes).unwrap();
        assert_eq!(superblock.state, Use::Clean, "it was closed in order");
        let of_an_earlier_start = Superblock { boot_id: [7; 16], state, ..superblock };
        bytes[..Superblock::BYTES].copy_from_slice(&of_an_earlier_start.encode());
        std::fs::write(&path, &bytes).unwrap();
        let running = Running::start(settings(&path, 1), START_UNIX_S + 1);
        let mut text = Text::connect(running.text);
        assert_eq!(text.count(0..KEYS, 0) > 10_000, is_served, "{state:?}");
        // For the next round.
        text.fill(0..KEYS, 0, 0);
    }
}
