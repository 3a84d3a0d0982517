//! How many servers hold the machines: by their peaks, over time, and with part of their memory
//! far.
//!
//! A machine takes processors and memory of its server at every step; with a local share below 1
//! only that share of its memory, the rest comes from the pool. The question is Lim's (thesis,
//! section 4.4): with memory out of the way, how far can the machines be consolidated before
//! processors are what is short?

pub mod anneal;
pub mod bound;
pub mod exact;
pub mod greedy;
mod plan;
mod problem;
mod server;

pub use crate::pool::Verdict;
pub use plan::{Answer, Demand, Method, Question, Row, plan};
pub use problem::{BIN, Packing, Problem};
pub use server::Server;
