//! What the pager does when the program gives rights up: see [`crate::sys::rights`].

use std::ffi::c_int;

use crate::life::process::Pager;
use crate::sys::rights::{begin_broadcast, end_broadcast};

impl Pager {
    /// The program is about to give up rights, or part of its file system: first opens everything
    /// that needs them.
    pub fn open_before_rights_go(&'static self) {
        if self.is_of_this_process() {
            self.start_steward();
            self.rights.wait_until_opened();
        }
    }

    /// Makes the C library change the user or groups of all threads.
    pub fn change_ids(&'static self, change: impl FnOnce() -> c_int) -> c_int {
        if !self.is_of_this_process() {
            return change();
        }
        self.open_before_rights_go();
        if !self.rights.lock() {
            return change();
        }
        begin_broadcast();
        let crew = self.core().map(|core| &core.crew);
        crew.inspect(|crew| crew.leave_solo_for_good());
        let result = change();
        crew.inspect(|crew| crew.may_go_solo_again());
        end_broadcast();
        self.rights.unlock();
        result
    }
}
