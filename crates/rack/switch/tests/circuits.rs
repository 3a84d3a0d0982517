//! Five hosts on an emulated switch: a circuit is necessary and sufficient.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use farpool_hosts::{Host, Hosts, SwitchSide, Wiring};
use farpool_switch::{
    Circuit, EmulatedError, EmulatedSwitch, EmulatedSwitchDriver, SwitchDriver, SwitchError,
};

const HOSTS: usize = 5;
const PORT: u16 = 7;
/// How long a connection is tried that cannot be made: without a circuit no host refuses it.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(300);
/// Longest wait for a condition: one that takes longer never comes true.
const PATIENCE: Duration = Duration::from_secs(30);

fn make() -> Option<Hosts> {
    let hosts = Hosts::builder(HOSTS, Wiring::Switch).make();
    hosts.map_err(|reason| farpool_testkit::skip(&reason.to_string())).ok()
}

fn side(hosts: &Hosts) -> &SwitchSide {
    hosts.switch().expect("wired for a switch")
}

fn open(hosts: &Hosts) -> EmulatedSwitch {
    let side = side(hosts);
    side.enter(|| EmulatedSwitch::open("s0", side.ports())).expect("enter").expect("open")
}

fn circuit(a: u32, b: u32) -> Circuit {
    Circuit::new(a, b).expect("two ports")
}

fn listen(host: &Host) -> TcpListener {
    let address = (host.address(), PORT);
    host.enter(|| TcpListener::bind(address)).expect("enter").expect("bind")
}

fn connect_within(time: Duration, from: &Host, to: &Host) -> std::io::Result<TcpStream> {
    let address = SocketAddr::from((to.address(), PORT));
    from.enter(|| TcpStream::connect_timeout(&address, time)).expect("enter")
}

fn connect(from: &Host, to: &Host) -> std::io::Result<TcpStream> {
    connect_within(PATIENCE, from, to)
}

fn is_cut_off(from: &Host, to: &Host) -> bool {
    connect_within(CONNECT_TIMEOUT, from, to).is_err()
}

fn received(host: &Host) -> u64 {
    host.counters().expect("counters").received_frames
}

fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    farpool_testkit::wait_until(what, PATIENCE, condition);
}

/// Sends `bytes` bytes from `near` and checks that all of them reach `far` unchanged.
fn echo(near: &mut TcpStream, far: &mut TcpStream, bytes: usize) {
    let sent: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| near.write_all(&sent).expect("send"));
        let mut got = vec![0; bytes];
        far.read_exact(&mut got).expect("receive");
        assert!(got == sent, "bytes changed on the way");
    });
}

#[test]
fn without_a_circuit_not_a_packet_passes() {
    let Some(hosts) = make() else { return };
    let _switch = open(&hosts);
    let _listeners: Vec<_> = hosts.iter().map(listen).collect();
    for to in 1..HOSTS {
        assert!(is_cut_off(&hosts[0], &hosts[to]));
    }
    let asked = side(&hosts).counters(0).expect("counters").received_frames;
    assert!(asked > 0, "A's questions reached the switch");
    for host in &hosts {
        assert_eq!(received(host), 0, "{} received something", host.name());
    }
}

#[test]
fn a_circuit_joins_two_hosts_and_nobody_else_until_it_is_down() {
    let Some(hosts) = make() else { return };
    let mut switch = open(&hosts);
    let listeners: Vec<_> = hosts.iter().map(listen).collect();
    let asked = side(&hosts).counters(0).expect("counters").received_frames;
    switch.connect(circuit(2, 0)).expect("A-C");
    assert_eq!(switch.circuits().expect("circuits"), [circuit(0, 2)]);
    let mut near = connect(&hosts[0], &hosts[2]).expect("A reaches C");
    let (mut far, _) = listeners[2].accept().expect("accept");
    echo(&mut near, &mut far, 8 << 20);
    echo(&mut far, &mut near, 8 << 20);
    assert!(connect(&hosts[2], &hosts[0]).is_ok(), "both directions");
    for other in [1, 3, 4] {
        assert!(is_cut_off(&hosts[0], &hosts[other]));
        assert!(is_cut_off(&hosts[other], &hosts[0]));
        assert_eq!(received(&hosts[other]), 0);
    }
    let counted = switch.counters()[0];
    assert!(counted.from_low.bytes > 8 << 20 && counted.from_high.bytes > 8 << 20);
    wait_until("every frame that A sent to be counted", || {
        let sent = side(&hosts).counters(0).expect("counters").received_frames;
        let counted = switch.counters()[0].from_low;
        counted.frames + counted.dropped == sent - asked
    });
    switch.disconnect(circuit(0, 2)).expect("down");
    assert_eq!(switch.circuits().expect("circuits"), []);
    assert!(is_cut_off(&hosts[0], &hosts[2]));
}

#[test]
fn traffic_stops_when_the_circuit_is_down_and_goes_on_when_it_is_up_again() {
    let Some(hosts) = make() else { return };
    let mut switch = open(&hosts);
    switch.connect(circuit(0, 2)).expect("A-C");
    let to = SocketAddr::from((hosts[2].address(), PORT));
    let bind = |host: &Host, port| UdpSocket::bind((host.address(), port)).expect("bind");
    let from = hosts[0].enter(|| bind(&hosts[0], 0)).expect("enter");
    let _sink = hosts[2].enter(|| bind(&hosts[2], PORT)).expect("enter");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&stop);
        let flag = stop.0;
        let from = &from;
        scope.spawn(move || {
            while !flag.load(Relaxed) {
                // A datagram that is refused for lack of space or of an address is not needed: the
                // next follows.
                let _ = from.send_to(&[7; 1000], to);
            }
        });
        for _ in 0..20 {
            let before = received(&hosts[2]);
            wait_until("traffic", || received(&hosts[2]) > before + 10);
            switch.disconnect(circuit(0, 2)).expect("down");
            let after = received(&hosts[2]);
            // The sender continues: the switch's side sees that, C receives nothing.
            let port = || side(&hosts).counters(0).expect("counters").received_frames;
            let seen = port();
            wait_until("the sender to go on", || port() > seen + 10);
            assert_eq!(received(&hosts[2]), after, "a frame passed without a circuit");
            switch.connect(circuit(0, 2)).expect("up again");
        }
    });
}

/// Ends a thread of the test even if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn frames_never_travel_over_a_circuit_that_came_after_them() {
    let Some(hosts) = make() else { return };
    let mut switch = open(&hosts);
    // A must not ask for B's address, so that it sends only what the test makes it send.
    let (a, b, c) = (&hosts[0], &hosts[1], &hosts[2]);
    let known = ["lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"];
    let mut neighbour = a.command("ip");
    neighbour.args(["neighbour", "replace", &b.address().to_string()]).args(known);
    assert!(neighbour.status().expect("ip").success());
    let from = a.enter(|| UdpSocket::bind((a.address(), 0))).expect("enter").expect("bind");
    let say = || from.send_to(&[7; 1000], (b.address(), PORT)).expect("send");
    for _ in 0..50 {
        say();
        switch.connect(circuit(0, 1)).expect("A-B");
        (0..200).for_each(|_| {
            say();
        });
        switch.disconnect(circuit(0, 1)).expect("down");
        say();
        switch.connect(circuit(0, 2)).expect("A-C");
        switch.disconnect(circuit(0, 2)).expect("down");
    }
    assert!(received(b) > 0, "some came through while A and B were joined");
    assert_eq!(received(c), 0, "what A sent before it was joined with C went to C");
}

#[test]
fn a_port_that_is_not_there_or_in_use_is_refused_and_nothing_changes() {
    let Some(hosts) = make() else { return };
    let directory = tempfile::tempdir().expect("directory");
    let switch = open(&hosts);
    let control = switch.serve(directory.path().join("control")).expect("serve");
    let mut driver = EmulatedSwitchDriver::connect_to(control.path()).expect("driver");
    assert_eq!((driver.name(), driver.ports()), ("s0", 5));
    driver.connect(circuit(0, 2)).expect("A-C");
    driver.connect(circuit(0, 2)).expect("again, which is nothing");
    let refused = driver.connect(circuit(2, 3)).expect_err("C is in a circuit");
    assert!(
        matches!(&refused, SwitchError::PortInUse { switch, port: 2, low: 0, high: 2 } if switch == "s0"),
        "{refused}"
    );
    let refused = driver.connect(circuit(1, 5)).expect_err("there are five ports");
    assert!(matches!(refused, SwitchError::NoPort { port: 5, .. }), "{refused}");
    let refused = driver.disconnect(circuit(9, 1)).expect_err("there are five ports");
    assert!(matches!(refused, SwitchError::NoPort { port: 9, .. }), "{refused}");
    driver.disconnect(circuit(3, 4)).expect("it does not stand");
    assert_eq!(driver.circuits().expect("circuits"), [circuit(0, 2)]);
    assert_eq!(driver.counters().expect("counters")[0].circuit, circuit(0, 2));
}

#[test]
fn interfaces_that_cannot_be_ports_are_refused_by_name() {
    let Some(hosts) = make() else { return };
    let open = |names: &[&str]| {
        let opened = side(&hosts).enter(|| EmulatedSwitch::open("s0", names).map(drop));
        opened.expect("enter").expect_err("refused")
    };
    assert!(matches!(open(&[]), EmulatedError::PortCount(0)));
    assert!(matches!(open(&["port0", "port0"]), EmulatedError::Twice(name) if name == "port0"));
    assert!(open(&["port0", "nowhere"]).to_string().contains("nowhere"));
}

/// The switch as a process, which can be killed.
struct Process(Child);

impl Process {
    fn start(side: &SwitchSide, control: &std::path::Path) -> Self {
        let mut command: Command = side.command(env!("CARGO_BIN_EXE_farpool-switch"));
        command.arg("--control").arg(control).args(side.ports()).stdout(Stdio::piped());
        let mut process = Self(command.spawn().expect("the switch starts"));
        let stdout = process.0.stdout.take().expect("piped");
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        assert!(line.starts_with("5 ports"), "{line:?}");
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn circuits_end_with_the_switch_and_the_driver_says_so() {
    let Some(hosts) = make() else { return };
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("control");
    let mut early = EmulatedSwitchDriver::at(&path, "s9");
    let absent = early.circuits().expect_err("nobody is there yet").to_string();
    assert!(absent.contains("s9 does not answer"), "{absent}");
    let process = Process::start(side(&hosts), &path);
    assert_eq!(early.circuits().expect("it is there now, and was not started again"), []);
    let mut driver = EmulatedSwitchDriver::connect_to(&path).expect("driver");
    let _listener = listen(&hosts[2]);
    driver.connect(circuit(0, 2)).expect("A-C");
    connect(&hosts[0], &hosts[2]).expect("A reaches C");
    // kill -9.
    drop(process);
    assert!(is_cut_off(&hosts[0], &hosts[2]), "no switch, no circuit");
    for _ in 0..2 {
        let gone = driver.circuits().expect_err("nobody answers");
        assert!(matches!(gone, SwitchError::Unreachable { .. }), "{gone}");
    }
    let _process = Process::start(side(&hosts), &path);
    let again = driver.connect(circuit(1, 3)).expect_err("its caller must know");
    assert!(matches!(again, SwitchError::Restarted { .. }), "{again}");
    assert_eq!(driver.circuits().expect("circuits"), []);
    driver.connect(circuit(0, 2)).expect("A-C");
    connect(&hosts[0], &hosts[2]).expect("A reaches C again");
}

#[test]
fn control_answers_while_traffic_is_heavy() {
    let Some(hosts) = make() else { return };
    let directory = tempfile::tempdir().expect("directory");
    let mut switch = open(&hosts);
    let control = switch.serve(directory.path().join("control")).expect("serve");
    let mut driver = EmulatedSwitchDriver::connect_to(control.path()).expect("driver");
    switch.connect(circuit(0, 2)).expect("A-C");
    let listener = listen(&hosts[2]);
    let mut near = connect(&hosts[0], &hosts[2]).expect("A reaches C");
    let (mut far, _) = listener.accept().expect("accept");
    std::thread::scope(|scope| {
        // Ends when the stream does.
        scope.spawn(move || std::io::copy(&mut far, &mut std::io::sink()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stop = StopOnDrop(&stop);
            let flag = stop.0;
            scope.spawn(move || {
                let block = vec![7; 1 << 20];
                while !flag.load(Relaxed) && near.write_all(&block).is_ok() {}
            });
            let carried = |driver: &mut EmulatedSwitchDriver| {
                driver.counters().expect("counters")[0].from_low.bytes
            };
            wait_until("traffic", || carried(&mut driver) > 1 << 20);
            for _ in 0..200 {
                driver.connect(circuit(1, 3)).expect("up");
                driver.disconnect(circuit(1, 3)).expect("down");
            }
            let before = carried(&mut driver);
            wait_until("traffic to go on", || carried(&mut driver) > before + (1 << 20));
        });
    });
}

#[test]
fn a_switch_that_is_asked_to_end_takes_its_socket_along() {
    let Some(hosts) = make() else { return };
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("control");
    let mut process = Process::start(side(&hosts), &path);
    let mut driver = EmulatedSwitchDriver::connect_to(&path).expect("driver");
    driver.connect(circuit(0, 2)).expect("A-C");
    let id = rustix::process::Pid::from_child(&process.0);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("SIGTERM");
    assert!(process.0.wait().expect("wait").success());
    assert!(!path.exists());
    assert!(matches!(driver.circuits(), Err(SwitchError::Unreachable { .. })));
}
