//! The real code of small clusters under many seeds: bad networks, partitions, crashes, clocks
//! that jump. The ledger checks every step; a failing seed repeats with `FARPOOL_SEED`.

use std::time::Duration;

use farpool_acms::sim::{Load, Network, Setup, World, seeds};
use farpool_acms::{Class, Config, Member, RACK_KEY_BYTES, RackKey, RackKeys, Rng};
use farpool_units::GIB;

fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn setup(seed: u64, rng: &mut Rng) -> Setup {
    let nodes = 3 + rng.index(6);
    let levels = [100, 200, 300, 450, 700, 950, 1_100, 1_300];
    let loads = (0..nodes)
        .map(|_| {
            let mut load = Load::steady(4 * GIB, levels[rng.index(levels.len())]);
            load.noise_permille = rng.below(40);
            if rng.below(4) == 0 {
                load.wave = Some((rng.below(800), secs(20 + rng.below(60))));
            }
            load
        })
        .collect();
    Setup {
        seed,
        loads,
        network: Network::bad(rng),
        acquainted: false,
        evacuation_ms_max: 12_000,
        stuck_permille: 50,
        notes: false,
    }
}

/// About a minute of trouble; the events and their times are drawn from the seed.
fn trouble(world: &mut World, rng: &mut Rng, jumps: bool) {
    for _ in 0..60 {
        let index = rng.index(world.len());
        match rng.below(12) {
            0 if world.is_alive(index) => world.crash(index),
            1 | 2 if !world.is_alive(index) => world.start(index),
            3 => {
                let groups = (0..world.len()).map(|_| u8::from(rng.below(2) == 0));
                world.network.groups = groups.collect();
            }
            4 | 5 => world.network.groups.clear(),
            6 | 7 => world.load(index).level_permille = rng.below(1_400),
            8 if jumps => {
                let by = farpool_units::exactly::<i64, _>(rng.below(40_000)) - 20_000;
                world.skew(index, by);
            }
            _ => {}
        }
        world.run(Duration::from_millis(200 + rng.below(2_000)));
    }
}

/// Everything heals and loads do not change; both sides must agree, and every client that can be
/// served is served.
fn calm(world: &mut World, rng: &mut Rng) {
    world.network = Network::good();
    for index in 0..world.len() {
        if !world.is_alive(index) {
            world.start(index);
        }
        let load = world.load(index);
        (load.noise_permille, load.wave) = (0, None);
        load.level_permille = [200, 300, 600, 950, 1_100][rng.index(5)];
    }
    world.run(secs(120));
    world.ledger.check_agreement(world.now());
    let members = || (0..world.len()).filter_map(|index| world.member(index));
    for member in members() {
        assert_eq!(
            member.peers().len(),
            world.len() - 1,
            "{:?} of {} in its life {:?} knows {:?}",
            member.config().node,
            world.len(),
            member.config().incarnation,
            member.peers()
        );
        assert_eq!(member.held_bytes(), world.ledger.lent_bytes(member.config().node));
    }
    let lacks =
        |one: &&Member| one.class() == Class::Client && one.usable_bytes() < one.wanted_bytes();
    assert_eq!(members().filter(lacks).count(), world.ledger.waiting());
    for client in members().filter(lacks) {
        let node = client.config().node;
        let free = |one: &Member| {
            let free = one.offered_bytes().saturating_sub(one.held_bytes());
            free.min(one.share_left_bytes(node))
        };
        let free: u64 = members().map(free).sum();
        assert_eq!(free, 0, "{node:?} waits while it could get {free} bytes");
    }
}

fn story(seed: u64, jumps: bool, adjust: Option<fn(&mut Config)>) {
    println!("FARPOOL_SEED={seed}");
    let mut rng = Rng::new(seed ^ 0x5EED);
    let mut world = World::with(setup(seed, &mut rng), adjust);
    world.run(secs(10));
    trouble(&mut world, &mut rng, jumps);
    if !jumps {
        calm(&mut world, &mut rng);
    }
}

#[test]
fn small_clusters_in_trouble_break_no_rule_and_agree_afterwards() {
    for seed in seeds(1, 200) {
        story(seed, false, None);
    }
}

#[test]
fn clocks_that_jump_give_no_byte_two_owners() {
    for seed in seeds(1_000, 60) {
        story(seed, true, None);
    }
}

#[test]
fn with_a_rack_key_small_clusters_break_no_rule_and_agree_afterwards() {
    let keyed = |config: &mut Config| {
        config.keys = RackKeys::of(RackKey::new([7; RACK_KEY_BYTES]), None);
    };
    for seed in seeds(2_000, 60) {
        story(seed, seed % 4 == 0, Some(keyed));
    }
}

#[test]
fn the_same_seed_gives_the_same_story() {
    let run = || {
        let mut rng = Rng::new(5);
        let mut setup = setup(5, &mut rng);
        setup.notes = true;
        let mut world = World::new(setup);
        trouble(&mut world, &mut rng, false);
        (world.notes, world.kinds)
    };
    let (notes, kinds) = run();
    assert!(notes.len() > 20, "a story worth comparing: {}", notes.len());
    assert_eq!((notes, kinds), run());
}

#[test]
fn a_client_is_served_by_the_only_server() {
    let loads = vec![Load::steady(8 * GIB, 200), Load::steady(4 * GIB, 1_000)];
    let network = Network::good();
    let setup = Setup {
        seed: 1,
        loads,
        network,
        acquainted: false,
        evacuation_ms_max: 100,
        stuck_permille: 0,
        notes: false,
    };
    let mut world = World::new(setup);
    world.run(secs(10));
    let client = world.member(1).expect("lives");
    assert_eq!(client.class(), Class::Client);
    assert!(client.wanted_bytes() > GIB / 2);
    assert_eq!(client.usable_bytes(), client.wanted_bytes());
    world.ledger.check_agreement(world.now());
}
