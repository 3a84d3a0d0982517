//! Each policy does what its name says; requests are idempotent; refusals name the reason.

use farpool_placement::topology::{NetworkKind, RackSpec, generate, read, write};
use farpool_units::SUPERPAGE_BYTES;

use farpool_placement::{
    Allocator, ComputeId, DomainId, Grant, Graph, MemoryId, PlacementPolicy, RackError, RateLimits,
    Request, RequestId,
};

const RATES: RateLimits = RateLimits { read_bytes_per_s: 1 << 20, write_bytes_per_s: 1 << 20 };

fn spec(network: NetworkKind) -> RackSpec {
    RackSpec {
        racks: 2,
        trays_per_rack: 2,
        compute_per_tray: 2,
        memory_per_tray: 2,
        ports_per_brick: 2,
        capacity_bytes: 8 * SUPERPAGE_BYTES,
        ..RackSpec::new(network)
    }
}

fn rack(network: NetworkKind) -> Allocator {
    Allocator::new(generate(&spec(network)).unwrap())
}

fn request(id: u128, compute: u32, superpages: u64, policy: PlacementPolicy) -> Request {
    Request::new(RequestId(id), ComputeId(compute), superpages * SUPERPAGE_BYTES, RATES, policy)
}

fn place(rack: &mut Allocator, id: u128, superpages: u64, policy: PlacementPolicy) -> u32 {
    rack.allocate(&request(id, 0, superpages, policy)).unwrap().memory.0
}

/// The generated rack with some memory bricks switched off.
fn with_power_off(bricks: &[usize]) -> Graph {
    let text = write(&generate(&spec(NetworkKind::Packet)).unwrap());
    let mut parts: Vec<String> = text.split("[[memory]]\n").map(str::to_owned).collect();
    for brick in bricks {
        parts[brick + 1].insert_str(0, "power = \"off\"\n");
    }
    read(&parts.join("[[memory]]\n")).unwrap().graph
}

#[test]
fn first_fit_takes_the_first_that_fits() {
    let mut rack = rack(NetworkKind::Packet);
    let places: Vec<u32> =
        (0..4).map(|id| place(&mut rack, id, 5, PlacementPolicy::FirstFit)).collect();
    assert_eq!(places, [0, 1, 2, 3]);
    assert_eq!(place(&mut rack, 9, 3, PlacementPolicy::FirstFit), 0);
}

#[test]
fn pack_fills_powered_bricks_before_it_switches_one_on() {
    let mut rack = Allocator::new(with_power_off(&[0, 1, 2, 4, 5, 6, 7]));
    assert_eq!(place(&mut rack, 1, 5, PlacementPolicy::Pack), 3, "the only one with power");
    assert_eq!(place(&mut rack, 2, 5, PlacementPolicy::Pack), 0, "the first without");
    assert!(rack.is_powered(MemoryId(0)) && !rack.is_powered(MemoryId(1)));
    assert_eq!(place(&mut rack, 3, 1, PlacementPolicy::Pack), 0, "both are equally full");
    assert_eq!(place(&mut rack, 4, 3, PlacementPolicy::Pack), 3, "0 has only two left");
    assert_eq!(place(&mut rack, 5, 2, PlacementPolicy::Pack), 0);
    rack.release(RequestId(2)).unwrap();
    rack.release(RequestId(3)).unwrap();
    rack.release(RequestId(5)).unwrap();
    assert!(!rack.is_powered(MemoryId(0)), "nobody uses it any more");
}

#[test]
fn spread_goes_where_the_compute_brick_has_least() {
    let mut rack = rack(NetworkKind::Packet);
    let mut domains: Vec<u32> = (0..8)
        .map(|id| {
            let memory = place(&mut rack, id, 1, PlacementPolicy::Spread);
            rack.graph().memories()[memory as usize].domain.0
        })
        .collect();
    domains[..4].sort_unstable();
    domains[4..].sort_unstable();
    assert_eq!(domains, [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!(rack.spread_of(ComputeId(0)).unwrap().len(), 4);
}

#[test]
fn nearest_stays_on_the_tray_then_in_the_rack() {
    let mut rack = rack(NetworkKind::Circuit);
    let graph = rack.graph().clone();
    let far = graph.computes().len() - 1; // Last tray of the last rack.
    let tray = graph.computes()[far].tray;
    let mut distances = Vec::new();
    for id in 0..3 {
        let compute = u32::try_from(far).unwrap();
        let wish = request(id, compute, 8, PlacementPolicy::Nearest);
        let Ok(grant) = rack.allocate(&wish) else { break };
        let at = graph.memories()[grant.memory.index()].tray;
        let same_rack = graph.trays()[at.index()].rack == graph.trays()[tray.index()].rack;
        distances.push((at == tray, same_rack));
    }
    assert_eq!(distances, [(true, true), (true, true)], "two ports, so two circuits");
    let mut packet = self::rack(NetworkKind::Packet);
    let compute = u32::try_from(far).unwrap();
    let same_tray: Vec<bool> = (0..5)
        .map(|id| {
            let grant = packet.allocate(&request(id, compute, 8, PlacementPolicy::Nearest));
            graph.memories()[grant.unwrap().memory.index()].tray == tray
        })
        .collect();
    assert_eq!(same_tray, [true, true, false, false, false]);
}

#[test]
fn least_loaded_levels_out_and_heeds_what_bricks_report() {
    let mut rack = rack(NetworkKind::Packet);
    rack.observe_load(MemoryId(0), 900).unwrap();
    let places: Vec<u32> =
        (0..8).map(|id| place(&mut rack, id, 1, PlacementPolicy::LeastLoaded)).collect();
    assert_eq!(places, [1, 2, 3, 4, 5, 6, 7, 1]);
}

#[test]
fn the_same_request_is_granted_once() {
    let mut rack = rack(NetworkKind::Circuit);
    let wish = request(7, 0, 2, PlacementPolicy::FirstFit);
    let grant = rack.allocate(&wish).unwrap();
    let before = rack.snapshot();
    assert_eq!(rack.allocate(&wish).as_ref(), Ok(&grant));
    let other = Request { bytes: 1, ..wish.clone() };
    assert_eq!(rack.allocate(&other), Err(RackError::IdInUse(RequestId(7))));
    assert_eq!(rack.snapshot(), before);
    rack.release(wish.id).unwrap();
    assert_eq!(rack.release(wish.id), Err(RackError::UnknownRequest(wish.id)));
    let again = rack.allocate(&wish).unwrap();
    assert!(again.epoch > grant.epoch && again.segment > grant.segment);
}

#[test]
fn a_grant_says_all_that_must_be_set() {
    let mut rack = rack(NetworkKind::Circuit);
    let grant = rack.allocate(&request(1, 0, 3, PlacementPolicy::FirstFit)).unwrap();
    assert_eq!(grant.entries.len(), 1);
    let entry = &grant.entries[0];
    assert_eq!((entry.length_bytes, entry.brick_offset_bytes), (3 * SUPERPAGE_BYTES, 0));
    assert_eq!(entry.port, grant.path.ports[0]);
    assert_eq!(entry.circuit, Some(grant.settings[0].circuit));
    assert_eq!((grant.settings.len(), grant.path.ports.len()), (1, 4));
    assert_eq!(rack.latency_ns(&grant), 2 * (5 + 100 + 5) + 100);
    let second = rack.allocate(&request(2, 0, 3, PlacementPolicy::FirstFit)).unwrap();
    assert_eq!(second.settings, grant.settings, "the circuit that stands is shared");
    assert_eq!(rack.circuits().map(|(_, users)| users).collect::<Vec<_>>(), [2]);
    assert_eq!(second.entries[0].client_base_bytes, entry.client_base_bytes + 3 * SUPERPAGE_BYTES);
}

#[test]
fn every_refusal_names_its_reason() {
    let mut rack = rack(NetworkKind::Circuit);
    let ask = |rack: &mut Allocator, request: &Request| {
        let before = rack.snapshot();
        let error = rack.allocate(request).unwrap_err();
        assert_eq!(rack.snapshot(), before);
        error
    };
    let sound = request(1, 0, 1, PlacementPolicy::FirstFit);
    let unknown = Request { compute: ComputeId(99), ..sound.clone() };
    assert_eq!(ask(&mut rack, &unknown), RackError::UnknownCompute(ComputeId(99)));
    let unknown = Request { avoid: vec![DomainId(99)], ..sound.clone() };
    assert_eq!(ask(&mut rack, &unknown), RackError::UnknownDomain(DomainId(99)));
    assert_eq!(ask(&mut rack, &Request { bytes: 0, ..sound.clone() }), RackError::ZeroBytes);
    let silent = RateLimits { read_bytes_per_s: 0, ..RATES };
    assert_eq!(
        ask(&mut rack, &Request { rates: silent, ..sound.clone() }),
        RackError::ZeroBandwidth
    );
    let pool = Request { bytes: u64::MAX, ..sound.clone() };
    assert!(matches!(ask(&mut rack, &pool), RackError::LargerThanPool { .. }));
    let brick = Request { bytes: 8 * SUPERPAGE_BYTES + 1, ..sound.clone() };
    assert!(matches!(ask(&mut rack, &brick), RackError::LargerThanAnyBrick { .. }));
    let everywhere = (0..4).map(DomainId).collect();
    let nowhere = Request { avoid: everywhere, ..sound.clone() };
    assert!(matches!(ask(&mut rack, &nowhere), RackError::NoCapacity { .. }));
    let fast = RateLimits { read_bytes_per_s: 5 << 29, ..RATES };
    assert_eq!(ask(&mut rack, &Request { rates: fast, ..sound.clone() }), RackError::NoBandwidth);
    for id in 10..12 {
        rack.allocate(&request(id, 0, 8, PlacementPolicy::FirstFit)).unwrap();
    }
    assert!(matches!(ask(&mut rack, &sound), RackError::NoPort(_)));
    for (id, compute) in [(12, 1), (13, 1), (14, 2), (15, 2)] {
        let remote = Request {
            avoid: vec![DomainId(0), DomainId(1)],
            ..request(id, compute, 1, PlacementPolicy::LeastLoaded)
        };
        let result = rack.allocate(&remote);
        assert!(result.is_ok(), "{result:?}");
    }
    let beyond = Request {
        avoid: vec![DomainId(0), DomainId(1)],
        ..request(16, 3, 1, PlacementPolicy::Pack)
    };
    assert_eq!(ask(&mut rack, &beyond), RackError::NoCircuit, "all four uplinks are taken");
}

#[test]
fn only_who_allows_it_gets_a_segment_in_pieces() {
    let spec =
        RackSpec { racks: 1, trays_per_rack: 1, memory_per_tray: 1, ..spec(NetworkKind::Packet) };
    let mut rack = Allocator::new(generate(&spec).unwrap());
    for id in 0..4 {
        place(&mut rack, id, 2, PlacementPolicy::FirstFit);
    }
    rack.release(RequestId(0)).unwrap();
    rack.release(RequestId(2)).unwrap();
    let whole = request(9, 0, 4, PlacementPolicy::FirstFit);
    assert!(matches!(rack.allocate(&whole), Err(RackError::NoCapacity { .. })));
    let pieces = Request { may_split: true, ..whole };
    let grant: Grant = rack.allocate(&pieces).unwrap();
    let offsets: Vec<u64> =
        grant.entries.iter().map(|e| e.brick_offset_bytes / SUPERPAGE_BYTES).collect();
    assert_eq!(offsets, [0, 4]);
    let (first, second) = (&grant.entries[0], &grant.entries[1]);
    assert_eq!(first.client_base_bytes + first.length_bytes, second.client_base_bytes);
}

#[test]
fn moves_and_new_owners_raise_the_epoch() {
    let mut rack = rack(NetworkKind::Mixed);
    let first = rack.allocate(&request(1, 0, 2, PlacementPolicy::FirstFit)).unwrap();
    let before = rack.snapshot();
    let id = RequestId(1);
    let next = rack.begin_move(id, PlacementPolicy::FirstFit, &[]).unwrap();
    assert!(next.epoch > first.epoch && next.memory != first.memory);
    assert_eq!(rack.grant(id).as_ref(), Some(&first), "until the move is finished");
    assert_eq!(rack.begin_move(id, PlacementPolicy::Pack, &[]), Err(RackError::Moving(id)));
    rack.abort_move(id).unwrap();
    assert_eq!(rack.snapshot(), before);
    assert_eq!(rack.finish_move(id), Err(RackError::NotMoving(id)));
    rack.begin_move(id, PlacementPolicy::FirstFit, &[]).unwrap();
    assert_eq!(rack.finish_move(id), Ok(first));
    let moved = rack.grant(id).unwrap();
    let given = rack.change_owner(id, ComputeId(5)).unwrap();
    assert!(given.epoch > moved.epoch && given.segment == moved.segment);
    assert_eq!(
        (given.memory, &given.path.ports[1..].last()),
        (moved.memory, &moved.path.ports.last())
    );
    rack.release(id).unwrap();
    assert_eq!(rack.snapshot(), self::rack(NetworkKind::Mixed).snapshot());
}

#[test]
fn a_draining_brick_takes_nothing_new() {
    let mut rack = rack(NetworkKind::Packet);
    rack.set_draining(MemoryId(0), true).unwrap();
    assert_eq!(place(&mut rack, 1, 1, PlacementPolicy::FirstFit), 1);
    rack.set_draining(MemoryId(0), false).unwrap();
    assert_eq!(place(&mut rack, 2, 1, PlacementPolicy::FirstFit), 0);
    assert!(rack.set_draining(MemoryId(99), true).is_err());
}

#[test]
fn a_stored_grant_that_does_not_fit_is_refused() {
    let mut rack = rack(NetworkKind::Circuit);
    let wish = request(1, 0, 2, PlacementPolicy::FirstFit);
    let grant = rack.allocate(&wish).unwrap();
    let mut wrong = vec![
        Grant { memory: MemoryId(1), ..grant.clone() },
        Grant { memory: MemoryId(99), ..grant.clone() },
        Grant { compute: ComputeId(1), ..grant.clone() },
        Grant { entries: Vec::new(), ..grant.clone() },
        Grant { blade_limits: RateLimits::default(), ..grant.clone() },
    ];
    for change in [1, SUPERPAGE_BYTES, 8 * SUPERPAGE_BYTES, u64::MAX - SUPERPAGE_BYTES + 1] {
        let mut odd = grant.clone();
        odd.entries[0].length_bytes = change;
        wrong.push(odd);
        let mut odd = grant.clone();
        odd.entries[0].client_base_bytes = change;
        wrong.push(odd);
    }
    let mut cut = grant.clone();
    cut.path.ports.pop();
    wrong.push(cut);
    for wrong in wrong {
        let mut empty = self::rack(NetworkKind::Circuit);
        let before = empty.snapshot();
        let error = empty.adopt(&wish, &wrong).unwrap_err();
        assert!(matches!(error, RackError::Conflict { .. }), "{wrong:?}: {error}");
        assert_eq!(empty.snapshot(), before);
    }
}
