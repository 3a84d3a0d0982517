//! Miss-ratio curves: misses as a function of the size of local memory.
//!
//! * [`LruCurve`]: exact for LRU at every size, from one pass (Mattson et al., IBM Systems Journal
//!   1970).
//! * [`SampledCurve`]: the same from a sample of the pages (SHARDS, Waldspurger et al., FAST 2015),
//!   with its estimated error.
//! * [`miniature`]: any policy, on sampled pages in a cache scaled down (Waldspurger et al., ATC
//!   2017).
//!
//! Each reports beforehand how much memory it will take.

mod exact;
mod miniature;
mod sample;
mod sampled;
mod timeline;

pub use exact::LruCurve;
pub use miniature::{Miniature, miniature};
pub use sample::{Rate, Sample, SampleError};
pub use sampled::{Confidence, SampledCurve};
