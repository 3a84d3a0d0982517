//! The pager of a sidecar: what it starts with, and what its threads share.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use farpool_board::Board;
use farpool_uffd::{Pagemap, Uffd};
use farpool_units::at_most;

use crate::abort;
use crate::core::Core;
use crate::error::StartError;
use crate::life::children::child::Child;
use crate::life::children::{Children, Keeper};
use crate::life::files::Files;
use crate::life::process::Pager;
use crate::space::birth;
use crate::space::maps::{self, Eligible};
use crate::sys::{self, apart};

/// The pager of a program that this process is the sidecar of.
#[derive(Debug)]
pub struct Attached {
    pub(super) pager: &'static Pager,
    pub(super) files: Mutex<Option<Files>>,
    pub(super) statm: OwnedFd,
    pub(super) list: OwnedFd,
    own_ranges: fn() -> Vec<(usize, usize)>,
    pub(super) keeper: Keeper,
    pub(super) inherited: Mutex<Option<OwnedFd>>,
    /// The child belongs to this pager, and no longer to its parent's.
    pub(super) has_claimed: AtomicBool,
    pub(super) children: Children,
    pub(super) must_leave: AtomicBool,
    pub(super) may_execute: bool,
}

/// What a sidecar starts with.
#[derive(Debug)]
pub struct Attachment {
    pub board: OwnedFd,
    /// The userfaultfd of this address space, past the handshake on the features `PAGER` and
    /// `EVENTS`.
    pub uffd: Uffd,
    /// Process id of the program.
    pub program: u32,
    /// Memory of the sidecar that the pager did not map itself, as (start, end): all ranges that
    /// exist when it is called.
    pub own_ranges: fn() -> Vec<(usize, usize)>,
    pub keeper: Keeper,
    /// The handover of a child that its parent's pager passes on: where its pages are. `uffd` is
    /// then one that the program got by fork.
    pub inherited: Option<OwnedFd>,
    /// Open files of this process in /proc, if it may not open them itself.
    pub pagemap: Option<OwnedFd>,
    pub memory: Option<OwnedFd>,
    /// No seccomp filter forbids it executable memory.
    pub may_execute: bool,
}

/// Pages of the program's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) mapped: u64,
    pub(crate) resident: u64,
    /// Private and writable: a reservation that becomes memory (mprotect, or a mapping over it)
    /// shows only here.
    pub(crate) data: u64,
}

fn program_name(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

impl Attached {
    /// To be called when the program stands still, as the evictor wanted: returns when it may
    /// continue. True if a thread wanted it.
    pub fn stand_still(&self) -> bool {
        self.pager.core().is_some_and(|core| core.standstill.begin())
    }

    /// Orders everything to be brought in, after which [`Attached::serve`] returns.
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

    /// Whether pages may be far: without a pager the program, or a child of it, would read zeros.
    /// Takes no lock and allocates nothing.
    pub fn may_owe_pages(&self) -> bool {
        let has_pool = |core: &Core| core.pool.is_set();
        self.has_claimed.load(SeqCst) || self.pager.core().is_some_and(has_pool)
    }

    pub(crate) fn child_is_settled(&self, number: u64) {
        self.children.unsettled().note_settled(number);
        (self.keeper.settled)(number);
    }

    /// Orders that all children get all pages that they lack.
    pub fn finish_children(&self) {
        self.children.finish_all();
    }

    /// The children that are served, to be handed over to pagers of their own.
    pub fn children(&self) -> &Children {
        &self.children
    }

    pub(crate) fn must_leave(&self) -> bool {
        self.must_leave.load(SeqCst)
    }

    /// The kernel's counts for the address space.
    pub(crate) fn sizes(&self) -> Sizes {
        let [mapped, resident, _, _, _, data, ..] =
            sys::read_numbers(&self.statm).unwrap_or_default();
        Sizes { mapped, resident, data }
    }

    /// The program's memory that can be far, by the kernel's list of mappings.
    pub(crate) fn eligible(&self) -> Result<Vec<Eligible>, std::io::Error> {
        self.eligible_from(self.threshold_bytes())
    }

    /// As [`Attached::eligible`], with mappings of at least `bytes`.
    pub(crate) fn eligible_from(&self, bytes: usize) -> Result<Vec<Eligible>, std::io::Error> {
        let text = sys::read_whole(&self.list)?;
        // After the list was read, so that these include what was mapped for it, or by another
        // thread meanwhile.
        let own = self.all_own_ranges();
        Ok(maps::eligible(&text, &own, bytes))
    }

    /// The threshold: shorter mappings stay local.
    pub(crate) fn threshold_bytes(&self) -> usize {
        at_most(self.pager.settings.threshold_bytes)
    }

    /// All memory of the sidecar itself, as (start, end), in order.
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

    /// Prepares everything without starting a thread. The value lives for ever.
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

    /// Serves a child that lacks pages.
    pub(crate) fn serve_child(&'static self, child: Child) -> Result<(), StartError> {
        let Some(core) = self.pager.core() else {
            return Err(std::io::Error::other("the pager has not begun").into());
        };
        self.children.serve(self.pager, core, self.keeper, child)
    }
}
