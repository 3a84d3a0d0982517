//! The processes of a tree and their sidecars: every process whose memory begins to count gets one.
//!
//! Nothing has to happen when a program starts or execs: the keeper looks at the tree, and the pause between two looks
//! is the time in which the limit could be reached. What fits runs as if Farpool were not there.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use farpool_board::Board;
use farpool_inject::Pid;
use farpool_uffd::Uffd;

use crate::custody::end_orphans;
use crate::outside::{Outsiders, WhenOutside};
use crate::sidecars::{News, Nursery, SidecarError, Ward};

/// A process with less anonymous memory than this, and than [`WORTH_PART`] of the limit, has no sidecar.
const WORTH_BYTES: u64 = 96 << 20;
const WORTH_PART: u64 = 4;
/// When the tree comes within 1/8 of its limit, every process with so much has something to give.
const NEAR_PART: u64 = 8;
const LEAST_BYTES: u64 = 1 << 20;
/// The limit counts as held up to a tenth and 32 MiB more; beyond, it is said that it is not.
const OVERRUN_PART: u64 = 10;
const OVERRUN_BYTES: u64 = 32 << 20;
/// The fastest that memory is assumed to grow unseen: 10 GB/s, two threads that touch huge pages.
const GROWTH_BYTES_PER_MS: u64 = 10 << 20;
/// Between two looks, at the least and at the most.
const LOOK_MS: std::ops::RangeInclusive<u64> = 1..=20;
/// With less room than this a process is stopped while its sidecar gets ready, which takes some milliseconds.
const HOLD_BYTES: u64 = 64 * GROWTH_BYTES_PER_MS;
/// A process that could not be entered because it was busy, or was being traced, is tried again after so many looks.
const RETRY_LOOKS: u32 = 50;
const PAGE_BYTES: u64 = 4096;

/// See the module's description.
#[derive(Debug)]
pub struct Wards {
    nursery: Nursery,
    wards: Vec<Ward>,
    /// Processes that cannot be entered, and how many looks to pass them over.
    outside: HashMap<u32, u32>,
    /// Userfaultfds of children whose pages were lost with a sidecar.
    orphans: Vec<Uffd>,
    pub outsiders: Outsiders,
    /// It was said that the limit is passed.
    has_warned: bool,
}

impl Wards {
    pub fn open(board: &Path, when_outside: WhenOutside) -> Result<Wards, SidecarError> {
        Ok(Wards {
            nursery: Nursery::open(board, false)?,
            wards: Vec::new(),
            outside: HashMap::new(),
            orphans: Vec::new(),
            outsiders: Outsiders::new(when_outside),
            has_warned: false,
        })
    }

    /// Looks at the tree below this process; returns how long until the next look.
    pub fn look(&mut self, board: &Board) -> Duration {
        self.hear();
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
        let native_bytes: u64 = native.iter().map(|(_, bytes)| bytes).sum();
        board.header().unpublished_pages.store(native_bytes / PAGE_BYTES, Relaxed);
        let limit = board.header().limit_bytes.load(Relaxed);
        let counted = native_bytes + paged_bytes(board);
        self.warn(board, counted);
        let is_near = counted + limit / NEAR_PART >= limit;
        let worth = if is_near { LEAST_BYTES } else { WORTH_BYTES.min(limit / WORTH_PART) };
        for (pid, bytes) in native {
            if bytes >= worth {
                self.admit(pid, limit.saturating_sub(counted) < HOLD_BYTES);
            }
        }
        let tree: HashSet<u32> = tree.into_iter().collect();
        self.outside.retain(|pid, _| tree.contains(pid));
        self.outsiders.publish(board, &tree, self.outside.keys().copied());
        let room_ms = limit.saturating_sub(counted) / GROWTH_BYTES_PER_MS;
        Duration::from_millis(room_ms.clamp(*LOOK_MS.start(), *LOOK_MS.end()))
    }

    /// Says once that the limit is passed by more than the documents allow: nobody should have to find out.
    fn warn(&mut self, board: &Board, counted_bytes: u64) {
        let limit = board.header().limit_bytes.load(Relaxed);
        let is_share = board.header().local_percent.load(Relaxed) != 0;
        let allowed = limit + limit / OVERRUN_PART + OVERRUN_BYTES;
        if is_share || self.has_warned || counted_bytes <= allowed {
            return;
        }
        self.has_warned = true;
        eprintln!(
            "farpool: the program holds {} MiB, more than its limit of {} MiB: it populated or locked memory with one call, \
             or grew faster than its pages can leave; this is said once",
            counted_bytes >> 20,
            limit >> 20
        );
    }

    /// Waits for the next look, or for what a sidecar has to say.
    pub fn wait(&self, most: Duration) {
        Ward::wait(&self.wards, most);
    }

    fn admit(&mut self, pid: u32, holds: bool) {
        if let Some(looks) = self.outside.get_mut(&pid)
            && *looks > 0
        {
            *looks -= 1;
            return;
        }
        let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
        // A child of vfork is in its parent's memory until it execs.
        if self.wards.iter().any(|ward| share_memory(number(target), number(ward.pid))) {
            return;
        }
        match self.nursery.admit(target, holds) {
            Ok(ward) => {
                self.outside.remove(&pid);
                self.wards.push(ward);
            }
            Err(error) => self.stay_outside(pid, &error),
        }
    }

    fn stay_outside(&mut self, pid: u32, error: &SidecarError) {
        self.outside.insert(pid, RETRY_LOOKS);
        let has_ended = anonymous_bytes(pid).is_none_or(|bytes| bytes == 0);
        if !has_ended {
            self.outsiders.report(pid, error, error.is_final());
        }
    }

    /// Takes note of what the sidecars have to say.
    fn hear(&mut self) {
        self.orphans.iter().for_each(end_orphans);
        let (outside, outsiders) = (&mut self.outside, &mut self.outsiders);
        let orphans = &mut self.orphans;
        self.wards.retain_mut(|ward| match ward.news() {
            None => true,
            Some(News::Gone | News::Left) => false,
            Some(News::Died(words)) => {
                eprintln!(
                    "farpool: the sidecar of process {0} has ended, and process {0} with it, for nobody could bring its \
                     pages; its last words: {words}",
                    number(ward.pid)
                );
                ward.end_program();
                orphans.extend(ward.orphans());
                false
            }
            Some(News::Failed(reason)) => {
                outsiders.report(number(ward.pid), &reason, true);
                outside.insert(number(ward.pid), u32::MAX);
                // Nothing was moved out: the program needs nobody.
                if ward.withdraw().is_err() {
                    ward.abandon();
                }
                false
            }
            Some(News::Stuck(reason)) => {
                eprintln!(
                    "farpool: process {} is ended: {reason} of its pages could not be brought in",
                    number(ward.pid)
                );
                ward.end_program();
                false
            }
        });
    }

    /// The processes below this one, without sidecars; and those of them that run on their parent's memory, which must
    /// not be counted twice.
    fn tree(&self) -> (Vec<u32>, HashSet<u32>) {
        let sidecars: HashSet<u32> = self.wards.iter().map(|ward| number(ward.sidecar())).collect();
        let (mut found, mut borrowers) = (Vec::new(), HashSet::new());
        let mut next = vec![std::process::id()];
        while let Some(pid) = next.pop() {
            for child in children(pid) {
                if !sidecars.contains(&child) {
                    found.push(child);
                    next.push(child);
                    if pid != std::process::id() && share_memory(pid, child) {
                        borrowers.insert(child);
                    }
                }
            }
        }
        (found, borrowers)
    }
}

/// Has the calling thread, and those it starts, look at the tree when it is time, however many of the program's threads
/// want the CPUs. A refusal (it needs CAP_SYS_NICE) costs overruns of the limit on a busy machine.
pub fn be_prompt() {
    let parameter = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 is the calling thread; a pointer to a live sched_param.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameter) };
}

/// The anonymous memory that the paged processes have on the board.
fn paged_bytes(board: &Board) -> u64 {
    use farpool_board::Counter;
    board.processes().map(|slot| slot.get(Counter::ResidentPages) * PAGE_BYTES).sum()
}

fn number(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

/// The children of all threads of a process.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of_task = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
    let texts = tasks.flatten().filter_map(|task| of_task(task).ok());
    texts.flat_map(|text| numbers(&text)).collect()
}

fn numbers(text: &str) -> Vec<u32> {
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// None: there is no such process. A first thread that has ended has no memory; then another one is asked.
pub(crate) fn anonymous_bytes(pid: u32) -> Option<u64> {
    let bytes = anonymous_bytes_of(Path::new(&format!("/proc/{pid}")))?;
    if bytes > 0 {
        return Some(bytes);
    }
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    Some(tasks.filter_map(|task| anonymous_bytes_of(&task.path())).max().unwrap_or(0))
}

fn anonymous_bytes_of(task: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(task.join("statm")).ok()?;
    let mut fields = text.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    let (resident, shared) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some(resident.saturating_sub(shared) * PAGE_BYTES)
}

/// Whether two processes have one address space. In doubt they have not: userfaultfd refuses a second registration.
pub(crate) fn share_memory(one: u32, other: u32) -> bool {
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: kcmp compares two processes by numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) == 0 }
}
