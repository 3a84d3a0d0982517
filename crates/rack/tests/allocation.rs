//! Allocation against the plain model: on random small racks, after any history, everything granted
//! is sound, everything refused was impossible, and release undoes allocate.

mod plain;

use farpool_rack::{
    Allocator, ComputeBrick, ComputeId, DomainId, Graph, GraphBuilder, MemoryBrick,
    PlacementPolicy, RackError, RateLimits, Request, RequestId, SUPERPAGE_BYTES, SwitchKind,
};
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
    Drain(u32, bool),
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
        1 => (0..4u32, any::<bool>()).prop_map(|(memory, on)| Step::Drain(memory, on)),
    ];
    proptest::collection::vec(step, 1..40)
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
        Step::Drain(memory, on) => rack.set_draining(farpool_rack::MemoryId(*memory), *on),
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
        for step in steps.iter().filter(|step| !matches!(step, Step::Drain(..))) {
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
            rack.set_draining(farpool_rack::MemoryId(memory.try_into().unwrap()), false).unwrap();
        }
        for id in 0..24 {
            let _ = rack.release(RequestId(id));
        }
        prop_assert_eq!(rack.snapshot(), empty);
    }

    #[test]
    fn stored_grants_give_the_same_rack_again(plan in plans(), steps in steps()) {
        let mut rack = Allocator::new(build(&plan));
        for step in steps.iter().filter(|step| !matches!(step, Step::Drain(..))) {
            let _ = act(&mut rack, step);
        }
        for id in 0..24 {
            let _ = rack.finish_move(RequestId(id));
        }
        let mut again = Allocator::new(build(&plan));
        for (request, grant, _) in rack.grants() {
            again.adopt(request, grant).unwrap();
            let mut twice = again.clone();
            let other = Request { id: RequestId(999), ..request.clone() };
            prop_assert!(twice.adopt(&other, grant).is_err(), "the same memory was given twice");
            prop_assert_eq!(twice.snapshot(), again.snapshot());
        }
        prop_assert_eq!(again.snapshot(), rack.snapshot());
    }
}
