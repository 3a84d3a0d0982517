//! The steward: the one thread that changes which memory is far, on behalf of the program.
//!
//! Until the limit is near it only watches the resident set, and everything is left to the kernel
//! (`life::watch`). Then it registers all memory that can be far
//! (`life::activation`), and from then on answers the program's requests
//! (`life::requests`).

mod carry;
mod changes;
mod children;
mod forgetting;
mod fork;
mod guest;
mod inherited;
mod layers;
mod leaving;
mod places;
mod resting;
mod serve;
mod state;
mod takeover;

pub use inherited::settle_inherited;
pub use leaving::{Left, unregister_all};
pub use state::Steward;
