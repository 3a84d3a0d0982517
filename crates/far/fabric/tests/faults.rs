//! Faults on a stream and their results: the right bytes or an error, never anything else.

mod common;

use std::time::{Duration, Instant};

use common::{Buffers, FakeBlade, Fault, finish, fresh_page, lock};
use farpool_fabric::{ConnectError, Link, PageDone, PageFault, StreamLink};
use farpool_wire::ErrorCode;
use proptest::prelude::*;

/// Long enough for every test that must not reach it.
const AMPLE: Duration = Duration::from_secs(20);

fn blades() -> [FakeBlade; 2] {
    [FakeBlade::unix(), FakeBlade::tcp()]
}

fn link(blade: &FakeBlade, deadline: Duration) -> StreamLink {
    StreamLink::connect(blade.session(deadline), 1).expect("connect")
}

/// Reads pages `first..first + count` in one go.
fn read(link: &mut StreamLink, first: u32, count: u32) -> (Vec<PageDone>, Buffers) {
    let mut buffers = Buffers::new(count as usize);
    let pages: Vec<_> =
        (0..count).map(|number| buffers.page(first + number, number as usize)).collect();
    // SAFETY: the buffers live until all completions have arrived.
    unsafe { link.read(&pages) };
    (finish(link), buffers)
}

fn assert_read_well(link: &mut StreamLink, first: u32, count: u32) {
    let (done, mut buffers) = read(link, first, count);
    assert_eq!(done.len(), count as usize);
    for number in 0..count {
        let at = number as usize;
        assert_eq!(done[at], PageDone { token: at as u64, result: Ok(()) });
        assert_eq!(buffers.bytes(at)[..], fresh_page(first + number)[..], "page {number}");
    }
}

#[test]
fn pages_arrive_whole_however_the_stream_is_cut() {
    for blade in blades() {
        for piece in [usize::MAX, 4096, 1000, 33, 31] {
            lock(&blade.inner).piece_bytes = piece;
            let mut link = link(&blade, AMPLE);
            for (first, count) in [(0, 1), (7, 3), (100, 150), (4000, 70)] {
                assert_read_well(&mut link, first, count);
            }
            assert_eq!(link.reconnects(), 0);
        }
    }
}

#[test]
fn answers_in_another_order_find_their_requests() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        blade.script(&[Fault::Hold, Fault::None, Fault::Hold, Fault::Hold, Fault::None]);
        assert_read_well(&mut link, 10, 64 * 5);
        assert_eq!(link.reconnects(), 0);
    }
}

#[test]
fn requests_beyond_the_credits_wait() {
    let blade = FakeBlade::unix();
    lock(&blade.inner).credits = 1;
    let mut link = link(&blade, AMPLE);
    assert_read_well(&mut link, 0, 64 * 9);
    assert_eq!(lock(&blade.inner).requests, 9);
}

#[test]
fn a_refusal_fails_its_request_only() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        blade.script(&[Fault::None, Fault::Refuse, Fault::None]);
        let (done, _buffers) = read(&mut link, 0, 64 * 3);
        let refused = Err(PageFault::Refused(ErrorCode::UnknownSegment));
        let expected = |at: usize| {
            if (64..128).contains(&at) { refused } else { Ok(()) }
        };
        (0..192).for_each(|at| assert_eq!(done[at].result, expected(at)));
        assert_eq!(link.reconnects(), 0);
    }
}

#[test]
fn one_bad_answer_costs_a_connection_and_nothing_else() {
    use Fault::*;
    for fault in [CloseMidAnswer, Garbage, DamagePage, DamageHead, WrongId] {
        for blade in blades() {
            let mut link = link(&blade, AMPLE);
            blade.script(&[None, fault]);
            assert_read_well(&mut link, 500, 64 * 4);
            assert_eq!(link.reconnects(), 1, "{fault:?}");
        }
    }
}

#[test]
fn a_repeated_answer_ends_the_connection() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        blade.script(&[Fault::AnswerTwice]);
        assert_read_well(&mut link, 0, 1);
        assert_read_well(&mut link, 1, 1);
        assert_eq!(link.reconnects(), 1);
    }
}

#[test]
fn bad_answers_without_end_become_an_error() {
    let blade = FakeBlade::unix();
    let mut link = link(&blade, AMPLE);
    blade.script(&[Fault::DamagePage; 3]);
    let (done, _buffers) = read(&mut link, 0, 1);
    assert_eq!(done, [PageDone { token: 0, result: Err(PageFault::Corrupt) }]);
    assert_read_well(&mut link, 0, 1);
}

#[test]
fn writes_that_were_cut_off_are_repeated() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        blade.script(&[Fault::None, Fault::CloseMidAnswer, Fault::None, Fault::Garbage]);
        let mut buffers = Buffers::new(300);
        let pages: Vec<_> = (0u32..300)
            .map(|number| {
                let at = number as usize;
                buffers.bytes(at).fill(u8::try_from(number % 251).expect("small"));
                buffers.page(number * 2, at)
            })
            .collect();
        // SAFETY: the buffers live until all completions are in.
        unsafe { link.write(&pages) };
        assert!(finish(&mut link).iter().all(|it| it.result.is_ok()));
        assert_eq!(link.reconnects(), 2);
        for number in 0u32..300 {
            let stored = lock(&blade.inner).pages[&(number * 2)].clone();
            assert_eq!(stored[..], buffers.bytes(number as usize)[..]);
        }
    }
}

#[test]
fn a_connection_cut_while_idle_is_made_again() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        assert_read_well(&mut link, 0, 2);
        blade.cut();
        assert_read_well(&mut link, 5, 2);
        assert_eq!(link.reconnects(), 1);
    }
}

#[test]
fn a_blade_that_is_gone_is_lost() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        blade.script(&[Fault::Silent]);
        let mut buffers = Buffers::new(2);
        let first = buffers.page(0, 0);
        // SAFETY: the buffers live until all completions are in.
        unsafe { link.read(&[first]) };
        while lock(&blade.inner).requests == 0 {
            std::thread::yield_now();
        }
        let begun = Instant::now();
        blade.kill();
        if let farpool_fabric::Address::Unix(path) = &blade.address {
            std::fs::remove_file(path).expect("remove the socket");
        }
        assert_eq!(finish(&mut link), [PageDone { token: 0, result: Err(PageFault::Lost) }]);
        assert!(begun.elapsed() < AMPLE / 2, "noticed without waiting for the deadline");
        assert!(link.loss().is_some());
        let later = buffers.page(1, 1);
        // SAFETY: as above.
        unsafe { link.read(&[later]) };
        assert_eq!(finish(&mut link), [PageDone { token: 1, result: Err(PageFault::Lost) }]);
    }
}

#[test]
fn a_blade_that_was_started_anew_is_lost() {
    let blade = FakeBlade::unix();
    let mut link = link(&blade, AMPLE);
    lock(&blade.inner).blade_id += 1;
    blade.cut();
    let (done, _buffers) = read(&mut link, 0, 1);
    assert_eq!(done[0].result, Err(PageFault::Lost));
    assert!(link.loss().is_some_and(|reason| reason.contains("anew")));
}

#[test]
fn silence_beyond_the_deadline_is_an_error() {
    for blade in blades() {
        let mut link = link(&blade, Duration::from_millis(100));
        blade.script(&[Fault::Silent]);
        let begun = Instant::now();
        let (done, _buffers) = read(&mut link, 0, 1);
        assert_eq!(done[0].result, Err(PageFault::Deadline));
        assert!(begun.elapsed() >= Duration::from_millis(100));
        assert!(link.loss().is_some_and(|reason| reason.contains("100 ms")));
    }
}

#[test]
fn an_answer_after_the_deadline_changes_nothing() {
    for blade in blades() {
        let mut link = link(&blade, Duration::from_millis(50));
        blade.script(&[Fault::Hold]); // sent when the link has closed its side
        let (done, mut buffers) = read(&mut link, 0, 1);
        assert_eq!(done[0].result, Err(PageFault::Deadline));
        blade.kill();
        assert_eq!(link.in_flight(), 0);
        assert_eq!(buffers.bytes(0), &[0xEE; 4096]);
    }
}

fn any_fault() -> impl Strategy<Value = Fault> {
    use Fault::*;
    let faults = [
        None,
        None,
        None,
        None,
        Hold,
        Refuse,
        CloseMidAnswer,
        Garbage,
        DamagePage,
        DamageHead,
        AnswerTwice,
        WrongId,
    ];
    proptest::sample::select(faults.to_vec()).no_shrink()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// Pages are read and written under any faults: every page completes once, and succeeds only
    /// with the right bytes on the right side.
    #[test]
    fn whatever_happens_good_completions_are_true(
        script in proptest::collection::vec(any_fault(), 0..30),
        batches in proptest::collection::vec((any::<bool>(), 0u32..500, 1u32..200), 1..6),
        piece in proptest::sample::select(&[usize::MAX, 8192, 4127, 700][..]),
        credits in 1u16..6,
    ) {
        let blade = FakeBlade::unix();
        blade.script(&script);
        lock(&blade.inner).credits = credits;
        lock(&blade.inner).piece_bytes = piece;
        let mut link = link(&blade, AMPLE);
        for (number, (is_write, first, count)) in (0u8..).zip(batches) {
            let mut buffers = Buffers::new(count as usize);
            let pages: Vec<_> = (0..count)
                .map(|at| {
                    buffers.bytes(at as usize)[..4].copy_from_slice(&[number, 1, 2, 3]);
                    buffers.page(first + at, at as usize)
                })
                .collect();
            // SAFETY: the buffers live until all completions are in.
            unsafe { if is_write { link.write(&pages) } else { link.read(&pages) } };
            // A held answer is released by the next one; nothing may stay held for good.
            let done = finish_releasing(&mut link, &blade);
            prop_assert_eq!(done.len(), count as usize);
            let stored = &lock(&blade.inner).pages;
            for (at, it) in done.iter().enumerate().filter(|(_, it)| it.result.is_ok()) {
                let page = first + u32::try_from(at).expect("small");
                prop_assert_eq!(it.token, at as u64);
                let there = stored.get(&page).cloned().unwrap_or_else(|| fresh_page(page));
                prop_assert_eq!(&there[..], &buffers.bytes(at)[..], "page {}", page);
            }
        }
    }
}

/// As `finish`, but cuts the connection when nothing moves while the fake blade owes bytes. Each
/// cut takes a fault of the script with it, so there are no more cuts than faults.
fn finish_releasing(link: &mut StreamLink, blade: &FakeBlade) -> Vec<PageDone> {
    let mut done = Vec::new();
    while link.in_flight() > 0 {
        let before = done.len();
        link.wait(&mut done);
        if done.len() == before && lock(&blade.inner).is_owing {
            blade.cut();
        }
    }
    done.sort_by_key(|it| it.token);
    done
}

#[test]
fn remote_tcp_is_refused_unless_allowed() {
    let blade = FakeBlade::tcp();
    let mut session = farpool_fabric::Session::clone(&blade.session(AMPLE));
    session.address = "tcp://192.0.2.1:7070".parse().expect("address");
    let refused = StreamLink::connect(session.into(), 1);
    assert!(matches!(refused, Err(ConnectError::RemoteTcp { .. })));
}
