//! A rack from a topology, with a circuit switch: a segment is ready only when its circuit stands.

mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use common::{Agent, SUPERPAGE, Server, join_client, small, wait_for};
use farpool_api::{ApiError, ProblemKind, SegmentId, SegmentState};
use farpool_control::{ControlError, ControlOptions, StoreChoice, TopologySource, serve};
use farpool_switch::{Circuit, SwitchDriver, SwitchError};

const TOPOLOGY: &str = r#"
[[rack]]
name = "r0"
[[tray]]
name = "t0"
rack = "r0"
[[switch]]
name = "s0"
kind = "circuit"
ports = 4
[[compute]]
name = "c0"
tray = "t0"
ports = 1
[[memory]]
name = "m0"
tray = "t0"
ports = 1
capacity = "64MiB"
read_bandwidth = "1GiB/s"
write_bandwidth = "1GiB/s"
[[link]]
from = "c0:0"
to = "s0:0"
bandwidth = "1GiB/s"
[[link]]
from = "m0:0"
to = "s0:3"
bandwidth = "1GiB/s"
"#;

/// A switch in memory, which can be made not to answer.
#[derive(Clone, Default)]
struct Plain {
    circuits: Arc<Mutex<BTreeSet<Circuit>>>,
    broken: Arc<Mutex<bool>>,
}

impl Plain {
    fn check(&self) -> Result<(), SwitchError> {
        match *self.broken.lock().unwrap() {
            true => Err(SwitchError::Unreachable { switch: "s0".into(), reason: "off".into() }),
            false => Ok(()),
        }
    }
}

impl SwitchDriver for Plain {
    fn circuits(&mut self) -> Result<Vec<Circuit>, SwitchError> {
        self.check()?;
        Ok(self.circuits.lock().unwrap().iter().copied().collect())
    }

    fn connect(&mut self, circuit: Circuit) -> Result<(), SwitchError> {
        self.check()?;
        self.circuits.lock().unwrap().insert(circuit);
        Ok(())
    }

    fn disconnect(&mut self, circuit: Circuit) -> Result<(), SwitchError> {
        self.check()?;
        self.circuits.lock().unwrap().remove(&circuit);
        Ok(())
    }
}

#[test]
fn a_segment_is_ready_when_its_circuit_stands() {
    let switch = Plain::default();
    // A circuit that no segment uses is taken down.
    switch.circuits.lock().unwrap().insert(Circuit::new(1, 2).unwrap());
    *switch.broken.lock().unwrap() = true;
    let server = Server::fresh(|options| {
        options.topology = Some(TopologySource::Text(TOPOLOGY.into()));
        options.switches.push(("s0".into(), Box::new(switch.clone())));
    });
    let api = server.client();
    let unknown = farpool_api::NodeSpec::new(vec!["tcp://x:1".into()], SUPERPAGE, 1, 1);
    let refused: ApiError = api.put_node("m7", &unknown).unwrap_err();
    assert!(refused.is(ProblemKind::Invalid));
    let client = join_client(&api, 1, "c0");
    let id = SegmentId::from_u128(1);
    let early = api.put_segment(id, &small(client)).unwrap_err();
    assert!(early.is(ProblemKind::NoRoom), "a brick that is no node lends nothing: {early}");
    let mut node = Agent::join(&api, "m0", 4 * SUPERPAGE);
    api.put_segment(id, &small(client)).unwrap();
    node.settle(&api);
    assert!(api.node("m0").unwrap().used_bytes.is_some());
    assert_eq!(api.segment(id).unwrap().state, SegmentState::Pending);
    assert!(!api.circuits().unwrap().circuits[0].standing);
    let why = "the circuit 0-3 of switch s0 does not stand: switch s0 does not answer: off";
    assert_eq!(api.segment(id).unwrap().waits_for, [why]);

    *switch.broken.lock().unwrap() = false;
    let ready = api.wait_segment(id, SegmentState::Ready, 20_000).unwrap();
    assert_eq!((ready.state, ready.waits_for), (SegmentState::Ready, Vec::new()));
    let only = BTreeSet::from([Circuit::new(0, 3).unwrap()]);
    assert_eq!(*switch.circuits.lock().unwrap(), only);
    let listed = api.circuits().unwrap().circuits;
    assert_eq!((listed.len(), listed[0].standing, listed[0].segments), (1, true, 1));

    api.delete_segment(id, None).unwrap();
    node.settle(&api);
    wait_for("the circuit to go", || switch.circuits.lock().unwrap().is_empty().then_some(()));
}

#[test]
fn a_circuit_switch_needs_a_driver() {
    let folder = tempfile::tempdir().unwrap();
    let attempt = |topology: &str, name: Option<&str>| {
        let store = StoreChoice::Redb(folder.path().join("store"));
        let mut options = ControlOptions::new(([127, 0, 0, 1], 0).into(), store);
        options.topology = Some(TopologySource::Text(topology.into()));
        if let Some(name) = name {
            options.switches.push((name.into(), Box::new(Plain::default())));
        }
        let served = serve(options, |_| {}, async {});
        tokio::runtime::Runtime::new().unwrap().block_on(served)
    };
    assert!(matches!(attempt(TOPOLOGY, None), Err(ControlError::NoDriver(name)) if name == "s0"));
    assert!(matches!(attempt(TOPOLOGY, Some("s1")), Err(ControlError::NoSwitch(_))));
    assert!(matches!(attempt("[[rack]]\n", None), Err(ControlError::Topology(_))));
    attempt(TOPOLOGY, Some("s0")).unwrap();
}
