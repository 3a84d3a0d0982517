//! Pages that KSM has merged.

use std::time::{Duration, Instant};

use crate::memory::{PAGE, READ_WRITE, advise, ballast, map, require, slice, wrong_data};

/// How long KSM may take; the test lets it scan without pause.
const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: usize = (12 << 20) / PAGE;
/// Parts of the merged pages that somebody else may split meanwhile.
const TOLERANCE: usize = 8;

/// Merged pages become far, come back right, and what is written to one is not in the others.
pub fn merged() {
    merged_pages(usize::MAX);
}

/// None is split to become far, which would cost a frame and a copy each.
pub fn merged_unsplit() {
    merged_pages(PAGES / TOLERANCE);
}

/// At most `most` may be split meanwhile.
fn merged_pages(most: usize) {
    let start = map(0, PAGES * PAGE, READ_WRITE, 0);
    let mut content = [0; PAGE];
    content.iter_mut().zip((1..=u8::MAX).cycle()).for_each(|(byte, value)| *byte = value);
    let page = |number: usize| slice(start + number * PAGE, PAGE);
    (0..PAGES).for_each(|number| page(number).copy_from_slice(&content));
    require(advise(start, PAGES * PAGE, libc::MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_until_merged();
    let before = split_pages();
    let far = ballast();
    let split = split_pages() - before;
    require(split <= most, &format!("{split} of {PAGES} merged pages were split"));
    let left = resident_pages(start);
    require(left < PAGES / 2, &format!("{left} of {PAGES} merged pages stay local"));
    for number in 0..PAGES {
        require_equal(page(number), &content);
        if number % 7 == 0 {
            page(number)[..8].copy_from_slice(&number.to_ne_bytes());
        }
    }
    far.check();
    for number in 0..PAGES {
        let mut expected = content;
        if number % 7 == 0 {
            expected[..8].copy_from_slice(&number.to_ne_bytes());
        }
        require_equal(page(number), &expected);
    }
}

/// How many of the pages are there, by the kernel's word.
fn resident_pages(start: usize) -> usize {
    let mut there = [0_u8; PAGES];
    // SAFETY: asks about a mapping of the case's own, with room for an answer for each page.
    let asked = unsafe { libc::mincore(start as *mut _, PAGES * PAGE, there.as_mut_ptr()) };
    require(asked == 0, "mincore");
    there.iter().filter(|page| **page & 1 != 0).count()
}

fn require_equal(page: &[u8], expected: &[u8; PAGE]) {
    if page != expected {
        wrong_data("a merged page");
    }
}

/// Waits until KSM has merged nearly all pages.
fn wait_until_merged() {
    let begun = Instant::now();
    while number_in("/proc/self/ksm_merging_pages", "") < PAGES - PAGES / TOLERANCE {
        require(begun.elapsed() < PATIENCE, "pages to be merged in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Merged pages that were split by writing to them since the machine's start.
fn split_pages() -> usize {
    number_in("/proc/vmstat", "cow_ksm ")
}

/// The number after `name` at the beginning of a line of a file.
fn number_in(path: &str, name: &str) -> usize {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let number = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    require(number.is_some(), &format!("{path} to have {name:?}"));
    number.unwrap_or(0)
}
