//! Many policies and sizes over one trace, on all processors.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use farpool_kernel::lock;
use farpool_policy::cache::Future;

use crate::misses::{CacheConfig, DensePages, MissError, MissPolicy, count};

/// Progress of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Requests simulated, over all configurations.
    pub requests: u64,
    /// Requests to simulate in total.
    pub requests_total: u64,
}

/// Counts the misses of each configuration on `threads` threads; the results are in the order of
/// `configs` and do not depend on the threads. `progress` is called about every million requests,
/// from any thread but never from two at once.
///
/// # Errors
/// A configuration with a capacity of 0, before anything is done.
pub fn sweep(
    trace: DensePages<'_>,
    configs: &[CacheConfig],
    threads: usize,
    progress: impl FnMut(Progress) + Send,
) -> Result<Vec<u64>, MissError> {
    for config in configs {
        config.check()?;
    }
    let needs_future = configs.iter().any(|config| config.policy == MissPolicy::Belady);
    let future = needs_future.then(|| Future::new(trace.pages, trace.page_count));
    let told = Mutex::new(Told {
        progress,
        now: Progress {
            requests: 0,
            requests_total: configs.len() as u64 * trace.pages.len() as u64,
        },
    });
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(config) = configs.get(at) else { return done };
            let misses = count(trace, *config, future.as_ref(), |requests| {
                lock(&told).tell(requests);
            });
            done.push((at, misses));
        }
    };
    let mut answers = vec![0; configs.len()];
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..threads.clamp(1, configs.len().max(1))).map(|_| scope.spawn(work)).collect();
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        for (at, misses) in done {
            answers[at] = misses;
        }
    });
    Ok(answers)
}

/// Returns the bytes that [`sweep`] takes beside the trace: the largest caches in use at once, and
/// the future if it is needed.
#[must_use]
pub fn memory_bytes(
    page_count: u64,
    requests: u64,
    configs: &[CacheConfig],
    threads: usize,
) -> u64 {
    let mut caches: Vec<u64> =
        configs.iter().map(|config| config.memory_bytes(page_count, requests)).collect();
    caches.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
    let needs_future = configs.iter().any(|config| config.policy == MissPolicy::Belady);
    let future = if needs_future { 4 * requests + 4 * page_count } else { 0 };
    caches.iter().take(threads.max(1)).sum::<u64>() + future
}

struct Told<F> {
    progress: F,
    now: Progress,
}

impl<F: FnMut(Progress)> Told<F> {
    fn tell(&mut self, requests: usize) {
        self.now.requests += requests as u64;
        (self.progress)(self.now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::misses::count_misses;
    use crate::synthetic::Synthetic;

    fn all_configs() -> Vec<CacheConfig> {
        let sizes = [1, 7, 64, 300];
        MissPolicy::all()
            .flat_map(|policy| sizes.map(|capacity| CacheConfig { policy, capacity }))
            .collect()
    }

    #[test]
    fn any_number_of_threads_gives_the_same_in_the_order_asked() {
        let made = Synthetic::zipf(1 << 9, 5000, 3);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let configs = all_configs();
        let alone: Vec<_> =
            configs.iter().map(|config| count_misses(trace, *config).unwrap()).collect();
        for threads in [0, 1, 2, 5, 1000] {
            let mut last = None;
            let together = sweep(trace, &configs, threads, |now| last = Some(now)).unwrap();
            assert_eq!(together, alone, "{threads} threads");
            let requests = 5000 * configs.len() as u64;
            assert_eq!(last, Some(Progress { requests, requests_total: requests }));
        }
    }

    #[test]
    fn nothing_beats_the_optimum_and_room_for_all_misses_only_first_references() {
        let made = Synthetic::phases(600, 6000, 5);
        let trace = DensePages { pages: &made.pages, page_count: made.page_count };
        let distinct = made.pages.iter().collect::<std::collections::BTreeSet<_>>().len() as u64;
        for capacity in [1, 2, 10, 100, 599] {
            let misses = |policy| count_misses(trace, CacheConfig { policy, capacity }).unwrap();
            let least = misses(MissPolicy::Belady);
            for policy in MissPolicy::all() {
                assert!(misses(policy) >= least, "{policy} {capacity}");
            }
        }
        for policy in MissPolicy::all() {
            for capacity in [made.page_count, made.page_count * 2] {
                let all = CacheConfig { policy, capacity };
                assert_eq!(count_misses(trace, all), Ok(distinct), "{policy}");
            }
        }
    }

    #[test]
    fn no_room_is_refused_by_name() {
        let trace = DensePages { pages: &[0], page_count: 1 };
        for policy in MissPolicy::all() {
            let refused = sweep(trace, &[CacheConfig { policy, capacity: 0 }], 1, |_| {});
            assert_eq!(refused, Err(MissError::ZeroCapacity(policy)));
            assert!(refused.unwrap_err().to_string().starts_with(policy.name()));
        }
        let unknown = "mru".parse::<MissPolicy>().unwrap_err().to_string();
        assert!(
            unknown.contains("\"mru\"") && unknown.ends_with("w-tinylfu-libcachesim, belady"),
            "{unknown}"
        );
    }

    #[test]
    fn an_empty_trace_misses_nothing() {
        let trace = DensePages { pages: &[], page_count: 0 };
        for policy in MissPolicy::all() {
            assert_eq!(count_misses(trace, CacheConfig { policy, capacity: 3 }), Ok(0));
        }
    }
}
