//! What becomes of pools of the size asked for if something changes: growth, a blade lost, members
//! that peak together, prices.

use serde::Serialize;

use super::{Members, Question, spare_factor};
use crate::utilisation::peak;

/// A price that is not known exactly: from, to.
pub type Span = (f64, f64);

/// The changes to examine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Changes {
    /// Growth of all memory use a year, as a share of it: 0.2 for 20 %.
    pub growth_per_year: f64,
    /// Years of growth; 0 for none.
    pub years: u32,
    /// Prices from, to; each defaults to the one price of the question.
    pub local_price_per_gib: Option<Span>,
    pub far_price_per_gib: Option<Span>,
    pub member_cost: Option<Span>,
}

/// One year of growth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Year {
    pub year: u32,
    /// Memory in use, relative to today.
    pub factor: f64,
    /// What machines need without pools, in the unit of the file.
    pub sum_of_peaks: f64,
    /// What all pools and local memory need, with the spare.
    pub pooled: f64,
    /// Share of all steps of all pools in which pools as large as needed today are too small.
    pub short_share: f64,
    /// By how much at worst, relative to such a pool.
    pub worst_short_share: f64,
}

/// One of the blades of each pool fails.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BladeLost {
    pub blades: u32,
    /// True if the pool was sized with one blade spare.
    pub has_spare: bool,
    /// Machines that have memory on the failed blade.
    pub vms_hit: usize,
    /// Share of a machine's far memory that was there.
    pub lost_share: f64,
    /// Share of all steps in which the blades left are too small.
    pub short_share: f64,
    /// By how much at worst, relative to the blades left.
    pub worst_short_share: f64,
}

/// Which machines share a pool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Grouped {
    pub how: How,
    /// Peak of sums, with local memory, relative to the sum of peaks.
    pub ratio: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// At random: the mean of all groupings.
    Random,
    /// As the file lists them: neighbours often run the same service.
    AsListed,
    /// Those that peak at the same time: the worst case.
    PeakTogether,
}

/// Prices at one corner of their spans.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Corner {
    pub local_price_per_gib: f64,
    pub far_price_per_gib: f64,
    pub member_cost: Option<f64>,
    pub break_even_member_cost: f64,
    /// What remains of a member's saving after its cost.
    pub net_per_member: Option<f64>,
}

/// The answers to all changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct WhatIf {
    pub growth: Vec<Year>,
    pub blade_lost: Vec<BladeLost>,
    pub grouped: Vec<Grouped>,
    pub prices: Vec<Corner>,
}

/// How often and by how much pools are too small, as each is summed up.
#[derive(Clone, Copy, Debug)]
struct Shortage {
    /// Use, relative to today.
    factor: f64,
    /// Room, relative to a pool's peak of today.
    room: f64,
    short: usize,
    steps: usize,
    worst: f64,
}

impl Shortage {
    fn new(factor: f64, room: f64) -> Shortage {
        Shortage { factor, room, short: 0, steps: 0, worst: 0.0 }
    }

    fn add(&mut self, held: &[f64], peak: f64) {
        let memory = peak * self.room;
        self.steps += held.len();
        for used in held {
            // Rounding is no shortage.
            let excess = used * self.factor - memory;
            if excess > memory * 1e-9 {
                self.short += 1;
                let share = if memory > 0.0 { excess / memory } else { f64::INFINITY };
                self.worst = self.worst.max(share);
            }
        }
    }

    /// Returns the share of steps that are short, and the worst excess relative to the room.
    fn told(&self) -> (f64, f64) {
        #[allow(clippy::cast_precision_loss)] // of steps
        let share = self.short as f64 / self.steps.max(1) as f64;
        (share, self.worst)
    }
}

/// Sums over the pools of all groupings.
struct Pools {
    /// Of the peaks of today.
    peaks: f64,
    /// Of each year, from today on.
    years: Vec<Shortage>,
    /// Of a blade lost, with one spare and without.
    blade_lost: Vec<Shortage>,
}

impl Pools {
    /// Looks at one pool at a time: all pools of all groupings over time take as much memory as the
    /// file, times the groupings.
    fn new(members: &Members, orders: &[Vec<usize>], question: &Question) -> Pools {
        let Changes { growth_per_year, years, .. } = question.changes;
        let spare = spare_factor(question.blades, question.group);
        let year = |year: u32| {
            let factor = (1.0 + growth_per_year).powi(farpool_units::exactly(year));
            Shortage::new(factor, spare)
        };
        let years = if years == 0 { Vec::new() } else { (0..=years).map(year).collect() };
        let blades = f64::from(question.blades);
        let lost = |room: f64| Shortage::new(1.0, room * (blades - 1.0) / blades);
        let blade_lost =
            if question.blades < 2 { Vec::new() } else { vec![lost(spare), lost(1.0)] };
        let mut pools = Pools { peaks: 0.0, years, blade_lost };
        let mut held = vec![0.0; members.steps];
        for pool in orders.iter().flat_map(|order| order.chunks(question.group)) {
            members.sum_into(pool, &mut held);
            let peak = peak(&held);
            pools.peaks += peak;
            for shortage in pools.years.iter_mut().chain(&mut pools.blade_lost) {
                shortage.add(&held, peak);
            }
        }
        pools
    }
}

pub(super) fn what_if(members: &Members, orders: &[Vec<usize>], question: &Question) -> WhatIf {
    let pools = Pools::new(members, orders, question);
    WhatIf {
        growth: growth(members, &pools, orders.len(), question),
        blade_lost: blade_lost(&pools, question),
        grouped: grouped(members, &pools, orders.len(), question),
        prices: prices(members, &pools, orders.len(), question),
    }
}

/// Memory of all pools of one grouping on average, without local memory and spare.
fn pooled(pools: &Pools, groupings: usize) -> f64 {
    #[allow(clippy::cast_precision_loss)] // of groupings
    let groupings = groupings as f64;
    pools.peaks / groupings
}

fn growth(members: &Members, pools: &Pools, groupings: usize, question: &Question) -> Vec<Year> {
    let local: f64 = members.local.iter().sum();
    let spare = spare_factor(question.blades, question.group);
    let today = local + pooled(pools, groupings) * spare;
    let year = |(year, shortage): (u32, &Shortage)| {
        let (short_share, worst_short_share) = shortage.told();
        Year {
            year,
            factor: shortage.factor,
            sum_of_peaks: members.sum_of_peaks * shortage.factor,
            pooled: today * shortage.factor,
            short_share,
            worst_short_share,
        }
    };
    (0..).zip(&pools.years).map(year).collect()
}

fn blade_lost(pools: &Pools, question: &Question) -> Vec<BladeLost> {
    let lost = |(has_spare, shortage): (bool, &Shortage)| {
        let (short_share, worst_short_share) = shortage.told();
        BladeLost {
            blades: question.blades,
            has_spare,
            // Every member is spread over all blades.
            vms_hit: question.group,
            lost_share: 1.0 / f64::from(question.blades),
            short_share,
            worst_short_share,
        }
    };
    [true, false].into_iter().zip(&pools.blade_lost).map(lost).collect()
}

fn grouped(
    members: &Members,
    pools: &Pools,
    groupings: usize,
    question: &Question,
) -> Vec<Grouped> {
    let local: f64 = members.local.iter().sum();
    let ratio = |far: f64| (local + far) / members.sum_of_peaks;
    let of = |order: &[usize]| -> f64 {
        order.chunks(question.group).map(|pool| peak(&members.sum(pool))).sum()
    };
    let listed: Vec<usize> = (0..members.count()).collect();
    let mut together = listed.clone();
    let peak_at = |vm: &usize| {
        let used = &members.far[*vm];
        used.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(step, _)| step)
    };
    together.sort_by_key(peak_at);
    vec![
        Grouped { how: How::Random, ratio: ratio(pooled(pools, groupings)) },
        Grouped { how: How::AsListed, ratio: ratio(of(&listed)) },
        Grouped { how: How::PeakTogether, ratio: ratio(of(&together)) },
    ]
}

/// Every combination of the ends of the spans that were given.
fn prices(members: &Members, pools: &Pools, groupings: usize, question: &Question) -> Vec<Corner> {
    let changes = &question.changes;
    let spans = [changes.local_price_per_gib, changes.far_price_per_gib, changes.member_cost];
    let Some(gib) = members.unit_gib.filter(|_| spans.iter().any(Option::is_some)) else {
        return Vec::new();
    };
    let ends = |span: Option<Span>, one: f64| span.map_or(vec![one], |(low, high)| vec![low, high]);
    let costs: Vec<Option<f64>> = match changes.member_cost {
        Some((low, high)) => vec![Some(low), Some(high)],
        None => vec![question.member_cost],
    };
    let local: f64 = members.local.iter().sum();
    let spare = spare_factor(question.blades, question.group);
    let apart = (members.sum_of_peaks - local) * gib;
    let far = pooled(pools, groupings) * spare * gib;
    #[allow(clippy::cast_precision_loss)] // of machines
    let count = members.count() as f64;
    let mut corners = Vec::new();
    for local_price in ends(changes.local_price_per_gib, question.local_price_per_gib) {
        // A price of far memory that follows that of local memory is another one at each end.
        let far_price = question.far_price(local_price);
        for far_price in ends(changes.far_price_per_gib, far_price) {
            for member_cost in &costs {
                let break_even = (apart * local_price - far * far_price) / count;
                corners.push(Corner {
                    local_price_per_gib: local_price,
                    far_price_per_gib: far_price,
                    member_cost: *member_cost,
                    break_even_member_cost: break_even,
                    net_per_member: member_cost.map(|cost| break_even - cost),
                });
            }
        }
    }
    corners
}

/// Returns a sentence on each change that the decision depends on.
pub(super) fn reasons(answer: &WhatIf, question: &Question) -> Vec<String> {
    let mut reasons = Vec::new();
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    if let Some(year) = answer.growth.iter().find(|year| year.short_share > 0.0) {
        reasons.push(format!(
            "with {} growth a year, pools as large as needed today are too small from year {} on: \
             {} of the time, by {} at worst",
            percent(question.changes.growth_per_year),
            year.year,
            percent(year.short_share),
            percent(year.worst_short_share)
        ));
    }
    let lost = answer.blade_lost.iter().find(|lost| !lost.has_spare && lost.short_share > 0.0);
    if let Some(lost) = lost {
        reasons.push(format!(
            "without a spare, {} machines lose {} of their far memory with a blade, and what is left \
             is too small {} of the time, by {} at worst",
            lost.vms_hit,
            percent(lost.lost_share),
            percent(lost.short_share),
            percent(lost.worst_short_share)
        ));
    }
    let ratio = |how: How| answer.grouped.iter().find(|it| it.how == how).map(|it| it.ratio);
    if let (Some(random), Some(together)) = (ratio(How::Random), ratio(How::PeakTogether))
        && 1.0 - random >= question.worth
        && 1.0 - together < question.worth
    {
        reasons.push(format!(
            "it depends on who shares a pool: machines that peak together would save only {}",
            percent(1.0 - together)
        ));
    }
    let left = |corner: &Corner| corner.net_per_member.unwrap_or(corner.break_even_member_cost);
    let worst = answer.prices.iter().map(left).fold(f64::INFINITY, f64::min);
    let best = answer.prices.iter().map(left).fold(f64::NEG_INFINITY, f64::max);
    if worst.is_finite() {
        let holds = match (worst > 0.0, best > 0.0) {
            (true, _) => "at all these prices a pool saves money",
            (_, false) => "at none of these prices a pool saves money",
            _ => "whether a pool saves money depends on the prices",
        };
        reasons.push(format!("{holds}: ${worst:.2} to ${best:.2} a machine"));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::super::{Answer, plan};
    use super::*;
    use crate::utilisation::Utilisation;

    /// Four machines in two pairs: the first pair peaks together, the second pair later.
    fn answer(changes: Changes, blades: u32) -> Answer {
        let memory =
            [vec![1.0, 0.0, 0.5], vec![1.0, 0.0, 0.5], vec![0.0, 1.0, 0.5], vec![0.0, 1.0, 0.5]];
        let of = Utilisation::from_series(&vec![vec![0.0; 3]; 4], &memory, 300.0);
        let question = Question {
            group: 2,
            blades,
            changes,
            local_price_per_gib: 8.0,
            machine_memory_bytes: Some(f64::from(1 << 30)),
            ..Question::default()
        };
        plan(&of, &question, &mut |_| {}).expect("an answer")
    }

    #[test]
    fn growth_outgrows_pools_and_says_in_which_year() {
        let grown = answer(Changes { growth_per_year: 0.5, years: 2, ..Changes::default() }, 0);
        let years = &grown.what_if.growth;
        assert_eq!((years.len(), years[2].factor, years[2].sum_of_peaks), (3, 2.25, 9.0));
        assert_eq!((years[0].short_share, years[0].worst_short_share), (0.0, 0.0));
        assert!(years[1].short_share > 0.3 && (years[1].worst_short_share - 0.5).abs() < 1e-9);
        assert!(grown.advice.reasons.iter().any(|it| it.contains("from year 1 on")), "{grown:?}");
        // A spare blade is room to grow: four blades, a third more.
        let spared = answer(Changes { growth_per_year: 0.3, years: 1, ..Changes::default() }, 4);
        assert_eq!(spared.what_if.growth[1].short_share, 0.0, "{spared:?}");
    }

    #[test]
    fn a_lost_blade_hurts_pools_without_a_spare_alone() {
        let lost = answer(Changes::default(), 4).what_if.blade_lost;
        assert_eq!((lost[0].has_spare, lost[0].short_share), (true, 0.0));
        assert!(lost[1].short_share > 0.3 && !lost[1].has_spare, "{lost:?}");
        assert!((lost[1].worst_short_share - 1.0 / 3.0).abs() < 1e-9, "4/4 in 3/4: {lost:?}");
        assert!(answer(Changes::default(), 0).what_if.blade_lost.is_empty());
    }

    #[test]
    fn machines_that_peak_together_save_nothing() {
        let grouped = answer(Changes::default(), 0).what_if.grouped;
        let ratio = |how: How| grouped.iter().find(|it| it.how == how).expect("there").ratio;
        assert_eq!((ratio(How::PeakTogether), ratio(How::AsListed)), (1.0, 1.0));
        assert!(ratio(How::Random) < 0.8, "{grouped:?}");
    }

    #[test]
    fn prices_are_tried_at_the_ends_of_their_spans() {
        let spans = Changes {
            local_price_per_gib: Some((4.0, 8.0)),
            member_cost: Some((0.5, 5.0)),
            ..Changes::default()
        };
        let priced = answer(spans, 0);
        assert_eq!(priced.what_if.prices.len(), 4);
        let told = priced.advice.reasons.iter().any(|it| it.contains("depends on the prices"));
        assert!(told, "{:?}", priced.advice.reasons);
        assert!(answer(Changes::default(), 0).what_if.prices.is_empty());
    }

    #[test]
    fn far_memory_costs_as_much_as_local_memory_at_both_ends_unless_it_has_a_price() {
        let spans = Changes { local_price_per_gib: Some((4.0, 8.0)), ..Changes::default() };
        let prices = answer(spans, 0).what_if.prices;
        let far: Vec<f64> = prices.iter().map(|corner| corner.far_price_per_gib).collect();
        assert_eq!(far, [4.0, 8.0]);
        // The same memory at twice the price saves twice as much.
        let even: Vec<f64> = prices.iter().map(|corner| corner.break_even_member_cost).collect();
        assert!((even[1] - 2.0 * even[0]).abs() < 1e-9, "{even:?}");
    }
}
