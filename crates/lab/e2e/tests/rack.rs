//! A rack of processes: controller, nodes, and programs that get far memory from any node.

use std::time::Duration;

use farpool_e2e::ports::free_address;
use farpool_e2e::rack::{Daemon, answer, ask};
use farpool_e2e::run::{Run, Running};
use farpool_e2e::{turn, wait_until};

const PATIENCE: Duration = Duration::from_secs(60);
const OPS: &str = "discard,free,advise,protect,unmap,mremap,spawn,heap,pipe,file,direct,uring";

/// A controller with nodes A, B and C, each of which lends 1 GiB once it has measured its own
/// programs.
struct Rack {
    control: Daemon,
    nodes: Vec<(&'static str, Daemon)>,
    folder: tempfile::TempDir,
}

impl Rack {
    fn start() -> Rack {
        let folder = tempfile::tempdir().expect("folder");
        let listen = free_address().to_string();
        let control = Daemon::control(&listen, &folder.path().join("control.redb"));
        let start = |name| (name, Daemon::node(&control.address, name, "1GiB"));
        let nodes = ["A", "B", "C"].map(start).into();
        let rack = Rack { control, nodes, folder };
        wait_until("all nodes lend", PATIENCE, || {
            let nodes = rack.answer(&["node", "list"]);
            let lends = |node: &serde_json::Value| {
                node["state"] == "up" && node["lendable_bytes"].as_u64() >= Some(1 << 30)
            };
            let nodes = nodes["nodes"].as_array()?.clone();
            (nodes.len() == 3 && nodes.iter().all(lends)).then_some(())
        });
        rack
    }

    fn url(&self) -> &str {
        &self.control.address
    }

    fn answer(&self, arguments: &[&str]) -> serde_json::Value {
        answer(self.url(), arguments)
    }

    /// A program on host A that uses the rack until it is told to end.
    fn stress(&self) -> Running {
        let running = Run::far("24MiB")
            .args(["--pool", self.url(), "--host", "A", "--rate", "1GiB"])
            .own_program("farpool-stress")
            .args(["--mib", "96", "--threads", "3", "--seconds", "600", "--seed", "5"])
            .args(["--ops", OPS, "--until"])
            .args([self.over()])
            .patience(Duration::from_secs(150))
            .start();
        running.wait_until_far();
        running
    }

    /// Ends the programs normally, as if their time were over.
    fn end_programs(&self) {
        std::fs::write(self.over(), "").expect("a file");
    }

    fn over(&self) -> std::path::PathBuf {
        self.folder.path().join("over")
    }

    /// The nodes that hold memory of segments that are ready.
    fn ready_on(&self) -> Vec<String> {
        let segments = self.answer(&["segment", "list"]);
        let segments = segments["segments"].as_array().cloned().expect("a list");
        let ready = segments.iter().filter(|segment| segment["state"] == "ready");
        ready.filter_map(|it| Some(it["place"]["node"].as_str()?.to_owned())).collect()
    }

    fn restart_control(&mut self) {
        let listen = self.url().trim_start_matches("http://").to_owned();
        self.control.kill();
        self.control = Daemon::control(&listen, &self.folder.path().join("control.redb"));
    }
}

#[test]
fn programs_go_on_while_nodes_are_drained_and_the_controller_is_killed() {
    let _turn = turn();
    let mut rack = Rack::start();
    let mut running = rack.stress();
    let first = rack.ready_on();
    assert!(
        !first.is_empty() && !first.contains(&"A".to_owned()),
        "not on its own host: {first:?}"
    );
    let task = rack.answer(&["node", "drain", &first[0], "--wait"]);
    assert_eq!(task["state"], "done", "{task}");
    let second = rack.ready_on();
    assert!(!second.is_empty() && !second.contains(&first[0]), "{first:?}, then {second:?}");
    assert!(running.is_running(), "it moved while the program ran");

    rack.control.kill();
    let output = ask(rack.url(), &["node", "list"]);
    assert_eq!(output.status.code(), Some(5), "nobody answers");
    let before = running.stderr().matches("cannot be reached").count();
    wait_until("the program notices", PATIENCE, || {
        (running.stderr().matches("cannot be reached").count() > before).then_some(())
    });
    rack.restart_control();
    wait_until("the controller finds the truth again", PATIENCE, || {
        rack.ready_on().iter().any(|node| second.contains(node)).then_some(())
    });
    // A node that is asked to end is drained first, and has left the rack when it ends.
    rack.answer(&["node", "drain", &first[0], "--undo"]);
    let lender = rack.ready_on();
    let at = rack.nodes.iter().position(|(name, _)| lender.iter().any(|it| it == name));
    let (name, node) = rack.nodes.remove(at.expect("a node lends"));
    assert!(node.end(), "node {name} ends in order");
    let output = ask(rack.url(), &["node", "show", name]);
    assert_eq!(output.status.code(), Some(3), "{name} has left the rack");
    assert!(running.is_running(), "its memory moved once more: {}", running.stderr());
    rack.end_programs();
    let outcome = running.finish();
    outcome.require_success();
    outcome.require_far();
    wait_until("all memory is given back", PATIENCE, || {
        let segments = rack.answer(&["segment", "list"]);
        segments["segments"].as_array()?.is_empty().then_some(())
    });
    while let Some((name, node)) = rack.nodes.pop() {
        assert!(node.end(), "node {name} ends in order");
    }
    let nodes = rack.answer(&["node", "list"]);
    assert_eq!(nodes["nodes"].as_array().map(Vec::len), Some(0), "they left the rack");
}

#[test]
fn a_node_that_dies_ends_exactly_the_programs_that_used_it() {
    let _turn = turn();
    let mut rack = Rack::start();
    let running = rack.stress();
    let used = rack.ready_on();
    let (_, victim) = rack.nodes.iter_mut().find(|(name, _)| used[0] == *name).expect("used");
    victim.kill();
    let outcome = running.finish();
    assert_ne!(outcome.code, 0, "its memory is gone: {}", outcome.stdout);
    assert!(outcome.stderr.contains("far memory is lost"), "{}", outcome.stderr);
    assert!(!outcome.stdout.contains("WRONG"), "{}", outcome.stdout);
    // The other nodes continue to serve: a new program gets its memory from them.
    wait_until("the node is missed", PATIENCE, || {
        let node = rack.answer(&["node", "show", &used[0]]);
        (node["state"] != "up").then_some(())
    });
    let again = rack.stress();
    assert!(!rack.ready_on().contains(&used[0]));
    rack.end_programs();
    again.finish().require_success();
}

#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    let _turn = turn();
    let rack = Rack::start();
    let refused = |arguments: &[&str], code: i32, reason: &str| {
        let output = ask(rack.url(), arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(reason), "{arguments:?}: {error}");
    };
    refused(&["node", "show", "nobody"], 3, "nobody");
    refused(&["segment", "create", "--host", "A", "--size", "100GiB"], 1, "bytes");
    refused(&["segment", "create", "--host", "nobody", "--size", "16MiB"], 3, "nobody");
    refused(&["segment", "show", "x"], 2, "UUID");
    refused(
        &["segment", "create", "--host", "A", "--size", "16MiB", "--policy", "best"],
        2,
        "best",
    );
    let id = "00000000-0000-0000-0000-0000000000aa";
    let create = |size| ["segment", "create", "--host", "A", "--size", size, "--id", id];
    let first = rack.answer(&create("16MiB"));
    assert_eq!(rack.answer(&create("16MiB"))["epoch"], first["epoch"], "granted once");
    refused(&create("32MiB"), 4, id);
    rack.answer(&["segment", "delete", id]);
    let outcome =
        Run::far("24MiB").args(["--pool", rack.url(), "--host", "nobody"]).program("true").finish();
    assert_ne!(outcome.code, 0);
    assert!(outcome.stderr.contains("nobody"), "{}", outcome.stderr);
}
