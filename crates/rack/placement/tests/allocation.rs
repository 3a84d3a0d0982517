//! Allocation against the plain model: on random small racks, after any history, everything granted
//! is sound, everything refused was impossible, and release undoes allocate.

mod plain;

use farpool_placement::{
    Allocator, ComputeBrick, ComputeId, DomainId, Graph, GraphBuilder, MemoryBrick,
    PlacementPolicy, RackError, RateLimits, Request, RequestId, SwitchKind,
};
use farpool_units::SUPERPAGE_BYTES;
use plain::Plain;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Allocate(Request),
    Release(u128),
    BeginMove(u128, PlacementPolicy),
    FinishMove(u128),
    AbortMove(u128),
    ChangeOwner(u128, u32),
    Resize(u128, u64),
    Drain(u32, bool),
    Lend(u32, u64),
}

/// What a random rack is made of; numbers are taken modulo what there is.
#[derive(Debug, Clone)]
struct Plan {
    switches: Vec<bool>,
    /// Ports of each compute brick.
    computes: Vec<u32>,
    /// Ports, superpages, bandwidth and domain of each memory brick.
    memories: Vec<(u32, u64, u64, u32)>,
    /// For each brick port in turn: the switch it leads to.
    brick_links: Vec<(u32, u64)>,
    /// Switch to switch.
    trunks: Vec<(u32, u32, u64)>,
}

const SWITCH_PORTS: u32 = 24;

fn plans() -> impl Strategy<Value = Plan> {
    let memory = (1..3u32, 1..6u64, 1..8u64, 0..3u32);
    (
        proptest::collection::vec(any::<bool>(), 1..5),
        proptest::collection::vec(1..3u32, 1..4),
        proptest::collection::vec(memory, 1..5),
        proptest::collection::vec((0..6u32, 1..6u64), 14),
        proptest::collection::vec((0..4u32, 0..4u32, 1..6u64), 0..7),
    )
        .prop_map(|(switches, computes, memories, brick_links, trunks)| Plan {
            switches,
            computes,
            memories,
            brick_links,
            trunks,
        })
}

fn build(plan: &Plan) -> Graph {
    let mut builder = GraphBuilder::new();
    builder.rack("r0").unwrap();
    let tray = builder.tray("t0", "r0").unwrap();
    let switches = u32::try_from(plan.switches.len()).unwrap();
    for (index, circuit) in plan.switches.iter().enumerate() {
        let kind = if *circuit { SwitchKind::Circuit } else { SwitchKind::Packet };
        builder.switch(&format!("s{index}"), kind, SWITCH_PORTS, 0, 0).unwrap();
    }
    let mut ports = Vec::new();
    for (index, count) in plan.computes.iter().enumerate() {
        let domain = builder.domain("d0").unwrap();
        let name = format!("c{index}");
        let brick =
            ComputeBrick { name: name.clone(), tray, domain, power_watts: 0, ports: Vec::new() };
        builder.compute(brick, *count).unwrap();
        ports.extend((0..*count).map(|port| format!("{name}:{port}")));
    }
    for (index, (count, superpages, rate, domain)) in plan.memories.iter().enumerate() {
        let domain = builder.domain(&format!("d{domain}")).unwrap();
        let name = format!("m{index}");
        let brick = MemoryBrick {
            capacity_bytes: superpages * SUPERPAGE_BYTES,
            read_limit_bytes_per_s: *rate,
            write_limit_bytes_per_s: *rate,
            ..GraphBuilder::usual_memory(&name, tray, domain)
        };
        builder.memory(brick, *count).unwrap();
        ports.extend((0..*count).map(|port| format!("{name}:{port}")));
    }
    let mut used = vec![0; plan.switches.len()];
    let mut switch_port = |builder: &GraphBuilder, switch: u32| {
        let number = &mut used[switch as usize];
        *number += 1;
        builder.find_port(&format!("s{switch}:{}", *number - 1)).unwrap()
    };
    for (port, (switch, rate)) in ports.iter().zip(&plan.brick_links) {
        if *switch < switches {
            let (a, b) = (builder.find_port(port).unwrap(), switch_port(&builder, *switch));
            builder.link(a, b, *rate, 0).unwrap();
        }
    }
    for (from, to, rate) in &plan.trunks {
        let (from, to) = (from % switches, to % switches);
        if from != to {
            let (a, b) = (switch_port(&builder, from), switch_port(&builder, to));
            builder.link(a, b, *rate, 0).unwrap();
        }
    }
    builder.finish()
}

fn policies() -> impl Strategy<Value = PlacementPolicy> {
    proptest::sample::select(PlacementPolicy::all().collect::<Vec<_>>())
}

fn requests() -> impl Strategy<Value = Request> {
    let avoid = proptest::collection::vec((0..3u32).prop_map(DomainId), 0..2);
    let rates = (1..4u64, 1..4u64);
    (0..24u128, 0..4u32, 1..5u64, rates, policies(), avoid, any::<bool>()).prop_map(
        |(id, compute, superpages, (read, write), policy, avoid, may_split)| Request {
            id: RequestId(id),
            compute: ComputeId(compute),
            bytes: superpages * SUPERPAGE_BYTES - 4096,
            rates: RateLimits { read_bytes_per_s: read, write_bytes_per_s: write },
            policy,
            avoid,
            may_split,
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => requests().prop_map(Step::Allocate),
        4 => (0..24u128).prop_map(Step::Release),
        1 => (0..24u128, policies()).prop_map(|(id, policy)| Step::BeginMove(id, policy)),
        1 => (0..24u128).prop_map(Step::FinishMove),
        1 => (0..24u128).prop_map(Step::AbortMove),
        1 => (0..24u128, 0..4u32).prop_map(|(id, compute)| Step::ChangeOwner(id, compute)),
        2 => (0..24u128, 0..7u64).prop_map(|(id, superpages)| {
            Step::Resize(id, superpages * SUPERPAGE_BYTES)
        }),
        1 => (0..4u32, any::<bool>()).prop_map(|(memory, on)| Step::Drain(memory, on)),
        1 => (0..4u32, 0..6u64).prop_map(|(memory, superpages)| Step::Lend(memory, superpages)),
    ];
    proptest::collection::vec(step, 1..40)
}

/// Steps after which a request may be refused that could be served.
fn closes(step: &Step) -> bool {
    matches!(step, Step::Drain(..) | Step::Lend(..))
}

/// Carries out a step; an error must change nothing.
fn act(rack: &mut Allocator, step: &Step) -> Result<(), RackError> {
    let before = rack.snapshot();
    let result = match step {
        Step::Allocate(request) => rack.allocate(request).map(drop),
        Step::Release(id) => rack.release(RequestId(*id)).map(drop),
        Step::BeginMove(id, policy) => rack.begin_move(RequestId(*id), *policy, &[]).map(drop),
        Step::FinishMove(id) => rack.finish_move(RequestId(*id)).map(drop),
        Step::AbortMove(id) => rack.abort_move(RequestId(*id)).map(drop),
        Step::ChangeOwner(id, compute) => {
            rack.change_owner(RequestId(*id), ComputeId(*compute)).map(drop)
        }
        Step::Resize(id, bytes) => rack.resize(RequestId(*id), *bytes).map(|grant| {
            assert_eq!(grant.length_bytes(), *bytes);
            assert_eq!(rack.grant(RequestId(*id)), Some(grant));
        }),
        Step::Lend(memory, superpages) => {
            rack.set_lendable(farpool_placement::MemoryId(*memory), superpages * SUPERPAGE_BYTES)
        }
        Step::Drain(memory, on) => rack.set_draining(farpool_placement::MemoryId(*memory), *on),
    };
    if result.is_err() {
        assert_eq!(rack.snapshot(), before, "{step:?} failed and changed something");
    }
    result
}

fn is_refusal(error: &RackError) -> bool {
    use RackError::{
        LargerThanAnyBrick, LargerThanPool, NoBandwidth, NoCapacity, NoCircuit, NoPort,
    };
    matches!(
        error,
        LargerThanAnyBrick { .. }
            | LargerThanPool { .. }
            | NoBandwidth
            | NoCapacity { .. }
            | NoCircuit
            | NoPort(_)
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_granted_is_sound_and_what_is_refused_was_impossible(
        plan in plans(), steps in steps(),
    ) {
        let mut rack = Allocator::new(build(&plan));
        for step in steps.iter().filter(|step| !closes(step)) {
            let refused = act(&mut rack, step).err().filter(is_refusal);
            let plain = Plain::of(&rack);
            if let (Step::Allocate(request), Some(error)) = (step, refused) {
                prop_assert!(!plain.could_serve(request), "{request:?} was refused: {error}");
            }
        }
    }

    #[test]
    fn release_undoes_allocate(plan in plans(), steps in steps(), request in requests()) {
        let mut rack = Allocator::new(build(&plan));
        let empty = rack.snapshot();
        for step in &steps {
            let _ = act(&mut rack, step);
        }
        let request = Request { id: RequestId(1000), ..request };
        let before = rack.snapshot();
        if rack.allocate(&request).is_ok() {
            prop_assert_ne!(&rack.snapshot(), &before);
            rack.release(request.id).unwrap();
        }
        prop_assert_eq!(&rack.snapshot(), &before);
        for memory in 0..plan.memories.len() {
            let memory = farpool_placement::MemoryId(memory.try_into().unwrap());
            rack.set_draining(memory, false).unwrap();
            rack.set_lendable(memory, u64::MAX).unwrap();
        }
        for id in 0..24 {
            let _ = rack.release(RequestId(id));
        }
        prop_assert_eq!(rack.snapshot(), empty);
    }

    #[test]
    fn stored_grants_give_the_same_rack_again(plan in plans(), steps in steps()) {
        let mut rack = Allocator::new(build(&plan));
        for step in steps.iter().filter(|step| !closes(step)) {
            let _ = act(&mut rack, step);
        }
        let mut again = Allocator::new(build(&plan));
        for (request, grant, moving) in rack.grants() {
            again.adopt(&request, &grant).unwrap();
            let mut twice = again.clone();
            let other = Request { id: RequestId(999), ..request.clone() };
            prop_assert!(twice.adopt(&other, &grant).is_err(), "the same memory was given twice");
            prop_assert_eq!(twice.snapshot(), again.snapshot());
            let Some(moving) = moving else { continue };
            prop_assert!(again.adopt_move(request.id, &grant).is_err(), "a move to where it is");
            let before = again.snapshot();
            let taken = again.adopt_move(request.id, &moving);
            prop_assert_eq!(taken, Ok(()));
            prop_assert_ne!(again.snapshot(), before);
            prop_assert!(again.adopt_move(request.id, &moving).is_err(), "a move taken over twice");
        }
        prop_assert_eq!(again.snapshot(), rack.snapshot());
    }

    #[test]
    fn nothing_new_is_placed_above_what_a_brick_lends(
        plan in plans(), steps in steps(), request in requests(), lends in 0..6u64,
    ) {
        let mut rack = Allocator::new(build(&plan));
        for step in &steps {
            let _ = act(&mut rack, step);
        }
        for memory in 0..plan.memories.len() {
            let memory = farpool_placement::MemoryId(memory.try_into().unwrap());
            rack.set_lendable(memory, lends * SUPERPAGE_BYTES + 4095).unwrap();
        }
        let request = Request { id: RequestId(1000), ..request };
        if let Ok(memory) = rack.allocate(&request).map(|grant| grant.memory) {
            let on_it = |grant: &farpool_placement::Grant| match grant.memory == memory {
                true => grant.length_bytes(),
                false => 0,
            };
            let all = rack.grants();
            let used: u64 = all.map(|(_, now, next)| on_it(&now) + next.as_ref().map_or(0, on_it)).sum();
            prop_assert!(used <= lends * SUPERPAGE_BYTES);
        }
    }

    #[test]
    fn ids_given_are_above_those_raised(segment in 0..1000u64, epoch in 0..1000u64) {
        let mut builder = GraphBuilder::new();
        builder.rack("r0").unwrap();
        let tray = builder.tray("t0", "r0").unwrap();
        let domain = builder.domain("d0").unwrap();
        let brick =
            ComputeBrick { name: "c".into(), tray, domain, power_watts: 0, ports: Vec::new() };
        builder.compute(brick, 1).unwrap();
        builder.memory(GraphBuilder::usual_memory("m", tray, domain), 1).unwrap();
        builder.switch("s", SwitchKind::Packet, 2, 0, 0).unwrap();
        for (brick, port) in [("c:0", "s:0"), ("m:0", "s:1")] {
            let ends = (builder.find_port(brick).unwrap(), builder.find_port(port).unwrap());
            builder.link(ends.0, ends.1, 1000, 0).unwrap();
        }
        let mut rack = Allocator::new(builder.finish());
        rack.raise_ids(farpool_placement::SegmentId(segment), farpool_placement::Epoch(epoch));
        let rates = RateLimits { read_bytes_per_s: 1, write_bytes_per_s: 1 };
        let policy = PlacementPolicy::FirstFit;
        let request = Request::new(RequestId(1), ComputeId(0), 1, rates, policy);
        let grant = rack.allocate(&request).unwrap();
        prop_assert_eq!((grant.segment.0, grant.epoch.0), (segment + 1, epoch + 1));
        prop_assert_eq!(rack.highest_ids().1.0, epoch + 1);
    }
}
