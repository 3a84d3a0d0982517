//! Keys that somebody chose to have one hash, as far as anybody can compute it: all are stored and
//! found, in memory, on flash and after a restart.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use common::{Ours, PATIENCE};
use farpool_keyvault::owner::hash_key;
use farpool_kv_server::{Bookkeeping, FlashSettings, Settings};

const KEYS: usize = 10_000;
const VALUE_BYTES: usize = 2_000;
/// Storing one of two keys that the random seed makes alike costs the other's item on flash: one
/// run in eighty has a pair.
const ALIKE_MAX: u64 = 2;

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

fn settings(flash: Option<(&Path, &Path)>) -> Settings {
    let flash = flash.map(|(path, books)| FlashSettings {
        path: path.to_owned(),
        bytes: 96 << 20,
        reset: false,
        write_bytes_per_s: None,
        books: Bookkeeping::Only(books.to_owned()),
    });
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
