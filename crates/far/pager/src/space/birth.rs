//! The birth of a child: as soon as the event of the fork is read, the keeper gets a duplicate of
//! the child's userfaultfd. If this process ended before that, the child would read zeros.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard, OnceLock};

use farpool_kernel::lock;

use crate::abort::fail_closed;

/// Children that are born and not settled, whether served yet or not.
#[derive(Debug, Default)]
pub struct Unsettled(Mutex<BTreeSet<u64>>);

impl Unsettled {
    /// Notes that a child was born.
    fn note_birth(&self, number: u64) {
        self.lock().insert(number);
    }

    /// Notes that a child needs no other process any more.
    pub fn note_settled(&self, number: u64) {
        self.lock().remove(&number);
    }

    /// Whether this child was born and is not settled.
    pub fn contains(&self, number: u64) -> bool {
        self.lock().contains(&number)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        lock(&self.0)
    }
}

/// Where births are reported.
#[derive(Debug)]
struct Parent {
    unsettled: &'static Unsettled,
    /// Gives the keeper a duplicate of the child's userfaultfd.
    tell_keeper: fn(u64, &OwnedFd),
}

static PARENT: OnceLock<Parent> = OnceLock::new();
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);
/// Numbers of children whose events were read but not applied, by the descriptors of their
/// userfaultfds.
static UNAPPLIED: Mutex<BTreeMap<RawFd, u64>> = Mutex::new(BTreeMap::new());

/// Makes births be noted in `unsettled`, and then reported to the keeper. The first call counts.
pub fn set_parent(unsettled: &'static Unsettled, tell_keeper: fn(u64, &OwnedFd)) {
    let _ = PARENT.set(Parent { unsettled, tell_keeper });
}

/// Gives a child whose event was just read a number, and the keeper a duplicate of its userfaultfd.
/// Returns the number.
pub fn announce(uffd: &OwnedFd) -> u64 {
    let number = NEXT_NUMBER.fetch_add(1, SeqCst);
    if let Some(parent) = PARENT.get() {
        parent.unsettled.note_birth(number);
        (parent.tell_keeper)(number, uffd);
    }
    number
}

/// As [`announce`], for a child that is served later.
pub fn announce_unapplied(descriptor: RawFd) {
    // SAFETY: the kernel made the descriptor for this process when the event was read, and no
    // thread has closed it.
    let uffd = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let duplicate = uffd.try_clone_to_owned().unwrap_or_else(|error| {
        fail_closed(&format!("a child's userfaultfd cannot be given to the keeper: {error}"))
    });
    let number = announce(&duplicate);
    lock(&UNAPPLIED).insert(descriptor, number);
}

/// Takes the number of a child that was announced.
pub fn number_of(descriptor: RawFd) -> u64 {
    let number = lock(&UNAPPLIED).remove(&descriptor);
    number.unwrap_or_else(|| fail_closed("a fork is applied that was not read"))
}
