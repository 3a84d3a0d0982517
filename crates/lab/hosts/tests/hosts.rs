//! Real namespaces: who reaches whom, what is counted, and that nothing is left.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use farpool_hosts::{Host, Hosts, HostsError, MAX_HOSTS, MAX_SWITCH_LINKS, Wiring};

/// How long a condition may take to come true.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a connection is tried that cannot be made.
const IN_VAIN: Duration = Duration::from_millis(500);
/// Environment variable, set in the copy of this test that is to be killed.
const VICTIM: &str = "FARPOOL_HOSTS_VICTIM";

fn make(count: usize, wiring: Wiring) -> Option<Hosts> {
    made(Hosts::builder(count, wiring).make())
}

fn made(result: Result<Hosts, HostsError>) -> Option<Hosts> {
    result.map_err(|reason| farpool_testkit::skip(&reason.to_string())).ok()
}

fn listen(host: &Host) -> TcpListener {
    let listener = host.enter(|| TcpListener::bind((host.address(), 0)));
    listener.expect("enter").expect("bind")
}

fn reach(from: &Host, to: SocketAddr) -> TcpStream {
    from.enter(|| TcpStream::connect_timeout(&to, PATIENCE)).expect("enter").expect("reaches it")
}

/// True if nobody answers: a host without a way to another waits in vain.
fn is_cut_off(from: &Host, to: SocketAddr) -> bool {
    from.enter(|| TcpStream::connect_timeout(&to, IN_VAIN)).expect("enter").is_err()
}

/// Sends a word from one host to another.
fn talk(from: &Host, to: &Host) {
    let listener = listen(to);
    let mut near = reach(from, listener.local_addr().expect("address"));
    let (mut far, peer) = listener.accept().expect("accept");
    assert_eq!(peer.ip(), from.address());
    near.write_all(b"word").expect("send");
    let mut word = [0; 4];
    far.read_exact(&mut word).expect("receive");
    assert_eq!(&word, b"word");
}

fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    farpool_testkit::wait_until(what, PATIENCE, condition);
}

/// Whether a process is alive and not a zombie.
fn is_alive(process: u32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    text.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

#[test]
fn on_a_bridge_everybody_reaches_everybody() {
    let Some(hosts) = make(3, Wiring::Bridge) else { return };
    for from in &hosts {
        for to in hosts.iter().filter(|to| to.name() != from.name()) {
            talk(from, to);
        }
    }
    assert!(hosts.switch().is_none());
    assert_eq!(hosts.iter().map(Host::name).collect::<Vec<_>>(), ["A", "B", "C"]);
}

#[test]
fn back_to_back_two_reach_each_other_while_the_link_is_up() {
    let Some(hosts) = make(2, Wiring::Direct) else { return };
    talk(&hosts[0], &hosts[1]);
    hosts[0].set_link(false).expect("down");
    let listener = listen(&hosts[1]);
    let address = listener.local_addr().expect("address");
    assert!(is_cut_off(&hosts[0], address));
    hosts[0].set_link(true).expect("up");
    talk(&hosts[1], &hosts[0]);
    assert!(hosts[0].counters().expect("counters").received_frames > 0);
}

#[test]
fn on_a_switch_without_a_program_nothing_arrives() {
    let Some(hosts) = make(3, Wiring::Switch) else { return };
    let listener = listen(&hosts[2]);
    assert!(is_cut_off(&hosts[0], listener.local_addr().expect("address")));
    let side = hosts.switch().expect("the switch's side");
    assert_eq!(side.ports(), ["port0", "port1", "port2"]);
    assert!(side.counters(0).expect("counters").received_frames > 0, "A asked for C");
    for host in &hosts {
        assert_eq!(host.counters().expect("counters").received_frames, 0, "{}", host.name());
    }
    assert!(side.counters(3).is_err());
}

#[test]
fn wired_both_ways_a_host_has_a_network_of_each_kind() {
    let Some(hosts) = make(2, Wiring::BridgeAndSwitch { links: 2 }) else { return };
    talk(&hosts[0], &hosts[1]);
    let side = hosts.switch().expect("the switch's side");
    assert_eq!(side.ports(), ["port0", "port1", "port2", "port3"]);
    assert_eq!((side.ports_of(0), side.ports_of(1)), (0..2, 2..4));
    let address = hosts[1].data_address().expect("a second address");
    let listener = hosts[1].enter(|| TcpListener::bind((address, 0))).expect("enter");
    let address = listener.expect("bind").local_addr().expect("address");
    assert!(is_cut_off(&hosts[0], address), "no program is the switch");
    for link in 0..2 {
        assert!(side.counters(link).expect("counters").received_frames > 0, "A asked on all");
        assert_eq!(side.counters(2 + link).expect("counters").sent_frames, 0);
    }
}

#[test]
fn a_command_runs_on_its_host_within_its_memory() {
    let builder = Hosts::builder(2, Wiring::Bridge).memory_limit_bytes(64 << 20);
    let Some(hosts) = made(builder.make()) else { return };
    let told = hosts[1].command("ip").args(["-o", "-4", "address"]).output().expect("ip");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("192.0.2.2/24") && !told.contains("192.0.2.1/24"), "{told}");
    let told = hosts[1].command("cat").arg("/proc/self/cgroup").output().expect("cat");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("farpool-host-1-"), "{told}");
    assert!(hosts[1].group().expect("a group").used_bytes().is_some());
    assert!(!hosts[1].group().expect("a group").has_killed());
}

#[test]
fn too_few_and_too_many_are_refused() {
    let refused = |count, wiring| {
        matches!(Hosts::builder(count, wiring).make(), Err(HostsError::Count { .. }))
    };
    assert!(refused(0, Wiring::Bridge) && refused(MAX_HOSTS + 1, Wiring::Switch));
    assert!(refused(2, Wiring::BridgeAndSwitch { links: 0 }));
    assert!(refused(2, Wiring::BridgeAndSwitch { links: MAX_SWITCH_LINKS + 1 }));
    assert!(refused(3, Wiring::Direct) && refused(1, Wiring::Direct));
}

#[test]
fn what_runs_in_a_host_ends_with_it() {
    let Some(hosts) = make(1, Wiring::Bridge) else { return };
    let mut child = hosts[0].command("sleep").arg("60").spawn().expect("sleep");
    drop(hosts);
    assert!(!is_alive(child.id()));
    child.wait().expect("wait");
}

/// Not a test of its own: what the next one kills.
#[test]
fn victim() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    let builder = Hosts::builder(2, Wiring::Bridge).memory_limit_bytes(64 << 20);
    let Some(hosts) = made(builder.make()) else { return };
    // The child leaves the session, as daemons do.
    let mut child = hosts[1].command("setsid").args(["sleep", "60"]).spawn().expect("sleep");
    let file = hosts[1].group().expect("a group").members_file();
    println!("\nREADY {} {}", child.id(), file.display());
    std::io::stdout().flush().expect("stdout");
    child.wait().expect("wait");
}

#[test]
fn nothing_is_left_when_the_test_is_killed() {
    let own = std::env::current_exe().expect("this test");
    let mut child = Command::new(own)
        .args(["--exact", "victim", "--nocapture", "--test-threads=1"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("a copy of this test");
    let stdout = BufReader::new(child.stdout.take().expect("piped"));
    let mut skipped = None;
    let ready = stdout.lines().map_while(Result::ok).find_map(|line| {
        skipped = skipped.take().or_else(|| line.contains("SKIPPED: ").then(|| line.clone()));
        line.strip_prefix("READY ").map(str::to_owned)
    });
    child.kill().expect("kill -9");
    child.wait().expect("wait");
    let Some(ready) = ready else {
        println!("{}", skipped.expect("it is ready or says why it is not"));
        return;
    };
    let (process, members) = ready.split_once(' ').expect("two words");
    let process: u32 = process.parse().expect("a process id");
    wait_until("the process in the host to end", || !is_alive(process));
    wait_until("the group to be removed", || !std::path::Path::new(members).exists());
}
