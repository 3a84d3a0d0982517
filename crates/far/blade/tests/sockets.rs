//! The blade on real sockets: what a client sees.

mod common;

use common::*;
use farpool_blade::{BladeConfig, ServeError, Server};
use farpool_units::{PAGE_BYTES, SUPERPAGE_BYTES};
use farpool_wire::*;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

#[test]
fn pages_come_back_as_written_over_every_transport() {
    let blade = TestBlade::of_superpages(4);
    for (id, address) in [(1, blade.unix()), (2, blade.tcp())] {
        let mut client = Peer::hello(address, id);
        let (segment, _) = client.segment(2);
        for (page, count) in [(0, 1), (1, 3), (4090, 12), (8191, 1), (500, 256)] {
            let data = pages(u64::from(page), count);
            client.write(segment, page, &data).done();
            let back = client.read(segment, page, u32::try_from(count).unwrap());
            assert!(back.pages == data, "{count} pages at {page} over {address}");
        }
    }
}

#[test]
fn scattered_pages_come_in_the_order_asked() {
    let blade = TestBlade::of_superpages(2);
    let mut client = blade.client(1);
    let (segment, _) = client.segment(2);
    let extents = [9, 8, 5000, 1, 2, 3].map(|page| Extent::page(PageNumber(page)));
    let data = pages(7, extents.len());
    client.ask_with(&Request::Write { segment, extents: &extents }, &data).done();
    assert!(client.ask(&Request::Read { segment, extents: &extents }).pages == data);
    let page_8 = client.read(segment, 8, 1);
    assert!(page_8.pages == data[PAGE_BYTES..2 * PAGE_BYTES]);
}

#[test]
fn many_requests_in_flight_are_all_answered_in_order() {
    let blade = TestBlade::of_superpages(1);
    for address in [blade.unix(), blade.tcp()] {
        let mut client = Peer::hello(address, 9);
        let (segment, _) = client.segment(1);
        let data = pages(1, 64);
        client.write(segment, 0, &data).done();
        let extents = [Extent::new(PageNumber(0), 64)];
        let mut sender = client.sender();
        let (first, count) = (client.next_id, 300);
        let to_write = data.clone();
        let sending = std::thread::spawn(move || {
            for i in 0..count {
                if i % 3 == 0 {
                    sender.send(&Request::Write { segment, extents: &extents }, &to_write);
                } else {
                    sender.send(&Request::Read { segment, extents: &extents }, &[]);
                }
            }
        });
        for id in first..first + count {
            let answer = client.receive().unwrap();
            assert_eq!(answer.header.request_id, RequestId(id));
            assert!(answer.pages.is_empty() || answer.pages == data);
        }
        sending.join().unwrap();
        client.ask(&Request::Goodbye).done();
        wait_until("the memory is free", || blade.serving.stat().totals.used_bytes.get() == 0);
    }
}

#[test]
fn answers_wait_for_a_client_that_does_not_take_them_and_others_are_served() {
    let blade = TestBlade::of_superpages(2);
    let mut slow = blade.client(1);
    let (segment, _) = slow.segment(1);
    let data = pages(1, 256);
    slow.write(segment, 0, &data).done();
    let extents = [Extent::new(PageNumber(0), 256)];
    for _ in 0..100 {
        slow.send(&Request::Read { segment, extents: &extents }, &[]);
    }
    let mut quick = blade.client(2);
    let (other, _) = quick.segment(1);
    for _ in 0..20 {
        quick.write(other, 0, &data).done();
    }
    for _ in 0..100 {
        assert!(slow.receive().unwrap().pages == data);
    }
}

#[test]
fn clients_cannot_reach_each_others_segments() {
    let blade = TestBlade::of_superpages(4);
    let (mut alice, mut bob) = (blade.client(1), blade.client(2));
    let (segment, token) = alice.segment(1);
    let unknown = Some(ErrorCode::UnknownSegment);
    assert_eq!(bob.read(segment, 0, 1).refused(), unknown);
    assert_eq!(bob.write(segment, 0, &pages(1, 1)).refused(), unknown);
    assert_eq!(bob.allocate(segment, 0, 1).refused(), unknown);
    assert_eq!(bob.free(segment, 0, 1).refused(), unknown);
    for request in [
        Request::Freeze { segment },
        Request::Thaw { segment },
        Request::Detach { segment },
        Request::ShmMap { segment },
        Request::ListSuperpages { segment, skip: 0 },
        Request::Discard { segment, extents: &[Extent::page(PageNumber(0))] },
        Request::Attach { token: SegmentToken(token.0 ^ 1) },
    ] {
        assert_eq!(bob.ask(&request).refused(), unknown, "{request:?}");
    }
    assert_eq!(bob.ask(&Request::Attach { token }).refused(), Some(ErrorCode::NotFrozen));
    alice.write(segment, 0, &pages(1, 1)).done();
}

#[test]
fn a_frozen_segment_is_shared_until_its_last_user_leaves() {
    let blade = TestBlade::of_superpages(4);
    let (mut parent, mut child) = (blade.client(1), blade.client(2));
    let (segment, token) = parent.segment(2);
    let data = pages(3, 8);
    parent.write(segment, 4092, &data).done();
    parent.ask(&Request::Freeze { segment }).done();
    let attached = child.ask(&Request::Attach { token });
    let Response::Attached(seen) = attached.response() else { panic!("{attached:?}") };
    assert_eq!((seen.segment, seen.span_superpages, seen.allocated_superpages), (segment, 2, 2));
    assert_eq!((seen.state, seen.superpages.len()), (SegmentState::Frozen, 2));
    assert!(child.read(segment, 4092, 8).pages == data);
    for peer in [&mut parent, &mut child] {
        assert_eq!(peer.write(segment, 0, &data).refused(), Some(ErrorCode::Frozen));
        assert_eq!(peer.allocate(segment, 0, 1).refused(), Some(ErrorCode::Frozen));
        assert_eq!(peer.ask(&Request::Thaw { segment }).refused(), Some(ErrorCode::InUse));
    }
    parent.ask(&Request::Detach { segment }).done();
    assert_eq!(parent.read(segment, 0, 1).refused(), Some(ErrorCode::UnknownSegment));
    assert!(child.read(segment, 4092, 8).pages == data);
    child.ask(&Request::Thaw { segment }).done();
    child.write(segment, 0, &data).done();
    assert_eq!(blade.serving.stat().totals.used_bytes.get(), 2 * SUPERPAGE_BYTES);
    child.ask(&Request::Detach { segment }).done();
    wait_until("the memory is free", || blade.serving.stat().totals.used_bytes.get() == 0);
}

#[test]
fn quota_and_capacity_are_kept_and_named() {
    let blade = TestBlade::of_superpages(4);
    let wanting = Hello { quota_wanted_bytes: SUPERPAGE_BYTES + 1, ..hello(1) };
    let (mut small, ok) = Peer::hello_with(blade.unix(), &wanting);
    let Response::HelloOk(ok) = ok.response() else { panic!("{ok:?}") };
    assert_eq!(ok.quota_bytes, 2 * SUPERPAGE_BYTES);
    assert_eq!(ok.capacity_bytes, 4 * SUPERPAGE_BYTES);
    let (segment, _) = small.segment(2);
    let (another, _) = small.create(10);
    let refused = small.allocate(another, 0, 1);
    let quota = Response::Error { code: ErrorCode::QuotaExceeded, detail: ok.quota_bytes };
    assert_eq!(refused.response(), quota);
    let mut large = blade.client(2);
    let (theirs, _) = large.create(10);
    assert_eq!(large.allocate(theirs, 0, 3).refused(), Some(ErrorCode::BladeFull));
    assert_eq!(large.allocate(theirs, 8, 2).refused(), None);
    small.free(segment, 0, 1).done();
    assert_eq!(large.allocate(theirs, 0, 1).refused(), None);
    assert_eq!(large.allocate(theirs, 9, 1).refused(), Some(ErrorCode::AlreadyAllocated));
    assert_eq!(large.allocate(theirs, 9, 2).refused(), Some(ErrorCode::OutOfRange));
    assert_eq!(large.free(theirs, 1, 1).refused(), Some(ErrorCode::NotAllocated));
    assert_eq!(large.read(theirs, 4096, 1).refused(), Some(ErrorCode::NotAllocated));
    assert_eq!(large.write(theirs, 4095, &pages(1, 2)).refused(), Some(ErrorCode::NotAllocated));
    assert_eq!(large.read(theirs, 0, 1).pages, vec![0; PAGE_BYTES]);
    assert_eq!(large.read(theirs, 0, 257).refused(), Some(ErrorCode::TooLarge));
}

#[test]
fn a_client_lives_as_long_as_a_connection_and_its_lease() {
    // Longer than a busy machine takes to connect anew.
    let config = BladeConfig { lease: Duration::from_secs(5), ..config_of(2) };
    let blade = TestBlade::start(config);
    let mut first = blade.client(1);
    let keeper = Hello { purpose: Purpose::Keeper, ..hello(1) };
    let (mut keeper, _) = Peer::hello_with(blade.unix(), &keeper);
    assert_eq!(
        keeper.ask(&Request::CreateSegment { span_superpages: 1 }).refused(),
        Some(ErrorCode::NotPermitted)
    );
    let (segment, _) = first.segment(1);
    first.write(segment, 0, &pages(5, 1)).done();
    drop(first);
    wait_until("the connection is seen closed", || {
        blade.serving.stat().clients[0].connections.get() == 1
    });
    drop(keeper);
    let mut again = Peer::hello_with(blade.unix(), &Hello { generation: 1, ..hello(1) }).0;
    assert!(again.read(segment, 0, 1).pages == pages(5, 1));
    drop(again);
    wait_until("the lease has run out", || {
        let stat = blade.serving.stat();
        stat.clients.is_empty() && stat.totals.used_bytes.get() == 0
    });
    assert_eq!(blade.serving.stat().totals.leases_expired.get(), 1);
    assert_eq!(blade.client(1).read(segment, 0, 1).refused(), Some(ErrorCode::UnknownSegment));
}

#[test]
fn goodbye_frees_at_once_and_cuts_off_the_clients_other_connections() {
    let config = BladeConfig { lease: Duration::from_secs(3600), ..config_of(2) };
    let blade = TestBlade::start(config);
    let mut first = blade.client(1);
    let (mut second, _) = Peer::hello_with(blade.unix(), &Hello { slot: 1, ..hello(1) });
    let (segment, _) = first.segment(2);
    first.ask(&Request::Goodbye).done();
    assert!(first.is_closed());
    wait_until("the memory is free", || blade.serving.stat().totals.used_bytes.get() == 0);
    assert_eq!(second.read(segment, 0, 1).refused(), Some(ErrorCode::UnknownSegment));
}

#[test]
fn a_newer_connection_of_a_slot_silences_the_older() {
    let blade = TestBlade::of_superpages(1);
    for address in [blade.unix(), blade.tcp()] {
        let mut old = Peer::hello(address, 1);
        let (segment, _) = old.segment(1);
        // Half a write: its page must not change any more once the new connection is greeted.
        let mut frame = Vec::new();
        let extents = [Extent::page(PageNumber(0))];
        let request = Request::Write { segment, extents: &extents };
        request.encode(RequestId(77), PagesChecksum::of(&pages(1, 1)), &mut frame).unwrap();
        old.stream.write_all(&frame).unwrap();
        old.stream.write_all(&pages(1, 1)[..100]).unwrap();
        let (mut new, answer) = Peer::hello_with(address, &Hello { generation: 1, ..hello(1) });
        assert!(matches!(answer.response(), Response::HelloOk(_)));
        new.write(segment, 0, &pages(2, 1)).done();
        let _refused_or_lost = old.stream.write_all(&pages(1, 1)[100..]);
        assert!(old.is_closed());
        assert!(new.read(segment, 0, 1).pages == pages(2, 1));
        new.ask(&Request::Freeze { segment }).done(); // no write is under way any more
        let (mut late, answer) = Peer::hello_with(address, &hello(1));
        assert_eq!(answer.refused(), Some(ErrorCode::Stale));
        assert!(late.is_closed());
        new.ask(&Request::Goodbye).done();
        wait_until("the memory is free", || blade.serving.stat().totals.used_bytes.get() == 0);
    }
}

#[test]
fn freezing_and_freeing_wait_for_writes_under_way() {
    let blade = TestBlade::of_superpages(1);
    let mut writing = blade.client(1);
    let (mut control, _) = Peer::hello_with(blade.unix(), &Hello { slot: 1, ..hello(1) });
    let (segment, _) = control.segment(1);
    let mut frame = Vec::new();
    let extents = [Extent::page(PageNumber(3))];
    let data = pages(1, 1);
    let request = Request::Write { segment, extents: &extents };
    request.encode(RequestId(5), PagesChecksum::of(&data), &mut frame).unwrap();
    let before = blade.serving.stat().totals.requests.get();
    writing.stream.write_all(&frame).unwrap();
    wait_until("the write has begun", || blade.serving.stat().totals.requests.get() > before);
    let in_use = Some(ErrorCode::InUse);
    assert_eq!(control.ask(&Request::Freeze { segment }).refused(), in_use);
    assert_eq!(control.free(segment, 0, 1).refused(), in_use);
    writing.stream.write_all(&data).unwrap();
    writing.receive().unwrap().done();
    control.ask(&Request::Freeze { segment }).done();
    assert!(control.read(segment, 3, 1).pages == data);
}

#[test]
fn garbage_closes_its_connection_and_no_other() {
    let blade = TestBlade::of_superpages(1);
    let mut good = blade.client(1);
    let (segment, _) = good.segment(1);
    let garbage: &[&[u8]] = &[
        b"GET / HTTP/1.1\r\nHost: blade\r\n\r\n",
        &[0xff; 64],
        &[0; HEADER_BYTES],
        b"FPLW\x01\x63\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    ];
    for (count, bytes) in (1..).zip(garbage) {
        let address = if count % 2 == 0 { blade.unix() } else { blade.tcp() };
        let mut bad = Peer::connect(address);
        bad.stream.write_all(bytes).unwrap();
        assert!(bad.is_closed());
        wait_until("it is counted", || blade.serving.stat().totals.bad_frames.get() == count);
        good.write(segment, 0, &pages(count, 1)).done();
    }
}

#[test]
fn damaged_pages_and_heads_are_never_acknowledged() {
    let blade = TestBlade::of_superpages(1);
    let mut frame = Vec::new();
    let data = pages(1, 2);
    for damaged_byte in [8, 33, 41, 100, 5000] {
        let mut client = Peer::hello(blade.tcp(), 1);
        let (segment, _) = client.segment(1);
        let extents = [Extent::new(PageNumber(0), 2)];
        let request = Request::Write { segment, extents: &extents };
        frame.clear();
        request.encode(RequestId(1), PagesChecksum::of(&data), &mut frame).unwrap();
        frame.extend_from_slice(&data);
        frame[damaged_byte] ^= 4;
        client.stream.write_all(&frame).unwrap();
        let answer = client.receive().unwrap();
        assert_eq!(answer.refused(), Some(ErrorCode::BadFrame));
        assert!(client.is_closed());
        let (mut next, _) = Peer::hello_with(blade.tcp(), &Hello { generation: 1, ..hello(1) });
        next.ask(&Request::Goodbye).done();
        wait_until("the memory is free", || blade.serving.stat().totals.used_bytes.get() == 0);
    }
}

#[test]
fn another_version_is_told_ours() {
    let blade = TestBlade::of_superpages(1);
    let mut peer = Peer::connect(blade.unix());
    let mut frame = Vec::new();
    Request::Hello(hello(1)).encode(RequestId(1), 0, &mut frame).unwrap();
    frame[4] = PROTOCOL_VERSION + 1;
    peer.stream.write_all(&frame).unwrap();
    let answer = peer.receive().unwrap();
    let (code, detail) = (ErrorCode::VersionMismatch, u64::from(PROTOCOL_VERSION));
    assert_eq!(answer.response(), Response::Error { code, detail });
    assert!(peer.is_closed());
}

#[test]
fn nothing_is_done_before_hello_and_hello_comes_once() {
    let blade = TestBlade::of_superpages(1);
    let mut peer = Peer::connect(blade.unix());
    let expected = Some(ErrorCode::HelloExpected);
    assert_eq!(peer.ask(&Request::Ping).refused(), expected);
    assert_eq!(peer.ask(&Request::CreateSegment { span_superpages: 1 }).refused(), expected);
    assert_eq!(peer.write(SegmentId(1), 0, &pages(1, 3)).refused(), expected);
    assert_eq!(peer.ask(&Request::Hello(hello(1))).refused(), None);
    assert_eq!(peer.ask(&Request::Hello(hello(1))).refused(), expected);
    peer.ask(&Request::Ping).done();
}

#[test]
fn stat_shows_clients_and_a_monitor_is_none() {
    let blade = TestBlade::of_superpages(4);
    let mut client = blade.client(1);
    let (segment, _) = client.segment(3);
    client.write(segment, 0, &pages(1, 5)).done();
    client.read(segment, 0, 2);
    let monitor = Hello { purpose: Purpose::Monitor, ..hello(99) };
    let (mut monitor, _) = Peer::hello_with(blade.tcp(), &monitor);
    let (totals, clients) = monitor.stat();
    assert_eq!(clients.len(), 1);
    let usage = clients[0];
    assert_eq!((usage.name(), usage.pid.get(), usage.connections.get()), ("test", 4711, 1));
    assert_eq!((usage.pages_read.get(), usage.pages_written.get()), (2, 5));
    assert_eq!(usage.used_bytes.get(), 3 * SUPERPAGE_BYTES);
    assert_eq!((totals.clients.get(), totals.connections.get(), totals.segments.get()), (1, 2, 1));
    assert_eq!((totals.pages_read.get(), totals.pages_written.get()), (2, 5));
    assert_eq!(
        monitor.ask(&Request::CreateSegment { span_superpages: 1 }).refused(),
        Some(ErrorCode::NotPermitted)
    );
}

#[test]
fn long_lists_of_superpages_come_in_parts() {
    // Sparse memory: 5000 superpages are 80 GiB of address space and no memory.
    let blade = TestBlade::of_superpages(6000);
    let mut client = blade.client(1);
    let (segment, _) = client.create(5000);
    for (first, count) in [(0, 4000), (4000, 1000)] {
        assert_eq!(client.allocate(segment, first, count).refused(), None);
    }
    let mut seen = Vec::new();
    loop {
        let skip = u32::try_from(seen.len()).unwrap();
        let answer = client.ask(&Request::ListSuperpages { segment, skip });
        let Response::Attached(list) = answer.response() else { panic!("{answer:?}") };
        assert_eq!(list.allocated_superpages, 5000);
        if list.superpages.is_empty() {
            break;
        }
        seen.extend(list.superpages.iter().map(|pair| pair.sma().0));
    }
    assert!(seen.iter().copied().eq(0..5000));
}

#[test]
fn remote_tcp_needs_leave_and_addresses_in_use_are_named() {
    let bind = |address: &str, config| Server::bind(&[address.parse().unwrap()], config);
    let refused = bind("tcp://0.0.0.0:0", config_of(1));
    assert!(matches!(refused, Err(ServeError::RemoteTcp { .. })));
    let allowed = BladeConfig { allow_remote_tcp: true, ..config_of(1) };
    assert!(bind("tcp://0.0.0.0:0", allowed).is_ok());
    let blade = TestBlade::of_superpages(1);
    for address in [blade.unix(), blade.tcp()] {
        let taken = Server::bind(std::slice::from_ref(address), config_of(1));
        assert!(matches!(taken, Err(ServeError::InUse { .. })), "{taken:?}");
    }
    let file = blade.directory.path().join("file");
    std::fs::write(&file, "not a socket").unwrap();
    let taken = Server::bind(&[Address::Unix(file.clone())], config_of(1));
    assert!(matches!(taken, Err(ServeError::InUse { .. })));
    assert_eq!(std::fs::read(&file).unwrap(), b"not a socket");
}

#[test]
fn a_stale_socket_file_is_replaced_and_ours_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blade.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let address = Address::Shm(path.clone());
    let both = [address.clone(), Address::Unix(path.clone())];
    let serving = Server::bind(&both, config_of(1)).unwrap().serve().unwrap();
    assert_eq!(serving.addresses(), std::slice::from_ref(&address));
    Peer::hello(&address, 1);
    serving.shutdown();
    assert!(!path.exists());
}

#[test]
fn shutdown_from_elsewhere_ends_waiting_and_connections() {
    let blade = TestBlade::of_superpages(1);
    let mut client = blade.client(1);
    let handle = blade.serving.shutdown_handle();
    let waiting = std::thread::spawn(move || blade.serving.wait());
    handle.shutdown();
    waiting.join().unwrap();
    assert!(client.is_closed());
}

#[test]
fn shared_memory_is_the_segment_itself() {
    let blade = TestBlade::of_superpages(4);
    let mut client = blade.client(1);
    let (segment, token) = client.segment(2);
    let (memory, bytes, writable) = map(&mut client, segment);
    assert_eq!((bytes, writable), (2 * SUPERPAGE_BYTES, true));
    let data = pages(1, 1);
    rustix::io::pwrite(&memory, &data, SUPERPAGE_BYTES).unwrap();
    assert!(client.read(segment, 4096, 1).pages == data);
    client.write(segment, 1, &data).done();
    let mut back = vec![0; PAGE_BYTES];
    rustix::io::pread(&memory, &mut back, PAGE_BYTES as u64).unwrap();
    assert!(back == data);
    // It cannot be made longer than the quota, nor shorter under the blade.
    assert!(rustix::fs::ftruncate(&memory, bytes + 1).is_err());
    assert!(rustix::fs::ftruncate(&memory, 0).is_err());
    assert!(rustix::io::pwrite(&memory, &data, bytes).is_err());
    // Clients that attach can only read.
    client.ask(&Request::Freeze { segment }).done();
    let mut other = blade.client(2);
    assert!(matches!(other.ask(&Request::Attach { token }).response(), Response::Attached(_)));
    let (shared, _, writable) = map(&mut other, segment);
    assert!(!writable);
    assert!(rustix::io::pwrite(&shared, &data, 0).is_err());
    rustix::io::pread(&shared, &mut back, SUPERPAGE_BYTES).unwrap();
    assert!(back == data);
    // What its client frees is gone from every descriptor; what is detached, only when it is no
    // longer held.
    client.ask(&Request::Detach { segment }).done();
    other.ask(&Request::Detach { segment }).done();
    wait_until_held(&blade, 2);
    rustix::io::pread(&memory, &mut back, SUPERPAGE_BYTES).unwrap();
    assert!(back == data);
    drop((memory, shared));
    wait_until_free(&blade);
}

fn map(client: &mut Peer, segment: SegmentId) -> (OwnedFd, u64, bool) {
    client.send(&Request::ShmMap { segment }, &[]);
    let Stream::Unix(stream) = &client.stream else {
        panic!("descriptors travel over unix sockets only")
    };
    shm::receive_mapped(stream)
}

fn wait_until_held(blade: &TestBlade, superpages: u32) {
    wait_until("the memory is known to be held", || {
        blade.serving.stat().totals.superpages_held.get() == superpages
    });
    let used = blade.serving.stat().totals.used_bytes.get();
    assert_eq!(used, u64::from(superpages) * SUPERPAGE_BYTES);
}

fn wait_until_free(blade: &TestBlade) {
    wait_until("the memory is free", || blade.serving.stat().totals.used_bytes.get() == 0);
    assert_eq!(blade.serving.stat().totals.superpages_held.get(), 0);
}

#[test]
fn a_client_that_outlives_its_lease_never_reads_zeros() {
    let blade = TestBlade::of_superpages(3);
    let mut client = blade.client(1);
    let (segment, _) = client.segment(2);
    let (memory, ..) = map(&mut client, segment);
    let data = pages(1, 1);
    rustix::io::pwrite(&memory, &data, SUPERPAGE_BYTES).unwrap();
    drop(client); // its connection breaks, and it does not reconnect
    wait_until("the lease has run out", || blade.serving.stat().totals.leases_expired.get() == 1);
    wait_until_held(&blade, 2);
    // Another client gets what is left and nothing of what is held.
    let mut other = blade.client(2);
    let (theirs, _) = other.segment(1);
    let full = other.ask(&Request::CreateSegment { span_superpages: 1 });
    let Response::SegmentCreated { segment: more, .. } = full.response() else {
        panic!("{full:?}")
    };
    assert_eq!(other.allocate(more, 0, 1).refused(), Some(ErrorCode::BladeFull));
    other.write(theirs, 0, &pages(2, 1)).done();
    let mut back = vec![0; PAGE_BYTES];
    rustix::io::pread(&memory, &mut back, SUPERPAGE_BYTES).unwrap();
    assert!(back == data);
    // A copy of the descriptor, as in a forked child, holds it just as well.
    let copy = memory.try_clone().unwrap();
    drop(memory);
    assert_eq!(other.allocate(more, 0, 1).refused(), Some(ErrorCode::BladeFull));
    rustix::io::pread(&copy, &mut back, SUPERPAGE_BYTES).unwrap();
    assert!(back == data);
    drop(copy);
    let answer = other.allocate(more, 0, 1);
    assert!(
        matches!(answer.response(), Response::Allocated { .. }),
        "asked at once, the blade finds that nobody holds it: {answer:?}"
    );
    let fresh = other.read(more, 0, 8).pages;
    assert!(fresh.iter().all(|byte| *byte == 0));
}

#[test]
fn a_shared_base_stays_frozen_while_somebody_forgotten_reads_it() {
    let blade = TestBlade::of_superpages(2);
    let mut parent = blade.client(1);
    let (segment, token) = parent.segment(1);
    let (own, ..) = map(&mut parent, segment);
    let data = pages(1, 1);
    parent.write(segment, 0, &data).done();
    parent.ask(&Request::Freeze { segment }).done();
    let mut child = blade.client(2);
    let attached = child.ask(&Request::Attach { token });
    assert!(matches!(attached.response(), Response::Attached(_)));
    let (base, ..) = map(&mut child, segment);
    drop(child);
    wait_until("the child's lease has run out", || {
        blade.serving.stat().totals.leases_expired.get() == 1
    });
    assert_eq!(parent.ask(&Request::Thaw { segment }).refused(), Some(ErrorCode::InUse));
    let mut back = vec![0; PAGE_BYTES];
    rustix::io::pread(&base, &mut back, 0).unwrap();
    assert!(back == data);
    drop(base);
    parent.ask(&Request::Thaw { segment }).done();
    // Its own descriptor is no obstacle, then or now, and superpages it frees are empty there.
    parent.free(segment, 0, 1).done();
    wait_until_free(&blade);
    rustix::io::pread(&own, &mut back, 0).unwrap();
    assert!(back.iter().all(|byte| *byte == 0));
    assert_eq!(rustix::fs::fstat(own.as_fd()).unwrap().st_blocks, 0);
}

#[test]
fn shared_memory_is_not_for_tcp() {
    let blade = TestBlade::of_superpages(1);
    let mut client = Peer::hello(blade.tcp(), 1);
    let (segment, _) = client.segment(1);
    assert_eq!(client.ask(&Request::ShmMap { segment }).refused(), Some(ErrorCode::Unsupported));
}

mod shm {
    use farpool_kernel::receive_with_descriptor;
    use farpool_wire::*;
    use rustix::net::RecvFlags;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    pub(crate) fn receive_mapped(stream: &UnixStream) -> (OwnedFd, u64, bool) {
        let mut bytes = [0; 256];
        let (count, descriptor) =
            receive_with_descriptor(stream, &mut bytes, RecvFlags::empty()).unwrap();
        let descriptor = descriptor.unwrap();
        let head = split_head(&bytes[..count]).unwrap().unwrap();
        match Response::decode(&head).unwrap() {
            Response::ShmMapped { bytes, writable } => (descriptor, bytes, writable),
            other => panic!("{other:?}"),
        }
    }
}
