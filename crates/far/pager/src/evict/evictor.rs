//! The evictor thread's state from chunk to chunk.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_policy::{ChunkSweep, CleanEstimator, VictimKind};
use farpool_pool::{BladeIndex, Completion, Lane, PageWrite, Refusals};

use crate::core::Core;
use crate::evict::aside::Aside;
use crate::evict::density::Density;
use crate::evict::effort::Effort;
use crate::evict::gauges::Gauges;
use crate::evict::in_place::InPlace;
use crate::evict::resident_map::ResidentMap;
use crate::evict::stubborn::Stubborn;
use crate::evict::thrash::Stall;
use crate::evict::wanted::Own;
use crate::shared::turn::Turns;
use crate::space::frames::{TRAYS, TakenTray};
use crate::space::units::{CHUNK_BYTES, CHUNK_PAGES};
use crate::sys;

/// The most trays on their way to the blades: enough to keep a network busy.
const MAX_TRAYS_IN_FLIGHT: usize = 16;
/// The same of sealed pages, which travel from further memory: 1 MiB of it, where 4 MiB were more
/// than a small program's limit could spare.
const MAX_SEALED_TRAYS_IN_FLIGHT: usize = 4;
/// A full pool is asked for memory again after this time.
pub(super) const FULL_RETRY: Duration = Duration::from_millis(500);

/// See [`crate::evict`].
#[derive(Debug)]
pub struct Evictor {
    pub(crate) core: &'static Core,
    pub(crate) lane: Lane,
    pub(super) sweep: ChunkSweep,
    pub(super) map: ResidentMap,
    pub(crate) writes: Vec<PageWrite>,
    pub(crate) done: Vec<Completion>,
    /// Pages of each tray that the blade has not acknowledged yet.
    pub(super) unacknowledged: Box<[u8]>,
    pub(super) taken: Vec<TakenTray>,
    pub(super) trays_in_flight: usize,
    pub(super) trays_in_flight_limit: usize,
    pub(super) full_until: Option<Instant>,
    pub(super) refusals: Refusals,
    /// The blade that each tray on its way was sent to.
    pub(super) sent_to: Box<[BladeIndex]>,
    /// Chunks that were passed over with the last one, because they are empty too.
    pub(super) passed_over: usize,
    /// No superpage is given memory on another blade before this time.
    pub(super) rehouse_after: Option<Instant>,
    /// When deadlines were last checked.
    pub(super) expired: Instant,
    pub(super) density: Density,
    pub(super) clean: CleanEstimator,
    pub(crate) in_place: InPlace,
    /// A chunk of local memory for copies of pages that a fork shares.
    pub(crate) copies: usize,
    pub(super) gauges: Gauges,
    pub(super) turns: Turns,
    pub(super) stall: Stall,
    pub(super) effort: Effort,
    pub(super) resident_before: u64,
    /// Pages of the chunk in hand that the kernel would not move, one bit each.
    pub(super) busy: u64,
    pub(super) own: Option<Own>,
    /// Chunks that can be moved out only while the program stands still.
    pub(super) aside: Aside,
    pub(super) stubborn: Stubborn,
    /// When this round began. Kept because reading the clock is a system call in a sidecar.
    pub(super) round_began: Instant,
    /// The end of a mapping that has to be checked before any of it is moved out.
    pub(super) unseen_tail: Option<Range<usize>>,
    /// Frames with poison in them, see [`super::locked`].
    pub(super) poisoned: Vec<usize>,
}

impl Evictor {
    pub fn new(
        core: &'static Core,
        lane: Lane,
        victims: VictimKind,
    ) -> Result<Evictor, std::io::Error> {
        let seed = u64::from(core.slot.pid.load(Relaxed));
        let copies = sys::map_local_without_children(CHUNK_BYTES)?;
        let trays_in_flight_limit =
            if core.pool.seals_pages() { MAX_SEALED_TRAYS_IN_FLIGHT } else { MAX_TRAYS_IN_FLIGHT };
        Ok(Evictor {
            core,
            lane,
            sweep: ChunkSweep::new(victims, 0, seed),
            map: ResidentMap::new(),
            writes: Vec::with_capacity(CHUNK_PAGES),
            done: Vec::with_capacity(trays_in_flight_limit * CHUNK_PAGES),
            unacknowledged: vec![0; TRAYS].into_boxed_slice(),
            taken: Vec::with_capacity(TRAYS),
            trays_in_flight: 0,
            trays_in_flight_limit,
            full_until: None,
            refusals: Refusals::default(),
            sent_to: vec![BladeIndex::default(); TRAYS].into_boxed_slice(),
            passed_over: 0,
            rehouse_after: None,
            expired: Instant::now(),
            density: Density::default(),
            clean: CleanEstimator::default(),
            in_place: InPlace::default(),
            copies,
            gauges: Gauges::new(core),
            turns: Turns::default(),
            stall: Stall::default(),
            effort: Effort::default(),
            resident_before: 0,
            busy: 0,
            own: None,
            aside: Aside::new(),
            stubborn: Stubborn::default(),
            round_began: Instant::now(),
            unseen_tail: None,
            poisoned: Vec::new(),
        })
    }
}
