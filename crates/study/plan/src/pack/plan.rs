//! Packs series into servers, and draws conclusions.

use serde::Serialize;

use super::greedy::{Order, best_fit, by_alignment, first_fit};
use super::{Packing, Problem, Server, anneal, bound, exact};
use crate::PlanError;
use crate::pool::Verdict;
use crate::utilisation::{MemoryUnit, Utilisation, peak};

/// How much memory a machine takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Demand {
    /// Its use at each step.
    #[default]
    Used,
    /// Its promised memory at every step; processors are as used.
    Provisioned,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Question {
    pub server: Server,
    pub demand: Demand,
    /// Shares of a machine's memory that must be local, 0 to 1; all of it local is always packed
    /// too. Savings refer to the first share.
    pub local_shares: Vec<f64>,
    /// Moves of the local search, for each packing.
    pub moves: usize,
    pub seed: u64,
    /// The least share of the servers that far memory must free to be worth it, if prices do not
    /// decide.
    pub worth: f64,
}

/// How the best packing was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    FirstFit,
    BestFit,
    Alignment,
    LocalSearch,
    /// Proven optimal.
    Exact,
}

/// One kind of packing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// By peaks alone, as if all machines peaked at the same time.
    pub is_static: bool,
    pub local_share: f64,
    pub servers: usize,
    pub method: Method,
    /// First fit decreasing by peak, the result of a simple planner.
    pub first_fit: usize,
    /// The best result of best fit decreasing.
    pub best_fit: usize,
    /// A lower bound of every packing.
    pub lower_bound: usize,
    /// The fullest resource at its busiest step, in servers: the peak of sums.
    pub sum_bound: f64,
    /// The scarce resource: true for processors, false for memory.
    pub is_cpu_bound: bool,
    pub over_bound: f64,
    /// The most far memory in use at one time, in the unit of the series.
    pub far_peak: f64,
    /// Far memory if each machine keeps its own part for good.
    pub far_sum: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    pub machines: usize,
    pub steps: usize,
    pub step_s: f64,
    pub memory_unit: MemoryUnit,
    /// Machines larger than a server, which were left out.
    pub too_large: Vec<String>,
    pub rows: Vec<Row>,
    pub freed_servers: usize,
    pub freed_share: f64,
    /// Money saved, if prices are known: freed servers less the peak of far memory in use.
    pub saved_dollars: Option<f64>,
    pub verdict: Verdict,
    pub reasons: Vec<String>,
}

/// Packs the machines by peaks, over time, and over time with each local share; `progress` is
/// called with the name of each packing.
///
/// # Errors
/// The server lacks a figure that the series need, no machine fits, or a machine has no promised
/// memory to pack by.
pub fn plan(
    of: &Utilisation,
    question: &Question,
    progress: &mut dyn FnMut(&str),
) -> Result<Answer, PlanError> {
    check(question)?;
    let packer = Packer::new(of, question)?;
    let mut rows = vec![packer.row(true, 1.0, progress), packer.row(false, 1.0, progress)];
    let mut shares: Vec<f64> = Vec::new();
    for share in &question.local_shares {
        if *share < 1.0 && !shares.contains(share) {
            shares.push(*share);
        }
    }
    rows.extend(shares.iter().map(|share| packer.row(false, *share, progress)));
    let whole = &rows[1];
    let far = rows.get(2).unwrap_or(whole);
    let freed_servers = whole.servers.saturating_sub(far.servers);
    #[allow(clippy::cast_precision_loss)] // of servers
    let freed_share = freed_servers as f64 / whole.servers as f64;
    let saved_dollars = packer.saved_dollars(freed_servers, far);
    let pays = match saved_dollars {
        Some(saved) => saved > 0.0,
        None => freed_servers > 0 && freed_share >= question.worth,
    };
    let reasons = reasons(whole, far, freed_share, saved_dollars, pays, question);
    Ok(Answer {
        machines: packer.members.len(),
        steps: of.steps,
        step_s: of.step_s,
        memory_unit: of.memory_unit,
        too_large: packer.too_large,
        freed_servers,
        freed_share,
        saved_dollars,
        verdict: if pays { Verdict::Pool } else { Verdict::DoNotPool },
        reasons,
        rows,
    })
}

fn check(question: &Question) -> Result<(), PlanError> {
    let bad = question.local_shares.iter().find(|share| !(0.0..=1.0).contains(*share));
    match bad {
        Some(share) => {
            Err(PlanError::Question(format!("a local share of {share} is not between 0 and 1")))
        }
        None => Ok(()),
    }
}

struct Packer<'a> {
    of: &'a Utilisation,
    question: &'a Question,
    cpu: f64,
    memory: f64,
    members: Vec<usize>,
    too_large: Vec<String>,
}

impl<'a> Packer<'a> {
    fn new(of: &'a Utilisation, question: &'a Question) -> Result<Packer<'a>, PlanError> {
        if question.demand == Demand::Used && !of.has_memory {
            let why = "the file says nothing of the memory that machines use; name its column with \
                       --memory-column, or pack what they were promised (--demand promised)";
            return Err(PlanError::Question(why.into()));
        }
        let (cpu, memory) = question.server.capacity(of)?;
        let unknown = of.vms.iter().find(|vm| vm.memory_provisioned.is_none());
        if let (Demand::Provisioned, Some(vm)) = (question.demand, unknown) {
            let name = &vm.name;
            return Err(PlanError::Question(format!(
                "the promised memory of machine {name} is not known"
            )));
        }
        let (mut members, mut too_large) = (Vec::new(), Vec::new());
        for (at, vm) in of.vms.iter().enumerate() {
            let needed = match question.demand {
                Demand::Used => peak(of.memory(at)),
                Demand::Provisioned => vm.memory_provisioned.unwrap_or(0.0),
            };
            match peak(of.cpu(at)) <= cpu && needed <= memory {
                true => members.push(at),
                false => too_large.push(vm.name.clone()),
            }
        }
        if members.is_empty() {
            return Err(PlanError::Question("every machine is larger than the server".into()));
        }
        Ok(Packer { of, question, cpu, memory, members, too_large })
    }

    fn problem(&self, is_static: bool, share: f64) -> Problem {
        let item = |vm: &usize| -> Vec<f64> {
            let cpu = self.of.cpu(*vm).iter().map(|used| used / self.cpu);
            let promised = self.of.vms[*vm].memory_provisioned;
            let memory: Vec<f64> = match (self.question.demand, promised) {
                (Demand::Provisioned, Some(promised)) => vec![promised * share / self.memory],
                _ => self.of.memory(*vm).iter().map(|used| used * share / self.memory).collect(),
            };
            match is_static {
                true => vec![cpu.fold(0.0, f64::max), peak(&memory)],
                false => cpu.chain(memory).collect(),
            }
        };
        let items: Vec<Vec<f64>> = self.members.iter().map(item).collect();
        Problem::new(&items).expect("machines larger than a server were left out")
    }

    fn row(&self, is_static: bool, share: f64, progress: &mut dyn FnMut(&str)) -> Row {
        let how = if is_static { "by peaks" } else { "over time" };
        progress(&format!("{} machines {how}, {:.0} % local", self.members.len(), share * 100.0));
        let problem = self.problem(is_static, share);
        let bound = bound::lower(&problem);
        let found = best(&problem, bound.bins, self.question);
        assert!(found.packing.is_valid(&problem), "a packing holds every machine once");
        let cpu_dimensions = if is_static { 1 } else { self.of.steps };
        let (far_peak, far_sum) = self.far(share);
        #[allow(clippy::cast_precision_loss)] // of servers
        let over_bound = found.packing.bins() as f64 / bound.bins as f64;
        Row {
            is_static,
            local_share: share,
            servers: found.packing.bins(),
            method: found.method,
            first_fit: found.first_fit,
            best_fit: found.best_fit,
            lower_bound: bound.bins,
            sum_bound: bound.sum,
            is_cpu_bound: bound.dimension < cpu_dimensions,
            over_bound,
            far_peak,
            far_sum,
        }
    }

    /// Returns the far memory in use at one time, and the sum given to machines for good.
    fn far(&self, share: f64) -> (f64, f64) {
        let mut sum = vec![0.0; self.of.steps];
        let mut given = 0.0;
        for vm in &self.members {
            let used = self.of.memory(*vm);
            let promised = match self.question.demand {
                Demand::Used => peak(used),
                Demand::Provisioned => self.of.vms[*vm].memory_provisioned.unwrap_or(0.0),
            };
            given += promised * (1.0 - share);
            for (total, used) in sum.iter_mut().zip(used) {
                // Used memory keeps its share local; of promised memory the local part is used
                // first.
                *total += match self.question.demand {
                    Demand::Used => used * (1.0 - share),
                    Demand::Provisioned => (used.min(promised) - promised * share).max(0.0),
                };
            }
        }
        (peak(&sum), given)
    }

    fn saved_dollars(&self, freed: usize, far: &Row) -> Option<f64> {
        const GIB: f64 = farpool_units::GIB as f64;
        let server = &self.question.server;
        let gib = match self.of.memory_unit {
            MemoryUnit::Bytes => Some(far.far_peak / GIB),
            MemoryUnit::Machines => server.memory_gib.map(|gib| far.far_peak / self.memory * gib),
        };
        #[allow(clippy::cast_precision_loss)] // of servers
        let freed = freed as f64 * server.price_dollars?;
        Some(freed - gib? * server.far_price_dollars_per_gib?)
    }
}

struct Found {
    packing: Packing,
    method: Method,
    first_fit: usize,
    best_fit: usize,
}

/// Returns the best packing known; searches only while the lower bound is not reached.
fn best(problem: &Problem, lower: usize, question: &Question) -> Found {
    let firsts = Order::ALL.map(|order| first_fit(problem, &order.sorted(problem)));
    let bests = Order::ALL.map(|order| best_fit(problem, &order.sorted(problem)));
    let simple = firsts[0].bins();
    let best_fit = bests.iter().map(Packing::bins).min().unwrap_or(simple);
    let candidates = firsts
        .into_iter()
        .map(|packing| (packing, Method::FirstFit))
        .chain(bests.into_iter().map(|packing| (packing, Method::BestFit)))
        .chain(std::iter::once_with(|| (by_alignment(problem), Method::Alignment)));
    let first_best = candidates.min_by_key(|(packing, _)| packing.bins());
    let (packing, method) = first_best.expect("there are several");
    let found = |packing, method| Found { packing, method, first_fit: simple, best_fit };
    if packing.bins() == lower {
        return found(packing, method);
    }
    if let Some(proven) = exact::pack(problem) {
        return found(proven, Method::Exact);
    }
    let searched = anneal::anneal(problem, packing.clone(), lower, question.moves, question.seed);
    match searched.bins() < packing.bins() {
        true => found(searched, Method::LocalSearch),
        false => found(packing, method),
    }
}

fn reasons(
    whole: &Row,
    far: &Row,
    freed_share: f64,
    saved_dollars: Option<f64>,
    pays: bool,
    question: &Question,
) -> Vec<String> {
    let decision = if pays { "pool" } else { "do not pool" };
    let scarce =
        |row: &Row| if row.is_cpu_bound { "the processors" } else { "the gigabytes of memory" };
    let mut first = format!(
        "{decision}: with {:.0} % of the memory local {} servers do instead of {}, {:.1} % fewer",
        far.local_share * 100.0,
        far.servers,
        whole.servers,
        freed_share * 100.0
    );
    match saved_dollars {
        Some(saved) if saved > 0.0 => first += &format!("; ${saved:.0} are saved"),
        Some(saved) => first += &format!("; far memory costs ${:.0} more than it saves", -saved),
        None if !pays => {
            first +=
                &format!("; less than the {:.0} % that would be worth it", question.worth * 100.0);
        }
        None => {}
    }
    let second = match whole.is_cpu_bound == far.is_cpu_bound {
        true => format!("either way {} run out first", scarce(whole)),
        false => format!(
            "with all memory local {} run out first, with {:.0} % local {}",
            scarce(whole),
            far.local_share * 100.0,
            scarce(far)
        ),
    };
    vec![first, second]
}
