//! Twitter's production clusters, from the figures published with their traces
//! (data/twitter-clusters.csv names the source).

use super::popularity::{self, Popularity};
use super::sizes::Sizes;
use super::{Mix, Workload};

const TABLE: &str = include_str!("../../data/twitter-clusters.csv");
/// The table has only means; the spread of value lengths is ours.
const VALUE_SIGMA: f64 = 0.5;

/// One cluster's figures.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    pub number: u32,
    pub key_bytes: usize,
    pub value_bytes: f64,
    pub zipf_alpha: f64,
    /// Share of the keys that are requested once.
    pub one_hit: f64,
    pub lifetimes_s: Vec<(u32, f64)>,
    pub set: f64,
    pub delete: f64,
}

/// Why a cluster has no figures.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TwitterError {
    #[error(
        "there are no figures for Twitter's cluster {0}; there are clusters 1 to 54, without 5 and \
         two others"
    )]
    Unknown(u32),
    #[error("line {0} of the table of clusters cannot be read")]
    Line(usize),
}

/// Figures of one cluster.
pub fn cluster(number: u32) -> Result<Cluster, TwitterError> {
    let found = clusters()?.into_iter().find(|it| it.number == number);
    found.ok_or(TwitterError::Unknown(number))
}

/// Figures of all clusters that have any.
pub fn clusters() -> Result<Vec<Cluster>, TwitterError> {
    let lines = TABLE.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    lines.map(|(at, line)| parse(line).ok_or(TwitterError::Line(at + 1))).collect()
}

fn parse(line: &str) -> Option<Cluster> {
    let fields: [&str; 7] = line.split(',').collect::<Vec<_>>().try_into().ok()?;
    let [number, key_bytes, value_bytes, zipf_alpha, one_hit, lifetimes, operations] = fields;
    let pairs = |text: &str| -> Option<Vec<(String, f64)>> {
        let pair = |it: &str| {
            let (name, share) = it.split_once(':')?;
            Some((name.to_owned(), share.parse().ok()?))
        };
        text.split_whitespace().map(pair).collect()
    };
    let operations = pairs(operations)?;
    // Operations that change an item count as stores, those that only look at it as reads.
    let share = |names: &[&str]| {
        operations.iter().filter(|(name, _)| names.contains(&name.as_str())).map(|it| it.1).sum()
    };
    let seconds = |(text, share): (String, f64)| Some((text.parse().ok()?, share));
    Some(Cluster {
        number: number.parse().ok()?,
        key_bytes: key_bytes.parse().ok()?,
        value_bytes: value_bytes.parse().ok()?,
        zipf_alpha: zipf_alpha.parse().ok()?,
        one_hit: one_hit.parse::<f64>().ok()? / 100.0,
        lifetimes_s: pairs(lifetimes)?.into_iter().map(seconds).collect::<Option<_>>()?,
        set: share(&["set", "add", "replace", "cas", "incr", "decr", "append", "prepend"]),
        delete: share(&["delete"]),
    })
}

impl Cluster {
    /// A load like the cluster's, over the keys of `plain`.
    #[must_use]
    pub fn workload(&self, plain: Workload) -> Workload {
        let is_zipf = popularity::is_alpha(self.zipf_alpha);
        Workload {
            popularity: if is_zipf {
                Popularity::Zipf(self.zipf_alpha)
            } else {
                Popularity::Uniform
            },
            mix: Mix { set: self.set, delete: self.delete },
            one_hit: self.one_hit * ONE_HIT_DRAWS,
            key_bytes: Sizes::Fixed(self.key_bytes),
            value_bytes: Sizes::LogNormal { mean: self.value_bytes, sigma: VALUE_SIGMA },
            lifetimes_s: self.lifetimes_s.clone(),
            look_aside: true,
            ..plain
        }
    }
}

/// The table gives the share of the keys that are requested once; their share of the draws is
/// smaller, because other keys recur. Half is right if the others are requested twice; it is our
/// assumption.
const ONE_HIT_DRAWS: f64 = 0.5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_is_read_and_its_figures_can_be() {
        let clusters = clusters().unwrap();
        assert_eq!(clusters.len(), 51);
        for it in &clusters {
            assert!((1..=250).contains(&it.key_bytes), "{it:?}");
            assert!(it.value_bytes >= 1.0 && it.value_bytes < 1e6, "{it:?}");
            assert!((0.0..=1.0).contains(&it.one_hit) && it.zipf_alpha < 4.0, "{it:?}");
            assert!(it.set + it.delete <= 1.03, "{it:?}");
            let lifetimes: f64 = it.lifetimes_s.iter().map(|it| it.1).sum();
            assert!(lifetimes <= 1.03, "{it:?}");
        }
        let nineteenth = cluster(19).unwrap();
        assert_eq!((nineteenth.key_bytes, nineteenth.set), (42, 0.25));
        assert_eq!(cluster(5), Err(TwitterError::Unknown(5)));
    }
}
