//! The authority's folder: what it writes, what it refuses, what a crash leaves.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{Rack, from_now, role_of};
use farpool_identity::authority::{Authority, AuthorityError, Host, Register, Request, State};
use farpool_identity::{Certificate, Credentials, Files, Reason, pem};
use rustls::pki_types::UnixTime;

fn mode(path: &Path) -> u32 {
    path.metadata().expect("it is there").permissions().mode() & 0o777
}

fn request(path: &str) -> Request {
    Request { role: role_of(path), hosts: Vec::new(), days: 7 }
}

#[test]
fn keys_are_their_owners_and_nothing_is_overwritten() {
    let mut rack = Rack::new();
    let now = UnixTime::now();
    let folder = rack.authority.folder().to_owned();
    let issued = rack.issue("node/a");
    for secret in ["ca.key", "node-a/tls.key", "issued.json"] {
        assert_eq!(mode(&folder.join(secret)), 0o600, "{secret}");
    }
    for shut in [&folder, &issued.folder] {
        assert_eq!(mode(shut), 0o700);
    }
    let key = fs::read(folder.join("ca.key")).expect("readable");
    drop(rack.authority);
    let again = Authority::init(&folder, "rack".parse().expect("a name"), now);
    let refused = again.expect_err("it is there");
    assert!(matches!(refused, AuthorityError::Exists { .. }), "{refused}");
    // A part of one is not overwritten either.
    fs::remove_file(folder.join("issued.json")).expect("removed");
    assert!(Authority::init(&folder, "rack".parse().expect("a name"), now).is_err());
    assert_eq!(fs::read(folder.join("ca.key")).expect("readable"), key);
    let refused = Authority::open(&folder, now).expect_err("there is no register");
    assert!(matches!(refused, AuthorityError::Missing { .. }), "{refused}");
}

#[test]
fn the_folder_of_an_identity_has_what_its_host_needs() {
    let mut rack = Rack::new();
    let issued = rack.issue("node/a");
    let mut names: Vec<String> = fs::read_dir(&issued.folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    assert_eq!(names, ["ca.crt", "revoked.crl", "tls.crt", "tls.key"]);
    let chain = pem::certificates(&issued.folder.join("tls.crt")).expect("a certificate");
    let read = Certificate::read(&chain[0]).expect("one of ours");
    assert_eq!(read.identity, issued.record.identity);
    assert_eq!(read.serial, issued.record.serial);
    assert_eq!(read.not_before_s, issued.record.not_before_s);
    assert_eq!(read.not_after_s, issued.record.not_after_s);
    assert!(read.not_before_s < UnixTime::now().as_secs(), "clocks may differ a little");
}

#[test]
fn an_identity_has_one_valid_certificate_until_it_is_renewed() {
    let mut rack = Rack::new();
    let now = UnixTime::now();
    let first = rack.issue("node/a").record;
    let refused = rack.authority.issue(request("node/a"), now).expect_err("it has one");
    assert!(refused.to_string().contains("farpool pki renew node-a"), "{refused}");
    let second = rack.authority.renew(&first.identity.role, None, now).expect("renewed").record;
    assert_ne!(first.serial, second.serial);
    assert_eq!((&first.hosts, first.days), (&second.hosts, second.days));
    let third = rack.authority.renew(&first.identity.role, Some(3), now).expect("renewed").record;
    assert_eq!(third.days, 3);
    // All are valid, and one word revokes them all.
    let serials = rack.authority.register().serials("node-a").expect("it is known");
    assert_eq!(serials.len(), 3);
    let done = rack.authority.revoke(&serials, Reason::Superseded, now).expect("revoked");
    assert_eq!(done.len(), 3);
    assert!(rack.authority.revoke(&serials, Reason::Superseded, now).expect("done").is_empty());
    let refused = rack.authority.renew(&first.identity.role, None, now);
    assert!(matches!(refused, Err(AuthorityError::Withdrawn(_))));
    // It may come back.
    let issued = rack.authority.issue(request("node/a"), now).expect("issued");
    Credentials::load(Files::in_folder(&issued.folder), now).expect("it is good");
}

#[test]
fn what_is_due_is_renewed_and_lives_no_longer_than_the_authority() {
    let mut rack = Rack::new();
    let now = UnixTime::now();
    rack.authority.issue(request("node/a"), now).expect("issued");
    rack.authority.issue(request("node/b"), from_now(-5 * 86_400)).expect("issued");
    rack.authority.issue(request("node/c"), from_now(-9 * 86_400)).expect("issued");
    let revoked = rack.authority.issue(request("node/d"), from_now(-5 * 86_400)).expect("issued");
    let serial = revoked.record.serial;
    rack.authority.revoke(&[serial], Reason::Unspecified, now).expect("revoked");
    let due = rack.authority.register().due(now);
    assert_eq!(due, [role_of("node/b"), role_of("node/c")]);
    let state = |path: &str| rack.authority.register().last(&role_of(path)).map(|it| it.state(now));
    assert_eq!(state("node/a"), Some(State::Valid));
    assert_eq!(state("node/c"), Some(State::Expired));
    assert_eq!(state("node/d"), Some(State::Revoked));
    for days in [0, 3651, u64::MAX] {
        let refused = rack.authority.issue(Request { days, ..request("node/x") }, now);
        assert!(matches!(refused, Err(AuthorityError::Days { .. })), "{days}");
    }
}

#[test]
fn a_word_names_one_identity() {
    let mut rack = Rack::new();
    for path in ["node/a", "node/b", "controller/a", "program/t", "program/t/p"] {
        rack.issue(path);
    }
    let register = rack.authority.register();
    let named = |word: &str| register.named(word);
    for (word, path) in [
        ("node-a", "node/a"),
        ("b", "node/b"),
        ("spiffe://rack/controller/a", "controller/a"),
        ("t", "program/t"),
        ("program-p@t", "program/t/p"),
    ] {
        assert_eq!(named(word).expect(word), role_of(path));
    }
    let refused = named("a").expect_err("two have it");
    assert!(refused.to_string().contains("controller-a or node-a"), "{refused}");
    for word in ["c", "", "spiffe://other/node/a", "00ff"] {
        assert!(matches!(named(word), Err(AuthorityError::Unknown(_))), "{word}");
    }
    let serial = register.last(&role_of("node/b")).expect("it is").serial.clone();
    assert_eq!(register.serials(&serial.to_string()).expect("one"), [serial]);
}

#[test]
fn only_servers_have_addresses() {
    let mut rack = Rack::new();
    let hosts: Vec<Host> = vec!["h".parse().expect("a host")];
    let refused = rack.authority.issue(Request { hosts, ..request("program/t") }, UnixTime::now());
    assert!(matches!(refused, Err(AuthorityError::Hosts(_))));
    for text in ["", "a b", "-", "a/b", "1.2.3.4.5:80"] {
        assert!(text.parse::<Host>().is_err(), "{text}");
    }
}

/// The register is written first: a list that lags behind it was left by a crash.
#[test]
fn a_list_that_a_crash_left_behind_is_made_again() {
    let mut rack = Rack::new();
    let issued = rack.issue("program/t");
    let folder = rack.authority.folder().to_owned();
    let now = UnixTime::now();
    let lists = [folder.join("revoked.crl"), issued.folder.join("revoked.crl")];
    let before = lists.each_ref().map(|path| fs::read(path).expect("readable"));
    rack.authority.revoke(&[issued.record.serial], Reason::Unspecified, now).expect("revoked");
    for (path, before) in lists.iter().zip(before) {
        fs::write(path, before).expect("written");
    }
    drop(rack.authority);
    Authority::open(&folder, now).expect("it opens");
    let refused = Credentials::load(Files::in_folder(&issued.folder), now);
    assert!(refused.expect_err("revoked").to_string().contains("revoked"));
    // One that is damaged, too.
    fs::write(&lists[0], "damage").expect("written");
    Authority::open(&folder, now).expect("it opens");
    assert!(fs::read_to_string(&lists[0]).expect("readable").contains("X509 CRL"));
}

#[test]
fn damaged_files_are_named_and_no_key_is_shown() {
    let mut rack = Rack::new();
    rack.issue("node/a");
    let folder = rack.authority.folder().to_owned();
    let now = UnixTime::now();
    let key = fs::read_to_string(folder.join("ca.key")).expect("readable");
    let words: Vec<&str> = key.lines().filter(|line| !line.contains("---")).collect();
    let other = Rack::new();
    let theirs = fs::read_to_string(other.authority.folder().join("ca.key")).expect("readable");
    let cut = &key[..key.len() / 2];
    drop(rack.authority);
    for (name, damage) in [
        ("ca.key", cut),
        ("ca.key", &theirs[..]),
        ("ca.crt", ""),
        ("issued.json", "{}"),
        (
            "issued.json",
            "{\"version\":2,\"rack\":\"rack\",\"not_after_s\":1,\"list_number\":1,\"issued\":[]}",
        ),
    ] {
        let path = folder.join(name);
        let good = fs::read(&path).expect("readable");
        fs::write(&path, damage).expect("written");
        let refused = Authority::open(&folder, now).expect_err(name).to_string();
        assert!(refused.contains("is damaged"), "{refused}");
        assert!(!words.iter().any(|word| refused.contains(word)), "it shows a key");
        fs::write(&path, good).expect("written");
    }
    Authority::open(&folder, now).expect("repaired");
    Register::read(&folder).expect("repaired");
}

/// Two at once: the second waits, and sees what the first has issued.
#[test]
fn commands_at_the_same_time_lose_nothing() {
    const EACH: usize = 20;
    let rack = Rack::new();
    let folder = rack.authority.folder().to_owned();
    // It holds the folder as long as it is open.
    drop(rack.authority);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let folder = &folder;
            scope.spawn(move || {
                for number in 0..EACH {
                    let now = UnixTime::now();
                    let mut authority = Authority::open(folder, now).expect("it opens");
                    let request = request(&format!("node/{thread}-{number}"));
                    authority.issue(request, now).expect("issued");
                }
            });
        }
    });
    assert_eq!(Register::read(&folder).expect("readable").issued.len(), 2 * EACH);
}
