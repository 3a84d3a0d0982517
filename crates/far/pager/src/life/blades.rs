//! The blades of this process: a thread of its own follows the board's table
//! ([`farpool_board::BladeTable`]), connects to new blades and moves everything away from blades
//! that have to be left.
//!
//! This process's progress is noted on its slot of the board, one bit for each blade; the keeper
//! waits for it before it drops a blade.

use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use farpool_board::{
    BLADE_ENTRIES, BladeDomain, BladeRole, BladeSettings, Blades, Board, CONNECTING, COPY_PARTS,
    Counter, GROUPS_CROWDED, Sealing,
};
use farpool_pool::{
    BladeIndex, BladeSpec, ClientLimits, CopyDesk, DamageOutcome, Errand, FailureDomain,
    FrozenToken, Grant, GrantKey, MAX_BLADES, Mover, Pool, PoolConfig, PoolError, Step, Verified,
};

use crate::abort::fail_closed;
use crate::core::Core;
use crate::error::StartError;
use crate::life::identity::client_id;
use crate::life::process::Pager;
use crate::life::verification::{Verification, pages_of, tell};
use crate::sys;

/// The time before a retry with a blade that could not be connected, or of a move that found no
/// free memory.
const RETRY: Duration = Duration::from_millis(500);
/// A process younger than this copies no frozen memory that it shares, and verifies nothing: most
/// children end soon, and their copy with them.
const GROWN_UP: Duration = Duration::from_secs(2);
/// How often a process with copies looks for a loss.
const COPIES_STEP: Duration = Duration::from_millis(200);
/// How often a blade that has to be left is retried while a child may still attach what was frozen
/// there.
const CHILD_STEP: Duration = Duration::from_millis(20);

const _: () = assert!(BLADE_ENTRIES == MAX_BLADES && COPY_PARTS == farpool_pool::COPY_PARTS);

/// Connects to the blades that the board names, including those to be left, because a parent's
/// layers may lie there. A blade that cannot be used is left out, and tried again later: nothing of
/// this process is there.
pub fn connect(core: &Core) -> Result<(Pool, Blades), StartError> {
    connect_to_all(core, &[]).map(|(pool, blades, _)| (pool, blades))
}

/// As [`connect`], and attaches the layers of a parent, which has met the blades that they are on.
/// If a blade is missed, the error says why it cannot be used.
pub fn connect_inherited(
    core: &Core,
    layers: &[FrozenToken],
    attach: impl FnOnce(&Pool) -> Result<(), StartError>,
) -> Result<(Pool, Blades), StartError> {
    let (pool, blades, unreached) = connect_to_all(core, layers)?;
    match (attach(&pool), unreached) {
        (Ok(()), _) => Ok((pool, blades)),
        (Err(StartError::Pool(PoolError::NoSuchBlade(_))), Some(reason)) => Err(reason),
        (Err(error), _) => Err(error),
    }
}

/// Returns also why the last blade of a parent's layers that cannot be used cannot.
fn connect_to_all(
    core: &Core,
    inherited: &[FrozenToken],
) -> Result<(Pool, Blades, Option<StartError>), StartError> {
    // From here on the keeper knows that this process may use the table it now reads.
    core.slot.blades_version.store(CONNECTING, SeqCst);
    let mut blades = core.board.header().blades.load();
    let settings = &core.settings;
    let pool = Pool::new(PoolConfig {
        blades: Vec::new(),
        client: client_id()?,
        client_name: format!("{}:{}", core.slot.name(), core.slot.pid.load(Relaxed)),
        quota_bytes: settings.quota_bytes,
        sharing_group: settings.sharing_group,
        deadline: Duration::from_millis(settings.deadline_ms),
        allow_remote_tcp: settings.allow_remote_tcp,
        redundancy: settings.redundancy,
        seals_pages: settings.sealing == Sealing::Sealed,
        secures_tcp: settings.secures_tcp,
        asks: sys::dialer(),
        time: farpool_pool::Time::KERNEL,
    });
    let mut unreached = None;
    for (at, entry) in (0_u8..).zip(&mut blades.entries) {
        let Some(blade) = entry else { continue };
        let is_met = inherited.iter().any(|layer| layer.is_on(BladeIndex(at)));
        if let Err(error) = add(core, &pool, BladeIndex(at), blade, is_met) {
            core.report_blade(BladeIndex(at), &format!("a blade cannot be used: {error}"));
            *entry = None;
            unreached = Some(error).filter(|_| is_met).or(unreached);
        }
    }
    Ok((pool, blades, unreached))
}

fn add(
    core: &Core,
    pool: &Pool,
    at: BladeIndex,
    blade: &BladeSettings,
    is_met: bool,
) -> Result<(), StartError> {
    let address = blade.address.parse();
    let address = address
        .map_err(|error: farpool_pool::AddressError| StartError::Address(error.to_string()))?;
    let meters = core.board.header().blades.meters(usize::from(at.0));
    let meters = meters.filter(|_| blade.is_limited);
    let spec = BladeSpec {
        address,
        domain: match blade.domain {
            BladeDomain::Named(number) => Some(FailureDomain::Named(number.get())),
            BladeDomain::Host | BladeDomain::Run => None,
        },
        is_of_client: blade.domain == BladeDomain::Run,
        grant: blade.grant.map(|(key, epoch)| Grant { key: GrantKey(key), epoch }),
        limits: meters.map(|meters| Arc::new(ClientLimits::shared(meters))),
        is_met,
    };
    pool.add_blade_at(at, &spec)?;
    pool.set_leaving(at, blade.role == BladeRole::Leaving);
    Ok(())
}

/// Follows the table; see the module's description.
#[derive(Debug)]
pub struct Follower {
    pager: &'static Pager,
    core: &'static Core,
    /// The table as this process knows it.
    known: Blades,
    born: Instant,
    /// Made when something has to be moved for the first time.
    mover: OnceLock<Mover<'static>>,
    /// The generation of each entry that this process was connected to, or has tried to be.
    tried: [u32; BLADE_ENTRIES],
    /// Entries that are not tried again before this time.
    later: [Option<Instant>; BLADE_ENTRIES],
    /// The last error of each entry, so that it is reported once.
    said: [Option<String>; BLADE_ENTRIES],
    stuck: u32,
    /// Groups with parity find no room where they would be apart.
    is_crowded: bool,
    /// The last step made a copy, and there may be more to be made.
    makes_copies: bool,
    /// Copies are not made again before this time.
    copies_later: Option<Instant>,
    /// It was said that they cannot be made; once until they are.
    copies_said: bool,
    /// None: what is far is never verified, or not sealed.
    verification: Option<Verification>,
}

impl Follower {
    /// Makes the follower, after waiting for the pool.
    pub fn new(pager: &'static Pager, core: &'static Core) -> Self {
        core.pool.wait();
        let known = core.pool.first_blades();
        let every = Duration::from_millis(core.settings.verify_every_ms);
        let born = Instant::now();
        let verifies = !every.is_zero() && core.settings.sealing == Sealing::Sealed;
        Follower {
            pager,
            core,
            known,
            born,
            mover: OnceLock::new(),
            tried: [0; BLADE_ENTRIES],
            later: [None; BLADE_ENTRIES],
            said: [const { None }; BLADE_ENTRIES],
            stuck: 0,
            is_crowded: false,
            makes_copies: false,
            copies_later: None,
            copies_said: false,
            verification: verifies.then(|| Verification::new(every, born + GROWN_UP)),
        }
    }

    /// Follows the table until the process ends.
    pub fn run(mut self) -> ! {
        let table = &self.core.board.header().blades;
        loop {
            let wanted = table.load();
            self.take_in(&wanted);
            let soon = self.move_away().into_iter().chain(self.complete_copies()).min();
            let verified = if soon == Some(Duration::ZERO) { None } else { self.verify() };
            let soon = soon.into_iter().chain(verified).min();
            self.publish(wanted.version);
            if soon != Some(Duration::ZERO) {
                table.wait(wanted.version, soon);
            }
        }
    }

    /// Connects to new blades, and marks those to be left.
    fn take_in(&mut self, wanted: &Blades) {
        for at in 0..BLADE_ENTRIES {
            let index = entry_index(at);
            match (&self.known.entries[at], &wanted.entries[at]) {
                (known, wanted) if known == wanted => {}
                (Some(known), Some(wanted)) if known.generation == wanted.generation => {
                    self.core.pool.set_leaving(index, wanted.role == BladeRole::Leaving);
                    self.known.entries[at] = Some(wanted.clone());
                }
                (None, Some(wanted)) if wanted.role == BladeRole::Active => {
                    self.connect_to(at, wanted);
                }
                // Never connected: nothing of this process is there.
                (None, _) => {}
                // The keeper dropped the entry before this process left it: what is left there is
                // lost when its blade says so.
                (Some(_), _) => self.core.pool.set_leaving(index, true),
            }
        }
    }

    fn connect_to(&mut self, at: usize, blade: &BladeSettings) {
        let is_new = self.tried[at] != blade.generation;
        // A host that is gone lets a connection wait for the deadline: copies come first.
        let waits = || self.makes_copies || self.later[at].is_some_and(|it| Instant::now() < it);
        if !is_new && waits() {
            return;
        }
        self.tried[at] = blade.generation;
        match add(self.core, &self.core.pool, entry_index(at), blade, false) {
            Ok(()) => {
                self.known.entries[at] = Some(blade.clone());
                (self.later[at], self.said[at]) = (None, None);
                self.core.board.header().blades_reported.fetch_and(!(1 << at), SeqCst);
                self.core.full.store(false, Relaxed);
            }
            Err(error) => {
                self.later[at] = Some(Instant::now() + RETRY);
                let reason = format!("a blade cannot be used: {error}");
                self.core.report_blade(entry_index(at), &reason);
            }
        }
    }

    fn put_off(&mut self, at: usize, message: &str) {
        self.later[at] = Some(Instant::now() + RETRY);
        if self.said[at].as_deref() != Some(message) {
            sys::say(message);
            self.said[at] = Some(message.to_owned());
        }
    }

    /// Moves one superpage off each blade that has to be left. Returns when to come again: at once,
    /// after a time, or (None) when the table changes.
    fn move_away(&mut self) -> Option<Duration> {
        let mut soon = self.later.iter().flatten().next().map(|_| RETRY);
        for at in 0..BLADE_ENTRIES {
            let is_leaving = |blade: &BladeSettings| blade.role == BladeRole::Leaving;
            if !self.known.entries[at].as_ref().is_some_and(is_leaving) {
                self.stuck &= !(1 << at);
                continue;
            }
            let next = self.step(at);
            soon = soon.into_iter().chain(next).min();
        }
        soon
    }

    /// Runs a step of the mover, which is made when it is first needed.
    fn with_mover<T>(
        &mut self,
        step: impl FnOnce(&mut Mover<'static>, &Desk, &dyn Fn() -> bool) -> T,
    ) -> Option<T> {
        self.mover.get_or_init(|| Mover::new(self.core.pool.wait()));
        let inheritance = &self.pager.inheritance;
        let desk = Desk {
            board: self.core.board,
            process: self.core.slot.pid.load(Relaxed),
            may_claim: self.born.elapsed() >= GROWN_UP,
        };
        self.mover.get_mut().map(|mover| step(mover, &desk, &|| inheritance.is_settled()))
    }

    /// Makes one copy of a superpage that has too few, since a blade was lost. Returns when to come
    /// again; nobody tells of a loss.
    fn complete_copies(&mut self) -> Option<Duration> {
        let pool = self.core.pool.wait();
        if !self.core.settings.redundancy.survives_a_blade() {
            return None;
        }
        self.publish_degraded();
        let has_all = pool.has_all_copies();
        self.is_crowded &= !has_all;
        if has_all || self.copies_later.is_some_and(|later| Instant::now() < later) {
            return Some(COPIES_STEP);
        }
        let step = self.with_mover(|mover, desk, _| mover.complete_copies(desk))?;
        let is_over = matches!(step, Ok(Step::Empty) | Err(PoolError::Full { .. }));
        self.is_crowded = is_over && pool.is_crowded();
        self.copies_later = None;
        self.makes_copies = matches!(step, Ok(Step::Moved));
        self.leave_lost();
        match step {
            Ok(Step::Moved) => return Some(Duration::ZERO),
            Ok(Step::Waiting) => return Some(CHILD_STEP),
            Ok(Step::Empty) if pool.has_all_copies() => {
                self.copies_said = false;
                return Some(COPIES_STEP);
            }
            Ok(Step::Empty) => {}
            Err(error) => {
                if !std::mem::replace(&mut self.copies_said, true) {
                    sys::say(&format!("far memory has too few copies, and {error}"));
                }
            }
        }
        self.copies_later = Some(Instant::now() + RETRY);
        Some(COPIES_STEP)
    }

    /// Verifies some of what is far, if it is time, or what was found damaged. Returns when to come
    /// again.
    fn verify(&mut self) -> Option<Duration> {
        let pool = self.core.pool.wait();
        let mut verification = self.verification.take()?;
        let begun = Instant::now();
        let step = verification.next_step(pool.has_suspects(), begun, || pages_of(pool));
        if let Some(step) = step
            && let Some(verified) =
                self.with_mover(|mover, _, _| mover.verify(step.from, step.limit))
        {
            self.count_verified(&verified);
            let (told, is_more) = verification.take(&verified, step, (begun, Instant::now()));
            told.iter().for_each(|damage| sys::say(&tell(damage, pool)));
            if is_more {
                sys::say("more far memory is damaged; damaged_pages of `farpool stat` counts it");
            }
        }
        let wait = verification.wait(Instant::now());
        self.verification = Some(verification);
        // A copy that was given up is made anew at once.
        Some(if pool.has_all_copies() { wait } else { wait.min(COPIES_STEP) })
    }

    fn count_verified(&self, verified: &Verified) {
        self.core.count(Counter::VerifiedPages, verified.pages);
        for damage in &verified.damages {
            self.core.count(Counter::DamagedPages, damage.pages.into());
            let is_replaced = damage.outcome == DamageOutcome::Replaced;
            self.core.count(Counter::ReplacedCopies, is_replaced.into());
        }
    }

    fn publish_degraded(&self) {
        let pool = self.core.pool.wait();
        let degraded = if pool.has_all_copies() { 0 } else { pool.degraded_superpages() };
        self.core.slot.set(Counter::DegradedSuperpages, degraded);
        self.core.slot.set(Counter::HedgedReads, pool.hedged_reads());
    }

    /// Reports lost blades, and leaves those on which nothing is missed: should one come back, it
    /// is used like a new one.
    fn leave_lost(&mut self) {
        let all_lost = self.core.pool.lost();
        // Whoever reads of a loss finds what it cost.
        self.publish_degraded();
        for lost in all_lost {
            let at = usize::from(lost.blade.0);
            let message = format!("blade {} is lost: {}", lost.address, lost.reason);
            self.core.report_spared(lost.blade, &message);
            if self.core.pool.is_lost(lost.blade)
                && self.core.pool.superpages_on(lost.blade) == 0
                && self.core.pool.remove_blade(lost.blade).is_ok()
            {
                let known = self.known.entries[at].take();
                self.tried[at] = known.map_or(0, |blade| blade.generation);
                self.later[at] = Some(Instant::now() + RETRY);
            }
        }
    }

    fn step(&mut self, at: usize) -> Option<Duration> {
        let index = entry_index(at);
        let step = self.with_mover(|mover, desk, settled| mover.step(index, desk, settled))?;
        self.stuck &= !(1 << at);
        match step {
            Ok(Step::Moved) => Some(Duration::ZERO),
            Ok(Step::Waiting) => Some(CHILD_STEP),
            Ok(Step::Empty) => match self.core.pool.remove_blade(index) {
                Ok(()) => {
                    self.known.entries[at] = None;
                    self.said[at] = None;
                    None
                }
                Err(_) => Some(CHILD_STEP),
            },
            Err(error @ PoolError::Full { .. }) => {
                self.stuck |= 1 << at;
                self.put_off(at, &format!("memory must leave a blade, but {error}"));
                Some(RETRY)
            }
            Err(error) => {
                self.put_off(at, &error.to_string());
                Some(RETRY)
            }
        }
    }

    /// Publishes this process's progress on the board.
    fn publish(&self, version: u32) {
        let left = self.known.entries.iter().enumerate().filter(|(_, entry)| entry.is_none());
        let left = left.fold(0, |bits, (at, _)| bits | 1 << at);
        let slot = self.core.slot;
        slot.blades_left.store(left, Release);
        let crowded = if self.is_crowded { GROUPS_CROWDED } else { 0 };
        slot.blades_stuck.store(self.stuck | crowded, Release);
        slot.blades_version.store(version, SeqCst);
    }
}

/// The board's table of copies, for this process.
struct Desk {
    board: &'static Board,
    process: u32,
    may_claim: bool,
}

impl CopyDesk for Desk {
    fn ask(&self, from: BladeIndex, original: u128) -> Errand {
        let from = usize::from(from.0);
        match self.board.copies().ask(self.process, from, original, self.may_claim) {
            farpool_board::Errand::Copy => Errand::Copy,
            farpool_board::Errand::Wait => Errand::Wait,
            farpool_board::Errand::Attach(parts) => {
                Errand::Attach(Box::new(FrozenToken::of_copy(&parts)))
            }
        }
    }

    fn announce(&self, original: u128, copy: &FrozenToken) {
        self.board.copies().announce(self.process, original, &copy.parts_of_copy());
    }

    fn forget(&self, original: u128) {
        self.board.copies().forget(original);
    }
}

fn entry_index(at: usize) -> BladeIndex {
    BladeIndex(u8::try_from(at).unwrap_or_else(|_| fail_closed("more blades than a byte counts")))
}
