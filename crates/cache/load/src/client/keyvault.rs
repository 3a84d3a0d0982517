//! KeyVault on one connection: frames out, answers in any order. docs/contributors/kv-protocol.md
//! describes the protocol.
//!
//! A connection belongs to one shard and requests single keys of that shard, as clients do that
//! know the shards. A read of several keys is one MULTIGET for each shard that owns some of them;
//! it counts as answered when all answers have arrived, and keys that an answer left out are
//! requested again. Requests beyond the credits wait here.

use std::collections::VecDeque;
use std::io::{Read, Write};

use farpool_keyvault::frame::{BROADCAST, HEADER_BYTES, Header, Status, VERSION};
use farpool_keyvault::frame::{begin, finish, frame_length};
use farpool_keyvault::message::{Hello, Item, KeyList, Request, SetMode, read_found};
use farpool_keyvault::owner::{hash_key, shard_of};

use farpool_units::{at_most, exactly};
use smallvec::{SmallVec, smallvec};

use super::asked::{Asked, LoadError};
use super::reply::{Said, Wrong, miss};
use super::request::Expected;
use super::value::{self, push_key, push_value};
use crate::workload::{KeyNumber, Operation, Workload};

/// The most unanswered requests on one connection; the server may grant fewer.
const CREDITS: u32 = 1024;

/// A request under way.
#[derive(Debug)]
struct Open {
    asked: Asked,
    keys: SmallVec<[KeyNumber; 1]>,
    frames_left: usize,
    said: Said,
}

/// One frame under way: its request, and the positions of its keys in the request.
#[derive(Debug)]
struct Frame {
    /// The number of its request on this connection.
    request: u64,
    positions: SmallVec<[u16; 1]>,
}

/// The KeyVault state of a connection.
#[derive(Debug)]
pub(super) struct KeyVault {
    connection: u16,
    checked: bool,
    shards: usize,
    /// The shard that it is connected to.
    shard: u16,
    credits: usize,
    open: VecDeque<Option<Open>>,
    /// The number of the first request in `open`.
    first_open: u64,
    frames: VecDeque<Option<Frame>>,
    /// The number on the wire of the first frame in `frames`.
    first_frame: u32,
    frames_under_way: usize,
    requests_under_way: usize,
    /// Requests that wait for credits.
    held: VecDeque<(Asked, SmallVec<[KeyNumber; 1]>)>,
    /// Keys that answers left out and that are to be requested again: the request, and their
    /// positions in it.
    left_out: Vec<(u64, SmallVec<[u16; 1]>)>,
    /// The key being written.
    name: Vec<u8>,
    /// Its value.
    value: Vec<u8>,
}

impl KeyVault {
    /// Connects to the shard for the connection with this number. The first greeting tells how many
    /// shards there are.
    pub(super) fn connect<S: Read + Write>(
        connect: impl Fn() -> Result<S, LoadError>,
        number: usize,
        checked: bool,
    ) -> Result<(S, Self), LoadError> {
        let mut socket = connect()?;
        let mut keyvault = Self::greet(&mut socket, BROADCAST, checked)?;
        if keyvault.shards > 1 {
            socket = connect()?;
            let shard = exactly(number % keyvault.shards);
            keyvault = Self::greet(&mut socket, shard, checked)?;
        }
        Ok((socket, keyvault))
    }

    /// Sends the greeting and waits for the answer, which tells how many shards there are. Frames
    /// carry checksums if `checked`.
    fn greet(
        socket: &mut (impl Read + Write),
        shard: u16,
        checked: bool,
    ) -> Result<Self, LoadError> {
        let hello = Hello { version: VERSION, shard, credits: CREDITS, unchecked: !checked };
        let mut out = Vec::new();
        push_frame(&mut out, (0, BROADCAST, 0), &Request::Hello(hello), true);
        let failed = |error: std::io::Error| LoadError::Greeting(error.to_string());
        socket.write_all(&out).map_err(failed)?;
        let mut answer = vec![0; HEADER_BYTES];
        socket.read_exact(&mut answer).map_err(failed)?;
        let length = frame_length(&answer).and_then(Result::ok).unwrap_or(HEADER_BYTES);
        answer.resize(length, 0);
        socket.read_exact(&mut answer[HEADER_BYTES..]).map_err(failed)?;
        let header =
            Header::read(&answer, true).map_err(|error| LoadError::Greeting(error.to_string()))?;
        let granted =
            Hello::read(&answer[HEADER_BYTES..]).filter(|_| header.status == Some(Status::Ok));
        let granted = granted.ok_or_else(|| LoadError::Greeting(format!("{:?}", header.status)))?;
        if granted.shard > BROADCAST {
            // Frames have no numbers for this many shards.
            return Err(LoadError::Greeting(format!("{} shards", granted.shard)));
        }
        Ok(Self::idle(header.connection, shard, &granted))
    }

    /// A connection to a shard that has nothing under way, as the server's greeting grants it.
    fn idle(connection: u16, shard: u16, granted: &Hello) -> Self {
        Self {
            connection,
            checked: !granted.unchecked,
            shards: usize::from(granted.shard.max(1)),
            shard,
            credits: granted.credits as usize,
            open: VecDeque::new(),
            first_open: 0,
            frames: VecDeque::new(),
            first_frame: 1,
            frames_under_way: 0,
            requests_under_way: 0,
            held: VecDeque::new(),
            left_out: Vec::new(),
            name: Vec::new(),
            value: Vec::new(),
        }
    }

    /// Whether a key belongs to the shard of this connection.
    pub(super) fn owns(&mut self, workload: &Workload, key: KeyNumber) -> bool {
        if self.shards == 1 {
            return true;
        }
        self.name.clear();
        push_key(&mut self.name, key, workload.key_bytes(key));
        shard_of(hash_key(&self.name), self.shards) == usize::from(self.shard)
    }

    pub(super) fn under_way(&self) -> usize {
        self.requests_under_way + self.held.len()
    }

    /// Adds a request to the output, or keeps it until there are credits for it.
    pub(super) fn ask(
        &mut self,
        workload: &Workload,
        asked: Asked,
        keys: &[KeyNumber],
        out: &mut Vec<u8>,
    ) {
        if self.held.is_empty() && self.has_credits() {
            self.push(workload, asked, SmallVec::from_slice(keys), out);
        } else {
            self.held.push_back((asked, SmallVec::from_slice(keys)));
        }
    }

    /// A request takes at most one credit for each shard.
    fn has_credits(&self) -> bool {
        self.frames_under_way == 0 || self.frames_under_way + self.shards <= self.credits
    }

    fn push(
        &mut self,
        workload: &Workload,
        asked: Asked,
        keys: SmallVec<[KeyNumber; 1]>,
        out: &mut Vec<u8>,
    ) {
        let request = self.first_open + self.open.len() as u64;
        let frames_before = self.frames_under_way;
        if keys.len() > 1 {
            self.push_multi_get(workload, request, &keys, out);
        } else if let Some(&key) = keys.first() {
            self.push_one(workload, request, (asked.expected.operation, key), out);
        }
        let frames_left = self.frames_under_way - frames_before;
        self.open.push_back(Some(Open { asked, keys, frames_left, said: Said::default() }));
        self.requests_under_way += 1;
    }

    fn push_one(
        &mut self,
        workload: &Workload,
        request: u64,
        (operation, key): (Operation, KeyNumber),
        out: &mut Vec<u8>,
    ) {
        let (mut name, mut value) =
            (std::mem::take(&mut self.name), std::mem::take(&mut self.value));
        name.clear();
        push_key(&mut name, key, workload.key_bytes(key));
        let body = match operation {
            Operation::Get => Request::Get { key: &name },
            Operation::Delete => Request::Delete { key: &name, cas: 0 },
            Operation::Set => {
                value.clear();
                push_value(&mut value, key, workload.value_bytes(key));
                let exptime = at_most(workload.lifetime_s(key));
                let mode = SetMode::Set;
                Request::Set { mode, key: &name, value: &value, client_flags: 0, exptime, cas: 0 }
            }
        };
        let shard = if self.shards == 1 { 0 } else { shard_of(hash_key(&name), self.shards) };
        self.push_request(shard, &body, (request, smallvec![0]), out);
        (self.name, self.value) = (name, value);
    }

    fn push_multi_get(
        &mut self,
        workload: &Workload,
        request: u64,
        keys: &[KeyNumber],
        out: &mut Vec<u8>,
    ) {
        let mut lists = vec![(KeyList::default(), SmallVec::new()); self.shards];
        let mut name = Vec::with_capacity(250);
        for (position, &key) in (0u16..).zip(keys) {
            name.clear();
            push_key(&mut name, key, workload.key_bytes(key));
            let (list, positions) = &mut lists[shard_of(hash_key(&name), self.shards)];
            // Keys are complete, and fewer than a MULTIGET's limit.
            list.push(&name);
            positions.push(position);
        }
        for (shard, (list, positions)) in lists.into_iter().enumerate() {
            if !positions.is_empty() {
                let body = Request::MultiGet(list.keys());
                self.push_request(shard, &body, (request, positions), out);
            }
        }
    }

    /// Requests the keys that an answer left out; all belong to one shard.
    fn push_rest(
        &mut self,
        workload: &Workload,
        request: u64,
        positions: SmallVec<[u16; 1]>,
        out: &mut Vec<u8>,
    ) {
        assert!(request >= self.first_open, "a request that is asked for again is open");
        let place: usize = exactly(request - self.first_open);
        let Some(Some(open)) = self.open.get(place) else { return };
        let (mut list, mut name) = (KeyList::default(), Vec::with_capacity(250));
        for key in positions.iter().filter_map(|&at| open.keys.get(usize::from(at)).copied()) {
            name.clear();
            push_key(&mut name, key, workload.key_bytes(key));
            list.push(&name);
        }
        let shard = shard_of(hash_key(&name), self.shards);
        self.push_request(shard, &Request::MultiGet(list.keys()), (request, positions), out);
    }

    fn push_request(
        &mut self,
        shard: usize,
        body: &Request<'_>,
        (request, positions): (u64, SmallVec<[u16; 1]>),
        out: &mut Vec<u8>,
    ) {
        let number = self.first_frame.wrapping_add(exactly(self.frames.len()));
        push_frame(out, (self.connection, exactly(shard), number), body, self.checked);
        self.frames.push_back(Some(Frame { request, positions }));
        self.frames_under_way += 1;
    }

    /// Takes every complete answer at the start of `input`, and hands requests that are fully
    /// answered to `take`. Returns the bytes consumed. Requests that waited for credits are added
    /// to `out`.
    pub(super) fn receive(
        &mut self,
        workload: &Workload,
        input: &[u8],
        out: &mut Vec<u8>,
        mut take: impl FnMut(Asked, Said, &[KeyNumber]),
    ) -> Result<usize, LoadError> {
        let mut at = 0;
        while let Some(length) = frame_length(&input[at..]) {
            let Some(frame) = input.get(at..at + length?) else { break };
            let header = Header::read(frame, self.checked)?;
            self.take_answer(workload, &header, &frame[HEADER_BYTES..], &mut take)?;
            at += frame.len();
        }
        // The answers have freed the credits for these.
        for (request, positions) in std::mem::take(&mut self.left_out) {
            self.push_rest(workload, request, positions, out);
        }
        while self.has_credits()
            && let Some((asked, keys)) = self.held.pop_front()
        {
            self.push(workload, asked, keys, out);
        }
        Ok(at)
    }

    fn take_answer(
        &mut self,
        workload: &Workload,
        header: &Header,
        body: &[u8],
        take: &mut impl FnMut(Asked, Said, &[KeyNumber]),
    ) -> Result<(), LoadError> {
        let at = header.request.wrapping_sub(self.first_frame) as usize;
        let frame = self.frames.get_mut(at).and_then(Option::take);
        let frame = frame.ok_or(LoadError::Unasked(header.request))?;
        assert!(self.frames_under_way > 0, "a frame that is answered was under way");
        self.frames_under_way -= 1;
        while matches!(self.frames.front(), Some(None)) {
            self.frames.pop_front();
            self.first_frame = self.first_frame.wrapping_add(1);
        }
        assert!(frame.request >= self.first_open, "a request is open while a frame of it is");
        let place: usize = exactly(frame.request - self.first_open);
        let unasked = || LoadError::Unasked(header.request);
        let Some(slot) = self.open.get_mut(place) else { return Err(unasked()) };
        let Some(open) = slot else { return Err(unasked()) };
        let looked_at = judge(workload, header, body, &frame.positions, open)?;
        if looked_at < frame.positions.len() {
            self.left_out.push((frame.request, frame.positions[looked_at..].into()));
            return Ok(());
        }
        assert!(open.frames_left > 0, "a request waits for each of its frames once");
        open.frames_left -= 1;
        if open.frames_left == 0 {
            take(open.asked, open.said, &open.keys);
            *slot = None;
            self.requests_under_way -= 1;
        }
        while matches!(self.open.front(), Some(None)) {
            self.open.pop_front();
            self.first_open += 1;
        }
        Ok(())
    }
}

fn push_frame(
    out: &mut Vec<u8>,
    (connection, shard, number): (u16, u16, u32),
    body: &Request<'_>,
    checked: bool,
) {
    let opcode = body.opcode();
    let header = Header { length: 0, opcode, status: None, shard, connection, request: number };
    let start = begin(out, header);
    body.write(out);
    finish(out, start, checked);
}

/// Checks an answer and notes its hits and misses. Returns how many keys it covers. A wrong value
/// ends the run.
fn judge(
    workload: &Workload,
    header: &Header,
    body: &[u8],
    positions: &[u16],
    open: &mut Open,
) -> Result<usize, Wrong> {
    let Expected { operation, .. } = open.asked.expected;
    let key_at = |index: usize| {
        let position = positions.get(index).copied().map(usize::from)?;
        Some((position, *open.keys.get(position)?))
    };
    let wrong = || {
        let line = format!("{:?} with {} bytes", header.status, body.len());
        let key = key_at(0).map_or_else(String::new, |(_, key)| name(workload, key));
        Wrong::Line { operation, key, line }
    };
    let said = &mut open.said;
    match (operation, header.status) {
        (Operation::Get, Some(Status::Ok)) if positions.len() > 1 || open.keys.len() > 1 => {
            let (looked_at, found) = read_found(body).ok_or_else(wrong)?;
            let looked_at = usize::from(looked_at);
            // An answer that covers no key would be requested again for ever.
            if looked_at == 0 || looked_at > positions.len() {
                return Err(wrong());
            }
            let mut next = 0;
            for (index, item) in found {
                let index = usize::from(index);
                let is_next = index >= next && index < looked_at;
                let (_, key) = key_at(index).filter(|_| is_next).ok_or_else(wrong)?;
                check(workload, key, &item)?;
                (next..index).filter_map(key_at).for_each(|(position, _)| miss(said, position));
                said.hits += 1;
                next = index + 1;
            }
            (next..looked_at).filter_map(key_at).for_each(|(position, _)| miss(said, position));
            return Ok(looked_at);
        }
        (Operation::Get, Some(Status::Ok)) => {
            let (_, key) = key_at(0).ok_or_else(wrong)?;
            check(workload, key, &Item::read(body).ok_or_else(wrong)?)?;
            said.hits += 1;
        }
        (Operation::Get, Some(Status::NotFound)) => miss(said, 0),
        (Operation::Set | Operation::Delete, Some(Status::Ok)) => said.hits += 1,
        (Operation::Delete, Some(Status::NotFound)) => said.misses += 1,
        (_, Some(Status::NotStored | Status::TooLarge | Status::OutOfMemory)) => said.refused += 1,
        _ => return Err(wrong()),
    }
    Ok(positions.len())
}

fn check(workload: &Workload, key: KeyNumber, item: &Item<'_>) -> Result<(), Wrong> {
    let expected = workload.value_bytes(key);
    if item.client_flags != 0 {
        let flags = item.client_flags.to_string();
        return Err(Wrong::Flags { key: name(workload, key), flags });
    }
    if !value::is_right(item.value, key, expected) {
        return Err(Wrong::Value { key: name(workload, key), expected, found: item.value.len() });
    }
    Ok(())
}

fn name(workload: &Workload, key: KeyNumber) -> String {
    let mut name = Vec::new();
    push_key(&mut name, key, workload.key_bytes(key));
    String::from_utf8_lossy(&name).into_owned()
}

#[cfg(test)]
mod tests {
    use farpool_keyvault::message::{Keys, begin_found, finish_found};

    use super::*;

    const KEYS: [KeyNumber; 5] =
        [KeyNumber(1), KeyNumber(2), KeyNumber(3), KeyNumber(4), KeyNumber(5)];

    fn keyvault() -> KeyVault {
        let granted = Hello { version: VERSION, shard: 1, credits: 1, unchecked: false };
        KeyVault::idle(1, BROADCAST, &granted)
    }

    /// A server's answer to the MULTIGET in `out` that covers `looked_at` keys and finds all but
    /// key 4.
    fn answer(
        workload: &Workload,
        out: &mut Vec<u8>,
        looked_at: u16,
        wanted: &[KeyNumber],
    ) -> Vec<u8> {
        let header = Header::read(out, true).unwrap();
        let body = out.split_off(HEADER_BYTES);
        let Ok(Request::MultiGet(keys)) = Request::read(header.opcode, &body) else {
            panic!("{header:?}");
        };
        let names = |keys: Keys<'_>| keys.iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
        let wanted_names: Vec<Vec<u8>> =
            wanted.iter().map(|&key| name(workload, key).into_bytes()).collect();
        assert_eq!(names(keys), wanted_names);
        out.clear();
        let mut answer = Vec::new();
        let start = begin(&mut answer, Header { status: Some(Status::Ok), ..header });
        let at = begin_found(&mut answer);
        for (index, &key) in (0..looked_at).zip(wanted).filter(|(_, key)| key.0 != 4) {
            let mut value = Vec::new();
            push_value(&mut value, key, workload.value_bytes(key));
            Item { client_flags: 0, cas: 1, value: &value }.write_found(index, &mut answer);
        }
        finish_found(&mut answer, at, looked_at);
        finish(&mut answer, start, true);
        answer
    }

    #[test]
    fn what_an_answer_leaves_out_is_asked_for_again() {
        let workload = Workload::named("uniform", 100).unwrap();
        let (mut keyvault, mut out) = (keyvault(), Vec::new());
        let expected = Expected { operation: Operation::Get, keys: KEYS.len() };
        keyvault.ask(&workload, Asked { expected, begin_ns: 0 }, &KEYS, &mut out);
        let mut taken = Vec::new();
        for (looked_at, wanted) in [(2, &KEYS[..]), (1, &KEYS[2..]), (2, &KEYS[3..])] {
            assert!(taken.is_empty() && keyvault.under_way() == 1);
            let answer = answer(&workload, &mut out, looked_at, wanted);
            let take = |_, said, keys: &[KeyNumber]| taken.push((said, keys.to_vec()));
            assert_eq!(keyvault.receive(&workload, &answer, &mut out, take).unwrap(), answer.len());
        }
        let said = Said { hits: 4, misses: 1, refused: 0, missed: 1 << 3 };
        assert_eq!(taken, [(said, KEYS.to_vec())]);
        assert!(out.is_empty() && keyvault.under_way() == 0);
    }

    #[test]
    fn an_answer_that_looked_at_nothing_ends_the_run() {
        let workload = Workload::named("uniform", 100).unwrap();
        let (mut keyvault, mut out) = (keyvault(), Vec::new());
        let expected = Expected { operation: Operation::Get, keys: KEYS.len() };
        keyvault.ask(&workload, Asked { expected, begin_ns: 0 }, &KEYS, &mut out);
        let answer = answer(&workload, &mut out, 0, &KEYS);
        assert!(keyvault.receive(&workload, &answer, &mut out, |_, _, _| {}).is_err());
    }
}
