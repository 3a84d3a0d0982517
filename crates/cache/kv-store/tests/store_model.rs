//! The store against a plain map: it returns the value stored last, or nothing; nothing is lost
//! while there is room; memory stays below the limit whatever the sizes.

use std::collections::HashMap;

use farpool_kv_store::item::ItemParts;
use farpool_kv_store::key::HashSeed;
use farpool_kv_store::{Store, StoreError, StoreSettings};
use farpool_policy::CacheKind;
use proptest::prelude::*;

/// The hash of a key in a store whose seed was not set.
fn hash_key(key: &[u8]) -> u64 {
    HashSeed::default().hash_of(key)
}

#[derive(Debug, Clone)]
enum Step {
    Store {
        key: u16,
        bytes: usize,
        expires_in_s: u32,
    },
    Read {
        key: u16,
    },
    /// The position that this remembers may be wrong later.
    LoadAhead {
        key: u16,
    },
    Touch {
        key: u16,
        expires_in_s: u32,
    },
    Renumber {
        key: u16,
    },
    Remove {
        key: u16,
    },
    Flush,
    FlushLater {
        in_s: u32,
    },
    Wait {
        seconds: u32,
    },
}

#[derive(Debug, Clone)]
struct Kept {
    value: Vec<u8>,
    client_flags: u32,
    expires_s: u32,
    cas: u64,
}

fn steps(keys: u16, bytes_max: usize) -> impl Strategy<Value = Vec<Step>> {
    let lifetime = prop_oneof![3 => Just(0u32), 1 => 1u32..40, 1 => 40u32..100_000];
    let key = 0..keys;
    let step = prop_oneof![
        10 => (key.clone(), 0..bytes_max, lifetime.clone())
            .prop_map(|(key, bytes, expires_in_s)| Step::Store { key, bytes, expires_in_s }),
        8 => key.clone().prop_map(|key| Step::Read { key }),
        4 => key.clone().prop_map(|key| Step::LoadAhead { key }),
        2 => (key.clone(), lifetime).prop_map(|(key, expires_in_s)| Step::Touch { key, expires_in_s }),
        1 => key.clone().prop_map(|key| Step::Renumber { key }),
        2 => key.prop_map(|key| Step::Remove { key }),
        1 => prop_oneof![8 => Just(0u32), 1 => Just(1u32)].prop_map(|now| match now {
            0 => Step::Wait { seconds: 3 },
            _ => Step::Flush,
        }),
        1 => prop_oneof![9 => Just(0u32), 1 => 1u32..30].prop_map(|in_s| match in_s {
            0 => Step::Wait { seconds: 40_000 },
            in_s => Step::FlushLater { in_s },
        }),
    ];
    prop::collection::vec(step, 1..600)
}

fn value(key: u16, number: usize, bytes: usize) -> Vec<u8> {
    let mut value = format!("{key}:{number}:").into_bytes();
    value.resize(bytes, u8::try_from(number % 251).unwrap());
    value
}

struct Run {
    store: Store,
    model: HashMap<u16, Kept>,
    flush_at_s: Option<u32>,
    /// Whether every item of the model must be there.
    has_room: bool,
}

impl Run {
    fn find(&mut self, key: u16) -> Result<Option<farpool_kv_store::Found>, TestCaseError> {
        let name = format!("key{key:09}");
        let now_s = self.store.now_s();
        if self.model.get(&key).is_some_and(|kept| kept.expires_s != 0 && kept.expires_s <= now_s) {
            self.model.remove(&key);
        }
        let found = self.store.find(name.as_bytes(), hash_key(name.as_bytes()));
        match (found, self.model.get(&key)) {
            (Some(found), Some(kept)) => {
                let view = self.store.view(found);
                prop_assert_eq!(view.key(), name.as_bytes());
                prop_assert!(view.value() == kept.value, "the value of {} is another", name);
                prop_assert_eq!(view.client_flags(), kept.client_flags);
                prop_assert_eq!(view.expires_s(), kept.expires_s);
                prop_assert_eq!(self.store.cas(found), kept.cas);
            }
            (Some(_), None) => prop_assert!(false, "{} is there, and should not be", name),
            (None, Some(_)) => {
                prop_assert!(!self.has_room, "{} is lost", name);
                self.model.remove(&key);
            }
            (None, None) => {}
        }
        Ok(found)
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each kind of step")]
    fn step(&mut self, number: usize, step: &Step) -> Result<(), TestCaseError> {
        let now_s = self.store.now_s();
        match *step {
            Step::Store { key, bytes, expires_in_s } => {
                let name = format!("key{key:09}");
                let value = value(key, number, bytes);
                let client_flags = if number.is_multiple_of(3) { 7 } else { 0 };
                let expires_s = if expires_in_s == 0 { 0 } else { now_s + expires_in_s };
                let (first, second) = value.split_at(value.len() / 2);
                let parts = ItemParts {
                    key: name.as_bytes(),
                    value: [first, second],
                    client_flags,
                    expires_s,
                    ..ItemParts::default()
                };
                match self.store.insert(&parts, hash_key(name.as_bytes())) {
                    Ok(found) => {
                        let cas = self.store.cas(found);
                        self.model.insert(key, Kept { value, client_flags, expires_s, cas });
                    }
                    Err(StoreError::OutOfMemory) => prop_assert!(!self.has_room),
                    Err(StoreError::TooLarge) => {
                        prop_assert!(false, "{} bytes are not too large", bytes)
                    }
                }
                self.find(key)?;
            }
            Step::LoadAhead { key } => {
                let hash = hash_key(format!("key{key:09}").as_bytes());
                self.store.prefetch_entry(hash);
                self.store.prefetch_item(hash);
            }
            Step::Read { key } => {
                if let Some(found) = self.find(key)? {
                    self.store.note_read(found);
                }
            }
            Step::Touch { key, expires_in_s } => {
                if let Some(found) = self.find(key)? {
                    let expires_s = if expires_in_s == 0 { 0 } else { now_s + expires_in_s };
                    let name = format!("key{key:09}");
                    self.store.set_expiry(found, hash_key(name.as_bytes()), expires_s).unwrap();
                    self.model.get_mut(&key).unwrap().expires_s = expires_s;
                    self.find(key)?;
                }
            }
            Step::Renumber { key } => {
                if let Some(found) = self.find(key)? {
                    let name = format!("key{key:09}");
                    let cas = self.store.next_cas();
                    self.store.set_cas(found, hash_key(name.as_bytes()), cas).unwrap();
                    self.model.get_mut(&key).unwrap().cas = cas;
                    self.find(key)?;
                }
            }
            Step::Remove { key } => {
                if let Some(found) = self.find(key)? {
                    self.store.remove(found);
                    self.model.remove(&key);
                }
            }
            Step::Flush => {
                self.store.flush_all(None);
                self.flush_at_s = None;
                self.model.clear();
            }
            Step::FlushLater { in_s } => {
                self.store.flush_all(Some(now_s + in_s));
                self.flush_at_s = Some(now_s + in_s);
            }
            Step::Wait { seconds } => {
                self.store.set_now(now_s + seconds);
                if self.flush_at_s.is_some_and(|at_s| at_s <= now_s + seconds) {
                    self.flush_at_s = None;
                    self.model.clear();
                }
            }
        }
        let settings = self.store.settings();
        prop_assert!(
            self.store.used_bytes() <= settings.limit_bytes,
            "{} bytes",
            self.store.used_bytes()
        );
        let ranked = self.store.ranked_items();
        prop_assert!(ranked.is_none_or(|items| items == self.store.items()), "{:?}", ranked);
        Ok(())
    }
}

fn store(limit_bytes: usize, kind: CacheKind) -> Store {
    let settings = StoreSettings { limit_bytes, item_bytes_max: 1 << 20, evicts: true };
    let mut store = Store::new(settings).unwrap();
    store.set_policy(kind).unwrap();
    store.set_now(62);
    store
}

fn run(
    limit_bytes: usize,
    kind: CacheKind,
    has_room: bool,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let store = store(limit_bytes, kind);
    let mut run = Run { store, model: HashMap::new(), flush_at_s: None, has_room };
    for (number, step) in steps.iter().enumerate() {
        run.step(number, step)?;
    }
    for key in 0..1000 {
        run.find(key)?;
    }
    Ok(())
}

/// The default as often as all others together.
fn kind() -> impl Strategy<Value = CacheKind> {
    prop_oneof![Just(CacheKind::S3Fifo), prop::sample::select(&CacheKind::ALL[..])]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, .. ProptestConfig::default() })]

    #[test]
    fn with_room_nothing_is_lost(kind in kind(), steps in steps(60, 9_000)) {
        run(64 << 20, kind, true, &steps)?;
    }

    #[test]
    fn without_room_what_is_there_is_right(kind in kind(), steps in steps(1000, 40_000)) {
        run(4 << 20, kind, false, &steps)?;
    }

    #[test]
    fn large_items_come_and_go(kind in kind(), steps in steps(30, 900_000)) {
        run(6 << 20, kind, false, &steps)?;
    }
}

/// Sizes shift repeatedly; memory used for one size can be reused for the next.
#[test]
fn shifting_sizes_leave_no_memory_behind() {
    for kind in CacheKind::ALL {
        shift_sizes(kind);
    }
}

fn shift_sizes(kind: CacheKind) {
    let limit_bytes = if kind == CacheKind::S3Fifo { 32 << 20 } else { 16 << 20 };
    let mut store = store(limit_bytes, kind);
    // Policies other than the store's own leave holes, and keep their state apart.
    let least = if kind == CacheKind::S3Fifo { 0.9 } else { 0.85 };
    for (round, bytes) in [100usize, 5000, 64, 200_000, 900, 64].into_iter().enumerate() {
        let mut stored = 0;
        for number in 0.. {
            let name = format!("{round}:{number}");
            let parts = ItemParts {
                key: name.as_bytes(),
                value: [&vec![7; bytes], b""],
                ..ItemParts::default()
            };
            store.insert(&parts, hash_key(name.as_bytes())).unwrap();
            stored += bytes;
            if stored > 2 * limit_bytes {
                break;
            }
        }
        assert!(store.used_bytes() <= limit_bytes);
        assert!(store.resident_bytes() <= limit_bytes, "{kind}: {} bytes", store.resident_bytes());
        let tables_bytes = store.index_bytes() + store.policy_bytes();
        let share = store.item_bytes() as f64 / (limit_bytes - tables_bytes) as f64;
        assert!(share > least, "{kind}: items of {bytes} bytes fill {share:.2} of the memory");
        // The policy's state shrinks with the items; LIRS has the largest.
        let most = (2 << 20) + 150 * store.items();
        assert!(store.policy_bytes() < most, "{kind}: {} bytes", store.policy_bytes());
    }
}

/// Keys that are read twice stay while others stream past.
#[test]
fn what_is_read_stays() {
    let mut store = store(16 << 20, CacheKind::S3Fifo);
    let hot: Vec<String> = (0..2000).map(|number| format!("hot{number}")).collect();
    let store_one = |store: &mut Store, name: &str| {
        let parts =
            ItemParts { key: name.as_bytes(), value: [&[1; 500], b""], ..ItemParts::default() };
        store.insert(&parts, hash_key(name.as_bytes())).unwrap();
    };
    hot.iter().for_each(|name| store_one(&mut store, name));
    for number in 0..200_000 {
        let name = &hot[number % hot.len()];
        if let Some(found) = store.find(name.as_bytes(), hash_key(name.as_bytes())) {
            store.note_read(found);
        }
        store_one(&mut store, &format!("cold{number}"));
    }
    let kept = hot
        .iter()
        .filter(|name| store.find(name.as_bytes(), hash_key(name.as_bytes())).is_some())
        .count();
    assert!(kept > 1990, "{kept} of 2000 hot items are there");
}

/// 12-byte keys with 64-byte values, at sizes in and between the index's steps of growth.
#[test]
fn an_item_costs_at_most_105_bytes() {
    let mut store = store(1 << 30, CacheKind::S3Fifo);
    let mut next_check = 250_000;
    for number in 0..2_000_000usize {
        let name = format!("key{number:09}");
        let parts =
            ItemParts { key: name.as_bytes(), value: [&[7; 64], b""], ..ItemParts::default() };
        store.insert(&parts, hash_key(name.as_bytes())).unwrap();
        if number == next_check {
            let each = store.used_bytes() as f64 / number as f64;
            assert!(each <= 105.0, "{each:.1} bytes for each of {number} items");
            next_check += 50_000;
        }
    }
}

/// Keys with one hash need more places than two buckets have: none is refused, and none leaves
/// memory behind.
#[test]
fn keys_with_one_hash_are_all_stored_and_leave_no_memory_behind() {
    const HASH: u64 = 0x1234_5678_9abc_def0;
    for kind in [CacheKind::S3Fifo, CacheKind::Lru] {
        let mut store = store(16 << 20, kind);
        let name = |number: usize| format!("key{number:05}");
        for round in 0..2usize {
            for number in 0..2000 {
                let (key, value) = (name(number), vec![7; 10 + round]);
                let parts =
                    ItemParts { key: key.as_bytes(), value: [&value, b""], ..ItemParts::default() };
                store.insert(&parts, HASH).unwrap_or_else(|error| panic!("{kind}: {error}"));
            }
            assert_eq!(store.items(), 2000, "{kind}");
        }
        for number in 0..2000 {
            let found = store.find(name(number).as_bytes(), HASH);
            store.remove(found.unwrap_or_else(|| panic!("{kind}: {number} is lost")));
        }
        assert_eq!((store.items(), store.item_bytes()), (0, 0), "{kind}");
    }
}

/// Two keys whose hashes agree in all that the index keeps: an entry loaded ahead for one may be
/// the other's.
#[test]
fn keys_that_look_alike_are_told_apart() {
    let mut seen = HashMap::new();
    let name = |number: u32| format!("key{number}");
    let alike = (0..1_000_000).find_map(|number| {
        let upper_half = hash_key(name(number).as_bytes()) >> 32;
        seen.insert(upper_half, number).map(|other| [name(other), name(number)])
    });
    let [first, second] = alike.expect("a million keys have such a pair");
    let settings = StoreSettings { limit_bytes: 8 << 20, item_bytes_max: 1 << 20, evicts: true };
    let mut store = Store::new(settings).unwrap();
    let load_ahead = |store: &mut Store, key: &str| {
        store.prefetch_entry(hash_key(key.as_bytes()));
        store.prefetch_item(hash_key(key.as_bytes()));
    };
    let put = |store: &mut Store, key: &str| {
        let parts =
            ItemParts { key: key.as_bytes(), value: [key.as_bytes(), b""], ..ItemParts::default() };
        store.insert(&parts, hash_key(key.as_bytes())).unwrap();
    };
    let get = |store: &mut Store, key: &str| {
        let found = store.find(key.as_bytes(), hash_key(key.as_bytes()))?;
        Some(store.view(found).value().to_vec())
    };
    put(&mut store, &first);
    load_ahead(&mut store, &second);
    assert_eq!(get(&mut store, &second), None);
    put(&mut store, &second);
    for key in [&first, &second, &first] {
        [&first, &second].iter().for_each(|it| load_ahead(&mut store, it));
        assert_eq!(get(&mut store, key).as_deref(), Some(key.as_bytes()));
    }
    let found = store.find(first.as_bytes(), hash_key(first.as_bytes())).unwrap();
    store.remove(found);
    assert_eq!(get(&mut store, &first), None);
    assert_eq!(get(&mut store, &second).as_deref(), Some(second.as_bytes()));
}

#[test]
fn an_item_takes_any_cas_number() {
    let mut store = store(8 << 20, CacheKind::S3Fifo);
    let hash = store.hash_of(b"key");
    let parts = ItemParts { key: b"key", value: [b"value", b""], ..ItemParts::default() };
    for cas in [u64::MAX, 1 << 40, 0, 1, u64::MAX - 1] {
        let found = store.insert(&parts, hash).expect("there is room");
        let found = store.set_cas(found, hash, cas).expect("there is room");
        assert_eq!((store.cas(found), store.view(found).value()), (cas, &b"value"[..]));
    }
}
