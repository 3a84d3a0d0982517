//! A serving blade makes huge pages by itself. A program of its own: it looks at all its memfds.

mod common;

use common::*;
use farpool_blade::{HugePages, Store};
use farpool_wire::*;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

/// More than half of an extent of 512, so that its blocks tell when it has become huge.
const FILLED_PAGES: u32 = 300;

/// Pages of all memfds of this process's segments.
fn pages_in_segments() -> u64 {
    let mut pages = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap) {
        let name = std::fs::read_link(entry.path()).unwrap_or_default();
        if name.to_string_lossy().contains("memfd:farpool-segment") {
            pages += std::fs::metadata(entry.path()).map_or(0, |found| found.blocks()) * 512 / 4096;
        }
    }
    pages
}

fn is_possible() -> bool {
    let store = Store::open(&farpool_blade::BackingKind::Memfd, 0).unwrap();
    let memory = Arc::new(store.segment(1));
    let file = std::fs::File::from(memory.share(1, true).unwrap().0);
    file.write_all_at(&vec![1; 2 << 20], 0).unwrap();
    let mut huge_pages = HugePages::default();
    huge_pages.watch(Arc::downgrade(&memory));
    while huge_pages.look(&|| false) {}
    huge_pages.counts().0 == 1
}

#[test]
fn a_serving_blade_makes_huge_pages_and_gives_them_back() {
    if !is_possible() {
        println!("SKIP: the kernel makes no huge page of a memfd (MADV_COLLAPSE, Linux 6.1)");
        return;
    }
    let blade = TestBlade::of_superpages(2);
    let mut client = blade.client(1);
    let (segment, _) = client.segment(2);
    let data = pages(1, 100);
    for page in (0..FILLED_PAGES).step_by(100) {
        client.write(segment, page, &data).done();
        client.write(segment, 4096 + page, &data).done();
    }
    wait_until("both extents are huge", || pages_in_segments() == 2 * 512);
    assert!(client.read(segment, 4096 + 200, 100).pages == data);
    client.free(segment, 0, 1).done();
    wait_until("one is given back", || pages_in_segments() == 512);
    client.ask(&Request::Goodbye).done();
    wait_until("all is given back", || pages_in_segments() == 0);
}
