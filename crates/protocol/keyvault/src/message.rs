//! The bodies of frames. docs/contributors/kv-protocol.md shows them byte by byte.

mod lease;

pub use lease::{
    LEASES_RELEASED_MAX, LeaseIdList, LeaseIds, LeasedItem, LeasesGranted, MaybeLeased,
};

use farpool_units::exactly;

use crate::frame::{FRAME_BYTES_MAX, FrameError, HEADER_BYTES, Opcode};

/// The longest key, as memcached's.
pub const KEY_BYTES_MAX: usize = 250;
/// Bytes of SET beside key and value.
const SET_BYTES: usize = 24;
/// The longest value that fits a frame.
pub const VALUE_BYTES_MAX: usize = FRAME_BYTES_MAX - HEADER_BYTES - SET_BYTES - KEY_BYTES_MAX;
/// The most keys of one MULTIGET.
pub const MULTI_GET_KEYS_MAX: usize = 1024;

/// How SET treats an existing item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SetMode {
    /// Stores in any case.
    Set = 0,
    /// Stores where there is no item.
    Add = 1,
    /// Stores where there is an item.
    Replace = 2,
    /// Puts the value behind the one that is there.
    Append = 3,
    /// Puts the value before the one that is there.
    Prepend = 4,
}

impl SetMode {
    const fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Set),
            1 => Some(Self::Add),
            2 => Some(Self::Replace),
            3 => Some(Self::Append),
            4 => Some(Self::Prepend),
            _ => None,
        }
    }
}

/// A client's request for a connection, or the server's grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hello {
    /// The version of the protocol, [`crate::frame::VERSION`].
    pub version: u16,
    /// In a request: the shard to be served by, or [`crate::frame::BROADCAST`] for any. In a grant:
    /// the number of shards.
    pub shard: u16,
    /// How many requests may be unanswered at a time.
    pub credits: u32,
    /// Frames carry no checksums.
    pub unchecked: bool,
}

/// A request's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// [`Opcode::Hello`].
    Hello(Hello),
    /// [`Opcode::Noop`].
    Noop,
    /// [`Opcode::Get`].
    Get {
        /// The key of the item.
        key: &'a [u8],
    },
    /// [`Opcode::MultiGet`].
    MultiGet(Keys<'a>),
    /// [`Opcode::GetAndTouch`].
    GetAndTouch {
        /// The key of the item.
        key: &'a [u8],
        /// When it expires, as memcached has it: 0 never, up to 30 days from now, else Unix time.
        exptime: i32,
    },
    /// [`Opcode::GetLease`].
    GetLease {
        /// The key of the item.
        key: &'a [u8],
    },
    /// [`Opcode::Release`].
    Release(LeaseIds<'a>),
    /// [`Opcode::Set`].
    Set {
        /// What is done where there is an item, or none.
        mode: SetMode,
        /// The key of the item.
        key: &'a [u8],
        /// The value.
        value: &'a [u8],
        /// Flags that are kept with the item.
        client_flags: u32,
        /// When it expires, as memcached has it: 0 never, up to 30 days from now, else Unix time.
        exptime: i32,
        /// The CAS number that the item must have; 0 for any.
        cas: u64,
    },
    /// [`Opcode::Delete`].
    Delete {
        /// The key of the item.
        key: &'a [u8],
        /// The CAS number that the item must have; 0 for any.
        cas: u64,
    },
    /// [`Opcode::Touch`].
    Touch {
        /// The key of the item.
        key: &'a [u8],
        /// When it expires, as memcached has it: 0 never, up to 30 days from now, else Unix time.
        exptime: i32,
    },
    /// [`Opcode::Change`].
    Change {
        /// The key of the item.
        key: &'a [u8],
        /// By how much.
        delta: u64,
        /// Whether it is subtracted.
        subtracts: bool,
        /// What is stored where there is no item; None to store nothing.
        initial: Option<u64>,
        /// When a new item expires, as memcached has it.
        exptime: i32,
    },
    /// [`Opcode::Flush`].
    Flush {
        /// Seconds until then.
        delay_s: u32,
    },
    /// [`Opcode::Share`].
    Share {
        /// The size of the ring for requests.
        request_bytes: u32,
        /// The size of the ring for answers.
        answer_bytes: u32,
    },
    /// Values shorter than `bytes_min` are to be sent as copies.
    Leases {
        /// The shortest value that is leased.
        bytes_min: u32,
    },
}

/// The keys of a MULTIGET, already checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys<'a> {
    bytes: &'a [u8],
    count: u16,
}

impl<'a> Keys<'a> {
    /// How many keys there are.
    #[must_use]
    pub const fn count(&self) -> u16 {
        self.count
    }

    /// The keys, in the order of the request.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut rest = self.bytes;
        std::iter::from_fn(move || {
            let (&length, tail) = rest.split_first()?;
            let (key, tail) = tail.split_at_checked(length.into())?;
            rest = tail;
            Some(key)
        })
    }
}

/// Reads a body from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Option<i32> {
        self.take().map(i32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Returns the rest, as a key.
    fn key(self) -> Option<&'a [u8]> {
        is_key(self.0).then_some(self.0)
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

const fn is_key(key: &[u8]) -> bool {
    !key.is_empty() && key.len() <= KEY_BYTES_MAX
}

impl<'a> Request<'a> {
    /// Reads the body of a request with this opcode.
    #[inline]
    pub fn read(opcode: Opcode, body: &'a [u8]) -> Result<Self, FrameError> {
        Self::read_checked(opcode, Reader(body)).ok_or(FrameError::Body { opcode })
    }

    #[inline]
    fn read_checked(opcode: Opcode, mut body: Reader<'a>) -> Option<Self> {
        Some(match opcode {
            Opcode::Hello => {
                let hello = Self::Hello(read_hello(&mut body)?);
                body.end()?;
                hello
            }
            Opcode::Noop => {
                body.end()?;
                Self::Noop
            }
            Opcode::Get => Self::Get { key: body.key()? },
            Opcode::MultiGet => Self::MultiGet(read_keys(body)?),
            Opcode::GetAndTouch => Self::GetAndTouch { exptime: body.i32()?, key: body.key()? },
            Opcode::GetLease => Self::GetLease { key: body.key()? },
            Opcode::Release => Self::Release(LeaseIds::read(body)?),
            Opcode::Set => read_set(body)?,
            Opcode::Delete => Self::Delete { cas: body.u64()?, key: body.key()? },
            Opcode::Touch => Self::Touch { exptime: body.i32()?, key: body.key()? },
            Opcode::Change => {
                let (delta, initial, exptime, flags) =
                    (body.u64()?, body.u64()?, body.i32()?, body.u32()?);
                if flags > 3 {
                    return None;
                }
                let initial = (flags & 2 != 0).then_some(initial);
                Self::Change {
                    delta,
                    initial,
                    exptime,
                    subtracts: flags & 1 != 0,
                    key: body.key()?,
                }
            }
            Opcode::Flush => {
                let delay_s = body.u32()?;
                body.end()?;
                Self::Flush { delay_s }
            }
            Opcode::Share => {
                let (request_bytes, answer_bytes) = (body.u32()?, body.u32()?);
                body.end()?;
                Self::Share { request_bytes, answer_bytes }
            }
            Opcode::Leases => {
                let (bytes_min, zero) = (body.u32()?, body.u32()?);
                body.end()?;
                if zero != 0 {
                    return None;
                }
                Self::Leases { bytes_min }
            }
        })
    }

    /// Returns the request's opcode.
    #[must_use]
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Hello(_) => Opcode::Hello,
            Self::Noop => Opcode::Noop,
            Self::Get { .. } => Opcode::Get,
            Self::MultiGet(_) => Opcode::MultiGet,
            Self::GetAndTouch { .. } => Opcode::GetAndTouch,
            Self::Set { .. } => Opcode::Set,
            Self::Delete { .. } => Opcode::Delete,
            Self::Touch { .. } => Opcode::Touch,
            Self::Change { .. } => Opcode::Change,
            Self::Flush { .. } => Opcode::Flush,
            Self::Share { .. } => Opcode::Share,
            Self::Leases { .. } => Opcode::Leases,
            Self::GetLease { .. } => Opcode::GetLease,
            Self::Release(_) => Opcode::Release,
        }
    }

    /// Returns the key that selects the shard.
    #[must_use]
    pub fn key(&self) -> Option<&'a [u8]> {
        match *self {
            Self::Get { key }
            | Self::GetAndTouch { key, .. }
            | Self::GetLease { key }
            | Self::Set { key, .. }
            | Self::Delete { key, .. }
            | Self::Touch { key, .. }
            | Self::Change { key, .. } => Some(key),
            Self::MultiGet(keys) => keys.iter().next(),
            Self::Hello(_)
            | Self::Noop
            | Self::Flush { .. }
            | Self::Release(_)
            | Self::Share { .. }
            | Self::Leases { .. } => None,
        }
    }

    /// Returns the one key of a frame, if its body is valid so far: lets the caller prefetch its
    /// item before the whole frame is checked.
    #[inline]
    #[must_use]
    pub fn key_ahead(frame: &'a [u8]) -> Option<&'a [u8]> {
        let (_, body) = frame.split_at_checked(HEADER_BYTES)?;
        let key = match Opcode::from_code(frame[3])? {
            Opcode::Get | Opcode::GetLease => body,
            Opcode::GetAndTouch | Opcode::Touch => body.get(4..)?,
            Opcode::Delete => body.get(8..)?,
            Opcode::Change => body.get(24..)?,
            Opcode::Set => body.get(SET_BYTES..)?.get(..usize::from(body[1]))?,
            Opcode::MultiGet
            | Opcode::Hello
            | Opcode::Noop
            | Opcode::Release
            | Opcode::Flush
            | Opcode::Share
            | Opcode::Leases => return None,
        };
        is_key(key).then_some(key)
    }

    /// Appends the body.
    pub fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Hello(hello) => write_hello(hello, out),
            Self::Noop => {}
            Self::Get { key } | Self::GetLease { key } => out.extend_from_slice(key),
            Self::Release(ids) => ids.write(out),
            Self::MultiGet(keys) => {
                out.extend_from_slice(&keys.count.to_le_bytes());
                out.extend_from_slice(keys.bytes);
            }
            Self::GetAndTouch { key, exptime } | Self::Touch { key, exptime } => {
                out.extend_from_slice(&exptime.to_le_bytes());
                out.extend_from_slice(key);
            }
            Self::Set { mode, key, value, client_flags, exptime, cas } => {
                let key_bytes = u8::try_from(key.len()).expect("keys are at most 250 bytes");
                out.extend_from_slice(&[mode as u8, key_bytes, 0, 0]);
                out.extend_from_slice(&client_flags.to_le_bytes());
                out.extend_from_slice(&exptime.to_le_bytes());
                out.extend_from_slice(&[0; 4]);
                out.extend_from_slice(&cas.to_le_bytes());
                out.extend_from_slice(key);
                out.extend_from_slice(value);
            }
            Self::Delete { key, cas } => {
                out.extend_from_slice(&cas.to_le_bytes());
                out.extend_from_slice(key);
            }
            Self::Change { key, delta, subtracts, initial, exptime } => {
                let flags = u32::from(subtracts) | u32::from(initial.is_some()) << 1;
                out.extend_from_slice(&delta.to_le_bytes());
                out.extend_from_slice(&initial.unwrap_or(0).to_le_bytes());
                out.extend_from_slice(&exptime.to_le_bytes());
                out.extend_from_slice(&flags.to_le_bytes());
                out.extend_from_slice(key);
            }
            Self::Flush { delay_s } => out.extend_from_slice(&delay_s.to_le_bytes()),
            Self::Share { request_bytes, answer_bytes } => {
                out.extend_from_slice(&request_bytes.to_le_bytes());
                out.extend_from_slice(&answer_bytes.to_le_bytes());
            }
            Self::Leases { bytes_min } => {
                out.extend_from_slice(&bytes_min.to_le_bytes());
                out.extend_from_slice(&[0; 4]);
            }
        }
    }
}

fn read_hello(body: &mut Reader<'_>) -> Option<Hello> {
    let (version, shard, credits, flags) = (body.u16()?, body.u16()?, body.u32()?, body.u32()?);
    (flags <= 1).then_some(Hello { version, shard, credits, unchecked: flags == 1 })
}

fn write_hello(hello: Hello, out: &mut Vec<u8>) {
    out.extend_from_slice(&hello.version.to_le_bytes());
    out.extend_from_slice(&hello.shard.to_le_bytes());
    out.extend_from_slice(&hello.credits.to_le_bytes());
    out.extend_from_slice(&u32::from(hello.unchecked).to_le_bytes());
}

fn read_set<'a>(mut body: Reader<'a>) -> Option<Request<'a>> {
    let [mode, key_bytes, _, _] = body.take()?;
    let (client_flags, exptime, _, cas) = (body.u32()?, body.i32()?, body.u32()?, body.u64()?);
    let (key, value) = body.0.split_at_checked(key_bytes.into())?;
    let mode = SetMode::from_code(mode)?;
    is_key(key).then_some(Request::Set { mode, key, value, client_flags, exptime, cas })
}

fn read_keys<'a>(mut body: Reader<'a>) -> Option<Keys<'a>> {
    let count = body.u16()?;
    let bytes = body.0;
    let mut seen = 0;
    while let Some(length) = body.u8() {
        let (key, rest) = body.0.split_at_checked(length.into())?;
        body.0 = rest;
        seen += 1;
        if !is_key(key) || seen > MULTI_GET_KEYS_MAX {
            return None;
        }
    }
    (seen == usize::from(count) && seen > 0).then_some(Keys { bytes, count })
}

/// Collects the keys of a MULTIGET.
#[derive(Debug, Default, Clone)]
pub struct KeyList {
    bytes: Vec<u8>,
    count: u16,
}

impl KeyList {
    /// Adds a key. False if it is not valid, or there are too many already.
    pub fn push(&mut self, key: &[u8]) -> bool {
        let Ok(length) = u8::try_from(key.len()) else { return false };
        if !is_key(key) || usize::from(self.count) == MULTI_GET_KEYS_MAX {
            return false;
        }
        self.bytes.push(length);
        self.bytes.extend_from_slice(key);
        self.count += 1;
        true
    }

    /// The keys, for a request.
    #[must_use]
    pub fn keys(&self) -> Keys<'_> {
        Keys { bytes: &self.bytes, count: self.count }
    }

    /// Takes all keys out.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.count = 0;
    }
}

/// An item in an answer to GET.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item<'a> {
    /// The flags that the item was stored with.
    pub client_flags: u32,
    /// The CAS number of the item.
    pub cas: u64,
    /// The value.
    pub value: &'a [u8],
}

impl<'a> Item<'a> {
    /// Returns the first of the two pieces of an answer to GET: the fields before the value.
    #[inline]
    #[must_use]
    pub fn head(&self) -> [u8; ITEM_HEAD_BYTES] {
        (u128::from(self.client_flags) | u128::from(self.cas) << 64).to_le_bytes()
    }

    /// Appends the answer to GET.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head());
        out.extend_from_slice(self.value);
    }

    /// Reads the answer to GET.
    pub fn read(body: &'a [u8]) -> Option<Self> {
        let mut body = Reader(body);
        let (client_flags, _, cas) = (body.u32()?, body.u32()?, body.u64()?);
        Some(Self { client_flags, cas, value: body.0 })
    }

    /// Appends one found item to an answer to MULTIGET.
    pub fn write_found(&self, index: u16, out: &mut Vec<u8>) {
        out.extend_from_slice(&index.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.client_flags.to_le_bytes());
        out.extend_from_slice(&exactly::<u32, _>(self.value.len()).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.cas.to_le_bytes());
        out.extend_from_slice(self.value);
    }
}

/// Bytes before the value in an answer to GET.
pub const ITEM_HEAD_BYTES: usize = 16;
/// Bytes of a found item in an answer to MULTIGET, without its value.
pub const FOUND_BYTES: usize = 24;

/// Reads an answer to MULTIGET. Returns how many keys were looked up (the others must be asked for
/// again), and the items.
#[must_use]
pub fn read_found(body: &[u8]) -> Option<(u16, Vec<(u16, Item<'_>)>)> {
    let mut body = Reader(body);
    let (looked_at, _) = (body.u16()?, body.u16()?);
    body.u32()?;
    let mut found = Vec::new();
    while !body.0.is_empty() {
        let (index, _, client_flags) = (body.u16()?, body.u16()?, body.u32()?);
        let (value_bytes, _, cas) = (body.u32()?, body.u32()?, body.u64()?);
        let (value, rest) = body.0.split_at_checked(value_bytes as usize)?;
        body.0 = rest;
        found.push((index, Item { client_flags, cas, value }));
    }
    Some((looked_at, found))
}

/// Begins an answer to MULTIGET. Returns where `looked_at` is written once it is known.
pub fn begin_found(out: &mut Vec<u8>) -> usize {
    out.extend_from_slice(&[0; 8]);
    out.len() - 8
}

/// Writes how many keys were looked up.
pub fn finish_found(out: &mut [u8], at: usize, looked_at: u16) {
    out[at..at + 2].copy_from_slice(&looked_at.to_le_bytes());
}

impl Hello {
    /// Reads the server's answer to HELLO.
    #[must_use]
    pub fn read(body: &[u8]) -> Option<Self> {
        let mut body = Reader(body);
        let hello = read_hello(&mut body)?;
        body.end()?;
        Some(hello)
    }

    /// Appends the server's answer to HELLO.
    pub fn write(self, out: &mut Vec<u8>) {
        write_hello(self, out);
    }
}

/// Reads the numbers in an answer: the CAS number after SET, number and CAS number after CHANGE.
#[must_use]
pub fn read_numbers(body: &[u8]) -> Option<(u64, u64)> {
    let mut body = Reader(body);
    let first = body.u64()?;
    Some((first, body.u64().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::{Header, push};

    fn key() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 1..=KEY_BYTES_MAX)
    }

    fn round_trip(request: &Request<'_>) {
        let mut body = Vec::new();
        request.write(&mut body);
        assert_eq!(Request::read(request.opcode(), &body).as_ref(), Ok(request));
    }

    proptest! {
        #[test]
        fn bodies_come_back(
            key in key(), value in prop::collection::vec(any::<u8>(), 0..300), client_flags: u32, exptime: i32, cas: u64,
            delta: u64, subtracts: bool, initial: Option<u64>, mode in 0u8..5, unchecked: bool, shard: u16,
        ) {
            let mode = SetMode::from_code(mode).unwrap();
            let (key, value) = (&key[..], &value[..]);
            round_trip(&Request::Hello(Hello { version: 1, shard, credits: client_flags, unchecked }));
            round_trip(&Request::Noop);
            round_trip(&Request::Get { key });
            round_trip(&Request::GetAndTouch { key, exptime });
            round_trip(&Request::Set { mode, key, value, client_flags, exptime, cas });
            round_trip(&Request::Delete { key, cas });
            round_trip(&Request::Touch { key, exptime });
            round_trip(&Request::Change { key, delta, subtracts, initial, exptime });
            round_trip(&Request::Flush { delay_s: client_flags });
            round_trip(&Request::Share { request_bytes: client_flags, answer_bytes: 7 });
            round_trip(&Request::Leases { bytes_min: client_flags });
            round_trip(&Request::GetLease { key });
            let item = Item { client_flags, cas, value };
            let mut body = Vec::new();
            item.write(&mut body);
            prop_assert_eq!(Item::read(&body), Some(item));
            prop_assert_eq!(MaybeLeased::read(&body), Some(MaybeLeased::Copy(item)));
        }

        #[test]
        fn many_keys_come_back(keys in prop::collection::vec(key(), 1..40), value in prop::collection::vec(any::<u8>(), 0..50)) {
            let mut list = KeyList::default();
            keys.iter().for_each(|key| assert!(list.push(key)));
            let mut body = Vec::new();
            Request::MultiGet(list.keys()).write(&mut body);
            let Ok(Request::MultiGet(read)) = Request::read(Opcode::MultiGet, &body) else { panic!("not read") };
            prop_assert_eq!(read.iter().collect::<Vec<_>>(), keys.iter().map(|key| &key[..]).collect::<Vec<_>>());
            let mut answer = Vec::new();
            let at = begin_found(&mut answer);
            let item = Item { client_flags: 1, cas: 2, value: &value };
            (0..5).for_each(|index| item.write_found(index, &mut answer));
            finish_found(&mut answer, at, 9);
            let (looked_at, found) = read_found(&answer).unwrap();
            prop_assert_eq!((looked_at, found.len()), (9, 5));
            prop_assert!(found.iter().enumerate().all(|(at, (index, it))| at == usize::from(*index) && *it == item));
        }

        #[test]
        fn any_bytes_are_read_without_harm(opcode in 0..Opcode::ALL.len(), body in prop::collection::vec(any::<u8>(), 0..80)) {
            let opcode = Opcode::ALL[opcode];
            let mut frame = Vec::new();
            let header = Header { length: 0, opcode, status: None, shard: 0, connection: 0, request: 1 };
            push(&mut frame, header, [&body, b""], false);
            let ahead = Request::key_ahead(&frame);
            if let Ok(request) = Request::read(opcode, &body) {
                let key = if matches!(request, Request::MultiGet(_)) { None } else { request.key() };
                prop_assert_eq!(ahead, key, "what is loaded ahead is what is asked for");
                let mut again = Vec::new();
                request.write(&mut again);
                prop_assert_eq!(again.len(), body.len());
            }
            let _ = (read_found(&body), MaybeLeased::read(&body), LeasesGranted::read(&body));
        }
    }
}
