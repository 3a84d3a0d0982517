//! The pager of a sidecar: a process of its own that shares the program's address space and nothing else.
//!
//! It learns of memory calls from userfaultfd's events ([`crate::space::layout`]) and of new memory from the kernel's list of
//! mappings ([`crate::space::maps`]). Its own memory is in the same address space: it is known, never registered, and not
//! inherited by the program's children.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use farpool_board::Board;
use farpool_uffd::{Pagemap, Uffd};
use farpool_units::at_most;

use crate::abort::{self, fail_closed};
use crate::core::Core;
use crate::error::StartError;
use crate::life::children::child::Child;
use crate::life::children::{Children, Keeper, handover, inherit};
use crate::life::files::Files;
use crate::life::steward::{Left, Steward, unregister_all};
use crate::life::watch::Watch;
use crate::life::{activation, blades};
use crate::pager::Pager;
use crate::space::birth;
use crate::space::maps::{self, Eligible};
use crate::sys::{self, apart};

/// The order to leave is looked for this often while there is nothing else to do.
const ORDER_STEP: Duration = Duration::from_millis(100);

/// What a sidecar starts with.
#[derive(Debug)]
pub struct Attachment {
    pub board: OwnedFd,
    /// Of this address space, past the handshake on the features `PAGER` and `EVENTS`.
    pub uffd: Uffd,
    /// Process id of the program.
    pub program: u32,
    /// Memory of the sidecar that the pager did not map itself, as (start, end): each range that there is when it is
    /// called.
    pub own_ranges: fn() -> Vec<(usize, usize)>,
    pub keeper: Keeper,
    /// `uffd` is one that the program got by fork, and its parent's pager hands over with this where its pages are.
    pub inherited: Option<OwnedFd>,
    /// Open files of this process in /proc, where it may not open them itself.
    pub pagemap: Option<OwnedFd>,
    pub memory: Option<OwnedFd>,
    /// No seccomp filter keeps it from having executable memory.
    pub may_execute: bool,
}

/// Pages of the program's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) mapped: u64,
    pub(crate) resident: u64,
    /// Private and writable: a reservation that becomes memory (mprotect, or a mapping over it) shows only here.
    pub(crate) data: u64,
}

/// The pager of a program that this process is the sidecar of.
#[derive(Debug)]
pub struct Attached {
    pager: &'static Pager,
    files: Mutex<Option<Files>>,
    statm: OwnedFd,
    list: OwnedFd,
    own_ranges: fn() -> Vec<(usize, usize)>,
    keeper: Keeper,
    inherited: Mutex<Option<OwnedFd>>,
    /// A child is this pager's, and no more its parent's.
    has_claimed: AtomicBool,
    children: Children,
    must_leave: AtomicBool,
    may_execute: bool,
}

impl Attached {
    /// Prepares everything; starts nothing. The value lives for ever.
    pub fn prepare(attachment: Attachment) -> Result<&'static Attached, StartError> {
        abort::end_loudly();
        sys::begin_to_count_ticks();
        sys::set_program(attachment.program);
        let wish = apart::address(Board::BYTES);
        let board: &'static Board = Box::leak(Box::new(Board::adopt(&attachment.board, wish)?));
        let (start, bytes) = board.range();
        sys::keep_from_children(start, bytes)?;
        let pager = Pager::with_board(board, Path::new(""))?;
        pager.slot().set_name(program_name(sys::program_in_proc()).as_bytes());
        let of_process = |file| move |error| StartError::of_process(file, error);
        let files = Files {
            uffd: attachment.uffd,
            pagemap: match attachment.pagemap {
                Some(file) => Pagemap::adopt(file),
                None => Pagemap::open().map_err(of_process("pagemap"))?,
            },
            memory: match attachment.memory {
                Some(file) => file,
                None => sys::open_memory().map_err(of_process("mem"))?,
            },
        };
        let attached: &'static Attached = Box::leak(Box::new(Attached {
            pager,
            files: Mutex::new(Some(files)),
            statm: crate::shared::budget::open_statm()?,
            list: sys::open_maps().map_err(of_process("maps"))?,
            own_ranges: attachment.own_ranges,
            keeper: attachment.keeper,
            inherited: Mutex::new(attachment.inherited),
            has_claimed: AtomicBool::new(false),
            children: Children::new()?,
            must_leave: AtomicBool::new(false),
            may_execute: attachment.may_execute,
        }));
        birth::set_parent(attached.children.unsettled(), attached.keeper.born);
        Ok(attached)
    }

    /// Pages the program until the order to leave comes; the calling thread becomes the steward. If the program ends,
    /// this process is to be ended by another thread. `ready` is called when the program's memory is registered: from
    /// then on it does not grow unseen; and once before, when it is watched and the limit is not near.
    pub fn serve(&'static self, ready: impl Fn()) -> Result<Left, StartError> {
        let pager = self.pager;
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(files) = files else {
            return Err(std::io::Error::other("a sidecar serves once").into());
        };
        sys::be_prompt(true);
        // Before it is urgent: a new thread waits for its turn on a CPU.
        let core = pager.make_core(files, self.may_execute)?;
        core.standstill.set_asker(self.keeper.standstill);
        activation::start_threads(pager, core)?;
        let inherited = self.inherited.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(memory) = inherited {
            return self.serve_inherited(core, memory, ready);
        }
        let mut watch = Watch::new()?;
        let mut is_watched = false;
        while let Some(pause) = watch.look_again(pager) {
            if !std::mem::replace(&mut is_watched, true) {
                ready();
            }
            if self.must_leave() {
                unregister_all(core, &pager.lock_registry());
                return Ok(Left::Clean);
            }
            let bell = pager.requests.bell();
            pager.requests.wait(bell, pause.min(ORDER_STEP));
        }
        let leave_for = |error| {
            // Nothing is moved out before there is a pool: the program can go on without.
            unregister_all(core, &pager.lock_registry());
            error
        };
        let eligible = self.eligible().map_err(StartError::from).map_err(leave_for)?;
        {
            let mut registry = pager.lock_registry();
            for range in eligible.into_iter().filter(|range| core.is_movable(range.protection)) {
                registry.insert(range.region(false));
            }
        }
        activation::activate(pager, core);
        ready();
        core.pool.set(blades::connect(core).map_err(leave_for)?);
        sys::be_prompt(false);
        // From here on pages may be away: to leave the program now would have it read zeros.
        Ok(begin(pager, core).attend(self))
    }

    /// As [`Attached::serve`], for a child of a program that is paged: pages of it are away already.
    fn serve_inherited(
        &'static self,
        core: &'static Core,
        memory: OwnedFd,
        ready: impl Fn(),
    ) -> Result<Left, StartError> {
        let handover = inherit::read(&memory)?;
        let (pool, blades) = blades::connect(core)?;
        inherit::take_over(core, &pool, &handover)?;
        // Before: were this process killed in between, its warden must not take the child for its parent's.
        self.has_claimed.store(true, SeqCst);
        if !handover::claim(&memory) {
            self.has_claimed.store(false, SeqCst);
            return Err(std::io::Error::other("its parent's pager serves it again").into());
        }
        core.pool.set((pool, blades));
        core.note_fork();
        // Faults are served here now.
        (self.keeper.taken)();
        let mut steward = begin(self.pager, core);
        steward.adopt_mappings(self);
        // The keeper counts it no more from here on.
        let resident = crate::shared::budget::read_resident(&self.statm).unwrap_or_default();
        crate::shared::budget::publish(self.pager.slot(), resident);
        self.pager.set_active();
        activation::begin_to_move(core);
        ready();
        sys::be_prompt(false);
        Ok(steward.attend(self))
    }

    /// The program stands still, which the evictor wanted: returns when it may go on. Says whether
    /// anybody wanted it.
    pub fn stand_still(&self) -> bool {
        self.pager.core().is_some_and(|core| core.standstill.begin())
    }

    /// Has everything brought in; [`Attached::serve`] then returns.
    pub fn leave(&self) {
        self.must_leave.store(true, SeqCst);
        self.pager.requests.ring();
        if let Some(core) = self.pager.core() {
            core.layout.ring();
        }
    }

    /// Whether a child of the program still has to get pages from this process.
    pub fn owes_children(&self) -> bool {
        self.pager.core().is_some_and(|core| core.layout.owes_children())
    }

    /// Whether pages may be away: without a pager the program, or a child of it, would read zeros. It takes no lock and
    /// allocates nothing.
    pub fn may_owe_pages(&self) -> bool {
        let has_pool = |core: &Core| core.pool.is_set();
        self.has_claimed.load(SeqCst) || self.pager.core().is_some_and(has_pool)
    }

    pub(crate) fn child_is_settled(&self, number: u64) {
        self.children.unsettled().note_settled(number);
        (self.keeper.settled)(number);
    }

    /// Serves a child that lacks pages.
    pub(crate) fn serve_child(&'static self, child: Child) -> Result<(), StartError> {
        let Some(core) = self.pager.core() else {
            return Err(std::io::Error::other("the pager has not begun").into());
        };
        self.children.serve(self.pager, core, self.keeper, child)
    }

    /// Gives all children all that they lack.
    pub fn finish_children(&self) {
        self.children.finish_all();
    }

    /// Those who are served, to be handed over to pagers of their own.
    pub fn children(&self) -> &Children {
        &self.children
    }

    pub(crate) fn must_leave(&self) -> bool {
        self.must_leave.load(SeqCst)
    }

    /// What the kernel counts of the address space.
    pub(crate) fn sizes(&self) -> Sizes {
        let [mapped, resident, _, _, _, data, ..] =
            sys::read_numbers(&self.statm).unwrap_or_default();
        Sizes { mapped, resident, data }
    }

    /// The program's memory that can be far, by the kernel's list of mappings.
    pub(crate) fn eligible(&self) -> Result<Vec<Eligible>, std::io::Error> {
        self.eligible_from(self.threshold_bytes())
    }

    /// As [`Attached::eligible`], with mappings of at least so many bytes.
    pub(crate) fn eligible_from(&self, bytes: usize) -> Result<Vec<Eligible>, std::io::Error> {
        let text = sys::read_whole(&self.list)?;
        // After the list was read: what was mapped for it, or by another thread meanwhile, is among these.
        let own = self.all_own_ranges();
        Ok(maps::eligible(&text, &own, bytes))
    }

    /// Mappings that are shorter stay local.
    pub(crate) fn threshold_bytes(&self) -> usize {
        at_most(self.pager.settings.threshold_bytes)
    }

    /// All memory that is the sidecar's own, as (start, end), in order.
    pub fn all_own_ranges(&self) -> Vec<(usize, usize)> {
        let mut own = (self.own_ranges)();
        let mapped = sys::all_own_mappings().into_iter();
        own.extend(mapped.chain([self.pager.board.range()]).map(|(at, bytes)| (at, at + bytes)));
        if let Some(core) = self.pager.core() {
            let (start, bytes) = core.frames.range();
            own.push((start, start + bytes));
        }
        own.sort_unstable();
        own
    }
}

/// Pages may be away already, or will be: to leave the program now would have it read zeros.
fn begin(pager: &'static Pager, core: &'static Core) -> Steward {
    Steward::new(pager, core)
        .unwrap_or_else(|error| fail_closed(&format!("the steward cannot begin: {error}")))
}

fn program_name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}
