//! What TLS costs: reads of one page, reads of 32 KiB and writes over TCP, with certificates beside
//! in the clear; pages are sealed either way, as they are by default. The two take turns, so that
//! both have the machine alike.
//!
//!     cargo bench -p farpool-pool --bench tls_cost

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Server, Serving};
use farpool_handshake::Dialer;
use farpool_identity::authority::{Authority, Request};
use farpool_identity::{Credentials, Files, Identity, UnixTime};
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
const READS: usize = 20_000;
/// Pages of one read of many, and reads in flight.
const RUN_PAGES: u32 = 8;
const RUNS: u32 = 8;
/// Pages of one write, as the evictor sends them.
const TRAY_PAGES: u32 = 64;
/// Writes in flight, as the evictor keeps them.
const TRAYS: u32 = 4;
/// Turns of writing, for each kind; a turn writes all pages once.
const TURNS: usize = 15;

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
    runs: Vec<Duration>,
    serving: Serving,
}

impl Side {
    fn connect(
        name: &'static str,
        pki: Option<(Arc<Credentials>, Arc<Credentials>)>,
    ) -> Result<Side, Failure> {
        let (node, program) = pki.unzip();
        let (serving, address) = serve(node)?;
        let dialer = program.map(|it| Dialer::new(it, |_| ())).transpose()?;
        let pool = Pool::connect(PoolConfig {
            blades: vec![address.into()],
            client: fresh_client()?,
            client_name: "tls_cost".into(),
            quota_bytes: 1 << 30,
            sharing_group: None,
            deadline: Duration::from_secs(5),
            allow_remote_tcp: false,
            redundancy: farpool_pool::Redundancy::NONE,
            seals_pages: true,
            secures_tcp: dialer.is_some(),
            asks: dialer.map(|dialer| dialer as _),
            time: farpool_pool::Time::KERNEL,
        })?;
        let segment = pool.create_segment()?;
        (0..SUPERPAGES).try_for_each(|sma| pool.allocate_superpage(segment, sma))?;
        let lane = pool.lane()?;
        let (reads, turns, runs) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Side { name, pool, lane, segment, reads, turns, runs, serving })
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

    /// Reads all pages once, [`RUNS`] requests at a time.
    fn read_all(&mut self, into: &mut [Aligned]) {
        let begun = Instant::now();
        let (mut next, mut left, mut done) = (0, 0, Vec::new());
        while next < PAGES || left > 0 {
            while next < PAGES && left <= (RUNS - 1) * RUN_PAGES {
                // A place is used again once all reads of its turn have ended at the latest.
                let first = next as usize % into.len();
                let pages = (next..).zip(&mut into[first..first + RUN_PAGES as usize]);
                let reads: Vec<_> = pages
                    .map(|(page, into)| {
                        let at = SegmentPage { segment: self.segment, page };
                        PageRead { at, into: into.0.as_mut_ptr(), token: 0 }
                    })
                    .collect();
                // SAFETY: the pages outlive the waits for their completions.
                unsafe { self.lane.read(&reads) }.expect("sent");
                (next, left) = (next + RUN_PAGES, left + RUN_PAGES);
            }
            self.lane.wait(&mut done);
            for it in done.drain(..) {
                assert_eq!(it.result, Ok(()));
                left -= 1;
            }
        }
        self.runs.push(begun.elapsed());
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

fn serve(credentials: Option<Arc<Credentials>>) -> Result<(Serving, Address), Failure> {
    let config = BladeConfig { memory_bytes: 1 << 30, credentials, ..BladeConfig::default() };
    let serving = Server::bind(&["tcp://127.0.0.1:0".parse()?], config)?.serve()?;
    let address = serving.addresses()[0].clone();
    Ok((serving, address))
}

/// Certificates of a node and of a program.
fn certificates(folder: &Path) -> Result<(Arc<Credentials>, Arc<Credentials>), Failure> {
    let now = UnixTime::now();
    let mut authority = Authority::init(&folder.join("pki"), "rack".parse()?, now)?;
    let mut issue = |path: &str, hosts| -> Result<_, Failure> {
        let identity: Identity = format!("spiffe://rack/{path}").parse()?;
        let request = Request { role: identity.role, hosts, days: 1 };
        let folder = authority.issue(request, now)?.folder;
        Ok(Credentials::load(Files::in_folder(&folder), now)?)
    };
    let node = issue("node/n", vec!["127.0.0.1".parse()?])?;
    Ok((node, issue("program/p", Vec::new())?))
}

fn at(samples: &mut [Duration], percent: usize) -> f64 {
    samples.sort_unstable();
    samples[samples.len() * percent / 100].as_secs_f64()
}

fn main() -> Result<(), Failure> {
    let _ = farpool_benchargs::arguments();
    let folder = tempfile::tempdir()?;
    let pki = certificates(folder.path())?;
    let mut sides = [Side::connect("plain", None)?, Side::connect("tls", Some(pki))?];
    let mut pages: Vec<_> = (0..TRAY_PAGES * 2).map(|_| Aligned([7; PAGE_BYTES])).collect();
    for _ in 0..TURNS {
        sides.iter_mut().for_each(|side| side.write_all(&pages));
        sides.iter_mut().for_each(|side| side.read_all(&mut pages));
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
    let head = ["", "read p50 us", "read p99 us", "32K read MiB/s", "written MiB/s"];
    println!("{:<8}{:>14}{:>14}{:>16}{:>16}", head[0], head[1], head[2], head[3], head[4]);
    let mut rows = Vec::new();
    for side in &mut sides {
        let mib = f64::from(PAGES) * PAGE_BYTES as f64 / f64::from(1 << 20);
        let row = [
            at(&mut side.reads, 50) * 1e6,
            at(&mut side.reads, 99) * 1e6,
            mib / at(&mut side.runs, 50),
            mib / at(&mut side.turns, 50),
        ];
        let [p50, p99, read, written] = row;
        println!("{:<8}{p50:>14.2}{p99:>14.2}{read:>16.0}{written:>16.0}", side.name);
        rows.push(row);
        side.pool.goodbye();
    }
    let [p50, p99, read, written] = [0, 1, 2, 3].map(|column| rows[1][column] / rows[0][column]);
    println!("{:<8}{p50:>14.3}{p99:>14.3}{read:>16.3}{written:>16.3}", "ratio");
    sides.into_iter().for_each(|side| side.serving.shutdown());
    Ok(())
}
