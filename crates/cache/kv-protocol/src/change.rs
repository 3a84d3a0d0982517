//! What a deletion is, and what a change of a number is, whichever protocol asks for it: the
//! conditions, the statistics, what watchers and the observer are told. The protocols differ in how
//! they ask and answer.

use super::Shard;
use super::classic::{self, Outcome, Wish};
use super::command::StoreMode;
use super::token::{self, unsigned_64};
use farpool_kv_store::Found;
use farpool_kv_store::item::ItemParts;
use farpool_kv_store::key::HashedKey;

/// A deletion that a client asks for.
#[derive(Debug, Clone, Copy)]
pub struct Deletion<'a> {
    pub key: HashedKey<'a>,
    /// The item must have this CAS number, if given.
    pub cas: Option<u64>,
    pub by: DeletedBy,
}

/// The command that deletes. memcached distinguishes them in what it counts and tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeletedBy {
    /// `delete` of the text protocol.
    Delete,
    /// `md`.
    Meta,
    Binary,
    KeyVault,
}

impl DeletedBy {
    /// The name that watchers are told.
    const fn name(self) -> &'static str {
        match self {
            Self::Meta => "md",
            Self::Delete | Self::Binary | Self::KeyVault => "delete",
        }
    }

    /// Whether an item with another CAS number counts as a miss.
    const fn counts_other_cas(self) -> bool {
        !matches!(self, Self::Binary)
    }
}

/// Why nothing was deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteError {
    NotFound,
    CasDiffers,
}

/// Deletes an item.
pub fn delete(shard: &mut Shard, deletion: &Deletion<'_>) -> Result<(), DeleteError> {
    let found = find_to_delete(shard, deletion)?;
    note_deleted(shard, found, deletion);
    shard.store.remove(found);
    Ok(())
}

/// Looks up the item to delete, and counts if that fails.
pub(crate) fn find_to_delete(
    shard: &mut Shard,
    &Deletion { key: HashedKey { key, hash }, cas, by }: &Deletion<'_>,
) -> Result<Found, DeleteError> {
    shard.observe_delete(key);
    let Some(found) = shard.store.find(key, hash) else {
        shard.counts.delete_misses += 1;
        return Err(DeleteError::NotFound);
    };
    if cas.is_some_and(|cas| cas != shard.store.cas(found)) {
        shard.counts.delete_misses += u64::from(by.counts_other_cas());
        return Err(DeleteError::CasDiffers);
    }
    Ok(found)
}

/// Counts that an item is deleted, and notes it for watchers.
pub(crate) fn note_deleted(shard: &mut Shard, found: Found, deletion: &Deletion<'_>) {
    shard.counts.delete_hits += 1;
    if shard.store.journal_mut().is_none() {
        return;
    }
    let value_bytes = shard.store.view(found).value().len();
    if let Some(journal) = shard.store.journal_mut() {
        journal.deleted(deletion.key.key, deletion.by.name(), value_bytes);
    }
}

/// A change of a number that a client asks for.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    pub key: HashedKey<'a>,
    pub delta: u64,
    pub increments: bool,
    /// The item must have this CAS number; 0 = any.
    pub cas: u64,
    /// The CAS number afterwards, if not the next one.
    pub new_cas: Option<u64>,
    /// What to store if there is no such number.
    pub initial: Option<Initial>,
}

impl<'a> Change<'a> {
    /// A change of whatever number there is, and of none if there is none.
    #[must_use]
    pub const fn new(key: HashedKey<'a>, delta: u64, increments: bool) -> Self {
        Self { key, delta, increments, cas: 0, new_cas: None, initial: None }
    }
}

/// A number that is stored because there is none to change.
#[derive(Debug, Clone, Copy)]
pub struct Initial {
    pub number: u64,
    /// When it expires, in seconds of the store's clock; 0 = never.
    pub expires_s: u32,
    /// Marks of the new item.
    pub marks: u8,
}

/// A number that was changed or made.
#[derive(Debug, Clone, Copy)]
pub struct Changed {
    pub found: Found,
    pub number: u64,
    pub is_new: bool,
}

/// Why a number was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeError {
    NotFound,
    NotNumeric,
    CasDiffers,
    /// There is no memory for the longer number.
    NoRoom,
    /// There is no memory for the item of the initial number.
    NoRoomForNew,
}

/// Changes a number, or stores the initial one if there is none. A shorter number is padded with
/// spaces, as in memcached.
pub fn change(shard: &mut Shard, change: &Change<'_>) -> Result<Changed, ChangeError> {
    let HashedKey { key, hash } = change.key;
    match (shard.store.find(key, hash), change.initial) {
        (Some(found), _) => change_found(shard, change, found),
        (None, Some(initial)) => make(shard, change, initial),
        (None, None) => {
            if change.increments {
                shard.counts.incr_misses += 1;
            } else {
                shard.counts.decr_misses += 1;
            }
            Err(ChangeError::NotFound)
        }
    }
}

/// Stores a number that is not there yet. As in memcached this counts neither as a change nor as a
/// storage command, but watchers see it as `add`.
fn make(
    shard: &mut Shard,
    change: &Change<'_>,
    Initial { number, expires_s, marks }: Initial,
) -> Result<Changed, ChangeError> {
    let mut digits = itoa::Buffer::new();
    let digits = digits.format(number).as_bytes();
    let wish = Wish {
        expires_s,
        marks,
        new_cas: change.new_cas,
        ..Wish::new(StoreMode::Add, change.key, digits)
    };
    match classic::store(shard, &wish) {
        Outcome::Stored(found) => Ok(Changed { found, number, is_new: true }),
        _ => Err(ChangeError::NoRoomForNew),
    }
}

fn change_found(
    shard: &mut Shard,
    change: &Change<'_>,
    found: Found,
) -> Result<Changed, ChangeError> {
    let HashedKey { key, hash } = change.key;
    let view = shard.store.view(found);
    if view.value().is_empty() {
        return Err(ChangeError::NotNumeric);
    }
    if change.cas != 0 && change.cas != shard.store.cas(found) {
        return Err(ChangeError::CasDiffers);
    }
    let text = token::until_zero(view.value());
    let number = unsigned_64(text).ok_or(ChangeError::NotNumeric)?;
    let number = if change.increments {
        number.wrapping_add(change.delta)
    } else {
        number.saturating_sub(change.delta)
    };
    if change.increments {
        shard.counts.incr_hits += 1;
    } else {
        shard.counts.decr_hits += 1;
    }
    let mut digits = itoa::Buffer::new();
    let digits = digits.format(number).as_bytes();
    let (client_flags, expires_s) = (view.client_flags(), view.expires_s());
    let old_bytes = view.value().len();
    let found = if digits.len() <= old_bytes {
        let mut value = digits.to_vec();
        value.resize(old_bytes, b' ');
        let cas = change.new_cas.unwrap_or_else(|| shard.store.next_cas());
        let found =
            shard.store.overwrite(found, hash, &value, cas).map_err(|_| ChangeError::NoRoom)?;
        shard.store.note_touched(found);
        found
    } else {
        let parts = ItemParts {
            key,
            value: [digits, b""],
            client_flags,
            expires_s,
            wide_cas: change.new_cas,
            ..ItemParts::default()
        };
        shard.store.insert(&parts, hash).map_err(|_| ChangeError::NoRoom)?
    };
    Ok(Changed { found, number, is_new: false })
}
