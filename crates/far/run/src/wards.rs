//! The processes of a tree and their sidecars: every process whose memory begins to count gets one.
//!
//! Nothing has to happen when a program starts or execs: the keeper checks the tree, and the limit
//! is not reached within the pause between two checks. What fits runs as if Farpool were not there.

mod common;
mod fresh;
mod hold;

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use farpool_board::{Board, Counter, ProcessState, Slot};
use farpool_inject::{Pid, Standstill};
use farpool_uffd::Uffd;
use farpool_units::PAGE_BYTES_U64;

use crate::births::Births;
use crate::brakes::Brakes;
use crate::dialing::Dialing;
use crate::directory::is_in_another_run;
use crate::door::Means;
use crate::holder::{Holder, share_memory};
use crate::kin::Kin;
use crate::nursery::Nursery;
use crate::outside::{Outsiders, WhenOutside};
use crate::proc::{anonymous_bytes, children};
use crate::renewal::Looks;
use crate::say::say;
use crate::sidecar_error::SidecarError;
use crate::sidecars::{self, News, UNTOLD, Ward};
use crate::stillness;
use crate::uffd_guardian::end_orphans;
use crate::warden::Retired;
use common::CommonCount;
pub(crate) use common::shared_bytes;
use fresh::FreshCount;

/// While the tree has more room than this and this fraction of its limit, no process needs a
/// sidecar: what fits runs as if Farpool were not there.
const ROOM_BYTES: u64 = 64 << 20;
const ROOM_PART: u64 = 4;
/// With less room, a process gets no sidecar if it has less anonymous memory than this, or than
/// [`WORTH_PART`] of the limit.
const WORTH_BYTES: u64 = 96 << 20;
const WORTH_PART: u64 = 4;
/// When the tree comes within 1/8 of its limit, every process with at least this much has something
/// to give: a sidecar takes one to two MiB itself, and always leaves a process one MiB.
const NEAR_PART: u64 = 8;
const LEAST_BYTES: u64 = 4 << 20;
/// The limit counts as held up to a tenth and 32 MiB more; beyond, a warning is printed.
const OVERRUN_PART: u64 = 10;
const OVERRUN_BYTES: u64 = 32 << 20;
/// The fastest that memory is assumed to grow unseen: 10 GB/s, two threads that touch huge pages.
const GROWTH_BYTES_PER_MS: u64 = 10 << 20;
/// Shortest and longest pause between two checks.
const LOOK_MS: std::ops::RangeInclusive<u64> = 1..=20;
/// The shortest where every process has a sidecar: a process that is born now has nothing yet.
const PAGED_LOOK_MS: u64 = 2;
/// With less room than this a process is stopped while its sidecar gets ready, which takes some
/// milliseconds.
const HOLD_BYTES: u64 = 64 * GROWTH_BYTES_PER_MS;
/// How many checks a process is skipped after it could not be entered because it was busy or being
/// traced.
const RETRY_LOOKS: u32 = 50;
/// A process that could not be entered for a lasting reason is skipped twice as long each time, up
/// to this factor: each try stops it, and may leave some addresses in use.
const MOST_RETRY_TIMES: u32 = 256;
/// The same for a child that its parent's sidecar does not hand over yet: that has only just read
/// the fork event.
const HANDOVER_LOOKS: u32 = 5;
/// Most checks in which unmapping a sidecar's memory from a process that it has left is tried:
/// threads may not stop in time.
const MOST_WITHDRAWALS: u32 = 20;
/// A file beside the board with the number of a process that is to be left, see [`crate::detach`].
pub const LEAVE: &str = "leave";

/// See the module's description.
#[derive(Debug)]
pub struct Wards {
    nursery: Nursery,
    /// Applies `--when-full fail`.
    brakes: Brakes,
    wards: Vec<Ward>,
    births: Births,
    /// What the last walk through the tree found, see [`Wards::tree`].
    walked: (Vec<u32>, HashSet<u32>),
    /// Processes that cannot be entered.
    outside: HashMap<u32, Passed>,
    /// Children whose pages were lost with a sidecar: that sidecar, their numbers there, and their
    /// userfaultfds.
    orphans: Vec<(Pid, u64, Uffd)>,
    /// Sidecars and wardens that serve no more and have not ended yet: not processes of the tree.
    retired: Vec<Retired>,
    pub outsiders: Outsiders,
    /// The warning that the limit is passed was printed.
    has_warned: bool,
    /// Where the board is.
    folder: PathBuf,
    /// Processes that were attached to; otherwise all below this one are served.
    kin: Option<Kin>,
    /// How often the memory of each sidecar that has left could not be unmapped.
    withdrawals: HashMap<u32, u32>,
    overrun: hold::Overrun,
    fresh: FreshCount,
    looks_at_rights: Looks,
    common: CommonCount,
    /// No process is entered any more.
    is_leaving: bool,
    /// The limit was held once: a tree that is attached to may hold far more to begin with.
    has_fit: bool,
    /// It was held well once. A tree that is attached to comes to it from above, and touches again
    /// what has just left: that passes it for a moment, which is no news.
    has_settled: bool,
}

impl Wards {
    pub(crate) fn open(
        means: Means,
        board: &Path,
        dialing: Dialing,
        when_outside: WhenOutside,
    ) -> Result<Wards, SidecarError> {
        let nursery = Nursery::with(means, board, dialing, false)?;
        Ok(Wards::with(nursery, board, None, when_outside))
    }

    /// Serves a process that was not started from here, and all below it. They outlive this
    /// process.
    pub(crate) fn attach(board: &Path, dialing: Dialing, root: u32) -> Result<Wards, SidecarError> {
        let nursery = Nursery::open(board, dialing, true)?;
        Ok(Wards::with(nursery, board, Some(Kin::of(root)), WhenOutside::Warn))
    }

    fn with(nursery: Nursery, board: &Path, kin: Option<Kin>, when_outside: WhenOutside) -> Wards {
        Wards {
            nursery,
            brakes: Brakes::default(),
            folder: board.parent().unwrap_or(board).to_owned(),
            kin,
            withdrawals: HashMap::new(),
            overrun: hold::Overrun::default(),
            fresh: FreshCount::default(),
            looks_at_rights: Looks::new(),
            common: CommonCount::default(),
            is_leaving: false,
            has_fit: false,
            has_settled: false,
            wards: Vec::new(),
            births: Births::watch(),
            walked: Default::default(),
            outside: HashMap::new(),
            orphans: Vec::new(),
            retired: Vec::new(),
            outsiders: Outsiders::new(when_outside),
            has_warned: false,
        }
    }

    /// Checks the tree below this process. Returns the pause until the next check.
    pub fn look(&mut self, board: &Board) -> Duration {
        self.hear(board);
        stillness::grant_all(&mut self.wards);
        self.heed();
        if !self.is_leaving {
            self.looks_at_rights.look(&mut self.wards);
        }
        let mut sight = self.see(board);
        self.judge(board, &sight);
        let due = self.due(&sight);
        let must_stop = self.must_stop(board, &sight);
        if must_stop || (!due.is_empty() && sight.room_bytes() < HOLD_BYTES) {
            self.hold(board, due, must_stop);
            sight = self.see(board);
        } else {
            for pid in due {
                self.admit(pid, None);
            }
        }
        let least_ms = if sight.native.is_empty() { PAGED_LOOK_MS } else { *LOOK_MS.start() };
        let tree: HashSet<u32> = sight.tree.iter().copied().collect();
        self.outside.retain(|pid, _| tree.contains(pid));
        self.outsiders.publish(board, &tree, self.outside.keys().copied());
        self.brakes.look(board, &tree);
        let room_ms = sight.room_bytes() / GROWTH_BYTES_PER_MS;
        Duration::from_millis(room_ms.clamp(least_ms, *LOOK_MS.end()))
    }

    /// Finds the processes and what they hold, and puts on the board what no pager does.
    fn see(&mut self, board: &Board) -> Sight {
        let (tree, borrowers) = self.tree();
        // After an exec the sidecar is still in the old image's memory, for a moment.
        let holds = |ward: &Ward, pid: u32| {
            number(ward.pid) == pid && share_memory(pid, number(ward.sidecar()))
        };
        let inside = |pid: &u32| self.wards.iter().any(|ward| holds(ward, *pid));
        let native: Vec<(u32, u64)> = tree
            .iter()
            .filter(|pid| !inside(pid) && !borrowers.contains(pid))
            .filter_map(|pid| Some((*pid, anonymous_bytes(*pid)?)))
            .collect();
        // A process that had a pager is on the board still, and is counted there from the next
        // check on.
        let is_counted = |slot: &&Slot| {
            slot.state() == ProcessState::Native && slot.get(Counter::ResidentPages) != 0
        };
        let slots = board.processes().filter(is_counted);
        let counted: HashSet<u32> = slots.map(|slot| slot.pid.load(Relaxed)).collect();
        let uncounted = native.iter().filter(|(pid, _)| !counted.contains(pid));
        let uncounted_bytes: u64 = uncounted.map(|(_, bytes)| bytes).sum();
        let limit_bytes = board.header().limit_bytes.load(Relaxed);
        let pids = native.iter().map(|(pid, _)| *pid);
        let common_bytes = self.common.count(board, limit_bytes, pids);
        let unpublished_pages = (uncounted_bytes + common_bytes) / PAGE_BYTES_U64;
        board.header().unpublished_pages.store(unpublished_pages, Relaxed);
        let wards = self.wards.iter().map(|ward| number(ward.pid));
        let paged: Vec<u32> =
            wards.filter(|pid| native.iter().all(|(native, _)| native != pid)).collect();
        let held_bytes = native_bytes(&native) + self.fresh.count(board, &paged);
        // The board may be behind in either direction.
        let counted_bytes = held_bytes.max(uncounted_bytes + bytes_on_board(board));
        Sight { tree, native, paged, limit_bytes, held_bytes, counted_bytes, common_bytes }
    }

    /// The processes that are to get a sidecar now.
    fn due(&mut self, sight: &Sight) -> Vec<u32> {
        let worth = worth_bytes(sight.limit_bytes, sight.room_bytes());
        let Some(worth) = worth.filter(|_| !self.is_leaving) else { return Vec::new() };
        let worthy = sight.native.iter().filter(|(_, bytes)| *bytes >= worth);
        let mut due: Vec<u32> = worthy.map(|(pid, _)| *pid).collect();
        due.retain(|pid| match self.outside.get_mut(pid) {
            Some(passed) if passed.looks > 0 => {
                passed.looks -= 1;
                false
            }
            _ => true,
        });
        if due.is_empty() {
            return due;
        }
        // A child of vfork is in its parent's memory until it execs.
        let wards = self.wards.iter();
        let taken: Vec<Holder> = wards.filter_map(|ward| Holder::of(number(ward.pid))).collect();
        due.retain(|pid| {
            let holder = Holder::of(*pid);
            holder.is_some_and(|holder| !taken.iter().any(|other| holder.shares_with(*other)))
        });
        due
    }

    /// Notes when the limit is held for the first time. Says once that it is passed by more than
    /// the documents allow, so that users need not find out for themselves.
    fn judge(&mut self, board: &Board, sight: &Sight) {
        let limit = sight.limit_bytes;
        let is_share = board.header().local_percent.load(Relaxed) != 0;
        let allowed = allowed_bytes(limit);
        let is_own = self.kin.is_none();
        self.has_fit |= is_own || sight.held_bytes <= allowed;
        self.has_settled |= is_own || sight.held_bytes <= hold::brake_bytes(limit);
        // To replace a sidecar, all memory of the process is brought in; this was already reported.
        let is_renewing = self.wards.iter().any(Ward::is_renewed);
        let is_known = self.has_warned || is_renewing;
        if !self.has_settled || is_share || is_known || sight.counted_bytes <= allowed {
            return;
        }
        // What the board has may have left.
        let paged_bytes = self.fresh.count_now(board, &sight.paged);
        let held_bytes = native_bytes(&sight.native) + paged_bytes;
        if held_bytes <= allowed {
            return;
        }
        self.has_warned = true;
        say!(
            "farpool: the program holds {} MiB, more than its limit of {} MiB: it populated or \
             locked memory with one call, or grew faster than its pages can leave; this is said \
             once",
            held_bytes >> 20,
            limit >> 20
        );
    }

    /// Waits for the next check, a message from a sidecar, or the end of a process.
    pub fn wait(&self, most: Duration, ending: Option<&OwnedFd>) {
        sidecars::wait(&self.wards, ending, most);
    }

    /// Puts a sidecar into a process, which stands still with `still`.
    fn admit(&mut self, pid: u32, still: Option<&mut Standstill>) -> Admission {
        let Some(target) = process(pid) else { return Admission::Refused };
        if self.kin.is_some() && is_in_another_run(pid, &self.folder) {
            return self.stay_outside(pid, &SidecarError::AlreadyPaged { pid });
        }
        // The sidecar's own memory must not meet a limit that the process inherited from its
        // parent.
        self.brakes.release(pid);
        let admitted = match still {
            Some(still) => {
                self.nursery.admit_still(target, still, &mut self.wards, &mut self.retired)
            }
            None => self.nursery.admit(target, &mut self.wards, &mut self.retired),
        };
        match admitted {
            Ok(ward) => {
                self.outside.remove(&pid);
                self.wards.push(ward);
                Admission::Entered
            }
            Err(error) => self.stay_outside(pid, &error),
        }
    }

    /// Carries out what `farpool detach` asks for.
    fn heed(&mut self) {
        let request = self.folder.join(LEAVE);
        let Ok(text) = std::fs::read_to_string(&request) else { return };
        // If it stayed it would be handled again, which does no harm.
        let _ = std::fs::remove_file(&request);
        let asked = |ward: &&Ward| text.trim().parse() == Ok(number(ward.pid));
        // From now on the limit is passed for a known reason.
        self.has_warned = true;
        if let Some(Err(error)) = self.wards.iter().find(asked).map(Ward::leave) {
            say!("farpool: {error}");
        }
    }

    /// Has all pages brought back everywhere. No process is entered any more.
    pub fn leave_all(&mut self) {
        (self.is_leaving, self.has_warned) = (true, true);
        // A sidecar that cannot be told has ended, which is noticed elsewhere.
        self.wards.iter().for_each(|ward| drop(ward.leave()));
    }

    /// How many processes have a sidecar, how many threads these have, and the longest that one was
    /// stopped.
    pub fn entered(&self) -> (usize, usize, Duration) {
        let stopped = || self.wards.iter().map(Ward::stopped);
        let longest = stopped().map(|(time, _)| time).max().unwrap_or_default();
        (self.wards.len(), stopped().map(|(_, threads)| threads).sum(), longest)
    }

    /// Shared memory of processes without a sidecar, which no pager reports.
    pub fn common_bytes(&self) -> u64 {
        self.common.bytes
    }

    /// True if a process was found that could not be entered.
    pub fn has_refusals(&self) -> bool {
        self.outsiders.has_named()
    }

    /// True if all processes that were attached to have ended.
    pub fn are_over(&self) -> bool {
        self.wards.is_empty() && self.kin.as_ref().is_some_and(Kin::is_over)
    }

    fn stay_outside(&mut self, pid: u32, error: &SidecarError) -> Admission {
        if matches!(error, SidecarError::NotYet { .. }) {
            self.outside.insert(pid, Passed { looks: HANDOVER_LOOKS, times: 1 });
            return Admission::NotYet;
        }
        let before = self.outside.get(&pid).copied();
        self.outside.insert(pid, Passed::after(before, error.may_pass()));
        let has_ended = anonymous_bytes(pid).is_none_or(|bytes| bytes == 0);
        if !has_ended {
            self.outsiders.report(pid, error, error.is_final());
        }
        Admission::Refused
    }

    /// Handles the sidecars' messages.
    pub(crate) fn hear(&mut self, board: &Board) {
        self.orphans.retain(|(_, _, uffd)| !uffd.is_gone());
        let orphans = self.orphans.iter();
        let born: Vec<(Pid, u64, Uffd)> = orphans
            .flat_map(|(from, _, uffd)| {
                end_orphans(uffd).into_iter().map(|born| (*from, UNTOLD, born))
            })
            .collect();
        self.orphans.extend(born);
        self.retired.retain_mut(|servant| !servant.has_ended());
        let (mut taken, mut returned, mut without) = (Vec::new(), Vec::new(), Vec::new());
        let mut wards = std::mem::take(&mut self.wards);
        wards.retain_mut(|ward| {
            let stays = self.hear_ward(ward);
            if !stays {
                self.retired.extend(ward.retire());
                without.push(number(ward.pid));
            }
            if ward.serves_inherited {
                taken.extend(ward.inherits.take());
            } else if !stays {
                returned.extend(ward.inherits.take());
            }
            stays
        });
        // A process that runs another image may have a new sidecar already.
        without.retain(|pid| !wards.iter().any(|ward| number(ward.pid) == *pid));
        let slots = board.processes().filter(|slot| without.contains(&slot.pid.load(Relaxed)));
        slots.for_each(Slot::lose_pager);
        taken.into_iter().for_each(|child| child.is_taken(&mut wards));
        returned.into_iter().for_each(|child| child.give_back(&mut wards));
        // A child with a sidecar of its own, or one that is about to get it, needs no other.
        let is_served = |from: Pid, number: u64| {
            wards.iter().any(|ward| ward.inherited.is_some_and(|child| child.is(from, number)))
        };
        self.orphans.retain(|(from, number, _)| !is_served(*from, *number));
        self.wards = wards;
    }

    /// Handles one ward's news. False if its sidecar serves no longer.
    fn hear_ward(&mut self, ward: &mut Ward) -> bool {
        let (outside, orphans) = (&mut self.outside, &mut self.orphans);
        let (withdrawals, outsiders) = (&mut self.withdrawals, &mut self.outsiders);
        let (brakes, is_leaving) = (&mut self.brakes, self.is_leaving);
        match ward.news() {
            None => true,
            Some(News::Gone) => {
                let sidecar = ward.sidecar();
                orphans.extend(ward.last_reference().map(|uffd| (sidecar, UNTOLD, uffd)));
                false
            }
            Some(News::Left) => {
                brakes.release(number(ward.pid));
                if !ward.is_renewed() || is_leaving {
                    outside.insert(number(ward.pid), Passed::FOR_EVER);
                }
                !is_withdrawn(ward, withdrawals.entry(number(ward.pid)).or_default())
            }
            Some(News::Died(words)) => {
                say!(
                    "farpool: the sidecar of process {0} has ended, and process {0} with it, \
                     because its far pages could not be fetched any more; its last words: {words}",
                    number(ward.pid)
                );
                ward.end_program();
                let sidecar = ward.sidecar();
                orphans.extend(ward.orphans().map(|(number, uffd)| (sidecar, number, uffd)));
                false
            }
            Some(News::Failed(reason)) => {
                outsiders.report(number(ward.pid), &reason, true);
                outside.insert(number(ward.pid), Passed::FOR_EVER);
                // Nothing was moved out: the program needs no sidecar, or its previous one, which
                // then gets the unmap events.
                if ward.inherits.is_some() || ward.withdraw().is_err() {
                    ward.abandon();
                }
                false
            }
            Some(News::Stuck(reason)) => {
                say!(
                    "farpool: process {} is ended: {reason} of its pages could not be brought in",
                    number(ward.pid)
                );
                ward.end_program();
                false
            }
        }
    }

    /// The tree's processes, without sidecars, and those of them that run on their parent's memory,
    /// which must not be counted twice.
    fn tree(&mut self) -> (Vec<u32>, HashSet<u32>) {
        // A process on another's memory may have left it by an exec.
        if self.births.may_have_been(Instant::now()) || !self.walked.1.is_empty() {
            self.walked = self.walk();
        }
        self.walked.clone()
    }

    fn walk(&mut self) -> (Vec<u32>, HashSet<u32>) {
        let own = std::process::id();
        let serving = self.wards.iter().flat_map(Ward::servants);
        let retired = self.retired.iter().map(|servant| servant.pid);
        let mut seen: HashSet<u32> = serving.chain(retired).chain([own]).collect();
        let mut found: Vec<u32> = self.kin.as_mut().map_or(Vec::new(), Kin::living);
        seen.extend(&found);
        let mut borrowers = HashSet::new();
        let mut next = if self.kin.is_some() { found.clone() } else { vec![own] };
        while let Some(pid) = next.pop() {
            let mut born = children(pid);
            born.retain(|child| seen.insert(*child));
            if pid != own && !born.is_empty() {
                let parent = Holder::of(pid);
                let borrows = |child: &&u32| {
                    let child = Holder::of(**child);
                    parent.zip(child).is_some_and(|(parent, child)| parent.shares_with(child))
                };
                borrowers.extend(born.iter().filter(borrows));
            }
            found.extend(&born);
            next.extend(born);
        }
        if let Some(kin) = &mut self.kin {
            kin.learn(&found);
        }
        (found, borrowers)
    }
}

/// How long a process that cannot be entered is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Passed {
    looks: u32,
    /// The last number of checks skipped, in multiples of [`RETRY_LOOKS`].
    times: u32,
}

impl Passed {
    const FOR_EVER: Passed = Passed { looks: u32::MAX, times: MOST_RETRY_TIMES };

    /// The pause after another failed try. Pure.
    fn after(before: Option<Passed>, may_pass: bool) -> Passed {
        let again = before.filter(|_| !may_pass).map_or(1, |before| before.times * 2);
        let times = again.min(MOST_RETRY_TIMES);
        Passed { looks: RETRY_LOOKS * times, times }
    }
}

/// The outcome of putting a sidecar into a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Entered,
    /// Its parent's sidecar will soon hand it over.
    NotYet,
    /// Not now, or never.
    Refused,
}

/// What a check of the tree has found.
#[derive(Debug)]
struct Sight {
    /// All processes of the tree.
    tree: Vec<u32>,
    /// Processes without a sidecar, and their anonymous memory.
    native: Vec<(u32, u64)>,
    /// Processes with a sidecar.
    paged: Vec<u32>,
    limit_bytes: u64,
    /// The anonymous memory of all, as the kernel reported it last.
    held_bytes: u64,
    /// The same, or what the board has if that is more: the processes' own counts include what may
    /// be taken unseen.
    counted_bytes: u64,
    /// Unmovable memory that counts besides: shared memory of processes without a sidecar.
    common_bytes: u64,
}

impl Sight {
    /// The bytes left below the limit.
    fn room_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.counted_bytes + self.common_bytes)
    }
}

/// The most at which the limit counts as held. Pure.
fn allowed_bytes(limit_bytes: u64) -> u64 {
    limit_bytes + limit_bytes / OVERRUN_PART + OVERRUN_BYTES
}

/// How much anonymous memory makes a process worth a sidecar, given the room below the limit. None
/// if no sidecar is needed yet. Pure.
fn worth_bytes(limit_bytes: u64, room_bytes: u64) -> Option<u64> {
    if room_bytes <= limit_bytes / NEAR_PART {
        Some(LEAST_BYTES)
    } else if room_bytes < ROOM_BYTES + limit_bytes / ROOM_PART {
        Some(WORTH_BYTES.min(limit_bytes / WORTH_PART))
    } else {
        None
    }
}

/// Unmaps the memory of a sidecar that has left from its process, which goes on. After too many
/// failures the process keeps some unused addresses.
fn is_withdrawn(ward: &Ward, tries: &mut u32) -> bool {
    let Err(error) = ward.withdraw() else { return true };
    *tries += 1;
    if *tries < MOST_WITHDRAWALS {
        return false;
    }
    let pid = number(ward.pid);
    say!("farpool: process {pid} has all its memory, and unused addresses of its sidecar: {error}");
    ward.abandon();
    true
}

/// The anonymous memory of processes without a sidecar, in bytes.
fn native_bytes(native: &[(u32, u64)]) -> u64 {
    native.iter().map(|(_, bytes)| bytes).sum()
}

/// The anonymous memory that the board has for all its processes.
fn bytes_on_board(board: &Board) -> u64 {
    board.processes().map(|slot| slot.get(Counter::ResidentPages) * PAGE_BYTES_U64).sum()
}

fn process(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn number(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    use farpool_units::MIB;

    #[test]
    fn what_fits_needs_no_sidecar() {
        assert_eq!(worth_bytes(1024 * MIB, 1000 * MIB), None);
        assert_eq!(worth_bytes(1024 * MIB, 320 * MIB), None);
    }

    #[test]
    fn who_cannot_be_entered_for_good_is_tried_seldom() {
        let mut passed = None;
        let mut next =
            |may_pass| passed.insert(Passed::after(passed, may_pass)).looks / RETRY_LOOKS;
        assert_eq!([next(false), next(false), next(false)], [1, 2, 4]);
        let last = (0..20).map(|_| next(false)).last();
        assert_eq!(last, Some(MOST_RETRY_TIMES));
        assert_eq!([next(true), next(true), next(false)], [1, 1, 2]);
    }

    #[test]
    fn the_nearer_the_limit_the_smaller_the_processes_that_get_one() {
        assert_eq!(worth_bytes(1024 * MIB, 319 * MIB), Some(WORTH_BYTES));
        assert_eq!(worth_bytes(1024 * MIB, 128 * MIB), Some(LEAST_BYTES));
        assert_eq!(worth_bytes(1024 * MIB, 0), Some(LEAST_BYTES));
        // A small limit is reached between two checks.
        assert_eq!(worth_bytes(64 * MIB, 64 * MIB), Some(16 * MIB));
    }
}
