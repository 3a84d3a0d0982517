//! Policies compared on synthetic traces: why the default is the default.
//!
//! `cargo test -p farpool-policy --test hit_ratios -- --nocapture` prints the tables that the
//! headers of `sweep` and `victim` quote. Everything is seeded, so the numbers are always the same;
//! the asserts check the facts that the choice rests on.

use farpool_policy::{CHUNK_PAGES, ChunkSweep, Rng, SweepPolicy, VictimKind};
use farpool_units::exactly;
use std::collections::VecDeque;

const PAGES: u32 = 1 << 14;
const ACCESSES: u32 = 400_000;

/// Rough costs, from DESIGN.md section 5: a fetch over shm, a page taken back, one MOVE of a chunk
/// and its share per page, with the copy to the blade.
const FETCH_US: f64 = 5.0;
const TAKE_BACK_US: f64 = 4.5;
const VISIT_US: f64 = 0.7;
const EVICT_US: f64 = 0.55;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trace {
    /// Zipf 0.99 by page, the popular pages scattered over the addresses.
    Zipf,
    /// 90 % of accesses to 10 % of the pages, the hot ones together (HPL-2011-31's mstress).
    HotCold,
    /// The same with the hot pages scattered.
    HotColdScattered,
    /// Cycles over all pages.
    Loop,
    /// Half hot set, half one long scan.
    ScanAndHot,
    /// All pages equally often.
    Uniform,
}

impl Trace {
    const ALL: [Self; 6] = [
        Self::Zipf,
        Self::HotCold,
        Self::HotColdScattered,
        Self::Loop,
        Self::ScanAndHot,
        Self::Uniform,
    ];

    fn accesses(self) -> Vec<u32> {
        let mut rng = Rng::new(11);
        let zipf = Zipf::new(PAGES, 0.99);
        let hot = PAGES / 10;
        (0..ACCESSES)
            .map(|i| match self {
                Self::Zipf => scatter(zipf.draw(&mut rng)),
                Self::HotCold => hot_cold(&mut rng, hot),
                Self::HotColdScattered => scatter(hot_cold(&mut rng, hot)),
                Self::Loop => i % PAGES,
                Self::ScanAndHot if i % 2 == 0 => (hot + i / 2) % PAGES,
                Self::ScanAndHot => rng.below(hot),
                Self::Uniform => rng.below(PAGES),
            })
            .collect()
    }
}

fn hot_cold(rng: &mut Rng, hot: u32) -> u32 {
    if rng.below(10) < 9 { rng.below(hot) } else { hot + rng.below(PAGES - hot) }
}

/// A fixed permutation of the pages (odd multiplier modulo a power of two).
fn scatter(page: u32) -> u32 {
    page.wrapping_mul(0x9E37_79B1) % PAGES
}

/// Draws ranks by binary search in the cumulative weights.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(items: u32, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weights = (1..=items).map(|rank| {
            sum += f64::from(rank).powf(-exponent);
            sum
        });
        Self(weights.collect())
    }

    fn draw(&self, rng: &mut Rng) -> u32 {
        let total = self.0.last().copied().unwrap_or(0.0);
        let at = f64::from(rng.below(u32::MAX)) / f64::from(u32::MAX) * total;
        let rank = self.0.partition_point(|cumulated| *cumulated < at).min(self.0.len() - 1);
        exactly(rank)
    }
}

/// Returns the hit ratio of an exact policy that sees every reference.
fn exact_hit_ratio(kind: VictimKind, accesses: &[u32], local: u32) -> f64 {
    let mut policy = kind.build(PAGES as usize, 1);
    let mut resident = vec![false; PAGES as usize];
    let (mut hits, mut out) = (0u32, Vec::new());
    for page in accesses {
        if resident[*page as usize] {
            hits += 1;
            policy.touch(*page);
            continue;
        }
        if policy.len() == local as usize {
            out.clear();
            policy.victims(1, &mut out);
            resident[out[0] as usize] = false;
        }
        resident[*page as usize] = true;
        policy.insert(*page);
    }
    f64::from(hits) / f64::from(ACCESSES)
}

/// A small pager: residents, a victim buffer in order of eviction, sweeps by chunk.
struct ModelPager {
    sweep: ChunkSweep,
    resident: Vec<u64>,
    hot: Vec<u64>,
    in_buffer: Vec<u64>,
    buffer: VecDeque<u32>,
    resident_pages: u32,
    local_pages: u32,
    counts: Counts,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    hits: u32,
    fetches: u32,
    taken_back: u32,
    visits: u32,
    evicted: u32,
}

impl Counts {
    fn hit_ratio(&self) -> f64 {
        f64::from(self.hits) / f64::from(ACCESSES)
    }

    /// Returns the cost of memory per access, by the rough costs above.
    fn cost_us(&self) -> f64 {
        let cost = f64::from(self.fetches) * FETCH_US
            + f64::from(self.taken_back) * TAKE_BACK_US
            + f64::from(self.visits) * VISIT_US
            + f64::from(self.evicted) * EVICT_US;
        cost / f64::from(ACCESSES)
    }
}

impl ModelPager {
    fn new(kind: VictimKind, local_pages: u32) -> Self {
        let chunks = (PAGES / CHUNK_PAGES) as usize;
        Self {
            sweep: ChunkSweep::new(kind, chunks, 1),
            resident: vec![0; chunks],
            hot: vec![0; chunks],
            in_buffer: vec![0; chunks],
            buffer: VecDeque::new(),
            resident_pages: 0,
            local_pages,
            counts: Counts::default(),
        }
    }

    fn buffer_pages(&self) -> u32 {
        self.local_pages / 16
    }

    fn access(&mut self, page: u32) {
        let (chunk, bit) = ((page / CHUNK_PAGES) as usize, 1u64 << (page % CHUNK_PAGES));
        if self.resident[chunk] & bit != 0 {
            self.counts.hits += 1;
            return;
        }
        if self.in_buffer[chunk] & bit != 0 {
            self.in_buffer[chunk] &= !bit;
            self.counts.taken_back += 1;
            self.hot[chunk] |= bit;
            self.sweep.on_take_back(chunk);
        } else {
            self.counts.fetches += 1;
            self.sweep.on_fetch(chunk);
        }
        self.resident[chunk] |= bit;
        self.resident_pages += 1;
        if self.resident_pages > self.local_pages - self.buffer_pages() {
            self.evict();
        }
    }

    fn evict(&mut self) {
        let low = self.local_pages - self.buffer_pages() - CHUNK_PAGES;
        while self.resident_pages > low {
            let chunk = self.sweep.next_chunk().expect("there are chunks");
            if self.resident[chunk] != 0 {
                self.take_from(chunk);
            }
        }
        while self.buffer.len() > self.buffer_pages() as usize {
            let Some(page) = self.buffer.pop_front() else {
                break;
            };
            self.in_buffer[(page / CHUNK_PAGES) as usize] &= !(1 << (page % CHUNK_PAGES));
        }
    }

    fn take_from(&mut self, chunk: usize) {
        let choice = self.sweep.choose(chunk, self.resident[chunk], self.hot[chunk]);
        let taken = choice.take.count_ones();
        self.counts.visits += u32::from(taken > 0);
        self.counts.evicted += taken;
        self.resident[chunk] &= !choice.take;
        self.hot[chunk] &= !choice.clear_hot;
        self.in_buffer[chunk] |= choice.take;
        self.resident_pages -= taken;
        let first = exactly::<u32, _>(chunk) * CHUNK_PAGES;
        let pages = (0..CHUNK_PAGES).filter(|i| choice.take >> i & 1 == 1).map(|i| first + i);
        self.buffer.extend(pages);
    }
}

fn sweep_counts(kind: VictimKind, accesses: &[u32], local: u32) -> Counts {
    let mut pager = ModelPager::new(kind, local);
    accesses.iter().for_each(|page| pager.access(*page));
    pager.counts
}

fn print_row(name: &str, cells: impl Iterator<Item = String>) {
    println!("{name:<24}{}", cells.map(|cell| format!("{cell:>22}")).collect::<String>());
}

#[test]
fn exact_policies_rank_as_the_literature_says() {
    print_row("exact, hit ratio", VictimKind::ALL.iter().map(ToString::to_string));
    for (share, local) in [("50 %", PAGES / 2), ("25 %", PAGES / 4)] {
        for trace in Trace::ALL {
            let accesses = trace.accesses();
            let ratio = VictimKind::ALL.map(|kind| exact_hit_ratio(kind, &accesses, local));
            print_row(&format!("{trace:?} {share}"), ratio.iter().map(|r| format!("{r:.3}")));
            let [fifo, clock, lru, random, sieve] = ratio;
            if matches!(trace, Trace::Zipf | Trace::HotCold | Trace::ScanAndHot) {
                assert!(clock > fifo && lru > fifo && sieve > fifo, "{trace:?}");
                assert!(sieve >= clock - 0.002, "{trace:?}");
            }
            if trace == Trace::Loop {
                assert!(random > lru, "a loop larger than memory defeats recency");
            }
        }
    }
}

#[test]
fn clock_is_the_cheapest_sweep_over_all_traces() {
    let header = VictimKind::ALL.iter().map(|k| format!("{k} hit / us / pages"));
    print_row("sweep", header);
    let mut total_us = [0.0; VictimKind::ALL.len()];
    for (share, local) in [("50 %", PAGES / 2), ("25 %", PAGES / 4)] {
        for trace in Trace::ALL {
            let accesses = trace.accesses();
            let counts = VictimKind::ALL.map(|kind| sweep_counts(kind, &accesses, local));
            let cell = |c: &Counts| {
                let pages = f64::from(c.evicted) / f64::from(c.visits.max(1));
                format!("{:.3} / {:.2} / {pages:.0}", c.hit_ratio(), c.cost_us())
            };
            print_row(&format!("{trace:?} {share}"), counts.iter().map(cell));
            let [fifo, clock, ..] = counts.map(|c| c.hit_ratio());
            assert!(clock >= fifo - 0.001, "{trace:?}: sparing hot pages never costs hits");
            total_us.iter_mut().zip(&counts).for_each(|(sum, c)| *sum += c.cost_us());
        }
    }
    print_row("sum of costs (us)", total_us.iter().map(|us| format!("{us:.2}")));
    let default = VictimKind::ALL.iter().position(|kind| *kind == VictimKind::default());
    let cheapest = total_us.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(default.map(|at| total_us[at]), Some(cheapest), "the default has to be the best");
}
