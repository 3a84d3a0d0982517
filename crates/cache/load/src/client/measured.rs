//! The results of a run.

use std::time::Duration;

use super::reply::Said;
use crate::latency::Latencies;

/// Figures of one run, of one thread or of all.
#[derive(Debug, Default, Clone)]
pub struct Measured {
    pub elapsed: Duration,
    pub requests: u64,
    pub keys: u64,
    pub hits: u64,
    pub misses: u64,
    /// Stores that the server refused, and error lines.
    pub refused: u64,
    /// Stores that followed a miss.
    pub stored_after_miss: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    /// Closed loop: from writing a batch to its last reply. Open loop: from a request's scheduled
    /// time to its reply.
    pub latencies: Latencies,
    /// Open loop: how late requests were sent because the client could not keep up.
    pub late: Latencies,
    /// Processor time of the client's threads.
    pub cpu: Duration,
    /// Requests that were due but unanswered when the run ended.
    pub unanswered: u64,
}

impl Measured {
    pub(super) fn take(&mut self, said: Said, keys: usize) {
        self.requests += 1;
        self.keys += keys as u64;
        self.hits += said.hits as u64;
        self.misses += said.misses as u64;
        self.refused += said.refused as u64;
    }

    /// Adds another thread's figures for the same period.
    pub fn merge(&mut self, other: &Self) {
        self.elapsed = self.elapsed.max(other.elapsed);
        self.requests += other.requests;
        self.keys += other.keys;
        self.hits += other.hits;
        self.misses += other.misses;
        self.refused += other.refused;
        self.stored_after_miss += other.stored_after_miss;
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
        self.latencies.merge(&other.latencies);
        self.late.merge(&other.late);
        self.cpu += other.cpu;
        self.unanswered += other.unanswered;
    }

    /// Requests per second.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}
