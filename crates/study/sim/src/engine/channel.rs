//! One direction of a link, or a device: things pass one after the other, and it remembers how busy
//! it was.

use crate::design::{LINE_BYTES, Tier, transfer_ps};

/// Utilisation is that of the last whole window: long against a page, short against a phase.
const WINDOW_PS: u64 = 100_000_000;

/// A queue with one server.
#[derive(Debug, Clone, Default)]
pub(super) struct Channel {
    free_ps: u64,
    /// When what goes first has passed.
    urgent_ps: u64,
    window_start_ps: u64,
    busy_ps: u64,
    utilisation_permille: u64,
}

impl Channel {
    /// Something that takes `duration_ps` comes at `now_ps`; when it has passed.
    pub fn pass(&mut self, now_ps: u64, duration_ps: u64) -> u64 {
        self.roll(now_ps);
        self.busy_ps += duration_ps;
        self.free_ps = self.free_ps.max(now_ps).saturating_add(duration_ps);
        self.free_ps
    }

    /// The same for something that goes before all that waits, as demand fetches do; the others
    /// wait longer.
    pub fn pass_first(&mut self, now_ps: u64, duration_ps: u64) -> u64 {
        self.pass(now_ps, duration_ps);
        self.urgent_ps = self.urgent_ps.max(now_ps).saturating_add(duration_ps);
        self.urgent_ps
    }

    /// Share of the last whole window in which it was busy, in thousandths.
    pub fn utilisation_permille(&mut self, now_ps: u64) -> u64 {
        self.roll(now_ps);
        self.utilisation_permille
    }

    fn roll(&mut self, now_ps: u64) {
        let elapsed_ps = now_ps.saturating_sub(self.window_start_ps);
        if elapsed_ps < WINDOW_PS {
            return;
        }
        // What was asked for in a window may take longer than it: the rest goes on in the next
        // ones.
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
    /// A fetch of `bytes` that the program asks for at `now_ps`: when the last one is there. The
    /// software's time is included.
    pub fn fetch(&mut self, tier: &Tier, device: &mut Channel, now_ps: u64, bytes: u64) -> u64 {
        let (sent_ps, link_latency_ps) = self.ask(tier, device, now_ps, bytes);
        self.towards_local.pass(sent_ps, link_ps(tier, bytes)) + link_latency_ps
    }

    /// The same with its first line before all that waits on the link: when that line and when the
    /// last one is there.
    pub fn fetch_line_first(
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

    /// Up to where the answer goes on the link: when, and the link's latency at its load.
    fn ask(&mut self, tier: &Tier, device: &mut Channel, now_ps: u64, bytes: u64) -> (u64, u64) {
        let utilisation = self.towards_local.utilisation_permille(now_ps);
        let link_latency_ps = tier.loaded_ps(tier.link_latency_ps, utilisation);
        let asked_ps = now_ps + tier.software_ps + link_latency_ps + tier.request_ps + tier.map_ps;
        let transfer = transfer_ps(bytes, tier.device_bytes_per_s);
        let answered_ps = if tier.is_serial {
            device.pass_first(asked_ps, tier.device_ps + transfer)
        } else {
            // The device's own transfer goes on beside the link's; only what it cannot keep up with
            // waits.
            device.pass_first(asked_ps, transfer) - transfer + tier.device_ps
        };
        (answered_ps + tier.response_ps, link_latency_ps)
    }

    /// `bytes` go to the far side from `now_ps` on; when the local frame is free again.
    pub fn send(&mut self, tier: &Tier, device: &mut Channel, now_ps: u64, bytes: u64) -> u64 {
        let sent_ps = self.towards_far.pass(now_ps, transfer_ps(bytes, tier.link_bytes_per_s));
        device.pass(now_ps, transfer_ps(bytes, tier.device_bytes_per_s)).max(sent_ps)
    }
}

/// How long `bytes` take on the link; a serial device's own time includes it.
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
