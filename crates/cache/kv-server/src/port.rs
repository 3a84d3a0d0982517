//! Connections in shared memory: their rings, whose turn it is, and what wakes either side.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use farpool_keyvault::frame::{Header, Status, begin, finish, frame_length};
use farpool_keyvault::ring::{Popped, Reader, Writer, frame_bytes_max};
use farpool_keyvault::share::{self, Ring, RingSizes};
use farpool_units::exactly;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use smallvec::SmallVec;

use super::connection::{Client, Phase};
use super::light::{BATCH, Light, Source};
use super::sockets::{Connection, ConnectionId};
use super::worker::Worker;
use farpool_kv_protocol::light;

/// A client tells nobody when it makes room in its ring of answers: one that was full is looked at so often.
const FULL_RING_LOOK: Duration = Duration::from_millis(1);

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
    /// How much of them has gone since.
    held_done: usize,
}

impl Worker {
    /// Moves a connection into shared memory: the answer carries memory and the two bells.
    pub(super) fn share(
        &mut self,
        connection: &mut Connection,
        state: &mut Light,
        header: &Header,
        sizes: RingSizes,
    ) {
        let head = state.head(header);
        let mut reply = Vec::new();
        let start = begin(&mut reply, Header { status: Some(Status::Ok), ..*header });
        reply.extend_from_slice(&exactly::<u32, _>(sizes.request_bytes).to_le_bytes());
        reply.extend_from_slice(&exactly::<u32, _>(sizes.answer_bytes).to_le_bytes());
        finish(&mut reply, start, head.checked);
        // What is ready goes first; only then do descriptors travel with their own bytes.
        let shared = self.send(connection)
            && connection.client.unsent.is_empty()
            && make_port(sizes)
                .and_then(|(port, file)| {
                    let files = [file.as_fd(), port.wake_server.as_fd(), port.wake_client.as_fd()];
                    let sent = share::send_with_files(&connection.socket, &reply, &files)?;
                    if sent == reply.len() { Ok(port) } else { Err(Errno::MSGSIZE) }
                })
                .map(|port| state.port = Some(port))
                .is_ok();
        if !shared {
            light::answer_status(head, Status::Unsupported, b"", &mut self.out);
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
        if connection.client.is_ring_full {
            // Who does not take his answers is not asked for more requests.
            return self.push_held(number);
        }
        if !connection.client.unsent.is_empty() || connection.client.is_held_up() {
            return false;
        }
        let Some(port) = connection.light.as_mut().and_then(|light| light.port.as_mut()) else {
            return false;
        };
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
        let id = ConnectionId { number: exactly(number), generation: connection.generation };
        let done = self.serve_light(&mut connection, id, (&frames, Source::Ring));
        is_broken |= done < frames.len();
        self.frames = frames;
        is_broken |= !self.finish(&mut connection) || !self.watch(number, &mut connection);
        if is_broken {
            connection.client.phase = Phase::Closing;
        }
        self.connections[number] = Some(connection);
        true
    }

    /// Gives a client that has made room the answers that wait for it; whether it had made some.
    fn push_held(&mut self, number: usize) -> bool {
        let port =
            self.connections[number].as_mut().and_then(|it| it.light.as_mut()?.port.as_mut());
        if !port.is_some_and(Port::push_held) {
            return false;
        }
        let Some(mut connection) = self.connections[number].take() else { return false };
        // What it sent meanwhile over the socket has its turn again.
        if !self.finish(&mut connection) || !self.watch(number, &mut connection) {
            connection.client.phase = Phase::Closing;
        }
        self.connections[number] = Some(connection);
        true
    }

    /// Puts the answers made so far into the connection's ring, if it has one. Those that are too long for it stay, for
    /// the socket.
    pub(super) fn push_answers(&mut self, client: &mut Client, light: Option<&mut Light>) {
        if let Some(port) = light.and_then(|light| light.port.as_mut()) {
            let long = port.push_all(&self.out);
            self.out.clear();
            self.out.extend_from_slice(&long);
            client.is_ring_full = !port.held.is_empty();
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

    /// Prepares all rings for a sleep: how long it may last. None if a request has come meanwhile.
    pub(super) fn rings_fall_asleep(&mut self) -> Option<Duration> {
        let mut all_asleep = true;
        let mut limit = Duration::MAX;
        self.for_each_port(|client, port| {
            if client.is_ring_full {
                limit = FULL_RING_LOOK;
            } else if client.unsent.is_empty() && !client.is_held_up() {
                all_asleep &= port.requests.fall_asleep();
            }
            // Others are not asked for requests: what they wait for wakes the thread.
        });
        all_asleep.then_some(limit)
    }

    pub(super) fn rings_wake_up(&mut self) {
        self.for_each_port(|_, port| {
            port.requests.wake_up();
            let mut counter = [0; 8];
            let _ = rustix::io::read(&port.wake_server, &mut counter);
        });
    }

    fn for_each_port(&mut self, mut each: impl FnMut(&Client, &mut Port)) {
        let members: SmallVec<[u32; 16]> = self.turns.members().collect();
        for number in members {
            if let Some(Connection { client, light: Some(light), .. }) =
                self.connections[number as usize].as_mut()
                && let Some(port) = &mut light.port
            {
                each(client, port);
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
        held_done: 0,
    };
    Ok((port, file))
}

impl Port {
    /// What the thread waits for while it sleeps.
    pub(super) fn bell(&self) -> &OwnedFd {
        &self.wake_server
    }

    /// Puts answers into the ring, and keeps what it does not take; those that are too long for it come back.
    fn push_all(&mut self, answers: &[u8]) -> Vec<u8> {
        let (mut long, mut at, mut any) = (Vec::new(), 0, false);
        while let Some(Ok(length)) = frame_length(&answers[at..]) {
            let frame = &answers[at..at + length];
            at += length;
            if length > self.answer_bytes_max {
                long.extend_from_slice(frame);
            } else if self.held.is_empty() && self.answers.push(frame) {
                any = true;
            } else {
                self.held.extend_from_slice(frame);
            }
        }
        self.wake_client(any);
        long
    }

    /// Goes on with answers that found the ring full; whether there was room for one.
    fn push_held(&mut self) -> bool {
        let before = self.held_done;
        while let Some(Ok(length)) = frame_length(&self.held[self.held_done..])
            && self.answers.push(&self.held[self.held_done..self.held_done + length])
        {
            self.held_done += length;
        }
        let any = self.held_done > before;
        if self.held_done == self.held.len() {
            (self.held, self.held_done) = (Vec::new(), 0);
        }
        self.wake_client(any);
        any
    }

    fn wake_client(&self, has_answers: bool) {
        if has_answers && self.answers.reader_sleeps() {
            // Fails only when the counter is full, and then the client is awake.
            let _ = rustix::io::write(&self.wake_client, &1u64.to_ne_bytes());
        }
    }
}
