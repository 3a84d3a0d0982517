//! Real blades in this process, and local pages to move.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Server, Serving};
use farpool_pool::{
    Address, BladeIndex, Completion, CopyDesk, Errand, FrozenToken, Lane, PageError, PageRead,
    PageWrite, Pool, PoolConfig, SUPERPAGE_PAGES, Seals, SegmentHandle, SegmentPage,
};
use farpool_units::PAGE_BYTES;
use farpool_wire::BladeTotals;

/// Long enough for everything that must happen; a test that waits this long fails.
pub(crate) const AMPLE: Duration = Duration::from_secs(20);
/// The deadline where a blade is stopped: short, but longer than a busy machine lets a thread wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(6);

/// Blades, stopped when dropped.
pub(crate) struct Blades {
    pub serving: Vec<Option<Serving>>,
    pub addresses: Vec<Address>,
    folder: tempfile::TempDir,
}

impl Blades {
    /// One blade of 1 GiB per transport named: more than the model can use.
    pub(crate) fn start(transports: &[&str]) -> Blades {
        Blades::start_with(transports, 1 << 30)
    }

    pub(crate) fn start_with(transports: &[&str], memory_bytes: u64) -> Blades {
        let mut blades = Blades {
            serving: Vec::new(),
            addresses: Vec::new(),
            folder: tempfile::tempdir().expect("folder"),
        };
        let config = BladeConfig { memory_bytes, ..BladeConfig::default() };
        transports.iter().for_each(|it| blades.add(it, config.clone()));
        blades
    }

    pub(crate) fn add(&mut self, transport: &str, config: BladeConfig) {
        let path = self.folder.path().join(format!("{}.sock", self.serving.len()));
        let address = match transport {
            "shm" => Address::Shm(path),
            "unix" => Address::Unix(path),
            _ => "tcp://127.0.0.1:0".parse().expect("address"),
        };
        let server = Server::bind(&[address], BladeConfig { threads: 2, ..config }).expect("bind");
        self.addresses.extend(server.addresses());
        self.serving.push(Some(server.serve().expect("serve")));
    }

    pub(crate) fn stop(&mut self, blade: usize) {
        self.serving[blade].take().expect("running").shutdown();
    }

    pub(crate) fn used_bytes(&self, blade: usize) -> u64 {
        self.serving[blade].as_ref().expect("running").stat().totals.used_bytes.get()
    }

    /// Waits until no running blade has a client or lent memory left; shared memory must have been
    /// released by all holders.
    pub(crate) fn wait_until_unused(&self) {
        self.wait_until(|totals| totals.used_bytes.get() == 0 && totals.clients.get() == 0);
    }

    /// Waits until no running blade knows a client, whether or not it still holds memory.
    pub(crate) fn wait_until_forgotten(&self) {
        self.wait_until(|totals| totals.clients.get() == 0);
    }

    fn wait_until(&self, condition: impl Fn(&BladeTotals) -> bool) {
        let until = Instant::now() + AMPLE;
        for serving in self.serving.iter().flatten() {
            loop {
                serving.blade().run_scrubs(); // sooner than it would by itself
                let totals = serving.stat().totals;
                if condition(&totals) {
                    break;
                }
                assert!(Instant::now() < until, "still in use: {totals:?}");
                std::thread::yield_now();
            }
        }
    }
}

pub(crate) fn config(blades: &Blades) -> PoolConfig {
    PoolConfig {
        blades: blades.addresses.iter().cloned().map(Into::into).collect(),
        client: farpool_pool::fresh_client().expect("random"),
        client_name: "pool test".into(),
        quota_bytes: 8 << 30,
        sharing_group: None,
        deadline: AMPLE,
        allow_remote_tcp: false,
        redundancy: farpool_pool::Redundancy::NONE,
        seals_pages: false,
        secures_tcp: false,
        asks: None,
        time: farpool_pool::Time::KERNEL,
    }
}

pub(crate) fn connect(blades: &Blades) -> Pool {
    Pool::connect(config(blades)).expect("connect")
}

/// A page filled with a pattern of its seed.
pub(crate) fn pattern(seed: u64) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    let mut word = seed;
    for bytes in page.chunks_exact_mut(8) {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    page
}

#[repr(C, align(4096))]
#[derive(Clone)]
struct Aligned([u8; PAGE_BYTES]);

/// Local pages, found by token.
pub(crate) struct Pages(Vec<Aligned>);

impl Pages {
    pub(crate) fn of_patterns(seeds: impl IntoIterator<Item = u64>) -> Pages {
        Pages(seeds.into_iter().map(|seed| Aligned(pattern(seed))).collect())
    }

    pub(crate) fn at(&self, token: u64) -> *const u8 {
        self.bytes(token).as_ptr()
    }

    pub(crate) fn at_mut(&mut self, token: u64) -> *mut u8 {
        let token = usize::try_from(token).expect("small");
        // All pointers come from the same allocation, so earlier ones stay valid.
        let base: *mut Aligned = self.0.as_mut_ptr();
        base.wrapping_add(token).cast()
    }

    pub(crate) fn bytes(&self, token: u64) -> &[u8; PAGE_BYTES] {
        &self.0[usize::try_from(token).expect("small")].0
    }
}

/// Waits for `count` completions. Returns their results by token, from 0.
pub(crate) fn finish(lane: &mut Lane, count: usize) -> Vec<Result<(), PageError>> {
    let mut done: Vec<Completion> = Vec::new();
    while lane.in_flight() > 0 {
        lane.wait(&mut done);
    }
    done.sort_by_key(|it| it.token);
    let tokens = done.iter().map(|it| it.token);
    assert!(tokens.eq(0..count as u64), "every token once: {done:?}");
    done.into_iter().map(|it| it.result).collect()
}

/// A segment of so many superpages, all with memory.
pub(crate) fn allocate(pool: &Pool, superpages: u32) -> SegmentHandle {
    let segment = pool.create_segment().expect("segment");
    (0..superpages).for_each(|it| pool.allocate_superpage(segment, it).expect("allocated"));
    segment
}

/// Some pages of every superpage.
pub(crate) fn sample(superpages: u32) -> Vec<u32> {
    (0..superpages).flat_map(|it| [0, 1, 2, 777, 4095].map(|p| it * SUPERPAGE_PAGES + p)).collect()
}

/// Begins to write the pages with the pattern of `seed + page`, in one call. What is returned has
/// to live until they are finished.
#[must_use]
pub(crate) fn submit_writes(
    lane: &mut Lane,
    segment: SegmentHandle,
    pages: &[u32],
    seed: u64,
) -> Pages {
    let local = Pages::of_patterns(pages.iter().map(|&page| seed + u64::from(page)));
    let at = |&page: &u32| SegmentPage { segment, page };
    let writes: Vec<_> = (0u64..)
        .zip(pages)
        .map(|(token, page)| PageWrite { at: at(page), from: local.at(token), token })
        .collect();
    // SAFETY: the pages outlive the wait for their completions.
    unsafe { lane.write(&writes) }.expect("submitted");
    local
}

/// Writes the pages with the pattern of `seed + page`. Returns what became of each.
pub(crate) fn try_write(
    lane: &mut Lane,
    segment: SegmentHandle,
    pages: &[u32],
    seed: u64,
) -> Vec<Result<(), PageError>> {
    let _local = submit_writes(lane, segment, pages, seed);
    finish(lane, pages.len())
}

/// Writes the pages with the pattern of `seed + page`.
pub(crate) fn write(lane: &mut Lane, segment: SegmentHandle, pages: &[u32], seed: u64) {
    assert!(try_write(lane, segment, pages, seed).iter().all(Result::is_ok));
}

/// Begins to read the pages. What is returned has to live until they are finished.
#[must_use]
pub(crate) fn submit_reads(lane: &mut Lane, segment: SegmentHandle, pages: &[u32]) -> Pages {
    let mut local = Pages::of_patterns(pages.iter().map(|_| !0));
    let reads: Vec<_> = (0u64..)
        .zip(pages)
        .map(|(token, &page)| PageRead {
            at: SegmentPage { segment, page },
            into: local.at_mut(token),
            token,
        })
        .collect();
    // SAFETY: the pages outlive the wait for their completions.
    unsafe { lane.read(&reads) }.expect("submitted");
    local
}

/// Waits for pages that are being read. Returns for each an error, or whether it has the pattern of
/// `seed + page`.
pub(crate) fn finish_reads(
    lane: &mut Lane,
    pages: &[u32],
    seed: u64,
    local: &Pages,
) -> Vec<Result<bool, PageError>> {
    let done = finish(lane, pages.len());
    let is_right = |token: u64, page: u32| *local.bytes(token) == pattern(seed + u64::from(page));
    let numbered = (0u64..).zip(pages);
    numbered.zip(done).map(|((token, &page), done)| done.map(|()| is_right(token, page))).collect()
}

/// Reads the pages. Returns for each an error, or whether it has the pattern of `seed + page`.
pub(crate) fn read(
    lane: &mut Lane,
    segment: SegmentHandle,
    pages: &[u32],
    seed: u64,
) -> Vec<Result<bool, PageError>> {
    let local = submit_reads(lane, segment, pages);
    finish_reads(lane, pages, seed, &local)
}

/// Reads the pages. True if all of them have the pattern of `seed + page`.
pub(crate) fn reads(
    lane: &mut Lane,
    segment: SegmentHandle,
    pages: &[u32],
    seed: u64,
) -> Result<bool, PageError> {
    let each: Result<Vec<bool>, _> = read(lane, segment, pages, seed).into_iter().collect();
    each.map(|each| each.into_iter().all(|is_right| is_right))
}

/// Waits until the blades have answered all, or are known to be lost.
pub(crate) fn drive_until_idle(lane: &mut Lane) {
    let mut done = Vec::new();
    while !lane.is_idle() {
        lane.expire(Instant::now(), &mut done);
        std::thread::yield_now();
    }
    assert!(done.is_empty(), "nothing was asked for: {done:?}");
}

/// What the processes of one tree agree on, for any part.
#[derive(Default)]
pub(crate) struct Together(Mutex<BTreeMap<u128, FrozenToken>>);

impl CopyDesk for Together {
    fn ask(&self, _from: BladeIndex, original: u128) -> Errand {
        match self.0.lock().expect("lock").get(&original) {
            Some(copy) => Errand::Attach(Box::new(*copy)),
            None => Errand::Copy,
        }
    }

    fn announce(&self, original: u128, copy: &FrozenToken) {
        self.0.lock().expect("lock").insert(original, *copy);
    }

    fn forget(&self, original: u128) {
        self.0.lock().expect("lock").remove(&original);
    }
}

/// The seals of a segment as a child has them that lacks these pages.
pub(crate) fn shared_seals(
    pool: &Pool,
    segment: SegmentHandle,
    lacking: impl Iterator<Item = u32>,
) -> Option<Seals> {
    let exported = pool.export_seals(segment, lacking);
    exported.map(|it| Seals::import(&it).expect("seals"))
}
