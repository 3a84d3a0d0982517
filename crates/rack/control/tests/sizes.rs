//! Segments that change their size, and tenants that give memory up when the rack is full.

mod common;

use common::{Agent, SUPERPAGE, Server, join_client, small};
use farpool_api::tenant::{Tenant, Wish};
use farpool_api::{
    ApiError, Client, ClientId, ClientReport, ClientSegment, ClientSegmentUse, ClientSpec,
    DEFAULT_RATE_BYTES_PER_S, ProblemKind, SegmentId, SegmentSpec, SegmentState, TenantSpec,
};
use farpool_policy::redundancy::Redundancy;

fn refused<T: std::fmt::Debug>(result: Result<T, ApiError>, kind: ProblemKind) -> String {
    let error = result.unwrap_err();
    assert!(error.is(kind), "{error:?} is not {kind:?}");
    error.to_string()
}

fn of(client: ClientId, superpages: u64) -> SegmentSpec {
    SegmentSpec { bytes: superpages * SUPERPAGE, may_split: true, ..small(client) }
}

fn id(number: u128) -> SegmentId {
    SegmentId::from_u128(number)
}

#[test]
fn a_segment_grows_and_shrinks_where_it_is() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 8 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    let made = api.put_segment(id(1), &of(client, 2)).unwrap();
    api.put_segment(id(2), &of(client, 2)).unwrap();
    node.settle(&api);
    // Its neighbour is in the way, so it gets a further piece.
    let grown = api.resize_segment(id(1), &of(client, 4), Some(made.revision)).unwrap();
    assert_eq!((grown.place.bytes, grown.epoch), (4 * SUPERPAGE, made.epoch));
    assert!(grown.revision > made.revision);
    refused(
        api.resize_segment(id(1), &of(client, 5), Some(made.revision)),
        ProblemKind::PreconditionFailed,
    );
    assert_eq!(api.resize_segment(id(1), &of(client, 4), None).unwrap(), grown, "again");
    // A request to create it that comes late changes nothing.
    assert_eq!(api.put_segment(id(1), &of(client, 4)).unwrap(), grown);
    refused(api.put_segment(id(1), &of(client, 2)), ProblemKind::Conflict);
    refused(api.resize_segment(id(1), &of(client, 7), None), ProblemKind::NoRoom);
    refused(api.resize_segment(id(9), &of(client, 1), None), ProblemKind::PreconditionFailed);
    node.settle(&api);
    let told = |bytes| {
        assert_eq!(api.segment(id(1)).unwrap().place.bytes, bytes);
        let answer = api.report_client(client, &ClientReport::default()).unwrap();
        let told = answer.segments.iter().find(|it| it.id == id(1)).unwrap();
        assert_eq!(told.place.bytes, bytes);
    };
    told(4 * SUPERPAGE);
    let has = |node: &Agent| {
        let grant = node.answer.grants.iter().find(|grant| grant.segment == id(1));
        grant.map(|grant| (grant.bytes, grant.epoch))
    };
    assert_eq!(has(&node), Some((4 * SUPERPAGE, made.epoch)));

    // It shrinks when its node has let go of it, and not before.
    api.resize_segment(id(1), &of(client, 1), None).unwrap();
    told(SUPERPAGE);
    refused(api.put_segment(id(3), &of(client, 5)), ProblemKind::NoRoom);
    let mut uses = node.report();
    // The answer is not carried out yet.
    uses.grants.iter_mut().for_each(|grant| grant.used_bytes = 3 * SUPERPAGE);
    node.answer = api.report_node("n0", &uses).unwrap();
    assert_eq!(has(&node), Some((SUPERPAGE, made.epoch)));
    refused(api.put_segment(id(3), &of(client, 5)), ProblemKind::NoRoom);
    let mut uses = node.report();
    // It is carried out, and more is in use.
    uses.grants.iter_mut().for_each(|grant| grant.used_bytes = 2 * SUPERPAGE);
    api.report_node("n0", &uses).unwrap();
    refused(api.put_segment(id(3), &of(client, 5)), ProblemKind::NoRoom);
    node.settle(&api);
    api.put_segment(id(3), &of(client, 5)).unwrap();
    assert_eq!(api.node("n0").unwrap().granted_bytes, 8 * SUPERPAGE);
}

#[test]
fn a_segment_does_not_shrink_below_its_data_and_survives_a_restart_while_it_shrinks() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store").display().to_string();
    let mut process = common::Process::start(&store);
    let api = process.client();
    let mut node = Agent::join(&api, "n0", 8 * SUPERPAGE);
    let client = join_client(&api, 1, "n0");
    api.put_segment(id(1), &of(client, 4)).unwrap();
    node.settle(&api);
    let uses = |sequence, bytes| {
        let one = ClientSegmentUse { id: id(1), used_bytes: bytes, epoch: 0, evacuated: false };
        ClientReport { sequence, segments: vec![one], ..ClientReport::default() }
    };
    api.report_client(client, &uses(1, 3 * SUPERPAGE)).unwrap();
    let said = refused(api.resize_segment(id(1), &of(client, 2), None), ProblemKind::Conflict);
    assert!(said.contains("hold data"), "{said}");
    api.report_client(client, &uses(2, SUPERPAGE)).unwrap();
    api.resize_segment(id(1), &of(client, 2), None).unwrap();
    process.kill();
    process = common::Process::start(&store);
    let api = process.client();
    assert_eq!(api.segment(id(1)).unwrap().place.bytes, 2 * SUPERPAGE);
    refused(api.put_segment(id(2), &of(client, 6)), ProblemKind::NoRoom);
    node.answer.version = 0;
    node.settle(&api);
    node.settle(&api);
    api.put_segment(id(2), &of(client, 6)).unwrap();
}

fn client_of(tenant: &str) -> ClientSpec {
    ClientSpec {
        host: "n0".into(),
        name: "prog".into(),
        pid: 1,
        lease_ms: 3_600_000,
        tenant: Some(tenant.to_owned()),
    }
}

/// Registers a client of a tenant.
fn of_tenant(api: &Client, bits: u128, tenant: &str) -> ClientId {
    let id = ClientId::from_u128(bits);
    api.put_client(id, &client_of(tenant)).unwrap();
    id
}

/// Reports nothing new, and returns what the client is told.
fn told(api: &Client, client: ClientId) -> Vec<ClientSegment> {
    api.report_client(client, &ClientReport::default()).unwrap().segments
}

/// Leaves everything that the client is asked to leave.
fn leave(api: &Client, client: ClientId, sequence: u64) {
    let asked: Vec<ClientSegmentUse> = told(api, client)
        .into_iter()
        .filter(|segment| segment.leave)
        .map(|it| ClientSegmentUse { id: it.id, used_bytes: 0, epoch: it.epoch, evacuated: true })
        .collect();
    let report = ClientReport { sequence, segments: asked, ..ClientReport::default() };
    api.report_client(client, &report).unwrap();
}

#[test]
fn who_has_most_beyond_its_promise_gives_up_first_when_the_rack_is_full() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 10 * SUPERPAGE);
    let promise = |name: &str, superpages: u64| {
        let promised_bytes = superpages * SUPERPAGE;
        let spec = TenantSpec { promised_bytes, ..TenantSpec::default() };
        api.put_tenant(name, &spec).unwrap()
    };
    promise("modest", 2);
    promise("greedy", 2);
    promise("late", 4);
    let modest = of_tenant(&api, 1, "modest");
    let greedy = of_tenant(&api, 2, "greedy");
    let late = of_tenant(&api, 3, "late");
    for number in 0..3 {
        api.put_segment(id(10 + number), &of(modest, 1)).unwrap();
    }
    for number in 0..7 {
        api.put_segment(id(20 + number), &of(greedy, 1)).unwrap();
    }
    node.settle(&api);
    // Greedy has 5 beyond its promise, modest 1; late asks for 3 of its 4.
    let error = api.put_segment(id(30), &of(late, 3)).unwrap_err();
    assert!(farpool_api::tenant::retry_after(&error).is_some(), "{error}");
    let asked = |client| told(&api, client).into_iter().filter(|it| it.leave).count();
    assert_eq!((asked(greedy), asked(modest)), (3, 0));
    assert!(told(&api, greedy).iter().all(|it| it.deadline_ms.is_none()), "nothing gets lost");
    let view = api.tenant("greedy").unwrap();
    assert_eq!((view.granted_bytes, view.yielding_bytes), (7 * SUPERPAGE, 3 * SUPERPAGE));
    // Asking again asks nobody for more.
    api.put_segment(id(30), &of(late, 3)).unwrap_err();
    assert_eq!((asked(greedy), asked(modest)), (3, 0));
    leave(&api, greedy, 1);
    node.settle(&api);
    // What was given up is late's: nobody else gets it who is beyond its promise.
    refused(api.put_segment(id(40), &of(greedy, 1)), ProblemKind::NoRoom);
    let made = api.put_segment(id(30), &of(late, 3)).unwrap();
    assert_eq!(made.state, SegmentState::Pending);
    // Beyond its promise, late takes nothing from its equals.
    let error = api.put_segment(id(31), &of(late, 2)).unwrap_err();
    assert!(farpool_api::tenant::retry_after(&error).is_none(), "{error}");
    assert_eq!((asked(greedy), asked(modest)), (0, 0));
    // But from those of a lower priority, and nobody falls below its promise.
    let spec = TenantSpec { promised_bytes: 4 * SUPERPAGE, priority: 1, ..TenantSpec::default() };
    api.put_tenant("late", &spec).unwrap();
    api.put_segment(id(31), &of(late, 3)).unwrap_err();
    assert_eq!((asked(greedy), asked(modest)), (2, 1));
}

#[test]
fn what_is_being_released_is_for_whoever_asks_first() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 2 * SUPERPAGE);
    let [first, second, third] =
        [1, 2, 3].map(|number| of_tenant(&api, number, &format!("tenant{number}")));
    for number in [10, 11] {
        api.put_segment(id(number), &of(first, 1)).unwrap();
    }
    node.settle(&api);
    for number in [10, 11] {
        api.delete_segment(id(number), None).unwrap();
    }
    // Nobody gives anything up, so nobody has a claim on what comes free.
    for (number, client) in [(20, second), (30, third)] {
        let error = api.put_segment(id(number), &of(client, 1)).unwrap_err();
        assert!(error.is(ProblemKind::NoRoom), "{error}");
    }
    node.settle(&api);
    api.put_segment(id(30), &of(third, 1)).unwrap();
    api.put_segment(id(20), &of(second, 1)).unwrap();
}

#[test]
fn two_claims_on_one_node_ask_for_no_more_than_both_need() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 8 * SUPERPAGE);
    for (name, superpages) in [("greedy", 4), ("one", 2), ("other", 2)] {
        let promised_bytes = superpages * SUPERPAGE;
        api.put_tenant(name, &TenantSpec { promised_bytes, ..TenantSpec::default() }).unwrap();
    }
    let greedy = of_tenant(&api, 1, "greedy");
    for number in 0..8 {
        api.put_segment(id(10 + number), &of(greedy, 1)).unwrap();
    }
    node.settle(&api);
    for (number, tenant, leaving) in [(2, "one", 2), (3, "other", 4)] {
        let client = of_tenant(&api, number, tenant);
        let error = api.put_segment(id(20 + number), &of(client, 2)).unwrap_err();
        assert!(farpool_api::tenant::retry_after(&error).is_some(), "{tenant}: {error}");
        assert_eq!(asked(&api, greedy), leaving, "after {tenant}");
    }
}

/// How many segments of a client it is asked to leave.
fn asked(api: &Client, client: ClientId) -> usize {
    told(api, client).into_iter().filter(|segment| segment.leave).count()
}

#[test]
fn others_give_up_memory_only_where_memory_is_what_is_short() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut nodes = ["n0", "n1"].map(|name| Agent::join(&api, name, 4 * SUPERPAGE));
    let spec = TenantSpec { promised_bytes: 8 * SUPERPAGE, ..TenantSpec::default() };
    api.put_tenant("late", &spec).unwrap();
    let (greedy, late) = (of_tenant(&api, 1, "greedy"), of_tenant(&api, 2, "late"));
    let near = |client, superpages, avoid: &str| SegmentSpec {
        avoid: vec![avoid.to_owned()],
        ..of(client, superpages)
    };
    for number in 0..4 {
        api.put_segment(id(10 + number), &near(greedy, 1, "n1")).unwrap();
    }
    let mut settle = || nodes.iter_mut().for_each(|node| node.settle(&api));
    settle();
    let stays = |what: &str, refused: Result<_, ApiError>| {
        let error = refused.unwrap_err();
        assert!(error.is(ProblemKind::NoRoom), "{what}: {error}");
        assert_eq!(farpool_api::tenant::retry_after(&error), None, "{what}: {error}");
        assert_eq!(asked(&api, greedy), 0, "{what}");
    };
    // n0 is full, but n1, which is to be avoided, is not.
    stays("avoid", api.put_segment(id(20), &near(late, 2, "n1")));
    let wide = SegmentSpec { read_bytes_per_s: 1_249_000_000, ..of(late, 2) };
    api.put_segment(id(21), &SegmentSpec { bytes: SUPERPAGE, ..wide.clone() }).unwrap();
    settle();
    stays("bandwidth", api.put_segment(id(22), &wide));
    // Only n1 has room left for it.
    api.put_segment(id(23), &of(late, 3)).unwrap();
    settle();
    // It can grow only where it is.
    stays("a resize", api.resize_segment(id(23), &of(late, 4), None));
    // The rack is full: now memory is short, and n0 is where others have some.
    let error = api.put_segment(id(24), &near(late, 2, "n1")).unwrap_err();
    assert!(farpool_api::tenant::retry_after(&error).is_some(), "{error}");
    assert_eq!(asked(&api, greedy), 2);
}

#[test]
fn what_a_tenant_has_beyond_its_promise_is_given_up_on_one_node() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut nodes = ["n0", "n1"].map(|name| Agent::join(&api, name, 2 * SUPERPAGE));
    for (name, superpages) in [("greedy", 2), ("late", 2)] {
        let promised_bytes = superpages * SUPERPAGE;
        api.put_tenant(name, &TenantSpec { promised_bytes, ..TenantSpec::default() }).unwrap();
    }
    let (greedy, late) = (of_tenant(&api, 1, "greedy"), of_tenant(&api, 2, "late"));
    // Its segments lie on both nodes in turn.
    for number in 0..4 {
        let avoid = vec![["n1", "n0"][number % 2].to_owned()];
        let spec = SegmentSpec { avoid, ..of(greedy, 1) };
        api.put_segment(id(10 + number as u128), &spec).unwrap();
    }
    nodes.iter_mut().for_each(|node| node.settle(&api));
    let error = api.put_segment(id(20), &of(late, 2)).unwrap_err();
    assert!(farpool_api::tenant::retry_after(&error).is_some(), "{error}");
    let left = told(&api, greedy).into_iter().filter(|segment| segment.leave);
    let left: Vec<String> = left.map(|segment| segment.place.node).collect();
    assert!(left == ["n0", "n0"] || left == ["n1", "n1"], "both on one node: {left:?}");
    leave(&api, greedy, 1);
    nodes.iter_mut().for_each(|node| node.settle(&api));
    api.put_segment(id(20), &of(late, 2)).unwrap();
}

#[test]
fn who_may_wait_for_memory_gets_all_of_it_and_not_half() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n1", 12 * SUPERPAGE);
    // Where the programs run, which lends nothing.
    Agent::join(&api, "n0", 0);
    let spec = TenantSpec { promised_bytes: 8 * SUPERPAGE, ..TenantSpec::default() };
    api.put_tenant("late", &spec).unwrap();
    let greedy = of_tenant(&api, 1, "greedy");
    for number in 0..2 {
        api.put_segment(id(10 + number), &of(greedy, 4)).unwrap();
    }
    node.settle(&api);
    let late = of_tenant(&api, 2, "late");
    let tenant = farpool_api::tenant::Tenant::new(server.client(), late, client_of("late"));
    let mut number = 20;
    let mut ask = |may_wait| {
        let wish = farpool_api::tenant::Wish {
            bytes: 8 * SUPERPAGE,
            rate_bytes_per_s: Some(1_000),
            may_wait,
            ..farpool_api::tenant::Wish::default()
        };
        let fresh_id = || {
            number += 1;
            Ok::<_, ApiError>(id(number))
        };
        tenant.ask(wish, fresh_id)
    };
    let error = ask(true).unwrap_err();
    assert!(farpool_api::tenant::retry_after(&error).is_some(), "{error}");
    assert_eq!(told(&api, late).len(), 0, "it did not take half of it");
    assert_eq!(asked(&api, greedy), 1, "the one beside what is free");
    leave(&api, greedy, 1);
    node.settle(&api);
    assert_eq!(ask(true).unwrap().place.bytes, 8 * SUPERPAGE);
    // Where nobody has anything beyond its promise, there is nothing to wait for.
    for (name, superpages) in [("late", 16), ("greedy", 4)] {
        let promised_bytes = superpages * SUPERPAGE;
        api.put_tenant(name, &TenantSpec { promised_bytes, ..TenantSpec::default() }).unwrap();
    }
    let refused = ask(true).unwrap_err();
    assert!(farpool_api::tenant::retry_after(&refused).is_none(), "{refused}");
}

#[test]
fn a_quota_is_a_limit_and_tenants_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store").display().to_string();
    let mut process = common::Process::start(&store);
    let api = process.client();
    let mut node = Agent::join(&api, "n0", 10 * SUPERPAGE);
    let spec = TenantSpec {
        promised_bytes: SUPERPAGE,
        quota_bytes: Some(3 * SUPERPAGE),
        priority: 7,
        rate_bytes_per_s: Some(1 << 30),
        redundancy: Some(Redundancy::Parity),
    };
    assert_eq!(api.put_tenant("t", &spec).unwrap().granted_bytes, 0);
    let client = of_tenant(&api, 1, "t");
    api.put_segment(id(1), &of(client, 2)).unwrap();
    let said = refused(api.put_segment(id(2), &of(client, 2)), ProblemKind::NoRoom);
    assert!(said.contains("quota"), "{said}");
    refused(api.resize_segment(id(1), &of(client, 4), None), ProblemKind::NoRoom);
    api.resize_segment(id(1), &of(client, 3), None).unwrap();
    node.settle(&api);
    refused(api.put_tenant("a/b", &TenantSpec::default()), ProblemKind::Invalid);
    process.kill();
    process = common::Process::start(&store);
    let api = process.client();
    let view = api.tenant("t").unwrap();
    assert_eq!((view.quota_bytes, view.priority), (Some(3 * SUPERPAGE), 7));
    assert_eq!(view.rate_bytes_per_s, Some(1 << 30));
    assert_eq!(view.redundancy, Some(Redundancy::Parity));
    assert_eq!((view.granted_bytes, view.segments), (3 * SUPERPAGE, 1));
    api.delete_tenant("t").unwrap();
    refused(api.delete_tenant("t"), ProblemKind::NotFound);
    assert_eq!(api.tenant("t").unwrap().quota_bytes, None, "its segments stay");
    assert_eq!(api.tenants().unwrap().tenants.len(), 1);
}

/// The segments of a tenant are granted so much bandwidth together. Who asks for a rate gets it or
/// nothing; who leaves it to the rack takes what is left, if that is of use.
#[test]
fn a_tenants_rate_is_shared_by_its_segments() {
    let server = Server::fresh(|_| {});
    let api = server.client();
    let mut node = Agent::join(&api, "n0", 100 * SUPERPAGE);
    let rate_bytes_per_s = Some(DEFAULT_RATE_BYTES_PER_S + (20 << 20));
    let set = |rate_bytes_per_s| {
        api.put_tenant("t", &TenantSpec { rate_bytes_per_s, ..TenantSpec::default() })
    };
    refused(set(Some(0)), ProblemKind::Invalid);
    set(rate_bytes_per_s).unwrap();
    let client = of_tenant(&api, 1, "t");
    let faster = |read: u64, write: u64| SegmentSpec {
        read_bytes_per_s: read,
        write_bytes_per_s: write,
        ..of(client, 1)
    };
    // Each direction counts for itself.
    api.put_segment(id(1), &faster(10 << 20, DEFAULT_RATE_BYTES_PER_S)).unwrap();
    let error = api.put_segment(id(2), &faster(1, 21 << 20)).unwrap_err();
    let ApiError::Problem(problem) = &error else { panic!("{error:?}") };
    let left = problem.rate_left_bytes_per_s.as_deref();
    assert_eq!((problem.limit, left), (rate_bytes_per_s, Some(&(20 << 20))));
    assert!(problem.detail.contains("tenant t is granted"), "{error}");
    // Another tenant is not held to it, nor is the size of a segment.
    api.put_segment(id(3), &of(of_tenant(&api, 2, "u"), 1)).unwrap();
    api.resize_segment(
        id(1),
        &SegmentSpec { bytes: 3 * SUPERPAGE, ..faster(10 << 20, DEFAULT_RATE_BYTES_PER_S) },
        None,
    )
    .unwrap();

    let program = Tenant::new(server.client(), client, client_of("t"));
    let mut ids = (10..).map(id);
    let mut ask = |rate_bytes_per_s| {
        let wish = Wish { bytes: 64 << 20, rate_bytes_per_s, ..Wish::default() };
        program.ask::<ApiError>(wish, || Ok(ids.next().unwrap()))
    };
    refused(ask(Some(21 << 20)), ProblemKind::NoRoom);
    let less = ask(None).unwrap();
    assert_eq!(less.place.write_bytes_per_s, 20 << 20);
    refused(ask(None), ProblemKind::NoRoom);
    let told = api.tenant("t").unwrap();
    assert_eq!(Some(told.granted_write_bytes_per_s), rate_bytes_per_s);
    assert_eq!(told.granted_read_bytes_per_s, 30 << 20);
    // What is given back may be granted again, also before the node has let go of it.
    api.delete_segment(id(1), None).unwrap();
    assert_eq!(ask(Some(DEFAULT_RATE_BYTES_PER_S)).unwrap().place.bytes, 64 << 20);
    node.settle(&api);
    // A limit below what is granted takes nothing away.
    set(Some(1 << 20)).unwrap();
    assert_eq!(api.tenant("t").unwrap().segments, 2);
    refused(ask(None), ProblemKind::NoRoom);
}
