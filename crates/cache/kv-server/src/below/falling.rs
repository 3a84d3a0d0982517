//! Items that leave a tier: those that the index still wants go to the tier below.

use farpool_kv_store::Store;
use farpool_kv_store::index::{Place, Tier};
use farpool_kv_store::lower::Outbox;
use farpool_kv_store::record::Record;
use farpool_kv_tier::log::{Judge, Log, Medium};

/// Items that leave far memory, on their way to flash.
#[derive(Debug, Default)]
pub(super) struct Falling {
    pub(super) has_flash: bool,
    /// Items that far memory drops.
    pub(super) fallen: Outbox,
    /// Items whose zone had to be given up; those that were hit are kept apart.
    emptied: Outbox,
    emptied_hit: Outbox,
    /// How many of them could not go on to flash.
    pub(super) dropped: u64,
}

impl Falling {
    /// Hash and record of the items whose zone had to be given up. Flash may have room for only
    /// some of them: those that were hit come first.
    pub(super) fn emptied(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.emptied_hit.iter().chain(self.emptied.iter())
    }

    pub(super) fn clear(&mut self) {
        self.fallen.clear();
        self.emptied.clear();
        self.emptied_hit.clear();
    }
}

/// The store's verdict on the items of a zone that is reused.
pub(super) struct StoreJudge<'a> {
    pub(super) store: &'a mut Store,
    pub(super) tier: Tier,
    /// Where items that leave far memory go.
    pub(super) falling: Option<&'a mut Falling>,
}

impl StoreJudge<'_> {
    /// Removes an item from the index. True if it was still live.
    fn takes_out(&mut self, record: &Record<'_>, place: Place) -> bool {
        let was_there = self.store.remove_lower(record.hash, self.tier, place);
        was_there && self.store.is_live(record)
    }
}

impl Judge for StoreJudge<'_> {
    fn keeps(&mut self, hash: u64, place: Place) -> bool {
        self.store.lower_hits(hash, self.tier, place).is_some_and(|hits| hits > 0)
    }

    fn moved(&mut self, hash: u64, from: Place, to: Place) {
        self.store.move_lower(hash, self.tier, from, to);
    }

    fn knows(&mut self, hash: u64, place: Place) -> bool {
        self.store.lower_hits(hash, self.tier, place).is_some()
    }

    fn dropped(&mut self, record: &Record<'_>, place: Place) {
        let is_wanted = self.takes_out(record, place);
        if let Some(falling) = self.falling.as_deref_mut().filter(|it| is_wanted && it.has_flash) {
            falling.fallen.push_record(record);
        }
    }

    fn emptied(&mut self, record: &Record<'_>, place: Place) {
        let was_hit = self.keeps(record.hash, place);
        let is_wanted = self.takes_out(record, place);
        match self.falling.as_deref_mut().filter(|_| is_wanted) {
            Some(falling) if !falling.has_flash => falling.dropped += 1,
            Some(falling) if was_hit => falling.emptied_hit.push_record(record),
            Some(falling) => falling.emptied.push_record(record),
            None => {}
        }
    }
}

/// Gives a record to a tier. True if the tier took it.
pub(super) fn give<M: Medium>(
    log: &mut Log<M>,
    store: &mut Store,
    tier: Tier,
    record: (u64, &[u8]),
    falling: Option<&mut Falling>,
) -> bool {
    let (hash, bytes) = record;
    if !log.has_zones() || !store.has_room_for_lower() {
        return false;
    }
    let mut judge = StoreJudge { store, tier, falling };
    let Some(place) = log.append_or_wait(bytes, &mut judge) else { return false };
    let is_known = store.insert_lower(hash, tier, place, 0).is_ok();
    if !is_known {
        // Nothing would remove it when a newer value is stored.
        log.forget(place);
    }
    is_known
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_kv_store::item::{AccessTime, ItemParts};
    use farpool_kv_store::record;
    use farpool_kv_store::{SHARD_BYTES_MIN, StoreSettings};

    fn record_of(hash: u64) -> Vec<u8> {
        let parts = ItemParts { key: b"key", value: [b"value", b""], ..ItemParts::default() };
        let header = parts.header(AccessTime(0), 0);
        let mut item = vec![0; header.item_bytes()];
        parts.write(header, &mut item);
        let mut out = Vec::new();
        record::push(&mut out, hash, hash, &item);
        out
    }

    #[test]
    fn what_was_hit_goes_to_flash_before_the_rest_and_what_is_not_known_does_not() {
        let (limit_bytes, item_bytes_max) = (SHARD_BYTES_MIN, 1 << 10);
        let settings = StoreSettings { limit_bytes, item_bytes_max, evicts: true };
        let mut store = Store::new(settings).expect("there is address space");
        store.keep_victims();
        let place = |hash: u64| Place::new(hash).expect("a small number");
        for hash in 1..7 {
            let hits = u8::from(hash % 3 == 0);
            store.insert_lower(hash, Tier::Far, place(hash), hits).expect("there is room");
        }
        let mut falling = Falling { has_flash: true, ..Falling::default() };
        for hash in 1..8 {
            let bytes = record_of(hash);
            let record = record::read_unchecked(&bytes).expect("it was made just now");
            let (tier, falling) = (Tier::Far, Some(&mut falling));
            StoreJudge { store: &mut store, tier, falling }.emptied(&record, place(hash));
        }
        let order: Vec<u64> = falling.emptied().map(|(hash, _)| hash).collect();
        assert_eq!(order, [3, 6, 1, 2, 4, 5]);
        assert_eq!(store.lower_items(), 0, "the index points there no more");
        falling.clear();
        assert_eq!(falling.emptied().count(), 0);
    }
}
