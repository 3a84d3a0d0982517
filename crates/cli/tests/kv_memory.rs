//! The memory of the real server: no more than its limit, whatever the sizes, lifetimes and tiers.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/home.rs"]
mod home;
#[allow(dead_code)]
#[path = "common/kv.rs"]
mod server;

use home::Home;
use server::Kv;

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
