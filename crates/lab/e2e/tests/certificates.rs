//! Programs on blades over TCP with certificates of `farpool pki`, through both doors.

use std::path::PathBuf;
use std::process::{Command, Output};

use farpool_e2e::blade::{Blade, Transport};
use farpool_e2e::pki::{make_authority, pki};
use farpool_e2e::run::{Door, Run, Running};
use farpool_e2e::{binaries, turn};

/// An authority, with certificates of a node, a program and a viewer.
struct Rack {
    home: tempfile::TempDir,
}

fn farpool() -> Command {
    Command::new(binaries::program("farpool"))
}

impl Rack {
    fn new() -> Rack {
        let rack = Rack { home: tempfile::tempdir().expect("a folder") };
        make_authority(farpool, &rack.authority());
        rack.pki(&["issue", "--role", "viewer", "--name", "v"]);
        rack
    }

    fn pki(&self, words: &[&str]) {
        pki(farpool(), &self.authority(), words);
    }

    fn authority(&self) -> PathBuf {
        self.home.path().join("pki")
    }

    fn folder(&self, label: &str) -> PathBuf {
        self.authority().join(label)
    }

    fn blade(&self) -> Blade {
        let folder = self.folder("node-n");
        Blade::start_with("512MiB", &["--pki", folder.to_str().expect("plain text")])
    }

    /// The stress program, which checks every page that it reads.
    fn stress(&self, door: Door, blade: &Blade, seconds: &str) -> Running {
        let run = Run::through(door, "16MiB").blade(&blade.address(Transport::Tcp));
        let run = run.arg("--pki").arg(self.folder("program-payroll"));
        run.own_program("farpool-stress")
            .args(["--mib", "64", "--threads", "2", "--progress", "--seed", "5"])
            .args(["--ops", "discard,pipe,heap", "--seconds", seconds])
            .start()
    }

    fn stat(&self, blade: &Blade, label: Option<&str>) -> Output {
        let mut command = farpool();
        command.args(["stat", "--json", "--blade", &blade.address(Transport::Tcp)]);
        if let Some(label) = label {
            command.arg("--pki").arg(self.folder(label));
        }
        command.output().expect("farpool stat")
    }
}

#[test]
fn a_program_pages_to_a_blade_that_knows_it_by_its_certificate() {
    let _turn = turn();
    let rack = Rack::new();
    let blade = rack.blade();
    for door in [Door::Usual, Door::Preload] {
        let mut running = rack.stress(door, &blade, "3");
        running.wait_for_output("filled", 2);
        // Certificates may be renewed meanwhile.
        rack.pki(&["renew", "node-n", "program-payroll"]);
        running.finish().require_success().require_far();
        let served = &blade.stat()["blades"][0];
        assert!(served["pages_read"].as_u64().is_some_and(|pages| pages > 0), "{door:?}");
        assert_eq!(served["bad_frames"], 0, "{door:?}");
    }
}

#[test]
fn who_has_no_certificate_gets_no_memory_and_no_figures() {
    let _turn = turn();
    let rack = Rack::new();
    let blade = rack.blade();
    let address = blade.address(Transport::Tcp);
    let outcome = Run::far("16MiB").blade(&address).program("true").finish();
    assert_ne!(outcome.code, 0);
    assert!(
        outcome.stderr.contains("the blade serves over TCP only with certificates"),
        "{}",
        outcome.stderr
    );
    let viewer = Run::far("16MiB").blade(&address).arg("--pki").arg(rack.folder("viewer-v"));
    let outcome = viewer.program("true").finish();
    assert!(outcome.stderr.contains("borrow nothing"), "{}", outcome.stderr);
    let figures = rack.stat(&blade, Some("viewer-v"));
    let figures: serde_json::Value = serde_json::from_slice(&figures.stdout).expect("JSON");
    assert_eq!(figures["blades"][0]["pages_written"], 0, "{figures}");
    let refused = rack.stat(&blade, None);
    assert!(String::from_utf8_lossy(&refused.stdout).contains("only with certificates"));
}

#[test]
fn a_revoked_program_loses_its_far_memory_and_is_told_why() {
    let _turn = turn();
    let rack = Rack::new();
    let blade = rack.blade();
    let mut running = rack.stress(Door::Usual, &blade, "60");
    running.wait_for_output("filled", 2);
    rack.pki(&["revoke", "program-payroll"]);
    let outcome = running.finish();
    assert_eq!(outcome.code, 135, "stdout: {} stderr: {}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("this certificate was revoked"), "{}", outcome.stderr);
}

#[test]
fn a_program_leaves_a_blade_that_was_revoked() {
    let _turn = turn();
    for door in [Door::Usual, Door::Preload] {
        let rack = Rack::new();
        let blade = rack.blade();
        let mut running = rack.stress(door, &blade, "60");
        running.wait_for_output("filled", 2);
        rack.pki(&["revoke", "node-n"]);
        let outcome = running.finish();
        let said = &outcome.stderr;
        assert_eq!(outcome.code, 135, "{door:?} stdout: {} stderr: {said}", outcome.stdout);
        assert!(said.contains("was revoked"), "{door:?} {said}");
        assert!(said.contains("spiffe://rack1/node/n is left"), "{door:?} {said}");
    }
}
