//! A rack like dReDBox's: far memory uses circuits of a switch that the controller sets, while
//! controller, nodes and programs communicate over a separate network. A's program gets its memory
//! from C and D; B is a bystander, on which the controller runs.

use std::fmt::Write;

use farpool_e2e::rack::Daemon;
use farpool_e2e::run::Running;
use farpool_e2e::stage::{PATIENCE, Stage};
use farpool_e2e::{network, turn, wait_until};
use farpool_hosts::{Hosts, Wiring};
use farpool_switch::{CircuitCounters, ControlServer, EmulatedSwitch};
use serde_json::Value;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const D: usize = 3;
/// Links of each host: A needs two circuits while its data moves.
const LINKS: usize = 2;
/// More than all far memory once: pages are moved out and fetched repeatedly.
const FAR_BYTES: u64 = 64 << 20;

/// The switch of a rack, and the control server that the controller drives it by.
struct Switch {
    _control: ControlServer,
    emulated: EmulatedSwitch,
}

impl Switch {
    fn start(stage: &Stage) -> Switch {
        let side = stage.hosts().switch().expect("wired for a switch");
        let opened = side.enter(|| EmulatedSwitch::open("s0", side.ports()));
        let emulated = opened.expect("enter").expect("open");
        let control = emulated.serve(socket(stage)).expect("a control socket");
        Switch { _control: control, emulated }
    }

    /// The circuit between two hosts, whichever of their ports it joins.
    fn circuit(&self, stage: &Stage, one: usize, other: usize) -> Option<CircuitCounters> {
        let side = stage.hosts().switch().expect("wired for a switch");
        let is_on = |port: u32, host: usize| {
            side.ports_of(host).contains(&usize::try_from(port).expect("a port"))
        };
        self.emulated.counters().into_iter().find(|counters| {
            let (low, high) = counters.circuit.ports();
            (is_on(low, one) && is_on(high, other)) || (is_on(low, other) && is_on(high, one))
        })
    }
}

fn socket(stage: &Stage) -> std::path::PathBuf {
    stage.folder().join("s0.sock")
}

/// Bytes to the host with the higher port: what A's program sent, as A has the lowest ports.
fn sent_away(counters: Option<CircuitCounters>) -> u64 {
    counters.map_or(0, |counters| counters.from_low.bytes)
}

/// A and B compute, C and D have memory; each has two links to the switch.
fn topology() -> String {
    let mut text =
        String::from("[[rack]]\nname = \"r0\"\n[[tray]]\nname = \"t0\"\nrack = \"r0\"\n");
    text += "[[switch]]\nname = \"s0\"\nkind = \"circuit\"\nports = 8\n";
    for name in ["A", "B"] {
        let _ = writeln!(text, "[[compute]]\nname = {name:?}\ntray = \"t0\"\nports = {LINKS}");
    }
    for name in ["C", "D"] {
        let _ = writeln!(
            text,
            "[[memory]]\nname = {name:?}\ntray = \"t0\"\nports = {LINKS}\ncapacity = \"512MiB\"\n\
             read_bandwidth = \"1GiB/s\"\nwrite_bandwidth = \"1GiB/s\""
        );
    }
    for (host, name) in ["A", "B", "C", "D"].into_iter().enumerate() {
        for link in 0..LINKS {
            let port = host * LINKS + link;
            let _ = writeln!(
                text,
                "[[link]]\nfrom = \"{name}:{link}\"\nto = \"s0:{port}\"\nbandwidth = \"1GiB/s\""
            );
        }
    }
    text
}

/// Starts the hosts, the switch and a controller that drives it.
fn start() -> Option<(Stage, Switch)> {
    let wiring = Wiring::BridgeAndSwitch { links: LINKS };
    let mut stage = Stage::new(network::make(Hosts::builder(4, wiring))?, B);
    let switch = Switch::start(&stage);
    start_control(&mut stage);
    Some((stage, switch))
}

fn start_control(stage: &mut Stage) {
    let path = stage.folder().join("topology.toml");
    std::fs::write(&path, topology()).expect("topology");
    let (path, at) = (path.display().to_string(), format!("s0={}", socket(stage).display()));
    stage.start_control(&["--topology", &path, "--switch", &at]);
}

/// A node whose blade is on the network of the switch.
fn lend(stage: &Stage, host: usize) -> Daemon {
    let address = stage.hosts()[host].data_address().expect("wired both ways");
    stage.node(host, address, "512MiB")
}

fn circuits(stage: &Stage) -> Vec<Value> {
    stage.ask(&["circuit", "list"])["circuits"].as_array().cloned().expect("a list")
}

/// Frames that the switch has sent to a host.
fn frames_to(stage: &Stage, host: usize) -> u64 {
    let side = stage.hosts().switch().expect("wired for a switch");
    let ports = side.ports_of(host);
    ports.map(|port| side.counters(port).expect("counters").sent_frames).sum()
}

fn filled(mut running: Running) -> Running {
    running.wait_for_output("filled", 2);
    running
}

fn wait_until_released(stage: &Stage, switch: &Switch) {
    wait_until("the circuit is taken down", PATIENCE, || {
        (switch.emulated.counters().is_empty() && circuits(stage).is_empty()).then_some(())
    });
    assert_eq!(stage.segments(), Vec::<Value>::new());
}

#[test]
fn a_circuit_is_set_up_for_a_program_and_moves_with_its_data() {
    let _turn = turn();
    let Some((stage, switch)) = start() else { return };
    let _c = lend(&stage, C);
    let mut running = filled(stage.program(A, "600"));
    let listed = circuits(&stage);
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!((&listed[0]["standing"], &listed[0]["segments"]), (&true.into(), &1.into()));
    wait_until("pages go over the circuit to C", PATIENCE, || {
        (sent_away(switch.circuit(&stage, A, C)) > FAR_BYTES).then_some(())
    });
    let _d = lend(&stage, D);
    assert_eq!((frames_to(&stage, B), frames_to(&stage, D)), (0, 0), "they see none of it");

    let task = stage.ask(&["node", "drain", "C", "--wait"]);
    assert_eq!(task["state"], "done", "{task}");
    wait_until("the old circuit is taken down", PATIENCE, || {
        switch.circuit(&stage, A, C).is_none().then_some(())
    });
    assert!(running.is_running(), "its data moved while it ran: {}", running.stderr());
    let moved = switch.circuit(&stage, A, D);
    assert!(sent_away(moved) > FAR_BYTES, "its data is on D: {moved:?}");
    require_order(&stage, &["circuits-changed", "segment-evacuated", "circuits-changed"]);
    stage.end_programs();
    running.finish().require_success().require_far();
    wait_until_released(&stage, &switch);
    assert_eq!(frames_to(&stage, B), 0, "a bystander sees none of it");
}

/// Waits until the events of these kinds since the move began are exactly these, in this order.
fn require_order(stage: &Stage, kinds: &[&str]) {
    let what = format!("since the move began: {kinds:?}");
    wait_until(&what, PATIENCE, || {
        let events = stage.events();
        let since = events.iter().skip_while(|event| event["kind"] != "segment-move-begun");
        let seen = since.filter_map(|event| event["kind"].as_str());
        seen.filter(|kind| kinds.contains(kind)).eq(kinds.iter().copied()).then_some(())
    });
}

#[test]
fn without_its_switch_no_memory_gets_ready_and_the_program_says_why() {
    let _turn = turn();
    let Some((mut stage, switch)) = start() else { return };
    let _c = lend(&stage, C);
    drop(switch);
    // A controller that is started meanwhile serves as usual.
    stage.kill_control();
    start_control(&mut stage);
    let mut running = stage.program(A, "2");
    wait_until("the program says what it waits for", PATIENCE, || {
        let said = running.stderr();
        let names = ["no far memory yet", "of switch s0 does not stand", "s0 does not answer"];
        names.iter().all(|name| said.contains(name)).then_some(())
    });
    let segments = stage.segments();
    assert_eq!(segments.len(), 1, "{segments:?}");
    assert_eq!(segments[0]["state"], "pending");
    let told = segments[0]["waits_for"].to_string();
    assert!(told.contains("s0 does not answer"), "{told}");
    assert!(circuits(&stage).iter().all(|circuit| circuit["standing"] == false));
    assert_eq!(running.stdout(), "", "it has not begun");
    assert!(running.is_running(), "{}", running.stderr());
    // When the switch is back, the program gets its memory.
    let switch = Switch::start(&stage);
    let outcome = running.finish();
    outcome.require_success().require_far();
    wait_until_released(&stage, &switch);
}
