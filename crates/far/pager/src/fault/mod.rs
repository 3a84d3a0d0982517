//! A fault thread: reads page faults and answers them.
//!
//! The life of a fault, in order (each stage is one function):
//! 1. `run_first`, `follow` (in `serve`): the message is read from userfaultfd, if possible on the
//!    CPU where the fault happened (see [`crate::shared::crew`]);
//! 2. `serve`: the page's phase decides between zero pages, the victim buffer, and a fetch;
//! 3. `fetch`: the page and the prefetcher's candidates are claimed, given frames, and requested at
//!    once;
//! 4. `land` (in `landing`): frames that have arrived are moved into the program, which wakes the
//!    faulting thread;
//! 5. `take`, at its end: a kick for the evictor when the reserve is low.
//!
//! Invariants: nothing here allocates after start, takes the registry's lock, or waits without
//! bound on the evictor. When no frame becomes free in time, memory goes over the limit by a page,
//! which is counted: a program that waits for ever would be worse.

mod fetch;
mod first_touch;
mod landing;
mod room;
mod serve;
mod take_back;
mod thread;
mod waiting;

pub use thread::FaultThread;
