//! The store under each policy: it has the misses of the pure policy, whatever else happens.

use std::collections::HashSet;

use farpool_kv_store::item::ItemParts;
use farpool_kv_store::key::HashSeed;
use farpool_kv_store::record;
use farpool_kv_store::{Store, StoreError, StoreSettings};
use farpool_policy::Rng;
use farpool_policy::cache::{CacheKind, CacheVisitor, PageCache};

/// The hash of a key in a store whose seed was not set.
fn hash_key(key: &[u8]) -> u64 {
    HashSeed::default().hash_of(key)
}

const KEYS: u32 = 60_000;

fn store(limit_bytes: usize, kind: CacheKind, evicts: bool) -> Store {
    let settings = StoreSettings { limit_bytes, item_bytes_max: 1 << 20, evicts };
    let mut store = Store::new(settings).unwrap();
    store.set_policy(kind).unwrap();
    store.set_now(100);
    store
}

fn insert(store: &mut Store, key: &str, bytes: usize, expires_s: u32) -> Result<(), StoreError> {
    let value = vec![7; bytes];
    let parts =
        ItemParts { key: key.as_bytes(), value: [&value, b""], expires_s, ..ItemParts::default() };
    store.insert(&parts, hash_key(key.as_bytes())).map(|_| ())
}

/// Reads a key. True if it is there.
fn read(store: &mut Store, key: &str) -> bool {
    let found = store.find(key.as_bytes(), hash_key(key.as_bytes()));
    found.map(|found| store.note_read(found)).is_some()
}

/// A heavy-tailed popularity; every fifth part is a scan over all keys.
fn trace(requests: usize) -> Vec<u32> {
    let mut rng = Rng::new(7);
    let mut scan = 0;
    let key = |at: usize| {
        if at / 20_000 % 5 == 4 {
            scan = (scan + 1) % KEYS;
            return scan;
        }
        let below = rng.below(KEYS) + 1;
        let below = rng.below(below) + 1;
        rng.below(below)
    };
    (0..requests).map(key).collect()
}

struct Misses<'t>(&'t [u32]);

impl CacheVisitor for Misses<'_> {
    type Output = usize;

    fn visit(self, mut cache: impl PageCache + Send + 'static) -> usize {
        self.0.iter().filter(|key| !cache.access(**key, &mut |_| {})).count()
    }
}

/// Misses, and the average number of items in the second half.
fn misses(kind: CacheKind, trace: &[u32]) -> (usize, usize) {
    let mut store = store(8 << 20, kind, true);
    let (mut misses, mut items) = (0, 0);
    for (at, key) in trace.iter().enumerate() {
        let name = format!("key{key:09}");
        if !read(&mut store, &name) {
            misses += 1;
            insert(&mut store, &name, 500, 0).unwrap();
        }
        items += if at < trace.len() / 2 { 0 } else { store.items() };
    }
    (misses, items / (trace.len() - trace.len() / 2))
}

/// With items of one size, the memory is a number of items, and the store must have the misses of a
/// cache of that many. It differs because items are evicted in batches of a segment (0.5 % of the
/// items here), and by the policies' small differences on demand (`farpool_policy::ranking`): half
/// a point. S3-FIFO, whose queues consist of segments, may differ by one.
#[test]
fn the_store_misses_what_the_pure_policy_misses() {
    let trace = trace(400_000);
    for kind in CacheKind::ALL {
        let (misses, items) = misses(kind, &trace);
        let pure = kind.visit(KEYS as usize, items, 7, Misses(&trace));
        let (ratio, pure) = (misses as f64 / trace.len() as f64, pure as f64 / trace.len() as f64);
        println!("{kind}: {items} items, store {ratio:.4}, pure {pure:.4}");
        let tolerance = if kind == CacheKind::S3Fifo { 0.01 } else { 0.005 };
        assert!((ratio - pure).abs() < tolerance, "{kind}: store {ratio:.4}, pure {pure:.4}");
    }
}

/// Items evicted for lack of room go to the lower tier, each once and only those gone from memory.
#[test]
fn what_leaves_goes_to_the_lower_tier() {
    for kind in CacheKind::ALL {
        let mut store = store(4 << 20, kind, true);
        store.keep_victims();
        let mut left = HashSet::new();
        for number in 0..20_000u64 {
            let key = format!("key{number}");
            insert(&mut store, &key, 300, 0).unwrap();
            read(&mut store, &format!("key{}", number / 2));
            let Some(outbox) = store.take_outbox() else { continue };
            for (hash, record) in outbox.iter() {
                let key = String::from_utf8(record::key_of(record).unwrap().to_vec()).unwrap();
                assert_eq!(hash, hash_key(key.as_bytes()));
                assert!(!store.is_in_memory(key.as_bytes(), hash), "{kind}: {key} is still there");
                assert!(left.insert(key), "{kind}: left twice");
            }
            store.return_outbox(outbox);
        }
        assert_eq!(store.counts().evictions, left.len() as u64, "{kind}");
        assert_eq!(store.items() + left.len(), 20_000, "{kind}");
    }
}

/// Items of a class of lifetimes expire together; their room is reclaimed before any item has to be
/// evicted for it.
#[test]
fn what_has_expired_goes_first() {
    for kind in CacheKind::ALL {
        let mut store = store(8 << 20, kind, true);
        (0..5_000)
            .for_each(|number| insert(&mut store, &format!("brief{number}"), 400, 150).unwrap());
        (0..5_000)
            .for_each(|number| insert(&mut store, &format!("lasting{number}"), 400, 0).unwrap());
        assert_eq!(store.counts().evictions, 0, "{kind}: there is room for all");
        store.set_now(200);
        (0..7_000).for_each(|number| insert(&mut store, &format!("new{number}"), 400, 0).unwrap());
        assert_eq!(store.counts().evictions, 0, "{kind}");
        assert!(store.counts().reclaimed > 3_000, "{kind}: {:?}", store.counts());
        assert!((0..5_000).all(|number| read(&mut store, &format!("lasting{number}"))), "{kind}");
        let ranked = store.ranked_items();
        assert!(ranked.is_none_or(|items| items == store.items()), "{kind}: {ranked:?}");
    }
}

/// However often the flushed items were read, and with -M as well.
#[test]
fn what_was_flushed_makes_room_first() {
    for (kind, evicts) in CacheKind::ALL.into_iter().flat_map(|kind| [(kind, true), (kind, false)])
    {
        let mut store = store(4 << 20, kind, evicts);
        let old = 3_500;
        for number in 0..old {
            insert(&mut store, &format!("old{number}"), 500, 0).unwrap();
            (0..5).for_each(|_| assert!(read(&mut store, &format!("old{number}"))));
        }
        assert_eq!(store.counts().evictions, 0, "{kind}: there is room for all");
        store.flush_all(None);
        (0..old).for_each(|number| insert(&mut store, &format!("new{number}"), 500, 0).unwrap());
        let counts = store.counts();
        assert_eq!(counts.evictions, 0, "{kind}");
        assert!(counts.reclaimed > 1_000, "{kind}: {counts:?}");
        assert!((0..old).all(|number| read(&mut store, &format!("new{number}"))), "{kind}");
        assert!(!read(&mut store, "old0"), "{kind}");
    }
}

/// With -M new items are refused when the memory is full, and no policy is kept.
#[test]
fn without_eviction_items_are_refused() {
    for kind in CacheKind::ALL {
        let mut store = store(4 << 20, kind, false);
        let taken = (0..).take_while(|n| insert(&mut store, &format!("key{n}"), 500, 0).is_ok());
        let taken = taken.count();
        assert!(taken > 4_000, "{kind}: {taken}");
        assert_eq!((store.items(), store.policy_bytes()), (taken, 0));
        assert!((0..taken).all(|number| read(&mut store, &format!("key{number}"))));
    }
}

/// `cache_memlimit`, down and up again.
#[test]
fn a_limit_that_changes_is_kept() {
    for kind in CacheKind::ALL {
        let mut store = store(16 << 20, kind, true);
        let mut number = 0;
        for limit_bytes in [16 << 20, 5 << 20, 12 << 20, 4 << 20, 32 << 20] {
            store.set_limit(limit_bytes).unwrap();
            assert!(store.used_bytes() <= limit_bytes, "{kind}: {}", store.used_bytes());
            for _ in 0..60_000 {
                number += 1;
                insert(&mut store, &format!("key{number}"), 600, 0).unwrap();
                read(&mut store, &format!("key{}", number - number % 5));
                assert!(store.used_bytes() <= limit_bytes, "{kind}: {}", store.used_bytes());
            }
            let tables_bytes = store.index_bytes() + store.policy_bytes();
            let share = store.item_bytes() as f64 / (limit_bytes - tables_bytes) as f64;
            assert!(share > 0.8, "{kind}: {share:.2} of {limit_bytes} bytes are items");
        }
    }
}

/// An item that was read, touched or stored anew stays under least recently used.
#[test]
fn what_was_used_last_stays_under_lru() {
    let mut store = store(4 << 20, CacheKind::Lru, true);
    for key in ["read", "stored", "left"] {
        insert(&mut store, key, 500, 0).unwrap();
    }
    for number in 0..50_000 {
        insert(&mut store, &format!("key{number}"), 500, 0).unwrap();
        if number % 1000 == 0 {
            assert!(read(&mut store, "read"));
            // In place, and elsewhere because of its size.
            insert(&mut store, "stored", if number % 2000 == 0 { 500 } else { 300 }, 0).unwrap();
        }
    }
    assert!(read(&mut store, "read") && read(&mut store, "stored") && !read(&mut store, "left"));
    let evictions = store.counts().evictions;
    assert_eq!(store.items() as u64 + evictions, 50_003);
}

/// If evicted items are anywhere, items move to close the holes: not too many, and their metadata
/// moves with them.
#[test]
fn items_that_move_stay_what_they_are() {
    let mut store = store(4 << 20, CacheKind::Random, true);
    insert(&mut store, "old", 700, 90_000).unwrap();
    let found = store.find(b"old", hash_key(b"old")).unwrap();
    let cas = store.cas(found);
    let mut seen = 0;
    for number in 0..100_000u32 {
        store.set_now(100 + number / 10);
        insert(&mut store, &format!("key{number}"), 500, 0).unwrap();
        if number % 100 == 0 {
            // Touched, but not read: the time must survive every move.
            if let Some(found) = store.find(b"old", hash_key(b"old")) {
                assert_eq!((store.cas(found), store.accessed_s(found)), (cas, 100));
                assert_eq!(store.view(found).expires_s(), 90_000);
                seen = number;
            }
        }
    }
    assert!(seen > 1_000, "it went at {seen}");
    let counts = store.counts();
    let moved_each = counts.moved as f64 / counts.total_items as f64;
    assert!((0.5..8.0).contains(&moved_each), "{moved_each:.1} moved for each that was stored");
}
