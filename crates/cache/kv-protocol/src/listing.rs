//! The lines of `lru_crawler metadump` and `mgdump` and of `stats cachedump`, one for each item.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::compat::Compat;
use farpool_kv_store::clock::Clock;
use farpool_kv_store::item::mark;
use farpool_kv_store::observe::journal::shown_key;
use farpool_kv_store::walk::Walked;

/// memcached's slab class numbers are below this.
pub const SLAB_CLASSES: u32 = 64;
/// The class of all items here.
pub const SLAB_CLASS: u32 = 1;

/// Whether `metadump` is to list our only class. None if one of the classes, separated by commas,
/// does not exist.
#[must_use]
pub fn lists_our_class(classes: &[u8], compat: Compat) -> Option<bool> {
    if matches!(classes, b"all" | b"hash") {
        return Some(true);
    }
    let mut ours = false;
    for class in classes.split(|&byte| byte == b',').filter(|class| !class.is_empty()) {
        let class = compat.unsigned_32(class).filter(|class| (1..SLAB_CLASSES).contains(class))?;
        ours |= class == SLAB_CLASS;
    }
    Some(ours)
}

/// Appends an item's line of `metadump`. It ends without a carriage return, as in memcached.
pub fn push_metadump_line(clock: &Clock, item: &Walked<'_>, compat: Compat, out: &mut Vec<u8>) {
    let header = item.view.header();
    let expiry = match item.view.expires_s() {
        0 => -1,
        expires_s => clock.unix_s_of(expires_s),
    };
    let line = format!(
        "key={} exp={expiry} la={} cas={} fetch={} cls={SLAB_CLASS} size={}",
        shown_key(item.view.key()),
        clock.unix_s_of(item.accessed_s),
        item.cas,
        if header.has(mark::FETCHED) { "yes" } else { "no" },
        header.footprint_bytes(),
    );
    out.extend_from_slice(line.as_bytes());
    if !compat.is_old() {
        out.extend_from_slice(format!(" flags={} ", item.view.client_flags()).as_bytes());
    }
    out.push(b'\n');
}

/// Appends an item's line of `mgdump`: the request that reads it.
pub fn push_mgdump_line(item: &Walked<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"mg ");
    if item.view.header().has(mark::KEY_BINARY) {
        out.extend_from_slice(STANDARD.encode(item.view.key()).as_bytes());
        out.extend_from_slice(b" b");
    } else {
        out.extend_from_slice(item.view.key());
    }
    out.extend_from_slice(b"\r\n");
}

/// Appends an item's line of `cachedump`, unless its key cannot be shown there.
pub fn push_cachedump_line(clock: &Clock, item: &Walked<'_>, out: &mut Vec<u8>) {
    let header = item.view.header();
    if header.has(mark::KEY_BINARY) {
        return;
    }
    let expiry = match item.view.expires_s() {
        0 => 0,
        expires_s => clock.unix_s_of(expires_s),
    };
    out.extend_from_slice(b"ITEM ");
    out.extend_from_slice(item.view.key());
    out.extend_from_slice(format!(" [{} b; {expiry} s]\r\n", header.value_bytes).as_bytes());
}
