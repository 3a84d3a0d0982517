//! Whether far memory pays, from data: pools sized from utilisation, servers packed, designs
//! priced.
//!
//! Prices, powers and areas are data files with a date and a source; only formulas are code.
//!
//! - [`utilisation`] reads what virtual machines used over time;
//! - [`pool`] computes how much less memory a pool needs than its members separately;
//! - [`pack`] computes how many servers hold them, with and without far memory;
//! - [`cost`] computes what servers cost over their lifetime, and what far memory may cost;
//! - [`dense`] computes what fits into a server of stacked memory and small cores;
//! - [`reproduce`] compares all of it with the tables of the theses behind it.
//!
//! [`pages`] renders each answer for people.
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
