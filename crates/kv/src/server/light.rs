//! Connections that speak KeyVault: over a stream like any other, or through rings in shared memory.
//!
//! One port serves all threads: a connection asks in its HELLO for a shard and is handed to that
//! shard's thread. A request for another shard than the thread's own is passed on and answered when
//! that shard has; answers come in any order.

use std::os::fd::{AsFd, OwnedFd};

use farpool_keyvault::frame::{
    BROADCAST, FrameError, HEADER_BYTES, Header, Opcode, Status, VERSION, begin, finish,
    frame_length,
};
use farpool_keyvault::message::{Hello, Request, SetMode};
use farpool_keyvault::owner::{hash_key, shard_of};
use farpool_keyvault::ring::{Popped, Reader, Writer, frame_bytes_max};
use farpool_keyvault::share::{self, Ring, RingSizes};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use smallvec::SmallVec;

use super::connection::{Client, Phase, Ticket};
use super::lower::Parked;
use super::mailbox::{Address, Answer, Ask, Entry};
use super::sockets::{Connection, ConnectionId};
use super::worker::Worker;
use crate::protocol::light;

/// The most requests that one connection may have unanswered.
pub const CREDITS_MAX: u32 = 1024;
/// Frames that are looked at together.
const BATCH: usize = 32;

/// What a connection of this kind needs beside its client.
#[derive(Debug, Default)]
pub struct Light {
    has_greeted: bool,
    unchecked: bool,
    credits: u32,
    /// Requests that other shards have, by their numbers; a broadcast with how many are left.
    passed_on: Vec<(Header, usize)>,
    pub(super) port: Option<Port>,
}

/// The server's ends of the rings.
#[derive(Debug)]
pub struct Port {
    requests: Reader<Ring>,
    answers: Writer<Ring>,
    answer_bytes_max: usize,
    wake_server: OwnedFd,
    wake_client: OwnedFd,
    /// Answers that found the ring full: the client was granted more than it makes room for.
    held: Vec<u8>,
}

/// What a stream of frames begins with.
enum Next<'a> {
    Incomplete { want_bytes: usize },
    Frame(&'a [u8]),
    Broken,
}

fn next_frame(input: &[u8]) -> Next<'_> {
    match frame_length(input) {
        None => Next::Incomplete { want_bytes: HEADER_BYTES },
        Some(Err(_)) => Next::Broken,
        Some(Ok(length)) => {
            input.get(..length).map_or(Next::Incomplete { want_bytes: length }, Next::Frame)
        }
    }
}

struct Planned<'a> {
    header: Header,
    request: Request<'a>,
    frame: &'a [u8],
    hash: u64,
}

impl Worker {
    /// Answers the frames that `input` holds; how many bytes are done.
    pub(super) fn serve_light(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        let Some(mut state) = connection.light.take() else { return input.len() };
        let mut at = 0;
        connection.client.has_turn_left = false;
        while at < input.len()
            && connection.client.phase != Phase::Closing
            && connection.moves_to.is_none()
        {
            let done = self.serve_frames(connection, &mut state, id, &input[at..]);
            if done == 0 {
                break;
            }
            at += done;
            if self.out.len() >= super::sockets::OUT_BYTES_MAX
                && (!self.send(connection) || !connection.client.unsent.is_empty())
            {
                connection.client.has_turn_left = at < input.len();
                break;
            }
        }
        connection.light = Some(state);
        at
    }

    /// Answers one batch of frames; how many bytes it took.
    fn serve_frames(
        &mut self,
        connection: &mut Connection,
        state: &mut Light,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        let mut planned: SmallVec<[Planned<'_>; BATCH]> = SmallVec::new();
        let mut at = 0;
        let mut trouble = None;
        while planned.len() < BATCH && at < input.len() {
            let frame = match next_frame(&input[at..]) {
                Next::Frame(frame) => frame,
                Next::Incomplete { want_bytes } => {
                    connection.client.want_bytes = want_bytes;
                    break;
                }
                Next::Broken => {
                    connection.client.phase = Phase::Closing;
                    return input.len();
                }
            };
            at += frame.len();
            match self.plan_frame(frame, !state.unchecked) {
                Ok(request) => planned.push(request),
                Err(error) => {
                    trouble = Some((error, frame));
                    break;
                }
            }
            // What changes how the stream is read is answered before the next frame is looked at.
            if matches!(
                planned.last(),
                Some(Planned { request: Request::Hello(_) | Request::Share { .. }, .. })
            ) {
                break;
            }
        }
        if planned.len() > 1 {
            planned.iter().for_each(|it: &Planned<'_>| self.shard.store.prefetch_item(it.hash));
        }
        for request in &planned {
            self.answer_frame(connection, state, id, request);
            self.settle_victims();
        }
        if let Some((error, frame)) = trouble {
            self.refuse_frame(&mut connection.client, state, &error, frame);
        }
        at
    }

    fn plan_frame<'a>(&self, frame: &'a [u8], checked: bool) -> Result<Planned<'a>, FrameError> {
        let header = Header::read(frame, checked)?;
        if header.status.is_some() {
            return Err(FrameError::Body { opcode: header.opcode });
        }
        let request = Request::read(header.opcode, &frame[HEADER_BYTES..])?;
        let hash = request.key().map_or(0, hash_key);
        self.shard.store.prefetch_entry(hash);
        Ok(Planned { header, request, frame, hash })
    }

    /// A damaged frame is asked for again; one that makes no sense ends the connection.
    fn refuse_frame(
        &mut self,
        client: &mut Client,
        state: &Light,
        error: &FrameError,
        frame: &[u8],
    ) {
        let header = Header::read(frame, false).unwrap_or(Header {
            length: 0,
            opcode: Opcode::Noop,
            status: None,
            shard: 0,
            connection: 0,
            request: frame
                .get(8..12)
                .map_or(0, |it| u32::from_le_bytes(it.try_into().unwrap_or_default())),
        });
        let status = match error {
            FrameError::Checksum { .. } => Status::Damaged,
            FrameError::Opcode { .. } => Status::Unsupported,
            _ => Status::Malformed,
        };
        if status == Status::Malformed {
            client.phase = Phase::Closing;
        }
        light::answer_status(&header, status, b"", !state.unchecked, &mut self.out);
    }

    fn answer_frame(
        &mut self,
        connection: &mut Connection,
        state: &mut Light,
        id: ConnectionId,
        planned: &Planned<'_>,
    ) {
        let Planned { header, request, hash, .. } = planned;
        let checked = !state.unchecked;
        if !state.has_greeted && !matches!(request, Request::Hello(_)) {
            connection.client.phase = Phase::Closing;
            return light::answer_status(header, Status::Malformed, b"", checked, &mut self.out);
        }
        match *request {
            Request::Hello(hello) => {
                self.greet(connection, state, id, (header, hello), planned.frame)
            }
            Request::Share { request_bytes, answer_bytes } => {
                let sizes = RingSizes::fitting(request_bytes, answer_bytes);
                self.share(connection, state, header, sizes);
            }
            Request::Flush { delay_s } => {
                connection.client.awaited += self.shared.shards() - 1;
                self.flush(state, id, header, delay_s);
            }
            Request::Noop => light::answer_status(header, Status::Ok, b"", checked, &mut self.out),
            _ => {
                let shards = self.shared.shards();
                let owner = shard_of(*hash, shards);
                if let Request::MultiGet(keys) = *request
                    && let Some(other) = light::foreign_key_owner(keys, owner, shards)
                {
                    let other = u16::try_from(other).unwrap_or(0).to_le_bytes();
                    return light::answer_status(
                        header,
                        Status::WrongShard,
                        &other,
                        checked,
                        &mut self.out,
                    );
                }
                if owner == self.number
                    && let Some((key_number, key, hash)) = self.first_below(request, 0)
                {
                    let address = Address {
                        connection: id.number,
                        generation: id.generation,
                        ticket: Ticket(0),
                    };
                    let what = Parked::Light { checked, key_number };
                    connection.client.awaited += 1;
                    return self.park((&key, hash), (self.number, address), what, planned.frame);
                }
                if owner == self.number {
                    let shard = &mut self.shard;
                    light::answer(shard, header, request, *hash, checked, &mut self.out);
                    return;
                }
                let ask = Ask::Light { checked };
                let address =
                    Address { connection: id.number, generation: id.generation, ticket: Ticket(0) };
                connection.client.awaited += 1;
                self.asks[owner].push(address, ask, |bytes| bytes.extend_from_slice(planned.frame));
                self.counts.forwarded += 1;
            }
        }
    }

    /// The next key of a frame, from number `first` on, that is in a lower tier. A MULTIGET waits for one after the other.
    pub(super) fn next_below(&self, frame: &[u8], first: usize) -> Option<(usize, Vec<u8>, u64)> {
        let header = Header::read(frame, false).ok()?;
        self.first_below(&Request::read(header.opcode, frame.get(HEADER_BYTES..)?).ok()?, first)
    }

    fn first_below(&self, request: &Request<'_>, first: usize) -> Option<(usize, Vec<u8>, u64)> {
        self.lower.as_ref()?;
        let replaces = matches!(request, Request::Set { mode: SetMode::Set, cas: 0, .. });
        let below = |(number, key): (usize, &[u8])| {
            let hash = hash_key(key);
            self.is_below((key, hash), replaces).then(|| (number, key.to_vec(), hash))
        };
        match request {
            Request::MultiGet(keys) => keys.iter().enumerate().skip(first).find_map(below),
            _ => request.key().filter(|_| first == 0).and_then(|key| below((0, key))),
        }
    }

    fn greet(
        &mut self,
        connection: &mut Connection,
        state: &mut Light,
        id: ConnectionId,
        (header, hello): (&Header, Hello),
        frame: &[u8],
    ) {
        let shards = self.shared.shards();
        let wanted = usize::from(hello.shard);
        let is_elsewhere = hello.shard != BROADCAST && wanted != self.number;
        if hello.version != VERSION || state.has_greeted || is_elsewhere && wanted >= shards {
            connection.client.phase = Phase::Closing;
            return light::answer_status(header, Status::Unsupported, b"", true, &mut self.out);
        }
        if is_elsewhere {
            // That shard's thread reads this greeting again.
            connection.moves_to = Some(wanted);
            connection.client.input = frame.to_vec();
            return;
        }
        state.has_greeted = true;
        state.credits = hello.credits.clamp(1, CREDITS_MAX);
        let granted = Hello {
            version: VERSION,
            shard: u16::try_from(shards).unwrap_or(u16::MAX),
            credits: state.credits,
            unchecked: hello.unchecked,
        };
        let number = u16::try_from(id.number & 0xffff).unwrap_or(0);
        let shard = u16::try_from(self.number).unwrap_or(0);
        let answer = Header { status: Some(Status::Ok), connection: number, shard, ..*header };
        let start = begin(&mut self.out, answer);
        granted.write(&mut self.out);
        finish(&mut self.out, start, true);
        state.unchecked = hello.unchecked;
    }

    /// Moves a connection into shared memory: the answer carries memory and the two bells.
    fn share(
        &mut self,
        connection: &mut Connection,
        state: &mut Light,
        header: &Header,
        sizes: RingSizes,
    ) {
        let checked = !state.unchecked;
        let mut reply = Vec::new();
        let start = begin(&mut reply, Header { status: Some(Status::Ok), ..*header });
        reply.extend_from_slice(&u32::try_from(sizes.request_bytes).unwrap_or(0).to_le_bytes());
        reply.extend_from_slice(&u32::try_from(sizes.answer_bytes).unwrap_or(0).to_le_bytes());
        finish(&mut reply, start, checked);
        // What is ready goes first; only then do descriptors travel with their own bytes.
        let shared = self.send(connection)
            && connection.client.unsent.is_empty()
            && make_port(sizes)
                .and_then(|(port, file)| {
                    let files = [file.as_fd(), port.wake_server.as_fd(), port.wake_client.as_fd()];
                    let sent = share::send_with_files(&connection.socket, &reply, files)?;
                    if sent == reply.len() { Ok(port) } else { Err(Errno::MSGSIZE) }
                })
                .map(|port| state.port = Some(port))
                .is_ok();
        if !shared {
            light::answer_status(header, Status::Unsupported, b"", checked, &mut self.out);
        }
    }

    fn flush(&mut self, state: &mut Light, id: ConnectionId, header: &Header, delay_s: u32) {
        let at_s = if delay_s == 0 { 0 } else { self.shard.clock.now_s().saturating_add(delay_s) };
        let ask = Ask::Flush { at_s };
        self.counts.flush_commands += 1;
        self.do_for_all(ask);
        let others = self.shared.shards() - 1;
        if others == 0 {
            return light::answer_status(header, Status::Ok, b"", !state.unchecked, &mut self.out);
        }
        state.passed_on.push((*header, others));
        let ticket = Ticket(header.request.into());
        let address = Address { connection: id.number, generation: id.generation, ticket };
        for shard in (0..=others).filter(|&shard| shard != self.number) {
            self.asks[shard].push(address, ask, |_| {});
        }
    }

    /// Answers a frame that another thread passed on.
    pub(super) fn answer_passed_on(&mut self, frame: &[u8], checked: bool, out: &mut Vec<u8>) {
        match self.plan_frame(frame, false) {
            Ok(it) if light::is_on_keys(it.header.opcode) => {
                light::answer(&mut self.shard, &it.header, &it.request, it.hash, checked, out);
            }
            _ => debug_assert!(false, "frames are checked before they are passed on"),
        }
    }

    /// Takes what another shard answered to a connection of this kind.
    pub(super) fn take_light_answer(
        &mut self,
        state: &mut Light,
        entry: &Entry<Answer>,
        bytes: &[u8],
    ) {
        match entry.what {
            Answer::Bytes => self.out.extend_from_slice(bytes),
            Answer::Report(_) | Answer::Listed(_) => {
                let at = state
                    .passed_on
                    .iter()
                    .position(|(it, _)| u64::from(it.request) == entry.address.ticket.0);
                let Some(at) = at else { return };
                state.passed_on[at].1 -= 1;
                if state.passed_on[at].1 == 0 {
                    let (header, _) = state.passed_on.swap_remove(at);
                    light::answer_status(&header, Status::Ok, b"", !state.unchecked, &mut self.out);
                }
            }
        }
    }

    /// Looks at every ring once, least recently granted first; whether any had a request.
    pub(super) fn serve_ports(&mut self) -> bool {
        let mut turns = std::mem::take(&mut self.turns);
        let any = turns.round(|number| self.serve_port(number as usize));
        turns.members().for_each(|number| self.check_port(number as usize));
        self.turns = turns;
        any
    }

    fn serve_port(&mut self, number: usize) -> bool {
        let Some(connection) = self.connections[number].as_mut() else { return false };
        let Some(port) = connection.light.as_mut().and_then(|light| light.port.as_mut()) else {
            return false;
        };
        if !port.held.is_empty() {
            // Who does not take his answers is not asked for more requests.
            let held = std::mem::take(&mut port.held);
            let done = port.push_some(&held, &mut Vec::new());
            port.held.extend_from_slice(&held[done..]);
            return false;
        }
        if !port.requests.has_frame() {
            return false;
        }
        let mut frames = std::mem::take(&mut self.frames);
        frames.clear();
        let mut count = 0;
        let mut is_broken = false;
        while count < BATCH {
            match port.requests.pop(&mut frames) {
                Popped::Frame => count += 1,
                Popped::Nothing => break,
                Popped::Broken => {
                    is_broken = true;
                    break;
                }
            }
        }
        let Some(mut connection) = self.connections[number].take() else { return false };
        connection.client.last_active_s = self.shard.clock.now_s();
        let id = ConnectionId {
            number: u32::try_from(number).unwrap_or(0),
            generation: connection.generation,
        };
        let done = self.serve_light(&mut connection, id, &frames);
        is_broken |= done < frames.len();
        self.frames = frames;
        is_broken |= !self.finish(&mut connection) || !self.watch(number, &mut connection);
        if is_broken {
            connection.client.phase = Phase::Closing;
        }
        self.connections[number] = Some(connection);
        true
    }

    /// Puts the answers made so far into the connection's ring.
    pub(super) fn push_answers(&mut self, connection: &mut Connection) {
        if let Some(port) = connection.light.as_mut().and_then(|light| light.port.as_mut()) {
            let long = port.push_all(&self.out);
            self.out.clear();
            self.out.extend_from_slice(&long);
        }
    }

    /// Ends connections of rings whose other side broke the rules.
    fn check_port(&mut self, number: usize) {
        let is_over = self.connections[number].as_ref().is_some_and(|connection| {
            connection.client.phase == Phase::Closing && connection.light.is_some()
        });
        if is_over {
            self.ended_ports.push(number);
        }
    }

    /// Prepares all rings for a sleep; false if a request has come meanwhile.
    pub(super) fn rings_fall_asleep(&mut self) -> bool {
        let mut all_asleep = true;
        self.for_each_port(|port| {
            all_asleep &= port.held.is_empty() && port.requests.fall_asleep()
        });
        all_asleep
    }

    pub(super) fn rings_wake_up(&mut self) {
        self.for_each_port(|port| {
            port.requests.wake_up();
            let mut counter = [0; 8];
            let _ = rustix::io::read(&port.wake_server, &mut counter);
        });
    }

    fn for_each_port(&mut self, mut each: impl FnMut(&mut Port)) {
        let members: SmallVec<[u32; 16]> = self.turns.members().collect();
        for number in members {
            let connection = self.connections[number as usize].as_mut();
            if let Some(port) =
                connection.and_then(|it| it.light.as_mut()).and_then(|light| light.port.as_mut())
            {
                each(port);
            }
        }
    }
}

fn make_port(sizes: RingSizes) -> Result<(Port, OwnedFd), Errno> {
    let file = share::create(sizes)?;
    let (requests, answers) = share::map(&file, sizes)?;
    let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let port = Port {
        requests: Reader::new(requests),
        answers: Writer::new(answers),
        answer_bytes_max: frame_bytes_max(sizes.answer_bytes),
        wake_server: bell()?,
        wake_client: bell()?,
        held: Vec::new(),
    };
    Ok((port, file))
}

impl Port {
    /// What the thread waits for while it sleeps.
    pub(super) fn bell(&self) -> &OwnedFd {
        &self.wake_server
    }

    /// Puts answers into the ring as far as it takes them; those that are too long for it come back, for
    /// the socket.
    fn push_all(&mut self, answers: &[u8]) -> Vec<u8> {
        let mut long = Vec::new();
        if !self.held.is_empty() {
            self.held.extend_from_slice(answers);
            let held = std::mem::take(&mut self.held);
            let done = self.push_some(&held, &mut long);
            self.held.extend_from_slice(&held[done..]);
        } else {
            let done = self.push_some(answers, &mut long);
            self.held.extend_from_slice(&answers[done..]);
        }
        long
    }

    /// Pushes frames while there is room; how many bytes are done.
    fn push_some(&mut self, answers: &[u8], long: &mut Vec<u8>) -> usize {
        let mut at = 0;
        while let Some(Ok(length)) = frame_length(&answers[at..]) {
            let frame = &answers[at..at + length];
            if length > self.answer_bytes_max {
                long.extend_from_slice(frame);
            } else if !self.answers.push(frame) {
                break;
            }
            at += length;
        }
        if at > 0 && self.answers.reader_sleeps() {
            // Fails only when the counter is full, and then the client is awake.
            let _ = rustix::io::write(&self.wake_client, &1u64.to_ne_bytes());
        }
        at
    }
}
