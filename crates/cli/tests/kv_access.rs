//! Who talks to `farpool kv`, and how: client libraries of the binary protocol, SASL, TLS, what the
//! log warns of, how the service is confined.

#[allow(dead_code)]
mod common;
#[allow(dead_code)]
#[path = "common/kv.rs"]
mod server;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{ended, farpool};
use farpool_testkit::ports::free_address;
use farpool_testkit::{have, skip};
use server::{Kv, PATIENCE};

/// What `memccapable -b` tries.
const BINARY_CAPABILITIES: usize = 27;

#[test]
fn memccapable_finds_all_binary_capabilities() {
    if Command::new("memccapable").arg("--version").output().is_err() {
        skip("memccapable is not installed (apt-get install libmemcached-tools)");
        return;
    }
    let home = tempfile::tempdir().expect("a home");
    let kv = Kv::start(home.path(), &["-t", "2"]);
    let port = kv.address.port().to_string();
    let output = Command::new("memccapable")
        .args(["-b", "-h", "127.0.0.1", "-p", &port, "-t", "10"])
        .output()
        .expect("memccapable starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.matches("[pass]").count(), BINARY_CAPABILITIES, "{text}");
    assert!(output.status.success() && !text.contains("[FAIL]"), "{text}");
}

/// Runs a script that prints `passed` at its end.
fn passes(command: &mut Command) {
    let output = command.output().expect("the script starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.ends_with("passed\n"), "{text}{errors}");
}

const PHP: &str = r#"
function same($given, $expected, $what) {
    if ($given !== $expected) { echo $what, ": ", var_export($given, true), "\n"; exit(1); }
}
$client = new Memcached();
$client->setOption(Memcached::OPT_BINARY_PROTOCOL, true);
$client->setOption(Memcached::OPT_COMPRESSION, false);
$client->addServer("127.0.0.1", (int) $argv[1]);
same($client->set("key", "value"), true, "set");
same($client->get("key"), "value", "get");
$many = [];
for ($number = 0; $number < 1000; $number++) { $many["many$number"] = "value$number"; }
same($client->setMulti($many), true, "setMulti");
$found = $client->getMulti(array_keys($many));
ksort($found); ksort($many);
same($found, $many, "getMulti");
$item = $client->get("key", null, Memcached::GET_EXTENDED);
same($client->cas($item["cas"], "key", "newer"), true, "cas");
same($client->cas($item["cas"], "key", "late"), false, "an old cas");
same($client->add("key", "x"), false, "add of what is there");
same($client->append("nobody", "x"), false, "append to nothing");
same($client->increment("number", 1, 41, 100), 41, "increment makes it");
same($client->increment("number", 1), 42, "increment");
same($client->touch("number", 100), true, "touch");
same($client->delete("key"), true, "delete");
same($client->get("key"), false, "get of nothing");
same(count($client->getStats()), 1, "stats");
ini_set("session.save_handler", "memcached");
ini_set("session.save_path", "127.0.0.1:" . $argv[1]);
same(ini_get("memcached.sess_binary_protocol"), "1", "sessions speak the binary protocol");
foreach ([null, 7] as $before) {
    session_id("abc");
    same(session_start(), true, "session_start");
    same($_SESSION["seen"] ?? null, $before, "the session");
    $_SESSION["seen"] = 7;
    same(session_write_close(), true, "session_write_close");
}
echo "passed\n";
"#;

#[test]
fn php_and_its_sessions_speak_the_binary_protocol() {
    let modules = Command::new("php").arg("-m").output().map(|it| it.stdout).unwrap_or_default();
    if !String::from_utf8_lossy(&modules).lines().any(|line| line == "memcached") {
        skip("PHP's memcached is not installed (apt-get install php-cli php-memcached)");
        return;
    }
    let home = tempfile::tempdir().expect("a home");
    let kv = Kv::start(home.path(), &["-t", "2"]);
    let port = kv.address.port().to_string();
    passes(Command::new("php").args(["-r", PHP, "--", &port]));
}

const RUBY: &str = r##"
require "dalli"
def same(given, expected, what)
  abort "#{what}: #{given.inspect}" unless given == expected
end
client = Dalli::Client.new("127.0.0.1:#{ARGV[0]}", socket_timeout: 10)
same(!!client.set("key", "value"), true, "set")
same(client.get("key"), "value", "get")
many = (0...1000).to_h { |number| ["many#{number}", "value#{number}"] }
client.multi { many.each { |key, value| client.set(key, value) } }
same(client.get_multi(*many.keys), many, "get_multi")
same(!!client.cas("key") { |value| value + "!" }, true, "cas")
same(client.get("key"), "value!", "the new value")
same(!!client.add("key", "x"), false, "add of what is there")
same(client.incr("number", 1, nil, 41), 41, "incr makes it")
same(client.incr("number", 1), 42, "incr")
same(!!client.delete("key"), true, "delete")
same(client.get("key"), nil, "get of nothing")
client.flush_all
same(client.get("number"), nil, "flush_all")
puts "passed"
"##;

#[test]
fn dalli_speaks_the_binary_protocol() {
    let found = Command::new("ruby").args(["-e", "require 'dalli'"]).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        skip("dalli is not installed (apt-get install ruby-dalli)");
        return;
    }
    let home = tempfile::tempdir().expect("a home");
    let kv = Kv::start(home.path(), &["-t", "2"]);
    let port = kv.address.port().to_string();
    passes(Command::new("ruby").args(["-e", RUBY, &port]));
}

/// Makes `server.pem` and `server.key`. False, with a word, without openssl.
fn make_certificate(folder: &Path) -> bool {
    if !have("openssl") {
        return false;
    }
    let made = Command::new("openssl")
        .args(["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"])
        .args(["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=localhost"])
        .args(["-out", "server.pem", "-keyout", "server.key"])
        .current_dir(folder)
        .stderr(Stdio::null())
        .status();
    assert!(made.expect("openssl starts").success(), "a certificate is made");
    true
}

/// What openssl's client prints for these requests.
fn over_tls(port: u16, requests: &str) -> String {
    let mut child = Command::new("openssl")
        .args(["s_client", "-quiet", "-connect", &format!("127.0.0.1:{port}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl starts");
    let mut stdin = child.stdin.take().expect("its input is piped");
    stdin.write_all(requests.as_bytes()).expect("it takes requests");
    let mut text = String::new();
    let mut stdout = child.stdout.take().expect("its output is piped");
    stdout.read_to_string(&mut text).expect("it prints text");
    drop(stdin);
    child.wait().expect("it ends");
    text
}

#[test]
fn tls_is_spoken_except_where_it_is_not_wanted() {
    let home = tempfile::tempdir().expect("a home");
    if !make_certificate(home.path()) {
        return;
    }
    let sealed = free_address().port();
    let file = |name: &str| home.path().join(name).display().to_string();
    let options = format!("ssl_chain_cert={},ssl_key={}", file("server.pem"), file("server.key"));
    let listen = format!("notls:127.0.0.1,127.0.0.1:{sealed}");
    let mut kv = Kv::start(home.path(), &["-Z", "-o", &options, "-l", &listen]);
    let text = over_tls(sealed, "set key 0 0 1\r\nx\r\nrefresh_certs\r\nquit\r\n");
    assert_eq!(text, "STORED\r\nOK\r\n");
    assert_eq!(kv.client.ask("mg key v"), "VA 1", "through the address without TLS");
    // What does not begin with a handshake gets no answer.
    let mut plain = TcpStream::connect(("127.0.0.1", sealed)).expect("it listens");
    plain.set_read_timeout(Some(PATIENCE)).expect("sockets have timeouts");
    plain.write_all(b"mg key v\r\nmg key v\r\n").expect("the server takes bytes");
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"VA"), "{}", answer.escape_ascii());
}

#[test]
fn options_of_access_are_refused_with_what_to_write_instead() {
    let home = tempfile::tempdir().expect("a home");
    let none = home.path().join("none").display().to_string();
    let chain = format!("ssl_chain_cert={none}");
    if !make_certificate(home.path()) {
        return;
    }
    let file = |name: &str| home.path().join(name).display().to_string();
    let own = format!("ssl_chain_cert={},ssl_key={}", file("server.pem"), file("server.key"));
    for (flags, hint) in [
        (&["-B", "udp"][..], "use -B ascii, -B binary or -B auto"),
        (&["-S"], "give -Y FILE"),
        (&["-Z"], "-o ssl_chain_cert=FILE,ssl_key=FILE"),
        (&["-o", "ssl_key=/x"], "give -Z"),
        (&["-Z", "-o", &chain], "Error loading the certificate chain: "),
        (&["-Z", "-o", "ssl_ciphers=RC4"], "leave it out"),
        (&["-Z", "-o", &own, "-l", "notls:127.0.0.1"], "no address is left for it"),
        (&["-Z", "-o", &own, "-s", &none], "no address is left for it"),
        (&["-Z", "-o", &format!("{chain},ssl_verify_mode=2")], "-o ssl_ca_cert=FILE"),
    ] {
        let (code, _, error) = ended(farpool(home.path()).arg("kv").args(flags));
        assert!(code == 2 && error.contains(hint), "{flags:?}: {code}, {error}");
    }
}

#[test]
fn the_log_warns_of_doors_that_are_open_to_other_hosts() {
    let home = tempfile::tempdir().expect("a home");
    let passwords = home.path().join("passwords");
    std::fs::write(&passwords, "foo:bar\n").expect("a file of passwords");
    let passwords = passwords.display().to_string();
    let log = |flags: &[&str]| Kv::start(home.path(), flags).log();
    let warned = |flags: &[&str]| log(flags).contains("whoever reaches this address");
    assert!(!log(&[]).contains("whoever"), "on 127.0.0.1 alone");
    assert!(warned(&["-l", "0.0.0.0"]));
    let readable = log(&["-l", "0.0.0.0", "-Y", &passwords]);
    assert!(readable.contains("whoever is on the way to this address reads passwords"));
    if make_certificate(home.path()) {
        let file = |name: &str| home.path().join(name).display().to_string();
        let own = format!("ssl_chain_cert={},ssl_key={}", file("server.pem"), file("server.key"));
        let roots = format!("{own},ssl_verify_mode=2,ssl_ca_cert={}", file("server.pem"));
        // The test's own client comes without TLS.
        let listen = ["-Z", "-l", "0.0.0.0:0,notls:127.0.0.1", "-o"];
        assert!(log(&[&listen[..], &[&own]].concat()).contains("it encrypts, but asks"));
        assert!(!log(&[&listen[..], &[&roots]].concat()).contains("whoever"), "certificates");
        let both = [&listen[..], &[&own, "-Y", &passwords]].concat();
        assert!(!log(&both).contains("whoever"), "passwords");
    }
    let metrics = free_address().port();
    assert!(warned(&["--metrics", &format!("0.0.0.0:{metrics}")]), "names of keys");
    let keyvault = free_address().port();
    assert!(warned(&["--keyvault", &format!("tcp://0.0.0.0:{keyvault}")]));
}

#[test]
fn the_service_is_confined() {
    /// systemd's measure of what a service may do: from 0, nothing, to 10.
    const EXPOSURE_MAX: f64 = 3.0;
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/systemd/farpool-kv.service");
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", unit])
        .output();
    let text = output.map(|it| it.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let Some((_, rating)) = text.split_once("Overall exposure level for farpool-kv.service: ")
    else {
        skip("systemd-analyze cannot rate a unit file here (apt-get install systemd)");
        return;
    };
    let rating: f64 = rating.split(' ').next().and_then(|it| it.parse().ok()).expect("a number");
    assert!(rating <= EXPOSURE_MAX, "{text}");
}
