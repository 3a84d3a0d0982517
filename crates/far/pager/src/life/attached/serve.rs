//! Pages the program of a sidecar, on the calling thread, until it is told to leave.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use farpool_kernel::lock;

use crate::abort::fail_closed;
use crate::core::Core;
use crate::error::StartError;
use crate::life::attached::state::Attached;
use crate::life::children::{handover, inherit};
use crate::life::process::Pager;
use crate::life::steward::{Left, Steward, unregister_all};
use crate::life::watch::Watch;
use crate::life::{activation, blades};
use crate::sys;

/// How often the order to leave is checked for while there is nothing else to do.
const ORDER_STEP: Duration = Duration::from_millis(100);

impl Attached {
    /// Pages the program until the order to leave comes; the calling thread becomes the steward. If
    /// the program ends, another thread has to end this process. `ready` is called when the
    /// program's memory is registered, from when on it does not grow unseen; and once before, when
    /// the program is watched and the limit is not near.
    pub fn serve(&'static self, ready: impl Fn()) -> Result<Left, StartError> {
        let pager = self.pager;
        let files = lock(&self.files).take();
        let Some(files) = files else {
            return Err(std::io::Error::other("a sidecar serves once").into());
        };
        sys::be_prompt(true);
        // Before it is urgent: a new thread waits for its time on a CPU.
        let core = pager.make_core(files, self.may_execute)?;
        core.standstill.set_asker(self.keeper.standstill);
        activation::start_threads(pager, core)?;
        let inherited = lock(&self.inherited).take();
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
            // Nothing is moved out before there is a pool: the program can continue without a
            // pager.
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
        // From here on pages may be far: if the pager left now, the program would read zeros.
        Ok(begin(pager, core).attend(self))
    }

    /// As [`Attached::serve`], for a child of a paged program: pages of it are far already.
    fn serve_inherited(
        &'static self,
        core: &'static Core,
        memory: OwnedFd,
        ready: impl Fn(),
    ) -> Result<Left, StartError> {
        let handover = inherit::read(&memory)?;
        let tokens: Vec<_> = handover.layers.iter().flatten().map(|layer| *layer.token).collect();
        let (pool, blades) = blades::connect_inherited(core, &tokens, |pool| {
            inherit::take_over(core, pool, &handover)
        })?;
        // Set before the claim: if this process is killed in between, its warden must not take the
        // child for its parent's.
        self.has_claimed.store(true, SeqCst);
        if !handover::claim(&memory) {
            self.has_claimed.store(false, SeqCst);
            return Err(std::io::Error::other("its parent's pager serves it again").into());
        }
        core.pool.set((pool, blades));
        core.note_sharing();
        // Faults are served here now.
        (self.keeper.taken)();
        let mut steward = begin(self.pager, core);
        steward.adopt_mappings(self);
        // From here on the keeper no longer counts it.
        let resident = crate::shared::budget::read_resident(&self.statm).unwrap_or_default();
        crate::shared::budget::publish(self.pager.slot(), resident);
        self.pager.set_active();
        activation::begin_to_move(core);
        ready();
        sys::be_prompt(false);
        Ok(steward.attend(self))
    }
}

/// Makes the steward, or ends the process: pages may be far already, or will be, and if the pager
/// left now the program would read zeros.
pub(crate) fn begin(pager: &'static Pager, core: &'static Core) -> Steward {
    Steward::new(pager, core)
        .unwrap_or_else(|error| fail_closed(&format!("the steward cannot begin: {error}")))
}
