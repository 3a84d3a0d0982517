//! Grants over real sockets: which clients are admitted or ended, and what becomes of the memory.

mod common;

use common::*;
use farpool_blade::{BladeConfig, GrantError, GrantId, GrantSpec, GrantStat};
use farpool_units::{PAGE_BYTES, PAGES_PER_SUPERPAGE, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const ID: GrantId = GrantId(77);
const KEY: GrantKey = GrantKey(0xfeed_beef);
const OTHER_KEY: GrantKey = GrantKey(0xdead_cafe);

fn spec(epoch: u64, superpages: u64) -> GrantSpec {
    GrantSpec {
        id: ID,
        epoch,
        key: KEY,
        bytes: superpages * SUPERPAGE_BYTES,
        read_bytes_per_s: u64::MAX,
        write_bytes_per_s: u64::MAX,
    }
}

fn granting(superpages: u64) -> TestBlade {
    TestBlade::start(BladeConfig { require_grants: true, ..config_of(superpages) })
}

fn hello_under(id: u128, key: GrantKey, epoch: u64) -> Hello<'static> {
    Hello { grant: Some(Grant { key, epoch }), ..hello(id) }
}

fn client_under(blade: &TestBlade, address: &Address, id: u128, epoch: u64) -> Peer {
    let (peer, answer) = Peer::hello_with(address, &hello_under(id, KEY, epoch));
    assert!(matches!(answer.response(), Response::HelloOk(_)), "{:?}", answer.response());
    assert!(!blade.serving.blade().grants().is_empty());
    peer
}

fn grant(blade: &TestBlade) -> GrantStat {
    blade.serving.blade().grants()[0]
}

fn used_bytes(blade: &TestBlade) -> u64 {
    blade.serving.stat().totals.used_bytes.get()
}

#[track_caller]
fn refused_with(blade: &TestBlade, hello: &Hello<'_>) -> (ErrorCode, u64) {
    let (mut peer, answer) = Peer::hello_with(blade.unix(), hello);
    let Response::Error { code, detail } = answer.response() else { panic!("{answer:?}") };
    assert!(peer.is_closed());
    (code, detail)
}

#[test]
fn only_who_shows_the_key_and_the_epoch_gets_in() {
    let blade = granting(4);
    let not_granted = (ErrorCode::NotGranted, 0);
    assert_eq!(refused_with(&blade, &hello(1)), not_granted);
    assert_eq!(refused_with(&blade, &hello_under(1, KEY, 5)), not_granted);
    blade.serving.blade().set_grant(&spec(5, 2)).unwrap();
    assert_eq!(refused_with(&blade, &hello(1)), not_granted);
    assert_eq!(refused_with(&blade, &hello_under(1, OTHER_KEY, 5)), not_granted);
    assert_eq!(refused_with(&blade, &hello_under(1, KEY, 4)), (ErrorCode::StaleEpoch, 5));
    assert_eq!(refused_with(&blade, &hello_under(1, KEY, 6)), not_granted);
    let keeper = Hello { purpose: Purpose::Keeper, ..hello(1) };
    assert_eq!(refused_with(&blade, &keeper), not_granted);
    assert_eq!(grant(&blade).clients, 0, "nobody came in");
    let (_, answer) = Peer::hello_with(blade.tcp(), &hello_under(1, KEY, 5));
    let Response::HelloOk(ok) = answer.response() else { panic!("{answer:?}") };
    assert_eq!(ok.quota_bytes, 2 * SUPERPAGE_BYTES, "no more than the grant");
}

#[test]
fn a_client_stays_under_the_grant_it_came_under() {
    let blade = TestBlade::of_superpages(4);
    blade.serving.blade().set_grant(&spec(1, 2)).unwrap();
    let other = GrantSpec { id: GrantId(78), key: OTHER_KEY, ..spec(1, 2) };
    blade.serving.blade().set_grant(&other).unwrap();
    let _one = client_under(&blade, blade.unix(), 1, 1);
    let _free = blade.client(2); // without the flag, no grant is needed
    let second = |hello: Hello<'static>| Hello { slot: 1, ..hello };
    let not_granted = (ErrorCode::NotGranted, 0);
    assert_eq!(refused_with(&blade, &second(hello_under(1, OTHER_KEY, 1))), not_granted);
    assert_eq!(refused_with(&blade, &second(hello(1))), not_granted);
    assert_eq!(refused_with(&blade, &second(hello_under(2, KEY, 1))), not_granted);
    assert_eq!(refused_with(&blade, &hello_under(3, GrantKey(1), 1)), not_granted);
}

#[test]
fn monitors_see_totals_and_clients_see_their_own_grant() {
    let blade = granting(8);
    blade.serving.blade().set_grant(&spec(1, 2)).unwrap();
    let other = GrantSpec { id: GrantId(78), key: OTHER_KEY, ..spec(1, 2) };
    blade.serving.blade().set_grant(&other).unwrap();
    let mut one = client_under(&blade, blade.unix(), 1, 1);
    let (mut two, _) = Peer::hello_with(blade.unix(), &hello_under(2, OTHER_KEY, 1));
    let monitor = Hello { purpose: Purpose::Monitor, ..hello(0) };
    let (mut monitor, _) = Peer::hello_with(blade.unix(), &monitor);
    let (totals, clients) = monitor.stat();
    assert_eq!((totals.clients.get(), clients.len()), (2, 0));
    assert_eq!(one.stat().1.len(), 1);
    assert_eq!(two.stat().1.len(), 1);
    assert_ne!(one.stat().1[0].number, two.stat().1[0].number);
}

#[test]
fn a_new_epoch_closes_the_old_connections_and_keeps_the_clients() {
    let blade = granting(4);
    blade.serving.blade().set_grant(&spec(1, 2)).unwrap();
    let mut old = client_under(&blade, blade.tcp(), 1, 1);
    let (segment, _) = old.segment(1);
    let content = pages(3, 8);
    old.write(segment, 0, &content).done();
    blade.serving.blade().set_grant(&GrantSpec { bytes: SUPERPAGE_BYTES, ..spec(1, 2) }).unwrap();
    old.ask(&Request::Ping).done();
    assert_eq!(grant(&blade).granted_bytes, SUPERPAGE_BYTES, "the same epoch changes the bytes");

    let given_anew = GrantSpec { key: OTHER_KEY, ..spec(2, 2) };
    blade.serving.blade().set_grant(&given_anew).unwrap();
    assert!(old.is_closed());
    assert_eq!(refused_with(&blade, &hello_under(1, KEY, 1)), (ErrorCode::StaleEpoch, 2));
    let again = Hello { generation: 1, ..hello_under(1, OTHER_KEY, 2) };
    let (mut new, _) = Peer::hello_with(blade.tcp(), &again);
    assert_eq!(new.read(segment, 0, 8).pages, content, "the client is the same");
    let stale = Err(GrantError::Stale { epoch: 2 });
    assert_eq!(blade.serving.blade().set_grant(&spec(1, 4)), stale);
    assert_eq!(blade.serving.blade().revoke_grant(ID, 1).map(drop), stale);
    new.ask(&Request::Ping).done();
}

#[test]
fn clients_of_a_grant_share_its_memory() {
    let blade = granting(8);
    blade.serving.blade().set_grant(&spec(1, 3)).unwrap();
    let mut one = client_under(&blade, blade.unix(), 1, 1);
    let mut two = client_under(&blade, blade.tcp(), 2, 1);
    let (segment, _) = one.segment(2);
    let (other, token) = two.create(4);
    let answer = two.allocate(other, 0, 2);
    let Response::Error { code, detail } = answer.response() else { panic!("{answer:?}") };
    assert_eq!((code, detail), (ErrorCode::QuotaExceeded, 3 * SUPERPAGE_BYTES));
    assert_eq!(two.allocate(other, 0, 1).refused(), None);
    assert_eq!(one.free(segment, 0, 1).refused(), None);
    assert_eq!(two.allocate(other, 1, 1).refused(), None, "what one gives back the other may take");
    let stat = grant(&blade);
    assert_eq!((stat.used_bytes, stat.clients), (3 * SUPERPAGE_BYTES, 2));
    assert_eq!(stat.connections, 2);
    // Frozen segments may be shared under the grant, but not beyond it.
    two.ask(&Request::Freeze { segment: other }).done();
    assert_eq!(one.ask(&Request::Attach { token }).refused(), None);
    let elsewhere = GrantSpec { id: GrantId(78), key: OTHER_KEY, ..spec(1, 2) };
    blade.serving.blade().set_grant(&elsewhere).unwrap();
    let (mut three, _) = Peer::hello_with(blade.unix(), &hello_under(3, OTHER_KEY, 1));
    let refused = three.ask(&Request::Attach { token }).refused();
    assert_eq!(refused, Some(ErrorCode::UnknownSegment));
    let shared = one.ask(&Request::ShmMap { segment }).refused();
    assert_eq!(shared, Some(ErrorCode::Unsupported), "a descriptor could not be taken back");
}

/// Writes and reads the same pages for ever, each page marked. Returns the number of successful
/// round trips. Every page read is one that was written.
fn churn(mut peer: Peer, segment: SegmentId, seed: u64, running: &AtomicBool) -> u32 {
    let content = pages(seed, 256);
    let extents = [Extent::new(PageNumber(0), 256)];
    let mut rounds = 0;
    let mut round = || -> std::io::Result<()> {
        let mut frame = Vec::new();
        let write = Request::Write { segment, extents: &extents };
        write.encode(RequestId(1), PagesChecksum::of(&content), &mut frame).unwrap();
        frame.extend_from_slice(&content);
        std::io::Write::write_all(&mut peer.stream, &frame)?;
        let written = peer.receive()?;
        written.done();
        frame.clear();
        let read = Request::Read { segment, extents: &extents };
        read.encode(RequestId(2), 0, &mut frame).unwrap();
        std::io::Write::write_all(&mut peer.stream, &frame)?;
        let answer = peer.receive()?;
        assert_eq!(answer.refused(), None);
        assert!(answer.pages == content, "wrong bytes");
        Ok(())
    };
    while round().is_ok() {
        rounds += 1;
        running.store(true, Ordering::Release);
    }
    rounds
}

#[test]
fn a_grant_taken_back_under_load_ends_its_clients_and_frees_their_memory() {
    let blade = granting(8);
    for epoch in 1..6 {
        blade.serving.blade().set_grant(&spec(epoch, 4)).unwrap();
        let running = [const { AtomicBool::new(false) }; 3];
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (number, running) in running.iter().enumerate() {
                let address = if number == 0 { blade.unix() } else { blade.tcp() };
                let mut peer = client_under(&blade, address, number as u128, epoch);
                let (segment, _) = peer.segment(1);
                let seed = number as u64 + epoch;
                threads.push(scope.spawn(move || churn(peer, segment, seed, running)));
            }
            wait_until("all are at it", || running.iter().all(|it| it.load(Ordering::Acquire)));
            let revoked = blade.serving.blade().revoke_grant(ID, epoch).unwrap();
            assert_eq!((revoked.clients, revoked.connections), (3, 3));
            assert_eq!(revoked.freed_bytes, 3 * SUPERPAGE_BYTES);
            assert_eq!(used_bytes(&blade), 0, "zero and free when the order returns");
            threads.into_iter().for_each(|thread| assert!(thread.join().unwrap() > 0));
        });
        assert_eq!(refused_with(&blade, &hello_under(0, KEY, epoch)), (ErrorCode::NotGranted, 0));
        let again = blade.serving.blade().set_grant(&spec(epoch, 4));
        assert_eq!(
            again,
            Err(GrantError::Stale { epoch }),
            "it does not come back by a late order"
        );
    }
    assert_eq!(blade.serving.blade().grants_revoked(), 5);
    wait_until("connections are closed", || blade.serving.stat().totals.connections.get() == 0);
    // The next client gets zeros.
    blade.serving.blade().set_grant(&spec(9, 8)).unwrap();
    let mut next = client_under(&blade, blade.unix(), 9, 9);
    let (segment, _) = next.segment(8);
    for page in (0..8 * PAGES_PER_SUPERPAGE).step_by(256) {
        assert!(next.read(segment, page, 256).pages.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn capacity_changes_while_the_blade_runs() {
    let blade = granting(8);
    blade.serving.blade().set_grant(&spec(1, 8)).unwrap();
    let mut client = client_under(&blade, blade.unix(), 1, 1);
    let (segment, _) = client.create(8);
    assert_eq!(client.allocate(segment, 0, 4).refused(), None);
    assert_eq!(blade.serving.blade().free_bytes(), 4 * SUPERPAGE_BYTES);
    blade.serving.blade().set_capacity(2 * SUPERPAGE_BYTES).unwrap();
    assert_eq!(blade.serving.blade().free_bytes(), 0);
    assert_eq!(client.allocate(segment, 4, 1).refused(), Some(ErrorCode::BladeFull));
    let content = pages(1, 4);
    client.write(segment, 0, &content).done();
    assert_eq!(client.read(segment, 0, 4).pages, content, "who has memory keeps it");
    let mut other = client_under(&blade, blade.unix(), 2, 1);
    blade.serving.blade().set_capacity(5 * SUPERPAGE_BYTES).unwrap();
    assert_eq!(client.stat().0.capacity_bytes.get(), 5 * SUPERPAGE_BYTES);
    assert_eq!(client.allocate(segment, 4, 2).refused(), Some(ErrorCode::BladeFull));
    assert_eq!(client.allocate(segment, 4, 1).refused(), None);
    client.ask(&Request::Goodbye).done();
    let (segment, _) = other.create(5);
    wait_until("memory is zero", || blade.serving.blade().free_bytes() == 5 * SUPERPAGE_BYTES);
    let all = other.allocate(segment, 0, 5);
    assert_eq!(all.refused(), None, "its quota is not what there was when it came");
    let beyond = blade.serving.blade().set_capacity(9 * SUPERPAGE_BYTES).unwrap_err();
    assert_eq!(beyond.limit_bytes, 8 * SUPERPAGE_BYTES);
    assert_eq!(blade.serving.blade().capacity_bytes(), 5 * SUPERPAGE_BYTES, "nothing changed");
}

const RATE: u64 = 16 << 20;
const BURST: u64 = 1 << 20;

/// Moves pages for a while over two connections of two clients. Returns bytes and time.
fn move_pages(blade: &TestBlade, is_write: bool) -> (u64, Duration) {
    let start = Instant::now();
    let bytes = std::thread::scope(|scope| {
        let mover = |who: u128| {
            let mut peer = client_under(blade, blade.tcp(), who, 1);
            let (segment, _) = peer.segment(1);
            let content = pages(5, 64);
            (0..32).for_each(|_| match is_write {
                true => peer.write(segment, 0, &content).done(),
                false => assert_eq!(peer.read(segment, 0, 64).pages.len(), content.len()),
            });
            32 * content.len() as u64
        };
        let two = scope.spawn(move || mover(2));
        mover(1) + two.join().unwrap()
    });
    (bytes, start.elapsed())
}

#[test]
fn no_more_passes_than_rate_and_burst_and_others_do_not_wait() {
    for is_write in [false, true] {
        let blade = TestBlade::start(BladeConfig { threads: 1, ..config_of(8) });
        let rate = |limits: bool| if limits { RATE } else { u64::MAX };
        let limited = GrantSpec {
            read_bytes_per_s: rate(!is_write),
            write_bytes_per_s: rate(is_write),
            ..spec(1, 4)
        };
        blade.serving.blade().set_grant(&limited).unwrap();
        let mut other = blade.client(9);
        let done = AtomicBool::new(false);
        let (bytes, time) = std::thread::scope(|scope| {
            // On the same worker, under no grant: it gets answers while others are held back.
            let bystander = scope.spawn(|| {
                let mut answers = 0;
                while !done.load(Ordering::Acquire) {
                    other.ask(&Request::Ping).done();
                    answers += 1;
                }
                answers
            });
            let moved = move_pages(&blade, is_write);
            done.store(true, Ordering::Release);
            assert!(bystander.join().unwrap() > 100, "it had to wait for another's rate");
            moved
        });
        let most = BURST as f64 + RATE as f64 * time.as_secs_f64();
        assert!(bytes as f64 <= most, "{bytes} bytes in {time:?}");
        let stat = grant(&blade);
        let throttled = (stat.read_throttled_ns > 0, stat.write_throttled_ns > 0);
        assert_eq!(throttled, (!is_write, is_write));
        let moved_pages = stat.pages_read + stat.pages_written;
        assert_eq!(moved_pages * PAGE_BYTES as u64, bytes);
    }
}

#[test]
fn a_stopped_grant_goes_on_when_its_rate_is_raised_and_ends_when_taken_back() {
    let blade = TestBlade::of_superpages(4);
    let stopped = GrantSpec { read_bytes_per_s: 0, ..spec(1, 4) };
    blade.serving.blade().set_grant(&stopped).unwrap();
    let mut client = client_under(&blade, blade.unix(), 1, 1);
    let (segment, _) = client.segment(1);
    let content = pages(8, 4);
    client.write(segment, 0, &content).done();
    let extents = [Extent::new(PageNumber(0), 4)];
    let read = Request::Read { segment, extents: &extents };
    client.send(&read, &[]);
    wait_until("it is held back", || grant(&blade).read_throttled_ns > 0);
    blade.serving.blade().set_grant(&spec(1, 4)).unwrap();
    assert_eq!(client.receive().unwrap().pages, content);

    blade.serving.blade().set_grant(&stopped).unwrap();
    let before = grant(&blade).read_throttled_ns;
    client.send(&read, &[]);
    wait_until("it is held back again", || grant(&blade).read_throttled_ns > before);
    blade.serving.blade().revoke_grant(ID, 1).unwrap();
    assert!(client.is_closed());
    wait_until("the blade let go", || blade.serving.stat().totals.connections.get() == 0);
}
