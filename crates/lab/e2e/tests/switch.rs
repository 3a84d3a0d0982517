//! Five hosts on an emulated circuit switch: far memory needs a circuit and nothing else.

use std::time::Duration;

use farpool_e2e::blade::Blade;
use farpool_e2e::run::Run;
use farpool_e2e::{binaries, network, turn};
use farpool_hosts::{Host, Hosts, Wiring};
use farpool_switch::{Circuit, EmulatedSwitch, SwitchDriver};

fn stage() -> Option<(Hosts, EmulatedSwitch)> {
    let hosts = network::make(Hosts::builder(5, Wiring::Switch))?;
    let side = hosts.switch().expect("wired for a switch");
    let opened = side.enter(|| EmulatedSwitch::open("s0", side.ports()));
    let switch = opened.expect("enter").expect("open");
    Some((hosts, switch))
}

fn circuit(a: u32, b: u32) -> Circuit {
    Circuit::new(a, b).expect("two ports")
}

fn blade(host: &Host) -> Blade {
    let command = host.command(binaries::program("farpool"));
    let tcp = format!("tcp://{}:0", host.address());
    Blade::start_command(command, "512MiB", &tcp, &["--allow-remote-tcp", "--quota", "512MiB"])
}

/// A program with 64 MiB, of which 16 MiB may be local.
fn program(host: &Host, blade: &Blade) -> Run {
    let directory = tempfile::tempdir().expect("directory");
    let stats = directory.path().join("stats.json");
    let mut command = host.command(binaries::program("farpool"));
    command.args(["run", "--local", "16MiB", "--allow-remote-tcp", "--stats"]).arg(&stats);
    Run::with(command, Some(stats), Some(directory))
        .blade(&format!("tcp://{}", blade.tcp()))
        .own_program("farpool-stress")
        .args(["--mib", "64", "--threads", "2", "--seed", "5"])
        .args(["--ops", "discard,pipe,heap", "--seconds", "2"])
        .patience(Duration::from_secs(120))
}

#[test]
fn a_program_reaches_its_blade_over_one_circuit() {
    let _turn = turn();
    let Some((hosts, mut switch)) = stage() else { return };
    let blade = blade(&hosts[2]);
    switch.connect(circuit(0, 2)).expect("A-C");
    program(&hosts[0], &blade).finish().require_success().require_far();
    let counters = switch.counters()[0];
    assert!(counters.from_low.bytes > 16 << 20, "pages went over the circuit: {counters:?}");
    for other in [1, 3, 4] {
        let counters = hosts[other].counters().expect("counters");
        assert_eq!(counters.received_frames, 0, "{}", hosts[other].name());
    }
}

#[test]
fn without_a_circuit_the_program_ends_with_a_clear_message() {
    let _turn = turn();
    let Some((hosts, mut switch)) = stage() else { return };
    let blade = blade(&hosts[2]);
    // A circuit to another host does not count.
    switch.connect(circuit(0, 1)).expect("A-B");
    let outcome = program(&hosts[0], &blade).finish();
    assert_ne!(outcome.code, 0, "stdout: {} stderr: {}", outcome.stdout, outcome.stderr);
    let named = outcome.stderr.contains(&hosts[2].address().to_string());
    assert!(named, "the blade is named: {}", outcome.stderr);
    println!("{} {}", outcome.code, outcome.stderr);
    assert_eq!(hosts[2].counters().expect("counters").received_frames, 0);
}
