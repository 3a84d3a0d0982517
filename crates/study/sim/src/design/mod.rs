//! Designs of far memory: where a page is when it is not local, and what it costs to use it there.
//!
//! Every figure is a parameter; the presets name their sources. Latencies are picoseconds, so that
//! nothing is rounded between two machines.

mod preset;

pub use preset::Preset;

use farpool_units::{at_most, exactly};
use serde::{Deserialize, Serialize};

/// What travels when the program needs something that is not local.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// A page, which is local afterwards: page swapping.
    Page,
    /// A line of 64 bytes; the page stays where it is: fine-grained access.
    Line,
}

/// Where a page that is touched for the first time goes when local memory is full, with
/// [`Unit::Line`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// To the far tier, and stays there: what hardware and an unchanged system do (thesis 3.3.2).
    Far,
    /// Into local memory, for which another page goes (thesis 4.1.2); software has to move that
    /// one.
    Local,
}

/// Something that holds what is not local, and the way to it. A fetch takes
///
/// `software + link + request + map + device + response + link + bytes / bandwidth`
///
/// and waits where the link or the device is busy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// The client's software for each fault: trap, page tables, request.
    pub software_ps: u64,
    /// One way over the link.
    pub link_latency_ps: u64,
    /// Each direction of the link.
    pub link_bytes_per_s: u64,
    /// The far side takes the request apart.
    pub request_ps: u64,
    /// It finds the place.
    pub map_ps: u64,
    /// Its memory answers.
    pub device_ps: u64,
    /// Its memory's bandwidth, which all clients share.
    pub device_bytes_per_s: u64,
    /// The device does one thing at a time: a disk's arm.
    pub is_serial: bool,
    /// It puts the answer together.
    pub response_ps: u64,
    /// Latency by utilisation of the link; empty = always the same.
    pub loaded_latency: Vec<LoadPoint>,
}

/// A point of a link's latency under load, as Mess measures it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadPoint {
    /// Share of the bandwidth in use, in thousandths.
    pub utilisation_permille: u32,
    /// Latency over the idle latency, in thousandths.
    pub latency_permille: u32,
}

/// Critical-block-first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CriticalBlock {
    /// From the fault to the line that is wanted.
    pub first_ps: u64,
    /// A reference to another line waits until that line has come. The thesis does not count this.
    pub others_wait: bool,
}

/// Pages move to local memory where they are used most, at intervals (thesis 4.6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Migration {
    /// The interval.
    pub epoch_ps: u64,
    /// What moving one page costs the program, beside the link.
    pub page_ps: u64,
    /// References in an epoch that make a page worth moving.
    pub min_references: u32,
}

/// A slower tier below the first one: flash behind a blade, a disk behind compressed memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overflow {
    /// Pages that the tier above holds, in thousandths of the footprint; what leaves it first is
    /// what came first.
    pub far_permille: u32,
    /// Where the others are.
    pub tier: Tier,
}

/// A design, completely.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Design {
    /// Its name in tables.
    pub name: String,
    /// Where its figures are from.
    pub source: String,
    /// Page or line.
    pub unit: Unit,
    /// New pages when local memory is full; pages that move always become local.
    pub placement: Placement,
    /// A reference to local memory.
    pub local_latency_ps: u64,
    /// What is not local.
    pub far: Tier,
    /// The faulting line comes first; the rest of the page follows (thesis 6.3).
    pub critical_block: Option<CriticalBlock>,
    /// Frames kept free for incoming pages; evictions go on beside the program until none is left.
    pub free_frames: u32,
    /// A page that comes back keeps its place at the far side, so an unchanged page is not written
    /// again.
    pub keeps_copies: bool,
    /// Pages fetched with one that faults, by the pager's own rule; none without.
    pub prefetch: Option<String>,
    /// Moves pages between local and far.
    pub migration: Option<Migration>,
    /// Far pages lie compressed in local memory and take `1000 / compression_permille` of their
    /// size.
    pub compression_permille: Option<u32>,
    /// Far pages with the content of another one, in thousandths: they take no room there.
    pub duplicates_permille: u32,
    /// Below the first far tier.
    pub overflow: Option<Overflow>,
}

/// A design that cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("design {design}: {reason}")]
pub struct DesignError {
    /// Its name.
    pub design: String,
    /// What is wrong with it.
    pub reason: String,
}

impl Design {
    /// Finds what no simulation could make sense of.
    ///
    /// # Errors
    /// The first such thing.
    pub fn check(&self) -> Result<(), DesignError> {
        let error = |reason: &str| {
            Err(DesignError { design: self.name.clone(), reason: reason.to_owned() })
        };
        let tiers = std::iter::once(&self.far).chain(self.overflow.as_ref().map(|it| &it.tier));
        for tier in tiers {
            if tier.link_bytes_per_s == 0 || tier.device_bytes_per_s == 0 {
                return error("a bandwidth of 0 bytes a second");
            }
            let points = &tier.loaded_latency;
            if !points.is_sorted_by(|a, b| a.utilisation_permille < b.utilisation_permille) {
                return error("loaded_latency must rise in utilisation");
            }
            if points.iter().any(|point| point.latency_permille < 1000) {
                return error("loaded_latency below the idle latency");
            }
        }
        if self.compression_permille.is_some_and(|ratio| ratio <= 1000) {
            return error("compression_permille must be above 1000, or far memory saves nothing");
        }
        if self.duplicates_permille > 1000 {
            return error("duplicates_permille is a share: at most 1000");
        }
        if self.migration.is_some_and(|migration| migration.epoch_ps == 0) {
            return error("migration.epoch_ps of 0");
        }
        if self.unit == Unit::Line && (self.critical_block.is_some() || self.prefetch.is_some()) {
            return error("critical_block and prefetch belong to pages, this design moves lines");
        }
        if self.unit == Unit::Page && self.placement == Placement::Far {
            return error(
                "placement = \"far\" belongs to lines; a page that is used becomes local",
            );
        }
        if self.unit == Unit::Page && self.migration.is_some() {
            return error("migration belongs to lines; pages come when they are used");
        }
        if let Some(name) = &self.prefetch
            && let Err(unknown) = name.parse::<farpool_policy::PrefetchKind>()
        {
            return error(&unknown.to_string());
        }
        Ok(())
    }

    /// What a fetch of one unit takes while nothing else uses link and device.
    #[must_use]
    pub fn idle_fetch_ps(&self, page_bytes: u64) -> u64 {
        let bytes = match self.unit {
            Unit::Page => page_bytes,
            Unit::Line => LINE_BYTES,
        };
        self.far.idle_fetch_ps(bytes)
    }
}

/// Bytes of a line.
pub const LINE_BYTES: u64 = 64;

impl Tier {
    /// A fetch of `bytes` while nothing else uses link and device.
    #[must_use]
    pub fn idle_fetch_ps(&self, bytes: u64) -> u64 {
        self.software_ps
            + 2 * self.link_latency_ps
            + self.request_ps
            + self.map_ps
            + self.device_ps
            + self.response_ps
            + transfer_ps(bytes, self.link_bytes_per_s)
    }

    /// The idle latency over the factor at this utilisation, between the points on a straight line.
    #[must_use]
    pub fn loaded_ps(&self, idle_ps: u64, utilisation_permille: u64) -> u64 {
        let points = &self.loaded_latency;
        let after =
            points.partition_point(|p| u64::from(p.utilisation_permille) <= utilisation_permille);
        let factor = match (after.checked_sub(1).map(|at| points[at]), points.get(after)) {
            (None, None) => return idle_ps,
            (Some(last), None) => u64::from(last.latency_permille),
            (below, Some(above)) => {
                let (x0, y0) =
                    below.map_or((0, 1000), |p| (p.utilisation_permille, p.latency_permille));
                let run = u64::from(above.utilisation_permille - x0);
                let rise = i64::from(above.latency_permille) - i64::from(y0);
                let part: i64 = exactly(utilisation_permille - u64::from(x0));
                let run: i64 = exactly(run.max(1));
                exactly(i64::from(y0) + rise * part / run)
            }
        };
        at_most(u128::from(idle_ps) * u128::from(factor) / 1000)
    }
}

/// How long `bytes` take at this rate, rounded up.
#[must_use]
pub fn transfer_ps(bytes: u64, bytes_per_s: u64) -> u64 {
    let time = (u128::from(bytes) * 1_000_000_000_000).div_ceil(u128::from(bytes_per_s.max(1)));
    at_most(time)
}
