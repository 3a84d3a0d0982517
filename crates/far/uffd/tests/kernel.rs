//! The bindings against the running kernel. Each test skips visibly where userfaultfd is denied.

use farpool_uffd::{Message, PageRange, Pagemap, Uffd, category, features, register_mode};
use farpool_units::PAGE_BYTES;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

fn open() -> Option<Uffd> {
    match Uffd::open(features::MOVE | features::POISON | features::THREAD_ID, true) {
        Ok(uffd) => Some(uffd),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

fn map(pages: usize) -> usize {
    // SAFETY: a fresh anonymous mapping that aliases nothing.
    let pointer = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            pages * PAGE_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    pointer.expect("mmap") as usize
}

fn write_byte(address: usize, value: u8) {
    // SAFETY: the tests only pass addresses of their own live mappings.
    unsafe { std::ptr::write_volatile(address as *mut u8, value) }
}

fn read_byte(address: usize) -> u8 {
    // SAFETY: as in write_byte.
    unsafe { std::ptr::read_volatile(address as *const u8) }
}

#[test]
fn move_takes_pages_out_and_back_with_holes() {
    let Some(uffd) = open() else { return };
    let (program, buffer) = (map(8), map(8));
    for area in [program, buffer] {
        uffd.register(area, 8 * PAGE_BYTES, register_mode::MISSING).expect("register");
    }
    let source = vec![7_u8; PAGE_BYTES];
    for (page, stamp) in [(0, 1_u8), (3, 4), (7, 8)] {
        let outcome =
            uffd.copy(program + page * PAGE_BYTES, source.as_ptr() as usize, PAGE_BYTES, true);
        assert_eq!(outcome.errno, None);
        write_byte(program + page * PAGE_BYTES, stamp);
    }
    let out = uffd.move_pages(buffer, program, 8 * PAGE_BYTES, true, true);
    assert_eq!((out.done_bytes, out.errno), (8 * PAGE_BYTES, None));
    let pagemap = Pagemap::open().expect("pagemap");
    let mut ranges = [PageRange::default(); 8];
    let (found, end) = pagemap
        .scan(buffer, buffer + 8 * PAGE_BYTES, category::PRESENT, &mut ranges)
        .expect("scan");
    let starts: Vec<usize> =
        found.iter().map(|range| (range.first() - buffer) / PAGE_BYTES).collect();
    assert_eq!((starts, end), (vec![0, 3, 7], buffer + 8 * PAGE_BYTES));
    for (page, stamp) in [(0, 1_u8), (3, 4), (7, 8)] {
        assert_eq!(read_byte(buffer + page * PAGE_BYTES), stamp);
    }
}

#[test]
fn only_what_was_asked_for_is_agreed() {
    let Some(uffd) = open() else { return };
    assert_eq!(uffd.features(), features::MOVE | features::POISON | features::THREAD_ID);
    let all = farpool_uffd::probe_features().expect("a probe");
    assert!(all & features::EVENTS == features::EVENTS, "the kernel has more: {all:#x}");
}

#[test]
fn a_fault_is_reported_with_its_page_and_thread() {
    let Some(uffd) = open() else { return };
    let area = map(4);
    uffd.register(area, 4 * PAGE_BYTES, register_mode::MISSING).expect("register");
    let toucher = std::thread::spawn(move || read_byte(area + 2 * PAGE_BYTES + 5));
    let mut messages = [Message::default(); 4];
    let event = loop {
        if let Ok([message, ..]) = uffd.read(&mut messages) {
            break message.event();
        }
        std::thread::yield_now();
    };
    assert_eq!(event.page_address, Some(area + 2 * PAGE_BYTES));
    assert!(event.thread != 0 && !event.is_write);
    let source = vec![42_u8; PAGE_BYTES];
    let outcome = uffd.copy(area + 2 * PAGE_BYTES, source.as_ptr() as usize, PAGE_BYTES, true);
    assert_eq!(outcome.done_bytes, PAGE_BYTES);
    assert_eq!(toucher.join().expect("join"), 42);
}

#[test]
fn a_batch_that_stops_says_how_far_it_came() {
    let Some(uffd) = open() else { return };
    let (area, source) = (map(4), map(4));
    uffd.register(area, 4 * PAGE_BYTES, register_mode::MISSING).expect("register");
    write_byte(source, 1);
    assert_eq!(uffd.copy(area + 2 * PAGE_BYTES, source, PAGE_BYTES, true).errno, None);
    let outcome = uffd.copy(area, source, 4 * PAGE_BYTES, true);
    assert_eq!(outcome.done_bytes, 2 * PAGE_BYTES);
    assert!(outcome.errno.is_some());
}

/// One fault was read before the wake, one was not: both threads try again, and both faults are
/// reported anew.
#[test]
fn wake_all_reaches_faults_read_and_unread() {
    let Some(uffd) = open() else { return };
    let area = map(4);
    uffd.register(area, 4 * PAGE_BYTES, register_mode::MISSING).expect("register");
    let touch = |page: usize| std::thread::spawn(move || read_byte(area + page * PAGE_BYTES));
    let next = || {
        let mut messages = [Message::default(); 1];
        loop {
            if let Ok([message]) = uffd.read(&mut messages) {
                return message.event().page_address.expect("a page fault") - area;
            }
            std::thread::yield_now();
        }
    };
    let first = touch(0);
    assert_eq!(next(), 0);
    let second = touch(3);
    while !has_message(&uffd) {
        std::thread::yield_now();
    }
    uffd.wake_all().expect("wake");
    let mut seen = [next(), next()];
    seen.sort_unstable();
    assert_eq!(seen, [0, 3 * PAGE_BYTES]);
    for page in [0, 3] {
        assert_eq!(uffd.zero(area + page * PAGE_BYTES, PAGE_BYTES, true).errno, None);
    }
    assert_eq!((first.join().expect("first"), second.join().expect("second")), (0, 0));
}

fn has_message(uffd: &Uffd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(uffd, PollFlags::IN)], Some(&zero)) == Ok(1)
}
