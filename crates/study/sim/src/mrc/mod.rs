//! Miss-ratio curves: misses as a function of the size of local memory.
//!
//! * [`LruCurve`]: exact for LRU at every size, from one pass (Mattson et al., IBM Systems Journal
//!   1970).
//! * [`sampled_lru`]: the same from samples of the pages (SHARDS, Waldspurger et al., FAST 2015),
//!   with its estimated error.
//! * [`Miniature`]: any policy, on sampled pages in caches scaled down (Waldspurger et al., ATC
//!   2017), with its estimated error.
//!
//! What is known of the whole trace is never estimated: how many pages occur, and so how many
//! references are first touches.
//!
//! Each reports beforehand how much memory it will take.

mod exact;
mod miniature;
mod sample;
mod sampled;
mod timeline;

pub use exact::LruCurve;
pub use miniature::Miniature;
pub use sample::{Population, Rate, Sample, SampleError};
pub use sampled::{Estimate, SAMPLES, sampled_lru, sampled_lru_memory_bytes};
