//! Flash below the blade's memory: what was not used for a while is there, page by page, and comes
//! back when it is asked for (Lim 8.2). Clients notice nothing but time.
//!
//! A superpage has a fixed place on flash and pages in memory as they are needed, so what a blade
//! lends is what flash holds, and memory keeps what is hot of it. The life of a cold page: written
//! by a client to memory ([`tier::write`]); passed by the sweep twice without being used
//! ([`residence`]); sealed and written to flash, 1 MiB of neighbours at once, and its memory given
//! back ([`engine`]); read, opened and put in its place when a client asks for it ([`tier::read`],
//! [`fetch`]), whose connection waits meanwhile, but not its thread.

mod buffers;
mod counters;
mod engine;
mod fetch;
mod file;
mod residence;
#[cfg(test)]
mod residence_tests;
mod tier;

pub use counters::FlashStat;
pub(crate) use engine::Engine;
pub(super) use fetch::Fetcher;
pub(super) use tier::{Tier, TieredSuperpage, read, write};

use super::room::Room;
use crate::config::FlashConfig;
use farpool_policy::RateLimit;
use std::io;
use std::sync::Arc;

/// Opens flash for `superpages`, of which `memory_bytes` may be in memory. Nothing moves before the
/// engine runs.
///
/// # Errors
/// There is too little memory, or the flash is of no use; see [`file::open`].
pub(super) fn open(
    config: &FlashConfig,
    superpages: u32,
    memory_bytes: u64,
) -> io::Result<(Arc<Tier>, Engine)> {
    let room = Room::new(memory_bytes)?;
    let flash = file::open(config, superpages)?;
    let ring = flash.ring()?;
    let tier = Arc::new(Tier::new(flash, room, superpages)?);
    let limit = config.write_bytes_per_s.map_or(RateLimit::UNLIMITED, RateLimit::paced);
    Ok((Arc::clone(&tier), Engine::new(tier, ring, limit)))
}

/// What one of the blade's threads reads from flash with.
///
/// # Errors
/// The system's: too little memory, or too few descriptors.
pub(super) fn fetcher(tier: &Arc<Tier>, thread: usize) -> io::Result<Fetcher> {
    Fetcher::new(Arc::clone(tier), thread)
}
