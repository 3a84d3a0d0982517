//! How fast a segment moves from blade to blade over TCP, and how fast the copies that a lost blade
//! had are made again, beside a bare TCP stream in the same run; and what a busy program notices.
//!
//! `cargo bench -p farpool-pool --bench move_speed -- [MIB] [ROUNDS]`
//!
//! The stream is reported twice: into one reused buffer, and into as much new memory as was sent,
//! which is what a move needs. In a virtual machine whose host reclaims free memory, new memory can
//! take ten times as long as the stream, in some rounds and not in others.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use farpool_blade::{BladeConfig, Server, Serving};
use farpool_pool::{
    Address, Alone, BladeIndex, BladeSpec, Lane, Mover, PageRead, PageWrite, Pool, PoolConfig,
    SUPERPAGE_PAGES, SegmentHandle, SegmentPage, Step,
};
use farpool_units::{MIB, PAGE_BYTES};

const SUPERPAGE_MIB: u64 = 16;
/// Bytes that the bare stream sends and receives at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Least number of single-page reads that measure the busy program, per phase.
const READS: usize = 20_000;

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; PAGE_BYTES]);

fn main() -> anyhow::Result<()> {
    let mut arguments = farpool_benchargs::arguments();
    let mib: u64 = arguments.next().map_or(Ok(1024), |it| it.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let superpages = u32::try_from(mib / SUPERPAGE_MIB)?.max(2);
    let (mut world, segment) = World::new(superpages)?;
    fill(&world.pool, segment, superpages)?;
    let mut ratios = Vec::new();
    for round in 1..=rounds {
        let bytes = u64::from(superpages) * SUPERPAGE_MIB * MIB;
        let floor = stream(bytes, CHUNK_BYTES)?;
        let into_new = stream(bytes, usize::try_from(bytes)?)?;
        let moved = world.move_away()?;
        let rate = |time: Duration| {
            f64::from(superpages) * SUPERPAGE_MIB as f64 / 1024.0 / time.as_secs_f64()
        };
        ratios.push(rate(moved) / rate(floor));
        println!(
            "round {round}: bare stream {:.2} GiB/s, into new memory {:.2} GiB/s, move {:.2} \
             GiB/s, ratio {:.2}",
            rate(floor),
            rate(into_new),
            rate(moved),
            rate(moved) / rate(floor)
        );
    }
    println!("idle program: ratio {:.2} (median of {rounds})", median(ratios));
    world.busy(segment, superpages)?;
    drop(world);
    make_copies(superpages, rounds)
}

/// Makes what a lost blade had again, of a program that is idle, and of one that is busy.
fn make_copies(superpages: u32, rounds: usize) -> anyhow::Result<()> {
    let (mut copies, segment) = Copies::new(superpages)?;
    fill(&copies.pool, segment, superpages)?;
    let bytes = u64::from(superpages) * SUPERPAGE_MIB * MIB;
    let (mut of_stream, mut of_new) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let floor = stream(bytes, CHUNK_BYTES)?.as_secs_f64();
        let into_new = stream(bytes, usize::try_from(bytes)?)?.as_secs_f64();
        copies.lose_one(segment)?;
        let made = copies.make()?.as_secs_f64();
        println!(
            "{} MiB of copies made again in {made:.2} s, {:.2} times a bare stream, {:.2} times \
             one into new memory",
            bytes / MIB,
            made / floor,
            made / into_new
        );
        of_stream.push(made / floor);
        of_new.push(made / into_new);
    }
    println!(
        "copies of an idle program: {:.2} times a bare stream, {:.2} times one into new memory \
         (medians of {rounds})",
        median(of_stream),
        median(of_new)
    );
    let mut lane = copies.pool.lane()?;
    let never = AtomicBool::new(false);
    let quiet = read_at_random(&mut lane, segment, superpages, &never, READS)?;
    copies.lose_one(segment)?;
    let (made, disturbed) =
        beside(&mut lane, (segment, superpages), "making copies", || copies.make())?;
    tell_beside(&quiet, &disturbed, "copies are made");
    println!("busy program: {} MiB of copies in {:.2} s", bytes / MIB, made.as_secs_f64());
    Ok(())
}

/// A program with two copies of all, on two of its blades.
struct Copies {
    /// Those that have copies; the first is lost next.
    blades: VecDeque<Serving>,
    memory_bytes: u64,
    pool: Pool,
}

impl Copies {
    fn new(superpages: u32) -> anyhow::Result<(Copies, SegmentHandle)> {
        let memory_bytes = (u64::from(superpages) + 4) * SUPERPAGE_MIB * MIB;
        let (one, at_one) = serve(memory_bytes)?;
        let (other, at_other) = serve(memory_bytes)?;
        let config = config(vec![at_one.into(), at_other.into()], 2 * memory_bytes);
        let pool = Pool::connect(PoolConfig {
            redundancy: farpool_pool::Redundancy::Copies(2),
            seals_pages: true,
            ..config
        })?;
        let segment = pool.create_segment()?;
        Ok((Copies { blades: [one, other].into(), memory_bytes, pool }, segment))
    }

    /// Ends one of the blades, when there is another one for its copies. Returns once it is given
    /// up.
    fn lose_one(&mut self, segment: SegmentHandle) -> anyhow::Result<()> {
        let (next, address) = serve(self.memory_bytes)?;
        self.pool.add_blade(&address.into())?;
        self.blades.push_back(next);
        drop(self.blades.pop_front());
        let mut lane = self.pool.lane()?;
        while self.pool.has_all_copies() {
            // Writes go to all copies, so one finds it out.
            write_page(&mut lane, SegmentPage { segment, page: 0 })?;
        }
        Ok(())
    }

    fn make(&self) -> anyhow::Result<Duration> {
        let mut mover = Mover::new(&self.pool);
        let begun = Instant::now();
        while mover.complete_copies(&Alone)? == Step::Moved {}
        let took = begun.elapsed();
        ensure!(self.pool.has_all_copies(), "copies are missing");
        let lost: Vec<BladeIndex> = self.pool.lost().iter().map(|it| it.blade).collect();
        lost.into_iter().try_for_each(|blade| self.pool.remove_blade(blade))?;
        Ok(took)
    }
}

fn serve(memory_bytes: u64) -> anyhow::Result<(Serving, Address)> {
    let config = BladeConfig { memory_bytes, ..BladeConfig::default() };
    let server = Server::bind(&["tcp://127.0.0.1:0".parse()?], config)?;
    let address = server.addresses().pop().context("an address")?;
    Ok((server.serve()?, address))
}

fn config(blades: Vec<BladeSpec>, quota_bytes: u64) -> PoolConfig {
    PoolConfig {
        blades,
        client: farpool_pool::fresh_client().expect("random bits"),
        client_name: "move_speed".into(),
        quota_bytes,
        sharing_group: None,
        deadline: Duration::from_secs(5),
        allow_remote_tcp: false,
        redundancy: farpool_pool::Redundancy::NONE,
        seals_pages: false,
        secures_tcp: false,
        asks: None,
        time: farpool_pool::Time::KERNEL,
    }
}

struct World {
    blades: Vec<(Serving, Address)>,
    pool: Pool,
    here: BladeIndex,
    at: usize,
}

impl World {
    fn new(superpages: u32) -> anyhow::Result<(World, SegmentHandle)> {
        let memory_bytes = (u64::from(superpages) + 4) * SUPERPAGE_MIB * MIB;
        let blades = vec![serve(memory_bytes)?, serve(memory_bytes)?];
        let pool = Pool::connect(config(vec![blades[0].1.clone().into()], memory_bytes))?;
        let segment = pool.create_segment()?;
        Ok((World { blades, pool, here: BladeIndex(0), at: 0 }, segment))
    }

    /// Moves everything to the other blade. Returns the time it took.
    fn move_away(&mut self) -> anyhow::Result<Duration> {
        self.at = 1 - self.at;
        let next = self.pool.add_blade(&self.blades[self.at].1.clone().into())?;
        self.pool.set_leaving(self.here, true);
        let mut mover = Mover::new(&self.pool);
        let start = Instant::now();
        while mover.step(self.here, &Alone, || true)? == Step::Moved {}
        let took = start.elapsed();
        self.pool.remove_blade(self.here)?;
        self.blades[1 - self.at].0.blade().run_scrubs();
        self.here = next;
        Ok(took)
    }

    /// Single reads without pause, undisturbed and while everything moves.
    fn busy(&mut self, segment: SegmentHandle, superpages: u32) -> anyhow::Result<()> {
        let mut lane = self.pool.lane()?;
        let never = AtomicBool::new(false);
        let quiet = read_at_random(&mut lane, segment, superpages, &never, READS)?;
        let (moved, disturbed) =
            beside(&mut lane, (segment, superpages), "the move", || self.move_away())?;
        tell_beside(&quiet, &disturbed, "all moves");
        let mib = f64::from(superpages) * SUPERPAGE_MIB as f64;
        println!("busy program: the move went at {:.0} MiB/s", mib / moved.as_secs_f64());
        Ok(())
    }
}

/// Single reads without pause while `work` is done.
fn beside<T>(
    lane: &mut Lane,
    (segment, superpages): (SegmentHandle, u32),
    what: &str,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Vec<Duration>)> {
    let over = AtomicBool::new(false);
    let (done, read) = std::thread::scope(|scope| {
        let over = &over;
        let reader =
            scope.spawn(move || read_at_random(lane, segment, superpages, over, usize::MAX));
        let done = work();
        over.store(true, Relaxed);
        (done, reader.join())
    });
    let read = read.map_err(|_| anyhow::anyhow!("the reader failed"))??;
    ensure!(read.len() > READS / 10, "{what} was too short; use more memory");
    Ok((done?, read))
}

fn tell_beside(quiet: &[Duration], disturbed: &[Duration], what: &str) {
    for percentile in [50, 99] {
        let (alone, beside) = (at(quiet, percentile), at(disturbed, percentile));
        println!(
            "busy program: p{percentile} of a read {:.1} us alone, {:.1} us while {what}, ratio \
             {:.2}",
            alone.as_secs_f64() * 1e6,
            beside.as_secs_f64() * 1e6,
            beside.as_secs_f64() / alone.as_secs_f64()
        );
    }
}

fn fill(pool: &Pool, segment: SegmentHandle, superpages: u32) -> anyhow::Result<()> {
    let page = Page([0x5a; PAGE_BYTES]);
    let mut lane = pool.lane()?;
    for superpage in 0..superpages {
        pool.allocate_superpage(segment, superpage)?;
        let first = superpage * SUPERPAGE_PAGES;
        for start in (first..first + SUPERPAGE_PAGES).step_by(512) {
            let writes: Vec<_> = (start..start + 512)
                .map(|page_number| PageWrite {
                    at: SegmentPage { segment, page: page_number },
                    from: page.0.as_ptr(),
                    token: u64::from(page_number),
                })
                .collect();
            // SAFETY: the page outlives the wait for the completions.
            unsafe { lane.write(&writes) }?;
            finish(&mut lane)?;
        }
    }
    Ok(())
}

fn write_page(lane: &mut Lane, at: SegmentPage) -> anyhow::Result<()> {
    let page = Page([0x5a; PAGE_BYTES]);
    // SAFETY: the page outlives the wait for the completion.
    unsafe { lane.write(&[PageWrite { at, from: page.0.as_ptr(), token: 0 }]) }?;
    finish(lane)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn at(sorted: &[Duration], percentile: usize) -> Duration {
    sorted[(sorted.len() * percentile / 100).min(sorted.len() - 1)]
}

/// Reads until `over`, or `most` times. Returns the latencies, sorted.
fn read_at_random(
    lane: &mut Lane,
    segment: SegmentHandle,
    superpages: u32,
    over: &AtomicBool,
    most: usize,
) -> anyhow::Result<Vec<Duration>> {
    let mut page = Page([0; PAGE_BYTES]);
    let (mut latencies, mut random) = (Vec::new(), 1_u64);
    while latencies.len() < most && !over.load(Relaxed) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let number = u32::try_from((random >> 33) % u64::from(superpages * SUPERPAGE_PAGES))?;
        let read = PageRead {
            at: SegmentPage { segment, page: number },
            into: page.0.as_mut_ptr(),
            token: 0,
        };
        let start = Instant::now();
        // SAFETY: the page outlives the wait for the completion.
        unsafe { lane.read(&[read]) }?;
        finish(lane)?;
        latencies.push(start.elapsed());
        ensure!(page.0 == [0x5a; PAGE_BYTES], "page {number} has wrong bytes");
    }
    latencies.sort();
    Ok(latencies)
}

fn finish(lane: &mut Lane) -> anyhow::Result<()> {
    let mut done = Vec::new();
    while lane.in_flight() > 0 {
        lane.wait(&mut done);
    }
    done.iter().try_for_each(|it| it.result.map_err(Into::into))
}

/// The floor: `bytes` out of a large buffer through one TCP connection, into a buffer of
/// `sink_bytes`.
fn stream(bytes: u64, sink_bytes: usize) -> anyhow::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    let source = vec![0x5a_u8; 256 * CHUNK_BYTES];
    let start = Instant::now();
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || -> std::io::Result<()> {
            let mut left = bytes;
            for chunk in source.chunks(CHUNK_BYTES).cycle() {
                if left == 0 {
                    return Ok(());
                }
                sender.write_all(chunk)?;
                left -= chunk.len() as u64;
            }
            Ok(())
        });
        let mut sink = vec![0_u8; sink_bytes];
        let (mut left, mut at) = (bytes, 0);
        while left > 0 {
            let end = sink_bytes.min(at + CHUNK_BYTES);
            let count = receiver.read(&mut sink[at..end])?;
            left -= count as u64;
            at = (at + count) % sink_bytes;
        }
        sending.join().map_err(|_| anyhow::anyhow!("the sender failed"))??;
        Ok(start.elapsed())
    })
}
