//! Real handshakes: who is accepted as whom, and who is refused with which words.

mod common;

use std::io::{Read, Write};
use std::sync::Arc;

use common::{Meeting, Rack, from_now, load, meet, role_of};
use farpool_identity::{Credentials, Expect, FileError, Files, Reason, Refusal, Role};
use rustls::pki_types::UnixTime;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ProtocolVersion, ServerConnection, SupportedProtocolVersion};

const ADDRESS: &str = "127.0.0.1";

/// Connects a client that dials [`ADDRESS`].
fn connect(server: &Arc<Credentials>, client: &Arc<Credentials>) -> Meeting {
    connect_to(server, client, Expect::Address, ADDRESS)
}

fn connect_to(
    server: &Arc<Credentials>,
    client: &Arc<Credentials>,
    expect: Expect,
    address: &str,
) -> Meeting {
    let client = client.client(expect).expect("a client");
    meet(server.server().expect("a server"), client, address)
}

#[track_caller]
fn assert_told<T>(told: Result<T, String>, expected: &str) {
    let Err(told) = told else { panic!("accepted, without {expected:?}") };
    assert!(told.contains(expected), "{told:?}, without {expected:?}");
}

/// A client that is no user of Farpool: it trusts the rack's authority, and shows what it is given.
fn foreign(
    rack: &Rack,
    shown: Option<&Files>,
    version: &'static SupportedProtocolVersion,
) -> ClientConfig {
    use farpool_identity::pem;
    let roots = pem::roots(&rack.authority.folder().join("ca.crt")).expect("roots");
    let builder = ClientConfig::builder_with_provider(pem::provider());
    let builder = builder.with_protocol_versions(&[version]).expect("a version");
    let builder = builder.with_root_certificates(roots);
    match shown {
        None => builder.with_no_client_auth(),
        Some(files) => {
            let chain = pem::certificates(&files.certificate).expect("a certificate");
            let key = pem::private_key(&files.key).expect("a key");
            builder.with_client_auth_cert(chain, key).expect("a pair")
        }
    }
}

#[test]
fn each_side_learns_who_the_other_is() {
    let mut rack = Rack::new();
    let node = rack.credentials("node/a");
    for path in ["viewer/ann", "operator/bob", "controller/c", "node/b", "program/t", "program/t/p"]
    {
        let client = rack.credentials(path);
        let meeting = connect(&node, &client);
        let (client, server) =
            (meeting.at_server.expect("accepted"), meeting.at_client.expect("accepted"));
        assert_eq!(client.certificate.identity.role, role_of(path));
        assert_eq!(server.certificate.identity.role, role_of("node/a"));
        assert_eq!(client.certificate.identity.rack.as_str(), "rack");
    }
}

#[test]
fn a_client_reaches_only_whom_it_means() {
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/a"), rack.credentials("program/t"));
    // By name of the host, by address, and by role at an address that the certificate lacks.
    for address in ["a.example", ADDRESS] {
        let meeting = connect_to(&node, &program, Expect::Address, address);
        assert!(meeting.at_client.is_ok() && meeting.at_server.is_ok(), "{address}");
    }
    let role = |path| Expect::Role(role_of(path));
    let meeting = connect_to(&node, &program, role("node/a"), "192.0.2.1");
    assert!(meeting.at_client.is_ok() && meeting.at_server.is_ok());
    let meeting = connect_to(&node, &program, Expect::Address, "192.0.2.1");
    assert_told(meeting.at_client, "not for the address 192.0.2.1");
    assert_told(meeting.at_server, "the peer refuses this side");
    // A node cannot pose as another node or as the controller.
    for path in ["node/b", "controller/a"] {
        let meeting = connect_to(&node, &program, role(path), ADDRESS);
        assert_told(meeting.at_client, "it is node a, not ");
    }
}

#[test]
fn people_and_programs_answer_no_connections() {
    let mut rack = Rack::new();
    for path in ["viewer/ann", "operator/bob", "program/t"] {
        let refused = rack.credentials(path).server().expect_err(path);
        assert!(matches!(refused, Refusal::NoServer(_)), "{refused}");
    }
}

#[test]
fn another_authority_is_refused_by_both_sides_even_with_the_same_name() {
    let (mut ours, mut other) = (Rack::new(), Rack::new());
    let (node, stranger) = (ours.credentials("node/a"), other.credentials("program/t"));
    let meeting = connect(&node, &stranger);
    assert_told(meeting.at_client, "none of the authorities trusted here");
    assert_told(meeting.at_server, "it does not trust the authority");
    // A client that accepts any server reaches the server's own check.
    let files = Files::in_folder(&other.authority.folder_of(&role_of("program/t")));
    let config = foreign(&ours, Some(&files), &TLS13);
    let meeting = meet(node.server().expect("a server"), config, ADDRESS);
    assert_told(meeting.at_server, "none of the authorities trusted here");
    assert_told(meeting.at_client, "it does not trust the authority");
}

#[test]
fn a_certificate_is_accepted_in_its_time_only() {
    let past = from_now(-10 * 86_400);
    let mut rack = Rack::at(past);
    let node = rack.credentials("node/a");
    let files = Files::in_folder(&rack.issue_at("program/t", past).folder);
    let program = Credentials::load(files.clone(), past).expect("it was valid then");
    let meeting = connect(&node, &program);
    assert_told(meeting.at_server, "renew it (farpool pki renew)");
    assert_told(meeting.at_client, "this certificate's time is not now");
    let future = from_now(86_400);
    let files_later = Files::in_folder(&rack.issue_at("program/later", future).folder);
    let later = Credentials::load(files_later.clone(), future).expect("it is valid then");
    let meeting = connect(&node, &later);
    assert_told(meeting.at_server, "check this host's clock");
    assert_told(meeting.at_client, "this certificate's time is not now");
    // Neither is of use to the process that has it.
    for (files, words) in [(files, "ended at"), (files_later, "begins at")] {
        let refused = Credentials::load(files, UnixTime::now()).expect_err(words);
        assert!(refused.to_string().contains(words), "{refused}");
    }
    // An expired server.
    let files = Files::in_folder(&rack.issue_at("node/old", past).folder);
    let old = Credentials::load(files, past).expect("it was valid then");
    let program = rack.credentials("program/new");
    let meeting = connect(&old, &program);
    assert_told(meeting.at_client, "renew it (farpool pki renew)");
    assert_told(meeting.at_server, "this certificate's time is not now");
}

#[test]
fn a_revoked_certificate_is_refused_on_either_side() {
    let mut rack = Rack::new();
    let (node, program) = (rack.credentials("node/a"), rack.credentials("program/t"));
    assert!(connect(&node, &program).at_server.is_ok());
    let now = UnixTime::now();
    for (path, reason) in
        [("program/t", Reason::KeyCompromise), ("node/a", Reason::CessationOfOperation)]
    {
        let serials = rack.authority.register().serials(&role_of(path).label()).expect("it is");
        rack.authority.revoke(&serials, reason, now).expect("revoked");
        for side in [&node, &program] {
            side.reload(now).expect("the list is good");
        }
        let meeting = connect(&node, &program);
        if path == "program/t" {
            assert_told(meeting.at_server, "it was revoked");
            assert_told(meeting.at_client, "this certificate was revoked");
        } else {
            assert_told(meeting.at_client, "it was revoked");
            assert_told(meeting.at_server, "this certificate was revoked");
        }
    }
    // It is of no use to its owner either, who is told when and why.
    let files = Files::in_folder(&rack.authority.folder_of(&role_of("program/t")));
    let refused = Credentials::load(files, now).expect_err("revoked");
    assert!(refused.to_string().contains("others may have its key"), "{refused}");
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let mut rack = Rack::new();
    let node = rack.credentials("node/a");
    let meeting = meet(node.server().expect("a server"), foreign(&rack, None, &TLS13), ADDRESS);
    assert_told(meeting.at_server, "it shows no certificate");
    assert_told(meeting.at_client, "it requires a certificate");
}

#[test]
fn tls_1_2_is_refused_even_with_a_good_certificate() {
    let mut rack = Rack::new();
    let node = rack.credentials("node/a");
    let files = Files::in_folder(&rack.issue("program/t").folder);
    let config = foreign(&rack, Some(&files), &TLS12);
    let meeting = meet(node.server().expect("a server"), config, ADDRESS);
    assert_told(meeting.at_server, "does not speak TLS 1.3");
    assert_told(meeting.at_client, "another version of TLS");
    // The same client with TLS 1.3.
    let config = foreign(&rack, Some(&files), &TLS13);
    let meeting = meet(node.server().expect("a server"), config, ADDRESS);
    assert!(meeting.at_server.is_ok() && meeting.at_client.is_ok());
}

#[test]
fn who_does_not_speak_tls_is_told_apart() {
    let mut rack = Rack::new();
    let node = rack.credentials("node/a");
    let config = Arc::new(node.server().expect("a server"));
    let mut server = ServerConnection::new(config).expect("a server");
    server.read_tls(&mut &b"GET / HTTP/1.1\r\n\r\n"[..]).expect("it takes bytes");
    let error = server.process_new_packets().expect_err("no TLS");
    assert_told(Err::<(), _>(farpool_identity::explain_tls(&error)), "does not speak TLS");
}

/// A session that is resumed would bring a certificate that is not verified again.
#[test]
fn no_session_is_resumed() {
    let mut rack = Rack::new();
    let node = rack.credentials("node/a");
    let files = Files::in_folder(&rack.issue("program/t").folder);
    // This client would resume, and the server is the same one each time.
    let (server, client) = (node.server().expect("a server"), foreign(&rack, Some(&files), &TLS13));
    for _ in 0..3 {
        let (mut server, mut client) = common::pair(server.clone(), client.clone(), ADDRESS);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                server.write_all(b"x").and_then(|()| server.flush()).expect("a handshake");
            });
            // What a session is resumed with would come before this byte.
            client.read_exact(&mut [0]).expect("a handshake");
        });
        assert_eq!(client.conn.handshake_kind(), Some(rustls::HandshakeKind::Full));
        assert_eq!(client.conn.protocol_version(), Some(ProtocolVersion::TLSv1_3));
    }
}

#[test]
fn another_rack_of_the_same_authorities_is_refused() {
    let (mut ours, other) = (Rack::new(), tempfile::tempdir().expect("a folder"));
    let node = ours.credentials("node/a");
    // The same authorities are trusted by both, as when one authority of others serves two racks.
    let name = "other".parse().expect("a name");
    let mut authority =
        farpool_identity::authority::Authority::init(other.path(), name, UnixTime::now())
            .expect("made");
    let request = farpool_identity::authority::Request {
        role: role_of("program/t"),
        hosts: Vec::new(),
        days: 1,
    };
    let stranger = authority.issue(request, UnixTime::now()).expect("issued").folder;
    let own = ours.authority.folder_of(&role_of("node/a"));
    let both = [own.join("ca.crt"), stranger.join("ca.crt")]
        .map(|path| std::fs::read_to_string(path).expect("readable"))
        .concat();
    std::fs::write(own.join("ca.crt"), &both).expect("written");
    std::fs::write(stranger.join("ca.crt"), &both).expect("written");
    node.reload(UnixTime::now()).expect("two authorities");
    let config = foreign(&ours, Some(&Files::in_folder(&stranger)), &TLS13);
    let meeting = meet(node.server().expect("a server"), config, ADDRESS);
    assert_told(meeting.at_server, "it is of rack other, not of rack");
    let meeting = connect(&node, &load(&stranger));
    assert_told(meeting.at_client, "it is of rack rack, not of other");
}

/// A folder whose file of authorities has a host's certificate would accept it for ever.
#[test]
fn only_authorities_are_trusted_as_authorities() {
    let mut rack = Rack::new();
    let folder = rack.issue("node/a").folder;
    std::fs::copy(folder.join("tls.crt"), folder.join("ca.crt")).expect("copied");
    let refused = Credentials::load(Files::in_folder(&folder), UnixTime::now());
    let refused = refused.expect_err("it is no authority's");
    assert!(refused.to_string().contains("that is no authority's"), "{refused}");
    assert!(matches!(refused, FileError::Unusable { .. }));
}

#[test]
fn roles_have_their_rights_only() {
    let may = |path: &str| {
        let role: Role = role_of(path);
        (role.may_view(), role.may_operate(), role.is_node("a"), role.is_program_of("t"))
    };
    assert_eq!(may("viewer/a"), (true, false, false, false));
    assert_eq!(may("operator/a"), (true, true, false, false));
    assert_eq!(may("controller/a"), (true, false, false, false));
    assert_eq!(may("node/a"), (false, false, true, false));
    assert_eq!(may("node/t"), (false, false, false, false));
    assert_eq!(may("program/t"), (false, false, false, true));
    assert_eq!(may("program/t/a"), (false, false, false, true));
    assert_eq!(may("program/a/t"), (false, false, false, false));
}
