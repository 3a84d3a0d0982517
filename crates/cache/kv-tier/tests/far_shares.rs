//! Shares of far memory over a real blade: operations on one do not affect another that has reused
//! its zone numbers.

use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Server as Blade, Serving};
use farpool_kv_store::index::Place;
use farpool_kv_store::item::{AccessTime, ItemParts};
use farpool_kv_store::record::{self, Record};
use farpool_kv_tier::far::{Far, FarMemory, GrantNumber, Share};
use farpool_kv_tier::log::{Judge, Medium};
use farpool_pool::{Address, BladeSpec, Pool, PoolConfig, fresh_client};

/// The layout of one superpage.
const ZONE_BYTES: u64 = 2 << 20;
const ZONES: u64 = 8;
/// After this long without an event, a test fails.
const PATIENCE: Duration = Duration::from_secs(30);

fn blade(folder: &tempfile::TempDir) -> Serving {
    let config = BladeConfig { memory_bytes: 256 << 20, ..BladeConfig::default() };
    let address = Address::Unix(folder.path().join("blade.sock"));
    Blade::bind(std::slice::from_ref(&address), config).unwrap().serve().unwrap()
}

/// A share with one superpage.
fn share(number: u64, blade: &Serving) -> Share {
    let pool = Pool::connect(PoolConfig {
        blades: vec![BladeSpec::from(blade.addresses()[0].clone())],
        client: fresh_client().unwrap(),
        client_name: "test".into(),
        quota_bytes: ZONES * ZONE_BYTES,
        sharing_group: None,
        deadline: PATIENCE,
        allow_remote_tcp: false,
        redundancy: farpool_pool::Redundancy::NONE,
        seals_pages: true,
        secures_tcp: false,
        asks: None,
        time: farpool_pool::Time::KERNEL,
    })
    .unwrap();
    let segment = pool.create_segment().unwrap();
    pool.allocate_superpage(segment, 0).unwrap();
    let lane = pool.lane().unwrap();
    Share { grant: GrantNumber(number), pool: pool.into(), lane, segment, superpages: vec![0] }
}

/// A judge that wants no item of an emptied zone.
struct Nobody;

impl Judge for Nobody {
    fn keeps(&mut self, _hash: u64, _place: Place) -> bool {
        false
    }
    fn knows(&mut self, _hash: u64, _place: Place) -> bool {
        false
    }
    fn moved(&mut self, _hash: u64, _from: Place, _to: Place) {}
    fn dropped(&mut self, _record: &Record<'_>, _place: Place) {}
}

fn record_of(number: u64) -> Vec<u8> {
    let value = vec![u8::try_from(number % 251).unwrap(); 100_000];
    let parts = ItemParts { key: b"key", value: [&value, b""], ..ItemParts::default() };
    let header = parts.header(AccessTime(0), 0);
    let mut item = vec![0; header.item_bytes()];
    parts.write(header, &mut item);
    let mut out = Vec::new();
    record::push(&mut out, number, number, &item);
    out
}

fn poll_until(far: &mut Far, what: &str, mut is_so: impl FnMut(&mut Far) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        far.poll(Some(Instant::now()), &mut Nobody);
        if is_so(far) {
            return;
        }
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        far.medium().wait(Duration::from_millis(5));
    }
}

/// Two shares; the first is being given back: one of its zones is still used, the numbers of the
/// others have been reused for the second.
fn with_numbers_used_again(blade: &Serving) -> Far {
    let mut far = Far::growing(FarMemory::default());
    far.take_share(share(1, blade));
    assert!(far.append(&record_of(0)).is_some());
    far.leave_share(GrantNumber(1));
    let free = far.to_forget();
    assert_eq!(free.len(), 7, "the open zone's record is still to be judged: {free:?}");
    far.forgotten(&free);
    far.take_share(share(2, blade));
    assert_eq!(far.capacity_bytes(), ZONES * ZONE_BYTES);
    assert_eq!(far.medium().zones(), 9, "seven numbers were used again, and one is new");
    far
}

#[test]
fn a_share_whose_zones_numbers_are_used_again_takes_none_of_the_next_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let blade = blade(&folder);
    for is_lost in [false, true] {
        let mut far = with_numbers_used_again(&blade);
        // Told to leave again, then its deadline passes.
        far.leave_share(GrantNumber(1));
        assert_eq!(far.capacity_bytes(), ZONES * ZONE_BYTES, "the second share stays");
        far.drop_share(GrantNumber(1), is_lost);
        assert_eq!(far.capacity_bytes(), ZONES * ZONE_BYTES, "the second share stays");
        let place = far.append(&record_of(1)).expect("there is room");
        poll_until(&mut far, "the first share ends", |far| far.end_share(GrantNumber(1)));
        assert_eq!(far.gone_at(place), None, "what is in the second share stays");
        far.close();
        poll_until(&mut far, "the zone arrives", |far| !far.is_writing());
        far.read(place, 7);
        poll_until(&mut far, "the record comes back", |far| far.has_at_hand());
        let outcomes = far.take_outcomes();
        assert_eq!(outcomes.records[4..], record_of(1)[4..]);
        // Now the second share ends, and no other.
        far.drop_share(GrantNumber(2), false);
        assert!(!far.has_zones() && far.end_share(GrantNumber(2)));
    }
    blade.shutdown();
}

#[test]
fn a_share_ends_although_its_zones_numbers_are_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let blade = blade(&folder);
    let mut far = with_numbers_used_again(&blade);
    assert!(!far.end_share(GrantNumber(1)), "a record is still to be judged");
    far.poll(None, &mut Nobody);
    assert!(far.end_share(GrantNumber(1)), "what the second uses does not keep the first");
    assert!(far.append(&record_of(1)).is_some(), "the second is used all the same");
    assert!(!far.end_share(GrantNumber(2)));
    drop(far);
    blade.shutdown();
}
