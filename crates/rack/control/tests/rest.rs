//! The controller over real sockets: what each operation does, and what each refusal leaves alone.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use common::{Agent, SUPERPAGE, Server, evacuated, join_client, small, wait_for};
use farpool_api::{
    ApiError, Client, ClientReport, MoveRequest, NodeReport, NodeState, ProblemKind, SegmentFilter,
    SegmentId, SegmentSpec, SegmentState, TaskState,
};
use farpool_control::{ControlError, ControlOptions, StoreChoice, serve};
use farpool_http::Unprotected;

fn refused<T: std::fmt::Debug>(result: Result<T, ApiError>, kind: ProblemKind) {
    let error = result.unwrap_err();
    assert!(error.is(kind), "{error:?} is not {kind:?}");
}

#[test]
fn a_segment_lives_from_create_to_release() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let (id, spec) = (SegmentId::from_u128(7), small(client));
    let created = api.put_segment(id, &spec).unwrap();
    assert_eq!((created.state, created.revision), (SegmentState::Pending, 1));
    assert_eq!(created.place.key, None);
    assert_eq!(api.put_segment(id, &spec).unwrap(), created);
    let other = SegmentSpec { read_bytes_per_s: 7, ..spec };
    refused(api.put_segment(id, &other), ProblemKind::Conflict);

    node.settle(&api);
    let ready = api.wait_segment(id, SegmentState::Ready, 10_000).unwrap();
    assert_eq!(ready.state, SegmentState::Ready);
    let told = api.report_client(client, &ClientReport::default()).unwrap();
    assert_eq!(told.segments[0].place.key, Some(node.answer.grants[0].key));
    assert_eq!(told.segments[0].epoch, node.answer.grants[0].epoch);
    assert_eq!(told.segments[0].place.addresses, ["tcp://n0:7070"]);

    refused(api.delete_segment(id, Some(99)), ProblemKind::PreconditionFailed);
    api.delete_segment(id, Some(1)).unwrap();
    assert_eq!(api.segment(id).unwrap().state, SegmentState::Releasing);
    refused(api.put_segment(id, &small(client)), ProblemKind::Conflict);
    node.step(&api);
    assert!(node.answer.grants.is_empty());
    assert_eq!(api.node("n0").unwrap().segments, 1, "its node has not let go yet");
    node.step(&api);
    refused(api.segment(id), ProblemKind::NotFound);
}

#[test]
fn a_drained_node_gets_empty() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut first = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let id = SegmentId::from_u128(7);
    api.put_segment(id, &small(client)).unwrap();
    first.settle(&api);
    let mut second = Agent::join(&api, "n1", 4 * SUPERPAGE);
    let task = api.drain_node("n0").unwrap();
    assert_eq!(api.node("n0").unwrap().state, NodeState::Draining);
    wait_for("a target", || api.segment(id).unwrap().target);
    let early = api.report_client(client, &ClientReport { sequence: 1, ..Default::default() });
    assert_eq!(early.unwrap().segments[0].target, None, "its node has not confirmed it");
    second.settle(&api);
    let told = api.report_client(client, &ClientReport { sequence: 2, ..Default::default() });
    let told = told.unwrap();
    let target = told.segments[0].target.clone().unwrap();
    assert_eq!(told.segments[0].state, SegmentState::Moving);
    assert!(
        target.epoch > told.segments[0].epoch && target.place.key != told.segments[0].place.key
    );

    let moved = api.report_client(client, &evacuated(3, id, target.epoch)).unwrap();
    assert_eq!(
        (moved.segments[0].epoch, moved.segments[0].state),
        (target.epoch, SegmentState::Ready)
    );
    assert_eq!(moved.segments[0].place, target.place);
    first.settle(&api);
    assert!(first.answer.grants.is_empty() && second.answer.grants.len() == 1);
    wait_for("the drain", || (api.task(task.id).unwrap().state == TaskState::Done).then_some(()));
    refused(api.delete_node("n0"), ProblemKind::Conflict); // its client uses memory from there
    api.delete_client(client).unwrap();
    second.settle(&api);
    api.delete_node("n0").unwrap();
    refused(api.node("n0"), ProblemKind::NotFound);
}

#[test]
fn a_donor_gets_its_memory_back() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut first = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let ids = [SegmentId::from_u128(1), SegmentId::from_u128(2)];
    for id in ids {
        api.put_segment(id, &small(client)).unwrap();
    }
    first.settle(&api);
    first.lendable_bytes = SUPERPAGE;
    first.step(&api);
    let leaving = wait_for("a deadline", || {
        let told = api.report_client(client, &ClientReport::default()).unwrap();
        told.segments.into_iter().find(|segment| segment.deadline_ms.is_some())
    });
    assert_eq!((leaving.state, leaving.target), (SegmentState::Moving, None));
    let page = api.segments(&SegmentFilter::default()).unwrap();
    let hurried = page.segments.iter().filter(|segment| segment.deadline_ms.is_some());
    assert_eq!(hurried.count(), 1, "no more than needed");
    refused(api.put_segment(SegmentId::from_u128(3), &small(client)), ProblemKind::NoRoom);
    // Enough is given back: the other one stays.
    first.lendable_bytes = 2 * SUPERPAGE;
    first.step(&api);
    wait_for("calm", || api.segment(leaving.id).unwrap().deadline_ms.is_none().then_some(()));
    let calm = api.wait_segment(leaving.id, SegmentState::Ready, 10_000).unwrap();
    assert_eq!(calm.state, SegmentState::Ready);
}

#[test]
fn a_client_takes_home_what_nobody_has_room_for() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let id = SegmentId::from_u128(1);
    api.put_segment(id, &small(client)).unwrap();
    node.settle(&api);
    let hear = |node: &mut Agent, sequence| {
        node.step(&api);
        let report = ClientReport { sequence, ..ClientReport::default() };
        api.report_client(client, &report).unwrap().segments.first().cloned()
    };
    let stands = hear(&mut node, 1).unwrap();
    assert!(!stands.leave);
    // A repeated report of a finished move: it has the epoch of the current place.
    api.report_client(client, &evacuated(2, id, stands.epoch)).unwrap();
    assert_eq!(api.segment(id).unwrap().state, SegmentState::Ready);
    node.lendable_bytes = 0;
    let mut sequence = 2;
    let told = wait_for("leave", || {
        sequence += 1;
        hear(&mut node, sequence).filter(|segment| segment.leave)
    });
    assert_eq!((told.state, told.epoch, &told.target), (SegmentState::Moving, stands.epoch, &None));
    assert!(told.deadline_ms.is_some(), "and the donor waits");
    api.report_client(client, &evacuated(sequence + 1, id, told.epoch)).unwrap();
    node.settle(&api);
    assert!(node.answer.grants.is_empty());
    wait_for("its end", || {
        let segments = api.segments(&SegmentFilter::default()).unwrap().segments;
        segments.is_empty().then_some(())
    });
}

#[test]
fn a_blade_that_started_anew_has_lost_everything() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let id = SegmentId::from_u128(1);
    api.put_segment(id, &small(client)).unwrap();
    node.settle(&api);
    node.spec.blade_id += 1;
    node.answer.grants.clear();
    let report = node.report();
    refused(api.report_node("n0", &report), ProblemKind::NameInUse);
    assert_eq!(api.segment(id).unwrap().state, SegmentState::Ready);
    api.put_node("n0", &node.spec).unwrap();
    assert_eq!(api.segment(id).unwrap().state, SegmentState::Lost);
    node.step(&api);
    assert!(node.answer.grants.is_empty(), "nothing is set up anew under the old epoch");
    api.delete_segment(id, None).unwrap();
    node.settle(&api);
    refused(api.segment(id), ProblemKind::NotFound);
}

#[test]
fn liars_and_repeaters_change_nothing_that_counts() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    api.put_segment(SegmentId::from_u128(1), &small(client)).unwrap();
    node.settle(&api);
    let mut lie = node.report();
    lie.capacity_bytes = u64::MAX;
    lie.lendable_bytes = u64::MAX;
    lie.used_bytes = u64::MAX;
    lie.load_permille = 65_000;
    lie.known_version = u64::MAX;
    api.report_node("n0", &lie).unwrap();
    let seen = api.node("n0").unwrap();
    let most = Some(4 * SUPERPAGE);
    assert_eq!((seen.capacity_bytes, seen.lendable_bytes, seen.used_bytes), (most, most, most));
    assert_eq!(seen.load_permille, Some(1000));
    let events = api.events(0).unwrap().map(|event| event.unwrap());
    let lies: Vec<_> = events.filter(|event| event.kind == "node-lied").take(5).collect();
    assert_eq!(lies.len(), 5);

    // An old report, and one of another daemon.
    let mut old = node.report();
    old.sequence = 1;
    old.lendable_bytes = 0;
    old.grants.clear();
    api.report_node("n0", &old).unwrap();
    assert_eq!(api.node("n0").unwrap().lendable_bytes, most);
    let mut other = node.report();
    other.incarnation += 1;
    refused(api.report_node("n0", &other), ProblemKind::NameInUse);
    let mut twice = node.report();
    twice.grants.push(twice.grants[0].clone());
    refused(api.report_node("n0", &twice), ProblemKind::Invalid);
}

#[test]
fn a_report_waits_for_news() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    node.step(&api);
    let (waiting, mut report) = (api.clone(), node.report());
    report.wait_ms = 30_000;
    let started = std::time::Instant::now();
    let waiter = std::thread::spawn(move || waiting.report_node("n0", &report).unwrap());
    api.put_segment(SegmentId::from_u128(1), &small(client)).unwrap();
    assert_eq!(waiter.join().unwrap().grants.len(), 1);
    assert!(started.elapsed().as_secs() < 25, "it waited for the time, not for the news");
}

/// The report of the first daemon waits for so long that the first counts as late; then a second
/// registers, and the answer must not be the second's empty list.
#[test]
fn a_report_that_waited_while_another_daemon_registered_is_refused() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    api.put_segment(SegmentId::from_u128(1), &small(client)).unwrap();
    node.settle(&api);
    let mut second = node.spec.clone();
    (second.incarnation, second.blade_id) = (99, 99);
    refused(api.put_node("n0", &second), ProblemKind::NameInUse);
    let mut same_blade = node.spec.clone();
    same_blade.incarnation = 98;
    api.put_node("n0", &same_blade).expect("only a process at a time has a blade's memory");
    assert_ne!(api.segment(SegmentId::from_u128(1)).unwrap().state, SegmentState::Lost);
    node.spec = same_blade;
    node.settle(&api);
    let (waiting, mut report) = (api.clone(), node.report());
    report.wait_ms = 30_000;
    let waiter = std::thread::spawn(move || waiting.report_node("n0", &report));
    wait_for("the first to be late", || {
        api.node("n0").ok().filter(|node| node.state == NodeState::Late)
    });
    api.put_node("n0", &second).unwrap();
    refused(waiter.join().unwrap(), ProblemKind::NameInUse);
    // A daemon that ends says so, and the next one need not wait.
    let last = NodeReport {
        incarnation: 99,
        sequence: 1,
        blade_id: 99,
        ending: true,
        ..NodeReport::default()
    };
    api.report_node("n0", &last).unwrap();
    assert_eq!(api.node("n0").unwrap().state, NodeState::Late);
    (second.incarnation, second.blade_id) = (100, 100);
    api.put_node("n0", &second).unwrap();
    assert_eq!(api.node("n0").unwrap().state, NodeState::Up);
}

#[test]
fn refusals_name_their_reason_and_change_nothing() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let id = SegmentId::from_u128(1);
    let good = small(client);
    let with = |change: fn(&mut SegmentSpec)| {
        let mut spec = good.clone();
        change(&mut spec);
        api.put_segment(id, &spec)
    };
    let before = (api.nodes().unwrap().nodes[0].segments, api.client(client).unwrap());
    refused(with(|spec| spec.bytes = 0), ProblemKind::Invalid);
    refused(with(|spec| spec.bytes = u64::MAX), ProblemKind::NoRoom);
    refused(with(|spec| spec.read_bytes_per_s = 0), ProblemKind::Invalid);
    refused(with(|spec| spec.read_bytes_per_s = u64::MAX), ProblemKind::NoRoom);
    refused(with(|spec| spec.client = None), ProblemKind::Invalid);
    refused(with(|spec| spec.avoid = vec!["moon".into()]), ProblemKind::NotFound);
    refused(with(|spec| spec.avoid = vec!["n0".into()]), ProblemKind::NoRoom);
    refused(api.segment(id), ProblemKind::NotFound);
    refused(api.delete_segment(id, None), ProblemKind::NotFound);
    refused(api.move_segment(id, &MoveRequest::default()), ProblemKind::NotFound);
    refused(api.drain_node("moon"), ProblemKind::NotFound);
    let after = (api.nodes().unwrap().nodes[0].segments, api.client(client).unwrap());
    assert_eq!(before, after);
    api.put_segment(id, &good).unwrap();
    node.settle(&api);
    refused(api.move_segment(id, &MoveRequest::default()), ProblemKind::NoRoom);
    refused(api.delete_node("n0"), ProblemKind::Conflict);
}

/// Sends bytes. Returns the answer's status, and whether it is a problem document.
fn raw(server: &Server, request: &[u8]) -> (u16, bool) {
    let address = server.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).unwrap();
    // The server may answer and close before everything is sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).to_ascii_lowercase();
    let status = answer.split(' ').nth(1).and_then(|text| text.parse().ok());
    (status.unwrap_or(0), answer.contains("content-type: application/problem+json"))
}

#[test]
fn malformed_requests_get_problems() {
    let server = Server::fresh(|_| {});
    let put = |kind: &str, body: &str| {
        let request = format!(
            "PUT /v1/nodes/n0 HTTP/1.1\r\nhost: localhost\r\nfarpool-request: 1\r\n\
             connection: close\r\ncontent-type: {kind}\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        raw(&server, request.as_bytes())
    };
    assert_eq!(put("application/json", "{"), (400, true));
    assert_eq!(put("application/json", "{\"donate_bytes\": -1}"), (400, true));
    assert_eq!(put("text/plain", "{}"), (415, true));
    assert_eq!(put("application/json", &" ".repeat(2 << 20)), (413, true));
    let get = |method: &str, path: &str| {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\n\
             farpool-request: 1\r\nconnection: close\r\n\r\n"
        );
        raw(&server, request.as_bytes())
    };
    assert_eq!(get("GET", "/v1/segments/none"), (400, true));
    assert_eq!(get("GET", "/v1/segments?limit=x"), (400, true));
    assert_eq!(get("GET", "/v1/segments?page_token=x"), (400, true));
    assert_eq!(get("GET", "/v2/nodes"), (404, true));
    assert_eq!(get("PATCH", "/v1/nodes"), (405, true));
    assert!(server.client().nodes().unwrap().nodes.is_empty());
}

#[test]
fn a_token_is_asked_for() {
    let server = Server::fresh(|options| options.protection.token = Some("secret".into()));
    let with = |token| Client::new(&server.url, token).unwrap();
    refused(with(None).nodes(), ProblemKind::Unauthorized);
    refused(with(Some("secre")).nodes(), ProblemKind::Unauthorized);
    with(Some("secret")).nodes().unwrap();
    with(None).health().unwrap();
}

#[test]
fn nobody_listens_to_the_world_by_accident() {
    let folder = tempfile::tempdir().unwrap();
    let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let attempt = |token: Option<&str>, insecure| {
        let store = StoreChoice::Redb(folder.path().join("store"));
        let mut options = ControlOptions::new(everywhere, store);
        options.protection.token = token.map(str::to_owned);
        options.protection.insecure = insecure;
        let served = serve(options, |_| {}, async {});
        tokio::runtime::Runtime::new().unwrap().block_on(served)
    };
    let refused = |token: Option<&str>, insecure| match attempt(token, insecure) {
        Err(ControlError::Unprotected(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(matches!(refused(None, true), Unprotected::NoToken(_)));
    assert!(matches!(refused(Some("secret"), false), Unprotected::Clear(_)));
    assert!(matches!(refused(Some(""), true), Unprotected::BadToken));
    attempt(Some("secret"), true).unwrap();
}

#[test]
fn pages_and_events_can_be_taken_up_again() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    Agent::join(&api, "n0", 8 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    for bits in 0..5 {
        api.put_segment(SegmentId::from_u128(bits), &small(client)).unwrap();
    }
    let mut seen = Vec::new();
    let mut page_token = None;
    loop {
        let page = api.segments(&SegmentFilter { limit: Some(2), page_token }).unwrap();
        seen.extend(page.segments.into_iter().map(|segment| segment.id));
        page_token = page.next_page_token;
        if page_token.is_none() {
            break;
        }
    }
    assert_eq!(seen, (0..5).map(SegmentId::from_u128).collect::<Vec<_>>());
    let all: Vec<_> = api.events(0).unwrap().take(7).map(|event| event.unwrap().id).collect();
    assert!(all.is_sorted());
    let rest: Vec<_> = api.events(all[4]).unwrap().take(2).map(|event| event.unwrap().id).collect();
    assert_eq!(rest, all[5..]);
    assert!(api.topology_drawing().unwrap().contains("n0.memory"));
    let toml = api.topology_toml().unwrap();
    assert_eq!(farpool_placement::topology::read(&toml).unwrap().graph.memories().len(), 1);
    assert_eq!(api.topology().unwrap().memory[0].node.as_deref(), Some("n0"));
}

#[test]
fn the_document_in_the_tree_is_the_programs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/openapi.json");
    let in_tree = std::fs::read_to_string(path).unwrap_or_default();
    let now = serde_json::to_string_pretty(&farpool_control::openapi()).unwrap();
    assert!(
        in_tree.trim() == now.trim(),
        "docs/openapi.json is not what the program serves; write it anew: \
         cargo run -p farpool-control --example openapi > docs/openapi.json"
    );
}
