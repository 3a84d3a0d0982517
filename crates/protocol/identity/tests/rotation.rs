//! Files that change while connections are made and open.

mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use common::{PATIENCE, Rack, from_now, load, meet, pair, role_of};
use farpool_identity::{
    CHECK_EVERY, Credentials, Expect, FileError, LiveConnections, Peer, Reason, Refusal, Reloaded,
    Side,
};
use rustls::pki_types::UnixTime;

/// Reloads as a server does, and tries again where two files are replaced one after the other.
fn reload(credentials: &Credentials) {
    match credentials.reload(UnixTime::now()) {
        Ok(_) | Err(FileError::Mismatch { .. } | FileError::Changing { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn no_connection_fails_while_certificates_are_renewed_a_thousand_times() {
    const RENEWALS: usize = 1000;
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/a"), rack.credentials("program/t"));
    let first = [node.certificate().serial, program.certificate().serial];
    let (is_done, connections) = (AtomicBool::new(false), AtomicU64::new(0));
    let (server, client) =
        (node.server().expect("a server"), program.client(Expect::Address).expect("a client"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                reload(&node);
                reload(&program);
                // The configurations are those from before all renewals.
                let meeting = meet(server.clone(), client.clone(), "127.0.0.1");
                assert_eq!(meeting.at_server.map(drop), Ok(()));
                assert_eq!(meeting.at_client.map(drop), Ok(()));
                connections.fetch_add(1, Ordering::Relaxed);
            }
        });
        for renewal in 0..RENEWALS {
            let role = role_of(["node/a", "program/t"][renewal % 2]);
            rack.authority.renew(&role, None, UnixTime::now()).expect("renewed");
        }
        is_done.store(true, Ordering::Relaxed);
    });
    let connections = connections.into_inner();
    println!("{RENEWALS} renewals, {connections} connections");
    assert!(connections > 0);
    for (credentials, first) in [&node, &program].into_iter().zip(first) {
        reload(credentials);
        let last = rack.authority.register().last(&credentials.identity().role).expect("it is");
        assert_eq!(credentials.certificate().serial, last.serial);
        assert_ne!(credentials.certificate().serial, first);
    }
}

/// A server's and a client's end of an open connection, with who the client is.
fn connected(
    node: &Arc<Credentials>,
    program: &Arc<Credentials>,
) -> (common::ServerStream, common::ClientStream, Peer) {
    let client = program.client(Expect::Address).expect("a client");
    let (mut server, mut client) = pair(node.server().expect("a server"), client, "127.0.0.1");
    std::thread::scope(|scope| {
        scope.spawn(|| server.conn.complete_io(&mut server.sock).expect("a handshake"));
        client.conn.complete_io(&mut client.sock).expect("a handshake");
    });
    let peer = Peer::of(&server.conn, Side::Client).expect("it is verified");
    (server, client, peer)
}

#[test]
fn a_revocation_ends_the_open_connections_of_that_certificate_only() {
    let mut rack = Rack::new();
    let node = rack.credentials("node/a");
    let programs = ["program/t/1", "program/t/2"].map(|path| rack.credentials(path));
    let all = LiveConnections::new(Arc::clone(&node));
    let now = UnixTime::now();
    let open: Vec<_> = programs
        .iter()
        .flat_map(|program| [program, program])
        .map(|program| {
            let (server, client, peer) = connected(&node, program);
            (all.admit(peer, now).expect("it is good"), server, client)
        })
        .collect();
    assert!(all.check(now).is_empty());
    assert_eq!(all.count(), 4);

    let serial = programs[0].certificate().serial;
    rack.authority
        .revoke(std::slice::from_ref(&serial), Reason::KeyCompromise, now)
        .expect("revoked");
    // The next look at the files, and the next check: nothing else is waited for.
    assert_eq!(node.reload(now).expect("a good list"), Reloaded::Changed);
    let ended = all.check(now);
    assert_eq!(ended.iter().map(|it| it.id).collect::<Vec<_>>(), [open[0].0.id(), open[1].0.id()]);
    for one in &ended {
        assert_eq!(one.peer.certificate.serial, serial);
        assert!(matches!(&one.why, Refusal::Revoked { serial: found, .. } if *found == serial));
    }
    let refused: Vec<bool> = open.iter().map(|(live, ..)| live.refusal().is_some()).collect();
    assert_eq!(refused, [true, true, false, false]);
    // They are named until they are closed.
    assert_eq!(all.check(now).len(), 2);
    drop(open);
    assert_eq!((all.check(now).len(), all.count()), (0, 0));

    // One whose handshake was before the revocation, and who is admitted after it.
    let fresh = rack.credentials("program/t/3");
    let (_server, _client, peer) = connected(&node, &fresh);
    let serial = fresh.certificate().serial;
    rack.authority.revoke(&[serial], Reason::Unspecified, now).expect("revoked");
    node.reload(now).expect("a good list");
    let refused = all.admit(peer, now).expect_err("revoked meanwhile");
    assert!(matches!(refused, Refusal::Revoked { .. }), "{refused}");
}

/// A server that looks every CHECK_EVERY, while another process revokes.
#[test]
fn a_server_that_looks_often_sees_a_revocation_at_its_next_look() {
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/a"), rack.credentials("program/t"));
    let all = LiveConnections::new(Arc::clone(&node));
    let (_server, _client, peer) = connected(&node, &program);
    let _live = all.admit(peer, UnixTime::now()).expect("it is good");
    let (looks, began) = (AtomicU64::new(0), Instant::now());
    let (revoked, ended) = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            loop {
                let look = looks.fetch_add(1, Ordering::SeqCst);
                reload(&node);
                if !all.check(UnixTime::now()).is_empty() {
                    return (look, Instant::now());
                }
                assert!(began.elapsed() < PATIENCE, "never seen");
                std::thread::sleep(CHECK_EVERY);
            }
        });
        let serial = program.certificate().serial;
        let done = rack.authority.revoke(&[serial], Reason::KeyCompromise, UnixTime::now());
        done.expect("revoked");
        let revoked_before = looks.load(Ordering::SeqCst);
        let revoked = Instant::now();
        let (look, ended) = server.join().expect("it sees it");
        // The look that was under way, or the next one.
        assert!(look <= revoked_before, "look {look}");
        (revoked, ended)
    });
    println!("seen after {:?}", ended.saturating_duration_since(revoked));
}

#[test]
fn connections_end_with_their_certificates_and_authorities() {
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/a"), rack.credentials("program/t"));
    let all = LiveConnections::new(Arc::clone(&node));
    let now = UnixTime::now();
    let (_server, _client, peer) = connected(&node, &program);
    let live = all.admit(peer.clone(), now).expect("it is good");
    let ended = all.check(from_now(2 * 86_400));
    assert!(matches!(ended[..], [ref one] if matches!(one.why, Refusal::Expired { .. })));
    drop(live);
    // The authority is replaced by another one, and the list with it.
    let live = all.admit(peer, now).expect("it is good");
    let mut other = Rack::new();
    let theirs = other.issue("node/a").folder;
    let own = rack.authority.folder_of(&role_of("node/a"));
    fs::copy(theirs.join("ca.crt"), own.join("ca.crt")).expect("copied");
    let refused = node.reload(now).expect_err("the list is the old authority's");
    assert!(refused.to_string().contains("revoked.crl"), "{refused}");
    assert!(all.check(now).is_empty());
    fs::copy(theirs.join("revoked.crl"), own.join("revoked.crl")).expect("copied");
    assert_eq!(node.reload(now).expect("both are new"), Reloaded::Changed);
    assert_eq!(all.check(now)[0].why, Refusal::UnknownAuthority);
    assert_eq!(live.refusal(), Some(&Refusal::UnknownAuthority));
}

#[test]
fn files_that_cannot_be_used_change_nothing() {
    let mut rack = Rack::new();
    let folder = rack.issue("node/a").folder;
    let node = load(&folder);
    let before = node.certificate();
    let now = UnixTime::now();
    let other = rack.issue("node/b").folder;
    let damages: [(&str, Vec<u8>, &str); 7] = [
        ("tls.crt", b"no certificate".to_vec(), "tls.crt: no certificate in PEM form"),
        ("tls.crt", fs::read(other.join("tls.crt")).expect("readable"), "is not the key of"),
        ("tls.key", fs::read(other.join("tls.key")).expect("readable"), "is not the key of"),
        ("tls.key", Vec::new(), "tls.key: "),
        ("ca.crt", Vec::new(), "ca.crt: no certificate in PEM form"),
        ("revoked.crl", Vec::new(), "revoked.crl: no list of revoked certificates"),
        ("revoked.crl", fs::read(folder.join("ca.crt")).expect("readable"), "no list of revoked"),
    ];
    for (name, damage, words) in damages {
        let path = folder.join(name);
        let good = fs::read(&path).expect("readable");
        fs::write(&path, damage).expect("written");
        let refused = node.reload(now).expect_err(words);
        assert!(refused.to_string().contains(words), "{refused}");
        assert_eq!(node.certificate(), before);
        // Again and again, until it is repaired.
        assert!(node.reload(now).is_err(), "{words}");
        fs::write(&path, good).expect("written");
        node.reload(now).expect("repaired");
    }
    assert_eq!(node.reload(now).expect("good"), Reloaded::Unchanged);
}

#[test]
fn a_revocation_is_not_taken_back_by_an_older_list_or_by_none() {
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/a"), rack.credentials("program/t"));
    let list = rack.authority.folder_of(&role_of("node/a")).join("revoked.crl");
    let old = fs::read(&list).expect("readable");
    let now = UnixTime::now();
    let serial = program.certificate().serial;
    // The authority's clock may have been set back since.
    rack.authority.revoke(&[serial], Reason::Superseded, from_now(-3600)).expect("revoked");
    node.reload(now).expect("a good list");
    let is_refused = || {
        let client = program.client(Expect::Address).expect("a client");
        meet(node.server().expect("a server"), client, "127.0.0.1").at_server.is_err()
    };
    assert!(is_refused());
    let new = fs::read(&list).expect("readable");
    fs::write(&list, &old).expect("written");
    let refused = node.reload(now).expect_err("an older list");
    assert!(matches!(refused, FileError::ListWithdrawn { .. }), "{refused}");
    assert!(is_refused());
    fs::remove_file(&list).expect("removed");
    assert!(matches!(node.reload(now), Err(FileError::ListWithdrawn { .. })));
    assert!(is_refused());
    fs::write(&list, &new).expect("written");
    assert_eq!(node.reload(now).expect("the newest list"), Reloaded::Changed);
    assert!(is_refused());
}

/// What holds for a list must not wait for a certificate that cannot be read.
#[test]
fn a_revocation_holds_although_the_own_certificate_is_damaged() {
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/a"), rack.credentials("program/t"));
    let own = rack.authority.folder_of(&role_of("node/a"));
    fs::write(own.join("tls.crt"), "").expect("written");
    let now = UnixTime::now();
    let serial = program.certificate().serial;
    rack.authority.revoke(&[serial], Reason::Unspecified, now).expect("revoked");
    assert!(node.reload(now).is_err(), "the certificate is damaged");
    let client = program.client(Expect::Address).expect("a client");
    let meeting = meet(node.server().expect("a server"), client, "127.0.0.1");
    assert!(meeting.at_server.expect_err("revoked").contains("revoked"));
}

#[test]
fn a_process_does_not_change_its_rack() {
    let mut rack = Rack::new();
    let folder = rack.issue("node/a").folder;
    let node = load(&folder);
    let other = tempfile::tempdir().expect("a folder");
    let now = UnixTime::now();
    let name = "other".parse().expect("a name");
    let mut authority =
        farpool_identity::authority::Authority::init(other.path(), name, now).expect("made");
    let request = farpool_identity::authority::Request {
        role: role_of("node/a"),
        hosts: Vec::new(),
        days: 1,
    };
    let theirs = authority.issue(request, now).expect("issued").folder;
    for name in ["ca.crt", "revoked.crl", "tls.crt", "tls.key"] {
        fs::copy(theirs.join(name), folder.join(name)).expect("copied");
    }
    let refused = node.reload(now).expect_err("another rack");
    assert!(matches!(refused, FileError::OtherRack { .. }), "{refused}");
    assert_eq!(node.identity().rack.as_str(), "rack");
}
