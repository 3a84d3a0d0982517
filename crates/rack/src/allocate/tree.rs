//! The index over memory bricks: finds the best brick for a request without looking at all.
//!
//! A tree with eight children per node whose leaves are the bricks, sorted by rack and tray. Each
//! node keeps the best of every dimension among its bricks (most free memory, most bandwidth left,
//! lowest load, ...), so a search skips a subtree when even its best would not do, or when its best
//! possible score is no better than what was found. It is exact: nothing is skipped that could win,
//! and a brick's own values decide at the leaf. A change of one brick updates one way to the root.
//!
//! Rejected: one ordered set per policy and wish. A request has several needs at once (memory,
//! both bandwidths, domains, a path), and an ordered set prunes by one of them only; five sets also
//! cost five updates.

use crate::graph::{Graph, PowerState};
use crate::ids::{DomainId, MemoryId};

use super::policy::{PlacementPolicy, Score, lowest_class, size_class};

const FAN_OUT: usize = 8;
/// Of a node whose bricks differ in this.
const VARIOUS: u32 = u32::MAX;

/// The best of a subtree, in each dimension by itself; of a leaf, the brick's values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Best {
    pub(super) largest_superpages: u32,
    pub(super) total_superpages: u32,
    pub(super) read_left: u64,
    pub(super) write_left: u64,
    pub(super) load_permille: u32,
    /// Lowest index in the topology of a brick that can be used at all.
    pub(super) index: u32,
    /// Size classes of the free memory of bricks that have power, and of those that have not.
    pub(super) classes_on: u128,
    pub(super) classes_off: u128,
    /// As the first two, but of bricks without a free port too: tells apart why nothing fits.
    pub(super) any_largest: u32,
    pub(super) any_total: u32,
}

impl Best {
    /// Of no brick.
    const NONE: Self = Self {
        largest_superpages: 0,
        total_superpages: 0,
        read_left: 0,
        write_left: 0,
        load_permille: u32::MAX,
        index: u32::MAX,
        classes_on: 0,
        classes_off: 0,
        any_largest: 0,
        any_total: 0,
    };

    /// This brick, but for newcomers it has no way in.
    pub(super) fn closed(self) -> Self {
        let (any_largest, any_total) = (self.any_largest, self.any_total);
        Self { any_largest, any_total, ..Self::NONE }
    }

    fn with(self, other: &Self) -> Self {
        Self {
            largest_superpages: self.largest_superpages.max(other.largest_superpages),
            total_superpages: self.total_superpages.max(other.total_superpages),
            read_left: self.read_left.max(other.read_left),
            write_left: self.write_left.max(other.write_left),
            load_permille: self.load_permille.min(other.load_permille),
            index: self.index.min(other.index),
            classes_on: self.classes_on | other.classes_on,
            classes_off: self.classes_off | other.classes_off,
            any_largest: self.any_largest.max(other.any_largest),
            any_total: self.any_total.max(other.any_total),
        }
    }
}

/// What of a subtree never changes.
#[derive(Clone, Copy, Debug)]
struct Fixed {
    rack: (u32, u32),
    tray: (u32, u32),
    domain: u32,
    cabling: u32,
    latency_ns: u32,
}

impl Fixed {
    fn with(self, other: &Self) -> Self {
        let same = |a, b| if a == b { a } else { VARIOUS };
        Self {
            rack: (self.rack.0.min(other.rack.0), self.rack.1.max(other.rack.1)),
            tray: (self.tray.0.min(other.tray.0), self.tray.1.max(other.tray.1)),
            domain: same(self.domain, other.domain),
            cabling: same(self.cabling, other.cabling),
            latency_ns: self.latency_ns.min(other.latency_ns),
        }
    }
}

/// What a search looks for.
#[derive(Clone, Debug)]
pub(super) struct Query<'a> {
    pub(super) superpages: u32,
    pub(super) may_split: bool,
    pub(super) read: u64,
    pub(super) write: u64,
    pub(super) policy: PlacementPolicy,
    pub(super) avoid: &'a [DomainId],
    /// Not this brick: the segment lies there now.
    pub(super) except: Option<MemoryId>,
    pub(super) rack: u32,
    pub(super) tray: u32,
    /// Segments of the compute brick per domain, domains without any left out.
    pub(super) counts: &'a [(DomainId, u32)],
}

/// Judges a brick that fits and would win: is there a path? Also tells which subtrees cannot have
/// one.
pub(super) trait Judge {
    /// Whether the brick will do.
    fn accepts(&mut self, memory: MemoryId) -> bool;
    /// False when no brick with this cabling will do.
    fn cabling_may_do(&self, cabling: u32) -> bool;
    /// False when no brick among these leaves will do.
    fn leaves_may_do(&self, first: usize, end: usize) -> bool;
}

/// The index.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    /// `best[0]` are the leaves, the last level is the root.
    best: Vec<Vec<Best>>,
    fixed: Vec<Vec<Fixed>>,
    memory_at: Vec<MemoryId>,
    leaf_of: Vec<u32>,
}

impl Tree {
    /// Bricks of `graph`, of which `cabling` says which cabling each has; all unusable until
    /// [`update`](Self::update).
    pub(super) fn new(graph: &Graph, cabling: &[u32]) -> Self {
        let rack = |memory: &MemoryId| {
            let tray = graph.memories()[memory.index()].tray;
            (graph.trays()[tray.index()].rack.0, tray.0)
        };
        let mut memory_at: Vec<_> = (0..graph.memories().len()).map(MemoryId::at).collect();
        memory_at.sort_by_key(|memory| (rack(memory), memory.0));
        let mut leaf_of = vec![0; memory_at.len()];
        for (leaf, memory) in memory_at.iter().enumerate() {
            leaf_of[memory.index()] = MemoryId::at(leaf).0;
        }
        let fixed = |memory: &MemoryId| {
            let (rack, tray) = rack(memory);
            Fixed {
                rack: (rack, rack),
                tray: (tray, tray),
                domain: graph.memories()[memory.index()].domain.0,
                cabling: cabling[memory.index()],
                latency_ns: behind_switch_ns(graph, *memory),
            }
        };
        let mut fixed = vec![memory_at.iter().map(fixed).collect::<Vec<_>>()];
        let mut best = vec![vec![Best::NONE; memory_at.len()]];
        while fixed[fixed.len() - 1].len() > 1 {
            let below = &fixed[fixed.len() - 1];
            let join = |group: &[Fixed]| group.iter().skip(1).fold(group[0], Fixed::with);
            let level: Vec<Fixed> = below.chunks(FAN_OUT).map(join).collect();
            best.push(vec![Best::NONE; level.len()]);
            fixed.push(level);
        }
        Self { best, fixed, memory_at, leaf_of }
    }

    /// The brick's place among the leaves.
    pub(super) fn leaf(&self, memory: MemoryId) -> usize {
        self.leaf_of[memory.index()] as usize
    }

    /// Sets a brick's values.
    pub(super) fn update(&mut self, memory: MemoryId, value: Best) {
        let mut at = self.leaf(memory);
        self.best[0][at] = value;
        for level in 1..self.best.len() {
            at /= FAN_OUT;
            let below = &self.best[level - 1];
            let children = &below[at * FAN_OUT..below.len().min((at + 1) * FAN_OUT)];
            let joined = children.iter().skip(1).fold(children[0], Best::with);
            if self.best[level][at] == joined {
                return; // Nothing above changes either.
            }
            self.best[level][at] = joined;
        }
    }

    /// The best of all bricks.
    pub(super) fn root(&self) -> Best {
        self.best.last().and_then(|level| level.first()).copied().unwrap_or(Best::NONE)
    }

    /// The brick that fits, is accepted and has the lowest score below `found`'s; otherwise `found`.
    pub(super) fn search(
        &self,
        query: &Query<'_>,
        judge: &mut impl Judge,
        mut found: Option<(Score, MemoryId)>,
    ) -> Option<(Score, MemoryId)> {
        if !self.memory_at.is_empty() {
            self.visit(self.best.len() - 1, 0, query, judge, &mut found);
        }
        found
    }

    fn visit(
        &self,
        level: usize,
        at: usize,
        query: &Query<'_>,
        judge: &mut impl Judge,
        found: &mut Option<(Score, MemoryId)>,
    ) {
        let Some(bound) = self.bound(level, at, query, judge) else { return };
        if found.is_some_and(|(score, _)| score <= bound) {
            return;
        }
        if level == 0 {
            let memory = self.memory_at[at];
            if query.except != Some(memory) && judge.accepts(memory) {
                *found = Some((bound, memory));
            }
            return;
        }
        let first = at * FAN_OUT;
        let end = self.best[level - 1].len().min(first + FAN_OUT);
        let mut order = [((0, 0, 0), 0); FAN_OUT];
        let mut count = 0;
        for child in first..end {
            if let Some(bound) = self.bound(level - 1, child, query, judge) {
                order[count] = (bound, child);
                count += 1;
            }
        }
        order[..count].sort_unstable();
        for (bound, child) in &order[..count] {
            if found.is_some_and(|(score, _)| score <= *bound) {
                return;
            }
            self.visit(level - 1, *child, query, judge, found);
        }
    }

    /// A score that no fitting brick of the subtree is below; none when nothing there can fit. At a
    /// leaf: the brick's score.
    fn bound(
        &self,
        level: usize,
        at: usize,
        query: &Query<'_>,
        judge: &impl Judge,
    ) -> Option<Score> {
        let best = &self.best[level][at];
        let fixed = &self.fixed[level][at];
        let room = if query.may_split { best.total_superpages } else { best.largest_superpages };
        let fits = room >= query.superpages
            && best.read_left >= query.read
            && best.write_left >= query.write
            && best.index != u32::MAX
            && !query.avoid.iter().any(|domain| domain.0 == fixed.domain)
            && (fixed.cabling == VARIOUS || judge.cabling_may_do(fixed.cabling));
        if !fits {
            return None;
        }
        let width = FAN_OUT.pow(u32::try_from(level).unwrap_or(u32::MAX));
        if !judge.leaves_may_do(at * width, (at + 1) * width) {
            return None;
        }
        score(best, fixed, query)
    }

    /// The score of a brick whose values are not in the tree because only its own circuits lead to
    /// it; none when it does not fit.
    pub(super) fn score_of(
        &self,
        memory: MemoryId,
        best: &Best,
        query: &Query<'_>,
    ) -> Option<Score> {
        let fixed = &self.fixed[0][self.leaf(memory)];
        let room = if query.may_split { best.total_superpages } else { best.largest_superpages };
        let fits = room >= query.superpages
            && best.read_left >= query.read
            && best.write_left >= query.write
            && best.index != u32::MAX
            && query.except != Some(memory)
            && !query.avoid.iter().any(|domain| domain.0 == fixed.domain);
        if fits { score(best, fixed, query) } else { None }
    }
}

fn score(best: &Best, fixed: &Fixed, query: &Query<'_>) -> Option<Score> {
    let (first, second) = match query.policy {
        PlacementPolicy::FirstFit => (0, 0),
        PlacementPolicy::Pack => {
            let class = size_class(query.superpages);
            match lowest_class(best.classes_on, class) {
                Some(on) => (0, on),
                None => (1, lowest_class(best.classes_off, class)?),
            }
        }
        PlacementPolicy::Spread => {
            let count = query.counts.iter().find(|(domain, _)| domain.0 == fixed.domain);
            (count.map_or(0, |(_, count)| *count), best.load_permille)
        }
        PlacementPolicy::Nearest => {
            let within = |range: (u32, u32), at: u32| range.0 <= at && at <= range.1;
            let distance = match (within(fixed.tray, query.tray), within(fixed.rack, query.rack)) {
                (true, true) => 0,
                (false, true) => 1,
                _ => 2,
            };
            (distance, fixed.latency_ns)
        }
        PlacementPolicy::LeastLoaded => (best.load_permille, 0),
    };
    Some((first, second, best.index))
}

/// The lowest time from a switch to the brick's memory and back to the port, over its ports.
fn behind_switch_ns(graph: &Graph, memory: MemoryId) -> u32 {
    let brick = &graph.memories()[memory.index()];
    let links = brick.ports.iter().filter_map(|port| graph.ports()[port.index()].link);
    let cable = links.map(|link| graph.links()[link.index()].latency_ns).min().unwrap_or(0);
    brick.latency_ns.saturating_add(cable)
}

/// A brick's values from its state.
pub(super) fn brick_values(
    index: MemoryId,
    (largest, total): (u32, u32),
    (read_left, write_left): (u64, u64),
    load_permille: u32,
    power: PowerState,
) -> Best {
    let class = 1 << size_class(total);
    let (classes_on, classes_off) = match power {
        PowerState::On => (class, 0),
        PowerState::Off => (0, class),
    };
    Best {
        largest_superpages: largest,
        total_superpages: total,
        read_left,
        write_left,
        load_permille,
        index: index.0,
        classes_on,
        classes_off,
        any_largest: largest,
        any_total: total,
    }
}
