//! memcached's binary protocol: bytes to requests (`scan`), requests to replies (`execute`,
//! `reply`). No I/O, no clock. Status codes and texts are those of memcached 1.6.
//!
//! A request is a header of 24 bytes, then extras, key and value; numbers are big-endian. A reply
//! repeats the request's opcode and opaque number. Quiet requests are answered only if they have
//! something to tell: a read that hits, anything else that fails.

mod execute;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use execute::{execute, push_record};
pub use reply::{
    Head, Refusal, Status, push_detail, push_empty, push_refusal, push_stats, push_value,
};
pub use request::{
    HEADER_BYTES, KeyRequest, MAGIC, Read, Request, Rules, SaslStep, Scan, ServerRequest, Store,
    scan,
};
