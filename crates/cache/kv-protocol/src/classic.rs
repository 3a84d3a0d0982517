//! The classic commands, and the storing and counting that the meta commands share.

use super::Shard;
use super::change::{self, Change, ChangeError, DeleteError, DeletedBy, Deletion};
use super::command::{ReadFlags, StoreMode, StoreRequest};
use super::reply::{OUT_OF_MEMORY, TOO_LARGE, push_line, push_number, push_unless};
use super::token::split;
use farpool_kv_store::item::{ItemParts, ItemView, mark};
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::{Found, StoreError};

/// memcached's answers to changes of numbers that fail.
pub const NOT_NUMERIC: &str = "CLIENT_ERROR cannot increment or decrement non-numeric value";
pub const NO_ROOM_TO_CHANGE: &str = "SERVER_ERROR out of memory";
pub const NO_ROOM_FOR_NEW: &str = "SERVER_ERROR Out of memory allocating new item";
/// How many keys of one `get` are loaded ahead of the one being answered.
const LOOK_AHEAD: usize = 16;

/// Appends `VALUE …` for one key, if it is there.
#[inline]
pub fn get_one(
    shard: &mut Shard,
    HashedKey { key, hash }: HashedKey<'_>,
    ReadFlags { with_cas, touch }: ReadFlags,
    out: &mut Vec<u8>,
) {
    let found = shard.store.find(key, hash);
    count_get(shard, touch.is_some(), found.is_some());
    shard.observe_read(key, hash, found);
    let Some(mut found) = found else { return };
    if let Some(exptime) = touch {
        let expires_s = shard.clock.expiry_s(exptime);
        // If there is no room for the longer item, the old expiry stays.
        found = shard.store.set_expiry(found, hash, expires_s).unwrap_or(found);
    }
    push_value(shard, key, found, with_cas, out);
    shard.store.note_read(found);
}

/// Counts a read, by whether it touches and whether it hits.
#[inline]
pub(crate) fn count_get(shard: &mut Shard, touches: bool, hit: bool) {
    let counts = &mut shard.counts;
    match (touches, hit) {
        (false, true) => {
            counts.cmd_get += 1;
            counts.get_hits += 1;
        }
        (false, false) => {
            counts.cmd_get += 1;
            counts.get_misses += 1;
        }
        (true, true) => {
            counts.cmd_touch += 1;
            counts.touch_hits += 1;
        }
        (true, false) => {
            counts.cmd_touch += 1;
            counts.touch_misses += 1;
        }
    }
}

#[inline]
fn push_value(shard: &Shard, key: &[u8], found: Found, with_cas: bool, out: &mut Vec<u8>) {
    let cas = with_cas.then(|| shard.store.cas(found));
    push_item(key, &shard.store.view(found), cas, out);
}

/// Appends `VALUE …` for an item.
#[inline]
pub fn push_item(key: &[u8], item: &ItemView<'_>, cas: Option<u64>, out: &mut Vec<u8>) {
    let value = item.value();
    out.reserve(key.len() + value.len() + 64);
    out.extend_from_slice(b"VALUE ");
    out.extend_from_slice(key);
    out.push(b' ');
    push_number(out, item.client_flags());
    out.push(b' ');
    push_number(out, value.len());
    if let Some(cas) = cas {
        out.push(b' ');
        push_number(out, cas);
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Answers a `get` whose keys all belong to this shard.
///
/// Stops early once `out` holds `out_bytes_max` and returns how many bytes of `keys` are done, so
/// that a reply of any length needs no more memory than that at a time.
pub fn get_many(
    shard: &mut Shard,
    keys: &[u8],
    flags: ReadFlags,
    out: &mut Vec<u8>,
    out_bytes_max: usize,
) -> GetProgress {
    let mut words = split(keys);
    let mut ahead = [HashedKey::default(); LOOK_AHEAD];
    loop {
        let mut count = 0;
        for (slot, key) in ahead.iter_mut().zip(words.by_ref()) {
            *slot = HashedKey::of(key, shard.store.hash_seed());
            shard.store.prefetch_entry(slot.hash);
            count += 1;
        }
        let ahead = &ahead[..count];
        // A single key was already loaded with the requests around it.
        if count > 1 {
            ahead.iter().for_each(|it| shard.store.prefetch_item(it.hash));
        }
        for &it in ahead {
            if out.len() >= out_bytes_max {
                return GetProgress::Stopped {
                    done_bytes: it.key.as_ptr() as usize - keys.as_ptr() as usize,
                };
            }
            get_one(shard, it, flags, out);
        }
        if count < LOOK_AHEAD {
            out.extend_from_slice(b"END\r\n");
            return GetProgress::Done;
        }
    }
}

/// The progress of [`get_many`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GetProgress {
    Done,
    /// Resume after this many bytes of the keys once the reply so far is sent.
    Stopped {
        done_bytes: usize,
    },
}

/// An item to be stored, and the conditions for that.
#[derive(Debug, Clone, Copy)]
pub struct Wish<'a> {
    pub mode: StoreMode,
    pub key: &'a [u8],
    pub hash: u64,
    pub value: &'a [u8],
    pub client_flags: u32,
    pub expires_s: u32,
    /// The item must have this CAS number; 0 = any.
    pub cas: u64,
    /// The CAS number of the new item, if not the next one.
    pub new_cas: Option<u64>,
    /// An older CAS number also stores, and marks the item stale.
    pub accepts_stale: bool,
    /// Marks of the new item.
    pub marks: u8,
    /// If there is no item, append and prepend create one with this expiry.
    pub vivify_s: Option<u32>,
}

impl<'a> Wish<'a> {
    /// Without a condition but that of the mode, and without client flags, expiry or marks.
    #[must_use]
    pub const fn new(
        mode: StoreMode,
        HashedKey { key, hash }: HashedKey<'a>,
        value: &'a [u8],
    ) -> Self {
        Self {
            mode,
            key,
            hash,
            value,
            client_flags: 0,
            expires_s: 0,
            cas: 0,
            new_cas: None,
            accepts_stale: false,
            marks: 0,
            vivify_s: None,
        }
    }
}

/// The result of a wish.
#[derive(Debug, Clone, Copy)]
pub enum Outcome {
    Stored(Found),
    Exists,
    NotFound,
    NotStored,
    /// The line to answer with.
    Failed(&'static str),
}

/// Stores if mode and CAS number allow it, and notes the event for watchers.
pub fn store(shard: &mut Shard, wish: &Wish<'_>) -> Outcome {
    if shard.store.journal_mut().is_none() {
        return store_unwatched(shard, wish);
    }
    if wish.mode == StoreMode::Set {
        // memcached looks the key up in every mode, and reports that to watchers.
        shard.store.find(wish.key, wish.hash);
    }
    let outcome = store_unwatched(shard, wish);
    note_stored(shard, wish, &outcome);
    outcome
}

fn note_stored(shard: &mut Shard, wish: &Wish<'_>, outcome: &Outcome) {
    let command = match wish.mode {
        StoreMode::Set => "set",
        StoreMode::Add => "add",
        StoreMode::Replace => "replace",
        StoreMode::Append => "append",
        StoreMode::Prepend => "prepend",
        StoreMode::Cas => "cas",
    };
    let status = match *outcome {
        Outcome::Stored(_) => "stored",
        Outcome::Exists => "exists",
        Outcome::NotFound => "not_found",
        Outcome::NotStored => "not_stored",
        Outcome::Failed(TOO_LARGE) => "too_large",
        Outcome::Failed(_) => "no_memory",
    };
    let ttl_s = wish.expires_s.saturating_sub(shard.store.now_s());
    let value_bytes = match *outcome {
        Outcome::Stored(found) => shard.store.view(found).value().len(),
        _ => wish.value.len(),
    };
    if let Some(journal) = shard.store.journal_mut() {
        journal.stored(wish.key, (command, status), ttl_s, value_bytes);
    }
}

fn store_unwatched(shard: &mut Shard, wish: &Wish<'_>) -> Outcome {
    // A plain set does not depend on the present item.
    if wish.mode == StoreMode::Set {
        return put(shard, wish, wish.expires_s, 0, [wish.value, b""]);
    }
    match shard.store.find(wish.key, wish.hash) {
        Some(found) => store_over(shard, wish, found),
        None => match (wish.mode, wish.vivify_s) {
            (StoreMode::Add, _) => put(shard, wish, wish.expires_s, 0, [wish.value, b""]),
            (StoreMode::Append | StoreMode::Prepend, Some(expires_s)) => {
                put(shard, wish, expires_s, 0, [wish.value, b""])
            }
            (StoreMode::Cas, _) => {
                shard.counts.cas_misses += 1;
                Outcome::NotFound
            }
            _ => Outcome::NotStored,
        },
    }
}

fn store_over(shard: &mut Shard, wish: &Wish<'_>, found: Found) -> Outcome {
    let old_cas = shard.store.cas(found);
    match wish.mode {
        StoreMode::Add => {
            shard.store.note_touched(found);
            Outcome::NotStored
        }
        StoreMode::Cas if wish.cas == old_cas => {
            shard.counts.cas_hits += 1;
            put(shard, wish, wish.expires_s, 0, [wish.value, b""])
        }
        StoreMode::Cas if wish.accepts_stale && wish.cas != 0 && wish.cas < old_cas => {
            shard.counts.cas_hits += 1;
            let view = shard.store.view(found);
            let marks = mark::STALE | view.header().marks & mark::TOKEN_SENT;
            put(shard, wish, view.expires_s(), marks, [wish.value, b""])
        }
        StoreMode::Cas => {
            shard.counts.cas_badval += 1;
            Outcome::Exists
        }
        StoreMode::Append | StoreMode::Prepend => {
            if wish.cas != 0 && wish.cas != old_cas {
                return Outcome::Exists;
            }
            let view = shard.store.view(found);
            let old = view.value().to_vec();
            let value = if wish.mode == StoreMode::Append {
                [&old, wish.value]
            } else {
                [wish.value, &old]
            };
            let joined = Wish { client_flags: view.client_flags(), ..*wish };
            let expires_s = view.expires_s();
            match put(shard, &joined, expires_s, 0, value) {
                Outcome::Failed(_) => Outcome::NotStored,
                outcome => outcome,
            }
        }
        StoreMode::Replace | StoreMode::Set => {
            put(shard, wish, wish.expires_s, 0, [wish.value, b""])
        }
    }
}

fn put(
    shard: &mut Shard,
    wish: &Wish<'_>,
    expires_s: u32,
    marks: u8,
    value: [&[u8]; 2],
) -> Outcome {
    let parts = ItemParts {
        key: wish.key,
        value,
        client_flags: wish.client_flags,
        expires_s,
        marks: wish.marks | marks,
        wide_cas: wish.new_cas,
    };
    match shard.store.insert(&parts, wish.hash) {
        Ok(found) => {
            shard.observe_stored(wish.key, wish.hash, found);
            Outcome::Stored(found)
        }
        Err(StoreError::TooLarge) => {
            shard.counts.store_too_large += 1;
            Outcome::Failed(TOO_LARGE)
        }
        Err(StoreError::OutOfMemory) => {
            shard.counts.store_no_memory += 1;
            Outcome::Failed(OUT_OF_MEMORY)
        }
    }
}

/// Answers `set` and its variants.
pub fn execute_store(shard: &mut Shard, request: &StoreRequest<'_>, hash: u64, out: &mut Vec<u8>) {
    shard.count_set(request.key);
    let Some(value) = request.data.strip_suffix(b"\r\n") else {
        push_unless(out, request.quiet, "CLIENT_ERROR bad data chunk");
        return;
    };
    let key = HashedKey { key: request.key, hash };
    let wish = Wish {
        client_flags: request.client_flags,
        expires_s: shard.clock.expiry_s(request.exptime),
        cas: request.cas,
        ..Wish::new(request.mode, key, value)
    };
    let reply = match store(shard, &wish) {
        Outcome::Stored(_) => "STORED",
        Outcome::Exists => "EXISTS",
        Outcome::NotFound => "NOT_FOUND",
        Outcome::NotStored => "NOT_STORED",
        Outcome::Failed(reason) => reason,
    };
    push_unless(out, request.quiet, reply);
}

/// Answers `delete`.
pub fn execute_delete(shard: &mut Shard, key: HashedKey<'_>, quiet: bool, out: &mut Vec<u8>) {
    let deletion = Deletion { key, cas: None, by: DeletedBy::Delete };
    let reply = match change::delete(shard, &deletion) {
        Ok(()) => "DELETED",
        Err(DeleteError::NotFound) => "NOT_FOUND",
        Err(DeleteError::CasDiffers) => "EXISTS",
    };
    push_unless(out, quiet, reply);
}

/// Answers `touch`.
pub fn execute_touch(
    shard: &mut Shard,
    key: &[u8],
    hash: u64,
    (exptime, quiet): (i32, bool),
    out: &mut Vec<u8>,
) {
    shard.counts.cmd_touch += 1;
    let Some(found) = shard.store.find(key, hash) else {
        shard.counts.touch_misses += 1;
        push_unless(out, quiet, "NOT_FOUND");
        return;
    };
    shard.counts.touch_hits += 1;
    let expires_s = shard.clock.expiry_s(exptime);
    match shard.store.set_expiry(found, hash, expires_s) {
        Ok(found) => {
            shard.store.note_read(found);
            push_unless(out, quiet, "TOUCHED");
        }
        Err(_) => push_unless(out, quiet, OUT_OF_MEMORY),
    }
}

/// Answers `incr` and `decr`.
pub fn execute_change(shard: &mut Shard, wanted: &Change<'_>, quiet: bool, out: &mut Vec<u8>) {
    match change::change(shard, wanted) {
        Ok(_) if quiet => {}
        Ok(changed) => {
            push_number(out, changed.number);
            out.extend_from_slice(b"\r\n");
        }
        Err(ChangeError::NotFound) => push_unless(out, quiet, "NOT_FOUND"),
        Err(ChangeError::NotNumeric) => push_unless(out, quiet, NOT_NUMERIC),
        Err(ChangeError::NoRoom) => push_unless(out, quiet, NO_ROOM_TO_CHANGE),
        Err(ChangeError::NoRoomForNew) => push_unless(out, quiet, NO_ROOM_FOR_NEW),
        Err(ChangeError::CasDiffers) => push_line(out, "EXISTS"),
    }
}
