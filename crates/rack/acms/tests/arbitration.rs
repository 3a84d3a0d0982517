//! Which nodes the three policies choose, alone and in a cluster where memory is short.

use std::time::Duration;

use farpool_acms::sim::{Load, Network, Setup, World, seeds};
use farpool_acms::{Arbitration, Candidate, Class, Config, NodeId, Rng, Zone};
use farpool_units::GIB;

const SERVERS: usize = 4;
const CLIENTS: usize = 16;

fn candidate((node, bytes, zone): (u64, u64, u32)) -> Candidate {
    Candidate { node: NodeId(node), bytes, zone: Zone(zone) }
}

fn candidates<const N: usize>(all: [(u64, u64, u32); N]) -> Vec<Candidate> {
    all.into_iter().map(candidate).collect()
}

#[test]
fn names_are_read_back_and_others_refused() {
    for name in ["fcfs", "round-robin", "nearest"] {
        assert_eq!(name.parse::<Arbitration>().unwrap().to_string(), name);
    }
    let error = "random".parse::<Arbitration>().unwrap_err().to_string();
    assert!(error.contains("\"random\"") && error.contains("round-robin"), "{error}");
}

#[test]
fn nobody_is_chosen_of_nobody() {
    for policy in [Arbitration::Fcfs, Arbitration::RoundRobin, Arbitration::Nearest] {
        assert_eq!(policy.first(&[], Zone(0), NodeId(0)), None);
        assert_eq!(policy.ask(&[], 1, Zone(0), NodeId(0), &mut Rng::new(1)), None);
    }
}

#[test]
fn first_come_is_first_served() {
    let all = candidates([(9, 1, 7), (1, 5, 0), (4, 2, 0)]);
    assert_eq!(Arbitration::Fcfs.first(&all, Zone(0), NodeId(9)), Some(0));
}

#[test]
fn round_robin_serves_each_before_it_serves_one_twice() {
    let all = candidates([(30, 1, 0), (10, 1, 0), (20, 1, 0)]);
    let mut last = NodeId(0);
    let mut order = Vec::new();
    for _ in 0..6 {
        let index = Arbitration::RoundRobin.first(&all, Zone(0), last).unwrap();
        last = all[index].node;
        order.push(last.0);
    }
    assert_eq!(order, [10, 20, 30, 10, 20, 30]);
    // One that is gone is skipped, not waited for.
    assert_eq!(Arbitration::RoundRobin.first(&all[..2], Zone(0), NodeId(15)), Some(0));
    let asked = Arbitration::RoundRobin.ask(&all, 1, Zone(0), NodeId(10), &mut Rng::new(1));
    assert_eq!(asked, Some(2));
}

#[test]
fn nearest_is_the_zone_that_shares_most_leading_bits() {
    let all = candidates([(1, 1, 0b1000), (2, 1, 0b0111), (3, 1, 0b0101), (4, 1, 0b0101)]);
    let first = |own| Arbitration::Nearest.first(&all, Zone(own), NodeId(0));
    assert_eq!(first(0b0100), Some(2), "of two as near the one that came first");
    assert_eq!(first(0b0110), Some(1));
    assert_eq!(first(0b1111), Some(0));
}

#[test]
fn nearest_asks_the_nearest_that_suffice_and_a_small_one_only_when_none_does() {
    let all = candidates([(1, 10, 1), (2, 3, 0), (3, 12, 1), (4, 90, 8)]);
    let mut rng = Rng::new(5);
    let mut asked = |want, count: usize| -> Vec<u64> {
        let one = |_| Arbitration::Nearest.ask(&all, want, Zone(0), NodeId(0), &mut rng);
        let mut nodes: Vec<u64> =
            (0..count).filter_map(one).map(|index| all[index].node.0).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    };
    assert_eq!(asked(2, 20), [2]);
    assert_eq!(asked(10, 50), [1, 3], "drawn at random among those as near");
    assert_eq!(asked(50, 20), [4]);
    assert_eq!(asked(100, 20), [2], "none suffices: the nearest gives what it has");
}

#[test]
fn fcfs_asks_the_larger_of_two_drawn_at_random() {
    let all = candidates([(1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 0)]);
    let mut rng = Rng::new(9);
    let mut counts = [0; 4];
    for _ in 0..16_000 {
        let one = Arbitration::Fcfs.ask(&all, 9, Zone(0), NodeId(0), &mut rng).unwrap();
        counts[one] += 1;
    }
    // Two draws of four: the k-th smallest wins (2k - 1) of 16.
    for (count, expected) in counts.into_iter().zip([1_000, 3_000, 5_000, 7_000_i32]) {
        assert!((count - expected).abs() < 300, "{counts:?}");
    }
}

fn zone(node: NodeId) -> Zone {
    // Servers 1 to 4 are in zones of their own; the clients are spread over these zones.
    Zone(u32::try_from(node.0 % 4).unwrap() << 4)
}

fn adjust(policy: Arbitration) -> fn(&mut Config) {
    match policy {
        Arbitration::Fcfs => |config| config.zone = zone(config.node),
        Arbitration::RoundRobin => |config| {
            (config.zone, config.arbitration) = (zone(config.node), Arbitration::RoundRobin);
        },
        Arbitration::Nearest => |config| {
            (config.zone, config.arbitration) = (zone(config.node), Arbitration::Nearest);
        },
    }
}

/// Every client wants 0.85 GiB, all at once; the servers offer about half of what is wanted.
fn shortage(seed: u64, policy: Arbitration) -> World {
    let server = (0..SERVERS).map(|_| Load::steady(4 * GIB, 350));
    let client =
        (0..CLIENTS).map(|_| Load::steady(4 * GIB, 600).then(Duration::from_secs(30), 1_000));
    let setup = Setup {
        seed,
        loads: server.chain(client).collect(),
        network: Network::good(),
        acquainted: true,
        evacuation_ms_max: 1_000,
        stuck_permille: 0,
        notes: false,
    };
    World::with(setup, Some(adjust(policy)))
}

#[derive(Debug)]
struct Shares {
    /// Jain's index of the clients' memory: 1 if all have the same, 1/n if one has all.
    jain: f64,
    without: usize,
    /// Part of the granted bytes that lies in the client's own zone.
    near: f64,
}

#[expect(clippy::cast_precision_loss, reason = "bytes far below 2^52")]
fn shares(world: &World) -> Shares {
    let members = || (0..world.len()).filter_map(|index| world.member(index));
    let has: Vec<f64> = members()
        .filter(|member| member.class() == Class::Client)
        .map(|member| member.usable_bytes() as f64)
        .collect();
    assert_eq!(has.len(), CLIENTS);
    let (sum, squares) = (has.iter().sum::<f64>(), has.iter().map(|it| it * it).sum::<f64>());
    let bound = members().flat_map(farpool_acms::Member::bound);
    let (mut near, mut all) = (0.0, 0.0);
    for (grant, client, bytes) in bound {
        all += bytes as f64;
        near += if zone(grant.server) == zone(client) { bytes as f64 } else { 0.0 };
    }
    let without = has.iter().filter(|it| **it == 0.0).count();
    Shares { jain: sum * sum / (squares * has.len() as f64), without, near: near / all }
}

/// The ledger checks every step; this checks that no memory is idle while clients wait.
fn run(policy: Arbitration) -> Vec<Shares> {
    let mut all = Vec::new();
    for seed in seeds(1, 20) {
        println!("FARPOOL_SEED={seed} {policy}");
        let mut world = shortage(seed, policy);
        world.run(Duration::from_secs(90));
        world.ledger.check_agreement(world.now());
        let members = || (0..world.len()).filter_map(|index| world.member(index));
        let wanted: u64 = members().map(farpool_acms::Member::wanted_bytes).sum();
        let offered: u64 = members().map(farpool_acms::Member::offered_bytes).sum();
        let held: u64 = members().map(farpool_acms::Member::held_bytes).sum();
        assert!(offered > 0 && wanted > offered * 3 / 2, "{wanted} wanted, {offered} offered");
        assert_eq!(held, offered, "memory lies idle while clients wait");
        all.push(shares(&world));
    }
    let mean = |of: fn(&Shares) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
    let lowest = all.iter().map(|it| it.jain).fold(1.0, f64::min);
    println!(
        "{policy}: Jain {:.3} (lowest {lowest:.3}), {:.1} of {CLIENTS} without, {:.0} % near",
        mean(|it| it.jain),
        mean(|it| it.without as f64),
        100.0 * mean(|it| it.near)
    );
    all
}

#[test]
fn a_shortage_under_each_policy_breaks_no_rule_and_leaves_nothing_idle() {
    let near = |all: &[Shares]| all.iter().map(|it| it.near).sum::<f64>() / all.len() as f64;
    let fcfs = run(Arbitration::Fcfs);
    run(Arbitration::RoundRobin);
    let nearest = run(Arbitration::Nearest);
    assert!(near(&nearest) > near(&fcfs) + 0.2, "{} {}", near(&nearest), near(&fcfs));
}
