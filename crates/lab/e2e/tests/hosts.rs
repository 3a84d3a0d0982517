//! Two hosts: a blade in one network namespace, the program in another, a veth pair between them.

use std::time::Duration;

use farpool_e2e::blade::Blade;
use farpool_e2e::network::{BLADE_IP, Network};
use farpool_e2e::run::{Run, Running};
use farpool_e2e::{binaries, turn};

fn started(network: &Network, blade: &Blade, seconds: u32) -> Running {
    let directory = tempfile::tempdir().expect("directory");
    let stats = directory.path().join("stats.json");
    let mut command = network.program_side(&binaries::program("farpool"));
    command.args(["run", "--local", "16MiB", "--allow-remote-tcp", "--stats"]).arg(&stats);
    let mut running = Run::with(command, Some(stats), Some(directory))
        .blade(&format!("tcp://{}", blade.tcp()))
        .own_program("farpool-stress")
        .args(["--mib", "64", "--threads", "2", "--progress", "--seed", "5"])
        .args(["--ops", "discard,pipe,heap", "--seconds", &seconds.to_string()])
        .start();
    running.wait_for_output("filled", 2);
    running
}

fn blade(network: &Network) -> Blade {
    let command = network.blade_side(&binaries::program("farpool"));
    Blade::start_command(
        command,
        "512MiB",
        &format!("tcp://{BLADE_IP}:0"),
        &["--allow-remote-tcp", "--quota", "512MiB"],
    )
}

#[test]
fn pages_travel_between_hosts_and_a_short_cut_is_survived() {
    let _turn = turn();
    let Some(network) = Network::make() else {
        return;
    };
    let blade = blade(&network);
    let running = started(&network, &blade, 6);
    network.link(false);
    // The length of the cut is what is tested: less than the deadline of 10 s.
    std::thread::sleep(Duration::from_secs(2));
    network.link(true);
    running.finish().require_success().require_far();
}

#[test]
fn a_long_cut_ends_the_program_with_a_clear_message() {
    let _turn = turn();
    let Some(network) = Network::make() else {
        return;
    };
    let blade = blade(&network);
    let running = started(&network, &blade, 60);
    network.link(false);
    let outcome = running.finish();
    assert_eq!(outcome.code, 135, "stdout: {} stderr: {}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("far memory is lost"), "{}", outcome.stderr);
    assert!(outcome.stderr.contains(BLADE_IP), "the blade is named: {}", outcome.stderr);
}
