//! A controller with certificates: who may ask what, who is refused and told why, rotation and
//! revocation while requests are under way.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::pki::{Pki, with};
use common::{Agent, PATIENCE, SUPERPAGE, Server, small, wait_for};
use farpool_api::{
    Access, ApiError, Client, ClientId, ClientReport, ClientSpec, NodeSpec, ProblemKind, SegmentId,
    SegmentSpec, SegmentState, TenantSpec,
};
use farpool_control::ControlError;
use farpool_http::Unprotected;
use farpool_identity::{Credentials, Expect, Files, UnixTime};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

fn spec_of(tenant: Option<&str>) -> ClientSpec {
    ClientSpec {
        host: "n0".into(),
        name: "prog".into(),
        pid: 1,
        lease_ms: 3_600_000,
        tenant: tenant.map(str::to_owned),
    }
}

/// Asserts that a request was refused with 403, and that the refusal names all of these.
#[track_caller]
fn forbidden<T: std::fmt::Debug>(result: Result<T, ApiError>, names: &[&str]) {
    let error = result.expect_err("it is refused");
    assert!(error.is(ProblemKind::Forbidden), "{error}");
    for name in names {
        assert!(error.to_string().contains(name), "{error}, without {name:?}");
    }
}

/// Asserts that no connection came about, and that the client is told why in these words.
#[track_caller]
fn unreachable<T: std::fmt::Debug>(result: Result<T, ApiError>, words: &str) {
    match result.expect_err("it is refused") {
        ApiError::Unreachable { reason, .. } => assert!(reason.contains(words), "{reason}"),
        other => panic!("{other}"),
    }
}

#[test]
fn each_role_asks_what_it_may() {
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let operator = pki.client(&server, "operator/o");
    let viewer = pki.client(&server, "viewer/v");
    let node = pki.client(&server, "node/n0");
    Agent::join(&node, "n0", 4 * SUPERPAGE).settle(&node);
    assert_eq!(viewer.nodes().unwrap().nodes.len(), 1);
    forbidden(viewer.drain_node("n0"), &["viewer v", "/v1/nodes/n0/drain"]);
    forbidden(viewer.backup(), &["viewer v", "/v1/backup"]);
    assert!(operator.backup().unwrap().contains("n0"));
    operator.put_tenant("t", &TenantSpec::default()).unwrap();
    operator.drain_node("n0").unwrap();
    // A node speaks for itself.
    node.undrain_node("n0").unwrap();
    assert_eq!(node.node("n0").unwrap().name, "n0");
    // Everybody sees that the controller is well, but not without a certificate.
    for client in [&operator, &viewer, &node] {
        assert!(client.health().unwrap().leader);
    }
}

#[test]
fn a_node_cannot_speak_for_another() {
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let (a, b) = (pki.client(&server, "node/a"), pki.client(&server, "node/b"));
    let mut agent = Agent::join(&b, "b", 4 * SUPERPAGE);
    agent.settle(&b);
    let before = b.node("b").unwrap();
    let names = ["node a", "/nodes/b"];
    let spec = NodeSpec::new(vec!["tcp://evil:1".into()], 1 << 40, 11, 12);
    forbidden(a.put_node("b", &spec), &names);
    forbidden(a.report_node("b", &agent.report()), &names);
    forbidden(a.drain_node("b"), &names);
    forbidden(a.undrain_node("b"), &names);
    forbidden(a.delete_node("b"), &names);
    forbidden(a.node("b"), &names);
    forbidden(a.nodes(), &["node a", "/v1/nodes"]);
    forbidden(a.put_client(ClientId::from_u128(1), &spec_of(None)), &["node a", "/v1/clients"]);
    forbidden(a.segments(&Default::default()), &["node a", "/v1/segments"]);
    let after = b.node("b").unwrap();
    assert_eq!((after.addresses, after.state), (before.addresses, before.state));
}

#[test]
fn a_program_speaks_only_for_its_tenant() {
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let operator = pki.client(&server, "operator/o");
    let node = pki.client(&server, "node/n0");
    let mut agent = Agent::join(&node, "n0", 16 * SUPERPAGE);
    let (t, u) = (pki.client(&server, "program/t/web"), pki.client(&server, "program/u"));
    let (id, segment) = (ClientId::from_u128(1), SegmentId::from_u128(1));
    // What it does not say, its certificate does.
    assert_eq!(t.put_client(id, &spec_of(None)).unwrap().tenant.as_deref(), Some("t"));
    t.put_segment(segment, &small(id)).unwrap();
    agent.settle(&node);
    t.wait_segment(segment, SegmentState::Ready, 10_000).unwrap();
    let larger = SegmentSpec { bytes: 2 * SUPERPAGE, ..small(id) };
    t.resize_segment(segment, &larger, None).unwrap();
    assert_eq!(t.tenant("t").unwrap().granted_bytes, 2 * SUPERPAGE);
    assert!(t.report_client(id, &ClientReport::default()).unwrap().segments[0].place.key.is_some());

    let (client, its) = (format!("client {id}"), format!("segment {segment}"));
    let (client, its) = (["tenant u", &client], ["tenant u", &its]);
    forbidden(u.client(id), &client);
    forbidden(u.put_client(id, &spec_of(None)), &client);
    forbidden(u.report_client(id, &ClientReport::default()), &client);
    forbidden(u.delete_client(id), &client);
    forbidden(u.put_segment(SegmentId::from_u128(2), &small(id)), &client);
    forbidden(u.segment(segment), &its);
    forbidden(u.wait_segment(segment, SegmentState::Lost, 30_000), &its);
    forbidden(u.resize_segment(segment, &small(id), None), &its);
    forbidden(u.delete_segment(segment, None), &its);
    let own = ClientId::from_u128(2);
    u.put_client(own, &spec_of(Some("u"))).unwrap();
    forbidden(u.put_segment(segment, &small(own)), &its);
    forbidden(u.put_client(own, &spec_of(Some("t"))), &["tenant u", "tenant t"]);
    let of_host = SegmentSpec { client: None, host: Some("n0".into()), ..small(own) };
    forbidden(u.put_segment(SegmentId::from_u128(3), &of_host), &["tenant u", "host n0"]);
    forbidden(u.tenant("t"), &["tenant u", "/v1/tenants/t"]);
    forbidden(u.segments(&Default::default()), &["/v1/segments"]);
    forbidden(u.move_segment(segment, &Default::default()), &["/move"]);
    forbidden(u.topology(), &["/v1/topology"]);
    // Nothing of that has changed anything.
    assert_eq!(operator.segment(segment).unwrap().place.bytes, 2 * SUPERPAGE);
    t.delete_segment(segment, None).unwrap();
    t.delete_client(id).unwrap();
}

/// A client of TLS 1.3 that shows no certificate.
fn without_certificate(pki: &Pki) -> ClientConfig {
    let provider = farpool_identity::pem::provider();
    let folder = pki.authority.folder_of(&Pki::role("controller/c1"));
    let roots = farpool_identity::pem::roots(&folder.join("ca.crt")).unwrap();
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    builder.unwrap().with_root_certificates(roots).with_no_client_auth()
}

/// Asks with a configuration of TLS, and returns the answer or the error.
fn ask(server: &Server, config: ClientConfig) -> Result<String, String> {
    let address = server.url.strip_prefix("https://").unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let session = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(session, TcpStream::connect(address).unwrap());
    let told = |error: std::io::Error| {
        farpool_identity::explain(&error).unwrap_or_else(|| error.to_string())
    };
    let request = format!("GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(told)?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(told)?;
    Ok(text)
}

#[test]
fn who_shows_no_good_certificate_is_refused_and_told_why() {
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let refused = ask(&server, without_certificate(&pki)).unwrap_err();
    assert!(refused.contains("requires a certificate"), "{refused}");
    let good = pki.credentials("viewer/v").client(Expect::Address).unwrap();
    assert!(ask(&server, good).unwrap().starts_with("HTTP/1.1 200"));

    // Of another authority: the client refuses the server, and the server that client.
    let stranger = Pki::new().credentials("operator/o");
    unreachable(with(&server, &stranger).nodes(), "ca.crt of the same rack");
    let mut blind = stranger.client(Expect::Address).unwrap();
    blind.dangerous().set_certificate_verifier(trusting());
    let refused = ask(&server, blind).unwrap_err();
    assert!(refused.contains("does not trust the authority"), "{refused}");

    let two_days = Duration::from_secs(2 * 86_400);
    let then = UnixTime::since_unix_epoch(
        Duration::from_secs(UnixTime::now().as_secs()).saturating_sub(two_days),
    );
    let folder = pki.issue_at("operator/old", then);
    let expired = Credentials::load(Files::in_folder(&folder), then).unwrap();
    unreachable(with(&server, &expired).nodes(), "renew it");

    let revoked = pki.credentials("operator/gone");
    let client = with(&server, &revoked);
    pki.revoke("operator/gone");
    // A connection from before the list was read ends without words; the next one is told why.
    let is_told = |error: ApiError| error.to_string().contains("revoked").then_some(());
    wait_for("it is told", || client.nodes().err().and_then(is_told));
}

/// Accepts every server: the side that shall refuse here is the other one.
fn trusting() -> Arc<dyn rustls::client::danger::ServerCertVerifier> {
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::pki_types::CertificateDer;
    use rustls::{DigitallySignedStruct, Error, SignatureScheme};
    #[derive(Debug)]
    struct Trusting;
    impl ServerCertVerifier for Trusting {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: rustls::pki_types::UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }
        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            let provider = farpool_identity::pem::provider();
            provider.signature_verification_algorithms.supported_schemes()
        }
    }
    Arc::new(Trusting)
}

#[test]
fn who_does_not_speak_tls_is_told_so_in_the_clear() {
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let plain = server.url.replace("https://", "http://");
    let error = Client::new(&plain, None).unwrap().nodes().unwrap_err();
    assert!(error.is(ProblemKind::BadRequest), "{error}");
    assert!(error.to_string().contains("https://"), "{error}");
    assert!(error.to_string().contains("--pki"), "{error}");
    // A body that is still being sent does not destroy the answer.
    let mut stream = TcpStream::connect(plain.strip_prefix("http://").unwrap()).unwrap();
    stream.write_all(b"PUT /v1/nodes/a HTTP/1.1\r\nContent-Length: 9999\r\n\r\n{").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(
        text.starts_with("HTTP/1.1 400 ") && text.contains("application/problem+json"),
        "{text}"
    );

    // And the other way round.
    let clear = Server::fresh(|_| {});
    let url = clear.url.replace("http://", "https://");
    let credentials = Some(pki.credentials("operator/o"));
    let client = Client::with(&url, &Access { credentials, ..Access::default() }).unwrap();
    unreachable(client.nodes(), "does not speak TLS");
}

#[test]
fn a_token_or_a_persons_certificate_is_nothing_to_serve_with() {
    let mut pki = Pki::new();
    let start = |change: &dyn Fn(&mut farpool_http::Protection)| {
        let folder = tempfile::tempdir().unwrap();
        let store = farpool_control::StoreChoice::Redb(folder.path().join("store"));
        let listen = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let mut options = farpool_control::ControlOptions::new(listen, store);
        change(&mut options.protection);
        let served = farpool_control::serve(options, |_| {}, async {});
        match tokio::runtime::Runtime::new().unwrap().block_on(served) {
            Err(ControlError::Unprotected(why)) => why,
            other => panic!("{other:?}"),
        }
    };
    let (good, person) = (pki.credentials("controller/c1"), pki.credentials("operator/o"));
    let why = start(&|protection| {
        protection.credentials = Some(Arc::clone(&good));
        protection.token = Some("secret".into());
    });
    assert!(matches!(why, Unprotected::TokenBesideCertificates));
    let why = start(&|protection| protection.credentials = Some(Arc::clone(&person)));
    assert!(why.to_string().contains("operator o"), "{why}");
}

#[test]
fn no_request_fails_while_certificates_are_rotated() {
    const ROTATIONS: usize = 200;
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let node = pki.client(&server, "node/n0");
    Agent::join(&node, "n0", 4 * SUPERPAGE);
    let program = pki.client(&server, "program/t");
    let id = ClientId::from_u128(1);
    program.put_client(id, &spec_of(None)).unwrap();
    let (is_over, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for client in [&node, &program] {
            let (is_over, asked) = (&is_over, &asked);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    client.health().unwrap();
                    asked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // One that waits while certificates change keeps its connection.
        scope.spawn(|| {
            let mut sequence = 1;
            while !is_over.load(Ordering::Relaxed) {
                sequence += 1;
                let report =
                    ClientReport { sequence, wait_ms: 300, known_version: 1, ..Default::default() };
                program.report_client(id, &report).unwrap();
            }
        });
        for rotation in 0..ROTATIONS {
            pki.renew(["controller/c1", "node/n0", "program/t"][rotation % 3]);
            // Each is in use before the next comes.
            let before = asked.load(Ordering::Relaxed);
            wait_for("requests", || (asked.load(Ordering::Relaxed) > before + 2).then_some(()));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    println!("{ROTATIONS} rotations, {} requests, none failed", asked.into_inner());
}

#[test]
fn a_revoked_peers_connections_are_closed_within_a_second() {
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let operator = pki.client(&server, "operator/o");
    Agent::join(&operator, "n0", 4 * SUPERPAGE);
    let mut quickest = PATIENCE;
    // The bar is a second; a machine that is busy with other tests may be slower now and then.
    for round in 0..3 {
        let (path, other) = (format!("viewer/v{round}"), format!("viewer/w{round}"));
        let (revoked, stays) = (pki.client(&server, &path), pki.client(&server, &other));
        // Endless answers, of which the first events have come.
        let mut events = revoked.events(0).unwrap();
        let mut others = stays.events(0).unwrap();
        assert!(events.next().is_some_and(|event| event.is_ok()));
        assert!(others.next().is_some_and(|event| event.is_ok()));
        pki.revoke(&path);
        let began = Instant::now();
        let last = events.find(Result::is_err);
        let took = began.elapsed();
        println!("closed {took:?} after the revocation: {last:?}");
        assert!(took < PATIENCE, "never closed");
        quickest = quickest.min(took);
        assert!(revoked.nodes().unwrap_err().to_string().contains("revoked"));
        // The other one's goes on.
        operator.put_tenant(&format!("t{round}"), &TenantSpec::default()).unwrap();
        let news = others.find(|event| event.as_ref().is_ok_and(|it| it.kind == "tenant-set"));
        assert!(news.is_some());
        stays.nodes().unwrap();
    }
    assert!(quickest < Duration::from_secs(1), "{quickest:?}");
}

#[test]
fn a_client_leaves_a_controller_that_was_revoked() {
    let mut pki = Pki::new();
    let server = pki.server(|_| {});
    let operator = pki.client(&server, "operator/o");
    Agent::join(&operator, "n0", 4 * SUPERPAGE);
    let mut events = operator.events(0).unwrap();
    assert!(events.next().is_some_and(|event| event.is_ok()));
    // Only the client learns of it: the controller's own list stays as it was.
    let own = pki.authority.folder_of(&Pki::role("controller/c1")).join("revoked.crl");
    let before = std::fs::read(&own).unwrap();
    pki.revoke("controller/c1");
    std::fs::write(&own, before).unwrap();
    let error = events.find_map(Result::err).expect("it says why").to_string();
    assert!(error.contains("revoked"), "{error}");
    let error = operator.nodes().unwrap_err().to_string();
    assert!(error.contains("revoked"), "{error}");
}
