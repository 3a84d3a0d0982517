//! Quotas against a recount: a prefix's use is the sum of its items, and never more than its limit.

use farpool_kv_store::item::ItemParts;
use farpool_kv_store::key::HashSeed;
use farpool_kv_store::{Store, StoreError, StoreSettings};
use farpool_policy::CacheKind;
use proptest::prelude::*;

/// The hash of a key in a store whose seed was not set.
fn hash_key(key: &[u8]) -> u64 {
    HashSeed::default().hash_of(key)
}

const LIMITS: [(&[u8], u64); 3] = [(b"a:", 20_000), (b"a:long:", 8_000), (b"b:", 3_000)];

fn store(evicts: bool, kind: CacheKind) -> Store {
    let settings = StoreSettings { limit_bytes: 4 << 20, item_bytes_max: 1 << 20, evicts };
    let mut store = Store::new(settings).unwrap();
    store.set_policy(kind).unwrap();
    store.set_quotas(LIMITS.map(|(prefix, bytes)| (prefix.to_vec(), bytes)));
    store.set_now(100);
    store
}

fn insert(store: &mut Store, key: &str, bytes: usize) -> Result<(), StoreError> {
    let value = vec![7; bytes];
    let parts = ItemParts { key: key.as_bytes(), value: [&value, b""], ..ItemParts::default() };
    store.insert(&parts, hash_key(key.as_bytes())).map(|_| ())
}

fn is_there(store: &mut Store, key: &str) -> bool {
    store.find(key.as_bytes(), hash_key(key.as_bytes())).is_some()
}

/// Memory of the items by quota, counted one by one.
fn recount(store: &Store) -> Vec<(u64, u64)> {
    let quotas = store.quotas();
    let mut counted = vec![(0, 0); quotas.len()];
    let mut next = Some(0);
    while let Some(from) = next {
        next = store.walk_segment(from, |it| {
            let key = it.view.key();
            if let Some(at) = quotas.iter().position(|quota| key.starts_with(&quota.prefix)) {
                counted[at].0 += it.view.header().footprint_bytes() as u64;
                counted[at].1 += 1;
            }
            true
        });
    }
    counted
}

#[derive(Debug, Clone)]
enum Step {
    Store { prefix: usize, key: u16, bytes: usize },
    Read { prefix: usize, key: u16 },
    Remove { prefix: usize, key: u16 },
}

fn step() -> impl Strategy<Value = Step> {
    let at = (0usize..4, 0u16..60);
    prop_oneof![
        5 => (at.clone(), prop_oneof![9 => 0usize..600, 1 => 0usize..9000])
            .prop_map(|((prefix, key), bytes)| Step::Store { prefix, key, bytes }),
        3 => at.clone().prop_map(|(prefix, key)| Step::Read { prefix, key }),
        1 => at.prop_map(|(prefix, key)| Step::Remove { prefix, key }),
    ]
}

fn name(prefix: usize, key: u16) -> String {
    format!("{}{key}", ["a:", "a:long:", "b:", "c:"][prefix])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn no_prefix_takes_more_than_it_may(
        kind in prop::sample::select(&CacheKind::ALL[..]),
        steps in prop::collection::vec(step(), 1..500), fill: bool,
    ) {
        let mut store = store(true, kind);
        for (number, step) in steps.iter().enumerate() {
            match *step {
                Step::Store { prefix, key, bytes } => {
                    let name = name(prefix, key);
                    let stored = insert(&mut store, &name, bytes);
                    prop_assert_eq!(stored.is_ok(), stored.is_ok() && is_there(&mut store, &name));
                    prop_assert!(stored.is_ok() || bytes > 2500, "{} of {} bytes", name, bytes);
                }
                Step::Read { prefix, key } => {
                    let name = name(prefix, key);
                    if let Some(found) = store.find(name.as_bytes(), hash_key(name.as_bytes())) {
                        store.note_read(found);
                    }
                }
                Step::Remove { prefix, key } => {
                    let name = name(prefix, key);
                    if let Some(found) = store.find(name.as_bytes(), hash_key(name.as_bytes())) {
                        store.remove(found);
                    }
                }
            }
            if fill {
                // General eviction happens beside that of the quotas.
                insert(&mut store, &format!("fill{number}"), 60_000).unwrap();
            }
            let reports = store.quotas();
            for (report, counted) in reports.iter().zip(recount(&store)) {
                prop_assert_eq!((report.used_bytes, report.items), counted);
                prop_assert!(report.used_bytes <= report.limit_bytes, "{:?}", report);
            }
            prop_assert!(store.ranked_items().is_none_or(|items| items == store.items()));
        }
    }
}

#[test]
fn the_oldest_of_the_prefix_go_and_nobody_else() {
    for kind in CacheKind::ALL {
        the_oldest_of_the_prefix_go(store(true, kind));
    }
}

fn the_oldest_of_the_prefix_go(mut store: Store) {
    insert(&mut store, "other", 1000).unwrap();
    insert(&mut store, "b:read", 400).unwrap();
    for _ in 0..3 {
        let found = store.find(b"b:read", hash_key(b"b:read")).unwrap();
        store.note_read(found);
    }
    for number in 0..30 {
        insert(&mut store, &format!("b:{number}"), 400).unwrap();
    }
    assert!(is_there(&mut store, "other") && is_there(&mut store, "b:29"));
    assert!(!is_there(&mut store, "b:0") && !is_there(&mut store, "b:10"));
    let report = store.quotas().into_iter().find(|it| it.prefix == b"b:").unwrap();
    assert!(report.evictions >= 24 && report.items >= 5, "{report:?}");
    assert_eq!(store.counts().evictions, report.evictions);
}

#[test]
fn without_eviction_the_quota_refuses() {
    let mut store = store(false, CacheKind::Lru);
    let items = (0..).take_while(|number| insert(&mut store, &format!("b:{number}"), 400).is_ok());
    assert!(items.count() >= 5);
    assert_eq!(insert(&mut store, "b:more", 400), Err(StoreError::OutOfMemory));
    assert_eq!(insert(&mut store, "b:0", 400), Ok(()), "what is replaced makes room itself");
    assert_eq!(insert(&mut store, "c:more", 400), Ok(()));
    assert_eq!(insert(&mut store, "b:0", 4000), Err(StoreError::OutOfMemory));
}
