//! A client that keeps to a rate: no faster than that, nothing lost, no deadline while waiting.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Buffers, FakeBlade, Fault, finish, fresh_page, lock};
use farpool_fabric::{ClientLimits, Link, Meters, PageFault, RateLimit, Session, StreamLink};
use farpool_kernel::monotonic_ns;

const AMPLE: Duration = Duration::from_secs(20);
const PAGE: u64 = 4096;

fn link_with(blade: &FakeBlade, deadline: Duration, limits: &Arc<ClientLimits>) -> StreamLink {
    let session = blade.session(deadline);
    let session = Session { limits: Some(Arc::clone(limits)), ..(*session).clone() };
    StreamLink::connect(Arc::new(session), 1).expect("connect")
}

fn limit(bytes_per_s: u64, burst_pages: u64) -> RateLimit {
    RateLimit { bytes_per_s, burst_bytes: burst_pages * PAGE }
}

#[test]
fn reads_keep_to_the_rate_and_arrive_whole() {
    for blade in [FakeBlade::unix(), FakeBlade::tcp()] {
        let rate = 8 << 20;
        let limits = Arc::new(ClientLimits::new(limit(rate, 16), RateLimit::UNLIMITED));
        let mut link = link_with(&blade, AMPLE, &limits);
        let start = Instant::now();
        for round in 0..32u32 {
            let mut buffers = Buffers::new(16);
            let pages: Vec<_> =
                (0..16u32).map(|at| buffers.page(round * 16 + at, at as usize)).collect();
            // SAFETY: the buffers live until all completions are in.
            unsafe { link.read(&pages) };
            assert!(finish(&mut link).iter().all(|done| done.result.is_ok()));
            for at in 0..16u32 {
                assert_eq!(buffers.bytes(at as usize)[..], fresh_page(round * 16 + at)[..]);
            }
        }
        let (bytes, time) = (32 * 16 * PAGE, start.elapsed());
        let most = (16 * PAGE) as f64 + rate as f64 * time.as_secs_f64();
        assert!(bytes as f64 <= most, "{bytes} bytes in {time:?}");
    }
}

#[test]
fn a_read_is_not_behind_writes_that_wait_and_these_meet_no_deadline() {
    let blade = FakeBlade::unix();
    // Each write waits twice as long as a request may go without an answer.
    let deadline = Duration::from_secs(3);
    let limits = Arc::new(ClientLimits::new(RateLimit::UNLIMITED, limit(PAGE / 6, 1)));
    let mut link = link_with(&blade, deadline, &limits);
    let mut buffers = Buffers::new(4);
    let writes: Vec<_> = (0..3u32).map(|at| buffers.page(100 + at, at as usize)).collect();
    let read = buffers.page(7, 3);
    for write in &writes {
        // SAFETY: the buffers live until all completions are in.
        unsafe { link.write(std::slice::from_ref(write)) };
    }
    // SAFETY: as above.
    unsafe { link.read(std::slice::from_ref(&read)) };
    let mut done = Vec::new();
    while done.len() < 4 {
        link.wait(&mut done);
        link.expire(Instant::now(), &mut done);
    }
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    let place = |token: u64| done.iter().position(|done| done.token == token);
    assert!(place(3) < place(1), "the read came before the writes that waited: {done:?}");
    assert_eq!(link.in_flight(), 0);
}

#[test]
fn what_is_sent_and_not_answered_still_meets_its_deadline() {
    let blade = FakeBlade::unix();
    blade.script(&[Fault::Silent; 1000]);
    let limits = Arc::new(ClientLimits::new(limit(1 << 30, 256), RateLimit::UNLIMITED));
    let mut link = link_with(&blade, Duration::from_secs(4), &limits);
    let mut buffers = Buffers::new(1);
    let page = buffers.page(1, 0);
    // SAFETY: the buffers live until all completions are in.
    unsafe { link.read(&[page]) };
    let mut done = Vec::new();
    while done.is_empty() {
        link.wait(&mut done);
        link.expire(Instant::now(), &mut done);
    }
    assert_eq!(done[0].result, Err(PageFault::Deadline));
}

#[test]
fn links_share_one_limit_and_who_polls_is_woken_for_what_waits() {
    let blade = FakeBlade::unix();
    // As in a process tree: plain zeroed memory, which means no limit until one is set.
    let meters: &'static Meters = Box::leak(Box::default());
    let limits = Arc::new(ClientLimits::shared(meters));
    let mut link = link_with(&blade, AMPLE, &limits);
    let mut buffers = Buffers::new(2);
    let (one, two) = (buffers.page(1, 0), buffers.page(2, 1));
    // SAFETY: the buffers live until all completions are in.
    unsafe { link.read(&[one]) };
    assert_eq!(finish(&mut link).len(), 1, "no limit as yet");
    // The next page may be read 5 s after this.
    limits.set(limit(PAGE / 5, 1), RateLimit::UNLIMITED);
    let elsewhere = ClientLimits::shared(meters); // what another process took
    let taken = elsewhere.meters().read.limit().expect("set");
    assert_eq!(elsewhere.meters().read.bucket().take(PAGE, monotonic_ns(), &taken), Ok(()));
    let before = lock(&blade.inner).requests;
    // SAFETY: as above.
    unsafe { link.read(&[two]) };
    assert_eq!(lock(&blade.inner).requests, before, "held back");
    let mut done = Vec::new();
    while done.is_empty() {
        let descriptor = link.descriptor().expect("something to wait for");
        let flags = rustix::event::PollFlags::IN;
        let mut set = [rustix::event::PollFd::from_borrowed_fd(descriptor, flags)];
        let long = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut set, Some(&long)), Ok(1), "woken in time");
        link.poll(&mut done);
    }
    assert_eq!(done[0].result, Ok(()));
}
