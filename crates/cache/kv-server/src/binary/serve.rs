//! Answering a client's binary requests, in batches, as [`crate::text::serve`] does for text.

use smallvec::SmallVec;

use crate::below::Parked;
use crate::clients::connection::{Client, Phase};
use crate::clients::sockets::{Connection, OUT_BYTES_MAX};
use crate::mail::mailbox::{Ask, ConnectionId};
use crate::text::BATCH;
use crate::worker::Worker;
use farpool_kv_protocol::binary::{
    self, Head, KeyRequest, Request, Rules, Scan, Status, push_refusal, scan,
};
use farpool_kv_protocol::request::KeyWord;
use farpool_kv_store::StoreError;
use farpool_kv_store::item::ItemView;
use farpool_kv_store::key::HashedKey;

/// A request whose key is being loaded.
struct Planned<'a> {
    head: Head,
    request: Request<'a>,
    /// All of its bytes, value included.
    bytes: &'a [u8],
    /// Hash of its key; 0 if it has none.
    hash: u64,
}

impl Worker {
    /// Answers the complete requests in `input` until the client's turn is used up. Returns the
    /// bytes consumed.
    pub(crate) fn serve_binary(
        &mut self,
        connection: &mut Connection,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        let mut at = 0;
        let mut budget = self.me.shared.settings.requests_per_turn;
        connection.client.has_turn_left = false;
        while at < input.len() {
            let client = &mut connection.client;
            match client.phase {
                Phase::Closing => return input.len(),
                Phase::Skipping { .. } => {
                    at += client.skip(input.len() - at);
                    continue;
                }
                Phase::Requests => {}
            }
            let planned = self.plan_binary(client, &input[at..], budget.min(BATCH));
            if planned.is_empty() {
                break;
            }
            for it in &planned {
                self.answer_binary(client, id, it);
                self.settle_victims();
                at += it.bytes.len();
                client.requests += 1;
                budget -= 1;
                let is_full = self.clients.out.len() >= OUT_BYTES_MAX || client.is_held_up();
                if is_full || client.phase != Phase::Requests {
                    break;
                }
            }
            if !self.end_batch(connection, budget, at < input.len()) {
                break;
            }
        }
        if connection.client.phase == Phase::Closing { input.len() } else { at }
    }

    /// As [`Self::refuse`] of the text protocol.
    pub(crate) fn refuse_binary(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        input: &[u8],
    ) -> usize {
        let Scan::Incomplete { refused: Some(refused), .. } = scan(input, &self.rules(client))
        else {
            return 0;
        };
        let (bytes, head, request) = refused;
        let planned = Planned { head, request, bytes: &input[..bytes], hash: 0 };
        self.answer_binary(client, id, &planned);
        client.requests += 1;
        self.clients.settle(client);
        self.settle_victims();
        bytes
    }

    fn rules(&self, client: &Client) -> Rules {
        Rules {
            limits: self.me.limits,
            has_sasl: self.me.shared.settings.credentials.is_some(),
            is_authenticated: client.is_authenticated,
        }
    }

    /// As [`Self::rules`], for requests that were found complete and allowed before.
    fn rules_of_passed_on(&self) -> Rules {
        Rules { limits: self.me.limits, has_sasl: false, is_authenticated: true }
    }

    #[inline]
    fn hash_of(&self, request: &Request<'_>) -> u64 {
        if let Request::Key(request) = request {
            self.shard.store.hash_of(request.key())
        } else {
            0
        }
    }

    /// Parses requests and begins to load the items they name.
    fn plan_binary<'a>(
        &mut self,
        client: &mut Client,
        input: &'a [u8],
        most: usize,
    ) -> SmallVec<[Planned<'a>; BATCH]> {
        let rules = self.rules(client);
        let mut planned: SmallVec<[Planned<'a>; BATCH]> = SmallVec::new();
        let mut at = 0;
        while planned.len() < most && at < input.len() {
            match scan(&input[at..], &rules) {
                Scan::Incomplete { want_bytes, .. } => {
                    client.want_bytes = want_bytes;
                    break;
                }
                Scan::Request { bytes, head, request } => {
                    let hash = self.hash_of(&request);
                    let is_on_key = matches!(request, Request::Key(_));
                    if is_on_key && self.me.owns(hash) {
                        self.shard.store.prefetch_entry(hash);
                    }
                    let bytes = &input[at..at + bytes];
                    planned.push(Planned { head, request, bytes, hash });
                    at += bytes.len();
                    // Others may change how the stream goes on.
                    if !is_on_key {
                        break;
                    }
                }
            }
        }
        if planned.len() > 1 {
            planned.iter().for_each(|it| self.prefetch_own_item(it.hash));
        }
        planned
    }

    #[inline]
    fn answer_binary(&mut self, client: &mut Client, id: ConnectionId, planned: &Planned<'_>) {
        let head = planned.head;
        match &planned.request {
            Request::Key(request) => self.answer_binary_key(client, id, request, planned),
            Request::Server(request) => self.answer_binary_server(client, id, head, request),
            &Request::Refused { refusal, skip_bytes, drop } => {
                let key = drop.map(|word| KeyWord { word, is_base64: false });
                match refusal.status {
                    Status::TooLarge => self.refuse_value(client, id, StoreError::TooLarge, key),
                    Status::OutOfMemory => {
                        self.refuse_value(client, id, StoreError::OutOfMemory, key);
                    }
                    _ => {}
                }
                push_refusal(&mut self.clients.out, head, refusal);
                if skip_bytes > 0 {
                    client.phase = Phase::Skipping { bytes: skip_bytes };
                }
            }
            &Request::RefusedForGood(refusal) => {
                push_refusal(&mut self.clients.out, head, refusal);
                client.is_refused = true;
                client.phase = Phase::Closing;
            }
            Request::NoRequest => {
                client.is_refused = true;
                client.phase = Phase::Closing;
            }
        }
    }

    #[inline]
    fn answer_binary_key(
        &mut self,
        client: &mut Client,
        id: ConnectionId,
        request: &KeyRequest<'_>,
        planned: &Planned<'_>,
    ) {
        let hash = planned.hash;
        let owner = self.me.owner_of(hash);
        if owner != self.me.number {
            let ask = Ask::Binary { hash };
            return self.forward(client, id, owner, ask, [planned.bytes, b""]);
        }
        let key = HashedKey { key: request.key(), hash };
        if self.is_below(key, request.replaces()) {
            let origin = self.await_slow(client, id);
            let what = Parked::Binary { is_plain_read: request.is_plain_read() };
            return self.park(key, origin, what, planned.bytes);
        }
        binary::execute(&mut self.shard, planned.head, request, hash, &mut self.clients.out);
    }

    /// The request on a key that its client's thread has passed on.
    fn passed_on<'a>(&self, bytes: &'a [u8]) -> Option<(Head, KeyRequest<'a>)> {
        match scan(bytes, &self.rules_of_passed_on()) {
            Scan::Request { head, request: Request::Key(request), .. } => Some((head, request)),
            _ => {
                debug_assert!(false, "only whole requests on keys are passed on");
                None
            }
        }
    }

    /// The key of a passed-on request and how the request is to be parked, if it has to wait for a
    /// lower tier.
    pub(crate) fn binary_below<'a>(
        &self,
        bytes: &'a [u8],
        hash: u64,
    ) -> Option<(HashedKey<'a>, Parked)> {
        let (_, request) = self.passed_on(bytes)?;
        let key = HashedKey { key: request.key(), hash };
        let what = Parked::Binary { is_plain_read: request.is_plain_read() };
        self.is_below(key, request.replaces()).then_some((key, what))
    }

    /// Answers a request that its client's thread has passed on, or that was parked.
    pub(crate) fn answer_binary_passed_on(&mut self, bytes: &[u8], hash: u64, out: &mut Vec<u8>) {
        if let Some((head, request)) = self.passed_on(bytes) {
            binary::execute(&mut self.shard, head, &request, hash, out);
        }
    }

    /// Answers a parked plain read from the record of its item.
    pub(crate) fn answer_binary_from_record(
        &self,
        bytes: &[u8],
        (item, cas): (&ItemView<'_>, u64),
        out: &mut Vec<u8>,
    ) {
        if let Some((head, request)) = self.passed_on(bytes) {
            binary::push_record(head, &request, item, cas, out);
        }
    }
}
