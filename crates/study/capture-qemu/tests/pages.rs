// SPDX-License-Identifier: GPL-2.0-or-later
//! The filter of pages against a plain list of all records.

use farpool_capture_qemu::pages::PageFilter;

/// A record: which access of the thread made it, for which page, and whether it was a store.
struct Record {
    count: u64,
    page: u64,
    is_store: bool,
}

/// The filter's rule, applied to all records.
fn is_news(records: &[Record], window: u64, count: u64, page: u64, is_store: bool) -> bool {
    let mut within = records.iter().filter(|it| it.page == page && count - it.count <= window);
    !within.any(|it| it.is_store || !is_store)
}

#[test]
fn a_page_is_recorded_once_in_a_window_and_at_its_first_write() {
    for window in [1, 7, 100, 4096] {
        let mut filter = PageFilter::new(window);
        let mut records = Vec::new();
        let mut state = window;
        for count in 1..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (page, is_store) = ((state >> 33) % 50, state >> 61 == 0);
            let expected = is_news(&records, window, count, page, is_store);
            let (last, found) = filter.reference(page, is_store, count);
            assert_eq!(found, expected, "access {count} of page {page}, window {window}");
            if expected {
                records.push(Record { count, page, is_store });
            }
            let made = records.iter().rfind(|it| it.page == page).expect("it was recorded");
            assert_eq!((last.until, last.is_written), (made.count + window, made.is_store));
        }
    }
}

#[test]
fn pages_outside_the_window_are_forgotten_and_recorded_again() {
    let mut filter = PageFilter::new(10);
    let pages = 100_000;
    assert!((0..pages).all(|page| filter.reference(page, false, page + 1).1));
    assert!((0..pages).all(|page| filter.reference(page, false, pages + page + 1).1));
    assert!(!filter.reference(pages - 1, false, 2 * pages).1);
}
