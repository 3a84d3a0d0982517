//! Prints how many times a second the rack grants and takes back a segment, with 10 segments
//! standing per compute brick, for growing racks and every policy.
//!
//!     cargo bench -p farpool-placement --bench rack_speed -- [ROUNDS [Packet|Mixed|Circuit]]
//!
//! Each round releases a random standing segment and requests another for a random compute brick,
//! so the rack stays equally full. The time of drawing random numbers is included.

use std::io::Write as _;
use std::time::{Duration, Instant};

use farpool_placement::topology::{NetworkKind, RackSpec, generate};
use farpool_placement::{Allocator, ComputeId, PlacementPolicy, RateLimits, Request, RequestId};

const SEGMENTS_PER_COMPUTE: u32 = 10;
const SIZES_SUPERPAGES: u32 = 16;

/// Xorshift: the same sequence in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 % u64::from(end)).expect("below a number of 32 bits")
    }
}

/// 20 compute and 20 memory bricks a rack.
fn spec(bricks: u32, network: NetworkKind) -> RackSpec {
    RackSpec {
        racks: bricks / 20,
        trays_per_rack: 5,
        compute_per_tray: 4,
        memory_per_tray: 4,
        ports_per_brick: 4,
        capacity_bytes: 4 << 30,
        ..RackSpec::new(network)
    }
}

fn request(id: u128, compute: u32, random: &mut Random, policy: PlacementPolicy) -> Request {
    let bytes = u64::from(1 + random.below(SIZES_SUPERPAGES)) << 24;
    let rates = RateLimits { read_bytes_per_s: 16 << 20, write_bytes_per_s: 16 << 20 };
    Request::new(RequestId(id), ComputeId(compute), bytes, rates, policy)
}

/// Returns this thread's processor time, so that a busy machine does not count. Returns the time
/// since `since` if Linux does not report it.
fn processor_time(since: Instant) -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let on_cpu_ns = text.split_whitespace().next().and_then(|text| text.parse().ok());
    on_cpu_ns.map_or_else(|| since.elapsed(), Duration::from_nanos)
}

struct Figures {
    standing: usize,
    per_second: f64,
    refused: u64,
}

fn measure(bricks: u32, network: NetworkKind, policy: PlacementPolicy, rounds: u64) -> Figures {
    let graph = generate(&spec(bricks, network)).expect("the specification is sound");
    let mut rack = Allocator::new(graph);
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let mut ids: Vec<u128> = Vec::new();
    let mut next_id = 0;
    for _ in 0..SEGMENTS_PER_COMPUTE {
        for compute in 0..bricks {
            next_id += 1;
            if rack.allocate(&request(next_id, compute, &mut random, policy)).is_ok() {
                ids.push(next_id);
            }
        }
    }
    let standing = ids.len();
    let held = u32::try_from(standing).expect("ten segments a brick");
    let mut refused = 0;
    let clock = Instant::now();
    let begin = processor_time(clock);
    for _ in 0..rounds {
        let at = random.below(held) as usize;
        rack.release(RequestId(ids[at])).expect("it stands");
        loop {
            next_id += 1;
            let compute = random.below(bricks);
            if rack.allocate(&request(next_id, compute, &mut random, policy)).is_ok() {
                break;
            }
            refused += 1;
        }
        ids[at] = next_id;
    }
    let spent = processor_time(clock).saturating_sub(begin);
    Figures { standing, per_second: rounds as f64 / spent.as_secs_f64(), refused }
}

fn main() {
    let mut arguments = farpool_benchargs::arguments();
    let rounds = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(200_000);
    let only = arguments.next();
    println!("bricks of each kind, network, policy: allocate + release per second");
    for network in [NetworkKind::Packet, NetworkKind::Mixed, NetworkKind::Circuit] {
        if only.as_ref().is_some_and(|only| *only != format!("{network:?}")) {
            continue;
        }
        for policy in PlacementPolicy::all() {
            let network_name = format!("{network:?}");
            let policy_name = policy.to_string();
            print!("{network_name:<8} {policy_name:<13}");
            let mut first = None;
            for bricks in [1_000, 10_000, 100_000] {
                let figures = measure(bricks, network, policy, rounds);
                let Figures { standing, per_second, refused } = figures;
                let _ = std::io::stdout().flush();
                let cost = first.get_or_insert(per_second).max(1.0) / per_second;
                print!(" | {bricks:>6}: {per_second:>8.0}/s cost x{cost:<4.2}");
                print!(" {standing:>7} standing {refused:>6} refused");
            }
            println!();
        }
    }
}
