//! Taking far memory at the start, and keeping it.

use std::sync::Arc;
use std::time::Duration;

use farpool_pool::{
    BladeSpec, Pool, PoolConfig, PoolError, SUPERPAGE_PAGES, SegmentHandle, fresh_client,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::settings::{FarSettings, Shared};
use super::worker::Worker;
use crate::tier::far::FarMemory;
use crate::tier::log::{Medium, ZONES_MIN};

/// How often the pool's leases are renewed at least.
const KEEP_ALIVE_MAX: Duration = Duration::from_secs(5);

/// Why there is no far memory.
#[derive(Debug, thiserror::Error)]
pub enum FarError {
    #[error("far memory: {0}")]
    Pool(#[from] PoolError),
    #[error(
        "{bytes} bytes of far memory are too few for {shards} threads: give at least {least} bytes"
    )]
    TooSmall { bytes: u64, shards: usize, least: u64 },
    #[error("far memory: no memory for its buffers")]
    Buffers,
}

/// Connects to the blades, takes the memory, and gives each worker its share.
pub(super) fn attach(settings: &FarSettings, workers: &mut [Worker]) -> Result<Pool, FarError> {
    let superpage_bytes = u64::from(SUPERPAGE_PAGES) * farpool_pool::PAGE_BYTES as u64;
    let shards = workers.len();
    let each = settings.bytes / superpage_bytes / shards as u64;
    if each * u64::from(SUPERPAGE_PAGES) < (FarMemory::ZONE_PAGES * ZONES_MIN) as u64 {
        let least = superpage_bytes * shards as u64;
        return Err(FarError::TooSmall { bytes: settings.bytes, shards, least });
    }
    let pool = Pool::connect(PoolConfig {
        blades: settings.blades.iter().cloned().map(BladeSpec::from).collect(),
        client: fresh_client()?,
        client_name: format!("kv:{}", std::process::id()),
        quota_bytes: each * shards as u64 * superpage_bytes,
        deadline: settings.deadline,
        allow_remote_tcp: settings.allow_remote_tcp,
    })?;
    let segment: SegmentHandle = pool.create_segment()?;
    let each = u32::try_from(each)
        .unwrap_or(u32::MAX / SUPERPAGE_PAGES / u32::try_from(shards).unwrap_or(u32::MAX));
    for (number, worker) in (0u32..).zip(workers) {
        let first = number * each;
        (first..first + each)
            .try_for_each(|superpage| pool.allocate_superpage(segment, superpage))?;
        let (first_page, pages) = (first * SUPERPAGE_PAGES, each * SUPERPAGE_PAGES);
        let far = FarMemory::log(pool.lane()?, segment, first_page, pages);
        worker.add_far(far.ok_or(FarError::Buffers)?);
    }
    Ok(pool)
}

/// Renews the pool's leases until the server is asked to stop, and says once which blades were lost.
pub(super) fn keep(pool: &Pool, shared: &Arc<Shared>) {
    let pause = (pool.lease() / 3).min(KEEP_ALIVE_MAX);
    let mut known = 0;
    loop {
        let mut fds = [PollFd::new(&shared.stop, PollFlags::IN)];
        // An interrupted wait only means that leases are renewed earlier.
        let _ = poll(&mut fds, Timespec::try_from(pause).ok().as_ref());
        if shared.is_asked_to_stop.load(std::sync::atomic::Ordering::Relaxed) {
            return pool.goodbye();
        }
        pool.keep_alive();
        let lost = pool.lost();
        for blade in lost.iter().skip(known) {
            tracing::error!(
                address = blade.address,
                reason = blade.reason,
                "a blade is lost: its items are misses now"
            );
        }
        known = known.max(lost.len());
    }
}
