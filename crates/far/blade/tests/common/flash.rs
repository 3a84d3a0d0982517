//! A blade with flash below it, filled with more than its memory holds.

use super::*;
use farpool_blade::{BladeConfig, FlashConfig, FlashStat};
use std::path::PathBuf;

/// The least memory above flash: 128 MiB, in superpages.
pub(crate) const MEMORY: u64 = 8;
/// What the blade lends, in superpages: three times as much.
pub(crate) const LENT: u32 = 24;
/// Pages of a request.
pub(crate) const BATCH: u32 = 256;
/// Requests that fill all that is lent.
pub(crate) const BATCHES: u32 = LENT * 4096 / BATCH;
/// Where superpages begin on flash.
pub(crate) const DATA_AT: u64 = 1 << 20;

/// A folder on a disk; the usual one for files that live briefly may be memory.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn flash_config(path: PathBuf) -> BladeConfig {
    let bytes = u64::from(LENT) * SUPERPAGE_BYTES;
    let flash = Some(FlashConfig { path, bytes, write_bytes_per_s: None });
    BladeConfig { flash, ..config_of(MEMORY) }
}

impl TestBlade {
    pub(crate) fn flash(&self) -> FlashStat {
        self.serving.blade().flash_stat().unwrap()
    }

    /// Waits until nothing is on its way to flash or from there.
    pub(crate) fn wait_until_quiet(&self) {
        let mut before = self.flash();
        wait_until("flash is quiet", || {
            std::thread::sleep(Duration::from_millis(20));
            let now = self.flash();
            std::mem::replace(&mut before, now) == now
        });
    }
}

/// What a batch of pages holds when it was written for the `round`-th time.
pub(crate) fn content(batch: u32, round: u64) -> Vec<u8> {
    pages(u64::from(batch) * 1000 + round, BATCH as usize)
}

impl Peer {
    pub(crate) fn write_batch(&mut self, segment: SegmentId, batch: u32, round: u64) {
        self.write(segment, batch * BATCH, &content(batch, round)).done();
    }

    /// Returns whether the blade has a batch; if so, it is the right one.
    #[track_caller]
    pub(crate) fn has_batch(&mut self, segment: SegmentId, batch: u32, round: u64) -> bool {
        let found = self.read(segment, batch * BATCH, BATCH);
        match found.refused() {
            Some(code) => assert_eq!(code, ErrorCode::Backing, "batch {batch}"),
            None => assert!(found.pages == content(batch, round), "batch {batch} is not right"),
        }
        found.refused().is_none()
    }

    #[track_caller]
    pub(crate) fn check_batch(&mut self, segment: SegmentId, batch: u32, round: u64) {
        assert!(self.has_batch(segment, batch, round), "batch {batch} is refused");
    }
}
