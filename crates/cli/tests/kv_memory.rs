//! The memory of the real server: no more than its limit, whatever the sizes, lifetimes and tiers.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/home.rs"]
mod home;
#[allow(dead_code)]
#[path = "common/kv.rs"]
mod server;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use home::Home;
use server::{Client, Kv, PATIENCE};

const MIB: usize = 1 << 20;
const LIMIT: usize = 512 * MIB;
/// The whole process: the store, its index, buffers, the program itself.
const RESIDENT_MAX: usize = LIMIT + LIMIT / 20;
/// Zones that a thread fills, writes or reads back, and pages of its reads.
const FLASH_BUFFERS: usize = 24 * MIB;
/// The largest item of the last phase; memcached's largest `-I` is more.
const LARGEST: usize = 8 * MIB;

/// A simple random sequence: the test only needs varying keys and sizes.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).expect("below a usize")
    }
}

/// Sizes that shift: smallest, largest, and how many bytes are stored of them.
const PHASES: [(usize, usize, usize); 6] = [
    (20, 100, LIMIT / 4),
    (1_000, 3_000, LIMIT),
    (100_000, 300_000, LIMIT),
    (30, 1_000, LIMIT / 2),
    (MIB, LARGEST - 1_000, 2 * LIMIT),
    (200, 2_000, LIMIT),
];

/// Stores in phases. Returns the peak of resident memory, and the part of it that belongs to files.
fn shift(kv: &mut Kv) -> (usize, usize) {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let value = vec![b'v'; LARGEST];
    let mut most = (0, 0);
    for (phase, (least, limit, total)) in PHASES.into_iter().enumerate() {
        let (mut sent, mut looked) = (0, 0);
        while sent < total {
            let bytes = least + random.below(limit - least);
            let key = random.below(2_000_000);
            // Never, soon and late, so that there are segments of all kinds.
            let exptime = [0, 1 + random.below(5), 100, 4_000, 500_000][random.below(5)];
            let head = format!("set key{key} 0 {exptime} {bytes} noreply\r\n");
            kv.client.send(head.as_bytes());
            kv.client.send(&value[..bytes]);
            kv.client.send(b"\r\n");
            sent += bytes + head.len();
            if random.below(16) == 0 {
                let key = random.below(2_000_000);
                kv.client.send(format!("delete key{key} noreply\r\n").as_bytes());
            }
            if sent - looked > LIMIT / 64 {
                looked = sent;
                // All threads answer this, after their earlier requests.
                assert!(kv.client.stat("curr_items") > 0);
                let resident = kv.status_bytes("VmRSS");
                if resident > most.0 {
                    most = (resident, kv.status_bytes("RssFile"));
                }
            }
        }
        eprintln!("phase {phase}: at most {} MiB so far", most.0 / MIB);
    }
    most
}

#[test]
fn no_sizes_or_lifetimes_take_more_than_the_limit() {
    let home = tempfile::tempdir().expect("a home");
    let mut kv = Kv::start(home.path(), &["-t", "2", "-m", "512", "-I", "8m"]);
    let (most, of_files) = shift(&mut kv);
    println!("{most} bytes resident at most, {of_files} of files, with a limit of {LIMIT}");
    assert!(most <= RESIDENT_MAX, "{} MiB", most / MIB);
}

/// Large values that arrive faster than the threads that own their keys take them.
#[test]
fn nor_do_large_values_on_their_way_between_threads() {
    const VALUE: usize = 900_000;
    let home = tempfile::tempdir().expect("a home");
    let mut kv = Kv::start(home.path(), &["-t", "4", "-m", "512"]);
    let value = vec![b'v'; VALUE];
    for key in 0..LIMIT * 8 / 5 / VALUE {
        kv.client.send(format!("set key{key} 0 0 {VALUE} noreply\r\n").as_bytes());
        kv.client.send(&value);
        kv.client.send(b"\r\n");
    }
    assert!(kv.client.stat("evictions") > 0);
    let most = kv.status_bytes("VmHWM");
    println!("{most} bytes at most, with a limit of {LIMIT}");
    assert!(most <= RESIDENT_MAX, "{} MiB", most / MIB);
}

#[test]
fn nor_do_they_with_flash_below() {
    let home = Home::new();
    let part = format!("{}:1GiB", home.path().join("flash").display());
    let flags = ["-t", "2", "-m", "512", "-I", "8m", "--flash", &part];
    let mut kv = Kv::start(home.path(), &flags);
    let (most, of_files) = shift(&mut kv);
    println!("{most} bytes resident at most, {of_files} of files, with a limit of {LIMIT}");
    assert!(kv.client.stat("flash_bytes_written") > LIMIT as u64 / 2);
    assert!(most <= RESIDENT_MAX + 2 * FLASH_BUFFERS, "{} MiB", most / MIB);
}

/// Fills the server's memory with items.
fn fill(kv: &mut Kv) {
    let value = vec![b'f'; 10_000];
    for key in 0..2 * LIMIT / value.len() {
        kv.client.send(format!("set fill{key} 0 0 {} noreply\r\n", value.len()).as_bytes());
        kv.client.send(&value);
        kv.client.send(b"\r\n");
    }
    assert!(kv.client.stat("evictions") > 0, "its memory is full");
}

/// Waits until the process is within its limit.
fn wait_for_memory(kv: &Kv) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let resident = kv.status_bytes("VmRSS");
        if resident <= RESIDENT_MAX {
            return;
        }
        assert!(Instant::now() < deadline, "waited in vain: {} MiB", resident / MIB);
        thread::sleep(Duration::from_millis(20));
    }
}

/// Values of the clients that stop within one.
const HALF_SENDERS: usize = 1_000;
const ANNOUNCED_BYTES: usize = 1_000_000;
const SENT_BYTES: usize = 900_000;

#[test]
fn values_that_are_half_sent_take_no_more_than_the_limit() {
    let home = tempfile::tempdir().expect("a home");
    let mut kv = Kv::start(home.path(), &["-t", "2", "-m", "512", "-c", "2000"]);
    fill(&mut kv);
    assert_eq!(kv.client.ask("set half7 0 0 3\r\nold"), "STORED");
    let head = |number| format!("set half{number} 0 0 {ANNOUNCED_BYTES}\r\n");
    let half = vec![b'h'; SENT_BYTES];
    let mut senders = Vec::new();
    let mut most = 0;
    for number in 0..HALF_SENDERS {
        let mut sender = Client::connect(kv.address);
        sender.send(head(number).as_bytes());
        sender.send(&half);
        senders.push(sender);
        most = most.max(kv.status_bytes("VmRSS"));
    }
    println!("{} MiB resident at most", most / MIB);
    assert!(most <= RESIDENT_MAX, "{} MiB", most / MIB);
    kv.client.wait_for_stat("read_buf_oom", |refused| refused > HALF_SENDERS as u64 / 2);
    // Each of them is told at the end of its value, and goes on: either it was stored or refused,
    // and what is refused leaves no older value.
    let rest = vec![b'h'; ANNOUNCED_BYTES - SENT_BYTES];
    let mut stored = 0;
    for (number, sender) in senders.iter_mut().enumerate() {
        sender.send(&rest);
        let is_stored = match &*sender.ask("") {
            "STORED" => true,
            "SERVER_ERROR out of memory storing object" => false,
            other => panic!("client {number} was told {other:?}"),
        };
        stored += usize::from(is_stored);
        if !is_stored {
            let found = sender.ask(&format!("mg half{number} s"));
            assert_eq!(found, "EN", "client {number}");
        }
    }
    assert!(stored > 0, "those that had room");
    drop(senders);
    kv.client.wait_for_stat("read_buf_bytes", |bytes| bytes < MIB as u64);
    fill(&mut kv);
    wait_for_memory(&kv);
}

/// Honest clients whose values come slowly.
const SLOW_SENDERS: usize = 100;

#[test]
fn values_that_come_slowly_are_stored() {
    let home = tempfile::tempdir().expect("a home");
    let mut kv = Kv::start(home.path(), &["-t", "2", "-m", "512"]);
    let value = |number: usize| vec![b'a' + u8::try_from(number % 26).expect("< 26"); 1_000_000];
    let mut senders: Vec<Client> = Vec::new();
    for number in 0..SLOW_SENDERS {
        let mut sender = Client::connect(kv.address);
        sender.send(format!("set slow{number} 0 0 1000000\r\n").as_bytes());
        senders.push(sender);
    }
    for piece in 0..10 {
        for (number, sender) in senders.iter_mut().enumerate() {
            sender.send(&value(number)[piece * 100_000..(piece + 1) * 100_000]);
        }
    }
    for (number, sender) in senders.iter_mut().enumerate() {
        assert_eq!(sender.ask(""), "STORED", "client {number}");
    }
    assert_eq!(kv.client.stat("read_buf_oom"), 0);
    for (number, sender) in senders.iter_mut().enumerate() {
        let expected = value(number);
        assert_eq!(sender.ask(&format!("mg slow{number} v")), "VA 1000000");
        assert!(sender.line().as_bytes() == expected, "the value of client {number}");
    }
}

/// Clients that ask for much and do not read.
const SILENT_READERS: usize = 500;
/// What the kernel takes of their replies ends at different places in a value: by chance it would
/// leave little of each to the server.
const OFFSETS: usize = 10;

#[test]
fn replies_that_nobody_reads_take_no_more_than_the_limit() {
    let home = tempfile::tempdir().expect("a home");
    let mut kv = Kv::start(home.path(), &["-t", "2", "-m", "512", "-c", "2000"]);
    fill(&mut kv);
    let value = vec![b'v'; 1_000_000];
    for key in ["a", "b", "c", "d"] {
        kv.client.send(format!("set {key} 0 0 {}\r\n", value.len()).as_bytes());
        kv.client.send(&value);
        assert_eq!(kv.client.ask(""), "STORED");
    }
    for offset in 0..OFFSETS {
        let bytes = value.len() / OFFSETS * offset;
        kv.client.send(format!("set offset{offset} 0 0 {bytes}\r\n").as_bytes());
        kv.client.send(&value[..bytes]);
        assert_eq!(kv.client.ask(""), "STORED");
    }
    let mut readers = Vec::new();
    for number in 0..SILENT_READERS {
        let mut reader = TcpStream::connect(kv.address).expect("it listens");
        reader.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        let first = format!("get offset{}\r\n", number % OFFSETS);
        let requests = first + &"get a b c d\r\n".repeat(20);
        reader.write_all(requests.as_bytes()).expect("requests are short");
        readers.push(reader);
    }
    kv.client.wait_for_stat("read_buf_oom", |closed| closed > 0);
    kv.client.wait_for_stat("read_buf_bytes", |bytes| bytes <= LIMIT as u64 / 4);
    // The allocator returns the memory within a second.
    wait_for_memory(&kv);
    // Who reads is served to the end, meanwhile.
    let mut reader = TcpStream::connect(kv.address).expect("it listens");
    reader.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    let mut writer = reader.try_clone().expect("sockets can be shared");
    let asks = thread::spawn(move || writer.write_all(&b"get a b c d\r\n".repeat(20)));
    let each = 4 * (b"VALUE a 0 1000000\r\n".len() + value.len() + 2) + b"END\r\n".len();
    let mut reply = vec![0; 20 * each];
    reader.read_exact(&mut reply).expect("all replies come");
    asks.join().expect("the thread ends").expect("the server takes requests");
    drop(readers);
}
