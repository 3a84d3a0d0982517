//! What a blade counts, as it is told.

use super::{Blade, BladeStat, Visible, millis};
use crate::memory::{FlashStat, PackStat};
use crate::table::{ClientView, GrantId};
use farpool_units::{SUPERPAGE_BYTES, at_most};
use farpool_wire::{BladeTotals, ClientUsage};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

impl Blade {
    /// All counters. `now` is the time since the blade started.
    pub fn stat(&self, now: Duration) -> BladeStat {
        self.stat_page(Visible::All, 0, usize::MAX, now)
    }

    /// Totals, and at most `limit` of the visible clients after the first `skip`.
    pub(crate) fn stat_page(
        &self,
        visible: Visible,
        skip: usize,
        limit: usize,
        now: Duration,
    ) -> BladeStat {
        let table = self.read();
        let sizes = table.sizes();
        let is_visible = |grant: Option<GrantId>| match visible {
            Visible::All => true,
            Visible::Of(id) => grant == Some(id),
            Visible::None => false,
        };
        let clients = table.clients(0, now).filter(|view| is_visible(view.grant));
        let clients = clients.skip(skip).take(limit).map(|view| usage_of(&view)).collect();
        drop(table);
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed).into();
        let flash = self.flash_stat();
        let of_flash = |what: fn(&FlashStat) -> u64| flash.as_ref().map_or(0, what).into();
        let pack = self.pack_stat();
        let of_pack = |what: fn(&PackStat) -> u64| pack.as_ref().map_or(0, what).into();
        let totals = BladeTotals {
            blade_id: self.id.into(),
            capacity_bytes: self.capacity_bytes().into(),
            used_bytes: (u64::from(sizes.used_superpages) * SUPERPAGE_BYTES).into(),
            uptime_ms: millis(now).into(),
            pages_read: count(&self.counters.pages_read),
            pages_written: count(&self.counters.pages_written),
            requests: count(&self.counters.requests),
            requests_refused: count(&self.counters.requests_refused),
            bad_frames: count(&self.counters.bad_frames),
            leases_expired: sizes.leases_expired.into(),
            superpages_scrubbed: count(&self.counters.superpages_scrubbed),
            control_throttled_ns: count(&self.counters.control_throttled_ns),
            flash_bytes: flash.map_or(0, |_| self.capacity_bytes()).into(),
            flash_memory_used_bytes: of_flash(|flash| flash.memory_used_bytes),
            flash_pages_fetched: of_flash(|flash| flash.pages_fetched),
            flash_pages_written: of_flash(|flash| flash.pages_written),
            flash_pages_failed: of_flash(|flash| flash.pages_failed),
            flash_writes_failed: of_flash(|flash| flash.writes_failed),
            pack_memory_bytes: of_pack(|pack| pack.memory_bytes),
            pack_memory_used_bytes: of_pack(|pack| pack.memory_used_bytes),
            pack_frames_bytes: of_pack(|pack| pack.frames_bytes),
            pack_pages_filled: of_pack(|pack| pack.pages_filled),
            pack_pages_in_frames: of_pack(|pack| pack.pages_in_frames),
            pack_frames: of_pack(|pack| pack.frames),
            pack_zero_pages_found: of_pack(|pack| pack.zero_pages_found),
            pack_pages_packed: of_pack(|pack| pack.pages_packed),
            pack_pages_unpacked: of_pack(|pack| pack.pages_unpacked),
            pack_pages_failed: of_pack(|pack| pack.pages_failed),
            clients: at_most::<u32, _>(sizes.clients).into(),
            connections: at_most::<u32, _>(self.sources.count()).into(),
            segments: at_most::<u32, _>(sizes.segments).into(),
            superpages_held: self.scrubs.held_superpages.load(Ordering::Relaxed).into(),
        };
        BladeStat { totals, clients }
    }
}

fn usage_of(view: &ClientView) -> ClientUsage {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed).into();
    let lease_left_ms = view.lease_left.map_or(0, |left| millis(left).max(1));
    let mut usage = ClientUsage {
        number: view.number.0.into(),
        quota_bytes: (u64::from(view.quota_superpages) * SUPERPAGE_BYTES).into(),
        used_bytes: (u64::from(view.used_superpages) * SUPERPAGE_BYTES).into(),
        pages_read: count(&view.counters.pages_read),
        pages_written: count(&view.counters.pages_written),
        pid: view.pid.into(),
        connections: view.connections.into(),
        segments: view.segments.into(),
        lease_left_ms: at_most::<u32, _>(lease_left_ms).into(),
        ..Default::default()
    };
    usage.set_name(&view.name);
    usage
}
