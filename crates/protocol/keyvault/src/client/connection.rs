//! One connection to one shard: a socket for the greeting and for long frames, shared memory for
//! the rest.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{Address, ClientError};
use crate::frame::{HEADER_BYTES, Header, Opcode, Status, VERSION, begin, finish, frame_length};
use crate::items::ItemMemory;
use crate::lease::Leases;
use crate::message::{Hello, LeasesGranted, Request};
use crate::ring::{Popped, Reader, Writer, frame_bytes_max};
use crate::share::{Ring, RingSizes, map, receive_with_files};

/// Sizes of the rings that a client asks for: small, so that they stay in the processors' caches.
/// Frames too long for them go over the socket.
pub const REQUEST_RING_BYTES: u32 = 64 << 10;
/// As [`REQUEST_RING_BYTES`], for answers.
pub const ANSWER_RING_BYTES: u32 = 256 << 10;
/// Bytes of one read from a socket.
const READ_BYTES: usize = 64 << 10;
/// How long a client polls for answers in shared memory before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// The longest body of an answer with descriptors.
const FILES_BODY_BYTES_MAX: usize = 16;
/// Polls of the ring between two checks of the time.
const LOOKS: u32 = 64;

/// One answer, borrowed from a connection's buffer.
#[derive(Debug, Clone, Copy)]
pub struct Answer<'a> {
    /// The number of the request.
    pub request: u32,
    /// How it went.
    pub status: Status,
    /// The body of the frame.
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
    /// Part of an answer that arrives over the socket because it is too long for the ring.
    large: Vec<u8>,
}

/// One connection to one shard.
#[derive(Debug)]
pub struct Connection {
    socket: Arc<OwnedFd>,
    transport: Transport,
    connection: u16,
    granted: Hello,
    next_request: u32,
    unanswered: u32,
    /// Sent frames that end leases, whose answers no caller waits for.
    releases_unanswered: u32,
    out: Vec<u8>,
    input: Vec<u8>,
    shard: u16,
    /// Set if the server grants leases.
    leases: Option<Leases>,
}

impl Connection {
    /// Connects and sends HELLO: `shard` is the one to be served by, or [`crate::frame::BROADCAST`]
    /// for any.
    pub fn connect(
        address: &Address,
        shard: u16,
        credits: u32,
        unchecked: bool,
    ) -> Result<Self, ClientError> {
        Self::connect_with(address, (shard, credits, unchecked), None)
    }

    /// As [`Self::connect`], but also asks for leases of values of at least `bytes_min`. They are
    /// granted only over unix sockets and shared memory, and not by every server: see
    /// [`Self::leases`].
    pub fn connect_leasing(
        address: &Address,
        shard: u16,
        credits: u32,
        unchecked: bool,
        bytes_min: u32,
    ) -> Result<Self, ClientError> {
        Self::connect_with(address, (shard, credits, unchecked), Some(bytes_min))
    }

    fn connect_with(
        address: &Address,
        (shard, credits, unchecked): (u16, u32, bool),
        lease_bytes_min: Option<u32>,
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
            socket: Arc::new(socket),
            transport: Transport::Stream,
            connection: 0,
            granted: Hello { version: VERSION, shard: 1, credits: 1, unchecked: false },
            next_request: 1,
            unanswered: 0,
            releases_unanswered: 0,
            out: Vec::new(),
            input: Vec::new(),
            shard,
            leases: None,
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
        if let (Some(bytes_min), Address::Unix(_) | Address::Shared(_)) = (lease_bytes_min, address)
        {
            connection.ask_for_leases(bytes_min)?;
        }
        if matches!(address, Address::Shared(_)) {
            connection.share()?;
        }
        Ok(connection)
    }

    /// Returns the reader of answers to GETLEASE; None if the server grants no leases.
    #[must_use]
    pub const fn leases(&self) -> Option<&Leases> {
        self.leases.as_ref()
    }

    /// Returns the server's grant: the number of shards, and how many requests may be unanswered.
    #[must_use]
    pub const fn granted(&self) -> Hello {
        self.granted
    }

    /// Returns the number of unanswered requests.
    #[must_use]
    pub const fn unanswered(&self) -> u32 {
        self.unanswered
    }

    /// Sends a request whose answer carries descriptors; no other request may be unanswered.
    /// Returns status, body, descriptors.
    fn ask_for_files(
        &mut self,
        request: &Request<'_>,
    ) -> Result<(Status, Vec<u8>, Vec<OwnedFd>), ClientError> {
        self.send(request)?;
        self.flush()?;
        let mut buffer = [0; HEADER_BYTES + FILES_BODY_BYTES_MAX];
        // The descriptors arrive with the first byte; the answer is small and arrives in one piece.
        let (bytes, files) = receive_with_files(&self.socket, &mut buffer)?;
        let header = Header::read(&buffer[..bytes], !self.granted.unchecked)?;
        self.unanswered -= 1;
        let body = buffer.get(HEADER_BYTES..bytes).ok_or(ClientError::Answer)?;
        if header.length as usize != bytes {
            return Err(ClientError::Answer);
        }
        Ok((header.status.ok_or(ClientError::Answer)?, body.to_vec(), files))
    }

    fn ask_for_leases(&mut self, bytes_min: u32) -> Result<(), ClientError> {
        let (status, body, files) = self.ask_for_files(&Request::Leases { bytes_min })?;
        match status {
            Status::Ok => {}
            // The server grants none, or does not know the request.
            Status::Unsupported => return Ok(()),
            other => return Err(ClientError::Status(other)),
        }
        let granted = LeasesGranted::read(&body).ok_or(ClientError::Answer)?;
        let memory =
            ItemMemory::map(files.first().ok_or(ClientError::Answer)?, granted.memory_bytes)?;
        self.leases = Some(Leases::new(memory, Arc::clone(&self.socket), granted.leases));
        Ok(())
    }

    fn share(&mut self) -> Result<(), ClientError> {
        let (request_bytes, answer_bytes) = (REQUEST_RING_BYTES, ANSWER_RING_BYTES);
        let (status, body, files) =
            self.ask_for_files(&Request::Share { request_bytes, answer_bytes })?;
        if status != Status::Ok {
            return Err(ClientError::Status(status));
        }
        let [file, wake_server, wake_client] =
            <[OwnedFd; 3]>::try_from(files).map_err(|_| ClientError::Answer)?;
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

    /// True if one more request may be sent now.
    #[must_use]
    pub const fn has_credit(&self) -> bool {
        self.unanswered + self.releases_unanswered < self.granted.credits
    }

    /// Adds a request to the batch that [`Self::flush`] sends. Returns its number. The caller must
    /// have a credit for it.
    pub fn send(&mut self, request: &Request<'_>) -> Result<u32, ClientError> {
        debug_assert!(self.has_credit(), "requests beyond the credits are refused");
        if self.leases.is_some() {
            // One credit is kept for the request.
            self.send_releases(false, 1)?;
        }
        let number = self.push_request(request)?;
        self.unanswered += 1;
        Ok(number)
    }

    /// Tells the server of ended leases, while more than `credits_kept` credits are left.
    fn send_releases(&mut self, all: bool, credits_kept: u32) -> Result<(), ClientError> {
        let Some(leases) = self.leases.clone() else { return Ok(()) };
        while self.unanswered + self.releases_unanswered + credits_kept < self.granted.credits
            && let Some(ids) = leases.take_ended(all)
        {
            self.push_request(&Request::Release(ids.ids()))?;
            self.releases_unanswered += 1;
        }
        Ok(())
    }

    /// Tells the server of all ended leases now, and waits until it has answered. For when no other
    /// request follows soon; does nothing while one is unanswered.
    pub fn release_ended(&mut self) -> Result<(), ClientError> {
        while self.unanswered == 0 {
            self.send_releases(true, 0)?;
            if self.releases_unanswered == 0 {
                break;
            }
            self.flush()?;
            self.receive_some(&mut |_, _| {})?;
        }
        Ok(())
    }

    fn push_request(&mut self, request: &Request<'_>) -> Result<u32, ClientError> {
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
        if let Transport::Shared(rings) = &mut self.transport
            && start == 0
            && self.out.len() <= rings.request_bytes_max
            && rings.writer.push(&self.out)
        {
            self.out.clear();
        }
        Ok(number)
    }

    /// Sends the batch.
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
                        // A server that cannot write its answers takes no more requests.
                        if rings.reader.pop(&mut self.input) == Popped::Broken {
                            return Err(ClientError::Answer);
                        }
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

    /// Waits for at least one answer and passes every one that has arrived to `each`.
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
            self.receive_some(each)?;
        }
        Ok(())
    }

    /// Waits for input; complete frames are passed to `each`.
    fn receive_some(&mut self, each: &mut dyn FnMut(Header, &[u8])) -> Result<(), ClientError> {
        if matches!(self.transport, Transport::Stream) {
            self.input.reserve(READ_BYTES);
            match rustix::io::read(&self.socket, rustix::buffer::spare_capacity(&mut self.input)) {
                Ok(0) => return Err(ClientError::Closed),
                Ok(_) => {}
                Err(Errno::INTR) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        } else if !self.has_whole_frame() {
            self.pop_frames()?;
        }
        let mut at = 0;
        while let Some(length) = frame_length(&self.input[at..]) {
            let length = length?;
            let Some(frame) = self.input.get(at..at + length) else { break };
            let header = Header::read(frame, !self.granted.unchecked)?;
            at += length;
            if header.opcode == Opcode::Release {
                if header.status != Some(Status::Ok) {
                    // It is no longer known which values are leased.
                    return Err(header.status.map_or(ClientError::Answer, ClientError::Status));
                }
                self.releases_unanswered = self.releases_unanswered.saturating_sub(1);
                continue;
            }
            each(header, &frame[HEADER_BYTES..]);
            self.unanswered = self.unanswered.saturating_sub(1);
        }
        self.input.drain(..at);
        Ok(())
    }

    /// True if an answer arrived while requests were sent.
    fn has_whole_frame(&self) -> bool {
        let length = frame_length(&self.input).and_then(Result::ok);
        length.is_some_and(|length| self.input.len() >= length)
    }

    /// Waits for frames in shared memory, or for long ones on the socket: polls for a while, then
    /// sleeps.
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
            // Fails only if the counter is full, and then the server is awake.
            let _ = rustix::io::write(&self.wake_server, &1u64.to_ne_bytes());
        }
    }

    /// Reads long answers from the socket. True once complete ones were moved to `input`.
    fn read_large(&mut self, socket: &OwnedFd, input: &mut Vec<u8>) -> Result<bool, ClientError> {
        self.large.reserve(READ_BYTES);
        let buffer = rustix::buffer::spare_capacity(&mut self.large);
        match rustix::net::recv(socket, buffer, rustix::net::RecvFlags::DONTWAIT) {
            Ok((0, _)) if !self.reader.has_frame() => return Err(ClientError::Closed),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut whole = 0;
        while let Some(length) = frame_length(&self.large[whole..]) {
            let length = length?;
            if self.large.len() - whole < length {
                break;
            }
            whole += length;
        }
        input.extend(self.large.drain(..whole));
        Ok(whole > 0)
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
