//! What flash below a blade's memory costs: pages that are in memory, beside a blade without flash,
//! and pages that are on flash, beside the device itself. All in one run, by turns.
//!
//!     cargo bench -p farpool-blade --bench flash -- [FOLDER [ROUNDS]]
//!
//! FOLDER is where the file of flash is made (1.5 GiB); it must be on a disk.

#[path = "../tests/common/mod.rs"]
mod common;

use common::timing::{middle, scattered};
use common::*;
use farpool_blade::{BladeConfig, FlashConfig};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, SUPERPAGE_BYTES};
use farpool_wire::*;
use rustix::fs::{Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// What the blades lend.
const SUPERPAGES: u32 = 64;
const PAGES: u32 = SUPERPAGES * PAGES_PER_SUPERPAGE;
/// Memory above flash, in superpages.
const MEMORY: u64 = 16;
/// Pages of a large request.
const LARGE: u32 = 256;
/// Requests under way of one that asks ahead.
const AHEAD: u32 = 16;
/// Readers at once.
const READERS: u32 = 8;

fn main() {
    let mut arguments = farpool_benchargs::arguments();
    let folder = arguments.next().unwrap_or_else(|| "/var/tmp".into());
    let rounds = arguments.next().map_or(4000, |text| text.parse().unwrap());
    let folder = tempfile::tempdir_in(folder).unwrap();
    let path = folder.path().join("flash");
    let bytes = u64::from(SUPERPAGES) * SUPERPAGE_BYTES;
    let flash = Some(FlashConfig { path, bytes, write_bytes_per_s: None });
    let plain = TestBlade::start(config_of(u64::from(SUPERPAGES)));
    let tiered = TestBlade::start(BladeConfig { flash, ..config_of(MEMORY) });
    let floor = Floor::new(&folder.path().join("floor"), bytes);
    in_memory(&plain, &tiered, rounds);
    on_flash(&tiered, &floor, rounds);
}

fn in_memory(plain: &TestBlade, tiered: &TestBlade, rounds: u32) {
    println!("| one page in memory | no flash p50 us | above flash p50 us | ratio |");
    println!("|---|---|---|---|");
    for (name, is_tcp) in [("unix socket", false), ("TCP", true)] {
        let mut sides = [plain, tiered].map(|blade| Side::new(blade, is_tcp, 8));
        for side in &mut sides {
            (0..8 * PAGES_PER_SUPERPAGE).step_by(LARGE as usize).for_each(|first| {
                side.write(first, LARGE);
            });
        }
        for is_write in [false, true] {
            let mut times = [const { Vec::new() }; 2];
            for round in 0..rounds {
                for (side, times) in sides.iter_mut().zip(&mut times) {
                    let page = scattered(round, 8 * PAGES_PER_SUPERPAGE);
                    times.push(if is_write { side.write(page, 1) } else { side.read(page, 1) });
                }
            }
            let [one, other] = times.map(middle);
            let what = if is_write { "written" } else { "read" };
            println!("| {what}, {name} | {one:.1} | {other:.1} | {:.2} |", other / one);
        }
        sides.into_iter().for_each(Side::end);
    }
}

fn on_flash(tiered: &TestBlade, floor: &Floor, rounds: u32) {
    println!("\n| on flash | device | blade | ratio |");
    println!("|---|---|---|---|");
    let mut side = Side::new(tiered, false, SUPERPAGES);
    let (mut ours, mut its) = (Duration::ZERO, Duration::ZERO);
    for first in (0..PAGES).step_by(LARGE as usize) {
        ours += side.write(first, LARGE);
        its += floor.write(first);
    }
    let rate = |time: Duration| f64::from(PAGES >> 8) / time.as_secs_f64();
    let (ours, its) = (rate(ours), rate(its));
    println!("| filled, MiB/s | {its:.0} | {ours:.0} | {:.2} |", ours / its);
    for (name, pages, rounds) in [("one page", 1, rounds), ("1 MiB", LARGE, rounds / 10)] {
        let (mut ours, mut its) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let first = scattered(round, PAGES / pages) * pages;
            ours.push(side.read(first, pages));
            its.push(floor.read(first, pages));
        }
        let (ours, its) = (middle(ours), middle(its));
        println!("| {name} read, p50 us | {its:.0} | {ours:.0} | {:.2} |", ours / its);
    }
    let begin = Instant::now();
    side.read_ahead(rounds);
    let ours = f64::from(rounds) / begin.elapsed().as_secs_f64();
    println!("| pages/s of one reader, {AHEAD} requests ahead | | {ours:.0} | |");
    side.end();
    at_once(tiered, floor, rounds);
}

/// Pages a second that several readers at once get.
fn at_once(tiered: &TestBlade, floor: &Floor, rounds: u32) {
    const EACH: u32 = SUPERPAGES / READERS;
    let mut sides: Vec<_> = (0..READERS).map(|_| Side::new(tiered, false, EACH)).collect();
    for side in &mut sides {
        (0..EACH * PAGES_PER_SUPERPAGE).step_by(LARGE as usize).for_each(|first| {
            side.write(first, LARGE);
        });
    }
    let run = |read: &mut (dyn FnMut(u32) + Send)| {
        (0..rounds).for_each(|round| read(scattered(round, EACH * PAGES_PER_SUPERPAGE)));
    };
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for side in &mut sides {
            scope.spawn(|| run(&mut |page| _ = side.read(page, 1)));
        }
    });
    let ours = begin.elapsed();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for reader in 0..READERS {
            let first = reader * EACH * PAGES_PER_SUPERPAGE;
            scope.spawn(move || run(&mut |page| _ = floor.read(first + page, 1)));
        }
    });
    let rate = |time: Duration| f64::from(READERS * rounds) / time.as_secs_f64();
    let (ours, its) = (rate(ours), rate(begin.elapsed()));
    println!("| pages/s of {READERS} readers | {its:.0} | {ours:.0} | {:.2} |", ours / its);
}

/// A client of a blade, with a segment.
struct Side {
    peer: Peer,
    segment: SegmentId,
}

impl Side {
    fn new(blade: &TestBlade, is_tcp: bool, superpages: u32) -> Side {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let address = if is_tcp { blade.tcp() } else { blade.unix() };
        let mut peer = Peer::hello(address, u128::from(id));
        let (segment, _) = peer.segment(superpages);
        Side { peer, segment }
    }

    fn read(&mut self, first: u32, count: u32) -> Duration {
        let begin = Instant::now();
        let found = self.peer.read(self.segment, first, count);
        let took = begin.elapsed();
        assert_eq!(found.refused(), None);
        took
    }

    /// Reads pages one by one, each asked for long before it comes.
    fn read_ahead(&mut self, rounds: u32) {
        for round in 0..rounds + AHEAD {
            if round < rounds {
                let page = PageNumber(scattered(round + 1_000_000, PAGES));
                let extents = [Extent::page(page)];
                self.peer.send(&Request::Read { segment: self.segment, extents: &extents }, &[]);
            }
            if round >= AHEAD {
                assert_eq!(self.peer.receive().unwrap().refused(), None);
            }
        }
    }

    fn write(&mut self, first: u32, count: u32) -> Duration {
        let bytes = vec![0x5a; count as usize * PAGE_BYTES];
        let begin = Instant::now();
        self.peer.write(self.segment, first, &bytes).done();
        begin.elapsed()
    }

    fn end(mut self) {
        self.peer.ask(&Request::Goodbye).done();
    }
}

/// The device without a blade: direct reads and writes of the same sizes.
struct Floor(OwnedFd);

impl Floor {
    fn new(path: &Path, bytes: u64) -> Floor {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
        Floor(file)
    }

    fn read(&self, first: u32, count: u32) -> Duration {
        let mut pages = farpool_disk::Pages::new(count as usize).unwrap();
        pages.bytes_mut().fill(1); // its memory is there
        let begin = Instant::now();
        let offset = u64::from(first) * PAGE_BYTES as u64;
        let done = rustix::io::pread(&self.0, pages.bytes_mut(), offset).unwrap();
        assert_eq!(done, count as usize * PAGE_BYTES);
        begin.elapsed()
    }

    fn write(&self, first: u32) -> Duration {
        let mut pages = farpool_disk::Pages::new(LARGE as usize).unwrap();
        pages.bytes_mut().fill(1);
        let begin = Instant::now();
        let offset = u64::from(first) * PAGE_BYTES as u64;
        rustix::io::pwrite(&self.0, pages.bytes(), offset).unwrap();
        begin.elapsed()
    }
}
