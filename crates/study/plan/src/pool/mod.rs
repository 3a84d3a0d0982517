//! What a pool of far memory saves: the peak of the sum over its members is less than the sum of
//! their peaks.
//!
//! Without pools, machines need the sum of their peaks. With a share of each peak kept local, a
//! pool of some machines needs
//!
//! ```text
//! memory(pool) = sum of local(vm)
//!              + max over time of [ sum of max(0, used(vm, t) - local(vm)) ] * blades / (blades - 1)
//! local(vm)    = local share * peak(vm)
//! ```
//!
//! with the last factor only if one blade of each pool is kept spare. The result depends on which
//! machines share a pool, so every size is tried with many random groupings that their seed
//! reproduces; machines that do not fill a last pool form a smaller one.

mod percentile;
mod verdict;
mod what_if;

use serde::Serialize;

use crate::utilisation::{MemoryUnit, Utilisation, peak};
use crate::{PlanError, Random};
pub use percentile::Provisioned;
pub use verdict::{Advice, Verdict};
pub use what_if::{BladeLost, Changes, Corner, Grouped, How, Span, WhatIf, Year};

const GIB: f64 = farpool_units::GIB as f64;
/// Machines times random groupings: the order of each grouping is kept, in 2 GiB at most, as the
/// series themselves. More is refused.
const PLACES_MAX: usize = 1 << 28;
/// Nobody knows the use of memory in more years.
const YEARS_MAX: u32 = 30;
/// The range that 95 of 100 groupings lie in.
const CONFIDENCE: (f64, f64) = (0.025, 0.975);

/// The question: sizes, spares and prices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Question {
    /// Members of the pool that is examined closely.
    pub group: usize,
    /// Random groupings per size.
    pub groupings: usize,
    pub seed: u64,
    /// Share of a machine's peak that stays local, 0 to 1.
    pub local_share: f64,
    /// Blades of a pool of which one is kept spare; 0 for no spare.
    pub blades: u32,
    /// Shares of all steps in which a pool may be too small for its members, besides none.
    pub percentiles: Vec<f64>,
    /// Dollars per GiB of memory in a server.
    pub local_price_per_gib: f64,
    /// Dollars per GiB of memory in a blade; None for as much as in a server, whatever that costs.
    pub far_price_per_gib: Option<f64>,
    /// Dollars that a member pays to join a pool: its port and its share of switch and blade.
    pub member_cost: Option<f64>,
    /// A machine's memory, for files that give only shares of it.
    pub machine_memory_bytes: Option<f64>,
    /// The least share of the memory that a pool must save to be worth it, 0 to 1.
    pub worth: f64,
    /// What may change.
    pub changes: Changes,
}

/// Members of a pool if nothing else is asked for: one enclosure of Lim's thesis.
pub const USUAL_GROUP: usize = 16;

impl Default for Question {
    fn default() -> Question {
        Question {
            group: USUAL_GROUP,
            groupings: 100,
            seed: 42,
            local_share: 0.0,
            blades: 0,
            percentiles: vec![99.9, 99.0, 95.0],
            local_price_per_gib: 0.0,
            far_price_per_gib: None,
            member_cost: None,
            machine_memory_bytes: None,
            worth: 0.1,
            changes: Changes::default(),
        }
    }
}

impl Question {
    /// Dollars per GiB of memory in a blade where one in a server costs this.
    fn far_price(&self, local_price_per_gib: f64) -> f64 {
        self.far_price_per_gib.unwrap_or(local_price_per_gib)
    }
}

/// The result for pools of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Size {
    /// Members of a pool.
    pub vms: usize,
    pub pools: usize,
    /// Peak of sums, with local memory, relative to the sum of peaks: mean of all groupings.
    pub ratio: f64,
    pub ratio_low: f64,
    pub ratio_high: f64,
    /// The same with one blade of each pool spare.
    pub ratio_with_spare: f64,
    /// Memory saved with the spare, in the unit of the file.
    pub saved: f64,
    pub saved_gib: Option<f64>,
    /// The most that a member's port and share of the blade may cost before the pool costs more
    /// than it saves.
    pub break_even_member_cost: Option<f64>,
    /// Dollars that a member saves, if its cost is known.
    pub net_per_member: Option<f64>,
    /// Machines that lose memory when one blade fails, in a pool that spreads every member over all
    /// blades.
    pub vms_at_risk: usize,
}

/// The answer for these machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    pub vms: usize,
    pub steps: usize,
    pub step_s: f64,
    pub unit: MemoryUnit,
    /// Memory that the machines need without pools.
    pub sum_of_peaks: f64,
    /// Memory that they were promised, if the file says.
    pub provisioned: Option<f64>,
    pub sizes: Vec<Size>,
    /// Pools of the size asked for, provisioned below their peak.
    pub percentiles: Vec<Provisioned>,
    pub advice: Advice,
    /// Pools of the size asked for, if something changes.
    pub what_if: WhatIf,
}

/// Answers the question; `progress` is called with the share of the work done from time to time.
///
/// # Errors
/// No machine, no use at all, or an invalid figure in the question.
pub fn plan(
    of: &Utilisation,
    question: &Question,
    progress: &mut dyn FnMut(f64),
) -> Result<Answer, PlanError> {
    check(of, question)?;
    if !of.has_memory {
        let why = "the file says nothing of the memory that machines use: pools are sized by it; \
                   name its column with --memory-column";
        return Err(PlanError::Question(why.into()));
    }
    let members = Members::new(of, question);
    if members.sum_of_peaks <= 0.0 {
        return Err(PlanError::Question("no machine uses any memory".into()));
    }
    let orders = orders(members.count(), question);
    let wanted = sizes(members.count(), question.group);
    let mut found = Vec::new();
    for (done, vms) in wanted.iter().enumerate() {
        #[allow(clippy::cast_precision_loss)] // at most some tens
        progress(done as f64 / wanted.len() as f64);
        found.push(size(&members, *vms, &orders, question));
    }
    let percentiles = percentile::provision(&members, &orders, question, of.step_s);
    let mut advice = verdict::advise(&found, question);
    let what_if = what_if::what_if(&members, &orders, question);
    advice.reasons.extend(what_if::reasons(&what_if, question));
    let promised: Option<Vec<f64>> = of.vms.iter().map(|vm| vm.memory_provisioned).collect();
    Ok(Answer {
        vms: members.count(),
        steps: of.steps,
        step_s: of.step_s,
        unit: of.memory_unit,
        sum_of_peaks: members.sum_of_peaks,
        provisioned: promised.map(|promised| promised.iter().sum()),
        sizes: found,
        percentiles,
        advice,
        what_if,
    })
}

fn check(of: &Utilisation, question: &Question) -> Result<(), PlanError> {
    let wrong = |reason: String| Err(PlanError::Question(reason));
    let shares = [("the local share", question.local_share), ("what is worth it", question.worth)];
    if let Some((what, share)) = shares.into_iter().find(|(_, s)| !(0.0..=1.0).contains(s)) {
        return wrong(format!("{what} is {share}; it must lie between 0 and 1"));
    }
    if question.group == 0 || question.group > of.vms.len() {
        let (group, all) = (question.group, of.vms.len());
        let remedy = format!("give --group {all} or less");
        return wrong(format!("a pool of {group} cannot be made of {all} machines; {remedy}"));
    }
    if question.groupings == 0 {
        return wrong("no groupings to try".into());
    }
    let (vms, groupings) = (of.vms.len(), question.groupings);
    if vms.saturating_mul(groupings) > PLACES_MAX {
        let most = PLACES_MAX / vms;
        return wrong(format!(
            "{groupings} groupings of {vms} machines; give --groupings {most} or less"
        ));
    }
    if question.blades == 1 {
        return wrong("the spare of a pool of one blade would be all of it; give 2 or more".into());
    }
    let money = [
        ("a GiB in a server", Some(question.local_price_per_gib)),
        ("a GiB in a blade", question.far_price_per_gib),
        ("a member", question.member_cost),
        ("a machine's memory", question.machine_memory_bytes),
    ];
    let bad = |value: &Option<f64>| value.is_some_and(|value| !value.is_finite() || value < 0.0);
    if let Some((what, value)) = money.iter().find(|(_, value)| bad(value)) {
        return wrong(format!("{what} at {} is below zero or not a number", value.unwrap_or(0.0)));
    }
    let changes = &question.changes;
    if !(-1.0..=100.0).contains(&changes.growth_per_year) || changes.years > YEARS_MAX {
        let (growth, years) = (changes.growth_per_year * 100.0, changes.years);
        return wrong(format!(
            "growth of {growth} % a year over {years} years; at most {YEARS_MAX} years are planned"
        ));
    }
    let spans = [changes.local_price_per_gib, changes.far_price_per_gib, changes.member_cost];
    let is_bad =
        |(low, high): &Span| !low.is_finite() || !high.is_finite() || *low < 0.0 || high < low;
    if let Some((low, high)) = spans.into_iter().flatten().find(is_bad) {
        return wrong(format!("prices from {low} to {high}"));
    }
    let bad = question.percentiles.iter().find(|p| !(0.0..=100.0).contains(*p));
    bad.map_or(Ok(()), |p| wrong(format!("{p} is not a percentile: it must lie between 0 and 100")))
}

/// Each machine's demand from a pool over time.
struct Members {
    far: Vec<Vec<f64>>,
    local: Vec<f64>,
    sum_of_peaks: f64,
    steps: usize,
    /// GiB per unit of memory, if that is known.
    unit_gib: Option<f64>,
}

impl Members {
    fn new(of: &Utilisation, question: &Question) -> Members {
        let peaks: Vec<f64> = (0..of.vms.len()).map(|vm| peak(of.memory(vm))).collect();
        let local: Vec<f64> = peaks.iter().map(|peak| peak * question.local_share).collect();
        let beyond = |(vm, local): (usize, &f64)| -> Vec<f64> {
            of.memory(vm).iter().map(|used| (used - local).max(0.0)).collect()
        };
        let far = local.iter().enumerate().map(beyond).collect();
        let unit_gib = match of.memory_unit {
            MemoryUnit::Bytes => Some(1.0 / GIB),
            MemoryUnit::Machines => question.machine_memory_bytes.map(|bytes| bytes / GIB),
        };
        Members { far, local, sum_of_peaks: peaks.iter().sum(), steps: of.steps, unit_gib }
    }

    fn count(&self) -> usize {
        self.far.len()
    }

    /// Returns the far memory that these machines use together over time.
    fn sum(&self, of: &[usize]) -> Vec<f64> {
        let mut sum = vec![0.0; self.steps];
        self.sum_into(of, &mut sum);
        sum
    }

    /// The same into `sum`, whatever it holds.
    fn sum_into(&self, of: &[usize], sum: &mut [f64]) {
        sum.fill(0.0);
        for vm in of {
            for (total, far) in sum.iter_mut().zip(&self.far[*vm]) {
                *total += far;
            }
        }
    }
}

/// Returns a random order of the machines for each grouping: pools are runs of an order.
fn orders(vms: usize, question: &Question) -> Vec<Vec<usize>> {
    let mut random = Random::new(question.seed);
    let mut order = || {
        let mut order: Vec<usize> = (0..vms).collect();
        random.shuffle(&mut order);
        order
    };
    (0..question.groupings).map(|_| order()).collect()
}

/// Returns one, two, four and so on, the size asked for, and all.
fn sizes(vms: usize, group: usize) -> Vec<usize> {
    let powers = (0..usize::BITS).map(|power| 1_usize << power).take_while(|size| *size < vms);
    let mut sizes: Vec<usize> = powers.chain([group, vms]).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn size(members: &Members, vms: usize, orders: &[Vec<usize>], question: &Question) -> Size {
    let local: f64 = members.local.iter().sum();
    // A size of one or of all machines gives the same pools in any order.
    let orders = match vms == 1 || vms == members.count() {
        true => &orders[..1],
        false => orders,
    };
    let pooled = |order: &Vec<usize>| -> f64 {
        order.chunks(vms).map(|pool| peak(&members.sum(pool))).sum()
    };
    let mut far: Vec<f64> = orders.iter().map(pooled).collect();
    far.sort_by(f64::total_cmp);
    #[allow(clippy::cast_precision_loss)] // of groupings and of machines
    let (groupings, count) = (far.len() as f64, members.count() as f64);
    let mean = far.iter().sum::<f64>() / groupings;
    let ratio = |far: f64| (local + far) / members.sum_of_peaks;
    let with_spare = mean * spare_factor(question.blades, vms);
    let apart = members.sum_of_peaks - local;
    let break_even = members.unit_gib.map(|gib| {
        let (apart, pooled) = (apart * gib, with_spare * gib);
        let local_price = question.local_price_per_gib;
        (apart * local_price - pooled * question.far_price(local_price)) / count
    });
    let priced = question.local_price_per_gib > 0.0;
    let break_even = break_even.filter(|_| priced && vms > 1);
    Size {
        vms,
        pools: members.count().div_ceil(vms),
        ratio: ratio(mean),
        ratio_low: ratio(quantile(&far, CONFIDENCE.0)),
        ratio_high: ratio(quantile(&far, CONFIDENCE.1)),
        ratio_with_spare: ratio(with_spare),
        saved: apart - with_spare,
        saved_gib: members.unit_gib.map(|gib| (apart - with_spare) * gib),
        break_even_member_cost: break_even,
        net_per_member: break_even.zip(question.member_cost).map(|(most, cost)| most - cost),
        vms_at_risk: if vms > 1 { vms } else { 0 },
    }
}

/// Returns the factor on a pool's memory that lets one of its blades fail. A single machine has no
/// pool.
fn spare_factor(blades: u32, vms: usize) -> f64 {
    match blades {
        0 | 1 => 1.0,
        _ if vms == 1 => 1.0,
        blades => f64::from(blades) / f64::from(blades - 1),
    }
}

/// Returns the nearest-rank quantile of sorted values, `share` from 0 to 1.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let rank = (share * sorted.len() as f64).ceil() as usize; // of a few thousand at most
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two machines that peak at the same time, and two that peak at other times.
    fn example() -> Utilisation {
        let memory =
            [vec![1.0, 0.0, 0.0], vec![1.0, 0.0, 0.0], vec![0.0, 1.0, 0.0], vec![0.0, 0.0, 1.0]];
        Utilisation::from_series(&vec![vec![0.0; 3]; 4], &memory, 300.0)
    }

    fn asked(question: Question) -> Answer {
        plan(&example(), &question, &mut |_| {}).expect("an answer")
    }

    #[test]
    fn a_pool_of_all_needs_the_peak_of_the_sum_and_apart_the_sum_of_peaks() {
        let answer = asked(Question { group: 4, ..Question::default() });
        assert_eq!(answer.sum_of_peaks, 4.0);
        let by_size: Vec<(usize, f64)> = answer.sizes.iter().map(|s| (s.vms, s.ratio)).collect();
        assert_eq!((by_size[0], by_size[2]), ((1, 1.0), (4, 0.5)));
        // Of the three ways to make pairs, one pairs the two that peak together: 3/4, the others
        // 2/4.
        let pairs = &answer.sizes[1];
        assert!((pairs.ratio_low, pairs.ratio_high) == (0.5, 0.75), "{pairs:?}");
        assert!((pairs.ratio - 7.0 / 12.0).abs() < 0.05, "{pairs:?}");
    }

    #[test]
    fn local_memory_is_not_shared_and_a_spare_blade_costs_its_part() {
        let answer =
            asked(Question { group: 4, local_share: 0.5, blades: 3, ..Question::default() });
        let all = answer.sizes.last().expect("a size");
        // 4 x 0.5 local, and two that need 0.5 more at the same time.
        assert_eq!(all.ratio, 0.75);
        assert_eq!(all.ratio_with_spare, (2.0 + 1.0 * 1.5) / 4.0);
        assert_eq!(answer.sizes[0].ratio_with_spare, 1.0, "alone there is no pool and no spare");
    }

    #[test]
    fn money_needs_a_size_and_breaks_even_where_the_saving_is_spent() {
        let priced = Question {
            group: 4,
            local_price_per_gib: 10.0,
            far_price_per_gib: Some(10.0),
            member_cost: Some(3.0),
            machine_memory_bytes: Some(GIB),
            ..Question::default()
        };
        let answer = asked(priced.clone());
        let all = answer.sizes.last().expect("a size");
        assert_eq!((all.saved_gib, all.break_even_member_cost), (Some(2.0), Some(5.0)));
        assert_eq!(all.net_per_member, Some(2.0));
        let unsized_ = asked(Question { machine_memory_bytes: None, ..priced });
        assert_eq!(unsized_.sizes.last().expect("a size").break_even_member_cost, None);
    }

    #[test]
    fn more_groupings_than_memory_holds_are_refused_before_any_is_made() {
        let question = Question { group: 2, groupings: usize::MAX, ..Question::default() };
        let error = plan(&example(), &question, &mut |_| {}).expect_err("all of memory");
        assert!(error.to_string().contains("--groupings 67108864 or less"), "{error}");
    }

    #[test]
    fn the_same_seed_gives_the_same_answer_and_no_question_is_answered_wrongly() {
        let question = Question { group: 2, ..Question::default() };
        assert_eq!(asked(question.clone()), asked(question.clone()));
        let bad = [
            Question { group: 0, ..question.clone() },
            Question { group: 5, ..question.clone() },
            Question { groupings: 0, ..question.clone() },
            Question { blades: 1, ..question.clone() },
            Question { local_share: 1.5, ..question.clone() },
            Question { percentiles: vec![101.0], ..question.clone() },
            Question { local_price_per_gib: -1.0, ..question },
        ];
        for question in bad {
            assert!(plan(&example(), &question, &mut |_| {}).is_err(), "{question:?}");
        }
        let idle = Utilisation::from_series(&[vec![1.0]], &[vec![0.0]], 300.0);
        let question = Question { group: 1, ..Question::default() };
        assert!(plan(&idle, &question, &mut |_| {}).is_err());
    }
}
