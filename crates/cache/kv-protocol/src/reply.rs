//! Pieces of replies, appended to a buffer.

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
