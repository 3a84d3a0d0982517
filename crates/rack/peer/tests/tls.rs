//! The REST interface of a node without a controller, over TLS.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::Node;
use farpool_api::{
    Access, ApiError, Client, ClientId, ClientReport, ClientSpec, ProblemKind, SegmentId,
    SegmentSpec,
};
use farpool_identity::authority::{Authority, Host, Request};
use farpool_identity::{Credentials, Files, Identity, UnixTime};

fn credentials(authority: &mut Authority, path: &str) -> Arc<Credentials> {
    let identity: Identity = format!("spiffe://rack/{path}").parse().unwrap();
    let role = identity.role;
    let hosts: Vec<Host> = match role.may_serve() {
        true => vec!["127.0.0.1".parse().unwrap()],
        false => Vec::new(),
    };
    let issued = authority.issue(Request { role, hosts, days: 1 }, UnixTime::now()).unwrap();
    Credentials::load(Files::in_folder(&issued.folder), UnixTime::now()).unwrap()
}

fn authority(folder: &Path) -> Authority {
    Authority::init(&folder.join("pki"), "rack".parse().unwrap(), UnixTime::now()).unwrap()
}

fn spec(tenant: Option<&str>) -> ClientSpec {
    let tenant = tenant.map(str::to_owned);
    ClientSpec { host: "b".into(), name: "program".into(), pid: 1, lease_ms: 30_000, tenant }
}

#[track_caller]
fn forbidden<T: std::fmt::Debug>(result: Result<T, ApiError>, name: &str) {
    let error = result.expect_err("it is refused");
    assert!(error.is(ProblemKind::Forbidden) && error.to_string().contains(name), "{error}");
}

#[test]
fn a_program_speaks_only_for_its_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let mut authority = authority(folder.path());
    let own = credentials(&mut authority, "node/b");
    let node = Node::start("b", 2, 60, &[], |options| options.protection.credentials = Some(own));
    let url = node.url.replace("http://", "https://");
    let mut client = |path: &str| {
        let credentials = Some(credentials(&mut authority, path));
        Client::with(&url, &Access { credentials, ..Access::default() }).unwrap()
    };
    let (t, u, viewer) = (client("program/t"), client("program/u"), client("viewer/v"));
    let other = client("node/c");
    let id = ClientId::from_u128(1);
    assert_eq!(t.put_client(id, &spec(None)).unwrap().tenant.as_deref(), Some("t"));
    let wish = SegmentSpec::of_client(id, 1);
    t.put_segment(SegmentId::from_u128(1), &wish).unwrap();
    t.report_client(id, &ClientReport::default()).unwrap();
    forbidden(u.put_client(id, &spec(None)), "tenant u");
    forbidden(u.put_client(ClientId::from_u128(2), &spec(Some("t"))), "tenant t");
    forbidden(u.client(id), "tenant u");
    forbidden(u.report_client(id, &ClientReport::default()), "tenant u");
    forbidden(u.put_segment(SegmentId::from_u128(2), &wish), "tenant u");
    forbidden(u.delete_client(id), "tenant u");
    forbidden(u.nodes(), "program of tenant u");
    forbidden(other.nodes(), "node c");
    assert_eq!(viewer.nodes().unwrap().nodes[0].name, "b");
    forbidden(viewer.delete_client(id), "viewer v");
    assert_eq!(t.client(id).unwrap().name, "program");
    t.delete_client(id).unwrap();
    // Who speaks in the clear is told what to do.
    let plain = url.replace("https://", "http://");
    let error = Client::new(&plain, None).unwrap().nodes().unwrap_err();
    assert!(error.is(ProblemKind::BadRequest) && error.to_string().contains("--pki"), "{error}");
}
