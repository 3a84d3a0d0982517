//! What sealing costs: reads of one page and writes of many over TCP, sealed beside plain. The two
//! take turns, so that both have the machine alike.
//!
//!     cargo bench -p farpool-pool --bench seal_cost

use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Server, Serving};
use farpool_pool::{
    Address, Completion, Lane, PageRead, PageWrite, Pool, PoolConfig, SUPERPAGE_PAGES,
    SegmentHandle, SegmentPage, fresh_client,
};
use farpool_units::PAGE_BYTES;

type Failure = Box<dyn std::error::Error>;

/// Superpages read from and written to: 64 MiB, more than the processor's caches hold.
const SUPERPAGES: u32 = 4;
const PAGES: u32 = SUPERPAGES * SUPERPAGE_PAGES;
/// Reads of each kind.
const READS: usize = 40_000;
/// Pages of one write, as the evictor sends them.
const TRAY_PAGES: u32 = 64;
/// Writes in flight, as the evictor keeps them.
const TRAYS: u32 = 4;
/// Turns of writing, for each kind; a turn writes all pages once.
const TURNS: usize = 40;

#[repr(C, align(4096))]
#[derive(Clone)]
struct Aligned([u8; PAGE_BYTES]);

/// A client of its own.
struct Side {
    name: &'static str,
    pool: Pool,
    lane: Lane,
    segment: SegmentHandle,
    reads: Vec<Duration>,
    turns: Vec<Duration>,
}

impl Side {
    fn connect(name: &'static str, address: &Address, seals_pages: bool) -> Result<Side, Failure> {
        let pool = Pool::connect(PoolConfig {
            blades: vec![address.clone().into()],
            client: fresh_client()?,
            client_name: "seal_cost".into(),
            quota_bytes: 1 << 30,
            sharing_group: None,
            deadline: Duration::from_secs(5),
            allow_remote_tcp: false,
            redundancy: farpool_pool::Redundancy::NONE,
            seals_pages,
            secures_tcp: false,
            asks: None,
            time: farpool_pool::Time::KERNEL,
        })?;
        let segment = pool.create_segment()?;
        (0..SUPERPAGES).try_for_each(|sma| pool.allocate_superpage(segment, sma))?;
        let lane = pool.lane()?;
        Ok(Side { name, pool, lane, segment, reads: Vec::new(), turns: Vec::new() })
    }

    fn read(&mut self, page: u32, into: &mut Aligned) {
        let at = SegmentPage { segment: self.segment, page };
        let read = PageRead { at, into: into.0.as_mut_ptr(), token: 0 };
        let begun = Instant::now();
        // SAFETY: the page outlives the wait for its completion.
        unsafe { self.lane.read(&[read]) }.expect("sent");
        let mut done = Vec::with_capacity(1);
        self.lane.wait(&mut done);
        self.reads.push(begun.elapsed());
        assert!(matches!(done[..], [Completion { result: Ok(()), .. }]), "{done:?}");
    }

    /// Writes all pages once, [`TRAYS`] requests at a time.
    fn write_all(&mut self, from: &[Aligned]) {
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
                unsafe { self.lane.write(&writes) }.expect("sent");
                (next, left) = (next + TRAY_PAGES, left + TRAY_PAGES);
            }
            self.lane.wait(&mut done);
            for it in done.drain(..) {
                assert_eq!(it.result, Ok(()));
                left -= 1;
            }
        }
        self.turns.push(begun.elapsed());
    }
}

fn serve() -> Result<(Serving, Address), Failure> {
    let config = BladeConfig { memory_bytes: 1 << 30, ..BladeConfig::default() };
    let serving = Server::bind(&["tcp://127.0.0.1:0".parse()?], config)?.serve()?;
    let address = serving.addresses()[0].clone();
    Ok((serving, address))
}

fn at(samples: &mut [Duration], percent: usize) -> f64 {
    samples.sort_unstable();
    samples[samples.len() * percent / 100].as_secs_f64()
}

fn main() -> Result<(), Failure> {
    let _ = farpool_benchargs::arguments();
    let (serving, address) = serve()?;
    let mut sides =
        [Side::connect("plain", &address, false)?, Side::connect("sealed", &address, true)?];
    let from: Vec<_> = (0..TRAY_PAGES).map(|_| Aligned([7; PAGE_BYTES])).collect();
    for _ in 0..TURNS {
        sides.iter_mut().for_each(|side| side.write_all(&from));
    }
    let (mut into, mut state) = (Box::new(Aligned([0; PAGE_BYTES])), 88_172_645_463_325_252u64);
    for _ in 0..READS {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let [a, b, c, d, ..] = state.to_le_bytes();
        let page = u32::from_le_bytes([a, b, c, d]) % PAGES;
        sides.iter_mut().for_each(|side| side.read(page, &mut into));
    }
    println!("{:<10}{:>14}{:>14}{:>16}", "", "read p50 us", "read p99 us", "written MiB/s");
    let mut rows = Vec::new();
    for side in &mut sides {
        let row = [
            at(&mut side.reads, 50) * 1e6,
            at(&mut side.reads, 99) * 1e6,
            f64::from(PAGES) * PAGE_BYTES as f64 / f64::from(1 << 20) / at(&mut side.turns, 50),
        ];
        println!("{:<10}{:>14.2}{:>14.2}{:>16.0}", side.name, row[0], row[1], row[2]);
        rows.push(row);
        side.pool.goodbye();
    }
    let ratio = |column: usize| rows[1][column] / rows[0][column];
    println!("{:<10}{:>14.3}{:>14.3}{:>16.3}", "ratio", ratio(0), ratio(1), ratio(2));
    serving.shutdown();
    Ok(())
}
