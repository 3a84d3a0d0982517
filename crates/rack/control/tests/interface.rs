//! The interface as an operator's tools, a browser and an intruder meet it: preconditions, names,
//! strangers, half-sent requests, and refusals that say what is short.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::{Agent, SUPERPAGE, Server, join_client, small, wait_for};
use farpool_api::{ClientId, ClientSpec, NodeState, Problem, ProblemKind, SegmentId, SegmentSpec};

/// An answer, as it came.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn is_problem(&self, status: u16) {
        assert_eq!(self.status, status, "{} {}", self.head, self.body);
        assert!(self.head.contains("application/problem+json"), "{}", self.head);
        let problem: Problem = serde_json::from_str(&self.body).unwrap();
        assert_eq!(problem.status, status);
    }
}

/// Sends a request with these header lines besides Host, and reads the answer.
fn ask(server: &Server, request: &str, headers: &[&str], body: &str) -> Answer {
    let address = server.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let host = format!("Host: {address}");
    let host = Some(host.as_str()).filter(|_| !headers.iter().any(|it| it.starts_with("Host")));
    let lines: Vec<&str> = host.into_iter().chain(headers.iter().copied()).collect();
    let lines = lines.join("\r\n");
    let length = body.len();
    let text = format!(
        "{request} HTTP/1.1\r\n{lines}\r\nConnection: close\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    );
    // An early refusal may close the connection before all has been sent.
    let _ = stream.write_all(text.as_bytes());
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

const JSON: &str = "Content-Type: application/json";

#[test]
fn preconditions_are_lists_and_mean_what_the_rfc_says() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let id = SegmentId::from_u128(1);
    let spec = serde_json::to_string(&small(client)).unwrap();
    let path = format!("/v1/segments/{id}");
    let put = |tag: &str| ask(&server, &format!("PUT {path}"), &[JSON, tag], &spec);
    put("If-Match: *").is_problem(412);
    assert_eq!(put("If-None-Match: *").status, 201);
    put("If-None-Match: *").is_problem(412);
    node.settle(&api);
    let revision = api.segment(id).unwrap().revision;
    let get = |tag: &str| ask(&server, &format!("GET {path}"), &[tag], "");
    let same = get(&format!("If-None-Match: \"x\", W/\"{revision}\""));
    assert_eq!((same.status, same.body.as_str()), (304, ""));
    assert!(same.head.contains(&format!("etag: \"{revision}\"")), "{}", same.head);
    assert_eq!(get("If-None-Match: \"999\"").status, 200);
    get("If-Match: \"999\"").is_problem(412);
    get("If-Match: 999").is_problem(400);
    let delete = |tag: &str| ask(&server, &format!("DELETE {path}"), &[JSON, tag], "");
    delete("If-Match: \"999\", \"998\"").is_problem(412);
    delete(&format!("If-Match: W/\"{revision}\"")).is_problem(412);
    assert_eq!(delete(&format!("If-Match: \"999\", \"{revision}\"")).status, 202);
}

#[test]
fn every_refusal_is_a_problem_document() {
    let server = Server::fresh(|_| {});
    ask(&server, &format!("GET /v1/nodes/{}", "x".repeat(100_000)), &[], "").is_problem(414);
    let long = format!("X-Long: {}", "y".repeat(1 << 20));
    ask(&server, "GET /v1/nodes", &[&long], "").is_problem(431);
    ask(&server, "GET /v1/nodes with spaces", &[], "").is_problem(400);
    ask(&server, "GET /v1/segments?foo=1", &[], "").is_problem(400);
    ask(&server, "GET /v1/nodes?foo=1", &[], "").is_problem(400);
    ask(&server, "PATCH /v1/nodes", &[JSON], "").is_problem(405);
    assert_eq!(ask(&server, "GET /healthz?probe=1", &[], "").status, 200);
}

#[test]
fn a_strangers_page_changes_and_reads_nothing() {
    let server = Server::fresh(|options| options.advertise = Some("http://rack:7080".into()));
    let api = server.client();
    Agent::join(&api, "n0", 4 * SUPERPAGE);
    let evil = ["Origin: http://evil.example", "Host: evil.example"];
    ask(&server, "POST /v1/nodes/n0/drain", &evil, "").is_problem(421);
    ask(&server, "GET /v1/nodes", &evil[1..], "").is_problem(421);
    ask(&server, "POST /v1/nodes/n0/drain", &evil[..1], "").is_problem(403);
    ask(&server, "POST /v1/nodes/n0/drain", &[], "").is_problem(403);
    assert_eq!(api.node("n0").unwrap().state, NodeState::Up);
    assert_eq!(ask(&server, "GET /v1/nodes", &["Host: rack:7080"], "").status, 200);
    assert_eq!(ask(&server, "POST /v1/nodes/n0/drain", &["Farpool-Request: 1"], "").status, 202);
    // With a token, the token is the proof, and names do not matter.
    let server = Server::fresh(|options| options.protection.token = Some("secret".into()));
    let token = "Authorization: Bearer secret";
    assert_eq!(ask(&server, "GET /v1/nodes", &["Host: other", token], "").status, 200);
    ask(&server, "GET /v1/nodes", &[evil[0], token], "").is_problem(403);
}

#[test]
fn names_that_a_terminal_obeys_are_refused() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    Agent::join(&api, "n0", 4 * SUPERPAGE);
    let put = |name: &str| {
        let name = name.to_owned();
        let spec = ClientSpec { host: "n0".into(), name, pid: 1, lease_ms: 1_000, tenant: None };
        api.put_client(ClientId::from_u128(1), &spec)
    };
    for bad in ["", "\u{1b}[2Jevil\r\nevent: x", "a\u{9b}b", "a\u{202e}b", &"x".repeat(257)] {
        assert!(put(bad).unwrap_err().is(ProblemKind::Invalid), "{bad:?}");
    }
    for good in ["redis-server", "gr\u{fc}n", &"\u{1f600}".repeat(256)] {
        put(good).unwrap();
    }
    let many = "\u{1b}".repeat(3);
    assert!(api.node(&many).unwrap_err().is(ProblemKind::NotFound));
}

#[test]
fn others_are_served_while_many_requests_are_half_sent() {
    const CONNECTIONS: usize = 64;
    let server = Server::fresh(|options| options.connections = Some(CONNECTIONS));
    let address = server.url.strip_prefix("http://").unwrap().to_owned();
    let put = format!("PUT /v1/nodes/x HTTP/1.1\r\nHost: {address}\r\n");
    let body = format!("{put}{JSON}\r\nFarpool-Request: 1\r\nContent-Length: 99\r\n\r\n{{");
    for sent in [put, body] {
        let mut halves = Vec::new();
        for _ in 0..5 * CONNECTIONS {
            let mut half = TcpStream::connect(&address).unwrap();
            // It may have been closed already for those that follow.
            let _ = half.write_all(sent.as_bytes());
            halves.push(half);
        }
        for _ in 0..20 {
            assert_eq!(ask(&server, "GET /healthz", &[], "").status, 200);
        }
        // Those that have waited longest were closed.
        let mut first = halves.swap_remove(0);
        first.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let ended = first.read(&mut [0; 1]);
        let is_reset = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionReset;
        assert!(ended.as_ref().map_or_else(is_reset, |read| *read == 0), "{ended:?}");
    }
}

#[test]
fn a_refusal_for_bandwidth_says_who_has_how_much_left() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 100 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let spec = SegmentSpec::of_client(client, SUPERPAGE);
    for number in 0..10 {
        api.put_segment(SegmentId::from_u128(number), &spec).unwrap();
    }
    node.settle(&api);
    let error = api.put_segment(SegmentId::from_u128(99), &spec).unwrap_err();
    assert!(error.is(ProblemKind::NoRoom));
    let said = error.to_string();
    for words in ["125000000", "node n0", "0 of 1250000000", "--bandwidth"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    // A node that says that it has more is used for more.
    node.spec.read_bytes_per_s = 10_000_000_000;
    node.spec.write_bytes_per_s = 10_000_000_000;
    api.put_node("n0", &node.spec).unwrap();
    api.put_segment(SegmentId::from_u128(99), &spec).unwrap();
    // One whose link has become slower comes back, and gets nothing more.
    node.spec.read_bytes_per_s = 1_000_000;
    node.spec.write_bytes_per_s = 1_000_000;
    api.put_node("n0", &node.spec).unwrap();
    assert!(api.put_segment(SegmentId::from_u128(100), &spec).is_err());
}

#[test]
fn who_finds_no_room_while_a_node_comes_back_is_told_to_ask_again() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 4 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    node.settle(&api);
    let all = SegmentSpec { bytes: 4 * SUPERPAGE, ..small(client) };
    api.put_segment(SegmentId::from_u128(1), &all).unwrap();
    node.settle(&api);
    let full = api.put_segment(SegmentId::from_u128(2), &all).unwrap_err();
    assert_eq!(farpool_api::tenant::retry_after(&full), None, "it is full, and stays so: {full}");
    assert!(full.to_string().contains("node n0 has most"), "{full}");
    // The node is silent, then comes back with an empty blade.
    wait_for("the node to be late", || {
        api.node("n0").ok().filter(|node| node.state == NodeState::Late)
    });
    // The reconciler notes it at its next tick.
    wait_for("a refusal that says so", || {
        let late = api.put_segment(SegmentId::from_u128(2), &all).unwrap_err();
        farpool_api::tenant::retry_after(&late)
    });
    node.spec.incarnation += 1;
    node.spec.blade_id += 1;
    node.answer.grants.clear();
    node.answer.version = 0;
    node.sequence = 0;
    api.put_node("n0", &node.spec).unwrap();
    // Its memory is still the lost segment's.
    let back = api.put_segment(SegmentId::from_u128(2), &all).unwrap_err();
    assert!(farpool_api::tenant::retry_after(&back).is_some(), "{back}");
    api.delete_segment(SegmentId::from_u128(1), None).unwrap();
    wait_for("the node's memory to be free", || {
        node.step(&api);
        api.put_segment(SegmentId::from_u128(2), &all).ok()
    });
}
