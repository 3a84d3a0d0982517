//! Blades with certificates: who is served, who is refused and why, and what ends a connection.

mod site;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farpool_blade::{BladeConfig, Serving};
use farpool_fabric::Link;
use farpool_testkit::wait_until;
use farpool_wire::{Address, Purpose, Request};
use site::{Client, PATIENCE, Rack, blade_with, from_now, load, meets, refused, session};

/// Seconds until certificates end that a test sees end: more than a busy machine takes to issue and
/// use them before.
const SOON_S: i64 = 10;

fn port_of(blade: &Serving) -> std::net::SocketAddr {
    match &blade.addresses()[0] {
        Address::Tcp(at) => *at,
        other => panic!("{other}"),
    }
}

#[test]
fn pages_of_a_program_with_a_certificate_arrive_as_they_were() {
    let mut rack = Rack::new();
    let (blade, program) = (rack.blade("node/n"), rack.credentials("program/payroll"));
    let address = &blade.addresses()[0];
    let mut client = Client::new(session(address, 1, Purpose::Client, Some(&program)));
    for (seed, count) in [(1, 1), (2, 3), (3, 8), (4, 256), (5, 600), (6, 2)] {
        client.round(seed, count);
    }
    assert_eq!(client.link.reconnects(), 0);
    assert_eq!(blade.stat().totals.bad_frames.get(), 0);
}

#[test]
fn only_what_its_role_allows_is_open_to_a_certificate() {
    let mut rack = Rack::new();
    let blade = rack.blade("node/n");
    for path in ["viewer/v", "operator/o", "controller/c", "node/other", "program/payroll"] {
        let credentials = rack.credentials(path);
        let mut monitor = meets(&blade, 0, Purpose::Monitor, Some(&credentials)).expect(path);
        monitor.call(&Request::Stat { skip_clients: 0 }).expect("figures");
        for purpose in [Purpose::Client, Purpose::Keeper] {
            let met = meets(&blade, 1, purpose, Some(&credentials));
            if path.starts_with("program") {
                met.expect("a program borrows");
            } else {
                let why = met.map(drop).expect_err("it borrows nothing").to_string();
                assert!(why.contains("may look at the blade and borrow nothing"), "{why}");
            }
        }
    }
}

#[test]
fn whose_certificate_is_not_good_is_refused_and_told_why() {
    let mut rack = Rack::new();
    let blade = rack.blade("node/n");
    let revoked = rack.credentials("program/revoked");
    rack.revoke("program/revoked");
    let stranger = Rack::new().credentials("program/payroll");
    let old = load(&rack.issue("program/old", -86_400 + SOON_S, "127.0.0.1"));
    wait_until("its end", PATIENCE, || from_now(0).as_secs() > old.certificate().not_after_s);
    wait_until("the blade has read the list", PATIENCE, || {
        let why = meets(&blade, 1, Purpose::Client, Some(&revoked)).map(drop);
        why.is_err_and(|why| why.to_string().contains("was revoked"))
    });
    let why = refused(&blade, Purpose::Monitor, Some(&old));
    assert!(why.contains("time is not now; renew it"), "{why}");
    // The client does not know the blade's authority either, and finds out first.
    let why = refused(&blade, Purpose::Client, Some(&stranger));
    assert!(why.contains("signed by none of the authorities trusted here"), "{why}");
    assert_eq!(blade.stat().totals.clients.get(), 0);
}

#[test]
fn a_client_of_another_identity_is_out_of_reach() {
    let mut rack = Rack::new();
    let blade = rack.blade("node/n");
    let (own, other) = (rack.credentials("program/a"), rack.credentials("program/b"));
    let _own = meets(&blade, 7, Purpose::Client, Some(&own)).expect("its own");
    for purpose in [Purpose::Client, Purpose::Keeper] {
        let why = meets(&blade, 7, purpose, Some(&other)).map(drop).expect_err("another's");
        assert!(why.to_string().contains("the client may not do that"), "{why}");
    }
    meets(&blade, 8, Purpose::Client, Some(&other)).expect("a client of its own");
}

#[test]
fn who_does_not_speak_tls_is_told_so_in_the_clear_and_nothing_else() {
    let mut rack = Rack::new();
    let blade = rack.blade("node/n");
    for purpose in [Purpose::Client, Purpose::Monitor] {
        let why = refused(&blade, purpose, None);
        assert!(why.contains("serves over TCP only with certificates"), "{why}");
    }
    // Whatever follows is not read as a frame.
    let mut stream = TcpStream::connect(port_of(&blade)).expect("a connection");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream.write_all(&[b'x'; 10_000]).expect("sent");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("one answer and the end");
    assert!(!answer.is_empty() && answer.len() < 100, "{answer:?}");
    drop(stream);
    assert_eq!(blade.stat().totals.requests.get(), 0);
    wait_until("all closed", PATIENCE, || blade.stat().totals.connections.get() == 0);
}

#[test]
fn a_blade_without_certificates_is_refused_by_who_has_one() {
    let mut rack = Rack::new();
    let program = rack.credentials("program/payroll");
    let blade = blade_with(None, BladeConfig::default()).expect("a blade");
    let why = refused(&blade, Purpose::Client, Some(&program));
    assert!(why.contains("it does not speak TLS; give it certificates, too"), "{why}");
    // Nothing is sent in the clear where keys are asked for and nobody gives any.
    let mut unasked = session(&blade.addresses()[0], 1, Purpose::Client, Some(&program));
    unasked.asks = None;
    let why = farpool_fabric::Control::connect(Arc::new(unasked), 0).map(drop);
    let why = why.expect_err("no keys").to_string();
    assert!(why.contains("the process that holds the certificate is gone"), "{why}");
    assert_eq!(blade.stat().totals.requests.get(), 0);
}

#[test]
fn who_serves_is_a_node_with_this_address() {
    let mut rack = Rack::new();
    let program = rack.credentials("program/payroll");
    let elsewhere = load(&rack.issue("node/elsewhere", 0, "192.0.2.1"));
    let blade = blade_with(Some(elsewhere), BladeConfig::default()).expect("a blade");
    let why = refused(&blade, Purpose::Client, Some(&program));
    assert!(why.contains("its certificate is not for the address 127.0.0.1"), "{why}");
    for path in ["program/other", "viewer/v", "controller/c"] {
        let credentials = rack.credentials(path);
        let error = blade_with(Some(credentials), BladeConfig::default());
        let why = error.map(drop).expect_err("no node").to_string();
        assert!(why.contains("only nodes may (farpool pki issue --role node)"), "{why}");
    }
}

#[test]
fn a_revocation_closes_connections_within_a_second_and_others_go_on() {
    let mut rack = Rack::new();
    let blade = rack.blade("node/n");
    let address = &blade.addresses()[0];
    let stays = rack.credentials("program/stays");
    let mut other = Client::new(session(address, 99, Purpose::Client, Some(&stays)));
    let mut quickest = PATIENCE;
    // The bar is a second; a machine that is busy with other tests may be slower now and then.
    for round in 0..3 {
        let path = format!("program/p{round}");
        let credentials = rack.credentials(&path);
        let mut short = session(address, round, Purpose::Client, Some(&credentials));
        short.deadline = Duration::from_secs(5);
        let mut client = Client::new(short);
        client.round(1, 300);
        let before = blade.stat().totals.connections.get();
        let began = Instant::now();
        rack.revoke(&path);
        wait_until("both connections are closed", PATIENCE, || {
            blade.stat().totals.connections.get() + 2 <= before
        });
        quickest = quickest.min(began.elapsed());
        let done = client.read(1);
        assert!(done[0].result.is_err());
        let why = client.link.loss().unwrap_or_default().to_owned();
        assert!(why.contains("this certificate was revoked"), "{why}");
        other.round(u64::try_from(round).expect("few"), 3);
    }
    println!("closed {quickest:?} after the revocation");
    assert!(quickest < Duration::from_secs(1), "{quickest:?}");
}

/// Who was let in, who was refused without being known, and whose certificate was revoked.
#[test]
fn the_audit_log_names_the_certificates() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("audit.log");
    let log = farpool_audit::AuditLog::open(&path).expect("a log");
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/n"), rack.credentials("program/payroll"));
    let config = BladeConfig { audit: Some(Arc::new(log)), ..BladeConfig::default() };
    let blade = blade_with(Some(node), config).expect("a blade");
    let client = meets(&blade, 1, Purpose::Client, Some(&program)).expect("a program borrows");
    refused(&blade, Purpose::Client, None);
    rack.revoke("program/payroll");
    wait_until("its connection is closed", PATIENCE, || blade.stat().totals.connections.get() == 0);
    drop((client, blade));
    let file = std::fs::File::open(&path).expect("a log");
    farpool_audit::verify(std::io::BufReader::new(file), None).expect("as written");
    let lines = std::fs::read_to_string(&path).expect("a log");
    let find = |what: &str| {
        let mut found = lines.lines().filter(|line| line.contains(what));
        found.next().unwrap_or_else(|| panic!("{what}: {lines}")).to_owned()
    };
    assert!(find("hello of Client").contains("program/payroll"), "{lines}");
    assert!(find("its connection is closed").contains("program/payroll"), "{lines}");
    assert!(find("does not speak TLS").contains("\"from\":\"host 127.0.0.1\""), "{lines}");
}

#[test]
fn a_connection_ends_with_its_certificate_and_comes_back_with_the_next() {
    let mut rack = Rack::new();
    let blade = rack.blade("node/n");
    let folder = rack.issue("program/p", -86_400 + SOON_S, "127.0.0.1");
    let program = load(&folder);
    let address = &blade.addresses()[0];
    let mut client = Client::new(session(address, 1, Purpose::Client, Some(&program)));
    client.round(1, 3);
    wait_until("the blade closes both connections", PATIENCE, || {
        blade.stat().totals.connections.get() == 0
    });
    rack.renew("program/p");
    client.round(2, 3);
    assert!(client.link.reconnects() >= 1);
    client.control.call(&Request::Ping).expect("the control connection, too");
}

#[test]
fn no_page_is_late_or_wrong_while_certificates_are_rotated() {
    let mut rack = Rack::new();
    let (blade, program) = (rack.blade("node/n"), rack.credentials("program/p"));
    let address = &blade.addresses()[0];
    let mut client = Client::new(session(address, 1, Purpose::Client, Some(&program)));
    for round in 0..20 {
        rack.renew("node/n");
        rack.renew("program/p");
        client.round(round, 50);
        // A new connection, with whatever is in the files by now.
        meets(&blade, 2, Purpose::Client, Some(&program)).expect("a connection");
    }
    assert_eq!(client.link.reconnects(), 0, "open connections stay");
}
