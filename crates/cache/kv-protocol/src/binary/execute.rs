//! Requests on keys, executed on the shard that owns them: the semantics of the text commands, with
//! replies of the binary protocol.

use super::reply::{
    Head, Refusal, Status, push_empty, push_item, push_missing_key, push_refusal, push_value,
};
use super::request::{KeyRequest, Read, Store};
use crate::Shard;
use crate::change::{
    self, Change, ChangeError, Changed, DeleteError, DeletedBy, Deletion, Initial,
};
use crate::classic::{self, Outcome, Wish};
use crate::command::StoreMode;
use crate::reply::TOO_LARGE;
use farpool_kv_store::item::ItemView;
use farpool_kv_store::key::HashedKey;

/// Appends the reply to a request on a key of this shard with this hash, if it has one.
#[inline]
pub fn execute(
    shard: &mut Shard,
    head: Head,
    request: &KeyRequest<'_>,
    hash: u64,
    out: &mut Vec<u8>,
) {
    match request {
        KeyRequest::Read(read) => execute_read(shard, head, read, hash, out),
        KeyRequest::Store(request) => execute_store(shard, head, request, hash, out),
        &KeyRequest::Delete { key, cas } => {
            execute_delete(shard, head, HashedKey { key, hash }, cas, out);
        }
        &KeyRequest::Change { key, delta, increments, cas, initial } => {
            let initial = initial.map(|(number, exptime)| Initial {
                number,
                expires_s: shard.clock.expiry_of_s(exptime.into()),
                marks: 0,
            });
            let wanted = Change::new(HashedKey { key, hash }, delta, increments);
            execute_change(shard, head, &Change { cas, initial, ..wanted }, out);
        }
    }
}

#[inline]
fn execute_read(shard: &mut Shard, head: Head, read: &Read<'_>, hash: u64, out: &mut Vec<u8>) {
    let key = read.key;
    let found = shard.store.find(key, hash);
    classic::count_get(shard, read.exptime.is_some(), found.is_some());
    shard.observe_read(key, hash, found);
    let Some(mut found) = found else {
        return match (head.is_quiet, read.returns_key) {
            (true, _) => {}
            (false, true) => push_missing_key(out, head, key),
            (false, false) => push_refusal(out, head, Status::KeyNotFound),
        };
    };
    if let Some(exptime) = read.exptime {
        let expires_s = shard.clock.expiry_of_s(exptime.into());
        // If there is no room for the longer item, the old expiry stays.
        found = shard.store.set_expiry(found, hash, expires_s).unwrap_or(found);
    }
    let (item, cas) = shard.store.view_with_cas(found);
    push_read(head, read, &item, cas, out);
    shard.store.note_read(found);
}

#[inline]
fn push_read(head: Head, read: &Read<'_>, item: &ItemView<'_>, cas: u64, out: &mut Vec<u8>) {
    let key = if read.returns_key { read.key } else { b"" };
    let value = if read.returns_value { item.value() } else { b"" };
    push_item(out, head, (item.client_flags(), cas), key, value);
}

/// Appends the reply to a plain read of an item that is not in memory.
pub fn push_record(
    head: Head,
    request: &KeyRequest<'_>,
    item: &ItemView<'_>,
    cas: u64,
    out: &mut Vec<u8>,
) {
    debug_assert!(request.is_plain_read(), "others are executed in memory");
    if let KeyRequest::Read(read) = request {
        push_read(head, read, item, cas, out);
    }
}

fn execute_store(shard: &mut Shard, head: Head, request: &Store<'_>, hash: u64, out: &mut Vec<u8>) {
    shard.count_set(request.key);
    let key = HashedKey { key: request.key, hash };
    let wish = Wish {
        client_flags: request.client_flags,
        expires_s: shard.clock.expiry_of_s(request.exptime.into()),
        cas: request.cas,
        ..Wish::new(request.mode, key, request.value)
    };
    let refusal = match classic::store(shard, &wish) {
        Outcome::Stored(found) => return push_empty(out, head, shard.store.cas(found)),
        Outcome::Exists => Status::KeyExists.into(),
        Outcome::NotFound => Status::KeyNotFound.into(),
        Outcome::NotStored => match request.mode {
            StoreMode::Add => Status::KeyExists.into(),
            StoreMode::Replace => Status::KeyNotFound.into(),
            _ => Status::NotStored.into(),
        },
        Outcome::Failed(TOO_LARGE) => Status::TooLarge.into(),
        Outcome::Failed(_) => Refusal::out_of_memory("Out of memory allocating item"),
    };
    push_refusal(out, head, refusal);
}

fn execute_delete(shard: &mut Shard, head: Head, key: HashedKey<'_>, cas: u64, out: &mut Vec<u8>) {
    let deletion = Deletion { key, cas: (cas != 0).then_some(cas), by: DeletedBy::Binary };
    match change::delete(shard, &deletion) {
        Ok(()) => push_empty(out, head, 0),
        Err(DeleteError::NotFound) => push_refusal(out, head, Status::KeyNotFound),
        Err(DeleteError::CasDiffers) => push_refusal(out, head, Status::KeyExists),
    }
}

fn execute_change(shard: &mut Shard, head: Head, wanted: &Change<'_>, out: &mut Vec<u8>) {
    let refusal = match change::change(shard, wanted) {
        Ok(Changed { found, number, .. }) => {
            return push_number(out, head, shard.store.cas(found), number);
        }
        Err(ChangeError::NotFound) => Status::KeyNotFound.into(),
        Err(ChangeError::NotNumeric) => Status::NotNumeric.into(),
        Err(ChangeError::CasDiffers) => Status::KeyExists.into(),
        Err(ChangeError::NoRoom) => Refusal::out_of_memory("Out of memory incrementing value"),
        Err(ChangeError::NoRoomForNew) => {
            Refusal::out_of_memory("Out of memory allocating new item")
        }
    };
    push_refusal(out, head, refusal);
}

fn push_number(out: &mut Vec<u8>, head: Head, cas: u64, number: u64) {
    if !head.is_quiet {
        push_value(out, head, Status::Success, cas, &number.to_be_bytes());
    }
}
