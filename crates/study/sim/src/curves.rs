//! Miss-ratio curves of several policies over one trace: exact where that takes seconds, from a
//! sample where it would take minutes. Each curve says how it was made.

use farpool_policy::CacheKind;
use farpool_report::{Axis, Column, Line, LinePlot, Page, Provenance, Table};
use serde::Serialize;

use crate::load::Pages;
use crate::misses::{CacheConfig, DensePages, MissPolicy};
use crate::mrc::{
    Estimate, LruCurve, Miniature, Population, Rate, SampleError, sampled_lru,
    sampled_lru_memory_bytes,
};
use crate::sweep::{self, Progress, sweep};

/// Requests up to which [`Method::Auto`] counts the LRU curve exactly: about 10 s.
const EXACT_LRU_REQUESTS: u64 = 100_000_000;
/// Requests of all configurations together up to which [`Method::Auto`] counts the other policies
/// exactly: about 20 s.
const EXACT_SWEEP_REQUESTS: u64 = 2_000_000_000;
/// The share of the pages that a sample takes by default.
const USUAL_RATE: Rate = Rate::PERCENT;

/// How curves are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Method {
    /// Exact when small, sampled when large.
    Auto,
    /// Exact, however long it takes.
    Exact,
    /// From this share of the pages.
    Sampled(Rate),
}

/// The question: policies, sizes and method.
#[derive(Debug, Clone, PartialEq)]
pub struct CurvesQuestion {
    /// Which policies.
    pub policies: Vec<MissPolicy>,
    /// At which sizes, in pages.
    pub sizes: Vec<usize>,
    /// How.
    pub method: Method,
    /// Threads for the exact counts.
    pub threads: usize,
}

/// One policy's curve.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Curve {
    /// Its name.
    pub policy: &'static str,
    /// The share of references that miss, at each size that was asked for.
    pub miss_ratios: Vec<f64>,
    /// The same as counts; only of exact curves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub misses: Option<Vec<u64>>,
    /// The estimated error of each miss ratio, the larger one of the next two; only of sampled
    /// curves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errors: Option<Vec<f64>>,
    /// What is due to chance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deviations: Option<Vec<f64>>,
    /// What is due to bias, of policies whose samples may be biased.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drifts: Option<Vec<f64>>,
    /// How it was made, and its estimated error.
    pub method: String,
}

impl CurvesQuestion {
    fn miniature(&self, policy: MissPolicy, rate: Rate) -> Miniature<'_> {
        Miniature { policy, capacities: &self.sizes, rate, threads: self.threads }
    }

    /// Returns the share of the pages that a policy's curve is estimated from; None if it is
    /// counted.
    fn rate(&self, policy: MissPolicy, requests: u64) -> Option<Rate> {
        let is_small = match policy {
            MissPolicy::Online(CacheKind::Lru) => requests <= EXACT_LRU_REQUESTS,
            _ => {
                let configs = (self.sizes.len() * self.policies.len()) as u64;
                requests.saturating_mul(configs) <= EXACT_SWEEP_REQUESTS
            }
        };
        match self.method {
            Method::Sampled(rate) => Some(rate),
            Method::Auto if !is_small => Some(USUAL_RATE),
            Method::Auto | Method::Exact => None,
        }
    }
}

/// Estimates the bytes that [`curves`] takes beside the trace, before it begins: curves are made
/// one after the other. For counted curves it is an upper bound. For sampled ones it is what a
/// sample is expected to take: how many pages and requests a sample has is left to chance, and a
/// sample with much-used pages has more requests.
#[must_use]
pub fn memory_bytes(question: &CurvesQuestion, pages: &Pages) -> u64 {
    let (page_count, requests) = (pages.page_count as u64, pages.pages.len() as u64);
    let of_policy = |&policy: &MissPolicy| {
        let is_lru = policy == MissPolicy::Online(CacheKind::Lru);
        match question.rate(policy, requests) {
            Some(rate) if is_lru => sampled_lru_memory_bytes(page_count, requests, rate),
            Some(rate) => question.miniature(policy, rate).memory_bytes(page_count, requests),
            None if is_lru => LruCurve::memory_bytes(page_count),
            None => {
                let configs = configs(question, policy);
                sweep::memory_bytes(page_count, requests, &configs, question.threads)
            }
        }
    };
    question.policies.iter().map(of_policy).max().unwrap_or(0)
}

fn configs(question: &CurvesQuestion, policy: MissPolicy) -> Vec<CacheConfig> {
    question.sizes.iter().map(|&capacity| CacheConfig { policy, capacity }).collect()
}

/// Computes the curves, in the order of the question's policies.
///
/// # Errors
/// A size of 0, or a sample without a page.
pub fn curves(
    question: &CurvesQuestion,
    pages: &Pages,
    mut progress: impl FnMut(Progress) + Send,
) -> Result<Vec<Curve>, SampleError> {
    let trace = DensePages { pages: &pages.pages, page_count: pages.page_count };
    let of = Population::numbered_by_first_touch(trace);
    let requests = trace.pages.len() as u64;
    let policies = question.policies.iter().copied();
    policies
        .map(|policy| match (question.rate(policy, requests), policy) {
            (None, policy) => counted(question, trace, policy, &mut progress),
            (Some(rate), MissPolicy::Online(CacheKind::Lru)) => {
                let estimate = sampled_lru(&of, &question.sizes, rate, &mut progress)?;
                Ok(sampled(policy, "SHARDS", rate, estimate))
            }
            (Some(rate), policy) => {
                let estimate = question.miniature(policy, rate).estimate(&of, &mut progress)?;
                Ok(sampled(policy, "miniature simulation", rate, estimate))
            }
        })
        .collect()
}

fn counted(
    question: &CurvesQuestion,
    trace: DensePages<'_>,
    policy: MissPolicy,
    progress: &mut (impl FnMut(Progress) + Send),
) -> Result<Curve, SampleError> {
    let misses = match policy {
        MissPolicy::Online(CacheKind::Lru) => {
            let mut now = Progress { requests: 0, requests_total: trace.pages.len() as u64 };
            let curve = LruCurve::new(trace, |requests| {
                now.requests += requests as u64;
                progress(now);
            });
            question.sizes.iter().map(|&size| curve.misses(size)).collect()
        }
        _ => sweep(trace, &configs(question, policy), question.threads, progress)?,
    };
    Ok(exact(policy, misses, trace.pages.len()))
}

#[allow(clippy::cast_precision_loss, reason = "a ratio for people")]
fn exact(policy: MissPolicy, misses: Vec<u64>, requests: usize) -> Curve {
    let ratio = |&count: &u64| count as f64 / requests.max(1) as f64;
    let miss_ratios = misses.iter().map(ratio).collect();
    Curve {
        policy: policy.name(),
        miss_ratios,
        misses: Some(misses),
        errors: None,
        deviations: None,
        drifts: None,
        method: "exact".to_owned(),
    }
}

fn sampled(policy: MissPolicy, how: &str, rate: Rate, estimate: Estimate) -> Curve {
    Curve {
        policy: policy.name(),
        method: format!("{how}, {} of the pages: {estimate}", share(rate)),
        errors: Some(estimate.errors()),
        miss_ratios: estimate.miss_ratios,
        misses: None,
        deviations: Some(estimate.deviations),
        drifts: estimate.drifts,
    }
}

fn share(rate: Rate) -> String {
    format!("{} %", rate.share() * 100.0)
}

/// Builds the page that `farpool sim mrc` answers with.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "for people")]
pub fn page(
    question: &CurvesQuestion,
    pages: &Pages,
    page_bytes: u64,
    curves: &[Curve],
    provenance: Provenance,
) -> Page {
    let of_footprint = |size: usize| size as f64 / pages.page_count.max(1) as f64 * 100.0;
    let columns = [Column::right("local").unit("%").decimals(1), Column::right("pages")];
    let by_policy = curves.iter().flat_map(|curve| {
        let error = curve.errors.is_some().then(|| {
            let name = format!("{}_error", curve.policy);
            Column::right(name).title("+/-").unit("points").decimals(3)
        });
        std::iter::once(Column::right(curve.policy).unit("%").decimals(3)).chain(error)
    });
    let mut table =
        Table::new("curves", "Misses of all references", columns.into_iter().chain(by_policy));
    for (at, &size) in question.sizes.iter().enumerate() {
        let ratios = curves.iter().flat_map(|curve| {
            let error = curve.errors.as_ref().map(|errors| (errors[at] * 100.0).into());
            std::iter::once((curve.miss_ratios[at] * 100.0).into()).chain(error)
        });
        let place = [of_footprint(size).into(), (size as u64).into()];
        table.row(place.into_iter().chain(ratios));
    }
    let mut methods =
        Table::new("methods", "How", [Column::left("policy"), Column::left("method")]);
    for curve in curves {
        methods.row([curve.policy.into(), curve.method.clone().into()]);
    }
    let mut plot = LinePlot::new(
        "Miss-ratio curves",
        Axis::linear("local memory (% of the footprint)").from_zero(),
        Axis::linear("misses (% of references)").from_zero(),
    )
    .describe("How often a page is missing, by the size of local memory");
    for curve in curves {
        let points = question.sizes.iter().zip(&curve.miss_ratios);
        let points = points.map(|(&size, ratio)| (of_footprint(size), ratio * 100.0));
        let mut line = Line::new(curve.policy, points);
        if let Some(errors) = &curve.errors {
            let ends = curve.miss_ratios.iter().zip(errors);
            line = line.band(ends.map(|(ratio, error)| {
                ((ratio - error).max(0.0) * 100.0, (ratio + error).min(1.0) * 100.0)
            }));
        }
        plot = plot.line(line);
    }
    let (requests, footprint) = (pages.pages.len(), pages.page_count as u64 * page_bytes);
    Page::new("Miss-ratio curves", provenance)
        .finding(format!(
            "{requests} references to {} in pages of {}; {:.3} % of them are first touches, which \
             every policy misses.",
            farpool_units::format_bytes(footprint),
            farpool_units::format_bytes(page_bytes),
            pages.page_count as f64 / requests.max(1) as f64 * 100.0
        ))
        .table(table)
        .table(methods)
        .plot(plot)
        .result(&serde_json::json!({
            "requests": requests, "page_count": pages.page_count, "page_bytes": page_bytes,
            "sizes_pages": question.sizes, "curves": curves,
        }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use farpool_trace::{Clock, TraceInfo};

    use crate::synthetic::Synthetic;

    #[test]
    fn memory_is_announced_for_the_way_each_curve_is_made_and_all_tell_their_progress() {
        let made = Synthetic::zipf(1 << 14, 400_000, 3);
        let info = TraceInfo::new("test", 4096, Clock::Requests);
        let pages = Pages { pages: made.pages, page_count: made.page_count, info };
        let lru = MissPolicy::Online(CacheKind::Lru);
        for policies in [vec![lru], vec![MissPolicy::Belady]] {
            let asked = |method| CurvesQuestion {
                policies: policies.clone(),
                sizes: vec![100, 1000],
                method,
                threads: 1,
            };
            let (whole, part) = (asked(Method::Exact), asked(Method::Sampled(Rate::PERCENT)));
            let (all_bytes, part_bytes) =
                (memory_bytes(&whole, &pages), memory_bytes(&part, &pages));
            assert!(part_bytes * 5 < all_bytes, "{policies:?}: {part_bytes} of {all_bytes}");
            for question in [whole, part] {
                let mut told = 0;
                let curves = curves(&question, &pages, |_| told += 1).unwrap();
                assert!(told > 0, "{question:?}");
                let is_sampled = question.method != Method::Exact;
                assert_eq!(curves[0].deviations.is_some(), is_sampled);
                let is_biased_kind = is_sampled && policies[0] != lru;
                assert_eq!(curves[0].drifts.is_some(), is_biased_kind);
            }
        }
    }
}
