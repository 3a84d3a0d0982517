//! Every policy's miss ratio in the real store, with all its costs: the table in
//! docs/researchers/measurements.md.
//!
//! `cargo bench -p farpool-kv-store --bench policy_misses`; seeded, so the numbers are
//! always the same. Each workload reads keys and stores those that are missing, in one shard of 16
//! MiB, and is measured in its second half. The policy's memory per item is measured with items of
//! 12-byte keys and 64-byte values that fill 64 MiB.

use farpool_kv_store::item::ItemParts;
use farpool_kv_store::key::HashSeed;
use farpool_kv_store::{Store, StoreError, StoreSettings};
use farpool_policy::{CacheKind, Rng};
use farpool_units::exactly;

/// The hash of a key in a store whose seed was not set.
fn hash_key(key: &[u8]) -> u64 {
    HashSeed::default().hash_of(key)
}

const LIMIT_BYTES: usize = 16 << 20;
const REQUESTS: usize = 2_000_000;
/// Keys that are read repeatedly.
const KEYS: u32 = 1 << 17;

/// A key and the size of its value.
type Request = (u64, usize);

/// Draws ranks of a Zipf distribution with exponent 1.
struct Zipf {
    sums: Vec<f64>,
}

impl Zipf {
    fn new(keys: u32) -> Self {
        let mut total = 0.0;
        let next = |rank| {
            total += 1.0 / f64::from(rank);
            total
        };
        Self { sums: (1..=keys).map(next).collect() }
    }

    fn draw(&self, rng: &mut Rng) -> u64 {
        let share = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let sum = share * self.sums.last().copied().unwrap_or(1.0);
        self.sums.partition_point(|it| *it < sum) as u64
    }
}

/// Zipf, all values of 300 bytes.
fn zipf() -> Vec<Request> {
    let (zipf, mut rng) = (Zipf::new(KEYS), Rng::new(1));
    (0..REQUESTS).map(|_| (zipf.draw(&mut rng), 300)).collect()
}

/// Zipf, with a third of the requests for keys that are never requested again; values of 32 to
/// 1,055 bytes, the same for a key each time.
fn one_time_visitors() -> Vec<Request> {
    let (zipf, mut rng) = (Zipf::new(KEYS), Rng::new(2));
    let request = |at: usize| {
        let visitor = (1 << 40) + at as u64;
        let key = if rng.below(3) == 0 { visitor } else { zipf.draw(&mut rng) };
        (key, 32 + exactly::<usize, _>(hash_key(&key.to_le_bytes()) % 1024))
    };
    (0..REQUESTS).map(request).collect()
}

/// Ten phases, each with different popular keys; values of 300 bytes.
fn phases() -> Vec<Request> {
    let (zipf, mut rng) = (Zipf::new(KEYS), Rng::new(3));
    let request = |at: usize| {
        let phase = (at / (REQUESTS / 10)) as u64;
        (zipf.draw(&mut rng).wrapping_add(phase * u64::from(KEYS) / 16) % u64::from(KEYS), 300)
    };
    (0..REQUESTS).map(request).collect()
}

struct Measured {
    miss_ratio: f64,
    moved_each: f64,
}

fn store_of(kind: CacheKind, limit_bytes: usize) -> Result<Store, StoreError> {
    let mut store =
        Store::new(StoreSettings { limit_bytes, item_bytes_max: 1 << 20, evicts: true })?;
    store.set_policy(kind)?;
    store.set_now(100);
    Ok(store)
}

/// The policy's bytes per item in a store with many items.
fn bytes_each(kind: CacheKind) -> Result<f64, StoreError> {
    let mut store = store_of(kind, 64 << 20)?;
    for number in 0..REQUESTS {
        let name = format!("key{number:09}");
        let parts =
            ItemParts { key: name.as_bytes(), value: [&[7; 64], b""], ..ItemParts::default() };
        store.insert(&parts, hash_key(name.as_bytes()))?;
        let read = format!("key{:09}", number - number % 3);
        if let Some(found) = store.find(read.as_bytes(), hash_key(read.as_bytes())) {
            store.note_read(found);
        }
    }
    Ok(store.policy_bytes() as f64 / store.items() as f64)
}

fn measure(kind: CacheKind, requests: &[Request]) -> Result<Measured, StoreError> {
    let mut store = store_of(kind, LIMIT_BYTES)?;
    let value = [7; 2048];
    let mut misses = 0;
    for (number, &(key, bytes)) in requests.iter().enumerate() {
        if number == requests.len() / 2 {
            misses = 0;
            store.reset_counts();
        }
        let name = format!("key{key:013}");
        let hash = hash_key(name.as_bytes());
        if let Some(found) = store.find(name.as_bytes(), hash) {
            store.note_read(found);
            continue;
        }
        misses += 1;
        let value = [&value[..bytes], b""];
        store.insert(&ItemParts { key: name.as_bytes(), value, ..ItemParts::default() }, hash)?;
    }
    let counts = store.counts();
    Ok(Measured {
        miss_ratio: f64::from(misses) / (requests.len() / 2) as f64,
        moved_each: counts.moved as f64 / counts.total_items.max(1) as f64,
    })
}

fn main() -> Result<(), StoreError> {
    let _ = farpool_benchargs::arguments();
    let workloads = [zipf(), one_time_visitors(), phases()];
    println!(
        "| policy | bytes per item | items moved for each stored | Zipf | visitors | phases |"
    );
    println!("|---|---|---|---|---|---|");
    for kind in CacheKind::ALL {
        let measured = workloads
            .iter()
            .map(|requests| measure(kind, requests))
            .collect::<Result<Vec<_>, _>>()?;
        print!("| {kind} | {:.0} | {:.1} |", bytes_each(kind)?, measured[0].moved_each);
        measured.iter().for_each(|it| print!(" {:.3} |", it.miss_ratio));
        println!();
    }
    Ok(())
}
