//! Pages through a ring, and back.

use farpool_disk::{Ended, Pages, Ring, open_direct, open_exclusive, take_room};
use farpool_units::PAGE_BYTES;
use std::path::Path;
use std::time::Duration;

/// A folder on a disk.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn ring(path: &Path, bytes: u64) -> Ring {
    let (file, _) = open_exclusive(path).expect("opened");
    take_room(&file, bytes).expect("room");
    Ring::new(open_direct(path).expect("opened"), true).expect("a ring")
}

/// Waits until so many requests have ended.
fn finish(ring: &mut Ring, count: usize) -> Vec<Ended> {
    let mut ended = Vec::new();
    ring.submit();
    while ended.len() < count {
        ring.wait(Duration::from_secs(10));
        ring.poll(&mut ended);
    }
    ended.sort_by_key(|it| it.token);
    ended
}

fn filled(pages: usize, byte: u8) -> Pages {
    let mut buffer = Pages::new(pages).expect("memory");
    buffer.bytes_mut().fill(byte);
    buffer
}

#[test]
fn what_is_written_is_read() {
    let folder = folder();
    let mut ring = ring(&folder.path().join("flash"), 1 << 20);
    ring.write(filled(4, 1), 0, 4, 1);
    // Of a longer buffer only what is asked for.
    ring.write(filled(4, 2), 4 * PAGE_BYTES as u64, 2, 2);
    assert!(finish(&mut ring, 2).iter().all(|it| it.is_ok));
    ring.read(filled(8, 9), 0, 7, 3);
    let ended = finish(&mut ring, 1);
    assert!(ended[0].is_ok && ended[0].pages.count() == 8);
    let firsts: Vec<u8> = ended[0].pages.bytes().iter().copied().step_by(PAGE_BYTES).collect();
    assert_eq!(firsts, [1, 1, 1, 1, 2, 2, 0, 9]);
}

#[test]
fn what_lies_beyond_the_end_is_a_failure() {
    let folder = folder();
    let mut ring = ring(&folder.path().join("flash"), 4 * PAGE_BYTES as u64);
    ring.read(filled(4, 0), 2 * PAGE_BYTES as u64, 4, 1);
    assert!(!finish(&mut ring, 1)[0].is_ok, "a part is not enough");
}
