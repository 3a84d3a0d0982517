//! Properties that must hold for any bytes sent as KeyVault: used by the mutation test and by
//! fuzz/.

use std::collections::HashMap;
use std::num::NonZeroU32;

use farpool_keyvault::frame::{HEADER_BYTES, Header, Status, frame_length};
use farpool_keyvault::items::ItemMemory;
use farpool_keyvault::message::{
    Hello, Item, LeasedItem, LeasesGranted, MaybeLeased, Request, read_found, read_numbers,
};
use farpool_kv_protocol::Shard;
use farpool_kv_protocol::keyvault::{self, AnswerHead};
use farpool_kv_protocol::lease::{self, LeaseTable};
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::lease::LeasesHeld;
use farpool_policy::CacheKind;

use super::exercise::full_shard;

/// One connection that may lease, and the values that its leases must show.
struct Leasing {
    table: LeaseTable,
    memory: ItemMemory,
    kept: HashMap<NonZeroU32, (LeasedItem, Vec<u8>)>,
}

impl Leasing {
    fn answer(&mut self, shard: &mut Shard, header: &Header, request: &Request<'_>) -> Vec<u8> {
        let (table, mut out) = (&mut self.table, Vec::new());
        let head = AnswerHead { header, checked: true };
        let hash = request.key().map_or(0, |key| shard.store.hash_of(key));
        match *request {
            Request::GetLease { key } => {
                lease::answer_get(shard, table, head, HashedKey { key, hash }, &mut out);
                if let Some(MaybeLeased::Lease(it)) = MaybeLeased::read(&out[HEADER_BYTES..]) {
                    let found = shard.store.find(key, hash).expect("it was leased just now");
                    let value = shard.store.view(found).value().to_vec();
                    assert!(self.kept.insert(it.lease, (it, value)).is_none(), "one number twice");
                }
            }
            Request::Release(ids) => {
                lease::answer_release(shard, table, head, ids, &mut out);
                ids.iter().for_each(|id| drop(self.kept.remove(&id)));
            }
            _ => keyvault::answer(shard, head, request, hash, &mut out),
        }
        out
    }

    fn check(&self, shard: &Shard) {
        for (it, value) in self.kept.values() {
            let read = self.memory.value(it.at, it.value_bytes.into());
            assert!(read.is_some_and(|read| read == value), "a leased value has changed");
        }
        assert_eq!(self.kept.len(), self.table.len());
        assert_eq!(self.kept.len(), shard.store.leases_held().leases);
    }
}

/// Any stream of frames is answered without a panic, each request with one whole frame that a
/// client can read; memory stays bounded, and leased values stay as they are.
pub(crate) fn answer_any(bytes: &[u8], policy: CacheKind) {
    let mut shard = full_shard(true, policy);
    let (file, memory_bytes) = shard.store.readable_by_others().expect("it gives leases");
    let memory = ItemMemory::map(file, memory_bytes as u64).expect("there is address space");
    let mut leasing = Leasing { table: LeaseTable::new(2), memory, kept: HashMap::new() };
    let mut rest = bytes;
    while let Some(Ok(length)) = frame_length(rest) {
        let Some((frame, behind)) = rest.split_at_checked(length) else { break };
        rest = behind;
        let (Ok(header), body) = (Header::read(frame, false), &frame[HEADER_BYTES..]) else {
            continue;
        };
        let Ok(request) = Request::read(header.opcode, body) else { continue };
        // A request that is written and parsed again is the same.
        let mut written = Vec::new();
        request.write(&mut written);
        assert_eq!(Request::read(header.opcode, &written), Ok(request));
        let out = leasing.answer(&mut shard, &header, &request);
        let answer = Header::read(&out, true).expect("an answer is a frame");
        assert_eq!((answer.length as usize, answer.request), (out.len(), header.request));
        assert!(answer.status.is_some_and(|it| it == Status::Ok || out.len() == HEADER_BYTES));
        let (used, limit) = (shard.store.used_bytes(), shard.store.settings().limit_bytes);
        assert!(used <= limit + (128 << 10), "{used} bytes of {limit}");
        leasing.check(&shard);
    }
    leasing.table.release_all(&mut shard);
    assert_eq!(shard.store.leases_held(), LeasesHeld::default());
    // What a client reads from a server that lies.
    let _ = (Hello::read(bytes), Item::read(bytes), read_found(bytes), read_numbers(bytes));
    let _ = (MaybeLeased::read(bytes), LeasesGranted::read(bytes));
}
