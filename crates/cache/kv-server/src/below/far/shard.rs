//! A shard's side of far memory that comes and goes: it takes, empties and drops shares, and has
//! its index forget their items.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::order::{FarOrder, Held};
use crate::watch::report::ReclaimCounts;
use farpool_kv_store::Store;
use farpool_kv_tier::far::{Far, GrantNumber};

/// Parts of the index (of 1 to 2 MiB) that are scanned for hit items before clients are served
/// again.
const RANKED_PARTS: usize = 4;

/// Shares that have to be given back, and zones that the index is to forget.
#[derive(Debug, Default)]
pub struct Reclaim {
    pub(crate) counts: ReclaimCounts,
    held: Vec<(GrantNumber, Arc<Held>)>,
    /// When the rest of each is dropped; None once it has been.
    leaving: Vec<(GrantNumber, Option<Instant>)>,
    /// Set while hit items are counted: zones with hits are emptied first.
    ranking: Option<Ranking>,
    forgetting: Option<Forgetting>,
}

/// A walk over the index that counts the hit items of zones that wait to be emptied.
#[derive(Debug, Default)]
struct Ranking {
    part: usize,
    hit: HashMap<usize, u64>,
}

/// A walk over the index.
#[derive(Debug)]
struct Forgetting {
    zones: Vec<usize>,
    part: usize,
}

impl Reclaim {
    pub(crate) fn is_busy(&self) -> bool {
        !self.leaving.is_empty() || self.is_walking()
    }

    /// Whether it is walking the index, and so need not wait for any event.
    pub(crate) const fn is_walking(&self) -> bool {
        self.ranking.is_some() || self.forgetting.is_some()
    }

    pub(crate) fn obey(&mut self, far: &mut Far, order: FarOrder, has_flash: bool) {
        match order {
            FarOrder::Take { share, held } => {
                self.held.push((share.grant, held));
                far.take_share(*share);
            }
            FarOrder::Empty { grant, until } => {
                far.leave_share(grant);
                // Its items have nowhere to go, so its donor need not wait.
                let is_pointless = !has_flash && !far.has_zones();
                if is_pointless {
                    far.drop_share(grant, false);
                } else {
                    self.ranking = Some(Ranking::default());
                }
                // A dropped share stays dropped, and the earlier deadline holds.
                let known = self.leaving.iter().find(|(it, _)| *it == grant).map(|it| it.1);
                let until = known.unwrap_or(Some(until)).map(|known| known.min(until));
                self.leaving.retain(|(it, _)| *it != grant);
                self.leaving.push((grant, until.filter(|_| !is_pointless)));
            }
            FarOrder::Drop { grant, is_lost } => {
                far.drop_share(grant, is_lost);
                self.leaving.retain(|(it, _)| *it != grant);
                self.leaving.push((grant, None));
            }
            FarOrder::DropLost { grant } => far.drop_lost(grant),
        }
    }

    /// Does one step: empties the next zone, drops what is overdue, gives up empty shares, and
    /// forgets one part of the index. `now` is given only from time to time.
    pub(crate) fn go_on(
        &mut self,
        far: &mut Far,
        store: &mut Store,
        is_backed_up: bool,
        now: Option<Instant>,
    ) {
        self.rank(far, store);
        if !self.leaving.is_empty() {
            if !is_backed_up {
                far.empty_next();
            }
            for (grant, until) in &mut self.leaving {
                if now.zip(*until).is_some_and(|(now, until)| now >= until) {
                    *until = None;
                    far.drop_share(*grant, false);
                }
            }
            let ended: Vec<GrantNumber> = self
                .leaving
                .extract_if(.., |(grant, _)| far.end_share(*grant))
                .map(|it| it.0)
                .collect();
            for (_, held) in self.held.extract_if(.., |(grant, _)| ended.contains(grant)) {
                held.give_up();
            }
        }
        self.forget(far, store);
    }

    /// Continues to rank the zones that are to be emptied. Until that is done they are emptied in
    /// their present order: memory that is wanted back waits for nothing.
    fn rank(&mut self, far: &mut Far, store: &Store) {
        for _ in 0..RANKED_PARTS {
            let Some(Ranking { part, hit }) = &mut self.ranking else { return };
            let goes_on = store.see_hit_in_far(*part, |place| {
                if let Some(zone) = far.leaving_at(place) {
                    *hit.entry(zone).or_default() += 1;
                }
            });
            *part += 1;
            if !goes_on {
                far.order_leaving(|zone| hit.get(&zone).copied().unwrap_or(0));
                self.ranking = None;
            }
        }
    }

    fn forget(&mut self, far: &mut Far, store: &mut Store) {
        let Some(walk) = &mut self.forgetting else {
            let zones = far.to_forget();
            if !zones.is_empty() {
                self.forgetting = Some(Forgetting { zones, part: 0 });
            }
            return;
        };
        let counts = &mut self.counts;
        let goes_on = store.forget_far_in(walk.part, |place| {
            let gone = far.gone_at(place);
            counts.lost += u64::from(gone == Some(true));
            counts.dropped += u64::from(gone == Some(false));
            gone.is_some()
        });
        walk.part += 1;
        if !goes_on {
            far.forgotten(&walk.zones);
            self.forgetting = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use farpool_blade::{BladeConfig, Server as Blade};
    use farpool_keyvault::owner::hash_key;
    use farpool_pool::{Address, BladeSpec, Pool, PoolConfig, fresh_client};

    use super::*;
    use farpool_kv_store::index::{Place, Tier};
    use farpool_kv_store::item::{AccessTime, ItemParts};
    use farpool_kv_store::record::{self, Record};
    use farpool_kv_store::{SHARD_BYTES_MIN, StoreSettings};
    use farpool_kv_tier::far::{FarMemory, Share};
    use farpool_kv_tier::log::{Judge, Medium};

    /// After this long without an event, a test fails.
    const PATIENCE: Duration = Duration::from_secs(30);

    /// Records what it is shown, and knows no item.
    #[derive(Default)]
    struct Notes(Vec<u64>);

    impl Judge for Notes {
        fn keeps(&mut self, _hash: u64, _place: Place) -> bool {
            false
        }
        fn knows(&mut self, _hash: u64, _place: Place) -> bool {
            false
        }
        fn moved(&mut self, _hash: u64, _from: Place, _to: Place) {}
        fn dropped(&mut self, record: &Record<'_>, _place: Place) {
            self.0.push(record.stored_as);
        }
    }

    fn hash_of(number: u64) -> u64 {
        hash_key(&number.to_le_bytes())
    }

    fn record_of(number: u64) -> Vec<u8> {
        let value = vec![7; 500_000];
        let parts = ItemParts { key: b"key", value: [&value, b""], ..ItemParts::default() };
        let header = parts.header(AccessTime(0), 0);
        let mut item = vec![0; header.item_bytes()];
        parts.write(header, &mut item);
        let mut out = Vec::new();
        record::push(&mut out, hash_of(number), number, &item);
        out
    }

    /// All of a blade's superpage, with a connection to it.
    fn share(blade: &Address) -> Share {
        let pool = Pool::connect(PoolConfig {
            blades: vec![BladeSpec::from(blade.clone())],
            client: fresh_client().expect("random numbers"),
            client_name: "test".into(),
            quota_bytes: 16 << 20,
            sharing_group: None,
            deadline: PATIENCE,
            allow_remote_tcp: false,
            redundancy: farpool_pool::Redundancy::NONE,
            seals_pages: true,
            secures_tcp: false,
            asks: None,
            time: farpool_pool::Time::KERNEL,
        })
        .expect("the blade listens");
        let segment = pool.create_segment().expect("a segment");
        pool.allocate_superpage(segment, 0).expect("a superpage");
        let lane = pool.lane().expect("a lane");
        Share { grant: GrantNumber(1), pool: Arc::new(pool), lane, segment, superpages: vec![0] }
    }

    #[test]
    fn zones_with_what_was_hit_are_emptied_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let address = Address::Unix(folder.path().join("blade.sock"));
        let config = BladeConfig { memory_bytes: 64 << 20, ..BladeConfig::default() };
        let blade = Blade::bind(&[address], config).and_then(Blade::serve).expect("a blade");
        let (limit_bytes, item_bytes_max) = (SHARD_BYTES_MIN, 1 << 20);
        let settings = StoreSettings { limit_bytes, item_bytes_max, evicts: true };
        let mut store = Store::new(settings).expect("there is address space");
        store.keep_victims();
        let mut far = Far::growing(FarMemory::default());
        let mut reclaim = Reclaim::default();
        let (share, held) = (Box::new(share(&blade.addresses()[0])), Held::by(1));
        let take = FarOrder::Take { share, held: Arc::clone(&held) };
        reclaim.obey(&mut far, take, true);
        let mut notes = Notes::default();
        let deadline = Instant::now() + PATIENCE;
        let look = |far: &mut Far, notes: &mut Notes| {
            assert!(Instant::now() < deadline, "waited in vain");
            far.poll(Some(Instant::now()), notes);
            far.medium().wait(Duration::from_millis(1));
        };
        // Four in each of four zones; the last ones are hit.
        for number in 1..=16 {
            let place = loop {
                match far.append(&record_of(number)) {
                    Some(place) => break place,
                    None => look(&mut far, &mut notes),
                }
            };
            let hits = u8::from(number > 12 || number == 6);
            store.insert_lower(hash_of(number), Tier::Far, place, hits).expect("there is room");
        }
        far.close();
        while far.is_writing() {
            look(&mut far, &mut notes);
        }
        let empty = FarOrder::Empty { grant: GrantNumber(1), until: Instant::now() + PATIENCE };
        reclaim.obey(&mut far, empty, true);
        assert!(reclaim.is_walking(), "it looks for what was hit, and need not wait for it");
        while !held.is_free() {
            reclaim.go_on(&mut far, &mut store, false, None);
            look(&mut far, &mut notes);
        }
        let zones: Vec<u64> = notes.0.chunks(4).map(|numbers| (numbers[0] - 1) / 4).collect();
        assert_eq!(zones, [3, 1, 0, 2], "{:?}", notes.0);
        drop(far);
        blade.shutdown();
    }
}
