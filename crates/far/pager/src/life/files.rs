//! Files that only a process with rights can open: opened before the program may give up its
//! rights.

use std::os::fd::OwnedFd;

use farpool_uffd::{Pagemap, Uffd, features};

use crate::error::StartError;
use crate::sys;

/// The files that only a process with rights can open.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) uffd: Uffd,
    pub(crate) pagemap: Pagemap,
    pub(crate) memory: OwnedFd,
}

impl Files {
    pub(crate) fn open() -> Result<Files, StartError> {
        let of_process = |file| move |error| StartError::of_process(file, error);
        Ok(Files {
            uffd: Uffd::open(features::PAGER, true)?,
            pagemap: Pagemap::open().map_err(of_process("pagemap"))?,
            memory: sys::open_memory().map_err(of_process("mem"))?,
        })
    }
}

/// Descriptors that are opened after memory is registered: to the blades, the keeper, and the
/// steward's own. With one fewer a pager with a private blade was stopped; more blades take more.
pub(crate) const LATE_FILES: usize = 4;
