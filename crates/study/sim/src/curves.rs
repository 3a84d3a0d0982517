//! Miss-ratio curves of several policies over one trace: exact where that takes seconds, from a
//! sample where it would take minutes. Each curve says how it was made.

use farpool_policy::CacheKind;
use farpool_report::{Axis, Column, Line, LinePlot, Page, Provenance, Table};
use serde::Serialize;

use crate::load::Pages;
use crate::misses::{CacheConfig, DensePages, MissPolicy};
use crate::mrc::{Estimate, LruCurve, Miniature, Population, Rate, SampleError, sampled_lru};
use crate::sweep::{self, Progress, sweep};

/// Requests up to which [`Method::Auto`] counts the LRU curve exactly: about 10 s.
const EXACT_LRU_REQUESTS: u64 = 100_000_000;
/// Requests of all configurations together up to which [`Method::Auto`] counts the other policies
/// exactly: about 20 s.
const EXACT_SWEEP_REQUESTS: u64 = 2_000_000_000;
/// The share of the pages that a sample takes by default.
const USUAL_RATE: f64 = 0.01;

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
    /// The estimated error of each miss ratio; only of sampled curves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errors: Option<Vec<f64>>,
    /// How it was made, and its estimated error.
    pub method: String,
}

/// Returns an upper bound of the bytes that [`curves`] takes beside the trace, before it begins.
#[must_use]
pub fn memory_bytes(question: &CurvesQuestion, pages: &Pages) -> u64 {
    let (page_count, requests) = (pages.page_count as u64, pages.pages.len() as u64);
    let others = configs(question, |policy| policy != MissPolicy::Online(CacheKind::Lru));
    let swept = sweep::memory_bytes(page_count, requests, &others, question.threads);
    swept.max(LruCurve::memory_bytes(page_count))
}

fn configs(question: &CurvesQuestion, wanted: impl Fn(MissPolicy) -> bool) -> Vec<CacheConfig> {
    let policies = question.policies.iter().copied().filter(|policy| wanted(*policy));
    policies
        .flat_map(|policy| {
            question.sizes.iter().map(move |&capacity| CacheConfig { policy, capacity })
        })
        .collect()
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
    // Each page is numbered at its first touch, so all of them occur.
    let of = Population::new(trace);
    question
        .policies
        .iter()
        .map(|&policy| match policy {
            MissPolicy::Online(CacheKind::Lru) => lru(question, &of, trace),
            _ => other(question, &of, trace, policy, &mut progress),
        })
        .collect()
}

fn usual_rate() -> Result<Rate, SampleError> {
    Rate::new(USUAL_RATE)
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
        method: "exact".to_owned(),
    }
}

fn lru(
    question: &CurvesQuestion,
    of: &Population<'_>,
    trace: DensePages<'_>,
) -> Result<Curve, SampleError> {
    let policy = MissPolicy::Online(CacheKind::Lru);
    let is_small = trace.pages.len() as u64 <= EXACT_LRU_REQUESTS;
    let rate = match question.method {
        Method::Sampled(rate) => rate,
        Method::Auto if !is_small => usual_rate()?,
        Method::Auto | Method::Exact => {
            let curve = LruCurve::new(trace, |_| {});
            let misses = question.sizes.iter().map(|&size| curve.misses(size)).collect();
            return Ok(exact(policy, misses, trace.pages.len()));
        }
    };
    let estimate = sampled_lru(of, &question.sizes, rate)?;
    Ok(sampled(policy, "SHARDS", rate, estimate))
}

fn sampled(policy: MissPolicy, how: &str, rate: Rate, estimate: Estimate) -> Curve {
    Curve {
        policy: policy.name(),
        method: format!("{how}, {} of the pages: {estimate}", share(rate)),
        miss_ratios: estimate.miss_ratios,
        misses: None,
        errors: Some(estimate.errors),
    }
}

fn other(
    question: &CurvesQuestion,
    of: &Population<'_>,
    trace: DensePages<'_>,
    policy: MissPolicy,
    progress: &mut (impl FnMut(Progress) + Send),
) -> Result<Curve, SampleError> {
    let configs = configs(question, |asked| asked == policy);
    let all = trace.pages.len() as u64 * (question.sizes.len() * question.policies.len()) as u64;
    let rate = match question.method {
        Method::Sampled(rate) => rate,
        Method::Auto if all > EXACT_SWEEP_REQUESTS => usual_rate()?,
        Method::Auto | Method::Exact => {
            let misses = sweep(trace, &configs, question.threads, progress)?;
            return Ok(exact(policy, misses, trace.pages.len()));
        }
    };
    let asked = Miniature { policy, capacities: &question.sizes, rate, threads: question.threads };
    let estimate = asked.estimate(of, progress)?;
    Ok(sampled(policy, "miniature simulation", rate, estimate))
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
