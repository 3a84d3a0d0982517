//! Counts the misses of one cache on one trace.

use std::fmt;
use std::str::FromStr;

use farpool_policy::cache::{Ageing, Belady, CacheKind, CacheVisitor, Future, PageCache, TinyLfu};
use farpool_units::at_most;

/// Seed of [`CacheKind::Random`]; fixed, so that the same question has the same answer.
pub const RANDOM_SEED: u64 = 42;

const FIFO: MissPolicy = MissPolicy::Online(CacheKind::Fifo);

/// Requests between two reports of progress.
const BLOCK_REQUESTS: usize = 1 << 20;

/// What misses can be counted for: the policies, and the bound that no policy can beat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MissPolicy {
    /// A policy without knowledge of the future.
    Online(CacheKind),
    /// W-TinyLFU as libCacheSim has it: its sketch ages by hits in the main part.
    TinyLfuByHits,
    /// Belady's optimum, which knows the future.
    Belady,
}

/// A policy at a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheConfig {
    /// The policy.
    pub policy: MissPolicy,
    /// Pages that fit.
    pub capacity: usize,
}

/// Misses that cannot be counted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MissError {
    /// A capacity of 0.
    #[error("{0} with 0 pages of local memory: a size must be 1 page or more")]
    ZeroCapacity(MissPolicy),
    /// An unknown policy.
    #[error("there is no cache policy named \"{name}\"; choose one of: {known}")]
    UnknownPolicy {
        /// The name given.
        name: String,
        /// The known names.
        known: String,
    },
}

/// A trace of dense pages.
#[derive(Debug, Clone, Copy)]
pub struct DensePages<'t> {
    /// The page of each request.
    pub pages: &'t [u32],
    /// Exclusive upper bound of the pages.
    pub page_count: usize,
}

impl MissPolicy {
    /// The name used on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Online(kind) => kind.name(),
            Self::TinyLfuByHits => "w-tinylfu-libcachesim",
            Self::Belady => "belady",
        }
    }

    /// Returns every policy, the bound last.
    pub fn all() -> impl Iterator<Item = Self> {
        CacheKind::ALL.into_iter().map(Self::Online).chain([Self::TinyLfuByHits, Self::Belady])
    }
}

impl fmt::Display for MissPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for MissPolicy {
    type Err = MissError;

    fn from_str(name: &str) -> Result<Self, MissError> {
        Self::all().find(|policy| policy.name() == name).ok_or_else(|| MissError::UnknownPolicy {
            name: name.to_owned(),
            known: Self::all().map(Self::name).collect::<Vec<_>>().join(", "),
        })
    }
}

impl CacheConfig {
    /// # Errors
    /// A capacity of 0.
    pub(crate) fn check(self) -> Result<(), MissError> {
        if self.capacity == 0 { Err(MissError::ZeroCapacity(self.policy)) } else { Ok(()) }
    }

    /// Returns an upper bound of the bytes that its cache takes.
    #[must_use]
    pub fn memory_bytes(self, page_count: u64, requests: u64) -> u64 {
        let capacity = self.capacity as u64;
        match self.policy {
            MissPolicy::Online(kind) => kind.memory_bytes(page_count, capacity, requests),
            MissPolicy::TinyLfuByHits => {
                CacheKind::TinyLfu.memory_bytes(page_count, capacity, requests)
            }
            MissPolicy::Belady => Belady::memory_bytes(page_count, capacity, requests),
        }
    }
}

/// Counts the requests that miss; the first reference to a page always does.
///
/// # Errors
/// A capacity of 0.
pub fn count_misses(trace: DensePages<'_>, config: CacheConfig) -> Result<u64, MissError> {
    config.check()?;
    let future =
        (config.policy == MissPolicy::Belady).then(|| Future::new(trace.pages, trace.page_count));
    Ok(count(trace, config, future.as_ref(), |_| {}))
}

/// The same with the future of the same trace precomputed. `progress` is called after every block
/// with the number of requests in it. The capacity must not be 0.
pub(crate) fn count(
    trace: DensePages<'_>,
    config: CacheConfig,
    future: Option<&Future<'_>>,
    progress: impl FnMut(usize),
) -> u64 {
    let DensePages { pages, page_count } = trace;
    match (config.policy, future) {
        (MissPolicy::Online(kind), _) => {
            let visitor = Misses { pages, progress };
            kind.visit(page_count, config.capacity, RANDOM_SEED, visitor)
        }
        // With room for all pages none leaves, as in `CacheKind::visit`.
        (MissPolicy::TinyLfuByHits, _) if config.capacity >= page_count.max(1) => {
            count(trace, CacheConfig { policy: FIFO, ..config }, None, progress)
        }
        (MissPolicy::TinyLfuByHits, _) => {
            let room = at_most(config.capacity);
            run(pages, TinyLfu::with_ageing(page_count, room, Ageing::MainHits), progress)
        }
        (MissPolicy::Belady, Some(future)) => {
            // No trace has more pages than fit.
            let room = at_most(config.capacity);
            run(pages, Belady::new(future, page_count, room), progress)
        }
        (MissPolicy::Belady, None) => {
            let future = Future::new(pages, page_count);
            count(trace, config, Some(&future), progress)
        }
    }
}

struct Misses<'p, F> {
    pages: &'p [u32],
    progress: F,
}

impl<F: FnMut(usize)> CacheVisitor for Misses<'_, F> {
    type Output = u64;

    fn visit(self, cache: impl PageCache + Send + 'static) -> u64 {
        run(self.pages, cache, self.progress)
    }
}

fn run(pages: &[u32], mut cache: impl PageCache, mut progress: impl FnMut(usize)) -> u64 {
    let mut misses = 0;
    for block in pages.chunks(BLOCK_REQUESTS) {
        for page in block {
            misses += u64::from(!cache.access(*page, &mut |_| {}));
        }
        progress(block.len());
    }
    misses
}
