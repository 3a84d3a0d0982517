//! Whether far memory pays, from data: pools sized from utilisation, servers packed, designs
//! priced.
//!
//! Prices, powers and areas are data files with a date and a source; only formulas are code.
//!
//! - [`utilisation`] reads what virtual machines used over time;
//! - [`pool`] says how much less memory a pool needs than its members apart;
//! - [`pack`] says how many servers hold them, with and without far memory;
//! - [`cost`] says what servers cost over their life, and what far memory may cost;
//! - [`dense`] says what fits into a server of stacked memory and small cores;
//! - [`reproduce`] holds all of it against the tables of the theses it is from.
//!
//! [`pages`] makes what people read of each.
//!
//! Everything but the readers of [`utilisation`] is pure, and the same input with the same seed
//! gives the same answer.

pub mod cost;
mod data;
pub mod dense;
mod error;
pub mod pack;
pub mod pages;
pub mod pool;
mod random;
pub mod reproduce;
pub mod utilisation;

pub use error::PlanError;
pub use random::Random;
