//! Which fault threads listen, and where they run.
//!
//! A wake-up of another CPU costs several times a fault (a halted virtual CPU needs 10 to 50 µs),
//! so a fault must be answered on the CPU where it happened, by one thread:
//!
//! * **Solo**: only the first fault thread listens. It follows the faulting thread to its CPU, and
//!   the evictor comes along, unless it finds pages in long runs: each run that is moved costs an
//!   interrupt of every other CPU that runs the process, which is dearer than moving a page. On the
//!   first thread's CPU both run under SCHED_IDLE: a CPU on which only such threads run counts as
//!   idle for the scheduler, so the woken program thread stays where it is instead of being moved
//!   to an idle CPU. They are preempted at once; the first thread finds the next fault ready when
//!   the program thread blocks again, and sleeps for a burst of the evictor when the allowance is
//!   used up.
//! * **Crowd**: all fault threads listen, each bound to one CPU, under the normal policy, and the
//!   evictor runs on any CPU. For programs that keep all CPUs busy: there the first thread would
//!   starve, and there is no idle CPU to be moved to.
//!
//! Leaving SCHED_IDLE is a privilege: before the process changes its user all threads change to
//! Crowd, for good if the privilege is lost.
//!
//! The first member of the crowd keeps watch while the crowd is not wanted ([`Crew::watch`]). It
//! calls the crowd when neither the first thread nor the evictor progressed between two checks
//! though a fault waits, or when the first thread owes a page and waits for a CPU; after a while
//! Solo is tried again. Measured on the development machine (2 virtual CPUs, one thread faulting,
//! median): both pinned to one CPU 8.7 µs; solo 9.1 µs; two listeners 10 to 25 µs; one listener
//! that follows under the normal policy 76 µs.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};

use farpool_uffd::Uffd;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::sys;

const SOLO: u32 = 0;
const CROWD: u32 = 1;
/// Crowd without a way back: the process is changing its user, and may lack the right afterwards.
const CROWD_ONLY: u32 = 2;

/// A first thread that had to sleep this many times in a row may be on another CPU than its program
/// thread; then it asks, which costs more than a fault. Each time it was on the right CPU it asks
/// half as often, down to once in [`LONGEST_PATIENCE`] sleeps.
const FIRST_PATIENCE: u32 = 2;
const LONGEST_PATIENCE: u32 = 64;
/// Stands for no CPU.
const NOWHERE: usize = usize::MAX;
/// First time spent in Crowd; doubled each time it recurs soon, up to [`LONGEST_SPELL`].
const FIRST_SPELL: Duration = Duration::from_millis(50);
const LONGEST_SPELL: Duration = Duration::from_millis(1600);
/// How soon the watch checks again, in Solo, after a check without progress; doubled each time all
/// was well, up to [`LONGEST_STEP`]: waking the watch on another CPU can draw the program's thread
/// there.
const WATCH_STEP: Duration = Duration::from_millis(2);
const LONGEST_STEP: Duration = Duration::from_millis(64);
/// This many checks in a row without progress are starvation; one may be a virtual CPU that the
/// host took away.
const STARVED_LOOKS: u32 = 2;
/// How often a member of the crowd checks whether it is still wanted.
pub const MEMBER_STEP: Duration = Duration::from_millis(20);

/// State shared by the fault threads and the evictor.
#[derive(Debug)]
pub struct Crew {
    mode: AtomicU32,
    first: AtomicU32,
    /// Where the first thread is; [`NOWHERE`] in Crowd and before the first fault.
    first_cpu: AtomicUsize,
    evictor: AtomicU32,
    /// The evictor has dense chunks to move: it works on another CPU.
    evictor_apart: AtomicBool,
    memory_is_shared: AtomicBool,
    /// The watching thread. It is kept off the CPU where the others work: under the normal policy
    /// it would make the scheduler move the program's thread away.
    watcher: AtomicU32,
    /// Messages the first thread has read, and chunks the evictor has handled.
    progress: AtomicU64,
    /// Rounds that the first thread has begun.
    first_rounds: AtomicU64,
    /// The first thread has read a message, or waits for a blade: a thread of the program may be
    /// waiting for it.
    first_owes: AtomicBool,
    cpus: Vec<usize>,
    /// There is more than one CPU and fault thread, and the kernel lets us change policies both
    /// ways (root, or CAP_SYS_NICE).
    may_go_solo: AtomicBool,
}

/// The watch's state between two checks.
#[derive(Debug)]
pub struct Watch {
    seen_progress: u64,
    seen_rounds: u64,
    /// Checks in a row that found a waiting fault and no progress since the check before.
    vain_looks: u32,
    since: Instant,
    spell: Duration,
    step: Duration,
}

/// The first thread's knowledge of where it is.
#[derive(Debug)]
pub struct Follow {
    patience: u32,
    waits: u32,
}

impl Crew {
    #[allow(clippy::new_without_default)] // There is nothing default about it: it looks at the machine and the clock.
    pub fn new() -> Crew {
        let cpus = sys::allowed_cpus();
        let may_go_solo = cpus.len() > 1 && sys::may_change_policy();
        Crew {
            mode: AtomicU32::new(if may_go_solo { SOLO } else { CROWD }),
            first: AtomicU32::new(0),
            first_cpu: AtomicUsize::new(NOWHERE),
            evictor: AtomicU32::new(0),
            evictor_apart: AtomicBool::new(false),
            memory_is_shared: AtomicBool::new(false),
            watcher: AtomicU32::new(0),
            progress: AtomicU64::new(0),
            first_rounds: AtomicU64::new(0),
            first_owes: AtomicBool::new(false),
            cpus,
            may_go_solo: AtomicBool::new(may_go_solo),
        }
    }

    /// Sets how many fault threads there will be. A single one has no other thread to watch it.
    pub fn set_members(&self, count: usize) {
        if count < 2 {
            self.may_go_solo.store(false, SeqCst);
            self.mode.store(CROWD, SeqCst);
        }
    }

    pub fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    pub fn is_solo(&self) -> bool {
        self.mode.load(SeqCst) == SOLO
    }

    /// Makes the calling thread the first thread.
    pub fn be_first(&self) {
        self.first.store(sys::thread_id(), SeqCst);
        if self.is_solo() {
            self.make_first_idle();
        }
    }

    /// Puts the first thread under SCHED_IDLE, if the calling thread can take it out again. The
    /// signals by which it could lose the right meanwhile (see [`crate::sys::rights`]) are blocked.
    fn make_first_idle(&self) {
        let _signals = sys::SignalGuard::block_all();
        if !sys::may_change_policy() {
            self.leave_solo_for_good();
            return;
        }
        let first = self.first.load(SeqCst);
        sys::set_idle_policy(first, true);
        if !self.is_solo() {
            sys::set_idle_policy(first, false);
        }
    }

    /// Leaves Solo because the process is about to change its user: threads under SCHED_IDLE could
    /// not be taken out of it afterwards, and would starve.
    pub fn leave_solo_for_good(&self) {
        self.mode.store(CROWD_ONLY, SeqCst);
        let first = self.first.load(SeqCst);
        if first != 0 {
            sys::set_idle_policy(first, false);
        }
        self.first_cpu.store(NOWHERE, SeqCst);
        self.place_evictor();
        sys::wake(&self.mode);
    }

    /// Allows Solo again after the process has changed its user, if it kept the right.
    pub fn may_go_solo_again(&self) {
        if sys::may_change_policy() {
            let _ = self.mode.compare_exchange(CROWD_ONLY, CROWD, SeqCst, SeqCst);
        }
    }

    /// Makes the calling thread the evictor.
    pub fn be_evictor(&self) {
        self.evictor.store(sys::thread_id(), SeqCst);
        self.place_evictor();
    }

    pub fn is_evictor(&self, thread: u32) -> bool {
        self.evictor.load(Relaxed) == thread
    }

    /// Counts steps done for the program.
    pub fn has_progressed(&self, steps: u64) {
        self.progress.fetch_add(steps, Relaxed);
    }

    /// The first thread begins another round. `owes`: until its end a thread may wait for it.
    pub fn begin_round(&self, owes: bool) {
        self.first_owes.store(owes, Relaxed);
        self.first_rounds.fetch_add(1, Relaxed);
    }

    /// Blocks a member until the crowd is wanted.
    pub fn wait_for_crowd(&self) {
        while self.is_solo() {
            sys::wait(&self.mode, SOLO, None);
        }
    }

    /// The first thread has read `count` messages, the first of `thread`. `waited`: it had to sleep
    /// for them, so that thread may be on another CPU.
    pub fn advance(&self, follow: &mut Follow, count: usize, thread: u32, waited: bool) {
        self.has_progressed(count as u64);
        if !self.is_solo() {
            return;
        }
        follow.waits = if waited { follow.waits + 1 } else { 0 };
        let here = self.first_cpu.load(Relaxed);
        if here != NOWHERE && follow.waits < follow.patience {
            return;
        }
        follow.waits = 0;
        let Some(cpu) = sys::cpu_of(thread).filter(|cpu| self.cpus.contains(cpu)) else {
            return;
        };
        if cpu == here {
            follow.patience = (follow.patience * 2).min(LONGEST_PATIENCE);
            return;
        }
        follow.patience = FIRST_PATIENCE;
        self.first_cpu.store(cpu, SeqCst);
        sys::pin_to(cpu);
        self.place_evictor();
        sys::confine(self.watcher.load(Relaxed), &self.cpus, cpu);
    }

    /// Whether the evictor works on the first thread's CPU.
    pub fn evictor_is_near(&self) -> bool {
        self.is_solo() && !self.evictor_apart.load(Relaxed)
    }

    /// Sends the evictor to another CPU, or back to the first thread's. It pays because
    /// neighbouring pages are moved together, with one interrupt for all of them.
    pub fn set_evictor_apart(&self, apart: bool) {
        if self.evictor_apart.swap(apart, SeqCst) != apart {
            self.place_evictor();
        }
    }

    /// Notes that a fork has shared pages: writing to them takes memory without a fault, so the
    /// evictor must get its time even when no fault waits for it.
    pub fn note_shared_memory(&self) {
        if !self.memory_is_shared.swap(true, SeqCst) {
            self.place_evictor();
        }
    }

    fn place_evictor(&self) {
        let (evictor, cpu) = (self.evictor.load(SeqCst), self.first_cpu.load(SeqCst));
        if evictor == 0 {
            return;
        }
        let near = self.evictor_is_near();
        sys::set_idle_policy(evictor, near && !self.memory_is_shared.load(SeqCst));
        if cpu == NOWHERE || !self.is_solo() {
            sys::confine(evictor, &self.cpus, NOWHERE);
        } else if near {
            sys::confine(evictor, &[cpu], NOWHERE);
        } else {
            sys::confine(evictor, &self.cpus, cpu);
        }
    }

    /// Watches the first thread until it starves, and then calls the crowd. In Crowd, goes back to
    /// Solo when it is time and keeps watching, or returns.
    pub fn watch(&self, watch: &mut Watch, uffd: &Uffd) {
        if !self.may_go_solo.load(Relaxed) {
            return;
        }
        self.watcher.store(sys::thread_id(), Relaxed);
        if !self.is_solo() {
            let now = Instant::now();
            if now < watch.since + watch.spell {
                return;
            }
            self.go_solo(watch, now);
        }
        while self.is_solo() {
            sys::wait(&self.mode, SOLO, Some(watch.step));
            if self.sees_starvation(watch, uffd) {
                return self.go_crowd(watch, Instant::now());
            }
            watch.step =
                if watch.vain_looks > 0 { WATCH_STEP } else { (watch.step * 2).min(LONGEST_STEP) };
        }
    }

    fn sees_starvation(&self, watch: &mut Watch, uffd: &Uffd) -> bool {
        let progress = self.progress.load(Relaxed);
        let stands = progress == watch.seen_progress;
        watch.seen_progress = progress;
        let rounds = self.first_rounds.load(Relaxed);
        let first_stands = rounds == watch.seen_rounds;
        watch.seen_rounds = rounds;
        // Another thread has its CPU: whatever the evictor achieves meanwhile, and also when it has
        // read the message.
        let lacks_cpu = || {
            (self.first_owes.load(Relaxed) || has_fault(uffd))
                && sys::is_runnable(self.first.load(Relaxed))
        };
        let is_vain = (stands && has_fault(uffd)) || (first_stands && lacks_cpu());
        watch.vain_looks = if is_vain { watch.vain_looks + 1 } else { 0 };
        watch.vain_looks >= STARVED_LOOKS
    }

    fn go_crowd(&self, watch: &mut Watch, now: Instant) {
        let soon = now < watch.since + 2 * LONGEST_SPELL;
        watch.spell = if soon { (watch.spell * 2).min(LONGEST_SPELL) } else { FIRST_SPELL };
        watch.since = now;
        let _ = self.mode.compare_exchange(SOLO, CROWD, SeqCst, SeqCst);
        sys::set_idle_policy(self.first.load(SeqCst), false);
        self.first_cpu.store(NOWHERE, SeqCst);
        self.place_evictor();
        sys::wake(&self.mode);
    }

    fn go_solo(&self, watch: &mut Watch, now: Instant) {
        watch.since = now;
        watch.vain_looks = 0;
        watch.step = WATCH_STEP;
        if self.mode.compare_exchange(CROWD, SOLO, SeqCst, SeqCst).is_ok() {
            self.make_first_idle();
            self.place_evictor();
        }
    }
}

impl Watch {
    #[allow(clippy::new_without_default)] // There is nothing default about it: it looks at the machine and the clock.
    pub fn new() -> Watch {
        let now = Instant::now();
        Watch {
            seen_progress: 0,
            seen_rounds: 0,
            vain_looks: 0,
            since: now,
            spell: FIRST_SPELL / 2,
            step: WATCH_STEP,
        }
    }
}

impl Follow {
    #[allow(clippy::new_without_default)] // Only the first thread makes one.
    pub fn new() -> Follow {
        Follow { patience: FIRST_PATIENCE, waits: 0 }
    }
}

fn has_fault(uffd: &Uffd) -> bool {
    let mut fds = [PollFd::new(uffd, PollFlags::IN)];
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&zero)) == Ok(1)
}
