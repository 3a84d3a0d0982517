//! The trace simulator: designs of far memory, in time.
//!
//! * `load`: a trace as dense references; the memory it needs is known beforehand.
//! * [`design`]: the designs compared: page swapping, fine-grained access and the rest, with their
//!   sources.
//! * [`engine`]: runs one program, or several that share a blade, through a design.
//! * [`experiment`]: designs × local sizes × policies, in parallel; `file` reads one, [`answer`]
//!   shows it.
//!
//! * [`budget`]: the local memory that keeps a program within a slowdown.
//! * [`misses`], [`sweep`](mod@sweep): how often each policy misses at each size, in parallel.
//! * [`mrc`]: miss curves over all sizes, exact for LRU, sampled for the others.
//! * [`pager`]: the faults a program will have under Farpool itself, and their time.
//! * [`curves`]: such curves for several policies, as an answer.
//! * [`reproduce`]: the papers' claims, and our results.
//! * [`synthetic`]: seeded traces that tell policies apart.
//!
//! Pages become dense numbers once; each configuration then runs over dense arrays. Time is integer
//! picoseconds: the same trace and parameters give the same bytes on any machine and number of
//! threads.

pub mod answer;
pub mod budget;
pub mod curves;
pub mod design;
pub mod engine;
pub mod experiment;
pub mod file;
pub mod load;
pub mod misses;
pub mod mrc;
pub mod pager;
pub mod reproduce;
pub mod sweep;
pub mod synthetic;

pub use design::{Design, Preset, Tier, Unit};
pub use engine::{Outcome, Program, simulate};
pub use experiment::{Experiment, LocalSize, Row};
pub use load::{LoadOptions, Pages, References, count_pages, load, load_pages};
