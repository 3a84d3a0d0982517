//! The index over memory bricks: finds the best brick for a request without visiting all.
//!
//! A tree with eight children per node whose leaves are the bricks, sorted by rack and tray. A leaf
//! is one cache line and a node two, because a search or an update reads all children at once. Each
//! node keeps the best of every dimension among its bricks (most free memory, most bandwidth left,
//! lowest load, ...), so a search skips a subtree when even its best would not fit, or when its
//! best possible score is no better than the best found. It is exact: nothing is skipped that could
//! win, and a brick's own values decide at the leaf. A change of one brick updates one path to the
//! root.
//!
//! Rejected: one ordered set per policy and need. A request has several needs at once (memory, both
//! bandwidths, domains, a path), and an ordered set prunes by one of them only; five sets also cost
//! five updates.

use farpool_units::exactly;

use crate::graph::{Graph, PowerState};
use crate::ids::{DomainId, MemoryId};

use super::policy::{PlacementPolicy, Score, lowest_class, size_class};

const FAN_OUT: usize = 8;
/// The value of a node whose bricks differ in it.
const VARIOUS: u32 = u32::MAX;

/// What a brick could serve now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Values {
    pub(super) largest_superpages: u32,
    pub(super) total_superpages: u32,
    pub(super) read_left: u64,
    pub(super) write_left: u64,
    pub(super) load_permille: u32,
    pub(super) power: PowerState,
    /// Whether other compute bricks can use one of its ports.
    pub(super) is_open: bool,
}

/// The best of a subtree, in each dimension by itself; for a leaf, the brick's values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Best {
    pub(super) largest_superpages: u32,
    pub(super) total_superpages: u32,
    read_left: u64,
    write_left: u64,
    load_permille: u32,
    /// Lowest index in the topology of a brick that can be used at all.
    index: u32,
    /// Size classes of the free memory of bricks that have power, and of those that have not.
    classes_on: u128,
    classes_off: u128,
    /// Like the first two fields, but for bricks without a free port too: distinguishes why nothing
    /// fits.
    pub(super) any_largest: u32,
    pub(super) any_total: u32,
}

impl Best {
    /// The value for no brick.
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

    /// The value for one brick.
    fn of(values: &Values, class: u8, index: u32) -> Self {
        let (any_largest, any_total) = (values.largest_superpages, values.total_superpages);
        if !values.is_open {
            return Self { any_largest, any_total, ..Self::NONE };
        }
        let (classes_on, classes_off) = match values.power {
            PowerState::On => (1 << class, 0),
            PowerState::Off => (0, 1 << class),
        };
        Self {
            largest_superpages: any_largest,
            total_superpages: any_total,
            read_left: values.read_left,
            write_left: values.write_left,
            load_permille: values.load_permille,
            index,
            classes_on,
            classes_off,
            any_largest,
            any_total,
        }
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

/// What never changes about a subtree.
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

/// A brick: its values, and what never changes about it.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Leaf {
    values: Values,
    memory: MemoryId,
    rack: u32,
    tray: u32,
    domain: u32,
    cabling: u32,
    latency_ns: u32,
    /// Size class of its free memory.
    class: u8,
}

const _: () = assert!(size_of::<Leaf>() == 64, "a leaf is one cache line");

impl Leaf {
    fn best(&self) -> Best {
        Best::of(&self.values, self.class, self.memory.0)
    }

    fn fixed(&self) -> Fixed {
        let Self { rack, tray, domain, cabling, latency_ns, .. } = *self;
        Fixed { rack: (rack, rack), tray: (tray, tray), domain, cabling, latency_ns }
    }
}

/// A group of bricks.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Node {
    best: Best,
    fixed: Fixed,
}

const _: () = assert!(size_of::<Node>() == 128, "a node is two cache lines");

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

/// Decides whether there is a path to a brick that fits and would win, and which subtrees cannot
/// have one.
pub(super) trait Judge {
    /// Whether the brick can be used.
    fn accepts(&mut self, memory: MemoryId) -> bool;
    /// False if no brick with this cabling can be used.
    fn cabling_may_do(&self, cabling: u32) -> bool;
    /// False if no brick among these leaves can be used.
    fn leaves_may_do(&self, first: usize, end: usize) -> bool;
}

/// The index.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    leaves: Vec<Leaf>,
    /// Level 0 is above the leaves, the last is the root. Empty with fewer than two bricks.
    levels: Vec<Vec<Node>>,
    leaf_of: Vec<u32>,
}

impl Tree {
    /// Makes the index of the bricks of `graph`; `cabling` has the cabling of each. No brick is
    /// usable until [`update`](Self::update).
    pub(super) fn new(graph: &Graph, cabling: &[u32]) -> Self {
        let brick = |memory: MemoryId| &graph.memories()[memory.index()];
        let leaf = |memory: MemoryId| Leaf {
            values: Values {
                largest_superpages: 0,
                total_superpages: 0,
                read_left: 0,
                write_left: 0,
                load_permille: 0,
                power: brick(memory).power,
                is_open: false,
            },
            memory,
            rack: graph.trays()[brick(memory).tray.index()].rack.0,
            tray: brick(memory).tray.0,
            domain: brick(memory).domain.0,
            cabling: cabling[memory.index()],
            latency_ns: behind_switch_ns(graph, memory),
            class: 0,
        };
        let mut leaves: Vec<Leaf> =
            (0..graph.memories().len()).map(|index| leaf(MemoryId::at(index))).collect();
        leaves.sort_by_key(|leaf| (leaf.rack, leaf.tray, leaf.memory));
        let mut leaf_of = vec![0; leaves.len()];
        for (at, leaf) in leaves.iter().enumerate() {
            leaf_of[leaf.memory.index()] = MemoryId::at(at).0;
        }
        let mut levels: Vec<Vec<Node>> = Vec::new();
        let mut below: Vec<Fixed> = leaves.iter().map(Leaf::fixed).collect();
        while below.len() > 1 {
            let join = |group: &[Fixed]| group.iter().skip(1).fold(group[0], Fixed::with);
            below = below.chunks(FAN_OUT).map(join).collect();
            levels
                .push(below.iter().map(|fixed| Node { best: Best::NONE, fixed: *fixed }).collect());
        }
        Self { leaves, levels, leaf_of }
    }

    /// The brick's place among the leaves.
    pub(super) fn leaf(&self, memory: MemoryId) -> usize {
        self.leaf_of[memory.index()] as usize
    }

    /// Sets the values of the brick at `leaf`.
    pub(super) fn update(&mut self, leaf: usize, values: &Values) {
        let class = size_class(values.total_superpages);
        self.leaves[leaf].values = *values;
        self.leaves[leaf].class = u8::try_from(class).expect("there are 128 classes");
        let mut at = leaf;
        for level in 0..self.levels.len() {
            at /= FAN_OUT;
            let children = at * FAN_OUT..self.width(level).min((at + 1) * FAN_OUT);
            let joined = match level {
                0 => join(self.leaves[children].iter().map(Leaf::best)),
                _ => join(self.levels[level - 1][children].iter().map(|node| node.best)),
            };
            let best = &mut self.levels[level][at].best;
            if *best == joined {
                return; // Nothing above changes either.
            }
            *best = joined;
        }
    }

    /// How many children `level` has.
    fn width(&self, level: usize) -> usize {
        level.checked_sub(1).map_or(self.leaves.len(), |below| self.levels[below].len())
    }

    /// The best of all bricks.
    pub(super) fn root(&self) -> Best {
        match self.levels.last() {
            Some(root) => root[0].best,
            None => self.leaves.first().map_or(Best::NONE, Leaf::best),
        }
    }

    /// Returns the brick that fits, is accepted and has the lowest score below that of `found`.
    /// Returns `found` if there is none.
    pub(super) fn search(
        &self,
        query: &Query<'_>,
        judge: &mut impl Judge,
        mut found: Option<(Score, MemoryId)>,
    ) -> Option<(Score, MemoryId)> {
        if !self.leaves.is_empty() {
            self.visit(self.levels.len(), 0, query, judge, &mut found);
        }
        found
    }

    /// `height` is 0 for a leaf.
    fn visit(
        &self,
        height: usize,
        at: usize,
        query: &Query<'_>,
        judge: &mut impl Judge,
        found: &mut Option<(Score, MemoryId)>,
    ) {
        let Some(bound) = self.bound(height, at, query, judge) else { return };
        if found.is_some_and(|(score, _)| score <= bound) {
            return;
        }
        if height == 0 {
            let memory = self.leaves[at].memory;
            if query.except != Some(memory) && judge.accepts(memory) {
                *found = Some((bound, memory));
            }
            return;
        }
        let first = at * FAN_OUT;
        let end = self.width(height - 1).min(first + FAN_OUT);
        let mut order = [((0, 0, 0), 0); FAN_OUT];
        let mut count = 0;
        for child in first..end {
            if let Some(bound) = self.bound(height - 1, child, query, judge) {
                order[count] = (bound, child);
                count += 1;
            }
        }
        order[..count].sort_unstable();
        for (bound, child) in &order[..count] {
            if found.is_some_and(|(score, _)| score <= *bound) {
                return;
            }
            self.visit(height - 1, *child, query, judge, found);
        }
    }

    /// Returns a lower bound of the scores of the fitting bricks of the subtree; at a leaf, the
    /// brick's score. Returns None if nothing there can fit.
    fn bound(
        &self,
        height: usize,
        at: usize,
        query: &Query<'_>,
        judge: &impl Judge,
    ) -> Option<Score> {
        let (best, fixed) = match height.checked_sub(1) {
            None => (&self.leaves[at].best(), &self.leaves[at].fixed()),
            Some(level) => {
                let node = &self.levels[level][at];
                (&node.best, &node.fixed)
            }
        };
        let may_do = fits(best, fixed, query)
            && (fixed.cabling == VARIOUS || judge.cabling_may_do(fixed.cabling));
        if !may_do {
            return None;
        }
        let width = FAN_OUT.pow(exactly(height));
        if !judge.leaves_may_do(at * width, (at + 1) * width) {
            return None;
        }
        score(best, fixed, query)
    }

    /// Returns the score of a brick with values that are not in the tree because only its own
    /// circuits lead to it. Returns None if it does not fit.
    pub(super) fn score_of(
        &self,
        leaf: usize,
        values: &Values,
        query: &Query<'_>,
    ) -> Option<Score> {
        let class = exactly(size_class(values.total_superpages));
        let leaf = &self.leaves[leaf];
        let (best, fixed) = (Best::of(values, class, leaf.memory.0), leaf.fixed());
        let will_do = fits(&best, &fixed, query) && query.except != Some(leaf.memory);
        if will_do { score(&best, &fixed, query) } else { None }
    }
}

fn join(mut all: impl Iterator<Item = Best>) -> Best {
    let first = all.next().unwrap_or(Best::NONE);
    all.fold(first, |joined, next| joined.with(&next))
}

/// Whether the best of a subtree would fit.
fn fits(best: &Best, fixed: &Fixed, query: &Query<'_>) -> bool {
    let room = if query.may_split { best.total_superpages } else { best.largest_superpages };
    room >= query.superpages
        && best.read_left >= query.read
        && best.write_left >= query.write
        && best.index != u32::MAX
        && !query.avoid.iter().any(|domain| domain.0 == fixed.domain)
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
