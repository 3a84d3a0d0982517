//! Orders to the thread that serves children, and the keeper's callbacks about children.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use farpool_kernel::lock;
use rustix::event::{EventfdFlags, eventfd};

use crate::life::children::child::Child;
use crate::space::birth::Unsettled;

/// The answer of [`Children::cede`] if the child needs no other process any more.
pub const SETTLED: &str = "SETTLED";
/// The longest wait for a child that is to be handed over: the pages that it has moved are fetched
/// first.
const CEDE_TIME: Duration = Duration::from_secs(5);

/// Orders to the thread that serves the children of a program.
#[derive(Debug)]
pub struct Children {
    pub(super) orders: Mutex<VecDeque<Order>>,
    /// Readable when there are orders.
    pub(super) bell: OwnedFd,
    pub(super) has_begun: AtomicBool,
    /// Children that are born and not settled, served or not yet.
    pub(super) unsettled: Unsettled,
}

impl Children {
    pub fn new() -> Result<Children, std::io::Error> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Children {
            orders: Mutex::default(),
            bell,
            has_begun: AtomicBool::new(false),
            unsettled: Unsettled::default(),
        })
    }

    /// Prepares a child to be taken over by a pager of its own. Its faults wait until that pager
    /// serves them, or until [`Children::take_back`].
    pub fn cede(&self, number: u64) -> Result<OwnedFd, String> {
        if !self.unsettled.contains(number) {
            return Err(SETTLED.into());
        }
        if !self.has_begun.load(SeqCst) {
            return Err("it is not served yet".into());
        }
        let (answer, answered) = channel();
        self.order(Order::Cede { number, answer });
        answered.recv_timeout(CEDE_TIME).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => {
                // It may still be ceded later.
                self.take_back(number);
                Err("its pages that were moved have not come in time".into())
            }
            RecvTimeoutError::Disconnected => Err("nobody serves it".into()),
        })
    }

    /// Notes that the child's own pager has what it needs.
    pub fn has_been_taken(&self, number: u64) {
        self.order(Order::Taken(number));
    }

    /// Takes a child back whose own pager did not start to work, and has changed nothing.
    pub fn take_back(&self, number: u64) {
        self.order(Order::Returned(number));
    }

    /// Orders that all children get all pages that they lack.
    pub fn finish_all(&self) {
        self.order(Order::FinishAll);
    }

    /// Takes ceded children back because the process that would report on them has ended.
    pub fn reclaim(&self) {
        self.order(Order::Reclaim);
    }

    /// Children that are born and not settled, served or not yet.
    pub fn unsettled(&self) -> &Unsettled {
        &self.unsettled
    }

    pub(super) fn order(&self, order: Order) {
        lock(&self.orders).push_back(order);
        // It fails when the bell has rung 2^64 times unheard.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    pub(super) fn next_order(&self) -> Option<Order> {
        lock(&self.orders).pop_front()
    }

    /// Silences the bell.
    pub(super) fn hear(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
    }
}

/// Callbacks of the keeper, which makes the program stand still, and keeps a duplicate of a child's
/// userfaultfd as long as the child lacks pages: if this process ended before, the child would read
/// zeros.
#[derive(Clone, Copy, Debug)]
pub struct Keeper {
    /// A child was born, with this number.
    pub born: fn(u64, &OwnedFd),
    /// The child lacks nothing any more, or has ended.
    pub settled: fn(u64),
    /// This pager serves a child that another one has handed over to it.
    pub taken: fn(),
    /// The program is to stand still for a moment, see [`crate::sys::standstill`].
    pub standstill: fn(),
}

/// Orders to the thread that serves children.
#[derive(Debug)]
pub(super) enum Order {
    Serve(Box<Child>),
    /// Prepare a child for a sidecar of its own; the answer is its [`super::handover::Handover`],
    /// in memory. Only the error [`SETTLED`] means that it needs none.
    Cede {
        number: u64,
        answer: Sender<Result<OwnedFd, String>>,
    },
    /// A ceded child's own pager has the places of its pages; or it has not, and the child is this
    /// pager's again.
    Taken(u64),
    Returned(u64),
    /// All children get all pages that they lack: this pager is to end.
    FinishAll,
    /// Ceded children are served here again, unless their own pagers have begun: no process reports
    /// on them any more.
    Reclaim,
}

impl AsFd for Children {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
