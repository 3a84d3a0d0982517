//! Faults on a stream and their results: the right bytes or an error, never anything else.

mod common;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Buffers, FakeBlade, Fault, SlowTime, finish, fresh_page, lock};
use farpool_fabric::{
    Address, ConnectError, Control, Link, PageDone, PageFault, Session, Spare, StreamLink,
};
use farpool_wire::{ErrorCode, Priority, Request};
use proptest::prelude::*;

/// Long enough for every test that must not reach it.
const AMPLE: Duration = Duration::from_secs(20);
/// The deadline that a test waits for: longer than a busy machine takes for the answers before.
const SHORT: Duration = Duration::from_secs(4);
/// More answers than a link asks for until the short deadline.
const MANY: usize = 1000;

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

/// Reads over streams that are cut into pieces of many sizes. Returns how many connections were
/// made again.
fn read_in_pieces(blade: &FakeBlade) -> u64 {
    let read_with = |piece| {
        lock(&blade.inner).piece_bytes = piece;
        let mut link = link(blade, AMPLE);
        for (first, count) in [(0, 1), (7, 3), (100, 150), (4000, 70)] {
            assert_read_well(&mut link, first, count);
        }
        link.reconnects()
    };
    [usize::MAX, 4096, 1000, 33, 31].into_iter().map(read_with).sum()
}

#[test]
fn pages_arrive_whole_however_the_stream_is_cut() {
    for blade in blades() {
        // By the kernel's clock, a busy machine may cost a connection, and no page.
        read_in_pieces(&blade);
        let _slow = SlowTime::begin();
        assert_eq!(read_in_pieces(&blade), 0);
    }
}

#[test]
fn answers_in_another_order_find_their_requests() {
    let _slow = SlowTime::begin();
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        blade.script(&[Fault::Hold, Fault::None, Fault::Hold, Fault::Hold, Fault::None]);
        assert_read_well(&mut link, 10, 64 * 5);
        assert_eq!(link.reconnects(), 0);
    }
}

#[test]
fn requests_beyond_the_credits_wait() {
    let _slow = SlowTime::begin();
    let blade = FakeBlade::unix();
    lock(&blade.inner).credits = 1;
    let mut link = link(&blade, AMPLE);
    assert_read_well(&mut link, 0, 64 * 9);
    assert_eq!(lock(&blade.inner).requests, 9);
}

#[test]
fn a_refusal_fails_its_request_only() {
    let _slow = SlowTime::begin();
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
    let _slow = SlowTime::begin();
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
    let _slow = SlowTime::begin();
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
    let _slow = SlowTime::begin();
    let blade = FakeBlade::unix();
    let mut link = link(&blade, AMPLE);
    blade.script(&[Fault::DamagePage; 3]);
    let (done, _buffers) = read(&mut link, 0, 1);
    assert_eq!(done, [PageDone { token: 0, result: Err(PageFault::Corrupt) }]);
    assert_read_well(&mut link, 0, 1);
}

#[test]
fn writes_that_were_cut_off_are_repeated() {
    let _slow = SlowTime::begin();
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
    let _slow = SlowTime::begin();
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        assert_read_well(&mut link, 0, 2);
        blade.cut();
        assert_read_well(&mut link, 5, 2);
        assert_eq!(link.reconnects(), 1);
    }
}

/// Reads on a connection that is not closed, but never answers.
fn read_on_a_dead_flow(link: &mut StreamLink, blade: &FakeBlade) {
    blade.script(&[Fault::Silent]);
    let begun = Instant::now();
    assert_read_well(link, 0, 1);
    // The silence that is borne, and what a busy machine adds.
    assert!(begun.elapsed() < AMPLE / 2, "without waiting for the deadline");
    assert!(lock(&blade.inner).requests >= 2, "it was sent again");
}

#[test]
fn a_dead_flow_costs_a_second_connection_and_not_the_blade() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        assert_read_well(&mut link, 7, 3);
        for number in 1..=2 {
            read_on_a_dead_flow(&mut link, &blade);
            assert!(link.reconnects() >= number);
        }
        assert_eq!(link.loss(), None);
    }
}

/// A greeting that came late once, from a busy blade, does not make patient for ever.
#[test]
fn a_dead_flow_is_replaced_soon_though_its_greeting_was_slow() {
    let slow = Duration::from_secs(1);
    let blade = FakeBlade::tcp();
    // So long that no part of it is what ends the patience.
    let mut link = link(&blade, 3 * AMPLE);
    lock(&blade.inner).greeting = slow;
    blade.cut();
    assert_read_well(&mut link, 7, 3);
    lock(&blade.inner).greeting = Duration::ZERO;
    blade.script(&[Fault::Silent]);
    let begun = Instant::now();
    assert_read_well(&mut link, 0, 1);
    // Eight times the slow greeting would be 8 s.
    assert!(begun.elapsed() < 7 * slow, "{:?}", begun.elapsed());
}

/// A process that is stopped, or gets no processor, has not listened.
#[test]
fn a_blade_is_not_given_up_for_a_time_in_which_this_side_stood_still() {
    let slow = SlowTime::begin();
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        assert_read_well(&mut link, 7, 3);
        blade.script(&[Fault::Silent]);
        let mut buffers = Buffers::new(1);
        let page = buffers.page(3, 0);
        // SAFETY: the buffer lives until its completion has arrived.
        unsafe { link.read(&[page]) };
        // Nobody drives the link meanwhile.
        slow.pass(AMPLE * 3);
        assert_eq!(finish(&mut link), [PageDone { token: 0, result: Ok(()) }]);
        assert_eq!(buffers.bytes(0)[..], fresh_page(3)[..]);
        assert_eq!(link.loss(), None);
    }
}

/// A port that refuses for a while, as when a proxy is restarted: the blade has kept everything.
#[test]
fn a_network_that_refuses_for_a_while_does_not_cost_the_blade() {
    let blade = FakeBlade::tcp();
    let mut link = link(&blade, AMPLE);
    assert_read_well(&mut link, 7, 3);
    let Address::Tcp(at) = blade.address.clone() else { unreachable!("it is") };
    blade.kill();
    let mut buffers = Buffers::new(1);
    let page = buffers.page(3, 0);
    // SAFETY: the buffer lives until its completion has arrived.
    unsafe { link.read(&[page]) };
    let mut done = Vec::new();
    // The break is seen, and connections are refused.
    while link.reconnects() == 0 {
        link.wait(&mut done);
    }
    (0..10).for_each(|_| link.wait(&mut done));
    assert_eq!((done.len(), link.loss()), (0, None));
    let _again = FakeBlade::tcp_at(at);
    assert_eq!(finish(&mut link), [PageDone { token: 0, result: Ok(()) }]);
    assert_eq!(buffers.bytes(0)[..], fresh_page(3)[..]);
}

#[test]
fn a_network_that_refuses_beyond_the_deadline_costs_the_blade_and_the_reason_says_so() {
    let blade = FakeBlade::tcp();
    let mut link = link(&blade, SHORT);
    assert_read_well(&mut link, 7, 3);
    blade.kill();
    let (done, _buffers) = read(&mut link, 0, 1);
    assert_eq!(done[0].result, Err(PageFault::Lost));
    let reason = link.loss().expect("lost");
    assert!(reason.contains("4000 ms, and no connection: no blade serves there"), "{reason}");
}

/// Who holds a blade's port after it: nobody, or somebody who never answers.
fn after_its_end(blade: &FakeBlade, is_silent: bool) -> Option<TcpListener> {
    let Address::Tcp(at) = blade.address.clone() else { unreachable!("it is") };
    blade.kill();
    is_silent.then(|| TcpListener::bind(at).expect("its port"))
}

#[test]
fn a_blade_that_cannot_be_reached_is_lost_with_the_lease() {
    for is_silent in [false, true] {
        let blade = FakeBlade::tcp();
        lock(&blade.inner).lease_ms = 300;
        let mut link = link(&blade, AMPLE);
        assert_read_well(&mut link, 7, 3);
        let _silent = after_its_end(&blade, is_silent);
        let begun = Instant::now();
        let (done, _buffers) = read(&mut link, 0, 1);
        assert_eq!(done[0].result, Err(PageFault::Lost));
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(300) && took < AMPLE / 2, "{took:?}");
        let reason = link.loss().expect("lost");
        assert!(reason.contains("lease there of 300 ms ran out while it could not"), "{reason}");
    }
}

/// What holds the lease is any connection of the client.
#[test]
fn the_lease_lasts_as_long_as_another_connection_is_answered() {
    let blade = FakeBlade::tcp();
    lock(&blade.inner).lease_ms = 2500;
    let session = blade.session(2 * SHORT);
    let mut link = StreamLink::connect(Arc::clone(&session), 1).expect("connect");
    assert_read_well(&mut link, 7, 3);
    // The same client's, over another way to the blade.
    let other = FakeBlade::tcp();
    lock(&other.inner).lease_ms = 2500;
    let twin = Session { address: other.address.clone(), ..Session::clone(&session) };
    let mut held = StreamLink::connect(Arc::new(twin), 2).expect("connect");
    blade.kill();
    let mut buffers = Buffers::new(1);
    let page = buffers.page(3, 0);
    // SAFETY: the buffer lives until its completion has arrived.
    unsafe { link.read(&[page]) };
    let mut done = Vec::new();
    while link.in_flight() > 0 {
        link.wait(&mut done);
        link.expire(Instant::now(), &mut done);
        assert_read_well(&mut held, 0, 4);
    }
    assert_eq!(done[0].result, Err(PageFault::Lost));
    let reason = link.loss().expect("lost");
    assert!(reason.contains("no answer within 8000 ms"), "{reason}");
}

#[test]
fn requests_on_the_control_connection_end_with_the_lease() {
    for is_silent in [false, true] {
        let blade = FakeBlade::tcp();
        lock(&blade.inner).lease_ms = 300;
        let mut control = Control::connect(blade.session(AMPLE), 0).expect("connect");
        let _silent = after_its_end(&blade, is_silent);
        let begun = Instant::now();
        let error = control.call(&Request::Ping).map(drop).expect_err("nobody is there");
        assert!(begun.elapsed() < AMPLE / 2, "without waiting for the deadline");
        let said = error.to_string();
        assert!(said.contains("lease there of 300 ms ran out while it could not"), "{said}");
        assert!(control.loss().is_some());
    }
}

/// A session with a blade that can be spared.
fn spared(blade: &FakeBlade) -> (Arc<Session>, Spare) {
    let spare = Spare::default();
    spare.set(true);
    let session = Session { spare: spare.clone(), ..Session::clone(&blade.session(AMPLE)) };
    (Arc::new(session), spare)
}

#[test]
fn a_blade_that_can_be_spared_is_given_up_long_before_the_deadline() {
    for (is_silent, said) in [(true, "no answer within 800 ms"), (false, "no blade serves there")] {
        let blade = FakeBlade::tcp();
        let (session, spare) = spared(&blade);
        let mut link = StreamLink::connect(session, 1).expect("connect");
        assert_read_well(&mut link, 7, 3);
        let _silent = after_its_end(&blade, is_silent);
        let begun = Instant::now();
        let (done, _buffers) = read(&mut link, 0, 1);
        assert_eq!(done[0].result, Err(PageFault::Lost));
        assert!(begun.elapsed() < AMPLE / 2, "{:?}", begun.elapsed());
        let reason = link.loss().expect("lost");
        assert!(reason.contains(said), "{reason}");
        assert!(!spare.is_set(), "no other one is given up as well");
    }
}

#[test]
fn requests_on_the_control_connection_end_when_the_blade_can_be_spared() {
    for is_silent in [false, true] {
        let blade = FakeBlade::tcp();
        let (session, spare) = spared(&blade);
        let mut control = Control::connect(session, 0).expect("connect");
        let _silent = after_its_end(&blade, is_silent);
        let begun = Instant::now();
        control.call(&Request::Ping).map(drop).expect_err("nobody is there");
        assert!(begun.elapsed() < AMPLE / 2, "{:?}", begun.elapsed());
        assert!(control.loss().is_some() && !spare.is_set());
    }
}

/// Whoever finds out first, the others do not wait.
#[test]
fn requests_on_the_control_connection_end_when_another_one_gives_the_blade_up() {
    let blade = FakeBlade::tcp();
    let session = blade.session(AMPLE);
    let mut control = Control::connect(Arc::clone(&session), 0).expect("connect");
    let _silent = after_its_end(&blade, true);
    session.met.give_up();
    let begun = Instant::now();
    let error = control.call(&Request::Ping).map(drop).expect_err("it is given up");
    assert!(begun.elapsed() < AMPLE / 2, "{:?}", begun.elapsed());
    assert!(error.to_string().contains("given up"), "{error}");
}

#[test]
fn a_blade_that_is_gone_from_this_host_is_lost_at_once() {
    let blade = FakeBlade::unix();
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
    if let Address::Unix(path) = &blade.address {
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
        let mut link = link(&blade, SHORT);
        blade.script(&[Fault::Silent; MANY]);
        let begun = Instant::now();
        let (done, _buffers) = read(&mut link, 0, 1);
        assert_eq!(done[0].result, Err(PageFault::Deadline));
        assert!(begun.elapsed() >= SHORT);
        assert!(link.loss().is_some_and(|reason| reason.contains("4000 ms")));
    }
}

#[test]
fn an_answer_after_the_deadline_changes_nothing() {
    for blade in blades() {
        let mut link = link(&blade, SHORT);
        blade.script(&[Fault::Hold; MANY]); // each is sent when the link has closed its side
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

#[test]
fn what_nobody_waits_for_says_so() {
    for blade in blades() {
        let mut link = link(&blade, AMPLE);
        let mut buffers = Buffers::new(2);
        let (one, two) = (buffers.page(1, 0), buffers.page(2, 1));
        for _ in 0..2 {
            // SAFETY: the buffers live until all completions have arrived.
            unsafe { link.read(&[one]) };
            assert_eq!(finish(&mut link)[0].result, Ok(()));
            // SAFETY: as above.
            unsafe { link.write(&[two]) };
            assert_eq!(finish(&mut link)[0].result, Ok(()));
            link.set_background();
        }
        let usual = [Priority::Demand, Priority::Eviction];
        let priorities = [usual, [Priority::Background; 2]].concat();
        assert_eq!(lock(&blade.inner).priorities, priorities);
    }
}
