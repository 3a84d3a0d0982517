//! One direction of a link, or a device: a queue that also measures its utilisation.

use crate::design::{LINE_BYTES, Tier, transfer_ps};

/// Utilisation is that of the last whole window: long against a page's transfer, short against a
/// phase of a program.
const WINDOW_PS: u64 = 100_000_000;

/// A queue with one server.
#[derive(Debug, Clone, Default)]
pub(super) struct Channel {
    free_ps: u64,
    /// When the last urgent transfer has passed.
    urgent_ps: u64,
    window_start_ps: u64,
    busy_ps: u64,
    utilisation_permille: u64,
}

impl Channel {
    /// Queues something of `duration_ps` at `now_ps`. Returns when it has passed.
    pub(super) fn pass(&mut self, now_ps: u64, duration_ps: u64) -> u64 {
        self.roll(now_ps);
        self.busy_ps += duration_ps;
        self.free_ps = self.free_ps.max(now_ps).saturating_add(duration_ps);
        self.free_ps
    }

    /// The same for something that overtakes everything queued, as demand fetches do; the others
    /// wait longer.
    pub(super) fn pass_first(&mut self, now_ps: u64, duration_ps: u64) -> u64 {
        self.pass(now_ps, duration_ps);
        self.urgent_ps = self.urgent_ps.max(now_ps).saturating_add(duration_ps);
        self.urgent_ps
    }

    /// Returns the share of the last whole window in which the channel was busy, in thousandths.
    pub(super) fn utilisation_permille(&mut self, now_ps: u64) -> u64 {
        self.roll(now_ps);
        self.utilisation_permille
    }

    fn roll(&mut self, now_ps: u64) {
        let elapsed_ps = now_ps.saturating_sub(self.window_start_ps);
        if elapsed_ps < WINDOW_PS {
            return;
        }
        // Work queued in a window may exceed it: the rest counts in the next ones.
        let windows = elapsed_ps / WINDOW_PS;
        let in_last_ps = self.busy_ps.saturating_sub((windows - 1) * WINDOW_PS).min(WINDOW_PS);
        self.utilisation_permille = in_last_ps * 1000 / WINDOW_PS;
        self.busy_ps = self.busy_ps.saturating_sub(windows * WINDOW_PS);
        self.window_start_ps += windows * WINDOW_PS;
    }
}

/// A link between one program's host and a far tier.
#[derive(Debug, Clone, Default)]
pub(super) struct Link {
    towards_far: Channel,
    towards_local: Channel,
}

impl Link {
    /// Fetches `bytes` that the program asks for at `now_ps`. Returns when the last one has
    /// arrived; the software's time is included.
    pub(super) fn fetch(
        &mut self,
        tier: &Tier,
        device: &mut Channel,
        now_ps: u64,
        bytes: u64,
    ) -> u64 {
        let (sent_ps, link_latency_ps) = self.ask(tier, device, now_ps, bytes);
        self.towards_local.pass(sent_ps, link_ps(tier, bytes)) + link_latency_ps
    }

    /// The same, with the first line ahead of everything queued on the link. Returns when that line
    /// and when the last one has arrived.
    pub(super) fn fetch_line_first(
        &mut self,
        tier: &Tier,
        device: &mut Channel,
        now_ps: u64,
        bytes: u64,
    ) -> (u64, u64) {
        let (sent_ps, link_latency_ps) = self.ask(tier, device, now_ps, bytes);
        let line_bytes = LINE_BYTES.min(bytes);
        let first_ps = self.towards_local.pass_first(sent_ps, link_ps(tier, line_bytes));
        let rest_ps = link_ps(tier, bytes - line_bytes);
        let last_ps = self.towards_local.pass(first_ps, rest_ps);
        (first_ps + link_latency_ps, last_ps + link_latency_ps)
    }

    /// Takes a fetch up to the response. Returns when the response enters the link, and the link's
    /// latency at its load.
    fn ask(&mut self, tier: &Tier, device: &mut Channel, now_ps: u64, bytes: u64) -> (u64, u64) {
        let utilisation = self.towards_local.utilisation_permille(now_ps);
        let link_latency_ps = tier.loaded_ps(tier.link_latency_ps, utilisation);
        let asked_ps = now_ps + tier.software_ps + link_latency_ps + tier.request_ps + tier.map_ps;
        let transfer = transfer_ps(bytes, tier.device_bytes_per_s);
        let answered_ps = if tier.is_serial {
            device.pass_first(asked_ps, tier.device_ps + transfer)
        } else {
            // The device's own transfer overlaps the link's; only its excess over the link's time
            // waits.
            device.pass_first(asked_ps, transfer) - transfer + tier.device_ps
        };
        (answered_ps + tier.response_ps, link_latency_ps)
    }

    /// Sends `bytes` to the far side from `now_ps` on. Returns when the local frame is free again.
    pub(super) fn send(
        &mut self,
        tier: &Tier,
        device: &mut Channel,
        now_ps: u64,
        bytes: u64,
    ) -> u64 {
        let sent_ps = self.towards_far.pass(now_ps, transfer_ps(bytes, tier.link_bytes_per_s));
        device.pass(now_ps, transfer_ps(bytes, tier.device_bytes_per_s)).max(sent_ps)
    }
}

/// Returns the time of `bytes` on the link; 0 for a serial device, whose own time includes it.
fn link_ps(tier: &Tier, bytes: u64) -> u64 {
    if tier.is_serial { 0 } else { transfer_ps(bytes, tier.link_bytes_per_s) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_pass_one_after_the_other() {
        let mut channel = Channel::default();
        assert_eq!(channel.pass(100, 10), 110);
        assert_eq!(channel.pass(105, 10), 120);
        assert_eq!(channel.pass(500, 10), 510);
        assert_eq!(channel.pass(500, 100), 610);
        assert_eq!(channel.pass_first(520, 10), 530);
        assert_eq!(channel.pass(520, 10), 630);
    }

    #[test]
    fn utilisation_is_that_of_the_last_whole_window() {
        let mut channel = Channel::default();
        channel.pass(0, WINDOW_PS / 4);
        assert_eq!(channel.utilisation_permille(WINDOW_PS - 1), 0);
        assert_eq!(channel.utilisation_permille(WINDOW_PS), 250);
        assert_eq!(channel.utilisation_permille(3 * WINDOW_PS), 0);
        channel.pass(3 * WINDOW_PS, 3 * WINDOW_PS);
        assert_eq!(channel.utilisation_permille(4 * WINDOW_PS), 1000);
        assert_eq!(channel.utilisation_permille(6 * WINDOW_PS), 1000);
        assert_eq!(channel.utilisation_permille(7 * WINDOW_PS), 0);
    }
}
