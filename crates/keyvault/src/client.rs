//! A client of one server: it knows which shard owns a key and talks to that shard's thread directly.
//!
//! [`Connection`] is one connection to one shard: requests go out in batches, answers come in any order, at most
//! as many are unanswered as the server granted. [`Client`] has one to each shard and offers plain calls.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::frame::{
    FrameError, HEADER_BYTES, Header, Status, VERSION, begin, finish, frame_length,
};
use crate::message::{Hello, Item, KeyList, Request, SetMode, read_found, read_numbers};
use crate::owner::{hash_key, shard_of};
use crate::ring::{Popped, Reader, Writer, frame_bytes_max};
use crate::share::{Ring, RingSizes, map, receive_with_files};

/// Credits that a client asks for unless told otherwise.
pub const CREDITS: u32 = 256;
/// Sizes of the rings that a client asks for: small, so that they stay in the processors' caches. Frames that
/// are too long for them go over the socket.
pub const REQUEST_RING_BYTES: u32 = 64 << 10;
pub const ANSWER_RING_BYTES: u32 = 256 << 10;
/// What one read from a socket takes.
const READ_BYTES: usize = 64 << 10;
/// How long a client looks for answers in shared memory before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Looks at the ring between two looks at the time.
const LOOKS: u32 = 64;

/// Where a server listens for this protocol.
#[derive(Debug, Clone)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// A unix socket for the greeting, shared memory for the rest.
    Shared(PathBuf),
}

/// What goes wrong between client and server.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot connect to {address:?}: {source}")]
    Connect { address: Address, source: std::io::Error },
    #[error("the connection broke: {0}")]
    Io(#[from] Errno),
    #[error("the server closed the connection")]
    Closed,
    #[error("the server sent what is no frame: {0}")]
    Frame(#[from] FrameError),
    #[error("the server answered {0:?}")]
    Status(Status),
    #[error("the server's answer makes no sense")]
    Answer,
    #[error("the key is empty or longer than 250 bytes, or the value longer than a frame")]
    TooLong,
}

/// One answer, out of a connection's buffer.
#[derive(Debug, Clone, Copy)]
pub struct Answer<'a> {
    pub request: u32,
    pub status: Status,
    pub body: &'a [u8],
}

#[derive(Debug)]
enum Transport {
    Stream,
    Shared(Box<Rings>),
}

#[derive(Debug)]
struct Rings {
    writer: Writer<Ring>,
    reader: Reader<Ring>,
    wake_server: OwnedFd,
    wake_client: OwnedFd,
    request_bytes_max: usize,
    /// Part of an answer that comes over the socket because it is too long for the ring.
    large: Vec<u8>,
}

/// One connection to one shard.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    transport: Transport,
    connection: u16,
    granted: Hello,
    next_request: u32,
    unanswered: u32,
    out: Vec<u8>,
    input: Vec<u8>,
    shard: u16,
}

impl Connection {
    /// Connects and says hello: `shard` is the one to be served by, or [`crate::frame::BROADCAST`] for any.
    pub fn connect(
        address: &Address,
        shard: u16,
        credits: u32,
        unchecked: bool,
    ) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Connect { address: address.clone(), source };
        let socket: OwnedFd = match address {
            Address::Tcp(at) => {
                let stream = TcpStream::connect(at).map_err(failed)?;
                stream.set_nodelay(true).map_err(failed)?;
                stream.into()
            }
            Address::Unix(path) | Address::Shared(path) => {
                UnixStream::connect(path).map_err(failed)?.into()
            }
        };
        let mut connection = Self {
            socket,
            transport: Transport::Stream,
            connection: 0,
            granted: Hello { version: VERSION, shard: 1, credits: 1, unchecked: false },
            next_request: 1,
            unanswered: 0,
            out: Vec::new(),
            input: Vec::new(),
            shard,
        };
        connection.send(&Request::Hello(Hello { version: VERSION, shard, credits, unchecked }))?;
        connection.flush()?;
        let mut granted = None;
        let mut number = 0;
        connection.receive_raw(&mut |header, body| {
            number = header.connection;
            granted = Some(match header.status {
                Some(Status::Ok) => Hello::read(body).ok_or(ClientError::Answer),
                status => Err(status.map_or(ClientError::Answer, ClientError::Status)),
            });
        })?;
        connection.granted = granted.ok_or(ClientError::Answer)??;
        connection.connection = number;
        if matches!(address, Address::Shared(_)) {
            connection.share()?;
        }
        Ok(connection)
    }

    /// What the server granted: how many shards there are, how many requests may be unanswered.
    #[must_use]
    pub const fn granted(&self) -> Hello {
        self.granted
    }

    /// Requests whose answers have not come.
    #[must_use]
    pub const fn unanswered(&self) -> u32 {
        self.unanswered
    }

    fn share(&mut self) -> Result<(), ClientError> {
        let (request_bytes, answer_bytes) = (REQUEST_RING_BYTES, ANSWER_RING_BYTES);
        self.send(&Request::Share { request_bytes, answer_bytes })?;
        self.flush()?;
        let mut buffer = [0; HEADER_BYTES + 8];
        // The descriptors come with the first byte; the answer is small and comes in one piece.
        let (bytes, files) = receive_with_files(&self.socket, &mut buffer)?;
        let header = Header::read(&buffer[..bytes], !self.granted.unchecked)?;
        self.unanswered -= 1;
        if header.status != Some(Status::Ok) {
            return Err(header.status.map_or(ClientError::Answer, ClientError::Status));
        }
        let [file, wake_server, wake_client] = files.ok_or(ClientError::Answer)?;
        let body = buffer.get(HEADER_BYTES..bytes).ok_or(ClientError::Answer)?;
        let [a, b, c, d, e, f, g, h] = *body.first_chunk().ok_or(ClientError::Answer)?;
        let sizes =
            RingSizes::fitting(u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let (requests, answers) = map(&file, sizes)?;
        self.transport = Transport::Shared(Box::new(Rings {
            writer: Writer::new(requests),
            reader: Reader::new(answers),
            wake_server,
            wake_client,
            request_bytes_max: frame_bytes_max(sizes.request_bytes),
            large: Vec::new(),
        }));
        Ok(())
    }

    /// Whether one more request may be sent now.
    #[must_use]
    pub const fn has_credit(&self) -> bool {
        self.unanswered < self.granted.credits
    }

    /// Adds a request to what [`Self::flush`] sends; its number comes back. The caller has a credit for it.
    pub fn send(&mut self, request: &Request<'_>) -> Result<u32, ClientError> {
        debug_assert!(self.has_credit(), "requests beyond the credits are refused");
        let number = self.next_request;
        self.next_request = self.next_request.wrapping_add(1);
        let header = Header {
            length: 0,
            opcode: request.opcode(),
            status: None,
            shard: self.shard,
            connection: self.connection,
            request: number,
        };
        let start = begin(&mut self.out, header);
        request.write(&mut self.out);
        if self.out.len() - start > crate::frame::FRAME_BYTES_MAX {
            self.out.truncate(start);
            return Err(ClientError::TooLong);
        }
        finish(&mut self.out, start, !self.granted.unchecked);
        self.unanswered += 1;
        if let Transport::Shared(rings) = &mut self.transport
            && start == 0
            && self.out.len() <= rings.request_bytes_max
            && rings.writer.push(&self.out)
        {
            self.out.clear();
        }
        Ok(number)
    }

    /// Sends what was added.
    pub fn flush(&mut self) -> Result<(), ClientError> {
        match &mut self.transport {
            Transport::Stream => send_all(&self.socket, &self.out)?,
            Transport::Shared(rings) => {
                let mut at = 0;
                while let Some(Ok(length)) = frame_length(&self.out[at..]) {
                    let frame = &self.out[at..at + length];
                    if frame.len() > rings.request_bytes_max {
                        send_all(&self.socket, frame)?;
                    } else if !rings.writer.push(frame) {
                        rings.wake_server_if_asleep();
                        std::hint::spin_loop();
                        continue;
                    }
                    at += length;
                }
                rings.wake_server_if_asleep();
            }
        }
        self.out.clear();
        Ok(())
    }

    /// Waits for at least one answer and gives every one that has come to `each`.
    pub fn receive(&mut self, mut each: impl FnMut(Answer<'_>)) -> Result<(), ClientError> {
        self.receive_raw(&mut |header, body| {
            if let Some(status) = header.status {
                each(Answer { request: header.request, status, body });
            }
        })
    }

    fn receive_raw(&mut self, each: &mut dyn FnMut(Header, &[u8])) -> Result<(), ClientError> {
        let before = self.unanswered;
        while self.unanswered == before {
            if matches!(self.transport, Transport::Stream) {
                self.input.reserve(READ_BYTES);
                match rustix::io::read(
                    &self.socket,
                    rustix::buffer::spare_capacity(&mut self.input),
                ) {
                    Ok(0) => return Err(ClientError::Closed),
                    Ok(_) => {}
                    Err(Errno::INTR) => continue,
                    Err(errno) => return Err(errno.into()),
                }
            } else {
                self.pop_frames()?;
            }
            let mut at = 0;
            while let Some(length) = frame_length(&self.input[at..]) {
                let length = length?;
                let Some(frame) = self.input.get(at..at + length) else { break };
                let header = Header::read(frame, !self.granted.unchecked)?;
                each(header, &frame[HEADER_BYTES..]);
                self.unanswered = self.unanswered.saturating_sub(1);
                at += length;
            }
            self.input.drain(..at);
        }
        Ok(())
    }

    /// Waits for frames in shared memory, or for long ones on the socket: looks for a while, then sleeps.
    fn pop_frames(&mut self) -> Result<(), ClientError> {
        let Transport::Shared(rings) = &mut self.transport else { return Ok(()) };
        let mut since = None;
        loop {
            for _ in 0..LOOKS {
                match rings.reader.pop(&mut self.input) {
                    Popped::Frame => {
                        while rings.reader.pop(&mut self.input) == Popped::Frame {}
                        return Ok(());
                    }
                    Popped::Broken => return Err(ClientError::Answer),
                    Popped::Nothing => std::hint::spin_loop(),
                }
            }
            let since = *since.get_or_insert_with(Instant::now);
            if since.elapsed() < SPIN || !rings.reader.fall_asleep() {
                continue;
            }
            let mut fds = [
                PollFd::new(&rings.wake_client, PollFlags::IN),
                PollFd::new(&self.socket, PollFlags::IN),
            ];
            let waited = poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
            let on_socket = !fds[1].revents().is_empty();
            rings.reader.wake_up();
            let mut counter = [0; 8];
            let _ = rustix::io::read(&rings.wake_client, &mut counter);
            match waited {
                Err(errno) if errno != Errno::INTR => return Err(errno.into()),
                _ if on_socket && rings.read_large(&self.socket, &mut self.input)? => return Ok(()),
                _ => {}
            }
        }
    }
}

impl Rings {
    fn wake_server_if_asleep(&self) {
        if self.writer.reader_sleeps() {
            // Fails only when the counter is full, and then the server is awake.
            let _ = rustix::io::write(&self.wake_server, &1u64.to_ne_bytes());
        }
    }

    /// Reads part of a long answer; true once it is whole and stands in `input`.
    fn read_large(&mut self, socket: &OwnedFd, input: &mut Vec<u8>) -> Result<bool, ClientError> {
        self.large.reserve(READ_BYTES);
        let buffer = rustix::buffer::spare_capacity(&mut self.large);
        match rustix::net::recv(socket, buffer, rustix::net::RecvFlags::DONTWAIT) {
            Ok((0, _)) if !self.reader.has_frame() => return Err(ClientError::Closed),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let Some(length) = frame_length(&self.large) else { return Ok(false) };
        let length = length?;
        if self.large.len() < length {
            return Ok(false);
        }
        input.extend(self.large.drain(..length));
        Ok(true)
    }
}

fn send_all(socket: &OwnedFd, bytes: &[u8]) -> Result<(), ClientError> {
    let mut sent = 0;
    while sent < bytes.len() {
        match rustix::net::send(socket, &bytes[sent..], rustix::net::SendFlags::NOSIGNAL) {
            Ok(bytes) => sent += bytes,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// An item that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    pub client_flags: u32,
    pub cas: u64,
    pub bytes: Vec<u8>,
}

impl From<Item<'_>> for Value {
    fn from(item: Item<'_>) -> Self {
        Self { client_flags: item.client_flags, cas: item.cas, bytes: item.value.to_vec() }
    }
}

/// A client with a connection to every shard.
#[derive(Debug)]
pub struct Client {
    connections: Vec<Connection>,
}

impl Client {
    /// Connects to all shards of a server.
    pub fn connect(address: &Address) -> Result<Self, ClientError> {
        let unchecked = matches!(address, Address::Shared(_));
        let first = Connection::connect(address, 0, CREDITS, unchecked)?;
        let shards = first.granted().shard;
        let mut connections = vec![first];
        for shard in 1..shards {
            connections.push(Connection::connect(address, shard, CREDITS, unchecked)?);
        }
        Ok(Self { connections })
    }

    #[must_use]
    pub fn shards(&self) -> usize {
        self.connections.len()
    }

    fn owner(&self, key: &[u8]) -> usize {
        shard_of(hash_key(key), self.connections.len())
    }

    fn call<T>(
        &mut self,
        shard: usize,
        request: &Request<'_>,
        read: impl FnOnce(Status, &[u8]) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let connection = &mut self.connections[shard];
        connection.send(request)?;
        connection.flush()?;
        let mut read = Some(read);
        let mut result = Err(ClientError::Answer);
        connection.receive(|answer| {
            if let Some(read) = read.take() {
                result = read(answer.status, answer.body);
            }
        })?;
        result
    }

    /// The item of a key, if there is one.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Value>, ClientError> {
        self.call(self.owner(key), &Request::Get { key }, |status, body| match status {
            Status::Ok => Ok(Some(Item::read(body).ok_or(ClientError::Answer)?.into())),
            Status::NotFound => Ok(None),
            other => Err(ClientError::Status(other)),
        })
    }

    /// The items of many keys, in their order; all shards are asked at the same time.
    pub fn get_many(&mut self, keys: &[&[u8]]) -> Result<Vec<Option<Value>>, ClientError> {
        let mut values = vec![None; keys.len()];
        let mut left: Vec<usize> = (0..keys.len()).collect();
        while !left.is_empty() {
            let mut lists = vec![(KeyList::default(), Vec::new()); self.connections.len()];
            let mut again = Vec::new();
            for &at in &left {
                let (list, places) = &mut lists[self.owner(keys[at])];
                if list.push(keys[at]) {
                    places.push(at);
                } else if places.is_empty() {
                    return Err(ClientError::TooLong);
                } else {
                    again.push(at);
                }
            }
            for (connection, (list, places)) in self.connections.iter_mut().zip(&lists) {
                if !places.is_empty() {
                    connection.send(&Request::MultiGet(list.keys()))?;
                    connection.flush()?;
                }
            }
            for (connection, (_, places)) in self.connections.iter_mut().zip(&lists) {
                if places.is_empty() {
                    continue;
                }
                let mut result = Err(ClientError::Answer);
                connection.receive(|answer| result = take_found(&answer, places, &mut values))?;
                again.extend_from_slice(&places[result?..]);
            }
            left = again;
        }
        Ok(values)
    }

    /// Stores; the new CAS number comes back, None if mode or CAS number did not allow it.
    pub fn set(
        &mut self,
        key: &[u8],
        value: &[u8],
        how: Storing,
    ) -> Result<Option<u64>, ClientError> {
        let Storing { mode, client_flags, exptime, cas } = how;
        let request = Request::Set { mode, key, value, client_flags, exptime, cas };
        self.call(self.owner(key), &request, |status, body| match status {
            Status::Ok => Ok(Some(read_numbers(body).ok_or(ClientError::Answer)?.0)),
            Status::NotStored | Status::Exists | Status::NotFound => Ok(None),
            other => Err(ClientError::Status(other)),
        })
    }

    /// Takes an item out; whether there was one.
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, ClientError> {
        self.call(self.owner(key), &Request::Delete { key, cas: 0 }, yes_or_no)
    }

    /// Sets an item's expiry; whether there is one.
    pub fn touch(&mut self, key: &[u8], exptime: i32) -> Result<bool, ClientError> {
        self.call(self.owner(key), &Request::Touch { key, exptime }, yes_or_no)
    }

    /// Adds to a number, or subtracts down to 0; the new number, None without an item and an `initial`.
    pub fn change(
        &mut self,
        key: &[u8],
        delta: i64,
        initial: Option<u64>,
    ) -> Result<Option<u64>, ClientError> {
        let request = Request::Change {
            key,
            delta: delta.unsigned_abs(),
            subtracts: delta < 0,
            initial,
            exptime: 0,
        };
        self.call(self.owner(key), &request, |status, body| match status {
            Status::Ok => Ok(Some(read_numbers(body).ok_or(ClientError::Answer)?.0)),
            Status::NotFound => Ok(None),
            other => Err(ClientError::Status(other)),
        })
    }

    /// Takes everything out of all shards.
    pub fn flush_all(&mut self) -> Result<(), ClientError> {
        self.call(0, &Request::Flush { delay_s: 0 }, |status, _| match status {
            Status::Ok => Ok(()),
            other => Err(ClientError::Status(other)),
        })
    }
}

/// How SET stores.
#[derive(Debug, Clone, Copy)]
pub struct Storing {
    pub mode: SetMode,
    pub client_flags: u32,
    /// As memcached's: 0 never, up to 30 days from now, else Unix time.
    pub exptime: i32,
    /// The item must have this number; 0 = any.
    pub cas: u64,
}

impl Default for Storing {
    fn default() -> Self {
        Self { mode: SetMode::Set, client_flags: 0, exptime: 0, cas: 0 }
    }
}

fn take_found(
    answer: &Answer<'_>,
    places: &[usize],
    values: &mut [Option<Value>],
) -> Result<usize, ClientError> {
    if answer.status != Status::Ok {
        return Err(ClientError::Status(answer.status));
    }
    let (looked_at, found) = read_found(answer.body).ok_or(ClientError::Answer)?;
    for (index, item) in found {
        let place = places.get(usize::from(index)).ok_or(ClientError::Answer)?;
        values[*place] = Some(item.into());
    }
    // At least one, or asking again would never end.
    let looked_at = usize::from(looked_at);
    if looked_at == 0 || looked_at > places.len() {
        Err(ClientError::Answer)
    } else {
        Ok(looked_at)
    }
}

fn yes_or_no(status: Status, _: &[u8]) -> Result<bool, ClientError> {
    match status {
        Status::Ok => Ok(true),
        Status::NotFound => Ok(false),
        other => Err(ClientError::Status(other)),
    }
}
