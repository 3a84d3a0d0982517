//! Brings everything to rest for a fork.

use crate::life::steward::state::Steward;
use crate::sys;

impl Steward {
    /// Whether a fork could share far memory. If a blade can no longer share, everything there of
    /// which no page is needed is freed first.
    pub(super) fn may_fork(&mut self) -> Result<(), i32> {
        if self.core.pool.may_share().is_ok() {
            return Ok(());
        }
        {
            let _registry = self.pager.registry.lock().map_err(|_| libc::EDEADLK)?;
            self.core.gate.shut();
            self.empty_buffer();
            let thinned = {
                let _changing = self.core.layers.changing.lock();
                self.thin_out_layers()
            };
            let all = (0..self.core.space.count()).filter_map(|id| self.core.space.by_id(id));
            all.for_each(|superpage| self.free_if_empty(superpage));
            self.core.gate.open(&self.core.uffd);
            thinned?;
        }
        self.core.pool.may_share().map_err(|error| {
            if !std::mem::replace(&mut self.refusal_said, true) {
                sys::say(&format!(
                    "fork fails with ENOMEM from now on, for far memory cannot be shared with a \
                     child: {error}"
                ));
            }
            libc::ENOMEM
        })
    }

    /// Brings everything to rest so that the child's copies of the address space and of the states
    /// are of one moment: only the forking thread's faults are served, nothing is evicted, the
    /// victim buffer is empty, and everything far is in frozen layers.
    pub(super) fn prepare_fork(&mut self, thread: u32) -> Result<(), i32> {
        // First the lock, then the gate: the evictor, which reads pages of the program where they
        // are while it has the lock, may have a fault of its own.
        let _registry = self.pager.registry.lock().map_err(|_| libc::EDEADLK)?;
        self.core.gate.shut();
        self.core.note_sharing();
        self.empty_buffer();
        let result = {
            let _changing = self.core.layers.changing.lock();
            self.freeze()
        };
        match result {
            Ok(()) => self.core.gate.admit(thread, &self.core.uffd),
            Err(_) => self.core.gate.open(&self.core.uffd),
        }
        result
    }

    /// Waits until the evictor has written everything it moved out, and makes all victims far.
    pub(super) fn empty_buffer(&self) {
        let mut taken = Vec::new();
        loop {
            self.core.frames.take_trays(usize::MAX, &mut taken);
            self.core.frames.release(&self.core.uffd, &self.core.pagemap, &mut taken);
            if self.core.frames.is_empty() {
                return;
            }
            self.core.budget.kick();
            sys::pause();
        }
    }

    /// Freezes the current layer once a layer is free for a new one in parent and child.
    fn freeze(&mut self) -> Result<(), i32> {
        self.thin_out_layers()?;
        self.freeze_layers().map_err(|error| {
            sys::say(&format!("fork is refused, for far memory cannot be shared: {error}"));
            libc::ENOMEM
        })
    }
}
