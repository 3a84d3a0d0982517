//! Links over TLS that are replaced, and a network that changes what they carry.
//!
//! `FARPOOL_ROTATIONS=1000 cargo test -p farpool-blade --test tls_links` replaces certificates as
//! often as that.

mod site;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farpool_fabric::{Address, Link, OpenFailure, Opener, answer_secured};
use farpool_handshake::Dialer;
use farpool_wire::{Purpose, Request};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use site::{Client, PATIENCE, Rack, session};

/// A dialer whose connections are to be made anew after other times.
#[derive(Debug)]
struct Hasty {
    dialer: Arc<Dialer>,
    renew_within: Duration,
    valid_for: Duration,
}

impl Opener for Hasty {
    fn ask(&self, address: &Address) -> Result<Option<OwnedFd>, Errno> {
        let Address::Tcp(at) = address else { return Ok(None) };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let opened = self.dialer.open(*at).map(|(socket, mut keys)| {
            (keys.renew_within, keys.valid_for) = (self.renew_within, self.valid_for);
            (socket, keys)
        });
        answer_secured(&there, opened);
        Ok(Some(here))
    }
}

#[test]
fn connections_are_replaced_in_time_and_no_page_is_wrong() {
    let mut rack = Rack::new();
    let (blade, program) = (rack.blade("node/n"), rack.credentials("program/p"));
    let long = Duration::from_secs(1000);
    for (renew_within, valid_for) in [(Duration::ZERO, long), (long, Duration::from_secs(1))] {
        let mut own = session(&blade.addresses()[0], 1, Purpose::Client, Some(&program));
        let dialer = Dialer::new(Arc::clone(&program), |_| ()).expect("a dialer");
        own.asks = Some(Arc::new(Hasty { dialer, renew_within, valid_for }));
        let mut client = Client::new(own);
        let mut round = 0;
        while client.link.reconnects() < 3 {
            round += 1;
            client.round(round, 20);
            client.control.call(&Request::Ping).expect("the control connection, too");
        }
        client.control.call(&Request::Goodbye).expect("the end");
    }
}

#[test]
fn a_client_leaves_a_blade_that_was_revoked() {
    let mut rack = Rack::new();
    let (blade, program) = (rack.blade("node/n"), rack.credentials("program/p"));
    let mut own = session(&blade.addresses()[0], 1, Purpose::Client, Some(&program));
    own.deadline = Duration::from_secs(5);
    let mut client = Client::new(own);
    client.round(1, 3);
    rack.revoke("node/n");
    let revoked = Instant::now();
    let mut read = revoked;
    while client.read(1).iter().all(|done| done.result.is_ok()) {
        read = Instant::now();
        assert!(read < revoked + PATIENCE, "it reads on");
    }
    println!("the last page came {} ms after the revocation", (read - revoked).as_millis());
    let why = client.link.loss().unwrap_or_default();
    assert!(why.contains("was revoked"), "{why}");
    let why =
        client.control.call(&Request::Ping).map(drop).expect_err("as its requests").to_string();
    assert!(why.contains("was revoked"), "{why}");
}

#[test]
fn a_connection_that_is_closed_is_watched_no_more() {
    let mut rack = Rack::new();
    let (blade, program) = (rack.blade("node/n"), rack.credentials("program/p"));
    let mut own = session(&blade.addresses()[0], 1, Purpose::Client, Some(&program));
    let dialer = Dialer::new(program, |_| ()).expect("a dialer");
    own.asks = Some(Arc::clone(&dialer) as _);
    let mut client = Client::new(own);
    client.round(1, 3);
    assert_eq!(dialer.watched(), 2, "the control connection and the link");
    drop(client);
    farpool_testkit::wait_until("both to be forgotten", PATIENCE, || dialer.watched() == 0);
}

/// How often certificates are replaced under load.
fn rotations() -> u128 {
    let asked = std::env::var("FARPOOL_ROTATIONS").ok();
    asked.map_or(20, |times| times.parse().expect("FARPOOL_ROTATIONS is a number"))
}

#[test]
fn certificates_are_replaced_under_load_and_no_page_fails() {
    let mut rack = Rack::new();
    let (blade, program) = (rack.blade("node/n"), rack.credentials("program/p"));
    let address = blade.addresses()[0].clone();
    let mut own = session(&address, 1, Purpose::Client, Some(&program));
    let dialer = Dialer::new(Arc::clone(&program), |_| ()).expect("a dialer");
    let (renew_within, valid_for) = (Duration::ZERO, Duration::from_secs(1000));
    own.asks = Some(Arc::new(Hasty { dialer, renew_within, valid_for }));
    let mut client = Client::new(own);
    std::thread::scope(|scope| {
        let rotating = scope.spawn(|| {
            for number in 0..rotations() {
                rack.renew("node/n");
                rack.renew("program/p");
                let own = session(&address, 2 + number, Purpose::Client, Some(&program));
                let mut other = Client::new(own);
                other.round(7, 3);
                other.control.call(&Request::Goodbye).expect("the end");
            }
        });
        let mut rounds = 0;
        while !rotating.is_finished() {
            rounds += 1;
            client.round(rounds, 20);
        }
        rotating.join().expect("the other clients fail in nothing");
        let replaced = client.link.reconnects();
        println!("{rounds} rounds over {replaced} connections, {} rotations", rotations());
        assert!(rounds > 1 && replaced > 0, "{rounds} rounds over {replaced} connections");
    });
}

/// A way to a blade on which one bit in so many bytes, in both directions, is another one. The
/// bytes are counted over all connections, and the first are spared.
struct Tampering {
    address: Address,
    changed: Arc<AtomicU64>,
}

impl Tampering {
    fn start(to: SocketAddr, from_byte: u64, every_bytes: u64) -> Tampering {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = Address::Tcp(listener.local_addr().expect("an address"));
        let (seen, changed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let told = Arc::clone(&changed);
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(to) else { return };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let ends = (from.try_clone().expect("one"), to.try_clone().expect("one"));
                    let (seen, changed) = (Arc::clone(&seen), Arc::clone(&changed));
                    std::thread::spawn(move || {
                        pass(ends, |byte| {
                            let at = seen.fetch_add(1, Ordering::Relaxed);
                            if at >= from_byte && (at - from_byte).is_multiple_of(every_bytes) {
                                changed.fetch_add(1, Ordering::Relaxed);
                                *byte ^= 1 << (at % 8);
                            }
                        });
                    });
                }
            }
        });
        Tampering { address, changed: told }
    }
}

fn pass((mut from, mut to): (TcpStream, TcpStream), change: impl Fn(&mut u8)) {
    let mut bytes = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        bytes[..count].iter_mut().for_each(&change);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    for end in [&from, &to] {
        let _ = end.shutdown(Shutdown::Both);
    }
}

#[test]
fn whatever_is_changed_on_the_way_no_page_is_wrong() {
    let mut rack = Rack::new();
    let (blade, program) = (rack.blade("node/n"), rack.credentials("program/p"));
    let Address::Tcp(at) = blade.addresses()[0] else { panic!("TCP") };
    // Longer than a connection takes to be made, and no multiple of a record.
    let way = Tampering::start(at, 100_000, 200_003);
    let mut client = Client::new(session(&way.address, 1, Purpose::Client, Some(&program)));
    for round in 0..12 {
        client.round(round, 30);
    }
    let changed = way.changed.load(Ordering::Relaxed);
    println!("{changed} bits changed, {} connections made again", client.link.reconnects());
    assert!(changed > 5 && client.link.reconnects() > 2, "{changed}");
}

#[test]
fn nobody_is_asked_twice_for_what_cannot_be() {
    let mut rack = Rack::new();
    let program = rack.credentials("program/p");
    let dialer = Dialer::new(program, |_| ()).expect("a dialer");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("an address");
    drop(listener);
    let refused = dialer.open(at).map(drop).expect_err("nobody listens");
    assert_eq!(refused, OpenFailure::System(Errno::CONNREFUSED));
    let unix = Address::Unix("/nowhere".into());
    assert!(matches!(dialer.ask(&unix), Ok(None)), "only TCP is opened here");
}
