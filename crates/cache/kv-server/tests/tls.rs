//! TLS: real handshakes with rustls and with OpenSSL, certificates loaded anew, clients with and
//! without certificates.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::talk::{ask, read_until};
use common::{Ours, PATIENCE, wait_until};
use farpool_kv_server::Settings;
use farpool_kv_server::tls::{ClientCertificates, Tls, TlsSettings};
use farpool_testkit::have;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

type Client = StreamOwned<ClientConnection, TcpStream>;

/// Certificates for tests, made by openssl.
struct Authority {
    folder: tempfile::TempDir,
}

impl Authority {
    /// A root, and certificates `server` and `client` under it. None, with a word, without openssl.
    fn new() -> Option<Self> {
        if !have("openssl") {
            return None;
        }
        let authority = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::write(authority.path("conf"), "[req]\ndistinguished_name = dn\n[dn]\n").unwrap();
        authority.make("root", None);
        authority.make("server", Some("root"));
        authority.make("client", Some("root"));
        Some(authority)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes `NAME.pem` and `NAME.key`, signed by another or by itself.
    fn make(&self, name: &str, signed_by: Option<&str>) {
        let file = |name: &str, kind: &str| self.path(&format!("{name}.{kind}"));
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"]);
        command.args(["-pkeyopt", "ec_paramgen_curve:P-256", "-config"]).arg(self.path("conf"));
        command.args(["-subj", &format!("/CN={name}"), "-addext", "subjectAltName=IP:127.0.0.1"]);
        command.arg("-out").arg(file(name, "pem")).arg("-keyout").arg(file(name, "key"));
        let authority = if let Some(signer) = signed_by {
            command.arg("-CA").arg(file(signer, "pem")).arg("-CAkey").arg(file(signer, "key"));
            "FALSE"
        } else {
            "TRUE"
        };
        command.args(["-addext", &format!("basicConstraints=critical,CA:{authority}")]);
        let made = command.output().expect("openssl runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }

    fn settings(&self) -> TlsSettings {
        TlsSettings {
            chain: self.path("server.pem"),
            key: self.path("server.key"),
            ..TlsSettings::default()
        }
    }

    fn certificate(&self, name: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.path(&format!("{name}.pem"))).unwrap()
    }

    /// A client's configuration, with a certificate of this name if one is given.
    fn client(&self, certificate: Option<&str>) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate("root")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let builder = builder.with_root_certificates(roots);
        match certificate {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{name}.key"))).unwrap();
                builder.with_client_auth_cert(vec![self.certificate(name)], key).unwrap()
            }
        }
    }
}

fn serve(settings: TlsSettings) -> Ours {
    let tls = Some(Arc::new(Tls::load(settings).unwrap()));
    Ours::tcp(Settings { tls, threads: 2, ..Settings::default() })
}

fn connect(ours: &Ours, config: ClientConfig) -> Client {
    let name = ServerName::try_from("127.0.0.1").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), ours.connect_tcp())
}

/// Whether a client gets an answer.
fn is_served(client: &mut Client) -> bool {
    let mut reply = [0; 4];
    client.write_all(b"mn\r\n").and_then(|()| client.read_exact(&mut reply)).is_ok()
        && reply == *b"MN\r\n"
}

#[test]
fn requests_and_replies_of_every_size_travel_encrypted() {
    let Some(authority) = Authority::new() else { return };
    let ours = serve(authority.settings());
    let mut client = connect(&ours, authority.client(None));
    for bytes in [0, 1, 16_384, 16_385, 100_000, 1_000_000] {
        let value = vec![b'v'; bytes];
        let set = [format!("set key 0 0 {bytes}\r\n").as_bytes(), &value, b"\r\n"].concat();
        assert_eq!(ask(&mut client, &set, b"\r\n"), b"STORED\r\n");
        let expected =
            [format!("VALUE key 0 {bytes}\r\n").as_bytes(), &value, b"\r\nEND\r\n"].concat();
        assert!(ask(&mut client, b"get key\r\n", b"END\r\n") == expected, "{bytes} bytes");
    }
    // More than the socket takes at once, read late.
    client.write_all(&b"get key\r\n".repeat(20)).unwrap();
    client.write_all(b"mn\r\n").unwrap();
    assert_eq!(read_until(&mut client, b"MN\r\n").len(), 20 * 1_000_028 + 4);
    // The binary protocol, through the same port.
    let mut binary = connect(&ours, authority.client(None));
    let noop = [&[0x80, 0x0a][..], &[0; 10], b"abcd", &[0; 8]].concat();
    let reply = [&[0x81, 0x0a][..], &[0; 10], b"abcd", &[0; 8]].concat();
    assert_eq!(ask(&mut binary, &noop, &reply), reply);
    // A session that ends in order is answered in order.
    client.write_all(b"quit\r\n").unwrap();
    let mut rest = Vec::new();
    assert_eq!(client.read_to_end(&mut rest).expect("the session ends in order"), 0);
}

#[test]
fn who_ends_the_session_still_gets_all_replies() {
    const GETS: usize = 20;
    let Some(authority) = Authority::new() else { return };
    let ours = serve(authority.settings());
    let mut client = connect(&ours, authority.client(None));
    let value = vec![b'v'; 1_000_000];
    let set = [b"set key 0 0 1000000\r\n", &value[..], b"\r\n"].concat();
    assert_eq!(ask(&mut client, &set, b"\r\n"), b"STORED\r\n");
    // Requests, and that no more come, travel together: most requests wait until replies are read.
    client.conn.writer().write_all(&b"get key\r\n".repeat(GETS)).unwrap();
    client.conn.send_close_notify();
    let mut replies = Vec::new();
    client.read_to_end(&mut replies).expect("the session ends in order");
    let each = b"VALUE key 0 1000000\r\n".len() + value.len() + b"\r\nEND\r\n".len();
    assert_eq!(replies.len(), GETS * each);
}

#[test]
fn who_does_not_speak_tls_is_sent_away_and_counted() {
    let Some(authority) = Authority::new() else { return };
    let ours = serve(authority.settings());
    let mut plain = ours.connect_tcp();
    plain.write_all(b"set key 0 0 1\r\nx\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.windows(6).any(|it| it == b"STORED"), "{}", answer.escape_ascii());
    let mut client = connect(&ours, authority.client(None));
    let text = String::from_utf8(ask(&mut client, b"stats\r\n", b"END\r\n")).unwrap();
    assert!(text.contains("STAT ssl_handshake_errors 1\r\n"), "{text}");
    assert!(text.contains("STAT curr_items 0\r\n"), "{text}");
    let text = String::from_utf8(ask(&mut client, b"stats settings\r\n", b"END\r\n")).unwrap();
    assert!(text.contains("STAT ssl_enabled yes\r\n") && text.contains("ssl_min_version tlsv1.2"));
}

#[test]
fn addresses_without_tls_stay_as_they_are() {
    let Some(authority) = Authority::new() else { return };
    let tls = Some(Arc::new(Tls::load(authority.settings()).unwrap()));
    let plain_addresses = vec!["127.0.0.1:0".parse().unwrap()];
    let ours = Ours::tcp(Settings { tls, plain_addresses, ..Settings::default() });
    let mut plain = TcpStream::connect(ours.addresses[1]).unwrap();
    plain.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(ask(&mut plain, b"mn\r\n", b"\r\n"), b"MN\r\n");
    assert!(is_served(&mut connect(&ours, authority.client(None))));
}

/// The certificate that the server showed.
fn shown(client: &mut Client) -> CertificateDer<'static> {
    assert!(is_served(client));
    client.conn.peer_certificates().expect("a server shows one")[0].clone().into_owned()
}

#[test]
fn certificates_are_loaded_anew_while_clients_stay() {
    let Some(authority) = Authority::new() else { return };
    let ours = serve(authority.settings());
    let mut early = connect(&ours, authority.client(None));
    let before = shown(&mut early);
    authority.make("server", Some("root"));
    assert_eq!(shown(&mut connect(&ours, authority.client(None))), before, "nobody asked yet");
    assert_eq!(ask(&mut early, b"refresh_certs\r\n", b"\r\n"), b"OK\r\n");
    let after = shown(&mut connect(&ours, authority.client(None)));
    assert!(after != before && after == authority.certificate("server"));
    assert!(is_served(&mut early), "sessions under way go on");
    // A key of another certificate, then no certificate at all: those in use stay.
    std::fs::copy(authority.path("client.key"), authority.path("server.key")).unwrap();
    let reply = ask(&mut early, b"refresh_certs noreply\r\n", b"\r\n");
    assert!(reply.starts_with(b"Error validating the certificate: "), "{}", reply.escape_ascii());
    std::fs::write(authority.path("server.pem"), "nothing").unwrap();
    let reply = ask(&mut early, b"refresh_certs\r\n", b"\r\n");
    assert!(reply.starts_with(b"Error loading the certificate chain: "));
    assert_eq!(shown(&mut connect(&ours, authority.client(None))), after);
    let plain = Ours::local(Settings::default());
    let mut client = plain.connect();
    let reply = ask(&mut client, b"refresh_certs\r\n", b"\r\n");
    assert_eq!(reply, b"Error TLS not enabled\r\n");
}

#[test]
fn clients_show_the_certificates_that_are_asked_for() {
    let Some(authority) = Authority::new() else { return };
    authority.make("stranger", None);
    for (client_certificates, without, stranger) in [
        (ClientCertificates::Unasked, true, true),
        (ClientCertificates::Asked, true, false),
        (ClientCertificates::Required, false, false),
    ] {
        let ours = serve(TlsSettings {
            client_certificates,
            client_roots: Some(authority.path("root.pem")),
            ..authority.settings()
        });
        let served = |name| is_served(&mut connect(&ours, authority.client(name)));
        assert!(served(Some("client")), "{client_certificates:?}");
        assert_eq!(served(None), without, "{client_certificates:?}");
        assert_eq!(served(Some("stranger")), stranger, "{client_certificates:?}");
    }
}

/// Runs `openssl s_client` with these flags; sends it a request, returns what it prints.
fn s_client(ours: &Ours, root: &Path, flags: &[&str]) -> String {
    let mut child = Command::new("openssl")
        .args(["s_client", "-quiet", "-verify_return_error", "-verify_ip", "127.0.0.1"])
        .args(flags)
        .arg("-CAfile")
        .arg(root)
        .arg("-connect")
        .arg(ours.addresses[0].to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl runs");
    let mut stdin = child.stdin.take().unwrap();
    // It may have ended already.
    let _ = stdin.write_all(b"set key 0 0 5\r\nvalue\r\nget key\r\nquit\r\n");
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    drop(stdin);
    wait_until("openssl ends", || child.try_wait().unwrap());
    text
}

#[test]
fn openssl_is_served_in_the_versions_that_are_allowed() {
    let Some(authority) = Authority::new() else { return };
    let root = authority.path("root.pem");
    let reply = "STORED\r\nVALUE key 0 5\r\nvalue\r\nEND\r\n";
    let ours = serve(authority.settings());
    for version in ["-tls1_2", "-tls1_3"] {
        assert_eq!(s_client(&ours, &root, &[version]), reply, "{version}");
    }
    let settings = TlsSettings { only_newest: true, keeps_sessions: true, ..authority.settings() };
    let ours = serve(settings);
    assert_eq!(s_client(&ours, &root, &["-tls1_2"]), "");
    assert_eq!(s_client(&ours, &root, &["-tls1_3"]), reply);
}

/// What docs/operators/security.md says of `farpool pki`'s certificates.
#[test]
fn certificates_of_the_racks_authority_are_required_and_accepted() {
    use farpool_identity::authority::{Authority, Request};
    use farpool_identity::{Expect, Files, Role, UnixTime};
    let (folder, now) = (tempfile::tempdir().unwrap(), UnixTime::now());
    let mut racks = ["one", "other"].map(|name| {
        Authority::init(&folder.path().join(name), name.parse().unwrap(), now).unwrap()
    });
    let mut issue = |rack: usize, role: Role| {
        let hosts = if role.may_serve() { vec!["127.0.0.1".parse().unwrap()] } else { Vec::new() };
        Files::in_folder(&racks[rack].issue(Request { role, hosts, days: 1 }, now).unwrap().folder)
    };
    let program = || Role::Program { tenant: "t".parse().unwrap(), name: None };
    let node = issue(0, Role::Node("a".parse().unwrap()));
    let ours = serve(TlsSettings {
        chain: node.certificate,
        key: node.key,
        client_roots: Some(node.authorities),
        client_certificates: ClientCertificates::Required,
        only_newest: true,
        keeps_sessions: false,
    });
    let own = farpool_identity::Credentials::load(issue(0, program()), now).unwrap();
    let config = own.client(Expect::Address).unwrap();
    assert!(is_served(&mut connect(&ours, config)));
    // One of another rack, whose owner trusts this one's server.
    let (files, mut roots) = (issue(1, program()), RootCertStore::empty());
    roots.add(CertificateDer::from_pem_file(folder.path().join("one/ca.crt")).unwrap()).unwrap();
    let builder =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let chain = vec![CertificateDer::from_pem_file(&files.certificate).unwrap()];
    let key = PrivateKeyDer::from_pem_file(&files.key).unwrap();
    let stranger = builder.clone().with_client_auth_cert(chain, key).unwrap();
    assert!(!is_served(&mut connect(&ours, stranger)));
    assert!(!is_served(&mut connect(&ours, builder.with_no_client_auth())));
}
