//! The meta commands: `mg`, `ms`, `md`, `ma`, `me`.
//!
//! Flags are returned in the order of the request. Flags of 1.6.45 that 1.6.18 does not know (`E`,
//! `mg C`, `ms s`, `ms N`, `md x`) are supported with both. `prepared` parses flags and key; this
//! module executes and answers commands.

mod prepared;

use base64::Engine;

use super::Shard;
use super::change::{
    self, Change, ChangeError, Changed, DeleteError, DeletedBy, Deletion, Initial,
};
use super::classic::{self, Outcome, Wish};
use super::command::{MetaKind, StoreMode};
use super::reply::{
    BAD_FORMAT, OPAQUE_TOO_LONG, OUT_OF_MEMORY, push_line, push_number, push_unless,
};
use farpool_kv_store::item::{Header, ItemParts, mark};
use farpool_kv_store::key::HashedKey;
use farpool_kv_store::{Found, StoreError};
use prepared::{BASE64, OPAQUE_BYTES_MAX};
pub use prepared::{Prepared, WORDS_MAX, check_set, decode_key, has_opaque_too_long, prepare};

/// Answers a prepared command.
pub fn execute(shard: &mut Shard, request: &Prepared<'_>, out: &mut Vec<u8>) {
    match request.kind {
        MetaKind::Get => get(shard, request, out),
        MetaKind::Set => set(shard, request, out),
        MetaKind::Delete => delete(shard, request, out),
        MetaKind::Arithmetic => arithmetic(shard, request, out),
        MetaKind::Debug => debug(shard, request, out),
    }
}

impl Prepared<'_> {
    fn hashed_key(&self) -> HashedKey<'_> {
        HashedKey { key: &self.key, hash: self.hash }
    }

    /// The marks that a new item has because of its key.
    const fn key_marks(&self) -> u8 {
        if self.flags.key_binary { mark::KEY_BINARY } else { 0 }
    }

    /// Appends opaque and key, which every answer returns.
    fn push_opaque_and_key(&self, out: &mut Vec<u8>) {
        for word in self.return_words() {
            match word[0] {
                b'O' => push_opaque(out, word),
                b'k' => push_key(out, &self.key, self.flags.key_binary),
                _ => {}
            }
        }
    }
}

fn push_opaque(out: &mut Vec<u8>, word: &[u8]) {
    out.push(b' ');
    out.extend_from_slice(word);
}

fn push_key(out: &mut Vec<u8>, key: &[u8], is_binary: bool) {
    out.extend_from_slice(b" k");
    if is_binary {
        out.extend_from_slice(BASE64.encode(key).as_bytes());
        out.extend_from_slice(b" b");
    } else {
        out.extend_from_slice(key);
    }
}

fn push_flag(out: &mut Vec<u8>, letter: u8, number: impl itoa::Integer) {
    out.extend_from_slice(&[b' ', letter]);
    push_number(out, number);
}

fn push_ttl(out: &mut Vec<u8>, expires_s: u32, now_s: u32) {
    if expires_s == 0 {
        out.extend_from_slice(b" t-1");
    } else {
        push_flag(out, b't', expires_s.wrapping_sub(now_s));
    }
}

fn get(shard: &mut Shard, request: &Prepared<'_>, out: &mut Vec<u8>) {
    let flags = &request.flags;
    let touches = flags.ttl.is_some();
    let mut found = shard.store.find(&request.key, request.hash);
    let mut is_new = false;
    shard.observe_read(&request.key, request.hash, found);
    if let (None, Some(exptime)) = (found, flags.vivify) {
        let parts = ItemParts {
            key: &request.key,
            expires_s: shard.clock.expiry_s(exptime),
            marks: request.key_marks(),
            wide_cas: flags.new_cas,
            ..ItemParts::default()
        };
        found = shard.store.insert(&parts, request.hash).ok();
        is_new = found.is_some();
    }
    let Some(found) = found else {
        classic::count_get(shard, touches, false);
        if has_opaque_too_long(&request.words) {
            push_line(out, OPAQUE_TOO_LONG);
        } else if !flags.quiet {
            out.extend_from_slice(b"EN");
            request.push_opaque_and_key(out);
            out.extend_from_slice(b"\r\n");
        }
        return;
    };
    let start = out.len();
    match push_hit(shard, request, found, is_new, out) {
        Ok(found) => {
            if !flags.no_update {
                shard.store.note_read(found);
            }
            classic::count_get(shard, touches, true);
        }
        Err(reason) => {
            out.truncate(start);
            push_line(out, reason);
        }
    }
}

/// Appends the answer to `mg` on a hit. The item may have moved afterwards.
fn push_hit(
    shard: &mut Shard,
    request: &Prepared<'_>,
    found: Found,
    is_new: bool,
    out: &mut Vec<u8>,
) -> Result<Found, &'static str> {
    let flags = &request.flags;
    let mut found = found;
    let now_s = shard.store.now_s();
    let view = shard.store.view(found);
    let header = view.header();
    // A new item has no expiry until its `N` is read.
    let mut expires_s = if is_new { 0 } else { view.expires_s() };
    let sends_value =
        flags.wants_value && flags.cas.is_none_or(|cas| cas != shard.store.cas(found));
    if sends_value {
        out.extend_from_slice(b"VA ");
        push_number(out, header.value_bytes);
    } else {
        out.extend_from_slice(b"HD");
    }
    let mut won = false;
    for word in request.return_words() {
        match word[0] {
            b'T' => {
                expires_s = flags.ttl.map_or(0, |exptime| shard.clock.expiry_s(exptime));
                // If there is no room for the longer item, the old expiry stays: earlier than
                // requested, but never wrong data.
                found = shard.store.set_expiry(found, request.hash, expires_s).unwrap_or(found);
            }
            b'N' if is_new => {
                won = true;
                expires_s = flags.vivify.map_or(0, |exptime| shard.clock.expiry_s(exptime));
                found = shard.store.set_expiry(found, request.hash, expires_s).unwrap_or(found);
            }
            b'R' => {
                let limit_s = flags.recache.map_or(0, |exptime| shard.clock.expiry_s(exptime));
                let due = expires_s != 0 && expires_s < limit_s;
                won |= due && !is_new && !header.has(mark::TOKEN_SENT);
            }
            b's' => push_flag(out, b's', header.value_bytes),
            b't' => push_ttl(out, expires_s, now_s),
            b'c' => push_flag(out, b'c', shard.store.cas(found)),
            b'f' => push_flag(out, b'f', shard.store.view(found).client_flags()),
            b'l' => push_flag(out, b'l', now_s.saturating_sub(shard.store.accessed_s(found))),
            b'h' => push_flag(out, b'h', u8::from(header.has(mark::FETCHED))),
            b'O' if word.len() > OPAQUE_BYTES_MAX => {
                if is_new {
                    // Its `N` may not have been read yet. Without room it expires sooner.
                    let _ = shard.store.set_expiry(found, request.hash, expires_s);
                }
                return Err(OPAQUE_TOO_LONG);
            }
            b'O' => push_opaque(out, word),
            b'k' => push_key(out, &request.key, header.has(mark::KEY_BINARY)),
            _ => {}
        }
    }
    if push_marks(header, won, out) {
        shard.store.set_marks(found, mark::TOKEN_SENT, 0);
    }
    out.extend_from_slice(b"\r\n");
    if sends_value {
        out.extend_from_slice(shard.store.view(found).value());
        out.extend_from_slice(b"\r\n");
    }
    Ok(found)
}

/// Appends whether another client has won, and whether the item is stale. Returns whether this
/// client wins.
fn push_marks(header: Header, mut won: bool, out: &mut Vec<u8>) -> bool {
    if header.has(mark::TOKEN_SENT) {
        out.extend_from_slice(b" Z");
    }
    if header.has(mark::STALE) {
        out.extend_from_slice(b" X");
        won |= !header.has(mark::TOKEN_SENT);
    }
    if won {
        out.extend_from_slice(b" W");
    }
    won
}

fn set(shard: &mut Shard, request: &Prepared<'_>, out: &mut Vec<u8>) {
    let flags = &request.flags;
    shard.count_set(&request.key);
    let Some(value) = request.data.strip_suffix(b"\r\n") else {
        push_line(out, "CLIENT_ERROR bad data chunk");
        return;
    };
    let Ok(mode) = flags.store_mode() else { return push_line(out, BAD_FORMAT) };
    let wish = Wish {
        client_flags: flags.client_flags,
        expires_s: flags.ttl.map_or(0, |exptime| shard.clock.expiry_s(exptime)),
        cas: flags.cas.unwrap_or(0),
        // As in memcached, E0 asks for the next number.
        new_cas: flags.new_cas.filter(|&cas| cas != 0),
        accepts_stale: flags.marks_stale && mode == StoreMode::Cas,
        marks: request.key_marks(),
        vivify_s: flags.vivify.map(|exptime| shard.clock.expiry_s(exptime)),
        ..Wish::new(mode, request.hashed_key(), value)
    };
    let (status, found) = match classic::store(shard, &wish) {
        Outcome::Stored(found) => ("HD", Some(found)),
        Outcome::Exists => ("EX", None),
        Outcome::NotFound => ("NF", None),
        Outcome::NotStored => ("NS", None),
        Outcome::Failed(reason) => return push_line(out, reason),
    };
    if found.is_some() && flags.quiet {
        return;
    }
    out.extend_from_slice(status.as_bytes());
    for word in request.return_words() {
        match word[0] {
            b'O' => push_opaque(out, word),
            b'k' => push_key(out, &request.key, flags.key_binary),
            b'c' => push_flag(out, b'c', found.map_or(0, |found| shard.store.cas(found))),
            b's' => {
                let bytes = found.map(|found| shard.store.view(found).header().value_bytes);
                push_flag(out, b's', bytes.map_or(value.len() as u64, u64::from));
            }
            _ => {}
        }
    }
    out.extend_from_slice(b"\r\n");
}

fn delete(shard: &mut Shard, request: &Prepared<'_>, out: &mut Vec<u8>) {
    let flags = &request.flags;
    let deletion = Deletion { key: request.hashed_key(), cas: flags.cas, by: DeletedBy::Meta };
    let status = match change::find_to_delete(shard, &deletion) {
        Err(DeleteError::NotFound) => "NF",
        Err(DeleteError::CasDiffers) => "EX",
        Ok(found) => match delete_found(shard, request, &deletion, found) {
            Ok(()) if flags.quiet => return,
            Ok(()) => "HD",
            Err(reason) => return push_line(out, reason),
        },
    };
    out.extend_from_slice(status.as_bytes());
    request.push_opaque_and_key(out);
    out.extend_from_slice(b"\r\n");
}

fn delete_found(
    shard: &mut Shard,
    request: &Prepared<'_>,
    deletion: &Deletion<'_>,
    found: Found,
) -> Result<(), &'static str> {
    let flags = &request.flags;
    let mut found = found;
    if flags.drops_value {
        found = drop_value(shard, request, found).ok_or(OUT_OF_MEMORY)?;
    }
    if flags.marks_stale {
        return mark_stale(shard, request, found).map_err(|_| OUT_OF_MEMORY);
    }
    // As in memcached watchers are told the length of what is left.
    change::note_deleted(shard, found, deletion);
    if !flags.drops_value {
        shard.store.remove(found);
    }
    Ok(())
}

/// Replaces the item by one without a value. As in 1.6.45 it has the CAS number of the old one, and
/// expiry and client flags as given; where 1.6.18 is asked for, which does not know this flag, the
/// next CAS number and the old expiry.
fn drop_value(shard: &mut Shard, request: &Prepared<'_>, found: Found) -> Option<Found> {
    let flags = &request.flags;
    let view = shard.store.view(found);
    let marks = view.header().marks & mark::KEY_BINARY;
    let wish = Wish { marks, ..Wish::new(StoreMode::Set, request.hashed_key(), b"") };
    let wish = if request.compat.is_old() {
        Wish { expires_s: view.expires_s(), new_cas: flags.new_cas, ..wish }
    } else {
        Wish {
            expires_s: flags.ttl.map_or(0, |exptime| shard.clock.expiry_s(exptime)),
            client_flags: flags.client_flags,
            new_cas: flags.new_cas.or(Some(shard.store.cas(found))),
            ..wish
        }
    };
    match classic::store(shard, &wish) {
        Outcome::Stored(found) => Some(found),
        _ => None,
    }
}

/// Marks an item as stale, under a new CAS number, so that the next client may win.
fn mark_stale(
    shard: &mut Shard,
    request: &Prepared<'_>,
    mut found: Found,
) -> Result<(), StoreError> {
    let flags = &request.flags;
    if let Some(exptime) = flags.ttl {
        let expires_s = shard.clock.expiry_s(exptime);
        found = shard.store.set_expiry(found, request.hash, expires_s)?;
    }
    let cas = flags.new_cas.unwrap_or_else(|| shard.store.next_cas());
    found = shard.store.set_cas(found, request.hash, cas)?;
    shard.store.set_marks(found, mark::STALE, mark::TOKEN_SENT);
    Ok(())
}

fn arithmetic(shard: &mut Shard, request: &Prepared<'_>, out: &mut Vec<u8>) {
    let flags = &request.flags;
    // A new item has no expiry until its `N` is read.
    let initial = Initial { number: flags.initial, expires_s: 0, marks: request.key_marks() };
    let increments = !matches!(flags.mode, b'D' | b'd' | b'-');
    let wanted = Change {
        cas: flags.cas.unwrap_or(0),
        new_cas: flags.new_cas,
        initial: flags.vivify.map(|_| initial),
        ..Change::new(request.hashed_key(), flags.delta, increments)
    };
    match change::change(shard, &wanted) {
        Ok(changed) => push_changed(shard, request, changed, out),
        Err(ChangeError::NotFound) => push_status(request, "NF", out),
        Err(ChangeError::CasDiffers) => push_status(request, "EX", out),
        Err(ChangeError::NotNumeric) => push_line(out, classic::NOT_NUMERIC),
        Err(ChangeError::NoRoom) => push_line(out, classic::NO_ROOM_TO_CHANGE),
        Err(ChangeError::NoRoomForNew) => push_line(out, classic::NO_ROOM_FOR_NEW),
    }
}

fn push_status(request: &Prepared<'_>, status: &str, out: &mut Vec<u8>) {
    if has_opaque_too_long(&request.words) {
        return push_line(out, OPAQUE_TOO_LONG);
    }
    out.extend_from_slice(status.as_bytes());
    request.push_opaque_and_key(out);
    out.extend_from_slice(b"\r\n");
}

fn push_changed(
    shard: &mut Shard,
    request: &Prepared<'_>,
    Changed { mut found, number, is_new }: Changed,
    out: &mut Vec<u8>,
) {
    let flags = &request.flags;
    let mut digits = itoa::Buffer::new();
    let digits = digits.format(number).as_bytes();
    let start = out.len();
    if flags.wants_value {
        out.extend_from_slice(b"VA ");
        push_number(out, digits.len());
    } else {
        out.extend_from_slice(b"HD");
    }
    for word in request.return_words() {
        match word[0] {
            b'c' => push_flag(out, b'c', shard.store.cas(found)),
            b't' => push_ttl(out, shard.store.view(found).expires_s(), shard.store.now_s()),
            b'T' | b'N' => {
                let exptime =
                    if word[0] == b'T' { flags.ttl } else { flags.vivify.filter(|_| is_new) };
                if let Some(exptime) = exptime {
                    let expires_s = shard.clock.expiry_s(exptime);
                    found = shard.store.set_expiry(found, request.hash, expires_s).unwrap_or(found);
                }
            }
            b'O' if word.len() > OPAQUE_BYTES_MAX => {
                out.truncate(start);
                return push_line(out, OPAQUE_TOO_LONG);
            }
            b'O' => push_opaque(out, word),
            b'k' => push_key(out, &request.key, flags.key_binary),
            _ => {}
        }
    }
    out.extend_from_slice(b"\r\n");
    if flags.wants_value {
        out.extend_from_slice(digits);
        out.extend_from_slice(b"\r\n");
    }
    // With the quiet flag a successful change has no reply, but with 1.6.18 a new item has one.
    if flags.quiet && !(is_new && request.compat.is_old()) {
        out.truncate(start);
    }
}

fn debug(shard: &mut Shard, request: &Prepared<'_>, out: &mut Vec<u8>) {
    shard.counts.cmd_meta += 1;
    let Some(found) = shard.store.find(&request.key, request.hash) else {
        push_unless(out, false, "EN");
        return;
    };
    let view = shard.store.view(found);
    let header = view.header();
    let now_s = shard.store.now_s();
    out.extend_from_slice(b"ME ");
    if header.has(mark::KEY_BINARY) {
        out.extend_from_slice(BASE64.encode(view.key()).as_bytes());
    } else {
        out.extend_from_slice(view.key());
    }
    // 1.6.18 shows the seconds since the expiry: negative while the item is live.
    let expiry = match i64::from(view.expires_s()) {
        0 => -1,
        expires_s if request.compat.is_old() => i64::from(now_s) - expires_s,
        expires_s => expires_s - i64::from(now_s),
    };
    let fetched = if header.has(mark::FETCHED) { "yes" } else { "no" };
    let accessed = now_s.saturating_sub(shard.store.accessed_s(found));
    let size = header.footprint_bytes();
    let cas = shard.store.cas(found);
    let line =
        format!(" exp={expiry} la={accessed} cas={cas} fetch={fetched} cls=1 size={size}\r\n");
    out.extend_from_slice(line.as_bytes());
}
