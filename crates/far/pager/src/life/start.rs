//! How the pager of a process begins: its steward is started, watches, and makes it active.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use farpool_board::ProcessState;
use farpool_pool::Pool;
use farpool_uffd::register_mode;

use crate::core::{Core, Parts};
use crate::error::StartError;
use crate::life::dialing::ByKeeper;
use crate::life::files::{Files, LATE_FILES};
use crate::life::process::Pager;
use crate::life::steward::{self, Steward};
use crate::life::uffd_guardian::give_duplicate;
use crate::life::watch::Watch;
use crate::life::{activation, blades};
use crate::{abort, sys};

impl Pager {
    pub(crate) fn start_steward(&'static self) {
        if self.steward_started.swap(true, SeqCst) {
            return;
        }
        self.spawn_steward(false);
    }

    pub(crate) fn spawn_steward(&'static self, inherits: bool) {
        let body = Box::new(move || {
            if let Err(error) = self.be_steward(inherits) {
                if !inherits && !self.is_active() && error.is_lack_of_descriptors() {
                    return self.stay_native();
                }
                abort::fail_closed(&format!("far memory cannot be used in this process: {error}"));
            }
        });
        if let Err(error) = sys::spawn(c"farpool-steward", true, body) {
            abort::fail_closed(&format!("the pager's thread cannot be started: {error}"));
        }
    }

    /// Nothing was moved out, so the program can continue; the keeper reports it, or ends it.
    fn stay_native(&self) {
        self.slot().set_state(ProcessState::Outside);
        self.growth.open();
    }

    fn be_steward(&'static self, inherits: bool) -> Result<(), StartError> {
        sys::leave_descriptor_table()?;
        if !inherits {
            self.open_desk()?;
        }
        let mut watch = Watch::new()?;
        // Opened at once: the program may later give up the rights for it.
        let files = match Files::open() {
            Err(StartError::Hidden { .. }) if !inherits => None,
            files => Some(files?),
        };
        self.rights.set_opened();
        sys::be_prompt(true);
        if !inherits {
            watch.while_small(self);
        }
        let files = match files {
            Some(files) => files,
            None => self.open_at_last(&mut watch)?,
        };
        let core = self.make_core(files, false)?;
        activation::start_threads(self, core)?;
        if core.settings.secures_tcp {
            sys::set_dialer(Arc::new(ByKeeper::new(self.board_path)));
        }
        if inherits {
            let attach = |pool: &Pool| self.inheritance.attach(core, pool);
            let layers = self.inheritance.tokens();
            core.pool.set(blades::connect_inherited(core, &layers, attach)?);
            core.note_sharing();
            steward::settle_inherited(self, core);
            activation::activate(self, core);
            self.ready.store(1, SeqCst);
            sys::wake(&self.ready);
        } else {
            watch.until_near(self);
            // A lack that is found before memory is registered does no harm.
            sys::find_room_for_files(LATE_FILES)?;
            activation::activate(self, core);
            core.pool.set(blades::connect(core)?);
        }
        sys::be_prompt(false);
        give_duplicate(self.board_path, &core.uffd, self.slot().pid.load(Relaxed))?;
        Steward::new(self, core)?.serve()
    }

    /// Opens the files when the limit is near. A process whose files in /proc are root's may still
    /// become another program before it needs them, as most processes do that changed their user
    /// and forked.
    fn open_at_last(&self, watch: &mut Watch) -> Result<Files, StartError> {
        watch.until_near(self);
        Files::open()
    }

    /// Makes the core and registers the victim buffer. `may_execute`: no seccomp filter forbids
    /// this process executable memory.
    pub(crate) fn make_core(
        &'static self,
        files: Files,
        may_execute: bool,
    ) -> Result<&'static Core, StartError> {
        let Files { uffd, pagemap, memory } = files;
        let parts = Parts {
            uffd,
            pagemap,
            memory,
            settings: self.board.header().settings(),
            board: self.board,
            slot: self.slot(),
            space: &self.space,
            registry: &self.registry,
            executes: may_execute && !sys::denies_execution(),
        };
        let core: &'static Core = Box::leak(Box::new(Core::new(parts)?));
        let (start, bytes) = core.frames.range();
        core.uffd.register(start, bytes, register_mode::MISSING)?;
        self.core.store(std::ptr::from_ref(core).cast_mut(), SeqCst);
        Ok(core)
    }
}
