//! KeyVault requests on one shard: the semantics of the text commands in another encoding.

use farpool_keyvault::frame::{
    FRAME_BYTES_MAX, HEADER_BYTES, Header, Opcode, Status, begin, finish, push,
};
use farpool_keyvault::message::{
    FOUND_BYTES, ITEM_HEAD_BYTES, Item, Keys, Request, SetMode, begin_found, finish_found,
};
use farpool_keyvault::owner::{hash_key, shard_of};

use super::Shard;
use super::change::{
    self, Change, ChangeError, Changed, DeleteError, DeletedBy, Deletion, Initial,
};
use super::classic::{self, Outcome, Wish};
use super::command::StoreMode;
use super::reply::TOO_LARGE;
use farpool_kv_store::Found;
use farpool_kv_store::key::HashedKey;

/// The head of an answer: the header of its request, and whether it has a checksum.
#[derive(Debug, Clone, Copy)]
pub struct AnswerHead<'a> {
    pub header: &'a Header,
    pub checked: bool,
}

/// Appends the whole answer to a request on keys of this shard.
#[inline]
pub fn answer(
    shard: &mut Shard,
    head: AnswerHead<'_>,
    request: &Request<'_>,
    hash: u64,
    out: &mut Vec<u8>,
) {
    match *request {
        // No lease is asked of this function, so GETLEASE gets a copy.
        Request::Get { key } | Request::GetLease { key } => {
            answer_get(shard, head, HashedKey { key, hash }, out);
        }
        _ => answer_by(head, out, |out| execute(shard, request, hash, out)),
    }
}

/// Appends the answer to a read of one item, in one piece: most requests are of this kind.
#[inline]
pub fn answer_get(
    shard: &mut Shard,
    head: AnswerHead<'_>,
    HashedKey { key, hash }: HashedKey<'_>,
    out: &mut Vec<u8>,
) {
    let Some(found) = read(shard, key, hash) else {
        return answer_status(head, Status::NotFound, b"", out);
    };
    let item = item_of(shard, found);
    if item.value.len() + HEADER_BYTES + ITEM_HEAD_BYTES > FRAME_BYTES_MAX {
        return answer_status(head, Status::TooLarge, b"", out);
    }
    let header = Header { status: Some(Status::Ok), ..*head.header };
    push(out, header, [&item.head(), item.value], head.checked);
}

/// Appends an answer whose body `execute` writes. Only an answer with status OK has a body.
pub fn answer_by(
    AnswerHead { header, checked }: AnswerHead<'_>,
    out: &mut Vec<u8>,
    execute: impl FnOnce(&mut Vec<u8>) -> Status,
) {
    let start = begin(out, Header { status: Some(Status::Ok), ..*header });
    let body_at = out.len();
    let status = execute(out);
    if status != Status::Ok {
        out.truncate(body_at);
        let head = Header { status: Some(status), ..*header }.to_bytes();
        out[start..body_at].copy_from_slice(&head);
    }
    finish(out, start, checked);
}

/// Appends an answer with the given status and body.
pub fn answer_status(
    AnswerHead { header, checked }: AnswerHead<'_>,
    status: Status,
    body: &[u8],
    out: &mut Vec<u8>,
) {
    push(out, Header { status: Some(status), ..*header }, [body, b""], checked);
}

fn execute(shard: &mut Shard, request: &Request<'_>, hash: u64, out: &mut Vec<u8>) -> Status {
    match *request {
        Request::GetAndTouch { key, exptime } => match touch(shard, key, hash, exptime) {
            Some(found) => {
                shard.store.note_read(found);
                push_item(shard, found, out)
            }
            None => Status::NotFound,
        },
        Request::Touch { key, exptime } => match touch(shard, key, hash, exptime) {
            Some(_) => Status::Ok,
            None => Status::NotFound,
        },
        Request::MultiGet(keys) => read_many(shard, keys, out),
        Request::Set { mode, key, value, client_flags, exptime, cas } => {
            let wish = Wish {
                client_flags,
                expires_s: shard.clock.expiry_s(exptime),
                cas,
                ..Wish::new(store_mode(mode, cas), HashedKey { key, hash }, value)
            };
            set(shard, &wish, out)
        }
        Request::Delete { key, cas } => delete(shard, HashedKey { key, hash }, cas),
        Request::Change { key, delta, subtracts, initial, exptime } => {
            let expires_s = shard.clock.expiry_s(exptime);
            let initial = initial.map(|number| Initial { number, expires_s, marks: 0 });
            let wanted = Change::new(HashedKey { key, hash }, delta, !subtracts);
            change(shard, &Change { initial, ..wanted }, out)
        }
        Request::Noop => Status::Ok,
        // GETs were answered by the caller; the others are not requests on keys.
        Request::Get { .. }
        | Request::GetLease { .. }
        | Request::Hello(_)
        | Request::Flush { .. }
        | Request::Share { .. }
        | Request::Leases { .. }
        | Request::Release(_) => Status::Unsupported,
    }
}

#[inline]
pub fn read(shard: &mut Shard, key: &[u8], hash: u64) -> Option<Found> {
    let found = shard.store.find(key, hash);
    shard.counts.cmd_get += 1;
    shard.observe_read(key, hash, found);
    match found {
        Some(found) => {
            shard.counts.get_hits += 1;
            shard.store.note_read(found);
        }
        None => shard.counts.get_misses += 1,
    }
    found
}

pub(super) fn push_item(shard: &Shard, found: Found, out: &mut Vec<u8>) -> Status {
    let item = item_of(shard, found);
    if item.value.len() + HEADER_BYTES + FOUND_BYTES > FRAME_BYTES_MAX {
        return Status::TooLarge;
    }
    item.write(out);
    Status::Ok
}

/// An item as answers describe it.
#[inline]
pub fn item_of(shard: &Shard, found: Found) -> Item<'_> {
    let (view, cas) = shard.store.view_with_cas(found);
    Item { client_flags: view.client_flags(), cas, value: view.value() }
}

/// Looks keys up until the answer is as long as a frame can be; the client then requests the rest.
fn read_many(shard: &mut Shard, keys: Keys<'_>, out: &mut Vec<u8>) -> Status {
    let hashes: Vec<u64> = keys.iter().map(|key| shard.store.hash_of(key)).collect();
    hashes.iter().for_each(|&hash| shard.store.prefetch_entry(hash));
    hashes.iter().for_each(|&hash| shard.store.prefetch_item(hash));
    let start = out.len();
    let at = begin_found(out);
    let mut looked_at = 0;
    for ((index, key), &hash) in (0u16..).zip(keys.iter()).zip(&hashes) {
        if let Some(found) = shard.store.find(key, hash) {
            let bytes = shard.store.view(found).value().len() + FOUND_BYTES;
            if out.len() - start + bytes + HEADER_BYTES > FRAME_BYTES_MAX {
                if looked_at == 0 {
                    return Status::TooLarge;
                }
                break;
            }
            let found = read(shard, key, hash).unwrap_or(found);
            item_of(shard, found).write_found(index, out);
        } else {
            shard.counts.cmd_get += 1;
            shard.counts.get_misses += 1;
        }
        looked_at = index + 1;
    }
    finish_found(out, at, looked_at);
    Status::Ok
}

fn touch(shard: &mut Shard, key: &[u8], hash: u64, exptime: i32) -> Option<Found> {
    shard.counts.cmd_touch += 1;
    let Some(found) = shard.store.find(key, hash) else {
        shard.counts.touch_misses += 1;
        return None;
    };
    shard.counts.touch_hits += 1;
    let expires_s = shard.clock.expiry_s(exptime);
    // If there is no room for the longer item, the old expiry stays.
    Some(shard.store.set_expiry(found, hash, expires_s).unwrap_or(found))
}

const fn store_mode(mode: SetMode, cas: u64) -> StoreMode {
    match mode {
        SetMode::Set | SetMode::Replace if cas != 0 => StoreMode::Cas,
        SetMode::Set => StoreMode::Set,
        SetMode::Add => StoreMode::Add,
        SetMode::Replace => StoreMode::Replace,
        SetMode::Append => StoreMode::Append,
        SetMode::Prepend => StoreMode::Prepend,
    }
}

fn set(shard: &mut Shard, wish: &Wish<'_>, out: &mut Vec<u8>) -> Status {
    shard.count_set(wish.key);
    match classic::store(shard, wish) {
        Outcome::Stored(found) => {
            out.extend_from_slice(&shard.store.cas(found).to_le_bytes());
            Status::Ok
        }
        Outcome::Exists => Status::Exists,
        Outcome::NotFound => Status::NotFound,
        Outcome::NotStored => Status::NotStored,
        Outcome::Failed(TOO_LARGE) => Status::TooLarge,
        Outcome::Failed(_) => Status::OutOfMemory,
    }
}

fn delete(shard: &mut Shard, key: HashedKey<'_>, cas: u64) -> Status {
    let deletion = Deletion { key, cas: (cas != 0).then_some(cas), by: DeletedBy::KeyVault };
    match change::delete(shard, &deletion) {
        Ok(()) => Status::Ok,
        Err(DeleteError::NotFound) => Status::NotFound,
        Err(DeleteError::CasDiffers) => Status::Exists,
    }
}

fn change(shard: &mut Shard, wanted: &Change<'_>, out: &mut Vec<u8>) -> Status {
    match change::change(shard, wanted) {
        Ok(Changed { found, number, .. }) => {
            out.extend_from_slice(&number.to_le_bytes());
            out.extend_from_slice(&shard.store.cas(found).to_le_bytes());
            Status::Ok
        }
        Err(ChangeError::NotFound) => Status::NotFound,
        Err(ChangeError::NotNumeric) => Status::NotNumeric,
        Err(ChangeError::CasDiffers) => Status::Exists,
        Err(ChangeError::NoRoom | ChangeError::NoRoomForNew) => Status::OutOfMemory,
    }
}

/// The owner of the first key that does not belong to this shard, if any: a MULTIGET is for one
/// shard only.
#[must_use]
pub fn foreign_key_owner(keys: Keys<'_>, shard: usize, shards: usize) -> Option<usize> {
    keys.iter().map(|key| shard_of(hash_key(key), shards)).find(|&owner| owner != shard)
}

/// Whether a request is answered by the shard of its key.
#[must_use]
pub const fn is_on_keys(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::Get
            | Opcode::GetLease
            | Opcode::MultiGet
            | Opcode::GetAndTouch
            | Opcode::Set
            | Opcode::Delete
            | Opcode::Touch
            | Opcode::Change
    )
}
