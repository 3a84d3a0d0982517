//! The REST interface over real HTTP: what is refused, and how.

mod common;

use common::{MIB, Node, Program};
use farpool_api::{
    Client, ClientId, ClientReport, ClientSpec, ProblemKind, SegmentId, SegmentSpec,
};
use farpool_http::Unprotected;
use farpool_peer::{BODY_LIMIT_BYTES, CollaborateError, Collaborator, Observation};

fn spec() -> ClientSpec {
    ClientSpec { host: "b".into(), name: "program".into(), pid: 1, lease_ms: 30_000, tenant: None }
}

fn lone(change: impl FnOnce(&mut farpool_peer::CollaborateOptions)) -> Node {
    Node::start("b", 2, 60, &[], change)
}

/// Sends a request. Returns the status and body of the answer.
fn ask(node: &Node, method: &str, path: &str, kind: &str, body: &[u8]) -> (u16, String) {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let request = ureq::http::Request::builder()
        .method(method)
        .uri(format!("{}{path}", node.url))
        .header("content-type", kind)
        .body(body)
        .unwrap();
    let mut answer = agent.run(request).unwrap();
    (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
}

#[test]
fn unknown_clients_and_empty_wishes_are_refused() {
    let node = lone(|_| {});
    let client = Client::new(&node.url, None).unwrap();
    let id = ClientId::from_u128(1);
    let segment =
        |bytes| client.put_segment(SegmentId::from_u128(1), &SegmentSpec::of_client(id, bytes));
    assert!(segment(1).unwrap_err().is(ProblemKind::NotFound));
    let report = client.report_client(id, &ClientReport::default());
    assert!(report.unwrap_err().is(ProblemKind::NotFound));
    assert!(client.client(id).unwrap_err().is(ProblemKind::NotFound));
    client.delete_client(id).unwrap();
    client.put_client(id, &spec()).unwrap();
    assert_eq!(client.client(id).unwrap().name, "program");
    for bytes in [0, u64::MAX] {
        assert!(segment(bytes).unwrap_err().is(ProblemKind::Invalid), "{bytes}");
    }
    for bad in [
        ClientSpec { name: "n".repeat(300), ..spec() },
        ClientSpec { host: String::new(), ..spec() },
        ClientSpec { lease_ms: 0, ..spec() },
    ] {
        assert!(client.put_client(id, &bad).unwrap_err().is(ProblemKind::Invalid));
    }
    client.delete_client(id).unwrap();
    assert!(client.client(id).unwrap_err().is(ProblemKind::NotFound));
}

#[test]
fn what_is_no_request_of_the_interface_is_refused_with_a_reason() {
    let node = lone(|_| {});
    let json = "application/json";
    let client = "/v1/clients/00000000-0000-0000-0000-000000000001";
    let cases: [(&str, &str, &str, &[u8], u16); 7] = [
        ("PUT", client, json, b"{", 400),
        ("PUT", client, json, b"{\"host\":1}", 400),
        // What a form of a strange page could send.
        ("PUT", client, "text/plain", b"{}", 403),
        ("PUT", "/v1/clients/me", json, b"{}", 400),
        ("PUT", "/v1/nodes/x", json, b"{}", 404),
        ("POST", "/v1/nodes", json, b"{}", 405),
        ("GET", "/v1/segments?limit=3", json, b"", 404),
    ];
    for (method, path, kind, body, status) in cases {
        let (told, text) = ask(&node, method, path, kind, body);
        assert_eq!(told, status, "{method} {path}: {text}");
        assert!(text.contains("urn:farpool:problem:"), "{text}");
    }
    let (_, text) = ask(&node, "GET", "/v1/topology", json, b"");
    assert!(text.contains("no controller"), "{text}");
    let large = vec![b' '; BODY_LIMIT_BYTES + 1];
    assert_eq!(ask(&node, "PUT", client, json, &large).0, 413);
}

#[test]
fn a_token_is_asked_for_where_one_is_set() {
    let node = lone(|options| options.protection.token = Some("secret".into()));
    for wrong in [None, Some("secre"), Some("secrets")] {
        let client = Client::new(&node.url, wrong).unwrap();
        assert!(client.nodes().unwrap_err().is(ProblemKind::Unauthorized), "{wrong:?}");
    }
    let client = Client::new(&node.url, Some("secret")).unwrap();
    assert_eq!(client.nodes().unwrap().nodes[0].name, "b");
    assert!(Client::new(&node.url, None).unwrap().health().is_ok());
}

#[test]
fn nobody_is_let_in_from_elsewhere_by_accident() {
    let folder = tempfile::tempdir().unwrap();
    let start = |change: &dyn Fn(&mut farpool_peer::CollaborateOptions)| {
        let mut options = common::options("b", folder.path());
        change(&mut options);
        Collaborator::start(options, || {
            Ok(Observation {
                total_bytes: 1 << 30,
                available_bytes: 1 << 29,
                pressure_permille: None,
            })
        })
    };
    let any = "0.0.0.0:0".parse().unwrap();
    let with_token = |o: &mut farpool_peer::CollaborateOptions| {
        (o.rest, o.protection.token) = (any, Some("secret".into()));
    };
    assert!(matches!(start(&with_token), Err(CollaborateError::RemoteDoor(_))));
    assert!(matches!(start(&|o| o.rest = any), Err(CollaborateError::RemoteDoor(_))));
    let without_proof = |o: &mut farpool_peer::CollaborateOptions| {
        (o.rest, o.protection.insecure) = (any, true);
    };
    let refused = |change: &dyn Fn(&mut _)| match start(change) {
        Err(CollaborateError::Unprotected(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(matches!(refused(&without_proof), Unprotected::NoToken(_)));
    assert!(matches!(start(&|o| o.listen = any), Err(CollaborateError::RemoteTcp(_))));
    let hidden = |o: &mut farpool_peer::CollaborateOptions| {
        (o.listen, o.allow_remote_tcp) = (any, true);
    };
    assert!(matches!(start(&hidden), Err(CollaborateError::NoAdvertise(_))));
    let strange = |o: &mut farpool_peer::CollaborateOptions| {
        hidden(o);
        o.advertise = Some([127, 0, 0, 1].into());
    };
    assert!(matches!(start(&strange), Err(CollaborateError::NoRackKey(_))));
    let bad_token = |o: &mut farpool_peer::CollaborateOptions| {
        o.protection.token = Some("a b".into());
    };
    assert!(matches!(refused(&bad_token), Unprotected::BadToken));
    assert!(matches!(start(&|o| o.name.clear()), Err(CollaborateError::NoName(_))));
    let blind = Collaborator::start(common::options("b", folder.path()), || {
        Err(std::io::Error::other("no numbers"))
    });
    assert!(matches!(blind, Err(CollaborateError::Memory(_))));
}

#[test]
fn people_see_nodes_events_figures_and_why_nothing_comes() {
    // Uses too much to give anything itself, and knows no other node.
    let node = Node::start("b", 2, 95, &[], |_| {});
    let mut program = Program::start(&node, 7, 30_000);
    program.wish(1, 64 * MIB);
    assert_eq!(program.report(0).segments, []);
    let status = node.status();
    assert_eq!((status.clients.len(), status.wanted_bytes), (1, 64 * MIB));
    assert_eq!(status.class, "client");
    let mut events = program.client.events(0).unwrap();
    let first = events.next().unwrap().unwrap();
    assert_eq!((first.id, first.kind.as_str()), (1, "class-changed"));
    let mut figures = ureq::get(format!("{}/metrics", node.url)).call().unwrap();
    let figures = figures.body_mut().read_to_string().unwrap();
    for line in ["farpool_collaborate_wanted_bytes 67108864", "class{class=\"client\"} 1"] {
        assert!(figures.contains(line), "{figures}");
    }
    let spec = SegmentSpec::of_client(program.id, MIB);
    let mut wish = 1;
    let refused = common::wait_for("a refusal", || {
        program.report(0);
        wish += 1;
        program.client.put_segment(SegmentId::from_u128(wish), &spec).err()
    });
    assert!(refused.is(ProblemKind::NoRoom), "{refused}");
    assert!(refused.to_string().contains("nobody has memory to lend"), "{refused}");
}
