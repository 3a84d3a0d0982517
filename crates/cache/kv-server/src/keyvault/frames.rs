//! Answering frames: those of a thread's clients, and those that other threads passed on.
//!
//! One address serves all threads: a connection asks in its HELLO for a shard and is handed to that
//! shard's thread. A request for another shard than the thread's own is passed on and answered when
//! that shard has answered; answers may come in any order.

use farpool_keyvault::frame::{
    BROADCAST, FrameError, HEADER_BYTES, Header, Opcode, Status, VERSION, begin, finish,
    frame_length,
};
use farpool_keyvault::message::{Hello, Request, SetMode};
use farpool_keyvault::share::RingSizes;
use farpool_units::exactly;
use smallvec::SmallVec;

use super::state::{BATCH, KeyVaultState, Source};
use crate::below::{Gathered, Parked};
use crate::clients::connection::{Client, Phase};
use crate::clients::sockets::{Connection, OUT_BYTES_MAX};
use crate::mail::mailbox::{Answer, Ask, Batch, ConnectionId, Entry, Origin, Ticket};
use crate::worker::Worker;
use farpool_kv_protocol::keyvault::{self, AnswerHead};
use farpool_kv_protocol::lease;
use farpool_kv_store::key::{HashSeed, HashedKey};

/// The most requests that one connection may have unanswered.
const CREDITS_MAX: u32 = 1024;

/// The beginning of a stream of frames.
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

/// A frame whose key is being loaded.
struct Planned<'a> {
    frame: &'a [u8],
    /// Hash of its one key; None if it has none, or several.
    hash: Option<u64>,
}

/// A request, as read from a frame.
struct Asked<'a> {
    header: Header,
    request: Request<'a>,
    frame: &'a [u8],
    /// Hash of its first key; without a key no meaning.
    hash: u64,
}

/// Reads a frame; `seed` is that of the store's hashes.
fn read_frame(frame: &[u8], checked: bool, seed: HashSeed) -> Result<Asked<'_>, FrameError> {
    read_body(Header::read(frame, checked)?, frame, KeyHash::Seed(seed))
}

/// What is known of the hash of a frame's first key.
#[derive(Debug, Clone, Copy)]
enum KeyHash {
    Known(u64),
    /// It is to be computed with this seed.
    Seed(HashSeed),
}

/// Reads what follows a header.
fn read_body(header: Header, frame: &[u8], hash: KeyHash) -> Result<Asked<'_>, FrameError> {
    if header.status.is_some() {
        return Err(FrameError::Body { opcode: header.opcode });
    }
    let request = Request::read(header.opcode, &frame[HEADER_BYTES..])?;
    let hash = match hash {
        KeyHash::Known(hash) => hash,
        KeyHash::Seed(seed) => request.key().map_or(0, |key| seed.hash_of(key)),
    };
    Ok(Asked { header, request, frame, hash })
}

impl Worker {
    /// Answers the frames in `input`. Returns the bytes consumed.
    pub(crate) fn serve_keyvault(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        (input, source): (&[u8], Source),
    ) -> usize {
        if source == Source::Socket && connection.client.is_ring_full {
            connection.client.has_turn_left = !input.is_empty();
            return 0;
        }
        let Some(mut state) = connection.keyvault.take() else { return input.len() };
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
            if source == Source::Ring {
                continue;
            }
            let is_full =
                self.clients.out.len() >= OUT_BYTES_MAX && !self.put_down(connection, &mut state);
            if is_full || connection.client.is_held_up() {
                connection.client.has_turn_left = at < input.len();
                break;
            }
        }
        connection.keyvault = Some(state);
        at
    }

    /// Hands the client the answers made so far. False if no more can be sent now.
    fn put_down(&mut self, connection: &mut Connection, state: &mut KeyVaultState) -> bool {
        self.clients.push_answers(&mut connection.client, Some(state));
        self.clients.send(connection, &mut self.me.counts) && connection.client.unsent.is_empty()
    }

    /// Answers one batch of frames. Returns the bytes consumed.
    fn serve_frames(
        &mut self,
        connection: &mut Connection,
        state: &mut KeyVaultState,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        let (planned, is_broken) = self.plan_frames(&mut connection.client, input);
        if planned.len() > 1 {
            let hashes = planned.iter().filter_map(|it| it.hash);
            hashes.for_each(|hash| self.shard.store.prefetch_item(hash));
        }
        let mut at = 0;
        for &Planned { frame, hash } in &planned {
            at += frame.len();
            let read = match (Header::read(frame, !state.unchecked), hash) {
                (Ok(header), Some(hash)) if self.is_read_here(state, &header, hash) => {
                    let key = HashedKey { key: &frame[HEADER_BYTES..], hash };
                    keyvault::answer_get(
                        &mut self.shard,
                        state.head(&header),
                        key,
                        &mut self.clients.out,
                    );
                    continue;
                }
                (Ok(header), hash) => {
                    let seed = KeyHash::Seed(self.shard.store.hash_seed());
                    read_body(header, frame, hash.map_or(seed, KeyHash::Known))
                }
                (Err(error), _) => Err(error),
            };
            match read {
                Ok(asked) => self.answer_frame(connection, state, id, &asked),
                Err(error) => self.refuse_frame(&mut connection.client, state, &error, frame),
            }
            self.settle_victims();
            if connection.client.phase == Phase::Closing {
                return input.len();
            }
        }
        if is_broken {
            connection.client.phase = Phase::Closing;
            return input.len();
        }
        at
    }

    /// Whether a frame is of the most common kind: a read of one key, with this hash, that this
    /// shard's memory answers.
    #[inline]
    fn is_read_here(&self, state: &KeyVaultState, header: &Header, hash: u64) -> bool {
        (header.opcode, header.status) == (Opcode::Get, None)
            && self.me.owns(hash)
            && state.has_greeted
            && self.below.is_none()
    }

    /// Splits a stream into frames and begins to load the items they name. True if the stream
    /// cannot be parsed beyond the frames returned.
    fn plan_frames<'a>(
        &self,
        client: &mut Client,
        input: &'a [u8],
    ) -> (SmallVec<[Planned<'a>; BATCH]>, bool) {
        let mut planned = SmallVec::new();
        let mut at = 0;
        while planned.len() < BATCH && at < input.len() {
            let frame = match next_frame(&input[at..]) {
                Next::Frame(frame) => frame,
                Next::Incomplete { want_bytes } => {
                    client.want_bytes = want_bytes;
                    break;
                }
                Next::Broken => return (planned, true),
            };
            at += frame.len();
            let hash = Request::key_ahead(frame).map(|key| self.shard.store.hash_of(key));
            if let Some(hash) = hash.filter(|&hash| self.me.owns(hash)) {
                self.shard.store.prefetch_entry(hash);
            }
            planned.push(Planned { frame, hash });
            // A frame that changes how the stream is read is answered before the next frame is
            // parsed.
            if matches!(Opcode::from_code(frame[3]), Some(Opcode::Hello | Opcode::Share)) {
                break;
            }
        }
        (planned, false)
    }

    /// Answers a damaged frame with a request to repeat it; a malformed one ends the connection.
    fn refuse_frame(
        &mut self,
        client: &mut Client,
        state: &KeyVaultState,
        error: &FrameError,
        frame: &[u8],
    ) {
        let number = frame[8..].first_chunk().expect("a frame has a whole header");
        let header = Header::read(frame, false).unwrap_or(Header {
            length: 0,
            opcode: Opcode::Noop,
            status: None,
            shard: 0,
            connection: 0,
            request: u32::from_le_bytes(*number),
        });
        let status = match error {
            FrameError::Checksum { .. } => Status::Damaged,
            FrameError::Opcode { .. } => Status::Unsupported,
            _ => Status::Malformed,
        };
        if status == Status::Malformed {
            client.phase = Phase::Closing;
        }
        keyvault::answer_status(state.head(&header), status, b"", &mut self.clients.out);
    }

    fn answer_frame(
        &mut self,
        connection: &mut Connection,
        state: &mut KeyVaultState,
        id: ConnectionId,
        asked: &Asked<'_>,
    ) {
        let Asked { header, request, .. } = asked;
        let head = state.head(header);
        if !state.has_greeted && !matches!(request, Request::Hello(_)) {
            connection.client.phase = Phase::Closing;
            return keyvault::answer_status(head, Status::Malformed, b"", &mut self.clients.out);
        }
        match *request {
            Request::Hello(hello) => {
                self.greet(connection, state, id, (header, hello), asked.frame)
            }
            // With a second SHARE the bells of the first would stay registered for ever.
            Request::Share { .. } if !connection.is_local || state.ring_client.is_some() => {
                keyvault::answer_status(head, Status::Unsupported, b"", &mut self.clients.out);
            }
            Request::Share { request_bytes, answer_bytes } => {
                let sizes = RingSizes::fitting(request_bytes, answer_bytes);
                // Ready answers are sent first, so that the descriptors travel with their own
                // bytes.
                let is_shared = self.clients.send(connection, &mut self.me.counts)
                    && connection.client.unsent.is_empty()
                    && state.share(&connection.socket, header, sizes);
                if !is_shared {
                    keyvault::answer_status(head, Status::Unsupported, b"", &mut self.clients.out);
                }
            }
            Request::Flush { delay_s } => {
                connection.client.awaited += self.me.shared.shards() - 1;
                self.flush(state, id, header, delay_s);
            }
            Request::Noop => keyvault::answer_status(head, Status::Ok, b"", &mut self.clients.out),
            Request::Leases { bytes_min } => {
                // Ready answers are sent first, so that the descriptor travels with its own bytes.
                let is_granted = connection.is_local
                    && state.may_lease()
                    && self.clients.send(connection, &mut self.me.counts)
                    && connection.client.unsent.is_empty()
                    && state.lease(&connection.socket, header, &self.shard.store, bytes_min);
                if !is_granted {
                    keyvault::answer_status(head, Status::Unsupported, b"", &mut self.clients.out);
                }
            }
            Request::Release(ids) => match &mut state.leases {
                Some(leases) => {
                    let shard = &mut self.shard;
                    lease::answer_release(shard, leases, head, ids, &mut self.clients.out);
                }
                None => {
                    keyvault::answer_status(head, Status::Unsupported, b"", &mut self.clients.out)
                }
            },
            _ => {
                let is_owed = self.answer_on_keys(state, id, asked);
                connection.client.awaited += usize::from(is_owed);
            }
        }
    }

    /// Answers a request on keys, parks it for a lower tier, or passes it on to the shard that owns
    /// its keys. True if the answer is still to come.
    fn answer_on_keys(
        &mut self,
        state: &mut KeyVaultState,
        id: ConnectionId,
        asked: &Asked<'_>,
    ) -> bool {
        let Asked { header, request, hash, frame } = asked;
        let head = state.head(header);
        let checked = head.checked;
        let shards = self.me.shared.shards();
        let owner = self.me.owner_of(*hash);
        if let Request::MultiGet(keys) = *request
            && let Some(other) = keyvault::foreign_key_owner(keys, owner, shards)
        {
            let other = exactly::<u16, _>(other).to_le_bytes();
            keyvault::answer_status(head, Status::WrongShard, &other, &mut self.clients.out);
            return false;
        }
        let address = id.address(Ticket(0));
        if owner != self.me.number {
            self.mail.ask(owner, address, Ask::KeyVault { checked }, |bytes| {
                bytes.extend_from_slice(frame);
            });
            self.me.counts.forwarded += 1;
            return true;
        }
        let origin = Origin { thread: self.me.number, address };
        match *request {
            Request::MultiGet(keys) => match self.gather(keys, head, origin) {
                Gathered::AllInMemory => {}
                Gathered::Waits => return true,
                Gathered::Whole(gathering) => {
                    gathering.write(&mut self.clients.out);
                    return false;
                }
            },
            _ => {
                if let Some(key) = self.key_below(request, *hash) {
                    self.park(key, origin, Parked::KeyVault { checked }, frame);
                    return true;
                }
            }
        }
        let (shard, out) = (&mut self.shard, &mut self.clients.out);
        match (request, &mut state.leases) {
            (Request::GetLease { key }, Some(leases)) => {
                let key = HashedKey { key, hash: *hash };
                lease::answer_get(shard, leases, head, key, out);
            }
            _ => keyvault::answer(shard, head, request, *hash, out),
        }
        false
    }

    /// The key of a request, other than MULTIGET, if the request has to wait for a lower tier.
    fn key_below<'a>(&self, request: &Request<'a>, hash: u64) -> Option<HashedKey<'a>> {
        self.below.as_ref()?;
        let replaces = matches!(request, Request::Set { mode: SetMode::Set, cas: 0, .. });
        let key = HashedKey { key: request.key()?, hash };
        self.is_below(key, replaces).then_some(key)
    }

    /// Parks a frame of another thread if it has to wait. True if it is parked or already answered.
    pub(crate) fn park_keyvault_ask(
        &mut self,
        origin: Origin,
        frame: &[u8],
        checked: bool,
        answers: &mut Batch<Answer>,
    ) -> bool {
        let Ok(Asked { header, request, hash, .. }) =
            read_frame(frame, false, self.shard.store.hash_seed())
        else {
            return false;
        };
        if let Request::MultiGet(keys) = request {
            match self.gather(keys, AnswerHead { header: &header, checked }, origin) {
                Gathered::AllInMemory => return false,
                Gathered::Waits => {}
                Gathered::Whole(gathering) => {
                    answers.push(origin.address, Answer::Bytes, |out| gathering.write(out));
                }
            }
            return true;
        }
        let Some(key) = self.key_below(&request, hash) else { return false };
        self.park(key, origin, Parked::KeyVault { checked }, frame);
        true
    }

    fn greet(
        &mut self,
        connection: &mut Connection,
        state: &mut KeyVaultState,
        id: ConnectionId,
        (header, hello): (&Header, Hello),
        frame: &[u8],
    ) {
        let shards = self.me.shared.shards();
        let wanted = usize::from(hello.shard);
        let is_elsewhere = hello.shard != BROADCAST && wanted != self.me.number;
        if hello.version != VERSION || state.has_greeted || is_elsewhere && wanted >= shards {
            connection.client.phase = Phase::Closing;
            let head = AnswerHead { header, checked: true };
            return keyvault::answer_status(head, Status::Unsupported, b"", &mut self.clients.out);
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
            shard: exactly(shards),
            credits: state.credits,
            unchecked: hello.unchecked,
        };
        let number = exactly(id.number & 0xffff);
        let shard = exactly(self.me.number);
        let answer = Header { status: Some(Status::Ok), connection: number, shard, ..*header };
        let start = begin(&mut self.clients.out, answer);
        granted.write(&mut self.clients.out);
        finish(&mut self.clients.out, start, true);
        state.unchecked = hello.unchecked;
    }

    fn flush(
        &mut self,
        state: &mut KeyVaultState,
        id: ConnectionId,
        header: &Header,
        delay_s: u32,
    ) {
        let now_s = self.shard.clock.now_s();
        let at_s = (delay_s > 0).then(|| now_s.saturating_add(delay_s));
        let ask = Ask::Flush { at_s };
        self.me.counts.flush_commands += 1;
        self.do_for_all(ask);
        let others = self.me.shared.shards() - 1;
        if others == 0 {
            return keyvault::answer_status(
                state.head(header),
                Status::Ok,
                b"",
                &mut self.clients.out,
            );
        }
        state.passed_on.push((*header, others));
        let ticket = Ticket(header.request.into());
        let address = id.address(ticket);
        self.mail.ask_others(&self.me, address, ask);
    }

    /// Answers a frame that another thread passed on.
    pub(crate) fn answer_passed_on(&mut self, frame: &[u8], checked: bool, out: &mut Vec<u8>) {
        match read_frame(frame, false, self.shard.store.hash_seed()) {
            Ok(it) if keyvault::is_on_keys(it.header.opcode) => {
                let head = AnswerHead { header: &it.header, checked };
                keyvault::answer(&mut self.shard, head, &it.request, it.hash, out);
            }
            _ => debug_assert!(false, "frames are checked before they are passed on"),
        }
    }

    /// Takes another shard's answer to a KeyVault connection.
    pub(crate) fn take_keyvault_answer(
        &mut self,
        state: &mut KeyVaultState,
        entry: &Entry<Answer>,
        bytes: &[u8],
    ) {
        match entry.what {
            Answer::Bytes => self.clients.out.extend_from_slice(bytes),
            Answer::Parked | Answer::Part(_) => {}
            Answer::Report(_) | Answer::Listed(_) => {
                let at = state
                    .passed_on
                    .iter()
                    .position(|(it, _)| u64::from(it.request) == entry.address.ticket.0);
                let Some(at) = at else { return };
                state.passed_on[at].1 -= 1;
                if state.passed_on[at].1 == 0 {
                    let (header, _) = state.passed_on.swap_remove(at);
                    keyvault::answer_status(
                        state.head(&header),
                        Status::Ok,
                        b"",
                        &mut self.clients.out,
                    );
                }
            }
        }
    }
}
