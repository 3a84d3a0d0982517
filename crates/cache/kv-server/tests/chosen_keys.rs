//! Keys that somebody chose to have one hash, as far as anybody can compute it: all are stored and
//! found, in memory, on flash and after a restart.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use common::{Ours, PATIENCE};
use farpool_keyvault::owner::hash_key;
use farpool_kv_server::{Bookkeeping, FlashSettings, Settings};
use farpool_kv_store::item::ItemParts;
use farpool_kv_store::key::HashSeed;
use farpool_kv_store::{Store, StoreSettings};
use farpool_kv_tier::flash::layout::Superblock;

const KEYS: usize = 10_000;
const VALUE_BYTES: usize = 2_000;
/// Storing one of two keys that the random seed makes alike costs the other's item on flash: one
/// run in eighty has a pair.
const ALIKE_MAX: u64 = 2;

/// Buckets of the index of a small shard, and how many of them the keys of [`crowd`] may lie in.
const BUCKETS: u32 = 1 << 14;
const CROWDED_BUCKETS: u32 = BUCKETS / 16;
/// Entries for which those buckets have room.
const CROWD_MAX: usize = CROWDED_BUCKETS as usize * 8;
/// Without a choice nearly no key has to go beside the buckets: they are a twelfth full.
const OVERFLOW_MAX: u64 = 10;

/// Keys that need the same buckets of an index whose hash has no seed, both of each: chosen by
/// somebody who knows `kv-store/src/index.rs`.
fn crowd() -> Vec<Vec<u8>> {
    let is_chosen = |key: &Vec<u8>| {
        let hash = u32::try_from(HashSeed::default().hash_of(key) >> 32).expect("32 bits");
        let scaled = |number: u32| (u64::from(number) * u64::from(BUCKETS)) >> 32;
        let home = scaled(hash);
        let sum = scaled((hash & 0x7_ffff).wrapping_mul(0x9e37_79b1));
        let other = (sum + u64::from(BUCKETS) - home) % u64::from(BUCKETS);
        home.max(other) < u64::from(CROWDED_BUCKETS)
    };
    let keys = (0..).map(|number: u32| format!("crowd{number}").into_bytes());
    keys.filter(is_chosen).take(KEYS).collect()
}

/// XXH3 of 32 bytes multiplies the first eight, combined with these constants by exclusive or, with
/// the next eight: if they are these constants, the product is zero, whatever the next eight are.
const ZERO_PRODUCT: [u8; 8] = [0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe];

fn key(number: usize) -> Vec<u8> {
    let key = [&ZERO_PRODUCT[..], format!("{number:08}").as_bytes(), b"0123456789abcdef"].concat();
    assert_eq!(key.len(), 32);
    key
}

fn value(number: usize) -> Vec<u8> {
    let mut value = number.to_string().into_bytes();
    value.resize(VALUE_BYTES, b'v');
    value
}

fn flash_settings(path: &Path, books: &Path) -> FlashSettings {
    FlashSettings {
        path: path.to_owned(),
        bytes: 96 << 20,
        reset: false,
        write_bytes_per_s: None,
        books: Bookkeeping::Only(books.to_owned()),
    }
}

fn settings(flash: Option<(&Path, &Path)>) -> Settings {
    let flash = flash.map(|(path, books)| flash_settings(path, books));
    let memory_bytes = if flash.is_some() { 16 << 20 } else { 64 << 20 };
    Settings { memory_bytes, threads: 2, flash, ..Settings::default() }
}

struct Text(BufReader<UnixStream>);

impl Text {
    fn connect(ours: &Ours) -> Self {
        let stream = ours.connect();
        stream.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
        Self(BufReader::new(stream))
    }

    fn line(&mut self) -> String {
        let mut line = Vec::new();
        self.0.read_until(b'\n', &mut line).expect("the server answers");
        String::from_utf8_lossy(&line).trim_end().to_owned()
    }

    fn statistic(&mut self, name: &str) -> u64 {
        self.0.get_mut().write_all(b"stats\r\n").expect("it takes requests");
        common::talk::read_statistic(|| self.line(), name)
    }

    fn store_all(&mut self) {
        for number in 0..KEYS {
            let head = [b"set ", &key(number)[..], b" 0 0 2000\r\n"].concat();
            let request = [&head[..], &value(number), b"\r\n"].concat();
            self.0.get_mut().write_all(&request).expect("it takes requests");
            assert_eq!(self.line(), "STORED", "{number}");
        }
    }

    /// How many keys are there; each has its own value.
    fn count(&mut self) -> usize {
        let mut there = 0;
        for number in 0..KEYS {
            let request = [b"get ", &key(number)[..], b"\r\n"].concat();
            self.0.get_mut().write_all(&request).expect("it takes requests");
            if self.line() == "END" {
                continue;
            }
            let mut found = vec![0; VALUE_BYTES + 2];
            self.0.read_exact(&mut found).expect("a value");
            assert!(found.starts_with(&value(number)), "{number} has another key's value");
            assert_eq!(self.line(), "END");
            there += 1;
        }
        there
    }
}

#[test]
fn keys_that_are_chosen_to_collide_are_all_stored_and_found() {
    assert!((1..KEYS).all(|number| hash_key(&key(number)) == hash_key(&key(0))));
    let ours = Ours::local(settings(None));
    let mut text = Text::connect(&ours);
    text.store_all();
    assert_eq!(text.count(), KEYS);
}

#[test]
fn the_seed_spreads_keys_that_are_chosen_for_an_index_without_one() {
    let keys = crowd();
    let settings = StoreSettings { limit_bytes: 64 << 20, item_bytes_max: 1 << 20, evicts: true };
    let mut store = Store::new(settings).expect("there is address space");
    for key in &keys {
        let parts = ItemParts { key, value: [b"v", b""], ..ItemParts::default() };
        store.insert(&parts, HashSeed::default().hash_of(key)).expect("there is room");
    }
    let overflow = store.overflow_entries();
    assert!(overflow >= KEYS - CROWD_MAX, "{overflow}: they are chosen well");
    let ours = Ours::local(Settings { threads: 1, ..self::settings(None) });
    let mut text = Text::connect(&ours);
    for key in &keys {
        let request = [b"set ", &key[..], b" 0 0 1\r\nv\r\n"].concat();
        text.0.get_mut().write_all(&request).expect("it takes requests");
        assert_eq!(text.line(), "STORED");
    }
    assert_eq!(text.statistic("curr_items"), KEYS as u64);
    let overflow = text.statistic("hash_overflow_items");
    assert!(overflow <= OVERFLOW_MAX, "{overflow} items are beside the index's buckets");
}

/// The seed that the flash file keeps.
fn seed_of(flash: &Path) -> HashSeed {
    let mut bytes = [0; Superblock::BYTES];
    let mut file = std::fs::File::open(flash).expect("the file can be read");
    file.read_exact(&mut bytes).expect("it is long enough");
    Superblock::decode(&bytes).expect("it has a whole superblock").hash_seed
}

#[test]
fn each_fresh_flash_has_a_seed_of_its_own() {
    let disk = tempfile::tempdir().expect("a folder");
    let books = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let seeds = ["one", "other"].map(|name| {
        let path = disk.path().join(name);
        let flash = flash_settings(&path, books.path());
        drop(Ours::local(Settings { threads: 1, flash: Some(flash), ..settings(None) }));
        seed_of(&path)
    });
    assert!(seeds.iter().all(|&seed| seed != HashSeed::default()), "a seed of zeros");
    assert!(seeds[0] != seeds[1], "two files with one seed");
}

#[test]
fn they_are_found_on_flash_and_after_a_restart() {
    let disk = tempfile::tempdir().expect("a folder");
    let books = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let path = disk.path().join("flash");
    let ours = Ours::local(settings(Some((&path, books.path()))));
    let mut text = Text::connect(&ours);
    text.store_all();
    let there = text.count();
    // A busy device takes and gives not everything in time.
    let lost = text.statistic("flash_refused") + text.statistic("lower_late");
    let accounted = there as u64 + lost + ALIKE_MAX;
    assert!(accounted >= KEYS as u64, "{there} are there, {lost} were lost");
    drop((text, ours));
    let ours = Ours::local(settings(Some((&path, books.path()))));
    let mut text = Text::connect(&ours);
    let known = text.statistic("flash_items");
    let there = text.count() as u64;
    let late = text.statistic("lower_late");
    assert!(
        known > 1_000 && there + late + ALIKE_MAX >= known,
        "{there} of {known} on flash, {late} late"
    );
}
