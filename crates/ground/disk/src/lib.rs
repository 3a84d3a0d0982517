//! Whole pages of a file or block device, read and written past the page cache, many at a time.
//!
//! What is in the pages, and where it lies, is for the caller to say: the cache's zones of items
//! and the blade's cold superpages are on the same kind of device.

mod open;
mod pages;
mod ring;

pub use open::{open_direct, open_exclusive, take_room};
pub use pages::Pages;
pub use ring::{Ended, Ring};
