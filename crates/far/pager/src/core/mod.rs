//! What all threads of an active pager share, and what each of them does with it.

mod calls;
pub mod forget;
mod gate;
mod layers;
mod reports;
mod state;

pub use calls::{Mover, move_pages, until_settled};
pub use state::{Core, EXPIRY_STEP, Parts};
