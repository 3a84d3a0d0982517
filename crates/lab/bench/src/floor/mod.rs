//! The machine's floors: the least each of Farpool's jobs can cost here, measured bare.
//!
//! They are measured in the same process and the same run as the rows they stand beside, since
//! what a fault or a copy costs differs between machines and, on shared ones, between minutes.

mod copy;
mod fault;
mod tcp;

use crate::BenchError;
use std::cell::OnceCell;

/// Measurements of each floor, of which the best is kept: noise only ever makes them worse.
const ROUNDS: usize = 3;

/// All floors, each measured at its first use and then kept.
#[derive(Debug, Default)]
pub(crate) struct Floors {
    quick: bool,
    fault: OnceCell<Fault>,
    copy_page_ns: OnceCell<f64>,
    uffd_copy_page_ns: OnceCell<f64>,
    move_page_ns: OnceCell<f64>,
    ping_pong_ns: OnceCell<f64>,
    stream_bytes_s: OnceCell<f64>,
}

/// A bare userfaultfd fault answered with one `UFFDIO_COPY`, handler on the faulting core.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub p50_ns: f64,
    pub mean_ns: f64,
    pub p99_ns: f64,
}

impl Floors {
    pub(crate) fn new(quick: bool) -> Self {
        Self { quick, ..Self::default() }
    }

    /// Returns the amount of work, which is smaller in a quick run.
    fn scaled(&self, amount: usize) -> usize {
        if self.quick { amount / 4 } else { amount }
    }

    pub(crate) fn fault(&self) -> Result<Fault, BenchError> {
        let measure = || fault::same_core(self.scaled(80_000));
        cached(&self.fault, || best_of(measure, |fault| fault.p50_ns))
    }

    /// Time of one `memcpy` of 4 KiB from memory too large for the caches.
    pub(crate) fn copy_page_ns(&self) -> Result<f64, BenchError> {
        let measure = || copy::memcpy_page_ns(self.scaled(65_536));
        cached(&self.copy_page_ns, || best_of(measure, |ns| *ns))
    }

    /// Time of `UFFDIO_COPY` in batches of 64 pages, per page.
    pub(crate) fn uffd_copy_page_ns(&self) -> Result<f64, BenchError> {
        let measure = || copy::uffd_copy_page_ns(self.scaled(65_536));
        cached(&self.uffd_copy_page_ns, || best_of(measure, |ns| *ns))
    }

    /// Time of `UFFDIO_MOVE` in batches of 64 pages and one memcpy, per page.
    pub(crate) fn move_page_ns(&self) -> Result<f64, BenchError> {
        let measure = || copy::move_page_ns(self.scaled(65_536));
        cached(&self.move_page_ns, || best_of(measure, |ns| *ns))
    }

    /// Median time over TCP loopback of a 40-byte request answered with a header and a page.
    pub(crate) fn ping_pong_ns(&self) -> Result<f64, BenchError> {
        let measure = || tcp::ping_pong_p50_ns(self.scaled(40_000));
        cached(&self.ping_pong_ns, || best_of(measure, |ns| *ns))
    }

    /// Bytes per second over TCP loopback of blocks of 32 KiB sent one way as fast as possible,
    /// from memory too large for the caches.
    pub(crate) fn stream_bytes_s(&self) -> Result<f64, BenchError> {
        let measure = || tcp::stream_bytes_s(self.scaled(2 << 30), self.scaled(256 << 20));
        cached(&self.stream_bytes_s, || best_of(measure, |bytes_s| -*bytes_s))
    }
}

fn cached<T: Copy>(
    cell: &OnceCell<T>,
    measure: impl FnOnce() -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    if let Some(value) = cell.get() {
        return Ok(*value);
    }
    let value = measure()?;
    Ok(*cell.get_or_init(|| value))
}

/// Measures [`ROUNDS`] times and returns the measurement with the least `cost`.
fn best_of<T>(
    mut measure: impl FnMut() -> Result<T, BenchError>,
    cost: impl Fn(&T) -> f64,
) -> Result<T, BenchError> {
    let mut best = measure()?;
    for _ in 1..ROUNDS {
        let next = measure()?;
        if cost(&next) < cost(&best) {
            best = next;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The floors need privileges that a build machine may not grant: they are skipped visibly
    /// then.
    fn skip_if_denied<T>(result: Result<T, BenchError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(BenchError::Lacking(reason)) => {
                eprintln!("skipped: {reason}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_fault_costs_more_than_a_copy_and_batches_cost_less_than_faults() {
        let copy_ns = copy::memcpy_page_ns(2000).expect("memory is there");
        assert!(copy_ns > 10.0, "4 KiB cannot be copied in {copy_ns} ns");
        let Some(fault) = skip_if_denied(fault::same_core(2000)) else {
            return;
        };
        assert!(fault.p50_ns > copy_ns && fault.p99_ns >= fault.p50_ns);
        let batch_ns = skip_if_denied(copy::uffd_copy_page_ns(4096));
        assert!(batch_ns.is_some_and(|ns| ns > copy_ns / 4.0 && ns < fault.mean_ns));
        assert!(skip_if_denied(copy::move_page_ns(4096)).is_some_and(|ns| ns > copy_ns / 4.0));
    }

    #[test]
    fn loopback_answers_and_streams() {
        let round_trip_ns = tcp::ping_pong_p50_ns(500).expect("loopback works");
        assert!(round_trip_ns > 1000.0, "no TCP round trip takes {round_trip_ns} ns");
        let bytes_s = tcp::stream_bytes_s(64 << 20, 16 << 20).expect("loopback works");
        assert!(bytes_s > 1e7);
    }

    #[test]
    fn the_best_of_three_is_kept_and_measured_once() {
        let mut values = [5.0, 3.0, 4.0].into_iter();
        let best = best_of(|| Ok(values.next().unwrap_or(0.0)), |v| *v);
        assert_eq!(best.expect("no measurement fails"), 3.0);
        let cell = OnceCell::from(7.0);
        assert_eq!(cached(&cell, || panic!("measured twice")).expect("it is kept"), 7.0);
    }
}
