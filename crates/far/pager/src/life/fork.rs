//! fork: the child starts as an exact copy of the parent, far memory included.
//!
//! Userfaultfd registration is not inherited, so between clone and the child's handler a missing
//! page would read as zeros. In that window only the C library's own fork code runs, and what it
//! touches (locks of open files) is made resident beforehand by the preload library while nothing
//! can be evicted. It also clears thread-specific data of other threads, which may be far: its
//! writes there are dropped. The child's handler, which runs before any other, then starts a pager
//! of its own: it attaches the frozen layers, settles the states it inherits
//! ([`crate::life::steward`]), registers all far ranges, and only then lets the child continue.
//!
//! Nothing that the forking thread waits for with the gate shut may be held by another thread that
//! waits for a page: the registry's lock is not taken by threads of the program once memory can be
//! far, and the preload library takes the C library's locks before the gate shuts.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use farpool_board::CONNECTING;

use crate::life::identity::claim_slot;
use crate::life::process::Pager;
use crate::life::requests::{Kind, Request};
use crate::space::registry::Registry;
use crate::{abort, sys};

/// A fork under way, from before the fork until after it in parent and child.
#[derive(Debug)]
pub struct Fork {
    /// Held across the fork, so that the child's copies are consistent and are unlocked by its own
    /// handler. The doors only matter, and are only held, while the process is native.
    registry: Option<MutexGuard<'static, Registry>>,
    doors: Option<MutexGuard<'static, ()>>,
    active: bool,
    refused: bool,
}

impl Pager {
    /// Whether a fork could share far memory with the child; the errno if not. If it is found
    /// impossible later, when the C library has begun the fork, only the child can be ended.
    ///
    /// # Errors
    /// ENOMEM: a blade that holds memory of this process can no longer share it.
    pub fn may_fork(&self) -> Result<(), i32> {
        if !self.is_active() {
            return Ok(());
        }
        let request = Request { kind: Kind::MayFork, start: 0, end: 0, extra: 0, more: 0 };
        self.requests.call(request).map(|_| ())
    }

    /// Brings the pager to rest. To be called right before fork, by the thread that forks.
    pub fn before_fork(&'static self) -> Fork {
        if !self.is_active() {
            let doors = self.lock_doors();
            if !self.is_active() {
                let registry = Some(self.lock_registry());
                return Fork { registry, doors: Some(doors), active: false, refused: false };
            }
        }
        let thread = sys::thread_id() as usize;
        let request = Request { kind: Kind::PrepareFork, start: thread, end: 0, extra: 0, more: 0 };
        let refused = self.requests.call(request).is_err();
        let registry = (!refused).then(|| self.lock_registry());
        Fork { registry, doors: None, active: true, refused }
    }

    /// After fork, in the parent.
    pub fn after_fork_in_parent(&self, mut fork: Fork) {
        (fork.registry, fork.doors) = (None, None);
        if fork.active && !fork.refused {
            let request = Request { kind: Kind::FinishFork, start: 0, end: 0, extra: 0, more: 0 };
            if self.requests.call(request).is_err() {
                abort::fail_closed("the pager did not resume after fork");
            }
        }
    }

    /// After fork, in the child, before anything else runs.
    pub fn after_fork_in_child(&'static self, mut fork: Fork) {
        (fork.registry, fork.doors) = (None, None);
        self.requests.reset();
        self.rights.reset();
        self.growth.reset();
        self.core.store(std::ptr::null_mut(), SeqCst);
        match claim_slot(self.board) {
            Ok(slot) => {
                if fork.active {
                    // The parent may end now, and its blades must not be taken for left.
                    slot.blades_version.store(CONNECTING, SeqCst);
                }
                self.slot.store(std::ptr::from_ref(slot).cast_mut(), SeqCst);
            }
            Err(error) => abort::fail_closed(&format!("the child has no far memory: {error}")),
        }
        if fork.refused {
            abort::fail_closed("fork could not share far memory with the child");
        }
        if !fork.active {
            self.lock_registry().take_unshared();
        }
        if fork.active {
            self.ready.store(0, SeqCst);
            self.spawn_steward(true);
            while self.ready.load(SeqCst) == 0 {
                sys::wait(&self.ready, 0, None);
            }
        } else if self.steward_started.load(Relaxed) {
            self.spawn_steward(false);
        }
    }
}
