// SPDX-License-Identifier: GPL-2.0-or-later
//! Processes in a capture file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use farpool_capture_qemu::stream::Stream;

const HEADER_BYTES: u64 = 4096;
const CAPACITY: u64 = 64;
/// Offsets of words of docs/researchers/trace.md.
const WRITTEN: u64 = 64;
const NUMBERS: u64 = 288;
/// The most processes that have numbers.
const PROCESSES: u64 = 1 << 14;

/// An empty capture file with this magic.
fn ring(magic: &[u8; 8]) -> (File, String) {
    let name = format!("farpool-stream-{}-{}", std::process::id(), magic[7]);
    let path = std::env::temp_dir().join(name);
    let options = File::options().read(true).write(true).create(true).truncate(true).open(&path);
    let file = options.expect("a file");
    file.set_len(HEADER_BYTES + 16 * CAPACITY).expect("room");
    file.write_all_at(magic, 0).expect("the magic");
    file.write_all_at(&CAPACITY.to_le_bytes(), 8).expect("the capacity");
    (file, path.to_str().expect("a plain path").to_owned())
}

fn word(file: &File, at: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, at).expect("a word");
    u64::from_le_bytes(word)
}

#[test]
fn a_file_of_an_older_version_is_refused() {
    let (_file, path) = ring(b"FPCAPT01");
    let refusal = Stream::open(&path).expect_err("a refusal");
    std::fs::remove_file(&path).expect("it was there");
    assert!(refusal.ends_with("not a capture file of this version"), "{refusal}");
}

#[test]
fn processes_have_numbers_and_the_last_ones_none() {
    let (file, path) = ring(b"FPCAPT02");
    let mut first = Stream::open(&path).expect("a capture file");
    std::fs::remove_file(&path).expect("it was there");
    assert_eq!(first.begin_process(true, "make"), Ok(true));
    let mut other = first.counters().stream();
    assert_eq!(other.begin_process(false, "a shell that is followed"), Ok(true));
    let mut second = first.counters().stream();
    assert_eq!(second.begin_process(true, "cc1"), Ok(true));
    assert!(second.push(5, 1, 2, 3) && first.push(7, 0, 0, 9));
    let at = HEADER_BYTES + 16 * (word(&file, WRITTEN) - 2);
    let words = [0, 8, 16, 24].map(|offset| word(&file, at + offset));
    assert_eq!(words, [(1 << 44 | 5) << 6 | 1, 2 << 48 | 3, 7 << 6, 9]);
    file.write_all_at(&(PROCESSES - 1).to_le_bytes(), NUMBERS).expect("as after many processes");
    assert_eq!(first.counters().stream().begin_process(true, "the last"), Ok(true));
    let written = word(&file, WRITTEN);
    assert_eq!(first.counters().stream().begin_process(true, "one too many"), Ok(false));
    assert_eq!((word(&file, WRITTEN), word(&file, NUMBERS)), (written, PROCESSES + 1));
}
