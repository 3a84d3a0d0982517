//! Fetches pages from the blades into local memory, for threads that wait for them.

use farpool_pool::{Completion, Lane, PageError, PageRead, SegmentPage};
use farpool_units::PAGE_BYTES;

use crate::sys;

/// Pages that can be fetched at a time: one bit each in the answer.
pub const FETCHED_AT_ONCE: usize = 64;

/// A lane, and memory for the pages that come over it.
#[derive(Debug)]
pub struct Fetcher {
    pub lane: Lane,
    pub done: Vec<Completion>,
    /// Why a page of the last request did not arrive, or was not stored.
    pub failure: Option<PageError>,
    /// Local memory of [`FETCHED_AT_ONCE`] pages.
    pub memory: usize,
}

impl Fetcher {
    pub fn new(lane: Lane) -> Result<Fetcher, std::io::Error> {
        let memory = sys::map_local(FETCHED_AT_ONCE * PAGE_BYTES)?;
        Ok(Fetcher { lane, done: Vec::with_capacity(FETCHED_AT_ONCE), failure: None, memory })
    }

    /// The address of the fetched page with this number.
    pub fn address(&self, number: usize) -> usize {
        self.memory + number * PAGE_BYTES
    }

    /// Reads up to [`FETCHED_AT_ONCE`] pages, each to the address of its number; a None is skipped.
    /// Returns the bits of those that arrived.
    pub fn fetch(&mut self, places: impl Iterator<Item = Option<SegmentPage>>) -> u64 {
        self.failure = None;
        let reads: Vec<PageRead> = (0..)
            .zip(places.take(FETCHED_AT_ONCE))
            .filter_map(|(number, at)| {
                let into = self.address(number) as *mut u8;
                Some(PageRead { at: at?, into, token: number as u64 })
            })
            .collect();
        if reads.is_empty() {
            return 0;
        }
        self.done.clear();
        // SAFETY: `memory` belongs to this fetcher alone, and nothing touches it before all reads
        // have completed.
        if let Err(error) = unsafe { self.lane.read(&reads) } {
            sys::say(&format!("far pages cannot be fetched: {error}"));
            return 0;
        }
        let (mut completed, mut fetched) = (0, 0);
        while completed < reads.len() {
            if self.done.is_empty() {
                self.lane.wait(&mut self.done);
            }
            for Completion { token, result } in self.done.drain(..) {
                completed += 1;
                match result {
                    Ok(()) => fetched |= 1 << (token & 63),
                    Err(error) => self.failure = Some(error),
                }
            }
        }
        fetched
    }
}
