//! Connections of those who do not say whose they are, who take more than their share, or who use
//! another user's client.

mod common;

use common::*;
use farpool_blade::BladeConfig;
use farpool_wire::*;
use rustix::process::Uid;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

/// A user that has nothing on a Debian system.
const NOBODY: u32 = 65534;

#[test]
fn who_does_not_greet_is_closed_and_who_does_stays() {
    // Long enough for the client, whose greeting a busy machine may delay.
    let config = BladeConfig { hello_limit: Duration::from_secs(5), ..config_of(1) };
    let blade = TestBlade::start(config);
    // One more than threads: each of them has a silent one.
    let mut silent: Vec<_> =
        [blade.unix(), blade.tcp(), blade.tcp()].map(Peer::connect).into_iter().collect();
    let mut client = blade.client(1);
    // Half a hello is none.
    let mut half = Peer::connect(blade.tcp());
    std::io::Write::write_all(&mut half.stream, b"FP").unwrap();
    silent.push(half);
    for peer in &mut silent {
        assert!(peer.is_closed());
    }
    client.ask(&Request::Ping).done();
    wait_until("only the client's connection is left", || client.stat().0.connections.get() == 1);
}

#[test]
fn one_source_does_not_keep_the_others_out() {
    let blade = TestBlade::start(BladeConfig { connections_limit: 8, ..config_of(1) });
    let greedy: Vec<_> = (1..=4).map(|id| blade.client(id)).collect();
    assert!(Peer::connect(blade.unix()).is_closed(), "a fifth of this user");
    let mut other = Peer::hello(blade.tcp(), 5);
    other.ask(&Request::Ping).done();
    drop(greedy);
    wait_until("they are gone", || other.stat().0.connections.get() == 1);
    blade.client(6).ask(&Request::Ping).done();
}

/// Runs as another user, if this one may.
fn as_nobody<T: Send>(what: impl FnOnce() -> T + Send) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can connect as another user");
        return None;
    }
    let run = || {
        // The system call changes this thread only.
        rustix::thread::set_thread_uid(Uid::from_raw(NOBODY)).expect("root may");
        what()
    };
    std::thread::scope(|scope| Some(scope.spawn(run).join().expect("it runs")))
}

#[test]
fn another_users_client_cannot_be_used_by_who_knows_its_id() {
    let blade = TestBlade::start(BladeConfig { socket_mode: 0o666, ..config_of(2) });
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(blade.directory.path(), open).unwrap();
    let hello_of = |id: u128, slot: u32, purpose: Purpose| {
        let hello = Hello { slot, purpose, ..hello(id) };
        let (peer, answer) = Peer::hello_with(blade.unix(), &hello);
        (peer, answer.refused())
    };
    let _roots = blade.client(1);
    let stolen = [Purpose::Client, Purpose::Keeper];
    let Some(refused) = as_nobody(|| stolen.map(|purpose| hello_of(1, 1, purpose).1)) else {
        return;
    };
    assert_eq!(refused, [Some(ErrorCode::NotPermitted); 2]);
    // Nor over TCP, where it is not known who asks.
    let (_peer, answer) = Peer::hello_with(blade.tcp(), &Hello { slot: 2, ..hello(1) });
    assert_eq!(answer.refused(), Some(ErrorCode::NotPermitted));

    // Root's keeper may come first, and root may use what is another user's.
    let _keeper = hello_of(2, 0, Purpose::Keeper);
    let theirs = as_nobody(|| hello_of(2, 1, Purpose::Client)).expect("as above");
    assert_eq!(theirs.1, None);
    assert_eq!(hello_of(2, 2, Purpose::Client).1, None);
    assert_eq!(hello_of(2, 3, Purpose::Keeper).1, None);
}
