//! Leases against what they must show: the value as it was when it was leased, read through a
//! mapping as a client has it, whatever happens to the item; and nothing is left behind when they
//! end.

use std::collections::HashMap;
use std::os::fd::AsFd;

use farpool_keyvault::items::ItemMemory;
use farpool_kv_store::arena::{Arena, Queue, Segment};
use farpool_kv_store::item::{AccessTime, ItemParts};
use farpool_kv_store::key::HashSeed;
use farpool_kv_store::lease::{LEASED_PERCENT_MAX, LeasedValue, LeasesHeld};
use farpool_kv_store::{SHARD_BYTES_MIN, Store, StoreError, StoreSettings};
use farpool_policy::CacheKind;
use proptest::prelude::*;
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};

/// The hash of a key in a store whose seed was not set.
fn hash_key(key: &[u8]) -> u64 {
    HashSeed::default().hash_of(key)
}

const LIMIT_BYTES: usize = 6 << 20;

#[derive(Debug, Clone)]
enum Step {
    Store { key: u16, bytes: usize, expires_in_s: u32 },
    Overwrite { key: u16 },
    Touch { key: u16, expires_in_s: u32 },
    Read { key: u16 },
    Remove { key: u16 },
    Lease { key: u16 },
    Release { which: prop::sample::Index },
    Flush,
    Wait { seconds: u32 },
    Limit { mebibytes: usize },
    CutStrays,
}

/// Few sizes, so that new values often fit in place of old ones; some get a segment of their own.
fn steps(changes_limit: bool) -> impl Strategy<Value = Vec<Step>> {
    let key = 0u16..150;
    let bytes = prop_oneof![
        6 => Just(100usize), 4 => Just(1000), 3 => Just(7000), 2 => Just(9000), 1 => Just(60_000), 1 => Just(300_000),
    ];
    let lifetime = prop_oneof![3 => Just(0u32), 1 => 1u32..40, 1 => 40u32..10_000];
    let limit = if changes_limit { 1 } else { 0 };
    let step = prop_oneof![
        12 => (key.clone(), bytes, lifetime.clone())
            .prop_map(|(key, bytes, expires_in_s)| Step::Store { key, bytes, expires_in_s }),
        4 => key.clone().prop_map(|key| Step::Overwrite { key }),
        1 => (key.clone(), lifetime).prop_map(|(key, expires_in_s)| Step::Touch { key, expires_in_s }),
        3 => key.clone().prop_map(|key| Step::Read { key }),
        3 => key.clone().prop_map(|key| Step::Remove { key }),
        6 => key.prop_map(|key| Step::Lease { key }),
        4 => any::<prop::sample::Index>().prop_map(|which| Step::Release { which }),
        1 => prop_oneof![Just(Step::Flush), Just(Step::CutStrays)],
        1 => (1u32..60).prop_map(|seconds| Step::Wait { seconds }),
        limit => (4usize..9).prop_map(|mebibytes| Step::Limit { mebibytes }),
    ];
    prop::collection::vec(step, 1..500)
}

fn name(key: u16) -> String {
    format!("key{key:05}")
}

fn value(key: u16, number: usize, bytes: usize) -> Vec<u8> {
    let mut value = format!("{key}:{number}:").into_bytes();
    value.resize(bytes, u8::try_from(number % 251).unwrap());
    value
}

fn leasing_store() -> (Store, ItemMemory) {
    leasing_store_under(CacheKind::S3Fifo)
}

fn leasing_store_under(policy: CacheKind) -> (Store, ItemMemory) {
    let settings =
        StoreSettings { limit_bytes: LIMIT_BYTES, item_bytes_max: 1 << 20, evicts: true };
    let mut store = Store::leasing(settings).unwrap();
    store.set_policy(policy).unwrap();
    store.set_now(62);
    let (file, bytes) = store.readable_by_others().unwrap();
    let memory = ItemMemory::map(file, bytes as u64).unwrap();
    (store, memory)
}

fn insert(store: &mut Store, key: &str, value: &[u8]) -> Result<(), StoreError> {
    let parts = ItemParts { key: key.as_bytes(), value: [value, b""], ..ItemParts::default() };
    store.insert(&parts, hash_key(key.as_bytes())).map(|_| ())
}

fn lease(store: &mut Store, key: &str) -> Option<LeasedValue> {
    let found = store.find(key.as_bytes(), hash_key(key.as_bytes())).unwrap();
    store.lease(found)
}

fn read<'a>(memory: &'a ItemMemory, leased: &LeasedValue) -> &'a [u8] {
    memory.value(leased.at as u64, leased.bytes as u64).unwrap()
}

struct Run {
    store: Store,
    memory: ItemMemory,
    model: HashMap<u16, Vec<u8>>,
    leases: Vec<(LeasedValue, Vec<u8>)>,
    /// The limit, or what could not be freed when it was lowered.
    used_bytes_max: usize,
    was_lowered: bool,
}

impl Run {
    /// The item, if it is there; it must then be the one stored last.
    fn find(&mut self, key: u16) -> Result<Option<farpool_kv_store::Found>, TestCaseError> {
        let name = name(key);
        let found = self.store.find(name.as_bytes(), hash_key(name.as_bytes()));
        if let Some(found) = found {
            let kept = self.model.get(&key);
            prop_assert!(kept.is_some_and(|it| it[..] == *self.store.view(found).value()));
        }
        Ok(found)
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each kind of step")]
    fn step(&mut self, number: usize, step: &Step) -> Result<(), TestCaseError> {
        let now_s = self.store.now_s();
        let expiry = |expires_in_s| if expires_in_s == 0 { 0 } else { now_s + expires_in_s };
        match *step {
            Step::Store { key, bytes, expires_in_s } => {
                let (name, value) = (name(key), value(key, number, bytes));
                let parts = ItemParts {
                    key: name.as_bytes(),
                    value: [&value, b""],
                    expires_s: expiry(expires_in_s),
                    ..ItemParts::default()
                };
                match self.store.insert(&parts, hash_key(name.as_bytes())) {
                    Ok(_) => {
                        self.model.insert(key, value);
                    }
                    // Leases never keep others from storing, unless the limit was lowered below
                    // what they pin.
                    Err(error) => prop_assert!(self.was_lowered, "{}", error),
                }
                self.find(key)?;
            }
            Step::Overwrite { key } => {
                if let Some(found) = self.find(key)? {
                    let bytes = self.store.view(found).value().len();
                    let (value, cas) = (value(key, number, bytes), self.store.next_cas());
                    let hash = hash_key(name(key).as_bytes());
                    match self.store.overwrite(found, hash, &value, cas) {
                        Ok(found) => {
                            prop_assert_eq!(self.store.cas(found), cas);
                            self.model.insert(key, value);
                        }
                        Err(error) => prop_assert!(self.was_lowered, "{}", error),
                    }
                    self.find(key)?;
                }
            }
            Step::Touch { key, expires_in_s } => {
                if let Some(found) = self.find(key)? {
                    let hash = hash_key(name(key).as_bytes());
                    let touched = self.store.set_expiry(found, hash, expiry(expires_in_s));
                    prop_assert!(touched.is_ok() || self.was_lowered);
                    self.find(key)?;
                }
            }
            Step::Read { key } => {
                if let Some(found) = self.find(key)? {
                    self.store.note_read(found);
                    self.store.note_touched(found);
                }
            }
            Step::Remove { key } => {
                if let Some(found) = self.find(key)? {
                    self.store.remove(found);
                    self.model.remove(&key);
                }
            }
            Step::Lease { key } => {
                if let Some(found) = self.find(key)?
                    && let Some(leased) = self.store.lease(found)
                {
                    self.leases.push((leased, self.model[&key].clone()));
                }
            }
            Step::Release { which } => {
                if !self.leases.is_empty() {
                    let (leased, _) = self.leases.swap_remove(which.index(self.leases.len()));
                    self.store.release(leased.lease);
                }
            }
            Step::Flush => {
                self.store.flush_all(None);
                self.model.clear();
            }
            Step::Wait { seconds } => {
                self.store.set_now(now_s + seconds);
                self.store.free_expired();
            }
            Step::Limit { mebibytes } => {
                self.was_lowered |= mebibytes << 20 < self.store.settings().limit_bytes;
                let made = self.store.set_limit(mebibytes << 20);
                let kept = if made.is_ok() { 0 } else { self.store.used_bytes() };
                self.used_bytes_max = kept.max(mebibytes << 20);
            }
            Step::CutStrays => self.store.cut_strays(),
        }
        self.check()
    }

    fn check(&self) -> Result<(), TestCaseError> {
        for (leased, expected) in &self.leases {
            prop_assert!(read(&self.memory, leased) == expected, "a leased value has changed");
        }
        let held = self.store.leases_held();
        prop_assert_eq!(held.leases, self.leases.len());
        prop_assert!(held.segments <= held.leases && (held.bytes > 0) == (held.leases > 0));
        prop_assert!(self.store.used_bytes() <= self.used_bytes_max);
        Ok(())
    }

    /// Ends all leases: everything that they pinned can be filled again.
    fn finish(mut self) -> Result<(), TestCaseError> {
        for (leased, _) in self.leases.drain(..) {
            self.store.release(leased.lease);
        }
        prop_assert_eq!(self.store.leases_held(), LeasesHeld::default());
        prop_assert!(self.store.set_limit(LIMIT_BYTES).is_ok());
        // The open segments of all the lifetimes take their share.
        let share = filled(&mut self.store);
        prop_assert!(share > 0.7, "items fill {:.2} of the memory", share);
        Ok(())
    }
}

/// The share of the memory that items take after more than fits was stored.
fn filled(store: &mut Store) -> f64 {
    for number in 0..2 * LIMIT_BYTES / 1000 {
        insert(store, &format!("fill{number}"), &[b'f'; 1000]).unwrap();
    }
    assert!(store.used_bytes() <= LIMIT_BYTES);
    let beside = store.index_bytes() + store.policy_bytes();
    store.item_bytes() as f64 / (LIMIT_BYTES - beside) as f64
}

fn run(policy: CacheKind, steps: &[Step]) -> Result<(), TestCaseError> {
    let (store, memory) = leasing_store_under(policy);
    let (model, leases) = (HashMap::new(), Vec::new());
    let mut run =
        Run { store, memory, model, leases, used_bytes_max: LIMIT_BYTES, was_lowered: false };
    for (number, step) in steps.iter().enumerate() {
        run.step(number, step)?;
    }
    run.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, .. ProptestConfig::default() })]

    #[test]
    fn leases_show_what_was_leased(steps in steps(false)) {
        run(CacheKind::S3Fifo, &steps)?;
    }

    #[test]
    fn leases_show_what_was_leased_while_the_limit_changes(steps in steps(true)) {
        run(CacheKind::S3Fifo, &steps)?;
    }

    #[test]
    fn leases_show_what_was_leased_under_every_policy(policy in prop::sample::select(&CacheKind::ALL[..]), steps in steps(true)) {
        run(policy, &steps)?;
    }
}

#[test]
fn only_so_much_memory_can_be_leased_and_others_make_room() {
    let (mut store, memory) = leasing_store();
    let mut leased = Vec::new();
    let mut refused = 0;
    // All of the memory, several times over, with a lease asked for every item.
    for number in 0..30_000 {
        let name = format!("key{number}");
        insert(&mut store, &name, &[7; 1000]).unwrap();
        match lease(&mut store, &name) {
            Some(it) => leased.push((name, it)),
            None => refused += 1,
        }
        assert!(store.leases_held().bytes <= LIMIT_BYTES / 100 * LEASED_PERCENT_MAX);
    }
    assert!(leased.len() > 1000 && refused > 10_000, "{} leased, {refused} not", leased.len());
    assert_eq!(
        (store.counts().leases, store.counts().leases_refused),
        (leased.len() as u64, refused)
    );
    assert!(store.counts().evictions > 10_000);
    // Removed, but still readable under their leases.
    for (name, it) in &leased {
        let found = store.find(name.as_bytes(), hash_key(name.as_bytes())).unwrap();
        store.remove(found);
        assert!(read(&memory, it) == [7; 1000]);
    }
    assert!(filled(&mut store) < 0.8, "what is leased makes no room");
    assert!(leased.iter().all(|(_, it)| read(&memory, it) == [7; 1000]));
    leased.into_iter().for_each(|(_, it)| store.release(it.lease));
    assert_eq!(store.leases_held(), LeasesHeld::default());
    let share = filled(&mut store);
    assert!(share > 0.9, "items fill {share:.2} of the memory");
    insert(&mut store, "more", &[7; 1000]).unwrap();
    let leased = lease(&mut store, "more").unwrap();
    store.release(leased.lease);
}

/// A client may read what it maps and nothing else.
#[test]
fn clients_cannot_write() {
    let (mut store, _) = leasing_store();
    insert(&mut store, "key", b"value").unwrap();
    let (file, bytes) = store.readable_by_others().unwrap();
    let map = |access, flags| {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        unsafe { mmap(std::ptr::null_mut(), bytes, access, flags, file.as_fd(), 0) }
    };
    let both = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map(both, MapFlags::SHARED).err(), Some(Errno::ACCESS));
    let address = map(ProtFlags::READ, MapFlags::SHARED).unwrap();
    // SAFETY: our own mapping; the protection does not change, which is what is tested.
    let changed = unsafe { mprotect(address, bytes, MprotectFlags::READ | MprotectFlags::WRITE) };
    assert_eq!(changed.err(), Some(Errno::ACCESS));
    // SAFETY: mapped above, and nothing refers to it.
    unsafe { munmap(address, bytes) }.unwrap();
    assert_eq!(rustix::io::pwrite(file, b"x", 0).err(), Some(Errno::BADF));
    assert_eq!(rustix::fs::ftruncate(file, 0).err(), Some(Errno::INVAL));
    let status = rustix::fs::fstat(file).unwrap();
    assert_eq!(status.st_mode & 0o777, 0o400, "nobody else can open it anew");
}

/// The memory of lone items is released at once, and so are pages that a reader makes the kernel
/// put into holes.
#[test]
fn memory_behind_what_is_gone_goes_back_to_the_kernel() {
    let (mut store, memory) = leasing_store();
    let there_bytes = |store: &Store| {
        let (file, _) = store.readable_by_others().unwrap();
        usize::try_from(rustix::fs::fstat(file).unwrap().st_blocks).unwrap() * 512
    };
    let before = there_bytes(&store);
    insert(&mut store, "large", &vec![7; 1_000_000]).unwrap();
    let leased = lease(&mut store, "large").unwrap();
    let found = store.find(b"large", hash_key(b"large")).unwrap();
    store.remove(found);
    assert!(there_bytes(&store) >= before + 1_000_000, "it is leased");
    assert!(read(&memory, &leased).iter().all(|&byte| byte == 7));
    store.release(leased.lease);
    assert!(there_bytes(&store) <= before);

    let (_, bytes) = store.readable_by_others().unwrap();
    let all = memory.value(0, bytes as u64).unwrap();
    assert_eq!(all.iter().step_by(4096).map(|&byte| u64::from(byte)).sum::<u64>(), 0);
    assert!(there_bytes(&store) > 2 * LIMIT_BYTES, "the reader filled holes");
    insert(&mut store, "key", b"value").unwrap();
    store.cut_strays();
    assert!(there_bytes(&store) <= LIMIT_BYTES, "{} bytes are there", there_bytes(&store));
    assert!(store.find(b"key", hash_key(b"key")).is_some());
    store.set_limit(SHARD_BYTES_MIN).unwrap();
}

/// If no hole in the shared memory is long enough, a large item is kept nevertheless, where others
/// cannot read it.
#[test]
fn large_items_beyond_the_address_space_are_not_shared() {
    let mut arena = Arena::new(SHARD_BYTES_MIN, SHARD_BYTES_MIN, true).unwrap();
    let value = vec![7; 1_000_000];
    let parts = ItemParts { key: b"key", value: [&value, b""], ..ItemParts::default() };
    let header = parts.header(AccessTime(0), 0);
    let store = |arena: &mut Arena| {
        let segment = Segment::new(Queue::Small, 0, 0, 1);
        let id = arena.open(header.footprint_bytes(), segment).unwrap();
        let place = arena.append(id, header, &parts);
        assert!(arena.item(place).value() == value);
        (id, arena.shared_at(place, 0))
    };
    let stored: Vec<_> = (0..20).map(|_| store(&mut arena)).collect();
    let shared: Vec<usize> = stored.iter().filter_map(|(_, at)| *at).collect();
    assert!((4..12).contains(&shared.len()), "{} are shared", shared.len());
    assert!(stored[shared.len()..].iter().all(|(_, at)| at.is_none()));
    stored.iter().rev().for_each(|&(id, _)| arena.free(id));
    assert_eq!(arena.in_use_bytes(), 0);
    let again: Vec<usize> = (0..20).filter_map(|_| store(&mut arena).1).collect();
    assert_eq!(again, shared);
}
