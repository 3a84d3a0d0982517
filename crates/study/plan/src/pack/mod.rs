//! How many servers hold the machines: by their peaks, over time, and with part of their memory
//! far.
//!
//! A machine takes processors and memory of its server at every step. With a local share below 1 it
//! takes only that share of its memory there, the rest from the pool. The question is Lim's
//! (thesis, section 4.4): once memory is no limit, how far can the machines be consolidated before
//! processors are scarce?

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
