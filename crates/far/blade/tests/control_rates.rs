//! Control requests over real sockets: however many connections and clients send them, no more are
//! carried out than the rate allows, none is refused or lost for that, and others do not wait.

mod common;

use common::*;
use farpool_blade::{BladeConfig, GrantId, GrantSpec};
use farpool_units::SUPERPAGE_BYTES;
use farpool_wire::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Low enough for a busy machine to reach.
const RATE: u64 = 1_000;
/// A full bucket of all together.
const BURST: u64 = RATE / 20;
/// What a hello counts.
const HELLO: u64 = 8;

fn blade() -> TestBlade {
    TestBlade::start(BladeConfig {
        control_requests_per_s: RATE,
        threads: 1,
        lease: Duration::from_secs(60),
        ..config_of(8)
    })
}

/// Sends what it can as fast as it can, and takes the answers.
fn flood(peer: &mut Peer, request: &Request<'_>, count: u64) {
    let ids: Vec<_> = (0..count).map(|_| peer.send(request, &[])).collect();
    for id in ids {
        let answer = peer.receive().unwrap();
        assert_eq!((answer.header.request_id, answer.refused()), (id, None), "none is lost");
    }
}

/// Asserts that this many units did not pass faster than the rate.
#[track_caller]
fn assert_paced(units: u64, rate: u64, time: Duration) {
    let least = Duration::from_nanos((units - rate / 20) * 1_000_000_000 / rate);
    assert!(time >= least, "{units} units in {time:?}, not {least:?}");
}

/// Runs `what` while a client of another user than the flood's, on the same worker, asks.
fn beside_a_bystander<T>(mut bystander: Peer, what: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (segment, _) = bystander.segment(1);
            let mut longest = Duration::ZERO;
            let mut answers = 0;
            while !done.load(Ordering::Acquire) {
                let asked = Instant::now();
                let extents = [Extent::page(PageNumber(answers % 4096))];
                bystander.ask(&Request::Read { segment, extents: &extents });
                longest = longest.max(asked.elapsed());
                answers += 1;
            }
            (answers, longest)
        });
        let result = what();
        done.store(true, Ordering::Release);
        let (answers, longest) = others.join().unwrap();
        assert!(answers > 100, "{answers} answers, the last after {longest:?}");
        result
    })
}

#[test]
fn more_connections_and_more_clients_do_not_get_more() {
    let blade = blade();
    let began = Instant::now();
    let peers = (0..12u32).map(|at| {
        let hello = Hello { slot: at, ..hello(u128::from(at / 3)) };
        Peer::hello_with(blade.tcp(), &hello).0
    });
    let mut peers: Vec<_> = peers.collect();
    let bystander = blade.client(99);
    beside_a_bystander(bystander, || {
        std::thread::scope(|scope| {
            for peer in &mut peers {
                scope.spawn(|| flood(peer, &Request::Ping, 60));
            }
        });
    });
    assert_paced(12 * HELLO + 12 * 60, RATE, began.elapsed());
    let throttled_ns = blade.serving.stat().totals.control_throttled_ns.get();
    assert!(throttled_ns > 100_000_000, "{throttled_ns}");
}

#[test]
fn one_client_gets_half() {
    let blade = blade();
    let mut client = blade.client(1);
    let mut second = Peer::hello_with(blade.unix(), &Hello { slot: 1, ..hello(1) }).0;
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&mut client, &Request::Ping, 150));
        scope.spawn(|| flood(&mut second, &Request::Ping, 150));
    });
    assert_paced(300, RATE / 2, began.elapsed());
}

#[test]
fn coming_back_does_not_fill_the_bucket() {
    let blade = blade();
    let began = Instant::now();
    for id in 0..40 {
        // A new client each time, and for a moment no connection at all.
        let mut peer = blade.client(id);
        peer.ask(&Request::Ping).done();
        peer.ask(&Request::Goodbye).done();
        wait_until("it has left", || blade.serving.stat().totals.connections.get() == 0);
    }
    assert_paced(40 * (HELLO + 2), RATE, began.elapsed());
}

#[test]
fn a_large_request_counts_as_many() {
    let blade = blade();
    let mut client = blade.client(1);
    let (segment, _) = client.segment(1);
    let extents: Vec<_> = (0..1600).map(|at| Extent::page(PageNumber(at % 4096))).collect();
    let discard = Request::Discard { segment, extents: &extents };
    let began = Instant::now();
    flood(&mut client, &discard, 4);
    assert_paced(4 * 101, RATE / 2, began.elapsed());
    // Answers are whole, too, and in order with what comes behind.
    flood(&mut client, &Request::ListSuperpages { segment, skip: 0 }, 3);
    let content = pages(3, 4);
    client.write(segment, 0, &content).done();
    assert_eq!(client.read(segment, 0, 4).pages, content);
}

fn granted(blade: &TestBlade) -> impl Fn(u128) -> Peer {
    let key = GrantKey(0xfeed);
    let spec = GrantSpec {
        id: GrantId(7),
        epoch: 1,
        key,
        bytes: 4 * SUPERPAGE_BYTES,
        read_bytes_per_s: u64::MAX,
        write_bytes_per_s: u64::MAX,
    };
    blade.serving.blade().set_grant(&spec).unwrap();
    move |id| {
        let hello = Hello { grant: Some(Grant { key, epoch: 1 }), ..hello(id) };
        Peer::hello_with(blade.unix(), &hello).0
    }
}

#[test]
fn all_under_a_grant_have_one_rate() {
    let blade = blade();
    let under = granted(&blade);
    let mut peers = [under(1), under(2), under(3)];
    let began = Instant::now();
    std::thread::scope(|scope| {
        for peer in &mut peers {
            scope.spawn(|| flood(peer, &Request::Ping, 200));
        }
    });
    assert_paced(600, RATE, began.elapsed());
    let grants = blade.serving.blade().grants();
    assert!(grants[0].control_throttled_ns > 0, "{grants:?}");
}

#[test]
fn who_floods_without_a_grant_holds_nobody_back_who_has_one() {
    let blade = blade();
    let under = granted(&blade);
    let mut others = [1, 2, 3].map(|id| blade.client(id));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for other in &mut others {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    flood(other, &Request::Ping, 50);
                }
            });
        }
        let throttled_ns = || blade.serving.stat().totals.control_throttled_ns.get();
        wait_until("they are held back", || throttled_ns() > 0);
        // They come from the same user: only the hello is in one line with them.
        flood(&mut under(4), &Request::Ping, BURST / 2);
        done.store(true, Ordering::Release);
    });
    assert_eq!(blade.serving.blade().grants()[0].control_throttled_ns, 0);
}

#[test]
fn who_waits_and_leaves_takes_its_turn_along() {
    let blade = blade();
    let mut first = blade.client(1);
    flood(&mut first, &Request::Ping, BURST);
    // Hundreds of hellos wait, and then do not.
    for round in 0..8 {
        let waiting: Vec<_> = (0..100u32)
            .map(|at| {
                let mut peer = Peer::connect(blade.unix());
                peer.send(&Request::Hello(Hello { slot: round * 100 + at, ..hello(2) }), &[]);
                peer
            })
            .collect();
        drop(waiting);
    }
    wait_until("they are gone", || blade.serving.stat().totals.connections.get() == 1);
    let began = Instant::now();
    blade.client(3).ask(&Request::Ping).done();
    let time = began.elapsed();
    // Else some would have to wait for 800 hellos: 6.4 s.
    assert!(time < Duration::from_secs(4), "{time:?}");
}

#[test]
fn without_a_limit_nothing_waits() {
    let blade = TestBlade::start(BladeConfig { control_requests_per_s: u64::MAX, ..config_of(1) });
    let mut client = blade.client(1);
    (0..100).for_each(|_| flood(&mut client, &Request::Ping, 100));
    assert_eq!(blade.serving.stat().totals.control_throttled_ns.get(), 0);
}
