//! What packing costs: pages in memory of a blade that packs, beside a blade that does not; packed
//! pages, beside those in memory; and how fast it packs when memory is short. By turns in one run.
//!
//!     cargo bench -p farpool-blade --bench pack -- [ROUNDS]

#[path = "../tests/common/mod.rs"]
mod common;

use common::timing::{middle, scattered};
use common::*;
use farpool_blade::{BladeConfig, PackConfig, PackStat};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::time::{Duration, Instant};

/// Memory of each blade, in superpages.
const MEMORY: u64 = 16;
/// Superpages that are written.
const SUPERPAGES: u32 = 8;
const PAGES: u32 = SUPERPAGES * PAGES_PER_SUPERPAGE;
/// Pages of a large request.
const LARGE: u32 = 256;
/// What is lent where memory is to be short, in superpages.
const LENT: u32 = 32;

fn main() {
    let rounds = farpool_benchargs::arguments().next().map_or(4000, |text| text.parse().unwrap());
    let never = Duration::from_secs(3600);
    let plain = TestBlade::start(config_of(MEMORY));
    let unpacked = TestBlade::start(packing(MEMORY - 1, never));
    let packed = TestBlade::start(packing(MEMORY - 1, Duration::from_millis(20)));
    one_page(&plain, &unpacked, &packed, rounds);
    short_of_memory();
}

fn packing(lent: u64, cold: Duration) -> BladeConfig {
    let pack = Some(PackConfig { lent_bytes: lent * SUPERPAGE_BYTES, cold });
    BladeConfig { pack, ..config_of(MEMORY) }
}

fn stat(blade: &TestBlade) -> PackStat {
    blade.serving.blade().pack_stat().unwrap()
}

/// One page at a time, scattered over all.
fn one_page(plain: &TestBlade, unpacked: &TestBlade, packed: &TestBlade, rounds: u32) {
    let blades = [plain, unpacked, packed];
    println!("| one page, TCP | no packing p50 us | in memory | ratio | packed | ratio |");
    println!("|---|---|---|---|---|---|");
    let mut sides = blades.map(|blade| Side::new(blade, SUPERPAGES));
    for side in &mut sides {
        side.fill(PAGES);
    }
    wait_until("all is packed", || stat(packed).pages_in_frames == u64::from(PAGES));
    let mut times = [const { Vec::new() }; 3];
    for round in 0..rounds {
        // Who comes first finds the processors as others left them.
        for at in 0..3 {
            let at = (at + round as usize) % 3;
            times[at].push(sides[at].read(scattered(round, PAGES), 1));
        }
    }
    say("read", times);
    let mut times = [const { Vec::new() }; 3];
    for round in 0..rounds {
        for at in 0..3 {
            let at = (at + round as usize) % 3;
            times[at].push(sides[at].write(scattered(round, PAGES), 1));
        }
    }
    say("written", times);
    let after = stat(packed);
    println!(
        "\n{} MiB packed into {} MiB, tables included.",
        after.pages_packed.min(u64::from(PAGES)) >> 8,
        after.frames_bytes >> 20
    );
}

fn say(what: &str, times: [Vec<Duration>; 3]) {
    let [plain, unpacked, packed] = times.map(middle);
    println!(
        "| {what} | {plain:.1} | {unpacked:.1} | {:.2} | {packed:.1} | {:.2} |",
        unpacked / plain,
        packed / unpacked
    );
}

/// Writes more than memory holds, and as much to a blade that has the memory.
fn short_of_memory() {
    let plain = TestBlade::start(config_of(u64::from(LENT)));
    let short = TestBlade::start(packing(u64::from(LENT), Duration::from_secs(3600)));
    let pages = LENT * PAGES_PER_SUPERPAGE;
    let rates = [&plain, &short].map(|blade| {
        let mut side = Side::new(blade, LENT);
        let time = side.fill(pages);
        f64::from(pages >> 8) / time.as_secs_f64()
    });
    let [plain, short] = rates;
    println!("\n| filled, {LENT} superpages, MiB/s | memory for all | for {MEMORY} | ratio |");
    println!("|---|---|---|---|");
    println!("| | {plain:.0} | {short:.0} | {:.2} |", short / plain);
}

/// A client of a blade, with a segment.
struct Side {
    peer: Peer,
    segment: SegmentId,
}

impl Side {
    fn new(blade: &TestBlade, superpages: u32) -> Side {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut peer = Peer::hello(blade.tcp(), u128::from(id));
        let (segment, _) = peer.segment(superpages);
        Side { peer, segment }
    }

    /// Writes all pages. Returns the time of the writes alone.
    fn fill(&mut self, pages: u32) -> Duration {
        (0..pages).step_by(LARGE as usize).map(|first| self.write(first, LARGE)).sum()
    }

    fn read(&mut self, first: u32, count: u32) -> Duration {
        let begin = Instant::now();
        let answer = self.peer.read(self.segment, first, count);
        let time = begin.elapsed();
        assert!(answer.pages == records(first, count), "page {first} is not what was written");
        time
    }

    fn write(&mut self, first: u32, count: u32) -> Duration {
        let pages = records(first, count);
        let begin = Instant::now();
        self.peer.write(self.segment, first, &pages).done();
        begin.elapsed()
    }
}

/// Pages of records as programs keep them: text and numbers, which differ from page to page.
fn records(first: u32, count: u32) -> Vec<u8> {
    let page = |page: u32| {
        let mut bytes = Vec::with_capacity(PAGE_BYTES + 128);
        let mut random = u64::from(page) + 1;
        while bytes.len() < PAGE_BYTES {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99_991);
            let (name, count, price) = (random >> 40, random >> 52, (random >> 30) & 0xffff);
            let record = format!(
                "{{\"customer\": \"customer-{name:07}\", \"items\": {count}, \"price\": {price}, \
                 \"paid\": {}}}\n",
                random >> 63 == 1
            );
            bytes.extend_from_slice(record.as_bytes());
        }
        bytes.truncate(PAGE_BYTES);
        bytes
    };
    (first..first + count).flat_map(page).collect()
}
