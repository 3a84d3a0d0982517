//! Graph kernels on a synthetic power-law graph in compressed sparse rows.
//!
//! Edge ends are drawn as n * u^3, so that a few vertices have most of the edges, as in social
//! networks. Every pass of the construction draws the same edges again from the seed instead of
//! keeping a list: memory is the graph and little else. Edges are placed one block of vertices
//! after the other, as builders for graphs larger than memory do: the work on the graph is
//! measured, not its construction.

use super::{Outcome, WorkloadArgs, mix, timed};
use crate::BenchError;
use farpool_policy::Rng;
use farpool_units::exactly;

/// Edges per vertex, as in the usual benchmark graphs (16 in Graph500).
const EDGES_PER_VERTEX: usize = 16;
/// Bytes of the whole structure per edge: 4 for the edge, 20 per vertex for offsets and ranks.
const BYTES_PER_EDGE: usize = 4 + 20 / EDGES_PER_VERTEX + 1;
/// Number of blocks of vertices whose edges are placed together: each has an eighth of the
/// vertices.
const BLOCKS: u32 = 8;
/// Default number of iterations of `PageRank`.
const ITERATIONS: u32 = 4;
const DAMPING: f64 = 0.85;

/// For each vertex, the vertices with an edge to it.
struct Graph {
    offsets: Vec<u32>,
    sources: Vec<u32>,
    /// Edges that leave each vertex.
    out_degrees: Vec<u32>,
}

struct Edges {
    rng: Rng,
    vertices: u32,
    left: usize,
}

impl Iterator for Edges {
    type Item = (u32, u32);

    fn next(&mut self) -> Option<(u32, u32)> {
        self.left = self.left.checked_sub(1)?;
        Some((self.end(), self.end()))
    }
}

impl Edges {
    fn end(&mut self) -> u32 {
        let u = f64::from(self.rng.below(1 << 30)) / f64::from(1u32 << 30);
        let rank = crate::units::round(u * u * u * f64::from(self.vertices - 1));
        // Popular vertices are spread over the addresses, as in a graph with arbitrary names.
        exactly(mix(rank) % u64::from(self.vertices))
    }
}

impl Graph {
    fn new(args: &WorkloadArgs) -> Result<Self, BenchError> {
        let edges = (args.bytes_here()? / BYTES_PER_EDGE).max(EDGES_PER_VERTEX * 2);
        let too_big =
            |_| BenchError::Arguments("graphs have at most 2^32 edges: ask for less".into());
        u32::try_from(edges).map_err(too_big)?;
        let vertices = u32::try_from(edges / EDGES_PER_VERTEX).map_err(too_big)?;
        let draw = || Edges { rng: Rng::new(args.seed), vertices, left: edges };
        let mut graph = Self {
            offsets: vec![0; vertices as usize + 1],
            sources: vec![0; edges],
            out_degrees: vec![0; vertices as usize],
        };
        for (from, to) in draw() {
            graph.offsets[to as usize + 1] += 1;
            graph.out_degrees[from as usize] += 1;
        }
        graph.sum_up();
        let mut next: Vec<u32> = graph.offsets[..vertices as usize].to_vec();
        let block_vertices = vertices.div_ceil(BLOCKS).max(1);
        for first in (0..vertices).step_by(block_vertices as usize) {
            let block = first..first.saturating_add(block_vertices);
            graph.place(draw().filter(|(_, to)| block.contains(to)), &mut next);
        }
        Ok(graph)
    }

    /// Turns counts into offsets.
    fn sum_up(&mut self) {
        let mut sum = 0;
        for offset in &mut self.offsets {
            sum += *offset;
            *offset = sum;
        }
    }

    /// Puts every edge into its row. `next` is the next free place in each row.
    fn place(&mut self, edges: impl Iterator<Item = (u32, u32)>, next: &mut [u32]) {
        for (from, to) in edges {
            let at = &mut next[to as usize];
            self.sources[*at as usize] = from;
            *at += 1;
        }
    }

    fn vertices(&self) -> usize {
        self.out_degrees.len()
    }

    fn sources_of(&self, vertex: usize) -> &[u32] {
        &self.sources[self.offsets[vertex] as usize..self.offsets[vertex + 1] as usize]
    }
}

pub(super) fn run_pagerank(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let (fill, graph) = timed(|| Graph::new(args));
    let graph = graph?;
    let iterations = args.passes.unwrap_or(ITERATIONS);
    let (work, ranks) = timed(|| pagerank(&graph, iterations));
    let total: f64 = ranks.iter().sum();
    if !(0.0..=1.000_001).contains(&total) {
        let detail = format!("ranks sum up to {total}");
        return Err(BenchError::WrongData { workload: "pagerank", detail });
    }
    // One thread adds in one order, so floating point is the same to the last bit.
    let checksum = ranks.iter().fold(0u64, |sum, rank| sum.rotate_left(1) ^ rank.to_bits());
    let ops = graph.sources.len() as u64 * u64::from(iterations);
    Ok(Outcome { ops, fill, work, checksum, latencies: None })
}

fn pagerank(graph: &Graph, iterations: u32) -> Vec<f64> {
    let n = graph.vertices();
    let mut ranks = vec![1.0 / n as f64; n];
    let mut next = vec![0.0; n];
    for _ in 0..iterations {
        for (rank, degree) in ranks.iter_mut().zip(&graph.out_degrees) {
            *rank /= f64::from((*degree).max(1));
        }
        for (vertex, rank) in next.iter_mut().enumerate() {
            let given: f64 = graph.sources_of(vertex).iter().map(|v| ranks[*v as usize]).sum();
            *rank = (1.0 - DAMPING) / n as f64 + DAMPING * given;
        }
        std::mem::swap(&mut ranks, &mut next);
    }
    ranks
}

pub(super) fn run_bfs(args: &WorkloadArgs) -> Result<Outcome, BenchError> {
    let (fill, graph) = timed(|| Graph::new(args));
    let graph = graph?;
    let (work, levels) = timed(|| bfs(&graph));
    let mut followed = 0u64;
    for (vertex, level) in levels.iter().enumerate().filter(|(_, level)| **level != UNSEEN) {
        let near = graph.sources_of(vertex);
        followed += near.len() as u64;
        if let Some(v) = near.iter().find(|v| levels[**v as usize] > level + 1) {
            let detail = format!("vertex {v} is further from the root than a neighbour allows");
            return Err(BenchError::WrongData { workload: "bfs", detail });
        }
    }
    let checksum = levels.iter().fold(0u64, |sum, level| sum.rotate_left(5) ^ u64::from(*level));
    Ok(Outcome { ops: followed, fill, work, checksum, latencies: None })
}

const UNSEEN: u32 = u32::MAX;

/// Returns the level of every vertex, counted from the one with the most incoming edges, or
/// [`UNSEEN`] if it cannot be reached.
fn bfs(graph: &Graph) -> Vec<u32> {
    let root = (0..graph.vertices()).max_by_key(|v| graph.sources_of(*v).len()).unwrap_or(0);
    let mut levels = vec![UNSEEN; graph.vertices()];
    levels[root] = 0;
    let mut frontier = vec![root];
    let mut level = 0;
    while !frontier.is_empty() {
        level += 1;
        let mut reached = Vec::new();
        for vertex in frontier {
            for near in graph.sources_of(vertex) {
                let near = *near as usize;
                if levels[near] == UNSEEN {
                    levels[near] = level;
                    reached.push(near);
                }
            }
        }
        frontier = reached;
    }
    levels
}
