//! Pieces of replies, appended to a buffer.

/// memcached's answer to a value larger than `-I` allows.
pub const TOO_LARGE: &str = "SERVER_ERROR object too large for cache";
/// memcached's answer to a value for which it finds no memory.
pub const OUT_OF_MEMORY: &str = "SERVER_ERROR out of memory storing object";
/// memcached's answer to most lines that it does not understand.
pub const BAD_FORMAT: &str = "CLIENT_ERROR bad command line format";
/// memcached's answer to an opaque token of more than 31 characters.
pub const OPAQUE_TOO_LONG: &str = "CLIENT_ERROR opaque token too long";

/// Appends a decimal number.
#[inline]
pub fn push_number(out: &mut Vec<u8>, number: impl itoa::Integer) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

/// Appends a line with its end.
#[inline]
pub fn push_line(out: &mut Vec<u8>, line: &str) {
    out.extend_from_slice(line.as_bytes());
    out.extend_from_slice(b"\r\n");
}

/// Appends a line unless the client asked for none.
#[inline]
pub fn push_unless(out: &mut Vec<u8>, quiet: bool, line: &str) {
    if !quiet {
        push_line(out, line);
    }
}
