//! Segments that have copies of each other: their failure domains are told, and when one is moved
//! it stays away from the others'.

mod common;

use common::{Agent, SUPERPAGE, Server, evacuated, join_client, small, wait_for};
use farpool_api::{Client, ClientId, MoveRequest, ProblemKind, SegmentId, SegmentSpec};
use farpool_control::TopologySource;
use farpool_placement::topology::{self, NetworkKind, RackSpec};

/// Memory bricks of two trays, each a failure domain; the second one's has a brick's name.
fn topology() -> String {
    let spec = RackSpec {
        trays_per_rack: 2,
        compute_per_tray: 1,
        memory_per_tray: 2,
        ports_per_brick: 1,
        capacity_bytes: 4 * SUPERPAGE,
        ..RackSpec::new(NetworkKind::Packet)
    };
    let text = topology::write(&topology::generate(&spec).unwrap());
    text.replace("domain = \"r0t1\"", "domain = \"r0t1m0\"")
}

fn id(number: u128) -> SegmentId {
    SegmentId::from_u128(number)
}

/// A segment for copies, not in these domains.
fn apart(client: ClientId, avoid: &[&str]) -> SegmentSpec {
    let avoid = avoid.iter().map(ToString::to_string).collect();
    SegmentSpec { avoid, apart: true, ..small(client) }
}

fn node_of(api: &Client, number: u128) -> String {
    api.segment(id(number)).unwrap().place.node
}

#[test]
fn a_place_names_the_failure_domain_of_a_topology() {
    let server = Server::fresh(|options| {
        options.topology = Some(TopologySource::Text(topology()));
    });
    let api = server.client();
    let mut nodes: Vec<Agent> = ["r0t0m0", "r0t0m1", "r0t1m0"]
        .iter()
        .map(|name| Agent::join(&api, name, 4 * SUPERPAGE))
        .collect();
    let client = join_client(&api, 1, "r0t0c0");
    let domain = |number: u128, avoid: &[&str]| {
        let segment = api.put_segment(id(number), &apart(client, avoid)).unwrap();
        assert!(segment.spec.is_some_and(|spec| spec.apart));
        (segment.place.domain.clone(), segment.place.failure_domain().to_owned())
    };
    assert_eq!(domain(1, &["r0t1m0"]), (Some("r0t0".into()), "r0t0".into()));
    let second = (Some("r0t1m0".into()), "r0t1m0".into());
    assert_eq!(domain(2, &["r0t0"]), second, "though it is the node's");
    nodes.iter_mut().for_each(|node| node.settle(&api));
    // The other node of its domain is no better than the one that it leaves.
    api.move_segment(id(1), &MoveRequest::default()).unwrap();
    let target = api.segment(id(1)).unwrap().target.unwrap();
    assert_eq!(target.place.failure_domain(), "r0t0", "a copy is in the other tray");
}

#[test]
fn a_segment_moves_where_none_of_its_copies_is() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut nodes: Vec<Agent> =
        ["n0", "n1", "n2"].iter().map(|name| Agent::join(&api, name, 2 * SUPERPAGE)).collect();
    let client = join_client(&api, 1, "n0");
    api.put_segment(id(1), &apart(client, &[])).unwrap();
    let first = node_of(&api, 1);
    api.put_segment(id(2), &apart(client, &[&first])).unwrap();
    let second = node_of(&api, 2);
    assert_ne!(first, second);
    let third = ["n0", "n1", "n2"].into_iter().find(|it| *it != first && *it != second).unwrap();
    nodes.iter_mut().for_each(|node| node.settle(&api));
    let to = |number: u128| {
        api.move_segment(id(number), &MoveRequest::default()).unwrap();
        api.segment(id(number)).unwrap().target.unwrap()
    };
    let target = to(1);
    assert_eq!(target.place.node, third);
    nodes.iter_mut().for_each(|node| node.settle(&api));
    api.report_client(client, &evacuated(1, id(1), target.epoch)).unwrap();
    nodes.iter_mut().for_each(|node| node.settle(&api));
    // A drain finds the first node, which was to be avoided at first.
    api.drain_node(&second).unwrap();
    let target = wait_for("it is moved", || api.segment(id(2)).unwrap().target);
    assert_eq!(target.place.node, first);
}

#[test]
fn a_segment_stays_rather_than_to_move_to_its_copies() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut nodes: Vec<Agent> =
        ["n0", "n1"].iter().map(|name| Agent::join(&api, name, 2 * SUPERPAGE)).collect();
    let client = join_client(&api, 1, "n0");
    api.put_segment(id(1), &apart(client, &["n1"])).unwrap();
    api.put_segment(id(2), &apart(client, &["n0"])).unwrap();
    nodes.iter_mut().for_each(|node| node.settle(&api));
    let refused = api.move_segment(id(1), &MoveRequest::default()).unwrap_err();
    assert!(refused.is(ProblemKind::NoRoom), "{refused}");
    api.drain_node("n0").unwrap();
    nodes.iter_mut().for_each(|node| node.settle(&api));
    assert_eq!(api.segment(id(1)).unwrap().target, None, "it waits");
    nodes.push(Agent::join(&api, "n2", 2 * SUPERPAGE));
    nodes.iter_mut().for_each(|node| node.settle(&api));
    let target = wait_for("there is another node", || api.segment(id(1)).unwrap().target);
    assert_eq!(target.place.node, "n2");
}
