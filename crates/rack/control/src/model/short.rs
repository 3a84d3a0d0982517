//! What a refusal for lack of room says: what is short, where most of it is left, and whether
//! waiting helps.

use std::num::NonZeroU32;

use farpool_api::{Problem, ProblemKind, SegmentSpec};
use farpool_placement::RackError;
use farpool_units::format_bytes;

use super::segments::rack_problem;
use super::{Age, Node, State};

/// When to ask again while memory is on its way back: a few reports later.
pub(crate) const ASK_AGAIN_MS: NonZeroU32 = NonZeroU32::new(1_000).expect("it is not zero");

impl State {
    /// Returns the refusal of a segment, in words that name what is short.
    pub(super) fn refusal(&self, error: &RackError, spec: &SegmentSpec) -> Problem {
        let mut problem = rack_problem(error);
        // What is larger than all there is has a limit, and waiting does not help.
        if !problem.is(ProblemKind::NoRoom) || problem.limit.is_some() {
            return problem;
        }
        let most = match error {
            RackError::NoBandwidth => self.most_bandwidth(spec),
            RackError::NoCapacity { .. } => self.most_memory(),
            _ => None,
        };
        let coming = self.coming_back();
        problem.retry_after_ms = coming.is_some().then_some(ASK_AGAIN_MS);
        for more in [most, coming].into_iter().flatten() {
            problem.detail.push_str("; ");
            problem.detail.push_str(&more);
        }
        problem
    }

    fn lenders(&self) -> impl Iterator<Item = &Node> {
        let lends = |node: &&Node| !node.record.draining && node.age == Age::Fresh;
        self.nodes.values().filter(|node| node.memory.is_some()).filter(lends)
    }

    fn most_memory(&self) -> Option<String> {
        let left = |node: &Node| {
            node.lendable_bytes().saturating_sub(self.granted_bytes(&node.record.name))
        };
        let node = self.lenders().max_by_key(|node| left(node))?;
        let (name, left, lends) = (&node.record.name, left(node), node.lendable_bytes());
        let (left, lends) = (format_bytes(left), format_bytes(lends));
        Some(format!("node {name} has most, {left} free of the {lends} that it lends"))
    }

    /// Bytes per second of a node that are promised, to read and to write.
    pub(super) fn promised_rates(&self, name: &str) -> (u64, u64) {
        let all = self.on_node.get(name).into_iter().flatten();
        let all = all.filter_map(|id| self.segments.get(id));
        all.fold((0, 0), |(read, write): (u64, u64), segment| {
            let places = [Some(&segment.current), segment.target.as_ref()].into_iter().flatten();
            let here = places.filter(|place| place.node == name).count() as u64;
            let spec = &segment.spec;
            (
                read.saturating_add(spec.read_bytes_per_s.saturating_mul(here)),
                write.saturating_add(spec.write_bytes_per_s.saturating_mul(here)),
            )
        })
    }

    fn most_bandwidth(&self, spec: &SegmentSpec) -> Option<String> {
        if self.topology.is_some() {
            let (read, write) = (spec.read_bytes_per_s, spec.write_bytes_per_s);
            return Some(format!("{read} bytes/s to read and {write} to write were asked for"));
        }
        let left = |node: &Node| {
            let (read, write) = self.promised_rates(&node.record.name);
            let has = &node.record.spec;
            let read = has.read_bytes_per_s.saturating_sub(read);
            (read, has.write_bytes_per_s.saturating_sub(write))
        };
        let least = |node: &&Node| {
            let (read, write) = left(node);
            read.min(write)
        };
        let node = self.lenders().max_by_key(least)?;
        let (read, write) = left(node);
        let name = &node.record.name;
        let has = &node.record.spec;
        Some(format!(
            "{} bytes/s to read and {} to write were asked for, and node {name} has most left: \
             {read} of {} and {write} of {}; ask for less (--rate), or start nodes with the \
             bandwidth that they have (--bandwidth)",
            spec.read_bytes_per_s,
            spec.write_bytes_per_s,
            has.read_bytes_per_s,
            has.write_bytes_per_s,
        ))
    }

    /// Returns which memory is on its way back, if any is.
    fn coming_back(&self) -> Option<String> {
        let lends = |node: &&Node| node.memory.is_some() && !node.record.draining;
        let mut nodes = self.nodes.values().filter(lends);
        if let Some(node) = nodes.find(|node| node.age == Age::Late || node.seen.is_none()) {
            let name = &node.record.name;
            return Some(match node.age {
                Age::Late => format!("node {name} is late with its report"),
                _ => format!("node {name} has just registered and not reported yet"),
            });
        }
        let leaves = |segment: &&super::record::SegmentRecord| {
            segment.releasing
                || segment.evacuated
                || (segment.lost && segment.spec.client.is_some())
        };
        let count = self.segments.values().filter(leaves).count();
        (count > 0).then(|| format!("memory of {count} segments is about to be free"))
    }
}
