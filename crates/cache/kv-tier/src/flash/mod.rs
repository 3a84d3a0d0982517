//! Flash as a medium: zones of a file or block device, written and read by direct I/O.
//!
//! What a later process needs to know is in a memory file, so that writing it waits for no disk,
//! and survives a kill at any instruction: which zones are complete, and one bit for each record
//! that must not be found again. Invariants: a record's bit is set before any client is told that
//! the item was replaced or deleted; a zone's entry in the table says `sealed` only while the
//! device has all of this use of the zone.

mod budget;
pub mod control;
mod device;
mod file;
pub mod layout;
pub mod live;
pub mod opening;
mod settings;
mod shared_map;
mod witness;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use budget::Budget;
use control::Control;
pub use device::{least_bytes, random_seed};
use farpool_disk::Ring;
use farpool_units::PAGE_BYTES;
use file::Part;
pub use file::{FlashFile, Step, Unclosed};
use layout::{Promises, SummaryEntry, TableEntry, UNIT_BYTES, ZONE_BYTES, ZONE_PAGES};
pub use settings::{Bookkeeping, FlashError, FlashSettings};
use shared_map::SharedMap;

use super::log::{Log, Medium, Zone};
use farpool_disk::Ended;
use farpool_disk::Pages;
use farpool_kv_store::index::Place;
use farpool_kv_store::record;

/// CAS numbers reserved ahead in the file: more than can be issued between two checks.
const CAS_RESERVE: u64 = 1 << 32;
/// How long closing waits for zones being written.
const CLOSE_WAIT: Duration = Duration::from_secs(10);
/// A device that does not answer a read within this time is not asked to flush its cache: the
/// kernel would have the process wait for it indefinitely, unkillable.
const PROBE_WAIT: Duration = Duration::from_secs(2);
/// The token of the read that probes the device; the log's requests count from 1.
const PROBE_TOKEN: u64 = u64::MAX;
/// Zones whose summaries are read at the same time.
const SUMMARY_READS: usize = 64;

/// One shard's zones on flash.
#[derive(Debug)]
pub struct FlashMemory {
    control: Control<SharedMap>,
    ring: Ring,
    zones_at: u64,
    geometry: layout::Geometry,
    promises: Promises,
    budget: Option<Budget>,
}

/// One shard's flash.
pub type Flash = Log<FlashMemory>;

/// An item left by an earlier process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recovered {
    pub hash: u64,
    pub place: Place,
}

/// The result of reading a shard's part of the file.
#[derive(Debug, Default, Clone, Copy)]
pub struct Findings {
    /// Items that were handed out and taken.
    pub items: u64,
    /// Items that were not taken: they are marked as forgotten, because nothing would forget them
    /// when a newer value is stored.
    pub not_taken: u64,
    pub promises: Promises,
    /// Zones whose summary is not what was written: their items are lost.
    pub damaged_zones: u64,
}

impl FlashMemory {
    /// Opens one shard's log. Hands every item in it to `take`, oldest first, which returns whether
    /// it took it.
    pub fn log(
        file: &FlashFile,
        shard: usize,
        settings: &FlashSettings,
        take: &mut dyn FnMut(Recovered) -> bool,
    ) -> Result<(Flash, Findings), FlashError> {
        let io = |source| FlashError::Io {
            path: file.path().to_owned(),
            action: "it cannot be used through io_uring",
            source,
        };
        let Part { control, direct, is_regular, zones_at, geometry, is_emptied } =
            file.part(shard)?;
        let budget = settings.write_bytes_per_s.map(Budget::new);
        let promises = control.promises().unwrap_or_default();
        let ring = Ring::new(direct, is_regular).map_err(io)?;
        let mut memory = Self { control, ring, zones_at, geometry, promises, budget };
        let mut findings = Findings { promises, ..Findings::default() };
        if is_emptied {
            findings.damaged_zones = geometry.zones_per_shard as u64;
        }
        let zones = memory.recover(&mut findings, take);
        let log = Log::new(memory, zones);
        let log = log.ok_or_else(|| FlashError::Buffers { path: file.path().to_owned() })?;
        Ok((log, findings))
    }

    /// Reads the state of each zone, and the items of the complete ones.
    fn recover(
        &mut self,
        findings: &mut Findings,
        take: &mut dyn FnMut(Recovered) -> bool,
    ) -> Vec<Zone> {
        let mut zones = vec![Zone::FREE; self.geometry.zones_per_shard];
        findings.damaged_zones += self.control.free_damaged();
        let known: Vec<(usize, TableEntry)> = (0..zones.len())
            .filter_map(|zone| self.control.table_entry(zone).map(|entry| (zone, entry)))
            .collect();
        for (zone, entry) in &known {
            zones[*zone].sequence = entry.sequence;
        }
        let mut sealed: Vec<_> = known.into_iter().filter(|(_, entry)| entry.is_sealed).collect();
        sealed.sort_unstable_by_key(|(_, entry)| entry.sequence);
        for batch in sealed.chunks(SUMMARY_READS) {
            for ((zone, entry), tail) in batch.iter().zip(self.read_tails(batch)) {
                let seal = self.seal_of(*zone, entry.sequence);
                let records = entry.records as usize;
                let summary =
                    tail.and_then(|tail| layout::read_summary(tail.bytes(), records, seal));
                let summary =
                    summary.filter(|_| self.control.are_forgets_whole(*zone, entry.sequence));
                let Some(summary) = summary else {
                    findings.damaged_zones += 1;
                    self.zone_freed(*zone);
                    continue;
                };
                zones[*zone] = Zone::sealed(entry.sequence, entry.used_bytes as usize);
                for it in summary {
                    let offset = it.unit as usize * UNIT_BYTES;
                    let place = Flash::place_of(*zone, offset, it.bytes as usize);
                    let Some(place) = place.filter(|_| !self.control.is_forgotten(*zone, it.unit))
                    else {
                        continue;
                    };
                    if take(Recovered { hash: it.hash, place }) {
                        findings.items += 1;
                    } else {
                        findings.not_taken += 1;
                        self.forget(*zone, offset);
                    }
                }
            }
        }
        zones
    }

    /// Reads the ends of zones, as long as their summaries. None where the device failed.
    fn read_tails(&mut self, zones: &[(usize, TableEntry)]) -> Vec<Option<Pages>> {
        let mut tails: Vec<Option<Pages>> = zones.iter().map(|_| None).collect();
        let mut left = 0;
        for (token, (zone, entry)) in (0..).zip(zones) {
            let pages = layout::summary_bytes(entry.records as usize).div_ceil(PAGE_BYTES);
            if let Some(memory) = Pages::new(pages) {
                self.start_read(memory, (*zone, ZONE_PAGES - pages), pages, token);
                left += 1;
            }
        }
        let mut ended = Vec::new();
        while left > 0 {
            self.ring.poll(&mut ended);
            for Ended { token, pages, is_ok } in ended.drain(..) {
                left -= 1;
                if let Some(tail) = usize::try_from(token).ok().and_then(|at| tails.get_mut(at)) {
                    *tail = is_ok.then_some(pages);
                }
            }
            if left > 0 {
                self.ring.wait(Duration::from_millis(100));
            }
        }
        tails
    }

    /// The descriptor to wait for while requests are under way.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.ring.bell()
    }

    /// The age of the oldest request under way.
    pub fn oldest(&mut self, now: Instant) -> Duration {
        self.ring.oldest(now)
    }

    /// Records what a later process must know; CAS numbers are reserved ahead. Cheap if nothing has
    /// changed.
    pub fn promise(&mut self, last_cas: u64, (flushed_cas, flush_at_s): (u64, u32), now_s: u32) {
        let has = self.promises;
        let needs_numbers = last_cas + CAS_RESERVE / 2 > has.last_cas;
        let promises = Promises {
            last_cas: if needs_numbers { last_cas + CAS_RESERVE } else { has.last_cas },
            flushed_cas,
            flush_at_s,
            now_s,
            generation: has.generation,
        };
        if promises != has {
            self.promises = Promises { generation: has.generation.wrapping_add(1), ..promises };
            self.control.write_promises(&self.promises);
        }
    }
}

/// Writes the log's open zone and waits for it, but not for a device that hangs. True if the device
/// has answered all requests: then the bookkeeping says which zones were written.
pub fn close(flash: &mut Flash, judge: &mut dyn super::log::Judge) -> bool {
    let lost = flash.counts().zones_lost;
    flash.close();
    let start = Instant::now();
    while flash.is_writing() && start.elapsed() < CLOSE_WAIT {
        flash.medium().wait(Duration::from_millis(10));
        flash.poll(None, judge);
    }
    let zones_lost = flash.counts().zones_lost - lost;
    if zones_lost > 0 {
        tracing::error!(zones_lost, "not all that was to be kept on flash arrived there");
    }
    !flash.is_writing() && flash.medium_mut().answers()
}

impl FlashMemory {
    /// Whether the device answers at all, with success or failure.
    fn answers(&mut self) -> bool {
        let Some(pages) = Pages::new(1) else { return false };
        self.start_read(pages, (0, 0), 1, PROBE_TOKEN);
        let (start, mut ended) = (Instant::now(), Vec::new());
        while start.elapsed() < PROBE_WAIT {
            self.ring.poll(&mut ended);
            if ended.drain(..).any(|it| it.token == PROBE_TOKEN) {
                return true;
            }
            self.ring.wait(Duration::from_millis(10));
        }
        false
    }
}

impl Medium for FlashMemory {
    const ZONE_PAGES: usize = ZONE_PAGES;
    const ALIGN_BYTES: usize = UNIT_BYTES;
    /// memcached's largest item by default, plus the record's overhead.
    const RECORD_BYTES_MAX: usize = (1 << 20) + (4 << 10);
    const TAIL_BYTES: usize = layout::FOOTER_BYTES;
    const TAIL_RECORD_BYTES: usize = layout::SUMMARY_ENTRY_BYTES;

    fn zones(&self) -> usize {
        self.geometry.zones_per_shard
    }

    fn start_read(&mut self, pages: Pages, at: (usize, usize), count: usize, token: u64) {
        let offset = self.zones_at + (at.0 * ZONE_BYTES + at.1 * PAGE_BYTES) as u64;
        self.ring.read(pages, offset, count, token);
    }

    fn start_write(&mut self, pages: Pages, zone: usize, token: u64) {
        let count = pages.count();
        self.ring.write(pages, self.zones_at + (zone * ZONE_BYTES) as u64, count, token);
    }

    fn written(&self, token: u64) -> Option<&[u8]> {
        self.ring.lent(token)
    }

    fn poll(&mut self, _now: Option<Instant>, ended: &mut Vec<Ended>) {
        self.ring.poll(ended);
    }

    fn wait(&self, limit: Duration) {
        self.ring.wait(limit);
    }

    fn admits(&mut self, bytes: usize) -> bool {
        self.budget.as_mut().is_none_or(|budget| budget.take(bytes, Instant::now()))
    }

    fn seal_of(&self, zone: usize, sequence: u32) -> u32 {
        self.control.seal_of(zone, sequence)
    }

    fn zone_opens(&mut self, zone: usize, sequence: u32) {
        self.control.open_zone(zone, sequence);
    }

    fn zone_closes(&mut self, zone: usize, used_bytes: usize, bytes: &mut [u8]) {
        let Some(entry) = self.control.table_entry(zone) else { return };
        let mut summary = Vec::new();
        let mut offset = 0;
        while offset < used_bytes {
            let Some(found) = record::read_unchecked(&bytes[offset..]) else { break };
            summary.push(SummaryEntry {
                hash: found.hash,
                unit: u32::try_from(offset / UNIT_BYTES).expect("a zone is short"),
                bytes: u32::try_from(found.bytes.len()).expect("a record is short"),
            });
            offset += found.bytes.len().next_multiple_of(UNIT_BYTES);
        }
        layout::write_summary(bytes, &summary, self.seal_of(zone, entry.sequence));
        let used_bytes = u32::try_from(used_bytes).expect("a zone is short");
        let records = u32::try_from(summary.len()).expect("a zone has few records");
        self.control.write_table(zone, TableEntry { used_bytes, records, ..entry });
    }

    fn zone_sealed(&mut self, zone: usize) {
        if let Some(entry) = self.control.table_entry(zone) {
            self.control.write_table(zone, TableEntry { is_sealed: true, ..entry });
        }
    }

    fn zone_freed(&mut self, zone: usize) {
        // Its sequence number stays: it must not be reused.
        let sequence = self.control.table_entry(zone).map_or(0, |entry| entry.sequence);
        self.control.write_table(zone, TableEntry::free(sequence));
    }

    fn forget(&mut self, zone: usize, offset: usize) {
        self.control.forget(zone, offset / UNIT_BYTES);
    }
}
