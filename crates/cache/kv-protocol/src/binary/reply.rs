//! Replies, appended to a buffer.

use farpool_units::exactly;

/// The first byte of every reply.
const REPLY_MAGIC: u8 = 0x81;

/// What a reply repeats of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    pub opcode: u8,
    pub opaque: [u8; 4],
    /// Whether success is not told (for a read: a miss).
    pub is_quiet: bool,
}

/// Status codes of replies, by memcached's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Success = 0x00,
    KeyNotFound = 0x01,
    KeyExists = 0x02,
    TooLarge = 0x03,
    InvalidArguments = 0x04,
    NotStored = 0x05,
    NotNumeric = 0x06,
    AuthError = 0x20,
    AuthContinue = 0x21,
    UnknownCommand = 0x81,
    OutOfMemory = 0x82,
}

/// A reply that says why a request failed: its status, and a text if not the status's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    pub status: Status,
    text: &'static str,
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        let text = match status {
            Status::Success | Status::AuthContinue => "",
            Status::KeyNotFound => "Not found",
            Status::KeyExists => "Data exists for key.",
            Status::TooLarge => "Too large.",
            Status::InvalidArguments => "Invalid arguments",
            Status::NotStored => "Not stored.",
            Status::NotNumeric => "Non-numeric server-side value for incr or decr",
            Status::AuthError => "Auth failure.",
            Status::UnknownCommand => "Unknown command",
            Status::OutOfMemory => "Out of memory",
        };
        Self { status, text }
    }
}

impl Refusal {
    /// Out of memory, with memcached's text for the occasion.
    #[must_use]
    pub const fn out_of_memory(text: &'static str) -> Self {
        Self { status: Status::OutOfMemory, text }
    }
}

/// The lengths and numbers of a reply's header.
#[derive(Debug, Clone, Copy, Default)]
struct Lengths {
    extras: u8,
    key: usize,
    /// Extras, key and value.
    body: usize,
}

#[inline]
fn push_header(out: &mut Vec<u8>, head: Head, status: Status, lengths: Lengths, cas: u64) {
    let key_bytes: u16 = exactly(lengths.key);
    let body_bytes: u32 = exactly(lengths.body);
    let mut header = [0; 24];
    header[0] = REPLY_MAGIC;
    header[1] = head.opcode;
    header[2..4].copy_from_slice(&key_bytes.to_be_bytes());
    header[4] = lengths.extras;
    header[6..8].copy_from_slice(&(status as u16).to_be_bytes());
    header[8..12].copy_from_slice(&body_bytes.to_be_bytes());
    header[12..16].copy_from_slice(&head.opaque);
    header[16..24].copy_from_slice(&cas.to_be_bytes());
    out.extend_from_slice(&header);
}

/// Appends a reply of a status and a value, without extras and key.
pub fn push_value(out: &mut Vec<u8>, head: Head, status: Status, cas: u64, value: &[u8]) {
    push_header(out, head, status, Lengths { body: value.len(), ..Lengths::default() }, cas);
    out.extend_from_slice(value);
}

/// Appends the reply to a request that succeeded and has nothing to tell but a CAS number, unless
/// it is quiet.
#[inline]
pub fn push_empty(out: &mut Vec<u8>, head: Head, cas: u64) {
    if !head.is_quiet {
        push_value(out, head, Status::Success, cas, b"");
    }
}

/// Appends the reply to a request that failed; quiet requests get it as well.
pub fn push_refusal(out: &mut Vec<u8>, head: Head, refusal: impl Into<Refusal>) {
    let Refusal { status, text } = refusal.into();
    push_value(out, head, status, 0, text.as_bytes());
}

/// Appends the reply to a read that missed and returns its key.
pub(super) fn push_missing_key(out: &mut Vec<u8>, head: Head, key: &[u8]) {
    let lengths = Lengths { extras: 0, key: key.len(), body: key.len() };
    push_header(out, head, Status::KeyNotFound, lengths, 0);
    out.extend_from_slice(key);
}

/// Appends the reply to a read that hit: flags, key and value; either of the latter may be empty.
#[inline]
pub(super) fn push_item(
    out: &mut Vec<u8>,
    head: Head,
    (client_flags, cas): (u32, u64),
    key: &[u8],
    value: &[u8],
) {
    let body = size_of::<u32>() + key.len() + value.len();
    out.reserve(super::HEADER_BYTES + body);
    push_header(out, head, Status::Success, Lengths { extras: 4, key: key.len(), body }, cas);
    out.extend_from_slice(&client_flags.to_be_bytes());
    out.extend_from_slice(key);
    out.extend_from_slice(value);
}

/// Appends the replies to STAT: one for each line `STAT NAME VALUE` of the text protocol's reply,
/// then an empty one.
pub fn push_stats(out: &mut Vec<u8>, head: Head, lines: &[u8]) {
    for line in lines.split(|&byte| byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(figure) = line.strip_prefix(b"STAT ") else { continue };
        let at = figure.iter().position(|&byte| byte == b' ').unwrap_or(figure.len());
        let (name, value) = figure.split_at(at);
        push_stat(out, head, name, value.strip_prefix(b" ").unwrap_or(value));
    }
    push_empty(out, head, 0);
}

/// Appends one figure.
fn push_stat(out: &mut Vec<u8>, head: Head, name: &[u8], value: &[u8]) {
    let lengths = Lengths { extras: 0, key: name.len(), body: name.len() + value.len() };
    push_header(out, head, Status::Success, lengths, 0);
    out.extend_from_slice(name);
    out.extend_from_slice(value);
}

/// Appends the replies to STAT `detail dump`: the text protocol's reply as one figure.
pub fn push_detail(out: &mut Vec<u8>, head: Head, text: &[u8]) {
    push_stat(out, head, b"detailed", text);
    push_empty(out, head, 0);
}
