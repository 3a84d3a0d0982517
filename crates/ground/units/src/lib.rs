//! Sizes, their text, conversions of numbers, and text fit for a terminal, for every other crate.
//!
//! Nothing here does I/O, allocates beyond the text it returns, or depends on another crate.

mod cast;
mod plain;
mod size;
mod time;

pub use cast::{Number, at_most, exactly};
pub use plain::{is_unprintable, plain, plain_lines};
pub use size::{about_bytes, format_bytes, parse_bytes, three_digits};
pub use time::utc_text;

/// Bytes of a page. All of Farpool is built for 4 KiB pages.
pub const PAGE_BYTES: usize = 4096;
/// [`PAGE_BYTES`] for addresses and totals, which are 64 bits wide on every machine.
pub const PAGE_BYTES_U64: u64 = PAGE_BYTES as u64;
/// Bytes of a superpage: the unit in which a blade lends memory (Lim's 16 MiB).
pub const SUPERPAGE_BYTES: u64 = 16 * MIB;
/// Pages per superpage.
pub const PAGES_PER_SUPERPAGE: u32 = 4096;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

const _: () = assert!(SUPERPAGE_BYTES == PAGES_PER_SUPERPAGE as u64 * PAGE_BYTES_U64);
