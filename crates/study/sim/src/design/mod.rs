//! Designs of far memory: where a page is when it is not local, and what its use costs there.
//!
//! Every figure is a parameter; the presets name their sources. Latencies are picoseconds, so that
//! nothing is rounded differently on two machines.

mod preset;

pub use preset::Preset;

use farpool_units::{at_most, exactly};
use serde::{Deserialize, Serialize};

/// What is transferred when the program uses memory that is not local.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// A page, which is local afterwards: page swapping.
    Page,
    /// A line of 64 bytes; the page stays where it is: fine-grained access.
    Line,
}

/// Where a page goes at its first touch when local memory is full, with [`Unit::Line`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// To the far tier for good, as hardware and an unchanged system do (thesis 3.3.2).
    Far,
    /// Into local memory, from which another page is evicted (thesis 4.1.2); software has to move
    /// that one.
    Local,
}

/// Memory or storage that holds pages that are not local, and the path to it. A fetch takes
///
/// `software + link + request + map + device + response + link + bytes / bandwidth`
///
/// and waits where the link or the device is busy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// The client's software per fault: trap, page tables, request.
    pub software_ps: u64,
    /// One way over the link.
    pub link_latency_ps: u64,
    /// Each direction of the link.
    pub link_bytes_per_s: u64,
    /// The far side's time to decode the request.
    pub request_ps: u64,
    /// Its time to look up the address.
    pub map_ps: u64,
    /// Its memory's latency.
    pub device_ps: u64,
    /// Its memory's bandwidth, which all clients share.
    pub device_bytes_per_s: u64,
    /// The device serves one request at a time, like a disk's arm.
    pub is_serial: bool,
    /// The far side's time to build the response.
    pub response_ps: u64,
    /// Latency by utilisation of the link; empty if it is constant.
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
    /// From the fault until the faulting line has arrived.
    pub first_ps: u64,
    /// A reference to another line waits until that line has arrived. The thesis does not count
    /// this.
    pub others_wait: bool,
}

/// Moves the most used pages to local memory at intervals (thesis 4.6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Migration {
    /// The interval.
    pub epoch_ps: u64,
    /// The program's cost of moving one page, beside the link.
    pub page_ps: u64,
    /// References in an epoch that make a page worth moving.
    pub min_references: u32,
}

/// A slower tier below the first one: flash behind a blade, a disk behind compressed memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Overflow {
    /// Capacity of the tier above, in thousandths of the footprint; its oldest pages leave it
    /// first.
    pub far_permille: u32,
    /// The tier that holds the other pages.
    pub tier: Tier,
}

/// A complete design.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Design {
    /// Its name in tables.
    pub name: String,
    /// Where its figures are from.
    pub source: String,
    /// Page or line.
    pub unit: Unit,
    /// New pages when local memory is full; a design that moves pages always makes them local.
    pub placement: Placement,
    /// Local memory holds everything at any size; the far tier is never used.
    #[serde(default)]
    pub is_all_local: bool,
    /// Latency of a reference to local memory.
    pub local_latency_ps: u64,
    /// The tier of pages that are not local.
    pub far: Tier,
    /// The faulting line arrives first, then the rest of the page (thesis 6.3).
    pub critical_block: Option<CriticalBlock>,
    /// Frames kept free for incoming pages; eviction runs beside the program until none is left.
    pub free_frames: u32,
    /// A fetched page keeps its copy at the far side, so it is not written again if unchanged.
    pub keeps_copies: bool,
    /// The pager's prefetch policy by name; none without.
    pub prefetch: Option<String>,
    /// Migration of pages between local and far.
    pub migration: Option<Migration>,
    /// Far pages lie compressed in local memory and take `1000 / compression_permille` of their
    /// size.
    pub compression_permille: Option<u32>,
    /// Far pages that duplicate another one's content, in thousandths: they take no memory there.
    pub duplicates_permille: u32,
    /// The tier below the far one.
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
    /// Rejects a design that no simulation could make sense of.
    ///
    /// # Errors
    /// The first fault found.
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
                return error("loaded_latency must rise with utilisation");
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
            return error("critical_block and prefetch apply to pages; this design moves lines");
        }
        if self.unit == Unit::Page && self.placement == Placement::Far {
            return error(
                "placement = \"far\" applies to lines; a page that is used becomes local",
            );
        }
        if self.unit == Unit::Page && self.migration.is_some() {
            return error("migration applies to lines; used pages become local anyway");
        }
        if let Some(name) = &self.prefetch
            && let Err(unknown) = name.parse::<farpool_policy::PrefetchKind>()
        {
            return error(&unknown.to_string());
        }
        Ok(())
    }

    /// Returns the time to fetch one unit while link and device are otherwise idle.
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
    /// Returns the time to fetch `bytes` while link and device are otherwise idle.
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

    /// Returns the idle latency times the factor at this utilisation, interpolated linearly.
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

/// Returns the time that `bytes` take at this rate, rounded up.
#[must_use]
pub fn transfer_ps(bytes: u64, bytes_per_s: u64) -> u64 {
    let time = (u128::from(bytes) * 1_000_000_000_000).div_ceil(u128::from(bytes_per_s.max(1)));
    at_most(time)
}
