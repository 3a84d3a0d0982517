//! One large cluster without faults: how fast clients are served, how many messages that costs, and
//! whether the cluster is stable afterwards.

use std::time::Duration;

use crate::limits::BROADCAST_PERIOD;
use crate::sim::{Load, Network, Setup, World};

/// Memory of a simulated node.
const NODE_BYTES: u64 = 16 << 30;
/// Use of a server, a neutral node and a client, thousandths: a server offers 550, a client wants
/// 200.
const SERVER_PERMILLE: u64 = 200;
const NEUTRAL_PERMILLE: u64 = 600;
const CLIENT_PERMILLE: u64 = 1_000;
/// Noise on every node's use, thousandths: less than the guard bands.
const NOISE_PERMILLE: u64 = 20;
/// Time in which servers raise their offers and the estimates of the mix settle.
const WARM: Duration = Duration::from_secs(30);
/// Time of the rush: all clients become clients within its first second, and the rumours die down
/// afterwards.
const RUSH: Duration = Duration::from_secs(20);

/// The cluster.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Number of nodes.
    pub nodes: usize,
    /// Clients, percent.
    pub clients_percent: usize,
    /// Servers, percent.
    pub servers_percent: usize,
    /// Datagrams lost, thousandths.
    pub loss_permille: u64,
    /// How long to observe the cluster after the rush.
    pub steady: Duration,
    /// Seed.
    pub seed: u64,
}

/// The results.
#[derive(Clone, Debug)]
pub struct Report {
    /// Clients that wanted memory.
    pub clients: usize,
    /// Clients that had all they wanted after the rush.
    pub served: usize,
    /// Waits of the clients served, in broadcast periods, ascending.
    pub waits_periods: Vec<f64>,
    /// Datagrams sent per node and period while clients are being served, mean.
    pub rush_messages: f64,
    /// Datagrams sent per node and period while nothing changes, mean.
    pub steady_messages: f64,
    /// Datagrams sent per period while nothing changes, by the node that sent most.
    pub steady_messages_max: f64,
    /// Bytes sent per node and period while nothing changes, mean.
    pub steady_bytes: f64,
    /// Changes of class while nothing changes.
    pub class_changes: u64,
    /// Changes of the broadcasting side while nothing changes, all nodes together.
    pub side_changes: u64,
    /// Steady datagrams per node and period, by kind.
    pub kinds: Vec<(u8, f64)>,
}

impl Report {
    /// Returns the wait that `percent` of the clients served did not exceed, in periods.
    #[must_use]
    pub fn wait(&self, percent: usize) -> f64 {
        let last = self.waits_periods.len().saturating_sub(1);
        self.waits_periods.get(last * percent / 100).copied().unwrap_or(f64::INFINITY)
    }
}

fn periods(time: Duration) -> f64 {
    time.as_secs_f64() / BROADCAST_PERIOD.as_secs_f64()
}

fn setup(scale: &Scale) -> (Setup, usize) {
    let clients = scale.nodes * scale.clients_percent / 100;
    let servers = scale.nodes * scale.servers_percent / 100;
    let load = |index: usize| {
        let level = if index < clients {
            NEUTRAL_PERMILLE
        } else if index < clients + servers {
            SERVER_PERMILLE
        } else {
            NEUTRAL_PERMILLE
        };
        let mut load = Load::steady(NODE_BYTES, level);
        load.noise_permille = NOISE_PERMILLE;
        load
    };
    let mut network = Network::good();
    network.loss_permille = scale.loss_permille;
    let setup = Setup {
        seed: scale.seed,
        loads: (0..scale.nodes).map(load).collect(),
        network,
        acquainted: true,
        evacuation_ms_max: 1_000,
        stuck_permille: 0,
        notes: false,
    };
    (setup, clients)
}

fn sent(world: &World) -> Vec<(u64, u64)> {
    let counters = |index| world.member(index).map(crate::Member::counters);
    (0..world.len())
        .map(|index| counters(index).map_or((0, 0), |one| (one.sent, one.sent_bytes)))
        .collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn per_node_period(count: u64, nodes: usize, time: Duration) -> f64 {
    count as f64 / nodes as f64 / periods(time)
}

/// Runs one cluster.
#[must_use]
pub fn run_scale(scale: &Scale) -> Report {
    let (setup, clients) = setup(scale);
    let mut world = World::new(setup);
    world.run(WARM);
    let warm = sent(&world);
    for index in 0..clients {
        world.load(index).level_permille = CLIENT_PERMILLE;
    }
    world.run(RUSH);
    let mut waits: Vec<f64> =
        world.ledger.served.iter().map(|served| periods(served.wait)).collect();
    waits.sort_by(f64::total_cmp);
    let has_all = |index: &usize| {
        let member = world.member(*index);
        member.is_some_and(|one| one.wanted_bytes() > 0 && one.usable_bytes() >= one.wanted_bytes())
    };
    let served = (0..clients).filter(has_all).count();
    let rush = sent(&world);
    let before = (world.class_changes, world.side_changes, world.kinds.clone());
    world.run(scale.steady);
    let steady = sent(&world);
    let total = |one: &[(u64, u64)]| one.iter().map(|(count, _)| count).sum::<u64>();
    let bytes = |one: &[(u64, u64)]| one.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let most = steady.iter().zip(&rush).map(|(after, before)| after.0 - before.0).max();
    let kind = |(kind, (count, _)): (&u8, &(u64, u64))| {
        let was = before.2.get(kind).map_or(0, |(count, _)| *count);
        (*kind, per_node_period(count - was, scale.nodes, scale.steady))
    };
    Report {
        clients,
        served,
        waits_periods: waits,
        rush_messages: per_node_period(total(&rush) - total(&warm), scale.nodes, RUSH),
        steady_messages: per_node_period(total(&steady) - total(&rush), scale.nodes, scale.steady),
        steady_messages_max: per_node_period(most.unwrap_or(0), 1, scale.steady),
        steady_bytes: per_node_period(bytes(&steady) - bytes(&rush), scale.nodes, scale.steady),
        class_changes: world.class_changes - before.0,
        side_changes: world.side_changes - before.1,
        kinds: world.kinds.iter().map(kind).collect(),
    }
}
