//! What redundancy costs: reads of one page, writes of many and memory on blades over TCP, with
//! nothing beside it, with two copies and with parity; and reads of pages whose blade is lost. They
//! take turns, so that all have the machine alike.
//!
//!     cargo bench -p farpool-pool --bench parity_cost

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use farpool_blade::{BladeConfig, Server, Serving};
use farpool_pool::{
    Address, BladeIndex, Completion, Lane, PARITY_DOMAINS, PageRead, PageWrite, Pool, PoolConfig,
    Redundancy, SUPERPAGE_PAGES, SegmentHandle, SegmentPage, fresh_client,
};
use farpool_units::{MIB, PAGE_BYTES, SUPERPAGE_BYTES};

/// Superpages read from and written to: 128 MiB, two groups, more than the processor's caches hold.
const SUPERPAGES: u32 = 8;
const PAGES: u32 = SUPERPAGES * SUPERPAGE_PAGES;
/// Reads of each kind.
const READS: usize = 20_000;
/// Pages of one write, as the evictor sends them.
const TRAY_PAGES: u32 = 64;
/// Writes in flight, as the evictor keeps them.
const TRAYS: u32 = 4;
/// Turns of writing, for each kind; a turn writes all pages once.
const TURNS: usize = 10;

#[repr(C, align(4096))]
#[derive(Clone)]
struct Aligned([u8; PAGE_BYTES]);

/// A client of its own.
struct Side {
    name: &'static str,
    pool: Pool,
    lane: Lane,
    segment: SegmentHandle,
    /// Bytes that blades give for each byte.
    memory: f64,
    /// The first turn, in which nothing had been written before.
    first: Duration,
    reads: Vec<Duration>,
    turns: Vec<Duration>,
}

/// Blades of a failure domain each.
struct Blades(Vec<Option<Serving>>, Vec<Address>);

impl Blades {
    fn start() -> anyhow::Result<Blades> {
        let mut blades = Blades(Vec::new(), Vec::new());
        for _ in 0..PARITY_DOMAINS {
            let config = BladeConfig { memory_bytes: 1 << 30, ..BladeConfig::default() };
            let serving = Server::bind(&["tcp://127.0.0.1:0".parse()?], config)?.serve()?;
            blades.1.extend(serving.addresses().iter().cloned());
            blades.0.push(Some(serving));
        }
        Ok(blades)
    }

    fn used_bytes(&self) -> u64 {
        self.0.iter().flatten().map(|it| it.stat().totals.used_bytes.get()).sum()
    }
}

impl Side {
    fn connect(
        name: &'static str,
        blades: &Blades,
        redundancy: Redundancy,
    ) -> anyhow::Result<Side> {
        let before = blades.used_bytes();
        let pool = Pool::connect(PoolConfig {
            blades: blades.1.iter().cloned().map(Into::into).collect(),
            client: fresh_client()?,
            client_name: "parity_cost".into(),
            quota_bytes: 1 << 30,
            sharing_group: None,
            deadline: Duration::from_secs(5),
            allow_remote_tcp: false,
            redundancy,
            seals_pages: true,
            secures_tcp: false,
            asks: None,
            time: farpool_pool::Time::KERNEL,
        })?;
        let segment = pool.create_segment()?;
        (0..SUPERPAGES).try_for_each(|sma| pool.allocate_superpage(segment, sma))?;
        let used = blades.used_bytes() - before;
        let memory = used as f64 / (u64::from(SUPERPAGES) * SUPERPAGE_BYTES) as f64;
        let (lane, first) = (pool.lane()?, Duration::ZERO);
        Ok(Side { name, pool, lane, segment, memory, first, reads: vec![], turns: vec![] })
    }

    fn read(&mut self, page: u32, into: &mut Aligned) -> anyhow::Result<Duration> {
        let at = SegmentPage { segment: self.segment, page };
        let read = PageRead { at, into: into.0.as_mut_ptr(), token: 0 };
        let begun = Instant::now();
        // SAFETY: the page outlives the wait for its completion.
        unsafe { self.lane.read(&[read]) }?;
        let mut done = Vec::with_capacity(1);
        self.lane.wait(&mut done);
        let took = begun.elapsed();
        ensure!(matches!(done[..], [Completion { result: Ok(()), .. }]), "{done:?}");
        ensure!(into.0 == [7; PAGE_BYTES], "page {page} has wrong bytes");
        Ok(took)
    }

    /// Writes all pages once, [`TRAYS`] requests at a time.
    fn write_all(&mut self, from: &[Aligned]) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        let (mut next, mut left, mut done) = (0, 0, Vec::new());
        while next < PAGES || left > 0 {
            while next < PAGES && left <= (TRAYS - 1) * TRAY_PAGES {
                let numbers = next..next + TRAY_PAGES;
                let writes: Vec<_> = numbers
                    .zip(from)
                    .map(|(page, from)| {
                        let at = SegmentPage { segment: self.segment, page };
                        PageWrite { at, from: from.0.as_ptr(), token: 0 }
                    })
                    .collect();
                // SAFETY: the pages outlive the waits for their completions.
                unsafe { self.lane.write(&writes) }?;
                (next, left) = (next + TRAY_PAGES, left + TRAY_PAGES);
            }
            self.lane.wait(&mut done);
            for it in done.drain(..) {
                it.result?;
                left -= 1;
            }
        }
        Ok(begun.elapsed())
    }
}

fn at(samples: &mut [Duration], percent: usize) -> f64 {
    samples.sort_unstable();
    samples[samples.len() * percent / 100].as_secs_f64()
}

/// Numbers below a limit, the same ones in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d]) % limit
    }
}

fn compare(sides: &mut [Side], from: &[Aligned], random: &mut Random) -> anyhow::Result<()> {
    for turn in 0..=TURNS {
        for side in &mut *sides {
            let took = side.write_all(from)?;
            if turn == 0 {
                side.first = took;
            } else {
                side.turns.push(took);
            }
        }
    }
    let mut into = Box::new(Aligned([0; PAGE_BYTES]));
    for _ in 0..READS {
        let page = random.below(PAGES);
        for side in &mut *sides {
            let took = side.read(page, &mut into)?;
            side.reads.push(took);
        }
    }
    println!(
        "{:<10}{:>12}{:>14}{:>14}{:>20}{:>20}",
        "", "memory", "read p50 us", "read p99 us", "first write MiB/s", "next writes MiB/s"
    );
    let mib = f64::from(PAGES) * PAGE_BYTES as f64 / MIB as f64;
    for side in sides {
        println!(
            "{:<10}{:>12.3}{:>14.1}{:>14.1}{:>20.0}{:>20.0}",
            side.name,
            side.memory,
            at(&mut side.reads, 50) * 1e6,
            at(&mut side.reads, 99) * 1e6,
            mib / side.first.as_secs_f64(),
            mib / at(&mut side.turns, 50)
        );
        side.pool.goodbye();
    }
    Ok(())
}

/// Reads pages whose blade is lost, beside others of the same client.
fn degrade(from: &[Aligned], random: &mut Random) -> anyhow::Result<()> {
    let mut blades = Blades::start()?;
    let mut side = Side::connect("parity", &blades, Redundancy::Parity)?;
    side.write_all(from)?;
    let lost = (0..PARITY_DOMAINS).map(|it| BladeIndex(u8::try_from(it).expect("few")));
    let lost = lost.max_by_key(|blade| side.pool.superpages_on(*blade)).context("a blade")?;
    let is_there = |it: &u32| side.pool.blade_of(side.segment, *it) != Some(lost);
    let (there, gone): (Vec<u32>, Vec<u32>) = (0..SUPERPAGES).partition(is_there);
    ensure!(!gone.is_empty() && !there.is_empty(), "one superpage is lost: {gone:?}");
    drop(blades.0[usize::from(lost.0)].take());
    let mut into = Box::new(Aligned([0; PAGE_BYTES]));
    // The loss is found out first.
    (0..SUPERPAGES)
        .try_for_each(|superpage| side.read(superpage * SUPERPAGE_PAGES, &mut into).map(|_| ()))?;
    let (mut normal, mut degraded) = (Vec::new(), Vec::new());
    for _ in 0..READS {
        let index = random.below(SUPERPAGE_PAGES);
        for (superpages, times) in [(&there, &mut normal), (&gone, &mut degraded)] {
            let superpage = superpages[random.below(u32::try_from(superpages.len())?) as usize];
            times.push(side.read(superpage * SUPERPAGE_PAGES + index, &mut into)?);
        }
    }
    for percent in [50, 99] {
        let (normal, degraded) = (at(&mut normal, percent), at(&mut degraded, percent));
        println!(
            "read p{percent}: {:.1} us, {:.1} us of a page whose blade is lost, ratio {:.2}",
            normal * 1e6,
            degraded * 1e6,
            degraded / normal
        );
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let _ = farpool_benchargs::arguments();
    let from: Vec<_> = (0..TRAY_PAGES).map(|_| Aligned([7; PAGE_BYTES])).collect();
    let mut random = Random(88_172_645_463_325_252);
    let blades = Blades::start()?;
    let mut sides = [
        Side::connect("none", &blades, Redundancy::NONE)?,
        Side::connect("2 copies", &blades, Redundancy::Copies(2))?,
        Side::connect("parity", &blades, Redundancy::Parity)?,
    ];
    compare(&mut sides, &from, &mut random)?;
    drop(blades);
    degrade(&from, &mut random)
}
