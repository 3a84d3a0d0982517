//! Certificates that another authority has made, as SPIFFE's, cert-manager's and openssl's.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use common::{load, meet};
use farpool_identity::{Credentials, Expect, Files, Refusal, pem};
use farpool_testkit::have;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P384_SHA384,
    RevocationReason, RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};
use rustls::pki_types::UnixTime;

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// An authority whose root signs an authority in between, which signs the certificates of hosts.
struct Spire {
    root: Issuer,
    between: Issuer,
    folder: tempfile::TempDir,
}

/// The serial number of the authority in between.
const BETWEEN: [u8; 2] = [0x12, 0x34];

impl Spire {
    fn new() -> Self {
        let authority = |name: &str| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
            params
        };
        let key = || KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).expect("a key");
        let root = Issuer::self_signed(authority("root"), key()).expect("signed");
        let mut params = authority("between");
        params.serial_number = Some(SerialNumber::from_slice(&BETWEEN));
        let between = Issuer::signed_by(params, key(), &root).expect("signed");
        Self { root, between, folder: tempfile::tempdir().expect("a folder") }
    }

    /// A folder as SPIFFE's agent fills it: the certificate, the one in between, and the root.
    fn issue(&self, name: &str, uris: &[&str]) -> PathBuf {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::ExplicitNoCa;
        // SPIFFE's are for both sides, whoever it is.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let uri = |uri: &&str| SanType::URI((*uri).try_into().expect("ASCII"));
        params.subject_alt_names = uris.iter().map(uri).collect();
        let key = KeyPair::generate().expect("a key");
        let leaf = params.signed_by(&key, &self.between).expect("signed");
        let folder = self.folder.path().join(name);
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("tls.crt"), leaf.pem() + &self.between.pem()).expect("written");
        fs::write(folder.join("tls.key"), key.serialize_pem()).expect("written");
        fs::write(folder.join("ca.crt"), self.root.pem()).expect("written");
        folder
    }

    /// The root's list, which names a certificate of this number.
    fn revoke(&self, serial: &[u8]) -> String {
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2026, 1, 2),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![RevokedCertParams {
                serial_number: SerialNumber::from_slice(serial),
                revocation_time: date_time_ymd(2026, 1, 1),
                reason_code: Some(RevocationReason::CaCompromise),
                invalidity_date: None,
            }],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.root).expect("signed").pem().expect("PEM")
    }
}

fn connect(server: &Arc<Credentials>, client: &Arc<Credentials>) -> common::Meeting {
    let node = Expect::Role(common::role_of("node/a"));
    let client = client.client(node).expect("a client");
    meet(server.server().expect("a server"), client, "192.0.2.1")
}

#[test]
fn certificates_with_one_in_between_and_without_addresses() {
    let spire = Spire::new();
    let node = load(&spire.issue("a", &["spiffe://example.org/node/a"]));
    let program = load(&spire.issue("t", &["spiffe://example.org/program/t/p"]));
    let meeting = connect(&node, &program);
    let client = meeting.at_server.expect("accepted").certificate.identity;
    assert_eq!(client.to_string(), "spiffe://example.org/program/t/p");
    let server = meeting.at_client.expect("accepted").certificate.identity;
    assert_eq!(server.to_string(), "spiffe://example.org/node/a");
}

/// A program cannot pose as a server, although its certificate is for servers, too.
#[test]
fn a_program_that_answers_connections_is_refused() {
    let spire = Spire::new();
    let node = load(&spire.issue("a", &["spiffe://example.org/node/a"]));
    let folder = spire.issue("t", &["spiffe://example.org/program/t/p"]);
    let program = load(&folder);
    assert!(matches!(program.server(), Err(Refusal::NoServer(_))));
    let files = Files::in_folder(&folder);
    let builder = rustls::ServerConfig::builder_with_provider(pem::provider());
    let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).expect("a version");
    let chain = pem::certificates(&files.certificate).expect("certificates");
    let key = pem::private_key(&files.key).expect("a key");
    let server = builder.with_no_client_auth().with_single_cert(chain, key).expect("a pair");
    // Even if it is the one that is meant.
    let client = node.client(Expect::Role(program.identity().role)).expect("a client");
    let told = meet(server, client, "192.0.2.1").at_client.expect_err("no server");
    assert!(told.contains("only controllers and nodes may"), "{told}");
}

#[test]
fn a_revoked_authority_in_between_takes_its_certificates_along() {
    let spire = Spire::new();
    let folder = spire.issue("a", &["spiffe://example.org/node/a"]);
    let node = load(&folder);
    let program = load(&spire.issue("t", &["spiffe://example.org/program/t"]));
    // Another number first; this list is past its next update, and names what it names.
    for (serial, is_accepted) in [(&[0x12, 0x35], true), (&BETWEEN, false)] {
        fs::write(folder.join("revoked.crl"), spire.revoke(serial)).expect("written");
        node.reload(UnixTime::now()).expect("a good list");
        let meeting = connect(&node, &program);
        assert_eq!(meeting.at_server.is_ok(), is_accepted, "{serial:x?}");
    }
}

#[test]
fn a_certificate_without_an_identity_or_with_two_is_refused() {
    let spire = Spire::new();
    let (a, b) = ("spiffe://example.org/node/a", "spiffe://example.org/node/b");
    let shop = "spiffe://example.org/ns/shop/sa/web";
    for (name, uris, words) in [
        ("none", &[][..], "has 0 URIs among its names"),
        ("two", &[a, b], "has 2 URIs among its names"),
        ("shop", &[shop], "names no identity of Farpool"),
        ("web", &["https://example.org/node/a"], "names no identity of Farpool"),
    ] {
        let folder = spire.issue(name, uris);
        let refused = Credentials::load(Files::in_folder(&folder), UnixTime::now());
        let refused = refused.expect_err(name).to_string();
        assert!(refused.contains(words), "{refused}");
    }
}

/// A list that anybody could have made is not read.
#[test]
fn a_list_of_another_authority_is_refused() {
    let (spire, other) = (Spire::new(), Spire::new());
    let folder = spire.issue("a", &["spiffe://example.org/node/a"]);
    // Of the same name, and with another key.
    fs::write(folder.join("revoked.crl"), other.revoke(&BETWEEN)).expect("written");
    let refused = Credentials::load(Files::in_folder(&folder), UnixTime::now());
    let refused = refused.expect_err("not signed").to_string();
    assert!(refused.contains("revoked.crl: it is signed by none of the authorities"), "{refused}");
}

fn openssl(folder: &Path, words: &[&str]) {
    let made = Command::new("openssl").current_dir(folder).args(words).output();
    let made = made.expect("openssl runs");
    assert!(made.status.success(), "{words:?}: {}", String::from_utf8_lossy(&made.stderr));
}

/// RSA keys, as cert-manager makes them if it is not told otherwise.
#[test]
fn certificates_of_openssl_with_rsa_keys() {
    if !have("openssl") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    fs::write(folder.join("conf"), "[req]\ndistinguished_name = dn\n[dn]\n").expect("written");
    let basic = "basicConstraints=critical,CA";
    let new = ["req", "-x509", "-nodes", "-days", "2", "-newkey", "rsa:2048", "-config", "conf"];
    let root = ["-subj", "/CN=root", "-keyout", "ca.key", "-out", "ca.crt"];
    let is_root = format!("{basic}:TRUE");
    openssl(folder, &[&new[..], &root, &["-addext", &is_root]].concat());
    for (name, path) in [("a", "node/a"), ("t", "program/t")] {
        fs::create_dir(folder.join(name)).expect("a folder");
        let names = format!("subjectAltName=URI:spiffe://example.org/{path},IP:127.0.0.1");
        let (key, certificate) = (format!("{name}/tls.key"), format!("{name}/tls.crt"));
        let files = ["-keyout", &key, "-out", &certificate];
        let signer = ["-CA", "ca.crt", "-CAkey", "ca.key", "-subj", "/CN=x", "-addext", &names];
        let is_leaf = format!("{basic}:FALSE");
        openssl(folder, &[&new[..], &files, &signer, &["-addext", &is_leaf]].concat());
        fs::copy(folder.join("ca.crt"), folder.join(name).join("ca.crt")).expect("copied");
    }
    let (node, program) = (load(&folder.join("a")), load(&folder.join("t")));
    let meeting = connect(&node, &program);
    assert!(meeting.at_client.is_ok() && meeting.at_server.is_ok());
}
